"""Other weights in a running engine: `kvspray load` beside PyTorch's copies and vLLM's own reload,
in turns. The digest of the weights and answers are compared with those of an engine that was
started with them, also where a sidecar is killed or stopped meanwhile."""

from __future__ import annotations

import json
import os
import pathlib
import random
import secrets
import subprocess
import sys
import threading
import time
import urllib.error
from typing import Any

import sleeping
from bench_load import Plain, files
from clients import prompt
from cluster import BINARY, Failed, Sidecar, get, merge
from pairs import Rig, say, summary, wait_up
from servers import Server, ask
from unpacked import HERE

NEEDS: set[str] = set()
LENGTHS = (40, 300, 900)  # tokens of the prompts
PIECE = 8192  # bytes of a piece on a CPU, whose model is tiny
TORCH = "kvspray: PyTorch copies"
# GB/s from pinned memory to the GPU
MEMCPY = """
import time, torch
a, n = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True), 20
b = torch.empty_like(a, device="cuda")
for turn in range(2):
    start = time.perf_counter()
    for _ in range(n):
        b.copy_(a, non_blocking=True)
    torch.cuda.synchronize()
print(n * len(a) / (time.perf_counter() - start) / 1e9)
"""


def options(parser: Any) -> None:
    parser.add_argument("--weights-rounds", type=int, default=6, help="of each way")
    parser.add_argument(
        "--weights-other",
        default="",
        help="a folder of the host's models; default: MODEL@2, which is made where it is not there",
    )
    parser.add_argument(
        "--weights-faults", type=int, default=10, help="sidecars killed or stopped in mid load"
    )
    parser.add_argument(
        "--weights-peer",
        default="",
        help="also from another sidecar on this host, by transports such as shm,tcp",
    )


class Engine(sleeping.Engine):
    """Its weights may be replaced."""

    def __init__(self, rig: Rig, name: str, model: str, place: str, sidecar: Sidecar) -> None:
        self.rig, self.model, self.place, self.sidecar = rig, model, place, sidecar
        self.server = Server(f"weights-{name}", rig.logs)
        self.cuda = rig.host.device == "cuda"
        self.prompts = [prompt(min(n, rig.max_len // 2), f"weights {n}") for n in LENGTHS]

    def start(self) -> None:
        env = {
            **self.rig.engine_env(self.place),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "KVSPRAY_LOAD": self.sidecar.socket,
        }
        args = [
            "--worker-extension-cls",
            "kvspray_weights.Weights",
            *self.rig.engine_args(self.place),
        ]
        args += ["--enable-sleep-mode"] if self.cuda else []
        self.server.start(self.rig.host, self.model, None, *args, env=env)

    def state(self) -> tuple[str, Any]:
        _, digests = self.post("/collective_rpc", {"method": "weights_digest"})
        answers = [ask(self.server.url, ids, max_tokens=8)[1] for ids in self.prompts]
        return " ".join(digests["results"]), [a["choices"][0]["token_ids"] for a in answers]

    def rpc(self, method: str, *args: str) -> list[dict[str, Any]]:
        body = {"method": f"kvspray_load_{method}", "args": args}
        ranks: list[dict[str, Any]] = self.post("/collective_rpc", body)[1]["results"]
        wrong = [r["error"] for r in ranks if "error" in r and method not in ("poll", "cancel")]
        if wrong:
            raise Failed(f"weights: {method}: {wrong[0]}")
        return ranks

    # Ways to other weights: seconds of all, and of the load alone.

    def command(self, source: str) -> dict[str, float]:
        start = time.perf_counter()
        cmd = [str(BINARY), "load", source, "--engine", self.server.url, "--json"]
        done = subprocess.run(cmd, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Failed(f"weights: kvspray load: {done.stderr[-600:]}")
        said = json.loads(done.stdout)
        return {"all": time.perf_counter() - start, "load": said["seconds"]}

    def native(self, source: str) -> dict[str, float]:
        start = time.perf_counter()
        self.post("/sleep?level=2")
        self.post("/wake_up?tags=weights")
        body = {"method": "reload_weights", "kwargs": {"weights_path": source}}
        load, _ = self.post("/collective_rpc", body)
        self.post("/wake_up?tags=kv_cache")
        return {"all": time.perf_counter() - start, "load": load}

    def by_torch(self, source: str) -> dict[str, float]:
        return self.by_calls(source, copies="none")

    def by_sidecar(self, source: str, begun: Any = None) -> dict[str, float]:
        """Where a GPU would be, host memory, in small pieces."""
        asked = {} if self.cuda else {"copies": "sidecar", "piece_bytes": PIECE}
        return self.by_calls(source, begun, **asked)

    def by_calls(self, source: str, begun: Any = None, **asked: Any) -> dict[str, float]:
        """As the command does it, which has no options for these requests. begun: is called once
        the load is under way."""
        start, token = time.perf_counter(), secrets.token_hex(8)
        request = json.dumps({"source": source, **asked})
        digest = self.rpc("check", request)[0]["digest"]
        self.rpc("arm", token)
        try:
            self.post("/sleep?level=2")
            self.post("/wake_up?tags=weights")
            self.rpc("begin", token, request, digest)
            if begun:
                begun()
            ranks = self.rpc("poll", token, "0.5")
            while any(r["state"] == "loading" for r in ranks):
                ranks = self.rpc("poll", token, "0.5")
            wrong = [r for r in ranks if r["state"] != "loaded"]
            if wrong:
                raise Failed(f"weights: {wrong[0]}")
            self.rpc("finish", token)
        except Failed as err:
            self.rpc("cancel", token, str(err))
            raise
        done = self.rpc("release", token)
        self.post("/wake_up?tags=kv_cache")
        return {
            "all": time.perf_counter() - start,
            "load": max(r["seconds"] for r in done),
            "by_sidecar": sum(r["by_sidecar"] for r in done),
        }

    def serves(self) -> bool:
        """Whether it can be woken up after a load that has failed."""
        try:
            self.post("/wake_up")
        except urllib.error.HTTPError:
            return not json.loads(get(self.server.url + "/is_sleeping"))["is_sleeping"]
        return True


def other(rig: Rig) -> str:
    """The name of a model of the same shape."""
    name = rig.args.weights_other or f"{rig.model}@2"
    if (rig.host.models / name / "config.json").exists():
        return name
    folder = rig.host.models if rig.host.device == "cuda" else rig.run
    # Without the engines' packages: as the writer of the first one.
    subprocess.run([rig.host.python, HERE / "models.py", folder, name], check=True)
    return str(folder / name)


def ceilings(rig: Rig, folder: str) -> dict[str, Any]:
    """GB/s: reads of the files from the page cache by threads, and copies to the GPU."""
    read, rates = Plain(pathlib.Path(folder)), []
    for turn in range(4):
        start = time.perf_counter()
        nbytes = read()
        rates += [nbytes / (time.perf_counter() - start) / 1e9] if turn else []
    out: dict[str, Any] = {"plain_reads_gb_s": summary(rates)}
    if rig.host.device == "cuda":
        env = {**os.environ, **rig.engine_env("D")}
        done = subprocess.run(
            [sys.executable, "-c", MEMCPY], capture_output=True, text=True, env=env
        )
        out["memcpy_gb_s"] = float(done.stdout) if done.returncode == 0 else done.stderr[-200:]
    return out


class Loads:
    """Two sets of weights in turns, and what the engine must answer with each."""

    def __init__(self, engine: Engine, sources: list[str], wants: list[tuple[str, Any]]) -> None:
        self.engine, self.sources, self.wants = engine, sources, wants
        self.at, self.gb = 0, sum(p.stat().st_size for p in files(pathlib.Path(sources[1]))) / 1e9

    def next(
        self, way: Any, what: str, source: str = "", **more: Any
    ) -> tuple[dict[str, float], str]:
        """Seconds, and what is wrong. A way that raises leaves the weights unknown."""
        to = 1 - self.at
        took = way(source or self.sources[to], **more)
        self.at = to
        state = self.engine.state()
        wrong = "" if state == self.wants[to] else f"{what}: {state}, not {self.wants[to]}"
        return took, wrong

    def rates(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        out = {f"{key}_s": summary([r[key] for r in rows]) for key in ("all", "load")}
        out |= {f"{key}_gb_s": summary([self.gb / r[key] for r in rows]) for key in ("all", "load")}
        return out | {"by_sidecar": [r["by_sidecar"] for r in rows if "by_sidecar" in r]}


def tell(name: str, row: dict[str, Any]) -> None:
    median = {key: row[key]["median"] for key in ("load_gb_s", "all_gb_s", "load_s", "all_s")}
    say(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in median.items()))


def rounds(loads: Loads, n: int, out: dict[str, Any]) -> list[str]:
    e, problems = loads.engine, []
    ways = {
        "kvspray load": e.command,
        "calls": e.by_sidecar,
        "PyTorch's copies": e.by_torch,
        "vLLM": e.native,
    }
    got: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(-1, n):  # the first loads compile and warm up
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in order:  # so that each way loads both
            took, wrong = loads.next(ways[name], f"round {turn}, {name}")
            problems += [wrong] if wrong else []
            if turn >= 0:
                got[name].append(took)
                out[name] = loads.rates(got[name])
        if len(problems) > 5:
            break
    for name in ways:
        tell(name, out[name])
    out["copies_by_torch"] = e.server.log.read_text(errors="replace").count(TORCH)
    if out["copies_by_torch"] or not all(row["by_sidecar"] for row in got["calls"]):
        problems.append(f"the sidecar did not copy all: {out['copies_by_torch']} times PyTorch did")
    return problems


def hit(sidecar: Sidecar, kill: bool, after: float) -> None:
    time.sleep(after)
    if kill:
        sidecar.kill()
        sidecar.start()
    else:
        sidecar.stop_for(1.5)


def faults(
    loads: Loads, sidecar: Sidecar, n: int, longest: float, source: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Of loads from the directories, or from a source of the second weights. Each ends with right
    weights, or it fails and the engine serves nothing until the next one."""
    e, r = loads.engine, random.Random(1)
    problems: list[str] = []
    failed: list[str] = []
    copied: list[float] = []
    for turn in range(n):
        kill = bool(source) or turn % 2 == 0
        thread = threading.Thread(target=hit, args=(sidecar, kill, r.random() * longest))
        try:
            took, wrong = loads.next(e.by_sidecar, f"fault {turn}", source, begun=thread.start)
            copied.append(took["by_sidecar"])
        except Failed as err:
            failed.append(str(err)[:300])
            wrong = f"fault {turn}: the engine serves after {err}" if e.serves() else ""
        problems += [wrong] if wrong else []
        if thread.ident is None:
            raise Failed(f"weights: fault {turn}: no load began: {failed}")
        thread.join()
        for _ in range(2 if source and not loads.at else 1):  # the next fault's is the second again
            _, wrong = loads.next(e.command, f"after fault {turn}")
            problems += [wrong] if wrong else []
    return {"n": n, "failed": failed, "by_sidecar": copied}, problems


def peer(loads: Loads, transport: str, a: Any, out: dict[str, Any]) -> list[str]:
    """From another sidecar, whose transport it is alone."""
    e, rig = loads.engine, loads.engine.rig
    config = rig.sidecar_config([f'transports.order=["{transport}"]'])
    there = Sidecar(f"weights-from-{transport}", rig.run, config)
    there.log = rig.logs / f"{there.name}.log"
    e.sidecar.stop()
    e.sidecar.config = merge(e.sidecar.config, config)
    e.sidecar.start()
    there.start()
    if loads.at:
        loads.next(e.command, "before the peer's")
    cmd = [rig.host.python, "-m", "kvspray.offer", loads.sources[1], "--listen", "127.0.0.1:0"]
    offer = subprocess.Popen(
        [*cmd, "--socket", there.socket],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **rig.host.env},
    )
    problems, rows = [], []
    try:
        assert offer.stdout is not None
        url = offer.stdout.readline().split()[-1]
        for turn in range(-1, max(2, a.weights_rounds // 2)):
            way = e.command if turn < 0 else e.by_sidecar
            took, wrong = loads.next(way, f"{transport}, round {turn}", url)
            problems += [wrong] if wrong else []
            rows += [took] if turn >= 0 else []
            loads.next(e.command, "back")
        if not all(r["by_sidecar"] for r in rows):
            problems.append(f"{transport}: the sidecar copied nothing: {rows}")
        out.update(loads.rates(rows))
        tell(f"from a peer by {transport}", out)
        longest = out["load_s"]["median"]
        out["faults"], wrongs = faults(loads, there, a.weights_faults // 2, longest, url)
        problems += wrongs
        say(f"  the peer's sidecar killed: {out['faults']}")
    finally:
        offer.terminate()
        offer.wait(30)
        there.stop()
    return problems


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, a = stage.rig, stage.args
    models = [rig.model, other(rig)]
    sources = [str(rig.host.models / m) for m in models]
    sidecar = Sidecar("weights-sidecar", rig.run, rig.sidecar_config())
    sidecar.log = rig.logs / "weights-sidecar.log"
    engine, plain = (
        Engine(rig, name, model, place, sidecar)
        for name, model, place in (("first", models[0], "D"), ("second", models[1], "P"))
    )
    if not all(files(pathlib.Path(s)) for s in sources):
        raise Failed(f"weights: {sources}: models.py has written no weights")
    out: dict[str, Any] = {}
    rig.so_far = out
    try:
        sidecar.start()
        for e in (engine, plain):
            e.start()
        wait_up([engine.server, plain.server])
        wants = [engine.state(), plain.state()]
        if wants[0][0] == wants[1][0] or wants[0][1] == wants[1][1]:
            raise Failed(f"weights: both say {wants[0]}: nothing would be shown")
        plain.stop()
        loads = Loads(engine, sources, wants)
        out.update({"gb": loads.gb, **ceilings(rig, sources[1])})
        say(f"{loads.gb:.2f} GB; ceilings: {out}")
        problems = rounds(loads, a.weights_rounds, out.setdefault("ways", {}))
        longest = out["ways"]["calls"]["load_s"]["median"]
        out["faults"], wrong = faults(loads, sidecar, a.weights_faults, longest)
        problems += wrong
        say(f"faults: {out['faults']}")
        for transport in (t for t in a.weights_peer.split(",") if t):
            row = out.setdefault("peer", {}).setdefault(transport, {})
            problems += peer(loads, transport, a, row)
    finally:
        for e in (plain, engine):
            e.stop()
        sidecar.stop()
    return out, problems
