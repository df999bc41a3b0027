"""Answers whose engine dies: the router lets another one continue them. No client sees an error,
and the answer is that of an engine that lives."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import cluster as rig
import hosts
import pytest
from conftest import MODEL
from prompts import fresh
from servers import MODEL_NAME, START_S, Process, Server

TOKENS = 600
EVENTS = 60  # of an answer, before its engine dies
CUT = 16  # tokens before the seam that the next engine may compute again
ROOM = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20))
# A tie that turns: the logits of two tokens are closer than rounding of another batch moves them.
TIE = 1e-3


class Death:
    """The end of the engine that first sends a number of events of a stream."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.lock = threading.Lock()
        self.engine: Server | None = None
        self.reached = threading.Event()

    def meets(self, engine: Server) -> bool:
        with self.lock:
            if self.engine is None:
                self.engine = engine
        self.reached.set()
        return self.engine is engine


class Gate:
    """Forwards connections to an engine. Of a stream in which the engine dies, it passes the events
    before the death: so the engine has not sent the rest, however fast it is."""

    def __init__(self, engine: Server) -> None:
        self.engine = engine
        self.death: Death | None = None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                here = self.listener.accept()[0]
            except OSError:
                return  # close
            threading.Thread(target=self.connect, args=(here,), daemon=True).start()

    def connect(self, here: socket.socket) -> None:
        with here:
            try:
                there = socket.create_connection(("127.0.0.1", self.engine.port))
            except OSError:
                return  # it is dead
            with there:
                up = threading.Thread(target=self.forward, args=(here, there), daemon=True)
                up.start()
                self.answers(there, here)
                for end in (here, there):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                up.join()

    def forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def answers(self, engine: socket.socket, router: socket.socket) -> None:
        events, stream = 0, False
        with contextlib.suppress(OSError):
            while data := engine.recv(1 << 16):
                if b"text/event-stream" in data:
                    events, stream = 0, True  # of an answer on this connection
                if stream and (death := self.death) is not None:
                    parts = data.split(b"\n\n")
                    left = death.events - events
                    events += len(parts) - 1
                    if events >= death.events and death.meets(self.engine):
                        router.sendall(b"\n\n".join([*parts[:left], b""]))
                        while engine.recv(1 << 16):
                            pass  # until it dies
                        return
                router.sendall(data)

    def close(self) -> None:
        self.listener.close()


class Router(Process):
    def start(self, gates: list[Gate]) -> Router:
        routed = [rig.routed(g.url, "decode") for g in gates]
        self.spawn(
            [str(rig.BINARY), "proxy", "--continue", "--listen", f"127.0.0.1:{self.port}",
            "--silent-after", "60s", *routed], cwd=rig.ROOT,
        )  # fmt: skip
        return self

    def value(self, name: str, **labels: str) -> float:
        return rig.total(self.metrics(), f"kvspray_proxy_{name}", **labels)


@pytest.fixture(scope="module")
def engines(zygote: None, workdir: pathlib.Path) -> Iterator[list[Server]]:
    out = [Server(name, workdir) for name in "AB"]
    try:
        for e in out:
            start(e)
        for e in out:
            rig.wait_for(f"engine {e.name} up", e.up, START_S, 0.25)
        yield out
    finally:
        for e in out:
            e.kill()


@pytest.fixture(scope="module")
def gates(engines: list[Server]) -> Iterator[list[Gate]]:
    out = [Gate(e) for e in engines]
    yield out
    for g in out:
        g.close()


@pytest.fixture(scope="module")
def router(gates: list[Gate], workdir: pathlib.Path) -> Iterator[Router]:
    r = Router("router", workdir).start(gates)
    try:
        rig.wait_for("the router", r.up, 30)
        yield r
        assert r.value("continuations_refused_total") == 0
    finally:
        r.stop()


def start(e: Server) -> None:
    e.start(hosts.cpu(rig.ROOT / ".build"), MODEL.name, None, *ROOM)


@dataclasses.dataclass
class Answer:
    text: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    usage: dict[str, int] | None = None
    # Of each token of a completion, the logprobs of the two likeliest.
    top: list[dict[str, float]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    tokens: list[str] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)
    # The number of tokens, and the text after them, by events.
    progress: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    done: bool = False

    def until(self, tokens: int) -> str:
        return max((text for n, text in self.progress if n <= tokens), key=len)

    def add(self, chunk: dict[str, Any]) -> None:
        self.names.add(chunk["id"])
        if "usage" in chunk and chunk["usage"] is not None:
            self.usage = chunk["usage"]
        for choice in chunk["choices"]:
            assert self.finish is None, "an event after the end"
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.text += text or ""
            self.ids += choice.get("token_ids") or []
            self.progress.append((len(self.ids), self.text))
            self.finish = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            self.top += logprobs.get("top_logprobs", [])
            self.offsets += logprobs.get("text_offset", [])
            self.tokens += logprobs.get("tokens", [])


def stream(url: str, path: str, body: dict[str, Any]) -> Answer:
    out = Answer()
    conn = http.client.HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1]), timeout=300)
    try:
        conn.request("POST", path, json.dumps({"model": MODEL_NAME, "stream": True, **body}),
            {"Content-Type": "application/json"})  # fmt: skip
        resp = conn.getresponse()
        assert resp.status == 200, resp.read(600)
        for line in resp:
            if line == b"data: [DONE]\n":
                out.done = True
            elif line.startswith(b"data: "):
                out.add(json.loads(line[6:]))
    finally:
        conn.close()
    assert out.done, "the stream has no end"
    return out


def broken(router: Router, gates: list[Gate], path: str, body: dict[str, Any]) -> Answer:
    """An answer whose engine is killed (kill -9) in the middle."""
    for g in gates:
        if g.engine.proc is None:
            start(g.engine)
            rig.wait_for(f"engine {g.engine.name} up again", g.engine.up, START_S, 0.25)
    rig.wait_for("the engines", lambda: router.value("engine_up") == len(gates), 60)
    before = router.value("continuations_total"), router.value("continuation_tokens_total")
    death = Death(EVENTS)
    for g in gates:
        g.death = death

    def kill() -> None:
        death.reached.wait()
        assert death.engine is not None
        death.engine.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    out = stream(router.url, path, body)
    killer.join()
    for g in gates:
        g.death = None
    assert router.value("continuations_total") == before[0] + 1
    sent = router.value("continuation_tokens_total") - before[1]
    print(f"{path}: {len(out.ids)} tokens, {sent:.0f} sent to the next engine")
    return out


def same_until_a_tie(got: Answer, want: Answer) -> None:
    """Equal tokens, or a first difference between two tokens of nearly equal logits."""
    for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)):
        if a != b:
            first, second = sorted(want.top[i].values(), reverse=True)[:2]
            print(f"token {i} differs; the gap is {first - second:g}")
            assert first - second < TIE
            return
    assert got.text == want.text


def completion(**more: Any) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **more}


def test_greedy_answer_continues(router: Router, gates: list[Gate]) -> None:
    """With logprobs, their offsets, and the usage of the whole answer."""
    prompt = fresh(100, "greedy")
    body = completion(
        prompt=prompt, temperature=0, logprobs=2, stream_options={"include_usage": True}
    )
    want = stream(router.url, "/v1/completions", body)
    got = broken(router, gates, "/v1/completions", body)
    assert len(got.ids) == len(want.ids) == TOKENS
    assert got.finish == want.finish == "length" and len(got.names) == 1
    assert got.usage is not None and want.usage is not None
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.usage[key] == want.usage[key]
    at = 0
    for offset, token in zip(got.offsets, got.tokens, strict=True):
        assert offset == at
        at += len(token)
    same_until_a_tie(got, want)


def test_sampled_answer_continues(router: Router, gates: list[Gate]) -> None:
    """Its last token before the death may be a part of a character, which is computed again: the
    client gets text only. vLLM's first model runner then begins its seeded noise again."""
    body: dict[str, Any] = {
        "prompt": fresh(100, "sampled"), "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": 0.8, "seed": 7, "stream_options": {"include_usage": True},
    }  # fmt: skip
    want = stream(router.url, "/v1/completions", body)
    again = stream(router.url, "/v1/completions", {**body, "return_token_ids": True})
    assert again.text == want.text, "the engine itself does not repeat a seeded answer"
    got = broken(router, gates, "/v1/completions", body)
    before = again.until(EVENTS - CUT)
    equal = len(os.path.commonprefix([got.text, want.text]))
    print(f"{equal} of {len(want.text)} characters equal, at least {len(before)} before the seam")
    assert got.text.startswith(before)
    assert got.usage is not None and want.usage is not None
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.usage[key] == want.usage[key]


def test_chat_continues(router: Router, gates: list[Gate]) -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    path = "/v1/chat/completions"
    want = stream(router.url, path, chat)
    got = broken(router, gates, path, chat)
    assert (got.text, got.finish) == (want.text, "length") and len(got.names) == 1
    assert got.usage is not None and want.usage is not None
    assert got.usage["completion_tokens"] == want.usage["completion_tokens"] == TOKENS
