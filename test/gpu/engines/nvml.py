"""The part of NVIDIA's management library that the measurements use."""

from __future__ import annotations

import ctypes
import os

MAX_PROCESSES = 256
UNKNOWN = 2**64 - 1  # of a process whose memory the driver does not report, as in some containers


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


class Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class GPU:
    def __init__(self, lib: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self.lib, self.handle = lib, handle

    def free(self) -> int:
        got = Memory()
        if rc := self.lib.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(got)):
            raise OSError(f"nvmlDeviceGetMemoryInfo: {rc}")
        return int(got.free)

    def processes(self) -> dict[int, int]:
        """Bytes by process, of those that the driver lists."""
        count, list_ = ctypes.c_uint(MAX_PROCESSES), (Process * MAX_PROCESSES)()
        if self.lib.nvmlDeviceGetComputeRunningProcesses_v3(
            self.handle, ctypes.byref(count), list_
        ):
            return {}
        return {p.pid: p.used for p in list_[: count.value] if p.used != UNKNOWN}


def open_first() -> GPU | None:
    """The first GPU that this process may use; None where there is no driver."""
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    # The library lists all of the host's, whatever CUDA may use.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    handle = ctypes.c_void_p()
    if lib.nvmlInit_v2():
        return None
    if first.isdigit():
        failed = lib.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
    else:
        failed = lib.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    return None if failed else GPU(lib, handle)
