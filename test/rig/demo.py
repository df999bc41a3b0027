#!/usr/bin/env python3
"""The demonstration: prefill on one vLLM, decode on another, two sidecars move the KV cache between
them.

It starts two sidecars, a prefill engine, a decode engine, a plain engine and the proxy (once per
dispatch mode) as separate processes on loopback, sends the same prompts through the pair and to the
plain engine, and compares: tokens, the hash of every transferred block on both sides, bytes moved
against bytes expected. The exit status is 0 only if all of it is equal, the decode engine
recomputed nothing that should have moved, prefill was preempted, and of long prompts most bytes
landed before the prefill's last step ended. The last two are a matter of pace. Where less than that
landed of a long prompt, two others of its length follow, and the median of the three counts: busy
processors may spoil one, and one that went well excuses nothing. All of them are shown. A
preemption that did not come about is tried for twice more.

Environment: FLIP=1 (or --flip) puts a process on the wire that flips one bit. INTEGRITY=off|on
chooses the case; without it both run, first off (which must turn red), then on (one slice refused,
one retry, green); the status is then that of the red one. TRANSPORT=tcp|shm; FLIP wants a wire, so
tcp.
"""

from __future__ import annotations

import concurrent.futures as cf
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cluster import ROOT, Failed, Sidecar, free_port, total, wait_for  # noqa: E402
from hosts import cpu  # noqa: E402
from resident import Resident  # noqa: E402
from servers import (  # noqa: E402
    Answer,
    Proxy,
    Server,
    complete,
    end_on_signals,
    give_up,
    ignore_signals,
    kvspray_config,
    sessions,
    wait_up,
)

BUILD = pathlib.Path(os.environ.get("KVSPRAY_BUILD", ROOT / ".build"))
LOGS = BUILD / "demo"
HOST, MODEL = cpu(BUILD), "tiny-llama"
STEP_TOKENS = 256
PAGE_BYTES = 16384  # of a block in one layer
# In four layers; a block that is not full moves as far as it is.
TOKEN_BYTES = 4 * PAGE_BYTES // HOST.block
FLIPPER = ROOT / ".build" / "bin" / "wireflip"
FLIP_FRAME = 3  # the data frame that is changed
MODES = ("concurrent", "prefill-first")
TRANSPORTS = ("tcp", "shm")
# What a pass with a flipped bit sends.
FEW = ("65 tokens", "513 tokens", "1024 tokens", "2048 tokens", "a list of prompts")
HASH_KEYS = ("xfer", "hash", "dest", "group", "layer", "block")
EARLY_TOKENS = 8 * STEP_TOKENS  # prompts that take eight prefill steps or more
EARLY_SHARE = 0.75
# In which what has happened shows in traces and metrics; vLLM's statistics come once a second.
SHOWN_S = 5.0
TRIES = 3  # for a case whose point is a matter of pace
GREEN, RED, BOLD, PLAIN = (
    ("\033[32m", "\033[31m", "\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "", "", "")
)

START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


class Case:
    """Requests that are sent together, and what they should come to."""

    def __init__(
        self,
        name: str,
        prompts: list[Any],
        n: int = 1,
        together: bool = False,
        preempts: bool = False,
    ) -> None:
        self.name, self.prompts, self.n, self.together, self.preempts = (
            name,
            prompts,
            n,
            together,
            preempts,
        )

    def streams(self, mode: str) -> bool:
        """Most of it should land while it is computed."""
        return (
            mode == "concurrent"
            and len(self.prompts) == 1
            and self.n == 1
            and len(self.prompts[0]) >= EARLY_TOKENS
        )

    def sequences(self) -> list[list[int]]:
        """The token sequences that the decode engine serves."""
        out = []
        for p in self.prompts:
            for one in p if isinstance(p[0], list) else [p]:
                out += [one] * self.n
        return out


def cases(mode: str, salt: str) -> list[Case]:
    """salt: a pass after another one needs prompts of its own, or decode would find them in its
    prefix cache."""

    def prompt(n: int, seed: object) -> list[int]:
        r = random.Random(str((salt, seed)))
        return [r.randrange(300, 1000) for _ in range(n)]

    if mode == "prefill-first":
        return [Case(f"{n} tokens", [prompt(n, ("pf", n))]) for n in (1, 33, 200, 513, 2048)] + [
            Case("two samples", [prompt(150, "pf n")], n=2),
            Case("a list of prompts", [[prompt(60 + 30 * i, ("pf list", i)) for i in range(3)]]),
        ]
    base_d, base_p = prompt(160, "base D"), prompt(600, "base P")
    lengths = (1, 2, 5, 16, 31, 32, 33, 64, 65, 100, 129, 255, 256, 257, 513, 700, 1024)
    return (
        [Case(f"{n} tokens", [prompt(n, n)]) for n in lengths]
        + [Case(f"{n} tokens", [prompt(n, n)]) for n in (2048, 2049, 3000, 4096)]
        + [
            Case("a prefix for decode", [base_d]),
            Case("prefix hit on decode", [base_d + prompt(90, "tail D")]),
            Case(
                "prefix hits on prefill, not computed yet",
                [base_p + prompt(30 + i, ("tail P", i)) for i in range(3)],
                together=True,
            ),
            Case("two samples", [prompt(150, "n")], n=2),
            Case("a list of prompts", [[prompt(60 + 30 * i, ("list", i)) for i in range(3)]]),
            Case(
                "six at once", [prompt(100 + 61 * i, ("six", i)) for i in range(6)], together=True
            ),
            Case(
                "preemption by a full pool",
                [prompt(3200, ("big", i)) for i in range(2)],
                together=True,
                preempts=True,
            ),
        ]
    )


class Demo:
    def __init__(self) -> None:
        shutil.rmtree(LOGS, ignore_errors=True)
        LOGS.mkdir(parents=True)
        # Unix sockets have short names; a checkout may have a long one.
        self.run = pathlib.Path(tempfile.mkdtemp(prefix="kvs-demo-"))
        self.transport = os.environ.get("TRANSPORT", TRANSPORTS[0])
        self.sidecars: list[Sidecar] = []
        self.flipper: subprocess.Popen[str] | None = None
        self.proxies: dict[str, Proxy] = {}
        self.servers: list[Server] = []
        self.resident = Resident()
        self.sent = 0

    # ---- processes

    def start_sidecars(self, integrity: str, flip: bool) -> None:
        """Sidecars of this integrity level, in the place of earlier ones: engines and routers see
        no change."""
        for s in self.sidecars:
            s.stop()
        self.stop_flipper()
        rails = []
        if not self.sidecars:
            self.sidecars = [
                Sidecar(name, self.run) for name in ("prefill-sidecar", "decode-sidecar")
            ]
        for s in self.sidecars:
            s.log = LOGS / f"{s.name}.log"
            s.transfers, s.hashes = (
                LOGS / f"{s.name}.{integrity}.transfers.jsonl",
                LOGS / f"{s.name}.{integrity}.blocks.jsonl",
            )
            s.config["trace"] = {"transfers": str(s.transfers), "block_hashes": str(s.hashes)}
            tcp: dict[str, Any] = {"integrity": "crc32c" if integrity == "on" else "off"}
            if flip:
                # Lanes to a rail go to its advertised address: to the flipper, which passes them on
                # to the real one.
                real, shown = free_port(), free_port()
                tcp["rails"] = [
                    {"name": "lo", "listen": f"127.0.0.1:{real}", "advertise": f"127.0.0.1:{shown}"}
                ]
                rails.append((f"127.0.0.1:{shown}", f"127.0.0.1:{real}"))
            s.config["transports"] = {"order": [self.transport], "tcp": tcp}
        if flip:
            # Data goes over the lanes of the process that dialled first: one process counts them
            # all, so that one bit is flipped.
            listen, target = (",".join(addresses) for addresses in zip(*rails, strict=True))
            with (LOGS / f"flip.{integrity}.jsonl").open("w") as out:
                self.flipper = subprocess.Popen(
                    [str(FLIPPER), "-listen", listen, "-target", target, "-frame", str(FLIP_FRAME)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    text=True,
                )
        for s in self.sidecars:
            s.start()
        say(
            f"two sidecars: transport {self.transport}, integrity "
            f"{integrity}{', one bit will flip on the wire' if flip else ''}"
        )

    def start_engines(self) -> None:
        sp, sd = self.sidecars
        steps = ["--max-num-batched-tokens", str(STEP_TOKENS)]
        big = ["--kv-cache-memory-bytes", str(128 << 20)]
        # P's pool holds one and a half of the two prompts of the case for it, and P lets both in:
        # it has to preempt, also when the second one comes ten steps after the first.
        small = [
            "--kv-cache-memory-bytes",
            str(10 << 20),
            "--no-scheduler-reserve-full-isl",
            "--long-prefill-token-threshold",
            "128",
        ]
        self.p = Server("prefill", LOGS)
        self.d = Server("decode", LOGS)
        self.r = Server("plain", LOGS)
        self.servers = [self.p, self.d, self.r]
        self.p.start(HOST, MODEL, kvspray_config(sp.socket, "kv_producer"), *steps, *small)
        self.d.start(HOST, MODEL, kvspray_config(sd.socket, "kv_consumer"), *steps, *big)
        self.r.start(HOST, MODEL, None, *steps, *big)
        say("three vLLM servers start: prefill, decode, plain (a minute or two)")
        wait_up(self.servers, say)
        for mode in MODES:
            self.proxies[mode] = Proxy(f"proxy-{mode}", LOGS).start(
                mode, self.p.url, sp.endpoint, self.d.url
            )
        for proxy in self.proxies.values():
            wait_for(f"{proxy.name} up", proxy.up, 15)
        say("the proxy is up, once per dispatch mode")
        self.resident.hold(
            pid for s in (*self.servers, *self.proxies.values(), *self.sidecars) for pid in s.pids()
        )
        say(
            f"{self.resident.bytes >> 20} MiB of programs locked in memory, "
            f"{self.resident.refused >> 20} MiB not (ulimit -l): only timings differ"
        )

    def wait_sessions(self) -> None:
        """Both engines have found their sidecars: worker and scheduler have their sessions."""

        for s in self.sidecars:
            wait_for(f"engine sessions at {s.name}", lambda s=s: sessions(s.metrics), 60, tick=0.1)
        say("both engines have found their sidecars")

    def stop(self) -> None:
        for proxy in self.proxies.values():
            proxy.stop()
        for s in self.servers:
            s.stop()
        for sidecar in self.sidecars:
            sidecar.stop()
        self.stop_flipper()
        shutil.rmtree(self.run, ignore_errors=True)

    def stop_flipper(self) -> None:
        if self.flipper is not None:
            self.flipper.terminate()
            self.flipper.wait()
            self.flipper = None

    def running(self) -> float:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(total(s.metrics(), name) for s in (self.p, self.d) for name in names)

    # ---- prompts

    def ask(self, port: int, case: Case, rid: str) -> list[Answer]:
        def one(i: int) -> Answer:
            return complete(port, case.prompts[i], n=case.n, rid=f"{rid}x{i}")

        if not case.together:
            return [one(i) for i in range(len(case.prompts))]
        with cf.ThreadPoolExecutor(len(case.prompts)) as pool:
            return list(pool.map(one, range(len(case.prompts))))

    def send(self, v: Verdict, mode: str, case: Case) -> None:
        self.sent += 1
        rid = f"demo{self.sent}"
        got = self.ask(self.proxies[mode].port, case, rid)
        want = self.ask(self.r.port, case, rid)
        same = True
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            v.prompts += len(w.tokens)
            if g.error or w.error:
                v.fail(f"{mode}, {case.name}: {g.error or w.error}")
                same = False
            elif g.tokens != w.tokens:
                v.fail(f"{mode}, {case.name}, prompt {i}: tokens {g.tokens}, plain {w.tokens}")
                same = False
            else:
                v.equal += len(g.tokens)
        if case.streams(mode):
            v.streamed[f"cmpl-{rid}x0-"] = len(case.prompts[0])
        if (
            len(case.prompts) == 1
            and case.n == 1
            and not isinstance(case.prompts[0][0], list)
            and same
        ):
            v.ttft.append((mode, len(case.prompts[0]), got[0].ttft_s, want[0].ttft_s))
        for seq in case.sequences():
            v.sequences += 1
            v.tokens += len(seq)
        times = ", ".join(
            f"{1e3 * g.ttft_s:.0f}/{1e3 * w.ttft_s:.0f}" for g, w in zip(got, want, strict=True)
        )
        say(
            f"  {mode:13} {case.name:42} {mark(same, 'equal', 'DIFFERENT')}   first token, "
            f"pair/plain: {times} ms"
        )

    def missed(self, v: Verdict, mode: str, case: Case) -> str | None:
        """Why a case that was sent last did not come to its point, so far as that is a matter of
        pace."""
        if case.preempts:
            if shows(
                "a preemption", lambda: total(self.p.metrics(), "vllm:num_preemptions_total") > 0
            ):
                return None
            return "prefill had room for both and was not preempted"
        if not case.streams(mode):
            return None
        sp, sent = self.sidecars[0], len(v.streamed)

        def read() -> bool:
            v.traces = [t for t in sp.lines(sp.transfers) if t.get("side") == "source"]
            return len(v.early()) >= sent

        if shows("the trace", read) and v.early()[-1][1] < EARLY_SHARE:
            return f"{100 * v.early()[-1][1]:.0f}% landed before prefill's last step ended"
        return None

    def measure(self, v: Verdict, salt: str, few: bool) -> None:
        """Sends the prompts and collects what became of them."""
        before, p_before = self.d.metrics(), self.p.metrics()
        for mode in MODES:
            for i, case in enumerate(cases(mode, salt)):
                if few and case.name not in FEW:
                    continue
                self.send(v, mode, case)
                missed = None if few else self.missed(v, mode, case)
                if missed is None:
                    continue
                for again in range(2, TRIES + 1):
                    say(f"  {mode:13} {missed}: other prompts, try {again} of {TRIES}")
                    self.send(v, mode, cases(mode, f"{salt}, try {again}")[i])
                    if case.preempts and self.missed(v, mode, case) is None:
                        break
        wait_for("the engines to be idle", lambda: self.running() == 0, 40)
        time.sleep(1.5)  # vLLM shows its statistics once a second at most
        after, p_after = self.d.metrics(), self.p.metrics()

        def grew(name: str, **labels: str) -> int:
            return int(total(after, name, **labels) - total(before, name, **labels))

        source = "vllm:prompt_tokens_by_source_total"
        v.hits, v.loaded, v.computed = (
            grew(source, source=x)
            for x in ("local_cache_hit", "external_kv_transfer", "local_compute")
        )
        v.transfers = grew("vllm:kvspray_transfers_total", side="received", outcome="ok")
        v.failed = grew("vllm:kvspray_transfers_total", side="received") - v.transfers
        v.moved = grew("vllm:kvspray_bytes_total", side="received")
        v.recomputed, v.alone = (
            grew("vllm:kvspray_recompute_tokens_total"),
            grew("vllm:kvspray_local_prefills_total"),
        )
        v.preemptions = int(
            total(p_after, "vllm:num_preemptions_total")
            - total(p_before, "vllm:num_preemptions_total")
        )
        sp, sd = self.sidecars
        v.traces = [t for t in sp.lines(sp.transfers) if t.get("side") == "source"]
        v.hashes = block_hashes(sp.lines(sp.hashes)), block_hashes(sd.lines(sd.hashes))
        metrics = [s.metrics() for s in self.sidecars]
        v.refused = int(
            sum(total(m, "kvspray_lane_frames_refused_total", reason="checksum") for m in metrics)
        )
        v.retries = int(
            sum(
                total(m, "kvspray_lane_attempts_total", outcome="rejected", reason="checksum")
                for m in metrics
            )
        )

    def abandon(self, v: Verdict) -> None:
        r = random.Random("gone")
        for after in (0.02, 0.15, 0.4):
            give_up(
                self.proxies["concurrent"].port,
                [r.randrange(300, 1000) for _ in range(2000)],
                after,
            )
        wait_for("the abandoned requests to end", lambda: self.running() == 0, 40)
        say("  concurrent    three clients that went away in the middle; the engines serve on")
        w = Verdict()
        self.send(
            w,
            "concurrent",
            Case("after the abandoned requests", [[r.randrange(300, 1000) for _ in range(300)]]),
        )
        v.problems += w.problems


class Verdict:
    """What one pass came to."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.prompts = self.equal = self.sequences = self.tokens = 0
        self.hits = self.loaded = self.computed = self.transfers = self.failed = self.moved = 0
        self.recomputed = self.alone = self.preemptions = self.refused = self.retries = 0
        self.ttft: list[tuple[str, int, float, float]] = []
        self.streamed: dict[str, int] = {}  # start of the request's id: tokens
        self.traces: list[dict[str, Any]] = []
        self.hashes: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def fail(self, text: str) -> None:
        self.problems.append(text)

    def early(self) -> list[tuple[int, float]]:
        """(tokens, share of the bytes that landed before the last prefill step ended) of each try
        of a long prompt, in the order sent."""
        out = []
        for prefix, n in self.streamed.items():
            out += [
                (n, t.get("early_bytes", 0) / t["bytes"])
                for t in self.traces
                if t.get("req", "").startswith(prefix) and t.get("bytes")
            ]
        return out

    def judge(self, few: bool) -> None:
        """Turns the figures into problems. Nothing here may pass on an empty record."""
        if self.equal != self.prompts or not self.prompts:
            self.fail(f"{self.equal} of {self.prompts} answers equal")
        if self.transfers != self.sequences or self.failed or self.recomputed or self.alone:
            self.fail(
                f"{self.sequences} sequences, but {self.transfers} transfers, {self.failed} "
                f"failed, {self.recomputed} tokens recomputed, {self.alone} served alone"
            )
        if self.computed > self.sequences:
            self.fail(
                f"decode computed {self.computed} prompt tokens for {self.sequences} sequences; "
                "one each is the rule"
            )
        expected = (self.tokens - self.hits) * TOKEN_BYTES
        if self.moved != expected:
            self.fail(f"{self.moved} bytes moved, {expected} expected")
        ours, theirs = self.hashes
        differ = [k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)]
        if differ or len(ours) * PAGE_BYTES < self.moved:
            pages = len(ours.keys() | theirs.keys())
            self.fail(
                f"{len(differ)} of {pages} transferred pages have another hash on the other side, "
                f"for example {differ[:3]}"
            )
        if not few:
            if not self.preemptions:
                self.fail("prefill was never preempted; the case for it has lost its point")
            early = self.early()
            if len(early) != len(self.streamed) or not early:
                self.fail(
                    f"{len(early)} traces of {len(self.streamed)} long prompts with concurrent "
                    "dispatch"
                )
            # One try, or three where the first was late.
            usual = {n: statistics.median(x for m, x in early if m == n) for n, _ in early}
            late = [f"{n} tokens: {100 * x:.0f}%" for n, x in usual.items() if x < EARLY_SHARE]
            if late:
                self.fail(
                    f"of long prompts less than {100 * EARLY_SHARE:.0f}% landed before prefill's "
                    f"last step ended: {', '.join(late)}"
                )

    def show(self) -> None:
        ours, theirs = self.hashes
        agree = sum(1 for k in ours if theirs.get(k) == ours[k])
        expected = (self.tokens - self.hits) * TOKEN_BYTES
        early = self.early()
        rows = [
            ("answers equal to the plain engine's", f"{self.equal} of {self.prompts}"),
            ("transfers (one per sequence)", f"{self.transfers} of {self.sequences}"),
            (
                "pages with equal hashes on both sides",
                f"{agree} of {len(ours.keys() | theirs.keys())}",
            ),
            ("bytes moved, expected", f"{self.moved}, {expected}"),
            (
                "prompt tokens loaded, hit, computed by decode",
                f"{self.loaded}, {self.hits}, {self.computed}",
            ),
            ("tokens recomputed, requests served alone", f"{self.recomputed}, {self.alone}"),
            ("preemptions on prefill", str(self.preemptions)),
            ("slices refused (checksum), retried", f"{self.refused}, {self.retries}"),
        ]
        if early:
            rows.append(
                (
                    "landed before prefill's last step ended",
                    ", ".join(f"{n}: {100 * x:.0f}%" for n, x in early),
                )
            )
        print()
        for what, value in rows:
            print(f"  {what:46} {value}")
        if self.ttft:
            print(f"\n  {'time to first token, ms':24} {'tokens':>7} {'pair':>8} {'plain':>8}")
            for mode, n, pair, plain in self.ttft:
                print(f"  {mode:24} {n:7d} {1e3 * pair:8.1f} {1e3 * plain:8.1f}")
            print(
                "  (all engines share this machine's cores: prefill, decode and transfer take "
                "turns where a plain engine works alone)"
            )
        print()


def block_hashes(lines: list[dict[str, Any]]) -> dict[str, str]:
    """{what identifies a page in both sidecars' records: its hash}; a page that was sent again
    counts as it was in the end."""
    return {"/".join(str(b[k]) for k in HASH_KEYS): b["sha256"] for b in lines}


def mark(ok: bool, yes: str, no: str) -> str:
    return f"{GREEN if ok else RED}{yes if ok else no}{PLAIN}"


def shows(what: str, cond: Callable[[], bool]) -> bool:
    """Whether it shows in time."""
    try:
        return bool(wait_for(what, cond, SHOWN_S, tick=0.05))
    except Failed:
        return False


def one_pass(demo: Demo, integrity: str, flip: bool) -> Verdict:
    v = Verdict()
    demo.measure(v, integrity, few=flip)
    if not flip:
        demo.abandon(v)
    v.judge(few=flip)
    return v


def passes(demo: Demo, levels: list[str], flip: bool) -> list[bool]:
    """One pass per level; whether each had problems."""
    colours = []
    for i, integrity in enumerate(levels):
        demo.start_sidecars(integrity, flip)
        if i == 0:
            demo.start_engines()
        demo.wait_sessions()
        v = one_pass(demo, integrity, flip)
        if flip:
            flipped = [
                line
                for line in (LOGS / f"flip.{integrity}.jsonl").read_text().splitlines()
                if '"flipped"' in line
            ]
            say(f"on the wire: {flipped or 'nothing was flipped'}")
            if len(flipped) != 1:
                v.fail(
                    f"{len(flipped)} bits were flipped on the wire, want one: the case has lost "
                    "its point"
                )
            want = 1 if integrity == "on" else 0
            if (v.refused, v.retries) != (want, want):
                v.fail(f"{v.refused} slices refused and {v.retries} retried, want {want} of each")
        v.show()
        for problem in v.problems[:12]:
            print(f"  {RED}{problem}{PLAIN}")
        case = (
            f"transport {demo.transport}, integrity "
            f"{integrity}{', one bit flipped' if flip else ''}"
        )
        print(f"{BOLD}{mark(not v.problems, 'GREEN', 'RED')}{PLAIN}  {case}\n", flush=True)
        colours.append(bool(v.problems))
    return colours


def main() -> int:
    flip = "--flip" in sys.argv[1:] or os.environ.get("FLIP", "") not in ("", "0")
    wanted = os.environ.get("INTEGRITY", "")
    if wanted not in ("", "on", "off"):
        print(f"INTEGRITY={wanted}: want on or off", file=sys.stderr)
        return 2
    if (transport := os.environ.get("TRANSPORT", TRANSPORTS[0])) not in TRANSPORTS:
        print(f"TRANSPORT={transport}: want {' or '.join(TRANSPORTS)}", file=sys.stderr)
        return 2
    if flip and transport != "tcp":
        print(
            f"FLIP=1 with TRANSPORT={transport}: the bit is flipped on a tcp connection; leave "
            "TRANSPORT out",
            file=sys.stderr,
        )
        return 2
    levels = [wanted] if wanted else (["off", "on"] if flip else ["on"])
    demo = Demo()
    try:
        try:
            colours = passes(demo, levels, flip)
        finally:
            # In a block of its own: a signal that comes just before it still meets the other one.
            ignore_signals()
    finally:
        say("stopping everything")
        demo.stop()
    say(f"logs and traces: {LOGS}")
    if levels == ["off", "on"] and colours == [True, False]:
        say(
            "as it has to be: red where nobody checks, green where the damage is noticed; the exit "
            "status is that of the red one"
        )
    return 1 if any(colours) else 0


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(main())
    except Failed as err:
        print(f"demo: {err}", file=sys.stderr)
        sys.exit(1)
