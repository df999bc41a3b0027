"""Missing parts are copied, and nothing else: by PyTorch, and by the kernel in Triton's
interpreter."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kvspray_sglang.missing import Missing, Part
from kvspray_sglang.missing_gpu import GpuMissing
from kvspray_sglang.pools import PoolError

PAGES, LAYERS, PER_LAYER, SLOTS = 9, 3, 2, 2


@pytest.mark.parametrize("kind", [Missing, GpuMissing])
@pytest.mark.parametrize("nbytes", [8, 2048, 8192, 3 * 8192 + 8])
def test_missing_parts_are_copied(kind: type[Missing], nbytes: int) -> None:
    parts = LAYERS * PER_LAYER
    host = torch.randint(0, 255, (PAGES, parts, nbytes), dtype=torch.uint8)  # page first
    device = torch.zeros((parts, PAGES, nbytes), dtype=torch.uint8)
    missing = kind([Part(host[:, i], device[i]) for i in range(parts)], PER_LAYER, SLOTS, PAGES)
    assert not device.any()
    pages = np.array([(8, 1), (0, 8), (3, 3)], dtype=np.int32)
    for arrived in (parts, parts - 1, 3, 0):
        device.zero_()
        address = missing.begin(SLOTS - 1, pages)
        for layer in range(LAYERS):
            missing.copy(SLOTS - 1, layer)
        assert not device.any()
        ctypes.c_uint64.from_address(address).value = arrived  # as libkvspray does
        for layer in range(LAYERS):
            missing.copy(SLOTS - 1, layer)
        want = torch.zeros_like(device)
        for src, dst in pages.tolist():
            want[arrived:, dst] = host[src, arrived:]
        assert torch.equal(device, want)


def test_pages_that_the_kernel_does_not_copy() -> None:
    odd = torch.zeros((PAGES, 12), dtype=torch.uint8)
    with pytest.raises(PoolError, match="multiples of 8 bytes"):
        GpuMissing([Part(odd, odd.clone())], 1, SLOTS, PAGES)
