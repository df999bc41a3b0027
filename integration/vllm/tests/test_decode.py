"""The decode side of the connector, and sliding windows on both sides."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import (
    BLOCK,
    DECODE,
    LOG,
    XFER,
    Engine,
    FakeScheduler,
    FakeWorker,
    Request,
    concurrent,
    e,
    fake_hash,
    prefill_first,
)

import kvspray
from kvspray_vllm import shim
from kvspray_vllm.meta import StepMeta
from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.worker import WorkerSide

# ---- decode


def blocks(e: Engine, req: str) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (e.tables[req],))


def test_prefill_first_loads_what_is_missing(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    assert e.scheduler.matched(r, 16) == (24, True)
    assert e.scheduler_shim.asked == [(bytes.fromhex(XFER), "p:1")], (
        "the prefill engine holds the blocks on for it"
    )
    e.scheduler.allocated(r, blocks(e, "r"), 24)
    # vLLM asks again after a prompt of one token, or a failed load.
    assert e.scheduler.matched(r, 0) == (0, False)
    assert not r.kv_transfer_params["do_remote_prefill"]
    e.step()
    assert e.worker_shim.take() == [("expect", 1, "r", "p:1", 40, 16, ((1, 2, 3),))]
    e.worker_shim.end(1, received=True)
    done = e.step()
    assert done.received == {"r"} and done.failed == set()


@pytest.mark.parametrize("priority, want", [(0, 0), (-5, 0), (1, 1), (2, 2), (10**30, 2)], ids=str)
def test_the_priority_of_a_request_is_the_class_of_its_transfer(
    e: Engine, priority: int, want: int
) -> None:
    r = e.add("r", 40, prefill_first())
    r.priority = priority
    assert e.scheduler.matched(r, 16) == (24, True)
    e.scheduler.allocated(r, blocks(e, "r"), 24)
    e.step()
    assert e.worker_shim.priorities == {"r": want}


def test_nothing_is_asked_for_a_request_that_was_refused_before_the_engine(e: Engine) -> None:
    r = Request(
        request_id="r", prompt_token_ids=[0], num_prompt_tokens=1, num_computed_tokens=0,
        kv_transfer_params=concurrent(), abort_immediately=True,
        status=SimpleNamespace(name="FINISHED_ABORTED"),
    )  # fmt: skip
    # A model whose last token moves, too: the one token that vLLM puts there would be a prompt.
    e.scheduler._backoff = 0
    e.scheduler.on_new_request(r)  # type: ignore[arg-type]
    assert e.scheduler_shim.asked == []
    assert e.scheduler.finished(r, ((),)) == (False, None)  # type: ignore[arg-type]
    r.abort_immediately = False
    e.scheduler.on_new_request(r)  # type: ignore[arg-type]
    assert e.scheduler_shim.asked == [(bytes.fromhex(XFER), "p:1")]


def test_a_question_that_cannot_be_asked_means_local_prefill(e: Engine) -> None:
    e.scheduler_shim.full = True
    r = e.add("r", 40, concurrent())
    assert e.scheduler.matched(r, 0) == (0, False)
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"not_asked": 1}


def test_the_real_scheduler_shim_says_what_it_cannot_ask(tmp_path: pathlib.Path) -> None:
    c = shim.Scheduler(str(tmp_path / "nobody"), "e", LOG)
    with pytest.raises(shim.ShimError):
        c.await_admission(bytes(16), bytes(32), "\u00e9" * 200 + ":1", 1, 1.0)
    with pytest.raises(shim.ShimError):
        c.await_admission(bytes(16), bytes(32), "a:1\0b:1", 1, 1.0)
    c.await_admission(bytes(16), bytes(32), "a:1", 1, 1.0)
    c.close()
    with pytest.raises(shim.ShimError):
        c.await_admission(bytes(16), bytes(32), "a:1", 1, 1.0)


@pytest.mark.parametrize("kv", [dict(DECODE), prefill_first()])
def test_a_prompt_that_cannot_be_hashed_is_prefilled_locally(
    kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    e = Engine()
    monkeypatch.setattr(e.scheduler, "_hash", shim.prefix_hash)
    r = Request(
        request_id="r", prompt_token_ids=[-1, 2], num_prompt_tokens=2, num_computed_tokens=0,
        kv_transfer_params=kv,
        status=SimpleNamespace(name="RUNNING"),
    )  # fmt: skip
    e.scheduler.on_new_request(r)  # type: ignore[arg-type]
    assert e.scheduler.matched(r, 0) == (0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", [None, "", "no port", "h:", "cut-in-the-middle:"])
def test_an_endpoint_that_nobody_can_dial_is_not_handed_out(
    e: Engine, endpoint: str | None
) -> None:
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    e.scheduler_shim.endpoint = endpoint
    assert e.finish("r") == (True, None)


def test_concurrent_waits_for_admission(e: Engine) -> None:
    r = e.add("r", 40, concurrent())
    assert e.scheduler_shim.asked == [(bytes.fromhex(XFER), "p:1")]
    assert e.scheduler.matched(r, 0) == (None, False)
    e.scheduler_shim.answers[bytes.fromhex(XFER)] = shim.Answer("admitted")
    assert e.scheduler.matched(r, 0) == (40, True)


@pytest.mark.parametrize("answer", ["refused", "gone"])
def test_a_refused_admission_means_local_prefill(
    e: Engine, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    r = e.add("r", 40, concurrent())
    e.scheduler_shim.answers[bytes.fromhex(XFER)] = shim.Answer(answer, "it is yours")
    assert e.scheduler.matched(r, 0) == (0, False)
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"prefill_" + answer: 1}
    assert f"p:1 was asked for the prefill, {answer}: it is yours" in caplog.text


def test_admission_is_bounded(e: Engine) -> None:
    r = e.add("r", 40, concurrent())
    e.clock += 9
    assert e.scheduler.matched(r, 0) == (None, False)
    e.clock += 2
    assert e.scheduler.matched(r, 0) == (0, False)


def test_no_sidecar_unknown_version_or_no_key_mean_local_prefill(e: Engine) -> None:
    for kv in (
        prefill_first(v=2),
        {"do_remote_prefill": True, "remote_block_ids": [[1]]},
        {"do_remote_prefill": True, "kvspray": 3},
    ):
        r = e.add("r", 40, kv)
        assert e.scheduler.matched(r, 0) == (0, False)
    e.scheduler_shim.connected = False
    assert e.scheduler.matched(e.add("r", 40, concurrent()), 0) == (0, False)


def test_a_failed_load_is_reported_after_its_fence(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 40)
    assert e.step().received == set()
    e.worker_shim.end(1, received=True, status=shim.EXPIRED)
    done = e.step()
    assert done.received == {"r"} == done.failed and not done.bad_blocks
    stats = e.worker.take_stats()
    assert (
        stats is not None
        and stats.data["recompute_tokens"] == 40
        and stats.data["transfers"] == {"received/expired": 1}
    )


@pytest.mark.parametrize(
    ("hit", "lacks", "bad", "recomputed"),
    [
        (0, 16, {2, 3, 4, 5, 6, 7}, 84),
        (0, 64, {5, 6, 7}, 36),
        (0, 79, {5, 6, 7}, 36),  # in the middle of a block: all of it
        (0, 99, {7}, 4),
        (32, 32, {3, 4, 5, 6, 7}, 68),  # nothing came, and what the engine had is good
        (32, 80, {6, 7}, 20),
        # Not even a block of it, nothing at all, or garbage: the engine begins anew.
        (0, 0, set(), 100),
        (0, 15, set(), 100),
        (32, 0, set(), 68),
        (32, 31, set(), 68),
        (0, 100, set(), 100),
        (0, 1 << 40, set(), 100),
    ],
)
def test_a_load_that_fails_is_recomputed_from_the_first_token_that_lacks(
    e: Engine, hit: int, lacks: int, bad: set[int], recomputed: int
) -> None:
    r = e.add("r", 100, prefill_first())
    assert e.scheduler.matched(r, hit) == (100 - hit, True)
    e.scheduler.allocated(r, blocks(e, "r"), 100 - hit)
    e.step()
    e.worker_shim.end(1, received=True, status=shim.FAILED, lacks=lacks)
    done = e.step()
    assert (
        done.received == {"r"}
        and done.bad_blocks == bad
        and done.failed == (set() if bad else {"r"})
    )
    stats = e.worker.take_stats()
    assert stats is not None and stats.data["recompute_tokens"] == recomputed


def test_the_real_worker_shim_names_the_first_token_that_lacks() -> None:
    w = object.__new__(shim.Worker)
    end = kvspray.Completion(
        lease=3,
        received=True,
        status=kvspray.CompletionStatus.FAILED,
        recompute=((64, 96), (32, 40)),
    )
    w._c = SimpleNamespace(poll=lambda: [end, dataclasses.replace(end, recompute=())])  # type: ignore[assignment]
    assert [(got.lease, got.status, got.lacks) for got in w.poll()] == [
        (3, shim.FAILED, 32),
        (3, shim.FAILED, 0),
    ]


def test_what_came_is_not_used_where_the_engine_could_not_go_on() -> None:
    """Recurrent states, sliding windows, several groups; a request that is over; other weights."""
    for case in ("no resumption", "groups", "cancelled", "outdated"):
        e = Engine()
        e.worker = WorkerSide(
            e.worker_shim, LOG, resume_block=0 if case == "no resumption" else BLOCK
        )
        r = e.add("r", 100, prefill_first())
        e.scheduler.allocated(r, blocks(e, "r"), 100)
        meta = e.meta()
        if case == "groups":
            meta.expects = [
                dataclasses.replace(x, blocks=(x.blocks[0], x.blocks[0])) for x in meta.expects
            ]
        e.run(meta)
        if case == "cancelled":
            e.finish("r", "FINISHED_ABORTED")
            e.step()
        if case == "outdated":
            e.worker.outdate()
        e.worker_shim.end(1, received=True, status=shim.FAILED, lacks=64)
        done = e.step()
        assert done.received == {"r"} and not done.bad_blocks, case
        assert done.failed == (set() if case == "cancelled" else {"r"}), case


def test_a_load_that_was_complete_before_the_weights_changed_and_is_seen_after_is_not_used(
    e: Engine,
) -> None:
    r = e.add("r", 100, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 100)
    e.step()
    e.worker_shim.end(1, received=True, status=shim.OK)
    e.worker.outdate()
    done = e.step()
    assert done.received == {"r"} and done.failed == {"r"}
    stats = e.worker.take_stats()
    assert stats is not None and stats.data["recompute_tokens"] == 100


def test_abort_while_loading_cancels_and_waits(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 40)
    e.step()
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)
    assert e.step().received == set() and e.worker_shim.take()[-1] == ("cancel", 1)
    e.worker_shim.end(1, received=True, status=shim.CANCELLED)
    done = e.step()
    assert done.received == {"r"} and done.failed == set()
    assert r.status.name == "FINISHED_ABORTED"


def test_an_expect_without_a_sidecar_fails_at_once(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 40)
    e.worker_shim.down = True
    done = e.step()
    assert done.received == {"r"} == done.failed


def test_local_hits_that_leave_nothing_to_load(e: Engine) -> None:
    r = e.add("r", 40, prefill_first())
    e.scheduler.allocated(r, blocks(e, "r"), 0)
    assert e.meta().empty()
    assert e.scheduler.matched(r, 0) == (0, False)


@pytest.mark.parametrize("given", ["x", 7, ["do_remote_decode"], True])
def test_params_of_any_type_are_survived(e: Engine, given: Any) -> None:
    # vLLM copies what a client sends in vllm_xargs without looking; an exception would end the
    # engine core.
    r = e.add("odd", 3 * BLOCK, given)
    assert r.kv_transfer_params is None
    meta = e.meta({"odd": 3 * BLOCK})
    assert not meta.intents and not meta.expects
    assert e.scheduler.finished(r, [[1, 2, 3]]) == (False, None)


# ---- sliding windows


class Hybrid(Engine):
    """Two cache groups: one keeps everything, one looks 32 tokens back."""

    def __init__(self, states: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.scheduler = SchedulerSide(
            Settings(),
            self.scheduler_shim,
            [BLOCK, BLOCK],
            "engine",
            fake_hash,
            LOG,
            windows=(0, 32),
            states=states,
            now=lambda: self.clock,
        )

    def meta(
        self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None
    ) -> StepMeta:
        counts = scheduled or {}
        out = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            preempted_req_ids=preempted or set(),
            scheduled_new_reqs=[],
        )
        for req in counts:
            # As allocate_slots does before it takes blocks for this step's tokens: whole blocks
            # that the next token sees no more.
            table = self.windows.setdefault(req, [i + 100 for i in range(len(self.tables[req]))])
            gone = max(self.requests[req].num_computed_tokens - 32 + 1, 0) // BLOCK
            table[:gone] = [0] * gone
            self.tables[req] += range(
                len(self.tables[req]) + 1,
                1 + -(-(self.requests[req].num_computed_tokens + counts[req]) // BLOCK),
            )
            table += [i + 100 for i in range(len(table), len(self.tables[req]))]
        meta = self.scheduler.build(out, lambda req: (self.tables[req], self.windows[req]))  # type: ignore[arg-type]
        for req, n in counts.items():
            self.requests[req].num_computed_tokens += n
        return meta

    def finish(self, req: str, status: str = "FINISHED_LENGTH_CAPPED") -> tuple[bool, Any]:
        r = self.requests[req]
        r.status = SimpleNamespace(name=status)
        return self.scheduler.finished(r, (self.tables[req], self.windows[req]))

    @property
    def windows(self) -> dict[str, list[int]]:
        return self.__dict__.setdefault("_windows", {})


def test_with_a_window_both_sides_compute_the_last_token() -> None:
    e = Hybrid()
    e.add("r", 40, dict(DECODE))
    e.step({"r": 16})
    e.step({"r": 24})
    assert [c for c in e.worker_shim.take() if c[0] in ("intent", "step")] == [
        ("intent", 1, "r", 39, 1),
        ("step", 1, [(1, 16)]),
        ("step", 2, [(1, 39)]),
    ]
    delay, kv = e.finish("r")
    assert (
        delay
        and kv["remote_num_tokens"] == 39
        and kv["remote_block_ids"] == [[1, 2, 3], [100, 101, 102]]
    )
    d = e.add("d", 40, prefill_first())
    assert e.scheduler.matched(d, 16) == (23, True)
    for kv in (dict(DECODE), prefill_first()):
        one = e.add("one", 1, kv)
        assert e.scheduler.matched(one, 0) == (0, False)  # nothing of it would move
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"short_prompt": 2}


def test_a_state_of_one_token_does_not_move() -> None:
    e = Hybrid(states=(1,))
    for kv in (dict(DECODE), prefill_first()):
        assert e.scheduler.matched(e.add("two", 2, kv), 0) == (0, False)
    assert e.scheduler.matched(e.add("three", 3, prefill_first()), 0) == (2, True)
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"short_prompt": 2}


def test_a_window_that_moves_on_takes_the_lease_with_it() -> None:
    e = Hybrid()
    e.add("r", 64, dict(DECODE))
    e.step({"r": 64})
    # 63 tokens are sent: from the block of token 32, which the token at 79 is the first not to see.
    for _ in range(15):
        e.step({"r": 1})
    assert [c[0] for c in e.worker_shim.take()] == ["intent", "step", "layer", "layer", "end"]
    meta = e.meta({"r": 1})
    assert [req for req, _ in meta.lost] == ["r"]
    # Before anything of this step is computed: the block may be another request's in it.
    e.worker.preempts(meta)
    assert e.worker_shim.take() == [("cancel", 1)]
    e.worker.begin(meta)
    assert e.meta({"r": 1}).lost == []
    assert e.finish("r") == (True, None)
    assert e.step().sent == set()
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.step().sent == {"r"}


def test_a_reset_of_the_caches_withdraws_what_waits_to_be_fetched() -> None:
    e = Engine()
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    e.finish("r")
    e.step()
    e.worker_shim.take()
    e.scheduler.reset()
    e.scheduler.reset()
    e.step()
    assert e.worker_shim.take() == [("cancel", 1)]
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.step().sent == {"r"}
    e.scheduler.reset()
    assert e.meta().empty()
