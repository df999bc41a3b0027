#!/usr/bin/env python3
"""Placement policies with real engines: three vLLM servers that prefill and decode, a sidecar each,
and the router.

Each engine's sidecar has a rail of its own, on which the kernel (tc) shapes what arrives, in a
network namespace of the benchmark. For each rate, kind of traffic and number of clients, all
policies serve the same prompts in turns, with empty caches and a new router. Every answer is
compared with that of a plain engine. Of `auto` the predicted time to the first token is compared
with the measured one, for the second half of each run. Rates take turns within each round. Each
layer of an engine is slowed down to --pace tokens per second (paced/kvspray_paced.py), so that
engines on few cores do not wait for each other; --pace 0 leaves that out. Finished parts are in the
report, also of a run that was cut.

usage: bench_place.py [--gbit 0.1,1,10] [--shapes multi-turn,fan-out] [--clients 2,8] [--rounds 5]
                      [--pace 4000] [--out FILE.json]    (root)
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import contextlib
import datetime
import json
import os
import pathlib
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cluster import BINARY, ROOT, Failed, Sidecar, free_port, routed, total, wait_for  # noqa: E402
from env import VLLM  # noqa: E402
from hosts import cpu  # noqa: E402
from servers import (  # noqa: E402
    Answer,
    Process,
    Server,
    ask,
    complete,
    cpu_seconds,
    end_on_signals,
    kvspray_config,
    wait_up,
)

from kvspray.machine import machine  # noqa: E402

BUILD = pathlib.Path(os.environ.get("KVSPRAY_BUILD", ROOT / ".build"))
HOST = cpu(BUILD).with_modules(HERE / "paced")
INSIDE = "KVSPRAY_BENCH_NAMESPACE"
MODEL = "tiny-llama"
TOKEN_BYTES = 2048
NAMES = ("A", "B", "C")
POLICIES = ("auto", "cache", "least-loaded", "fetch", "local")
ANSWER = 12  # tokens
MIN_S = 0.1  # of requests whose prediction is judged
ASKERS = 64
QUIET = 0.5  # cores that other work may use
GOAL_ERROR, GOAL_COST, GOAL_GAIN = 0.15, 1.05, 1.3


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def tokens(n: int, *seed: object) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(300, 1000) for _ in range(n)]


# ---- traffic: for each client a list of conversations; a conversation is a list of what each turn
# adds


Talk = list[list[int]]


def multi_turn(clients: int, size: float) -> list[list[Talk]]:
    """Conversations of four turns. Every client has its own ones."""
    out = []
    for c in range(clients):
        r = random.Random(f"talk {clients} {c}")
        talks = []
        for k in range(2):
            first = int(size * r.uniform(800, 2200))
            talks.append(
                [
                    tokens(
                        first if t == 0 else int(size * r.uniform(200, 600)),
                        "talk",
                        clients,
                        c,
                        k,
                        t,
                    )
                    for t in range(4)
                ]
            )
        out.append(talks)
    return out


def fan_out(clients: int, size: float) -> list[list[Talk]]:
    """Three documents, each with questions that clients take as they come."""
    r = random.Random(f"fan {clients}")
    asks: list[Talk] = []
    for d in range(3):
        doc = tokens(int(size * r.uniform(1500, 3500)), "doc", clients, d)
        asks += [
            [doc + tokens(int(size * r.uniform(150, 400)), "question", clients, d, q)]
            for q in range(4 + 2 * clients)
        ]
    return [asks]  # one queue


SHAPES = {"multi-turn": multi_turn, "fan-out": fan_out}


def key(prompt: list[int]) -> str:
    return ",".join(map(str, prompt))


class Load:
    """What the clients of a cell ask, and what a plain engine answered."""

    def __init__(self, shape: str, clients: int, size: float, plain: int) -> None:
        self.clients = clients
        self.lists = SHAPES[shape](clients, size)
        self.want: dict[str, list[int]] = {}
        for talks in self.lists:
            for talk in talks:
                prompt: list[int] = []
                for turn in talk:
                    prompt = prompt + turn
                    got = complete(plain, prompt, ANSWER)
                    if got.error:
                        raise Failed(f"the plain engine: {got.error}")
                    self.want[key(prompt)] = got.tokens[0]
                    prompt = prompt + got.tokens[0]

    def run(self, port: int, tag: str) -> tuple[list[tuple[str, Answer]], int]:
        """Answers with their ids in the order of asking, and how many differ from the plain
        engine's."""
        out: list[tuple[float, str, Answer]] = []
        wrong = 0
        lock = threading.Lock()
        todo: queue.SimpleQueue[Talk] = queue.SimpleQueue()
        if len(self.lists) == 1:
            for talk in self.lists[0]:
                todo.put(talk)

        def talk_to(talk: Talk, rid: str) -> None:
            nonlocal wrong
            prompt: list[int] = []
            for i, turn in enumerate(talk):
                prompt = prompt + turn
                begun = time.monotonic()
                got = complete(port, prompt, ANSWER, rid=f"{rid}-{i}")
                want = self.want[key(prompt)]
                with lock:
                    out.append((begun, f"{rid}-{i}", got))
                    if got.error:
                        raise Failed(f"{rid}: {got.error}")
                    wrong += got.tokens[0] != want
                prompt = prompt + want

        def client(c: int) -> None:
            if len(self.lists) > 1:
                for k, talk in enumerate(self.lists[c]):
                    talk_to(talk, f"{tag}-{c}-{k}")
                return
            for k in range(1 << 20):
                try:
                    talk = todo.get_nowait()
                except queue.Empty:
                    return
                talk_to(talk, f"{tag}-{c}-{k}")

        with cf.ThreadPoolExecutor(self.clients) as pool:
            for f in [pool.submit(client, c) for c in range(self.clients)]:
                f.result()
        out.sort(key=lambda x: x[0])
        return [(rid, got) for _, rid, got in out], wrong


# ---- processes


class Engine(Server):
    def __init__(
        self, name: str, logs: pathlib.Path, sidecar: Sidecar, pace: float, store: bool = False
    ) -> None:
        super().__init__(name, logs)
        self.sidecar = sidecar
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        events = {"enable_kv_cache_events": True, "publisher": "zmq",
            "endpoint": self.events.replace("127.0.0.1", "*"),
            "replay_endpoint": self.replay.replace("127.0.0.1", "*")}  # fmt: skip
        connector = (
            ("kvspray_paced", "PacedConnector") if pace else ("kvspray_vllm", "KVSprayConnector")
        )
        kv = kvspray_config(sidecar.socket, "kv_both", connector=connector)
        kv["kv_connector_extra_config"]["store"] = store
        self.start(HOST, MODEL, kv, *ENGINE_ARGS, "--kv-events-config", json.dumps(events),
                   env={"VLLM_SERVER_DEV_MODE": "1", "KVSPRAY_PACE": str(pace)})  # fmt: skip

    def forget(self) -> None:
        with urllib.request.urlopen(
            urllib.request.Request(self.url + "/reset_prefix_cache", b"", method="POST"), timeout=30
        ) as f:
            f.read()


ENGINE_ARGS = [
    "--max-model-len",
    "8192",
    "--max-num-seqs",
    "64",
    "--max-num-batched-tokens",
    "512",
    "--kv-cache-memory-bytes",
    str(320 << 20),
]


class Router(Process):
    def start(
        self, engines: list[Engine], policy: str, calibration: pathlib.Path, more: list[str]
    ) -> Router:
        cmd = [
            str(BINARY),
            "proxy",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--log-format",
            "json",
            "--policy",
            policy,
        ]
        if policy == "least-loaded":
            # Each engine serves alone.
            cmd += ["--mode", "prefill-first", *(routed(e.url, "decode") for e in engines)]
        else:
            cmd += [
                routed(e.url, "both", sidecar=e.sidecar.url, events=e.events, replay=e.replay)
                for e in engines
            ]
            cmd += ["--token-bytes", f"{TOKEN_BYTES}B", "--calibration", str(calibration), *more]
        self.log.unlink(missing_ok=True)
        self.spawn(cmd, cwd=ROOT)
        wait_for("the router", self.up, 20)
        if policy != "least-loaded":
            wait_for(
                "the router's feeds",
                lambda: total(self.metrics(), "kvspray_proxy_kv_events_up") == len(engines),
                30,
            )
            wait_for(
                "empty caches", lambda: total(self.metrics(), "kvspray_proxy_kv_blocks") == 0, 30
            )
            time.sleep(1.2)  # endpoints and rates come with the health checks
        return self

    def placed(self, n: int) -> dict[str, dict[str, Any]]:
        def lines() -> dict[str, dict[str, Any]]:
            all_lines = [
                json.loads(x) for x in self.log.read_text().splitlines() if x.startswith("{")
            ]
            return {x["request"]: x for x in all_lines if x.get("msg") == "placed"}

        wait_for("a line for each request", lambda: len(lines()) >= n, 20)
        return lines()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.run_dir = pathlib.Path(tempfile.mkdtemp(prefix="kvs-place-"))
        self.logs = BUILD / "bench" / "place-logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.calibration = self.run_dir
        self.seen: dict[str, Seen] = {}
        self.started: list[Process | Sidecar] = []
        self.engines: list[Engine] = []
        self.report: dict[str, Any] = {
            "machine": machine(BINARY), "pace": args.pace, "rounds": args.rounds, "size": args.size,
            "engine": f"{VLLM} on CPUs, tiny random Llama", "cells": [], "askers": [],
            "calibration": {},
        }  # fmt: skip

    # ---- the network

    def shape(self, gbit: float) -> None:
        """What arrives at each rail, at this rate. Anything else on the loopback device is as it
        was."""
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL)
        rate = gbit * 1e9 / 8
        burst, limit = int(max(128 << 10, rate * 0.002)), int(max(512 << 10, rate * 0.02))
        tc("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
        for i in range(1, len(NAMES) + 1):
            tc("class", "add", "dev", "lo", "parent", "1:", "classid", f"1:{i}", "htb", "rate",
                f"{int(gbit * 1000)}mbit", "burst", str(burst), "cburst", str(burst), "quantum",
                "65536")  # fmt: skip
            tc(
                "qdisc",
                "add",
                "dev",
                "lo",
                "parent",
                f"1:{i}",
                "handle",
                f"{i}0:",
                "bfifo",
                "limit",
                str(limit),
            )
            tc(
                "filter",
                "add",
                "dev",
                "lo",
                "parent",
                "1:",
                "protocol",
                "ip",
                "u32",
                "match",
                "ip",
                "dst",
                f"127.0.1.{i}/32",
                "flowid",
                f"1:{i}",
            )

    # ---- set-up

    def start(self) -> None:
        for i, name in enumerate(NAMES, 1):
            rails = [{"name": "rail", "listen": f"127.0.1.{i}:{free_port()}"}]
            s = Sidecar(
                f"sidecar-{name}",
                self.run_dir,
                {
                    "transports": {"order": ["tcp"], "tcp": {"rails": rails}},
                    "log": {"level": "info"},
                },
            )
            s.config["trace"] = {}
            s.log = self.logs / f"sidecar-{name}.log"
            s.start()
            self.started.append(s)
            self.engines.append(Engine(name, self.logs, s, self.args.pace))
            self.started.append(self.engines[-1])

    def loads(self) -> dict[tuple[str, int], Load]:
        """The prompts of all cells with the answers of a plain engine, which then ends."""
        plain = Server("plain", self.logs)
        self.started.append(plain)
        plain.start(HOST, MODEL, None, *ENGINE_ARGS)
        wait_up([plain, *self.engines], say)
        out = {
            (s, c): Load(s, c, self.args.size, plain.port)
            for s in self.args.shapes
            for c in self.args.clients
        }
        doc = tokens(int(4000 * self.args.size), "the document")
        self.askers = [doc + tokens(32, "asker", i) for i in range(ASKERS)]
        self.document = doc
        self.asked = [complete(plain.port, p, ANSWER).tokens[0] for p in self.askers]
        plain.kill()
        self.started.remove(plain)
        return out

    def forget(self) -> None:
        for e in self.engines:
            wait_for(
                f"engine {e.name} idle",
                lambda e=e: total(e.metrics(), "vllm:num_requests_running") == 0,
                60,
                tick=0.1,
            )
            e.forget()
            ask(e.url, [5])  # a step, after which vLLM publishes

    def calibrate(self, gbit: float) -> None:
        """Prefills on an idle engine, and transfers between each two engines."""
        lines = []
        for n in (int(x * self.args.size) for x in (60, 150, 400, 1000, 2000, 4000)):
            took = [
                complete(e.port, tokens(n, "calibrate", gbit, e.name, n, k), 1).ttft_s
                for e in self.engines
                for k in range(2)
            ]
            lines += [f"prefill {n} {x:.6f}" for x in sorted(took)[1:-1]]
        begun = time.time()
        for p in self.engines:
            for d in self.engines:
                if p is d:
                    continue
                for n in (int(x * self.args.size) for x in (300, 1000, 3000)):
                    prompt = tokens(n, "link", gbit, p.name, d.name, n)
                    _, answer = ask(
                        p.url, prompt, {"do_remote_decode": True, "do_remote_prefill": False}
                    )
                    ask(d.url, prompt, answer["kv_transfer_params"])
        for e in self.engines:
            for x in e.sidecar.lines(e.sidecar.log):
                if (
                    x.get("msg") == "transfer"
                    and x["side"] == "source"
                    and x["outcome"] == "ok"
                    and since(x["time"]) >= begun
                ):
                    lines.append(f"link {x['bytes']} {max(1, x['wire_us']) / 1e6:.6f}")
        samples = self.run_dir / "samples.txt"
        samples.write_text("\n".join(lines) + "\n")
        shutil.copy(samples, self.logs / f"samples-{gbit:g}.txt")
        subprocess.run(
            [BINARY, "place", "calibrate", "--samples", samples, "--out", self.calibration],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.report["calibration"][f"{gbit:g}"] = fabrics = json.loads(
            self.calibration.read_text()
        )["fabrics"]
        parts = (
            f"{f['name']} {1e3 * f['fixed_seconds']:.1f} ms + x / {f['per_second']:.4g} (error "
            f"{f['error']:.1%})"
            for f in fabrics
        )
        say(f"{gbit:g} Gbit/s: " + "; ".join(parts))

    @contextlib.contextmanager
    def router(self, policy: str, tag: str) -> Iterator[Router]:
        self.forget()
        r = Router(tag, self.logs).start(
            self.engines, policy, self.calibration, self.args.router_args
        )
        self.started.append(r)
        try:
            yield r
        finally:
            r.stop()
            self.started.remove(r)

    # ---- measurement

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Cores that other work of this machine uses meanwhile; there when it is over."""
        out: list[float] = []
        start, a = time.monotonic(), machine_seconds() - self.own_seconds()
        yield out
        out.append((machine_seconds() - self.own_seconds() - a) / (time.monotonic() - start))

    def own_seconds(self) -> float:
        return cpu_seconds([os.getpid(), *(pid for s in self.started for pid in s.pids())])

    def order(self, n: int) -> list[str]:
        turn = n % len(self.args.policies)
        return [*self.args.policies[turn:], *self.args.policies[:turn]]

    def cell(self, gbit: float, shape: str, clients: int, load: Load, n: int) -> None:
        seen = self.seen.setdefault(f"{gbit:g} {shape} {clients}", Seen(self.args.policies))
        for policy in self.order(n):
            tag = f"{gbit:g}-{shape}-{clients}-{policy}-{n}"
            with self.router(policy, tag) as r:
                with self.watched() as busy:
                    got, bad = load.run(r.port, tag)
                seen.add(policy, [a.ttft_s for _, a in got], bad, busy[0])
                if policy == "least-loaded":
                    continue
                placed = r.placed(len(got))
                seen.lines[policy].append(
                    ([placed[rid] for rid, _ in got[len(got) // 2 :]], busy[0])
                )
                for rid, _ in got if policy == "auto" else ():
                    choice = placed[rid]["choice"]
                    seen.choices[choice] = seen.choices.get(choice, 0) + 1
        row = {"gbit": gbit, "shape": shape, "clients": clients, "choices": seen.choices,
            "prediction": errors(seen.judged("auto"), pairs=True),
            "predictions": {p: errors(seen.judged(p)) for p in seen.lines},
            "prediction_all": errors([x for run, _ in seen.lines["auto"] for x in run]),
            **seen.summary()}  # fmt: skip
        self.keep("cells", row, ("gbit", "shape", "clients"), show_cell(row))

    def hot(self, gbit: float, warm: bool, n: int) -> None:
        """One document, and 64 clients that ask about it at once. warm: one engine has the
        document."""
        seen = self.seen.setdefault(f"askers {gbit:g} {warm}", Seen(self.args.policies))
        for policy in self.order(n):
            tag = f"askers-{gbit:g}-{'warm' if warm else 'new'}-{policy}-{n}"
            with self.router(policy, tag) as r:
                if warm:
                    got = complete(
                        r.port, self.document + tokens(40, "first", n), ANSWER, rid="first"
                    )
                    if got.error:
                        raise Failed(f"{tag}: {got.error}")
                    time.sleep(0.5)
                with self.watched() as busy, cf.ThreadPoolExecutor(ASKERS) as pool:
                    jobs = [
                        pool.submit(complete, r.port, p, ANSWER, 1, f"{tag}-{i}")
                        for i, p in enumerate(self.askers)
                    ]
                    answers = [j.result() for j in jobs]
                for a in answers:
                    if a.error:
                        raise Failed(f"{tag}: {a.error}")
                wrong = sum(
                    a.tokens[0] != want for a, want in zip(answers, self.asked, strict=True)
                )
                seen.add(policy, [a.ttft_s for a in answers], wrong, busy[0])
                if policy == "auto":
                    seen.copies.append(
                        int(total(r.metrics(), "kvspray_proxy_placement_replicas_total"))
                    )
        row = {"gbit": gbit, "warm": warm, "copies": seen.copies, **seen.summary()}
        self.keep("askers", row, ("gbit", "warm"), show_askers(row))

    def keep(self, what: str, row: dict[str, Any], names: tuple[str, ...], text: str) -> None:
        """Replaces the row of earlier rounds."""
        self.report[what] = [x for x in self.report[what] if any(x[k] != row[k] for k in names)] + [
            row
        ]
        say(text)
        self.save()

    def save(self) -> None:
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.report, indent=1) + "\n")

    def run(self) -> None:
        # Engines begin on an unshaped device.
        self.start()
        loads = self.loads()
        say(f"{sum(len(x.want) for x in loads.values())} answers of the plain engine")
        for n in range(self.args.rounds):
            for gbit in self.args.gbit:
                self.shape(gbit)
                self.calibration = self.run_dir / f"calibration-{gbit:g}.json"
                if n == 0:
                    self.calibrate(gbit)
                for (shape, clients), load in loads.items():
                    self.cell(gbit, shape, clients, load, n)
                if gbit in self.args.askers_gbit:
                    for warm in (True, False):
                        self.hot(gbit, warm, n)
            say(f"{n + 1} of {self.args.rounds} rounds, load average {os.getloadavg()[0]:.1f}")

    def stop(self) -> None:
        for s in reversed(self.started):
            s.kill() if isinstance(s, Server) else s.stop()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def since(text: str) -> float:
    """Seconds of the epoch, of a time in a log."""
    return datetime.datetime.fromisoformat(text[:26] + "+00:00").timestamp()


def tc(*args: str) -> None:
    subprocess.run(["tc", *args], check=True)


def machine_seconds() -> float:
    """Of all processors, that were not idle."""
    fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


class Seen:
    """What all rounds of a cell have shown. Runs beside which other work used more than QUIET cores
    do not count, if each policy has others."""

    def __init__(self, policies: list[str]) -> None:
        self.ttft: dict[str, list[list[float]]] = {p: [] for p in policies}
        self.busy: dict[str, list[float]] = {p: [] for p in policies}
        self.lines: dict[str, list[tuple[list[dict[str, Any]], float]]] = {
            p: [] for p in {"auto", *policies} if p != "least-loaded"
        }
        self.choices: dict[str, int] = {}
        self.copies: list[int] = []
        self.wrong = 0

    def add(self, policy: str, ttft: list[float], wrong: int, busy: float) -> None:
        self.ttft[policy].append(ttft)
        self.busy[policy].append(busy)
        self.wrong += wrong

    def bound(self) -> float:
        """Of what other work may use beside a run that counts: QUIET, or what leaves every policy
        its quieter half."""
        return max(QUIET, *(sorted(x)[(len(x) - 1) // 2] for x in self.busy.values()))

    def judged(self, policy: str) -> list[dict[str, Any]]:
        bound = self.bound()
        return [x for run, busy in self.lines[policy] if busy <= bound for x in run]

    def summary(self) -> dict[str, Any]:
        out = {}
        bound = self.bound()
        for p, all_runs in self.ttft.items():
            runs = [run for run, busy in zip(all_runs, self.busy[p], strict=True) if busy <= bound]
            values = [x for run in runs for x in run]
            out[p] = {"p50": statistics.median(values), "p95": statistics.quantiles(values,
                n=20)[-1], "mean": statistics.fmean(values), "p50_of_runs": [statistics.median(x)
                for x in runs], "busy": self.busy[p]}  # fmt: skip
        return {
            "policies": out,
            "busy_bound": bound,
            "wrong": self.wrong,
            "answers": sum(len(run) for runs in self.ttft.values() for run in runs),
        }


def errors(lines: list[dict[str, Any]], pairs: bool = False) -> dict[str, Any]:
    """Mean of |predicted - measured| / measured, of requests that took longer than MIN_S."""
    found = [
        (x["choice"], x["predicted"], x["actual"]) for x in lines if x.get("actual", 0) > MIN_S
    ]
    out: dict[str, Any] = {"requests": len(found)}
    if found:
        out["error"] = statistics.fmean(abs(p - a) / a for _, p, a in found)
        out["bias"] = statistics.fmean((p - a) / a for _, p, a in found)
    if pairs:
        out["pairs"] = [(c, round(p, 4), round(a, 4)) for c, p, a in found]
    return out


def best(cell: dict[str, Any]) -> tuple[str, float]:
    fixed = {p: x["p50"] for p, x in cell["policies"].items() if p != "auto"}
    name = min(fixed, key=fixed.__getitem__)
    return name, fixed[name]


def show_cell(cell: dict[str, Any]) -> str:
    p50 = ", ".join(f"{p} {x['p50']:.3f}" for p, x in cell["policies"].items())
    text = f"{cell['gbit']:g} Gbit/s, {cell['shape']}, {cell['clients']} clients: {p50} s"
    if "auto" in cell["policies"] and len(cell["policies"]) > 1:
        name, x = best(cell)
        text += f"; auto/{name} {cell['policies']['auto']['p50'] / x:.3f}"
    e = cell["prediction"]
    if "error" in e:
        text += (
            f"; error {e['error']:.1%} (bias {e['bias']:+.1%}) of {e['requests']}; "
            f"{cell['choices']}"
        )
    return text + (
        f"; {cell['wrong']} of {cell['answers']} answers differ; other work at most "
        f"{cell['busy_bound']:.1f} cores"
    )


def show_askers(row: dict[str, Any]) -> str:
    p50 = ", ".join(f"{p} {x['p50']:.3f}" for p, x in row["policies"].items())
    text = (
        f"{ASKERS} askers of a document that {'one engine has' if row['warm'] else 'is new'}, "
        f"{row['gbit']:g} Gbit/s: {p50} s"
    )
    if {"auto", "least-loaded"} <= row["policies"].keys():
        text += (
            "; least-loaded/auto "
            f"{row['policies']['least-loaded']['p50'] / row['policies']['auto']['p50']:.2f}"
        )
    return text + f"; copies {row['copies']}; {row['wrong']} of {row['answers']} answers differ"


def verdict(report: dict[str, Any]) -> bool:
    """Prints everything with the goals that were missed."""
    misses = []
    pairs = []
    print()
    for cell in report["cells"]:
        print(show_cell(cell))
        pairs += cell["prediction"]["pairs"]
        if cell["wrong"]:
            misses.append(f"{cell['wrong']} answers differ: {show_cell(cell)}")
        if (
            "auto" in cell["policies"]
            and len(cell["policies"]) > 1
            and cell["policies"]["auto"]["p50"] > GOAL_COST * best(cell)[1]
        ):
            misses.append(f"auto is more than 5% behind {best(cell)[0]}: {show_cell(cell)}")
    for row in report["askers"]:
        print(show_askers(row))
        if row["wrong"]:
            misses.append(f"{row['wrong']} answers differ: {show_askers(row)}")
        p = row["policies"]
        if (
            row["warm"]
            and {"auto", "least-loaded"} <= p.keys()
            and p["auto"]["p50"] * GOAL_GAIN > p["least-loaded"]["p50"]
        ):
            misses.append(f"auto gains less than {GOAL_GAIN}: {show_askers(row)}")
    if pairs:
        error = statistics.fmean(abs(p - a) / a for _, p, a in pairs)
        print(f"predictions of {len(pairs)} requests above {MIN_S} s: mean error {error:.1%}")
        if error > GOAL_ERROR:
            misses.append(f"mean error of predictions {error:.1%}, the goal is {GOAL_ERROR:.0%}")
    for m in misses:
        print(f"MISSED  {m}")
    return not misses


def main() -> int:
    def floats(text: str) -> list[float]:
        return [float(x) for x in text.split(",") if x]

    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--gbit", type=floats, default=[1.0, 0.1, 10.0])
    ap.add_argument("--shapes", type=lambda s: s.split(","), default=list(SHAPES))
    ap.add_argument("--clients", type=lambda s: [int(x) for x in s.split(",")], default=[2, 8])
    ap.add_argument("--policies", type=lambda s: s.split(","), default=list(POLICIES))
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument(
        "--askers-gbit",
        type=floats,
        default=[1.0],
        help="rates at which 64 clients ask about one document",
    )
    ap.add_argument(
        "--pace",
        type=float,
        default=4000,
        help="tokens per second that each engine computes at most; 0: as fast as it can",
    )
    ap.add_argument(
        "--size", type=float, default=1.0, help="of prompts; 1: documents of 1,500 to 3,500 tokens"
    )
    ap.add_argument("--router-args", type=lambda s: s.split(), default=[])
    ap.add_argument("--out", type=pathlib.Path, default=BUILD / "bench" / "place.json")
    args = ap.parse_args()
    if os.environ.get(INSIDE) is None:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    bench = Bench(args)
    try:
        bench.run()
    finally:
        bench.stop()
    return 0 if verdict(bench.report) else 1


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(main())
    except (Failed, urllib.error.URLError) as err:
        print(f"bench_place: {err}", file=sys.stderr)
        sys.exit(1)
