# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own fixtures for storage backends (sglang.test.kits, in its package) do, with its
radix cache, its controller and its host pools: pages go to the storage, and another cache gets them
from there. test_upstream.py runs this with KVSPRAY_UPSTREAM_SOCKET for our backend, and without it
for SGLang's file backend.
"""

from __future__ import annotations

import json
import os
import unittest
from array import array
from typing import Any

import kvspray_cpu_rig
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

SOCKET = os.environ.get("KVSPRAY_UPSTREAM_SOCKET")
PAGES = 4


def configured(**args: Any) -> ServerArgs:
    """The configuration that the fixtures make for their file backend, with the copies that exist on
    a CPU, and with our backend."""
    args |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    if SOCKET and args["hicache_storage_backend"]:
        ours = {
            "backend_name": "kvspray", "module_path": "kvspray_sglang.hicache",
            "class_name": "KvsprayHiCache", "interface_v1": 1, "weights": "w", "socket": SOCKET,
        }  # fmt: skip
        extra = json.loads(args["hicache_storage_backend_extra_config"] or "{}")
        args["hicache_storage_backend"] = "dynamic"
        args["hicache_storage_backend_extra_config"] = json.dumps(extra | ours)
    return ServerArgs(**args)


kvspray_cpu_rig.install()
mixins.ServerArgs = configured


class Storage(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    def _cache(self, folder: str) -> tuple[Any, Any, Any]:
        cache, slots, requests = build_fixture(self.cfg)
        self._init_hicache(
            cache, storage_backend="file", storage_dir=folder, prefetch_threshold=1
        )  # fmt: skip
        backend = cache.cache_controller.storage_backend
        assert (type(backend).__name__ == "KvsprayHiCache") == bool(SOCKET)
        return cache, slots, requests

    def _buffers(self, slots: Any) -> list[torch.Tensor]:
        pool = self._get_full_kv_pool(slots)
        return [*pool.k_buffer, *pool.v_buffer]

    def _round(self, page: int) -> None:
        self.cfg = CacheConfig(
            page_size=page, components=(ComponentType.FULL,), num_layers=4,
            kv_size=page * 16, max_context_len=page * 8,
        )  # fmt: skip
        folder = self._make_storage_dir()
        tokens = list(range(PAGES * page))
        key = MatchPrefixParams(key=RadixKey(array("q", tokens)))

        writer, slots, requests = self._cache(folder)
        self._insert(writer, slots, requests, tokens)
        match = writer.match_prefix(key)
        for buffer in self._buffers(slots):
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
        want = [b[match.device_indices].clone() for b in self._buffers(slots)]
        leaf = match.last_device_node
        self._backup_node(writer, leaf)
        writer.writing_check(write_back=True)
        self._write_path_to_l3(writer, leaf)
        self._flush_l3_backups(writer)
        hashes = self._all_page_hashes(writer, leaf)
        self.assertEqual(self._storage_exists_count(writer, hashes), PAGES)

        reader, slots, requests = self._cache(folder)
        self.assertEqual(self._storage_exists_count(reader, [*hashes, "0" * 64]), PAGES)
        handle = CacheRequestHandle("reader", 0)
        reader.prefetch_from_storage(
            handle, reader.root_node_handle(), array("q", tokens), None, None
        )
        self._run_prefetch_to_completion(reader, handle)
        match = reader.match_prefix(key)
        self.assertEqual(match.host_hit_length, len(tokens))
        self._load_back_node(reader, match.last_host_node)
        indices = reader.match_prefix(key).device_indices
        self.assertEqual(len(indices), len(tokens))
        for a, b in zip(want, self._buffers(slots), strict=True):
            self.assertTrue(torch.equal(a, b[indices]))

    def test_pages_of_16_tokens(self) -> None:
        self._round(16)

    def test_pages_of_64_tokens(self) -> None:
        self._round(64)
