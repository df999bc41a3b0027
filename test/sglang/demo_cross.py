#!/usr/bin/env python3
"""The demonstration of one pair of two kinds of engines: vLLM prefills and SGLang decodes, then the
reverse.

Each prompt goes to vLLM alone first, then to the pair. The exit status is 0 only if all tokens are
equal, each prompt has moved as a whole, both sidecars have the same hash for every page, and no
transfer is left open.

Written: .build/demo-cross/ with the logs of all processes.
"""

from __future__ import annotations

import pathlib
import random
import shutil
import sys
import tempfile
import time

from cross_pair import BUILD, CHUNK, Cross
from sglang_server import rig, servers

LOGS = BUILD / "demo-cross"
SIZES = (1, 17, 33, CHUNK, CHUNK + 1, 300, 600, 1000)
ANSWER = 12
TOKEN_BYTES = 2 * 4 * 2 * 32 * 4  # K and V of 4 layers, 2 heads, 32 numbers of 4 bytes
START = time.monotonic()
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def prompt(tokens: int) -> list[int]:
    r = random.Random(tokens)
    return [r.randrange(2, 900) for _ in range(tokens)]


def run(pair: Cross, decode: str) -> bool:
    log(
        f"{NAMES[pair.prefill]} prefills, {NAMES[decode]} decodes: two engines, two sidecars and a "
        "bridge start (one to two minutes)"
    )
    pair.start()
    prompts = [prompt(n) for n in SIZES]
    plain = [pair.alone(ids, ANSWER) for ids in prompts]
    log("all are up, and vLLM's own answers are there")
    good = True
    print(f"\n{'prompt':>8}{'moved':>12}{'s':>8}  tokens")
    for ids, own in zip(prompts, plain, strict=True):
        before, start = pair.moved(), time.monotonic()
        equal = pair.ask(ids, ANSWER) == own
        took, moved = time.monotonic() - start, pair.moved() - before
        print(
            f"{len(ids):8}{moved / 1024:8.0f} KiB{took:8.2f}  {'equal' if equal else 'DIFFERENT'}"
        )
        good = good and equal and moved == len(ids) * TOKEN_BYTES
    rig.wait_for("no transfer left open", lambda: pair.leases() == 0, 60, 0.2)
    sent, came = pair.pages()
    same = bool(came) and sent == came
    print(
        f"{len(came)} pages: their hashes at prefill and at decode are "
        f"{'equal' if same else 'DIFFERENT'}\n",
        flush=True,
    )
    return good and same


def main() -> int:
    servers.end_on_signals()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:  # unix sockets have short names
        for prefill, decode in (("vllm", "sglang"), ("sglang", "vllm")):
            pair = Cross(prefill, pathlib.Path(dir), LOGS)
            try:
                good = run(pair, decode) and good
            except (rig.Failed, OSError) as err:
                print(f"failed: {err}", file=sys.stderr)
                good = False
            finally:
                pair.stop()
    print(
        f"{'ok' if good else 'FAILED'}: {2 * len(SIZES)} prompts, {ANSWER} tokens each; logs in "
        f"{LOGS}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
