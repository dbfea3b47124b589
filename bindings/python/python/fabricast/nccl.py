"""Runs an NCCL program whose collective operations are carried out by the faster of two libraries.

    python -m fabricast.nccl torchrun --nproc-per-node 8 train.py
"""

from . import _preload

__all__ = ["path"]

_NAME = "libfabricast_nccl.so"


def path() -> str:
    """The library for ``LD_PRELOAD``.

    >>> import fabricast.nccl
    >>> fabricast.nccl.path().endswith("libfabricast_nccl.so")
    True
    """
    return _preload.path(_NAME)


if __name__ == "__main__":
    _preload.main("fabricast.nccl", _NAME)
