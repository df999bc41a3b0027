"""vLLM's sleep mode with copies of the sidecar: the weights go to host memory and come back over
every PCIe link that it may use.

    KVSPRAY_SLEEP=1 vllm serve MODEL --enable-sleep-mode

The variable may also be the path of the sidecar's socket.

vLLM's own allocator decides what is kept and what is discarded, and frees and maps the memory of
the GPU. This module replaces its copies between the GPU and host memory. The host memory is kept
between two sleeps, because pinning it takes longer than a copy.

The sidecar's mapping of GPU memory is dropped before the engine frees that memory, which would
otherwise stay in use. Memory that comes with a wake-up is always new. A copy that the sidecar does
not take or does not finish is made again by vLLM's own call, after its lease has ended: until then
the sidecar may still write. Memory is awake only when all of it has been loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import vllm
from vllm.device_allocator import AllocationData, cumem

import kvspray
from kvspray import limits
from kvspray.gpu import map_memory
from kvspray_vllm.versions import CAPABILITIES

VARIABLE = "KVSPRAY_SLEEP"
DEADLINE_S = 60.0  # of a copy
CONNECT_S = 5.0  # for the first session
WAIT_S = 0.05  # between looks at the session
ADD_S = 10.0  # for the sidecar to map what it is to copy
DROP_S = 10.0  # for the sidecar to unmap what it has copied
TELL_S = 10.0  # between lines of the log about a wait
BATCH = 24  # allocations that are added together
MAX_SLABS = 8
ALIGN = 4096  # of an allocation in a slab

_log = logging.getLogger("vllm.kvspray.sleep")


def install() -> None:
    """Makes the allocator of this process, before vLLM makes its own. Several calls are one."""
    value = os.environ[VARIABLE]
    if value != "1" and not value.startswith("/"):
        raise ValueError(
            f"{VARIABLE} is {value!r}: set it to 1, to the path of the sidecar's socket, or to 0 "
            "for vLLM's own copies"
        )
    if not cumem.cumem_available:
        _log.warning(
            "kvspray: %s has no effect: this vLLM has no cumem allocator, which sleep mode needs",
            VARIABLE,
        )
    elif cumem.CuMemAllocator.instance is None:
        cumem.CuMemAllocator.instance = Allocator(Copies(Gpu(), None if value == "1" else value))
        # As vLLM does for its own.
        atexit.register(cumem.CuMemAllocator._shutdown_singleton)
    elif not isinstance(cumem.CuMemAllocator.instance, Allocator):
        _log.warning("kvspray: %s has no effect: vLLM has made its allocator already", VARIABLE)


class Memory(Protocol):
    """The calls that need a GPU."""

    def region(self, ptr: int, nbytes: int) -> kvspray.Region: ...

    def synchronize(self) -> None: ...

    def map(self, handle: Any) -> None: ...

    def unmap(self, handle: Any) -> None: ...

    def copy(self, dst: int, src: int, nbytes: int) -> None: ...


class Gpu:
    def region(self, ptr: int, nbytes: int) -> kvspray.Region:
        return kvspray.Region.gpu(ptr, nbytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def map(self, handle: Any) -> None:
        """vLLM's own call asks for a descriptor only where the GPU offers fabric handles."""
        device, nbytes, ptr, at = handle
        ctypes.c_uint64.from_address(at).value = map_memory(device, ptr, nbytes)

    def unmap(self, handle: Any) -> None:
        cumem.unmap_and_release(handle)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        cumem.libcudart.cudaMemcpy(dst, src, nbytes)


def share(address: int, nbytes: int) -> bool:
    """Replaces memory of vLLM's allocator by memory that another process can map, at the same
    addresses. Its content is lost, and is zero afterwards. False: the allocator has no memory
    there."""
    allocator = cumem.CuMemAllocator.instance
    for ptr, data in allocator.pointer_to_data.items() if allocator is not None else ():
        if not data.is_asleep and ptr <= address and address + nbytes <= ptr + data.handle[1]:
            gpu = Gpu()
            gpu.synchronize()
            gpu.unmap(data.handle)
            data.is_asleep = True  # if there is no new memory, vLLM must not free it once more
            gpu.map(data.handle)
            data.is_asleep = False
            cumem.libcudart.cudaMemset(ptr, 0, data.handle[1])
            gpu.synchronize()
            return True
    return False


@dataclass(eq=False)
class Slab:
    """Host memory for the allocations of one sleep."""

    region: kvspray.Region


@dataclass(frozen=True)
class Piece:
    """An allocation of GPU memory, and its place in a slab."""

    ptr: int
    nbytes: int
    slab: Slab
    offset: int

    @property
    def host(self) -> int:
        return self.slab.region.addr + self.offset


class Allocator(cumem.CuMemAllocator):
    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self._copies = copies
        self._pieces: dict[int, Piece] = {}  # what sleeps in a slab, by address

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        tags = (
            (self.default_tag,)
            if offload_tags is None
            else (offload_tags,)
            if isinstance(offload_tags, str)
            else offload_tags
        )
        kept = {p: d for p, d in self.pointer_to_data.items() if not d.is_asleep and d.tag in tags}
        busy = {piece.slab for piece in self._pieces.values()}
        pieces = self._copies.places([(p, d.handle[1]) for p, d in kept.items()], busy)
        if pieces:
            # Another process makes the copies: no stream orders them behind the engine's kernels.
            self._copies.memory.synchronize()
            self._copies.run("sleep", pieces)
        for piece in pieces:
            data = kept[piece.ptr]
            self._pieces[piece.ptr], data.cpu_backup_tensor = piece, _tensor(piece)
            try:
                self._copies.memory.unmap(data.handle)
            finally:
                data.is_asleep = True
        super().sleep(offload_tags)  # what is left

    def wake_up(self, tags: list[str] | None = None) -> None:
        back = [
            (d, self._pieces[p]) for p, d in self.pointer_to_data.items() if d.is_asleep
            and p in self._pieces and (tags is None or d.tag in tags
            or d.tag not in CAPABILITIES.deferrable_tags)
        ]  # fmt: skip
        if back:
            gc.collect()
            torch.accelerator.empty_cache()
            self._load(back)
            for data, piece in back:
                data.is_asleep, data.cpu_backup_tensor = False, None
                del self._pieces[piece.ptr]
        super().wake_up(tags)

    def _load(self, back: Sequence[tuple[AllocationData, Piece]]) -> None:
        """All or nothing, so that a wake-up that finds no memory can be tried again, and nothing is
        awake in part."""
        mapped = []
        try:
            for data, _ in back:
                self._copies.memory.map(data.handle)
                mapped.append(data.handle)
            self._copies.run("wake-up", [piece for _, piece in back])
        except BaseException as err:
            for handle in mapped:
                self._copies.memory.unmap(handle)
            if isinstance(err, kvspray.KvsprayError):
                raise RuntimeError(f"the engine stays asleep: {err}") from err
            raise

    def _python_free_callback(self, ptr: int) -> Any:
        """Tensors may be freed while they sleep, and another one may get their address."""
        self._pieces.pop(ptr, None)
        return super()._python_free_callback(ptr)


def _tensor(piece: Piece) -> torch.Tensor:
    return torch.frombuffer(
        (ctypes.c_uint8 * piece.nbytes).from_address(piece.host), dtype=torch.uint8
    )


class Copies:
    """Host memory, and copies between it and the GPU."""

    def __init__(self, memory: Memory, socket: str | None = None) -> None:
        self.memory = memory
        self._socket = socket
        self._slabs: list[Slab] = []
        self._client: kvspray.WorkerClient | None = None

    # -- host memory

    def places(self, allocations: Sequence[tuple[int, int]], busy: set[Slab]) -> list[Piece]:
        """Places in one slab that is not busy. Empty: there is no room, and vLLM's own copies are
        to be used."""
        offsets, end = [], 0
        for _, nbytes in allocations:
            offsets.append(end)
            end += -(-nbytes // ALIGN) * ALIGN
        if end == 0:
            return []
        slab = self._slab(end, busy)
        if slab is None:
            return []
        return [Piece(ptr, n, slab, at) for (ptr, n), at in zip(allocations, offsets, strict=True)]

    def _slab(self, nbytes: int, busy: set[Slab]) -> Slab | None:
        idle = [s for s in self._slabs if s not in busy]
        large = [s for s in idle if s.region.nbytes >= nbytes]
        if large:
            return min(large, key=lambda s: s.region.nbytes)
        for slab in idle:
            self._slabs.remove(slab)
            # Nothing is copied now. If the sidecar still has the memory mapped, it is its own
            # mapping.
            if self._client is not None:
                self._client.drop_regions([slab.region], DROP_S)
            slab.region.close()
        why = limits.refusal(nbytes)
        if why or len(self._slabs) >= MAX_SLABS:
            _log.warning(
                "kvspray: vLLM's own sleep mode is used, because host memory is missing: %s",
                why or f"{nbytes >> 20} MiB, and all {MAX_SLABS} ranges are in use",
            )
            return None
        region = None
        try:
            region = kvspray.Region.alloc(nbytes)
            if self._client is not None:
                self._client.add_regions([region], ADD_S)
        except kvspray.KvsprayError as err:
            _log.warning("kvspray: vLLM's own sleep mode is used: %s", err)
            if region is not None:
                region.close()
            return None
        self._slabs.append(Slab(region))
        return self._slabs[-1]

    # -- copies

    def run(self, what: str, pieces: Sequence[Piece]) -> None:
        """Returns when all bytes are in place: on the GPU after a wake-up, else in host memory. It
        raises what the GPU raises."""
        began = time.monotonic()
        load = what == "wake-up"
        client, reason = self._session()
        rest = list(pieces)
        if client is not None:
            rest, reason = self._by_sidecar(client, pieces, load)
        for piece in rest:
            self.memory.copy(
                *((piece.ptr, piece.host) if load else (piece.host, piece.ptr)), piece.nbytes
            )
        took, nbytes = time.monotonic() - began, sum(p.nbytes for p in pieces)
        _log.info(
            "kvspray: %s: %.2f GiB in %.3f s, %d of %d allocations by the sidecar",
            what, nbytes / (1 << 30), took, len(pieces) - len(rest), len(pieces),
        )  # fmt: skip
        if rest:
            _log.warning(
                "kvspray: %s: vLLM's own copies moved %d allocations: %s", what, len(rest), reason
            )

    def _session(self) -> tuple[kvspray.WorkerClient | None, str]:
        try:
            if self._client is None:
                self._client = self._connect()
                self._client.wait_connected(CONNECT_S)
        except kvspray.KvsprayError as err:
            return None, str(err)
        if not self._client.connected:
            return None, self._client.status().error or "no sidecar is connected"
        return self._client, ""

    def _connect(self) -> kvspray.WorkerClient:
        client = kvspray.WorkerClient(
            self._socket, engine=kvspray.EngineInfo("vllm", vllm.__version__,
            f"sleep-{os.getpid()}"), layers=1, deadline_s=DEADLINE_S, log=_log,
        )  # fmt: skip
        try:
            client.register([])  # those of register() would stay until the session ends
            if self._slabs:
                client.add_regions([s.region for s in self._slabs])  # each batch waits for all
        except BaseException:
            client.close()
            raise
        return client

    def _by_sidecar(
        self, client: kvspray.WorkerClient, pieces: Sequence[Piece], load: bool
    ) -> tuple[list[Piece], str]:
        """Returns the pieces that it did not copy, and why the last of them. The next batch is
        mapped while one is copied. No lease is open afterwards, also not after an exception: the
        sidecar writes nothing any more."""
        left: list[Piece] = []
        why = ""
        waiting = [pieces[at : at + BATCH] for at in range(0, len(pieces), BATCH)]
        running: list[_Batch] = []
        try:
            while waiting or running:
                while waiting and len(running) < 2:
                    running.append(_Batch(client, load))
                    running[-1].start(self.memory.region, waiting.pop(0))
                self._wait(client, running, any_=True)
                for batch in [b for b in running if b.ended]:
                    running.remove(batch)
                    batch.drop()
                    left += batch.left
                    why = batch.why or why
        finally:
            for batch in running:  # an exception is under way
                batch.cancel()
            self._wait(client, running, any_=False)
            for batch in running:
                batch.drop()
        return left, why

    def _wait(self, client: kvspray.WorkerClient, batches: Sequence[_Batch], any_: bool) -> None:
        """Until one batch has no open lease, or all have none. A lease ends by its deadline, once
        the sidecar can write no more."""
        logged = time.monotonic()
        while batches and not (any if any_ else all)(b.ended for b in batches):
            client.wait(WAIT_S)
            for c in client.poll():
                for batch in batches:
                    batch.take(c)
            for batch in batches:
                batch.submit()
            if time.monotonic() - logged > TELL_S:
                logged = time.monotonic()
                _log.warning(
                    "kvspray: %d copies are open; they end before the sidecar's memory is used "
                    "again",
                    sum(len(b.open) for b in batches),
                )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        for slab in self._slabs:
            slab.region.close()
        self._client, self._slabs = None, []


class _Batch:
    """Copies of some allocations, whose memory the sidecar maps meanwhile."""

    def __init__(self, client: kvspray.WorkerClient, load: bool) -> None:
        self.left: list[Piece] = []
        self.why = ""
        self.open: dict[int, Piece] = {}  # by lease
        # Until the sidecar takes more copies.
        self._waiting: list[tuple[Piece, kvspray.Region]] = []
        self._until = time.monotonic() + DEADLINE_S  # they wait
        self._client, self._load = client, load
        self._regions: list[kvspray.Region] = []
        self._added = False

    def start(self, region: Callable[[int, int], kvspray.Region], pieces: Sequence[Piece]) -> None:
        gpu: list[tuple[Piece, kvspray.Region]] = []
        for piece in pieces:
            try:
                self._regions.append(region(piece.ptr, piece.nbytes))
                gpu.append((piece, self._regions[-1]))
            except kvspray.KvsprayError as err:
                self._fail(piece, str(err))
        try:
            if self._regions:
                self._client.add_regions(self._regions, ADD_S)
                self._added = True
        except kvspray.KvsprayError as err:
            for piece, _ in gpu:
                self._fail(piece, str(err))
            return
        self._waiting = gpu
        self.submit()

    @property
    def ended(self) -> bool:
        return not self.open and not self._waiting

    def submit(self) -> None:
        while self._waiting and self._copy(*self._waiting[0]):
            self._waiting.pop(0)

    def _copy(self, piece: Piece, gpu: kvspray.Region) -> bool:
        """False: later."""
        host, at = piece.slab.region, piece.offset
        src, dst, block = (
            (host, gpu, (at, 0, piece.nbytes)) if self._load else (gpu, host, (0, at, piece.nbytes))
        )
        lease = self._client.copy(
            src, dst, [block], req="wake-up" if self._load else "sleep", deadline_s=DEADLINE_S
        )
        if lease == kvspray.LATER and time.monotonic() < self._until:
            return False
        if lease > 0:
            self.open[lease] = piece
        else:
            self._fail(piece, self._client.refusal)
        return True

    def take(self, end: kvspray.Completion) -> None:
        piece = self.open.pop(end.lease, None)
        if piece is not None and not end.ok:
            self._fail(piece, f"{end.status.name}: {end.reason}")

    def cancel(self) -> None:
        self._waiting = []
        for lease in self.open:
            self._client.cancel(lease, "the sleep or wake-up has failed")

    def drop(self) -> None:
        """All leases have ended, so nothing is copied any more, whether the sidecar has unmapped
        the memory already or not."""
        if self._added and not self._client.drop_regions(self._regions, DROP_S) and not self._load:
            nbytes = sum(r.nbytes for r in self._regions)
            _log.warning(
                "kvspray: the sidecar has not unmapped %d MiB of GPU memory yet, which are free "
                "once it has",
                nbytes >> 20,
            )
        for r in self._regions:
            r.close()

    def _fail(self, piece: Piece, why: str) -> None:
        self.left.append(piece)
        self.why = why
