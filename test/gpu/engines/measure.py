#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures real vLLM engines with kvspray on one host. All PARTs of one command share their
engines. Each prints a short summary, writes one JSON file to $OUT, and makes the status other
than 0 where something differs. --device cpu runs them with the CPU engines of make env. On a GPU
host: unpack.py first, then models.py /opt/rig/models NAME ...

usage: measure.py PART [PART ...] [options]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "rig")]

import content  # noqa: E402
import cost  # noqa: E402
import cover  # noqa: E402
import faults  # noqa: E402
import load  # noqa: E402
import pairs  # noqa: E402
import sanitize  # noqa: E402
import tracing  # noqa: E402
import ttft  # noqa: E402
from cluster import Failed  # noqa: E402
from servers import deaf, end_on_signals  # noqa: E402
from stage import NIXL, Stage  # noqa: E402

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
    "cover": (
        cover,
        "pages and answers over shapes, graph modes, runners and backends; engines of its own",
    ),
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
    red = True
    try:
        try:
            # First those with engines of their own, while the GPU is free.
            found = [one(stage, part, {}) for part in alone]
            up = stage.start() if shared else {}
            red = any(found + [one(stage, part, up) for part in shared])
        except Failed as err:
            print(f"RED: {err}", flush=True)
        finally:
            deaf()
    finally:
        stage.stop()
        rig.close(keep_logs=red)
    return int(red)


def one(stage: Stage, part: str, up: dict[str, object]) -> bool:
    """Runs a measurement; whether it found problems."""
    start, report = time.monotonic(), {}
    try:
        report, problems = PARTS[part][0].run(stage)
        if PARTS[part][0].NEEDS:
            stage.settle()
    except Failed as err:
        problems = [str(err)]
    except Exception as err:  # the other parts' figures are not lost with it
        traceback.print_exc()
        problems = [f"{type(err).__name__}: {err}"]
    stage.rig.finish(
        part, {**up, "took_s": time.monotonic() - start, **report, "problems": problems}
    )
    for problem in problems[:12]:
        print(f"  PROBLEM {problem[:400]}", flush=True)
    print(f"{'RED' if problems else 'GREEN'} {part} ({time.monotonic() - start:.0f} s)", flush=True)
    return bool(problems)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
