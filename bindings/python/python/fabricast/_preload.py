"""Programs that run with a library of the package preloaded."""

import os
import pathlib
import sys


def path(name: str) -> str:
    return str(pathlib.Path(__file__).with_name(name))


def main(module: str, name: str) -> None:
    usage = f"usage: {pathlib.Path(sys.executable).name} -m {module} PROGRAM [ARGUMENT...]"
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(usage)
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(usage)
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = f"{path(name)}:{before}" if before else path(name)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
