"""What differs between versions of vLLM; found by feature, the version is only logged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import vllm
import vllm.device_allocator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import MambaSpec

KNOWN = ("0.31", "0.32", "0.33")  # tested: docs/vllm.md has how

# A number for the values in a cache. Raise it when a release of vLLM computes other values for the
# same model and settings. Its engines then neither pair with earlier ones nor find their pages.
NUMERICS = "1"


def numerics() -> str:
    """NUMERICS, with vLLM's version if it is newer than KNOWN: it may compute other values."""
    return NUMERICS + (f", vLLM {vllm.__version__}" if newer_than_known() else "")


@dataclass(frozen=True)
class Capabilities:
    """What a version may lack, found by feature when the plug-in is loaded."""

    # Names in vLLM's statistics for the source of a prompt's tokens: a peer, and a store whose tier
    # is not yet certain. None: vLLM does not count by source.
    peer_source: Any
    store_source: Any
    # The tags of memory that may wake later than the rest. vLLM 0.31 wakes each tag by its name.
    deferrable_tags: Iterable[str]
    # Whether vLLM calls the connector before its memory sleeps, and after it has woken.
    sleeps: bool
    # Whether recurrent states lie in pages as states.py reads them: vLLM 0.33.
    states: bool


def _find() -> Capabilities:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        peer, store = CacheHitSource.P2P, CacheHitSource.EXTERNAL_UNSPECIFIED
    except (ImportError, AttributeError):
        peer = store = None
    tags = getattr(vllm.device_allocator, "DEFERRABLE_TAGS", ("weights", "kv_cache"))
    return Capabilities(
        peer,
        store,
        tags,
        hasattr(KVConnectorBase_V1, "restore_kv_caches"),
        "num_prefill_checkpoint_blocks" in MambaSpec.__dataclass_fields__,
    )


CAPABILITIES = _find()


def _number(version: str) -> tuple[int, int] | None:
    """(major, minor); None if a version has no such beginning, for example that of a branch."""
    m = re.match(r"(\d+)\.(\d+)", version)
    return (int(m[1]), int(m[2])) if m else None


def older_than_known(version: str) -> bool:
    here, oldest = _number(version), _number(KNOWN[0])
    return here is not None and oldest is not None and here < oldest


def newer_than_known(version: str | None = None) -> str:
    """A line for the engine's log; empty if its vLLM is not newer than KNOWN."""
    version = vllm.__version__ if version is None else version
    here, newest = _number(version), _number(KNOWN[-1])
    if here is None or newest is None or here <= newest:
        return ""
    return (
        f"kvspray: vllm.__version__ is {version}, newer than any that this plug-in was tested with "
        f"({', '.join(KNOWN)}); if transfers fail, use vLLM {KNOWN[-1]} or a newer kvspray"
    )
