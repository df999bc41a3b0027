#!/usr/bin/env python3
"""The demonstration of the store: conversations of several turns on nodes of one sidecar and one
real vLLM engine each.

Every turn sends the whole conversation so far. An engine's cache holds little more than one
conversation, so the turns of others push its blocks out; what comes back comes from the node's
store. In the middle one node restarts, sidecar and engine: its memory is gone, its disk is not.
Conversations move to the next node twice: there their pages come from the store of the node before.
The sidecars find each other by gossip.

Each answer is compared with that of a plain engine, which computes every prompt anew; its time to
the first token is what a prompt costs without any cache. The exit status is 0 only if all tokens
are equal, the restarted node has served from its disk and, with several nodes, pages have come from
peers.

Environment: NODES (3), TALKS (9), TURNS (8), REDIS (host:port of a Redis or Valkey server that
keeps the directory of pages; without it the sidecars keep it). Written:
.build/demo-store/result.json and the logs.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]

import engines  # noqa: E402
from cluster import ROOT, Failed, Sidecar, cluster_key, free_port, get, total, wait_for  # noqa: E402

LOGS = pathlib.Path(os.environ.get("KVSPRAY_BUILD", ROOT / ".build")) / "demo-store"
MODEL = ROOT / ".build" / "models" / "tiny-llama"
NODES, TALKS, TURNS = (
    int(os.environ.get(name, n)) for name, n in (("NODES", 3), ("TALKS", 9), ("TURNS", 8))
)
REDIS = os.environ.get("REDIS", "")
BLOCK = 32
SYSTEM, QUESTION, ANSWER = 512, 210, 32  # tokens: all share the first ones, turn 8 has 2,416
LONGEST = 3072  # tokens
CACHE = 104 << 16  # bytes, of an engine with a store: 104 blocks, a conversation and a third
TIERS = ("memory", "disk", "peer")
MOVES = (3, 6)  # turns before which conversations move to the next node
RESTART = TURNS // 2  # the turn before which node 0 restarts
BAR_MS = 25

START = time.monotonic()


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


class Node:
    def __init__(self, number: int, run: pathlib.Path, key: str, members: list[str]) -> None:
        self.name = f"node{number}"
        disk = run / f"disk{number}"
        disk.mkdir()
        store: dict[str, Any] = {"memory": "64MiB", "disk": [{"path": str(disk), "size": "512MiB"}]}
        if REDIS:
            store |= {"directory": "redis", "redis": {"addresses": [REDIS]}}
        join = [m for i, m in enumerate(members) if i != number]
        peer = {"cluster_key_file": key, "gossip": {"listen": members[number], "join": join}}
        self.sidecar = Sidecar(self.name, run, {"store": store, "peer": peer})
        self.sidecar.log = LOGS / f"{self.name}.sidecar.log"
        self.engine = self.start()

    def start(self) -> engines.Engine:
        self.sidecar.start()
        kv = {
            "kv_connector": "KVSprayConnector", "kv_connector_module_path": "kvspray_vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": self.sidecar.socket, "store": True},
        }  # fmt: skip
        self.engine = engines.Engine(
            self.name,
            str(MODEL),
            LOGS / f"{self.name}.engine.log",
            kv,
            kv_cache_memory_bytes=CACHE,
            max_model_len=LONGEST,
        )
        return self.engine

    def ready(self) -> None:
        self.engine.wait_up()
        wait_for(f"{self.name} connected", lambda: self.engine.status().get("connected"), 60)
        self.engine.run([1, 2, 3], 1)  # the first step opens the namespace
        self.settle()

    def meet(self) -> None:
        """The directory of pages has all nodes."""

        def seen() -> dict[str, Any]:
            return json.loads(get(self.sidecar.url + "/v1/store")).get("directory", {})

        if not REDIS and NODES > 1:
            wait_for(f"{self.name} with the others", lambda: seen().get("members") == NODES, 60)

    def settle(self) -> None:
        """All that was computed is saved."""
        wait_for(
            f"{self.name} idle",
            lambda: self.engine.idle() and not self.engine.status()["putting"],
            60,
        )

    def restart(self) -> None:
        self.engine.kill()
        self.sidecar.kill()
        self.start()
        self.ready()
        self.meet()

    def stop(self) -> None:
        self.engine.stop()
        self.sidecar.stop()

    def tokens(self) -> dict[str, float]:
        """Of prompts, so far, by where they came from."""
        m = self.engine.metrics()
        out = {
            t: BLOCK * total(m, "vllm:kvspray_store_pages_total", op="get", outcome=t)
            for t in TIERS
        }
        return {"vllm": total(m, "vllm:prefix_cache_hits_total"), **out}


def tokens_of(n: int, seed: object) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(300, 1000) for _ in range(n)]


class Turn:
    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt = 0
        self.came = {"vllm": 0.0, **dict.fromkeys(TIERS, 0.0)}
        self.ttft: list[float] = []
        self.plain: list[float] = []

    def row(self) -> dict[str, Any]:
        computed = self.prompt - sum(self.came.values())
        return {
            "turn": self.number, "prompts": len(self.ttft), "tokens": self.prompt,
            **{k: int(v) for k, v in self.came.items()}, "computed": int(computed),
            "ttft_ms": 1e3 * statistics.median(self.ttft), "recompute_ms": 1e3 * statistics.median(
            self.plain),
        }  # fmt: skip


def talk(nodes: list[Node], plain: engines.Engine) -> tuple[list[dict[str, Any]], int, float]:
    """Returns the rows of the table, how many answers differed, and the tokens that node 0 had from
    its disk after its restart."""
    system = tokens_of(SYSTEM, "system")
    talks = [list(system) for _ in range(TALKS)]
    rows, different, disk = [], 0, 0.0
    for number in range(1, TURNS + 1):
        if number == RESTART:
            nodes[0].restart()
            log("node0 has restarted: its sidecar and its engine were killed")
        moved = sum(number >= m for m in MOVES)
        turn = Turn(number)
        for i, said in enumerate(talks):
            said += tokens_of(QUESTION, (number, i))
            node = nodes[(i + moved) % len(nodes)]
            want = plain.run(said, ANSWER)
            before = node.tokens()
            got = node.engine.run(said, ANSWER)
            node.settle()
            for k, v in node.tokens().items():
                turn.came[k] += v - before[k]
                if number >= RESTART and node is nodes[0] and k == "disk":
                    disk += v - before[k]
            assert got.first_s is not None and want.first_s is not None
            turn.prompt += len(said)
            turn.ttft.append(got.first_s)
            turn.plain.append(want.first_s)
            if got.tokens != want.tokens:
                different += 1
                log(f"  turn {number}, conversation {i}, {node.name}: DIFFERENT tokens")
            said += want.tokens[0]
        rows.append(turn.row())
        log(
            f"turn {number}: {TALKS} conversations of {len(talks[0]) - ANSWER} tokens, first token "
            f"after {rows[-1]['ttft_ms']:.0f} ms, computed anew {rows[-1]['recompute_ms']:.0f} ms"
        )
    return rows, different, disk


def show(rows: list[dict[str, Any]]) -> None:
    head = ("turn", "tokens", "vllm", *TIERS, "computed", "ttft_ms", "recompute_ms")
    print(
        "\nTokens of all prompts by where they came from, and the median time to the first token:\n"
    )
    print("  ".join(f"{h:>12}" for h in (*head, "ratio")))
    for row in rows:
        ratio = row["ttft_ms"] / row["recompute_ms"]
        print("  ".join([*(f"{row[h]:12.0f}" for h in head), f"{ratio:12.2f}"]))
    print(
        "\nTime to the first token, with the store (#) and computed anew (-); one character is "
        f"{BAR_MS} ms:\n"
    )
    for row in rows:
        for name, mark, key in ((f"turn {row['turn']}", "#", "ttft_ms"), ("", "-", "recompute_ms")):
            print(f"{name:>8} |{mark * max(1, round(row[key] / BAR_MS))}")
    print()


def main() -> int:
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    run = pathlib.Path(tempfile.mkdtemp(prefix="kvs-demo-"))  # unix sockets have short names
    engines.preload()
    log("vLLM is imported")
    nodes: list[Node] = []
    plain = engines.Engine(
        "plain", str(MODEL), LOGS / "plain.log", enable_prefix_caching=False, max_model_len=LONGEST
    )
    try:
        key = cluster_key(run)
        members = [f"127.0.0.1:{free_port()}" for _ in range(NODES)]
        for i in range(NODES):
            nodes.append(Node(i, run, key, members))
        plain.wait_up()
        plain.run([1, 2, 3], 1)
        for node in nodes:
            node.ready()
        log(f"{NODES} nodes and a plain engine are up")
        for node in nodes:
            node.meet()
        rows, different, disk = talk(nodes, plain)
    except Failed as err:
        print(f"failed: {err}", file=sys.stderr)
        return 1
    finally:
        plain.stop()
        for node in nodes:
            node.stop()
        shutil.rmtree(run, ignore_errors=True)
    (LOGS / "result.json").write_text(
        json.dumps({"nodes": NODES, "talks": TALKS, "rows": rows}, indent=1)
    )
    show(rows)
    peer = sum(row["peer"] for row in rows)
    print(
        f"{TALKS * TURNS - different} of {TALKS * TURNS} answers have a plain engine's tokens; "
        f"{int(disk)} tokens came from node0's disk after its restart, and {peer} tokens from peers"
    )
    return 0 if not different and disk > 0 and (peer > 0 or NODES == 1) else 1


if __name__ == "__main__":
    sys.exit(main())
