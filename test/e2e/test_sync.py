# SPDX-License-Identifier: Apache-2.0
"""Small loads that an idle decode engine waits for in the step that computes on them: used where they may be, right tokens and an engine that
serves on where they do not come, and nothing held afterwards."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Iterator

import cluster as rig
import pytest
from conftest import Cluster
from prompts import fresh

from kvspray_vllm.scheduler import SYNC_BYTES
from kvspray_vllm.worker import SYNC_WAIT_S

DEADLINE, PARTNER, GRACE = 20.0, 10.0, 2.0
ARGS = {name: {"max_num_batched_tokens": 128} for name in "PDR"}
TOKEN_BYTES = 1024  # of the model


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    times = {"deadline": f"{DEADLINE:g}s", "partner": f"{PARTNER:g}s", "grace": f"{GRACE:g}s"}
    c = Cluster(workdir, {"transfer": times, "transports": {"order": ["tcp"]}})
    try:
        for name in "PDR":
            c.spawn(name, **ARGS[name])
        yield c.up()
        c.settle()
    finally:
        for s in (c.sp, c.sd):
            if s.proc is not None and s.proc.poll() is None:
                s.signal(signal.SIGCONT)
        c.close()


def waited_for(c: Cluster) -> int:
    return int(c.d.status()["waited_for"])


def received(c: Cluster, outcome: str = "") -> float:
    return rig.total(c.d.metrics(), "vllm:kvspray_transfers_total", side="received", **({"outcome": outcome} if outcome else {}))


def test_small_loads_of_an_idle_engine(c: Cluster) -> None:
    for n in (2, 31, 32, 33, 64, 100, 255, 256):
        prompt = fresh(n, ("small", n))
        before, ok = waited_for(c), received(c, "ok")
        assert c.prefill_first(prompt).tokens == c.r.run(prompt, 12).tokens, n
        assert (waited_for(c), received(c, "ok")) == (before + 1, ok + 1), n
        c.settle()
        # What was copied is what others hit, and nothing has to move for it.
        assert c.d.run(prompt, 12).tokens == c.r.run(prompt, 12).tokens, n
    assert not c.d.status()["spare"]


def test_a_prefix_that_is_there_stays(c: Cluster) -> None:
    prompt = fresh(96, "prefix") + fresh(70, "rest")
    c.d.run(prompt[:96], 2)
    before, bytes = waited_for(c), rig.total(c.sd.metrics(), "kvspray_rail_bytes_total", direction="in")
    assert c.prefill_first(prompt).tokens == c.r.run(prompt, 12).tokens
    assert waited_for(c) == before + 1
    assert rig.total(c.sd.metrics(), "kvspray_rail_bytes_total", direction="in") - bytes < 166 * TOKEN_BYTES


def test_large_ones_and_those_beside_other_requests_are_not_waited_for(c: Cluster) -> None:
    before = waited_for(c)
    large = fresh(SYNC_BYTES // TOKEN_BYTES + 1, "large")
    assert c.prefill_first(large).tokens == c.r.run(large, 12).tokens
    prompts = [fresh(100 + i, ("flood", i)) for i in range(10)]
    kv = [c.p.add(p, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}) for p in prompts]
    params = [k.result().kv for k in kv]
    busy = c.d.add(fresh(40, "busy"), 1500)
    rig.wait_for("a request that decodes", lambda: c.d.status()["running"] == 1, 60)
    got = [c.d.add(p, 12, kv=k) for p, k in zip(prompts, params, strict=True)]
    for p, d in zip(prompts, got, strict=True):
        assert d.result().tokens == c.r.run(p, 12).tokens
    busy.abort()
    assert waited_for(c) == before
    c.settle()


@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_a_load_that_does_not_come(c: Cluster, who: str, what: signal.Signals) -> None:
    """The sidecar stops, or dies, where the decode engine's scheduler cannot know it yet: between its looks at the connection."""
    c.d.end_sync_rest()  # after the one before
    c.connected()
    sidecar = c.sd if who == "decode" else c.sp
    prompt, other = fresh(220, (who, what)), fresh(150, ("other", who, what))
    want, want_other = c.r.run(prompt, 12).tokens, c.r.run(other, 12).tokens
    kv = c.p.add(prompt, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).result().kv
    before = waited_for(c)
    sidecar.signal(what)
    began = time.monotonic()
    assert c.d.add(prompt, 12, kv=kv).result().tokens == want
    took = time.monotonic() - began
    # Others are served while a sidecar that hangs may still write the spare blocks.
    assert c.d.run(other, 12).tokens == want_other
    if what == signal.SIGSTOP:
        assert waited_for(c) == before + 1 and took < DEADLINE, took
        assert f"not there within {SYNC_WAIT_S} s" in c.d.log.read_text()
    if (who, what) == ("decode", signal.SIGSTOP):
        if time.monotonic() - began < DEADLINE:
            assert c.d.status()["spare"], "given back before the fence"
        rig.wait_for("the sidecar that hangs is killed", lambda: sidecar.proc.poll() is not None, DEADLINE + GRACE + 20)  # type: ignore[union-attr]
    elif what == signal.SIGSTOP:
        sidecar.signal(signal.SIGCONT)
    rig.wait_for("spare blocks free", lambda: not c.d.status()["spare"], DEADLINE + GRACE + 20)
    if sidecar.proc is not None and sidecar.proc.poll() is not None:
        sidecar.kill()
        sidecar.start()
    c.connected()
    c.settle(60)
    again = fresh(120, ("again", who, what))
    assert c.prefill_first(again).tokens == c.r.run(again, 12).tokens
