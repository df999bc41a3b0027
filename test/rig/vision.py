# SPDX-License-Identifier: Apache-2.0
"""A tiny model with vision: PaliGemma's shape, with random weights."""

from __future__ import annotations

import json
import pathlib

from drafts import HIDDEN, VOCAB, Random, Weights, llama_config, llama_layer, under, write

IMAGE, NEWLINE = VOCAB, VOCAB + 1
SIDE, PATCH = 56, 14
PATCHES = (SIDE // PATCH) ** 2  # tokens of an image, which vLLM puts before a prompt
WIDTH, INNER, DEPTH = 32, 64, 2  # of the tower
LAYERS = 2
PLUS = 64  # tokens that the vocabulary has besides
FAINT = 0.3  # of a token's own embedding: the other tokens decide the answer


def linear(r: Random, name: str, out: int, to: int) -> Weights:
    return {f"{name}.weight": r(out, to), f"{name}.bias": r(out)}


def norm(r: Random, name: str) -> Weights:
    return {f"{name}.weight": r(WIDTH) * 0 + 1, f"{name}.bias": r(WIDTH) * 0}


def tower(r: Random) -> Weights:
    out = {
        "embeddings.patch_embedding.weight": r(WIDTH, 3, PATCH, PATCH),
        "embeddings.patch_embedding.bias": r(WIDTH),
        "embeddings.position_embedding.weight": r(PATCHES, WIDTH),
        **norm(r, "post_layernorm"),
    }
    for i in range(DEPTH):
        layer = f"encoder.layers.{i}."
        for name in ("q", "k", "v", "out"):
            out |= linear(r, f"{layer}self_attn.{name}_proj", WIDTH, WIDTH)
        out |= linear(r, f"{layer}mlp.fc1", INNER, WIDTH)
        out |= linear(r, f"{layer}mlp.fc2", WIDTH, INNER)
        out |= norm(r, f"{layer}layer_norm1") | norm(r, f"{layer}layer_norm2")
    return out


def paligemma(dir: pathlib.Path, tokenizer: pathlib.Path) -> None:
    r = Random(20261130)
    weights = {
        **under("vision_tower.vision_model.", tower(r)),
        **linear(r, "multi_modal_projector.linear", HIDDEN, WIDTH),
        # Gemma multiplies by the root of the width, and its norms add 1 to their weights.
        "language_model.model.embed_tokens.weight": r(VOCAB + PLUS, HIDDEN, scale=FAINT),
        "language_model.model.norm.weight": r(HIDDEN) * 0,
    }
    for i in range(LAYERS):
        layer = {
            name: weight * 0 if name.endswith("layernorm.weight") else weight
            for name, weight in llama_layer(r).items()
        }
        weights |= under(f"language_model.model.layers.{i}.", layer)
    text = llama_config(
        LAYERS,
        architectures=["GemmaForCausalLM"],
        model_type="gemma",
        vocab_size=VOCAB + PLUS,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 1,
        "image_size": SIDE,
        "patch_size": PATCH,
        "projection_dim": HIDDEN,
        "vision_use_head": False,
    }
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": IMAGE,
        "projection_dim": HIDDEN,
        "hidden_size": HIDDEN,
        # vLLM's attention on CPUs is causal within an image, too.
        "is_mm_prefix_lm": False,
        "torch_dtype": "float32",
        "text_config": text,
        "vision_config": vision,
    }
    write(dir, config, weights, tokenizer)
    images = {
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": PATCHES,
        "size": {"height": SIDE, "width": SIDE},
    }
    (dir / "preprocessor_config.json").write_text(json.dumps(images))
    (dir / "processor_config.json").write_text(
        json.dumps({"processor_class": "PaliGemmaProcessor"})
    )
    tokens = json.loads((dir / "tokenizer.json").read_text())
    last = tokens["added_tokens"][-1]
    for at, text_of in ((IMAGE, "<image>"), (NEWLINE, "\n")):
        tokens["added_tokens"].append(last | {"id": at, "content": text_of})
    (dir / "tokenizer.json").write_text(json.dumps(tokens))
