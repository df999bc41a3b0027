"""Where this host has kvspray and the rig's modules. Imported before anything that looks for
them."""

from __future__ import annotations

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
UNPACKED = pathlib.Path(os.environ.get("KVSPRAY_RIG_ROOT", "/opt/rig"))

sys.path[:0] = [str(HERE), str(HERE.parents[1] / "rig"), str(HERE.parents[1] / "e2e")]
if (UNPACKED / "own").exists():  # what a GPU host has instead of a checkout's build
    os.environ.setdefault("KVSPRAY_BINARY", str(UNPACKED / "own/bin/kvspray"))
    sys.path.insert(1, str(UNPACKED / "own"))
