"""`kvspray layout explain` reads a config.json that has no layer_types as the transformers library
does, whose own configs are the reference."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
from typing import Any

import cluster as rig
import pytest
from conftest import need

# What a layer of each type is explained as: its strategy, and whether it has a window.
EXPLAINED = {
    "full_attention": ("packed_nhd", False),
    "sliding_attention": ("packed_nhd", True),
    "linear_attention": ("gdn_state", False),
}

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("gemma3_text", {"sliding_window_pattern": 4}),
    ("cohere2", {}),
    ("cohere2", {"sliding_window_pattern": 3}),
    ("exaone4", {}),
    ("olmo3", {}),
    ("gpt_oss", {}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 10}),
    ("qwen3_next", {}),
    ("qwen3_next", {"full_attention_interval": 3}),
    ("qwen3_5_text", {}),
    ("qwen3_5_moe_text", {}),
]

# Models whose layers differ in what is not described: none of them may come out as dense layers.
REFUSED = ("llama4_text", "gemma3n_text", "gemma4_text", "jamba", "bamba", "falcon_h1", "lfm2",
    "zamba2", "minimax", "kimi_linear", "mllama_text_model", "recurrent_gemma", "olmo_hybrid",
    "granitemoehybrid", "exaone_moe", "afmoe", "vaultgemma")  # fmt: skip


def explain(
    model: str, fields: dict[str, Any], dir: pathlib.Path
) -> tuple[Any, list[str], subprocess.CompletedProcess[str]]:
    """transformers' config, what it has for each layer, and what kvspray has for the same config
    without layer types."""
    need("kvspray", rig.BINARY.exists(), "run make build")
    from transformers import AutoConfig

    config = AutoConfig.for_model(model, **fields)
    said = json.loads(config.to_json_string(use_diff=False))
    types = said.pop("layer_types", None) or ["full_attention"] * config.num_hidden_layers
    file = dir / "config.json"
    file.write_text(json.dumps(said | fields))
    run = subprocess.run(
        [
            rig.BINARY,
            "layout",
            "explain",
            "--model",
            file,
            "--block",
            "512",
            "--tokens",
            "512",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return config, types, run


@pytest.mark.parametrize(("model", "fields"), MODELS, ids=str)
def test_layers_are_those_of_transformers(
    model: str, fields: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    config, types, run = explain(model, fields, tmp_path)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    pages = [
        (p["strategy"], p.get("window", 0) > 0)
        for p in report["pages"]
        if p["side"] == "prefill"
        for _ in range(p["layers"])
    ]
    assert collections.Counter(pages) == collections.Counter(EXPLAINED[t] for t in types)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (
        report["bytes_per_token"]
        == types.count("full_attention") * 2 * config.num_key_value_heads * head * 2
    )


@pytest.mark.parametrize("model", REFUSED)
def test_what_is_not_described_is_refused(model: str, tmp_path: pathlib.Path) -> None:
    _, _, run = explain(model, {}, tmp_path)
    assert run.returncode == 2, run.stdout
    assert " = " in run.stderr, "names no field and value"
