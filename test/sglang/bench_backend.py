#!/usr/bin/env python3
"""Rates of SGLang's storage backend beside those of the C library's own calls: puts and gets of
whole batches, as SGLang's controller asks for them, between SGLang's host pool and a sidecar's
store. Both take turns on the same pages and the same session. `make bench-sglang` runs it.

usage: bench_backend.py [--rounds N] [--json F]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import test_hicache as parts
import torch
from sglang_server import rig

from kvspray.store import PageResult, Space
from kvspray_sglang.link import _HELD as HELD

BATCH = 64  # pages of one call; SGLang asks for up to 128
WAIT_S = 10.0


def moved(link: Any, submit: Callable[[], int]) -> None:
    """A request by the library's own calls: no thread, no lock, no deadline of the backend."""
    lease = submit()
    if not lease:
        raise SystemExit(f"refused: {link.status().error}")
    while True:
        if not link._client.wait(WAIT_S):
            raise SystemExit(f"no end within {WAIT_S:g} s")
        for c in link._client.poll():
            if c.lease == lease:
                if not c.ok or any(PageResult.of(b).outcome not in HELD for b in c.pages):
                    raise SystemExit(f"failed: {c.reason or 'a page was not stored or found'}")
                return


def measure(sidecar: rig.Sidecar, layout: str, rounds: int) -> dict[str, Any]:
    c = parts.Controller(sidecar, "mha", layout, weights=layout)
    backend, host = c.backend, c.host
    try:
        backend._check()
        _, pieces = backend._pools["kv"]
        names = backend._names.of_pool(backend._pools["kv"][0])
        own = Space(backend._link._client, names, pieces, backend._pools["kv"][0].pages)
        if not own.ready(WAIT_S):
            raise SystemExit("no session")
        indices = host.alloc(BATCH * parts.PAGE)
        blocks = backend._pools["kv"][0].blocks(indices, BATCH)
        host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape).to(host.dtype))
        pages = c.pages(indices)
        took: dict[str, list[float]] = {}

        def timed(what: str, call: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            out = call()
            took.setdefault(what, []).append(time.perf_counter() - start)
            return out

        def keys(turn: int, who: str) -> Sequence[str]:
            return [
                f"{layout}-{turn}-{who}-{i}".encode().hex().ljust(64, "0") for i in range(BATCH)
            ]

        for turn in range(rounds + 1):
            ours, theirs = keys(turn, "backend"), [bytes.fromhex(k) for k in keys(turn, "c")]
            todo = [
                lambda k=ours: timed("put", lambda: all(backend.batch_set_v1(k, indices))),
                lambda h=theirs: timed("c put", lambda: moved(
                    backend._link, lambda: own.put(h, blocks, deadline_s=WAIT_S))),
                lambda k=ours: timed("get", lambda: all(backend.batch_get_v1(k, indices))),
                lambda h=theirs: timed("c get", lambda: moved(
                    backend._link, lambda: own.get(h, blocks, deadline_s=WAIT_S))),
            ]  # fmt: skip
            for i in (0, 1, 2, 3) if turn % 2 else (1, 0, 3, 2):
                if i > 1:
                    host.kv_buffer.zero_()
                if todo[i]() is False:
                    raise SystemExit("a page was not stored or not found")
                if not all(torch.equal(a, b) for a, b in zip(pages, c.pages(indices), strict=True)):
                    raise SystemExit("other bytes came back")
            if not turn:
                took.clear()  # the first round warms up
        page = sum(p.length for p in pieces)
        out: dict[str, Any] = {"layout": layout, "page_bytes": page, "pieces": len(pieces)}
        for what in ("put", "get"):
            ratio = sorted(b / a for a, b in zip(took[what], took[f"c {what}"], strict=True))
            rate = BATCH * page / statistics.median(took[what]) / 1e9
            out[what] = {
                "gb_s": round(rate, 2),
                "share_of_c": round(statistics.median(ratio), 3),
                "p10": round(ratio[len(ratio) // 10], 3),
                "p90": round(ratio[-1 - len(ratio) // 10], 3),
            }
        out["copied_by_python"] = backend.copied_bytes
        return out
    finally:
        c.close()


def main() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--rounds", type=int, default=40)
    ap.add_argument("--json", type=pathlib.Path)
    args = ap.parse_args()
    parts.SIZE, parts.LAYERS, parts.HEADS, parts.DIM = BATCH * parts.PAGE * 2, 8, 8, 128
    parts.prepare()
    report = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        store = {"memory": "1GiB"}
        sidecar = rig.Sidecar("a", pathlib.Path(folder), {"store": store})
        with rig.running(sidecar):
            for layout in ("page_first_direct", "page_first", "layer_first"):
                report.append(measure(sidecar, layout, args.rounds))
                print(json.dumps(report[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
