# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode need of a server beside its pools: ways of serving that are refused, and
what the bytes of a cache depend on that no pool shows.
"""

from __future__ import annotations

import os
from typing import Any

from kvspray_sglang.pd_cache import CacheError


def serving(server_args: Any, parallel: Any) -> None:
    """Refuses ways of serving that move or replace the pages that are registered."""
    _check_order()
    for name, wanted, why in (
        ("attn_cp_size", 1, "context parallel ranks divide a prompt's pages"),
        ("attn_dcp_size", 1, "context parallel ranks divide a prompt's pages"),
        ("enable_kv_cache_sharding", False, "ranks divide a prompt's pages"),
    ):
        if getattr(parallel, name, wanted) != wanted:
            raise CacheError(
                f"kvspray: {name} is {getattr(parallel, name)}: {why}; use another transfer backend"
            )
    for name in (
        "enable_hisparse", "enable_memory_saver", "enable_pd_role_switch", "enable_unified_memory",
    ):  # fmt: skip
        if getattr(server_args, name, False):
            raise CacheError(
                f"kvspray: {name} is on, and the pages would not stay where they are registered; "
                f"start without --{name.replace('_', '-')}"
            )


def _check_order() -> None:
    """Refuses other orders of K and V in a page than tokens, then heads. SGLang takes the order
    from its environment, and its description of a pool does not show it."""
    from sglang.srt.environ import envs

    for name, usual in (("SGLANG_USE_HND_KVCACHE", "False"), ("SGLANG_AITER_KV_CACHE_LAYOUT", "nhd")):
        setting = getattr(envs, name, None)
        if setting is not None and str(setting.get()).lower() != usual.lower():
            raise CacheError(
                f"kvspray: {name} is {setting.get()}, an order of bytes in a page that kvspray "
                "does not transfer; unset it, or use another transfer backend"
            )


def has_indexer(server_args: Any) -> bool:
    """Whether SGLang's layers choose tokens by keys of an indexer (DSA)."""
    try:
        from sglang.srt.configs.model_config import is_deepseek_dsa
    except ImportError:  # in none of the releases before there is a state of this kind
        return False
    return bool(is_deepseek_dsa(model_config(server_args).hf_config))


def packing(server_args: Any, on_gpu: bool) -> str:
    """What the bytes of states depend on that no description of a pool shows: types of numbers, and
    orders that SGLang derives from the machine."""
    import torch

    amx = not on_gpu and torch.cpu._is_amx_tile_supported()
    return repr((
        getattr(server_args, "mamba_ssm_dtype", None),
        [os.environ.get(f"SGLANG_MAMBA_{x}_DTYPE", "") for x in ("CONV", "SSM")],
        "amx" if amx else "", torch.version.hip or "", os.environ.get("SGLANG_USE_AITER", ""),
    ))  # fmt: skip


def model_config(server_args: Any) -> Any:
    try:
        from sglang.srt.arg_groups.model_override_base import model_config_of
    except ImportError:  # before 0.5.20
        from sglang.srt.configs.model_config import ModelConfig

        model_config_of = ModelConfig.from_server_args
    return model_config_of(server_args)
