"""One small block between two sidecars: from the engine's request to the engine's completion.

    python -m kvspray.latency --kvspray ./bin/kvspray            # starts two sidecars on loopback,
                                                                 and stops them
    python -m kvspray.latency --source-socket A --dest-socket B  # uses two that run

Three orders are measured, each over many transfers of fresh random content that is compared at the
end of each:

    granted  the destination waits already; time from intent() to the completion that the
             destination's shim sees
    both     intent() and expect() back to back; time from intent() to the completion
    expect   the source waits already; time from expect() to the completion

It also times the calls that an engine makes in its step: signal_layer(), intent(), step(). Where
the time goes is what a second pair of sidecars records in its trace of another run of "both": queue
(until the other side's message is there), wire (until the last chunk has landed), commit (the
fence), and the rest, which is the rings on both sides and the wake-ups of sidecar and engine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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

from . import EngineInfo, Region, SchedulerClient, WorkerClient, identity, prefix_hash
from .machine import machine

BLOCKS = 64
TOKENS_PER_BLOCK = 16
START_TIMEOUT_S = 20.0
SETTLE_US = 300  # for the waiting side's message to reach the other sidecar before the clock starts


def _layout(block_bytes: int) -> dict[str, Any]:
    layer = {
        "name": "l0",
        "index": 0,
        "region": 0,
        "base": 0,
        "block_stride": block_bytes,
        "page_bytes": block_bytes,
    }
    group = {
        "tokens_per_block": TOKENS_PER_BLOCK, "strategy": "packed_hnd", "params": {"heads": 1},
        "num_blocks": BLOCKS, "layers": [layer],
    }  # fmt: skip
    pairs = identity(
        model_config="latency",
        weights="none",
        layers=1,
        head_size=block_bytes // TOKENS_PER_BLOCK // 4,
        groups="full",
        rope="",
        backoff=0,
        speculative="",
    )
    return {"model": "latency", "dtype": "bfloat16", "groups": [group], "identity": pairs}


class _Side:
    def __init__(self, name: str, socket: str, block_bytes: int, busy: bool) -> None:
        self.busy = busy
        self.client = WorkerClient(socket, engine=EngineInfo("latency", id=name), layers=1)
        self.region: Region = self.client.alloc_region(BLOCKS * block_bytes)
        self.client.register([self.region], _layout(block_bytes))
        if not self.client.wait_connected(START_TIMEOUT_S):
            raise SystemExit(
                f"kvspray.latency: {name}: no session at {socket}: {self.client.status().error}"
            )

    def drain(self, lease: int) -> None:
        """Takes completions until this lease's."""
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            for c in self.client.poll():
                if c.lease == lease:
                    if not c.ok:
                        raise SystemExit(
                            f"kvspray.latency: lease {lease} ended {c.status.name}: {c.reason}"
                        )
                    return
            if self.busy:
                if time.monotonic() < end:
                    continue
            elif self.client.wait(max(0.0, end - time.monotonic())):
                continue
            raise SystemExit(
                f"kvspray.latency: lease {lease} is not complete after {START_TIMEOUT_S} s: "
                f"{self.client.status()}"
            )


def _percentiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        "p50_us": round(statistics.median(values), 1),
        "p90_us": round(values[int(len(values) * 0.9)], 1),
        "p99_us": round(values[min(len(values) - 1, int(len(values) * 0.99))], 1),
        "min_us": round(values[0], 1),
    }


def _settle(us: int) -> None:
    """Spins: cores that fall into deep idle meanwhile add what it costs to wake them (some 100 us
    each in a virtual machine), which --settle-us 2000 shows."""
    end = time.perf_counter_ns() + 1000 * us
    while time.perf_counter_ns() < end:
        pass


def _transfers(
    source: _Side, dest: _Side, peer: str, order: str, count: int, block_bytes: int, settle_us: int
) -> dict[str, float]:
    took: list[float] = []
    src, dst = source.region.buffer, dest.region.buffer
    for i in range(count):
        block, into = i % BLOCKS, (i * 7 + 3) % BLOCKS
        content = os.urandom(block_bytes)
        src[block * block_bytes : (block + 1) * block_bytes] = content
        xfer, key = os.urandom(16), prefix_hash([i])
        a, b = source.client, dest.client
        intent = functools.partial(
            a.intent, xfer, key, TOKENS_PER_BLOCK, [[block]], ready=TOKENS_PER_BLOCK, held=True
        )
        expect = functools.partial(b.expect, xfer, key, peer, TOKENS_PER_BLOCK, 0, [[into]])
        if order == "granted":
            wanted = expect()
            _settle(settle_us)
            start = time.perf_counter_ns()
            sent = intent()
        elif order == "both":
            start = time.perf_counter_ns()
            sent, wanted = intent(), expect()
        else:
            sent = intent()
            _settle(settle_us)
            start = time.perf_counter_ns()
            wanted = expect()
        if not sent or not wanted:
            raise SystemExit(
                "kvspray.latency: a lease was refused: "
                f"{a.status().error or b.status().error or 'ring full'}"
            )
        dest.drain(wanted)
        took.append((time.perf_counter_ns() - start) / 1000)
        source.drain(sent)
        if dst[into * block_bytes : (into + 1) * block_bytes] != content:
            raise SystemExit(
                f"kvspray.latency: transfer {i}: the destination block differs from the source "
                "block"
            )
    return _percentiles(took)


def _calls(side: _Side, count: int) -> dict[str, float]:
    """Cost of the calls themselves, in microseconds, on the caller's thread."""
    client = side.client
    out: dict[str, float] = {}
    start = time.perf_counter_ns()
    for step in range(1, count + 1):
        client.signal_layer(0, step)
    out["signal_layer_us"] = (time.perf_counter_ns() - start) / count / 1000
    leases = []
    start = time.perf_counter_ns()
    for _ in range(min(count, 500)):
        leases.append(client.intent(os.urandom(16), b"h" * 32, 4096, [list(range(BLOCKS))]))
    out["intent_us"] = (time.perf_counter_ns() - start) / len(leases) / 1000
    start = time.perf_counter_ns()
    for lease in leases:
        count += 1
        client.step(count, [(lease, 4096, None)])
    out["step_us"] = (time.perf_counter_ns() - start) / len(leases) / 1000
    for lease in leases:
        if lease:
            client.cancel(lease)
    open_leases = {lease for lease in leases if lease}
    end = time.monotonic() + START_TIMEOUT_S
    while open_leases and time.monotonic() < end:
        client.wait(0.1)
        open_leases -= {c.lease for c in client.poll()}
    out["cancelled_open"] = len(open_leases)
    return {k: round(v, 3) for k, v in out.items()}


def _phases(args: argparse.Namespace) -> dict[str, float]:
    """Where the time of "both" goes, by the trace of the destination's sidecar; medians in
    microseconds."""
    sidecars = _Sidecars(args.kvspray, args.set, trace=True)
    try:
        with _joined(sidecars.sockets, args) as (source, dest, peer):
            _transfers(source, dest, peer, "both", 20, args.block, 0)
            whole = _transfers(source, dest, peer, "both", args.count, args.block, args.settle_us)
    finally:
        sidecars.stop()
    lines = [json.loads(line) for line in sidecars.trace.read_text().splitlines()][20:]
    sidecars.close()
    out = {
        what: statistics.median(line[what] for line in lines)
        for what in ("queue_us", "wire_us", "commit_us")
    }
    out["rest_us"] = whole["p50_us"] - sum(out.values())
    return {k: round(v, 1) for k, v in out.items()}


class _Sidecars:
    """Two sidecars, each with its socket in a private directory."""

    def __init__(self, binary: str, sets: list[str], trace: bool = False) -> None:
        self.dir = tempfile.TemporaryDirectory(prefix="kvspray-latency-")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sockets: list[str] = []
        self.trace = pathlib.Path(self.dir.name) / "trace"  # of the destination's sidecar
        for name in ("source", "dest"):
            base = pathlib.Path(self.dir.name) / name
            base.mkdir(mode=0o700)
            socket, ready = base / "kvspray.sock", base / "ready.json"
            command = [
                binary,
                "serve",
                "--socket",
                str(socket),
                "--listen",
                "127.0.0.1:0",
                "--http",
                "off",
                "--ready-file",
                str(ready),
            ]
            traced = [f"trace.transfers={self.trace}"] if trace and name == "dest" else []
            for s in ["peer.gossip.listen=off", *traced, *sets]:
                command += ["--set", s]
            log = open(base / "log", "wb")
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            self.sockets.append(str(socket))
            end = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if self.processes[-1].poll() is not None or time.monotonic() > end:
                    tail = (base / "log").read_text()[-2000:]
                    self.close()
                    raise SystemExit(f"kvspray.latency: the {name} sidecar does not serve:\n{tail}")
                time.sleep(0.01)

    def stop(self) -> None:
        for p in self.processes:
            p.send_signal(signal.SIGTERM)
        for p in self.processes:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        self.processes.clear()

    def close(self) -> None:
        self.stop()
        self.dir.cleanup()


@contextlib.contextmanager
def _joined(sockets: list[str], args: argparse.Namespace) -> Iterator[tuple[_Side, _Side, str]]:
    """The two engines, and the source's endpoint."""
    source, dest = (
        _Side(name, socket, args.block, args.busy)
        for name, socket in zip(("source", "dest"), sockets, strict=True)
    )
    with SchedulerClient(sockets[0], engine=EngineInfo("latency")) as scheduler:
        if not scheduler.wait_connected(START_TIMEOUT_S) or scheduler.endpoint is None:
            raise SystemExit(
                "kvspray.latency: the source's sidecar names no endpoint for its peers"
            )
        peer = scheduler.endpoint
    yield source, dest, peer
    for side in (source, dest):
        side.client.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvspray.latency", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--kvspray",
        default="kvspray",
        help="the sidecar's binary, started twice unless sockets are given",
    )
    parser.add_argument("--source-socket")
    parser.add_argument("--dest-socket")
    parser.add_argument("--block", type=int, default=4096, help="bytes of the block")
    parser.add_argument("--count", type=int, default=500, help="transfers per order and run")
    parser.add_argument("--runs", type=int, default=5, help="the best run counts")
    parser.add_argument(
        "--settle-us",
        type=int,
        default=SETTLE_US,
        help="microseconds between the waiting side's message and the other's",
    )
    parser.add_argument(
        "--set", action="append", default=[], help="key=value for the sidecars started here"
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="poll for the completion instead of sleeping on the CQ eventfd",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    sidecars = None
    if args.source_socket and args.dest_socket:
        here = machine(None)
        sockets = [args.source_socket, args.dest_socket]
    else:
        here = machine(args.kvspray)
        sidecars = _Sidecars(args.kvspray, args.set)
        sockets = sidecars.sockets
    try:
        with _joined(sockets, args) as (source, dest, peer):
            _transfers(source, dest, peer, "both", 20, args.block, 0)  # lanes and caches warm up
            result: dict[str, Any] = {
                "what": (
                    "one block between two sidecars, microseconds from the engine's request to the "
                    "engine's completion"
                ),
                "machine": here,
                "block_bytes": args.block,
                "count": args.count,
                "settle_us": args.settle_us,
                "busy": args.busy,
                "runs": {},
                "best": {},
            }
            for order in ("granted", "both", "expect"):
                runs = [
                    _transfers(source, dest, peer, order, args.count, args.block, args.settle_us)
                    for _ in range(args.runs)
                ]
                result["runs"][order] = runs
                result["best"][order] = min(runs, key=lambda r: r["p50_us"])
            result["calls"] = _calls(source, 100_000)
    finally:
        if sidecars is not None:
            sidecars.close()
    if sidecars is not None:
        result["phases_of_both"] = _phases(args)
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"{args.block} byte block, {args.count} transfers a run, best of {args.runs} runs; "
        "microseconds"
    )
    for order, best in result["best"].items():
        spread = " ".join(f"{r['p50_us']:.0f}" for r in result["runs"][order])
        figures = "  ".join(
            f"{name} {best[name + '_us']:7.1f}" for name in ("p50", "p90", "p99", "min")
        )
        print(f"  {order:8} {figures}  (p50 of each run: {spread})")
    if sidecars is not None:
        phases = "  ".join(
            f"{k.removesuffix('_us')} {v:.0f}" for k, v in result["phases_of_both"].items()
        )
        print(f"  where the time of both goes: {phases}")
    calls = result["calls"]
    print(
        f"  calls: signal_layer {calls['signal_layer_us']:.3f}, intent {calls['intent_us']:.2f}, "
        f"step {calls['step_us']:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
