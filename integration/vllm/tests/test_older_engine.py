# SPDX-License-Identifier: Apache-2.0
"""Engines before v0.30 have no get_transfer_results: the connector, loaded against such a base class, reports finished requests and failed
blocks the older way, and has no method that the engine does not know. Each such engine is a child, forked with vLLM imported; it takes away what
the older one lacks and loads the connector afresh."""

from __future__ import annotations

import multiprocessing as mp
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base

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
        assert c.get_finished(set()) == ({"s"}, {"r"})
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
