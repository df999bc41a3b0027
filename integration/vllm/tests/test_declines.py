"""A request that no worker will expect KV for is declined, once, by the scheduler's own session;
one that a worker has a lease for is not."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, DECODE, LOG, XFER, Engine, Request, concurrent, e, fake_hash, prefill_first

from kvspray_vllm import shim
from kvspray_vllm.meta import Landed
from kvspray_vllm.scheduler import EVERY_PROMPT, SchedulerSide
from kvspray_vllm.settings import Settings

X = bytes.fromhex(XFER)


def hash_of(n: int) -> bytes:
    return fake_hash(range(n), "", "", [])


def declined(e: Engine) -> list[tuple[bytes, bytes, str]]:
    return [d[:3] for d in e.scheduler_shim.declined]


def table(e: Engine, req: str) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (e.tables[req],))


@pytest.mark.parametrize("kv", [prefill_first(), concurrent()])
@pytest.mark.parametrize("asked", [False, True])
def test_an_abort_before_allocation(e: Engine, kv: dict[str, Any], asked: bool) -> None:
    r = e.add("r", 40, kv)
    if asked:
        e.scheduler.matched(r, 0)
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)
    assert (
        declined(e) == [(X, hash_of(40), "p:1")]
        and "FINISHED_ABORTED" in e.scheduler_shim.declined[0][3]
    )
    e.finish("r", "FINISHED_ABORTED")
    assert len(e.scheduler_shim.declined) == 1


@pytest.mark.parametrize("computed", [0, 32])
def test_a_prompt_of_which_the_engine_takes_nothing(e: Engine, computed: int) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.matched(r, computed)
    e.scheduler.allocated(r, table(e, "r"), 0)
    assert declined(e) == [(X, hash_of(40), "p:1")]
    assert not e.meta().expects and e.scheduler_shim.loads == []
    e.finish("r")
    assert len(e.scheduler_shim.declined) == 1


def test_a_prompt_that_the_engine_has_is_no_refusal(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    assert e.scheduler.matched(r, 40) == (0, False)
    e.scheduler.allocated(r, table(e, "r"), 0)
    assert declined(e) == [(X, hash_of(40), "p:1")] and e.scheduler.take_stats() is None


def test_a_load_is_not_declined_but_cancelled(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.matched(r, 0)
    assert e.scheduler_shim.loads == []
    e.scheduler.allocated(r, table(e, "r"), 40)
    assert e.scheduler_shim.loads == [(X, hash_of(40))], "its query ends with its sidecar"
    e.step()
    assert e.finish("r", "FINISHED_ABORTED") == (False, None) and e.scheduler.pending_push_work()
    e.step()
    assert ("cancel", 1) in e.worker_shim.take() and declined(e) == []
    e.worker_shim.end(1, received=True, status=shim.CANCELLED)
    assert e.step().received == {"r"} and not e.scheduler.pending_push_work()


def test_an_admission_that_does_not_come_in_time(e: Engine) -> None:
    r = e.add("r", 40, concurrent())
    assert e.scheduler.matched(r, 0) == (None, False)
    e.clock += 11
    assert e.scheduler.matched(r, 0) == (0, False)
    assert declined(e) == [(X, hash_of(40), "p:1")]


def test_a_request_that_the_front_end_refused(e: Engine) -> None:
    """vLLM makes one without its prompt, so that every prompt of the transfer is meant, for each of
    its samples."""
    for i, (kv, want) in enumerate(
        (
            (prefill_first(), 1),
            (prefill_first(fanout=3), 3),
            ({"do_remote_decode": True}, 0),
            ({"do_remote_prefill": True}, 0),
        )
    ):
        r = Request(
            request_id=f"r{i}", prompt_token_ids=[0], num_prompt_tokens=1, kv_transfer_params=kv,
            abort_immediately=True,
            status=SimpleNamespace(name="FINISHED_ABORTED"),
        )  # fmt: skip
        e.scheduler_shim.declined.clear()
        e.scheduler.on_new_request(r)  # type: ignore[arg-type]
        assert e.scheduler.finished(r, ((),)) == (False, None)  # type: ignore[arg-type]
        assert declined(e) == [(X, EVERY_PROMPT, "p:1")] * want


def test_requests_that_a_paused_engine_refuses(e: Engine) -> None:
    """vLLM 0.33 refuses each sample and each prompt separately. An earlier sample keeps its place
    at the prefill."""
    allocated(e, "first", prefill_first(fanout=3))
    for req, n in (("second", 40), ("third", 40), ("other prompt", 20)):
        e.add(req, n, prefill_first(fanout=3), abort_immediately=True)
        assert e.finish(req, "FINISHED_ABORTED") == (False, None)
    assert declined(e) == [(X, hash_of(n), "p:1") for n in (40, 40, 20)]
    assert e.scheduler_shim.withdrawn == 0 and len(e.scheduler_shim.asked) == 1
    for kv in (dict(DECODE), {"do_remote_decode": True, "do_remote_prefill": True}, {"kvspray": 1}):
        e.add("offers", 40, kv, abort_immediately=True)
        e.finish("offers", "FINISHED_ABORTED")
    assert len(e.scheduler_shim.declined) == 3


def test_a_request_that_comes_while_the_sidecar_is_away(e: Engine) -> None:
    """The shim keeps the decline for the next sidecar."""
    e.scheduler_shim.connected = False
    r = e.add("r", 40, prefill_first())
    assert declined(e) == [(X, hash_of(40), "p:1")] and e.scheduler_shim.withdrawn == 0
    assert e.scheduler.matched(r, 0) == (0, False)
    e.finish("r")
    assert len(e.scheduler_shim.declined) == 1


def test_a_role_that_receives_nothing(e: Engine) -> None:
    e.scheduler = SchedulerSide(
        Settings(), e.scheduler_shim, [BLOCK], "engine", fake_hash, LOG, role="kv_producer"
    )
    e.add("r", 40, prefill_first())
    assert declined(e) == [(X, hash_of(40), "p:1")]


def test_a_router_releases_a_transfer(e: Engine) -> None:
    """By a request of one token: every prompt of the transfer, and every sample, is given up, and
    nothing is asked for or offered."""
    e.scheduler = SchedulerSide(
        Settings(), e.scheduler_shim, [BLOCK], "engine", fake_hash, LOG, role="kv_producer"
    )
    kv = prefill_first(fanout=2)
    kv["kvspray"]["release"] = True
    kv["do_remote_decode"] = False
    r = e.add("r", 1, kv)
    assert declined(e) == [(X, EVERY_PROMPT, "p:1")] * 2
    assert e.scheduler.matched(r, 0) == (0, False)
    assert e.finish("r") == (False, None)
    assert len(e.scheduler_shim.declined) == 2 and e.scheduler_shim.asked == []


def allocated(e: Engine, req: str, kv: dict[str, Any]) -> None:
    r = e.add(req, 40, kv)
    e.scheduler.matched(r, 0)
    e.scheduler.allocated(r, table(e, req), 40)


@pytest.mark.parametrize("why", ["no room", "leaves", "no mark"])
def test_a_load_that_no_sidecar_gets(e: Engine, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many leases, a full ring, an engine that left: no sidecar can inform the prefill."""
    allocated(e, "r", prefill_first())
    if why == "no room":
        e.worker_shim.down = True
    elif why == "leaves":
        e.worker.leave("it sleeps")
    else:
        monkeypatch.setattr(e.worker._signals, "mark", lambda: None)
    done = e.step()
    assert done.received == done.failed == {"r"}
    assert declined(e) == [(X, hash_of(40), "p:1")] and e.scheduler_shim.withdrawn == 0
    e.finish("r", "FINISHED_ABORTED")
    e.step()
    assert len(e.scheduler_shim.declined) == 1 and not e.scheduler.pending_push_work()


def test_one_sample_of_two_that_no_sidecar_gets(e: Engine) -> None:
    """The other one keeps its place at the prefill, and its query."""
    allocated(e, "r", prefill_first(fanout=2))
    e.step()
    allocated(e, "s", prefill_first(fanout=2))
    e.worker_shim.down = True
    assert e.step().received == {"s"}
    assert declined(e) == [(X, hash_of(40), "p:1")] and e.scheduler_shim.withdrawn == 0
    e.worker_shim.end(1, received=True)
    assert e.step().received == {"r"} and len(e.scheduler_shim.declined) == 1


def test_a_load_that_the_scheduler_refuses_is_declined_once(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.matched(r, 0)
    e.tables["r"] = e.tables["r"][:2]
    e.scheduler.allocated(r, table(e, "r"), 32)
    assert e.step().received == {"r"} and len(e.scheduler_shim.declined) == 1


def test_ranks_of_which_some_ask(e: Engine) -> None:
    """Each rank that asks no sidecar is declined once, as soon as it reports that; the others keep
    their places at the prefill. vLLM may pass a report on twice, and aggregates those of a step."""
    e.scheduler = SchedulerSide(
        Settings(),
        e.scheduler_shim,
        [BLOCK],
        "engine",
        fake_hash,
        LOG,
        tp_size=4,
    )
    for ranks in (range(1), range(3), range(4)):
        allocated(e, "r", prefill_first())
        e.scheduler_shim.declined.clear()
        e.scheduler_shim.decliners.clear()
        reports = [Landed(unasked={"r": {rank: f"no room {rank}"}}) for rank in ranks]
        e.scheduler.worker_reported((), (), reports[0])
        assert e.scheduler_shim.declined == [(X, hash_of(40), "p:1", "not loaded: no room 0")]
        e.scheduler.worker_reported((), {"r"}, functools.reduce(Landed.aggregate, reports))
        e.scheduler.worker_reported((), {"r"}, reports[0])
        rest = [("r", tuple(ranks)[1:])] if len(ranks) > 1 else []
        assert e.scheduler_shim.decliners == [("r", (0,)), *rest]
        assert e.scheduler_shim.withdrawn == 0
        assert not e.scheduler._unasked and not e.scheduler._loading
        e.finish("r")
