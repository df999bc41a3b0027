"""The traceparent of a request, from the router or from vLLM, reaches the sidecar; a malformed one
does no harm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import DECODE, XFER, Engine, e, prefill_first

from kvspray_vllm import params

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"

MALFORMED = [
    None, 7, "", "x", {}, b"bytes", GIVEN[:-1], GIVEN.upper(), "ff" + GIVEN[2:],
    GIVEN + "-" + "0" * 64, GIVEN + "\n", GIVEN.replace("0af", "\u0660af"),
]  # fmt: skip


def asked(traceparent: object) -> dict[str, Any]:
    return {"v": 1, "xfer": XFER, "peer": "p:1", "traceparent": traceparent}


def test_a_traceparent_is_read() -> None:
    got = params.parse({"kvspray": asked(GIVEN)})
    assert got is not None and got.traceparent == GIVEN
    assert "traceparent" not in got.encode()  # the other engine's span has another parent
    later = params.parse({"kvspray": asked("01" + GIVEN[2:] + "-x")})
    assert later is not None and later.traceparent == "01" + GIVEN[2:] + "-x"


@pytest.mark.parametrize("bad", MALFORMED)
def test_a_malformed_one_is_left_out(bad: object) -> None:
    got = params.parse({"kvspray": asked(bad)})
    assert got is not None and got.traceparent == "" and got.peer == "p:1"


def blocks(e: Engine, req: str) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (e.tables[req],))


@pytest.mark.parametrize("given", [GIVEN, "junk"])
def test_a_load_has_the_routers(e: Engine, given: str) -> None:
    r = e.add("r", 40, prefill_first(traceparent=given))
    external, later = e.scheduler.matched(r, 16)
    assert later
    e.scheduler.allocated(r, blocks(e, "r"), external or 0)
    e.step()
    assert e.worker_shim.traced == {"r": GIVEN if given == GIVEN else ""}


def test_an_offer_has_the_routers(e: Engine) -> None:
    e.add("r", 40, {**DECODE, "kvspray": asked(GIVEN)})
    e.add("s", 40, {**DECODE, "kvspray": asked("junk")})
    e.add("t", 40, dict(DECODE))
    e.step({"r": 40, "s": 40, "t": 40})
    assert e.worker_shim.traced == {"r": GIVEN, "s": "", "t": ""}
    assert "traceparent" not in e.finish("r")[1]["kvspray"]


def test_without_a_router_vllms_own_counts(e: Engine) -> None:
    for req, kv in (("r", dict(DECODE)), ("s", {**DECODE, "kvspray": asked(GIVEN)})):
        new = e.scheduler.on_new_request
        e.scheduler.on_new_request = lambda r: None  # type: ignore[method-assign]
        r = e.add(req, 40, kv)
        e.scheduler.on_new_request = new  # type: ignore[method-assign]
        r.trace_headers = {"traceparent": OTHER, "tracestate": "a=b"}
        new(r)
    e.step({"r": 40, "s": 40})
    assert e.worker_shim.traced == {"r": OTHER, "s": GIVEN}
