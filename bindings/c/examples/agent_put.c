/*
 * agent_put own FILE | put FILE - puts a halo into the memory of another process.
 *
 * The owner has an array with a halo of one cell at each side. It writes its card to FILE, and waits
 * for the notice that the halo has arrived. The other process takes the card from there, and puts the
 * last column of its own array into the first one of the owner's.
 *
 *     cc agent_put.c $(pkg-config --cflags --libs fabricast) -o agent_put
 *     ./agent_put own /tmp/card & ./agent_put put /tmp/card
 *
 * On one machine the card contains a socket in the directory of FILE. Between machines, set the
 * option "fabric" in both processes, and send the card by MPI or a shared file system.
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */

#include <fabricast.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS = 64, COLUMNS = 32, HALO_ARRIVED = 1 };

/* Cells with the halo. */
static const uint64_t extents[2] = {ROWS + 2, COLUMNS + 2};

static void check(fabricast_status status)
{
    if (status != FABRICAST_OK) {
        fprintf(stderr, "agent_put: %s\n", fabricast_error_message());
        exit(1);
    }
}

/* An agent with a socket in the directory of the file. */
static fabricast_agent *start(const char *label, const char *file)
{
    char directory[4096];
    const char *end = strrchr(file, '/');
    fabricast_agent_options options;
    fabricast_agent *agent;

    snprintf(directory, sizeof directory, "%.*s", end == NULL ? 1 : (int)(end - file + 1),
             end == NULL ? "." : file);
    check(fabricast_agent_options_init(&options, sizeof options));
    options.label = label;
    options.directory = directory;
    check(fabricast_agent_start(&options, &agent));
    return agent;
}

/* An array that peers can map. */
static double *array(fabricast_memory **memory)
{
    size_t length;
    void *cells;

    check(fabricast_memory_allocate("host", extents[0] * extents[1] * sizeof(double), memory));
    check(fabricast_memory_address(*memory, &cells, &length));
    return cells;
}

static double value(uint64_t row)
{
    return 1000 + (double)row;
}

static int own(const char *file)
{
    fabricast_agent *agent = start("owner", file);
    fabricast_memory *memory;
    fabricast_region *region;
    fabricast_agent_event event;
    double *cells = array(&memory);
    unsigned char card[4096];
    size_t length;
    uint64_t row;
    char part[4096];
    FILE *out;

    check(fabricast_region_register(agent, memory, FABRICAST_WRITE, &region));
    check(fabricast_agent_publish(agent, "field", region));
    check(fabricast_agent_card(agent, card, sizeof card, &length));
    /* The file appears with all its content. */
    snprintf(part, sizeof part, "%s.part", file);
    out = fopen(part, "wb");
    if (out == NULL || fwrite(card, 1, length, out) != length || fclose(out) != 0 ||
        rename(part, file) != 0) {
        perror(file);
        return 1;
    }
    do
        check(fabricast_agent_next_event(agent, FABRICAST_SECONDS(30), &event, sizeof event));
    while (event.kind != FABRICAST_AGENT_EVENT_NOTICE || event.tag != HALO_ARRIVED);
    for (row = 1; row <= ROWS; row++) {
        if (cells[row * extents[1]] != value(row)) {
            fprintf(stderr, "agent_put: row %lu is wrong\n", (unsigned long)row);
            return 1;
        }
    }
    remove(file);
    check(fabricast_agent_close(agent, FABRICAST_SECONDS(30)));
    check(fabricast_region_close(region));
    check(fabricast_memory_close(memory, FABRICAST_SECONDS(30)));
    printf("agent_put: the halo of %d rows has arrived: ok\n", ROWS);
    return 0;
}

/* The card, when the owner has written it. */
static size_t read_card(const char *file, unsigned char *card, size_t capacity)
{
    const struct timespec pause = {0, 10000000};
    int attempt;

    for (attempt = 0; attempt < 3000; attempt++) {
        FILE *in = fopen(file, "rb");
        if (in != NULL) {
            size_t length = fread(card, 1, capacity, in);
            fclose(in);
            return length;
        }
        nanosleep(&pause, NULL);
    }
    fprintf(stderr, "agent_put: %s does not appear\n", file);
    exit(1);
}

static int put(const char *file)
{
    static const uint64_t column[2] = {ROWS, 1}, last[2] = {1, COLUMNS}, first[2] = {1, 0};
    fabricast_agent *agent = start("peer", file);
    fabricast_memory *memory;
    fabricast_region *local;
    fabricast_route *route;
    fabricast_peer peer;
    fabricast_strided halo;
    fabricast_notice arrived = {sizeof arrived, HALO_ARRIVED, NULL, 0};
    fabricast_token token;
    const char *path;
    double *cells = array(&memory);
    unsigned char card[4096];
    uint64_t row;
    size_t length = read_card(file, card, sizeof card);

    for (row = 1; row <= ROWS; row++)
        cells[row * extents[1] + COLUMNS] = value(row);
    check(fabricast_region_register(agent, memory, FABRICAST_LOCAL_ONLY, &local));
    check(fabricast_agent_connect(agent, card, length, FABRICAST_SECONDS(30), &peer));
    check(fabricast_agent_route_to(agent, peer, "field", local, FABRICAST_SECONDS(30), &route));
    check(fabricast_route_path(route, &path));
    check(fabricast_strided_tile(&halo, sizeof halo, FABRICAST_ORDER_C, sizeof(double), 2, column,
                                 extents, last, extents, first));
    check(fabricast_agent_put_strided(agent, route, &halo, &arrived, &token));
    check(fabricast_agent_wait(agent, token, FABRICAST_SECONDS(30), NULL));
    printf("agent_put: %d rows by %s\n", ROWS, path);
    check(fabricast_agent_close(agent, FABRICAST_SECONDS(30)));
    check(fabricast_route_close(route));
    check(fabricast_region_close(local));
    check(fabricast_memory_close(memory, FABRICAST_SECONDS(30)));
    return 0;
}

int main(int count, char **arguments)
{
    if (count == 3 && strcmp(arguments[1], "own") == 0)
        return own(arguments[2]);
    if (count == 3 && strcmp(arguments[1], "put") == 0)
        return put(arguments[2]);
    fprintf(stderr, "usage: agent_put own FILE | put FILE\n");
    return 2;
}
