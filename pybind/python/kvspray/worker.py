"""WorkerClient: the session of one engine rank."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _lib, _messages, protocol
from ._lib import byref, fast, lib
from .client import (
    ONE_RANK,
    Completion,
    CompletionStatus,
    EngineInfo,
    LogFunc,
    Ranks,
    _bin,
    _Client,
    _config,
    _ms,
    _req,
    _text,
    _timeout,
)
from .region import KvsprayError, Region
from .source import Source

Blocks = Sequence["bytes | Sequence[int]"]

_RECORD = struct.Struct("<IHHQQQII")
_POLL_BYTES = 256 << 10
_ANSWER_BYTES = 16 << 10
_DONE = 19
LATER = -1  # of copy() and load(): when one of those that are open has ended, try again
MAX_TRACEPARENT = 64  # bytes that a sidecar reads; version 00 has 55


class LoadPart(NamedTuple):
    """A tensor of pages in two regions: page i is ``i * stride`` bytes after ``base``, and has
    ``length`` bytes."""

    src: Region
    src_base: int
    src_stride: int
    dst: Region
    dst_base: int
    dst_stride: int
    length: int


class WorkerClient(_Client):
    """The session of one engine rank: regions, layout, flags and leases."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        engine: EngineInfo,
        ranks: Ranks = ONE_RANK,
        layers: int,
        deadline_s: float | None = None,
        grace_s: float | None = None,
        log: LogFunc | logging.Logger | None = None,
        submission_bytes: int = 0,
        completion_bytes: int = 0,
    ) -> None:
        config = _config(1, socket_path, engine, ranks)
        config.layers = layers
        config.submission_bytes = submission_bytes
        config.completion_bytes = completion_bytes
        config.deadline_ms = 0 if deadline_s is None else _ms(deadline_s, 0)
        config.grace_ms = 0 if grace_s is None else _ms(grace_s, 0)
        super().__init__(config, log)
        self.layers = layers
        self.refusal = ""  # why the last call that was to return a lease returned none
        self._deadline_ms = config.deadline_ms
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        self._numbers: dict[bytes, int] = {}  # of regions, by id
        self._poll_buf = ctypes.create_string_buffer(_POLL_BYTES)
        nbytes = ctypes.c_uint64()
        base = lib.kvs_flags(self._h, byref(nbytes))
        self._flags_addr, self._flags_bytes = int(base), int(nbytes.value)
        # The header's layer_flags offset; the last flag is the end of the step.
        offset = ctypes.c_uint64.from_address(self._flags_addr + 32).value
        self._step_end = ctypes.c_uint64.from_address(self._flags_addr + offset + 64 * layers)
        self._signal_layer = fast.kvs_signal_layer
        self._signal_step = fast.kvs_signal_step

    # -- memory

    def alloc_region(self, nbytes: int) -> Region:
        """New memory in a sealed memfd: the best kind, if the engine can allocate its cache in
        it."""
        return Region.alloc(nbytes)

    def process_region(self, ptr: int, nbytes: int) -> Region:
        """Any memory of this process, through /proc/self/mem."""
        return Region.process(ptr, nbytes)

    def gpu_region(self, ptr: int, nbytes: int) -> Region:
        """Memory of a GPU (``tensor.data_ptr()``), which the sidecar imports."""
        return Region.gpu(ptr, nbytes)

    @property
    def flags(self) -> tuple[int, int]:
        """(address, bytes) of the flags memory, to be registered with a GPU as host-mapped
        memory."""
        return self._flags_addr, self._flags_bytes

    def register(self, regions: Sequence[Region], layout: Mapping[str, Any] | None = None) -> None:
        """Starts the background connection; once. It retries until it finds a sidecar.

        ``layout`` is the map of docs/protocol.md section 3, with a dtype and what
        ``kvspray.identity`` asks for, without which a sidecar refuses it (see ``status().error``).
        Without a layout the client takes part in no transfer: it copies, and uses the store. The
        regions must outlive the client, or a replace(); those of add_regions() need not.
        """
        h = self._handle()
        if h is None:
            raise KvsprayError("kvspray: register: the client is closed")
        self._present("register", lib.kvs_start, h, regions, layout)

    def replace(self, regions: Sequence[Region], layout: Mapping[str, Any] | None = None) -> None:
        """Replaces the regions and the layout of register(). Without regions and layout, the engine
        takes its memory back for a while.

        Open source leases are released, open loads fail, and a new session follows. When
        ``connected`` is true again, the sidecar no longer accesses the former regions, and they may
        be closed. Spaces of the store with pieces in them must not be used any more.
        """
        h = self._handle()
        if h is None:
            raise KvsprayError("kvspray: replace: the client is closed")
        self._present("replace", lib.kvs_replace, h, regions, layout)

    def _present(
        self, what: str, call: Callable[..., int], h: ctypes.c_void_p, regions: Sequence[Region],
        layout: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        body = (
            None if layout is None else protocol.pack(protocol._ordered("REGISTER.layout", layout))
        )
        array = (_lib.CRegion * len(regions))(*[r._c for r in regions])
        rc = call(h, array, len(regions), body, len(body or b""))
        if rc != 0:
            raise KvsprayError(f"kvspray: {what}: {self._why(rc)}")
        self._numbers = {r.id: i for i, r in enumerate(regions)}

    def add_regions(self, regions: Sequence[Region], wait_s: float | None = 0) -> bool:
        """After register(): adds regions. Spaces of the store can use them at once. A copy can be
        refused until the sidecar has them: ``wait_s`` is how long to wait for that. True: it has
        answered for all regions so far; a refusal is in ``status().error``, and in the error of
        what uses them."""
        h = self._handle()
        if h is None:
            raise KvsprayError("kvspray: add_regions: the client is closed")
        array = (_lib.CRegion * len(regions))(*[r._c for r in regions])
        first = int(lib.kvs_regions_add(h, array, len(regions)))
        if first < 0:
            raise KvsprayError(f"kvspray: add_regions: {self._why(first)}")
        self._numbers |= {r.id: first + i for i, r in enumerate(regions)}
        return bool(lib.kvs_regions_wait(h, _timeout(wait_s)))

    def drop_regions(self, regions: Sequence[Region], timeout_s: float | None = 10) -> bool:
        """Takes back regions of add_regions(). Copies and spaces can use them no more.

        True: the sidecar accesses them no more, and the memory may be freed. False: that is not
        certain yet, because leases are open or the session has ended; the memory may be used for
        something else once every lease that used it has completed through poll().
        """
        h = self._handle()
        if h is None:
            return False
        numbers = [self._number("drop_regions", r) for r in regions]
        request = int(
            lib.kvs_regions_drop(h, (ctypes.c_uint32 * len(numbers))(*numbers), len(numbers))
        )
        if request < 0:
            raise KvsprayError(f"kvspray: drop_regions: {self._why(request)}")
        for r in regions:
            del self._numbers[r.id]
        if request == 0:
            return False
        kind = ctypes.c_uint32()
        buf = ctypes.create_string_buffer(_ANSWER_BYTES)
        n = int(lib.kvs_answer(h, request, _timeout(timeout_s), byref(kind), buf, len(buf)))
        if n <= 0:
            lib.kvs_request_forget(h, request)
        return n > 0 and kind.value == _DONE

    def _number(self, what: str, region: Region) -> int:
        number = self._numbers.get(region.id)
        if number is None:
            raise ValueError(
                f"kvspray: {what}: {region!r} is not registered; pass it to register() or "
                "add_regions()"
            )
        return number

    def describe(self, layout: Mapping[str, Any]) -> None:
        """Replaces the layout of the registered memory, for example because the engine has other
        weights.

        Open source leases are released, running loads fail, and a new session presents this layout.
        """
        h = self._handle()
        if h is None:
            return
        body = protocol.pack(protocol._ordered("REGISTER.layout", layout))
        rc = lib.kvs_describe(h, body, len(body))
        if rc != 0:
            raise KvsprayError(f"kvspray: describe: {self._why(rc)}")

    # -- flags

    def signal_layer(self, layer: int, step: int) -> None:
        """Layer ``layer`` of ``step`` is complete in memory (CPU engines; GPUs store the flag
        themselves)."""
        self._signal_layer(self._h, layer, step)

    def signal_step(self, step: int) -> None:
        """Every layer of ``step`` is complete, also those without hooks."""
        self._signal_step(self._h, step)

    # -- source leases

    def intent(
        self,
        xfer: bytes,
        hash: bytes,
        tokens: int,
        blocks: Blocks,
        *,
        fanout: int = 1,
        ready: int = 0,
        priority: int = 1,
        req: str = "",
        attempt: int = 0,
        deadline_s: float | None = None,
        held: bool = False,
        traceparent: str = "",
    ) -> int:
        """These blocks hold, or will hold, this prompt's KV. ``ready``: tokens complete without any
        flag.

        ``traceparent``: of the request's span (W3C); a sidecar that exports spans continues its
        trace. A malformed one is ignored.

        Returns the lease, or 0 if no sidecar can take it now, for the reason in ``refusal``: free
        the blocks as usual.
        """
        if tokens < 1 or not 0 <= ready <= tokens:
            raise ValueError(
                f"kvspray: intent: tokens = {tokens}, ready = {ready}; want 1 <= tokens and 0 <= "
                "ready <= tokens"
            )
        if not 1 <= fanout <= _messages.MAX_FANOUT:
            raise ValueError(f"kvspray: intent: fanout = {fanout}, want 1..{_messages.MAX_FANOUT}")
        deadline = _ms(deadline_s, self._deadline_ms or self._deadlines()[0])
        source = Source(
            _bin("xfer", xfer, 16), _bin("hash", hash, 32), tokens, fanout,
            [protocol.pack_blocks(b) for b in blocks], ready, priority, deadline, held, _req(req),
            attempt, _traceparent(traceparent),
        )  # fmt: skip
        h = self._handle()
        body = source.body()
        with self._lock:  # a step() of another thread must find the lease
            lease = (
                _lib.E_CLOSED
                if h is None
                else int(lib.kvs_submit(h, _lib.REC_INTENT, body, len(body), deadline))
            )
            if lease > 0:
                self._sources[lease] = source
        return max(0, self._opened("intent", lease, body))

    def step(self, step: int, reqs: Iterable[tuple[int, int, Blocks | None]]) -> bool:
        """Before the forward pass of ``step``: each lease holds tokens [0, end) once that step's
        flags arrive.

        ``blocks`` is the whole table per group as of this step, None when it is unchanged. Leases
        that have completed are left out. True: the sidecar has it, or gets it after a reconnection.
        """
        h = self._handle()
        if h is None:
            return False
        with self._lock:
            done = self._step_end.value
            entries: list[dict[str, Any]] = []
            changed: list[tuple[int, bytes]] = []
            for lease, end, blocks in reqs:
                source = self._sources.get(lease)
                if source is None:
                    continue
                end = min(int(end), source.tokens)
                entry: dict[str, Any] = {"lease": lease, "end": end}
                if blocks is not None:
                    entry["blocks"] = table = [protocol.pack_blocks(b) for b in blocks]
                    source.set_table(table)
                entry["attempt"] = source.attempt
                source.pending.append((step, end))
                source.settle(done)
                entries.append(entry)
                changed.append((lease, source.body()))
            return self._write_step(h, step, entries, changed)

    def _write_step(
        self,
        h: ctypes.c_void_p,
        step: int,
        entries: list[dict[str, Any]],
        changed: list[tuple[int, bytes]],
    ) -> bool:
        if not entries:
            return True
        body = protocol.pack(_messages.step(step=step, reqs=entries))
        array = (_lib.CSnapshot * len(changed))(
            *[_lib.CSnapshot(lease, snap, len(snap)) for lease, snap in changed]
        )
        rc = _lib.E_TOO_BIG
        if len(entries) <= _messages.MAX_STEP_REQS:
            rc = lib.kvs_step(h, body, len(body), array, len(changed))
        if rc == _lib.E_TOO_BIG and len(entries) > 1:
            # Several STEP records may carry one step number.
            half = len(entries) // 2
            first = self._write_step(h, step, entries[:half], changed[:half])
            return self._write_step(h, step, entries[half:], changed[half:]) and first
        return rc in (0, _lib.KEPT)

    def preempt(self, lease: int) -> bool:
        """The engine takes the blocks of this lease back; call before they can be written again.

        The lease stays open: the next step() gives it new blocks. False: it is already complete.
        """
        return self._restate(lease, Source.lose, lib.kvs_preempt)

    def hold(self, lease: int) -> bool:
        """The request is finished; its blocks stay only for the transfer. False: the lease is
        already complete."""
        return self._restate(lease, Source.hold, lib.kvs_hold)

    def yield_hold(self, lease: int) -> bool:
        """The engine needs the blocks of a lease that it holds: no receiver binds any more, and
        bound ones finish.

        False: the lease is not held, or already complete.
        """
        h = self._handle()
        return h is not None and lib.kvs_yield(h, lease) in (0, _lib.KEPT)

    def _restate(self, lease: int, change: Callable[[Source], None], call: Any) -> bool:
        h = self._handle()
        if h is None:
            return False
        with self._lock:
            source = self._sources.get(lease)
            if source is None:
                return False
            source.settle(self._step_end.value)
            change(source)
            body = source.body()
            return call(h, byref(_lib.CSnapshot(lease, body, len(body)))) in (0, _lib.KEPT)

    # -- destination leases

    def expect(
        self,
        xfer: bytes,
        hash: bytes,
        peer: str,
        tokens: int,
        skip: int | Sequence[int],
        blocks: Blocks,
        *,
        priority: int = 0,
        req: str = "",
        deadline_s: float | None = None,
        match_timeout_s: float | None = None,
        after: int = 0,
        traceparent: str = "",
        stall_s: float = 0.0,
    ) -> int:
        """Requests this prompt's KV from ``peer`` for these blocks; the first ``skip`` tokens (of
        all groups, or per group) are present.

        ``traceparent``: as in intent().

        ``stall_s``: longest wait without a byte or a sign of life of the other side; 0: until the
        deadline.

        ``after``: a number that ``GpuSignals.mark`` has returned; no block is written before the
        engine's stream has passed it.

        ``blocks`` cover tokens from 0. Returns the lease, or 0 if no sidecar can take it now, for
        the reason in ``refusal``: prefill locally.
        """
        table = [protocol.pack_blocks(b) for b in blocks]
        skips = [skip] * len(table) if isinstance(skip, int) else list(skip)
        if tokens < 1 or len(skips) != len(table) or any(not 0 <= s <= tokens for s in skips):
            raise ValueError(
                f"kvspray: expect: tokens = {tokens}, skip = {skips} for {len(table)} groups; want "
                "1 <= tokens and one 0 <= skip <= tokens per group"
            )
        deadline_ms, match_timeout_ms = self._deadlines()
        deadline = _ms(deadline_s, self._deadline_ms or deadline_ms)
        body = protocol.pack(
            _messages.expect(
                xfer=_bin("xfer", xfer, 16),
                hash=_bin("hash", hash, 32),
                peer=peer,
                tokens=tokens,
                skip=skips,
                blocks=table,
                priority=priority,
                deadline_ms=deadline,
                match_timeout_ms=min(deadline, _ms(match_timeout_s, match_timeout_ms)),
                req=_req(req),
                stream_mark=_after(after),
                traceparent=_traceparent(traceparent),
                stall_ms=_ms(stall_s or None, 0),
            )
        )
        return max(0, self._submit("expect", _lib.REC_EXPECT, body, deadline))

    # -- copies

    def copy(
        self,
        src: Region,
        dst: Region,
        blocks: bytes | Iterable[tuple[int, int, int]],
        *,
        req: str = "",
        deadline_s: float | None = None,
        after: int = 0,
    ) -> int:
        """Makes the sidecar copy blocks of one registered region to another, or within one: (source
        offset, destination offset, length).

        Large copies between host memory and a GPU use the PCIe links of every GPU that the sidecar
        serves. The sidecar owns these blocks until the lease completes through poll(): with OK all
        bytes have arrived, else any part of them. A copy may not write a byte that it also reads or
        writes elsewhere; the caller orders overlapping copies. Returns the lease. LATER: as many
        are open as the sidecar takes (WELCOME), or the ring is full. 0: copy without the sidecar,
        for the reason in ``refusal``. One that this process may not kill gets no copy: if it hung,
        the wait for the end would have no end.
        """
        numbers = [self._number("copy: src", src), self._number("copy: dst", dst)]
        deadline = _ms(deadline_s, self._deadline_ms or self._deadlines()[0])
        body = protocol.pack(
            _messages.copy(
                src=numbers[0],
                dst=numbers[1],
                blocks=protocol.pack_copies(blocks),
                deadline_ms=deadline,
                req=_req(req),
                stream_mark=_after(after),
            )
        )
        return self._submit("copy", _lib.REC_COPY, body, deadline)

    def load(
        self,
        parts: Sequence[LoadPart],
        pages: bytes | Iterable[tuple[int, int]],
        flag: int,
        value: int,
        *,
        arrived: int = 0,
        req: str = "",
        deadline_s: float | None = None,
        after: int = 0,
    ) -> int:
        """Makes the sidecar copy the same pages, (source page, destination page) each, of several
        tensors, in their order.

        Once the first n parts have arrived the sidecar raises load flag ``flag`` to ``value + n``,
        unless the flag is below ``value``: let a load begin (``after``) when the one before has
        ended. The sidecar owns the destination's pages until the lease completes through poll().
        The parts that the flag covers then have arrived; with OK all have. ``arrived``: the address
        of a u64, valid until this load and all before it have ended. If the lease ends before all
        parts are there, a thread of the library writes the number of those that are to it, and then
        raises the flag to ``value + len(parts)``: what waits for the flag copies the others.
        Returns what copy() returns.
        """
        rows = [
            (
                p.src_base,
                p.src_stride,
                p.dst_base,
                p.dst_stride,
                p.length,
                self._number("load: src", p.src),
                self._number("load: dst", p.dst),
            )
            for p in parts
        ]
        if not (0 <= flag < 1 << 32 and 0 <= value < 1 << 62):
            raise ValueError(
                f"kvspray: load: flag {flag}, value {value}: want a flag below 2^32 and a value "
                "below 2^62"
            )
        listed = protocol.pack_pages(pages)
        if len(rows) * len(listed) > 8 * _messages.MAX_LOAD_BLOCKS:
            raise ValueError(
                f"kvspray: a load of {len(listed) // 8} pages of {len(rows)} parts, at most "
                f"{_messages.MAX_LOAD_BLOCKS} in all: split it"
            )
        deadline = _ms(deadline_s, self._deadline_ms or self._deadlines()[0])
        body = protocol.pack(
            _messages.load(
                parts=protocol.pack_parts(rows),
                pages=listed,
                flag=flag,
                value=value,
                deadline_ms=deadline,
                req=_req(req),
                stream_mark=_after(after),
            )
        )
        if not arrived:
            return self._submit("load", _lib.REC_LOAD, body, deadline)
        h = self._handle()
        landing = _lib.CLanding(flag, value, len(rows), arrived)
        lease = (
            _lib.E_CLOSED
            if h is None
            else int(lib.kvs_submit_load(h, body, len(body), deadline, byref(landing)))
        )
        return self._opened("load", lease, body)

    def _submit(self, what: str, kind: int, body: bytes, deadline_ms: int) -> int:
        h = self._handle()
        return self._opened(
            what,
            _lib.E_CLOSED
            if h is None
            else int(lib.kvs_submit(h, kind, body, len(body), deadline_ms)),
            body,
        )

    def _opened(self, what: str, lease: int, body: bytes) -> int:
        if lease > 0:
            return lease
        self.refusal = self._why(lease)
        if lease in (_lib.E_ARG, _lib.E_TOO_BIG):
            raise ValueError(f"kvspray: {what}: {self.refusal} ({len(body)} bytes)")
        return LATER if lease in (_lib.E_FULL, _lib.E_LIMIT) else 0

    # -- both

    def cancel(self, lease: int, reason: str = "") -> bool:
        """Releases a lease. It still completes through poll(); only then may the engine use
        destination blocks."""
        h = self._handle()
        return h is not None and lib.kvs_cancel(h, lease, reason.encode()[:1024]) in (0, _lib.KEPT)

    def poll(self) -> list[Completion]:
        """Leases that have ended, each exactly once. Never blocks, never raises because of the
        sidecar."""
        h = self._handle()
        if h is None:
            return []
        out: list[Completion] = []
        with self._lock:
            while True:
                n = int(lib.kvs_poll(h, self._poll_buf, len(self._poll_buf)))
                if n == _lib.E_BUFFER and len(self._poll_buf) < 32 << 20:
                    self._poll_buf = ctypes.create_string_buffer(2 * len(self._poll_buf))
                    continue
                if n <= 0:
                    return out
                data = ctypes.string_at(self._poll_buf, n)
                at = 0
                while at + _RECORD.size <= n:
                    length, kind, status, _, lease, _, body_bytes, _ = _RECORD.unpack_from(data, at)
                    start = at + _RECORD.size
                    out.append(_completion(lease, kind, status, data[start : start + body_bytes]))
                    self._sources.pop(lease, None)
                    at += length

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits without the interpreter lock until poll() would return something. False: the
        time-out has passed."""
        h = self._handle()
        if h is None:
            return False
        return bool(lib.kvs_wait(h, _timeout(timeout_s)) == 1)

    # -- load flags

    def load_value(self, flag: int) -> int:
        """The value of a load flag. 0: there is no such flag, or the client is closed."""
        h = self._handle()
        return 0 if h is None else int(lib.kvs_load_value(h, flag))

    def _deadlines(self) -> tuple[int, int]:
        """Deadline and match timeout in milliseconds: the sidecar's, or the defaults."""
        h = self._handle()
        both = 0 if h is None else int(fast.kvs_deadlines(h))
        return both >> 32 or 30_000, both & 0xFFFFFFFF or 10_000

    def _why(self, rc: int) -> str:
        text = _lib.strerror(rc)
        # Of the others the latest error is not the cause.
        detail = (
            _text(self._info().error)
            if rc in (_lib.E_ARG, _lib.E_LIMIT, _lib.E_NOT_CONNECTED)
            else ""
        )
        return f"{text}: {detail}" if detail else text


def _traceparent(text: str) -> str:
    """A long one is malformed. It is left out: a trace is no reason to refuse a request."""
    return text if len(text) <= MAX_TRACEPARENT and text.isascii() else ""


def _after(mark: int) -> int:
    if not 0 <= mark < 1 << 64:
        raise ValueError(
            f"kvspray: after = {mark}, want a number that GpuSignals.mark has returned, or 0"
        )
    return mark


def _int(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _completion(lease: int, kind: int, status: int, body: bytes) -> Completion:
    # The body comes from another process: an error in it must not hide the completion from the
    # engine.
    try:
        m = protocol.decode(body) if body else {}
    except ValueError as e:
        m = {"reason": str(e)}
    ranges: list[tuple[int, int]] = []
    recompute = m.get("recompute")
    for r in recompute if isinstance(recompute, list) else ():
        if (
            isinstance(r, list)
            and len(r) == 2
            and all(isinstance(x, int) and x >= 0 for x in r)
            and r[0] < r[1]
        ):
            ranges.append((r[0], r[1]))
        else:
            ranges.clear()  # one bad range: recompute everything
            break
    return Completion(
        lease=lease,
        received=kind == _lib.REC_RECEIVED,
        status=CompletionStatus(status) if 0 <= status <= 5 else CompletionStatus.FAILED,
        bytes=_int(m.get("bytes")),
        us=_int(m.get("took_us")),
        transport=str(m.get("transport", "")),
        reason=str(m.get("reason", "")),
        grants=_int(m.get("grants")),
        recompute=tuple(ranges),
        pages=m["pages"] if isinstance(m.get("pages"), bytes) else b"",
        entries=m["entries"] if isinstance(m.get("entries"), bytes) else b"",
    )
