"""Runs a program with the hook preloaded, which makes memory of CUDA's runtime mappable by other processes.

    python -m fabricast.hook python train.py
"""

from . import _preload

__all__ = ["path"]

_NAME = "libfabricast_hook.so"


def path() -> str:
    """The library for ``LD_PRELOAD``.

    >>> import fabricast.hook
    >>> fabricast.hook.path().endswith("libfabricast_hook.so")
    True
    """
    return _preload.path(_NAME)


if __name__ == "__main__":
    _preload.main("fabricast.hook", _NAME)
