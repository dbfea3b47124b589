"""Runs a program with the hook preloaded, which makes memory of CUDA's runtime mappable by other processes.

    python -m fabricast.hook python train.py
"""

import os
import pathlib
import sys

__all__ = ["path"]


def path() -> str:
    """The library for ``LD_PRELOAD``.

    >>> import fabricast.hook
    >>> fabricast.hook.path().endswith("libfabricast_hook.so")
    True
    """
    return str(pathlib.Path(__file__).with_name("libfabricast_hook.so"))


def _main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: {pathlib.Path(sys.executable).name} -m fabricast.hook PROGRAM [ARGUMENT...]")
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = f"{path()}:{before}" if before else path()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    _main()
