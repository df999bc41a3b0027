"""How much memory this process can still take, where the kernel limits it: in its own cgroup and
all parents, of cgroups v1 and v2. internal/sys/limits does the same in Go; testdata/limits.json has
the cases of both."""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Iterator

OVERHEAD_BYTES = 128 << 20  # a process that takes a pool needs memory for itself
OVERHEAD_SHARE = 64  # and 1/64 of the pool
UNLIMITED = 1 << 62  # cgroup v1 has 2^63 less a page for none

# What lifts the limit behind an error of the kernel.
REMEDIES = {
    errno.ENOMEM: (
        "raise the memory limit (resources.limits.memory, MemoryMax=) or ulimit -v, or, with "
        "vm.overcommit_memory=2, vm.overcommit_ratio"
    ),
    errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE=, --ulimit nofile=)",
    errno.ENFILE: "raise the host's limit of open files, fs.file-max",
    errno.ENOSPC: (
        "make room on that file system; of /dev/shm: docker run --shm-size=, or an emptyDir of "
        "medium Memory"
    ),
    errno.EPERM: (
        "allow the call in the container's seccomp profile, or give the capability that it needs"
    ),
    errno.ENOSYS: "use a kernel, or a container runtime, that has the call",
    errno.EAGAIN: "raise the limit of locked memory or of processes (ulimit -l, ulimit -u)",
}


def explain(error: int) -> str:
    """An errno as text, with the remedy if a limit is behind it."""
    text = f"{os.strerror(error)} (errno {error})"
    return f"{text}: {REMEDIES[error]}" if error in REMEDIES else text


def refusal(pool: int, root: str = "") -> str:
    """Why a pool of ``pool`` bytes has no room beside what its process needs for itself; empty: it
    has, or the limits are not known."""
    try:
        free, where = free_memory(root)
    except (OSError, ValueError):
        return ""
    need = pool + OVERHEAD_BYTES + pool // OVERHEAD_SHARE
    if need <= free:
        return ""
    what = (
        f"{free >> 20} MiB are left of the limit in {where}"
        if where
        else f"the host has {free >> 20} MiB"
    )
    return f"{pool >> 20} MiB ({need >> 20} MiB with what the process itself needs), and {what}"


def free_memory(root: str = "") -> tuple[int, str]:
    """The bytes that can still be taken, and the file with the limit that binds; empty: it is the
    host's memory."""
    with open(f"{root}/proc/meminfo") as f:
        free, where = _field(f.read(), "MemAvailable:"), ""
    if free is None:
        raise ValueError("/proc/meminfo has no MemAvailable")
    free <<= 10
    for path, v2 in dict.fromkeys(
        _directories(_read(f"{root}/proc/self/cgroup"), _read(f"{root}/proc/self/mountinfo"))
    ):
        for file, left in _limits(root, path, v2):
            if left < free:
                free, where = left, file
    return free, where


def _directories(own: str, mounts: str) -> Iterator[tuple[str, bool]]:
    """Directories of cgroups: the process's own and its parents up to the mount's root. The usual
    places follow, which a runtime may have mounted over."""
    paths: dict[bool, str] = {}
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/") and (
            number == "0" and not controllers or "memory" in controllers.split(",")
        ):
            paths[not controllers] = path
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        f, g = before.split(), after.split()
        if (
            len(f) < 6
            or len(g) < 3
            or not (g[0] == "cgroup2" or g[0] == "cgroup" and "memory" in g[2].split(","))
        ):
            continue
        top, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), s) for s in f[3:5])
        v2 = g[0] == "cgroup2"
        if v2 not in paths or not point.startswith("/"):
            continue
        at = posixpath.normpath(point)
        directory = posixpath.normpath(f"{at}/{_under(paths[v2], top)}")
        while True:
            yield directory, v2
            if directory in (at, "/"):
                break
            directory = posixpath.dirname(directory)
    yield "/sys/fs/cgroup", True
    yield "/sys/fs/cgroup/memory", False


def _under(path: str, top: str) -> str:
    """The part of a path below the mount's root; empty if it is outside, as of another namespace:
    the mount itself is what is left."""
    if ".." in path.split("/") or ".." in top.split("/"):
        return ""
    if top == "/" or path == top or path.startswith(top + "/"):
        return path.removeprefix(top).lstrip("/")
    return ""


def _limits(root: str, path: str, v2: bool) -> Iterator[tuple[str, int]]:
    """The limits of one cgroup: the file, and the bytes that are left. The kernel can reclaim the
    cache of files, so it counts as free."""
    stat = _read(f"{root}{path}/memory.stat")
    cached, files, usage = ("", ["memory.max", "memory.high"], "memory.current")
    if not v2:
        cached, files, usage = ("total_", ["memory.limit_in_bytes"], "memory.usage_in_bytes")
    cache = (_field(stat, f"{cached}inactive_file") or 0) + (
        _field(stat, f"{cached}active_file") or 0
    )
    used = max(0, (_number(_read(f"{root}{path}/{usage}")) or 0) - cache)
    found = {file: _number(_read(f"{root}{path}/{file}")) for file in files}
    if not v2:  # the least of all parents, also of those that are not shown here
        found["memory.stat"] = _field(stat, "hierarchical_memory_limit")
    for file, limit in found.items():
        if limit is not None and limit < UNLIMITED:
            yield f"{path}/{file}", max(0, limit - used)


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as f:
            return f.read(1 << 20)
    except OSError:
        return ""


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return _number(words[1])
    return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
