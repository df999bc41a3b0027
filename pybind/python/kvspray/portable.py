# SPDX-License-Identifier: Apache-2.0
"""The identity of a cache that engines of several kinds share: what it was computed from, and no engine's name or version.

Such caches hold equal numbers only as far as that was shown, so a model, or a setting, that was not compared is refused by name.
What remains is a checkpoint's own configuration, its weights and the type of the numbers. Engines register the layers of such a
cache as ``layers.0``, ``layers.1`` and so on.
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
ARCHITECTURES = ("LlamaForCausalLM",)  # test/sglang/test_cross_pools.py and test_cross_server.py compare them
DTYPES = ("float32", "float16", "bfloat16")
# Names that one process, or one path, has given to its weights.
_PRIVATE = ("named:", "dummy:", "replaced:")


class NotPortable(ValueError):
    """A cache that no engine of another kind may take for its own; the text names the setting and the remedy."""


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
    """``model``: where the checkpoint is. ``weights``: its digest, or the user's own name for it. ``settings``: the engine's settings
    that change KV, by their names; each must be empty, as its effect in another engine is not known. Raises NotPortable.
    """
    for name, value in settings.items():
        if value:
            raise _not(f"{name} is {value!r}", "its effect was not compared between engines", f"leave {name} out")
    if dtype not in DTYPES:
        raise _not(f"dtype is {dtype}", f"known are {', '.join(DTYPES)}", "set dtype to one of them on both sides")
    if weights.startswith(_PRIVATE) or "+" in weights:
        raise _not(f"the weights are called {weights!r}", "another engine may mean others by it", "set weights to a name of your own")
    config = _config(model, revision, cache)
    _check(config)
    heads = int(config["num_attention_heads"])
    size = config.get("head_dim") or int(config["hidden_size"]) // heads
    kept = {k: v for k, v in config.items() if k not in VOLATILE}
    return _identity(
        model_config=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32],
        weights=weights, layers=int(config["num_hidden_layers"]), head_size=int(size), groups="full", rope="default", backoff=0,
        speculative="", kv_heads=str(config.get("num_key_value_heads") or heads), portable=VERSION,
    )  # fmt: skip


def _config(model: str | os.PathLike[str], revision: str | None, cache: str | None) -> dict[str, Any]:
    try:
        path = pathlib.Path(directory_of(os.fspath(model), revision, cache)) / "config.json"
        with path.open("rb") as f:
            config = json.loads(f.read(MAX_JSON_BYTES))
    except (OSError, CheckpointError, ValueError, RecursionError) as err:
        raise _not(f"the configuration of {model} cannot be read ({err})", "caches are compared by it", "use a local checkpoint") from err
    if not isinstance(config, dict):
        raise _not(f"{path} is no object", "caches are compared by it", "use a Hugging Face checkpoint")
    return config


def _check(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or ["none"]
    other = [a for a in architectures if a not in ARCHITECTURES]
    if other:
        raise _not(f"the model is a {other[0]}", f"compared were {', '.join(ARCHITECTURES)}", "use engines of one kind for it")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else str(rope)[:64]
    for name, value in (("rope_type", "" if kind == "default" else kind), ("quantization_config", config.get("quantization_config"))):
        if value:
            raise _not(f"{name} of the model is {str(value)[:64]}", "it was not compared between engines", "use engines of one kind for it")
    lacks = [n for n in ("num_attention_heads", "num_hidden_layers", "hidden_size") if not isinstance(config.get(n), int)]
    if lacks:
        raise _not(f"the model's configuration has no {lacks[0]}", "caches are compared by it", "use a Hugging Face checkpoint")


def _not(what: str, why: str, remedy: str) -> NotPortable:
    return NotPortable(f"kvspray: identity is portable, and {what}: {why}; {remedy}, or leave identity out")
