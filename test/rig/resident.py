"""Keeps the files that processes have mapped in memory.

An engine maps over a gigabyte of libraries and touches little of it between two requests. A kernel
that reclaims what is cold ahead of need (DAMON, a container with a tight limit) drops those pages,
and the next request reads them from disk: hundreds of milliseconds that look like the latency of
whatever runs at that moment. Figures and cases that depend on timing need them held.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
# Python's mmap gives no address of a mapping that cannot be written to, and locking a private
# writable one copies every page.
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mlock.argtypes = _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Resident:
    """Holds files in memory, for as long as this process lives. That needs CAP_IPC_LOCK or a large
    RLIMIT_MEMLOCK; `refused` counts the bytes that could not be held."""

    def __init__(self) -> None:
        self.held: set[tuple[int, int]] = set()
        self.bytes = self.refused = 0

    def hold(self, pids: Iterable[int]) -> Resident:
        for pid in pids:
            for path in mapped_files(pid):
                self._hold(path)
        return self

    def _hold(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return  # deleted since, or another namespace's
        try:
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino) in self.held or not st.st_size:
                return
            self.held.add((st.st_dev, st.st_ino))
            at = _libc.mmap(None, st.st_size, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
        finally:
            os.close(fd)
        if at != _FAILED and _libc.mlock(at, st.st_size) == 0:
            self.bytes += st.st_size
            return
        self.refused += st.st_size
        if at != _FAILED:
            _libc.munmap(at, st.st_size)


def mapped_files(pid: int) -> set[str]:
    try:
        lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return {
        p
        for p in paths
        if p.startswith("/")
        and not p.startswith(("/dev/", "/memfd:"))
        and not p.endswith(" (deleted)")
    }
