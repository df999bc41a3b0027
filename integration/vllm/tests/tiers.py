"""vLLM's own manager of tiers with KVSprayTier, without an engine: the test is its scheduler, and
the GPU whose blocks it offloads."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvspray_vllm import tier

ROW = 8192
NOTICE = {"weights": "w", "dtype": "float32", "algorithm": "sha256", "cache": "c"}


def config(
    chunks: int, groups: int = 1, ranks: int = 1, room: int = 0, **own: Any
) -> OffloadingConfig:
    """room: bytes for the chunks, where not all of them fit. own: keys of the tier."""
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer{g}",), g) for g in range(groups)),
        worker_kv_bytes_per_block=ROW // ranks,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": room or chunks * ROW,
            "secondary_tiers": [{"type": "KVSprayTier", "module_path": "kvspray_vllm.tier", **own}],
        },
        engine_id=f"test-{secrets.token_hex(8)}",
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, False),
    )


def key(n: int, group: int = 0) -> OffloadKey:
    return make_offload_key(n.to_bytes(32, "big"), group)


def content(k: OffloadKey) -> np.ndarray:
    """The bytes of the chunk with this key."""
    seed = int.from_bytes(k[-12:], "big")
    return np.random.default_rng(seed).integers(0, 256, ROW, dtype=np.uint8)


class Engine:
    def __init__(self, chunks: int = 16, notice: dict[str, str] | None = None, **kw: Any) -> None:
        self.worker = tier.KVSprayTieringSpec(config(chunks, **kw))
        for rank in range(self.worker.config.parallel.world_size):
            self.worker.memory.write(rank, {**NOTICE, **(notice or {})})
        self.spec = tier.KVSprayTieringSpec(self.worker.config)
        with contextlib.ExitStack() as undo:
            undo.callback(self.worker.memory.close)
            undo.callback(self.worker.memory.hide)
            self.manager = self.spec.get_manager()
            undo.pop_all()
        (self.tier,) = self.manager.secondary_tiers
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.requests = 0

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def busy(self) -> bool:
        """After two steps, as vLLM takes the ends of jobs once in each."""
        self.step()
        self.step()
        return bool(self.manager.has_pending_work())

    def store(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> None:
        """As when the engine has computed these blocks. Some may find no room."""
        context = context or self.request()
        out = self.manager.prepare_store(keys, context)
        if out is None or not out.keys_to_store:
            return
        for k, chunk in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = content(k)
        self.manager.complete_store(out.keys_to_store, context)

    def look(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[LookupResult]:
        return [self.manager.lookup(k, context) for k in keys]

    def check(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        """The chunks that vLLM's own tier has are the right ones. How many of them it has."""
        there = [k for k in keys if self.manager.primary_tier.lookup(k, context).name == "HIT"]
        if there:
            spec = self.manager.prepare_load(there, context)
            for k, chunk in zip(there, spec.chunk_ids, strict=True):
                assert (self.rows[chunk] == content(k)).all(), k
            self.manager.complete_load(there, context)
        return len(there)

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()
        self.worker.memory.close()
