/* The functions of rgaps.h, in two processes: every byte of messages of all sizes. */
#include "check.h"

#include <rgaps.h>

#define MESSAGES 300
#define LARGEST ((size_t)3 << 20)

/* A message contains its length, since subscriber_pull does not return it. */
struct head {
    uint64_t message;
    uint64_t length;
};

static size_t length_of(uint64_t message)
{
    if (message % 100 == 99)
        return LARGEST;
    return sizeof(struct head) + (size_t)(message * message * 7 % 20000);
}

static void publish(int in, int out)
{
    char name[] = "thesis";
    unsigned char *bytes = malloc(LARGEST);
    rgaps_publisher_t *publisher = publisher_init(name);
    uint64_t message;

    CHECK(bytes != NULL && publisher != NULL);
    signal_peer(out);
    await_signal(in);
    for (message = 0; message < MESSAGES; message++) {
        struct head head;
        head.message = message;
        head.length = length_of(message);
        memcpy(bytes, &head, sizeof head);
        fill(bytes + sizeof head, (size_t)head.length - sizeof head, message);
        CHECK(publisher_push(publisher, (size_t)head.length, bytes) == 0);
        /* A copy was published. */
        memset(bytes, 0xee, (size_t)head.length);
    }
    /* Impossible arguments. */
    CHECK(publisher_push(publisher, (size_t)1 << 40, bytes) < 0);
    CHECK(publisher_push(publisher, 8, NULL) == FABRICAST_E_INVALID_ARGUMENT);
    await_signal(in);
    publisher_destroy(publisher);
    CHECK(publisher_push(publisher, 8, bytes) == FABRICAST_E_BAD_HANDLE);
    free(bytes);
}

int main(void)
{
    char name[] = "thesis", other[] = "another";
    int in, out;
    pid_t child;
    rgaps_subscriber_t *subscriber, *second;
    uint64_t message;
    const unsigned char *before = NULL;

    alarm(300);
    child = start(publish, &in, &out);
    await_signal(in);
    subscriber = subscriber_init(name);
    second = subscriber_init(name);
    CHECK(subscriber != NULL && second != NULL);
    signal_peer(out);
    for (message = 0; message < MESSAGES; message++) {
        const unsigned char *bytes = subscriber_pull(subscriber);
        const unsigned char *same = subscriber_pull(second);
        struct head head;

        CHECK(bytes != NULL && same != NULL);
        /* One copy for all readers. */
        CHECK(bytes == same);
        CHECK(bytes != before);
        before = bytes;
        memcpy(&head, bytes, sizeof head);
        CHECK(head.message == message && head.length == length_of(message));
        check_filled(bytes + sizeof head, (size_t)head.length - sizeof head, message);
    }
    signal_peer(out);
    subscriber_destroy(subscriber);
    CHECK(subscriber_pull(subscriber) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_BAD_HANDLE);
    subscriber_destroy(second);
    subscriber_destroy(NULL);
    publisher_destroy(NULL);
    CHECK(subscriber_init(NULL) == NULL && publisher_init(NULL) == NULL);
    finish(child);

    /* Without a subscriber, which is not a failure. */
    {
        rgaps_publisher_t *publisher = publisher_init(other);
        CHECK(publisher != NULL);
        CHECK(publisher_push(publisher, sizeof other, other) == 0);
        publisher_destroy(publisher);
    }
    CHECK(fabricast_open_handles() == 0);
    puts("thesis: ok");
    return 0;
}
