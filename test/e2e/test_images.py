"""Prompts with images on real engines: an image is a part of its prompt, and the tokens that stand
for images are equal for all of them."""

from __future__ import annotations

import importlib.util
import pathlib
import secrets
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import vision
from conftest import MODEL, Cluster
from prompts import fresh
from test_tokens import Moved

TOKENS = 12  # of an answer
TEXT = 70  # tokens of a prompt beside its image: it ends within the third block


@pytest.fixture(scope="module")
def pixtral(zygote: None) -> Iterator[None]:
    """The environment has no torchvision. vLLM imports it with Pixtral, and Pixtral with every
    model of images, to compare types of configurations."""
    name = "vllm.model_executor.models.pixtral"
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            absent: Any = types.ModuleType(name)
            absent.PixtralHFEncoderInfo, absent.PixtralVisionConfig = None, type("Absent", (), {})
            patch.setitem(sys.modules, name, absent)
        yield


@pytest.fixture(scope="module")
def c(pixtral: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    vision.paligemma(workdir / "model", MODEL)
    out = Cluster(workdir, {"transports": {"order": ["shm"]}, "transfer": {"match_timeout": "3s"}})
    out.model = workdir / "model"
    try:
        for name in "PDR":
            out.spawn(name)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (vision.SIDE, vision.SIDE, 3), np.uint8)


def ask(c: Cluster, mode: str, prompt: list[int], at_p: np.ndarray, at_d: np.ndarray) -> Any:
    """The tokens of D for a prompt with an image, of which P has computed the same with another."""
    kv: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if mode == "first":
        kv_of_d = c.p.run(prompt, 1, kv=kv, image=at_p).kv
        return c.d.run(prompt, TOKENS, kv=kv_of_d, image=at_d).tokens
    spray = {"v": 1, "xfer": secrets.token_hex(16), "fanout": 1}
    p = c.p.add(prompt, 1, kv=kv | {"kvspray": spray}, image=at_p)
    given = {"do_remote_prefill": True, "kvspray": spray | {"peer": c.sp.endpoint}}
    out = c.d.run(prompt, TOKENS, kv=given, image=at_d).tokens
    p.result()
    return out


@pytest.mark.parametrize("mode", ["first", "both"])
def test_an_image_is_a_part_of_its_prompt(c: Cluster, mode: str) -> None:
    prompt = fresh(TEXT, mode)
    one, other = (picture(seed) for seed in (1, 2))
    want = [c.r.run(prompt, TOKENS, image=image).tokens for image in (one, other)]
    assert want[0] != want[1], "the answer does not depend on the image"
    with Moved(c) as moved:
        assert ask(c, mode, prompt, one, one) == want[0]
    moved.all_loaded(1)
    assert moved.loaded >= TEXT + vision.PATCHES
    c.settle()

    with Moved(c) as moved:
        assert ask(c, mode, prompt, one, other) == want[1], "answered with another image"
    assert moved.ok == 0 and moved.loaded == 0, vars(moved)
    c.settle(timeout=25)  # P waits for a decode engine that has this prompt
