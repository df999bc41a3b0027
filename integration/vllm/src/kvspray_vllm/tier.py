"""``KVSprayTier``: the store of the node's sidecar as a secondary tier of vLLM's offloading.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KVSprayTieringSpec",
      "spec_module_path": "kvspray_vllm.tier", "cpu_bytes_to_use": 68719476736,
      "secondary_tiers": [{"type": "KVSprayTier", "module_path": "kvspray_vllm.tier"}]}}'

vLLM copies between the GPU and its primary tier in host memory, and decides what is kept there. A
chunk of that tier, of all ranks together, is one page of the store. The sidecar reads and writes
chunks in place. It compares a page's checksum before vLLM sees the chunk.

The tier runs in the scheduler's process, on whichever thread holds the manager's lock. It has
no thread of its own, and waits for nothing but in drain_jobs() and shutdown(). Each failure is a
miss. A chunk belongs to the sidecar until its lease has ended, and vLLM gets it back only then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvspray
from kvspray._messages import MAX_KEYS, MAX_PAGE_BYTES, PAGE_EXISTED, PAGE_HIT, PAGE_STORED
from kvspray.store import Exists, Namespace, PageResult, Piece, Space
from kvspray_vllm import layout, pages
from kvspray_vllm.offload import HostCopies
from kvspray_vllm.saving import GET_S, PUT_S
from kvspray_vllm.settings import Settings
from kvspray_vllm.speculation import CACHELESS_DRAFTS
from kvspray_vllm.store import ASK_S
from kvspray_vllm.tier_memory import TierMemory
from kvspray_vllm.weights import Generation, holder, name_of

FORMAT = "1"  # of a page: raise it when other bytes of a chunk have another meaning
MAX_LEASES = 256  # open at a time; a job that would need more is a miss, or is not stored
MAX_QUESTIONS = 64  # open at a time
MAX_VERDICTS = MAX_KEYS  # of one request
WAIT_S = 0.05  # between looks at the session while vLLM waits for the end of all jobs
CLOSE_S = 10.0  # for open leases to end when the engine ends
_KEYS = ("socket", "weights", "secret_file", "secret_env")
_HELD = (PAGE_HIT, PAGE_STORED, PAGE_EXISTED)

_log = logging.getLogger("vllm.kvspray.tier")


def settings_of(tiers: Sequence[Mapping[str, Any]]) -> Settings:
    """Of the tier among ``secondary_tiers``. Settings.parse checks their values."""
    mine = [t for t in tiers if t.get("type") == KVSprayTier.__name__]
    if len(mine) != 1:
        raise ValueError(
            f"kv_connector_extra_config['secondary_tiers'] has {len(mine)} tiers of type "
            "KVSprayTier, and KVSprayTieringSpec serves one"
        )
    own = {k: v for k, v in mine[0].items() if k not in ("type", "module_path", "backpressure")}
    if unknown := sorted(set(own) - set(_KEYS)):
        raise ValueError(
            f"secondary_tiers: KVSprayTier has no key {unknown[0]!r}; known are {', '.join(_KEYS)}"
        )
    return Settings.parse({**own, "store": True})


def check(config: VllmConfig) -> None:
    """Refuses at start the engines whose block hashes do not name all that a block depends on."""
    draft = config.speculative_config
    why = ""
    if config.lora_config is not None:
        why = (
            "enable_lora is set, and the hash of a block does not have the content of an adapter: "
            "start without LoRA"
        )
    elif draft is not None and str(draft.method) not in (*CACHELESS_DRAFTS, "draft_model"):
        why = (
            "the layers that speculate hold more than the hash of a block names: use another "
            "speculative_config.method"
        )
    elif config.model_config.is_encoder_decoder:
        why = "the model is_encoder_decoder; such models are not supported"
    elif config.attention_config.hisparse_config is not None:
        why = (
            "hisparse_config is set, and a cache that lies in two places is not followed: start "
            "without it"
        )
    elif os.environ.get("KVSPRAY_LOAD", "0") not in ("", "0") and holder() is None:
        why = (
            "KVSPRAY_LOAD is set, and the tier in a MultiConnector does not notice what kvspray "
            "load writes: unset it, or use OffloadingConnector alone"
        )
    if why:
        raise layout.Unsupported(f"kvspray: KVSprayTier: {why}")
    layout.check_images(config)


class Rows:
    """A rank's part of vLLM's shared region, as HostCopies takes it: a row for each chunk."""

    def __init__(
        self, region: SharedOffloadRegion, page_bytes: Sequence[int], blocks_per_chunk: int
    ) -> None:
        assert region.rank is not None
        self._region = region
        self.addr = region.base_tensor.data_ptr()
        self.offsets: list[int] = []
        end = region.rank * region.cpu_page_size
        for page in page_bytes:
            self.offsets.append(end)
            end += page * blocks_per_chunk
        self.strides = [region.total_size_bytes // region.num_chunks] * len(self.offsets)

    def cleanup(self) -> None:
        self._region.cleanup()


class KVSprayTieringSpec(TieringOffloadingSpec):
    """vLLM's tiers, with the primary one in memory that a sidecar can map, and with a notice of
    each rank: what its chunks hold, and whether its weights are still those."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = settings_of(self.secondary_tier_configs)
        if self.num_chunks == 0:
            raise ValueError(
                "kv_connector_extra_config['cpu_bytes_to_use'] has no room for one chunk: raise it"
            )
        if self.kv_bytes_per_chunk > MAX_PAGE_BYTES:
            raise ValueError(
                f"kvspray: a chunk of all ranks has {self.kv_bytes_per_chunk} bytes, and a page of "
                f"the store at most {MAX_PAGE_BYTES}: lower blocks_per_chunk (or block_size) in "
                "kv_connector_extra_config"
            )
        self._memory: TierMemory | None = None
        self._generation: Generation | None = None
        self._worker: OffloadingWorker | None = None

    @property
    def memory(self) -> TierMemory:
        if self._memory is None:
            self._memory = TierMemory(
                self.config.engine_id,
                self.num_chunks * self.kv_bytes_per_chunk,
                self.config.parallel.world_size,
            )
        return self._memory

    # -- scheduler

    def get_manager(self) -> OffloadingManager:
        memory = self.memory
        manager = super().get_manager()
        memory.hide()
        return manager

    def namespace(self) -> Namespace:
        """Of the chunks of all ranks."""
        region = self._scheduler_mmap
        self.memory.check(region and region.fd)
        ranks = self.memory.notices()
        for key in ("weights", "dtype", "algorithm"):
            if len({r[key] for r in ranks}) != 1:
                raise ValueError(
                    f"kvspray: ranks have different {key}: {sorted({r[key] for r in ranks})}; set "
                    "weights in secondary_tiers, or give all ranks one model"
                )
        text = json.dumps([FORMAT, [r["cache"] for r in ranks]])
        return Namespace(
            weights=ranks[0]["weights"],
            dtype=ranks[0]["dtype"],
            layout="vllm-tier:" + hashlib.sha256(text.encode()).hexdigest(),
            page_tokens=self.tokens_per_block[0] * self.blocks_per_chunk,
            page_bytes=self.kv_bytes_per_chunk,
            algorithm="vllm-" + ranks[0]["algorithm"],
            seed=pages.hash_seed(ranks[0]["algorithm"]),
            secret=self.settings.secret(),
        )

    # -- worker

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        config = get_current_vllm_config()
        with layout.naming(config):
            check(config)
        memory, rank = self.memory, self.config.parallel.rank
        name = self.settings.weights or name_of(config, _log)
        memory.write(rank, self._notice(config, kv_caches, name))
        self._generation = Generation(name, functools.partial(memory.replace, rank))
        self._generation.watch(get_model_cls(config.model_config))
        worker = self._copies(kv_caches)
        # Neither of them refers to the worker.
        weakref.finalize(worker, _release, self._generation, memory)
        return worker

    def _copies(self, kv_caches: CanonicalKVCaches) -> Any:
        """The worker that copies between the cache and the primary tier."""
        device = current_platform.device_type
        if device == "cuda":
            worker = super().create_worker(kv_caches)
            region = worker._mmap_region
            self.memory.check(region and region.fd)
            return worker
        if device != "cpu":
            raise layout.Unsupported(
                "kvspray: KVSprayTieringSpec serves NVIDIA GPUs and CPUs, and this is "
                f"{current_platform.device_name}: use spec_name TieringOffloadingSpec"
            )
        if self.config.canonical_layout:
            raise ValueError(
                "kv_connector_extra_config['canonical_layout'] is set, which engines on a CPU do "
                "not write: leave it out"
            )
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        self.memory.check(region.fd)
        rows = Rows(region, [t.page_size_bytes for t in kv_caches.tensors], self.blocks_per_chunk)
        return HostCopies(kv_caches, rows, self.blocks_per_chunk)

    def _notice(
        self, config: VllmConfig, kv_caches: CanonicalKVCaches, weights: str
    ) -> dict[str, Any]:
        identity = layout.model_identity(config, "")
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        o = self.config
        cache = [
            identity,
            o.kv_cache_layout,
            [[g.group_id, g.tokens_per_block, g.layer_names] for g in o.groups],
            [_layer(n, layers[n], config) for g in o.groups for n in g.layer_names if n in layers],
            [t.page_size_bytes for t in kv_caches.tensors],
            [[(r.tensor_idx, r.page_size_bytes) for r in g] for g in kv_caches.group_data_refs],
            [o.cache.tokens_per_hash, self.blocks_per_chunk],
            [self.kv_bytes_per_chunk, self.cpu_page_size_per_worker],
            [self.replicated_layout, o.canonical_layout],
            [getattr(o.parallel, f"{k}_size") for k in ("world", "tp", "pp", "pcp", "dcp")],
        ]
        text = json.dumps(cache, sort_keys=True)
        kept = identity["cache_dtype"]
        return {
            "weights": weights,
            "dtype": kept if kept != "auto" else identity["dtype"],
            "algorithm": str(config.cache_config.prefix_caching_hash_algo),
            "cache": hashlib.sha256(text.encode()).hexdigest(),
        }

    # -- weights

    def weights_replaced(self) -> str:
        """Other weights will come in the place of the worker's, which nothing else may have noticed
        yet. Returns the name before."""
        if self._generation is None:
            return ""
        before = str(self._generation)
        self._generation.replaced()
        return before

    def set_weights(self, name: str) -> str:
        """As weights_replaced: vLLM's primary tier has chunks of both, so no name is right for what
        comes from there."""
        return self.weights_replaced()


def _release(generation: Generation, memory: TierMemory) -> None:
    generation.close()
    memory.close()


def _layer(name: str, layer: Any, config: VllmConfig) -> list[Any]:
    """What the order of the bytes in a layer's blocks follows from."""
    kept = getattr(layer, "kv_cache", None)
    tensors = kept if isinstance(kept, (list, tuple)) else [kept]
    return [
        name,
        layer.get_attn_backend().get_name(),
        repr(layer.get_kv_cache_spec(config)),
        [
            [str(t.dtype), list(t.shape[1:]), list(t.stride())]
            for t in tensors
            if isinstance(t, torch.Tensor)
        ],
    ]


# -- the tier


@dataclass
class _Job:
    load: bool
    request: str
    keys: set[OffloadKey]
    began: float
    open: set[int] = field(default_factory=set)  # leases
    good: set[OffloadKey] = field(default_factory=set)  # that have moved
    bytes: int = 0


_Verdicts = dict[OffloadKey, bool | None]  # of a request; None: not yet


@dataclass
class _Question:
    asked: Exists
    pages: list[tuple[OffloadKey, list[_Verdicts]]]  # with the requests that wait
    until: float

    def settle(self, found: Sequence[bool]) -> None:
        for (key, waiting), there in zip(self.pages, found, strict=True):
            for verdicts in waiting:
                verdicts[key] = there


@dataclass
class _Last:
    """Of a request, by group: the last page that the store has or gets."""

    of: dict[int, OffloadKey] = field(default_factory=dict)


class KVSprayTier(SecondaryTierManager):
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        now: Callable[[], float] = time.monotonic,
        **_: Any,  # of KVSprayTieringSpec.settings
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not isinstance(offloading_spec, KVSprayTieringSpec):
            raise ValueError(
                f"kvspray: KVSprayTier with spec_name {type(offloading_spec).__name__}: its memory "
                "cannot be mapped, and it does not notice other weights: set spec_name to "
                "KVSprayTieringSpec and spec_module_path to kvspray_vllm.tier"
            )
        spec = offloading_spec
        namespace = spec.namespace()
        self._now = now
        self._memory = spec.memory
        chunks = np.asarray(primary_kv_view)
        rows, row = chunks.shape
        self._region = kvspray.Region.of_file(self._memory.fd, chunks.ctypes.data, chunks.nbytes)
        self._client = kvspray.WorkerClient(
            spec.settings.socket,
            engine=kvspray.EngineInfo("vllm", vllm.__version__, f"{spec.config.engine_id}-tier"),
            layers=1, deadline_s=PUT_S, log=_log,
        )  # fmt: skip
        self._client.register([self._region])
        self._space = Space(self._client, namespace, [Piece(self._region, 0, row, row)], rows)
        self._jobs: dict[int, _Job] = {}
        self._leases: dict[int, tuple[int, list[OffloadKey]]] = {}  # open: job, its pages
        self._results: list[JobResult] = []
        self._verdicts: dict[str, _Verdicts] = {}  # by request
        self._new: dict[OffloadKey, list[_Verdicts]] = {}  # to be asked
        self._questions: list[_Question] = []
        self._off = ""  # why the store is not used, as last logged
        self._used: bool | None = None  # in this step; None: not looked at yet

    # -- whether the store is used

    def _usable(self) -> bool:
        why = ""
        if self._memory.replaced:
            why = "the weights have changed: restart the engine to use the store again"
        elif not self._client.connected:
            return False  # the client logs it
        elif not self._client.status().killable:
            # vLLM waits without an end for a job, and so would this process for a sidecar that
            # hangs.
            why = "this process may not kill the sidecar: run both as one user in one PID namespace"
        elif not self._space.ready():
            why = self._space.error
            if not why:
                return False
        if why and why != self._off:
            _log.error("kvspray: this engine does not use the store: %s", why)
        self._off = why
        return not why

    # -- lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._used is None:
            self._used = self._usable()
        if not self._used:
            return LookupResult.MISS
        verdicts = self._verdicts.setdefault(req_context.req_id, {})
        if key not in verdicts:
            verdicts[key] = None if len(verdicts) < MAX_VERDICTS else False
            if verdicts[key] is None:
                self._new.setdefault(key, []).append(verdicts)
        there = verdicts[key]
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Asks at once what all requests have looked up in this step."""
        self._used = None
        new, self._new = list(self._new.items()), {}
        usable = bool(new) and self._usable()
        for i in range(0, len(new), MAX_KEYS):
            part = new[i : i + MAX_KEYS]
            asked = Exists(None, len(part))
            if usable and len(self._questions) < MAX_QUESTIONS:
                asked = self._space.exists([key for key, _ in part])
            self._questions.append(_Question(asked, part, self._now() + ASK_S))

    def _take_answers(self) -> None:
        open_ = []
        for q in self._questions:
            found = q.asked.result()
            if found is not None:
                q.settle([found[i] for i in range(len(q.pages))])
            elif self._now() < q.until:
                open_.append(q)
            else:
                q.asked.forget()
                q.settle([False] * len(q.pages))
        self._questions = open_

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._verdicts.pop(req_context.req_id, None)

    # -- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, job: TransferJob, *, load: bool) -> None:
        mine = _Job(load, job.req_context.req_id, set(job.keys), self._now())
        self._jobs[job.job_id] = mine
        if self._usable():
            for keys, chunks, parent in _parts(job):
                lease = self._lease(mine, keys, chunks, parent)
                if lease:
                    mine.open.add(lease)
                    self._leases[lease] = job.job_id, keys
        if not mine.open:
            self._end(job.job_id)

    def _lease(self, job: _Job, keys: list[OffloadKey], chunks: list[int], parent: bytes) -> int:
        """0: the sidecar takes no more now, and these pages are misses."""
        if len(self._leases) >= MAX_LEASES:
            return 0
        try:
            if job.load:
                return self._space.get(keys, chunks, req=job.request, deadline_s=GET_S)
            return self._space.put(keys, chunks, parent=parent, req=job.request, deadline_s=PUT_S)
        except ValueError as err:  # keys that the store does not take
            _log.warning("kvspray: request %s: %s", job.request, err)
            return 0

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._take_answers()
        self._take()
        done, self._results = self._results, []
        return done

    def _take(self) -> None:
        """Takes the ends of leases."""
        for c in self._client.poll():
            if c.lease not in self._leases:
                continue
            job_id, keys = self._leases.pop(c.lease)
            job = self._jobs[job_id]
            job.open.discard(c.lease)
            job.bytes += c.bytes
            stale = job.load and self._memory.replaced
            if c.ok and len(c.pages) == len(keys) and not stale:
                job.good |= {
                    key
                    for key, byte in zip(keys, c.pages, strict=True)
                    if PageResult.of(byte).outcome in _HELD
                }
            if not job.open:
                self._end(job_id)

    def _end(self, job_id: int) -> None:
        """No lease of the job is open: the sidecar accesses none of its chunks any more."""
        job = self._jobs.pop(job_id)
        lacks = job.keys - job.good
        if job.load:
            # They are computed: vLLM would look them up, and try to load them, again and again.
            verdicts = self._verdicts.get(job.request, {})
            verdicts |= {key: False for key in lacks if key in verdicts}
        self._results.append(
            JobResult(
                job_id,
                not lacks,
                successful_keys=tuple(job.good) if job.load and lacks else None,
                transfer_time=self._now() - job.began,
                transfer_bytes=job.bytes,
            )
        )

    # -- the end

    def drain_jobs(self) -> None:
        while self._jobs:
            self._client.wait(WAIT_S)
            self._take()

    def shutdown(self) -> None:
        """Leases that are open end before that, or after CLOSE_S with the session: the sidecar has
        its own mapping of the memory, so a late write meets no other memory."""
        for lease in self._leases:
            self._client.cancel(lease, "the engine ends")
        end = time.monotonic() + CLOSE_S
        while self._leases and time.monotonic() < end:
            self._client.wait(WAIT_S)
            self._take()
        self._client.close()
        self._memory.close()


def _parts(job: TransferJob) -> Iterator[tuple[list[OffloadKey], list[int], bytes]]:
    """Keys of one group in the order of the prompt, their chunks, and the page before them."""
    context = job.req_context
    last = context.get_state(_Last)
    if last is None:
        last = _Last()
        context.set_state(last)
    groups: dict[int, list[tuple[int, OffloadKey, int]]] = {}
    for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
        at = context.get_offload_key_position(key) or 0
        groups.setdefault(get_offload_group_idx(key), []).append((at, key, chunk))
    for group, entries in groups.items():
        entries.sort(key=lambda e: e[0])
        for i in range(0, len(entries), MAX_KEYS):
            part = entries[i : i + MAX_KEYS]
            keys = [key for _, key, _ in part]
            yield keys, [chunk for *_, chunk in part], last.of.get(group, b"")
            last.of[group] = keys[-1]
