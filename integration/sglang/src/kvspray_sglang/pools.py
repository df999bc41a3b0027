"""Where the pages of one of SGLang's host pools are.

A pool reports the addresses of a page (``get_page_buffer_meta``). They are probed at a few pages:
page i lies at base + i*stride in each of some pieces, or the pool is refused. Before each use one
page is compared again, so that a pool that has moved is never read or written at its old place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_PIECES = 4096  # docs/protocol.md, section 5

# What the meaning of a page's bytes depends on, for pools that have it.
_SHAPE = (
    "layout", "dtype", "storage_format_tag", "start_layer", "end_layer", "layer_num", "head_num",
    "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "temporal_dtype",
    "conv_dtype", "temporal_state_shape", "conv_state_shapes", "num_mamba_layers", "index_head_dim",
    "indexer_dtype", "indexer_page_stride_size", "quant_block_size", "compress_ratio",
)  # fmt: skip


class PoolError(ValueError):
    """A pool whose pages the store cannot reach; the text names it and the remedy."""


@dataclass(frozen=True)
class Part:
    """A piece of every page, by its addresses in this process."""

    addr: int
    stride: int
    length: int


class Pool:
    """The pages of a host pool."""

    def __init__(self, name: str, host: Any) -> None:
        entry = getattr(host, "anchor_entry", None)  # a group of pools: its first is meant
        self.host = host if entry is None else entry.host_pool
        self.name = name
        self.page_tokens = int(getattr(self.host, "page_size", 1) or 1)
        self.pages = int(self.host.size) // self.page_tokens
        self.parts = self._probe()
        self.page_bytes = sum(p.length for p in self.parts)

    def _probe(self) -> list[Part]:
        what = f"kvspray: host pool {self.name!r} ({type(self.host).__name__})"
        layout = getattr(self.host, "layout", "?")
        if getattr(self.host, "shared_allocation_domain", None) is not None:
            raise PoolError(f"{what}: its pages move")
        try:
            first = self._meta(0)
            second = self._meta(1) if self.pages > 1 else first
        except (AttributeError, NotImplementedError, ValueError, AssertionError) as err:
            raise PoolError(
                f"{what}, layout {layout}: it does not report where its pages are: {err}"
            ) from err
        if not 0 < len(first) <= MAX_PIECES:
            raise PoolError(f"{what}: a page has {len(first)} pieces, want 1 to {MAX_PIECES}")
        parts = [Part(a, b - a or n, n) for (a, n), (b, _) in zip(first, second, strict=True)]
        for page in {0, 1, self.pages // 2, self.pages - 1}:
            if page < self.pages and self._meta(page) != [
                (p.addr + page * p.stride, p.length) for p in parts
            ]:
                raise PoolError(
                    f"{what}, layout {layout}: its pages are not at equal distances (page {page})"
                )
        return parts

    def _meta(self, page: int) -> list[tuple[int, int]]:
        import torch

        start = page * self.page_tokens
        addrs, sizes = self.host.get_page_buffer_meta(torch.arange(start, start + self.page_tokens))
        return [(int(a), int(n)) for a, n in zip(addrs, sizes, strict=True)]

    def spans(self) -> list[tuple[int, int]]:
        """First and last address of each part."""
        last = self.pages - 1
        return [(p.addr, p.addr + last * p.stride + p.length) for p in self.parts]

    def blocks(self, indices: Any, keys: int) -> list[int]:
        """The pages that these slots of tokens are in, one for each key."""
        out = _pages(self.name, self.page_tokens, self.pages, indices, keys)
        if out and self._meta(out[0]) != [
            (p.addr + out[0] * p.stride, p.length) for p in self.parts
        ]:
            raise PoolError(f"kvspray: host pool {self.name!r} has moved since it was registered; "
                            "detach the storage backend and attach it again")  # fmt: skip
        return out

    def fingerprint(self, more: Sequence[object]) -> str:
        """A name for the order of bytes in a page. ``more``: what else that order depends on."""
        shape = {k: str(getattr(self.host, k)) for k in _SHAPE if hasattr(self.host, k)}
        lengths = [p.length for p in self.parts]
        what = ["kvspray-sglang-1", self.name, type(self.host).__qualname__, shape, lengths, more]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


class CopiedPool:
    """A host pool whose pages SGLang copies out and in, as tensors."""

    def __init__(self, name: str, host: Any) -> None:
        entry = getattr(host, "anchor_entry", None)
        self.host = host if entry is None else entry.host_pool
        self.name = name
        self.page_tokens = int(getattr(self.host, "page_size", 1) or 1)
        self.pages = int(self.host.size) // self.page_tokens
        self.layout = f"{type(self.host).__qualname__}/{getattr(self.host, 'layout', '?')}"

    def slots(self, indices: Any, keys: int) -> list[int]:
        """The first slot of each page."""
        pages = _pages(self.name, self.page_tokens, self.pages, indices, keys)
        return [p * self.page_tokens for p in pages]


def _pages(name: str, tokens: int, pages: int, indices: Any, keys: int) -> list[int]:
    if indices is None or len(indices) != keys * tokens:
        got = "no" if indices is None else len(indices)
        raise PoolError(
            f"kvspray: host pool {name!r}: {got} indices for {keys} pages of {tokens} tokens"
        )
    out = []
    for slot in indices[::tokens].tolist():
        page, rest = divmod(slot, tokens)
        if rest or not 0 <= page < pages:
            raise PoolError(
                f"kvspray: host pool {name!r}: slot {slot} begins none of its {pages} pages of "
                f"{tokens} tokens"
            )
        out.append(page)
    return out
