"""Models with recurrent states beside attention. A state is that of one token: prefill computes the
prompt without its last token, and decode computes that one. Tokens equal a plain engine's, states
move once, and none before the last step of a prompt."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import MODELS, Cluster, need
from engines import Out
from prompts import fresh
from test_speculation import NGRAM, accepted
from test_store import Node, pages
from test_tokens import Moved

from kvspray_vllm import saving, store

CONFIG: dict[str, Any] = {
    "transports": {"order": ["shm"]},
    "transfer": {"match_timeout": "10s", "deadline": "30s"},
}
# Ranks wait for each other in a loop: a request takes seconds where cores are few.
PATIENT = CONFIG | {"transfer": {"match_timeout": "60s", "deadline": "100s"}}
STEP = 256  # tokens that an engine computes at once
LENGTHS = (1, 2, 3, 33, 160, 161, 255, 300, 513, 700)
FEW = (2, 33, 700)


@dataclasses.dataclass(frozen=True)
class Family:
    model: str  # of kvspray.trial.tiny_model
    token: int  # bytes of a token in all layers of attention
    state: int  # bytes of the states of all other layers
    token_of_history: int = 0  # of these, in their convolutions
    dtype: str = "float32"
    # The other kernel that computes a prompt's last token on decode may round otherwise: two tokens
    # may change places whose logarithms of probabilities are no further apart at a plain engine.
    tie: float = 0.0
    args: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its engines


# Of a head of attention K and V, and of a state the history of its convolution and its matrix.
GDN = Family(
    "qwen3_next", 2 * 2 * 32 * 2, 3 * (3 * 512 * 2 + 4 * 64 * 64 * 4), 3 * 512 * 2, "bfloat16", 0.15
)
PAGE_OF_GDN = 288  # tokens of a block, which is as wide as a state
# vLLM's rotary kernel for CPUs takes each head of this model's queries and keys for a token: in a
# step of n tokens it rotates the first n heads, and no others. So its prefill and its decode
# differ, and so do ranks. The implementation in Python rotates all.
NATIVE = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
LFM2 = Family("lfm2", 2 * 2 * 2 * 32 * 4, 4 * 2 * 128 * 4, args=NATIVE)
MAMBA2 = Family("granite4", 2 * 2 * 2 * 32 * 4, 4 * (3 * 320 + 8 * 32 * 32) * 4)


@dataclasses.dataclass(frozen=True)
class Case:
    family: Family
    cached: bool = False  # vLLM's prefix cache, with a state at each block's end (align)
    tp: tuple[int, int] = (1, 1)  # of prefill and decode
    drafts: bool = False  # P and D speculate, by n-grams

    def __str__(self) -> str:
        tp = " TP {} to {}".format(*self.tp) if self.ranked else ""
        name = self.family.model + (" cached" if self.cached else "") + tp
        return name + (" ngram" if self.drafts else "")

    @property
    def ranked(self) -> bool:
        return max(self.tp) > 1

    @property
    def tie(self) -> float:
        """The sums of several ranks are rounded otherwise than those of one."""
        return self.family.tie * (2 if self.ranked else 1)


# The first one is in the gate.
CASES = (Case(GDN, True),)
# Nightly. vLLM's kernels of Mamba 2 for CPUs are slow.
MORE = (
    Case(GDN), Case(LFM2), Case(LFM2, True), Case(MAMBA2),
    Case(GDN, True, (2, 1)), Case(GDN, False, (1, 2)), Case(LFM2, False, (1, 2)),
    Case(MAMBA2, False, (2, 1)), Case(GDN, drafts=True),
)  # fmt: skip


def ranks(n: int) -> dict[str, Any]:
    return {"tensor_parallel_size": n, "distributed_executor_backend": "mp"} if n > 1 else {}


def spawn(c: Cluster, case: Case) -> None:
    c.model = MODELS / f"tiny-{case.family.model}"
    need(str(c.model), c.model.is_dir(), "run test/rig/env.py")
    for name, tp in zip("PDR", (*case.tp, 1), strict=True):
        drafts = {"speculative_config": dict(NGRAM)} if case.drafts and name != "R" else {}
        c.spawn(
            name,
            dtype=case.family.dtype,
            enable_prefix_caching=case.cached,
            **case.family.args,
            **ranks(tp),
            **drafts,
        )


nightly = pytest.mark.skipif(
    not os.environ.get("KVSPRAY_TRUTH"),
    reason="truth: starts three engines, half a minute: make test-truth",
)


@pytest.fixture(
    scope="module", params=[*CASES, *(pytest.param(x, marks=nightly) for x in MORE)], ids=str
)
def c(zygote: None, workdir: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    case: Case = request.param
    dir = workdir / str(case).replace(" ", "-")
    dir.mkdir()
    out = Cluster(dir, PATIENT if case.ranked else CONFIG)
    out.case = case  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as m:
        if case.ranked:
            # The decode engine waits as long as it needs for a prompt itself, and the prefill
            # engine's ranks may need more.
            for name in ("STALL_MIN_S", "STALL_UNKNOWN_S"):
                m.setattr(f"kvspray_vllm.patience.{name}", 60.0)
        try:
            spawn(out, case)
            yield out.up()
            for s in (out.sp, out.sd):
                assert s.panics() is None
        finally:
            out.close()


def compare(c: Cluster, prompt: list[int], got: Out, n_tokens: int = 12) -> None:
    """Tokens equal a plain engine's, or part at a tie."""
    want = c.r.run(prompt, n_tokens).tokens
    if got.tokens == want:
        return
    case: Case = c.case  # type: ignore[attr-defined]
    at = next(i for i, (a, b) in enumerate(zip(got.tokens[0], want[0], strict=True)) if a != b)
    near = c.r.run(prompt + want[0][:at], 1, logprobs=20).logprobs
    apart = abs(near[got.tokens[0][at]] - near[want[0][at]])
    assert apart <= case.tie, (len(prompt), at, apart)


def moves(case: Case, n: int, skip: int = 0) -> int:
    """The bytes of a prompt that decode lacks: all tokens but the last, and the states of the last
    of them. vLLM's histories have room for draft tokens."""
    of, drafted = case.family, NGRAM["num_speculative_tokens"] if case.drafts else 0
    return (n - 1 - skip) * of.token + of.state + drafted * of.token_of_history


@pytest.mark.parametrize("mode", ["first", "both"])
def test_tokens_are_those_of_one_engine(c: Cluster, mode: str) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    for n in FEW if case.ranked or case.family is MAMBA2 else LENGTHS:
        prompt = fresh(n, (str(case), mode, n))
        with Moved(c) as moved:
            got = c.prefill_first(prompt) if mode == "first" else c.both(prompt)
        compare(c, prompt, got)
        if n < 3:
            assert moved.all == 0 and moved.bytes == 0, vars(moved)
        else:
            moved.all_loaded(1, case.tp[1])
            assert moved.computed == 1 and moved.bytes == moves(case, n), (n, vars(moved))
    if case.drafts:
        assert accepted(c, "D", "draft") > 0, "decode drafted nothing"
    c.settle()


def test_many_at_once(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    prompts = [fresh(40 + 97 * i, (str(case), "many", i)) for i in range(6)]
    with Moved(c) as moved:
        started = [c.start_both(p) for p in prompts]
        got = [d.result() for _, d in started]
    for p, out in zip(prompts, got, strict=True):
        compare(c, p, out)
    moved.all_loaded(len(prompts), case.tp[1])
    c.settle()


def test_a_state_leaves_after_the_last_step(c: Cluster) -> None:
    """Each step writes the states anew. Before the last one, whole blocks of attention leave and
    nothing else. Without the states all of the prompt is computed again."""
    case: Case = c.case  # type: ignore[attr-defined]
    prompt = fresh(1200, (str(case), "steps"))

    def landed() -> float:
        return rig.total(c.sd.metrics(), "kvspray_rail_bytes_total", direction="in")

    # As many as leave whole chunks to send: 64 KiB of a layer, of the heads of one rank.
    steps = 4
    before, start = landed(), c.p.steps()
    c.p.pause_at(start + steps)
    with Moved(c) as moved:
        p, d = c.start_both(prompt)
        rig.wait_for("the steps", lambda: c.p.steps() == start + steps, 60)
        rig.wait_for("whole blocks landed", lambda: landed() > before, 60)
        assert landed() - before <= steps * STEP * case.family.token
        p.abort()
        c.p.pause_at(None)
        got = d.result()
    compare(c, prompt, got)
    assert moved.ok == 0 and c.d.computed(d.rid) == len(prompt), vars(moved)
    c.settle(timeout=20)


def test_preemption_in_mid_send(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    prompt = fresh(1200, (str(case), "preempt"))
    with Moved(c) as moved:
        start = c.p.steps()
        c.p.pause_at(start + 3)
        p, d = c.start_both(prompt)
        rig.wait_for("P under way", lambda: c.p.steps() >= start + 3, 60, tick=0.001)
        c.p.preempt_all()
        c.p.pause_at(None)
        got = d.result()
        p.result()
    compare(c, prompt, got)
    assert moved.recomputed == 0, vars(moved)
    c.settle()


def test_a_prefix_that_decode_has_is_left_out(c: Cluster) -> None:
    """Blocks of attention that decode has do not move again; states always do."""
    case: Case = c.case  # type: ignore[attr-defined]
    if not case.cached:
        return
    hits = 0
    for n, hit in ((700, 500), (700, 350), (1000, 800)):
        prompt = fresh(n, (str(case), "prefix", n, hit))
        c.d.run(prompt[:hit], 2)
        with Moved(c) as moved:
            got = c.prefill_first(prompt)
        compare(c, prompt, got)
        moved.all_loaded(1, case.tp[1])
        assert moved.hit <= hit and moved.bytes == moves(case, n, moved.hit), vars(moved)
        hits += moved.hit
    assert hits > 0, "decode had none of it"
    c.settle()


def test_a_prefix_that_prefill_has(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    if not case.cached:
        return

    def hits() -> float:
        of = "vllm:prompt_tokens_by_source_total"
        return rig.total(c.p.metrics(), of, source="local_cache_hit")

    prompt = fresh(700, (str(case), "again"))
    c.prefill_first(prompt)
    before = hits()
    for again in (prompt, prompt + fresh(300, (str(case), "longer"))):
        c.settle()
        c.d.clear_prefix_cache()
        with Moved(c) as moved:
            got = c.prefill_first(again)
        compare(c, again, got)
        moved.all_loaded(1, case.tp[1])
        assert moved.bytes == moves(case, len(again), moved.hit), vars(moved)
    assert hits() > before
    c.settle()


def test_a_sidecar_is_killed(c: Cluster) -> None:
    """In mid prompt. Decode computes it alone, and transfers go on with a new sidecar."""
    case: Case = c.case  # type: ignore[attr-defined]
    prompt = fresh(1200, (str(case), "kill"))
    start = c.p.steps()
    c.p.pause_at(start + 3)
    p, d = c.start_both(prompt)
    rig.wait_for("P under way", lambda: c.p.steps() >= start + 3, 60)
    c.sp.kill()
    c.p.pause_at(None)
    p.result()
    compare(c, prompt, d.result())
    c.sp.start()
    c.connected()
    prompt = fresh(300, (str(case), "after"))
    with Moved(c) as moved:
        got = c.prefill_first(prompt)
    compare(c, prompt, got)
    moved.all_loaded(1, case.tp[1])
    c.settle(timeout=60)


def test_every_transferred_page_has_one_hash(c: Cluster) -> None:
    case: Case = c.case  # type: ignore[attr-defined]
    of_page = ("xfer", "hash", "dest", "rank", "group", "layer", "block")
    sides = [
        {tuple(b[k] for k in of_page): b["sha256"] for b in s.lines(s.hashes)} for s in (c.sp, c.sd)
    ]
    both = sides[0].keys() & sides[1].keys()
    assert len(both) > 50, f"{case}: of {len(sides[0])} and {len(sides[1])}"
    assert {k: sides[0][k] for k in both} == {k: sides[1][k] for k in both}


@pytest.fixture
def node(zygote: None, workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(store, "ASK_S", 60.0)  # a busy machine makes no misses
    monkeypatch.setattr(saving, "GET_S", 60.0)
    dir = workdir / "store"
    dir.mkdir()
    out = Node(dir, {"memory": "48MiB"})
    out.case = CASES[0]  # type: ignore[attr-defined]
    out.model = MODELS / f"tiny-{GDN.model}"
    try:
        for name in "PDR":
            out.spawn(name, dtype=GDN.dtype, enable_prefix_caching=True)
        for e in out.engines.values():
            e.wait_up()
        out.connected()
        yield out
        out.settle()
        assert out.sp.panics() is None
    finally:
        out.close()


def test_states_of_the_store(node: Node) -> None:
    """An engine loads a prompt up to the last block's end that has its states there, whether
    another engine has computed it, or it has itself."""
    c = node

    def loads(prompt: list[int], hit: int) -> None:
        c.forget(c.d)
        run = c.d.add(prompt, 12)
        compare(c, prompt, run.result())
        c.settle()
        assert c.d.computed(run.rid) == len(prompt) - hit, len(prompt)

    for n in (100, PAGE_OF_GDN + 1, 2 * PAGE_OF_GDN + 1, 700, 1200):
        prompt = fresh(n, ("store", n))
        compare(c, prompt, c.p.run(prompt, 12))
        c.settle()
        hit = (n - 1) // PAGE_OF_GDN * PAGE_OF_GDN
        loads(prompt, hit)
        loads(prompt + fresh(50, n), hit)
    assert pages(c.d, "get", "miss", "failed", "damaged") == 0


@pytest.fixture
def unlike(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    dir = workdir / "unlike"
    dir.mkdir()
    out = Cluster(dir, CONFIG)
    out.case = CASES[0]  # type: ignore[attr-defined]
    try:
        out.model = MODELS / f"tiny-{GDN.model}"
        out.spawn("P", dtype=GDN.dtype, enable_prefix_caching=False)
        out.spawn("D", dtype=GDN.dtype, enable_prefix_caching=True)
        out.spawn("R", dtype=GDN.dtype, enable_prefix_caching=False)
        yield out.up()
    finally:
        out.close()


def test_engines_with_other_cache_modes_are_refused_by_name(unlike: Cluster) -> None:
    c = unlike
    prompt = fresh(200, "modes")
    with Moved(c) as moved:
        got = c.both(prompt)
    compare(c, prompt, got)
    assert moved.loaded == moved.bytes == 0, vars(moved)
    logs = c.sp.log.read_text() + c.sd.log.read_text()
    assert "identity.states" in logs and "float32 align" in logs and "float32 none" in logs
