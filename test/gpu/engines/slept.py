"""P and D of a pair sleep between prompts, and while a request is under way. Their caches are freed
meanwhile. After each wake-up the test compares pages and answers."""

from __future__ import annotations

import threading
import time
import urllib.request
from typing import Any

import nvml
from clients import prompt
from cluster import Failed, wait_for
from content import compared, table
from pairs import MODES, Pair, compare_answers, say, start_plain, summary, wait_up
from servers import Server, complete

NEEDS: set[str] = set()
SHARE = 0.95  # of the bytes of cache and weights; it is free while an engine sleeps
FREE_S = 3.0  # until it is free: a sidecar of this host unmaps a peer's memory within a second


def options(parser: Any) -> None:
    parser.add_argument(
        "--naps", type=int, default=20, help="sleeps of P, of D, or of both, in turns"
    )
    parser.add_argument("--nap-prompts", type=int, default=4, help="prompts after each wake-up")


def post(server: Server, path: str) -> float:
    start = time.perf_counter()
    request = urllib.request.Request(server.url + path, b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=180) as answer:
        answer.read()
    return time.perf_counter() - start


def nap(pair: Pair, plain: Server, turn: int, out: dict[str, list[float]]) -> list[str]:
    rig, gpu = pair.rig, nvml.open_first()
    weights = sum(f.stat().st_size for f in (rig.host.models / rig.model).glob("*.safetensors"))
    asleep = [[pair.p], [pair.d], [pair.p, pair.d]][turn % 3]
    under_way, problems, answers = None, [], []
    if turn % 2:
        ids = prompt(min(16000, rig.max_len // 2), f"under way {turn}")
        port = pair.proxies[MODES[turn // 2 % 2]].port
        under_way = threading.Thread(
            target=lambda: answers.append(complete(port, ids, max_tokens=8, rid=f"gone{turn}"))
        )
        under_way.start()
        time.sleep(0.05 * (turn % 5))
    before = gpu.free() if gpu else 0
    out["sleep_s"] += [post(s, "/sleep?level=1") for s in asleep]
    start, freed, want = time.perf_counter(), 0, SHARE * (rig.cache_bytes() + weights) * len(asleep)
    while gpu and freed < want and time.perf_counter() < start + FREE_S:
        time.sleep(0.01 if freed else 0)
        freed = gpu.free() - before
    out["freed_gib"].append(freed / (1 << 30))
    out["freed_after_s"].append(time.perf_counter() - start)
    out["wake_s"] += [post(s, "/wake_up") for s in asleep]
    if under_way is not None:
        under_way.join()
        good, what = compare_answers(plain, ids, complete(plain.port, ids, max_tokens=8), *answers)
        if pair.d not in asleep and not good:  # D was awake the whole time
            problems.append(f"nap {turn}: the answer under way differs: {what}")
    wait_for("both engines idle", pair.idle, 60, tick=0.1)
    wait_for("no lease open", lambda: pair.leases() == 0, 60, tick=0.1)
    if freed < want:
        problems.append(f"nap {turn}: {freed >> 20} MiB were freed, want {int(want) >> 20}")
    return problems


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, a = stage.rig, stage.args
    if rig.host.device != "cuda":
        raise Failed("slept: vLLM's sleep mode needs a GPU")
    pair, plain = Pair(rig, "pages"), None
    took: dict[str, list[float]] = {
        key: [] for key in ("sleep_s", "wake_s", "freed_gib", "freed_after_s")
    }
    out: dict[str, Any] = {"runs": []}
    problems: list[str] = []
    try:
        pair.start(sidecars_only=True)
        for side in range(len(pair.servers)):
            env = {"VLLM_SERVER_DEV_MODE": "1"}
            pair.start_engine(side, env=env, more=["--enable-sleep-mode"])
        plain = start_plain(rig)
        wait_up([*pair.engines(), plain])
        pair.route()
        pair.wait_sessions()
        for turn in range(-1, a.naps):  # first without a sleep
            problems += nap(pair, plain, turn, took) if turn >= 0 else []
            todo = [
                (f"look-{turn}-{i}", MODES[i % 2], prompt(n, f"{turn} {i}"))
                for i, n in zip(range(a.nap_prompts), (3000, 517, 12000, 33) * 8, strict=False)
                if n < rig.max_len
            ]
            got = compared(rig, pair, plain, todo, 8, 1)
            problems += [f"after nap {turn}: {p}" for p in got["problems"]]
            if got["moved"] != len(todo):
                problems.append(f"after nap {turn}: {got['moved']} of {len(todo)} prompts moved")
            out["runs"].append(got)
            if len(problems) > 8:
                break
        for key in ("prompts", "tokens", "moved", "pages", "pages_differ", "pages_unlike_plain",
                    "answers_equal", "answers_tied", "answers_as_p"):  # fmt: skip
            out[key] = sum(r[key] for r in out["runs"])
        table(out)
        out |= {key: summary(values) for key, values in took.items() if values}
        say(", ".join(f"{key} {out[key]['median']:.2f}" for key in took if took[key]))
    finally:
        if plain is not None:
            plain.stop()
        pair.stop()
    return out, problems
