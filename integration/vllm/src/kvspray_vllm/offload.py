"""``KVSprayOffloadingSpec`` for vLLM's OffloadingConnector: blocks go to host memory and come back
as copies of the sidecar.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KVSprayOffloadingSpec",
      "spec_module_path": "kvspray_vllm.offload", "cpu_bytes_to_use": 68719476736}}'

vLLM's own manager decides what is kept and what is evicted. This module has the worker: a pool of
host memory that the sidecar maps, and COPY requests between it and the caches. A copy begins once
the engine's stream has passed the mark that was set when it was submitted, and uses every PCIe link
that the sidecar may use. The engine's thread waits for nothing and launches nothing but the mark.

A copy that the sidecar does not take or does not finish is made again by vLLM's own worker, on the
same memory, after its lease has ended: until then the sidecar may still write. So every job that
vLLM submits ends well, which vLLM expects.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import vllm
from vllm.device_allocator import cumem
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

import kvspray
from kvspray import limits
from kvspray._messages import MAX_COPY_BLOCKS
from kvspray.gpu import GpuSignals

DEADLINE_S = 60.0  # of a copy; vLLM's own worker makes it after that
# Of a store behind loads; then it goes before them, as vLLM keeps a finished request's blocks until
# its store has ended.
STORE_WAIT_S = 0.5
# Pieces of one copy: few enough that the first of many copies starts soon, and enough that a copy
# of 16 KiB pieces uses all links.
COPY_PIECES = min(8192, MAX_COPY_BLOCKS)
WAIT_S = 0.05  # between looks at the session while the engine waits for a job
CLOSE_S = 10.0  # for open copies to end when the engine ends
WARN_EVERY_S = 60.0
ALIGN = 4096  # of a tensor in the pool

_log = logging.getLogger("vllm.kvspray.offload")


class KVSprayOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading with another worker."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        socket = self.extra_config.get("socket")
        if socket is not None and (not isinstance(socket, str) or not socket):
            raise ValueError(f"kv_connector_extra_config['socket'] is {socket!r}, want a path")
        if self.extra_config.get("canonical_layout"):
            raise ValueError(
                "kv_connector_extra_config['canonical_layout'] is set, which KVSprayOffloadingSpec "
                "does not write: leave it out, or use spec_name CPUOffloadingSpec"
            )
        self._socket = socket
        self._worker: OffloadingWorker | None = None

    def _uses_shared_region(self) -> bool:
        """Each rank has a pool of its own, so ranks with equal caches keep a copy each."""
        return False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        on_gpu = kv_caches.tensors[0].tensor.is_cuda
        if not on_gpu and current_platform.device_type != "cpu":
            raise ValueError(
                "KVSprayOffloadingSpec serves NVIDIA GPUs and CPUs, and this is "
                f"{current_platform.device_name}: use spec_name CPUOffloadingSpec"
            )
        pages = [t.page_size_bytes for t in kv_caches.tensors]
        pool = Pool(pages, self.blocks_per_chunk, self.num_chunks)
        try:
            native: Native
            if on_gpu:
                native = CPUOffloadingWorker(
                    kv_caches, self.blocks_per_chunk, self.num_chunks, pool
                )
            else:
                native = HostCopies(kv_caches, pool, self.blocks_per_chunk)
            try:
                session = Session(self._socket, self.config, kv_caches, pool, on_gpu)
            except kvspray.KvsprayError as err:
                _log.warning("kvspray: vLLM's own worker makes all copies: %s", err)
                return native
            return Worker(session, native, Pieces(kv_caches, session, pool, self.blocks_per_chunk))
        except Exception:
            pool.cleanup()
            raise


class Chunks(Protocol):
    """Host memory for chunks, each of which has a place for every tensor of the cache."""

    addr: int
    offsets: list[int]  # by tensor: of its place in chunk 0
    strides: list[int]  # by tensor: bytes between the chunks

    def cleanup(self) -> None: ...


class Pool:
    """Host memory for the chunks, tensor after tensor: chunks of one tensor that follow each other
    are copied as one piece. It has the methods and fields of vLLM's SharedOffloadRegion that its
    worker uses."""

    rank = 0

    def __init__(self, page_bytes: Sequence[int], blocks_per_chunk: int, chunks: int) -> None:
        self.chunks = chunks
        self.strides = [page * blocks_per_chunk for page in page_bytes]  # between chunks
        self.offsets: list[int] = []
        end = 0
        for page in page_bytes:
            self.offsets.append(end)
            end += -(-page * blocks_per_chunk * chunks // ALIGN) * ALIGN
        if end == 0:
            raise ValueError(
                "kv_connector_extra_config['cpu_bytes_to_use'] has no room for one chunk: raise it"
            )
        if why := limits.refusal(end):
            raise ValueError(
                f"kv_connector_extra_config['cpu_bytes_to_use'] needs on this rank {why}: lower "
                "it, or raise the limit"
            )
        self.region = kvspray.Region.alloc(end)
        self.addr = self.region.addr
        array = (ctypes.c_int8 * end).from_address(self.addr)
        self._base: torch.Tensor | None = torch.frombuffer(array, dtype=torch.int8)
        self._next = 0
        # For vLLM's pin_mmap_region.
        self.total_size_bytes = self._row_stride = self.cpu_page_size = end
        self.page_size = ALIGN
        self.pinned_addresses: list[int] = []
        self.is_pinned = False

    def create_next_worker_view(self, chunk_bytes: int) -> torch.Tensor:
        assert self._base is not None
        start = self.offsets[self._next]
        self._next += 1
        return self._base[start : start + self.chunks * chunk_bytes].view(self.chunks, chunk_bytes)

    def cleanup(self) -> None:
        """Once nothing accesses the memory any more."""
        if self._base is None:
            return
        while self.pinned_addresses:  # vLLM's worker for GPUs has pinned them
            torch.cuda.cudart().cudaHostUnregister(self.pinned_addresses.pop())
        self._base = None
        self.region.close()


class Session:
    """The worker's session with its sidecar: caches, pool and marks."""

    def __init__(
        self, socket: str | None, config: OffloadingConfig, kv_caches: CanonicalKVCaches,
        pool: Pool, on_gpu: bool
    ) -> None:  # fmt: skip
        self.pool = pool
        spans: dict[int, int] = {}  # each allocation once, whatever views there are
        for t in kv_caches.tensors:
            storage = t.tensor.untyped_storage()
            spans[storage.data_ptr()] = storage.nbytes()
        if on_gpu and sleeps(spans):
            raise kvspray.KvsprayError(
                "enable_sleep_mode is on, and the sidecar cannot follow a KV cache that sleeps: "
                "start without --enable-sleep-mode"
            )
        make = kvspray.Region.gpu if on_gpu else kvspray.Region.process
        self.caches = [make(start, n) for start, n in sorted(spans.items())]
        parallel = config.parallel
        self.client = kvspray.WorkerClient(
            socket,
            engine=kvspray.EngineInfo("vllm", vllm.__version__, f"{config.engine_id}-offload"),
            ranks=kvspray.Ranks(tp=(parallel.rank % parallel.world_size, parallel.world_size)),
            layers=1, deadline_s=DEADLINE_S, log=_log,
        )  # fmt: skip
        self.client.register([*self.caches, pool.region])
        self._signals = GpuSignals(self.client, _log) if on_gpu else None

    def mark(self) -> int | None:
        """Of all that the engine's stream holds now. None: the order cannot be kept."""
        if self._signals is None:
            return 0
        return self._signals.mark(torch.cuda.current_stream().cuda_stream) or None

    def close(self) -> None:
        if self._signals is not None:
            torch.cuda.synchronize()
            self._signals.close()
        self.client.close()
        for region in self.caches:
            region.close()


def sleeps(spans: Iterable[int]) -> bool:
    """Whether memory at one of these addresses is freed and mapped anew by vLLM's sleep mode."""
    allocator = cumem.CuMemAllocator.instance
    return allocator is not None and any(at in allocator.pointer_to_data for at in spans)


@dataclass(frozen=True)
class _Layer:
    """Where a layer's pages are."""

    cache: int  # of Session.caches
    base: int  # in it, of block 0
    stride: int
    length: int
    pool: int  # in the pool, of chunk 0
    chunk: int  # bytes between the chunks of the pool
    page: int  # the pool's bytes for a block


class Pieces:
    """Turns vLLM's lists of blocks and chunks into pieces of memory."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, session: Session | None, pool: Chunks,
        blocks_per_chunk: int
    ) -> None:  # fmt: skip
        """Without a session the offsets of caches are addresses."""
        self._per_chunk = blocks_per_chunk
        self._groups: list[list[_Layer]] = []
        caches = (
            [(r.addr, r.addr + r.nbytes) for r in session.caches] if session else [(0, 1 << 63)]
        )
        for refs in kv_caches.group_data_refs:
            layers = []
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx]
                at = tensor.tensor.data_ptr()
                (cache,) = [i for i, (start, end) in enumerate(caches) if start <= at < end]
                stride = tensor.tensor.stride(0) * tensor.tensor.element_size()
                layers.append(
                    _Layer(
                        cache,
                        at - caches[cache][0],
                        stride,
                        ref.page_size_bytes,
                        pool.offsets[ref.tensor_idx],
                        pool.strides[ref.tensor_idx],
                        tensor.page_size_bytes,
                    )
                )
            self._groups.append(layers)

    def of(
        self, blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Copies, of some layers each: a cache, and an array with a row (offset in the cache,
        offset in the pool, length) for each piece. They are computed one by one, so that the first
        moves while the next is computed."""
        groups = []
        block_at = chunk_at = 0
        for layers, count, index in zip(
            self._groups, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            if count == 0:
                continue
            skip = index % self._per_chunk
            places = np.arange(skip, skip + count, dtype=np.int64)
            used = -(-(skip + count) // self._per_chunk)
            ids = blocks.block_ids[block_at : block_at + count].astype(np.int64)
            mine = chunks.block_ids[chunk_at : chunk_at + used].astype(np.int64)
            if len(ids) != count or len(mine) != used:
                raise ValueError(
                    f"vLLM gave {len(ids)} blocks and {len(mine)} chunks for {count} and {used}"
                )
            groups.append((layers, ids, mine[places // self._per_chunk], places % self._per_chunk))
            block_at += count
            chunk_at += used
        if block_at != len(blocks.block_ids) or chunk_at != len(chunks.block_ids):
            raise ValueError("vLLM gave more blocks or chunks than its groups have")
        return (copy for group in groups for copy in _copies(*group))


def _copies(
    layers: list[_Layer], ids: np.ndarray, chunks: np.ndarray, places: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Copies of one group. ids: blocks of the cache; chunks: of the pool; places: in these."""
    together = max(1, COPY_PIECES // len(ids))  # layers
    for cache, of_cache in itertools.groupby(layers, key=lambda x: x.cache):
        some = list(of_cache)
        for first in range(0, len(some), together):
            part = some[first : first + together]
            rows = np.empty((len(part), len(ids), 3), dtype=np.uint64)
            for layer, x in zip(rows, part, strict=True):
                layer[:, 0] = x.base + ids * x.stride
                layer[:, 1] = x.pool + chunks * x.chunk + places * x.page
                layer[:, 2] = x.length
            pieces = joined(rows.reshape(-1, 3))
            for at in range(0, len(pieces), COPY_PIECES):
                yield cache, pieces[at : at + COPY_PIECES]


def joined(rows: np.ndarray) -> np.ndarray:
    """Pieces that follow each other on both sides become one."""
    if len(rows) < 2:
        return rows
    ends = rows[:-1, :2] + rows[:-1, 2:]
    first = np.concatenate(([True], (ends != rows[1:, :2]).any(axis=1)))
    starts = np.flatnonzero(first)
    out = rows[starts]
    out[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return out


class Native(Protocol):
    """The worker that makes copies without a sidecar."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **expedited: bool) -> bool: ...

    def get_finished(self) -> list[TransferResult]: ...

    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None: ...


class HostCopies:
    """Copies by this thread, for engines whose caches are in host memory; vLLM has no worker for
    them."""

    def __init__(self, kv_caches: CanonicalKVCaches, pool: Chunks, blocks_per_chunk: int) -> None:
        self._pieces = Pieces(kv_caches, None, pool, blocks_per_chunk)
        self._pool = pool
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **expedited: bool) -> bool:
        return self._copy(job_id, dst_spec, src_spec, False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, store: bool) -> bool:
        start, moved = time.monotonic(), 0
        for _, rows in self._pieces.of(blocks, chunks):
            for cache, pool, length in rows.tolist():
                host = self._pool.addr + pool
                ctypes.memmove(*((host, cache) if store else (cache, host)), length)
                moved += length
        self._done.append(TransferResult(job_id, True, moved, time.monotonic() - start))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pool.cleanup()


@dataclass
class _Job:
    store: bool
    blocks: GPULoadStoreSpec
    chunks: BlockIDsLoadStoreSpec
    after: int  # a mark of the engine's stream
    began: float
    copies: Iterator[tuple[int, np.ndarray]]  # that follow `upcoming`
    upcoming: tuple[int, np.ndarray] | None  # the first that the sidecar has not got: cache, rows
    expedited: bool
    open: set[int] = field(default_factory=set)  # leases
    bytes: int = 0
    failed: str = ""


class Worker(OffloadingWorker):
    """Loads go before stores: stores wait while a load is open, for STORE_WAIT_S at most, and not
    if vLLM waits for them."""

    def __init__(self, session: Session, native: Native, pieces: Pieces) -> None:
        self._session, self._native, self._pieces = session, native, pieces
        self._jobs: dict[int, _Job] = {}  # that the sidecar has, or is to get
        self._by_lease: dict[int, int] = {}
        self._native_jobs: set[int] = set()
        self._results: list[TransferResult] = []
        self._warned = -WARN_EVERY_S
        self.native_copies = 0

    # -- vLLM's calls

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._submit(job_id, True, src_spec, dst_spec)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """expedited: vLLM 0.33 waits for it within the step."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        self._submit(job_id, False, dst_spec, src_spec, expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._take()
        self._feed(set())
        done, self._results = self._results, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Returns when the jobs have ended, and their blocks are vLLM's again."""
        while job_ids & self._jobs.keys():
            self._feed(job_ids)
            if not self._session.client.wait(WAIT_S) and not self._by_lease:
                # No copy is open whose end would make room for theirs.
                for job_id in job_ids & self._jobs.keys():
                    self._fall_back(job_id)
            self._take()
        if waited := job_ids & self._native_jobs:
            self._native.wait(waited)

    def shutdown(self) -> None:
        """Gives the pool back. Copies that are open end before that, or after CLOSE_S with the
        session: the sidecar has its own mapping of the memory, so a late write meets no other
        memory."""
        for lease in self._by_lease:
            self._session.client.cancel(lease, "the engine ends")
        end = time.monotonic() + CLOSE_S
        while self._by_lease and time.monotonic() < end:
            self._session.client.wait(WAIT_S)
            for c in self._session.client.poll():
                self._by_lease.pop(c.lease, None)
        self._session.close()
        self._native.shutdown()

    # -- copies

    def _submit(
        self, job_id: int, store: bool, blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec,
        expedited: bool = False
    ) -> None:  # fmt: skip
        after = self._session.mark()
        copies = self._pieces.of(blocks, chunks)
        upcoming = next(copies, None)
        if upcoming is None:
            self._results.append(TransferResult(job_id, True, 0, 0.0))
            return
        self._jobs[job_id] = _Job(
            store, blocks, chunks, after or 0, time.monotonic(), copies, upcoming, expedited
        )
        if after is None:
            self._jobs[job_id].failed = "the GPU sets no marks any more"
            self._fall_back(job_id)
            return
        self._feed(set())

    def _feed(self, wanted: set[int]) -> None:
        """Submits what the sidecar takes now. First what vLLM waits for and stores that have waited
        long, then loads, then the others."""
        now = time.monotonic()
        first: list[int] = []
        loads: list[int] = []
        stores: list[int] = []
        for job_id, job in self._jobs.items():
            urgent = (
                job_id in wanted or job.expedited or job.store and now - job.began >= STORE_WAIT_S
            )
            (first if urgent else stores if job.store else loads).append(job_id)
        for job_id in (*first, *loads, *(() if loads else stores)):
            job = self._jobs[job_id]
            while job.upcoming and not job.failed:
                lease = self._copy(job_id, job, *job.upcoming)
                if lease > 0:
                    job.open.add(lease)
                    self._by_lease[lease] = job_id
                    job.upcoming = next(job.copies, None)
                elif lease == kvspray.LATER and now - job.began < DEADLINE_S:
                    return  # the end of a copy makes room, for this job first
                else:
                    job.failed = self._session.client.refusal
            if job.failed and not job.open:
                self._fall_back(job_id)

    def _copy(self, job_id: int, job: _Job, cache: int, rows: np.ndarray) -> int:
        """What WorkerClient.copy returns."""
        src, dst = self._session.caches[cache], self._session.pool.region
        if not job.store:
            src, dst, rows = dst, src, rows[:, [1, 0, 2]]
        data = np.ascontiguousarray(rows, dtype="<u8").tobytes()
        name = f"{'store' if job.store else 'load'}-{job_id}"
        return self._session.client.copy(
            src, dst, data, req=name, deadline_s=DEADLINE_S, after=job.after
        )

    def _take(self) -> None:
        """Takes the ends of copies."""
        for c in self._session.client.poll():
            job_id = self._by_lease.pop(c.lease, None)
            if job_id is None:
                continue
            job = self._jobs[job_id]
            job.open.discard(c.lease)
            job.bytes += c.bytes
            if not c.ok:
                job.failed = job.failed or f"{c.status.name}: {c.reason}"
            if job.open or job.upcoming and not job.failed:
                continue
            if job.failed:
                self._fall_back(job_id)
            else:
                del self._jobs[job_id]
                self._results.append(
                    TransferResult(job_id, True, job.bytes, time.monotonic() - job.began)
                )
        finished = self._native.get_finished()
        self._native_jobs -= {r.job_id for r in finished}
        self._results += finished

    def _fall_back(self, job_id: int) -> None:
        """No lease of the job is open: the sidecar writes nothing of it any more."""
        job = self._jobs.pop(job_id)
        assert not job.open
        self.native_copies += 1
        now = time.monotonic()
        if now - self._warned >= WARN_EVERY_S:
            self._warned = now
            _log.warning(
                "kvspray: vLLM's own worker copies what the sidecar did not: %s (%d so far)",
                job.failed or self._session.client.refusal, self.native_copies,
            )  # fmt: skip
        self._native_jobs.add(job_id)
        if job.store:
            self._native.submit_store(job_id, job.blocks, job.chunks)
        else:
            self._native.submit_load(
                job_id, job.chunks, job.blocks, **({"expedited": True} if job.expedited else {})
            )
