"""What an engine announces of itself to routers that find engines by gossip."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig

import kvspray
from kvspray_vllm import events, shim
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
    shim.Worker(
        None, "e", 1, log, kvspray.Ranks(), api="http://a:1", kv_role=kv_role, kv_events=("x", "y")
    )
    assert (made[0].id, made[0].api, made[0].role) == ("e", "http://a:1", role)
    assert (made[0].events, made[0].replay) == ("x", "y")


@pytest.mark.parametrize(
    ("given", "rank", "want"),
    [
        (None, 0, ("", "")),
        ({"enable_kv_cache_events": False}, 0, ("", "")),
        ({"publisher": "null"}, 0, ("", "")),
        ({}, 0, ("tcp://*:5557", "")),
        ({"replay_endpoint": "tcp://*:5600"}, 3, ("tcp://*:5560", "tcp://*:5603")),
        (
            {"endpoint": "tcp://[::]:1", "replay_endpoint": "tcp://[::]:2"},
            0,
            ("tcp://*:1", "tcp://*:2"),
        ),
        ({"endpoint": "tcp://*:0"}, 0, ("", "")),
        ({"endpoint": "tcp://collector:5557"}, 0, ("", "")),
        ({"endpoint": "ipc:///tmp/x"}, 0, ("", "")),
    ],
)
def test_where_events_are_published(
    given: dict[str, Any] | None, rank: int, want: tuple[str, str]
) -> None:
    config = SimpleNamespace(
        kv_events_config=given
        if given is None
        else KVEventsConfig(**{"enable_kv_cache_events": True, **given}),
        parallel_config=SimpleNamespace(data_parallel_index=rank),
    )
    assert events.endpoints(config) == want


def test_the_setting() -> None:
    assert Settings.parse({}).api == ""
    assert Settings.parse({"api": "http://a:1"}).api == "http://a:1"
    for wrong in (1, "x" * 129):
        with pytest.raises(ValueError, match="api"):
            Settings.parse({"api": wrong})
