"""Clients at their limits: full and broken rings, malformed packets, logs, arguments,
schedulers."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import pathlib
import random
import signal
import struct
import threading
import time

import pytest
from conftest import ENGINE, TIMEOUT_S, Sidecar, layout, until
from leases import HASH, XFER, Make, canonical, expect, intent, poll_one

import kvspray
from kvspray import AdmissionState, CompletionStatus


def test_full_ring_replaces_the_session(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(reading=False)
    w = worker(submission_bytes=64 << 10)
    src = intent(w)
    big = [list(range(3000))]
    full = 0
    for _ in range(20):
        if w.intent(XFER, HASH, 40, big) == 0:
            full += 1
    assert full > 0 and w.status().counters["full"] >= full  # refused, and nothing is open for it
    serial = w.status().counters["connects"]
    for step in range(1, 200):
        assert w.step(step, [(src, 40, [list(range(1000))])])
    s.expect("register")
    # A new session; it serves once what is open has been presented, for which its ring is too
    # small.
    s.expect("register")
    s.command("reading", on=True)
    r = s.record("INTENT", lease=src)
    while not r["body"]["steps"]:
        r = s.record("INTENT", lease=src)
    assert r["body"]["steps"][-1][1] == 40 and len(r["body"]["steps"]) == 64
    # On a busy machine the new session is there before the last step: what came after it is
    # reported in it.
    last = r["body"]["steps"][-1][0]
    while last < 199:
        r = s.expect("record")
        body = kvspray.protocol.decode(bytes.fromhex(r["hex"]))
        if r["name"] == "INTENT":
            # Or another lease is presented.
            last = body["steps"][-1][0] if r["lease"] == src else last
        else:
            assert r["name"] == "STEP" and body["step"] == last + 1
            last += 1
    assert (
        until(lambda: w.connected, "connected again") and w.status().counters["connects"] > serial
    )


def test_oversized_records(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker(submission_bytes=128 << 10)
    with pytest.raises(ValueError, match="1 MiB or half"):
        w.intent(XFER, HASH, 40, [list(range(18000))])
    leases = [intent(w) for _ in range(8)]
    # 64 KB of tables: split.
    assert w.step(1, [(lease, 40, [list(range(2000))]) for lease in leases])
    ends: list[int] = []
    while len(ends) < 8:
        r = s.record("STEP")
        assert r["body"]["step"] == 1
        ends += [q["lease"] for q in r["body"]["reqs"]]
    assert ends == leases and w.connected


def test_broken_completion_ring(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    dst = expect(w)
    s.record("EXPECT")
    s.command("word", ring="comp", word="head", value=1 << 40)
    assert poll_one(w).status == CompletionStatus.FAILED  # after the takeover
    assert w.status().counters["protocol_errors"] == 1
    assert w.wait_connected(TIMEOUT_S)
    dst = expect(w)
    s.record("EXPECT")
    s.complete(dst, "SENT", 0, grants=1, bytes=1, reason="")  # the wrong kind
    assert poll_one(w).status == CompletionStatus.FAILED
    assert w.wait_connected(TIMEOUT_S)
    dst = expect(w)
    s.record("EXPECT")
    s.command("complete", lease=dst, name="RECEIVED", status=0, hex="80", seq=77)
    assert poll_one(w).status == CompletionStatus.FAILED
    assert w.wait_connected(TIMEOUT_S)
    assert w.status().counters["protocol_errors"] == 3


def test_broken_submission_tail(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(reading=False)
    w = worker(submission_bytes=64 << 10)
    s.expect("register")
    s.command("word", ring="sub", word="tail", value=1 << 40)
    s.command("ping")
    s.expect("pong")
    for _ in range(40):
        w.intent(XFER, HASH, 40, [list(range(1000))])
    until(lambda: w.status().counters["protocol_errors"] == 1, "noticed")


@pytest.mark.parametrize(
    "packet",
    [
        "",
        "02",
        "0200000081",
        "02000000c1",
        "04000000810001",
        "05000000a0",
        "07000000dfffffffff",
        "0200000090",
    ],
)
def test_malformed_packets(sidecar: Make, worker: Make, packet: str) -> None:
    s: Sidecar = sidecar()
    w = worker()
    s.expect("register")
    s.command("raw", hex=packet or "0000")
    until(lambda: w.status().counters["protocol_errors"] >= 1, "noticed")
    assert w.wait_connected(TIMEOUT_S)
    assert intent(w)


def test_unknown_packets_of_a_newer_minor_version(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    s.expect("register")
    s.command("raw", hex="6300000080")
    s.command("send", name="BYE", body={"reason": "it was read"})
    until(lambda: w.status().degraded, "the next packet")
    assert w.status().counters["protocol_errors"] == 0


def test_version_refusal_heals_without_restart(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(refuse="version")
    lines: list[str] = []
    w = worker(connect=False, log=lambda level, text: lines.append(text))
    until(lambda: "9.0 to 9.9" in w.status().error, "the refusal is reported")
    assert "upgrade the shim" in w.status().error and not w.connected
    until(lambda: any("9.0" in x for x in lines), "and logged")
    s.kill()
    s = sidecar(version=2 << 16)
    until(lambda: "chose protocol 2.0" in w.status().error, "the numbers are named")
    for release in ('sidecar (release "0.9.0")', f'library (release "{kvspray.__version__}")'):
        assert release in w.status().error
    s.kill()
    sidecar()
    assert w.wait_connected(TIMEOUT_S)


def test_the_log_speaks_while_the_engine_is_idle(sidecar: Make, worker: Make) -> None:
    """A sidecar comes and goes. The client's own thread logs that, without a call of the client."""
    s: Sidecar = sidecar()
    lines: list[tuple[int, str]] = []
    worker(log=lambda level, text: lines.append((level, text)))
    until(
        lambda: any("connected to sidecar" in text for _, text in lines), "the connection is logged"
    )
    s.kill()
    until(
        lambda: any(f"sidecar pid {s.process.pid} has exited" in text for _, text in lines),
        "its death is logged",
    )
    until(lambda: any("no sidecar at" in text for _, text in lines), "its absence is logged")
    sidecar()
    until(
        lambda: sum("connected to sidecar" in text for _, text in lines) == 2,
        "the next one is logged",
    )
    absent = [(level, text) for level, text in lines if "no sidecar at" in text]
    # The dead sidecar's socket refuses. While the next one replaces it there is none, and then one
    # that does not listen yet: each change is logged.
    assert {text.rpartition(": ")[2] for _, text in absent} <= {
        os.strerror(errno.ECONNREFUSED),
        os.strerror(errno.ENOENT),
    }
    assert all(a != b for a, b in itertools.pairwise(absent)) and {
        level for level, _ in absent
    } == {logging.WARNING}, "each is logged once"


def test_a_logger_that_fails_is_asked_again(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    asked: list[str] = []

    def log(level: int, text: str) -> None:
        asked.append(text)
        raise RuntimeError("no")

    w = worker(log=log)
    s.kill()
    until(
        lambda: any("connected" in x for x in asked) and any("no sidecar at" in x for x in asked),
        "both lines",
    )
    assert w.status().leases == 0
    w.close()
    assert not speakers(), "a thread is left"


def test_a_logger_that_blocks_holds_up_nobody_for_long(
    sidecar: Make, worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvspray.client, "_LOG_END_S", 0.05)
    sidecar()
    entered, go_on = threading.Event(), threading.Event()

    def log(level: int, text: str) -> None:
        entered.set()
        go_on.wait(TIMEOUT_S)

    w = worker(log=log)
    assert entered.wait(TIMEOUT_S)
    assert intent(w)
    w.close()
    assert w.closed and speakers()
    go_on.set()
    until(lambda: not speakers(), "the thread ends what close() could not")


@pytest.mark.parametrize("inside", [False, True])
def test_a_client_that_nobody_has_any_more_is_closed(
    sidecar: Make, socket_path: pathlib.Path, inside: bool
) -> None:
    """Also where the thread that speaks is the one that collects it."""
    s: Sidecar = sidecar()
    held: list[kvspray.SchedulerClient] = []
    ready = threading.Event()

    def log(level: int, text: str) -> None:
        if inside:
            ready.wait(TIMEOUT_S)
            held.clear()

    held.append(kvspray.SchedulerClient(socket_path, engine=ENGINE, log=log))
    assert held[0].wait_connected(TIMEOUT_S)
    ready.set()
    if not inside:
        held.clear()
    until(lambda: not speakers(), "the thread has ended")
    s.expect("bye")


def speakers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvspray-log"]


def test_refused_layout(sidecar: Make, worker: Make) -> None:
    sidecar(refuse_register=True)
    w = worker(connect=False)
    until(lambda: "field layout" in w.status().error, "the refusal is reported")
    assert not w.connected and w.status().counters["refusals"] >= 1


def test_drain(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    dst = expect(w)
    s.command("send", name="BYE", body={"reason": "SIGTERM"})
    until(lambda: not w.connected, "draining")
    assert w.status().degraded and w.expect(XFER, HASH, "a:1", 40, 0, [[1]]) == 0
    s.complete(dst, "RECEIVED", 0, bytes=1, took_us=1, transport="tcp", reason="", recompute=[])
    assert poll_one(w).ok


def test_lease_limit(sidecar: Make, worker: Make) -> None:
    sidecar(leases=2)
    w = worker()
    assert intent(w) and intent(w) and w.intent(XFER, HASH, 1, [[1]]) == 0


def test_memory_that_means_something_else(sidecar: Make, worker: Make) -> None:
    """What it meant before is not given away any more: sources end with a growth of the epoch,
    loads fail, and the new layout is presented."""
    s: Sidecar = sidecar()
    w = worker()
    src, dst = intent(w), expect(w)
    s.record("INTENT", lease=src)
    s.record("EXPECT", lease=dst)
    epoch, connects = w.status().source_epoch, w.status().counters["connects"]
    other = {**layout(), "identity": {"model": "tiny", "weights": "step-2"}}
    w.describe(other)
    assert w.status().source_epoch == epoch + 1
    s.expect("hello")
    assert s.expect("register")["layout"] == other
    ends = {}
    until(
        lambda: (ends.update({c.lease: c.status for c in w.poll()}), len(ends) == 2)[1],
        "both have ended",
    )
    assert ends == {src: CompletionStatus.CANCELLED, dst: CompletionStatus.FAILED}
    assert w.wait_connected(TIMEOUT_S) and w.status().counters["connects"] == connects + 1
    assert w.status().counters["represented"] == 0
    intent(w)


def test_describe_without_a_sidecar_and_with_nonsense(worker: Make, sidecar: Make) -> None:
    w = worker(connect=False)
    other = {**layout(), "identity": {"model": "tiny", "weights": "step-2"}}
    w.describe(other)
    s: Sidecar = sidecar()
    assert s.expect("register")["layout"] == other
    from kvspray import _lib

    assert _lib.lib.kvs_describe(w._h, b"\xc1", 1) == _lib.E_ARG
    assert _lib.lib.kvs_describe(w._h, None, 0) == _lib.E_ARG


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_is_inert(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar()
    w = worker()
    lease = expect(w)
    s.record("EXPECT")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            w.signal_layer(0, 99)
            ok = (
                w.intent(XFER, HASH, 1, [[1]]) == 0
                and not w.connected
                and w.poll() == []
                and not w.cancel(lease)
                and not w.wait(0.01)
            )
            w.close()
            code = 0 if ok else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    s.command("flags")
    assert s.expect("flags")["layers"][0] == 0
    s.complete(lease, "RECEIVED", 0, bytes=1, took_us=1, transport="tcp", reason="", recompute=[])
    assert poll_one(w).ok and w.connected


def test_many_completions_wake_the_waiter(sidecar: Make, worker: Make) -> None:
    sidecar(auto=True)
    w = worker()
    for _ in range(300):
        lease = expect(w)
        assert poll_one(w).lease == lease


@pytest.mark.parametrize("seed", range(4))
def test_storm(sidecar: Make, worker: Make, seed: int) -> None:
    """Random engine calls while sidecars are killed, stopped, cut off and replaced: each lease
    completes exactly once, in time."""
    rng = random.Random(seed)
    options = {"deadline_ms": 600, "grace_ms": 400, "auto": True, "quiet": True, "lazy": 3}
    current: Sidecar = sidecar(**options)
    w = worker()
    opened: dict[int, float] = {}
    sources: list[int] = []
    done: dict[int, kvspray.Completion] = {}

    def collect() -> None:
        for c in w.poll():
            assert c.lease in opened and c.lease not in done, c
            done[c.lease] = c

    end = time.monotonic() + 4 * TIMEOUT_S
    step = turn = troubles = 0
    due, busy = 50, 50  # the turn of the next trouble, and how many leases there should be by then
    while troubles < 8 or turn < due:
        assert time.monotonic() < end, (troubles, turn, due, len(opened), busy, w.status())
        turn += 1
        choice = rng.random()
        if choice < 0.3:
            lease = w.intent(XFER, HASH, 64, [[1, 2, 3, 4]])
            if lease:
                opened[lease] = time.monotonic()
                sources.append(lease)
        elif choice < 0.6:
            lease = w.expect(XFER, HASH, "a:1", 64, 0, [[1, 2, 3, 4]])
            if lease:
                opened[lease] = time.monotonic()
        elif choice < 0.8 and sources:
            step += 1
            w.step(
                step,
                [
                    (lease, rng.randrange(1, 64), [[5, 6, 7]] if rng.random() < 0.5 else None)
                    for lease in sources[-8:]
                ],
            )
            if rng.random() < 0.7:
                w.signal_step(step)
        elif choice < 0.84 and sources:
            w.preempt(rng.choice(sources))
        elif choice < 0.9 and opened:
            w.cancel(rng.choice(list(opened)))
        elif sources:
            w.hold(sources.pop(rng.randrange(len(sources))))
        collect()
        w.wait(0.001)
        if turn >= due and (
            len(opened) >= busy or turn >= due + 500 or current.process.poll() is not None
        ):
            troubles += 1
            # Mostly when there are leases again, on however busy a machine; at times while the last
            # one is not over.
            due, busy = turn + rng.randrange(1, 200), 0
            if rng.random() < 0.7:
                busy = len(opened) + rng.randrange(20, 100)
            what = rng.choice(["kill", "stop", "close", "replace", "garbage"])
            # Or the shim killed it already.
            if what == "kill" or current.process.poll() is not None:
                current.kill()
                current = sidecar(**options)
            elif what == "stop":
                current.signal(signal.SIGSTOP)
                if rng.random() < 0.5:
                    current = sidecar(**options)  # the old one stays stopped, and is killed in time
                else:
                    current.signal(signal.SIGCONT)
            elif what == "close":
                current.command("close")
            elif what == "replace":
                current = sidecar(**options)  # beside a living one without a session
                current.command("close")
            else:
                current.command("garbage")
    for lease in sources:
        w.hold(lease)
    try:
        until(lambda: (collect(), len(done) == len(opened))[1], "every lease is complete")
    except AssertionError:
        raise AssertionError(
            (len(opened), sorted(set(opened) - set(done))[:5], w.status())
        ) from None
    assert w.status().leases == 0
    late = [c for c in w.poll()]
    assert not late
    assert len(done) > 50


def test_default_path(
    sidecar: Make, socket_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_path.parent))
    socket_path.with_name("kvspray.sock").symlink_to(socket_path.name)
    sidecar()
    with kvspray.SchedulerClient(engine=ENGINE) as c:
        assert c.wait_connected(TIMEOUT_S)


def test_regions(sidecar: Make, worker: Make) -> None:
    import mmap

    n = 1 << 20
    m = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(m))
    w = worker(start=False)
    region = w.alloc_region(n)
    region.buffer[5:8] = b"abc"
    assert os.pread(region.fd, 3, 5) == b"abc"
    os.pwrite(region.fd, b"xyz", 100)
    assert bytes(region.buffer[100:103]) == b"xyz"
    process = [w.process_region(addr + i, 4096) for i in range(27)]
    s: Sidecar = sidecar()
    w.register([region, *process], layout())
    reg = s.expect("register")
    assert len(reg["regions"]) == 28 and reg["fds"] == 6 and reg["regions"][1]["addr"] == addr
    assert [r["fd"] for r in reg["regions"]] == [4, *[5] * 27]  # one descriptor for each file
    for r in process:
        r.close()
    alloc = w.alloc_region(5000)
    assert alloc.nbytes == 8192 and len(alloc.buffer) == 8192
    alloc.buffer[4096] = 7
    assert os.pread(alloc.fd, 1, 4096) == b"\7"
    alloc.close()
    alloc.close()


def test_arguments(worker: Make, socket_path: pathlib.Path) -> None:
    w = worker(start=False)
    for bad in (
        lambda: w.intent(b"short", HASH, 1, [[1]]),
        lambda: w.intent(XFER, HASH, 0, [[1]]),
        lambda: w.intent(XFER, HASH, 1, [[1]], fanout=17),
        lambda: w.intent(XFER, HASH, 1, [[-1]]),
        lambda: w.expect(XFER, HASH, "a:1", 4, [1, 2], [[1]]),
        lambda: w.expect(XFER, HASH, "a:1", 4, 5, [[1]]),
        lambda: kvspray.Ranks(tp=(2, 2)).flat(),
    ):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(kvspray.KvsprayError):
        kvspray.WorkerClient(socket_path, engine=ENGINE, layers=2000)
    with pytest.raises(kvspray.KvsprayError, match="regions"):
        w.register([], layout())
    with pytest.raises(kvspray.KvsprayError):
        kvspray.WorkerClient("x" * 200, engine=ENGINE, layers=1)


def test_scheduler(sidecar: Make, socket_path: pathlib.Path) -> None:
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        assert c.endpoint is None and c.admission(XFER, HASH) is None
        assert c.await_admission(XFER, HASH, "127.0.0.1:9", 40, 30)  # kept until there is a sidecar
        first = c.admission(XFER, HASH)
        assert first is not None and first.state == AdmissionState.PENDING
        s: Sidecar = sidecar()
        a = s.expect("await")
        canonical("AWAIT", a["raw"])
        assert (a["xfer"], a["hash"], a["peer"], a["tokens"]) == (
            XFER.hex(),
            HASH.hex(),
            "127.0.0.1:9",
            40,
        ) and a["ttl_ms"] <= 30000
        assert c.connected and c.endpoint == "127.0.0.1:7001"
        assert c.await_admission(XFER, HASH, "127.0.0.1:9", 40, 30)
        s.kill()
        s = sidecar()
        a = s.expect("await")  # asked again
        s.command(
            "send",
            name="ADMITTED",
            body={"id": a["id"], "state": "admitted", "tokens": 40, "message": ""},
        )
        until(
            lambda: (x := c.admission(XFER, HASH)) is not None and x.admitted and x.tokens == 40,
            "admitted",
        )
        other = b"o" * 32
        assert c.await_admission(XFER, other, "127.0.0.1:9", 1, 30)
        a = s.expect("await", hash=other.hex())
        s.command(
            "send",
            name="ADMITTED",
            body={"id": a["id"], "state": "refused", "tokens": 0, "message": "fingerprint: dtype"},
        )
        got = until(
            lambda: (
                (x := c.admission(XFER, other)) is not None
                and x.state == AdmissionState.REFUSED
                and x
            ),
            "refused",
        )
        assert got.message == "fingerprint: dtype"
        assert c.await_admission(b"y" * 16, other, "127.0.0.1:9", 1, 0.05)
        until(
            lambda: (
                (x := c.admission(b"y" * 16, other)) is not None and x.state == AdmissionState.GONE
            ),
            "its ttl passes",
        )
        assert c.decline(XFER, other, "127.0.0.1:9", "not wanted")
        assert c.admission(XFER, other) is None
        for _ in range(3):
            with pytest.raises(ValueError):
                c.await_admission(XFER, b"z" * 32, "p" * 300, 1, 1)
    assert not c.connected


def test_a_query_ends_with_the_sidecar_that_has_its_load(
    sidecar: Make, socket_path: pathlib.Path
) -> None:
    loads, shared, later, last = (bytes([i]) * 32 for i in range(4))
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        s: Sidecar = sidecar()
        until(lambda: c.connected, "a session")
        for hash in (loads, shared, shared):
            assert c.await_admission(XFER, hash, "127.0.0.1:9", 40, 30)
        for hash in (loads, shared):
            c.expected(XFER, hash)
        for hash in (loads, shared):
            s.expect("await", hash=hash.hex())
        s.kill()
        s = sidecar()
        until(lambda: c.admission(XFER, loads) is None, "the end of the session")
        assert c.await_admission(XFER, later, "127.0.0.1:9", 40, 30)
        s.expect("await", hash=later.hex())
        assert c.await_admission(XFER, last, "127.0.0.1:9", 40, 30)
        s.expect("await", hash=last.hex())
        asked = {e["hash"] for e in s.seen if e["ev"] == "await"}
        assert asked == {h.hex() for h in (shared, later, last)}
        s.kill()
        until(lambda: not c.connected, "the end of the other session")
        c.expected(XFER, later)
        assert c.admission(XFER, later) is None, "its load has no sidecar"
        c.expected(XFER, shared)
        c.expected(XFER, shared)  # one more than asked
        assert c.await_admission(XFER, shared, "127.0.0.1:9", 40, 30)
        assert c.decline(XFER, shared, "127.0.0.1:9", "aborted")
        assert c.admission(XFER, shared) is None


def test_a_decline_leaves_the_query_of_other_samples(socket_path: pathlib.Path) -> None:
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        for _ in range(2):
            assert c.await_admission(XFER, HASH, "127.0.0.1:9", 40, 30)
        assert c.decline(
            XFER, HASH, "127.0.0.1:9", "another sample, which never asked", asked=False
        )
        c.expected(XFER, HASH)
        assert c.decline(XFER, HASH, "127.0.0.1:9", "its load failed", asked=False)
        assert c.admission(XFER, HASH) is not None, "the other sample waits"
        assert c.decline(XFER, HASH, "127.0.0.1:9", "aborted")
        assert c.admission(XFER, HASH) is None


def test_declines(sidecar: Make, socket_path: pathlib.Path) -> None:
    with kvspray.SchedulerClient(
        socket_path, engine=ENGINE, ranks=kvspray.Ranks(pp=(0, 2), tp=(0, 4))
    ) as c:
        assert c.decline(XFER, HASH, "127.0.0.1:9", "early")  # kept until there is a sidecar
        s: Sidecar = sidecar()
        d = s.expect("decline")
        canonical("DECLINE", d["raw"])
        assert (d["xfer"], d["hash"], d["peer"], d["reason"]) == (
            XFER.hex(),
            HASH.hex(),
            "127.0.0.1:9",
            "early",
        )
        assert c.await_admission(XFER, HASH, "127.0.0.1:9", 40, 30)
        s.expect("await")
        assert c.decline(XFER, HASH, "127.0.0.1:9", "\u00e9" * 200 + "\0x")
        assert s.expect("decline")["reason"] == "\u00e9" * 127
        assert c.admission(XFER, HASH) is None, "the question is over, too"
        assert c.decline(
            XFER, HASH, "127.0.0.1:9", "no room", req="r\0" + "\u00e9" * 100, ranks=[0, 7]
        )
        d = s.expect("decline")
        canonical("DECLINE", d["raw"])
        assert d["req"] == "r" + "\u00e9" * 63, "as EXPECT names it"
        assert d["ranks"] == struct.pack("<2I", 0, 7).hex()
        for req, ranks in (("", [0]), ("r", [-1]), ("r", [1024])):
            with pytest.raises(ValueError):
                c.decline(XFER, HASH, "127.0.0.1:9", req=req, ranks=ranks)
        for peer in ("", "p" * 300, "a\0b"):
            with pytest.raises(ValueError):
                c.decline(XFER, HASH, peer)
    assert not c.decline(XFER, HASH, "127.0.0.1:9")


def test_declines_are_bounded_and_forgotten(sidecar: Make, socket_path: pathlib.Path) -> None:
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        n = 0
        while c.decline(n.to_bytes(16, "little"), HASH, "127.0.0.1:9"):
            n += 1
        assert n == 1024


def test_answered_questions_give_way(sidecar: Make, socket_path: pathlib.Path) -> None:
    """Answers are kept for a while after their time; they must not shut out new questions."""
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        n = 0
        while c.await_admission(
            n.to_bytes(16, "little"), HASH, "127.0.0.1:9", 1, 60 if n else 0.001
        ):
            n += 1
        assert n >= 4096 and c.status().awaits == 4096
        until(
            lambda: c.admission((1).to_bytes(16, "little"), HASH) is not None, "the open ones stay"
        )
        assert c.admission(bytes(16), HASH) is None  # the only one whose time had passed gave way


def test_prefix_hash() -> None:
    base = kvspray.prefix_hash([1, 2, 3])
    assert len(base) == 32 and base == kvspray.prefix_hash((1, 2, 3), lora="", salt=None)
    others = [
        kvspray.prefix_hash([1, 2]), kvspray.prefix_hash([1, 2, 3], lora="a"),
        kvspray.prefix_hash([1, 2, 3], salt="a"), kvspray.prefix_hash([1, 2, 3], mm=[("a", 0, 1)]),
        kvspray.prefix_hash([1, 2, 3], mm=[("a", 0, 2)]),
    ]  # fmt: skip
    assert len({base, *others}) == 6


def test_params() -> None:
    p = kvspray.Params(b"p" * 16, "127.0.0.1:1", 2)
    assert kvspray.Params.from_dict(p.to_dict()) == p
    for bad in (
        None,
        {},
        {"v": 2, "xfer": "00" * 16},
        {"v": 1, "xfer": "zz"},
        {"v": 1, "xfer": "00"},
        {"v": 1, "xfer": "00" * 16, "fanout": 0},
    ):
        assert kvspray.Params.from_dict(bad) is None
