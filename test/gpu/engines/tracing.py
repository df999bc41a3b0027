"""What a layer's signal costs in a FULL graph, by the profiler's trace: replays of P with its
signals beside those of a plain engine.

Both engines compute the same prompts. A replay's kernels have one correlation id; its span is
from the first kernel's start to the last one's end. Engines take turns, so that clocks that
change meet both.
"""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import statistics
import time
import urllib.request
from typing import Any

from clients import prompt
from cluster import wait_for
from pairs import Pair, as_source, say, start_plain, wait_up
from servers import Server, ask

NEEDS: set[str] = set()
OURS = "kvs_"
GOAL_US = 0.5
TURNS = 4
REPLAY_KERNELS = 60  # a replay of the whole model has more
STEP_TOKENS = 512


def options(parser: Any) -> None:
    parser.add_argument(
        "--trace-prompts", type=int, default=12, help="of part trace, for each engine and turn"
    )


def post(server: Server, path: str) -> None:
    request = urllib.request.Request(server.url + path, b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=180):
        pass


def events(path: pathlib.Path) -> list[dict[str, Any]]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [e for e in json.loads(raw)["traceEvents"] if e.get("cat") == "kernel"]


def replays(kernels: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Spans in microseconds, by how many kernels that are not ours a replay has: so the same graph
    of both engines is compared."""
    by_launch: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
    for k in kernels:
        by_launch[k["args"].get("correlation")].append(k)
    out: dict[int, list[float]] = collections.defaultdict(list)
    for group in by_launch.values():
        theirs = [k for k in group if not k["name"].startswith(OURS)]
        if len(theirs) >= REPLAY_KERNELS:
            out[len(theirs)].append(
                max(k["ts"] + k["dur"] for k in group) - min(k["ts"] for k in group)
            )
    return out


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, problems = stage.rig, []
    rig.args.graph = "FULL"
    rig.step_tokens = STEP_TOKENS
    layers = json.loads((rig.host.models / rig.model / "config.json").read_text())[
        "num_hidden_layers"
    ]
    pair = Pair(rig, "kvspray")
    folders = {"with": rig.run / "trace-with", "without": rig.run / "trace-without"}

    def profiler(folder: pathlib.Path) -> list[str]:
        return [
            "--profiler-config",
            json.dumps(
                {
                    "profiler": "torch",
                    "torch_profiler_dir": str(folder),
                    "torch_profiler_with_stack": False,
                }
            ),
        ]

    plain = None
    try:
        pair.start(sidecars_only=True)
        pair.start_engine(0, more=profiler(folders["with"]))
        plain = start_plain(rig, profiler(folders["without"]))
        engines = {"with": pair.p, "without": plain}
        wait_up(list(engines.values()))
        wait_for(
            "P's session",
            lambda: (
                pair.sidecars[0].metrics().get('kvspray_engine_sessions{role="worker"}', 0) >= 1
            ),
            60,
            tick=0.1,
        )
        for turn in range(-1, TURNS):
            for what, server in engines.items():
                if turn >= 0:
                    post(server, "/start_profile")
                for i in range(rig.args.trace_prompts):
                    # No engine fetches it: its lease ends with the request that is cancelled at the
                    # end.
                    ask(
                        server.url,
                        prompt(STEP_TOKENS - 1, (turn, i)),
                        as_source() if what == "with" else None,
                        max_tokens=4,
                    )
                if turn >= 0:
                    post(server, "/stop_profile")
        time.sleep(2)
    finally:
        pair.stop()
        if plain is not None:
            plain.stop()
    files = {what: sorted(folder.rglob("*.json*")) for what, folder in folders.items()}
    found = {what: [k for path in paths for k in events(path)] for what, paths in files.items()}
    spans = {what: replays(kernels) for what, kernels in found.items()}
    own = [k for k in found["with"] if k["name"].startswith(OURS)]
    common = {n: len(spans["with"][n]) for n in spans["with"].keys() & spans["without"].keys()}
    rig.so_far = out = {
        "layers": layers,
        "our_kernels": len(own),
        "our_kernel_us": statistics.median(k["dur"] for k in own) if own else None,
        "graphs": {},
    }
    for n in sorted(common):
        a, b = (statistics.median(spans[what][n]) for what in ("without", "with"))
        out["graphs"][n] = {
            "replays": [len(spans["without"][n]), len(spans["with"][n])],
            "without_us": a,
            "with_us": b,
            "per_layer_us": (b - a) / layers,
        }
        print(
            f"graph of {n} kernels: {a:.1f} us without signals, {b:.1f} with, "
            f"{(b - a) / layers:+.3f} us per layer (goal {GOAL_US})"
        )
    print(
        f"our kernels in the trace: {len(own)}, median {out['our_kernel_us']} us each, beside "
        f"the model's on branches of their own"
    )
    if not common or not own:
        problems.append(
            f"no graph that both traces have "
            f"({ {w: {n: len(v) for n, v in s.items()} for w, s in spans.items()} }), or no "
            f"signal in it ({len(own)})"
        )
    say(f"traces: { ({what: len(k) for what, k in found.items()}) } kernels")
    return out, problems
