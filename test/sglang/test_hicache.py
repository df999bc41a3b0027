"""The storage backend with SGLang's own classes, its host pools and its HiCache controller, and a
real sidecar. make test-sglang runs it on a CPU.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "rig"), str(HERE / "stand_ins")]

import cluster as rig  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(","):
    import sglang  # noqa: F401
else:
    pytest.importorskip(
        "sglang", reason="SGLang is missing; make test-sglang makes its environment"
    )

import kvspray  # noqa: E402
from kvspray_sglang import plugin  # noqa: E402
from kvspray_sglang.hicache import KvsprayHiCache  # noqa: E402

PAGE, SIZE, LAYERS, HEADS, DIM = 16, 512, 3, 2, 8
PAGES = 5
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
EXTRA = {
    "backend_name": "kvspray", "module_path": "kvspray_sglang.hicache",
    "class_name": "KvsprayHiCache",
    "interface_v1": 1, "weights": "w",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    prepare()


def prepare() -> None:
    """SGLang's classes on a CPU, in a process without an engine."""
    import kvspray_cpu_rig
    from sglang.srt.mem_cache.pool_host import base, mha, mla
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    for module in (base, mha, mla):  # a shared machine may not have the 10 GB that it keeps free
        if hasattr(module, "host_memory_budget_bytes"):
            module.host_memory_budget_bytes = lambda asked=0, **_: 1 << 40
    names = ("tp", "pp", "attn_dcp", "attn_tp", "attn_dp", "attn_cp")
    get_parallel().override_permanently(
        dcp_enabled=False, **{f"{n}_{k}": int(k == "size") for n in names for k in ("size", "rank")}
    )
    kvspray_cpu_rig.install()
    plugin.install()
    HookRegistry.apply_hooks()


@pytest.fixture(scope="module")
def sidecar() -> Iterator[rig.Sidecar]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        s = rig.Sidecar("a", pathlib.Path(dir), {"store": {"memory": "64MiB"}})
        with rig.running(s):
            yield s
            assert s.panics() is None


def device_pool(kind: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    same: dict[str, Any] = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mha":
        return MHATokenToKVPool(**same, head_num=HEADS, head_dim=DIM, enable_alt_stream=False)
    return MLATokenToKVPool(**same, kv_lora_rank=32, qk_rope_head_dim=8)


def host_pool(kind: str, layout: str, device: Any, mapped: bool = True) -> Any:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    with pytest.MonkeyPatch.context() as m:
        m.setattr(plugin, "is_backend", lambda: mapped)
        same: dict[str, Any] = {
            "pin_memory": False,
            "device": "cpu",
            "device_capacity_tokens": SIZE,
            "start_layer": 0,
            "end_layer": LAYERS,
        }
        info = device.get_device_pool_infos()[0].buffer_info
        if kind == "mha":
            return MHATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, **same)
        return MLATokenToKVPoolHost(
            info,
            2.0,
            0,
            PAGE,
            layout,
            override_kv_cache_dim=device.kv_cache_dim,
            target_layer_num=LAYERS,
            **same,
        )


def config(extra: dict[str, Any], **more: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": False,
        "model_name": "tiny", "extra_config": extra, **more,
    })  # fmt: skip


class Controller:
    """SGLang's controller over our backend, with a device pool and a host pool."""

    def __init__(
        self, sidecar: rig.Sidecar, kind: str, layout: str, mapped: bool = True, **extra: Any
    ) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        self.device = device_pool(kind)
        self.host = host_pool(kind, layout, self.device, mapped)
        self.slots = PagedTokenToKVPoolAllocator(
            SIZE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.device,
            need_sort=False,
        )
        self.controller = HiCacheController(
            self.slots, self.host, PAGE, tp_group=None, load_cache_event=threading.Event(),
            write_policy="write_through", io_backend="direct", storage_backend="dynamic",
            prefetch_threshold=PAGE, model_name="tiny", enable_storage_metrics=True,
            storage_backend_extra_config={**EXTRA, "socket": sidecar.socket, **extra},
        )  # fmt: skip
        backend = self.controller.storage_backend
        self.backend: KvsprayHiCache = getattr(backend, "_backend", backend)
        rig.wait_for("a session", lambda: self.backend._link.connected, 30)

    @property
    def buffers(self) -> list[torch.Tensor]:
        d = self.device
        return [*d.k_buffer, *d.v_buffer] if hasattr(d, "k_buffer") else list(d.kv_buffer)

    def backup(self, tokens: list[int], transfer: bool, sure: bool = True) -> list[torch.Tensor]:
        """Random KV of these tokens into the store. Its pages, as the host pool has them."""
        from sglang.srt.managers.cache_controller import get_storage_hash_str

        c = self.controller
        if transfer:
            for b in self.buffers:
                b.copy_(torch.randn(b.shape).to(b.dtype))
            indices = c.write(torch.arange(PAGE, PAGE + len(tokens)), node_id=7)
            c.ack_write_queue.pop(0).finish_event.synchronize()
        else:
            indices = self.host.alloc(len(tokens))
            self.host.kv_buffer.copy_(torch.randn(self.host.kv_buffer.shape).to(self.host.dtype))
        pages = self.pages(indices)
        c.write_storage(
            indices, tokens, hash_value=get_storage_hash_str(tokens, None, page_size=PAGE)
        )
        done = c.ack_backup_queue.get(timeout=30).completed_tokens
        assert done == len(tokens) or not sure
        self.host.kv_buffer.zero_()
        self.host.free(indices)
        return pages

    def prefetch(self, tokens: list[int]) -> torch.Tensor:
        """The host indices of what the store has of these tokens."""
        c = self.controller
        c.prefetch("r", tokens, None, None)
        op = c.prefetch_hit_queue.get(timeout=30)
        op.host_indices = c.alloc_prefetch_host_buffers(op, op.storage_hit_count)
        c.prefetch_buffer.put(op)
        done = 0
        while True:
            ack = c.ack_prefetch_queue.get(timeout=30)
            done = ack.completed_tokens if ack.completed_tokens is not None else done
            if ack.completed_req:
                return op.host_indices[:done]

    def pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [self.host.get_data_page(int(i)).clone() for i in indices[::PAGE]]

    def close(self) -> None:
        self.controller.reset()
        self.controller.detach_storage_backend()


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "process"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back(sidecar: rig.Sidecar, kind: str, layout: str, mapped: bool) -> None:
    c = Controller(sidecar, kind, layout, mapped, weights=f"{kind}-{layout}-{mapped}")
    transfer = layout != "page_first"  # SGLang copies those on a GPU alone
    try:
        pieces = c.backend._pools["kv"][1]
        assert {p.region.kind for p in pieces} == {
            kvspray.RegionKind.MEMFD if mapped else kvspray.RegionKind.PROCESS
        }
        tokens = list(range(1000, 1000 + PAGES * PAGE))
        before = c.backup(tokens, transfer)
        device = [b[PAGE : PAGE + len(tokens)].clone() for b in c.buffers]
        indices = c.prefetch([*tokens, *[1] * PAGE])
        assert len(indices) == len(tokens)
        assert all(torch.equal(a, b) for a, b in zip(before, c.pages(indices), strict=True))
        if transfer:
            for b in c.buffers:
                b.zero_()
            c.slots.clear()
            slots = c.controller.load(indices, node_id=7)
            c.controller.start_loading()
            c.controller.ack_load_queue.pop(0).finish_event.synchronize()
            assert all(
                torch.equal(b[slots], want) for b, want in zip(c.buffers, device, strict=True)
            )
        stats = c.backend.get_stats()
        assert (stats.prefetch_pgs, stats.backup_pgs) == ([PAGES], [PAGES]) and min(
            stats.prefetch_bandwidth
        ) > 0
    finally:
        c.close()


def state_pool() -> Any:
    """Host slots of linear attention's states: a temporal state in float32, two of convolutions."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    shapes = (LAYERS, 17, 8, 3), (LAYERS, 17, 4, 3)
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 17, 4, 8, 8),
        conv=tuple(torch.zeros(s, dtype=torch.bfloat16) for s in shapes),
    )
    return MambaPoolHost(
        info, 2.0, 0, device_capacity=16, pin_memory=False, layout="page_first_direct"
    )


def index_pool() -> tuple[Any, Any]:
    """Host pools of latents and of DSA's index keys, whose pages have the same slots."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    width = 512 + 64
    device = DSATokenToKVPool(
        size=SIZE, page_size=64, kv_lora_rank=512, dtype=torch.bfloat16, qk_rope_head_dim=64,
        layer_num=2, device="cpu", index_head_dim=128, enable_memory_saver=False,
        kv_cache_dim=width,
    )  # fmt: skip
    latents = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, 64, "page_first_direct",
        pin_memory=False, device="cpu", device_capacity_tokens=SIZE, start_layer=0, end_layer=2,
        override_kv_cache_dim=width, target_layer_num=2,
    )  # fmt: skip
    return latents, DSAIndexerPoolHost(
        make_dsa_indexer_pool_decl(device), latents, pin_memory=False
    )


def test_states_and_index_keys(sidecar: rig.Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    monkeypatch.setattr(plugin, "is_backend", lambda: True)
    latents, keys = index_pool()
    states = state_pool()
    b = KvsprayHiCache(
        config({**EXTRA, "socket": sidecar.socket, "weights": "hybrid"}, is_mla_model=True), {}
    )
    try:
        b.register_mem_pool_host(latents)
        for name, pool in (
            (PoolName.KV, latents),
            (PoolName.INDEXER, keys),
            (PoolName.MAMBA, states),
        ):
            b.register_mem_host_pool_v2(pool, name)
        b.on_host_pools_registered()
        rig.wait_for("a session", lambda: b._link.connected, 30)
        assert not b._copied and len(b._pools) == 3
        hashes = [f"{i:064x}" for i in range(3)]
        kv = torch.arange(3 * 64) + 64
        slots = torch.tensor([5])
        for buffer in (
            latents.kv_buffer,
            keys.index_k_with_scale_buffer,
            states.temporal_buffer,
            *states.conv_buffer,
        ):
            buffer.copy_(torch.randint(0, 100, buffer.shape).to(buffer.dtype))
        want = [
            [keys.get_data_page(64 * (i + 1)).clone() for i in range(3)],
            [states.get_data_page(5).clone()],
        ]
        transfers = [
            PoolTransfer(name=PoolName.INDEXER, host_indices=kv, keys=hashes),
            PoolTransfer(
                name=PoolName.MAMBA,
                host_indices=slots,
                keys=hashes[1:2],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        ]
        assert b.batch_set_v1(hashes, kv) == [True] * 3
        assert b.batch_set_v2(transfers) == {PoolName.INDEXER: [True] * 3, PoolName.MAMBA: [True]}
        found = b.batch_exists_v2(hashes, transfers)
        assert found.kv_hit_pages == 2 and found.extra_pool_hit_pages == {
            PoolName.KV: 3,
            PoolName.INDEXER: 3,
            PoolName.MAMBA: 2,
        }
        for buffer in (keys.index_k_with_scale_buffer, states.temporal_buffer, *states.conv_buffer):
            buffer.zero_()
        transfers[0].host_indices, transfers[1].host_indices = kv + 128, torch.tensor([9])
        assert b.batch_get_v2(transfers) == {PoolName.INDEXER: [True] * 3, PoolName.MAMBA: [True]}
        got = [[keys.get_data_page(64 * (i + 3)) for i in range(3)], [states.get_data_page(9)]]
        assert all(
            torch.equal(x, y)
            for a, c in zip(want, got, strict=True)
            for x, y in zip(a, c, strict=True)
        )
        assert b.copied_bytes == 0
    finally:
        b.close()


def test_injected_failures(sidecar: rig.Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own injection of delays and failures: what comes back is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    c = Controller(sidecar, "mha", "page_first", weights="injected")
    try:
        whole = 0
        for round in range(20):
            tokens = list(range(round * 1000, round * 1000 + PAGES * PAGE))
            before = c.backup(tokens, False, sure=False)
            indices = c.prefetch(tokens)
            pages = c.pages(indices)
            assert all(torch.equal(a, b) for a, b in zip(before, pages, strict=False)), round
            whole += len(pages) == PAGES
            c.host.free(indices)
        assert 0 < whole < 20
    finally:
        c.close()
