# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny random model and a tokenizer of its own: nothing is downloaded. usage:
python -m kvspray.trial.tiny_model DIR [llama|gemma3|qwen3_next|lfm2|granite4]

The weights are scaled so that greedy outputs vary with every token of the prompt: equal outputs
then mean equal caches.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 1024
POSITIONS = 8192
SEED = 20261121
WINDOW = 80  # of gemma3: no multiple of a block


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, four specials, and numbered words, so that every id decodes to a text of its own."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<unk>", "<s>", "</s>", "<pad>"]
    pieces += [f"Ġt{i}" for i in range(VOCAB - len(pieces))]
    tok = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    return fast


def _qwen3_next(sizes: dict[str, int]) -> PreTrainedModel:
    """Three layers of a gated delta net and one of attention. vLLM's kernels want heads of 64 at
    least."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    types = ["linear_attention"] * 3 + ["full_attention"]
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **sizes,
            num_hidden_layers=len(types),
            layer_types=types,
            linear_conv_kernel_dim=4,
            linear_num_key_heads=2,
            linear_key_head_dim=64,
            linear_num_value_heads=4,
            linear_value_head_dim=64,
            num_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            mlp_only_layers=[0, 1, 2],
        )
    )


def _lfm2(sizes: dict[str, int]) -> PreTrainedModel:
    """Short convolutions and attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    types = ["conv", "conv", "full_attention"] * 2
    sizes = {k: v for k, v in sizes.items() if k != "head_dim"}
    return Lfm2ForCausalLM(
        Lfm2Config(
            **sizes,
            num_hidden_layers=len(types),
            layer_types=types,
            conv_L_cache=3,
            conv_dim=sizes["hidden_size"],
            block_dim=sizes["hidden_size"],
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        )
    )


def _granite4(sizes: dict[str, int]) -> PreTrainedModel:
    """Mamba 2 and attention, without experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    types = ["mamba", "mamba", "attention"] * 2
    sizes = {k: v for k, v in sizes.items() if k != "head_dim"}
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **sizes,
            num_hidden_layers=len(types),
            layer_types=types,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=256,
            mamba_n_heads=8,
            mamba_n_groups=1,
            mamba_d_state=32,
            mamba_d_head=32,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
            tie_word_embeddings=False,
        )
    )


# Models with recurrent states.
STATES: dict[str, Callable[[dict[str, int]], PreTrainedModel]] = {
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
    "granite4": _granite4,
}


def main(out: pathlib.Path, kind: str = "llama", seed: int = SEED) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tok = tokenizer()
    tok.save_pretrained(out)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": POSITIONS,
        "bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
    }  # fmt: skip
    embed = 1.0
    model: PreTrainedModel
    if kind == "gemma3":
        # Two layers with a sliding window before each one that sees everything: vLLM makes three
        # cache groups of them. Attention is sharp (query_pre_attn_scalar), so that a single token
        # that is missing shows. Its embeddings are its output, too: small ones leave the choice to
        # what the layers add, or every token would answer with itself.
        embed = 0.02
        types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sizes,
                num_hidden_layers=len(types),
                layer_types=types,
                sliding_window=WINDOW,
                query_pre_attn_scalar=1,
            )
        )
    elif kind in STATES:
        model = STATES[kind](sizes)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, num_hidden_layers=4, tie_word_embeddings=False)
        )
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                continue
            scale = embed if "embed" in name else 2.0 / p.shape[-1] ** 0.5
            p.copy_(torch.randn(p.shape, generator=gen) * scale)
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), "".join(sys.argv[2:3]) or "llama")
