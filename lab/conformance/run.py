#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts wrong answers of a pair of vLLM engines with any KV connector, beside a plain engine's.

usage: run.py connectors/NAME.json [--model DIR] [--only SITUATION,...] [--set NAME=VALUE]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

from arm import ROOT, Arm, Described, Tally, engines, rig
from situations import SITUATIONS

from kvspray.trial.processes import end_on_signals

COLUMNS = ("right", "wrong", "failed", "none", "aborted", "died", "held")


def install(name: str, packages: list[str]) -> None:
    """A peer's wheels, without what they depend on: beside vLLM, not in its environment."""
    if not packages:
        return
    target = ROOT / ".build" / "conformance" / name
    wanted = json.dumps(packages)
    mark = target / "packages.json"
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(target, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, *packages], check=True)
        mark.write_text(wanted)
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = f"{target}:{os.environ.get('PYTHONPATH', '')}"


def replace(functions: dict[str, Any]) -> None:
    """Replaces functions of other modules, by name, with ones that return a given value, for
    connectors that ask for a GPU."""
    for name, value in functions.items():
        module, _, function = name.rpartition(".")
        setattr(importlib.import_module(module), function, lambda value=value: value)


def wants(arm: Arm, field: str) -> bool:
    """Whether the description has a field that a situation needs."""
    return not field or bool(arm.fields.get(field) or arm.described.per_request.get(field))


def run(arm: Arm, only: list[str], rounds: int, out: dict[str, Tally]) -> None:
    for name, (situation, field) in SITUATIONS.items():
        if only and name not in only:
            continue
        if not wants(arm, field):
            print(f"{name:18} not possible: the connector's file has no {field}", flush=True)
            continue
        t = out[name] = Tally()
        start = time.monotonic()
        for turn in range(rounds):
            try:
                situation(arm, t, (name, turn))
            except engines.EngineDied:
                pass  # counted below
            except KeyError as err:
                t.notes.append(f"the reference has no {err}")
            except TimeoutError as err:
                t.none += 1
                t.notes.append(str(err).splitlines()[0])
            arm.settle(t)
        moved = f"{1 - t.computed / t.prompt:.0%}" if t.prompt else "-"
        counts = ", ".join(f"{c} {getattr(t, c)}" for c in COLUMNS)
        print(f"{name:18} {counts}, moved {moved} ({time.monotonic() - start:.0f} s)", flush=True)
        for note in t.notes[:3]:
            print(f"    {note}", flush=True)


def markdown(found: dict[str, Tally]) -> str:
    rows = [f"| situation | {' | '.join(COLUMNS)} | moved |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, t in found.items():
        moved = f"{1 - t.computed / t.prompt:.0%}" if t.prompt else ""
        rows.append(f"| {name} | {' | '.join(str(getattr(t, c)) for c in COLUMNS)} | {moved} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("connector", type=pathlib.Path, help="a description of a connector")
    parser.add_argument("--model", default=str(ROOT / ".build/models/tiny-llama"))
    parser.add_argument("--only", default="", help=", ".join(SITUATIONS))
    parser.add_argument("--rounds", type=int, default=1, help="of each situation")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--keep", action="store_true", help="the logs of a green run")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the counts")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    if unknown := [name for name in only if name not in SITUATIONS]:
        parser.error(f"--only: {unknown[0]}: unknown; known are {', '.join(SITUATIONS)}")
    text = args.connector.read_text()
    install(args.connector.stem, json.loads(text).get("packages", []))
    engines.preload()
    end_on_signals()
    replace(json.loads(text).get("functions", {}))
    dir = pathlib.Path(tempfile.mkdtemp(prefix="conf-"))  # short, for unix sockets
    given = dict(s.split("=", 1) for s in args.set)
    given.setdefault("kvspray", str(rig.BINARY))
    arm = Arm(Described(text, dir, given), dir, args.model)
    versions = {"vllm": importlib.metadata.version("vllm"), "packages": arm.fields.get("packages")}
    model = pathlib.Path(args.model).name
    print(f"{args.connector.stem}: vLLM {versions['vllm']}, {model}, logs {dir}", flush=True)
    found: dict[str, Tally] = {}
    broken = ""
    try:
        arm.start()
        run(arm, only, args.rounds, found)
    except (rig.Failed, RuntimeError, engines.EngineDied) as err:
        traceback.print_exc()
        broken = f"; ended early: {err}"
    finally:
        arm.close()
    print(markdown(found))
    if args.out:
        counts = {name: dataclasses.asdict(t) for name, t in found.items()}
        whole = {**versions, "model": args.model, "broken": broken, "found": counts}
        args.out.write_text(json.dumps(whole, indent=1))
    bad = [name for name, t in found.items() if t.bad()]
    if (t := found.get("ordinary")) and t.computed > t.prompt / 2:
        bad.append("D computed the prompts itself, so nothing was tried")
    print(f"RED: {', '.join(bad)}{broken}" if bad or broken else "GREEN")
    if not bad and not broken and not args.keep:
        shutil.rmtree(dir, ignore_errors=True)
    return int(bool(bad or broken))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no thread of vLLM is waited for
