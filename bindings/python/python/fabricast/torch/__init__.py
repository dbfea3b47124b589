"""Tensors of PyTorch in several processes without a copy.

A tensor is sent by a pipe, a socket or a rank of `torch.distributed`; what is sent is a token of about
100 bytes, and the receiver maps the memory: it has a tensor on the device where the memory is.

>>> import multiprocessing
>>> import torch
>>> import fabricast.torch
>>> here, there = multiprocessing.Pipe()
>>> fabricast.torch.send(torch.arange(6).reshape(2, 3).T, here)
>>> fabricast.torch.recv(there)
tensor([[0, 3],
        [1, 4],
        [2, 5]])

`install` lets `torch.multiprocessing` carry CUDA tensors in this way, too.
"""

import contextlib as _contextlib
import select as _select
import socket as _socket
import struct as _struct
from multiprocessing.reduction import ForkingPickler as _ForkingPickler

import torch as _torch
import torch.multiprocessing.reductions as _reductions

import fabricast as _fabricast
from fabricast import _native
from fabricast.errors import DeadlineExceeded, InvalidArgument, Malformed, NoDevice, NotSupported

# Without "open": `from fabricast.torch import *` leaves that of Python.
__all__ = ["empty", "install", "load", "pool", "pool_statistics", "recv", "send", "token", "trim_pool"]

_MAGIC = b"FT\x01"
_HEADER = _struct.Struct("<3sBBBh")
_REQUIRES_GRAD, _IS_CONJUGATED, _IS_NEGATED, _IS_PARAMETER, _IS_EMPTY = 1, 2, 4, 8, 16
# Types by their codes in messages, which are never reused. DLPack of older versions of PyTorch does
# not know the last ones: they are sent as integers of their size.
_TYPES = [
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128",
    "bool", "bfloat16", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]
_BY_DLPACK = 10
_INTEGERS = {1: _torch.int8, 2: _torch.int16, 4: _torch.int32, 8: _torch.int64}
_LENGTH = _struct.Struct("<I")
_LONGEST_MESSAGE = 4096


def _type_code(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise InvalidArgument(f"send tensor failed: elements of {name} are not sent", "send tensor")
    return _TYPES.index(name)


def _is_in_place(tensor):
    """Can other processes map its memory?"""
    if tensor.is_cuda:
        return True
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
    return _native._is_mapped(storage.data_ptr(), max(storage.nbytes(), 1))


def _describe(tensor):
    """A tensor without gradient and flags, and its header."""
    if not isinstance(tensor, _torch.Tensor):
        raise InvalidArgument(f"send tensor failed: {type(tensor).__name__} is no tensor", "send tensor")
    if tensor.layout is not _torch.strided or tensor.is_quantized:
        cause = f"a tensor of layout {tensor.layout} has no strides: send its parts"
        raise InvalidArgument(f"send tensor failed: {cause}", "send tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        cause = f"it is on {tensor.device}, which is neither the host nor a CUDA device"
        raise InvalidArgument(f"send tensor failed: {cause}", "send tensor")
    if tensor.requires_grad and not tensor.is_leaf:
        cause = "it is no leaf and requires gradients, which end at the process. Send tensor.detach()"
        raise InvalidArgument(f"send tensor failed: {cause}", "send tensor")
    flags = 0
    if tensor.requires_grad:
        flags |= _REQUIRES_GRAD
    if isinstance(tensor, _torch.nn.Parameter):
        flags |= _IS_PARAMETER
    bare = tensor.detach()
    if bare.is_conj():
        flags |= _IS_CONJUGATED
        bare = bare.conj()
    if bare.is_neg():
        flags |= _IS_NEGATED
        bare = _torch._neg_view(bare)
    code = _type_code(bare)
    if code >= _BY_DLPACK:
        bare = bare.view(_INTEGERS[bare.element_size()])
    if bare.numel() == 0:
        flags |= _IS_EMPTY
    device = -1 if bare.device.type == "cpu" else bare.device.index
    return bare, _HEADER.pack(_MAGIC, flags, code, bare.dim(), device)


def _message(tensor, directory):
    """The message for one receiver, and the share of its memory; None for a tensor without elements."""
    bare, header = _describe(tensor)
    if bare.numel() == 0:
        sizes = [*bare.shape, *bare.stride()]
        return header + _struct.pack(f"<{len(sizes)}q", *sizes), None
    # PyTorch exports tensors of the current device only.
    with _torch.cuda.device(bare.device) if bare.is_cuda else _contextlib.nullcontext():
        shared = _fabricast.share(bare, copy=not _is_in_place(bare), directory=directory)
    shared._limit_to_one()
    return header + shared.token, shared


def token(tensor, *, directory=None):
    """Bytes by which one other process loads the tensor: to be sent by any means.

    The memory is kept until it was loaded once, and until the receiver does not use it any more.
    """
    message, shared = _message(tensor, directory)
    if shared is not None:
        shared._leave()
    return message


def load(message, *, timeout=30.0, directory=None):
    """The tensor of a `token` of another process, on the device where its memory is."""
    if len(message) < _HEADER.size or message[: len(_MAGIC)] != _MAGIC:
        raise Malformed("receive tensor failed: the message is none of a tensor", "receive tensor")
    _, flags, code, dimensions, device = _HEADER.unpack_from(message)
    body = bytes(message[_HEADER.size :])
    dtype = getattr(_torch, _TYPES[code], None) if code < len(_TYPES) else None
    if dtype is None:
        cause = "this version of PyTorch has not the type of its elements"
        raise Malformed(f"receive tensor failed: {cause}", "receive tensor")
    if flags & _IS_EMPTY:
        tensor = _empty(body, dimensions, dtype, device)
    else:
        has_device = device >= 0 and _torch.cuda.is_available()
        user = f"cuda:{_torch.cuda.current_device()}" if has_device else None
        array = _fabricast.open(body, device=user, timeout=timeout, directory=directory)
        tensor = _torch.from_dlpack(array)
        sent_as = _INTEGERS[_torch.empty(0, dtype=dtype).element_size()] if code >= _BY_DLPACK else dtype
        if tensor.dtype != sent_as or tensor.dim() != dimensions:
            cause = f"the message is of {dtype} in {dimensions} dimensions, the memory of {array!r}"
            raise Malformed(f"receive tensor failed: {cause}", "receive tensor")
        if code >= _BY_DLPACK:
            tensor = tensor.view(dtype)
    if flags & _IS_NEGATED:
        tensor = _torch._neg_view(tensor)
    if flags & _IS_CONJUGATED:
        tensor = tensor.conj()
    if flags & _IS_PARAMETER:
        return _torch.nn.Parameter(tensor, requires_grad=bool(flags & _REQUIRES_GRAD))
    return tensor.requires_grad_(bool(flags & _REQUIRES_GRAD))


def _empty(body, dimensions, dtype, device):
    if len(body) != 16 * dimensions:
        raise Malformed("receive tensor failed: its shape is truncated", "receive tensor")
    sizes = _struct.unpack(f"<{2 * dimensions}q", body)
    shape, strides = sizes[:dimensions], sizes[dimensions:]
    if min(sizes, default=0) < 0 or 0 not in shape:
        raise Malformed("receive tensor failed: an empty tensor has elements", "receive tensor")
    place = "cpu" if device < 0 else f"cuda:{min(device, _torch.cuda.device_count() - 1)}"
    return _torch.empty_strided(shape, strides, dtype=dtype, device=place)


def open(token, **options):
    """What `fabricast.open` opens, with tensors instead of arrays: also of a structure, such as a `state_dict`.

    >>> import tempfile
    >>> import torch
    >>> import fabricast.torch
    >>> directory = tempfile.TemporaryDirectory()
    >>> parameters = torch.nn.Linear(2, 2).state_dict()
    >>> with fabricast.share(parameters, copy=True, name="model", directory=directory.name):
    ...     opened = fabricast.torch.open("model", directory=directory.name)
    >>> torch.equal(opened["bias"], parameters["bias"])
    True
    >>> directory.cleanup()
    """
    return _tensors(_fabricast.open(token, **options))


def _tensors(found):
    if isinstance(found, dict):
        return {key: _tensors(it) for key, it in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found)(_tensors(it) for it in found)
    return _torch.from_dlpack(found) if isinstance(found, _fabricast.Array) else found


def _is_rank(other):
    return isinstance(other, int) and not isinstance(other, bool)


def send(tensor, to, *, directory=None):
    """Sends a tensor to a connection of `multiprocessing`, a socket, or a rank of `torch.distributed`.

    Both processes then have a tensor in the same memory. A tensor of the host that is not in memory of
    the library (`empty`, `fabricast.allocate`) is copied once instead. If the message cannot be sent, the
    memory is not shared any more.
    """
    message, shared = _message(tensor, directory)
    try:
        if _is_rank(to):
            _torch.distributed.send_object_list([message], dst=to)
        elif isinstance(to, _socket.socket):
            to.sendall(_LENGTH.pack(len(message)) + message)
        else:
            to.send_bytes(message)
    except BaseException:
        if shared is not None:
            shared.close()
        raise
    if shared is not None:
        shared._leave()


def recv(frm, *, timeout=30.0, directory=None):
    """Receives a tensor that `send` sent: from a connection, a socket, or a rank."""
    if _is_rank(frm):
        received = [None]
        _torch.distributed.recv_object_list(received, src=frm)
        message = received[0]
    elif isinstance(frm, _socket.socket):
        message = _receive_from_socket(frm, timeout)
    else:
        waiting = _select.poll()
        waiting.register(frm.fileno(), _select.POLLIN)
        if not waiting.poll(None if timeout is None else 1000 * timeout):
            raise DeadlineExceeded(f"receive tensor failed: no message within {timeout} s", "receive tensor")
        message = frm.recv_bytes(_LONGEST_MESSAGE)
    return load(message, timeout=timeout, directory=directory)


def _receive_from_socket(socket, timeout):
    before = socket.gettimeout()
    socket.settimeout(timeout)
    try:
        (length,) = _LENGTH.unpack(_receive_exactly(socket, _LENGTH.size))
        if length > _LONGEST_MESSAGE:
            raise Malformed(f"receive tensor failed: a message of {length} bytes", "receive tensor")
        return _receive_exactly(socket, length)
    except TimeoutError as error:
        cause = f"receive tensor failed: no message within {timeout} s"
        raise DeadlineExceeded(cause, "receive tensor") from error
    finally:
        socket.settimeout(before)


def _receive_exactly(socket, length):
    received = b""
    while len(received) < length:
        part = socket.recv(length - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def _device_name(device):
    """Name of a device of PyTorch or of the library."""
    if not isinstance(device, _torch.device) and device not in ("cpu", "cuda"):
        return device
    device = _torch.device(device)
    if device.type == "cpu":
        return "host"
    return f"{device.type}:{_device_number(device)}" if device.type == "cuda" else str(device)


def empty(*shape, dtype=None, device="cpu"):
    """A tensor of zeros in memory that other processes map: of the host, or of a device.

    >>> import fabricast.torch
    >>> fabricast.torch.empty(2, 3).shape
    torch.Size([2, 3])
    """
    if len(shape) == 1 and not _is_rank(shape[0]):
        shape = tuple(shape[0])
    dtype = dtype or _torch.get_default_dtype()
    name = str(dtype).removeprefix("torch.")
    code = _TYPES.index(name) if name in _TYPES else -1
    as_sent = _INTEGERS[_torch.empty(0, dtype=dtype).element_size()] if code >= _BY_DLPACK else dtype
    array = _fabricast.allocate(shape, as_sent, device=_device_name(device))
    return _torch.from_dlpack(array).view(dtype)


def _reduce(tensor):
    if type(tensor) in (_torch.Tensor, _torch.nn.Parameter) and _is_sent_here(tensor):
        return load, (token(tensor),)
    return _reductions.reduce_tensor(tensor)


def _is_sent_here(tensor):
    is_plain = tensor.layout is _torch.strided and not tensor.is_quantized
    return is_plain and tensor.device.type in ("cpu", "cuda") and _is_in_place(tensor)


def install():
    """Lets `torch.multiprocessing` carry CUDA tensors, and tensors in memory of the library, by tokens.

    Its queues and pipes then work with every allocator of PyTorch (`expandable_segments`,
    `fabricast.torch.pool`), without rights to trace the other process, and between containers. Call it
    in each process that sends; receivers only need the package.
    """
    for kind in {_torch.Tensor, _torch.nn.Parameter, *_torch._tensor_classes}:
        _ForkingPickler.register(kind, _reduce)


_pool_allocator = None


class pool:
    """Allocates the CUDA tensors of its block in memory that other processes can map.

    Such memory is of shareable handles, and all devices that reach the tensor's device may access it.
    PyTorch caches blocks of it as of its own memory, in a pool apart; CUDA graphs may use it::

        with fabricast.torch.pool():
            weights = torch.empty(4096, 4096, device="cuda")

    The tensors are those of `device`, by default the current one when the object is made. One object
    can be used for several blocks, one after the other. PyTorch gives its memory back when the object
    and all its tensors are gone.
    """

    def __init__(self, device=None):
        global _pool_allocator
        if not _torch.cuda.is_available():
            cause = "there is no CUDA device. fabricast.torch.empty allocates memory of the host"
            raise NoDevice(f"make pool failed: {cause}", "make pool")
        if not hasattr(_torch.cuda, "MemPool"):
            cause = f"PyTorch {_torch.__version__} has no torch.cuda.MemPool; 2.5 or newer has"
            raise NotSupported(f"make pool failed: {cause}", "make pool")
        if _pool_allocator is None:
            _pool_allocator = _torch.cuda.memory.CUDAPluggableAllocator(
                _native.__file__, "fabricast_torch_malloc", "fabricast_torch_free"
            )
        self._device = _device_number(device)
        with _torch.cuda.device(self._device):
            self._pool = _torch.cuda.MemPool(_pool_allocator.allocator())
        self._used = []

    def __enter__(self):
        used = _torch.cuda.use_mem_pool(self._pool, self._device)
        used.__enter__()
        self._used.append(used)
        return self

    def __exit__(self, *exception):
        return self._used.pop().__exit__(*exception)


def _device_number(device):
    number = _torch.device(device if device is not None else "cuda").index
    return _torch.cuda.current_device() if number is None else number


def pool_statistics(device=None):
    """Bytes of the memory below all `pool` objects of a device, and events so far.

    `reserved` is what the device gave, `allocated` what PyTorch has of it, `waiting` what streams may
    still use.
    """
    return _native._pool_statistics(_device_number(device))


def trim_pool(device=None):
    """Gives unused memory of the device back, that PyTorch has given back before."""
    _native._trim_pool(_device_number(device))
