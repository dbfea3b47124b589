/*
 * Strided rows and tiles, compared with plain loops: in this process, by a fabric, and in device
 * memory. The seed is TEST_SEED, or 1.
 */
#include "agents.h"

#define LENGTH ((size_t)1 << 20)
#define ROUNDS 60
#define MAX_DIMENSIONS 5

static unsigned char source[LENGTH], target[LENGTH], found[LENGTH];

static uint64_t state;

/* A number below the bound (splitmix64). */
static uint64_t below(uint64_t bound)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % bound;
}

/* Two agents with a region each. */
struct pair {
    fabricast_agent *here, *there;
    fabricast_memory *local_memory, *remote_memory;
    fabricast_region *local, *remote;
    fabricast_route *route;
};

static struct pair open_pair(const char *location, const char *fabric, const char *path)
{
    struct pair pair;
    struct bytes card, descriptor;
    fabricast_peer peer;

    pair.here = start_agent("here", NULL, fabric);
    pair.there = start_agent("there", NULL, fabric);
    pair.local_memory = allocate(location, LENGTH);
    pair.remote_memory = allocate(location, LENGTH);
    pair.local = enter(pair.here, pair.local_memory, FABRICAST_LOCAL_ONLY);
    pair.remote = enter(pair.there, pair.remote_memory, FABRICAST_READ | FABRICAST_WRITE);
    card = card_of(pair.there);
    peer = connect_to(pair.here, &card);
    descriptor = descriptor_of(pair.remote);
    pair.route = join_region(pair.here, peer, pair.local, &descriptor);
    CHECK(takes_path(pair.route, path));
    return pair;
}

static void close_pair(struct pair *pair)
{
    DONE(fabricast_route_close(pair->route));
    DONE(fabricast_region_close(pair->local));
    DONE(fabricast_region_close(pair->remote));
    close_memory(pair->local_memory);
    close_memory(pair->remote_memory);
    close_agent(pair->here);
    close_agent(pair->there);
}

/* Moves rows by put or get, and compares all bytes of the target with the expected ones. */
static void move(struct pair *pair, const fabricast_strided *rows, uint64_t bytes, int is_put)
{
    fabricast_memory *from = is_put ? pair->local_memory : pair->remote_memory;
    fabricast_memory *to = is_put ? pair->remote_memory : pair->local_memory;
    unsigned char *before = malloc(LENGTH);
    fabricast_token token;
    size_t at;

    CHECK(before != NULL);
    memset(before, 0xee, LENGTH);
    DONE(fabricast_memory_write(to, 0, before, LENGTH));
    DONE(fabricast_memory_write(from, 0, source, LENGTH));
    if (is_put)
        DONE(fabricast_agent_put_strided(pair->here, pair->route, rows, NULL, &token));
    else
        DONE(fabricast_agent_get_strided(pair->here, pair->route, rows, NULL, &token));
    await(pair->here, token, bytes);
    DONE(fabricast_memory_read(to, 0, found, LENGTH));
    for (at = 0; at < LENGTH; at++)
        CHECK(found[at] == target[at]);
    free(before);
}

/* Rows at random strides, and the same by loops. */
static void rows(struct pair *pair, int is_put)
{
    fabricast_strided rows;
    uint64_t extent, i, j, k, bytes;
    size_t at;

    DONE(fabricast_strided_init(&rows, sizeof rows));
    rows.length = 1 + below(64);
    rows.from = below(1000);
    rows.to = below(1000);
    extent = rows.length;
    bytes = rows.length;
    for (at = 0; at < FABRICAST_MAX_STRIDES; at++) {
        rows.count[at] = 1 + below(9);
        rows.from_stride[at] = below(4) == 0 ? 0 : below(3000);
        rows.to_stride[at] = extent + (below(3) == 0 ? 0 : below(50));
        extent += rows.to_stride[at] * (rows.count[at] - 1);
        bytes *= rows.count[at];
    }
    CHECK(rows.to + extent < LENGTH);
    memset(target, 0xee, LENGTH);
    for (i = 0; i < rows.count[0]; i++)
        for (j = 0; j < rows.count[1]; j++)
            for (k = 0; k < rows.count[2]; k++)
                memcpy(target + rows.to + i * rows.to_stride[0] + j * rows.to_stride[1] +
                           k * rows.to_stride[2],
                       source + rows.from + i * rows.from_stride[0] + j * rows.from_stride[1] +
                           k * rows.from_stride[2],
                       rows.length);
    move(pair, &rows, bytes, is_put);
    {
        /* In another order they are the same. */
        uint64_t other = below(FABRICAST_MAX_STRIDES), swapped;
#define SWAP(list)                                                                            \
    (swapped = rows.list[0], rows.list[0] = rows.list[other], rows.list[other] = swapped)
        SWAP(count);
        SWAP(from_stride);
        SWAP(to_stride);
    }
    move(pair, &rows, bytes, is_put);
}

/* The offset of an element, by its indices. */
static size_t offset(uint32_t order, size_t dimensions, const uint64_t *extents,
                     const uint64_t *index)
{
    size_t all = 0, at;

    for (at = 0; at < dimensions; at++) {
        size_t dimension = order == FABRICAST_ORDER_C ? at : dimensions - 1 - at;
        all = all * extents[dimension] + index[dimension];
    }
    return all;
}

/* A tile of random arrays, and the same by a loop over its elements. */
static void tile(struct pair *pair, int is_put)
{
    uint64_t size[MAX_DIMENSIONS], from[MAX_DIMENSIONS], to[MAX_DIMENSIONS];
    uint64_t from_origin[MAX_DIMENSIONS], to_origin[MAX_DIMENSIONS], element = 1 + below(16);
    uint64_t count = 1, number;
    size_t dimensions = 1 + below(MAX_DIMENSIONS), at;
    uint32_t order = (uint32_t)below(2);
    fabricast_strided rows;
    fabricast_status status;

    for (at = 0; at < dimensions; at++) {
        from[at] = 1 + below(8);
        to[at] = 1 + below(8);
        size[at] = 1 + below(from[at] < to[at] ? from[at] : to[at]);
        from_origin[at] = below(from[at] - size[at] + 1);
        to_origin[at] = below(to[at] - size[at] + 1);
        count *= size[at];
    }
    status = fabricast_strided_tile(&rows, sizeof rows, order, element, dimensions, size, from,
                                    from_origin, to, to_origin);
    if (dimensions > FABRICAST_MAX_STRIDES + 1 && status == FABRICAST_E_INVALID_ARGUMENT) {
        SAYS("more than 3 strides");
        CHECK(rows.length == 0 && rows.size == 0);
        return;
    }
    CHECK(status == FABRICAST_OK && rows.size == sizeof rows);
    memset(target, 0xee, LENGTH);
    for (number = 0; number < count; number++) {
        uint64_t here[MAX_DIMENSIONS], there[MAX_DIMENSIONS], rest = number;
        for (at = 0; at < dimensions; at++) {
            here[at] = from_origin[at] + rest % size[at];
            there[at] = to_origin[at] + rest % size[at];
            rest /= size[at];
        }
        memcpy(target + element * offset(order, dimensions, to, there),
               source + element * offset(order, dimensions, from, here), element);
    }
    move(pair, &rows, count * element, is_put);
}

static void refused(struct pair *pair)
{
    uint64_t size[2] = {2, 2}, extents[2] = {4, 4}, origin[2] = {3, 0}, zero[2] = {0, 0};
    fabricast_strided rows;
    fabricast_token token = 7;

    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_strided_init(&rows, 8));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_strided_init(NULL, sizeof rows));
#define PUT fabricast_agent_put_strided(pair->here, pair->route, &rows, NULL, &token)
    DONE(fabricast_strided_init(&rows, sizeof rows));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, PUT);
    SAYS("0 bytes");
    rows.length = 8;
    rows.count[1] = 0;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, PUT);
    SAYS("0 times");
    rows.count[1] = 2;
    rows.to_stride[1] = 7;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, PUT);
    SAYS("overlap");
    rows.to_stride[1] = LENGTH - 7;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, PUT);
    SAYS("out of bounds");
    rows.to_stride[1] = UINT64_MAX;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, PUT);
    rows.size = 5;
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, PUT);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_agent_get_strided(pair->here, pair->route, NULL, NULL, NULL));
    CHECK(token == 0);
#define TILE(order, element, dimensions, tile, from)                                          \
    fabricast_strided_tile(&rows, sizeof rows, order, element, dimensions, tile, extents,     \
                           from, extents, zero)
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(FABRICAST_ORDER_C, 8, 2, size, origin));
    SAYS("dimension 0: 2 elements from 3 exceed 4");
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(2, 8, 2, size, zero));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(FABRICAST_ORDER_C, 0, 2, size, zero));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(FABRICAST_ORDER_C, 8, 0, size, zero));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(FABRICAST_ORDER_C, 8, 16, size, zero));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(FABRICAST_ORDER_C, 8, 2, NULL, zero));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, TILE(FABRICAST_ORDER_C, 8, 2, zero, zero));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           TILE(FABRICAST_ORDER_C, UINT64_MAX, 2, size, zero));
    DONE(TILE(FABRICAST_ORDER_FORTRAN, 8, 2, size, zero));
}

static void compare(struct pair *pair, int rounds)
{
    int round;

    for (round = 0; round < rounds; round++) {
        rows(pair, round % 2);
        tile(pair, round % 2);
    }
}

int main(void)
{
    const char *seed = getenv("TEST_SEED");
    struct pair pair;

    alarm(300);
    state = seed != NULL ? strtoull(seed, NULL, 10) : 1;
    fill(source, LENGTH, 7);
    pair = open_pair("host", NULL, "same-process");
    refused(&pair);
    compare(&pair, ROUNDS);
    close_pair(&pair);
    pair = open_pair("host", "auto", "fabric-direct");
    compare(&pair, ROUNDS / 2);
    close_pair(&pair);
    pair = open_pair("emulated:0", NULL, "same-process");
    compare(&pair, ROUNDS / 2);
    close_pair(&pair);
    CHECK(fabricast_open_handles() == 0);
    puts("agent_strided: ok");
    return 0;
}
