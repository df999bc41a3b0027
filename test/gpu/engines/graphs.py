"""Answers of engines without transfers, under load, in several graph modes, model runners and
attention backends, beside those of an eager engine that computes one prompt at a time.

This is the control of every other part that compares answers: what an engine gets wrong by itself
is no fault of a transfer. The eager engine under the same load gives the spread that rounding in
batches makes. Answers are compared at the first token that differs. This token is far if it is less
likely, by the eager engine alone, than that engine's own token: by more than the largest such gap
of the eager engine under load, and by more than TIE.
"""

from __future__ import annotations

import concurrent.futures as cf
import json
import random
import statistics
import time
from typing import Any

# isort: split
from clients import prompt
from cluster import Failed, Sidecar, total, wait_for
from pairs import CAPTURE, TIE, Rig, say, wait_up
from servers import Answer, Server, complete, kvspray_config

NEEDS: set[str] = set()
ALONE = "eager"
# name: (cudagraph_mode, compiled, runner, attention backend, more)
VARIANTS: dict[str, tuple[str, bool, str, str, str]] = {
    ALONE: ("eager", False, "v2", "FLASH_ATTN", ""),
    "full": ("FULL", False, "v2", "FLASH_ATTN", ""),
    "full-kvspray": ("FULL", False, "v2", "FLASH_ATTN", "kvspray"),
    "full-compiled": ("FULL", True, "v2", "FLASH_ATTN", ""),
    "full-v1": ("FULL", False, "v1", "FLASH_ATTN", ""),
    "full-compiled-v1": ("FULL", True, "v1", "FLASH_ATTN", ""),
    "full-compiled-kvspray": ("FULL", True, "v2", "FLASH_ATTN", "kvspray"),
    "full-triton": ("FULL", False, "v2", "TRITON_ATTN", ""),
    "decode-only": ("FULL_DECODE_ONLY", False, "v2", "FLASH_ATTN", ""),
    "eager-triton": ("eager", False, "v2", "TRITON_ATTN", ""),
    "full-and-piecewise": ("FULL_AND_PIECEWISE", True, "v2", "FLASH_ATTN", ""),
}
BANDS = ((1, 100), (100, 200), (200, 300), (300, 500), (500, 1000), (1000, 4000))
LOGPROBS = 20
TOKENS = 24  # of an answer
STAGGER_S = 4.0  # between the starts of engines, whose imports take memory and processors
FAR_UNKNOWN = 99.0  # a token that is not among the likeliest LOGPROBS


def options(parser: Any) -> None:
    parser.add_argument("--graphs-variants", default=",".join(VARIANTS), help="of part graphs")
    parser.add_argument("--graphs-prompts", type=int, default=40, help="for each band of lengths")
    parser.add_argument(
        "--graphs-at-a-time",
        default="4,1,4",
        help="requests at a time, in turns; all turns after the first have the prompts in the "
        "prefix cache",
    )


def engine_args(rig: Rig, variant: str) -> tuple[list[str], dict[str, str]]:
    mode, compiled, runner, attention, _ = VARIANTS[variant]
    if rig.host.device == "cpu":
        return [], {}
    out = ["--attention-backend", attention]
    if mode == "eager":
        out += ["--enforce-eager"]
    else:
        config: dict[str, Any] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": CAPTURE}
        out += ["--compilation-config", json.dumps(config | ({} if compiled else {"mode": 0}))]
    return out, {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
        "VLLM_CACHE_ROOT": f"{rig.run}/cache-{variant}",
    }


def start(rig: Rig, variant: str) -> tuple[Server, Sidecar | None]:
    more, env = engine_args(rig, variant)
    server, sidecar, kv = Server(variant, rig.logs), None, None
    if VARIANTS[variant][4]:
        sidecar = Sidecar(f"{variant}-sidecar", rig.run, rig.sidecar_config())
        sidecar.log = rig.logs / f"{sidecar.name}.log"
        sidecar.start()
        kv = kvspray_config(sidecar.socket, "kv_both", rig.host.memory)
    server.start(rig.host, rig.model, kv, *rig.engine_args("plain"), *more, env=env)
    return server, sidecar


def asked(server: Server, prompts: list[list[int]], width: int) -> list[Answer]:
    def one(ids: list[int]) -> Answer:
        return complete(
            server.port,
            ids,
            max_tokens=TOKENS,
            logprobs=LOGPROBS,
            return_tokens_as_token_ids=True,
        )

    with cf.ThreadPoolExecutor(width) as pool:
        return list(pool.map(one, prompts))


def parting(alone: Answer, other: Answer) -> int | None:
    """Index of the first token that differs."""
    pairs = zip(alone.tokens[0], other.tokens[0], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def gap(alone: Answer, other: Answer) -> float:
    """How much less likely, by the engine alone, the other's first token that differs is than its
    own."""
    at = parting(alone, other)
    if at is None:
        return 0.0
    near = alone.logprobs[at]
    own, theirs = (near.get(f"token_id:{a.tokens[0][at]}") for a in (alone, other))
    return FAR_UNKNOWN if own is None or theirs is None else max(own - theirs, 0.0)


def shift(alone: Answer, other: Answer) -> float:
    """The largest difference of the logarithms that both have of the first token."""
    a, b = alone.logprobs[0], other.logprobs[0]
    return max((abs(a[t] - b[t]) for t in a if t in b), default=FAR_UNKNOWN)


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig: Rig = stage.rig
    chosen = [ALONE, *(v for v in rig.args.graphs_variants.split(",") if v != ALONE)]
    started: dict[str, tuple[Server, Sidecar | None]] = {}
    try:
        for i, v in enumerate(chosen):
            time.sleep(STAGGER_S if i else 0)
            started[v] = start(rig, v)
        servers: dict[str, Server] = {}
        missing: list[str] = []
        for v, (server, _) in started.items():
            try:
                wait_up([server])
                servers[v] = server
            except Failed as err:  # the others answer without it
                missing.append(f"{v}: {err}"[:2000])
        for v, (_, sidecar) in started.items():
            if sidecar is not None and v in servers:
                wait_for(
                    f"engine sessions at {sidecar.name}",
                    lambda s=sidecar: total(s.metrics(), "kvspray_engine_sessions") >= 2,
                    60,
                    tick=0.1,
                )
        report, problems = compare(rig, servers)
        return report, missing + problems
    finally:
        for server, sidecar in started.values():
            server.stop()
            if sidecar is not None:
                sidecar.stop()


def compare(rig: Rig, servers: dict[str, Server]) -> tuple[dict[str, Any], list[str]]:
    r = random.Random(7)
    limit = rig.max_len - 32
    prompts = [
        prompt(n, ("graphs", i))
        for low, high in BANDS
        if low < limit
        for i in range(rig.args.graphs_prompts)
        for n in [r.randrange(low, min(high, limit))]
    ]
    r.shuffle(prompts)
    say(f"{len(prompts)} prompts, {', '.join(servers)}")
    widths = [int(w) for w in rig.args.graphs_at_a_time.split(",")]
    lanes = {name: cf.ThreadPoolExecutor(1) for name in servers}  # engines answer side by side
    alone = lanes[ALONE].submit(asked, servers[ALONE], prompts, 1)
    answers = {
        (turn, name): lanes[name].submit(asked, server, prompts, width)
        for turn, width in enumerate(widths)
        for name, server in servers.items()
    }
    reference = alone.result()
    rows: list[dict[str, Any]] = rig.so_far.setdefault("rows", [])
    spread = TIE
    print(f"{'engine':20} {'at a time':>9} {'errors':>6}  far/differ/first/all in each band")
    for turn, width in enumerate(widths):
        for name in servers:
            got = answers[turn, name].result()
            gaps = [
                (len(ids), gap(want, a), shift(want, a), parting(want, a))
                for ids, want, a in zip(prompts, reference, got, strict=True)
                if a.error is None
            ]
            if name == ALONE:
                spread = max(spread, *(g for _, g, _, _ in gaps))
            row: dict[str, Any] = {
                "engine": name,
                "at_a_time": width,
                "errors": [a.error for a in got if a.error is not None][:3],
                "spread": spread,
                "bands": [],
            }
            for low, high in BANDS:
                band = [g for g in gaps if low <= g[0] < high]
                if not band:
                    continue
                shifts = sorted(s for _, _, s, _ in band)
                row["bands"].append(
                    {
                        "tokens": [low, high],
                        "prompts": len(band),
                        "differ": sum(at is not None for *_, at in band),
                        "first_differ": sum(at == 0 for *_, at in band),
                        "far": sum(g > spread for _, g, _, _ in band),
                        "largest_gap": max(g for _, g, _, _ in band),
                        "shift_p50": statistics.median(shifts),
                        "shift_max": shifts[-1],
                    }
                )
            rows.append(row)
            cells = "  ".join(
                f"{b['far']}/{b['differ']}/{b['first_differ']}/{b['prompts']}" for b in row["bands"]
            )
            print(f"{name:20} {width:9} {len(row['errors']):6}  {cells}", flush=True)
    problems = [f"{row['engine']}: {row['errors'][0]}" for row in rows if row["errors"]]
    return {"rows": rows, "prompts": len(prompts)}, problems
