# SPDX-License-Identifier: Apache-2.0
"""`kvspray load`: other weights for an engine that sleeps. Its tokens are then those of an engine that was started with them, and what fails serves nothing."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import MODEL, Cluster
from engines import Engine
from prompts import fresh
from test_tokens import Moved

PIECE = 64 << 10  # the model's largest tensors take several
PROMPT = fresh(200, "load")

MAKE = """
import pathlib, sys, torch
from safetensors.torch import load_file, save_file
gen = torch.Generator().manual_seed(11)
(file,) = pathlib.Path(sys.argv[1]).glob("*.safetensors")
tensors = {k: t[torch.randperm(len(t), generator=gen)] if t.dim() > 1 else t for k, t in load_file(file).items()}
how, names = sys.argv[2], sorted(tensors)
name = names[len(names) // 2]
if how == "shape":
    tensors[name] = tensors[name][:-1].contiguous()
elif how == "dtype":
    tensors[name] = tensors[name].float()
elif how == "missing":
    del tensors[name]
elif how == "more":
    tensors["other.weight"] = tensors[name].clone()
save_file(tensors, file, metadata={"format": "pt"})
print(name)
"""


def made(workdir: pathlib.Path, how: str) -> tuple[pathlib.Path, str]:
    dir = workdir / how
    shutil.copytree(MODEL, dir)
    run = subprocess.run([sys.executable, "-c", MAKE, str(dir), how], check=True, capture_output=True, text=True)
    return dir, run.stdout.strip()


def request(source: str | pathlib.Path, **more: Any) -> str:
    return json.dumps({"source": str(source), "piece_bytes": PIECE, **more})


def load(e: Engine, asked: str) -> dict[str, Any]:
    """What the command does, until the load has ended: the last answer."""
    (said,) = e.rpc("kvspray_load_check", asked)
    if "error" in said:
        return said
    e.sleep(1)
    e.wake_up(["weights"])
    (begun,) = e.rpc("kvspray_load_begin", asked, said["digest"])
    if "error" in begun:
        return begun
    while True:
        (said,) = e.rpc("kvspray_load_poll", "0.2")
        if said["state"] != "loading":
            return said


def loaded(e: Engine, asked: str) -> dict[str, Any]:
    said = load(e, asked)
    assert said["state"] == "loaded", said
    with pytest.raises(RuntimeError, match="not confirmed"):
        e.wake_up()
    (done,) = e.rpc("kvspray_load_finish")
    assert e.wake_up()
    return done


def never_serves(e: Engine, why: str) -> None:
    pending = e.add(PROMPT, 4)
    with pytest.raises(RuntimeError, match=why):
        e.wake_up()
    with pytest.raises(RuntimeError, match=why):
        e.rpc("execute_model", None)
    pending.abort()


@pytest.fixture(scope="module")
def b(workdir: pathlib.Path) -> pathlib.Path:
    return made(workdir, "same")[0]


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path, b: pathlib.Path) -> Iterator[Cluster]:
    """P and D have A, and R has B from its start."""
    out = Cluster(workdir, {"transports": {"order": ["shm"]}, "transfer": {"partner": "2s"}})
    try:
        out.spawn("P")
        out.spawn("D")
        out.spawn("R", model=b)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


@pytest.mark.parametrize("copies", ["none", "sidecar"])
def test_tokens_are_those_of_an_engine_that_was_started_with_them(c: Cluster, b: pathlib.Path, copies: str) -> None:
    old = c.p.run(PROMPT, 12).tokens
    new = c.r.run(PROMPT, 12).tokens
    assert old != new, "the other weights say the same: nothing would be shown"
    for e in (c.p, c.d):
        done = loaded(e, request(b, copies=copies, socket=c.sp.socket))
        assert (done["by_sidecar"] > 20) == (copies == "sidecar"), done
    from kvspray.weights import digest

    assert done["weights"] == digest(b)
    c.connected()
    for e in (c.p, c.d):
        assert e.run(PROMPT, 12).tokens == new
    prompt = fresh(300, copies)
    with Moved(c) as moved:
        assert c.both(prompt).tokens == c.r.run(prompt, 12).tokens
    moved.all_loaded(1)
    c.settle()
    for e in (c.p, c.d):
        loaded(e, request(MODEL))
    c.connected()
    assert c.p.run(PROMPT, 12).tokens == old


@pytest.mark.parametrize("how", ["shape", "dtype", "missing", "more"])
def test_another_shape_is_refused_before_a_byte_changes(c: Cluster, workdir: pathlib.Path, how: str) -> None:
    old = c.d.run(PROMPT, 12).tokens
    dir, name = made(workdir, how)
    (said,) = c.d.rpc("kvspray_load_check", request(dir))
    assert "error" in said and (name if how != "more" else "other.weight") in said["error"], said
    # Also for whoever asks without the check.
    (said,) = c.d.rpc("kvspray_load_begin", request(dir), "checkpoint:x")
    assert "error" in said, said
    assert c.d.run(PROMPT, 12).tokens == old
    c.d.clear_prefix_cache()


def test_damaged_folders_are_refused(c: Cluster, workdir: pathlib.Path) -> None:
    dir = workdir / "cut"
    shutil.copytree(MODEL, dir)
    file = dir / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    for source, why in ((dir, "cut"), (workdir / "nowhere", "not a folder"), ("relative", "absolute path"), ("ftp://x", "absolute path")):
        (said,) = c.d.rpc("kvspray_load_check", request(source))
        assert why in said["error"], said


def slowly(_worker: Any, seconds: float) -> None:
    """Each piece takes so much longer, as those of a larger model do. 0: as before."""
    from kvspray_vllm import load as module

    inner = getattr(module, "_sample_inner", module._sample)

    def sample(*args: Any) -> None:
        time.sleep(seconds)
        inner(*args)

    module._sample_inner, module._sample = inner, sample if seconds else inner


@pytest.fixture
def slow(c: Cluster) -> Iterator[None]:
    c.d.rpc(slowly, 0.003)
    yield
    c.d.rpc(slowly, 0.0)


def test_a_file_that_changes_meanwhile(c: Cluster, slow: None, b: pathlib.Path, workdir: pathlib.Path) -> None:
    for what in ("written", "cut"):
        dir = workdir / f"to-be-{what}"
        shutil.copytree(b, dir)
        asked = request(dir, piece_bytes=8192)
        file = dir / "model.safetensors"
        (said,) = c.d.rpc("kvspray_load_check", asked)
        c.d.sleep(1)
        c.d.wake_up(["weights"])
        (begun,) = c.d.rpc("kvspray_load_begin", asked, said["digest"])
        assert "error" not in begun
        if what == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            with open(file, "r+b") as f:
                f.seek(-2, os.SEEK_END)
                f.write(b"xx")
        while (said := c.d.rpc("kvspray_load_poll", "0.2")[0])["state"] == "loading":
            pass
        assert said["state"] == "failed", said
        never_serves(c.d, "changed|shorter|ends behind")
    # A load that succeeds makes it whole.
    loaded(c.d, request(b))
    assert c.d.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
    loaded(c.d, request(MODEL))


def test_a_load_that_is_stopped(c: Cluster, slow: None, b: pathlib.Path) -> None:
    asked = request(b, piece_bytes=4096)
    (said,) = c.d.rpc("kvspray_load_check", asked)
    c.d.sleep(1)
    c.d.wake_up(["weights"])
    c.d.rpc("kvspray_load_begin", asked, said["digest"])
    (said,) = c.d.rpc("kvspray_load_cancel", "no more")
    assert said["state"] == "failed" and "no more" in said["error"]
    never_serves(c.d, "no more")
    # Or another begins in the middle of one.
    (said,) = c.d.rpc("kvspray_load_check", asked)
    c.d.rpc("kvspray_load_begin", asked, said["digest"])
    loaded(c.d, request(MODEL))
    assert c.d.run(PROMPT, 12).tokens == c.p.run(PROMPT, 12).tokens


def test_the_sidecar_dies_in_the_middle(c: Cluster, slow: None, b: pathlib.Path) -> None:
    """Copies that it did not make are made without it."""
    new = c.r.run(PROMPT, 12).tokens
    cut = 0
    for i in range(6):
        asked = request(b, copies="sidecar", socket=c.sd.socket, piece_bytes=8192)
        (said,) = c.d.rpc("kvspray_load_check", asked)
        c.d.sleep(1)
        c.d.wake_up(["weights"])
        c.d.rpc("kvspray_load_begin", asked, said["digest"])
        rig.wait_for("copies", lambda: c.d.rpc("kvspray_load_poll", "0")[0]["by_sidecar"] > 5 * i, 20, tick=0.001)
        c.sd.kill()
        while (said := c.d.rpc("kvspray_load_poll", "0.5")[0])["state"] == "loading":
            pass
        assert said["state"] == "loaded", said
        cut += 0 < said["by_sidecar"] < 200
        c.d.rpc("kvspray_load_finish")
        c.d.wake_up()
        assert c.d.run(PROMPT, 12).tokens == new
        c.d.clear_prefix_cache()
        c.sd.start()
        c.connected()
    assert cut > 2, "the sidecar never died in the middle: nothing was shown"
    loaded(c.d, request(MODEL))


def test_the_prefix_cache_is_emptied(c: Cluster, b: pathlib.Path) -> None:
    c.p.run(PROMPT, 4)
    loaded(c.p, request(b))
    assert c.p.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
    loaded(c.p, request(MODEL))
