"""What a load's waiter itself copies, if the sidecar did not.

libkvspray writes how many parts of a load have arrived, and raises the load flag that ends the
wait. So nothing else has to happen after a failure. A copy by another thread could have to wait for
the very stream that waits for it: CUDA loads kernels and allocates memory under a lock, and waits
for all streams then; and a launch into a full stream can keep Python's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

ALL = 1 << 62  # parts have arrived


@dataclass(frozen=True)
class Part:
    """K or V of a layer, or its latent: a tensor of pages on each side."""

    host: torch.Tensor
    device: torch.Tensor

    @property
    def length(self) -> int:
        return int(self.host[0].numel() * self.host.element_size())


class Missing:
    """The parts of the loads in ``slots`` slots, each of at most ``pages`` pages."""

    def __init__(self, parts: Sequence[Part], per_layer: int, slots: int, pages: int) -> None:
        pin = parts[0].device.is_cuda
        self._parts, self._per_layer = parts, per_layer
        # Two words for each slot: pointers have to be multiples of 16 for one kernel to serve all.
        self._arrived = torch.full((slots, 2), ALL, dtype=torch.int64, pin_memory=pin)
        self._pages = torch.zeros((slots, pages + pages % 2, 2), dtype=torch.int32, pin_memory=pin)
        self._counts = [0] * slots

    def begin(self, slot: int, pages: np.ndarray) -> int:
        """A load of these (host, device) pages. Only if nothing reads the slot any more. Returns
        the address for the number of its first parts that have arrived."""
        self._arrived.numpy()[slot, 0] = ALL
        self._pages.numpy()[slot, : len(pages)] = pages
        self._counts[slot] = len(pages)
        return int(self._arrived[slot].data_ptr())

    def arrived(self, slot: int) -> int:
        return int(self._arrived.numpy()[slot, 0])

    def copy(self, slot: int, layer: int) -> None:
        """Behind the wait for a layer: copies its missing parts."""
        first = layer * self._per_layer
        for i in range(max(first, self.arrived(slot)), first + self._per_layer):
            for h, d in self._pages.numpy()[slot, : self._counts[slot]].tolist():
                self._parts[i].device[d].copy_(self._parts[i].host[h])
