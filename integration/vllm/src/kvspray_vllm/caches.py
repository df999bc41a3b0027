"""Where the tensors of vLLM's KV cache lie, in kvspray's terms: per layer a region, a base, a block
stride and the bytes of a page.

Shapes are never described: engines keep changing them, and the bytes stay. The strategy, named
per cache group, gives the sidecar's parseblock the meaning of a page's bytes. Nothing here
depends on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvspray_vllm.layout import Ranks, flag_indices, spec_of
from kvspray_vllm.states import is_state, state_kind
from kvspray_vllm.strategies import CPU_ATTN, DEEPSEEK_V4, MLA, PACKED, Kind, Unsupported, kind_of

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


@dataclass(frozen=True)
class Storage:
    """Memory of the engine that holds layers: what a tensor is a view of."""

    address: int
    nbytes: int
    device: torch.device


@dataclass(frozen=True)
class Site:
    """Where a storage is found: in which of the registered regions, and how many bytes behind
    its start."""

    region: int
    offset: int = 0


@dataclass(frozen=True)
class Description:
    """The cache of one worker. The layers of groups name their storage; placed() names their
    region instead."""

    groups: list[dict[str, Any]]
    storages: tuple[Storage, ...]

    def placed(self, sites: Sequence[Site]) -> list[dict[str, Any]]:
        """The groups as REGISTER has them, where sites are those of the storages."""
        return [
            group | {"layers": [_placed(layer, sites) for layer in group["layers"]]}
            for group in self.groups
        ]


def _placed(layer: dict[str, Any], sites: Sequence[Site]) -> dict[str, Any]:
    site = sites[layer["storage"]]
    out = {k: v for k, v in layer.items() if k != "storage"}
    return out | {"region": site.region, "base": layer["base"] + site.offset}


def describe(
    kv: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    backends: Mapping[str, str],
    *,
    kv_heads: Sequence[int],
    ranks: Ranks,
    packing: str,
    flags: Mapping[str, int] | None = None,
    state_groups: int = 0,
) -> Description:
    """Describes the layers of a worker.

    backends: the attention backend of each layer. kv_heads: of the model, all ranks together, and
    of its draft model where that has others. flags: the layers that are described, and the flag of
    each; those of kv where it is left out. state_groups: of states.groups_of.

    A cache group of vLLM is layers that share a block table. It is one group here, or, where its
    layers have several strategies, one for each of them, the later ones with same_table.
    """
    for g in kv.kv_cache_groups:
        if g.host_resident or not g.enable_kv_transfer:
            raise Unsupported(
                "kvspray: hisparse is on; a cache that lies in two places is not followed, serve "
                "without hisparse_config"
            )
    flags = flag_indices(kv) if flags is None else flags
    storages: dict[int, tuple[int, Storage]] = {}  # by address
    groups: list[dict[str, Any]] = []
    for group in kv.kv_cache_groups:
        names = [name for name in group.layer_names if name in flags]
        of_table: list[dict[str, Any]] = []
        for name in names:
            tensor = tensors[name]
            spec = spec_of(group, name)
            strategy, params, place = layer_of(
                name,
                spec,
                tensor,
                kv.num_blocks,
                backends.get(name, ""),
                kv_heads,
                ranks,
                packing,
                state_groups,
            )
            same = next(
                (g for g in of_table if (g["strategy"], g["params"]) == (strategy, params)), None
            )
            if same is None:
                same = _group(kv, group, strategy, params)
                of_table.append(same)
            index, _ = storages.setdefault(place.storage.address, (len(storages), place.storage))
            same["layers"].append(
                {
                    "name": name,
                    "index": flags[name],
                    "storage": index,
                    "base": place.base,
                    "block_stride": place.block_stride,
                    "page_bytes": place.page_bytes,
                }
            )
        if not of_table:
            of_table.append(_empty(kv, group, backends, kv_heads, ranks, packing, state_groups))
        for g in of_table[1:]:
            g["same_table"] = True
        groups += of_table
    return Description(groups, tuple(s for _, s in storages.values()))


def _heads(spec: KVCacheSpec, kv_heads: Sequence[int], ranks: Ranks) -> int:
    """The KV heads of a layer, all ranks together. One rank has all of them, also where layers
    differ; of several ranks each layer has the model's or its draft's, by what this rank has of
    them."""
    own = getattr(spec, "num_kv_heads", 1)
    if ranks.tp_size == 1:
        return int(own)
    fit = [n for n in kv_heads if own == max(1, n // ranks.tp_size)]
    if len(fit) > 1:
        raise Unsupported(
            f"kvspray: with tensor_parallel_size {ranks.tp_size} a layer of {own} KV heads on a "
            f"rank may be one of a model of {fit[0]} or of {fit[1]}; "
            "give the draft model as many KV heads as the model has, or use fewer ranks"
        )
    return fit[0] if fit else kv_heads[0]


def layer_of(
    name: str,
    spec: KVCacheSpec,
    tensor: torch.Tensor,
    num_blocks: int,
    backend: str,
    kv_heads: Sequence[int],
    ranks: Ranks,
    packing: str,
    state_groups: int = 0,
) -> tuple[str, dict[str, int], Place]:
    """The strategy of one layer, its parameters, and the place of its pages."""
    if is_state(spec):
        kind = state_kind(spec, backend, ranks, state_groups, tensor.device.type)
    else:
        kind = kind_of(spec, backend, _heads(spec, kv_heads, ranks), ranks, packing)
    place = place_of(name, tensor, num_blocks)
    return *place_params(name, place, kind, spec.block_size), place


def _group(
    kv: KVCacheConfig, group: KVCacheGroupSpec, strategy: str, params: dict[str, int]
) -> dict[str, Any]:
    return {
        "tokens_per_block": group.kv_cache_spec.block_size,
        "strategy": strategy,
        "params": params,
        "num_blocks": kv.num_blocks,
        "layers": [],
    }


def _empty(
    kv: KVCacheConfig,
    group: KVCacheGroupSpec,
    backends: Mapping[str, str],
    kv_heads: Sequence[int],
    ranks: Ranks,
    packing: str,
    state_groups: int,
) -> dict[str, Any]:
    """A group of which this pipeline stage has no layer, only its block tables. Its window
    counts, and so does what it cannot be served for; its strategy is that of a layer with a
    backend of this stage, or of one that an engine on this device has by default."""
    spec = spec_of(group)
    if is_state(spec):
        backend = spec.mamba_type.get_class().get_name()
        kind = state_kind(spec, backend, ranks, state_groups, "")
        return _group(kv, group, kind.strategy, kind.params)
    heads = _heads(spec, kv_heads, ranks)
    default = ((CPU_ATTN,) if packing else PACKED) + MLA + DEEPSEEK_V4
    refused: Unsupported | None = None
    for backend in (*backends.values(), *default):
        try:
            kind = kind_of(spec, backend, heads, ranks, packing)
        except Unsupported as err:
            refused = refused or err
            continue
        return _group(kv, group, kind.strategy + ("_nhd" if kind.ordered else ""), kind.params)
    raise refused or Unsupported(
        "kvspray: a cache group of a pipeline stage has no layer and no known backend"
    )


@dataclass(frozen=True)
class Place:
    """Where a layer lies: bytes from the start of the storage that it is a view of."""

    storage: Storage
    base: int
    block_stride: int
    page_bytes: int  # without what lies between pages
    blocks: int
    pieces: int  # kernel blocks of a block, each dense, one behind the other
    heads_outside: bool  # a head's tokens lie closer to each other than a token's heads do
    strides: tuple[
        tuple[str, int], ...
    ] = ()  # bytes between heads and between tokens, where other layers lie between them


def place_of(name: str, tensor: torch.Tensor, num_blocks: int) -> Place:
    """The place of one layer's view, [block, head, token, content] whatever the order in memory.
    Its first dimension counts blocks, or pieces of blocks that follow one another."""
    size = tensor.element_size()
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise Unsupported(
            f"kvspray: layer {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
            "not [block, head, token, content]"
        )
    storage = tensor.untyped_storage()
    rows, row_stride = tensor.shape[0], tensor.stride(0) * size
    if rows % num_blocks:
        raise Unsupported(
            f"kvspray: layer {name}: a KV cache of {rows} rows does not hold {num_blocks} blocks"
        )
    pieces = rows // num_blocks
    row_bytes = tensor[0].numel() * size
    strides: tuple[tuple[str, int], ...] = ()
    if not _dense(tensor[0]):
        if pieces > 1:
            raise Unsupported(
                f"kvspray: layer {name}: kernel blocks with shape {tuple(tensor.shape[1:])} and "
                f"strides {tensor.stride()[1:]} have holes"
            )
        strides = (
            ("head_stride", tensor.stride(1) * size),
            ("row_stride", tensor.stride(2) * size),
        )
    if pieces > 1 and row_stride != row_bytes:
        raise Unsupported(
            f"kvspray: layer {name}: a block of {pieces} pieces with {row_stride - row_bytes} "
            "bytes between them has holes"
        )
    outside = tensor.shape[1] > 1 and tensor.shape[2] > 1 and tensor.stride(1) > tensor.stride(2)
    memory = Storage(storage.data_ptr(), storage.nbytes(), tensor.device)
    return Place(
        memory,
        tensor.storage_offset() * size,
        row_stride * pieces,
        row_bytes * pieces,
        num_blocks,
        pieces,
        outside,
        strides,
    )


def place_params(
    name: str, place: Place, kind: Kind, block_size: int
) -> tuple[str, dict[str, int]]:
    """The strategy of a layer and its parameters with those of its place. Refuses what the
    strategy cannot describe."""
    strategy, params = kind.strategy, dict(kind.params)
    if kind.ordered:
        strategy += "_hnd" if place.heads_outside else "_nhd"
    if place.pieces > 1 and (kind.paged or strategy.endswith("_hnd")):
        # With tokens outside, pieces in a row are one block. Otherwise each is a page of its own.
        params["kernel_tokens"] = block_size // place.pieces
    elif kind.strategy == "dsa_indexer":
        params["kernel_tokens"] = block_size
    if place.pieces > 1 and strategy in ("vllm_cpu_attn", "deepseek_v4"):
        raise Unsupported(
            f"kvspray: layer {name}: a block of {strategy} holds {place.pieces} kernel blocks; set "
            f"block_size to the kernel's, {block_size // place.pieces}"
        )
    if place.strides and not kind.ordered or place.strides and kind.paged:
        raise Unsupported(
            f"kvspray: layer {name}: pages of {strategy} with other layers between their tokens "
            "are not supported; set VLLM_KV_CACHE_LAYOUT to LBNHC"
        )
    return strategy, params | dict(place.strides)


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
