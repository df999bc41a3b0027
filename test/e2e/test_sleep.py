"""Sleep and wake-up by a real sidecar, which is killed and stopped meanwhile. Memory of this
process stands for the GPU's: it is unmapped and mapped again at the same addresses, so that a late
copy would be seen."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cluster as rig
import numpy as np
import pytest
import torch
from vllm.device_allocator import cumem

import kvspray
from kvspray_vllm import sleep

# More than the sidecar takes at a time.
SIZES = [64 << 20, 3 << 20, 1 << 20, 20 << 20, 4096] * 2 + [256 << 10] * 150
CYCLES = 24
KEPT = ("weights",)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
FIXED, NONE = 0x10, 0


def _mmap(at: int | None, nbytes: int, access: int, flags: int) -> int:
    got = _libc.mmap(at, nbytes, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags, -1, 0)
    assert got not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    return int(got)


class Memory:
    def __init__(self) -> None:
        self.native = 0

    def reserve(self, nbytes: int) -> Any:
        return 0, nbytes, _mmap(None, nbytes, NONE, 0), 0

    def map(self, handle: Any) -> None:
        _mmap(handle[2], handle[1], mmap.PROT_READ | mmap.PROT_WRITE, FIXED)

    def unmap(self, handle: Any) -> None:
        _mmap(handle[2], handle[1], NONE, FIXED)

    def region(self, ptr: int, nbytes: int) -> kvspray.Region:
        return kvspray.Region.process(ptr, nbytes)

    def synchronize(self) -> None:
        pass

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.native += 1
        ctypes.memmove(dst, src, nbytes)


@pytest.fixture
def sidecar(workdir: pathlib.Path) -> Iterator[rig.Sidecar]:
    out = rig.Sidecar("sleep", workdir)
    out.start()
    yield out
    assert out.panics() is None
    out.stop()


def test_faults(sidecar: rig.Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr(cumem, "create_and_map", memory.map)
    monkeypatch.setattr(cumem, "unmap_and_release", memory.unmap)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=memory.copy))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    copies = sleep.Copies(memory, sidecar.socket)
    allocator = sleep.Allocator(copies)
    views, want, r = {}, {}, random.Random(3)
    rng = np.random.default_rng(3)
    for nbytes in SIZES:
        handle = memory.reserve(nbytes)
        memory.map(handle)
        allocator.current_tag = "weights"
        allocator._python_malloc_callback(handle)
        views[handle[2]] = np.frombuffer(
            (ctypes.c_uint8 * nbytes).from_address(handle[2]), dtype=np.uint8
        )

    def fault(after: float) -> None:
        time.sleep(after)
        if r.random() < 0.5:
            sidecar.kill()
            sidecar.start()
        else:
            sidecar.signal(signal.SIGSTOP)
            time.sleep(r.random())
            sidecar.signal(signal.SIGCONT)

    by_sidecar = 0
    for cycle in range(CYCLES):
        for ptr, view in views.items():
            view[:] = rng.integers(0, 256, view.nbytes, dtype=np.uint8)
            want[ptr] = view.tobytes()
        thread = threading.Thread(target=fault, args=(r.random() * 0.12,)) if cycle % 2 else None
        if thread is not None:
            thread.start()
        before = memory.native
        allocator.sleep(KEPT)
        allocator.wake_up()
        wrong = [ptr for ptr, view in views.items() if view.tobytes() != want[ptr]]
        assert not wrong, f"cycle {cycle}"
        by_sidecar += memory.native == before
        if thread is not None:
            thread.join()
            assert copies._client is not None and copies._client.wait_connected(20)
            # A late write of a copy that has ended.
            time.sleep(0.1)
            assert all(view.tobytes() == want[ptr] for ptr, view in views.items()), f"cycle {cycle}"
    assert by_sidecar >= CYCLES // 2, "without a fault the sidecar copies all"
    assert memory.native > 0, "no fault met a copy"
    copies.close()
