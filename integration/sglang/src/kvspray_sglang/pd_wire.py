"""Messages between the ranks of prefill and decode, as frames on the sockets that SGLang's own
transfer backends use. They name a transfer and carry a request's metadata rows; its pages move
between the sidecars.

    decode -> prefill   ROOM    what the decode rank waits for
    prefill -> decode   PEER    the sidecar that the pages come from
    prefill -> decode   ROWS    the request's metadata: first token, log probabilities ...
    prefill -> decode   FIRST   the first token alone, of a prefill that is no SGLang
    decode -> prefill   DONE    all decode ranks have all of it

A ROOM or a PEER with the frame "prompt" comes from the bridge to another kind of engine
(bridge.py): that transfer is named by its prompt, which both engines hash themselves. A ROOM with
the frame "states" has one more, with the number of blocks of each component of the request's state:
"swa=3 mamba=1".

Frames come from another host: each is checked, and a message that is none is dropped.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TAG = b"KVSPRAY1"
BY_PROMPT = b"prompt"
STATES = b"states"
XFER_BYTES = 16
MAX_ENDPOINT_BYTES = 256
MAX_PAGES = 1 << 24
MAX_STATES = 16
MAX_STATES_BYTES = 1024
MAX_ROWS = 64
MAX_ROW_BYTES = 16 << 20

_ROOM = struct.Struct("<QHIII")  # room, port, pages, tokens that decode has, decode ranks
_HEAD = struct.Struct("<Q")
_STATE = re.compile(r"([a-z][a-z0-9_]{0,31})=([1-9][0-9]{0,7})")
_FIRST = struct.Struct("<II")  # token, tokens of the prompt that prefill had in its cache


@dataclass(frozen=True)
class Room:
    room: int
    host: str
    port: int
    xfer: bytes
    pages: int
    prefix: int  # tokens that decode has in its own cache
    ranks: int  # decode ranks that one prefill rank serves
    by_prompt: bool = False
    states: Mapping[str, int] = field(default_factory=dict)  # blocks of each component

    def encode(self) -> list[bytes]:
        head = _ROOM.pack(self.room, self.port, self.pages, self.prefix, self.ranks)
        more = [BY_PROMPT] if self.by_prompt else []
        if self.states:
            more = [STATES, " ".join(f"{k}={n}" for k, n in self.states.items()).encode()]
        return [TAG, b"ROOM", head, self.xfer, self.host.encode(), *more]


@dataclass(frozen=True)
class Peer:
    room: int
    xfer: bytes
    endpoint: str
    by_prompt: bool = False

    def encode(self) -> list[bytes]:
        more = [BY_PROMPT] if self.by_prompt else []
        head = _HEAD.pack(self.room)
        return [TAG, b"PEER", head, self.xfer, self.endpoint.encode(), *more]


@dataclass(frozen=True)
class Rows:
    room: int
    xfer: bytes
    rows: tuple[bytes, ...]

    def encode(self) -> list[bytes]:
        return [TAG, b"ROWS", _HEAD.pack(self.room), self.xfer, *self.rows]


@dataclass(frozen=True)
class First:
    room: int
    xfer: bytes
    token: int
    cached: int

    def encode(self) -> list[bytes]:
        body = _FIRST.pack(self.token, self.cached)
        return [TAG, b"FIRST", _HEAD.pack(self.room), self.xfer, body]


@dataclass(frozen=True)
class Done:
    room: int
    xfer: bytes

    def encode(self) -> list[bytes]:
        return [TAG, b"DONE", _HEAD.pack(self.room), self.xfer]


def decode(frames: Sequence[bytes]) -> Room | Peer | Rows | First | Done | None:
    """None: no message of kvspray. Raises ValueError for one that is damaged."""
    if len(frames) < 4 or frames[0] != TAG:
        return None
    kind, head, xfer, more = frames[1], frames[2], frames[3], list(frames[4:])
    if len(xfer) != XFER_BYTES:
        raise ValueError(f"a transfer id of {len(xfer)} bytes, want {XFER_BYTES}")
    try:
        by_prompt = more[1:] == [BY_PROMPT]
        states = _states(more[2]) if len(more) == 3 and more[1] == STATES else {}
        if kind == b"ROOM" and (len(more) == 1 or by_prompt or states):
            room, port, pages, prefix, ranks = _ROOM.unpack(head)
            if pages > MAX_PAGES or not 1 <= ranks <= 1 << 12:
                raise ValueError(f"{pages} pages for {ranks} ranks")
            return Room(
                room, _text(more[0]), port, bytes(xfer), pages, prefix, ranks, by_prompt, states
            )  # fmt: skip
        (room,) = _HEAD.unpack(head)
        if kind == b"DONE" and not more:
            return Done(room, bytes(xfer))
        if kind == b"PEER" and (len(more) == 1 or by_prompt):
            return Peer(room, bytes(xfer), _text(more[0]), by_prompt)
        if kind == b"FIRST" and len(more) == 1:
            return First(room, bytes(xfer), *_FIRST.unpack(more[0]))
        if kind == b"ROWS" and len(more) <= MAX_ROWS:
            if any(len(row) > MAX_ROW_BYTES for row in more):
                raise ValueError(f"a row of more than {MAX_ROW_BYTES} bytes")
            return Rows(room, bytes(xfer), tuple(bytes(row) for row in more))
    except (struct.error, UnicodeDecodeError) as err:
        raise ValueError(f"a damaged message: {err}") from err
    raise ValueError(f"a message of kind {bytes(kind[:16])!r} with {len(more)} more frames")


def _states(frame: bytes) -> dict[str, int]:
    if len(frame) > MAX_STATES_BYTES:
        raise ValueError(
            f"a list of components of {len(frame)} bytes, want at most {MAX_STATES_BYTES}"
        )
    words = bytes(frame).decode("ascii").split(" ")
    found = [_STATE.fullmatch(w) for w in words]
    out = {m[1]: int(m[2]) for m in found if m}
    if not len(out) == len(words) <= MAX_STATES or max(out.values()) > MAX_PAGES:
        raise ValueError(f"a damaged list of components: {bytes(frame[:64])!r}")
    return out


def _text(frame: bytes) -> str:
    if not 0 < len(frame) <= MAX_ENDPOINT_BYTES:
        raise ValueError(f"an address of {len(frame)} bytes")
    return bytes(frame).decode("ascii")
