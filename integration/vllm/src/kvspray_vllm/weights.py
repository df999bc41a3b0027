"""Which weights a KV cache was computed with. Two engines exchange KV only if they have the same
name for them.

The name is the setting `weights`, or else a digest of the checkpoint that was loaded
(kvspray.weights). Weights that replace others have a name that no other engine has, until
set_weights gives them one, or vLLM has read them from files: then it is their digest.
"""

from __future__ import annotations

import functools
import inspect
import logging
import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvspray.weights import MAX_NAME_BYTES
from kvspray.weights import name_of as checkpoint_name

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

# The methods of vLLM's workers that write parameters while the engine lives. test_writers.py fails
# on others in vLLM's sources.
WORKER_WRITERS = (
    "load_model", "reload_weights", "start_weight_update", "start_draft_weight_update",
    "update_weights", "finish_weight_update", "reset_weights", "elastic_ep_execute",
)  # fmt: skip
# Those of both model runners.
RUNNER_WRITERS = ("load_model", "reload_weights")
RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)


def check_name(name: object) -> str:
    if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"kvspray: the name of a generation of weights is {name!r}, want a string of at most "
            f"{MAX_NAME_BYTES} bytes"
        )
    return name


def name_of(config: VllmConfig, log: logging.Logger, path: str | None = None) -> str:
    """The name of the weights that an engine has loaded: a digest of its checkpoint's files. path:
    loaded afterwards, from elsewhere."""
    load = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    if load == "dummy":
        # Random numbers with a fixed seed, by the shapes of this rank's parameters.
        p = config.parallel_config
        device = config.device_config.device_type
        return f"dummy:tp{p.tensor_parallel_size}:pp{p.pipeline_parallel_size}:{device}"
    m = config.model_config
    return with_draft(
        config,
        _digest(
            path or str(m.model_weights or m.model), None if path else m.revision, config, load, log
        ),
        log,
    )


def with_draft(config: VllmConfig, name: str, log: logging.Logger) -> str:
    """The name of a model's weights and of those of the model that drafts for it."""
    m = config.model_config
    load = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None and draft.model != m.model:  # its layers have a cache, too
        return f"{name}+{_digest(str(draft.model), draft.revision, config, load, log)}"
    return name


def _digest(
    model: str, revision: str | None, config: VllmConfig, load_format: str, log: logging.Logger
) -> str:
    remedy = "set weights in kv_connector_extra_config, on prefill and decode engines alike"
    return checkpoint_name(
        model, revision, config.load_config.download_dir, load_format, log, remedy
    )


class Generation:
    """Watches for weights that are replaced while the engine lives, and calls `changed` when that
    begins.

    vLLM does not report it to a connector. Its loaders register each parameter again, without
    memory at first ("meta"), for which PyTorch has a hook; or they call one of the methods in
    `watch`. Code that writes parameters in place must call set_weights.

    No other engine has the name of weights that were replaced, until set_weights gives them one or
    they were read from files that have one.
    """

    def __init__(
        self,
        name: str,
        changed: Callable[[], None],
        of_files: Callable[[str | None], str] | None = None,
    ) -> None:
        from torch.nn.modules.module import register_module_parameter_registration_hook

        self._name = check_name(name)
        self._changed = changed
        self._of_files = of_files
        self._unused = False  # nothing was computed since the name was made up
        self._hook = register_module_parameter_registration_hook(self._registered)
        self._wrapped: list[tuple[type, str, Any]] = []  # class, name, what it had itself

    def __str__(self) -> str:
        return self._name

    def _registered(
        self, module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        if param is not None and param.is_meta:
            self.replaced()

    def replaced(self) -> None:
        """Other weights come in the place of these."""
        if not self._unused:
            self._unused = True
            self._name = f"replaced:{secrets.token_hex(16)}"
            self._changed()

    def computes(self) -> None:
        """The engine computes with the weights: what is replaced from now on is another change."""
        self._unused = False

    def rename(self, name: str) -> None:
        """Other weights are there, and are called that."""
        before, self._name = self._name, check_name(name)
        self._unused = False
        if self._name != before:
            self._changed()

    def watch(self, model: type) -> None:
        """Notices calls of the methods that replace weights: of the model's class, and of vLLM's
        runners and workers."""
        self._wrap(model, "load_weights", self._before)
        for module, name in RUNNERS:
            cls = getattr(sys.modules.get(module), name, None)
            if cls is not None:
                self._wrap(cls, "reload_weights", self._reload)
                self._wrap(cls, "load_model", self._before)
        for cls in _workers():
            for method in WORKER_WRITERS:
                if method in cls.__dict__:
                    self._wrap(cls, method, self._before)
            if "sleep" in cls.__dict__:
                self._wrap(cls, "sleep", self._sleep)

    def _wrap(self, cls: type, name: str, how: Callable[..., Any]) -> None:
        inner = getattr(cls, name, None)
        if inner is None:
            return

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return how(inner, *args, **kwargs)

        self._wrapped.append((cls, name, cls.__dict__.get(name)))
        setattr(cls, name, wrapper)

    def _before(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.replaced()
        return inner(*args, **kwargs)

    def _sleep(self, inner: Callable[..., Any], worker: Any, level: int = 1) -> None:
        """Levels other than 1 discard the weights: from the wake-up until weights are loaded, the
        memory holds no weights of this name."""
        try:
            inner(worker, level)
        finally:
            if level != 1 and worker.device.type != "cpu":
                self.replaced()

    def _reload(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        self.replaced()
        out = inner(*args, **kwargs)
        if self._of_files is not None and given.get("weights_iterator") is None:
            self.rename(self._of_files(given.get("weights_path")))
        return out

    def close(self) -> None:
        self._hook.remove()
        for cls, name, own in reversed(self._wrapped):
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)
        self._wrapped = []


def _workers() -> list[type]:
    """vLLM's class of workers, and all that are derived from it."""
    from vllm.v1.worker.worker_base import WorkerBase

    out = [WorkerBase]
    for cls in out:
        out += [c for c in cls.__subclasses__() if c not in out]
    return out


def set_weights(worker: Any, name: str) -> str:
    """Names the weights that the engine has from now on:
    ``llm.collective_rpc(kvspray_vllm.set_weights, args=("step-1200",))``, on prefill and decode
    engines alike, after they were replaced. The engine no longer offers KV that it computed before.
    Where it has no kvspray connector, nothing happens. Returns the generation before.
    """
    before = [str(h.set_weights(name)) for c in _connectors() if (h := _holder(c)) is not None]
    return before[0] if before else ""


def holder() -> Any:
    """What has the name of this worker's weights: KVSprayConnector, or the specification of vLLM's
    offloading with KVSprayTier. None: there is neither outside of a MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return _holder(get_kv_transfer_group()) if has_kv_transfer_group() else None


def _connectors() -> list[Any]:
    """This worker's connectors, also those of a MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", [group]))


def _holder(connector: Any) -> Any:
    spec = getattr(getattr(connector, "connector_worker", None), "spec", None)
    return next((x for x in (connector, spec) if hasattr(x, "weights_replaced")), None)


class WorkerExtension:
    """For ``--worker-extension-cls kvspray_vllm.weights.WorkerExtension``: set_weights by name,
    where engines take no functions (``/collective_rpc`` of a server, or
    ``llm.collective_rpc("kvspray_set_weights", args=("step-1200",))``)."""

    def kvspray_set_weights(self, name: str) -> str:
        return set_weights(self, name)
