"""The C client receives from sidecars of an invented older and a newer version: the very bytes of
the shared vectors.

Missing fields have their defaults, new ones are passed over, and the session works.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ENGINE, TIMEOUT_S, Sidecar, until
from test_golden import vectors

import kvspray
from kvspray import AdmissionState, CompletionStatus

XFER, HASH = b"x" * 16, b"h" * 32
VECTORS = {p.values[0]["name"]: p.values[0]["hex"] for p in vectors()}
BOOT = bytes(range(0x40, 0x50)).hex()  # of the sidecar in the WELCOMEs
Make = Callable[..., Any]


def receives(s: Sidecar, name: str) -> None:
    """The client gets a vector as it stands."""
    s.command("raw", hex=VECTORS[name])


def replay(version: str, *names: str) -> dict[str, Any]:
    return {"replay": {name: VECTORS[f"{name.lower()}-{version}"] for name in names}}


def test_older_welcome(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(**replay("older", "WELCOME", "REGISTERED"))
    w = worker()
    st = w.status()
    assert (
        st.connected
        and st.version == (1, 0)
        and st.node == ""
        and st.endpoint == ""
        and not st.error
    )
    assert (st.deadline_ms, st.match_timeout_ms, st.grace_ms) == (30000, 10000, 5000)
    leases = [w.intent(XFER, HASH, 40, [[1, 2, 3]]) for _ in range(20)]  # no limit was named
    assert all(leases)
    s.record("INTENT", lease=leases[-1])
    assert st.counters["protocol_errors"] == 0


def test_newer_welcome(sidecar: Make, worker: Make) -> None:
    s: Sidecar = sidecar(**replay("newer", "WELCOME", "REGISTERED"))
    w = worker()
    st = w.status()
    assert (
        st.connected
        and st.version == (1, 0)
        and st.node == "n"
        and st.endpoint == "h:1"
        and not st.error
    )
    assert (st.deadline_ms, st.match_timeout_ms, st.grace_ms) == (1, 2, 3)
    leases = [w.intent(XFER, HASH, 40, [[1, 2, 3]], deadline_s=30) for _ in range(10)]
    assert all(leases[:9]) and not leases[9]  # limits.leases is 9
    s.record("INTENT", lease=leases[8])
    assert w.status().counters["protocol_errors"] == 0


@pytest.mark.parametrize("version", ["older", "newer"])
def test_registered(sidecar: Make, worker: Make, version: str) -> None:
    s: Sidecar = sidecar(**replay(version, "REGISTERED"))
    w = worker()
    assert w.connected and w.status().counters["protocol_errors"] == 0
    assert w.intent(XFER, HASH, 40, [[1]])
    s.expect("record", name="INTENT")


@pytest.mark.parametrize(
    ("version", "reported"),
    [("older", "sidecar reports protocol: no"), ("newer", "sidecar reports from-the-future: ?")],
)
def test_error(sidecar: Make, worker: Make, version: str, reported: str) -> None:
    """Neither is fatal: the session stays."""
    s: Sidecar = sidecar()
    w = worker()
    receives(s, f"error-{version}")
    until(lambda: w.status().counters["refusals"] == 1, "the error is counted")
    assert w.status().error == reported
    s.command("ping")
    s.expect("pong")
    assert (
        w.connected
        and w.status().counters["protocol_errors"] == 0
        and w.intent(XFER, HASH, 40, [[1]])
    )


@pytest.mark.parametrize("version", ["older", "newer"])
def test_bye(sidecar: Make, worker: Make, version: str) -> None:
    s: Sidecar = sidecar()
    w = worker()
    receives(s, f"bye-{version}")
    until(lambda: not w.connected, "it drains")
    assert w.status().counters["protocol_errors"] == 0 and w.intent(XFER, HASH, 40, [[1]]) == 0


@pytest.mark.parametrize("version", ["older", "newer"])
def test_admitted(sidecar: Make, socket_path: pathlib.Path, version: str) -> None:
    s: Sidecar = sidecar(**replay(version, "WELCOME"))
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        assert c.wait_connected(TIMEOUT_S)
        assert c.await_admission(XFER, HASH, "127.0.0.1:9", 40, 30)
        a = s.expect("await")
        s.command("replay", name="ADMITTED", id=a["id"], hex=VECTORS[f"admitted-{version}"])
        got = until(
            lambda: (
                (x := c.admission(XFER, HASH)) is not None
                and x.state != AdmissionState.PENDING
                and x
            ),
            "an answer",
        )
        assert (got.state, got.tokens, got.message) == (AdmissionState.GONE, 0, "")
        assert c.connected and c.status().counters["protocol_errors"] == 0


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("received-older", {"bytes": 1}),
        ("received-newer", {"bytes": 1, "us": 2, "transport": "x"}),
        ("sent-older", {}),
        ("sent-newer", {"reason": "expired"}),
    ],
)
def test_completions(sidecar: Make, worker: Make, name: str, want: dict[str, Any]) -> None:
    s: Sidecar = sidecar()
    w = worker()
    received = name.startswith("received")
    lease = (
        w.expect(XFER, HASH, "127.0.0.1:7001", 40, 16, [[4, 5, 6]])
        if received
        else w.intent(XFER, HASH, 40, [[1, 2, 3]])
    )
    s.expect("record", lease=lease)
    s.command("complete", lease=lease, name=name.split("-")[0].upper(), status=3, hex=VECTORS[name])
    assert w.wait(TIMEOUT_S)
    assert w.poll() == [kvspray.Completion(lease, received, CompletionStatus.EXPIRED, **want)]


def test_each_message_to_a_shim_is_received() -> None:
    """What a sidecar sends has both vectors, and a test here that plays them."""
    names = ("welcome", "registered", "error", "admitted", "bye", "received", "sent")
    assert {f"{m}-{v}" for m in names for v in ("older", "newer")} <= set(VECTORS)
    assert bytes.fromhex(BOOT) in bytes.fromhex(VECTORS["welcome-older"])
