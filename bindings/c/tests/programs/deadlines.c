/* Calls keep their timeout while the process that serves the node, and reads all messages, is
 * stopped. */
#include "check.h"

#include <rgaps.h>
#include <time.h>

#define DEPTH 2

static double now(void)
{
    struct timespec time;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* A call that returns this status within so many seconds. */
#define WITHIN(seconds, expected, call)                                                       \
    do {                                                                                      \
        double start_ = now(), took_;                                                         \
        EXPECT(expected, call);                                                               \
        took_ = now() - start_;                                                               \
        if (took_ > (seconds)) {                                                              \
            fprintf(stderr, "%s:%d: %s took %.2f s\n", __FILE__, __LINE__, #call, took_);     \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

static void open_topic(fabricast_node *node, const char *name, fabricast_topic **topic)
{
    fabricast_topic_settings settings;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    settings.depth = DEPTH;
    settings.largest = 4096;
    settings.release_deadline = FABRICAST_SECONDS(300);
    DONE(fabricast_topic_open(node, name, &settings, topic));
}

static void serve(int in, int out)
{
    fabricast_node *node;
    fabricast_topic *topic;
    fabricast_subscriber *subscriber;

    DONE(fabricast_node_join(NULL, &node));
    open_topic(node, "deadlines", &topic);
    DONE(fabricast_subscriber_open(topic, &subscriber));
    signal_peer(out);
    await_signal(in);
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_topic_close(topic));
    DONE(fabricast_node_leave(node));
}

int main(void)
{
    const fabricast_timeout soon = FABRICAST_MILLISECONDS(200);
    char simple[] = "deadlines";
    fabricast_node_options options;
    fabricast_node *node, *other;
    fabricast_topic *topic, *second;
    fabricast_publisher *publisher;
    fabricast_subscriber *subscriber;
    fabricast_sample *sample;
    fabricast_loan *loan;
    char *report;
    double begin;
    int in, out, i;
    pid_t child;

    alarm(300);
    child = start(serve, &in, &out);
    await_signal(in);
    DONE(fabricast_node_options_init(&options, sizeof options));
    options.service = FABRICAST_SERVICE_EXTERNAL;
    options.service_timeout = FABRICAST_SECONDS(1);
    DONE(fabricast_node_join(&options, &node));
    open_topic(node, "deadlines", &topic);
    DONE(fabricast_publisher_open(topic, &publisher));
    DONE(fabricast_subscriber_open(topic, &subscriber));
    for (i = 0; i < DEPTH; i++)
        DONE(fabricast_publisher_push(publisher, "x", 1, LONG));
    CHECK(kill(child, SIGSTOP) == 0);

    WITHIN(1, FABRICAST_E_WOULD_BLOCK, fabricast_publisher_push(publisher, "x", 1, FABRICAST_NOW));
    WITHIN(2, FABRICAST_E_DEADLINE_EXCEEDED, fabricast_publisher_push(publisher, "x", 1, soon));
    WITHIN(1, FABRICAST_OK, fabricast_publisher_loan(publisher, 1, soon, &loan));
    WITHIN(1, FABRICAST_E_WOULD_BLOCK,
           fabricast_loan_publish(loan, FABRICAST_NOW, NULL, 0));
    WITHIN(2, FABRICAST_E_DEADLINE_EXCEEDED, fabricast_loan_publish(loan, soon, NULL, 0));
    WITHIN(1, FABRICAST_OK, fabricast_loan_discard(loan));
    WITHIN(1, FABRICAST_E_WOULD_BLOCK, fabricast_publisher_flush(publisher, FABRICAST_NOW));
    WITHIN(2, FABRICAST_E_DEADLINE_EXCEEDED, fabricast_publisher_flush(publisher, soon));
    for (i = 0; i < DEPTH; i++) {
        WITHIN(1, FABRICAST_OK, fabricast_subscriber_pull(subscriber, soon, &sample));
        WITHIN(1, FABRICAST_OK, fabricast_sample_release(sample));
    }
    WITHIN(1, FABRICAST_E_WOULD_BLOCK,
           fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    WITHIN(2, FABRICAST_E_DEADLINE_EXCEEDED, fabricast_subscriber_pull(subscriber, soon, &sample));

    /* Calls that need the service: each waits for it for one second. */
    WITHIN(4, FABRICAST_E_DEADLINE_EXCEEDED, fabricast_node_join(&options, &other));
    begin = now();
    CHECK(fabricast_topic_open(node, "another", NULL, &second) != FABRICAST_OK);
    CHECK(fabricast_node_report(node, &report) != FABRICAST_OK);
    CHECK(now() - begin < 15);
    CHECK(setenv("FABRICAST_SERVICE_TIMEOUT", "1", 1) == 0);
    CHECK(setenv("FABRICAST_SERVICE", "external", 1) == 0);
    begin = now();
    CHECK(publisher_init(simple) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_DEADLINE_EXCEEDED);
    CHECK(now() - begin < 4);

    /* Closing has no timeout argument, but ends. */
    begin = now();
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(topic));
    DONE(fabricast_node_leave(node));
    CHECK(now() - begin < 30);
    CHECK(fabricast_open_handles() == 0);
    CHECK(kill(child, SIGCONT) == 0);
    signal_peer(out);
    finish(child);
    puts("deadlines: ok");
    return 0;
}
