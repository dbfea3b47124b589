/*
  * Messages in stream order, in two processes: on an emulated device, or on the CUDA device in
  * FABRICAST_DEVICE.
 */
#include "driver.h"

#define MESSAGES 40
#define LENGTH ((size_t)1 << 20)

static fabricast_topic *open_topic(fabricast_node *node)
{
    const char *name = getenv("FABRICAST_DEVICE");
    fabricast_topic_settings settings;
    fabricast_topic *opened;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.memory = name != NULL ? name : "emulated:0";
    settings.largest = LENGTH;
    settings.depth = 4;
    DONE(fabricast_topic_open(node, "streams", &settings, &opened));
    return opened;
}

/* Memory to push, and a stream. */
static void *source(void)
{
    device_pointer memory;
    void *bytes;

    if (number() >= 0) {
        CHECK(cuda.allocate(&memory, LENGTH) == 0);
        return (void *)(uintptr_t)memory;
    }
    bytes = malloc(LENGTH);
    CHECK(bytes != NULL);
    return bytes;
}

static void *make_stream(void)
{
    void *stream = NULL;

    /* 1: does not wait for the default stream. */
    if (number() >= 0)
        CHECK(cuda.make_stream(&stream, 1) == 0);
    return stream;
}

static void let_go(void *memory)
{
    if (number() < 0)
        free(memory);
    else
        CHECK(cuda.release((device_pointer)(uintptr_t)memory) == 0);
}

static void put(void *memory, const unsigned char *bytes)
{
    if (number() >= 0) {
        CHECK(cuda.to_device((device_pointer)(uintptr_t)memory, bytes, LENGTH) == 0);
        /* The last bytes may still be in flight, and our stream does not wait for these. */
        CHECK(cuda.synchronize(NULL) == 0);
    } else
        memcpy(memory, bytes, LENGTH);
}

static void publish(int in, int out)
{
    unsigned char *bytes = malloc(LENGTH);
    void *memory[2], *raw;
    fabricast_node *node;
    fabricast_topic *opened;
    fabricast_publisher *publisher;
    fabricast_stream *stream;
    fabricast_loan *loan;
    fabricast_sent sent;
    uint64_t message;

    CHECK(bytes != NULL);
    if (number() >= 0)
        open_device(number());
    node = join();
    opened = open_topic(node);
    DONE(fabricast_publisher_open(opened, &publisher));
    memory[0] = source();
    memory[1] = source();
    raw = make_stream();
    DONE(fabricast_stream_open(opened, raw, &stream));
    signal_peer(out);
    await_signal(in);
    for (message = 0; message < MESSAGES; message++) {
        fill(bytes, LENGTH, message);
        /* Before the next write the stream has completed the copy: the message was read. */
        put(memory[message % 2], bytes);
        DONE(fabricast_publisher_push_on(publisher, memory[message % 2], LENGTH, stream, LONG));
        if (message % 2 == 1)
            DONE(fabricast_publisher_flush(publisher, LONG));
    }
    DONE(fabricast_publisher_push_on(publisher, NULL, 0, stream, LONG));
    DONE(fabricast_publisher_loan(publisher, 3, LONG, &loan));
    if (number() < 0)
        DONE(fabricast_loan_write(loan, 0, "abc", 3));
    DONE(fabricast_loan_publish_on(loan, stream, LONG, &sent, sizeof sent));
    CHECK(sent.subscribers == 1);
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_loan_publish_on(loan, stream, LONG, NULL, 0));
    DONE(fabricast_publisher_flush(publisher, LONG));
    await_signal(in);
    /* They are not released: the topic is full. */
    for (message = 0; message < 4; message++)
        DONE(fabricast_publisher_push_on(publisher, memory[0], 100, stream, FABRICAST_NOW));
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_publisher_push_on(publisher, memory[0], 100, stream, FABRICAST_NOW));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_publisher_push_on(publisher, memory[0], 100, stream,
                                       FABRICAST_MILLISECONDS(5)));
    DONE(fabricast_publisher_loan(publisher, 3, LONG, &loan));
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_loan_publish_on(loan, stream, FABRICAST_NOW, NULL, 0));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_loan_publish_on(loan, stream, FABRICAST_MILLISECONDS(5), NULL, 0));
    DONE(fabricast_loan_discard(loan));
    signal_peer(out);
    await_signal(in);
    DONE(fabricast_stream_close(stream));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_stream_close(stream));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_publisher_push_on(publisher, memory[0], 1, stream, LONG));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
    if (number() >= 0)
        CHECK(cuda.end_stream(raw) == 0);
    let_go(memory[0]);
    let_go(memory[1]);
    free(bytes);
}

static void await_ready(fabricast_sample *sample)
{
    uint64_t readiness = FABRICAST_PENDING;
    int rest;

    for (rest = 0; rest < 60000 && readiness == FABRICAST_PENDING; rest++) {
        DONE(fabricast_sample_readiness(sample, &readiness));
        if (readiness == FABRICAST_PENDING)
            usleep(1000);
    }
    CHECK(readiness == FABRICAST_READY);
}

static void read_messages(fabricast_subscriber *subscriber, fabricast_stream *stream, void *raw)
{
    unsigned char *bytes = malloc(LENGTH);
    uint64_t message;

    CHECK(bytes != NULL);
    for (message = 0; message < MESSAGES; message++) {
        fabricast_sample *sample;
        const void *address;
        size_t length;

        DONE(fabricast_subscriber_pull_on(subscriber, stream, LONG, &sample));
        DONE(fabricast_sample_memory(sample, &address, &length));
        CHECK(length == LENGTH);
        memset(bytes, 0, LENGTH);
        if (number() >= 0) {
            /* Starts when the message is written. */
            CHECK(cuda.to_host_on(bytes, (device_pointer)(uintptr_t)address, length, raw) == 0);
            DONE(fabricast_sample_release_on(sample, stream));
            CHECK(cuda.synchronize(raw) == 0);
        } else {
            await_ready(sample);
            DONE(fabricast_sample_read(sample, 0, bytes, LENGTH));
            DONE(fabricast_sample_release_on(sample, stream));
        }
        EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_sample_release_on(sample, stream));
        check_filled(bytes, LENGTH, message);
    }
    free(bytes);
}

/* Invalid streams are errors. */
static void misuse(fabricast_node *node, fabricast_topic *opened, fabricast_stream *stream)
{
    fabricast_topic_settings settings;
    fabricast_topic *host;
    fabricast_stream *none;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    DONE(fabricast_topic_open(node, "host", &settings, &host));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_stream_open(host, NULL, &none));
    CHECK(none == NULL);
    DONE(fabricast_topic_close(host));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_stream_open(opened, NULL, NULL));
    /* The per-thread default stream. */
    EXPECT(FABRICAST_E_FAILED, fabricast_stream_open(opened, (void *)(uintptr_t)2, &none));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_stream_open(NULL, NULL, &none));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_stream_close((fabricast_stream *)(void *)opened));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_topic_close((fabricast_topic *)(void *)stream));
    DONE(fabricast_stream_close(NULL));
}

int main(void)
{
    fabricast_node *node;
    fabricast_topic *opened;
    fabricast_subscriber *subscriber;
    fabricast_stream *stream;
    fabricast_sample *sample;
    unsigned char bytes[3];
    uint64_t readiness;
    void *raw;
    int in, out, at;
    pid_t child;

    alarm(300);
    child = start(publish, &in, &out);
    if (number() >= 0)
        open_device(number());
    await_signal(in);
    node = join();
    opened = open_topic(node);
    DONE(fabricast_subscriber_open(opened, &subscriber));
    raw = make_stream();
    DONE(fabricast_stream_open(opened, raw, &stream));
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_subscriber_pull_on(subscriber, stream, FABRICAST_NOW, &sample));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_subscriber_pull_on(subscriber, stream, FABRICAST_MILLISECONDS(5), &sample));
    CHECK(sample == NULL);
    signal_peer(out);
    read_messages(subscriber, stream, raw);
    DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_sample_release(sample));
    DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_sample_readiness(sample, &readiness));
    CHECK(readiness == FABRICAST_READY);
    DONE(fabricast_sample_read(sample, 0, bytes, 3));
    if (number() < 0)
        CHECK(memcmp(bytes, "abc", 3) == 0);
    DONE(fabricast_sample_release_on(sample, stream));
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    signal_peer(out);
    await_signal(in);
    for (at = 0; at < 4; at++) {
        DONE(fabricast_subscriber_pull_on(subscriber, stream, LONG, &sample));
        DONE(fabricast_sample_release_on(sample, stream));
    }
    misuse(node, opened, stream);
    DONE(fabricast_subscriber_close(subscriber));
    signal_peer(out);
    finish(child);
    DONE(fabricast_stream_close(stream));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
    if (number() >= 0)
        CHECK(cuda.end_stream(raw) == 0);
    CHECK(fabricast_open_handles() == 0);
    puts("streams: ok");
    return 0;
}
