"""What a transfer adds to D's first token: D's latency for one token with the transfer, less
that of the same prompt at D again.

Prefill first: P's answer is there before D is asked. Concurrent: both are asked at once; what
counts is the time from P's answer to D's, and the whole beside a plain engine's first token,
which is D's own with a prompt that no engine has. Every prompt is new, and kinds take turns within
each round.
"""

from __future__ import annotations

import collections
import concurrent.futures as cf
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from clients import prompt
from cluster import Failed
from pairs import Pair, as_destination, as_source, new_xfer, say, summary
from servers import Server, ask, request, send
from stage import PAIR, Stage

NEEDS = {PAIR}
LENGTHS = "128,512,1024,2048,3900,16000,32000"
WARMUP = 2
DECODED = 32  # tokens, for the time of a decode step
TRACE_S = 5.0
BASE_MS = {"shm": 3.0, "tcp": 10.0}  # what a transfer may add beside the time of its bytes
EARLY = 0.9  # of the bytes, there before P's last step ends
STEP_MS = 5.0  # above a plain engine's first token, and a step of D's


def options(parser: Any) -> None:
    parser.add_argument(
        "--lengths", default=LENGTHS, help="tokens; longer ones than the engines take are left out"
    )
    parser.add_argument("--rounds", type=int, default=12, help="of each length")
    parser.add_argument(
        "--nixl", action="store_true", help="a second pair with NixlConnector, in turns"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE;...",
        help="measure once more with sidecars of another configuration, such as tcp:transports."
        'order=["tcp"]',
    )


class Turn:
    """One prompt in one way; milliseconds."""

    def __init__(self, stage: Stage, n: int, seed: object) -> None:
        self.stage, self.n, self.seed = stage, n, seed

    def ids(self, kind: str) -> list[int]:
        return prompt(self.n, (kind, self.n, self.seed))

    def prefill_first(self, pair: Pair) -> dict[str, float]:
        ids, rid = self.ids(pair.kind), f"pf-{self.n}-{self.seed}"
        p, answer = ask(pair.p.url, ids, as_source(), rid=rid)
        kv = answer.get("kv_transfer_params")
        if not kv:
            raise Failed(f"{pair.p.name} returned no kv_transfer_params")
        d, moved = ask(pair.d.url, ids, kv, rid=rid)
        again, local = ask(pair.d.url, ids)
        return {
            "p": 1e3 * p,
            "d": 1e3 * d,
            "again": 1e3 * again,
            "added": 1e3 * (d - again),
            "wrong": token(moved) != token(local),
        }

    def concurrent(self, pair: Pair) -> dict[str, float]:
        ids, xfer, rid = self.ids("concurrent"), new_xfer(), f"cc-{self.n}-{self.seed}"
        # Encoded ahead: one client would encode them one after the other.
        to_p = request(pair.p.url, ids, as_source(xfer), rid=rid)
        to_d = request(pair.d.url, ids, as_destination(xfer, pair.sidecars[0].endpoint), rid=rid)
        with cf.ThreadPoolExecutor(1) as pool:
            start = time.perf_counter()

            def prefill() -> float:
                send(to_p)
                return time.perf_counter()

            ended = pool.submit(prefill)
            _, moved = send(to_d)
            d = time.perf_counter()
            p = ended.result()
        again, local = ask(pair.d.url, ids)
        return {
            "p": 1e3 * (p - start),
            "d": 1e3 * (d - start),
            "again": 1e3 * again,
            "after_p": 1e3 * (d - p),
            "wrong": token(moved) != token(local),
        }

    def plain(self, server: Server, kind: str = "plain") -> dict[str, float]:
        seconds, _ = ask(server.url, self.ids(kind))
        return {"d": 1e3 * seconds, "wrong": False}


def token(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["token_ids"]


def shuffled(kinds: list[str], seed: object) -> list[str]:
    """In no fixed order: what an engine did just before makes a difference."""
    random.Random(str(seed)).shuffle(kinds)
    return kinds


def decode_step(server: Server, ids: list[int]) -> float:
    """Milliseconds, of a prompt that the engine has."""
    one, _ = ask(server.url, ids)
    many, _ = ask(server.url, ids, max_tokens=1 + DECODED)
    return 1e3 * (many - one) / DECODED


def of_sidecar(pair: Pair, rounds: int, start: str) -> dict[str, Any]:
    """The trace of P's sidecar about the transfers of one length."""
    end = time.monotonic() + TRACE_S
    while True:
        rows = [
            t
            for t in pair.traces()
            if t.get("req", "").startswith(f"cmpl-{start}")
            and "warm" not in t["req"]
            and t.get("outcome") == "ok"
            and t.get("bytes")
        ]
        if len(rows) >= rounds or time.monotonic() > end:
            break
        time.sleep(0.1)
    if not rows:
        return {}
    med = statistics.median
    return {
        "transfers": len(rows),
        "bytes": med(t["bytes"] for t in rows),
        "wire_ms": med(t.get("wire_us", 0) for t in rows) / 1e3,
        "took_ms": med(t.get("took_us", 0) for t in rows) / 1e3,
        "flag_ms": med(t.get("flag_us", 0) for t in rows) / 1e3,
        "early": med(t.get("early_bytes", 0) / t["bytes"] for t in rows),
    }


def length(stage: Stage, n: int, rounds: int, tag: str) -> dict[str, Any]:
    """tag: is in the name and the seed of each prompt, so that each is new to the engines."""
    pair = stage.pair
    kinds: dict[str, Callable[[Turn], dict[str, float]]] = {
        "prefill-first": lambda t: t.prefill_first(pair),
        "concurrent": lambda t: t.concurrent(pair),
        "plain": lambda t: t.plain(pair.d),
        "alone": lambda t: t.plain(pair.p, "alone"),
    }
    if stage.args.nixl:
        kinds["nixl"] = lambda t: t.prefill_first(stage.nixl)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    used: dict[str, dict[str, float]] = {kind: collections.defaultdict(float) for kind in kinds}
    for i in range(-WARMUP, rounds):
        turn = Turn(stage, n, f"{tag}{i}" if i >= 0 else f"{tag}warm{i}")
        for kind in shuffled(list(kinds), (n, turn.seed)):
            before = pair.cpu_seconds()
            got = kinds[kind](turn)
            if i >= 0:
                rows[kind].append(got)
                for name, seconds in pair.cpu_seconds().items():
                    used[kind][name] += 1e3 * (seconds - before[name]) / rounds
    out: dict[str, Any] = {
        kind: {
            "wrong": sum(r["wrong"] for r in got),
            "cpu_ms": used[kind],
            **{key: summary([r[key] for r in got]) for key in got[0] if key != "wrong"},
        }
        for kind, got in rows.items()
    }
    out["decode_step_ms"] = statistics.median(
        decode_step(pair.d, prompt(n, ("concurrent", n, f"{tag}{rounds - 1}"))) for _ in range(3)
    )
    out["prefill-first"] |= of_sidecar(pair, rounds, f"pf-{n}-{tag}")
    out["concurrent"] |= of_sidecar(pair, rounds, f"cc-{n}-{tag}")
    return out


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    out, problems = measure(stage, stage.args.transport, "")
    for variant in stage.args.variant:
        name, _, sets = variant.partition(":")
        stage.pair.configure(sets.split(";"))
        print(f"variant {name}: {sets}")
        try:
            more, found = measure(stage, "tcp" if name.startswith("tcp") else "shm", f"{name}-")
        except Failed as err:
            more, found = {}, [str(err)]
        out.setdefault("variants", {})[name] = {"sets": sets, **more}
        problems += [f"{name}: {p}" for p in found]
    if stage.args.time_hooks:
        out["hooks"] = {side: stage.pair.hooks(side) for side in "PD"}
    return out, problems


def measure(stage: Stage, transport: str, tag: str) -> tuple[dict[str, Any], list[str]]:
    a = stage.args
    lengths = [n for n in map(int, a.lengths.split(",")) if n + DECODED + 1 < stage.rig.max_len]
    out: dict[str, Any] = {"lengths": {}, "rounds": a.rounds}
    problems: list[str] = []
    head = (
        f"{'tokens':>6} {'plain':>7} {'P alone':>7} | {'P':>7} {'first: D adds':>13} {'p90':>7} "
        f"{'wire':>6} | {'P':>7} {'concurrent':>10} {'less plain':>10} {'after P':>7} {'flag':>6} "
        f"{'early':>5}"
    )
    print(head + (f" | {'NIXL adds':>9} {'p90':>7}" if a.nixl else "") + "   (median ms)")
    for n in lengths:
        got = out["lengths"][n] = length(stage, n, a.rounds, tag)
        pf, cc = got["prefill-first"], got["concurrent"]
        line = (
            f"{n:6} {got['plain']['d']['median']:7.1f} {got['alone']['d']['median']:7.1f} | "
            f"{pf['p']['median']:7.1f} {pf['added']['median']:13.2f} {pf['added']['p90']:7.2f} "
            f"{pf.get('wire_ms', 0):6.2f} | {cc['p']['median']:7.1f} "
        )
        less = cc["d"]["median"] - got["plain"]["d"]["median"]
        line += f"{cc['d']['median']:10.1f} {less:10.2f} {cc['after_p']['median']:7.2f} "
        line += f"{cc.get('flag_ms', 0):6.2f} {100 * cc.get('early', 0):4.0f}%"
        if a.nixl:
            line += f" | {got['nixl']['added']['median']:9.2f} {got['nixl']['added']['p90']:7.2f}"
        print(line + f"   decode step {got['decode_step_ms']:.2f}", flush=True)
        for kind in ("prefill-first", "concurrent"):
            if got[kind].get("transfers", 0) < a.rounds:
                problems.append(
                    f"{n} tokens, {kind}: {got[kind].get('transfers', 0)} transfers in the "
                    f"sidecar's trace, want {a.rounds}"
                )
            if got[kind]["wrong"]:
                say(
                    f"{n} tokens, {kind}: {got[kind]['wrong']} first tokens differ from the same "
                    f"prompt's at D again"
                )
    goals(stage, out, transport)
    return out, problems


def goals(stage: Stage, out: dict[str, Any], transport: str) -> None:
    """What is asked of kvspray at each length; the rate is that of the fastest length."""
    base, lengths = BASE_MS[transport], out["lengths"]
    rates = [g["prefill-first"] for g in lengths.values() if g["prefill-first"].get("wire_ms")]
    rate = out["bytes_per_ms"] = max((g["bytes"] / g["wire_ms"] for g in rates), default=0.0)
    missed = []
    for n, got in lengths.items():
        pf, cc, plain = got["prefill-first"], got["concurrent"], got["plain"]["d"]["median"]
        met = got["goals_met"] = {
            "prefill-first": bool(rate) and pf["added"]["median"] <= base + pf["bytes"] / rate,
            "after P's last step": cc.get("flag_ms", base + 1) <= base,
            "first token": cc["d"]["median"] - plain <= got["decode_step_ms"] + STEP_MS,
        }
        if n >= stage.rig.step_tokens:
            met["early"] = cc.get("early", 0) >= EARLY
        missed += [f"{what} at {n}" for what, good in met.items() if not good]
    print(f"steady rate {rate / 1e6:.2f} GB/s; goals missed: {', '.join(missed) or 'none'}")
