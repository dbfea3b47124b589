/* One thread waits for several subscribers by poll and epoll, while other processes publish. */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>

enum { TOPICS = 3, MESSAGES = 300 };

static const char *const names[TOPICS] = { "poll one", "poll two", "poll three" };

static fabricast_topic *opened(fabricast_node *node, int at)
{
    return topic(node, names[at], 2000, 4);
}

static size_t length_of(uint64_t number)
{
    return (size_t)(1 + number * 37 % 2000);
}

static void publish(fabricast_publisher *publisher, uint64_t number)
{
    unsigned char bytes[2000];

    fill(bytes, length_of(number), number);
    DONE(fabricast_publisher_push(publisher, bytes, length_of(number), LONG));
}

/* Publishes on all topics in turn. */
static void run(int in, int out)
{
    fabricast_node *node;
    fabricast_topic *topics[TOPICS];
    fabricast_publisher *publishers[TOPICS];
    uint64_t number;
    int at;

    await_signal(in);
    node = join();
    for (at = 0; at < TOPICS; at++) {
        topics[at] = opened(node, at);
        DONE(fabricast_publisher_open(topics[at], &publishers[at]));
    }
    signal_peer(out);
    await_signal(in);
    for (number = 0; number < MESSAGES; number++)
        for (at = 0; at < TOPICS; at++)
            if (number % (unsigned)(at + 1) == 0)
                publish(publishers[at], number);
    for (at = 0; at < TOPICS; at++) {
        DONE(fabricast_publisher_flush(publishers[at], LONG));
        DONE(fabricast_publisher_close(publishers[at]));
        DONE(fabricast_topic_close(topics[at]));
    }
    DONE(fabricast_node_leave(node));
}

/* Pulls until there is no message. */
static void pull_all(fabricast_subscriber *subscriber, uint64_t step, uint64_t *expected)
{
    fabricast_sample *sample;
    fabricast_status status;
    const void *address;
    size_t length;

    while ((status = fabricast_subscriber_pull(subscriber, 0, &sample)) == FABRICAST_OK) {
        DONE(fabricast_sample_memory(sample, &address, &length));
        CHECK(length == length_of(*expected));
        check_filled(address, length, *expected);
        DONE(fabricast_sample_release(sample));
        *expected += step;
    }
    CHECK(status == FABRICAST_E_WOULD_BLOCK);
}

static int all_read(const uint64_t *expected)
{
    int at;
    for (at = 0; at < TOPICS; at++)
        if (expected[at] < MESSAGES)
            return 0;
    return 1;
}

static void several(int use_epoll, pid_t child, int in, int out)
{
    fabricast_node *node = join();
    fabricast_topic *topics[TOPICS];
    fabricast_subscriber *subscribers[TOPICS];
    struct pollfd entries[TOPICS];
    struct epoll_event events[TOPICS];
    uint64_t expected[TOPICS] = { 0, 0, 0 };
    int at, count, loops = epoll_create1(EPOLL_CLOEXEC);

    CHECK(loops >= 0);
    signal_peer(out);
    for (at = 0; at < TOPICS; at++) {
        int descriptor, again;
        topics[at] = opened(node, at);
        DONE(fabricast_subscriber_open(topics[at], &subscribers[at]));
        DONE(fabricast_subscriber_descriptor(subscribers[at], &descriptor));
        DONE(fabricast_subscriber_descriptor(subscribers[at], &again));
        CHECK(descriptor > 2 && again == descriptor);
        CHECK(fcntl(descriptor, F_GETFD) == FD_CLOEXEC);
        entries[at].fd = descriptor;
        entries[at].events = POLLIN;
        events[at].events = EPOLLIN | EPOLLET;
        events[at].data.u32 = (uint32_t)at;
        CHECK(epoll_ctl(loops, EPOLL_CTL_ADD, descriptor, &events[at]) == 0);
    }
    await_signal(in);
    signal_peer(out);
    while (!all_read(expected)) {
        if (use_epoll) {
            count = epoll_wait(loops, events, TOPICS, 60000);
            CHECK(count > 0);
            for (at = 0; at < count; at++) {
                uint32_t which = events[at].data.u32;
                pull_all(subscribers[which], which + 1, &expected[which]);
            }
        } else {
            CHECK(poll(entries, TOPICS, 60000) > 0);
            for (at = 0; at < TOPICS; at++)
                if (entries[at].revents & POLLIN)
                    pull_all(subscribers[at], (uint64_t)at + 1, &expected[at]);
        }
    }
    finish(child);
    close(in);
    close(out);
    for (at = 0; at < TOPICS; at++) {
        CHECK(epoll_ctl(loops, EPOLL_CTL_DEL, entries[at].fd, NULL) == 0);
        DONE(fabricast_subscriber_close(subscribers[at]));
        /* No other thread opens any here. */
        CHECK(fcntl(entries[at].fd, F_GETFD) == -1 && errno == EBADF);
        DONE(fabricast_topic_close(topics[at]));
    }
    close(loops);
    DONE(fabricast_node_leave(node));
}

/* The eviction is reported, and stays readable. */
static void eviction(void)
{
    fabricast_node *node = join();
    fabricast_topic_settings settings;
    fabricast_topic *short_topic;
    fabricast_publisher *publisher;
    fabricast_subscriber *idle;
    fabricast_sample *held, *sample;
    fabricast_event event;
    struct pollfd entry;
    int at;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = 1000;
    settings.depth = 2;
    settings.release_deadline = FABRICAST_MILLISECONDS(200);
    DONE(fabricast_topic_open(node, "poll eviction", &settings, &short_topic));
    DONE(fabricast_publisher_open(short_topic, &publisher));
    DONE(fabricast_subscriber_open(short_topic, &idle));
    DONE(fabricast_subscriber_descriptor(idle, &entry.fd));
    entry.events = POLLIN;
    DONE(fabricast_publisher_push(publisher, "held", 4, LONG));
    CHECK(poll(&entry, 1, 60000) == 1 && entry.revents == POLLIN);
    DONE(fabricast_subscriber_pull(idle, LONG, &held));
    for (at = 0; at < 4; at++)
        DONE(fabricast_publisher_push(publisher, "more", 4, LONG));
    CHECK(poll(&entry, 1, 60000) == 1);
    EXPECT(FABRICAST_E_EVICTED, fabricast_subscriber_pull(idle, 0, &sample));
    DONE(fabricast_subscriber_event(idle, &event, sizeof event));
    CHECK(event.kind == FABRICAST_EVENT_EVICTED);
    CHECK(poll(&entry, 1, 0) == 1);
    DONE(fabricast_sample_release(held));
    DONE(fabricast_subscriber_close(idle));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(short_topic));
    DONE(fabricast_node_leave(node));
}

int main(void)
{
    int in[2], out[2];
    pid_t children[2];

    alarm(300);
    children[0] = start(run, &in[0], &out[0]);
    children[1] = start(run, &in[1], &out[1]);
    several(0, children[0], in[0], out[0]);
    several(1, children[1], in[1], out[1]);
    eviction();
    CHECK(fabricast_open_handles() == 0);
    puts("descriptors: ok");
    return 0;
}
