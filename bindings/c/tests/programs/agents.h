/* Common code of the test programs with agents. */
#ifndef AGENTS_H
#define AGENTS_H

#include "check.h"

/* The provider of tests: each machine has its address. */
#define LOOPBACK "127.0.0.1"

/* An agent, in the directory for processes of this machine or in none, with a fabric or NULL. */
static inline fabricast_agent *start_agent(const char *label, const char *directory,
                                           const char *fabric)
{
    fabricast_agent_options options;
    fabricast_agent *agent;

    DONE(fabricast_agent_options_init(&options, sizeof options));
    options.label = label;
    options.directory = directory;
    options.fabric = fabric;
    options.waiting = FABRICAST_WAITING_BLOCK;
    if (fabric != NULL) {
        options.source = LOOPBACK;
        options.force_remote = 1;
        options.rails = 2;
        options.lost_after = FABRICAST_SECONDS(30);
    }
    DONE(fabricast_agent_start(&options, &agent));
    return agent;
}

static inline fabricast_memory *allocate(const char *location, size_t length)
{
    fabricast_memory *memory;
    DONE(fabricast_memory_allocate(location, length, &memory));
    return memory;
}

static inline fabricast_region *enter(fabricast_agent *agent, fabricast_memory *memory,
                                      uint64_t rights)
{
    fabricast_region *region;
    DONE(fabricast_region_register(agent, memory, rights, &region));
    return region;
}

/* Bytes that are sent to a peer. */
struct bytes {
    size_t length;
    unsigned char bytes[16384];
};

static inline struct bytes card_of(fabricast_agent *agent)
{
    struct bytes card;
    DONE(fabricast_agent_card(agent, card.bytes, sizeof card.bytes, &card.length));
    return card;
}

static inline struct bytes descriptor_of(fabricast_region *region)
{
    struct bytes descriptor;
    DONE(fabricast_region_descriptor(region, descriptor.bytes, sizeof descriptor.bytes,
                                     &descriptor.length));
    return descriptor;
}

static inline void send_bytes(int to, const void *bytes, size_t length)
{
    CHECK(write(to, &length, sizeof length) == sizeof length);
    CHECK(write(to, bytes, length) == (ssize_t)length);
}

static inline void receive(int from, void *into, size_t length)
{
    size_t at = 0;

    while (at < length) {
        ssize_t got = read(from, (unsigned char *)into + at, length - at);
        CHECK(got > 0);
        at += (size_t)got;
    }
}

static inline struct bytes receive_bytes(int from)
{
    struct bytes received;

    receive(from, &received.length, sizeof received.length);
    CHECK(received.length <= sizeof received.bytes);
    receive(from, received.bytes, received.length);
    return received;
}

static inline fabricast_peer connect_to(fabricast_agent *agent, const struct bytes *card)
{
    fabricast_peer peer;
    DONE(fabricast_agent_connect(agent, card->bytes, card->length, LONG, &peer));
    CHECK(peer != 0);
    return peer;
}

static inline fabricast_route *join_region(fabricast_agent *agent, fabricast_peer peer,
                                           fabricast_region *local,
                                           const struct bytes *descriptor)
{
    fabricast_route *route;
    DONE(fabricast_agent_join(agent, peer, local, descriptor->bytes, descriptor->length, NULL,
                              LONG, &route));
    return route;
}

static inline int takes_path(fabricast_route *route, const char *expected)
{
    const char *path;
    DONE(fabricast_route_path(route, &path));
    if (strcmp(path, expected) != 0)
        fprintf(stderr, "path %s, not %s\n", path, expected);
    return strcmp(path, expected) == 0;
}

/* Waits for an operation of so many bytes. */
static inline void await(fabricast_agent *agent, fabricast_token token, uint64_t expected)
{
    uint64_t bytes;
    DONE(fabricast_agent_wait(agent, token, LONG, &bytes));
    CHECK(bytes == expected);
}

/* The next event of a kind; others are skipped. */
static inline fabricast_agent_event await_event(fabricast_agent *agent, uint64_t kind)
{
    fabricast_agent_event event;
    do
        DONE(fabricast_agent_next_event(agent, LONG, &event, sizeof event));
    while (event.kind != kind);
    return event;
}

static inline void write_pattern(fabricast_memory *memory, size_t length, uint64_t number)
{
    unsigned char *bytes = malloc(length);
    CHECK(bytes != NULL);
    fill(bytes, length, number);
    DONE(fabricast_memory_write(memory, 0, bytes, length));
    free(bytes);
}

static inline void check_pattern(fabricast_memory *memory, size_t offset, size_t length,
                                 uint64_t number)
{
    unsigned char *bytes = malloc(length + 1);
    CHECK(bytes != NULL);
    DONE(fabricast_memory_read(memory, offset, bytes, length));
    check_filled(bytes, length, number);
    free(bytes);
}

static inline void close_memory(fabricast_memory *memory)
{
    DONE(fabricast_memory_close(memory, LONG));
}

static inline void close_agent(fabricast_agent *agent)
{
    DONE(fabricast_agent_close(agent, LONG));
}

/* The message of the last error contains this text. */
#define SAYS(text) CHECK(strstr(fabricast_error_message(), text) != NULL)

#endif
