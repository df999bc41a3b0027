#!/usr/bin/env python3
"""D's latency with kvspray and with vLLM's own NixlConnector: the same engines, prompts and router,
alternated.

Two prefill/decode pairs of real vLLM engines run side by side, one with each connector. A prompt
goes to P, P's kv_transfer_params go to D, as NIXL-style routers do; D's latency is timed, and then
the same prompt at the same D again, without a transfer. What a connector adds is printed three
times: above the floor, which is what a D takes whose connector is at rest (the lower one of the two
engines); above the same D's own time, which leaves out what a connector costs while it moves
nothing; and above its own time right behind a prefill of another prompt at P. A transfer always
comes behind one, which leaves the processor's caches cold; right behind the same request they are
warm. Both connectors see fresh prompts of the same lengths, in turns, and the first one changes
with each pair. While one is measured the engines of the other are stopped.

usage: bench_vllm.py [--pairs 50] [--lengths 128,512,...] [--transport tcp|shm]
[--engine-args="..."] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cluster import BINARY, ROOT, Failed, Sidecar, free_port, total, wait_for  # noqa: E402
from env import VLLM  # noqa: E402
from hosts import cpu  # noqa: E402
from resident import Resident  # noqa: E402
from servers import Process, Server, ask, end_on_signals, kvspray_config  # noqa: E402

from kvspray.machine import machine  # noqa: E402

BUILD = pathlib.Path(os.environ.get("KVSPRAY_BUILD", ROOT / ".build"))
HOST = cpu(BUILD, nixl=True)
BLOCK_BYTES = 4 * 16384  # in four layers
WARMUP = 3
IDLE_S = 5.0
RATIOS = (
    ("added_ms", "ratio"),
    ("added_to_own_ms", "ratio_to_own"),
    ("added_behind_prefill_ms", "ratio_behind_prefill"),
)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Pair:
    """P and D with one connector."""

    def __init__(self, name: str, p: Server, d: Server, extra: list[Process | Sidecar]) -> None:
        self.name, self.p, self.d, self.extra = name, p, d, extra
        self.latency: dict[int, list[float]] = {}
        self.floor: dict[int, list[float]] = {}
        self.behind: dict[int, list[float]] = {}  # the floor behind a prefill
        self.prefill: dict[int, list[float]] = {}
        self.wrong = 0

    def round(self, n: int, seed: object, keep: bool) -> None:
        r = random.Random(str((self.name, seed)))
        prompt, other = ([r.randrange(300, 1000) for _ in range(n)] for _ in range(2))
        t_p, answer = ask(
            self.p.url, prompt, {"do_remote_decode": True, "do_remote_prefill": False}
        )
        kv = answer.get("kv_transfer_params")
        if not kv:
            raise Failed(f"{self.name}: the prefill engine returned no kv_transfer_params")
        t_d, moved = ask(self.d.url, prompt, kv)
        t_f, local = ask(self.d.url, prompt, None)
        ask(self.p.url, other, None)
        t_b, again = ask(self.d.url, prompt, None)
        if len({tuple(a["choices"][0]["token_ids"]) for a in (answer, moved, local, again)}) != 1:
            self.wrong += 1
        if keep:
            self.prefill.setdefault(n, []).append(t_p)
            self.latency.setdefault(n, []).append(t_d)
            self.floor.setdefault(n, []).append(t_f)
            self.behind.setdefault(n, []).append(t_b)

    def pause(self) -> None:
        """The other pair's turn: this one's engines stop, so that threads that poll take no CPU
        from what is measured."""
        for s in (self.p, self.d):
            assert s.proc is not None
            os.killpg(s.proc.pid, signal.SIGSTOP)

    def resume(self) -> None:
        for s in (self.p, self.d):
            assert s.proc is not None
            os.killpg(s.proc.pid, signal.SIGCONT)

    def cpu(self) -> dict[str, float]:
        out = {"prefill engine": self.p.cpu_seconds(), "decode engine": self.d.cpu_seconds()}
        for e in self.extra:
            out[e.name] = sidecar_cpu(e) if isinstance(e, Sidecar) else e.cpu_seconds()
        return out


@contextlib.contextmanager
def alone(pair: Pair, pairs: list[Pair]) -> Iterator[None]:
    others = [p for p in pairs if p is not pair]
    for p in others:
        p.pause()
    try:
        yield
    finally:
        for p in others:
            p.resume()


def sidecar_cpu(s: Sidecar) -> float:
    assert s.proc is not None
    fields = pathlib.Path(f"/proc/{s.proc.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(values: list[float]) -> dict[str, float]:
    q = statistics.quantiles(values, n=20)
    return {
        "median_ms": 1e3 * statistics.median(values),
        "p5_ms": 1e3 * q[0],
        "p95_ms": 1e3 * q[-1],
    }


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--pairs", type=int, default=50)
    ap.add_argument("--lengths", default="128,256,512,1024,2048,4096")
    ap.add_argument(
        "--transport",
        choices=("tcp", "shm"),
        default="tcp",
        help="NIXL gets UCX over tcp, or over all that UCX finds",
    )
    ap.add_argument(
        "--integrity", choices=("off", "crc32c"), default="off", help="of kvspray; UCX has none"
    )
    ap.add_argument(
        "--engine-args",
        default="",
        help="more arguments of all four vLLM servers, --no-async-scheduling say",
    )
    ap.add_argument("--out", type=pathlib.Path, default=BUILD / "bench" / "vllm.json")
    args = ap.parse_args()
    lengths = [int(x) for x in args.lengths.split(",")]
    logs = BUILD / "bench" / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    run = pathlib.Path(tempfile.mkdtemp(prefix="kvs-bench-"))
    started: list[Process | Sidecar] = []
    here = machine(BINARY)
    try:
        pairs = start(args, run, logs, started)
        resident = Resident().hold(pid for s in started for pid in s.pids())
        say(
            f"{resident.bytes >> 20} MiB of programs locked in memory, {resident.refused >> 20} "
            "MiB not (ulimit -l): only timings differ"
        )
        report = measure(args, lengths, pairs, here)
    finally:
        for s in reversed(started):
            if isinstance(s, Server) and s.proc is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(s.proc.pid, signal.SIGCONT)
            s.stop()
        shutil.rmtree(run, ignore_errors=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    say(f"written to {args.out}")
    return 1 if any(p.wrong for p in pairs) else 0


def start(
    args: argparse.Namespace,
    run: pathlib.Path,
    logs: pathlib.Path,
    started: list[Process | Sidecar],
) -> list[Pair]:
    order = ["tcp"] if args.transport == "tcp" else ["shm", "tcp"]
    config = {
        "transports": {"order": order, "tcp": {"integrity": args.integrity}},
        "log": {"level": "warn"},
    }
    sidecars = [Sidecar(n, run, config) for n in ("prefill-sidecar", "decode-sidecar")]
    for s in sidecars:
        s.log = logs / f"{s.name}.log"
        s.config["trace"] = {}  # nothing that production would not do
        s.start()
        started.append(s)
    engine = [
        "--max-num-batched-tokens",
        "4096",
        "--kv-cache-memory-bytes",
        str(96 << 20),
        *shlex.split(args.engine_args),
    ]
    servers: dict[str, Server] = {}
    for name, side, role in (
        ("kvspray", 0, "kv_producer"),
        ("kvspray", 1, "kv_consumer"),
        ("nixl", 0, "kv_producer"),
        ("nixl", 1, "kv_consumer"),
    ):
        s = Server(f"{name}-{'prefill' if side == 0 else 'decode'}", logs)
        env = {}
        if name == "kvspray":
            kv = kvspray_config(sidecars[side].socket, role)
        else:
            kv = {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
            }
            env = {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            }
            if args.transport == "tcp":
                env["UCX_TLS"] = "tcp"
        s.start(HOST, "tiny-llama", kv, *engine, env=env)
        started.append(s)
        servers[s.name] = s
    say("four vLLM servers start")
    for s in servers.values():
        wait_for(f"{s.name} up", s.up, 600, tick=0.5)
        say(f"  {s.name} is up after {time.monotonic() - s.started:.0f} s")
    for sc in sidecars:
        wait_for(
            f"sessions at {sc.name}",
            lambda sc=sc: total(sc.metrics(), "kvspray_engine_sessions", role="worker") >= 1,
            30,
        )
    return [
        Pair("kvspray", servers["kvspray-prefill"], servers["kvspray-decode"], list(sidecars)),
        Pair("nixl", servers["nixl-prefill"], servers["nixl-decode"], []),
    ]


def measure(
    args: argparse.Namespace, lengths: list[int], pairs: list[Pair], here: dict[str, Any]
) -> dict[str, Any]:
    time.sleep(2)
    before = {p.name: p.cpu() for p in pairs}
    time.sleep(IDLE_S)
    idle = {
        p.name: {k: (v - before[p.name][k]) / IDLE_S for k, v in p.cpu().items()} for p in pairs
    }
    say("idle CPU measured; warming up")
    for n in lengths:
        for i in range(WARMUP):
            for p in pairs:
                with alone(p, pairs):
                    p.round(n, ("warm", n, i), keep=False)
    cpu: dict[str, dict[str, float]] = {p.name: {} for p in pairs}
    for n in lengths:
        for i in range(args.pairs):
            for p in pairs if i % 2 == 0 else pairs[::-1]:
                with alone(p, pairs):
                    a = p.cpu()
                    p.round(n, (n, i), keep=True)
                    for k, v in p.cpu().items():
                        cpu[p.name][k] = cpu[p.name].get(k, 0.0) + v - a[k]
        say(f"  {n} tokens: {args.pairs} pairs")
    rounds = args.pairs * len(lengths)
    report: dict[str, Any] = {
        "what": (
            "D's latency for one token, transfer included, and the same prompt again without one, "
            "right away and behind a prefill of another prompt; the lower of the former is the "
            "floor"
        ),
        "machine": here,
        "transport": args.transport,
        "integrity": args.integrity,
        "pairs": args.pairs,
        "engine_args": args.engine_args,
        "engine": f"{VLLM} on CPUs, tiny random Llama, 4 layers, float32, blocks of 32 tokens",
        "lengths": {},
        "idle_cpu_cores": idle,
        "cpu_s_per_request": {
            name: {k: v / rounds for k, v in d.items()} for name, d in cpu.items()
        },
        "wrong_tokens": {p.name: p.wrong for p in pairs},
    }
    for n in lengths:
        row: dict[str, Any] = {"bytes": -(-n // HOST.block) * BLOCK_BYTES}
        floor = min(statistics.median(p.floor[n]) for p in pairs)
        row["floor_ms"] = 1e3 * floor
        for p in pairs:
            latency, own, behind = (statistics.median(x[n]) for x in (p.latency, p.floor, p.behind))
            row[p.name] = {
                "latency": summary(p.latency[n]), "own_floor": summary(p.floor[n]),
                "prefill": summary(p.prefill[n]), "own_floor_behind_prefill": summary(p.behind[n]),
                "added_ms": 1e3 * (latency - floor), "added_to_own_ms": 1e3 * (latency - own),
                "added_behind_prefill_ms": 1e3 * (latency - behind),
            }  # fmt: skip
        k, x = row["kvspray"], row["nixl"]
        for what, ratio in RATIOS:
            row[ratio] = k[what] / x[what] if x[what] > 0 else None
        report["lengths"][str(n)] = row
    return report


def show(r: dict[str, Any]) -> None:
    print(
        f"\nD's latency, ms, median of {r['pairs']} pairs; transport {r['transport']}, integrity "
        f"{r['integrity']} {r['engine_args']}"
    )
    side = f"{'D':>6} {'adds':>6} {'own':>6} {'adds':>6} {'behind':>6} {'adds':>6}"
    print(f"{'':>7} {'':>7} {'':>6} | {'kvspray':^41} | {'nixl':^41} | ratio")
    print(
        f"{'tokens':>7} {'KiB':>7} {'floor':>6} | {side} | {side} | {'floor':>5} {'own':>5} "
        f"{'behind':>6}"
    )
    for n, row in r["lengths"].items():
        cells = [
            f"{c['latency']['median_ms']:6.1f} {c['added_ms']:6.1f} "
            f"{c['own_floor']['median_ms']:6.1f} {c['added_to_own_ms']:6.1f} "
            f"{c['own_floor_behind_prefill']['median_ms']:6.1f} {c['added_behind_prefill_ms']:6.1f}"
            for c in (row["kvspray"], row["nixl"])
        ]
        ratios = " ".join("    -" if row[k] is None else f"{row[k]:5.2f}" for _, k in RATIOS)
        print(
            f"{n:>7} {row['bytes'] // 1024:>7} {row['floor_ms']:6.1f} | {cells[0]} | {cells[1]} | "
            f"{ratios}"
        )
    for what, unit in (
        ("idle_cpu_cores", "of a core, idle"),
        ("cpu_s_per_request", "CPU s per request"),
    ):
        print(f"\n{unit}:")
        for name, d in r[what].items():
            print(f"  {name:8} " + ", ".join(f"{k} {v:.4f}" for k, v in d.items()))
    print(f"\nwrong tokens: {r['wrong_tokens']}\n")


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(main())
    except Failed as err:
        print(f"bench_vllm: {err}", file=sys.stderr)
        sys.exit(1)
