"""Memory of SGLang's host pools that the sidecar can map.

SGLang's own shared memory has no seals, so a sidecar, which a truncation would kill, does not map
it. ``plugin`` therefore gives the pools this memory. A pool that has other memory is reached
through /proc/self/mem, which costs the sidecar one more copy.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import kvspray

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_mapped: dict[int, kvspray.Region] = {}  # by the address; until its tensor is collected


def allocate(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor in a region of its own. None: there is no such memory; the log has the reason."""
    import torch

    count = math.prod(dims)
    try:
        region = kvspray.Region.alloc(max(1, count * dtype.itemsize))
    except kvspray.KvsprayError as err:
        _log.warning("kvspray: SGLang's host pool is not in memory that can be mapped: %s", err)
        return None
    array = (ctypes.c_uint8 * region.nbytes).from_address(region.addr)
    with _lock:
        _mapped[region.addr] = region
    weakref.finalize(array, _release, region.addr).atexit = False
    return torch.frombuffer(array, dtype=dtype, count=count).reshape(tuple(dims))


def _release(addr: int) -> None:
    with _lock:
        region = _mapped.pop(addr, None)
    if region is not None:
        region.close()


def region_of(start: int, end: int) -> kvspray.Region | None:
    """The region that holds these addresses; None if no single one does."""
    with _lock:
        for region in _mapped.values():
            if region.addr <= start and end <= region.addr + region.nbytes:
                return region
    return None


def process_regions(spans: Sequence[tuple[int, int]]) -> list[kvspray.Region]:
    """Regions of other memory that cover all spans. Spans that touch share a region."""
    joined: list[list[int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return [kvspray.Region.process(start, end - start) for start, end in joined]


def allocator_class(base: type) -> type:
    """A HostTensorAllocator of SGLang that allocates here, and as SGLang does where it cannot."""

    class MappedHostTensorAllocator(base):  # type: ignore[misc]
        def allocate(self, dims: Any, dtype: Any, device: str) -> Any:
            tensor = allocate(dims, dtype) if device == "cpu" else None
            if tensor is None:
                return super().allocate(dims, dtype, device)
            self.dims, self.dtype = dims, dtype
            return tensor

    return MappedHostTensorAllocator
