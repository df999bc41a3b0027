#!/usr/bin/env python3
"""Two engines with their caches on GPUs, two real sidecars between them; the engines are processes
of their own.

    e2e.py [--gpus 0,1] [--rounds N] [--part content|kill|rate|layers|slow|first] [--json F]

content   random block lists over every transport, by eager steps and by replays of full CUDA graphs
          of several sizes; every byte of every block is compared, and so are the blocks around it
kill      kill -9 of the source's engine, of either sidecar and of the destination's engine in mid
          copy: what was promised came whole or is reported as failed, and nothing is written into
          blocks that were given back
rate      scattered blocks of 16 KiB (KVSPRAY_E2E_PAGE=bytes, up to 256 KiB), both GPUs idle: single
          transfers of 4 GiB, and of 2 GiB with two or three open at a time
slow      what a busy engine loses while the other side pulls from its GPU, at full rate and at 15
          GB/s, idle and loaded by turns; with --gpus host,N while it pulls from host memory itself
layers    how long after the end of the forward pass the last layer's bytes are committed, the
          engine busy
first     how long after a layer's flag its first bytes are in the other engine's memory, the engine
          busy; needs --gpus 0,host

`host` for a GPU: that engine's cache lies in host memory. For the first one it is of use to part
slow alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import json
import mmap
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from rig import TIMEOUT_S, TOKENS, Remote, Sidecar, layout, say

import kvspray
from kvspray.gpu import GpuSignals
from kvspray.machine import machine

LAYERS = 64
PAGE = int(os.environ.get("KVSPRAY_E2E_PAGE", 16 << 10))
BLOCKS = (8 << 30) // LAYERS // PAGE
WORDS = PAGE // 8
STEPS = 3  # that the engine takes at least, where it is timed: one more or less is much otherwise
ALLOCATIONS = 2  # that a cache consists of, as those of engines consist of one for each layer
SIZES = (32, 128, 256, 512)  # blocks of a graph's request
OTHERS = SIZES[1]  # those of a request without a waiter
HIDDEN = 2048
VICTIMS = ("source engine", "source sidecar", "destination sidecar", "destination engine")
CANARY = -0x5A5A5A5A
FLAGS_HEADER, FLAGS_STRIDE = 128, 64
REPLAYS_AT = 72  # in the header: the offset of the replay flags
HOST = "host"
# Rows of their input, kernels per layer.
FIRST = (("60 us kernels", 3840, 1), ("800 us kernels", 51200, 1))
# Whether a step of others runs while a prefill is announced.
AHEAD = (("busy", True), ("idle before", False))


class Engine:
    """One engine: a paged cache on a GPU, its client, and a model whose layers compute for a while
    and then write the request's pages."""

    def __init__(self, gpu: str, socket: str) -> None:
        torch.cuda.set_device(0 if gpu == HOST else int(gpu))
        # Torch's others spin for milliseconds after work on the host, on the cores of those that
        # are timed.
        torch.set_num_threads(1)
        self.socket = socket
        self.client = kvspray.WorkerClient(
            socket, engine=kvspray.EngineInfo("e2e", id=f"{os.getpid()}"), layers=LAYERS
        )
        if gpu == HOST:
            self.regions = [
                self.client.alloc_region(8 * LAYERS * BLOCKS * WORDS // ALLOCATIONS)
                for _ in range(ALLOCATIONS)
            ]
            self.parts = [
                torch.frombuffer(region.buffer, dtype=torch.int64).view(-1, BLOCKS, WORDS)
                for region in self.regions
            ]
        else:
            self.parts = [
                torch.empty(
                    (LAYERS // ALLOCATIONS, BLOCKS, WORDS), dtype=torch.int64, device="cuda"
                )
                for _ in range(ALLOCATIONS)
            ]
            self.regions = [
                self.client.gpu_region(part.data_ptr(), part.nbytes) for part in self.parts
            ]
        self.cache = [self.parts[i % ALLOCATIONS][i // ALLOCATIONS] for i in range(LAYERS)]
        self.canary()
        self.client.register(self.regions, layout("e2e", LAYERS, BLOCKS, PAGE, ALLOCATIONS))
        if not self.client.wait_connected(TIMEOUT_S):
            raise SystemExit(f"e2e: no session: {self.client.status().error}")
        self.gpu = GpuSignals(self.client)
        self.count = 0
        self.word = torch.arange(WORDS, dtype=torch.int64, device="cuda")
        self.seed = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.weight = torch.randn(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16) / 64
        self.tables = {n: torch.zeros(n, dtype=torch.int64, device="cuda") for n in SIZES}
        self.inputs: dict[int, torch.Tensor] = {}
        self.graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self.names: dict[int, int] = {}

    def content(self, seed: Any, layer: int, n: int) -> torch.Tensor:
        """What position i of a request holds in a layer."""
        place = torch.arange(n, dtype=torch.int64, device="cuda").unsqueeze(1)
        return (self.word + (place << 20) + (layer << 40)) * 0x9E3779B1 + seed * 0x85EBCA6B

    def forward(self, n: int, work: int, rows: int = 0) -> None:
        """Layers of that many kernels on an input of that many rows, by default one for each
        block."""
        rows = rows or max(16, n)
        if rows not in self.inputs:
            self.inputs[rows] = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        x = self.inputs[rows]
        stream = torch.cuda.current_stream().cuda_stream
        for layer in range(LAYERS):
            for _ in range(work):
                x = torch.nn.functional.linear(x, self.weight)
            self.cache[layer].index_copy_(0, self.tables[n], self.content(self.seed, layer, n))
            if not self.gpu.signal_layer(layer, stream):
                raise SystemExit("e2e: signal refused")
        self.gpu.signal_step(stream)

    def graph(self, n: int, work: int, rows: int = 0) -> torch.cuda.CUDAGraph:
        if (n, work, rows) not in self.graphs:
            self.gpu.step(self.count, torch.cuda.current_stream().cuda_stream)
            self.forward(n, 1, rows)  # loads what it needs; reports a step that is over
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                self.forward(n, work, rows)
            self.graphs[n, work, rows] = g
        return self.graphs[n, work, rows]

    # -- what the parent asks

    def endpoint(self) -> str:
        return self.client.status().endpoint

    def mapped(self) -> tuple[str, list[str]]:
        """Files of the flags and of a cache in host memory, for a process that looks at them."""
        fds = f"/proc/{os.getpid()}/fd"
        flags = [
            fd
            for fd in os.listdir(fds)
            if os.path.realpath(f"{fds}/{fd}").startswith("/memfd:kvspray-flags")
        ]
        return f"{fds}/{flags[0]}", [f"{fds}/{region.fd}" for region in self.regions]

    def prepare(self, n: int, work: int, rows: int = 0) -> float:
        """Captures, and returns microseconds per layer."""
        self.tables[n].copy_(torch.arange(n))  # first: to capture is to write once
        g = self.graph(n, work, rows)
        times = []
        for _ in range(5):
            self.count += 1
            self.gpu.step(self.count, torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            t = time.monotonic()
            g.replay()
            torch.cuda.synchronize()
            times.append(time.monotonic() - t)
        return 1e6 * statistics.median(times) / LAYERS

    def steps(self) -> int:
        return self.count

    def kernel(self, rows: int) -> float:
        """Microseconds that the kernel of a layer takes with an input of that many rows."""
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.nn.functional.linear(self.inputs[rows], self.weight)
        a.record()
        for _ in range(10):
            torch.nn.functional.linear(self.inputs[rows], self.weight)
        b.record()
        b.synchronize()
        return 1e3 * a.elapsed_time(b) / 10

    def canary(self) -> None:
        for part in self.parts:
            part.fill_(CANARY)
        torch.cuda.synchronize()

    def send(
        self,
        xfer: bytes,
        seed: int,
        blocks: list[int],
        eager: bool,
        work: int = 1,
        chunks: int = 1,
        rows: int = 0,
        ahead: bool = False,
    ) -> dict[str, float]:
        """A prefill of len(blocks) blocks, which is announced before it runs, in `chunks` steps;
        `ahead`: while a step of others still runs."""
        n = len(blocks)
        size = next(s for s in SIZES if s >= n)
        graph = None if eager else self.graph(size, work, rows)
        stream = torch.cuda.current_stream().cuda_stream
        spare = [b for b in range(BLOCKS - size, BLOCKS) if b not in set(blocks)]
        # The graph writes more than the request has: into blocks of its own.
        self.tables[size].copy_(torch.tensor(blocks + spare[: size - n]))
        self.seed.fill_(seed)
        torch.cuda.synchronize()
        others = torch.cuda.Event()
        if ahead:
            self.count += 1
            self.gpu.step(self.count, stream)
            self.graph(OTHERS, work, rows).replay()
            others.record()
        lease = self.client.intent(xfer, b"h" * 32, n * TOKENS, [blocks])
        if not lease:
            raise SystemExit(f"e2e: intent refused: {self.client.status().error}")
        self.names[lease] = seed
        for c in range(chunks):
            self.count += 1
            if not self.client.step(
                self.count, [(lease, n * TOKENS * (c + 1) // chunks, None)]
            ) or not self.gpu.step(self.count, stream):
                raise SystemExit("e2e: step refused")
            done = torch.cuda.Event()
            if graph is None:
                self.forward(size, work, rows)
            else:
                graph.replay()
            if ahead and c == 0 and others.query():
                raise SystemExit(
                    "e2e: the step of others has ended before the prefill was announced and "
                    "launched"
                )
            done.record()
            # To ask again and again would keep others of this process from the context.
            done.synchronize()
        return {"end": time.monotonic(), "lease": lease}

    def offer(self, xfer: bytes, seed: int, blocks: list[int]) -> int:
        """A prompt that is there already."""
        table = self.table(blocks)
        for layer in range(LAYERS):
            self.cache[layer].index_copy_(
                0, table, self.content(seed, layer, len(blocks)).to(table.device)
            )
        torch.cuda.synchronize()
        lease = self.client.intent(
            xfer, b"h" * 32, len(blocks) * TOKENS, [blocks], ready=len(blocks) * TOKENS, held=True
        )
        self.names[lease] = seed
        return lease

    def again(self, xfers: list[bytes], blocks: list[int]) -> list[int]:
        """Prompts in blocks whose content does not matter."""
        return [
            self.client.intent(
                x,
                b"h" * 32,
                len(blocks) * TOKENS,
                [blocks],
                ready=len(blocks) * TOKENS,
                held=True,
                deadline_s=LEASE_S,
            )
            for x in xfers
        ]

    def busy(self, n: int, work: int, seconds: float) -> float:
        """Replays for so long, never more than two ahead; microseconds per layer."""
        g, stream = self.graph(n, work), torch.cuda.current_stream().cuda_stream
        events = [torch.cuda.Event(), torch.cuda.Event()]
        torch.cuda.synchronize()
        start, steps = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            events[steps % 2].synchronize()
            self.count += 1
            self.gpu.step(self.count, stream)
            g.replay()
            events[steps % 2].record()
            steps += 1
        torch.cuda.synchronize()
        return 1e6 * (time.monotonic() - start) / steps / LAYERS

    def pull(
        self,
        xfers: list[bytes],
        peer: str,
        tables: list[list[int]],
        seconds: float,
        gb_per_s: float,
    ) -> dict[str, float]:
        """Transfers into these tables by turns for so long: as fast as it goes with one open for
        each table, or, not faster than that, one after the other."""
        start, moved, used, free, open_leases = (
            time.monotonic(),
            0,
            0,
            list(range(1 if gb_per_s else len(tables))),
            dict[int, int](),
        )
        while True:
            while free and used < len(xfers) and time.monotonic() < start + seconds:
                at = free.pop(0)
                open_leases[int(self.expect(xfers[used], peer, tables[at])["lease"])] = at
                used += 1
            if not open_leases:
                break
            if not self.client.wait(TIMEOUT_S):
                raise SystemExit(
                    f"e2e: pull: {len(open_leases)} leases are open after {TIMEOUT_S} s"
                )
            for c in self.client.poll():
                if c.lease in open_leases:
                    if c.status.name != "OK":
                        raise SystemExit(f"e2e: pull: {c}")
                    free.append(open_leases.pop(c.lease))
                    moved += len(tables[0]) * LAYERS * PAGE
            while gb_per_s and (early := start + moved / (gb_per_s * 1e9) - time.monotonic()) > 0:
                self.client.wait(early)  # nothing is open: for the time to pass
        return {
            "gb_per_s": moved / (time.monotonic() - start) / 1e9,
            "used": used,
            "tables": min(used, 1 if gb_per_s else len(tables)),
        }

    def busy_pull(
        self, n: int, work: int, seconds: float, pull: tuple[Any, ...]
    ) -> tuple[float, dict[str, float]]:
        """Both at once: microseconds per layer, and what was pulled."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(self.pull, *pull)
            return self.busy(n, work, seconds), pulled.result()

    def stream(self, xfers: list[bytes], peer: str, tables: list[list[int]], ahead: int) -> float:
        """Transfers into these tables by turns, a number of them open at a time and one for a
        table; GB/s from the first word to the last completion."""
        waiting, open_leases, moved = list(enumerate(xfers)), dict[int, int](), 0
        start = time.monotonic()
        while waiting or open_leases:
            while len(open_leases) < ahead and (
                free := [w for w in waiting if w[0] % len(tables) not in open_leases.values()]
            ):
                waiting.remove(free[0])
                at = free[0][0] % len(tables)
                open_leases[int(self.expect(free[0][1], peer, tables[at])["lease"])] = at
                moved += len(tables[at]) * LAYERS * PAGE
            for c in self.client.poll():
                if c.lease in open_leases and c.status.name != "OK":
                    raise SystemExit(f"e2e: stream: {c}")
                open_leases.pop(c.lease, None)
            if time.monotonic() > start + TIMEOUT_S:
                raise SystemExit(
                    f"e2e: stream: {len(open_leases)} leases are open after {TIMEOUT_S} s"
                )
        return moved / (time.monotonic() - start) / 1e9

    def settle(self, leases: list[int]) -> None:
        """Gives up pages without a pull."""
        open_leases = set(leases)
        for lease in leases:
            self.client.cancel(lease)
        end = time.monotonic() + TIMEOUT_S
        while open_leases and time.monotonic() < end:
            open_leases -= {c.lease for c in self.client.poll()}

    def expect(self, xfer: bytes, peer: str, blocks: list[int]) -> dict[str, float]:
        at = time.monotonic()
        lease = self.client.expect(xfer, b"h" * 32, peer, len(blocks) * TOKENS, 0, [blocks])
        if not lease:
            raise SystemExit(f"e2e: expect refused: {self.client.status().error}")
        return {"lease": lease, "at": at}

    def finish(self, lease: int, timeout: float = TIMEOUT_S) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for c in self.client.poll():
                if c.lease == lease:
                    return {
                        "at": time.monotonic(),
                        "status": c.status.name,
                        "us": c.us,
                        "transport": c.transport,
                        "bytes": c.bytes,
                        "reason": c.reason,
                    }
        raise SystemExit(
            f"e2e: lease {lease} is not complete after {timeout} s: {self.client.status()}"
        )

    def table(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks, device=self.parts[0].device)

    def check(self, seed: int, blocks: list[int]) -> int:
        """Blocks that do not hold what they should."""
        table = self.table(blocks)
        return sum(
            int(
                (self.cache[i][table].to("cuda") != self.content(seed, i, len(blocks)))
                .any(dim=1)
                .sum()
            )
            for i in range(LAYERS)
        )

    def around(self, blocks: list[int]) -> int:
        """Blocks beside these that were written."""
        mask = torch.ones(BLOCKS, dtype=torch.bool, device="cuda")
        mask[torch.tensor(blocks, device="cuda")] = False
        return sum(
            int(((self.cache[i].to("cuda") != CANARY).any(dim=1) & mask).sum())
            for i in range(LAYERS)
        )

    def refill(self, blocks: list[int]) -> None:
        """The engine gives the blocks to the next request."""
        for part in self.parts:
            part[:, self.table(blocks)] = CANARY + 1
        torch.cuda.synchronize()

    def refilled(self, blocks: list[int]) -> int:
        return sum(
            int((part[:, self.table(blocks)] != CANARY + 1).any(dim=2).sum()) for part in self.parts
        )

    def connected(self) -> bool:
        return self.client.wait_connected(TIMEOUT_S)

    def bad(self) -> list[str]:
        """What an engine may register wrongly; each in a client of its own. Returns what was not
        refused, or killed the session of others."""
        wrong = []
        part, layers = self.parts[0], len(self.parts[0])
        good = self.client.gpu_region(part.data_ptr(), part.nbytes)
        handle = bytes(good._c.handle)
        cases = {
            "uuid": handle[:8] + bytes(16) + handle[24:],
            "offset": handle[:24] + (1 << 50).to_bytes(8, "little") + handle[32:],
            "foreign": handle[:40] + os.urandom(64),
            "kind": b"\7" + handle[1:],
            "length": handle[:32] + (1 << 44).to_bytes(8, "little") + handle[40:],
        }
        for name, raw in cases.items():
            region = self.client.gpu_region(part.data_ptr(), part.nbytes)
            for i, b in enumerate(raw):
                region._c.handle[i] = b
            if name == "length":
                region._c.handle[24:32] = (1 << 43).to_bytes(8, "little")
            with kvspray.WorkerClient(
                self.socket, engine=kvspray.EngineInfo("bad", id=name), layers=layers
            ) as c:
                c.register([region], layout("e2e", layers, BLOCKS, PAGE))
                end = time.monotonic() + 5
                while not (error := c.status().error) and time.monotonic() < end:
                    if c.connected:
                        break
                    time.sleep(0.01)
                if c.connected or not error:
                    wrong.append(f"{name}: connected={c.connected} error={error!r}")
                else:
                    say(f"bad input {name}: {error[:160]}")
        return wrong

    def close(self) -> None:
        self.gpu.close()
        self.client.close()


class Observer:
    """A process that looks at the flags of one engine and at the memory of the other, and at
    nothing else."""

    def __init__(self, flags: str, cache: list[str]) -> None:
        self.flags, *self.parts = (memoryview(self.map(path)).cast("q") for path in (flags, *cache))
        self.replays = self.flags[REPLAYS_AT // 8]

    def map(self, path: str) -> mmap.mmap:
        fd = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def arm(self, step: int, blocks: list[int]) -> None:
        """What `watch` will wait for: the flags of a step, and the first word of any of these
        refilled blocks in each layer."""
        self.step = step
        self.words = [
            [(layer // ALLOCATIONS * BLOCKS + b) * WORDS for b in blocks] for layer in range(LAYERS)
        ]
        if any(map(self.came, range(LAYERS))):
            raise SystemExit("e2e: blocks are not refilled, or bytes came before the step began")

    def came(self, layer: int) -> bool:
        part = self.parts[layer % ALLOCATIONS]
        return any(part[w] != CANARY + 1 for w in self.words[layer])

    def complete(self, layer: int) -> bool:
        """Whether the layer's flag has come, from a stream or from a graph. The engine waits for
        the end of the step: nothing is forgotten meanwhile."""
        if self.flags[(FLAGS_HEADER + FLAGS_STRIDE * layer) // 8] >= self.step:
            return True
        # Before the flag: a reader that sees the step sees its zeros.
        step = self.flags[(self.replays + FLAGS_STRIDE * LAYERS) // 8]
        return step >= self.step and self.flags[(self.replays + FLAGS_STRIDE * layer) // 8] != 0

    def watch(self) -> tuple[list[float], float]:
        """Microseconds from each layer's flag to its first bytes, and for how long this process did
        not look at most."""
        seen, lag, waiting, layer = {}, [0.0] * LAYERS, list[int](), 0
        last = time.perf_counter()
        end, away = last + TIMEOUT_S, 0.0
        while layer < LAYERS or waiting:
            now = time.perf_counter()
            away, last = max(away, now - last), now
            if layer < LAYERS and self.complete(layer):
                seen[layer] = now
                waiting.append(layer)
                layer += 1
            for i in waiting:
                if self.came(i):
                    lag[i] = 1e6 * (time.perf_counter() - seen[i])
                    waiting.remove(i)
                    break
            if now > end:
                raise SystemExit(
                    f"e2e: {LAYERS - layer} flags and the bytes of {len(waiting)} layers are not "
                    f"there after {TIMEOUT_S} s"
                )
        return lag, 1e6 * away


class Rig:
    def __init__(self, args: argparse.Namespace, sets: list[str]) -> None:
        self.args, self.sets = args, sets
        self.dir = tempfile.TemporaryDirectory(prefix="kvs-")
        self.n = 0
        self.sidecars = [self.sidecar("a"), self.sidecar("b")]
        self.engines()

    def engines(self) -> None:
        """Both at once: most of a start is loading torch."""
        self.p, self.d = self.engine(0), self.engine(1)
        self.p.get()
        self.d.get()
        self.peer = self.p.call("endpoint")

    def sidecar(self, name: str) -> Sidecar:
        self.n += 1
        return Sidecar(self.args.kvspray, pathlib.Path(self.dir.name), f"{name}{self.n}", self.sets)

    def engine(self, side: int) -> Remote:
        return Remote(Engine, self.args.gpus[side], self.sidecars[side].socket)

    def close(self) -> None:
        for e in (self.p, self.d):
            e.stop()
        for s in self.sidecars:
            s.stop()
        self.dir.cleanup()


def pick(r: random.Random, n: int) -> list[int]:
    """Without the blocks that graphs use beside the request."""
    return r.sample(range(BLOCKS - max(SIZES)), n)


def content(rig: Rig, r: random.Random, rounds: int) -> dict[str, Any]:
    """One prefill at a time, its destination waiting before it, or coming after."""
    moved = wrong = beside = 0
    transports: dict[str, int] = {}
    for i in range(rounds):
        n = r.choice([1, 3, *SIZES, r.randint(1, max(SIZES))])
        src, dst, xfer, seed = pick(r, n), pick(r, n), os.urandom(16), r.randint(1, 1 << 30)
        rig.d.call("canary")
        first = r.random() < 0.5
        if first:
            e = rig.d.call("expect", xfer, rig.peer, dst)
        s = rig.p.call(
            "send", xfer, seed, src, r.random() < 0.3, r.choice([1, 4]), r.choice([1, 1, 3])
        )
        if not first:
            e = rig.d.call("expect", xfer, rig.peer, dst)
        done = rig.d.call("finish", e["lease"])
        rig.p.call("finish", s["lease"])
        if done["status"] != "OK":
            raise SystemExit(
                f"e2e: round {i}: {done}\n{rig.sidecars[0].tail()}\n{rig.sidecars[1].tail()}"
            )
        wrong += rig.d.call("check", seed, dst)
        beside += rig.d.call("around", dst)
        moved += n * LAYERS
        transports[done["transport"]] = transports.get(done["transport"], 0) + 1
    return {"blocks": moved, "wrong": wrong, "beside": beside, "transports": transports}


LEASE_S = 60.0  # of offers that lie ready for a whole row of transfers
# Transfers in a row, and how many are open at a time; over tcp fewer, as a tenth of the bytes moves
# in as long.
STEADY = {"shm": ((48, 2), (48, 3), (192, 3)), "tcp": ((12, 2), (12, 3))}


def rate(rig: Rig, r: random.Random, repeat: int = 6, n: int = BLOCKS // 2) -> dict[str, Any]:
    got = []
    for i in range(repeat):
        src, dst, xfer, seed = pick(r, n), pick(r, n), os.urandom(16), r.randint(1, 1 << 30)
        lease = rig.p.call("offer", xfer, seed, src)
        e = rig.d.call("expect", xfer, rig.peer, dst)
        done = rig.d.call("finish", e["lease"])
        rig.p.call("finish", lease)
        if done["status"] != "OK" or (i == 0 and rig.d.call("check", seed, dst)):
            raise SystemExit(f"e2e: rate: {done}, or content differs\n{rig.sidecars[1].tail()}")
        got.append(n * LAYERS * PAGE / (done["at"] - e["at"]) / 1e9)
    return {"transport": done["transport"], "GB": n * LAYERS * PAGE / 1e9,
        "gb_per_s": round(statistics.median(got[1:]), 1), "all": [round(g, 1) for g in got],
        "steady": [steady(rig, r, count, ahead) for count,
        ahead in STEADY[done["transport"]]]}  # fmt: skip


def steady(
    rig: Rig, r: random.Random, count: int, ahead: int, repeat: int = 5, n: int = BLOCKS // 4
) -> dict[str, Any]:
    """Transfers without a pause: the next one is open before the last one ends, as between a busy
    prefill and its decode."""
    tables = 3  # of each side; a sink is written anew once its last transfer is over
    srcs, dsts = pick(r, tables * n), pick(r, tables * n)
    sources, sinks = ([all_[i * n :][:n] for i in range(tables)] for all_ in (srcs, dsts))
    seeds = [r.randint(1, 1 << 30) for _ in sources]
    for seed, blocks in zip(seeds, sources, strict=True):
        # Writes the content, which stays.
        rig.p.call("settle", [rig.p.call("offer", os.urandom(16), seed, blocks)])
    got = []
    for _ in range(repeat + 1):
        xfers = [os.urandom(16) for _ in range(count)]
        leases = [rig.p.call("again", [x], sources[i % tables])[0] for i, x in enumerate(xfers)]
        got.append(round(rig.d.call("stream", xfers, rig.peer, sinks, ahead), 1))
        rig.p.call("settle", leases)
    if wrong := sum(
        rig.d.call("check", seed, blocks) for seed, blocks in zip(seeds, sinks, strict=True)
    ):
        raise SystemExit(f"e2e: steady: {wrong} blocks differ")
    return {
        "GB": n * LAYERS * PAGE / 1e9,
        "in_a_row": count,
        "open": ahead,
        "gb_per_s": statistics.median(got[1:]),
        "all": got,
    }


def layers(rig: Rig, r: random.Random, work: int, n: int, repeat: int = 12) -> dict[str, Any]:
    layer_us = rig.p.call("prepare", n, work)
    lag = []
    for _ in range(repeat):
        src, dst, xfer, seed = pick(r, n), pick(r, n), os.urandom(16), r.randint(1, 1 << 30)
        e = rig.d.call("expect", xfer, rig.peer, dst)
        rig.d.start("finish", e["lease"])
        s = rig.p.call("send", xfer, seed, src, False, work)
        done = rig.d.get()
        rig.p.call("finish", s["lease"])
        if done["status"] != "OK" or rig.d.call("check", seed, dst):
            raise SystemExit(f"e2e: layers: {done}, or content differs")
        lag.append(1e6 * (done["at"] - s["end"]))
    lag = sorted(lag[2:])
    return {
        "transport": done["transport"],
        "blocks": n,
        "layer_us": round(layer_us, 1),
        "layer_bytes": n * PAGE,
        "after_forward_p50_us": round(statistics.median(lag)),
        "after_forward_max_us": round(lag[-1]),
    }


def first(
    rig: Rig,
    r: random.Random,
    rows: int,
    work: int,
    ahead: bool,
    n: int = 4,
    pool: int = 32,
    warm: int = 20,
    repeat: int = 30,
) -> dict[str, Any]:
    """`n` blocks a layer, so that what is moved is small and what is measured is how soon. They are
    of a few, whose pages all have touched before, as in a cache that has been used for a while."""
    rig.p.call("prepare", OTHERS, work, rows)
    layer_us = rig.p.call("prepare", SIZES[0], work, rows)
    observer = Remote(Observer, rig.p.call("mapped")[0], rig.d.call("mapped")[1])
    observer.get()
    got: list[list[float]] = []
    gaps = []
    for i in range(warm + repeat):
        src, dst, xfer, seed = (
            pick(r, n),
            r.sample(range(pool), n),
            os.urandom(16),
            r.randint(1, 1 << 30),
        )
        rig.d.call("refill", dst)
        e = rig.d.call("expect", xfer, rig.peer, dst)
        observer.call("arm", rig.p.call("steps") + 1 + ahead, dst)
        observer.start("watch")
        s = rig.p.call("send", xfer, seed, src, False, work, 1, rows, ahead)
        done = rig.d.call("finish", e["lease"])
        rig.p.call("finish", s["lease"])
        lag, gap = observer.get()
        if done["status"] != "OK" or rig.d.call("check", seed, dst):
            raise SystemExit(f"e2e: first: {done}, or content differs")
        if i >= warm:
            got.append(lag)
            gaps.append(gap)
    observer.stop()
    lags = sorted(us for lag in got for us in lag)
    by_layer = [round(statistics.median(lag[i] for lag in got)) for i in range(LAYERS)]
    at = {
        f"p{q}_us": round(lags[min(len(lags) - 1, len(lags) * q // 100)], 1)
        for q in (10, 50, 90, 99)
    }
    return {"layer_us": round(layer_us, 1), "kernel_us": round(rig.p.call("kernel", rows), 1),
        "layer_bytes": n * PAGE, "flags": len(lags), **at, "max_us": round(lags[-1], 1),
        "layer_p50_us": by_layer, "worst_of_each": [[lag.index(max(lag)), round(max(lag))]
        for lag in got], "observer_away_us": [round(gap) for gap in gaps],
        "transport": done["transport"]}  # fmt: skip


def executors(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> dict[str, dict[str, str]]:
    """What each executor did on each way between two looks at a sidecar: calls, bytes and the rate
    that is believed."""
    was = {(w["from"], w["to"], e["executor"]): e for w in before for e in w["executors"]}
    out: dict[str, dict[str, str]] = {}
    for w in after:
        for e in w["executors"]:
            old = was.get((w["from"], w["to"], e["executor"]), {"calls": 0, "bytes": 0})
            if calls := e["calls"] - old["calls"]:
                rate = e["bytes_per_second"] / 1e9
                out.setdefault(f"{w['from']} to {w['to']}", {})[e["executor"]] = (
                    f"{calls} calls, {(e['bytes'] - old['bytes']) / 1e9:.2f} GB, {rate:.1f} GB/s"
                )
    return out


def slow(
    rig: Rig,
    r: random.Random,
    pairs: int,
    works: list[int],
    paces: list[float],
    seconds: float = 0.25,
    n: int = 512,
) -> list[dict[str, Any]]:
    out = []
    receives = rig.args.gpus[0] == HOST  # the busy engine
    engine = rig.d if receives else rig.p

    def blocks(n: int) -> list[int]:
        """That the graphs do not write."""
        return [b for b in pick(r, n + max(SIZES)) if b >= max(SIZES)][:n]

    # One prompt.
    src, seed, wrong = blocks(n), r.randint(1, 1 << 30), 0
    rig.p.call("settle", [rig.p.call("offer", os.urandom(16), seed, src)])
    for work in works:
        layer_us = engine.call("prepare", 128, work)
        span = max(seconds, STEPS * LAYERS * layer_us / 1e6)
        for pace in paces:
            idle, loaded, rates = [], [], []
            before = [s.state()["gpu_executors"] for s in rig.sidecars]
            for _ in range(pairs):
                idle.append(engine.call("busy", 128, work, span))
                both = blocks(2 * n)
                dst = [both[:n], both[n:]]
                rig.d.call("refill", both)
                xfers = [
                    os.urandom(16)
                    for _ in range(
                        round(span * pace * 1e9 / (len(src) * LAYERS * PAGE)) + 4 if pace else 200
                    )
                ]
                leases = rig.p.call("again", xfers, src)
                if receives:
                    us, got = rig.d.call(
                        "busy_pull", 128, work, span, (xfers, rig.peer, dst, span, pace)
                    )
                else:
                    rig.p.start("busy", 128, work, span)
                    got = rig.d.call("pull", xfers, rig.peer, dst, span, pace)
                    us = rig.p.get()
                loaded.append(us)
                rates.append(got["gb_per_s"])
                rig.p.call("settle", leases)
                wrong += sum(rig.d.call("check", seed, table) for table in dst[: got["tables"]])
            lost = sorted(100 * (b / a - 1) for a, b in zip(idle, loaded, strict=True))
            out.append({"layer_us": round(layer_us, 1), "asked_gb_per_s": pace or "all",
                "gb_per_s": round(statistics.median(rates), 1), "pairs": pairs,
                "slower_percent": round(statistics.median(lost), 1),
                "p10": round(lost[len(lost) // 10], 1), "p90": round(lost[-1 - len(lost) // 10],
                1), "all": [round(x, 1) for x in lost], "wrong": wrong,
                "executors": [executors(a, s.state()["gpu_executors"]) for a,
                s in zip(before, rig.sidecars, strict=True)]})  # fmt: skip
            say(f"slow: {out[-1]}")
    return out


def kill(
    args: argparse.Namespace, path: str, r: random.Random, sets: list[str], rounds: int
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    n = 4096
    for victim in args.victim or VICTIMS:
        ends: dict[str, int] = {}
        late = wrong = 0
        rig = Rig(args, sets)
        for _ in range(rounds):
            src, dst, xfer, seed = pick(r, n), pick(r, n), os.urandom(16), r.randint(1, 1 << 30)
            rig.p.call("offer", xfer, seed, src)
            e = rig.d.call("expect", xfer, rig.peer, dst)
            # The moment of the death is what is drawn: there is nothing to wait for.
            time.sleep(r.random() * args.kill_ms / 1000)
            if victim == "source engine":
                rig.p.kill()
            elif victim == "destination engine":
                rig.d.kill()
            else:
                rig.sidecars[victim == "destination sidecar"].process.send_signal(signal.SIGKILL)
            if victim != "destination engine":
                done = rig.d.call("finish", e["lease"])
                ends[done["status"]] = ends.get(done["status"], 0) + 1
                if done["status"] == "OK":
                    wrong += rig.d.call("check", seed, dst)
                # The engine's next request is in these blocks now.
                rig.d.call("refill", dst)
                time.sleep(0.3)  # for a late write that must not come
                late += rig.d.call("refilled", dst)
            else:
                ends["killed"] = ends.get("killed", 0) + 1
            # A life after it: what is left serves the newcomer.
            if victim == "source engine":
                rig.p = rig.engine(0)
                rig.p.get()
            elif victim == "destination engine":
                rig.d = rig.engine(1)
                rig.d.get()
            else:
                side = int(victim == "destination sidecar")
                old = rig.sidecars[side]
                old.process.wait()
                for e2 in (rig.p, rig.d):
                    e2.stop()
                rig.sidecars[side] = rig.sidecar("ab"[side])
                rig.engines()
            rig.peer = rig.p.call("endpoint")
        after = content(rig, r, 2)
        out[victim] = {"ends": ends, "late_writes": late, "wrong": wrong, "after": after}
        rig.close()
        say(f"kill -9 {victim}: {out[victim]}")
    return out


def measured(
    args: argparse.Namespace,
    name: str,
    sets: list[str],
    parts: list[str],
    r: random.Random,
    report: dict[str, Any],
) -> list[str]:
    """All parts but kill, with one rig."""
    problems: list[str] = []
    rig = Rig(args, sets)
    turn = open(args.turn or os.devnull, "w")
    fcntl.flock(turn, fcntl.LOCK_EX if args.turn else fcntl.LOCK_SH)
    try:
        if "content" in parts:
            got = report[f"content_{name}"] = content(rig, r, args.rounds)
            say(f"content over {name}: {got}")
            if got["wrong"] or got["beside"] or set(got["transports"]) != {name}:
                problems.append(f"content over {name}: {got}")
            got = rig.p.call("bad")
            report[f"bad_{name}"] = got
            problems += got
        if "rate" in parts:
            report[f"rate_{name}"] = rate(rig, r)
            say(f"rate over {name}: {report[f'rate_{name}']}")
        if "slow" in parts:
            got = report[f"slow_{name}"] = slow(rig, r, args.pairs, args.works, args.paces)
            problems += [f"slow over {name}: {k}" for k in got if k["wrong"]]
        if "layers" in parts:
            report[f"layers_{name}"] = [layers(rig, r, work, n) for n, work in args.layers]
            say(f"layers over {name}: {report[f'layers_{name}']}")
        if "first" in parts:
            report[f"first_{name}"] = {
                f"{what}, {how}": first(rig, r, rows, work, ahead)
                for what, rows, work in FIRST
                for how, ahead in AHEAD
            }
            say(f"first over {name}: {report[f'first_{name}']}")
    except SystemExit:
        for s in rig.sidecars:
            say(s.tail())
        raise
    finally:
        report[f"log_{name}"] = [line for s in rig.sidecars for line in s.notable(8)]
        rig.close()
        turn.close()
    return problems


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--kvspray", default=".build/gpu/kvspray")
    ap.add_argument(
        "--gpus",
        default="0,0",
        type=lambda s: s.split(","),
        help="of the two engines; host for a cache in host memory",
    )
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--kills", type=int, default=3)
    ap.add_argument("--pairs", type=int, default=30, help="of part slow")
    ap.add_argument(
        "--works",
        default="4,36,560",
        type=lambda s: [int(x) for x in s.split(",")],
        help="of part slow: kernels per layer, ...",
    )
    ap.add_argument(
        "--paces",
        default="15,0",
        type=lambda s: [float(x) for x in s.split(",")],
        help="of part slow: GB/s, 0 for all there is, ...",
    )
    ap.add_argument("--kill-ms", type=float, default=20)
    ap.add_argument("--layers", default="128:24,128:96,128:200,256:200",
        help="blocks:kernels per layer, ...", type=lambda s: [tuple(int(x) for x in w.split(":"))
        for w in s.split(",")])  # fmt: skip
    ap.add_argument("--victim", action="append", default=[], choices=VICTIMS, help="of part kill")
    ap.add_argument(
        "--turn",
        type=pathlib.Path,
        help="measure only with this file locked, so that several may start at once",
    )
    ap.add_argument("--path", action="append", default=[])
    ap.add_argument("--part", action="append", default=[])
    ap.add_argument("--set", action="append", default=[])
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    if HOST == args.gpus[0] and args.part != ["slow"]:
        raise SystemExit(
            "e2e: --gpus: the first engine computes, its cache is on a GPU; host is for the second "
            "one, but in part slow"
        )
    parts = args.part or [
        "content",
        "rate",
        "slow",
        "layers",
        "kill",
        *(["first"] if HOST in args.gpus else []),
    ]
    if "first" in parts and HOST not in args.gpus:
        raise SystemExit(
            "e2e: --part first: needs --gpus N,host: what arrives has to be seen without asking a "
            "GPU"
        )
    r = random.Random(1)
    report: dict[str, Any] = {"machine": machine(args.kvspray)}
    report |= {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": args.gpus,
        "torch": torch.__version__,
        "layers": LAYERS,
        "page": PAGE,
    }
    problems = []
    paths = {
        "shm": ["transports.order=shm"],
        "tcp": [
            "transports.order=tcp",
            "transports.tcp.connections=8",
            "transports.tcp.integrity=off",
            "transfer.max_slices=256",
        ],
    }
    for name in args.path or paths:
        sets = paths[name] + args.set
        if set(parts) != {"kill"}:
            problems += measured(args, name, sets, parts, r, report)
        if "kill" in parts:
            got = report[f"kill_{name}"] = kill(args, name, r, sets, args.kills)
            problems += [
                f"kill over {name}, {v}: {k}"
                for v, k in got.items()
                if k["late_writes"] or k["wrong"] or k["after"]["wrong"]
            ]
    report["problems"] = problems
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
