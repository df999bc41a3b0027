#!/usr/bin/env python3
"""NIXL's back ends KVSPRAY and UCX in turns: the same ranges between two processes over loopback.

usage: bench.py [--rounds 7] [--counts 1,100,...] [--bytes 16384] [--out FILE.json]

Each back end has a pair of agents. While one pair is measured, the processes of the other are
stopped. A transfer is prepared before its clock starts. CPU is that of the agents and, with
KVSPRAY, of both sidecars, which compute checksums; UCX computes none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "test" / "rig")]

from agents import Agent  # noqa: E402
from cluster import Sidecar  # noqa: E402

TOTAL = 512 << 20
BACKENDS = ("KVSPRAY", "UCX")


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child(backend: str, role: str, socket: str) -> None:
    """An agent. The initiator posts what its standard input names, and prints the seconds."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    a = Agent(role, socket, TOTAL, backend)
    print(json.dumps([a.nixl.get_agent_metadata().hex(), a.address]), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "meet" in order:
            a.nixl.add_remote_agent(bytes.fromhex(order["meet"][0]))
            there = order["meet"][1]
            print(json.dumps("met"), file=out, flush=True)
            continue
        n, size = order["count"], order["bytes"]
        places = np.random.default_rng(n)
        rows = []
        for base in (a.address, there):
            row = np.zeros((n, 3), dtype=np.uint64)
            row[:, 0] = base + places.permutation(TOTAL // size)[:n].astype(np.uint64) * size
            row[:, 1] = size
            rows.append(a.nixl.get_xfer_descs(row, "DRAM"))
        handle = a.nixl.initialize_xfer(order["op"], *rows, "target")
        took = []
        for _ in range(order["times"]):
            start = time.perf_counter()
            state = a.nixl.transfer(handle)
            while state == "PROC":
                state = a.nixl.check_xfer_state(handle)
            took.append(time.perf_counter() - start)
            assert state == "DONE", state
        a.nixl.release_xfer_handle(handle)
        print(json.dumps(took), file=out, flush=True)
    os._exit(0)  # UCX's threads do not always end


class Pair:
    def __init__(self, backend: str, sidecars: list[Sidecar]) -> None:
        self.backend, self.sidecars = backend, sidecars if backend == "KVSPRAY" else []
        env = {**os.environ, "UCX_TLS": "tcp"}
        env.pop("NIXL_PLUGIN_DIR", None)
        if backend == "KVSPRAY":
            env["NIXL_PLUGIN_DIR"] = str(ROOT / ".build" / "nixl")
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", backend, role, s.socket],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )
            for role, s in zip(("initiator", "target"), sidecars, strict=True)
        ]  # fmt: skip
        _, target = (self.answer(p) for p in self.processes)
        self.ask({"meet": target})

    def answer(self, p: subprocess.Popen[str]) -> Any:
        assert p.stdout is not None
        return json.loads(p.stdout.readline())

    def ask(self, order: dict[str, Any]) -> Any:
        p = self.processes[0]
        assert p.stdin is not None
        p.stdin.write(json.dumps(order) + "\n")
        p.stdin.flush()
        return self.answer(p)

    def cpu(self) -> float:
        pids = [p.pid for p in self.processes] + [x for s in self.sidecars for x in s.pids()]
        return sum(cpu_seconds(pid) for pid in pids)

    def signal(self, sig: signal.Signals) -> None:
        for p in self.processes:
            p.send_signal(sig)


@contextlib.contextmanager
def started() -> Iterator[list[Pair]]:
    with tempfile.TemporaryDirectory(prefix="kvs-nixl-") as dir, contextlib.ExitStack() as stack:
        sidecars = []
        for name in ("a", "b"):
            s = Sidecar(name, pathlib.Path(dir), {"transports": {"order": ["tcp"]}})
            s.config.update(log={"level": "warn"}, trace={})
            stack.callback(s.kill)
            sidecars.append(s.start())
        pairs = []
        for backend in BACKENDS:
            pairs.append(Pair(backend, sidecars))
            for p in pairs[-1].processes:
                stack.callback(p.wait)
                stack.callback(p.kill)
            pairs[-1].signal(signal.SIGSTOP)
        yield pairs


def measure(args: argparse.Namespace, pairs: list[Pair]) -> list[dict[str, Any]]:
    out = []
    for op in ("WRITE", "READ"):
        for count in (int(x) for x in args.counts.split(",")):
            times: dict[str, list[float]] = {b: [] for b in BACKENDS}
            cpu = dict.fromkeys(BACKENDS, 0.0)
            each = max(1, 1000 // count)
            for i in range(args.rounds + 1):
                for p in pairs if i % 2 else pairs[::-1]:
                    p.signal(signal.SIGCONT)
                    before = p.cpu()
                    took = p.ask({"op": op, "count": count, "bytes": args.bytes, "times": each})
                    if i:  # the first one opens connections
                        times[p.backend] += took
                        cpu[p.backend] += p.cpu() - before
                    p.signal(signal.SIGSTOP)
            row: dict[str, Any] = {"op": op, "count": count, "bytes": args.bytes}
            for b in BACKENDS:
                q = statistics.quantiles(times[b], n=10)
                row[b] = {
                    "median_ms": 1e3 * statistics.median(times[b]), "p90_ms": 1e3 * q[8],
                    "cpu_ms": 1e3 * cpu[b] / len(times[b]),
                }  # fmt: skip
            show(row)
            out.append(row)
    return out


def show(row: dict[str, Any]) -> None:
    cells = [
        f"{b} {row[b]['median_ms']:9.2f} ms (p90 {row[b]['p90_ms']:9.2f}), "
        f"{row['count'] / row[b]['median_ms']:8.1f} descriptors/ms, CPU {row[b]['cpu_ms']:8.2f} ms"
        for b in BACKENDS
    ]
    ratio = row["KVSPRAY"]["median_ms"] / row["UCX"]["median_ms"]
    print(f"{row['op']:5} {row['count']:6} | {' | '.join(cells)} | {ratio:6.2f}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--counts", default="1,100,1000,10000,20000", help="descriptors of a transfer")
    ap.add_argument("--bytes", type=int, default=16384, help="of a descriptor")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / ".build" / "bench" / "nixl.json")
    args = ap.parse_args()
    with started() as pairs:
        rows = measure(args, pairs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
