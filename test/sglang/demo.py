#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demonstration with SGLang: a prefill and a decode server behind SGLang's own router; their sidecars move the KV cache.

The prompts first go to one plain server, then to the pair. The exit status is 0 only if all tokens are equal, each prompt of
a page or more has moved, and no transfer is left open. Of a prompt that decode has in its own cache only the last page moves again.

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
from sglang_server import PAGE, rig

LOGS = pathlib.Path(os.environ.get("KVSPRAY_BUILD", rig.ROOT / ".build")) / "demo-sglang"
SIZES = (PAGE, PAGE + 1, CHUNK, CHUNK + 1, 300, 600, 900, 1500)
START = time.monotonic()


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def prompt(tokens: int) -> list[int]:
    r = random.Random(tokens)
    return [r.randrange(2, 900) for _ in range(tokens)]


def run(pair: Pair) -> bool:
    prompts = [prompt(n) for n in SIZES]
    log("a plain server starts (SGLang needs one to two minutes)")
    pair.ask_plain(prompts)
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
        print(f"{len(ids):8}{moved / 1024:8.0f} KiB{took:8.2f}  {'equal' if equal else 'DIFFERENT'}{note}")
        good = good and equal and (moved < first / 4 if again else moved > 0)
        first = moved
    rig.wait_for("no transfer left open", lambda: pair.leases() == 0, 60, 0.2)
    return good


def main() -> int:
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:  # unix sockets have short names
        pair = Pair(pathlib.Path(dir), LOGS)
        try:
            good = run(pair)
        except rig.Failed as err:
            print(f"failed: {err}", file=sys.stderr)
            good = False
        finally:
            pair.stop()
    print(f"\n{'ok' if good else 'FAILED'}: {len(SIZES)} prompts, {ANSWER} tokens each; logs in {LOGS}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
