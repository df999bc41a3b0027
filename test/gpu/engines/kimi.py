"""A small Kimi-Linear with random weights: KDA, MLA without positions, no experts. transformers has
no class for it, so weights are written by their names in a checkpoint."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import safetensors.torch
import torch

HIDDEN, INNER, LAYERS, HEADS = 512, 1024, 8, 16
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
KDA_HEADS, KDA_DIM, KERNEL = 4, 128, 4
FULL = (4, 8)  # layers of MLA, counted from 1


def config(common: dict[str, Any]) -> dict[str, Any]:
    return common | {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "mla_use_nope": True,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, LAYERS + 1) if i not in FULL],
            "full_attn_layers": list(FULL),
            "head_dim": KDA_DIM,
            "num_heads": KDA_HEADS,
            "short_conv_kernel_size": KERNEL,
        },
    }


def shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    wide = KDA_HEADS * KDA_DIM
    kda: dict[str, tuple[int, ...]] = {
        **{f"{x}_proj.weight": (wide, HIDDEN) for x in "qkv"},
        **{f"{x}_conv1d.weight": (wide, 1, KERNEL) for x in "qkv"},
        **{f"{x}_a_proj.weight": (KDA_DIM, HIDDEN) for x in "fg"},
        **{f"{x}_b_proj.weight": (wide, KDA_DIM) for x in "fg"},
        "b_proj.weight": (KDA_HEADS, HIDDEN),
        "A_log": (1, 1, KDA_HEADS, 1),
        "dt_bias": (wide,),
        "o_norm.weight": (KDA_DIM,),
        "o_proj.weight": (HIDDEN, wide),
    }
    mla: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
        "kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
        "kv_a_layernorm.weight": (LATENT,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        "o_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    mlp = {
        "gate_proj.weight": (INNER, HIDDEN),
        "up_proj.weight": (INNER, HIDDEN),
        "down_proj.weight": (HIDDEN, INNER),
    }
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        out |= {at + "self_attn." + k: v for k, v in (mla if i + 1 in FULL else kda).items()}
        out |= {at + "mlp." + k: v for k, v in mlp.items()}
        out |= {at + f"{k}_layernorm.weight": (HIDDEN,) for k in ("input", "post_attention")}
    return out


def write(out: pathlib.Path, common: dict[str, Any], weights: bool, seed: int) -> None:
    (out / "config.json").write_text(json.dumps(config(common), indent=2))
    if not weights:
        return
    gen = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(common["vocab_size"]).items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith(("A_log", "dt_bias")):
            tensors[name] = torch.rand(shape, generator=gen)
        else:
            scale = 1.0 if "embed" in name else 2.0 / shape[-1] ** 0.5
            tensors[name] = (torch.randn(shape, generator=gen) * scale).to(torch.bfloat16)
    safetensors.torch.save_file(tensors, out / "model.safetensors", {"format": "pt"})
