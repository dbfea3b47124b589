/* Signal handlers in a waiting thread: the call is interrupted, and continues when it is repeated. */
#include "check.h"

#include <pthread.h>
#include <rgaps.h>
#include <string.h>

static pthread_t waiter;
static int is_over, handled, handled_elsewhere;

static int get(int *of)
{
    return __atomic_load_n(of, __ATOMIC_SEQ_CST);
}

static void set(int *of, int value)
{
    __atomic_store_n(of, value, __ATOMIC_SEQ_CST);
}

static void handler(int number)
{
    (void)number;
    __atomic_fetch_add(pthread_equal(pthread_self(), waiter) ? &handled : &handled_elsewhere, 1,
                       __ATOMIC_SEQ_CST);
}

static void handle(int number, void (*with)(int), int flags)
{
    struct sigaction action;

    memset(&action, 0, sizeof action);
    action.sa_handler = with;
    action.sa_flags = flags;
    CHECK(sigaction(number, &action, NULL) == 0);
}

/* A signal may arrive before the call blocks: so it is sent repeatedly. */
static void *signals_the_waiter(void *number)
{
    while (!get(&is_over)) {
        usleep(20000);
        CHECK(pthread_kill(waiter, *(int *)number) == 0);
    }
    return NULL;
}

static void *signals_the_process(void *number)
{
    while (!get(&is_over)) {
        usleep(20000);
        CHECK(kill(getpid(), *(int *)number) == 0);
    }
    return NULL;
}

static void *signals_itself(void *number)
{
    while (!get(&is_over)) {
        usleep(20000);
        CHECK(pthread_kill(pthread_self(), *(int *)number) == 0);
    }
    return NULL;
}

static pthread_t begin(void *(*run)(void *), int *number)
{
    pthread_t thread;

    set(&is_over, 0);
    CHECK(pthread_create(&thread, NULL, run, number) == 0);
    return thread;
}

static void end(pthread_t thread)
{
    set(&is_over, 1);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* A call that would wait forever without a signal. */
#define INTERRUPTED(run, number, call)                                                        \
    do {                                                                                      \
        pthread_t sender_ = begin(run, number);                                               \
        int before_ = get(&handled);                                                  \
        EXPECT(FABRICAST_E_INTERRUPTED, call);                                                \
        CHECK(strstr(fabricast_error_message(), "interrupted") != NULL);                      \
        CHECK(get(&handled) > before_);                                               \
        end(sender_);                                                                         \
    } while (0)

struct used {
    fabricast_subscriber *subscriber;
    int began;
};

/* Signals are blocked in this thread. */
static void *uses(void *argument)
{
    struct used *used = argument;
    fabricast_sample *sample;
    sigset_t all;

    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
    set(&used->began, 1);
    EXPECT(FABRICAST_E_CLOSED,
           fabricast_subscriber_pull(used->subscriber, FABRICAST_FOREVER, &sample));
    return NULL;
}

static void calls(void *(*run)(void *), int *number)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "signals", 100, 1);
    fabricast_publisher *publisher;
    fabricast_subscriber *subscriber;
    fabricast_sample *sample;
    fabricast_loan *loan;
    fabricast_sent sent;
    struct used used;
    pthread_t user;
    const void *address;
    size_t length;

    DONE(fabricast_publisher_open(opened, &publisher));
    INTERRUPTED(run, number, fabricast_publisher_wait_for_subscribers(publisher, 1, FABRICAST_FOREVER));
    DONE(fabricast_subscriber_open(opened, &subscriber));
    DONE(fabricast_publisher_wait_for_subscribers(publisher, 1, FABRICAST_FOREVER));

    /* No message was taken. */
    INTERRUPTED(run, number, fabricast_subscriber_pull(subscriber, FABRICAST_FOREVER, &sample));
    CHECK(sample == NULL);
    INTERRUPTED(run, number, fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_publisher_push(publisher, "one", 3, LONG));
    DONE(fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    DONE(fabricast_sample_memory(sample, &address, &length));
    CHECK(length == 3 && memcmp(address, "one", 3) == 0);

    DONE(fabricast_publisher_push(publisher, "two", 3, LONG));

    /* No message was sent, and a loan is unchanged. */
    INTERRUPTED(run, number, fabricast_publisher_flush(publisher, FABRICAST_FOREVER));
    INTERRUPTED(run, number, fabricast_publisher_push(publisher, "none", 4, FABRICAST_FOREVER));
    DONE(fabricast_publisher_loan(publisher, 5, LONG, &loan));
    DONE(fabricast_loan_write(loan, 0, "three", 5));
    INTERRUPTED(run, number, fabricast_loan_publish(loan, FABRICAST_FOREVER, NULL, 0));
    DONE(fabricast_sample_release(sample));
    DONE(fabricast_subscriber_pull(subscriber, FABRICAST_NOW, &sample));
    DONE(fabricast_sample_memory(sample, &address, &length));
    CHECK(length == 3 && memcmp(address, "two", 3) == 0);
    DONE(fabricast_sample_release(sample));
    DONE(fabricast_loan_publish(loan, LONG, &sent, sizeof sent));
    CHECK(sent.position == 2 && sent.subscribers == 1);
    DONE(fabricast_subscriber_pull(subscriber, LONG, &sample));
    DONE(fabricast_sample_memory(sample, &address, &length));
    CHECK(length == 5 && memcmp(address, "three", 5) == 0);
    DONE(fabricast_sample_release(sample));

    /* While another thread uses the subscriber. */
    used.subscriber = subscriber;
    set(&used.began, 0);
    CHECK(pthread_create(&user, NULL, uses, &used) == 0);
    while (!get(&used.began))
        usleep(1000);
    usleep(100000);
    INTERRUPTED(run, number, fabricast_subscriber_pull(subscriber, FABRICAST_FOREVER, &sample));

    DONE(fabricast_subscriber_close(subscriber));
    CHECK(pthread_join(user, NULL) == 0);
    DONE(fabricast_publisher_close(publisher));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
}

/* Handlers that run in other threads, and signals without a handler. */
static void others(void)
{
    fabricast_node *node = join();
    fabricast_topic *opened = topic(node, "others", 100, 1);
    fabricast_subscriber *subscriber;
    fabricast_sample *sample;
    pthread_t sender;
    int number = SIGUSR1, before = get(&handled);

    DONE(fabricast_subscriber_open(opened, &subscriber));
    sender = begin(signals_itself, &number);
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_subscriber_pull(subscriber, FABRICAST_MILLISECONDS(300), &sample));
    end(sender);
    CHECK(get(&handled_elsewhere) > 0);
    number = SIGUSR2;
    handle(number, SIG_IGN, 0);
    sender = begin(signals_the_waiter, &number);
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_subscriber_pull(subscriber, FABRICAST_MILLISECONDS(300), &sample));
    end(sender);
    CHECK(get(&handled) == before);
    DONE(fabricast_subscriber_close(subscriber));
    DONE(fabricast_topic_close(opened));
    DONE(fabricast_node_leave(node));
}

static void simple(void)
{
    rgaps_publisher_t *publisher = publisher_init("simple");
    rgaps_subscriber_t *subscriber = subscriber_init("simple");
    int number = SIGUSR1;
    pthread_t sender;

    CHECK(publisher != NULL && subscriber != NULL);
    sender = begin(signals_the_waiter, &number);
    CHECK(subscriber_pull(subscriber) == NULL);
    CHECK(fabricast_error_status() == FABRICAST_E_INTERRUPTED);
    CHECK(publisher_wait(publisher, 2, -1) == FABRICAST_E_INTERRUPTED);
    end(sender);
    CHECK(publisher_push(publisher, 5, "hello") == 0);
    CHECK(memcmp(subscriber_pull(subscriber), "hello", 5) == 0);
    subscriber_destroy(subscriber);
    publisher_destroy(publisher);
}

int main(void)
{
    int first = SIGUSR1, second = SIGUSR2;

    alarm(300);
    waiter = pthread_self();
    handle(first, handler, 0);
    handle(second, handler, SA_RESTART);
    calls(signals_the_waiter, &first);
    calls(signals_the_waiter, &second);
    calls(signals_the_process, &first);
    simple();
    others();
    CHECK(strcmp(fabricast_status_name(FABRICAST_E_INTERRUPTED), "interrupted") == 0);
    CHECK(fabricast_open_handles() == 0);
    puts("signals: ok");
    return 0;
}
