"""The strategy of a layer (the sidecar's parseblock) from vLLM's specification of its cache and its
attention backend.

Only pages whose bytes are known are served. Everything else is refused by the name of the field
or the backend, before the engine serves: a page taken for another one would be a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class Ranks:
    """Which rank this worker is: its pipeline stage, and its part of the heads."""

    pp: int = 0
    pp_size: int = 1
    tp: int = 0
    tp_size: int = 1


class Unsupported(ValueError):
    """This engine's configuration is not supported; the text names the setting and the remedy."""


CPU_ATTN = "CPU_ATTN"  # of every layer of a CPU engine but MLA's

# Backends that leave K and V of a head of a token beside each other as numbers. Others, ROCm's
# among them, tile a page of the same
# shape. Those of DIFF_KV have V of another width than K.
DIFF_KV = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
PACKED = (
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "MINIMAX_M3_SPARSE",
    "CUTLASS_MSA",
    "TRITON_MSA",
    *DIFF_KV,
)

# Backends of the indexer of sparse attention. A page of the first ones holds the keys of all its
# tokens and then their scales.
SCALED_INDEXERS = ("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "CPU_V4_INDEXER")
PLAIN_INDEXERS = ("MINIMAX_M3_SPARSE_INDEXER",)
COMPRESSOR = (
    "CompressorBackend"  # of DeepSeek-V4: fp32 state of the tokens that an entry is made of
)

# Backends that leave one row for each token (or entry) of an MLA layer, all of them the same one
# for a given cache dtype.
MLA = (
    "AMX_MLA",
    "CPU_MLA",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHINFER_MLA_SPARSE",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE_FA4",  # vLLM 0.33: writes as FLASHINFER_MLA_SPARSE
    "TRITON_MLA",
)
DEEPSEEK_V4 = (
    "FLASHMLA_SPARSE_DSV4",
    "FLASHINFER_MLA_SPARSE_DSV4",
    "CPU_V4_MLA_SPARSE",
    "DEEPSEEK_SPARSE_SWA",
)

# Of vLLM's KVQuantMode, by name.
PLAIN_QUANT = ("NONE", "FP8_PER_TENSOR")  # pages hold numbers only
INLINE_QUANT = (
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
)  # a scale for each head of each token
INLINE_SCALE_BYTES = 4
NVFP4_GROUP = 16  # numbers of one scale byte

# K of a head as [head size, tokens], V as [tokens, head size]: vec and vec16, which AVX2 and
# AVX-512 hosts use. Others pack in tiles.
TRANSPOSED = "transposed"


@dataclass(frozen=True)
class Kind:
    """What the pages of a layer hold. Its tensor shows their order in memory: of an `ordered`
    one, whether heads or tokens are outside, which is the end of the strategy's name; of a
    `paged` one, how many tokens a kernel page has."""

    strategy: str
    params: dict[str, int]
    ordered: bool = False
    paged: bool = False


def kind_of(spec: KVCacheSpec, backend: str, kv_heads: int, ranks: Ranks, packing: str) -> Kind:
    """The strategy of a layer and its parameters. kv_heads: of all ranks together.

    The identity does not name attention backends, which pipeline stages may have others of: two
    that mean other things by their bytes have strategies, and with them formats, that the
    sidecar refuses to pair, layer by layer. Backends of one strategy write the same.
    """
    # Subclasses (sinks, chunks, rings) free or add blocks by rules of their own, so it is the type
    # that counts. Full attention with a
    # window is a model without vLLM's hybrid cache manager: its layers look back no further, and
    # yet every block is kept.
    name = type(spec).__name__
    if name == "CircularBufferSpec":
        raise Unsupported(
            "kvspray: a cache group is of kind CircularBufferSpec (DeepSeek-V4.1, GLM-5-Next, Step "
            "5, Qwen4 with QSA): a ring of one block for a request, with the tokens of an entry "
            "that is not complete; kvspray moves no rings: serve the model without kvspray"
        )
    if name not in (
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
    ):
        raise Unsupported(
            f"kvspray: cache groups of kind {name} are not supported, full attention, sliding "
            "windows and MLA are"
        )
    if getattr(spec, "extra_retained_tokens", 0):
        raise Unsupported(
            f"kvspray: extra_retained_tokens is {spec.extra_retained_tokens}; a draft of several "
            "MTP modules computes the last tokens of a prompt again, from tokens that only this "
            "engine has, set num_speculative_tokens to 1"
        )
    if getattr(spec, "bounded_replay", False):
        raise Unsupported(
            "kvspray: bounded_replay is on (DeepSeek-V4.1): vLLM computes the tokens of a window "
            "again instead of keeping its blocks, and kvspray cannot find out which blocks these "
            "are; serve the model without kvspray"
        )
    kind = (
        _rows(spec, backend)
        if "MLA" in name
        else _attention(spec, backend, kv_heads, ranks, packing)
    )
    if name.startswith("SlidingWindow"):
        kind.params.update(
            window=spec.sliding_window, prefix_cache=1
        )  # vLLM gives a prompt's blocks to others that begin alike
    return kind


def ratio_of(spec: KVCacheSpec) -> int:
    """Tokens of one row: more than one in a compressed cache."""
    ratio = spec.tokens_per_state
    if int(ratio) != ratio or ratio < 1 or spec.block_size % int(ratio):
        raise Unsupported(
            f"kvspray: tokens_per_state is {ratio} with block_size {spec.block_size}; rows of a "
            "whole number of tokens are supported"
        )
    return int(ratio)


def row_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a row of an MLA layer, without what a page is padded with."""
    bytes_of: int = (
        getattr(spec, "unpadded_page_size_bytes", None)
        or getattr(spec, "real_page_size_bytes", None)
        or spec.page_size_bytes
    )
    return bytes_of // (int(spec.block_size) // ratio_of(spec))


def _rows(spec: KVCacheSpec, backend: str) -> Kind:
    """MLA and its like: rows that every rank has, and the keys of indexers."""
    ratio, row = ratio_of(spec), row_bytes(spec)
    params = {"compress_ratio": ratio} if ratio > 1 else {}
    if backend in SCALED_INDEXERS:
        scales = {132: (128, 4), 68: (64, 4)}  # fp8, mxfp4
        if row not in scales:
            raise Unsupported(
                f"kvspray: an indexer's key has {row} bytes; those of fp8 (132) and mxfp4 (68) are "
                "known"
            )
        value, scale = scales[row]
        return Kind(
            "dsa_indexer", params | {"value_bytes": value, "scale_bytes": scale}, paged=True
        )
    if backend in PLAIN_INDEXERS:
        return Kind("index_keys", params | {"token_bytes": row})
    role = getattr(getattr(spec, "cache_role", None), "value", "")
    if role == "indexer" or backend.endswith("_INDEXER"):
        raise Unsupported(
            f"kvspray: an indexer's backend is {backend or 'unknown'}; what its pages hold is "
            f"known of {', '.join(SCALED_INDEXERS + PLAIN_INDEXERS)}"
        )
    if backend == COMPRESSOR:
        return Kind("deepseek_v4_compressor", params | {"token_bytes": row})
    dtype = getattr(spec, "cache_dtype_str", None) or ""
    if backend in DEEPSEEK_V4:
        if not dtype.endswith("_ds_mla"):
            return Kind("mla", params | {"token_bytes": row})
        # Entries of 584 bytes have their scales behind those of a page.
        if row != 584:
            raise Unsupported(
                f"kvspray: kv_cache_dtype {dtype} of {backend} has entries of {row} bytes, of "
                "which 584 are known; set it to auto or fp8"
            )
        return Kind("deepseek_v4", params)
    if backend not in MLA:
        raise Unsupported(
            f"kvspray: attention backend is {backend or 'unknown'}; what the pages of MLA hold is "
            f"known of {', '.join(MLA + DEEPSEEK_V4)}"
        )
    if dtype == "fp8_ds_mla":
        return Kind("fp8_ds_mla", params | {"token_bytes": row})
    return Kind("mla", params | {"token_bytes": row})


def _attention(spec: KVCacheSpec, backend: str, kv_heads: int, ranks: Ranks, packing: str) -> Kind:
    """K and V of the heads of this rank."""
    quant = getattr(spec, "kv_quant_mode", 0)
    mode = getattr(quant, "name", "NONE" if not quant else str(quant))
    if ratio_of(spec) != 1:
        raise Unsupported(
            f"kvspray: tokens_per_state is {spec.tokens_per_state}; K and V of several tokens in "
            "one row are not supported"
        )
    own = max(1, kv_heads // ranks.tp_size)
    if spec.num_kv_heads != own or (kv_heads % ranks.tp_size and ranks.tp_size % kv_heads):
        raise Unsupported(
            f"kvspray: a layer has {spec.num_kv_heads} KV heads on this rank, and the model's "
            f"{kv_heads} over {ranks.tp_size} ranks would "
            "be others; models whose layers differ in their heads are not supported with this "
            "tensor_parallel_size"
        )
    size, size_v = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
    key = size * spec.dtype.itemsize
    params = {
        "heads": spec.num_kv_heads,
        "kv_heads": kv_heads,
        "tp_rank": ranks.tp,
        "tp_size": ranks.tp_size,
    }
    if backend == CPU_ATTN:
        # Only the identity distinguishes the tiles of one host's pages from another's.
        if not packing:
            raise Unsupported(
                f"kvspray: attention backend is {CPU_ATTN} in a model that is taken for one of MLA "
                "alone; such models are not supported"
            )
        if mode not in PLAIN_QUANT or size != size_v:
            raise Unsupported(
                f"kvspray: kv_quant_mode is {mode}, heads of K {size} and of V {size_v} wide; "
                f"{CPU_ATTN} has pages of plain numbers and equal widths"
            )
        if packing == TRANSPOSED:
            params |= {"k_transposed": 1, "number_bytes": spec.dtype.itemsize}
        return Kind("vllm_cpu_attn", params | {"head_bytes": key})
    if backend not in PACKED:
        raise Unsupported(
            f"kvspray: attention backend is {backend or 'unknown'}; what its pages hold is known "
            f"of {CPU_ATTN}, {', '.join(PACKED)} and MLA"
        )
    if size != size_v and backend not in DIFF_KV:
        raise Unsupported(
            f"kvspray: attention backend is {backend}, heads of K are {size} and of V {size_v} "
            f"wide; that is known of {', '.join(DIFF_KV)}"
        )
    if mode in PLAIN_QUANT:
        return Kind("packed", params | {"head_bytes": key}, ordered=True)
    # Of pages with scales the backend publishes what a head has for a token.
    content = getattr(spec, "state_content_bytes", None)
    if mode in INLINE_QUANT and backend == "TRITON_ATTN":
        value = key // 2 if mode.startswith("INT4") else key
        if content == 2 * (value + INLINE_SCALE_BYTES):
            return Kind(
                "quant_inline",
                params | {"value_bytes": value, "scale_bytes": INLINE_SCALE_BYTES},
                ordered=True,
            )
    if mode == "NVFP4" and backend == "FLASHINFER":
        value, scale = size // 2, size // NVFP4_GROUP
        if content == value + scale and spec.num_head_slots == 2 * spec.num_kv_heads:
            return Kind(
                "quant_planar",
                params | {"value_bytes": value, "scale_bytes": scale},
                ordered=True,
                paged=True,
            )
    raise Unsupported(
        f"kvspray: kv_quant_mode is {mode} with {backend}; what such pages hold is not known, set "
        "kv_cache_dtype to auto or fp8"
    )
