"""Signals to the sidecar that a layer of a step is complete: a CPU engine stores the flag when the
layer has returned, the stream of a GPU engine writes it when the layer's kernels have ended.

A GPU engine runs a step in one of two ways. In eager and piecewise steps vLLM calls the connector
after each layer, and the flag is enqueued on the stream there. The replay of a full graph calls
nothing: its flags are nodes of the graph, which were added while vLLM captured it. Both kinds occur
in one engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

from kvspray_vllm import shim


class Signals(Protocol):
    """The flags of one worker. No method waits for a GPU or raises."""

    @property
    def ok(self) -> bool:
        """False: a flag may be missing from now on, so no step may be announced any more."""

    def begin(self, step: int) -> None:
        """What the engine computes from now on belongs to this step."""

    def layer(self, index: int, step: int) -> None:
        """All of the layer's computation in this step has been called."""

    def end(self, step: int) -> None:
        """All layers of this step, including those without a hook."""

    def mark(self) -> int | None:
        """For the ``after`` of a load: what the engine has computed so far may still write the
        blocks. 0: it has all ended. None: the order cannot be kept, nothing may be loaded."""

    def capturing(self) -> bool:
        """Whether the engine records a graph now, instead of computing a step."""

    def close(self) -> None: ...


class CpuSignals:
    """A layer has ended when its hook is called."""

    ok = True

    def __init__(self, client: shim.WorkerShim) -> None:
        self._client = client

    def begin(self, step: int) -> None:
        pass

    def layer(self, index: int, step: int) -> None:
        self._client.signal_layer(index, step)

    def end(self, step: int) -> None:
        self._client.signal_step(step)

    def mark(self) -> int | None:
        return 0

    def capturing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _raw_stream(torch: Any) -> Callable[[], int]:
    """The handle of the thread's current stream, once per layer and step. torch makes an object of
    the stream otherwise, in the time in which the engine launches its kernels."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: int(torch.cuda.current_stream().cuda_stream)
    return functools.partial(raw, torch.cuda.current_device())


class GpuSignals:
    """A layer has ended when the engine's stream has passed its signal."""

    def __init__(self, flags: shim.GpuFlags) -> None:
        """In the worker's thread, once it has chosen its GPU."""
        import torch

        self._flags = flags
        self._stream = _raw_stream(torch)
        self.capturing = torch.cuda.is_current_stream_capturing
        self._synchronize = torch.cuda.synchronize

    @property
    def ok(self) -> bool:
        return self._flags.ok

    def begin(self, step: int) -> None:
        self._flags.step(step, self._stream())

    def layer(self, index: int, step: int) -> None:
        """While a graph is captured the step is that of each replay."""
        self._flags.signal_layer(index, self._stream())

    def end(self, step: int) -> None:
        self._flags.signal_step(self._stream())

    def mark(self) -> int | None:
        return self._flags.mark(self._stream()) or None

    def close(self) -> None:
        # The GPU may still write flags to memory that is released now. A context that has failed
        # runs nothing more.
        with contextlib.suppress(RuntimeError):
            self._synchronize()
        self._flags.close()


def in_captures(group: Any, own: Any) -> None:
    """For an engine whose connector contains ours, as vLLM's MultiConnector does. That connector
    has no step while vLLM captures a graph, so vLLM calls no hook of a layer then, and a replay
    would signal its layers only at its end. After this call, a capture calls the hooks of our
    connector alone, as the hooks of the other connectors need a step."""
    if group is own:
        return
    has_step, load, save = (
        group.has_connector_metadata,
        group.wait_for_layer_load,
        group.save_kv_layer,
    )

    def wait_for_layer_load(layer: str) -> None:
        if has_step():
            load(layer)

    def save_kv_layer(*args: Any, **kwargs: Any) -> None:
        (save if has_step() else own.save_kv_layer)(*args, **kwargs)

    group.has_connector_metadata = lambda: has_step() or own.has_connector_metadata()
    group.wait_for_layer_load, group.save_kv_layer = wait_for_layer_load, save_kv_layer
