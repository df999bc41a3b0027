"""Both sides of the connector over a shim that records its calls. No engine, no sidecar."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvspray_vllm import shim
from kvspray_vllm.meta import StepMeta
from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.worker import Results, WorkerSide

LOG = logging.getLogger("test")
BLOCK = 16


class Request(SimpleNamespace):
    """What vLLM's requests have besides what a test is about."""

    lora_request = cache_salt = trace_headers = session_id = prompt_embeds = None
    abort_immediately = resumable = skip_reading_prefix_cache = False
    mm_features = ()
    priority = 0


@dataclass
class FakeWorker:
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    ends: list[shim.Ended] = field(default_factory=list)
    leases: int = 0
    down: bool = False
    waits: list[float] = field(default_factory=list)
    traced: dict[str, str] = field(default_factory=dict)  # traceparents by request
    stalls: dict[str, float] = field(default_factory=dict)  # by request
    priorities: dict[str, int] = field(default_factory=dict)  # by request

    def _lease(self, kind: str, *what: Any) -> int:
        if self.down:
            raise shim.ShimError("down")
        self.leases += 1
        self.calls.append((kind, self.leases, *what))
        return self.leases

    def intent(
        self,
        xfer: bytes,
        hash: bytes,
        tokens: int,
        blocks: Any,
        fanout: int,
        req: str,
        traceparent: str = "",
    ) -> int:
        self.traced[req] = traceparent
        return self._lease("intent", req, tokens, fanout)

    def expect(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, skip: int, blocks: Any, req: str,
        after: int = 0, traceparent: str = "", stall_s: float = 0.0, priority: int = 0,
    ) -> int:  # fmt: skip
        self.stalls[req] = stall_s
        self.priorities[req] = priority
        self.traced[req] = traceparent
        return self._lease("expect", req, peer, tokens, skip, blocks, *([after] if after else []))

    def step(self, step: int, gains: Any) -> None:
        self.calls.append(("step", step, [(lease, end) for lease, end, _ in gains]))

    def preempt(self, lease: int) -> None:
        self.calls.append(("preempt", lease))

    def cancel(self, lease: int, reason: str) -> None:
        self.calls.append(("cancel", lease))

    def hold(self, lease: int) -> None:
        self.calls.append(("hold", lease))

    def yield_hold(self, lease: int) -> None:
        self.calls.append(("yield", lease))

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
    decliners: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # of each
    withdrawn: int = 0  # askers
    loads: list[tuple[bytes, bytes]] = field(default_factory=list)

    def expected(self, xfer: bytes, hash: bytes) -> None:
        self.loads.append((xfer, hash))

    def decline(
        self, xfer: bytes, hash: bytes, peer: str, reason: str, asked: bool = True, req: str = "",
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.declined.append((xfer, hash, peer, reason))
        self.decliners.append((req, tuple(ranks)))
        self.withdrawn += asked

    def await_admission(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, ttl_s: float
    ) -> None:
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
            Settings(),
            self.scheduler_shim,
            [BLOCK],
            "engine",
            fake_hash,
            LOG,
            now=lambda: self.clock,
        )
        self.worker = WorkerSide(self.worker_shim, LOG, resume_block=BLOCK)
        self.worker.set_flags({"l0": 0, "l1": 1})
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}
        self.seen: set[str] = set()

    def add(self, req: str, n: int, kv: dict[str, Any] | None, **more: Any) -> Any:
        tokens = list(range(n))
        r = Request(
            request_id=req, prompt_token_ids=tokens, num_prompt_tokens=n, num_computed_tokens=0,
            kv_transfer_params=kv,
            status=SimpleNamespace(name="RUNNING"), num_output_tokens=0, **more,
        )  # fmt: skip
        self.requests[req] = r
        self.tables[req] = list(range(1, 1 + -(-n // BLOCK)))
        self.scheduler.on_new_request(r)
        return r

    def meta(
        self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None
    ) -> StepMeta:
        counts = scheduled or {}
        new = [
            SimpleNamespace(req_id=req, num_computed_tokens=self.requests[req].num_computed_tokens)
            for req in counts
            if req not in self.seen
        ]
        self.seen.update(counts)
        out = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            preempted_req_ids=preempted or set(),
            scheduled_new_reqs=new,
        )
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

    def step(
        self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None
    ) -> Results:
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
    return {
        "do_remote_prefill": True,
        "remote_request_id": "cmpl-x",
        "kvspray": {"v": 1, "xfer": XFER, "peer": "p:1", **kw},
    }


def load(e: Engine, req: str) -> None:
    """A prompt of 40 tokens, all of which the engine asks of its peer."""
    r = e.add(req, 40, prefill_first())
    e.scheduler.matched(r, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: (e.tables[req],))
    e.scheduler.allocated(r, blocks, 40)  # type: ignore[arg-type]


def concurrent() -> dict[str, Any]:
    return {"do_remote_prefill": True, "kvspray": {"v": 1, "xfer": XFER, "peer": "p:1"}}


class FakePool:
    """Blocks 100 and up are free."""

    num_gpu_blocks = 200

    def __init__(self) -> None:
        self.free = [SimpleNamespace(block_id=i) for i in range(100, 200)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)
