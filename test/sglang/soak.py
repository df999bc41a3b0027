#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang for an hour: prefill with HiCache on the sidecar's store, decode, and random aborts.

Clients send prompts, of which a fifth was sent before, to the pair and to one plain server. Every
fourth prompt is given up at a random time at both servers of the pair. Every minute the servers'
own caches are emptied, so that later prompts come from the store.

An answer must equal the plain server's, if both found as many of its tokens in a cache: with another
number the rounding differs. It also differs with the number of requests in a batch. So another token
passes where the plain server gives it nearly the same probability (TIE), and is counted. The status is 0 only if all do, no request failed that was not given
up, and at the end no lease is open, no slot of a device or host pool is used, and processes have as
many descriptors as they had after the first minute, and at most 8 more.

Written: .build/soak-sglang/ with the logs of all processes, and samples.jsonl, a line for each
minute.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures as cf
import contextlib
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
from typing import Any

from sglang_pair import ANSWER, Pair
from sglang_server import Server, counted, found, rig, with_store

LOGS = pathlib.Path(os.environ.get("KVSPRAY_BUILD", rig.ROOT / ".build")) / "soak-sglang"
CLIENTS, REPEATED, KEPT = 3, 0.2, 12
TIE = 0.001  # of logarithms
FIRST_ROOM = 1 << 40  # rooms of requests that are given up; the router draws its own below
USED = ("sglang:num_used_tokens", "sglang:hicache_host_used_tokens")


class Soak:
    def __init__(self, dir: pathlib.Path, seconds: float, seed: int) -> None:
        self.pair = Pair(dir, LOGS, config={"store": {"memory": "64MiB"}})
        extra = ["--sleep-on-idle", "--dtype", "float32"]  # in bfloat16 one answer in 500 is a tie
        self.plain = Server("plain", LOGS, [*self.pair.chunked, *extra])
        self.pair.prefill.args = [
            *self.pair.prefill.args, *extra, *with_store(self.pair.sidecars[0])
        ]  # fmt: skip
        self.pair.decode.args = [*self.pair.decode.args, *extra]
        self.until, self.seed = time.monotonic() + seconds, seed
        self.count: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.lock, self.gate = threading.Lock(), Gate()
        self.kept: collections.deque[list[int]] = collections.deque(maxlen=KEPT)

    def start(self) -> None:
        for s in self.pair.sidecars:
            s.start()
        self.plain.start()
        self.pair.start()
        self.plain.ready()
        for s in (self.pair.router, self.plain):
            s.generate([2, 3, 4], ANSWER)

    def stop(self) -> None:
        self.plain.stop()
        self.pair.stop()

    def client(self, n: int) -> None:
        r = random.Random(f"{self.seed} {n}")
        while time.monotonic() < self.until and not self.wrong:
            ids = [r.randrange(2, 900) for _ in range(r.randrange(1, 900))]
            with self.lock:
                if self.kept and r.random() < REPEATED:
                    ids = self.kept[r.randrange(len(self.kept))]
                else:
                    self.kept.append(ids)
            with self.gate.passed():
                try:
                    if r.random() < 0.25:
                        self.give_up(ids, r.uniform(0, 0.8), r.getrandbits(30))
                    else:
                        self.compare(ids)
                except Exception as err:
                    text = error(err)
                    with self.lock:
                        self.wrong.append(f"a prompt of {len(ids)} tokens: {text}")

    def compare(self, ids: list[int]) -> None:
        want, had = self.plain.generate(ids, ANSWER)
        got, cached = self.pair.router.generate(ids, ANSWER)
        with self.lock:
            self.count["from a cache" if cached else "computed"] += 1
            if had != cached:
                self.count["not compared"] += 1
            elif got == want:
                self.count["equal"] += 1
        if had == cached and got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            gap = self.gap(ids + want[:at], want[at], got[at])
            with self.lock:
                self.count["near ties"] += gap < TIE
                if gap >= TIE:
                    self.wrong.append(
                        f"a prompt of {len(ids)} tokens, {cached} of them cached: {got}, want "
                        f"{want}; {gap:.4f} between their logarithms"
                    )

    def gap(self, ids: list[int], a: int, b: int) -> float:
        """How much less likely than a the plain server finds b as the next token, as a logarithm."""
        body = {
            "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True, "top_logprobs_num": 5,
        }  # fmt: skip
        (top,) = self.plain.post("/generate", body)["meta_info"]["output_top_logprobs"]
        of = {token: logarithm for logarithm, token, _ in top}
        return abs(of.get(a, 0.0) - of.get(b, float("-inf")))

    def give_up(self, ids: list[int], after: float, draw: int) -> None:
        rid = f"gone-{draw}"
        body = {
            "input_ids": ids, "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0},
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.pair.port,
            "bootstrap_room": FIRST_ROOM + draw, "rid": rid,
        }  # fmt: skip
        servers = (self.pair.prefill, self.pair.decode)

        def one(server: Server) -> bool:
            try:
                server.post("/generate", body, timeout=120)
            except (urllib.error.HTTPError, OSError):
                return False
            return True

        with cf.ThreadPoolExecutor(2) as pool:
            both = [pool.submit(one, s) for s in servers]
            time.sleep(after)
            for s in servers:
                s.post("/abort_request", {"rid": rid}, timeout=120)
            done = all(f.result() for f in both)
        with self.lock:
            self.count["given up late" if done else "given up"] += 1

    def rest(self) -> dict[str, Any]:
        """Empties the caches while no client is active, and returns what is still held."""
        with self.gate.closed():
            rig.wait_for("no open lease", lambda: self.pair.leases() == 0, 60, 0.2)
            for s in (self.pair.prefill, self.pair.decode, self.plain):
                s.forget()
            self.pair.router.generate([2, 3, 4], 1)  # less than a page; the servers' metrics follow
            held: dict[str, Any] = {"minute": round(time.monotonic() / 60, 1), **self.count}
            for s in (self.pair.prefill, self.pair.decode):
                text = rig.parse_metrics(rig.get(s.url + "/metrics"))
                held |= {f"{s.name} {name}": rig.total(text, name) for name in USED}
                held |= usage(s.name, group(s.proc.pid if s.proc else 0))
            for c in self.pair.sidecars:
                held |= usage(f"sidecar {c.name}", c.pids())
                held[f"sidecar {c.name} goroutines"] = counted(c, "go_goroutines")
            held["store hits"] = found(self.pair.sidecars[0])
            return held

    def run(self) -> bool:
        samples: list[dict[str, Any]] = []
        with cf.ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self.client, n) for n in range(CLIENTS)]
            while cf.wait(clients, timeout=60).not_done:
                samples.append(self.sample())
            for f in clients:
                f.result()
        samples.append(self.sample())
        for line in self.wrong:
            print(f"WRONG: {line}")
        left = leaks(samples)
        for line in left:
            print(f"LEFT: {line}")
        enough = self.count["equal"] > 0 and self.count["given up"] > 0 and samples[-1]["store hits"]
        if not enough:
            print(f"TOO LITTLE: {dict(self.count)}, {samples[-1]['store hits']} hits of the store")
        return not self.wrong and not left and bool(enough)

    def sample(self) -> dict[str, Any]:
        s = self.rest()
        with (LOGS / "samples.jsonl").open("a") as out:
            out.write(json.dumps(s) + "\n")
        shown = {k: v for k, v in s.items() if k in self.count or k.endswith(("fds", "threads"))}
        print(f"[{time.strftime('%H:%M:%S')}] {shown}", flush=True)
        return s


class Gate:
    """Readers pass while it is open. Closing waits for those within."""

    def __init__(self) -> None:
        self.changed, self.within, self.open = threading.Condition(), 0, True

    @contextlib.contextmanager
    def passed(self) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: self.open)
            self.within += 1
        try:
            yield
        finally:
            with self.changed:
                self.within -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Any:
        with self.changed:
            self.open = False
            self.changed.wait_for(lambda: not self.within)
        try:
            yield
        finally:
            with self.changed:
                self.open = True
                self.changed.notify_all()


def error(err: Exception) -> str:
    if isinstance(err, urllib.error.HTTPError):
        return f"{err}: {err.read().decode(errors='replace')[:500]}"
    return repr(err)


def group(pid: int) -> list[int]:
    """The processes of a server: it has a process group of its own."""
    out = []
    for p in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(p.name)) == pid:
                out.append(int(p.name))
    return out


def usage(name: str, pids: list[int]) -> dict[str, int]:
    return {f"{name} {kind}": n for kind, n in rig.use_of(pids).items()}


SLACK = 8  # descriptors and threads: connections of clients and of servers to each other


def leaks(samples: list[dict[str, Any]]) -> list[str]:
    first, last = samples[0], samples[-1]
    out = [f"{k} is {last[k]}" for k in last if any(k.endswith(n) for n in USED) and last[k]]
    for k in last:
        if k.endswith(("fds", "threads")) and last[k] > first[k] + SLACK:
            out.append(f"{k}: {first[k]} at the first rest, {last[k]} at the last")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    args = parser.parse_args()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    print(f"seed {args.seed}; the servers start (one to two minutes)", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:  # unix sockets have short names
        soak = Soak(pathlib.Path(dir), 0, args.seed)
        good = False
        try:
            soak.start()
            soak.until = time.monotonic() + args.minutes * 60
            good = soak.run()
        except rig.Failed as err:
            print(f"failed: {err}", file=sys.stderr)
        finally:
            soak.stop()
    print(f"{'ok' if good else 'FAILED'}: {dict(soak.count)}; logs in {LOGS}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
