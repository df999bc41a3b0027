#!/usr/bin/env python3
"""SGLang's servers on a GPU with kvspray: HiCache on the store of a sidecar, and prefill and decode
through two. On a GPU host: unpack.py with the directory of pack.py's parts sgl and sgl-data, then
models.py /opt/rig/models granite-1b.

Each prompt goes to a plain server, to prefill and decode, and three times to the server with
HiCache: computed, from the store after its caches were emptied, and from its own cache. The tokens
are compared; those from the store must be equal with --deterministic only, because SGLang's kernels
for a cached prefix round otherwise. Then sidecars are killed under requests.

usage: sglang_cuda.py [options]
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
from typing import Any

from unpacked import UNPACKED

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "sglang"))

# isort: split
from sglang_pair import Pair
from sglang_server import CPU, Host, Server, counted, found, rig, stored, with_store

PAGE, CHUNK, ANSWER = 64, 2048, 16
SIZES = "5,64,100,300,1000,2000,4000,8000"
STORED_S = 30.0
ENDED_S = 60.0  # for a request under which a sidecar is killed, at both servers


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def host(model: str, tokens: int, exact: bool) -> Host:
    folders = [UNPACKED / name for name in ("sgl", "deps", "own")]
    libraries = (str(UNPACKED / "lib"), os.environ.get("LD_LIBRARY_PATH", ""))
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "LD_LIBRARY_PATH": os.pathsep.join(p for p in libraries if p),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # pack.py has the reason
        # The other one is compiled for another torch, and takes int64 for uint8.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
    args = (
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend",
        "none", "--mem-fraction-static", "0.6", "--max-total-tokens", str(tokens),
        "--context-length", "16384", "--cuda-graph-backend-prefill", "disabled",
        "--cuda-graph-max-bs-decode", "4",
        *(["--enable-deterministic-inference"] if exact else []),
    )  # fmt: skip
    return Host(UNPACKED / "models" / model, args, env, PAGE, ANSWER, CHUNK)


def build_norm() -> subprocess.Popen[bytes]:
    """Once, before several servers do it at the same time."""
    code = "from flashinfer.jit.norm import gen_norm_module as g; g().build_and_load()"
    path = os.pathsep.join(str(UNPACKED / name) for name in ("sgl", "deps"))
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})


def prompt(seed: object, tokens: int) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(4, 900) for _ in range(tokens)]


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.gpu = args, args.device == "cuda"
        self.host = host(args.model, args.tokens, args.deterministic) if self.gpu else CPU
        self.sizes = [int(n) for n in args.sizes.split(",")]
        self.answer, self.page = self.host.answer, self.host.page
        self.run = pathlib.Path(tempfile.mkdtemp(prefix="kvs-"))
        self.logs = self.run / "logs"
        self.logs.mkdir()
        # Hashes of blocks would take most of a transfer's time.
        self.pair = Pair(
            self.run, self.logs, self.host, own_router=False,
            config={"trace": {"block_hashes": ""}},
        )  # fmt: skip
        self.sidecar = rig.Sidecar("h", self.run, {"store": {"memory": "8GiB"}})
        self.sidecar.log = self.logs / "sidecar-h.log"
        chunked = self.pair.chunked
        self.plain = Server("plain", self.logs, chunked, host=self.host)
        hicache = [*with_store(self.sidecar, self.host, loads=args.loads), *chunked]
        self.hicache = Server("hicache", self.logs, hicache, host=self.host)
        self.report: dict[str, Any] = {
            "model": args.model, "device": args.device, "page": self.page, "chunk": self.host.chunk,
        }  # fmt: skip
        self.problems: list[str] = []

    def start(self) -> None:
        start = time.monotonic()
        norm = build_norm() if self.gpu else None
        for s in (*self.pair.sidecars, self.sidecar):
            s.start()
        if norm is not None and norm.wait():
            raise rig.Failed("FlashInfer's norms were not built")
        servers = [self.plain, self.hicache, self.pair.prefill, self.pair.decode]
        for s in servers:
            s.start()
        for s in servers:
            rig.wait_for(s.name, s.up, self.args.start_s, 0.5)
            say(f"{s.name} is up after {time.monotonic() - start:.0f} s")
        self.pair.router.start(self.pair.prefill, self.pair.port, self.pair.decode)

    def stop(self) -> None:
        self.pair.stop()
        for p in (self.plain, self.hicache, self.sidecar):
            p.stop()
        for s in self.pair.sidecars:
            if s.transfers.exists():
                shutil.copy(s.transfers, self.logs / f"transfers-{s.name}.jsonl")
        target = self.args.out / "sglang-logs"
        shutil.make_archive(str(target), "gztar", self.logs)
        shutil.rmtree(self.run, ignore_errors=True)

    def timed(self, server: Any, ids: list[int]) -> tuple[list[int], int, float]:
        start = time.perf_counter()
        tokens, cached = server.generate(ids, self.answer)
        return tokens, cached, 1e3 * (time.perf_counter() - start)

    # -- prefill and decode

    def pairs(self) -> None:
        rows, equal, n = [], 0, 0
        self.pair.router.generate(prompt("warm", 200), self.answer)
        for tokens in self.sizes:
            for turn in range(self.args.rounds):
                ids = prompt(("pd", turn, tokens), tokens)
                want, _, alone = self.timed(self.plain, ids)
                before = self.pair.moved()
                got, _, pair = self.timed(self.pair.router, ids)
                moved = self.pair.moved() - before
                self.pair.plain[tuple(ids)] = want
                n, equal = n + 1, equal + (got == want)
                if got != want:
                    self.problems.append(f"pd: {tokens} tokens, turn {turn}: {got} for {want}")
                rows.append({"tokens": tokens, "plain": alone, "pair": pair, "moved": moved})
        self.report["pd"] = {"prompts": n, "equal": equal, "rows": table(rows, "tokens")}
        say(f"pd: {equal} of {n} answers equal; {json.dumps(self.report['pd']['rows'])}")
        if self.pair.moved() == 0:
            self.problems.append("pd: nothing was moved")

    def together(self) -> None:
        jobs = [prompt(("together", i), max(self.sizes) * (i + 1) // 24) for i in range(24)]
        want = [self.plain.generate(ids, 1)[0] for ids in jobs]
        with cf.ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda ids: self.pair.router.generate(ids, 1)[0], jobs))
        equal = sum(a == b for a, b in zip(want, got, strict=True))
        self.report["together"] = {"prompts": len(jobs), "equal": equal}
        say(f"together: first tokens equal {equal} of {len(jobs)}")
        if self.args.deterministic and equal < len(jobs):
            self.problems.append(f"together: {len(jobs) - equal} first tokens differ")

    def faults(self) -> None:
        """Requests under way end with an error or are right, and later ones are served again."""
        right = errors = wrong = 0
        known = [ids for ids in self.pair.plain if len(ids) == max(self.sizes)]
        for turn in range(self.args.kills):
            sidecar = self.pair.sidecars[turn % 2]
            # decode has the old prompts in its cache: others are moved
            jobs = [prompt(("fault", turn, i), max(self.sizes) // 2) for i in range(4)]
            want = [self.plain.generate(ids, self.answer)[0] for ids in jobs]
            with cf.ThreadPoolExecutor(4) as pool:
                under_way = [
                    pool.submit(self.pair.router.generate, x, self.answer, ENDED_S) for x in jobs
                ]
                time.sleep(random.Random(turn).uniform(0.02, 0.4))
                sidecar.kill()
                cf.wait(under_way)
            for f, tokens in zip(under_way, want, strict=True):
                if isinstance(f.exception(), rig.Failed):
                    self.problems.append(f"faults: turn {turn}: {f.exception()}")
                elif f.exception() is not None:
                    errors += 1
                elif f.result()[0] == tokens:
                    right += 1
                else:
                    wrong += 1
            sidecar.start()
            ids = known[turn % len(known)]
            rig.wait_for("a request again", lambda ids=ids: self.served(list(ids)), 60, 0.5)
            say(f"sidecar {sidecar.name} killed: {right} right, {errors} errors, {wrong} wrong")
        rig.wait_for("no lease open", lambda: self.pair.leases() == 0, 60, 0.2)
        self.report["faults"] = {"right": right, "errors": errors, "wrong": wrong}
        say(f"faults: {self.report['faults']}")
        if wrong:
            self.problems.append(f"faults: {wrong} answers differ")

    def served(self, ids: list[int]) -> bool:
        try:
            self.pair.router.generate(ids, self.answer, ENDED_S)
            return True
        except urllib.error.HTTPError:
            return False

    # -- HiCache

    def store(self) -> None:
        rows, equal, n = [], 0, 0
        for tokens in (s for s in self.sizes if s > self.page):
            for turn in range(self.args.rounds):
                ids = prompt(("store", turn, tokens), tokens)  # shares no page with another
                before = stored(self.sidecar)
                want, _, computed = self.timed(self.hicache, ids)
                whole = (tokens - 1) // self.page
                rig.wait_for(
                    "pages in the store",
                    lambda w=whole, b=before: stored(self.sidecar) - b >= w,
                    STORED_S,
                    0.05,
                )
                self.hicache.forget()
                again, hits, loaded = self.timed(self.hicache, ids)
                _, cached, own = self.timed(self.hicache, ids)
                n, equal = n + 1, equal + (again == want)
                if hits < (whole - 1) * self.page:
                    self.problems.append(f"store: {hits} of {tokens} tokens came from the store")
                row = {"tokens": tokens, "computed": computed, "loaded": loaded, "had": own}
                rows.append({**row, "hits": hits, "cached": cached})
        out = {"prompts": n, "equal": equal, "rows": table(rows, "tokens")}
        out["hits"] = found(self.sidecar)
        out["copies"] = counted(self.sidecar, "kvspray_copies_total", outcome="ok")
        self.report["store"] = out
        say(f"store: {equal} of {n} answers equal; {json.dumps(out['rows'])}")
        if (out["copies"] > 0) != (self.args.loads == "sidecar"):
            self.problems.append(f"store: the sidecar made {out['copies']:.0f} copies")
        if self.args.deterministic and equal < n:
            self.problems.append(f"store: {n - equal} answers differ from the computed ones")
        text = self.hicache.log.read_text(errors="replace")
        if "cannot map" in text:
            self.problems.append("store: the sidecar does not map the host pool")
        # Without its sidecar the server computes, and is right.
        ids = prompt("dead", max(self.sizes))
        self.sidecar.kill()
        self.hicache.forget()
        self.hicache.generate(ids, self.answer)
        self.sidecar.start()


def table(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Medians by key."""
    out = []
    for value in sorted({r[key] for r in rows}):
        mine = [r for r in rows if r[key] == value]
        columns = {c: round(statistics.median(r[c] for r in mine), 1) for c in mine[0]}
        out.append({**columns, key: value})
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="granite-1b", help="of the host's")
    parser.add_argument("--sizes", default=SIZES, help="tokens of prompts")
    parser.add_argument("--tokens", type=int, default=65536, help="of each server's cache")
    parser.add_argument("--rounds", type=int, default=5, help="of each length")
    parser.add_argument("--kills", type=int, default=6, help="of sidecars under requests")
    parser.add_argument(
        "--deterministic", action="store_true",
        help="SGLang's kernels whose results do not depend on the batch",
    )  # fmt: skip
    parser.add_argument(
        "--loads", choices=("sglang", "sidecar"), default="sidecar",
        help="from the host pool to the GPU, of the server with HiCache",
    )  # fmt: skip
    parser.add_argument("--start-s", type=float, default=240, help="for the servers")
    parser.add_argument("--parts", default="store,pairs,together,faults")
    parser.add_argument("--out", type=pathlib.Path, default=os.environ.get("OUT", "."))
    args = parser.parse_args()
    args.out = pathlib.Path(args.out)
    run = Run(args)
    try:
        run.start()
        for part in args.parts.split(","):
            getattr(run, part)()
    except (rig.Failed, urllib.error.URLError) as err:
        run.problems.append(str(err)[:3000])
    finally:
        run.stop()
    report = {**run.report, "problems": run.problems}
    (args.out / "sglang.json").write_text(json.dumps(report, indent=1) + "\n")
    for problem in run.problems[:10]:
        print(f"  PROBLEM {problem}", flush=True)
    print("RED" if run.problems else "GREEN", flush=True)
    return int(bool(run.problems))


if __name__ == "__main__":
    sys.exit(main())
