"""KVSprayConnector: vLLM's KV connector interface on top of kvspray's shim. Only glue: the logic is
in scheduler.py and worker.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvspray_vllm import caches, events, layout, pages, shim, states, versions
from kvspray_vllm.adapters import LoadWatch
from kvspray_vllm.meta import Landed, StepMeta
from kvspray_vllm.saving import Saving
from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.signals import GpuSignals, in_captures
from kvspray_vllm.speculation import kv_heads_of
from kvspray_vllm.stats import KVSprayPromMetrics, KVSprayStats
from kvspray_vllm.weights import Generation, name_of
from kvspray_vllm.worker import LOAD_WAIT_S, WorkerSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvspray")

ASLEEP = "the engine sleeps"
RETURN_S = 10.0  # for the sidecar to unmap a cache that is about to be freed
LEND_S = 2.0  # for the sidecar to map it after a wake-up; after that the engine does not wait


class _SharedZeros(TorchFunctionMode):
    """Replaces the torch.zeros call that allocates vLLM's KV cache by memory that the sidecar can
    map."""

    def __init__(self, owner: KVSprayConnector, nbytes: int) -> None:
        super().__init__()
        self._owner = owner
        self._nbytes = nbytes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and self._owner.region is None
            and args == (self._nbytes,)
            and kwargs.get("dtype") is torch.int8
            and str(kwargs.get("device", "cpu")).startswith("cpu")
        ):
            shared = self._owner.alloc_shared(self._nbytes)
            if shared is not None:
                return shared
        return func(*args, **kwargs)


class KVSprayConnector(KVConnectorBase_V1, SupportsHMA):
    # Of a worker whose engine uses the store, once its memory is registered.
    _saving: Saving | None = None
    _regions: Sequence[shim.Memory] = ()  # what is registered
    _pieces: Sequence[tuple[int, int, int, int]] = ()
    _storages: Sequence[caches.Storage] = ()  # what the regions are made of
    _asleep = False  # vLLM has freed, or is about to free, the memory of the cache
    _attached = False  # a sidecar had the memory before the sleep

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        with layout.naming(vllm_config):
            layout.check_config(vllm_config)
            layout.check_clearing(vllm_config, kv_cache_config)
            states.check_states(vllm_config, kv_cache_config)
            if self._settings.store:
                pages.check_store(vllm_config, kv_cache_config)
        self._gpu = vllm_config.device_config.device_type != "cpu"
        if self._gpu and self._settings.memory != "auto":
            raise layout.Unsupported(
                f"kvspray: memory is {self._settings.memory!r}, and the KV cache is on a GPU, "
                "where the sidecar imports it: set memory to auto"
            )
        self._engine_id = str(self._kv_transfer_config.engine_id)
        self.region: shim.Memory | None = None
        self._bad_blocks: set[int] = set()  # reported once
        self._scheduler: SchedulerSide | None = None
        self._events: events.StoreEvents | None = None
        self._worker: WorkerSide | None = None
        self._worker_client: shim.Worker | None = None
        self._generation: Generation | None = None  # a worker's, once its memory is registered
        self._adapters: LoadWatch | None = None
        self._layout: dict[str, Any] = {}
        self._clears_blocks = kv_cache_config.needs_kv_cache_zeroing
        windows = layout.windows_of(kv_cache_config)
        # Where an engine may go on behind the last block of a load that came; elsewhere what came
        # is of no use without the rest.
        state_groups = layout.state_groups_of(kv_cache_config)
        resumes = len(kv_cache_config.kv_cache_groups) == 1 and not (state_groups or any(windows))
        secret = self._settings.secret()
        if role == KVConnectorRole.SCHEDULER:
            if newer := versions.newer_than_known():
                logger.warning("%s", newer)
            if (
                self._kv_transfer_config.kv_load_failure_policy == "fail"
                and self._kv_transfer_config.is_kv_consumer
            ):
                logger.warning(
                    "kvspray: kv_load_failure_policy is 'fail': a request whose transfer fails is "
                    "answered with an error. With 'recompute' it is prefilled here instead."
                )
            graphs = vllm_config.compilation_config.cudagraph_mode
            if self._gpu and getattr(graphs, "name", "") == "FULL":
                logger.warning(
                    "kvspray: cudagraph_mode is FULL: vLLM 0.33 with FlashAttention 3 gave wrong "
                    "answers in tests with several requests at a time, in engines without kvspray, "
                    "too; use FULL_AND_PIECEWISE, the default"
                )
            parallel = vllm_config.parallel_config
            if self._settings.store and events.wanted(vllm_config):
                self._events = events.StoreEvents()
            self._scheduler = SchedulerSide(
                self._settings,
                shim.Scheduler(
                    self._settings.socket,
                    self._engine_id,
                    logger,
                    parallel.tensor_parallel_size,
                    parallel.pipeline_parallel_size,
                    secret,
                    (parallel.data_parallel_rank, parallel.data_parallel_size),
                ),
                [g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups],
                self._engine_id,
                shim.prefix_hash,
                logger,
                parallel.tensor_parallel_size,
                windows,
                state_groups,
                role=str(self._kv_transfer_config.kv_role),
                store_lag=vllm_config.max_concurrent_batches if self._settings.store else 0,
                events=self._events,
                fails=self._kv_transfer_config.kv_load_failure_policy == "fail",
            )
        else:
            self._flag_of = layout.flag_indices(kv_cache_config)
            self._ranks = layout.ranks_of(vllm_config)
            self._worker_client = shim.Worker(
                self._settings.socket,
                self._engine_id,
                len(self._flag_of),
                logger,
                shim.ranks(self._ranks, vllm_config.parallel_config),
                secret,
                self._settings.api or os.environ.get("KVSPRAY_API", ""),
                str(self._kv_transfer_config.kv_role),
                events.endpoints(vllm_config),
            )
            alone = vllm_config.parallel_config.data_parallel_size == 1
            block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size if resumes else 0
            # vLLM's second model runner keeps on the device how far a request is computed, and does
            # not take that back.
            rewinds = not vllm_config.use_v2_model_runner
            self._worker = WorkerSide(
                self._worker_client, logger, LOAD_WAIT_S if alone else 0, block, rewinds,
                self._ranks.pp * self._ranks.tp_size + self._ranks.tp,
            )  # fmt: skip
            if self._settings.store:
                self._saving = Saving(self._ranks.tp, self._pages_of, logger)
                self._worker.set_saving(self._saving)

    # ---- worker: memory

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        if (
            self._gpu
            or self._settings.memory == "process"
            or not self._kv_cache_config.kv_cache_tensors
        ):
            return None
        return _SharedZeros(self, self._kv_cache_config.kv_cache_tensors[0].size)

    def alloc_shared(self, nbytes: int) -> torch.Tensor | None:
        assert self._worker_client is not None
        try:
            self.region = self._worker_client.alloc(nbytes)
        except shim.ShimError as err:
            if self._settings.memory == "memfd":
                raise
            logger.warning(
                "kvspray: the KV cache is not in shared memory, transfers will be slower: %s", err
            )
            return None
        return torch.frombuffer(self.region.buffer, dtype=torch.int8)[:nbytes]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None and self._worker_client is not None
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader.utils import get_model_cls

        kv = self._kv_cache_config
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)
        backends = {
            name: layers[name].get_attn_backend().get_name()
            for name in self._flag_of
            if name in layers
        }
        model = self._vllm_config.model_config
        config = self._vllm_config
        self._generation = Generation(
            self._settings.weights or name_of(config, logger),
            self._weights_changed,
            lambda path: name_of(config, logger, path),
        )
        self._generation.watch(get_model_cls(config.model_config))
        self._adapters = LoadWatch(self._worker.adapter_loaded)
        self._adapters.watch()
        identity = layout.identity_of(self._vllm_config, kv, str(self._generation))
        with layout.naming(config):
            described = caches.describe(
                kv,
                kv_caches,
                backends,
                kv_heads=kv_heads_of(self._vllm_config),
                ranks=self._ranks,
                packing=identity["packing"],
                flags=self._flag_of,
                state_groups=states.groups_of(config) if identity.get("states") else 0,
            )
        groups = described.placed([caches.Site(i) for i in range(len(described.storages))])
        dtype = identity["dtype"]
        if self._settings.identity:
            identity = layout.portable_identity(config, kv, str(self._generation))
            groups = layout.portable_layers(groups)
        self._layout = {
            "model": str(model.served_model_name or model.model)[:256],
            "dtype": dtype,
            "groups": groups,
            "identity": identity,
        }
        regions: list[shim.Memory] = []
        try:
            regions = self._memory_of(described.storages)
            on_gpu = any(storage.device.type != "cpu" for storage in described.storages)
            signals = GpuSignals(self._worker_client.gpu_flags(logger)) if on_gpu else None
        except shim.ShimError as err:
            for region in regions:  # exported memory of a GPU would stay in use when vLLM frees it
                region.close()
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                raise
            logger.error("kvspray: this engine prefills locally, without transfers: %s", err)
            self._worker.stop_transfers(str(err))
            if self._saving is not None:
                self._saving.set(None, str(err))
            return
        self._worker.set_flags(self._flag_of, signals)
        if on_gpu:
            in_captures(get_kv_transfer_group(), self)
        self._regions, self._storages = regions, described.storages
        if self._saving is not None:
            self._pieces = pages.pieces_of(groups)
        self._worker_client.register(regions, self._layout)
        self._open_store()
        logger.info(
            "kvspray: %d layers in %d group(s) and %d region(s), %s, %s", len(self._flag_of),
            len(groups), len(regions), ", ".join(sorted({g["strategy"] for g in groups})),
            [r.kind for r in regions],
        )  # fmt: skip

    def _open_store(self) -> None:
        """The store's pages are of the present weights from now on."""
        if self._saving is None or not self._regions:
            return
        try:
            namespace = pages.namespace_of(
                self._vllm_config, self._layout["identity"], self._layout["groups"], self._ranks
            )
        except layout.Unsupported as err:  # weights that set_weights gave no name
            logger.error("%s", err)
            self._saving.set(None, str(err))
        else:
            self._saving.set(namespace)

    def _pages_of(self, namespace: shim.Namespace) -> shim.WorkerPages:
        assert self._worker_client is not None
        pieces = [
            (self._regions[region], base, stride, length)
            for region, base, stride, length in self._pieces
        ]
        return self._worker_client.pages(namespace, pieces, self._kv_cache_config.num_blocks)

    def set_weights(self, name: str) -> str:
        """Names the weights that have replaced the worker's; see kvspray_vllm.set_weights."""
        if self._generation is None:
            raise ValueError("kvspray: set_weights is for workers whose KV cache is registered")
        before = str(self._generation)
        self._generation.rename(name)
        return before

    def weights_replaced(self) -> str:
        """Other weights will come in the place of the worker's, which nothing else may have noticed
        yet. Returns the name before."""
        if self._generation is None:
            return ""
        before = str(self._generation)
        self._generation.replaced()
        return before

    def _weights_changed(self) -> None:
        """The cache is of other weights now. Leases of the previous ones end, and peers get the new
        fingerprint. Called while vLLM loads: it must not raise."""
        assert self._worker is not None and self._worker_client is not None
        self._worker.outdate()
        self._layout["identity"] = {**self._layout["identity"], "weights": str(self._generation)}
        if self._asleep:
            return  # the wake-up presents this layout
        self._open_store()
        try:
            self._worker_client.describe(self._layout)
        except Exception:
            # The session still stands for the weights before, so nothing may be given or taken in
            # it. It is not closed: open leases end only through it.
            logger.exception(
                "kvspray: the sidecar cannot be informed of other weights; this engine prefills "
                "locally from now on"
            )
            self._worker.leave("the weights have changed, and the sidecar cannot be informed")
            return
        self._worker.rejoin()
        logger.info(
            "kvspray: the weights are now %r; KV is exchanged with engines that have the same name "
            "for theirs",
            str(self._generation),
        )

    def _memory_of(self, storages: Sequence[caches.Storage]) -> list[shim.Memory]:
        out: list[shim.Memory] = []
        try:
            for storage in storages:
                out.append(self._region_of(storage))
        except BaseException:
            for region in out:
                if region is not self.region:  # it contains vLLM's tensors
                    region.close()
            raise
        return out

    def _region_of(self, storage: caches.Storage) -> shim.Memory:
        assert self._worker_client is not None
        if storage.device.type != "cpu":
            return self._gpu_memory(storage)
        if self.region is not None and self.region.addr == storage.address:
            return self.region
        if self._settings.memory == "memfd":
            raise layout.Unsupported(
                "kvspray: vLLM allocated a KV cache outside the shared memory that it was offered; "
                "set memory to auto or process"
            )
        return self._worker_client.process_memory(storage.address, storage.nbytes)

    def _gpu_memory(self, storage: caches.Storage) -> shim.Memory:
        assert self._worker_client is not None
        try:
            return self._worker_client.gpu_memory(storage.address, storage.nbytes)
        except shim.ShimError:
            # On some GPUs vLLM's sleep mode allocates memory that no other process can map. It is
            # replaced, unless another connector of a MultiConnector may have registered it.
            if (
                not self._vllm_config.model_config.enable_sleep_mode
                or get_kv_transfer_group() is not self
            ):
                raise
            from kvspray_vllm import sleep

            if not sleep.share(storage.address, storage.nbytes):
                raise
            return self._worker_client.gpu_memory(storage.address, storage.nbytes)

    # ---- worker: sleep

    def unregister_kv_caches(self) -> None:
        """Memory that a sidecar maps stays in use, so it is taken back before vLLM frees it. A late
        write reaches no other data, because a wake-up maps other memory at these addresses."""
        assert self._worker is not None and self._worker_client is not None
        if self._asleep or not self._regions or not self._gpu:
            return
        self._asleep = True
        self._worker.outdate(ASLEEP)
        self._worker.leave(ASLEEP)
        if self._saving is not None:
            self._saving.set(None, ASLEEP)
        self._attached = self._worker_client.connected or self._worker_client.holds()
        try:
            self._worker_client.replace([])
        except shim.ShimError as err:  # if one rank raised it, the others would stay asleep
            logger.error("kvspray: the KV cache cannot be taken back: %s", err)
        for region in self._regions:
            region.close()
        self._regions = ()
        if self._attached and not self._worker_client.wait_replaced(RETURN_S):
            logger.warning(
                "kvspray: the sidecar has not answered for %d s, and may still map the KV cache; "
                "the memory is free when the sidecar has unmapped it",
                RETURN_S,
            )

    def restore_kv_caches(self) -> None:
        """After a wake-up: other memory, at the same addresses."""
        assert self._worker is not None and self._worker_client is not None
        if not self._asleep or not self._storages:
            return
        regions: list[shim.Memory] = []
        try:
            regions = self._memory_of(self._storages)
            self._worker_client.replace(regions, self._layout)
        except (shim.ShimError, layout.Unsupported) as err:
            for region in regions:
                region.close()
            logger.error(
                "kvspray: this engine prefills locally from now on, because its KV cache cannot be "
                "shared after a wake-up: %s",
                err,
            )
            self._storages = ()
            self._worker.leave(str(err))
            self._worker.stop_transfers(str(err))
            return
        self._asleep, self._regions = False, regions
        self._open_store()
        self._worker.rejoin()
        if self._attached:
            self._worker_client.wait_connected(LEND_S)
        logger.info("kvspray: awake: %d region(s) are registered again", len(regions))

    # ---- worker: each step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None and isinstance(kv_connector_metadata, StepMeta)
        # vLLM's first call in a step. It prepares the input before it binds the metadata, which for
        # a load is time that passes; but where it clears new blocks, it does so then.
        if self._clears_blocks:
            self._worker.preempts(kv_connector_metadata)
        else:
            self._worker.begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None and isinstance(connector_metadata, StepMeta)
        super().bind_connector_metadata(connector_metadata)
        if self._generation is not None:
            self._generation.computes()
        self._worker.begin(connector_metadata)

    def has_connector_metadata(self) -> bool:
        # vLLM asks before it calls the two layer hooks; most steps of a decode engine signal
        # nothing. While it captures a graph no metadata is bound, and with True here the hooks are
        # called inside the capture.
        if self._worker is None:
            return False
        return (
            self._worker.signals if super().has_connector_metadata() else self._worker.capturing()
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads began with the step, and no step computes on one that has not ended."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """As start_load_kv."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        assert self._worker is not None
        # In this order: a step is announced or a graph is captured, and to ask the driver takes
        # long.
        if self._worker.signals:
            self._worker.layer_done(layer_name)
        elif self._worker.capturing():
            self._worker.layer_captured(layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        if sys.exc_info()[0] is not None:
            # vLLM calls this while a failed forward pass unwinds, too.
            self._worker.step_failed()
            return
        self._worker.step_done()

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Never of an engine with several cache groups, which it would end.
        out, self._bad_blocks = self._bad_blocks, set()
        return out

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        done = self._worker.collect()
        self._bad_blocks |= done.bad_blocks
        return KVConnectorTransferResults(
            finished_sending=done.sent, finished_recving=done.received, failed_recving=done.failed
        )

    def build_connector_worker_meta(self) -> Landed | None:
        assert self._worker is not None
        return self._worker.take_landed()

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._scheduler is not None:
            self._scheduler.set_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        # A load leaves what lies behind the last token in its block. Where vLLM clears new blocks,
        # because numbers of another type there would be read as NaN, it does so before a load
        # begins.
        return ()

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        assert self._scheduler is not None
        if self._scheduler.from_store(request.request_id):
            # The tier is known once it is loaded.
            return {versions.CAPABILITIES.store_source: num_external_tokens}
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        assert self._kv_cache_manager is not None
        return self._scheduler.build(scheduler_output, self._kv_cache_manager.get_block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        landed = connector_output.kv_connector_worker_meta
        self._scheduler.worker_reported(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            landed if isinstance(landed, Landed) else None,
        )

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.take() if self._events is not None else ()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        if self._scheduler.reset():
            return True
        logger.warning(
            "kvspray: vLLM resets its caches; the store keeps its pages, which all engines with "
            "these weights share; give other weights another name (kvspray_vllm.set_weights)"
        )
        return None  # with False, vLLM would fail each pause and sleep

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.pending_push_work()

    # ---- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._scheduler or self._worker
        return side.take_stats() if side is not None else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KVSprayStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVSprayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A full graph's replay calls no hook; its layers are signalled by nodes of the graph.
        return False

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        if self._generation is not None:
            self._generation.close()
        if self._adapters is not None:
            self._adapters.close()


def register(name: str, module: str) -> None:
    """Makes a class known by its name, too. vLLM's MultiConnector rebuilds the statistics of each
    connector by the name of its class alone, and ends the server where no class has that name."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


register("KVSprayConnector", "kvspray_vllm")
if versions.CAPABILITIES.peer_source is not None:
    KVSprayConnector._cache_hit_source = versions.CAPABILITIES.peer_source
