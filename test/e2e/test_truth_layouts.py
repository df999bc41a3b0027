"""Caches of GPU engines, grouped, allocated and shaped by vLLM's own code, described by the
connector's, moved by real sidecars, and compared to the last byte with what the engine would have
written there.

vLLM makes the groups (get_kv_cache_groups), places their layers in one allocation
(get_kv_cache_config_from_groups) and views it (allocate_kv_cache); nothing of that needs a GPU.
The kernels that write do, so content is written into vLLM's views by index: a head of a token, a
row, or a page whose scales lie behind its values.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Bag
from typing import Any

import cluster as rig
import pytest
import torch
from conftest import need
from ranks import Rank, compare, connected, move, owner, register

BLOCKS = 96
HEADS = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sidecars(workdir: pathlib.Path) -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    need("the sidecar", rig.BINARY.exists(), "run make build")
    p, d = rig.Sidecar("lp", workdir), rig.Sidecar("ld", workdir)
    with rig.running(p, d):
        yield p, d
        assert p.panics() is None and d.panics() is None


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a model: vLLM's specification on a rank, its backend, and what a token, or an
    entry, leaves in it."""

    spec: Callable[[int, int], Any]  # of block size and tp
    backend: str
    heads: int = 1  # of the model; a row is one head
    cell: int = 0  # bytes of a head of a token, or of a row without its scales
    scale: int = 0  # bytes behind the values of a page


@dataclasses.dataclass(frozen=True)
class Engine:
    block: int
    order: str
    tp: int = 1
    kernel: int | None = None  # tokens of a kernel block, of every group

    def __str__(self) -> str:
        return f"n{self.block}{f'k{self.kernel}' if self.kernel else ''}-{self.order}-tp{self.tp}"


Model = dict[str, Layer]


def attention(
    heads: int = HEADS,
    size: int = 16,
    size_v: int = 16,
    backend: str = "FLASH_ATTN",
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Layer:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    def spec(block: int, tp: int) -> Any:
        of = SlidingWindowSpec if "sliding_window" in more else FullAttentionSpec
        return of(
            block_size=block,
            num_kv_heads=max(1, heads // tp),
            head_size=size,
            head_size_v=size_v,
            dtype=dtype,
            **more,
        )

    return Layer(spec, backend, heads, (size + size_v) * dtype.itemsize)


def rows(
    backend: str,
    cell: int,
    scale: int = 0,
    *,
    block: int | None = None,
    window: int = 0,
    **more: Any,
) -> Layer:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    def spec(n: int, tp: int) -> Any:
        fields = {"num_kv_heads": 1, "head_size": cell + scale, "dtype": torch.uint8} | more
        if window:
            return SlidingWindowMLASpec(block_size=block or n, sliding_window=window, **fields)
        return MLAAttentionSpec(block_size=block or n, **fields)

    return Layer(spec, backend, 1, cell, scale)


def minimax_m3() -> Model:
    from vllm.v1.kv_cache_interface import SparseCacheRole

    out = {}
    for i in range(3):
        out[f"{i}.attn"] = attention(backend="TRITON_MSA" if i else "FLASH_ATTN")
        if i:
            out[f"{i}.keys"] = rows(
                "MINIMAX_M3_SPARSE_INDEXER", 32, cache_role=SparseCacheRole.INDEXER
            )
    return out


def deepseek_v32(fp8: bool) -> Model:
    from vllm.v1.kv_cache_interface import SparseCacheRole

    out = {}
    for i in range(2):
        packed = {"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
        out[f"{i}.attn"] = (
            rows("FLASHMLA_SPARSE", 656, **packed) if fp8 else rows("FLASHMLA_SPARSE", 1152)
        )
        out[f"{i}.keys"] = rows("DEEPSEEK_V32_INDEXER", 128, 4, cache_role=SparseCacheRole.INDEXER)
    return out


def deepseek_v4() -> Model:
    """Layers as vLLM's model asks for them; test_truth_quant.py asks the model's own classes,
    and moves what its kernels write."""
    packed = {
        "cache_dtype_str": "fp8_ds_mla",
        "alignment": 576,
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    state: dict[str, Any] = {"alignment": 576, "dtype": torch.float32}
    out: Model = {}
    for i, ratio in enumerate((4, 128, 4, 128)):
        out[f"{i}.swa"] = rows("DEEPSEEK_SPARSE_SWA", 576, 8, block=64, window=128, **packed)
        out[f"{i}.attn"] = rows("FLASHMLA_SPARSE_DSV4", 576, 8, tokens_per_state=ratio, **packed)
        if ratio == 4:
            out[f"{i}.keys"] = rows(
                "DEEPSEEK_V4_INDEXER", 128, 4, tokens_per_state=4, alignment=576
            )
            out[f"{i}.state"] = dataclasses.replace(
                rows("CompressorBackend", 2048, block=4, window=8, **state), cell=8192
            )
        else:
            out[f"{i}.state"] = dataclasses.replace(
                rows("CompressorBackend", 1024, block=8, window=128, **state), cell=4096
            )
    return out


@dataclasses.dataclass
class Worker:
    """A rank: vLLM's configuration of its cache, its tensors, and its session."""

    rank: Rank
    kv: Any
    tensors: dict[str, torch.Tensor]
    specs: dict[
        str, Any
    ]  # of each layer, as vLLM has grouped them: with blocks of other sizes, and padded
    tables: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # of each layer


def start(sidecar: rig.Sidecar, name: str, model: Model, e: Engine) -> list[Worker]:
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvspray_vllm import caches, layout

    order = KVCacheLayout[e.order]
    config: Any = Bag(
        scheduler_config=Bag(disable_hybrid_kv_cache_manager=False),
        attention_config=Bag(hisparse_config=None),
        speculative_config=None,
        model_config=None,
        cache_config=Bag(
            get_resolved_kv_cache_layout=lambda: order,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )
    out = []
    for rank in range(e.tp):
        specs = {n: layer.spec(e.block, e.tp) for n, layer in model.items()}
        groups = planning.get_kv_cache_groups(config, specs)
        kv = planning.get_kv_cache_config_from_groups(
            config, groups, BLOCKS * planning._get_kv_cache_bytes_per_block(groups, order)
        )
        tensors = allocate_kv_cache(
            kv, torch.device("cpu"), order, [e.kernel or g.kv_cache_spec.block_size for g in groups]
        )
        d = caches.describe(
            kv,
            tensors,
            {n: layer.backend for n, layer in model.items()},
            # A draft's.
            kv_heads=[HEADS, *({layer.heads for layer in model.values()} - {HEADS, 1})],
            ranks=layout.Ranks(tp=rank, tp_size=e.tp),
            packing="",
        )
        (storage,) = d.storages
        memory = torch.empty(0, dtype=torch.int8).set_(
            next(iter(tensors.values())).untyped_storage()
        )
        assert (memory.data_ptr(), memory.nbytes) == (
            storage.address,
            storage.nbytes,
        ) and kv.num_blocks == BLOCKS
        r = owner(sidecar, name, rank, e.tp, len(model), [memory])
        register(r, "fp8", d.placed([caches.Site(0)]))
        out.append(
            Worker(
                r,
                kv,
                tensors,
                {name: layout.spec_of(g, name) for g in groups for name in g.layer_names},
            )
        )
    connected(*(w.rank for w in out))
    return out


def draw(workers: list[Worker], tokens: int) -> None:
    """Block tables as vLLM's pool gives them: each block to one group, block 0 to none, and it
    stands for what a window has given up."""
    from kvspray_vllm import layout

    kv = workers[0].kv
    free = random.sample(range(1, BLOCKS), BLOCKS - 1)
    tables = []
    for g, window in zip(kv.kv_cache_groups, layout.windows_of(kv), strict=True):
        n = g.kv_cache_spec.block_size
        given_up = first_seen(tokens, window) // n
        tables.append([0] * given_up + [free.pop() for _ in range(-(-tokens // n) - given_up)])
    for w in workers:
        w.rank.tables = tables
        w.tables = {
            name: t
            for g, t in zip(kv.kv_cache_groups, tables, strict=True)
            for name in g.layer_names
        }


def first_seen(tokens: int, window: int) -> int:
    return max(0, tokens + 1 - window) if window else 0


def fill(w: Worker, model: Model, content: dict[str, torch.Tensor], tokens: int) -> None:
    """Writes a prompt. content: of each layer, [token or entry, head, bytes]."""
    for name, layer in model.items():
        spec, view, table = w.specs[name], w.tensors[name].view(torch.uint8), w.tables[name]
        n, ratio = spec.block_size, int(spec.tokens_per_state)
        kernel = n // (view.shape[0] // BLOCKS)
        first = first_seen(tokens, getattr(spec, "sliding_window", None) or 0) // n * n
        for entry in range(first // ratio, tokens // ratio):
            t = entry * ratio
            page = view[table[t // n] * (n // kernel) + t % n // kernel]
            slot, cell = t % kernel // ratio, content[name][entry]
            if layer.scale:
                flat = page.as_strided((kernel // ratio * (layer.cell + layer.scale),), (1,))
                flat[slot * layer.cell :][: layer.cell] = cell[0, : layer.cell]
                flat[kernel // ratio * layer.cell + slot * layer.scale :][: layer.scale] = cell[
                    0, layer.cell :
                ]
            else:
                page[:, slot] = cell[list(w.rank.heads(layer.heads))] if layer.heads > 1 else cell


DENSE = [
    (Engine(128, "LBHNC", kernel=64), Engine(16, "LBNHC")),
    (Engine(16, "LBNHC", 2), Engine(128, "LBHNC", kernel=64)),
    (Engine(128, "LBHNC", 2, kernel=32), Engine(192, "LBHNC", 4, kernel=64)),
    (Engine(128, "LBNHC", kernel=32), Engine(64, "BHLNC")),
    (Engine(48, "BLNHC", 8), Engine(128, "LBHNC", kernel=16)),
]
MLA = [
    (Engine(64, "LBHNC"), Engine(64, "LBNHC", 2)),
    (Engine(64, "LBNHC", 2), Engine(128, "LBHNC", kernel=64)),
    (Engine(128, "LBHNC", kernel=64), Engine(64, "BLHNC")),
]
V4 = [
    (Engine(256, "BLHNC"), Engine(256, "BLHNC", 2)),
    (Engine(256, "BLHNC", 2), Engine(512, "BLHNC")),
    (Engine(512, "BLNHC"), Engine(256, "BLHNC")),
]
CASES: dict[str, tuple[Callable[[], Model], list[tuple[Engine, Engine]]]] = {
    "kernel pages": (
        lambda: {f"{i}.attn": attention(backend="FLASHINFER") for i in range(3)},
        DENSE,
    ),
    "fp8": (
        lambda: {f"{i}.attn": attention(dtype=torch.float8_e4m3fn) for i in range(2)},
        DENSE[:2],
    ),
    "k and v of unlike width": (
        lambda: {f"{i}.attn": attention(HEADS, 24, 16, "FLASH_ATTN_DIFFKV") for i in range(2)},
        DENSE,
    ),
    "a draft layer of other heads": (
        lambda: {"0.attn": attention(), "1.attn": attention(), "draft.attn": attention(2)},
        DENSE[:2],
    ),
    "windows in padded pages": (
        lambda: {
            f"{i}.attn": attention(sliding_window=80)
            if i % 2
            else attention(page_size_padded=1 << 16)
            for i in range(4)
        },
        [(Engine(32, "LBNHC"), Engine(32, "BLHNC")), (Engine(32, "LBHNC", 2), Engine(32, "BLNHC"))],
    ),
    "a sliding window of latents": (
        lambda: {f"{i}.attn": rows("FLASHMLA", 128, window=80) for i in range(2)},
        [(Engine(32, "LBHNC"), Engine(32, "BLHNC", 2))],
    ),
    "minimax m3": (
        minimax_m3,
        [
            (Engine(128, "LBNHC"), Engine(128, "LBHNC", 2)),
            (Engine(128, "LBHNC", 4), Engine(64, "LBNHC")),
        ],
    ),
    "deepseek v3.2 fp8": (lambda: deepseek_v32(True), MLA),
    "deepseek v3.2 bf16": (lambda: deepseek_v32(False), MLA),
    "deepseek v4": (deepseek_v4, V4),
}


@pytest.mark.parametrize(
    ("case", "pe", "de"), [(c, p, d) for c, (_, pairs) in CASES.items() for p, d in pairs], ids=str
)
def test_what_gpu_engines_allocate(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], case: str, pe: Engine, de: Engine
) -> None:
    sp, sd = sidecars
    model = CASES[case][0]()
    ps, ds = start(sp, f"p {case} {pe}", model, pe), start(sd, f"d {case} {de}", model, de)
    try:
        for tokens in (1, 50, 333):
            content = {
                n: torch.randint(
                    0, 256, (tokens, layer.heads, layer.cell + layer.scale), dtype=torch.uint8
                )
                for n, layer in model.items()
            }
            draw(ps, tokens)
            draw(ds, tokens)
            before = [w.rank.memory[0].clone() for w in ds]
            for w in ps:
                fill(w, model, content, tokens)
            move(sp.endpoint, [w.rank for w in ps], [w.rank for w in ds], tokens)
            for w, was in zip(ds, before, strict=True):
                compare(
                    w.rank,
                    [was],
                    functools.partial(fill, w, model, content, tokens),
                    f"{case}, {pe} to {de}, {tokens} tokens",
                )
    finally:
        for w in (*ps, *ds):
            w.rank.close()
