"""Pages and tokens of many prompts: what P computed, what D read, what a plain engine computed."""

from __future__ import annotations

import concurrent.futures as cf
import json
import random
import time
from typing import Any

from clients import prompt
from cluster import total, wait_for
from multi import LOADED, STORED, empty_prefix_cache
from pairs import MODES, Pair, Rig, compare_answers, look_at, say
from servers import complete
from stage import PAGES, PLAIN, Stage

NEEDS = {PAGES, PLAIN}
SPECULATED = "vllm:spec_decode_num_{}_tokens_total"
LESS = 0.05  # of its drafts a decode engine may accept that much less than the plain engine


def options(parser: Any) -> None:
    parser.add_argument("--prompts", type=int, default=200, help="of part pages")
    parser.add_argument("--longest", type=int, default=32000)
    parser.add_argument(
        "--together", type=int, default=4, help="prompts under way at a time, of part pages"
    )
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument(
        "--again",
        type=int,
        default=20,
        help="with --multi: prompts that are sent a second time, with prefix caches emptied, so "
        "that OffloadingConnector loads them at P while kvspray moves them on to D",
    )
    parser.add_argument(
        "--like-plain",
        action="store_true",
        help="pages that are others than the plain engine's are a problem; with --together 1, "
        "since prompts that share steps are rounded otherwise",
    )


def lengths(n: int, longest: int, seed: object) -> list[int]:
    """From 1 to the longest, as many in each octave, with those around borders of blocks."""
    r = random.Random(str(seed))
    fixed = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049, longest]
    drawn = [int(2 ** r.uniform(0, (longest - 1).bit_length())) for _ in range(n)]
    out = [x for x in fixed if x <= longest] + [min(max(x, 1), longest) for x in drawn]
    return out[:n]


def compared(
    rig: Rig,
    pair: Pair,
    plain: Any,
    todo: list[tuple[str, str, list[int]]],
    tokens: int,
    together: int,
) -> dict[str, Any]:
    """Sends (id, mode, prompt), and compares answers with the plain engine's, and D's pages with
    P's and the plain engine's."""
    out: dict[str, Any] = {
        "prompts": len(todo),
        "tokens": sum(len(ids) for _, _, ids in todo),
        "answers_equal": 0,
        "answers_tied": 0,
        "answers_as_p": 0,
        "pages": 0,
        "pages_differ": 0,
        "pages_unlike_plain": 0,
        "moved": 0,
        "differences": [],
        "problems": [],
    }
    rig.so_far.setdefault("runs", []).append(out)

    def one(job: tuple[int, tuple[str, str, list[int]]]) -> tuple[str, str, list[int], Any, Any]:
        turn, (rid, mode, ids) = job
        decoder = pair.decoder(turn // len(MODES))
        got = complete(pair.proxy(mode, decoder).port, ids, max_tokens=tokens, rid=rid)
        plainly = complete(plain.port, ids, max_tokens=tokens, rid=rid)
        return rid, pair.names[decoder], ids, got, plainly

    with cf.ThreadPoolExecutor(together) as pool:
        results = pool.map(one, enumerate(todo))
        for done, (rid, decoder, ids, got, want) in enumerate(results, 1):
            good, what = compare_answers(plain, ids, want, got, pair.p)
            out["answers_equal"] += what is None
            out["answers_tied"] += bool(what and what.get("tie"))
            out["answers_as_p"] += bool(what and what.get("as_p"))
            if what:
                out["differences"].append({"rid": rid, **what})
            if not good:
                out["problems"].append(f"{rid}: answers differ: {what}")
            moved = look_at(rig, rid, ("P", "computed"), (decoder, "loaded"))
            if isinstance(moved, str):
                out["problems"].append(f"{moved} ({len(ids)} tokens)")
                continue
            out["moved"] += 1
            out["pages"] += moved.pages
            out["pages_differ"] += moved.differ
            if moved.differ:
                out["problems"].append(
                    f"{rid}: {moved.differ} of {moved.pages} pages are others at {decoder}, the "
                    f"first is {moved.first}"
                )
            like = look_at(rig, rid, ("P", "computed"), ("plain", "computed"))
            out["pages_unlike_plain"] += like.differ if not isinstance(like, str) else 0
            if done % 25 == 0:
                say(f"{done} of {len(todo)} prompts, {len(out['problems'])} problems")
    out["problems"] = out["problems"][:50]
    out["differences"] = out["differences"][:50]
    return out


def table(got: dict[str, Any]) -> None:
    print(
        f"prompts {got['prompts']} ({got['tokens']} tokens), moved {got['moved']}, pages "
        f"{got['pages']}, of them differ at D {got['pages_differ']}, "
        f"unlike the plain engine's {got['pages_unlike_plain']}; answers equal "
        f"{got['answers_equal']}, parted at a tie {got['answers_tied']}, as P by itself "
        f"{got['answers_as_p']}"
    )


def once_more(stage: Stage, todo: list[tuple[str, str, list[int]]]) -> dict[str, Any]:
    """The same prompts with empty prefix caches: P loads them by OffloadingConnector, and kvspray
    moves what was loaded on to D."""
    a, pair = stage.args, stage.pair
    wait_for("both engines idle", pair.idle, 30, tick=0.1)
    before = total(pair.p.metrics(), LOADED)
    for server in pair.engines():
        wait_for(f"{server.name}'s prefix cache empty", lambda s=server: empty_prefix_cache(s), 30)
    todo = [(f"{rid}-again", mode, ids) for rid, mode, ids in todo]
    got = compared(stage.rig, pair, stage.plain, todo, a.tokens, a.together)
    wait_for("both engines idle", pair.idle, 30, tick=0.1)
    p = pair.p.metrics()
    got |= {"offload_stored": total(p, STORED), "offload_loaded": total(p, LOADED) - before}
    print(
        f"again, from OffloadingConnector: {got['offload_loaded'] / 1e6:.1f} MB loaded at P of "
        f"{got['offload_stored'] / 1e6:.1f} MB stored",
    )
    table(got)
    if not got["offload_loaded"]:
        got["problems"].append("OffloadingConnector loaded nothing at P")
    if got["moved"] != got["prompts"]:
        got["problems"].append(f"again: {got['moved']} of {got['prompts']} prompts moved")
    return got


def accepted(server: Any) -> float:
    """The share of draft tokens that an engine has accepted; 0: it drafts none."""
    metrics = server.metrics()
    drafts = total(metrics, SPECULATED.format("draft"))
    return total(metrics, SPECULATED.format("accepted")) / drafts if drafts else 0.0


def speculation(stage: Stage) -> tuple[dict[str, float], list[str]]:
    """By engine, and what is wrong with it."""
    plain = accepted(stage.plain)
    got = {s.name: accepted(s) for s in stage.pair.engines() if s is not stage.pair.p}
    if not plain and not any(got.values()):
        return {}, []
    share = ", ".join(f"{name} {x:.1%}" for name, x in (got | {"plain": plain}).items())
    print(f"draft tokens accepted: {share}")
    problems = [
        f"{name} accepts {x:.1%} of its draft tokens, and the plain engine {plain:.1%}"
        for name, x in got.items()
        if x < plain - LESS
    ]
    return got | {"plain": plain}, problems


def captured(stage: Stage) -> tuple[int, list[str]]:
    """How many of P's layers are signalled in the replays of graphs, and what is wrong with that.
    Some have no hook, and leave at the end of a step."""
    of_p = stage.rig.pages / "P"
    layers = [
        x["name"]
        for g in json.loads((of_p / "layout.json").read_text())["groups"]
        for x in g["layers"]
    ]
    signalled = set(json.loads((of_p / "captured.json").read_text()))
    print(f"layers signalled in graphs: {len(signalled)} of {len(layers)}")
    a = stage.args
    expected = a.device == "cuda" and a.graph not in ("eager", "PIECEWISE")
    return len(signalled), ["no layer is signalled in graphs"] if expected > len(signalled) else []


def run(stage: Stage) -> tuple[dict[str, Any], list[str]]:
    a, start = stage.args, time.monotonic()
    longest = min(a.longest, stage.rig.max_len - a.tokens - 1)
    todo = [
        (f"look{i}", MODES[i % 2], prompt(n, i))
        for i, n in enumerate(lengths(a.prompts, longest, 1))
    ]
    got = compared(stage.rig, stage.pair, stage.plain, todo, a.tokens, a.together)
    table(got)
    got["drafts_accepted"], worse = speculation(stage)
    got["layers_captured"], unsignalled = captured(stage)
    problems = got["problems"] + worse + unsignalled
    if a.multi:
        got["again"] = once_more(stage, todo[-a.again :])
        problems += got["again"]["problems"]
    if a.like_plain and got["pages_unlike_plain"]:
        problems.append(f"{got['pages_unlike_plain']} pages are others than the plain engine's")
    if got["moved"] != got["prompts"] or not got["pages"]:
        problems.append(f"{got['moved']} of {got['prompts']} prompts moved")
    return {"took_s": time.monotonic() - start, **got}, problems
