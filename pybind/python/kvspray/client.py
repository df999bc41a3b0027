"""What the clients of both roles share: the handle of libkvspray, the values that calls return, the
log.

Threads: any thread may use a client; its lock covers the snapshots of source leases. All waits are
in C, without the interpreter lock. A client with a ``log`` has one Python thread, which passes on
the log lines of the C thread as they appear, because an idle engine makes no calls.

Calls that hand over work never raise because of the sidecar: they return 0 or False, and the engine
prefills locally. They raise ValueError for arguments that are never valid.
"""

from __future__ import annotations

import builtins
import ctypes
import enum
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _lib, _messages, limits
from ._lib import byref, lib
from .region import KvsprayError

LogFunc = Callable[[int, str], None]

_LOG_LINE_BYTES = 1024
_LOG_END_S = 5.0  # how long close() waits for a logger

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


@dataclass(frozen=True)
class EngineInfo:
    """The engine: ``name`` "vllm", its version, and an id that is unique on the host. For routers,
    the URL of its API server, its role (prefill, decode or both), and the endpoints of its KV
    events and of their replay, whose host may be "*"."""

    name: str
    version: str = ""
    id: str = ""
    api: str = ""
    role: str = ""
    events: str = ""
    replay: str = ""


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
                raise ValueError(
                    f"kvspray: ranks {self}: rank {rank} of {size}, want 0 <= rank < size"
                )
            out += [rank, size]
        return out


ONE_RANK = Ranks()


class CompletionStatus(enum.IntEnum):
    """enum kvs_status of board.h. After each of them the engine may use the blocks again."""

    OK = 0
    FAILED = 1
    CANCELLED = 2
    EXPIRED = 3
    REFUSED = 4
    LOST = 5


@dataclass(frozen=True)
class Completion:
    """The end of one lease. ``received``: it was an expect(), a copy(), or pages of the store; else
    an intent()."""

    lease: int
    received: bool
    status: CompletionStatus
    bytes: int = 0
    us: int = 0
    transport: str = ""
    reason: str = ""
    grants: int = 0
    recompute: tuple[tuple[int, int], ...] = ()  # token ranges; empty and not OK: everything
    # Of Space.get() and put(): a byte for each page (kvspray.store.PageResult).
    pages: builtins.bytes = b""
    # Of a batch that failed: a bit for each entry that has arrived
    # (kvspray.segments.Batch.statuses).
    entries: builtins.bytes = b""

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
    killable: bool
    """This process may kill the sidecar, and can prove its exit."""
    has_regions: bool
    """The sidecar has answered for all regions, those of add_regions() included. It may have
    refused some."""
    counters: Mapping[str, int]


_COUNTERS = (
    "connects", "refusals", "submitted", "kept", "full", "completed", "synthesised", "represented",
    "dropped", "protocol_errors", "kills", "sidecar_exits",
)  # fmt: skip


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _req(req: str) -> str:
    """The request's name as it is sent: ranks that get the same text send the same name."""
    raw = req.replace("\0", "").encode("utf-8", "replace")
    return raw[: _messages.MAX_REQ_BYTES].decode("utf-8", "ignore")


def _bin(name: str, value: bytes, size: int) -> bytes:
    if not isinstance(value, (bytes, bytearray)) or len(value) != size:
        got = (
            f"{len(value)} bytes" if isinstance(value, (bytes, bytearray)) else type(value).__name__
        )
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
    """A layout's ``identity``: what must be equal between prefill and decode and is not visible in
    pages. All of it describes the whole model.

    A sidecar refuses a layout without one of these, because two engines without it would count as
    equal; what a model does not have is "". ``groups``: kinds of cache groups. ``backoff``: tokens
    of a prompt that prefill leaves to decode. ``packing``: needed if a page's inside is not known.
    An engine may add more pairs, which are compared, too.
    """
    pairs = {
        "model_config": model_config, "weights": weights, "layers": str(layers),
        "head_size": str(head_size), "groups": groups, "rope": rope, "backoff": str(backoff),
        "speculative": speculative,
    }  # fmt: skip
    if packing is not None:
        pairs["packing"] = packing
    return {**pairs, **more}


class _Client:
    """The handle, its status, its log, its end."""

    def __init__(self, config: _lib.CConfig, log: LogFunc | logging.Logger | None) -> None:
        handle = ctypes.c_void_p()
        rc = lib.kvs_open(byref(config), byref(handle))
        if rc != 0:
            detail = f": {limits.explain(ctypes.get_errno())}" if rc == _lib.E_SYS else ""
            raise KvsprayError(
                f"kvspray: open: {_lib.strerror(rc)}{detail}; layers must be in 1..1024 and ring "
                "sizes powers of two in 64 KiB..16 MiB"
            )
        self._h = handle
        self._spaces: dict[Any, None] = {}  # open ones of the store, the least recently used first
        self._spaces_lock = threading.Lock()  # guards it, and what its spaces have open
        # Freed once neither this object nor its log thread uses it: a thread in a call has a
        # reference to this object.
        self._owner = _Handle(handle)
        out = log.log if isinstance(log, logging.Logger) else log
        # Joins the C thread before the interpreter ends, or when the client is garbage-collected.
        end = _LogThread(self._owner, out).end if out is not None else self._owner.end
        self._finalizer = weakref.finalize(self, end)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def _handle(self) -> ctypes.c_void_p | None:
        return self._h if self._finalizer.alive else None

    def close(self) -> None:
        """Sends BYE and joins the background thread. Idempotent. Other threads may be in a call:
        their waits return."""
        self._finalizer()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """True while there is a registered session, without which no new work reaches the
        sidecar."""
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
            killable=bool(info.killable),
            has_regions=bool(info.has_regions),
            counters={name: getattr(info, name) for name in _COUNTERS},
        )

    def _info(self) -> _lib.CInfo:
        info = _lib.CInfo(size=ctypes.sizeof(_lib.CInfo))
        h = self._handle()
        if h is not None:
            lib.kvs_status_read(h, byref(info))
        return info


class _Handle:
    """Owns the handle of libkvspray: whatever may still use it has a reference to this object."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.value = handle
        self._close = lib.kvs_close  # no module has its names left at the interpreter's end

    def end(self) -> None:
        lib.kvs_end(self.value)

    def __del__(self) -> None:
        self._close(self.value)


class _LogThread:
    """Passes the lines of a client's log to the engine's logger. It has no reference to the client,
    so that an unused client is collected and closed."""

    def __init__(self, owner: _Handle, out: LogFunc) -> None:
        self._owner = owner
        self._out = out
        self._thread = threading.Thread(target=self._run, name="kvspray-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        buf = ctypes.create_string_buffer(_LOG_LINE_BYTES)
        while lib.kvs_wait_log(self._owner.value, buf, len(buf)) == 1:
            level, _, message = _text(buf.value).partition(" ")
            try:
                self._out(_LEVELS.get(level, logging.INFO), f"kvspray: {message}")
            except Exception:  # a logger that fails must not fail the engine
                continue

    def end(self) -> None:
        lib.kvs_end_log(self._owner.value)
        # The thread that closes the client may hold the logger's lock. A client may also be
        # collected in the log thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join(_LOG_END_S)
        self._owner.end()


def _config(
    role: int, socket_path: str | os.PathLike[str] | None, engine: EngineInfo, ranks: Ranks
) -> _lib.CConfig:
    return _lib.CConfig(
        size=ctypes.sizeof(_lib.CConfig),
        role=role,
        socket_path=None if socket_path is None else os.fsencode(socket_path),
        engine_name=engine.name.encode(),
        engine_version=engine.version.encode(),
        engine_id=engine.id.encode(),
        engine_api=engine.api.encode(),
        engine_role=engine.role.encode(),
        engine_events=engine.events.encode(),
        engine_replay=engine.replay.encode(),
        release=str(sys.modules[__package__].__version__).encode(),  # an import would be a cycle
        ranks=(ctypes.c_uint32 * 10)(*ranks.flat()),
    )
