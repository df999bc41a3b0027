"""Pages that the sidecar copies from a host pool into the GPU, layer by layer.

A load flag counts the parts of all loads that have arrived: K or V of a layer, or its latent.
SGLang's load stream waits for the parts of each layer, and SGLang's own events for layers come
behind these waits. So a model computes a layer while the sidecar copies the next ones.

The stream itself copies the parts that the sidecar does not (missing.py), after the lease of the
load has ended: until then the sidecar may still write. It never goes on without the bytes.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvspray
from kvspray import CompletionStatus, _messages
from kvspray.gpu import GpuSignals
from kvspray_sglang.link import Link
from kvspray_sglang.missing import ALL, Missing, Part
from kvspray_sglang.pools import PoolError

MIN_BYTES = 128 << 20  # of a load; SGLang copies less in less time [measured, H200]
MIN_PIECE = 2 << 10  # bytes of a page of one part; smaller ones take the sidecar too long
MAX_PIECES = 100_000  # pages of all parts of a load
# A load is cancelled if none of its parts arrives for so long after the stream has reached it.
STALL_S = 5.0
# Deadline of a load. libkvspray kills a sidecar that has not ended it 2 to 3 s after the deadline,
# and 20 s later still if the sidecar answers (KVS_LOAD_GRACES).
LEASE_S = 10.0
# After a load with parts that the sidecar did not copy, SGLang makes all loads for PAUSE_S. The
# pause doubles with each further such load, up to MAX_PAUSE_S. A load that the sidecar makes alone
# resets it.
PAUSE_S, MAX_PAUSE_S = 10.0, 600.0
FLAG = 0  # the load flag
SLOTS = 8  # one more than loads on the stream at a time
MAX_BATCHES = 2  # of a pipeline at a time; SGLang has three counters for its layers' events
CLOSE_S = 40.0  # for open loads to end when the backend is detached
WARN_EVERY_S = 60.0
_LOOK_S = 0.001  # interval at which a thread reads the flag on a CPU
_WAIT_S = 0.05  # longest wait for completions before the thread checks for stalled loads

_log = logging.getLogger(__name__)
_active: Loads | None = None
_unclosed: list[Loads] = []  # kernels may still read their memory


@dataclass(eq=False)
class _Load:
    value: int  # the load flag has value + n once the first n parts are there
    slot: int  # of Missing
    mark: int  # of the stream: earlier work on the device's pages is done; 0 on a CPU
    begun: float
    lease: int = 0
    seen: int = 0  # parts that were there at the last look
    since: float = 0.0  # when it could begin, or a part arrived last; 0: it could not
    cancelled: bool = False


def pool_of(host: Any) -> Any:
    """The pool with the pages of attention, if SGLang gives a group of pools."""
    entry = getattr(host, "anchor_entry", None)
    return host if entry is None else entry.host_pool


def parts_of(host: Any) -> list[list[Part]]:
    """For each layer, the tensors of pages of a host pool and of its device pool. Raises PoolError
    for a pool whose pages of a layer are not in one piece each."""
    kind, layout = type(host).__name__, getattr(host, "layout", "?")
    what = f"host pool {kind}, layout {layout}"
    if layout not in ("layer_first", "page_first_direct"):
        raise PoolError(
            f"{what}: a page of one layer is in many pieces; use --hicache-io-backend direct with "
            "--hicache-mem-layout page_first_direct"
        )
    try:
        if kind == "MHATokenToKVPoolHost":
            pairs = [(host.k_buffer, host.device_k_buffers), (host.v_buffer, host.device_v_buffers)]
            layers = list(range(host.target_layer_num))
        elif kind == "MLATokenToKVPoolHost" and host.dcp_size == 1 and not host._is_dummy:
            pairs = [(host.kv_buffer, host.device_kv_buffers)]
            layers = list(host._target_layer_indices)
            places = (host._host_layer_by_controller, host._buffer_index_by_layer)
            if layers != list(range(len(layers))) or any(
                [x[i] for i in layers] != layers for x in places
            ):
                raise PoolError(f"{what}: its layers are in another order")
        else:
            raise PoolError(f"{what}: not a pool that the sidecar loads from")
        page = int(host.page_size)
        return [[_part(h, d, layout, i, page) for h, d in pairs] for i in layers]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as err:
        raise PoolError(f"{what}: {type(err).__name__}: {err}") from err


def _part(host: Any, device: Any, layout: str, layer: int, page: int) -> Part:
    mine = host[:, layer] if layout == "page_first_direct" else host[layer].unflatten(0, (-1, page))
    tensor = device[layer]
    theirs = tensor[: len(tensor) // page * page].unflatten(0, (-1, page))
    # A row may be shaped otherwise; its bytes are the same.
    same = mine[0].numel() == theirs[0].numel() and mine.dtype == theirs.dtype
    if not (same and mine[0].is_contiguous() and theirs[0].is_contiguous()):
        raise PoolError(
            f"layer {layer}: pages of {tuple(mine.shape[1:])} {mine.dtype} at the host and "
            f"{tuple(theirs.shape[1:])} {theirs.dtype} at the device"
        )
    part = Part(mine.flatten(1), theirs.flatten(1))
    if part.length < MIN_PIECE:
        raise PoolError(
            f"a page has {part.length} bytes in a layer, and the sidecar copies at least "
            f"{MIN_PIECE}; raise --page-size"
        )
    return part


def pages_of(slots: torch.Tensor, page: int, pages: int) -> np.ndarray | None:
    """The pages that these slots of tokens fill, in their order. None: they fill none."""
    if slots.device.type != "cpu" or len(slots) == 0 or len(slots) % page:
        return None
    rows = slots.numpy().reshape(-1, page).astype(np.int64, copy=False)
    first = rows[:, 0]
    if (rows != first[:, None] + np.arange(page)).any() or (first % page).any():
        return None
    out = first // page
    return out if 0 <= out.min() and out.max() < pages else None


class Loads:
    """The loads of one rank's host pool."""

    def __init__(self, link: Link, host: Any, log: logging.Logger = _log) -> None:
        """``link`` may be connected later. Raises PoolError for a pool that the sidecar cannot load
        from, and KvsprayError."""
        self.host = pool_of(host)
        layers = parts_of(self.host)
        self._link, self._log = link, log
        self._page = int(self.host.page_size)
        self._parts = [p for layer in layers for p in layer]
        self._per_layer = len(layers[0])
        self.layers = len(layers)
        self._gpu = self._parts[0].device.is_cuda
        if len(self._parts) > _messages.MAX_LOAD_PARTS:
            raise PoolError(
                f"{len(self._parts)} tensors of pages, at most {_messages.MAX_LOAD_PARTS}"
            )
        make = kvspray.Region.gpu if self._gpu else kvspray.Region.process
        self._targets = [make(p.device.data_ptr(), p.device.nbytes) for p in self._parts]
        self._rows = [self._row(p, t) for p, t in zip(self._parts, self._targets, strict=True)]
        self._signals: GpuSignals | None = None  # of a GPU, from the first load on
        pages = min(len(self._parts[0].device), _messages.MAX_COPY_BLOCKS)
        kind = self._kind_of_missing()
        self._missing = kind(self._parts, self._per_layer, SLOTS, pages)
        self._marks = [0] * SLOTS  # of the last load in each slot
        self._cond = threading.Condition()  # guards what follows
        self._usable = False  # the session has the device pool
        self._stream: int | None = None  # of all loads: they follow each other on it
        self._value = self._count = 0  # of the next load
        self._loads: collections.deque[_Load] = collections.deque()  # under way, the oldest first
        self._closing = False
        self._pause, self._until = 0.0, float("-inf")
        self._complained: dict[str, float] = {}
        self.copied = self.fallbacks = 0  # parts, by the sidecar and not by it
        self.ends: collections.Counter[str] = collections.Counter()  # of leases that failed
        self._thread = threading.Thread(target=self._run, name="kvspray-loads", daemon=True)
        self._thread.start()

    def _row(self, part: Part, target: kvspray.Region) -> kvspray.LoadPart:
        host, device = part.host, part.device
        start = host.data_ptr()
        step, other = (x.stride(0) * x.element_size() for x in (host, device))
        found = self._link.mapped(start, start + (len(host) - 1) * step + part.length)
        if found is None:
            raise PoolError("it is not in memory that the sidecar can map")
        return kvspray.LoadPart(*found, step, target, 0, other, part.length)

    def _kind_of_missing(self) -> type[Missing]:
        if not self._gpu:
            return Missing
        from kvspray_sglang.missing_gpu import GpuMissing

        return GpuMissing

    # -- SGLang's thread

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> _Load | None:
        """Requests a load of these slots on the current stream. None: SGLang makes it itself."""
        if not self.ready or time.monotonic() < self._until:
            return None
        host = pages_of(host_slots, self._page, len(self._parts[0].host))
        device = pages_of(device_slots, self._page, len(self._parts[0].device))
        if host is None or device is None or len(host) != len(device):
            return None
        nbytes = len(host) * sum(p.length for p in self._parts)
        if nbytes < MIN_BYTES or len(host) > _messages.MAX_COPY_BLOCKS:
            return None
        if len(host) * len(self._parts) > MAX_PIECES:
            return None
        slot, mark = self._count % SLOTS, 0
        if self._gpu:
            stream = torch.cuda.current_stream().cuda_stream
            self._stream = self._stream or stream
            if stream != self._stream or not self._signals_ready():
                return None
            assert self._signals is not None
            # The next load's mark comes behind all kernels of this slot's last load.
            if not self._signals.reached(self._marks[(slot + 1) % SLOTS]):
                return None
            mark = self._signals.mark(stream)
            if mark == 0:
                return None
        pages = np.stack((host, device), 1).astype("<u4")
        arrived = self._missing.begin(slot, pages.view("<i4"))
        with self._cond:
            if self._closing:
                return None
            load = _Load(self._value, slot, mark, time.monotonic())
            try:
                load.lease = self._link.load(
                    self._rows, pages.tobytes(), FLAG, load.value, arrived, f"load-{self._count}",
                    LEASE_S, mark,
                )  # fmt: skip
            except kvspray.KvsprayError as err:
                self._complain(str(err))
                return None
            if load.lease <= 0:
                if load.lease != kvspray.LATER:
                    self._complain(self._link.refusal)
                return None
            self._value += len(self._parts)
            self._count += 1
            self._marks[slot] = mark
            self._loads.append(load)
            self._cond.notify_all()
        return load

    def _signals_ready(self) -> bool:
        if self._signals is None:
            try:
                self._signals = self._link.signals(self._log)
            except kvspray.KvsprayError as err:
                self._usable = False
                self._complain(str(err))
        return self._signals is not None

    @property
    def ready(self) -> bool:
        """Whether the sidecar has answered for all regions, and none hangs that cannot be
        killed."""
        if not self._usable:
            return False
        status = self._link.status()
        return status.has_regions and not status.quarantined

    def end(self, load: _Load) -> None:
        """Returns when nothing writes to the load's pages any more."""
        with self._cond:
            self._cancel(load, "SGLang has given it up")
            self._cond.wait_for(lambda: load not in self._loads)
        if self._stream is not None:
            torch.cuda.ExternalStream(self._stream).synchronize()

    def wait(self, load: _Load, layer: int) -> None:
        """The current stream goes on once the layer is on the device. On a CPU this thread does."""
        value = load.value + (layer + 1) * self._per_layer
        if self._signals is not None:
            stream = torch.cuda.current_stream().cuda_stream
            if not self._signals.wait_layer(FLAG, value, stream):
                raise RuntimeError("kvspray: CUDA refuses a wait on SGLang's load stream")
        else:  # bounded: the lease ends, and libkvspray raises the flag then
            while self._link.load_value(FLAG) < value:
                if self._link.closed:
                    raise RuntimeError("kvspray: the backend was closed under a load")
                time.sleep(_LOOK_S)
        self._missing.copy(load.slot, layer)

    # -- the thread that takes the ends of loads

    def _run(self) -> None:
        # It makes no call to CUDA, which may wait for the stream that waits for this thread.
        self._register()
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._loads or self._closing)
                if not self._loads:
                    return
            try:
                self._take(self._link.loads_ended(_WAIT_S))
                self._cancel_stalled()
            except Exception as err:  # the loads end without this thread, too
                self._complain(f"{type(err).__name__}: {err}")
                time.sleep(_WAIT_S)

    def _register(self) -> None:
        """Apart from the host pool, because the store works without the device's."""
        while not self._link.connected:
            with self._cond:
                if self._cond.wait_for(lambda: self._closing, 10 * _WAIT_S):
                    return
        try:
            self._link.add_optional(self._targets)
            self._usable = True
        except kvspray.KvsprayError as err:
            self._complain(str(err))

    def _take(self, ended: Sequence[kvspray.Completion]) -> None:
        with self._cond:
            for c in ended:
                load = next((x for x in self._loads if x.lease == c.lease), None)
                if load is not None:
                    self._loads.remove(load)
                    self._count_end(c, load)
            self._cond.notify_all()

    def _count_end(self, c: kvspray.Completion, load: _Load) -> None:
        """Locked."""
        parts, there = len(self._parts), self._missing.arrived(load.slot)
        if there == ALL:  # libkvspray may write it later, if a load before this one has not ended
            there = parts if c.ok else max(0, self._link.load_value(FLAG) - load.value)
        self.copied += min(there, parts)
        if there >= parts:
            if load.begun > self._until:
                self._pause = 0.0
            return
        self.fallbacks += parts - there
        self.ends[c.status.name] += 1
        late = load.since == 0 or time.monotonic() - load.since < STALL_S
        if c.status == CompletionStatus.EXPIRED and late:
            self._complain(
                f"a prefill kept SGLang's load stream for {LEASE_S:g} s; the stream copies "
                f"{parts - there} of {parts} parts"
            )
            return
        self._pause = min(max(PAUSE_S, 2 * self._pause), MAX_PAUSE_S)
        self._until = time.monotonic() + self._pause
        self._complain(
            f"a load by the sidecar has ended with {there} of {parts} parts, and SGLang's stream "
            f"copies the others: {c.status.name}: {c.reason}"
        )

    def _reached(self, load: _Load) -> bool:
        return self._signals is None or self._signals.reached(load.mark)

    def _cancel_stalled(self) -> None:
        """Cancels loads that the stream reached at least STALL_S ago, and of which no part has
        arrived for as long."""
        with self._cond:
            now = time.monotonic()
            for load in self._loads:
                there = self._link.load_value(FLAG) - load.value
                if load.since == 0 and self._reached(load):
                    load.since = now
                if there > load.seen:
                    load.seen, load.since = there, now
                if 0 < load.since <= now - STALL_S:
                    self._cancel(load, "the load has stalled")

    def _cancel(self, load: _Load, why: str) -> None:
        """Locked."""
        if not load.cancelled and load in self._loads:
            load.cancelled = True
            self._link.cancel(load.lease, why)

    def _complain(self, text: str) -> None:
        now, kind = time.monotonic(), text[:20]
        if now - self._complained.get(kind, float("-inf")) >= WARN_EVERY_S:
            self._complained[kind] = now
            self._log.warning("kvspray: %s", text)

    def close(self) -> bool:
        """Before the link's end. False: a load has not ended, so the link stays open."""
        with self._cond:
            self._closing = True
            self._cond.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _unclosed.append(self)
            return False
        if self._stream is not None:  # its kernels read what is freed next
            torch.cuda.ExternalStream(self._stream).synchronize()
        if self._signals is not None:
            self._signals.close()
        return True


class _Loading:
    """A host pool of SGLang that loads by the sidecar. One of these is made for each load."""

    def __init__(self, host: Any, loads: Loads) -> None:
        self._host, self._loads = host, loads
        self._load: _Load | None = None
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def end(self) -> None:
        if self._load is not None:
            self._loads.end(self._load)

    def load_to_device_per_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int,
        io_backend: str, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if not self._begun:
            self._begun = True
            try:
                self._load = self._loads.begin(host_indices, device_indices)
            except Exception:  # no copy is submitted
                _log.exception("kvspray: SGLang loads what the sidecar should")
        if self._load is None:
            self._host.load_to_device_per_layer_physical(
                device_pool, host_indices, device_indices, layer_id, io_backend, *args, **kwargs
            )
        else:
            self._loads.wait(self._load, layer_id)


def activate(loads: Loads | None) -> None:
    """From now on this process loads by these; None: SGLang does."""
    global _active
    _active = loads


def deactivate(loads: Loads) -> None:
    """A backend that was attached meanwhile keeps its own."""
    if _active is loads:
        activate(None)


def submit(
    original: Callable[..., Any], engine: Any, transfers: Any, *, transfer_layer_id_max: int,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Around L2TransferEngine.submit_host_to_device."""
    loads, ours = _active, None
    if loads is not None and getattr(engine, "io_backend", "") == "direct":
        # Two transfers of a pool would use the same flags at the same time.
        mine = [i for i, t in enumerate(transfers) if t.host_pool is loads.host and not t.is_draft]
        if len(mine) == 1 and _covers(loads, transfers[mine[0]], transfer_layer_id_max):
            (i,) = mine
            ours = _Loading(loads.host, loads)
            transfers = [*transfers[:i], transfers[i]._replace(host_pool=ours), *transfers[i + 1 :]]
    try:
        return original(engine, transfers, transfer_layer_id_max=transfer_layer_id_max, **kwargs)
    except Exception:  # SGLang gives the pages to others then
        if ours is not None:
            ours.end()
        raise


def _covers(loads: Loads, transfer: Any, layers: int) -> bool:
    """Whether SGLang asks for each layer, in order: the load's end comes behind all of them."""
    mapped = transfer.layer_mapper or (lambda layer: layer)
    asked = [x for x in map(mapped, range(layers)) if x is not None]
    return asked == list(range(loads.layers))
