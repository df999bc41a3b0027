"""Prefill and decode engines that are not alike: other block sizes, other tensor parallelism. Their
tokens equal a plain engine's, and nothing that should have moved was computed again. (Pipeline
stages are in test_hybrid.py.)

Numbers are float32, as in all of these tests: ranks' sums are rounded in another order than one
engine's, and in bf16 that alone changes greedy tokens, with no transfer at all. Moved blocks are
copied as they are, whatever its size.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import Cluster
from prompts import fresh
from test_tokens import LAYERS, TOKEN, Moved

LENGTHS = (1, 31, 33, 64, 65, 200, 513)
# Of engines with ranks, which poll for each other and take seconds for a request where cores are
# few.
FEW = (1, 33, 200)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    p: dict[str, Any]
    d: dict[str, Any]

    @staticmethod
    def ranks(of: dict[str, Any]) -> int:
        return int(of.get("tensor_parallel_size", 1))

    @property
    def slow(self) -> bool:
        return self.ranks(self.p) + self.ranks(self.d) > 2


TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CASES = (
    Case("blocks of 32 to 64", {"block_size": 32}, {"block_size": 64}),
    Case("blocks of 96 to 32", {"block_size": 96}, {"block_size": 32}),
    Case("TP 2 to 1", TP2, {}),
    Case("TP 1 to 2, blocks of 64 to 32", {"block_size": 64}, TP2),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def c(zygote: None, workdir: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    case: Case = request.param
    dir = workdir / case.name.replace(" ", "-").replace(",", "")
    dir.mkdir()
    out = Cluster(dir)
    out.case = case  # type: ignore[attr-defined]
    try:
        out.spawn("P", **case.p)
        out.spawn("D", **case.d)
        out.spawn("R")
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


@pytest.mark.parametrize("mode", ["first", "both"])
def test_tokens_are_those_of_one_engine(c: Cluster, mode: str) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    for n in FEW if case.slow else LENGTHS:
        prompt = fresh(n, (case.name, mode, n))
        with Moved(c) as moved:
            got = c.prefill_first(prompt) if mode == "first" else c.both(prompt)
        assert got.tokens == c.r.run(prompt, 12).tokens, n
        # Each of D's ranks has a transfer of its own, and together they receive what one would.
        receivers = case.ranks(case.d)
        assert (moved.ok, moved.all, moved.recomputed, moved.alone) == (
            receivers,
            receivers,
            0,
            0,
        ), (n, vars(moved))
        assert moved.computed <= 1, (n, vars(moved))
        assert moved.bytes == n * LAYERS * TOKEN, (n, vars(moved))
        c.settle()


def test_a_prefix_that_decode_has_is_left_out(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    block = int(case.d.get("block_size", 32))
    prompt = fresh(300, (case.name, "prefix"))
    c.d.run(prompt[: 2 * block], 2)
    with Moved(c) as moved:
        got = c.prefill_first(prompt)
    assert got.tokens == c.r.run(prompt, 12).tokens
    assert moved.hit == 2 * block and moved.loaded == 300 - 2 * block and moved.recomputed == 0, (
        vars(moved)
    )
    c.settle()


def test_many_at_once(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    prompts = [fresh(40 + 37 * i, (case.name, "many", i)) for i in range(2 if case.slow else 6)]
    started = [c.start_both(p) for p in prompts]
    got = [d.result().tokens for _, d in started]
    for p, _ in started:
        p.result()
    assert got == [c.r.run(p, 12).tokens for p in prompts]
    c.settle()


def test_ranks_are_told_once(c: Cluster) -> None:
    """The decode side supposes that the prefill engine is as its own, learns otherwise once, and
    grants right from then on."""
    before = rig.total(
        c.sd.metrics(), "kvspray_control_messages_total", direction="in", type="grant_reply"
    )
    prompt = fresh(100, "told")
    c.prefill_first(prompt)
    case: Case = c.case  # type: ignore[attr-defined]
    replies = (
        rig.total(
            c.sd.metrics(), "kvspray_control_messages_total", direction="in", type="grant_reply"
        )
        - before
    )
    # One for each part: none of them was a correction.
    assert replies == max(case.ranks(case.p), case.ranks(case.d)), replies
    c.settle()
