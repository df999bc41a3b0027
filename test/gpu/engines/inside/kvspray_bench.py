"""`vllm bench serve` for several runs in one process: a line of stdin has the arguments of a run as
JSON, a line of stdout its result."""

from __future__ import annotations

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

out, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print(json.dumps(main(parser.parse_args(json.loads(line)))), file=out, flush=True)
