# SPDX-License-Identifier: Apache-2.0
"""SGLang's own server on a CPU with HiCache on our store: a conversation whose prompts come back
from the store has the tokens of a server without it, also while the sidecar dies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

import cluster as rig  # noqa: E402
import pytest  # noqa: E402
from servers import Process  # noqa: E402

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

START_S = 1200.0  # two servers start at once, and the first request compiles a hash function
PAGE = 16
TURN, ANSWER = 60, 8  # tokens
MODEL = rig.ROOT / ".build" / "models" / "tiny-llama"


class Server(Process):
    """One SGLang server. ``sidecar``: with HiCache on its store."""

    def __init__(self, name: str, logs: pathlib.Path, sidecar: rig.Sidecar | None) -> None:
        super().__init__(name, logs)
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODEL), "--device",
            "cpu", "--host", "127.0.0.1", "--port", str(self.port), "--mem-fraction-static", "0.7",
            "--max-total-tokens", "2048", "--max-running-requests", "8", "--page-size", str(PAGE),
            "--disable-overlap-schedule", "--skip-server-warmup", "--enable-cache-report",
            "--enable-metrics",
        ]  # fmt: skip
        if sidecar is not None:
            extra = {
                "backend_name": "kvspray", "module_path": "kvspray_sglang.hicache",
                "class_name": "KvsprayHiCache", "interface_v1": 1, "prefetch_threshold": PAGE,
                "socket": sidecar.socket,
            }  # fmt: skip
            command += [
                "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy",
                "write_through", "--hicache-io-backend", "direct", "--hicache-mem-layout",
                "page_first_direct",
                "--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy",
                "wait_complete",
                "--hicache-storage-backend-extra-config", json.dumps(extra),
            ]  # fmt: skip
        path = os.pathsep.join(
            p for p in (str(HERE / "stand_ins"), os.environ.get("PYTHONPATH", "")) if p
        )
        # Its modules are compiled with torch's inductor at will otherwise, which needs minutes.
        env = {
            "PYTHONPATH": path,
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "PYTHONWARNINGS": "ignore",
        }
        self.spawn(command, env)

    def ready(self) -> Server:
        rig.wait_for(self.name, self.up, START_S, 0.5)
        return self

    def post(self, path: str, body: Any = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            text = answer.read()
        return json.loads(text) if body is not None else text

    def generate(self, ids: list[int]) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt's came from a cache."""
        out = self.post(
            "/generate",
            {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True},
            },
        )
        return out["output_ids"], out["meta_info"]["cached_tokens"]

    def forget(self) -> None:
        """Empties SGLang's own caches, once everything is stored."""
        rig.wait_for(
            "an idle server", lambda: b"flushed" in self.post("/flush_cache").lower(), 60, 0.2
        )


def question(talk: int, turn: int) -> list[int]:
    return [(talk * 331 + turn * 97 + i * 7) % 900 + 2 for i in range(TURN)]


def idle() -> None:
    pass


def conversation(
    server: Server, talk: int, turns: int, each: Callable[[], None] = idle
) -> tuple[list[list[int]], list[int]]:
    """The answers of a conversation, and the cached tokens of each turn."""
    prompt: list[int] = []
    answers, cached = [], []
    for turn in range(turns):
        prompt += question(talk, turn)
        answer, hits = server.generate(prompt)
        answers.append(answer)
        cached.append(hits)
        prompt += answer
        each()
    return answers, cached


@pytest.fixture(scope="module")
def logs() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        yield pathlib.Path(dir)


TALKS, TURNS = 3, 4


@pytest.fixture(scope="module")
def sidecar(logs: pathlib.Path) -> Iterator[rig.Sidecar]:
    s = rig.Sidecar("a", logs, {"store": {"memory": "64MiB"}})
    with rig.running(s):
        yield s
        assert s.panics() is None


@pytest.fixture(scope="module")
def servers(logs: pathlib.Path, sidecar: rig.Sidecar) -> Iterator[tuple[Server, Server]]:
    """Without HiCache, and with it."""
    started: list[Server] = []
    try:
        for name, of in (("plain", None), ("hicache", sidecar)):
            started.append(Server(name, logs, of))
        plain, hicache = (s.ready() for s in started)
        yield plain, hicache
    finally:
        for s in started:
            s.stop()


def test_conversations(servers: tuple[Server, Server], sidecar: rig.Sidecar) -> None:
    plain, server = servers
    # A prompt that is computed at once has other roundings than one whose prefix was cached, so
    # each conversation is compared with one that had the same in its caches.
    cached_before, nothing_cached, cached_again = (
        conversation(plain, talk, TURNS, each)[0]
        for talk, each in ((0, idle), (1, plain.forget), (2, idle))
    )
    assert conversation(server, 0, TURNS)[0] == cached_before
    rig.wait_for("pages in the store", lambda: stored(sidecar) > 0, 60)
    # Every turn's prompt comes from the store: nothing else has it.
    answers, cached = conversation(server, 0, TURNS, server.forget)
    assert answers == cached_before
    prompts = [(TURN + ANSWER) * turn + TURN for turn in range(TURNS)]
    print(f"prompts of {prompts} tokens, of which the store had {cached}")
    assert all(hits >= n // PAGE * PAGE - PAGE for n, hits in zip(prompts, cached, strict=True))
    assert found(sidecar) >= sum(cached[1:]) // PAGE

    # The sidecar dies in the middle of a conversation, and comes back without its pages.
    turns: list[int] = []

    def kill_once() -> None:
        if not turns:
            sidecar.kill()
        turns.append(1)
        server.forget()

    assert conversation(server, 1, TURNS, kill_once)[0] == nothing_cached
    sidecar.start()

    def served_again() -> bool:
        server.generate(question(TALKS, 0))
        server.forget()
        return found(sidecar) > 0

    rig.wait_for("hits in the new sidecar's store", served_again, 120, 1)
    assert conversation(server, 2, TURNS, server.forget)[0] == cached_again
    assert found(sidecar) >= (TURN + ANSWER) * (TURNS - 1) // PAGE
    assert server.up()
    text = server.log.read_text(errors="replace")
    assert "cannot map" not in text and "kvspray: storage backend" not in text


def counted(sidecar: rig.Sidecar, metric: str, **labels: str) -> float:
    return rig.total(rig.parse_metrics(rig.get(sidecar.url + "/metrics")), metric, **labels)


def stored(sidecar: rig.Sidecar) -> float:
    return counted(sidecar, "kvspray_store_pages_total", result="stored")


def found(sidecar: rig.Sidecar) -> float:
    return counted(sidecar, "kvspray_store_hits_total")
