"""SGLang's own fixtures for its tests of storage backends: they are in its package, so they are
those of the installed release. Their caches, with SGLang's tree, controller and host pools, store
pages and fetch them, and they assert what is there. test_upstream.py runs this with
KVSPRAY_UPSTREAM_SOCKET for our backend, and without it for the file backend, which the fixtures
name.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "rig"))

import cluster as rig
import kvspray_cpu_rig
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

SOCKET = os.environ.get("KVSPRAY_UPSTREAM_SOCKET")


def configured(**args: Any) -> ServerArgs:
    """The fixtures' configuration with the copies that exist on a CPU, and with our backend."""
    args |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    if SOCKET and args["hicache_storage_backend"]:
        extra = json.loads(args["hicache_storage_backend_extra_config"] or "{}") | {
            "backend_name": "kvspray", "module_path": "kvspray_sglang.hicache",
            "class_name": "KvsprayHiCache", "interface_v1": 1, "socket": SOCKET,
            # Each test has a directory of its own for the file backend, and its tokens are the
            # same.
            "weights": envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get(),
        }  # fmt: skip
        args["hicache_storage_backend"] = "dynamic"
        args["hicache_storage_backend_extra_config"] = json.dumps(extra)
    return ServerArgs(**args)


kvspray_cpu_rig.install()
mixins.ServerArgs = configured


class Storage(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    def _init_hicache(self, cache: Any, **how: Any) -> None:
        super()._init_hicache(cache, **how)
        for entry in cache.cache_controller.mem_pool_host.entries:
            entry.host_pool.pin_memory = False  # the file backend's own pages; it needs a GPU
        backend = cache.cache_controller.storage_backend
        assert ("kvspray" in type(backend).__module__) == bool(SOCKET), backend
        if SOCKET:  # until it is connected there are only misses
            rig.wait_for("a session", lambda: backend._link.connected, 30)


class TestPages(Storage):
    cfg = CacheConfig(page_size=16, num_layers=4, full_attention_layer_ids=(3,))

    def test_stored_and_fetched(self) -> None:
        folder, seq = self._make_storage_dir(), self._make_seq(1, 4)
        want = self._l3_produce(folder, seq, marker=7)
        cache, slots, _ = self._l3_consumer(folder)
        self._consume_prefetch(cache, seq, CacheRequestHandle("r", 0))
        match = match_prefix(cache, seq)
        self.assertEqual(match.host_hit_length, len(seq))
        self._load_back_node(cache, match.last_host_node)
        leaf = match_prefix(cache, seq).last_device_node
        hashes = self._all_page_hashes(cache, leaf)
        self.assertEqual(self._storage_exists_count(cache, [*hashes, "0" * 64]), len(hashes))
        got = self._snapshot_full_kv(slots, cache.path_device_indices(leaf))
        for a, b in zip(want, got, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_fetched_into_a_buffer(self) -> None:
        self._assert_sibling_head_is_trimmed(
            self._make_storage_dir(), self._buffer_swa_seq(), window_sized=False
        )


class TestWindows(Storage):
    """The same with a second pool, for layers with a sliding window."""

    cfg = CacheConfig(
        page_size=16, num_layers=4, full_attention_layer_ids=(3,), sliding_window_size=16,
        components=(ComponentType.FULL, ComponentType.SWA), kv_size=512,
    )  # fmt: skip

    def test_windows_stored_and_fetched(self) -> None:
        self.assertIsNotNone(self._setup_swa_tp_prefetch())

    def test_windows_fetched_into_a_buffer(self) -> None:
        self._assert_sibling_head_is_trimmed(
            self._make_storage_dir(), self._buffer_swa_seq(), window_sized=False
        )

    def test_only_the_window_is_missing(self) -> None:
        folder, seq = self._make_storage_dir(), self._buffer_swa_seq()
        self._produce_buffer_l3(folder, seq)
        self._assert_masked_full_is_reused(folder, seq, live_tail=0)
