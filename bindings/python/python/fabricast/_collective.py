"""Arrays for the results of collective operations."""

from __future__ import annotations

import sys
from typing import Any

import numpy

from fabricast._native import Array, allocate


def empty(array: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the library that made another one, with its type of elements."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.new_empty(shape)
    if isinstance(array, Array):
        return allocate(shape, array._type[0], device=array.device)
    if cupy is not None and isinstance(array, cupy.ndarray):
        with array.device:
            return cupy.empty(shape, array.dtype)
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError("arrays of this library cannot be made here: pass out, an array for the result")
    return numpy.empty(shape, numpy.asarray(array).dtype)
