#!/usr/bin/env python3
"""Copies of torch between pinned memory and a GPU, taken by the preload for a real sidecar, beside
the same program without it. Two minutes.

    preload.py [--kvspray F] [--set KEY=VALUE] [--json F]

Each run of the program compares every byte: copies and kernels on four streams and the default
stream, a graph with a copy in it, memory that is freed and allocated again. One run loses its
sidecar in mid copy. The report of the library shows which entry points the runtime called.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from rig import Sidecar, say

from kvspray.preload import LIBRARY

MIB = 1 << 20
BYTES = 64 * MIB
ROUNDS = 200
RATE_BYTES = 1 << 30
REPEAT = 5
PROGRAM_S = 300.0
CAUGHT = r"\]: cu\w+: (\d+) copies, \d+ bytes: copied by the sidecar"


def program(kill: int) -> dict[str, Any]:
    """The program itself. kill: the process id of a sidecar that is killed in the middle, or 0."""
    device = torch.device("cuda")
    streams = [torch.cuda.Stream() for _ in range(4)] + [torch.cuda.default_stream()]
    near = [torch.randint(0, 1 << 30, (BYTES // 8,)).pin_memory() for _ in streams]
    back = [torch.empty_like(x).pin_memory() for x in near]
    far = [torch.empty(BYTES // 8, dtype=torch.int64, device=device) for _ in streams]
    torch.cuda.synchronize()
    wrong = 0
    for i in range(ROUNDS):
        for s, a, b, d in zip(streams, near, back, far, strict=True):
            with torch.cuda.stream(s):
                d.copy_(a, non_blocking=True)
                d.add_(i)
                b.copy_(d, non_blocking=True)
        if kill and i == ROUNDS // 2:
            os.kill(kill, 9)
        torch.cuda.synchronize()
        wrong += sum(not torch.equal(a + i, b) for a, b in zip(near, back, strict=True))
        if i % 50 == 0:  # the next memory may have the same addresses
            far = []
            torch.cuda.empty_cache()
            far = [torch.empty(BYTES // 8, dtype=torch.int64, device=device) for _ in streams]
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        far[0].copy_(near[0], non_blocking=True)
        far[0].add_(7)
    graph.replay()
    torch.cuda.synchronize()
    wrong += not torch.equal(far[0].cpu(), near[0] + 7)
    host = torch.empty(RATE_BYTES, dtype=torch.uint8).pin_memory()
    gpu = torch.empty(RATE_BYTES, dtype=torch.uint8, device=device)
    rates: dict[str, list[float]] = {"to": [], "from": []}
    for _ in range(REPEAT):
        for way, (dst, src) in {"to": (gpu, host), "from": (host, gpu)}.items():
            torch.cuda.synchronize()
            began = time.monotonic()
            dst.copy_(src, non_blocking=True)
            torch.cuda.synchronize()
            rates[way].append(round(RATE_BYTES / (time.monotonic() - began) / 1e9, 1))
    return {"wrong": wrong, "GB/s": rates}


def run(name: str, sidecar: Sidecar | None, kill: bool = False, **more: str) -> dict[str, Any]:
    env = {**os.environ, "KVSPRAY_PRELOAD": "report", **more}
    if sidecar is not None:
        env |= {"LD_PRELOAD": str(LIBRARY), "KVSPRAY_PRELOAD_SOCKET": sidecar.socket}
    command = [
        sys.executable,
        __file__,
        "--program",
        str(sidecar.process.pid if sidecar and kill else 0),
    ]
    p = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROGRAM_S)
    lines = [line for line in p.stderr.splitlines() if "kvspray preload" in line]
    say(f"{name}: status {p.returncode}, {p.stdout.strip()}\n" + "\n".join(lines))
    if p.returncode:
        return {"status": p.returncode, "error": p.stderr[-2000:]}
    return {
        **json.loads(p.stdout),
        "status": 0,
        "caught": sum(map(int, re.findall(CAUGHT, p.stderr))),
        "report": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kvspray", default=".build/gpu/kvspray")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--program", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program is not None:
        print(json.dumps(program(args.program)))
        return
    runs: dict[str, Any] = {"native": run("native", None)}
    with tempfile.TemporaryDirectory() as base:
        for name, kill, more in (
            ("preload", False, {}),
            ("killed", True, {}),
            # One hardware queue: the stream that waits and the one that copies again may share it.
            ("killed, one queue", True, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ):
            sidecar = Sidecar(
                args.kvspray,
                pathlib.Path(base),
                name.replace(", ", "-").replace(" ", "-"),
                args.set,
            )
            try:
                runs[name] = run(name, sidecar, kill, **more)
            except subprocess.TimeoutExpired:
                runs[name] = {"status": "hangs"}
                say(f"{name}: no end within {PROGRAM_S:g} s")
            finally:
                sidecar.stop()
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))
    bad = [
        n
        for n, r in runs.items()
        if r["status"] != 0 or r["wrong"] or n != "native" and not r["caught"]
    ]
    sys.exit(f"preload: not as it should be: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
