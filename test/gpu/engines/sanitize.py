"""A short run of both engines under compute-sanitizer, eager and with FULL graphs: nothing that
it reports may be ours."""

from __future__ import annotations

import re
import shutil
from typing import Any

from clients import prompt
from cluster import Failed
from pairs import MODES, Pair, look_at, wait_up
from servers import complete

NEEDS: set[str] = set()
OURS = re.compile(r"kvs|kvspray", re.IGNORECASE)
LENGTHS = (5, 16, 100, 300, 700, 33)
START_S = 540.0
# The tool follows a process that is started, and not one that is forked.
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# Lines of the tool itself.
FRAME = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "LEAK SUMMARY", "Target application")


def options(parser: Any) -> None:
    parser.add_argument(
        "--sanitizer",
        default="compute-sanitizer",
        help="of part sanitize; with its options, none: without it",
    )
    parser.add_argument("--sanitize-graphs", default="eager,FULL")


def reports(text: str) -> list[str]:
    """The errors of a log, each with its backtrace."""
    blocks: list[str] = []
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        line = line.removeprefix("=========").strip() if line.startswith("=========") else ""
        if line.startswith(FRAME):
            continue
        if line:
            block.append(line)
        elif block:
            blocks.append("\n".join(block))
            block = []
    return blocks


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, problems = stage.rig, []
    out: dict[str, Any] = {}
    rig.so_far = out
    tool = rig.args.sanitizer.split()
    if tool != ["none"] and not shutil.which(tool[0]):
        raise Failed(f"{tool[0]} is not installed here: name another by --sanitizer")
    for graph in rig.args.sanitize_graphs.split(","):
        rig.args.graph, rig.args.no_compile = graph, True
        pair = Pair(rig, "pages")
        try:
            wraps = {"P": rig.run / f"{graph}-P.%p.san", "D": rig.run / f"{graph}-D.%p.san"}
            pair.start(sidecars_only=True)
            for side, where in enumerate(wraps.values()):
                wrap = (
                    []
                    if tool == ["none"]
                    else [
                        *tool,
                        "--tool",
                        "memcheck",
                        "--target-processes",
                        "all",
                        "--log-file",
                        str(where),
                    ]
                )
                pair.start_engine(side, wrap, SPAWN)
            wait_up(pair.engines(), START_S)
            pair.route()
            pair.wait_sessions()
            for i, n in enumerate(LENGTHS):
                rid, mode = f"look-{graph}{i}", MODES[i % 2]
                answer = complete(
                    pair.proxies[mode].port, prompt(n, rid), max_tokens=8, rid=rid, timeout=300
                )
                got = look_at(rig, rid, ("P", "computed"), ("D", "loaded"), timeout=60)
                if answer.error or isinstance(got, str) or got.differ:
                    problems.append(
                        f"{graph}, {n} tokens: "
                        f"{answer.error or (got if isinstance(got, str) else got.first)}"
                    )
        finally:
            pair.stop()
        logs = {
            p.name: p.read_text(errors="replace") for p in sorted(rig.run.glob(f"{graph}-*.san"))
        }
        found = [b for text in logs.values() for b in reports(text)]
        ours = [b for b in found if OURS.search(b)]
        out[graph] = {
            "logs": len(logs),
            "reports": len(found),
            "ours": len(ours),
            "first": [b[:1500] for b in (ours or found)[:5]],
        }
        problems += [f"{graph}: {b[:300]}" for b in ours[:5]]
        if tool != ["none"] and not logs:
            problems.append(f"{graph}: the sanitizer left no log")
        print(
            f"{graph}: {len(LENGTHS)} prompts; {len(found)} reports of the sanitizer, "
            f"{len(ours)} of them ours"
        )
    return out, problems
