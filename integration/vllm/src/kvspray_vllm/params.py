"""``kv_transfer_params``: NIXL's keys as they are, and one versioned ``kvspray`` key beside them
(docs/protocol.md, section 4).

Everything here comes from a router, so from outside: it is checked, and whatever is not understood
means local prefill.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
MAX_FANOUT = 16
MAX_PIN_S = 3600.0  # as the sidecar bounds pins
MAX_PEER_BYTES = 255
MAX_ADAPTER_BYTES = 128
# Classes of the slice scheduler (docs/protocol.md, EXPECT); 1 is that of layer streams.
PRIO_DECODE_WAITS, PRIO_BACKGROUND = 0, 2
MAX_TRACEPARENT = 64  # bytes that a sidecar reads; version 00 has 55

# "3_" before the id of a parent request: one of its n samples.
_CHILD = re.compile(r"^\d{1,6}_(?=.)")
# vLLM's engine front end appends this to every id that a client can see.
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
# W3C trace context; a version above 00 may add fields.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")

# /v1/completions numbers the prompts of a list.
_INDEX = re.compile(r"-\d{1,8}$")


class ParamsError(ValueError):
    """The params cannot be used; label and text give the reason, for the metrics and the log."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__(text)
        self.label = label


@dataclass(frozen=True)
class Hints:
    """A router's hints about a request's pages in the store. Malformed hints are ignored: they are
    no reason to refuse a request."""

    pin_s: float = 0.0  # how long they stay after the request has ended
    load: int | None = None  # tokens that may come from the store; None: all


NO_HINTS = Hints()


def hints_of(params: object) -> Hints:
    raw = params.get("kvspray") if isinstance(params, Mapping) else None
    if not isinstance(raw, Mapping) or raw.get("v") != VERSION:
        return NO_HINTS
    ttl, load = raw.get("ttl"), raw.get("load")
    pin_s = 0.0
    if raw.get("pin") is True and isinstance(ttl, int | float) and not isinstance(ttl, bool):
        # NaN, which compares as false, means no pin.
        pin_s = float(min(ttl, MAX_PIN_S)) if 0 < ttl < math.inf else 0.0
    if isinstance(load, bool) or not isinstance(load, int) or load < 0:
        load = None
    return Hints(pin_s, load)


@dataclass(frozen=True)
class Spray:
    """The ``kvspray`` key, checked."""

    xfer: bytes | None
    peer: str | None
    fanout: int
    adapter: str | None = None  # content of the LoRA adapter that the prefill has computed with
    # Of the router's span; not passed on: the other engine's comes from the router.
    traceparent: str = ""
    release: bool = False  # a message of a router: no engine will fetch this transfer

    def encode(self) -> dict[str, Any]:
        out: dict[str, Any] = {"v": VERSION, "fanout": self.fanout}
        if self.xfer is not None:
            out["xfer"] = self.xfer.hex()
        if self.peer is not None:
            out["peer"] = self.peer
        if self.adapter is not None:
            out["adapter"] = self.adapter
        return out


def parse(params: Mapping[str, Any]) -> Spray | None:
    """The ``kvspray`` key of params; None where there is none. Raises ParamsError for one that
    cannot be used."""
    raw = params.get("kvspray")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ParamsError(
            "malformed", f"kv_transfer_params['kvspray'] is {type(raw).__name__}, want an object"
        )
    version = raw.get("v")
    if isinstance(version, bool) or version != VERSION:
        raise ParamsError(
            "version",
            f"kv_transfer_params['kvspray']['v'] is {version!r}, this connector speaks {VERSION}",
        )
    xfer: bytes | None = None
    text = raw.get("xfer")
    if text is not None:
        try:
            xfer = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            xfer = b""
        if len(xfer) != 16:
            raise ParamsError(
                "malformed",
                f"kv_transfer_params['kvspray']['xfer'] is {str(text)[:64]!r}, want 32 hex digits",
            )
    peer = raw.get("peer")
    if peer is not None and not is_endpoint(peer):
        raise ParamsError(
            "malformed",
            f"kv_transfer_params['kvspray']['peer'] is {str(peer)[:64]!r}, want host:port",
        )
    fanout = raw.get("fanout", 1)
    if isinstance(fanout, bool) or not isinstance(fanout, int) or not 1 <= fanout <= MAX_FANOUT:
        raise ParamsError(
            "malformed",
            f"kv_transfer_params['kvspray']['fanout'] is {fanout!r}, want 1..{MAX_FANOUT}",
        )
    adapter = raw.get("adapter")
    if adapter is not None and not (
        isinstance(adapter, str)
        and len(adapter) <= MAX_ADAPTER_BYTES
        and adapter.isascii()
        and adapter.isprintable()
    ):
        raise ParamsError(
            "malformed",
            f"kv_transfer_params['kvspray']['adapter'] is {str(adapter)[:64]!r}, want at most "
            f"{MAX_ADAPTER_BYTES} printable characters",
        )
    return Spray(xfer, peer, fanout, adapter, traceparent_of(raw), raw.get("release") is True)


def traceparent_of(headers: Mapping[str, Any] | None) -> str:
    """The entry ``traceparent``; empty for a malformed one, because a trace is no reason to refuse
    a request."""
    if not isinstance(headers, Mapping):
        return ""
    text = headers.get("traceparent")
    if not isinstance(text, str) or len(text) > MAX_TRACEPARENT or not _TRACEPARENT.fullmatch(text):
        return ""
    return text


def class_of(priority: int) -> int:
    """The slice scheduler's class for a request's priority. In vLLM, a lower number comes first,
    and 0 is the default: no request comes before those without a priority."""
    return min(max(priority, PRIO_DECODE_WAITS), PRIO_BACKGROUND)


def is_endpoint(value: object) -> bool:
    """Whether value is host:port."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PEER_BYTES:
        return False
    # Names come as they are dialled: a character beyond ASCII, a space or a NUL would be cut or
    # counted differently further on.
    if not value.isascii() or not value.isprintable() or " " in value:
        return False
    host, sep, port = value.rpartition(":")
    return bool(sep and host) and len(port) <= 5 and port.isdigit() and 0 < int(port) < 65536


def api_call_of(request_id: str) -> str:
    """The part of an engine's request id that the prompts of one API call share: without the sample
    number before it, the eight random characters after it, and the number of a completion's prompt
    in its list."""
    base = _CHILD.sub("", request_id)
    base = _RANDOM.sub("", base)
    if base.startswith("cmpl-"):
        base = _INDEX.sub("", base)
    return base


def derive_xfer(secret: bytes, request_id: str) -> bytes:
    """A transfer id for a prefill-first request: the same for all prompts of one API call, so that
    a router that passes on only the first prompt's params serves the others too (they match by
    hash). `secret` is random per engine: ids cannot be guessed."""
    call = api_call_of(request_id).encode()
    return hashlib.sha256(
        b"kvspray-xfer-v1" + len(secret).to_bytes(4, "little") + secret + call
    ).digest()[:16]
