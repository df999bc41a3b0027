# SPDX-License-Identifier: Apache-2.0
"""Real tensors, made and filled by vLLM's own code, moved by real sidecars, and read back by vLLM's own indexing.

Nothing here computes an offset: views come from create_kv_cache_views, the CPU backend's pages from its own kernel, and what is
registered is what the connector would register for them. Each of vLLM's layouts that a CPU can hold is tried against others, with
other block sizes and other tensor parallelism.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import cluster as rig
import pytest
import torch
from conftest import need
from ranks import Rank, compare, connected, draw, group, move, register, worker

LAYERS = 3
HEADS = 4
BLOCKS = 24
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.fixture(scope="module")
def sidecars(workdir: pathlib.Path) -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    need("the sidecar", rig.BINARY.exists(), "run make build")
    p, d = rig.Sidecar("tp", workdir), rig.Sidecar("td", workdir)
    with rig.running(p, d):
        yield p, d
        assert p.panics() is None and d.panics() is None


@dataclasses.dataclass
class Engine:
    """The workers of one kind of engine, and each one's views: a layer each."""

    ranks: list[Rank]
    views: list[list[torch.Tensor]]

    def close(self) -> None:
        self.views.clear()
        for r in self.ranks:
            r.close()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A cache as vLLM would allocate it."""

    order: str
    block: int
    tp: int = 1
    backend: str = "FLASH_ATTN"
    dtype: torch.dtype = torch.bfloat16
    head_size: int = 16
    mla: bool = False

    def __str__(self) -> str:
        return f"{self.backend}-{self.order}-n{self.block}-tp{self.tp}-{str(self.dtype).removeprefix('torch.')}"

    def spec(self, own: int) -> Any:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        if self.mla:
            return MLAAttentionSpec(block_size=self.block, num_kv_heads=1, head_size=576, dtype=self.dtype)
        return FullAttentionSpec(block_size=self.block, num_kv_heads=own, head_size=self.head_size, dtype=self.dtype)


def make(sidecar: rig.Sidecar, kind: Kind, engine: str) -> Engine:
    from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvspray_vllm import layout

    out = Engine([], [])
    for rank in range(kind.tp):
        spec = kind.spec(max(1, HEADS // kind.tp))
        order = KVCacheLayout[kind.order]
        names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        nbytes = LAYERS * BLOCKS * spec.page_size_bytes
        interleaved = LAYERS * spec.page_size_bytes if order.is_block_outermost else None
        layer, block, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, order, fixed_strides=(None, interleaved, None, None, None))
        r = worker(sidecar, engine, rank, kind.tp, LAYERS, nbytes)
        views = create_kv_cache_views(r.memory[0], spec, BLOCKS, order, KVCacheTensor(nbytes, names, layer, block))
        described = []
        chosen = None
        for i, view in enumerate(views):
            place = layout.place_of(view, BLOCKS)
            assert place.storage == r.memory[0].untyped_storage().data_ptr()
            strategy, params = layout.strategy_of(
                spec, kind.backend, kind.order, view.element_size(), 1 if kind.mla else HEADS, layout.Ranks(tp=rank, tp_size=kind.tp), layout.TRANSPOSED
            )
            this = strategy, layout.place_params(names[i], place, strategy, params)
            assert chosen in (None, this)
            chosen = this
            described.append(
                {"name": names[i], "index": i, "region": 0, "base": place.base, "block_stride": place.block_stride, "page_bytes": place.page_bytes}
            )
        assert chosen is not None
        register(r, str(kind.dtype).removeprefix("torch."), [group(kind.block, chosen[0], chosen[1], BLOCKS, described)])
        out.ranks.append(r)
        out.views.append(views)
    connected(*out.ranks)
    return out


Fill = Callable[[Rank, Kind, list[torch.Tensor], torch.Tensor], None]


def check(peer: str, p: Engine, d: Engine, pk: Kind, dk: Kind, fill: Fill, tokens: int) -> None:
    """fill writes a prompt as the engine does. The receivers' memory must become what filling it there would have made of it, to the last
    byte."""
    before = [[m.clone() for m in r.memory] for r in d.ranks]
    content = torch.randn(LAYERS, tokens, HEADS, 2, pk.head_size).to(pk.dtype)
    draw(p.ranks, [(pk.block, BLOCKS)], tokens)
    draw(d.ranks, [(dk.block, BLOCKS)], tokens)
    for r, views in zip(p.ranks, p.views, strict=True):
        fill(r, pk, views, content)
    move(peer, p.ranks, d.ranks, tokens)
    for r, views, was in zip(d.ranks, d.views, before, strict=True):
        compare(r, was, lambda r=r, views=views: fill(r, dk, views, content), f"{pk} to {dk}, {tokens} tokens")


def by_index(rank: Rank, kind: Kind, views: list[torch.Tensor], content: torch.Tensor) -> None:
    """As every backend of vLLM writes: view[block, head, slot] = K and V of that head."""
    for layer, view in enumerate(views):
        for t in range(content.shape[1]):
            for h, head in enumerate(rank.heads(HEADS)):
                view[rank.table[t // kind.block], h, t % kind.block] = content[layer, t, head].reshape(-1)


def by_kernel(rank: Rank, kind: Kind, views: list[torch.Tensor], content: torch.Tensor) -> None:
    """As vLLM's CPU backend writes, with its kernel."""
    from vllm import _custom_ops as ops

    tokens = content.shape[1]
    slots = torch.tensor([rank.table[t // kind.block] * kind.block + t % kind.block for t in range(tokens)], dtype=torch.int64)
    for layer, view in enumerate(views):
        b, h, n, _ = view.shape
        keys, values = view.view(b, h, 2 * n, -1).chunk(2, dim=2)
        own = content[layer][:, list(rank.heads(HEADS))]
        ops.cpu_attn_reshape_and_cache(own[:, :, 0].contiguous(), own[:, :, 1].contiguous(), keys, values, slots, "vec", 1.0, 1.0, "auto")


def attention(rank: Rank, kind: Kind, views: list[torch.Tensor], tokens: int, query: torch.Tensor) -> torch.Tensor:
    """What vLLM's CPU backend makes of the cache: the attention of one token after the prompt, with its kernel."""
    from vllm import _custom_ops as ops

    table = torch.tensor([rank.table], dtype=torch.int32)
    start, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    own = len(rank.heads(HEADS))
    q = query[:, list(rank.heads(HEADS))].contiguous()
    out = []
    for view in views:
        b, h, n, _ = view.shape
        keys, values = view.view(b, h, 2 * n, -1).chunk(2, dim=2)
        meta = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=own, num_kv_heads=own, head_dim=kind.head_size, seq_lens=lens, dtype=kind.dtype, query_start_loc=start,
            causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=False,
        )  # fmt: skip
        o = torch.empty_like(q)
        ops.cpu_attention_with_kv_cache(q, keys, values, o, start, lens, kind.head_size**-0.5, True, None, -1, table, 0.0, meta, None)
        out.append(o)
    return torch.stack(out)


PAIRS = [(Kind(a, 16), Kind(ORDERS[(i + 1 + i % 4) % len(ORDERS)], n, tp)) for i, a in enumerate(ORDERS) for n, tp in ((16, 1), (64, 2))]
PAIRS += [(Kind(a, 32, 2), Kind(ORDERS[(i + 2) % len(ORDERS)], 16, 4)) for i, a in enumerate(ORDERS)]
PAIRS += [(Kind("LBNHC", 16, 8), Kind("BHLNC", 48)), (Kind("LHBNC", 48), Kind("LBNHC", 16, 8))]


@pytest.mark.parametrize(("pk", "dk"), PAIRS, ids=str)
def test_every_order_of_vllm(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind) -> None:
    sp, sd = sidecars
    p, d = make(sp, pk, f"p{pk}"), make(sd, dk, f"d{dk}")
    try:
        for tokens in (1, 50, 130):
            check(sp.endpoint, p, d, pk, dk, by_index, tokens)
    finally:
        p.close()
        d.close()


CPU = [Kind("LBHNC", n, tp, "CPU_ATTN", dtype, 32) for n, tp, dtype in (
    (32, 1, torch.bfloat16), (32, 2, torch.bfloat16), (64, 1, torch.bfloat16), (96, 4, torch.bfloat16), (32, 1, torch.float32), (64, 2, torch.float32),
)]  # fmt: skip


@pytest.mark.parametrize(("pk", "dk"), [(a, b) for a in CPU for b in CPU if a.dtype == b.dtype], ids=str)
def test_pages_of_the_cpu_backend(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind) -> None:
    sp, sd = sidecars
    p, d = make(sp, pk, f"p{pk}"), make(sd, dk, f"d{dk}")
    try:
        for tokens in (1, 33, 200):
            check(sp.endpoint, p, d, pk, dk, by_kernel, tokens)
            # And read by the kernel that reads them: both engines see the same prompt.
            query = torch.randn(1, HEADS, pk.head_size).to(pk.dtype)
            want = torch.cat([attention(r, pk, views, tokens, query) for r, views in zip(p.ranks, p.views, strict=True)], dim=2)
            got = torch.cat([attention(r, dk, views, tokens, query) for r, views in zip(d.ranks, d.views, strict=True)], dim=2)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize(("pn", "ptp", "dn", "dtp"), [(16, 1, 16, 1), (16, 2, 64, 1), (64, 1, 16, 4)])
def test_latents_of_mla(sidecars: tuple[rig.Sidecar, rig.Sidecar], pn: int, ptp: int, dn: int, dtp: int) -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    sp, sd = sidecars
    pk, dk = Kind("LBHNC", pn, ptp, "CPU_MLA", mla=True), Kind("LBHNC", dn, dtp, "CPU_MLA", mla=True)
    p, d = make(sp, pk, f"pm{pn}{ptp}"), make(sd, dk, f"dm{dn}{dtp}")

    def fill(rank: Rank, kind: Kind, views: list[torch.Tensor], content: torch.Tensor) -> None:
        tokens = content.shape[1]
        slots = torch.tensor([rank.table[t // kind.block] * kind.block + t % kind.block for t in range(tokens)], dtype=torch.int64)
        latent = content.reshape(LAYERS, tokens, -1).repeat(1, 1, 8)[:, :, :576]
        for layer, view in enumerate(views):
            # The backend's own method; it uses nothing of the object.
            CPUMLAImpl.do_kv_cache_update(None, latent[layer][:, :512], latent[layer][:, None, 512:], view.squeeze(1), slots, "auto", torch.ones(1))

    try:
        for tokens in (1, 50, 130):
            check(sp.endpoint, p, d, pk, dk, fill, tokens)
    finally:
        p.close()
        d.close()
