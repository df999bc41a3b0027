"""Regions: parts of one file, more of them than a packet has descriptors, and those that come and
go."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ENGINE, LAYERS, TIMEOUT_S, Serve, Sidecar, layout, real_layout, until
from leases import expect, intent, poll_one

import kvspray
from kvspray import CompletionStatus, _messages
from kvspray.store import Namespace, PageResult, Piece, Space

PAGE = 4096
PARTS = 1000
NS = Namespace(
    weights="w",
    dtype="bfloat16",
    layout="l",
    page_tokens=16,
    page_bytes=PAGE,
    algorithm="sglang-sha256",
)
Make = Any


def hashes(*pages: int) -> list[bytes]:
    return [bytes(30) + p.to_bytes(2, "big") for p in pages]


@pytest.fixture
def lender(socket_path: pathlib.Path) -> Iterator[Any]:
    """Workers, and regions that are closed after them."""
    workers: list[kvspray.WorkerClient] = []
    regions: list[kvspray.Region] = []

    def make(socket: pathlib.Path = socket_path) -> kvspray.WorkerClient:
        workers.append(kvspray.WorkerClient(socket, engine=ENGINE, layers=LAYERS))
        return workers[-1]

    def alloc(nbytes: int) -> kvspray.Region:
        regions.append(kvspray.Region.alloc(nbytes))
        return regions[-1]

    make.alloc = alloc  # type: ignore[attr-defined]
    yield make
    for w in workers:
        w.close()
    for r in regions:
        r.close()


def end(w: kvspray.WorkerClient, lease: int) -> kvspray.Completion:
    assert lease > 0, w.status()
    assert w.wait(TIMEOUT_S), w.status()
    (done,) = w.poll()
    assert done.lease == lease
    return done


def outcomes(c: kvspray.Completion) -> list[int]:
    assert c.ok, c
    return [PageResult.of(b).outcome for b in c.pages]


def test_packets(sidecar: Make, lender: Make) -> None:
    """Each packet has the descriptors of its own regions, each file's once."""
    s: Sidecar = sidecar()
    w = lender()
    files = [lender.alloc(PAGE) for _ in range(40)]
    whole = lender.alloc(300 * PAGE)
    parts = [whole.part(i * PAGE, PAGE) for i in range(300)]
    process = [w.process_region(files[0].addr + 64 * i, 64) for i in range(20)]
    regions = [*files, *parts, *process]
    w.register(regions, layout())
    got: list[dict[str, Any]] = []
    while len(got) < len(regions):
        packet = s.expect("add_regions")
        assert packet["first"] == len(got) and packet["fds"] <= 32
        assert {r["fd"] for r in packet["regions"]} == set(range(packet["fds"]))
        got += packet["regions"]
    assert [r["region"] for r in got] == [r.id.hex() for r in regions]
    assert [r.get("offset", 0) for r in got[40:340]] == [i * PAGE for i in range(300)]
    reg = s.expect("register")
    assert reg["first"] == len(regions) and reg["regions"] == [] and reg["fds"] == 4
    assert w.wait_connected(TIMEOUT_S)

    more = lender.alloc(2 * PAGE)
    w.add_regions([more.part(0, PAGE), more.part(PAGE, PAGE)])
    packet = s.expect("add_regions")
    assert packet["first"] == len(regions) and packet["fds"] == 1
    for r in process:
        r.close()


def test_few_regions_are_in_register(sidecar: Make, lender: Make) -> None:
    s: Sidecar = sidecar()
    w = lender()
    whole = lender.alloc(4 * PAGE)
    w.register([whole.part(0, PAGE), whole.part(2 * PAGE, PAGE)], layout())
    reg = s.expect("register")
    assert reg["first"] == 0 and reg["fds"] == 5 and [r["fd"] for r in reg["regions"]] == [4, 4]


def test_drop_waits(sidecar: Make, lender: Make) -> None:
    s: Sidecar = sidecar()
    w = lender()
    w.register([])
    assert s.expect("register")["layout"] is None and w.wait_connected(TIMEOUT_S)
    a, b = lender.alloc(PAGE), lender.alloc(PAGE)
    w.add_regions([a, b])
    s.expect("add_regions")
    assert not w.drop_regions([b], 0.01)  # no DONE
    assert s.expect("drop_regions")["regions"] == [1]
    for bad in (lambda: w.drop_regions([b]), lambda: w.copy(a, b, [(0, 0, 1)])):
        with pytest.raises(ValueError, match="is not registered"):
            bad()
    s.command("close")
    # What is left, in the next session.
    assert s.expect("add_regions")["regions"][0]["region"] == a.id.hex()
    w.add_regions([b])
    assert s.expect("add_regions")["first"] == 2  # no number is used twice


@pytest.mark.parametrize("no_done", [False, True])
def test_waiting_for_the_sidecar(sidecar: Make, lender: Make, no_done: bool) -> None:
    sidecar(no_done=no_done)
    w = lender()
    assert not w.wait_connected(0)
    w.register([])
    assert w.wait_connected(TIMEOUT_S)
    for _ in range(3):
        assert (
            w.add_regions([lender.alloc(PAGE), lender.alloc(PAGE)], 0.1 if no_done else TIMEOUT_S)
            != no_done
        )


def test_a_copy_of_added_regions(serve: Serve, lender: Make) -> None:
    """A sidecar maps regions while it takes requests: one that waits for it is never refused."""
    _, socket = serve("a")
    w = lender(socket)
    w.register([])
    assert w.wait_connected(TIMEOUT_S), w.status()
    for i in range(100):
        a, b = lender.alloc(PAGE), lender.alloc(PAGE)
        a.buffer[:4] = i.to_bytes(4, "little")
        assert w.add_regions([a, b], TIMEOUT_S)
        assert w.copy(a, b, [(0, 0, PAGE)])
        assert poll_one(w).ok and bytes(b.buffer[:4]) == i.to_bytes(4, "little")
        assert w.drop_regions([a, b], TIMEOUT_S)


def test_store_without_a_layout(serve: Serve, lender: Make) -> None:
    """A thousand parts of one file are pools of the store; regions go and come, over restarts of
    the sidecar, and each is its own memory."""
    p, socket = serve("a", "store.memory=16MiB")
    w = lender(socket)
    w.register([])
    assert w.wait_connected(TIMEOUT_S), w.status()
    whole, small = lender.alloc(PARTS * PAGE), lender.alloc(PAGE)
    parts = [whole.part(i * PAGE, PAGE) for i in range(PARTS)]
    w.add_regions([small])
    w.add_regions(parts)
    before = os.urandom(PARTS * PAGE)
    whole.buffer[:] = before

    def space(region: kvspray.Region) -> Space:
        out = Space(w, NS, [Piece(region, 0, PAGE, PAGE)], 1)
        assert out.ready(TIMEOUT_S), out.error
        return out

    def put_and_get() -> None:
        assert outcomes(end(w, space(parts[999]).put(hashes(9), [0]))) == [_messages.PAGE_STORED]
        assert outcomes(end(w, space(parts[3]).get(hashes(9), [0]))) == [_messages.PAGE_HIT]
        now = bytes(whole.buffer)
        page = before[999 * PAGE :]
        assert now == before[: 3 * PAGE] + page + before[4 * PAGE :], (
            "another part was read or written"
        )
        whole.buffer[:] = before

    put_and_get()
    used = space(small)
    assert w.drop_regions([small], TIMEOUT_S)
    refused = end(w, used.get(hashes(9), [0]))
    assert (
        refused.status == CompletionStatus.REFUSED and "no blocks in this session" in refused.reason
    )
    p.kill()
    p.wait()
    until(lambda: not w.connected, "the end of the session")
    serve("a", "store.memory=16MiB")
    assert w.wait_connected(TIMEOUT_S)
    put_and_get()
    w.add_regions([small.part(0, PAGE)])


def test_arguments(sidecar: Make, lender: Make) -> None:
    sidecar()
    w = lender()
    region = lender.alloc(2 * PAGE)
    part = region.part(PAGE, PAGE)
    foreign = w.process_region(region.addr, 64)
    for bad in (
        lambda: region.part(1, PAGE),
        lambda: region.part(PAGE, PAGE + 1),
        lambda: region.part(PAGE, 0),
        lambda: part.part(PAGE, 1),
        lambda: foreign.part(0, 1),
        lambda: w.add_regions([region]),  # before register()
        lambda: w.register([region] * 1025, layout()),
        lambda: w.register([], layout()),
    ):
        with pytest.raises(kvspray.KvsprayError):
            bad()
    w.register([region])
    for numbers in ([], [0]):  # REGISTER's stay
        with pytest.raises(kvspray.KvsprayError):
            w.drop_regions([region] * len(numbers))
    assert w.wait_connected(20)  # a new session forgets the text of an error
    many = [lender.alloc(PAGE) for _ in range(257)]
    with pytest.raises(kvspray.KvsprayError, match="256 files"):
        w.add_regions(many)
    w.add_regions(many[:255])
    foreign.close()
    part.close()
    assert bytes(region.buffer[:4]) == bytes(4)  # a part that is closed takes nothing of the whole


def test_memory_that_is_taken_back_and_lent_again(sidecar: Make, lender: Make) -> None:
    s: Sidecar = sidecar()
    w = lender()
    old, new = lender.alloc(PAGE * LAYERS * 8), lender.alloc(PAGE * LAYERS * 8)
    with pytest.raises(kvspray.KvsprayError):
        w.replace([old], layout())  # before register()
    w.register([old], layout())
    assert s.expect("register")["layout"] == layout() and w.wait_connected(TIMEOUT_S)
    src, dst = intent(w), expect(w)
    w.replace([])
    assert not w.connected
    reg = s.expect("register")
    assert reg["regions"] == [] and reg["layout"] is None and reg["first"] == 0
    assert w.wait_connected(TIMEOUT_S)
    ends = {c.lease: c.status for c in w.poll()}
    assert ends == {src: CompletionStatus.CANCELLED, dst: CompletionStatus.FAILED}
    with pytest.raises(ValueError, match="is not registered"):
        w.copy(old, old, [(0, PAGE, PAGE)])
    old.close()
    other = {**layout(), "identity": {"model": "tiny", "weights": "step-2"}}
    w.replace([new], other)
    reg = s.expect("register")
    assert [r["region"] for r in reg["regions"]] == [new.id.hex()] and reg["layout"] == other
    assert w.wait_connected(TIMEOUT_S)
    added = lender.alloc(PAGE)
    w.add_regions([added])
    with pytest.raises(kvspray.KvsprayError, match="drop them first"):
        w.replace([])
    w.drop_regions([added], 0)
    w.replace([])


def test_a_sidecar_unmaps_what_is_taken_back(serve: Serve, lender: Make) -> None:
    """Also a sidecar without a store, for which a worker without a layout has no use."""
    p, socket = serve("a")
    w = lender(socket)

    def mapped() -> int:
        maps = pathlib.Path(f"/proc/{p.pid}/maps").read_text()
        return maps.count("kvspray-region")

    w.register([])
    for _ in range(3):
        w.replace([lender.alloc(1 << 20)], real_layout())
        assert w.wait_connected(TIMEOUT_S), w.status()
        assert mapped() == 1
        w.replace([])
        assert w.wait_connected(TIMEOUT_S), w.status()
        assert mapped() == 0
