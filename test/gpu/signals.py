#!/usr/bin/env python3
"""Signals by the GPU, on a GPU: needs an NVIDIA driver, torch and the package kvspray, and nothing
else.

A model of 32 layers writes a page of each layer's cache per step. It runs eagerly and as full CUDA
graphs of several batch sizes that share one board. A second process, which has the cache by CUDA
IPC and the flags by their memfd, as a sidecar has, follows the flags, copies each page when its
flag arrives, and compares it with what that step must have written:

    seen     every layer of every step, eager and replayed, in any order of graphs; no page wrong,
             no flag ahead of its step; flags of replays are read as a sidecar reads them: the step
             first, then the layer's
    tight    the same with slow layers and an engine that waits for the other process, which is then
             at most one layer behind
    early    tight, with the signal placed before the layer: the comparison has to notice, or it
             proves nothing
    wait     streams wait for load flags, eagerly and inside a graph; the other process sets them
             one by one; none goes on early
    cleared  replays whose last node sets a flag, and the next step right behind: no flag of the one
             is left in the other
    cost     added time per layer of a replayed graph, with and without signals alternated

usage: signals.py [--steps N] [--rounds N] [--cost-only] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import pathlib
import random
import statistics
import sys
import time
from typing import Any

import torch
import torch.multiprocessing as mp

import kvspray
from kvspray.gpu import GpuSignals
from kvspray.machine import machine

LAYERS = 32
PAGE = 16384  # int64 values of one page: 128 KiB
PAGES = 64  # steps whose pages are there at the same time
AHEAD = PAGES // 2  # steps that the engine may be ahead of the watcher
BATCHES = (64, 512, 2048)
HIDDEN = 4096
COST_HIDDEN = (2048, 4096)
SLOW = 8  # times the kernels of a layer, so that a look takes much less than a layer
HEADER, STRIDE = 128, 64
REPLAYS_AT = 72  # in the header: the offset of the replay flags
TIMEOUT_S = 20.0


class Flags:
    """The board's flags, as another process sees them."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(fd, 0)
        os.close(fd)
        self.words = memoryview(self.map).cast("Q")
        self.replays = self.words[REPLAYS_AT // 8]

    def layer(self, i: int) -> int:
        """The last step whose layer i is known to be complete. Flags of graphs are cleared as the
        next step begins, but for the end of a step."""
        value = self.words[(HEADER + STRIDE * i) // 8]
        if i < LAYERS:
            # Before the flag: a reader that sees the step sees its zeros.
            step = self.words[(self.replays + STRIDE * LAYERS) // 8]
            if step > value and self.replayed(i):
                return step
        return value

    def replayed(self, i: int) -> bool:
        return bool(self.words[(self.replays + STRIDE * i) // 8])

    def set_load(self, i: int, value: int) -> None:
        self.words[(HEADER + STRIDE * (LAYERS + 1 + i)) // 8] = value


def flags_path() -> str:
    for fd in pathlib.Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:kvspray-flags"):
                return f"/proc/{os.getpid()}/fd/{fd.name}"
        except OSError:
            continue
    raise SystemExit("signals: this process has no flags memfd")


def expected(step: int, layer: int) -> int:
    return step * 1024 + layer


def watch(
    path: str,
    cache: torch.Tensor,
    progress: Any,
    launched: Any,
    looks: Any,
    jobs: Any,
    results: Any,
) -> None:
    """The other process."""
    flags = Flags(path)
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream(priority=-5)
    page = torch.empty(PAGE, dtype=torch.int64, pin_memory=True)
    results.put("ready")
    for job in iter(jobs.get, None):
        kind, first, last = job
        if kind == "load":
            end = time.monotonic() + TIMEOUT_S
            for layer in range(first, last):
                # A whole look began and ended since the flag before: it saw the layers that may
                # have run, and would have seen others.
                seen = looks.value
                while looks.value < seen + 2 and time.monotonic() < end:
                    pass
                # Reported before it is done: a stream that ran early would have been seen.
                progress.value = layer + 1
                flags.set_load(layer, 1)
            results.put(None)
            continue
        wrong = ahead = seen = 0
        end = time.monotonic() + TIMEOUT_S
        for step in range(first, last):
            for layer in range(LAYERS):
                while (value := flags.layer(layer)) < step:
                    if time.monotonic() > end:
                        results.put(
                            {
                                "error": (
                                    f"step {step}, layer {layer}: the flag is {value} after "
                                    f"{TIMEOUT_S} s"
                                )
                            }
                        )
                        return
                ahead += value > launched.value
                with torch.cuda.stream(stream):
                    page.copy_(cache[step % PAGES, layer], non_blocking=True)
                stream.synchronize()
                wrong += int((page != expected(step, layer)).any())
                seen += 1
            while flags.layer(LAYERS) < step:
                if time.monotonic() > end:
                    results.put({"error": f"step {step}: no end of the step"})
                    return
            progress.value = step
        results.put({"pages": seen, "wrong": wrong, "ahead": ahead})


class Model:
    """Layers that compute for a while and then write one page each. Step and page are in memory, as
    an engine's block table is."""

    def __init__(self, cache: torch.Tensor, hidden: int = HIDDEN) -> None:
        self.cache = cache
        self.weight = torch.randn(hidden, hidden, device="cuda", dtype=torch.bfloat16) / 64
        self.step = torch.zeros(1, device="cuda", dtype=torch.int64)
        self.slot = torch.zeros(1, device="cuda", dtype=torch.int64)
        self.inputs = {
            b: torch.randn(b, hidden, device="cuda", dtype=torch.bfloat16) for b in BATCHES
        }
        self.kernels = {b: max(1, 2048 // b // 4) for b in BATCHES}

    def forward(
        self,
        batch: int,
        gpu: GpuSignals | None,
        early: bool = False,
        waits: bool = False,
        slow: int = 1,
    ) -> None:
        x = self.inputs[batch]
        stream = torch.cuda.current_stream().cuda_stream
        for layer in range(LAYERS):
            if waits:
                assert gpu is not None and gpu.wait_layer(layer, 1, stream)
            if early and gpu is not None:
                gpu.signal_layer(layer, stream)
            for _ in range(self.kernels[batch] * slow):
                x = torch.nn.functional.linear(x, self.weight)
            self.cache[:, layer].index_copy_(
                0, self.slot, (self.step * 1024 + layer).expand(1, PAGE)
            )
            if not early and gpu is not None and not waits:
                gpu.signal_layer(layer, stream)
        if gpu is not None and not waits:
            gpu.signal_step(stream)

    def at(self, step: int) -> None:
        self.step.fill_(step)
        self.slot.fill_(step % PAGES)

    def capture(
        self, batch: int, gpu: GpuSignals | None, pool: Any = None, **how: Any
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.forward(batch, gpu, **how)
        return graph


class Run:
    def __init__(self) -> None:
        self.client = kvspray.WorkerClient(
            "/nonexistent/kvspray.sock",
            engine=kvspray.EngineInfo("signals", id="gpu"),
            layers=LAYERS,
        )
        region = self.client.alloc_region(4096)
        # Starts the background thread, which is the watchdog's.
        self.client.register([region], layout(4096))
        self.cache = torch.zeros(PAGES, LAYERS, PAGE, device="cuda", dtype=torch.int64)
        self.model = Model(self.cache)
        for b in BATCHES:
            self.model.forward(b, None)
        torch.cuda.synchronize()
        self.gpu = GpuSignals(self.client)
        self.graphs = {b: self.model.capture(b, self.gpu) for b in BATCHES}
        self.step = 0
        path = flags_path()
        self.flags = Flags(path)
        ctx = mp.get_context("spawn")
        self.progress, self.launched = ctx.Value("q", 0, lock=False), ctx.Value("q", 0, lock=False)
        self.looks = ctx.Value("q", 0, lock=False)
        self.jobs, self.results = ctx.Queue(), ctx.Queue()
        self.other = ctx.Process(
            target=watch,
            args=(
                path,
                self.cache,
                self.progress,
                self.launched,
                self.looks,
                self.jobs,
                self.results,
            ),
            daemon=True,
        )
        self.other.start()
        if self.results.get(timeout=TIMEOUT_S) != "ready":
            raise SystemExit("signals: the other process did not start")

    def follow(self, steps: int, how: Any, ahead: int = AHEAD) -> dict[str, Any]:
        """Runs that many steps, how(step) each, while the other process follows, that many steps
        behind at most."""
        first = self.step + 1
        self.progress.value = self.step
        self.jobs.put(("watch", first, first + steps))
        stream = torch.cuda.current_stream().cuda_stream
        for step in range(first, first + steps):
            while self.progress.value < step - ahead and self.results.empty():
                pass
            self.launched.value = step
            self.model.at(step)
            if not self.gpu.step(step, stream):
                raise SystemExit("signals: step refused")
            how(step)
        self.step = first + steps - 1
        out = self.results.get(timeout=TIMEOUT_S + 10)
        torch.cuda.synchronize()
        return out

    def close(self) -> None:
        self.jobs.put(None)
        self.other.join(10)
        self.other.kill()
        self.gpu.close()
        self.client.close()


def cleared(run: Run, rounds: int = 20_000) -> dict[str, int]:
    """A write that came behind the zeros of the next step would stay, and be taken for a layer of
    it."""
    stream = torch.cuda.current_stream().cuda_stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.model.step.add_(0)  # a graph begins with a kernel
        side = torch.cuda.current_stream().cuda_stream
        for layer in range(LAYERS):
            run.gpu.signal_layer(layer, side)
    complete = left = 0
    for i in range(rounds):
        for _ in range(1 + i % 4):
            graph.replay()
            run.step += 1
            run.gpu.step(run.step, stream)
        torch.cuda.synchronize()
        left += any(run.flags.replayed(layer) for layer in range(LAYERS))
        if i % 100 == 0:
            graph.replay()
            torch.cuda.synchronize()
            complete += all(run.flags.replayed(layer) for layer in range(LAYERS))
            run.step += 1
            run.gpu.step(run.step, stream)
    return {"rounds": rounds, "left": left, "looked": rounds // 100, "complete": complete}


def waiting(run: Run) -> dict[str, Any]:
    """A stream, and a graph, wait for load flags that the other process sets one by one, each after
    a look at what has run."""
    out: dict[str, Any] = {}
    batch = BATCHES[0]
    graph = run.model.capture(batch, run.gpu, waits=True)
    side = torch.cuda.Stream(priority=-5)
    probe = torch.empty(LAYERS, dtype=torch.int64, pin_memory=True)

    def look() -> int:
        """How many layers have written their page."""
        with torch.cuda.stream(side):
            probe.copy_(run.cache[run.step % PAGES, :, 0], non_blocking=True)
        side.synchronize()
        return sum(int(probe[i]) == expected(run.step, i) for i in range(LAYERS))

    look()  # what it needs is loaded now: loading waits for the whole GPU
    for kind in ("eager", "graph"):
        clear_loads(run.client)
        run.step += 1
        run.model.at(run.step)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        if kind == "graph":
            graph.replay()
        else:
            run.model.forward(batch, run.gpu, waits=True)
        done.record()
        run.progress.value = 0
        run.jobs.put(("load", 0, LAYERS))
        early = 0
        # Looks that saw some layers done and others not: the stream really went on layer by layer.
        partial = 0
        end = time.monotonic() + 20
        while not done.query() and time.monotonic() < end:
            ran = look()
            allowed = run.progress.value  # read after the look: it can only have grown
            early += ran > allowed
            partial += 0 < ran < LAYERS
            run.looks.value += 1
        hung = not done.query()
        run.results.get(timeout=30)
        out[kind] = {"went_on_early": early, "partial_looks": partial, "hung": hung}
    return out


def clear_loads(client: kvspray.WorkerClient) -> None:
    """In a graph the value of a wait is baked in."""
    base, _ = client.flags
    loads = ctypes.c_uint64.from_address(base + 40).value  # the header's load_flags
    for layer in range(LAYERS):
        ctypes.c_uint64.from_address(base + loads + 64 * layer).value = 0


def cost(run: Run, rounds: int) -> list[dict[str, Any]]:
    """Graphs in one memory pool, so that all of them use the same addresses: with other addresses
    the caches alone make a difference of microseconds. `control` is a second graph without signals.
    The launch that sets the step before a replay counts as a part of the signals."""
    out = []
    stream = torch.cuda.current_stream().cuda_stream
    models = {hidden: Model(run.cache, hidden) for hidden in COST_HIDDEN}
    for hidden, batch in ((h, b) for h in COST_HIDDEN for b in BATCHES):
        model = models[hidden]
        model.forward(batch, None)  # libraries load now
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        gpus = {"plain": None, "signals": run.gpu, "control": None}
        graphs = {kind: model.capture(batch, gpu, pool=pool) for kind, gpu in gpus.items()}

        def timed(
            kind: str,
            replays: int = 40,
            graphs: dict[str, Any] = graphs,
            gpus: dict[str, Any] = gpus,
        ) -> float:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(replays):
                run.step += 1
                gpu = gpus[kind]
                if gpu is not None:
                    gpu.step(run.step, stream)
                graphs[kind].replay()
            b.record()
            b.synchronize()
            return 1e3 * a.elapsed_time(b) / replays / LAYERS

        for kind in graphs:
            timed(kind)
        got: dict[str, list[float]] = {kind: [] for kind in graphs}
        for i in range(rounds):
            order = list(graphs)
            for kind in order[i % 3 :] + order[: i % 3]:
                got[kind].append(timed(kind))
        layer_us = statistics.median(got["plain"])
        row: dict[str, Any] = {
            "hidden": hidden,
            "batch": batch,
            "kernels": model.kernels[batch] + 3,
            "layer_us": round(layer_us, 2),
            "rounds": rounds,
        }
        for kind in ("signals", "control"):
            added = sorted(x - y for x, y in zip(got[kind], got["plain"], strict=True))
            row[kind] = {
                "added_us": round(statistics.median(added), 3),
                "p10_us": round(added[len(added) // 10], 3), "p90_us": round(
                added[-1 - len(added) // 10], 3), "percent": round(
                100 * statistics.median(added) / layer_us, 2),
            }  # fmt: skip
        out.append(row)
    return out


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def layout(region_bytes: int) -> dict[str, Any]:
    """Of a page of host memory: what is registered has to be something, and the cache of this model
    is the GPU's."""
    layer = {
        "name": "l0",
        "index": 0,
        "region": 0,
        "base": 0,
        "block_stride": region_bytes,
        "page_bytes": region_bytes,
    }
    group = {
        "tokens_per_block": 16,
        "strategy": "packed_hnd",
        "params": {"heads": 1},
        "num_blocks": 1,
        "layers": [layer],
    }
    return {
        "model": "signals",
        "dtype": "bfloat16",
        "groups": [group],
        "identity": {"model": "signals"},
    }


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--rounds", type=int, default=24)
    ap.add_argument("--cost-only", action="store_true")
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    torch.cuda.set_device(0)
    run = Run()
    r = random.Random(1)
    report: dict[str, Any] = {"machine": machine(None)}
    report |= {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "layers": LAYERS,
    }

    if args.cost_only:
        print(json.dumps(cost(run, args.rounds), indent=1))
        run.close()
        return 0

    def mixed(step: int) -> None:
        batch = r.choice(BATCHES)
        if r.random() < 0.2:
            run.model.forward(batch, run.gpu)
        else:
            run.graphs[batch].replay()

    say("graphs are captured, the other process is there; every layer of every step is followed")
    report["seen"] = run.follow(args.steps, mixed)
    tight = run.model.capture(BATCHES[0], run.gpu, slow=SLOW)
    say(f"{report['seen']}; now slow layers")
    report["tight"] = run.follow(args.steps // 3, lambda step: tight.replay(), ahead=1)
    early = run.model.capture(BATCHES[0], run.gpu, slow=SLOW, early=True)
    say(f"{report['tight']}; now early signals")
    report["early"] = run.follow(20, lambda step: early.replay(), ahead=1)
    say(f"{report['early']}; now waits")
    report.update({"wait": waiting(run), "cleared": cleared(run)})
    say(f"{report['wait']}, {report['cleared']}; now the cost")
    report["cost"] = cost(run, args.rounds)
    run.close()

    problems = []
    for kind, steps in (("seen", args.steps), ("tight", args.steps // 3)):
        if report[kind] != {"pages": steps * LAYERS, "wrong": 0, "ahead": 0}:
            problems.append(f"{kind}: a flag was early, wrong or missing")
    if report["cleared"]["left"] or report["cleared"]["complete"] != report["cleared"]["looked"]:
        problems.append(
            "a step began with flags of the one before it, or a replay did not set them"
        )
    if report["early"].get("wrong", 0) < 20 * LAYERS // 2:
        problems.append("signals before the write were not noticed: the comparison proves nothing")
    for kind in ("eager", "graph"):
        w = report["wait"][kind]
        if w["went_on_early"] or w["hung"] or w["partial_looks"] < LAYERS // 2:
            problems.append(f"waits, {kind}: {w}")
    report["problems"] = problems
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
