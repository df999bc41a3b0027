#!/usr/bin/env python3
"""Transfers between an engine whose cache lies in host memory and one whose cache lies on a GPU, by
two real sidecars over shm, with one PCIe link and with those of every GPU named. About a minute.

    links.py [--kvspray F] [--gpus 0,1,...] [--set KEY=VALUE] [--json F]

Random lists of blocks of 32 KiB (KVSPRAY_LINKS_PAGE=bytes, 2 KiB to 128 KiB) that lie alone or in
runs; every byte of every transfer is compared, and those beside it. What each link has moved, and
what it is believed to move, is read from the sidecars.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rig import TIMEOUT_S, TOKENS, Remote, Sidecar, layout, say, until

import kvspray
from kvspray.machine import machine

LAYERS = 32
PAGE = int(os.environ.get("KVSPRAY_LINKS_PAGE", 32 << 10))
BLOCKS = (4 << 30) // LAYERS // PAGE
WORDS = PAGE // 8
MOVED = (1 << 30) // LAYERS // PAGE  # blocks of a transfer
FEW = (4 << 20) // LAYERS // PAGE  # of a small one, below any threshold
LARGE = 32 << 10  # pieces that links take
NEARLY = 0.9  # of a transfer: another way is tried now and then
TABLES = 3  # into which transfers go by turns
CANARY = -0x5A5A5A5A
LENT = 64 << 20  # of a GPU whose link relays


class Engine:
    """A cache in host memory or on a GPU, and memory of another GPU that is lent to the same
    sidecar."""

    def __init__(self, socket: str, gpu: int, on_gpu: bool, lend: int | None) -> None:
        torch.cuda.set_device(gpu)
        self.client = kvspray.WorkerClient(
            socket, engine=kvspray.EngineInfo("links", id=f"{os.getpid()}"), layers=LAYERS
        )
        nbytes = LAYERS * BLOCKS * PAGE
        if on_gpu:
            self.memory = torch.empty(nbytes // 8, dtype=torch.int64, device="cuda")
            self.regions = [self.client.gpu_region(self.memory.data_ptr(), nbytes)]
        else:
            self.regions = [self.client.alloc_region(nbytes)]
            self.memory = torch.frombuffer(self.regions[0].buffer, dtype=torch.int64)
        if lend is not None:
            self.lent = torch.zeros(LENT, dtype=torch.uint8, device=f"cuda:{lend}")
            self.regions.append(self.client.gpu_region(self.lent.data_ptr(), LENT))
        self.cache = self.memory.view(LAYERS, BLOCKS, WORDS)
        self.client.register(self.regions, layout("links", LAYERS, BLOCKS, PAGE))
        if not self.client.wait_connected(TIMEOUT_S):
            raise SystemExit(f"links: no session: {self.client.status().error}")
        torch.cuda.synchronize()

    def content(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        word = torch.arange(WORDS, dtype=torch.int64, device="cuda")
        return (word + (blocks.unsqueeze(1) << 20) + (layer << 40)) * 0x9E3779B1

    def fill(self, canary: bool) -> None:
        for i in range(LAYERS):
            if canary:
                self.cache[i].fill_(CANARY)
            else:
                self.cache[i].copy_(self.content(i, torch.arange(BLOCKS, device="cuda")))
        torch.cuda.synchronize()

    def endpoint(self) -> str:
        return self.client.status().endpoint

    def offer(self, xfers: list[bytes], blocks: list[int]) -> list[int]:
        n = len(blocks) * TOKENS
        return [self.client.intent(x, b"h" * 32, n, [blocks], ready=n, held=True) for x in xfers]

    def take(
        self, xfers: list[bytes], peer: str, tables: list[list[int]], ahead: int
    ) -> list[float]:
        """Transfers into these blocks by turns, a number of them open at a time; when each ended,
        in seconds from the first word."""
        waiting, open_leases, ends = list(enumerate(xfers)), set(), []
        start = time.monotonic()
        while waiting or open_leases:
            while waiting and len(open_leases) < ahead:
                i, x = waiting.pop(0)
                blocks = tables[i % len(tables)]
                open_leases.add(
                    self.client.expect(x, b"h" * 32, peer, len(blocks) * TOKENS, 0, [blocks])
                )
            for c in self.client.poll():
                if c.lease not in open_leases:
                    continue
                if c.status.name != "OK" or c.transport != "shm":
                    raise SystemExit(f"links: {c}")
                open_leases.discard(c.lease)
                ends.append(time.monotonic() - start)
            if time.monotonic() > start + TIMEOUT_S:
                raise SystemExit(
                    f"links: {len(open_leases)} leases are open after {TIMEOUT_S} s: "
                    f"{self.client.status()}"
                )
        return ends

    def settle(self, leases: list[int]) -> None:
        """Sees the end of what was offered."""
        left, end = set(leases), time.monotonic() + TIMEOUT_S
        while left and time.monotonic() < end:
            left -= {c.lease for c in self.client.poll()}
        if left:
            raise SystemExit(f"links: {len(left)} offers did not end")

    def wrong(self, src: list[int], tables: list[list[int]]) -> int:
        """Blocks that do not hold what they should, and blocks beside them that were written."""
        at, of, n = torch.tensor(tables, device="cuda"), torch.tensor(src, device="cuda"), 0
        beside = torch.ones(BLOCKS, dtype=torch.bool, device="cuda")
        beside[at.flatten()] = False
        for i in range(LAYERS):
            got, want = self.cache[i].to("cuda"), self.content(i, of)
            n += sum(int((got[table] != want).any(dim=1).sum()) for table in at)
            n += int(((got != CANARY).any(dim=1) & beside).sum())
        return n


def lists(r: random.Random, run: int, count: int) -> list[list[int]]:
    """Lists without a block in common, in runs of a fixed length that lie side by side."""
    starts = r.sample(range(BLOCKS // run), count * (MOVED // run))
    each = len(starts) // count
    return [
        [b * run + i for b in starts[k * each :][:each] for i in range(run)] for k in range(count)
    ]


def links(sidecar: Sidecar) -> list[dict[str, Any]]:
    return [p for p in sidecar.state()["gpu_links"] or [] if any(x["bytes"] for x in p["links"])]


def carried(sidecar: Sidecar) -> int:
    """What links, or kernels that reach the host's memory, have moved so far."""
    small = [
        x
        for w in sidecar.state()["gpu_executors"]
        if "pages" in (w["from"], w["to"])
        for x in w["executors"]
        if x["executor"] == "pack"
    ]
    return sum(int(x["bytes"]) for x in small + [x for p in links(sidecar) for x in p["links"]])


def measure(
    p: Remote, d: Remote, sidecar: Sidecar, r: random.Random, runs: list[int], repeat: int
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    p.call("fill", False)
    peer, bytes_ = p.call("endpoint"), MOVED * LAYERS * PAGE
    for run in runs:
        d.call("fill", True)
        (src,), dst = lists(r, run, 1), lists(r, run, TABLES)

        def go(
            count: int, ahead: int, n: int = MOVED, src: list[int] = src, dst: list[list[int]] = dst
        ) -> list[float]:
            xfers = [os.urandom(16) for _ in range(count)]
            leases = p.call("offer", xfers, src[:n])
            ends = d.call("take", xfers, peer, [table[:n] for table in dst], ahead)
            p.call("settle", leases)
            return ends

        first = go(1, 1)[0]  # finds out what is to be made ready

        def over_links(go: Callable[..., list[float]] = go) -> bool:
            before = carried(sidecar)
            go(1, 1)
            return carried(sidecar) - before >= bytes_ * NEARLY

        # Paths are measured and memory is pinned beside the transfers: what is measured is how they
        # go from then on.
        until(over_links, "all of a transfer goes over links")
        go(2, 2)
        single = [bytes_ / go(1, 1)[0] / 1e9 for _ in range(repeat)]
        ends = go(12, 2)
        few = [go(1, 1, FEW)[0] for _ in range(8 * repeat)]
        row = {"first_gb_s": round(bytes_ / first / 1e9, 1),
            "single_gb_s": round(statistics.median(single), 1),
            "two_open_gb_s": round(12 * bytes_ / ends[-1] / 1e9, 1),
            "small_p50_us": round(1e6 * statistics.median(few)),
            "wrong": d.call("wrong", src, dst)}  # fmt: skip
        out[f"pieces of {run * PAGE >> 10} KiB"] = row
        say(f"pieces of {run * PAGE >> 10} KiB: {row}")
    return out


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--kvspray", default=".build/gpu/kvspray")
    ap.add_argument("--gpus", default="0,1", type=lambda s: [int(x) for x in s.split(",")])
    ap.add_argument("--set", action="append", default=[], help="of the sidecars' configuration")
    ap.add_argument(
        "--runs",
        default="1,4,8,64",
        type=lambda s: [int(x) for x in s.split(",")],
        help="blocks side by side, ...",
    )
    ap.add_argument("--repeat", type=int, default=5)
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    r = random.Random(5)
    problems: list[str] = []
    report: dict[str, Any] = {"machine": machine(args.kvspray)}
    report |= {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": args.gpus,
        "torch": torch.__version__,
        "transfer_bytes": MOVED * LAYERS * PAGE,
    }
    target = args.gpus[0]
    for relays in [[], args.gpus[1:]] if args.gpus[1:] else [[]]:
        for to_gpu in (True, False):
            what = f"{'to' if to_gpu else 'from'} the GPU, {1 + len(relays)} links"
            with tempfile.TemporaryDirectory(prefix="kvspray-links-") as folder:
                sidecars = [
                    Sidecar(
                        args.kvspray,
                        pathlib.Path(folder),
                        name,
                        ["transports.order=shm", *args.set],
                    )
                    for name in "ab"
                ]
                # The destination's sidecar copies, and so it is to that one that the GPUs are lent.
                ends = [
                    (sidecars[0].socket, target, not to_gpu),
                    (sidecars[1].socket, target, to_gpu),
                ]
                engines = [Remote(Engine, *e, target if e[2] is False else None) for e in ends]
                engines += [Remote(Engine, sidecars[1].socket, g, True, None) for g in relays]
                try:
                    for e in engines:
                        e.get()
                    say(what)
                    rows = measure(engines[0], engines[1], sidecars[1], r, args.runs, args.repeat)
                    report[what] = {"rows": rows, "links": links(sidecars[1])}
                    say(f"{what}: {report[what]['links']}")
                    problems += [
                        f"{what}, {k}: {v['wrong']} blocks are wrong"
                        for k, v in rows.items()
                        if v["wrong"]
                    ]
                    used = [
                        x
                        for s in report[what]["links"]
                        for x in s["links"]
                        if s["gpu"] == target and x["bytes"]
                    ]
                    if len(used) != 1 + len(relays) and max(args.runs) * PAGE >= LARGE:
                        problems.append(f"{what}: {len(used)} links have moved something")
                except SystemExit:
                    for s in sidecars:
                        say(s.tail())
                    raise
                finally:
                    for e in engines:
                        e.kill()
                    for s in sidecars:
                        s.stop()
                    report.setdefault("log", {})[what] = [x for s in sidecars for x in s.notable(4)]
    report["problems"] = problems
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
