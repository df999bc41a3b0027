"""KVSprayConnector under vLLM's own MultiConnector, beside another connector. No engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import LOG, Engine, prefill_first
from test_signals import FakeFlags, FakeWorker, gains
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.attention import attention, kv_transfer_utils

from kvspray_vllm import KVSprayConnector, signals
from kvspray_vllm.connector import register
from kvspray_vllm.meta import Landed, StepMeta
from kvspray_vllm.signals import GpuSignals, in_captures
from kvspray_vllm.stats import KVSprayStats
from kvspray_vllm.worker import WorkerSide

OURS = {
    "kv_connector": "KVSprayConnector",
    "kv_connector_module_path": "kvspray_vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {},
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}


def config(*connectors: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(connectors)},
    )


def multi(*connectors: Any) -> Any:
    m = object.__new__(MultiConnector)
    m._connectors, m._requests_to_connector, m._extra_async_saves = list(connectors), {}, {}
    m._connector_metadata, m._all_support_hma = None, True
    return m


def test_statistics_cross_processes() -> None:
    """vLLM's server rebuilds those of each connector by the name of its class, and ends where it
    has none of that name."""
    stats = KVSprayStats()
    stats.ended(True, "ok", 4096, 250, "tcp", 0)
    got = MultiConnector.build_kv_connector_stats({"KVSprayConnector": stats.to_dict()})
    assert got is not None and isinstance(got.data["KVSprayConnector"], KVSprayStats)
    assert got.reduce()["KVSprayConnector"]["kvspray received/ok"] == 1
    register("KVSprayConnector", "kvspray_vllm")  # a second import does no harm
    assert KVConnectorFactory.get_connector_class_by_name("KVSprayConnector") is KVSprayConnector


def test_both_connectors_keep_graphs_and_cache_groups_as_they_are() -> None:
    """All CUDA graph modes, and the hybrid cache manager of models with sliding windows."""
    both = config(OURS, OFFLOADING)
    assert not MultiConnector.requires_piecewise_for_cudagraph(both.kv_connector_extra_config)
    assert MultiConnector.all_children_support_hma(both)


class Other:
    """A connector that finds a request's tokens, or none."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.took = tokens, -1
        self.sent: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return self.tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.took = external

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        out, self.sent = self.sent, set()
        return KVConnectorTransferResults(finished_sending=out)


def ours(e: Engine) -> Any:
    c = object.__new__(KVSprayConnector)
    c._scheduler, c._worker, c._bad_blocks = e.scheduler, e.worker, set()
    return c


@pytest.mark.parametrize("first", ["ours", "the other"])
def test_one_of_them_loads_and_the_other_is_informed(first: str) -> None:
    e, other = Engine(), Other(32)
    m = multi(ours(e), other) if first == "ours" else multi(other, ours(e))
    r = e.add("r", 40, prefill_first())
    assert m.get_num_new_matched_tokens(r, 0) == ((40 if first == "ours" else 32), True)
    blocks = SimpleNamespace(get_block_ids=lambda: (e.tables["r"],))
    m.update_state_after_alloc(r, blocks, 40 if first == "ours" else 32)
    meta = e.meta()
    if first == "ours":
        assert other.took == 0 and [x.req for x in meta.expects] == ["r"]
        assert e.scheduler_shim.declined == []
    else:
        assert other.took == 32 and not meta.expects
        assert e.scheduler_shim.declined[0][3] == "the engine takes none of it", (
            "P need not keep its blocks"
        )


def test_a_request_that_both_still_read_ends_once() -> None:
    e, other = Engine(), Other(0)
    m = multi(ours(e), other)
    e.add("p", 32, {"do_remote_decode": True, "do_remote_prefill": False})
    e.step({"p": 32})
    m._extra_async_saves["p"] = 1
    e.finish("p")
    e.run(e.meta(), forward=False)
    e.worker_shim.end(1, received=False)
    other.sent = {"p"}
    assert m.get_transfer_results(set()).finished_sending == {"p"}


def test_reports_of_workers_find_their_scheduler() -> None:
    e = Engine()
    m = multi(Other(0), ours(e))
    m._connectors[0].update_connector_output = lambda output: None
    landed = Landed(disabled="no GPU")
    output = SimpleNamespace(
        kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(metadata=(None, landed)),
        finished_sending=None,
        finished_recving=None,
    )
    m.update_connector_output(output)
    assert e.scheduler._disabled == "no GPU"


class Stepwise:
    """A connector whose hooks of layers need a step."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.step = False

    def bind_connector_metadata(self, meta: Any) -> None:
        self.step = True

    def clear_connector_metadata(self) -> None:
        self.step = False

    def wait_for_layer_load(self, layer: str) -> None:
        assert self.step

    def save_kv_layer(self, layer: str, *args: Any, **kwargs: Any) -> None:
        assert self.step
        self.saved.append(layer)

    def wait_for_save(self) -> None:
        assert self.step

    def handle_preemptions(self, meta: Any) -> None: ...


def test_layers_of_full_graphs_are_signalled_in_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiConnector answers for its connectors while a graph is captured, and has no step then."""
    capturing = [True]
    monkeypatch.setattr(signals, "_raw_stream", lambda torch: lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    client, other = FakeWorker(), Stepwise()
    c = object.__new__(KVSprayConnector)
    c._worker = WorkerSide(client, LOG, 0)  # type: ignore[arg-type]
    c._worker.set_flags({"a": 0}, GpuSignals(FakeFlags(client)))
    c._generation, c._connector_metadata, c._clears_blocks = None, None, False
    m = multi(other, c)
    monkeypatch.setattr(kv_transfer_utils, "get_kv_transfer_group", lambda: m)
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(attention, "get_attention_context", lambda name: ({}, None, None, None))
    layer = kv_transfer_utils.maybe_transfer_kv_layer(lambda layer_name: layer_name)
    in_captures(c, c)  # alone it answers for itself
    assert "has_connector_metadata" not in vars(c)

    in_captures(m, c)
    assert m.has_connector_metadata(), "of a capture"
    layer("a")
    assert client.take() == [("gpu layer", 0, 7)] and not other.saved
    capturing[0] = False
    assert not m.has_connector_metadata(), "a warm-up forward pass has no step and no graph"
    layer("a")
    assert not client.take()

    # A replay calls no hook, and other steps call those of all connectors.
    m.bind_connector_metadata(MultiKVConnectorMetadata(metadata=(None, gains(1, intent=True))))
    m.wait_for_save()
    assert [call[0] for call in client.take()] == ["intent", "gpu step", "step", "gpu end"]
    m.clear_connector_metadata()
    m.bind_connector_metadata(MultiKVConnectorMetadata(metadata=(None, gains(2))))
    layer("a")
    assert [call[0] for call in client.take()] == ["gpu step", "step", "gpu layer"]
    assert other.saved == ["a"]
    m.wait_for_save()
    m.clear_connector_metadata()
    client.take()

    m.handle_preemptions(MultiKVConnectorMetadata(metadata=(None, StepMeta(preempts=["p"]))))
    assert client.take() == [("preempt", 1)], "before anything of the step is computed"
