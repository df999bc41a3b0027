# SPDX-License-Identifier: Apache-2.0
"""The scheduler's and the worker's side together, over a shim that records what it is told. No engine, no sidecar."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pathlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import kvspray
from kvspray_vllm import shim
from kvspray_vllm.meta import StepMeta
from kvspray_vllm.scheduler import SYNC_BYTES, SYNC_REST_S, SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.worker import LOAD_WAIT_S, SYNC_WAIT_S, Results, WorkerSide

LOG = logging.getLogger("test")
BLOCK = 16


@dataclass
class FakeWorker:
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    ends: list[shim.Ended] = field(default_factory=list)
    leases: int = 0
    down: bool = False
    waits: list[float] = field(default_factory=list)

    def _lease(self, kind: str, *what: Any) -> int:
        if self.down:
            raise shim.ShimError("down")
        self.leases += 1
        self.calls.append((kind, self.leases, *what))
        return self.leases

    def intent(self, xfer: bytes, hash: bytes, tokens: int, blocks: Any, fanout: int, req: str) -> int:
        return self._lease("intent", req, tokens, fanout)

    def expect(self, xfer: bytes, hash: bytes, peer: str, tokens: int, skip: int, blocks: Any, req: str, after: int = 0) -> int:
        return self._lease("expect", req, peer, tokens, skip, blocks, *([after] if after else []))

    def step(self, step: int, gains: Any) -> None:
        self.calls.append(("step", step, [(lease, end) for lease, end, _ in gains]))

    def preempt(self, lease: int) -> None:
        self.calls.append(("preempt", lease))

    def cancel(self, lease: int, reason: str) -> None:
        self.calls.append(("cancel", lease))

    def hold(self, lease: int) -> None:
        self.calls.append(("hold", lease))

    def signal_layer(self, index: int, step: int) -> None:
        self.calls.append(("layer", index, step))

    def signal_step(self, step: int) -> None:
        self.calls.append(("end", step))

    def poll(self) -> list[shim.Ended]:
        out, self.ends = self.ends, []
        return out

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def close(self) -> None:
        self.calls.append(("close",))

    def end(self, lease: int, received: bool, status: int = shim.OK, lacks: int = 0) -> None:
        self.ends.append(shim.Ended(lease, received, status, 4096, 250, "tcp", "why", lacks))

    def take(self) -> list[tuple[Any, ...]]:
        out, self.calls = self.calls, []
        return out


@dataclass
class FakeScheduler:
    connected: bool = True
    endpoint: str | None = "10.1.1.1:7650"
    match_timeout_s: float = 10.0
    answers: dict[bytes, shim.Answer] = field(default_factory=dict)
    asked: list[tuple[bytes, str]] = field(default_factory=list)
    full: bool = False
    declined: list[tuple[bytes, bytes, str, str]] = field(default_factory=list)

    def decline(self, xfer: bytes, hash: bytes, peer: str, reason: str) -> None:
        self.declined.append((xfer, hash, peer, reason))

    def await_admission(self, xfer: bytes, hash: bytes, peer: str, tokens: int, ttl_s: float) -> None:
        if self.full:
            raise shim.ShimError("full")
        self.asked.append((xfer, peer))

    def admission(self, xfer: bytes, hash: bytes) -> shim.Answer | None:
        return self.answers.get(xfer)

    def close(self) -> None:
        pass


class Engine:
    """Both sides, and as much of a scheduler as they can see."""

    def __init__(self) -> None:
        self.worker_shim = FakeWorker()
        self.scheduler_shim = FakeScheduler()
        self.clock = 100.0
        self.scheduler = SchedulerSide(
            Settings(), self.scheduler_shim, [BLOCK], "engine", fake_hash, LOG, now=lambda: self.clock
        )
        self.worker = WorkerSide(self.worker_shim, LOG, resume_block=BLOCK)
        self.worker.set_flags({"l0": 0, "l1": 1})
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}

    def add(self, req: str, n: int, kv: dict[str, Any] | None) -> Any:
        tokens = list(range(n))
        r = SimpleNamespace(
            request_id=req, prompt_token_ids=tokens, num_prompt_tokens=n, num_computed_tokens=0, kv_transfer_params=kv,
            lora_request=None, cache_salt=None, mm_features=[], status=SimpleNamespace(name="RUNNING"),
        )  # fmt: skip
        self.requests[req] = r
        self.tables[req] = list(range(1, 1 + -(-n // BLOCK)))
        self.scheduler.on_new_request(r)
        return r

    def meta(self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None) -> StepMeta:
        counts = scheduled or {}
        out = SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), preempted_req_ids=preempted or set())
        meta = self.scheduler.build(out, lambda req: (self.tables[req],))  # type: ignore[arg-type]
        for req, n in (scheduled or {}).items():
            self.requests[req].num_computed_tokens += n
        return meta

    def run(self, meta: StepMeta, forward: bool = True) -> Results:
        self.worker.preempts(meta)
        self.worker.begin(meta)
        if forward:
            for name in ("l0", "l1"):
                self.worker.layer_done(name)
        self.worker.step_done()
        done = self.worker.collect()
        self.scheduler.worker_reported(done.sent, done.received, self.worker.take_landed())
        return done

    def step(self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None) -> Results:
        return self.run(self.meta(scheduled, preempted))

    def finish(self, req: str, status: str = "FINISHED_LENGTH_CAPPED") -> tuple[bool, Any]:
        r = self.requests[req]
        r.status = SimpleNamespace(name=status)
        return self.scheduler.finished(r, (self.tables[req],))


def fake_hash(tokens: Any, lora: str, salt: str, items: Any) -> bytes:
    return hashlib.sha256(repr((list(tokens), lora, salt, list(items))).encode()).digest()


@pytest.fixture
def e() -> Engine:
    return Engine()


DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
XFER = "ab" * 16


def prefill_first(**kw: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_request_id": "cmpl-x", "kvspray": {"v": 1, "xfer": XFER, "peer": "p:1", **kw}}


def concurrent() -> dict[str, Any]:
    return {"do_remote_prefill": True, "kvspray": {"v": 1, "xfer": XFER, "peer": "p:1"}}


# ---- loads that the step waits for which computes on them


class FakePool:
    """Blocks 100 and up are free."""

    def __init__(self) -> None:
        self.free = [SimpleNamespace(block_id=i) for i in range(100, 200)]
        self.evicted: set[int] = set()

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, n: int) -> list[Any]:
        out, self.free = self.free[:n], self.free[n:]
        return out

    def free_blocks(self, blocks: list[Any]) -> None:
        self.free += blocks

    def evict_blocks(self, ids: set[int]) -> None:
        self.evicted |= ids


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


# ---- what is said when


def test_a_step_begins_once_however_often_that_is_said(e: Engine) -> None:
    e.add("r", 32, dict(DECODE))
    dest = e.add("d", 40, prefill_first())
    e.scheduler.allocated(dest, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)  # type: ignore[arg-type]
    meta = e.meta({"r": 32})
    e.worker.begin(meta)
    said = e.worker_shim.take()
    assert [c[0] for c in said] == ["intent", "step", "expect"]
    assert e.worker.signals
    e.worker.preempts(meta)
    e.worker.begin(meta)
    assert e.worker_shim.take() == [] and e.worker.signals  # nor is it taken for a forward pass that failed
    e.worker.step_done()
    e.worker.begin(e.meta())
    assert e.worker_shim.take() == [("end", 1)]


def test_nobody_is_asked_how_long_to_wait_for_a_prefill_that_is_done(e: Engine) -> None:
    class Busy(FakeScheduler):
        @property
        def match_timeout_s(self) -> float:
            raise AssertionError("asked")

        @match_timeout_s.setter
        def match_timeout_s(self, value: float) -> None:
            pass

    e.scheduler._client = Busy()
    dest = e.add("d", 40, prefill_first())
    assert e.scheduler.matched(dest, 0) == (40, True)


# ---- empty steps


def test_only_a_step_that_computes_nothing_waits_for_a_load(e: Engine) -> None:
    e.step()
    assert e.worker_shim.waits == []  # nothing is loading
    dest = e.add("d", 40, prefill_first())
    e.scheduler.allocated(dest, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)  # type: ignore[arg-type]
    e.add("other", 5, None)
    e.step({"other": 5})
    assert e.worker_shim.waits == []  # another request would wait with it
    e.step()
    assert e.worker_shim.waits == [LOAD_WAIT_S]
    lease = e.worker_shim.take()[0][1]
    e.worker_shim.end(lease, received=True)
    assert e.step().received == {"d"}
    e.step()
    assert e.worker_shim.waits == [LOAD_WAIT_S] * 2  # and not after its end


def test_no_wait_where_the_end_of_another_load_is_known_or_other_ranks_wait(e: Engine) -> None:
    def load(req: str) -> None:
        e.scheduler.allocated(e.add(req, 40, prefill_first()), SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)  # type: ignore[arg-type]

    load("d")
    e.step()
    e.worker_shim.down = True
    load("f")
    assert e.step().failed == {"f"} and e.worker_shim.waits == [LOAD_WAIT_S]
    e.worker = WorkerSide(FakeWorker(), LOG, load_wait_s=0)
    load("g")
    e.step()
    e.step()
    assert e.worker._client.waits == []  # type: ignore[attr-defined]


# ---- prefill


def test_chunked_prefill_announces_each_step_before_its_forward(e: Engine) -> None:
    e.add("r", 40, dict(DECODE))
    e.step({"r": 16})
    e.step({"r": 16})
    e.step({"r": 8})
    assert e.worker_shim.take() == [
        ("intent", 1, "r", 40, 1),
        ("step", 1, [(1, 16)]), ("layer", 0, 1), ("layer", 1, 1), ("end", 1),
        ("step", 2, [(1, 32)]), ("layer", 0, 2), ("layer", 1, 2), ("end", 2),
        ("step", 3, [(1, 40)]), ("layer", 0, 3), ("layer", 1, 3), ("end", 3),
    ]  # fmt: skip
    delay, kv = e.finish("r")
    assert delay and kv["do_remote_prefill"] and kv["remote_num_tokens"] == 40 and kv["remote_block_ids"] == [[1, 2, 3]]
    assert kv["remote_host"] == "10.1.1.1" and kv["remote_port"] == 7650
    assert kv["kvspray"]["v"] == 1 and kv["kvspray"]["peer"] == "10.1.1.1:7650" and len(kv["kvspray"]["xfer"]) == 32
    assert e.step().sent == set() and e.worker_shim.take() == [("hold", 1)]
    assert e.scheduler.pending_push_work()
    e.worker_shim.end(1, received=False)
    assert e.step().sent == {"r"}
    assert not e.scheduler.pending_push_work()
    assert e.step().sent == set()


def test_sent_before_the_request_finished_is_reported_after_it(e: Engine) -> None:
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    e.worker_shim.end(1, received=False)
    assert e.step().sent == set()
    assert e.finish("r")[0]
    assert e.step().sent == {"r"}


def test_prefix_hit_is_ready_only_with_the_first_step(e: Engine) -> None:
    r = e.add("r", 48, dict(DECODE))
    r.num_computed_tokens = 32
    e.step({"r": 16})
    assert ("step", 1, [(1, 48)]) in e.worker_shim.take()


def test_a_step_for_nobody_leaves_no_record(e: Engine) -> None:
    e.add("plain", 16, None)
    e.add("r", 16, dict(DECODE))
    e.step({"plain": 16})
    assert e.worker_shim.take() == []
    e.step({"r": 16, "plain": 1})
    e.worker_shim.take()
    e.step({"r": 1, "plain": 1})  # r decodes here
    assert e.worker_shim.take() == []


def test_preemption_comes_before_anything_else_and_the_next_attempt_starts_over(e: Engine) -> None:
    r = e.add("r", 48, dict(DECODE))
    e.step({"r": 32})
    e.worker_shim.take()
    e.add("s", 16, dict(DECODE))
    r.num_computed_tokens = 0
    e.step({"s": 16}, preempted={"r"})
    assert [c[0] for c in e.worker_shim.take()][:3] == ["preempt", "intent", "step"]
    r.num_computed_tokens = 16  # its own prefix is still cached
    e.step({"r": 32})
    assert ("step", 3, [(1, 48)]) in e.worker_shim.take()


def test_preempts_are_said_once(e: Engine) -> None:
    e.add("r", 48, dict(DECODE))
    e.step({"r": 32})
    e.worker_shim.take()
    meta = e.meta(preempted={"r"})
    e.worker.preempts(meta)
    assert e.worker_shim.take() == [("preempt", 1)]
    e.worker.begin(meta)
    assert e.worker_shim.take() == []


def test_abort_keeps_the_blocks_until_sent(e: Engine) -> None:
    e.add("r", 48, dict(DECODE))
    e.step({"r": 16})
    e.worker_shim.take()
    assert e.finish("r", "FINISHED_ABORTED") == (True, None)
    assert e.step().sent == set() and e.worker_shim.take() == [("cancel", 1)]
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.step().sent == {"r"}


def test_abort_before_the_first_step_frees_at_once(e: Engine) -> None:
    e.add("r", 48, dict(DECODE))
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)
    assert e.meta().empty()


def test_without_a_sidecar_prefill_frees_at_once(e: Engine) -> None:
    e.scheduler_shim.connected = False
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    assert e.finish("r") == (False, None) and e.worker_shim.take() == []
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"no_sidecar": 1}


def test_an_intent_that_could_not_be_submitted_ends_with_its_request(e: Engine) -> None:
    e.add("r", 16, dict(DECODE))
    e.worker_shim.down = True
    e.step({"r": 16})
    assert e.worker_shim.take() == []
    assert e.finish("r")[0]
    assert e.step().sent == {"r"}


def test_a_failed_forward_signals_nothing(e: Engine) -> None:
    e.add("r", 16, dict(DECODE))
    meta = e.meta({"r": 16})
    e.worker.begin(meta)
    e.worker_shim.take()
    e.worker.step_failed()
    e.worker.step_done()
    # The flags of a later step would say that this one is complete, too.
    assert e.worker_shim.take() == [("cancel", 1)]


def test_a_step_whose_end_never_came_ends_its_leases(e: Engine) -> None:
    e.add("r", 32, dict(DECODE))
    e.worker.begin(e.meta({"r": 16}))
    e.worker_shim.take()
    e.step({"r": 16})
    assert e.worker_shim.take()[0] == ("cancel", 1)


def test_samples_and_lists_share_a_dict_and_an_xfer(e: Engine) -> None:
    shared = dict(DECODE)
    a, b = e.add("0_cmpl-q-0-01234567", 16, shared), e.add("cmpl-q-1-89abcdef", 16, shared)
    assert a.kv_transfer_params is not b.kv_transfer_params
    meta = e.meta({a.request_id: 16, b.request_id: 16})
    assert len({i.xfer for i in meta.intents}) == 1 and len(meta.intents) == 2


def test_the_routers_xfer_and_fanout_win(e: Engine) -> None:
    e.add("r", 16, {**DECODE, "kvspray": {"v": 1, "xfer": XFER, "fanout": 4}})
    meta = e.meta({"r": 16})
    assert meta.intents[0].xfer.hex() == XFER and meta.intents[0].fanout == 4


# ---- decode


def blocks(e: Engine, req: str) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (e.tables[req],))


def test_prefill_first_loads_what_is_missing(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    assert e.scheduler.matched(r, 16) == (24, True)
    assert e.scheduler_shim.asked == []
    e.scheduler.allocated(r, blocks(e, "r"), 24)
    assert e.scheduler.matched(r, 0) == (0, False)  # vLLM asks again after a prompt of one token, or a failed load
    assert not r.kv_transfer_params["do_remote_prefill"]
    e.step()
    assert e.worker_shim.take() == [("expect", 1, "r", "p:1", 40, 16, ((1, 2, 3),))]
    e.worker_shim.end(1, received=True)
    done = e.step()
    assert done.received == {"r"} and done.failed == set()


def test_nothing_is_asked_for_a_request_that_was_refused_before_the_engine(e: Engine) -> None:
    r = SimpleNamespace(
        request_id="r", prompt_token_ids=[0], num_prompt_tokens=1, num_computed_tokens=0, kv_transfer_params=concurrent(), abort_immediately=True,
        lora_request=None, cache_salt=None, mm_features=[], status=SimpleNamespace(name="FINISHED_ABORTED"),
    )  # fmt: skip
    e.scheduler._backoff = 0  # a model whose last token moves, too: the one token that vLLM puts there would be a prompt
    e.scheduler.on_new_request(r)  # type: ignore[arg-type]
    assert e.scheduler_shim.asked == []
    assert e.scheduler.finished(r, ((),)) == (False, None)  # type: ignore[arg-type]
    r.abort_immediately = False
    e.scheduler.on_new_request(r)  # type: ignore[arg-type]
    assert e.scheduler_shim.asked == [(bytes.fromhex(XFER), "p:1")]


def test_a_question_that_cannot_be_asked_means_local_prefill(e: Engine) -> None:
    e.scheduler_shim.full = True
    r = e.add("r", 40, concurrent())
    assert e.scheduler.matched(r, 0) == (0, False)
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"not_asked": 1}


def test_the_real_scheduler_shim_says_what_it_cannot_ask(tmp_path: pathlib.Path) -> None:
    c = shim.Scheduler(str(tmp_path / "nobody"), "e", LOG)
    with pytest.raises(shim.ShimError):
        c.await_admission(bytes(16), bytes(32), "\u00e9" * 200 + ":1", 1, 1.0)
    with pytest.raises(shim.ShimError):
        c.await_admission(bytes(16), bytes(32), "a:1\0b:1", 1, 1.0)
    c.await_admission(bytes(16), bytes(32), "a:1", 1, 1.0)
    c.close()
    with pytest.raises(shim.ShimError):
        c.await_admission(bytes(16), bytes(32), "a:1", 1, 1.0)


@pytest.mark.parametrize("kv", [dict(DECODE), prefill_first()])
def test_a_prompt_that_cannot_be_hashed_is_prefilled_locally(kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    e = Engine()
    monkeypatch.setattr(e.scheduler, "_hash", shim.prefix_hash)
    r = SimpleNamespace(
        request_id="r", prompt_token_ids=[-1, 2], num_prompt_tokens=2, num_computed_tokens=0, kv_transfer_params=kv,
        lora_request=None, cache_salt=None, mm_features=[], status=SimpleNamespace(name="RUNNING"),
    )  # fmt: skip
    e.scheduler.on_new_request(r)  # type: ignore[arg-type]
    assert e.scheduler.matched(r, 0) == (0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", [None, "", "no port", "h:", "cut-in-the-middle:"])
def test_an_endpoint_that_nobody_can_dial_is_not_handed_out(e: Engine, endpoint: str | None) -> None:
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    e.scheduler_shim.endpoint = endpoint
    assert e.finish("r") == (True, None)


def test_concurrent_waits_for_admission(e: Engine) -> None:
    r = e.add("r", 40, concurrent())
    assert e.scheduler_shim.asked == [(bytes.fromhex(XFER), "p:1")]
    assert e.scheduler.matched(r, 0) == (None, False)
    e.scheduler_shim.answers[bytes.fromhex(XFER)] = shim.Answer("admitted")
    assert e.scheduler.matched(r, 0) == (40, True)


@pytest.mark.parametrize("answer", ["refused", "gone"])
def test_a_refused_admission_means_local_prefill(e: Engine, answer: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    r = e.add("r", 40, concurrent())
    e.scheduler_shim.answers[bytes.fromhex(XFER)] = shim.Answer(answer, "it is yours")
    assert e.scheduler.matched(r, 0) == (0, False)
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"prefill_" + answer: 1}
    assert f"p:1 was asked for the prefill, {answer}: it is yours" in caplog.text


def test_admission_is_bounded(e: Engine) -> None:
    r = e.add("r", 40, concurrent())
    e.clock += 9
    assert e.scheduler.matched(r, 0) == (None, False)
    e.clock += 2
    assert e.scheduler.matched(r, 0) == (0, False)


def test_no_sidecar_unknown_version_or_no_key_mean_local_prefill(e: Engine) -> None:
    for kv in (prefill_first(v=2), {"do_remote_prefill": True, "remote_block_ids": [[1]]}, {"do_remote_prefill": True, "kvspray": 3}):
        r = e.add("r", 40, kv)
        assert e.scheduler.matched(r, 0) == (0, False)
    e.scheduler_shim.connected = False
    assert e.scheduler.matched(e.add("r", 40, concurrent()), 0) == (0, False)


def test_a_failed_load_is_reported_after_its_fence(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 40)
    assert e.step().received == set()
    e.worker_shim.end(1, received=True, status=shim.EXPIRED)
    done = e.step()
    assert done.received == {"r"} == done.failed and done.failed_blocks == {1, 2, 3} and not done.bad_blocks
    stats = e.worker.take_stats()
    assert stats is not None and stats.data["recompute_tokens"] == 40 and stats.data["transfers"] == {"received/expired": 1}


@pytest.mark.parametrize(
    ("hit", "lacks", "bad", "recomputed"),
    [
        (0, 16, {2, 3, 4, 5, 6, 7}, 84),
        (0, 64, {5, 6, 7}, 36),
        (0, 79, {5, 6, 7}, 36),  # in the middle of a block: all of it
        (0, 99, {7}, 4),
        (32, 32, {3, 4, 5, 6, 7}, 68),  # nothing came, and what the engine had is good
        (32, 80, {6, 7}, 20),
        # Not even a block of it, nothing said, or nonsense: the engine begins anew.
        (0, 0, set(), 100),
        (0, 15, set(), 100),
        (32, 0, set(), 68),
        (32, 31, set(), 68),
        (0, 100, set(), 100),
        (0, 1 << 40, set(), 100),
    ],
)
def test_a_load_that_fails_is_recomputed_from_the_first_token_that_lacks(e: Engine, hit: int, lacks: int, bad: set[int], recomputed: int) -> None:
    r = e.add("r", 100, prefill_first())
    assert e.scheduler.matched(r, hit) == (100 - hit, True)
    e.scheduler.allocated(r, blocks(e, "r"), 100 - hit)
    e.step()
    e.worker_shim.end(1, received=True, status=shim.FAILED, lacks=lacks)
    done = e.step()
    assert done.received == {"r"} and done.bad_blocks == bad and done.failed == (set() if bad else {"r"})
    assert done.failed_blocks == (set() if bad else set(range(1 + hit // BLOCK, 8))), "blocks of a hit may be another request's, too"
    stats = e.worker.take_stats()
    assert stats is not None and stats.data["recompute_tokens"] == recomputed


def test_the_real_worker_shim_names_the_first_token_that_lacks() -> None:
    w = object.__new__(shim.Worker)
    end = kvspray.Completion(lease=3, received=True, status=kvspray.CompletionStatus.FAILED, recompute=((64, 96), (32, 40)))
    w._c = SimpleNamespace(poll=lambda: [end, dataclasses.replace(end, recompute=())])  # type: ignore[assignment]
    assert [(got.lease, got.status, got.lacks) for got in w.poll()] == [(3, shim.FAILED, 32), (3, shim.FAILED, 0)]


def test_what_came_is_not_used_where_the_engine_could_not_go_on() -> None:
    """Recurrent states, sliding windows, several groups; a request that is over; other weights."""
    for case in ("no resumption", "groups", "cancelled", "outdated"):
        e = Engine()
        e.worker = WorkerSide(e.worker_shim, LOG, resume_block=0 if case == "no resumption" else BLOCK)
        r = e.add("r", 100, prefill_first())
        e.scheduler.allocated(r, blocks(e, "r"), 100)
        meta = e.meta()
        if case == "groups":
            meta.expects = [dataclasses.replace(x, blocks=(x.blocks[0], x.blocks[0])) for x in meta.expects]
        e.run(meta)
        if case == "cancelled":
            e.finish("r", "FINISHED_ABORTED")
            e.step()
        if case == "outdated":
            e.worker.outdate()
        e.worker_shim.end(1, received=True, status=shim.FAILED, lacks=64)
        done = e.step()
        assert done.received == {"r"} and not done.bad_blocks, case
        assert done.failed == (set() if case == "cancelled" else {"r"}), case


def test_a_load_that_was_complete_before_the_weights_changed_and_is_seen_after_is_not_used(e: Engine) -> None:
    r = e.add("r", 100, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 100)
    e.step()
    e.worker_shim.end(1, received=True, status=shim.OK)
    e.worker.outdate()
    done = e.step()
    assert done.received == {"r"} and done.failed == {"r"}
    stats = e.worker.take_stats()
    assert stats is not None and stats.data["recompute_tokens"] == 100


def test_nor_is_one_that_a_step_waits_for(w: Waiting) -> None:
    arrives(w)
    meta = w.load()
    w.worker.begin(meta)
    w.worker.outdate()
    w.worker.finish_loads()
    assert w.copied == [] and w.worker.collect().bad_blocks == {1, 2, 3}


def test_abort_while_loading_cancels_and_waits(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 40)
    e.step()
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)
    assert e.step().received == set() and e.worker_shim.take()[-1] == ("cancel", 1)
    e.worker_shim.end(1, received=True, status=shim.CANCELLED)
    done = e.step()
    assert done.received == {"r"} and done.failed == set()
    assert r.status.name == "FINISHED_ABORTED"


def test_an_expect_without_a_sidecar_fails_at_once(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 40)
    e.worker_shim.down = True
    done = e.step()
    assert done.received == {"r"} == done.failed


def test_local_hits_that_leave_nothing_to_load(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 0)
    assert e.meta().empty()
    assert e.scheduler.matched(r, 0) == (0, False)


@pytest.mark.parametrize("given", ["x", 7, ["do_remote_decode"], True])
def test_params_of_any_type_are_survived(e: Engine, given: Any) -> None:
    # vLLM copies what a client sends in vllm_xargs without looking; an exception would end the engine core.
    r = e.add("odd", 3 * BLOCK, given)
    assert r.kv_transfer_params is None
    meta = e.meta({"odd": 3 * BLOCK})
    assert not meta.intents and not meta.expects
    assert e.scheduler.finished(r, [[1, 2, 3]]) == (False, None)


# ---- sliding windows


class Hybrid(Engine):
    """Two cache groups: one keeps everything, one looks 32 tokens back."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = SchedulerSide(
            Settings(), self.scheduler_shim, [BLOCK, BLOCK], "engine", fake_hash, LOG, windows=(0, 32), now=lambda: self.clock
        )

    def meta(self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None) -> StepMeta:
        counts = scheduled or {}
        out = SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), preempted_req_ids=preempted or set())
        for req in counts:
            # As allocate_slots does before it takes blocks for this step's tokens: whole blocks that the next token sees no more.
            table = self.windows.setdefault(req, [i + 100 for i in range(len(self.tables[req]))])
            gone = max(self.requests[req].num_computed_tokens - 32 + 1, 0) // BLOCK
            table[:gone] = [0] * gone
            self.tables[req] += range(len(self.tables[req]) + 1, 1 + -(-(self.requests[req].num_computed_tokens + counts[req]) // BLOCK))
            table += [i + 100 for i in range(len(table), len(self.tables[req]))]
        meta = self.scheduler.build(out, lambda req: (self.tables[req], self.windows[req]))  # type: ignore[arg-type]
        for req, n in counts.items():
            self.requests[req].num_computed_tokens += n
        return meta

    def finish(self, req: str, status: str = "FINISHED_LENGTH_CAPPED") -> tuple[bool, Any]:
        r = self.requests[req]
        r.status = SimpleNamespace(name=status)
        return self.scheduler.finished(r, (self.tables[req], self.windows[req]))

    @property
    def windows(self) -> dict[str, list[int]]:
        return self.__dict__.setdefault("_windows", {})


def test_with_a_window_both_sides_compute_the_last_token() -> None:
    e = Hybrid()
    e.add("r", 40, dict(DECODE))
    e.step({"r": 16})
    e.step({"r": 24})
    assert [c for c in e.worker_shim.take() if c[0] in ("intent", "step")] == [("intent", 1, "r", 39, 1), ("step", 1, [(1, 16)]), ("step", 2, [(1, 39)])]
    delay, kv = e.finish("r")
    assert delay and kv["remote_num_tokens"] == 39 and kv["remote_block_ids"] == [[1, 2, 3], [100, 101, 102]]
    d = e.add("d", 40, prefill_first())
    assert e.scheduler.matched(d, 16) == (23, True)
    for kv in (dict(DECODE), prefill_first()):
        one = e.add("one", 1, kv)
        assert e.scheduler.matched(one, 0) == (0, False)  # nothing of it would move
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"short_prompt": 2}


def test_a_window_that_moves_on_takes_the_lease_with_it() -> None:
    e = Hybrid()
    e.add("r", 64, dict(DECODE))
    e.step({"r": 64})
    # 63 tokens are sent: from the block of token 32, which the token at 79 is the first not to see.
    for _ in range(15):
        e.step({"r": 1})
    assert [c[0] for c in e.worker_shim.take()] == ["intent", "step", "layer", "layer", "end"]
    meta = e.meta({"r": 1})
    assert [req for req, _ in meta.lost] == ["r"]
    e.worker.preempts(meta)  # before anything of this step is computed: the block may be somebody else's in it
    assert e.worker_shim.take() == [("cancel", 1)]
    e.worker.begin(meta)
    assert e.meta({"r": 1}).lost == []
    assert e.finish("r") == (True, None)
    assert e.step().sent == set()
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.step().sent == {"r"}


def test_a_reset_of_the_caches_withdraws_what_waits_to_be_fetched() -> None:
    e = Engine()
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    e.finish("r")
    e.step()
    e.worker_shim.take()
    e.scheduler.reset()
    e.scheduler.reset()
    e.step()
    assert e.worker_shim.take() == [("cancel", 1)]
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.step().sent == {"r"}
    e.scheduler.reset()
    assert e.meta().empty()
