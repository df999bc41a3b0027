"""What each kind of vLLM's cache is registered as: the strategy by specification and backend,
the order by the strides of tensors that vLLM's own code makes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.models.deepseek_v41 import compressor
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvspray_vllm import caches, layout, strategies
from kvspray_vllm.strategies import Kind, Unsupported

ALONE = layout.Ranks()
SIZES: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**SIZES)
LATENT: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.bfloat16}
OWN = {"heads": 2, "head_bytes": 64, "kv_heads": 2, "tp_rank": 0, "tp_size": 1}
BLOCKS = 6


def kind(
    spec: Any, backend: str, heads: int = 2, ranks: layout.Ranks = ALONE, packing: str = ""
) -> Kind:
    return strategies.kind_of(spec, backend, heads, ranks, packing)


def changed(spec: Any, **fields: Any) -> Any:
    """A copy of a frozen specification with other fields, also such as this vLLM's has none of."""
    out = copy.copy(spec)
    for name, value in fields.items():
        object.__setattr__(out, name, value)
    return out


def test_kinds_of_attention() -> None:
    assert kind(FULL, "CPU_ATTN", packing="amx") == Kind("vllm_cpu_attn", OWN)
    assert kind(FULL, "CPU_ATTN", packing=strategies.TRANSPOSED).params == OWN | {
        "k_transposed": 1,
        "number_bytes": 2,
    }
    for backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"):
        assert kind(FULL, backend) == Kind("packed", OWN, ordered=True)
        fp8 = changed(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8)
        assert kind(fp8, backend) == Kind("packed", OWN | {"head_bytes": 32}, ordered=True)
    # Rank 3 of 4 has heads 6 and 7 of 8; of 16 ranks over 8 heads, each two have one.
    assert kind(FULL, "FLASH_ATTN", 8, layout.Ranks(tp=3, tp_size=4)).params == OWN | {
        "kv_heads": 8,
        "tp_rank": 3,
        "tp_size": 4,
    }
    one = FullAttentionSpec(**SIZES | {"num_kv_heads": 1})
    assert kind(one, "FLASH_ATTN", 8, layout.Ranks(tp=5, tp_size=16)).params["heads"] == 1
    window = SlidingWindowSpec(**SIZES, sliding_window=64)
    assert kind(window, "CPU_ATTN", packing="amx").params == OWN | {"window": 64, "prefix_cache": 1}
    assert kind(window, "FLASH_ATTN").params == OWN | {"window": 64, "prefix_cache": 1}
    assert (
        kind(FullAttentionSpec(**SIZES, sliding_window=64), "FLASH_ATTN").params == OWN
    )  # no hybrid cache manager: every block is kept
    diff = FullAttentionSpec(**SIZES, head_size_v=16)
    assert kind(diff, "FLASH_ATTN_DIFFKV") == Kind("packed", OWN, ordered=True)
    per_head = FullAttentionSpec(
        **SIZES | {"dtype": torch.int8},
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        state_content_bytes=2 * (32 + 4),
    )
    inline = kind(per_head, "TRITON_ATTN")
    assert (inline.strategy, inline.params["value_bytes"], inline.params["scale_bytes"]) == (
        "quant_inline",
        32,
        4,
    )
    four = FullAttentionSpec(
        **SIZES | {"dtype": torch.uint8},
        kv_quant_mode=KVQuantMode.NVFP4,
        num_head_slots=4,
        state_content_bytes=16 + 2,
    )
    planar = kind(four, "FLASHINFER")
    assert planar.strategy == "quant_planar" and planar.ordered and planar.paged
    assert (planar.params["value_bytes"], planar.params["scale_bytes"]) == (16, 2)
    # What its backend has not published may be laid out in another way.
    for spec, backend in ((per_head, "TRITON_ATTN"), (four, "FLASHINFER")):
        with pytest.raises(Unsupported, match="kv_quant_mode"):
            kind(changed(spec, state_content_bytes=None), backend)


def test_kinds_of_latents() -> None:
    mla = MLAAttentionSpec(**LATENT, head_size=576)
    for backend in ("FLASHMLA", "FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4"):
        assert kind(mla, backend) == Kind("mla", {"token_bytes": 1152})
    # A hybrid's pages are as wide as a state: what a token takes is not the page divided by its
    # tokens.
    assert kind(changed(mla, block_size=16, page_size_padded=32768), "FLASHMLA") == Kind(
        "mla", {"token_bytes": 1152}
    )
    packed = MLAAttentionSpec(
        **LATENT | {"dtype": torch.uint8},
        head_size=576,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )
    assert kind(packed, "FLASHMLA_SPARSE") == Kind("fp8_ds_mla", {"token_bytes": 656})
    keys = MLAAttentionSpec(
        **LATENT | {"dtype": torch.uint8}, head_size=132, cache_role=SparseCacheRole.INDEXER
    )
    assert kind(keys, "DEEPSEEK_V32_INDEXER") == Kind(
        "dsa_indexer", {"value_bytes": 128, "scale_bytes": 4}, paged=True
    )
    assert kind(changed(keys, head_size=68), "DEEPSEEK_V32_INDEXER").params == {
        "value_bytes": 64,
        "scale_bytes": 4,
    }
    m3 = MLAAttentionSpec(**LATENT, head_size=128, cache_role=SparseCacheRole.INDEXER)
    assert kind(m3, "MINIMAX_M3_SPARSE_INDEXER") == Kind("index_keys", {"token_bytes": 256})
    v4 = MLAAttentionSpec(
        **LATENT | {"block_size": 256, "dtype": torch.uint8},
        head_size=512,
        tokens_per_state=4,
        cache_dtype_str="fp8_ds_mla",
        alignment=576,
        model_version="deepseek_v4",
        state_content_bytes=584,
    )
    assert kind(v4, "FLASHMLA_SPARSE_DSV4") == Kind("deepseek_v4", {"compress_ratio": 4})
    plain = changed(v4, dtype=torch.bfloat16, state_content_bytes=None, cache_dtype_str="auto")
    assert kind(plain, "FLASHMLA_SPARSE_DSV4") == Kind(
        "mla", {"compress_ratio": 4, "token_bytes": 1024}
    )
    state = SlidingWindowMLASpec(
        block_size=4,
        num_kv_heads=1,
        head_size=2048,
        dtype=torch.float32,
        sliding_window=8,
        alignment=576,
    )
    assert kind(state, "CompressorBackend") == Kind(
        "deepseek_v4_compressor", {"token_bytes": 8192, "window": 8, "prefix_cache": 1}
    )


@pytest.mark.parametrize(
    ("spec", "backend", "word"),
    [
        # The identity does not name backends: one whose pages are not known is refused, and so are
        # tiles of a host that is not named.
        (FULL, "ROCM_ATTN", "attention backend"),
        (FULL, "", "attention backend"),
        (FULL, "CPU_ATTN", "attention backend"),
        (FullAttentionSpec(**SIZES, head_size_v=16), "FLASH_ATTN", "of V 16 wide"),
        (
            ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64),
            "FLASH_ATTN",
            "ChunkedLocalAttentionSpec",
        ),
        (CircularBufferSpec(**SIZES), "CompressorBackend", "CircularBufferSpec"),
        (
            SlidingWindowSpec(**SIZES, sliding_window=64, extra_retained_tokens=1),
            "FLASH_ATTN",
            "extra_retained_tokens",
        ),
        (changed(FULL, tokens_per_state=2), "FLASH_ATTN", "tokens_per_state"),
        (changed(FULL, kv_quant_mode=KVQuantMode.NVFP4), "TRITON_ATTN", "kv_quant_mode"),
        (changed(FULL, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4), "TRITON_ATTN", "kv_quant_mode"),
        (
            changed(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
            "FLASH_ATTN",
            "kv_quant_mode",
        ),
        (MLAAttentionSpec(**LATENT, head_size=576), "TOKENSPEED_MLA", "TOKENSPEED_MLA"),
        (
            MLAAttentionSpec(**LATENT, head_size=576, tokens_per_state=3),
            "FLASHMLA",
            "tokens_per_state",
        ),
        (
            MLAAttentionSpec(**LATENT, head_size=132, cache_role=SparseCacheRole.INDEXER),
            "FLASHMLA",
            "indexer",
        ),
        (MLAAttentionSpec(**LATENT, head_size=576), "DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_INDEXER"),
        (MLAAttentionSpec(**LATENT, head_size=99), "DEEPSEEK_V32_INDEXER", "198 bytes"),
        (
            MLAAttentionSpec(
                **LATENT, head_size=512, cache_dtype_str="nvfp4_ds_mla", state_content_bytes=352
            ),
            "FLASHMLA_SPARSE_DSV4",
            "352 bytes",
        ),
        (
            SlidingWindowMLASpec(**LATENT, head_size=512, sliding_window=128, bounded_replay=True),
            "DEEPSEEK_SPARSE_SWA",
            "bounded_replay",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(spec: Any, backend: str, word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        kind(spec, backend)


def test_deepseek_v41_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches, as vLLM's own layers publish them."""
    engine: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}), num_speculative_tokens=0
    )
    for module in (compressor, sparse_swa):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: engine)
    cache: Any = SimpleNamespace(cache_dtype="fp8_ds_mla")
    ring = compressor.CompressorStateCache(1024, torch.float32, "ring")
    window, kept = (
        sparse_swa.DeepseekV4SWACache(
            512, 128, torch.uint8, name, cache, None, 32, 528, 512, bounded_replay=replay
        )
        for name, replay in (("window", True), ("kept", False))
    )
    config: Any = SimpleNamespace(model_config=SimpleNamespace(model="deepseek-ai/DeepSeek-V4.1"))
    for layer, reason in (
        (ring, "CircularBufferSpec .DeepSeek-V4.1,.*moves no rings: serve"),
        (window, "bounded_replay is on .DeepSeek-V4.1."),
        (kept, "entries of 528 bytes"),  # MXFP8
    ):
        spec, backend = layer.get_kv_cache_spec(engine), layer.get_attn_backend().get_name()
        with (
            pytest.raises(Unsupported, match=reason + ".* .model deepseek-ai/DeepSeek-V4.1."),
            layout.naming(config),
        ):
            kind(spec, backend)


def test_ranks_that_have_other_heads_are_refused() -> None:
    for heads, size in ((6, 4), (4, 6), (2, 2)):
        with pytest.raises(Unsupported, match="tensor_parallel_size"):
            kind(FULL, "FLASH_ATTN", heads, layout.Ranks(tp_size=size))


def described(
    specs: Mapping[str, Any],
    backends: Mapping[str, str],
    order: str = "LBNHC",
    kernel: int | None = None,
) -> list[dict[str, Any]]:
    """The groups of layers that share one block table, in memory as vLLM's own code divides it."""
    groups = planning._get_kv_cache_groups_uniform_type(
        UniformTypeKVCacheSpecs.from_specs(dict(specs))
    )
    tensors, offset = {}, 0
    memory = torch.zeros(sum(s.page_size_bytes for s in specs.values()) * BLOCKS, dtype=torch.int8)
    for name, spec in specs.items():
        layer, block, *_ = compute_layout_strides(spec, BLOCKS, 1, KVCacheLayout[order])
        at = KVCacheTensor(memory.numel(), [name], layer, block, offset)
        (tensors[name],) = create_kv_cache_views(
            memory, spec, BLOCKS, KVCacheLayout[order], at, kernel
        )
        offset += spec.page_size_bytes * BLOCKS
    kv = KVCacheConfig(BLOCKS, [], groups)
    d = caches.describe(kv, tensors, backends, kv_heads=[2], ranks=ALONE, packing="")
    assert (
        len(d.storages) == 1
        and d.storages[0].address == memory.data_ptr()
        and d.storages[0].nbytes == memory.nbytes
    )
    return d.placed([caches.Site(0, 64)])


def test_the_order_is_that_of_the_tensor() -> None:
    for order, strategy, more in (
        ("LBHNC", "packed_hnd", {}),
        ("LBNHC", "packed_nhd", {}),
        ("BLNHC", "packed_nhd", {}),
        ("BLHNC", "packed_hnd", {}),
        ("LHBNC", "packed_hnd", {"head_stride": BLOCKS * 32 * 128, "row_stride": 128}),
        ("BHLNC", "packed_hnd", {}),
    ):
        (group,) = described({"a": FULL}, {"a": "FLASH_ATTN"}, order)
        assert (group["strategy"], group["params"]) == (strategy, OWN | more), order
        assert group["layers"][0]["base"] == 64  # where its storage lies in the region


def test_kernel_pages() -> None:
    wide = FullAttentionSpec(**SIZES | {"block_size": 128})
    (group,) = described({"a": wide}, {"a": "FLASHINFER"}, "LBHNC", 64)
    assert group["params"] == OWN | {"kernel_tokens": 64} and group["strategy"] == "packed_hnd"
    (group,) = described({"a": wide}, {"a": "FLASHINFER"}, "LBNHC", 64)
    assert (
        group["params"] == OWN and group["strategy"] == "packed_nhd"
    )  # with tokens outside, pieces in a row are one block
    with pytest.raises(
        Unsupported,
        match="layer a: a block of vllm_cpu_attn holds 2 kernel blocks; set block_size to the "
        "kernel's, 64",
    ):
        caches.place_params(
            "a", caches.place_of("a", torch.zeros(12, 2, 64, 64), 6), Kind("vllm_cpu_attn", {}), 128
        )


def test_one_block_table_for_layers_of_several_kinds() -> None:
    """DeepSeek-V3.2: the latent of each layer, and its indexer's keys."""
    specs: dict[str, Any] = {}
    backends = {}
    for i in range(2):
        specs[f"{i}.attn"] = MLAAttentionSpec(
            **LATENT | {"dtype": torch.uint8},
            head_size=576,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
        )
        specs[f"{i}.keys"] = MLAAttentionSpec(
            **LATENT | {"dtype": torch.uint8}, head_size=132, cache_role=SparseCacheRole.INDEXER
        )
        backends |= {f"{i}.attn": "FLASHMLA_SPARSE", f"{i}.keys": "DEEPSEEK_V32_INDEXER"}
    rows, keys = described(specs, backends)
    assert [rows["strategy"], keys["strategy"], rows.get("same_table"), keys["same_table"]] == [
        "fp8_ds_mla",
        "dsa_indexer",
        None,
        True,
    ]
    assert [layer["name"] for layer in rows["layers"]] == ["0.attn", "1.attn"] and rows[
        "params"
    ] == {"token_bytes": 656}
    assert [layer["index"] for layer in keys["layers"]] == [1, 3] and keys["params"] == {
        "value_bytes": 128,
        "scale_bytes": 4,
        "kernel_tokens": 64,
    }
    # Layers of other sizes are groups of their own, too.
    unlike = {"a": FULL, "b": FullAttentionSpec(**SIZES | {"num_kv_heads": 4})}
    assert [
        g["params"]["heads"] for g in described(unlike, dict.fromkeys(unlike, "FLASH_ATTN"))
    ] == [2, 4]


def test_padded_pages() -> None:
    padded = MLAAttentionSpec(**LATENT | {"block_size": 16}, head_size=576, page_size_padded=32768)
    (group,) = described({"a": padded}, {"a": "FLASHMLA"})
    assert group["params"] == {"token_bytes": 1152}
    assert [(layer["page_bytes"], layer["block_stride"]) for layer in group["layers"]] == [
        (16 * 1152, 32768)
    ]


def test_place_of_a_layer_view() -> None:
    buf = torch.zeros(4 * 6 * 1024, dtype=torch.int8).view(torch.bfloat16)
    # [B, H, N, C], six blocks of two layers that alternate
    place = caches.place_of("l", buf.as_strided((6, 2, 32, 16), (2048, 512, 16, 1), 1024), 6)
    assert (place.base, place.block_stride, place.page_bytes, place.blocks) == (2048, 4096, 2048, 6)
    # the same memory in half blocks
    halves = caches.place_of("l", buf.as_strided((12, 2, 16, 16), (512, 256, 16, 1)), 6)
    assert (halves.block_stride, halves.pieces) == (2048, 2)
    for shape, strides in (
        ((12, 2, 16, 16), (1024, 256, 16, 1)),
        ((6, 2, 32, 8), (1024, 512, 16, 2)),
        ((12, 2, 16, 8), (512, 256, 16, 1)),
    ):
        with pytest.raises(
            Unsupported, match="layer l"
        ):  # pieces apart, every other element, pieces with holes
            caches.place_of("l", buf.as_strided(shape, strides), 6)
    # Half of each row, as where layers alternate within a token: a packed page can express it,
    # others cannot.
    rows = caches.place_of("l", buf.as_strided((6, 2, 32, 8), (1024, 512, 16, 1)), 6)
    assert rows.strides == (("head_stride", 1024), ("row_stride", 32))
    assert caches.place_params("l", rows, Kind("packed", {"heads": 2}, ordered=True), 32) == (
        "packed_hnd",
        {"heads": 2, "head_stride": 1024, "row_stride": 32},
    )
    with pytest.raises(Unsupported, match="layer l"):
        caches.place_params("l", rows, Kind("vllm_cpu_attn", {"heads": 2}), 32)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHMLA"])
def test_a_stage_without_a_layer_of_a_group(backend: str) -> None:
    """It has no backend to ask, and on a GPU it is not the CPU's that the layers of the others
    have."""
    mla = backend == "FLASHMLA"
    own: Any = MLAAttentionSpec(**LATENT, head_size=576) if mla else FULL
    for other, want in (
        (SlidingWindowSpec(**SIZES, sliding_window=64), "packed_nhd"),
        (MLAAttentionSpec(**LATENT, head_size=512), "mla"),
    ):
        kv = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([], other), KVCacheGroupSpec(["a"], own)])
        tensors = {
            "a": torch.zeros(
                BLOCKS, 1 if mla else 2, own.block_size, 576 if mla else 64, dtype=torch.bfloat16
            )
        }
        first, second = caches.describe(
            kv, tensors, {"a": backend}, kv_heads=[2], ranks=ALONE, packing=""
        ).groups
        assert (first["strategy"], first["layers"], "same_table" in second) == (want, [], False)
        assert first["params"].get("window") == other.sliding_window


def test_a_draft_of_other_heads() -> None:
    """On one rank each layer has its own; on several they are the model's or its draft's, where
    that can be known."""
    both = {
        "a": FullAttentionSpec(**SIZES | {"num_kv_heads": 4}),
        "draft": FullAttentionSpec(**SIZES | {"num_kv_heads": 1}),
    }
    kv = KVCacheConfig(
        BLOCKS,
        [],
        [KVCacheGroupSpec(list(both), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=both))],
    )
    tensors = {
        name: torch.zeros(BLOCKS, spec.num_kv_heads, 32, 64, dtype=torch.bfloat16)
        for name, spec in both.items()
    }

    def heads(kv_heads: list[int], size: int) -> list[tuple[int, int]]:
        of = caches.describe(
            kv,
            tensors,
            dict.fromkeys(both, "FLASH_ATTN"),
            kv_heads=kv_heads,
            ranks=layout.Ranks(tp_size=size),
            packing="",
        )
        return [(g["params"]["heads"], g["params"]["kv_heads"]) for g in of.groups]

    assert heads([4], 1) == heads([4, 1], 1) == [(4, 4), (1, 1)]
    assert heads([8, 2], 2) == [(4, 8), (1, 2)]
    with pytest.raises(Unsupported, match="a layer has 1 KV heads on this rank"):
        heads([8], 2)
    with pytest.raises(Unsupported, match="may be one of a model of 2 or of 1"):
        heads([8, 2, 1], 2)


def test_hisparse_is_refused() -> None:
    kv = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["a"], FULL, enable_kv_transfer=False)])
    with pytest.raises(Unsupported, match="hisparse"):
        caches.describe(kv, {}, {}, kv_heads=[2], ranks=ALONE, packing="")


def test_a_layer_that_the_connector_does_not_follow_is_left_out() -> None:
    """Layers that read another's cache are in vLLM's groups once its runner has added them, and
    not among the flags."""
    kv = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["a", "reads a"], FULL)])
    tensors = {"a": torch.zeros(BLOCKS, 2, 32, 64, dtype=torch.bfloat16)}
    tensors["reads a"] = tensors["a"]
    (group,) = caches.describe(
        kv,
        tensors,
        dict.fromkeys(tensors, "FLASH_ATTN"),
        kv_heads=[2],
        ranks=ALONE,
        packing="",
        flags={"a": 0},
    ).groups
    assert [layer["name"] for layer in group["layers"]] == ["a"]
