# SPDX-License-Identifier: Apache-2.0
"""The identity that engines of several kinds share: what makes it another one, and what has none."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from kvspray import portable

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "rope_theta": 10000.0, "transformers_version": "5.0", "torch_dtype": "bfloat16",
}  # fmt: skip


def of(path: pathlib.Path, config: dict[str, Any] | str, weights: str = "checkpoint:1", dtype: str = "bfloat16", **settings: object) -> dict[str, str]:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return portable.identity(path, weights=weights, dtype=dtype, settings=settings)


def test_what_is_in_it(tmp_path: pathlib.Path) -> None:
    one = of(tmp_path / "a", CONFIG, quantization=None)
    assert (one["layers"], one["head_size"], one["kv_heads"], one["weights"]) == ("3", "32", "2", "checkpoint:1")
    # Where a copy lies, and which library wrote it, are no part of it.
    assert of(tmp_path / "b", CONFIG | {"transformers_version": "4.1", "dtype": "float32"}) == one
    for key, value in (("rope_theta", 5e5), ("num_hidden_layers", 4), ("head_dim", 64), ("rms_norm_eps", 1e-5)):
        assert of(tmp_path / "b", CONFIG | {key: value})["model_config"] != one["model_config"], key
    assert of(tmp_path / "b", CONFIG, "checkpoint:2") != one


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": None}, "none"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3"),
        ({"rope_scaling": "odd"}, "odd"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_models_that_were_not_compared(tmp_path: pathlib.Path, more: dict[str, Any], want: str) -> None:
    with pytest.raises(portable.NotPortable, match=want):
        of(tmp_path, CONFIG | more)


def test_settings_that_were_not_compared(tmp_path: pathlib.Path) -> None:
    with pytest.raises(portable.NotPortable, match="quantization is 'awq'"):
        of(tmp_path, CONFIG, quantization="awq")
    for weights in ("named:m@main", "dummy:1", "replaced:1", "checkpoint:1+checkpoint:2"):
        with pytest.raises(portable.NotPortable, match="weights"):
            of(tmp_path, CONFIG, weights)
    with pytest.raises(portable.NotPortable, match="int8"):
        of(tmp_path, CONFIG, dtype="int8")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_configurations_that_are_none(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(portable.NotPortable, match=r"config"):
        of(tmp_path, text)
    with pytest.raises(portable.NotPortable, match="cannot be read"):
        portable.identity(tmp_path / "none", weights="w", dtype="bfloat16", settings={})
