# SPDX-License-Identifier: Apache-2.0
"""The entry point ``sglang.srt.plugins``, which SGLang calls in each of its processes.

It wraps the function with which host pools choose their allocator, because a backend sees a pool
only when its memory is allocated and pinned. Nothing changes unless kvspray is the backend.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from kvspray_sglang import memory

_log = logging.getLogger(__name__)
_CHOOSES = "sglang.srt.mem_cache.pool_host.common.get_allocator_from_storage"
installed = False


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global installed
    HookRegistry.register(_CHOOSES, _choose, HookType.AROUND)
    installed = True


def _choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _allocator()() if is_backend() else original(*args, **kwargs)


@functools.cache
def _allocator() -> type:
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

    return memory.allocator_class(HostTensorAllocator)


def is_backend() -> bool:
    """Whether this process's configuration names kvspray as the storage backend."""
    from sglang.srt.runtime_context import get_memory

    try:
        config = get_memory()
        kind = config.hicache_storage_backend
        extra = config.hicache_storage_backend_extra_config
        if kind != "dynamic" or not extra:
            return False
        if extra.startswith("@"):
            with open(extra[1:], encoding="utf-8") as f:
                extra = f.read(1 << 20)
    except (AttributeError, OSError, ValueError):  # nothing is configured in this process
        return False
    return "kvspray_sglang" in extra
