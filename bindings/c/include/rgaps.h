/*
 * rgaps.h - messages in GPU memory, published and read by topic: six functions, and three for
 * programs that do not wait for ever.
 *
 * A process publishes on a topic, others read what was published; each message exists once
 * in the memory of a device (or of the host), whoever reads it and however many they are.
 * Link with -lfabricast. The whole interface, with sizes, deadlines and metadata, is in
 * fabricast.h; both can be used side by side.
 *
 * No service has to be started: one of the processes with the same directory serves
 * the others while it is there. What the functions are not told, the environment says:
 *
 *   FABRICAST_DEVICE               (or FABRICAST_TOPIC_MEMORY) whose memory messages lie in:
 *                                  host (if unset), cuda:0, cuda:1, ..., or emulated:0,
 *                                  a device emulated in host memory. It says nothing
 *                                  of the pointers that are pushed
 *   FABRICAST_TOPIC_LARGEST        the largest message of a topic: 16M if unset
 *   FABRICAST_TOPIC_DEPTH          messages that may wait to be read: 16 if unset
 *   FABRICAST_TOPIC_LOANS          for how many messages that each publisher has not published
 *                                  yet memory is reserved: 4 if unset. A call of
 *                                  publisher_push has one; others wait for it
 *   FABRICAST_TOPIC_RELEASE_DEADLINE
 *                                  a subscriber that keeps a message for more seconds than
 *                                  this while others wait for its room is evicted: 60 if unset
 *   FABRICAST_DIRECTORY            where the processes meet: if unset, a directory of the
 *                                  user's in XDG_RUNTIME_DIR, TMPDIR or /tmp
 *   FABRICAST_BUDGET_HOST,         bytes that all topics together may take of the host's and
 *   FABRICAST_BUDGET_DEVICE        of each device's memory: if unset, a quarter and a half
 *   FABRICAST_SERVICE              embedded (if unset): a process serves the others if none
 *                                  does; outside: only a service that was started by hand
 *   FABRICAST_SERVICE_TIMEOUT             how many seconds to look for the others: 20 if unset
 *   FABRICAST_LABEL                what the process is called in reports
 *   FABRICAST_LISTEN, _PEERS,      how the node is connected to others, by the process that
 *   _RENDEZVOUS, _NODE_NAME,       serves it, as fabricast_node_options of fabricast.h has it
 *   _PROVIDER, _SOURCE,            (_LOST_AFTER in seconds, _INSECURE true or false); not at
 *   _LOST_AFTER, _INSECURE         all if the first three are unset
 *
 * Sizes may end in K, M or G, and "none" takes back what need not be said. All processes of a
 * topic say the same; who says nothing of size, depth, loans or deadline takes what the first one
 * said of it. Topics are reliable, whatever FABRICAST_TOPIC_RELIABILITY says, and FABRICAST_CONFIG is
 * not read: these are the command's. A variable that is a misspelt setting is told in the log, as a
 * warning (fabricast_set_log of fabricast.h).
 *
 * Functions may be called by any thread. After a fork the child makes handles of its own:
 * those of its parent are refused. A function that fails tells why by
 * fabricast_error_message() of fabricast.h. One that waits fails with FABRICAST_E_INTERRUPTED when a
 * signal handler ran in the calling thread meanwhile: call it again to go on.
 */
#ifndef RGAPS_H
#define RGAPS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rgaps_publisher rgaps_publisher_t;
typedef struct rgaps_subscriber rgaps_subscriber_t;

/* Publishes on a topic from now on, and makes the topic if nobody has. NULL if it fails. */
rgaps_publisher_t *publisher_init(const char *topic_name);

/*
 * Publishes a copy of what is at device_pointer, wherever that lies: on the host or on any device,
 * which is found out, and need not be where the topic's messages lie. CUDA is asked if the process
 * uses it, and is not loaded for that. What is there has to be complete: synchronise the
 * stream that writes it first. Waits while readers have no room. When it returns, the memory
 * may be written again. 0 if it is done, and one of fabricast.h's status codes, below 0, if not.
 */
int publisher_push(rgaps_publisher_t *publisher, size_t message_size,
                   const void *device_pointer);

/*
 * Waits until a message that is published now would come to so many subscribers on this node,
 * those that carry it to other nodes being one, for so many milliseconds at most; below 0 as long
 * as it takes. 0, or FABRICAST_E_DEADLINE_EXCEEDED (FABRICAST_E_WOULD_BLOCK if it is not to wait),
 * or another of fabricast.h's status codes.
 */
int publisher_wait(rgaps_publisher_t *publisher, size_t subscribers, int milliseconds);

/* Closes the publisher. Published messages stay until they are read. NULL is allowed. */
void publisher_destroy(rgaps_publisher_t *publisher);

/* Reads what is published on a topic from now on, and makes the topic if nobody has. NULL if
 * it fails. */
rgaps_subscriber_t *subscriber_init(const char *topic_name);

/*
 * Waits for the next message, and returns where it is: on the topic's device, in memory that
 * all readers share. Nobody writes there, and it stays until this subscriber's next
 * subscriber_pull or subscriber_destroy; what a kernel still reads then is given to others.
 * Messages of one publisher come in order, and none is left out. NULL if it fails.
 */
void *subscriber_pull(rgaps_subscriber_t *subscriber);

/*
 * The same, for so many milliseconds at most; 0 does not wait, below 0 is as subscriber_pull. NULL
 * if no message came: then fabricast_error_status of fabricast.h is FABRICAST_E_DEADLINE_EXCEEDED
 * (FABRICAST_E_WOULD_BLOCK if it was not to wait), and the message before is given back.
 */
void *subscriber_pull_within(rgaps_subscriber_t *subscriber, int milliseconds);

/* How many bytes the message has that was pulled last. 0 if there is none, or it has none. */
size_t subscriber_message_size(rgaps_subscriber_t *subscriber);

/* Closes the subscriber, and wakes a subscriber_pull in another thread. NULL is allowed. */
void subscriber_destroy(rgaps_subscriber_t *subscriber);

#ifdef __cplusplus
}
#endif

#endif
