/*
 * halo [ROWS COLUMNS [STEPS]] - halo exchange of a two-dimensional field by strided puts, beside the
 * same exchange by MPI's derived types.
 *
 *     mpicc halo.c $(pkg-config --cflags --libs fabricast) -o halo
 *     mpirun -n 4 ./halo 512 512
 *
 * MPI starts the ranks and sends the cards of their agents once. Then each rank puts the edges of its
 * field into the halos of its neighbours, where they belong: nothing is packed, and no call of the
 * neighbour is needed. The notice of a put arrives after its data.
 *
 * The field is kept twice, and a step computes one from the other. So a neighbour that is one step
 * ahead writes the halo of the other field; it cannot be further ahead, because it needs this rank's
 * notice for that.
 */
#define _POSIX_C_SOURCE 200809L /* sysconf */

#include <fabricast.h>
#include <mpi.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NORTH, SOUTH, WEST, EAST, SIDES }; /* side ^ 1 is the opposite one */
#define TIMEOUT FABRICAST_SECONDS(60)

/* A side of the field, as numbers of elements of the array with its halo: the edge goes to the
 * neighbour, and its edge comes into the halo. */
struct side {
    int neighbour;
    uint8_t identity[16]; /* of its agent */
    uint64_t tile[2], edge[2], halo[2];
    fabricast_route *route;
    fabricast_strided rows;   /* the edge here, and the halo there */
    MPI_Datatype send, receive;
};

struct card {
    uint64_t length;
    unsigned char bytes[4096 - sizeof(uint64_t)];
};

static int rank, ranks;
static int rows, columns, steps;
static uint64_t extents[2]; /* of the array */
static size_t area;         /* its elements */
static struct side sides[SIDES];
static fabricast_agent *agent;
static unsigned arrived[2]; /* notices of even and odd steps */

static void check(fabricast_status status)
{
    if (status != FABRICAST_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, fabricast_error_message());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* MPI that this program was not built for starts each rank as a job of one. */
static void check_launcher(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    size_t it;

    for (it = 0; it < sizeof names / sizeof *names; it++) {
        const char *size = getenv(names[it]);
        if (size != NULL && ranks == 1 && atoi(size) > 1) {
            fprintf(stderr, "start ranks failed: MPI has 1 rank, but %s is %s. Start the program with the mpirun "
                            "of the MPI that it was built for\n", names[it], size);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

static void *allocate(size_t length)
{
    void *found = malloc(length);

    if (found == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    return found;
}

/* The neighbours, and what goes to and comes from them. */
static void describe_sides(MPI_Comm grid)
{
    int side;

    MPI_Cart_shift(grid, 0, 1, &sides[NORTH].neighbour, &sides[SOUTH].neighbour);
    MPI_Cart_shift(grid, 1, 1, &sides[WEST].neighbour, &sides[EAST].neighbour);
    for (side = 0; side < SIDES; side++) {
        struct side *it = &sides[side];
        const int across = side == NORTH || side == SOUTH ? 0 : 1; /* the dimension */
        const int is_last = side == SOUTH || side == EAST;
        const uint64_t inner = extents[across] - 2;

        it->tile[across] = 1;
        it->tile[1 - across] = extents[1 - across] - 2;
        it->edge[across] = is_last ? inner : 1;
        it->halo[across] = is_last ? inner + 1 : 0;
        it->edge[1 - across] = it->halo[1 - across] = 1;
    }
}

static MPI_Datatype type_of(const uint64_t tile[2], const uint64_t origin[2])
{
    const int array[2] = {(int)extents[0], (int)extents[1]};
    const int size[2] = {(int)tile[0], (int)tile[1]}, start[2] = {(int)origin[0], (int)origin[1]};
    MPI_Datatype type;

    MPI_Type_create_subarray(2, array, size, start, MPI_ORDER_C, MPI_DOUBLE, &type);
    MPI_Type_commit(&type);
    return type;
}

/* Starts the agent, with a socket in a directory that all ranks of this machine see. */
static void start_agent(void)
{
    fabricast_agent_options options;
    const char *provider = getenv("FABRICAST_PROVIDER"), *source = getenv("FABRICAST_SOURCE");
    const char *directory = getenv("FABRICAST_DIRECTORY");
    char fallback[64], label[32], policy[64];
    int here;
    MPI_Comm machine;

    snprintf(fallback, sizeof fallback, "/tmp/fabricast-%u", (unsigned)getuid());
    directory = directory == NULL ? fallback : directory;
    mkdir(directory, 0700);
    snprintf(label, sizeof label, "halo %d", rank);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &here);
    MPI_Comm_free(&machine);
    check(fabricast_agent_options_init(&options, sizeof options));
    options.label = label;
    options.directory = directory;
    provider = provider == NULL || *provider == 0 ? "auto" : provider;
    /* All ranks need the same provider: one that is named is required. */
    snprintf(policy, sizeof policy, "%s%s",
             strcmp(provider, "auto") == 0 || strchr("=^", *provider) != NULL ? "" : "=", provider);
    options.fabric = here < ranks ? policy : NULL;
    options.source = source == NULL || *source == 0 ? NULL : source;
    /* Polling ranks need a core each. */
    options.waiting =
        here > sysconf(_SC_NPROCESSORS_ONLN) ? FABRICAST_WAITING_BLOCK : FABRICAST_WAITING_BUSY;
    check(fabricast_agent_start(&options, &agent));
}

/* Exchanges the cards of all ranks, and makes routes to the neighbours. */
static void connect_neighbours(fabricast_region *region)
{
    struct card own = {0, {0}}, *cards = allocate((size_t)ranks * sizeof *cards);
    size_t length;
    int side;

    check(fabricast_agent_card(agent, own.bytes, sizeof own.bytes, &length));
    own.length = length;
    MPI_Allgather(&own, sizeof own, MPI_BYTE, cards, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    for (side = 0; side < SIDES; side++) {
        struct side *it = &sides[side];
        const struct side *opposite = &sides[side ^ 1];
        fabricast_card_info info;
        fabricast_peer peer;

        it->send = type_of(it->tile, it->edge);
        it->receive = type_of(it->tile, it->halo);
        if (it->neighbour == MPI_PROC_NULL)
            continue;
        check(fabricast_agent_connect(agent, cards[it->neighbour].bytes,
                                      cards[it->neighbour].length, TIMEOUT, &peer));
        check(fabricast_card_info_of(cards[it->neighbour].bytes, cards[it->neighbour].length, &info,
                                     sizeof info));
        memcpy(it->identity, info.identity, sizeof it->identity);
        check(fabricast_agent_route_to(agent, peer, "field", region, TIMEOUT, &it->route));
        check(fabricast_strided_tile(&it->rows, sizeof it->rows, FABRICAST_ORDER_C,
                                     sizeof(double), 2, it->tile, extents, it->edge, extents,
                                     opposite->halo));
    }
    free(cards);
}

/* A neighbour that ended sends nothing more. Other agents, such as that of
 * `fabricast paths --explain`, may come and go. */
static void check_neighbour(const fabricast_agent_event *event)
{
    int side;

    for (side = 0; side < SIDES; side++) {
        const struct side *it = &sides[side];
        if (it->route != NULL && memcmp(it->identity, event->from, sizeof it->identity) == 0) {
            fprintf(stderr, "rank %d: wait for rank %d failed: it has left\n", rank, it->neighbour);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

static void exchange_by_puts(double *field, int step)
{
    const uint64_t offset = (uint64_t)(step % 2) * area * sizeof(double);
    const fabricast_notice notice = {sizeof notice, (uint64_t)step, NULL, 0};
    fabricast_token tokens[SIDES];
    fabricast_agent_event event;
    unsigned neighbours = 0;
    int side;

    (void)field; /* both fields are one region */
    for (side = 0; side < SIDES; side++) {
        fabricast_strided put = sides[side].rows;
        if (sides[side].route == NULL)
            continue;
        put.from += offset;
        put.to += offset;
        check(fabricast_agent_put_strided(agent, sides[side].route, &put, &notice,
                                          &tokens[neighbours++]));
    }
    for (side = 0; side < (int)neighbours; side++)
        check(fabricast_agent_wait(agent, tokens[side], TIMEOUT, NULL));
    while (arrived[step % 2] < neighbours) {
        check(fabricast_agent_next_event(agent, TIMEOUT, &event, sizeof event));
        if (event.kind == FABRICAST_AGENT_EVENT_NOTICE)
            arrived[event.tag % 2]++;
        else if (event.kind == FABRICAST_AGENT_EVENT_LEFT)
            check_neighbour(&event);
    }
    arrived[step % 2] = 0;
}

static void exchange_by_mpi(double *field, int step)
{
    MPI_Request requests[2 * SIDES];
    MPI_Status statuses[2 * SIDES];
    int side;

    (void)step;
    for (side = 0; side < SIDES; side++)
        MPI_Irecv(field, 1, sides[side].receive, sides[side].neighbour, side, MPI_COMM_WORLD,
                  &requests[side]);
    for (side = 0; side < SIDES; side++)
        MPI_Isend(field, 1, sides[side].send, sides[side].neighbour, side ^ 1, MPI_COMM_WORLD,
                  &requests[SIDES + side]);
    MPI_Waitall(2 * SIDES, requests, statuses);
}

/* A cell of this rank before the first step, different for each place of the whole field. */
static double value(const int place[2], int row, int column)
{
    return 1 + ((place[0] * rows + row) * 37 + (place[1] * columns + column) * 11) % 101;
}

/* Wrong cells of the halos after the first exchange. */
static unsigned long wrong_halos(const double *field, const int place[2])
{
    unsigned long wrong = 0;
    uint64_t row, column;
    int side;

    for (side = 0; side < SIDES; side++) {
        const struct side *it = &sides[side];
        for (row = it->halo[0]; it->route != NULL && row < it->halo[0] + it->tile[0]; row++)
            for (column = it->halo[1]; column < it->halo[1] + it->tile[1]; column++)
                wrong += field[row * extents[1] + column] != value(place, (int)row, (int)column);
    }
    return wrong;
}

/* By which paths rank 0 reaches its neighbours, and why not by better ones. */
static void print_paths(void)
{
    const char *path, *fallback;
    int side;

    for (side = 0; side < SIDES; side++) {
        if (sides[side].route == NULL)
            continue;
        check(fabricast_route_path(sides[side].route, &path));
        check(fabricast_route_fallback(sides[side].route, &fallback));
        printf("halo (C): rank 0 to rank %d by %s%s%s\n", sides[side].neighbour, path,
               *fallback != 0 ? "; no better path: " : "", fallback);
    }
}

/* Computes all steps from the beginning. Returns the seconds of an exchange. */
static double run(double *fields, const int place[2], void (*exchange)(double *, int),
                  unsigned long *mistakes)
{
    double seconds = 0;
    int step, row, column;

    memset(fields, 0, 2 * area * sizeof(double));
    for (row = 1; row <= rows; row++)
        for (column = 1; column <= columns; column++)
            fields[(size_t)row * extents[1] + column] = value(place, row, column);
    MPI_Barrier(MPI_COMM_WORLD);
    for (step = 0; step < steps; step++) {
        double *from = fields + (size_t)(step % 2) * area, *to = fields + (size_t)(1 - step % 2) * area;
        const double start = MPI_Wtime();

        exchange(from, step);
        seconds += MPI_Wtime() - start;
        if (step == 0)
            *mistakes += wrong_halos(from, place);
        for (row = 1; row <= rows; row++) {
            const double *here = from + (size_t)row * extents[1];
            const double *above = here - extents[1], *below = here + extents[1];
            for (column = 1; column <= columns; column++)
                to[here - from + column] =
                    0.25 * (above[column] + below[column] + here[column - 1] + here[column + 1]);
        }
    }
    return seconds / steps;
}

static int number(int count, char **arguments, int which, int otherwise)
{
    const int found = which < count ? atoi(arguments[which]) : 0;
    return found > 0 ? found : otherwise;
}

int main(int count, char **arguments)
{
    int dimensions[2] = {0, 0}, periods[2] = {0, 0}, place[2], side;
    unsigned long mistakes = 0, all;
    double seconds[2], slowest[2], *fields, *expected;
    fabricast_memory *memory;
    fabricast_region *region;
    MPI_Comm grid;
    size_t length;
    void *address;

    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    check_launcher();
    rows = number(count, arguments, 1, 256);
    columns = number(count, arguments, 2, 256);
    steps = number(count, arguments, 3, 100);
    MPI_Dims_create(ranks, 2, dimensions);
    MPI_Cart_create(MPI_COMM_WORLD, 2, dimensions, periods, 0, &grid);
    MPI_Cart_coords(grid, rank, 2, place);
    extents[0] = (uint64_t)rows + 2;
    extents[1] = (uint64_t)columns + 2;
    area = extents[0] * extents[1];
    describe_sides(grid);

    start_agent();
    check(fabricast_memory_allocate("host", 2 * area * sizeof(double), &memory));
    check(fabricast_memory_address(memory, &address, &length));
    check(fabricast_region_register(agent, memory, FABRICAST_WRITE, &region));
    check(fabricast_agent_publish(agent, "field", region));
    connect_neighbours(region);
    if (rank == 0)
        print_paths();
    fields = address;

    seconds[0] = run(fields, place, exchange_by_puts, &mistakes);
    expected = memcpy(allocate(length), fields, length);
    seconds[1] = run(fields, place, exchange_by_mpi, &mistakes);
    mistakes += memcmp(expected, fields, length) != 0; /* bit by bit */
    free(expected);

    MPI_Reduce(seconds, slowest, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Allreduce(&mistakes, &all, 1, MPI_UNSIGNED_LONG, MPI_SUM, MPI_COMM_WORLD);
    check(fabricast_agent_close(agent, TIMEOUT));
    for (side = 0; side < SIDES; side++) {
        if (sides[side].route != NULL)
            check(fabricast_route_close(sides[side].route));
        MPI_Type_free(&sides[side].send);
        MPI_Type_free(&sides[side].receive);
    }
    check(fabricast_region_close(region));
    check(fabricast_memory_close(memory, TIMEOUT));
    if (rank == 0) {
        printf("halo (C): exchange by puts %.1f us, by MPI %.1f us\n", 1e6 * slowest[0],
               1e6 * slowest[1]);
        printf("halo (C): %d x %d cells on each of %d ranks, %d steps: %s\n", rows, columns, ranks,
               steps, all == 0 ? "ok" : "wrong cells");
    }
    MPI_Comm_free(&grid);
    MPI_Finalize();
    return all != 0;
}
