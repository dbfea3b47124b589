/* In a forked child the parent's handles are errors, and the child can join by itself. */
#include "check.h"

#include <rgaps.h>

int main(void)
{
    char name[] = "forked by name", text[] = "from the child";
    fabricast_node *node;
    fabricast_topic *opened;
    fabricast_publisher *publisher;
    fabricast_subscriber *subscriber;
    fabricast_sample *sample, *held;
    rgaps_publisher_t *simple;
    rgaps_subscriber_t *simple_subscriber;
    const void *address;
    size_t length;
    pid_t child;

    alarm(300);
    node = join();
    opened = topic(node, "forked", 1000, 4);
    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_subscriber_open(opened, &subscriber));
    DONE(fabricast_publisher_push(publisher, "before", 6, LONG));
    DONE(fabricast_subscriber_pull(subscriber, LONG, &held));
    simple = publisher_init(name);
    simple_subscriber = subscriber_init(name);
    CHECK(simple != NULL && simple_subscriber != NULL);

    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(300);
        EXPECT(FABRICAST_E_FORKED, fabricast_publisher_push(publisher, "x", 1, LONG));
        EXPECT(FABRICAST_E_FORKED, fabricast_subscriber_pull(subscriber, LONG, &sample));
        EXPECT(FABRICAST_E_FORKED, fabricast_sample_release(held));
        EXPECT(FABRICAST_E_FORKED, fabricast_subscriber_close(subscriber));
        EXPECT(FABRICAST_E_FORKED, fabricast_topic_close(opened));
        EXPECT(FABRICAST_E_FORKED, fabricast_node_leave(node));
        CHECK(publisher_push(simple, 1, text) == FABRICAST_E_FORKED);
        CHECK(subscriber_pull(simple_subscriber) == NULL);
        CHECK(fabricast_error_status() == FABRICAST_E_FORKED);
        subscriber_destroy(simple_subscriber);
        publisher_destroy(simple);
        CHECK(fabricast_open_handles() == 0);

        node = join();
        opened = topic(node, "forked", 1000, 4);
        DONE(fabricast_publisher_open(opened, &publisher));
        DONE(fabricast_publisher_push(publisher, text, sizeof text, LONG));
        simple = publisher_init(name);
        CHECK(simple != NULL && publisher_push(simple, sizeof text, text) == 0);
        publisher_destroy(simple);
        DONE(fabricast_publisher_close(publisher));
        DONE(fabricast_topic_close(opened));
        DONE(fabricast_node_leave(node));
        CHECK(fabricast_open_handles() == 0);
        exit(0);
    }
    /* The parent's handles still work. */
    DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_sample_memory(sample, &address, &length));
    CHECK(length == sizeof text && memcmp(address, text, length) == 0);
    DONE(fabricast_sample_release(sample));
    address = subscriber_pull(simple_subscriber);
    CHECK(address != NULL && memcmp(address, text, sizeof text) == 0);
    finish(child);
    DONE(fabricast_sample_memory(held, &address, &length));
    CHECK(length == 6 && memcmp(address, "before", 6) == 0);
    DONE(fabricast_sample_release(held));
    subscriber_destroy(simple_subscriber);
    publisher_destroy(simple);
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
    puts("forked: ok");
    return 0;
}
