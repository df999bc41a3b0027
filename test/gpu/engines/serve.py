"""Serving under load: `vllm bench serve` with Poisson arrivals through several arms in turns, each
with the same prompts and arrivals, and empty prefix caches.

An arm is one plain engine (the control), one with a tensor-parallel rank on each GPU, two plain
engines behind `kvspray proxy`, or a prefill and a decode engine: with kvspray in each mode of the
router, or with vLLM's NIXL connectors behind its toy proxy. All engines of a command run side by
side, also while another arm is measured, and have caches of the same size (--cache-mb).

With --goodput, --rates are the candidates of a binary search: the highest rate at which enough
requests are within the limits of TTFT and TPOT.
"""

from __future__ import annotations

import concurrent.futures as cf
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

# isort: split
from clients import prompt
from cluster import BINARY, Failed, get, routed, total, wait_for
from multi import ENV, empty_prefix_cache
from pairs import HERE, Pair, Rig, say, wait_up
from servers import MODEL_NAME, Process, Proxy, Server, ask

NEEDS: set[str] = set()
CONTROL, SPLIT, TWO, AUTO = "plain", "tp", "two", "kvspray-auto"
# name: (kind of pair, mode of the router)
PAIRS = {
    "kvspray": ("kvspray", "concurrent"),
    "kvspray-prefill": ("kvspray", "prefill-first"),
    AUTO: ("kvspray", "concurrent"),
    "nixl": ("nixl", ""),
    "nixl-push": ("nixl-push", ""),
}
ARMS = (CONTROL, TWO, *PAIRS, SPLIT)
# Tokens of a prompt, of a prefix, number of prefixes (0: each request has its own), tokens of an
# answer.
MIXES = {
    "chat": (512, 256, 0, 128),
    "documents": (8000, 4000, 0, 256),
    "agents": (16000, 11200, 4, 512),
}
ENOUGH = 0.9  # of the requests, within both limits of --goodput
CPU_SCALE = 16  # divides the lengths of prompts and answers on a CPU
PERCENTILES = (10, 50, 90, 99)
MOVED = 0.9  # of the prompts' tokens must come from P, unless the router may decide otherwise
WARM = 4  # requests at once, before anything is measured
DRAIN_S, IDLE_S, ROUTER_S = 240.0, 60.0, 30.0
PREFILLS = (500, 1000, 2000, 4000)  # tokens of prompts whose times calibrate policy auto


def options(parser: Any) -> None:
    parser.add_argument(
        "--arms", default=",".join((*ARMS[:5], CONTROL)), help=f"of part serve: {', '.join(ARMS)}"
    )
    parser.add_argument("--mix", choices=MIXES, default="documents")
    parser.add_argument("--rates", default="1,2", help="requests per second")
    parser.add_argument(
        "--goodput",
        type=lambda text: [Limits(*map(float, pair.split(":"))) for pair in text.split(",")],
        default=[],
        help="milliseconds TTFT:TPOT, such as 1000:10,500:15: the highest of --rates within each",
    )
    parser.add_argument("--serve-seconds", type=float, default=60, help="of each run")
    parser.add_argument(
        "--toy-proxy", type=pathlib.Path, help="vLLM's toy_proxy_server.py, for NIXL's arms"
    )


@dataclasses.dataclass(frozen=True)
class Limits:
    ttft_ms: float
    tpot_ms: float

    def share(self, row: dict[str, Any]) -> float:
        """Of the requests, within both limits. One that failed has no tokens, and is not."""
        times = zip(row["ttfts"], row["tpots"], row["output_lens"], strict=True)
        kept = [n and 1e3 * a <= self.ttft_ms and 1e3 * b <= self.tpot_ms for a, b, n in times]
        return sum(map(bool, kept)) / len(kept)


class Bench:
    """vLLM's benchmark client. One process makes all runs, because its imports take long."""

    def __init__(self, rig: Rig) -> None:
        self.model = str(rig.host.models / rig.model)
        with (rig.logs / "bench.log").open("ab") as log:
            self.proc = subprocess.Popen(
                [rig.host.python, str(HERE / "inside" / "kvspray_bench.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **rig.host.env},
            )
        self.reader = cf.ThreadPoolExecutor(1)

    def run(self, url: str, seconds: float, *args: str) -> dict[str, Any]:
        assert self.proc.stdin is not None and self.proc.stdout is not None
        common = [
            "--base-url", url, "--model", self.model, "--served-model-name", MODEL_NAME,
            "--temperature", "0", "--ignore-eos", "--disable-tqdm", "--save-detailed",
            "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", ",".join(map(str, PERCENTILES)),
        ]  # fmt: skip
        self.proc.stdin.write(json.dumps([*common, *args]) + "\n")
        self.proc.stdin.flush()
        line = self.reader.submit(self.proc.stdout.readline)
        try:
            return json.loads(line.result(seconds + DRAIN_S))
        except (cf.TimeoutError, ValueError) as err:
            raise Failed(f"vllm bench serve at {url}: {err!r}; see bench.log") from err

    def stop(self) -> None:
        self.proc.kill()
        self.proc.wait()


class Arms:
    """The engines of all arms, and a router or proxy for each arm that has one."""

    def __init__(self, rig: Rig, names: list[str]) -> None:
        self.rig, self.names = rig, names
        plain = 2 if TWO in names else int(CONTROL in names)
        self.plain = [Server(f"plain{i}", rig.logs) for i in range(plain)]
        self.split = [Server("tp", rig.logs)] if SPLIT in names else []
        kinds = dict.fromkeys(PAIRS[name][0] for name in names if name in PAIRS)
        self.pairs = {kind: Pair(rig, kind) for kind in kinds}
        self.routers: dict[str, Process] = {}

    def engines(self, arm: str) -> list[Server]:
        if arm in PAIRS:
            return self.pairs[PAIRS[arm][0]].engines()
        return {TWO: self.plain, SPLIT: self.split}.get(arm, self.plain[:1])

    def url(self, arm: str) -> str:
        return (self.routers.get(arm) or self.engines(arm)[0]).url

    def start(self) -> None:
        rig = self.rig
        for name, server in zip("PD", self.plain, strict=False):  # each on the GPU of P or D
            env = {**rig.engine_env(name), **ENV}
            server.start(rig.host, rig.model, None, *rig.engine_args(name), env=env)
        for server in self.split:
            both = [*rig.gpus("P"), *rig.gpus("D")]
            if len(set(both)) < len(both) or len(both) < 2:
                raise Failed(f"arm {SPLIT} needs --gpus with a GPU for P and another one for D")
            env = {**ENV, "CUDA_VISIBLE_DEVICES": ",".join(both)}
            size = ("--tensor-parallel-size", str(len(both)))
            server.start(rig.host, rig.model, None, *rig.engine_args("P"), *size, env=env)
        for pair in self.pairs.values():
            pair.start(sidecars_only=True)
            for side in range(2):
                pair.start_engine(side, env=ENV)
        wait_up(
            [*self.plain, *self.split, *(s for pair in self.pairs.values() for s in pair.engines())]
        )
        for pair in self.pairs.values():
            pair.wait_sessions()
        for name in self.names:
            if name not in (CONTROL, SPLIT):
                self.routers[name] = self.route(name)
        for router in self.routers.values():
            wait_for(f"{router.name} up", lambda r=router: serves(r), ROUTER_S, 0.1)

    def route(self, name: str) -> Process:
        proxy = Proxy(f"proxy-{name}", self.rig.logs)
        if name == TWO:
            self.proxy(proxy, *(routed(s.url, "decode") for s in self.plain))
            return proxy
        kind, mode = PAIRS[name]
        pair = self.pairs[kind]
        if name == AUTO:
            sidecars = [{"sidecar": s.url} for s in pair.sidecars]
            self.proxy(
                proxy,
                routed(pair.p.url, "prefill", peer=pair.sidecars[0].endpoint, **sidecars[0]),
                routed(pair.d.url, "decode", **sidecars[1]),
                "--policy", "auto", "--token-bytes", f"{self.rig.token_bytes()}B",
                "--calibration", str(self.calibrated(pair.p)),
            )  # fmt: skip
        elif mode:
            proxy.start(mode, pair.p.url, pair.sidecars[0].endpoint, pair.d.url)
        else:
            toy = self.rig.args.toy_proxy
            if toy is None:
                raise Failed(f"arm {name} needs --toy-proxy, vLLM's toy_proxy_server.py")
            hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
            ports = ["--prefiller-port", str(pair.p.port), "--decoder-port", str(pair.d.port)]
            command = [self.rig.host.python, str(toy), "--port", str(proxy.port), *hosts, *ports]
            proxy.spawn(command, self.rig.host.env)
        return proxy

    def proxy(self, proxy: Process, *args: str) -> None:
        proxy.spawn([str(BINARY), "proxy", "--listen", f"127.0.0.1:{proxy.port}", *args])

    def calibrated(self, p: Server) -> pathlib.Path:
        """What P takes for prompts, as an operator measures it for the policies."""
        lines = []
        for n in (500, *(n for n in PREFILLS if n < self.rig.max_len)):  # the first one warms up
            seconds, _ = ask(p.url, prompt(n, ("calibrate", n, len(lines))))
            lines.append(f"prefill {n} {seconds:.6f}")
        samples, out = self.rig.run / "samples.txt", self.rig.run / "calibration.json"
        samples.write_text("\n".join(lines[1:]) + "\n")
        command = [BINARY, "place", "calibrate", "--samples", samples, "--out", out]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        return out

    def empty(self, arm: str) -> None:
        for server in self.engines(arm):
            wait_for(
                f"{server.name}'s prefix cache empty",
                lambda s=server: empty_prefix_cache(s),
                IDLE_S,
            )

    def stop(self) -> None:
        for router in self.routers.values():
            router.stop()
        for server in [*self.plain, *self.split]:
            server.stop()
        for pair in self.pairs.values():
            pair.stop()


def serves(router: Process) -> bool:
    """/health of our router, /healthcheck of vLLM's proxy."""
    return router.up() or get(router.url + "/healthcheck") != ""


def traffic(rig: Rig, requests: int, rate: float, seed: int) -> list[str]:
    scale = CPU_SCALE if rig.host.device == "cpu" else 1
    length, prefix, prefixes, answer = MIXES[rig.args.mix]
    what: dict[str, Any] = {
        "dataset-name": "prefix_repetition",
        "prefix-repetition-prefix-len": prefix // scale,
        "prefix-repetition-suffix-len": (length - prefix) // scale,
        "prefix-repetition-num-prefixes": prefixes or requests,
        "prefix-repetition-output-len": answer // scale,
    }
    what |= {"num-prompts": requests, "request-rate": rate, "seed": seed}
    return [word for key, value in what.items() for word in (f"--{key}", str(value))]


def counters(servers: list[Server]) -> dict[str, float]:
    names = ("external_prefix_cache_hits", "prefix_cache_hits", "num_preemptions")
    every = [s.metrics() for s in servers]
    return {name: sum(total(m, f"vllm:{name}_total") for m in every) for name in names}


def measure(rig: Rig, arms: Arms, bench: Bench, arm: str, rate: float) -> dict[str, Any]:
    arms.empty(arm)
    seconds = rig.args.serve_seconds
    before = counters(arms.engines(arm))
    args = traffic(rig, round(rate * seconds), rate, seed=int(1000 * rate))
    got = bench.run(arms.url(arm), seconds, *args)
    after = counters(arms.engines(arm))
    got["tpots"] = [
        sum(gaps) / max(1, n - 1) for gaps, n in zip(got["itls"], got["output_lens"], strict=True)
    ]
    for what in ("itls", "generated_texts", "server_queue_times", "server_ttfts"):
        got.pop(what, None)
    return {"arm": arm, "rate": rate, **{k: after[k] - before[k] for k in after}, **got}


def show(row: dict[str, Any]) -> None:
    def of(what: str, *percentiles: int) -> str:
        return " ".join(f"{row[f'p{p}_{what}_ms']:.{int(what != 'ttft')}f}" for p in percentiles)

    print(
        f"{row['rate']:4g}/s {row['arm']:16} {row['completed']:4} ok {row['failed']:2} failed "
        f"TTFT p50 p90 p99 {of('ttft', 50, 90, 99)}  TPOT {of('tpot', 50, 90, 99)}  "
        f"ITL p99 {of('itl', 99)}  {row['output_throughput']:.0f} tokens/s  "
        f"moved {row['external_prefix_cache_hits'] / max(1, row['total_input_tokens']):.2f}  "
        f"preempted {row['num_preemptions']:.0f}",
        flush=True,
    )


def wrong(row: dict[str, Any], mix: str) -> list[str]:
    what, out = f"{row['arm']} at {row['rate']:g}/s", []
    if row["failed"]:
        out.append(f"{what}: {row['failed']} failed: {[e for e in row['errors'] if e][:1]}")
    moved = row["external_prefix_cache_hits"] / max(1, row["total_input_tokens"])
    if row["arm"] in PAIRS and row["arm"] != AUTO and moved < MOVED and mix == "documents":
        out.append(f"{what}: {moved:.2f} of the prompts' tokens came from P")
    return out


def search(limits: Limits, rates: list[float], run_at: Callable[[float], dict[str, Any]]) -> float:
    """The highest of the rates that is within the limits; 0: none is."""
    low, high = 0, len(rates)  # all below low are within them, all from high on are not
    while low < high:
        middle = (low + high) // 2
        if limits.share(run_at(rates[middle])) >= ENOUGH:
            low = middle + 1
        else:
            high = middle
    return rates[low - 1] if low else 0.0


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig: Rig = stage.rig
    chosen = rig.args.arms.split(",")
    if unknown := set(chosen) - set(ARMS):
        raise Failed(f"arms {sorted(unknown)}: unknown; known are {', '.join(ARMS)}")
    names = list(dict.fromkeys(chosen))  # an arm may be measured twice
    start, arms, bench = time.monotonic(), Arms(rig, names), Bench(rig)
    rows: list[dict[str, Any]] = rig.so_far.setdefault("rows", [])
    problems: list[str] = []
    try:
        arms.start()
        rig.so_far["up_s"] = time.monotonic() - start
        say(f"engines and routers are up after {rig.so_far['up_s']:.0f} s")
        for arm in names:
            bench.run(arms.url(arm), 0, *traffic(rig, WARM, float("inf"), seed=1))
        rates = sorted(map(float, rig.args.rates.split(",")))

        def once(arm: str, rate: float) -> dict[str, Any]:
            row = measure(rig, arms, bench, arm, rate)
            rows.append(row)
            show(row)
            problems.extend(wrong(row, rig.args.mix))
            return row

        if not rig.args.goodput:
            for rate in rates:
                for arm in chosen:
                    once(arm, rate)
        cached = functools.cache(once)  # a run serves all limits
        for arm in names if rig.args.goodput else []:
            for limits in rig.args.goodput:
                best = search(limits, rates, functools.partial(cached, arm))
                found = rig.so_far.setdefault("goodput", [])
                found.append({"arm": arm, **dataclasses.asdict(limits), "rate": best})
                print(f"goodput {found[-1]}", flush=True)
        return {**rig.so_far, "mix": rig.args.mix, "seconds": rig.args.serve_seconds}, problems
    finally:
        bench.stop()
        arms.stop()
