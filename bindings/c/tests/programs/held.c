/* What a subscriber holds does not change, whatever happens: evictions, kills of publishers, and of
 * the process that serves the node. */
#include "check.h"

#include <rgaps.h>

#define HELD 4
#define LENGTH 4000
#define INTERVAL 10000 /* microseconds between comparisons */

static fabricast_topic *held_topic(fabricast_node *node)
{
    fabricast_topic_settings settings;
    fabricast_topic *opened;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = LENGTH;
    settings.depth = 2;
    settings.max_held = HELD;
    settings.release_deadline = FABRICAST_MILLISECONDS(500);
    DONE(fabricast_topic_open(node, "held", &settings, &opened));
    return opened;
}

/* Publishes until it is killed. */
static void publish(int in, int out)
{
    char name[] = "held by rgaps";
    fabricast_node *node = join();
    fabricast_publisher *publisher;
    rgaps_publisher_t *simple = publisher_init(name);
    unsigned char bytes[LENGTH];
    uint64_t message;

    CHECK(simple != NULL);
    DONE(fabricast_publisher_open(held_topic(node), &publisher));
    signal_peer(out);
    await_signal(in);
    for (message = 0;; message++) {
        fill(bytes, LENGTH, message);
        DONE(fabricast_publisher_push(publisher, bytes, LENGTH, LONG));
        CHECK(publisher_push(simple, LENGTH, bytes) == 0);
        usleep(1000);
    }
}

static pid_t start_publisher(int *in, int *out)
{
    pid_t child = start(publish, in, out);
    await_signal(*in);
    return child;
}

static void kill_publisher(pid_t child)
{
    int status;
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
}

struct held {
    const void *address;
    unsigned char first[LENGTH];
};

static struct held hold(const void *address)
{
    struct held held;
    held.address = address;
    memcpy(held.first, address, LENGTH);
    return held;
}

static void compare(const struct held *held, int count, int milliseconds)
{
    int at;
    for (; milliseconds >= 0; milliseconds -= INTERVAL / 1000) {
        for (at = 0; at < count; at++)
            CHECK(memcmp(held[at].address, held[at].first, LENGTH) == 0);
        usleep(INTERVAL);
    }
}

int main(void)
{
    char name[] = "held by rgaps";
    int in, out, to_second, at;
    pid_t first, second, third;
    fabricast_node_options options;
    fabricast_node *node;
    fabricast_topic *topic;
    fabricast_subscriber *subscriber, *again;
    fabricast_sample *samples[HELD], *sample;
    rgaps_subscriber_t *simple;
    struct held held[HELD + 1];

    alarm(300);
    CHECK(setenv("FABRICAST_TOPIC_LARGEST", "4K", 1) == 0);
    CHECK(setenv("FABRICAST_TOPIC_RELEASE_DEADLINE", "0.5", 1) == 0);
    /* The first one serves the node. */
    first = start_publisher(&in, &out);
    second = start_publisher(&in, &to_second);
    CHECK(setenv("FABRICAST_SERVICE", "external", 1) == 0);
    DONE(fabricast_node_options_init(&options, sizeof options));
    options.service = FABRICAST_SERVICE_EXTERNAL;
    DONE(fabricast_node_join(&options, &node));
    topic = held_topic(node);
    DONE(fabricast_subscriber_open(topic, &subscriber));
    simple = subscriber_init(name);
    CHECK(simple != NULL);
    signal_peer(out);
    for (at = 0; at < HELD; at++) {
        const void *address;
        size_t length;
        DONE(fabricast_subscriber_pull(subscriber, LONG, &samples[at]));
        DONE(fabricast_sample_memory(samples[at], &address, &length));
        CHECK(length == LENGTH);
        held[at] = hold(address);
    }
    held[HELD] = hold(subscriber_pull(simple));
    signal_peer(to_second);

    /* Both subscribers are evicted. */
    compare(held, HELD + 1, 1200);
    EXPECT(FABRICAST_E_EVICTED, fabricast_subscriber_pull(subscriber, LONG, &sample));
    kill_publisher(first);
    compare(held, HELD + 1, 700);
    third = start_publisher(&in, &out);
    signal_peer(out);
    kill_publisher(second);
    compare(held, HELD + 1, 700);
    for (at = 0; at < HELD; at++)
        DONE(fabricast_sample_check(samples[at]));
    CHECK(subscriber_pull(simple) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_EVICTED);
    subscriber_destroy(simple);

    /* Subscribing again is one call, and leaves the samples as they are. */
    DONE(fabricast_subscriber_open(topic, &again));
    for (at = 0; at < 20; at++) {
        DONE(fabricast_subscriber_pull(again, LONG, &sample));
        DONE(fabricast_sample_release(sample));
    }
    DONE(fabricast_subscriber_close(subscriber));
    compare(held, HELD, 100);
    for (at = 0; at < HELD; at++)
        DONE(fabricast_sample_release(samples[at]));
    DONE(fabricast_subscriber_close(again));
    DONE(fabricast_topic_close(topic));
    DONE(fabricast_node_leave(node));
    kill_publisher(third);
    CHECK(fabricast_open_handles() == 0);
    puts("held: ok");
    return 0;
}
