#!/usr/bin/env python3
"""Measures real vLLM engines with kvspray on one host. All PARTs of one command share their
engines. Each prints a short summary, writes one JSON file to $OUT, and makes the status other
than 0 where something differs. --device cpu runs them with the CPU engines of make env. On a GPU
host: unpack.py first, then models.py /opt/rig/models NAME ...

usage: measure.py PART [PART ...] [options]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback

import unpacked  # noqa: F401

# isort: split
import content
import cost
import cover
import faults
import graphs
import hybrid
import load
import memory
import pairs
import reload
import reuse
import sanitize
import serve
import sleeping
import slept
import tracing
import ttft
from cluster import Failed
from servers import ENDING, ignore_signals
from stage import NIXL, Stage

PARTS = {
    "pages": (content, "pages and tokens of many prompts: P against D against a plain engine"),
    "ttft": (
        ttft,
        "what a transfer adds to D's first token, in both modes, beside NIXL with --nixl",
    ),
    "cost": (
        cost,
        "what transfers cost P's prefill and D's decoding, with a peer without an engine",
    ),
    "kill": (faults, "kill -9 and SIGSTOP of sidecars and engines"),
    "load": (load, "random load with aborts and preemptions, and what is left behind"),
    "memory": (
        memory,
        "one engine at --gpu-memory-utilization 0.95, its sidecar, a peer; engines of its own",
    ),
    "store": (
        reuse,
        "what the node's store saves, beside computing and vLLM's connectors for host memory, also "
        "while an engine decodes; engines of its own",
    ),
    "sleep": (
        sleeping,
        "sleep and wake-up by vLLM's copies and by the sidecar's; engines of its own",
    ),
    "slept": (
        slept,
        "P and D sleep in turns between prompts: pages, tokens, memory; engines of their own",
    ),
    "weights": (
        reload,
        "other weights by kvspray load, PyTorch's copies and vLLM's reload; engines of its own",
    ),
    "cover": (
        cover,
        "pages and answers over shapes, graph modes, runners and backends; engines of its own",
    ),
    "hybrid": (
        hybrid,
        "cover for models with recurrent states; engines of its own",
    ),
    "graphs": (
        graphs,
        "answers of engines without transfers, under load, by graph mode, runner and backend",
    ),
    "serve": (serve, "vllm bench serve through plain engines and pairs; engines of its own"),
    "sanitize": (sanitize, "a short run under compute-sanitizer; engines of its own"),
    "trace": (tracing, "what a layer's signal costs in FULL graphs; engines of its own"),
}


def main() -> int:
    listing = "\n".join(f"  {name:8} {text}" for name, (_, text) in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    pairs.add_options(parser)
    for module, _ in PARTS.values():
        module.options(parser.add_argument_group(module.__name__))
    args = parser.parse_args()
    pairs.reap()
    rig = pairs.Rig(args)
    alone = [part for part in args.parts if not PARTS[part][0].NEEDS]
    shared = [part for part in args.parts if part not in alone]
    needs = set().union(*(PARTS[part][0].NEEDS for part in shared))
    stage = Stage(rig, needs | ({NIXL} if args.nixl and needs else set()))
    running = Running(stage)
    for sig in ENDING:
        signal.signal(sig, running.end)
    red = True
    try:
        try:
            # First those with engines of their own, while the GPU is free.
            found = [running.one(part, {}) for part in alone]
            up = stage.start() if shared else {}
            red = any(found + [running.one(part, up) for part in shared])
        except Failed as err:
            print(f"RED: {err}", flush=True)
        finally:
            ignore_signals()
    finally:
        stage.stop()
        rig.close(keep_logs=red)
    return int(red)


class Running:
    """The part that is being measured."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.part, self.start = stage, "", 0.0

    def one(self, part: str, up: dict[str, object]) -> bool:
        """Runs a measurement; whether it found problems."""
        self.part, self.start, report = part, time.monotonic(), {}
        self.stage.rig.so_far = {}
        try:
            report, problems = PARTS[part][0].run(self.stage)
            if PARTS[part][0].NEEDS:
                self.stage.settle()
        except Failed as err:
            report, problems = self.stage.rig.so_far, [str(err)]
        except Exception as err:  # the other parts' figures are not lost with it
            traceback.print_exc()
            report, problems = self.stage.rig.so_far, [f"{type(err).__name__}: {err}"]
        self.part = ""
        self.write(part, {**up, **report}, problems)
        return bool(problems)

    def write(self, part: str, report: dict[str, object], problems: list[str]) -> None:
        took = time.monotonic() - self.start
        self.stage.rig.finish(part, {"took_s": took, **report, "problems": problems})
        for problem in problems[:12]:
            print(f"  PROBLEM {problem[:400]}", flush=True)
        print(f"{'RED' if problems else 'GREEN'} {part} ({took:.0f} s)", flush=True)

    def end(self, sig: int, _: object) -> None:
        """A limit of time. Results so far are written at once. Then the engines end, so
        that whatever waits for an answer gets an error, and the finally blocks run."""
        ignore_signals()
        if self.part:
            name = signal.Signals(sig).name
            with contextlib.suppress(RuntimeError):  # it may have come in the middle of a print
                self.write(
                    self.part, self.stage.rig.so_far, [f"ended by {name} before it was done"]
                )
        pairs.end_started()
        sys.exit(128 + sig)


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as err:
        code = err.code
        if not isinstance(code, int):
            raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of clients that still wait for an answer do not matter any more
