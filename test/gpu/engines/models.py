#!/usr/bin/env python3
"""Writes models with random weights, in the shapes that the measurements use; nothing is
downloaded. usage: models.py DIR NAME ...

drafts writes a Llama with drafts of EAGLE and EAGLE-3, and a DeepSeek-V3 and a MiMo with MTP.
NAME:config writes no weights, for --load-format dummy, with which engines take as long and
answer nothing of interest. NAME@SEED has other weights of the same shape.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
import transformers
import unpacked  # noqa: F401
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

# isort: split
import drafts
import kimi

from kvspray.trial import tiny_model

POSITIONS = 81920


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, head: int, inner: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": inner,
    }


LLAMAS = {
    "llama-small": llama(4, 256, 4, 2, 64, 512),
    "llama-1b": llama(16, 2048, 32, 8, 64, 8192),
    "llama-8b": llama(32, 4096, 32, 8, 128, 14336),
    "llama-32b": llama(64, 5120, 40, 8, 128, 27648),
    # What one rank of eight has of a 70B model: the smallest pages of a dense model.
    "llama-70b-tp8": llama(80, 8192, 8, 1, 128, 3584),
}
WINDOW = 200  # no multiple of a block
# Bytes of the cache that a token takes, in bfloat16.
TOKEN_BYTES = {
    name: 4 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"]
    for name, s in LLAMAS.items()
}
# Llama 1B's shape in a class of SGLang's that does without CUTLASS's Python, which its Llama needs.
GRANITE = "granite-1b"
CLASSES = {
    "mla": DeepseekV2ForCausalLM,
    "window": Gemma3ForCausalLM,
    GRANITE: GraniteForCausalLM,
}
# With recurrent states beside attention: gated delta nets, Mamba 2, Mamba 1, short convolutions. No
# layer uses experts. Of classes that a host's transformers may lack.
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "num_attention_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["mamba", "mamba", "attention"] * 2,
            "num_attention_heads": 8,
            "shared_intermediate_size": 1024,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
            "num_attention_heads": 8,
            "head_dim": 64,
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "n_groups": 8,
        },
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_attention_heads": 8,
            "num_experts": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "num_attention_heads": 8,
            "conv_dim": 512,
            "block_dim": 512,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
KIMI = "kimi-linear"
NAMES = (*LLAMAS, *CLASSES, *HYBRIDS, KIMI)
TINY = "tiny-llama"  # of make env
DRAFTS = "drafts"
SHARD = "4GB"  # of a file


def common_of(tok: Any) -> dict[str, Any]:
    return {
        "vocab_size": tiny_model.VOCAB,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "dtype": "bfloat16",
    }


def config_of(name: str, tok: Any) -> PretrainedConfig:
    common = common_of(tok)
    if name in LLAMAS:
        return LlamaConfig(
            **common,
            **LLAMAS[name],
            tie_word_embeddings=False,
            rope_theta=500000.0,
            architectures=["LlamaForCausalLM"],
        )
    if name == GRANITE:
        shape = LLAMAS["llama-1b"]
        return GraniteConfig(
            **common,
            **shape,
            attention_multiplier=shape["head_dim"] ** -0.5,
            tie_word_embeddings=False,
            rope_theta=500000.0,
            architectures=["GraniteForCausalLM"],
        )
    if name == "mla":
        # DeepSeek's latent cache at its real width; no layer uses the experts.
        return DeepseekV2Config(
            **common,
            num_hidden_layers=4,
            hidden_size=512,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=1024,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=4,
            n_routed_experts=8,
            tie_word_embeddings=False,
            architectures=["DeepseekV2ForCausalLM"],
        )
    if name == "window":
        types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        return Gemma3TextConfig(
            **common,
            num_hidden_layers=len(types),
            layer_types=types,
            sliding_window=WINDOW,
            hidden_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=512,
            query_pre_attn_scalar=1,
            architectures=["Gemma3ForCausalLM"],
        )
    if name in HYBRIDS:
        config, model, shape = HYBRIDS[name]
        return getattr(transformers, config)(
            **common,
            hidden_size=512,
            intermediate_size=1024,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            architectures=[model],
            **shape,
        )
    raise SystemExit(f"model {name!r}: unknown; known are {', '.join(NAMES)}")


def write(out: pathlib.Path, name: str, weights: bool, seed: int = tiny_model.SEED) -> None:
    if name == TINY:
        tiny_model.main(out, seed=seed)
        return
    out.mkdir(parents=True, exist_ok=True)
    tok = tiny_model.tokenizer()
    tok.save_pretrained(out)
    if name == DRAFTS:
        drafts.llama(out, out)
        drafts.deepseek(out / "deepseek", out, latent=512, rope=64)
        drafts.mimo(out / "mimo", out)
        return
    if name == KIMI:
        kimi.write(out, common_of(tok), weights, seed)
        return
    config = config_of(name, tok)
    if not weights:
        config.save_pretrained(out)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        if name in HYBRIDS:
            model = getattr(transformers, HYBRIDS[name][1])(config)
        else:
            model = CLASSES.get(name, LlamaForCausalLM)(config)
    torch.set_default_dtype(torch.float32)
    gen = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for what, p in model.named_parameters():
            if p.dim() >= 2:
                scale = (
                    (0.02 if name == "window" else 1.0)
                    if "embed" in what
                    else 2.0 / p.shape[-1] ** 0.5
                )
                p.normal_(0, scale, generator=gen)
    model.save_pretrained(out, max_shard_size=SHARD)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    for word in sys.argv[2:]:
        word, _, only = word.partition(":")
        name, _, seed = word.partition("@")
        written = "mimo/config.json" if name == DRAFTS else "config.json"
        if not (folder / word / written).exists():
            write(folder / word, name, only != "config", int(seed or tiny_model.SEED))
            print(f"model {name} in {folder / word}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
