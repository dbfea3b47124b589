/* Every function of agents, with two agents of one process. */
#include "agents.h"

#define LENGTH ((size_t)3 << 20)

/* What the functions need. */
static struct {
    fabricast_agent *here, *there;
    fabricast_memory *source, *target;
    fabricast_region *local, *remote;
    fabricast_peer peer;
    fabricast_route *route;
} all;

static void cards(void)
{
    struct bytes card = card_of(all.there);
    fabricast_card_info info;
    size_t length = 7;

    DONE(fabricast_agent_card(all.there, NULL, 0, &length));
    CHECK(length == card.length);
    EXPECT(FABRICAST_E_TOO_LONG, fabricast_agent_card(all.there, card.bytes, length - 1, &length));
    CHECK(length == 0);
    DONE(fabricast_card_info_of(card.bytes, card.length, &info, sizeof info));
    CHECK(strcmp(info.label, "there") == 0 && info.is_same_machine == 1);
    CHECK(info.fabrics == 0 && info.regions == 0);
    card.bytes[20] ^= 1;
    EXPECT(FABRICAST_E_MALFORMED,
           fabricast_card_info_of(card.bytes, card.length, &info, sizeof info));
    CHECK(info.label[0] == 0);
    EXPECT(FABRICAST_E_MALFORMED, fabricast_card_info_of(NULL, 0, &info, sizeof info));
}

static void memory(void)
{
    unsigned char own[100], bytes[100];
    fabricast_memory *adopted, *none;
    void *address;
    size_t length;

    DONE(fabricast_memory_address(all.source, &address, &length));
    CHECK(address != NULL && length == LENGTH);
    DONE(fabricast_memory_write(all.source, LENGTH - 3, "abc", 3));
    CHECK(memcmp((char *)address + LENGTH - 3, "abc", 3) == 0);
    DONE(fabricast_memory_read(all.source, LENGTH - 3, bytes, 3));
    CHECK(memcmp(bytes, "abc", 3) == 0);
    DONE(fabricast_memory_read(all.source, LENGTH, NULL, 0));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_write(all.source, LENGTH - 2, "abc", 3));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_read(all.source, SIZE_MAX, bytes, 2));
    SAYS("out of bounds");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_allocate("host", 0, &none));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_allocate("moon:0", 8, &none));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_adopt(own, 0, &none));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_memory_adopt(NULL, 8, &none));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt((void *)(uintptr_t)4096, 8, &none));
    CHECK(none == NULL);

    /* Adopted memory is in use until its region is closed. */
    memset(own, 5, sizeof own);
    DONE(fabricast_memory_adopt(own, sizeof own, &adopted));
    {
        fabricast_region *region = enter(all.here, adopted, FABRICAST_LOCAL_ONLY), *second;
        DONE(fabricast_memory_address(adopted, &address, &length));
        CHECK(address == own && length == sizeof own);
        EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_memory_close(adopted, FABRICAST_NOW));
        EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
               fabricast_memory_close(adopted, FABRICAST_MILLISECONDS(5)));
        SAYS("100 bytes are used by a region");
        EXPECT(FABRICAST_E_CLOSED,
               fabricast_region_register(all.here, adopted, FABRICAST_READ, &second));
        EXPECT(FABRICAST_E_CLOSED, fabricast_memory_read(adopted, 0, bytes, 1));
        DONE(fabricast_region_close(region));
        close_memory(adopted);
        EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_memory_close(adopted, FABRICAST_NOW));
    }
}

/* Views of two allocations of a device, one after the other. */
static void views(void)
{
    enum { PAGES = 64, PAGE = 4096 };
    fabricast_memory *caches[2], *memories[2];
    fabricast_range pages[PAGES];
    fabricast_view places[PAGES];
    fabricast_region *region;
    void *start[2];
    size_t adopted = 9, length;
    int at;

    for (at = 0; at < 2; at++) {
        DONE(fabricast_memory_allocate("emulated:0", (size_t)PAGES * PAGE, &caches[at]));
        DONE(fabricast_memory_address(caches[at], &start[at], &length));
    }
    for (at = 0; at < PAGES; at++) {
        pages[at].address = (uint64_t)(uintptr_t)start[at % 2] + (uint64_t)(PAGES - 1 - at) * PAGE;
        pages[at].length = PAGE / 2;
    }
    EXPECT(FABRICAST_E_TOO_MANY,
           fabricast_memory_adopt_views(pages, PAGES, memories, 1, &adopted, places));
    CHECK(adopted == 0);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_views(pages, 0, memories, 2, &adopted, places));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_views(pages, PAGES, memories, 2, &adopted, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_views(pages, PAGES, NULL, 2, &adopted, places));
    DONE(fabricast_memory_adopt_views(pages, PAGES, memories, 2, &adopted, places));
    CHECK(adopted == 2);
    for (at = 0; at < PAGES; at++) {
        void *address;
        CHECK(places[at].memory < 2 && places[at].length == PAGE / 2);
        DONE(fabricast_memory_address(memories[places[at].memory], &address, &length));
        CHECK((uint64_t)(uintptr_t)address + places[at].offset == pages[at].address);
        CHECK(places[at].offset + PAGE / 2 <= length);
    }
    region = enter(all.here, memories[1], FABRICAST_READ);
    EXPECT(FABRICAST_E_WOULD_BLOCK, fabricast_memory_close(memories[1], FABRICAST_NOW));
    DONE(fabricast_region_close(region));
    for (at = 0; at < 2; at++) {
        close_memory(memories[at]);
        close_memory(caches[at]);
    }
    pages[0].address = (uint64_t)(uintptr_t)pages;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_memory_adopt_views(pages, 1, memories, 2, &adopted, places));
    SAYS("not on a device");
}

static void regions(void)
{
    struct bytes descriptor = descriptor_of(all.remote);
    fabricast_region *other;
    fabricast_route *route;
    size_t length;
    char name[80];
    int at;

    DONE(fabricast_region_descriptor(all.remote, NULL, 0, &length));
    CHECK(length == descriptor.length);
    EXPECT(FABRICAST_E_TOO_LONG, fabricast_region_descriptor(all.remote, name, 5, &length));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_region_register(all.here, all.source, 4, &other));
    CHECK(other == NULL);

    other = enter(all.here, all.source, FABRICAST_LOCAL_ONLY);
    EXPECT(FABRICAST_E_DENIED, fabricast_region_descriptor(other, NULL, 0, &length));
    SAYS("local-only");
    EXPECT(FABRICAST_E_DENIED, fabricast_agent_publish(all.here, "other", other));
    EXPECT(FABRICAST_E_STALE, fabricast_agent_publish(all.there, "other", other));
    DONE(fabricast_region_close(other));

    memset(name, 'x', sizeof name);
    name[65] = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_publish(all.there, name, all.remote));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_publish(all.there, "", all.remote));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_publish(all.there, NULL, all.remote));
    for (at = 0; at < 32; at++) {
        sprintf(name, "region %d", at);
        DONE(fabricast_agent_publish(all.there, name, all.remote));
    }
    EXPECT(FABRICAST_E_TOO_MANY, fabricast_agent_publish(all.there, "one more", all.remote));

    /* The card from before has no names. */
    EXPECT(FABRICAST_E_NOT_FOUND,
           fabricast_agent_route_to(all.here, all.peer, "region 7", all.local, LONG, &route));
    CHECK(route == NULL);
    {
        struct bytes card = card_of(all.there);
        fabricast_peer again = connect_to(all.here, &card);
        CHECK(again != all.peer);
        DONE(fabricast_agent_route_to(all.here, again, "region 7", all.local, LONG, &route));
        DONE(fabricast_route_close(route));
        EXPECT(FABRICAST_E_NOT_FOUND,
               fabricast_agent_route_to(all.here, again, "region", all.local, LONG, &route));
        SAYS("\"region 7\"");
        DONE(fabricast_agent_disconnect(all.here, again, LONG));
        EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_disconnect(all.here, again, LONG));
    }

    /* A withdrawn region is refused. */
    other = enter(all.there, all.target, FABRICAST_READ);
    descriptor = descriptor_of(other);
    EXPECT(FABRICAST_E_STALE, fabricast_agent_withdraw(all.here, other, LONG));
    route = join_region(all.here, all.peer, all.local, &descriptor);
    DONE(fabricast_agent_withdraw(all.there, other, LONG));
    EXPECT(FABRICAST_E_STALE, fabricast_agent_get_all(all.here, route, NULL, NULL));
    DONE(fabricast_route_close(route));
    EXPECT(FABRICAST_E_STALE,
           fabricast_agent_join(all.here, all.peer, all.local, descriptor.bytes,
                                descriptor.length, NULL, LONG, &route));
    DONE(fabricast_region_close(other));
}

static void routes(void)
{
    struct bytes descriptor = descriptor_of(all.remote);
    fabricast_route *route;
    const char *text;

    CHECK(takes_path(all.route, "same-process"));
    DONE(fabricast_route_fallback(all.route, &text));
    CHECK(strcmp(text, "") == 0);
    DONE(fabricast_route_explain(all.route, &text));
    CHECK(strstr(text, "same-process") != NULL && strstr(text, "fabric-direct") != NULL);
#define JOIN(bytes, length, policy)                                                           \
    fabricast_agent_join(all.here, all.peer, all.local, bytes, length, policy, LONG, &route)
    EXPECT(FABRICAST_E_NO_PATH, JOIN(descriptor.bytes, descriptor.length, "^same-process"));
    SAYS("same-process: ");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, JOIN(descriptor.bytes, descriptor.length, "tcp"));
    SAYS("unknown path \"tcp\"");
    EXPECT(FABRICAST_E_MALFORMED, JOIN(descriptor.bytes, descriptor.length - 1, NULL));
    EXPECT(FABRICAST_E_MALFORMED, JOIN(NULL, 0, NULL));
    EXPECT(FABRICAST_E_STALE, fabricast_agent_join(all.here, all.peer, all.remote,
                                                   descriptor.bytes, descriptor.length, NULL,
                                                   LONG, &route));
    SAYS("another agent");
    CHECK(route == NULL);
}

/* Blocks of all sizes, there and back. */
static void transfers(void)
{
    static const size_t lengths[] = {0, 1, 7, 4096, 100001, LENGTH};
    fabricast_token token;
    uint64_t number, is_over, bytes;

    for (number = 0; number < sizeof lengths / sizeof *lengths; number++) {
        size_t length = lengths[number], offset = (LENGTH - length) / 3;
        fabricast_block block = {0, 0, 0};

        block.to = offset;
        block.length = length;
        write_pattern(all.source, LENGTH, number);
        DONE(fabricast_agent_put(all.here, all.route, &block, 1, NULL, &token));
        await(all.here, token, length);
        check_pattern(all.target, offset, length, number);
        EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_wait(all.here, token, LONG, &bytes));
        write_pattern(all.target, LENGTH, number + 100);
        block.from = 0;
        DONE(fabricast_agent_get(all.here, all.route, &block, 1, NULL, &token));
        is_over = 0;
        while (!is_over)
            DONE(fabricast_agent_test(all.here, token, &is_over, &bytes));
        CHECK(bytes == length);
        check_pattern(all.source, offset, length, number + 100);
        EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_test(all.here, token, &is_over, NULL));
        CHECK(is_over == 0);
    }
    {
        /* Several blocks, in any order. */
        fabricast_block blocks[3] = {{200, 0, 100}, {0, 100, 100}, {100, 200, 100}};
        unsigned char found[300];

        write_pattern(all.source, LENGTH, 9);
        DONE(fabricast_agent_put(all.here, all.route, blocks, 3, NULL, &token));
        await(all.here, token, 300);
        DONE(fabricast_memory_read(all.target, 0, found, 300));
        CHECK(found[200] == pattern(9, 0) && found[0] == pattern(9, 100));
        CHECK(found[199] == pattern(9, 299));
        blocks[2].to = LENGTH - 99;
        EXPECT(FABRICAST_E_INVALID_ARGUMENT,
               fabricast_agent_put(all.here, all.route, blocks, 3, NULL, &token));
        CHECK(token == 0);
        SAYS("block 2: 100 bytes");
        EXPECT(FABRICAST_E_INVALID_ARGUMENT,
               fabricast_agent_get(all.here, all.route, NULL, 1, NULL, &token));
        EXPECT(FABRICAST_E_INVALID_ARGUMENT,
               fabricast_agent_get(all.here, all.route, blocks, SIZE_MAX, NULL, &token));
    }
    write_pattern(all.source, LENGTH, 21);
    DONE(fabricast_agent_put_all(all.here, all.route, NULL, &token));
    await(all.here, token, LENGTH);
    check_pattern(all.target, 0, LENGTH, 21);
    write_pattern(all.target, LENGTH, 22);
    DONE(fabricast_agent_get_all(all.here, all.route, NULL, &token));
    DONE(fabricast_agent_forget(all.here, token));
    DONE(fabricast_agent_flush(all.here, all.peer, LONG));
    check_pattern(all.source, 0, LENGTH, 22);
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_wait(all.here, token, LONG, NULL));
}

static void rights(void)
{
    static const fabricast_block block = {0, 0, 8};
    fabricast_region *region;
    fabricast_route *route;
    uint64_t right;

    for (right = FABRICAST_READ; right <= FABRICAST_WRITE; right++) {
        fabricast_status put = right == FABRICAST_READ ? FABRICAST_E_DENIED : FABRICAST_OK;
        fabricast_status get = right == FABRICAST_WRITE ? FABRICAST_E_DENIED : FABRICAST_OK;
        struct bytes descriptor;

        region = enter(all.there, all.target, right);
        descriptor = descriptor_of(region);
        route = join_region(all.here, all.peer, all.local, &descriptor);
        EXPECT(put, fabricast_agent_put(all.here, route, &block, 1, NULL, NULL));
        EXPECT(get, fabricast_agent_get(all.here, route, &block, 1, NULL, NULL));
        DONE(fabricast_agent_flush(all.here, all.peer, LONG));
        DONE(fabricast_route_close(route));
        DONE(fabricast_region_close(region));
    }
}

static void notices(void)
{
    fabricast_block block = {0, 0, 8};
    unsigned char data[FABRICAST_MAX_NOTICE + 1];
    fabricast_notice notice = {sizeof notice, 7, NULL, 0};
    fabricast_agent_event event;
    fabricast_token token;
    uint64_t count = 9, moved = 9;

    EXPECT(FABRICAST_E_WOULD_BLOCK,
           fabricast_agent_next_event(all.here, FABRICAST_NOW, &event, sizeof event));
    EXPECT(FABRICAST_E_DEADLINE_EXCEEDED,
           fabricast_agent_next_event(all.here, FABRICAST_MILLISECONDS(30), &event, sizeof event));
    SAYS("no event after 30ms");
    CHECK(event.kind == 0);

    DONE(fabricast_agent_put(all.here, all.route, &block, 1, &notice, &token));
    await(all.here, token, 8);
    event = await_event(all.there, FABRICAST_AGENT_EVENT_NOTICE);
    CHECK(event.tag == 7 && event.length == 0);
    fill(data, sizeof data, 3);
    notice.data = data;
    for (notice.length = 0; notice.length <= FABRICAST_MAX_NOTICE;
         notice.length += notice.length < 130 ? 1 : 793) {
        notice.tag = UINT64_MAX - notice.length;
        DONE(fabricast_agent_notify(all.here, all.peer, &notice, NULL));
        event = await_event(all.there, FABRICAST_AGENT_EVENT_NOTICE);
        CHECK(event.tag == notice.tag && event.length == notice.length);
        check_filled(event.data, notice.length, 3);
    }
    notice.length = FABRICAST_MAX_NOTICE + 1;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_notify(all.here, all.peer, &notice, &token));
    SAYS("4097 bytes");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_put(all.here, all.route, &block, 1, &notice, &token));
    notice.data = NULL;
    notice.length = 1;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_agent_notify(all.here, all.peer, &notice, NULL));
    notice.length = 0;

    /* Without blocks only the notice is sent; behind a fence, and in order. */
    DONE(fabricast_agent_put_all(all.here, all.route, NULL, NULL));
    DONE(fabricast_agent_fence(all.here, all.peer));
    notice.tag = 1;
    DONE(fabricast_agent_put(all.here, all.route, NULL, 0, &notice, NULL));
    notice.tag = 2;
    DONE(fabricast_agent_notify_ordered(all.here, all.peer, &notice, &token));
    await(all.here, token, 0);
    CHECK(await_event(all.there, FABRICAST_AGENT_EVENT_NOTICE).tag == 1);
    CHECK(await_event(all.there, FABRICAST_AGENT_EVENT_NOTICE).tag == 2);
    DONE(fabricast_agent_flush(all.here, all.peer, LONG));
    DONE(fabricast_agent_in_flight(all.here, &count));
    DONE(fabricast_agent_progress(all.here, &moved));
    DONE(fabricast_agent_progress(all.here, NULL));
    CHECK(count == 0 && moved == 0);
}

/* After the peer has ended. */
static void endings(void)
{
    static const fabricast_block block = {0, 0, 8};
    fabricast_notice notice = {sizeof notice, 1, NULL, 0};
    struct bytes card = card_of(all.there);
    fabricast_token token;
    fabricast_peer peer;

    close_agent(all.there);
    EXPECT(FABRICAST_E_CLOSED, fabricast_agent_put(all.here, all.route, &block, 1, NULL, &token));
    CHECK(token == 0);
    EXPECT(FABRICAST_E_CLOSED, fabricast_agent_notify(all.here, all.peer, &notice, &token));
    EXPECT(FABRICAST_E_NO_PATH,
           fabricast_agent_connect(all.here, card.bytes, card.length, LONG, &peer));
    CHECK(peer == 0);
    SAYS("there");
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_agent_publish(all.there, "region", all.remote));
    DONE(fabricast_agent_disconnect(all.here, all.peer, LONG));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_fence(all.here, all.peer));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_flush(all.here, all.peer, LONG));
    EXPECT(FABRICAST_E_CLOSED, fabricast_agent_notify(all.here, all.peer, &notice, &token));
    close_agent(all.here);
    DONE(fabricast_route_close(all.route));
    DONE(fabricast_region_close(all.local));
    DONE(fabricast_region_close(all.remote));
    close_memory(all.source);
    close_memory(all.target);
}

int main(void)
{
    struct bytes card, descriptor;
    fabricast_agent_event event;
    fabricast_card_info info;

    alarm(300);
    all.here = start_agent("here", NULL, NULL);
    all.there = start_agent("there", NULL, NULL);
    all.source = allocate(NULL, LENGTH);
    all.target = allocate("host", LENGTH);
    all.local = enter(all.here, all.source, FABRICAST_READ | FABRICAST_WRITE);
    all.remote = enter(all.there, all.target, FABRICAST_READ | FABRICAST_WRITE);
    cards();
    card = card_of(all.there);
    all.peer = connect_to(all.here, &card);
    event = await_event(all.there, FABRICAST_AGENT_EVENT_JOINED);
    CHECK(strcmp(event.label, "here") == 0);
    card = card_of(all.here);
    DONE(fabricast_card_info_of(card.bytes, card.length, &info, sizeof info));
    CHECK(memcmp(event.from, info.identity, sizeof info.identity) == 0);
    descriptor = descriptor_of(all.remote);
    all.route = join_region(all.here, all.peer, all.local, &descriptor);
    memory();
    views();
    regions();
    routes();
    transfers();
    rights();
    notices();
    endings();
    CHECK(fabricast_open_handles() == 0);
    puts("agents: ok");
    return 0;
}
