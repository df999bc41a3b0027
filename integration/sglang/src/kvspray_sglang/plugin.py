"""The entry point ``sglang.srt.plugins``, which SGLang calls in each of its processes.

For HiCache it wraps the function with which host pools choose their allocator, because a backend
sees a pool only when its memory is allocated and pinned. It also wraps the function that loads
pages to the GPU. For prefill and decode it adds kvspray to SGLang's transfer backends. Nothing
changes unless kvspray is the backend.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from kvspray_sglang import check_release, memory

TRANSFER_BACKEND = "kvspray"
# They import the function by its name.
_CHOOSE_CLASSES = (
    "sglang.srt.disaggregation.utils.get_kv_class",
    "sglang.srt.disaggregation.prefill.get_kv_class",
    "sglang.srt.disaggregation.decode.get_kv_class",
    "sglang.srt.managers.disagg_service.get_kv_class",
)
_HOLDS = "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__"
_RECEIVES = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
_SENDS = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_ADDS = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add"

_log = logging.getLogger(__name__)
_CHOOSES = "sglang.srt.mem_cache.pool_host.common.get_allocator_from_storage"
_LOADS = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_host_to_device"
installed = False


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global installed
    HookRegistry.register(_CHOOSES, _choose, HookType.AROUND)
    HookRegistry.register(_LOADS, _load, HookType.AROUND)
    try:
        _add_transfer_backend()
    except (ImportError, AttributeError) as err:
        _log.warning("kvspray: this SGLang takes no transfer backend from a plug-in: %s", err)
    else:
        for path in _CHOOSE_CLASSES:
            HookRegistry.register(path, _class_of, HookType.AROUND)
        HookRegistry.register(_HOLDS, _hold, HookType.AROUND)
        HookRegistry.register(_RECEIVES, _received, HookType.AROUND)
        HookRegistry.register(_SENDS, _sent, HookType.AROUND)
        HookRegistry.register(_ADDS, _added, HookType.AROUND)
    installed = True


def _load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from kvspray_sglang.loads import submit

    return submit(original, *args, **kwargs)


def _add_transfer_backend() -> None:
    """SGLang names its backends in an enumeration, which Python does not extend by itself."""
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.server_args import add_disagg_transfer_backend_choices

    if TRANSFER_BACKEND in TransferBackend._value2member_map_:
        return
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = TRANSFER_BACKEND.upper(), TRANSFER_BACKEND
    member.__objclass__ = TransferBackend
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._member_names_.append(member._name_)
    TransferBackend._value2member_map_[member._value_] = member
    add_disagg_transfer_backend_choices([TRANSFER_BACKEND])


def _hold(original: Callable[..., None], queue: Any, *args: Any, **kwargs: Any) -> None:
    """Pages of a request that fails at decode stay its own until the sidecar's fence, however long
    that takes: SGLang may be set to release them at once, and does so after 30 s otherwise."""
    original(queue, *args, **kwargs)
    if not _is_transfer_backend():
        return
    for name in ("enable_deferred_kv_release", "deferred_kv_release_timeout"):
        if not hasattr(queue, name):
            raise RuntimeError(
                "kvspray: this SGLang gives pages of a failed request back while they may still be "
                f"written to (its DecodeTransferQueue has no {name}); use SGLang 0.5.22 or "
                "0.5.23, or another --disaggregation-transfer-backend"
            )
    queue.enable_deferred_kv_release = True
    queue.deferred_kv_release_timeout = math.inf
    type(queue).kvspray_holds = True  # SGLang goes on without a hook that it could not apply


def _received(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A transfer from another kind of engine is named by its prompt, which SGLang's receivers and
    senders do not have."""
    out = original(queue, req, *args, **kwargs)
    if _is_transfer_backend():
        out.kv_receiver.request = req
        out.kv_receiver.buffers = queue.metadata_buffers
    return out


def _sent(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(queue, req, *args, **kwargs)
    if out and _is_transfer_backend():
        req.disagg_kv_sender.request = req
    return out


def _added(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Fails the request at decode, too, if SGLang refuses it here: its prompt is too long."""
    out = original(queue, req, *args, **kwargs)
    if getattr(req, "disagg_kv_sender", None) is None and _is_transfer_backend():
        queue.kv_manager.refuse(req.bootstrap_room)
    return out


def _is_transfer_backend() -> bool:
    try:
        from sglang.srt.runtime_context import get_disagg

        return bool(get_disagg().disaggregation_transfer_backend == TRANSFER_BACKEND)
    except (ImportError, AttributeError):  # another release: it cannot have chosen this backend
        return False


def _class_of(original: Callable[..., Any], backend: Any, kind: Any) -> Any:
    if getattr(backend, "value", None) != TRANSFER_BACKEND:
        return original(backend, kind)
    check_release()
    try:
        from kvspray_sglang import pd
    except ImportError as err:
        raise RuntimeError(
            f"kvspray: this SGLang lacks what a transfer backend needs ({err}); use SGLang 0.5.22 "
            "or 0.5.23, or another --disaggregation-transfer-backend"
        ) from err

    classes = {
        "manager": pd.KVSprayManager, "sender": pd.KVSpraySender, "receiver": pd.KVSprayReceiver,
        "bootstrap_server": pd.KVSprayBootstrapServer,
    }  # fmt: skip
    return classes.get(kind.value) or original(backend, kind)


def _choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _allocator()() if is_backend() else original(*args, **kwargs)


@functools.cache
def _allocator() -> type:
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

    return memory.allocator_class(HostTensorAllocator)


def is_backend() -> bool:
    """Whether this process's configuration names kvspray as the storage backend."""
    try:
        from sglang.srt.runtime_context import get_memory

        config = get_memory()
        kind = config.hicache_storage_backend
        extra = config.hicache_storage_backend_extra_config
        if kind != "dynamic" or not extra:
            return False
        if extra.startswith("@"):
            with open(extra[1:], encoding="utf-8") as f:
                extra = f.read(1 << 20)
    except (ImportError, AttributeError, OSError, ValueError):  # nothing is configured here
        return False
    return "kvspray_sglang" in extra
