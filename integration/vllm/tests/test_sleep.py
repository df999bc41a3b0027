"""Sleep and wake-up: what is kept has its bytes again, whatever the sidecar and the GPU do. The
GPU's memory is memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.device_allocator import cumem

import kvspray
from kvspray import limits
from kvspray_vllm import sleep

PAGE = 4096


class Memory:
    """Allocations that exist while they are mapped; a new one has other bytes."""

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}  # what is mapped, by address
        self.next = PAGE
        self.room = 1 << 30
        self.shared = True
        self.native = self.synchronized = 0

    def map(self, handle: Any) -> None:
        _, nbytes, ptr, _ = handle
        if sum(map(len, self.at.values())) + nbytes > self.room:
            raise kvspray.KvsprayError(
                "CUDA_ERROR_OUT_OF_MEMORY: free memory of this GPU, and try again"
            )
        assert ptr not in self.at
        self.at[ptr] = bytearray(b"\xee" * nbytes)

    def unmap(self, handle: Any) -> None:
        del self.at[handle[2]]

    def region(self, ptr: int, nbytes: int) -> Any:
        if not self.shared:
            raise kvspray.KvsprayError("the allocation cannot be exported")
        return SimpleNamespace(device=self.at[ptr], close=lambda: None)

    def synchronize(self) -> None:
        self.synchronized += 1

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.native += 1
        if dst in self.at:
            self.at[dst][:] = ctypes.string_at(src, nbytes)
        else:
            ctypes.memmove(dst, bytes(self.at[src]), nbytes)


class Client:
    """Copies when it is polled, and never what is not registered."""

    def __init__(self) -> None:
        self.takes, self.loses = True, lambda: False
        self.room, self.refusal = 1 << 30, ""
        self.leases = itertools.count(1)
        self.regions: set[Any] = set()
        self.open: dict[int, tuple[Any, Any, list[tuple[int, int, int]]]] = {}
        self.max_regions = 0

    connected = property(lambda self: self.takes)

    def register(self, regions: list[Any]) -> None:
        self.add_regions(regions)

    def add_regions(self, regions: list[Any], wait_s: float = 0) -> None:
        self.regions |= {id(r) for r in regions}
        self.max_regions = max(self.max_regions, len(self.regions))

    def drop_regions(self, regions: list[Any], timeout_s: float) -> bool:
        assert not self.open or all(
            r not in (x[0], x[1]) for x in self.open.values() for r in regions
        )
        self.regions -= {id(r) for r in regions}
        return True

    def wait_connected(self, timeout: float) -> bool:
        return self.takes

    def status(self) -> Any:
        return SimpleNamespace(error="")

    def copy(self, src: Any, dst: Any, blocks: Any, *, req: str, deadline_s: float) -> int:
        assert {id(src), id(dst)} <= self.regions
        if self.refusal:
            return 0
        if len(self.open) >= self.room:
            return kvspray.LATER
        lease = next(self.leases)
        self.open[lease] = src, dst, blocks
        return lease

    def wait(self, timeout: float) -> bool:
        return True

    def poll(self) -> list[Any]:
        out = []
        for lease, (src, dst, blocks) in self.open.items():
            lost = self.loses()
            for a, b, n in blocks:
                n = n // 2 if lost else n
                bytes_ = (
                    bytes(src.device[a : a + n])
                    if hasattr(src, "device")
                    else ctypes.string_at(src.addr + a, n)
                )
                if hasattr(dst, "device"):
                    dst.device[b : b + n] = bytes_
                else:
                    ctypes.memmove(dst.addr + b, bytes_, n)
            out.append(
                SimpleNamespace(
                    lease=lease,
                    ok=not lost,
                    status=SimpleNamespace(name="LOST"),
                    reason="the sidecar died",
                )
            )
        self.open.clear()
        return out

    def cancel(self, lease: int, reason: str) -> None:
        assert lease in self.open

    def close(self) -> None:
        assert not self.open


class Rig:
    def __init__(self) -> None:
        self.memory, self.client = Memory(), Client()
        self.copies = sleep.Copies(self.memory)
        self.allocator = sleep.Allocator(self.copies)
        self.want: dict[int, bytes] = {}
        self.r = random.Random(7)

    def allocate(self, nbytes: int, tag: str) -> int:
        ptr, self.memory.next = self.memory.next, self.memory.next + nbytes
        handle = (0, nbytes, ptr, 0)
        self.memory.map(handle)
        self.allocator.current_tag = tag
        self.allocator._python_malloc_callback(handle)
        self.write(ptr)
        return ptr

    def write(self, ptr: int) -> None:
        self.want[ptr] = self.memory.at[ptr][:] = self.r.randbytes(len(self.memory.at[ptr]))

    def check(self, *tags: str) -> None:
        for ptr, data in self.allocator.pointer_to_data.items():
            if data.tag in tags:
                assert (
                    not data.is_asleep
                    and data.cpu_backup_tensor is None
                    and self.memory.at[ptr] == self.want[ptr]
                )


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    out = Rig()
    monkeypatch.setattr(kvspray, "WorkerClient", lambda *a, **k: out.client)
    monkeypatch.setattr(cumem, "create_and_map", out.memory.map)
    monkeypatch.setattr(cumem, "unmap_and_release", out.memory.unmap)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=out.memory.copy))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(cumem, "PIN_MEMORY", False, raising=False)  # vLLM 0.33 asks only once
    for module in (sleep, cumem):
        # Half a second each time, of PyTorch's objects.
        monkeypatch.setattr(module, "gc", SimpleNamespace(collect=lambda: None))
    for nbytes in (PAGE, 3 * PAGE, 100, 5000):
        out.allocate(nbytes, "weights")
    out.allocate(2 * PAGE, "kv_cache")
    out.allocate(200, "runtime")
    yield out
    out.copies.close()


KEPT = ("weights", "runtime")


def test_many_times(rig: Rig) -> None:
    for _ in range(20):
        rig.allocator.sleep(KEPT)
        assert rig.memory.at == {} and all(
            d.is_asleep for d in rig.allocator.pointer_to_data.values()
        )
        rig.allocator.wake_up()
        rig.check(*KEPT)
        assert len(rig.memory.at) == 6
        for ptr in rig.want:
            rig.write(ptr)
    assert rig.memory.native == 0 and len(rig.copies._slabs) == 1
    assert len(rig.client.regions) == 1, "the slab"


def test_parts_wake_and_sleep_again(rig: Rig) -> None:
    """Weights that still sleep keep their place, whatever sleeps next."""
    for _ in range(5):
        rig.allocator.sleep(KEPT)
        rig.allocator.wake_up(["kv_cache"])
        rig.check("runtime")
        rig.allocator.sleep(KEPT)
        rig.allocator.wake_up(["weights"])
        rig.check(*KEPT)
        rig.allocator.wake_up()
        rig.check(*KEPT)
    assert len(rig.copies._slabs) <= 2


def test_freed_while_asleep(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another allocation at the same address is not taken for the one that was freed."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    rig.allocator.sleep(KEPT)
    rig.allocator._python_free_callback(PAGE)
    del rig.want[PAGE]
    handle = (0, 100, PAGE, 0)
    rig.memory.map(handle)
    rig.allocator.current_tag = "kv_cache"
    rig.allocator._python_malloc_callback(handle)
    rig.allocator.sleep(KEPT)
    rig.allocator.wake_up()
    rig.check(*KEPT)
    assert rig.memory.at[PAGE] == b"\xee" * 100 and not rig.allocator._pieces


def test_nothing_is_kept(rig: Rig) -> None:
    """As with vLLM, an empty tuple discards all."""
    rig.allocator.sleep(())
    assert rig.memory.at == {} and not rig.allocator._pieces and not rig.copies._slabs
    rig.allocator.wake_up()


def test_after_the_kernels(rig: Rig) -> None:
    rig.allocator.sleep(KEPT)
    assert rig.memory.synchronized == 1


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("call", ["add_regions", "copy"])
def test_a_call_that_fails(rig: Rig, call: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease is open when sleep or wake-up ends, and the bytes are right."""
    monkeypatch.setattr(sleep, "BATCH", 2)
    real, calls = getattr(rig.client, call), itertools.count()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise (
                kvspray.KvsprayError("no more descriptors")
                if call == "add_regions"
                else ValueError("too big")
            )
        return real(*args, **kwargs)

    setattr(rig.client, call, fails)
    for _ in range(3):
        for move in (lambda: rig.allocator.sleep(KEPT), rig.allocator.wake_up):
            with contextlib.suppress(ValueError):
                move()
            assert not rig.client.open
        rig.allocator.wake_up()
        rig.check(*KEPT)


def test_more_than_before(rig: Rig) -> None:
    """A slab that is too small is replaced, and the sidecar drops it."""
    for _ in range(4):
        rig.allocator.sleep(KEPT)
        rig.allocator.wake_up()
        rig.allocate(7 * PAGE, "weights")
        assert len(rig.copies._slabs) == 1 and len(rig.client.regions) == 1
    rig.check(*KEPT)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_batches(rig: Rig, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "BATCH", batch)
    rig.allocator.sleep(KEPT)
    rig.allocator.wake_up()
    rig.check(*KEPT)
    assert rig.client.max_regions <= 1 + 2 * batch and rig.memory.native == 0


def without(rig: Rig) -> None:
    rig.client.takes = False


def refuses(rig: Rig) -> None:
    rig.client.refusal = "this process may not kill the sidecar"


def loses(rig: Rig) -> None:
    r = random.Random(1)
    rig.client.loses = lambda: r.random() < 0.5


def exports_nothing(rig: Rig) -> None:
    rig.memory.shared = False


def test_more_copies_than_the_sidecar_takes(rig: Rig) -> None:
    rig.client.room = 1
    for _ in range(3):
        rig.allocator.sleep(KEPT)
        rig.allocator.wake_up()
        rig.check(*KEPT)
    assert rig.memory.native == 0


def test_the_sidecar_takes_none_for_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.client.room = 0
    monkeypatch.setattr(sleep, "DEADLINE_S", 0.0)
    rig.allocator.sleep(KEPT)
    rig.allocator.wake_up()
    rig.check(*KEPT)
    assert rig.memory.native == 2 * 5 and not rig.client.open


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        (without, "no sidecar is connected"),
        (refuses, "this process may not kill the sidecar"),
        (loses, "LOST: the sidecar died"),
        (exports_nothing, "the allocation cannot be exported"),
    ],
)
def test_what_the_sidecar_does_not_copy(
    rig: Rig, fault: Callable[[Rig], None], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own call copies it, from the first byte on."""
    fault(rig)
    for _ in range(5):
        rig.allocator.sleep(KEPT)
        rig.allocator.wake_up()
        rig.check(*KEPT)
        for ptr in rig.want:
            rig.write(ptr)
    lines = [m for m in caplog.messages if "vLLM's own copies" in m]
    assert rig.memory.native > 0 and lines and all(m.endswith(logged) for m in lines)


@pytest.mark.parametrize("no_room", ["memory", "MAX_SLABS"])
def test_without_host_memory(
    rig: Rig, no_room: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if no_room == "MAX_SLABS":
        monkeypatch.setattr(sleep, no_room, 0)
    else:
        monkeypatch.setattr(limits, "free_memory", lambda _: (0, ""))
    rig.allocator.sleep(KEPT)
    rig.allocator.wake_up()
    rig.check(*KEPT)
    assert "vLLM's own sleep mode" in caplog.text


def test_no_memory_for_a_wake_up(rig: Rig) -> None:
    """Nothing of it is awake, and a later one succeeds."""
    rig.allocator.sleep(KEPT)
    rig.memory.room = 3 * PAGE
    with pytest.raises(RuntimeError, match="stays asleep.*OUT_OF_MEMORY"):
        rig.allocator.wake_up()
    assert rig.memory.at == {}
    rig.memory.room = 1 << 30
    rig.allocator.wake_up()
    rig.check(*KEPT)


def test_a_copy_that_fails_on_the_gpu(rig: Rig) -> None:
    """The engine does not go on with half of its weights."""
    rig.allocator.sleep(KEPT)
    rig.client.takes = False

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    copy, rig.memory.copy = rig.memory.copy, fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        rig.allocator.wake_up()
    assert rig.memory.at == {} and all(d.is_asleep for d in rig.allocator.pointer_to_data.values())
    rig.memory.copy = copy  # type: ignore[method-assign]
    rig.allocator.wake_up()
    rig.check(*KEPT)


def test_the_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    monkeypatch.setenv(sleep.VARIABLE, "yes")
    with pytest.raises(ValueError, match="KVSPRAY_SLEEP is 'yes'.*set it to 1"):
        sleep.install()
    monkeypatch.setenv(sleep.VARIABLE, "1")
    monkeypatch.setattr(cumem, "cumem_available", False)
    sleep.install()
    assert cumem.CuMemAllocator.instance is None and "no cumem allocator" in caplog.text
    monkeypatch.setattr(cumem, "cumem_available", True)
    sleep.install()
    made = cumem.CuMemAllocator.get_instance()
    assert isinstance(made, sleep.Allocator)
    sleep.install()
    assert cumem.CuMemAllocator.instance is made
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", cumem.CuMemAllocator())
    sleep.install()
    assert "already" in caplog.text
