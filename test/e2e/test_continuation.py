"""Answers whose engine dies: the router lets another one continue them. No client sees an error,
and the answer is that of an engine that lives."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import cluster as rig
import hosts
import pytest
from conftest import MODEL
from prompts import fresh
from servers import MODEL_NAME, START_S, Process, Server

TOKENS = 1200  # an answer takes seconds, in which its engine dies
ROOM = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20))
# A tie that turns: the logits of two tokens are closer than rounding of another batch moves them.
TIE = 1e-3


class Router(Process):
    def start(self, engines: list[Server]) -> Router:
        routed = [rig.routed(e.url, "decode") for e in engines]
        self.spawn(
            [str(rig.BINARY), "proxy", "--continue", "--listen", f"127.0.0.1:{self.port}",
            "--silent-after", "2s", *routed], cwd=rig.ROOT,
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
def router(engines: list[Server], workdir: pathlib.Path) -> Iterator[Router]:
    r = Router("router", workdir).start(engines)
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
    stop: str | None = None
    usage: dict[str, int] | None = None
    # Of each token of a completion, the logprobs of the two likeliest.
    top: list[dict[str, float]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    tokens: list[str] = dataclasses.field(default_factory=list)
    content: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)
    done: bool = False

    def add(self, chunk: dict[str, Any]) -> None:
        self.names.add(chunk["id"])
        if "usage" in chunk and chunk["usage"] is not None:
            self.usage = chunk["usage"]
        for choice in chunk["choices"]:
            assert self.finish is None, "an event after the end"
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.text += text or ""
            self.ids += choice.get("token_ids") or []
            self.finish = choice["finish_reason"]
            self.stop = choice.get("stop_reason")
            logprobs = choice.get("logprobs") or {}
            self.top += logprobs.get("top_logprobs", [])
            self.offsets += logprobs.get("text_offset", [])
            self.tokens += logprobs.get("tokens", [])
            self.content += logprobs.get("content", [])


def stream(url: str, path: str, body: dict[str, Any], at: int = 0, then: Any = None) -> Answer:
    """One streamed answer. After that many events the client calls then."""
    out = Answer()
    conn = http.client.HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1]), timeout=300)
    try:
        conn.request("POST", path, json.dumps({"model": MODEL_NAME, "stream": True, **body}),
            {"Content-Type": "application/json"})  # fmt: skip
        resp = conn.getresponse()
        assert resp.status == 200, resp.read(600)
        events = 0
        for line in resp:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                out.done = True
                continue
            out.add(json.loads(line[6:]))
            events += 1
            if events == at:
                then()
    finally:
        conn.close()
    assert out.done, "the stream has no end"
    return out


def serving(engines: list[Server]) -> Server:
    (e,) = [e for e in engines if rig.total(e.metrics(), "vllm:num_requests_running") > 0]
    return e


def broken(
    router: Router, engines: list[Server], path: str, body: dict[str, Any], at: int
) -> Answer:
    """An answer whose engine dies in the middle: it is stopped first, so that it has not computed
    the rest before it dies."""
    died: list[Server] = []

    def kill() -> None:
        e = serving(engines)
        for pid in e.pids():
            os.kill(pid, signal.SIGSTOP)
        died.append(e)
        e.kill()

    before = router.value("continuations_total")
    tokens = router.value("continuation_tokens_total")
    out = stream(router.url, path, body, at, kill)
    assert router.value("continuations_total") == before + 1
    sent = router.value("continuation_tokens_total") - tokens
    print(f"{path}: {len(out.ids)} tokens, {sent:.0f} sent to the next engine")
    (e,) = died
    start(e)
    rig.wait_for(f"engine {e.name} up again", e.up, START_S, 0.25)
    rig.wait_for("the router to use it", lambda: router.value("engine_up") == len(engines), 60)
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


def test_greedy_answer_continues(router: Router, engines: list[Server]) -> None:
    """With logprobs, their offsets, and the usage of the whole answer."""
    prompt = fresh(100, "greedy")
    body = completion(
        prompt=prompt, temperature=0, logprobs=2, stream_options={"include_usage": True}
    )
    want = stream(router.url, "/v1/completions", body)
    got = broken(router, engines, "/v1/completions", body, 40)
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


def test_sampled_answer_continues(router: Router, engines: list[Server]) -> None:
    prompt = fresh(100, "sampled")
    body = completion(prompt=prompt, temperature=0.8, seed=7, logprobs=2)
    want = stream(router.url, "/v1/completions", body)
    again = stream(router.url, "/v1/completions", body)
    assert again.ids == want.ids, "the engine itself does not repeat a seeded answer"
    got = broken(router, engines, "/v1/completions", body, 60)
    equal = next(
        (i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b),
        TOKENS,
    )
    print(f"{equal} of {TOKENS} tokens equal")
    assert equal >= 60 and len(got.ids) == TOKENS


def test_chat_and_stop_string_continue(router: Router, engines: list[Server]) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "temperature": 0,
        "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True},
    }  # fmt: skip
    path = "/v1/chat/completions"
    whole = stream(router.url, path, chat)
    # It ends the answer long after the death.
    stop = whole.text[len(whole.text) * 3 // 4 :][:12]
    cut = whole.text.index(stop)
    print(f"the stop string is {stop!r} at {cut} of {len(whole.text)}")
    chat["stop"] = [stop, "never in it"]
    want = stream(router.url, path, chat)
    assert want.text == whole.text[:cut] and want.finish == "stop" and want.stop == stop
    got = broken(router, engines, path, chat, 40)
    assert (got.text, got.finish, got.stop) == (want.text, want.finish, want.stop)
    assert got.ids == want.ids and len(got.names) == 1
    assert got.usage is not None and want.usage is not None
    assert got.usage["completion_tokens"] == want.usage["completion_tokens"] == len(got.ids)
    for a, b in zip(got.content, want.content, strict=True):
        assert (a["token"], a["bytes"]) == (b["token"], b["bytes"])
        # Candidates with the same text are one after the seam.
        mine, theirs = (list(dict.fromkeys(x["token"] for x in y["top_logprobs"])) for y in (a, b))
        assert mine[: len(theirs)] == theirs
        assert abs(a["logprob"] - b["logprob"]) < TIE
