/* program RANK RANKS ID COMMAND...: a rank of an NCCL program, which knows nothing of what is preloaded.
 *
 * Each command prints a line. A wrong result or code ends the program with 1. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl.h"

#define NEED(code)                                                             \
    do {                                                                       \
        int found = (code);                                                    \
        if (found != 0) {                                                      \
            printf("%s:%d: code %d\n", #code, __LINE__, found);                \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

static ncclComm_t comm;
static int rank, ranks;
static cudaStream_t stream = (cudaStream_t)5;
static char *from, *to;
enum { SPACE = 8 << 20 };

/* Small integers, so that all types have them and all sums. */
static double value(int of, size_t at) { return (double)((at * 7 + (size_t)of * 3) % 3 + 1); }

static void fill(int type, size_t count) {
    for (size_t at = 0; at < count; at++) element_put(type, from, at, value(rank, at));
    memset(to, 0xee, SPACE);
}

static double combined(int op, size_t at) {
    double sum = value(0, at);
    for (int other = 1; other < ranks; other++) {
        double next = value(other, at);
        switch (op) {
            case ncclProd: sum *= next; break;
            case ncclMax: sum = sum > next ? sum : next; break;
            case ncclMin: sum = sum < next ? sum : next; break;
            default: sum += next;
        }
    }
    return op == ncclAvg ? sum / ranks : sum;
}

static void expect(const char *what, int type, const void *all, size_t at, double expected) {
    unsigned char wanted[8];
    element_put(type, wanted, 0, expected);
    double found = element_get(type, all, at);
    if (found != element_get(type, wanted, 0)) {
        printf("%s of type %d: element %zu is %g, not %g\n", what, type, at, found, expected);
        exit(1);
    }
}

static void reductions(int type, int op, size_t count) {
    int root = (int)count % ranks;
    fill(type, count);
    NEED(ncclAllReduce(from, to, count, type, op, comm, stream));
    for (size_t at = 0; at < count; at++) expect("all-reduce", type, to, at, combined(op, at));
    fill(type, count);
    NEED(ncclReduce(from, to, count, type, op, root, comm, stream));
    for (size_t at = 0; rank == root && at < count; at++) expect("reduce", type, to, at, combined(op, at));
    fill(type, count * (size_t)ranks);
    NEED(ncclReduceScatter(from, to, count, type, op, comm, stream));
    for (size_t at = 0; at < count; at++) {
        expect("reduce-scatter", type, to, at, combined(op, (size_t)rank * count + at));
    }
    /* In place. */
    fill(type, count);
    NEED(ncclAllReduce(from, from, count, type, op, comm, stream));
    for (size_t at = 0; at < count; at++) expect("all-reduce in place", type, from, at, combined(op, at));
    fill(type, count * (size_t)ranks);
    char *block = from + (size_t)rank * count * element_bytes(type);
    NEED(ncclReduceScatter(from, block, count, type, op, comm, stream));
    for (size_t at = 0; at < count; at++) {
        expect("reduce-scatter in place", type, block, at, combined(op, (size_t)rank * count + at));
    }
}

static void moves(int type, size_t count) {
    int root = (int)count % ranks;
    size_t all = count * (size_t)ranks, own = (size_t)rank * count;
    fill(type, count);
    NEED(ncclAllGather(from, to, count, type, comm, stream));
    for (size_t at = 0; at < all; at++) expect("all-gather", type, to, at, value((int)(at / count), at % count));
    memcpy(to + own * element_bytes(type), from, count * element_bytes(type));
    NEED(ncclAllGather(to + own * element_bytes(type), to, count, type, comm, stream));
    for (size_t at = 0; at < all; at++) {
        expect("all-gather in place", type, to, at, value((int)(at / count), at % count));
    }
    fill(type, count);
    NEED(ncclBroadcast(from, to, count, type, root, comm, stream));
    for (size_t at = 0; at < count; at++) expect("broadcast", type, to, at, value(root, at));
    NEED(ncclBcast(from, count, type, root, comm, stream));
    for (size_t at = 0; at < count; at++) expect("bcast", type, from, at, value(root, at));
    fill(type, all);
    NEED(ncclAlltoAll(from, to, count, type, comm, stream));
    for (size_t at = 0; at < all; at++) {
        expect("all-to-all", type, to, at, value((int)(at / count), own + at % count));
    }
    fill(type, count);
    NEED(ncclGather(from, to, count, type, root, comm, stream));
    for (size_t at = 0; rank == root && at < all; at++) {
        expect("gather", type, to, at, value((int)(at / count), at % count));
    }
    fill(type, all);
    NEED(ncclScatter(from, to, count, type, root, comm, stream));
    for (size_t at = 0; at < count; at++) expect("scatter", type, to, at, value(root, own + at));
}

static void all_operations(void) {
    static const size_t counts[] = {1, 1000, 9999};
    for (int type = 0; type < ncclNumTypes; type++) {
        for (int number = 0; number < 3; number++) moves(type, counts[number]);
        if (type == ncclFloat8e4m3) continue;
        for (int op = 0; op < ncclNumOps; op++) {
            if (op != ncclAvg || (ranks & (ranks - 1)) == 0) reductions(type, op, op == ncclSum ? 9999 : 1000);
        }
    }
    moves(ncclFloat32, 100000);
}

static void reduce_often(int times) {
    for (int number = 0; number < times; number++) {
        fill(ncclFloat32, 1000);
        NEED(ncclAllReduce(from, to, 1000, ncclFloat32, ncclSum, comm, stream));
        for (size_t at = 0; at < 1000; at++) expect("all-reduce", ncclFloat32, to, at, combined(ncclSum, at));
    }
}

/* Operations that depend on each other, so that their order matters, in nested groups. */
static void groups(void) {
    for (int number = 0; number < 20; number++) {
        fill(ncclFloat32, 100);
        float *one = (float *)from, *two = (float *)to, *three = two + 1000;
        NEED(ncclGroupStart());
        NEED(ncclGroupStart());
        NEED(ncclAllReduce(one, two, 100, ncclFloat32, ncclSum, comm, stream));
        NEED(ncclGroupEnd());
        NEED(ncclBroadcast(one, three, 100, ncclFloat32, 1, comm, stream));
        NEED(ncclGroupEnd());
        for (size_t at = 0; at < 100; at++) {
            expect("all-reduce of a group", ncclFloat32, two, at, combined(ncclSum, at));
            expect("broadcast of a group", ncclFloat32, three, at, value(1, at));
        }
        NEED(ncclGroupStart());
        NEED(ncclAllReduce(one, two, 100, ncclFloat32, ncclMax, comm, stream));
        NEED(ncclGroupEnd());
        for (size_t at = 0; at < 100; at++) expect("one of a group", ncclFloat32, two, at, combined(ncclMax, at));
    }
}

/* As programs write an all-to-all; the last one has unequal blocks. */
static void send_and_receive(void) {
    for (int number = 0; number < 20; number++) {
        size_t count = number == 19 ? 50 : 100, all = 100 * (size_t)ranks;
        fill(ncclInt32, all);
        NEED(ncclGroupStart());
        for (int peer = 0; peer < ranks; peer++) {
            NEED(ncclSend((int *)from + 100 * peer, count, ncclInt32, peer, comm, stream));
            NEED(ncclRecv((int *)to + 100 * peer, count, ncclInt32, peer, comm, stream));
        }
        NEED(ncclGroupEnd());
        for (size_t at = 0; at < all; at++) {
            size_t own = 100 * (size_t)rank + at % 100;
            if (at % 100 < count) expect("sends", ncclInt32, to, at, value((int)(at / 100), own));
        }
    }
}

static void *abort_later(void *unused) {
    usleep(100000);
    NEED(ncclCommAbort(comm));
    return unused;
}

static void print_failure(int code) {
    int asynchronous = 0;
    NEED(ncclCommGetAsyncError(comm, &asynchronous));
    printf("code %d, asynchronous error %d\n", code, asynchronous);
}

static void initialize(const char *name, ncclConfig_t *config) {
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "%s", name);
    NEED(config ? ncclCommInitRankConfig(&comm, ranks, id, rank, config) : ncclCommInitRank(&comm, ranks, id, rank));
}

static void run(const char *command, const char *id) {
    char other[100];
    if (strcmp(command, "all") == 0) {
        all_operations();
    } else if (strncmp(command, "reduce:", 7) == 0) {
        reduce_often(atoi(command + 7));
    } else if (strcmp(command, "groups") == 0) {
        groups();
    } else if (strcmp(command, "sends") == 0) {
        send_and_receive();
    } else if (strcmp(command, "capture") == 0) {
        stream = (cudaStream_t)7;
        reduce_often(10);
        stream = (cudaStream_t)5;
    } else if (strcmp(command, "custom") == 0) {
        ncclRedOp_t op;
        NEED(ncclRedOpCreatePreMulSum(&op, NULL, ncclFloat32, 0, comm));
        fill(ncclFloat32, 100);
        NEED(ncclAllReduce(from, to, 100, ncclFloat32, op, comm, stream));
        for (size_t at = 0; at < 100; at++) expect("custom", ncclFloat32, to, at, combined(ncclSum, at));
    } else if (strcmp(command, "split") == 0) {
        ncclComm_t whole = comm;
        int all = ranks, own = rank;
        NEED(ncclCommSplit(whole, rank % 2, -rank, &comm, NULL));
        NEED(ncclCommCount(comm, &ranks));
        NEED(ncclCommUserRank(comm, &rank));
        reduce_often(40);
        NEED(ncclCommDestroy(comm));
        comm = whole, ranks = all, rank = own;
    } else if (strcmp(command, "again") == 0) {
        NEED(ncclCommFinalize(comm));
        NEED(ncclCommDestroy(comm));
        snprintf(other, sizeof other, "%s-again", id);
        /* As PyTorch does. */
        NEED(ncclGroupStart());
        initialize(other, NULL);
        NEED(ncclGroupEnd());
    } else if (strcmp(command, "non-blocking") == 0) {
        ncclConfig_t config = {sizeof config, 0xcafebeef, 22800, 0};
        NEED(ncclCommDestroy(comm));
        snprintf(other, sizeof other, "%s-config", id);
        initialize(other, &config);
    } else if (strcmp(command, "abort") == 0) {
        /* Rank 0 waits for the others, which never come. */
        if (rank == 0) {
            pthread_t thread;
            NEED(pthread_create(&thread, NULL, abort_later, NULL));
            int code = ncclAllReduce(from, to, 1000, ncclFloat32, ncclSum, comm, stream);
            NEED(pthread_join(thread, NULL));
            printf("code %d\n", code);
            return;
        }
        usleep(600000);
        print_failure(ncclAllReduce(from, to, 1000, ncclFloat32, ncclSum, comm, stream));
        return;
    } else if (strcmp(command, "death") == 0) {
        if (rank == 1) {
            usleep(100000);
            kill(getpid(), SIGKILL);
        }
        print_failure(ncclAllReduce(from, to, 1000, ncclFloat32, ncclSum, comm, stream));
        return;
    } else if (strcmp(command, "operations") == 0) {
        printf("%d operations of NCCL\n", fabricast_fake_operations());
        return;
    } else if (strcmp(command, "destroy") == 0) {
        NEED(ncclCommDestroy(comm));
    } else {
        printf("unknown command\n");
        exit(1);
    }
    printf("%s done\n", command);
}

int main(int count, char **arguments) {
    if (count < 4) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    rank = atoi(arguments[1]), ranks = atoi(arguments[2]);
    from = malloc(SPACE), to = malloc(SPACE);
    initialize(arguments[3], NULL);
    for (int number = 4; number < count; number++) run(arguments[number], arguments[3]);
    return 0;
}
