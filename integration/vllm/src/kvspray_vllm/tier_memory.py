"""Memory that the workers and the scheduler of an engine share for KVSprayTier: the chunks of
vLLM's primary tier, and behind them a notice of each rank about its cache.

vLLM's SharedOffloadRegion opens a file in /dev/shm by its name. A sidecar maps no such file, as its
size could change. So the first process of an engine makes a sealed memfd, and a link to it at that
name before vLLM opens it. The scheduler comes last and removes the link. From then on the kernel
frees the memory when the last process ends, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from typing import Any

from kvspray import limits

DIRECTORY = "/dev/shm"
NOTICE_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_DIGEST = hashlib.sha256().digest_size
_SIZE = 4  # bytes of a notice's length


class TierMemory:
    """One process's view. Each rank writes its own notice, and the byte that its weights were
    replaced, once; the scheduler reads them."""

    def __init__(self, engine_id: str, chunk_bytes: int, ranks: int) -> None:
        """chunk_bytes: of all chunks, a multiple of the page size."""
        self.path = f"{DIRECTORY}/vllm_offload_{engine_id}.mmap"
        self._chunk_bytes, self._ranks = chunk_bytes, ranks
        flags = -(-ranks // mmap.PAGESIZE) * mmap.PAGESIZE
        self._first = flags  # offset of the first notice
        tail = flags + -(-ranks * NOTICE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        with _alone():
            self.fd = self._open(chunk_bytes + tail)
        self._tail = mmap.mmap(self.fd, tail, offset=chunk_bytes)

    def _open(self, nbytes: int) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._create(nbytes)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        stat = os.fstat(fd)
        if seals & _SEALS != _SEALS or stat.st_size != nbytes or stat.st_uid != os.geteuid():
            os.close(fd)
            raise ValueError(
                f"kvspray: {self.path} is not this user's sealed memory of {nbytes} bytes that the "
                "tier needs: another engine with this engine_id runs, or has left it; give the "
                "engine another engine_id, or remove the file"
            )
        return fd

    def _create(self, nbytes: int) -> int:
        if why := limits.refusal(nbytes):
            raise ValueError(
                f"kv_connector_extra_config['cpu_bytes_to_use'] needs {why}: lower it, or raise "
                "the limit"
            )
        fd = os.memfd_create("kvspray-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # of an engine that was killed
            os.symlink(f"/proc/{os.getpid()}/fd/{fd}", self.path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def check(self, fd: int | None) -> None:
        """Whether vLLM has mapped this memory. fd: of its region."""
        if fd is None or not os.path.sameopenfile(fd, self.fd):
            raise ValueError(
                f"kvspray: vLLM's primary tier is not in {self.path}, where KVSprayTieringSpec has "
                "put it: use a vLLM that docs/offload.md lists"
            )

    def hide(self) -> None:
        """Every process has it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        if not self._tail.closed:
            self._tail.close()
            os.close(self.fd)

    # -- notices

    def write(self, rank: int, notice: dict[str, Any]) -> None:
        body = json.dumps(notice, sort_keys=True).encode()
        if len(body) > NOTICE_BYTES - _SIZE - _DIGEST:
            raise ValueError(f"kvspray: the notice of rank {rank} has {len(body)} bytes")
        at = self._at(rank)
        if self._tail[at : at + _SIZE] != bytes(_SIZE):
            raise ValueError(
                f"kvspray: rank {rank} of the engine in {self.path} has started before: another "
                "engine with this engine_id runs; give the engine another one"
            )
        whole = len(body).to_bytes(_SIZE, "little") + hashlib.sha256(body).digest() + body
        self._tail[at : at + len(whole)] = whole

    def notices(self) -> list[dict[str, Any]]:
        """Of all ranks. Raises ValueError if a rank has not written its own."""
        return [self._read(rank) for rank in range(self._ranks)]

    def _read(self, rank: int) -> dict[str, Any]:
        at = self._at(rank)
        end = at + _SIZE + _DIGEST
        size = int.from_bytes(self._tail[at : at + _SIZE], "little")
        body = self._tail[end : min(end + size, at + NOTICE_BYTES)]
        if not size or hashlib.sha256(body).digest() != self._tail[at + _SIZE : end]:
            raise ValueError(
                f"kvspray: rank {rank} of {self._ranks} shares no memory with the scheduler: "
                "KVSprayTier serves engines whose workers all run on the scheduler's host"
            )
        out = json.loads(body)
        assert isinstance(out, dict)
        return out

    def _at(self, rank: int) -> int:
        if not 0 <= rank < self._ranks:
            raise ValueError(f"kvspray: rank {rank}, want one below {self._ranks}")
        return self._first + rank * NOTICE_BYTES

    def replace(self, rank: int) -> None:
        """The weights of a rank are, or will be, others than those of its notice."""
        if not self._tail.closed:
            self._tail[rank] = 1

    @property
    def replaced(self) -> bool:
        return self._tail[: self._ranks] != bytes(self._ranks)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other process of this host makes or looks for such memory meanwhile."""
    fd = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
