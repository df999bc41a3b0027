"""Hosts on which the memory of a GPU cannot be lent: one line in the engine's log with what is
wrong and what to do, and an engine that prefills locally if its policy is to recompute."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeWorker

import kvspray
from kvspray_vllm import caches, connector, layout, shim
from kvspray_vllm.worker import WorkerSide

# (what fails, what the shim reports, what the line has of it)
REASONS = [
    (
        "memory",
        "this is no memory of a GPU: CUDA_ERROR_INVALID_VALUE (1); pass data_ptr() of a tensor on "
        "a GPU",
        "data_ptr()",
    ),
    (
        "memory",
        "the allocation cannot be exported as a descriptor: CUDA_ERROR_INVALID_VALUE (1); allocate "
        "it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; with torch, unset expandable_segments",
        "unset expandable_segments",
    ),
    (
        "memory",
        "libcuda.so.1 cannot be opened; install the NVIDIA driver",
        "install the NVIDIA driver",
    ),
    ("flags", "no signals by the GPU: no CUDA context in this thread", "no CUDA context"),
]


class Client(FakeWorker):
    """A shim whose host lacks something."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__()
        self.what, self.why = what, why
        self.registered = False
        self.lent = 0  # and not closed

    def _fails(self, what: str) -> None:
        if what == self.what:
            raise shim.ShimError(self.why)

    def gpu_memory(self, addr: int, nbytes: int) -> Any:
        self._fails("memory")
        self.lent += 1
        region: Any = SimpleNamespace(
            addr=addr, kind=kvspray.RegionKind.DEVICE, close=self._take_back
        )
        return shim.Memory(region, None)

    def _take_back(self) -> None:
        self.lent -= 1

    def gpu_flags(self, log: Any) -> Any:
        self._fails("flags")
        return SimpleNamespace(ok=True, close=lambda: None)

    def register(self, regions: Any, layout: Any) -> None:
        self.registered = True


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Any:
    # Whether vLLM's loggers propagate depends on what was imported before.
    connector.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    yield caplog
    connector.logger.removeHandler(caplog.handler)


def warnings(log: Any) -> list[str]:
    """Ours, each once."""
    ours = [r for r in log.records if r.name == connector.logger.name]
    records = {id(r): r for r in ours if r.levelno >= logging.WARNING}
    return [r.getMessage() for r in records.values()]


def engine(monkeypatch: pytest.MonkeyPatch, client: Client, policy: str) -> Any:
    """A worker's connector with a cache on a GPU that this host does not have."""
    nothing = SimpleNamespace(watch=lambda *a: None, close=lambda: None)
    storage = caches.Storage(1 << 20, 4096, torch.device("cuda", 0))
    described = caches.Description([], (storage,))
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *a: {})
    monkeypatch.setattr("vllm.model_executor.model_loader.utils.get_model_cls", lambda *a: object)
    monkeypatch.setattr(connector, "name_of", lambda *a: "w")
    monkeypatch.setattr(connector, "Generation", lambda *a: nothing)
    monkeypatch.setattr(connector, "LoadWatch", lambda *a: nothing)
    monkeypatch.setattr(connector, "GpuSignals", lambda flags: flags)
    monkeypatch.setattr(connector, "kv_heads_of", lambda *a: (1,))
    monkeypatch.setattr(connector.states, "groups_of", lambda *a: 0)
    monkeypatch.setattr(
        connector.layout, "identity_of", lambda *a: {"packing": "", "dtype": "bfloat16"}
    )
    monkeypatch.setattr(connector.caches, "describe", lambda *a, **k: described)
    c = object.__new__(connector.KVSprayConnector)
    model = SimpleNamespace(model="m", served_model_name="m", enable_sleep_mode=False)
    c._vllm_config = SimpleNamespace(model_config=model)
    c._kv_transfer_config = SimpleNamespace(kv_load_failure_policy=policy)
    c._kv_cache_config, c._settings = (
        SimpleNamespace(),
        SimpleNamespace(weights="", memory="auto", identity=""),
    )
    c._flag_of, c._ranks, c.region = {}, layout.Ranks(), None
    c._worker_client = client
    c._worker = WorkerSide(client, connector.logger)  # type: ignore[arg-type]
    return c


@pytest.mark.parametrize(("what", "why", "remedy"), REASONS)
def test_memory_that_cannot_be_lent(
    monkeypatch: pytest.MonkeyPatch, log: Any, what: str, why: str, remedy: str
) -> None:
    client = Client(what, why)
    c = engine(monkeypatch, client, "recompute")
    c.register_kv_caches({})
    assert not client.registered and client.lent == 0
    lines = warnings(log)
    assert (
        len(lines) == 1
        and "prefills locally" in lines[0]
        and remedy in lines[0]
        and "\n" not in lines[0]
    )
    landed = c._worker.take_landed()
    assert landed is not None and landed.disabled == why, (
        "the scheduler's side asks for no transfer"
    )


@pytest.mark.parametrize(("what", "why", "remedy"), REASONS[:2])
def test_an_engine_that_may_not_recompute_does_not_start(
    monkeypatch: pytest.MonkeyPatch, what: str, why: str, remedy: str
) -> None:
    with pytest.raises(shim.ShimError, match=remedy.replace("(", r"\(").replace(")", r"\)")):
        engine(monkeypatch, Client(what, why), "fail").register_kv_caches({})


def test_memory_that_can_be_lent_is_registered(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    client = Client("", "")
    c = engine(monkeypatch, client, "recompute")
    group = SimpleNamespace(
        has_connector_metadata=lambda: False, wait_for_layer_load=None, save_kv_layer=None
    )
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: group)
    c.register_kv_caches({})
    assert client.registered and client.lent == 1 and c._worker.take_landed() is None
    assert not warnings(log)
    c._connector_metadata = None
    monkeypatch.setattr(c._worker, "capturing", lambda: True)
    assert group.has_connector_metadata(), "layers of graphs are signalled under a MultiConnector"
