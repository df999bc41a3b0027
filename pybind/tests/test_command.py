"""The command kvspray of the package, and the versions of its wheels."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ENGINE, TIMEOUT_S, Serve, skip

import kvspray

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the package, without the binary of a wheel."""
    copy = tmp_path / "kvspray"
    shutil.copytree(
        pathlib.Path(kvspray.__file__).parent,
        copy,
        ignore=shutil.ignore_patterns("_bin", "__pycache__"),
    )
    return copy


def run(package: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    env.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        [sys.executable, "-m", "kvspray", *args],
        capture_output=True,
        text=True,
        env=env,
        cwd=package.parent,
    )


def test_the_process_becomes_the_binary(package: pathlib.Path) -> None:
    binary = package / "_bin" / "kvspray"
    binary.parent.mkdir()
    binary.write_text('#!/bin/sh\necho "$VIRTUAL_ENV|$@"\nkill -TERM $$\n')
    binary.chmod(0o755)
    done = run(package, "serve", "--http", "a b")
    environment = sys.prefix if sys.prefix != sys.base_prefix else ""
    assert done.stdout == f"{environment}|serve --http a b\n"
    assert done.returncode == -15, "a signal's status is the binary's"


def test_a_build_without_the_binary_names_the_remedy(package: pathlib.Path) -> None:
    done = run(package, "serve")
    assert done.returncode == 1 and "make wheels" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("library", ["none", "foreign", "garbage"])
def test_a_library_that_does_not_fit_names_the_remedy(
    package: pathlib.Path, tmp_path: pathlib.Path, library: str
) -> None:
    path = package / "libkvspray.so"
    path.unlink(missing_ok=True)
    if library == "foreign":
        (tmp_path / "other.c").write_text("int kvs_strerror(void) { return 0; }")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "other.c")], check=True
        )
    elif library == "garbage":
        path.write_text("not a library")
    done = subprocess.run(
        [sys.executable, "-c", "import kvspray"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "KVSPRAY_LIBRARY"},
        cwd=package.parent,
    )
    last = done.stderr.strip().splitlines()[-1]
    problem = "another version" if library == "foreign" else "cannot be loaded"
    assert last.startswith("ImportError: kvspray: the library ") and str(path) in last
    assert problem in last and "install the wheel kvspray" in last


def test_versions_of_packages_follow_git_describe() -> None:
    dist = runpy.run_path(str(ROOT / "deploy" / "dist.py"))
    for described, python, package in (
        ("v1.2.3", "1.2.3", "1.2.3"),
        ("v1.2.3-4-gabcdef0", "1.2.4.dev4+gabcdef0", "1.2.4~dev4+gabcdef0"),
        ("v1.2.0-rc1", "1.2.0rc1", "1.2.0~rc1"),
        (
            "v1.2.0-rc.1-2-gabcdef0-dirty",
            "1.2.0rc2.dev2+gabcdef0.dirty",
            "1.2.0~rc2.dev2+gabcdef0.dirty",
        ),
        ("v1.2.3-dirty", "1.2.3+dirty", "1.2.3+dirty"),
        ("abcdef0-dirty", "0.0.0.dev0+gabcdef0.dirty", "0.0.0~dev0+gabcdef0.dirty"),
    ):
        assert (dist["python_version"](described), dist["package_version"](described)) == (
            python,
            package,
        )
    for wrong in ("1.2.3", "v1.2", "devel", ""):
        with pytest.raises(dist["Failed"], match="neither a tag"):
            dist["python_version"](wrong)


def test_only_the_tag_and_the_changelog_have_the_version() -> None:
    (version,) = re.findall(r"^## (\d+\.\d+\.\d+),", (ROOT / "CHANGELOG.md").read_text(), re.M)[:1]
    # The second one names past releases; modules of others may have the same version.
    others = (":!CHANGELOG.md", ":!test/skew/releases.txt", ":!*go.mod", ":!*go.sum")
    found = subprocess.run(
        ["git", "grep", "-nwF", version, "--", ".", *others],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "" and found.returncode == 1, found.stderr


def test_a_charts_version_is_a_tag_of_a_registry() -> None:
    dist = runpy.run_path(str(ROOT / "deploy" / "dist.py"))
    for described, chart in (
        ("v1.2.3", "1.2.3"),
        ("v1.2.3-4-gabcdef0", "1.2.3-4-gabcdef0"),
        ("abcdef0", "0.0.0-gabcdef0"),
    ):
        assert dist["chart_version"](described) == chart


def test_all_packages_of_a_release_have_its_version(tmp_path: pathlib.Path) -> None:
    """An extra of kvspray wants the same version of a plug-in."""
    dist = runpy.run_path(str(ROOT / "deploy" / "dist.py"))["Dist"]
    dist.source.__globals__["WORK"] = tmp_path
    made = dist("v1.2.3", tmp_path)
    plugins = [
        f"integration/{p.parent.name}" for p in (ROOT / "integration").glob("*/pyproject.toml")
    ]
    assert len(plugins) == 2
    extras = (made.source("pybind") / "pyproject.toml").read_text()
    for part in plugins:
        copy = made.source(part)
        project = (copy / "pyproject.toml").read_text()
        (name,) = re.findall(r'^name = "(.*)"$', project, re.M)
        module = name.replace("-", "_")
        assert f'"{name}==1.2.3"' in extras and '"kvspray==1.2.3"' in project
        assert (
            f'\nversion = {{ attr = "{module}.__version__" }}\n' in project
            and '\nversion = "' not in project
        )
        assert '\n__version__ = "1.2.3"\n' in (copy / "src" / module / "__init__.py").read_text()


def test_a_refusal_by_user_reaches_the_engine_s_log(serve: Serve) -> None:
    """The sidecar sends its reason and closes the socket, perhaps before it has received HELLO."""
    if os.geteuid() != 0:
        skip("root", "only root has processes of two users")
    _, socket = serve("a")
    socket.chmod(0o777)
    socket.parent.chmod(0o711)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.chdir(socket.parent)  # those above are root's
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with kvspray.SchedulerClient(
            socket.name, engine=ENGINE, log=lambda _, text: os.write(write, text.encode() + b"\n")
        ):
            time.sleep(TIMEOUT_S)
        os._exit(1)
    os.close(write)
    try:
        with open(read) as lines:
            first = lines.readline()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert "uid 65534 may not connect" in first and "engine.allowed_uids" in first
