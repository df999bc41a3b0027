# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny random Llama and a tokenizer of its own: nothing is downloaded. usage: tiny_model.py DIR

The weights are scaled so that greedy outputs vary with every token of the prompt: equal outputs then mean equal caches.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 1024
POSITIONS = 8192
SEED = 20261121


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, four specials, and numbered words, so that every id decodes to a text of its own."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<unk>", "<s>", "</s>", "<pad>"]
    pieces += [f"Ġt{i}" for i in range(VOCAB - len(pieces))]
    tok = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def main(out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tok = tokenizer()
    tok.save_pretrained(out)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=POSITIONS, tie_word_embeddings=False,
        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    gen = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                continue
            scale = 1.0 if "embed" in name else 2.0 / p.shape[-1] ** 0.5
            p.copy_(torch.randn(p.shape, generator=gen) * scale)
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
