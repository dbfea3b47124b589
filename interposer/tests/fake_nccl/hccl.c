/* A libhccl.so, by the fake libnccl.so.2, with the stream's function of libascendcl.so. */
#include <stdint.h>
#include <string.h>

#include "nccl.h"

static const int types[] = {ncclInt8, -1, ncclInt32, ncclFloat16, ncclFloat32, ncclInt64, ncclUint64, ncclUint8,
                            -1, ncclUint32, ncclFloat64, ncclBfloat16};
static const int ops[] = {ncclSum, ncclProd, ncclMax, ncclMin};

int HcclCommInitRootInfo(uint32_t ranks, const void *info, uint32_t rank, ncclComm_t *comm) {
    ncclUniqueId id;
    memcpy(&id, info, sizeof id);
    return ncclCommInitRank(comm, (int)ranks, id, (int)rank);
}
int HcclCommDestroy(ncclComm_t comm) { return ncclCommDestroy(comm); }
int HcclAllReduce(void *send, void *receive, uint64_t count, int type, int op, ncclComm_t comm, void *stream) {
    return ncclAllReduce(send, receive, count, types[type], ops[op], comm, stream);
}
int HcclReduceScatter(void *send, void *receive, uint64_t count, int type, int op, ncclComm_t comm, void *stream) {
    return ncclReduceScatter(send, receive, count, types[type], ops[op], comm, stream);
}
int HcclAllGather(void *send, void *receive, uint64_t count, int type, ncclComm_t comm, void *stream) {
    return ncclAllGather(send, receive, count, types[type], comm, stream);
}
int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, ncclComm_t comm, void *stream) {
    return ncclBroadcast(buffer, buffer, count, types[type], (int)root, comm, stream);
}
int HcclAlltoAll(const void *send, uint64_t count, int type, const void *receive, uint64_t receive_count,
                 int receive_type, ncclComm_t comm, void *stream) {
    (void)receive_count, (void)receive_type;
    return ncclAlltoAll(send, (void *)receive, count, types[type], comm, stream);
}
int aclrtSynchronizeStream(void *stream) { return (void)stream, 0; }
