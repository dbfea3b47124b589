/* Handles that several threads use, and close while other threads wait. */
#include "check.h"

#include <pthread.h>
#include <rgaps.h>

#define PUSHERS 4
#define EACH 100

static fabricast_publisher *publisher;
static fabricast_subscriber *subscriber;
static int ready[2];

static void *push(void *argument)
{
    uint64_t message[2];

    message[0] = *(const uint64_t *)argument;
    for (message[1] = 0; message[1] < EACH; message[1]++)
        DONE(fabricast_publisher_push(publisher, message, sizeof message, LONG));
    return NULL;
}

static void *wait_for_ever(void *argument)
{
    fabricast_sample *sample;

    (void)argument;
    signal_peer(ready[1]);
    EXPECT(FABRICAST_E_CLOSED,
           fabricast_subscriber_pull(subscriber, FABRICAST_FOREVER, &sample));
    return NULL;
}

static void *wait_simply(void *argument)
{
    signal_peer(ready[1]);
    CHECK(subscriber_pull(argument) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_CLOSED
          || fabricast_error_status() == FABRICAST_E_BAD_HANDLE);
    return NULL;
}

static fabricast_loan *loan;

static void *publish_when_there_is_room(void *argument)
{
    fabricast_sent sent;

    (void)argument;
    DONE(fabricast_loan_publish(loan, LONG, &sent, sizeof sent));
    CHECK(sent.subscribers == 1);
    return NULL;
}

/* A publish succeeds also if its handle was closed while it waited for space. */
static void close_while_publishing(fabricast_node *node)
{
    fabricast_topic *full = topic(node, "full", 8, 1);
    fabricast_sample *sample;
    pthread_t waiting;
    int waits, message;

    DONE(fabricast_publisher_open(full, &publisher));
    DONE(fabricast_subscriber_open(full, &subscriber));
    DONE(fabricast_publisher_push(publisher, "first", 5, LONG));
    DONE(fabricast_publisher_loan(publisher, 6, LONG, &loan));
    DONE(fabricast_loan_write(loan, 0, "second", 6));
    CHECK(pthread_create(&waiting, NULL, publish_when_there_is_room, NULL) == 0);
    do {
        char *json;

        usleep(1000);
        DONE(fabricast_node_report(node, &json));
        waits = strstr(json, "\"waits_microseconds\":0") == NULL;
        DONE(fabricast_text_free(json));
    } while (!waits);
    DONE(fabricast_loan_discard(loan));
    for (message = 0; message < 2; message++) {
        DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
        DONE(fabricast_sample_release(sample));
    }
    CHECK(pthread_join(waiting, NULL) == 0);
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(full));
}

int main(void)
{
    char name[] = "threads by name";
    fabricast_node *node;
    fabricast_topic *opened;
    pthread_t pushers[PUSHERS], waiting;
    uint64_t numbers[PUSHERS], next[PUSHERS] = {0}, at;
    rgaps_subscriber_t *simple;

    alarm(300);
    CHECK(pipe(ready) == 0);
    node = join();
    opened = topic(node, "threads", 1000, 8);
    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_subscriber_open(opened, &subscriber));
    for (at = 0; at < PUSHERS; at++) {
        numbers[at] = at;
        CHECK(pthread_create(&pushers[at], NULL, push, &numbers[at]) == 0);
    }
    for (at = 0; at < (uint64_t)PUSHERS * EACH; at++) {
        fabricast_sample *sample;
        uint64_t message[2];

        DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
        DONE(fabricast_sample_read(sample, 0, message, sizeof message));
        CHECK(message[0] < PUSHERS && message[1] == next[message[0]]);
        next[message[0]]++;
        DONE(fabricast_sample_release(sample));
    }
    for (at = 0; at < PUSHERS; at++)
        CHECK(pthread_join(pushers[at], NULL) == 0);

    /* A waiting thread is woken by the close, which happens after the wait has started. */
    CHECK(pthread_create(&waiting, NULL, wait_for_ever, NULL) == 0);
    await_signal(ready[0]);
    for (;;) {
        fabricast_event event;
        fabricast_status status = fabricast_subscriber_event(subscriber, &event, sizeof event);
        if (status == FABRICAST_E_WOULD_BLOCK)
            break;
        CHECK(status == FABRICAST_OK);
        usleep(1000);
    }
    DONE(fabricast_subscriber_close(subscriber));
    CHECK(pthread_join(waiting, NULL) == 0);

    simple = subscriber_init(name);
    CHECK(simple != NULL);
    CHECK(pthread_create(&waiting, NULL, wait_simply, simple) == 0);
    await_signal(ready[0]);
    subscriber_destroy(simple);
    CHECK(pthread_join(waiting, NULL) == 0);

    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    close_while_publishing(node);
    DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
    puts("threads: ok");
    return 0;
}
