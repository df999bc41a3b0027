# SPDX-License-Identifier: Apache-2.0
"""Packages of engines from the configured index."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "rig"))

import env  # noqa: E402
from env import Failed  # noqa: E402

__all__ = ["BUILD", "PINS", "ROOT", "Failed", "newest", "unpacked", "uv"]

BUILD = ROOT / ".build"
PINS = {"vllm": env.VLLM, "sglang": env.SGLANG[0]}


def uv(*args: object, text: str = "") -> str:
    """Runs the uv of `make env`."""
    program = BUILD / "venv" / "bin" / "uv"
    if not program.exists():
        raise Failed(f"{program} is not there: run make env")
    done = subprocess.run(
        [str(program), *map(str, args)],
        input=text, text=True, capture_output=True, env=env.installer_env(),
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"uv {' '.join(map(str, args))}:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def newest(package: str) -> str:
    """The newest release that the index has."""
    found = uv("pip", "compile", "--no-deps", "--no-header", "--no-annotate", "-", text=package)
    return found.strip().partition("==")[2]


def unpacked(requirement: str) -> pathlib.Path:
    return env.unpacked(BUILD, BUILD / "venv" / "bin" / "python", requirement)
