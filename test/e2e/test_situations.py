"""Situations in which other connectors have failed: aborts while a load waits, also below
MultiConnector, and a prefill engine that restarts between its answer and the decode. Each time the
engines serve on, with the tokens of an engine alone, and hold no block."""

from __future__ import annotations

import json
import pathlib
import signal
from collections.abc import Iterator

import cluster as rig
import pytest
from conftest import Cluster
from prompts import fresh
from test_multi import Both

N = 6  # requests at once
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Kind(Cluster):
    name = ""


class Alone(Kind):
    name = "alone"


class Beside(Both, Kind):
    """Below MultiConnector, which reports the end of a request once both connectors have: a second
    report ends vLLM's engine."""

    name = "multi"


@pytest.fixture(scope="module", params=[Alone, Beside], ids=lambda k: k.name)
def c(request: pytest.FixtureRequest, zygote: None, workdir: pathlib.Path) -> Iterator[Kind]:
    dir = workdir / request.param.name
    dir.mkdir()
    out = request.param(
        dir,
        {"transports": {"order": ["tcp"]}, "transfer": {"deadline": "60s", "match_timeout": "5s"}},
    )
    try:
        for name in "PD":
            out.spawn(name, max_num_seqs=N)
        out.spawn("R")
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        for s in (out.sp, out.sd):
            if s.proc is not None and s.proc.poll() is None:
                s.signal(signal.SIGCONT)
        out.close()


def open_leases(sidecar: rig.Sidecar) -> int:
    held = json.loads(rig.get(sidecar.url + "/debug/state"))["leases"]
    return len(held["destinations"] or ()) + len(held["sources"] or ())


def serves(c: Kind, what: str) -> None:
    for i in range(2):
        prompt = fresh(300, (c.name, what, i))
        want = c.r.run(prompt, 12).tokens
        assert c.prefill_first(prompt).tokens == want
        assert c.both(prompt).tokens == want
    c.settle()


def held_nothing(c: Kind, free: dict[str, int]) -> None:
    c.settle()
    rig.wait_for("no lease", lambda: not open_leases(c.sp) and not open_leases(c.sd), 30)
    for name, blocks in free.items():
        e = c.engines[name]
        rig.wait_for(f"blocks of {name}", lambda e=e, n=blocks: e.free_blocks() == n, 30)


def test_aborts_while_loads_wait_for_a_silent_peer(c: Kind) -> None:
    free = {name: c.engines[name].free_blocks() for name in "PD"}
    prompts = [fresh(400, (c.name, "silent", i)) for i in range(N)]
    given = [c.p.run(p, 1, kv=dict(PREFILL)).kv for p in prompts]
    c.sp.signal(signal.SIGSTOP)
    try:
        waiting = [c.d.add(p, 8, kv=kv) for p, kv in zip(prompts, given, strict=True)]
        rig.wait_for("loads at D's sidecar", lambda: open_leases(c.sd) == N, 30)
        for d in waiting:
            d.abort()
    finally:
        c.sp.signal(signal.SIGCONT)
    held_nothing(c, free)
    serves(c, "after silence")


def test_aborts_of_loads_that_are_about_to_end(c: Kind) -> None:
    """The abort and the end of the load meet in one step, or the abort comes first."""
    free = {name: c.engines[name].free_blocks() for name in "PD"}
    for turn in range(8):
        prompts = [fresh(100, (c.name, "meet", turn, i)) for i in range(N)]
        given = [c.p.run(p, 1, kv=dict(PREFILL)).kv for p in prompts]
        started = [c.d.add(p, 8, kv=kv) for p, kv in zip(prompts, given, strict=True)]
        for d in started[turn % 2 :]:
            d.abort()
        for d, p in zip(started[: turn % 2], prompts, strict=False):
            assert d.result().tokens == c.r.run(p, 8).tokens
    held_nothing(c, free)
    serves(c, "after meeting")


def test_rejections_before_admission_release_the_prefill(c: Kind) -> None:
    """D's front end refuses the requests, so its scheduler never has their prompts."""
    free = {name: c.engines[name].free_blocks() for name in "PD"}
    given = [c.p.run(fresh(400, (c.name, "rejected", i)), 1, kv=dict(PREFILL)).kv for i in range(N)]
    for kv in given:
        assert kv is not None
        c.d.reject(kv)
    held_nothing(c, free)
    assert c.p.log.read_text().count("refused by the engine's front end") == N
    serves(c, "after rejections")


def test_an_answer_that_was_used_names_no_cache(c: Kind) -> None:
    """A router sends a request again, or a client another prompt with the answer. P's blocks hold
    other prompts by then."""
    free = {name: c.engines[name].free_blocks() for name in "PD"}
    prompt, other = fresh(400, (c.name, "again")), fresh(400, (c.name, "another"))
    kv = c.p.run(prompt, 1, kv=dict(PREFILL)).kv
    assert kv is not None
    want = [c.r.run(p, 8).tokens for p in (prompt, other)]
    assert c.d.run(prompt, 8, kv=dict(kv)).tokens == want[0]
    for i in range(N):
        c.p.run(fresh(400, (c.name, "instead", i)), 1)
    assert c.d.clear_prefix_cache()
    forged = {**kv, "remote_request_id": "cmpl-none", "remote_block_ids": [[1 << 30]]}
    again = [
        c.d.add(p, 8, kv=dict(given)) for p, given in ((prompt, kv), (other, kv), (other, forged))
    ]
    assert [a.result().tokens for a in again] == [want[0], want[1], want[1]]
    held_nothing(c, free)


def test_a_prefill_engine_that_restarts_has_other_blocks(c: Kind) -> None:
    """The decode has the answer of the engine before: its blocks hold something else by now, or
    nothing."""
    prompts = [fresh(400, (c.name, "restart", i)) for i in range(N)]
    given = [c.p.run(p, 1, kv=dict(PREFILL)).kv for p in prompts]
    c.p.kill()
    c.spawn("P", max_num_seqs=N).wait_up()
    rig.wait_for(
        "P's sessions", lambda: rig.total(c.sp.metrics(), "kvspray_engine_sessions") >= 2, 60
    )
    for i in range(N):  # the same blocks, other bytes
        c.p.run(fresh(400, (c.name, "others", i)), 1)
    for p, kv in zip(prompts, given, strict=True):
        assert c.d.run(p, 8, kv=kv).tokens == c.r.run(p, 8).tokens
    c.settle()
    serves(c, "after a restart")


def test_a_prefill_node_dies_while_loads_wait_and_comes_back(c: Kind) -> None:
    """Engine and sidecar at once: no end of the loads ever comes from there. Half of them are
    aborted by then."""
    free = c.d.free_blocks()
    prompts = [fresh(400, (c.name, "node", i)) for i in range(N)]
    given = [c.p.run(p, 1, kv=dict(PREFILL)).kv for p in prompts]
    c.sp.signal(signal.SIGSTOP)
    waiting = [c.d.add(p, 8, kv=kv) for p, kv in zip(prompts, given, strict=True)]
    rig.wait_for("loads at D's sidecar", lambda: open_leases(c.sd) == N, 30)
    for d in waiting[::2]:
        d.abort()
    c.p.kill()
    c.sp.kill()
    for d, p in zip(waiting[1::2], prompts[1::2], strict=True):
        assert d.result().tokens == c.r.run(p, 8).tokens
    rig.wait_for("no lease", lambda: not open_leases(c.sd), 30)
    rig.wait_for("D's blocks", lambda: c.d.free_blocks() == free, 30)
    c.sp.start()
    c.spawn("P", max_num_seqs=N).wait_up()
    c.connected()
    for p, kv in zip(prompts, given, strict=True):  # answers of the node before
        assert c.d.run(p, 8, kv=kv).tokens == c.r.run(p, 8).tokens
    serves(c, "after the node came back")
