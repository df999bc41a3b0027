"""The content digest of a KV cache: a sum that is equal in every layout. docs/content-digest.md has
its definition and its bounds.

    digest = Digest(seed)                          # 16 bytes, the same on both sides
    n = digest.of_memory(addr, nbytes, units, table)  # in C, of memory that this process reads
    n = digest.of_tensor(region, units, table)     # by torch, of a tensor of bytes on any device
    total = add(n, m)                              # of two parts

``units`` are the heads and rows of one plane. No call is for two threads at once.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ._lib import CUnits, byref, lib, strerror
from .region import KvsprayError

if TYPE_CHECKING:
    import torch

__all__ = ["PRIME", "SEED_BYTES", "Digest", "Units", "add"]

PRIME = (1 << 61) - 1
SEED_BYTES = 16
# Elements that one step of of_tensor widens to 64 bits, several times.
_STEP_ELEMENTS = 1 << 22
_WORD, _ROW, _HEAD = 1, 2, 3  # axes of weights


@dataclass(frozen=True)
class Units:
    """Rows [first_row, +rows) and heads [first_head, +heads) of one plane of a layer of the model.

    A cell lies at off + table[row // (tile_rows*tiles)]*block + tile_of_block*tile
    + row_of_tile*row + (head-first_head)*head + column*col. ``role`` counts as layout.Role does.
    """

    layer: str
    role: int
    off: int
    block: int
    tile: int
    row: int
    head: int
    col: int
    tile_rows: int
    tiles: int
    cell: int
    cols: int
    first_head: int
    heads: int
    first_row: int
    rows: int


def add(a: int, b: int) -> int:
    """The digest of two disjoint parts together."""
    return (a + b) % PRIME


class Digest:
    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"kvspray: seed: {len(seed)} bytes; pass {SEED_BYTES}")
        handle = ctypes.c_void_p()
        _check(lib.kvs_digest_open(seed, byref(handle)), "no memory for weights")
        self._handle = handle
        weakref.finalize(self, lib.kvs_digest_close, handle)

    def of_memory(self, addr: int, nbytes: int, units: Units, table: Sequence[int]) -> int:
        blocks = (ctypes.c_uint32 * len(table))(*table)
        out = ctypes.c_uint64()
        values = {f.name: getattr(units, f.name) for f in fields(units)}
        c = CUnits(**{**values, "layer": units.layer.encode()})
        rc = lib.kvs_digest_sum(
            self._handle, addr, nbytes, byref(c), blocks, len(table), byref(out)
        )
        _check(rc, f"{units} in {nbytes} bytes, a table of {len(table)} blocks")
        return out.value

    def of_tensor(self, region: torch.Tensor, units: Units, table: Sequence[int]) -> int:
        """``region`` has one axis, of bytes."""
        u = units
        if region.dim() != 1 or region.element_size() != 1 or not region.is_contiguous():
            raise ValueError(f"kvspray: region: {region.dtype} {list(region.shape)}; pass bytes")
        if min(u.tile_rows, u.tiles, u.cell, u.cols) < 1:
            raise ValueError(f"kvspray: units: {u}: a block has rows, and a unit has bytes")
        in_block = u.tile_rows * u.tiles
        first, last = u.first_row // in_block, (u.first_row + u.rows - 1) // in_block
        if u.rows == 0 or u.heads == 0:
            return 0
        if last >= len(table):
            raise ValueError(f"kvspray: table: {len(table)} blocks; row {u.first_row + u.rows - 1} "
                             f"is in block {last}: pass the whole table")  # fmt: skip
        view = _numbers(region, u, max(table[first : last + 1]) + 1)
        step = max(_STEP_ELEMENTS // (in_block * u.heads * u.cols * view.shape[-1]), 1)
        total = 0
        for at in range(first, last + 1, step):
            end = min(at + step, last + 1)
            rows = range(max(u.first_row, at * in_block), min(u.first_row + u.rows, end * in_block))
            total += self._rows(view, u, table[at:end], rows, at * in_block)
        return total * int(lib.kvs_digest_plane(self._handle, u.role, u.layer.encode())) % PRIME

    def _rows(
        self, view: torch.Tensor, u: Units, blocks: Sequence[int], rows: range, base: int
    ) -> int:
        """The sum of rows that lie in the given blocks, of which the first begins with row base."""
        import torch

        index = torch.tensor(blocks, device=view.device)
        x = view.index_select(0, index).flatten(0, 2)[rows.start - base : rows.stop - base]
        number = {4: 0xFFFFFFFF, 2: 0xFFFF, 1: 0xFF}[x.element_size()]
        x = x.flatten(2).to(torch.int64) & number  # row, head, number
        per_word = 4 // view.element_size()
        words = self._weights(_WORD, 0, -(-x.shape[-1] // per_word), view.device)
        weights = words.repeat_interleave(per_word)[: x.shape[-1]]
        if per_word > 1:
            bits = torch.arange(x.shape[-1], device=view.device) % per_word * (32 // per_word)
            weights = _mod(_shifted_by(weights, bits))
        low, high = weights & _LOW, weights >> 30
        unit = _mod(_sum(x * low) + _shifted(_sum(x * high), 30))
        of_head = self._weights(_HEAD, u.first_head, u.heads, view.device)
        of_row = self._weights(_ROW, rows.start, len(rows), view.device)
        return int(_sum(_product(_sum(_product(unit, of_head)), of_row)))

    def _weights(self, axis: int, first: int, count: int, device: torch.device) -> torch.Tensor:
        import torch

        out = torch.empty(count, dtype=torch.int64)
        rc = lib.kvs_digest_weights(self._handle, axis, first, count, out.data_ptr())
        _check(rc, f"weights [{first}, +{count}) of axis {axis}")
        return out.to(device)


def _check(rc: int, what: str) -> None:
    if rc != 0:
        raise KvsprayError(f"kvspray: digest of {what}: {strerror(rc)}")


def _numbers(region: torch.Tensor, u: Units, blocks: int) -> torch.Tensor:
    """The region as [block, tile, row, head, column, number], in the largest numbers of 4, 2 or 1
    bytes of which all strides are multiples."""
    import torch

    strides = (u.block, u.tile, u.row, u.head, u.col)
    size = math.gcd(4, u.off, u.cell, region.data_ptr(), *strides)
    shape = (blocks, u.tiles, u.tile_rows, u.heads, u.cols, u.cell // size)
    end = u.off + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)) + u.cell
    if end > region.numel():
        raise ValueError(f"kvspray: region: {region.numel()} bytes; the units end at byte {end}")
    dtype = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    numbers = region[: region.numel() // size * size].view(dtype)
    return numbers.as_strided(shape, [s // size for s in strides] + [1], u.off // size)


# Arithmetic modulo the prime in signed 64 bits. Numbers are below 2^62; _fold makes them at most
# 2^61, which is 1 modulo the prime.
_LOW = (1 << 30) - 1


def _fold(x: torch.Tensor) -> torch.Tensor:
    return (x & PRIME) + (x >> 61)


def _mod(x: torch.Tensor) -> torch.Tensor:
    x = _fold(x)
    return x.where(x < PRIME, x - PRIME)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x * 2^bits: a rotation of 61 bits."""
    x = _mod(x)
    return ((x & ((1 << (61 - bits)) - 1)) << bits) + (x >> (61 - bits))


def _shifted_by(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    import torch

    one = torch.ones_like(bits)
    return ((x & ((one << (61 - bits)) - 1)) << bits) + (x >> (61 - bits))


def _sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, of fewer than 2^30 numbers, each below 2^63."""
    return _mod(_fold((x & 0xFFFFFFFF).sum(-1)) + _shifted((x >> 32).sum(-1), 32))


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x * y, both below the prime, in halves of 31 bits."""
    half = (1 << 31) - 1
    a, b, c, d = x & half, x >> 31, y & half, y >> 31
    middle = _fold(_fold(a * d) + _fold(b * c))
    return _mod(_fold(_fold(a * c) + _shifted(middle, 31)) + _shifted(_fold(b * d), 1))
