/*
 * Communication domains: each operation among processes, in place and with unequal blocks; ranks that
 * call something else, are late, or are killed. Parameter stores.
 */
#include "check.h"

#define RANKS 3
/* Elements of a block: in one step, and in several chunks. */
static const size_t counts[] = {1, 7, 100003};

static uint32_t rank, ranks;
static fabricast_domain *domain;

static fabricast_domain_options options_of(const char *job)
{
    fabricast_domain_options options;

    DONE(fabricast_domain_options_init(&options, sizeof options));
    options.job = job;
    options.timeout = LONG;
    return options;
}

static void join_as(uint32_t number, uint32_t size, const char *job)
{
    fabricast_domain_options options = options_of(job);

    DONE(fabricast_domain_join(size, number, &options, &domain));
    DONE(fabricast_domain_rank(domain, &rank));
    DONE(fabricast_domain_size(domain, &ranks));
    CHECK(rank == number && ranks == size);
}

/* Runs each rank in a process. */
static void in_ranks(uint32_t size, void (*run)(uint32_t number))
{
    pid_t children[RANKS];
    uint32_t number;

    for (number = 0; number < size; number++) {
        fflush(NULL);
        children[number] = fork();
        CHECK(children[number] >= 0);
        if (children[number] == 0) {
            alarm(300);
            run(number);
            CHECK(fabricast_open_handles() == 0);
            exit(0);
        }
    }
    for (number = 0; number < size; number++)
        finish(children[number]);
}

/* What a rank has at an index. */
static double value(uint32_t of, size_t at)
{
    return (double)(of + 1) * 1000 + (double)(at % 997);
}

static double sum(size_t at)
{
    double total = 0;
    uint32_t other;

    for (other = 0; other < ranks; other++)
        total += value(other, at);
    return total;
}

static double *elements(size_t count)
{
    double *made = malloc((count + 1) * sizeof *made);
    size_t at;

    CHECK(made != NULL);
    for (at = 0; at <= count; at++)
        made[at] = -1;
    return made;
}

static double *own_elements(size_t count)
{
    double *made = elements(count);
    size_t at;

    for (at = 0; at < count; at++)
        made[at] = value(rank, at);
    return made;
}

#define F64 FABRICAST_TYPE_F64

static void reductions(size_t count)
{
    size_t all = count * ranks, at;
    double *input = own_elements(all), *output = elements(all), *place = own_elements(all);

    DONE(fabricast_domain_all_reduce(domain, input, output, count, F64, FABRICAST_REDUCE_SUM, LONG));
    DONE(fabricast_domain_all_reduce(domain, NULL, place, count, F64, FABRICAST_REDUCE_SUM, LONG));
    for (at = 0; at < count; at++)
        CHECK(output[at] == sum(at) && place[at] == sum(at) && input[at] == value(rank, at));
    CHECK(output[count] == -1);
    free(place);
    place = own_elements(all);
    DONE(fabricast_domain_reduce(domain, rank == 1 ? NULL : input, rank == 1 ? place : NULL, count, F64,
                                 FABRICAST_REDUCE_MAX, 1, LONG));
    for (at = 0; at < count; at++)
        CHECK(place[at] == value(rank == 1 ? ranks - 1 : rank, at));
    free(place);
    place = own_elements(all);
    DONE(fabricast_domain_reduce_scatter(domain, input, output, count, F64, FABRICAST_REDUCE_SUM,
                                         LONG));
    DONE(fabricast_domain_reduce_scatter(domain, NULL, place, count, F64, FABRICAST_REDUCE_SUM, LONG));
    for (at = 0; at < count; at++)
        CHECK(output[at] == sum(rank * count + at) && place[at] == output[at]);
    free(input);
    free(output);
    free(place);
}

static void moves(size_t count)
{
    size_t all = count * ranks, at;
    double *own = own_elements(all), *output = elements(all), *place = elements(all);

    DONE(fabricast_domain_broadcast(domain, rank == 2 % ranks ? own : output, count, F64, 2 % ranks,
                                    LONG));
    for (at = 0; at < count; at++)
        CHECK(rank == 2 % ranks || output[at] == value(2 % ranks, at));
    DONE(fabricast_domain_all_gather(domain, own, output, count, F64, LONG));
    memcpy(place + rank * count, own, count * sizeof *own);
    DONE(fabricast_domain_all_gather(domain, NULL, place, count, F64, LONG));
    for (at = 0; at < all; at++)
        CHECK(output[at] == value((uint32_t)(at / count), at % count) && place[at] == output[at]);
    memcpy(place, own, all * sizeof *own);
    DONE(fabricast_domain_all_to_all(domain, own, output, count, F64, LONG));
    DONE(fabricast_domain_all_to_all(domain, NULL, place, count, F64, LONG));
    for (at = 0; at < all; at++)
        CHECK(output[at] == value((uint32_t)(at / count), rank * count + at % count) &&
              place[at] == output[at]);
    DONE(fabricast_domain_gather(domain, own, rank == 0 ? output : NULL, count, F64, 0, LONG));
    memcpy(place, own, count * sizeof *own);
    DONE(fabricast_domain_gather(domain, rank == 0 ? NULL : own, rank == 0 ? place : NULL, count, F64, 0,
                                 LONG));
    for (at = 0; rank == 0 && at < all; at++)
        CHECK(output[at] == value((uint32_t)(at / count), at % count) && place[at] == output[at]);
    DONE(fabricast_domain_scatter(domain, rank == 0 ? own : NULL, output, count, F64, 0, LONG));
    for (at = 0; at < count; at++)
        CHECK(output[at] == value(0, rank * count + at));
    DONE(fabricast_domain_scatter(domain, rank == 0 ? own : NULL, rank == 0 ? NULL : output, count, F64,
                                  0, LONG));
    CHECK(own[all] == -1 && output[all] == -1 && place[all] == -1);
    free(own);
    free(output);
    free(place);
}

/* Rank n has n + 1 blocks' worth of elements, behind a gap of one. */
static void unequal(size_t count)
{
    size_t sizes[RANKS], offsets[RANKS], send[RANKS], total = 0, sent = 0, at;
    size_t own_count = count * (rank + 1);
    double *own, *output, *place;
    uint32_t other;

    for (other = 0; other < ranks; other++) {
        sizes[other] = count * (other + 1);
        offsets[other] = total + other;
        total += sizes[other];
        send[other] = own_count;
        sent += own_count;
    }
    own = own_elements(sent > total ? sent : total);
    output = elements(total + ranks);
    place = elements(total + ranks);
    DONE(fabricast_domain_all_gather_unequal(domain, own, own_count, output, sizes, offsets, F64, LONG));
    memcpy(place + offsets[rank], own, own_count * sizeof *own);
    DONE(fabricast_domain_all_gather_unequal(domain, NULL, own_count, place, sizes, offsets, F64, LONG));
    for (other = 0; other < ranks; other++) {
        for (at = 0; at < sizes[other]; at++)
            CHECK(output[offsets[other] + at] == value(other, at) &&
                  place[offsets[other] + at] == value(other, at));
        CHECK(output[offsets[other] + sizes[other]] == -1);
    }
    /* Each rank sends as many elements to all as it has. */
    DONE(fabricast_domain_all_to_all_unequal(domain, own, send, NULL, output, sizes, NULL, F64, LONG));
    for (other = 0, at = 0; other < ranks; at += sizes[other++])
        CHECK(output[at] == value(other, sizes[other] * rank));
    DONE(fabricast_domain_gather_unequal(domain, own, own_count, rank == 1 ? output : NULL,
                                         rank == 1 ? sizes : NULL, NULL, F64, 1, LONG));
    for (other = 0, at = 0; rank == 1 && other < ranks; at += sizes[other++])
        CHECK(output[at] == value(other, 0) && output[at + sizes[other] - 1] == value(other, sizes[other] - 1));
    DONE(fabricast_domain_scatter_unequal(domain, rank == 1 ? own : NULL, rank == 1 ? sizes : NULL, NULL,
                                          output, own_count, F64, 1, LONG));
    for (at = 0, sent = 0; at < rank; at++)
        sent += sizes[at];
    CHECK(output[0] == value(1, sent) && output[own_count - 1] == value(1, sent + own_count - 1));
    DONE(fabricast_domain_reduce_scatter_unequal(domain, own, output, sizes, NULL, F64,
                                                 FABRICAST_REDUCE_SUM, LONG));
    for (at = 0; at < own_count; at++)
        CHECK(output[at] == sum(sent + at));
    free(own);
    free(output);
    free(place);
}

static void types(void)
{
    unsigned char byte = (unsigned char)(200 + rank);
    int64_t number = -(int64_t)rank - 1;
    float mean = (float)rank;

    DONE(fabricast_domain_all_reduce(domain, NULL, &byte, 1, FABRICAST_TYPE_U8, FABRICAST_REDUCE_MIN,
                                     LONG));
    DONE(fabricast_domain_all_reduce(domain, NULL, &number, 1, FABRICAST_TYPE_I64,
                                     FABRICAST_REDUCE_PRODUCT, LONG));
    DONE(fabricast_domain_all_reduce(domain, NULL, &mean, 1, FABRICAST_TYPE_F32, FABRICAST_REDUCE_MEAN,
                                     LONG));
    CHECK(byte == 200 && number == -6 && mean == 1);
}

/* The domain goes on after each of these. */
static void invalid(void)
{
    double element = 1;
    fabricast_domain *none = NULL;
    fabricast_agent *agent = NULL;
    uint32_t found;

    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_domain_barrier(none, LONG));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_agent_progress((fabricast_agent *)domain, NULL));
    CHECK(agent == NULL);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_all_reduce(domain, NULL, NULL, 1, F64, FABRICAST_REDUCE_SUM, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_all_reduce(domain, NULL, &element, 1, 13, FABRICAST_REDUCE_SUM, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_all_reduce(domain, NULL, &element, 1, F64, 0, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_all_reduce(domain, NULL, &element, SIZE_MAX, F64, FABRICAST_REDUCE_SUM, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_all_gather(domain, NULL, &element, SIZE_MAX / 4, F64, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_domain_broadcast(domain, &element, 1, F64, ranks, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_all_gather_unequal(domain, &element, 1, &element, NULL, NULL, F64, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_domain_gather(domain, NULL, &element, 1, F64, rank == 0 ? 1 : 0, LONG));
    CHECK(fabricast_error_ranks(&found, 1) == 0);
    DONE(fabricast_domain_broadcast(domain, NULL, 0, F64, 0, LONG));
}

static void all_operations(uint32_t number)
{
    size_t index;

    join_as(number, RANKS, "operations");
    DONE(fabricast_domain_barrier(domain, LONG));
    for (index = 0; index < sizeof counts / sizeof *counts; index++) {
        reductions(counts[index]);
        moves(counts[index]);
        unequal(counts[index]);
    }
    types();
    invalid();
    types();
    DONE(fabricast_domain_close(domain, LONG));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_domain_barrier(domain, LONG));
}

static void different_calls(uint32_t number)
{
    double pair[2] = {1, 2};
    uint32_t found[4] = {9, 9, 9, 9};

    join_as(number, 2, "different");
    EXPECT(FABRICAST_E_MISMATCH, fabricast_domain_all_reduce(domain, NULL, pair, 1 + rank, F64,
                                                             FABRICAST_REDUCE_SUM, LONG));
    CHECK(strstr(fabricast_error_message(), "rank 0 calls all-reduce of 1 f64 (sum)") != NULL);
    CHECK(fabricast_error_ranks(NULL, 0) == 2 && fabricast_error_ranks(found, 4) == 2);
    CHECK(found[0] + found[1] == 1 && found[2] == 9);
    /* The domain is over. */
    EXPECT(FABRICAST_E_MISMATCH, fabricast_domain_barrier(domain, LONG));
    EXPECT(FABRICAST_E_MISMATCH, fabricast_domain_close(domain, LONG));
}

static void late_rank(uint32_t number)
{
    uint32_t found = 9;

    join_as(number, 2, "late");
    if (number == 1) {
        usleep(300000);
        EXPECT(FABRICAST_E_DEADLINE_EXCEEDED, fabricast_domain_barrier(domain, LONG));
    } else {
        EXPECT(FABRICAST_E_DEADLINE_EXCEEDED, fabricast_domain_barrier(domain, FABRICAST_MILLISECONDS(50)));
    }
    CHECK(fabricast_error_ranks(&found, 1) == 1 && found == 1);
    DONE(fabricast_domain_close(domain, FABRICAST_NOW));
}

static void left_rank(uint32_t number)
{
    join_as(number, 2, "left");
    if (number == 0)
        EXPECT(FABRICAST_E_CLOSED, fabricast_domain_barrier(domain, LONG));
    DONE(fabricast_domain_close(domain, FABRICAST_NOW));
    /* Its end is another failure. */
    if (number == 1)
        usleep(500000);
}

static void learnt_parameters(uint32_t number)
{
    enum { COUNT = 1 << 16, OPERATIONS = 40 };
    fabricast_parameters parameters;
    float *numbers = calloc(COUNT, sizeof *numbers);
    char *json;
    int done;

    join_as(number, 2, "learnt");
    for (done = 0; done < OPERATIONS; done++)
        DONE(fabricast_domain_all_reduce(domain, NULL, numbers, COUNT, FABRICAST_TYPE_F32,
                                         FABRICAST_REDUCE_MAX, LONG));
    DONE(fabricast_domain_parameters(domain, FABRICAST_OPERATION_ALL_REDUCE, COUNT * sizeof *numbers,
                                     FABRICAST_TYPE_F32, &parameters));
    CHECK(parameters.alpha == 1000);
    DONE(fabricast_domain_freeze(domain, 1));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_domain_freeze(domain, 2));
    DONE(fabricast_domain_save(domain, "here", &json));
    CHECK(number == 1 || strstr(json, "\"all-reduce\"") != NULL);
    EXPECT(FABRICAST_E_MALFORMED, fabricast_domain_load(domain, "there", json, strlen(json)));
    DONE(fabricast_domain_load(domain, "here", json, strlen(json)));
    DONE(fabricast_text_free(json));
    DONE(fabricast_domain_all_reduce(domain, NULL, numbers, COUNT, FABRICAST_TYPE_F32,
                                     FABRICAST_REDUCE_MAX, LONG));
    DONE(fabricast_domain_close(domain, LONG));
    free(numbers);
}

static void options_differ(uint32_t number)
{
    fabricast_domain_options options = options_of("differ");

    options.window += number;
    EXPECT(FABRICAST_E_VERSION_MISMATCH, fabricast_domain_join(2, number, &options, &domain));
    CHECK(domain == NULL);
}

/* A domain of two ranks of a larger job. */
static void some_ranks(uint32_t number)
{
    static const uint32_t members[] = {3, 5};
    fabricast_domain_options options = options_of("some");
    int32_t one = 1;

    options.ranks = members;
    options.rank_count = 2;
    options.topology_hash = 77;
    options.is_fixed = 1;
    options.parameters.algorithm = FABRICAST_ALGORITHM_TWO_STEP;
    DONE(fabricast_domain_join(8, number, &options, &domain));
    DONE(fabricast_domain_all_reduce(domain, NULL, &one, 1, FABRICAST_TYPE_I32, FABRICAST_REDUCE_SUM,
                                     LONG));
    CHECK(one == 2);
    DONE(fabricast_domain_close(domain, LONG));
}

static void launched(uint32_t number)
{
    fabricast_domain_options options = options_of("mine");
    int32_t one = 1;

    CHECK(number == 0);
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_domain_join_launched(&options, &domain));
    DONE(fabricast_domain_join_launched(NULL, &domain));
    DONE(fabricast_domain_all_reduce(domain, NULL, &one, 1, FABRICAST_TYPE_I32, FABRICAST_REDUCE_SUM,
                                     LONG));
    CHECK(one == 1);
    DONE(fabricast_domain_close(domain, LONG));
    DONE(fabricast_domain_close(NULL, LONG));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_domain_join(1, 1, NULL, &domain));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_domain_join(0, 0, NULL, &domain));
}

/* A rank that is killed is named on the others. */
static void killed(void)
{
    int in, out, in_2, out_2;
    uint32_t found = 9;
    pid_t child, other;
    void run_1(int from, int to), run_2(int from, int to);

    child = start(run_1, &in, &out);
    other = start(run_2, &in_2, &out_2);
    /* The parent uses the library after the forks. */
    join_as(0, 3, "killed");
    await_signal(in);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    EXPECT(FABRICAST_E_RANK_FAILED, fabricast_domain_barrier(domain, LONG));
    CHECK(fabricast_error_ranks(&found, 1) == 1 && found == 1);
    CHECK(strstr(fabricast_error_message(), "rank 1") != NULL);
    DONE(fabricast_domain_close(domain, FABRICAST_NOW));
    finish(other);
}

void run_1(int from, int to)
{
    (void)from;
    join_as(1, 3, "killed");
    signal_peer(to);
    pause();
}

void run_2(int from, int to)
{
    (void)from;
    (void)to;
    join_as(2, 3, "killed");
    EXPECT(FABRICAST_E_RANK_FAILED, fabricast_domain_barrier(domain, LONG));
    DONE(fabricast_domain_close(domain, FABRICAST_NOW));
}

#define BYTES ((uint64_t)1 << 24)

static fabricast_param_store *attach(uint32_t number, uint32_t size, uint32_t point)
{
    fabricast_domain_options options = options_of("store");
    fabricast_param_store *store;

    options.first_alpha = 900;
    options.aggregation_point = point;
    options.aggregation = FABRICAST_AGGREGATION_PERCENTILE;
    options.round_timeout = LONG;
    DONE(fabricast_param_store_attach(size, number, &options, &store));
    return store;
}

/* Two paths of 300 and 30 GB/s. */
static fabricast_param_entry execute(fabricast_param_store *store)
{
    fabricast_param_entry entry;
    fabricast_exec_stat stat;

    DONE(fabricast_param_store_enter(store, FABRICAST_OPERATION_ALL_GATHER, BYTES, FABRICAST_TYPE_U8, LONG,
                                     &entry));
    CHECK(entry.operation == FABRICAST_OPERATION_ALL_GATHER && entry.type == FABRICAST_TYPE_U8);
    CHECK(entry.bytes == BYTES);
    stat.fast_bytes = BYTES * entry.parameters.alpha / 1000;
    stat.second_bytes = BYTES - stat.fast_bytes;
    stat.fast_time = stat.fast_bytes / 300;
    stat.second_time = stat.second_bytes / 30;
    stat.success = 1;
    DONE(fabricast_param_store_record(store, &entry, &stat));
    return entry;
}

static void learn(uint32_t number, uint32_t point)
{
    fabricast_param_store *store = attach(number, 2, point);
    fabricast_param_entry entry;
    fabricast_parameters parameters;
    uint64_t operation, is_lost;
    char *json;

    for (operation = 1; operation <= 30; operation++) {
        entry = execute(store);
        CHECK(entry.number == operation);
    }
    CHECK(entry.parameters.alpha > 880 && entry.parameters.alpha < 930);
    DONE(fabricast_param_store_parameters(store, FABRICAST_OPERATION_ALL_GATHER, BYTES - 1,
                                          FABRICAST_TYPE_U8, &parameters));
    CHECK(memcmp(&parameters, &entry.parameters, sizeof parameters) == 0);
    DONE(fabricast_param_store_writer_lost(store, &is_lost));
    CHECK(number == 1 || is_lost == 0);
    DONE(fabricast_param_store_save(store, "two paths", &json));
    CHECK(strstr(json, "\"all-gather\"") != NULL);
    EXPECT(FABRICAST_E_MALFORMED, fabricast_param_store_load(store, "another", json, strlen(json)));
    DONE(fabricast_param_store_load(store, "two paths", json, strlen(json)));
    DONE(fabricast_text_free(json));
    DONE(fabricast_param_store_freeze(store, 1));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_param_store_freeze(store, 2));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT, fabricast_param_store_record(store, NULL, NULL));
    EXPECT(FABRICAST_E_INVALID_ARGUMENT,
           fabricast_param_store_enter(store, 0, BYTES, FABRICAST_TYPE_U8, LONG, &entry));
    CHECK(entry.number == 0);
    if (number == 1) {
        /* Rank 0 leaves. */
        do
            DONE(fabricast_param_store_writer_lost(store, &is_lost));
        while (is_lost == 0 && usleep(1000) == 0);
        execute(store);
    }
    DONE(fabricast_param_store_leave(store));
    EXPECT(FABRICAST_E_BAD_HANDLE, fabricast_param_store_leave(store));
}

static void learn_at_entrances(uint32_t number)
{
    learn(number, FABRICAST_AGGREGATE_AT_NEXT_ENTRANCE);
}

static void learn_in_rounds(uint32_t number)
{
    learn(number, FABRICAST_AGGREGATE_IN_ROUNDS);
}

int main(void)
{
    in_ranks(RANKS, all_operations);
    in_ranks(2, different_calls);
    in_ranks(2, late_rank);
    in_ranks(2, left_rank);
    in_ranks(2, learnt_parameters);
    in_ranks(2, options_differ);
    in_ranks(2, some_ranks);
    in_ranks(1, launched);
    in_ranks(2, learn_at_entrances);
    in_ranks(2, learn_in_rounds);
    killed();
    CHECK(fabricast_open_handles() == 0);
    puts("collectives: ok");
    return 0;
}
