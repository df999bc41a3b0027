"""The identity that engines of several kinds share: what makes it another one, and what has
none."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from kvspray import portable

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "rope_theta": 10000.0, "transformers_version": "5.0", "torch_dtype": "bfloat16",
}  # fmt: skip


def of(
    path: pathlib.Path,
    config: dict[str, Any] | str,
    weights: str = "checkpoint:1",
    dtype: str = "bfloat16",
    **settings: object,
) -> dict[str, str]:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return portable.identity(path, weights=weights, dtype=dtype, settings=settings)


def test_what_is_in_it(tmp_path: pathlib.Path) -> None:
    one = of(tmp_path / "a", CONFIG, quantization=None)
    assert (one["layers"], one["head_size"], one["kv_heads"], one["weights"]) == (
        "3",
        "32",
        "2",
        "checkpoint:1",
    )
    # Where a copy lies, and which library wrote it, are no part of it.
    assert of(tmp_path / "b", CONFIG | {"transformers_version": "4.1", "dtype": "float32"}) == one
    for key, value in (
        ("rope_theta", 5e5),
        ("num_hidden_layers", 4),
        ("head_dim", 64),
        ("rms_norm_eps", 1e-5),
    ):
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
        # What one engine reads and the other does not, or has another default for.
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "linear"),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters",
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"is_causal": False}, "is_causal"),
        ({"auto_map": {"AutoConfig": "c.C"}}, "auto_map"),
        ({"model_type": "mistral"}, "mistral"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_models_that_were_not_compared(
    tmp_path: pathlib.Path, more: dict[str, Any], want: str
) -> None:
    with pytest.raises(portable.NotPortable, match=want):
        of(tmp_path, CONFIG | more)


def test_what_both_engines_take_alike(tmp_path: pathlib.Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    for more in (
        {
            "rope_scaling": None,
            "sliding_window": None,
            "mlp_bias": False,
            "attention_bias": False,
            "head_dim": None,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "rope_theta": 10000,
            "rope_scaling": {"type": "default", "factor": None},
            "rope_parameters": None,
        },
        {
            "tie_word_embeddings": True,
            "pretraining_tp": 1,
            "bos_token_id": 1,
            "use_cache": True,
            "hidden_act": "silu",
        },
    ):
        assert of(tmp_path, config | more)["rope"] == "default"


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
