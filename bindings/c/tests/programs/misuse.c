/* Errors of a program are reported, and do not end it. */
#include "check.h"

#include <pthread.h>
#include <rgaps.h>

static void *other_thread(void *argument)
{
    (void)argument;
    /* Errors belong to the thread. */
    CHECK(fabricast_error_status() == FABRICAST_OK);
    CHECK(strcmp(fabricast_error_message(), "") == 0);
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_sample_check(NULL));
    CHECK(fabricast_error_status() == FABRICAST_E_BAD_HANDLE);
    return NULL;
}

static void handles(fabricast_node *node, fabricast_topic *opened)
{
    fabricast_node *never = (fabricast_node *)&node;
    fabricast_publisher *publisher;
    fabricast_subscriber *subscriber;
    fabricast_loan *loan;
    const char *text = "";
    uint64_t number = 7;
    int descriptor = 7;

    /* Another kind; not a handle; closed. */
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_node_identity((fabricast_node *)opened, &text));
    CHECK(text == NULL);
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_node_identity(never, &text));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_node_identity(NULL, &text));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_publisher_open((fabricast_topic *)node, &publisher));
    CHECK(publisher == NULL);
    CHECK(strstr(fabricast_error_message(), "topic") != NULL);
    CHECK(strcmp(fabricast_error_operation(), "open publisher") == 0);

    {
        fabricast_publisher_counters counters;

        memset(&counters, 0xff, sizeof counters);
        EXPECT(FABRICAST_E_BAD_HANDLE,
               fabricast_publisher_counters_of(NULL, &counters, sizeof counters));
        CHECK(counters.messages == 0 && counters.bytes == 0 && counters.dropped == 0);
    }

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_publisher_loan(publisher, 10, LONG, &loan));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_loan_discard((fabricast_loan *)publisher));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_loan_write(loan, 0, NULL, 3));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_loan_write(loan, SIZE_MAX, "x", 1));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_loan_write(loan, 0, "x", SIZE_MAX));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_loan_set_metadata(loan, &number, FABRICAST_MAX_METADATA + 1));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_loan_publish(loan, LONG, (void *)&number, 8));
    DONE(fabricast_loan_discard(loan));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_loan_discard(loan));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_publisher_identity(publisher, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_publisher_identity(publisher, (uint64_t *)((char *)&number + 1)));
    CHECK(number == 7);
    DONE(fabricast_publisher_close(publisher));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_publisher_close(publisher));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_publisher_push(publisher, "x", 1, LONG));
    CHECK(publisher_push((rgaps_publisher_t *)publisher, 1, &number) == FABRICAST_E_BAD_HANDLE);

    DONE(fabricast_subscriber_open(opened, &subscriber));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_subscriber_pull(subscriber, LONG, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_subscriber_event(subscriber, NULL, 32));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_subscriber_descriptor(subscriber, NULL));
    DONE(fabricast_subscriber_close(subscriber));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_subscriber_descriptor(subscriber, &descriptor));
    CHECK(descriptor == -1);

    DONE(fabricast_node_leave(NULL));
    DONE(fabricast_topic_close(NULL));
    DONE(fabricast_publisher_close(NULL));
    DONE(fabricast_loan_discard(NULL));
    DONE(fabricast_subscriber_close(NULL));
    DONE(fabricast_sample_release(NULL));
    DONE(fabricast_text_free(NULL));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_text_free((char *)&number));
}

static void settings_and_texts(fabricast_node *node)
{
    fabricast_topic_settings settings;
    fabricast_topic *opened;
    char *longest = malloc(6000), name[8] = "name";

    CHECK(longest != NULL);
    memset(longest, 'x', 5999);
    longest[5999] = 0;
    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, NULL, &settings, &opened));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, longest, &settings, &opened));
    longest[300] = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, longest, &settings, &opened));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, "\xc3(", &settings, &opened));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_topic_open(node, "never created", NULL, &opened));
    CHECK(opened == NULL);
    free(longest);

    settings.depth = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, name, &settings, &opened));
    settings.depth = 1000;
    settings.largest = (uint64_t)1 << 38;
    EXPECT(FABRICAST_E_OVER_BUDGET, fabricast_topic_open(node, name, &settings, &opened));
    CHECK(strstr(fabricast_error_message(), name) != NULL);
    settings.depth = 1;
    settings.largest = 100;
    settings.reliability = 9;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, name, &settings, &opened));
    settings.reliability = FABRICAST_DROP_OLDEST;
    settings.memory = "moon:0";
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, name, &settings, &opened));
    settings.memory = NULL;
    settings.size = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, name, &settings, &opened));
    settings.size = sizeof settings;
    DONE(fabricast_topic_open(node, name, &settings, &opened));
    {
        fabricast_topic *same;
        settings.largest = 101;
        EXPECT(FABRICAST_E_SETTINGS_DIFFER, fabricast_topic_open(node, name, &settings, &same));
        /* Both are named. */
        CHECK(strstr(fabricast_error_message(), "100") != NULL);
        CHECK(strstr(fabricast_error_message(), "101") != NULL);
    }
    DONE(fabricast_topic_close(opened));
}

static void options(void)
{
    fabricast_node_options options;
    fabricast_node *node;
    char *json;

    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_node_options_init(NULL, sizeof options));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_node_options_init(&options, 3));
    DONE(fabricast_node_options_init(&options, sizeof options));
    CHECK(options.size == sizeof options && options.directory == NULL && options.service_timeout > 0);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_node_join(&options, NULL));
    options.service = 77;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_node_join(&options, &node));
    options.service = FABRICAST_SERVICE_EXTERNAL;
    options.service_timeout = FABRICAST_MILLISECONDS(20);
    /* A directory without a service. */
    options.directory = getenv("DIRECTORY_WITHOUT_SERVICE");
    CHECK(options.directory != NULL);
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED, fabricast_node_join(&options, &node));
    CHECK(node == NULL);
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_report(options.directory, &json));
    CHECK(json == NULL);
}

int main(void)
{
    fabricast_node *node;
    fabricast_topic *opened;
    pthread_t thread;

    alarm(300);
    CHECK(strcmp(fabricast_status_name(FABRICAST_OK), "ok") == 0);
    CHECK(strcmp(fabricast_status_name(12345), "not a status") == 0);
    CHECK(strchr(fabricast_version(), '.') != NULL);
    CHECK(fabricast_error_status() == FABRICAST_OK);
    options();
    node = join();
    opened = topic(node, "misuse", 1000, 2);
    handles(node, opened);
    settings_and_texts(node);
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_node_leave(node));
    fabricast_error_clear();
    CHECK(fabricast_error_status() == FABRICAST_OK);
    CHECK(fabricast_open_handles() == 0);
    puts("misuse: ok");
    return 0;
}
