"""A session's reports, with a client that records them."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import kvspray
from kvspray import _messages
from kvspray_sglang import pd_session


class Client:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.takes, self.calls, self.closed = True, [], threading.Event()

    def register(self, regions: Any, layout: Any) -> None: ...

    def step(self, step: int, reqs: Any) -> bool:
        self.calls.append("step")
        return self.takes

    def signal_step(self, step: int) -> None:
        self.calls.append("signal")

    def cancel(self, lease: int, reason: str) -> None:
        self.calls.append(f"cancel {lease}: {reason}")

    def wait(self, seconds: float) -> bool:
        self.closed.wait(seconds)
        return False

    def close(self) -> None: ...


def test_progress_that_cannot_be_reported_ends_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvspray, "WorkerClient", Client)
    cache = SimpleNamespace(tensors=1, regions=[])
    s = pd_session.Session(
        None, kvspray.EngineInfo("e"), kvspray.Ranks(), cache, {}, 1.0, logging.getLogger("test")
    )  # type: ignore[arg-type]
    client: Any = s._client
    try:
        assert s.progress(3, 16, [1]) and client.calls == ["step", "signal"]
        client.takes = False
        assert not s.progress(3, 32, [1, 2])
        assert client.calls[2:] == ["step", "signal", "cancel 3: its pages cannot be reported"]
    finally:
        s._closed = True
        client.closed.set()
        s.close()


def test_a_record_names_the_pages_of_the_longest_prompt() -> None:
    pages = bytes(4 * pd_session.MAX_PAGES)
    reqs = [{"lease": 1 << 60, "end": 1 << 31, "blocks": [pages], "attempt": 0}]
    body = kvspray.protocol.pack(_messages.step(step=1 << 60, reqs=reqs))
    assert len(body) < _messages.MAX_RECORD_BYTES - 1024  # a snapshot has a few names more
