"""kvspray under vLLM's MultiConnector, beside vLLM's OffloadingConnector, whose copies run on a
medium of the rig's own here: vLLM's own run on CUDA streams alone."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import Cluster
from prompts import fresh

ENGINES = pathlib.Path(__file__).resolve().parents[1] / "gpu/engines"
sys.path[:0] = [str(ENGINES), str(ENGINES / "inside")]

import multi  # noqa: E402

LENGTHS = (33, 200, 700)


class Both(Cluster):
    def kv(self, sidecar: rig.Sidecar, role: str, **extra: Any) -> dict[str, Any]:
        return multi.beside_offloading(super().kv(sidecar, role, **extra), "cpu")

    def connected(self, timeout: float = 60.0) -> None:
        def there(s: rig.Sidecar) -> bool:
            return rig.total(s.metrics(), "kvspray_engine_sessions") >= 2

        for s in (self.sp, self.sd):
            rig.wait_for(f"engine sessions at {s.name}", lambda s=s: there(s), timeout)

    def settle(self, timeout: float = 30.0) -> None:
        for e in (self.p, self.d):
            rig.wait_for(f"engine {e.name} idle", e.idle, timeout)


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Both]:
    out = Both(workdir)
    try:
        for name in "PDR":
            out.spawn(name)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


def moved(c: Both) -> float:
    return rig.total(c.d.metrics(), "vllm:kvspray_transfers_total", side="received", outcome="ok")


def test_tokens_are_equal_and_what_was_offloaded_moves_on(c: Both) -> None:
    prompts = [fresh(n) for n in LENGTHS for _ in range(2)]
    want = [c.r.add(p, 8).result().tokens for p in prompts]
    ways = [c.both, c.prefill_first]
    for turn in ("first", "again", "at once"):
        before, loaded = moved(c), rig.total(c.p.metrics(), multi.LOADED)
        if turn == "at once":
            pending = [c.start_both(p, 8) for p in prompts]
            got = [d.result() for _, d in pending]
            for p, _ in pending:
                p.result()
        else:
            got = [ways[i % 2](p, 8) for i, p in enumerate(prompts)]
        assert [g.tokens for g in got] == want, turn
        c.settle()
        assert moved(c) - before == len(prompts)
        # Later P has nothing on the device: OffloadingConnector loads it.
        assert (rig.total(c.p.metrics(), multi.LOADED) > loaded) == (turn != "first")
        assert rig.total(c.p.metrics(), multi.STORED) > 0
        for e in (c.p, c.d):
            rig.wait_for(f"{e.name}'s prefix cache empty", e.clear_prefix_cache, 30)

    # D has offloaded what kvspray brought, and loads it without P.
    before, loaded = moved(c), rig.total(c.d.metrics(), multi.LOADED)
    assert [c.d.run(p, 8).tokens for p in prompts] == want
    assert moved(c) == before and rig.total(c.d.metrics(), multi.LOADED) > loaded
    c.settle()
