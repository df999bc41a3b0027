"""Pins that requests ask for: the store keeps a request's pages, with those of its answer, for some
time after it has ended.

The store bounds the pins of one tenant, and refuses more. A pin replaces earlier pins whose pages
it includes, as each turn of a conversation pins the pages of all turns before it. A pin begins once
the PUTs of its pages have ended. Everything runs on the engine core's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvspray_vllm.shim import Pin, ShimError

MAX_PINS = 256  # of an engine
LOG_S = 60.0  # a refusal has one line in that time

HELD, PART, NONE, REFUSED, FULL = "held", "part", "none", "refused", "full"


@dataclass
class _Entry:
    req: str
    hashes: tuple[bytes, ...]
    ttl_s: float
    puts: set[int]  # that have not ended
    until: float = 0.0  # 0: it has not begun
    pin: Pin | None = None
    answered: bool = False
    replaces: list[bytes] = field(default_factory=list)  # their last hashes

    def lasts(self, now: float) -> float:
        return self.until or now + self.ttl_s


class Pins:
    def __init__(
        self,
        ask: Callable[[Sequence[bytes], float], Pin],
        count: Callable[[str], None],
        log: logging.Logger,
        now: Callable[[], float],
    ) -> None:
        """ask: pins pages in the sidecar. count: counts the outcome of a pin."""
        self._ask = ask
        self._count = count
        self._log = log
        self._now = now
        self._pins: dict[bytes, _Entry] = {}  # by the last hash
        self._logged = -LOG_S

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, req: str, hashes: tuple[bytes, ...], ttl_s: float, puts: set[int]) -> None:
        """puts: the PUTs of these pages that have not ended."""
        self.look()
        last = hashes[-1]
        # One with the same pages is replaced; a place is needed only for a new one.
        if last not in self._pins and len(self._pins) >= MAX_PINS:
            self._refused(req, FULL, f"{MAX_PINS} pins are held, which is the bound of an engine")
            return
        old = self._pins.get(last)
        if old is not None and old.lasts(self._now()) > self._now() + ttl_s:
            return
        self._pins.pop(last, None)
        new = self._pins[last] = _Entry(req, hashes, ttl_s, puts)
        new.replaces = [h for h in hashes[:-1] if h in self._pins]
        if old is not None and old.pin is not None:
            old.pin.end()
        self._begin(new)

    def ended(self, put: int) -> None:
        """A PUT has ended."""
        for entry in list(self._pins.values()):
            if put in entry.puts:
                entry.puts.discard(put)
                self._begin(entry)

    def _begin(self, entry: _Entry) -> None:
        if entry.puts or entry.pin is not None:
            return
        try:
            entry.pin = self._ask(entry.hashes, entry.ttl_s)
        except ShimError as err:
            del self._pins[entry.hashes[-1]]
            self._refused(entry.req, REFUSED, str(err))
            return
        entry.until = self._now() + entry.ttl_s

    def look(self) -> None:
        """Takes the sidecar's answers, and drops pins whose time is over."""
        now = self._now()
        for last, entry in list(self._pins.items()):
            if entry.pin is None or self._pins.get(last) is not entry:
                continue  # it has not begun, or another one has just replaced it
            if now >= entry.until:
                del self._pins[last]
                entry.pin.end()
                continue
            pages = None if entry.answered else entry.pin.pages()
            if pages is None:
                continue
            entry.answered = True
            if entry.pin.refused:
                del self._pins[last]
                self._refused(entry.req, REFUSED, "the sidecar refuses: " + entry.pin.refused)
                continue
            if pages == 0:
                del self._pins[last]
                entry.pin.end()
                self._count(NONE)
                continue
            self._count(HELD if pages == len(entry.hashes) else PART)
            for h in entry.replaces:
                replaced = self._pins.get(h)
                if replaced is None or replaced.lasts(now) > entry.until:
                    continue  # prompts of several clients may begin alike
                del self._pins[h]
                if replaced.pin is not None:
                    replaced.pin.end()

    def _refused(self, req: str, outcome: str, why: str) -> None:
        self._count(outcome)
        if self._now() - self._logged >= LOG_S:
            self._logged = self._now()
            self._log.warning("kvspray: request %s: its pages are not pinned: %s", req, why)

    def clear(self) -> None:
        """Ends all pins: the engine has another store, or other weights."""
        for entry in self._pins.values():
            if entry.pin is not None:
                entry.pin.end()
        self._pins.clear()
