"""Loads from the node's store and saves to it, without an engine and without a sidecar."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import store_fakes
from fakes import prefill_first
from store_fakes import PAGE, Vllm, hash_of, namespace, puts

from kvspray.store import Found
from kvspray_vllm import pages, pins, shim
from kvspray_vllm.connector import KVSprayConnector
from kvspray_vllm.layout import Ranks, Unsupported
from kvspray_vllm.meta import StepMeta
from kvspray_vllm.params import MAX_PIN_S, NO_HINTS, hints_of
from kvspray_vllm.settings import Settings
from kvspray_vllm.store import ASK_S, MAX_ASKED, PIN_S

PROMPT = list(range(30))


def stats(v: Vllm) -> dict[str, int]:
    out: dict[str, int] = {}
    for side in (v.scheduler, *v.workers):
        s = side.take_stats()
        for name in ("store_pages", "store_lookups"):
            for k, n in (s.data[name] if s is not None else {}).items():
                out[k] = out.get(k, 0) + n
    return out


@pytest.fixture
def v() -> Vllm:
    return Vllm(blocks=60)


def test_a_prompt_is_saved_while_it_is_computed_and_its_answer_too(v: Vllm) -> None:
    v.add("r", PROMPT, answer=7)
    v.step()  # the worker names its pages
    v.step()
    assert not v.shims[0].calls, "the step that computes it is not over"
    v.step()
    assert puts(v) == 2  # of ten tokens
    v.drain()
    # 37 tokens, the last of which was never computed.
    assert v.check() == puts(v) == 9
    assert stats(v) == {"put/stored": 9, "none": 1}


def test_a_later_prompt_loads_what_vllm_has_not(v: Vllm) -> None:
    v.run("a", PROMPT)
    saved = puts(v)
    assert v.pool.clear()
    v.run("short", PROMPT[:10])  # with its answer three blocks
    v.add("b", PROMPT)
    meta, work = v.schedule()
    assert not work and [(e.skip, e.tokens, len(e.pages)) for e in meta.expects] == [(12, 28, 4)]
    v.queue.append((meta, work))
    assert v.scheduler.from_store("b") and not v.scheduler.from_store("a")
    v.drain()
    assert v.received == ["short", "b"] and puts(v) == saved, "what is there is not put again"
    assert stats(v)["get/memory"] == 2 + 4
    v.check()


def test_the_scheduler_never_waits(v: Vllm) -> None:
    v.run("a", PROMPT)
    v.pool.clear()
    v.store.silent = True
    r = v.add("b", PROMPT)
    assert v.scheduler.matched(r, 0) == (None, False)
    v.clock += ASK_S / 2
    assert v.scheduler.matched(r, 0) == (None, False)
    v.clock += ASK_S
    assert v.scheduler.matched(r, 0) == (0, False)
    v.store.silent = False
    assert v.scheduler.matched(r, 0) == (0, False), "it is computed, and stays so"
    assert v.store.ended == [1, 2], "no page stays pinned"
    assert stats(v)["late"] == 1


def test_an_answer_that_is_too_old_is_asked_for_again(v: Vllm) -> None:
    v.run("a", PROMPT)
    v.pool.clear()
    r = v.add("b", PROMPT)
    assert v.scheduler.matched(r, 0) == (28, True)
    v.clock += PIN_S + 1
    v.store.pages[0].clear()
    assert v.scheduler.matched(r, 0) == (0, False)
    assert v.store.ended == [1, 2]


@pytest.mark.parametrize("why", ["down", "refused", "opening"])
def test_without_a_store_prompts_are_computed(
    v: Vllm, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    v.run("a", PROMPT)
    v.pool.clear()
    v.store.up, v.store.opening = False, why == "opening"
    v.store.error = "store: namespace field seed" if why == "refused" else ""
    r = v.add("b", PROMPT)
    assert v.scheduler.matched(r, 0) == ((None, False) if why == "opening" else (0, False))
    assert ("refuses this engine's pages: store: namespace field seed" in caplog.text) == (
        why == "refused"
    )
    v.store.up = True
    assert v.scheduler.matched(r, 0) == ((28, True) if why == "opening" else (0, False))


def test_what_a_sidecar_that_restarts_has_forgotten_is_put_again(v: Vllm) -> None:
    v.run("a", PROMPT)
    before = puts(v)
    v.run("b", PROMPT)
    assert puts(v) == before
    v.store.pages[0].clear()
    v.store.session += 1
    v.store.silent = True
    v.add("c", PROMPT)
    v.clock += 2 * ASK_S
    v.drain()
    assert puts(v) == 2 * before and v.check() == before


def test_what_the_store_has_given_up_is_put_again(v: Vllm) -> None:
    v.run("a", PROMPT)
    before = puts(v)
    del v.store.pages[0][("w0", hash_of(PROMPT[:PAGE]))]
    v.run("b", PROMPT)
    assert puts(v) == before + 1 and v.check() == before


def test_pages_that_are_gone_when_they_are_loaded_are_computed_and_put_again(v: Vllm) -> None:
    v.run("a", PROMPT)
    before = puts(v)
    v.pool.clear()
    r = v.add("b", PROMPT)
    v.queue.append(v.schedule())
    del v.store.pages[0][("w0", hash_of(PROMPT[: 3 * PAGE]))]
    v.drain()
    assert r.num_computed_tokens and v.check() == before
    # From the page that was missing on; those behind it were there.
    assert stats(v) == {
        "put/stored": before + 1,
        "put/existed": before - 2,
        "get/memory": 6,
        "get/miss": 1,
        "none": 1,
        "found": 1,
    }


@pytest.mark.parametrize("byte", [0, 12, 15 | 1 << 4])
def test_a_page_whose_outcome_is_not_known_is_computed(
    v: Vllm, byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not reached, or an outcome of a later release."""
    v.run("a", PROMPT)
    before = puts(v)
    v.pool.clear()
    v.add("b", PROMPT)
    v.queue.append(v.schedule())
    del v.store.pages[0][("w0", hash_of(PROMPT[: 3 * PAGE]))]
    monkeypatch.setattr(store_fakes, "MISS", byte)
    v.drain()
    assert v.check() == before, "it is put again"
    assert stats(v)["get/unknown"] == 1


def test_the_tier_of_a_hit_is_a_label_and_nothing_else() -> None:
    hits = [1 | tier << 4 for tier in range(8)]
    assert [shim.page_outcome(h) for h in hits[:5]] == [
        "unknown",
        "memory",
        "disk",
        "object",
        "peer",
    ]
    assert shim.leading_hits(bytes(hits)) == 8 and shim.leading_hits(bytes([1, 0x11, 0, 1])) == 2


def test_blocks_stay_until_every_rank_has_ended_its_put() -> None:
    v = Vllm(ranks=2)
    v.add("a", PROMPT[:8], answer=1)
    r = v.requests["a"]
    for _ in range(3):
        v.queue.append(v.schedule())
        v.execute()
    blocks = r.table or [v.pool.blocks[i] for i in v.shims[0].leases_open[1][3]]
    assert "a" not in v.requests and [b.ref_cnt for b in blocks] == [1, 1]
    assert v.scheduler.pending_push_work()
    v.shims[0].finish(1)
    v.queue.append(v.schedule())
    v.execute()
    assert [b.ref_cnt for b in blocks] == [1, 1]
    v.shims[1].finish(1)
    v.queue.append(v.schedule())
    v.execute()
    assert [b.ref_cnt for b in blocks] == [0, 0] and not v.scheduler.pending_push_work()


def test_a_prefix_counts_only_if_all_ranks_have_it() -> None:
    v = Vllm(ranks=2)
    v.run("a", PROMPT)
    v.pool.clear()
    del v.store.pages[1][("w0", hash_of(PROMPT[: 3 * PAGE]))]
    r = v.add("b", PROMPT)
    assert v.scheduler.matched(r, 0) == (2 * PAGE, True)


def test_puts_hold_no_more_than_their_share_of_the_pool() -> None:
    v = Vllm(blocks=60, budget=200)
    v.add("a", list(range(150)), answer=2)
    for _ in range(4):
        v.queue.append(v.schedule())
        v.execute()
    assert sum(len(x[3]) for x in v.shims[0].leases_open.values()) == 15
    v.drain()
    v.check()


def test_a_put_that_cannot_be_submitted_holds_nothing(v: Vllm) -> None:
    v.shims[0].down = True
    v.run("a", PROMPT)
    assert all(b.ref_cnt == 0 for b in v.pool.blocks[1:]) and not v.store.pages[0]
    v.shims[0].down = False
    v.run("b", PROMPT)
    assert v.check() == 8, "nothing is remembered as saved"


def test_abort_while_loading_saves_nothing(v: Vllm) -> None:
    v.run("a", PROMPT)
    v.pool.clear()
    saved = v.check()
    r = v.add("b", PROMPT)
    v.queue.append(v.schedule())
    v.execute()
    assert r.num_computed_tokens == 28, "as if it was computed"
    del v.store.pages[0][("w0", hash_of(PROMPT[: 7 * PAGE]))]
    v.store.session += 1  # nothing counts as saved
    v.finish(r, "FINISHED_ABORTED")
    v.drain()
    assert v.check() == saved - 1 and v.received == ["b"]
    assert v.shims[0].calls[-1][0] == "cancel"


def test_blocks_that_a_preempted_request_gets_are_saved_a_step_later(v: Vllm) -> None:
    """Another connector may load them in the step that computes on them, and report afterwards that
    it could not."""
    r = v.add("a", PROMPT, answer=30)
    for _ in range(3):
        v.step()
    assert r.num_computed_tokens == 20 and puts(v) == 2
    table = [b.block_id for b in r.table]
    for preempted, want in (({"a"}, 0), (set(), 3)):
        out = SimpleNamespace(
            num_scheduled_tokens={"a": 1}, preempted_req_ids=preempted, scheduled_new_reqs=[]
        )
        meta = StepMeta()
        v.side.build(out, lambda _: (table,), meta)  # type: ignore[arg-type]
        assert sum(len(p.blocks) for p in meta.puts) == want


def test_a_request_that_a_peer_prefills_does_not_ask_until_that_has_failed(v: Vllm) -> None:
    v.run("a", PROMPT)
    v.pool.clear()
    r = v.add("x", PROMPT)
    v.waiting.clear()
    r.kv_transfer_params, r.request_id = prefill_first(), "d"
    asked = len(v.store.asked)
    v.scheduler.on_new_request(r)
    assert v.scheduler.matched(r, 0) == (30, True) and len(v.store.asked) == asked
    v.client.connected = False
    assert v.scheduler.matched(r, 0) == (28, True)


def test_other_weights_have_other_pages(v: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    v.run("a", PROMPT)
    v.change_weights("w1")
    v.run("b", PROMPT)
    v.run("c", PROMPT)
    assert {w for w, _ in v.store.pages[0]} == {"w0", "w1"} and "was not emptied" not in caplog.text
    v.change_weights("w2", clear=False)
    v.run("d", PROMPT)
    assert "was not emptied" in caplog.text and {w for w, _ in v.store.pages[0]} == {"w0", "w1"}
    assert v.pool.clear()
    v.scheduler.reset()
    v.run("e", PROMPT)
    assert {w for w, _ in v.store.pages[0]} == {"w0", "w1", "w2"}
    v.check()


def test_adapters_and_resumable_requests_are_left_alone(v: Vllm) -> None:
    v.run("a", PROMPT, resumable=True)
    assert puts(v) == 0 and not v.store.asked
    r = SimpleNamespace(
        **{
            **vars(v.add("x", PROMPT)),
            "lora_request": SimpleNamespace(lora_int_id=1, lora_name="l", lora_path="/nowhere"),
        }
    )
    asked = len(v.store.asked)
    v.side.arrived(r, True)
    assert len(v.store.asked) == asked


def test_where_too_much_is_pinned_the_question_is_asked_without_pins() -> None:
    asked: list[float] = []

    class Exists:
        def __init__(self, pin_s: float) -> None:
            asked.append(pin_s)
            self.refused = pin_s > 0

        def result(self) -> Any:
            return Found(2, b"\0" if self.refused else b"\3")

    q = shim._Question(Exists, 5.0)  # type: ignore[arg-type]
    assert q.answer() == [True, True] and q.answer() == [True, True] and asked == [5.0, 0]


def test_questions_are_bounded(v: Vllm) -> None:
    v.run("a", PROMPT)
    v.add("b", list(range(PAGE * (MAX_ASKED + 3))))
    assert v.store.asked[-1] == MAX_ASKED
    v.add("c", [1, 2, 3, 4])
    assert v.store.asked[-1] == MAX_ASKED, "the last token is always computed"


# ---- hints


def pinned(seconds: float, **more: Any) -> dict[str, Any]:
    return {"kvspray": {"v": 1, "fanout": 1, "pin": True, "ttl": seconds, **more}}


def pins_of(v: Vllm) -> dict[str, int]:
    s = v.scheduler.take_stats()
    return s.data["store_pins"] if s is not None else {}


def held(v: Vllm) -> list[int]:
    return [len(p.hashes) for p in v.store.pins if not p.ended]


def test_a_pin_begins_when_the_pages_of_the_answer_are_there(v: Vllm) -> None:
    r = v.add("r", PROMPT, answer=7, params=pinned(300))
    while r.request_id in v.requests and r.status.name == "WAITING":
        v.step()
    assert not v.store.pins, "its last PUT has not ended"
    v.drain()
    assert [(len(p.hashes), p.there, p.pin_s) for p in v.store.pins] == [(9, 9, 300)]
    v.run("x", [1, 2])
    assert pins_of(v) == {"held": 1}
    v.clock += 299
    v.run("y", [3, 4])
    assert held(v) == [9]
    v.clock += 1
    v.run("z", [5, 6])
    assert held(v) == [] and len(v.side._pins) == 0


def test_the_next_turn_replaces_the_pin_of_the_one_before(v: Vllm) -> None:
    v.add("a", PROMPT, params=pinned(300))
    v.drain()
    v.add("b", [*PROMPT, 30, 31, 32, *range(100, 107)], params=pinned(300))
    v.drain()
    assert len(v.store.pins) == 2
    v.run("x", [1, 2])
    assert held(v) == [10], "of the conversation, once"
    v.add("other", PROMPT[5:], params=pinned(300))
    v.drain()
    assert held(v) == [10, 6]


def test_a_pin_does_not_end_one_that_lasts_longer(v: Vllm) -> None:
    v.add("a", PROMPT, params=pinned(300))
    v.drain()
    for name, answer in ("b", 7), ("c", 1):  # of another client, whose prompt begins alike
        v.add(name, [*PROMPT, 30, 31, 32][: 29 + answer], answer=answer, params=pinned(5))
        v.drain()
    v.clock += 6
    v.run("x", [1, 2])
    assert [p.pin_s for p in v.store.pins if not p.ended] == [300]


def test_a_pin_that_another_one_has_just_replaced_is_left_alone() -> None:
    class Asked:
        refused = ""

        def __init__(self) -> None:
            self.there: int | None = None

        def pages(self) -> int | None:
            return self.there

        def end(self) -> None:
            self.there = 0  # as of a question that is forgotten

    asked: list[Asked] = []
    counts: list[str] = []
    side = pins.Pins(
        lambda hashes, ttl: asked.append(Asked()) or asked[-1],  # type: ignore[func-returns-value]
        counts.append, logging.getLogger("test"), lambda: 7.0,
    )  # fmt: skip
    side.add("turn 1", (b"1",), 60, set())
    side.add("turn 2", (b"1", b"2"), 60, set())
    side.add("turn 1 again", (b"1",), 60, set())
    asked[1].there = 2
    side.look()
    assert counts == ["held"] and len(side) == 1


def test_a_pin_that_the_sidecar_refuses_is_named(v: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    v.store.refusal = "9 bytes of this tenant would be pinned"
    for name in "ab":
        v.add(name, [*PROMPT, ord(name)], params=pinned(300))
        v.drain()
    v.run("x", [1, 2])
    assert pins_of(v) == {"refused": 2} and len(v.side._pins) == 0
    (line,) = [r.getMessage() for r in caplog.records if "not pinned" in r.getMessage()]
    assert v.store.refusal in line and "request a" in line


def test_pins_of_an_engine_are_bounded(v: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 2)
    for i in range(3):
        v.add(f"r{i}", [i, *PROMPT], params=pinned(60 + i))
        v.drain()
    v.run("x", [1, 2])
    assert held(v) == [8, 8] and pins_of(v) == {"held": 2, "full": 1}
    v.clock += 60
    v.add("r3", [3, *PROMPT], params=pinned(60))
    v.drain()
    assert held(v) == [8, 8]


def test_pins_end_with_the_weights_and_with_the_session(v: Vllm) -> None:
    v.add("a", PROMPT, params=pinned(300))
    v.drain()
    v.store.session += 1
    v.run("x", [1, 2])
    assert held(v) == [] and len(v.side._pins) == 0
    v.add("b", PROMPT, params=pinned(300))
    v.drain()
    assert len(held(v)) == 1
    v.change_weights("w1")
    v.run("y", [1, 2])
    assert held(v) == [] and len(v.side._pins) == 0


@pytest.mark.parametrize(
    "hint",
    [
        None, 3, {}, {"kvspray": 3}, {"kvspray": {"v": 2, "pin": True, "ttl": 9}}, pinned(0),
        pinned(-1), pinned(float("nan")), pinned(float("inf")),
        {"kvspray": {"v": 1, "pin": True, "ttl": True}},
        {"kvspray": {"v": 1, "pin": 1, "ttl": 9}}, {"kvspray": {"v": 1, "pin": True, "ttl": "9"}},
        {"kvspray": {"v": 1, "load": -1}}, {"kvspray": {"v": 1, "load": True}},
        {"kvspray": {"v": 1, "load": 1.5}}, {"kvspray": {"v": 1, "unknown": {"pin": True}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_hint_that_cannot_be_used_is_left_out(hint: Any) -> None:
    assert hints_of(hint) == NO_HINTS


def test_a_pin_is_no_longer_than_the_bound() -> None:
    assert hints_of(pinned(10**400)).pin_s == MAX_PIN_S, "more than a float can be"


def test_a_router_bounds_what_is_loaded(v: Vllm) -> None:
    v.run("a", PROMPT)
    for load, want in ((17, 4), (16, 4), (10**9, 7), (None, 7)):
        assert v.pool.clear()
        v.add(f"load {load}", PROMPT, params={"kvspray": {"v": 1, "load": load}})
        meta, _ = v.schedule()
        assert [len(e.pages) for e in meta.expects] == [want], load
        v.queue.append((meta, []))
        v.execute()
        v.drain()
    assert v.pool.clear()
    asked = len(v.store.asked)
    v.add("none", PROMPT, params={"kvspray": {"v": 1, "load": 0}})
    v.drain()
    assert len(v.store.asked) == asked, "the store is not asked at all"


# ---- recurrent states


def states_of(v: Vllm) -> dict[int, list[bytes]]:
    """The names of the states in the store, by the number of tokens that they are of."""
    out: dict[int, list[bytes]] = {}
    for (_, name), content in v.store.pages[0].items():
        if content[2:]:
            out.setdefault(len(content[1]), []).append(name)
    return out


def with_states() -> Vllm:
    """An engine with two groups of states, and an empty cache, that has saved the prompt."""
    v = Vllm(blocks=120, states=2)
    v.run("a", PROMPT)
    assert v.pool.clear()
    return v


def test_states_that_vllm_keeps_are_saved() -> None:
    v = with_states()
    # At the ends of its steps that are those of blocks.
    assert {n: len(names) for n, names in states_of(v).items()} == {
        8: 2,
        16: 2,
        24: 2,
        28: 2,
        32: 2,
    }
    assert v.check() == 8 + 5 * 2
    saved = puts(v)
    v.run("b", PROMPT)
    assert puts(v) == saved, "what is there is not put again"


def test_a_state_whose_block_has_another_hash_is_not_saved() -> None:
    v = Vllm(blocks=120, states=2)
    cache = v.pool.cache
    v.pool.cache = lambda block, hash: cache(block, hash) if len(hash) == 32 else None  # type: ignore[method-assign]
    v.run("a", PROMPT)
    assert v.check() == 8 and not states_of(v)


@pytest.mark.parametrize(("gone", "blocks"), [((), 7), ((28,), 6), ((24, 28), 4)])
def test_a_load_ends_where_all_states_are_there(gone: tuple[int, ...], blocks: int) -> None:
    v = with_states()
    for n in gone:
        del v.store.pages[0]["w0", states_of(v)[n][1]]
    v.add("b", PROMPT)
    meta, work = v.schedule()
    (expect,) = meta.expects
    assert not work and (expect.skip, expect.tokens) == (0, blocks * PAGE)
    assert len(expect.pages) == len(set(expect.blocks[0])) == blocks + 2
    v.queue.append((meta, work))
    v.drain()
    assert v.received == ["b"] and v.check()


def test_without_states_nothing_is_loaded() -> None:
    v = with_states()
    for names in states_of(v).values():
        del v.store.pages[0]["w0", names[0]]
    assert v.scheduler.matched(v.add("b", PROMPT), 0) == (0, False)


@pytest.mark.parametrize(
    ("external", "state", "want"),
    [(28, 21, ""), (24, 21, "24 of 28 tokens"), (28, 0, r"blocks \(20, 0\)"), (28, 20, "20, 20")],
)
def test_a_load_without_a_place_for_each_state_is_refused(
    external: int, state: int, want: str
) -> None:
    v = with_states()
    r = v.add("b", PROMPT)
    assert v.scheduler.matched(r, 0) == (28, True)
    end = external // PAGE
    tables = (range(1, 9), (0,) * (end - 1) + (20,), (0,) * (end - 1) + (state,))
    expect = v.side.allocated(r, tables, external)
    assert expect is not None and bool(expect.refused) == bool(want)
    assert re.search(want, expect.refused)


# ---- refusals at the start, and what identifies pages


def config(**more: Any) -> Any:
    values = {
        "kv_role": "kv_both", "policy": "recompute", "device": "cpu", "pp": 1,
        "algorithm": "sha256", "spec": None, **more,
    }  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=values["kv_role"], kv_load_failure_policy=values["policy"]
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["pp"]),
        device_config=SimpleNamespace(device_type=values["device"]),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=values["algorithm"]),
        speculative_config=values["spec"] and SimpleNamespace(method=values["spec"]),
    )


def one_group(n: int = 1) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace())] * n)


@pytest.mark.parametrize(
    ("change", "groups", "want"),
    [
        ({"kv_role": "kv_consumer"}, 1, "kv_role kv_consumer.*set kv_both"),
        ({"policy": "fail"}, 1, "kv_load_failure_policy fail.*set recompute"),
        ({"device": "xpu"}, 1, "device is xpu"),
        ({}, 2, r"2 cache group\(s\)"),
        ({"pp": 2}, 1, "pipeline_parallel_size 2"),
        ({"spec": "eagle"}, 1, "method eagle"),
        (
            {"algorithm": "xxhash"},
            1,
            "prefix_caching_hash_algo xxhash, and PYTHONHASHSEED is not set.*sha256_cbor",
        ),
    ],
)
def test_what_the_store_does_not_serve_is_refused_by_name(
    change: Any, groups: int, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    pages.check_store(config(), one_group())
    with pytest.raises(Unsupported, match=want):
        pages.check_store(config(**change), one_group(groups))


def test_seeds_tell_hashes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seen.add(pages.hash_seed("sha256"))
    for seed in ("0", "1", "", "x" * 1000):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        for algorithm in ("sha256", "xxhash"):
            seen.add(pages.hash_seed(algorithm))
    assert len(seen) == 5 and all(0 < len(s) <= 128 for s in seen)


def group(**params: int) -> dict[str, Any]:
    layers = [
        {"name": n, "index": i, "region": 0, "base": base, "block_stride": 100, "page_bytes": 96}
        for i, (n, base) in enumerate((("a", 0), ("b", 4096)))
    ]
    return {
        "tokens_per_block": 16,
        "strategy": "packed_hnd",
        "params": {"heads": 2, **params},
        "num_blocks": 8,
        "layers": layers,
    }


def test_a_page_is_all_layers_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    shared = group()
    # A layer that uses another's memory.
    shared["layers"].append({**shared["layers"][0], "name": "c"})
    assert pages.pieces_of([shared]) == [(0, 0, 100, 96), (0, 4096, 100, 96)]
    with pytest.raises(Unsupported, match="VLLM_KV_CACHE_LAYOUT"):
        pages.pieces_of([group(row_stride=3, head_stride=5)])
    identity = {"weights": "w", "cache_dtype": "auto", "dtype": "bfloat16", "rope": "r"}

    def of(identity: Any = identity, groups: Any = None, ranks: Ranks = Ranks()) -> shim.Namespace:  # noqa: B008
        return pages.namespace_of(config(), identity, groups or [group()], ranks)

    assert (of().page_bytes, of().page_tokens, of().dtype, of().algorithm, of().seed) == (
        192,
        16,
        "bfloat16",
        "vllm-sha256",
        "PYTHONHASHSEED=0",
    )
    different = {of(), of({**identity, "weights": "x"}), of({**identity, "rope": "x"}),
        of(groups=[group(dim=3)]), of(ranks=Ranks(0, 1, 1, 2)), of(ranks=Ranks(0, 1, 0, 2)),
        of(groups=[shared])}  # fmt: skip
    assert len(different) == 7
    with pytest.raises(
        Unsupported, match="the name of the weights is empty.*give set_weights a name"
    ):
        of({**identity, "weights": ""})


def test_weights_without_a_name_turn_the_store_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """set_weights may get an empty name, and must not end vLLM's load."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    asked: list[Any] = []
    saving = SimpleNamespace(set=lambda namespace, why="": asked.append((namespace, why)))
    identity = {"weights": "", "cache_dtype": "auto", "dtype": "bfloat16"}
    c = SimpleNamespace(
        _saving=saving,
        _regions=[object()],
        _vllm_config=config(),
        _layout={"identity": identity, "groups": [group()]},
        _ranks=Ranks(),
    )
    KVSprayConnector._open_store(c)  # type: ignore[arg-type]
    identity["weights"] = "step-1"
    KVSprayConnector._open_store(c)  # type: ignore[arg-type]
    (off, why), (on, _) = asked
    assert (
        off is None
        and "name of the weights is empty" in why
        and why in caplog.text
        and on.weights == "step-1"
    )


def test_the_setting_is_a_boolean() -> None:
    assert not Settings.parse({}).store and Settings.parse({"store": True}).store
    with pytest.raises(ValueError, match=r"\['store'\] is 'yes', want true or false"):
        Settings.parse({"store": "yes"})


def test_a_pool_that_lacks_something_turns_the_store_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    v = Vllm()
    v.side.set_pool(SimpleNamespace(touch=None))
    assert (
        "block pool has no free_blocks, get_num_free_blocks, blocks, num_gpu_blocks" in caplog.text
    )
    v.run("a", PROMPT)
    assert not v.store.pages[0] and not v.store.asked


def test_a_change_of_weights_closes_what_was_open() -> None:
    v = Vllm(ranks=8)
    for i in range(200):
        v.change_weights(f"w{i + 1}")
        v.run(f"r{i}", PROMPT[: 2 * PAGE])
        assert (
            len(v.store.opened) == 1
            and [[p.weights for p in s.opened] for s in v.shims] == [[v.weights]] * 8
        )
    v.check()


def test_weights_without_a_name_and_then_with_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    v = Vllm(blocks=40, budget=64)
    v.run("a", list(range(40)), answer=1)

    def change(name: str, space: Any, why: str = "") -> None:
        v.savings[0].set(space, why)
        v.workers[0].outdate()
        v.weights = name
        assert v.pool.clear()
        v.scheduler.reset()

    change("w1", None, "the name of the weights is empty")
    before = puts(v)
    v.run("b", list(range(100, 140)), answer=1)
    assert (
        puts(v) == before
        and "does not use the store: the name of the weights is empty" in caplog.text
    )
    change("w2", namespace("w2"))
    v.run("c", list(range(200, 240)), answer=1)
    v.run("d", list(range(300, 340)), answer=1)
    assert puts(v) > before and "uses the store again" in caplog.text


def test_a_reset_is_not_reported_as_done(v: Vllm) -> None:
    """Pages that were saved before are loaded afterwards."""
    v.run("a", PROMPT)
    assert v.pool.clear()
    assert not v.scheduler.reset()
    got = len(v.received)
    v.run("b", PROMPT)
    assert len(v.received) > got
    c = object.__new__(KVSprayConnector)
    c._scheduler = v.scheduler
    assert c.reset_cache() is None
