"""SGLang's own memory pools, made and filled by its own code on a CPU, moved by real sidecars, and
compared with what its code would have written there. Device pools (K and V apart, in bf16 and fp8,
MLA, the indexer of DSA, the state slots of linear attention) and the layouts of its host pools,
each against others, with other page sizes and other tensor parallelism.

Device pools are written and read by their own methods, in pages that its own allocator hands out.
Between a host pool and a device SGLang copies with CUDA kernels alone; host pools are written
through what their own code makes of the buffer: its views of each layer, and pages taken and put
back where it makes no such views.

Triton's kernels run in its interpreter. What has none is the one kernel with which SGLang stores
the indexer's keys on NVIDIA's GPUs (fused_store_index_k_cache, CUDA). The method that chooses it
falls back to two of Triton without one; that is what runs here.

Its environment is 2.7 GB and takes minutes to fetch (test/rig/env.py --sglang), so these tests have
a target of their own: make test-sglang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "rig"))

import cluster as rig
import pytest
import torch
from ranks import Rank, compare, connected, group, move, owner, register

if "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(","):
    import sglang  # noqa: F401
else:
    pytest.importorskip(
        "sglang", reason="SGLang is missing; make test-sglang makes its environment"
    )

LAYERS, HEADS, DIM, LATENT, ROPE = 3, 4, 8, 32, 8
TOKENS = 768  # of each pool
Content = torch.Tensor  # [layer, token, head, K or V, dim]


@pytest.fixture(scope="module", autouse=True)
def parallel() -> None:
    alone()


def alone() -> None:
    """Makes pools in this process think that it is a server's only rank."""
    # SGLang keeps 10 GB of a host free; these pools are kilobytes, and a shared machine may have
    # less.
    from sglang.srt.mem_cache.pool_host import base, mha, mla
    from sglang.srt.runtime_context import get_parallel

    for module in (base, mha, mla):
        if hasattr(module, "host_memory_budget_bytes"):
            module.host_memory_budget_bytes = lambda asked: asked

    names = ("tp", "pp", "attn_dcp", "attn_tp", "attn_dp", "attn_cp")
    get_parallel().override_permanently(
        dcp_enabled=False, **{f"{n}_{k}": int(k == "size") for n in names for k in ("size", "rank")}
    )


@pytest.fixture(scope="module")
def sidecars() -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    with two_sidecars() as both:
        yield both


@contextlib.contextmanager
def two_sidecars() -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        p, d = rig.Sidecar("gp", pathlib.Path(dir)), rig.Sidecar("gd", pathlib.Path(dir))
        with rig.running(p, d):
            yield p, d
            assert p.panics() is None and d.panics() is None


@dataclasses.dataclass(frozen=True)
class Kind:
    pool: str
    page: int
    tp: int = 1
    layout: str = "device"

    def __str__(self) -> str:
        return f"{self.pool}-{self.layout}-{self.page}-tp{self.tp}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.pool == "mha8" else torch.bfloat16

    @property
    def blocks(self) -> int:
        return self.tokens // self.page

    @property
    def tokens(self) -> int:
        # A device pool has one page more than its size, for padding.
        return TOKENS + self.page if self.layout == "device" else TOKENS * 2


def layer(
    i: int, suffix: str, region: int, base: int, stride: int, page: int, index: int
) -> dict[str, Any]:
    return {
        "name": f"layers.{i}{suffix}",
        "index": index,
        "region": region,
        "base": base,
        "block_stride": stride,
        "page_bytes": page,
    }


def device_mha(kind: Kind, heads: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=TOKENS, page_size=kind.page, dtype=kind.dtype, head_num=heads, head_dim=DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip


def device_mla(kind: Kind) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=TOKENS, page_size=kind.page, dtype=torch.bfloat16, kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE, layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


Fill = Callable[[Rank, torch.Tensor, Content], None]  # rank, slots of the prompt's tokens, content


def pages_of(page: int, tokens: int) -> list[int]:
    """Pages for a prompt, as a device pool's allocator hands them out, in any order. Never the
    first: to it go tokens that pad a batch."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    allocator = PagedTokenToKVPoolAllocator(TOKENS, page, torch.bfloat16, "cpu", None, False)
    allocator.free_pages = allocator.free_pages[torch.randperm(len(allocator.free_pages))]
    loc = allocator.alloc(-(-tokens // page) * page)
    table: list[int] = (loc[::page] // page).tolist()
    assert 0 not in table
    return table


def slots(rank: Rank, kind: Kind | DSA, tokens: int) -> torch.Tensor:
    t = torch.arange(tokens)
    return torch.tensor(rank.table, dtype=torch.int64)[t // kind.page] * kind.page + t % kind.page


def build(kind: Kind, rank: int) -> tuple[list[torch.Tensor], list[dict[str, Any]], Fill]:
    """The pool's tensors, its registration, and how SGLang writes to it."""
    params = {"kv_heads": HEADS, "tp_rank": rank, "tp_size": kind.tp}
    heads = max(1, HEADS // kind.tp)
    first = rank * HEADS // kind.tp
    token = heads * DIM * kind.dtype.itemsize

    def kv(content: Content, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = content[i][:, first : first + heads]
        return own[:, :, 0].contiguous(), own[:, :, 1].contiguous()

    def latent(content: Content, i: int) -> torch.Tensor:
        return content[i].reshape(content.shape[1], 1, -1)[:, :, : LATENT + ROPE].contiguous()

    if kind.layout == "device" and kind.pool in ("mha", "mha8"):
        pool = device_mha(kind, heads)
        tensors = [*pool.k_buffer, *pool.v_buffer]
        groups = [
            group(kind.page, f"sglang_{x}", params | {"heads": heads}, kind.blocks,
            [layer(i, f"#{x}", r * LAYERS + i, 0, kind.page * token, kind.page * token,
            r * LAYERS + i) for i in range(LAYERS)]) for r, x in enumerate("kv")
        ]  # fmt: skip

        def fill(r: Rank, loc: torch.Tensor, content: Content) -> None:
            for i in range(LAYERS):
                pool.set_kv_buffer(Layer(i), loc, *kv(content, i), layer_id_override=i)

        return tensors, groups, fill
    if kind.layout == "device" and kind.pool == "mla":
        pool = device_mla(kind)
        row = (LATENT + ROPE) * 2
        groups = [
            group(
                kind.page,
                "mla",
                {},
                kind.blocks,
                [layer(i, "", i, 0, kind.page * row, kind.page * row, i) for i in range(LAYERS)],
            )
        ]

        def fill(r: Rank, loc: torch.Tensor, content: Content) -> None:
            for i in range(LAYERS):
                pool.set_kv_buffer(None, loc, latent(content, i), None, layer_id_override=i)

        return list(pool.kv_buffer), groups, fill
    # A host pool.
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    dev = device_mla(kind)
    host = MLATokenToKVPoolHost(
        dev.get_device_pool_infos()[0].buffer_info, 2.0, 0, kind.page, kind.layout,
        pin_memory=False, device="cpu", allocator_type="default", device_capacity_tokens=TOKENS,
        start_layer=0, end_layer=LAYERS, override_kv_cache_dim=dev.kv_cache_dim,
        target_layer_num=LAYERS,
    )  # fmt: skip
    buf = host.kv_buffer
    size = host.size
    blocks = size // kind.page
    row = (LATENT + ROPE) * 2
    base, stride, more = {
        "layer_first": (size * row, kind.page * row, {}),
        "page_first": (row, kind.page * LAYERS * row, {"row_stride": LAYERS * row}),
        "page_first_direct": (kind.page * row, kind.page * LAYERS * row, {}),
    }[kind.layout]
    groups = [
        group(
            kind.page,
            "mla",
            more,
            blocks,
            [layer(i, "", 0, i * base, stride, kind.page * row, i) for i in range(LAYERS)],
        )
    ]

    def fill(r: Rank, loc: torch.Tensor, content: Content) -> None:
        if kind.layout == "page_first_direct":
            # Only pages can be taken from it and put back: [1, layer, token, 1, dim].
            for first in {int(n) // kind.page * kind.page for n in loc}:
                own = host.get_data_page(first, flat=False).clone()
                here = (loc >= first) & (loc < first + kind.page)
                for i in range(LAYERS):
                    own[0, i, loc[here] - first] = latent(content, i)[here]
                host.set_from_flat_data_page(first, own.flatten())
            return
        for i in range(LAYERS):
            host.data_refs[i][loc] = latent(content, i)

    return [buf], groups, fill


@dataclasses.dataclass(frozen=True)
class Layer:
    """What pools ask of an attention layer."""

    layer_id: int


@dataclasses.dataclass
class Engine:
    ranks: list[Rank]
    fills: list[Fill]
    groups: int
    blocks: int


def make(sidecar: rig.Sidecar, kind: Kind, name: str) -> Engine:
    out = Engine([], [], 0, 0)
    for rank in range(kind.tp):
        tensors, groups, fill = build(kind, rank)
        layers = sum(len(g["layers"]) for g in groups)
        r = owner(sidecar, name, rank, kind.tp, layers, tensors)
        register(r, str(kind.dtype).removeprefix("torch."), groups)
        out.ranks.append(r)
        out.fills.append(fill)
        out.groups, out.blocks = len(groups), groups[0]["num_blocks"]
    connected(*out.ranks)
    return out


def check(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind) -> None:
    p, d = make(sidecars[0], pk, f"p{pk}"), make(sidecars[1], dk, f"d{dk}")
    try:
        for tokens in (1, 70, 256, 300):
            before = [[m.clone() for m in r.memory] for r in d.ranks]
            content = torch.randn(LAYERS, tokens, HEADS, 2, DIM).to(torch.bfloat16)
            for e, kind in ((p, pk), (d, dk)):
                table = (
                    pages_of(kind.page, tokens)
                    if kind.layout == "device"
                    else random.sample(range(e.blocks), -(-tokens // kind.page))
                )
                for r in e.ranks:
                    r.tables = [table] * e.groups
            for r, fill in zip(p.ranks, p.fills, strict=True):
                fill(r, slots(r, pk, tokens), content)
            move(sidecars[0].endpoint, p.ranks, d.ranks, tokens)
            for r, fill, was in zip(d.ranks, d.fills, before, strict=True):
                loc = slots(r, dk, tokens)
                compare(
                    r,
                    was,
                    functools.partial(fill, r, loc, content),
                    f"{pk} to {dk}, {tokens} tokens",
                )
    finally:
        for r in (*p.ranks, *d.ranks):
            r.close()


MHA = [Kind("mha", 16), Kind("mha", 64, 2)]
MLA = [
    Kind("mla", 16),
    Kind("mla", 64, 2),
    *(Kind("mla", 16, 1, x) for x in ("layer_first", "page_first", "page_first_direct")),
]


def pairs(kinds: list[Kind]) -> list[tuple[Kind, Kind]]:
    """Every kind to itself, to the next, and to the one that is three on."""
    return [(a, kinds[(i + k) % len(kinds)]) for i, a in enumerate(kinds) for k in (0, 1, 3)]


@pytest.mark.parametrize(("pk", "dk"), pairs(MHA), ids=str)
def test_k_and_v(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind) -> None:
    check(sidecars, pk, dk)


@pytest.mark.parametrize(("pk", "dk"), pairs(MLA), ids=str)
def test_latents(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind) -> None:
    check(sidecars, pk, dk)


MHA8 = [Kind("mha8", 16), Kind("mha8", 64, 2), Kind("mha8", 32, 4)]


@pytest.mark.parametrize(("pk", "dk"), pairs(MHA8), ids=str)
def test_k_and_v_in_fp8(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: Kind, dk: Kind) -> None:
    check(sidecars, pk, dk)


# DeepSeek-V3.2.

NOPE, ROPE_DSA, KEY = 512, 64, 128
DSA_LAYERS = 2  # the interpreter takes milliseconds for a row


@dataclasses.dataclass(frozen=True)
class DSA:
    """A device pool of sparse attention: a row of latents for each token, in bf16 or as fp8 with
    scales, and a key of the indexer. Pages of the indexer's kernels have 64 tokens; a pool has
    pages of several of these where decode's context parallelism replicates it."""

    page: int
    fp8: bool
    tp: int = 1

    def __str__(self) -> str:
        return f"dsa{'8' if self.fp8 else ''}-{self.page}-tp{self.tp}"

    def pool(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
        from sglang.srt.runtime_context import get_parallel

        # As calculate_mla_kv_cache_dim has it for these two types.
        width = (
            NOPE + NOPE // DSATokenToKVPool.quant_block_size * 4 + ROPE_DSA * 2
            if self.fp8
            else NOPE + ROPE_DSA
        )
        with get_parallel().override(attn_dcp_size=self.page // 64):
            pool = DSATokenToKVPool(
                size=TOKENS, page_size=self.page, kv_lora_rank=NOPE,
                dtype=torch.float8_e4m3fn if self.fp8 else torch.bfloat16,
                qk_rope_head_dim=ROPE_DSA, layer_num=DSA_LAYERS, device="cpu", index_head_dim=KEY,
                enable_memory_saver=False, kv_cache_dim=width, dcp_replicated=self.page > 64,
            )  # fmt: skip
        assert pool.index_page_size == 64 and pool.dsa_kv_cache_store_fp8 == self.fp8
        return pool


@dataclasses.dataclass
class DSAContent:
    """What a prompt gives to each layer."""

    nope: torch.Tensor  # [layer, token, 1, dim]
    rope: torch.Tensor
    key: torch.Tensor  # [layer, token, dim]

    @classmethod
    def random(cls, tokens: int) -> DSAContent:
        shape = DSA_LAYERS, tokens
        return cls(
            *(torch.randn(*shape, *dim).bfloat16() for dim in ((1, NOPE), (1, ROPE_DSA), (KEY,)))
        )


@dataclasses.dataclass
class DSARank:
    r: Rank
    pool: Any

    def fill(self, loc: torch.Tensor, x: DSAContent) -> None:
        """As a layer and its indexer store what they have computed."""
        from sglang.kernels.ops.quantization.act_quant_triton import act_quant
        from sglang.srt.layers.attention.dsa import dsa_indexer

        indexer: Any = SimpleNamespace(block_size=KEY, scale_fmt="ue8m0")
        with pytest.MonkeyPatch.context() as m:
            m.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: self.pool)
            for i in range(DSA_LAYERS):
                self.pool.set_mla_kv_buffer(Layer(i), loc, x.nope[i], x.rope[i])
                dsa_indexer.Indexer._store_index_k_cache(
                    indexer, SimpleNamespace(out_cache_loc=loc), i, x.key[i], act_quant=act_quant
                )

    def read(self, loc: torch.Tensor) -> list[torch.Tensor]:
        """As they are read for attention to what was there before: rows, and the keys and scales of
        the indexer."""
        from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache_paged_dsa

        out: list[torch.Tensor] = []
        tokens = len(loc)
        for i in range(DSA_LAYERS):
            if self.pool.dsa_kv_cache_store_fp8:
                out.append(dequantize_k_cache_paged_dsa(self.pool.get_key_buffer(i), loc.int()))
            else:
                out.extend(self.pool.get_mla_kv_buffer(Layer(i), loc))
            pages = (loc[::64] // 64).int()[None]
            out.append(
                torch.cat(
                    self.pool.get_index_k_scale_buffer(
                        i, torch.tensor([tokens]), pages, tokens, tokens
                    ),
                    dim=1,
                )
            )
        return out


def dsa_engine(sidecar: rig.Sidecar, kind: DSA, name: str) -> list[DSARank]:
    out = []
    for rank in range(kind.tp):
        pool = kind.pool()
        tensors = [*pool.kv_buffer, *pool.index_k_with_scale_buffer]
        groups = []
        for g, (strategy, params) in enumerate(
            (("fp8_ds_mla" if kind.fp8 else "mla", {}), ("dsa_indexer", {"kernel_tokens": 64}))
        ):
            layers = []
            for i in range(DSA_LAYERS):
                region = g * DSA_LAYERS + i
                page = tensors[region].nbytes // (TOKENS // kind.page + 1)
                layers.append(layer(i, ".index" if g else "", region, 0, page, page, region))
            groups.append(group(kind.page, strategy, params, TOKENS // kind.page + 1, layers))
        r = owner(sidecar, name, rank, kind.tp, 2 * DSA_LAYERS, tensors)
        register(r, "float8_e4m3fn" if kind.fp8 else "bfloat16", groups)
        out.append(DSARank(r, pool))
    connected(*(d.r for d in out))
    return out


DSAS = [
    (DSA(64, True, 2), DSA(128, True)), (DSA(128, True), DSA(64, True)),
    (DSA(64, False), DSA(64, False)), (DSA(128, False), DSA(64, False, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("pk", "dk"), DSAS, ids=str)
def test_rows_and_keys_of_dsa(sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: DSA, dk: DSA) -> None:
    p, d = dsa_engine(sidecars[0], pk, f"p{pk}{dk}"), dsa_engine(sidecars[1], dk, f"d{pk}{dk}")
    try:
        for tokens in (1, 70, 200):
            x = DSAContent.random(tokens)
            before = [[m.clone() for m in rank.r.memory] for rank in d]
            for ranks, kind in ((p, pk), (d, dk)):
                table = pages_of(kind.page, tokens)
                for rank in ranks:
                    rank.r.tables = [table, table]
            loc, to = slots(p[0].r, pk, tokens), slots(d[0].r, dk, tokens)
            for rank in p:
                rank.fill(loc, x)
            noise, want = d[0].read(to), p[0].read(loc)
            assert not any(torch.equal(a, b) for a, b in zip(noise, want, strict=True)), (
                "it was there before"
            )
            move(sidecars[0].endpoint, [rank.r for rank in p], [rank.r for rank in d], tokens)
            for rank, was in zip(d, before, strict=True):
                for a, b in zip(rank.read(to), want, strict=True):
                    assert torch.equal(a, b), (
                        f"{pk} to {dk}, {tokens} tokens: the engine reads something else"
                    )
                compare(
                    rank.r,
                    was,
                    functools.partial(rank.fill, to, x),
                    f"{pk} to {dk}, {tokens} tokens",
                )
    finally:
        for rank in (*p, *d):
            rank.r.close()


K_HEADS, V_HEADS, K_DIM, V_DIM, KERNEL = 2, 4, 8, 16, 4
SLOTS = 6
LONGEST = 1 << 20  # tokens of a block: a request has one slot, however long it is


@dataclasses.dataclass(frozen=True)
class State:
    """A pool of slots for linear attention: Kimi's (KDA) or a gated delta net's."""

    kda: bool
    tp: int

    def __str__(self) -> str:
        return f"{'kda' if self.kda else 'gdn'}-tp{self.tp}"

    @property
    def k(self) -> tuple[int, int]:
        """Heads of k, and their dimension."""
        return (V_HEADS, V_DIM) if self.kda else (K_HEADS, K_DIM)


@dataclasses.dataclass
class StateContent:
    """What a request's state is, in each layer, of all heads."""

    conv: list[torch.Tensor]  # q, k, v: [layer, head, dim, history]
    recurrent: torch.Tensor  # [layer, head, V dim, K dim]

    @classmethod
    def random(cls, kind: State) -> StateContent:
        heads, dim = kind.k
        return cls(
            [
                torch.randn(LAYERS, h, n, KERNEL - 1).to(torch.bfloat16)
                for h, n in ((heads, dim), (heads, dim), (V_HEADS, V_DIM))
            ],
            torch.randn(LAYERS, V_HEADS, V_DIM, dim),
        )


def state_pool(kind: State) -> Any:
    from sglang.srt.configs.mamba_utils import (
        KimiLinearCacheParams,
        KimiLinearStateShape,
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import MambaPool

    params: Any
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    layers = list(range(LAYERS))
    if kind.kda:
        shape = KimiLinearStateShape.create(
            tp_world_size=kind.tp, num_heads=V_HEADS, head_dim=V_DIM, conv_kernel_size=KERNEL
        )
        params = KimiLinearCacheParams(shape=shape, layers=layers, dtype=dtype)
    else:
        params = Mamba2CacheParams(
            shape=Mamba2StateShape.create(tp_world_size=kind.tp, intermediate_size=V_HEADS * V_DIM,
            n_groups=K_HEADS, num_heads=V_HEADS, head_dim=V_DIM, state_size=K_DIM,
            conv_kernel=KERNEL, conv_shard_groups=[K_HEADS * K_DIM, K_HEADS * K_DIM,
            V_HEADS * V_DIM]), layers=layers, dtype=dtype,
        )  # fmt: skip
    return MambaPool(
        size=SLOTS, spec_state_size=0, cache_params=params, mamba_layer_ids=layers, device="cpu"
    )


def flat(t: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor, whatever its strides."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


StateFill = Callable[[StateContent, int], None]


def state_engine(
    sidecar: rig.Sidecar, kind: State, name: str
) -> tuple[list[Rank], list[StateFill]]:
    """The ranks of an engine, registered, and how each writes a request's state into a slot."""
    heads, dim = kind.k
    ranks: list[Rank] = []
    fills: list[StateFill] = []
    for rank in range(kind.tp):
        cache = state_pool(kind).mamba_cache
        conv, temporal = cache.conv[0], cache.temporal
        history, channel = (2, 3) if kind.kda else (3, 2)  # axes of the conv state, as in its shape
        params = {
            "k_heads": heads, "k_dim": dim, "v_heads": V_HEADS, "v_dim": V_DIM,
            "conv_len": KERNEL - 1, "conv_bytes": 2, "state_bytes": 4, "tp_rank": rank,
            "tp_size": kind.tp, "conv_order": int(conv.stride(channel) > conv.stride(history)),
        }  # fmt: skip
        groups = []
        for region, (part, t) in enumerate((("conv", conv), ("ssm", temporal))):
            step, slot, page = (n * t.itemsize for n in (t.stride(0), t.stride(1), t[0, 0].numel()))
            groups.append(
                group(LONGEST, "kda_state" if kind.kda else "gdn_state",
                params | {"part": region + 1}, SLOTS + 1, [layer(i, f"#{part}", region, i * step,
                slot, page, region * LAYERS + i) for i in range(LAYERS)])
            )  # fmt: skip
        r = owner(sidecar, name, rank, kind.tp, 2 * LAYERS, [flat(conv), flat(temporal)])
        register(r, "bfloat16", groups)

        def fill(content: StateContent, slot: int, cache: Any = cache, rank: int = rank) -> None:
            for i in range(LAYERS):
                at = cache.at_layer_idx(i)
                # cat([query, key, value]) of what the rank has of each, as SGLang's convolutions
                # leave it.
                mixed = torch.cat(
                    [c[i].chunk(kind.tp)[rank].reshape(-1, KERNEL - 1) for c in content.conv]
                )
                at.conv[0][slot] = mixed.T if kind.kda else mixed
                at.temporal[slot] = content.recurrent[i].chunk(kind.tp)[rank]

        ranks.append(r)
        fills.append(fill)
    connected(*ranks)
    return ranks, fills


@pytest.mark.parametrize(
    ("pk", "dk"), [(State(k, p), State(k, d)) for k in (False, True) for p,
    d in ((1, 1), (2, 1), (1, 2), (2, 2))], ids=str
)  # fmt: skip
def test_slots_of_linear_attention(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], pk: State, dk: State
) -> None:
    ps, p_fills = state_engine(sidecars[0], pk, f"p{pk}{dk}")
    ds, d_fills = state_engine(sidecars[1], dk, f"d{pk}{dk}")
    try:
        for tokens in (1, 700):
            content = StateContent.random(pk)
            before = [[m.clone() for m in r.memory] for r in ds]
            for ranks in (ps, ds):
                slot = random.randint(1, SLOTS)  # 0 is that of requests which pad a batch
                for r in ranks:
                    # Conv and recurrent state of a request are in slots of one number.
                    r.tables = [[slot], [slot]]
            for r, fill in zip(ps, p_fills, strict=True):
                fill(content, r.table[0])
            move(sidecars[0].endpoint, ps, ds, tokens)
            for r, fill, was in zip(ds, d_fills, before, strict=True):
                compare(
                    r,
                    was,
                    functools.partial(fill, content, r.table[0]),
                    f"{pk} to {dk}, {tokens} tokens",
                )
    finally:
        for r in (*ps, *ds):
            r.close()
