"""GPU memory with one engine at its greatest share: an engine that sends and receives, its
sidecar, and a peer without an engine on the same GPU, under a load that fills the cache. Nothing
may run out of memory, no transfer may fail."""

from __future__ import annotations

import collections
import concurrent.futures as cf
import json
import re
import secrets
import threading
import time
from typing import Any

import nvml
from clients import prompt
from cluster import Failed, Sidecar, total, wait_for
from cost import Peer
from pairs import MIB, Rig, as_source, say, wait_up
from servers import Server, ask, kvspray_config

NEEDS: set[str] = set()
# On a CPU it is of the host's memory, and proves the script alone.
SHARE = {"cuda": 0.95, "cpu": 0.04}
FROM, TO = 3, 2  # prompts that come from the peer, and go to it, at a time
POOL = FROM + TO  # prompts that the peer holds
PEAK = 0.9  # of the cache is in use by running requests, at least, at some time
ANSWER = 64
START_S = 540.0
# A request may wait long for blocks where the cache is full.
PATIENT = ("transfer.deadline=90s", "transfer.match_timeout=60s")
OUT_OF_MEMORY = re.compile(
    r".*(?:out of memory|OUT_OF_MEMORY|OutOfMemory|No available memory).*", re.IGNORECASE
)


def options(parser: Any) -> None:
    parser.add_argument(
        "--share", type=float, default=0, help="--gpu-memory-utilization; default 0.95"
    )
    parser.add_argument("--memory-seconds", type=float, default=90, help="of load")
    parser.add_argument("--memory-tokens", type=int, default=8192, help="of a prompt that moves")


class Watch(threading.Thread):
    """Free memory at its lowest, and the maximum of each process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.end, self.gpu = threading.Event(), nvml.open_first()
        self.lowest: int | None = None
        self.peak: dict[int, int] = {}

    def run(self) -> None:
        while self.gpu is not None and not self.end.wait(0.01):
            free = self.gpu.free()
            self.lowest = free if self.lowest is None else min(self.lowest, free)
            for pid, used in self.gpu.processes().items():
                self.peak[pid] = max(used, self.peak.get(pid, 0))

    def free(self) -> int | None:
        return self.gpu.free() if self.gpu is not None else None

    def stop(self) -> None:
        self.end.set()
        self.join()


class Load:
    """Three kinds of prompts at once: from the peer, to the peer, and computed and kept here."""

    def __init__(self, rig: Rig, engine: Server, sidecar: Sidecar, peer: Peer, n: int) -> None:
        self.rig, self.engine, self.sidecar, self.peer, self.n = rig, engine, sidecar, peer, n
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.lock = threading.Lock()
        self.turn = 0
        self.usage, self.long = 0.0, ANSWER

    def one(self, kind: str, place: int) -> None:
        """place: of the prompt in the peer's memory, which nothing else uses meanwhile."""
        with self.lock:
            self.turn += 1
            turn = self.turn
        ids = prompt(self.n, ("memory", kind, turn))
        if kind == "from the peer":
            _, answer = ask(self.engine.url, ids, self.peer.offer(ids, place), max_tokens=ANSWER)
        elif kind == "to the peer":
            xfer = secrets.token_hex(16)
            lease = self.peer.pull(ids, xfer, self.sidecar.endpoint, place)
            _, answer = ask(self.engine.url, ids, as_source(xfer))
            self.peer.finish([lease])
        else:
            ids = prompt(self.rig.max_len - self.long - 8, ("memory", kind, turn))
            _, answer = ask(self.engine.url, ids, max_tokens=self.long)
        with self.lock:
            self.counts[kind] += 1
            self.counts["tokens"] += len(ids)
        if "choices" not in answer:
            raise Failed(f"{kind}: {answer}")

    def client(self, kind: str, place: int, end: float) -> None:
        while time.monotonic() < end and not self.problems:
            try:
                self.one(kind, place)
            except (Failed, OSError, ValueError) as err:
                self.problems.append(f"{kind}: {err}"[:400])

    def run(self, seconds: float, kept: int) -> None:
        """kept: prompts of the greatest length under way at a time, which fill the cache. Each is
        answered for as many steps as all of them take to be computed."""
        steps = kept * self.rig.max_len // self.rig.step_tokens
        self.long = min(int(1.5 * steps), self.rig.max_len // 4)
        end = time.monotonic() + seconds
        kinds = [*["from the peer"] * FROM, *["to the peer"] * TO, *["computed here"] * kept]
        with cf.ThreadPoolExecutor(len(kinds)) as pool:
            clients = [pool.submit(self.client, kind, i, end) for i, kind in enumerate(kinds)]
            while not all(c.done() for c in clients):
                m = self.engine.metrics()
                self.usage = max(self.usage, total(m, "vllm:kv_cache_usage_perc"))
                time.sleep(0.2)
            for c in clients:
                c.result()


def engine_args(rig: Rig, share: float) -> list[str]:
    """The arguments of all engines, whose cache takes what the share leaves."""
    args = rig.engine_args("P")
    for name in ("--kv-cache-memory-bytes", "--gpu-memory-utilization"):
        while name in args:
            at = args.index(name)
            del args[at : at + 2]
    return [*args, "--gpu-memory-utilization", str(share)]


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, a, problems = stage.rig, stage.rig.args, []
    share = a.share or SHARE[a.device]
    tokens = min(a.memory_tokens, rig.max_len - 2 * ANSWER)
    watch = Watch()
    out: dict[str, Any] = {"share": share, "free": {"before": watch.free()}}
    free, rig.so_far = out["free"], out
    sets, a.set = a.set, [*a.set, *PATIENT]
    sidecar = Sidecar("memory-sidecar", rig.run, rig.sidecar_config())
    sidecar.log = rig.logs / "memory-sidecar.log"
    engine = Server("memory-engine", rig.logs)
    peer: Peer | None = None
    watch.start()
    try:
        sidecar.start()
        free["with the sidecar"] = watch.free()
        kv = kvspray_config(
            sidecar.socket, "kv_both", rig.host.memory, ("kvspray_rig", "PagesConnector")
        )
        engine.start(rig.host, rig.model, kv, *engine_args(rig, share), env=rig.engine_env("P"))
        wait_up([engine], START_S)
        wait_for(
            "the engine's sessions",
            lambda: total(sidecar.metrics(), "kvspray_engine_sessions") >= 2,
            60,
            tick=0.1,
        )
        free["with the engine"] = watch.free()
        cached = cache_tokens(rig)
        peer = Peer(rig, tokens, POOL)
        load = Load(rig, engine, sidecar, peer, tokens)
        load.one("from the peer", 0)
        load.one("to the peer", FROM)
        free["with the peer"] = watch.free()
        kept = min(a.seqs - POOL, -(-cached // rig.max_len) + 1)
        say(f"the cache has {cached} tokens; {kept} prompts of {rig.max_len} at a time fill it")
        load.run(a.memory_seconds, max(1, kept))
        problems += load.problems
        watch.stop()
        assert peer is not None
        pids = {"engine": engine.pids(), "sidecar": sidecar.pids(), "peer": peer.sidecar.pids()}
        peak = {name: sum(watch.peak.get(pid, 0) for pid in of) // MIB for name, of in pids.items()}
        m = engine.metrics()
        ends = {
            k: v for k, v in m.items() if k.startswith("vllm:kvspray_") and "transfers_total" in k
        }
        out["held_bytes"] = {
            name: {k: v for k, v in s.metrics().items() if k.startswith("kvspray_gpu_memory")}
            for name, s in (("sidecar", sidecar), ("peer", peer.sidecar))
        }
        # What goes when a process ends was its own, also where the driver lists no processes.
        before = watch.free()
        peer, gone = None, peer
        gone.close()
        after_peer = watch.free()
        sidecar.stop()
        after_sidecar = watch.free()
        if before is not None:
            peak |= {
                "peer, by its end": (after_peer - before) // MIB,
                "sidecar, by its end": (after_sidecar - after_peer) // MIB,
            }
        out |= {
            "cache_tokens": cached,
            "cache_in_use_at_most": load.usage,
            "preempted": total(m, "vllm:num_preemptions_total"),
            "lowest_free": watch.lowest,
            "peak_mib": peak,
            "counts": dict(load.counts),
            "ends": ends,
        }
        problems += [f"{k}: {v:g}" for k, v in ends.items() if v and 'outcome="ok"' not in k]
        if load.usage < PEAK:
            problems.append(f"running requests took {load.usage:.2f} of the cache at most")
        print(
            f"memory: --gpu-memory-utilization {share:g}, {cached} tokens of cache, "
            f"{load.usage:.0%} of it in use at most; free at its lowest "
            f"{'unknown' if watch.lowest is None else watch.lowest // MIB} MiB; MiB of each: "
            f"{peak}; {dict(load.counts)}"
        )
    finally:
        a.set = sets
        watch.end.set()
        if peer is not None:
            peer.close()
        engine.stop()
        sidecar.stop()
        for name in ("memory-engine", "memory-sidecar", "peer-sidecar"):
            path = rig.logs / f"{name}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            problems += [f"{name}: {line[:300]}" for line in OUT_OF_MEMORY.findall(text)[:3]]
    return out, problems


def cache_tokens(rig: Rig) -> int:
    groups = json.loads((rig.pages / "P/layout.json").read_text())["groups"]
    return int(min(g["num_blocks"] * g["tokens_per_block"] for g in groups))
