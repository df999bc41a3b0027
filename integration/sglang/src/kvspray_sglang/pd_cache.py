"""A device pool of SGLang, as its ``KVArgs`` describe it, in the terms of a kvspray layout.

The pool keeps K and V of each layer in tensors of their own, and MLA's latent in one. A page of
``page_size`` tokens is a block. Each component of a request's state (SGLang's term) has its own
tensors, list of blocks and layout. Pools with anything else (scales, drafts,
other components) are refused by name: a part that stayed behind would be KV of another prompt.
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
# Components that move: K and V of sliding windows, the keys of DSA's indexer, recurrent states.
STATES = ("swa", "dsa", "mamba")
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
    page_tokens: int  # of a block
    pages: int
    tensors: int  # one flag each

    def layout(self, dtype: str, identity: dict[str, str]) -> dict[str, Any]:
        return {"model": "sglang", "dtype": dtype, "groups": self.groups, "identity": identity}


@dataclass(frozen=True)
class State:
    """A component of a request's state."""

    name: str
    cache: Cache
    own: bool  # bytes differ between ranks: rank i exchanges it with rank i only


def check(args: Any, is_mla: bool, pp_size: int, is_dsa: bool = False) -> None:
    """Refuses what a transfer would leave behind. ``is_dsa``: the model has an indexer."""
    states = [_value(t) for t in getattr(args, "state_types", None) or []]
    other = [t for t in states if t not in STATES]
    unequal = [
        f"{name} has {len(ptrs)} tensors"
        for name, ptrs in zip(states, getattr(args, "state_data_ptrs", None) or [], strict=False)
        if not 0 < len(ptrs) <= MAX_TENSORS
    ]
    order = getattr(args, "kv_layout", None)  # SGLang 0.5.22 has none
    found: list[tuple[bool, str, str]] = [
        (bool(other), f"the model has states of the kind {', '.join(other)}", "them"),
        (len(set(states)) != len(states), f"a kind of state is there twice ({states})", "that"),
        (bool(unequal), f"{', '.join(unequal)}, want 1 to {MAX_TENSORS} each", "that"),
        (
            is_dsa and "dsa" not in states,
            "the model has an indexer, whose keys SGLang does not describe",
            "them",
        ),
        (
            "swa" in states and getattr(args, "swa_kv_cache_layout", None) != "nhd",
            f"the order in a window's pages is {getattr(args, 'swa_kv_cache_layout', None)}",
            "any but nhd",
        ),
        (bool(getattr(args, "num_draft_entries", 0)), "a draft model has a cache", "speculation"),
        (bool(order), f"the pool's layout is {order}", "it"),
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
    page = int(args.page_size)
    regions, layers, pages = _tensors(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, gpu)
    if heads is None:
        groups = [_group(page, pages, "mla", {}, layers, "")]
    else:
        groups = _k_and_v(page, pages, heads, layers)
    return Cache(groups, regions, page, pages, len(layers))


def states(args: Any, heads: Heads | None, gpu: bool) -> list[State]:
    """The components of a request's state, in SGLang's order. ``heads``: of sliding windows."""
    out = []
    for i, kind in enumerate(getattr(args, "state_types", None) or []):
        name = _value(kind)
        regions, layers, blocks = _tensors(
            args.state_data_ptrs[i], args.state_data_lens[i], args.state_item_lens[i], gpu
        )
        if name == "swa" and heads is not None:
            page, own = int(args.page_size), False
            groups = _k_and_v(page, blocks, heads, layers)
        else:
            # Opaque blocks. The indexer's are equal on all ranks.
            page, own = 1, name != "dsa"
            groups = [_group(page, blocks, "page", {}, layers, "")]
        out.append(State(name, Cache(groups, regions, page, blocks, len(layers)), own))
    return out


def _tensors(
    ptrs: Sequence[int], lens: Sequence[int], items: Sequence[int], gpu: bool
) -> tuple[list[kvspray.Region], list[dict[str, Any]], int]:
    """Regions, layers, and the number of blocks that every tensor has. ``items``: bytes of a block;
    0 for a layer that has none, because it uses what another layer has computed."""
    own = [i for i, item in enumerate(items) if item]
    if not own:
        raise CacheError("kvspray: a pool without any bytes; use another transfer backend")
    spans = [(int(ptrs[i]), int(ptrs[i]) + int(lens[i])) for i in own]
    if gpu:
        regions = [kvspray.Region.gpu(start, end - start) for start, end in spans]
    else:
        regions = memory.process_regions(spans)
    layers = [
        _layer(i, flag, span, int(items[i]), regions)
        for flag, (i, span) in enumerate(zip(own, spans, strict=True))
    ]
    return regions, layers, min(int(lens[i]) // int(items[i]) for i in own)


def _k_and_v(
    page: int, pages: int, heads: Heads, layers: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    half = len(layers) // 2
    params = {
        "kv_heads": heads.total, "heads": heads.own, "tp_rank": heads.rank,
        "tp_size": heads.ranks,
    }  # fmt: skip
    groups = []
    for name, own in (("k", layers[:half]), ("v", layers[half:])):
        own = [x | {"name": f"layers.{i}"} for i, x in enumerate(own)]
        for x in own:
            if x["page_bytes"] % (page * heads.own):
                raise CacheError(
                    f"kvspray: a page of {page} tokens has {x['page_bytes']} bytes, which "
                    f"{heads.own} heads do not divide; use another transfer backend"
                )
        groups.append(_group(page, pages, f"sglang_{name}", params, own, f"#{name}"))
    groups[1]["same_table"] = True
    return groups


def _layer(
    number: int, flag: int, span: tuple[int, int], page_bytes: int,
    regions: Sequence[kvspray.Region],
) -> dict[str, Any]:  # fmt: skip
    start, end = span
    for n, r in enumerate(regions):
        if r.addr <= start and end <= r.addr + r.nbytes:
            return {
                "name": f"layers.{number}", "index": flag, "region": n, "base": start - r.addr,
                "block_stride": page_bytes, "page_bytes": page_bytes,
            }  # fmt: skip
    raise CacheError(f"kvspray: tensor {number} of the pool is in no region")


def _group(
    page: int, pages: int, strategy: str, params: dict[str, int], layers: list[dict[str, Any]],
    suffix: str,
) -> dict[str, Any]:  # fmt: skip
    named = [x | {"name": x["name"] + suffix} for x in layers]
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


def state_identity(
    identity: dict[str, str], args: Any, state: State, rank: int, ranks: int, packing: str
) -> dict[str, str]:
    """What prefill and decode compare before a component moves. ``packing``: what an opaque block
    depends on that neither the model nor ``args`` shows."""
    more = {"groups": state.name}
    if state.cache.groups[0]["strategy"] == "page":
        i = [_value(t) for t in args.state_types].index(state.name)
        shapes = [
            str(getattr(args, name, [[]] * (i + 1))[i])
            for name in (
                "state_item_lens", "state_dim_per_tensor", "state_conv_shard_groups",
                "state_slice_outer_counts",
            )
        ]  # fmt: skip
        more["packing"] = packing
        more["shapes"] = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    if state.own:
        more["rank"] = f"{rank} of {ranks}"
    return {**identity, **more}


def _value(state: Any) -> str:
    return str(getattr(state, "value", state))
