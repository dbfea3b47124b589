/* CUDA's driver, loaded at run time, so that what includes this is compiled anywhere. */
#ifndef DRIVER_H
#define DRIVER_H

#include "check.h"

#include <dlfcn.h>

typedef unsigned long long device_pointer;

static struct {
    int (*init)(unsigned);
    int (*device)(int *, int);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*allocate)(device_pointer *, size_t);
    int (*release)(device_pointer);
    int (*to_device)(device_pointer, const void *, size_t);
    int (*to_host)(void *, device_pointer, size_t);
    int (*attribute)(void *, int, device_pointer);
    int (*make_stream)(void **, unsigned);
    int (*end_stream)(void *);
    int (*synchronize)(void *);
    int (*to_host_on)(void *, device_pointer, size_t, void *);
} cuda;

static inline void *function(void *driver, const char *name)
{
    void *found = dlsym(driver, name);
    CHECK(found != NULL);
    return found;
}

/* A context of the device, current in this thread. */
static inline void open_device(int number)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int device;

    CHECK(driver != NULL);
    *(void **)&cuda.init = function(driver, "cuInit");
    *(void **)&cuda.device = function(driver, "cuDeviceGet");
    *(void **)&cuda.retain = function(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&cuda.set_current = function(driver, "cuCtxSetCurrent");
    *(void **)&cuda.allocate = function(driver, "cuMemAlloc_v2");
    *(void **)&cuda.release = function(driver, "cuMemFree_v2");
    *(void **)&cuda.to_device = function(driver, "cuMemcpyHtoD_v2");
    *(void **)&cuda.to_host = function(driver, "cuMemcpyDtoH_v2");
    *(void **)&cuda.attribute = function(driver, "cuPointerGetAttribute");
    *(void **)&cuda.make_stream = function(driver, "cuStreamCreate");
    *(void **)&cuda.end_stream = function(driver, "cuStreamDestroy_v2");
    *(void **)&cuda.synchronize = function(driver, "cuStreamSynchronize");
    *(void **)&cuda.to_host_on = function(driver, "cuMemcpyDtoHAsync_v2");
    CHECK(cuda.init(0) == 0 && cuda.device(&device, number) == 0);
    CHECK(cuda.retain(&context, device) == 0 && cuda.set_current(context) == 0);
}

static inline int number(void)
{
    const char *name = getenv("FABRICAST_DEVICE");
    return name != NULL && strncmp(name, "cuda:", 5) == 0 ? atoi(name + 5) : -1;
}

#endif
