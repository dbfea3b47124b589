/*
 * fabricast.h - topics: one copy of a message in GPU or host memory, read by any number of
 * processes, on any number of machines. For C99 and C++; link with -lfabricast.
 *
 *     fabricast_node *node;
 *     fabricast_topic *topic;
 *     fabricast_publisher *publisher;
 *
 *     if (fabricast_node_join(NULL, &node) != FABRICAST_OK)
 *         fprintf(stderr, "%s\n", fabricast_error_message());
 *
 * Every function that can fail returns a status, FABRICAST_OK or a number below 0, and then
 * the calling thread can ask what happened (fabricast_error_message). Handles, texts, addresses,
 * numbers and structures that it would have given are NULL or 0 then (a descriptor: -1).
 * Arguments are checked as far as they can be: NULL, sizes, texts (they end with a zero, within
 * 4096 bytes, and are UTF-8), and handles that were closed, are of another kind or never were
 * any. Functions never end the process.
 *
 * Handles are names, not addresses: never follow one. Each is closed by its own function,
 * in any order; closing NULL does nothing. Closing a node, topic, publisher or subscriber does
 * not touch what was made from it, which goes on until it is closed itself. Closing the last
 * handle that has to do with a node leaves it, which can take seconds.
 *
 * Functions may be called by any thread. A loan or subscriber is used by one thread at a
 * time; others wait for their turn, no longer than their timeout allows. After a fork the
 * child makes handles of its own; with its parent's it gets FABRICAST_E_FORKED.
 *
 * Binary interface: FABRICAST_ABI is also the number in the name of the shared library.
 * Within one number, functions are only added; structures only grow at their end, and say or
 * are passed along with their size, so that programs go on working with later libraries
 * without being compiled again. Numbers keep their meaning, and new ones may come.
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

/* 0, or why not. Programs take numbers that they do not know as FABRICAST_E_FAILED. */
typedef int32_t fabricast_status;

#define FABRICAST_OK 0
#define FABRICAST_E_FAILED (-1)            /* something below failed: see the message */
#define FABRICAST_E_INVALID_ARGUMENT (-2)  /* an argument that can never be right */
#define FABRICAST_E_SETTINGS_DIFFER (-3)   /* topic exists with other settings */
#define FABRICAST_E_NOT_FOUND (-4)           /* topic, node or device not found */
#define FABRICAST_E_OVER_BUDGET (-5)       /* the budget does not allow it */
#define FABRICAST_E_TOO_LONG (-6)          /* longer than the topic's largest message */
#define FABRICAST_E_TOO_MANY (-7)          /* a limit on the number of objects is reached */
#define FABRICAST_E_WOULD_BLOCK (-8)       /* no message or no room, and the call does not wait */
#define FABRICAST_E_DEADLINE_EXCEEDED (-9) /* timeout expired */
#define FABRICAST_E_EVICTED (-10)          /* evicted: it held samples for too long */
#define FABRICAST_E_DENIED (-11)           /* not allowed to use this node */
#define FABRICAST_E_MALFORMED (-12)        /* received or stored data is malformed */
#define FABRICAST_E_VERSION_MISMATCH (-13) /* the other side speaks another version */
#define FABRICAST_E_CLOSED (-14)           /* the node, or the handle meanwhile, was closed */
#define FABRICAST_E_FORKED (-15)           /* the handle is the parent process's */
#define FABRICAST_E_BAD_HANDLE (-16)       /* not an open handle of this kind */
#define FABRICAST_E_PANICKED (-17)         /* internal error (panic) in the library */
#define FABRICAST_E_POISONED (-18)         /* its publisher was lost before it was written */
#define FABRICAST_E_TOO_MANY_LOANS (-19)   /* the publisher has all that it may have */
#define FABRICAST_E_TOO_MANY_SAMPLES (-20) /* the subscriber holds all that it may hold */
#define FABRICAST_E_NO_PROVIDER (-21)      /* none carries messages to other nodes, or there is
                                              no libfabric */
#define FABRICAST_E_INTERRUPTED (-22)      /* a signal handler ran while the call waited */

/* A status in words, never NULL. */
const char *fabricast_status_name(fabricast_status status);

/*
 * Of the calling thread's last call that failed: its status, what happened in words, and what
 * was tried. FABRICAST_OK and empty texts if none has. Calls that succeed change nothing. The
 * texts stay until the thread's next call that fails, fabricast_error_clear, or its end.
 */
fabricast_status fabricast_error_status(void);
const char *fabricast_error_message(void);
const char *fabricast_error_operation(void);
void fabricast_error_clear(void);

/* The library's version, as "0.1.0", and the number of its binary interface. */
const char *fabricast_version(void);
uint32_t fabricast_abi(void);

/* Handles of this process that are open, of all kinds, and texts that were not freed. */
size_t fabricast_open_handles(void);

/* ------------------------------------------------------------------------------ log */

#define FABRICAST_LOG_OFF 0
#define FABRICAST_LOG_ERROR 1
#define FABRICAST_LOG_WARN 2
#define FABRICAST_LOG_INFO 3
#define FABRICAST_LOG_DEBUG 4
#define FABRICAST_LOG_TRACE 5

/*
 * A line of the log, without an end of line: good until the callback returns. Any thread calls
 * it, of the library or in one of its functions, but one at a time: the others wait. So it
 * returns soon, throws nothing, does not leave by longjmp, waits for no other thread that uses
 * the library, and calls none of its functions: they fail there (FABRICAST_E_INVALID_ARGUMENT).
 */
typedef void (*fabricast_log_callback)(int32_t level, const char *text, void *user_data);

/*
 * Has what the library logs, up to this level, told to a callback; NULL or FABRICAST_LOG_OFF: to
 * none, as at first. When it returns the callback before is not called any more, and its data may
 * be freed. FABRICAST_E_INVALID_ARGUMENT if the callback itself calls it. A forked child has no
 * callback. A misspelt FABRICAST_ variable is told there once, as a warning.
 */
fabricast_status fabricast_set_log(int32_t level, fabricast_log_callback callback,
                                   void *user_data);

/* ------------------------------------------------------------------------- waiting */

/* How long a call may wait, in nanoseconds: for messages, for room, for its turn. A copy that a
 * device makes has its own time, counted from its beginning: as long again, or 10 seconds with
 * FABRICAST_NOW and for bytes of the host's. */
typedef int64_t fabricast_timeout;

#define FABRICAST_NOW ((fabricast_timeout)0)      /* not at all: FABRICAST_E_WOULD_BLOCK */
#define FABRICAST_FOREVER ((fabricast_timeout)-1) /* as long as it takes */
#define FABRICAST_MILLISECONDS(count) ((fabricast_timeout)(count) * 1000000)
#define FABRICAST_SECONDS(count) ((fabricast_timeout)(count) * 1000000000)

/*
 * A call with such a timeout returns FABRICAST_E_INTERRUPTED when a signal handler of the program
 * ran in the calling thread while the call slept, whatever SA_RESTART says of it. Nothing was taken
 * or sent, a loan is as it was, and the call can be made again to go on. The same holds for
 * fabricast_loan_memory, _write and _set_metadata, which have no timeout, while they wait for another
 * thread that publishes the loan. A handler that runs before
 * the call sleeps is not noticed: between the program's last look and some microseconds after the
 * call began, or at any time with FABRICAST_WAITING_BUSY, by which calls never sleep. A program that
 * must not miss a signal polls the descriptor (fabricast_subscriber_descriptor) together with one
 * that its handler writes to, or waits for a second at a time.
 */

/* --------------------------------------------------------------------------- nodes */

/*
 * A membership in a node: the processes of a machine that use the same directory. One of
 * them serves the others; if it ends, the next one does.
 */
typedef struct fabricast_node fabricast_node;

#define FABRICAST_SERVICE_EMBEDDED 0 /* this process serves the node if none does */
#define FABRICAST_SERVICE_EXTERNAL 1  /* another process always does */

#define FABRICAST_WAITING_ADAPTIVE 0 /* look for some microseconds, then sleep */
#define FABRICAST_WAITING_BUSY 1     /* look all the time: a whole core, lowest latency */
#define FABRICAST_WAITING_BLOCK 2    /* sleep at once */

/* Fill it with fabricast_node_options_init, then change what is to be another way. */
typedef struct fabricast_node_options {
    size_t size;            /* of this structure, as the caller knows it */
    const char *directory;  /* where the processes meet; NULL: FABRICAST_DIRECTORY of the
                               environment, or else one of the user's */
    const char *label;      /* what this process is called in reports: at most 64 bytes;
                               NULL: as its program */
    int64_t patience;       /* how long to wait for the node's service, in nanoseconds */
    uint64_t host_budget;   /* bytes that all topics may take of the host's memory, and */
    uint64_t device_budget; /* of each device's, if this process serves; 0: usual */
    uint32_t service;       /* FABRICAST_SERVICE_... */
    uint32_t waiting;       /* FABRICAST_WAITING_... */

    /* How the node is connected to others, if this process serves it: not at all if the
       first three are NULL. */
    const char *listen;     /* where other nodes reach this one, as "10.0.0.1:7007"; port 0 is
                               any that is free */
    const char *peers;      /* other nodes, as "host:port,host:port" */
    const char *rendezvous; /* a node, as "host:port", that tells of the others */
    const char *name;       /* what the node is called among others; NULL: its label */
    const char *provider;   /* by which provider messages go: "NAME" or "=NAME" only by this
                               one, "^NAME" by any but this one, several separated by commas;
                               NULL: the best */
    const char *source;     /* the address that messages leave from; NULL: usual */
    int64_t lost_after;     /* a node that was not heard of for so long is lost, nanoseconds */
    uint32_t insecure;      /* 1: other nodes, though none is authenticated and nothing is
                               encrypted yet; on loopback each user of the machine can connect */
    uint32_t workers;       /* threads that carry messages; 0: usual */
} fabricast_node_options;

/* fabricast_node_options_init(&options, sizeof options) */
fabricast_status fabricast_node_options_init(fabricast_node_options *options, size_t size);

/*
 * Joins a node. With NULL as options, the usual one. Options by which other nodes can never be
 * reached are refused: FABRICAST_E_INVALID_ARGUMENT for peers without a port, and for any listen,
 * peers or rendezvous if insecure is 0; FABRICAST_E_NO_PROVIDER for a provider that is not here.
 */
fabricast_status fabricast_node_join(const fabricast_node_options *options,
                                     fabricast_node **node);
fabricast_status fabricast_node_leave(fabricast_node *node);

/* Texts that stay until the handle is closed: the same for all at the node; its directory. */
fabricast_status fabricast_node_identity(fabricast_node *node, const char **identity);
fabricast_status fabricast_node_directory(fabricast_node *node, const char **directory);

/*
 * Processes, topics and peers of the node: a JSON array of rows, the first of which is the
 * node's. By a member; or by anybody, with NULL for the usual directory. Free the text with
 * fabricast_text_free.
 */
fabricast_status fabricast_node_report(fabricast_node *node, char **json);
fabricast_status fabricast_report(const char *directory, char **json);
fabricast_status fabricast_text_free(char *text);

/* -------------------------------------------------------------------------- topics */

/* A topic that this process uses. It exists as long as anybody does. */
typedef struct fabricast_topic fabricast_topic;

#define FABRICAST_RELIABLE 0    /* publishers wait for readers */
#define FABRICAST_DROP_OLDEST 1 /* the oldest unread messages make room; readers are told */
#define FABRICAST_DROP_NEWEST 2 /* a message that finds no room is dropped, and counted */

/* Fill it with fabricast_topic_settings_init, then change what is to be another way. */
typedef struct fabricast_topic_settings {
    size_t size;              /* of this structure, as the caller knows it */
    const char *memory;       /* "host", "cuda:0", ..., "emulated:0"; NULL: "host" */
    uint64_t largest;         /* bytes of the longest message */
    int64_t release_deadline; /* a subscriber is evicted that holds a message for longer
                                 while it is in the way, in nanoseconds */
    uint32_t depth;           /* messages that may wait to be read or be held */
    uint32_t reliability;     /* FABRICAST_RELIABLE, ... */
    uint64_t loans;           /* that each publisher may have at once; memory for so many is
                                 reserved when it is opened */
    const char *type_name;    /* of its values, 1 to 64 bytes: a topic of values of a type with
                                 another name is refused; NULL: of any type */
} fabricast_topic_settings;

/* fabricast_topic_settings_init(&settings, sizeof settings) */
fabricast_status fabricast_topic_settings_init(fabricast_topic_settings *settings, size_t size);

/*
 * Opens a topic, and makes it if nobody has; all who do that say the same settings. With
 * NULL as settings it must exist, and is as it was made.
 */
fabricast_status fabricast_topic_open(fabricast_node *node, const char *name,
                                      const fabricast_topic_settings *settings,
                                      fabricast_topic **topic);
fabricast_status fabricast_topic_close(fabricast_topic *topic);

/* Its name, and what it is like; texts stay until the handle is closed. */
fabricast_status fabricast_topic_name(fabricast_topic *topic, const char **name);
fabricast_status fabricast_topic_settings_of(fabricast_topic *topic,
                                             fabricast_topic_settings *settings, size_t size);

/* ---------------------------------------------------------------------- publishers */

/* A publisher. Every subscriber receives its messages in order. */
typedef struct fabricast_publisher fabricast_publisher;

fabricast_status fabricast_publisher_open(fabricast_topic *topic,
                                          fabricast_publisher **publisher);
fabricast_status fabricast_publisher_close(fabricast_publisher *publisher);

/* By which its messages are known. */
fabricast_status fabricast_publisher_identity(fabricast_publisher *publisher,
                                              uint64_t *identity);

/* How many would get a message that is published now, on this node. */
fabricast_status fabricast_publisher_subscribers(fabricast_publisher *publisher,
                                                 uint64_t *count);

/* Waits until a message that is published now would come to so many, on this node. */
fabricast_status fabricast_publisher_wait_for_subscribers(fabricast_publisher *publisher, uint64_t count,
                                          fabricast_timeout timeout);

typedef struct fabricast_publisher_counters {
    uint64_t messages; /* that it published, wanted by somebody or not */
    uint64_t bytes;    /* of these */
    uint64_t dropped;  /* messages that found no room */
    uint64_t missed_by_nodes; /* of a reliable topic, messages that another node is not known to
                                 have got, though it subscribed, when it was given up; counted
                                 for each such node */
    uint64_t evicted;  /* subscribers of this node that were evicted meanwhile, for holding too
                          long what was in somebody's way */
} fabricast_publisher_counters;

/* What it has done so far. */
fabricast_status fabricast_publisher_counters_of(fabricast_publisher *publisher,
                                                 fabricast_publisher_counters *counters,
                                                 size_t size);

/* Publishes a copy of bytes of the host's memory, wherever the topic's messages lie. */
fabricast_status fabricast_publisher_push(fabricast_publisher *publisher, const void *data,
                                          size_t length, fabricast_timeout timeout);

/*
 * The same from memory that lies on any device, or on the host: which it is, is found out. CUDA is
 * asked if the process uses it, and is not loaded for that. If the topic lies on a device, that has
 * to have access to the other; if it lies on the host, the bytes are brought there first. The
 * pointer has to be complete when all is done that was begun on the device's default stream
 * (synchronise a non-blocking stream that writes it first), and may be written again when the
 * call has succeeded; after FABRICAST_E_DEADLINE_EXCEEDED a copy may still be reading it, until
 * the device's work is done. FABRICAST_NOW does not wait for room, but for the copy.
 * FABRICAST_E_INVALID_ARGUMENT for what is longer than its allocation, and, if the topic lies on a
 * GPU, for an address that neither the driver nor the system knows.
 */
fabricast_status fabricast_publisher_push_device(fabricast_publisher *publisher,
                                                 const void *pointer, size_t length,
                                                 fabricast_timeout timeout);

/* Waits until all that it published was released by all who got it. */
fabricast_status fabricast_publisher_flush(fabricast_publisher *publisher,
                                           fabricast_timeout timeout);

/* --------------------------------------------------------------------------- loans */

/* Memory for a message, lent to who fills it: nothing is copied when it is published. */
typedef struct fabricast_loan fabricast_loan;

/*
 * FABRICAST_E_TOO_MANY_LOANS, at once, if all that the publisher may have at once are handles that
 * were neither published nor discarded. If some are with threads that push, or were discarded while
 * a device still writes there, one comes back by itself, and is waited for.
 */
fabricast_status fabricast_publisher_loan(fabricast_publisher *publisher, size_t length,
                                          fabricast_timeout timeout, fabricast_loan **loan);

/* Where it is, on the topic's device: good until it is published or discarded. */
fabricast_status fabricast_loan_memory(fabricast_loan *loan, void **address, size_t *length);

/* Copies bytes of the host's memory into it. */
fabricast_status fabricast_loan_write(fabricast_loan *loan, size_t offset, const void *data,
                                      size_t length);

#define FABRICAST_MAX_METADATA 256

/* Attaches bytes of the caller's to the message. */
fabricast_status fabricast_loan_set_metadata(fabricast_loan *loan, const void *data,
                                             size_t length);

#define FABRICAST_NO_POSITION UINT64_MAX

typedef struct fabricast_sent {
    uint64_t position; /* among all messages of the topic on this node;
                          FABRICAST_NO_POSITION: no subscriber, or dropped */
    uint64_t subscribers;  /* subscribers of this node that it was delivered to */
    uint64_t dropped;  /* 1: there was no room, and the topic is one that drops */
} fabricast_sent;

/*
 * Publishes it, and closes the handle. What a device writes there has to be complete before:
 * synchronise its stream. With FABRICAST_E_WOULD_BLOCK and FABRICAST_E_DEADLINE_EXCEEDED the
 * loan is as it was and can be published again, and so it is with FABRICAST_E_INVALID_ARGUMENT,
 * when an argument was refused; with other failures its memory is given back. That nobody subscribes is no failure. sent may be NULL.
 */
fabricast_status fabricast_loan_publish(fabricast_loan *loan, fabricast_timeout timeout,
                                        fabricast_sent *sent, size_t size);

/* Gives the memory back unpublished. */
fabricast_status fabricast_loan_discard(fabricast_loan *loan);

/* --------------------------------------------------------------------- subscribers */

/* A subscriber: receives every message published after it was opened. */
typedef struct fabricast_subscriber fabricast_subscriber;

/* A message that is held: its memory stays, and nobody writes there. */
typedef struct fabricast_sample fabricast_sample;

fabricast_status fabricast_subscriber_open(fabricast_topic *topic,
                                           fabricast_subscriber **subscriber);

/* A pull that waits in another thread ends with FABRICAST_E_CLOSED. */
fabricast_status fabricast_subscriber_close(fabricast_subscriber *subscriber);

/* The next message. Release it soon: a topic has room for depth messages. */
fabricast_status fabricast_subscriber_pull(fabricast_subscriber *subscriber,
                                           fabricast_timeout timeout,
                                           fabricast_sample **sample);

#define FABRICAST_EVENT_NONE 0           /* nothing happened, or all was told */
#define FABRICAST_EVENT_GAP 1            /* missed messages were dropped, or never written, here or
                                            on the node that they would have come from */
#define FABRICAST_EVENT_PUBLISHER_LOST 2 /* publisher died */
#define FABRICAST_EVENT_EVICTED 3        /* the subscriber was evicted, after held_for */
#define FABRICAST_EVENT_REMOTE_PUBLISHER_LOST 4 /* publisher of another node died, as that node
                                                      says; never told if all of it ended */

typedef struct fabricast_event {
    uint64_t kind;      /* FABRICAST_EVENT_...; skip numbers that you do not know */
    uint64_t missed;    /* messages */
    uint64_t publisher; /* its identity */
    uint64_t held_for;  /* nanoseconds for which it was in the way; 0: not known */
    char node[40];      /* the publisher's, as fabricast_sample_info.origin has it; empty: this one */
} fabricast_event;

/* The next of what happened to the subscriber; never waits. */
fabricast_status fabricast_subscriber_event(fabricast_subscriber *subscriber,
                                            fabricast_event *event, size_t size);

/*
 * A descriptor for poll, select and epoll, which is readable as long as there may be something
 * to pull: when a message came, from whatever node; when the subscriber was evicted or its node
 * is closed, and then it stays so; and once more when there are events that were not asked for.
 * It stays readable until a pull finds no message (FABRICAST_E_WOULD_BLOCK, or after waiting
 * FABRICAST_E_DEADLINE_EXCEEDED): pull without waiting until then, and ask for events, before
 * waiting again, also with EPOLLET. It can be readable for nothing.
 *
 * Always the same one, made when first asked for, and closed with the subscriber: take it out
 * of what watches it before. Never read, write or close it. -1 if the call fails;
 * FABRICAST_E_WOULD_BLOCK while another thread pulls.
 */
fabricast_status fabricast_subscriber_descriptor(fabricast_subscriber *subscriber,
                                                 int *descriptor);

/* Where it is, on the topic's device: good until it is released. */
fabricast_status fabricast_sample_memory(fabricast_sample *sample, const void **address,
                                         size_t *length);

/*
 * FABRICAST_E_EVICTED if its subscriber was evicted meanwhile: then what lies there may be
 * another message by now. Who reads in place and must be sure asks afterwards.
 */
fabricast_status fabricast_sample_check(fabricast_sample *sample);

/* Copies a part of it to memory of the host's, and checks it. */
fabricast_status fabricast_sample_read(fabricast_sample *sample, size_t offset, void *into,
                                       size_t length);

/* What its publisher attached: good until it is released. */
fabricast_status fabricast_sample_metadata(fabricast_sample *sample, const void **address,
                                           size_t *length);

/* Times are nanoseconds since 1970 by the realtime clock, and 0 where a stage was skipped;
 * what happened on another node was measured by its clock. */
typedef struct fabricast_sample_info {
    const void *address;      /* as fabricast_sample_memory has it */
    uint64_t length;
    const void *metadata;     /* as fabricast_sample_metadata has it */
    uint64_t metadata_length;
    const char *memory;       /* whose memory: "host", "cuda:0", ... */
    const char *origin;       /* the node that it came from; empty: this one */
    const char *way;          /* by which it came: "shared-memory", "ring", "staged-ring" */
    uint64_t publisher;       /* the publisher's identity, on the node that it came from */
    uint64_t sequence;        /* the publisher's number for it, from 1 on: one more each time */
    uint64_t position;        /* among those that came the same way */
    uint64_t published_at;
    uint64_t allocated_at;    /* its memory was found */
    uint64_t filled_at;       /* its publisher had filled it */
    uint64_t wire_at;         /* its last byte came from the wire */
    uint64_t copied_at;       /* it was copied to where it lies */
    uint64_t delivered_at;    /* the subscribers of this node had it */
} fabricast_sample_info;

/* All that is known of it; texts stay until it is released. */
fabricast_status fabricast_sample_info_of(fabricast_sample *sample, fabricast_sample_info *info,
                                          size_t size);

fabricast_status fabricast_sample_release(fabricast_sample *sample);

/* ------------------------------------------------------------------------- streams */

/*
 * Messages in the order of streams: one is published before it is written, and pulled before it
 * can be read, and nobody waits but the streams.
 *
 *     fabricast_stream_open(topic, stream, &handle);       // a cudaStream_t, or CUstream
 *     fabricast_publisher_push_on(publisher, frame, length, handle, FABRICAST_SECONDS(1));
 *
 *     fabricast_subscriber_pull_on(subscriber, handle, FABRICAST_SECONDS(1), &sample);
 *     fabricast_sample_memory(sample, &address, &length);
 *     kernel<<<..., stream>>>(address, length);            // begins when it is written
 *     fabricast_sample_release_on(sample, handle);         // when the kernel is done
 *
 * With a topic whose messages lie in the host's memory there are no such handles.
 */

/* A stream of the topic's device that something else made. */
typedef struct fabricast_stream fabricast_stream;

/*
 * NULL is the device's default stream; on a emulated, which has none, NULL gives a new one, and
 * is all that there is. The default stream of each thread (cudaStreamPerThread) is refused. The
 * stream has to exist until the handle is closed, and is not to be captured meanwhile. Closing
 * the handle waits until the stream is done with what was begun by it, but for ten seconds at
 * most: then what it may still touch stays.
 */
fabricast_status fabricast_stream_open(fabricast_topic *topic, void *stream,
                                       fabricast_stream **handle);
fabricast_status fabricast_stream_close(fabricast_stream *handle);

/*
 * As fabricast_publisher_push_device, but the stream copies it, after all that was begun there
 * before, and that is not waited for: it may be written again by what is begun on the stream
 * afterwards, and freed when the stream has come past it. Memory of the host may be
 * pushed so, too, if it is registered with the driver (cuMemHostRegister).
 */
fabricast_status fabricast_publisher_push_on(fabricast_publisher *publisher, const void *pointer,
                                             size_t length, fabricast_stream *stream,
                                             fabricast_timeout timeout);

/*
 * As fabricast_loan_publish, but what was begun on the stream may still be writing it. If it was
 * not published and is tried again, then on the same stream. With other failures, also if the
 * stream is of another kind of device, its memory is given back when the stream is through.
 */
fabricast_status fabricast_loan_publish_on(fabricast_loan *loan, fabricast_stream *stream,
                                           fabricast_timeout timeout, fabricast_sent *sent,
                                           size_t size);

/*
 * The next message, at once: what is begun on the stream afterwards waits until it is written. It
 * goes on, too, if it never will be, since the publisher died; what came of it tells
 * fabricast_sample_readiness afterwards. fabricast_subscriber_pull gives such a message when it
 * is written, and passes over one that never will be, which counts as missed.
 */
fabricast_status fabricast_subscriber_pull_on(fabricast_subscriber *subscriber,
                                              fabricast_stream *stream,
                                              fabricast_timeout timeout,
                                              fabricast_sample **sample);

#define FABRICAST_PENDING 0  /* its publisher's stream has not come so far */
#define FABRICAST_READY 1    /* it is written, as all are that were not published on a stream */
#define FABRICAST_POISONED 2 /* it never will be: its publisher died, or its device failed */

fabricast_status fabricast_sample_readiness(fabricast_sample *sample, uint64_t *readiness);

/*
 * Closes the handle, and releases the message when all is done that was begun on the stream so
 * far, and some milliseconds later at most. Until then it is held. The last of a subscriber and
 * its samples that is closed waits for that, ten seconds at most.
 */
fabricast_status fabricast_sample_release_on(fabricast_sample *sample, fabricast_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
