"""The page copies of SGLang's "direct" I/O between device and host pools, in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


def _pages(src: torch.Tensor, dst: torch.Tensor, page: int) -> Iterator[tuple[slice, slice]]:
    for a, b in zip(src.tolist()[::page], dst.tolist()[::page], strict=True):
        yield slice(a, a + page), slice(b, b + page)


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for s, d in zip(src_layers, dst_layers, strict=True):
        for a, b in _pages(src_indices, dst_indices, page_size):
            d[b].copy_(s[a])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    for s, d in zip(src_ptrs, dst_ptrs, strict=True):
        for a, b in _pages(src_indices, dst_indices, page_size):
            d[b].copy_(s[a.start // page_size, layer_id])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, s in enumerate(src_ptrs):
        for a, b in _pages(src_indices, dst_indices, page_size):
            dst_ptrs[i // layers][b.start // page_size, i % layers].copy_(s[a])


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"sgl_kernel.kvcacheio.{name} is not there on a CPU")

    return missing
