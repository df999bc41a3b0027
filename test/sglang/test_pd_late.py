"""Attacks with late writes: decode gives a request up while a real sidecar writes to its pages,
and uses the pages again as soon as the backend allows it. No byte may change after that.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_pd_states import (
    KVPoll,
    Side,
    alone,
    engines,
    pd_wire,
    rig,
    two_sidecars,
)  # fmt: skip

PAGE, PAGES, MOVED = 16, 256, 200
ATTACKS = 200
AGAIN = 0xA5  # what the pages' next owner writes
OPEN = "kvspray_lease_open"


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side, Any]]:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    alone()
    pools = [
        MHATokenToKVPool(
            size=PAGE * PAGES, page_size=PAGE, dtype=torch.bfloat16, head_num=4, head_dim=64,
            layer_num=4, device="cpu", enable_memory_saver=False,
        )
        for _ in range(2)
    ]  # fmt: skip
    with two_sidecars() as both:
        (p,), (d,) = engines(both, pools[:1], pools[1:])
        try:
            yield p, d, both
        finally:
            p.close()
            d.close()
    del pools


class Attack:
    """A request that is given up at a random time of its transfer."""

    def __init__(self, p: Side, d: Side, room: int, r: random.Random) -> None:
        self.p, self.d, self.room, self.r = p, d, room, r

    def begin(self) -> None:
        p, d, room = self.p.m, self.d.m, self.room
        pages = [self.r.sample(range(1, PAGES), MOVED) for _ in range(2)]
        d.request_status[room] = KVPoll.WaitingForInput
        assert d.open_arrival("p:1", room, pages[1], 0, 0) == ""
        p.update_status(room, KVPoll.Bootstrapping)
        frames = d.asking(room, 1)
        p._asked(pd_wire.decode(frames))
        p.open_source(room, MOVED)
        d._peer(self.p.sent[-1])
        self.pages, self.source = pages[0], p._rooms[room]

    def send(self) -> None:
        """Prefill reports its pages in four chunks, some of them perhaps after decode has gone."""
        m = self.p.m
        for at in range(0, MOVED, MOVED // 4):
            time.sleep(self.r.uniform(0, 0.001))
            own, last = self.pages[at : at + MOVED // 4], at + MOVED // 4 == MOVED
            m.add_transfer_request(self.room, own, slice(0), last, *((0, []) if last else ()))
            m._chunk(m._chunks.get())

    def run(self, wait: bool) -> tuple[bool, int]:
        """Whether a write could be under way, and how many bytes of the next owner changed."""
        self.begin()
        sender = threading.Thread(target=self.send)
        sender.start()
        time.sleep(self.r.uniform(0, 0.008))
        m = self.d.m
        m.give_up(self.room, "an attack")
        under_way = self.room in m._writers
        if wait:
            rig.wait_for("the fence", lambda: m.is_abort_release_safe(self.room, 1), 30, 0.0005)
        tensors = self.d.tensors()
        for _, ptr, n, _ in tensors:
            ctypes.memset(ptr, AGAIN, n)
        sender.join()
        self.p.m.close_source(self.room, None, "an attack")
        offers = self.source.offers.values()
        rig.wait_for("prefill's end", lambda: all(o.ended for o in offers), 30, 0.0005)
        rig.wait_for("the fence", lambda: m.is_abort_release_safe(self.room, 1), 30, 0.0005)
        changed = sum(
            n - ctypes.string_at(ptr, n).count(AGAIN.to_bytes()) for _, ptr, n, _ in tensors
        )
        m.close_arrival(self.room)
        return under_way, changed


def attacks(sides: tuple[Side, Side, Any], first: int, wait: bool, enough: Any) -> tuple[int, int]:
    p, d, sidecars = sides
    p.scribble(1)
    r, hits, changed = random.Random(first), 0, 0
    for room in range(first, first + 10 * ATTACKS):
        hit, bytes_ = Attack(p, d, room, r).run(wait)
        hits, changed = hits + hit, changed + bytes_
        if enough(hits, changed):
            break
    for s in sidecars:
        rig.wait_for("no lease", lambda s=s: rig.total(s.metrics(), OPEN) == 0, 30, 0.05)
    return hits, changed


def test_pages_are_not_written_after_the_fence(sides: tuple[Side, Side, Any]) -> None:
    hits, changed = attacks(sides, 1000, True, lambda hits, _: hits == ATTACKS)
    assert hits == ATTACKS and changed == 0, f"{changed} bytes in {hits} attacks"


def test_the_attack_finds_writes_without_the_fence(sides: tuple[Side, Side, Any]) -> None:
    """Pages that are used again at once are written to: the attack is able to see it."""
    hits, changed = attacks(sides, 5000, False, lambda _, changed: changed > 0)
    assert changed > 0, f"no byte in {hits} attacks"
    print(f"{changed} bytes after {hits} attacks")
