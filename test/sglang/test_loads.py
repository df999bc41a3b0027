"""Loads from SGLang's host pools by a real sidecar, with SGLang's own controller and
transfer engine. On a CPU a layer is waited for by the thread; test/gpu/engines/sglang_loads.py has
the same on a GPU.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_hicache import (
    LAYERS,
    PAGE,
    PAGES,
    SIZE,
    Controller,
    device_pool,
    engine,
    host_pool,
    rig,
    sidecar,
)  # fmt: skip

import kvspray
from kvspray import CompletionStatus
from kvspray_sglang import loads
from kvspray_sglang.link import Link
from kvspray_sglang.pools import PoolError

__all__ = ["engine", "sidecar"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_BYTES", "MIN_PIECE", "PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(loads, name, 0)


class Loading(Controller):
    """What is in the host pool goes to the device pool."""

    def __init__(self, sidecar: rig.Sidecar, kind: str, layout: str, **extra: Any) -> None:
        super().__init__(
            sidecar, kind, layout, loads="sidecar", weights=f"{kind}-{layout}", **extra
        )
        mine = self.backend._loads
        assert mine is not None
        self.loads = mine
        rig.wait_for("the device pool at the sidecar", lambda: mine.ready, 30)

    def counts(self, copied: int, fallbacks: int) -> None:
        rig.wait_for(
            f"{copied} parts by the sidecar and {fallbacks} not",
            lambda: (self.loads.copied, self.loads.fallbacks) == (copied, fallbacks),
            5,
        )

    def load(
        self, pages: int = PAGES, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pages, in an order of their own. The slots at the device, and what is to be there.
        ``meanwhile`` is called just before the load."""
        c, tokens = self.controller, pages * PAGE
        for b in self.buffers:
            b.copy_(torch.randn(b.shape).to(b.dtype))
        slots = (torch.randperm(SIZE // PAGE - 1)[:pages] + 1)[:, None] * PAGE + torch.arange(PAGE)
        host = c.write(slots.flatten(), node_id=7)
        c.start_writing()
        c.ack_write_queue.pop(0).finish_event.synchronize()
        want = torch.stack([b[slots.flatten()] for b in self.buffers])
        for b in self.buffers:
            b.fill_(-1)
        assert len(host) == tokens
        device = c.load(host, node_id=7)
        meanwhile()
        assert c.start_loading() >= 0
        c.ack_load_queue.pop(0).finish_event.synchronize()
        self.host.free(host)
        return device, want

    def right(self, device: torch.Tensor, want: torch.Tensor) -> bool:
        got = torch.stack([b[device] for b in self.buffers])
        other = torch.ones(len(self.buffers[0]), dtype=torch.bool)
        other[device] = False
        return torch.equal(got, want) and all(bool((b[other] == -1).all()) for b in self.buffers)


@pytest.fixture
def loading(sidecar: rig.Sidecar) -> Iterator[Loading]:
    c = Loading(sidecar, "mha", "page_first_direct")
    yield c
    c.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_the_sidecar_loads(sidecar: rig.Sidecar, kind: str, layout: str) -> None:
    c = Loading(sidecar, kind, layout)
    try:
        for n in (1, PAGES, 20):
            device, want = c.load(n)
            assert c.right(device, want)
            c.slots.free(device)
        parts = LAYERS * (2 if kind == "mha" else 1)
        c.counts(3 * parts, 0)
    finally:
        c.close()
    assert loads._active is None


def test_a_small_load_is_sglangs(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MIN_BYTES", 1 << 40)
    assert loading.right(*loading.load())
    assert loading.loads.copied == 0


def partial(loading: Loading, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """The sidecar makes the first parts of each load, and refuses the load then."""
    link, client = loading.loads._link, loading.loads._link._client

    def load(
        parts: Any, pages: bytes, flag: int, value: int, arrived: int, req: str, *more: Any
    ) -> int:
        if good:
            client.load(parts[:good], pages, flag, value)
            rig.wait_for("parts", lambda: link.load_value(flag) == value + good, 5, 0.001)
        bad = [p._replace(length=1 << 40) for p in parts]
        return client.load(bad, pages, flag, value, arrived=arrived, req=req)

    monkeypatch.setattr(link, "load", load)


@pytest.mark.parametrize("good", [0, 1, 3, 2 * LAYERS - 1])
def test_parts_that_fail_are_copied(
    loading: Loading, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    with monkeypatch.context() as m:
        partial(loading, m, good)
        assert loading.right(*loading.load())
    loading.counts(good, 2 * LAYERS - good)
    assert loading.loads.ends["REFUSED"] == 1
    assert loading.right(*loading.load())
    loading.counts(good + 2 * LAYERS, 2 * LAYERS - good)


def test_a_load_that_is_not_taken_is_sglangs(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as m:
        m.setattr(loading.loads._link, "load", lambda *a: 0)
        assert loading.right(*loading.load())
    assert loading.right(*loading.load())
    loading.counts(2 * LAYERS, 0)


def test_a_lost_end_is_no_failure(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the flag is up, SGLang has gone on, and its pages may be another request's."""
    ended = loading.loads._link.loads_ended

    def failed(timeout_s: float) -> list[kvspray.Completion]:
        lost = {"status": CompletionStatus.FAILED, "reason": "the session was replaced"}
        return [dataclasses.replace(c, **lost) for c in ended(timeout_s)]

    monkeypatch.setattr(loading.loads._link, "loads_ended", failed)
    assert loading.right(*loading.load())
    loading.counts(2 * LAYERS, 0)


def test_after_a_failure_sglang_loads(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "PAUSE_S", 60)
    monkeypatch.setattr(loads, "MAX_PAUSE_S", 60)
    partial(loading, monkeypatch, 1)
    for _ in range(2):
        assert loading.right(*loading.load())
        loading.counts(1, 2 * LAYERS - 1)


def test_a_load_that_sglang_gives_up(
    loading: Loading, sidecar: rig.Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SGLang's call fails after a load's begin, nothing writes to the pages afterwards."""
    from sglang.srt.mem_cache.l2_transfer import L2Transfer

    monkeypatch.setattr(loads, "LEASE_S", 1.0)
    monkeypatch.setattr(loads.Loads, "wait", lambda *a: 1 / 0)
    slots = torch.arange(PAGE, 30 * PAGE)
    one = L2Transfer(loading.loads.host, loading.controller.mem_pool_device, slots, slots, None)
    sidecar.signal(signal.SIGSTOP)
    engine = loading.controller.l2_transfer_engine
    # SGLang synchronizes its stream first, which a stream on a CPU cannot do.
    with pytest.raises((ZeroDivisionError, AttributeError)):
        engine.submit_host_to_device([one], transfer_layer_id_max=LAYERS)
    assert not loading.loads._loads
    sidecar.kill()
    sidecar.start()


def test_layers_of_sglang(loading: Loading) -> None:
    """A pool's layers may be some of those that SGLang counts. All have to be asked for, by one
    transfer."""
    from sglang.srt.mem_cache.l2_transfer import L2Transfer

    mine, engine = loading.loads, loading.controller.l2_transfer_engine
    slots = torch.arange(PAGE, 3 * PAGE)
    device = loading.controller.mem_pool_device

    def load(count: int, places: dict[int, int], times: int = 1) -> bool:
        before = mine._value
        one = L2Transfer(mine.host, device, slots, slots, places.get)
        engine.submit_host_to_device([one] * times, transfer_layer_id_max=count)
        return mine._value > before

    assert load(LAYERS, {i: i for i in range(LAYERS)})
    assert load(2 * LAYERS, {2 * i: i for i in range(LAYERS)})
    assert not load(LAYERS - 1, {i: i for i in range(LAYERS)})
    assert not load(LAYERS, {i: i for i in range(LAYERS - 1)})
    assert not load(LAYERS, {i: i for i in range(LAYERS)}, 2)


def test_a_sidecar_that_dies(sidecar: rig.Sidecar, loading: Loading) -> None:
    """Every load is right, whatever becomes of the sidecar under it."""
    r = random.Random(3)
    for _ in range(30):
        rig.wait_for("a session", lambda: loading.loads.ready, 30)
        killer = threading.Timer(r.uniform(0, 0.006), sidecar.kill)
        device, want = loading.load(30, killer.start)
        assert loading.right(device, want)
        loading.slots.free(device)
        killer.join()
        sidecar.start()
    mine = loading.loads
    print(f"{mine.copied} parts by the sidecar, {mine.fallbacks} not: {dict(mine.ends)}")
    assert mine.copied and mine.fallbacks and mine.ends["LOST"] and not mine.ends["REFUSED"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_sidecar_that_stops(
    sidecar: rig.Sidecar, loading: Loading, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(loads, "STALL_S", 0.5)
    monkeypatch.setattr(loads, "LEASE_S", 1.0)
    sidecar.signal(signal.SIGSTOP)
    timer = threading.Timer(1.5, sidecar.signal, (signal.SIGCONT,))
    if goes_on:
        timer.start()
    start = time.monotonic()
    assert loading.right(*loading.load())
    assert time.monotonic() - start < 10
    if goes_on:  # then it may still make the load
        timer.join()
    else:  # ended by the shim
        loading.counts(0, 2 * LAYERS)
        sidecar.kill()
        sidecar.start()


def test_pools_that_the_sidecar_does_not_load(sidecar: rig.Sidecar) -> None:
    link = Link(sidecar.socket, "0", kvspray.Ranks(), logging.getLogger())
    for kind, layout, mapped, told in (
        ("mha", "page_first", True, "use --hicache-io-backend direct with"),
        ("mha", "layer_first", False, "not in memory that the sidecar can map"),
    ):
        host = host_pool(kind, layout, device_pool(kind), mapped)
        with pytest.raises(PoolError, match=told):
            loads.Loads(link, host)


@pytest.mark.parametrize(
    ("slots", "want"),
    [
        ([32, 33, 34, 35, 0, 1, 2, 3], [8, 0]),
        ([], None),
        ([0, 1, 2], None),
        ([1, 2, 3, 4], None),
        ([0, 1, 3, 2], None),
        ([40, 41, 42, 43], None),
        ([-4, -3, -2, -1], None),
    ],
)
def test_pages_of_slots(slots: list[int], want: list[int] | None) -> None:
    got = loads.pages_of(torch.tensor(slots, dtype=torch.int64), 4, 10)
    assert (None if got is None else got.tolist()) == want
