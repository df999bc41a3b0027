"""Requests of one scheduler that take part in a transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Source:
    request: Request
    xfer: bytes
    hash: bytes
    tokens: int
    fanout: int
    # Offered only where it begins with no cached block: its adapter was replaced under its id.
    fresh: bool = False
    adapter: str | None = None  # content of its LoRA adapter
    end: int = 0  # tokens that the steps so far have announced, in this attempt
    finished: bool = False
    held: float = 0.0  # since when only receivers need the blocks
    blocks: int = 0  # how many it then has
    yielded: bool = False  # no receiver is waited for any more: the pool is nearly full
    lost: bool = False  # its blocks went, or mean nothing any more
    traceparent: str = ""
    # Once all of it is announced: the first block that is sent, of each group with a window.
    oldest: tuple[int, ...] = ()


@dataclass
class Destination:
    xfer: bytes
    hash: bytes
    peer: str
    tokens: int  # that move: all of the prompt, less the back-off
    ready: bool  # the prefill is done: nothing to ask
    asked: float  # when admission was asked for
    wait: float  # how long for, seconds
    computed: int = 0  # what the engine has itself: a load begins behind it, wherever it ends
    traceparent: str = ""
