"""Greedy tokens of a prefill/decode pair equal those of a plain engine, and nothing that should
have moved was recomputed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import Cluster
from engines import Out, landed
from prompts import BLOCK, LENGTHS, fresh

LAYERS, TOKEN = 4, 512  # bytes of a token in a layer
STEP = 256  # tokens of a prefill step, of a request that is alone: two chunks of each layer
LAYER_S = 0.04  # that a layer takes at least where streaming is judged
TRIES = 4  # of what a busy machine may spoil


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    out = Cluster(workdir, {"transports": {"order": ["shm"]}, "transfer": {"match_timeout": "3s"}})
    try:
        # P's pool holds two long prompts at most, and lets them in before it checks that both fit:
        # so that it has to preempt.
        out.spawn(
            "P",
            kv_cache_memory_bytes=12 << 20,
            scheduler_reserve_full_isl=False,
            long_prefill_token_threshold=128,
        )
        out.spawn("D")
        out.spawn("R")
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


class Moved:
    """What D loaded and what it computed while the block ran."""

    def __init__(self, c: Cluster) -> None:
        self.c = c

    def __enter__(self) -> Moved:
        self.before = self.c.d.metrics()
        return self

    def __exit__(self, *exc: object) -> None:
        after = self.c.d.metrics()

        def grew(name: str, **labels: str) -> int:
            return int(rig.total(after, name, **labels) - rig.total(self.before, name, **labels))

        self.loaded = grew("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        self.computed = grew("vllm:prompt_tokens_by_source_total", source="local_compute")
        self.hit = grew("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
        self.ok = grew("vllm:kvspray_transfers_total", side="received", outcome="ok")
        self.all = grew("vllm:kvspray_transfers_total", side="received")
        self.recomputed = grew("vllm:kvspray_recompute_tokens_total")
        self.alone = grew("vllm:kvspray_local_prefills_total")
        self.bytes = grew("vllm:kvspray_bytes_total", side="received")
        self.routed = grew("vllm:kvspray_bytes_total", side="received", transport=self.c.transport)

    def all_loaded(self, requests: int, ranks: int = 1) -> None:
        """Every request had a transfer for each of D's ranks, and computed at most its last
        token."""
        n = requests * ranks
        assert (self.ok, self.all, self.recomputed, self.alone) == (n, n, 0, 0), vars(self)
        assert self.computed <= requests and self.routed == self.bytes > 0, vars(self)


def same(got: Out, want: Out) -> None:
    assert got.tokens == want.tokens


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mode", ["first", "both"])
def test_lengths(c: Cluster, mode: str, n: int) -> None:
    prompt = fresh(n, (mode, n))
    with Moved(c) as moved:
        got = c.prefill_first(prompt) if mode == "first" else c.both(prompt)
    same(got, c.r.run(prompt, 12))
    moved.all_loaded(1)
    assert moved.bytes == n * LAYERS * TOKEN
    c.settle()


def test_an_unmodified_nixl_router_sees_its_keys(c: Cluster) -> None:
    kv = c.p.run(fresh(40), 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    assert kv is not None
    assert kv["do_remote_prefill"] is True and kv["do_remote_decode"] is False
    assert {
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
    } <= set(kv)
    assert kv["kvspray"]["v"] == 1 and kv["kvspray"]["peer"] == c.sp.endpoint
    prompt = fresh(40, "nobody came")
    got = c.d.run(prompt, 4, kv={**kv, "kvspray": {**kv["kvspray"], "v": 9}})
    same(got, c.r.run(prompt, 4))
    c.settle(timeout=20)  # the other side never came: P lets go after its deadline


def test_a_router_that_names_the_wrong_sidecar_is_told(c: Cluster) -> None:
    """D's own: no transfer can come from there, and D does not wait."""
    prompt = fresh(90, "own sidecar")
    kv = {
        "do_remote_prefill": True,
        "kvspray": {"v": 1, "xfer": "ab" * 16, "fanout": 1, "peer": c.sd.endpoint},
    }
    before = c.d.metrics()
    same(c.d.run(prompt, 12, kv=kv), c.r.run(prompt, 12))
    after = c.d.metrics()
    for reason, want in (("prefill_refused", 1), ("prefill_gone", 0), ("admission_timeout", 0)):
        assert (
            sum(
                rig.total(m, "vllm:kvspray_local_prefills_total", reason=reason) * sign
                for m, sign in ((after, 1), (before, -1))
            )
            == want
        ), reason
    assert (
        f"{c.sd.endpoint} was asked for the prefill, refused: it is this engine's own sidecar"
        in c.d.log.read_text(errors="replace")
    )
    c.settle()


def test_prefix_hits_on_decode_move_only_what_is_missing(c: Cluster) -> None:
    base = fresh(160, "prefix on D")
    with Moved(c) as moved:
        c.prefill_first(base)
    assert moved.loaded >= 159
    longer = base + fresh(100, "tail")
    for mode in (c.prefill_first, c.both):
        with Moved(c) as moved:
            got = mode(longer + fresh(40, mode.__name__))
        same(got, c.r.run(longer + fresh(40, mode.__name__), 12))
        moved.all_loaded(1)
        assert (
            moved.hit >= 160
            and moved.bytes <= (300 - 160 + BLOCK) // BLOCK * BLOCK * LAYERS * TOKEN
        )
    c.settle()


def test_prefix_hits_on_prefill_wait_for_their_computation(c: Cluster) -> None:
    """Two prompts with a common start, dispatched together: the second hits blocks that the first
    has not computed yet."""
    base = fresh(600, "prefix on P")
    prompts = [base + fresh(30 + i, i) for i in range(4)]
    with Moved(c) as moved:
        runs = [c.start_both(p) for p in prompts]
        got = [d.result() for _, d in runs]
    for p, out in zip(prompts, got, strict=True):
        same(out, c.r.run(p, 12))
    moved.all_loaded(4)
    c.settle()


def test_many_at_once(c: Cluster) -> None:
    prompts = [fresh(50 + 37 * i, ("many", i)) for i in range(12)]
    with Moved(c) as moved:
        runs = [c.start_both(p) for p in prompts]
        got = [d.result() for _, d in runs]
    for p, out in zip(prompts, got, strict=True):
        same(out, c.r.run(p, 12))
    moved.all_loaded(12)
    c.settle()


@pytest.mark.parametrize("mode", ["first", "both"])
def test_samples(c: Cluster, mode: str) -> None:
    prompt = fresh(150, ("n", mode))
    with Moved(c) as moved:
        got = c.prefill_first(prompt, n=3) if mode == "first" else c.both(prompt, n=3)
    want = c.r.run(prompt, 12).tokens[0]
    assert got.tokens == [want] * 3
    assert moved.recomputed == 0 and moved.alone == 0 and moved.ok == moved.all
    c.settle()


def test_prompt_list_with_only_the_first_params(c: Cluster) -> None:
    """A router passes on the first prompt's params for all of them; the others match by hash."""
    prompts = [fresh(60 + 20 * i, ("list", i)) for i in range(4)]
    runs = [
        c.p.add(
            p, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}, rid=f"cmpl-list-{i}"
        )
        for i, p in enumerate(prompts)
    ]
    kv = runs[0].result().kv
    for r in runs[1:]:
        r.result()
    with Moved(c) as moved:
        outs = [c.d.add(p, 12, kv=kv, rid=f"cmpl-other-{i}") for i, p in enumerate(prompts)]
        got = [o.result() for o in outs]
    for p, out in zip(prompts, got, strict=True):
        same(out, c.r.run(p, 12))
    moved.all_loaded(4)
    c.settle()


def test_equal_prompts_share_a_transfer_id(c: Cluster) -> None:
    prompt = fresh(90, "twins")
    with Moved(c) as moved:
        runs = [c.start_both(prompt, xfer="cd" * 16) for _ in range(2)]
        got = [d.result() for _, d in runs]
    for out in got:
        same(out, c.r.run(prompt, 12))
    assert moved.recomputed == 0
    c.settle()


def test_another_prompt_under_the_same_transfer_id_is_never_served(c: Cluster) -> None:
    mine, other = fresh(90, "mine"), fresh(90, "other")
    kv = c.p.run(other, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    got = c.d.run(mine, 12, kv=kv)
    same(got, c.r.run(mine, 12))
    c.settle(timeout=25)


def test_preemption_by_a_full_pool(c: Cluster) -> None:
    """Two prompts that fit one by one, not together, chunk by chunk in turn: P takes the second
    one's blocks in mid send."""
    prompts = [fresh(3200, ("big", i)) for i in range(2)]
    before = c.p.metrics()
    with Moved(c) as moved:
        c.p.pause_at(c.p.steps())  # until both are there
        runs = [c.start_both(p) for p in prompts]
        c.p.pause_at(None)
        got = [d.result() for _, d in runs]
    for p, out in zip(prompts, got, strict=True):
        same(out, c.r.run(p, 12))
    assert rig.total(c.p.metrics(), "vllm:num_preemptions_total") > rig.total(
        before, "vllm:num_preemptions_total"
    )
    moved.all_loaded(2)
    c.settle()


@pytest.mark.parametrize("when", [1, 4, 8])
def test_preemption_by_hand_at_several_points(c: Cluster, when: int) -> None:
    prompt = fresh(2400, ("preempt", when))  # ten steps
    with Moved(c) as moved:
        start = c.p.steps()
        c.p.pause_at(start + when)
        p, d = c.start_both(prompt)
        rig.wait_for("P under way", lambda: c.p.steps() >= start + when, 60, tick=0.001)
        c.p.preempt_all()
        c.p.pause_at(None)
        got = d.result()
        p.result()
    same(got, c.r.run(prompt, 12))
    assert moved.recomputed == 0, vars(moved)
    assert c.p.computed(p.rid) == len(prompt) + when * STEP, (
        "what was preempted was not in the middle"
    )
    c.settle()


def test_abort_on_either_side(c: Cluster) -> None:
    free = {e.name: e.free_blocks() for e in (c.p, c.d)}
    for side in ("p", "d"):
        for after in (0, 2, 6):
            prompt = fresh(1500, ("abort", side, after))
            start = c.p.steps()
            c.p.pause_at(start + after)
            p, d = c.start_both(prompt)
            rig.wait_for(
                "P under way",
                lambda after=after, start=start: c.p.steps() >= start + after,
                60,
                tick=0.001,
            )
            (p if side == "p" else d).abort()
            c.p.pause_at(None)
            if side == "p":
                # D computes it itself, or had it already.
                same(d.result(timeout=45), c.r.run(prompt, 12))
            else:
                p.result()
            c.settle(timeout=25)
    # The engines serve on, with all their blocks.
    prompt = fresh(300, "after the aborts")
    with Moved(c) as moved:
        same(c.both(prompt), c.r.run(prompt, 12))
    moved.all_loaded(1)
    c.settle()
    assert {e.name: e.free_blocks() for e in (c.p, c.d)} == free


@pytest.mark.parametrize("n", [2048, 4096])
def test_long_prompts_stream_while_prefill_runs(c: Cluster, n: int) -> None:
    """P goes on at its own pace, and nothing waits for anything. Its layers take time, as those of
    a larger model do; what has landed when the last layer of its last step is done is what D's
    sidecar has then. All that the steps before have computed must be there, and the last one's
    layers but two: with pushes that come a step late, or only at a step's end, that can never be. A
    machine that was busy just then gets another try."""
    steps = n // STEP
    want = ((steps - 1) * LAYERS + LAYERS - 2) * STEP * TOKEN
    assert want > 0.75 * n * LAYERS * TOKEN
    for again in range(TRIES):
        prompt = fresh(n, ("early", n, again))
        before = landed(c.sd.url)
        c.p.slow_layers(LAYER_S, c.sd.url)
        try:
            with Moved(c) as moved:
                got = c.both(prompt)
            by_step = [there - before for there in c.p.landed_by_step()]
        finally:
            c.p.slow_layers(0, "")
        same(got, c.r.run(prompt, 12))
        moved.all_loaded(1)
        assert moved.bytes == n * LAYERS * TOKEN
        assert len(by_step) == steps, by_step
        half = steps // 2  # and not all of it in the last step
        if by_step[-1] >= want and by_step[half] >= half * LAYERS * STEP * TOKEN:
            break
    else:
        pytest.fail(
            f"{TRIES} times less had landed than {want} bytes at the end, and what half of the "
            f"steps compute at half of them; the last time {by_step}"
        )
    c.settle()

    # The trace's value of it, and make demo judges, is the same as at P.
    def last() -> dict[str, Any]:
        return [t for t in c.sp.lines(c.sp.transfers) if t["side"] == "source"][-1]

    rig.wait_for("its line", lambda: last()["bytes"] == moved.bytes, 10)
    assert last()["early_bytes"] >= want, (want, last())


def test_every_transferred_page_has_one_hash(c: Cluster) -> None:
    c.settle()
    sides = []
    for s in (c.sp, c.sd):
        sides.append(
            {
                tuple(b[k] for k in ("xfer", "hash", "dest", "group", "layer", "block")): b[
                    "sha256"
                ]
                for b in s.lines(s.hashes)
            }
        )
    assert len(sides[1]) > 1000
    assert sides[0] == sides[1]


def test_metrics_of_both_sides(c: Cluster) -> None:
    c.settle()
    p, d = c.p.metrics(), c.d.metrics()
    assert rig.total(p, "vllm:kvspray_transfers_total", side="sent", outcome="ok") > 0
    assert rig.total(d, "vllm:kvspray_xfer_time_seconds_count") == rig.total(
        d, "vllm:kvspray_transfers_total", side="received", outcome="ok"
    )
    assert rig.total(p, "vllm:kvspray_bytes_total", side="sent") > 0
