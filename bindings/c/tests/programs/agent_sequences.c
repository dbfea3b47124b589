/*
 * Random sequences of calls with agents: valid ones, and ones with closed handles, handles of other
 * kinds and agents, wrong numbers and sizes. No call crashes or panics, closed handles are errors and
 * open ones are not, the bytes of completed transfers are right, and nothing stays open.
 *
 * The seed is TEST_SEED, or 1; the number of calls TEST_CALLS, or 20000.
 */
#include "agents.h"

enum { AGENTS = 3, MEMORIES = 6, REGIONS = 10, ROUTES = 8, TOKENS = 16 };

#define LENGTH ((size_t)5000)

/* A handle, which is open or was closed. */
struct agent {
    fabricast_agent *handle;
    int is_open;
    /* Of the connections to the other agents; 0: none. */
    fabricast_peer peers[AGENTS];
};

struct memory {
    fabricast_memory *handle;
    int is_open, is_ending;
    /* Incremented when it is closed: regions may still have the earlier one. */
    int generation;
    unsigned char *adopted;
    /* Is its content equal to the model? Not while an operation may be in flight. */
    int is_known;
    unsigned char model[LENGTH];
};

struct region {
    fabricast_region *handle;
    int is_open, agent, memory, generation, is_withdrawn;
    uint64_t rights;
    /* Agents are replaced: the region belongs to one with this handle. */
    fabricast_agent *owner;
};

struct route {
    fabricast_route *handle;
    int is_open, agent, local_memory, remote_memory, local_generation, remote_generation;
    uint64_t rights;
    fabricast_agent *owner;
};

static struct agent agents[AGENTS];
static struct memory memories[MEMORIES];
static struct region regions[REGIONS];
static struct route routes[ROUTES];
static fabricast_token tokens[TOKENS];
static uint64_t state, call, seed, verified;

static uint64_t below(uint64_t bound)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % bound;
}

static fabricast_timeout soon(void)
{
    return below(2) ? FABRICAST_NOW : FABRICAST_MILLISECONDS(below(4));
}

/* Not a handle, or one of another kind; NULL sometimes. */
static void *garbage(void)
{
    switch (below(5)) {
    case 0: return NULL;
    case 1: return agents[below(AGENTS)].handle;
    case 2: return memories[below(MEMORIES)].handle;
    case 3: return routes[below(ROUTES)].handle;
    default: return (void *)(uintptr_t)(below(UINT64_MAX) | (uint64_t)below(2) << 63);
    }
}

#define FAIL(text)                                                                            \
    do {                                                                                      \
        fprintf(stderr, "agent_sequences: seed %lu, call %lu, line %d: %s: %s\n",             \
                (unsigned long)seed, (unsigned long)call, __LINE__, text,                     \
                fabricast_error_message());                                                   \
        exit(1);                                                                              \
    } while (0)

/* A result of a call whose handles were all open, or not. */
static fabricast_status judge(fabricast_status status, int are_open)
{
    if (status == FABRICAST_E_PANICKED || status == FABRICAST_E_FORKED || status > FABRICAST_OK ||
        strcmp(fabricast_status_name(status), "not a status") == 0)
        FAIL("unexpected status");
    if (status != FABRICAST_OK && fabricast_error_status() != status)
        FAIL("another last error");
    if (are_open == (status == FABRICAST_E_BAD_HANDLE))
        FAIL(are_open ? "an open handle is refused" : "a closed handle is not refused");
    return status;
}

static int none_in_flight(const struct agent *agent)
{
    uint64_t count = 1;
    DONE(fabricast_agent_in_flight(agent->handle, &count));
    return count == 0;
}

static void start_one(void)
{
    int at = (int)below(AGENTS), other;

    if (agents[at].is_open)
        return;
    agents[at].handle = start_agent("fuzzed", NULL, NULL);
    agents[at].is_open = 1;
    for (other = 0; other < AGENTS; other++)
        agents[at].peers[other] = agents[other].peers[at] = 0;
}

static void close_one_agent(void)
{
    struct agent *agent = &agents[below(AGENTS)];

    if (below(40) != 0)
        return;
    /* Peers are agents of this thread, and do not advance meanwhile. */
    judge(fabricast_agent_close(agent->handle, soon()), agent->is_open);
    agent->is_open = 0;
}

static void open_memory(void)
{
    struct memory *memory = &memories[below(MEMORIES)];

    if (memory->is_open)
        return;
    if (below(3) == 0) {
        memory->adopted = calloc(1, LENGTH);
        CHECK(memory->adopted != NULL);
        DONE(fabricast_memory_adopt(memory->adopted, LENGTH, &memory->handle));
    } else {
        memory->handle = allocate("host", LENGTH);
    }
    memset(memory->model, 0, LENGTH);
    memory->is_open = memory->is_known = 1;
    memory->is_ending = 0;
}

static void close_one_memory(void)
{
    struct memory *memory = &memories[below(MEMORIES)];
    fabricast_status status;

    if (!memory->is_ending && below(6) != 0)
        return;
    status = judge(fabricast_memory_close(memory->handle, soon()), memory->is_open);
    if (!memory->is_open)
        return;
    memory->is_ending = 1;
    if (status != FABRICAST_OK) {
        CHECK(memory->adopted != NULL);
        return;
    }
    memory->is_open = 0;
    memory->generation++;
    free(memory->adopted);
    memory->adopted = NULL;
}

static void register_one(void)
{
    int at = (int)below(REGIONS), agent = (int)below(AGENTS), from = (int)below(MEMORIES);
    struct region *region = &regions[at];
    int is_bad = below(20) == 0;
    uint64_t rights = below(5);
    fabricast_region *handle;
    fabricast_status status;

    if (region->is_open)
        return;
    status = judge(fabricast_region_register(is_bad ? NULL : agents[agent].handle,
                                             memories[from].handle, rights, &handle),
                   !is_bad && agents[agent].is_open && memories[from].is_open);
    if (status != FABRICAST_OK) {
        CHECK(handle == NULL);
        return;
    }
    CHECK(rights < 4 && !memories[from].is_ending);
    region->handle = handle;
    region->is_open = 1;
    region->is_withdrawn = 0;
    region->agent = agent;
    region->owner = agents[agent].handle;
    region->memory = from;
    region->generation = memories[from].generation;
    region->rights = rights;
}

static void end_region(void)
{
    struct region *region = &regions[below(REGIONS)];
    struct agent *agent = &agents[below(AGENTS)];

    if (below(4) != 0)
        return;
    if (below(3) == 0) {
        fabricast_status status =
            judge(fabricast_agent_withdraw(agent->handle, region->handle, soon()),
                  agent->is_open && region->is_open);
        if (status == FABRICAST_OK)
            CHECK(region->owner == agent->handle);
        if (region->owner == agent->handle)
            region->is_withdrawn = 1;
        return;
    }
    judge(fabricast_region_close(region->handle), region->is_open);
    region->is_open = 0;
}

static void connect_one(void)
{
    int from = (int)below(AGENTS), to = (int)below(AGENTS);
    struct bytes card;
    fabricast_peer peer;

    if (judge(fabricast_agent_card(agents[to].handle, card.bytes, sizeof card.bytes, &card.length),
              agents[to].is_open) != FABRICAST_OK)
        return;
    if (below(10) == 0)
        card.bytes[below(card.length)] ^= 1 << below(8);
    if (judge(fabricast_agent_connect(agents[from].handle, card.bytes, card.length, LONG, &peer),
              agents[from].is_open) == FABRICAST_OK)
        agents[from].peers[to] = peer;
    else
        CHECK(peer == 0);
}

static void join_one(void)
{
    struct route *route = &routes[below(ROUTES)];
    struct region *local = &regions[below(REGIONS)], *remote = &regions[below(REGIONS)];
    int from = below(10) ? local->agent : (int)below(AGENTS), rest;
    static const char *const policies[] = {NULL, "same-process", "=same-process", "^same-process",
                                           "nonsense"};
    struct bytes descriptor = {0, {0}};
    fabricast_route *handle;
    fabricast_peer peer;

    if (route->is_open)
        return;
    /* Usually what can be joined. */
    for (rest = 0; rest < 10 && !(remote->is_open && !remote->is_withdrawn && remote->rights &&
                                  agents[from].peers[remote->agent]); rest++)
        remote = &regions[below(REGIONS)];
    judge(fabricast_region_descriptor(remote->handle, descriptor.bytes, sizeof descriptor.bytes,
                                      &descriptor.length),
          remote->is_open);
    if (descriptor.length > 0 && below(20) == 0)
        descriptor.bytes[below(descriptor.length)] ^= 1 << below(8);
    peer = below(20) ? agents[from].peers[remote->agent] : below(UINT64_MAX);
    if (judge(fabricast_agent_join(agents[from].handle, peer, local->handle, descriptor.bytes,
                                   descriptor.length, policies[below(10) ? 0 : below(5)], LONG,
                                   &handle),
              agents[from].is_open && local->is_open) != FABRICAST_OK) {
        CHECK(handle == NULL);
        return;
    }
    CHECK(remote->is_open && !remote->is_withdrawn && local->owner == agents[from].handle);
    route->handle = handle;
    route->is_open = 1;
    route->agent = from;
    route->owner = agents[from].handle;
    route->local_memory = local->memory;
    route->remote_memory = remote->memory;
    route->local_generation = local->generation;
    route->remote_generation = remote->generation;
    route->rights = remote->rights;
}

static void close_route(void)
{
    struct route *route = &routes[below(ROUTES)];
    const char *text;

    if (below(4) != 0) {
        if (judge(fabricast_route_explain(route->handle, &text), route->is_open) == FABRICAST_OK)
            CHECK(strstr(text, "same-process") != NULL);
        return;
    }
    judge(fabricast_route_close(route->handle), route->is_open);
    route->is_open = 0;
}

/* Copies as a transfer does, in the models. */
static void copy_model(struct memory *to, const struct memory *from, const fabricast_block *block)
{
    memmove(to->model + block->to, from->model + block->from, block->length);
}

static void compare(struct memory *memory)
{
    static unsigned char found[LENGTH];

    if (judge(fabricast_memory_read(memory->handle, 0, found, LENGTH), memory->is_open) !=
        FABRICAST_OK) {
        CHECK(!memory->is_open || memory->is_ending);
        return;
    }
    if (!memory->is_known)
        return;
    if (memcmp(found, memory->model, LENGTH) != 0)
        FAIL("wrong bytes");
    verified++;
}

static void write_one(void)
{
    struct memory *memory = &memories[below(MEMORIES)];
    size_t offset = below(LENGTH + 10), length = below(200), at;
    unsigned char bytes[200];
    fabricast_status status;

    for (at = 0; at < length; at++)
        bytes[at] = (unsigned char)below(256);
    status = judge(fabricast_memory_write(memory->handle, offset, bytes, length),
                   memory->is_open);
    if (status == FABRICAST_OK)
        memcpy(memory->model + offset, bytes, length);
}

/* Usually an open one. */
static struct route *random_route(void)
{
    struct route *route = &routes[below(ROUTES)];
    int rest;

    for (rest = 0; rest < 10 && !route->is_open; rest++)
        route = &routes[below(ROUTES)];
    return route;
}

/* Starts a transfer of a block: plain, as the part of a request, or prepared. */
static fabricast_status start_move(struct agent *agent, struct route *route, int is_put,
                                   const fabricast_block *block,
                                   const fabricast_notice *notice, fabricast_token *token)
{
    static const uint32_t index = 0;
    fabricast_part part;
    fabricast_prepared *prepared;
    fabricast_status status;
    int by_index;

    part.route = route->handle;
    part.blocks = block;
    part.count = 1;
    switch (below(4)) {
    case 0:
        return (is_put ? fabricast_agent_put_parts : fabricast_agent_get_parts)(
            agent->handle, &part, 1, notice, token);
    case 1:
        status = (is_put ? fabricast_agent_prepare_put : fabricast_agent_prepare_get)(
            agent->handle, route->handle, block, 1, &prepared);
        if (status != FABRICAST_OK) {
            CHECK(prepared == NULL);
            if (token != NULL)
                *token = 0;
            return status;
        }
        by_index = (int)below(2);
        status = fabricast_agent_submit(agent->handle, prepared, by_index ? &index : NULL,
                                        by_index ? 1 : FABRICAST_ALL, notice, token);
        CHECK(fabricast_prepared_close(prepared) == FABRICAST_OK);
        return status;
    default:
        return (is_put ? fabricast_agent_put : fabricast_agent_get)(
            agent->handle, route->handle, block, 1, notice, token);
    }
}

/* A transfer, waited for, or left in flight. */
static void move_one(void)
{
    struct route *route = random_route();
    int at = below(20) ? route->agent : (int)below(AGENTS), is_put = (int)below(2);
    struct agent *agent = &agents[at];
    struct memory *local = &memories[route->local_memory], *remote = &memories[route->remote_memory];
    struct memory *to = is_put ? remote : local, *from = is_put ? local : remote;
    int is_local = local->generation == route->local_generation;
    int is_remote = remote->generation == route->remote_generation;
    int is_to = is_put ? is_remote : is_local, is_from = is_put ? is_local : is_remote;
    fabricast_block block = {0, 0, 0};
    fabricast_notice notice = {sizeof notice, 0, NULL, 0};
    int has_notice = (int)below(2), is_waited_for = (int)below(8) != 0;
    fabricast_token token, *wanted = is_waited_for || below(2) ? &token : NULL;
    fabricast_status status;
    uint64_t bytes;

    block.length = below(LENGTH);
    block.to = below(LENGTH - block.length + 1 + (below(10) == 0 ? 50 : 0));
    block.from = below(LENGTH - block.length + 1);
    notice.tag = call;
    notice.data = &block;
    notice.length = below(20) ? sizeof block : below(100);
    if (!has_notice && below(4) == 0) {
        fabricast_strided rows;
        DONE(fabricast_strided_init(&rows, sizeof rows));
        rows.from = block.from;
        rows.to = block.to;
        rows.length = block.length;
        status = (is_put ? fabricast_agent_put_strided : fabricast_agent_get_strided)(
            agent->handle, route->handle, &rows, NULL, wanted);
        /* Rows are never empty. */
        if (block.length == 0) {
            CHECK(status == FABRICAST_E_INVALID_ARGUMENT);
            return;
        }
    } else {
        if (notice.length > sizeof block)
            notice.length = FABRICAST_MAX_NOTICE + 1;
        status = start_move(agent, route, is_put, &block, has_notice ? &notice : NULL, wanted);
        if (has_notice && notice.length > FABRICAST_MAX_NOTICE)
            CHECK(status != FABRICAST_OK);
    }
    judge(status, agent->is_open && route->is_open);
    if (status != FABRICAST_OK) {
        CHECK(wanted == NULL || token == 0);
        return;
    }
    CHECK(route->owner == agent->handle && block.to + block.length <= LENGTH);
    CHECK((route->rights & (is_put ? FABRICAST_WRITE : FABRICAST_READ)) != 0);
    if (!is_waited_for) {
        if (is_to)
            to->is_known = 0;
        if (wanted != NULL)
            tokens[below(TOKENS)] = token;
        return;
    }
    /* Another operation may be in flight that writes the source. */
    if (is_to && (!is_from || !from->is_known))
        to->is_known = 0;
    status = judge(fabricast_agent_wait(agent->handle, token, LONG, &bytes), agent->is_open);
    if (status != FABRICAST_OK) {
        to->is_known = to->is_known && !is_to;
        return;
    }
    CHECK(bytes == block.length);
    if (!is_to)
        return;
    if (to->is_known)
        copy_model(to, from, &block);
    compare(to);
}

static void collect_one(void)
{
    struct agent *agent = &agents[below(AGENTS)];
    fabricast_token token = below(10) ? tokens[below(TOKENS)] : below(UINT64_MAX);
    uint64_t is_over, bytes;

    switch (below(4)) {
    case 0:
        judge(fabricast_agent_test(agent->handle, token, &is_over, &bytes), agent->is_open);
        break;
    case 1:
        judge(fabricast_agent_wait(agent->handle, token, soon(), &bytes), agent->is_open);
        break;
    case 2:
        judge(fabricast_agent_cancel(agent->handle, token, &is_over), agent->is_open);
        break;
    default:
        judge(fabricast_agent_forget(agent->handle, token), agent->is_open);
    }
}

static void order_one(void)
{
    struct agent *agent = &agents[below(AGENTS)];
    fabricast_peer peer = below(20) ? agent->peers[below(AGENTS)] : below(UINT64_MAX);
    fabricast_notice notice = {sizeof notice, 5, "order", 5};

    switch (below(5)) {
    case 0: judge(fabricast_agent_fence(agent->handle, peer), agent->is_open); break;
    case 1: judge(fabricast_agent_flush(agent->handle, peer, soon()), agent->is_open); break;
    case 2:
        judge(fabricast_agent_notify(agent->handle, peer, &notice, NULL), agent->is_open);
        break;
    case 3:
        judge(fabricast_agent_notify_ordered(agent->handle, peer, &notice, NULL),
              agent->is_open);
        break;
    default:
        if (below(10) == 0)
            judge(fabricast_agent_disconnect(agent->handle, peer, soon()), agent->is_open);
    }
}

static void take_events(void)
{
    struct agent *agent = &agents[below(AGENTS)];
    fabricast_agent_event event;
    int at;

    for (at = 0; at < 20; at++) {
        fabricast_status status =
            judge(fabricast_agent_next_event(agent->handle, soon(), &event, sizeof event),
                  agent->is_open);
        if (status != FABRICAST_OK) {
            CHECK(event.kind == 0);
            break;
        }
        CHECK(event.kind >= FABRICAST_AGENT_EVENT_JOINED && event.kind <= FABRICAST_AGENT_EVENT_LEFT);
    }
    if (judge(fabricast_agent_progress(agent->handle, NULL), agent->is_open) == FABRICAST_OK)
        none_in_flight(agent);
}

/* Waits for all operations, and makes the contents known again. */
static void settle(void)
{
    static unsigned char bytes[LENGTH];
    int from, to, at, rest;

    for (from = 0; from < AGENTS; from++) {
        if (!agents[from].is_open)
            continue;
        for (rest = 0; !none_in_flight(&agents[from]); rest++) {
            CHECK(rest < 60000);
            for (to = 0; to < AGENTS; to++) {
                fabricast_agent_event event;
                /* Notices wait for room at the peer. */
                while (agents[to].is_open &&
                       fabricast_agent_next_event(agents[to].handle, FABRICAST_NOW, &event,
                                                  sizeof event) == FABRICAST_OK)
                    ;
            }
            DONE(fabricast_agent_progress(agents[from].handle, NULL));
            usleep(rest == 0 ? 0 : 1000);
        }
    }
    for (at = 0; at < MEMORIES; at++) {
        if (!memories[at].is_open || memories[at].is_ending)
            continue;
        DONE(fabricast_memory_read(memories[at].handle, 0, bytes, LENGTH));
        memcpy(memories[at].model, bytes, LENGTH);
        memories[at].is_known = 1;
    }
}

/* Any function with anything as its handle. */
static void call_with_garbage(void)
{
    void *handle = garbage();
    fabricast_block block = {below(9), below(9), below(9)};
    fabricast_token token;
    uint64_t number;
    size_t length;
    const char *text;
    void *address;

    switch (below(8)) {
    case 0: fabricast_region_descriptor(handle, NULL, 0, &length); break;
    case 1: fabricast_route_path(handle, &text); break;
    case 2: fabricast_agent_put(handle, garbage(), &block, below(2), NULL, &token); break;
    case 3: fabricast_agent_wait(handle, below(UINT64_MAX), soon(), &number); break;
    case 4: fabricast_memory_address(handle, &address, &length); break;
    case 5: fabricast_agent_publish(handle, "fuzzed", garbage()); break;
    case 6: fabricast_agent_flush(handle, below(UINT64_MAX), soon()); break;
    default: fabricast_sample_release(handle);
    }
    if (fabricast_error_status() == FABRICAST_E_PANICKED)
        FAIL("panic");
}

static void close_all(void)
{
    int at;

    for (at = 0; at < AGENTS; at++)
        if (agents[at].is_open)
            close_agent(agents[at].handle);
    for (at = 0; at < ROUTES; at++)
        if (routes[at].is_open)
            DONE(fabricast_route_close(routes[at].handle));
    for (at = 0; at < REGIONS; at++)
        if (regions[at].is_open)
            DONE(fabricast_region_close(regions[at].handle));
    for (at = 0; at < MEMORIES; at++) {
        if (!memories[at].is_open)
            continue;
        close_memory(memories[at].handle);
        free(memories[at].adopted);
    }
}

int main(void)
{
    static void (*const calls[])(void) = {
        start_one, start_one, close_one_agent, open_memory, open_memory, close_one_memory,
        register_one, register_one, register_one, end_region, connect_one, connect_one, join_one,
        join_one, join_one, close_route, write_one, write_one, move_one, move_one, move_one,
        move_one, move_one, move_one, move_one, move_one, move_one, move_one, move_one, move_one,
        move_one, collect_one, order_one, take_events,
        call_with_garbage,
    };
    const char *text = getenv("TEST_SEED"), *count = getenv("TEST_CALLS");
    uint64_t all = count != NULL ? strtoull(count, NULL, 10) : 20000;

    int at;

    alarm(300);
    /* Closing NULL is no error. */
    for (at = 0; at < AGENTS; at++)
        agents[at].handle = (fabricast_agent *)(uintptr_t)8;
    for (at = 0; at < MEMORIES; at++)
        memories[at].handle = (fabricast_memory *)(uintptr_t)8;
    for (at = 0; at < REGIONS; at++)
        regions[at].handle = (fabricast_region *)(uintptr_t)8;
    for (at = 0; at < ROUTES; at++)
        routes[at].handle = (fabricast_route *)(uintptr_t)8;
    seed = text != NULL ? strtoull(text, NULL, 10) : 1;
    state = seed;
    for (call = 0; call < all; call++) {
        calls[below(sizeof calls / sizeof *calls)]();
        if (call % 32 == 31)
            settle();
    }
    settle();
    close_all();
    CHECK(fabricast_open_handles() == 0);
    CHECK(verified > all / 500);
    printf("agent_sequences: ok: %lu calls, seed %lu, %lu transfers compared\n",
           (unsigned long)all, (unsigned long)seed, (unsigned long)verified);
    return 0;
}
