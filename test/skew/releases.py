# SPDX-License-Identifier: Apache-2.0
"""Builds the last release of releases.txt, for tests that run it beside this tree."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

from cluster import BINARY, ROOT  # noqa: E402

LIST = HERE / "releases.txt"
BUILD = ROOT / ".build" / "skew"
PYTHON = ("pybind/python/kvspray", "integration/vllm/src/kvspray_vllm")
LINKED = "github.com/kvspray/kvspray/internal/version.version"
CFLAGS = (
    "-std=c11 -O2 -fPIC -shared -fvisibility=hidden -D_GNU_SOURCE -pthread"  # as in pybind/setup.py
)


class Missing(Exception):
    """Something that the build needs is not on this machine; the text names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class Version:
    """The programs of one version."""

    name: str
    binary: pathlib.Path
    packages: pathlib.Path | None  # with the Python packages; None: those of this interpreter

    def env(self) -> dict[str, str]:
        """What a Python program needs to find the packages."""
        found = [str(self.packages or ""), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(p for p in found if p)}


def tree() -> Version:
    return Version("tree", BINARY, None)


def last() -> tuple[str, str]:
    """Version and commit of the last release."""
    lines = [x for x in LIST.read_text().splitlines() if x.strip() and not x.startswith("#")]
    if not lines:
        raise Missing(f"{LIST.relative_to(ROOT)} names no release: add it once it has a tag")
    fields = lines[-1].split()
    if len(fields) != 2 or not re.fullmatch(r"[0-9a-f]{40}", fields[1]):
        raise ValueError(f"{LIST}: the last line is not VERSION COMMIT: {lines[-1]!r}")
    return fields[0], fields[1]


def release() -> Version:
    """The last release, built once for each commit."""
    name, commit = last()
    folder = BUILD / name
    out = Version(name, folder / "kvspray", folder / "python")
    stamp = folder / "commit"
    if stamp.exists() and stamp.read_text() == commit:
        return out
    source = BUILD / f"{name}.source"
    for old in (folder, source):
        shutil.rmtree(old, ignore_errors=True)
    _extract(name, commit, source)
    folder.mkdir(parents=True)
    _build(name, source, folder)
    shutil.rmtree(source)
    stamp.write_text(commit)
    return out


def _extract(name: str, commit: str, target: pathlib.Path) -> None:
    for tool in ("git", "go", "gcc"):
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not on the PATH: install it")
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
    if found.returncode:
        raise Missing(
            f"this checkout lacks the commit {commit} of release {name}: run git fetch --unshallow"
        )
    archive = subprocess.run([*git, "archive", commit], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")


def _build(name: str, source: pathlib.Path, folder: pathlib.Path) -> None:
    # With -trimpath the compiler's cache has each package that did not change since.
    link = f"-X {LINKED}={name}"
    target = ["-o", str(folder / "kvspray"), "./cmd/kvspray"]
    subprocess.run(["go", "build", "-trimpath", "-ldflags", link, *target], cwd=source, check=True)
    for package in PYTHON:
        at = folder / "python" / pathlib.Path(package).name
        shutil.copytree(source / package, at)
        init = at / "__init__.py"
        text = re.sub(r"(?m)^__version__ = .*$", f'__version__ = "{name}"', init.read_text())
        init.write_text(text)
    library = folder / "python" / "kvspray" / "libkvspray.so"
    shim = source / "pybind"
    sources = sorted(map(str, (shim / "src").glob("*.c")))
    command = [
        "gcc",
        *CFLAGS.split(),
        f"-I{shim / 'include'}",
        "-o",
        str(library),
        *sources,
        "-ldl",
    ]
    subprocess.run(command, check=True)
