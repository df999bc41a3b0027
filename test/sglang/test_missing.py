# SPDX-License-Identifier: Apache-2.0
"""The kernel that copies missing parts, by Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvspray_sglang.missing import Missing

PAGES, LAYERS, PER_LAYER, SLOTS = 9, 3, 2, 2


@pytest.mark.parametrize("nbytes", [8, 2048, 8192, 3 * 8192 + 8])
def test_missing_parts_are_copied(nbytes: int) -> None:
    parts = LAYERS * PER_LAYER
    host = torch.randint(0, 255, (PAGES, parts, nbytes), dtype=torch.uint8)  # page first
    device = torch.zeros((parts, PAGES, nbytes), dtype=torch.uint8)
    rows = [
        (host[0, i].data_ptr(), parts * nbytes, device[i].data_ptr(), nbytes, nbytes)
        for i in range(parts)
    ]
    missing = Missing(rows, PER_LAYER, SLOTS, PAGES, torch.device("cpu"))
    assert not device.any()
    pages = np.array([(8, 1), (0, 8), (3, 3)], dtype=np.int32)
    for first in (parts, parts - 1, 3, 0):
        device.zero_()
        missing.begin(SLOTS - 1, pages)
        for layer in range(LAYERS):
            missing.copy(SLOTS - 1, layer)
        assert not device.any()
        missing.mark(SLOTS - 1, first)
        for layer in range(LAYERS):
            missing.copy(SLOTS - 1, layer)
        want = torch.zeros_like(device)
        for src, dst in pages.tolist():
            want[first:, dst] = host[src, first:]
        assert torch.equal(device, want)
