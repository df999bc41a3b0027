"""Weights that change while requests are under way: what was computed with others is not
offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fakes import DECODE, Engine, e, load

from kvspray_vllm import KVSprayConnector, shim
from kvspray_vllm.meta import Landed


def connector(e: Engine, sent: list[Any]) -> KVSprayConnector:
    c = object.__new__(KVSprayConnector)

    def describe(layout: Any) -> None:
        if sent and isinstance(sent[0], Exception):
            raise sent[0]
        sent.append(layout["identity"]["weights"])

    c._worker = e.worker
    c._worker_client = SimpleNamespace(describe=describe)  # type: ignore[assignment]
    c._layout = {"identity": {"weights": "old"}}
    c._generation = "new"  # type: ignore[assignment]
    return c


def test_open_leases_end_and_new_ones_are_not_made(e: Engine) -> None:
    e.add("source", 40, dict(DECODE))
    load(e, "load")
    e.step({"source": 40})
    assert e.finish("source")[0], "its blocks are held"
    e.step()
    sent: list[Any] = [RuntimeError("out of memory")]
    c = connector(e, sent)
    e.worker_shim.take()
    c._weights_changed()
    cancelled = {call[1] for call in e.worker_shim.take() if call[0] == "cancel"}
    assert cancelled == {1, 2} and ("close",) not in e.worker_shim.calls
    done = e.step()
    assert not done.sent and not done.received, "a block was given back before the fence"
    for lease, received in ((1, False), (2, True)):
        e.worker_shim.end(lease, received, status=shim.CANCELLED)
    done = e.step()
    assert done.sent == {"source"} and done.received == done.failed == {"load"}
    assert not e.scheduler.pending_push_work()

    e.add("after", 40, dict(DECODE))
    load(e, "load after")
    done = e.step({"after": 40})
    assert done.received == done.failed == {"load after"}
    assert e.finish("after")[0] and e.step().sent == {"after"}
    assert e.worker_shim.leases == 2 and not [c for c in e.worker_shim.take() if c[0] == "step"]

    sent[:] = []
    c._weights_changed()  # later ones can be sent again
    assert sent == ["new"]
    load(e, "at last")
    e.step()
    assert e.worker_shim.leases == 3


def test_a_load_that_was_complete_is_not_used(e: Engine) -> None:
    load(e, "load")
    e.step()
    e.worker_shim.end(1, received=True, status=shim.OK)
    connector(e, [RuntimeError()])._weights_changed()
    done = e.step()
    assert done.received == done.failed == {"load"}


def cached(e: Engine, req: str, tokens: int) -> None:
    """A prompt of which vLLM has these tokens in its prefix cache."""
    e.add(req, 40, dict(DECODE)).num_computed_tokens = tokens


def offered(e: Engine) -> list[str]:
    return [call[2] for call in e.worker_shim.take() if call[0] == "intent"]


def test_cached_blocks_of_other_weights_are_not_offered(e: Engine) -> None:
    """Although the weights have a name again, which other engines have, too."""
    pool = SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=lambda: free[0])
    e.scheduler.set_pool(pool)  # type: ignore[arg-type]
    c = connector(e, [])
    cached(e, "before", 32)
    e.step({"before": 8})
    assert offered(e) == ["before"]
    c._weights_changed()
    cached(e, "first", 32)  # the scheduler has no report of the change yet
    e.step({"first": 8})
    cached(e, "second", 32)
    e.add("new", 40, dict(DECODE))
    e.step({"second": 8, "new": 40})
    free = [8]
    assert e.scheduler.reset()
    cached(e, "in use", 32)
    e.step({"in use": 8})
    assert offered(e) == ["new"]
    free[0] = 9
    assert e.scheduler.reset()
    cached(e, "after", 32)
    e.step({"after": 8})
    c._weights_changed()
    assert e.scheduler.reset(), "before the first step with the new weights"
    e.step()
    cached(e, "at last", 32)
    e.step({"at last": 8})
    assert offered(e) == ["after", "at last"]


def test_preempted_prompt_that_hits_other_weights_is_not_delivered(e: Engine) -> None:
    connector(e, [])._weights_changed()
    e.step()
    r = e.add("r", 40, dict(DECODE))
    e.step({"r": 40})
    r.num_computed_tokens = 0
    e.step(preempted={"r"})
    r.num_computed_tokens = 32  # vLLM has found them in its prefix cache
    e.worker_shim.take()
    e.step({"r": 8})
    assert [call[:2] for call in e.worker_shim.take()] == [("cancel", 1)]
    e.worker_shim.end(1, received=False, status=shim.CANCELLED)
    assert e.finish("r") == (True, None)
    assert e.step().sent == {"r"}


def test_vllm_empties_its_cache_without_its_connectors(e: Engine) -> None:
    pool = SimpleNamespace(
        num_gpu_blocks=10, get_num_free_blocks=lambda: 9, cached_block_hash_to_block={b"h": 1}
    )
    e.scheduler.set_pool(pool)  # type: ignore[arg-type]
    connector(e, [])._weights_changed()
    e.step()
    cached(e, "before", 32)
    e.step({"before": 8})
    pool.cached_block_hash_to_block = {}
    e.add("new", 40, dict(DECODE))
    e.step({"new": 40})
    cached(e, "after", 32)
    e.step({"after": 8})
    assert offered(e) == ["new", "after"]


def test_a_change_is_reported_for_all_ranks() -> None:
    assert Landed(changed=3).aggregate(Landed(changed=7)).changed == 7
