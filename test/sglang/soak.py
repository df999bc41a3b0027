#!/usr/bin/env python3
"""SGLang for an hour: prefill with HiCache on the sidecar's store, decode, and random aborts.

Clients send prompts, a fifth of them repeated, to the pair and to a plain server. They give up a
random quarter at both servers of the pair; those do not go to the plain server. Every minute the
pair's own caches are emptied, so that later prompts come from the store.

An answer must equal the plain server's, except for near ties: another token of nearly equal
probability (TIE), as sums depend on cache and batch. One in a hundred may be a tie. Only requests
that were given up may fail.

After each minute no lease may be open. A server exits if it has lost a slot of its device pool
(SGLang's own check). The plug-in in stand_ins evicts the host pool; no slot of it may stay used.
Descriptors, threads and goroutines may grow by 8 after the first minute, and memory to 1.1 times
that of the fifth.

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
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
from typing import Any

from sglang_pair import ANSWER, Pair
from sglang_server import Server, counted, error_of, found, rig, servers, with_store

LOGS = pathlib.Path(os.environ.get("KVSPRAY_BUILD", rig.ROOT / ".build")) / "soak-sglang"
CLIENTS, REPEATED, KEPT = 3, 0.2, 12
TIE = 0.001  # of log probabilities
FIRST_ROOM = 1 << 40  # of requests given up; the router's random 63-bit rooms hardly collide
ENDED = ("KVTransferError", "abort", "Abort", "imeout", "timed out")  # their errors
# A server that learns of the end of a request before the request waits that long for the other
# side.
PARTNER_S = "20"


class Soak:
    def __init__(self, dir: pathlib.Path, seconds: float, seed: int) -> None:
        self.pair = Pair(dir, LOGS, config={"store": {"memory": "64MiB"}})
        idle = "--sleep-on-idle"
        self.plain = Server("plain", LOGS, [*self.pair.chunked, idle])
        self.pair.prefill.args = [
            *self.pair.prefill.args, idle, *with_store(self.pair.sidecars[0])
        ]  # fmt: skip
        self.pair.decode.args = [*self.pair.decode.args, idle]
        for s in (self.pair.prefill, self.pair.decode):
            s.env |= {
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
                "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": PARTNER_S,
                "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": PARTNER_S,
            }
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
        rig.wait_for("an answer of the pair", self.answers, 120, 0.5)

    def answers(self) -> bool:
        try:
            self.pair.router.generate([2, 3, 4], ANSWER)
        except urllib.error.HTTPError:  # a server or the router is not ready
            return False
        return True

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
                    text = error_of(err) if isinstance(err, urllib.error.HTTPError) else repr(err)
                    with self.lock:
                        self.wrong.append(f"a prompt of {len(ids)} tokens: {text}")

    def compare(self, ids: list[int]) -> None:
        want, _ = self.plain.generate(ids, ANSWER)
        got, cached = self.pair.router.generate(ids, ANSWER)
        with self.lock:
            self.count["from a cache" if cached else "computed"] += 1
            self.count["equal"] += got == want
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            gap = self.gap(ids + want[:at], want[at], got[at])
            with self.lock:
                self.count["near ties"] += gap < TIE
                if gap >= TIE:
                    self.wrong.append(
                        f"a prompt of {len(ids)} tokens, {cached} of them cached: {got}, want "
                        f"{want}; log probabilities differ by {gap:.4f}"
                    )

    def gap(self, ids: list[int], a: int, b: int) -> float:
        """Difference of the plain server's log probabilities of a and b as the next token."""
        body = {
            "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True, "top_logprobs_num": 5,
        }  # fmt: skip
        (top,) = self.plain.post("/generate", body)["meta_info"]["output_top_logprobs"]
        of = {token: logarithm for logarithm, token, _ in top}
        return abs(of.get(a, float("inf")) - of.get(b, float("-inf")))

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
            except urllib.error.HTTPError as err:
                text = error_of(err)
                if not any(word in text for word in ENDED):
                    with self.lock:
                        self.wrong.append(f"a request that is given up: {text}")
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
        """Empties the caches while no client is active. Returns counts and resource use."""
        with self.gate.closed():
            for c in self.pair.sidecars:
                if "kvspray_lease_open" not in rig.get(c.url + "/metrics"):
                    raise rig.Failed("a sidecar does not count its leases")
            rig.wait_for("no open lease", lambda: self.pair.leases() == 0, 60, 0.2)
            for s in (self.pair.prefill, self.pair.decode):
                s.forget()
            held: dict[str, Any] = {"minute": round(time.monotonic() / 60, 1), **self.count}
            for s in (self.pair.prefill, self.pair.decode):
                held |= usage(s.name, s.pids())
            for c in self.pair.sidecars:
                held |= usage(f"sidecar {c.name}", c.pids())
                held[f"sidecar {c.name} goroutines"] = counted(c, "go_goroutines")
            held["store hits"] = found(self.pair.sidecars[0])
            held["host slots left"] = self.host_slots()
            return held

    def host_slots(self) -> list[int]:
        """Host slots left at each emptying of the caches, from the log."""
        text = self.pair.prefill.log.read_text(errors="replace")
        return [int(n) for n in re.findall(r"kvspray rig: (\d+) host slots left", text)]

    def run(self) -> bool:
        samples: list[dict[str, Any]] = []
        with cf.ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self.client, n) for n in range(CLIENTS)]
            try:
                while cf.wait(clients, timeout=60).not_done:
                    samples.append(self.sample())
            finally:
                self.until = 0.0  # after an error the clients end, too
            for f in clients:
                f.result()
        samples.append(self.sample())
        for line in self.wrong:
            print(f"WRONG: {line}")
        left = leaks(samples)
        for line in left:
            print(f"LEFT: {line}")
        last, count = samples[-1], self.count
        enough = (
            len(samples) > 5 and count["given up"] > 0 and count["from a cache"] > 0
            and last["store hits"] > 0 and len(last["host slots left"]) >= len(samples)
            and count["near ties"] * 100 <= count["equal"]
        )  # fmt: skip
        if not enough:
            print(f"TOO LITTLE: {dict(count)}, {last}, {len(samples)} samples")
        return not self.wrong and not left and enough

    def sample(self) -> dict[str, Any]:
        s = self.rest()
        with (LOGS / "samples.jsonl").open("a") as out:
            out.write(json.dumps(s) + "\n")
        shown = {k: v for k, v in s.items() if k in self.count or k.endswith(("fds", "left"))}
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


def usage(name: str, pids: list[int]) -> dict[str, int]:
    return {f"{name} {kind}": n for kind, n in rig.use_of(pids).items()}


SLACK, GROWTH = 8, 1.1  # connections of clients and of servers to each other come and go


def leaks(samples: list[dict[str, Any]]) -> list[str]:
    first, settled, last = samples[0], samples[min(4, len(samples) - 1)], samples[-1]
    out = [f"host slots: {last['host slots left']}"] if any(last["host slots left"]) else []
    for k in last:
        if k.endswith(("fds", "threads", "goroutines")) and last[k] > first[k] + SLACK:
            out.append(f"{k}: {first[k]} in the first sample, {last[k]} in the last")
        if k.endswith("rss") and last[k] > GROWTH * settled[k]:
            out.append(f"{k}: {settled[k]} bytes in the fifth sample, {last[k]} in the last")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60, help="at least 7")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    args = parser.parse_args()
    servers.end_on_signals()
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
