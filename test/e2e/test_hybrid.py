"""A model whose layers do not all see the whole prompt: vLLM keeps several cache groups with block
tables of their own over the same memory, and takes back blocks that a sliding window has left.
Tokens equal a plain engine's, and of each window only the end moves.

So where an engine has pipeline stages that are unlike, of which one lacks a kind of layer."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import HYBRID, Cluster
from prompts import fresh
from test_tokens import Moved

WINDOW = 80  # of kvspray.trial.tiny_model
FULL, SLIDING = 2, 4  # layers
STEP = 256  # tokens that an engine computes at once
BYTES = 2 * 2 * 32 * 4  # K and V of the heads of a token in a layer
# Shorter than the window, about it, about block borders.
LENGTHS = (1, 2, 33, 79, 80, 81, 97, 111, 112, 143, 144, 300, 513, 1500)
FEW = (33, 111, 143, 513)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    p: dict[str, Any] = dataclasses.field(default_factory=dict)
    d: dict[str, Any] = dataclasses.field(default_factory=dict)
    both: dict[str, Any] = dataclasses.field(default_factory=dict)
    hybrid: bool = True


CASES = (
    Case("groups"),
    Case("blocks of 64 to 32", {"block_size": 64}),
    Case("blocks of 32 to 64", d={"block_size": 64}),
    Case("one group", both={"disable_hybrid_kv_cache_manager": True}, hybrid=False),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def c(zygote: None, workdir: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    case: Case = request.param
    dir = workdir / case.name.replace(" ", "-")
    dir.mkdir()
    out = Cluster(dir, {"transports": {"order": ["shm"]}})
    out.model = HYBRID
    out.case = case  # type: ignore[attr-defined]
    try:
        out.spawn("P", **case.both, **case.p, long_prefill_token_threshold=128)
        out.spawn("D", **case.both, **case.d)
        out.spawn("R", **case.both)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


def moves(case: Case, n: int, skip: int = 0) -> int:
    """The bytes of a prompt that D lacks: all tokens but the last of full layers, and the blocks in
    the window of the others. Of the first of those P has less where its blocks are smaller: it has
    given up what no layer sees any more."""
    if not case.hybrid:
        return (n - skip) * (FULL + SLIDING) * BYTES
    n -= 1  # the last one is D's
    seen = max(n - WINDOW + 1, 0)
    first = max(
        skip,
        *(
            seen // block * block
            for block in (case.p.get("block_size", 32), case.d.get("block_size", 32))
        ),
    )
    return ((n - skip) * FULL + (n - first) * SLIDING) * BYTES


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mode", ["first", "both"])
def test_tokens_are_those_of_one_engine(c: Cluster, mode: str, n: int) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    if case is not CASES[0] and n not in FEW:
        return
    prompt = fresh(n, (case.name, mode, n))
    with Moved(c) as moved:
        got = c.prefill_first(prompt) if mode == "first" else c.both(prompt)
    assert got.tokens == c.r.run(prompt, 12).tokens
    if case.hybrid and n == 1:
        # Nothing but the token that D computes itself.
        assert moved.all == 0 and moved.bytes == 0, vars(moved)
    else:
        moved.all_loaded(1)
        assert moved.bytes == moves(case, n), vars(moved)
    c.settle()


def test_a_prefix_that_decode_has_is_left_out(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    # Two blocks at least: of one vLLM finds none where blocks have 64 tokens.
    for n, hit in ((300, 2 * case.d.get("block_size", 32)), (300, 256), (200, 192)):
        prompt = fresh(n, (case.name, "prefix", n, hit))
        c.d.run(prompt[:hit], 2)
        with Moved(c) as moved:
            got = c.prefill_first(prompt)
        assert got.tokens == c.r.run(prompt, 12).tokens
        moved.all_loaded(1)
        # How much of a prefix all groups still have is vLLM's decision.
        assert 0 < moved.hit <= hit and moved.bytes == moves(case, n, moved.hit), vars(moved)
        c.settle()


def test_the_last_token_of_a_block_that_only_the_last_of_the_prompt_sees(c: Cluster) -> None:
    """D computes the last token of the prompt. It looks back to the end of a block that the token
    after it sees no more."""
    case: Case = c.case  # type: ignore[attr-defined]
    prompts = [
        fresh(WINDOW - 1 + 32 * (1 + i % 4), (case.name, "edge", i))
        for i in range(12 if case is CASES[0] else 2)
    ]
    with Moved(c) as moved:
        started = [c.start_both(p) for p in prompts]
        got = [d.result().tokens for _, d in started]
    assert got == [c.r.run(p, 12).tokens for p in prompts]
    moved.all_loaded(len(prompts))
    c.settle()


def test_prefix_hits_on_prefill_and_many_at_once(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    base = fresh(400, (case.name, "base"))
    prompts = [base + fresh(20 + 37 * i, (case.name, "many", i)) for i in range(6)]
    with Moved(c) as moved:
        started = [c.start_both(p) for p in prompts]
        got = [d.result().tokens for _, d in started]
    assert got == [c.r.run(p, 12).tokens for p in prompts]
    moved.all_loaded(6)
    c.settle()


def test_preemption_in_mid_send(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    prompt = fresh(1500, (case.name, "preempt"))
    with Moved(c) as moved:
        start = c.p.steps()
        c.p.pause_at(start + 4)
        p, d = c.start_both(prompt)
        rig.wait_for("P under way", lambda: c.p.steps() >= start + 4, 60, tick=0.001)
        c.p.preempt_all()
        c.p.pause_at(None)
        got = d.result()
        p.result()
    assert got.tokens == c.r.run(prompt, 12).tokens
    assert moved.recomputed == 0, vars(moved)
    assert c.p.computed(p.rid) == len(prompt) + 4 * STEP, "what was preempted was not in the middle"
    c.settle()


def test_a_window_that_moves_on_while_prefill_decodes(c: Cluster) -> None:
    """P was asked for more than one token: it takes back, and gives to others, the blocks at the
    start of the window that D still wants."""
    case: Case = c.case  # type: ignore[attr-defined]
    for i, n_tokens in enumerate((2, 40, 90)):
        prompt = fresh(700, (case.name, "decodes", i))
        kv = c.p.run(prompt, n_tokens, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
        c.p.run(fresh(2000, (case.name, "takes what is free", i)), 2)
        got = c.d.run(prompt, 12, kv=kv)
        assert got.tokens == c.r.run(prompt, 12).tokens
        # What the window has left behind is not offered; where it has not, D has it.
        assert (kv is None) == (case.hybrid and n_tokens > 2), (n_tokens, kv)
        c.settle(timeout=20)


def test_a_load_that_fails_is_recomputed(c: Cluster) -> None:
    """Where all layers see the whole prompt, from the first block that has not come. Elsewhere all
    of it: of a window nothing has come, and an engine with several groups could not even receive
    single blocks."""
    case: Case = c.case  # type: ignore[attr-defined]
    prompt, came = fresh(700, (case.name, "fails")), 2 * STEP

    def landed() -> float:
        return rig.total(c.sd.metrics(), "kvspray_rail_bytes_total", direction="in")

    want = landed() + came * (FULL if case.hybrid else FULL + SLIDING) * BYTES
    start = c.p.steps()
    c.p.pause_at(start + 2)
    with Moved(c) as moved:
        p, d = c.start_both(prompt)
        rig.wait_for(
            "the first two steps landed", lambda: c.p.steps() == start + 2 and landed() == want, 30
        )
        assert c.d.status()["loading"] == 1
        p.abort()
        c.p.pause_at(None)
        got = d.result()
    assert got.tokens == c.r.run(prompt, 12).tokens
    lacks = len(prompt) - (0 if case.hybrid else came)
    assert (
        moved.ok == 0 and moved.recomputed == lacks - case.hybrid and c.d.computed(d.rid) == lacks
    ), vars(moved)
    c.settle(timeout=20)


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
    assert len(sides[1]) > 100
    assert sides[0] == sides[1]


# How many layers the stages of each engine have, of sliding, sliding, full, sliding, sliding, full:
# of each engine one lacks a kind.
STAGES = (("5,1", None), (None, "2,4"))


@pytest.fixture(
    scope="module", params=STAGES, ids=lambda s: f"stages of {s[0] or 'all'} to {s[1] or 'all'}"
)
def staged(
    zygote: None, workdir: pathlib.Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    dir = workdir / "-".join((of or "all").replace(",", "") for of in request.param)
    dir.mkdir()
    out = Cluster(dir, {"transports": {"order": ["shm"]}})
    out.model = HYBRID
    out.stages = request.param  # type: ignore[attr-defined]
    try:
        for name, layers in zip("PD", request.param, strict=True):
            with pytest.MonkeyPatch.context() as m:
                if layers:
                    m.setenv("VLLM_PP_LAYER_PARTITION", layers)
                out.spawn(
                    name,
                    **(
                        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
                        if layers
                        else {}
                    ),
                )
        out.spawn("R")
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


@pytest.mark.parametrize("n", (33, 513))
@pytest.mark.parametrize("mode", ["first", "both"])
def test_tokens_of_unlike_pipeline_stages(staged: Cluster, mode: str, n: int) -> None:
    c = staged
    prompt = fresh(n, (c.dir.name, mode, n))
    with Moved(c) as moved:
        got = c.prefill_first(prompt) if mode == "first" else c.both(prompt)
    assert got.tokens == c.r.run(prompt, 12).tokens
    moved.all_loaded(2 if c.stages[1] else 1)  # type: ignore[attr-defined]  # each of D's stages has a transfer of its own
    assert moved.bytes == moves(CASES[0], n), vars(moved)
    c.settle()


def test_a_load_of_stages_that_fails_is_recomputed(staged: Cluster) -> None:
    """Where prefill has stages it has begun a second step before the first has ended, and where
    decode has some each of them receives it."""
    c = staged
    prompt, came = fresh(700, (c.dir.name, "fails")), 2 * STEP

    def landed() -> float:
        return rig.total(c.sd.metrics(), "kvspray_rail_bytes_total", direction="in")

    want = landed() + came * FULL * BYTES
    start = c.p.steps()
    c.p.pause_at(start + 2)
    with Moved(c) as moved:
        p, d = c.start_both(prompt)
        rig.wait_for(
            "the first two steps landed", lambda: c.p.steps() == start + 2 and landed() == want, 30
        )
        p.abort()
        c.p.pause_at(None)
        got = d.result()
    assert got.tokens == c.r.run(prompt, 12).tokens
    assert moved.ok == 0 and c.d.computed(d.rid) == len(prompt), vars(moved)
    c.settle(timeout=20)
