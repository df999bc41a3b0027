"""kv_role is kept: a producer receives nothing and a consumer sends nothing, whatever a router asks
of them.

vLLM defers the freeing of blocks that a step in flight may still write where kv_role is a
consumer's; in those of a producer a load could land under such a write.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, DECODE, FakeScheduler, Request, concurrent, fake_hash, prefill_first

from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings

RECEIVES, SENDS = [prefill_first(), concurrent()], [DECODE]


def asked(role: str, kv: dict[str, Any]) -> tuple[bool, FakeScheduler, SchedulerSide, Any]:
    """Whether the request takes part in a transfer."""
    client = FakeScheduler()
    s = SchedulerSide(
        Settings(), client, [BLOCK], "engine", fake_hash, logging.getLogger("test"), role=role
    )
    r = Request(
        request_id="r", prompt_token_ids=list(range(40)), num_prompt_tokens=40,
        num_computed_tokens=0, kv_transfer_params=dict(kv),
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )  # fmt: skip
    s.on_new_request(r)  # type: ignore[arg-type]
    external, later = s.matched(r, 0)  # type: ignore[arg-type]
    out = SimpleNamespace(
        num_scheduled_tokens={"r": 40},
        total_num_scheduled_tokens=40,
        preempted_req_ids=set(),
        scheduled_new_reqs=[],
    )
    meta = s.build(out, lambda req: ([1, 2, 3],))  # type: ignore[arg-type]
    return bool(external or external is None or meta.intents), client, s, r


@pytest.mark.parametrize(
    ("role", "kv", "serves"),
    [(role, kv, True) for role in ("kv_consumer", "kv_both") for kv in RECEIVES]
    + [(role, kv, True) for role in ("kv_producer", "kv_both") for kv in SENDS]
    + [("kv_producer", kv, False) for kv in RECEIVES]
    + [("kv_consumer", kv, False) for kv in SENDS],
)
def test_which_role_does_what(
    role: str, kv: dict[str, Any], serves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    does, client, s, r = asked(role, kv)
    assert does == serves
    stats = s.take_stats()
    if serves:
        assert stats is None
        return
    assert stats is not None and stats.data["local"] == {"role": 1}
    assert client.asked == [] and not r.kv_transfer_params["do_remote_prefill"]
    assert f"kv_role is {role}" in caplog.text and "set kv_both" in caplog.text
    assert s.finished(r, ([1, 2, 3],)) == (False, None)


def test_a_role_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(
        ValueError, match="kv_role is 'kv_neither', want kv_producer, kv_consumer or kv_both"
    ):
        asked("kv_neither", DECODE)
