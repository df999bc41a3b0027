# SPDX-License-Identifier: Apache-2.0
"""kvspray: the engine side of the KV cache mover.

``WorkerClient`` is what one engine rank holds: regions, layout, flags, leases. ``SchedulerClient`` is what the engine's core
process holds: admission. Both work before their sidecar is there, survive its restarts, and never raise from a background
thread: the background is C and holds no interpreter lock.
"""

from .client import (
    Admission,
    AdmissionState,
    Completion,
    CompletionStatus,
    EngineInfo,
    Ranks,
    SchedulerClient,
    Status,
    WorkerClient,
    identity,
)
from .protocol import Params, pack_blocks, prefix_hash, unpack_blocks
from .region import KvsprayError, Region, RegionKind

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AdmissionState",
    "Completion",
    "CompletionStatus",
    "EngineInfo",
    "KvsprayError",
    "Params",
    "Ranks",
    "Region",
    "RegionKind",
    "SchedulerClient",
    "Status",
    "WorkerClient",
    "__version__",
    "identity",
    "pack_blocks",
    "prefix_hash",
    "unpack_blocks",
]
