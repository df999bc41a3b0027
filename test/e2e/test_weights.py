# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced while engines live: KV of the old ones is never taken for KV of the new ones."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import MODEL, Cluster
from engines import Out
from prompts import fresh
from test_tokens import Moved


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    out = Cluster(workdir, {"transports": {"order": ["shm"]}, "transfer": {"partner": "2s"}})
    try:
        for name in "PDR":
            out.spawn(name)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


SHUFFLE = """
import pathlib, sys, torch
from safetensors.torch import load_file, save_file
gen = torch.Generator().manual_seed(7)
for f in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    tensors = load_file(f)
    save_file({k: t[torch.randperm(len(t), generator=gen)] if t.dim() > 1 else t for k, t in tensors.items()}, f, metadata={"format": "pt"})
"""


@pytest.fixture(scope="module")
def others(workdir: pathlib.Path) -> pathlib.Path:
    """The same model with other weights, made in a process of its own: see pytest_collection_modifyitems."""
    dir = workdir / "others"
    shutil.copytree(MODEL, dir)
    subprocess.run([sys.executable, "-c", SHUFFLE, str(dir)], check=True)
    return dir


def exchanged(c: Cluster, prompt: list[int]) -> Out:
    with Moved(c) as moved:
        got = c.both(prompt)
    moved.all_loaded(1)
    c.settle()
    return got


def kept_apart(c: Cluster, prompt: list[int]) -> Out:
    """D got nothing, whether P was asked first or at the same time."""
    outs = []
    for run in (c.prefill_first, c.both):
        with Moved(c) as moved:
            outs.append(run(prompt))
        assert (moved.ok, moved.bytes) == (0, 0), vars(moved)
        c.d.clear_prefix_cache()
        c.settle(timeout=20)
    assert outs[0].tokens == outs[1].tokens
    return outs[1]


def test_kv_of_other_weights_is_not_taken(c: Cluster, others: pathlib.Path) -> None:
    prompt = fresh(300, "weights")
    old = c.r.run(prompt, 12).tokens
    assert exchanged(c, prompt).tokens == old

    # Held for D, and then P has other weights: what it holds is not P's any more, and new prompts are computed with the new ones.
    held = fresh(200, "held")
    kv = c.p.run(held, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    c.p.reload_weights(others)
    with Moved(c) as moved:
        assert c.d.run(held, 12, kv=kv).tokens == c.r.run(held, 12).tokens
    assert (moved.ok, moved.bytes) == (0, 0), vars(moved)
    c.settle(timeout=20)
    assert kept_apart(c, fresh(310, "P is ahead")).tokens == c.r.run(fresh(310, "P is ahead"), 12).tokens

    # D follows, and they agree again.
    c.d.reload_weights(others)
    c.r.reload_weights(others)
    c.connected()
    prompt = fresh(320, "both")
    new = c.r.run(prompt, 12).tokens
    assert exchanged(c, prompt).tokens == new
    assert c.r.run(fresh(300, "weights"), 12).tokens != old, "the other weights say the same: nothing was shown"


def test_weights_have_names(c: Cluster) -> None:
    was = c.p.set_weights("step-1200")
    assert c.p.set_weights("step-1200") == ["step-1200"] and was != ["step-1200"]
    prompt = fresh(200, "named")
    assert kept_apart(c, prompt).tokens == c.r.run(prompt, 12).tokens
    c.d.set_weights("step-1200")
    c.connected()
    assert c.r.set_weights("step-1200") == [""], "an engine without the connector has nothing to name"
    prompt = fresh(210, "named alike")
    assert exchanged(c, prompt).tokens == c.r.run(prompt, 12).tokens
