/* A driver of CUDA without a GPU, for tests: libcuda.so.1 with the functions that the library uses.
 *
 * Memory of devices is shared memory files, so that other processes map it by their descriptors, as with the real
 * driver: mapped memory by exported descriptors, memory of cuMemAlloc by handles. What the real driver refuses is
 * refused here. All operations of streams are done when their call returns.
 *
 * FAKE_CUDA_DEVICES: number of devices (2). FAKE_CUDA_MEMORY: bytes of each (1 GiB).
 * FAKE_CUDA_IMEX: 1 if processes may create fabric handles (0).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t Code;
typedef uint64_t Address;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    PEER_ALREADY_ENABLED = 704,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
};

enum { GRANULE = 2 << 20, MAX_DEVICES = 16, FILE_DESCRIPTOR = 1, FABRIC = 8 };

/* ------------------------------------------------------------------ state */

typedef struct Physical {
    int file;
    size_t length;
    int device;
    int references;
    int is_exportable;
    int has_fabric_handle;
} Physical;

typedef enum { RESERVED, MAPPED, PLAIN, OPENED, HOST, POOL } Kind;

typedef struct Range {
    Kind kind;
    Address base;
    size_t length;
    int device;
    uint64_t buffer_id;
    Physical *physical; /* of mapped memory */
    int file;           /* of plain memory */
    int has_access;
    struct Range *next;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static uint64_t next_buffer_id = 1;
static size_t used[MAX_DEVICES];
static int retained[MAX_DEVICES];
static struct {
    int device;
} contexts[MAX_DEVICES];

static __thread void *stack[64];
static __thread int depth;

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static int device_count(void) {
    size_t count = setting("FAKE_CUDA_DEVICES", 2);
    return count < MAX_DEVICES ? (int)count : MAX_DEVICES;
}

static size_t total_memory(void) { return setting("FAKE_CUDA_MEMORY", (size_t)1 << 30); }

static int is_device(int device) { return device >= 0 && device < device_count(); }

/* The device of the current context; -1 without one. */
static int current(void) {
    void *context = depth > 0 ? stack[depth - 1] : NULL;
    for (int device = 0; device < MAX_DEVICES; device++) {
        if (context == &contexts[device]) return device;
    }
    return -1;
}

static Range *range_at(Address address, Kind kind) {
    for (Range *range = ranges; range; range = range->next) {
        if (range->kind == kind && address >= range->base && address - range->base < range->length) return range;
    }
    return NULL;
}

static Range *memory_at(Address address) {
    static const Kind kinds[] = {MAPPED, PLAIN, OPENED, POOL, HOST};
    for (size_t index = 0; index < sizeof kinds / sizeof *kinds; index++) {
        Range *range = range_at(address, kinds[index]);
        if (range) return range;
    }
    return NULL;
}

static Range *add_range(Kind kind, void *base, size_t length, int device) {
    Range *range = calloc(1, sizeof *range);
    range->kind = kind;
    range->base = (Address)(uintptr_t)base;
    range->length = length;
    range->device = device;
    range->buffer_id = next_buffer_id++;
    range->file = -1;
    range->next = ranges;
    ranges = range;
    return range;
}

static void remove_range(Range *range) {
    Range **place = &ranges;
    while (*place != range) place = &(*place)->next;
    *place = range->next;
    if (range->file >= 0) close(range->file);
    free(range);
}

static int charge(int device, size_t length) {
    if (used[device] + length > total_memory()) return 0;
    used[device] += length;
    return 1;
}

static int new_file(int device, size_t length, const char *kind) {
    char name[64];
    snprintf(name, sizeof name, "fake-cuda-%s-%d", kind, device);
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, (off_t)length) != 0) {
        close(file);
        return -1;
    }
    return file;
}

static void release_physical(Physical *physical) {
    if (--physical->references > 0) return;
    if (physical->is_exportable >= 0) used[physical->device] -= physical->length;
    close(physical->file);
    free(physical);
}

#define LOCKED(body)                    \
    Code code = OK;                     \
    pthread_mutex_lock(&lock);          \
    do body while (0);                  \
    pthread_mutex_unlock(&lock);        \
    return code

/* ------------------------------------------------------- driver and devices */

Code cuInit(unsigned flags) { return flags == 0 ? OK : INVALID_VALUE; }

Code cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

Code cuGetErrorName(Code code, const char **text) {
    static __thread char name[32];
    snprintf(name, sizeof name, "FAKE_ERROR_%u", code);
    *text = name;
    return OK;
}

Code cuGetErrorString(Code code, const char **text) {
    switch (code) {
        case OK: *text = "no error"; break;
        case INVALID_VALUE: *text = "invalid argument"; break;
        case OUT_OF_MEMORY: *text = "out of memory"; break;
        case INVALID_DEVICE: *text = "invalid device ordinal"; break;
        case INVALID_CONTEXT: *text = "invalid device context"; break;
        case INVALID_HANDLE: *text = "invalid resource handle"; break;
        case NOT_PERMITTED: *text = "operation not permitted"; break;
        case NOT_SUPPORTED: *text = "operation not supported"; break;
        default: *text = "unknown error"; break;
    }
    return OK;
}

Code cuDeviceGetCount(int *count) {
    *count = device_count();
    return OK;
}

Code cuDeviceGet(int *device, int number) {
    if (!is_device(number)) return INVALID_DEVICE;
    *device = number;
    return OK;
}

Code cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return OK;
}

Code cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0xfa, 16);
    uuid[15] = (unsigned char)device;
    return OK;
}

Code cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    switch (attribute) {
        case 16: *value = 16; break;        /* multiprocessors */
        case 33: *value = 1 + device; break; /* PCI bus */
        case 34: case 50: *value = 0; break; /* PCI device, domain */
        case 40: *value = 1; break;         /* copy engines */
        case 41: *value = 1; break;         /* unified addresses */
        case 75: *value = 9; break;         /* compute capability */
        case 76: *value = 0; break;
        case 102: case 103: case 128: *value = 1; break; /* virtual memory; descriptors; fabric */
        default: *value = 0; break;
    }
    return OK;
}

Code cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = total_memory();
    return OK;
}

Code cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = retained[device] > 0;
    return OK;
}

Code cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer && is_device(device) && is_device(peer);
    return OK;
}

Code cuDeviceGetP2PAttribute(int *value, unsigned attribute, int device, int peer) {
    (void)attribute, (void)device, (void)peer;
    *value = 1;
    return OK;
}

Code cuDevicePrimaryCtxRetain(void **context, int device) {
    if (!is_device(device)) return INVALID_DEVICE;
    LOCKED({
        retained[device]++;
        *context = &contexts[device];
    });
}

Code cuDevicePrimaryCtxRelease_v2(int device) { LOCKED({ retained[device]--; }); }

Code cuCtxPushCurrent_v2(void *context) {
    if (depth == 64) return INVALID_VALUE;
    stack[depth++] = context;
    return OK;
}

Code cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return INVALID_CONTEXT;
    *context = stack[--depth];
    return OK;
}

Code cuCtxSetCurrent(void *context) {
    if (depth == 0) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

Code cuCtxGetDevice(int *device) {
    *device = current();
    return *device < 0 ? INVALID_CONTEXT : OK;
}

Code cuCtxSynchronize(void) { return current() < 0 ? INVALID_CONTEXT : OK; }

Code cuCtxEnablePeerAccess(void *context, unsigned flags) {
    (void)context, (void)flags;
    return current() < 0 ? INVALID_CONTEXT : OK;
}

/* ----------------------------------------------------------------- memory */

Code cuMemGetInfo_v2(size_t *available, size_t *total) {
    int device = current();
    if (device < 0) return INVALID_CONTEXT;
    LOCKED({
        *total = total_memory();
        *available = *total - used[device];
    });
}

Code cuMemAlloc_v2(Address *address, size_t length) {
    int device = current();
    if (device < 0) return INVALID_CONTEXT;
    if (length == 0) return INVALID_VALUE;
    size_t whole = (length + 511) / 512 * 512;
    LOCKED({
        if (!charge(device, whole)) {
            code = OUT_OF_MEMORY;
            break;
        }
        int file = new_file(device, whole, "plain");
        void *base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file < 0 || base == MAP_FAILED) {
            used[device] -= whole;
            code = OUT_OF_MEMORY;
            break;
        }
        add_range(PLAIN, base, whole, device)->file = file;
        *address = (Address)(uintptr_t)base;
    });
}

Code cuMemFree_v2(Address address) {
    LOCKED({
        Range *range = range_at(address, PLAIN);
        if (!range || range->base != address) {
            code = INVALID_VALUE;
            break;
        }
        used[range->device] -= range->length;
        munmap((void *)(uintptr_t)range->base, range->length);
        remove_range(range);
    });
}

Code cuMemGetAddressRange_v2(Address *base, size_t *length, Address address) {
    LOCKED({
        Range *range = memory_at(address);
        if (!range || range->kind == HOST) {
            code = NOT_FOUND;
            break;
        }
        if (base) *base = range->base;
        if (length) *length = range->length;
    });
}

typedef struct {
    unsigned type;
    unsigned handle_types;
    struct {
        unsigned type;
        int id;
    } location;
    void *unused;
    unsigned char flags[8];
} AllocationProperties;

Code cuMemCreate(uint64_t *handle, size_t length, const AllocationProperties *properties, uint64_t flags) {
    (void)flags;
    int device = properties->location.id;
    if (!is_device(device) || length == 0 || length % GRANULE) return INVALID_VALUE;
    if (properties->handle_types & ~(unsigned)(FILE_DESCRIPTOR | FABRIC)) return NOT_SUPPORTED;
    if (properties->handle_types & FABRIC && !setting("FAKE_CUDA_IMEX", 0)) return NOT_PERMITTED;
    LOCKED({
        if (!charge(device, length)) {
            code = OUT_OF_MEMORY;
            break;
        }
        Physical *physical = calloc(1, sizeof *physical);
        physical->file = new_file(device, length, "mapped");
        if (physical->file < 0) {
            free(physical);
            used[device] -= length;
            code = OUT_OF_MEMORY;
            break;
        }
        physical->length = length;
        physical->device = device;
        physical->references = 1;
        physical->is_exportable = properties->handle_types & FILE_DESCRIPTOR ? 1 : 0;
        physical->has_fabric_handle = properties->handle_types & FABRIC ? 1 : 0;
        *handle = (uint64_t)(uintptr_t)physical;
    });
}

Code cuMemRelease(uint64_t handle) { LOCKED({ release_physical((Physical *)(uintptr_t)handle); }); }

/* Another process opens the file by it, as long as its maker lives. */
typedef struct {
    int process, file;
} FabricHandle;

Code cuMemExportToShareableHandle(void *out, uint64_t handle, unsigned type, uint64_t flags) {
    (void)flags;
    Physical *physical = (Physical *)(uintptr_t)handle;
    if (type == FABRIC && physical->has_fabric_handle) {
        FabricHandle fabric = {(int)getpid(), physical->file};
        memset(out, 0, 64);
        memcpy(out, &fabric, sizeof fabric);
        return OK;
    }
    /* Imported memory cannot be exported again. */
    if (type != FILE_DESCRIPTOR || physical->is_exportable != 1) return INVALID_VALUE;
    int file = dup(physical->file);
    if (file < 0) return OUT_OF_MEMORY;
    *(int *)out = file;
    return OK;
}

Code cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, unsigned type) {
    char link[64], target[128] = {0};
    int file = (int)(intptr_t)os_handle, device = -1, opened = -1;
    if (type == FABRIC) {
        FabricHandle fabric;
        if (!setting("FAKE_CUDA_IMEX", 0)) return NOT_PERMITTED;
        memcpy(&fabric, os_handle, sizeof fabric);
        snprintf(link, sizeof link, "/proc/%d/fd/%d", fabric.process, fabric.file);
        file = opened = open(link, O_RDWR | O_CLOEXEC);
        if (file < 0) return INVALID_VALUE;
    } else if (type != FILE_DESCRIPTOR) {
        return INVALID_VALUE;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    struct stat status;
    if (readlink(link, target, sizeof target - 1) < 0 || fstat(file, &status) != 0 ||
        sscanf(target, "/memfd:fake-cuda-mapped-%d", &device) != 1 || !is_device(device)) {
        if (opened >= 0) close(opened);
        return INVALID_VALUE;
    }
    Physical *physical = calloc(1, sizeof *physical);
    physical->file = opened >= 0 ? opened : fcntl(file, F_DUPFD_CLOEXEC, 0);
    physical->length = (size_t)status.st_size;
    physical->device = device;
    physical->references = 1;
    physical->is_exportable = -1;
    *handle = (uint64_t)(uintptr_t)physical;
    return OK;
}

Code cuMemGetAllocationPropertiesFromHandle(AllocationProperties *properties, uint64_t handle) {
    Physical *physical = (Physical *)(uintptr_t)handle;
    memset(properties, 0, sizeof *properties);
    properties->type = 1;
    properties->handle_types = FILE_DESCRIPTOR;
    properties->location.type = 1;
    properties->location.id = physical->device;
    return OK;
}

Code cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
    LOCKED({
        Range *range = range_at((Address)(uintptr_t)address, MAPPED);
        if (!range) {
            code = INVALID_VALUE;
            break;
        }
        range->physical->references++;
        *handle = (uint64_t)(uintptr_t)range->physical;
    });
}

Code cuMemGetAllocationGranularity(size_t *bytes, const AllocationProperties *properties, unsigned option) {
    (void)properties, (void)option;
    *bytes = GRANULE;
    return OK;
}

Code cuMemAddressReserve(Address *address, size_t length, size_t alignment, Address wanted, uint64_t flags) {
    (void)alignment, (void)wanted, (void)flags;
    if (length == 0 || length % GRANULE) return INVALID_VALUE;
    LOCKED({
        /* Aligned to a granule. */
        char *base = mmap(NULL, length + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) {
            code = OUT_OF_MEMORY;
            break;
        }
        char *start = (char *)(((uintptr_t)base + GRANULE - 1) / GRANULE * GRANULE);
        if (start > base) munmap(base, (size_t)(start - base));
        munmap(start + length, (size_t)(base + GRANULE - start));
        add_range(RESERVED, start, length, -1);
        *address = (Address)(uintptr_t)start;
    });
}

Code cuMemAddressFree(Address address, size_t length) {
    LOCKED({
        Range *range = range_at(address, RESERVED);
        if (!range || range->base != address || range->length != length || range_at(address, MAPPED)) {
            code = INVALID_VALUE;
            break;
        }
        munmap((void *)(uintptr_t)address, length);
        remove_range(range);
    });
}

Code cuMemMap(Address address, size_t length, size_t offset, uint64_t handle, uint64_t flags) {
    (void)flags;
    Physical *physical = (Physical *)(uintptr_t)handle;
    LOCKED({
        Range *reserved = range_at(address, RESERVED);
        if (!reserved || offset != 0 || length > physical->length || range_at(address, MAPPED)
            || address + length > reserved->base + reserved->length) {
            code = INVALID_VALUE;
            break;
        }
        void *at = (void *)(uintptr_t)address;
        if (mmap(at, length, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED) {
            code = OUT_OF_MEMORY;
            break;
        }
        physical->references++;
        add_range(MAPPED, at, length, physical->device)->physical = physical;
    });
}

Code cuMemUnmap(Address address, size_t length) {
    LOCKED({
        Range *range = range_at(address, MAPPED);
        if (!range || range->base != address || range->length != length) {
            code = INVALID_VALUE;
            break;
        }
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap((void *)(uintptr_t)address, length, PROT_NONE, flags, -1, 0);
        release_physical(range->physical);
        remove_range(range);
    });
}

Code cuMemSetAccess(Address address, size_t length, const void *access, size_t count) {
    (void)access;
    LOCKED({
        Range *range = range_at(address, MAPPED);
        if (!range || count == 0 || range->length != length) {
            code = INVALID_VALUE;
            break;
        }
        range->has_access = 1;
        mprotect((void *)(uintptr_t)address, length, PROT_READ | PROT_WRITE);
    });
}

Code cuMemGetHandleForAddressRange(void *out, Address address, size_t length, unsigned type, uint64_t flags) {
    (void)out, (void)address, (void)length, (void)type, (void)flags;
    return NOT_SUPPORTED;
}

Code cuFlushGPUDirectRDMAWrites(unsigned target, unsigned scope) {
    (void)target, (void)scope;
    return OK;
}

/* Begins with eight bytes, and the process, like the real one. */
typedef struct {
    uint64_t magic;
    uint32_t process;
    uint32_t file;
    uint64_t length;
    uint32_t device;
    unsigned char rest[36];
} IpcHandle;

enum { IPC_MAGIC = 0x46414b45 };

Code cuIpcGetMemHandle(IpcHandle *handle, Address address) {
    LOCKED({
        Range *range = range_at(address, PLAIN);
        if (!range) {
            code = INVALID_VALUE;
            break;
        }
        memset(handle, 0, sizeof *handle);
        handle->magic = IPC_MAGIC;
        handle->process = (uint32_t)getpid();
        handle->file = (uint32_t)range->file;
        handle->length = range->length;
        handle->device = (uint32_t)range->device;
    });
}

Code cuIpcOpenMemHandle_v2(Address *address, IpcHandle handle, unsigned flags) {
    (void)flags;
    char path[64];
    if (current() < 0) return INVALID_CONTEXT;
    if (handle.magic != IPC_MAGIC) return INVALID_VALUE;
    if (handle.process == (uint32_t)getpid()) return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%u/fd/%u", handle.process & ~(1u << 30), handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_HANDLE;
    void *base = mmap(NULL, handle.length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    LOCKED({
        /* The real driver reports the device that opened it. */
        add_range(OPENED, base, handle.length, current());
        *address = (Address)(uintptr_t)base;
    });
}

Code cuIpcCloseMemHandle(Address address) {
    LOCKED({
        Range *range = range_at(address, OPENED);
        if (!range) {
            code = INVALID_VALUE;
            break;
        }
        munmap((void *)(uintptr_t)range->base, range->length);
        remove_range(range);
    });
}

Code cuMemHostAlloc(void **address, size_t length, unsigned flags) {
    (void)flags;
    LOCKED({
        *address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        add_range(HOST, *address, length, -1);
    });
}

Code cuMemFreeHost(void *address) {
    LOCKED({
        Range *range = range_at((Address)(uintptr_t)address, HOST);
        if (!range) {
            code = INVALID_VALUE;
            break;
        }
        munmap(address, range->length);
        remove_range(range);
    });
}

Code cuMemHostRegister_v2(void *address, size_t length, unsigned flags) {
    (void)flags;
    LOCKED({
        if (range_at((Address)(uintptr_t)address, HOST)) {
            code = 712;
            break;
        }
        add_range(HOST, address, length, -1);
    });
}

Code cuMemHostUnregister(void *address) {
    LOCKED({
        Range *range = range_at((Address)(uintptr_t)address, HOST);
        if (!range) {
            code = 713;
            break;
        }
        remove_range(range);
    });
}

static uint64_t handle_types_of(const Range *range) {
    const Physical *physical = range->physical;
    return (physical->is_exportable ? FILE_DESCRIPTOR : 0) | (physical->has_fabric_handle ? FABRIC : 0);
}

Code cuPointerGetAttributes(unsigned count, const unsigned *attributes, void **data, Address address) {
    LOCKED({
        Range *range = memory_at(address);
        for (unsigned index = 0; index < count; index++) {
            void *out = data[index];
            switch (attributes[index]) {
                case 2: *(unsigned *)out = !range ? 0 : range->kind == HOST ? 1 : 2; break;
                case 7: *(uint64_t *)out = range ? range->buffer_id : 0; break;
                case 8: *(unsigned char *)out = 0; break;
                case 9: *(int *)out = range ? range->device : -2; break;
                case 11: *(uint64_t *)out = range ? range->base : 0; break;
                case 12: *(uint64_t *)out = range ? range->length : 0; break;
                case 14: *(uint64_t *)out = range && range->kind == MAPPED ? handle_types_of(range) : 0; break;
                case 17: *(uint64_t *)out = range && range->kind == POOL; break;
                default: *(uint64_t *)out = 0; break;
            }
        }
    });
}

Code cuPointerSetAttribute(const void *value, unsigned attribute, Address address) {
    (void)value, (void)attribute;
    LOCKED({ code = range_at(address, PLAIN) ? OK : INVALID_VALUE; });
}

/* --------------------------------------------------- streams and kernels */

Code cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    *stream = malloc(1);
    return OK;
}

Code cuStreamDestroy_v2(void *stream) {
    free(stream);
    return OK;
}

Code cuStreamQuery(void *stream) {
    (void)stream;
    return OK;
}

Code cuStreamSynchronize(void *stream) {
    (void)stream;
    return OK;
}

Code cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    static __thread unsigned own;
    unsigned before = own;
    own = *mode;
    *mode = before;
    return OK;
}

/* The stream that is being captured into a graph, if any: one at a time. */
static void *captured;

Code cuStreamBeginCapture_v2(void *stream, int mode) {
    (void)mode;
    __atomic_store_n(&captured, stream, __ATOMIC_SEQ_CST);
    return OK;
}

Code cuStreamEndCapture(void *stream, void **graph) {
    (void)stream;
    *graph = NULL;
    __atomic_store_n(&captured, NULL, __ATOMIC_SEQ_CST);
    return OK;
}

Code cuStreamIsCapturing(void *stream, unsigned *is_capturing) {
    *is_capturing = stream != NULL && stream == __atomic_load_n(&captured, __ATOMIC_SEQ_CST);
    return OK;
}

Code cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return OK;
}

Code cuStreamWriteValue32_v2(void *stream, Address address, uint32_t value, unsigned flags) {
    (void)stream, (void)flags;
    __atomic_store_n((uint32_t *)(uintptr_t)address, value, __ATOMIC_SEQ_CST);
    return OK;
}

Code cuStreamWaitValue32_v2(void *stream, Address address, uint32_t value, unsigned flags) {
    (void)stream, (void)flags;
    /* Another process writes it. */
    for (int tries = 0; tries < 10000; tries++) {
        if ((int32_t)(__atomic_load_n((uint32_t *)(uintptr_t)address, __ATOMIC_SEQ_CST) - value) >= 0) return OK;
        usleep(1000);
    }
    return ILLEGAL_ADDRESS;
}

Code cuMemcpyAsync(Address to, Address from, size_t length, void *stream) {
    (void)stream;
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, length);
    return OK;
}

Code cuMemsetD8Async(Address to, unsigned char byte, size_t length, void *stream) {
    (void)stream;
    memset((void *)(uintptr_t)to, byte, length);
    return OK;
}

Code cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    *event = malloc(1);
    return OK;
}

Code cuEventDestroy_v2(void *event) {
    free(event);
    return OK;
}

Code cuEventRecord(void *event, void *stream) {
    (void)event, (void)stream;
    return OK;
}

Code cuEventQuery(void *event) {
    (void)event;
    return OK;
}

Code cuEventElapsedTime(float *milliseconds, void *earlier, void *later) {
    (void)earlier, (void)later;
    *milliseconds = 0.5F;
    return OK;
}

Code cuModuleLoadData(void **module, const void *image) {
    (void)image;
    *module = malloc(1);
    return OK;
}

Code cuModuleUnload(void *module) {
    free(module);
    return OK;
}

enum { CHECKSUM = 1, COPY_LIST = 2, EXCHANGE = 3 };

// As gpu/src/cuda/exchange.cu declares them.
enum { RANKS = 16, BLOCKS = 256, F32 = 11, SUM = 1 };

typedef struct {
    const char *from;
    char *to;
    uint64_t bytes, chunk;
    uint32_t is_from_staged, is_to_staged;
} Piece;

typedef struct {
    uint32_t ranks, rank, number, data_type, op, results_count, has_second_phase, staged_sources, staged_results;
    uint32_t chunks, unused;
    uint64_t stage_distance;
    uint32_t *own_words;
    uint32_t *words[RANKS];
    const uint32_t *stop;
    uint32_t *failed;
    Piece pushes[RANKS];
    char *sources[RANKS];
    char *results[RANKS];
    uint64_t reduced_bytes, reduced_chunk;
    Piece copies[RANKS];
} Exchange;

static uint64_t length_of(uint64_t bytes, uint64_t chunk, uint32_t index) {
    uint64_t before = chunk * index, left = bytes > before ? bytes - before : 0;
    return left < chunk ? left : chunk;
}

static uint64_t offset_of(const Exchange *e, uint32_t is_staged, uint64_t chunk, uint32_t index) {
    if (!is_staged) return chunk * index;
    return (e->number + index) & 1 ? e->stage_distance : 0;
}

static void copy_pieces(const Exchange *e, const Piece *pieces, uint32_t index) {
    for (int at = 0; at < RANKS; at++) {
        const Piece *piece = &pieces[at];
        memmove(piece->to + offset_of(e, piece->is_to_staged, piece->chunk, index),
                piece->from + offset_of(e, piece->is_from_staged, piece->chunk, index),
                length_of(piece->bytes, piece->chunk, index));
    }
}

// Waits until the others are here; false if the exchange is given up.
static int meet(const Exchange *e, uint32_t phase, uint32_t number) {
    uint32_t at = phase * BLOCKS * RANKS;
    for (uint32_t other = 0; other < e->ranks; other++) {
        if (other != e->rank) __atomic_store_n(e->words[other] + at + e->rank, number, __ATOMIC_RELEASE);
    }
    for (uint32_t other = 0; other < e->ranks; other++) {
        const uint32_t *word = e->own_words + at + other;
        while (other != e->rank && (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - number) < 0) {
            if (__atomic_load_n(e->stop, __ATOMIC_ACQUIRE) != 0) {
                __atomic_store_n(e->failed, e->number, __ATOMIC_RELEASE);
                return 0;
            }
            usleep(50);
        }
    }
    return 1;
}

// Sums of floats only.
static Code run_exchange(const Exchange *e) {
    for (uint32_t index = 0; index < e->chunks; index++) {
        copy_pieces(e, e->pushes, index);
        if (!meet(e, 0, e->number + index)) return OK;
        uint64_t count = length_of(e->reduced_bytes, e->reduced_chunk, index) / sizeof(float);
        if (count > 0 && (e->data_type != F32 || e->op != SUM)) return NOT_SUPPORTED;
        for (uint64_t at = 0; at < count; at++) {
            float sum = 0;
            for (uint32_t rank = 0; rank < e->ranks; rank++) {
                uint64_t offset = offset_of(e, e->staged_sources >> rank & 1, e->reduced_chunk, index);
                sum += ((const float *)(e->sources[rank] + offset))[at];
            }
            for (uint32_t result = 0; result < e->results_count; result++) {
                uint64_t offset = offset_of(e, e->staged_results >> result & 1, e->reduced_chunk, index);
                ((float *)(e->results[result] + offset))[at] = sum;
            }
        }
        if (e->has_second_phase && !meet(e, 1, e->number + index)) return OK;
        copy_pieces(e, e->copies, index);
    }
    return OK;
}

Code cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = (void *)(uintptr_t)(strcmp(name, "copy_list") == 0  ? COPY_LIST
                                     : strcmp(name, "exchange") == 0 ? EXCHANGE
                                                                     : CHECKSUM);
    return OK;
}

Code cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j, unsigned k,
                    unsigned shared, void *stream, void **arguments, void **extra) {
    (void)x, (void)y, (void)z, (void)i, (void)j, (void)k, (void)shared, (void)stream, (void)extra;
    if ((uintptr_t)function == EXCHANGE) return run_exchange(arguments[0]);
    if ((uintptr_t)function != COPY_LIST) return NOT_SUPPORTED;
    const uint64_t *list = *(const uint64_t **)arguments[0];
    uint32_t count = *(uint32_t *)arguments[1];
    for (uint32_t entry = 0; entry < count; entry++, list += 3) {
        memmove((void *)(uintptr_t)list[0], (const void *)(uintptr_t)list[1], list[2]);
    }
    return OK;
}
