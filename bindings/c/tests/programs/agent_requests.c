/* Requests as inference engines make them: prepared transfers, several regions, the order of
 * streams, and cancellation; in host memory and on an emulated device. */
#include "agents.h"

#define PAGE ((size_t)8192)
#define PAGES 64
#define LENGTH (PAGE * PAGES)
#define LAYERS 3

static struct {
    const char *location;
    fabricast_agent *here, *there;
    fabricast_memory *source[LAYERS], *target[LAYERS];
    fabricast_region *local[LAYERS], *remote[LAYERS];
    fabricast_peer peer;
    fabricast_route *route[LAYERS];
    fabricast_block pages[PAGES];
} all;

static void open_all(const char *location)
{
    struct bytes card, descriptor;
    uint64_t at;

    all.location = location;
    all.here = start_agent("here", NULL, NULL);
    all.there = start_agent("there", NULL, NULL);
    card = card_of(all.there);
    all.peer = connect_to(all.here, &card);
    for (at = 0; at < LAYERS; at++) {
        all.source[at] = allocate(location, LENGTH);
        all.target[at] = allocate(location, LENGTH);
        all.local[at] = enter(all.here, all.source[at], FABRICAST_LOCAL_ONLY);
        all.remote[at] = enter(all.there, all.target[at], FABRICAST_READ | FABRICAST_WRITE);
        descriptor = descriptor_of(all.remote[at]);
        all.route[at] = join_region(all.here, all.peer, all.local[at], &descriptor);
        CHECK(takes_path(all.route[at], "same-process"));
    }
    for (at = 0; at < PAGES; at++) {
        all.pages[at].to = all.pages[at].from = at * PAGE;
        all.pages[at].length = PAGE;
    }
}

static void close_all(void)
{
    int at;

    close_agent(all.here);
    close_agent(all.there);
    for (at = 0; at < LAYERS; at++) {
        DONE(fabricast_route_close(all.route[at]));
        DONE(fabricast_region_close(all.local[at]));
        DONE(fabricast_region_close(all.remote[at]));
        close_memory(all.source[at]);
        close_memory(all.target[at]);
    }
    CHECK(fabricast_open_handles() == 0);
}

/* A page of memory with the pattern of whole memory. */
static void check_page(fabricast_memory *memory, size_t page, uint64_t expected)
{
    unsigned char bytes[PAGE];
    size_t at;

    DONE(fabricast_memory_read(memory, page * PAGE, bytes, PAGE));
    for (at = 0; at < PAGE; at++)
        CHECK(bytes[at] == pattern(expected, page * PAGE + at));
}

static void prepared(void)
{
    static const uint32_t some[] = {3, 60, 0, 17};
    const uint32_t wrong[] = {1, PAGES};
    fabricast_notice notice = {sizeof notice, 9, "four", 4};
    fabricast_block outside = {1, 0, LENGTH};
    fabricast_prepared *put, *get, *none;
    fabricast_agent_event event;
    fabricast_token token;
    uint64_t bytes, at;

    DONE(fabricast_agent_prepare_put(all.here, all.route[0], all.pages, PAGES, &put));
    DONE(fabricast_agent_prepare_get(all.here, all.route[0], all.pages, PAGES, &get));
    DONE(fabricast_prepared_bytes(put, &bytes));
    CHECK(bytes == LENGTH);
    for (at = 1; at < 3; at++) {
        write_pattern(all.source[0], LENGTH, at);
        DONE(fabricast_agent_submit(all.here, put, NULL, FABRICAST_ALL, NULL, &token));
        await(all.here, token, LENGTH);
        check_pattern(all.target[0], 0, LENGTH, at);
    }
    write_pattern(all.source[0], LENGTH, 30);
    DONE(fabricast_agent_submit(all.here, put, some, 4, &notice, &token));
    await(all.here, token, 4 * PAGE);
    event = await_event(all.there, FABRICAST_AGENT_EVENT_NOTICE);
    CHECK(event.tag == 9 && event.length == 4);
    for (at = 0; at < PAGES; at++)
        check_page(all.target[0], at, at == 3 || at == 60 || at == 0 || at == 17 ? 30 : 2);
    write_pattern(all.target[0], LENGTH, 31);
    DONE(fabricast_agent_submit(all.here, get, some, 1, NULL, &token));
    await(all.here, token, PAGE);
    check_page(all.source[0], 3, 31);
    check_page(all.source[0], 4, 30);
    /* No block at all. */
    DONE(fabricast_agent_submit(all.here, get, some, 0, NULL, &token));
    await(all.here, token, 0);
    DONE(fabricast_agent_submit(all.here, get, NULL, 0, NULL, &token));
    await(all.here, token, 0);

    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_submit(all.here, put, wrong, 2, NULL, &token));
    SAYS("index 64 of 64 blocks");
    CHECK(token == 0);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_submit(all.here, put, NULL, 2, NULL, &token));
    SAYS("\"indices\" is NULL");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_submit(all.here, put, some, FABRICAST_ALL, NULL, &token));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_prepare_put(all.here, all.route[0], &outside, 1, &none));
    CHECK(none == NULL);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_prepare_get(all.here, all.route[0], NULL, 1, &none));
    EXPECT(FABRICAST_E_STALE,
           fabricast_agent_prepare_put(all.there, all.route[0], all.pages, PAGES, &none));
    SAYS("another agent");
    EXPECT(FABRICAST_E_STALE,
           fabricast_agent_submit(all.there, put, NULL, FABRICAST_ALL, NULL, &token));
    /* The list and the routes outlive their handles. */
    DONE(fabricast_prepared_close(get));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_prepared_close(get));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_prepared_bytes(get, &bytes));
    CHECK(bytes == 0);
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_agent_submit(all.here, get, some, 1, NULL, &token));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_agent_submit(all.here, (fabricast_prepared *)(void *)all.route[0], NULL, 0,
                                  NULL, NULL));
    DONE(fabricast_prepared_close(put));
    DONE(fabricast_prepared_close(NULL));
}

static void parts(void)
{
    fabricast_notice notice = {sizeof notice, 5, "layers", 6};
    fabricast_part parts[LAYERS];
    fabricast_block outside = {LENGTH, 0, 1};
    fabricast_token token;
    struct bytes card = card_of(all.there);
    fabricast_peer second;
    fabricast_route *other;
    int at;

    for (at = 0; at < LAYERS; at++) {
        parts[at].route = all.route[at];
        parts[at].blocks = all.pages + at;
        parts[at].count = 2;
        write_pattern(all.source[at], LENGTH, 40 + at);
        write_pattern(all.target[at], LENGTH, 50);
    }
    DONE(fabricast_agent_put_parts(all.here, parts, LAYERS, &notice, &token));
    await(all.here, token, LAYERS * 2 * PAGE);
    CHECK(await_event(all.there, FABRICAST_AGENT_EVENT_NOTICE).tag == 5);
    for (at = 0; at < LAYERS; at++) {
        check_page(all.target[at], at, 40 + at);
        check_page(all.target[at], at + 1, 40 + at);
        check_page(all.target[at], at + 2, 50);
    }
    for (at = 0; at < LAYERS; at++)
        write_pattern(all.target[at], LENGTH, 60 + at);
    DONE(fabricast_agent_get_parts(all.here, parts, LAYERS, NULL, &token));
    await(all.here, token, LAYERS * 2 * PAGE);
    for (at = 0; at < LAYERS; at++) {
        check_page(all.source[at], at, 60 + at);
        check_page(all.source[at], at + 2, 40 + at);
    }

    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_put_parts(all.here, parts, 0, &notice, &token));
    SAYS("without routes");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_put_parts(all.here, NULL, 1, &notice, &token));
    parts[2].blocks = NULL;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_get_parts(all.here, parts, LAYERS, NULL, &token));
    SAYS("\"blocks\" is NULL");
    /* Nothing is copied if one part is wrong. */
    parts[2].blocks = &outside;
    parts[2].count = 1;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_put_parts(all.here, parts, LAYERS, &notice, &token));
    check_page(all.target[0], 0, 60);
    parts[2].route = NULL;
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_agent_put_parts(all.here, parts, LAYERS, &notice, &token));
    EXPECT(FABRICAST_E_STALE, fabricast_agent_put_parts(all.there, parts, 1, NULL, &token));
    second = connect_to(all.here, &card);
    {
        struct bytes descriptor = descriptor_of(all.remote[2]);
        other = join_region(all.here, second, all.local[2], &descriptor);
    }
    parts[2].route = other;
    parts[2].blocks = all.pages;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_put_parts(all.here, parts, LAYERS, NULL, &token));
    SAYS("different peers");
    CHECK(token == 0);
    DONE(fabricast_route_close(other));
    DONE(fabricast_agent_disconnect(all.here, second, LONG));
}

/* What follows a fence begins when the program makes progress. */
static void cancellation(void)
{
    fabricast_notice notice = {sizeof notice, 77, NULL, 0};
    fabricast_token first, last;
    uint64_t is_cancelled = 9;

    write_pattern(all.source[0], LENGTH, 70);
    write_pattern(all.target[0], LENGTH, 71);
    DONE(fabricast_agent_put_all(all.here, all.route[0], NULL, &first));
    await(all.here, first, LENGTH);
    write_pattern(all.source[0], LENGTH, 72);
    DONE(fabricast_agent_cancel(all.here, first, &is_cancelled));
    CHECK(is_cancelled == 0);

    /* The copy before the fence may be over at once. */
    DONE(fabricast_agent_put(all.here, all.route[1], all.pages, PAGES, NULL, NULL));
    DONE(fabricast_agent_fence(all.here, all.peer));
    DONE(fabricast_agent_put_all(all.here, all.route[0], &notice, &last));
    DONE(fabricast_agent_cancel(all.here, last, &is_cancelled));
    if (is_cancelled) {
        uint64_t again = 9;
        DONE(fabricast_agent_cancel(all.here, last, &again));
        CHECK(again == 0);
        EXPECT(FABRICAST_E_CANCELLED, fabricast_agent_wait(all.here, last, LONG, NULL));
        SAYS("was cancelled");
        EXPECT(FABRICAST_E_FAILED, fabricast_agent_flush(all.here, all.peer, LONG));
    } else {
        await(all.here, last, LENGTH);
    }
    DONE(fabricast_agent_flush(all.here, all.peer, LONG));
    DONE(fabricast_agent_cancel(all.here, last, &is_cancelled));
    CHECK(is_cancelled == 0);
    DONE(fabricast_agent_cancel(all.here, last, NULL));
    EXPECT(FABRICAST_E_NOT_FOUND, fabricast_agent_cancel(all.there, last, NULL));
}

/* A put in the order of a stream sends what a get has fetched, for which the stream waits. */
static void stream_order(void)
{
    const int is_device = strcmp(all.location, "host") != 0;
    fabricast_stream *stream, *none;
    fabricast_prepared *prepared;
    fabricast_token got, put;
    uint64_t round;

    DONE(fabricast_stream_adopt("emulated:0", NULL, &stream));
    DONE(fabricast_agent_prepare_put(all.here, all.route[1], all.pages, PAGES, &prepared));
    for (round = 80; round < 84; round++) {
        fabricast_status delayed;

        write_pattern(all.target[0], LENGTH, round);
        write_pattern(all.source[0], LENGTH, 0);
        write_pattern(all.source[1], LENGTH, round + 10);
        write_pattern(all.target[1], LENGTH, 0);
        DONE(fabricast_agent_get_after(all.here, all.route[0], all.pages, PAGES, NULL, stream,
                                       &got));
        delayed = fabricast_agent_delay_stream(all.here, got, stream, LONG);
        if (is_device) {
            CHECK(delayed == FABRICAST_OK);
        } else {
            /* The processor copies, and may have done so. */
            CHECK(delayed == FABRICAST_OK || delayed == FABRICAST_E_NO_PATH);
            await(all.here, got, LENGTH);
        }
        DONE(fabricast_agent_put_after(all.here, all.route[0], all.pages, PAGES / 2, NULL,
                                       stream, &put));
        await(all.here, put, LENGTH / 2);
        DONE(fabricast_agent_submit_after(all.here, prepared, NULL, FABRICAST_ALL, NULL, stream,
                                          &put));
        await(all.here, put, LENGTH);
        if (is_device)
            await(all.here, got, LENGTH);
        check_pattern(all.source[0], 0, LENGTH, round);
        check_pattern(all.target[0], 0, LENGTH, round);
        check_pattern(all.target[1], 0, LENGTH, round + 10);
        /* An operation that is over delays nothing. */
        DONE(fabricast_agent_delay_stream(all.here, put, stream, FABRICAST_NOW));
    }
    EXPECT(FABRICAST_E_NOT_FOUND,
           fabricast_agent_delay_stream(all.there, put, stream, FABRICAST_NOW));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_agent_delay_stream(all.here, put, NULL, FABRICAST_NOW));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_agent_put_after(all.here, all.route[0], all.pages, 1, NULL, NULL, &put));
    CHECK(put == 0);
    DONE(fabricast_stream_close(stream));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_agent_get_after(all.here, all.route[0], all.pages, 1, NULL, stream, &put));
    EXPECT(FABRICAST_E_BAD_HANDLE,
           fabricast_agent_submit_after(all.here, prepared, NULL, FABRICAST_ALL, NULL, stream,
                                        &put));
    DONE(fabricast_prepared_close(prepared));

    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_stream_adopt("host", NULL, &none));
    SAYS("host memory has no streams");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_stream_adopt("moon:0", NULL, &none));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_stream_adopt(NULL, NULL, &none));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_stream_adopt("emulated:0", NULL, NULL));
    /* Streams of an emulated device are made by the library only. */
    EXPECT(FABRICAST_E_FAILED,
           fabricast_stream_adopt("emulated:0", (void *)(uintptr_t)4096, &none));
    CHECK(none == NULL);
}

int main(void)
{
    static const char *const locations[] = {"host", "emulated:0"};
    int at;

    alarm(300);
    for (at = 0; at < 2; at++) {
        open_all(locations[at]);
        prepared();
        parts();
        cancellation();
        stream_order();
        close_all();
    }
    puts("agent_requests: ok");
    return 0;
}
