# SPDX-License-Identifier: Apache-2.0
"""kvspray try, as an installed package runs it; pybind/tests has its faults."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import cluster as rig
from conftest import need


def test_kvspray_try(tmp_path: pathlib.Path) -> None:
    need("vLLM", importlib.util.find_spec("vllm") is not None, "make env")
    done = subprocess.run(
        [sys.executable, "-m", "kvspray", "try", "--logs", str(tmp_path / "logs")],
        env={**os.environ, "KVSPRAY_BINARY": str(rig.BINARY)}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out = done.stdout
    assert done.returncode == 0 and "3 of 3 answers equal" in out, out
    assert all(int(n) > 100 for n in re.findall(r"(\d+) KiB moved", out)), out
    assert "received" in out and "vllm serve MODEL" in out, out
    run = re.search(r"(/\S+)/tiny\b", (tmp_path / "logs" / "plain.log").read_text())
    assert run and not os.path.exists(run[1])
