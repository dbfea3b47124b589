/* Number of loans of a publisher, for programs that set it and for older ones. */
#include "check.h"

/* The settings of the first version of the interface. */
#define WITHOUT_LOANS 40

static void no_more_than(fabricast_publisher *publisher, size_t allowed)
{
    fabricast_loan *loans[8], *refused;
    fabricast_sent sent;
    size_t at;

    for (at = 0; at < allowed; at++)
        DONE(fabricast_publisher_loan(publisher, 8, LONG, &loans[at]));
    EXPECT(FABRICAST_E_TOO_MANY_LOANS, fabricast_publisher_loan(publisher, 8, LONG, &refused));
    CHECK(refused == NULL && strstr(fabricast_error_message(), "loans") != NULL);
    EXPECT(FABRICAST_E_TOO_MANY_LOANS,
           fabricast_publisher_loan(publisher, 8, FABRICAST_NOW, &refused));
    EXPECT(FABRICAST_E_TOO_MANY_LOANS, fabricast_publisher_push(publisher, "x", 1, LONG));

    /* A discarded or published loan is available again. */
    DONE(fabricast_loan_discard(loans[0]));
    DONE(fabricast_publisher_push(publisher, "x", 1, LONG));
    DONE(fabricast_publisher_loan(publisher, 8, LONG, &loans[0]));
    EXPECT(FABRICAST_E_TOO_MANY_LOANS, fabricast_publisher_loan(publisher, 8, LONG, &refused));
    DONE(fabricast_loan_publish(loans[0], LONG, &sent, sizeof sent));
    for (at = 1; at < allowed; at++)
        DONE(fabricast_loan_discard(loans[at]));
}

int main(void)
{
    fabricast_topic_settings settings, found;
    fabricast_topic *opened, *other;
    fabricast_publisher *publisher;
    fabricast_node *node = join();

    CHECK(strcmp(fabricast_status_name(FABRICAST_E_TOO_MANY_LOANS), "too many loans") == 0);
    DONE(fabricast_topic_settings_init(&settings, sizeof settings));
    CHECK(settings.loans == 4);
    settings.loans = 2;
    DONE(fabricast_topic_open(node, "two", &settings, &opened));
    DONE(fabricast_topic_settings_of(opened, &found, sizeof found));
    CHECK(found.loans == 2);
    DONE(fabricast_publisher_open(opened, &publisher));
    no_more_than(publisher, 2);
    DONE(fabricast_publisher_close(publisher));
    settings.loans = 3;
    EXPECT(FABRICAST_E_SETTINGS_DIFFER, fabricast_topic_open(node, "two", &settings, &other));
    DONE(fabricast_topic_close(opened));

    settings.loans = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, "none", &settings, &other));
    settings.loans = UINT64_MAX;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_topic_open(node, "none", &settings, &other));

    /* A program without "loans" gets the default number, and its memory is not overwritten. */
    memset(&settings, 0xff, sizeof settings);
    DONE(fabricast_topic_settings_init(&settings, WITHOUT_LOANS));
    CHECK(settings.size == WITHOUT_LOANS && settings.loans == UINT64_MAX);
    DONE(fabricast_topic_open(node, "older", &settings, &opened));
    memset(&found, 0xff, sizeof found);
    DONE(fabricast_topic_settings_of(opened, &found, WITHOUT_LOANS));
    CHECK(found.depth == 16 && found.loans == UINT64_MAX);
    DONE(fabricast_publisher_open(opened, &publisher));
    no_more_than(publisher, 4);
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
    CHECK(fabricast_open_handles() == 0);
    puts("loans: ok");
    return 0;
}
