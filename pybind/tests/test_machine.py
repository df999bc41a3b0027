"""What benchmark results have of where they come from."""

import os
import pathlib
import subprocess

import pytest

from kvspray.machine import machine


def sidecar(directory: pathlib.Path, script: str) -> pathlib.Path:
    path = directory / "kvspray"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_nothing_is_missing(tmp_path: pathlib.Path) -> None:
    m = machine(
        sidecar(
            tmp_path,
            """[ "$*" = "version --json" ] && echo '{"go":"go1.26","version":"abc-dirty"}'""",
        )
    )
    assert m["version"] == "abc-dirty" and m["cores"] == os.cpu_count() and m["load_average"] >= 0
    assert all(m[key] for key in ("processor", "kernel", "python"))
    assert machine(None)["version"] is None


def test_a_binary_that_has_no_version(tmp_path: pathlib.Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        machine(sidecar(tmp_path, "exit 3"))
