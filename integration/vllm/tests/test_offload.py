"""The offloading worker: its pieces of memory, and what becomes of a job whatever the sidecar
does."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.device_allocator import cumem
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

import kvspray
from kvspray import limits
from kvspray_vllm import offload

BLOCKS, CHUNKS = 24, 12


def caches(pages: list[int], groups: list[list[tuple[int, int]]]) -> CanonicalKVCaches:
    """Tensors of these pages, and for each group (tensor, bytes of its page that it uses)."""
    tensors = [
        CanonicalKVCacheTensor(torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8), page)
        for page in pages
    ]
    return CanonicalKVCaches(
        tensors, [[CanonicalKVCacheRef(t, n) for t, n in group] for group in groups]
    )


@pytest.fixture
def pool() -> Any:
    made: list[offload.Pool] = []

    def make(pages: list[int], per_chunk: int) -> offload.Pool:
        made.append(offload.Pool(pages, per_chunk, CHUNKS))
        return made[-1]

    yield make
    for p in made:
        p.cleanup()


def test_memory_that_vllm_has_pinned_is_unpinned(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned: list[int] = []
    runtime = SimpleNamespace(cudaHostUnregister=unpinned.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = pool([64], 1)
    memory.pinned_addresses += [4096, 8192]
    memory.cleanup()
    memory.cleanup()
    assert sorted(unpinned) == [4096, 8192]


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("groups", [[[(0, 64), (1, 48)]], [[(0, 64)], [(1, 40), (0, 32)]]])
def test_blocks_come_back(pool: Any, per_chunk: int, groups: list[list[tuple[int, int]]]) -> None:
    """Stored and loaded into other blocks, also from the middle of a chunk: each has the bytes that
    it had."""
    r = random.Random(per_chunk)
    pages = [64, 48]
    for _ in range(30):
        kv, memory = caches(pages, groups), pool(pages, per_chunk)
        copies = offload.HostCopies(kv, memory, per_chunk)
        sizes = [r.randint(0, 6) for _ in groups]
        starts = [r.randrange(9) for _ in groups]
        taken = iter(r.sample(range(CHUNKS), CHUNKS))
        chunks = [
            c
            for n, s in zip(sizes, starts, strict=True)
            if n
            for c in itertools.islice(taken, -(-(n + s % per_chunk) // per_chunk))
        ]
        # Each group has blocks of its own, as in vLLM.
        ids = r.sample(range(BLOCKS), 2 * sum(sizes))
        src, dst = ids[: sum(sizes)], ids[sum(sizes) :]
        before = [t.tensor.clone() for t in kv.tensors]
        copies.submit_store(1, GPULoadStoreSpec(src, sizes, starts), CPULoadStoreSpec(chunks))
        copies.submit_load(2, CPULoadStoreSpec(chunks), GPULoadStoreSpec(dst, sizes, starts))
        assert [x.job_id for x in copies.get_finished()] == [1, 2]
        at = 0
        for size, group in zip(sizes, groups, strict=True):
            for old, new in zip(src[at : at + size], dst[at : at + size], strict=True):
                for t, n in group:
                    assert torch.equal(kv.tensors[t].tensor[new, :n], before[t][old, :n])
                    before[t][new, :n] = before[t][old, :n]
            at += size
        assert all(torch.equal(t.tensor, b) for t, b in zip(kv.tensors, before, strict=True)), (
            "and nothing else is written"
        )


def test_copies_of_some_layers_each(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces a copy may have, all copies together have every piece once."""
    kv, memory = caches([64] * 5, [[(t, 64) for t in range(5)]]), pool([64] * 5, 1)
    blocks, chunks = GPULoadStoreSpec([1, 2, 5], [3], [0]), CPULoadStoreSpec([0, 1, 6])

    def pieces(at_most: int) -> tuple[list[int], list[list[int]]]:
        monkeypatch.setattr(offload, "COPY_PIECES", at_most)
        copies = [
            rows.tolist() for _, rows in offload.Pieces(kv, None, memory, 1).of(blocks, chunks)
        ]
        return [len(c) for c in copies], [row for c in copies for row in c]

    # Blocks 1 and 2 follow each other on both sides.
    counts, whole = pieces(100)
    assert counts == [10] and sum(row[2] for row in whole) == 15 * 64
    assert pieces(6) == ([4, 4, 2], whole)
    assert pieces(3) == ([2] * 5, whole)
    assert pieces(1) == ([1] * 10, whole)


def test_pieces_that_follow_each_other_are_one() -> None:
    rows = np.array(
        [[0, 100, 8], [8, 108, 8], [16, 200, 8], [24, 208, 4], [28, 212, 8], [40, 220, 8]],
        dtype=np.uint64,
    )
    assert offload.joined(rows).tolist() == [[0, 100, 16], [16, 200, 20], [40, 220, 8]]
    r = random.Random(1)
    for _ in range(200):
        rows = np.array(
            [[r.randrange(12) * 4, r.randrange(12) * 4, 4] for _ in range(r.randint(1, 20))],
            dtype=np.uint64,
        )
        got = [(a + i, b + i) for a, b, n in offload.joined(rows).tolist() for i in range(0, n, 4)]
        assert got == [(a, b) for a, b, _ in rows.tolist()]


@pytest.mark.parametrize(
    ("blocks", "sizes", "chunks"),
    [([1, 2], [2], [1]), ([1], [1], [1, 2]), ([1, 2, 3], [3], [1, 2])],
)
def test_lists_that_do_not_fit(
    pool: Any, blocks: list[int], sizes: list[int], chunks: list[int]
) -> None:
    kv, memory = caches([64], [[(0, 64)]]), pool([64], 1)
    with pytest.raises(ValueError, match="vLLM gave"):
        offload.HostCopies(kv, memory, 1).submit_load(
            1, CPULoadStoreSpec(chunks), GPULoadStoreSpec(blocks, sizes, [0])
        )


def test_a_pool_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    # Just the pool.
    monkeypatch.setattr(limits, "free_memory", lambda _: (1 << 21, "/sys/fs/cgroup/memory.max"))
    with pytest.raises(
        ValueError,
        match="cpu_bytes_to_use.*2 MiB are left of the limit in /sys/fs/cgroup/memory.max: lower",
    ):
        offload.Pool([1 << 20], 1, 2)
    with pytest.raises(ValueError, match="cpu_bytes_to_use.*raise it"):
        offload.Pool([1 << 20], 1, 0)


def test_a_cache_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sleep the sidecar's mapping is of other memory."""
    assert not offload.sleeps([4096])
    allocator = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    allocator._python_malloc_callback((0, 4096, 4096, 0))
    assert offload.sleeps([0, 4096]) and not offload.sleeps([8192])


# ---- a job, whatever the sidecar does


class Client:
    """A session of which the test ends the leases."""

    def __init__(self) -> None:
        self.takes, self.leases, self.ended = True, itertools.count(1), []
        self.room, self.refusal = 1 << 30, ""
        self.open: dict[int, tuple[str, int]] = {}  # request, mark
        self.on_wait: Any = lambda: None

    def copy(
        self, src: Any, dst: Any, blocks: bytes, *, req: str, deadline_s: float, after: int
    ) -> int:
        assert (src, dst) == (("cache", "pool") if req.startswith("store") else ("pool", "cache"))
        assert len(blocks) <= 24 * offload.COPY_PIECES
        if not self.takes:
            self.refusal = "not connected to a sidecar"
            return 0
        if len(self.open) >= self.room:
            return kvspray.LATER
        lease = next(self.leases)
        self.open[lease] = req, after
        return lease

    def end(self, lease: int, ok: bool = True) -> None:
        del self.open[lease]
        self.ended.append(
            SimpleNamespace(
                lease=lease,
                ok=ok,
                bytes=7 if ok else 0,
                status=SimpleNamespace(name="LOST"),
                reason="gone",
            )
        )

    def poll(self) -> list[Any]:
        out, self.ended = self.ended, []
        return out

    def wait(self, timeout: float) -> bool:
        self.on_wait()
        return bool(self.ended)

    def cancel(self, lease: int, reason: str) -> None:
        self.end(lease, False)

    def requests(self) -> list[str]:
        return [req for req, _ in self.open.values()]


class Session:
    caches = ["cache"]
    pool = SimpleNamespace(region="pool")

    def __init__(self) -> None:
        self.client, self.marks = Client(), itertools.count(100)

    def mark(self) -> int | None:
        return next(self.marks)

    def close(self) -> None:
        pass


class Native:
    def __init__(self, client: Client) -> None:
        self.client, self.made, self.done, self.waited = client, [], [], []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        assert f"store-{job_id}" not in self.client.requests(), "the sidecar may still write"
        self.made.append(("store", job_id))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **expedited: bool) -> bool:
        assert f"load-{job_id}" not in self.client.requests(), "the sidecar may still write"
        self.made.append(("load", job_id))
        return True

    def end(self) -> None:
        self.done += [TransferResult(job, True, 5, 0.1) for _, job in self.made]

    def get_finished(self) -> list[TransferResult]:
        out, self.done = self.done, []
        return out

    def wait(self, job_ids: set[int]) -> None:
        self.waited.append(job_ids)

    def shutdown(self) -> None:
        assert not self.client.open


class Rows:
    """Pieces of one cache, as many as the blocks."""

    def of(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, np.ndarray]]:
        n = len(blocks.block_ids)
        for at in range(0, n, offload.COPY_PIECES):
            yield 0, np.zeros((min(n - at, offload.COPY_PIECES), 3), dtype=np.uint64)


@pytest.fixture
def w() -> Any:
    session = Session()
    native = Native(session.client)
    worker = offload.Worker(session, native, Rows())  # type: ignore[arg-type]
    return SimpleNamespace(worker=worker, client=session.client, native=native, session=session)


def store(w: Any, job: int, blocks: int = 1) -> None:
    assert w.worker.submit_store(
        job, GPULoadStoreSpec([0] * blocks, [blocks], [0]), CPULoadStoreSpec([0])
    )


def load(w: Any, job: int, blocks: int = 1) -> None:
    assert w.worker.submit_load(
        job, CPULoadStoreSpec([0]), GPULoadStoreSpec([0] * blocks, [blocks], [0])
    )


def finished(w: Any) -> list[int]:
    out = w.worker.get_finished()
    assert all(x.success for x in out)
    return [x.job_id for x in out]


def test_loads_go_first(w: Any) -> None:
    load(w, 1)
    store(w, 2)
    assert w.client.requests() == ["load-1"] and finished(w) == []
    w.client.end(1)
    assert finished(w) == [1] and w.client.requests() == ["store-2"]
    assert w.client.open[2] == ("store-2", 101), "the mark is that of its submission"
    load(w, 3)
    assert w.client.requests() == ["store-2", "load-3"], "a load waits for no store"
    w.client.end(2)
    w.client.end(3)
    assert finished(w) == [2, 3]


def test_vllm_waits_for_a_store_that_waits(w: Any) -> None:
    load(w, 1)
    store(w, 2)
    w.client.on_wait = lambda: "store-2" in w.client.requests() and w.client.end(2)
    w.worker.wait({2})
    assert w.client.requests() == ["load-1"] and finished(w) == [2]


@pytest.mark.parametrize("kind", [store, load])
def test_a_copy_that_fails_is_made_natively(w: Any, kind: Any) -> None:
    kind(w, 1, 2 * offload.COPY_PIECES + 1)
    assert len(w.client.open) == 3
    w.client.end(2, False)
    assert finished(w) == [] and not w.native.made, "its other copies may still write"
    w.client.end(1)
    w.client.end(3)
    assert finished(w) == [] and w.native.made == [(kind.__name__, 1)]
    w.worker.wait({1})
    assert w.native.waited == [{1}]
    w.native.end()
    assert finished(w) == [1] and w.worker.native_copies == 1


def test_no_sidecar(w: Any) -> None:
    w.client.takes = False
    load(w, 1)
    store(w, 2)
    w.worker.get_finished()
    assert w.native.made == [("load", 1), ("store", 2)]


def test_no_sidecar_any_more(w: Any) -> None:
    """Half of a job is open when the session ends."""
    original = w.client.copy

    def copy(*args: Any, **kw: Any) -> int:
        lease = int(original(*args, **kw))
        w.client.takes = False
        return lease

    w.client.copy = copy
    load(w, 1, offload.COPY_PIECES + 1)
    assert w.client.requests() == ["load-1"] and not w.native.made
    w.client.end(1)
    finished(w)
    assert w.native.made == [("load", 1)]


def test_no_marks_any_more(w: Any) -> None:
    w.session.mark = lambda: None
    load(w, 1)
    assert w.native.made == [("load", 1)] and not w.client.open


@pytest.mark.parametrize("kind", [store, load])
def test_more_copies_than_the_sidecar_takes(w: Any, kind: Any) -> None:
    w.client.room = 2
    for job in range(5):
        kind(w, job)
    done: list[int] = []
    while w.client.open:
        assert len(w.client.open) <= 2
        w.client.end(next(iter(w.client.open)))
        done += finished(w)
    assert done == [0, 1, 2, 3, 4] and w.worker.native_copies == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(offload.time, "monotonic", lambda: now[0])
    return now


def test_a_store_does_not_wait_for_ever_behind_loads(w: Any, clock: list[float]) -> None:
    """There is always a load open, and as many as the sidecar takes."""
    w.client.room = 1
    load(w, 0)
    store(w, 1000)
    for job in range(1, 100):
        load(w, job)
        clock[0] += 0.125
        w.client.end(next(iter(w.client.open)))
        finished(w)
        if "store-1000" in w.client.requests():
            break
    assert job == 4, "loads go first for half a second"


def test_vllm_waits_for_a_job_for_which_there_is_no_room(w: Any) -> None:
    w.client.room = 1
    load(w, 1)
    store(w, 2)
    ends = iter([lambda: None, lambda: None, lambda: w.client.end(1), lambda: w.client.end(2)])
    w.client.on_wait = lambda: next(ends)()
    w.worker.wait({2})
    assert sorted(finished(w)) == [1, 2] and w.worker.native_copies == 0


def test_vllm_waits_while_the_sidecar_goes(w: Any) -> None:
    load(w, 1)
    store(w, 2)
    w.client.takes = False
    w.worker.wait({2})
    assert w.native.made == [("store", 2)] and w.native.waited == [{2}]


def test_a_load_that_vllm_waits_for_within_the_step(w: Any) -> None:
    w.client.room = 1
    load(w, 1)
    load(w, 2)
    assert w.worker.submit_load(
        3, CPULoadStoreSpec([0]), GPULoadStoreSpec([0], [1], [0]), expedited=True
    )
    w.client.end(1)
    assert finished(w) == [1] and w.client.requests() == ["load-3"]


def test_the_pool_has_what_vllm_pins(pool: Any) -> None:
    """Fields of its SharedOffloadRegion that vLLM's own function reads."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    read = set(re.findall(r"\bregion\.(\w+)", inspect.getsource(gpu_worker.pin_mmap_region))) - {
        "iter_worker_slot_ranges"
    }
    assert read and not {name for name in read if not hasattr(pool([64], 1), name)}


@pytest.mark.parametrize(
    ("cause", "logged"),
    [
        ("refused", "this process may not kill the sidecar"),
        ("failed", "LOST: gone"),
        ("marks", "the GPU sets no marks any more"),
        ("full for long", "too many open leases"),
    ],
)
def test_the_log_has_the_cause(
    w: Any, clock: list[float], caplog: pytest.LogCaptureFixture, cause: str, logged: str
) -> None:
    if cause == "refused":
        w.client.copy = lambda *a, **k: 0
        w.client.refusal = "this process may not kill the sidecar"
    if cause == "marks":
        w.session.mark = lambda: None
    if cause == "full for long":
        w.client.room, w.client.refusal = 0, "too many open leases"
    load(w, 1)
    if cause == "failed":
        w.client.end(1, False)
    clock[0] += offload.DEADLINE_S
    finished(w)
    assert w.native.made == [("load", 1)]
    (line,) = caplog.messages
    assert (
        line == f"kvspray: vLLM's own worker copies what the sidecar did not: {logged} (1 so far)"
    )


def test_a_job_without_blocks(w: Any) -> None:
    store(w, 1, 0)
    w.worker.wait({1})
    assert finished(w) == [1]


def test_the_end(w: Any) -> None:
    load(w, 1, 2 * offload.COPY_PIECES)
    store(w, 2)
    w.worker.shutdown()
    assert not w.client.open


def test_the_end_waits_for_copies_but_not_for_ever(w: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w.client.cancel = lambda lease, reason: None
    load(w, 1)
    w.client.on_wait = lambda: w.client.open and w.client.end(1, False)
    w.worker.shutdown()
    assert not w.client.open
    load(w, 2)
    w.client.on_wait = lambda: None
    monkeypatch.setattr(offload, "CLOSE_S", 0.05)
    monkeypatch.setattr(w.native, "shutdown", lambda: None)
    w.worker.shutdown()
    assert w.client.open
