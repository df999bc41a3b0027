"""Each method of vLLM's that ours replaces takes what vLLM's takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvspray_vllm import KVSprayConnector, offload, sleep, stats

PAIRS = [
    (KVSprayConnector, KVConnectorBase_V1),
    (sleep.Allocator, CuMemAllocator),
    (offload.Worker, OffloadingWorker),
    (offload.KVSprayOffloadingSpec, CPUOffloadingSpec),
    (stats.KVSprayPromMetrics, KVConnectorPromMetrics),
]


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [
        (ours, theirs, name)
        for ours, theirs in PAIRS
        for name, value in vars(ours).items()
        if callable(getattr(value, "__func__", value))
        and name != "__init__"
        and not isinstance(value, type)
        and hasattr(theirs, name)
    ],
)
def test_what_vllm_passes_is_taken(ours: Any, theirs: Any, name: str) -> None:
    base, own = (inspect.signature(getattr(cls, name)) for cls in (theirs, ours))
    kinds = inspect.Parameter
    args = [
        p
        for p in base.parameters.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    keywords = {p.name for p in base.parameters.values() if p.kind is kinds.KEYWORD_ONLY}
    required = [p for p in args if p.default is kinds.empty]
    own.bind(*required, **{k: None for k in keywords})
    own.bind(*args, **{k: None for k in keywords})
    if not isinstance(inspect.getattr_static(ours, name), staticmethod):
        # By name, too, as vLLM may pass what is not self.
        own.bind(*args[:1], **{p.name: None for p in args[1:]})
