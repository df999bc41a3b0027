#!/usr/bin/env python3
"""SGLang's own CPU servers with kvspray beside its other backends, in turns. `make bench-sglang`,
or: bench_sglang.py hicache|pd [options]

hicache: conversations of several turns, as in SGLang's bench_multiturn, on one server for each
storage backend. The caches of the server hold a part of the conversations only, so the store must
have the rest. Then "back": all prompts again, with the server's own caches empty.

pd: the time to the first token through a prefill server, a decode server and SGLang's router, minus
that of one plain server.

A backend that does not start is reported with the end of its log, and the others go on. Each wait
has a bound.
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "sglang"))

import cluster as rig
import servers
import sglang_server as sgl
from sglang_pair import Router

BUILD = pathlib.Path(os.environ.get("KVSPRAY_BUILD", rig.ROOT / ".build"))
PEERS = BUILD / "venv-peers"
ANSWER_S = 120.0  # of one request
SETTLE_S = 60.0  # until a server has stored everything
STORES = ("none", "file", "nixl", "mooncake", "mooncake-own", "kvspray")
TRANSFERS = ("kvspray", "kvspray-tcp", "mooncake", "nixl")
START = time.monotonic()


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s, load {os.getloadavg()[0]:.1f}] {text}", flush=True)


def wide_model(dir: pathlib.Path, layers: int, heads: int, size: int) -> pathlib.Path:
    """A model with little to compute and much to store."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvspray.trial import tiny_model

    tok = tiny_model.tokenizer()
    tok.save_pretrained(dir)
    ids = {
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=tiny_model.VOCAB, hidden_size=128, intermediate_size=256,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=size,
        num_hidden_layers=layers, max_position_embeddings=tiny_model.POSITIONS,
        tie_word_embeddings=False, **ids)
    )  # fmt: skip
    gen = torch.Generator().manual_seed(tiny_model.SEED)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(
                    torch.randn(p.shape, generator=gen)
                    * (1.0 if "embed" in name else 2.0 / p.shape[-1] ** 0.5)
                )
    model.to(torch.bfloat16).save_pretrained(dir)
    return dir


def token_bytes(a: argparse.Namespace) -> int:
    return 2 * a.layers * a.heads * a.head_size * (4 if a.dtype == "float32" else 2)


@dataclasses.dataclass
class Answer:
    ttft: float
    total: float
    tokens: list[int]
    cached: int
    stored: int  # of the cached tokens, those that the server reports it has from the store


def stream(port: int, ids: Sequence[int], tokens: int) -> Answer:
    """One greedy answer; the time is that from the request to the first token."""
    body = {
        "input_ids": list(ids),
        "stream": True,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    start, ttft, last = time.perf_counter(), 0.0, {}
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        conn.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = conn.getresponse()
        if response.status != 200:
            raise rig.Failed(f"HTTP {response.status}: {response.read(400)!r}")
        for raw in response:
            line = raw.strip()
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            last = json.loads(line[5:])
            if "error" in last:
                raise rig.Failed(str(last["error"])[:400])
            if last.get("output_ids"):
                ttft = ttft or time.perf_counter() - start
    finally:
        conn.close()
    if not ttft:
        raise rig.Failed("an answer without a token")
    meta = last["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        ttft,
        time.perf_counter() - start,
        last["output_ids"],
        meta["cached_tokens"],
        int(details.get("storage", 0)),
    )


def memory_of(pids: Sequence[int]) -> int:
    """MiB that these processes have, pages that several of them map counted once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total // 1024


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def peers_env() -> dict[str, str]:
    found = list(PEERS.glob("lib/python3*/site-packages"))
    if not found:
        raise rig.Failed(f"{PEERS} is missing: make bench-sglang makes it")
    return {"PYTHONPATH": f"{sgl.CPU.env['PYTHONPATH']}{os.pathsep}{found[0]}"}


class Child:
    """A server that another process has forked, as if it were one of subprocess."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        with contextlib.suppress(OSError):
            if (
                pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
                != "Z"
            ):
                return None
        return -1

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = 30.0) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("sglang", timeout)
            time.sleep(0.1)
        return -1


class Forks:
    """The process that has imported SGLang, of which all servers are forks."""

    def __init__(self, logs: pathlib.Path) -> None:
        env = {
            **os.environ,
            **sgl.CPU.env,
            "SGLANG_HOST_IP": "127.0.0.1",
            "PYTHONWARNINGS": "ignore",
        }
        script = pathlib.Path(__file__).with_name("sglang_fork.py")
        with (logs / "fork.log").open("ab") as out:
            self.proc = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=env,
            )
        self.lock = threading.Lock()
        FORKS.append(self)
        self.line()

    def line(self) -> str:
        assert self.proc.stdout is not None
        got = self.proc.stdout.readline().decode().strip()
        if not got:
            raise rig.Failed("the process that forks servers has ended: see fork.log")
        return got

    def start(self, args: list[str], env: dict[str, str], log: pathlib.Path) -> Child:
        assert self.proc.stdin is not None
        with self.lock:
            self.proc.stdin.write(
                json.dumps({"args": args, "env": env, "log": str(log)}).encode() + b"\n"
            )
            self.proc.stdin.flush()
            return Child(int(self.line()))

    def stop(self) -> None:
        self.proc.kill()
        self.proc.wait()


FORKS: list[Forks] = []


class Server(sgl.Server):
    """As users start it, or a fork."""

    def spawn(
        self, cmd: list[str], env: dict[str, str] | None = None, cwd: pathlib.Path | None = None
    ) -> None:
        if not FORKS:
            super().spawn(cmd, env, cwd)
            return
        self.started = time.monotonic()
        self.proc = FORKS[0].start(cmd[3:], env or {}, self.log)  # type: ignore[assignment]

    def stop(self, timeout: float = 0.0) -> None:
        """At once: SGLang's orderly end takes as long as a start."""
        self.kill()


class Part(servers.Process):
    """A process that a backend needs, up when its port is open."""

    def up(self) -> bool:
        import socket

        if self.proc is None or self.proc.poll() is not None:
            raise rig.Failed(f"{self.name} ended; the end of {self.log}:\n{self.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore as Store
store = Store()
rc = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[3])
print("kvspray-bench: holder", rc, flush=True)
if rc == 0:
    import threading
    threading.Event().wait()
"""


class Store:
    """A server with HiCache and one storage backend, and the processes that the backend has."""

    def __init__(
        self,
        name: str,
        run: pathlib.Path,
        logs: pathlib.Path,
        host: sgl.Host,
        a: argparse.Namespace,
    ) -> None:
        self.name, self.run, self.logs, self.host, self.a = name, run, logs, host, a
        self.parts: list[Part] = []
        self.sidecar: rig.Sidecar | None = None
        self.server: Server | None = None

    def start(self) -> Store:
        self.server = Server(
            f"hicache-{self.name}", self.logs, *self.command(), host=self.host
        ).start()
        return self

    def command(self) -> tuple[list[str], dict[str, str]]:
        args = [
            "--enable-hierarchical-cache", "--hicache-ratio", str(self.a.ratio),
            "--hicache-write-policy", "write_through", "--hicache-io-backend", "direct",
            "--hicache-mem-layout", "page_first_direct", "--chunked-prefill-size", "512",
        ]  # fmt: skip
        env: dict[str, str] = {}
        if self.name == "none":
            return args, env
        kind, extra = self.name, {"prefetch_threshold": self.host.page}
        if self.name == "kvspray":
            self.sidecar = rig.Sidecar(
                "s", self.run, quiet() | {"store": {"memory": f"{self.a.room}MiB"}}
            )
            self.sidecar.start()
            given = sgl.with_store(self.sidecar, self.host)
            kind, extra = (
                "dynamic",
                json.loads(given[given.index("--hicache-storage-backend-extra-config") + 1]),
            )
        elif self.name == "file":
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.folder())
        elif self.name == "nixl":
            env |= peers_env() | {
                "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(self.folder()),
                "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN": "POSIX",
                "SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "1" if self.a.nixl_direct else "0",
            }
        else:
            env |= peers_env()
            kind, extra = "mooncake", extra | self.mooncake(env)
        args += [
            "--hicache-storage-backend",
            kind,
            "--hicache-storage-prefetch-policy",
            "wait_complete",
        ]
        return [*args, "--hicache-storage-backend-extra-config", json.dumps(extra)], env

    def folder(self) -> pathlib.Path:
        dir = self.a.disk / f"kvspray-bench-{self.name}-{os.getpid()}"
        dir.mkdir(parents=True)
        return dir

    def mooncake(self, env: Mapping[str, str]) -> dict[str, Any]:
        """As SGLang's README of the backend describes, over tcp: a master; pages in a process of
        their own, or (own) in the server."""
        own = self.name == "mooncake-own"
        master = Part(f"{self.name}-master", self.logs)
        binary = next(PEERS.glob("lib/python3*/site-packages/mooncake/mooncake_master"))
        master.spawn([
            str(binary), f"--rpc_port={master.port}", f"--metrics_port={rig.free_port()}",
            "--eviction_high_watermark_ratio=0.95",
        ])  # fmt: skip
        self.parts.append(master)
        rig.wait_for("mooncake's master", master.up, 60, 0.1)
        address, room = f"127.0.0.1:{master.port}", self.a.room << 20
        if not own:
            holder = Part(f"{self.name}-pages", self.logs)
            holder.spawn(
                [sys.executable, "-c", HOLDER, f"127.0.0.1:{rig.free_port()}", str(room), address],
                dict(env),
            )
            self.parts.append(holder)
            rig.wait_for(
                "mooncake's process with the pages",
                lambda: "holder 0" in holder.tail(200),
                120,
                0.2,
            )
        return {
            "master_server_address": address, "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE", "global_segment_size": room if own else 0,
            "protocol": "tcp", "device_name": "",
        }  # fmt: skip

    def pids(self) -> list[int]:
        out = [
            *(p for part in self.parts for p in part.pids()),
            *(self.server.pids() if self.server else []),
        ]
        return out + (self.sidecar.pids() if self.sidecar else [])

    def settle(self) -> None:
        """Until the processes rest: what was computed is then stored."""
        end, last, rest = time.monotonic() + SETTLE_S, -1.0, 0
        while time.monotonic() < end and rest < 3:
            time.sleep(0.5)
            now = servers.cpu_seconds(self.pids())
            rest = rest + 1 if now - last < self.a.rest else 0
            last = now

    def empty(self, store: bool) -> None:
        assert self.server is not None
        self.settle()
        self.server.forget()
        if store and self.name != "none":
            self.server.post("/hicache/storage-backend/clear", timeout=60)

    def stop(self) -> None:
        for p in (self.server, *self.parts, self.sidecar):
            if p is not None:
                p.stop()
        shutil.rmtree(self.a.disk / f"kvspray-bench-{self.name}-{os.getpid()}", ignore_errors=True)


def quiet() -> dict[str, Any]:
    """A sidecar without the traces that tests read."""
    return {"log": {"level": "warn"}, "trace": {"transfers": "", "block_hashes": ""}}


class Talks:
    """The conversations of a round, and the answers of a server that has no cache, with which all
    are continued."""

    def __init__(self, a: argparse.Namespace, seed: int) -> None:
        r = random.Random(seed)
        self.new = [
            [[r.randrange(2, 900) for _ in range(a.new)] for _ in range(a.turns)]
            for _ in range(a.clients)
        ]
        self.answers: list[list[list[int]]] = [[] for _ in range(a.clients)]
        self.seed, self.a = seed, a

    def prompt(self, client: int, turn: int) -> list[int]:
        out: list[int] = []
        for n in range(turn + 1):
            out += self.new[client][n] + (self.answers[client][n] if n < turn else [])
        return out

    def refer(self, plain: Store) -> None:
        assert plain.server is not None
        for turn in range(self.a.turns):
            for client in range(self.a.clients):
                plain.server.forget()
                ids = self.prompt(client, turn)
                self.answers[client].append(plain.server.generate(ids, self.a.answer)[0])


def side_by_side(jobs: Iterator[Callable[[], None]], workers: int) -> None:
    with cf.ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(j) for j in jobs]:
            done.result(ANSWER_S * 20)


def multiturn(store: Store, talks: Talks) -> dict[str, Any]:
    """All turns of all conversations; the next request is a random one of those whose conversation
    has its last answer."""
    a, order = store.a, random.Random(talks.seed)
    assert store.server is not None
    port, ready, answers = store.server.port, [(c, 0) for c in range(a.clients)], []
    changed: queue.Queue[tuple[int, int] | None] = queue.Queue()
    left = a.clients * a.turns
    cpu = servers.cpu_seconds(store.pids())
    start = time.perf_counter()

    def ask(client: int, turn: int) -> None:
        ids = talks.prompt(client, turn)
        try:
            answers.append((len(ids), stream(port, ids, a.answer), talks.answers[client][turn]))
        finally:
            changed.put((client, turn + 1))

    with cf.ThreadPoolExecutor(a.parallel) as pool:
        flying: list[cf.Future[None]] = []
        for _ in range(a.parallel):
            if ready:
                flying.append(pool.submit(ask, *ready.pop(order.randrange(len(ready)))))
        while left:
            got = changed.get(timeout=ANSWER_S)
            left -= 1
            if got is not None and got[1] < a.turns:
                ready.append(got)
            if ready:
                flying.append(pool.submit(ask, *ready.pop(order.randrange(len(ready)))))
        for f in flying:
            f.result(ANSWER_S)
    return figures(store, answers, time.perf_counter() - start, cpu)


def back(store: Store, talks: Talks) -> dict[str, Any]:
    """The last prompts again, one token each: what the server has is in the store only."""
    a, answers = store.a, []
    assert store.server is not None
    port, cpu, start = store.server.port, servers.cpu_seconds(store.pids()), time.perf_counter()
    order = random.Random(talks.seed + 1).sample(range(a.clients), a.clients)

    def ask(client: int) -> None:
        ids = talks.prompt(client, a.turns - 1)
        answers.append((len(ids), stream(port, ids, 1), talks.answers[client][-1][:1]))

    side_by_side((lambda c=c: ask(c) for c in order), a.parallel)
    return figures(store, answers, time.perf_counter() - start, cpu)


def figures(
    store: Store, answers: list[tuple[int, Answer, list[int]]], took: float, cpu: float
) -> dict[str, Any]:
    ttft = [x.ttft for _, x, _ in answers]
    prompts = sum(n for n, _, _ in answers)
    return {
        "requests": len(answers), "requests_per_s": len(answers) / took,
        "tokens_per_s": (prompts + sum(len(x.tokens) for _, x, _ in answers)) / took,
        "ttft_p50_ms": percentile(ttft, 0.5) * 1e3, "ttft_p99_ms": percentile(ttft, 0.99) * 1e3,
        "hit_rate": sum(x.cached for _, x, _ in answers) / prompts,
        "store_rate": sum(x.stored for _, x, _ in answers) / prompts,
        "equal": sum(x.tokens == want for _, x, want in answers),
        "cpu_s": servers.cpu_seconds(store.pids()) - cpu, "memory_mib": memory_of(store.pids()),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def hicache(a: argparse.Namespace, run: pathlib.Path, logs: pathlib.Path) -> dict[str, Any]:
    model = wide_model(run / "model", a.layers, a.heads, a.head_size)
    host = dataclasses.replace(
        sgl.CPU, model=model, page=a.page, args=("--device", "cpu", "--mem-fraction-static", "0.7",
        "--max-total-tokens", str(a.device_tokens), "--disable-overlap-schedule",
        "--sleep-on-idle", "--dtype", a.dtype),
    )  # fmt: skip
    per_token = token_bytes(a)
    log(
        f"{a.clients} conversations of {a.turns} turns of {a.new} new tokens; {per_token // 1024} "
        f"KiB each token, pages of {a.page} tokens"
    )
    names = list(dict.fromkeys(["none", *a.stores.split(",")]))
    stores, failed = started([Store(n, run, logs, host, a) for n in names], a)
    try:
        rounds: dict[str, list[dict[str, Any]]] = {n: [] for n in stores}
        for turn in within(a.rounds, a.budget):
            talks = Talks(a, a.seed + turn)
            talks.refer(stores["none"])
            log(f"round {turn}: the answers without a cache are there")
            order = list(stores)[turn % len(stores) :] + list(stores)[: turn % len(stores)]
            for name in order:
                store = stores[name]
                try:
                    store.empty(store=True)
                    row = {"talks": multiturn(store, talks)}
                    store.empty(store=False)
                    row["back"] = back(store, talks)
                except (
                    rig.Failed,
                    OSError,
                    http.client.HTTPException,
                    queue.Empty,
                    cf.TimeoutError,
                ) as err:
                    failed[name] = f"round {turn}: {type(err).__name__}: {err}"
                    log(f"{name} failed: {failed[name]}")
                    continue
                if turn:  # the first one warms up
                    rounds[name].append(row)
                t, b = row["talks"], row["back"]
                log(
                    f"round {turn}{'' if turn else ' (warm-up)'}: {name:12} "
                    f"{t['requests_per_s']:5.2f} req/s, TTFT {t['ttft_p50_ms']:5.0f} ms, hits "
                    f"{t['hit_rate']:.2f}, equal {t['equal']}/{t['requests']}; back "
                    f"{b['requests_per_s']:5.2f} req/s, TTFT {b['ttft_p50_ms']:5.0f} ms, hits "
                    f"{b['hit_rate']:.2f}"
                )
    finally:
        for s in stores.values():
            s.stop()
    show_stores(rounds)
    return {"rounds": rounds, "failed": failed, "bytes_per_token": per_token}


def within(rounds: int, budget: float) -> Iterator[int]:
    """Numbers of the rounds: one that warms up, and then those that begin in time, at least one."""
    begun = time.monotonic()
    for turn in range(rounds + 1):
        if turn > 1 and time.monotonic() - begun > budget:
            log(f"{turn - 1} of {rounds} rounds: --budget is used up")
            return
        yield turn


def started(stores: list[Any], a: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Those that came up; and why the others did not. --starts of them start at a time."""
    up: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def one(s: Any) -> None:
        try:
            s.start()
            begun = time.monotonic()
            rig.wait_for(s.name, s.server.up, a.start_timeout, 0.5)
            log(f"{s.name} is up after {time.monotonic() - begun:.0f} s")
            up[s.name] = s
        except (rig.Failed, OSError, StopIteration) as err:
            failed[s.name] = str(err)[-1500:]
            log(f"{s.name} does not start: {str(err)[-600:]}")
            s.stop()

    try:
        with cf.ThreadPoolExecutor(a.starts) as pool:
            list(pool.map(one, stores))
    except BaseException:
        for s in stores:
            s.stop()
        raise
    return {s.name: up[s.name] for s in stores if s.name in up}, failed


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    low, mid, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{mid} ({low} to {high})"


def show_stores(rounds: Mapping[str, list[dict[str, Any]]]) -> None:
    for part in ("talks", "back"):
        print(
            f"\n{part}: medians of the rounds, and their range\n{'store':14}"
            f"{'requests/s':>22}{'tokens/s':>22}{'TTFT p50, ms':>22}{'p99, ms':>22}"
            f"{'hits':>6}{'store':>6}{'equal':>9}{'CPU s':>7}{'MiB':>7}  by mooncake"
        )
        for name, rows in rounds.items():
            if not rows:
                continue
            r = {k: [row[part][k] for row in rows] for k in rows[0][part]}
            other = [row[part]["requests_per_s"] for row in rounds.get("mooncake", [])]
            ratio = [x / y for x, y in zip(r["requests_per_s"], other, strict=False)]
            print(
                f"{name:14}{spread(r['requests_per_s']):>22}"
                f"{spread(r['tokens_per_s'], '{:.0f}'):>22}"
                f"{spread(r['ttft_p50_ms'], '{:.0f}'):>22}"
                f"{spread(r['ttft_p99_ms'], '{:.0f}'):>22}"
                f"{statistics.median(r['hit_rate']):6.2f}{statistics.median(r['store_rate']):6.2f}"
                f"{sum(r['equal']):5}/{sum(r['requests'])}{statistics.median(r['cpu_s']):7.1f}{statistics.median(r['memory_mib']):7.0f}"
                f"  {spread(ratio) if ratio else ''}"
            )


class PairOf:
    """Prefill, decode and router with one transfer backend. Two sidecars of a host use shared
    memory, unless configured not to (kvspray-tcp)."""

    def __init__(self, name: str, run: pathlib.Path, logs: pathlib.Path, host: sgl.Host) -> None:
        self.name, self.logs, self.host = name, logs, host
        self.bootstrap = rig.free_port()
        ours = name.startswith("kvspray")
        config = quiet() | ({"transports": {"order": ["tcp"]}} if name == "kvspray-tcp" else {})
        self.sidecars = [rig.Sidecar(n + name[7:], run, config) for n in ("p", "d")] if ours else []
        env: dict[str, str] = {} if ours else peers_env()
        if name == "mooncake":
            env |= {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
        elif name == "nixl":
            env |= {
                "UCX_TLS": "self,sm,tcp",
                "SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX",
                "KVSPRAY_BENCH_NIXL": "DRAM",
            }
        envs = [
            env | ({"KVSPRAY_SGLANG_SOCKET": s.socket} if s else {})
            for s in (self.sidecars or (None, None))
        ]
        both = [
            "--disaggregation-transfer-backend", name.partition("-")[0],
            "--disaggregation-bootstrap-port", str(self.bootstrap), "--chunked-prefill-size",
            "8192", "--hicache-ratio", "1",
        ]  # fmt: skip
        self.prefill = Server(
            f"prefill-{name}", logs, [*both, "--disaggregation-mode", "prefill"], envs[0], host
        )
        self.decode = Server(
            f"decode-{name}", logs, [*both, "--disaggregation-mode", "decode"], envs[1], host
        )
        self.router = Router(f"router-{name}", logs)
        self.server = self  # of which started waits for up()

    def start(self) -> PairOf:
        for s in self.sidecars:
            s.start()
        self.prefill.start()
        self.decode.start()
        return self

    def up(self) -> bool:
        if not (self.prefill.up() and self.decode.up()):
            return False
        if self.router.proc is None:
            self.router.start(self.prefill, self.bootstrap, self.decode)
        return self.router.up()

    @property
    def port(self) -> int:
        return self.router.port

    def forget(self) -> None:
        for s in (self.prefill, self.decode):
            s.forget()

    def pids(self) -> list[int]:
        return [p for x in (self.prefill, self.decode, *self.sidecars) for p in x.pids()]

    def stop(self) -> None:
        for p in (self.router, self.prefill, self.decode, *self.sidecars):
            p.stop()


class Plain:
    def __init__(self, logs: pathlib.Path, host: sgl.Host) -> None:
        self.name = "plain"
        self.server = Server("plain", logs, ["--chunked-prefill-size", "8192"], host=host)
        self.start, self.stop, self.pids, self.forget = (
            self.server.start,
            self.server.stop,
            self.server.pids,
            self.server.forget,
        )

    @property
    def port(self) -> int:
        return self.server.port


def first(port: int, size: int) -> bool:
    """Whether a request is answered: the router needs a while until it has its servers."""
    try:
        return bool(stream(port, range(2, 2 + size), 4).tokens)
    except rig.Failed as err:
        raise ValueError(str(err)) from err


def pd(a: argparse.Namespace, run: pathlib.Path, logs: pathlib.Path) -> dict[str, Any]:
    sizes = [int(x) for x in a.sizes.split(",")]
    model = wide_model(run / "model", a.layers, a.heads, a.head_size)
    host = dataclasses.replace(
        sgl.CPU, model=model, page=a.page, args=("--device", "cpu", "--mem-fraction-static", "0.7",
        "--max-total-tokens", str(max(sizes) + 1024), "--disable-overlap-schedule",
        "--sleep-on-idle", "--disable-radix-cache", "--dtype", a.dtype),
    )  # fmt: skip
    subjects, failed = started(
        [Plain(logs, host), *(PairOf(n, run, logs, host) for n in a.transfers.split(","))], a
    )
    times: dict[str, dict[int, list[float]]] = {n: {s: [] for s in sizes} for n in subjects}
    equal: dict[str, list[int]] = {n: [0, 0] for n in subjects}
    try:
        for name in [n for n in subjects if n != "plain"]:  # the first request connects
            try:
                rig.wait_for(
                    f"the first answer through {name}",
                    lambda n=name: first(subjects[n].port, sizes[0]),
                    90,
                    2,
                )
            except (rig.Failed, OSError, http.client.HTTPException, ValueError) as err:
                failed[name] = f"the first request: {type(err).__name__}: {err}"
                log(f"{name} fails: {failed[name]}")
                subjects.pop(name).stop()
        for turn in within(a.pd_rounds, a.budget):
            for size in sizes:
                r = random.Random(a.seed + turn * 10007 + size)
                ids = [r.randrange(2, 900) for _ in range(size)]
                order = (
                    list(subjects)[turn % len(subjects) :] + list(subjects)[: turn % len(subjects)]
                )
                got: dict[str, Answer] = {}
                for name in order:
                    try:
                        got[name] = stream(subjects[name].port, ids, a.answer)
                    except (rig.Failed, OSError, http.client.HTTPException, ValueError) as err:
                        failed[name] = f"{size} tokens, round {turn}: {type(err).__name__}: {err}"
                        log(f"{name} failed: {failed[name]}")
                if turn and "plain" in got:  # the first one warms up
                    for name, x in got.items():
                        times[name][size].append(x.ttft * 1e3)
                        equal[name][0] += x.tokens == got["plain"].tokens
                        equal[name][1] += 1
            log(
                f"round {turn} of {a.pd_rounds}{'' if turn else ' (warm-up)'}: "
                + ", ".join(f"{n} {x.ttft * 1e3:.0f}" for n, x in got.items())
            )
        memory = {n: memory_of(s.pids()) for n, s in subjects.items()}
    finally:
        for s in subjects.values():
            s.stop()
    show_pairs(times, equal, memory)
    return {
        "ttft_ms": times,
        "equal": equal,
        "failed": failed,
        "memory_mib": memory,
        "bytes_per_token": token_bytes(a),
    }


def show_pairs(
    times: Mapping[str, Mapping[int, list[float]]],
    equal: Mapping[str, list[int]],
    memory: Mapping[str, int],
) -> None:
    print(
        "\nTTFT of the plain server, and what each transfer adds to it, in ms: medians, and the "
        f"middle half\n{'':10}",
        end="",
    )
    sizes = list(times.get("plain", {}))
    print("".join(f"{n:>24}" for n in sizes) + "   equal      MiB")
    for name, by in times.items():
        if name not in memory:
            continue
        cells = []
        for size in sizes:
            plain = times["plain"][size]
            v = sorted(
                by[size]
                if name == "plain"
                else [x - y for x, y in zip(by[size], plain, strict=False)]
            )
            cells.append(
                f"{statistics.median(v):.0f} ({v[len(v) // 4]:.0f} to {v[3 * len(v) // 4]:.0f})"
                if v
                else "none"
            )
        print(
            f"{name:10}"
            + "".join(f"{c:>24}" for c in cells)
            + f"{equal[name][0]:5}/{equal[name][1]}{memory[name]:9}"
        )


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("part", choices=("hicache", "pd"))
    p.add_argument("--stores", default=",".join(STORES))
    p.add_argument("--transfers", default=",".join(TRANSFERS))
    p.add_argument("--rounds", type=int, default=3, help="of hicache, after one that warms up")
    p.add_argument("--clients", type=int, default=20)
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--new", type=int, default=256, help="new tokens of a turn")
    p.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    p.add_argument("--parallel", type=int, default=2, help="requests at a time")
    p.add_argument(
        "--device-tokens", type=int, default=3072, help="that the server's device cache holds"
    )
    p.add_argument(
        "--ratio",
        type=float,
        default=2.25,
        help="host cache by device cache; SGLang prefetches at most 0.8 of the difference at once",
    )
    p.add_argument("--room", type=int, default=1024, help="MiB of the stores that are in memory")
    p.add_argument(
        "--disk",
        type=pathlib.Path,
        default=BUILD / "bench",
        help="for the stores that are in files",
    )
    p.add_argument(
        "--nixl-direct",
        action="store_true",
        help="O_DIRECT, nixl's default; without it, it has the page cache as file has",
    )
    p.add_argument(
        "--rest",
        type=float,
        default=0.06,
        help="a server rests if it needs fewer CPU seconds in half a second",
    )
    p.add_argument("--sizes", default="128,512,1024,2048,4096", help="tokens of the prompts of pd")
    p.add_argument("--pd-rounds", type=int, default=10)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument(
        "--dtype",
        default="float32",
        help="a CPU without AMX computes slowly in bfloat16, and greedy tokens depend on its "
        "roundings",
    )
    p.add_argument("--page", type=int, default=sgl.PAGE)
    p.add_argument(
        "--spawn",
        action="store_true",
        help="start each server as users do, instead of a fork: minutes for each",
    )
    p.add_argument("--starts", type=int, default=3, help="servers that start at a time")
    p.add_argument(
        "--budget", type=float, default=3600, help="seconds after which no new round begins"
    )
    p.add_argument("--start-timeout", type=float, default=900)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--logs", type=pathlib.Path, default=BUILD / "bench" / "sglang-logs")
    p.add_argument("--json", type=pathlib.Path, help="default: .build/bench/sglang-PART.json")
    a = p.parse_args()
    servers.end_on_signals()
    logs = a.logs / a.part
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:  # unix sockets have short names
        try:
            if not a.spawn:
                log("one process imports SGLang")
                Forks(logs)
            result = (hicache if a.part == "hicache" else pd)(a, pathlib.Path(dir), logs)
        finally:
            for f in FORKS:
                f.stop()
    where = a.json or BUILD / "bench" / f"sglang-{a.part}.json"
    where.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(a).items()}
    where.write_text(
        json.dumps(
            {
                "settings": settings,
                "cores": os.cpu_count(),
                "load": [before, os.getloadavg()],
                **result,
            },
            indent=1,
        )
        + "\n"
    )
    for name, why in result["failed"].items():
        print(f"\n{name} did not run: {why[-800:]}")
    print(f"\nresults in {where}, logs in {logs}")
    return 1 if "kvspray" in result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
