"""``python -m kvspray.preload COMMAND``: runs a program whose large copies between host memory and
a GPU the sidecar makes (docs/preload.md).

Without a command it prints the path of the library, for LD_PRELOAD.
"""

from __future__ import annotations

import os
import pathlib
import sys

LIBRARY = pathlib.Path(__file__).with_name("libkvspray_preload.so")


def main() -> None:
    command = sys.argv[1:]
    if not command:
        print(LIBRARY)
        return
    if not LIBRARY.is_file():
        sys.exit(f"kvspray.preload: {LIBRARY}: not there: install kvspray with a C compiler")
    if set(str(LIBRARY)) & set(" :"):
        sys.exit(
            f"kvspray.preload: {LIBRARY}: LD_PRELOAD takes no path with a space or a colon: "
            "install kvspray elsewhere"
        )
    others = os.environ.get("LD_PRELOAD", "")
    os.environ["LD_PRELOAD"] = f"{LIBRARY} {others}".strip()
    try:
        os.execvp(command[0], command)
    except OSError as err:
        sys.exit(f"kvspray.preload: {command[0]}: {err.strerror}")


if __name__ == "__main__":
    main()
