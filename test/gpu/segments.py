#!/usr/bin/env python3
"""Batches between segments of GPU memory, through two real sidecars: contents of random batches,
and GB/s beside entry sizes.

usage: segments.py --kvspray BINARY [--gpus 0,1] [--rounds N] [--json F]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from rig import TIMEOUT_S, Sidecar, say

import kvspray
from kvspray.segments import Grant, Segments

BYTES = 256 << 20
SIZES = (4 << 10, 64 << 10, 1 << 20)  # of an entry
MOVED = 128 << 20  # of a batch whose rate is measured
ALIGN = 256


class Side:
    """A worker with memory of a GPU."""

    def __init__(self, sidecar: Sidecar, name: str, gpu: int) -> None:
        self.memory = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
        self.client = kvspray.WorkerClient(
            sidecar.socket, engine=kvspray.EngineInfo("test", id=name), layers=1
        )
        self.region = self.client.gpu_region(self.memory.data_ptr(), BYTES)
        self.client.register([self.region])
        if not self.client.wait_connected(TIMEOUT_S):
            raise SystemExit(f"{name}: {self.client.status()}\n{sidecar.tail()}")
        self.segments = Segments(self.client)


def entries(r: random.Random) -> list[tuple[int, int, int]]:
    """(local, remote, bytes), of which no two overlap on either side."""
    size = ALIGN * r.randint(1, 512)
    cells = BYTES // size
    n = min(r.randint(1, 400), cells)
    a, b = r.sample(range(cells), n), r.sample(range(cells), n)
    return [
        (x * size, y * size, r.choice((size, size - 16, ALIGN))) for x, y in zip(a, b, strict=True)
    ]


def run(user: Side, owner: Side, batch: Any, write: bool) -> float:
    start = time.perf_counter()
    call = batch.write if write else batch.read
    peer = owner.client.status().endpoint
    lease = call("memory", [user.region], peer=peer, deadline_s=TIMEOUT_S)
    if not user.client.wait(TIMEOUT_S):
        raise SystemExit(f"a batch did not end: {user.client.status()}")
    (done,) = user.client.poll()
    if done.lease != lease or not done.ok:
        raise SystemExit(f"a batch ended with {done}")
    return time.perf_counter() - start


def content(user: Side, owner: Side, rounds: int) -> int:
    """The number of batches after which a byte of either side is not the expected one."""
    wrong, r = 0, random.Random(1)
    for turn in range(rounds):
        for side in (user, owner):
            side.memory.random_(0, 256)
        mine, theirs = user.memory.cpu(), owner.memory.cpu()
        torch.cuda.synchronize()
        write, todo = turn % 2 == 0, entries(r)
        with user.segments.batch(len(todo)) as batch:
            for local, remote, n in todo:
                batch.add(local=local, remote=remote, nbytes=n)
                if write:
                    theirs[remote : remote + n] = mine[local : local + n]
                else:
                    mine[local : local + n] = theirs[remote : remote + n]
            run(user, owner, batch, write)
        good = torch.equal(user.memory.cpu(), mine) and torch.equal(owner.memory.cpu(), theirs)
        wrong += not good
    return wrong


def rates(user: Side, owner: Side, rounds: int) -> list[dict[str, Any]]:
    out = []
    for size in SIZES:
        n = MOVED // size
        order = random.Random(size).sample(range(BYTES // size), n)
        for write in (True, False):
            took = []
            with user.segments.batch(n) as batch:
                for i, at in enumerate(order):
                    batch.add(local=i * size, remote=at * size, nbytes=size)
                run(user, owner, batch, write)  # the first one makes pipelines
                took = [run(user, owner, batch, write) for _ in range(rounds)]
            row = {"entry": size, "write": write, "gb_per_s": MOVED / statistics.median(took) / 1e9}
            say(f"{'write' if write else 'read':5} {size:8} bytes {row['gb_per_s']:8.1f} GB/s")
            out.append(row)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvspray", required=True)
    parser.add_argument("--gpus", default="0,0", help="of the initiator, and of the owner")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    first, second = map(int, args.gpus.split(","))
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        sidecars = [Sidecar(args.kvspray, pathlib.Path(folder), n, []) for n in ("user", "owner")]
        try:
            user, owner = Side(sidecars[0], "user", first), Side(sidecars[1], "owner", second)
            owner.segments.register("memory", owner.region, grants=[Grant(read=True, write=True)])
            wrong = content(user, owner, args.rounds)
            say(f"{args.rounds} batches, {wrong} with wrong bytes")
            report = {"gpus": args.gpus, "batches": args.rounds, "wrong": wrong}
            report["rates"] = rates(user, owner, args.rounds)
        finally:
            for s in sidecars:
                s.stop()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    say("RED" if wrong else "GREEN")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
