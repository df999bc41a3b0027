"""The identity of a cache that engines of several kinds share: what it was computed from, and no
engine's name or version.

Such caches hold equal numbers only as far as that was shown, so a model, or a setting, that was not
compared is refused by name. What remains is a checkpoint's own configuration, its weights and the
type of the numbers. Engines register the layers of such a cache as ``layers.0``, ``layers.1`` and
so on.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .client import identity as _identity
from .weights import MAX_JSON_BYTES, VOLATILE, CheckpointError, directory_of

VERSION = "1"
ARCHITECTURES = ("LlamaForCausalLM",)  # test/sglang/test_cross_server.py compares them
DTYPES = ("float32", "float16", "bfloat16")
# What a configuration may have: both engines take it alike, or neither looks at it. Anything else
# is refused by name, whatever its value: a key that one engine reads and the other does not makes
# two caches of one checkpoint.
KNOWN = VOLATILE | {
    "architectures", "model_type", "hidden_size", "intermediate_size", "hidden_act",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "tie_word_embeddings", "vocab_size", "attention_bias", "mlp_bias", "quantization_config",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
    "pretraining_tp", "use_cache", "is_llama_config", "_attn_implementation_autoset",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
# Ways to load weights that read the files of which the digest is.
LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "runai_streamer")
MODEL_TYPES = ("llama",)  # another one has other defaults, such as a sliding window
# Names that one process, or one path, has given to its weights.
_PRIVATE = ("named:", "dummy:", "replaced:")


class NotPortable(ValueError):
    """A cache that no engine of another kind may take for its own; the text names the setting and
    the remedy."""


def layer_name(index: int) -> str:
    return f"layers.{index}"


def identity(
    model: str | os.PathLike[str],
    *,
    weights: str,
    dtype: str,
    settings: Mapping[str, object],
    revision: str | None = None,
    cache: str | None = None,
) -> dict[str, str]:
    """``model``: where the checkpoint is. ``weights``: its digest, or the user's own name for it.
    ``settings``: the engine's settings that change KV, by their names; each must be empty, as its
    effect in another engine is not known. Raises NotPortable.
    """
    for name, value in settings.items():
        if value:
            raise _not(
                f"{name} is {value!r}",
                "its effect was not compared between engines",
                f"leave {name} out",
            )
    if dtype not in DTYPES:
        raise _not(
            f"dtype is {dtype}",
            f"known are {', '.join(DTYPES)}",
            "set dtype to one of them on both sides",
        )
    if weights.startswith(_PRIVATE) or "+" in weights:
        raise _not(
            f"the weights are called {weights!r}",
            "another engine may mean others by it",
            "set weights to a name of your own",
        )
    config = _config(model, revision, cache)
    _check(config)
    heads = int(config["num_attention_heads"])
    size = config.get("head_dim") or int(config["hidden_size"]) // heads
    kept = {k: v for k, v in config.items() if k not in VOLATILE}
    return _identity(
        model_config=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32],
        weights=weights, layers=int(config["num_hidden_layers"]), head_size=int(size),
        groups="full", rope="default", backoff=0, speculative="",
        kv_heads=str(config.get("num_key_value_heads") or heads), portable=VERSION,
    )  # fmt: skip


def _config(
    model: str | os.PathLike[str], revision: str | None, cache: str | None
) -> dict[str, Any]:
    try:
        path = pathlib.Path(directory_of(os.fspath(model), revision, cache)) / "config.json"
        with path.open("rb") as f:
            config = json.loads(f.read(MAX_JSON_BYTES))
    except (OSError, CheckpointError, ValueError, RecursionError) as err:
        raise _not(
            f"the configuration of {model} cannot be read ({err})",
            "caches are compared by it",
            "use a local checkpoint",
        ) from err
    if not isinstance(config, dict):
        raise _not(
            f"{path} is no object", "caches are compared by it", "use a Hugging Face checkpoint"
        )
    return config


def _check(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or ["none"]
    other = [a for a in architectures if a not in ARCHITECTURES]
    if other:
        raise _not(
            f"the model is a {other[0]}",
            f"compared were {', '.join(ARCHITECTURES)}",
            "use engines of one kind for it",
        )
    if config.get("model_type") not in MODEL_TYPES:
        raise _not(
            f"model_type is {str(config.get('model_type'))[:64]}",
            f"compared were {', '.join(MODEL_TYPES)}",
            "use engines of one kind for it",
        )
    odd = {
        name: config[name]
        for name in ("attention_bias", "mlp_bias", "quantization_config")
        if config.get(name)
    }
    for name, value in {
        **odd,
        **_odd_rope(config),
        **{k: v for k, v in config.items() if k not in KNOWN and v is not None},
    }.items():
        raise _not(
            f"{name[:64]} of the model is {str(value)[:64]}",
            "it was not compared between engines",
            "use engines of one kind for it",
        )
    lacks = [
        n
        for n in ("num_attention_heads", "num_hidden_layers", "hidden_size")
        if not isinstance(config.get(n), int)
    ]
    if lacks:
        raise _not(
            f"the model's configuration has no {lacks[0]}",
            "caches are compared by it",
            "use a Hugging Face checkpoint",
        )


def _odd_rope(config: Mapping[str, Any]) -> dict[str, object]:
    """What rotates K in any other way than by all of a head's numbers with one base, by name.
    Engines read a base in one place or another."""
    out: dict[str, object] = {}
    given = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    bases = [config["rope_theta"]] if config.get("rope_theta") is not None else []
    for rope in given.values():
        if not isinstance(rope, dict):
            return {"rope_type": rope}
        for key, value in rope.items():
            if key == "rope_theta":
                bases.append(value)
            elif value is not None and (key not in ("rope_type", "type") or value != "default"):
                out["rope_type" if key == "type" else key] = value
    if len(given) > 1:
        out["rope_parameters"] = "beside rope_scaling"
    if any(type(b) not in (int, float) or b != bases[0] for b in bases):
        out["rope_theta"] = bases
    return dict(sorted(out.items(), key=lambda x: x[0] != "rope_type"))


def _not(what: str, why: str, remedy: str) -> NotPortable:
    return NotPortable(
        f"kvspray: identity is portable, and {what}: {why}; {remedy}, or leave identity out"
    )
