#!/usr/bin/env python3
"""Pages from SGLang's host pool to the GPU: SGLang's own "kernel" and "direct" beside the sidecar's
copies, with SGLang's pools and its transfer engine. On a GPU host: unpack.py with pack.py's parts
own, deps and sgl.

speed    for each way and each number of tokens: until the engine's thread has its call back, until
         the first layer is there, until all are; the ways take turns, and every page is compared
beside   how much longer a computation takes while loads run
faults   the sidecar is killed, paused or stopped under loads for which more kernels wait than a
         stream takes, while other streams wait for them, too: each load ends, and every page is
         right

usage: sglang_loads.py [options]
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from unpacked import UNPACKED

sys.path.insert(1, str(UNPACKED / "deps"))
sys.path.insert(1, str(UNPACKED / "sgl"))

# isort: split
import cluster as rig
import torch

import kvspray
from kvspray_sglang import loads, plugin
from kvspray_sglang.link import Link

SGLANG = pathlib.Path(__file__).resolve().parents[2] / "sglang"
# (name, SGLang's --hicache-io-backend, --hicache-mem-layout)
WAYS = (
    ("kernel", "kernel", "layer_first"),
    ("kernel-page-first", "kernel", "page_first"),
    ("direct", "direct", "page_first_direct"),
    ("sidecar", "direct", "page_first_direct"),
)
PATTERN = 64 << 20  # bytes of random content, which repeats with another number added
WAIT_S = 60.0
KERNELS = 200  # for each layer, in faults: more than a stream takes in all
STREAMS = 64  # that wait, of both priorities, in faults: more than a GPU has queues for
FAULTS = ("killed", "killed", "paused", "killed", "killed", "stopped")
LIBRARIES = UNPACKED / "lib"  # that SGLang's kernels are linked with


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def prepare(gpu: bool) -> None:
    """SGLang's classes, in a process without an engine."""
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    from sglang.srt.mem_cache.pool_host import base, mha
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    for module in (base, mha):
        if hasattr(module, "host_memory_budget_bytes"):
            module.host_memory_budget_bytes = lambda asked=0, **_: 1 << 40
    names = ("tp", "pp", "attn_dcp", "attn_tp", "attn_dp", "attn_cp")
    get_parallel().override_permanently(
        dcp_enabled=False, **{f"{n}_{k}": int(k == "size") for n in names for k in ("size", "rank")}
    )
    if not gpu:
        sys.path.insert(0, str(SGLANG / "stand_ins"))
        import kvspray_cpu_rig

        kvspray_cpu_rig.install()
    plugin.is_backend = lambda: True
    plugin.install()
    HookRegistry.apply_hooks()


class Events:
    """Of each layer, as SGLang's LayerLoadingEvent has them."""

    def __init__(self, layers: int) -> None:
        from sglang.srt.mem_cache.l2_transfer import device_module

        self.all = [device_module.Event() for _ in range(layers)]

    def complete(self, layer: int) -> None:
        self.all[layer].record()


class Run:
    started: list[rig.Sidecar] = []

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.gpu = args, args.device == "cuda"
        self.problems: list[str] = []
        self.report: dict[str, Any] = {"layers": args.layers, "page": args.page, "rows": []}
        prepare(self.gpu)
        from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        self.run = pathlib.Path(tempfile.mkdtemp(prefix="kvs-"))
        # A line for each copy would cost what is measured.
        quiet = {"log": {"level": "warn"}, "trace": {"transfers": "", "block_hashes": ""}}
        self.sidecar = rig.Sidecar("l", self.run, quiet)
        self.started.append(self.sidecar)
        self.sidecar.start()
        self.size = max(args.sizes) + args.page
        self.device = MHATokenToKVPool(
            size=self.size, page_size=args.page, dtype=torch.bfloat16, layer_num=args.layers,
            device=args.device, enable_memory_saver=False, head_num=args.heads, head_dim=128,
            enable_alt_stream=False,
        )  # fmt: skip
        self.hosts: dict[str, Any] = {}
        self.engines = {io: L2TransferEngine(io) for _, io, _ in WAYS}
        self.ways = [w for w in WAYS if w[0] in args.ways.split(",")]
        for layout in dict.fromkeys(["page_first_direct", *(w[2] for w in self.ways)]):
            self.hosts[layout] = host = self.host(layout)
            say(f"the host pool of layout {layout} is filled; {host.can_use_jit=}")
        self.link = Link(self.sidecar.socket, "0", kvspray.Ranks(), loads._log)
        loads.MIN_BYTES = 0
        self.loads = loads.Loads(self.link, self.hosts["page_first_direct"])
        self.link.start()
        rig.wait_for("the device pool at the sidecar", lambda: self.loads.ready, 60)
        self.token_bytes = args.layers * 2 * args.heads * 128 * 2

    def host(self, layout: str) -> Any:
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        a = self.args
        info = self.device.get_device_pool_infos()[0].buffer_info
        host = MHATokenToKVPoolHost(
            info, 1.0, 0, a.page, layout, pin_memory=self.gpu, device="cpu",
            device_capacity_tokens=self.size, start_layer=0, end_layer=a.layers,
        )  # fmt: skip
        pattern = torch.randint(-(1 << 15), 1 << 15, (PATTERN // 2,), dtype=torch.int16)
        flat = host.kv_buffer.view(torch.int16).flatten()
        for n, at in enumerate(range(0, len(flat), len(pattern))):
            part = flat[at : at + len(pattern)]
            torch.add(pattern[: len(part)], n, out=part)
        return host

    def stop(self) -> None:
        loads.activate(None)
        closed = self.loads.close()
        if not closed or not self.link.close():
            self.problems.append("the session does not end")
        self.sidecar.stop()

    # -- loads

    def slots(self, tokens: int, seed: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages in runs, as SGLang's allocators give them: of the host, and of the device."""
        page, r = self.args.page, random.Random(str(seed))
        out = []
        for first in (0, 1):  # SGLang's allocators do not give the device's page 0
            there = list(range(first, self.size // page))
            runs = [there[i : i + 8] for i in range(0, len(there), 8)]
            r.shuffle(runs)
            mine = torch.tensor([p for run in runs for p in run][: tokens // page])
            out.append((mine[:, None] * page + torch.arange(page)).flatten())
        return out[0], out[1]

    def submit(self, way: Any, host: torch.Tensor, device: torch.Tensor) -> tuple[Events, Any]:
        from sglang.srt.mem_cache.l2_transfer import L2Transfer

        name, io, layout = way
        loads.activate(self.loads if name == "sidecar" else None)
        events = Events(self.args.layers)
        if io == "kernel":
            host, device = host.to(self.args.device), device.to(self.args.device)
        transfer = L2Transfer(self.hosts[layout], self.device, host, device)
        completion = self.engines[io].submit_host_to_device(
            [transfer], transfer_layer_id_max=self.args.layers, on_layer_done=events.complete
        )
        return events, completion

    def wait(self, event: Any, what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not event.query():
            if time.monotonic() > end:
                raise rig.Failed(f"{what}: not within {WAIT_S:g} s")

    def by_sidecar(self, before: int, n: int) -> None:
        """The sidecar has made n loads alone."""
        want = before + 2 * self.args.layers * n
        rig.wait_for("parts by the sidecar", lambda: self.loads.copied == want, 5, 0.001)
        if self.loads.fallbacks:
            raise rig.Failed(
                f"{self.loads.fallbacks} parts are not by the sidecar: {self.loads.ends}"
            )

    def compare(self, way: Any, host: torch.Tensor, device: torch.Tensor, what: str) -> None:
        """The pages by the shapes that SGLang documents, independent of what loads by them."""
        page, pool = self.args.page, self.hosts[way[2]]
        pages, slots = host[::page] // page, device.to(self.args.device)
        wrong = 0
        for layer in range(self.args.layers):
            both = ((pool.k_buffer, self.device.k_buffer), (pool.v_buffer, self.device.v_buffer))
            for h, d in both:
                if way[2] == "page_first_direct":
                    want = h[pages, layer].flatten(0, 1)
                elif way[2] == "page_first":
                    want = h[host, layer]
                else:
                    want = h[layer][host]
                got = d[layer][slots].view(torch.int16)
                wrong += not torch.equal(got, want.to(self.args.device).view(torch.int16))
        if wrong:
            self.problems.append(f"{what}: {wrong} of {2 * self.args.layers} parts differ")

    def clear(self) -> None:
        for b in (*self.device.k_buffer, *self.device.v_buffer):
            b.zero_()
        if self.gpu:
            torch.cuda.synchronize()

    def speed(self) -> None:
        for tokens in self.args.sizes:
            rows: dict[str, list[tuple[float, float, float]]] = {w[0]: [] for w in self.ways}
            for turn in range(self.args.rounds + 1):
                order = list(self.ways)
                random.Random(turn).shuffle(order)
                for way in order:
                    host, device = self.slots(tokens, (tokens, turn))
                    self.clear()
                    before = self.loads.copied
                    start = time.perf_counter()
                    events, completion = self.submit(way, host, device)
                    called = time.perf_counter()
                    self.wait(events.all[0], "the first layer")
                    first = time.perf_counter()
                    self.wait(completion.finish_event, "a load")
                    end = time.perf_counter()
                    self.by_sidecar(before, int(way[0] == "sidecar"))
                    if turn:  # the first one pins memory and compiles
                        rows[way[0]].append((called - start, first - start, end - start))
                    if turn < 2:
                        self.compare(way, host, device, f"{way[0]}, {tokens} tokens")
            for name, times in rows.items():
                call, first, all_ = (1e3 * statistics.median(x) for x in zip(*times, strict=True))
                best = min(t[2] for t in times)
                row = {
                    "way": name, "tokens": tokens, "call_ms": round(call, 2),
                    "first_ms": round(first, 2), "all_ms": round(all_, 2),
                    "gbs": round(tokens * self.token_bytes / all_ / 1e6, 1),
                    "best_gbs": round(tokens * self.token_bytes / best / 1e9, 1),
                }  # fmt: skip
                self.report["rows"].append(row)
                say(json.dumps(row))
        self.count()

    def count(self) -> None:
        say(f"{self.loads.copied} parts by the sidecar, {self.loads.fallbacks} not")
        self.report["copied"] = self.loads.copied
        if not self.loads.copied:
            self.problems.append("the sidecar loaded nothing")

    def beside(self) -> None:
        """Matrix products on one stream while loads follow each other on another."""
        if not self.gpu:
            return
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        stream, out = torch.cuda.Stream(), torch.empty_like(a)

        def compute(n: int) -> Callable[[], float]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record()
                for _ in range(n):
                    torch.mm(a, a, out=out)
                end.record()
            return lambda: (end.synchronize(), start.elapsed_time(end))[1]

        compute(20)()
        rows: dict[str, list[float]] = {w[0]: [] for w in self.ways}
        tokens = sorted(self.args.sizes)[-2:][0]
        for _ in range(self.args.rounds):
            for way in self.ways:
                alone = compute(400)()
                result = compute(400)
                moved, host_device = 0, self.slots(tokens, "beside")
                before = self.loads.copied
                while True:
                    _, completion = self.submit(way, *host_device)
                    self.wait(completion.finish_event, "a load beside a computation")
                    moved += 1
                    if stream.query():
                        break
                rows[way[0]].append((result() / alone, moved))
                self.by_sidecar(before, moved if way[0] == "sidecar" else 0)
        self.report["beside"] = []
        for name, got in rows.items():
            row = {
                "way": name, "tokens": tokens,
                "slower": round(statistics.median(r for r, _ in got), 3),
                "loads": statistics.median(n for _, n in got),
            }  # fmt: skip
            self.report["beside"].append(row)
            say(json.dumps(row))

    def hit(self, fault: str, after_s: float) -> subprocess.Popen[bytes]:
        (pid,) = self.sidecar.pids()
        then = {
            "killed": f"kill -KILL {pid}",
            "stopped": f"kill -STOP {pid}",
            "paused": f"kill -STOP {pid}; sleep 2; kill -CONT {pid}",
        }
        return subprocess.Popen(["sh", "-c", f"sleep {after_s:.4f}; {then[fault]}"])

    def faults(self) -> None:
        way = next(w for w in WAYS if w[0] == "sidecar")
        loads.STALL_S, loads.LEASE_S, loads.PAUSE_S = 1.0, 3.0, 0.0
        r = random.Random(7)
        stream = torch.cuda.Stream() if self.gpu else None
        little = torch.zeros(16, device=self.args.device)
        busy = [torch.cuda.Stream(priority=-(i % 2)) for i in range(STREAMS if self.gpu else 0)]
        missed = 0  # turns whose loads had ended when the sidecar did
        start = time.monotonic()
        _, completion = self.submit(way, *self.slots(max(self.args.sizes), "fault"))
        self.wait(completion.finish_event, "a load without a fault")
        usual = time.monotonic() - start
        for turn in range(self.args.kills):
            rig.wait_for("a session with the device pool", lambda: self.loads.ready, 60)
            host, device = self.slots(max(self.args.sizes), ("fault", turn))
            half = len(host) // self.args.page // 2 * self.args.page
            self.clear()
            fault, before = FAULTS[turn % len(FAULTS)], self.loads.fallbacks
            # Another process: on odd turns no other thread of this one runs.
            killer = self.hit(fault, r.uniform(0, usual))
            start = time.monotonic()
            for i in (slice(0, half), slice(half, None)):  # two loads follow each other
                events, completion = self.submit(way, host[i], device[i])
                for other in busy:
                    with torch.cuda.stream(other):
                        events.all[-1].wait(other)
                        little.add(1)
                if stream is not None:
                    with torch.cuda.stream(stream):
                        for e in events.all:
                            e.wait(stream)
                            for _ in range(KERNELS):
                                little.add_(1)
            queued = time.monotonic() - start
            if self.gpu and turn % 2:  # with Python's lock, as in a launch that keeps it
                event = ctypes.c_void_p(completion.finish_event.cuda_event)
                ctypes.PyDLL("libcuda.so.1").cuEventSynchronize(event)
            self.wait(completion.finish_event, f"turn {turn}")
            took = time.monotonic() - start
            if stream is not None:
                stream.synchronize()
            self.compare(way, host, device, f"faults: turn {turn}")
            killer.wait()
            if fault != "paused":
                self.sidecar.kill()
                self.sidecar.start()
            rig.wait_for("the ends of loads", lambda: not self.loads._loads, 30)
            again = self.loads.fallbacks - before
            missed += again == 0
            say(
                f"{fault}: {again} of {4 * self.args.layers} parts not "
                f"by it, {took:.2f} s, the thread had {queued:.2f} s of it"
            )
        self.report["faults"] = {
            "turns": self.args.kills, "missed": missed, "again": self.loads.fallbacks,
            "ends": dict(self.loads.ends),
        }  # fmt: skip
        say(json.dumps(self.report["faults"]))
        if missed > self.args.kills * 3 // 4 or self.loads.ends["REFUSED"]:
            self.problems.append(f"faults: not what was meant: {self.report['faults']}")


def main() -> None:
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--sizes", default="256,1024,4096,16384", help="tokens of loads")
    parser.add_argument("--ways", default=",".join(dict.fromkeys(w[0] for w in WAYS)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--parts", default="speed,beside,faults")
    parser.add_argument("--out", type=pathlib.Path, default=os.environ.get("OUT", "."))
    args = parser.parse_args()
    args.sizes = [int(n) for n in args.sizes.split(",")]
    args.out = pathlib.Path(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    problems: list[str] = []
    run = None
    try:
        run = Run(args)
        report, problems = run.report, run.problems
        for part in args.parts.split(","):
            getattr(run, part)()
        run.stop()
    except Exception as err:
        traceback.print_exc()
        problems.append(f"{type(err).__name__}: {str(err)[:3000]}")
        for p in Run.started:
            p.kill()
    report["problems"] = problems
    (args.out / "sglang-loads.json").write_text(json.dumps(report, indent=1) + "\n")
    for problem in problems[:10]:
        print(f"  PROBLEM {problem}", flush=True)
    print("RED" if problems else "GREEN", flush=True)
    os._exit(int(bool(problems)))  # a stream that waits for ever keeps no caller


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # as SGLang sets it
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    if LIBRARIES.exists() and str(LIBRARIES) not in libraries.split(os.pathsep):
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in (str(LIBRARIES), libraries) if p)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
