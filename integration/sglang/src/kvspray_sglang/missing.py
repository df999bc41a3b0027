# SPDX-License-Identifier: Apache-2.0
"""What SGLang's load stream itself copies, if the sidecar did not.

Behind its wait for a layer the load stream has a kernel, which copies the layer's parts if they are
marked as missing. So only two writes to host memory are needed after a failure: the mark, and the
load flag that ends the wait. A copy by another thread could have to wait for the very stream that
waits for it: CUDA loads kernels and allocates memory under a lock, and waits for all streams then.

This module imports Triton, which SGLang has where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

NONE = 1 << 62  # no part is missing
_WORKERS = 32  # programs for a part
_WORDS = 1024  # of 8 bytes, which a program copies at a time
WORD = 8


@triton.jit(do_not_specialize=["count", "first_part"])  # type: ignore[untyped-decorator]
def _copy(missing, pages, count, table, first_part, workers: tl.constexpr, words: tl.constexpr):  # type: ignore[no-untyped-def]
    part = first_part + tl.program_id(1)
    # Not volatile: all threads would read it one after another, in 270 us [measured, H200]. A kernel
    # begins with an empty cache.
    if part >= tl.load(missing):
        row = table + 5 * part
        src, src_stride, dst = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        dst_stride, length = tl.load(row + 3), tl.load(row + 4)
        pieces = tl.cdiv(length, words)
        for i in range(tl.program_id(0), count * pieces, workers):
            page, at = i // pieces, i % pieces * words + tl.arange(0, words)
            theirs = tl.load(pages + 2 * page).to(tl.int64)
            mine = tl.load(pages + 2 * page + 1).to(tl.int64)
            source = (src + theirs * src_stride).to(tl.pointer_type(tl.int64))
            target = (dst + mine * dst_stride).to(tl.pointer_type(tl.int64))
            tl.store(target + at, tl.load(source + at, mask=at < length), mask=at < length)


class Missing:
    """The parts of the loads in ``slots`` slots, each of at most ``pages`` pages. ``rows``: for each
    part (source, stride, destination, stride, length): addresses of page 0, and bytes, all multiples
    of WORD."""

    def __init__(
        self, rows: Sequence[Sequence[int]], per_layer: int, slots: int, pages: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        table = torch.tensor(rows, dtype=torch.int64)
        table[:, 4] //= WORD
        pin = device.type == "cuda"
        self._table = table.to(device)
        self._per_layer = per_layer
        # Two words for each slot: pointers have to be multiples of 16 for one kernel to serve all.
        self._first = torch.full((slots, 2), NONE, dtype=torch.int64, pin_memory=pin)
        self._pages = torch.zeros((slots, pages + pages % 2, 2), dtype=torch.int32, pin_memory=pin)
        self._counts = [0] * slots
        self.copy(0, 0)  # Triton compiles the kernel

    def begin(self, slot: int, pages: np.ndarray) -> None:
        """A load of these (source, destination) pages, of which nothing is missing so far. Only if
        the stream has passed all kernels of the slot's last load."""
        self._first.numpy()[slot, 0] = NONE
        self._pages.numpy()[slot, : len(pages)] = pages
        self._counts[slot] = len(pages)

    def mark(self, slot: int, first: int) -> None:
        """The parts from this one on are missing. Before the load flag that ends the wait."""
        self._first.numpy()[slot, 0] = first

    def copy(self, slot: int, layer: int) -> None:
        """On the current stream: copies the missing parts of a layer."""
        _copy[(_WORKERS, self._per_layer)](
            self._first[slot], self._pages[slot], self._counts[slot], self._table,
            layer * self._per_layer, _WORKERS, _WORDS,
        )  # fmt: skip
