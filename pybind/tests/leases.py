"""What tests of the clients share: records of leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conftest import TIMEOUT_S

import kvspray

XFER, HASH = b"x" * 16, b"h" * 32
Make = Callable[..., Any]


def canonical(kind: str, raw: str) -> None:
    """What the C side has encoded is what the Python side would."""
    assert kvspray.protocol.encode(kind, kvspray.protocol.decode(bytes.fromhex(raw))).hex() == raw


def poll_one(w: kvspray.WorkerClient, timeout: float = TIMEOUT_S) -> kvspray.Completion:
    assert w.wait(timeout), w.status()
    got = w.poll()
    assert len(got) == 1, got
    return got[0]


def intent(w: kvspray.WorkerClient, **kw: Any) -> int:
    lease = w.intent(XFER, HASH, 40, [[1, 2, 3]], **kw)
    assert lease > 0, w.status()
    return lease


def expect(w: kvspray.WorkerClient, **kw: Any) -> int:
    lease = w.expect(XFER, HASH, "127.0.0.1:7001", 40, 16, [[4, 5, 6]], **kw)
    assert lease > 0, w.status()
    return lease
