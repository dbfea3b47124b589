/* hccl_program RANK RANKS ID: operations of HCCL, whose results are checked. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int HcclCommInitRootInfo(uint32_t ranks, const void *info, uint32_t rank, void **comm);
int HcclCommDestroy(void *comm);
int HcclAllReduce(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream);
int HcclReduceScatter(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream);
int HcclAllGather(void *send, void *receive, uint64_t count, int type, void *comm, void *stream);
int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *comm, void *stream);
int HcclAlltoAll(const void *send, uint64_t count, int type, const void *receive, uint64_t receive_count,
                 int receive_type, void *comm, void *stream);
int aclrtSynchronizeStream(void *stream);

#define NEED(condition)                                   \
    do {                                                  \
        if (!(condition)) {                               \
            printf("%d: %s\n", __LINE__, #condition);     \
            return 1;                                     \
        }                                                 \
    } while (0)

enum { FLOAT = 4, SUM = 0, COUNT = 1000 };
static float from[COUNT * 16], to[COUNT * 16];
static char info[4108];

int main(int count, char **arguments) {
    if (count < 4) return 2;
    uint32_t rank = (uint32_t)atoi(arguments[1]), ranks = (uint32_t)atoi(arguments[2]);
    void *comm = NULL, *stream = (void *)5;
    snprintf(info, sizeof info, "%s", arguments[3]);
    NEED(HcclCommInitRootInfo(ranks, info, rank, &comm) == 0);
    for (int number = 0; number < 50; number++) {
        for (int at = 0; at < COUNT * (int)ranks; at++) from[at] = (float)(rank + 1);
        NEED(HcclAllReduce(from, to, COUNT, FLOAT, SUM, comm, stream) == 0);
        NEED(aclrtSynchronizeStream(stream) == 0);
        NEED(to[COUNT - 1] == (float)(ranks * (ranks + 1) / 2));
        NEED(HcclReduceScatter(from, to, COUNT, FLOAT, SUM, comm, stream) == 0);
        NEED(to[COUNT - 1] == (float)(ranks * (ranks + 1) / 2));
        NEED(HcclAllGather(from, to, COUNT, FLOAT, comm, stream) == 0);
        NEED(to[COUNT * ranks - 1] == (float)ranks);
        NEED(HcclAlltoAll(from, COUNT, FLOAT, to, COUNT, FLOAT, comm, stream) == 0);
        NEED(to[0] == 1 && to[COUNT * ranks - 1] == (float)ranks);
        NEED(HcclBroadcast(from, COUNT, FLOAT, 0, comm, stream) == 0);
        NEED(from[COUNT - 1] == 1);
        NEED(aclrtSynchronizeStream(stream) == 0);
    }
    NEED(HcclCommDestroy(comm) == 0);
    printf("done\n");
    return 0;
}
