"""CUDA's runtime, as a program sees it that is linked to it: preloaded functions come first."""

import ctypes
import os

ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
driver = ctypes.CDLL("libcuda.so.1")
cuda = ctypes.CDLL(None, use_errno=True)
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD, SYS_GETTID = 434, 438, 178 if os.uname().machine == "aarch64" else 186


class Handle(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_ubyte * 64)]

    def __bytes__(self):
        return bytes(self.numbers)


class Failed(Exception):
    pass


def check(code):
    if code != 0:
        raise Failed(code)


def malloc(length, stream=None):
    address = ctypes.c_void_p()
    if stream is None:
        check(cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(length)))
    else:
        check(cuda.cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(length), ctypes.c_void_p(stream)))
    return address.value


def free(address, stream=None):
    if stream is None:
        check(cuda.cudaFree(ctypes.c_void_p(address)))
    else:
        check(cuda.cudaFreeAsync(ctypes.c_void_p(address), ctypes.c_void_p(stream)))


def export(address):
    handle = Handle()
    check(cuda.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address)))
    return bytes(handle)


def open_handle(handle):
    address = ctypes.c_void_p()
    given = Handle((ctypes.c_ubyte * 64)(*handle))
    check(cuda.cudaIpcOpenMemHandle(ctypes.byref(address), given, 1))
    return address.value


def close_handle(address):
    check(cuda.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))


def set_device(number):
    check(cuda.cudaSetDevice(number))


def memory(address, length):
    """The fake driver's memory is readable by the host."""
    return (ctypes.c_ubyte * length).from_address(address)


def fill(address, length, byte):
    check(cuda.cudaMemset(ctypes.c_void_p(address), byte, ctypes.c_size_t(length)))


def used():
    """Bytes of the current device in use by this process."""
    check(cuda.cudaFree(None))
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(driver.cuMemGetInfo_v2(ctypes.byref(available), ctypes.byref(total)))
    return total.value - available.value


def get_descriptor(process, number):
    """Gets a descriptor of another process, like PyTorch for a piece of an expandable segment."""
    pidfd = cuda.syscall(ctypes.c_long(SYS_PIDFD_OPEN), ctypes.c_long(process), ctypes.c_long(0))
    if pidfd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open")
    found = cuda.syscall(
        ctypes.c_long(SYS_PIDFD_GETFD), ctypes.c_long(pidfd), ctypes.c_long(number), ctypes.c_long(0)
    )
    error = ctypes.get_errno()
    os.close(pidfd)
    if found < 0:
        raise OSError(error, os.strerror(error))
    return found


def threads():
    return sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
