"""What loads from host memory cost an engine that decodes, and how soon a prompt that is loaded is
answered meanwhile.

A window: the engine decodes several answers, and prompts arrive whose beginnings it has computed
before. In one arm of a pair they lie in host memory, in the other in its prefix cache: so both
compute the same, and store the same ends of prompts, which are new. Each window begins with the
same answers and an empty prefix cache.
"""

from __future__ import annotations

import concurrent.futures as cf
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from clients import prompt
from cluster import Failed, wait_for
from cost import STREAM_TOKENS, Streams, quantile
from multi import empty_prefix_cache
from pairs import MIB, Rig, say, summary
from servers import ask, request, send

if TYPE_CHECKING:
    from reuse import Offload, Ours

ARMS = {True: "with", False: "without"}
TTFT_GOAL, ITL_GOAL = 1.5, 0.01
EMPTY_S = 60.0  # until nothing runs, and the prefix cache is empty
WARM = 40  # tokens of each answer ahead of a window
MORE_S = 0.2  # of a window, behind the last arrival
HOST = 0.7  # of the host memory, that a window's prompts may take
TIMES = {"p50": 0.5, "p99": 0.99}


def options(parser: Any) -> None:
    parser.add_argument(
        "--busy",
        action="store_true",
        help="then the same engines while each decodes --streams answers: with loads and without",
    )
    parser.add_argument("--busy-pairs", type=int, default=8, help="of windows, for each engine")
    parser.add_argument("--busy-tokens", type=int, default=4096, help="of a prompt, loaded")
    parser.add_argument("--busy-tail", type=int, default=64, help="of a prompt, new")
    parser.add_argument("--busy-prompts", type=int, default=8, help="of a window")
    parser.add_argument("--busy-rate", type=float, default=10, help="prompts per second")


def check(rig: Rig) -> None:
    """A window's prompts must fit beside what is decoded, or both arms load."""
    a = rig.args
    token, tail = rig.token_bytes(), 2 * a.busy_prompts * a.busy_tail * (a.busy_pairs + 1)
    loaded, decoded = a.busy_prompts * (a.busy_tokens + a.busy_tail), a.streams * STREAM_TOKENS
    if a.busy_tokens + a.busy_tail + 1 >= rig.max_len:
        raise Failed("--busy-tokens: a prompt is longer than --max-len")
    if a.streams + a.busy_prompts > a.seqs:
        raise Failed("--streams and --busy-prompts: more than --seqs together")
    if (need := (loaded + decoded) * token // MIB) > rig.cache_bytes() // MIB:
        raise Failed(f"--busy: raise --cache-mb to {need}, or lower --busy-tokens, --busy-prompts")
    if (need := int((loaded + decoded + tail) * token / HOST) // MIB) > a.store_mb:
        raise Failed(f"--busy: raise --store-mb to {need}, or lower --busy-tokens, --busy-prompts")


class Busy:
    """One engine."""

    def __init__(self, side: Ours | Offload, rig: Rig) -> None:
        self.side, self.a, self.turn = side, rig.args, 0
        self.heads = [
            prompt(self.a.busy_tokens, ("busy", side.name, i)) for i in range(self.a.busy_prompts)
        ]
        self.windows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}

    def prompts(self) -> list[list[int]]:
        """With ends that no request had before."""
        self.turn += 1
        tail = self.a.busy_tail
        return [
            head + prompt(tail, ("tail", self.side.name, self.turn, i))
            for i, head in enumerate(self.heads)
        ]

    def store(self) -> None:
        for head in self.heads:
            before = self.side.stored()
            ask(self.side.server.url, head + [300])
            self.side.wait_stored(before, len(head))

    def window(self, loads: bool) -> dict[str, Any]:
        side, a = self.side, self.a
        wait_for("prefix cache empty", lambda: empty_prefix_cache(side.server), EMPTY_S, tick=0.02)
        if not loads:
            for head in self.heads:
                ask(side.server.url, head + [300])
        ready = [request(side.server.url, ids) for ids in self.prompts()]
        streams = Streams(side.server.port, a.streams)
        try:
            wait_for("engine decoding", lambda: len(streams.gaps) > WARM * a.streams, 60, tick=0.02)
            hits, cpu, start = side.loaded(), side.cpu_seconds(), time.perf_counter()
            with cf.ThreadPoolExecutor(len(ready)) as pool:
                waiting = []
                for i, one in enumerate(ready):
                    time.sleep(max(0.0, start + i / a.busy_rate - time.perf_counter()))
                    waiting.append(pool.submit(send, one))
                ttft = [1e3 * w.result()[0] for w in waiting]
            time.sleep(max(0.0, start + len(ready) / a.busy_rate + MORE_S - time.perf_counter()))
            end, cpu = time.perf_counter(), side.cpu_seconds() - cpu
            hits = side.loaded() - hits
        finally:
            streams.stop()
        gaps = [1e3 * gap for gap in streams.between(start, end)]
        if streams.errors or not gaps:
            raise Failed(f"{side.name}: a stream broke, or wrote nothing: {streams.errors[:3]}")
        return {
            "ttft": ttft,
            "mean": statistics.fmean(gaps),
            **{q: quantile(gaps, v) for q, v in TIMES.items()},
            "gaps": len(gaps),
            "hits": hits,
            "cpu": cpu,
            "s": end - start,
        }

    def pair(self, turn: int) -> None:
        """The first one is not counted."""
        for loads in (True, False) if turn % 2 else (False, True):
            got = self.window(loads)
            if turn >= 0:
                self.windows[loads].append(got)

    def report(self) -> dict[str, Any]:
        def each(loads: bool, key: str) -> dict[str, float]:
            return summary([w[key] for w in self.windows[loads]])

        more = {
            q: statistics.median(
                on[q] / off[q] for on, off in zip(*self.windows.values(), strict=False)
            )
            - 1
            for q in (*TIMES, "mean")
        }
        return {
            "ttft_ms": {
                what: summary([t for w in self.windows[loads] for t in w["ttft"]])
                for loads, what in ARMS.items()
            },
            "itl_ms": {
                what: {q: each(loads, q) for q in (*TIMES, "mean", "gaps")}
                for loads, what in ARMS.items()
            },
            "itl_more": more,
            "itl_goal_met": more["p50"] <= ITL_GOAL,
            "cpu_s": {what: each(loads, "cpu") for loads, what in ARMS.items()},
            "window_s": {what: each(loads, "s") for loads, what in ARMS.items()},
            "hits": {what: each(loads, "hits") for loads, what in ARMS.items()},
        }

    def problems(self) -> list[str]:
        if not self.side.loads:
            return []
        on, off = ([w["hits"] for w in windows] for windows in self.windows.values())
        if not on or min(on) < 0.9 * max(on) or max(off) > 0.1 * max(on) or not max(on):
            return [f"{self.side.name}, busy: loaded {on} with loads, and {off} without"]
        return []


def line(name: str, r: dict[str, Any]) -> str:
    ttft, itl, cpu = r["ttft_ms"], r["itl_ms"], r["cpu_s"]
    between = ", ".join(
        f"{q} {itl['without'][q]['median']:.2f} to {itl['with'][q]['median']:.2f} "
        f"({100 * r['itl_more'][q]:+.2f}%)"
        for q in r["itl_more"]
    )
    return (
        f"{name}: first token loaded {ttft['with']['median']:.1f} (p90 {ttft['with']['p90']:.1f}), "
        f"had {ttft['without']['median']:.1f} ms; between tokens {between} ms; "
        f"CPU {cpu['without']['median']:.2f} to {cpu['with']['median']:.2f} s"
    )


def measure(sides: list[Ours | Offload], rig: Rig, out: dict[str, Any]) -> list[str]:
    """Fills out, also while it goes on."""
    a, all_ = rig.args, [Busy(side, rig) for side in sides]
    out |= {
        "streams": a.streams,
        "tokens": a.busy_tokens,
        "tail": a.busy_tail,
        "prompts": a.busy_prompts,
        "rate": a.busy_rate,
        "gb_per_window": a.busy_prompts * a.busy_tokens * rig.token_bytes() / 1e9,
        "engines": {},
    }
    for one in all_:
        one.store()
    say(f"busy: {json.dumps({k: v for k, v in out.items() if k != 'engines'})}")
    for turn in range(-1, a.busy_pairs):
        for one in all_ if turn % 2 else reversed(all_):
            one.pair(turn)
            if turn >= 0:
                out["engines"][one.side.name] = one.report()
                out |= ratio(out["engines"])
    return [p for one in all_ for p in one.problems()]


def ratio(engines: dict[str, Any]) -> dict[str, float]:
    """How many times as soon as with the better of vLLM's connectors ours has loaded."""
    first = {name: r["ttft_ms"]["with"]["median"] for name, r in engines.items()}
    theirs = [first[name] for name in ("offloading", "simple") if name in first]
    ours = first.get("kvspray-offloading")
    return {"ttft_ratio": min(theirs) / ours} if theirs and ours else {}


def show(out: dict[str, Any]) -> None:
    for name, r in out["engines"].items():
        print(f"  busy {line(name, r)}")
    if "ttft_ratio" in out:
        print(
            f"  busy: first token {out['ttft_ratio']:.2f} times as soon as vLLM's better one "
            f"(goal {TTFT_GOAL})",
            flush=True,
        )
    missed = [name for name, r in out["engines"].items() if not r["itl_goal_met"]]
    goal = f"{100 * ITL_GOAL:.0f}% more between tokens, median"
    print(f"  busy: goal of {goal}: {'missed by ' + ', '.join(missed) if missed else 'met'}")
