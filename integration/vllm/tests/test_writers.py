"""Every method of vLLM that writes parameters ends the name of the weights. The sources of the
installed vLLM have no other."""

from __future__ import annotations

import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "test" / "rig"))

import writers

from kvspray_vllm import load
from kvspray_vllm.weights import WORKER_WRITERS, Generation

ROOT = pathlib.Path(vllm.__file__).parent
# Code of models and layers runs when a checkpoint is loaded, or computes.
LOOKED_AT = (
    "v1",
    "distributed",
    "device_allocator",
    "entrypoints",
    "lora",
    "utils",
    "model_executor/model_loader",
)

# Functions that write parameters in place, and the method of WORKER_WRITERS, or the reason, that
# makes each one harmless.
KNOWN = {
    "batch_transfer_weights": "elastic_ep_execute",
    "reload_weights": "reload_weights",
    "_copy_and_restore_kernel_tensors": "reload_weights, update_weights",
    "default_weight_loader": "Model.load_weights",
    "composed_weight_loader": "Model.load_weights",
    "composed_loader": "Model.load_weights",
    "ShardedStateLoader.load_weights": "load_model",
    "IpcModelLoader.load_weights": "load_model",
    "device_loading_context": "moves them to another device",
    "zero_weights": "reset_weights",
    "Worker.wake_up": "buffers come back as they were",
}
# Methods of workers that are about weights and write none.
READS = {
    "supports_draft_weight_updates", "compute_weight_checksums", "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine", "_weight_checksum_prefix",
    "_set_draft_weight_update_target", "_check_weight_transfer_engine", "_start_weight_update",
}  # fmt: skip


def test_no_other_function_writes_parameters() -> None:
    found = writers.find(ROOT, LOOKED_AT)
    assert "zero_weights" in found, "the search finds nothing"
    unknown = {f"{name} in {path}" for name, path in found.items() if name not in KNOWN}
    assert not unknown, (
        "a method of the worker that calls them belongs into WORKER_WRITERS, and they into KNOWN"
    )


@pytest.mark.parametrize("worker", [Worker, CPUWorker])
def test_no_other_method_of_a_worker_is_about_weights(worker: type) -> None:
    about = {name for name in dir(worker) if "weight" in name or name == "load_model"}
    assert about <= {*WORKER_WRITERS, *READS}
    assert set(WORKER_WRITERS) <= set(dir(Worker)), (
        "this vLLM has other methods, and others may write parameters"
    )


def test_weights_that_are_set_to_zero_have_no_name() -> None:
    """POST /weight_checker {"action": "reset"}."""
    model = torch.nn.Linear(2, 2)
    changed: list[str] = []
    g = Generation("digest", lambda: changed.append(str(g)))
    g.watch(type(model))
    try:
        worker: Any = object.__new__(CPUWorker)
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        worker.reset_weights()
    finally:
        g.close()
    assert not any(p.any() for p in model.parameters())
    assert changed == [str(g)] and str(g).startswith("replaced:")
    assert (
        "_kvspray" not in vars(Worker)
        and Worker.reset_weights.__qualname__ == "Worker.reset_weights"
    )
    worker.reset_weights()
    assert len(changed) == 1, "it is watched no more"


@pytest.mark.parametrize("cls, device", [(Worker, "cuda"), (CPUWorker, "cpu")])
def test_a_sleep_that_discards_the_weights(
    cls: type, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no weights are loaded after a wake-up, vLLM computes with any content of the memory."""
    slept: list[tuple[int, str]] = []
    monkeypatch.setattr(cls, "sleep", lambda self, level=1: slept.append((level, str(g))))
    g = Generation("digest", lambda: None)
    g.watch(torch.nn.Linear)
    worker: Any = object.__new__(cls)
    worker.device = torch.device(device)
    try:
        worker.sleep(level=1)
        assert str(g) == "digest"
        worker.sleep(level=2)
    finally:
        g.close()
    # The connector has taken its memory back before other weights are announced.
    assert slept == [(1, "digest"), (2, "digest")]
    assert str(g).startswith("replaced:") == (device == "cuda")


@pytest.mark.parametrize("name", WORKER_WRITERS)
def test_each_is_watched_and_refused_while_others_are_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(Worker, name, lambda self: called.append(name))
    changed: list[str] = []
    g = Generation("digest", lambda: changed.append(str(g)))
    g.watch(torch.nn.Linear)
    worker: Any = object.__new__(CPUWorker)
    worker.rank, worker.parallel_config = 0, SimpleNamespace(world_size=1)
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    try:
        getattr(worker, name)()
    finally:
        g.close()
    assert called == [name] and len(changed) == 1
    guard = load.Guard(worker, "token", None)
    guard.install()
    try:
        guard.whole = False
        with pytest.raises(RuntimeError, match=f"{name} is refused"):
            getattr(worker, name)()
    finally:
        guard.remove()
    assert called == [name]


def test_the_cache_gets_another_name_after_the_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the sleep fails. At the sleep the connector takes its memory back; it has to present
    another name for its cache after that, and not before."""
    calls: list[str] = []
    fails = False

    def sleep(self: object, level: int = 1) -> None:
        calls.append(f"sleep {level}")
        if fails:
            raise RuntimeError("no memory")

    connector = SimpleNamespace(weights_replaced=lambda: calls.append("renamed") or "digest")
    monkeypatch.setattr(load, "holder", lambda: connector)
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    worker: Any = object.__new__(CPUWorker)
    worker.rank, worker.parallel_config = 0, SimpleNamespace(world_size=1)
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    guard = load.Guard(worker, "token", None)
    guard.install()
    try:
        calls.clear()
        worker.sleep(level=2)
        assert calls == ["sleep 2", "renamed"] and not guard.whole
        calls.clear()
        fails = True
        with pytest.raises(RuntimeError, match="no memory"):
            worker.sleep(level=1)
        assert calls == ["sleep 1", "renamed"]
    finally:
        guard.remove()
