#!/usr/bin/env python3
"""Runs several measurements at once on a host with several GPUs, each on GPUs and processors of its
own. A plan is a file with one measurement a line:

    NAME GPUS SECONDS ARGUMENTS of measure.py

or, with a program of its own, NAME GPUS SECONDS ! COMMAND. GPUs are counted from 0 within a
measurement: --gpus 0,1 are its first two. It starts as soon as enough GPUs are free, in the plan's
order, and is ended by SIGTERM after its seconds, or after those of the whole plan. A line with 0
GPUs gets the processors that are left, and waits for nothing. Results: $OUT/NAME.

usage: together.py PLAN [--limit SECONDS] [--gpus N] [--only NAME,NAME]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
KILL_S = 15.0  # from SIGTERM on: engines are stopped and the report is written meanwhile
SPARE_CORES = 2  # for jobs without a GPU, at least


@dataclasses.dataclass
class Job:
    name: str
    gpus: int
    seconds: float
    command: list[str]
    proc: subprocess.Popen[bytes] | None = None
    held: list[int] = dataclasses.field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0


def parse(text: str) -> list[Job]:
    jobs = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            name, gpus, seconds, *rest = words
            job = Job(name, int(gpus), float(seconds), rest)
        except ValueError:
            sys.exit(f"line {number}: {line!r}: want NAME GPUS SECONDS ARGUMENTS")
        if not rest:
            sys.exit(f"line {number}: {name} has no arguments")
        own = rest[0] == "!"
        job.command = rest[1:] if own else [sys.executable, str(HERE / "measure.py"), *rest]
        jobs.append(job)
    return jobs


def count_gpus() -> int:
    out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return len(out.stdout.splitlines())


def start(job: Job, gpus: list[int], of: int, out: pathlib.Path) -> None:
    cores, job.held = sorted(os.sched_getaffinity(0)), gpus
    each = max(1, (len(cores) - SPARE_CORES) // max(of, 1))
    mine = [c for g in gpus for c in cores[g * each : (g + 1) * each]]
    mine = mine or cores[of * each :] or cores
    folder = out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    # A directory of its own for temporary files: what one measurement left behind is its own
    # business.
    env = {**os.environ, "OUT": str(folder), "TMPDIR": tempfile.mkdtemp(prefix="k", dir="/tmp")}
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    with (folder / "log.txt").open("wb") as log:
        job.proc = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, mine)), *job.command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
        )  # fmt: skip
    job.started = time.monotonic()
    print(f"started {job.name} on GPUs {gpus}, {len(mine)} cores", flush=True)


def ended(job: Job) -> bool:
    """Also ends a job whose time is over."""
    assert job.proc is not None
    over = time.monotonic() - job.started - job.seconds
    if job.proc.poll() is None and over > 0:
        sig = signal.SIGKILL if over > KILL_S else signal.SIGTERM
        if sig == signal.SIGKILL or not job.ended:
            job.ended = time.monotonic()
            os.killpg(job.proc.pid, sig) if sig == signal.SIGKILL else job.proc.terminate()
    return job.proc.poll() is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("--limit", type=float, default=560, help="seconds of the whole plan")
    parser.add_argument("--gpus", type=int, default=0, help="default: all of the host")
    parser.add_argument("--only", default="", help="names, separated by commas")
    args = parser.parse_args()
    only = {name for name in args.only.split(",") if name}
    waiting = [j for j in parse(args.plan.read_text()) if not only or j.name in only]
    of = args.gpus or count_gpus()
    out = pathlib.Path(os.environ.get("OUT", ".build/gpu/out"))
    free, running, done, end = list(range(of)), [], [], time.monotonic() + args.limit
    for job in [j for j in waiting if j.gpus > of]:
        print(f"left out: {job.name} needs {job.gpus} GPUs of {of}", flush=True)
        waiting.remove(job)
    while running or waiting:
        left = end - time.monotonic()
        for job in list(waiting):
            if job.gpus > len(free) or left <= 0:
                break
            waiting.remove(job)
            job.seconds = min(job.seconds, left - KILL_S)
            running.append(job)
            start(job, [free.pop(0) for _ in range(job.gpus)], of, out)
        for job in [j for j in running if ended(j)]:
            running.remove(job)
            done.append(job)
            free = sorted([*free, *job.held])
            took = time.monotonic() - job.started
            assert job.proc is not None
            print(f"{job.name}: status {job.proc.returncode} after {took:.0f} s", flush=True)
        if left <= 0 and not running:
            break
        time.sleep(0.5)
    for job in waiting:
        print(f"no time for {job.name}", flush=True)
    return int(bool(waiting) or any(j.proc is None or j.proc.returncode for j in done))


if __name__ == "__main__":
    sys.exit(main())
