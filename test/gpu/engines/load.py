"""Random load for minutes, with clients that go away and pools too small for all, and then: what
is left of memory, descriptors, leases."""

from __future__ import annotations

import collections
import time
from typing import Any

from clients import Clients
from cluster import total, use_of
from pairs import MIB, MODES, compare_answers, gpu_used_mib, say
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
        out[thing.name] = use_of(thing.pids())
    return out


def burst(stage: Stage, seconds: float, tag: int) -> tuple[collections.Counter[str], list[str]]:
    clients = Clients(
        [stage.pair.proxies[mode].port for mode in MODES],
        stage.plain,
        lambda ids, want, got: compare_answers(stage.plain, ids, want, got),
        longest=min(stage.rig.max_len - 80, 8000),
        checked=CHECKED,
        aborted=ABORTED,
    )
    stage.rig.so_far |= {"counts": clients.counts, "found": clients.problems}
    end = time.monotonic() + seconds
    clients.start(stage.args.clients, end, f"load{tag}")
    while clients.alive():
        time.sleep(min(30.0, max(1.0, end - time.monotonic())))
        say(f"load: {dict(clients.counts)}")
    return clients.counts, clients.problems


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
