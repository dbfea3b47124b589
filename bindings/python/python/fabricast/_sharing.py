"""Arrays, and structures of arrays, that several processes have without a copy."""

import grp
import json
import pwd
import struct
import time
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from fabricast import _native
from fabricast._wait import check_timeout
from fabricast.errors import Closed, InvalidArgument, Malformed, NotFoundInTime, Unknown

_Directory = str | PathLike[str] | None
_SHARE = "share memory"
_OPEN = "open shared memory"
# The memory of a structure begins with the length of its description.
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_LONGEST_DESCRIPTION = 1 << 28
# In bits: Python limits the digits of integers that it reads.
_LONGEST_INTEGER = 4096
# Between two looks for a name.
_PAUSE = 0.005


def _numbers(operation: str, kind: str, ids: Iterable[str | int] | str | int) -> list[int]:
    """Numbers of users or groups, which are named or numbered."""
    numbers = []
    for it in [ids] if isinstance(ids, (str, int)) else ids:
        try:
            if not isinstance(it, int):
                it = pwd.getpwnam(it).pw_uid if kind == "user" else grp.getgrnam(it).gr_gid
        except (KeyError, TypeError):
            raise InvalidArgument(f"{operation} failed: there is no {kind} {it!r}", operation) from None
        if not 0 <= it < 1 << 32:
            raise InvalidArgument(f"{operation} failed: {it} is no number of a {kind}", operation)
        numbers.append(it)
    return numbers


def share(
    array: Any,
    *,
    name: str | None = None,
    readonly: bool = False,
    copy: bool = False,
    directory: _Directory = None,
    users: Iterable[str | int] | str | int = (),
    groups: Iterable[str | int] | str | int = (),
) -> _native.Shared:
    """Shares an array, or a structure of arrays, with other processes of this machine, which `open` it by its token, or
    by `name`, and have the same memory.

    The memory is that of `allocate` or of an allocator of the library, or of a CUDA device. With `copy` a copy of any
    array is shared, in memory of the host: `shared.value` has it. With `readonly` others cannot write to memory of the
    host, and promise not to write to memory of a device.

    A structure is a `dict`, `list` or `tuple` of arrays, numbers, texts and further structures: it has one token and,
    copied, one segment of memory. Others open these types, also if it has subclasses of them, such as `OrderedDict` or a
    `namedtuple`.

    Other processes of this user may open it, and those of `users` and `groups`: names or numbers. For these, `directory`
    must be one that they can enter.

    >>> import tempfile
    >>> import fabricast
    >>> directory = tempfile.TemporaryDirectory()
    >>> weights = fabricast.allocate((2, 3), "float32")
    >>> shared = fabricast.share(weights, directory=directory.name)
    >>> opened = fabricast.open(shared.token)   # in another process
    >>> weights[1, 2] = 7
    >>> opened
    fabricast.Array([[0., 0., 0.],
                     [0., 0., 7.]], dtype=float32)
    >>> shared.close(); del opened
    >>> with fabricast.share({"w": weights, "step": 3}, copy=True, name="model", directory=directory.name):
    ...     fabricast.open("model", directory=directory.name)["w"].shape
    (2, 3)
    >>> directory.cleanup()
    """
    user_numbers, group_numbers = _numbers(_SHARE, "user", users), _numbers(_SHARE, "group", groups)
    has_fields = getattr(getattr(array, "dtype", None), "names", None) is not None
    if isinstance(array, (dict, list, tuple)) or has_fields:
        return _Packing(copy, readonly, directory, user_numbers, group_numbers).share(array, name)
    return _native._share(array, copy, readonly, (directory, name, user_numbers, group_numbers))


def open(
    token: bytes | bytearray | memoryview | str,
    *,
    device: str | None = None,
    timeout: float | None = 30.0,
    directory: _Directory = None,
    owner: str | int | None = None,
) -> Any:
    """Opens memory that another process shares, by its token or its name: the array has the type, shape and strides of
    the shared one, and is on the device where its memory is; a structure has such arrays.

    It waits for a name until `timeout`. `device` names a further device that accesses the memory directly. The memory
    stays as long as the array or a view of it exists.

    `directory` is that of this process, if its container shows the one of the other process elsewhere. `owner` is a user,
    a name or a number, whose memory is opened beside that of the own user.
    """
    check_timeout(_OPEN, timeout)
    owners = [] if owner is None else _numbers(_OPEN, "user", owner)
    if isinstance(token, str):
        return _open_name(token, device, timeout, directory, owners)
    try:
        token = bytes(memoryview(token))
    except TypeError:
        cause = f"{type(token).__name__} is neither a token, which is bytes, nor a name, which is text"
        raise InvalidArgument(f"{_OPEN} failed: {cause}", _OPEN) from None
    return _open(token, device, timeout, directory, owners)


def _open(
    token: bytes, device: str | None, timeout: float | None, directory: _Directory, owners: list[int]
) -> Any:
    def open_part(token: bytes) -> tuple[_native.Array, bool]:
        return _native._open(token, device, timeout, directory, owners)

    array, is_structure = open_part(token)
    return _unpack(array, lambda part: open_part(part)[0]) if is_structure else array


def _open_name(
    name: str, device: str | None, timeout: float | None, directory: _Directory, owners: list[int]
) -> Any:
    end = None if timeout is None else time.monotonic() + timeout
    failed = None
    while True:
        token = _native._token_of_name(name, directory)
        left = None if end is None else end - time.monotonic()
        if token is not None:
            try:
                return _open(token, device, None if left is None else max(left, 0), directory, owners)
            except (Closed, Unknown):
                # Its owner ends just now, and another one may share memory under the name; if it does not end, the memory
                # cannot be opened.
                if token == failed:
                    raise
                failed = token
        if left is not None and left <= 0:
            cause = f"no process shares memory under the name {name!r} within {timeout} s"
            where = _native._directory(directory)
            raise NotFoundInTime(f"{_OPEN} failed: {cause}, in {where}", _OPEN)
        time.sleep(_PAUSE if left is None else max(0, min(_PAUSE, left)))


class _Packing:
    """Makes the memory of a structure."""

    def __init__(
        self, copy: bool, readonly: bool, directory: _Directory, users: list[int], groups: list[int]
    ) -> None:
        self._is_copied, self._is_read_only, self._directory = copy, readonly, directory
        self._users, self._groups = users, groups
        self._length = 0
        # Arrays to copy, with their places, types and shapes.
        self._copies: list[tuple[Any, int, str, list[int]]] = []
        self._parts: list[_native.Shared] = []
        # Of memories that are shared in place, by their addresses: the index of the part.
        self._of_memory: dict[int, int] = {}

    def share(self, structure: Any, name: str | None) -> _native.Shared:
        try:
            tree = self._described(structure, set())
            tokens = [part.token.hex() for part in self._parts]
            description = json.dumps({"parts": tokens, "tree": tree}, separators=(",", ":")).encode()
        except RecursionError:
            raise InvalidArgument(f"{_SHARE} failed: the structure has too many levels", _SHARE) from None
        begin = _aligned(_LENGTH.size + len(description))
        memory = _native.allocate(begin + self._length, "uint8")
        head = memoryview(memory)
        head[: _LENGTH.size] = _LENGTH.pack(len(description))
        head[_LENGTH.size : _LENGTH.size + len(description)] = description
        for source, offset, dtype, shape in self._copies:
            _native._copy(source, memory._part(begin + offset, dtype, shape, None))
        value = _built(tree, memory, begin, [part.value for part in self._parts])
        audience = (self._directory, name, self._users, self._groups)
        return _native._share_structure(memory, self._parts, value, self._is_read_only, audience)

    def _described(self, value: Any, above: set[int]) -> list[Any]:
        if isinstance(value, (dict, list, tuple)):
            if id(value) in above:
                raise InvalidArgument(f"{_SHARE} failed: the structure contains itself", _SHARE)
            above.add(id(value))
            if isinstance(value, dict):
                described: list[Any] = ["d", [[self._key(key), self._described(it, above)] for key, it in value.items()]]
            else:
                kind = "t" if isinstance(value, tuple) else "l"
                described = [kind, [self._described(it, above) for it in value]]
            above.discard(id(value))
            return described
        if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
            cause = f"an integer of {value.bit_length()} bits, {_LONGEST_INTEGER} are the maximum"
            raise InvalidArgument(f"{_SHARE} failed: {cause}", _SHARE)
        if value is None or isinstance(value, (bool, int, float, str)):
            return ["v", value]
        return self._array(value)

    @staticmethod
    def _key(key: Any) -> int | str:
        if isinstance(key, (int, str)) and not isinstance(key, bool):
            return key
        cause = f"the key {key!r} is neither a text nor a number"
        raise InvalidArgument(f"{_SHARE} failed: {cause}", _SHARE)

    def _array(self, array: Any) -> list[Any]:
        dtype, shape, strides, length, memory, offset, is_cuda = _native._describe(array)
        if self._is_copied or length == 0:
            place, self._length = self._length, _aligned(self._length + length)
            if length:
                self._copies.append((array, place, dtype, shape))
            return ["a", -1, place, dtype, shape, None]
        if memory is not None:
            address = memory._address
            if address not in self._of_memory:
                self._of_memory[address] = self._part(memory)
            return ["a", self._of_memory[address], offset, dtype, shape, strides]
        if is_cuda:
            return ["p", self._part(array)]
        cause = "other processes cannot map the memory of an array of the structure. Use copy=True, or make the arrays in memory of fabricast.allocate"
        raise InvalidArgument(f"{_SHARE} failed: {cause}", _SHARE)

    def _part(self, array: Any) -> int:
        audience = (self._directory, None, self._users, self._groups)
        self._parts.append(_native._share(array, False, self._is_read_only, audience))
        return len(self._parts) - 1


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _built(node: Any, memory: _native.Array, begin: int, parts: list[Any]) -> Any:
    """The structure of a description, with arrays in memory."""
    kind, *rest = node
    if kind == "d":
        return {key: _built(it, memory, begin, parts) for key, it in rest[0]}
    if kind in ("l", "t"):
        found = [_built(it, memory, begin, parts) for it in rest[0]]
        return tuple(found) if kind == "t" else found
    if kind == "v":
        return rest[0]
    if kind == "p":
        return parts[rest[0]]
    if kind == "a":
        part, offset, dtype, shape, strides = rest
        if offset < 0:
            raise ValueError(offset)
        if part < 0:
            return memory._part(begin + offset, dtype, shape, strides)
        return parts[part]._part(offset, dtype, shape, strides)
    raise ValueError(kind)


def _unpack(memory: _native.Array, open_part: Callable[[bytes], _native.Array]) -> Any:
    try:
        (length,) = _LENGTH.unpack(memoryview(memory)[: _LENGTH.size])
        if length > min(_LONGEST_DESCRIPTION, memory.nbytes - _LENGTH.size):
            raise ValueError(length)
        # Once: the other process may write to it meanwhile.
        description = json.loads(bytes(memoryview(memory)[_LENGTH.size : _LENGTH.size + length]))
        tokens = [bytes.fromhex(token) for token in description["parts"]]
        tree = description["tree"]
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise Malformed(f"{_OPEN} failed: the description of the structure is malformed", _OPEN) from error
    parts = [open_part(token) for token in tokens]
    try:
        return _built(tree, memory, _aligned(_LENGTH.size + length), parts)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        raise Malformed(f"{_OPEN} failed: the description of the structure is malformed", _OPEN) from error
