"""Versions of vLLM. Differences are detected by feature; the version is only
logged."""

from __future__ import annotations

import importlib
import re
from typing import Any

import vllm

KNOWN = ("0.32", "0.33")  # tested: docs/vllm.md has how


def _number(version: str) -> tuple[int, int] | None:
    """(major, minor); None where a version does not begin so, as a build of a branch's."""
    m = re.match(r"(\d+)\.(\d+)", version)
    return (int(m[1]), int(m[2])) if m else None


def newer_than_known(version: str | None = None) -> str:
    """A line for the engine's log; empty where its vLLM is not newer than those that are known."""
    version = vllm.__version__ if version is None else version
    here, newest = _number(version), _number(KNOWN[-1])
    if here is None or newest is None or here <= newest:
        return ""
    return (
        f"kvspray: vllm.__version__ is {version}, newer than any that this plug-in was tested with "
        f"({', '.join(KNOWN)}); if transfers fail, use vLLM {KNOWN[-1]} or a newer kvspray"
    )


def cache_hit_source(*names: str) -> Any:
    """How vLLM's statistics name where tokens come from: the first of the names that they have;
    None: they have no such names."""
    try:
        sources = importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource
    except (ImportError, AttributeError):
        return None
    return next((getattr(sources, name) for name in names if hasattr(sources, name)), None)
