"""Which vLLM this plug-in was tested with, and what a newer one asks."""

from __future__ import annotations

import sys

import pytest
import vllm

import kvspray
import kvspray_vllm
from kvspray_vllm import versions
from kvspray_vllm.connector import KVSprayConnector


def test_vllm_033_asks_whether_caches_may_sleep() -> None:
    """vLLM 0.33 also calls the connector before and after a sleep. An older vLLM does not, and is
    refused."""
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


def test_only_a_vllm_before_the_supported_ones_is_older() -> None:
    older = {v: versions.older_than_known(v) for v in ("0.9.2", "0.30.4", "0.31.0", "1.0.0", "dev")}
    assert [v for v, is_older in older.items() if is_older] == ["0.9.2", "0.30.4"]


def test_a_vllm_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's factory loads the connector: a module of vLLM that it needs is not there."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    kvspray_vllm.register()
    assert KVConnectorFactory._registry["KVSprayConnector"]() is KVSprayConnector
    monkeypatch.setattr(vllm, "__version__", "0.20.1")
    monkeypatch.delitem(sys.modules, "kvspray_vllm.connector")
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.base", None)
    with pytest.raises(ImportError, match=r"vllm.__version__ 0.20.1: .*base.*; install a vLLM"):
        KVConnectorFactory._registry["KVSprayConnector"]()


def test_two_releases_of_the_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip refuses such a pair, but --no-deps installs it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    kvspray_vllm.register()
    monkeypatch.setattr(kvspray, "__version__", "7.8.9")
    with pytest.raises(
        ImportError,
        match=rf"kvspray-vllm has release {kvspray_vllm.__version__}.* kvspray 7\.8\.9;",
    ):
        KVConnectorFactory._registry["KVSprayConnector"]()


def test_the_installed_vllm_is_known() -> None:
    assert (
        ".".join(vllm.__version__.split(".")[:2]) in versions.KNOWN
        and not versions.newer_than_known()
    )
