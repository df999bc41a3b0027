"""What an engine announces of itself to routers that find engines by gossip."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import kvspray
from kvspray_vllm import shim
from kvspray_vllm.settings import Settings


@pytest.mark.parametrize(
    ("kv_role", "role"),
    [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both"), ("", "")],
)
def test_a_worker_announces_api_and_role(
    monkeypatch: pytest.MonkeyPatch, kv_role: str, role: str
) -> None:
    made: list[kvspray.EngineInfo] = []

    class Client:
        signal_layer = signal_step = None

        def __init__(self, _socket: str | None, engine: kvspray.EngineInfo, **_: Any) -> None:
            made.append(engine)

    monkeypatch.setattr(kvspray, "WorkerClient", Client)
    log = logging.getLogger(__name__)
    shim.Worker(None, "e", 1, log, kvspray.Ranks(), api="http://a:1", kv_role=kv_role)
    assert (made[0].id, made[0].api, made[0].role) == ("e", "http://a:1", role)


def test_the_setting() -> None:
    assert Settings.parse({}).api == ""
    assert Settings.parse({"api": "http://a:1"}).api == "http://a:1"
    for wrong in (1, "x" * 129):
        with pytest.raises(ValueError, match="api"):
            Settings.parse({"api": wrong})
