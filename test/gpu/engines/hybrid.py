"""Part cover for models with recurrent states: states and pages at P and D, and answers."""

from __future__ import annotations

from typing import Any

import cover

NEEDS: set[str] = set()
GRAPHS = ("eager", "PIECEWISE", "FULL_AND_PIECEWISE")


def options(parser: Any) -> None:
    parser.add_argument("--hybrids", default=",".join(cover.HYBRIDS), help="of part hybrid")


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    args = stage.rig.args
    args.cover_shapes = args.hybrids
    if args.cover_graphs == ",".join(cover.GRAPHS):
        args.cover_graphs = ",".join(GRAPHS)
    return cover.run(stage)
