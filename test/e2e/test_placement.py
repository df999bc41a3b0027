"""A policy of the router beside failures: the holder of a prompt's cache is killed (kill -9) while
requests are placed there. No client sees an error, and every answer is that of a plain engine.
KVSPRAY_HOLDER_KILLS: how often the holder's sidecar is killed with requests under way; from 100 on
the holder itself is killed five times."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any

import cluster as rig
import hosts
import pytest
import test_events
from conftest import MODEL
from prompts import fresh
from servers import Server, ask, kvspray_config

NAMES = ("A", "B", "C")
KILLS = int(os.environ.get("KVSPRAY_HOLDER_KILLS", "6"))
ENGINE_KILLS = 5 if KILLS >= 100 else 1
AT_ONCE = 4
ANSWER = 8  # tokens
TOKEN = test_events.TOKEN
POLICIES = ("fetch", "auto")


class Engine(test_events.Engine):
    """It prefills and decodes, and has a sidecar of its own."""

    def __init__(self, name: str, dir: pathlib.Path) -> None:
        super().__init__(name, dir)
        self.sidecar = rig.Sidecar(f"sidecar-{name}", dir)

    def connected(self) -> bool:
        m = self.sidecar.metrics()
        return all(
            rig.total(m, "kvspray_engine_sessions", role=role) >= 1
            for role in ("worker", "scheduler")
        )

    def run_both(self) -> None:
        self.run(kvspray_config(self.sidecar.socket, "kv_both"), room=32768)


class Router(test_events.Router):
    def start_both(self, engines: list[Engine], policy: str, *more: str) -> Router:
        routed = [
            rig.routed(e.url, "both", sidecar=e.sidecar.url, events=e.events, replay=e.replay)
            for e in engines
        ]
        self.spawn(
            [str(rig.BINARY), "proxy", "--policy", policy, "--listen", f"127.0.0.1:{self.port}",
            "--log-format", "json", "--token-bytes", "2KiB", *routed, *more], cwd=rig.ROOT,
        )  # fmt: skip
        return self

    def line(self, rid: str) -> dict[str, Any]:
        rig.wait_for("a line of the request", lambda: rid in self.placed(), 20)
        return self.placed()[rid]


@pytest.fixture(scope="module")
def plain(zygote: None, workdir: pathlib.Path) -> Iterator[Server]:
    s = Server("plain", workdir)
    try:
        s.start(
            hosts.cpu(rig.ROOT / ".build"),
            MODEL.name,
            None,
            "--max-model-len",
            "1536",
            "--kv-cache-memory-bytes",
            str(64 << 20),
        )
        yield s
    finally:
        s.kill()


@pytest.fixture(scope="module")
def engines(plain: Server, workdir: pathlib.Path) -> Iterator[list[Engine]]:
    out = [Engine(name, workdir) for name in NAMES]
    try:
        for e in out:
            e.sidecar.start()
            e.run_both()
        for s in (plain, *out):
            rig.wait_for(f"engine {s.name} up", s.up, 300, 0.25)
        yield out
    finally:
        for e in out:
            e.kill()
            e.sidecar.stop()


@pytest.fixture(scope="module")
def routers(engines: list[Engine], workdir: pathlib.Path) -> Iterator[dict[str, Router]]:
    out = {
        p: Router(f"router-{p}", workdir).start_both(engines, p, "--replicate-after", "3")
        for p in POLICIES
    }
    try:
        for r in out.values():
            rig.wait_for("the router and its feeds", lambda r=r: r.up() and r.synced(engines), 30)
        yield out
    finally:
        for r in out.values():
            r.stop()


def answer(url: str, prompt: list[int], rid: str = "") -> list[int]:
    return ask(url, prompt, max_tokens=ANSWER, rid=rid)[1]["choices"][0]["token_ids"]


class Round:
    """Requests about a document that one engine has, and what a plain engine answers."""

    def __init__(
        self, name: str, router: Router, engines: list[Engine], plain: Server, n: int
    ) -> None:
        self.name, self.router = name, router
        doc = fresh(900, name)
        self.prompts = [doc + fresh(60, (name, i)) for i in range(n)]
        self.want = [answer(plain.url, p) for p in self.prompts]
        assert answer(router.url, self.prompts[0], f"{name}-first") == self.want[0]
        line = router.line(f"{name}-first")
        holder = line["prefill"] or line["decode"]
        self.holder = next(e for e in engines if e.url == holder)

    def beside(self, kill: Any, after: float) -> int:
        """Asks AT_ONCE times at once, and kills meanwhile. Returns how many requests were under
        way."""
        rids = [f"{self.name}-{i}" for i in range(AT_ONCE)]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = [
                pool.submit(answer, self.router.url, p, rid)
                for p, rid in zip(self.prompts, rids, strict=False)
            ]
            time.sleep(after)
            kill()
            met = sum(not j.done() for j in jobs)
            got = [j.result() for j in jobs]  # an error of HTTP is raised here
        assert got == self.want[:AT_ONCE]
        return met

    def after(self) -> None:
        """One request more, for which the holder is gone."""
        assert answer(self.router.url, self.prompts[-1], f"{self.name}-after") == self.want[-1]


def test_the_holders_sidecar_is_killed(
    engines: list[Engine], plain: Server, routers: dict[str, Router]
) -> None:
    r = random.Random("kills")
    met = 0
    start = time.monotonic()
    kills = 0
    while met < KILLS and kills < 2 * KILLS:
        i, kills = kills, kills + 1
        router = routers[POLICIES[i % len(POLICIES)]]
        one = Round(f"sidecar-{i}", router, engines, plain, AT_ONCE + 1)
        met += one.beside(one.holder.sidecar.kill, r.uniform(0, 0.08)) > 0
        one.after()
        one.holder.sidecar.start()
        rig.wait_for("the engine's sessions", one.holder.connected, 60)
    pairs = {p: x.value("placements_total", choice="pair") for p, x in routers.items()}
    local = sum(x.value("local_prefills_total", reason="prefill_failed") for x in routers.values())
    print(
        f"\n{kills} kills of the holder's sidecar in {time.monotonic() - start:.0f} s, {met} with "
        f"requests under way; pairs {pairs}, copies "
        f"{routers['auto'].value('placement_replicas_total'):.0f}, local prefills after a failure "
        f"{local:.0f}"
    )
    assert met == KILLS
    assert pairs["fetch"] >= kills  # blocks moved from the holder


def test_the_holder_is_killed(
    engines: list[Engine], plain: Server, routers: dict[str, Router]
) -> None:
    met, i = 0, -1
    while met < ENGINE_KILLS and i < 3 * ENGINE_KILLS:
        i += 1
        router = routers[POLICIES[(i + 1) % len(POLICIES)]]
        one = Round(f"engine-{i}", router, engines, plain, AT_ONCE + 1)
        met += one.beside(one.holder.kill, 0.005 * (i % 4)) > 0
        one.after()
        one.holder.run_both()
        rig.wait_for("the engine is up", one.holder.up, 300, 0.25)
        rig.wait_for("the engine's sessions", one.holder.connected, 60)
        rig.wait_for("the feeds", lambda: all(x.synced(engines) for x in routers.values()), 60)
    print(
        f"\n{i + 1} kills of the holder, {met} with requests under way; retries "
        f"{sum(x.value('decode_retries_total') for x in routers.values()):.0f}"
    )
    assert met == ENGINE_KILLS


def test_a_hot_prefix_is_copied_once(
    engines: list[Engine], plain: Server, routers: dict[str, Router]
) -> None:
    """Many ask about a document that one engine has. Another engine gets it by one transfer; tokens
    are equal. An engine that meanwhile computes the document itself, because a request found it
    idle, may need no transfer: a round in which each copy met such a request is repeated."""
    router = routers["auto"]

    def moved() -> float:
        return sum(
            rig.total(e.metrics(), "vllm:kvspray_bytes_total", side="received") for e in engines
        )

    for i in range(5):
        copies_before, bytes_before = router.value("placement_replicas_total"), moved()
        one = Round(f"hot-{i}", router, engines, plain, 12)
        rids = [f"hot-{i}-{k}" for k in range(len(one.prompts))]
        with concurrent.futures.ThreadPoolExecutor(len(rids)) as pool:
            got = list(
                pool.map(lambda prompt, rid: answer(router.url, prompt, rid), one.prompts, rids)
            )
        assert got == one.want
        copies = router.value("placement_replicas_total") - copies_before
        lines = [router.line(rid) for rid in rids]
        assert sum(line["replica"] for line in lines) == copies
        assert 1 <= copies <= len(NAMES) - 1, lines
        assert {line["decode"] for line in lines if line["replica"]}.isdisjoint({one.holder.url})
        pairs = [line["decode"] for line in lines if line["choice"] == "pair"]
        compute = {
            line["decode"] for line in lines if line["choice"] == "run" and line["reused"] == 0
        }
        certain = [url for url in pairs if url not in compute]
        want = bytes_before + len(certain) * 900 * TOKEN
        # vLLM shows its figures once a second.
        rig.wait_for("bytes of the copies", lambda want=want: moved() >= want, 20)
        assert moved() - bytes_before <= len(pairs) * 1000 * TOKEN
        print(
            f"\n{len(got)} askers at once, {copies:.0f} copies, {len(pairs)} pairs, "
            f"{moved() - bytes_before:.0f} bytes"
        )
        if certain:
            return
    raise AssertionError("in each of five rounds the engines computed the document themselves")
