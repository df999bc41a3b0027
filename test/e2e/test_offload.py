"""A real engine whose blocks go to host memory and come back by copies of the sidecar: tokens equal
to a plain engine's, also while the sidecar is killed and stopped."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import cluster as rig
import engines
import pytest
from conftest import MODEL, Cluster
from prompts import fresh

ROOM = {"kv_cache_memory_bytes": 4 << 20, "max_model_len": 1536}  # 2,048 tokens
TALKS = 6  # of 900 tokens: an engine's own cache holds two


class Node(Cluster):
    """One sidecar; D offloads, R is plain."""

    def __init__(self, dir: pathlib.Path) -> None:
        super().__init__(dir, start=False)

    def spawn(self, name: str, **args: Any) -> engines.Engine:
        extra = {
            "spec_name": "KVSprayOffloadingSpec", "spec_module_path": "kvspray_vllm.offload",
            "cpu_bytes_to_use": 32 << 20, "socket": self.sd.socket,
        }  # fmt: skip
        kv = (
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            if name == "D"
            else None
        )
        args = {**ROOM, **args} if name == "D" else {"enable_prefix_caching": False, **args}
        self.engines[name] = engines.Engine(name, str(MODEL), self.dir / f"{name}.log", kv, **args)
        return self.engines[name]

    def copies(self, outcome: str = "ok") -> float:
        return rig.total(
            rig.parse_metrics(rig.get(self.sd.url + "/metrics")),
            "kvspray_copies_total",
            outcome=outcome,
        )

    def loaded(self) -> float:
        return rig.total(self.d.metrics(), "vllm:kv_offload_load_bytes_total")


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Node]:
    out = Node(workdir)
    try:
        for name in "DR":
            out.spawn(name).wait_up()
        yield out
        assert out.sd.panics() is None
    finally:
        out.close()


PROMPTS = [fresh(900, ("offload", i)) for i in range(TALKS)]


@pytest.fixture(scope="module")
def want(c: Node) -> list[Any]:
    return [c.r.run(p, 8).tokens for p in PROMPTS]


def rounds(c: Node, want: list[Any], n: int) -> None:
    """Prompts by turns, two at a time: most of each comes back from host memory."""
    for _ in range(n):
        for i in range(0, TALKS, 2):
            both = [c.d.add(p, 8) for p in PROMPTS[i : i + 2]]
            assert [b.result().tokens for b in both] == want[i : i + 2]


def test_without_a_sidecar(c: Node, want: list[Any]) -> None:
    rounds(c, want, 2)
    assert c.loaded() > 0
    assert "vLLM's own worker copies" in c.d.tail(10_000)


def test_by_the_sidecar(c: Node, want: list[Any]) -> None:
    c.sd.start()

    def moved() -> bool:
        rounds(c, want, 1)
        return c.copies() > 0

    rig.wait_for("a copy by the sidecar", moved, 60)
    before, loaded = c.copies(), c.loaded()
    rounds(c, want, 2)
    assert c.copies() > before and c.loaded() > loaded
    assert c.copies("failed") == 0


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_sidecar_goes_away(c: Node, want: list[Any], how: str) -> None:
    """At any time, eight times. The engine answers right, and the next sidecar copies again."""
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
    before = c.copies()

    def moved() -> bool:
        rounds(c, want, 1)
        return c.copies() > before

    rig.wait_for("a copy by the sidecar", moved, 60)
