"""The bytes of a checkpoint, piece after piece, in a bounded range of shared memory that the
sidecar can map.

A source reads pieces ahead: from open files by threads, or from another node by EXPECT over all
rails. The user of a piece returns its memory when nothing uses it any more. No piece is delivered
unless all of its bytes have come.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import json
import logging
import os
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .checkpoint import Directory, Manifest, Piece, offer_name
from .client import Completion, EngineInfo, identity
from .region import KvsprayError, Region
from .weights import CheckpointError
from .worker import WorkerClient

# Enough for every link of a GPU; a larger tensor is put together from several.
PIECE_BYTES = 64 << 20
# In the arena. With MAX_HELD ranges in use the rest has a gap for another piece, wherever they are:
# (PIECES - MAX_HELD) / (MAX_HELD + 1) >= 1.
PIECES = 8
MAX_HELD = 3  # pieces that are taken and not given back
ARENA_BYTES = PIECES * (PIECE_BYTES + (1 << 20))
READ_BYTES = 8 << 20  # of one system call
READERS = 8
PAGE_BYTES = 1 << 20  # between nodes
ALIGN = 4096
HUGE = 2 << 20  # bytes of a huge page
# pieces: all readers have work while the last bytes of one come. No more memory than that is
# touched.
AHEAD = 4
WAIT_S = 0.05  # between looks at the session
CONNECT_S = 10.0
DEADLINE_S = 60.0  # of a piece from another node
HTTP_S = DEADLINE_S + 10  # of a whole answer
MAX_MANIFEST_BYTES = 64 << 20
MAX_ANSWER_BYTES = 1 << 16  # of other requests

_log = logging.getLogger("kvspray.weights")


class LoadError(RuntimeError):
    """The bytes of a checkpoint did not come."""


class Arena:
    """Memory for pieces. Ranges are given and taken back in any order, the lowest first.

    New memory costs time: the kernel clears it, and the host of a virtual machine may have to find
    it, at less than 1 GB/s. So the first piece is under way while the others get theirs, and what
    no piece needs stays untouched.
    """

    def __init__(self, nbytes: int, align: int = ALIGN) -> None:
        self.region = Region.reserve(-(-nbytes // align) * align)
        self.nbytes, self.align = self.region.nbytes, align
        self._lock = threading.Lock()
        self._free = [(0, self.nbytes)]  # offset, length; sorted, none touches another
        self.used = 0
        self._filling = threading.Lock()  # guards the next one
        self._filled = 0  # bytes from the beginning on that have memory

    def take(self, nbytes: int) -> int | None:
        """An offset, or None: there is no room now. Raises LoadError if the host has no memory."""
        at = self._take(nbytes)
        if at is not None:
            try:
                self.fill(at + nbytes)
            except LoadError:
                self.give(at, nbytes)
                raise
        return at

    def fill(self, nbytes: int) -> None:
        """Allocates memory for the first ``nbytes`` bytes, in which all pieces will lie. Raises
        LoadError if the host has none."""
        end = min(-(-nbytes // HUGE) * HUGE, self.nbytes)
        with self._filling:
            if end <= self._filled:
                return
            try:
                self.region.populate(self._filled, end - self._filled)
            except KvsprayError as err:
                raise LoadError(f"no memory for pieces of weights: {err}") from err
            self._filled = end

    def _take(self, nbytes: int) -> int | None:
        n = max(1, -(-nbytes // self.align)) * self.align
        with self._lock:
            for i, (at, length) in enumerate(self._free):
                if length >= n:
                    self._free[i : i + 1] = [(at + n, length - n)] if length > n else []
                    self.used += n
                    return at
        return None

    def give(self, at: int, nbytes: int) -> None:
        n = max(1, -(-nbytes // self.align)) * self.align
        with self._lock:
            self.used -= n
            free = sorted([*self._free, (at, n)])
            joined = free[:1]
            for start, length in free[1:]:
                if sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + length)
                else:
                    joined.append((start, length))
            self._free = joined

    def view(self, at: int, nbytes: int) -> memoryview:
        return self.region.buffer[at : at + nbytes]

    def close(self) -> None:
        """What is still in use stays mapped, as long as this process lives."""
        if self.used:
            _log.warning(
                "kvspray: %d bytes of read weights are still in use, and stay in memory", self.used
            )
        else:
            self.region.close()


@dataclass(eq=False)
class Block:
    """A piece in the arena."""

    arena: Arena
    piece: Piece
    at: int
    lead: int  # bytes ahead of the piece, so that tensors are aligned as in their file
    given: bool = False

    @property
    def address(self) -> int:
        return self.arena.region.addr + self.at + self.lead

    @property
    def view(self) -> memoryview:
        return self.arena.view(self.at + self.lead, self.piece.nbytes)

    def give_back(self) -> None:
        """Nothing uses the bytes any more. Several calls are one."""
        if not self.given:
            self.given = True
            self.arena.give(self.at, self.lead + self.piece.nbytes)


class Source(Protocol):
    manifest: Manifest
    arena: Arena  # from prepare() on

    @property
    def client(self) -> WorkerClient | None:
        """From prepare() on, if a sidecar has the arena: it takes that from no other session."""

    def prepare(self) -> None:
        """Takes memory, and connects. Once."""

    def lead(self, piece: Piece) -> int: ...

    def start(self, block: Block) -> None:
        """Begins to read."""

    def finish(self, block: Block) -> None:
        """Returns when all bytes have come. Raises CheckpointError or LoadError."""

    def poll(self) -> list[Completion]:
        """Waits a while for the ends of leases that others opened with the client. In the thread of
        finish()."""

    def check(self) -> None:
        """Raises CheckpointError if the checkpoint is not what it was."""

    def stop(self) -> None:
        """Nothing is written to the arena afterwards."""

    def close(self) -> None:
        """After stop()."""


class Files:
    """A directory on this host."""

    arena: Arena
    client: WorkerClient | None = None

    def __init__(
        self, root: str, arena_bytes: int = ARENA_BYTES, digest: str | None = None
    ) -> None:
        self.directory = Directory(root, digest)
        self.manifest = self.directory.manifest
        self._arena_bytes = arena_bytes
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._jobs: dict[int, list[concurrent.futures.Future[None]]] = {}
        self._stop = False

    def prepare(self, arena: Arena | None = None) -> None:
        self.arena = arena or Arena(self._arena_bytes)
        self._pool = concurrent.futures.ThreadPoolExecutor(READERS, "kvspray-read")

    def lead(self, piece: Piece) -> int:
        return piece.start % 64

    def start(self, block: Block) -> None:
        p = block.piece
        assert self._pool is not None
        self._jobs[id(block)] = [
            self._pool.submit(self._read, p.file, p.start + at, block.view[at : at + READ_BYTES])
            for at in range(0, p.nbytes, READ_BYTES)
        ]

    def _read(self, file: int, at: int, into: memoryview) -> None:
        if self._stop:
            raise LoadError("the load was stopped")
        fd, path = self.directory.fds[file], self.directory.paths[file]
        done = 0
        while done < len(into):
            try:
                n = os.preadv(fd, [into[done:]], at + done)
            except OSError as err:
                raise CheckpointError(f"{path}: {err.strerror} at byte {at + done}") from err
            if n == 0:
                raise CheckpointError(
                    f"{path}: no byte {at + done}: the file is shorter than when it was opened; "
                    "load again once nothing writes to it"
                )
            done += n

    def finish(self, block: Block) -> None:
        jobs = self._jobs.pop(id(block))
        concurrent.futures.wait(jobs)  # also after an error: the range goes to others
        for job in jobs:
            job.result()

    def poll(self) -> list[Completion]:
        return []

    def check(self) -> None:
        self.directory.check()

    def stop(self) -> None:
        self._stop = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._jobs.clear()  # they hold views of the arena

    def close(self) -> None:
        self.stop()
        self.directory.close()
        if self._pool is not None:
            self.arena.close()


def offer_layout(manifest: Manifest, blocks: int) -> dict[str, Any]:
    """What both sides register: pages of bytes. Sidecars refuse to move pieces of another
    checkpoint."""
    return {
        "model": "kvspray-weights", "dtype": "uint8", "groups": [
        {"tokens_per_block": 1, "strategy": "page", "params": {}, "num_blocks": blocks,
        "layers": [{"name": "weights", "index": 0, "region": 0, "base": 0,
        "block_stride": PAGE_BYTES, "page_bytes": PAGE_BYTES}]}],
        "identity": identity(model_config="weights", weights=manifest.digest, layers=1,
        head_size=0, groups="weights", rope="", backoff=0, speculative="", packing="bytes"),
    }  # fmt: skip


class Peer:
    """A directory that another node offers (``python -m kvspray.offer``): requests go to its
    address, and bytes come from sidecar to sidecar."""

    arena: Arena
    client: WorkerClient

    def __init__(
        self, url: str, socket_path: str | None = None, arena_bytes: int = ARENA_BYTES
    ) -> None:
        self.url = url.rstrip("/")
        self._ask = Asker(self.url)
        self.endpoint, self.manifest = self._offer()
        self._socket, self._arena_bytes, self._prepared = socket_path, arena_bytes, False
        self._leases: dict[int, Block] = {}
        self._ends: dict[int, Completion] = {}
        self._others: list[Completion] = []
        self._by_block: dict[int, int] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(AHEAD, "kvspray-ask")
        self._asked: dict[int, concurrent.futures.Future[None]] = {}

    def prepare(self) -> None:
        self.client = WorkerClient(
            self._socket,
            engine=EngineInfo("kvspray-load", id=f"load-{os.getpid()}-{secrets.token_hex(4)}"),
            layers=1,
            deadline_s=DEADLINE_S,
            log=_log,
        )
        try:
            self.arena = Arena(self._arena_bytes, PAGE_BYTES)
        except KvsprayError:
            self.client.close()
            raise
        self._prepared = True
        try:
            self.client.register(
                [self.arena.region], offer_layout(self.manifest, self.arena.nbytes // PAGE_BYTES)
            )
            if not self.client.wait_connected(CONNECT_S):
                raise LoadError(
                    f"no sidecar takes the pieces: {self.client.status().error or 'none answers'}; "
                    "start kvspray serve on this host"
                )
        except BaseException:
            self.close()
            raise

    def _offer(self) -> tuple[str, Manifest]:
        answer = self._ask("GET", "/v1/manifest")
        if not isinstance(answer, dict) or not isinstance(answer.get("endpoint"), str):
            raise LoadError(
                f"{self.url}: no offer of weights; give the address that python -m kvspray.offer "
                "prints"
            )
        return answer["endpoint"], Manifest.from_json(answer.get("manifest"), self.url)

    def lead(self, piece: Piece) -> int:
        return 0

    def start(self, block: Block) -> None:
        xfer = secrets.token_bytes(16)
        first, count = block.at // PAGE_BYTES, -(-block.piece.nbytes // PAGE_BYTES)
        lease = self.client.expect(
            xfer, offer_name(self.manifest.digest, block.piece, xfer), self.endpoint, count, 0,
            [range(first, first + count)], req="weights", deadline_s=DEADLINE_S,
            match_timeout_s=DEADLINE_S,
        )  # fmt: skip
        if not lease:
            raise LoadError(
                f"the sidecar takes no piece: {self.client.status().error or 'it is gone'}; load "
                "again once kvspray serve runs"
            )
        self._leases[lease] = block
        self._by_block[id(block)] = lease
        p = block.piece
        self._asked[lease] = self._pool.submit(self._request, xfer, p)

    def _request(self, xfer: bytes, p: Piece) -> None:
        self._ask(
            "POST",
            "/v1/pieces",
            {
                "xfer": xfer.hex(),
                "file": p.file,
                "start": p.start,
                "nbytes": p.nbytes,
                "digest": self.manifest.digest,
            },
        )

    def finish(self, block: Block) -> None:
        lease = self._by_block[id(block)]
        while lease not in self._ends:
            asked = self._asked[lease]
            if asked.done() and asked.exception() is not None:
                self.client.cancel(lease, "the offer refused the piece")
            self._poll()
        del self._by_block[id(block)]
        asked, end = self._asked.pop(lease), self._ends.pop(lease)
        refused = asked.exception() if not end.ok else None
        if refused is not None:
            raise refused
        if not end.ok:
            raise LoadError(
                f"a piece did not come from {self.endpoint}: {end.status.name} ({end.reason}); "
                "load again"
            )

    def _poll(self) -> None:
        self.client.wait(WAIT_S)
        for c in self.client.poll():
            if self._leases.pop(c.lease, None) is not None:
                self._ends[c.lease] = c
            else:
                self._others.append(c)

    def poll(self) -> list[Completion]:
        if not self._others:
            self._poll()
        out, self._others = self._others, []
        return out

    def check(self) -> None:
        if self._offer()[1] != self.manifest:
            raise CheckpointError(
                f"{self.url}: the offer is of another checkpoint than at the beginning; load again"
            )

    def stop(self) -> None:
        """Waits until the sidecar can write no more, or has its own mapping alone: that of this
        process ends with the session."""
        for lease in self._leases:
            self.client.cancel(lease, "the load ends")
        end = time.monotonic() + DEADLINE_S
        while self._leases and time.monotonic() < end:
            self._poll()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.stop()
        if self._prepared:
            self.client.close()
            self.arena.close()


class Asker:
    """Small requests to an offer, each on its own connection."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if (
            parts.scheme != "http"
            or not host
            or not port
            or parts.path not in ("", "/")
            or parts.query
        ):
            raise LoadError(
                f"{url[:200]!r}: want http://HOST:PORT, as python -m kvspray.offer prints it"
            )
        self._at = (host, port)

    def __call__(self, method: str, path: str, body: object = None) -> Any:
        limit = MAX_MANIFEST_BYTES if method == "GET" else MAX_ANSWER_BYTES
        end = time.monotonic() + HTTP_S
        conn = http.client.HTTPConnection(*self._at, timeout=HTTP_S)
        sock: socket.socket | None = None
        late = threading.Event()

        def stop() -> None:
            late.set()
            with contextlib.suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)

        timer: threading.Timer | None = None
        try:
            conn.connect()
            sock = conn.sock
            # A socket's own limit begins again with each byte.
            timer = threading.Timer(max(0.0, end - time.monotonic()), stop)
            timer.daemon = True
            timer.start()
            conn.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {} if body is None else {"Content-Type": "application/json"},
            )
            answer = conn.getresponse()
            raw = answer.read(limit + 1)
            if len(raw) > limit:
                raise ValueError(f"more than {limit} bytes")
            content = json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as err:
            what = (
                f"not within {HTTP_S:g} s"
                if late.is_set() or isinstance(err, socket.timeout)
                else str(err) or type(err).__name__
            )
            raise LoadError(
                f"{self.url}: no offer of weights answers: {what}; start python -m kvspray.offer "
                "there"
            ) from err
        finally:
            if timer is not None:
                timer.cancel()
            conn.close()
        if answer.status != 200:
            reason = content.get("error") if isinstance(content, dict) else None
            raise LoadError(f"{self.url}: {reason or answer.reason}")
        return content


class Stream:
    """The pieces of a source in their order. It reads ahead as far as the arena has room."""

    def __init__(self, source: Source, piece_bytes: int = PIECE_BYTES) -> None:
        source.prepare()
        if PIECES * (piece_bytes + source.arena.align) > source.arena.nbytes:
            raise LoadError(
                f"an arena of {source.arena.nbytes} bytes for pieces of {piece_bytes}: want at "
                f"least {PIECES} of them"
            )
        self.source = source
        self._pieces = source.manifest.pieces(piece_bytes)
        self._next: Piece | None = next(self._pieces, None)
        self._started: collections.deque[Block] = collections.deque()

    def _feed(self) -> None:
        while self._next is not None and len(self._started) < AHEAD:
            lead = self.source.lead(self._next)
            at = self.source.arena.take(self._next.nbytes + lead)
            if at is None:
                return
            block = Block(self.source.arena, self._next, at, lead)
            self.source.start(block)
            self._started.append(block)
            self._next = next(self._pieces, None)

    def close(self) -> None:
        """Of the source, too. Pieces that were read ahead are given back once nothing writes to
        them."""
        self.source.stop()
        for block in self._started:
            block.give_back()
        self._started.clear()
        self.source.close()

    def __iter__(self) -> Iterator[Block]:
        while True:
            self._feed()
            if not self._started:
                if self._next is None:
                    return
                raise LoadError(
                    f"no memory for a piece: more than {MAX_HELD} were taken and not given back"
                )
            block = self._started[0]
            self.source.finish(block)
            self._started.popleft()
            yield block
            del block


def open_source(
    where: str,
    socket_path: str | None = None,
    arena_bytes: int = ARENA_BYTES,
    digest: str | None = None,
) -> Source:
    """A directory's path, or http://HOST:PORT of an offer. digest: as of Directory; an offer has
    its own."""
    if where.startswith("http://"):
        return Peer(where, socket_path, arena_bytes)
    if "://" in where or not os.path.isabs(where):
        raise CheckpointError(
            f"{where[:200]!r}: want the absolute path of a directory on the engine's host, or "
            "http://HOST:PORT of an offer"
        )
    return Files(where, arena_bytes, digest)


__all__ = [
    "Arena",
    "Block",
    "Files",
    "KvsprayError",
    "LoadError",
    "Peer",
    "Source",
    "Stream",
    "open_source",
]
