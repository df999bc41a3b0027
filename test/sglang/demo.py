#!/usr/bin/env python3
"""The demonstration with SGLang: a prefill and a decode server behind SGLang's own router; their
sidecars move the KV cache. Prefill's HiCache keeps pages in its sidecar's store, which has memory
and a disk.

The prompts first go to one plain server, then to the pair. Conversations of several turns follow:
once computed, once with pages from the store's memory, and once, after a restart of the sidecar,
with pages from its disk. The exit status is 0 only if all tokens are equal, each prompt of a page
or more has moved, each tier of the store had pages, and no transfer is left open. Of a prompt that
decode has in its own cache only the last page moves again.

Written: .build/demo-sglang/ with the logs of all processes.
"""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

from sglang_pair import ANSWER, CHUNK, Pair
from sglang_server import PAGE, counted, rig, stored, with_store

LOGS = pathlib.Path(os.environ.get("KVSPRAY_BUILD", rig.ROOT / ".build")) / "demo-sglang"
SIZES = (PAGE, PAGE + 1, CHUNK, CHUNK + 1, 300, 600, 900, 1500)
TALKS, TURNS, TURN = 3, 4, 10 * PAGE  # conversations, their turns, and tokens that a turn adds
START = time.monotonic()


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def prompt(tokens: int) -> list[int]:
    r = random.Random(tokens)
    return [r.randrange(2, 900) for _ in range(tokens)]


def turns() -> list[list[int]]:
    """The prompts of all conversations. Each has those before it, which stand for the answers,
    too."""
    talks = [
        [random.Random(f"{talk} {i}").randrange(2, 900) for i in range(TURNS * TURN)]
        for talk in range(TALKS)
    ]
    return [talk[: (turn + 1) * TURN] for talk in talks for turn in range(TURNS)]


def converse(pair: Pair, tier: str) -> bool:
    """All turns. With a tier SGLang's own caches are emptied before each of them, and this tier of
    the store has the pages."""
    store = pair.sidecars[0]
    hits = 0.0
    equal = 0
    start = time.monotonic()
    for ids in turns():
        if tier:
            for server in (pair.prefill, pair.decode):
                server.forget()
        before = counted(store, "kvspray_store_hits_total", tier=tier)
        equal += pair.right(ids)
        hits += counted(store, "kvspray_store_hits_total", tier=tier) - before
    n = TALKS * TURNS
    source = f"{hits:.0f} pages from the store's {tier}" if tier else "computed"
    print(
        f"{TALKS} conversations, {n} turns, {source}: {time.monotonic() - start:.1f} s, tokens "
        f"equal in {equal}"
    )
    return equal == n and (not tier or hits > 0)


def run(pair: Pair) -> bool:
    prompts = [prompt(n) for n in SIZES]
    log("a plain server starts (SGLang needs one to two minutes)")
    pair.ask_plain([*prompts, *turns()])
    log("its answers are there; two sidecars, a prefill and a decode server and a router start")
    for s in pair.sidecars:
        s.start()
    pair.start()
    rig.wait_for("sidecars of both servers", lambda: pair.right(prompts[0]), 120, 0.5)
    log("all are up")
    good = True
    first = 0.0
    print(f"\n{'prompt':>8}{'moved':>12}{'s':>8}  tokens")
    for again, ids in [*((False, ids) for ids in prompts[1:]), (True, prompts[-1])]:
        before, start = pair.moved(), time.monotonic()
        equal = pair.right(ids)
        took, moved = time.monotonic() - start, pair.moved() - before
        note = ", again: decode has it" if again else ""
        print(
            f"{len(ids):8}{moved / 1024:8.0f} KiB{took:8.2f}  "
            f"{'equal' if equal else 'DIFFERENT'}{note}"
        )
        good = good and equal and (moved < first / 4 if again else moved > 0)
        first = moved
    print()
    good = converse(pair, "") and good
    store = pair.sidecars[0]
    rig.wait_for(
        "all pages in the store", lambda: stored(store) >= TALKS * TURNS * TURN // PAGE, 60, 0.2
    )
    good = converse(pair, "memory") and good
    store.stop()
    store.start()
    rig.wait_for(
        "a request with the sidecar's next process", lambda: pair.answered(prompts[1]), 120, 0.5
    )
    good = converse(pair, "disk") and good
    rig.wait_for("no transfer left open", lambda: pair.leases() == 0, 60, 0.2)
    return good


def main() -> int:
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:  # unix sockets have short names
        disk = {"path": f"{dir}/pages", "size": "256MiB"}
        pair = Pair(pathlib.Path(dir), LOGS)
        pair.sidecars[0].config["store"] = {"memory": "64MiB", "disk": [disk]}
        pair.prefill.args = [*pair.prefill.args, *with_store(pair.sidecars[0])]
        try:
            good = run(pair)
        except rig.Failed as err:
            print(f"failed: {err}", file=sys.stderr)
            good = False
        finally:
            pair.stop()
    print(
        f"\n{'ok' if good else 'FAILED'}: {len(SIZES)} prompts and {TALKS} conversations, {ANSWER} "
        f"tokens each; logs in {LOGS}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
