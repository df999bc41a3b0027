# SPDX-License-Identifier: Apache-2.0
"""Host memory as the medium of vLLM's OffloadingConnector, on vLLM's CPU backend, for tests only.

The connector, its scheduler and its manager are vLLM's own. vLLM's copies run on CUDA streams
alone, so here rows are copied at once, on the engine's thread.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffload(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(f"blocks_per_chunk is {self.blocks_per_chunk}, want 1")
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker


class HostWorker(OffloadingWorker):
    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self.engine = [
            t.tensor.view(torch.int8).view((-1, t.page_size_bytes)) for t in kv_caches.tensors
        ]
        self.host = [torch.zeros((chunks, t.shape[1]), dtype=torch.int8) for t in self.engine]
        self.refs = kv_caches.group_data_refs
        self.done: list[TransferResult] = []

    def copy(self, job: int, src: Any, dst: Any, groups: Any, store: bool) -> bool:
        start, at, copied = time.monotonic(), 0, 0
        give, take = (self.engine, self.host) if store else (self.host, self.engine)
        for count, refs in zip(groups, self.refs, strict=True):
            a, b = (torch.from_numpy(s.block_ids[at : at + count]).long() for s in (src, dst))
            at += count
            for ref in refs:
                size = ref.page_size_bytes
                take[ref.tensor_idx][b, :size] = give[ref.tensor_idx][a, :size]
                copied += count * size
        self.done.append(TransferResult(job, True, copied, time.monotonic() - start))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, src_spec, dst_spec, src_spec.group_sizes, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, src_spec, dst_spec, dst_spec.group_sizes, False)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy has ended when it was submitted."""
