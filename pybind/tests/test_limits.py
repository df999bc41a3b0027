"""Limits on memory, from files of other machines. internal/sys/limits has the same cases."""

from __future__ import annotations

import errno
import json
import pathlib
import resource
from typing import Any

import pytest

import kvspray
from kvspray import limits

CASES = json.loads((pathlib.Path(__file__).parents[2] / "testdata/limits.json").read_text())
GIB = 1 << 30


def host(root: pathlib.Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        at = root / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    return str(root)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_memory_is_read_where_it_is_limited(case: dict[str, Any], tmp_path: pathlib.Path) -> None:
    assert limits.free_memory(host(tmp_path, case["files"])) == (case["free"], case["file"])


def test_a_pool_needs_room_for_its_process(tmp_path: pathlib.Path) -> None:
    root = host(
        tmp_path,
        {"proc/meminfo": "MemAvailable: 67108864 kB\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"},
    )
    why = limits.refusal(4 * GIB, root)
    assert (
        "4096 MiB (4288 MiB with what the process itself needs)" in why
        and "4096 MiB are left of the limit in /sys/fs/cgroup/memory.max" in why
    )
    assert limits.refusal(3906 << 20, root) == ""
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert "the host has 65536 MiB" in limits.refusal(64 * GIB, root)


def test_an_error_has_its_remedy() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # of new ones
    try:
        with pytest.raises(kvspray.KvsprayError, match="Too many open files.*ulimit -n"):
            kvspray.Region.alloc(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (
        "memory limit" in limits.explain(errno.ENOMEM)
        and limits.explain(errno.EBADF) == f"Bad file descriptor (errno {errno.EBADF})"
    )


def test_limits_that_are_not_known(tmp_path: pathlib.Path) -> None:
    assert limits.refusal(1 << 60, str(tmp_path)) == ""
    assert limits.refusal(1 << 60, host(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"})) == ""
    assert limits.free_memory()[0] > 0  # of this machine
