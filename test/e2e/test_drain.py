"""SIGTERM while transfers are under way: those that can end do, and those that cannot are failed
and fenced in bounded time."""

from __future__ import annotations

import itertools
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator

import cluster as rig
import pytest
from conftest import Cluster
from engines import Pending
from prompts import fresh

DEADLINE, PARTNER, GRACE = 30.0, 3.0, 1.0
# Long enough for the rest of a prefill on busy cores: an orderly stop that has to end something
# ends it.
PATIENT = 25.0
# Shorter than the transfer's deadline: what is stuck is ended by the drain and by nothing else.
SHORT = 1.0
# A process that has a signal to end, on busy cores; with the times above still far from the
# deadline.
SLACK = 10.0
LONG = 4400
STEPS = 12  # of 35
ARGS = {"max_num_batched_tokens": 128}
SIDES = ["sp", "sd"]


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    out = Cluster(
        workdir,
        {
            "transports": {"order": ["tcp"]},
            "transfer": {
                "deadline": f"{DEADLINE:g}s",
                "match_timeout": f"{PARTNER:g}s",
                "grace": f"{GRACE:g}s",
            },
            "drain": {"timeout": f"{PATIENT:g}s"},
        },
    )
    try:
        for name in "PDR":
            out.spawn(name, **ARGS)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        for s in (out.sp, out.sd):
            if s.proc:
                s.signal(signal.SIGCONT)
        out.close()


def received(c: Cluster, **labels: str) -> int:
    return int(rig.total(c.d.metrics(), "vllm:kvspray_transfers_total", side="received", **labels))


def under_way(c: Cluster, prompt: list[int]) -> tuple[Pending, Pending]:
    """Sends the prompt to both, and returns when bytes of it have landed and P is in the middle of
    it, where it stays until it is released to go on."""
    before = landed(c)
    start = c.p.steps()
    c.p.pause_at(start + STEPS)
    p, d = c.start_both(prompt)
    rig.wait_for("P in the middle of it", lambda: c.p.steps() >= start + STEPS, 60, tick=0.001)
    rig.wait_for("bytes have landed", lambda: landed(c) > before, 60, tick=0.001)
    return p, d


def landed(c: Cluster) -> float:
    return rig.total(c.sd.metrics(), "kvspray_rail_bytes_total", direction="in")


def ended(sidecar: rig.Sidecar, within: float) -> int:
    """The status that a sidecar ended with by itself."""
    assert sidecar.proc is not None
    try:
        rc = sidecar.proc.wait(within)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{sidecar.name} did not end within {within:g} s of SIGTERM\n{sidecar.tail()}")
    sidecar.proc = None
    return rc


def works(c: Cluster, seed: object) -> None:
    """A transfer, with no engine restarted."""
    c.connected()
    end = time.monotonic() + 30
    for i in itertools.count():  # the other sidecar may need a moment to find the one that is back
        prompt, before = fresh(500, ("after", seed, i)), received(c, outcome="ok")
        assert c.both(prompt).tokens == c.r.run(prompt, 12).tokens
        if received(c, outcome="ok") == before + 1:
            return
        assert time.monotonic() < end, (
            "transfers do not work again\n" + c.sd.tail(15) + "\n" + c.sp.tail(15)
        )


@pytest.mark.parametrize("side", SIDES)
def test_sigterm_lets_a_transfer_end(c: Cluster, side: str) -> None:
    sidecar: rig.Sidecar = getattr(c, side)
    prompt = fresh(LONG, ("drain", side))
    want = c.r.run(prompt, 12).tokens
    before = received(c, outcome="ok"), received(c)
    p, d = under_way(c, prompt)
    sidecar.signal(signal.SIGTERM)
    rig.wait_for("draining", lambda: '"draining"' in sidecar.tail(200), 30, tick=0.001)
    assert received(c, outcome="ok") == before[0], (
        "the transfer was over before SIGTERM came: nothing was shown"
    )
    c.p.pause_at(None)
    # What comes now is refused, and served all the same.
    late = fresh(100, ("late", side))
    assert c.both(late).tokens == c.r.run(late, 12).tokens
    assert d.result().tokens == want
    p.result()
    assert ended(sidecar, PATIENT) == 0
    assert '"drained"' in sidecar.tail(200)
    assert received(c, outcome="ok") == before[0] + 1, (
        "the transfer that was under way did not end well"
    )
    c.settle()
    sidecar.start()
    works(c, side)


@pytest.mark.parametrize("side", SIDES)
def test_sigterm_with_a_lease_that_is_stuck(c: Cluster, side: str) -> None:
    sidecar: rig.Sidecar = getattr(c, side)
    other: rig.Sidecar = c.sd if side == "sp" else c.sp
    assert sidecar.stop() == 0
    sidecar.config["drain"]["timeout"] = f"{SHORT:g}s"
    sidecar.start()
    try:
        works(c, ("short", side))
        prompt = fresh(LONG, ("stuck", side))
        want = c.r.run(prompt, 12).tokens
        before = received(c, outcome="ok")
        p, d = under_way(c, prompt)
        # The lease of this side cannot end: the other side neither moves nor dies.
        other.signal(signal.SIGSTOP)
        sidecar.signal(signal.SIGTERM)
        began = time.monotonic()
        rc = ended(sidecar, SHORT + GRACE + SLACK)
        took = time.monotonic() - began
        assert took >= SHORT, f"ended after {took:.2f} s: it did not wait for the lease"
        assert rc == 0
        assert "drain timed out; open leases are fenced" in sidecar.tail(200)
        other.signal(signal.SIGCONT)
        c.p.pause_at(None)
        assert d.result().tokens == want
        p.result()
        assert received(c, outcome="ok") == before, (
            "a transfer whose sidecar ended cannot have ended well"
        )
        # Fenced, or proved by its exit: either way the blocks are the engines' again long before
        # the deadline.
        c.settle(timeout=DEADLINE / 2)
        sidecar.start()
        works(c, ("after", side))
    finally:
        c.p.pause_at(None)
        other.signal(signal.SIGCONT)
        if sidecar.proc:
            assert sidecar.stop() == 0
        sidecar.config["drain"]["timeout"] = f"{PATIENT:g}s"
        sidecar.start()
