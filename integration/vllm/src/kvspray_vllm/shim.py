"""The only module that uses the clients of the Python package ``kvspray``. The rest of the
connector uses what is here."""

from __future__ import annotations

import builtins
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import kvspray
import kvspray.gpu
import kvspray.store
from kvspray.store import Namespace as Namespace
from kvspray.store import PageResult
from kvspray_vllm import layout

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

Blocks = Sequence[Sequence[int]]

# enum kvs_status of board.h
OK, FAILED, CANCELLED, EXPIRED, REFUSED, LOST = range(6)
EXIT_S = 0.05  # between two looks whether the sidecar has exited
DEFAULT_MATCH_TIMEOUT_MS = 10_000  # before a sidecar has sent its own

STATUS_NAMES = ("ok", "failed", "cancelled", "expired", "refused", "lost")

# Labels of metrics: outcomes of a page, of docs/protocol.md, and the tiers of a hit. Both have
# "unknown": whether a page is there is decided by PageResult, never by a label.
PAGE_NAMES = (
    "unknown",
    "hit",
    "miss",
    "stored",
    "existed",
    "busy",
    "full",
    "damaged",
    "canceled",
    "failed",
)
TIER_NAMES = ("unknown", "memory", "disk", "object", "peer")


def status_name(status: int) -> str:
    return STATUS_NAMES[status] if 0 <= status < len(STATUS_NAMES) else "unknown"


@dataclass(frozen=True)
class Ended:
    """A lease is over: no process touches its blocks on our behalf any more."""

    lease: int
    received: bool
    status: int
    bytes: int
    us: int
    transport: str
    reason: str
    # Of a failed load: its tokens before this one have arrived, as the sidecar verified after the
    # fence.
    lacks: int = 0
    pages: builtins.bytes = b""  # of pages of the store: a byte for each


def leading_hits(pages: bytes) -> int:
    """Pages before the first one that the block does not have."""
    return next((i for i, byte in enumerate(pages) if not PageResult.of(byte).hit), len(pages))


def page_outcome(byte: int) -> str:
    """The label of one page's outcome; of a hit, that of the tier that it came from."""
    page = PageResult.of(byte)
    if page.hit:
        return TIER_NAMES[page.tier] if page.tier < len(TIER_NAMES) else TIER_NAMES[0]
    return PAGE_NAMES[page.outcome] if page.outcome < len(PAGE_NAMES) else PAGE_NAMES[0]


@dataclass(frozen=True)
class Answer:
    """The answer of the prefill's sidecar, or of this engine's, to an await_admission."""

    state: str  # admitted, refused or gone
    why: str = ""


class WorkerShim(Protocol):
    """What the worker's side needs. No call but wait blocks; calls that submit raise ShimError
    where they cannot."""

    def intent(
        self,
        xfer: bytes,
        hash: bytes,
        tokens: int,
        blocks: Blocks,
        fanout: int,
        req: str,
        traceparent: str = "",
    ) -> int: ...
    def expect(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, skip: int, blocks: Blocks, req: str,
        after: int = 0, traceparent: str = "", stall_s: float = 0.0, priority: int = 0,
    ) -> int: ...  # fmt: skip
    def step(self, step: int, gains: Sequence[tuple[int, int, Blocks]]) -> None: ...
    def preempt(self, lease: int) -> None: ...
    def cancel(self, lease: int, reason: str) -> None: ...
    def hold(self, lease: int) -> None: ...
    def yield_hold(self, lease: int) -> None: ...
    def signal_layer(self, index: int, step: int) -> None: ...
    def signal_step(self, step: int) -> None: ...
    def poll(self) -> list[Ended]: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class GpuFlags(Protocol):
    """Flags that a GPU writes, see kvspray.gpu.GpuSignals. ``stream`` is a CUstream. Nothing
    raises."""

    @property
    def ok(self) -> bool: ...
    def step(self, step: int, stream: int) -> bool: ...
    def signal_layer(self, layer: int, stream: int) -> bool: ...
    def signal_step(self, stream: int) -> bool: ...
    def mark(self, stream: int) -> int: ...
    def close(self) -> None: ...


class SchedulerShim(Protocol):
    """What the scheduler's side needs. No call blocks; await_admission raises ShimError where it
    cannot ask. A decline that cannot be sent costs the other side no more than its match
    timeout."""

    @property
    def connected(self) -> bool: ...
    @property
    def endpoint(self) -> str | None: ...
    @property
    def match_timeout_s(self) -> float: ...
    def await_admission(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, ttl_s: float
    ) -> None: ...
    def admission(self, xfer: bytes, hash: bytes) -> Answer | None: ...
    def expected(self, xfer: bytes, hash: bytes) -> None: ...
    def decline(
        self, xfer: bytes, hash: bytes, peer: str, reason: str, asked: bool = True, req: str = "",
        ranks: Sequence[int] = (),
    ) -> None: ...  # fmt: skip
    def pages(self, namespaces: Sequence[Namespace]) -> SchedulerPages: ...
    def close(self) -> None: ...


class WorkerPages(Protocol):
    """The pages of a worker's blocks in the store of its node. get and put raise ShimError where
    they cannot; none waits."""

    @property
    def error(self) -> str: ...
    def ready(self) -> bool: ...
    def get(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        req: str,
        deadline_s: float,
        after: int,
    ) -> int: ...
    def put(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parent: bytes,
        req: str,
        deadline_s: float,
        after: int,
    ) -> int: ...
    def close(self) -> None:
        """The engine has other weights now. Transfers that have begun continue."""


class Question(Protocol):
    """Which pages are there?"""

    def answer(self) -> Sequence[bool] | None: ...
    def end(self) -> None:
        """No answer is wanted any more, and no page has to stay for it."""


class Pin(Protocol):
    """Pages that the store keeps for some time, or until the session ends."""

    @property
    def refused(self) -> str:
        """Why nothing is kept; empty: it is not refused."""

    def pages(self) -> int | None:
        """How many are kept, from the first one on; None: there is no answer yet."""

    def end(self) -> None: ...


class SchedulerPages(Protocol):
    """Questions about pages of all ranks: a page is there if all of them have theirs. No call
    waits."""

    @property
    def error(self) -> str: ...
    @property
    def session(self) -> int:
        """Another number after each reconnection: the sidecar may have forgotten pages."""

    @property
    def opening(self) -> bool:
        """ready() may become true without a reconnection."""

    def ready(self) -> bool: ...
    def ask(self, hashes: Sequence[bytes], pin_s: float) -> Question: ...
    def pin(self, hashes: Sequence[bytes], pin_s: float) -> Pin: ...
    def close(self) -> None:
        """There are other weights."""


class ShimError(Exception):
    """No lease was opened and nothing was sent; prefill locally."""


def prefix_hash(
    tokens: Sequence[int], lora: str, salt: str, items: Sequence[tuple[str, int, int]]
) -> bytes:
    return kvspray.prefix_hash(tokens, lora, salt, items)


@dataclass
class Memory:
    """A range of this process that the sidecar can reach."""

    region: kvspray.Region
    buffer: memoryview | None

    @property
    def addr(self) -> int:
        return self.region.addr

    @property
    def kind(self) -> str:
        return self.region.kind.name.lower()

    def close(self) -> None:
        self.region.close()


# What vLLM's kv_role is to a router.
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def _engine(engine_id: str) -> kvspray.EngineInfo:
    import vllm

    return kvspray.EngineInfo("vllm", vllm.__version__, engine_id)


def ranks(of: layout.Ranks, parallel: ParallelConfig) -> kvspray.Ranks:
    return kvspray.Ranks(
        dp=(parallel.data_parallel_rank, parallel.data_parallel_size),
        pp=(of.pp, of.pp_size),
        tp=(of.tp, of.tp_size),
    )


class Worker:
    """WorkerShim over kvspray.WorkerClient."""

    def __init__(
        self,
        socket: str | None,
        engine_id: str,
        layers: int,
        log: logging.Logger,
        ranks: kvspray.Ranks,
        secret: bytes = b"",
        api: str = "",
        kv_role: str = "",
        kv_events: tuple[str, str] = ("", ""),
    ) -> None:
        # Of the store's namespaces: processes of an engine send each other namespaces without it.
        self._secret = secret
        engine = replace(
            _engine(engine_id),
            api=api,
            role=ROLES.get(kv_role, ""),
            events=kv_events[0],
            replay=kv_events[1],
        )
        self._c = kvspray.WorkerClient(socket, engine=engine, layers=layers, log=log, ranks=ranks)
        self.signal_layer = self._c.signal_layer
        self.signal_step = self._c.signal_step

    @property
    def connected(self) -> bool:
        return self._c.connected

    def alloc(self, nbytes: int) -> Memory:
        try:
            region = self._c.alloc_region(nbytes)
        except kvspray.KvsprayError as err:
            raise ShimError(str(err)) from err
        return Memory(region, region.buffer)

    def process_memory(self, addr: int, nbytes: int) -> Memory:
        return Memory(self._c.process_region(addr, nbytes), None)

    def gpu_memory(self, addr: int, nbytes: int) -> Memory:
        try:
            return Memory(self._c.gpu_region(addr, nbytes), None)
        except kvspray.KvsprayError as err:
            raise ShimError(str(err)) from err

    def gpu_flags(self, log: logging.Logger) -> GpuFlags:
        try:
            return kvspray.gpu.GpuSignals(self._c, log)
        except kvspray.KvsprayError as err:
            raise ShimError(str(err)) from err

    def register(self, memory: Sequence[Memory], layout: Mapping[str, Any]) -> None:
        self._c.register([m.region for m in memory], layout)

    def describe(self, layout: Mapping[str, Any]) -> None:
        self._c.describe(layout)

    def replace(self, memory: Sequence[Memory], layout: Mapping[str, Any] | None = None) -> None:
        """Replaces the memory of register. Without memory, the engine takes it back for a while."""
        self._exits = self._c.status().counters["sidecar_exits"]
        try:
            self._c.replace([m.region for m in memory], layout)
        except kvspray.KvsprayError as err:
            raise ShimError(str(err)) from err

    def wait_connected(self, seconds: float) -> bool:
        return self._c.wait_connected(seconds)

    def wait_replaced(self, seconds: float) -> bool:
        """After replace: whether the sidecar has unmapped the memory before, or has exited."""
        end = time.monotonic() + seconds
        while not self._c.wait_connected(min(EXIT_S, max(0.0, end - time.monotonic()))):
            if self._c.status().counters["sidecar_exits"] != self._exits:
                return True
            if time.monotonic() >= end:
                return False
        return True

    def holds(self) -> bool:
        """Whether a sidecar may still access memory that was taken back."""
        return self._c.status().sidecars > 0

    def intent(
        self,
        xfer: bytes,
        hash: bytes,
        tokens: int,
        blocks: Blocks,
        fanout: int,
        req: str,
        traceparent: str = "",
    ) -> int:
        # A record too big for its ring is an argument error there; here the request is prefilled
        # locally.
        try:
            return _lease(
                self._c.intent(
                    xfer, hash, tokens, blocks, fanout=fanout, req=req, traceparent=traceparent
                ),
                self._c,
            )
        except ValueError as err:
            raise ShimError(str(err)) from err

    def expect(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, skip: int, blocks: Blocks, req: str,
        after: int = 0, traceparent: str = "", stall_s: float = 0.0, priority: int = 0,
    ) -> int:  # fmt: skip
        try:
            return _lease(
                self._c.expect(
                    xfer,
                    hash,
                    peer,
                    tokens,
                    skip,
                    blocks,
                    req=req,
                    after=after,
                    stall_s=stall_s,
                    traceparent=traceparent,
                    priority=priority,
                ),
                self._c,
            )
        except ValueError as err:
            raise ShimError(str(err)) from err

    def step(self, step: int, gains: Sequence[tuple[int, int, Blocks]]) -> None:
        if not self._c.step(step, gains):
            raise ShimError("the sidecar's ring took no step record")

    def preempt(self, lease: int) -> None:
        self._c.preempt(lease)

    def cancel(self, lease: int, reason: str) -> None:
        self._c.cancel(lease, reason)

    def hold(self, lease: int) -> None:
        self._c.hold(lease)

    def yield_hold(self, lease: int) -> None:
        self._c.yield_hold(lease)

    def pages(
        self, namespace: Namespace, pieces: Sequence[tuple[Memory, int, int, int]], blocks: int
    ) -> WorkerPages:
        """pieces: (memory, base, stride, length) of each part of a block. After register."""
        parts = [kvspray.store.Piece(m.region, base, stride, n) for m, base, stride, n in pieces]
        return _WorkerPages(
            self._c,
            kvspray.store.Space(self._c, replace(namespace, secret=self._secret), parts, blocks),
        )

    def poll(self) -> list[Ended]:
        return [
            Ended(
                c.lease,
                c.received,
                int(c.status),
                c.bytes,
                c.us,
                c.transport,
                c.reason,
                min((r[0] for r in c.recompute), default=0),
                c.pages,
            )
            for c in self._c.poll()
        ]

    def wait(self, seconds: float) -> None:
        self._c.wait(seconds)

    def close(self) -> None:
        self._c.close()


def _lease(lease: int, client: kvspray.WorkerClient) -> int:
    if lease <= 0:
        raise ShimError(client.refusal)
    return lease


class _WorkerPages:
    """WorkerPages over kvspray.store.Space."""

    def __init__(self, client: kvspray.WorkerClient, space: kvspray.store.Space) -> None:
        self._c, self._s = client, space

    @property
    def error(self) -> str:
        return self._s.error

    def ready(self) -> bool:
        return self._s.ready()

    def get(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        req: str,
        deadline_s: float,
        after: int,
    ) -> int:
        try:
            return _lease(
                self._s.get(hashes, blocks, req=req, deadline_s=deadline_s, after=after), self._c
            )
        except ValueError as err:
            raise ShimError(str(err)) from err

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parent: bytes,
        req: str,
        deadline_s: float,
        after: int,
    ) -> int:
        try:
            return _lease(
                self._s.put(
                    hashes, blocks, parent=parent, req=req, deadline_s=deadline_s, after=after
                ),
                self._c,
            )
        except ValueError as err:
            raise ShimError(str(err)) from err

    def close(self) -> None:
        self._s.close()


# A scheduler has no time to take thousands of bits one by one.
_BITS = [[bool(byte >> i & 1) for i in range(8)] for byte in range(256)]


class _Question:
    """Question over kvspray.store.Exists. Without pins where the sidecar has too many already:
    pages that go before they are loaded are computed."""

    def __init__(self, ask: Callable[[float], kvspray.store.Exists], pin_s: float) -> None:
        self._ask = ask
        self._pins = pin_s > 0
        self._e = ask(pin_s)

    def answer(self) -> Sequence[bool] | None:
        found = self._e.result()
        if found is not None and self._e.refused and self._pins:
            self._pins = False
            self._e = self._ask(0)
            found = self._e.result()
        return (
            None
            if found is None
            else [bit for byte in found.bits for bit in _BITS[byte]][: found.pages]
        )

    def end(self) -> None:
        self._e.forget()
        self._e.unpin()


class _Pin:
    """Pin over kvspray.store.Exists."""

    def __init__(self, e: kvspray.store.Exists) -> None:
        self._e = e

    @property
    def refused(self) -> str:
        return self._e.why

    def pages(self) -> int | None:
        found = self._e.result()
        return None if found is None else found.leading

    def end(self) -> None:
        self._e.forget()
        self._e.unpin()


class _SchedulerPages:
    """SchedulerPages over kvspray.store.Space, one for each rank."""

    def __init__(self, client: kvspray.SchedulerClient, namespaces: Sequence[Namespace]) -> None:
        self._s = [kvspray.store.Space(client, n) for n in namespaces]

    @property
    def error(self) -> str:
        return next((s.error for s in self._s if s.error), "")

    @property
    def session(self) -> int:
        return self._s[0].session

    @property
    def opening(self) -> bool:
        return any(s.opening for s in self._s)

    def ready(self) -> bool:
        return all([s.ready() for s in self._s])  # a list: all of them are opened at once

    def ask(self, hashes: Sequence[bytes], pin_s: float) -> Question:
        first, *others = self._s
        try:
            return _Question(lambda pin_s: first.exists(hashes, also=others, pin_s=pin_s), pin_s)
        except ValueError as err:
            raise ShimError(str(err)) from err

    def pin(self, hashes: Sequence[bytes], pin_s: float) -> Pin:
        first, *others = self._s
        try:
            return _Pin(first.exists(hashes, also=others, pin_s=pin_s))
        except ValueError as err:
            raise ShimError(str(err)) from err

    def close(self) -> None:
        for s in self._s:
            s.close()


class Scheduler:
    """SchedulerShim over kvspray.SchedulerClient."""

    def __init__(
        self,
        socket: str | None,
        engine_id: str,
        log: logging.Logger,
        tp_size: int = 1,
        pp_size: int = 1,
        secret: bytes = b"",
        dp: tuple[int, int] = (0, 1),
    ) -> None:
        self._secret = secret
        # The engine's name and sizes are those of its workers: a decline takes the place of ranks.
        ranks = kvspray.Ranks(dp=dp, pp=(0, pp_size), tp=(0, tp_size))
        self._c = kvspray.SchedulerClient(socket, engine=_engine(engine_id), log=log, ranks=ranks)

    @property
    def connected(self) -> bool:
        return self._c.connected

    @property
    def endpoint(self) -> str | None:
        return self._c.endpoint

    @property
    def match_timeout_s(self) -> float:
        return (self._c.status().match_timeout_ms or DEFAULT_MATCH_TIMEOUT_MS) / 1000

    def await_admission(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, ttl_s: float
    ) -> None:
        try:
            asked = self._c.await_admission(xfer, hash, peer, tokens, ttl_s)
        except ValueError as err:
            raise ShimError(str(err)) from err
        if not asked:
            raise ShimError("too many open questions")

    def admission(self, xfer: bytes, hash: bytes) -> Answer | None:
        answer = self._c.admission(xfer, hash)
        if answer is None or answer.state == kvspray.AdmissionState.PENDING:
            return None
        return Answer(answer.state.name.lower(), answer.message)

    def expected(self, xfer: bytes, hash: bytes) -> None:
        self._c.expected(xfer, hash)

    def decline(
        self, xfer: bytes, hash: bytes, peer: str, reason: str, asked: bool = True, req: str = "",
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._c.decline(xfer, hash, peer, reason, req=req, ranks=ranks, asked=asked)

    def pages(self, namespaces: Sequence[Namespace]) -> SchedulerPages:
        """namespaces: of each rank."""
        return _SchedulerPages(self._c, [replace(n, secret=self._secret) for n in namespaces])

    def close(self) -> None:
        self._c.close()
