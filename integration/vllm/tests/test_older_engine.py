# SPDX-License-Identifier: Apache-2.0
"""Engines before v0.30 have no get_transfer_results: the connector, loaded against such a base class in a process of its own, reports
finished requests and failed blocks the older way, and has no method that the engine does not know."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    from types import SimpleNamespace
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert hasattr(KVConnectorBase_V1, "get_transfer_results"), "the pinned vLLM has it"
    del KVConnectorBase_V1.get_transfer_results

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
    c._worker = SimpleNamespace(collect=lambda: rounds.pop(0))
    assert c.get_finished(set()) == ({"s"}, {"r"})
    assert c.get_finished(set()) == (None, None)
    assert c.get_block_ids_with_load_errors() == {3, 4, 5}
    assert c.get_block_ids_with_load_errors() == set()  # each is told once
    print("ok")
    """
)


def test_transfer_results_are_detected() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys\n" + SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr[-4000:]


OLDEST = textwrap.dedent(
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    del base.KVConnectorWorkerMetadata
    from kvspray_vllm import connector, meta

    assert meta.Landed(over={"r"}).over == {"r"}
    print("ok")
    """
)


def test_an_engine_whose_workers_say_nothing_of_their_own_loads_the_connector() -> None:
    done = subprocess.run([sys.executable, "-c", OLDEST], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr[-4000:]
