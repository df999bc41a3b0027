"""``python -m kvspray`` and the command ``kvspray``: become the sidecar binary that the wheel
contains. Only ``kvspray try``, which starts engines, is in Python.

The process is replaced, so that signals, exit status and process id are those of the binary.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn

BINARY = pathlib.Path(__file__).with_name("_bin") / "kvspray"


def main() -> NoReturn:
    if sys.argv[1:2] == ["try"]:
        from kvspray.trial import command

        sys.exit(command.main(sys.argv[2:]))
    if not BINARY.is_file():
        sys.exit(
            f"kvspray: {BINARY} is missing: this package was built from sources, without the "
            "sidecar. Install a wheel from `make wheels`, or run bin/kvspray from `make build`"
        )
    # `kvspray doctor` looks for engines in the environment that this package is installed in.
    if sys.prefix != sys.base_prefix:
        os.environ.setdefault("VIRTUAL_ENV", sys.prefix)
    os.execv(BINARY, ["kvspray", *sys.argv[1:]])


if __name__ == "__main__":
    main()
