#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One cell of the matrix: a pair of servers with the engine and the kvspray wheels that are in this
interpreter's environment. matrix.py calls it.

usage: cell.py vllm|sglang RESULT.json LOGS

It compares tokens with those of a plain server, and pages by the hashes that both sidecars trace.
Then it kills decode's sidecar and starts it again. At last it empties prefill's own cache, so that
pages come from its sidecar's store.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import sys
import tempfile
import urllib.error
import urllib.request
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
os.environ["KVSPRAY_BINARY"] = str(pathlib.Path(sys.prefix) / "bin" / "kvspray")
sys.path[:0] = [str(HERE.parent / "rig"), str(HERE.parent / "sglang")]

import sglang_server  # noqa: E402
from cluster import ROOT, Failed, Sidecar, get, total, wait_for  # noqa: E402
from demo import block_hashes  # noqa: E402
from hosts import cpu  # noqa: E402
from servers import Proxy, Server, complete, end_on_signals, kvspray_config, wait_up  # noqa: E402
from sglang_pair import Pair  # noqa: E402
from sglang_server import found, moved, stored  # noqa: E402

SIZES = (1, 31, 33, 129, 513, 1024)  # tokens of a prompt
DOWN, BACK = 257, 700  # tokens of the prompts during and after the kill
ANSWER = 12
STORE = {"memory": "64MiB"}
WAIT_S = 180.0


def prompt(tokens: int) -> list[int]:
    r = random.Random(tokens)
    return [r.randrange(300, 900) for _ in range(tokens)]


class Vllm:
    def __init__(self, run: pathlib.Path, logs: pathlib.Path) -> None:
        self.host = dataclasses.replace(cpu(ROOT / ".build"), python=sys.executable)
        self.sidecars = [Sidecar(name, run, {"store": STORE}) for name in ("p", "d")]
        for s in self.sidecars:
            s.log = logs / f"sidecar-{s.name}.log"
        self.prefill, self.decode = Server("prefill", logs), Server("decode", logs)
        self.alone, self.proxy = Server("plain", logs), Proxy("proxy", logs)
        self.plain: dict[tuple[int, ...], list[int]] = {}

    def _serve(self, server: Server, kv: dict[str, Any] | None) -> None:
        env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
        sizes = ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20)]
        server.start(self.host, "tiny-llama", kv, *sizes, env=env)

    def ask_plain(self, prompts: list[list[int]]) -> None:
        self._serve(self.alone, None)
        wait_up([self.alone], log)
        self.plain = {tuple(ids): self._ask(self.alone.port, ids) for ids in prompts}
        self.alone.stop()

    def start(self) -> None:
        servers = [self.prefill, self.decode]
        for server, sidecar in zip(servers, self.sidecars, strict=True):
            kv = kvspray_config(sidecar.socket, "kv_both")
            kv["kv_connector_extra_config"]["store"] = server is self.prefill
            self._serve(server, kv)
        wait_up(servers, log)
        self.proxy.start("concurrent", self.prefill.url, self.sidecars[0].endpoint, self.decode.url)
        wait_for("the router", self.proxy.up, WAIT_S)
        self.connected()

    def connected(self) -> None:
        """Scheduler and worker of both engines have sessions with their sidecars."""
        for s in self.sidecars:
            wait_for(f"sessions at {s.name}", lambda s=s: self._sessions(s), WAIT_S, 0.1)

    def _sessions(self, sidecar: Sidecar) -> bool:
        m = sidecar.metrics()
        roles = ("worker", "scheduler")
        return all(total(m, "kvspray_engine_sessions", role=role) for role in roles)

    def _ask(self, port: int, ids: list[int]) -> list[int]:
        got = complete(port, ids, ANSWER)
        if got.error:
            raise Failed(got.error)
        return got.tokens[0]

    def answer(self, ids: list[int]) -> list[int]:
        return self._ask(self.proxy.port, ids)

    def forget(self) -> None:
        for server in (self.prefill, self.decode):
            request = urllib.request.Request(server.url + "/reset_prefix_cache", b"")
            urllib.request.urlopen(request, timeout=60).close()

    def version(self) -> str:
        return str(json.loads(get(self.prefill.url + "/version"))["version"])

    def stop(self) -> None:
        for p in (self.proxy, self.alone, self.prefill, self.decode, *self.sidecars):
            p.stop()


class Sglang(Pair):
    def __init__(self, run: pathlib.Path, logs: pathlib.Path) -> None:
        super().__init__(run, logs, config={"store": STORE})
        self.prefill.args = [*self.prefill.args, *sglang_server.with_store(self.sidecars[0])]

    def answer(self, ids: list[int]) -> list[int]:
        return self.router.generate(ids, self.host.answer)[0]

    def connected(self) -> None:
        pass  # SGLang refuses requests until its sessions are up

    def forget(self) -> None:
        for server in (self.prefill, self.decode):
            server.forget()

    def version(self) -> str:
        return importlib.metadata.version("sglang")


def log(text: str) -> None:
    print(text, flush=True)


def right(pair: Vllm | Sglang, ids: list[int]) -> bool:
    """False: the prompt was refused. The cell ends if the tokens differ from the plain server's."""
    try:
        got = pair.answer(ids)
    except (urllib.error.HTTPError, Failed) as err:
        log(f"a prompt of {len(ids)} tokens: {err}")
        return False
    if got != pair.plain[tuple(ids)]:
        raise Failed(f"a prompt of {len(ids)} tokens: {got}, plain {pair.plain[tuple(ids)]}")
    return True


def moves(pair: Vllm | Sglang, ids: list[int]) -> bool:
    """A right answer with pages from prefill, whatever decode had in its cache."""
    pair.forget()
    before = moved(pair.sidecars[1])
    return right(pair, ids) and moved(pair.sidecars[1]) > before


def loads(pair: Vllm | Sglang, ids: list[int]) -> bool:
    """A right answer with pages from the store. Engines keep caches whose blocks are in use."""
    pair.forget()
    before = found(pair.sidecars[0])
    return right(pair, ids) and found(pair.sidecars[0]) > before


def steps(pair: Vllm | Sglang, checks: dict[str, str]) -> None:
    """Adds each check that has passed; raises Failed at the first that has not."""
    p, d = pair.sidecars
    pair.ask_plain([prompt(n) for n in (*SIZES, DOWN, BACK)])
    p.start()
    d.start()
    pair.start()
    wait_for("a transfer", lambda: moves(pair, prompt(SIZES[-1])), WAIT_S, 0.5)
    pair.forget()
    before = moved(d)
    equal = sum(right(pair, prompt(n)) for n in SIZES)
    if equal != len(SIZES):
        raise Failed(f"{equal} of {len(SIZES)} prompts were answered")
    checks["tokens"] = f"{equal} prompts, {(moved(d) - before) / 1024:.0f} KiB moved"

    def hashes() -> tuple[dict[str, str], dict[str, str]]:
        return block_hashes(p.lines(p.hashes)), block_hashes(d.lines(d.hashes))

    wait_for("equal pages", lambda: hashes()[0] and hashes()[0] == hashes()[1], 20, 0.2)
    checks["pages"] = f"{len(hashes()[0])} equal"
    d.kill()
    served = right(pair, prompt(DOWN))
    d.start()
    pair.connected()
    wait_for("transfers after the kill", lambda: moves(pair, prompt(BACK)), WAIT_S, 0.5)
    checks["kill"] = f"{'answered' if served else 'refused'} without the sidecar, then transfers"
    wait_for("pages in the store", lambda: stored(p) > 0, 60, 0.2)
    hits = found(p)
    wait_for("pages from the store", lambda: loads(pair, prompt(SIZES[-1])), 60, 0.5)
    checks["store"] = f"{found(p) - hits:.0f} pages"
    for s in (p, d):
        if text := s.panics():
            raise Failed(text)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    ap.add_argument("engine", choices=["vllm", "sglang"])
    ap.add_argument("result", type=pathlib.Path)
    ap.add_argument("logs", type=pathlib.Path)
    args = ap.parse_args()
    checks: dict[str, str] = {}
    out: dict[str, Any] = {
        "python": platform.python_version(),
        "kvspray": importlib.metadata.version("kvspray"),
        "checks": checks,
    }
    with tempfile.TemporaryDirectory(prefix="kvs-") as run:  # unix sockets have short names
        pair = (Vllm if args.engine == "vllm" else Sglang)(pathlib.Path(run), args.logs)
        try:
            steps(pair, checks)
            out["engine"] = pair.version()
        except (Failed, OSError) as err:
            out["error"] = str(err)
            log(str(err))
        finally:
            pair.stop()
    args.result.write_text(json.dumps(out, indent=1) + "\n")
    return 1 if "error" in out else 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
