"""kill -9 and SIGSTOP of sidecars and engines while prompts move: no wrong page, live engines,
canary blocks as they were, and transfers again afterwards. A victim falls at a random time of a
request's life, so that all phases are met."""

from __future__ import annotations

import concurrent.futures as cf
import json
import random
import signal
import time
from typing import Any

from clients import prompt
from cluster import Failed, Sidecar, wait_for
from pairs import MODES, compare_answers, look_at, say, wait_up
from servers import Server, complete, get
from stage import PAGES, PLAIN, Stage

NEEDS = {PAGES, PLAIN}
HEALTH_S = 60.0
STOPPED_S = (0.5, 4.0)
SIDES = ("prefill", "decode")
TOGETHER = 3
COLUMNS = (
    "rounds",
    "moved",
    "recomputed",
    "failed",
    "wrong_pages",
    "wrong_answers",
    "first_token_ms",  # the slowest one of a request that the fault met
    "healthy_ms",
    "canaries",
)


def options(parser: Any) -> None:
    parser.add_argument(
        "--sidecar-kills", type=int, default=10, help="of each sidecar, by each signal"
    )
    parser.add_argument(
        "--engine-kills", type=int, default=2, help="of each engine, by each signal"
    )
    parser.add_argument(
        "--kill-seconds", type=float, default=480, help="after which no other round begins"
    )
    parser.add_argument("--kill-tokens", type=int, default=4000, help="of the prompts under way")


class Faults:
    def __init__(self, stage: Stage) -> None:
        self.stage, self.pair, self.plain = stage, stage.pair, stage.plain
        self.sent = 0
        self.rng = random.Random("faults")
        self.tokens = min(stage.args.kill_tokens, stage.rig.max_len - 16)
        self.problems: list[str] = []
        self.rows: dict[str, dict[str, int]] = {}

    def send(self, n: int) -> tuple[str, list[int], Any]:
        self.sent += 1
        rid, mode = f"look-kill{self.sent}", MODES[self.sent % 2]
        ids = prompt(n, rid)
        return (
            rid,
            ids,
            complete(self.pair.proxies[mode].port, ids, max_tokens=8, rid=rid, timeout=90),
        )

    def span(self) -> float:
        """How long such a request takes when nothing is wrong."""
        start = time.monotonic()
        for _ in range(2):
            self.send(self.tokens)
        return (time.monotonic() - start) / 2

    def canary(self, what: str, tag: str) -> None:
        for server in self.pair.engines():
            complete(server.port, prompt(5, (what, tag)), max_tokens=1, rid=f"canary{what}-{tag}")

    def canaries(self, name: str, tag: str, row: dict[str, int]) -> None:
        for side in "PD":
            path = self.stage.rig.pages / side / f"cmpl-canarycheck-{tag}-0.canary.json"
            wait_for(str(path), path.exists, 20)
            got = json.loads(path.read_text())
            row["canaries"] += got["pages"]
            if got["changed"] or not got["pages"]:
                self.problems.append(f"{name}: canary pages of {side}: {got}")

    def healthy(self, row: dict[str, int]) -> float:
        """Until a prompt moves again, whole; seconds."""
        start = time.monotonic()
        while time.monotonic() < start + HEALTH_S:
            rid, _, answer = self.send(600)
            if not answer.error:
                got = look_at(self.stage.rig, rid, ("P", "computed"), ("D", "loaded"), timeout=1.0)
                if not isinstance(got, str):
                    row["wrong_pages"] += got.differ
                    return time.monotonic() - start
            time.sleep(0.3)
        self.problems.append(f"no transfer within {HEALTH_S:g} s after the fault")
        return HEALTH_S

    def round(self, name: str, victim: Sidecar | Server, sig: int, span: float) -> None:
        dies = (
            isinstance(victim, Server) and sig == signal.SIGKILL
        )  # its clients see it, and its canaries die with it
        row = self.rows.setdefault(name, dict.fromkeys(COLUMNS, 0))
        row["rounds"] += 1
        tag = f"{self.sent}"
        if not dies:
            self.canary("fill", tag)
        with cf.ThreadPoolExecutor(TOGETHER) as pool:
            sent = [pool.submit(self.send, self.tokens) for _ in range(TOGETHER)]
            time.sleep(self.rng.uniform(0, 1.2 * span))
            self.strike(victim, sig)
            answers = [s.result() for s in sent]
        slowest = max(int(1e3 * got.ttft_s) for _, _, got in answers)
        row["first_token_ms"] = max(row["first_token_ms"], slowest)
        row["healthy_ms"] = max(row["healthy_ms"], int(1e3 * self.healthy(row)))
        for rid, ids, got in answers:
            if got.error:
                row["failed"] += 1
                if not dies:
                    self.problems.append(f"{name}: {rid}: {got.error[:200]}")
                continue
            good, what = compare_answers(
                self.plain, ids, complete(self.plain.port, ids, max_tokens=8), got
            )
            row["wrong_answers"] += not good
            moved = look_at(self.stage.rig, rid, ("P", "computed"), ("D", "loaded"), timeout=0.3)
            row["moved" if not isinstance(moved, str) else "recomputed"] += 1
            row["wrong_pages"] += 0 if isinstance(moved, str) else moved.differ
            if not good:
                self.problems.append(f"{name}: {rid}: {what}")
        if not dies:
            self.canary("check", tag)
            self.canaries(name, tag, row)
        for server in self.pair.engines():
            get(server.url + "/health", 5.0)

    def strike(self, victim: Sidecar | Server, sig: int) -> None:
        if sig == signal.SIGSTOP:
            victim.stop_for(self.rng.uniform(*STOPPED_S))
        elif isinstance(victim, Sidecar):
            victim.kill()
            time.sleep(self.rng.uniform(0, 0.5))
            victim.start()
        else:
            victim.kill()
            say(f"{victim.name} starts again")
            self.pair.start_engine(self.pair.engines().index(victim))
            wait_up([victim])
            self.pair.wait_sessions()


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    f, a = Faults(stage), stage.args
    span = f.span()
    say(f"a prompt of {f.tokens} tokens takes {1e3 * span:.0f} ms")
    report: dict[str, Any] = {"span_ms": 1e3 * span, "faults": f.rows, "found": f.problems}
    stage.rig.so_far = report
    end = time.monotonic() + a.kill_seconds
    plan = [
        ("sidecar", f.pair.sidecars, a.sidecar_kills),
        ("engine", f.pair.engines(), a.engine_kills),
    ]
    left = 0
    try:
        for what, victims, times in plan:
            # Each fault in turn, so that all have been met where the time ends before the rounds.
            for _ in range(times):
                for sig in (signal.SIGSTOP, signal.SIGKILL):
                    for side, victim in zip(SIDES, victims, strict=True):
                        if time.monotonic() > end:
                            left += 1
                        else:
                            f.round(f"{side} {what}, {sig.name}", victim, sig, span)
    except Failed as err:
        f.problems.append(str(err))
    if left:
        f.problems.append(f"{left} rounds did not begin within {a.kill_seconds:g} s")
    print(
        f"{'victim':28} {'rounds':>6} {'moved':>6} {'alone':>6} {'failed':>6} "
        f"{'wrong pages':>11} {'wrong answers':>13} {'first token ms':>14} "
        f"{'healthy again within ms':>23}"
    )
    for name, r in f.rows.items():
        print(
            f"{name:28} {r['rounds']:6} {r['moved']:6} {r['recomputed']:6} {r['failed']:6} "
            f"{r['wrong_pages']:11} {r['wrong_answers']:13} {r['first_token_ms']:14} "
            f"{r['healthy_ms']:23}"
        )
    f.problems += [
        f"{name}: {r['wrong_pages']} wrong pages" for name, r in f.rows.items() if r["wrong_pages"]
    ]
    f.problems += [f"{s.name}: {p[:200]}" for s in f.pair.sidecars if (p := s.panics())]
    report.pop("found")
    return report, f.problems
