/*
 * rgaps.h - messages in GPU memory, published and read by topic: six functions, and three for
 * programs that need timeouts.
 *
 * One process publishes on a topic, others read; each message exists once in the memory of a
 * device (or of the host), for any number of readers. Link with -lfabricast. The full interface,
 * with sizes, timeouts and metadata, is in fabricast.h; both can be used in one program.
 *
 * No service has to be started: one of the processes with the same directory serves the node.
 * All other settings are environment variables:
 *
 *   FABRICAST_DEVICE               (or FABRICAST_TOPIC_MEMORY) memory of the messages:
 *                                  host (if unset), cuda:0, cuda:1, ..., or emulated:0,
 *                                  a device emulated in host memory. Pushed pointers
 *                                  may be in any memory
 *   FABRICAST_TOPIC_LARGEST        the largest message of a topic: 16M if unset
 *   FABRICAST_TOPIC_DEPTH          messages that a subscriber may have unread: 16 if unset
 *   FABRICAST_TOPIC_MAX_HELD       messages that all subscribers together may hold, beside
 *                                  the unread ones: as FABRICAST_TOPIC_DEPTH if unset,
 *                                  at least 2
 *   FABRICAST_TOPIC_LOANS          loans of each publisher, for which memory is reserved: 4
 *                                  if unset. A call of publisher_push uses one; others wait
 *                                  for it
 *   FABRICAST_TOPIC_RELEASE_DEADLINE
 *                                  seconds after which a subscriber that blocks a publisher
 *                                  is evicted: 60 if unset; off: never
 *   FABRICAST_DIRECTORY            the node directory: if unset, a directory of the user
 *                                  in XDG_RUNTIME_DIR, TMPDIR or /tmp
 *   FABRICAST_BUDGET_HOST,         bytes that all topics together may reserve of host and
 *   FABRICAST_BUDGET_DEVICE        of each device's memory: if unset, a quarter and a half
 *   FABRICAST_SERVICE              embedded (if unset): this process serves the node if none
 *                                  does; external: only another process
 *   FABRICAST_SERVICE_TIMEOUT      seconds to wait for the node's service: 20 if unset
 *   FABRICAST_LABEL                name of the process in reports
 *   FABRICAST_LISTEN, _PEERS,      the network of the node, used by the process that serves
 *   _RENDEZVOUS, _NODE_NAME,       it, as in fabricast_node_options of fabricast.h
 *   _PROVIDER, _SOURCE, _LANES,    (_LOST_AFTER in seconds, _INSECURE true or false); no
 *   _WORKERS, _LOST_AFTER,         network if the first three are unset
 *   _INSECURE
 *
 * Sizes may end in K, M or G, and "none" unsets an optional variable. All processes of a topic
 * need equal settings; a size, number or deadline that is not set is that of the existing
 * topic. Topics are always reliable; FABRICAST_TOPIC_RELIABILITY and FABRICAST_CONFIG are only for
 * the command. A misspelt variable is an error that names the nearest one.
 *
 * Functions may be called by any thread. After a fork the child needs its own handles: those of
 * its parent are errors. After a failure fabricast_error_message() of fabricast.h returns the
 * cause. A function that waits fails with FABRICAST_E_INTERRUPTED when a signal handler ran in the
 * calling thread meanwhile: call it again to continue.
 */
#ifndef RGAPS_H
#define RGAPS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rgaps_publisher rgaps_publisher_t;
typedef struct rgaps_subscriber rgaps_subscriber_t;

/* Opens a publisher, and creates the topic if it does not exist. NULL on failure. */
rgaps_publisher_t *publisher_init(const char *topic_name);

/*
 * Publishes a copy of the memory at device_pointer, of the host or of any device: the kind is
 * detected, and may differ from the topic's. CUDA is queried if the process uses it, and is not
 * loaded for that. The memory must be complete: synchronise the stream that writes it first. Waits
 * while the topic has no space. When it returns, the memory may be written again. Returns 0, or a
 * negative status code of fabricast.h.
 */
int publisher_push(rgaps_publisher_t *publisher, size_t message_size,
                   const void *device_pointer);

/*
 * Waits until this node has so many subscribers, where replication to other nodes counts as one,
 * for so many milliseconds at most; below 0 without a timeout. Returns 0, or
 * FABRICAST_E_DEADLINE_EXCEEDED (FABRICAST_E_WOULD_BLOCK with 0 milliseconds), or another status
 * code of fabricast.h.
 */
int publisher_wait(rgaps_publisher_t *publisher, size_t subscribers, int milliseconds);

/* Closes the publisher. Published messages stay until they are read. NULL is allowed. */
void publisher_destroy(rgaps_publisher_t *publisher);

/* Opens a subscriber of all messages published from now on, and creates the topic if it does not
 * exist. NULL on failure. */
rgaps_subscriber_t *subscriber_init(const char *topic_name);

/*
 * Waits for the next message, and returns its address: on the topic's device, in memory that all
 * readers share. It is not written, and valid until this subscriber's next subscriber_pull or
 * subscriber_destroy, also if the subscriber is evicted in between; kernels must not read it any
 * more then. Messages of one publisher arrive in order and without gaps. NULL on failure.
 */
void *subscriber_pull(rgaps_subscriber_t *subscriber);

/*
 * Like subscriber_pull, for so many milliseconds at most; 0 does not wait, below 0 has no limit.
 * NULL without a message: then fabricast_error_status of fabricast.h is
 * FABRICAST_E_DEADLINE_EXCEEDED (FABRICAST_E_WOULD_BLOCK with 0 milliseconds), and the previous
 * message is released.
 */
void *subscriber_pull_within(rgaps_subscriber_t *subscriber, int milliseconds);

/* Length of the last message in bytes. 0 without a message, or if it is empty. */
size_t subscriber_message_size(rgaps_subscriber_t *subscriber);

/* Closes the subscriber, and wakes a subscriber_pull in another thread. NULL is allowed. */
void subscriber_destroy(rgaps_subscriber_t *subscriber);

#ifdef __cplusplus
}
#endif

#endif
