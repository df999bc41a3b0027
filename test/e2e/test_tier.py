"""Real engines whose offloading has the store of their node as a secondary tier: tokens equal to a
plain engine's, chunks that another engine has stored, also while the sidecar is killed and
stopped."""

from __future__ import annotations

import itertools
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import cluster as rig
import engines
import pytest
from conftest import HYBRID, MODEL, MODELS, Cluster, need
from prompts import fresh

from kvspray_vllm import tier

WAIT_S = 120.0
CHUNK = 65536  # bytes: 32 tokens, four layers, in float32
ROOM = {"kv_cache_memory_bytes": 4 << 20, "max_model_len": 1536}  # 2,048 tokens
PRIMARY = 48 * CHUNK  # vLLM's own tier in host memory: 1,536 tokens
TALKS = 6  # of 900 tokens: an engine's cache holds two, and vLLM's own tier one


class Node(Cluster):
    """One sidecar with a store; P and D have the tier, R is plain."""

    def __init__(self, dir: pathlib.Path, start: bool = True) -> None:
        disk = dir / "disk"
        disk.mkdir()
        store = {"memory": "48MiB", "disk": [{"path": str(disk), "size": "256MiB"}]}
        super().__init__(dir, {"store": store}, start=False)
        self._patch = pytest.MonkeyPatch()
        for name in ("ASK_S", "GET_S", "PUT_S"):  # a busy machine makes no misses
            self._patch.setattr(tier, name, WAIT_S)
        if start:
            self.sd.start()

    def close(self) -> None:
        self._patch.undo()
        super().close()

    def spawn(self, name: str, **args: Any) -> engines.Engine:
        own = {"type": "KVSprayTier", "module_path": "kvspray_vllm.tier", "socket": self.sd.socket}
        extra = {
            "spec_name": "KVSprayTieringSpec",
            "spec_module_path": "kvspray_vllm.tier",
            "cpu_bytes_to_use": args.pop("primary", PRIMARY),
            "secondary_tiers": [own],
        }
        kv = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        model = str(args.pop("model", MODEL))
        log = self.dir / f"{name}.log"
        self.engines[name] = engines.Engine(name, model, log, None if name == "R" else kv, **args)
        return self.engines[name]


def came(e: engines.Engine) -> int:
    """Bytes from the store."""
    return int(rig.total(e.metrics(), "vllm:kv_offload_tiering_read_bytes_total"))


def went(e: engines.Engine) -> int:
    """Bytes to the store."""
    return int(rig.total(e.metrics(), "vllm:kv_offload_tiering_write_bytes_total"))


def stored(e: engines.Engine, want: int) -> None:
    """vLLM submits what a request has computed in later steps."""

    def there() -> bool:
        e.run(fresh(5, "a step"), 4)
        return went(e) >= want

    rig.wait_for(f"{want} bytes in the store from {e.name}", there, WAIT_S)


def all_stored(e: engines.Engine) -> None:
    """Nothing of what was computed is still on its way to the store."""

    def quiet() -> bool:
        before = went(e)
        e.run(fresh(5, "a step"), 4)
        busy = rig.total(e.metrics(), "vllm:kv_offload_tiering_active_cascade_jobs")
        return busy == 0 and went(e) == before

    rig.wait_for(f"the end of {e.name}'s stores", quiet, WAIT_S)


def uses_the_store(e: engines.Engine) -> None:
    """Its session is there, and its namespace is open."""
    before, prompts = went(e), itertools.count()

    def used() -> bool:
        e.run(fresh(200, (e.name, before, next(prompts))), 4)  # a block, also of hybrid models
        return went(e) > before

    rig.wait_for(f"a chunk in the store from {e.name}", used, WAIT_S)


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Node]:
    out = Node(workdir, start=False)
    try:
        out.spawn("P", **ROOM)
        out.spawn("D", **{**ROOM, "kv_cache_memory_bytes": 5 << 20})
        out.spawn("R", enable_prefix_caching=False)
        for e in out.engines.values():
            e.wait_up()
        yield out
        assert out.sd.panics() is None
    finally:
        out.close()


PROMPTS = [fresh(900, ("tier", i)) for i in range(TALKS)]


@pytest.fixture(scope="module")
def want(c: Node) -> list[Any]:
    return [c.r.run(p, 8).tokens for p in PROMPTS]


def rounds(c: Node, want: list[Any], n: int) -> None:
    """Prompts by turns at both engines."""
    for _ in range(n):
        for i in range(0, TALKS, 2):
            both = [e.add(PROMPTS[i + k], 8) for e in (c.p, c.d) for k in (0, 1)]
            assert [b.result().tokens for b in both] == 2 * want[i : i + 2]


def test_without_a_sidecar(c: Node, want: list[Any]) -> None:
    rounds(c, want, 2)
    assert came(c.p) == came(c.d) == 0


def test_another_engine_loads_what_one_has_computed(c: Node) -> None:
    c.sd.start()
    for e in (c.p, c.d):
        uses_the_store(e)
    prompt = fresh(900, "first")
    want = c.r.run(prompt, 8).tokens
    before, had = went(c.p), came(c.d)
    assert c.p.run(prompt, 8).tokens == want
    stored(c.p, before + 28 * CHUNK)
    assert c.d.run(prompt, 8).tokens == want
    assert came(c.d) == had + 28 * CHUNK


def test_prompts_by_turns(c: Node, want: list[Any]) -> None:
    had = came(c.p), came(c.d)
    rounds(c, want, 3)
    assert came(c.p) > had[0] and came(c.d) > had[1]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_sidecar_goes_away(c: Node, want: list[Any], how: str) -> None:
    """At any time, eight times. The engines answer right, and the next sidecar serves them."""
    end = threading.Event()

    def harm() -> None:
        for i in range(8):
            end.wait(0.05 + 0.07 * i)
            if how == "kill":
                c.sd.kill()
                c.sd.start()
            else:
                c.sd.stop_for(0.4)

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        while thread.is_alive():
            rounds(c, want, 1)
    finally:
        end.set()
        thread.join()
    had = came(c.d)

    def comes() -> bool:
        rounds(c, want, 1)
        return came(c.d) > had

    rig.wait_for("a chunk from the store", comes, WAIT_S)


def test_other_weights(c: Node, want: list[Any]) -> None:
    """What an engine computes with them is not in the store, and what is there does not come."""
    c.p.reload_weights(MODEL)
    had, before = came(c.p), went(c.p)
    rounds(c, want, 1)
    assert (came(c.p), went(c.p)) == (had, before)
    assert "the weights have changed" in c.p.tail(10_000)
    assert came(c.d) > 0


def test_several_ranks(zygote: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    c = Node(pathlib.Path(tmp_path_factory.mktemp("ranks")))
    try:
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        for name in "PD":
            c.spawn(name, **ranks)
        c.spawn("R")
        for e in c.engines.values():
            e.wait_up()
        for e in (c.p, c.d):
            uses_the_store(e)
        prompt = fresh(400, "ranks")
        want, before, had = c.r.run(prompt, 8).tokens, went(c.p), came(c.d)
        assert c.p.run(prompt, 8).tokens == want
        stored(c.p, before + 12 * CHUNK)
        assert c.d.run(prompt, 8).tokens == want
        assert came(c.d) == had + 12 * CHUNK
    finally:
        c.close()


# Groups of layers with windows, and recurrent states beside attention. vLLM's kernels of Mamba 2
# for CPUs fail with prefix caching, without which it does not offload states.
HYBRIDS = {
    "gemma3": {"model": HYBRID},
    "lfm2": {
        "model": MODELS / "tiny-lfm2",
        "enable_prefix_caching": True,
        # As in test_recurrent.py: vLLM's kernel for CPUs rotates too few heads of this model.
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    },
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_models(zygote: None, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """A second engine loads the chunks of all groups."""
    args = HYBRIDS[name]
    need(str(args["model"]), os.path.isdir(str(args["model"])), "run test/rig/env.py")
    c = Node(pathlib.Path(tmp_path_factory.mktemp(name)))
    try:
        for side in "PDR":
            c.spawn(side, primary=64 << 20, **args)
        for e in c.engines.values():
            e.wait_up()
        for e in (c.p, c.d):
            uses_the_store(e)
        prompts = [fresh(n, (name, n)) for n in (300, 700)]
        want = [c.r.run(p, 8).tokens for p in prompts]
        for p, tokens in zip(prompts, want, strict=True):
            before = went(c.p)
            assert c.p.run(p, 8).tokens == tokens
            stored(c.p, before + 1)
            all_stored(c.p)
        for p, tokens in zip(prompts, want, strict=True):
            had = came(c.d)
            assert c.d.run(p, 8).tokens == tokens
            assert came(c.d) > had
    finally:
        c.close()
