"""The worker's side of a GPU engine, over flags that keep a record: what is enqueued on which
stream, and in which order with the records that the sidecar reads. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import DECODE, LOG, Engine, FakeWorker, prefill_first

from kvspray_vllm import layout, signals
from kvspray_vllm.connector import KVSprayConnector
from kvspray_vllm.meta import Expect, Gain, Intent, Landed, StepMeta
from kvspray_vllm.signals import GpuSignals
from kvspray_vllm.worker import NO_SIGNALS, WorkerSide

STREAM = 7


@dataclass
class FakeFlags:
    client: FakeWorker
    ok: bool = True
    fails: set[str] = field(default_factory=set)
    marks: int = 0

    def _call(self, what: str, *args: int) -> bool:
        self.ok = self.ok and what not in self.fails
        if self.ok:
            self.client.calls.append((what, *args))
        return self.ok

    def step(self, step: int, stream: int) -> bool:
        return self._call("gpu step", step, stream)

    def signal_layer(self, layer: int, stream: int) -> bool:
        return self._call("gpu layer", layer, stream)

    def signal_step(self, stream: int) -> bool:
        return self._call("gpu end", stream)

    def mark(self, stream: int) -> int:
        self.marks += 1
        return self.marks if self._call("gpu mark", stream) else 0

    def close(self) -> None:
        self.client.calls.append(("gpu close",))


@dataclass
class Rig:
    client: FakeWorker
    flags: FakeFlags
    worker: WorkerSide
    capturing: list[bool]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    capturing = [False]
    monkeypatch.setattr(signals, "_raw_stream", lambda torch: lambda: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    client = FakeWorker()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: client.calls.append(("synchronize",)))
    flags = FakeFlags(client)
    worker = WorkerSide(client, LOG, 0)
    worker.set_flags({"a": 0, "b": 1}, GpuSignals(flags))
    yield Rig(client, flags, worker, capturing)


def gains(step: int, *, intent: bool = False) -> StepMeta:
    intents = [Intent("p", b"x" * 16, b"h" * 32, 32, 1, ((1, 2),))] if intent else []
    return StepMeta(intents=intents, step=step, gains=[Gain("p", 32, ((1, 2),))])


def expects(n: int = 1) -> StepMeta:
    return StepMeta(
        expects=[
            Expect(f"d{i}", bytes([i]) * 16, b"h" * 32, "peer:1", 32, 0, ((3, 4),))
            for i in range(n)
        ]
    )


def test_a_step_is_set_on_the_stream_before_its_layers(rig: Rig) -> None:
    rig.worker.begin(gains(5, intent=True))
    for name in ("a", "b", "unknown"):
        rig.worker.layer_done(name)
    rig.worker.step_done()
    assert rig.client.take() == [
        ("intent", 1, "p", 32, 1), ("gpu step", 5, STREAM), ("step", 5, [(1, 32)]),
        ("gpu layer", 0, STREAM), ("gpu layer", 1, STREAM), ("gpu end", STREAM),
    ]  # fmt: skip
    rig.worker.begin(StepMeta())  # nothing is announced: no flag may come
    rig.worker.layer_done("a")
    rig.worker.step_done()
    assert rig.client.take() == []
    rig.worker.close()
    assert rig.client.take() == [("synchronize",), ("gpu close",), ("close",)], (
        "no flag is on its way to memory that is given back"
    )


def test_layers_of_a_graph_are_signalled_while_it_is_captured(rig: Rig) -> None:
    c = object.__new__(KVSprayConnector)
    c._worker, c._connector_metadata = rig.worker, None
    assert not c.has_connector_metadata(), "a warm-up forward pass has no step and no graph"
    rig.capturing[0] = True
    assert c.has_connector_metadata()
    for name in ("a", "b"):
        c.wait_for_layer_load(name)
        c.save_kv_layer(name, None, None)  # type: ignore[arg-type]
    rig.capturing[0] = False
    assert rig.client.take() == [("gpu layer", 0, STREAM), ("gpu layer", 1, STREAM)]
    c._connector_metadata = StepMeta()
    assert not c.has_connector_metadata(), "this step announces nothing"
    assert not KVSprayConnector.requires_piecewise_for_cudagraph({})


def test_a_source_that_is_preempted_moves_its_epoch_before_the_step_that_takes_its_blocks(
    rig: Rig,
) -> None:
    """The GPU may still compute the step before. Flags of that one may come, and mean nothing for
    the blocks that the request gets afterwards."""
    rig.worker.begin(gains(1, intent=True))
    rig.worker.step_done()
    rig.client.take()
    gone = StepMeta(preempts=["p"], expects=expects().expects)
    rig.worker.preempts(gone)
    rig.worker.begin(gone)
    assert [c[0] for c in rig.client.take()] == ["preempt", "gpu mark", "expect"]
    again = StepMeta(step=2, gains=[Gain("p", 32, ((8, 9),))])
    rig.worker.preempts(again)
    rig.worker.begin(again)
    rig.worker.step_done()
    assert rig.client.take() == [
        ("gpu step", 2, STREAM),
        ("step", 2, [(1, 32)]),
        ("gpu end", STREAM),
    ]


def test_loads_wait_for_the_steps_in_flight(rig: Rig) -> None:
    rig.worker.begin(expects(2))
    got = rig.client.take()
    assert got[0] == ("gpu mark", STREAM) and len(got) == 3
    assert [(c[0], c[-1]) for c in got[1:]] == [("expect", 1), ("expect", 1)], (
        "one mark for the loads of one step"
    )
    rig.worker.begin(StepMeta())
    assert rig.client.take() == [], "a step without loads pays nothing"


def test_without_a_mark_nothing_is_loaded(rig: Rig) -> None:
    rig.flags.fails.add("gpu mark")
    rig.worker.begin(expects())
    assert rig.client.take() == []
    got = rig.worker.collect()
    assert got.received == {"d0"} and got.failed == {"d0"}, "computed here"


@pytest.mark.parametrize("fails", ["gpu step", "gpu layer", "gpu end"])
def test_a_step_whose_flags_may_be_missing_is_given_up(rig: Rig, fails: str) -> None:
    rig.worker.begin(gains(1, intent=True))
    rig.worker.step_done()
    rig.client.take()
    rig.flags.fails.add(fails)
    reasons: list[str] = []
    cancel = rig.client.cancel
    rig.client.cancel = lambda lease, reason: (reasons.append(reason), cancel(lease, reason))  # type: ignore[method-assign,func-returns-value]
    rig.worker.begin(gains(2))
    rig.worker.layer_done("a")
    rig.worker.step_done()
    assert ("cancel", 1) in rig.client.take() and reasons == [NO_SIGNALS]
    rig.worker.begin(gains(3))
    assert [c[0] for c in rig.client.take()] == ["cancel"], "no later step is announced"


def test_settings_and_engines_that_a_gpu_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_vllm import config

    monkeypatch.setattr(layout, "CAPABILITIES", SimpleNamespace(sleeps=False))
    layout.check_config(config(device_config__device_type="cuda"))  # type: ignore[arg-type]
    asleep: Any = config(device_config__device_type="cuda", model_config__enable_sleep_mode=True)
    with pytest.raises(layout.Unsupported, match="enable_sleep_mode is on.*--enable-sleep-mode"):
        layout.check_config(asleep)
    layout.check_config(config(model_config__enable_sleep_mode=True))  # type: ignore[arg-type]


def test_the_scheduler_learns_that_the_worker_serves_alone(rig: Rig) -> None:
    rig.flags.fails.add("gpu mark")
    rig.worker.begin(expects())
    landed = rig.worker.take_landed()
    assert landed is not None and landed.disabled == NO_SIGNALS and rig.worker.take_landed() is None
    assert Landed().aggregate(landed).disabled == landed.aggregate(Landed()).disabled == NO_SIGNALS
    engine = Engine()
    engine.scheduler.worker_reported((), (), landed)
    for req, given in (("p", DECODE), ("d", prefill_first())):
        engine.add(req, 32, given)
    why = f"this engine takes part in no transfer: {NO_SIGNALS}"
    assert [reason for *_, reason in engine.scheduler_shim.declined] == [why], (
        "P need not keep its blocks"
    )
    assert not engine.scheduler._pending and not engine.scheduler._destinations


def test_clearing_before_the_connector_is_called() -> None:
    kv = SimpleNamespace(needs_kv_cache_zeroing=True)
    for second, role, refused in (
        (True, "kv_both", True),
        (True, "kv_consumer", False),
        (False, "kv_both", False),
    ):
        transfer = SimpleNamespace(kv_role=role, is_kv_producer=role != "kv_consumer")
        c: Any = SimpleNamespace(use_v2_model_runner=second, kv_transfer_config=transfer)
        if refused:
            with pytest.raises(
                layout.Unsupported, match="kv_role is kv_both.*VLLM_USE_V2_MODEL_RUNNER=0"
            ):
                layout.check_clearing(c, kv)  # type: ignore[arg-type]
        else:
            layout.check_clearing(c, kv)  # type: ignore[arg-type]
