/* A libnccl.so.2 in host memory, whose ranks are processes of this machine. Streams are numbers: an operation is
 * done when its call, or that of the end of its group, returns. The stream 7 is being captured. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "nccl.h"

enum { SLOT = 8 << 20, MAX_RANKS = 16, MAX_QUEUED = 64, SECONDS = 30 };

typedef struct {
    int arrived, waiting, generation;
    int colors[MAX_RANKS], keys[MAX_RANKS];
} Shared;

struct Comm {
    int ranks, rank, splits, aborted;
    char name[64];
    Shared *shared;
    char *slots;
};

typedef enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV } Kind;

typedef struct {
    Kind kind;
    const void *send;
    void *receive;
    size_t count;
    int type, op, root;
    ncclComm_t comm;
} Call;

static __thread int depth, queued;
static __thread Call queue[MAX_QUEUED];
static int operations;

int fabricast_fake_operations(void) { return operations; }
int fabricast_fake_is_capturing(void *stream) { return stream == (void *)7; }

static int number_in(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

int fabricast_fake_engine_delay(void) { return number_in("FAKE_ENGINE_DELAY_US"); }

static int is_over(ncclComm_t comm, time_t end) {
    return __atomic_load_n(&comm->aborted, __ATOMIC_SEQ_CST) || time(NULL) > end;
}

/* Waits for all ranks. */
static int barrier(ncclComm_t comm) {
    Shared *shared = comm->shared;
    int generation = __atomic_load_n(&shared->generation, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&shared->waiting, 1, __ATOMIC_SEQ_CST) == comm->ranks) {
        __atomic_store_n(&shared->waiting, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&shared->generation, 1, __ATOMIC_SEQ_CST);
        return 0;
    }
    time_t end = time(NULL) + SECONDS;
    while (__atomic_load_n(&shared->generation, __ATOMIC_SEQ_CST) == generation) {
        if (is_over(comm, end)) return ncclRemoteError;
        sched_yield();
    }
    return 0;
}

static ncclResult_t join(ncclComm_t *place, int ranks, const char *name, int rank) {
    if (ranks > MAX_RANKS || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->ranks = ranks, comm->rank = rank;
    snprintf(comm->name, sizeof comm->name, "%.63s", name);
    char path[80];
    snprintf(path, sizeof path, "/fake-nccl-%s", name);
    size_t length = 4096 + (size_t)ranks * SLOT;
    int file = shm_open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)length) != 0) return ncclSystemError;
    char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return ncclSystemError;
    comm->shared = (Shared *)memory, comm->slots = memory + 4096;
    int code = barrier(comm);
    if (rank == 0) shm_unlink(path);
    *place = comm;
    return code;
}

static double reduced(int op, double one, double other) {
    switch (op) {
        case ncclProd: return one * other;
        case ncclMax: return one > other ? one : other;
        case ncclMin: return one < other ? one : other;
        default: return one + other;
    }
}

static const char *slot(const Call *call, int rank) { return call->comm->slots + (size_t)rank * SLOT; }

static ncclResult_t move_between_two(const Call *calls, int count) {
    ncclComm_t comm = calls[0].comm;
    char *own = comm->slots + (size_t)comm->rank * SLOT;
    /* The blocks for each rank, each with its length. */
    size_t at = 0;
    for (int number = 0; number < count; number++) {
        const Call *call = &calls[number];
        if (call->kind != SEND) continue;
        size_t bytes = call->count * element_bytes(call->type);
        int to = call->root;
        memcpy(own + at, &to, sizeof to), memcpy(own + at + 8, &bytes, sizeof bytes);
        memcpy(own + at + 16, call->send, bytes);
        at += 16 + (bytes + 7) / 8 * 8;
    }
    int none = -1;
    memcpy(own + at, &none, sizeof none);
    if (barrier(comm)) return ncclRemoteError;
    for (int number = 0; number < count; number++) {
        const Call *call = &calls[number];
        if (call->kind != RECV) continue;
        const char *block = slot(call, call->root);
        for (;;) {
            int to;
            size_t bytes;
            memcpy(&to, block, sizeof to), memcpy(&bytes, block + 8, sizeof bytes);
            if (to < 0) return ncclSystemError;
            if (to == comm->rank) {
                memcpy(call->receive, block + 16, bytes);
                break;
            }
            block += 16 + (bytes + 7) / 8 * 8;
        }
    }
    return barrier(comm);
}

static ncclResult_t carry_out(const Call *call) {
    ncclComm_t comm = call->comm;
    int ranks = comm->ranks, rank = comm->rank, is_root = rank == call->root;
    size_t size = element_bytes(call->type), bytes = call->count * size;
    int gives_each = call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL || call->kind == SCATTER;
    int gives = is_root || (call->kind != BROADCAST && call->kind != SCATTER);
    int gets = is_root || (call->kind != REDUCE && call->kind != GATHER);
    __atomic_add_fetch(&operations, 1, __ATOMIC_SEQ_CST);
    if (number_in("FAKE_NCCL_DELAY_US")) usleep((useconds_t)number_in("FAKE_NCCL_DELAY_US"));
    if (bytes * (size_t)ranks > SLOT) return ncclInvalidArgument;
    if (gives) memcpy(comm->slots + (size_t)rank * SLOT, call->send, gives_each ? bytes * (size_t)ranks : bytes);
    if (barrier(comm)) return ncclRemoteError;
    size_t own = (size_t)rank * bytes;
    if (gets) {
        switch (call->kind) {
            case BROADCAST: memcpy(call->receive, slot(call, call->root), bytes); break;
            case SCATTER: memcpy(call->receive, slot(call, call->root) + own, bytes); break;
            case ALL_GATHER:
            case GATHER:
            case ALL_TO_ALL:
                for (int from = 0; from < ranks; from++) {
                    const char *block = slot(call, from) + (call->kind == ALL_TO_ALL ? own : 0);
                    memcpy((char *)call->receive + (size_t)from * bytes, block, bytes);
                }
                break;
            default:
                for (size_t at = 0; at < call->count; at++) {
                    size_t index = call->kind == REDUCE_SCATTER ? (size_t)rank * call->count + at : at;
                    double value = element_get(call->type, slot(call, 0), index);
                    for (int from = 1; from < ranks; from++) {
                        value = reduced(call->op, value, element_get(call->type, slot(call, from), index));
                    }
                    element_put(call->type, call->receive, at, call->op == ncclAvg ? value / ranks : value);
                }
        }
    }
    return barrier(comm);
}

static ncclResult_t enqueue(Call call) {
    if (depth == 0) return carry_out(&call);
    if (queued == MAX_QUEUED) return ncclInvalidArgument;
    queue[queued++] = call;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }

ncclResult_t ncclGroupEnd(void) {
    if (--depth > 0) return ncclSuccess;
    int count = queued, code = ncclSuccess;
    queued = 0;
    for (int number = 0; number < count && code == ncclSuccess; number++) {
        if (queue[number].kind < SEND) code = carry_out(&queue[number]);
    }
    if (code == ncclSuccess && count > 0 && queue[0].kind >= SEND) {
        operations++;
        code = move_between_two(queue, count);
    }
    return code;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    return join(comm, ranks, id.internal, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    (void)config;
    return join(comm, ranks, id.internal, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *split, ncclConfig_t *config) {
    (void)config;
    comm->shared->colors[comm->rank] = color, comm->shared->keys[comm->rank] = key;
    if (barrier(comm)) return ncclRemoteError;
    int ranks = 0, rank = 0;
    for (int other = 0; other < comm->ranks; other++) {
        if (comm->shared->colors[other] != color) continue;
        int before = comm->shared->keys[other];
        ranks++, rank += before < key || (before == key && other < comm->rank);
    }
    if (barrier(comm)) return ncclRemoteError;
    char name[64];
    snprintf(name, sizeof name, "%.40s-%d-%d", comm->name, ++comm->splits, color);
    *split = NULL;
    return color < 0 ? ncclSuccess : join(split, ranks, name, rank);
}
ncclResult_t ncclCommCount(ncclComm_t comm, int *count) { return *count = comm->ranks, ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return (void)comm, ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return free(comm), ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    /* Another thread may still use it. */
    return __atomic_store_n(&comm->aborted, 1, __ATOMIC_SEQ_CST), ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { return (void)comm, *error = 0, ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, int where, ncclComm_t comm) {
    (void)scalar, (void)type, (void)where, (void)comm;
    return *op = ncclNumOps, ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){ALL_REDUCE, send, receive, count, type, op, 0, comm});
}
ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){REDUCE, send, receive, count, type, op, root, comm});
}
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){REDUCE_SCATTER, send, receive, count, type, op, 0, comm});
}
ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){ALL_GATHER, send, receive, count, type, 0, 0, comm});
}
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){BROADCAST, send, receive, count, type, 0, root, comm});
}
/* As in NCCL, by another function of the interface. */
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){ALL_TO_ALL, send, receive, count, type, 0, 0, comm});
}
ncclResult_t ncclGather(const void *send, void *receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){GATHER, send, receive, count, type, 0, root, comm});
}
ncclResult_t ncclScatter(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){SCATTER, send, receive, count, type, 0, root, comm});
}
ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){SEND, buffer, NULL, count, type, 0, peer, comm});
}
ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)stream;
    return enqueue((Call){RECV, NULL, buffer, count, type, 0, peer, comm});
}
