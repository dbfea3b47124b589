/* Timeouts: of waits for subscribers, and for messages. */
#include "check.h"

#include <rgaps.h>
#include <time.h>

static double now(void)
{
    struct timespec time;

    CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Subscribes on request, and ends after one message. */
static void subscribe(int in, int out)
{
    rgaps_subscriber_t *subscriber;

    await_signal(in);
    usleep(300000);
    subscriber = subscriber_init("waits");
    CHECK(subscriber != NULL);
    CHECK(subscriber_pull_within(subscriber, 60000) != NULL);
    CHECK(subscriber_message_size(subscriber) == 5);
    subscriber_destroy(subscriber);
    signal_peer(out);
}

static void one_to_another(void)
{
    rgaps_publisher_t *publisher;
    pid_t child;
    int in, out;
    double began;

    child = start(subscribe, &in, &out);
    publisher = publisher_init("waits");
    CHECK(publisher != NULL);
    CHECK(publisher_wait(publisher, 0, 0) == 0);
    CHECK(publisher_wait(publisher, 1, 0) == FABRICAST_E_WOULD_BLOCK);
    began = now();
    CHECK(publisher_wait(publisher, 1, 250) == FABRICAST_E_DEADLINE_EXCEEDED);
    CHECK(now() - began >= 0.25 && now() - began < 30);
    CHECK(strstr(fabricast_error_message(), "0 subscribers of 1 after 250ms") != NULL);
    signal_peer(out);
    CHECK(publisher_wait(publisher, 1, -1) == 0);
    /* Without the subscriber the message would be lost. */
    CHECK(publisher_push(publisher, 5, "hello") == 0);
    await_signal(in);
    finish(child);
    CHECK(publisher_wait(publisher, (size_t)1 << 40, 0) == FABRICAST_E_INVALID_ARGUMENT);
    publisher_destroy(publisher);
    CHECK(publisher_wait(publisher, 0, 0) == FABRICAST_E_BAD_HANDLE);
}

static void messages(void)
{
    rgaps_publisher_t *publisher = publisher_init("messages");
    rgaps_subscriber_t *subscriber = subscriber_init("messages");
    double began;

    CHECK(publisher != NULL && subscriber != NULL);
    CHECK(subscriber_message_size(subscriber) == 0);
    CHECK(subscriber_pull_within(subscriber, 0) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_WOULD_BLOCK);
    began = now();
    CHECK(subscriber_pull_within(subscriber, 250) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_DEADLINE_EXCEEDED);
    CHECK(strstr(fabricast_error_message(), "no message within 250ms") != NULL);
    CHECK(now() - began >= 0.25 && now() - began < 30);
    CHECK(publisher_push(publisher, 5, "hello") == 0);
    CHECK(publisher_push(publisher, 0, NULL) == 0);
    CHECK(publisher_push(publisher, 7, "goodbye") == 0);
    CHECK(memcmp(subscriber_pull_within(subscriber, 0), "hello", 5) == 0);
    CHECK(subscriber_message_size(subscriber) == 5);
    CHECK(subscriber_pull(subscriber) != NULL && subscriber_message_size(subscriber) == 0);
    CHECK(memcmp(subscriber_pull_within(subscriber, -1), "goodbye", 7) == 0);
    CHECK(subscriber_message_size(subscriber) == 7);
    /* The message is released, with or without a next one. */
    CHECK(subscriber_pull_within(subscriber, 1) == NULL);
    CHECK(subscriber_message_size(subscriber) == 0);
    subscriber_destroy(subscriber);
    CHECK(subscriber_message_size(subscriber) == 0);
    CHECK(fabricast_error_status() == FABRICAST_E_BAD_HANDLE);
    CHECK(subscriber_pull_within(subscriber, 0) == NULL);
    publisher_destroy(publisher);
}

/* fabricast.h has the wait, too. */
static void with_handles(void)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "handles", 100, 2);
    fabricast_publisher *publisher;
    fabricast_subscriber *subscriber;

    DONE(fabricast_publisher_open(opened, &publisher));
    EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_publisher_wait_for_subscribers(publisher, 1, FABRICAST_NOW));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_publisher_wait_for_subscribers(publisher, 1, FABRICAST_MILLISECONDS(10)));
    DONE(fabricast_subscriber_open(opened, &subscriber));
    DONE(fabricast_publisher_wait_for_subscribers(publisher, 1, FABRICAST_NOW));
    DONE(fabricast_publisher_wait_for_subscribers(publisher, 1, FABRICAST_FOREVER));
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
}

int main(void)
{
    alarm(300);
    one_to_another();
    messages();
    with_handles();
    CHECK(fabricast_open_handles() == 0);
    puts("waits: ok");
    return 0;
}
