/* What ends when a node, topic, publisher or subscriber is closed: what was opened from it, and
 * calls that wait in other threads. And the end of the last publisher and subscriber. */
#include "check.h"

#include <poll.h>
#include <pthread.h>
#include <time.h>

static fabricast_publisher *publisher;
static fabricast_subscriber *subscriber;

static double now(void)
{
    struct timespec time;

    CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void *wait_for_message(void *argument)
{
    fabricast_sample *sample;

    (void)argument;
    EXPECT(FABRICAST_E_CLOSED, fabricast_subscriber_pull(subscriber, LONG, &sample));
    return NULL;
}

static void *wait_for_room(void *argument)
{
    (void)argument;
    EXPECT(FABRICAST_E_CLOSED, fabricast_publisher_push(publisher, "more", 4, LONG));
    return NULL;
}

static void *wait_for_release(void *argument)
{
    (void)argument;
    EXPECT(FABRICAST_E_CLOSED, fabricast_publisher_flush(publisher, LONG));
    return NULL;
}

enum closed { NODE, TOPIC, ITSELF };

/* Closes one of them while threads wait. */
static void end_waits(enum closed closed)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "ends", 100, 1);
    fabricast_subscriber *reader;
    fabricast_sample *held, *none;
    pthread_t threads[3];
    struct pollfd polled = {-1, POLLIN, 0};
    const void *address;
    size_t length, at;
    double began;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_subscriber_open(opened, &reader));
    DONE(fabricast_publisher_push(publisher, "held", 4, LONG));
    DONE(fabricast_subscriber_pull(reader, LONG, &held));
    DONE(fabricast_subscriber_descriptor(reader, &polled.fd));
    EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_subscriber_pull(reader, FABRICAST_NOW, &none));
    CHECK(poll(&polled, 1, 0) == 0);
    /* The reader has unread messages from here on, and the other one has none. */
    while (fabricast_publisher_push(publisher, "unread", 6, FABRICAST_NOW) == FABRICAST_OK)
        continue;
    CHECK(fabricast_error_status() == FABRICAST_E_WOULD_BLOCK);
    DONE(fabricast_subscriber_open(opened, &subscriber));
    CHECK(pthread_create(&threads[0], NULL, wait_for_message, NULL) == 0);
    CHECK(pthread_create(&threads[1], NULL, wait_for_room, NULL) == 0);
    CHECK(pthread_create(&threads[2], NULL, wait_for_release, NULL) == 0);
    usleep(50000);
    began = now();
    switch (closed) {
    case NODE:
        DONE(fabricast_node_leave(node));
        break;
    case TOPIC:
        DONE(fabricast_topic_close(opened));
        break;
    case ITSELF:
        DONE(fabricast_subscriber_close(subscriber));
        DONE(fabricast_publisher_close(publisher));
        break;
    }
    for (at = 0; at < 3; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    CHECK(now() - began < 0.9);
    if (closed != ITSELF) {
        CHECK(poll(&polled, 1, 60000) == 1);
        EXPECT(FABRICAST_E_CLOSED, fabricast_subscriber_pull(reader, FABRICAST_NOW, &none));
        CHECK(strstr(fabricast_error_message(), closed == NODE ? "the node " : "the topic was closed") != NULL);
        EXPECT(FABRICAST_E_CLOSED, fabricast_publisher_push(publisher, "late", 4, FABRICAST_NOW));
        DONE(fabricast_subscriber_close(subscriber));
        DONE(fabricast_publisher_close(publisher));
    }
    /* What a reader holds stays readable. */
    DONE(fabricast_sample_memory(held, &address, &length));
    CHECK(length == 4 && memcmp(address, "held", 4) == 0);
    DONE(fabricast_sample_check(held));
    DONE(fabricast_subscriber_close(reader));
    DONE(fabricast_sample_release(held));
    if (closed != TOPIC)
        DONE(fabricast_topic_close(opened));
    if (closed != NODE)
        DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
}

/* Publishes two messages, and is killed. */
static void publish_and_hang(int in, int out)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "watched", 100, 4);

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_publisher_push(publisher, "one", 3, LONG));
    DONE(fabricast_publisher_push(publisher, "two", 3, LONG));
    signal_peer(out);
    await_signal(in);
}

static uint64_t event_of(fabricast_subscriber *of)
{
    fabricast_event event;

    DONE(fabricast_subscriber_event(of, &event, sizeof event));
    return event.kind;
}

static void watch_publishers(fabricast_node *node)
{
    fabricast_topic *opened = topic(node, "watched", 100, 4);
    fabricast_topic_publisher found[2];
    fabricast_sample *sample;
    pid_t child;
    int in, out, at;
    size_t count = 9;

    DONE(fabricast_subscriber_open(opened, &subscriber));
    DONE(fabricast_subscriber_end_without_publishers(subscriber, 1));
    EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    DONE(fabricast_topic_publishers(opened, NULL, 0, &count));
    CHECK(count == 0);
    child = start(publish_and_hang, &in, &out);
    await_signal(in);
    DONE(fabricast_topic_publishers(opened, NULL, 0, &count));
    CHECK(count == 1);
    DONE(fabricast_topic_publishers(opened, found, 2, &count));
    CHECK(count == 1 && found[0].publisher != 0 && found[0].process == (uint32_t)child);
    CHECK(found[0].is_alive == 1 && found[0].node[0] == 0 && strcmp(found[0].label, "test") == 0);
    CHECK(kill(child, SIGKILL) == 0);
    for (at = 0; at < 2; at++) {
        DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
        DONE(fabricast_sample_release(sample));
    }
    EXPECT(FABRICAST_E_NO_PUBLISHERS, fabricast_subscriber_pull(subscriber, LONG, &sample));
    CHECK(event_of(subscriber) == FABRICAST_EVENT_PUBLISHER_LOST);
    CHECK(event_of(subscriber) == FABRICAST_EVENT_NO_PUBLISHERS);
    CHECK(event_of(subscriber) == FABRICAST_EVENT_NONE);
    DONE(fabricast_subscriber_end_without_publishers(subscriber, 0));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_subscriber_pull(subscriber, FABRICAST_MILLISECONDS(5), &sample));
    CHECK(waitpid(child, NULL, 0) == child);
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_topic_close(opened));
}

static void watch_subscribers(fabricast_node *node)
{
    fabricast_topic *opened = topic(node, "read", 100, 4);
    uint64_t event = 9;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_publisher_wait_for_no_subscribers(publisher, FABRICAST_NOW));
    DONE(fabricast_publisher_event(publisher, &event));
    CHECK(event == FABRICAST_PUBLISHER_EVENT_NONE);
    DONE(fabricast_subscriber_open(opened, &subscriber));
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_publisher_wait_for_no_subscribers(publisher, FABRICAST_NOW));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_publisher_wait_for_no_subscribers(publisher, FABRICAST_MILLISECONDS(5)));
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_publisher_wait_for_no_subscribers(publisher, LONG));
    DONE(fabricast_publisher_event(publisher, &event));
    CHECK(event == FABRICAST_PUBLISHER_EVENT_NO_SUBSCRIBERS);
    DONE(fabricast_publisher_event(publisher, &event));
    CHECK(event == FABRICAST_PUBLISHER_EVENT_NONE);
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
}

static void watch(void)
{
    fabricast_node *node = join();

    watch_publishers(node);
    watch_subscribers(node);
    DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
}

int main(void)
{
    alarm(300);
    end_waits(NODE);
    end_waits(TOPIC);
    end_waits(ITSELF);
    watch();
    puts("ends: ok");
    return 0;
}
