"""Agents of NIXL with the back end KVSPRAY between two real sidecars: bytes, notifications, bounds,
and what dies or ends while a transfer is under way."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from agents import Agent, until
from cluster import Sidecar
from conftest import MakeAgent

PAGE = 4096
BIG = 64 << 20
HERE = pathlib.Path(__file__).parent


def fill(a: Agent, seed: int) -> None:
    a.memory[:] = np.random.default_rng(seed).integers(0, 256, a.nbytes, dtype=np.uint8)


def places(n: int, seed: int, nbytes: int = PAGE) -> np.ndarray:
    return np.random.default_rng(seed).permutation(n) * nbytes


def pages(a: Agent, offsets: np.ndarray, nbytes: int = PAGE) -> np.ndarray:
    return a.memory.reshape(-1, nbytes)[offsets // nbytes]


def test_writes_and_reads(agent: MakeAgent) -> None:
    """Pages from random places to random places, each way, with notifications."""
    a, b = agent("a", 0), agent("b", 1)
    assert a.meet(b) == "b"
    here, there = places(256, 1)[:100], places(256, 2)[:100]
    fill(a, 1)
    fill(b, 2)
    before = b.memory.copy()
    assert a.move("WRITE", here, b, there, PAGE, b"written") == "DONE"
    assert b.gather(1) == [("a", b"written")]
    before.reshape(-1, PAGE)[there // PAGE] = pages(a, here)
    assert np.array_equal(b.memory, before)

    fill(b, 3)
    before = a.memory.copy()
    assert a.move("READ", here, b, there, PAGE, b"read") == "DONE"
    assert b.gather(1) == [("a", b"read")]
    before.reshape(-1, PAGE)[here // PAGE] = pages(b, there)
    assert np.array_equal(a.memory, before)


def test_posted_again(agent: MakeAgent) -> None:
    """A handle can be posted again once it has ended; each post moves what is there then."""
    a, b = agent("a", 0), agent("b", 1)
    a.meet(b)
    handle = a.transfer("WRITE", np.zeros(1), b, np.zeros(1), PAGE)
    for i in range(3):
        fill(a, i)
        assert a.post(handle) in ("PROC", "DONE")
        assert a.end(handle) == "DONE"
        assert np.array_equal(a.memory[:PAGE], b.memory[:PAGE])
    a.nixl.release_xfer_handle(handle)


def test_within_an_agent_and_a_node(agent: MakeAgent) -> None:
    a, other = agent("a", 0), agent("other", 0)
    fill(a, 1)
    half = np.arange(128) * PAGE
    assert a.move("WRITE", half, a, half + 128 * PAGE, PAGE, b"self") == "DONE"
    assert np.array_equal(a.memory[: 128 * PAGE], a.memory[128 * PAGE :])
    assert a.gather(1) == [("a", b"self")]
    a.meet(other)
    assert a.whole("WRITE", other, b"node") == "DONE"
    assert np.array_equal(a.memory, other.memory)
    assert other.gather(1) == [("a", b"node")]


def test_200000_descriptors(agent: MakeAgent) -> None:
    """Many batches, each way, and one notification once all have arrived."""
    n, size = 200_000, 64
    a, b = agent("a", 0, n * size), agent("b", 1, n * size)
    a.meet(b)
    here, there = places(n, 1, size), places(n, 2, size)
    fill(a, 1)
    assert a.move("WRITE", here, b, there, size, b"all") == "DONE"
    assert b.gather(1) == [("a", b"all")]
    assert np.array_equal(pages(a, here, size), pages(b, there, size))
    fill(b, 2)
    assert a.move("READ", here, b, there, size) == "DONE"
    assert np.array_equal(pages(a, here, size), pages(b, there, size))


def test_many_registrations(agent: MakeAgent) -> None:
    """A transfer between as many ranges as an agent can have; one more is refused, and so is memory
    that is registered already."""
    from nixl._bindings import nixlBackendError

    a, b = agent("a", 0), agent("b", 1)
    for x in (a, b):
        x.deregister()
        rows = [(x.address + i * PAGE, PAGE, 0, "") for i in range(255)]
        x.registered = x.nixl.register_memory(rows, "DRAM")
    fill(a, 1)
    a.meet(b)
    here, there = places(255, 1), places(255, 2)
    assert a.move("WRITE", here, b, there, PAGE) == "DONE"
    assert np.array_equal(pages(a, here), pages(b, there))
    with pytest.raises(nixlBackendError):
        a.nixl.register_memory([(a.address + 255 * PAGE, PAGE, 0, "")], "DRAM")
    b.deregister()
    b.register()
    with pytest.raises(nixlBackendError):
        b.nixl.register_memory([(b.address + PAGE, PAGE, 0, "")], "DRAM")


@pytest.mark.parametrize("name", ["x", "y" * 63, "ü/\n\" '{}" * 25, "z" * 3001])
def test_agent_names(agent: MakeAgent, name: str) -> None:
    a, b = agent(name, 0), agent(name + "2", 1)
    assert a.meet(b) == name + "2"
    fill(a, 1)
    assert a.whole("WRITE", b, b"note") == "DONE"
    assert b.gather(1) == [(name, b"note")]
    assert np.array_equal(a.memory, b.memory)


def test_notifications_of_all_sizes(agent: MakeAgent) -> None:
    from nixl._bindings import nixlInvalidParamError, nixlNotFoundError

    a, b = agent("a", 0), agent("b", 1)
    a.meet(b)
    largest = (64 << 10) - 4 - len("a")  # the length of the agent's name, and the name
    for size in (0, 1, 63, 64, 65, 4095, 4096, 4097, largest):
        note = os.urandom(size)
        a.nixl.send_notif("b", note)
        assert b.gather(1) == [("a", note)]
    with pytest.raises(nixlInvalidParamError):
        a.nixl.send_notif("b", bytes(largest + 1))
    with pytest.raises(nixlInvalidParamError):
        a.nixl.transfer(a.transfer("WRITE", np.zeros(1), b, np.zeros(1), PAGE, bytes(largest + 1)))
    with pytest.raises(nixlNotFoundError):
        a.nixl.send_notif("nobody", b"")
    a.nixl.send_notif("b", b"last")
    assert b.gather(1) == [("a", b"last")]


def test_notifications_that_nobody_fetches(agent: MakeAgent) -> None:
    """More than a sidecar keeps, and more than a box has places for: each comes once."""
    a, b = agent("a", 0), agent("b", 1)
    a.meet(b)
    sent = [f"{i}".encode() * (1 + i % 700) for i in range(2000)]
    for note in sent:
        a.nixl.send_notif("b", note)
    got = b.gather(len(sent))
    assert sorted(got) == sorted(("a", note) for note in sent)
    a.nixl.send_notif("b", b"end")
    assert b.gather(1) == [("a", b"end")]


def begin(a: Agent, op: str, b: Agent) -> object:
    """A transfer of all memory, in many batches, of which some bytes have arrived."""
    target = a if op == "READ" else b
    offsets = np.arange(BIG // PAGE) * PAGE
    handle = a.transfer(op, offsets, b, offsets, PAGE)
    assert a.post(handle) == "PROC"
    until(
        lambda: target.memory[0] == 2 or a.state(handle) != "PROC",
        "bytes of the transfer",
    )
    return handle


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("whose", ["own", "other"])
def test_deregistered_under_way(agent: MakeAgent, op: str, whose: str) -> None:
    """Once deregistration has returned, no byte of the memory changes, and no later transfer with
    the old metadata reaches it, although it is registered again."""
    a, b = agent("a", 0, BIG), agent("b", 1, BIG)
    a.meet(b)
    source, target = (a, b) if op == "WRITE" else (b, a)
    source.memory[:], target.memory[:] = 2, 1
    handle = begin(a, op, b)
    (a if whose == "own" else b).deregister()
    target.memory[:] = 3
    state = a.end(handle)
    a.nixl.release_xfer_handle(handle)
    assert state in ("ERR", "DONE")
    if (whose == "own") == (target is a):
        assert (target.memory == 3).all()
    (a if whose == "own" else b).register()
    if whose == "other":
        target.memory[:] = 4
        assert a.whole(op, b) == "ERR"
        assert (target.memory == 4).all()


def released(a: Agent, handle: object) -> bool:
    """Whether a transfer is released. Not: it is not fenced yet."""
    from nixl._bindings import nixlRepostActiveError

    try:
        a.nixl.release_xfer_handle(handle)
    except nixlRepostActiveError:
        return False
    return True


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_released_under_way(agent: MakeAgent, op: str) -> None:
    """Once a release has returned, the transfer changes no byte."""
    a, b = agent("a", 0, BIG), agent("b", 1, BIG)
    a.meet(b)
    source, target = (a, b) if op == "WRITE" else (b, a)
    source.memory[:], target.memory[:] = 2, 1
    handle = begin(a, op, b)
    while not released(a, handle):
        pass
    target.memory[:] = 3
    source.memory[:] = 5
    assert a.move(op, np.zeros(1), b, np.zeros(1), PAGE) == "DONE"  # the others have had time
    assert (target.memory[:PAGE] == 5).all() and (target.memory[PAGE:] == 3).all()


def test_released_before_the_fence(agent: MakeAgent, sidecars: list[Sidecar]) -> None:
    """While the other sidecar is stopped, each release reports that the transfer is not fenced, and
    the handle stays valid. Once it is released, the transfer changes no byte."""
    a, b = agent("a", 0, BIG), agent("b", 1, BIG)
    a.meet(b)
    a.memory[:], b.memory[:] = 1, 2
    handle = begin(a, "READ", b)
    sidecars[1].signal(signal.SIGSTOP)

    # True if all bytes of the open batches were on the way.
    done = released(a, handle) or released(a, handle)
    sidecars[1].signal(signal.SIGCONT)
    while not done:
        done = released(a, handle)
    b.memory[:] = 3
    assert a.whole("READ", b) == "DONE"
    assert (a.memory == 3).all()


@pytest.mark.parametrize("whose", [0, 1])
def test_sidecar_dies(agent: MakeAgent, sidecars: list[Sidecar], whose: int) -> None:
    """NIXL reports an error, and the processes go on: after the sidecar's restart the same metadata
    serve again."""
    a, b = agent("a", 0, BIG), agent("b", 1, BIG)
    a.meet(b)
    a.memory[:], b.memory[:] = 2, 1
    handle = begin(a, "WRITE", b)
    sidecars[whose].kill()
    if (state := a.end(handle)) == "DONE":  # it was faster
        assert (b.memory == 2).all()
    else:
        assert state == "ERR"
    a.nixl.release_xfer_handle(handle)
    assert a.move("WRITE", np.zeros(1), b, np.zeros(1), PAGE) == "ERR"
    sidecars[whose].start()
    b.memory[:] = 1
    fill(a, 1)
    until(lambda: a.whole("WRITE", b, b"again") == "DONE", "a transfer after the restart")
    assert np.array_equal(a.memory, b.memory)
    assert b.gather(1) == [("a", b"again")]


@pytest.mark.parametrize("whose", ["own", "other"])
def test_deregistered_without_sidecar(
    agent: MakeAgent, sidecars: list[Sidecar], whose: str
) -> None:
    """The sidecar's end proves that nothing uses the memory."""
    a, b = agent("a", 0), agent("b", 1)
    a.meet(b)
    sidecars[0].kill()
    (a if whose == "own" else b).deregister()
    sidecars[0].start()
    (a if whose == "own" else b).register()
    for x in (a, b):
        until(lambda x=x: x.move("WRITE", np.zeros(1), x, np.full(1, PAGE), PAGE) == "DONE",
              "a transfer within an agent")  # fmt: skip


def test_unknown_peer(agent: MakeAgent, sidecars: list[Sidecar]) -> None:
    from nixl._bindings import nixlNotFoundError, nixlRemoteDisconnectError

    a, b = agent("a", 0), agent("b", 1)
    with pytest.raises(nixlNotFoundError):
        a.nixl.make_connection("b")
    a.meet(b)
    a.nixl.make_connection("b")
    a.nixl.remove_remote_agent("b")
    with pytest.raises(nixlNotFoundError):
        a.whole("WRITE", b)
    a.meet(b)
    sidecars[1].kill()
    with pytest.raises(nixlRemoteDisconnectError):
        a.nixl.make_connection("b")
    assert a.whole("WRITE", b, b"lost") == "ERR"
    a.nixl.send_notif("b", b"lost")  # NIXL reports no failure of one
    assert a.move("WRITE", np.zeros(1), a, np.full(1, PAGE), PAGE) == "DONE"


CHILD = """
import sys
sys.path[:0] = {path!r}
from conftest import ROOT
from agents import Agent
a = Agent("child", {socket!r}, {nbytes})
sys.stdout.buffer.write(a.nixl.get_agent_metadata().hex().encode() + b" %d\\n" % a.address)
sys.stdout.flush()
sys.stdin.read()
"""


def test_agent_dies(agent: MakeAgent, sidecars: list[Sidecar]) -> None:
    """The process whose memory is written is killed; the sidecars and the other agent go on."""
    a = agent("a", 0, BIG)
    code = CHILD.format(path=[str(HERE)], socket=sidecars[1].socket, nbytes=BIG)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as p:
        assert p.stdout is not None
        words = next(line for line in p.stdout if line.count(" ") == 1).split()
        a.nixl.add_remote_agent(bytes.fromhex(words[0]))
        local = a.nixl.get_xfer_descs([(a.address, BIG, 0)], "DRAM")
        remote = a.nixl.get_xfer_descs([(int(words[1]), BIG, 0)], "DRAM")
        handle = a.nixl.initialize_xfer("WRITE", local, remote, "child", b"note")
        assert a.post(handle) == "PROC"
        p.kill()
    assert a.end(handle) in ("ERR", "DONE")
    a.nixl.release_xfer_handle(handle)
    b = agent("b", 1, BIG)
    a.meet(b)
    fill(a, 1)
    assert a.whole("WRITE", b, b"next") == "DONE"
    assert b.gather(1) == [("a", b"next")]
    assert np.array_equal(a.memory, b.memory)


def test_no_sidecar(plugin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from nixl._bindings import nixlBackendError

    with pytest.raises(nixlBackendError):
        Agent("a", str(tmp_path / "none.sock"))
