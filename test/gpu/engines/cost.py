"""What transfers cost the engines: P's prefill tokens per second while pages leave, and the time
between D's tokens while pages come.

The other side is a peer without an engine: a process with a sidecar, host memory of the same
layout, and recorded pages of P's. So no other process computes on the GPU. Both arms of a pair do
the same computation: P prefills as many new prompts either way, and D answers the same prompts,
whose pages come from the peer in one arm and lie in its prefix cache in the other.
"""

from __future__ import annotations

import concurrent.futures as cf
import http.client
import json
import secrets
import statistics
import threading
import time
from typing import Any

from clients import prompt
from cluster import Failed, Sidecar, wait_for
from pairs import Rig, as_source, summary
from servers import MODEL_NAME, ask
from stage import PAGES, Stage

import kvspray

NEEDS = {PAGES}
PREFILL_GOAL, P50_GOAL, P99_GOAL = 0.01, 0.02, 0.05
TOGETHER = 4  # prompts at a time, to P
EDGE_S = 0.05  # of each window, left out
LEASE_S = 60.0
STREAM_TOKENS = 2000  # of each answer that D is decoding
Lease = tuple[int, int]  # the peer's rank, and its lease


def options(parser: Any) -> None:
    parser.add_argument(
        "--pairs",
        type=int,
        default=30,
        help="of part cost: each with transfers and without, in turns",
    )
    parser.add_argument("--side", choices=["both", "P", "D"], default="both", help="measured")
    parser.add_argument("--cost-tokens", type=int, default=2048, help="of a prompt that moves")
    parser.add_argument("--burst", type=int, default=8, help="prompts of an arm, for P")
    parser.add_argument(
        "--streams", type=int, default=8, help="answers that D is decoding meanwhile"
    )
    parser.add_argument("--window", type=float, default=1.0, help="seconds of an arm, for D")
    parser.add_argument(
        "--arrivals", type=float, default=10, help="prompts per second that D receives"
    )


class Peer:
    """Workers without an engine, one for each rank of P."""

    def __init__(self, rig: Rig, tokens: int, pool: int) -> None:
        self.pool = pool  # prompts that it holds
        layout = json.loads((rig.pages / "P/layout.json").read_text())
        self.sizes = [g["tokens_per_block"] for g in layout["groups"]]
        self.need = [-(-tokens // size) for size in self.sizes]
        layers, offset = 0, 0
        for group, need in zip(layout["groups"], self.need, strict=True):
            group["num_blocks"] = pool * need
            # Where the engine's layers lie between each other's tokens, these lie one behind the
            # other.
            group["params"] = {
                k: v for k, v in group["params"].items() if k not in ("head_stride", "row_stride")
            }
            for layer in group["layers"]:
                layer |= {"region": 0, "base": offset, "block_stride": layer["page_bytes"]}
                offset += layer["page_bytes"] * group["num_blocks"]
                layers += 1
        self.sidecar = Sidecar("peer-sidecar", rig.run, rig.sidecar_config())
        self.sidecar.log = rig.logs / "peer-sidecar.log"
        self.sidecar.start()
        ranks = len(rig.gpus("P")) or 1
        self.clients = [
            kvspray.WorkerClient(
                self.sidecar.socket,
                engine=kvspray.EngineInfo("vllm", "peer", "peer"),
                ranks=kvspray.Ranks(tp=(rank, ranks)),
                layers=layers,
            )
            for rank in range(ranks)
        ]
        for rank, client in enumerate(self.clients):
            for group in layout["groups"]:  # they are of the rank that wrote them last
                if "tp_rank" in group["params"]:
                    group["params"]["tp_rank"] = rank
            client.register([client.alloc_region(offset)], layout)
        for client in self.clients:
            if not client.wait_connected(30):
                raise Failed(f"the peer has no session: {client.status().error}")
        self.lock = threading.Lock()
        self.ended: dict[Lease, Any] = {}

    def table(self, place: int) -> list[list[int]]:
        return [
            list(range(place % self.pool * need, (place % self.pool + 1) * need))
            for need in self.need
        ]

    def pull(self, ids: list[int], xfer: str, peer: str, place: int) -> list[Lease]:
        table, leases = self.table(place), []
        for rank, client in enumerate(self.clients):
            lease = client.expect(
                bytes.fromhex(xfer),
                name(ids),
                peer,
                len(ids),
                0,
                table,
                req=xfer,
                deadline_s=LEASE_S,
            )
            if not lease:
                raise Failed(f"the peer's sidecar takes no request: {client.status().error}")
            leases.append((rank, lease))
        return leases

    def offer(self, ids: list[int], place: int) -> dict[str, Any]:
        """Recorded pages under the name of a new prompt; what D is asked with."""
        xfer = secrets.token_bytes(16)
        for client in self.clients:
            lease = client.intent(
                xfer,
                name(ids),
                len(ids),
                self.table(place),
                ready=len(ids),
                req=xfer.hex(),
                held=True,
                deadline_s=LEASE_S,
            )
            if not lease:
                raise Failed(f"the peer's sidecar takes no offer: {client.status().error}")
        spray = {"v": 1, "xfer": xfer.hex(), "peer": self.sidecar.endpoint, "fanout": 1}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": "peer",
            "kvspray": spray,
        }

    def finish(self, leases: list[Lease]) -> None:
        def over() -> bool:
            with self.lock:
                for rank, client in enumerate(self.clients):
                    self.ended.update({(rank, c.lease): c for c in client.poll()})
                return all(lease in self.ended for lease in leases)

        wait_for("the peer's transfers", over, LEASE_S, tick=0.001)
        bad = [self.ended[lease] for lease in leases if not self.ended[lease].ok]
        if bad:
            raise Failed(f"the peer's transfers failed: {bad[:3]}")

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.sidecar.stop()


def name(ids: list[int]) -> bytes:
    return kvspray.prefix_hash(ids, "", "", [])


def prefill(stage: Stage, peer: Peer, tag: str, with_transfer: bool) -> float:
    """Tokens per second of P, of a burst of new prompts."""
    a, p = stage.args, stage.pair.p
    prompts = [prompt(a.cost_tokens, ("cost", tag, i)) for i in range(a.burst)]
    xfers = [secrets.token_hex(16) for _ in prompts]
    leases: list[Lease] = []
    if with_transfer:
        endpoint = stage.pair.sidecars[0].endpoint
        for i, (ids, x) in enumerate(zip(prompts, xfers, strict=True)):
            leases += peer.pull(ids, x, endpoint, i)
    start = time.perf_counter()
    with cf.ThreadPoolExecutor(TOGETHER) as pool:
        list(
            pool.map(
                lambda i: ask(p.url, prompts[i], as_source(xfers[i]) if with_transfer else None),
                range(len(prompts)),
            )
        )
    took = time.perf_counter() - start
    peer.finish(leases)
    wait_for("P idle", stage.pair.idle, 30, tick=0.01)
    return a.burst * a.cost_tokens / took


class Streams:
    """Answers that D writes all the time; when each token came."""

    def __init__(self, port: int, count: int) -> None:
        self.port, self.end = port, threading.Event()
        self.gaps: list[tuple[float, float]] = []  # (when, seconds since the token before)
        self.lock = threading.Lock()
        self.errors: list[str] = []
        self.threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)
        ]
        for t in self.threads:
            t.start()

    def _run(self, i: int) -> None:
        turn = 0
        while not self.end.is_set():
            turn += 1
            body = {
                "model": MODEL_NAME,
                "prompt": prompt(32, ("stream", i, turn)),
                "max_tokens": STREAM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                conn.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json"},
                )
                last = 0.0
                for raw in conn.getresponse():
                    if self.end.is_set():
                        break
                    if not raw.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    if last:
                        with self.lock:
                            self.gaps.append((now, now - last))
                    last = now
            except OSError as err:
                self.errors.append(str(err))
                return
            finally:
                conn.close()

    def between(self, start: float, end: float) -> list[float]:
        with self.lock:
            return [gap for when, gap in self.gaps if start + EDGE_S <= when <= end - EDGE_S]

    def stop(self) -> None:
        self.end.set()
        for t in self.threads:
            t.join(10)


def arrivals(stage: Stage, peer: Peer, tag: str, with_transfer: bool) -> tuple[float, float, float]:
    """A window in which D receives prompts, each of which it has or gets: its start and end, and
    when the last prompt was answered."""
    a, start, i = stage.args, time.perf_counter(), 0
    with cf.ThreadPoolExecutor(8) as pool:
        waiting = []
        while (now := time.perf_counter()) < start + a.window:
            ids = prompt(a.cost_tokens, ("arrival", tag, i))
            kv = peer.offer(ids, i) if with_transfer else None
            waiting.append(pool.submit(ask, stage.pair.d.url, ids, kv))
            i += 1
            time.sleep(max(0.0, start + i / a.arrivals - time.perf_counter()))
        end = now
        for w in waiting:
            w.result()
    return start, end, time.perf_counter()


def ratios(pairs: list[tuple[float, float]]) -> dict[str, float]:
    return summary([on / off for off, on in pairs])


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    a = stage.args
    peer = Peer(stage.rig, a.cost_tokens, a.burst)
    out: dict[str, Any] = {}
    problems: list[str] = []
    try:
        prefill(stage, peer, "warm", True)  # also the pages that D will get
        if a.side != "D":
            out |= cost_of_p(stage, peer)
        if a.side != "P":
            more, problems = cost_of_d(stage, peer)
            out |= more
        return out, problems
    finally:
        peer.close()


def cost_of_p(stage: Stage, peer: Peer) -> dict[str, Any]:
    rates: list[tuple[float, float]] = []
    stage.rig.so_far["prefill_tokens_per_s, without and with"] = rates
    for i in range(stage.args.pairs):
        arms = {
            on: prefill(stage, peer, f"{i}{on}", on)
            for on in ((False, True) if i % 2 else (True, False))
        }
        rates.append((arms[False], arms[True]))
    rate = {
        "without": summary([r[0] for r in rates]),
        "with": summary([r[1] for r in rates]),
        "ratio": ratios(rates),
    }
    lost = 1 - rate["ratio"]["median"]
    print(
        f"P's prefill with transfers leaving: {rate['without']['median']:.0f} to "
        f"{rate['with']['median']:.0f} tokens/s, {100 * lost:+.2f}% lost (goal "
        f"{100 * PREFILL_GOAL:.0f}%), median of {len(rates)} pairs",
        flush=True,
    )
    return {
        "prefill_tokens_per_s": rate,
        "prefill_lost": lost,
        "prefill_goal_met": lost <= PREFILL_GOAL,
    }


def check_cache(stage: Stage, peer: Peer) -> None:
    """D's prefix cache must hold an arm's prompts, or D computes them in the other arm."""
    a = stage.args
    groups = json.loads((stage.rig.pages / "D/layout.json").read_text())["groups"]
    arrive, write = int(a.arrivals * a.window) + 1, 2 * a.streams * STREAM_TOKENS
    for group, need in zip(groups, peer.need, strict=True):
        want = arrive * need + write // group["tokens_per_block"]
        if want > group["num_blocks"]:
            raise Failed(
                f"D's cache has {group['num_blocks']} blocks, and {want} are needed for {arrive} "
                f"prompts and {a.streams} answers: raise --cache-mb, or lower --arrivals, --window "
                "or --cost-tokens"
            )


def cost_of_d(stage: Stage, peer: Peer) -> tuple[dict[str, Any], list[str]]:
    a, before, took = stage.args, received(stage), 0.0
    check_cache(stage, peer)
    streams = Streams(stage.pair.d.port, a.streams)
    gaps: dict[bool, list[list[float]]] = {False: [], True: []}
    stage.rig.so_far["itl_s, windows without"] = gaps[False]
    stage.rig.so_far["itl_s, windows with"] = gaps[True]
    try:
        wait_for("D decoding", lambda: len(streams.gaps) > 50 * a.streams, 60, tick=0.1)
        for i in range(-1, a.pairs):
            # With transfers first, so that the same prompts lie in the cache for the other arm.
            for on in (True, False):
                start, end, last = arrivals(stage, peer, str(i), on)
                took += last - start if on else 0
                if i >= 0:
                    gaps[on].append(streams.between(start, end))
    finally:
        streams.stop()
    problems = [f"a stream of D's broke: {e}" for e in streams.errors[:3]]
    if any(not g for arm in gaps.values() for g in arm):
        problems.append("there are windows in which D wrote nothing")
    itl = {what: arm_summary(gaps[on]) for what, on in (("without", False), ("with", True))}
    more = {
        q: statistics.median(
            quantile(on, v) / quantile(off, v)
            for off, on in zip(gaps[False], gaps[True], strict=True)
        )
        - 1
        for q, v in (("p50", 0.5), ("p99", 0.99))
    }
    bytes_in = received(stage) - before
    print(
        f"D's time between tokens while {bytes_in / 1e9:.2f} GB came, {bytes_in / 1e9 / took:.1f} "
        f"GB/s: p50 {100 * more['p50']:+.2f}% ({itl['without']['p50']:.3f} to "
        f"{itl['with']['p50']:.3f} ms, goal {100 * P50_GOAL:.0f}%), p99 "
        f"{100 * more['p99']:+.2f}% ({itl['without']['p99']:.3f} to "
        f"{itl['with']['p99']:.3f} ms, goal {100 * P99_GOAL:.0f}%)",
        flush=True,
    )
    if not bytes_in:
        problems.append("nothing came to D from the peer")
    return {
        "itl_ms": itl,
        "itl_more": more,
        "bytes_to_d": bytes_in,
        "bytes_to_d_per_s": bytes_in / took,
        "itl_goals_met": {"p50": more["p50"] <= P50_GOAL, "p99": more["p99"] <= P99_GOAL},
    }, problems


def arm_summary(windows: list[list[float]]) -> dict[str, float]:
    every = [1e3 * g for w in windows for g in w]
    return {"n": len(every), "p50": quantile(every, 0.5), "p99": quantile(every, 0.99)}


def quantile(values: list[float], q: float) -> float:
    s = sorted(values)
    return s[min(len(s) - 1, int(q * len(s)))]


def received(stage: Stage) -> int:
    """Bytes that D's sidecar has received."""
    m = stage.pair.sidecars[1].metrics()
    return int(
        sum(
            v
            for k, v in m.items()
            if k.startswith("kvspray_transfer_payload_bytes_total") and "destination" in k
        )
    )
