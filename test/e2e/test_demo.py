"""What the demonstration and its set-up do when they are not let through to their end; no engine
starts."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import cluster as rig
import env as setup
import pytest

DEMO = rig.ROOT / "test" / "rig" / "demo.py"

# The demonstration with a start that does not end, and a stop that waits for our word.
SLOW = f"""
import signal, sys
sys.path.insert(0, {str(DEMO.parent)!r})
import demo

class Slow(demo.Demo):
    def __init__(self): pass
    def start_sidecars(self, *_):
        print("starting", flush=True)
        signal.pause()
    def stop(self):
        print("half is stopped", flush=True)
        sys.stdin.readline()
        print("all is stopped", flush=True)

demo.Demo = Slow
demo.end_on_signals()
sys.exit(demo.main())
"""


def test_signals_while_everything_stops() -> None:
    for first in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as proc:
            assert proc.stdin is not None and proc.stdout is not None
            try:
                for line in proc.stdout:
                    if "starting" in line:
                        proc.send_signal(first)
                        proc.send_signal(first)
                    if "half is stopped" in line:
                        proc.send_signal(signal.SIGINT)
                        proc.send_signal(signal.SIGTERM)
                        proc.stdin.write("\n")
                        proc.stdin.flush()
                    if "all is stopped" in line:
                        break
                else:
                    raise AssertionError(f"{first.name}: it ended before everything was stopped")
                assert proc.wait(30) == 128 + first
            finally:
                proc.kill()


def test_a_wrong_transport_is_refused_first(tmp_path: pathlib.Path) -> None:
    env = {
        **os.environ,
        "TRANSPORT": "ucx",
        "TMPDIR": str(tmp_path),
        "KVSPRAY_BUILD": str(tmp_path / "build"),
    }
    got = subprocess.run(
        [sys.executable, str(DEMO)], env=env, capture_output=True, text=True, timeout=60
    )
    assert (got.returncode, got.stdout, got.stderr) == (2, "", "TRANSPORT=ucx: want tcp or shm\n")
    assert list(tmp_path.iterdir()) == []


def test_a_python_that_will_not_do_is_named(tmp_path: pathlib.Path) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    # Not those of a make that runs this.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    for target in ("env", "demo"):
        for python in (old, tmp_path / "none"):
            cmd = ["make", "-s", target, f"PYTHON={python}"]
            got = subprocess.run(
                cmd, cwd=rig.ROOT, env=env, capture_output=True, text=True, timeout=60
            )
            assert got.returncode != 0 and got.stdout == ""
            assert f"{python} is no Python of version 3.8 or newer" in got.stderr
            assert f"make {target} PYTHON=" in got.stderr


# What find_python asks pyenv for, by a user who may not look into PYENV_ROOT; root is another user
# for that.
UNREADABLE = f"""
import os, sys
sys.path.insert(0, {str(DEMO.parent)!r})
import env

if os.geteuid() == 0:
    os.seteuid(65534)
print(env.pyenv_pythons())
"""


def test_a_pyenv_that_may_not_be_read_has_no_pythons(tmp_path: pathlib.Path) -> None:
    (tmp_path / "versions" / "3.12.1" / "bin").mkdir(parents=True)
    (tmp_path / "versions" / "3.12.1" / "bin" / "python3").touch()
    command = [sys.executable, "-c", UNREADABLE]
    environ = dict(os.environ, PYENV_ROOT=str(tmp_path))
    tmp_path.chmod(0)
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    finally:
        tmp_path.chmod(0o700)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_uv_trusts_what_the_system_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_SYSTEM_CERTS", raising=False)
    assert setup.installer_env()["UV_SYSTEM_CERTS"] == "true"
    monkeypatch.setenv("UV_SYSTEM_CERTS", "false")
    assert setup.installer_env()["UV_SYSTEM_CERTS"] == "false"
