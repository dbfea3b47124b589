/* A fake CUDA driver without a device, for tests of failure states: the driver is shut down, its context
 * is destroyed, a graph is captured. It uses host memory, and runs operations synchronously. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint32_t code;
typedef uint64_t address;
enum { NOT_READY = 600, CAPTURE_INVALIDATED = 901, RELAXED = 2 };
enum { READ_ONLY_ATTRIBUTE = 113, FLUSH_OPTIONS_ATTRIBUTE = 117, WRITES_ORDERING_ATTRIBUTE = 118 };

static code failing;
static int devices = 1, only_context = -1;
static int destroyed, late_calls;
static struct { void *place; size_t length; } host_memory[64];
static size_t host_pieces;
static int busy, capturing, invalidated, without_read_only, registered_flags = -1;
static int ordering, flush_options, flushed_scope = -1, sync_memops = -1;
static _Thread_local unsigned capture_mode;

/* Called by tests. */
void fake_fail(int with) { failing = (code)with; }
void fake_devices(int are) { devices = are; }
/* Of all devices only this one has a context, made by another library. */
void fake_only_context(int on) { only_context = on; }
void fake_be_busy(int is) { busy = is; }
void fake_capture(int is) { capturing = is; }
int fake_was_invalidated(void) { return invalidated; }
void fake_lack_read_only(int does) { without_read_only = does; }
int fake_registered_flags(void) { return registered_flags; }
/* Of writes of network cards; read when the device is opened. */
void fake_order_writes(int as) { ordering = as; }
void fake_flush_options(int are) { flush_options = are; }
int fake_flushed_scope(void) { return flushed_scope; }
int fake_sync_memops(void) { return sync_memops; }

/* Replaces the context by a new, empty one: calls with old handles are counted, and access to the old
 * host memory crashes. */
void fake_destroy(int with) {
    failing = (code)with;
    destroyed = 1;
    for (size_t number = 0; number < host_pieces; number++)
        mprotect(host_memory[number].place, host_memory[number].length, PROT_NONE);
}
int fake_late_calls(void) { return late_calls; }
static code late(void) {
    if (destroyed && !failing) late_calls++;
    return failing;
}

/* Calls that are forbidden while a graph is captured in global mode, unless the thread is relaxed. */
static code unsafe_call(void) {
    if (late()) return failing;
    if (capturing && capture_mode != RELAXED) {
        invalidated = 1;
        return CAPTURE_INVALIDATED;
    }
    return 0;
}

#define WORKS(name) \
    code name(void) { return failing; }
#define WORKS_UNCAPTURED(name) \
    code name(void) { return unsafe_call(); }
#define WORKS_IN_CONTEXT(name) \
    code name(void) { return late(); }

WORKS_IN_CONTEXT(cuDevicePrimaryCtxRelease_v2) WORKS_IN_CONTEXT(cuModuleUnload) WORKS_IN_CONTEXT(cuLaunchKernel)
WORKS(cuInit) WORKS(cuCtxPushCurrent_v2)
WORKS(cuCtxEnablePeerAccess) WORKS(cuMemGetAddressRange_v2) WORKS(cuMemRelease) WORKS(cuMemExportToShareableHandle)
WORKS(cuMemImportFromShareableHandle) WORKS(cuMemGetAllocationPropertiesFromHandle) WORKS(cuMemRetainAllocationHandle)
WORKS(cuMemAddressFree) WORKS(cuMemMap) WORKS(cuMemUnmap) WORKS(cuMemSetAccess) WORKS(cuMemGetHandleForAddressRange)
WORKS(cuMemAddressReserve) WORKS(cuMemCreate) WORKS(cuIpcGetMemHandle) WORKS(cuIpcOpenMemHandle_v2)
WORKS(cuIpcCloseMemHandle) WORKS(cuPointerGetAttributes) WORKS(cuStreamWaitEvent) WORKS(cuStreamWriteValue32_v2)
WORKS(cuStreamWaitValue32_v2) WORKS(cuEventRecord) WORKS(cuDeviceCanAccessPeer)
WORKS_UNCAPTURED(cuMemHostUnregister) WORKS_UNCAPTURED(cuEventDestroy_v2) WORKS_UNCAPTURED(cuStreamDestroy_v2)

static code text(const char **place) {
    *place = "fake";
    return 0;
}
code cuGetErrorName(code of, const char **place) { (void)of; return text(place); }
code cuGetErrorString(code of, const char **place) { (void)of; return text(place); }

code cuDriverGetVersion(int *version) { *version = 13000; return failing; }
code cuDeviceGetCount(int *count) { *count = devices; return failing; }
code cuDeviceGet(int *device, int number) { *device = number; return failing; }
code cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, "fake", (size_t)length);
    return failing;
}
code cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, device + 1, 16);
    return failing;
}
code cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    (void)device;
    switch (attribute) {
    case READ_ONLY_ATTRIBUTE: *value = !without_read_only; break;
    case FLUSH_OPTIONS_ATTRIBUTE: *value = flush_options; break;
    case WRITES_ORDERING_ATTRIBUTE: *value = ordering; break;
    default: *value = 1;
    }
    return failing;
}
code cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)1 << 30;
    return failing;
}
code cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = &failing;
    return failing;
}
code cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = only_context < 0 || device == only_context;
    return failing;
}
code cuCtxPopCurrent_v2(void **context) { *context = &failing; return failing; }

code cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = (size_t)1 << 30; return failing; }
code cuMemAlloc_v2(address *place, size_t length) {
    *place = (address)(uintptr_t)malloc(length);
    return unsafe_call();
}
code cuMemFree_v2(address place) {
    code answer = unsafe_call();
    if (!answer) free((void *)(uintptr_t)place);
    return answer;
}
code cuMemGetAllocationGranularity(size_t *bytes, const void *wanted, unsigned which) {
    (void)wanted, (void)which;
    *bytes = (size_t)2 << 20;
    return failing;
}
code cuMemHostAlloc(void **place, size_t length, unsigned flags) {
    (void)flags;
    *place = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*place == MAP_FAILED || host_pieces == 64) abort();
    host_memory[host_pieces].place = *place;
    host_memory[host_pieces++].length = length;
    return unsafe_call();
}
code cuMemFreeHost(void *place) {
    (void)place;
    return unsafe_call();
}
code cuMemHostRegister_v2(void *place, size_t length, unsigned flags) {
    (void)place, (void)length;
    registered_flags = (int)flags;
    return unsafe_call();
}

code cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    unsigned before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return failing;
}
code cuStreamIsCapturing(void *stream, unsigned *status) { (void)stream; *status = 0; return failing; }
code cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &busy; return failing; }
code cuStreamQuery(void *stream) {
    (void)stream;
    code answer = unsafe_call();
    return answer ? answer : busy ? NOT_READY : 0;
}
code cuEventCreate(void **event, unsigned flags) { (void)flags; *event = &busy; return failing; }
code cuEventQuery(void *event) { return cuStreamQuery(event); }
code cuEventElapsedTime(float *milliseconds, void *earlier, void *later) {
    (void)earlier;
    *milliseconds = 0.5F;
    return cuStreamQuery(later);
}
code cuMemcpyAsync(address to, address from, size_t length, void *stream) {
    (void)stream;
    if (!failing) memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, length);
    return failing;
}
code cuMemsetD8Async(address to, unsigned char byte, size_t length, void *stream) {
    (void)stream;
    if (!failing) memset((void *)(uintptr_t)to, byte, length);
    return failing;
}
code cuModuleLoadData(void **module, const void *image) { (void)image; *module = &busy; return failing; }
code cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module, (void)name;
    *function = &busy;
    return failing;
}

code cuFlushGPUDirectRDMAWrites(unsigned target, unsigned scope) {
    (void)target;
    flushed_scope = (int)scope;
    return unsafe_call();
}
/* Every address is of cuMemAlloc, except 1, which is mapped. */
code cuPointerSetAttribute(const void *value, unsigned attribute, address place) {
    if (attribute != 6 || place == 1) return 1;
    memcpy(&sync_memops, value, sizeof sync_memops);
    return unsafe_call();
}
