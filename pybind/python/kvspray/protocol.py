"""The words of docs/protocol.md: message and record bodies, the prefix hash, and
``kv_transfer_params["kvspray"]``.

Canonical encoding: keys in the order of docs/protocol.md, absent optional keys left out, the
smallest integer form, `bin` for byte strings and `str` for text. ``encode`` gives that order
whatever the order of the given map; keys that it does not have follow at the end (a newer version
may have them). Readers never depend on the order.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ._messages import MAX_COPY_BLOCKS, MAX_FANOUT, MAX_LOAD_PARTS, ORDER

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
VERSION = PROTOCOL_MAJOR << 16 | PROTOCOL_MINOR

PARAMS_VERSION = 1

_PART = struct.Struct("<5Q2I")  # of a LOAD

# Key order of every body. REGISTER's layout is described in section 3 of docs/protocol.md.
_ORDER: dict[str, tuple[str, ...]] = {
    **ORDER,
    "REGISTER.layout": ("model", "dtype", "groups", "identity"),
    "REGISTER.layout.groups": ("tokens_per_block", "strategy", "params", "num_blocks", "layers"),
    "REGISTER.layout.groups.layers": (
        "name",
        "index",
        "region",
        "base",
        "block_stride",
        "page_bytes",
    ),
}


def _ordered(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        order = _ORDER.get(name, ())
        out = {k: _ordered(f"{name}.{k}", value[k]) for k in order if k in value}
        out.update((k, _ordered(f"{name}.{k}", v)) for k, v in value.items() if k not in out)
        return out
    if isinstance(value, (list, tuple)):
        return [_ordered(name, v) for v in value]
    return value


def encode(kind: str, value: Mapping[str, Any]) -> bytes:
    """The canonical bytes of one message or record body."""
    if kind not in _ORDER:
        raise ValueError(
            f"kvspray: unknown message or record {kind!r}; known are the names in docs/protocol.md"
        )
    return pack(_ordered(kind, value))


class _Packers(threading.local):
    """A packer serves one thread, and costs more to make than to use."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(use_bin_type=True)


_packers = _Packers()


def pack(value: Any) -> bytes:
    """msgpack with separate `bin` and `str`."""
    try:
        out: bytes = _packers.packer.pack(value)
    except Exception:
        # What it had written so far is not ours.
        _packers.packer = msgpack.Packer(use_bin_type=True)
        raise
    return out


def decode(data: bytes | memoryview) -> dict[str, Any]:
    """One body; raises ValueError when it is not one msgpack map with text keys."""
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as e:
        raise ValueError(f"kvspray: body of {len(data)} bytes is not msgpack: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"kvspray: body is a {type(value).__name__}, want a map")
    return value


def _integers(what: str, code: str, values: Sequence[int]) -> bytes:
    """As little-endian u32 (code I) or u64 (Q)."""
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except struct.error as e:
        raise ValueError(
            f"kvspray: {what} must be integers in [0, 2^{8 * struct.calcsize('<' + code)}): {e}"
        ) from e


def pack_blocks(ids: bytes | Iterable[int]) -> bytes:
    """A block table of one cache group as little-endian u32. Accepts bytes (taken as they are) and
    numpy arrays too."""
    if isinstance(ids, (bytes, bytearray, memoryview)):
        data = bytes(ids)
        if len(data) % 4:
            raise ValueError(
                f"kvspray: packed block table of {len(data)} bytes, want a multiple of 4"
            )
        return data
    seq = ids if isinstance(ids, (list, tuple)) else [int(i) for i in ids]
    return _integers("block ids", "I", seq)


def pack_copies(blocks: bytes | Iterable[tuple[int, int, int]]) -> bytes:
    """The blocks of a COPY: (source offset, destination offset, length) each, as three
    little-endian u64. Accepts bytes as they are."""
    if isinstance(blocks, (bytes, bytearray, memoryview)):
        data = bytes(blocks)
    else:
        data = _integers(
            "offsets and lengths of a copy",
            "Q",
            [int(v) for block in blocks for v in _triple(block)],
        )
    if not data or len(data) % 24 or len(data) > 24 * MAX_COPY_BLOCKS:
        raise ValueError(
            f"kvspray: a copy of {len(data) / 24:g} blocks, want 1 to {MAX_COPY_BLOCKS}: split it"
        )
    return data


def pack_parts(parts: Sequence[tuple[int, int, int, int, int, int, int]]) -> bytes:
    """The parts of a LOAD: (source base, source stride, destination base, destination stride,
    length, source region, destination region) each, as five little-endian u64 and two u32."""
    if not 1 <= len(parts) <= MAX_LOAD_PARTS:
        raise ValueError(
            f"kvspray: a load of {len(parts)} parts, want 1 to {MAX_LOAD_PARTS}: split it"
        )
    try:
        return b"".join(_PART.pack(*p) for p in parts)
    except struct.error as e:
        raise ValueError(
            f"kvspray: bases, strides and lengths of a load must be integers in [0, 2^64): {e}"
        ) from e


def pack_pages(pages: bytes | Iterable[tuple[int, int]]) -> bytes:
    """The pages of a LOAD: (source page, destination page) each, as two little-endian u32. Accepts
    bytes as they are."""
    if isinstance(pages, (bytes, bytearray, memoryview)):
        data = bytes(pages)
    else:
        data = _integers("pages of a load", "I", [int(v) for src, dst in pages for v in (src, dst)])
    if not data or len(data) % 8 or len(data) > 8 * MAX_COPY_BLOCKS:
        raise ValueError(
            f"kvspray: a load of {len(data) / 8:g} pages, want 1 to {MAX_COPY_BLOCKS}: split it"
        )
    return data


def _triple(block: tuple[int, int, int]) -> tuple[int, int, int]:
    if len(block) != 3:
        raise ValueError(
            f"kvspray: block {block!r} of a copy, want (source offset, destination offset, length)"
        )
    return block


def unpack_blocks(data: bytes) -> list[int]:
    """The inverse of pack_blocks."""
    if len(data) % 4:
        raise ValueError(f"kvspray: packed block table of {len(data)} bytes, want a multiple of 4")
    return list(struct.unpack(f"<{len(data) // 4}I", data))


_HASH_DOMAIN = b"kvspray-prefix-v1"


def prefix_hash(
    token_ids: Sequence[int] | Iterable[int],
    lora: str | None = None,
    salt: str | None = None,
    mm: Iterable[tuple[str, int, int]] = (),
) -> bytes:
    """SHA-256 over the prompt and all that its KV depends on (docs/protocol.md, section 4).

    The domain string, then four parts, each behind its length as u64 little-endian: the token ids
    as u32 little-endian, the LoRA name, the cache salt, and the multimodal items, each (identifier
    behind its length, offset u64, length u64). Absent and empty mean the same.
    """
    h = hashlib.sha256(_HASH_DOMAIN)

    def part(data: bytes) -> None:
        h.update(struct.pack("<Q", len(data)))
        h.update(data)

    ids = token_ids if isinstance(token_ids, (list, tuple)) else [int(t) for t in token_ids]
    part(struct.pack(f"<{len(ids)}I", *ids))
    part((lora or "").encode())
    part((salt or "").encode())
    items = bytearray()
    for identifier, offset, length in mm:
        ident = identifier.encode()
        items += struct.pack("<Q", len(ident)) + ident + struct.pack("<QQ", offset, length)
    part(bytes(items))
    return h.digest()


@dataclass(frozen=True)
class Params:
    """``kv_transfer_params["kvspray"]``, version 1."""

    xfer: bytes
    peer: str = ""
    fanout: int = 1

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"v": PARAMS_VERSION, "xfer": self.xfer.hex()}
        if self.peer:
            out["peer"] = self.peer
        out["fanout"] = self.fanout
        return out

    @classmethod
    def from_dict(cls, value: object) -> Params | None:
        """None for anything that is not version 1: local prefill. Never raises: the value comes
        from a client."""
        if not isinstance(value, Mapping) or value.get("v") != PARAMS_VERSION:
            return None
        xfer, peer, fanout = value.get("xfer"), value.get("peer", ""), value.get("fanout", 1)
        if not isinstance(xfer, str) or not isinstance(peer, str) or len(peer) > 255:
            return None
        if not isinstance(fanout, int) or isinstance(fanout, bool) or not 1 <= fanout <= MAX_FANOUT:
            return None
        try:
            raw = bytes.fromhex(xfer)
        except ValueError:
            return None
        return cls(raw, peer, fanout) if len(raw) == 16 else None
