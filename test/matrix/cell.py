#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One cell of the matrix: a pair of servers with the engine and the kvspray wheels that are in this
interpreter's environment. matrix.py calls it.

usage: cell.py vllm|sglang RESULT.json LOGS [--newer PYTHON]

It compares tokens with those of a plain server, and pages by the hashes that both sidecars trace.
Then it kills decode's sidecar and starts it again. At last it empties prefill's own cache, so that
pages come from its sidecar's store.

--newer: decode runs in the environment of that interpreter, which has a newer release. Instead of
the kill, the servers are started again with exchanged releases, and then once more. Each time
prefill loads what the other release has stored.
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
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
os.environ["KVSPRAY_BINARY"] = str(pathlib.Path(sys.prefix) / "bin" / "kvspray")
sys.path[:0] = [str(HERE.parent / "rig"), str(HERE.parent / "sglang")]

import sglang_server  # noqa: E402
from cluster import ROOT, Failed, Sidecar, get, wait_for  # noqa: E402
from demo import block_hashes  # noqa: E402
from hosts import cpu  # noqa: E402
from servers import (  # noqa: E402
    Proxy,
    Server,
    complete,
    end_on_signals,
    kvspray_config,
    sessions,
    wait_up,
)
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
    def __init__(self, run: pathlib.Path, logs: pathlib.Path, pythons: list[str]) -> None:
        self.pythons = pythons  # of prefill and decode
        self.sidecars = [Sidecar(name, run, {"store": STORE}) for name in ("p", "d")]
        for s in self.sidecars:
            s.log = logs / f"sidecar-{s.name}.log"
        self.prefill, self.decode = Server("prefill", logs), Server("decode", logs)
        self.alone, self.router = Server("plain", logs), Proxy("proxy", logs)
        self.plain: dict[tuple[int, ...], list[int]] = {}

    def _serve(self, server: Server, kv: dict[str, Any] | None) -> None:
        env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
        sizes = ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20)]
        python = self.pythons[server is self.decode]
        host = dataclasses.replace(cpu(ROOT / ".build"), python=python)
        server.start(host, "tiny-llama", kv, *sizes, env=env)

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
        endpoint = self.sidecars[0].endpoint
        self.router.start("concurrent", self.prefill.url, endpoint, self.decode.url)
        wait_for("the router", self.router.up, WAIT_S)
        self.connected()

    def connected(self) -> None:
        """Scheduler and worker of both engines have sessions with their sidecars."""
        for s in self.sidecars:
            wait_for(f"sessions at {s.name}", lambda s=s: sessions(s.metrics), WAIT_S, 0.1)

    def _ask(self, port: int, ids: list[int]) -> list[int]:
        got = complete(port, ids, ANSWER)
        if got.error:
            raise Failed(got.error)
        return got.tokens[0]

    def answer(self, ids: list[int]) -> list[int]:
        return self._ask(self.router.port, ids)

    def forget(self) -> None:
        for server in (self.prefill, self.decode):
            request = urllib.request.Request(server.url + "/reset_prefix_cache", b"")
            urllib.request.urlopen(request, timeout=60).close()

    def versions(self) -> list[str]:
        servers = (self.prefill, self.decode)
        return [json.loads(get(s.url + "/version"))["version"] for s in servers]

    def stop(self) -> None:
        for p in (self.router, self.alone, self.prefill, self.decode, *self.sidecars):
            p.stop()


class Sglang(Pair):
    def __init__(self, run: pathlib.Path, logs: pathlib.Path, pythons: list[str]) -> None:
        super().__init__(run, logs, config={"store": STORE})
        self.pythons = pythons
        self.prefill.args = [*self.prefill.args, *sglang_server.with_store(self.sidecars[0])]

    def start(self) -> None:
        for server, python in zip((self.prefill, self.decode), self.pythons, strict=True):
            server.host = dataclasses.replace(self.host, python=python)
        super().start()

    def answer(self, ids: list[int]) -> list[int]:
        return self.router.generate(ids, self.host.answer)[0]

    def connected(self) -> None:
        pass  # SGLang refuses requests until its sessions are up

    def forget(self) -> None:
        for server in (self.prefill, self.decode):
            server.forget()

    def versions(self) -> list[str]:
        program = "import importlib.metadata as m; print(m.version('sglang'))"
        return [subprocess.check_output([p, "-c", program], text=True).strip()
                for p in self.pythons]  # fmt: skip


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

    wait_for("equal pages", lambda: hashes(pair, p) and hashes(pair, p) == hashes(pair, d), 20, 0.2)
    checks["pages"] = f"{len(hashes(pair, p))} equal"
    if len(set(pair.pythons)) == 1:
        kill_and_load(pair, checks)
    else:
        exchange_twice(pair, checks)
    for s in (p, d):
        if text := s.panics():
            raise Failed(text)


def hashes(pair: Vllm | Sglang, of: Sidecar) -> dict[str, str]:
    """Of pages whose transfer has ended at prefill. The router ends a request there once decode has
    answered, and a lease that is cancelled so has no hashes, whatever decode has received."""
    source = pair.sidecars[0]
    sent = [t for t in source.lines(source.transfers) if t["side"] == "source"]
    ended = {t["xfer"] for t in sent if t["outcome"] == "ok"}
    pages = block_hashes(of.lines(of.hashes))
    return {page: sha for page, sha in pages.items() if page.partition("/")[0] in ended}


def kill_and_load(pair: Vllm | Sglang, checks: dict[str, str]) -> None:
    p, d = pair.sidecars
    d.kill()
    served = right(pair, prompt(DOWN))
    d.start()
    pair.connected()
    wait_for("transfers after the kill", lambda: moves(pair, prompt(BACK)), WAIT_S, 0.5)
    checks["kill"] = f"{'answered' if served else 'refused'} without the sidecar, then transfers"
    wait_for("pages in the store", lambda: stored(p) > 0, 60, 0.2)
    checks["store"] = from_store(pair, prompt(SIZES[-1]))


def from_store(pair: Vllm | Sglang, ids: list[int]) -> str:
    before = found(pair.sidecars[0])
    wait_for("pages from the store", lambda: loads(pair, ids), 60, 0.5)
    return f"{found(pair.sidecars[0]) - before:.0f} pages"


def exchange_twice(pair: Vllm | Sglang, checks: dict[str, str]) -> None:
    p = pair.sidecars[0]
    wait_for("pages in the store", lambda: stored(p) > 0, 60, 0.2)
    exchange(pair)
    checks["upgrade"] = from_store(pair, prompt(SIZES[-1]))
    before = stored(p)
    wait_for("transfers after the upgrade", lambda: moves(pair, prompt(BACK)), WAIT_S, 0.5)
    wait_for("pages of the newer release", lambda: stored(p) > before, 60, 0.2)
    exchange(pair)
    checks["downgrade"] = from_store(pair, prompt(BACK))


def exchange(pair: Vllm | Sglang) -> None:
    """Both servers start again, each with the other's release. The sidecars go on."""
    for process in (pair.router, pair.prefill, pair.decode):
        process.stop()
    pair.pythons.reverse()
    pair.start()


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    ap.add_argument("engine", choices=["vllm", "sglang"])
    ap.add_argument("result", type=pathlib.Path)
    ap.add_argument("logs", type=pathlib.Path)
    ap.add_argument("--newer", default=sys.executable, help="decode's interpreter")
    args = ap.parse_args()
    checks: dict[str, str] = {}
    out: dict[str, Any] = {
        "python": platform.python_version(),
        "kvspray": importlib.metadata.version("kvspray"),
        "checks": checks,
    }
    with tempfile.TemporaryDirectory(prefix="kvs-") as run:  # unix sockets have short names
        kind = Vllm if args.engine == "vllm" else Sglang
        pair = kind(pathlib.Path(run), args.logs, [sys.executable, args.newer])
        try:
            steps(pair, checks)
            out["engine"] = " and ".join(dict.fromkeys(pair.versions()))
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
