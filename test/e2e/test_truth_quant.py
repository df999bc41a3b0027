"""The quantised and compressed caches of vLLM, in views that its own specs and
create_kv_cache_views make, moved by real sidecars, and compared to the last byte with what the
engine would have written there.

What vLLM's wheel for CPUs runs of them is run:

- DeepSeek-V4's slab (windows, entries of both ratios, the indexer's keys, the states of all
  compressors) is written by its kernels for CPUs, read by those that attend
  (flash_mla_with_kvcache_cpu, fp8_paged_mqa_logits_cpu), and both engines go on from it.
- The indexer's keys of DeepSeek-V3.2 have the same page with an entry for each token. The kernel
  that writes them for that model is CUDA (indexer_k_quant_and_cache), so the one of V4 writes them,
  with ratio 1; the reading kernel is the same.

What it cannot run, and why:

- Rows of fp8_ds_mla: concat_and_cache_mla is CUDA in that form, and its Triton twin needs Triton,
  which has no backend in this wheel. A row is opaque to the cache and written by index, where
  vLLM's view has it.
- Pages with inline scales (TRITON_ATTN): the kernel is Triton. The backend's own methods define
  where values and scales of a token lie (_pth_key_value_caches, _ensure_scale_caches); they are
  written there by index.
- nvfp4 (FLASHINFER): the kernel is FlashInfer's, for CUDA. The backend's own _nvfp4_kv_views
  defines where values and scales lie; FlashInfer is imported by that module and used by nothing
  that is called here, so an empty package stands for it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import pathlib
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace as Bag
from typing import Any

import cluster as rig
import pytest
import torch
from conftest import need, needs_amx
from ranks import Rank, compare, connected, group, move, register, worker

LAYERS = 2  # of each cache
BLOCKS = 24  # of each group
HEADS = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sidecars(workdir: pathlib.Path) -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    need("the sidecar", rig.BINARY.exists(), "run make build")
    p, d = rig.Sidecar("qp", workdir), rig.Sidecar("qd", workdir)
    with rig.running(p, d):
        yield p, d
        assert p.panics() is None and d.panics() is None


Views = dict[str, list[torch.Tensor]]  # of each cache, of each layer


@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache group: vLLM's spec of its layers, and what a shim would register for them."""

    name: str
    spec: Any
    strategy: str
    params: dict[str, int]
    order: str = "LBNHC"
    kernel: int | None = None  # tokens of a kernel block
    window: int = 0

    def first(self, tokens: int) -> int:
        """The first block that the next token sees."""
        return max(0, tokens + 1 - self.window) // self.spec.block_size if self.window else 0

    def table(self, tokens: int) -> list[int]:
        """Scattered blocks; what is before a window has been given up, and block 0 stands there."""
        first, n = self.first(tokens), -(-tokens // self.spec.block_size)
        return [0] * first + random.sample(range(1, BLOCKS), max(0, n - first))


@dataclasses.dataclass
class Engine:
    """The ranks of an engine, and each one's views of every layer of every cache."""

    caches: list[Cache]
    ranks: list[Rank]
    views: list[Views]

    def draw(self, tokens: int) -> None:
        tables = [c.table(tokens) for c in self.caches]
        for r in self.ranks:
            r.tables = tables

    def close(self) -> None:
        self.views.clear()
        for r in self.ranks:
            r.close()


def make(sidecar: rig.Sidecar, name: str, of: Callable[[int], list[Cache]], tp: int = 1) -> Engine:
    """An engine whose caches follow one another in one allocation. of: the caches of a rank."""
    from vllm.v1.kv_cache_interface import (
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    out = Engine(of(0), [], [])
    for rank in range(tp):
        caches = of(rank)
        nbytes = sum(LAYERS * BLOCKS * c.spec.page_size_bytes for c in caches)
        r = worker(sidecar, name, rank, tp, LAYERS * len(caches), nbytes)
        views: Views = {}
        groups, offset = [], 0
        for g, c in enumerate(caches):
            order = KVCacheLayout[c.order]
            layer, block, *_ = compute_layout_strides(c.spec, BLOCKS, LAYERS, order)
            names = [f"model.layers.{i}.{c.name}" for i in range(LAYERS)]
            views[c.name] = create_kv_cache_views(
                r.memory[0],
                c.spec,
                BLOCKS,
                order,
                KVCacheTensor(nbytes, names, layer, block, offset),
                c.kernel,
            )
            described = []
            for i, v in enumerate(views[c.name]):
                # Kernel blocks of a block follow one another.
                page = v.shape[0] // BLOCKS * v[0].numel() * v.itemsize
                described.append(
                    {
                        "name": names[i],
                        "index": g * LAYERS + i,
                        "region": 0,
                        "base": v.storage_offset() * v.itemsize,
                        "block_stride": block,
                        "page_bytes": page,
                    }
                )
            groups.append(
                group(
                    c.spec.block_size,
                    c.strategy,
                    c.params | ({"window": c.window} if c.window else {}),
                    BLOCKS,
                    described,
                )
            )
            offset += LAYERS * BLOCKS * c.spec.page_size_bytes
        register(r, "fp8", groups)
        out.ranks.append(r)
        out.views.append(views)
    connected(*out.ranks)
    return out


def slots(table: Sequence[int], n: int, index: torch.Tensor) -> torch.Tensor:
    """Where entries or tokens lie, n to a block."""
    return torch.tensor(table, dtype=torch.int64)[index // n] * n + index % n


Fill = Callable[[Rank, Views, list[Cache]], None]


def check(peer: str, p: Engine, d: Engine, fill: Fill, tokens: int) -> None:
    """fill writes a prompt as the engine does. The receivers' memory must become what filling it
    there would have made of it."""
    p.draw(tokens)
    d.draw(tokens)
    before = [[m.clone() for m in r.memory] for r in d.ranks]
    for r, views in zip(p.ranks, p.views, strict=True):
        fill(r, views, p.caches)
    move(peer, p.ranks, d.ranks, tokens)
    for r, views, was in zip(d.ranks, d.views, before, strict=True):
        compare(r, was, functools.partial(fill, r, views, d.caches), f"{tokens} tokens")


# DeepSeek-V4.

LATENT, INDEX, ROPE = 512, 128, 64
WINDOW = 128


def slab(block: int) -> list[Cache]:
    """The caches of an engine of DeepSeek-V4 with blocks of that many tokens, as its layers ask for
    them."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    config = Bag(cache_config=Bag(block_size=block, cache_dtype="fp8_ds_mla"))

    def entries(ratio: int) -> Any:
        layer = Bag(
            compress_ratio=ratio,
            kv_cache_dtype="fp8_ds_mla",
            head_dim=LATENT,
            kv_cache_torch_dtype=torch.uint8,
        )
        return DeepseekV4Attention.get_kv_cache_spec(layer, config)

    def state(ratio: int, head: int) -> Any:
        # The constructor wants an engine's context; these are what it sets.
        overlap = 1 + (ratio == 4)
        layer = Bag(
            block_size={4: 4, 128: 8}[ratio],
            state_dim=2 * overlap * head,
            dtype=torch.float32,
            sliding_window=overlap * ratio,
        )
        return CompressorStateCache.get_kv_cache_spec(layer, config)

    keys = DeepseekV4IndexerCache.get_kv_cache_spec(
        Bag(
            cache_config=config.cache_config,
            head_dim=INDEX + 4,
            dtype=torch.uint8,
            compress_ratio=4,
        ),
        config,
    )
    windows = DeepseekV4SWACache.get_kv_cache_spec(
        Bag(cache_config=config.cache_config, bounded_replay=False, block_size=64, head_dim=LATENT,
        dtype=torch.uint8, window_size=WINDOW, packed_bytes_per_token=584,
        packed_page_alignment=576, packed_block_stride_alignment=None), config,
    )  # fmt: skip
    out = [
        Cache("csa", entries(4), "deepseek_v4", {"compress_ratio": 4}),
        Cache("hca", entries(128), "deepseek_v4", {"compress_ratio": 128}),
        Cache("keys", keys, "dsa_indexer", {"compress_ratio": 4, "kernel_tokens": block}),
        Cache("swa", windows, "deepseek_v4", {}),
        Cache("csa_state", state(4, LATENT), "deepseek_v4_compressor", {}),
        Cache("hca_state", state(128, LATENT), "deepseek_v4_compressor", {}),
        Cache("keys_state", state(4, INDEX), "deepseek_v4_compressor", {}),
    ]
    return [
        dataclasses.replace(c, window=getattr(c.spec, "sliding_window", None) or 0) for c in out
    ]


Where = Callable[[torch.Tensor], torch.Tensor]  # of tokens


@dataclasses.dataclass
class Compressed:
    """What the tokens of a prompt give to one compressor, and its weights."""

    ratio: int
    head: int
    kv: torch.Tensor  # [token, head], twice where entries overlap
    score: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    rope: torch.Tensor

    @classmethod
    def random(cls, ratio: int, head: int, tokens: int) -> Compressed:
        n = head * (1 + (ratio == 4))
        return cls(
            ratio,
            head,
            torch.randn(tokens, n),
            torch.randn(tokens, n),
            torch.randn(ratio, n),
            torch.rand(head) + 0.5,
            torch.randn(tokens, ROPE),
        )

    @property
    def width(self) -> int:
        return self.ratio * (1 + (self.ratio == 4))

    def remember(self, state: torch.Tensor, first: int, end: int, at: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        ops.save_partial_states_cpu(
            self.kv[first:end], self.score[first:end], self.ape, torch.arange(first, end), state, at
        )

    def store(
        self,
        state: torch.Tensor,
        where: Where,
        first: int,
        end: int,
        cache: torch.Tensor,
        table: Sequence[int],
    ) -> None:
        """Makes the entries that tokens [first, end) complete, from the states of earlier tokens,
        which lie at where(token)."""
        from vllm import _custom_ops as ops

        pos = torch.arange(first, end)
        seen = pos[:, None] - self.width + 1 + torch.arange(self.width)
        gather = torch.where(seen < 0, -1, where(seen.clamp(min=0)))
        n = cache.shape[1]
        complete = (pos + 1) % self.ratio == 0
        at = torch.full_like(pos, -1)
        at[complete] = slots(table, n, pos[complete] // self.ratio)
        kernel = (
            ops.compress_norm_rope_store_cpu
            if self.head == LATENT
            else ops.compress_norm_rope_store_indexer_cpu
        )
        kernel(
            state,
            gather,
            pos,
            at,
            self.norm,
            1e-6,
            self.rope,
            cache.view(cache.shape[0], -1),
            n,
            self.ratio,
        )


@dataclasses.dataclass
class Layer:
    """What a prompt gives to the caches of one layer of each kind."""

    swa: torch.Tensor  # [token, latent]
    rope: torch.Tensor
    compressed: dict[str, Compressed]

    @classmethod
    def random(cls, tokens: int) -> Layer:
        heads = {"csa": (4, LATENT), "hca": (128, LATENT), "keys": (4, INDEX)}
        compressed = {
            name: Compressed.random(ratio, head, tokens) for name, (ratio, head) in heads.items()
        }
        return cls(torch.randn(tokens, LATENT).bfloat16(), torch.randn(tokens, ROPE), compressed)

    def insert(self, cache: torch.Tensor, first: int, end: int, at: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        q = torch.zeros(end - first, 1, LATENT).bfloat16()
        pos, flat = torch.arange(first, end), cache.view(cache.shape[0], -1)
        ops.fused_qnorm_rope_kv_insert_cpu(
            q, self.swa[first:end], pos, flat, at, self.rope, 1, 1e-6, cache.shape[1]
        )


def pages(view: torch.Tensor) -> torch.Tensor:
    """As every layer of the model binds its cache: [B, 1, N, C] to [B, N, C]."""
    return view.squeeze(1)


def write_slab(
    tokens: int, layers: list[Layer], rank: Rank, views: Views, caches: list[Cache]
) -> None:
    """A prompt, as the layers of the engine write it. What a window has left behind is not written:
    its block is another prompt's. Entries are made where the whole of their states is still there,
    as it is when an engine makes them."""
    tables = {c.name: t for c, t in zip(caches, rank.tables, strict=True)}
    of = {c.name: c for c in caches}
    for i, layer in enumerate(layers):
        kept = {
            name: of[name].first(tokens) * of[name].spec.block_size
            for name in ("swa", "csa_state", "hca_state", "keys_state")
        }

        def tail(name: str, kept: dict[str, int] = kept) -> torch.Tensor:
            return slots(tables[name], of[name].spec.block_size, torch.arange(kept[name], tokens))

        layer.insert(pages(views["swa"][i]), kept["swa"], tokens, tail("swa"))
        for name, c in layer.compressed.items():
            c.remember(
                pages(views[f"{name}_state"][i]),
                kept[f"{name}_state"],
                tokens,
                tail(f"{name}_state"),
            )
            whole = torch.zeros(tokens, 1, 2 * c.kv.shape[1])
            c.remember(whole, 0, tokens, torch.arange(tokens))
            c.store(whole, lambda t: t, 0, tokens, pages(views[name][i]), tables[name])


def read_slab(
    tokens: int, rank: Rank, views: Views, caches: list[Cache], query: torch.Tensor
) -> list[torch.Tensor]:
    """What the kernels that attend see of a prompt: the output of one query over windows and
    entries, and the indexer's logits."""
    from vllm import _custom_ops as ops

    tables = {c.name: t for c, t in zip(caches, rank.tables, strict=True)}
    out = []
    for i in range(LAYERS):
        swa = pages(views["swa"][i])
        window = torch.arange(max(0, tokens - WINDOW), tokens)
        for name, ratio in (("csa", 4), ("hca", 128)):
            cache = pages(views[name][i])
            entries = torch.arange(tokens // ratio)
            o = torch.empty(1, HEADS, LATENT, dtype=torch.bfloat16)
            ops.flash_mla_with_kvcache_cpu(
                o, query, swa.view(BLOCKS, -1), slots(tables["swa"], swa.shape[1], window)[None],
                swa.shape[1], cache.view(BLOCKS, -1), slots(tables[name], cache.shape[1],
                entries)[None], cache.shape[1], torch.full((HEADS,), -10.0), LATENT**-0.5,
            )  # fmt: skip
            out.append(o)
        out.append(
            logits(pages(views["keys"][i]), tables["keys"], tokens // 4, query[:, :, :INDEX])
        )
    return out


def logits(
    cache: torch.Tensor, table: Sequence[int], entries: int, query: torch.Tensor
) -> torch.Tensor:
    """What the indexer makes of its keys."""
    from vllm import _custom_ops as ops

    if entries == 0:
        return torch.empty(0)
    q = query.contiguous().to(torch.float8_e4m3fn)
    seen, where = (
        torch.tensor([entries], dtype=torch.int32),
        torch.tensor([list(table)], dtype=torch.int32),
    )
    out: torch.Tensor = ops.fp8_paged_mqa_logits_cpu(
        q,
        cache.view(cache.shape[0], -1),
        torch.ones(1, HEADS),
        seen,
        where,
        cache.shape[1],
        entries,
    )
    return out[:, :entries]


def go_on(
    first: int, end: int, layers: list[Layer], rank: Rank, views: Views, caches: list[Cache]
) -> None:
    """Decodes tokens [first, end) from what is in the caches, compressors included, into further
    blocks."""
    for c, table in zip(caches, rank.tables, strict=True):
        free = [b for b in range(1, BLOCKS) if b not in table]
        table.extend(random.sample(free, -(-end // c.spec.block_size) - len(table)))
    tables = {c.name: t for c, t in zip(caches, rank.tables, strict=True)}
    n = {c.name: c.spec.block_size for c in caches}
    for i, layer in enumerate(layers):
        for at in range(first, end):
            now = torch.tensor([at])
            layer.insert(pages(views["swa"][i]), at, at + 1, slots(tables["swa"], n["swa"], now))
            for name, c in layer.compressed.items():
                of = f"{name}_state"
                state = pages(views[of][i])
                where = functools.partial(slots, tables[of], n[of])
                c.remember(state, at, at + 1, where(now))
                c.store(state, where, at, at + 1, pages(views[name][i]), tables[name])


@needs_amx
@pytest.mark.parametrize(
    ("pn", "dn", "dtp"), [(256, 256, 1), (256, 128, 2), (128, 512, 1), (512, 256, 1)]
)
def test_slab_of_deepseek_v4(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pn: int, dn: int, dtp: int
) -> None:
    sp, sd = sidecars
    p, d = (
        make(sp, f"pv4-{pn}-{dn}", lambda _: slab(pn)),
        make(sd, f"dv4-{pn}-{dn}", lambda _: slab(dn), dtp),
    )
    more = 12
    try:
        for tokens in (1, 3, 127, 250, 700):
            layers = [Layer.random(tokens + more) for _ in range(LAYERS)]
            query = torch.randn(1, HEADS, LATENT).bfloat16()
            noise = None
            if tokens > WINDOW:
                d.draw(tokens)
                noise = read_slab(tokens, d.ranks[0], d.views[0], d.caches, query)
            check(sp.endpoint, p, d, functools.partial(write_slab, tokens, layers), tokens)
            want = read_slab(tokens, p.ranks[0], p.views[0], p.caches, query)
            for r, views in zip(d.ranks, d.views, strict=True):
                for g, w in zip(read_slab(tokens, r, views, d.caches, query), want, strict=True):
                    assert torch.equal(g, w), f"{tokens} tokens: the kernels read something else"
            if noise is not None:
                assert not any(torch.equal(a, b) for a, b in zip(noise, want, strict=True)), (
                    "the kernels do not read what moved"
                )
            # Both go on: the next entries come from states of before and after the move.
            for e in (p, d):
                tables = e.ranks[0].tables
                for r, views in zip(e.ranks, e.views, strict=True):
                    r.tables = [list(t) for t in tables]
                    go_on(tokens, tokens + more, layers, r, views, e.caches)
            want = read_slab(tokens + more, p.ranks[0], p.views[0], p.caches, query)
            for r, views in zip(d.ranks, d.views, strict=True):
                for g, w in zip(
                    read_slab(tokens + more, r, views, d.caches, query), want, strict=True
                ):
                    assert torch.equal(g, w), (
                        f"{tokens} tokens and {more} more: the engines have gone apart"
                    )
    finally:
        p.close()
        d.close()


# DeepSeek-V3.2.


def v32(block: int) -> list[Cache]:
    """Rows of fp8_ds_mla and the keys of the indexer, as its layers ask for them. Kernels have
    pages of 64 tokens, of which a block may hold several."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    config = Bag(cache_config=Bag(block_size=block), model_config=None)
    layer = Bag(
        kv_cache_dtype="fp8_ds_mla",
        head_size=576,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
        topk_buffer_width=None,
    )
    rows = MLAAttention.get_kv_cache_spec(layer, config)
    keys = DeepseekV32IndexerCache.get_kv_cache_spec(
        Bag(cache_config=config.cache_config, head_dim=INDEX + 4, dtype=torch.uint8), config
    )
    assert 64 in [
        getattr(n, "base", n) for n in DeepseekV32IndexerBackend.get_supported_kernel_block_sizes()
    ]
    return [
        Cache("mla", rows, "fp8_ds_mla", {}, kernel=64),
        Cache("keys", keys, "dsa_indexer", {"kernel_tokens": 64}, kernel=64),
    ]


@needs_amx
@pytest.mark.parametrize(
    ("pn", "dn", "dtp"), [(64, 64, 1), (64, 192, 2), (128, 64, 1), (192, 128, 1)]
)
def test_rows_and_keys_of_deepseek_v32(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pn: int, dn: int, dtp: int
) -> None:
    from vllm import _custom_ops as ops

    sp, sd = sidecars
    p, d = (
        make(sp, f"pv32-{pn}-{dn}", lambda _: v32(pn)),
        make(sd, f"dv32-{pn}-{dn}", lambda _: v32(dn), dtp),
    )

    def kernel_table(r: Rank, block: int, of: int = 1) -> list[int]:
        return [b * (block // 64) + k for b in r.tables[of] for k in range(block // 64)]

    try:
        for tokens in (1, 50, 64, 333):
            rows = torch.randint(0, 256, (LAYERS, tokens, 656), dtype=torch.uint8)
            content = [Compressed.random(1, INDEX, tokens) for _ in range(LAYERS)]

            def fill(
                r: Rank,
                views: Views,
                caches: list[Cache],
                rows: torch.Tensor = rows,
                content: list[Compressed] = content,
            ) -> None:
                t = torch.arange(rows.shape[1])
                row, at = (
                    slots(kernel_table(r, c.spec.block_size, of), 64, t)
                    for of, c in enumerate(caches)
                )
                for i in range(LAYERS):
                    views["mla"][i][row // 64, 0, row % 64] = rows[i]
                    cache = pages(views["keys"][i])
                    c = content[i]
                    state = torch.zeros(len(t), 1, 2 * INDEX)
                    c.remember(state, 0, len(t), t)
                    ops.compress_norm_rope_store_indexer_cpu(
                        state,
                        t[:, None],
                        t,
                        at,
                        c.norm,
                        1e-6,
                        c.rope,
                        cache.view(cache.shape[0], -1),
                        64,
                        1,
                    )

            check(sp.endpoint, p, d, fill, tokens)
            # Logits are cut off below 0, head by head: of a query and its opposite one always
            # counts, even where there is one key.
            half = torch.randn(1, HEADS // 2, INDEX)
            query = torch.cat((half, -half), dim=1)
            for i in range(LAYERS):
                want = logits(
                    pages(p.views[0]["keys"][i]), kernel_table(p.ranks[0], pn), tokens, query
                )
                assert float(want.abs().max()) > 0
                for r, views in zip(d.ranks, d.views, strict=True):
                    got = logits(pages(views["keys"][i]), kernel_table(r, dn), tokens, query)
                    assert torch.equal(got, want), (
                        f"{tokens} tokens: the indexer reads something else"
                    )
    finally:
        p.close()
        d.close()


# Pages with scales in them.


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A cache with scales, as vLLM would allocate it."""

    dtype: str
    block: int
    order: str
    tp: int = 1
    size: int = 64  # of a head

    def __str__(self) -> str:
        return f"{self.dtype}-{self.order}-n{self.block}-tp{self.tp}"

    @property
    def value(self) -> int:
        """Bytes of K of a head of a token."""
        return self.size // 2 if "4" in self.dtype else self.size

    @property
    def scale(self) -> int:
        return self.size // 16 if self.dtype == "nvfp4" else 4

    def caches(self, rank: int) -> list[Cache]:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
        from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

        from kvspray_vllm import layout, strategies

        own = max(1, HEADS // self.tp)
        elem = torch.int8 if self.dtype == "int8_per_token_head" else torch.uint8
        spec = FullAttentionSpec(
            block_size=self.block,
            num_kv_heads=own,
            head_size=self.size,
            dtype=elem,
            kv_quant_mode=get_kv_quant_mode(self.dtype),
        )
        backend = (
            flashinfer().FlashInferBackend if self.dtype == "nvfp4" else TritonAttentionBackend
        )
        published = backend.customize_spec(spec)
        of = layout.Ranks(tp=rank, tp_size=self.tp)
        name = "FLASHINFER" if self.dtype == "nvfp4" else "TRITON_ATTN"
        kind = strategies.kind_of(published, name, HEADS, of, "")
        assert (kind.params["value_bytes"], kind.params["scale_bytes"]) == (self.value, self.scale)
        strategy = kind.strategy + ("_nhd" if self.order == "LBNHC" else "_hnd")
        return [Cache("attn", published, strategy, kind.params, self.order)]


@functools.cache
def flashinfer() -> Any:
    """vLLM's backend module, with an empty package where it imports FlashInfer's kernels from."""

    class Empty(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(
            self, name: str, path: Any, target: Any = None
        ) -> importlib.machinery.ModuleSpec | None:
            return (
                importlib.machinery.ModuleSpec(name, self, is_package=True)
                if name.split(".")[0] == "flashinfer"
                else None
            )

        def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
            return Empty(spec.name)

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    finder = Finder()
    sys.meta_path.append(finder)  # a real one goes first
    try:
        return importlib.import_module("vllm.v1.attention.backends.flashinfer")
    finally:
        sys.meta_path.remove(finder)


# K, V, their scales: [block, token, head, ...].
Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def places(kind: Scaled, view: torch.Tensor) -> Places:
    """Where the backend's own code has the values and the scales of tokens."""
    if kind.dtype == "nvfp4":
        (k, v), (ks, vs), order = flashinfer()._nvfp4_kv_views(view, max(1, HEADS // kind.tp))
        return tuple(
            t.view(torch.uint8).transpose(1, 2) if order == "HND" else t.view(torch.uint8)
            for t in (k, v, ks, vs)
        )  # type: ignore[return-value]
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    impl = object.__new__(TritonAttentionImpl)
    impl._k_scale_cache = impl._v_scale_cache = None
    impl._kv_quant_mode = get_kv_quant_mode(kind.dtype)
    impl.fp8_dtype = torch.float8_e4m3fn
    k, v = impl._pth_key_value_caches(view)
    return (
        k.view(torch.uint8)[..., : kind.value],
        v.view(torch.uint8)[..., : kind.value],
        impl._k_scale_cache,
        impl._v_scale_cache,
    )


SCALED = [
    (Scaled("int8_per_token_head", 16, "LBNHC"), Scaled("int8_per_token_head", 64, "LBHNC")),
    (Scaled("int8_per_token_head", 32, "LBHNC", 2), Scaled("int8_per_token_head", 16, "LBNHC")),
    (Scaled("fp8_per_token_head", 16, "LBHNC", 2), Scaled("fp8_per_token_head", 48, "LBHNC", 4)),
    (Scaled("fp8_per_token_head", 64, "LBNHC"), Scaled("fp8_per_token_head", 64, "LBNHC", 8)),
    (Scaled("int4_per_token_head", 16, "LBHNC", 8), Scaled("int4_per_token_head", 16, "LBNHC")),
    (Scaled("int4_per_token_head", 32, "LBNHC", 2), Scaled("int4_per_token_head", 64, "LBHNC", 2)),
    (Scaled("nvfp4", 16, "LBNHC"), Scaled("nvfp4", 64, "LBHNC")),
    (Scaled("nvfp4", 32, "LBHNC", 2), Scaled("nvfp4", 16, "LBHNC", 4)),
    (Scaled("nvfp4", 16, "LBHNC", 8), Scaled("nvfp4", 48, "LBNHC")),
]


@pytest.mark.parametrize(("pk", "dk"), SCALED, ids=str)
def test_pages_with_scales(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Scaled, dk: Scaled
) -> None:
    sp, sd = sidecars
    p, d = make(sp, f"p{pk}", pk.caches, pk.tp), make(sd, f"d{dk}", dk.caches, dk.tp)
    at_of = {}
    for e, kind in ((p, pk), (d, dk)):
        for r, views in zip(e.ranks, e.views, strict=True):
            at_of[id(r)] = kind, [places(kind, v) for v in views["attn"]]
            for v in views["attn"]:
                v.view(torch.uint8).random_(0, 64)  # where scales lie, the backend has written ones
    try:
        for tokens in (1, 50, 130):
            values = torch.randint(0, 256, (2, LAYERS, tokens, HEADS, pk.value), dtype=torch.uint8)
            scales = torch.randint(0, 256, (2, LAYERS, tokens, HEADS, pk.scale), dtype=torch.uint8)

            def fill(
                r: Rank,
                views: Views,
                _: list[Cache],
                values: torch.Tensor = values,
                scales: torch.Tensor = scales,
            ) -> None:
                kind, layers = at_of[id(r)]
                t = torch.arange(values.shape[2])
                blocks, heads = torch.tensor(r.table)[t // kind.block], list(r.heads(HEADS))
                for i, (k, v, ks, vs) in enumerate(layers):
                    for x, (to, scale_to) in enumerate(((k, ks), (v, vs))):
                        to[blocks, t % kind.block] = values[x, i][:, heads]
                        own = scales[x, i][:, heads]
                        scale_to[blocks, t % kind.block] = (
                            own
                            if scale_to.dtype == torch.uint8
                            else own.contiguous().view(torch.float32)[..., 0]
                        )

            check(sp.endpoint, p, d, fill, tokens)
    finally:
        at_of.clear()
        p.close()
        d.close()
