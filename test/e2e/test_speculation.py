"""Speculative decoding on both engines: tokens are those of a plain engine, and the layers of a
draft move with the model's.

The draft is the model itself, so that every draft token is right where the draft's cache is: after
a transfer decode accepts as many as an engine that has prefilled the prompt by itself.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import MODEL, Cluster
from prompts import fresh
from test_tokens import LAYERS, TOKEN, Moved

TOKENS = 24  # of an answer
DRAFTED = 3
LENGTHS = (2, 31, 32, 33, 64, 300, 700)  # about block borders, and prompts of several chunks

DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {
        "method": "draft_model",
        "model": str(MODEL),
        "num_speculative_tokens": DRAFTED,
    },
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": DRAFTED,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    },
}


@pytest.fixture(scope="module", params=DRAFTS)
def c(zygote: None, workdir: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    dir = workdir / request.param
    dir.mkdir()
    out = Cluster(dir, {"transports": {"order": ["shm"]}})
    out.method = request.param  # type: ignore[attr-defined]
    try:
        for name in ("P", "D", "R"):
            out.spawn(name, speculative_config=dict(DRAFTS[request.param]))
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


def accepted(c: Cluster, engine: str) -> int:
    metrics = c.engines[engine].metrics()
    return int(rig.total(metrics, "vllm:spec_decode_num_accepted_tokens_total"))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mode", ["first", "both"])
def test_tokens_and_drafts_are_those_of_one_engine(c: Cluster, mode: str, n: int) -> None:
    method: str = c.method  # type: ignore[attr-defined]
    prompt = fresh(n, (method, mode, n))
    before = {name: accepted(c, name) for name in ("D", "R")}
    with Moved(c) as moved:
        got = c.prefill_first(prompt, TOKENS) if mode == "first" else c.both(prompt, TOKENS)
    assert got.tokens == c.r.run(prompt, TOKENS).tokens
    grew = {name: accepted(c, name) - before[name] for name in before}
    assert grew["D"] == grew["R"], "decode accepted other drafts than an engine that prefilled"
    if method == "draft_model":
        # Of each step all drafts, but for the last ones of an answer.
        assert grew["R"] >= (TOKENS - 1) * DRAFTED // (DRAFTED + 1) - DRAFTED
    moved.all_loaded(1)
    assert moved.bytes == n * LAYERS * TOKEN * (2 if method == "draft_model" else 1)
    c.settle()


def test_a_prefix_that_decode_has(c: Cluster) -> None:
    prompt = fresh(300, (c.method, "prefix"))  # type: ignore[attr-defined]
    c.d.run(prompt[:200], 2)
    before = accepted(c, "D"), accepted(c, "R")
    with Moved(c) as moved:
        got = c.both(prompt, TOKENS)
    assert got.tokens == c.r.run(prompt, TOKENS).tokens
    assert accepted(c, "D") - before[0] == accepted(c, "R") - before[1]
    moved.all_loaded(1)
    assert moved.hit > 0
    c.settle()


PAIRS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "ngram at decode": (None, DRAFTS["ngram"]),
    "drafts of other lengths": (
        {**DRAFTS["draft_model"], "num_speculative_tokens": 1},
        DRAFTS["draft_model"],
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
