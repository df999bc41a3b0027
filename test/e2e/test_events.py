"""The router's index of vLLM's KV events: real API servers with small caches behind `kvspray
proxy`. What the router predicts is compared with what the engines found in their prefix caches,
while blocks are evicted; the index is whole again after a restart of the router, and empty after
one of an engine."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import random
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import cluster as rig
import hosts
import pytest
from conftest import MODEL
from prompts import BLOCK, fresh
from servers import MODEL_NAME, Process, Server, kvspray_config

NAMES = ("A", "B")
ROOM = 8192  # tokens of an engine's cache
TOKEN = 2048  # bytes of the cache of one token
WORDS = (
    "the cat sat on a mat and saw that it was good to be in one warm house of stone by some old "
    "river"
).split()


class Router(Process):
    """kvspray proxy with the events of its engines, and what it predicted for each request."""

    def start(
        self, engines: list[Engine], policy: str = "auto", replay: bool = True, join: str = ""
    ) -> Router:
        """join: the gossip of a sidecar, by which the router finds its engines."""
        cmd = [str(rig.BINARY), "proxy", "--mode", "prefill-first", "--policy", policy, "--listen",
            f"127.0.0.1:{self.port}", "--log-format", "json"]  # fmt: skip
        more = [{"events": e.events, **({"replay": e.replay} if replay else {})} for e in engines]
        listed = [rig.routed(e.url, "decode", **m) for e, m in zip(engines, more, strict=True)]
        self.spawn(cmd + (["--join", join] if join else listed), cwd=rig.ROOT)
        return self

    def lines(self, msg: str) -> list[dict[str, Any]]:
        out = [
            json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")
        ]
        return [line for line in out if line.get("msg") == msg]

    def placed(self) -> dict[str, dict[str, Any]]:
        return {line["request"]: line for line in self.lines("placed")}

    def value(self, name: str, **labels: str) -> float:
        return rig.total(self.metrics(), f"kvspray_proxy_{name}", **labels)

    def synced(self, engines: list[Engine]) -> bool:
        """Every engine's events are taken, and its models are known: a prompt is then looked up."""
        return self.value("kv_events_up") == len(engines)


class Engine(Server):
    def __init__(self, name: str, logs: pathlib.Path) -> None:
        super().__init__(name, logs)
        self.events = f"tcp://127.0.0.1:{rig.free_port()}"
        self.replay = f"tcp://127.0.0.1:{rig.free_port()}"

    def run(self, kv: dict[str, Any] | None = None, room: int = ROOM) -> Engine:
        config = {"enable_kv_cache_events": True, "publisher": "zmq",
            "endpoint": self.events.replace("127.0.0.1", "*"),
            "replay_endpoint": self.replay.replace("127.0.0.1", "*")}  # fmt: skip
        self.start(hosts.cpu(rig.ROOT / ".build"), MODEL.name, kv, "--kv-events-config",
            json.dumps(config), "--enable-prompt-tokens-details", "--max-model-len", "1536",
            "--kv-cache-memory-bytes", str(room * TOKEN), env={
            "VLLM_SERVER_DEV_MODE": "1"})  # fmt: skip
        return self

    def post(self, path: str) -> None:
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, b"", method="POST"), timeout=30
        ) as f:
            f.read()


def ask(url: str, rid: str, path: str, body: dict[str, Any]) -> int:
    """The tokens of the prompt that the engine found in its cache."""
    body = {"model": MODEL_NAME, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    req = urllib.request.Request(
        url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": rid},
    )
    with urllib.request.urlopen(req, timeout=120) as f:
        details = json.load(f)["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def traffic(n: int, seed: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Prompts that share prefixes: of tokens, of text, and conversations."""
    r = random.Random(seed)
    docs = [fresh(r.randrange(100, 900), (seed, i)) for i in range(12)]
    texts = [" ".join(r.choice(WORDS) for _ in range(r.randrange(60, 250))) for _ in range(8)]
    talks: list[list[dict[str, str]]] = [[] for _ in range(6)]
    for i in range(n):
        kind = r.randrange(4)
        if kind < 2:
            doc = r.choice(docs)
            yield (
                "/v1/completions",
                {
                    "prompt": doc[: r.randrange(40, len(doc))]
                    + fresh(r.randrange(1, 100), (seed, "tail", i))
                },
            )
        elif kind == 2:
            yield (
                "/v1/completions",
                {
                    "prompt": r.choice(texts)
                    + " "
                    + " ".join(r.choice(WORDS) for _ in range(r.randrange(20)))
                },
            )
        else:
            talk = r.choice(talks)
            if len(talk) > 8:
                talk.clear()
            talk.append(
                {
                    "role": "user",
                    "content": " ".join(r.choice(WORDS) for _ in range(r.randrange(5, 40))),
                }
            )
            yield "/v1/chat/completions", {"messages": list(talk)}
            talk.append({"role": "assistant", "content": r.choice(WORDS)})


class Score:
    """What was predicted, beside what engines found."""

    def __init__(self, router: Router, found: dict[str, int]) -> None:
        lines: dict[str, dict[str, Any]] = {}

        def all_placed() -> bool:
            nonlocal lines
            lines = router.placed()
            return found.keys() <= lines.keys()

        rig.wait_for("a line for each request", all_placed, 20)
        pairs = [(lines[rid]["cached"], n) for rid, n in found.items()]
        self.requests = len(pairs)
        self.reported = sum(bool(lines[rid]["reported"]) for rid in found)
        self.hits = sum(n > 0 for _, n in pairs)
        self.false = sum(p > n for p, n in pairs)
        self.false_tokens = sum(max(0, p - n) for p, n in pairs)
        self.predicted = sum(p for p, _ in pairs)
        self.found = sum(n for _, n in pairs)
        self.right = sum(min(p, n) for p, n in pairs)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.reported} looked up, {self.hits} with a hit: "
            f"{self.found} tokens found, {self.predicted} predicted, {self.right} of them right; "
            f"{self.false} requests with {self.false_tokens} tokens too many"
        )


@pytest.fixture(scope="module")
def engines(zygote: None, workdir: pathlib.Path) -> Iterator[list[Engine]]:
    out = [Engine(name, workdir) for name in NAMES]
    try:
        for e in out:
            e.run()
        for e in out:
            rig.wait_for(f"engine {e.name} up", e.up, 300, 0.25)
        yield out
    finally:
        for e in out:
            e.kill()


@pytest.fixture
def router(
    engines: list[Engine], workdir: pathlib.Path, request: pytest.FixtureRequest
) -> Iterator[Router]:
    r = Router(request.node.name, workdir).start(engines)
    try:
        rig.wait_for("the router and its feeds", lambda: r.up() and r.synced(engines), 30)
        # The first check asks for the models.
        rig.wait_for(
            "models",
            lambda: (
                not ask(r.url, "first", "/v1/completions", {"prompt": [7] * 3}) and looked_up(r)
            ),
            30,
        )
        yield r
    finally:
        r.stop()


def looked_up(r: Router) -> bool:
    return r.value("tokenizations_total") > 0


def test_predicted_hits_are_those_of_the_engines(engines: list[Engine], router: Router) -> None:
    found = {
        f"seq-{i}": ask(router.url, f"seq-{i}", path, body)
        for i, (path, body) in enumerate(traffic(400, "alone"))
    }
    score = Score(router, found)
    print(f"\none after another: {score}")
    assert score.reported == score.requests
    assert score.hits > score.requests / 3
    assert score.false < score.requests / 100
    assert score.right >= 0.95 * score.found
    assert router.value("kv_event_voids_total") == router.value("kv_event_gaps_total") == 0
    assert router.value("tokenizations_total", result="failed") == 0

    # A few at once: blocks come and go between a prediction and the engine's own look.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = {
            f"many-{i}": pool.submit(ask, router.url, f"many-{i}", path, body)
            for i, (path, body) in enumerate(traffic(200, "many"))
        }
        together = Score(router, {rid: job.result() for rid, job in jobs.items()})
    print(f"four at once: {together}")
    assert together.false_tokens < 0.1 * together.found

    computed = sum(
        rig.total(e.metrics(), "vllm:prefix_cache_queries_total")
        - rig.total(e.metrics(), "vllm:prefix_cache_hits_total")
        for e in engines
    )
    assert computed > 2 * ROOM * len(engines), "few blocks were evicted"


def blocks(r: Router) -> dict[str, float]:
    return {k: v for k, v in r.metrics().items() if k.startswith("kvspray_proxy_kv_blocks{")}


def test_a_router_that_restarts_knows_everything_within_5_s(
    engines: list[Engine], router: Router
) -> None:
    for i, (path, body) in enumerate(traffic(30, "before")):
        ask(router.url, f"before-{i}", path, body)
    # Events follow an answer within moments.
    rig.wait_for("events", lambda: blocks(router) == (time.sleep(0.3) or blocks(router)), 10)
    want = blocks(router)
    assert all(want.values())
    again = Router("again", router.log.parent).start(engines)
    start = time.monotonic()
    try:
        rig.wait_for("the router", again.up, 30)
        rig.wait_for("the whole index", lambda: blocks(again) == want, 30)
        # A replay is counted once its last batch is in the index.
        rig.wait_for(
            "replays",
            lambda: again.value("kv_event_replays_total", outcome="ok") == len(engines),
            10,
        )
        took = time.monotonic() - start
        print(f"\n{sum(want.values()):.0f} blocks after {took:.2f} s")
        if os.environ.get("KVSPRAY_MEASURE"):  # a busy machine takes longer
            assert took < 5
    finally:
        again.stop()


def test_a_cache_that_is_cleared(engines: list[Engine], router: Router) -> None:
    prompt = fresh(300, "cleared")
    body = {"prompt": prompt}
    ask(router.url, "clear-0", "/v1/completions", body)
    assert ask(router.url, "clear-1", "/v1/completions", body) == 9 * BLOCK
    for e in engines:
        e.post("/reset_prefix_cache")
        ask(e.url, "a step, after which vLLM publishes", "/v1/completions", {"prompt": [5]})
    rig.wait_for("no blocks", lambda: sum(blocks(router).values()) == 0, 10)
    found = {"clear-2": ask(router.url, "clear-2", "/v1/completions", body)}
    score = Score(router, {**found, "clear-1": 9 * BLOCK})
    assert found["clear-2"] == 0 and score.predicted == 9 * BLOCK


def test_an_engine_that_restarts(engines: list[Engine], router: Router) -> None:
    a = engines[0]
    prompt = {"prompt": fresh(300, "restart")}
    for i in range(3):
        ask(a.url, f"direct-{i}", "/v1/completions", prompt)
    rig.wait_for("blocks", lambda: router.value("kv_blocks", url=a.url) > 0, 10)
    a.kill()
    rig.wait_for("the feed is down", lambda: router.value("kv_events_up", url=a.url) == 0, 30)
    ask(router.url, "down-0", "/v1/completions", prompt)  # the other engine serves it
    a.run()
    rig.wait_for(f"engine {a.name} up", a.up, 300, 0.25)
    rig.wait_for("the feed is up", lambda: router.value("kv_events_up", url=a.url) == 1, 30)
    ask(a.url, "direct-4", "/v1/completions", {"prompt": fresh(40, "after")})
    rig.wait_for("the new blocks only", lambda: router.value("kv_blocks", url=a.url) == 1, 10)
    assert router.value("kv_event_voids_total", reason="restart") == 1
    named = [
        line
        for line in router.lines("the cached blocks of an engine are forgotten")
        if line["url"] == a.url
    ]
    assert len(named) == 1


def test_all_that_vllm_keeps_is_replayed(zygote: None, workdir: pathlib.Path) -> None:
    """vLLM's own publisher with as many batches as it keeps, each of a full step, and more than its
    sockets queue."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    e = Engine("published", workdir)
    batches, each = 10_000, 64
    publisher = ZmqEventPublisher(
        0, e.events.replace("127.0.0.1", "*"), e.replay.replace("127.0.0.1", "*")
    )
    router = Router("replayed", workdir)
    try:
        for i in range(batches):
            hashes = [(i * each + j).to_bytes(32, "big") for j in range(each)]
            tokens = [i % 50_000, *range(each * BLOCK - 1)]
            publisher.publish(
                KVEventBatch(
                    ts=time.time(),
                    events=[BlockStored(hashes, None, tokens, BLOCK, None, "GPU", None)],
                )
            )
        rig.wait_for("all is published", publisher._event_queue.empty, 60)
        router.start([e])  # its engine does not answer, but publishes
        start = time.monotonic()

        def blocks_of() -> float:
            try:
                return router.value("kv_blocks") if router.value("kv_events_up") else 0
            except OSError:
                return 0

        rig.wait_for("the whole index", lambda: blocks_of() == batches * each, 60)
        took = time.monotonic() - start
        size = router.value("kv_index_bytes")
        print(f"\n{batches * each} blocks after {took:.2f} s, {size / 1e6:.0f} MB")
        if os.environ.get("KVSPRAY_MEASURE"):  # a busy machine takes longer
            assert took < 5
    finally:
        router.stop()
        publisher.shutdown()


def test_pages_of_the_store_count(zygote: None, workdir: pathlib.Path) -> None:
    """The engine announces what the store of its node has. Such tokens are no hit on the GPU, but
    need no prefill. The router finds the engine, and where it announces this, by gossip."""
    e, gossip = Engine("S", workdir), f"127.0.0.1:{rig.free_port()}"
    sidecar = rig.Sidecar(
        "store",
        workdir,
        {
            "store": {"memory": "48MiB"},
            "engine": {"api": e.url, "role": "decode"},
            "peer": {"gossip": {"listen": gossip}},
        },
    )
    kv = kvspray_config(sidecar.socket, "kv_both")
    kv["kv_connector_extra_config"]["store"] = True
    router = Router("store-router", workdir)
    try:
        sidecar.start()
        e.run(kv, 2048)
        rig.wait_for("engine S up", e.up, 300, 0.25)
        router.start([], join=gossip)
        rig.wait_for("the router and its feed", lambda: router.up() and router.synced([e]), 30)
        prompt = {"prompt": fresh(300, "store")}
        ask(router.url, "store-0", "/v1/completions", prompt)

        def stored() -> bool:
            ask(e.url, "a step, after which vLLM publishes", "/v1/completions", {"prompt": [5]})
            return (
                rig.total(e.metrics(), "vllm:kvspray_store_pages_total", op="put", outcome="stored")
                >= 9
            )

        rig.wait_for("pages in the store", stored, 30)
        for i in range(4):  # more than the engine's cache holds
            ask(router.url, f"other-{i}", "/v1/completions", {"prompt": fresh(1000, ("other", i))})
        got = ask(router.url, "store-1", "/v1/completions", prompt)
        assert got == 9 * BLOCK
        rig.wait_for("the line", lambda: "store-1" in router.placed(), 20)
        line = router.placed()["store-1"]
        assert line["reported"] and line["cached"] == 0 and line["reused"] == 9 * BLOCK, line
    finally:
        router.stop()
        e.kill()
        sidecar.stop()
