# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811 (fixtures are imported)
"""Loads that the step waits for which computes on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, DECODE, LOG, XFER, Engine, FakePool, FakeScheduler, FakeWorker, concurrent, e, fake_hash, prefill_first  # noqa: F401

from kvspray_vllm import shim
from kvspray_vllm.meta import StepMeta
from kvspray_vllm.scheduler import SYNC_BYTES, SYNC_REST_S, SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.worker import SYNC_WAIT_S, Results


class Waiting(Engine):
    """An engine that may wait in a step, and calls the plug-in as vLLM does in one with a synchronous load."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = FakePool()
        self.scheduler = SchedulerSide(
            Settings(), self.scheduler_shim, [BLOCK], "engine", fake_hash, LOG, now=lambda: self.clock, sync_block=4096
        )
        self.scheduler.set_pool(self.pool)  # type: ignore[arg-type]
        self.copied: list[tuple[list[int], list[int]]] = []
        self.worker.set_copy(lambda src, dst: self.copied.append((list(src), list(dst))))

    def run(self, meta: StepMeta, forward: bool = True) -> Results:
        self.worker.begin(meta)
        self.worker.finish_loads()
        for name in ("l0", "l1"):
            self.worker.layer_done(name)
        self.worker.step_done()
        done = self.worker.collect()
        self.scheduler.worker_reported(done.sent, done.received, self.worker.take_landed())
        return done

    def load(self, n: int = 40, computed: int = 0, req: str = "d") -> StepMeta:
        r = self.add(req, n, prefill_first())
        external, later = self.scheduler.matched(r, computed)
        assert external == n - 1 - computed and not later, "it is not waited for"
        self.scheduler.allocated(r, SimpleNamespace(get_block_ids=lambda: (self.tables[req],)), external)  # type: ignore[arg-type]
        r.num_computed_tokens = n - 1
        return self.meta({req: 1})


@pytest.fixture
def w() -> Waiting:
    return Waiting()


def arrives(w: Waiting, status: int = shim.OK) -> None:
    """The load ends while the step waits for it."""
    w.worker_shim.wait = lambda seconds: w.worker_shim.end(w.worker_shim.leases, received=True, status=status)  # type: ignore[method-assign]


def test_a_small_load_of_an_idle_engine_lands_in_spare_blocks_and_is_copied_before_the_forward_pass(w: Waiting) -> None:
    arrives(w)
    meta = w.load()
    w.worker.begin(meta)
    assert [c[0] for c in w.worker_shim.calls] == ["expect"]
    kind, lease, req, peer, tokens, skip, table = w.worker_shim.take()[0]
    assert (req, tokens, skip, table) == ("d", 40, 0, ((100, 101, 102),))
    assert len(w.pool.free) == 97 and w.scheduler.pending_push_work()
    w.worker.finish_loads()
    assert w.copied == [([100, 101, 102], [1, 2, 3])]
    done = w.run(meta)
    assert done.received == set() and done.bad_blocks == set() and done.failed == set()
    assert len(w.pool.free) == 100 and not w.scheduler.pending_push_work() and w.pool.evicted == set()
    stats = w.worker.take_stats()
    assert stats is not None and stats.data["transfers"] == {"received/ok": 1} and stats.data["recompute_tokens"] == 0
    assert w.finish("d") == (False, None) and w.pool.evicted == set()


def test_what_is_there_already_is_left_alone(w: Waiting) -> None:
    arrives(w)
    w.run(w.load(computed=BLOCK))
    assert w.worker_shim.take()[0][5:] == (BLOCK, ((1, 100, 101),))
    assert w.copied == [([100, 101], [2, 3])]


@pytest.mark.parametrize("status", [shim.FAILED, shim.LOST, shim.EXPIRED])
def test_of_a_load_that_fails_the_request_s_own_blocks_lack_and_are_cached_no_more(w: Waiting, status: int) -> None:
    arrives(w, status)
    done = w.run(w.load(computed=BLOCK))
    assert done.bad_blocks == {2, 3} and done.received == set() and done.failed == set() and w.copied == []
    assert w.pool.evicted == {2, 3} and len(w.pool.free) == 100
    stats = w.worker.take_stats()
    assert stats is not None and stats.data["recompute_tokens"] == 40 - BLOCK


def test_a_load_that_does_not_come_keeps_the_step_for_its_bound_and_its_spare_blocks_until_its_fence(w: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("kvspray_vllm.worker.time.monotonic", lambda: clock[0])

    def wait(seconds: float) -> None:
        w.worker_shim.waits.append(seconds)
        clock[0] += seconds

    w.worker_shim.wait = wait  # type: ignore[method-assign]
    done = w.run(w.load())
    assert sum(w.worker_shim.waits) == SYNC_WAIT_S
    assert ("cancel", 1) in w.worker_shim.take()
    assert done.bad_blocks == {1, 2, 3} and w.pool.evicted == {1, 2, 3}
    # vLLM computes in them from now on; what the sidecar may still write are others.
    assert len(w.pool.free) == 97 and w.scheduler.pending_push_work()
    assert w.step().bad_blocks == set() and len(w.pool.free) == 97
    w.worker_shim.end(1, received=True)  # it came after all, between the cancel and the fence
    assert w.step().received == set()
    assert len(w.pool.free) == 100 and w.copied == [] and not w.scheduler.pending_push_work()


def test_without_a_sidecar_the_step_does_not_wait(w: Waiting) -> None:
    meta = w.load()
    w.worker_shim.down = True
    done = w.run(meta)
    assert w.worker_shim.waits == [] and done.bad_blocks == {1, 2, 3} and len(w.pool.free) == 100


def test_an_abort_in_the_step_leaves_nothing_in_the_prefix_cache(w: Waiting) -> None:
    meta = w.load()
    w.worker_shim.down = True
    w.worker.begin(meta)
    w.worker.finish_loads()
    assert w.finish("d", "FINISHED_ABORTED") == (False, None)  # vLLM looks for aborts before it takes the step's results
    assert w.pool.evicted == {1, 2, 3}
    w.run(meta)
    assert len(w.pool.free) == 100


@pytest.mark.parametrize("came", [True, False])
def test_a_request_that_ends_with_the_token_of_that_step_leaves_what_came_in_the_prefix_cache(w: Waiting, came: bool) -> None:
    meta = w.load()
    if came:
        arrives(w)
    else:
        w.worker_shim.down = True
    w.worker.begin(meta)
    w.worker.finish_loads()
    done = w.worker.collect()
    assert w.finish("d") == (False, None)  # vLLM takes the tokens before it hands on what the worker says
    w.scheduler.worker_reported(done.sent, done.received, w.worker.take_landed())
    assert w.pool.evicted == (set() if came else {1, 2, 3}) and len(w.pool.free) == 100


def test_what_cannot_be_copied_lacks_and_ends_no_engine(w: Waiting) -> None:
    def fails(src: Any, dst: Any) -> None:
        raise RuntimeError("no")

    w.worker.set_copy(fails)
    arrives(w)
    done = w.run(w.load())
    assert done.bad_blocks == {1, 2, 3} and w.pool.evicted == {1, 2, 3} and len(w.pool.free) == 100


def test_the_end_of_a_load_that_was_given_up_is_not_that_of_a_later_one_of_the_same_name(w: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("kvspray_vllm.worker.time.monotonic", lambda: clock[0])

    def wait(seconds: float) -> None:
        clock[0] += seconds

    w.worker_shim.wait = wait  # type: ignore[method-assign]
    w.run(w.load())
    w.finish("d", "FINISHED_ABORTED")  # vLLM is done with it; its spare blocks are not free yet
    r = w.add("d", 40, prefill_first())
    assert w.scheduler.matched(r, 0) == (40, True)
    w.scheduler.allocated(r, SimpleNamespace(get_block_ids=lambda: (w.tables["d"],)), 40)  # type: ignore[arg-type]
    w.step()
    w.worker_shim.end(1, received=True)
    assert w.step().received == set() and len(w.pool.free) == 100
    w.worker_shim.end(2, received=True)
    assert w.step().received == {"d"}


def test_a_pool_that_is_made_otherwise_is_left_alone(w: Waiting) -> None:
    w.scheduler._pool = None
    for pool in (None, SimpleNamespace(get_num_free_blocks=lambda: 100, get_new_blocks=lambda n: [])):
        w.scheduler.set_pool(pool)  # type: ignore[arg-type]
        assert w.scheduler.matched(w.add("d", 40, prefill_first()), 0) == (40, True)


def test_after_a_load_that_failed_others_are_not_waited_for_for_a_while(w: Waiting) -> None:
    arrives(w, shim.FAILED)
    w.run(w.load())
    w.finish("d")
    later = w.add("e", 40, prefill_first())
    assert w.scheduler.matched(later, 0) == (40, True)
    w.clock += SYNC_REST_S
    assert w.scheduler.matched(later, 0) == (39, False)


def test_nobody_else_waits(w: Waiting) -> None:
    other = w.add("other", 5, None)
    d = w.add("d", 40, prefill_first())
    assert w.scheduler.matched(d, 0) == (40, True)
    w.finish(other.request_id)
    assert w.scheduler.matched(d, 0) == (39, False)
    w.add("late", 5, None)
    assert w.scheduler.matched(d, 0) == (40, True)


@pytest.mark.parametrize("why", ["large", "full", "spare", "concurrent", "engine"])
def test_what_is_not_waited_for(w: Waiting, why: str) -> None:
    n = 40
    if why == "large":
        n = SYNC_BYTES // 4096 * BLOCK + 1
        w.pool.free = [SimpleNamespace(block_id=i) for i in range(100, 100 + 3 * n)]  # so that nothing but the size speaks against it
    if why == "full":
        w.pool.free = w.pool.free[:6]  # as many as both need, and none for whoever comes next
    if why == "spare":
        meta = w.load(req="before")
        w.finish("before", "FINISHED_ABORTED")
        assert meta.expects
    if why == "engine":
        w.scheduler._sync_block = 0
    d = w.add("d", n, prefill_first() if why != "concurrent" else concurrent())
    if why == "concurrent":
        w.scheduler_shim.answers[bytes.fromhex(XFER)] = shim.Answer("admitted")
        assert w.scheduler.matched(d, 0) == (n, True)  # admitted, and not computed yet
    assert w.scheduler.matched(d, 0) == (n, True)


def test_a_load_before_a_change_of_weights_is_not_used(w: Waiting) -> None:
    arrives(w)
    meta = w.load()
    w.worker.begin(meta)
    w.worker.outdate()
    w.worker.finish_loads()
    assert w.copied == [] and w.worker.collect().bad_blocks == {1, 2, 3}
