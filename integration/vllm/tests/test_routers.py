"""Other routers: what they put into ``kv_transfer_params``, and how they change the prefill's
answer (docs/routers.md)."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from fakes import Engine, e

from kvspray_vllm import register

# vllm-router 0.1.17, vLLM's example proxies, Dynamo 1.6.1 and llm-d's sidecar (nixlv2).
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What they change in the prefill's answer before the decode engine gets it.
DECODE: dict[str, dict[str, Any]] = {
    "vllm-router, toy proxy, Dynamo, llm-d's sidecar": {},
    "llm-d's coordinator": {"do_remote_decode": False, "do_remote_prefill": True},
    "vLLM's proxy for several turns": {"remote_host": "localhost"},
}


@pytest.mark.parametrize("changed", DECODE.values(), ids=DECODE.keys())
def test_a_prompt_moves_by_the_params_of_a_router(e: Engine, changed: dict[str, Any]) -> None:
    e.scheduler_shim.endpoint = "p:1"
    e.add("p", 40, json.loads(json.dumps(PREFILL)))
    e.step({"p": 40})
    held, answer = e.finish("p")
    assert held and answer is not None
    other = Engine()
    r = other.add("d", 40, json.loads(json.dumps(answer | changed)))
    assert other.scheduler.matched(r, 0) == (40, True)
    assert other.scheduler_shim.asked == [(bytes.fromhex(answer["kvspray"]["xfer"]), "p:1")]


def test_the_connectors_name_is_in_dynamos_table(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "dynamo.vllm.kv_connector_protocols"
    register()
    assert name not in sys.modules, "Dynamo is not imported where it is not used"
    theirs: Any = ModuleType(name)
    theirs.NixlConnectorProtocol = object()
    theirs.KV_CONNECTOR_PROTOCOLS = {"NixlConnector": theirs.NixlConnectorProtocol}
    monkeypatch.setitem(sys.modules, name, theirs)
    register()
    assert theirs.KV_CONNECTOR_PROTOCOLS["KVSprayConnector"] is theirs.NixlConnectorProtocol
