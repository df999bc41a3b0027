"""Speculative decoding on both engines: tokens, draft tokens and the draft's logits are those of a
plain engine, position by position, and the layers of a draft move with the model's.

The drafts of EAGLE, EAGLE-3 and MTP are right at some positions and wrong at others
(test/rig/drafts.py). That of draft_model is the model itself: every token of it is accepted where
its cache is right.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import cluster as rig
import drafts
import numpy as np
import pytest
from conftest import MODEL, Cluster
from engines import Engine, Out
from prompts import counting, fresh
from test_tokens import LAYERS, TOKEN, Moved

TOKENS = 24  # of an answer
FEW = 12  # of each of many
DRAFTED = 3
LENGTHS = (2, 31, 32, 33, 64, 300, 700)  # about block borders, and prompts of several chunks
# Of `make test-drafts`.
PROMPTS = int(os.environ.get("KVSPRAY_DRAFTS_PROMPTS", "0"))
# Sums of float32 depend on how many tokens are computed at once: D computes the last token alone.
NEAR = 1e-3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTED,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}


@dataclasses.dataclass(frozen=True)
class Method:
    model: pathlib.Path
    spec: dict[str, Any]
    token: int  # bytes of a token in all layers
    drafter: bool = True
    prompts: Callable[[int, object], list[int]] = fresh


def methods(dir: pathlib.Path) -> dict[str, Callable[[], Method]]:
    def method(name: str, model: pathlib.Path, token: int, draft: pathlib.Path | None) -> Method:
        spec: dict[str, Any] = {"method": name, "num_speculative_tokens": DRAFTED}
        return Method(model, spec | ({"model": str(draft)} if draft else {}), token)

    def of_llama(name: str, token: int) -> Method:
        drafts.llama(dir, MODEL)
        return method(name, dir / "target", token, dir / name)

    def mtp() -> Method:
        drafts.mimo(dir / "target", MODEL)
        return method("mtp", dir / "target", (LAYERS + 1) * TOKEN, None)

    def ngram() -> Method:
        drafts.counting(dir, MODEL)
        return Method(dir / "target", NGRAM, LAYERS * TOKEN, drafter=False, prompts=counting)

    return {
        "draft_model": lambda: method("draft_model", MODEL, 2 * LAYERS * TOKEN, MODEL),
        "ngram": ngram,
        "eagle": lambda: of_llama("eagle", (LAYERS + 1) * TOKEN),
        # Its draft has four times as many KV heads.
        "eagle3": lambda: of_llama("eagle3", (LAYERS + 4) * TOKEN),
        "mtp": mtp,
    }


METHODS = ("draft_model", "ngram", "eagle", "eagle3", "mtp")


class Pair(Cluster):
    """Like Cluster, and every draft of D and R is noted."""

    method: Method

    def start(self, method: Method) -> Pair:
        self.method = method
        for name in "PDR":
            self.spawn(name, model=method.model, speculative_config=dict(method.spec))
        self.up()
        for e in (self.d, self.r):
            e.rpc(note_drafts if method.drafter else note_lookups)
        return self


@pytest.fixture(scope="module", params=METHODS)
def c(zygote: None, workdir: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    dir = workdir / request.param
    dir.mkdir()
    out = Pair(dir, {"transports": {"order": ["shm"]}})
    try:
        yield out.start(methods(dir / "model")[request.param]())
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


# ---- in the worker

Drafts = dict[str, dict[int, tuple[list[int], np.ndarray]]]


def note_drafts(worker: Any) -> None:
    """From now on, of each draft: its tokens and their logits, by request and the position that it
    begins behind."""
    runner = getattr(worker, "worker", worker).model_runner
    drafter = runner.drafter
    notes: Drafts = {}
    logits: list[Any] = []
    propose, compute_logits = drafter.propose, drafter.model.compute_logits

    def computed(*args: Any, **kw: Any) -> Any:
        out = compute_logits(*args, **kw)
        logits.append(out.detach().float().numpy().copy())
        return out

    def proposed(*args: Any, **kw: Any) -> Any:
        assert not args
        ends = kw["token_indices_to_sample"]
        if ends is None:
            ends = kw["common_attn_metadata"].query_start_loc[1:] - 1
        after = kw["target_positions"][ends].tolist()
        logits.clear()
        out = propose(**kw)
        for row, (req, at) in enumerate(zip(runner.input_batch.req_ids, after, strict=False)):
            of_row = np.stack([step[row] for step in logits])
            notes.setdefault(req, {})[at] = out[row].tolist(), of_row
        return out

    drafter.model.compute_logits, drafter.propose = computed, proposed
    runner.noted_drafts = notes


def note_lookups(worker: Any) -> None:
    """The same for a method that has no model: there are no logits."""
    runner = getattr(worker, "worker", worker).model_runner
    notes: Drafts = {}
    propose = runner.drafter.propose

    def proposed(tokens: int, sampled: Any, lengths: Any, *args: Any, **kw: Any) -> Any:
        out = propose(tokens, sampled, lengths, *args, **kw)
        for row, req in enumerate(runner.input_batch.req_ids):
            if sampled[row]:
                notes.setdefault(req, {})[int(lengths[row]) - 2] = list(out[row]), np.empty(0)
        return out

    runner.drafter.propose = proposed
    runner.noted_drafts = notes


def take_drafts(worker: Any) -> Drafts:
    notes: Drafts = getattr(worker, "worker", worker).model_runner.noted_drafts
    out = dict(notes)
    notes.clear()
    return out


# ---- here


def accepted(c: Cluster, engine: str, what: str = "accepted") -> int:
    metrics = c.engines[engine].metrics()
    return int(rig.total(metrics, f"vllm:spec_decode_num_{what}_tokens_total"))


def drafts_of(e: Engine, prompt: list[int], answer: int) -> dict[int, tuple[list[int], np.ndarray]]:
    """Of the one request since the last call. Without those of unfinished prompts, which vLLM
    drops, and those behind the answer's end."""
    ((_, notes),) = e.rpc(take_drafts)[0].items()
    first = len(prompt) - 1
    return {at: draft for at, draft in notes.items() if first <= at < first + answer}


def same_drafts(c: Pair, prompt: list[int], answer: int = TOKENS) -> float:
    """Returns how far apart the logits are at most."""
    got, want = (drafts_of(e, prompt, answer) for e in (c.d, c.r))
    assert len(want) >= answer // (DRAFTED + 1)
    apart = 0.0
    if not c.method.drafter:
        assert {at: got[at][0] for at in got} == {at: want[at][0] for at in want}
        return apart
    for at, (tokens, logits) in sorted(want.items()):
        assert at in got, (at, sorted(got), sorted(want))
        theirs, of_theirs = got[at]
        for i, (token, their) in enumerate(zip(tokens, theirs, strict=True)):
            apart = max(apart, float(np.abs(logits[i] - of_theirs[i]).max()))
            assert apart < NEAR, (at, i)
            if token != their:
                # Two tokens that near may change places, and other drafts follow.
                assert abs(logits[i][token] - logits[i][their]) < NEAR, (at, i, token, their)
                return apart
    assert sorted(got) == sorted(want)
    return apart


def through_both(c: Cluster, mode: str, prompt: list[int], answer: int = TOKENS) -> Out:
    return c.prefill_first(prompt, answer) if mode == "first" else c.both(prompt, answer)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mode", ["first", "both"])
def test_tokens_and_drafts_are_those_of_one_engine(c: Pair, mode: str, n: int) -> None:
    prompt = c.method.prompts(n, (c.method.spec["method"], mode, n))
    before = {name: accepted(c, name) for name in ("D", "R")}
    with Moved(c) as moved:
        got = through_both(c, mode, prompt)
    assert got.tokens == c.r.run(prompt, TOKENS).tokens
    grew = {name: accepted(c, name) - before[name] for name in before}
    assert grew["D"] == grew["R"], "decode accepted other drafts than an engine that prefilled"
    same_drafts(c, prompt)
    if c.method.spec["method"] == "draft_model":
        # Of each step all drafts, but for the last ones of an answer.
        assert grew["R"] >= (TOKENS - 1) * DRAFTED // (DRAFTED + 1) - DRAFTED
    moved.all_loaded(1)
    assert moved.bytes == n * c.method.token
    c.settle()


def test_a_prefix_that_decode_has(c: Pair) -> None:
    prompt = c.method.prompts(300, (c.method.spec["method"], "prefix"))
    c.d.run(prompt[:200], 2)
    c.d.rpc(take_drafts)
    before = accepted(c, "D"), accepted(c, "R")
    with Moved(c) as moved:
        got = c.both(prompt, TOKENS)
    assert got.tokens == c.r.run(prompt, TOKENS).tokens
    assert accepted(c, "D") - before[0] == accepted(c, "R") - before[1]
    same_drafts(c, prompt)
    moved.all_loaded(1)
    assert moved.hit > 0
    c.settle()


def test_a_draft_of_prompts_that_part_at_a_block(c: Pair) -> None:
    """The draft of a block's last position reads the token behind the block: prompts that share the
    block and go on differently have another draft cache there."""
    first = fresh(96, (c.method.spec["method"], "shared"))
    for i, more in enumerate((fresh(64, "one way"), fresh(64, "another"))):
        prompt = first + more
        with Moved(c) as moved:
            got = through_both(c, "first", prompt)
        assert got.tokens == c.r.run(prompt, TOKENS).tokens, i
        same_drafts(c, prompt)
        moved.all_loaded(1)
    c.settle()


@pytest.mark.skipif(not PROMPTS, reason="hours: make test-drafts runs it")
def test_many_prompts(c: Pair) -> None:
    """Figures: how many drafts are accepted, and how far apart the logits are at most."""
    name = c.method.spec["method"]
    before = {what: accepted(c, "D", what) for what in ("accepted", "draft")}
    apart = 0.0
    for i in range(PROMPTS):
        prompt = c.method.prompts(2 + i * 37 % 600, (name, i))
        want = c.r.add(prompt, FEW)
        with Moved(c) as moved:
            got = through_both(c, ("first", "both")[i % 2], prompt, FEW)
        assert got.tokens == want.result().tokens, i
        apart = max(apart, same_drafts(c, prompt, FEW))
        moved.all_loaded(1)
    grew = {what: accepted(c, "D", what) - before[what] for what in before}
    share = grew["accepted"] / grew["draft"]
    print(
        f"{name}: {PROMPTS} prompts, {grew['draft']} draft tokens, {share:.0%} of them accepted; "
        f"logits at most {apart:.1e} apart"
    )
    if name != "draft_model":
        assert 0.3 < share < 0.9, "drafts that are all wrong, or all right, prove less"
    c.settle()


PAIRS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "ngram at decode": (None, NGRAM),
    "drafts of other lengths": (
        {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 1},
        {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": DRAFTED},
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_speculation_that_differs(zygote: None, workdir: pathlib.Path, pair: str) -> None:
    """Prefill reserves other blocks behind a prompt than decode, and their caches of the prompt are
    equal."""
    dir = workdir / pair.replace(" ", "-")
    dir.mkdir()
    c = Cluster(dir, {"transports": {"order": ["shm"]}})
    try:
        for name, spec in zip("PD", PAIRS[pair], strict=True):
            c.spawn(name, **({"speculative_config": dict(spec)} if spec else {}))
        c.up()
        for n in (32, 33, 300):
            prompt = fresh(n, (pair, n))
            with Moved(c) as moved:
                got = [c.prefill_first(prompt, TOKENS)]
            moved.all_loaded(1)
            for e in (c.p, c.d):
                rig.wait_for(f"{e.name}'s prefix cache empty", e.clear_prefix_cache, 30)
            with Moved(c) as moved:
                got.append(c.both(prompt, TOKENS))
            moved.all_loaded(1)
            rig.wait_for("D's prefix cache empty", c.d.clear_prefix_cache, 30)
            want = c.d.run(prompt, TOKENS).tokens
            assert [g.tokens for g in got] == [want, want], n
        c.settle()
    finally:
        c.close()
