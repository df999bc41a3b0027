"""Pages of the node's store, seen from vLLM's configuration: which engines can use the store, what
identifies their pages, and where the parts of a page lie in the engine's memory.

A page of the store is one block of vLLM over all layers of a rank. vLLM's hash of the block names
it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvspray_vllm.layout import Ranks, Unsupported, spec_of, state_groups_of, windows_of
from kvspray_vllm.shim import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A draft layer of these computes the last token of a page from the first token of the next one,
# which is not in the page's hash.
LOOKING_AHEAD = ("eagle", "eagle3", "mtp")
# Hashes that begin with a fixed seed where PYTHONHASHSEED is not set, in releases of vLLM that have
# one.
SEEDED = ("sha256", "sha256_cbor")
MAX_SEED_BYTES = 128


def check_store(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Refuses at start what the store does not serve."""
    transfer = config.kv_transfer_config
    parallel = config.parallel_config
    # vLLM defers the freeing of blocks that a step may still write for engines that receive, and
    # the role shows which do.
    if transfer.kv_role != "kv_both":
        raise Unsupported(
            f"kvspray: store is on with kv_role {transfer.kv_role}; pages are sent and received, "
            "set kv_both"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise Unsupported(
            f"kvspray: store is on with kv_load_failure_policy {transfer.kv_load_failure_policy}; "
            "a page that is gone when it is loaded would end its request, set recompute"
        )
    device = config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise Unsupported(
            f"kvspray: store is on, and the engine's device is {device}; the store serves engines "
            "on CPUs and CUDA GPUs, set store to false"
        )
    states = state_groups_of(kv)
    if states:
        _check_states(config, kv)
    if len(kv.kv_cache_groups) != 1 + len(states) or any(windows_of(kv)):
        raise Unsupported(
            f"kvspray: store is on, and the model has {len(kv.kv_cache_groups)} cache group(s) "
            f"with windows of {windows_of(kv)} tokens; the store serves models with one group of "
            "attention and no window, set store to false"
        )
    if parallel.pipeline_parallel_size != 1:
        raise Unsupported(
            f"kvspray: store is on with pipeline_parallel_size {parallel.pipeline_parallel_size}; "
            "set it to 1, or store to false"
        )
    spec = config.speculative_config
    if spec is not None and str(spec.method) in LOOKING_AHEAD:
        raise Unsupported(
            f"kvspray: store is on with speculative_config.method {spec.method}; its layers hold "
            "more than the hash of a page names, use another method, or set store to false"
        )
    hash_seed(str(config.cache_config.prefix_caching_hash_algo))


def _check_states(config: VllmConfig, kv: KVCacheConfig) -> None:
    """A page of tokens is of use only with the states after its last token, which vLLM keeps at the
    ends of blocks, of all groups alike."""
    cache = config.cache_config
    modes = {spec_of(kv.kv_cache_groups[g]).mamba_cache_mode for g in state_groups_of(kv)}
    sizes = {g.kv_cache_spec.block_size for g in kv.kv_cache_groups}
    if modes != {"align"}:
        raise Unsupported(
            f"kvspray: store is on, and mamba_cache_mode is {', '.join(sorted(modes))}: vLLM keeps "
            "no recurrent states at the ends of blocks; set enable_prefix_caching, or store to "
            "false"
        )
    if len(sizes) != 1 or cache.prefix_match_unit is not None:
        raise Unsupported(
            f"kvspray: store is on, and the blocks of a model with recurrent states have "
            f"{sorted(sizes)} tokens, with prefix_match_unit {cache.prefix_match_unit}; the store "
            "serves blocks of one size without it, set store to false"
        )


def hash_seed(algorithm: str) -> str:
    """What the hashes of this process begin with. Refuses those that begin with something else in
    every process."""
    from vllm.v1.core import kv_cache_utils

    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        text = f"PYTHONHASHSEED={seed}"
        return (
            text
            if len(text) <= MAX_SEED_BYTES
            else "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        )
    if algorithm not in SEEDED:
        raise Unsupported(
            f"kvspray: store is on with prefix_caching_hash_algo {algorithm}, and PYTHONHASHSEED "
            "is not set: block hashes begin with random bytes in each process, so no engine would "
            "find another's pages; set PYTHONHASHSEED to one value for all engines, or "
            "prefix_caching_hash_algo to sha256_cbor"
        )
    return f"default={kv_cache_utils.DEFAULT_NONE_HASH_SEED}"


def namespace_of(
    config: VllmConfig,
    identity: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    ranks: Ranks,
) -> Namespace:
    """Of one rank. identity: as prefill and decode compare it. groups: the layers of this rank."""
    if not identity["weights"]:
        raise Unsupported(
            "kvspray: store is on, and the name of the weights is empty: pages of other weights "
            "without a name would be found; give set_weights a name, or set weights in "
            "kv_connector_extra_config"
        )
    (page_tokens,) = {g["tokens_per_block"] for g in groups}
    page = [
        [
            g["strategy"],
            sorted(g["params"].items()),
            [[layer["name"], layer["page_bytes"]] for layer in g["layers"]],
        ]
        for g in groups
    ]
    layout = {k: v for k, v in identity.items() if k != "weights"}
    text = json.dumps(
        [layout, [ranks.tp, ranks.tp_size, ranks.pp, ranks.pp_size], page], sort_keys=True
    )
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    return Namespace(
        weights=identity["weights"],
        dtype=identity["cache_dtype"] if identity["cache_dtype"] != "auto" else identity["dtype"],
        layout="vllm:" + hashlib.sha256(text.encode()).hexdigest(),
        page_tokens=page_tokens,
        page_bytes=sum(length for _, _, _, length in pieces_of(groups)),
        algorithm="vllm-" + algorithm,
        seed=hash_seed(algorithm),
    )


def pieces_of(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int, int]]:
    """(region, base, stride, length) of each part of a block, in the order of the layers. Layers
    that share their memory have it once. A block belongs to one cache group at a time, so a page
    has the memory of all groups."""
    out: dict[tuple[int, int, int], int] = {}
    for g in groups:
        if "row_stride" in g["params"]:
            raise Unsupported(
                "kvspray: store is on, and other layers lie between the tokens of a page; set "
                "VLLM_KV_CACHE_LAYOUT to LBHNC, or store to false"
            )
        for layer in g["layers"]:
            place = (layer["region"], layer["base"], layer["block_stride"])
            out[place] = max(out.get(place, 0), layer["page_bytes"])
    return [(*place, length) for place, length in out.items()]
