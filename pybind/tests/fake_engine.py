# SPDX-License-Identifier: Apache-2.0
"""Plays vLLM's server, the sidecar and the router for kvspray try, by HTTP alone.

usage: fake_engine.py serve|proxy|why|version|engine [the options of those]. In the environment,
FAKE has what goes wrong: "differ", the plain engine has other tokens; "die", it ends at its start;
"refuse", the router answers with an error.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import sys

METRICS = """kvspray_engine_sessions{{role="worker"}} 1
kvspray_engine_sessions{{role="scheduler"}} 1
kvspray_transfer_payload_bytes_total{{side="destination"}} {}
"""


def main(what: str, args: list[str]) -> None:
    if what in ("why", "version"):
        print(what, *args)
        return
    options = dict(zip(args, args[1:], strict=False))
    address = options.get("--http") or options.get("--listen", "")
    if what == "proxy":
        address = options["--listen"]
    port = int(options.get("--port") or address.rpartition(":")[2])
    plain = what == "engine" and "--kv-transfer-config" not in options
    fault = os.environ.get("FAKE", "")
    assert os.path.isdir(options.get("--model", "/")), options
    if plain and fault == "die":
        sys.exit("OSError: [Errno 28] No space left on device")
    counter = itertools.count()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(METRICS.format(next(counter)) if self.path == "/metrics" else "ok")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if what == "proxy" and fault == "refuse":
                return self.send_error(502, "no engine")
            tokens = [len(body["prompt"])] * body["max_tokens"]
            if plain and fault == "differ":
                tokens[-1] += 1
            choice = {"token_ids": tokens}
            usage = {"prompt_tokens": len(body["prompt"])}
            self.answer(json.dumps({"choices": [choice], "usage": usage}))

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
