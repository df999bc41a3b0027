"""A plug-in of SGLang for servers without a GPU: page copies in torch, and no pinned memory."""

from __future__ import annotations

import logging
import os
from typing import Any

_log = logging.getLogger(__name__)


def install() -> None:
    import sgl_kernel.kvcacheio as copies
    from sglang.srt.mem_cache.pool_host import common, mha, mla

    for module in (mha, mla):  # they import these with CUDA only
        for name in (
            "transfer_kv_direct",
            "transfer_kv_per_layer_direct_pf_lf",
            "transfer_kv_all_layer_direct_lf_pf",
        ):
            setattr(module, name, getattr(copies, name))
    common._cuda_host_register = lambda *_, **__: None
    common._cuda_host_unregister = lambda *_, **__: None
    _count_host_slots()
    if os.environ.get("KVSPRAY_RIG_LOADS"):  # of a model whose pages are small
        from kvspray_sglang import loads

        loads.MIN_BYTES = loads.MIN_PIECE = loads.PAUSE_S = loads.MAX_PAUSE_S = 0


def _count_host_slots() -> None:
    """Before the caches are emptied: slots of the host pool that stay used when all is evicted."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    reset = UnifiedRadixCache.reset

    def counted(self: Any) -> None:
        pool = getattr(getattr(self, "cache_controller", None), "mem_pool_host", None)
        if pool is not None:
            everything = 1 << 30
            self.evict(EvictParams(num_tokens=everything))
            self.evict_host(everything)
            _log.warning("kvspray rig: %d host slots left", pool.size - pool.available_size())
        reset(self)

    UnifiedRadixCache.reset = counted
