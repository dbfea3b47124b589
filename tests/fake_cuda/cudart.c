/* The part of CUDA's runtime that allocators and torch.multiprocessing use, on the driver beside it: libcudart.so.13 for
 * tests. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t Address;
typedef struct {
    char reserved[64];
} IpcHandle;

int cuInit(unsigned flags);
int cuDeviceGetCount(int *count);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuCtxGetDevice(int *device);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(Address *address, size_t length);
int cuMemFree_v2(Address address);
int cuMemcpyAsync(Address to, Address from, size_t length, void *stream);
int cuMemsetD8Async(Address to, unsigned char byte, size_t length, void *stream);
int cuIpcGetMemHandle(IpcHandle *handle, Address address);
int cuIpcOpenMemHandle_v2(Address *address, IpcHandle handle, unsigned flags);
int cuIpcCloseMemHandle(Address address);

static Address of(const void *pointer) { return (Address)(uintptr_t)pointer; }

static int begin(void) {
    int device;
    void *context;
    if (cuCtxGetDevice(&device) == 0) return 0;
    int code = cuDevicePrimaryCtxRetain(&context, 0);
    return code ? code : cuCtxSetCurrent(context);
}

int cudaGetDeviceCount(int *count) { return cuDeviceGetCount(count); }

int cudaGetDevice(int *device) {
    int code = begin();
    return code ? code : cuCtxGetDevice(device);
}

int cudaSetDevice(int device) {
    void *context;
    int code = cuDevicePrimaryCtxRetain(&context, device);
    return code ? code : cuCtxSetCurrent(context);
}

int cudaDeviceSynchronize(void) {
    int code = begin();
    return code ? code : cuCtxSynchronize();
}

int cudaMalloc(void **pointer, size_t length) {
    Address address;
    int code = begin();
    if (!code) code = cuMemAlloc_v2(&address, length);
    if (!code) *pointer = (void *)(uintptr_t)address;
    return code;
}

int cudaFree(void *pointer) { return pointer ? cuMemFree_v2(of(pointer)) : begin(); }

int cudaMallocAsync(void **pointer, size_t length, void *stream) {
    (void)stream;
    return cudaMalloc(pointer, length);
}

int cudaFreeAsync(void *pointer, void *stream) {
    (void)stream;
    return cudaFree(pointer);
}

int cudaMemcpy(void *to, const void *from, size_t length, int kind) {
    (void)kind;
    return cuMemcpyAsync(of(to), of(from), length, NULL);
}

int cudaMemset(void *to, int byte, size_t length) { return cuMemsetD8Async(of(to), (unsigned char)byte, length, NULL); }

int cudaIpcGetMemHandle(IpcHandle *handle, void *pointer) { return cuIpcGetMemHandle(handle, of(pointer)); }

int cudaIpcOpenMemHandle(void **pointer, IpcHandle handle, unsigned flags) {
    Address address;
    int code = begin();
    if (!code) code = cuIpcOpenMemHandle_v2(&address, handle, flags);
    if (!code) *pointer = (void *)(uintptr_t)address;
    return code;
}

int cudaIpcCloseMemHandle(void *pointer) { return cuIpcCloseMemHandle(of(pointer)); }

int cudaIpcGetEventHandle(IpcHandle *handle, void *event) {
    (void)event;
    memset(handle, 0, sizeof *handle);
    return 0;
}
