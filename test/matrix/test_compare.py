# SPDX-License-Identifier: Apache-2.0
"""Two small releases of an engine, and a plug-in that uses it."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import uses  # noqa: E402
from compare import OURS, ROOT, Comparison, Page  # noqa: E402
from sources import Sources  # noqa: E402

PLUGIN = """
from typing import TYPE_CHECKING
from vllm.base import Base, Event
from vllm.util import join
if TYPE_CHECKING:
    from vllm.config import Config
try:
    from vllm.extra import extra
except ImportError:
    extra = None
HOOK = "vllm.base.Base.later"
class Ours(Base):
    def __init__(self, config: Config) -> None:
        self._config = config
    def load(self, job, blocks): ...
    def save(self, job): ...
    def use(self):
        join("a", "b", sep=",")
        Event(1, tokens=[2])
        return [layer.size for layer in self._config.model.layers], self._config.hidden.colour
"""
OLD = {
    "__init__": "",
    "config": """
from dataclasses import dataclass
class Layer:
    size: int
class Model:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
@dataclass
class Config:
    model: "Model | None"
    hidden: object
""",
    "base": """
from abc import ABC, abstractmethod
from dataclasses import dataclass
@dataclass
class Event:
    id: int
    tokens: list[int]
class Base(ABC):
    colour = 1
    @abstractmethod
    def load(self, job, blocks): ...
    def save(self, job): ...
    def later(self): ...
""",
    "util": "def join(*parts: str, sep: str = '') -> str: ...",
    "extra": "def extra(): ...",
}


def compare(dir: pathlib.Path, **new: str | None) -> Page:
    for name, files in (("old", OLD), ("new", OLD | new), ("ours", {"plugin": PLUGIN})):
        folder = dir / name if name == "ours" else dir / name / "vllm"
        folder.mkdir(parents=True)
        for module, text in files.items():
            if text is not None:
                (folder / f"{module}.py").write_text(text)
    comparison = Comparison(Sources(dir / "old"), Sources(dir / "new"))
    return comparison.run("vllm", [uses.read(dir, "ours")])


def test_nothing_changed(tmp_path: pathlib.Path) -> None:
    page = compare(tmp_path)
    assert not (page.broken or page.changed or page.added)
    assert page.names > 10


@pytest.mark.parametrize(
    ("module", "before", "after", "finding"),
    [
        ("base", "load(self, job, blocks)", "load(self, job, blocks, fast=False)",
         "vllm.base.Base.load: with fast (optional); our method lacks fast"),
        ("base", "load(self, job, blocks)", "load(self, job, chunks)",
         "vllm.base.Base.load: blocks is now chunks; our method lacks chunks"),
        ("base", "def save(self, job): ...", "", "vllm.base.Base.save is gone"),
        ("base", "def later(self): ...", "", "vllm.base.Base.later is gone"),
        ("base", "    def save", "    @abstractmethod\n    def close(self): ...\n    def save",
         "vllm.base.Base.close(): abstract and not ours"),
        ("base", "    id: int\n", "    id: int\n    rank: int\n",
         "vllm.base.Event: with rank; our call does not give rank"),
        ("util", "sep: str = ''", "by: str = ''",
         "vllm.util.join: sep is now by; our call gives sep"),
        ("config", "size: int", "bytes: int",
         "vllm.config.Config.model.layers.[].size is gone"),
        ("config", "model:", "models:", "vllm.config.Config.model is gone"),
        ("base", "colour", "color", "no colour is anywhere in vllm any more"),
    ],
)  # fmt: skip
def test_broken(tmp_path: pathlib.Path, module: str, before: str, after: str, finding: str) -> None:
    assert before in OLD[module]
    page = compare(tmp_path, **{module: OLD[module].replace(before, after)})
    assert list(page.broken) == [finding]


def test_a_function_that_moved_is_found(tmp_path: pathlib.Path) -> None:
    page = compare(tmp_path, util=None, text=OLD["util"])
    assert list(page.broken) == ["vllm.util.join is gone; vllm/text.py has one"]


def test_an_absence_that_our_source_handles_is_no_fault(tmp_path: pathlib.Path) -> None:
    page = compare(tmp_path, extra=None)
    assert not page.broken
    assert list(page.changed) == ["vllm.extra.extra is gone"]


def test_a_new_hook(tmp_path: pathlib.Path) -> None:
    page = compare(tmp_path, base=OLD["base"] + "    def sleep(self, level): ...\n")
    assert not page.broken
    assert list(page.added) == ["vllm.base.Base.sleep(level): a hook"]


def test_names_that_our_plugin_uses_have_types_in_vllm() -> None:
    """In real sources few names are left without a type, so few changes are missed."""
    installed = importlib.util.find_spec("vllm")
    assert installed and installed.origin, "run these tests with .build/venv, which has vllm"
    release = Sources(pathlib.Path(installed.origin).parents[1])
    page = Comparison(release, release).run("vllm", [uses.read(ROOT, p) for p in OURS])
    assert not (page.broken or page.changed or page.added)
    assert page.names > 250
