"""The portable identity: what vLLM and SGLang both have for one cache, and which engines have
none."""

from __future__ import annotations

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvspray_sglang import names
from kvspray_vllm import layout
from kvspray_vllm.settings import Settings

SIZES: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        **heads,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def of(model: str, groups: list[KVCacheGroupSpec] | None = None, **more: Any) -> dict[str, str]:
    values: dict[str, Any] = {
        "quantization": None,
        "cache_dtype": "auto",
        "hf_overrides": {},
        "spec": None,
        "lora": None,
        "pp": 1,
    }
    values |= {"own": {}, "load": "auto", **more}
    own = dict.fromkeys(("quantization_config", "hf_config_path"))
    own |= {"config_format": "auto", "model_impl": "auto", "multimodal_config": None}
    own |= values["own"]
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None, dtype=torch.float32,
        quantization=values["quantization"], hf_overrides=values["hf_overrides"], use_mla=False,
        get_head_size=lambda: 32, **own), cache_config=SimpleNamespace(
        cache_dtype=values["cache_dtype"], block_size=32), parallel_config=SimpleNamespace(
        pipeline_parallel_size=values["pp"]), load_config=SimpleNamespace(download_dir=None,
        load_format=values["load"]), speculative_config=values["spec"], lora_config=values["lora"],
        device_config=SimpleNamespace(device_type="cuda"),
    )  # fmt: skip
    kv = KVCacheConfig(
        8,
        [],
        groups or [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], FullAttentionSpec(**SIZES))],
    )
    return layout.portable_identity(config, kv, "checkpoint:1")


def test_both_plug_ins_have_the_same(model: str) -> None:
    args = SimpleNamespace(
        model_path=model, revision=None, download_dir=None, json_model_override_args="{}"
    )
    dtype, theirs = names.portable_identity(
        args, "checkpoint:1", "torch.float32", False, SimpleNamespace(dtype=torch.float32)
    )
    assert of(model) == theirs and of(model, cache_dtype="float32") == theirs and dtype == "float32"


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({"quantization": "fp8"}, "quantization"),
        ({"cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"hf_overrides": {"rope_theta": 1}}, "hf_overrides"),
        ({"spec": SimpleNamespace(method="ngram")}, "speculative_config"),
        ({"lora": object()}, "enable_lora"),
        ({"pp": 2}, "pipeline_parallel_size"),
        (
            {"groups": [KVCacheGroupSpec(["a"], SlidingWindowSpec(**SIZES, sliding_window=64))]},
            "SlidingWindowSpec",
        ),
        ({"groups": [KVCacheGroupSpec([n], FullAttentionSpec(**SIZES)) for n in "ab"]}, "groups"),
        # As vLLM has it with --disable-hybrid-kv-cache-manager: one group, and windows all the
        # same.
        (
            {"groups": [KVCacheGroupSpec(["a"], FullAttentionSpec(**SIZES, sliding_window=64))]},
            "sliding_window",
        ),
        (
            {
                "groups": [
                    KVCacheGroupSpec(["a"], FullAttentionSpec(**SIZES, attention_chunk_size=64))
                ]
            },
            "attention_chunk_size",
        ),
        ({"own": {"hf_config_path": "/other"}}, "hf_config_path"),
        ({"own": {"config_format": "mistral"}}, "config_format"),
        ({"own": {"model_impl": "transformers"}}, "model_impl"),
        ({"own": {"quantization_config": {"linear": "fp8"}}}, "quantization_config"),
        (
            {"own": {"multimodal_config": MultiModalConfig(mm_processor_kwargs={"a": 1})}},
            "settings for images",
        ),
        ({"load": "tensorizer"}, "load_format"),
    ],
)
def test_engines_that_have_none(model: str, more: dict[str, Any], want: str) -> None:
    with pytest.raises(layout.Unsupported, match=want):
        of(model, **more)


def test_opaque_pages_have_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "cpu_packing", lambda _: "amx")
    with pytest.raises(layout.Unsupported, match="amx"):
        of(model)


def test_layers() -> None:
    group = {
        "strategy": "packed_nhd",
        "layers": [{"name": f"model.layers.{i}.self_attn.attn", "index": i} for i in (3, 4)],
    }
    (got,) = layout.portable_layers([group])
    assert [(x["name"], x["index"]) for x in got["layers"]] == [("layers.3", 3), ("layers.4", 4)]


def test_the_setting() -> None:
    assert Settings.parse({"identity": "portable"}).identity == "portable"
    for extra, want in (
        ({"identity": "other"}, "portable"),
        ({"identity": True}, "portable"),
        ({"identity": "portable", "store": True}, "store"),
    ):
        with pytest.raises(ValueError, match=want):
            Settings.parse(extra)
