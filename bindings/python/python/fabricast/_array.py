"""What NumPy does with arrays of the library: indices, values, types, copies for other processes."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from fabricast._native import Array

_Elements = numpy.ndarray[Any, numpy.dtype[Any]]

# Fields of records, with their names in descriptions: those of NumPy.
_FIELDS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
# What a caller does with elements that no array of the library has.
_REMEDIES = {
    "O": "objects of Python have no bytes: send them pickled, as bytes",
    "U": "encode the texts: publish array.astype('S').view('uint8')",
    "S": "publish array.view('uint8')",
    "M": "publish array.view('int64')",
    "m": "publish array.view('int64')",
    "V": "publish array.view('uint8')",
    "f": "convert them: array.astype('float64')",
    "c": "convert them: array.astype('complex128')",
}


class _Memory:
    """The bytes of an array, for NumPy, which keeps this."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array._raw_interface()


def _narrow_type(name: str) -> numpy.dtype[Any] | None:
    """The type of `ml_dtypes` with this name; None without that package."""
    try:
        found = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ImportError:
        return None
    return None if found is None else numpy.dtype(found)


def _record_type(text: str) -> numpy.dtype[Any]:
    fields, size = text[1:].split("}")
    names, formats, offsets, end = [], [], [], 0
    for field in fields.split(","):
        name, rest = field.split(":")
        rest, _, offset = rest.partition("@")
        kind, _, extents = rest.partition("(")
        shape = tuple(int(extent) for extent in extents.rstrip(")").split("x")) if extents else ()
        field_type = numpy.dtype((kind, shape))
        names.append(name)
        formats.append(field_type)
        offsets.append(int(offset) if offset else end)
        end = offsets[-1] + field_type.itemsize
    return numpy.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": int(size or end)})


def dtype_of(name: str) -> numpy.dtype[Any] | str:
    """The type of NumPy with this name, or the name if there is none."""
    if name.startswith("{"):
        return _record_type(name)
    try:
        return numpy.dtype(name)
    except TypeError:
        return _narrow_type(name) or name


def _refusal(dtype: numpy.dtype[Any]) -> str:
    remedy = _REMEDIES.get(dtype.kind, "convert them with astype")
    if dtype.byteorder == ">":
        remedy = f"they are big-endian: use dtype \"{dtype.newbyteorder('<').str}\", array.astype(\"{dtype.newbyteorder('<').str}\")"
    return f"arrays of the library have no elements of {dtype}. {remedy[0].upper()}{remedy[1:]}"


def type_name(dtype: Any) -> str:
    """The name in the library of what NumPy takes for a type of elements."""
    try:
        found = numpy.dtype(dtype)
    except TypeError:
        cause = "NumPy and PyTorch have no such type. Names are float32, bfloat16, …; records have fields with names"
        raise TypeError(f"dtype={dtype!r}: {cause}") from None
    if dtype is None or found.subdtype is not None:
        raise TypeError(f"dtype={dtype!r}: a type of one element, such as float32; extents are part of the shape")
    if found.names is None:
        if found.type.__module__.partition(".")[0] == "ml_dtypes":
            return str(found.name)
        if found.byteorder != ">" and found.kind + str(found.itemsize) in _FIELDS:
            return str(found.str)
        raise TypeError(f"dtype={dtype!r}: {_refusal(found)}")
    return _description(found)


def _description(dtype: numpy.dtype[Any]) -> str:
    fields, end = [], 0
    if not dtype.fields:
        raise TypeError("a record has at least one field")
    by_name = {name: dtype.fields[name] for name in dtype.names or ()}
    for name, (field_type, offset, *_) in sorted(by_name.items(), key=lambda it: it[1][1]):
        kind, extents = field_type.subdtype or (field_type, ())
        if kind.names is not None:
            raise TypeError(f"field {name!r} has fields itself: give each of them a name of the record")
        if kind.byteorder == ">" or kind.kind + str(kind.itemsize) not in _FIELDS:
            raise TypeError(f"field {name!r}: {_refusal(kind)}")
        if offset < end or 0 in extents:
            raise TypeError(f"field {name!r}: fields do not overlap, and have elements")
        if not name.isidentifier() or not name.isascii():
            raise TypeError(f"field {name!r}: names of fields are those of C, such as \"x_1\"")
        shape = f"({'x'.join(map(str, extents))})" if extents else ""
        place = "" if offset == end else f"@{offset}"
        fields.append(f"{name}:{kind.kind}{kind.itemsize}{shape}{place}")
        end = offset + field_type.itemsize
    return f"{{{','.join(fields)}}}{'' if dtype.itemsize == end else dtype.itemsize}"


def _check_host(array: Array) -> None:
    if array.__dlpack_device__()[0] == 1:
        return
    remedy = "use torch.from_dlpack(array) or cupy.from_dlpack(array), or copy it: numpy.from_dlpack(array, device=\"cpu\")"
    raise TypeError(f"the array is on {array.device}, NumPy reads memory of the host: {remedy}")


def _unpacked(array: Array, bits: int, dtype: numpy.dtype[Any]) -> _Elements:
    """The elements of less than a byte, with one in each byte. The first is in the lowest bits."""
    all_bits = numpy.unpackbits(numpy.asarray(_Memory(array)), count=array.size * bits, bitorder="little")
    padded = numpy.zeros((array.size, 8), "uint8")
    padded[:, :bits] = all_bits.reshape(array.size, bits)
    if dtype.name.startswith("int"):
        # NumPy has them as signed numbers of a byte.
        padded[:, bits:] = padded[:, bits - 1 : bits]
    unpacked = numpy.packbits(padded, axis=1, bitorder="little").view(dtype).reshape(array.shape)
    unpacked.flags.writeable = False
    return unpacked


def _packed(elements: _Elements, bits: int) -> _Elements:
    all_bits = numpy.unpackbits(elements.reshape(-1, 1).view("uint8"), axis=1, bitorder="little")
    return numpy.packbits(all_bits[:, :bits].reshape(-1), bitorder="little")


def view(array: Array) -> _Elements:
    """The array of NumPy in the same memory, or a read-only copy of elements of less than a byte."""
    _check_host(array)
    name, bits = array._type
    dtype = dtype_of(name)
    if isinstance(dtype, str):
        packed = dtype.partition("_x")[0]
        remedy = f"allocate {packed}" if packed != dtype else "install ml_dtypes"
        remedy += ", or use torch.from_dlpack(array)"
        raise TypeError(f"NumPy has no elements of {dtype} by itself: {remedy}")
    if bits is not None and bits < 8:
        return _unpacked(array, bits, dtype)
    return numpy.asarray(_Memory(array)).view(dtype)


def as_numpy(array: Array, dtype: Any, copy: bool | None) -> _Elements:
    """What `numpy.asarray` and `numpy.array` demand."""
    found = view(array)
    is_copied = array._type[1] is not None and array._type[1] < 8
    if copy is False and (is_copied or (dtype is not None and numpy.dtype(dtype) != found.dtype)):
        raise ValueError(f"an array of {array._type[0]} cannot be read as {dtype or found.dtype} without a copy")
    if dtype is not None and numpy.dtype(dtype) != found.dtype:
        return found.astype(dtype)
    return found.copy() if copy else found


def as_arrow(array: Array, type: Any) -> Any:
    """What `pyarrow.array` demands."""
    pyarrow = importlib.import_module("pyarrow")
    found = view(array)
    if found.ndim != 1:
        raise ValueError(f"arrays of Arrow have one dimension, this has {found.ndim}: pyarrow.Tensor.from_numpy(array[...])")
    return pyarrow.array(found, type=type)


def _on_device(array: Array) -> Any:
    """The array of a framework that the program uses, for memory of a CUDA device."""
    for name in ("torch", "cupy"):
        framework = sys.modules.get(name)
        if framework is not None and hasattr(framework, "from_dlpack"):
            return framework.from_dlpack(array)
    raise TypeError(f"the array is on {array.device}: import torch or cupy, which index it")


def item(array: Array, key: Any) -> Any:
    """`array[key]`."""
    if array.__dlpack_device__()[0] != 1:
        return _on_device(array)[key]
    return view(array)[key]


def set_item(array: Array, key: Any, value: Any) -> None:
    """`array[key] = value`."""
    if array.readonly:
        raise ValueError("the array is read-only, other readers have the same memory: copy it")
    if array.__dlpack_device__()[0] != 1:
        _on_device(array)[key] = value
        return
    elements = view(array)
    _, bits = array._type
    if bits is None or bits >= 8:
        elements[key] = value
        return
    elements = elements.copy()
    elements[key] = value
    numpy.asarray(_Memory(array))[...] = _packed(elements, bits)


def number(array: Array, kind: str) -> float | int:
    """`float(array)`, `int(array)`."""
    elements = view(array)
    return float(elements) if kind == "float" else int(elements)


def represent(array: Array, short: str) -> str:
    """The values, or this text for those that are not in memory of the host, or have no type of NumPy."""
    if array.__dlpack_device__()[0] != 1:
        return short
    try:
        elements = view(array)
    except TypeError:
        return short
    prefix = "fabricast.Array("
    values = numpy.array2string(elements, separator=", ", prefix=prefix)
    if elements.size == 0 and elements.shape != (0,):
        values = f"[], shape={elements.shape}"
    access = ", read-only" if array.readonly else ""
    return f"{prefix}{values}, dtype={elements.dtype}{access})"


def reduce(array: Array) -> tuple[Any, ...]:
    """What `pickle` demands: a token for one process, which then has the same memory, or a copy of it."""
    import fabricast
    from fabricast import _native

    is_on_device, is_mapped = array.__dlpack_device__()[0] != 1, _native._describe(array)[4] is not None
    try:
        shared = fabricast.share(array, copy=not (is_on_device or is_mapped))
    except fabricast.errors.Failed:
        # Memory that others have opened as read-only is theirs alone.
        if is_on_device:
            raise
        shared = fabricast.share(array, copy=True)
    return _load, (shared.for_one_receiver(),)


def _load(token: bytes) -> Any:
    import fabricast

    return fabricast.open(token)
