/* What ends when a node, topic, publisher or subscriber is closed: what was opened from it, and
 * calls that wait in other threads. */
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

int main(void)
{
    alarm(300);
    end_waits(NODE);
    end_waits(TOPIC);
    end_waits(ITSELF);
    puts("ends: ok");
    return 0;
}
