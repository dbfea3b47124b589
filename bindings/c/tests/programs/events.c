/* Events of subscribers: evictions, gaps, and killed publishers. */
#include "check.h"

static fabricast_topic *short_topic(fabricast_node *node, const char *name, uint32_t reliability)
{
    fabricast_topic_settings settings;
    fabricast_topic *opened;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.largest = 1000;
    settings.depth = 2;
    settings.reliability = reliability;
    settings.release_deadline = FABRICAST_MILLISECONDS(200);
    DONE(fabricast_topic_open(node, name, &settings, &opened));
    return opened;
}

static void eviction(fabricast_node *node)
{
    fabricast_topic *opened = short_topic(node, "eviction", FABRICAST_RELIABLE);
    fabricast_publisher *publisher;
    fabricast_publisher_counters counters;
    fabricast_subscriber *idle;
    fabricast_sample *held, *sample;
    fabricast_event event;
    char copy[8];
    int at;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_subscriber_open(opened, &idle));
    DONE(fabricast_publisher_push(publisher, "held", 4, LONG));
    DONE(fabricast_subscriber_pull(idle, LONG, &held));
    DONE(fabricast_sample_read(held, 0, copy, 4));
    CHECK(memcmp(copy, "held", 4) == 0);
    /* The subscriber blocks the publisher, until it is evicted. */
    for (at = 0; at < 4; at++)
        DONE(fabricast_publisher_push(publisher, "more", 4, LONG));
    /* What it holds stays. */
    DONE(fabricast_sample_check(held));
    DONE(fabricast_sample_read(held, 0, copy, 4));
    CHECK(memcmp(copy, "held", 4) == 0);
    EXPECT(FABRICAST_E_EVICTED, fabricast_subscriber_pull(idle, LONG, &sample));
    DONE(fabricast_subscriber_event(idle, &event, sizeof event));
    CHECK(event.kind == FABRICAST_EVENT_EVICTED);
    /* Unread messages are missed, too. */
    DONE(fabricast_subscriber_event(idle, &event, sizeof event));
    CHECK(event.kind == FABRICAST_EVENT_GAP && event.missed == 4);
    DONE(fabricast_subscriber_event(idle, &event, sizeof event));
    CHECK(event.kind == FABRICAST_EVENT_NONE);
    memset(&counters, 0xff, sizeof counters);
    DONE(fabricast_publisher_counters_of(publisher, &counters, sizeof counters));
    CHECK(counters.messages == 5 && counters.missed_by_nodes == 0 && counters.evicted == 1);
    /* An older program has a shorter structure. */
    memset(&counters, 0xff, sizeof counters);
    DONE(fabricast_publisher_counters_of(publisher, &counters, 24));
    CHECK(counters.messages == 5 && counters.evicted == UINT64_MAX);
    DONE(fabricast_sample_release(held));
    DONE(fabricast_subscriber_close(idle));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
}

static void gap(fabricast_node *node)
{
    fabricast_topic *opened = short_topic(node, "gap", FABRICAST_DROP_OLDEST);
    fabricast_publisher *publisher;
    fabricast_subscriber *slow;
    fabricast_sample *sample;
    fabricast_event event;
    uint64_t number, found;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_subscriber_open(opened, &slow));
    for (number = 0; number < 5; number++)
        DONE(fabricast_publisher_push(publisher, &number, sizeof number, LONG));
    DONE(fabricast_subscriber_pull(slow, LONG, &sample));
    DONE(fabricast_sample_read(sample, 0, &found, sizeof found));
    CHECK(found == 3);
    DONE(fabricast_subscriber_event(slow, &event, sizeof event));
    CHECK(event.kind == FABRICAST_EVENT_GAP && event.missed == 3);
    DONE(fabricast_sample_release(sample));
    DONE(fabricast_subscriber_close(slow));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
}

static void newest(fabricast_node *node)
{
    fabricast_topic *opened = short_topic(node, "newest", FABRICAST_DROP_NEWEST);
    fabricast_publisher *publisher;
    fabricast_publisher_counters counters;
    fabricast_subscriber *slow;
    fabricast_sample *sample;
    fabricast_loan *loan;
    fabricast_sent sent;
    uint64_t number, found;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_subscriber_open(opened, &slow));
    for (number = 0; number < 4; number++)
        DONE(fabricast_publisher_push(publisher, &number, sizeof number, LONG));
    DONE(fabricast_publisher_loan(publisher, 8, LONG, &loan));
    DONE(fabricast_loan_publish(loan, LONG, &sent, sizeof sent));
    CHECK(sent.dropped == 1 && sent.subscribers == 0 && sent.position == FABRICAST_NO_POSITION);
    DONE(fabricast_publisher_counters_of(publisher, &counters, sizeof counters));
    CHECK(counters.dropped == 3);
    DONE(fabricast_subscriber_pull(slow, LONG, &sample));
    DONE(fabricast_sample_read(sample, 0, &found, sizeof found));
    CHECK(found == 0);
    DONE(fabricast_sample_release(sample));
    DONE(fabricast_subscriber_close(slow));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
}

static void die(int in, int out)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "loss", 1000, 4);
    fabricast_publisher *publisher;
    fabricast_loan *loan;
    uint64_t identity;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_publisher_identity(publisher, &identity));
    CHECK(write(out, &identity, sizeof identity) == sizeof identity);
    await_signal(in);
    DONE(fabricast_publisher_push(publisher, "last words", 10, LONG));
    DONE(fabricast_publisher_loan(publisher, 1000, LONG, &loan));
    signal_peer(out);
    await_signal(in);
}

static void loss(pid_t child, int in, int out)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "loss", 1000, 4);
    fabricast_subscriber *subscriber;
    fabricast_sample *sample;
    fabricast_event event;
    uint64_t identity;
    int status, tries;

    DONE(fabricast_subscriber_open(opened, &subscriber));
    CHECK(read(in, &identity, sizeof identity) == sizeof identity);
    signal_peer(out);
    await_signal(in);
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    /* Published messages of the killed publisher are available. */
    DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_sample_release(sample));
    for (tries = 0; tries < 600; tries++) {
        DONE(fabricast_subscriber_event(subscriber, &event, sizeof event));
        if (event.kind == FABRICAST_EVENT_PUBLISHER_LOST)
            break;
        CHECK(event.kind == FABRICAST_EVENT_NONE);
        EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
               fabricast_subscriber_pull(subscriber, FABRICAST_MILLISECONDS(100), &sample));
    }
    CHECK(event.kind == FABRICAST_EVENT_PUBLISHER_LOST && event.publisher == identity);
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
}

int main(void)
{
    fabricast_node *node;
    int in, out;
    pid_t child;

    alarm(300);
    child = start(die, &in, &out);
    loss(child, in, out);
    node = join();
    eviction(node);
    gap(node);
    newest(node);
    DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
    puts("events: ok");
    return 0;
}
