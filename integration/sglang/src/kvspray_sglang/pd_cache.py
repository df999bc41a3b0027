# SPDX-License-Identifier: Apache-2.0
"""A device pool of SGLang, as its ``KVArgs`` describe it, in the terms of a kvspray layout.

The pool keeps K and V of each layer in tensors of their own, and MLA's latent in one. A page of
``page_size`` tokens is a block. Pools with anything else (states, scales, drafts) are refused by
name: a part that stayed behind would be KV of another prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kvspray
from kvspray_sglang import memory

MAX_TENSORS = 1024  # flags of a board: docs/protocol.md
# A cache of other types has scales beside its pages.
_DTYPES = (
    "auto", "float32", "fp32", "float16", "fp16", "half", "bfloat16", "bf16", "fp8_e4m3",
    "fp8_e5m2", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


class CacheError(ValueError):
    """A pool, or a way of serving, that cannot be transferred; the text names it and the remedy."""


@dataclass(frozen=True)
class Heads:
    """KV heads of the model, and this rank's place among those that divide them."""

    total: int
    rank: int
    ranks: int

    @property
    def own(self) -> int:
        return max(1, self.total // self.ranks)


@dataclass(frozen=True)
class Cache:
    """What a session registers."""

    groups: list[dict[str, Any]]
    regions: list[kvspray.Region]
    page_tokens: int
    pages: int
    tensors: int  # one flag each

    def layout(self, dtype: str, identity: dict[str, str]) -> dict[str, Any]:
        return {"model": "sglang", "dtype": dtype, "groups": self.groups, "identity": identity}


def check(args: Any, is_mla: bool, pp_size: int) -> None:
    """Refuses what a transfer would leave behind."""
    states = getattr(args, "state_types", None) or []
    found: list[tuple[bool, str, str]] = [
        (
            bool(states),
            f"the model has states beside its pages ({', '.join(_value(t) for t in states)})",
            "sliding windows, indexers, scales and recurrent states",
        ),
        (bool(getattr(args, "num_draft_entries", 0)), "a draft model has a cache", "speculation"),
        (bool(getattr(args, "kv_layout", None)), f"the pool's layout is {args.kv_layout}", "it"),
        (pp_size != 1, f"pp_size is {pp_size}", "pipeline stages"),
        (
            str(args.kv_cache_dtype_str).removeprefix("torch.") not in _DTYPES,
            f"kv_cache_dtype is {args.kv_cache_dtype_str}",
            "caches with scales",
        ),
        (len(args.kv_data_ptrs) % (1 if is_mla else 2) != 0, "K and V are not in pairs", "it"),
        (
            not 0 < len(args.kv_data_ptrs) <= MAX_TENSORS,
            f"the pool has {len(args.kv_data_ptrs)} tensors, want 1 to {MAX_TENSORS}",
            "more",
        ),
    ]
    for wrong, what, those in found:
        if wrong:
            raise CacheError(
                f"kvspray: {what}, and --disaggregation-transfer-backend kvspray does not transfer "
                f"{those}; use another transfer backend"
            )


def describe(args: Any, heads: Heads | None, gpu: bool) -> Cache:
    """``heads``: None for MLA, whose latent is on every rank."""
    pages = min(n // item for n, item in zip(args.kv_data_lens, args.kv_item_lens, strict=True))
    spans = [
        (int(p), int(p) + int(n)) for p, n in zip(args.kv_data_ptrs, args.kv_data_lens, strict=True)
    ]
    if gpu:
        regions = [kvspray.Region.gpu(start, end - start) for start, end in spans]
    else:
        regions = memory.process_regions(spans)
    layers = [
        _layer(i, start, end, int(item), regions)
        for i, ((start, end), item) in enumerate(zip(spans, args.kv_item_lens, strict=True))
    ]
    page = int(args.page_size)
    if heads is None:
        groups = [_group(page, pages, "mla", {}, layers, "")]
    else:
        params = {
            "kv_heads": heads.total, "heads": heads.own, "tp_rank": heads.rank,
            "tp_size": heads.ranks,
        }  # fmt: skip
        for x in layers:
            if x["page_bytes"] % (page * heads.own):
                raise CacheError(
                    f"kvspray: a page of {page} tokens has {x['page_bytes']} bytes, which "
                    f"{heads.own} heads do not divide; use another transfer backend"
                )
        half = len(layers) // 2
        groups = [
            _group(page, pages, "sglang_k", params, layers[:half], "#k"),
            _group(page, pages, "sglang_v", params, layers[half:], "#v") | {"same_table": True},
        ]
    return Cache(groups, regions, page, pages, len(layers))


def _layer(
    index: int, start: int, end: int, page_bytes: int, regions: Sequence[kvspray.Region]
) -> dict[str, Any]:
    for n, r in enumerate(regions):
        if r.addr <= start and end <= r.addr + r.nbytes:
            return {
                "index": index, "region": n, "base": start - r.addr, "block_stride": page_bytes,
                "page_bytes": page_bytes,
            }  # fmt: skip
    raise CacheError(f"kvspray: tensor {index} of the pool is in no region")


def _group(
    page: int, pages: int, strategy: str, params: dict[str, int], layers: list[dict[str, Any]],
    suffix: str,
) -> dict[str, Any]:  # fmt: skip
    named = [{"name": f"layers.{i}{suffix}", **x} for i, x in enumerate(layers)]
    return {
        "tokens_per_block": page, "strategy": strategy, "params": params, "num_blocks": pages,
        "layers": named,
    }  # fmt: skip


def identity(weights: str, server: dict[str, str], layers: int, head_size: int) -> dict[str, str]:
    """What prefill and decode compare. ``server``: arguments and versions that change KV."""
    config = hashlib.sha256(json.dumps(server, sort_keys=True).encode()).hexdigest()
    return kvspray.identity(
        model_config=config, weights=weights, layers=layers, head_size=head_size, groups="full",
        rope="", backoff=0, speculative="",
    )  # fmt: skip


def _value(state: Any) -> str:
    return str(getattr(state, "value", state))
