"""How long the two sides wait for each other: holds of a prefill engine, silent loads of a decode
engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fakes import DECODE, Engine, FakePool, concurrent, e, prefill_first

from kvspray_vllm.patience import MEASURED_TOKENS, NEWEST, STALL_MIN_S, STALL_UNKNOWN_S, Patience


def held(e: Engine, req: str) -> None:
    e.add(req, 40, dict(DECODE))
    e.step({req: 40})
    assert e.finish(req)[0]
    e.step()


def test_a_full_pool_ends_the_longest_hold_that_is_older_than_the_match_timeout(e: Engine) -> None:
    pool = FakePool()
    e.scheduler.set_pool(pool)  # type: ignore[arg-type]
    for req in ("a", "b", "c"):
        held(e, req)
        e.clock += 4
    yielded = lambda: [c for c in e.worker_shim.take() if c[0] == "yield"]  # noqa: E731
    e.step()
    assert yielded() == [], "half of the pool is free"
    pool.free = pool.free[:19]
    e.step()
    assert yielded() == [("yield", 1)], "what is older than 10 s, of which one is enough"
    e.clock += 10
    pool.free = pool.free[:15]
    e.step()
    assert yielded() == [("yield", 2)], (
        "the three blocks of the first are counted, and it is asked once"
    )
    e.worker_shim.end(1, received=False)
    e.worker_shim.end(2, received=False)
    assert e.step().sent == {"a", "b"}
    pool.free = [SimpleNamespace(block_id=i) for i in range(100, 121)]
    e.step()
    assert yielded() == [] and list(e.scheduler._held) == ["c"]


def test_a_request_that_is_loaded_asks_although_its_prefill_is_done_and_needs_no_answer(
    e: Engine,
) -> None:
    e.scheduler_shim.full = True
    r = e.add("r", 40, prefill_first())
    assert e.scheduler.matched(r, 0) == (40, True) or e.scheduler.matched(r, 0) == (39, True)
    assert e.scheduler_shim.declined == []


def load(e: Engine, req: str, tokens: int, computed: int = 0) -> float:
    r = e.add(req, tokens, concurrent())
    e.scheduler_shim.answers[bytes.fromhex("ab" * 16)] = SimpleNamespace(state="admitted", why="")  # type: ignore[assignment]
    external, _ = e.scheduler.matched(r, computed)
    assert external
    table: Any = SimpleNamespace(get_block_ids=lambda: (e.tables[req],))
    e.scheduler.allocated(r, table, external)
    e.step()
    return e.worker_shim.stalls[req]


def test_a_load_waits_for_a_byte_as_long_as_this_engine_would_compute(e: Engine) -> None:
    assert load(e, "first", 2000) == STALL_UNKNOWN_S
    r = e.add("own", 1000, None)
    e.step({"own": 1000})
    e.clock += 2  # 2 ms for a token
    e.step({"own": 1})
    assert load(e, "early", 2000) == STALL_UNKNOWN_S, "it has no token yet"
    r.num_output_tokens = 1
    e.step({"own": 1})
    assert load(e, "long", 2000, 500) == 1500 * 0.002
    assert load(e, "short", 100) == STALL_MIN_S


def test_what_is_no_measure_of_a_prefill() -> None:
    p = Patience()
    token = SimpleNamespace(num_output_tokens=1)
    p.begins("short", token, MEASURED_TOKENS - 1, 0.0)
    p.begins("preempted", token, 1000, 0.0)
    p.forget("preempted")
    p.begins("aborted", SimpleNamespace(num_output_tokens=0), 1000, 0.0)
    p.ended("aborted", 1.0)
    p.ended("unknown", 1.0)
    p.look(100.0)
    assert p.stall_s(1000) == STALL_UNKNOWN_S
    p.begins("one token", token, 1000, 0.0)
    p.ended("one token", 1.0)
    assert p.stall_s(2000) == 2.0
    p.begins("slower", token, 1000, 0.0)
    p.look(3.0)
    assert p.stall_s(1000) == 1.0 + NEWEST * 2.0
