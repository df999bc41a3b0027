"""Which vLLM this plug-in was tested with, and what a newer one asks."""

from __future__ import annotations

import pytest
import vllm

from kvspray_vllm import versions
from kvspray_vllm.connector import KVSprayConnector


def test_vllm_033_asks_whether_caches_may_sleep() -> None:
    """And calls the connector before and after. An older one does neither, and is refused."""
    assert KVSprayConnector.supports_sleep_mode(None) is True  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.32.0", False), ("0.33.7", False), ("0.34.0rc1", True), ("1.0.0", True), ("dev", False)],
)
def test_a_newer_vllm_is_named(version: str, newer: bool) -> None:
    line = versions.newer_than_known(version)
    assert bool(line) == newer and "\n" not in line
    if newer:
        assert f"vllm.__version__ is {version}" in line and "use vLLM 0.33" in line


def test_the_installed_vllm_is_known() -> None:
    assert (
        ".".join(vllm.__version__.split(".")[:2]) in versions.KNOWN
        and not versions.newer_than_known()
    )
