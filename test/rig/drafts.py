# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a draft for each method of speculative decoding. The draft is the first layer of
the model, and the other layers add little to that one, so that a part of its tokens is accepted.

The weights are numpy's: a process that forks engines may have computed nothing with torch.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, INNER, HEADS, HEAD = 1024, 128, 256, 4, 32
LAYERS = 4
KV_HEADS = 2
SHARP = 1.5  # of queries and keys: a few tokens take the most of a head's attention
ATTENTION = 0.5  # of what attention adds to a token
# With these, half of the drafts are accepted: what later layers add, beside the first one, and what
# a draft takes from the model's hidden states, beside the token.
LATER = 0.02
NOISE = 0.02
POSITIONS = 8192
Weights = dict[str, np.ndarray]


class Random:
    def __init__(self, seed: int) -> None:
        self._gen = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 2.0) -> np.ndarray:
        """Of a matrix, so that each of its rows answers with numbers about that large."""
        out = self._gen.standard_normal(shape, np.float32)
        return np.asarray(out * (scale / shape[-1] ** 0.5), np.float32)


def embedding(r: Random) -> np.ndarray:
    """Tokens that a norm leaves as they are: EAGLE's first layer has none."""
    out = r(VOCAB, HIDDEN)
    return np.asarray(out / np.sqrt((out**2).mean(axis=1, keepdims=True)), np.float32)


def ones(n: int = HIDDEN) -> np.ndarray:
    return np.ones(n, np.float32)


def behind_attention(r: Random, adds: float) -> Weights:
    return {
        "mlp.gate_proj.weight": r(INNER, HIDDEN),
        "mlp.up_proj.weight": r(INNER, HIDDEN),
        "mlp.down_proj.weight": r(HIDDEN, INNER, scale=adds * 2),
        "input_layernorm.weight": ones(),
        "post_attention_layernorm.weight": ones(),
    }


def llama_layer(r: Random, adds: float = 1.0) -> Weights:
    """adds: how large what the layer adds is."""
    return {
        "self_attn.q_proj.weight": r(HEADS * HEAD, HIDDEN, scale=SHARP),
        "self_attn.k_proj.weight": r(KV_HEADS * HEAD, HIDDEN, scale=SHARP),
        "self_attn.v_proj.weight": r(KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj.weight": r(HIDDEN, HEADS * HEAD, scale=adds * ATTENTION),
        **behind_attention(r, adds),
    }


def under(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: w for name, w in weights.items()}


def llama_config(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": POSITIONS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 259,
        "torch_dtype": "float32",
        **more,
    }


def write(
    dir: pathlib.Path, config: dict[str, Any], weights: Weights, tokenizer: pathlib.Path
) -> None:
    dir.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, dir)
    (dir / "config.json").write_text(json.dumps(config))
    save_file(weights, dir / "model.safetensors", {"format": "pt"})


def llama(dir: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """dir/target with dir/eagle and dir/eagle3."""
    r = Random(20261130)
    embed = embedding(r)
    head = r(VOCAB, HIDDEN)
    first = llama_layer(r)
    weights = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": ones(),
        **under("model.layers.0.", first),
    }
    for i in range(1, LAYERS):
        weights |= under(f"model.layers.{i}.", llama_layer(r, LATER))
    write(dir / "target", llama_config(LAYERS), weights, tokenizer)

    eye = np.eye(HIDDEN, dtype=np.float32)
    fc = np.concatenate([eye, r(HIDDEN, HIDDEN, scale=NOISE)], axis=1)
    own = {k: v for k, v in first.items() if k != "input_layernorm.weight"}
    write(
        dir / "eagle",
        llama_config(1, architectures=["LlamaForCausalLM"]),
        {"embed_tokens.weight": embed, "fc.weight": fc, **under("layers.0.", own)},
        tokenizer,
    )

    # EAGLE-3 adds to hidden states of the model: the token itself comes in through four more heads,
    # each of which looks at its own position alone. All heads have keys of their own.
    def of_token(w: np.ndarray) -> np.ndarray:
        return np.concatenate([w, np.zeros_like(w)], axis=1)

    def each_head(w: np.ndarray) -> np.ndarray:
        return w.reshape(KV_HEADS, HEAD, -1).repeat(HEADS // KV_HEADS, axis=0).reshape(-1, HIDDEN)

    own_position = r(HEADS * HEAD, HIDDEN, scale=3.0)
    attention = {name: first[f"self_attn.{name}_proj.weight"] for name in "qkvo"}
    layer = first | {
        "self_attn.q_proj.weight": of_token(np.concatenate([own_position, attention["q"]])),
        "self_attn.k_proj.weight": of_token(
            np.concatenate([own_position, each_head(attention["k"])])
        ),
        "self_attn.v_proj.weight": of_token(np.concatenate([eye, each_head(attention["v"])])),
        "self_attn.o_proj.weight": np.concatenate([eye, attention["o"]], axis=1),
        "hidden_norm.weight": ones(),
    }
    write(
        dir / "eagle3",
        llama_config(
            1,
            architectures=["LlamaForCausalLMEagle3"],
            num_attention_heads=2 * HEADS,
            num_key_value_heads=2 * HEADS,
            draft_vocab_size=VOCAB,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            norm_output=True,
        ),
        {
            "embed_tokens.weight": embed,
            "lm_head.weight": head,
            "norm.weight": ones() * np.float32(0.1),
            "fc.weight": r(HIDDEN, 3 * HIDDEN, scale=NOISE),
            **under("midlayer.", layer),
        },
        tokenizer,
    )


COUNTS = 1.5  # of what makes the model count, beside random weights
FIRST = 0.3  # of what the first layer adds to a token


def counting(dir: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """dir with a model that often answers a token with the next one, for methods that look up in
    the prompt what followed the last tokens there."""
    r = Random(20261130)
    embed = embedding(r)
    head = np.roll(embed, 1, axis=0) * COUNTS + r(VOCAB, HIDDEN, scale=HIDDEN**0.5)
    weights = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": np.asarray(head, np.float32),
        "model.norm.weight": ones(),
    }
    for i in range(LAYERS):
        weights |= under(f"model.layers.{i}.", llama_layer(r, LATER if i else FIRST))
    write(dir / "target", llama_config(LAYERS), weights, tokenizer)


NOPE = 32


def mla_layer(r: Random, latent: int, rope: int, adds: float = 1.0) -> Weights:
    return {
        "self_attn.q_proj.weight": r(HEADS * (NOPE + rope), HIDDEN, scale=SHARP),
        "self_attn.kv_a_proj_with_mqa.weight": r(latent + rope, HIDDEN),
        "self_attn.kv_a_layernorm.weight": ones(latent),
        "self_attn.kv_b_proj.weight": r(HEADS * (NOPE + HEAD), latent),
        "self_attn.o_proj.weight": r(HIDDEN, HEADS * HEAD, scale=adds * ATTENTION),
        **behind_attention(r, adds),
    }


def deepseek(dir: pathlib.Path, tokenizer: pathlib.Path, latent: int = 64, rope: int = 32) -> None:
    """dir with a DeepSeek-V3 of dense layers and one MTP module."""
    r = Random(20261130)
    layers = 2
    embed = embedding(r)
    head = r(VOCAB, HIDDEN)
    first = mla_layer(r, latent, rope)
    draft = f"model.layers.{layers}."
    weights = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": ones(),
        **under("model.layers.0.", first),
        **under("model.layers.1.", mla_layer(r, latent, rope, LATER)),
        **under(draft, first),
        draft + "embed_tokens.weight": embed,
        draft + "enorm.weight": ones(),
        draft + "hnorm.weight": ones(),
        draft + "shared_head.norm.weight": ones(),
        draft + "shared_head.head.weight": head,
        draft + "eh_proj.weight": np.concatenate(
            [np.eye(HIDDEN, dtype=np.float32), r(HIDDEN, HIDDEN, scale=NOISE)], axis=1
        ),
    }
    config = llama_config(
        layers,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_key_value_heads=HEADS,
        kv_lora_rank=latent,
        q_lora_rank=None,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=rope,
        v_head_dim=HEAD,
        head_dim=rope,
        moe_intermediate_size=INNER,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        # No layer uses the experts, the module neither.
        first_k_dense_replace=layers,
        moe_layer_freq=layers + 1,
        num_nextn_predict_layers=1,
    )
    write(dir, config, weights, tokenizer)


def mimo(dir: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """dir with a MiMo, which is a Qwen2 with MTP, and one module."""
    r = Random(20261130)
    embed = embedding(r)
    first = qwen2_layer(r)
    draft = "model.mtp_layers.0."
    weights = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": r(VOCAB, HIDDEN),
        "model.norm.weight": ones(),
        **under("model.layers.0.", first),
        **under(draft, first),
        draft + "token_layernorm.weight": ones(),
        draft + "hidden_layernorm.weight": ones(),
        draft + "final_layernorm.weight": ones(),
        draft + "input_proj.weight": np.concatenate(
            [r(HIDDEN, HIDDEN, scale=NOISE), np.eye(HIDDEN, dtype=np.float32)], axis=1
        ),
    }
    for i in range(1, LAYERS):
        weights |= under(f"model.layers.{i}.", qwen2_layer(r, LATER))
    config = llama_config(
        LAYERS,
        architectures=["MiMoForCausalLM"],
        model_type="qwen2",
        num_nextn_predict_layers=1,
    )
    write(dir, config, weights, tokenizer)


def qwen2_layer(r: Random, adds: float = 1.0) -> Weights:
    return llama_layer(r, adds) | {
        f"self_attn.{name}_proj.bias": np.zeros(n, np.float32)
        for name, n in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD))
    }
