# SPDX-License-Identifier: Apache-2.0
"""Random load for minutes, with clients that go away and pools too small for all, and then: what
is left of memory, descriptors, leases."""

from __future__ import annotations

import collections
import os
import pathlib
import random
import threading
import time
from typing import Any

from cluster import total
from pairs import MIB, MODES, compare_answers, gpu_used_mib, prompt, say
from servers import complete, give_up
from stage import PAIR, PLAIN, Stage

NEEDS = {PAIR, PLAIN}
CHECKED = 0.05  # of the answers are compared with the plain engine's
ABORTED = 0.25
GPU_SLACK_MIB = 128
FD_SLACK = 16
RSS_SLACK = 512 * MIB


def options(parser: Any) -> None:
    parser.add_argument("--seconds", type=float, default=480, help="of part load")
    parser.add_argument("--clients", type=int, default=16)


def held(stage: Stage) -> dict[str, Any]:
    """What each process holds, and the GPU as a whole."""
    out: dict[str, Any] = {"gpu_mib": gpu_used_mib(), "leases": stage.pair.leases()}
    for thing in [*stage.pair.engines(), *stage.pair.sidecars]:
        fds = rss = 0
        for pid in thing.pids():
            try:
                fds += len(os.listdir(f"/proc/{pid}/fd"))
                rss += int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
            except OSError:
                continue
        out[thing.name] = {"fds": fds, "rss": rss}
    return out


def client(
    stage: Stage, i: int, end: float, counts: collections.Counter[str], problems: list[str]
) -> None:
    rng, turn = random.Random(f"load {i}"), 0
    longest = min(stage.rig.max_len - 80, 8000)
    while time.monotonic() < end:
        turn += 1
        n = min(longest, int(2 ** rng.uniform(0, 13)))
        ids = prompt(n, ("load", i, turn))
        port = stage.pair.proxies[MODES[rng.randrange(2)]].port
        if rng.random() < ABORTED:
            try:
                give_up(port, ids, rng.uniform(0, 0.5))
            except OSError as err:
                problems.append(f"load{i}-{turn}: the router took no request: {err}")
            counts["aborted"] += 1
            continue
        want = rng.randrange(1, 64)
        got = complete(port, ids, max_tokens=want, rid=f"load{i}-{turn}")
        counts["answered"] += 1
        counts["tokens"] += n
        if got.error or len(got.tokens[0]) != want:
            counts["failed"] += 1
            what = got.error or f"{len(got.tokens[0])} tokens of {want}"
            problems.append(f"load{i}-{turn}, {n} tokens: {what}"[:300])
        elif rng.random() < CHECKED:
            good, what = compare_answers(
                stage.plain, ids, complete(stage.plain.port, ids, max_tokens=want), got
            )
            counts["compared"] += 1
            if not good:
                problems.append(f"load{i}-{turn}: {what}"[:300])


def burst(stage: Stage, seconds: float, tag: int) -> tuple[collections.Counter[str], list[str]]:
    counts: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    stage.rig.so_far |= {"counts": counts, "found": problems}
    end = time.monotonic() + seconds
    threads = [
        threading.Thread(
            target=client, args=(stage, 1000 * tag + i, end, counts, problems), daemon=True
        )
        for i in range(stage.args.clients)
    ]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        time.sleep(min(30.0, max(1.0, end - time.monotonic())))
        say(f"load: {dict(counts)}")
    return counts, problems


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    # What grows at first, allocators and threads, is there before the first look.
    _, problems = burst(stage, min(20.0, stage.args.seconds / 4), 0)
    stage.settle()
    before = held(stage)
    stage.rig.so_far["before"] = before
    counts, more = burst(stage, stage.args.seconds, 1)
    problems += more
    stage.settle()
    time.sleep(2)  # vLLM shows its statistics once a second at most
    after = held(stage)
    preempted = {
        s.name: int(total(s.metrics(), "vllm:num_preemptions_total")) for s in stage.pair.engines()
    }
    if after["gpu_mib"] - before["gpu_mib"] > GPU_SLACK_MIB:
        problems.append(f"GPU memory grew from {before['gpu_mib']} to {after['gpu_mib']} MiB")
    if after["leases"]:
        problems.append(f"{after['leases']} leases are open")
    for thing in [*stage.pair.engines(), *stage.pair.sidecars]:
        was, now = before[thing.name], after[thing.name]
        if now["fds"] - was["fds"] > FD_SLACK or now["rss"] - was["rss"] > RSS_SLACK:
            problems.append(f"{thing.name} held {was} and holds {now}")
    if not sum(preempted.values()):
        problems.append("no engine preempted a request: give --cache-mb less")
    print(f"load: {dict(counts)}, preempted {preempted}")
    print(f"  before {before}\n  after  {after}")
    return {"counts": counts, "preempted": preempted, "before": before, "after": after}, problems
