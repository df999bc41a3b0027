"""Missing parts, copied by a kernel on SGLang's load stream. Triton is where SGLang has a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvspray_sglang.missing import Missing, Part
from kvspray_sglang.pools import PoolError

WORD = 8  # addresses, strides and lengths are multiples of it
_WORKERS = 32  # programs for a part
_WORDS = 1024  # that a program copies at a time


@triton.jit(do_not_specialize=["count", "first_part"])  # type: ignore[untyped-decorator]
def _copy(arrived, pages, count, table, first_part, workers: tl.constexpr, words: tl.constexpr):  # type: ignore[no-untyped-def]
    part = first_part + tl.program_id(1)
    # Volatile, all threads would read it one after another, in 270 us [measured, H200]. A plain
    # read sees the last write: the kernel begins after the wait for the flag, which was raised
    # later.
    if part >= tl.load(arrived):
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


def _row(p: Part) -> list[int]:
    strides = [x.stride(0) * x.element_size() for x in (p.host, p.device)]
    row = [p.host.data_ptr(), strides[0], p.device.data_ptr(), strides[1], p.length]
    if any(x % WORD for x in row):
        raise PoolError(f"its pages do not begin and end at multiples of {WORD} bytes")
    return [*row[:4], row[4] // WORD]


class GpuMissing(Missing):
    """copy() adds a kernel to the current stream, which does nothing if no part is missing."""

    def __init__(self, parts: Sequence[Part], per_layer: int, slots: int, pages: int) -> None:
        super().__init__(parts, per_layer, slots, pages)
        rows = [_row(p) for p in parts]
        self._table = torch.tensor(rows, dtype=torch.int64).to(parts[0].device.device)
        self.copy(0, 0)  # Triton compiles the kernel

    def copy(self, slot: int, layer: int) -> None:
        _copy[(_WORKERS, self._per_layer)](
            self._arrived[slot], self._pages[slot], self._counts[slot], self._table,
            layer * self._per_layer, _WORKERS, _WORDS,
        )  # fmt: skip
