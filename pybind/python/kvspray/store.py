"""Pages of the store of this node's sidecar: which are there, get, put. docs/protocol.md, section
5, describes the messages.

A page is the KV cache of some tokens on one rank. The engine names it by its own hash of these
tokens and of all before them. No call waits for the sidecar unless it has a time-out, and none
raises because of the sidecar.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _lib, _messages, protocol
from ._lib import byref, lib
from .client import _Client, _ms, _req, _timeout
from .region import Region
from .worker import WorkerClient, _after

__all__ = ["Exists", "Found", "Namespace", "PageResult", "Piece", "Removed", "Space"]

_OPEN, _EXISTS, _REMOVE = 11, 13, 16
_ERROR, _OPENED, _FOUND, _DONE = 5, 12, 14, 19
_ANSWER_BYTES = 64 << 10


@dataclass(frozen=True)
class Namespace:
    """All that the bytes of a page depend on besides its tokens. Pages of two namespaces never
    meet."""

    weights: str  # identity of weights and quantization: kvspray.weights
    dtype: str
    layout: str  # fingerprint of one rank's layout
    page_tokens: int
    page_bytes: int  # of one rank
    algorithm: str  # of the engine's page hashes, for instance "vllm-sha256_cbor"
    seed: str = ""  # of that algorithm: PYTHONHASHSEED
    adapter: str = ""  # identity of a LoRA adapter's content
    secret: bytes = field(default=b"", repr=False)  # the tenant's; pages cannot be named without it


@dataclass(frozen=True)
class Piece:
    """A part of every block: that of block i is ``length`` bytes at ``base + i * stride`` of a
    registered region."""

    region: Region
    base: int
    stride: int
    length: int


@dataclass(frozen=True)
class PageResult:
    """The end of one page of a get or put, from a byte of ``Completion.pages``."""

    outcome: int  # _messages.PAGE_HIT ...
    tier: int  # of a hit: 1 memory, 2 disk, 3 object store, 4 peer
    durable: bool  # a stored page survives a loss of power

    @classmethod
    def of(cls, byte: int) -> PageResult:
        return cls(byte & 15, byte >> 4 & 7, byte >= 128)

    @property
    def hit(self) -> bool:
        return self.outcome == _messages.PAGE_HIT


@dataclass(frozen=True)
class Removed:
    """A removal that this node has applied."""

    members: int  # nodes with a store, this one included
    confirmed: int  # those that have removed the pages
    missing: str = ""  # the others, and why


@dataclass(frozen=True)
class Found:
    """Which pages of a question are there."""

    pages: int
    bits: bytes

    def __getitem__(self, i: int) -> bool:
        if not 0 <= i < self.pages:
            raise IndexError(i)
        return bool(self.bits[i // 8] >> i % 8 & 1)

    @property
    def leading(self) -> int:
        """Pages before the first one that is missing: an engine can use these."""
        return next((i for i in range(self.pages) if not self[i]), self.pages)


class _Request:
    """A request to the sidecar and its answer, which is fetched once."""

    def __init__(self, client: _Client, kind: int, body: dict[str, Any]) -> None:
        self._client = client
        packed = protocol.pack(body)
        h = client._handle()
        self._handle = (
            _lib.E_CLOSED if h is None else int(lib.kvs_request(h, kind, packed, len(packed)))
        )
        if self._handle in (_lib.E_ARG, _lib.E_TOO_BIG):
            raise ValueError(f"kvspray: store: {_lib.strerror(self._handle)} ({len(packed)} bytes)")
        self._answer: tuple[int, dict[str, Any]] | None = None if self._handle > 0 else (0, {})

    def fetch(self, timeout_s: float | None) -> tuple[int, dict[str, Any]] | None:
        """(type, body) of the answer; (0, {}): there will be none; None: not yet."""
        if self._answer is not None:
            return self._answer
        h = self._client._handle()
        if h is None:
            self._answer = (0, {})
            return self._answer
        kind = ctypes.c_uint32()
        buf = ctypes.create_string_buffer(_ANSWER_BYTES)
        n = int(lib.kvs_answer(h, self._handle, _timeout(timeout_s), byref(kind), buf, len(buf)))
        if n == 0:
            return None
        self._answer = (0, {})
        if n > 0:
            try:
                self._answer = (kind.value, protocol.decode(buf.raw[:n]))
            except ValueError:  # it comes from another process
                pass
        else:
            lib.kvs_request_forget(h, self._handle)
        return self._answer

    def forget(self) -> None:
        h = self._client._handle()
        if h is not None and self._answer is None:
            lib.kvs_request_forget(h, self._handle)
            self._answer = (0, {})


class Exists:
    """A question which pages are there."""

    def __init__(self, request: _Request | None, pages: int) -> None:
        self._request = request
        self._pages = pages
        # By the sidecar: the pages may be there, and it cannot pin all of them.
        self.refused = False
        self.why = ""  # it refuses

    def result(self, timeout_s: float | None = 0) -> Found | None:
        """None: there is no answer yet. Without a sidecar, a store or the namespace, no page is
        there."""
        none = Found(self._pages, bytes((self._pages + 7) // 8))
        if self._request is None:
            return none
        answer = self._request.fetch(timeout_s)
        if answer is None:
            return None
        kind, body = answer
        self.refused = kind == _ERROR
        if self.refused:
            self.why = _text(body)
        bits = body.get("found")
        if (
            kind != _FOUND
            or body.get("pages") != self._pages
            or not isinstance(bits, bytes)
            or len(bits) != len(none.bits)
        ):
            return none
        return Found(self._pages, bits)

    def unpin(self) -> None:
        """Ends the pins of this question."""
        h = self._request and self._request._client._handle()
        if self._request is not None and h is not None and self._request._handle > 0:
            lib.kvs_unpin(h, self._request._handle)

    def forget(self) -> None:
        """No answer is wanted any more."""
        if self._request is not None:
            self._request.forget()


class Space:
    """A namespace of the store in a client's session. It is opened again in each session, when it
    is used. A client that uses more than the session may have closes the one whose last use is the
    oldest, also of another thread. A space itself belongs to one thread at a time.

    A worker that gets or puts pages gives the pieces of its blocks and how many there are; a
    scheduler only asks.
    """

    def __init__(
        self, client: _Client, namespace: Namespace, pieces: Sequence[Piece] = (), blocks: int = 0
    ) -> None:
        if bool(pieces) != (blocks > 0):
            raise ValueError(
                f"kvspray: store: {len(pieces)} pieces and {blocks} blocks, want both or none"
            )
        if pieces and not isinstance(client, WorkerClient):
            raise ValueError("kvspray: store: pieces belong to a worker")
        self._client = client
        self._body: dict[str, Any] = {
            "namespace": {
                k: v for k, v in dataclasses.asdict(namespace).items() if k != "secret" or v
            }
        }
        if isinstance(client, WorkerClient) and pieces:
            numbers = [
                client._number(f"store: pieces[{i}]", p.region) for i, p in enumerate(pieces)
            ]
            flat = [
                x
                for n, p in zip(numbers, pieces, strict=True)
                for x in (n, p.base, p.stride, p.length)
            ]
            self._body |= {"pieces": _packed("Q", flat), "blocks": blocks}
        self._opening: _Request | None = None
        self._opened = 0  # handle of the OPEN
        self._session = -1  # that _space belongs to
        self._space: int | None = None
        self.error = ""  # why the sidecar has refused the namespace

    def close(self) -> None:
        """Closes the namespace, once its open gets and puts have ended. Another use opens it
        again."""
        with self._client._spaces_lock:
            self._close_locked()

    def _close_locked(self) -> None:
        self._client._spaces.pop(self, None)
        h = self._client._handle()
        if h is not None and self._opened > 0:
            lib.kvs_close_space(h, self._opened)
        if self._opening is not None:
            self._opening.forget()
        self._session, self._space, self._opening, self._opened = -1, None, None, 0

    def ready(self, timeout_s: float | None = 0) -> bool:
        """Whether the namespace is open in the present session. Opens it if it is not."""
        return self._open(timeout_s) is not None

    @property
    def opening(self) -> bool:
        """The sidecar has not answered yet whether it opens the namespace."""
        return self._opening is not None

    @property
    def session(self) -> int:
        """Number of the session that ready() has last seen; each reconnection has another one."""
        return self._session

    def exists(
        self, hashes: Sequence[bytes], *, also: Sequence[Space] = (), pin_s: float = 0
    ) -> Exists:
        """Asks which pages are in this namespace and all of ``also`` (those of other ranks).
        ``pin_s``: keeps the first ones."""
        spaces = [s._open(0) for s in (self, *also)]
        if None in spaces or not hashes:
            return Exists(None, len(hashes))
        body: dict[str, Any] = {"spaces": _packed("Q", spaces), **_hashes(hashes)}
        if pin_s > 0:
            body["pin_ms"] = _ms(pin_s, 0)
        return Exists(_Request(self._client, _EXISTS, body), len(hashes))

    def get(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        *,
        req: str = "",
        deadline_s: float | None = None,
        after: int = 0,
    ) -> int:
        """Copies pages from the store into blocks. The sidecar owns the blocks until the lease
        completes through poll(), whose ``pages`` has a byte for each page. Returns the lease, or 0
        if no sidecar can take it now: compute the pages."""
        return self._submit(
            _lib.REC_GET, _messages.get, hashes, blocks, req=req, deadline_s=deadline_s, after=after
        )

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        *,
        parent: bytes = b"",
        req: str = "",
        deadline_s: float | None = None,
        after: int = 0,
    ) -> int:
        """Copies pages from blocks into the store, in the order of their prompt. ``parent``: hash
        of the page before the first one. The blocks may not change until the lease completes.
        Returns the lease, or 0: nothing is stored."""
        return self._submit(
            _lib.REC_PUT,
            _messages.put,
            hashes,
            blocks,
            req=req,
            deadline_s=deadline_s,
            after=after,
            parent=parent,
        )

    def remove(self, timeout_s: float | None = 10) -> Removed | None:
        """Forgets all pages of the namespace on all nodes, durably. None: that is not certain on
        this node. Otherwise the result has the other nodes that have confirmed: the others remove
        the pages when they are reached again."""
        space = self._open(timeout_s)
        if space is None:
            return None
        answer = _Request(self._client, _REMOVE, {"space": space}).fetch(timeout_s)
        if answer is None or answer[0] != _DONE:
            return None
        body = answer[1]
        return Removed(
            int(body.get("members", 0)), int(body.get("confirmed", 0)), str(body.get("missing", ""))
        )

    def _submit(self, kind: int, make: Any, hashes: Sequence[bytes], blocks: Sequence[int], *,
        req: str, deadline_s: float | None, after: int, **more: Any) -> int:  # fmt: skip
        if not isinstance(self._client, WorkerClient) or "pieces" not in self._body:
            raise ValueError("kvspray: store: this space has no blocks; make it with pieces")
        if len(hashes) != len(blocks):
            raise ValueError(f"kvspray: store: {len(hashes)} hashes and {len(blocks)} blocks")
        space = self._open(0)
        if space is None:
            self._client.refusal = self.error or "the namespace is not open yet"
        if space is None or not hashes:
            return 0
        deadline = _ms(deadline_s, self._client._deadline_ms or self._client._deadlines()[0])
        body = protocol.pack(
            make(
                space=space,
                **_hashes(hashes),
                blocks=_packed("I", blocks),
                deadline_ms=deadline,
                req=_req(req),
                stream_mark=_after(after),
                **more,
            )
        )
        return max(0, self._client._submit("store", kind, body, deadline))

    def _open(self, timeout_s: float | None) -> int | None:
        session = self._client._info().connects
        with self._client._spaces_lock:
            if self._session != session:
                if self._opening is not None:
                    self._opening.forget()
                self._session, self._space, self._opening, self.error = session, None, None, ""
            spaces = self._client._spaces
            spaces.pop(self, None)
            spaces[self] = None
            while len(spaces) > _messages.MAX_SPACES:
                next(iter(spaces))._close_locked()
            if self._space is not None or self.error:
                return self._space
            if self._opening is None:
                self._opening = _Request(self._client, _OPEN, self._body)
                self._opened = self._opening._handle
            opening = self._opening
        answer = opening.fetch(timeout_s)
        with self._client._spaces_lock:
            # Another thread has closed it meanwhile.
            if answer is None or self._opening is not opening:
                return None
            self._opening = None
            kind, body = answer
            if kind == _OPENED and isinstance(body.get("space"), int):
                self._space = body["space"]
            elif kind == _ERROR:
                self.error = _text(body)
            return self._space


def _text(error: dict[str, Any]) -> str:
    """Of an ERROR."""
    return (
        f"{error.get('message', '')}; field {error.get('field', '')}; remedy: "
        f"{error.get('remedy', '')}"
    )


def _hashes(hashes: Sequence[bytes]) -> dict[str, Any]:
    if len(hashes) > _messages.MAX_KEYS:
        raise ValueError(
            f"kvspray: store: {len(hashes)} pages, at most {_messages.MAX_KEYS} in one request"
        )
    each = len(hashes[0])
    if not _messages.MIN_HASH_BYTES <= each <= _messages.MAX_HASH_BYTES or any(
        len(h) != each for h in hashes
    ):
        raise ValueError(
            f"kvspray: store: hashes of {each} bytes, want one length of "
            f"{_messages.MIN_HASH_BYTES} to {_messages.MAX_HASH_BYTES}"
        )
    return {"hashes": b"".join(hashes), "hash_bytes": each}


def _packed(code: str, values: Sequence[Any]) -> bytes:
    try:
        a = array.array(code, values)
    except OverflowError as e:
        raise ValueError(f"kvspray: store: {e}") from None
    if sys.byteorder == "big":
        a.byteswap()
    return a.tobytes()
