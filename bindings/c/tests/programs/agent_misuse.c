/* Errors of a program with agents are reported, and do not end it: handles that are closed, of other
 * kinds, of other agents, or of the parent process; NULL; invalid options, sizes and numbers. */
#include "agents.h"

/* Each call with a bad agent returns this status, whatever its other arguments are. */
static void with_agent(fabricast_status expected, fabricast_agent *agent,
                       fabricast_memory *memory, fabricast_region *region,
                       fabricast_route *route)
{
    fabricast_block block = {0, 0, 1};
    fabricast_notice notice = {sizeof notice, 1, NULL, 0};
    fabricast_strided rows;
    fabricast_part part;
    fabricast_prepared *prepared = NULL;
    fabricast_agent_event event;
    fabricast_region *new_region;
    fabricast_route *new_route;
    fabricast_token token = 7;
    fabricast_peer peer = 7;
    uint64_t number = 7;
    size_t length = 7;
    char bytes[8] = "";

    DONE(fabricast_strided_init(&rows, sizeof rows));
    rows.length = 1;
    memset(&event, 0xff, sizeof event);
    EXPECT(expected, fabricast_agent_card(agent, bytes, sizeof bytes, &length));
    EXPECT(expected, fabricast_region_register(agent, memory, FABRICAST_READ, &new_region));
    EXPECT(expected, fabricast_agent_publish(agent, "name", region));
    EXPECT(expected, fabricast_agent_withdraw(agent, region, LONG));
    EXPECT(expected, fabricast_agent_connect(agent, bytes, sizeof bytes, LONG, &peer));
    EXPECT(expected, fabricast_agent_disconnect(agent, 1, LONG));
    EXPECT(expected, fabricast_agent_join(agent, 1, region, bytes, sizeof bytes, NULL, LONG,
                                          &new_route));
    CHECK(new_region == NULL && new_route == NULL && length == 0 && peer == 0);
    EXPECT(expected, fabricast_agent_route_to(agent, 1, "name", region, LONG, &new_route));
    EXPECT(expected, fabricast_agent_put(agent, route, &block, 1, NULL, &token));
    EXPECT(expected, fabricast_agent_get(agent, route, &block, 1, NULL, &token));
    EXPECT(expected, fabricast_agent_put_all(agent, route, NULL, &token));
    EXPECT(expected, fabricast_agent_get_all(agent, route, NULL, &token));
    EXPECT(expected, fabricast_agent_put_strided(agent, route, &rows, NULL, &token));
    EXPECT(expected, fabricast_agent_get_strided(agent, route, &rows, NULL, &token));
    part.route = route;
    part.blocks = &block;
    part.count = 1;
    EXPECT(expected, fabricast_agent_put_parts(agent, &part, 1, NULL, &token));
    EXPECT(expected, fabricast_agent_get_parts(agent, &part, 1, NULL, &token));
    EXPECT(expected, fabricast_agent_prepare_put(agent, route, &block, 1, &prepared));
    EXPECT(expected, fabricast_agent_prepare_get(agent, route, &block, 1, &prepared));
    CHECK(prepared == NULL);
    EXPECT(expected, fabricast_agent_notify(agent, 1, &notice, &token));
    EXPECT(expected, fabricast_agent_notify_ordered(agent, 1, &notice, &token));
    EXPECT(expected, fabricast_agent_fence(agent, 1));
    EXPECT(expected, fabricast_agent_flush(agent, 1, LONG));
    EXPECT(expected, fabricast_agent_progress(agent, &number));
    CHECK(token == 0 && number == 0);
    number = 7;
    EXPECT(expected, fabricast_agent_test(agent, 1, &number, NULL));
    CHECK(number == 0);
    EXPECT(expected, fabricast_agent_wait(agent, 1, LONG, &number));
    EXPECT(expected, fabricast_agent_forget(agent, 1));
    EXPECT(expected, fabricast_agent_cancel(agent, 1, &number));
    number = 7;
    EXPECT(expected, fabricast_agent_in_flight(agent, &number));
    EXPECT(expected, fabricast_agent_next_event(agent, LONG, &event, sizeof event));
    CHECK(number == 0 && event.kind == 0 && event.reason[255] == 0);
    if (agent != NULL)
        EXPECT(expected, fabricast_agent_close(agent, LONG));
}

static void with_others(fabricast_status expected, fabricast_memory *memory,
                        fabricast_region *region, fabricast_route *route)
{
    const char *text = "";
    void *address = &text;
    size_t length = 7;

    EXPECT(expected, fabricast_memory_address(memory, &address, &length));
    CHECK(address == NULL && length == 0);
    EXPECT(expected, fabricast_memory_read(memory, 0, NULL, 0));
    EXPECT(expected, fabricast_memory_write(memory, 0, NULL, 0));
    EXPECT(expected, fabricast_region_descriptor(region, NULL, 0, &length));
    EXPECT(expected, fabricast_route_path(route, &text));
    CHECK(text == NULL);
    EXPECT(expected, fabricast_route_fallback(route, &text));
    EXPECT(expected, fabricast_route_explain(route, &text));
    if (memory != NULL)
        EXPECT(expected, fabricast_memory_close(memory, LONG));
    if (region != NULL)
        EXPECT(expected, fabricast_region_close(region));
    if (route != NULL)
        EXPECT(expected, fabricast_route_close(route));
}

static void options(void)
{
    char label[66];
    fabricast_agent_options options;
    fabricast_agent *agent;

    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_options_init(NULL, sizeof options));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_options_init(&options, 71));
    DONE(fabricast_agent_options_init(&options, sizeof options));
    CHECK(options.size == sizeof options && options.fabric == NULL && options.rails == 1);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_start(&options, NULL));
#define REFUSED(field, value)                                                                 \
    do {                                                                                      \
        fabricast_agent_options changed = options;                                            \
        changed.field = value;                                                                \
        EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_start(&changed, &agent));        \
        CHECK(agent == NULL);                                                                 \
    } while (0)
    memset(label, 'x', 65);
    label[65] = 0;
    REFUSED(size, 0);
    REFUSED(size, 71);
    REFUSED(label, label);
    REFUSED(label, "\xc3(");
    REFUSED(source, "127.0.0.1");
    REFUSED(lost_after, 0);
    REFUSED(lost_after, -1);
    REFUSED(lost_after, INT64_MAX);
    REFUSED(rails, 0);
    REFUSED(rails, 9);
    REFUSED(waiting, 3);
    REFUSED(force_remote, 2);
    REFUSED(fabric, "=tcp,^tcp");
    options.fabric = "auto";
    REFUSED(source, "nowhere");
    options.fabric = "=sokets";
    EXPECT(FABRICAST_E_NO_PROVIDER, fabricast_agent_start(&options, &agent));
    SAYS("sokets");
    options.fabric = NULL;
    options.directory = "/nowhere/at/all";
    EXPECT(FABRICAST_E_FAILED, fabricast_agent_start(&options, &agent));
    SAYS("/nowhere/at/all");
    CHECK(agent == NULL);
}

/* Numbers of another agent's peers and operations, and its routes. */
static void other_agents(fabricast_agent *here, fabricast_agent *there, fabricast_peer peer,
                         fabricast_route *route)
{
    fabricast_block block = {0, 0, 1};
    fabricast_token token, none;
    uint64_t number;

    EXPECT(FABRICAST_E_STALE, fabricast_agent_put(there, route, &block, 1, NULL, &none));
    SAYS("another agent");
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_fence(there, peer));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_fence(here, peer + 1));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_flush(here, UINT64_MAX, LONG));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_disconnect(here, 0, LONG));
    DONE(fabricast_agent_put(here, route, &block, 1, NULL, &token));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_wait(there, token, LONG, NULL));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_forget(there, token));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_test(here, 0, &number, NULL));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_wait(here, token + 1, LONG, &number));
    DONE(fabricast_agent_forget(here, token + 1));
    DONE(fabricast_agent_wait(here, token, LONG, &number));
    CHECK(number == 1);
}

static void null(fabricast_agent *agent, fabricast_memory *memory, fabricast_region *region,
                 fabricast_route *route)
{
    fabricast_notice notice = {24, 1, NULL, 0};
    fabricast_agent_event event;
    fabricast_card_info info;
    char bytes[8];

    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_allocate("host", 8, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_adopt(bytes, 8, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_address(memory, NULL, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_read(memory, 0, NULL, 1));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_write(memory, 0, NULL, 1));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_card(agent, NULL, 1, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_card_info_of(NULL, 1, &info, sizeof info));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_card_info_of(NULL, 0, &info, 8));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_region_register(agent, memory, 0, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_region_descriptor(region, NULL, 0, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_connect(agent, NULL, 1, LONG, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_route_path(route, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_test(agent, 1, NULL, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_in_flight(agent, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_next_event(agent, LONG, NULL, sizeof event));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_next_event(agent, LONG, &event, 100));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_put_all(agent, route, &notice, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_put_all(agent, route, NULL, (fabricast_token *)(void *)(bytes + 1)));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_region_register(agent, NULL, 0, &region));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_agent_put_all(agent, NULL, NULL, NULL));
    DONE(fabricast_agent_close(NULL, LONG));
    DONE(fabricast_memory_close(NULL, LONG));
    DONE(fabricast_region_close(NULL));
    DONE(fabricast_route_close(NULL));
}

int main(void)
{
    fabricast_agent *here, *there, *of_child;
    fabricast_memory *memory;
    fabricast_region *local, *remote;
    fabricast_route *route;
    struct bytes card, descriptor;
    fabricast_peer peer;
    pid_t child;

    alarm(300);
    options();
    here = start_agent("here", NULL, NULL);
    there = start_agent("there", NULL, NULL);
    memory = allocate("host", 4096);
    local = enter(here, memory, FABRICAST_LOCAL_ONLY);
    remote = enter(there, memory, FABRICAST_READ | FABRICAST_WRITE);
    card = card_of(there);
    peer = connect_to(here, &card);
    descriptor = descriptor_of(remote);
    route = join_region(here, peer, local, &descriptor);

    null(here, memory, local, route);
    other_agents(here, there, peer, route);
    /* NULL, other kinds, and no handles. */
    with_agent(FABRICAST_E_BAD_HANDLE, NULL, memory, local, route);
    with_agent(FABRICAST_E_BAD_HANDLE, (fabricast_agent *)(void *)memory, memory, local, route);
    with_agent(FABRICAST_E_BAD_HANDLE, (fabricast_agent *)(void *)&card, memory, local, route);
    with_others(FABRICAST_E_BAD_HANDLE, NULL, NULL, NULL);
    with_others(FABRICAST_E_BAD_HANDLE, (fabricast_memory *)(void *)here,
                (fabricast_region *)(void *)memory, (fabricast_route *)(void *)local);
    with_others(FABRICAST_E_BAD_HANDLE, (fabricast_memory *)(void *)&card,
                (fabricast_region *)(void *)&card, (fabricast_route *)(void *)&card);

    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(300);
        with_agent(FABRICAST_E_FORKED, here, memory, local, route);
        with_others(FABRICAST_E_FORKED, memory, local, route);
        CHECK(fabricast_open_handles() == 0);
        /* The child can have its own agent. */
        of_child = start_agent("child", NULL, NULL);
        EXPECT(FABRICAST_E_FORKED, fabricast_region_register(of_child, memory, 0, &local));
        close_agent(of_child);
        exit(0);
    }
    finish(child);
    /* The parent's are usable. */
    DONE(fabricast_agent_put_all(here, route, NULL, NULL));
    DONE(fabricast_agent_flush(here, peer, LONG));
    close_agent(here);
    close_agent(there);
    /* Those that were made from a closed agent are open. */
    DONE(fabricast_route_path(route, (const char **)(void *)&of_child));
    DONE(fabricast_route_close(route));
    DONE(fabricast_region_close(local));
    DONE(fabricast_region_close(remote));
    close_memory(memory);
    with_agent(FABRICAST_E_BAD_HANDLE, here, memory, local, route);
    with_others(FABRICAST_E_BAD_HANDLE, memory, local, route);
    CHECK(fabricast_open_handles() == 0);
    puts("agent_misuse: ok");
    return 0;
}
