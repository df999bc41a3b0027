"""WorkerClient against a fake sidecar in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import DEADLINE_MS, ENGINE, LAYERS, TIMEOUT_S, Sidecar, layout, skip, until
from leases import HASH, XFER, Make, canonical, expect, intent, poll_one

import kvspray
from kvspray import CompletionStatus


def test_session(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    hello = s.expect("hello")
    assert hello["role"] == "worker" and hello["pid"] == os.getpid()
    canonical("HELLO", hello["hex"])
    reg = s.expect("register")
    assert reg["layers"] == LAYERS and reg["boot"] == hello["boot"] and reg["layout"] == layout()
    canonical("REGISTER", reg["hex"])
    assert reg["seals"] == [0x7, 0x7]  # SEAL, SHRINK, GROW
    assert reg["regions"][0]["kind"] == "memfd" and "addr" not in reg["regions"][0]
    st = w.status()
    assert (
        st.connected
        and st.node == "fake"
        and st.endpoint == "127.0.0.1:7001"
        and st.sidecar_pid == s.process.pid
    )
    assert (
        (st.deadline_ms, st.match_timeout_ms, st.grace_ms) == (DEADLINE_MS, 500, 400)
        and st.version == (1, 0)
        and not st.error
    )
    w.close()
    s.expect("bye")
    assert not w.connected and w.poll() == [] and w.intent(XFER, HASH, 1, [[1]]) == 0
    w.signal_layer(0, 1)  # harmless
    w.close()


def test_routers_learn_the_api_and_role_of_an_engine(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    worker(
        engine=dataclasses.replace(
            ENGINE,
            api="http://10.0.0.7:8000",
            role="prefill",
            events="tcp://*:5557",
            replay="tcp://*:5558",
        )
    )
    hello = s.expect("hello")
    canonical("HELLO", hello["hex"])
    assert kvspray.protocol.decode(bytes.fromhex(hello["hex"]))["engine"] == {
        "name": "test",
        "version": "1",
        "id": "e0",
        "api": "http://10.0.0.7:8000",
        "role": "prefill",
        "events": "tcp://*:5557",
        "replay": "tcp://*:5558",
    }


def test_source_lease_in_order(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    lease = intent(w, req="r1", fanout=2)
    r = s.record("INTENT", lease=lease)
    assert r["body"] == {
        "xfer": XFER, "hash": HASH, "tokens": 40, "fanout": 2,
        "blocks": [b"\1\0\0\0\2\0\0\0\3\0\0\0"], "ready": 0, "steps": [], "priority": 1,
        "deadline_ms": DEADLINE_MS, "held": False, "req": "r1", "attempt": 0,
    }  # fmt: skip
    assert bytes.fromhex(r["hex"]) == kvspray.protocol.encode("INTENT", r["body"])
    assert w.step(7, [(lease, 32, None), (999, 1, None)])
    r = s.record("STEP")
    assert (
        r["body"] == {"step": 7, "reqs": [{"lease": lease, "end": 32, "attempt": 0}]}
        and r["epoch"] == 0
    )
    for layer in range(LAYERS):
        w.signal_layer(layer, 7)
    w.signal_step(7)
    w.signal_layer(0, 3)  # never back
    s.command("flags")
    assert s.expect("flags")["layers"] == [7] * (LAYERS + 1)
    assert w.preempt(lease)
    r = s.record("PREEMPT", lease=lease)
    assert r["epoch"] == 1 and w.status().source_epoch == 1
    assert w.step(8, [(lease, 40, [[7, 8, 9]])])
    r = s.record("STEP")
    assert r["body"]["reqs"] == [
        {"lease": lease, "end": 40, "blocks": [kvspray.pack_blocks([7, 8, 9])], "attempt": 1}
    ]
    assert w.hold(lease)
    s.record("HOLD", lease=lease)
    s.complete(lease, "SENT", grants=2, bytes=123, reason="")
    c = poll_one(w)
    assert c == kvspray.Completion(lease, False, CompletionStatus.OK, bytes=123, grants=2) and c.ok
    assert not w.hold(lease) and not w.cancel(lease) and w.status().leases == 0
    s.complete(lease, "SENT", grants=2, bytes=123, reason="")
    until(lambda: (w.poll(), w.status().counters["dropped"] == 1)[1], "the duplicate is counted")
    assert w.connected


def test_destination_lease(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    a, b = expect(w), expect(w)
    r = s.record("EXPECT", lease=a)
    assert (
        r["body"]["skip"] == [16]
        and r["body"]["match_timeout_ms"] == 500
        and list(r["body"])[0] == "xfer"
    )
    s.complete(
        b,
        "RECEIVED",
        1,
        bytes=5,
        took_us=6,
        transport="tcp",
        reason="checksum",
        recompute=[[0, 16], [32, 40]],
    )
    c = poll_one(w)
    assert (c.lease, c.received, c.status, c.recompute) == (
        b,
        True,
        CompletionStatus.FAILED,
        ((0, 16), (32, 40)),
    )
    assert w.cancel(a, "abort")
    assert s.record("CANCEL", lease=a)["body"] == {"reason": "abort"}
    s.complete(a, "RECEIVED", 2, bytes=0, took_us=0, transport="", reason="cancelled", recompute=[])
    assert poll_one(w).status == CompletionStatus.CANCELLED
    assert w.status().source_epoch == 0  # destination blocks have no source epoch


def test_cancel_of_source_moves_the_epoch_first(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    lease = intent(w)
    assert w.cancel(lease)
    assert s.record("CANCEL", lease=lease)["epoch"] == 1


def test_without_a_sidecar(worker: Make, sidecar: Make) -> None:
    w = worker(connect=False)
    assert (
        not w.connected
        and w.intent(XFER, HASH, 16, [[1]]) == 0
        and w.expect(XFER, HASH, "a:1", 16, 0, [[1]]) == 0
    )
    assert not w.wait(0.01) and w.poll() == []
    until(lambda: "no sidecar at" in w.status().error, "the error is reported")
    assert "start 'kvspray serve'" in w.status().error and "engine.socket" in w.status().error
    sidecar()
    assert w.wait_connected(TIMEOUT_S)
    intent(w)


def test_killed_sidecar_and_a_new_one(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    src, dst = intent(w), expect(w)
    w.step(3, [(src, 16, None)])
    w.step(5, [(src, 40, [[1, 2, 3, 9]])])
    w.signal_step(3)
    w.preempt(src)
    w.step(6, [(src, 32, [[11, 12]])])
    s.kill()
    c = poll_one(w)
    assert (c.lease, c.status) == (dst, CompletionStatus.LOST) and "exit" in c.reason
    assert not w.connected
    assert w.step(9, [(src, 40, [[11, 12, 13]])])  # kept
    assert w.hold(src)
    assert w.status().counters["kept"] >= 1
    s2: Sidecar = sidecar()
    r = s2.record("INTENT", lease=src)
    assert r["seq"] == 1 and r["epoch"] == 1
    body = r["body"]
    assert (
        body["blocks"] == [kvspray.pack_blocks([11, 12, 13])]
        and body["held"]
        and body["attempt"] == 1
    )
    assert body["steps"] == [[6, 32], [9, 40]] and body["ready"] == 0
    assert 0 < body["deadline_ms"] < DEADLINE_MS
    assert w.wait_connected(TIMEOUT_S)
    s2.complete(src, "SENT", grants=1, bytes=1, reason="")
    assert poll_one(w).ok
    st = w.status()
    assert (
        st.counters["represented"] == 1
        and st.counters["sidecar_exits"] == 1
        and st.counters["synthesised"] == 1
    )


def test_what_was_sent_before_death_counts(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    dst = expect(w)
    s.record("EXPECT")
    s.complete(dst, "RECEIVED", 0, bytes=9, took_us=1, transport="shm", reason="", recompute=[])
    s.command("ping")
    s.expect("pong")
    s.kill()
    until(lambda: w.status().counters["sidecar_exits"] == 1, "exit")
    c = poll_one(w)
    assert c.ok and c.bytes == 9
    assert w.poll() == []


def test_closed_socket_of_a_living_sidecar_keeps_leases(sidecar: Make, worker: Make) -> None:
    """An end of file proves nothing: only the takeover that has `fenced` ends the destination
    lease."""
    s: Sidecar = sidecar(fenced=[True, False, False])
    w = worker()
    src, dst, gone = intent(w), expect(w), expect(w)
    s.record("EXPECT", lease=gone)
    s.command("listen", on=False)
    s.command("close")
    until(lambda: not w.connected, "disconnected")
    assert w.cancel(gone)  # kept: no sidecar is there
    assert not w.wait(0.1)
    s.command("listen", on=True)
    got: dict[int, kvspray.Completion] = {}

    def drain() -> bool:
        got.update({c.lease: c for c in w.poll()})
        return len(got) == 2

    until(drain, "both destination leases")
    assert (
        got[dst].status == CompletionStatus.FAILED
        and got[gone].status == CompletionStatus.CANCELLED
    )
    assert s.record("INTENT", lease=src)["seq"] == 1
    # Two answers without a fence were not enough.
    assert len([e for e in s.seen if e["ev"] == "hello"]) == 4
    assert w.status().counters["kills"] == 0


def test_stopped_sidecar_is_killed_after_the_grace(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(deadline_ms=2000)
    w = worker()
    src = intent(w)
    w.hold(src)
    start = time.monotonic()
    dst = expect(w)
    s.record("EXPECT")
    s.signal(signal.SIGSTOP)
    got: dict[int, kvspray.Completion] = {}
    while dst not in got:
        assert w.wait(TIMEOUT_S), w.status()
        got.update({c.lease: c for c in w.poll()})
    took = time.monotonic() - start
    # Deadline and grace, and not before.
    assert got[dst].status == CompletionStatus.LOST and took > 2.39, took
    assert s.process.wait(TIMEOUT_S) == -signal.SIGKILL
    while src not in got:  # no sidecar until its deadline
        assert w.wait(TIMEOUT_S), w.status()
        got.update({c.lease: c for c in w.poll()})
    assert not got[src].received and got[src].status == CompletionStatus.LOST
    st = w.status()
    assert st.counters["kills"] == 1 and st.leases == 0
    sidecar()
    assert w.wait_connected(TIMEOUT_S)


def test_an_engine_that_waits_less_kills_sooner(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(grace_ms=60_000)
    w = worker(grace_s=0.4)
    st = w.status()
    assert st.grace_ms == 400 and st.killable and st.has_regions
    dst = expect(w, deadline_s=2)
    s.record("EXPECT")
    s.signal(signal.SIGSTOP)
    assert w.wait(TIMEOUT_S) and w.poll()[0].lease == dst
    assert s.process.wait(TIMEOUT_S) == -signal.SIGKILL
    st = w.status()
    assert not (st.connected or st.killable or st.has_regions)


def test_what_a_sidecar_holds_on_is_not_late(sidecar: Make, worker: Make) -> None:
    # After half of it a new session would make the sidecar fence the lease.
    s: Sidecar = sidecar(grace_ms=6000)
    w = worker()
    s.expect("hello")
    src = intent(w, deadline_s=0.3)
    assert not w.yield_hold(src), "it is not held"
    assert w.hold(src) and w.yield_hold(src)
    s.record("HOLD", lease=src)
    s.record("YIELD", lease=src)
    threading.Event().wait(1.0)  # the deadline passes
    held = time.monotonic()
    s.command("send", name="HELD", body={"lease": src})
    s.expect("hello")
    assert time.monotonic() - held > 0.3 + 3.0, "the deadline was not counted anew"


def test_forgetful_sidecar_is_asked_to_fence_not_killed(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(grace_ms=3000)  # half of it is for the sidecar's answer
    w = worker()
    dst = expect(w, deadline_s=0.3)
    c = poll_one(w)
    assert (c.lease, c.status) == (dst, CompletionStatus.FAILED) and "fenced" in c.reason
    assert s.process.poll() is None and w.status().counters["kills"] == 0
    assert w.wait_connected(TIMEOUT_S)


def test_a_fence_that_is_stuck_costs_the_session_and_not_the_sidecar(
    sidecar: Make, worker: Make
) -> None:
    """A sidecar that answers serves others. Only what does not answer for the grace is killed."""
    grace = 3.0
    s: Sidecar = sidecar(deadline_ms=300, grace_ms=int(grace * 1000))
    w = worker()
    dst = expect(w, deadline_s=0.3)
    s.record("EXPECT")
    s.command("option", set={"fencing": True})
    s.command("ping")
    s.expect("pong")
    until(lambda: w.status().quarantined == 1, "quarantine", 20)
    threading.Event().wait(2 * grace)  # that nothing happens meanwhile is what is tested
    st = w.status()
    assert (st.counters["kills"], st.leases, st.quarantined, st.connected) == (0, 1, 1, False)
    assert s.process.poll() is None and w.poll() == [] and "not fenced yet" in st.error
    assert not w.expect(XFER, HASH, "127.0.0.1:7001", 40, 16, [[4, 5, 6]]), "it serves alone"
    s.command("option", set={"fencing": False})
    c = poll_one(w)
    assert (c.lease, c.status) == (dst, CompletionStatus.FAILED) and "fenced" in c.reason
    assert w.wait_connected(TIMEOUT_S) and w.status().quarantined == 0

    s.command("option", set={"fencing": True})
    s.command("ping")
    s.expect("pong")
    dst = expect(w, deadline_s=0.3)
    until(lambda: w.status().quarantined == 1, "quarantine", 20)
    s.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    c = poll_one(w)
    assert (c.lease, c.status) == (dst, CompletionStatus.LOST)
    assert s.process.wait(TIMEOUT_S) == -signal.SIGKILL and w.status().counters["kills"] == 1
    assert time.monotonic() - stopped > grace / 2, "killed before it had its time to answer"


PAUSED = """
import sys
sys.path[:0] = sys.argv[2:]
import conftest, kvspray
w = kvspray.WorkerClient(sys.argv[1], engine=conftest.ENGINE, layers=conftest.LAYERS)
region = w.alloc_region(conftest.LAYERS * 32768)
w.register([region], conftest.layout())
assert w.wait_connected(30)
assert w.expect(b"x" * 16, b"h" * 32, "127.0.0.1:7001", 40, 16, [[4, 5, 6]]) == 1
print("open", flush=True)
w.wait(30)
print(w.poll()[0].status.name, w.status().counters["kills"], flush=True)
w.close()
"""


def test_a_host_that_was_paused_is_no_reason_to_kill(
    sidecar: Make, socket_path: pathlib.Path
) -> None:
    """Engine and sidecar stop together for longer than deadline and grace. Both go on, and the
    sidecar gets its chance to fence."""
    s: Sidecar = sidecar(deadline_ms=500, grace_ms=2000)
    here = str(pathlib.Path(__file__).parent)
    engine = subprocess.Popen(
        [sys.executable, "-c", PAUSED, str(socket_path), here], stdout=subprocess.PIPE, text=True
    )
    try:
        assert engine.stdout is not None and engine.stdout.readline() == "open\n"
        s.record("EXPECT", lease=1)
        for process in (s.process, engine):
            process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2.7)  # the time is what is tested
        for process in (engine, s.process):
            process.send_signal(signal.SIGCONT)
        assert engine.stdout.readline() == "FAILED 0\n"
    finally:
        engine.kill()
        engine.communicate()


def test_stopped_sidecar_beside_a_new_one(sidecar: Make, worker: Make) -> None:
    """The new sidecar's completion of a source lease does not give blocks back that the old one may
    still read."""
    old: Sidecar = sidecar(deadline_ms=2000)
    w = worker()
    # Listens before the leases are opened: on a busy machine its start takes longer than they last.
    new: Sidecar = sidecar(deadline_ms=2000)
    src, dst = intent(w), expect(w)
    old.record("EXPECT")
    old.command("close")
    until(
        lambda: not w.connected or w.status().sidecar_pid == new.process.pid,
        "the old session has ended",
        20,
    )
    old.signal(signal.SIGSTOP)
    new.record("INTENT", lease=src)
    new.complete(src, "SENT", grants=1, bytes=1, reason="")
    got: dict[int, CompletionStatus] = {}
    while len(got) < 2:
        assert w.wait(TIMEOUT_S), w.status()
        got.update({c.lease: c.status for c in w.poll()})
        # Whatever was sent, nothing is released before the old one is dead: the shim kills it
        # after deadline and grace.
        assert old.process.poll() == -signal.SIGKILL, got
    assert got == {src: CompletionStatus.OK, dst: CompletionStatus.LOST}
    assert new.process.poll() is None and w.status().counters["kills"] == 1


def test_quarantine(sidecar: Make, worker: Make, tmp_path: pathlib.Path) -> None:
    """A sidecar that may not be killed: the lease stays open, status reports it, and its exit then
    ends it."""
    if os.geteuid() != 0:
        skip("root", "needs root: a sidecar of another user, which this process may not signal")
    s: Sidecar = sidecar()
    code = f"""
import os, sys, signal
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import kvspray
from conftest import ENGINE, LAYERS, layout, until
os.setuid(65534)
w = kvspray.WorkerClient({str(tmp_path / "s.sock")!r}, engine=ENGINE, layers=LAYERS)
r = w.alloc_region(LAYERS * 32768)
w.register([r], layout())
assert w.wait_connected(30), w.status()
print("stop", flush=True)
assert sys.stdin.readline() == "stopped\\n"
lease = w.expect(b"x" * 16, b"h" * 32, "a:1", 40, 0, [[1, 2, 3]], deadline_s=0.2)
assert lease
until(lambda: w.status().quarantined == 1, "quarantine")
assert "cannot be killed" in w.status().error, w.status().error
assert w.poll() == [] and w.status().leases == 1 and w.status().counters["kills"] == 0
print("quarantined", flush=True)
assert w.wait(30)
assert [(c.lease, int(c.status)) for c in w.poll()] == [(lease, 5)]
w.close()
print("over", flush=True)
"""
    import subprocess
    import sys

    for p in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        os.chmod(p, 0o755)
    os.chmod(tmp_path / "s.sock", 0o777)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline().strip() == "stop"
    s.signal(signal.SIGSTOP)
    child.stdin.write("stopped\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == "quarantined"
    s.kill()
    assert child.stdout.readline().strip() == "over"
    assert child.wait(TIMEOUT_S) == 0


def test_deadline_of_a_source_counts_from_its_last_step(sidecar: Make, worker: Make) -> None:
    """A prefill that outlasts the deadline of its lease keeps it, also across a sidecar's restart
    in its last moment."""
    s: Sidecar = sidecar()
    w = worker()
    new: Sidecar = sidecar()  # listens already when it is needed, however long its start takes
    src = intent(w, deadline_s=3)
    begun, step, pause = time.monotonic(), 0, threading.Event()
    while time.monotonic() - begun < 3.2:  # longer than the deadline
        step += 1
        assert w.step(step, [(src, 1 + step, [[1, 2, 3]])])
        w.signal_step(step)
        pause.wait(0.1)
    s.kill()
    until(lambda: w.status().counters["sidecar_exits"] == 1, "the exit is proved")
    assert w.poll() == []
    again = new.record("INTENT", lease=src)["body"]
    assert again["deadline_ms"] > 100, again
    new.complete(src, "SENT", grants=1, bytes=1, reason="")
    assert poll_one(w).status == CompletionStatus.OK


def test_every_growth_of_the_epoch_is_followed_by_a_record(sidecar: Make, worker: Make) -> None:
    """Without one the sidecar could not find whose blocks went, and would invalidate what it reads
    for every other lease."""
    s: Sidecar = sidecar()
    w = worker()
    src = intent(w)
    s.record("INTENT", lease=src)
    s.complete(src, "SENT", grants=1, bytes=1, reason="")
    assert w.wait(TIMEOUT_S)  # complete, but not polled: the engine has not seen it yet
    before = w.status().source_epoch
    assert not w.preempt(src)
    assert w.status().source_epoch == before + 1
    assert s.expect("record", name="PREEMPT", lease=src)["epoch"] == before + 1
    assert poll_one(w).lease == src


def restart_with_a_slow_one(sidecar: Make, w: kvspray.WorkerClient) -> tuple[Sidecar, list[int]]:
    """A sidecar with three leases of 20 KB dies; the next one reads nothing, and two of them are
    all that its ring is given."""
    # Longer than a busy machine takes to start the next one.
    old: Sidecar = sidecar(deadline_ms=60_000)
    leases = [
        w.intent(XFER, HASH, 80_000, [list(range(5000))])
        for _ in range(3)
        if w.wait_connected(TIMEOUT_S)
    ]
    for lease in leases:
        old.record("INTENT", lease=lease)
    old.kill()
    until(lambda: not w.connected, "the death is known")
    s: Sidecar = sidecar(reading=False)
    s.expect("register")
    until(lambda: w.status().counters["represented"] == 2, "the ring has its share")
    return s, leases


def test_leases_presented_again_leave_room_for_the_engine(sidecar: Make, worker: Make) -> None:
    """With the ring full of them, each step would replace the session, and they would come
    again."""
    w = worker(submission_bytes=64 << 10, connect=False)
    s, leases = restart_with_a_slow_one(sidecar, w)
    for step in range(1, 9):
        assert w.step(step, [(leases[0], 16 * step, [list(range(300))])])
    assert w.status().counters["full"] == 0
    s.command("reading", on=True)
    for lease in leases[:2]:
        s.record("INTENT", lease=lease)
    for _ in range(8):
        s.record("STEP")
    s.record("INTENT", lease=leases[2])
    assert w.wait_connected(TIMEOUT_S) and w.status().counters["connects"] == 2


def test_an_impossible_tail_does_not_stop_the_presenting(sidecar: Make, worker: Make) -> None:
    w = worker(submission_bytes=64 << 10, connect=False)
    s, _ = restart_with_a_slow_one(sidecar, w)
    s.command("word", ring="sub", word="tail", value=1 << 40)
    # And not when the deadline of the lease has passed.
    assert w.wait_connected(TIMEOUT_S), w.status()


def test_a_lease_that_was_never_presented_again_is_cancelled_on_the_record(
    sidecar: Make, worker: Make
) -> None:
    """Its blocks go, so the epoch grows; the new sidecar must learn why, or it invalidates what it
    reads for the leases before it."""
    w = worker(submission_bytes=64 << 10, connect=False)
    s, leases = restart_with_a_slow_one(sidecar, w)
    assert w.cancel(leases[2])
    grown = w.status().source_epoch
    assert poll_one(w).status == kvspray.CompletionStatus.CANCELLED
    s.command("reading", on=True)
    for lease in leases[:2]:
        s.record("INTENT", lease=lease)
    assert s.expect("record")["epoch"] == grown
    assert w.wait_connected(TIMEOUT_S)


def test_a_lease_that_is_preempted_before_it_is_presented_again_leaves_a_record(
    sidecar: Make, worker: Make
) -> None:
    """The same for blocks that are lost: the lease itself may be presented long after, with what it
    holds by then."""
    w = worker(submission_bytes=64 << 10, connect=False)
    s, leases = restart_with_a_slow_one(sidecar, w)
    assert w.preempt(leases[2])
    grown = w.status().source_epoch
    s.command("reading", on=True)
    for lease in leases[:2]:
        s.record("INTENT", lease=lease)
    r = s.expect("record")
    assert (r["name"], r["lease"], r["epoch"]) == ("PREEMPT", leases[2], grown)
    assert s.record("INTENT", lease=leases[2])["body"]["attempt"] == 1
    assert w.wait_connected(TIMEOUT_S)


@pytest.mark.parametrize("call", ["kvs_preempt", "kvs_hold"])
def test_a_lease_whose_snapshot_cannot_be_kept_ends(sidecar: Make, worker: Make, call: str) -> None:
    from kvspray import _lib

    s: Sidecar = sidecar()
    w = worker()
    src = intent(w)
    s.record("INTENT", lease=src)
    before = w.status().source_epoch
    assert getattr(_lib.lib, call)(w._h, _lib.byref(_lib.CSnapshot(src, b"\xc1", 1))) == _lib.E_ARG
    assert (
        s.expect("record", name="CANCEL", lease=src)["epoch"]
        == before + 1
        == w.status().source_epoch
    )
    s.complete(src, "SENT", status=2, grants=0, bytes=0, reason="")
    assert poll_one(w).status == kvspray.CompletionStatus.CANCELLED


def test_a_long_endpoint_is_whole_or_not_there(sidecar: Make, socket_path: pathlib.Path) -> None:
    for n, want in ((255, True), (256, False)):
        s: Sidecar = sidecar(endpoint="h" * (n - 5) + ":7650")
        with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
            assert c.wait_connected(TIMEOUT_S)
            assert c.endpoint == ("h" * (n - 5) + ":7650" if want else None)
        s.kill()
