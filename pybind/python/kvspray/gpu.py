"""Signals by the GPU itself: layer flags that streams and captured graphs set, and load flags that
streams wait for.

    gpu = GpuSignals(client)         # in the engine's worker, once its GPU is chosen
    gpu.step(step, stream)           # before the step's first kernel, or before a graph's launch
    gpu.signal_layer(layer, stream)  # after the layer's last write to its cache; eager, or captured
    gpu.signal_step(stream)          # at the end of each step: the next clears the graphs' flags

``stream`` is a CUstream as an integer (torch.cuda.current_stream().cuda_stream). Nothing here waits
for the GPU by itself, but the driver lets a launch wait if a stream's queue is full, for example
behind a missing load: no call holds the interpreter lock. Nothing raises after the constructor: the
first call that fails is logged, and from then on ``ok`` is False and every call returns False. The
engine must then announce no more steps; what was announced ends at its deadline and is recomputed.
"""

from __future__ import annotations

import ctypes
import logging

from ._lib import E_GPU, lib, strerror
from .region import KvsprayError
from .worker import WorkerClient

_ERROR_BYTES = 256


def map_memory(device: int, ptr: int, nbytes: int) -> int:
    """Maps new memory of a GPU at a reserved range; Region.gpu accepts it. Returns the
    CUmemGenericAllocationHandle, which the caller releases."""
    out = ctypes.c_uint64()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    rc = lib.kvs_gpu_map(device, ptr, nbytes, ctypes.byref(out), error, _ERROR_BYTES)
    if rc != 0:
        raise KvsprayError(
            f"kvspray: {nbytes} bytes of memory of GPU {device} at {ptr:#x}: "
            f"{error.value.decode() or strerror(rc)}"
        )
    return out.value


class GpuSignals:
    def __init__(self, client: WorkerClient, log: logging.Logger | None = None) -> None:
        """Raises KvsprayError where there is no NVIDIA driver, or no CUDA context in this
        thread."""
        handle = ctypes.c_void_p()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        rc = lib.kvs_gpu_open(client._handle(), ctypes.byref(handle), error, _ERROR_BYTES)
        if rc != 0:
            raise KvsprayError(
                f"kvspray: no signals by the GPU: {error.value.decode() or strerror(rc)}"
            )
        self._client = client
        self._h: ctypes.c_void_p | None = handle
        self._log = log or logging.getLogger("kvspray")
        self.ok = True

    def step(self, step: int, stream: int) -> bool:
        """What comes on this stream from now on belongs to ``step``. Steps never fall."""
        return self._call(lib.kvs_gpu_step, step, stream)

    def signal_layer(self, layer: int, stream: int) -> bool:
        return self._call(lib.kvs_gpu_signal_layer, layer, stream)

    def signal_step(self, stream: int) -> bool:
        return self._call(lib.kvs_gpu_signal_step, stream)

    def mark(self, stream: int) -> int:
        """A number for the ``after`` of ``expect``, ``copy`` and ``load``: they take effect once
        everything that the stream holds by now is done. 0: the call failed; submit nothing that
        depends on it."""
        out = ctypes.c_uint64()
        return out.value if self._call(lib.kvs_gpu_mark, stream, ctypes.byref(out)) else 0

    def reached(self, mark: int) -> bool:
        """Whether everything before this mark is done. All marks have to be of one stream. Makes no
        call to CUDA, which may wait for streams."""
        h = self._h
        return h is not None and lib.kvs_gpu_reached(h, mark) == 1

    def wait_layer(self, layer: int, value: int, stream: int) -> bool:
        """The stream goes on once the layer's load flag is at least ``value``."""
        return self._call(lib.kvs_gpu_wait_layer, layer, value, stream)

    def close(self) -> None:
        """Before the client's, and once no graph with these signals runs any more."""
        h, self._h, self.ok = self._h, None, False
        if h is not None:
            lib.kvs_gpu_close(h)

    def _call(self, fn: object, *args: object) -> bool:
        if not self.ok:
            return False
        rc: int = fn(self._h, *args)  # type: ignore[operator]
        if rc != 0:
            self.ok = False
            why = lib.kvs_gpu_error(self._h).decode() if rc == E_GPU else strerror(rc)
            self._log.error(
                "kvspray: signals by the GPU end here: %s: %s", getattr(fn, "__name__", "call"), why
            )
        return rc == 0
