"""KvsprayHiCache: the storage backend of SGLang's HiCache, selected by
``--hicache-storage-backend dynamic``.

SGLang's storage threads catch little, and its scheduler waits for them with a time-out of ten
seconds. So no method here raises once the backend is made, none returns None, and none outlasts
what ``link`` bounds. Whatever the store does not have is computed.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import sglang
from sglang.srt.mem_cache import hicache_storage as upstream

import kvspray
from kvspray.store import Namespace, Piece, Space
from kvspray_sglang import check_release, loads, names, plugin
from kvspray_sglang.copies import Copies
from kvspray_sglang.link import CALL_S, Ended, Link, Wanted
from kvspray_sglang.pools import CopiedPool, Pool, PoolError
from kvspray_sglang.settings import Settings

_log = logging.getLogger(__name__)
_HASH = re.compile("[0-9a-f]{64}")
_KV = "kv"
_MAX_SAMPLES = 1024  # of a metric between two polls


def page_hash(key: str) -> bytes:
    """SGLang's key of a page as bytes."""
    return (
        bytes.fromhex(key)
        if _HASH.fullmatch(key)
        else hashlib.sha256(b"key:" + key.encode()).digest()
    )


def _safe(default: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method that never raises; ``default`` makes the result of one that fails."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: KvsprayHiCache, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except PoolError as err:  # its text is one for all methods
                self._complain(str(err))
                return default(*args, **kwargs)
            except Exception as err:
                self._complain(f"{method.__name__}: {type(err).__name__}: {err}")
                return default(*args, **kwargs)

        return call

    return wrap


def _none(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_v2(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {t.name: [False] * len(t.keys or []) for t in transfers}


class KvsprayHiCache(upstream.HiCacheStorage):  # type: ignore[misc]
    """Pages of this rank's host pools in the store of the node's sidecar."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        check_release()
        settings = Settings.parse(storage_config.extra_config or {})
        if getattr(storage_config, "should_split_heads", False):
            raise ValueError(
                "kvspray: tp_lcm_size: heads are not divided among engines of unlike tensor "
                "parallelism; remove it from hicache_storage_backend_extra_config"
            )
        self._config, self._args = storage_config, names.server_args()
        names.check_adapters(self._args)
        self._weights = names.Weights(settings, self._args, _log)
        self._names = names.Names(storage_config, self._args, self._weights.name, settings.secret())
        ranks = kvspray.Ranks(
            tp=(storage_config.tp_rank, storage_config.tp_size),
            pp=(storage_config.pp_rank, storage_config.pp_size),
        )
        self._by_sidecar = settings.loads == "sidecar"
        self._link = Link(settings.socket, sglang.__version__, ranks, _log)
        self._loads: loads.Loads | None = None
        self._lock = threading.Lock()  # guards what follows
        self._pools: dict[str, tuple[Pool, list[Piece]]] = {}
        self._copied: dict[str, CopiedPool] = {}
        self._copies: Copies | None = None
        self._spaces: dict[str, Space] = {}
        self._indices_only = False  # the anchor: SGLang's first pool has no pages of its own
        self._refused = ""  # why a pool could not be registered
        self._started = False
        self._said: set[str] = set()
        self._samples: dict[str, collections.deque[float]] = {
            k: collections.deque(maxlen=_MAX_SAMPLES)
            for k in ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")
        }

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    @_safe(lambda *_: None)
    def on_host_pools_registered(self) -> None:
        self._start()

    def _register(self, name: str, host: Any) -> None:
        """A prompt's pages are in several pools, so none is used without all of them."""
        try:
            self._add(name, host)
        except Exception as err:
            self._refused = (
                f"host pool {name!r} ({type(host).__name__}) cannot be used, so nothing is stored "
                f"or found: {type(err).__name__}: {err}"
            )
            self._complain(self._refused)

    def _add(self, name: str, host: Any) -> None:
        if name == _KV and hasattr(host, "kv_buffer") and host.kv_buffer is None:
            self._indices_only = True  # its pages are in other pools
            return
        with self._lock:
            if name in self._pools or name in self._copied:
                return
            try:
                pool = Pool(name, host)
                self._pools[name] = pool, self._link.pool(pool)
            except PoolError as err:
                _log.warning("%s; Python copies each of its pages", err)
                self._copied[name] = CopiedPool(name, host)
        if name == _KV and self._by_sidecar:
            self._load_by_sidecar(host)

    def _load_by_sidecar(self, host: Any) -> None:
        def arg(name: str) -> Any:
            return getattr(self._args, name, None)

        batches = self._config.pp_size + (arg("pp_async_batch_depth") or 0)
        moves = arg("disaggregation_mode") in ("prefill", "decode")
        moves = moves and arg("disaggregation_transfer_backend") == plugin.TRANSFER_BACKEND
        for wrong, what in (
            (not plugin.installed, "it has not loaded the plug-in kvspray"),
            (moves, "the transfer backend kvspray has the device pool"),
            (arg("enable_memory_saver"), "enable_memory_saver is on"),
            (
                batches > loads.MAX_BATCHES,
                f"the pipeline has {batches} batches at a time, at most {loads.MAX_BATCHES}",
            ),
        ):
            if wrong:
                self._complain(f"loads: SGLang loads pages itself: {what}")
                return
        try:
            self._loads = loads.Loads(self._link, host)
        except Exception as err:  # the store works without
            self._complain(f"loads: SGLang loads pages itself: {err}")
        else:
            loads.activate(self._loads)

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                self._link.start()
                self._started = True

    def _check(self) -> None:
        """Raises where nothing may be stored or found."""
        self._start()
        if self._refused:
            raise PoolError(self._refused)
        if not self._weights.current:
            raise PoolError(
                "SGLang has replaced its weights, and nothing is stored or found any more; detach "
                "the storage backend and attach it again with weights in its extra config"
            )

    def _space(self, name: str) -> Space:
        """The part of the store that a pool's pages are in."""
        self._check()
        copied = self._copied.get(name)
        if copied is not None:
            return self._copier().space(name, copied.host.get_dummy_flat_data_page())
        with self._lock:
            if name not in self._pools:
                raise PoolError(f"host pool {name!r} was not registered")
            pool, pieces = self._pools[name]
            if name not in self._spaces:
                self._spaces[name] = self._link.space(self._names.of_pool(pool), pieces, pool.pages)
            return self._spaces[name]

    def _of_tensors(self, name: str, nbytes: int, dtype: str) -> Namespace:
        copied = self._copied[name]
        return self._names.of_tensors(name, nbytes, dtype, copied.layout, copied.page_tokens)

    @property
    def _logical(self) -> bool:
        """SGLang's first pool has indices only. Raises where nothing may be stored or found."""
        self._check()
        return self._indices_only

    # -- which pages are there

    @_safe(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        if not keys or self._logical:
            return 0
        return _leading(self._link.exists([(self._space(_KV), [page_hash(k) for k in keys])])[0])

    @_safe(lambda *_: False)
    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    @_safe(lambda *_, **__: upstream.PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        hashes = [page_hash(k) for k in keys]
        transfers = list(pool_transfers or ())
        pools = ([] if self._logical else [_KV]) + [str(t.name) for t in transfers]
        flags = self._link.exists([(self._space(p), hashes) for p in pools])
        found = dict(zip(pools, flags, strict=True))
        kv = _leading(found[_KV]) if _KV in found else len(keys) if found else 0
        hits: dict[Any, int] = {upstream.PoolName.KV: kv} if kv else {}
        usable = set(range(1, kv + 1))  # lengths of prefixes
        for t in transfers:
            lengths = _usable(t, found[str(t.name)][:kv])
            if lengths:
                hits[t.name] = max(lengths)
            usable &= lengths
        result = upstream.PoolTransferResult(max(usable, default=0), hits)
        result.restorable_prefix_pages = sorted(usable)
        return result

    # -- pages by their places in host pools

    @_safe(_none)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._one(keys, host_indices, extra_info, put=False)

    @_safe(_none)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._one(keys, host_indices, extra_info, put=True)

    def _one(self, keys: list[str], indices: Any, extra: Any, *, put: bool) -> list[bool]:
        if self._logical:
            return [True] * len(keys)
        return self._move([(_KV, keys, indices)], extra, put)[0] if keys else []

    @_safe(_none_v2)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._several(transfers, extra_info, put=False)

    @_safe(_none_v2)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._several(transfers, extra_info, put=True)

    def _several(self, transfers: list[Any], extra: Any, *, put: bool) -> dict[str, list[bool]]:
        out = _none_v2(transfers)
        wanted = []
        for t in transfers:
            if str(t.name) == _KV and self._logical:
                out[t.name] = [True] * len(t.keys or [])
            elif t.keys:
                wanted.append((t.name, t.keys, t.host_indices))
        for (name, *_), pages in zip(wanted, self._move(wanted, extra, put), strict=True):
            out[name] = pages
        return out

    def _move(self, wanted: Sequence[Any], extra: Any, put: bool) -> list[list[bool]]:
        """Moves (pool, keys, indices), all that the sidecar reaches at once. Flags for each."""
        out = [[False] * len(keys) for _, keys, _ in wanted]
        before = getattr(extra, "prefix_keys", None)
        parent = page_hash(before[-1]) if before else b""
        direct: list[tuple[int, Wanted]] = []
        began = time.monotonic()
        end = began + CALL_S  # of all pools
        for i, (pool, keys, indices) in enumerate(wanted):
            name, hashes = str(pool), [page_hash(k) for k in keys]
            try:
                if name in self._copied:
                    out[i] = self._copy(self._copied[name], hashes, indices, parent, end, put)
                    continue
                space = self._space(name)
                blocks = self._pools[name][0].blocks(indices, len(keys))
                direct.append((i, Wanted(space, hashes, blocks, parent)))
            except PoolError as err:
                self._complain(str(err))
        asked = [w for _, w in direct]
        ended = self._link.put(asked, end) if put else self._link.get(asked, end)
        for (i, _), e in zip(direct, ended, strict=True):
            out[i] = e.pages
        self._sample(ended, time.monotonic() - began, put)
        return out

    def _sample(self, ended: Sequence[Ended], took: float, put: bool) -> None:
        if ended and self._config.enable_storage_metrics:
            what = "backup" if put else "prefetch"
            self._samples[f"{what}_pgs"].append(sum(sum(e.pages) for e in ended))
            self._samples[f"{what}_bandwidth"].append(
                sum(e.bytes for e in ended) / max(took, 1e-9) / 1e9
            )

    # -- pages that Python copies

    def _copy(
        self, pool: CopiedPool, hashes: list[bytes], indices: Any, parent: bytes, end: float,
        put: bool,
    ) -> list[bool]:  # fmt: skip
        slots = pool.slots(indices, len(hashes))
        self._space(pool.name)
        if put:
            pages = [pool.host.get_data_page(s, flat=True) for s in slots]
            return self._copier().put(pool.name, hashes, pages, end, parent)
        pages = [pool.host.get_dummy_flat_data_page() for _ in slots]
        out = self._copier().get(pool.name, hashes, pages, end)
        for slot, page, ok in zip(slots, pages, out, strict=True):
            if ok:
                pool.host.set_from_flat_data_page(slot, page)
        return out

    # SGLang names places in host pools. These four, for pages as tensors, its base class demands:
    # nothing is found, and nothing is stored.

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        return [None] * len(keys)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return not keys

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return None

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    @property
    def copied_bytes(self) -> int:
        """What Python has copied."""
        return 0 if self._copies is None else self._copies.bytes

    def _copier(self) -> Copies:
        with self._lock:
            if self._copies is None:
                self._copies = Copies(self._link, self._of_tensors)
            return self._copies

    # -- the rest

    @_safe(lambda *_: False)
    def clear(self) -> bool:
        """Forgets all pages of this rank's namespaces."""
        self._check()
        spaces = [self._space(name) for name in (*self._pools, *self._copied)]
        return all([self._link.remove(s) for s in spaces])

    @_safe(lambda *_: None)
    def get_stats(self) -> Any:
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        out = StorageMetrics()
        for name, samples in self._samples.items():
            while samples:
                getattr(out, name).append(samples.popleft())
        return out

    @_safe(lambda *_: None)
    def close(self) -> None:
        if self._loads is not None:
            loads.deactivate(self._loads)
            if not self._loads.close():
                _log.error("kvspray: a load from the host pool has not ended: the session stays")
                return
        if self._link.close():
            if self._copies is not None:
                self._copies.close()
        else:
            _log.error("kvspray: the storage backend is closed while calls run: its session stays")

    def _complain(self, text: str) -> None:
        """Logs each text once; a fault may repeat with each page."""
        if len(self._said) < 256 and text not in self._said:
            self._said.add(text)
            _log.error("kvspray: storage backend: %s", text)


def _leading(flags: Sequence[bool]) -> int:
    return next((i for i, ok in enumerate(flags) if not ok), len(flags))


def _usable(transfer: Any, flags: Sequence[bool]) -> set[int]:
    """The lengths of prefixes that this pool's pages allow."""
    policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
    if policy == "all_pages":
        return set(range(1, _leading(flags) + 1))
    if policy == "trailing_pages":
        n = max(1, len(transfer.keys or ()))
        return {i for i in range(1, len(flags) + 1) if all(flags[max(0, i - n) : i])}
    return set()  # a policy of a later release
