#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures real vLLM engines with kvspray on one host: measure.py PART [options]. Every part prints a short summary, writes one
JSON file to $OUT and ends with a status other than 0 where something differs. --device cpu runs it with the CPU engines of make env.

On a GPU host: unpack.py first, then models.py /opt/rig/models NAME ...
"""

from __future__ import annotations

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "rig")]

import content  # noqa: E402
import pairs  # noqa: E402
from servers import end_on_signals  # noqa: E402

PARTS = {
    "pages": (content, "pages and tokens of many prompts, P against D against a plain engine"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, (module, text) in PARTS.items():
        sub = parts.add_parser(name, help=text, description=text)
        pairs.add_options(sub)
        sub.add_argument("--tag", default="", help="goes into the name of the JSON file")
        module.options(sub)
    args = parser.parse_args()
    return pairs.run_part(args, PARTS[args.part][0].run)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
