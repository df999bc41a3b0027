"""What the bytes of a page depend on besides its tokens: weights, ranks, arguments.

SGLang's storage keys hold tokens; those of 0.5.23 also a cache_salt. Everything else goes into the
namespace here, so that pages of other engines are not found.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable
from typing import Any

from kvspray import portable
from kvspray.store import Namespace
from kvspray.weights import name_of
from kvspray_sglang.pools import Pool
from kvspray_sglang.settings import Settings

ALGORITHM = "sglang-sha256"
# A number for the values in a cache. Raise it when a release of SGLang computes other values for
# the same model and arguments. Its engines then neither pair with earlier ones, nor find their
# pages.
NUMERICS = "1"
KNOWN = (0, 5, 23)  # the newest release that was tested


def numerics() -> str:
    """NUMERICS, with SGLang's version if it is newer than KNOWN: it may compute other values."""
    import sglang

    number = tuple(int(x) for x in re.findall(r"\d+", sglang.__version__)[:3])
    return NUMERICS + (f", SGLang {sglang.__version__}" if number > KNOWN else "")


_REMEDY = "set weights in hicache_storage_backend_extra_config"

# Arguments of the server that change KV or its bytes, beside the checkpoint.
_ARGUMENTS = (
    "dtype", "quantization", "kv_cache_dtype", "quantization_param_path",
    "json_model_override_args", "model_impl", "torchao_config",
)  # fmt: skip
# Pools whose content is equal on all tensor parallel ranks of a model with MLA. All others are cut
# by heads, or may be: a key without the rank would mix up their shards.
_REPLICATED = ("kv", "indexer", "deepseek_v4_")
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_CHECKER = "sglang.srt.utils.weight_checker"
# How the names of the methods that write parameters begin, by module and class. Some of
# WeightUpdater's receive and load weights between the beginning and the end of a session.
# test/sglang/test_writers.py fails on others in SGLang's sources.
WRITERS = {
    (_UPDATER, "WeightUpdater"): (
        "update_weights", "receive_weights", "load_weights", "begin_weight_update",
        "end_weight_update",
    ),
    (_CHECKER, "WeightChecker"): ("_reset_tensors",),
}  # fmt: skip


def server_args() -> Any:
    """The server's arguments; None in a process that has none."""
    try:
        from sglang.srt.runtime_context import get_context

        return get_context().server_args
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return None


def check_adapters(args: Any) -> None:
    """Refuses LoRA: what SGLang's hash of a page has of an adapter is its name and path at most,
    and never its content."""
    for name in ("enable_lora", "lora_paths"):
        if getattr(args, name, None):
            raise ValueError(
                f"kvspray: {name} is set, and SGLang's hash of a page does not have the content of "
                "a LoRA adapter: KV of another adapter, or of the base model, could be used; start "
                "without LoRA, or with another backend"
            )


class Weights:
    """The name of the weights that this process had when the backend was made.

    A page that waits to be stored while SGLang replaces its weights was computed with the old ones.
    So nothing is stored or found any more once they are replaced, until the backend is made again
    with a name for the new ones.
    """

    def __init__(
        self, settings: Settings, args: Any, log: logging.Logger, remedy: str = _REMEDY
    ) -> None:
        """``remedy``: how the user names the weights."""
        _watch()
        self._replaced = _replaced[0]
        if self._replaced and not settings.weights:
            raise ValueError(
                "kvspray: SGLang has replaced its weights since it started, so their files do not "
                f"name them; {remedy}"
            )
        self.name = settings.weights or _checkpoint(args, log, remedy)

    @property
    def current(self) -> bool:
        """Whether the process still has these weights."""
        return self._replaced == _replaced[0]


_replaced = [0]  # how often SGLang has begun to replace the weights of this process


def _watch() -> None:
    """Notices calls of the methods with which SGLang writes parameters. Refuses an SGLang that does
    not have them where they are looked for: it could replace its weights unnoticed."""
    for (module, cls), begins in WRITERS.items():
        try:
            owner = getattr(importlib.import_module(module), cls, None)
        except ImportError:
            owner = None
        methods = [n for n in dir(owner) if n.startswith(begins)]
        if not methods:
            raise ValueError(
                "kvspray: this release of SGLang replaces weights in an unknown way "
                f"(no {cls} with {begins[0]}... in {module}), so nothing is stored or found; use "
                "0.5.23, or start without this storage backend"
            )
        for name in methods:
            method = getattr(owner, name)
            if not hasattr(method, "_kvspray"):
                setattr(owner, name, _counted(method))


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        _replaced[0] += 1
        return method(*args, **kwargs)

    call._kvspray = True  # type: ignore[attr-defined]
    return call


def _checkpoint(args: Any, log: logging.Logger, remedy: str) -> str:
    model = getattr(args, "model_path", None)
    if not model:
        raise ValueError(
            f"kvspray: this process has no server arguments, so the weights have no name; {remedy}"
        )
    load = str(getattr(getattr(args, "load_format", "auto"), "value", args.load_format))
    if load == "dummy":
        return f"dummy:{secrets.token_hex(16)}"  # random numbers, of this process alone
    cache = getattr(args, "download_dir", None)
    name = name_of(str(model), args.revision, cache, load, log, remedy)
    draft = getattr(args, "speculative_draft_model_path", None)
    if draft and draft != model:
        revision = getattr(args, "speculative_draft_model_revision", None)
        name += "+" + name_of(str(draft), revision, cache, load, log, remedy)
    return name


def arguments(args: Any) -> dict[str, str]:
    """Those of the server that change KV or its bytes."""
    return {k: str(getattr(args, k)) for k in _ARGUMENTS if hasattr(args, k)}


def hidden_order() -> dict[str, str]:
    """What may change the order or meaning of a page's bytes and is in no pool: the machine, and
    SGLang's variables that choose kernels."""
    import torch
    from sglang.srt.utils import cpu_has_amx_support

    hip = torch.version.hip
    machine = "cuda" if torch.version.cuda else f"hip {hip}" if hip else "cpu"
    if not torch.cuda.is_available():
        machine = "cpu with AMX" if cpu_has_amx_support() else "cpu"
    elif hip:
        machine += f" {torch.cuda.get_device_properties(0).gcnArchName}"
    found = {
        k: v
        for k, v in sorted(os.environ.items())
        if k.startswith("SGLANG_") and any(x in k for x in ("DSA", "AITER", "MAMBA", "HND"))
    }
    return {"machine": machine, **found}


def portable_identity(
    args: Any, weights: str, cache_dtype: str, is_mla: bool, model_config: Any
) -> tuple[str, dict[str, str]]:
    """The type of numbers and the identity that an engine of another kind has for the same cache.
    Raises portable.NotPortable."""
    dtype = str(model_config.dtype).removeprefix("torch.")
    override = str(getattr(args, "json_model_override_args", "") or "")
    same = ("auto", dtype, f"torch.{dtype}")
    load, impl, parser = (
        str(getattr(x, "value", x))
        for x in (
            getattr(args, n, "auto") for n in ("load_format", "model_impl", "model_config_parser")
        )
    )
    settings = {
        # The second one: of the checkpoint, or of what a platform does on its own.
        "quantization": getattr(args, "quantization", None)
        or getattr(model_config, "quantization", None),
        "quantize_and_serve": getattr(args, "quantize_and_serve", None),
        "modelopt_quant": getattr(args, "modelopt_quant", None),
        "rl_quant_profile": getattr(args, "rl_quant_profile", None),
        # The configuration of the checkpoint is what is compared, and this one may be another.
        "decrypted_config_file": getattr(args, "decrypted_config_file", None),
        "model_config_parser": "" if parser in ("auto", "hf") else parser,
        "model_impl": "" if impl in ("auto", "sglang") else impl,
        "load_format": "" if load in portable.LOAD_FORMATS else load,
        "kv_cache_dtype": "" if cache_dtype.removeprefix("torch.") in same else cache_dtype,
        "quantization_param_path": getattr(args, "quantization_param_path", None),
        "json_model_override_args": "" if override in ("", "{}") else override,
        "torchao_config": getattr(args, "torchao_config", None),
        "speculative_algorithm": getattr(args, "speculative_algorithm", None),
        "MLA": is_mla,
    }
    return dtype, portable.identity(
        args.model_path, weights=weights, dtype=dtype, settings=settings, revision=args.revision,
        cache=getattr(args, "download_dir", None),
    )  # fmt: skip


class Names:
    """Makes the namespaces of this rank's pages."""

    def __init__(self, config: Any, args: Any, weights: str, secret: bytes) -> None:
        self._config, self._args, self._weights, self._secret = config, args, weights, secret

    def of_pool(self, pool: Pool) -> Namespace:
        dtype = str(getattr(pool.host, "dtype", "opaque")).removeprefix("torch.")
        layout = pool.fingerprint(self._all(pool.name))
        return self._make(dtype, layout, pool.page_tokens, pool.page_bytes)

    def of_tensors(self, name: str, nbytes: int, dtype: str, layout: str, tokens: int) -> Namespace:
        """Pages that come as tensors, in the order of a host pool's ``layout``."""
        what = ["kvspray-sglang-flat-1", name, layout, self._all(name)]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
        return self._make(dtype, digest, tokens, nbytes)

    def _all(self, pool: str) -> list[object]:
        c = self._config
        names = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"]
        if not (c.is_mla_model and pool.startswith(_REPLICATED)):
            names += ["tp_rank", "tp_size"]
        ranks = {k: getattr(c, k, None) for k in names}
        return [
            ranks, arguments(self._args), numerics(), sys.byteorder, hidden_order(),
        ]  # fmt: skip

    def _make(self, dtype: str, layout: str, tokens: int, nbytes: int) -> Namespace:
        return Namespace(
            weights=self._weights,
            dtype=dtype,
            layout=layout,
            page_tokens=tokens,
            page_bytes=nbytes,
            algorithm=ALGORITHM,
            secret=self._secret,
        )
