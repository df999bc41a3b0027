"""Segments: memory of this engine with a name. Engines of other nodes read and write it in batches.
docs/segments.md has shapes, units and errors.

A batch is one-sided: the engine that has the segment does nothing for it. The registration grants
nodes the right to read or write ranges of it for some time.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import _lib, _messages
from ._lib import byref, lib
from .client import Completion, CompletionStatus, _ms, _req, _text, _timeout
from .protocol import decode
from .region import KvsprayError, Region
from .worker import WorkerClient, _after

__all__ = ["ENTRY", "EVERYONE", "Batch", "EntryStatus", "Grant", "Located", "Note", "Segments"]

EVERYONE = "*"
# An entry, 48 bytes: local offset, offset in the segment, bytes, local stride, stride in the
# segment, pieces, index into the batch's regions. All but the last two count bytes.
ENTRY = struct.Struct("<5Q2I")

_ERROR, _DONE, _LOCATED, _NOTED = 5, 19, 25, 27
_ANSWER_BYTES = 256 << 10


@dataclass(frozen=True)
class Grant:
    """Lets a node use ``nbytes`` bytes of a segment from ``offset`` on (0: all of the rest)."""

    to: str = EVERYONE  # or the name of a node
    read: bool = False
    write: bool = False
    offset: int = 0
    nbytes: int = 0
    for_s: float = 0.0  # 0: until it is revoked


@dataclass(frozen=True)
class Located:
    """A segment as this node may use it."""

    nbytes: int
    read: bool
    write: bool
    for_s: float  # until the last grant ends; 0: one of them has no end


@dataclass(frozen=True)
class Note:
    """The notification of a batch, whose bytes are visible to this process."""

    segment: str
    from_node: str
    write: bool
    nbytes: int  # of the batch
    note: bytes


class EntryStatus(enum.IntEnum):
    """How an entry of a batch has ended."""

    ARRIVED = 0  # all of its bytes are in place
    UNTOUCHED = 1  # the batch was refused
    UNDEFINED = 2  # any part of it may have arrived


def _grants(grants: Sequence[Grant]) -> ctypes.Array[_lib.CGrant]:
    return (_lib.CGrant * len(grants))(
        *[
            _lib.CGrant(
                g.to.encode(), g.read, g.write, g.offset, g.nbytes,
                0 if g.for_s == 0 else _ms(g.for_s, 0),
            )
            for g in grants
        ]
    )  # fmt: skip


class Segments:
    """Segments of one worker, and its batches to those of others. Any thread may use it. Requests
    raise KvsprayError with the sidecar's field, value and remedy."""

    def __init__(self, client: WorkerClient) -> None:
        self.client = client

    def register(
        self,
        name: str,
        region: Region,
        *,
        grants: Sequence[Grant],
        offset: int = 0,
        nbytes: int | None = None,
        timeout_s: float = 10,
    ) -> None:
        """Makes ``nbytes`` bytes (None: all of the rest) of a registered region a segment, from
        ``offset`` on. Names are unique on a node. After a reconnection of the client, register the
        segment again."""
        size = region.nbytes - offset if nbytes is None else nbytes
        number = self.client._number("segment", region)
        h = self._handle("register")
        self._ask(
            f"segment {name!r}", timeout_s, _DONE,
            lib.kvs_segment(
                h, name.encode(), number, offset, size, _grants(grants), len(grants)
            ),
        )  # fmt: skip

    def register_file(
        self,
        name: str,
        path: str,
        *,
        grants: Sequence[Grant],
        offset: int = 0,
        nbytes: int = 0,
        timeout_s: float = 10,
    ) -> None:
        """Makes ``nbytes`` bytes (0: all of the rest) of a file a segment, from ``offset`` on.
        ``path`` begins at ``segments.root`` of this node's sidecar."""
        h = self._handle("register")
        self._ask(
            f"segment {name!r}", timeout_s, _DONE,
            lib.kvs_segment_file(
                h, name.encode(), os.fsencode(path), offset, nbytes, _grants(grants), len(grants)
            ),
        )  # fmt: skip

    def revoke(self, name: str, *, to: str = "", timeout_s: float | None = None) -> None:
        """Ends a segment; with ``to``, only its grants to that node. When it returns, every batch
        that used them is fenced: no batch reads or writes a byte for them any more."""
        h = self._handle("revoke")
        rc = lib.kvs_segment_revoke(h, name.encode(), to.encode())
        self._ask(f"revoke {name!r}", timeout_s, _DONE, rc)

    def find(self, name: str, *, peer: str = "", timeout_s: float = 10) -> Located:
        """Asks a sidecar for a segment. ``peer``: its endpoint, or its node's name; empty: this
        node's."""
        h = self._handle("find")
        rc = lib.kvs_locate(h, peer.encode(), name.encode(), _ms(timeout_s, 0))
        body = self._ask(f"find {name!r}", timeout_s + 1, _LOCATED, rc)
        out = _lib.CLocated()
        if lib.kvs_read_located(body, len(body), byref(out)) != 0:
            raise KvsprayError(f"kvspray: find {name!r}: a malformed answer")
        return Located(out.bytes, bool(out.read), bool(out.write), out.end_ms / 1000)

    def notes(self, wait_s: float = 0) -> list[Note]:
        """Notifications of batches that used this worker's segments, each once. The list is empty
        if none comes within ``wait_s``."""
        h = self._handle("notes")
        rc = lib.kvs_notes(h, 0 if wait_s <= 0 else _ms(wait_s, 0))
        body = self._ask("notes", wait_s + 5, _NOTED, rc)
        out = (_lib.CNote * _messages.MAX_NOTES)()
        n = lib.kvs_read_notes(body, len(body), out, len(out))
        if n < 0:
            raise KvsprayError(f"kvspray: notes: {_lib.strerror(n)}")
        return [
            Note(_text(x.segment), _text(x.source), bool(x.write), x.bytes,
                bytes(x.note[: x.note_bytes]))
            for x in out[:n]
        ]  # fmt: skip

    def batch(self, capacity: int, timeout_s: float = 10) -> Batch:
        """A batch with room for ``capacity`` entries. It can be used again and again."""
        return Batch(self.client, capacity, timeout_s)

    def _handle(self, what: str) -> ctypes.c_void_p:
        h = self.client._handle()
        if h is None:
            raise KvsprayError(f"kvspray: {what}: the client is closed")
        return h

    def _ask(self, what: str, timeout_s: float | None, want: int, request: int) -> bytes:
        """Waits for the answer to a request, and returns its body."""
        if request < 0:
            raise KvsprayError(f"kvspray: {what}: {self.client._why(int(request))}")
        h = self._handle(what)
        kind = ctypes.c_uint32()
        buf = ctypes.create_string_buffer(_ANSWER_BYTES)
        n = int(lib.kvs_answer(h, request, _timeout(timeout_s), byref(kind), buf, len(buf)))
        if n <= 0:
            lib.kvs_request_forget(h, request)
            why = _lib.strerror(n) if n < 0 else f"no answer within {timeout_s:g} s"
            raise KvsprayError(f"kvspray: {what}: {why}")
        body = buf.raw[:n]
        if kind.value == _ERROR:
            m = decode(body)
            raise KvsprayError(
                f"kvspray: {what}: {m.get('message', '')}; field {m.get('field', '')}; remedy: "
                f"{m.get('remedy', '')}"
            )
        if kind.value != want:
            raise KvsprayError(f"kvspray: {what}: an answer of type {kind.value}")
        return body


class Batch:
    """Ranges that one lease moves. They lie in memory that the sidecar shares, and reads once, when
    the lease begins. Do not change it before the lease has completed."""

    def __init__(self, client: WorkerClient, capacity: int, timeout_s: float) -> None:
        h = client._handle()
        self._client = client
        self._c = _lib.CBatch()
        rc = _lib.E_CLOSED if h is None else lib.kvs_batch_open(h, capacity, byref(self._c))
        if rc != 0:
            raise KvsprayError(
                f"kvspray: a batch of {capacity} entries: {client._why(rc)}; want 1 to "
                f"{_messages.MAX_BATCH_ENTRIES}"
            )
        self.capacity = capacity
        self._closed = False
        lib.kvs_regions_wait(h, _timeout(timeout_s))
        size = capacity * ENTRY.size
        array = (ctypes.c_ubyte * size).from_address(self._c.list.addr)
        self._array = weakref.ref(array)  # it lives as long as a view of it does
        self.memory = memoryview(array).cast("B")
        """The entries, as ENTRY lays them out; numpy.frombuffer makes an array of them. Set
        ``count`` then."""

    @property
    def count(self) -> int:
        return int(self._c.count)

    @count.setter
    def count(self, n: int) -> None:
        if not 0 <= n <= self.capacity:
            raise ValueError(f"kvspray: {n} entries in a batch of {self.capacity}")
        self._c.count = n

    def clear(self) -> None:
        self._c.count = 0

    def add(
        self, local: int, remote: int, nbytes: int, *, region: int = 0, pieces: int = 1,
        local_stride: int = 0, remote_stride: int = 0,
    ) -> None:  # fmt: skip
        """Adds a range, or ``pieces`` ranges at equal distances. ``region``: index into those of
        read() or write()."""
        n = self.count
        entry = ENTRY.pack(
            local, remote, nbytes, local_stride, remote_stride, pieces, region
        )  # before the count: an entry of an earlier lease must not count again
        self.count = n + 1
        self.memory[n * ENTRY.size : (n + 1) * ENTRY.size] = entry

    def extend(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Adds ranges: (local offset, offset in the segment, bytes)."""
        for local, remote, nbytes in entries:
            self.add(local, remote, nbytes)

    def read(self, segment: str, regions: Sequence[Region], **options: object) -> int:
        """Reads ranges of a segment into registered regions. Options: ``peer``, the endpoint of the
        owner's sidecar or the name of its node (empty: this node); ``priority``: 0 decode waits, 1
        stream, 2 background; ``deadline_s``, at most 3,600 (None: as for other leases); ``wait``:
        wait for open batches that exclude this one, instead of a refusal; ``note``: at most 64
        bytes, for the owner's engine; ``durable``: a write to a file completes once its data is on
        the disk; ``req``: a name for traces; ``after``: as of WorkerClient.expect().

        Returns the lease, which completes through WorkerClient.poll(); then statuses() has the
        status of each entry. Returns 0 or LATER as WorkerClient.copy() does. A note that is too
        long raises ValueError."""
        return self._submit(0, segment, regions, **options)  # type: ignore[arg-type]

    def write(self, segment: str, regions: Sequence[Region], **options: object) -> int:
        """Writes ranges of registered regions into a segment. Options and result are those of
        read()."""
        return self._submit(1, segment, regions, **options)  # type: ignore[arg-type]

    def _submit(
        self, write: int, segment: str, regions: Sequence[Region], *, peer: str = "",
        priority: int = 0, deadline_s: float | None = None, wait: bool = False, note: bytes = b"",
        durable: bool = False, req: str = "", after: int = 0,
    ) -> int:  # fmt: skip
        if len(note) > _messages.MAX_NOTE_BYTES:
            raise ValueError(
                f"kvspray: batch: a note of {len(note)} bytes, at most {_messages.MAX_NOTE_BYTES}"
            )
        client = self._client
        h = client._handle()
        numbers = [client._number("batch", r) for r in regions]
        options = _lib.CBatchOptions(
            size=ctypes.sizeof(_lib.CBatchOptions),
            write=write,
            peer=peer.encode(),
            segment=segment.encode(),
            regions=(ctypes.c_uint32 * len(numbers))(*numbers),
            region_count=len(numbers),
            priority=priority,
            deadline_ms=_ms(deadline_s, client._deadline_ms),
            wait=wait,
            note=note,
            note_bytes=len(note),
            durable=durable,
            req=_req(req).encode(),
            stream_mark=_after(after),
        )
        lease = (
            _lib.E_CLOSED
            if h is None
            else int(lib.kvs_batch_submit(h, byref(self._c), byref(options)))
        )
        return client._opened("batch", lease, b"")

    def statuses(self, completion: Completion) -> list[EntryStatus]:
        """The status of each entry of this batch's last lease."""
        if completion.ok:
            return [EntryStatus.ARRIVED] * self.count
        if completion.status == CompletionStatus.REFUSED:
            return [EntryStatus.UNTOUCHED] * self.count
        bits = completion.entries.ljust((self.count + 7) // 8, b"\0")
        return [
            EntryStatus.ARRIVED if bits[i // 8] >> i % 8 & 1 else EntryStatus.UNDEFINED
            for i in range(self.count)
        ]

    def close(self) -> None:
        """Releases the memory. Call it only when no lease of the batch is open, and no array of
        ``memory`` is left. Idempotent."""
        if not self._closed:
            with contextlib.suppress(BufferError):
                self.memory.release()
            if self._array() is not None:
                raise KvsprayError(
                    "kvspray: batch: memory: an array of it is left; delete it and close again"
                )
            self._closed = True
            lib.kvs_batch_close(self._client._handle(), byref(self._c))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
