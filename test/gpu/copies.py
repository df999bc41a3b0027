#!/usr/bin/env python3
"""Copies between an engine's host memory and its GPU by a real sidecar; the engines are processes
of their own. About a minute.

    copies.py [--kvspray F] [--gpus 0,1,...] [--gib N] [--set KEY=VALUE] [--json F]

The first GPU's engine copies alone, then beside engines on the others, whose links relay, then
while those compute, while those copy, too, and is killed in the middle of a copy. Every byte is
compared after each. Where a second GPU is named, large copies must have used every link. It also
reports what engines lose whose links relay.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from rig import TIMEOUT_S, Remote, Sidecar, layout, say

import kvspray
from kvspray.machine import machine

PAGE = 16 << 10
REPEAT = 3
OTHER_BYTES = 1 << 30  # of an engine whose link relays
LOSS_S = 3.0


class Engine:
    """One engine: memory of its GPU, as much of the host's, and copies between the two."""

    def __init__(self, gpu: int, socket: str, nbytes: int) -> None:
        torch.cuda.set_device(gpu)
        self.device = torch.zeros(nbytes // 8, dtype=torch.int64, device="cuda")
        self.client = kvspray.WorkerClient(
            socket, engine=kvspray.EngineInfo("copies", id=f"gpu{gpu}"), layers=1
        )
        self.gpu, self.host = (
            self.client.gpu_region(self.device.data_ptr(), nbytes),
            self.client.alloc_region(nbytes),
        )
        self.near = torch.frombuffer(self.host.buffer, dtype=torch.int64)
        self.client.register([self.gpu, self.host], layout("copies", 1, 64, PAGE))
        if not self.client.wait_connected(TIMEOUT_S):
            raise SystemExit(f"copies: no session: {self.client.status().error}")
        self.random = random.Random(gpu)

    def content(self, seed: int) -> torch.Tensor:
        return (
            torch.arange(self.device.numel(), dtype=torch.int64, device="cuda") * 0x9E3779B1 + seed
        )

    def wait(self, lease: int) -> kvspray.Completion:
        if not lease:
            raise SystemExit(f"copies: refused: {self.client.status().error}")
        while True:
            if not self.client.wait(TIMEOUT_S):
                raise SystemExit("copies: no completion")
            for c in self.client.poll():
                if c.lease == lease:
                    return c

    def whole(self, to_gpu: bool, seed: int) -> dict[str, Any]:
        """All of it in one block."""
        return self.blocks(to_gpu, seed, [(0, 0, self.host.nbytes)])

    def scattered(self, to_gpu: bool, seed: int, size: int, count: int) -> dict[str, Any]:
        """Blocks of one size, in a random order at either end."""
        cells = range(self.host.nbytes // size)
        pairs = zip(self.random.sample(cells, count), self.random.sample(cells, count), strict=True)
        return self.blocks(to_gpu, seed, [(a * size, b * size, size) for a, b in pairs])

    def blocks(self, to_gpu: bool, seed: int, blocks: list[tuple[int, int, int]]) -> dict[str, Any]:
        source, dest = (self.near, self.device) if to_gpu else (self.device, self.near)
        source.copy_(self.content(seed))
        dest.fill_(-1)
        torch.cuda.synchronize()
        src, dst = (self.host, self.gpu) if to_gpu else (self.gpu, self.host)
        c = self.wait(self.client.copy(src, dst, blocks, deadline_s=TIMEOUT_S))
        want = torch.full_like(self.device, -1)
        if len(blocks) == 1:
            want = self.content(seed)
        else:
            words = blocks[0][2] // 8
            at = torch.tensor([b[:2] for b in blocks], device="cuda") // blocks[0][2]
            want.view(-1, words)[at[:, 1]] = self.content(seed).view(-1, words)[at[:, 0]]
        wrong = int((want != dest.to("cuda")).sum())
        return {
            "ok": c.ok,
            "path": c.transport,
            "bytes": c.bytes,
            "us": c.us,
            "wrong": wrong,
            "reason": c.reason,
        }

    def busy(self, seconds: float) -> int:
        """Copies for a while; how many."""
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            n += self.wait(self.client.copy(self.host, self.gpu, [(0, 0, self.host.nbytes)])).ok
        return n

    def compute(self, seconds: float) -> float:
        """Products of matrices for a while; how many a second."""
        a = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
        start, n = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            for _ in range(16):
                a @ a
            torch.cuda.synchronize()
            n += 16
        return n / (time.monotonic() - start)

    def begin(self, to_gpu: bool) -> int:
        """Asks for as many copies as a worker may have, and waits for none."""
        src, dst = (self.host, self.gpu) if to_gpu else (self.gpu, self.host)
        return sum(self.client.copy(src, dst, [(0, 0, self.host.nbytes)]) > 0 for _ in range(32))


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--kvspray", default=".build/gpu/kvspray")
    ap.add_argument("--gpus", default="0,1", type=lambda s: [int(x) for x in s.split(",")])
    ap.add_argument("--gib", type=int, default=1)
    ap.add_argument("--set", action="append", default=[], help="of the sidecar's configuration")
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    problems: list[str] = []
    report: dict[str, Any] = {"machine": machine(args.kvspray)}
    report |= {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": args.gpus,
        "torch": torch.__version__,
        "gib": args.gib,
    }
    with tempfile.TemporaryDirectory(prefix="kvspray-copies-") as folder:
        sidecar = Sidecar(args.kvspray, pathlib.Path(folder), "one", args.set)
        engines: list[Remote] = []

        def engine(*given: Any) -> Remote:
            e = Remote(Engine, *given)
            e.get()
            return e

        def judge(what: str, got: list[dict[str, Any]], paths: set[str]) -> None:
            if bad := [g for g in got if not g["ok"] or g["wrong"] or g["path"] not in paths]:
                problems.append(f"{what}: want {sorted(paths)}, got {bad[0]}")
            gbs = statistics.median(g["bytes"] / g["us"] / 1e3 for g in got)
            report[what] = {
                "gb_s": round(gbs, 1),
                "paths": sorted({g["path"] for g in got}),
                "wrong": sum(g["wrong"] for g in got),
            }
            say(f"{what}: {report[what]}")

        def measure(when: str, large: set[str]) -> None:
            for to_gpu, way in ((True, "to the GPU"), (False, "from the GPU")):
                judge(
                    f"{when}, {way}, whole",
                    [a.call("whole", to_gpu, i) for i in range(REPEAT)],
                    large,
                )
                got = [a.call("scattered", to_gpu, i, 1 << 20, 512) for i in range(REPEAT)]
                judge(f"{when}, {way}, 512 blocks of 1 MiB", got, large | {"direct"})
                for size, count in ((16 << 10, 32768), (2 << 10, 32768)):
                    got = [a.call("scattered", to_gpu, i, size, count) for i in range(2 * REPEAT)]
                    judge(
                        f"{when}, {way}, {count} blocks of {size >> 10} KiB",
                        got,
                        {"packed", "staged"},
                    )

        try:
            a = engine(args.gpus[0], sidecar.socket, args.gib << 30)
            engines.append(a)
            relayed = any(x.startswith("transports.gpu.relays=") for x in args.set)
            measure("alone", {"multipath"} if relayed else {"direct"})
            engines += [engine(g, sidecar.socket, OTHER_BYTES) for g in args.gpus[1:]]
            if len(engines) > 1:
                a.call("whole", True, 1)  # makes the paths and measures the threshold
                measure(f"{len(engines)} links", {"multipath"})
                for what, doing in (
                    ("that compute", "compute"),
                    ("with copies of their own", "busy"),
                ):
                    alone = [e.call(doing, LOSS_S) for e in engines[1:]]
                    for e in engines[1:]:
                        e.start(doing, LOSS_S)
                    judge(
                        f"relays {what}",
                        [a.call("whole", bool(i % 2), i) for i in range(2 * REPEAT)],
                        {"multipath"},
                    )
                    for e in engines[1:]:
                        e.get()
                        e.start(doing, LOSS_S)
                    report[f"relays {what}"]["gb_s_without_checks"] = round(
                        a.call("busy", LOSS_S) * args.gib * 1.0737 / LOSS_S, 1
                    )
                    beside = [e.get() for e in engines[1:]]
                    report[f"relays {what}"]["others_lose"] = [
                        round(1 - x / y, 3) for x, y in zip(beside, alone, strict=True)
                    ]
                    say(f"relays {what}: {report[f'relays {what}']}")
            a.start("begin", True)
            a.get()
            a.kill()
            later = engine(args.gpus[0], sidecar.socket, args.gib << 30)
            judge(
                "after kill -9 in mid copy",
                [later.call("whole", d, 3) for d in (True, False)],
                {"direct", "multipath"},
            )
            engines.append(later)
            if not all(e.call("busy", 0.2) for e in engines[1:-1]):
                problems.append("an engine that was not killed cannot copy any more")
        except SystemExit:
            say(sidecar.tail())
            raise
        finally:
            for e in engines:
                e.kill()
            sidecar.stop()
            report["log"] = sidecar.notable(12)
    report["problems"] = problems
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
