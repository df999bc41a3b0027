# SPDX-License-Identifier: Apache-2.0
"""WorkerClient and SchedulerClient: the Python face of libkvspray.

Threads: a client may be used from any thread; its own lock covers the snapshots that it keeps per source lease. Everything
that waits does so in C without the interpreter lock. So does the one thread here, which is there where a client has a ``log``: it hands
over what the C thread has to say, when it says it. An engine without requests calls nothing, and should hear of a sidecar that is gone.

Calls that hand over work never raise because of the sidecar: they return 0 or False, and the engine serves as if alone.
They raise ValueError for arguments that can never be right.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import json
import logging
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _lib, protocol
from ._lib import byref, fast, lib
from .region import KvsprayError, Region

Blocks = Sequence["bytes | Sequence[int]"]
LogFunc = Callable[[int, str], None]

_RECORD = struct.Struct("<IHHQQQII")
_POLL_BYTES = 256 << 10
_LOG_LINE_BYTES = 1024
_LOG_END_S = 5.0  # how long a logger may keep close() waiting

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True)
class EngineInfo:
    """Who speaks: ``name`` "vllm", its version, and an id that tells two engines of one host apart."""

    name: str
    version: str = ""
    id: str = ""


@dataclass(frozen=True)
class Ranks:
    """[rank, size] of every parallel dimension."""

    dp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    tp: tuple[int, int] = (0, 1)
    pcp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)

    def flat(self) -> list[int]:
        out: list[int] = []
        for rank, size in (self.dp, self.pp, self.tp, self.pcp, self.dcp):
            if not 0 <= rank < size:
                raise ValueError(f"kvspray: ranks {self}: rank {rank} of {size}, want 0 <= rank < size")
            out += [rank, size]
        return out


class CompletionStatus(enum.IntEnum):
    """enum kvs_status of board.h. Every one of them means: the blocks are the engine's again."""

    OK = 0
    FAILED = 1
    CANCELLED = 2
    EXPIRED = 3
    REFUSED = 4
    LOST = 5


@dataclass(frozen=True)
class Completion:
    """The end of one lease. ``received``: it was an expect() or a copy(), else an intent()."""

    lease: int
    received: bool
    status: CompletionStatus
    bytes: int = 0
    us: int = 0
    transport: str = ""
    reason: str = ""
    grants: int = 0
    recompute: tuple[tuple[int, int], ...] = ()  # token ranges; empty where not OK: everything

    @property
    def ok(self) -> bool:
        return self.status == CompletionStatus.OK


class AdmissionState(enum.IntEnum):
    PENDING = 1
    ADMITTED = 2
    REFUSED = 3
    GONE = 4


@dataclass(frozen=True)
class Admission:
    state: AdmissionState
    tokens: int = 0
    message: str = ""

    @property
    def admitted(self) -> bool:
        return self.state == AdmissionState.ADMITTED


@dataclass(frozen=True)
class Status:
    """A snapshot of struct kvs_info."""

    connected: bool
    degraded: bool
    quarantined: int
    sidecar_pid: int
    version: tuple[int, int]
    deadline_ms: int
    match_timeout_ms: int
    grace_ms: int
    leases: int
    sidecars: int
    awaits: int
    boot: bytes
    sidecar_boot: bytes
    source_epoch: int
    node: str
    endpoint: str
    error: str
    counters: Mapping[str, int]


_COUNTERS = (
    "connects", "refusals", "submitted", "kept", "full", "completed", "synthesised", "represented", "dropped",
    "protocol_errors", "kills", "poisoned", "sidecar_exits", "packs_launched", "packs_in_graphs",
)  # fmt: skip


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _bin(name: str, value: bytes, size: int) -> bytes:
    if not isinstance(value, (bytes, bytearray)) or len(value) != size:
        got = f"{len(value)} bytes" if isinstance(value, (bytes, bytearray)) else type(value).__name__
        raise ValueError(f"kvspray: {name}: want {size} bytes, got {got}")
    return bytes(value)


def _ms(seconds: float | None, default: int) -> int:
    if seconds is None:
        return default
    if seconds <= 0:
        raise ValueError(f"kvspray: a deadline of {seconds} s, want more than 0")
    return max(1, min(int(seconds * 1000), 0xFFFFFFFF))


def _timeout(seconds: float | None) -> int:
    return -1 if seconds is None else max(0, min(int(seconds * 1000 + 0.999), 0x7FFFFFFF))


def identity(
    *,
    model_config: str,
    weights: str,
    layers: int,
    head_size: int,
    groups: str,
    rope: str,
    backoff: int,
    speculative: str,
    packing: str | None = None,
    **more: str,
) -> dict[str, str]:
    """A layout's ``identity``: what must be equal between prefill and decode and no page shows. All of it is of the whole model.

    A sidecar refuses a layout that leaves out one of these, since two engines that both did would be taken for alike; what a model has nothing of is
    "". ``groups``: kinds of cache groups. ``backoff``: tokens of a prompt that prefill leaves to decode. ``packing``: needed where a page's inside is not
    known. An engine may say more: each pair counts.
    """
    said = {
        "model_config": model_config, "weights": weights, "layers": str(layers), "head_size": str(head_size), "groups": groups, "rope": rope,
        "backoff": str(backoff), "speculative": speculative,
    }  # fmt: skip
    if packing is not None:
        said["packing"] = packing
    return {**said, **more}


class _Client:
    """What both roles share: the handle, its status, its log, its end."""

    def __init__(self, config: _lib.CConfig, log: LogFunc | logging.Logger | None) -> None:
        handle = ctypes.c_void_p()
        rc = lib.kvs_open(byref(config), byref(handle))
        if rc != 0:
            errno = ctypes.get_errno()
            detail = f": {os.strerror(errno)}" if rc == _lib.E_SYS else ""
            raise KvsprayError(
                f"kvspray: open: {_lib.strerror(rc)}{detail}; layers must be in 1..1024 and ring sizes powers of two in "
                "64 KiB..16 MiB"
            )
        self._h = handle
        out = log.log if isinstance(log, logging.Logger) else log
        # Joins the C thread before the interpreter is torn down; a client that was garbage-collected goes the same way.
        end = _Speaker(handle, out).close if out is not None else functools.partial(lib.kvs_close, handle)
        self._finalizer = weakref.finalize(self, end)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def _handle(self) -> ctypes.c_void_p | None:
        return self._h if self._finalizer.alive else None

    def close(self) -> None:
        """Says goodbye and joins the background thread. Idempotent. No call may be under way in another thread."""
        self._finalizer()
        self._h = ctypes.c_void_p()  # signals look at nothing else

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """True while there is a registered session: only then does new work reach the sidecar."""
        h = self._handle()
        return h is not None and lib.kvs_connected(h) == 1

    def wait_connected(self, timeout: float | None = None) -> bool:
        h = self._handle()
        return h is not None and lib.kvs_wait_connected(h, _timeout(timeout)) == 1

    def status(self) -> Status:
        info = self._info()
        return Status(
            connected=bool(info.connected),
            degraded=bool(info.degraded),
            quarantined=info.quarantined,
            sidecar_pid=info.sidecar_pid,
            version=(info.version >> 16, info.version & 0xFFFF),
            deadline_ms=info.deadline_ms,
            match_timeout_ms=info.match_timeout_ms,
            grace_ms=info.grace_ms,
            leases=info.leases,
            sidecars=info.sidecars,
            awaits=info.awaits,
            boot=bytes(info.boot),
            sidecar_boot=bytes(info.sidecar_boot),
            source_epoch=info.source_epoch,
            node=_text(info.node),
            endpoint=_text(info.endpoint),
            error=_text(info.error),
            counters={name: getattr(info, name) for name in _COUNTERS},
        )

    def sidecar_stats(self) -> dict[str, Any]:
        """The latest STATS of the sidecar: cumulative ``transfers`` by outcome, ``bytes`` by transport. Empty: none yet."""
        h = self._handle()
        if h is None:
            return {}
        buf = ctypes.create_string_buffer(64 << 10)
        n = lib.kvs_stats(h, buf, len(buf))
        if n <= 0:
            return {}
        try:
            return protocol.decode(buf.raw[:n])
        except ValueError:
            return {}

    def _info(self) -> _lib.CInfo:
        info = _lib.CInfo(size=ctypes.sizeof(_lib.CInfo))
        h = self._handle()
        if h is not None:
            lib.kvs_status_read(h, byref(info))
        return info


class _Speaker:
    """Hands the lines of a client's log to the engine's, and ends the client's handle when there are no more. Knows no client: one that
    nobody refers to any more is closed."""

    def __init__(self, handle: ctypes.c_void_p, out: LogFunc) -> None:
        self._h = handle
        self._out = out
        self._lock = threading.Lock()  # guards the two below
        self._late = False  # close() has gone: the thread ends the handle
        self._done = False
        self._thread = threading.Thread(target=self._run, name="kvspray-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        buf = ctypes.create_string_buffer(_LOG_LINE_BYTES)
        while lib.kvs_wait_log(self._h, buf, len(buf)) == 1:
            level, _, message = _text(buf.value).partition(" ")
            try:
                self._out(_LEVELS.get(level, logging.INFO), f"kvspray: {message}")
            except Exception:  # a logger that fails must not fail the engine
                continue
        with self._lock:
            self._done = True
            late = self._late
        if late:
            lib.kvs_close(self._h)

    def close(self) -> None:
        lib.kvs_end_log(self._h)
        # The logger may wait for whoever closes us, who may hold its lock; and a client may be collected in this very thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_LOG_END_S)
        with self._lock:
            # In a forked child there is no such thread, and nothing that it could still do.
            self._late = not self._done and self._thread.is_alive()
            late = self._late
        if not late:
            lib.kvs_close(self._h)


def _config(role: int, socket_path: str | os.PathLike[str] | None, engine: EngineInfo, ranks: Ranks) -> _lib.CConfig:
    return _lib.CConfig(
        size=ctypes.sizeof(_lib.CConfig),
        role=role,
        socket_path=None if socket_path is None else os.fsencode(socket_path),
        engine_name=engine.name.encode(),
        engine_version=engine.version.encode(),
        engine_id=engine.id.encode(),
        ranks=(ctypes.c_uint32 * 10)(*ranks.flat()),
    )


class _Source:
    """What presents one source lease afresh: always a complete INTENT body.

    The body is kept in three packed parts, because a step changes only the middle one.
    """

    __slots__ = ("key", "tokens", "fanout", "groups", "prio", "deadline_ms", "held", "req", "attempt", "ready", "pending", "_head", "_tail")

    def __init__(
        self, xfer: bytes, hash: bytes, tokens: int, fanout: int, table: list[bytes], ready: int, prio: int, deadline_ms: int, held: bool,
        req: str, attempt: int,
    ) -> None:  # fmt: skip
        self.key = {"xfer": xfer, "hash": hash, "tokens": tokens, "fanout": fanout}
        self.tokens = tokens
        self.prio = prio
        self.deadline_ms = deadline_ms
        self.held = held
        self.req = req
        self.attempt = attempt
        self.ready = ready
        self.pending: list[tuple[int, int]] = []  # (step, end), oldest first
        self.set_table(table)
        self.set_tail()

    def set_table(self, table: list[bytes]) -> None:
        self.groups = len(table)
        self._head = protocol.pack({**self.key, "blocks": table})[1:]

    def set_tail(self) -> None:
        tail = {"prio": self.prio, "deadline_ms": self.deadline_ms, "held": self.held, "req": self.req, "attempt": self.attempt}
        self._tail = protocol.pack(tail)[1:]

    def settle(self, done: int) -> None:
        """Steps whose end has been signalled become ``ready``; of too many pending ones the oldest give way (tokens are only
        reported later, never earlier)."""
        pending = self.pending
        while pending and pending[0][0] <= done:
            self.ready = max(self.ready, pending.pop(0)[1])
        del pending[: -protocol.MAX_PENDING_STEPS]

    def lose(self) -> None:
        """The blocks are somebody else's now."""
        self.pending.clear()
        self.ready = 0
        self.attempt += 1
        self.set_table([b""] * self.groups)
        self.set_tail()

    def hold(self) -> None:
        self.held = True
        self.set_tail()

    def body(self) -> bytes:
        # 0x8c: a map of the twelve keys of INTENT; each part was packed as a map of its own and has lost its first byte.
        return b"\x8c" + self._head + protocol.pack({"ready": self.ready, "steps": self.pending})[1:] + self._tail


class WorkerClient(_Client):
    """One engine rank's session: its regions and layout, its flags, its leases."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        engine: EngineInfo,
        ranks: Ranks = Ranks(),
        layers: int,
        deadline_s: float | None = None,
        log: LogFunc | logging.Logger | None = None,
        submission_bytes: int = 0,
        completion_bytes: int = 0,
    ) -> None:
        config = _config(1, socket_path, engine, ranks)
        config.layers = layers
        config.submission_bytes = submission_bytes
        config.completion_bytes = completion_bytes
        config.deadline_ms = 0 if deadline_s is None else _ms(deadline_s, 0)
        super().__init__(config, log)
        self.layers = layers
        self._deadline_ms = config.deadline_ms
        self._lock = threading.Lock()
        self._sources: dict[int, _Source] = {}
        self._regions: list[Region] = []
        self._poll_buf = ctypes.create_string_buffer(_POLL_BYTES)
        nbytes = ctypes.c_uint64()
        base = lib.kvs_flags(self._h, byref(nbytes))
        self._flags_addr, self._flags_bytes = int(base), int(nbytes.value)
        # The header's layer_flags offset; the last flag is the end of the step.
        offset = ctypes.c_uint64.from_address(self._flags_addr + 32).value
        self._step_end = ctypes.c_uint64.from_address(self._flags_addr + offset + 64 * layers)
        self._signal_layer = fast.kvs_signal_layer
        self._signal_step = fast.kvs_signal_step

    # -- memory ------------------------------------------------------------------------------------------------------

    def alloc_region(self, nbytes: int) -> Region:
        """New memory in a sealed memfd: the best kind. Allocate the cache in it where the engine allows that."""
        return Region.alloc(nbytes)

    def adopt_region(self, ptr: int, nbytes: int, *, allow_small: bool = False) -> Region:
        """Moves an existing page-aligned anonymous mapping (64 MiB or more, or ``allow_small``) into a memfd, in place."""
        return Region.adopt(ptr, nbytes, allow_small=allow_small)

    def process_region(self, ptr: int, nbytes: int) -> Region:
        """Any memory of this process, through /proc/self/mem."""
        return Region.process(ptr, nbytes)

    def gpu_region(self, ptr: int, nbytes: int) -> Region:
        """Memory of a GPU (``tensor.data_ptr()``), which the sidecar imports."""
        return Region.gpu(ptr, nbytes)

    @property
    def flags(self) -> tuple[int, int]:
        """(address, bytes) of the flags memory, to be registered with a GPU as host-mapped memory."""
        return self._flags_addr, self._flags_bytes

    def register(self, regions: Sequence[Region], layout: Mapping[str, Any]) -> None:
        """Starts the background connection; once. It need not find a sidecar: it keeps looking.

        ``layout`` is the map of docs/protocol.md section 3, with a dtype and what ``kvspray.identity`` asks for, without which a sidecar refuses it (its word
        is in ``status().error``). The regions must outlive the client.
        """
        h = self._handle()
        if h is None:
            raise KvsprayError("kvspray: register: the client is closed")
        body = protocol.pack(protocol._ordered("REGISTER.layout", layout))
        array = (_lib.CRegion * len(regions))(*[r._c for r in regions])
        rc = lib.kvs_start(h, array, len(regions), body, len(body))
        if rc != 0:
            raise KvsprayError(f"kvspray: register: {self._why(rc)}")
        self._regions = list(regions)

    def describe(self, layout: Mapping[str, Any]) -> None:
        """The registered memory means something else from now on, say because the engine has other weights.

        Open source leases are given back, loads under way fail, and a new session presents this layout.
        """
        h = self._handle()
        if h is None:
            return
        body = protocol.pack(protocol._ordered("REGISTER.layout", layout))
        rc = lib.kvs_describe(h, body, len(body))
        if rc != 0:
            raise KvsprayError(f"kvspray: describe: {self._why(rc)}")

    # -- flags -------------------------------------------------------------------------------------------------------

    def signal_layer(self, layer: int, step: int) -> None:
        """Layer ``layer`` of ``step`` is complete in memory (CPU engines; GPUs store the flag themselves)."""
        self._signal_layer(self._h, layer, step)

    def signal_step(self, step: int) -> None:
        """Every layer of ``step`` is complete, also those without hooks."""
        self._signal_step(self._h, step)

    def bump_source_epoch(self) -> int:
        """Disowns what is being read from source blocks right now. preempt() and cancel() do it by themselves."""
        return int(fast.kvs_bump_source_epoch(self._h)) if not self.closed else 0

    # -- source leases -----------------------------------------------------------------------------------------------

    def intent(
        self,
        xfer: bytes,
        hash: bytes,
        tokens: int,
        blocks: Blocks,
        *,
        fanout: int = 1,
        ready: int = 0,
        prio: int = 1,
        req: str = "",
        attempt: int = 0,
        deadline_s: float | None = None,
        held: bool = False,
    ) -> int:
        """These blocks hold, or will hold, this prompt's KV. ``ready``: tokens complete without any flag.

        Returns the lease, or 0 when no sidecar can take it now (not connected, ring full): free the blocks as usual.
        """
        if tokens < 1 or not 0 <= ready <= tokens:
            raise ValueError(f"kvspray: intent: tokens = {tokens}, ready = {ready}; want 1 <= tokens and 0 <= ready <= tokens")
        if not 1 <= fanout <= protocol.MAX_FANOUT:
            raise ValueError(f"kvspray: intent: fanout = {fanout}, want 1..{protocol.MAX_FANOUT}")
        deadline = _ms(deadline_s, self._deadline_ms or self._deadlines()[0])
        source = _Source(
            _bin("xfer", xfer, 16), _bin("hash", hash, 32), tokens, fanout, [protocol.pack_blocks(b) for b in blocks], ready, prio,
            deadline, held, _req(req), attempt,
        )  # fmt: skip
        h = self._handle()
        if h is None:
            return 0
        body = source.body()
        with self._lock:  # so that a step() of another thread finds the lease
            lease = int(lib.kvs_submit(h, _lib.REC_INTENT, body, len(body), deadline))
            if lease > 0:
                self._sources[lease] = source
        if lease in (_lib.E_ARG, _lib.E_TOO_BIG):
            raise ValueError(f"kvspray: intent: {self._why(lease)} ({len(body)} bytes, {tokens} tokens)")
        return max(0, lease)

    def step(self, step: int, reqs: Iterable[tuple[int, int, Blocks | None]]) -> bool:
        """Before the forward pass of ``step``: each lease holds tokens [0, end) once that step's flags arrive.

        ``blocks`` is the whole table per group as of this step, None when it is unchanged. Leases that have completed
        meanwhile are left out. True: the sidecar has it, or will be told after a reconnection.
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

    def _write_step(self, h: ctypes.c_void_p, step: int, entries: list[dict[str, Any]], changed: list[tuple[int, bytes]]) -> bool:
        if not entries:
            return True
        body = protocol.pack({"step": step, "reqs": entries})
        array = (_lib.CSnapshot * len(changed))(*[_lib.CSnapshot(lease, snap, len(snap)) for lease, snap in changed])
        rc = _lib.E_TOO_BIG
        if len(entries) <= protocol.MAX_STEP_REQS:
            rc = lib.kvs_step(h, body, len(body), array, len(changed))
        if rc == _lib.E_TOO_BIG and len(entries) > 1:
            # Several STEP records may carry one step number.
            half = len(entries) // 2
            first = self._write_step(h, step, entries[:half], changed[:half])
            return self._write_step(h, step, entries[half:], changed[half:]) and first
        return rc in (0, _lib.KEPT)

    def preempt(self, lease: int) -> bool:
        """The engine takes the blocks of this lease back, without asking; call before they can be written again.

        The lease stays open: the next step() gives it new blocks. False: it is complete already.
        """
        return self._restate(lease, _Source.lose, lib.kvs_preempt)

    def hold(self, lease: int) -> bool:
        """The request is finished; its blocks stay only for the transfer. False: the lease is complete already."""
        return self._restate(lease, _Source.hold, lib.kvs_hold)

    def _restate(self, lease: int, change: Callable[[_Source], None], call: Any) -> bool:
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

    # -- destination leases ------------------------------------------------------------------------------------------

    def expect(
        self,
        xfer: bytes,
        hash: bytes,
        peer: str,
        tokens: int,
        skip: int | Sequence[int],
        blocks: Blocks,
        *,
        prio: int = 0,
        req: str = "",
        deadline_s: float | None = None,
        match_timeout_s: float | None = None,
        after: int = 0,
    ) -> int:
        """These blocks want this prompt's KV from ``peer``; ``skip`` tokens (of all groups, or per group) are there already.

        ``after``: a number that ``GpuSignals.mark`` has returned; no block is written before the engine's stream has got there.

        ``blocks`` cover tokens from 0. Returns the lease, or 0 when no sidecar can take it now: compute locally.
        """
        table = [protocol.pack_blocks(b) for b in blocks]
        skips = [skip] * len(table) if isinstance(skip, int) else list(skip)
        if tokens < 1 or len(skips) != len(table) or any(not 0 <= s <= tokens for s in skips):
            raise ValueError(
                f"kvspray: expect: tokens = {tokens}, skip = {skips} for {len(table)} groups; want 1 <= tokens and one "
                "0 <= skip <= tokens per group"
            )
        deadline_ms, match_timeout_ms = self._deadlines()
        deadline = _ms(deadline_s, self._deadline_ms or deadline_ms)
        body = protocol.pack(
            {
                "xfer": _bin("xfer", xfer, 16),
                "hash": _bin("hash", hash, 32),
                "peer": peer,
                "tokens": tokens,
                "skip": skips,
                "blocks": table,
                "prio": prio,
                "deadline_ms": deadline,
                "partner_ms": min(deadline, _ms(match_timeout_s, match_timeout_ms)),
                "req": _req(req),
                **_after(after),
            }
        )
        h = self._handle()
        if h is None:
            return 0
        lease = int(lib.kvs_submit(h, _lib.REC_EXPECT, body, len(body), deadline))
        if lease in (_lib.E_ARG, _lib.E_TOO_BIG):
            raise ValueError(f"kvspray: expect: {self._why(lease)} ({len(body)} bytes, {tokens} tokens)")
        return max(0, lease)

    # -- copies ------------------------------------------------------------------------------------------------------

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
        """Has the sidecar copy blocks of one registered region to another, or within one: (source offset, destination offset, length).

        Large copies between host memory and a GPU use the PCIe links of every GPU that the sidecar serves. What is read and written is the
        sidecar's until the lease completes through poll(), as that of expect() does: OK, all of it arrived; else any part of it may have.
        No byte may be written that the same copy reads or writes elsewhere; what else overlaps is the caller's to order. Returns the lease, or
        0 when no sidecar can take it now, or it is too old: copy by yourself.
        """
        index = {r.id: i for i, r in enumerate(self._regions)}
        for name, region in (("src", src), ("dst", dst)):
            if region.id not in index:
                raise ValueError(f"kvspray: copy: {name} = {region!r} is not registered; pass it to register()")
        deadline = _ms(deadline_s, self._deadline_ms or self._deadlines()[0])
        body = protocol.pack(
            {
                "src": index[src.id],
                "dst": index[dst.id],
                "blocks": protocol.pack_copies(blocks),
                "deadline_ms": deadline,
                "req": _req(req),
                **_after(after),
            }
        )
        h = self._handle()
        if h is None:
            return 0
        lease = int(lib.kvs_submit(h, _lib.REC_COPY, body, len(body), deadline))
        if lease in (_lib.E_ARG, _lib.E_TOO_BIG):
            raise ValueError(f"kvspray: copy: {self._why(lease)} ({len(body)} bytes)")
        return max(0, lease)

    # -- both --------------------------------------------------------------------------------------------------------

    def cancel(self, lease: int, reason: str = "") -> bool:
        """Gives a lease back. It still completes through poll(), and only then are destination blocks the engine's."""
        h = self._handle()
        return h is not None and lib.kvs_cancel(h, lease, reason.encode()[:1024]) in (0, _lib.KEPT)

    def poll(self) -> list[Completion]:
        """Leases that have ended, each exactly once. Never blocks, never raises because of the sidecar."""
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
        """Waits without the interpreter lock until poll() would return something. False: the time has passed."""
        h = self._handle()
        if h is None:
            return False
        return bool(lib.kvs_wait(h, _timeout(timeout_s)) == 1)

    # -- load flags --------------------------------------------------------------------------------------------------

    def load_watch(self, first: int, count: int, step: int, timeout_s: float) -> int:
        """A GPU is about to wait for load flags [first, first+count) to reach ``step``; past the timeout they are poisoned."""
        h = self._handle()
        rc = _lib.E_CLOSED if h is None else int(lib.kvs_load_watch(h, first, count, step, _ms(timeout_s, 0)))
        if rc < 0:
            raise KvsprayError(f"kvspray: load_watch: {self._why(rc)}")
        return rc

    def load_done(self, watch: int) -> bool:
        """Ends a watch. True: nothing of it is poison."""
        h = self._handle()
        return h is not None and lib.kvs_load_done(h, watch) == 0

    def load_reset(self, first: int, count: int) -> None:
        h = self._handle()
        if h is not None:
            lib.kvs_load_reset(h, first, count)

    def _deadlines(self) -> tuple[int, int]:
        """What the sidecar said, or the defaults: deadline and partner, in milliseconds."""
        h = self._handle()
        both = 0 if h is None else int(fast.kvs_deadlines(h))
        return both >> 32 or 30_000, both & 0xFFFFFFFF or 10_000

    def _why(self, rc: int) -> str:
        text = _lib.strerror(rc)
        detail = _text(self._info().error) if rc == _lib.E_ARG else ""
        return f"{text}: {detail}" if detail else text


def _cut(text: str) -> bytes:
    """What a C string of 255 bytes can hold of it."""
    return text.replace("\0", "").encode("utf-8", "replace")[:255].decode("utf-8", "ignore").encode()


def _req(req: str) -> str:
    raw = req.encode("utf-8", "replace")
    return req if len(raw) <= protocol.MAX_REQ_BYTES else raw[: protocol.MAX_REQ_BYTES].decode("utf-8", "ignore")


def _after(mark: int) -> dict[str, int]:
    """Left out where there is nothing to wait for: sidecars without the feature "after" take the record then."""
    if not 0 <= mark < 1 << 64:
        raise ValueError(f"kvspray: after = {mark}, want a number that GpuSignals.mark has returned, or 0")
    return {"after": mark} if mark else {}


def _int(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _completion(lease: int, kind: int, status: int, body: bytes) -> Completion:
    # The body comes from another process: whatever is wrong with it must not take the completion away from the engine.
    try:
        m = protocol.decode(body) if body else {}
    except ValueError as e:
        m = {"reason": str(e)}
    ranges: list[tuple[int, int]] = []
    recompute = m.get("recompute")
    for r in recompute if isinstance(recompute, list) else ():
        if isinstance(r, list) and len(r) == 2 and all(isinstance(x, int) and x >= 0 for x in r) and r[0] < r[1]:
            ranges.append((r[0], r[1]))
        else:
            ranges.clear()  # one bad range: recompute everything
            break
    return Completion(
        lease=lease,
        received=kind == _lib.REC_RECEIVED,
        status=CompletionStatus(status) if 0 <= status <= 5 else CompletionStatus.FAILED,
        bytes=_int(m.get("bytes")),
        us=_int(m.get("us")),
        transport=str(m.get("transport", "")),
        reason=str(m.get("reason", "")),
        grants=_int(m.get("grants")),
        recompute=tuple(ranges),
    )


class SchedulerClient(_Client):
    """The engine core's session: whether a prefill has admitted a request. Starts to connect at once."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        engine: EngineInfo,
        ranks: Ranks = Ranks(),
        log: LogFunc | logging.Logger | None = None,
    ) -> None:
        super().__init__(_config(2, socket_path, engine, ranks), log)
        rc = lib.kvs_start(self._h, None, 0, None, 0)
        if rc != 0:
            raise KvsprayError(f"kvspray: start: {_lib.strerror(rc)}")

    @property
    def endpoint(self) -> str | None:
        """Where peers dial this node's sidecar; None while not connected."""
        info = self._info()
        return _text(info.endpoint) or None if info.connected else None

    def await_admission(self, xfer: bytes, hash: bytes, peer: str, tokens: int, ttl_s: float) -> bool:
        """Asks whether the prefill at ``peer`` has admitted this request; once per key, repeated calls change nothing.

        False: it cannot be asked (too many open questions, or closed).
        """
        h = self._handle()
        if h is None:
            return False
        args = (_bin("xfer", xfer, 16), _bin("hash", hash, 32), peer.encode(), tokens, _ms(ttl_s, 0))
        rc = _lib.E_ARG if "\0" in peer else lib.kvs_await(h, *args)
        if rc == _lib.E_ARG:
            raise ValueError(f"kvspray: await_admission: peer = {peer!r}, tokens = {tokens}; want host:port of at most 255 bytes")
        return bool(rc == 0)

    def admission(self, xfer: bytes, hash: bytes) -> Admission | None:
        """The answer so far; None when it was never asked, or is long over. Never blocks."""
        h = self._handle()
        if h is None:
            return None
        out = _lib.CAdmission()
        lib.kvs_admission(h, _bin("xfer", xfer, 16), _bin("hash", hash, 32), byref(out))
        if not 1 <= out.state <= 4:
            return None
        return Admission(AdmissionState(out.state), out.tokens, _text(out.message))

    def forget(self, xfer: bytes, hash: bytes) -> None:
        """Drops the question; its answer, if it still comes, goes nowhere."""
        h = self._handle()
        if h is not None:
            lib.kvs_await_forget(h, _bin("xfer", xfer, 16), _bin("hash", hash, 32))


    def decline(self, xfer: bytes, hash: bytes, peer: str, reason: str = "") -> bool:
        """No rank of this engine will expect that prompt's KV: the prefill's engine at ``peer`` need not keep it any longer. Drops the question, too.

        For requests of which no rank has a lease; those cancel it. Never blocks. False: it cannot be told (too many words wait, the sidecar is
        older, or closed), and the prefill finds out by its own time for a missing partner.
        """
        h = self._handle()
        if h is None:
            return False
        args = (_bin("xfer", xfer, 16), _bin("hash", hash, 32), peer.encode(), _cut(reason))
        rc = _lib.E_ARG if "\0" in peer else lib.kvs_decline(h, *args)
        if rc == _lib.E_ARG:
            raise ValueError(f"kvspray: decline: peer = {peer!r}; want host:port of at most 255 bytes")
        return bool(rc == 0)


def debug_json(status: Status) -> str:
    """A status as one line of JSON, for logs."""
    return json.dumps({k: v.hex() if isinstance(v, bytes) else v for k, v in vars(status).items()}, default=dict)
