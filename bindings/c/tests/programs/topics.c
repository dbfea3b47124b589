/* The whole interface, in two processes: loans, metadata, sample information, non-blocking calls,
 * timeouts, reports. */
#include "check.h"

#define LARGEST ((size_t)1 << 20)
#define DEPTH 4
#define MESSAGES 200

static void publish_loans(fabricast_publisher *publisher)
{
    uint64_t message;

    for (message = 0; message < MESSAGES; message++) {
        size_t length = (size_t)(message * 997 % LARGEST), found;
        fabricast_loan *loan;
        fabricast_sent sent;
        void *address;

        DONE(fabricast_publisher_loan(publisher, length, LONG, &loan));
        DONE(fabricast_loan_memory(loan, &address, &found));
        CHECK(found == length);
        if (message % 2 == 0) {
            fill(address, length, message);
        } else {
            unsigned char *bytes = malloc(length + 1);
            CHECK(bytes != NULL);
            fill(bytes, length, message);
            DONE(fabricast_loan_write(loan, 0, bytes, length));
            free(bytes);
        }
        EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_loan_write(loan, length, "x", 1));
        DONE(fabricast_loan_set_metadata(loan, &message, sizeof message));
        DONE(fabricast_loan_publish(loan, LONG, &sent, sizeof sent));
        CHECK(sent.subscribers == 1 && sent.dropped == 0);
        CHECK(sent.position != FABRICAST_NO_POSITION);
        /* The handle is closed. */
        EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_loan_write(loan, 0, "x", 1));
    }
}

/* Without a reader meanwhile. */
static void fill_up(fabricast_publisher *publisher)
{
    fabricast_status status = FABRICAST_OK;
    fabricast_loan *loan;
    int pushed = 0, at;

    while ((status = fabricast_publisher_push(publisher, "full", 4, FABRICAST_NOW)) == FABRICAST_OK) {
        pushed++;
        CHECK(pushed <= DEPTH);
    }
    CHECK(status == FABRICAST_E_WOULD_BLOCK && pushed == DEPTH);
    CHECK(fabricast_error_status() == FABRICAST_E_WOULD_BLOCK);
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_publisher_push(publisher, "full", 4, FABRICAST_MILLISECONDS(5)));
    EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_publisher_flush(publisher, FABRICAST_NOW));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_publisher_flush(publisher, FABRICAST_MILLISECONDS(5)));

    /* A loan without space stays valid if the call does not wait. */
    DONE(fabricast_publisher_loan(publisher, 5, LONG, &loan));
    DONE(fabricast_loan_write(loan, 0, "later", 5));
    for (at = 0; at < 3; at++)
        EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_loan_publish(loan, FABRICAST_NOW, NULL, 0));
    DONE(fabricast_loan_discard(loan));
    DONE(fabricast_publisher_loan(publisher, 5, LONG, &loan));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_loan_publish(loan, FABRICAST_MILLISECONDS(5), NULL, 0));
    DONE(fabricast_loan_discard(loan));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_loan_discard(loan));
}

static void publish(int in, int out)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "topics", LARGEST, DEPTH);
    fabricast_publisher *publisher;
    fabricast_publisher_counters counters;
    uint64_t count, identity;

    DONE(fabricast_publisher_open(opened, &publisher));
    DONE(fabricast_publisher_identity(publisher, &identity));
    signal_peer(out);
    await_signal(in);
    DONE(fabricast_publisher_subscribers(publisher, &count));
    CHECK(count == 1);
    CHECK(write(out, &identity, sizeof identity) == sizeof identity);
    publish_loans(publisher);
    DONE(fabricast_publisher_flush(publisher, LONG));
    await_signal(in);
    fill_up(publisher);
    signal_peer(out);
    DONE(fabricast_publisher_flush(publisher, LONG));
    DONE(fabricast_publisher_push_device(publisher, "any pointer", 11, LONG));
    DONE(fabricast_publisher_push(publisher, NULL, 0, LONG));
    DONE(fabricast_publisher_flush(publisher, LONG));
    DONE(fabricast_publisher_counters_of(publisher, &counters, sizeof counters));
    CHECK(counters.messages == MESSAGES + DEPTH + 2 && counters.dropped == 0);
    EXPECT(FABRICAST_E_TOO_LONG, fabricast_publisher_push(publisher, node, LARGEST + 1, LONG));
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
}

static void read_loans(fabricast_subscriber *subscriber, uint64_t identity)
{
    unsigned char *copy = malloc(LARGEST);
    uint64_t message, earlier = 0;

    CHECK(copy != NULL);
    for (message = 0; message < MESSAGES; message++) {
        fabricast_sample *sample;
        fabricast_sample_info info;
        const void *address, *metadata;
        size_t length, metadata_length;
        uint64_t attached;

        DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
        DONE(fabricast_sample_memory(sample, &address, &length));
        CHECK(length == (size_t)(message * 997 % LARGEST));
        check_filled(address, length, message);
        DONE(fabricast_sample_check(sample));
        DONE(fabricast_sample_metadata(sample, &metadata, &metadata_length));
        CHECK(metadata_length == sizeof attached);
        memcpy(&attached, metadata, sizeof attached);
        CHECK(attached == message);
        DONE(fabricast_sample_info_of(sample, &info, sizeof info));
        CHECK(info.address == address && info.length == length);
        CHECK(info.metadata == metadata && info.metadata_length == metadata_length);
        CHECK(strcmp(info.memory, "host") == 0 && strcmp(info.origin, "") == 0);
        CHECK(info.publisher == identity && info.sequence == message + 1);
        CHECK(strcmp(info.path, "shared-memory") == 0);
        CHECK(info.published_at > 0 && info.published_at >= earlier);
        earlier = info.published_at;
        if (length > 3) {
            DONE(fabricast_sample_read(sample, 3, copy, length - 3));
            CHECK(memcmp(copy, (const char *)address + 3, length - 3) == 0);
        }
        EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_sample_read(sample, length, copy, 1));
        DONE(fabricast_sample_release(sample));
        EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_sample_memory(sample, &address, &length));
        CHECK(address == NULL && length == 0);
    }
    free(copy);
}

static void expect_text(fabricast_subscriber *subscriber, const char *text)
{
    fabricast_sample *sample;
    const void *address;
    size_t length;

    DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_sample_memory(sample, &address, &length));
    CHECK(length == strlen(text) && memcmp(address, text, length) == 0);
    DONE(fabricast_sample_release(sample));
}

/* A topic with a type cannot be opened with another type. */
static void name_a_type(fabricast_node *node)
{
    fabricast_topic_settings settings, found;
    fabricast_topic *poses, *other;

    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    CHECK(settings.type_name == NULL);
    settings.type_name = "";
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, "poses", &settings, &poses));
    settings.type_name = "Pose";
    DONE(fabricast_topic_open(node, "poses", &settings, &poses));
    DONE(fabricast_topic_settings_of(poses, &found, sizeof found));
    CHECK(strcmp(found.type_name, "Pose") == 0);
    DONE(fabricast_topic_open(node, "poses", &found, &other));
    DONE(fabricast_topic_close(other));
    settings.type_name = "Twist";
    EXPECT(FABRICAST_E_SETTINGS_DIFFER, fabricast_topic_open(node, "poses", &settings, &other));
    /* A program without types opens a topic of any type. */
    settings.size = offsetof(fabricast_topic_settings, type_name);
    DONE(fabricast_topic_open(node, "poses", &settings, &other));
    DONE(fabricast_topic_close(other));
    DONE(fabricast_topic_close(poses));
}

int main(void)
{
    int in, out, at;
    pid_t child;
    fabricast_node *node;
    fabricast_topic *opened;
    fabricast_topic_settings settings;
    fabricast_subscriber *subscriber;
    fabricast_sample *sample;
    fabricast_event event;
    const char *text;
    char *json, *report;
    uint64_t identity;

    alarm(300);
    child = start(publish, &in, &out);
    node = join();
    await_signal(in);
    /* The creator has set the settings. */
    DONE(fabricast_topic_open(node, "topics", NULL, &opened));
    DONE(fabricast_topic_settings_of(opened, &settings, sizeof settings));
    CHECK(settings.size == sizeof settings && settings.largest == LARGEST);
    CHECK(settings.depth == DEPTH && settings.reliability == FABRICAST_RELIABLE);
    CHECK(strcmp(settings.memory, "host") == 0);
    name_a_type(node);
    DONE(fabricast_topic_name(opened, &text));
    CHECK(strcmp(text, "topics") == 0);
    DONE(fabricast_subscriber_open(opened, &subscriber));
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    CHECK(sample == NULL);
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_subscriber_pull(subscriber, FABRICAST_MILLISECONDS(5), &sample));
    signal_peer(out);
    CHECK(read(in, &identity, sizeof identity) == sizeof identity);
    read_loans(subscriber, identity);
    DONE(fabricast_subscriber_event(subscriber, &event, sizeof event));
    CHECK(event.kind == FABRICAST_EVENT_NONE);

    DONE(fabricast_node_report(node, &json));
    CHECK(strncmp(json, "[{\"Node\":", 9) == 0 && strstr(json, "\"topics\"") != NULL);
    DONE(fabricast_node_identity(node, &text));
    CHECK(strlen(text) == 36 && strstr(json, text) != NULL);
    DONE(fabricast_node_directory(node, &text));
    DONE(fabricast_report(text, &report));
    CHECK(strncmp(report, "[{\"Node\":", 9) == 0);
    DONE(fabricast_text_free(report));
    DONE(fabricast_text_free(json));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_text_free(json));

    signal_peer(out);
    await_signal(in);
    for (at = 0; at < DEPTH; at++)
        expect_text(subscriber, "full");
    expect_text(subscriber, "any pointer");
    expect_text(subscriber, "");
    finish(child);
    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
    puts("topics: ok");
    return 0;
}
