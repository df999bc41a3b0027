# SPDX-License-Identifier: Apache-2.0
"""Which weights a KV cache was computed with. Two engines exchange KV only where they say the same about it.

A generation is a name, which whoever rolls out weights gives, and how often they were replaced since without a new name: so two engines
that were started alike, and reloaded equally often, agree without anybody naming anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_NAME_BYTES = 128


def check_name(name: object) -> str:
    if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"kvspray: the name of a generation of weights is {name!r}, want a string of at most {MAX_NAME_BYTES} bytes")
    return name


class Generation:
    """Watches for weights that are replaced while the engine lives, and calls `changed` when that begins.

    vLLM tells a connector nothing of it, but its loader registers each parameter afresh, without memory at first ("meta"), before it
    loads: PyTorch has a hook for that. Weights that are copied into the place of the old ones leave no trace: whoever does that must
    say so (set_weights).
    """

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        from torch.nn.modules.module import register_module_parameter_registration_hook

        self._name = check_name(name)
        self._reloads = 0
        self._changed = changed
        self._seen: set[tuple[int, str]] = set()  # parameters of a reload that may still be under way
        self._hook = register_module_parameter_registration_hook(self._registered)

    def __str__(self) -> str:
        return f"{self._name}+{self._reloads}" if self._reloads else self._name

    def _registered(self, module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is None or not param.is_meta:
            return
        key = id(module), name
        if self._seen and key not in self._seen:
            self._seen.add(key)
            return
        self._seen = {key}  # the first one, or the first one again: a reload begins
        self._reloads += 1
        self._changed()

    def computes(self) -> None:
        """The engine computes with the weights: what is registered from now on belongs to another reload."""
        if self._seen:
            self._seen = set()

    def rename(self, name: str) -> None:
        """Other weights are there, and are called that. Those of a reload, if there was one, have their name now."""
        before = str(self)
        self._name, self._reloads = check_name(name), 0
        if str(self) != before:
            self._changed()

    def close(self) -> None:
        self._hook.remove()


def set_weights(worker: Any, name: str) -> str:
    """Names the weights that the engine has from now on: ``llm.collective_rpc(kvspray_vllm.set_weights, args=("step-1200",))``, on
    prefill and decode engines alike, after they were replaced. What was computed before is not given away any more. Where the engine
    has no kvspray connector, nothing happens. Returns the generation before.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from kvspray_vllm.connector import KVSprayConnector

    if not has_kv_transfer_group():
        return ""
    connector = get_kv_transfer_group()
    return connector.set_weights(name) if isinstance(connector, KVSprayConnector) else ""


class WorkerExtension:
    """For ``--worker-extension-cls kvspray_vllm.weights.WorkerExtension``: set_weights by name, where engines take no functions
    (``/collective_rpc`` of a server, or ``llm.collective_rpc("kvspray_set_weights", args=("step-1200",))``)."""

    def kvspray_set_weights(self, name: str) -> str:
        return set_weights(self, name)
