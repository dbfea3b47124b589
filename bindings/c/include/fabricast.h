/*
 * fabricast.h - topics: one copy of a message in GPU or host memory, read by any number of
 * processes, on any number of machines; agents: put into and get from memory of other
 * processes, by the best path; shared memory, which other processes open by a token; and
 * collective operations among the ranks of a job. For C99 and C++; link with -lfabricast. For
 * Fortran: fabricast.f90. For PyTorch: fabricast_torch.hpp. For C++: fabricast_collective.hpp.
 *
 *     fabricast_node *node;
 *     fabricast_topic *topic;
 *     fabricast_publisher *publisher;
 *
 *     if (fabricast_node_join(NULL, &node) != FABRICAST_OK)
 *         fprintf(stderr, "%s\n", fabricast_error_message());
 *
 * Every function that can fail returns a status, FABRICAST_OK or a number below 0, and then
 * fabricast_error_message returns the cause to the calling thread. After a failure all outputs
 * are NULL or 0 (a descriptor: -1).
 * Arguments are checked as far as possible: NULL, sizes, texts (zero-terminated within 4096
 * bytes, and UTF-8), and handles that were closed, are of another kind or never existed.
 * Functions never end the process.
 *
 * Handles are not addresses: never dereference one. Each kind has a function to close it, in
 * any order; closing NULL does nothing. Closing a node, topic, publisher or subscriber ends at once
 * what was opened from it: calls with these objects fail with FABRICAST_E_CLOSED from then on, also
 * those that wait in other threads. Their handles are closed separately. Samples stay readable
 * until they are released. Closing the last handle of a node, and of what was opened from it,
 * leaves the node, which can take seconds. Closing an agent ends its regions and routes, whose
 * handles are closed separately.
 *
 * Functions may be called by any thread. A loan, subscriber, agent, communication domain or
 * parameter store is used by one thread at a time; other threads wait, no longer than their
 * timeout. After a fork the child needs its own handles; with those of its parent it gets
 * FABRICAST_E_FORKED.
 *
 * Binary interface: FABRICAST_ABI is also the number in the name of the shared library.
 * Within one number, functions are only added; structures only grow at their end, and contain
 * or are passed with their size, so that programs work with later libraries without being
 * compiled again. Numbers keep their meaning; new ones may be added.
 */
#ifndef FABRICAST_H
#define FABRICAST_H

#include <stddef.h>
#include <stdint.h>

#define FABRICAST_ABI 0

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------ status, errors */

/* 0 or an error. Programs treat unknown numbers as FABRICAST_E_FAILED. */
typedef int32_t fabricast_status;

#define FABRICAST_OK 0
#define FABRICAST_E_FAILED (-1)            /* a lower layer failed: see the message */
#define FABRICAST_E_INVALID_ARGUMENT (-2)  /* an argument that is never valid */
#define FABRICAST_E_SETTINGS_DIFFER (-3)   /* topic exists with other settings */
#define FABRICAST_E_NOT_FOUND (-4)         /* topic, node, device, peer or operation not found */
#define FABRICAST_E_OVER_BUDGET (-5)       /* the budget is too small */
#define FABRICAST_E_TOO_LONG (-6)          /* longer than the topic's largest message */
#define FABRICAST_E_TOO_MANY (-7)          /* a limit on the number of objects is reached */
#define FABRICAST_E_WOULD_BLOCK (-8)       /* no message or no space, and the call does not wait */
#define FABRICAST_E_DEADLINE_EXCEEDED (-9) /* timeout expired */
#define FABRICAST_E_EVICTED (-10)          /* evicted: it blocked publishers for too long */
#define FABRICAST_E_DENIED (-11)           /* not allowed: to use this node or agent; to put into
                                              or get from this region */
#define FABRICAST_E_MALFORMED (-12)        /* received or stored data is malformed */
#define FABRICAST_E_VERSION_MISMATCH (-13) /* the other side uses another version */
#define FABRICAST_E_CLOSED (-14)           /* the node, peer or handle was closed, or lost */
#define FABRICAST_E_FORKED (-15)           /* the handle belongs to the parent process */
#define FABRICAST_E_BAD_HANDLE (-16)       /* not an open handle of this kind */
#define FABRICAST_E_PANICKED (-17)         /* internal error (panic) in the library */
#define FABRICAST_E_POISONED (-18)         /* its publisher was lost before it was written */
#define FABRICAST_E_TOO_MANY_LOANS (-19)   /* the publisher has its maximum of loans */
#define FABRICAST_E_TOO_MANY_SAMPLES (-20) /* the subscriber holds its maximum of samples */
#define FABRICAST_E_NO_PROVIDER (-21)      /* none can replicate messages to other nodes, or be
                                              the fabric of an agent; or libfabric is not
                                              installed */
#define FABRICAST_E_INTERRUPTED (-22)      /* a signal handler ran while the call waited */
#define FABRICAST_E_NO_PATH (-23)          /* no path between two regions, or to an agent */
#define FABRICAST_E_STALE (-24)            /* the region was withdrawn, or belongs to another agent,
                                              or to this one before a restart */
#define FABRICAST_E_CANCELLED (-25)        /* the operation was cancelled, or did not start,
                                              because one that it waited for failed */
#define FABRICAST_E_NO_PUBLISHERS (-26)    /* the last publisher has gone, and the subscriber was
                                              asked to end then */
#define FABRICAST_E_RANK_FAILED (-27)      /* the process of a rank has ended */
#define FABRICAST_E_MISMATCH (-28)         /* ranks called different operations, or with different
                                              arguments */

/* Name of a status, never NULL. */
const char *fabricast_status_name(fabricast_status status);

/*
 * Last error of the calling thread: status, message and operation. FABRICAST_OK and empty texts
 * without any. Successful calls do not change it. The texts are valid until the thread's next
 * failure, fabricast_error_clear, or its end.
 */
fabricast_status fabricast_error_status(void);
const char *fabricast_error_message(void);
const char *fabricast_error_operation(void);
void fabricast_error_clear(void);

/* The library's version, as "0.1.0", and the number of its binary interface. */
const char *fabricast_version(void);
uint32_t fabricast_abi(void);

/* Number of open handles of all kinds, and of texts that were not freed, in this process. */
size_t fabricast_open_handles(void);

/* ------------------------------------------------------------------------------ log */

#define FABRICAST_LOG_OFF 0
#define FABRICAST_LOG_ERROR 1
#define FABRICAST_LOG_WARN 2
#define FABRICAST_LOG_INFO 3
#define FABRICAST_LOG_DEBUG 4
#define FABRICAST_LOG_TRACE 5

/*
 * Receives a line of the log, without a line feed, valid until the callback returns. It is called
 * by threads of the library and by threads in its functions, one at a time: the others wait. So
 * it must return soon, without exceptions or longjmp, must not wait for a thread that uses the
 * library, and must not call its functions: they fail there (FABRICAST_E_INVALID_ARGUMENT).
 */
typedef void (*fabricast_log_callback)(int32_t level, const char *text, void *user_data);

/*
 * Passes the library's log up to this level to a callback; NULL or FABRICAST_LOG_OFF: to none.
 * Until the first call the log is written to standard error, at the level of the environment
 * variable FABRICAST_LOG (off, error, warn, info, debug or trace; off if it is not set), which the
 * first node, topic or agent reads. When it returns, the previous callback is not called any more,
 * and its data may be freed. FABRICAST_E_INVALID_ARGUMENT if the callback itself calls it. A forked
 * child has no callback. A misspelt FABRICAST_ variable is logged once, as a warning.
 */
fabricast_status fabricast_set_log(int32_t level, fabricast_log_callback callback,
                                   void *user_data);

/* ------------------------------------------------------------------------- waiting */

/* How long a call may wait, in nanoseconds: for messages, for space in the topic, for exclusive
 * use of a handle. A copy by a device has its own timeout of the same length, counted from its
 * start, or 10 seconds with FABRICAST_NOW and for host memory. */
typedef int64_t fabricast_timeout;

#define FABRICAST_NOW ((fabricast_timeout)0)      /* not at all: FABRICAST_E_WOULD_BLOCK */
#define FABRICAST_FOREVER ((fabricast_timeout)-1) /* without a timeout */
#define FABRICAST_MILLISECONDS(count) ((fabricast_timeout)(count) * 1000000)
#define FABRICAST_SECONDS(count) ((fabricast_timeout)(count) * 1000000000)

/*
 * A call with a timeout returns FABRICAST_E_INTERRUPTED when a signal handler of the program ran
 * in the calling thread while the call was blocked, also with SA_RESTART. No message was received
 * or sent, a loan is unchanged, and the call can be repeated. The same holds for
 * fabricast_loan_memory, _write and _set_metadata, which have no timeout, while they wait for
 * another thread that publishes the loan. A handler that runs before the call blocks is not
 * noticed: until some microseconds after the start of the call, or at any time with
 * FABRICAST_WAITING_BUSY, with which calls never block. A program that must not miss a signal
 * polls the descriptor (fabricast_subscriber_descriptor) together with one that its handler writes
 * to, or waits for at most a second at a time. Of the calls with agents, the waits for an event,
 * an operation, a flush, unused memory, and another thread that uses the agent end so; connect,
 * join, disconnect, withdraw and close do not.
 */

/* --------------------------------------------------------------------------- nodes */

/*
 * A membership in a node: the processes of a machine that use the same directory. One of them
 * serves the node; when it ends, another one takes over.
 */
typedef struct fabricast_node fabricast_node;

#define FABRICAST_SERVICE_EMBEDDED 0  /* this process serves the node if none does */
#define FABRICAST_SERVICE_EXTERNAL 1  /* another process always serves it */

#define FABRICAST_WAITING_ADAPTIVE 0 /* busy-poll for some microseconds, then block */
#define FABRICAST_WAITING_BUSY 1     /* busy-poll: a whole core, lowest latency */
#define FABRICAST_WAITING_BLOCK 2    /* block at once */

/* Fill it with fabricast_node_options_init, then change fields. */
typedef struct fabricast_node_options {
    size_t size;             /* of this structure, as the caller knows it */
    const char *directory;   /* node directory; NULL: FABRICAST_DIRECTORY of the environment,
                                or else a default directory of the user */
    const char *label;       /* name of this process in reports, at most 64 bytes;
                                NULL: the name of its program */
    int64_t service_timeout; /* timeout for the node's service, in nanoseconds */
    uint64_t host_budget;    /* bytes that all topics together may reserve of host memory, and */
    uint64_t device_budget;  /* of each device's, if this process serves; 0: default */
    uint32_t service;        /* FABRICAST_SERVICE_... */
    uint32_t waiting;        /* FABRICAST_WAITING_... */

    /* The node's network, if this process serves it: none if the first three are NULL. */
    const char *listen;      /* address to listen at, as "10.0.0.1:7007"; port 0: any free
                                port */
    const char *peers;       /* other nodes, as "host:port,host:port" */
    const char *rendezvous;  /* a node, as "host:port", from which the others are learned */
    const char *name;        /* name of this node at other nodes; NULL: its label */
    const char *provider;    /* provider for messages between nodes: "NAME" or "=NAME" only
                                this one, "^NAME" any but this one, several separated by commas;
                                NULL: the best */
    const char *source;      /* local address to send from, its subnet as "10.0.0.0/16", or its
                                interface as "ib0"; NULL: default */
    int64_t lost_after;      /* nanoseconds without a heartbeat after which a node is lost */
    uint32_t insecure;       /* 1: allow other nodes without authentication or encryption; on
                                loopback each user of the machine can connect */
    uint32_t workers;        /* replication threads; 0: default */
} fabricast_node_options;

/* fabricast_node_options_init(&options, sizeof options) */
fabricast_status fabricast_node_options_init(fabricast_node_options *options, size_t size);

/*
 * Joins a node. NULL options mean the defaults. Options that can never connect the node are
 * errors: FABRICAST_E_INVALID_ARGUMENT for peers without a port, and for any listen, peers or
 * rendezvous if insecure is 0; FABRICAST_E_NO_PROVIDER for a provider that is not available.
 */
fabricast_status fabricast_node_join(const fabricast_node_options *options,
                                     fabricast_node **node);

/* Closes the node, and ends all topics, publishers and subscribers opened from it: unread messages
 * are given up, so that publishers of other processes do not wait for them. */
fabricast_status fabricast_node_leave(fabricast_node *node);

/* Identity, equal for all members, and directory of the node; valid until the handle is closed. */
fabricast_status fabricast_node_identity(fabricast_node *node, const char **identity);
fabricast_status fabricast_node_directory(fabricast_node *node, const char **directory);

/*
 * Report of the processes, topics and peers of a node: a JSON array of rows, the first of which
 * is the node's. Of a member's node, or of the node of a directory (NULL: the default), without
 * joining it. Free the text with fabricast_text_free.
 */
fabricast_status fabricast_node_report(fabricast_node *node, char **json);
fabricast_status fabricast_report(const char *directory, char **json);
fabricast_status fabricast_text_free(char *text);

/* -------------------------------------------------------------------------- topics */

/* An open topic. A topic exists while any process uses it. */
typedef struct fabricast_topic fabricast_topic;

#define FABRICAST_RELIABLE 0    /* publishers wait for subscribers */
#define FABRICAST_DROP_OLDEST 1 /* the oldest unread messages are dropped; events report it */
#define FABRICAST_DROP_NEWEST 2 /* a message without space is dropped, and counted */

/* Fill it with fabricast_topic_settings_init, then change fields. */
typedef struct fabricast_topic_settings {
    size_t size;              /* of this structure, as the caller knows it */
    const char *memory;       /* "host", "cuda:0", ..., "emulated:0"; NULL: "host". A device that
                               * this process does not see (CUDA_VISIBLE_DEVICES) has its UUID
                               * instead, as "GPU-66616272-6963-..." */
    uint64_t largest;         /* bytes of the longest message */
    int64_t release_deadline; /* a subscriber that blocks publishers for longer is evicted;
                                 nanoseconds; INT64_MAX: never */
    uint32_t depth;           /* number of messages that a subscriber may have unread */
    uint32_t reliability;     /* FABRICAST_RELIABLE, ... */
    uint64_t loans;           /* loans of each publisher at once; memory for them is
                                 reserved when it is opened */
    const char *type_name;    /* type of its values, 1 to 64 bytes: opening a topic of
                                 another type fails; NULL: any type */
    uint64_t max_held;        /* number of messages that a subscriber may hold; all subscribers
                                 together may hold as many beside the unread ones; 0: as
                                 depth, at least 2, and 16 if the topic drops messages */
} fabricast_topic_settings;

/* fabricast_topic_settings_init(&settings, sizeof settings) */
fabricast_status fabricast_topic_settings_init(fabricast_topic_settings *settings, size_t size);

/*
 * Opens a topic, and creates it if it does not exist; all processes pass equal settings. With
 * NULL as settings the topic must exist, and is used as it is.
 */
fabricast_status fabricast_topic_open(fabricast_node *node, const char *name,
                                      const fabricast_topic_settings *settings,
                                      fabricast_topic **topic);

/* Closes the topic, and ends all publishers and subscribers opened from this handle. */
fabricast_status fabricast_topic_close(fabricast_topic *topic);

/* The topic's name and settings; texts are valid until the handle is closed. */
fabricast_status fabricast_topic_name(fabricast_topic *topic, const char **name);
fabricast_status fabricast_topic_settings_of(fabricast_topic *topic,
                                             fabricast_topic_settings *settings, size_t size);

/* A publisher of a topic on this node, or another node that publishes to it. Does not grow. */
typedef struct fabricast_topic_publisher {
    uint64_t publisher; /* its identity, as fabricast_sample_info.publisher; 0: another node, of
                           which it is not known how many publishers it has */
    uint32_t process;   /* its process, as in reports; 0: another node */
    uint32_t is_alive;  /* 0: the process died, or the node is lost, and is removed soon */
    char node[40];      /* the other node, as fabricast_sample_info.origin; empty: this one */
    char label[72];     /* name of the process, or of the other node, as in reports */
} fabricast_topic_publisher;

/* Lists the publishers of a topic, as many as capacity. count is the number of all. */
fabricast_status fabricast_topic_publishers(fabricast_topic *topic,
                                            fabricast_topic_publisher *publishers,
                                            size_t capacity, size_t *count);

/* ---------------------------------------------------------------------- publishers */

/* A publisher. Every subscriber receives its messages in order. */
typedef struct fabricast_publisher fabricast_publisher;

fabricast_status fabricast_publisher_open(fabricast_topic *topic,
                                          fabricast_publisher **publisher);

/* Calls that wait in other threads fail with FABRICAST_E_CLOSED, and its loans cannot be published
 * any more. */
fabricast_status fabricast_publisher_close(fabricast_publisher *publisher);

/* Identity of the publisher, which its messages contain. */
fabricast_status fabricast_publisher_identity(fabricast_publisher *publisher,
                                              uint64_t *identity);

/* Number of subscribers of this node that would get a message now. */
fabricast_status fabricast_publisher_subscribers(fabricast_publisher *publisher,
                                                 uint64_t *count);

/* Waits until this node has so many subscribers. */
fabricast_status fabricast_publisher_wait_for_subscribers(fabricast_publisher *publisher,
                                                          uint64_t count,
                                                          fabricast_timeout timeout);

/* Waits until no subscriber is left, on this node and on others: a lost node counts until it is
 * given up. */
fabricast_status fabricast_publisher_wait_for_no_subscribers(fabricast_publisher *publisher,
                                                             fabricast_timeout timeout);

#define FABRICAST_PUBLISHER_EVENT_NONE 0           /* no further event */
#define FABRICAST_PUBLISHER_EVENT_NO_SUBSCRIBERS 1 /* the last subscriber has left or died */

/* The kind of the next event of the publisher; never waits. Skip numbers that you do not know. */
fabricast_status fabricast_publisher_event(fabricast_publisher *publisher, uint64_t *kind);

typedef struct fabricast_publisher_counters {
    uint64_t messages; /* published messages, with and without subscribers */
    uint64_t bytes;    /* of these messages */
    uint64_t dropped;  /* messages without space */
    uint64_t missed_by_nodes; /* of a reliable topic, messages not known to be received by a
                                 subscribed node when it was given up; counted for each such
                                 node */
    uint64_t evicted;  /* subscribers of this node that were evicted for blocking a publisher */
} fabricast_publisher_counters;

/* Counters since the publisher was opened. */
fabricast_status fabricast_publisher_counters_of(fabricast_publisher *publisher,
                                                 fabricast_publisher_counters *counters,
                                                 size_t size);

/* Publishes a copy of host memory, for a topic in any memory. */
fabricast_status fabricast_publisher_push(fabricast_publisher *publisher, const void *data,
                                          size_t length, fabricast_timeout timeout);

/*
 * Publishes a copy of memory of any device, or of the host: the kind is detected. CUDA is queried
 * if the process uses it, and is not loaded for that. If the topic is in device memory, its device
 * needs access to the other; if it is in host memory, the bytes are copied to the host first. The
 * memory must be complete after the work already submitted to the device's default stream
 * (synchronise a non-blocking stream that writes it first), and may be written again when the call
 * has succeeded; after FABRICAST_E_DEADLINE_EXCEEDED a copy may still read it, until the device's
 * work is done. FABRICAST_NOW does not wait for space, but for the copy.
 * FABRICAST_E_INVALID_ARGUMENT for a range beyond its allocation, and, if the topic is on a GPU,
 * for an address that neither the driver nor the system knows.
 */
fabricast_status fabricast_publisher_push_device(fabricast_publisher *publisher,
                                                 const void *pointer, size_t length,
                                                 fabricast_timeout timeout);

/* Waits until all subscribers have released all its messages. */
fabricast_status fabricast_publisher_flush(fabricast_publisher *publisher,
                                           fabricast_timeout timeout);

/* --------------------------------------------------------------------------- loans */

/* Memory for a message, written in place: publishing it copies nothing. */
typedef struct fabricast_loan fabricast_loan;

/*
 * FABRICAST_E_TOO_MANY_LOANS, at once, if all loans of the publisher are handles that were neither
 * published nor discarded. Loans of threads that push, and discarded ones that a device still
 * writes, become available later: the call waits for these.
 */
fabricast_status fabricast_publisher_loan(fabricast_publisher *publisher, size_t length,
                                          fabricast_timeout timeout, fabricast_loan **loan);

/* The loan's address, in the topic's memory: valid until it is published or discarded. */
fabricast_status fabricast_loan_memory(fabricast_loan *loan, void **address, size_t *length);

/* Copies host memory into the loan. */
fabricast_status fabricast_loan_write(fabricast_loan *loan, size_t offset, const void *data,
                                      size_t length);

#define FABRICAST_MAX_METADATA 256

/* Attaches metadata to the message. */
fabricast_status fabricast_loan_set_metadata(fabricast_loan *loan, const void *data,
                                             size_t length);

#define FABRICAST_NO_POSITION UINT64_MAX

typedef struct fabricast_sent {
    uint64_t position;    /* among all messages of the topic on this node;
                             FABRICAST_NO_POSITION: no subscriber, or dropped */
    uint64_t subscribers; /* subscribers of this node that received it */
    uint64_t dropped;     /* 1: dropped, without space in a topic that drops messages */
} fabricast_sent;

/*
 * Publishes it, and closes the handle. Writes by a device must be complete before: synchronise its
 * stream. After FABRICAST_E_WOULD_BLOCK, FABRICAST_E_DEADLINE_EXCEEDED and
 * FABRICAST_E_INVALID_ARGUMENT the loan is unchanged and can be published again; other failures
 * discard it. No subscriber is not a failure. sent may be NULL.
 */
fabricast_status fabricast_loan_publish(fabricast_loan *loan, fabricast_timeout timeout,
                                        fabricast_sent *sent, size_t size);

/* Discards the loan unpublished. */
fabricast_status fabricast_loan_discard(fabricast_loan *loan);

/* --------------------------------------------------------------------- subscribers */

/* A subscriber: receives every message published after it was opened. */
typedef struct fabricast_subscriber fabricast_subscriber;

/* A held message: its memory is valid, and not written. */
typedef struct fabricast_sample fabricast_sample;

fabricast_status fabricast_subscriber_open(fabricast_topic *topic,
                                           fabricast_subscriber **subscriber);

/* A pull that waits in another thread fails with FABRICAST_E_CLOSED, at once. */
fabricast_status fabricast_subscriber_close(fabricast_subscriber *subscriber);

/* The next message. Release it soon: a topic has space for depth messages. */
fabricast_status fabricast_subscriber_pull(fabricast_subscriber *subscriber,
                                           fabricast_timeout timeout,
                                           fabricast_sample **sample);

#define FABRICAST_EVENT_NONE 0           /* no further event */
#define FABRICAST_EVENT_GAP 1            /* missed messages were dropped, or never written, here or
                                            on the publisher's node */
#define FABRICAST_EVENT_PUBLISHER_LOST 2 /* a publisher exited unexpectedly */
#define FABRICAST_EVENT_EVICTED 3        /* the subscriber was evicted, after held_for */
#define FABRICAST_EVENT_REMOTE_PUBLISHER_LOST 4 /* the same on another node, as it reports;
                                                      not reported if the node ended */
#define FABRICAST_EVENT_NO_PUBLISHERS 5  /* the last publisher has left or died, on this node and
                                            on others; published messages can still be pulled */

typedef struct fabricast_event {
    uint64_t kind;      /* FABRICAST_EVENT_...; skip numbers that you do not know */
    uint64_t missed;    /* messages */
    uint64_t publisher; /* its identity */
    uint64_t held_for;  /* nanoseconds for which it blocked a publisher; 0: unknown */
    char node[40];      /* the publisher's, as in fabricast_sample_info.origin; empty: this one */
} fabricast_event;

/* The next event of the subscriber; never waits. Closing it is no event. */
fabricast_status fabricast_subscriber_event(fabricast_subscriber *subscriber,
                                            fabricast_event *event, size_t size);

/*
 * With ends other than 0, pulls fail with FABRICAST_E_NO_PUBLISHERS once the last publisher has
 * left or died and all messages were pulled, also those that wait. There must have been a publisher
 * since the subscriber was opened. A node that is lost counts until it is given up. If a publisher
 * comes later, its messages are pulled. FABRICAST_E_WOULD_BLOCK while another thread pulls.
 */
fabricast_status fabricast_subscriber_end_without_publishers(fabricast_subscriber *subscriber,
                                                             int ends);

/*
 * A descriptor for poll, select and epoll, which is readable while there may be messages: after a
 * message of any node; after the subscriber was evicted, or its topic or node closed, permanently;
 * and once for events that were not read. It stays readable until a pull finds no message
 * (FABRICAST_E_WOULD_BLOCK, or after waiting FABRICAST_E_DEADLINE_EXCEEDED): pull without waiting
 * until then, and read the events, before waiting again, also with EPOLLET. It can be readable
 * without a message.
 *
 * Always the same one, created at the first call, and closed with the subscriber: remove it from
 * an epoll set before. Never read, write or close it. -1 if the call fails;
 * FABRICAST_E_WOULD_BLOCK while another thread pulls.
 */
fabricast_status fabricast_subscriber_descriptor(fabricast_subscriber *subscriber,
                                                 int *descriptor);

/* The sample's address, in the topic's memory: valid until it is released. */
fabricast_status fabricast_sample_memory(fabricast_sample *sample, const void **address,
                                         size_t *length);

/*
 * FABRICAST_E_EVICTED if its process was taken for dead: then its memory may contain another
 * message. An evicted subscriber keeps its samples.
 */
fabricast_status fabricast_sample_check(fabricast_sample *sample);

/* Copies a part of it to host memory, and checks that it was still held. */
fabricast_status fabricast_sample_read(fabricast_sample *sample, size_t offset, void *into,
                                       size_t length);

/* Metadata of its publisher: valid until it is released. */
fabricast_status fabricast_sample_metadata(fabricast_sample *sample, const void **address,
                                           size_t *length);

/* Times are nanoseconds since 1970 of the realtime clock, and 0 where a stage was skipped; times
 * of another node are measured by its clock. */
typedef struct fabricast_sample_info {
    const void *address;      /* as of fabricast_sample_memory */
    uint64_t length;
    const void *metadata;     /* as of fabricast_sample_metadata */
    uint64_t metadata_length;
    const char *memory;       /* location: "host", "cuda:0", ... */
    const char *origin;       /* the node of its publisher; empty: this one */
    const char *path;         /* "shared-memory", "service-copied", "ring", "staged-ring",
                                 "direct-ring" */
    uint64_t publisher;       /* identity of the publisher, on its node */
    uint64_t sequence;        /* its number at the publisher, from 1 on */
    uint64_t position;        /* among the messages of the same path */
    uint64_t published_at;
    uint64_t allocated_at;    /* its memory was allocated */
    uint64_t filled_at;       /* its publisher had filled it */
    uint64_t wire_at;         /* its last byte arrived from the wire */
    uint64_t copied_at;       /* it was copied to the topic's memory */
    uint64_t delivered_at;    /* it was delivered to the subscribers of this node */
} fabricast_sample_info;

/* Information about it; texts are valid until it is released. */
fabricast_status fabricast_sample_info_of(fabricast_sample *sample, fabricast_sample_info *info,
                                          size_t size);

fabricast_status fabricast_sample_release(fabricast_sample *sample);

/* ------------------------------------------------------------------------- streams */

/*
 * Messages in stream order: a message is published before it is written, and pulled before it can
 * be read; only the streams wait.
 *
 *     fabricast_stream_open(topic, stream, &handle);       // a cudaStream_t, or CUstream
 *     fabricast_publisher_push_on(publisher, frame, length, handle, FABRICAST_SECONDS(1));
 *
 *     fabricast_subscriber_pull_on(subscriber, handle, FABRICAST_SECONDS(1), &sample);
 *     fabricast_sample_memory(sample, &address, &length);
 *     kernel<<<..., stream>>>(address, length);            // starts when it is written
 *     fabricast_sample_release_on(sample, handle);         // when the kernel is done
 *
 * Topics in host memory have no such handles. Agents order transfers by them, too: see
 * fabricast_agent_put_after.
 */

/* A foreign stream of a device. */
typedef struct fabricast_stream fabricast_stream;

/*
 * Adopts a stream of the topic's device, or of a device by its name, such as "cuda:0": that of the
 * regions of an agent. Either handle serves topics and agents.
 *
 * NULL is the device's default stream; on an emulated device NULL creates a stream, and is the only
 * valid value. The per-thread default stream (cudaStreamPerThread) is an error, and so is a stream
 * that is being captured into a graph: FABRICAST_E_FAILED. The stream must exist until the handle is
 * closed, and must not be captured meanwhile. Closing the handle waits until the stream has
 * completed the library's work, ten seconds at most: after that the memory in use is not freed.
 */
fabricast_status fabricast_stream_open(fabricast_topic *topic, void *stream,
                                       fabricast_stream **handle);
fabricast_status fabricast_stream_adopt(const char *device, void *stream,
                                        fabricast_stream **handle);
fabricast_status fabricast_stream_close(fabricast_stream *handle);

/*
 * Like fabricast_publisher_push_device, but the stream copies the memory, after its previous work,
 * and the call does not wait for it. Later work of the stream may write the memory again; it may be
 * freed when the stream has completed the copy. Host memory is allowed if it is registered with the
 * driver (cuMemHostRegister).
 */
fabricast_status fabricast_publisher_push_on(fabricast_publisher *publisher, const void *pointer,
                                             size_t length, fabricast_stream *stream,
                                             fabricast_timeout timeout);

/*
 * Like fabricast_loan_publish, but previous work of the stream may still write it. Repeat it on the
 * same stream if it was not published. Other failures, also a stream of another kind of device,
 * discard it when the stream has completed that work.
 */
fabricast_status fabricast_loan_publish_on(fabricast_loan *loan, fabricast_stream *stream,
                                           fabricast_timeout timeout, fabricast_sent *sent,
                                           size_t size);

/*
 * The next message, at once: later work of the stream waits until it is written. The stream
 * continues also if it never will be, since its publisher exited; fabricast_sample_readiness
 * returns the result afterwards. fabricast_subscriber_pull returns such a message when it is
 * written, and skips one that never will be, which counts as missed.
 */
fabricast_status fabricast_subscriber_pull_on(fabricast_subscriber *subscriber,
                                              fabricast_stream *stream,
                                              fabricast_timeout timeout,
                                              fabricast_sample **sample);

#define FABRICAST_PENDING 0  /* its publisher's stream has not written it yet */
#define FABRICAST_READY 1    /* it is written, as all messages without a stream are */
#define FABRICAST_POISONED 2 /* it never will be: its publisher exited, or its device failed */

fabricast_status fabricast_sample_readiness(fabricast_sample *sample, uint64_t *readiness);

/*
 * Closes the handle, and releases the message when the stream has completed its previous work, and
 * some milliseconds later at most. Until then it is held. Closing the last of a subscriber and its
 * samples waits for that, ten seconds at most.
 */
fabricast_status fabricast_sample_release_on(fabricast_sample *sample, fabricast_stream *stream);

/* -------------------------------------------------------------------------- memory */

/*
 * Agents move bytes between regions, which are registered memory:
 *
 *     fabricast_agent_start(NULL, &agent);
 *     fabricast_memory_allocate("host", 1 << 20, &memory);
 *     fabricast_region_register(agent, memory, FABRICAST_WRITE, &region);
 *     fabricast_agent_publish(agent, "cache", region);
 *     fabricast_agent_card(agent, card, sizeof card, &length);      // send it to the peer
 *
 *     fabricast_agent_connect(agent, card, length, FABRICAST_SECONDS(10), &peer);   // the peer
 *     fabricast_agent_route_to(agent, peer, "cache", local, FABRICAST_SECONDS(10), &route);
 *     fabricast_agent_put(agent, route, blocks, count, &notice, &token);
 *     fabricast_agent_wait(agent, token, FABRICAST_SECONDS(10), NULL);
 */

/* Memory that can be registered and shared: of the library, or adopted from the program. */
typedef struct fabricast_memory fabricast_memory;

/*
 * Allocates zeroed memory that peers on this machine can map, so that bytes are copied once: in
 * "host" (also NULL), "cuda:0", ..., or "emulated:0".
 */
fabricast_status fabricast_memory_allocate(const char *location, size_t length,
                                           fabricast_memory **memory);

/*
 * Adopts memory that the program has: of malloc, MPI, CUDA (cudaMalloc, or mapped in pieces), or a
 * part of it. The kind of the pointer is detected; FABRICAST_E_INVALID_ARGUMENT for an address that
 * is not mapped, or a range beyond its allocation. Other processes cannot map host memory that they
 * did not get from the library: agents of this process reach it, and others through a fabric.
 *
 * The memory must stay allocated until fabricast_memory_close has succeeded.
 */
fabricast_status fabricast_memory_adopt(void *pointer, size_t length,
                                        fabricast_memory **memory);

/*
 * Tells that adopted memory is not used any more. Any thread may call it, also the one that closes
 * the last handle, before its call returns. It must return soon, without exceptions or longjmp, and
 * must not call functions of the library: they fail there (FABRICAST_E_INVALID_ARGUMENT).
 */
typedef void (*fabricast_release_callback)(void *user_data);

/*
 * Adopts memory that the program leaves to the library: closing it does not wait. When the
 * handle is closed and nothing uses the memory any more, also no process that opened it, release is
 * called once with user_data; then the memory may be freed. It is not called if this function
 * fails, if the process ends before, or in a forked child.
 */
fabricast_status fabricast_memory_adopt_with_release(void *pointer, size_t length,
                                                     fabricast_release_callback release,
                                                     void *user_data,
                                                     fabricast_memory **memory);

/* A range of addresses. */
typedef struct fabricast_range {
    uint64_t address; /* of its first byte */
    uint64_t length;
} fabricast_range;

/* Where a range is in adopted memories. */
typedef struct fabricast_view {
    uint64_t memory; /* the index of its memory */
    uint64_t offset; /* there */
    uint64_t length;
} fabricast_view;

/*
 * Adopts many ranges of one device's memory, such as the pages of a cache: as one memory for each
 * group of ranges that share allocations, from the first to the last of them. memories gets their
 * handles, at most `capacity`, and *adopted their number; views gets the place of each range, in
 * their order, and has `count` elements. FABRICAST_E_TOO_MANY if there are more memories; `count` is
 * always enough.
 *
 * All of each allocation must stay allocated until the memories have been closed.
 *
 *     fabricast_memory *memories[MAX];
 *     fabricast_memory_adopt_views(pages, count, memories, MAX, &adopted, views);
 *     for (size_t at = 0; at < adopted; at++)
 *         fabricast_region_register(agent, memories[at], FABRICAST_READ, &regions[at]);
 *     ... a page is views[n].length bytes from views[n].offset on, of regions[views[n].memory] ...
 */
fabricast_status fabricast_memory_adopt_views(const fabricast_range *ranges, size_t count,
                                              fabricast_memory **memories, size_t capacity,
                                              size_t *adopted, fabricast_view *views);

/*
 * The memory's address in this process. Of allocated memory: valid until the memory, its regions
 * and their routes are closed. Peers with the right to write change the bytes at any time; a notice
 * tells that the bytes of its operation are there.
 */
fabricast_status fabricast_memory_address(fabricast_memory *memory, void **address,
                                          size_t *length);

/* Copies bytes of the host into it, and out of it; in device memory by the device, within 10
 * seconds. */
fabricast_status fabricast_memory_write(fabricast_memory *memory, size_t offset,
                                        const void *data, size_t length);
fabricast_status fabricast_memory_read(fabricast_memory *memory, size_t offset, void *into,
                                       size_t length);

/*
 * Closes the handle. Allocated memory is freed when no region, route, operation or peer uses it any
 * more; the call does not wait for that.
 *
 * For adopted memory the call waits. When it has succeeded, nothing uses the memory any more: the
 * program may free it. After FABRICAST_E_DEADLINE_EXCEEDED, FABRICAST_E_WOULD_BLOCK and
 * FABRICAST_E_INTERRUPTED it is still used, by a region, route or share that is not closed, a
 * process that opened it, or an operation in flight, also of a peer: the handle stays open, but
 * cannot be registered or shared any more. Close the others, and then the memory again.
 * Registrations that an agent caches end within a tenth of a second.
 */
fabricast_status fabricast_memory_close(fabricast_memory *memory, fabricast_timeout timeout);

/* ------------------------------------------------------------------- shared memory */

/*
 * Memory in several processes without a copy. The owner sends a token by any means, and the
 * receiver maps the memory:
 *
 *     fabricast_memory_allocate("cuda:0", length, &memory);
 *     fabricast_memory_share(memory, &tensor, 0, NULL, &share);
 *     fabricast_share_token(share, token, sizeof token, &length);       // send it
 *
 *     fabricast_shared_memory_open(token, length, NULL, NULL, FABRICAST_SECONDS(10), &opened);
 *     fabricast_opened_address(opened, &address, &length);              // the other process
 *     fabricast_opened_tensor(opened, &tensor, sizeof tensor);
 */

/*
 * What the bytes of memory mean. Fill it with fabricast_tensor_init, then change fields. Elements
 * have the type codes of DLPack: 0 int, 1 unsigned int, 2 float, 4 bfloat, 5 complex, 6 bool, from
 * 7 on floats of 8 bits and less.
 */
typedef struct fabricast_tensor {
    size_t size;            /* of this structure, as the caller knows it */
    uint8_t type_code;      /* of an element */
    uint8_t bits;           /* of a number */
    uint16_t lanes;         /* numbers in an element, usually 1 */
    uint32_t dimensions;    /* at most FABRICAST_MAX_DIMENSIONS */
    const uint64_t *shape;  /* elements in each dimension; NULL without dimensions */
    const int64_t *strides; /* distance of neighbours in each dimension, in elements, may be
                               negative or 0; NULL: without gaps, the last index runs fastest */
    uint64_t byte_offset;   /* in the memory, of the element with all indices 0 */
} fabricast_tensor;

#define FABRICAST_MAX_DIMENSIONS 16

/* fabricast_tensor_init(&tensor, sizeof tensor): a byte, without dimensions */
fabricast_status fabricast_tensor_init(fabricast_tensor *tensor, size_t size);

/* Memory that this process shares. */
typedef struct fabricast_share fabricast_share;

/*
 * Shares memory: processes of this user on this machine open it by the token of the share, until
 * that is closed, and keep what they opened. tensor tells them what the bytes mean; NULL: bytes.
 * With read_only 1 they cannot write to memory of the host, and promise not to write to memory of a
 * device. directory is that of the socket by which they open it, which is created if it does not
 * exist; NULL: the default, as of a node.
 *
 * Memory of a device must be complete: synchronize the streams that write it before. Adopted
 * memory of a device can be shared as far as its allocator allows. FABRICAST_E_INVALID_ARGUMENT for
 * adopted memory of the host, which no other process can map: copy it into memory of
 * fabricast_memory_allocate. FABRICAST_E_INVALID_ARGUMENT, too, for unknown elements, and if shape
 * and strides exceed the memory.
 */
fabricast_status fabricast_memory_share(fabricast_memory *memory, const fabricast_tensor *tensor,
                                        uint32_t read_only, const char *directory,
                                        fabricast_share **share);

/*
 * The share's token: a secret of about 100 bytes, at most FABRICAST_MAX_TOKEN, by which other
 * processes open the memory. The buffer is used as by fabricast_agent_card.
 */
#define FABRICAST_MAX_TOKEN 256
fabricast_status fabricast_share_token(fabricast_share *share, void *buffer, size_t capacity,
                                       size_t *length);

/*
 * Limits the share to one receiver: it can be opened once, and ends when the handle is closed. So a
 * program can send the token, and leave the share to the receiver (below) when that has succeeded.
 */
fabricast_status fabricast_share_limit_to_one(fabricast_share *share);

/*
 * Leaves the share to one receiver, with the same token, and closes the handle: the memory is
 * shared until it was opened once, or this process ends. If the buffer is too small
 * (FABRICAST_E_TOO_LONG), and without a buffer, the share is unchanged.
 */
fabricast_status fabricast_share_for_one_receiver(fabricast_share *share, void *buffer,
                                                  size_t capacity, size_t *length);

/* Ends the sharing. The memory is kept until the processes that opened it have closed it. */
fabricast_status fabricast_share_close(fabricast_share *share);

/* Memory of another process. */
typedef struct fabricast_opened fabricast_opened;

/*
 * Maps memory by its token. directory is that of this process, where the socket of the owner is
 * looked for if its own path does not exist here, as in another container; NULL: the default.
 * device names a further device that accesses the memory, as "cuda:1"; NULL: only its own. Memory
 * from cudaMalloc can be opened in other processes only. Memory that this process has open is opened
 * again at once, without the owner.
 *
 * FABRICAST_E_CLOSED, at once, if the owner has ended; FABRICAST_E_NOT_FOUND if it does not share
 * the memory any more, and for memory of a device if this process sees none;
 * FABRICAST_E_DENIED if it belongs to another user; FABRICAST_E_MALFORMED and
 * FABRICAST_E_VERSION_MISMATCH for bytes that are no token; FABRICAST_E_NO_PATH if the device does
 * not reach the memory; FABRICAST_E_DEADLINE_EXCEEDED if the owner does not answer. A signal
 * handler does not end the call.
 */
fabricast_status fabricast_shared_memory_open(const void *token, size_t length,
                                              const char *directory, const char *device,
                                              fabricast_timeout timeout,
                                              fabricast_opened **opened);

/* Address and length of the whole memory in this process. */
fabricast_status fabricast_opened_address(fabricast_opened *opened, void **address,
                                          size_t *length);

/* Where it is: "host", "cuda:0", ..., with the number of the device in this process. The text is
 * valid until the handle is closed. */
fabricast_status fabricast_opened_location(fabricast_opened *opened, const char **location);

/* What its bytes mean; shape and strides are valid until the handle is closed. */
fabricast_status fabricast_opened_tensor(fabricast_opened *opened, fabricast_tensor *tensor,
                                         size_t size);

/* *is_read_only is 1 if its owner shared it for readers only. */
fabricast_status fabricast_opened_is_read_only(fabricast_opened *opened, uint64_t *is_read_only);

/*
 * Unmaps the memory, if no other handle of this process uses it, and tells its owner. No device may
 * use it any more: synchronize the streams that do. The owner keeps the memory until all receivers
 * have closed it, or have ended.
 */
fabricast_status fabricast_opened_close(fabricast_opened *opened);

/* -------------------------------------------------------------------------- agents */

/*
 * Registers regions, puts into regions of other agents, and gets from them. Transfers advance while
 * a function of the agent runs, and on devices and fabrics also in between. Requests of peers for
 * its regions are served by threads of the library.
 *
 * A thread that waits for an event, an operation or a flush lets other threads use the agent,
 * within some milliseconds. Connect, join, disconnect, withdraw and close keep it until they
 * return. Functions without a timeout wait until the other thread's call has returned.
 */
typedef struct fabricast_agent fabricast_agent;

/* Fill it with fabricast_agent_options_init, then change fields. */
typedef struct fabricast_agent_options {
    size_t size;            /* of this structure, as the caller knows it */
    const char *label;      /* name of the agent in reports, at most 64 bytes; NULL: the name of
                               its program */
    const char *directory;  /* existing directory for its socket, for processes of this machine
                               that see it; NULL: only agents of this process, and of a fabric,
                               can connect to it */
    const char *fabric;     /* provider for bytes where no memory is shared: "auto" the best one,
                               "NAME" preferred, "=NAME" only this one, "^NAME" any but this one,
                               several separated by commas; NULL: no fabric */
    const char *source;     /* local address of the fabric, its subnet as "10.0.0.0/16", or its
                               interface as "ib0"; NULL: default */
    int64_t lost_after;     /* nanoseconds of silence after which a peer on a fabric is lost */
    uint64_t cached_bytes;  /* registrations of local-only regions that a rail keeps for reuse: */
    uint32_t cached_count;  /* at most so many bytes and so many regions; 0: none */
    uint32_t rails;         /* connections of the fabric that share the bytes, 1 to 8 */
    uint32_t waiting;       /* FABRICAST_WAITING_... */
    uint32_t force_remote;  /* 1: use the fabric also where memory could be shared, for tests */
} fabricast_agent_options;

/* fabricast_agent_options_init(&options, sizeof options) */
fabricast_status fabricast_agent_options_init(fabricast_agent_options *options, size_t size);

/*
 * Starts an agent. NULL options mean the defaults: no directory and no fabric. With a fabric,
 * libfabric is loaded; FABRICAST_E_NO_PROVIDER with the reasons if no provider can be used.
 */
fabricast_status fabricast_agent_start(const fabricast_agent_options *options,
                                       fabricast_agent **agent);

/*
 * Ends the agent: completes its operations, withdraws its regions, and waits until operations of
 * peers with them have completed. The handle is closed in any case, and calls of other threads that
 * wait with it fail with FABRICAST_E_CLOSED. After a failure the agent has ended nevertheless, or
 * ends when another thread's call with it returns, and a peer may still access memory of its
 * regions: fabricast_memory_close waits for that.
 */
fabricast_status fabricast_agent_close(fabricast_agent *agent, fabricast_timeout timeout);

/*
 * The card of the agent: bytes by which peers connect to it. The program sends them by any means,
 * such as a file or MPI, through a channel that it trusts: the card contains the descriptors of
 * published regions. With a few regions it is usually shorter than 4096 bytes. Without a buffer
 * (NULL and 0) only the length is returned; FABRICAST_E_TOO_LONG, and nothing, if the buffer is too
 * small.
 */
fabricast_status fabricast_agent_card(fabricast_agent *agent, void *buffer, size_t capacity,
                                      size_t *length);

/* What a card says. */
typedef struct fabricast_card_info {
    uint8_t identity[16];     /* of the agent, as in its events: random, new with each start */
    char label[72];           /* zero-terminated */
    uint64_t is_same_machine; /* 1: the agent is on this machine, in whatever container */
    uint64_t fabrics;         /* number of its fabrics */
    uint64_t regions;         /* number of its published regions */
} fabricast_card_info;

/* FABRICAST_E_MALFORMED, FABRICAST_E_VERSION_MISMATCH for bytes that are no card. */
fabricast_status fabricast_card_info_of(const void *card, size_t length,
                                        fabricast_card_info *info, size_t size);

/* ------------------------------------------------------------------------- regions */

/* Memory that is registered with an agent. */
typedef struct fabricast_region fabricast_region;

#define FABRICAST_LOCAL_ONLY 0 /* no peer: to put from and to get into */
#define FABRICAST_READ 1       /* peers may get from it */
#define FABRICAST_WRITE 2      /* peers may put into it; added to FABRICAST_READ: both */

/* Registers whole memory. With a fabric that pins pages this can take half a second for each GiB;
 * registrations of local-only regions are kept for reuse. */
fabricast_status fabricast_region_register(fabricast_agent *agent, fabricast_memory *memory,
                                           uint64_t rights, fabricast_region **region);

/*
 * The region's descriptor: bytes by which a peer joins it (fabricast_agent_join), to send as the
 * card. FABRICAST_E_DENIED if it is local-only. The buffer is used as by fabricast_agent_card.
 */
fabricast_status fabricast_region_descriptor(fabricast_region *region, void *buffer,
                                             size_t capacity, size_t *length);

/*
 * Publishes the region on the agent's card, under a name of 1 to 64 bytes, from now on: peers join
 * it by name (fabricast_agent_route_to). A region published before under the name is replaced; 32
 * names at most (FABRICAST_E_TOO_MANY). FABRICAST_E_DENIED if it is local-only, FABRICAST_E_STALE
 * if it is of another agent.
 */
fabricast_status fabricast_agent_publish(fabricast_agent *agent, const char *name,
                                         fabricast_region *region);

/*
 * Withdraws the region: no new operation of a peer starts, and the call waits until those in flight
 * have completed. After FABRICAST_E_DEADLINE_EXCEEDED and FABRICAST_E_WOULD_BLOCK a peer may still
 * copy; withdraw it again to wait longer. Operations of this agent with it are not waited for.
 */
fabricast_status fabricast_agent_withdraw(fabricast_agent *agent, fabricast_region *region,
                                          fabricast_timeout timeout);

/* Closes it without waiting: no new operation of a peer starts, and the memory is kept until those
 * in flight have ended. Routes from it stay usable. */
fabricast_status fabricast_region_close(fabricast_region *region);

/* ---------------------------------------------------------------- peers and routes */

/* A peer of an agent, by a number that is not reused; never 0. */
typedef uint64_t fabricast_peer;

/*
 * Connects to another agent by its card. FABRICAST_E_CLOSED, at once, if its process has ended;
 * FABRICAST_E_DEADLINE_EXCEEDED if it does not answer; FABRICAST_E_NO_PATH if neither a socket nor
 * a fabric reaches it; FABRICAST_E_DENIED if one does not admit the other's user;
 * FABRICAST_E_STALE if another agent listens there now.
 */
fabricast_status fabricast_agent_connect(fabricast_agent *agent, const void *card,
                                         size_t length, fabricast_timeout timeout,
                                         fabricast_peer *peer);

/* Disconnects from a peer, when operations with it have completed, or else after the timeout: then
 * they end with FABRICAST_E_CLOSED. The peer is disconnected in any case. */
fabricast_status fabricast_agent_disconnect(fabricast_agent *agent, fabricast_peer peer,
                                            fabricast_timeout timeout);

/* Two joined regions, one of the agent and one of a peer, and the path between them. */
typedef struct fabricast_route fabricast_route;

/*
 * Joins a region of the agent with one of a peer, by its descriptor: chooses a path, and maps what
 * it needs, once for all operations. policy prefers ("shared-memory"), requires ("=cuda-ipc") or
 * denies ("^fabric-staged") paths, several separated by commas; NULL: the best one. The paths are
 * same-process, cuda-ipc, shared-memory, service-copied, host-staged, fabric-direct and
 * fabric-staged.
 *
 * FABRICAST_E_NO_PATH with a reason for each path; FABRICAST_E_STALE for a region that was
 * withdrawn, or belongs to another agent.
 */
fabricast_status fabricast_agent_join(fabricast_agent *agent, fabricast_peer peer,
                                      fabricast_region *local, const void *descriptor,
                                      size_t length, const char *policy,
                                      fabricast_timeout timeout, fabricast_route **route);

/* Joins a region that the peer had published before its card was sent; FABRICAST_E_NOT_FOUND with
 * the names that the card has. */
fabricast_status fabricast_agent_route_to(fabricast_agent *agent, fabricast_peer peer,
                                          const char *name, fabricast_region *local,
                                          fabricast_timeout timeout, fabricast_route **route);

/* Name of its path; a word for why it is not a better one, such as "not-exportable", if one was
 * expected, else ""; and a line of text for each path with its verdict. Valid until the route is closed. */
fabricast_status fabricast_route_path(fabricast_route *route, const char **path);
fabricast_status fabricast_route_fallback(fabricast_route *route, const char **reason);
fabricast_status fabricast_route_explain(fabricast_route *route, const char **text);

/* Operations in flight continue. */
fabricast_status fabricast_route_close(fabricast_route *route);

/* ---------------------------------------------------------------------- operations */

/* An operation of an agent, by a number; never 0. */
typedef uint64_t fabricast_token;

/* A block of a transfer: offsets in the target and in the source region, and length in bytes. As an
 * element of lists it never grows. */
typedef struct fabricast_block {
    uint64_t to;
    uint64_t from;
    uint64_t length;
} fabricast_block;

#define FABRICAST_MAX_NOTICE 4096

/* A tag and some bytes that a peer receives as an event: {sizeof notice, 7, "layer 0", 7} */
typedef struct fabricast_notice {
    size_t size;      /* of this structure, as the caller knows it */
    uint64_t tag;     /* defined by the program */
    const void *data; /* NULL without data */
    size_t length;    /* of the data, at most FABRICAST_MAX_NOTICE */
} fabricast_notice;

/*
 * Copies blocks from the local region of a route to the remote one (put), or back (get), and then
 * sends the notice, if it is not NULL: it arrives after the data. Without blocks only the notice is
 * sent. Blocks are copied in any order, and must not overlap in the target.
 *
 * Everything is checked before a byte is copied: FABRICAST_E_INVALID_ARGUMENT for a block outside
 * of a region, FABRICAST_E_DENIED if the rights of the remote region do not allow it,
 * FABRICAST_E_STALE, FABRICAST_E_CLOSED; FABRICAST_E_TOO_MANY if 65536 operations are in flight or
 * have an outcome that was not collected.
 *
 * The list and the notice are not used after the call. The memory is, until the operation has
 * completed: do not write the source, or use the target, before. Collect the outcome once, by
 * fabricast_agent_test or fabricast_agent_wait. With NULL as token it is not collected;
 * fabricast_agent_flush reports a failure nevertheless.
 *
 * Operations are not ordered among each other, unless fabricast_agent_fence separates them.
 */
fabricast_status fabricast_agent_put(fabricast_agent *agent, fabricast_route *route,
                                     const fabricast_block *blocks, size_t count,
                                     const fabricast_notice *notice, fabricast_token *token);
fabricast_status fabricast_agent_get(fabricast_agent *agent, fabricast_route *route,
                                     const fabricast_block *blocks, size_t count,
                                     const fabricast_notice *notice, fabricast_token *token);

/* Transfer a whole region: put copies the local region to the start of the remote one, get the
 * remote region to the start of the local one. */
fabricast_status fabricast_agent_put_all(fabricast_agent *agent, fabricast_route *route,
                                         const fabricast_notice *notice, fabricast_token *token);
fabricast_status fabricast_agent_get_all(fabricast_agent *agent, fabricast_route *route,
                                         const fabricast_notice *notice, fabricast_token *token);

#define FABRICAST_MAX_STRIDES 3

/*
 * Rows of the same length at regular strides, in place of a long list of blocks. Fill it with
 * fabricast_strided_init and change fields, or with fabricast_strided_tile.
 *
 * Each stride repeats all rows of the others count times. No two rows may overlap in the target:
 * there, each stride spans all rows of the shorter ones. Strides of the source may be 0. The order
 * of the strides does not matter.
 */
typedef struct fabricast_strided {
    size_t size;     /* of this structure, as the caller knows it */
    uint64_t from;   /* offset of the first row in the source region */
    uint64_t to;     /* and in the target region */
    uint64_t length; /* bytes of a row */
    uint64_t count[FABRICAST_MAX_STRIDES];       /* 1: this stride is not used */
    uint64_t from_stride[FABRICAST_MAX_STRIDES]; /* bytes between two repetitions in the source */
    uint64_t to_stride[FABRICAST_MAX_STRIDES];   /* and in the target */
} fabricast_strided;

/* fabricast_strided_init(&strided, sizeof strided): one row, of length 0 */
fabricast_status fabricast_strided_init(fabricast_strided *strided, size_t size);

#define FABRICAST_ORDER_C 0       /* the last index runs fastest */
#define FABRICAST_ORDER_FORTRAN 1 /* the first index runs fastest */

/*
 * The rows of a tile (subarray, halo) out of one array and into another: both with the same number
 * of dimensions, 1 to 15, and elements of the same size in bytes. tile has the number of elements
 * in each dimension, extents those of an array, and origin the first element of the tile, from 0
 * on.
 * FABRICAST_E_INVALID_ARGUMENT if the tile exceeds an array, or needs more than
 * FABRICAST_MAX_STRIDES strides after dimensions that it spans completely were merged.
 */
fabricast_status fabricast_strided_tile(fabricast_strided *strided, size_t size, uint32_t order,
                                        uint64_t element, size_t dimensions,
                                        const uint64_t *tile, const uint64_t *from_extents,
                                        const uint64_t *from_origin, const uint64_t *to_extents,
                                        const uint64_t *to_origin);

/* Like fabricast_agent_put and fabricast_agent_get, with rows in place of blocks. */
fabricast_status fabricast_agent_put_strided(fabricast_agent *agent, fabricast_route *route,
                                             const fabricast_strided *rows,
                                             const fabricast_notice *notice,
                                             fabricast_token *token);
fabricast_status fabricast_agent_get_strided(fabricast_agent *agent, fabricast_route *route,
                                             const fabricast_strided *rows,
                                             const fabricast_notice *notice,
                                             fabricast_token *token);

/* Blocks by a route, as a part of a request. As an element of lists it never grows. */
typedef struct fabricast_part {
    fabricast_route *route;
    const fabricast_block *blocks;
    size_t count; /* of the blocks */
} fabricast_part;

/*
 * One operation over several regions of a peer, such as a region for each layer of a cache: like
 * fabricast_agent_put and fabricast_agent_get, by several routes. The notice is sent after the data
 * of all. FABRICAST_E_INVALID_ARGUMENT for routes to different peers, or none. If one part is
 * refused, no byte is copied.
 */
fabricast_status fabricast_agent_put_parts(fabricast_agent *agent, const fabricast_part *parts,
                                           size_t count, const fabricast_notice *notice,
                                           fabricast_token *token);
fabricast_status fabricast_agent_get_parts(fabricast_agent *agent, const fabricast_part *parts,
                                           size_t count, const fabricast_notice *notice,
                                           fabricast_token *token);

/* Blocks of a route, checked and prepared for puts or gets that are repeated. */
typedef struct fabricast_prepared fabricast_prepared;

/*
 * Checks blocks as fabricast_agent_put and fabricast_agent_get do, and prepares them, such as all
 * pages of a cache. Where a device copies, the list stays in memory that it reads: a request costs
 * the start of a kernel. Some thousand small blocks gain most. The list is not used after the call;
 * the memory of both regions stays in use until the handle is closed.
 */
fabricast_status fabricast_agent_prepare_put(fabricast_agent *agent, fabricast_route *route,
                                             const fabricast_block *blocks, size_t count,
                                             fabricast_prepared **prepared);
fabricast_status fabricast_agent_prepare_get(fabricast_agent *agent, fabricast_route *route,
                                             const fabricast_block *blocks, size_t count,
                                             fabricast_prepared **prepared);

/* Bytes of all its blocks together. */
fabricast_status fabricast_prepared_bytes(fabricast_prepared *prepared, uint64_t *bytes);

#define FABRICAST_ALL ((size_t)-1) /* count for all blocks, with NULL as indices */

/*
 * Starts a prepared transfer: of the blocks with these indices, from 0 on and each given once, or of
 * all blocks with NULL and FABRICAST_ALL. With 0 indices nothing is copied. Otherwise like
 * fabricast_agent_put.
 *
 * FABRICAST_E_INVALID_ARGUMENT for an index that no block has; FABRICAST_E_STALE if it was prepared
 * by another agent.
 */
fabricast_status fabricast_agent_submit(fabricast_agent *agent, fabricast_prepared *prepared,
                                        const uint32_t *indices, size_t count,
                                        const fabricast_notice *notice, fabricast_token *token);

/* Operations in flight continue. */
fabricast_status fabricast_prepared_close(fabricast_prepared *prepared);

/*
 * Transfers in stream order: like fabricast_agent_put, fabricast_agent_get and
 * fabricast_agent_submit, after all work that was begun on a stream so far. The call does not wait.
 *
 *     fabricast_stream_adopt("cuda:0", stream, &handle);            // once
 *     kernel<<<..., stream>>>(page);
 *     fabricast_agent_put_after(agent, route, &block, 1, NULL, handle, &token);
 *     fabricast_agent_delay_stream(agent, token, handle, FABRICAST_SECONDS(1));
 *     kernel<<<..., stream>>>(page);                                // may write it again
 *
 * Where a device of this process copies, it waits itself. On other paths the transfer begins in a
 * later call with the agent. It is no part of a graph: a stream that is being captured is refused
 * when it is adopted.
 */
fabricast_status fabricast_agent_put_after(fabricast_agent *agent, fabricast_route *route,
                                           const fabricast_block *blocks, size_t count,
                                           const fabricast_notice *notice,
                                           fabricast_stream *stream, fabricast_token *token);
fabricast_status fabricast_agent_get_after(fabricast_agent *agent, fabricast_route *route,
                                           const fabricast_block *blocks, size_t count,
                                           const fabricast_notice *notice,
                                           fabricast_stream *stream, fabricast_token *token);
fabricast_status fabricast_agent_submit_after(fabricast_agent *agent,
                                              fabricast_prepared *prepared,
                                              const uint32_t *indices, size_t count,
                                              const fabricast_notice *notice,
                                              fabricast_stream *stream, fabricast_token *token);

/*
 * Later work on the stream waits for the data of an operation. The call waits only until the
 * operation has begun: behind a fence, or behind many others. An operation that is over delays
 * nothing; fabricast_agent_wait returns its outcome.
 *
 * FABRICAST_E_NO_PATH on a path for which streams do not wait (host-staged, fabrics): wait for the
 * operation instead. FABRICAST_E_DEADLINE_EXCEEDED, FABRICAST_E_WOULD_BLOCK if it has not begun.
 */
fabricast_status fabricast_agent_delay_stream(fabricast_agent *agent, fabricast_token token,
                                              fabricast_stream *stream,
                                              fabricast_timeout timeout);

/*
 * Ends an operation that has not begun, or stops what of it has not begun. Copies in flight
 * complete; then the operation ends with FABRICAST_E_CANCELLED, and its notice is not sent. Its
 * outcome is collected as usual. *is_cancelled is 0 if all of it is under way or over: then it ends
 * as usual; may be NULL.
 *
 * A cancelled put has written all, a part or nothing of its bytes. Operations behind a fence do not
 * start, as after a failure.
 */
fabricast_status fabricast_agent_cancel(fabricast_agent *agent, fabricast_token token,
                                        uint64_t *is_cancelled);

/*
 * Sends a notice without data. It may overtake earlier operations; the ordered one is sent after
 * all earlier operations with the peer have completed, and later ones do not wait for it. If one of
 * them failed, it ends with FABRICAST_E_CANCELLED, and so do later ones, until
 * fabricast_agent_flush has reported the failure.
 */
fabricast_status fabricast_agent_notify(fabricast_agent *agent, fabricast_peer peer,
                                        const fabricast_notice *notice, fabricast_token *token);
fabricast_status fabricast_agent_notify_ordered(fabricast_agent *agent, fabricast_peer peer,
                                                const fabricast_notice *notice,
                                                fabricast_token *token);

/*
 * Later operations with the peer start after all earlier ones have completed; the call does not
 * wait. If one of them fails, operations behind the fence end with FABRICAST_E_CANCELLED, until
 * fabricast_agent_flush has reported the failure.
 */
fabricast_status fabricast_agent_fence(fabricast_agent *agent, fabricast_peer peer);

/*
 * Waits until all operations with the peer have completed: also those that other threads start
 * meanwhile. FABRICAST_E_FAILED if at least one failed since the last flush, with the first.
 * FABRICAST_E_DEADLINE_EXCEEDED, FABRICAST_E_WOULD_BLOCK, FABRICAST_E_INTERRUPTED: they continue.
 */
fabricast_status fabricast_agent_flush(fabricast_agent *agent, fabricast_peer peer,
                                       fabricast_timeout timeout);

/* Makes progress with all operations, without waiting. *moved is 1 if anything changed; may be
 * NULL. */
fabricast_status fabricast_agent_progress(fabricast_agent *agent, uint64_t *moved);

/*
 * The outcome of an operation, which is collected once: afterwards its token is unknown
 * (FABRICAST_E_NOT_FOUND). Returns the failure of the operation, if it failed. *is_over is 0 while
 * the operation is in flight. *bytes are the transferred bytes; may be NULL.
 */
fabricast_status fabricast_agent_test(fabricast_agent *agent, fabricast_token token,
                                      uint64_t *is_over, uint64_t *bytes);

/* Waits for an operation and collects its outcome. FABRICAST_E_WOULD_BLOCK,
 * FABRICAST_E_INTERRUPTED, and FABRICAST_E_DEADLINE_EXCEEDED while the operation is in flight: it
 * continues, and can be waited for again. */
fabricast_status fabricast_agent_wait(fabricast_agent *agent, fabricast_token token,
                                      fabricast_timeout timeout, uint64_t *bytes);

/* The outcome of an operation is not collected; it continues. Unknown tokens of the agent are
 * ignored. */
fabricast_status fabricast_agent_forget(fabricast_agent *agent, fabricast_token token);

/* Number of operations in flight. */
fabricast_status fabricast_agent_in_flight(fabricast_agent *agent, uint64_t *count);

#define FABRICAST_AGENT_EVENT_JOINED 1        /* another agent connected to this one */
#define FABRICAST_AGENT_EVENT_NOTICE 2        /* its notice arrived; the data of its operation is
                                                 there */
#define FABRICAST_AGENT_EVENT_LEFT 3          /* it disconnected or died, or was lost; all its
                                                 notices were reported before */
#define FABRICAST_AGENT_EVENT_RAIL_LOST 4     /* a rail to it was lost; the others continue */
#define FABRICAST_AGENT_EVENT_RAIL_RESTORED 5 /* the rail carries bytes again */

typedef struct fabricast_agent_event {
    uint64_t kind;    /* FABRICAST_AGENT_EVENT_...; skip numbers that you do not know */
    uint64_t tag;     /* of the notice */
    uint64_t length;  /* of its data */
    uint64_t rail;    /* number of the rail, from 0 on */
    uint64_t is_dead; /* 1: its process ended, or nothing was received from it for lost_after */
    uint8_t from[16]; /* identity of the other agent */
    uint8_t data[FABRICAST_MAX_NOTICE]; /* of the notice */
    char label[72];   /* of the other agent; empty for a notice; zero-terminated */
    char reason[256]; /* why the rail was lost; zero-terminated, and cut if it is longer */
} fabricast_agent_event;

/* The next event, and makes progress meanwhile. */
fabricast_status fabricast_agent_next_event(fabricast_agent *agent, fabricast_timeout timeout,
                                            fabricast_agent_event *event, size_t size);

/* ----------------------------------------------------------- communication domains */

/*
 * Collective operations among processes of one machine, in host memory:
 *
 *     fabricast_domain_join_launched(NULL, &domain);         // of mpirun, srun or torchrun
 *     fabricast_domain_all_reduce(domain, NULL, sums, count, FABRICAST_TYPE_F64,
 *                                 FABRICAST_REDUCE_SUM, FABRICAST_SECONDS(10));
 *     fabricast_domain_close(domain, FABRICAST_SECONDS(10));
 */

/* The ranks that carry out collective operations together, as one of them sees them. */
typedef struct fabricast_domain fabricast_domain;

/* Types of elements. Operations that only move elements take FABRICAST_TYPE_U8, and bytes as count,
 * for types that are not here. */
#define FABRICAST_TYPE_U8 1
#define FABRICAST_TYPE_I8 2
#define FABRICAST_TYPE_U16 3
#define FABRICAST_TYPE_I16 4
#define FABRICAST_TYPE_U32 5
#define FABRICAST_TYPE_I32 6
#define FABRICAST_TYPE_U64 7
#define FABRICAST_TYPE_I64 8
#define FABRICAST_TYPE_F16 9
#define FABRICAST_TYPE_BF16 10
#define FABRICAST_TYPE_F32 11
#define FABRICAST_TYPE_F64 12

/* How elements of several ranks become one. Integers wrap. Elements are combined in the order of the
 * ranks; those of half precision in single precision, rounded once at the end. */
#define FABRICAST_REDUCE_SUM 1
#define FABRICAST_REDUCE_PRODUCT 2
#define FABRICAST_REDUCE_MIN 3
#define FABRICAST_REDUCE_MAX 4
#define FABRICAST_REDUCE_MEAN 5 /* the sum divided by the number of ranks */

/* Collective operations, as keys of parameters. */
#define FABRICAST_OPERATION_ALL_REDUCE 1
#define FABRICAST_OPERATION_ALL_GATHER 2
#define FABRICAST_OPERATION_REDUCE_SCATTER 3
#define FABRICAST_OPERATION_BROADCAST 4
#define FABRICAST_OPERATION_ALL_TO_ALL 5
#define FABRICAST_OPERATION_GATHER 6
#define FABRICAST_OPERATION_SCATTER 7
#define FABRICAST_OPERATION_REDUCE 8
#define FABRICAST_OPERATION_BARRIER 9

#define FABRICAST_ALGORITHM_AUTOMATIC 0 /* the default of the operation and the size */
#define FABRICAST_ALGORITHM_ONE_STEP 1  /* each rank reads all that it needs from each other rank */
#define FABRICAST_ALGORITHM_TWO_STEP 2  /* each rank reduces its part, then the parts are gathered */
#define FABRICAST_ALGORITHM_DIRECT 3    /* the same, but ranks read the memory of each other */
#define FABRICAST_ALGORITHM_LIBRARY 4   /* that of another library, for programs with a choice */

/* The parameters of an operation, which are the same on all ranks. Does not grow. */
typedef struct fabricast_parameters {
    uint32_t alpha;      /* share of the bytes that the fast path moves, in thousandths */
    uint32_t chunk_bits; /* bytes that are moved at once, as a power of two; 0: the default */
    uint32_t stripes;    /* streams or links that a path uses; 0: the default */
    uint32_t algorithm;  /* FABRICAST_ALGORITHM_... */
} fabricast_parameters;

/* How the times of the ranks become the time of the operation. */
#define FABRICAST_AGGREGATION_MAX 0
#define FABRICAST_AGGREGATION_MEAN 1
#define FABRICAST_AGGREGATION_PERCENTILE 2

#define FABRICAST_AGGREGATE_AT_NEXT_ENTRANCE 0 /* rank 0 at a later entrance; no rank waits */
#define FABRICAST_AGGREGATE_IN_ROUNDS 1 /* rank 0 when it records: it waits for the other ranks */

/* Fill it with fabricast_domain_options_init, then change fields. Equal on all ranks, except for the
 * directory's spelling, timeout and waiting. */
typedef struct fabricast_domain_options {
    size_t size;               /* of this structure, as the caller knows it */
    const char *directory;     /* in which ranks find each other; NULL: FABRICAST_DIRECTORY of the
                                  environment, or else a default directory of the user */
    const char *job;           /* domains of different jobs do not mix; NULL: "" */
    const uint32_t *ranks;     /* ranks of the job that belong to the domain, whose rank n is the
                                  nth of them; NULL: all of the job */
    size_t rank_count;
    const fabricast_parameters *candidates; /* what a parameter store chooses from; NULL: defaults */
    size_t candidate_count;
    uint64_t topology_hash;    /* of machines and devices, which may be anything */
    int64_t timeout;           /* nanoseconds for which a rank waits for the others to join; -1:
                                  without a timeout */
    int64_t round_timeout;     /* nanoseconds that rank 0 waits for the statistics of a round */
    uint32_t waiting;          /* FABRICAST_WAITING_... */
    uint32_t window;           /* operations that a rank may be ahead of another one, at least 1;
                                  new parameters take effect so many operations later */
    uint32_t aggregation;      /* FABRICAST_AGGREGATION_... */
    uint32_t percentile;       /* of FABRICAST_AGGREGATION_PERCENTILE, 0 to 100 */
    uint32_t aggregation_point; /* FABRICAST_AGGREGATE_... */
    uint32_t first_alpha;      /* first share of the fast path that a parameter store tries, in
                                  thousandths; 1000: there is no second path */
    uint32_t reads_peers;      /* 0: ranks do not read the memory of each other by the kernel */
    uint32_t is_fixed;         /* 1: all operations of the domain use `parameters`; nothing is
                                  learnt */
    fabricast_parameters parameters;
} fabricast_domain_options;

/* fabricast_domain_options_init(&options, sizeof options) */
fabricast_status fabricast_domain_options_init(fabricast_domain_options *options, size_t size);

/*
 * Joins the domain of a job of world_size processes, as the rank of this number in the domain. All
 * ranks join with the same arguments, beside their number; the call waits until they have come. NULL
 * options mean the defaults.
 *
 * FABRICAST_E_DEADLINE_EXCEEDED with the ranks that have not come; FABRICAST_E_VERSION_MISMATCH if
 * ranks are of different builds, or have different options.
 */
fabricast_status fabricast_domain_join(uint32_t world_size, uint32_t rank,
                                       const fabricast_domain_options *options,
                                       fabricast_domain **domain);

/*
 * Joins the domain of all ranks that mpirun, srun or torchrun started; without a launcher it has one
 * rank. `job`, `ranks` and `topology_hash` of the options are those of the launcher, and not set.
 * FABRICAST_E_NOT_FOUND if ranks are on several machines.
 */
fabricast_status fabricast_domain_join_launched(const fabricast_domain_options *options,
                                                fabricast_domain **domain);

/* Leaves when all ranks have called it; after a failure the rank has left nevertheless.
 * FABRICAST_NOW leaves at once: operations of the others fail with FABRICAST_E_CLOSED. An operation of
 * another thread is waited for. */
fabricast_status fabricast_domain_close(fabricast_domain *domain, fabricast_timeout timeout);

fabricast_status fabricast_domain_rank(fabricast_domain *domain, uint32_t *rank);
fabricast_status fabricast_domain_size(fabricast_domain *domain, uint32_t *size);

/* Copies as many ranks as `capacity` that caused the last error of the calling thread. Returns the
 * number of all; 0 if they are not known, or the error is of no domain. */
size_t fabricast_error_ranks(uint32_t *ranks, size_t capacity);

/*
 * All ranks call the same operations in the same order, with the same count, type, reduction and root.
 * Counts and offsets are in elements. Buffers are in host memory, apart from each other, or in place:
 * that is what NULL means below. They are not used after the call.
 *
 * After FABRICAST_E_INVALID_ARGUMENT, also for FABRICAST_E_BAD_HANDLE and a handle that another thread
 * uses, the domain goes on. After each other error it is over, on all ranks:
 * FABRICAST_E_MISMATCH if ranks called different operations, FABRICAST_E_RANK_FAILED if a process has
 * ended, FABRICAST_E_CLOSED if it has left, and FABRICAST_E_DEADLINE_EXCEEDED if it did not take part
 * within the timeout. fabricast_error_ranks has the ranks. Signal handlers do not end these calls.
 */

/* Waits until all ranks have called it. */
fabricast_status fabricast_domain_barrier(fabricast_domain *domain, fabricast_timeout timeout);

/* Reduces the elements of all ranks to those of each. NULL input: they are in the output. */
fabricast_status fabricast_domain_all_reduce(fabricast_domain *domain, const void *input,
                                             void *output, size_t count, uint32_t type,
                                             uint32_t op, fabricast_timeout timeout);

/* Reduces the elements of all ranks to those of the root; other outputs may be NULL. NULL input: they
 * are in the output, which only changes at the root. */
fabricast_status fabricast_domain_reduce(fabricast_domain *domain, const void *input,
                                         void *output, size_t count, uint32_t type, uint32_t op,
                                         uint32_t root, fabricast_timeout timeout);

/* Copies the buffer of the root to those of all. */
fabricast_status fabricast_domain_broadcast(fabricast_domain *domain, void *buffer, size_t count,
                                            uint32_t type, uint32_t root,
                                            fabricast_timeout timeout);

/* Copies `count` elements of each rank to all, in the order of the ranks. NULL input: they are in
 * their place in the output. */
fabricast_status fabricast_domain_all_gather(fabricast_domain *domain, const void *input,
                                             void *output, size_t count, uint32_t type,
                                             fabricast_timeout timeout);

/* Reduces a block of `count` elements for each rank: rank n gets that of the nth blocks. NULL input: the
 * blocks are in the output, and the result is at its start. */
fabricast_status fabricast_domain_reduce_scatter(fabricast_domain *domain, const void *input,
                                                 void *output, size_t count, uint32_t type,
                                                 uint32_t op, fabricast_timeout timeout);

/* Copies the nth block of `count` elements of each rank to rank n. NULL input: blocks are exchanged in
 * the output. */
fabricast_status fabricast_domain_all_to_all(fabricast_domain *domain, const void *input,
                                             void *output, size_t count, uint32_t type,
                                             fabricast_timeout timeout);

/* Copies `count` elements of each rank to the root; other outputs may be NULL. NULL input of the root:
 * its elements are in their place in the output. */
fabricast_status fabricast_domain_gather(fabricast_domain *domain, const void *input,
                                         void *output, size_t count, uint32_t type,
                                         uint32_t root, fabricast_timeout timeout);

/* Copies a block of `count` elements of the root to each rank; other inputs may be NULL. NULL output of
 * the root: its block stays in the input. */
fabricast_status fabricast_domain_scatter(fabricast_domain *domain, const void *input,
                                          void *output, size_t count, uint32_t type,
                                          uint32_t root, fabricast_timeout timeout);

/*
 * The same with blocks of different numbers of elements: counts[n] elements of or for rank n, from
 * offsets[n] on. NULL offsets: blocks follow each other. Lists of gather and scatter are used at the
 * root only. The number of elements that a rank gives is the one that the other rank takes.
 */
fabricast_status fabricast_domain_all_gather_unequal(fabricast_domain *domain, const void *input,
                                                     size_t count, void *output,
                                                     const size_t *counts, const size_t *offsets,
                                                     uint32_t type, fabricast_timeout timeout);
fabricast_status fabricast_domain_reduce_scatter_unequal(fabricast_domain *domain,
                                                         const void *input, void *output,
                                                         const size_t *counts,
                                                         const size_t *offsets, uint32_t type,
                                                         uint32_t op, fabricast_timeout timeout);
/* NULL input with NULL send_counts: blocks are exchanged in the output. */
fabricast_status fabricast_domain_all_to_all_unequal(
    fabricast_domain *domain, const void *input, const size_t *send_counts,
    const size_t *send_offsets, void *output, const size_t *receive_counts,
    const size_t *receive_offsets, uint32_t type, fabricast_timeout timeout);
fabricast_status fabricast_domain_gather_unequal(fabricast_domain *domain, const void *input,
                                                 size_t count, void *output,
                                                 const size_t *counts, const size_t *offsets,
                                                 uint32_t type, uint32_t root,
                                                 fabricast_timeout timeout);
fabricast_status fabricast_domain_scatter_unequal(fabricast_domain *domain, const void *input,
                                                  const size_t *counts, const size_t *offsets,
                                                  void *output, size_t count, uint32_t type,
                                                  uint32_t root, fabricast_timeout timeout);

/* The parameters of an operation of so many bytes in the last one: the same on all ranks. */
fabricast_status fabricast_domain_parameters(fabricast_domain *domain, uint32_t operation,
                                             uint64_t bytes, uint32_t type,
                                             fabricast_parameters *parameters);

/* 1: stops learning; 0: continues it. On one machine without effect on other ranks than 0; in a domain of
 * several machines all ranks call it before the same operation, and fabricast_domain_load, too. */
fabricast_status fabricast_domain_freeze(fabricast_domain *domain, uint32_t is_frozen);

/* The parameters as JSON, which fabricast_text_free frees: on rank 0 those that it has settled on, on
 * others those in use. `topology` names the machines, and may be NULL. */
fabricast_status fabricast_domain_save(fabricast_domain *domain, const char *topology, char **json);

/* Uses saved parameters from now on. FABRICAST_E_MALFORMED for those of another topology or version, or
 * other text. */
fabricast_status fabricast_domain_load(fabricast_domain *domain, const char *topology,
                                       const char *json, size_t length);

/* ---------------------------------------------------------------- parameter stores */

/*
 * For programs that carry out collective operations themselves, on two paths: all ranks use the same
 * parameters in the operation of the same number. Rank 0 learns them from what all ranks record.
 *
 *     options.first_alpha = 900;          // the second path gets a tenth of the bytes at first
 *     fabricast_param_store_attach(ranks, rank, &options, &store);
 *     fabricast_param_store_enter(store, FABRICAST_OPERATION_ALL_GATHER, bytes, FABRICAST_TYPE_U8,
 *                                 FABRICAST_SECONDS(10), &entry);
 *     ... move entry.parameters.alpha thousandths of the bytes on the fast path ...
 *     fabricast_param_store_record(store, &entry, &stat);
 *
 * For C++ there is a class: fabricast_collective.hpp.
 */
typedef struct fabricast_param_store fabricast_param_store;

/* An operation that a rank has entered. Does not grow. */
typedef struct fabricast_param_entry {
    uint64_t number;    /* from 1: the same on all ranks */
    uint64_t bytes;     /* the largest size for which the parameters are */
    uint32_t operation; /* FABRICAST_OPERATION_... */
    uint32_t type;      /* FABRICAST_TYPE_... */
    fabricast_parameters parameters; /* the same on all ranks */
} fabricast_param_entry;

/* How an operation went on this rank. Does not grow. */
typedef struct fabricast_exec_stat {
    uint64_t fast_time;    /* nanoseconds of the fast path; 0: it moved nothing */
    uint64_t second_time;  /* of the second path */
    uint64_t fast_bytes;   /* bytes that the fast path moved */
    uint64_t second_bytes; /* that the second path moved */
    uint64_t success;      /* 0: not all bytes arrived */
} fabricast_exec_stat;

/* Attaches to the store of a job, as fabricast_domain_join joins its domain. */
fabricast_status fabricast_param_store_attach(uint32_t world_size, uint32_t rank,
                                              const fabricast_domain_options *options,
                                              fabricast_param_store **store);

/* Leaves: no rank waits for this one any more. */
fabricast_status fabricast_param_store_leave(fabricast_param_store *store);

/* Enters the next operation. All ranks enter the same ones in the same order; one that is too far
 * ahead waits. After FABRICAST_E_DEADLINE_EXCEEDED, with the rank that is behind, it is not entered, and
 * the call can be repeated. Ranks whose process has ended are not waited for. */
fabricast_status fabricast_param_store_enter(fabricast_param_store *store, uint32_t operation,
                                             uint64_t bytes, uint32_t type,
                                             fabricast_timeout timeout,
                                             fabricast_param_entry *entry);

/* Records how an operation went. */
fabricast_status fabricast_param_store_record(fabricast_param_store *store,
                                              const fabricast_param_entry *entry,
                                              const fabricast_exec_stat *stat);

/* The parameters of a key in the operation that was entered last. */
fabricast_status fabricast_param_store_parameters(fabricast_param_store *store,
                                                  uint32_t operation, uint64_t bytes,
                                                  uint32_t type,
                                                  fabricast_parameters *parameters);

/* 1: rank 0 has ended or left, so that the parameters stay as they are. */
fabricast_status fabricast_param_store_writer_lost(fabricast_param_store *store,
                                                   uint64_t *is_lost);

/* 1: stops learning; 0: continues it. Without effect on other ranks than 0. */
fabricast_status fabricast_param_store_freeze(fabricast_param_store *store, uint32_t is_frozen);

/* The parameters as JSON, which fabricast_text_free frees: on rank 0 those that it has settled on, on
 * others those in use. `topology` names the machines, and may be NULL. */
fabricast_status fabricast_param_store_save(fabricast_param_store *store, const char *topology,
                                            char **json);

/* Uses saved parameters from now on. Without effect on other ranks than 0. FABRICAST_E_MALFORMED for
 * those of another topology or version, or other text. */
fabricast_status fabricast_param_store_load(fabricast_param_store *store, const char *topology,
                                            const char *json, size_t length);

#ifdef __cplusplus
}
#endif

#endif
