"""A request that ends ends all that it has here: a destination, a load, a source. Each by its own
name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, DECODE, Engine, concurrent, e, prefill_first
from store_fakes import Vllm

from kvspray_vllm import shim
from kvspray_vllm.meta import Landed, Rank

PROMPT = list(range(40))


def loading_source(v: Vllm) -> Any:
    """A prompt that another engine waits for was preempted, and loads its blocks back from the
    store."""
    v.run("warm", PROMPT, answer=1)
    for b in v.pool.blocks:  # vLLM's own prefix cache has lost what the store has
        b.block_hash = None
    v.pool.cached.clear()
    v.store.silent = True  # it computes first
    arrives = v.scheduler.on_new_request

    def arrive(r: Any) -> None:
        r.kv_transfer_params = dict(DECODE)
        arrives(r)

    v.scheduler.on_new_request = arrive  # type: ignore[method-assign]
    r = v.add("src", PROMPT, answer=20)
    v.scheduler.on_new_request = arrives  # type: ignore[method-assign]
    v.step()
    v.clock += 1
    v.step()
    assert list(v.scheduler._sources) == ["src"]
    v.store.silent = False
    v.preempt(r)
    for b in v.pool.blocks:
        b.block_hash = None
    v.pool.cached.clear()
    for s in v.shims:
        s.work = lambda _: None  # loads end when the test ends them

    def step() -> None:
        v.queue.append(v.schedule())
        while v.queue:
            v.execute()
        v.clock += 0.01

    v.waiting.remove(r)
    step()
    v.waiting.insert(0, r)  # vLLM schedules nothing that waits in a step that preempts
    step()
    step()
    assert set(v.scheduler._loading) == {"src"} and list(v.scheduler._sources) == ["src"]
    return r


def test_an_abort_during_a_reload_ends_the_source_too() -> None:
    v = Vllm(blocks=40, budget=64)
    r = loading_source(v)
    (source,) = (s.lease for s in v.workers[0]._sources.values())
    load = v.workers[0]._load_leases["src"]
    before = len(v.shims[0].calls)
    v.finish(r, "FINISHED_ABORTED")
    for _ in range(6):
        v.step()
    cancelled = {c[1] for c in v.shims[0].calls[before:] if c[0] == "cancel"}
    assert {source, load} <= cancelled
    assert not v.scheduler._sources and not v.workers[0]._sources
    assert "src" not in v.requests or not v.scheduler.pending_push_work()


def test_the_end_of_an_earlier_lease_leaves_the_name_s_next_one(e: Engine) -> None:
    """An engine may use a request's name again before the lease of the one before has ended."""
    e.add("r", 40, dict(DECODE))
    e.step({"r": 40})
    e.worker._cancel_source(e.worker._sources.pop("r"), "its request ended during a load")
    e.scheduler._sources.clear()
    e.add("r", 40, dict(DECODE))
    e.step({"r": 40})
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    e.step()
    assert e.worker._sources["r"].lease == 2


@pytest.mark.parametrize("params", [prefill_first, concurrent])
def test_a_load_that_the_engine_takes_nothing_of_is_counted(
    e: Engine, params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        r = e.add("r", 40, params())
        e.scheduler.matched(r, BLOCK)
        e.scheduler.allocated(r, SimpleNamespace(get_block_ids=lambda: (e.tables["r"],)), 0)  # type: ignore[arg-type]
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"not_taken": 1}
    assert len(e.scheduler_shim.declined) == 1 and "takes none of the 24 tokens" in caplog.text


def test_a_report_that_comes_twice_counts_once() -> None:
    """vLLM 0.33 passes on the report of a rank that failed once more."""
    one, other = Landed(saved={7: {0: True}}), Landed(saved={7: {1: False}})
    both = one.aggregate(other).aggregate(one)
    assert both.saved == {7: {0: True, 1: False}}
    one, other = (
        Landed(unasked={"r": {0: "full"}}),
        Landed(unasked={"r": {1: "away"}, "s": {1: ""}}),
    )
    both = one.aggregate(other).aggregate(one)
    assert both.unasked == {"r": {0: "full", 1: "away"}, "s": {1: ""}}
    # The report from before the failure comes first.
    late = Landed(ranks={0: Rank(1, None)}).aggregate(Landed(ranks={0: Rank(2, None)}))
    assert late.ranks[0].epoch == 2
