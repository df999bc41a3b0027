"""Real tensors, made and filled by vLLM's own code, moved by real sidecars, and read back by vLLM's
own indexing.

Nothing here computes an offset: views come from create_kv_cache_views, the CPU backend's pages from
its own kernel, and what is registered is what the connector would register for them. Each of vLLM's
layouts that a CPU can hold is tried against others, with other block sizes and other tensor
parallelism. So are hybrids: attention and recurrent states of two groups, in one pool of pages.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import cluster as rig
import pytest
import torch
from conftest import AMX, need
from ranks import Rank, compare, connected, draw, group, move, register, worker
from states import STATE_DTYPE, Inputs, Linear, Weights, bind, conv_order, step

LAYERS = 3
HEADS = 4
BLOCKS = 24
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tensors are small: threads would wait for each other


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
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.backend}-{self.order}-n{self.block}-tp{self.tp}-{dtype}"

    def spec(self, own: int) -> Any:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        if self.mla:
            return MLAAttentionSpec(
                block_size=self.block, num_kv_heads=1, head_size=576, dtype=self.dtype
            )
        return FullAttentionSpec(
            block_size=self.block, num_kv_heads=own, head_size=self.head_size, dtype=self.dtype
        )


def make(sidecar: rig.Sidecar, kind: Kind, engine: str) -> Engine:
    from vllm.v1.kv_cache_interface import (
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvspray_vllm import caches, layout

    out = Engine([], [])
    for rank in range(kind.tp):
        spec = kind.spec(max(1, HEADS // kind.tp))
        order = KVCacheLayout[kind.order]
        names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        nbytes = LAYERS * BLOCKS * spec.page_size_bytes
        interleaved = LAYERS * spec.page_size_bytes if order.is_block_outermost else None
        layer, block, *_ = compute_layout_strides(
            spec, BLOCKS, LAYERS, order, fixed_strides=(None, interleaved, None, None, None)
        )
        r = worker(sidecar, engine, rank, kind.tp, LAYERS, nbytes)
        views = create_kv_cache_views(
            r.memory[0], spec, BLOCKS, order, KVCacheTensor(nbytes, names, layer, block)
        )
        described = []
        chosen = None
        for i, view in enumerate(views):
            strategy, params, place = caches.layer_of(
                names[i],
                spec,
                view,
                BLOCKS,
                kind.backend,
                [HEADS],
                layout.Ranks(tp=rank, tp_size=kind.tp),
                layout.TRANSPOSED,
            )
            assert place.storage.address == r.memory[0].untyped_storage().data_ptr()
            this = strategy, params
            assert chosen in (None, this)
            chosen = this
            described.append(
                {
                    "name": names[i],
                    "index": i,
                    "region": 0,
                    "base": place.base,
                    "block_stride": place.block_stride,
                    "page_bytes": place.page_bytes,
                }
            )
        assert chosen is not None
        register(
            r,
            str(kind.dtype).removeprefix("torch."),
            [group(kind.block, chosen[0], chosen[1], BLOCKS, described)],
        )
        out.ranks.append(r)
        out.views.append(views)
    connected(*out.ranks)
    return out


Fill = Callable[[Rank, Kind, list[torch.Tensor], torch.Tensor], None]


def check(peer: str, p: Engine, d: Engine, pk: Kind, dk: Kind, fill: Fill, tokens: int) -> None:
    """fill writes a prompt as the engine does. The receivers' memory must become what filling it
    there would have made of it, to the last byte."""
    before = [[m.clone() for m in r.memory] for r in d.ranks]
    content = torch.randn(LAYERS, tokens, HEADS, 2, pk.head_size).to(pk.dtype)
    draw(p.ranks, [(pk.block, BLOCKS)], tokens)
    draw(d.ranks, [(dk.block, BLOCKS)], tokens)
    for r, views in zip(p.ranks, p.views, strict=True):
        fill(r, pk, views, content)
    move(peer, p.ranks, d.ranks, tokens)
    for r, views, was in zip(d.ranks, d.views, before, strict=True):
        compare(
            r,
            was,
            lambda r=r, views=views: fill(r, dk, views, content),
            f"{pk} to {dk}, {tokens} tokens",
        )


def by_index(rank: Rank, kind: Kind, views: list[torch.Tensor], content: torch.Tensor) -> None:
    """As every backend of vLLM writes: view[block, head, slot] = K and V of that head."""
    t = torch.arange(content.shape[1])
    blocks = torch.tensor(rank.table)[t // kind.block]
    for layer, view in enumerate(views):
        view[blocks, :, t % kind.block] = content[layer][:, list(rank.heads(HEADS))].flatten(2)


def by_kernel(rank: Rank, kind: Kind, views: list[torch.Tensor], content: torch.Tensor) -> None:
    """As vLLM's CPU backend writes, with its kernel."""
    from vllm import _custom_ops as ops

    tokens = content.shape[1]
    slots = torch.tensor(
        [rank.table[t // kind.block] * kind.block + t % kind.block for t in range(tokens)],
        dtype=torch.int64,
    )
    for layer, view in enumerate(views):
        b, h, n, _ = view.shape
        keys, values = view.view(b, h, 2 * n, -1).chunk(2, dim=2)
        own = content[layer][:, list(rank.heads(HEADS))]
        ops.cpu_attn_reshape_and_cache(
            own[:, :, 0].contiguous(),
            own[:, :, 1].contiguous(),
            keys,
            values,
            slots,
            "vec",
            1.0,
            1.0,
            "auto",
        )


def attention(
    rank: Rank, kind: Kind, views: list[torch.Tensor], tokens: int, query: torch.Tensor
) -> torch.Tensor:
    """What vLLM's CPU backend makes of the cache: the attention of one token after the prompt, with
    its kernel."""
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
            num_reqs=1, num_heads=own, num_kv_heads=own, head_dim=kind.head_size, seq_lens=lens,
            dtype=kind.dtype, query_start_loc=start, causal=True, sliding_window_size=-1,
            isa="vec", enable_kv_split=False,
        )  # fmt: skip
        o = torch.empty_like(q)
        ops.cpu_attention_with_kv_cache(
            q,
            keys,
            values,
            o,
            start,
            lens,
            kind.head_size**-0.5,
            True,
            None,
            -1,
            table,
            0.0,
            meta,
            None,
        )
        out.append(o)
    return torch.stack(out)


PAIRS = [
    (Kind(a, 16), Kind(ORDERS[(i + 1 + i % 4) % len(ORDERS)], n, tp))
    for i, a in enumerate(ORDERS)
    for n, tp in ((16, 1), (64, 2))
]
PAIRS += [
    (Kind(a, 32, 2), Kind(ORDERS[(i + 2) % len(ORDERS)], 16, 4)) for i, a in enumerate(ORDERS)
]
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
    (32, 1, torch.bfloat16), (32, 2, torch.bfloat16), (64, 1, torch.bfloat16),
    (96, 4, torch.bfloat16), (32, 1, torch.float32), (64, 2, torch.float32),
)]  # fmt: skip


@pytest.mark.parametrize(
    ("pk", "dk"), [(a, b) for a in CPU for b in CPU if a.dtype == b.dtype], ids=str
)
def test_pages_of_the_cpu_backend(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind
) -> None:
    sp, sd = sidecars
    p, d = make(sp, pk, f"p{pk}"), make(sd, dk, f"d{dk}")
    try:
        for tokens in (1, 33, 200):
            check(sp.endpoint, p, d, pk, dk, by_kernel, tokens)
            # And read by the kernel that reads them: both engines see the same prompt.
            query = torch.randn(1, HEADS, pk.head_size).to(pk.dtype)
            want = torch.cat(
                [
                    attention(r, pk, views, tokens, query)
                    for r, views in zip(p.ranks, p.views, strict=True)
                ],
                dim=2,
            )
            got = torch.cat(
                [
                    attention(r, dk, views, tokens, query)
                    for r, views in zip(d.ranks, d.views, strict=True)
                ],
                dim=2,
            )
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    finally:
        p.close()
        d.close()


@pytest.mark.parametrize(
    ("pn", "ptp", "dn", "dtp"), [(16, 1, 16, 1), (16, 2, 64, 1), (64, 1, 16, 4)]
)
def test_latents_of_mla(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pn: int, ptp: int, dn: int, dtp: int
) -> None:
    """By vLLM's reference backend, and by that for AMX, which wants blocks of 32: they leave the
    same rows, so that either may prefill. Where the processor has no AMX the reference writes the
    larger blocks, too."""
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    sp, sd = sidecars
    pk, dk = (
        Kind("LBHNC", n, tp, "AMX_MLA" if AMX and n != 16 else "CPU_MLA", mla=True)
        for n, tp in ((pn, ptp), (dn, dtp))
    )
    impl = {"CPU_MLA": CPUMLAImpl, "AMX_MLA": AMXMLAImpl}
    p, d = make(sp, pk, f"pm{pn}{ptp}"), make(sd, dk, f"dm{dn}{dtp}")

    def fill(rank: Rank, kind: Kind, views: list[torch.Tensor], content: torch.Tensor) -> None:
        tokens = content.shape[1]
        slots = torch.tensor(
            [rank.table[t // kind.block] * kind.block + t % kind.block for t in range(tokens)],
            dtype=torch.int64,
        )
        latent = content.reshape(LAYERS, tokens, -1).repeat(1, 1, 8)[:, :, :576]
        for layer, view in enumerate(views):
            # The backend's own method; it uses nothing of the object.
            impl[kind.backend].do_kv_cache_update(
                None,
                latent[layer][:, :512],
                latent[layer][:, None, 512:],
                view.squeeze(1),
                slots,
                "auto",
                torch.ones(1),
            )

    try:
        for tokens in (1, 50, 130):
            check(sp.endpoint, p, d, pk, dk, fill, tokens)
    finally:
        p.close()
        d.close()


LINEAR_GROUPS = 2
# tokens: where states of earlier blocks are not kept, a request's only one is that of the model's
# longest prompt.
LONGEST = 8192


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """An engine with full attention and linear attention. order: of its convolutions. align: states
    are kept at the ends of blocks, in block tables that count them like attention's; otherwise a
    request has one block for its state."""

    of: Linear
    order: str = "SD"
    tp: int = 1
    align: bool = False
    # Tokens that a block has more than a state needs: behind the state, the page has no owner.
    wider: int = 0
    pages: str = "LBHNC"

    def __str__(self) -> str:
        kind, mode = f"{self.of.kind}{self.of.k_heads}", "align" if self.align else "one"
        return f"{kind}-{self.order}-tp{self.tp}-{mode}-{self.pages}-wider{self.wider}"

    def specs(self) -> tuple[Any, Any]:
        """Of attention, and of linear attention. vLLM makes blocks of attention as wide as a state,
        and pads states to them."""
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        linear = MambaSpec(
            block_size=LONGEST, shapes=self.of.shapes(self.tp),
            dtypes=(torch.bfloat16, STATE_DTYPE), mamba_cache_mode="align" if self.align
            else "none", mamba_type={"gdn": Backend.GDN_ATTN, "mamba2": Backend.MAMBA2,
            "kda": Backend.GDN_ATTN, "mamba1": Backend.MAMBA1}[self.of.kind],
        )  # fmt: skip
        token = FullAttentionSpec(
            block_size=1, num_kv_heads=HEADS // self.tp, head_size=16, dtype=torch.bfloat16
        ).page_size_bytes
        block = -(-linear.page_size_bytes // (16 * token)) * 16 + self.wider
        attention = FullAttentionSpec(
            block_size=block, num_kv_heads=HEADS // self.tp, head_size=16, dtype=torch.bfloat16
        )
        linear = dataclasses.replace(
            linear,
            page_size_padded=attention.page_size_bytes,
            block_size=block if self.align else LONGEST,
        )
        return attention, linear

    def tables(self, tokens: int) -> list[list[int]]:
        """As vLLM's block pool hands out blocks: each to one group, and block 0 to none; it stands
        where there is no state any more."""
        attention, linear = self.specs()
        n = -(-tokens // attention.block_size)
        free = random.sample(range(1, BLOCKS), n + LINEAR_GROUPS)
        states = [
            [0] * ((tokens - 1) // linear.block_size) + [free.pop()] for _ in range(LINEAR_GROUPS)
        ]
        return [free, *states]


@dataclasses.dataclass
class HybridRank:
    """A rank of a hybrid: its views of attention's pages, and of each linear layer's states."""

    kind: Hybrid
    r: Rank
    views: list[torch.Tensor]
    states: list[list[tuple[torch.Tensor, torch.Tensor]]]  # [group][layer]: conv, recurrent

    def attend(self, content: torch.Tensor) -> None:
        by_index(
            self.r,
            Kind("LBHNC", self.kind.specs()[0].block_size, self.kind.tp),
            self.views,
            content,
        )

    def slot(self, group: int, tokens: int) -> int:
        return self.r.tables[1 + group][(tokens - 1) // self.kind.specs()[1].block_size]

    def by_channel(self, conv: torch.Tensor) -> torch.Tensor:
        return conv if self.kind.order == "DS" else conv.transpose(-1, -2)


@dataclasses.dataclass
class Prompt:
    """What a prompt leaves in the caches, of all heads and channels of the model."""

    kv: torch.Tensor
    conv: list[list[torch.Tensor]]  # [group][layer]: [channel, history]
    state: list[list[torch.Tensor]]  # [head, ...]

    def write(self, h: HybridRank, tokens: int) -> None:
        of, tp = h.kind.of, h.kind.tp
        h.attend(self.kv)
        for g, layers in enumerate(h.states):
            at = h.slot(g, tokens)
            for i, (conv, state) in enumerate(layers):
                h.by_channel(conv[at]).copy_(self.conv[g][i][of.channels(h.r.rank, tp)])
                state[at] = self.state[g][i][of.heads(h.r.rank, tp)]


def make_hybrid(sidecar: rig.Sidecar, kind: Hybrid, engine: str) -> list[HybridRank]:
    from vllm.v1.kv_cache_interface import (
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvspray_vllm import caches, layout

    out = []
    order = KVCacheLayout[kind.pages]
    with conv_order(kind.order):
        specs = kind.specs()
    for rank in range(kind.tp):
        page = specs[0].page_size_bytes
        nbytes = LAYERS * BLOCKS * page
        r = worker(sidecar, engine, rank, kind.tp, LAYERS * (1 + LINEAR_GROUPS), nbytes)
        groups, every = [], []
        for g in range(1 + LINEAR_GROUPS):
            spec = specs[min(g, 1)]
            module = "linear_attn" if g else "self_attn.attn"
            names = [f"model.layers.{g + i * (1 + LINEAR_GROUPS)}.{module}" for i in range(LAYERS)]
            interleaved = LAYERS * page if order.is_block_outermost else None
            layer, block, *_ = compute_layout_strides(
                spec, BLOCKS, LAYERS, order, fixed_strides=(None, interleaved, None, None, None)
            )
            views = create_kv_cache_views(
                r.memory[0], spec, BLOCKS, order, KVCacheTensor(nbytes, names, layer, block)
            )
            every.append(views)
            described = []
            for i, view in enumerate(views):
                place = caches.place_of(names[i], view, BLOCKS)
                described.append({"name": names[i], "index": g * LAYERS + i, "region": 0,
                    "base": place.base, "block_stride": place.block_stride,
                    "page_bytes": place.page_bytes})  # fmt: skip
            of = layout.Ranks(tp=rank, tp_size=kind.tp)
            backend = spec.mamba_type.get_class().get_name() if g else "FLASH_ATTN"
            with conv_order(kind.order):
                strategy, params, _ = caches.layer_of(
                    names[0], spec, views[0], BLOCKS, backend, [HEADS], of, layout.TRANSPOSED,
                    kind.of.k_heads,
                )  # fmt: skip
            groups.append(group(spec.block_size, strategy, params, BLOCKS, described))
        register(r, "bfloat16", groups)
        out.append(
            HybridRank(
                kind,
                r,
                every[0],
                [[bind(v, specs[1].shapes, specs[1].dtypes) for v in views] for views in every[1:]],
            )
        )
    connected(*(h.r for h in out))
    return out


def one_more(
    ranks: list[HybridRank], weights: list[list[Weights]], x: Inputs, tokens: int
) -> torch.Tensor:
    """What the layers make of a token after the prompt, by vLLM's kernels: [group and layer, head,
    dim]."""
    out = []
    for g, ws in enumerate(weights):
        for i, w in enumerate(ws):
            out.append(
                torch.cat(
                    [
                        step(
                            h.kind.of,
                            h.kind.order,
                            h.r.rank,
                            h.kind.tp,
                            w,
                            x,
                            *h.states[g][i],
                            h.slot(g, tokens),
                            False,
                        )[0]
                        for h in ranks
                    ]
                )
            )
    return torch.stack(out)


def differences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How far two outputs are apart in each layer and head, as a part of the largest number there:
    by model and layer they are 0.1 or 4000."""
    return (got.float() - want.float()).abs().amax(dim=-1) / want.float().abs().amax(dim=-1)


def prefill(p: list[HybridRank], weights: list[list[Weights]], tokens: int) -> Prompt:
    """The layers compute a prompt, by vLLM's kernels where it has them for CPUs; and what they
    left, put together from the ranks."""
    of, tp = p[0].kind.of, p[0].kind.tp
    shapes = of.shapes(1)
    every = range(LINEAR_GROUPS), range(LAYERS)
    channels = sum(of.sections)
    prompt = Prompt(torch.randn(LAYERS, tokens, HEADS, 2, 16).to(torch.bfloat16),
        [[torch.randn(channels, 3).to(torch.bfloat16) for _ in every[1]] for _ in every[0]],
        [[torch.randn(shapes[1]).to(STATE_DTYPE) for _ in every[1]]
        for _ in every[0]])  # fmt: skip
    for h in p:
        prompt.write(h, tokens)
    if not of.kernels:
        return prompt
    for g in every[0]:
        for i in every[1]:
            x = Inputs.random(of, tokens)
            for h in p:
                at = h.slot(g, tokens)
                step(of, h.kind.order, h.r.rank, tp, weights[g][i], x, *h.states[g][i], at, True)
                conv, state = h.states[g][i]
                prompt.conv[g][i][of.channels(h.r.rank, tp)] = h.by_channel(conv[at])
                prompt.state[g][i][of.heads(h.r.rank, tp)] = state[at]
    return prompt


def looked_up(h: HybridRank, g: int, i: int, tokens: int) -> None:
    """Where vLLM's own helpers look for the state of the request, when they carry it on into its
    next block, it lies."""
    with conv_order(h.kind.order):
        for view, spec_of in zip(h.states[g][i], h.kind.of.copy_specs, strict=True):
            spec = spec_of(view, h.r.tables[1 + g], (tokens - 1) // h.kind.specs()[1].block_size, 1)
            want = view[h.slot(g, tokens)].contiguous().view(torch.uint8).numpy().tobytes()
            assert ctypes.string_at(spec.start_addr, spec.num_elements * view.itemsize) == want


GDN, GDN4 = Linear("gdn", 2, 64, 4, 64), Linear("gdn", 4, 64, 8, 64)
KDA = Linear("kda", 4, 32, 4, 32)
MAMBA1 = Linear("mamba1", 0, 16, 64, 1)
MAMBA2, ONE_GROUP = Linear("mamba2", 2, 48, 4, 16), Linear("mamba2", 1, 32, 4, 16)
HYBRIDS = [
    (Hybrid(GDN), Hybrid(GDN, wider=16)),
    (Hybrid(GDN, "SD", 2, True), Hybrid(GDN, "DS", 1, pages="BLHNC")),
    (Hybrid(GDN, "DS", 1, pages="BLHNC"), Hybrid(GDN, "SD", 2, True)),
    (Hybrid(GDN4, "SD", 4, True), Hybrid(GDN4, "DS", 2, True)),
    (Hybrid(MAMBA2, "DS", 2, True), Hybrid(MAMBA2, "SD", 1, True, wider=32)),
    (Hybrid(MAMBA2, "SD"), Hybrid(MAMBA2, "DS", 2)),
    (Hybrid(ONE_GROUP, "SD"), Hybrid(ONE_GROUP, "DS", 4)),
    (Hybrid(ONE_GROUP, "SD", 2), Hybrid(ONE_GROUP, "SD", 1, True)),
    (Hybrid(ONE_GROUP, "DS", 4), Hybrid(ONE_GROUP, "SD", 2)),
    (Hybrid(KDA, "SD", 2, True, wider=16), Hybrid(KDA, "DS", 1)),
    (Hybrid(KDA, "DS", 1), Hybrid(KDA, "SD", 2)),
    (Hybrid(MAMBA1, "SD", 2, True), Hybrid(MAMBA1, "DS", 1)),
    (Hybrid(MAMBA1, "DS", 1), Hybrid(MAMBA1, "SD", 4, True)),
]


@pytest.mark.parametrize(("pk", "dk"), HYBRIDS, ids=str)
def test_states_of_hybrids(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Hybrid, dk: Hybrid
) -> None:
    sp, sd = sidecars
    p, d = make_hybrid(sp, pk, f"ph{pk}{dk}"), make_hybrid(sd, dk, f"dh{pk}{dk}")
    try:
        weights = [[Weights.random(pk.of) for _ in range(LAYERS)] for _ in range(LINEAR_GROUPS)]
        x = Inputs.random(pk.of, 1)
        for tokens in (1, 300):
            for ranks in (p, d):
                tables = ranks[0].kind.tables(tokens)
                for h in ranks:
                    h.r.tables = tables
            prompt = prefill(p, weights, tokens)
            noise = one_more(d, weights, x, tokens) if pk.of.kernels else None
            before = [[m.clone() for m in h.r.memory] for h in d]
            move(sp.endpoint, [h.r for h in p], [h.r for h in d], tokens)
            for h, was in zip(d, before, strict=True):
                compare(
                    h.r,
                    was,
                    functools.partial(prompt.write, h, tokens),
                    f"{pk} to {dk}, {tokens} tokens",
                )
                for g in range(LINEAR_GROUPS):
                    for i in range(LAYERS):
                        looked_up(h, g, i, tokens)
            if noise is not None:
                want = one_more(p, weights, x, tokens)
                apart, before_it = (
                    differences(one_more(d, weights, x, tokens), want),
                    differences(noise, want),
                )
                assert float(apart.max()) < 2e-2, f"{pk} to {dk}, {tokens} tokens: {apart}"
                # Two or three heads in a thousand are by chance as near as that.
                assert float(before_it.max()) > 0.2, "the token does not depend on the state"
    finally:
        for h in (*p, *d):
            h.views.clear()
            h.states.clear()
            h.r.close()
