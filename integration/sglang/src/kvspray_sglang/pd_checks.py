"""Checks of a server's options, and what a cache's bytes depend on that no pool shows."""

from __future__ import annotations

from typing import Any

from kvspray_sglang import names
from kvspray_sglang.pd_cache import CacheError


def serving(server_args: Any, parallel: Any, is_mla: bool) -> None:
    """Refuses options that move, divide or reorder the registered pages."""
    if not is_mla:
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


def holding() -> None:
    """Refuses a decode server whose queue was made without the plug-in's hook."""
    from sglang.srt.disaggregation.decode import DecodeTransferQueue

    if not getattr(DecodeTransferQueue, "kvspray_holds", False):
        raise CacheError(
            "kvspray: SGLang gives pages of a failed request back while they may still be written "
            "to: it has not called kvspray's hook of DecodeTransferQueue.__init__ (its log has the "
            "reason); use SGLang 0.5.22 or 0.5.23, or another --disaggregation-transfer-backend"
        )


def _check_order() -> None:
    """Refuses K and V in another order than NHD (tokens, then heads). SGLang takes the order from
    its environment, and its description of a pool does not show it."""
    import torch
    from sglang.srt.environ import envs

    orders = [("SGLANG_USE_HND_KVCACHE", "False")]
    if torch.version.hip:
        orders.append(("SGLANG_AITER_KV_CACHE_LAYOUT", "nhd"))
    for name, usual in orders:
        setting = getattr(envs, name, None)
        if setting is not None and str(setting.get()).lower() != usual.lower():
            raise CacheError(
                f"kvspray: {name} is {setting.get()}, an order of bytes in a page that kvspray "
                "does not transfer; unset it, or use another transfer backend"
            )


def has_indexer(server_args: Any) -> bool:
    """Whether the model selects tokens with an indexer (DSA)."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return bool(is_deepseek_dsa(model_config(server_args).hf_config))


def packing(server_args: Any) -> str:
    """What the bytes of states depend on that no pool shows: data types, and orders that SGLang
    derives from its arguments, its environment and the machine."""
    arguments = {
        name: str(getattr(server_args, name, None))
        for name in ("mamba_ssm_dtype", "enable_dsa_fused_indexer")
    }
    return ", ".join(f"{k}={v}" for k, v in {**arguments, **names.hidden_order()}.items())


def model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)
