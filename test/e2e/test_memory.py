"""A KV cache that vLLM allocated itself: the sidecar reaches it through the process, and the tokens
are the same."""

from __future__ import annotations

import pathlib

import cluster as rig
import pytest
from conftest import Cluster
from prompts import fresh


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_process_memory(zygote: None, workdir: pathlib.Path, transport: str) -> None:
    dir = workdir / transport
    dir.mkdir()
    c = Cluster(
        dir, {"transports": {"order": [transport, "tcp"] if transport == "shm" else ["tcp"]}}
    )
    try:
        c.spawn("P", extra={"memory": "process"})
        c.spawn("D", extra={"memory": "process"})
        c.spawn("R")
        c.up()
        for n in (1, 33, 300, 1500):
            prompt = fresh(n, ("process", n))
            want = c.r.run(prompt, 12).tokens
            assert c.both(prompt).tokens == want
        assert (
            rig.total(c.d.metrics(), "vllm:kvspray_transfers_total", side="received", outcome="ok")
            == 4
        )
        c.settle()
        assert c.sp.panics() is None and c.sd.panics() is None
    finally:
        c.close()
