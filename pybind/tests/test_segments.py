"""Segments and batches between two real sidecars: docs/segments.md's example, refusals, and the
death of each side in each phase of a batch."""

from __future__ import annotations

import os
import pathlib
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import TIMEOUT_S, Serve, until

import kvspray
from kvspray import CompletionStatus, KvsprayError
from kvspray.segments import ENTRY, Batch, EntryStatus, Grant, Note, Segments

PAGE = 4096
BYTES = 1 << 20
HERE = pathlib.Path(__file__).parent
EVERYONE = [Grant(read=True, write=True)]
# Moments of a batch at which a side dies. Nightly runs try more of them.
PHASES = int(os.environ.get("KVSPRAY_ATTACK_RUNS", "2"))


class Side:
    """A worker of one sidecar, with memory."""

    def __init__(self, socket: pathlib.Path, name: str, nbytes: int = BYTES) -> None:
        self.client = kvspray.WorkerClient(
            socket, engine=kvspray.EngineInfo("test", id=name), layers=1, grace_s=1
        )
        self.region = kvspray.Region.alloc(nbytes)
        self.client.register([self.region])
        assert self.client.wait_connected(TIMEOUT_S), self.client.status()
        self.segments = Segments(self.client)
        self.view = self.region.buffer

    @property
    def endpoint(self) -> str:
        return self.client.status().endpoint

    def end(self, lease: int) -> kvspray.Completion:
        assert lease > 0, (self.client.refusal, self.client.status())
        assert self.client.wait(TIMEOUT_S), self.client.status()
        (done,) = self.client.poll()
        assert done.lease == lease and done.received
        return done

    def close(self) -> None:
        self.client.close()
        self.view.release()
        self.region.close()


@pytest.fixture
def sides(serve: Serve) -> Iterator[Any]:
    made: list[Side] = []

    def make(name: str, nbytes: int = BYTES, socket: pathlib.Path | None = None) -> Side:
        if socket is None:
            _, socket = serve(name)
        made.append(Side(socket, name, nbytes))
        return made[-1]

    yield make
    for s in made:
        s.close()


def test_example(sides: Any) -> None:
    """The example of docs/segments.md."""
    owner, user = sides("owner"), sides("user")
    owner.segments.register("cache", owner.region, grants=[Grant("*", read=True, write=True)])
    assert user.segments.find("cache", peer=owner.endpoint).nbytes == BYTES

    user.view[:PAGE] = b"k" * PAGE
    with user.segments.batch(100) as batch:
        batch.add(local=0, remote=8 * PAGE, nbytes=PAGE)
        lease = batch.write("cache", [user.region], peer=owner.endpoint, note=b"page 8")
        done = user.end(lease)
        assert done.ok and done.bytes == PAGE, done
        assert batch.statuses(done) == [EntryStatus.ARRIVED]
        node = user.client.status().node
        assert owner.segments.notes(TIMEOUT_S) == [Note("cache", node, True, PAGE, b"page 8")]
        assert owner.view[8 * PAGE : 9 * PAGE] == b"k" * PAGE
        assert owner.view[9 * PAGE] == 0

        batch.clear()  # every other page, into pages that are adjacent
        owner.view[:] = os.urandom(BYTES)
        batch.add(local=0, remote=0, nbytes=PAGE, pieces=50, local_stride=PAGE,
            remote_stride=2 * PAGE)  # fmt: skip
        assert user.end(batch.read("cache", [user.region], peer=owner.endpoint)).ok
        for i in range(50):
            assert user.view[i * PAGE : (i + 1) * PAGE] == owner.view[2 * i * PAGE :][:PAGE]

    owner.segments.revoke("cache")
    with pytest.raises(KvsprayError, match="no segment that node"):
        user.segments.find("cache", peer=owner.endpoint)


def test_file(serve: Serve, sides: Any, tmp_path: pathlib.Path) -> None:
    """The example of files in docs/segments.md."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "kv.bin").write_bytes(bytes(BYTES))
    _, socket = serve("files", f"segments.root={root}")
    owner, user = sides("owner", BYTES, socket), sides("user")
    owner.segments.register_file("cache", "kv.bin", grants=EVERYONE)
    assert user.segments.find("cache", peer=owner.endpoint).nbytes == BYTES

    user.view[:] = os.urandom(BYTES)
    with user.segments.batch(2) as batch:
        batch.add(local=0, remote=8 * PAGE, nbytes=PAGE)
        batch.add(local=PAGE, remote=5, nbytes=7)
        done = user.end(batch.write("cache", [user.region], peer=owner.endpoint, durable=True))
        assert done.ok and done.bytes == PAGE + 7, done
        now = (root / "kv.bin").read_bytes()
        assert now[8 * PAGE : 9 * PAGE] == user.view[:PAGE]
        assert now[5:12] == user.view[PAGE : PAGE + 7] and now[12] == 0
        done = user.end(batch.read("cache", [user.region], peer=owner.endpoint, durable=True))
        assert done.status == CompletionStatus.REFUSED and "durable" in done.reason

    with pytest.raises(KvsprayError, match="leaves segments.root"):
        owner.segments.register_file("out", "../owner.sock", grants=EVERYONE)
    with pytest.raises(KvsprayError, match="segments.root"):
        user.segments.register_file("none", "kv.bin", grants=EVERYONE)


def test_many_entries(sides: Any) -> None:
    """As many entries as a batch takes, written as an array; one more is refused, and so are more
    pieces."""
    owner, user = sides("owner", 8 << 20), sides("user", 8 << 20)
    owner.segments.register("cache", owner.region, grants=EVERYONE)
    user.view[:] = os.urandom(8 << 20)
    n = 100_000
    with user.segments.batch(n) as batch:
        packed = b"".join(ENTRY.pack(i * 64, (n - 1 - i) * 64, 64, 0, 0, 1, 0) for i in range(n))
        batch.memory[: len(packed)] = packed
        batch.count = n
        done = user.end(batch.write("cache", [user.region], peer=owner.endpoint))
        assert done.ok and done.bytes == 64 * n, done
        for i in (0, 1, 777, n - 1):
            assert owner.view[(n - 1 - i) * 64 :][:64] == user.view[i * 64 :][:64]
        assert owner.view[n * 64 :] == bytes((8 << 20) - n * 64)
        with pytest.raises(ValueError, match="100001 entries"):
            batch.add(0, 0, 1)
        batch.clear()
        batch.add(0, 0, 1, pieces=10_000_000, local_stride=0, remote_stride=0)
        done = user.end(batch.read("cache", [user.region], peer=owner.endpoint))
        assert done.status == CompletionStatus.REFUSED and "entries[0].count" in done.reason
        assert batch.statuses(done) == [EntryStatus.UNTOUCHED]
    with pytest.raises(KvsprayError, match="10000000 entries"):
        user.segments.batch(10_000_000)


def test_entry_that_does_not_fit_is_not_added(sides: Any) -> None:
    """An entry of an earlier lease does not take its place."""
    with sides("one").segments.batch(2) as batch:
        batch.add(7, 7, 7)
        batch.clear()
        with pytest.raises(struct.error):
            batch.add(-1, 0, 1)
        assert batch.count == 0
        batch.extend([(0, 0, 1), (1, 1, 1)])
        with pytest.raises(ValueError, match="3 entries"):
            batch.add(2, 2, 1)
        assert batch.count == 2


def test_close_with_an_array(sides: Any) -> None:
    """Memory that an array uses is not given back; later it is."""
    batch = sides("one").segments.batch(1)
    array = memoryview(batch.memory)
    batch.add(0, 0, 1)
    with pytest.raises(KvsprayError, match="an array of it is left"):
        batch.close()
    assert bytes(array[16:24]) == (1).to_bytes(8, "little")
    array.release()
    batch.close()
    batch.close()


def test_layout_memory_is_no_segment(serve: Serve) -> None:
    """Memory of a KV cache is written by transfers alone."""
    from conftest import ENGINE, LAYERS, real_layout

    _, socket = serve("one")
    region = kvspray.Region.alloc(1 << 20)
    with kvspray.WorkerClient(socket, engine=ENGINE, layers=LAYERS) as w:
        w.register([region], real_layout())
        assert w.wait_connected(TIMEOUT_S), w.status()
        with pytest.raises(KvsprayError, match="one of the layout's"):
            Segments(w).register("cache", region, grants=EVERYONE)
        more = kvspray.Region.alloc(PAGE)
        assert w.add_regions([more], TIMEOUT_S)
        Segments(w).register("cache", more, grants=EVERYONE)
        assert w.drop_regions([more], TIMEOUT_S)  # revokes it
        with pytest.raises(KvsprayError, match="no segment that node"):
            Segments(w).find("cache")
        more.close()
    region.close()


def started(sides: Any, phase: int) -> tuple[Side, Side, Batch, int]:
    """A batch that writes all of the owner's memory, at some moment of it."""
    owner, user = sides("owner", 32 << 20), sides("user", 32 << 20)
    owner.segments.register("cache", owner.region, grants=EVERYONE)
    batch = user.segments.batch(1)
    batch.add(0, 0, 32 << 20)
    warm = user.segments.batch(1)
    warm.add(0, 0, 1)
    assert user.end(warm.read("cache", [user.region], peer=owner.endpoint)).ok
    warm.close()
    user.view[:] = b"\1" * (32 << 20)
    lease = batch.write("cache", [user.region], peer=owner.endpoint, note=b"!")
    if phase > 0:  # the phases: at once, then at later and later bytes
        at = (phase - 1) * (32 << 20) // PHASES
        until(lambda: owner.view[at] == 1, "bytes of the batch")
    return owner, user, batch, lease


@pytest.mark.parametrize("phase", range(PHASES))
def test_initiator_sidecar_dies(sides: Any, phase: int) -> None:
    """The batch is LOST, or complete; once the owner has revoked the segment, none of its bytes
    changes."""
    owner, user, batch, lease = started(sides, phase)
    os.kill(user.client.status().sidecar_pid, signal.SIGKILL)
    done = user.end(lease)
    assert done.status in (CompletionStatus.LOST, CompletionStatus.OK), done
    owner.segments.revoke("cache")
    owner.view[:] = b"\2" * len(owner.view)
    assert batch.statuses(done)[0] in (EntryStatus.UNDEFINED, EntryStatus.ARRIVED)
    owner.segments.register("cache", owner.region, grants=EVERYONE)  # its name is free
    assert owner.segments.find("cache") is not None
    assert bytes(owner.view) == b"\2" * len(owner.view)
    batch.close()


@pytest.mark.parametrize("phase", range(PHASES))
def test_owner_sidecar_dies(sides: Any, phase: int) -> None:
    """The batch ends, and its memory is the engine's again; it is not complete unless the bytes
    came."""
    owner, user, batch, lease = started(sides, phase)
    os.kill(owner.client.status().sidecar_pid, signal.SIGKILL)
    done = user.end(lease)
    if done.ok:
        assert bytes(owner.view) == b"\1" * len(owner.view)
    else:
        assert done.status == CompletionStatus.FAILED, done
        assert batch.statuses(done) == [EntryStatus.UNDEFINED]
    batch.close()


CHILD = """
import sys
sys.path.insert(0, {here!r})
from test_segments import Side, EVERYONE, TIMEOUT_S
import pathlib, time
side = Side(pathlib.Path({socket!r}), "child", {nbytes})
{action}
print("ready", flush=True)
time.sleep(600)
"""
SEND = """
side.view[:] = bytes([1]) * len(side.view)
batch = side.segments.batch(1)
batch.add(0, 0, len(side.view))
assert batch.write("cache", [side.region], peer={peer!r}) > 0
"""


def child(socket: pathlib.Path, action: str, nbytes: int = 32 << 20) -> subprocess.Popen[str]:
    code = CHILD.format(here=str(HERE), socket=str(socket), nbytes=nbytes, action=action)
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert p.stdout is not None and p.stdout.readline() == "ready\n"
    return p


def test_engines_die(serve: Serve, sides: Any) -> None:
    """An engine that sends a batch, and one whose segment is written, are killed: the sidecars go
    on, and the ranges are free once the leases are fenced."""
    _, socket = serve("user")
    owner = sides("owner", 32 << 20)
    owner.segments.register("cache", owner.region, grants=EVERYONE)
    sender = child(socket, SEND.format(peer=owner.endpoint))
    sender.kill()
    sender.wait()
    user = sides("other", 32 << 20, socket)
    user.view[:] = b"\3" * (32 << 20)
    batch = user.segments.batch(1)
    batch.add(0, 0, 32 << 20)
    done = user.end(batch.write("cache", [user.region], peer=owner.endpoint, wait=True))
    assert done.ok and bytes(owner.view) == bytes(user.view)

    victim = child(socket, 'side.segments.register("victim", side.region, grants=EVERYONE)')
    lease = batch.write("victim", [user.region])
    victim.kill()
    victim.wait()
    done = user.end(lease)
    assert done.status in (CompletionStatus.OK, CompletionStatus.FAILED, CompletionStatus.REFUSED)
    until(lambda: "no segment" in user.end(batch.write("victim", [user.region])).reason, "its end")
    batch.close()
