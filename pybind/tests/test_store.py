"""Pages of the store: a real sidecar, and sessions that end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ENGINE, LAYERS, TIMEOUT_S, Serve, Sidecar, layout, real_layout, until

import kvspray
from kvspray import CompletionStatus, _messages
from kvspray._lib import lib
from kvspray.store import Namespace, PageResult, Piece, Space, _Request

PAGE = 4096
BLOCKS = 64
NS = Namespace(
    weights="w",
    dtype="bfloat16",
    layout="l",
    page_tokens=16,
    page_bytes=PAGE,
    algorithm="sglang-sha256",
)


def hashes(*pages: int) -> list[bytes]:
    return [bytes(31) + bytes([p]) for p in pages]


class Engine:
    """A worker with host memory for pages, keys and values in two tensors."""

    def __init__(self, socket: pathlib.Path, real: bool = True) -> None:
        self.w = kvspray.WorkerClient(socket, engine=ENGINE, layers=LAYERS)
        self.cache, self.host = (
            self.w.alloc_region(LAYERS * 32768),
            self.w.alloc_region(BLOCKS * PAGE),
        )
        self.w.register([self.cache, self.host], real_layout() if real else layout())
        assert self.w.wait_connected(TIMEOUT_S), self.w.status()
        half = PAGE // 2
        self.pieces = [Piece(self.host, i * BLOCKS * half, half, half) for i in range(2)]
        self.space = Space(self.w, NS, self.pieces, BLOCKS)

    def write(self, block: int, page: bytes) -> None:
        half = PAGE // 2
        for i in range(2):
            at = i * BLOCKS * half + block * half
            self.host.buffer[at : at + half] = page[i * half :][:half]

    def read(self, block: int) -> bytes:
        half = PAGE // 2
        return b"".join(
            bytes(self.host.buffer[i * BLOCKS * half + block * half :][:half]) for i in range(2)
        )

    def end(self, lease: int) -> kvspray.Completion:
        assert lease > 0, (self.w.status(), self.space.error)
        assert self.w.wait(TIMEOUT_S), self.w.status()
        (done,) = self.w.poll()
        assert done.lease == lease and done.received
        return done

    def close(self) -> None:
        for thing in (self.w, self.cache, self.host):
            thing.close()


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(socket: pathlib.Path, **options: Any) -> Engine:
        made.append(Engine(socket, **options))
        return made[-1]

    yield make
    for e in made:
        e.close()


def outcomes(c: kvspray.Completion) -> list[int]:
    assert c.ok, c
    return [PageResult.of(b).outcome for b in c.pages]


def test_pages(serve: Serve, engines: Any) -> None:
    _, socket = serve("a", "store.memory=16MiB")
    first = engines(socket)
    assert first.space.ready(TIMEOUT_S), first.space.error
    pages = {p: os.urandom(PAGE) for p in (1, 2, 3)}
    for block, p in ((5, 1), (9, 2), (7, 3)):
        first.write(block, pages[p])
    put = first.end(first.space.put(hashes(1, 2, 3), [5, 9, 7], req="r"))
    assert outcomes(put) == [_messages.PAGE_STORED] * 3 and put.bytes == 3 * PAGE
    assert outcomes(first.end(first.space.put(hashes(2), [0], parent=hashes(1)[0]))) == [
        _messages.PAGE_EXISTED
    ]

    s = kvspray.SchedulerClient(socket, engine=ENGINE)
    asking = Space(s, NS)
    until(lambda: asking.ready(1), "a scheduler's space")
    question = asking.exists(hashes(1, 2, 9, 3), pin_s=60)
    found = question.result(TIMEOUT_S)
    assert (
        found and [found[i] for i in range(4)] == [True, True, False, True] and found.leading == 2
    )
    question.unpin()
    hour = asking.exists(hashes(1), pin_s=3600)
    assert hour.result(TIMEOUT_S) and not hour.refused
    hour.unpin()
    longer = asking.exists(hashes(1), pin_s=3601)
    assert longer.result(TIMEOUT_S) and longer.refused and "pin_ms" in longer.why
    other = Space(s, Namespace(**{**vars(NS), "weights": "fine-tuned"}))
    assert other.ready(TIMEOUT_S)
    both = asking.exists(hashes(1), also=[other]).result(TIMEOUT_S)
    assert both and both.leading == 0
    s.close()

    second = engines(socket)
    until(lambda: second.space.ready(1), "a worker's space")
    got = second.end(second.space.get(hashes(3, 1, 9), [20, 21, 22]))
    assert outcomes(got) == [_messages.PAGE_HIT, _messages.PAGE_HIT, _messages.PAGE_MISS]
    assert PageResult.of(got.pages[0]).tier == 1
    assert (second.read(20), second.read(21)) == (pages[3], pages[1])
    removed = second.space.remove()
    assert removed and (removed.members, removed.confirmed, removed.missing) == (1, 1, "")
    assert outcomes(second.end(second.space.get(hashes(1), [0]))) == [_messages.PAGE_MISS]


def test_a_question_that_pins_too_much_is_refused(serve: Serve, engines: Any) -> None:
    _, socket = serve("a", "store.memory=16MiB")
    e = engines(socket)
    assert e.space.ready(TIMEOUT_S)
    pages = list(range(BLOCKS))
    assert outcomes(e.end(e.space.put(hashes(*pages), pages))) == [_messages.PAGE_STORED] * BLOCKS
    fit = (4 << 20) // (BLOCKS * PAGE)  # a quarter of the memory
    for i in range(fit + 1):
        question = e.space.exists(hashes(*pages), pin_s=60)
        found = question.result(TIMEOUT_S)
        assert (
            found and found.leading == (BLOCKS if i < fit else 0) and question.refused == (i == fit)
        )
    assert "of this tenant" in question.why
    assert not e.space.opening and e.space.session == e.w.status().counters["connects"]


def test_another_session_opens_its_own_spaces(serve: Serve, engines: Any) -> None:
    """A sidecar that restarts: the pages of its memory are gone, and nothing else is found in their
    place."""
    p, socket = serve("a", "store.memory=16MiB")
    e = engines(socket)
    assert e.space.ready(TIMEOUT_S)
    e.write(0, os.urandom(PAGE))
    assert outcomes(e.end(e.space.put(hashes(1), [0]))) == [_messages.PAGE_STORED]
    stale = e.space._space
    p.kill()
    p.wait()
    until(lambda: not e.w.connected, "the end of the session")
    assert e.space.get(hashes(1), [1]) == 0
    question = e.space.exists(hashes(1)).result(0)
    assert question and question.leading == 0
    serve("a", "store.memory=16MiB")
    assert e.w.wait_connected(TIMEOUT_S)
    e.space._session, e.space._space = e.w._info().connects, stale  # as if it had not been noticed
    refused = e.end(e.space.get(hashes(1), [1]))
    assert (
        refused.status == CompletionStatus.REFUSED
        and "no blocks in this session" in refused.reason
        and refused.pages == b""
    )
    e.space._session = -1
    assert e.space.ready(TIMEOUT_S)
    assert outcomes(e.end(e.space.get(hashes(1), [1]))) == [_messages.PAGE_MISS]


def test_refused_namespaces_are_named(serve: Serve, engines: Any) -> None:
    _, socket = serve("a", "store.memory=16MiB")
    e = engines(socket)
    for change, want in (
        ({"page_bytes": PAGE + 1}, "page_bytes"),
        ({"algorithm": "vllm-sha256"}, "PYTHONHASHSEED"),
        ({"algorithm": "x"}, "is unknown"),
        ({"secret": b"short"}, "secret"),
    ):
        space = Space(e.w, Namespace(**{**vars(NS), **change}), e.pieces, BLOCKS)
        assert not space.ready(TIMEOUT_S) and want in space.error, space.error
        assert space.get(hashes(1), [0]) == 0 and not space.remove()


def test_generations(serve: Serve, engines: Any, tmp_path: pathlib.Path) -> None:
    """Pages of another generation are not found; they are not lost either."""
    disk = f"store.disk={tmp_path / 'pages'}=64MiB"
    for turn, generation in enumerate(("", "2", "")):
        more = [f"store.generation={generation}"] if generation else []
        p, socket = serve("a", "store.memory=16MiB", disk, *more)
        e = engines(socket)
        assert e.space.ready(TIMEOUT_S), e.space.error
        (got,) = e.end(e.space.get(hashes(1), [0])).pages
        hit = turn == 2
        assert PageResult.of(got).outcome == (_messages.PAGE_HIT if hit else _messages.PAGE_MISS)
        if turn == 0:
            (put,) = e.end(e.space.put(hashes(1), [0])).pages
            assert PageResult.of(put).outcome == _messages.PAGE_STORED
        e.close()
        p.terminate()
        p.wait(TIMEOUT_S)
        (tmp_path / "a.ready").unlink()


def test_a_sidecar_without_a_store(sidecar: Any, engines: Any, socket_path: pathlib.Path) -> None:
    s: Sidecar = sidecar()
    e = engines(socket_path, real=False)
    assert (
        not e.space.ready(1)
        and e.space.get(hashes(1), [0]) == 0
        and e.space.put(hashes(1), [0]) == 0
    )
    found = e.space.exists(hashes(1)).result(0)
    assert found and found.leading == 0 and not e.space.remove(0.1)
    assert e.w.connected
    s.kill()


def test_arguments(sidecar: Any, engines: Any, socket_path: pathlib.Path) -> None:
    sidecar()
    e = engines(socket_path, real=False)
    foreign = kvspray.Region.alloc(PAGE)
    for bad, want in (
        (lambda: Space(e.w, NS, e.pieces), "want both or none"),
        (
            lambda: Space(e.w, NS, [Piece(foreign, 0, PAGE, PAGE)], 1),
            r"pieces\[0\].*is not registered",
        ),
        (lambda: Space(e.w, NS, [Piece(e.host, -1, PAGE, PAGE)], 1), "store: "),
        (lambda: Space(e.w, NS).get(hashes(1), [0]), "make it with pieces"),
        (lambda: e.space.get(hashes(1, 2), [0]), "2 hashes and 1 blocks"),
    ):
        with pytest.raises(ValueError, match=want):
            bad()
    foreign.close()


def test_more_spaces_than_a_session_has(serve: Serve, engines: Any) -> None:
    """The one whose last use is the oldest is closed, and opened again when it is used."""
    _, socket = serve("a", "store.memory=16MiB")
    e = engines(socket)
    assert e.space.ready(TIMEOUT_S), e.space.error
    e.write(0, page := os.urandom(PAGE))
    e.end(e.space.put(hashes(1), [0]))
    s = kvspray.SchedulerClient(socket, engine=ENGINE)
    first = Space(s, NS)
    until(lambda: first.ready(1), "a scheduler's space")
    for i in range(3 * _messages.MAX_SPACES):
        for client, pieces in ((s, ()), (e.w, e.pieces)):
            ns = dataclasses.replace(NS, weights=f"step {i}")
            other = Space(client, ns, pieces, BLOCKS if pieces else 0)
            assert other.ready(TIMEOUT_S), other.error
            if i % 3 == 0:
                other.close()
    assert len(s._spaces) == len(e.w._spaces) == _messages.MAX_SPACES
    until(lambda: first.ready(1) and e.space.ready(1), "both again")
    found = first.exists(hashes(1)).result(TIMEOUT_S)
    assert found and found[0]
    assert (
        outcomes(e.end(e.space.get(hashes(1), [2]))) == [_messages.PAGE_HIT] and e.read(2) == page
    )
    s.close()


def test_ends_wait_for_the_socket(sidecar: Any, engines: Any, socket_path: pathlib.Path) -> None:
    """A pin or a namespace whose end is lost would stay until the sidecar needs its place."""
    s: Sidecar = sidecar(features=["store"])
    e = engines(socket_path, real=False)
    assert not e.space.ready(0)
    opened = s.expect("pages", kind=11)["named"]
    s.signal(signal.SIGSTOP)
    body = kvspray.protocol.pack({"hashes": bytes(32_000)})
    asked = list(
        itertools.takewhile(
            lambda rc: rc > 0, (lib.kvs_request(e.w._h, 13, body, len(body)) for _ in range(256))
        )
    )
    assert 0 < len(asked) < 256, "the socket is not full"
    e.space.close()
    assert lib.kvs_unpin(e.w._h, asked[0]) == 0
    s.signal(signal.SIGCONT)
    assert s.expect("pages", kind=20)["named"] == opened
    assert s.expect("pages", kind=15)["named"] == asked[0] & 0xFFFFFFFF
    assert e.w.connected


def test_ends_that_wait_are_bounded(sidecar: Any, engines: Any, socket_path: pathlib.Path) -> None:
    s: Sidecar = sidecar(features=["store"])
    e = engines(socket_path, real=False)
    asked = lib.kvs_request(e.w._h, 13, b"\x80", 1)
    s.signal(signal.SIGSTOP)
    ends = itertools.takewhile(
        lambda rc: rc == 0, (lib.kvs_unpin(e.w._h, asked) for _ in range(100_000))
    )
    assert 256 < sum(1 for _ in ends) < 100_000
    assert "256 ends of pins and namespaces wait" in e.w.status().error
    s.signal(signal.SIGCONT)


def test_a_space_that_another_thread_closes_while_it_opens(
    serve: Serve, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's use of one more space may close it at any time. What the sidecar has
    answered is of no use then."""
    _, socket = serve("a", "store.memory=16MiB")
    e = engines(socket)
    fetch = _Request.fetch

    def closed(self: _Request, timeout_s: float | None) -> Any:
        answer = fetch(self, timeout_s)
        e.space.close()
        return answer

    with monkeypatch.context() as m:
        m.setattr(_Request, "fetch", closed)
        assert not e.space.ready(TIMEOUT_S)
    assert e.space.ready(TIMEOUT_S), e.space.error
    assert outcomes(e.end(e.space.get(hashes(1), [0]))) == [_messages.PAGE_MISS]
