"""libkvspray.so through ctypes: the structs and prototypes of kvspray.h, and nothing else.

``lib`` releases the interpreter lock around each call. ``fast`` holds it: only for calls that take
no lock and make no system call (one store each), where handing the lock over would cost more than
the call.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

__all__ = ["byref", "lib", "fast"]

E_ARG = -1
E_NOT_CONNECTED = -2
E_FULL = -3
E_DEGRADED = -4
E_TOO_BIG = -5
E_UNKNOWN = -6
E_LIMIT = -7
E_FORKED = -8
E_CLOSED = -9
E_SYS = -10
E_BUFFER = -11
E_GPU = -12
E_UNSUPPORTED = -13
E_UNKILLABLE = -14
KEPT = 1

REC_STEP, REC_INTENT, REC_EXPECT, REC_CANCEL, REC_PREEMPT, REC_HOLD, REC_COPY = 1, 2, 3, 4, 5, 6, 7
REC_GET, REC_PUT, REC_LOAD = 8, 9, 10
REC_RECEIVED, REC_SENT = 32, 33


class CRegion(ctypes.Structure):
    _fields_ = [("id", c_uint8 * 16), ("kind", c_int32), ("fd", c_int32), ("addr", c_uint64),
        ("bytes", c_uint64), ("handle", c_uint8 * 104), ("offset", c_uint64), ("part", c_uint32),
        ("reserved", c_uint32)]  # fmt: skip


class CConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("role", c_uint32),
        ("socket_path", c_char_p),
        ("engine_name", c_char_p),
        ("engine_version", c_char_p),
        ("engine_id", c_char_p),
        ("ranks", c_uint32 * 10),
        ("layers", c_uint32),
        ("submission_bytes", c_uint32),
        ("completion_bytes", c_uint32),
        ("deadline_ms", c_uint32),
        ("grace_ms", c_uint32),
        ("release", c_char_p),
        ("engine_api", c_char_p),
        ("engine_role", c_char_p),
        ("engine_events", c_char_p),
        ("engine_replay", c_char_p),
    ]


class CSnapshot(ctypes.Structure):
    _fields_ = [("lease", c_uint64), ("body", c_char_p), ("body_bytes", c_uint64)]


class CLanding(ctypes.Structure):
    _fields_ = [("flag", c_uint32), ("value", c_uint64), ("parts", c_uint64), ("arrived", c_void_p)]


class CGrant(ctypes.Structure):
    _fields_ = [("to", c_char_p), ("read", c_uint32), ("write", c_uint32), ("offset", c_uint64),
        ("bytes", c_uint64), ("end_ms", c_uint64)]  # fmt: skip


class CLocated(ctypes.Structure):
    _fields_ = [("bytes", c_uint64), ("read", c_uint32), ("write", c_uint32), ("end_ms", c_uint64)]


class CNote(ctypes.Structure):
    _fields_ = [("segment", c_char * 257), ("source", c_char * 257), ("write", c_uint32),
        ("note_bytes", c_uint32), ("bytes", c_uint64), ("note", c_uint8 * 64)]  # fmt: skip


class CBatch(ctypes.Structure):
    _fields_ = [("list", CRegion), ("number", c_uint32), ("capacity", c_uint32),
        ("count", c_uint32), ("entries", c_void_p)]  # fmt: skip


class CBatchOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("write", c_uint32),
        ("peer", c_char_p),
        ("segment", c_char_p),
        ("regions", POINTER(c_uint32)),
        ("region_count", c_uint32),
        ("priority", c_uint32),
        ("deadline_ms", c_uint32),
        ("wait", c_uint32),
        ("note", c_char_p),
        ("note_bytes", c_uint32),
        ("durable", c_uint32),
        ("req", c_char_p),
        ("stream_mark", c_uint64),
    ]


class CAdmission(ctypes.Structure):
    _fields_ = [("state", c_uint32), ("tokens", c_uint32), ("message", c_char * 232)]


class CInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("connected", c_uint32),
        ("degraded", c_uint32),
        ("quarantined", c_uint32),
        ("sidecar_pid", c_uint32),
        ("version", c_uint32),
        ("deadline_ms", c_uint32),
        ("match_timeout_ms", c_uint32),
        ("grace_ms", c_uint32),
        ("leases", c_uint32),
        ("sidecars", c_uint32),
        ("awaits", c_uint32),
        ("boot", c_uint8 * 16),
        ("sidecar_boot", c_uint8 * 16),
        ("source_epoch", c_uint64),
        ("connects", c_uint64),
        ("refusals", c_uint64),
        ("submitted", c_uint64),
        ("kept", c_uint64),
        ("full", c_uint64),
        ("completed", c_uint64),
        ("synthesised", c_uint64),
        ("represented", c_uint64),
        ("dropped", c_uint64),
        ("protocol_errors", c_uint64),
        ("kills", c_uint64),
        ("sidecar_exits", c_uint64),
        ("node", c_char * 64),
        ("endpoint", c_char * 256),
        ("error", c_char * 512),
        ("killable", c_uint32),
        ("has_regions", c_uint32),
    ]


class CUnits(ctypes.Structure):
    _fields_ = [("layer", c_char_p), ("role", c_uint32), ("reserved", c_uint32),
        ("off", c_uint64), ("block", c_uint64), ("tile", c_uint64), ("row", c_uint64),
        ("head", c_uint64), ("col", c_uint64), ("tile_rows", c_uint64), ("tiles", c_uint64),
        ("cell", c_uint64), ("cols", c_uint64), ("first_head", c_uint64), ("heads", c_uint64),
        ("first_row", c_uint64), ("rows", c_uint64)]  # fmt: skip


_PROTOTYPES = {
    "kvs_strerror": (c_char_p, [c_int]),
    "kvs_region_alloc": (c_int, [c_uint64, POINTER(CRegion)]),
    "kvs_region_reserve": (c_int, [c_uint64, POINTER(CRegion)]),
    "kvs_region_populate": (c_int, [POINTER(CRegion), c_uint64, c_uint64]),
    "kvs_region_process": (c_int, [c_uint64, c_uint64, POINTER(CRegion)]),
    "kvs_region_gpu": (c_int, [c_uint64, c_uint64, POINTER(CRegion), c_char_p, c_uint32]),
    "kvs_gpu_map": (c_int, [c_uint32, c_uint64, c_uint64, POINTER(c_uint64), c_char_p, c_uint32]),
    "kvs_region_part": (c_int, [POINTER(CRegion), c_uint64, c_uint64, POINTER(CRegion)]),
    "kvs_region_free": (None, [POINTER(CRegion)]),
    "kvs_open": (c_int, [POINTER(CConfig), POINTER(c_void_p)]),
    "kvs_start": (c_int, [c_void_p, POINTER(CRegion), c_uint32, c_char_p, c_uint32]),
    "kvs_describe": (c_int, [c_void_p, c_char_p, c_uint32]),
    "kvs_replace": (c_int, [c_void_p, POINTER(CRegion), c_uint32, c_char_p, c_uint32]),
    "kvs_end": (None, [c_void_p]),
    "kvs_close": (None, [c_void_p]),
    "kvs_connected": (c_int, [c_void_p]),
    "kvs_wait_connected": (c_int, [c_void_p, c_int]),
    "kvs_signal_layer": (c_int, [c_void_p, c_uint32, c_uint64]),
    "kvs_signal_step": (c_int, [c_void_p, c_uint64]),
    "kvs_flags": (c_void_p, [c_void_p, POINTER(c_uint64)]),
    "kvs_deadlines": (c_uint64, [c_void_p]),
    "kvs_submit": (c_int64, [c_void_p, c_uint16, c_char_p, c_uint32, c_uint32]),
    "kvs_submit_load": (c_int64, [c_void_p, c_char_p, c_uint32, c_uint32, POINTER(CLanding)]),
    "kvs_step": (c_int, [c_void_p, c_char_p, c_uint32, POINTER(CSnapshot), c_uint32]),
    "kvs_preempt": (c_int, [c_void_p, POINTER(CSnapshot)]),
    "kvs_hold": (c_int, [c_void_p, POINTER(CSnapshot)]),
    "kvs_yield": (c_int, [c_void_p, c_uint64]),
    "kvs_cancel": (c_int, [c_void_p, c_uint64, c_char_p]),
    "kvs_poll": (c_int64, [c_void_p, c_void_p, c_uint64]),
    "kvs_wait": (c_int, [c_void_p, c_int]),
    "kvs_load_value": (c_uint64, [c_void_p, c_uint32]),
    "kvs_gpu_open": (c_int, [c_void_p, POINTER(c_void_p), c_char_p, c_uint32]),
    "kvs_gpu_close": (None, [c_void_p]),
    "kvs_gpu_error": (c_char_p, [c_void_p]),
    "kvs_gpu_step": (c_int, [c_void_p, c_uint64, c_void_p]),
    "kvs_gpu_signal_layer": (c_int, [c_void_p, c_uint32, c_void_p]),
    "kvs_gpu_signal_step": (c_int, [c_void_p, c_void_p]),
    "kvs_gpu_mark": (c_int, [c_void_p, c_void_p, POINTER(c_uint64)]),
    "kvs_gpu_reached": (c_int, [c_void_p, c_uint64]),
    "kvs_gpu_wait_layer": (c_int, [c_void_p, c_uint32, c_uint64, c_void_p]),
    "kvs_await": (c_int, [c_void_p, c_char_p, c_char_p, c_char_p, c_uint32, c_uint32]),
    "kvs_admission": (c_int, [c_void_p, c_char_p, c_char_p, POINTER(CAdmission)]),
    "kvs_expected": (c_int, [c_void_p, c_char_p, c_char_p]),
    "kvs_decline": (
        c_int,
        [c_void_p, *[c_char_p] * 5, POINTER(c_uint32), c_uint32, c_int],
    ),
    "kvs_regions_add": (c_int64, [c_void_p, POINTER(CRegion), c_uint32]),
    "kvs_regions_wait": (c_int, [c_void_p, c_int]),
    "kvs_regions_drop": (c_int64, [c_void_p, POINTER(c_uint32), c_uint32]),
    "kvs_request": (c_int64, [c_void_p, c_uint32, c_char_p, c_uint32]),
    "kvs_answer": (c_int64, [c_void_p, c_int64, c_int, POINTER(c_uint32), c_void_p, c_uint64]),
    "kvs_request_forget": (c_int, [c_void_p, c_int64]),
    "kvs_segment": (
        c_int64,
        [c_void_p, c_char_p, c_uint32, c_uint64, c_uint64, POINTER(CGrant), c_uint32],
    ),
    "kvs_segment_file": (
        c_int64,
        [c_void_p, c_char_p, c_char_p, c_uint64, c_uint64, POINTER(CGrant), c_uint32],
    ),
    "kvs_segment_revoke": (c_int64, [c_void_p, c_char_p, c_char_p]),
    "kvs_locate": (c_int64, [c_void_p, c_char_p, c_char_p, c_uint32]),
    "kvs_read_located": (c_int, [c_char_p, c_uint64, POINTER(CLocated)]),
    "kvs_notes": (c_int64, [c_void_p, c_uint32]),
    "kvs_read_notes": (c_int, [c_char_p, c_uint64, POINTER(CNote), c_uint32]),
    "kvs_batch_open": (c_int, [c_void_p, c_uint32, POINTER(CBatch)]),
    "kvs_batch_close": (None, [c_void_p, POINTER(CBatch)]),
    "kvs_batch_submit": (c_int64, [c_void_p, POINTER(CBatch), POINTER(CBatchOptions)]),
    "kvs_unpin": (c_int, [c_void_p, c_int64]),
    "kvs_close_space": (c_int, [c_void_p, c_int64]),
    "kvs_digest_open": (c_int, [c_char_p, POINTER(c_void_p)]),
    "kvs_digest_close": (None, [c_void_p]),
    "kvs_digest_sum": (
        c_int,
        [c_void_p, c_void_p, c_uint64, POINTER(CUnits), c_void_p, c_uint32, POINTER(c_uint64)],
    ),
    "kvs_digest_weights": (c_int, [c_void_p, c_uint32, c_uint64, c_uint64, c_void_p]),
    "kvs_digest_plane": (c_uint64, [c_void_p, c_uint32, c_char_p]),
    "kvs_status_read": (c_int, [c_void_p, POINTER(CInfo)]),
    "kvs_wait_log": (c_int, [c_void_p, c_char_p, c_uint64]),
    "kvs_end_log": (c_int, [c_void_p]),
}


def _bind(dll: ctypes.CDLL, names: list[str]) -> ctypes.CDLL:
    for name in names:
        fn = getattr(dll, name)
        fn.restype, fn.argtypes = _PROTOTYPES[name]
    return dll


def _path() -> str:
    # KVSPRAY_LIBRARY lets a sanitizer build of the library stand in for the one in the wheel.
    override = os.environ.get("KVSPRAY_LIBRARY")
    return override or str(pathlib.Path(__file__).with_name("libkvspray.so"))


def _open() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    path = _path()
    try:
        return (
            _bind(ctypes.CDLL(path, use_errno=True), list(_PROTOTYPES)),
            _bind(ctypes.PyDLL(path), ["kvs_signal_layer", "kvs_signal_step", "kvs_deadlines"]),
        )
    except OSError as e:
        problem = f"cannot be loaded: {e}"
    except AttributeError as e:
        problem = f"is of another version than this package: {e}"
    remedy = "install the wheel kvspray of this platform again"
    if "KVSPRAY_LIBRARY" in os.environ:
        remedy = "unset KVSPRAY_LIBRARY, or set it to the library of this version"
    raise ImportError(f"kvspray: the library {path} {problem}; {remedy}", path=path)


lib: ctypes.CDLL
fast: ctypes.CDLL
lib, fast = _open()


def strerror(code: int) -> str:
    return bytes(lib.kvs_strerror(code)).decode()
