"""Ends of loads that reach the scheduler a step early, in a model of vLLM's asynchronous loop: the
results of a step are handled after the worker has executed the next one."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import LOG, Engine, FakeWorker, load

from kvspray_vllm import early, shim
from kvspray_vllm.early import Early
from kvspray_vllm.meta import Landed
from kvspray_vllm.worker import Results, WorkerSide


class Loop(Engine):
    """vLLM handles results of `lag` steps before."""

    def __init__(self, lag: int, engine: str = "engine", in_process: bool = True) -> None:
        super().__init__()
        self.worker = WorkerSide(self.worker_shim, LOG, resume_block=16, engine=engine)
        self.early = Early(engine if in_process else "of another process")
        self.queue: collections.deque[tuple[Results, Landed | None]] = collections.deque()
        self.lag = lag
        self.waiting: set[str] = set()  # for loads, whose end vLLM has not handled
        self.aborted: set[str] = set()  # of these
        self.ready: list[str] = []  # that the next step may compute
        self.given: collections.Counter[str] = collections.Counter()

    def start(self, req: str) -> int:
        """Returns the lease."""
        load(self, req)
        self.waiting.add(req)
        self.iterate()
        return self.worker_shim.leases

    def abort(self, req: str) -> None:
        self.finish(req, "FINISHED_ABORTED")
        if req in self.waiting:
            self.aborted.add(req)  # vLLM keeps its blocks until the load's end is reported

    def iterate(self) -> None:
        meta = self.meta()
        self.worker.preempts(meta)
        self.worker.begin(meta)
        self.worker.step_done()
        done = self.worker.collect()
        self.queue.append((done, self.worker.take_landed()))
        if len(self.queue) > self.lag:
            self.handle(*self.queue.popleft())

    def handle(self, done: Results, landed: Landed | None) -> None:
        if not (done.sent or done.received or done.failed or done.bad_blocks or landed):
            return  # vLLM does not call the connector
        received = self.early.take(done.received)
        self.scheduler.worker_reported(done.sent, received, landed)
        for req in received:
            assert req in self.waiting, f"vLLM would end: {req} does not wait for a load"
            self.waiting.discard(req)
            self.given[req] += 1
            if req not in self.aborted:
                self.ready.append(req)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    early._ended.clear()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_end_of_a_load_is_handled_in_the_step_that_finds_it(lag: int) -> None:
    e = Loop(lag)
    lease = e.start("r")
    for _ in range(3):
        e.iterate()
    assert e.ready == []
    e.worker_shim.end(lease, received=True)
    e.iterate()
    assert e.ready == ["r"]
    for _ in range(4):
        e.iterate()
    assert e.given == {"r": 1} and not e.early._given


def test_a_scheduler_in_another_process_gets_the_end_with_its_own_step() -> None:
    e = Loop(1, in_process=False)
    lease = e.start("r")
    e.iterate()
    e.worker_shim.end(lease, received=True)
    e.iterate()
    assert e.ready == [] and not any(early._ended.values())
    e.iterate()
    assert e.ready == ["r"]


@pytest.mark.parametrize("how", ["failed", "outdated", "cancelled"])
def test_only_loads_that_have_ended_well_come_early(how: str) -> None:
    e = Loop(1)
    lease = e.start("r")
    e.iterate()
    if how == "outdated":
        e.worker.outdate()
    if how == "cancelled":
        e.abort("r")
        e.iterate()
    e.worker_shim.end(lease, received=True, status=shim.FAILED if how == "failed" else shim.OK)
    e.iterate()
    assert e.given == {}
    e.iterate()
    assert e.given == {"r": 1}


def test_an_abort_between_the_two_reports() -> None:
    e = Loop(1)
    lease = e.start("r")
    e.iterate()
    e.worker_shim.end(lease, received=True)
    e.iterate()
    e.abort("r")
    e.iterate()
    again = e.start("r")  # by the same name, and its own load is open
    e.iterate()
    assert e.waiting == {"r"}
    e.worker_shim.end(again, received=True)
    e.iterate()
    assert e.given == {"r": 2}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_each_load_is_reported_once_in_any_order(lag: int) -> None:
    rng = random.Random(lag)
    e = Loop(lag)
    leases: dict[str, int] = {}
    for n in range(600):
        if rng.random() < 0.3:
            leases[f"r{n}"] = e.start(f"r{n}")
        if leases and rng.random() < 0.3:
            req = rng.choice(list(leases))
            e.worker_shim.end(
                leases.pop(req), received=True, status=rng.choice([shim.OK, shim.OK, shim.FAILED])
            )
            if rng.random() < 0.2:
                e.abort(req)
        if leases and rng.random() < 0.1:
            open_ = [r for r in leases if r not in e.aborted]
            if open_:
                e.abort(rng.choice(open_))
        e.iterate()
    for req, lease in leases.items():
        e.worker_shim.end(lease, received=True)
        assert req in e.waiting
    for _ in range(2 + lag):
        e.iterate()
    assert not e.waiting and set(e.given.values()) == {1} and not e.early._given
    assert not any(early._ended.values())


def test_the_worker_does_not_wait_while_the_engine_has_not_handled_an_end() -> None:
    """Another load is open, and the engine handles the end only after the next step."""
    e = Loop(1, in_process=False)
    first = e.start("a")
    e.start("b")
    waits: list[float] = e.worker_shim.waits
    e.worker_shim.end(first, received=True)
    e.iterate()
    before = len(waits)
    e.iterate()
    assert e.ready == ["a"] and len(waits) == before
    e.iterate()
    assert len(waits) == before + 1


def test_what_nothing_takes_is_not_kept() -> None:
    ends = Early("engine")
    early.report("engine", {"a"})
    early.report("engine", {"b"})
    assert ends.take({"a"}) == {"a", "b"} and ends.take({"b"}) == set()


def test_vllm_asks_the_connector_before_it_handles_the_ends_of_loads() -> None:
    """By vLLM's own function, of the installed version."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

    ends = Early("engine")

    def update(out: KVConnectorOutput) -> None:
        out.finished_recving = ends.take(out.finished_recving or ())

    request = SimpleNamespace(status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    scheduler: Any = SimpleNamespace(
        connector=SimpleNamespace(update_connector_output=update),
        requests={"r": request},
        finished_recving_kv_req_ids=set(),
        _set_kv_fetch_stage=lambda *a: None,
    )
    early.report("engine", {"r"})
    Scheduler._update_from_kv_xfer_finished(scheduler, KVConnectorOutput())
    assert scheduler.finished_recving_kv_req_ids == {"r"}
    request.status = RequestStatus.RUNNING  # with its end reported again, vLLM would end
    Scheduler._update_from_kv_xfer_finished(scheduler, KVConnectorOutput(finished_recving={"r"}))
    assert not KVConnectorOutput(kv_connector_worker_meta=Landed(waits=True)).is_empty()


def test_a_closed_scheduler_leaves_nothing() -> None:
    one = Early("engine")
    worker = WorkerSide(FakeWorker(), LOG, engine="engine")
    assert early.reports("engine")
    one.close()
    assert not early.reports("engine")
    worker.collect()
    assert worker.take_landed() is None
