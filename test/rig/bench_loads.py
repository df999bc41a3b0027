#!/usr/bin/env python3
"""Does the router choose rightly between loading cached tokens from a store and computing them?

Two vLLM servers with a page store each, a rail each that the kernel (tc) shapes, and the router. A
cell is a rate of the rails, the store that has the prefix (that of the engine's own node, or of the
other node), and the prefix's length. In each round the engine gets one prompt three times, with an
empty cache: it loads the prefix; it computes all; and, with a prompt of its own, it does what the
router chooses. A choice is right if the median time to the first token of what it chose, loading
all or computing all, is at most NEAR times the lower one. If it loads a part, its own time counts.
Both answers to one prompt are compared.

usage: bench_loads.py [--gbit 0.02,0.1,1] [--rounds 5] [--pace 4000] [--out FILE.json]    (root)
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.error
from typing import Any

from bench_place import (
    ANSWER,
    BINARY,
    BUILD,
    INSIDE,
    TOKEN_BYTES,
    Bench,
    Engine,
    Router,
    say,
    tokens,
)  # fmt: skip
from cluster import ROOT, Failed, Sidecar, free_port, get, routed, total, wait_for
from servers import Answer, complete, end_on_signals, wait_up

NAMES = ("A", "B")  # A answers; B's store is the other node's
WHERE = ("own", "other")
PREFIXES = (384, 3072)  # tokens, whole pages
QUESTION = 64  # tokens that no store has
NEAR = 1.05
LEARNS = 7  # seconds until the router has read the stores' counters


class Loads(Bench):
    def start(self) -> None:
        members = [f"127.0.0.1:{free_port()}" for _ in NAMES]
        for i, name in enumerate(NAMES, 1):
            rails = [{"name": "rail", "listen": f"127.0.1.{i}:{free_port()}"}]
            gossip = {"listen": members[i - 1], "join": members}
            s = Sidecar(name, self.run_dir, {
                "transports": {"order": ["tcp"], "tcp": {"rails": rails}},
                "log": {"level": "info"}, "store": {"memory": "512MiB"},
                "peer": {"gossip": gossip},
            })  # fmt: skip
            s.config["trace"] = {}
            s.log = self.logs / f"sidecar-{name}.log"
            s.start()
            self.started.append(s)
            self.engines.append(Engine(name, self.logs, s, self.args.pace, store=True))
            self.started.append(self.engines[-1])
        wait_up(self.engines, say)

    def renew(self) -> None:
        """Empty stores, whose counters have nothing of other rates."""
        for e in self.engines:
            e.sidecar.stop()
            e.sidecar.start()
        for e in self.engines:
            wait_for("the engine is back", lambda e=e: connected(e), 60)
            complete(e.port, tokens(300, "first", e.name, time.monotonic()))  # opens the namespace
            wait_for("the namespace", lambda e=e: self.store(e)["namespaces"], 60)
        for e in self.engines:
            wait_for(
                "the stores meet",
                lambda e=e: self.store(e).get("directory", {}).get("members") == len(NAMES),
                60,
            )

    def store(self, e: Engine) -> dict[str, Any]:
        return json.loads(get(e.sidecar.url + "/v1/store"))

    def put(self, e: Engine, prompt: list[int]) -> Answer:
        """The engine computes a prompt, and its store has the pages."""
        page = self.store(e)["namespaces"][0]["page_tokens"]
        before = self.stored(e)
        got = self.ask(e.port, prompt, {"v": 1, "load": 0})
        wait_for("the pages", lambda: self.stored(e) >= before + len(prompt) // page, 60, 0.05)
        self.forget()
        time.sleep(0.3)  # the other node learns where the pages are
        return got

    def stored(self, e: Engine) -> int:
        s = self.store(e)
        return s["stored"] + s["existed"]

    def ask(
        self, port: int, prompt: list[int], own: dict[str, Any] | None = None, rid: str = ""
    ) -> Answer:
        more = {"kv_transfer_params": {"kvspray": own}} if own is not None else {}
        got = complete(port, prompt, ANSWER, rid=rid, **more)
        if got.error:
            raise Failed(f"{rid or 'a request'}: {got.error}")
        return got

    def rate(self, gbit: float) -> None:
        self.shape(gbit)
        self.renew()
        self.forget()
        a, b = self.engines
        router = Router(f"router-{gbit:g}", self.logs)
        router.log.unlink(missing_ok=True)
        router.spawn([str(BINARY), "proxy", "--listen", f"127.0.0.1:{router.port}",
            "--log-format", "json", "--policy", "local", "--token-bytes", f"{TOKEN_BYTES}B",
            *(routed(e.url, role, sidecar=e.sidecar.url, events=e.events, replay=e.replay)
              for e, role in ((a, "decode"), (b, "prefill")))], cwd=ROOT)  # fmt: skip
        self.started.append(router)
        wait_for("the router", router.up, 20)
        for gauge in ("kv_events_up", "placement_stores"):
            wait_for(
                gauge,
                lambda gauge=gauge: total(router.metrics(), f"kvspray_proxy_{gauge}") == len(NAMES),
                30,
            )
        for k in range(3):  # it learns the rates of the engine and of both stores
            self.ask(router.port, tokens(PREFIXES[k % 2], "learn", gbit, k))
            for holder in self.engines:
                prompt = tokens(PREFIXES[-1] + QUESTION, "learn", gbit, k, holder.name)
                self.put(holder, prompt[: PREFIXES[-1]])
                self.ask(a.port, prompt)
                self.forget()
        time.sleep(LEARNS)
        for where in WHERE:
            for n in PREFIXES:
                self.cell(router, gbit, where, n)
        router.stop()
        self.started.remove(router)

    def cell(self, router: Router, gbit: float, where: str, n: int) -> None:
        a = self.engines[0]
        holder = self.engines[WHERE.index(where)]
        times: dict[str, list[float]] = {"load": [], "compute": [], "router": []}
        chosen: list[dict[str, Any]] = []
        wrong = 0
        for k in range(self.args.rounds):
            prompt, other = (
                tokens(n + QUESTION, "loads", gbit, where, n, k, what)
                for what in ("given", "chosen")
            )
            self.put(holder, prompt[:n])
            load = self.ask(a.port, prompt)
            self.forget()
            compute = self.ask(a.port, prompt, {"v": 1, "load": 0})
            wrong += load.tokens != compute.tokens
            self.put(holder, other[:n])
            rid = f"{gbit:g}-{where}-{n}-{k}"
            free = self.ask(router.port, other, rid=rid)
            wait_for("its line", lambda rid=rid: rid in router.placed(1), 20)
            line = router.placed(1)[rid]
            for what, got in (("load", load), ("compute", compute), ("router", free)):
                times[what].append(got.ttft_s)
            chosen.append({x: line[x] for x in ("loaded", "tier", "predicted")})
        median = {what: statistics.median(x) for what, x in times.items()}
        loaded = statistics.median(x["loaded"] for x in chosen)
        page = self.store(a)["namespaces"][0]["page_tokens"]
        choice = "load" if loaded >= n else "compute" if loaded < page else "router"
        best = min(median["load"], median["compute"])
        row = {"gbit": gbit, "where": where, "prefix": n, "times": times, "median": median,
            "loaded": loaded, "chosen": chosen, "wrong": wrong,
            "right": median[choice] <= NEAR * best}  # fmt: skip
        self.keep("cells", row, ("gbit", "where", "prefix"), show(row))

    def run(self) -> None:
        self.start()
        for gbit in self.args.gbit:
            self.rate(gbit)


def connected(e: Engine) -> bool:
    return total(e.sidecar.metrics(), "kvspray_engine_sessions", role="worker") == 1


def show(row: dict[str, Any]) -> str:
    m = row["median"]
    return (
        f"{row['gbit']:g} Gbit/s, {row['prefix']} tokens in the {row['where']} store: load "
        f"{m['load']:.3f} s, compute {m['compute']:.3f} s, router {m['router']:.3f} s by loading "
        f"{row['loaded']:.0f}: {'right' if row['right'] else 'WRONG'}; {row['wrong']} answers "
        "differ"
    )


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument(
        "--gbit", type=lambda s: [float(x) for x in s.split(",")], default=[0.02, 0.1, 1.0]
    )
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--pace", type=float, default=4000)
    ap.add_argument("--out", type=pathlib.Path, default=BUILD / "bench" / "loads.json")
    args = ap.parse_args()
    args.size = 1.0
    if os.environ.get(INSIDE) is None:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    bench = Loads(args)
    try:
        bench.run()
    finally:
        bench.stop()
    cells = bench.report["cells"]
    for row in cells:
        print(show(row))
    return 0 if all(row["right"] and not row["wrong"] for row in cells) else 1


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(main())
    except (Failed, urllib.error.URLError) as err:
        print(f"bench_loads: {err}", file=sys.stderr)
        sys.exit(1)
