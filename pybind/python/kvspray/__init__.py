"""kvspray: the engine side of the KV cache mover.

``WorkerClient`` belongs to one engine rank: regions, layout, flags, leases. ``SchedulerClient``
belongs to the engine's scheduler: admission. Both start without a sidecar and survive its restarts.
Their background thread is in C: it needs no interpreter lock and raises nothing.
"""

from .client import (
    Admission,
    AdmissionState,
    Completion,
    CompletionStatus,
    EngineInfo,
    Ranks,
    Status,
    identity,
)
from .protocol import Params, pack_blocks, prefix_hash, unpack_blocks
from .region import KvsprayError, Region, RegionKind
from .scheduler import SchedulerClient
from .worker import LATER, LoadPart, WorkerClient

__version__ = "0.0.0.dev0"  # of a checkout; `make wheels` writes that of the tag

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
    "LATER",
    "LoadPart",
    "WorkerClient",
    "__version__",
    "identity",
    "pack_blocks",
    "prefix_hash",
    "unpack_blocks",
]
