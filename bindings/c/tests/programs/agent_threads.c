/*
 * Threads that share an agent: while one waits for an event, an operation or a flush, the others use
 * it; closing it ends the waits. Signal handlers end waits, too.
 */
#include "agents.h"

#include <pthread.h>
#include <time.h>

#define LENGTH ((size_t)64 << 10)
#define THREADS 4
#define EACH 300

static fabricast_agent *here, *there;
static fabricast_memory *memory[2];
static fabricast_region *local, *remote;
static fabricast_route *route;
static fabricast_peer peer;
static int handled;

static double now(void)
{
    struct timespec time;

    CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Each thread has a part of the memory. */
static void *put_and_get(void *argument)
{
    size_t thread = *(size_t *)argument, part = LENGTH / THREADS, round;
    unsigned char *bytes = malloc(part);

    CHECK(bytes != NULL);
    for (round = 0; round < EACH; round++) {
        fabricast_block block = {0, 0, 0};
        fabricast_notice notice = {sizeof notice, 0, NULL, 0};
        fabricast_token token;
        uint64_t done;

        block.to = block.from = thread * part;
        block.length = part;
        notice.tag = thread;
        notice.data = &round;
        notice.length = sizeof round;
        fill(bytes, part, thread * EACH + round);
        DONE(fabricast_memory_write(memory[0], thread * part, bytes, part));
        DONE(fabricast_agent_put(here, route, &block, 1, &notice, &token));
        DONE(fabricast_agent_wait(here, token, LONG, &done));
        CHECK(done == part);
        DONE(fabricast_memory_read(memory[1], thread * part, bytes, part));
        check_filled(bytes, part, thread * EACH + round);
        if (round % 16 == 0)
            DONE(fabricast_agent_flush(here, peer, LONG));
    }
    free(bytes);
    return NULL;
}

/* The notices of each thread arrive in its order. */
static void *take_notices(void *argument)
{
    size_t next[THREADS] = {0}, at;
    fabricast_agent_event event;

    (void)argument;
    for (at = 0; at < (size_t)THREADS * EACH; at++) {
        size_t round;
        event = await_event(there, FABRICAST_AGENT_EVENT_NOTICE);
        CHECK(event.tag < THREADS && event.length == sizeof round);
        memcpy(&round, event.data, sizeof round);
        CHECK(round == next[event.tag]++);
    }
    return NULL;
}

static void *wait_for_ever(void *argument)
{
    fabricast_agent_event event;

    EXPECT(FABRICAST_E_CLOSED,
           fabricast_agent_next_event(*(fabricast_agent **)argument, FABRICAST_FOREVER, &event,
                                      sizeof event));
    return NULL;
}

/* While a thread waits for an event, other calls return soon. */
static void share_while_waiting(void)
{
    fabricast_agent *agent = start_agent("shared", NULL, NULL);
    fabricast_region *region;
    pthread_t waiting[2];
    double began, longest = 0;
    uint64_t count;
    int at;

    for (at = 0; at < 2; at++)
        CHECK(pthread_create(&waiting[at], NULL, wait_for_ever, &agent) == 0);
    usleep(50000);
    for (at = 0; at < 100; at++) {
        began = now();
        region = enter(agent, memory[0], FABRICAST_READ);
        DONE(fabricast_agent_in_flight(agent, &count));
        DONE(fabricast_region_close(region));
        if (now() - began > longest)
            longest = now() - began;
    }
    CHECK(longest < 5);
    began = now();
    close_agent(agent);
    for (at = 0; at < 2; at++)
        CHECK(pthread_join(waiting[at], NULL) == 0);
    CHECK(now() - began < 10);
}

static void handler(int number)
{
    (void)number;
    __atomic_fetch_add(&handled, 1, __ATOMIC_SEQ_CST);
}

static void *interrupt(void *argument)
{
    int *is_over = argument;

    while (!__atomic_load_n(is_over, __ATOMIC_SEQ_CST)) {
        usleep(20000);
        CHECK(kill(getpid(), SIGUSR1) == 0);
    }
    return NULL;
}

/* A handler that runs in the waiting thread ends the wait; a call that does not wait is not affected. */
static void signals(void)
{
    struct sigaction action;
    fabricast_agent_event event;
    fabricast_memory *own;
    fabricast_region *region;
    unsigned char bytes[64];
    pthread_t sender;
    int is_over = 0;
    sigset_t set;

    /* The sender and threads of the library block it. */
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
    CHECK(pthread_create(&sender, NULL, interrupt, &is_over) == 0);
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &set, NULL) == 0);
    EXPECT(FABRICAST_E_INTERRUPTED,
           fabricast_agent_next_event(here, FABRICAST_FOREVER, &event, sizeof event));
    CHECK(__atomic_load_n(&handled, __ATOMIC_SEQ_CST) > 0);
    DONE(fabricast_memory_adopt(bytes, sizeof bytes, &own));
    region = enter(here, own, FABRICAST_LOCAL_ONLY);
    EXPECT(FABRICAST_E_INTERRUPTED, fabricast_memory_close(own, FABRICAST_FOREVER));
    DONE(fabricast_region_close(region));
    __atomic_store_n(&is_over, 1, __ATOMIC_SEQ_CST);
    CHECK(pthread_join(sender, NULL) == 0);
    close_memory(own);
}

int main(void)
{
    struct bytes card, descriptor;
    pthread_t threads[THREADS], taker;
    size_t numbers[THREADS], at;

    alarm(300);
    here = start_agent("here", NULL, NULL);
    there = start_agent("there", NULL, NULL);
    memory[0] = allocate("host", LENGTH);
    memory[1] = allocate("host", LENGTH);
    local = enter(here, memory[0], FABRICAST_LOCAL_ONLY);
    remote = enter(there, memory[1], FABRICAST_READ | FABRICAST_WRITE);
    card = card_of(there);
    peer = connect_to(here, &card);
    descriptor = descriptor_of(remote);
    route = join_region(here, peer, local, &descriptor);

    CHECK(pthread_create(&taker, NULL, take_notices, NULL) == 0);
    for (at = 0; at < THREADS; at++) {
        numbers[at] = at;
        CHECK(pthread_create(&threads[at], NULL, put_and_get, &numbers[at]) == 0);
    }
    for (at = 0; at < THREADS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    CHECK(pthread_join(taker, NULL) == 0);
    share_while_waiting();
    signals();

    close_agent(here);
    close_agent(there);
    DONE(fabricast_route_close(route));
    DONE(fabricast_region_close(local));
    DONE(fabricast_region_close(remote));
    close_memory(memory[0]);
    close_memory(memory[1]);
    CHECK(fabricast_open_handles() == 0);
    puts("agent_threads: ok");
    return 0;
}
