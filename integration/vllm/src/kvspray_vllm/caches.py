# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of vLLM's KV cache lie, in kvspray's words: per layer a region, a base, a block stride and the bytes of a
page.

Shapes are never described: engines keep changing them, and the bytes stay. The strategy, named per cache group, tells the
sidecar's parseblock which bytes of a page mean what. Nothing here depends on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvspray_vllm.layout import CPU_ATTN, Ranks, Unsupported, flag_indices, spec_of, strategy_of

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class Storage:
    """Memory of the engine that holds layers: what a tensor is a view of."""

    address: int
    nbytes: int
    device: torch.device


@dataclass(frozen=True)
class Site:
    """Where a storage is found: in which of the registered regions, and how many bytes behind its start."""

    region: int
    offset: int = 0


@dataclass(frozen=True)
class Description:
    """The cache of one worker. The layers of groups name their storage; placed() names their region instead."""

    groups: list[dict[str, Any]]
    storages: tuple[Storage, ...]
    tensors: tuple[torch.Tensor, ...]  # each memory once, blocks in the first dimension

    def placed(self, sites: Sequence[Site]) -> list[dict[str, Any]]:
        """The groups as REGISTER has them, where sites are those of the storages."""
        return [group | {"layers": [_placed(layer, sites) for layer in group["layers"]]} for group in self.groups]

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for view in self.tensors:
            for a, b in zip(src, dst, strict=True):
                view[b].copy_(view[a])


def _placed(layer: dict[str, Any], sites: Sequence[Site]) -> dict[str, Any]:
    site = sites[layer["storage"]]
    out = {k: v for k, v in layer.items() if k != "storage"}
    return out | {"region": site.region, "base": layer["base"] + site.offset}


def describe(
    kv: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    backends: Mapping[str, str],
    *,
    cache_layout: str | None,
    kv_heads: int,
    ranks: Ranks,
    packing: str,
) -> Description:
    """Describes the layers of a worker. backends: the attention backend of each layer; kv_heads: of the whole model."""
    flags = flag_indices(kv)
    storages: dict[int, tuple[int, Storage]] = {}  # by address
    groups: list[dict[str, Any]] = []

    def chosen_for(group: KVCacheGroupSpec, backend: str, layer: str | None = None) -> tuple[str, dict[str, int]]:
        return strategy_of(spec_of(group, layer), backend, cache_layout, kv_heads, ranks, packing)

    for group in kv.kv_cache_groups:
        described: list[dict[str, Any]] = []
        chosen: tuple[str, dict[str, int]] | None = None
        for name in group.layer_names:
            place = place_of(tensors[name], kv.num_blocks)
            this = chosen_for(group, backends.get(name, ""), name)
            this = this[0], place_params(name, place, *this)
            if chosen is not None and chosen != this:
                raise Unsupported(f"kvspray: layer {name} is laid out as {this}, others of its cache group as {chosen}")
            chosen = this
            index, _ = storages.setdefault(place.storage.address, (len(storages), place.storage))
            described.append(
                {
                    "name": name,
                    "index": flags[name],
                    "storage": index,
                    "base": place.base,
                    "block_stride": place.block_stride,
                    "page_bytes": place.page_bytes,
                }
            )
        if chosen is None:  # this pipeline stage has no layer of the group, only its block tables
            chosen = chosen_for(group, CPU_ATTN)
        groups.append(
            {
                "tokens_per_block": group.kv_cache_spec.block_size,
                "strategy": chosen[0],
                "params": chosen[1],
                "num_blocks": kv.num_blocks,
                "layers": described,
            }
        )
    # Layers may share their tensor, which is copied once.
    views = {t.data_ptr(): t.unflatten(0, (kv.num_blocks, -1)) for t in (tensors[name] for g in kv.kv_cache_groups for name in g.layer_names)}
    return Description(groups, tuple(s for _, s in storages.values()), tuple(views.values()))


@dataclass(frozen=True)
class Place:
    """Where a layer lies: bytes from the start of the storage that it is a view of."""

    storage: Storage
    base: int
    block_stride: int
    page_bytes: int
    blocks: int
    pieces: int = 1  # kernel blocks of a block
    strides: tuple[tuple[str, int], ...] = ()  # bytes between heads and between tokens, where other layers lie between them


def place_of(tensor: torch.Tensor, num_blocks: int) -> Place:
    """The place of one layer's view. Its first dimension counts blocks, or pieces of blocks that follow one another."""
    size = tensor.element_size()
    storage = tensor.untyped_storage()
    rows, row_stride = tensor.shape[0], tensor.stride(0) * size
    if rows % num_blocks:
        raise Unsupported(f"kvspray: a KV cache of {rows} rows does not hold {num_blocks} blocks")
    pieces = rows // num_blocks
    row_bytes = tensor[0].numel() * size
    strides: tuple[tuple[str, int], ...] = ()
    if not _dense(tensor[0]):
        if tensor.dim() != 4 or tensor.stride(3) != 1 or pieces > 1:
            raise Unsupported(f"kvspray: a page with shape {tuple(tensor.shape[1:])} and strides {tensor.stride()[1:]} has holes")
        # vLLM's views are [block, head, token, content] whatever the order in memory.
        strides = (("head_stride", tensor.stride(1) * size), ("row_stride", tensor.stride(2) * size))
    if pieces > 1 and row_stride != row_bytes:
        raise Unsupported(f"kvspray: a block of {pieces} pieces with {row_stride - row_bytes} bytes between them has holes")
    memory = Storage(storage.data_ptr(), storage.nbytes(), tensor.device)
    return Place(memory, tensor.storage_offset() * size, row_stride * pieces, row_bytes * pieces, num_blocks, pieces, strides)


def place_params(name: str, place: Place, strategy: str, params: dict[str, int]) -> dict[str, int]:
    """The parameters of a strategy with those of the place. Refuses what the strategy cannot say."""
    if place.pieces > 1 and strategy != "packed_nhd" and strategy != "mla":
        # With tokens outside, pieces in a row are one block; with heads outside they are a block of blocks.
        raise Unsupported(f"kvspray: layer {name}: a block holds {place.pieces} kernel blocks whose heads lie outside; set block_size to the kernel's")
    if place.strides and not strategy.startswith("packed_"):
        raise Unsupported(f"kvspray: layer {name}: pages of {strategy} with other layers between their tokens are not supported")
    return params | dict(place.strides)


def _dense(t: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order of the dimensions."""
    want = 1
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n == 1:
            continue
        if stride != want:
            return False
        want *= n
    return True
