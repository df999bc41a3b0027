"""The name of an engine's weights: of its checkpoint, of a setting, or a new one, which no other
engine has, once they were replaced."""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.worker.worker_base import WorkerBase

from kvspray.weights import digest
from kvspray_vllm import weights
from kvspray_vllm.weights import Generation, name_of

LOG = logging.getLogger("test")


def config(
    model: object,
    load_format: str = "auto",
    revision: str | None = None,
    tp: int = 1,
    draft: object = None,
) -> Any:
    spec = (
        None
        if draft is None
        else SimpleNamespace(draft_model_config=SimpleNamespace(model=str(draft), revision=None))
    )
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        speculative_config=spec, model_config=SimpleNamespace(model=str(model), model_weights="",
        revision=revision), parallel_config=SimpleNamespace(tensor_parallel_size=tp,
        pipeline_parallel_size=1), device_config=SimpleNamespace(device_type="cpu"),
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return saved(tmp_path / "model", 0.5)


def saved(directory: pathlib.Path, value: float) -> pathlib.Path:
    directory.mkdir()
    save_file({"a": torch.full((8, 8), value)}, directory / "model.safetensors")
    return directory


def test_a_folder_is_called_by_its_content(
    model: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = name_of(config(model), LOG)
    assert name == digest(model) and name_of(config(model, tp=4), LOG) == name
    other = saved(tmp_path / "other", 0.25)
    assert name_of(config(other), LOG) != name == name_of(config(other), LOG, str(model))
    assert (
        name_of(config(model, draft=other), LOG) == f"{name}+{digest(other)}"
        and name_of(config(model, draft=model), LOG) == name
    )
    assert not caplog.records


def test_a_model_whose_files_are_not_here_is_called_by_its_name_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for model, revision, name in (
        ("org/none", None, "named:org/none@main"),
        ("org/none", "v2", "named:org/none@v2"),
        (str(tmp_path), None, f"named:{tmp_path}@main"),
    ):
        caplog.clear()
        got = name_of(config(model, revision=revision), LOG)
        assert len(got.encode()) <= weights.MAX_NAME_BYTES and (
            got == name or got.startswith("named:sha256:")
        )
        assert "set weights in kv_connector_extra_config" in caplog.text
    assert (
        name_of(config("s3://bucket/" + "x" * 300, draft="s3://bucket/" + "y" * 300), LOG).count(
            "named:sha256:"
        )
        == 2
    )


def test_random_weights_are_those_of_the_same_shapes(model: pathlib.Path) -> None:
    assert (
        name_of(config(model, "dummy"), LOG)
        == name_of(config("elsewhere", "dummy"), LOG)
        != name_of(config(model, "dummy", tp=2), LOG)
    )


# ---- replaced


class Model(torch.nn.Module):
    def load_weights(self, weights: Any) -> str:
        return f"loaded {weights}"


class Tuned(Model): ...


class Runner:
    def reload_weights(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        if weights_path == "fails":
            raise OSError("no such directory")
        reload(MODEL)


class Worker(WorkerBase):
    def __init__(self) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, info: Any) -> None: ...


def reload(model: torch.nn.Module) -> None:  # as vLLM's begins, and ends
    for device in ("meta", "cpu"):
        for name in ("weight", "bias"):
            model.register_parameter(name, torch.nn.Parameter(torch.empty(2, device=device)))


MODEL = torch.nn.Linear(2, 2)


class Watched:
    def __init__(self) -> None:
        self.changes: list[str] = []
        self.g = Generation(
            "step-1", lambda: self.changes.append(str(self.g)), lambda path: f"files of {path}"
        )
        self.g.watch(Tuned)

    def take(self) -> list[str]:
        out, self.changes = self.changes, []
        self.g.computes()
        return out


@pytest.fixture
def w(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for name, cls in (
        ("vllm.v1.worker.gpu_model_runner", ("GPUModelRunner", Runner)),
        ("vllm.v1.worker.gpu_worker", ("Worker", Worker)),
    ):
        module = ModuleType(name)
        setattr(module, *cls)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu.model_runner", raising=False)
    out = Watched()
    yield out
    out.g.close()
    reload(MODEL)
    Tuned().load_weights(1)
    Runner().reload_weights()
    assert out.changes == [] and "load_weights" not in Tuned.__dict__, "it still watches"


def made_up(name: str) -> bool:
    return name.startswith("replaced:") and len(name) == len("replaced:") + 32


def test_a_reload_has_a_name_of_its_own(w: Watched) -> None:
    torch.nn.Linear(2, 2)  # a module of other code is no reload
    assert w.take() == [] and str(w.g) == "step-1"
    reload(MODEL)
    reload(MODEL)  # nothing was computed between the two
    (first,) = w.take()
    assert made_up(first) and str(w.g) == first
    reload(MODEL)
    (second,) = w.take()
    assert made_up(second) and second != first
    w.g.rename("step-2")
    w.g.rename("step-2")
    assert w.take() == ["step-2"] == [str(w.g)]
    with pytest.raises(ValueError, match="at most 128 bytes"):
        w.g.rename("x" * 129)


def test_weights_that_are_loaded_in_place(w: Watched) -> None:
    assert Tuned().load_weights([1]) == "loaded [1]"
    Tuned().load_weights([2])  # in several parts
    (name,) = w.take()
    assert made_up(name)
    Tuned().load_weights([3])
    w.g.rename("step-2")
    Tuned().load_weights([4])  # named, and then others came after all
    one, two, three = w.take()
    assert made_up(one) and two == "step-2" and made_up(three) and len({name, one, three}) == 3
    Model().load_weights([5])  # another model's
    assert w.take() == []


def test_files_that_are_read_again_have_their_own_name(w: Watched) -> None:
    Runner().reload_weights(weights_path="/new")
    one, two = w.take()
    assert made_up(one) and two == "files of /new"
    Runner().reload_weights()
    one, two = w.take()
    assert made_up(one) and two == "files of None"
    Runner().reload_weights(iter([1]))
    (name,) = w.take()
    assert made_up(name), "what comes from an iterator has no files"
    with pytest.raises(OSError):
        Runner().reload_weights(weights_path="fails")
    (name,) = w.take()
    assert made_up(name), "some of them may be there"


def test_weight_transfers(w: Watched) -> None:
    worker = Worker()
    worker.start_weight_update()
    worker.update_weights({})
    (name,) = w.take()
    assert made_up(name)
    worker.update_weights({})
    (other,) = w.take()
    assert made_up(other) and other != name
