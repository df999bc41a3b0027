"""Prompts with images: equal tokens with different images are different prompts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import DECODE, Engine, Request, e, prefill_first
from test_vllm import config
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import ProcessorInputs

from kvspray_vllm import layout, shim

TOKENS = 40
RED, BLUE = (np.full((8, 8, 3), color, np.uint8) for color in (40, 200))


def image(pixels: Any, offset: int = 4, uuid: str | None = None, **kwargs: Any) -> Any:
    """As vLLM names it."""
    items = MultiModalDataParser().parse_mm_data({"image": [pixels]})
    inputs = ProcessorInputs([], items, {"image": [uuid]}, hf_processor_mm_kwargs=kwargs)
    (name,) = inputs.get_mm_hashes("m", "blake3")["image"]
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 16), name)


def key(e: Engine, *images: Any, **more: Any) -> bytes:
    e.scheduler._hash = shim.prefix_hash
    request = Request(
        request_id="r", prompt_token_ids=list(range(TOKENS)), mm_features=list(images), **more
    )
    return e.scheduler._prompt_hash(request, "")  # type: ignore[arg-type]


def test_the_content_of_images_is_part_of_a_prompt(e: Engine) -> None:
    prompts = [
        [],
        [image(RED)],
        [image(BLUE)],
        [image(RED, offset=5)],
        [image(RED), image(BLUE, offset=20)],
        [image(BLUE), image(RED, offset=20)],
        [image(RED, size=1)],  # the request's own arguments of the processor
        [dataclasses.replace(image(RED), mm_position=PlaceholderRange(4, 17))],
    ]
    keys = [key(e, *images) for images in prompts]
    assert len(set(keys)) == len(prompts)
    assert [key(e, *images) for images in prompts] == keys, "two engines have the same"


def test_another_image_is_asked_for_under_another_name(e: Engine) -> None:
    e.scheduler._hash = shim.prefix_hash
    e.add("p", TOKENS, dict(DECODE), mm_features=[image(RED)])
    source = e.scheduler._pending["p"]
    keys = {}
    for name, pixels in (("same", RED), ("other", BLUE)):
        e.add(name, TOKENS, prefill_first(), mm_features=[image(pixels)])
        keys[name] = e.scheduler._destinations[name].hash
    assert keys["same"] == source.hash != keys["other"]


@pytest.mark.parametrize("asked", [dict(DECODE), prefill_first()], ids=["prefill", "decode"])
def test_embeddings_in_place_of_tokens_do_not_move(e: Engine, asked: Any) -> None:
    """vLLM gives such a prompt token ids, too, in which all embeddings have one id."""
    e.add("r", TOKENS, asked, prompt_embeds=np.zeros((TOKENS, 2)))
    assert not e.scheduler._pending and not e.scheduler._destinations
    assert not e.scheduler_shim.asked
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"no_token_ids": 1}


@pytest.mark.parametrize(
    ("media", "caching", "refused"),
    [
        (None, False, False),
        (MultiModalConfig(), False, False),
        (MultiModalConfig(mm_processor_cache_gb=0), True, False),
        (MultiModalConfig(mm_processor_cache_gb=0), False, True),
        (MultiModalConfig(mm_processor_cache_gb=0, language_model_only=True), False, False),
        (
            MultiModalConfig(
                mm_processor_cache_gb=0, language_model_only=True, enable_mm_embeds=True
            ),
            False,
            True,
        ),
    ],
)
def test_images_that_vllm_numbers_are_refused(media: Any, caching: bool, refused: bool) -> None:
    engine = config(
        model_config__multimodal_config=media,
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    if not refused:
        layout.check_config(engine)  # type: ignore[arg-type]
        return
    with pytest.raises(layout.Unsupported, match="mm_processor_cache_gb is 0 .* numbers the"):
        layout.check_config(engine)  # type: ignore[arg-type]
