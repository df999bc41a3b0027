"""The build and the machine of a benchmark's figures; lab/machine does the same in Go."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import subprocess
from typing import Any

VERSION_TIMEOUT_S = 10.0


def machine(kvspray: str | os.PathLike[str] | None) -> dict[str, Any]:
    """What a result carries. To be called before a run, which is load itself. ``kvspray`` is the
    sidecar's binary; None: the sidecar is another program, of unknown version."""
    return {
        "version": None if kvspray is None else _version(kvspray), "processor": _processor(),
        "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def _version(kvspray: str | os.PathLike[str]) -> str:
    out = subprocess.run(
        [kvspray, "version", "--json"], check=True, capture_output=True, timeout=VERSION_TIMEOUT_S
    ).stdout
    return str(json.loads(out)["version"])


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
