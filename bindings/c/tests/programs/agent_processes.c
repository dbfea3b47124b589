/*
 * Agents in two processes, by each path: memory that both map, a fabric, and device memory, of an
 * emulated device or of the CUDA device in FABRICAST_DEVICE. Memory of the library, and memory that
 * the program has. Processes that are killed.
 */
#include "agents.h"
#include "driver.h"

#define LENGTH ((size_t)2 << 20)
#define ROUNDS 4

/* Where memory comes from. */
enum source { HOST, OWN_HOST, DEVICE, OWN_DEVICE };

/* What the owner of the target and its peer have. */
struct situation {
    enum source target, source;
    const char *fabric;
    const char *path;
};

static const struct situation situations[] = {
    {HOST, HOST, NULL, "shared-memory"},
    {HOST, OWN_HOST, NULL, "shared-memory"},
    {OWN_HOST, HOST, NULL, "host-staged"},
    {OWN_HOST, DEVICE, NULL, "host-staged"},
    {HOST, HOST, "auto", "fabric-direct"},
    {OWN_HOST, OWN_HOST, "auto", "fabric-direct"},
    {DEVICE, DEVICE, NULL, "cuda-ipc"},
    {OWN_DEVICE, DEVICE, NULL, "cuda-ipc"},
    {DEVICE, HOST, NULL, "cuda-ipc"},
    {HOST, DEVICE, NULL, "shared-memory"},
    {DEVICE, HOST, "auto", "fabric-staged"},
};

enum { SITUATIONS = sizeof situations / sizeof *situations };

static const struct situation *now;

/* Memory of a situation, and what it consists of. */
struct place {
    fabricast_memory *memory, *inside;
    unsigned char *own;
    device_pointer device;
};

static struct place make(enum source source)
{
    const char *device = number() >= 0 ? getenv("FABRICAST_DEVICE") : "emulated:0";
    struct place place = {NULL, NULL, NULL, 0};
    void *address;
    size_t length;

    switch (source) {
    case HOST:
        place.memory = allocate("host", LENGTH);
        break;
    case OWN_HOST:
        place.own = calloc(1, LENGTH);
        CHECK(place.own != NULL);
        DONE(fabricast_memory_adopt(place.own, LENGTH, &place.memory));
        break;
    case DEVICE:
        place.memory = allocate(device, LENGTH);
        break;
    case OWN_DEVICE:
        if (number() >= 0) {
            open_device(number());
            CHECK(cuda.allocate(&place.device, LENGTH) == 0);
            DONE(fabricast_memory_adopt((void *)(uintptr_t)place.device, LENGTH, &place.memory));
            break;
        }
        /* A part of other memory of the device. */
        place.inside = allocate(device, 2 * LENGTH);
        DONE(fabricast_memory_address(place.inside, &address, &length));
        CHECK(length == 2 * LENGTH);
        DONE(fabricast_memory_adopt((char *)address + 4096, LENGTH, &place.memory));
        EXPECT(FABRICAST_E_INVALID_ARGUMENT,
               fabricast_memory_adopt((char *)address + 4096, (size_t)1 << 40,
                                      (fabricast_memory **)&address));
        break;
    }
    return place;
}

static void let_go(struct place *place)
{
    close_memory(place->memory);
    if (place->inside != NULL)
        close_memory(place->inside);
    free(place->own);
    if (place->device != 0)
        CHECK(cuda.release(place->device) == 0);
}

/* Owns a region that its peer puts into. */
static void own(int in, int out)
{
    fabricast_agent *agent;
    struct place place;
    fabricast_region *region;
    fabricast_agent_event event;
    struct bytes card;
    uint64_t round;

    await_signal(in);
    agent = start_agent("owner", getenv("FABRICAST_DIRECTORY"), now->fabric);
    place = make(now->target);
    region = enter(agent, place.memory, FABRICAST_READ | FABRICAST_WRITE);
    DONE(fabricast_agent_publish(agent, "target", region));
    card = card_of(agent);
    send_bytes(out, card.bytes, card.length);
    for (round = 0; round < ROUNDS; round++) {
        event = await_event(agent, FABRICAST_AGENT_EVENT_NOTICE);
        CHECK(event.tag == round && event.length == sizeof round);
        CHECK(memcmp(event.data, &round, sizeof round) == 0);
        check_pattern(place.memory, 0, LENGTH, round);
        write_pattern(place.memory, LENGTH, round + 50);
        signal_peer(out);
    }
    event = await_event(agent, FABRICAST_AGENT_EVENT_LEFT);
    CHECK(strcmp(event.label, "peer") == 0 && event.is_dead == 0);
    DONE(fabricast_agent_withdraw(agent, region, LONG));
    DONE(fabricast_region_close(region));
    let_go(&place);
    close_agent(agent);
}

static void transfer(fabricast_agent *agent, fabricast_route *route, fabricast_memory *memory,
                     int in)
{
    uint64_t round;

    for (round = 0; round < ROUNDS; round++) {
        fabricast_notice notice = {sizeof notice, 0, NULL, 0};
        fabricast_block halves[2] = {{LENGTH / 2, LENGTH / 2, LENGTH / 2}, {0, 0, LENGTH / 2}};
        fabricast_token token;

        notice.tag = round;
        notice.data = &round;
        notice.length = sizeof round;
        write_pattern(memory, LENGTH, round);
        DONE(fabricast_agent_put(agent, route, halves, 2, &notice, &token));
        await(agent, token, LENGTH);
        await_signal(in);
        DONE(fabricast_agent_get_all(agent, route, NULL, &token));
        await(agent, token, LENGTH);
        check_pattern(memory, 0, LENGTH, round + 50);
    }
}

static void run(int in, int out)
{
    fabricast_agent *agent;
    struct place place;
    fabricast_region *local;
    fabricast_route *route;
    struct bytes card;
    fabricast_peer peer;

    signal_peer(out);
    card = receive_bytes(in);
    agent = start_agent("peer", getenv("FABRICAST_DIRECTORY"), now->fabric);
    place = make(now->source);
    local = enter(agent, place.memory, FABRICAST_LOCAL_ONLY);
    peer = connect_to(agent, &card);
    DONE(fabricast_agent_route_to(agent, peer, "target", local, LONG, &route));
    CHECK(takes_path(route, now->path));
    transfer(agent, route, place.memory, in);
    DONE(fabricast_route_close(route));
    DONE(fabricast_region_close(local));
    let_go(&place);
    DONE(fabricast_agent_disconnect(agent, peer, LONG));
    close_agent(agent);
}

/* Puts once, and is killed. */
static void vanish(int in, int out)
{
    fabricast_agent *agent;
    fabricast_memory *memory;
    fabricast_region *region;
    fabricast_route *route;
    struct bytes card;
    fabricast_peer peer;

    await_signal(in);
    agent = start_agent("victim", getenv("FABRICAST_DIRECTORY"), NULL);
    memory = allocate("host", LENGTH);
    region = enter(agent, memory, FABRICAST_WRITE);
    DONE(fabricast_agent_publish(agent, "target", region));
    card = card_of(agent);
    send_bytes(out, card.bytes, card.length);
    card = receive_bytes(in);
    peer = connect_to(agent, &card);
    DONE(fabricast_agent_route_to(agent, peer, "target", region, LONG, &route));
    DONE(fabricast_agent_put_all(agent, route, NULL, NULL));
    DONE(fabricast_agent_flush(agent, peer, LONG));
    signal_peer(out);
    for (;;)
        pause();
}

/* The peer's death is an event, and an error. */
static void survive(pid_t child, int in, int out)
{
    fabricast_agent *agent = start_agent("survivor", getenv("FABRICAST_DIRECTORY"), NULL);
    fabricast_memory *memory = allocate("host", LENGTH);
    fabricast_region *region = enter(agent, memory, FABRICAST_READ | FABRICAST_WRITE);
    fabricast_route *route;
    fabricast_agent_event event;
    fabricast_status status;
    struct bytes card, victim;
    fabricast_peer peer;
    int code;

    DONE(fabricast_agent_publish(agent, "target", region));
    signal_peer(out);
    victim = receive_bytes(in);
    card = card_of(agent);
    send_bytes(out, card.bytes, card.length);
    await_signal(in);
    CHECK(strcmp(await_event(agent, FABRICAST_AGENT_EVENT_JOINED).label, "victim") == 0);
    peer = connect_to(agent, &victim);
    DONE(fabricast_agent_route_to(agent, peer, "target", region, LONG, &route));
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(waitpid(child, &code, 0) == child && WIFSIGNALED(code));
    event = await_event(agent, FABRICAST_AGENT_EVENT_LEFT);
    CHECK(strcmp(event.label, "victim") == 0 && event.is_dead == 1);
    do {
        DONE(fabricast_agent_progress(agent, NULL));
        status = fabricast_agent_put_all(agent, route, NULL, NULL);
    } while (status == FABRICAST_OK);
    CHECK(status == FABRICAST_E_CLOSED);
    EXPECT(FABRICAST_E_CLOSED,
           fabricast_agent_connect(agent, victim.bytes, victim.length, LONG, &peer));
    DONE(fabricast_route_close(route));
    DONE(fabricast_region_close(region));
    close_memory(memory);
    close_agent(agent);
}

int main(void)
{
    pid_t children[SITUATIONS], victim;
    int in[SITUATIONS], out[SITUATIONS], from_victim, to_victim, at;

    alarm(300);
    /* Before a driver is used, which does not survive a fork. */
    for (at = 0; at < SITUATIONS; at++) {
        now = &situations[at];
        children[at] = start(own, &in[at], &out[at]);
    }
    victim = start(vanish, &from_victim, &to_victim);
    for (at = 0; at < SITUATIONS; at++) {
        now = &situations[at];
        run(in[at], out[at]);
        finish(children[at]);
    }
    survive(victim, from_victim, to_victim);
    CHECK(fabricast_open_handles() == 0);
    puts("agent_processes: ok");
    return 0;
}
