"""The parts of SGLang that the backend touches, as far as it does, for tests without SGLang.
test/sglang runs the backend with the real ones.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

VERSION = "0.5.23"


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: Any = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: Any = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class ExtraInfo:
    prefix_keys: Any = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


@dataclass
class Config:
    """HiCacheStorageConfig."""

    extra_config: Any
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = True
    should_split_heads: bool = False


class WeightUpdater:
    def update_weights_from_disk(self, path: str) -> str:
        return path

    def update_weights_from_tensor(self, named_tensors: Any) -> Any:
        return named_tensors

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return recv_req

    def begin_weight_update(self) -> str:
        return "begun"

    def receive_weights_from_distributed(self, names: Any) -> Any:
        return names

    def load_weights_from_distributed(self, named_tensors: Any) -> Any:
        return named_tensors

    def end_weight_update(self, run_post_load: bool) -> bool:
        return run_post_load


class WeightChecker:
    def handle(self, action: str) -> None:
        if action == "reset_tensors":
            self._reset_tensors(None)

    def _reset_tensors(self, skip_tensor_list: Any) -> None: ...


class HostTensorAllocator:
    def allocate(self, dims: Any, dtype: Any, device: str) -> Any:
        return torch.empty(dims, dtype=dtype, device=device)


class Pool:
    """A host pool. ``where``: the order of its pages."""

    def __init__(
        self, allocator: Any, pages: int = 16, tokens: int = 4, layout: str = "page_first",
        layers: int = 3, dtype: Any = torch.bfloat16, width: int = 32,
    ) -> None:  # fmt: skip
        self.page_size, self.size, self.layout, self.dtype = tokens, pages * tokens, layout, dtype
        self.layer_num, self.width = layers, width
        dims = (
            (2, layers, self.size, width)
            if layout == "layer_first"
            else (2, self.size, layers, width)
        )
        self.kv_buffer = allocator.allocate(dims, dtype, "cpu")
        self.kv_buffer.zero_()

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        b, item = self.kv_buffer, self.dtype.itemsize
        base, one = b.data_ptr(), self.page_size * self.width * item
        ptrs: list[int] = []
        for token in indices.tolist()[:: self.page_size]:
            for layer in range(self.layer_num) if self.layout == "layer_first" else (0,):
                for kv in range(2):
                    place = (kv, layer, token) if self.layout == "layer_first" else (kv, token)
                    ptrs.append(
                        base + sum(i * s for i, s in zip(place, b.stride(), strict=False)) * item
                    )
        size = one if self.layout == "layer_first" else one * self.layer_num
        return ptrs, [size] * len(ptrs)

    def page(self, i: int) -> Any:
        at = slice(i * self.page_size, (i + 1) * self.page_size)
        return self.kv_buffer[:, :, at] if self.layout == "layer_first" else self.kv_buffer[:, at]

    def fill(self, i: int) -> Any:
        """Random bytes in a page; a copy of them."""
        p = self.page(i)
        p.copy_(torch.randn(p.shape).to(self.dtype))
        return p.clone()

    def indices(self, *pages: int) -> Any:
        return torch.cat(
            [torch.arange(p * self.page_size, (p + 1) * self.page_size) for p in pages]
        )

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return self.page(index // self.page_size).flatten()

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(self.page(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data: Any) -> None:
        p = self.page(index // self.page_size)
        p.copy_(data.reshape(p.shape))


memory_config = types.SimpleNamespace(
    hicache_storage_backend=None, hicache_storage_backend_extra_config=None
)
server_args = types.SimpleNamespace(
    model_path="", enable_lora=False, lora_paths=None, kv_cache_dtype="auto"
)


def install() -> None:
    """Puts the fakes where the real modules would be."""
    storage = {k: v for k, v in globals().items() if isinstance(v, type)}
    modules: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": VERSION},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {
            "get_context": lambda: types.SimpleNamespace(server_args=server_args),
            "get_memory": lambda: memory_config,
        },
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": storage,
        "sglang.srt.mem_cache.pool_host": {},
        "sglang.srt.mem_cache.pool_host.common": {"HostTensorAllocator": HostTensorAllocator},
        "sglang.srt.observability": {},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.model_runner_components": {},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {
            "WeightUpdater": WeightUpdater
        },
        "sglang.srt.utils": {"cpu_has_amx_support": bool},
        "sglang.srt.utils.weight_checker": {"WeightChecker": WeightChecker},
    }
    for name, content in modules.items():
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module = importlib.util.module_from_spec(spec)
        module.__dict__.update(content)
        sys.modules[name] = module
    for name in modules:
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and parent in modules:
            setattr(sys.modules[parent], child, sys.modules[name])
