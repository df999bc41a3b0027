"""Prefill and decode at once, in opposite orders, by engines whose pools hold two of the prompts:
each side would hold blocks for what the other has not begun, and wait for its deadline. They do
not: decode takes blocks only for what prefill has admitted."""

from __future__ import annotations

import pathlib
import secrets
import time
from collections.abc import Iterator

import pytest
from conftest import Cluster
from prompts import fresh
from test_tokens import Moved

# seconds; the last prompt is admitted when five pairs before it are through, which a busy machine
# takes its time for.
DEADLINE, ADMISSION = 60.0, 45.0
PROMPTS = 12
LENGTH = 600  # tokens, and some
# 1,536 tokens: two prompts and what they decode.
ARGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 3 << 20}


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    out = Cluster(
        workdir,
        {
            "transports": {"order": ["tcp"]},
            "transfer": {"deadline": f"{DEADLINE:g}s", "match_timeout": f"{ADMISSION:g}s"},
        },
    )
    out.transport = "tcp"
    try:
        out.spawn("P", **ARGS)
        out.spawn("D", **ARGS)
        out.spawn("R", max_model_len=1024)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


@pytest.mark.parametrize("turn", range(3))
def test_full_pools_and_crossed_requests_end(c: Cluster, turn: int) -> None:
    prompts = [fresh(LENGTH + 20 * i, (c.transport, "crossed", turn, i)) for i in range(PROMPTS)]
    want = [c.r.run(p, 4).tokens for p in prompts]
    spray = [{"v": 1, "xfer": secrets.token_hex(16), "fanout": 1} for _ in prompts]
    with Moved(c) as moved:
        began = time.monotonic()
        p = [
            c.p.add(x, 1, kv={"do_remote_decode": True, "do_remote_prefill": False, "kvspray": s})
            for x, s in zip(prompts, spray, strict=True)
        ]
        crossed = list(zip(prompts, spray, strict=True))[::-1]
        d = [
            c.d.add(x, 4, kv={"do_remote_prefill": True, "kvspray": {**s, "peer": c.sp.endpoint}})
            for x, s in crossed
        ]
        for x in p:
            x.result()
        got = [x.result().tokens for x in d][::-1]
        took = time.monotonic() - began
    assert got == want
    assert took < DEADLINE, f"{took:.0f} s: an engine waited for a deadline"
    moved.all_loaded(PROMPTS)
    c.settle()
