# SPDX-License-Identifier: Apache-2.0
"""Older and newer engines, made of the installed one.

Each is a child, forked with vLLM imported. It takes away what the older engine lacks, or adds what
the newer one has, and loads the connector afresh. What 0.26 and 0.33 have was read in their
wheels."""

from __future__ import annotations

import multiprocessing as mp
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

from kvspray_vllm import tables, versions

CHILD_S = 300.0


def in_child(check: Callable[[], None]) -> None:
    """Runs the check in a fork without the connector, and hands on what it raised."""

    def run(out: Connection) -> None:
        try:
            for name in list(sys.modules):
                if name.partition(".")[0] == "kvspray_vllm":
                    del sys.modules[name]
            check()
            out.send("")
        except BaseException:
            out.send(traceback.format_exc())

    ctx = mp.get_context("fork")
    ours, theirs = ctx.Pipe(duplex=False)
    child = ctx.Process(target=run, args=(theirs,))
    child.start()
    theirs.close()
    try:
        assert ours.poll(CHILD_S), "the child says nothing"
        try:
            said = ours.recv()
        except EOFError:
            said = "the child died"
        assert said == "", said
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_transfer_results_are_detected() -> None:
    def check() -> None:
        assert hasattr(base.KVConnectorBase_V1, "get_transfer_results"), "the pinned vLLM has it"
        del base.KVConnectorBase_V1.get_transfer_results

        from kvspray_vllm import connector

        assert connector.HAS_TRANSFER_RESULTS is False
        cls = connector.KVSprayConnector
        assert not hasattr(cls, "get_transfer_results")
        assert "get_finished" in vars(cls)

        c = object.__new__(cls)
        c._bad_blocks = set()
        rounds = [
            SimpleNamespace(sent={"s"}, received={"r"}, failed={"f"}, failed_blocks={3}, bad_blocks={4}),
            SimpleNamespace(sent=set(), received=set(), failed=set(), failed_blocks=set(), bad_blocks={5}),
        ]
        c._worker = SimpleNamespace(collect=lambda: rounds.pop(0))  # type: ignore[assignment]
        assert c.get_finished({"x"}) == ({"s"}, {"r"})
        assert c.get_finished(set()) == (None, None)
        assert c.get_block_ids_with_load_errors() == {3, 4, 5}
        assert c.get_block_ids_with_load_errors() == set()  # each is told once

    in_child(check)
    assert hasattr(base.KVConnectorBase_V1, "get_transfer_results"), "this process has lost it"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_an_engine_whose_workers_say_nothing_of_their_own_loads_the_connector() -> None:
    def check() -> None:
        del base.KVConnectorWorkerMetadata

        from kvspray_vllm import connector, meta

        assert connector.base is base and not hasattr(base, "KVConnectorWorkerMetadata")
        assert meta.Landed(over={"r"}).over == {"r"}

    in_child(check)


# Of KVConnectorBase_V1, in vLLM 0.32 and not in 0.26.
NOT_IN_026 = (
    "supports_divergent_local_hybrid_hits",
    "requires_kv_delivery",
    "get_mem_pool_context",
    "finish_forward",
    "reset_capture_state",
    "get_transfer_results",
    "bind_kv_cache_manager",
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "register_finished_partial_tail",
    "has_pending_block_frees",
    "_cache_hit_source",
)
CACHE_HIT_SOURCE = "vllm.v1.metrics.cache_hit_source"


def as_026() -> None:
    for name in NOT_IN_026:
        delattr(base.KVConnectorBase_V1, name)
    del base.KVConnectorTransferResults
    sys.modules[CACHE_HIT_SOURCE] = None  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_vllm_026_loads_the_connector() -> None:
    """It lends no cache manager: block tables come from what it schedules, spare blocks from the
    pool that it binds."""

    def check() -> None:
        as_026()

        from kvspray_vllm import connector
        from kvspray_vllm.scheduler import SchedulerSide
        from kvspray_vllm.settings import Settings

        assert not connector.HAS_TRANSFER_RESULTS and not connector.HAS_CACHE_MANAGER
        cls = connector.KVSprayConnector
        assert not hasattr(cls, "_cache_hit_source")

        from fakes import BLOCK, DECODE, FakePool, FakeScheduler, fake_hash

        c = object.__new__(cls)
        c._role = base.KVConnectorRole.SCHEDULER
        side = SchedulerSide(Settings(), FakeScheduler(), [BLOCK], "engine", fake_hash, connector.logger)
        c._scheduler, c._tables = side, tables.StepTables(side.gives)
        pool = FakePool()
        c.bind_gpu_block_pool(pool)  # type: ignore[arg-type]
        assert side._pool is pool

        request = SimpleNamespace(
            request_id="r", prompt_token_ids=list(range(40)), num_prompt_tokens=40, num_computed_tokens=0,
            kv_transfer_params=dict(DECODE), lora_request=None, cache_salt=None, mm_features=[],
        )  # fmt: skip
        c.on_new_request(request)  # type: ignore[arg-type]
        meta = c.build_connector_meta(step(new={"r": ([7, 9],)}, counts={"r": 32}))
        assert meta.intents[0].blocks == ((7, 9),) and meta.gains[0].blocks == ((7, 9),)
        request.num_computed_tokens = 32
        meta = c.build_connector_meta(step(more={"r": ([4],)}, counts={"r": 8}))
        assert meta.gains[0].end == 40 and meta.gains[0].blocks == ((7, 9, 4),)

    in_child(check)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_vllm_033_asks_whether_caches_may_sleep() -> None:
    """Its base class answers yes for connectors that do not say."""

    def check() -> None:
        for name in ("unregister_kv_caches", "restore_kv_caches"):
            setattr(base.KVConnectorBase_V1, name, lambda self: None)
        base.KVConnectorBase_V1.supports_sleep_mode = classmethod(lambda cls, config: True)  # type: ignore[attr-defined]

        from kvspray_vllm.connector import KVSprayConnector

        assert KVSprayConnector.supports_sleep_mode(None) is False  # type: ignore[arg-type]

    in_child(check)


# ---- block tables from schedules, in vLLM's own classes


def step(
    new: dict[str, Any] | None = None, more: dict[str, Any] | None = None, counts: dict[str, int] | None = None,
    resumed: set[str] = frozenset(), finished: set[str] = frozenset(),  # type: ignore[assignment]
) -> Any:  # fmt: skip
    first = [
        NewRequestData(
            req_id=req, prompt_token_ids=[], mm_features=[], sampling_params=None, pooling_params=None,
            block_ids=blocks, num_computed_tokens=0, lora_request=None,
        )
        for req, blocks in (new or {}).items()
    ]  # fmt: skip
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_block_ids = list(more or {}), list((more or {}).values())
    cached.resumed_req_ids = set(resumed)
    counts = counts or {}
    return SimpleNamespace(
        scheduled_new_reqs=first, scheduled_cached_reqs=cached, num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()), finished_req_ids=set(finished), preempted_req_ids=set(),
    )  # fmt: skip


def test_tables_follow_the_schedule() -> None:
    t = tables.StepTables(lambda req: req != "not ours")
    t.schedule(step(new={"a": ([1, 2],), "not ours": ([3],)}))
    t.schedule(step(more={"a": ([5],), "not ours": ([6],)}))
    assert t.of("a") == [[1, 2, 5]]
    with pytest.raises(KeyError):
        t.of("not ours")
    t.schedule(step(more={"a": None}))
    assert t.of("a") == [[1, 2, 5]]
    t.schedule(step(more={"a": ([8, 9],)}, resumed={"a"}))  # preempted: its blocks are others
    assert t.of("a") == [[8, 9]]
    t.schedule(step(finished={"a"}))
    assert t._tables == {}


# ---- versions


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.26.0", False), ("0.32.0", False), ("0.33.7", False), ("0.34.0rc1", True), ("1.0.0", True), ("dev", False)],
)
def test_a_newer_vllm_is_named(version: str, newer: bool) -> None:
    line = versions.newer_than_known(version)
    assert bool(line) == newer and "\n" not in line
    if newer:
        assert f"vllm.__version__ is {version}" in line and "use vLLM 0.33" in line


def test_the_installed_vllm_is_known() -> None:
    import vllm

    assert ".".join(vllm.__version__.split(".")[:2]) in versions.KNOWN and not versions.newer_than_known()
