"""Steps and the prefill side of the connector."""

from __future__ import annotations

from types import SimpleNamespace

from fakes import (
    BLOCK,
    DECODE,
    LOG,
    XFER,
    Engine,
    FakeScheduler,
    FakeWorker,
    concurrent,
    e,
    fake_hash,
    prefill_first,
)

from kvspray_vllm import shim
from kvspray_vllm.worker import LOAD_WAIT_S, WorkerSide

# ---- what is reported when


def test_a_step_begins_once_however_often_that_is_reported(e: Engine) -> None:
    e.add("r", 32, dict(DECODE))
    dest = e.add("d", 40, prefill_first())
    e.scheduler.allocated(dest, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)  # type: ignore[arg-type]
    meta = e.meta({"r": 32})
    e.worker.begin(meta)
    calls = e.worker_shim.take()
    assert [c[0] for c in calls] == ["intent", "step", "expect"]
    assert e.worker.signals
    e.worker.preempts(meta)
    e.worker.begin(meta)
    # Nor is it taken for a forward pass that failed.
    assert e.worker_shim.take() == [] and e.worker.signals
    e.worker.step_done()
    e.worker.begin(e.meta())
    assert e.worker_shim.take() == [("end", 1)]


def test_nobody_is_asked_how_long_to_wait_for_a_prefill_that_is_done(e: Engine) -> None:
    class Busy(FakeScheduler):
        @property
        def match_timeout_s(self) -> float:
            raise AssertionError("asked")

        @match_timeout_s.setter
        def match_timeout_s(self, value: float) -> None:
            pass

    e.scheduler._client = Busy()
    dest = e.add("d", 40, prefill_first())
    assert e.scheduler.matched(dest, 0) == (40, True)


# ---- empty steps


def test_only_a_step_that_computes_nothing_waits_for_a_load(e: Engine) -> None:
    e.step()
    assert e.worker_shim.waits == []  # nothing is loading
    dest = e.add("d", 40, prefill_first())
    e.scheduler.allocated(dest, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)  # type: ignore[arg-type]
    e.add("other", 5, None)
    e.step({"other": 5})
    assert e.worker_shim.waits == []  # another request would wait with it
    e.step()
    assert e.worker_shim.waits == [LOAD_WAIT_S]
    lease = e.worker_shim.take()[0][1]
    e.worker_shim.end(lease, received=True)
    assert e.step().received == {"d"}
    e.step()
    assert e.worker_shim.waits == [LOAD_WAIT_S] * 2  # and not after its end


def test_no_wait_where_the_end_of_another_load_is_known_or_other_ranks_wait(e: Engine) -> None:
    def load(req: str) -> None:
        e.scheduler.allocated(
            e.add(req, 40, prefill_first()), SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40
        )  # type: ignore[arg-type]

    load("d")
    e.step()
    e.worker_shim.down = True
    load("f")
    assert e.step().failed == {"f"} and e.worker_shim.waits == [LOAD_WAIT_S]
    e.worker = WorkerSide(FakeWorker(), LOG, load_wait_s=0)
    load("g")
    e.step()
    e.step()
    assert e.worker._client.waits == []  # type: ignore[attr-defined]


# ---- prefill


def test_chunked_prefill_announces_each_step_before_its_forward(e: Engine) -> None:
    e.add("r", 40, dict(DECODE))
    e.step({"r": 16})
    e.step({"r": 16})
    e.step({"r": 8})
    assert e.worker_shim.take() == [
        ("intent", 1, "r", 40, 1),
        ("step", 1, [(1, 16)]), ("layer", 0, 1), ("layer", 1, 1), ("end", 1),
        ("step", 2, [(1, 32)]), ("layer", 0, 2), ("layer", 1, 2), ("end", 2),
        ("step", 3, [(1, 40)]), ("layer", 0, 3), ("layer", 1, 3), ("end", 3),
    ]  # fmt: skip
    delay, kv = e.finish("r")
    assert (
        delay
        and kv["do_remote_prefill"]
        and kv["remote_num_tokens"] == 40
        and kv["remote_block_ids"] == [[1, 2, 3]]
    )
    assert kv["remote_host"] == "10.1.1.1" and kv["remote_port"] == 7650
    assert (
        kv["kvspray"]["v"] == 1
        and kv["kvspray"]["peer"] == "10.1.1.1:7650"
        and len(kv["kvspray"]["xfer"]) == 32
    )
    assert e.step().sent == set() and e.worker_shim.take() == [("hold", 1)]
    assert e.scheduler.pending_push_work()
    e.worker_shim.end(1, received=False)
    assert e.step().sent == {"r"}
    assert not e.scheduler.pending_push_work()
    assert e.step().sent == set()


def test_sent_before_the_request_finished_is_reported_after_it(e: Engine) -> None:
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    e.worker_shim.end(1, received=False)
    assert e.step().sent == set()
    assert e.finish("r")[0]
    assert e.step().sent == {"r"}


def test_prefix_hit_is_ready_only_with_the_first_step(e: Engine) -> None:
    r = e.add("r", 48, dict(DECODE))
    r.num_computed_tokens = 32
    e.step({"r": 16})
    assert ("step", 1, [(1, 48)]) in e.worker_shim.take()


def test_a_step_for_nobody_leaves_no_record(e: Engine) -> None:
    e.add("plain", 16, None)
    e.add("r", 16, dict(DECODE))
    e.step({"plain": 16})
    assert e.worker_shim.take() == []
    e.step({"r": 16, "plain": 1})
    e.worker_shim.take()
    e.step({"r": 1, "plain": 1})  # r decodes here
    assert e.worker_shim.take() == []


def test_preemption_comes_before_anything_else_and_the_next_attempt_starts_over(e: Engine) -> None:
    r = e.add("r", 48, dict(DECODE))
    e.step({"r": 32})
    e.worker_shim.take()
    e.add("s", 16, dict(DECODE))
    r.num_computed_tokens = 0
    e.step({"s": 16}, preempted={"r"})
    assert [c[0] for c in e.worker_shim.take()][:3] == ["preempt", "intent", "step"]
    r.num_computed_tokens = 16  # its own prefix is still cached
    e.step({"r": 32})
    assert ("step", 3, [(1, 48)]) in e.worker_shim.take()


def test_preempts_are_reported_once(e: Engine) -> None:
    e.add("r", 48, dict(DECODE))
    e.step({"r": 32})
    e.worker_shim.take()
    meta = e.meta(preempted={"r"})
    e.worker.preempts(meta)
    assert e.worker_shim.take() == [("preempt", 1)]
    e.worker.begin(meta)
    assert e.worker_shim.take() == []


def test_abort_keeps_the_blocks_until_sent(e: Engine) -> None:
    e.add("r", 48, dict(DECODE))
    e.step({"r": 16})
    e.worker_shim.take()
    assert e.finish("r", "FINISHED_ABORTED") == (True, None)
    assert e.step().sent == set() and e.worker_shim.take() == [("cancel", 1)]
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.step().sent == {"r"}


def test_abort_before_the_first_step_frees_at_once(e: Engine) -> None:
    e.add("r", 48, dict(DECODE))
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)
    assert e.meta().empty()


def test_without_a_sidecar_prefill_frees_at_once(e: Engine) -> None:
    e.scheduler_shim.connected = False
    e.add("r", 16, dict(DECODE))
    e.step({"r": 16})
    assert e.finish("r") == (False, None) and e.worker_shim.take() == []
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"no_sidecar": 1}


def test_an_intent_that_could_not_be_submitted_ends_with_its_request(e: Engine) -> None:
    e.add("r", 16, dict(DECODE))
    e.worker_shim.down = True
    e.step({"r": 16})
    assert e.worker_shim.take() == []
    assert e.finish("r")[0]
    assert e.step().sent == {"r"}


def test_a_failed_forward_signals_nothing(e: Engine) -> None:
    e.add("r", 16, dict(DECODE))
    meta = e.meta({"r": 16})
    e.worker.begin(meta)
    e.worker_shim.take()
    e.worker.step_failed()
    e.worker.step_done()
    # The flags of a later step would report that this one is complete, too.
    assert e.worker_shim.take() == [("cancel", 1)]


def test_a_step_whose_end_never_came_ends_its_leases(e: Engine) -> None:
    e.add("r", 32, dict(DECODE))
    e.worker.begin(e.meta({"r": 16}))
    e.worker_shim.take()
    e.step({"r": 16})
    assert e.worker_shim.take()[0] == ("cancel", 1)


def test_samples_and_lists_share_a_dict_and_an_xfer(e: Engine) -> None:
    shared = dict(DECODE)
    a, b = e.add("0_cmpl-q-0-01234567", 16, shared), e.add("cmpl-q-1-89abcdef", 16, shared)
    assert a.kv_transfer_params is not b.kv_transfer_params
    meta = e.meta({a.request_id: 16, b.request_id: 16})
    assert len({i.xfer for i in meta.intents}) == 1 and len(meta.intents) == 2


def test_the_routers_xfer_and_fanout_win(e: Engine) -> None:
    e.add("r", 16, {**DECODE, "kvspray": {"v": 1, "xfer": XFER, "fanout": 4}})
    meta = e.meta({"r": 16})
    assert meta.intents[0].xfer.hex() == XFER and meta.intents[0].fanout == 4


def test_results_are_taken_before_the_step_ends(e: Engine) -> None:
    """vLLM 0.33 with a draft model: results, the drafter's layers, wait_for_save."""
    e.add("first", 32, dict(DECODE))
    e.step({"first": 32})
    held, _ = e.finish("first")
    assert held
    e.add("second", 32, dict(DECODE))
    e.worker_shim.end(1, received=False)
    e.worker_shim.take()
    meta = e.meta({"second": 32})
    e.worker.begin(meta)
    e.worker.layer_done("l0")
    done = e.worker.collect()
    assert done.sent == {"first"} and e.worker.signals, "the step is not over"
    e.scheduler.worker_reported(done.sent, done.received, e.worker.take_landed())
    e.worker.layer_done("l1")
    e.worker.step_done()
    calls = e.worker_shim.take()
    assert [c[0] for c in calls] == ["hold", "intent", "step", "layer", "layer", "end"]
    assert calls[-1] == ("end", meta.step) and not e.worker.signals
    e.finish("second")
    e.step()
    e.worker_shim.end(2, received=False)
    assert e.step().sent == {"second"} and not e.scheduler.pending_push_work()
