/*
  * A CUDA driver with one device, whose memory the processor cannot read: only the functions that
  * find and copy memory. It replaces libcuda.so.1; the other functions exist, and fail.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define NOT_SUPPORTED 801
#define INVALID_CONTEXT 201

#define ABSENT(name) int name(void); int name(void) { return NOT_SUPPORTED; }
ABSENT(cuDeviceCanAccessPeer) ABSENT(cuDeviceGetP2PAttribute) ABSENT(cuCtxEnablePeerAccess)
ABSENT(cuMemGetInfo_v2) ABSENT(cuMemGetAddressRange_v2) ABSENT(cuMemCreate) ABSENT(cuMemRelease)
ABSENT(cuMemExportToShareableHandle) ABSENT(cuMemImportFromShareableHandle)
ABSENT(cuMemGetAllocationPropertiesFromHandle) ABSENT(cuMemRetainAllocationHandle)
ABSENT(cuMemAddressReserve) ABSENT(cuMemAddressFree) ABSENT(cuMemMap) ABSENT(cuMemUnmap)
ABSENT(cuMemSetAccess) ABSENT(cuMemGetHandleForAddressRange) ABSENT(cuIpcGetMemHandle)
ABSENT(cuIpcOpenMemHandle_v2) ABSENT(cuIpcCloseMemHandle) ABSENT(cuMemHostRegister_v2)
ABSENT(cuMemHostUnregister) ABSENT(cuStreamCreate) ABSENT(cuStreamDestroy_v2)
ABSENT(cuStreamWaitEvent) ABSENT(cuStreamWriteValue32_v2) ABSENT(cuStreamWaitValue32_v2)
ABSENT(cuMemsetD8Async) ABSENT(cuModuleLoadData) ABSENT(cuModuleUnload)
ABSENT(cuModuleGetFunction) ABSENT(cuLaunchKernel) ABSENT(cuFlushGPUDirectRDMAWrites)
ABSENT(cuPointerSetAttribute)

static char *memory;
static size_t length;
static __thread int contexts;

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { return *version = 12040, 0; }
int cuGetErrorName(int code, const char **text) { return (void)code, *text = "FAKE", 0; }
int cuGetErrorString(int code, const char **text) { return (void)code, *text = "fake", 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDeviceGetName(char *name, int room, int device)
{
    return (void)device, strncpy(name, "fake", (size_t)room), 0;
}
int cuDeviceGetUuid_v2(void *uuid, int device) { return (void)device, memset(uuid, 7, 16), 0; }
int cuDeviceGetAttribute(int *value, unsigned which, int device)
{
    return (void)which, (void)device, *value = 1, 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 1 << 30, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    return (void)device, *flags = 0, *active = 1, 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    return (void)device, *context = &contexts, 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
int cuCtxPushCurrent_v2(void *context) { return (void)context, contexts++, 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = &contexts, contexts--, 0; }
int cuThreadExchangeStreamCaptureMode(unsigned *mode) { return (void)mode, 0; }
/* The stream with the handle 7 is being captured into a graph. */
int cuStreamIsCapturing(void *stream, unsigned *is) { return *is = (uintptr_t)stream == 7, 0; }
int cuStreamQuery(void *stream) { return (void)stream, 0; }
int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = &contexts, 0; }
int cuEventDestroy_v2(void *event) { return (void)event, 0; }
int cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, 0; }
int cuEventQuery(void *event) { return (void)event, 0; }
int cuEventElapsedTime(float *time, void *earlier, void *later)
{
    return (void)earlier, (void)later, *time = 0.5F, 0;
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *of, unsigned which)
{
    return (void)of, (void)which, *bytes = 2 << 20, 0;
}
int cuMemHostAlloc(void **block, size_t bytes, unsigned flags)
{
    return (void)flags, (*block = malloc(bytes)) == NULL ? 2 : 0;
}
int cuMemFreeHost(void *block) { return free(block), 0; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    length = bytes;
    *address = (uint64_t)(uintptr_t)memory;
    return memory == MAP_FAILED ? 2 : 0;
}
int cuMemFree_v2(uint64_t address) { return munmap((void *)(uintptr_t)address, length); }

/* Streams have completed when this returns. */
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    (void)stream;
    mprotect(memory, length, PROT_READ | PROT_WRITE);
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return mprotect(memory, length, PROT_NONE);
}

/* Requires a current context, as some drivers do. */
int cuPointerGetAttributes(unsigned count, const unsigned *which, void **places, uint64_t address)
{
    uint64_t base = (uint64_t)(uintptr_t)memory;
    unsigned i;

    if (contexts == 0)
        return INVALID_CONTEXT;
    if (memory == NULL || address < base || address >= base + length)
        return 0;
    for (i = 0; i < count; i++) {
        if (which[i] == 2) /* kind of memory: device */
            *(unsigned *)places[i] = 2;
        else if (which[i] == 11)
            *(uint64_t *)places[i] = base;
        else if (which[i] == 12)
            *(size_t *)places[i] = length;
    }
    return 0;
}
