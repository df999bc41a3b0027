"""Copies between regions: what the client sends of them to a fake sidecar, and what a real one
does."""

from __future__ import annotations

import ctypes
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import ENGINE, LAYERS, TIMEOUT_S, Serve, Sidecar, layout, real_layout, skip, until

import kvspray
from kvspray import CompletionStatus

Make = Callable[..., Any]
HOST_BYTES = 1 << 20


@pytest.fixture
def two(
    socket_path: pathlib.Path,
) -> Iterator[Callable[[], tuple[kvspray.WorkerClient, kvspray.Region, kvspray.Region]]]:
    """A worker whose second region is host memory."""
    made: list[Any] = []

    def make() -> tuple[kvspray.WorkerClient, kvspray.Region, kvspray.Region]:
        client = kvspray.WorkerClient(socket_path, engine=ENGINE, layers=LAYERS)
        cache, host = client.alloc_region(LAYERS * 32768), client.alloc_region(HOST_BYTES)
        made.extend((client, cache, host))
        client.register([cache, host], layout())
        assert client.wait_connected(TIMEOUT_S), client.status()
        return client, cache, host

    yield make
    for thing in made:
        thing.close()


def ended(w: kvspray.WorkerClient, lease: int) -> kvspray.Completion:
    assert lease > 0, w.status()
    assert w.wait(TIMEOUT_S), w.status()
    got = w.poll()
    assert [c.lease for c in got] == [lease] and got[0].received
    return got[0]


def test_copy(sidecar: Make, two: Make) -> None:
    s: Sidecar = sidecar()
    w, cache, host = two()
    lease = w.copy(cache, host, [(0, 4096, 10), (1 << 40, 0, 3)], req="load", deadline_s=15)
    r = s.record("COPY", lease=lease)
    blocks = kvspray.protocol.pack_copies([(0, 4096, 10), (1 << 40, 0, 3)])
    assert r["body"] == {"src": 0, "dst": 1, "blocks": blocks, "deadline_ms": 15000, "req": "load"}
    assert kvspray.protocol.encode("COPY", r["body"]).hex() == r["hex"]
    s.complete(lease, "RECEIVED", 0, bytes=13, took_us=7, transport="host", reason="", recompute=[])
    assert ended(w, lease) == kvspray.Completion(
        lease, True, CompletionStatus.OK, bytes=13, us=7, transport="host"
    )
    assert w.poll() == []
    again = w.copy(host, cache, blocks)
    assert s.record("COPY", lease=again)["body"]["src"] == 1
    assert w.cancel(again, "not needed")
    assert s.record("CANCEL", lease=again)["body"] == {"reason": "not needed"}
    s.complete(
        again, "RECEIVED", 2, bytes=0, took_us=7, transport="", reason="cancelled", recompute=[]
    )
    assert ended(w, again).status == CompletionStatus.CANCELLED


def test_a_copy_ends_with_its_sidecar(sidecar: Make, two: Make) -> None:
    """The engine gets its blocks back when no process can write them any more, and not before."""
    s: Sidecar = sidecar()
    w, cache, host = two()
    lease = w.copy(cache, host, [(0, 0, 8)])
    s.record("COPY", lease=lease)
    s.command("close")
    until(
        lambda: w.status().counters["connects"] == 2,
        "another session of the same sidecar, which reports that it has fenced",
    )
    assert ended(w, lease).status == CompletionStatus.FAILED
    lease = w.copy(cache, host, [(0, 0, 8)])
    s.record("COPY", lease=lease)
    assert w.poll() == []
    s.kill()
    assert ended(w, lease).status == CompletionStatus.LOST


def test_more_copies_than_the_sidecar_takes(sidecar: Make, two: Make) -> None:
    """Its limit is in WELCOME. Of other leases there may be more."""
    s: Sidecar = sidecar(copies=2)
    w, cache, host = two()
    first = w.copy(cache, host, [(0, 0, 8)])
    assert first > 0 and w.load(parts(cache, host), [(0, 0)], 0, 0) > 0
    assert (
        w.copy(cache, host, [(0, 0, 8)])
        == w.load(parts(cache, host), [(0, 0)], 0, 0)
        == kvspray.LATER
    )
    assert w.expect(b"x" * 16, b"h" * 32, "a:1", 40, 0, [[1, 2, 3]]) > 0
    s.complete(first, "RECEIVED", 0, bytes=8, took_us=7, transport="host", reason="", recompute=[])
    ended(w, first)
    assert w.copy(cache, host, [(0, 0, 8)]) > 0


def test_a_sidecar_that_may_not_be_killed_copies_nothing(
    sidecar: Make, two: Make, tmp_path: pathlib.Path
) -> None:
    """If it hung, an engine that waits for the end would wait for ever."""
    if os.geteuid() != 0:
        skip("root", "needs root: a sidecar of another user, which this process may not signal")
    sidecar()
    code = f"""
import os, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import kvspray
from conftest import ENGINE, LAYERS, layout
os.setuid(65534)
w = kvspray.WorkerClient({str(tmp_path / "s.sock")!r}, engine=ENGINE, layers=LAYERS)
r = w.alloc_region(LAYERS * 32768)
w.register([r], layout())
assert w.wait_connected(30), w.status()
part = kvspray.LoadPart(r, 0, 4096, r, 8192, 4096, 4096)
for lease in (w.copy(r, r, [(0, 4096, 8)]), w.load([part], [(0, 0)], 0, 0)):
    assert lease == 0 and "may not kill the sidecar" in w.refusal, (lease, w.refusal)
assert w.expect(b"x" * 16, b"h" * 32, "a:1", 40, 0, [[1, 2, 3]]) > 0
os._exit(0)
"""
    for p in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        os.chmod(p, 0o755)
    os.chmod(tmp_path / "s.sock", 0o777)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("no sidecar", "not connected to a sidecar"), ("closed", "client is closed")],
)
def test_the_reason_of_a_refusal(sidecar: Make, two: Make, cause: str, reason: str) -> None:
    s: Sidecar = sidecar()
    w, cache, host = two()
    if cause == "no sidecar":
        s.kill()
        until(lambda: not w.connected, "the end of the session")
    if cause == "closed":
        w.close()
    assert w.copy(cache, host, [(0, 0, 8)]) == 0 and reason in w.refusal, w.refusal
    w.refusal = ""
    assert w.expect(b"x" * 16, b"h" * 32, "a:1", 40, 0, [[1, 2, 3]]) == 0 and reason in w.refusal, (
        w.refusal
    )


def test_bad_marks(sidecar: Make, two: Make) -> None:
    sidecar()
    w, _, _ = two()
    for bad in (-1, 1 << 64):
        with pytest.raises(ValueError, match="after = .*GpuSignals.mark"):
            w.expect(b"x" * 16, b"h" * 32, "127.0.0.1:7001", 16, 0, [[1]], after=bad)


def test_a_record_names_the_mark_that_it_waits_for(sidecar: Make, two: Make) -> None:
    s: Sidecar = sidecar()
    w, cache, host = two()
    lease = w.expect(b"x" * 16, b"h" * 32, "127.0.0.1:7001", 16, 0, [[1]], after=1 << 63)
    assert s.record("EXPECT", lease=lease)["body"]["stream_mark"] == 1 << 63
    lease = w.copy(cache, host, [(0, 0, 8)], after=9)
    assert s.record("COPY", lease=lease)["body"]["stream_mark"] == 9


def parts(cache: kvspray.Region, host: kvspray.Region) -> list[kvspray.LoadPart]:
    return [
        kvspray.LoadPart(host, 4096, 1 << 33, cache, 7, 512, 511),
        kvspray.LoadPart(host, 0, 1, cache, 2, 3, 4),
    ]


def test_load(sidecar: Make, two: Make) -> None:
    s: Sidecar = sidecar()
    w, cache, host = two()
    lease = w.load(
        parts(cache, host), [(1, 2), (3, 1 << 31)], 1, 1 << 40, req="load-1", deadline_s=15, after=9
    )
    r = s.record("LOAD", lease=lease)
    packed = kvspray.protocol.pack_parts(
        [(4096, 1 << 33, 7, 512, 511, 1, 0), (0, 1, 2, 3, 4, 1, 0)]
    )
    pages = kvspray.protocol.pack_pages([(1, 2), (3, 1 << 31)])
    assert (len(packed), len(pages)) == (2 * 48, 2 * 8)
    want = {
        "parts": packed,
        "pages": pages,
        "flag": 1,
        "value": 1 << 40,
        "deadline_ms": 15000,
        "req": "load-1",
        "stream_mark": 9,
    }
    assert r["body"] == want and kvspray.protocol.encode("LOAD", want).hex() == r["hex"]
    s.complete(
        lease, "RECEIVED", 0, bytes=13, took_us=7, transport="direct", reason="", recompute=[]
    )
    assert ended(w, lease).ok
    lease = w.load(parts(cache, host), pages, 0, 0)
    s.record("LOAD", lease=lease)
    s.kill()
    assert ended(w, lease).status == CompletionStatus.LOST


def test_arguments_of_a_load(sidecar: Make, two: Make) -> None:
    sidecar()
    w, cache, host = two()
    good, other = parts(cache, host), kvspray.Region.alloc(4096)
    for bad, want in (
        (
            lambda: w.load([good[0]._replace(src=other)], [(0, 0)], 0, 0),
            "src: .* is not registered",
        ),
        (
            lambda: w.load([good[0]._replace(dst=other)], [(0, 0)], 0, 0),
            "dst: .* is not registered",
        ),
        (lambda: w.load([], [(0, 0)], 0, 0), "a load of 0 parts"),
        (lambda: w.load(1025 * good[:1], [(0, 0)], 0, 0), "a load of 1025 parts, want 1 to 1024"),
        (lambda: w.load([good[0]._replace(length=-1)], [(0, 0)], 0, 0), "integers in"),
        (lambda: w.load(good, [], 0, 0), "a load of 0 pages"),
        (lambda: w.load(good, bytes(8 * 32769), 0, 0), "a load of 32769 pages"),
        (
            lambda: w.load(1024 * good[:1], bytes(8 * 129), 0, 0),
            "a load of 129 pages of 1024 parts, at most 131072",
        ),
        (lambda: w.load(good, b"1234567", 0, 0), "pages, want 1 to 32768"),
        (lambda: w.load(good, [(0, 1 << 32)], 0, 0), "integers in"),
        (lambda: w.load(good, [(0, 0)], 0, 0, deadline_s=0), "deadline"),
        (lambda: w.load(good, [(0, 0)], 1 << 32, 0), "want a flag below"),
        (lambda: w.load(good, [(0, 0)], 0, -1), "a value below"),
    ):
        with pytest.raises(ValueError, match=want):
            bad()
    other.close()
    w.close()
    assert w.load(good, [(0, 0)], 0, 0) == 0


def test_arguments(sidecar: Make, two: Make) -> None:
    sidecar()
    w, cache, host = two()
    other = kvspray.Region.alloc(4096)
    for bad, want in (
        (lambda: w.copy(other, host, [(0, 0, 1)]), "src: .* is not registered"),
        (lambda: w.copy(cache, other, [(0, 0, 1)]), "dst: .* is not registered"),
        (lambda: w.copy(cache, host, []), "a copy of 0 blocks"),
        (lambda: w.copy(cache, host, b"\0" * 25), "blocks, want 1 to 32768"),
        (lambda: w.copy(cache, host, bytes(24 * 32769)), "a copy of 32769 blocks"),
        (lambda: w.copy(cache, host, [(0, 0)]), "source offset, destination offset, length"),
        (lambda: w.copy(cache, host, [(0, -1, 1)]), "integers in"),
        (lambda: w.copy(cache, host, [(0, 0, 1)], deadline_s=0), "deadline"),
    ):
        with pytest.raises(ValueError, match=want):
            bad()
    other.close()
    w.close()
    assert w.copy(cache, host, [(0, 0, 1)]) == 0


def test_with_a_real_sidecar(serve: Serve) -> None:
    """Random blocks between memory that is shared and that is not arrive, and nothing else
    changes."""
    real, socket_path = serve("s")
    rng = random.Random(5)
    page = bytearray(HOST_BYTES)
    plain = [(ctypes.c_uint8 * HOST_BYTES).from_buffer(page), (ctypes.c_uint8 * HOST_BYTES)()]
    with kvspray.WorkerClient(socket_path, engine=ENGINE, layers=LAYERS) as w:
        regions = [w.alloc_region(HOST_BYTES), w.alloc_region(HOST_BYTES)]
        regions += [w.process_region(ctypes.addressof(p), HOST_BYTES) for p in plain]
        w.register(regions, real_layout())
        assert w.wait_connected(TIMEOUT_S), w.status()
        for r in regions:
            r.buffer[:] = rng.randbytes(HOST_BYTES)
        cell = 16 << 10
        for a, b in ((0, 1), (0, 2), (2, 1), (2, 3), (3, 3)):
            src, dst = regions[a], regions[b]
            # Within one region, what is read and what is written lie apart: even cells and odd
            # ones.
            cells = range(0, HOST_BYTES, 2 * cell)
            at, to = rng.sample(cells, 20), [c + cell for c in rng.sample(cells, 20)]
            blocks = [(x, y, rng.randint(1, cell)) for x, y in zip(at, to, strict=True)]
            want = bytearray(dst.buffer)
            for x, y, n in blocks:
                want[y : y + n] = src.buffer[x : x + n]
            c = ended(w, w.copy(src, dst, blocks))
            assert c.ok and c.bytes == sum(n for _, _, n in blocks) and c.transport == "host", c
            assert bytes(dst.buffer) == bytes(want)
        cut = [kvspray.LoadPart(regions[0], i, 100, regions[1], 50 * i, 10, 10) for i in range(9)]
        c = ended(w, w.load(cut, [(7, 1), (1, 0)], 2, 0))
        assert c.ok and c.bytes == 9 * 2 * 10, c
        assert all(
            regions[1].buffer[50 * i + 10 : 50 * i + 20] == regions[0].buffer[700 + i : 710 + i]
            for i in range(9)
        )
        assert [w.load_value(i) for i in range(LAYERS)] == [
            9 if i == 2 else 0 for i in range(LAYERS)
        ]
        c = ended(w, w.load(cut, [(HOST_BYTES // 100 + 1, 0)], 0, 0))
        assert (
            c.status == CompletionStatus.REFUSED and "parts[0]" in c.reason and w.load_value(0) == 0
        ), c
        c = ended(w, w.copy(regions[0], regions[1], [(0, 0, 1), (HOST_BYTES, 0, 1)]))
        assert c.status == CompletionStatus.REFUSED and "blocks[1]" in c.reason and c.bytes == 0, c
        # A sidecar that is killed in the middle of a queue of copies: each of them ends, once.
        leases = {
            w.copy(regions[0], regions[2], [(i, i, 1) for i in range(0, HOST_BYTES, 64)])
            for _ in range(20)
        }
        assert 0 not in leases, w.status()
        real.kill()
        done: dict[int, CompletionStatus] = {}
        while len(done) < len(leases):
            assert w.wait(TIMEOUT_S), w.status()
            for c in w.poll():
                assert c.lease in leases and c.lease not in done
                done[c.lease] = c.status
        assert set(done.values()) <= {CompletionStatus.OK, CompletionStatus.LOST}
    for r in regions:
        r.close()


def word() -> ctypes.c_uint64:
    return ctypes.c_uint64(1 << 62)


def test_what_waits_for_a_load_goes_on(sidecar: Make, two: Make) -> None:
    """Whatever becomes of the load, and without a call of the engine. A load counts after the ones
    before it."""
    s: Sidecar = sidecar()
    w, cache, host = two()
    arrived = [word() for _ in range(5)]
    refused = {"bytes": 0, "took_us": 1, "transport": "", "reason": "no", "recompute": []}
    value = 10
    leases: list[int] = []

    def load() -> int:
        nonlocal value
        leases.append(
            w.load(
                parts(cache, host),
                [(0, 0)],
                1,
                value,
                arrived=ctypes.addressof(arrived[len(leases)]),
            )
        )
        value += 2
        return leases[-1]

    def settled(flag: int, *words: int) -> None:
        until(lambda: w.load_value(1) == flag, f"flag {flag}")
        assert [x.value for x in arrived[: len(words)]] == list(words)

    def end(lease: int, status: int) -> None:
        s.complete(lease, "RECEIVED", status, **refused)
        assert w.wait(TIMEOUT_S) and [c.lease for c in w.poll()] == [lease]

    def arrive(flag: int, value: int) -> None:
        """As the sidecar raises a load flag."""
        base, _ = w.flags
        loads = ctypes.c_uint64.from_address(base + 40).value  # the header's load_flags
        ctypes.c_uint64.from_address(base + loads + 64 * flag).value = value

    first = load()
    arrive(1, 11)  # one of the parts
    s.complete(first, "RECEIVED", 4, **refused)
    settled(12, 1)
    assert [c.lease for c in w.poll()] == [first]
    second, third = load(), load()
    end(third, 4)
    assert w.load_value(1) == 12, "the load before it has not ended"
    arrive(1, 14)
    end(second, 0)
    settled(16, 1, 1 << 62, 0)
    load()
    load()
    s.kill()
    settled(20, 1, 1 << 62, 0, 0, 0)


@pytest.mark.parametrize("answers", [False, True])
def test_a_sidecar_that_ends_no_load_is_killed(
    sidecar: Make, socket_path: pathlib.Path, answers: bool
) -> None:
    """Also one that answers, because a stream waits."""
    s: Sidecar = sidecar()
    x = word()
    with kvspray.WorkerClient(socket_path, engine=ENGINE, layers=LAYERS, grace_s=0.1) as w:
        cache, host = w.alloc_region(LAYERS * 32768), w.alloc_region(HOST_BYTES)
        w.register([cache, host], layout())
        assert w.wait_connected(TIMEOUT_S), w.status()
        lease = w.load(
            parts(cache, host), [(0, 0)], 0, 0, arrived=ctypes.addressof(x), deadline_s=0.2
        )
        s.record("LOAD", lease=lease)
        if answers:
            s.command("option", set={"fencing": True})
        else:
            s.signal(signal.SIGSTOP)
        until(lambda: w.load_value(0) == 2, "the flag, without a call of the engine")
        assert x.value == 0 and w.status().counters["kills"] == 1
        assert ended(w, lease).status == CompletionStatus.LOST


def test_close_waits_for_loads(sidecar: Make, two: Make) -> None:
    """Else a stream would wait for ever."""
    s: Sidecar = sidecar()
    w, cache, host = two()
    x = word()
    lease = w.load(
        parts(cache, host), [(0, 0)], 0, 0, arrived=ctypes.addressof(x), deadline_s=TIMEOUT_S
    )
    s.record("LOAD", lease=lease)
    closer = threading.Thread(target=w.close)
    closer.start()
    closer.join(0.3)
    assert closer.is_alive() and x.value == 1 << 62
    s.complete(lease, "RECEIVED", 4, bytes=0, took_us=1, transport="", reason="no", recompute=[])
    closer.join(TIMEOUT_S)
    assert not closer.is_alive() and x.value == 0
