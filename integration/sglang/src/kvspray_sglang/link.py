"""The session with the sidecar. The only module that uses the client of ``kvspray``.

SGLang calls a backend from several threads and frees the pages of a call when it returns. So no
call returns before its leases have ended. CALL_S seconds after its begin it cancels those that are
open, and waits until the sidecar has fenced them. A sidecar that does not answer for FENCE_S is
killed by the shim, which ends the wait.
Without a session no call waits.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import kvspray
from kvspray import _messages
from kvspray.gpu import GpuSignals
from kvspray.store import Namespace, PageResult, Piece, Space
from kvspray_sglang import memory
from kvspray_sglang.pools import Pool

CALL_S = 3.0
FENCE_S = 2.0
_POLL_S = 0.5  # how long a thread waits for completions before it looks at its own deadline
_CLOSE_S = 10.0
MAX_PAGES = _messages.MAX_KEYS  # of one request

_HELD = (_messages.PAGE_HIT, _messages.PAGE_STORED, _messages.PAGE_EXISTED)


@dataclass
class Wanted:
    """Pages of one pool to get or put."""

    space: Space
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    parent: bytes = b""


@dataclass
class Ended:
    """What became of a Wanted: a flag for each page, and the bytes that moved."""

    pages: list[bool]
    bytes: int = 0


class Link:
    """One rank's session."""

    def __init__(
        self, socket: str | None, version: str, ranks: kvspray.Ranks, log: logging.Logger
    ) -> None:
        engine = kvspray.EngineInfo("sglang", version, secrets.token_hex(8))
        self._log = log
        self._client = kvspray.WorkerClient(
            socket,
            engine=engine,
            ranks=ranks,
            layers=1,
            deadline_s=CALL_S,
            grace_s=FENCE_S,
            log=log,
        )
        self._regions: list[kvspray.Region] = []  # registered, or to be registered by start()
        self._parts: dict[bytes, kvspray.Region] = {}  # of mapped regions, by their ids
        self._process: list[kvspray.Region] = []
        self._started = False
        self._cond = threading.Condition()  # guards what follows
        self._calls = 0
        self._closing = False
        self._polling = False  # one thread takes completions for all
        self._ended: dict[int, kvspray.Completion | None] = {}  # open leases; None: not yet
        self._loaded: list[kvspray.Completion] = []  # of loads
        self._spaces = threading.Lock()  # a Space belongs to one thread at a time

    # -- life

    def pool(self, pool: Pool) -> list[Piece]:
        """The pieces of a pool's pages. Their memory is registered."""
        other = [s for s in pool.spans() if memory.region_of(*s) is None]
        if other:
            self._log.warning(
                "kvspray: host pool %r is in memory that the sidecar cannot map, so its pages are "
                "copied once more. Remedy: install kvspray-sglang where SGLang runs, let "
                "SGLANG_PLUGINS name kvspray if it is set, and configure the backend when the "
                "server starts", pool.name,
            )  # fmt: skip
        found = memory.process_regions(other)
        self._process += found
        self.add(found)
        pieces = []
        for part, (start, end) in zip(pool.parts, pool.spans(), strict=True):
            region = self._mapped(start, end) or next(
                r for r in found if r.addr <= start and end <= r.addr + r.nbytes
            )
            pieces.append(Piece(region, start - region.addr, part.stride, part.length))
        return pieces

    def _mapped(self, start: int, end: int) -> kvspray.Region | None:
        """The region of these addresses, as one of this session: another session of this process
        may still have it."""
        whole = memory.region_of(start, end)
        if whole is None:
            return None
        if whole.id not in self._parts:
            self._parts[whole.id] = part = whole.part(0, whole.nbytes)
            self.add([part])
        return self._parts[whole.id]

    def add(self, regions: Sequence[kvspray.Region]) -> None:
        """Registers memory, before start() or after it."""
        if self._started and regions:
            self._client.add_regions(regions)
        self._regions += regions

    def start(self) -> None:
        """Connects, in the background."""
        self._client.register(self._regions)
        self._started = True

    def space(self, namespace: Namespace, pieces: Sequence[Piece], pages: int) -> Space:
        """A pool's part of the store. After start()."""
        return Space(self._client, namespace, pieces, pages)

    def close(self) -> bool:
        """Ends the session. False: calls still run, so their memory stays the sidecar's."""
        with self._cond:
            self._closing = True
            idle = self._cond.wait_for(lambda: self._calls == 0, _CLOSE_S)
        if idle:
            self._client.close()
            for region in self._process:
                region.close()
        return idle

    @property
    def closed(self) -> bool:
        with self._cond:
            return self._closing

    @property
    def connected(self) -> bool:
        return self._client.connected

    def status(self) -> kvspray.Status:
        return self._client.status()

    # -- calls

    def exists(self, asked: Sequence[tuple[Space, Sequence[bytes]]]) -> list[list[bool]]:
        """Which pages the store has, for several pools at once."""
        end = time.monotonic() + CALL_S
        with _Call(self) as ok:
            questions = []
            for space, hashes in asked:
                parts = [hashes[i : i + MAX_PAGES] for i in range(0, len(hashes), MAX_PAGES)]
                with self._spaces:
                    ready = ok and self._ready(space, end)
                    questions.append([space.exists(p) if ready else None for p in parts])
            out = []
            for (_, hashes), parts_asked in zip(asked, questions, strict=True):
                flags: list[bool] = []
                for q in parts_asked:
                    found = q and q.result(max(0.0, end - time.monotonic()))
                    if not found:
                        if q:
                            q.forget()
                        break
                    flags += [found[i] for i in range(found.pages)]
                out.append(flags + [False] * (len(hashes) - len(flags)))
            return out

    def get(self, wanted: Sequence[Wanted], end: float) -> list[Ended]:
        """Copies pages from the store until ``end`` of the monotonic clock. On return nothing
        writes to the blocks any more."""
        return self._move(wanted, end, False)

    def put(self, wanted: Sequence[Wanted], end: float) -> list[Ended]:
        """Copies pages into the store until ``end`` of the monotonic clock. On return nothing
        reads the blocks any more."""
        return self._move(wanted, end, True)

    def remove(self, space: Space) -> bool:
        """Forgets all pages of a space."""
        with _Call(self) as ok, self._spaces:
            return bool(ok and self.connected and space.remove(CALL_S))

    def _ready(self, space: Space, end: float) -> bool:
        return self.connected and space.ready(max(0.0, end - time.monotonic()))

    def _move(self, wanted: Sequence[Wanted], end: float, put: bool) -> list[Ended]:
        out = [Ended([False] * len(w.hashes)) for w in wanted]
        with _Call(self) as ok:
            leases = []
            for n, w in enumerate(wanted if ok else ()):
                for i in range(0, len(w.hashes), MAX_PAGES):
                    lease = self._submit(w, i, end, put)
                    if lease:
                        leases.append((lease, n, i))
            for lease, n, i in leases:
                c = self._end(lease, end)
                out[n].bytes += c.bytes
                for k, byte in enumerate(c.pages if c.ok else b""):
                    out[n].pages[i + k] = PageResult.of(byte).outcome in _HELD
        return out

    def _submit(self, w: Wanted, at: int, end: float, put: bool) -> int:
        hashes, blocks = w.hashes[at : at + MAX_PAGES], w.blocks[at : at + MAX_PAGES]
        with self._spaces:
            left = end - time.monotonic()
            if not self._ready(w.space, end) or left < 0.01:
                return 0
            with self._cond:  # another thread may take the completion before submit has returned
                if put:
                    parent = w.hashes[at - 1] if at else w.parent
                    lease = w.space.put(hashes, blocks, parent=parent, deadline_s=left)
                else:
                    lease = w.space.get(hashes, blocks, deadline_s=left)
                if lease:
                    self._ended[lease] = None
                return lease

    # -- loads

    def mapped(self, start: int, end: int) -> tuple[kvspray.Region, int] | None:
        """The region of a host pool's memory, and the offset in it. None: it has no region."""
        region = self._mapped(start, end)
        return None if region is None else (region, start - region.addr)

    def signals(self, log: logging.Logger) -> GpuSignals:
        """After start(), in a thread with the GPU's context. Raises KvsprayError."""
        return GpuSignals(self._client, log)

    def load(
        self, parts: Sequence[kvspray.LoadPart], pages: bytes, flag: int, value: int, arrived: int,
        req: str, deadline_s: float, after: int,
    ) -> int:  # fmt: skip
        """As WorkerClient.load. The lease ends by loads_ended()."""
        return self._client.load(
            parts, pages, flag, value, arrived=arrived, req=req, deadline_s=deadline_s, after=after
        )

    @property
    def refusal(self) -> str:
        return self._client.refusal

    def loads_ended(self, timeout_s: float) -> list[kvspray.Completion]:
        """Waits until a load has ended or ``timeout_s`` have passed. Returns the completions."""
        with self._cond:
            if not self._loaded:
                self._poll(timeout_s)
            out, self._loaded = self._loaded, []
            return out

    def cancel(self, lease: int, reason: str) -> None:
        """The lease of a load ends later, by loads_ended()."""
        self._client.cancel(lease, reason)

    def load_value(self, flag: int) -> int:
        return self._client.load_value(flag)

    def add_optional(self, regions: Sequence[kvspray.Region]) -> None:
        """Registers memory after start(). A failure does not end the session."""
        self._client.add_regions(regions)

    # -- completions

    def _end(self, lease: int, end: float) -> kvspray.Completion:
        """The lease's end. After ``end`` it is cancelled; what follows is bounded by the shim,
        which kills a sidecar that does not answer. A fence that a sidecar reports as unfinished is
        waited for, because SGLang would use the pages for another prompt."""
        if not self._wait(lease, end):
            self._client.cancel(lease, "the engine waits no longer")
            if not self._wait(lease, time.monotonic() + 2 * FENCE_S):
                self._log.error(
                    "kvspray: a request to the store is not fenced %.0f s after its deadline; its "
                    "pages are withheld from SGLang until it is: %s",
                    2 * FENCE_S, self.status().error,
                )  # fmt: skip
                self._wait(lease, None)
        with self._cond:
            c = self._ended.pop(lease)
        assert c is not None
        return c

    def _wait(self, lease: int, end: float | None) -> bool:
        with self._cond:
            while self._ended[lease] is None:
                left = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
                if left <= 0:
                    return False
                self._poll(left)
            return True

    def _poll(self, timeout_s: float) -> None:
        """Locked. Takes completions, or waits for the thread that does."""
        if self._polling:
            self._cond.wait(timeout_s)
            return
        self._polling = True
        self._cond.release()
        try:
            got = self._client.poll() if self._client.wait(timeout_s) else []
        finally:
            self._cond.acquire()
            self._polling = False
        for c in got:
            if c.lease in self._ended:
                self._ended[c.lease] = c
            else:
                self._loaded.append(c)
        self._cond.notify_all()


class _Call:
    """Counts the calls that run; False inside: the link closes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> bool:
        with self._link._cond:
            self._link._calls += 1
            return not self._link._closing

    def __exit__(self, *_: object) -> None:
        with self._link._cond:
            self._link._calls -= 1
            self._link._cond.notify_all()
