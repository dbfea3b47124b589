"""Operators of arrays: what NumPy calculates, or on a device the framework."""

import operator
from collections.abc import Callable
from typing import Any

from fabricast._native import Array

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_UNARY = ("neg", "pos", "abs", "invert")


def _elements(value: Any) -> Any:
    return value[...] if isinstance(value, Array) else value


def _operator(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`array + value`, `value + array` and `array += value`."""
    calculate, change = getattr(operator, f"__{name}__"), getattr(operator, f"__i{name}__")

    def forward(self: Array, value: Any, /) -> Any:
        return calculate(self[...], _elements(value))

    def reflected(self: Array, value: Any, /) -> Any:
        return calculate(_elements(value), self[...])

    def in_place(self: Array, value: Any, /) -> Array:
        _, bits = self._type
        if self.readonly or (bits is not None and bits < 8):
            self[...] = calculate(self[...], _elements(value))
        else:
            change(self[...], _elements(value))
        return self

    return forward, reflected, in_place


def _unary_operator(name: str) -> Callable[..., Any]:
    calculate = getattr(operator, f"__{name}__")
    return lambda self: calculate(self[...])


def _attribute(self: Array, name: str) -> Any:
    """`array.sum`, `array.T`, …: of the array of NumPy in the same memory, or of the framework."""
    if not name.startswith("_"):
        try:
            elements = self[...]
        except TypeError as error:
            cause = f"'fabricast.Array' object has no attribute {name!r}: {error}"
            raise AttributeError(cause, name=name, obj=self) from None
        if hasattr(elements, name):
            return getattr(elements, name)
    # Raises the error for it.
    return object.__getattribute__(self, name)


def add_operators() -> None:
    """Gives arrays their operators, and what else NumPy has. NumPy is imported when one is used."""
    setattr(Array, "__getattr__", _attribute)
    for name in _BINARY:
        for prefix, function in zip(("", "r", "i"), _operator(name)):
            setattr(Array, f"__{prefix}{name}__", function)
    for name in _UNARY:
        setattr(Array, f"__{name}__", _unary_operator(name))
