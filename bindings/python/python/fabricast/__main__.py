"""The command `fabricast`, as the package has it: `python -m fabricast`."""

import os
import pathlib
import sys


def main() -> None:
    command = pathlib.Path(__file__).with_name("_bin") / "fabricast"
    try:
        os.execv(command, ["fabricast", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"fabricast: {command}: {error.strerror}")


if __name__ == "__main__":
    main()
