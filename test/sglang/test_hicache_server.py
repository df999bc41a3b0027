"""SGLang's own server on a CPU with HiCache on our store: a conversation whose prompts come back
from the store has the tokens of a server without it, also while the sidecar dies. The sidecar
makes the loads, too.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import pytest
from sglang_server import PAGE, Server, counted, found, rig, stored, with_store

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

TURN, ANSWER = 60, 8  # tokens


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
        answer, hits = server.generate(prompt, ANSWER)
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
        loads = {"KVSPRAY_RIG_LOADS": "1"}
        for name, args in (("plain", []), ("hicache", with_store(sidecar, loads="sidecar"))):
            started.append(Server(name, logs, args, loads).start())
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
    copies = counted(sidecar, "kvspray_copies_total", outcome="ok")
    print(f"{copies:.0f} copies from the host pool by the sidecar")
    assert copies > 0

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
        server.generate(question(TALKS, 0), ANSWER)
        server.forget()
        return found(sidecar) > 0

    rig.wait_for("hits in the new sidecar's store", served_again, 120, 1)
    assert conversation(server, 2, TURNS, server.forget)[0] == cached_again
    assert found(sidecar) >= (TURN + ANSWER) * (TURNS - 1) // PAGE
    assert server.up()
    text = server.log.read_text(errors="replace")
    assert "cannot map" not in text and "kvspray: storage backend" not in text
