"""Whether vLLM's prefix cache may hold blocks of weights that the engine had before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PrefixCache:
    """When weights change, vLLM keeps cached blocks of the weights before, until it empties the
    cache while no block is in use.

    Everything runs on the engine core's thread.
    """

    def __init__(self) -> None:
        self.step = 0  # number of the last step
        # Number of the first step with the present weights; 0: they are those of the start.
        self.changed = 0
        self.mixed = False  # blocks may be of other weights
        self._pool: BlockPool | None = None
        self._emptied = -1  # number of the last step before the cache was emptied

    def set_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def reset(self) -> None:
        """vLLM has emptied the cache, unless some blocks were in use."""
        pool = self._pool
        # One stands for no block.
        if pool is not None and pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1:
            self._emptied = self.step
            self.mixed = False

    def look(self) -> None:
        """Before a new request gets blocks: vLLM may have emptied the cache without its
        connectors."""
        if self.mixed and not getattr(self._pool, "cached_block_hash_to_block", (None,)):
            self.reset()

    def weights_changed(self, since: int) -> None:
        """A rank has had other weights since the step of this number."""
        self.changed = max(self.changed, since)
        self.mixed |= self._emptied < since - 1
