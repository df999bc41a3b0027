"""Pages of host pools that do not report where their pages are: SGLang hands them over as tensors,
which are copied through a buffer that the sidecar maps. One call at a time uses the buffer; it is
free again when its leases have ended. A call's time includes its wait for the buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import kvspray
from kvspray.store import Namespace, Piece, Space
from kvspray_sglang.link import Link, Wanted

if TYPE_CHECKING:
    import torch

BUFFER_BYTES = 16 << 20
MAX_BLOCKS = 128  # of the buffer, however small the pages are
MAX_SIZES = 8  # unlike pages; each has a space of its own


class Copies:
    """The buffer, and a space for each kind of page. ``namespace_of`` makes their namespaces."""

    def __init__(self, link: Link, namespace_of: Callable[[str, int, str], Namespace]) -> None:
        self._link, self._namespace_of = link, namespace_of
        self._region = kvspray.Region.alloc(BUFFER_BYTES)
        link.add([self._region])
        self._lock = threading.Lock()  # guards the buffer and what follows
        self._spaces: dict[tuple[str, int, str], tuple[Space, int]] = {}
        self.bytes = 0  # copied between tensors and the buffer

    def get(
        self, name: str, hashes: Sequence[bytes], into: Sequence[Any], end: float
    ) -> list[bool]:
        """Copies pages of the store into tensors of one size, until ``end`` as in Link.get."""
        return self._move(name, hashes, into, end, False, b"")

    def put(
        self, name: str, hashes: Sequence[bytes], pages: Sequence[Any], end: float,
        parent: bytes = b"",
    ) -> list[bool]:  # fmt: skip
        """Copies tensors of one size into the store, until ``end``."""
        return self._move(name, hashes, pages, end, True, parent)

    def space(self, name: str, like: torch.Tensor) -> Space:
        with self._lock:
            return self._space(name, like)[0]

    def close(self) -> None:
        """After the session's end."""
        self._region.close()

    def _space(self, name: str, like: torch.Tensor) -> tuple[Space, int]:
        n = like.numel() * like.element_size()
        key = name, n, str(like.dtype).removeprefix("torch.")
        if key not in self._spaces:
            if not 0 < n <= BUFFER_BYTES:
                raise ValueError(f"a page of {n} bytes cannot be copied, at most {BUFFER_BYTES}")
            if len(self._spaces) >= MAX_SIZES:  # the one that was used longest ago goes
                self._spaces.pop(next(iter(self._spaces)))[0].close()
            blocks = min(MAX_BLOCKS, BUFFER_BYTES // n)
            piece = Piece(self._region, 0, n, n)
            self._spaces[key] = self._link.space(self._namespace_of(*key), [piece], blocks), blocks
        self._spaces[key] = self._spaces.pop(key)
        return self._spaces[key]

    def _move(
        self, name: str, hashes: Sequence[bytes], tensors: Sequence[Any], end: float, put: bool,
        parent: bytes,
    ) -> list[bool]:  # fmt: skip
        import torch

        out: list[bool] = []
        if not hashes:
            return out
        n = tensors[0].numel() * tensors[0].element_size()
        with self._lock:
            space, blocks = self._space(name, tensors[0])
            buffer = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
            for at in range(0, len(hashes), blocks):
                part = tensors[at : at + blocks]
                slots = [buffer[i * n : (i + 1) * n] for i in range(len(part))]
                if put:
                    for slot, t in zip(slots, part, strict=True):
                        slot.copy_(t.contiguous().flatten().view(torch.uint8))
                before = hashes[at - 1] if at else parent
                w = Wanted(space, hashes[at : at + blocks], range(len(part)), before)
                (ended,) = self._link.put([w], end) if put else self._link.get([w], end)
                for slot, t, ok in zip(slots, part, ended.pages, strict=True):
                    if ok and not put:
                        t.copy_(slot.view(t.dtype).reshape(t.shape))
                out += ended.pages
                self.bytes += n * (len(part) if put else sum(ended.pages))
                if not all(ended.pages):
                    break  # SGLang uses none behind the first that is missing
        return out + [False] * (len(hashes) - len(out))
