#!/usr/bin/env python3
"""kvspray's store beside Mooncake's and LMCache's on one trace of conversations: rate and time of
gets and puts, and CPU time. `make bench-store`.

The trace: TALKS conversations take turns. A turn looks up all pages of its conversation, gets those
that are there, and puts the others with new content, in two calls. The first SYSTEM pages are the
same in all conversations. Each subject runs the same trace on the same memory with as much room for
pages. Every page that comes back is compared with the content that its key stands for.

Both subjects keep the pages in another process of this host: kvspray in its sidecar, which shares
memory with the engine; Mooncake in a client of its own, which the engine's client reaches over tcp
on loopback. `mooncake-own` keeps them in the engine's own process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOONCAKE = "0.3.13.post1"
SYSTEM = 8  # pages that all conversations share
START_S = 30.0
TICK = os.sysconf("SC_CLK_TCK")
started: list[subprocess.Popen[bytes]] = []


def start(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
    started.append(subprocess.Popen(command, **more))
    return started[-1]


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def cpu_of(pids: Sequence[int]) -> float:
    """Seconds of these processes so far, threads included."""
    total = 0.0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


class Memory:
    """The engine's blocks, and the content of a page: words that follow from its key."""

    def __init__(self, address: int, page: int, blocks: int) -> None:
        import ctypes

        raw = (ctypes.c_uint8 * (page * blocks)).from_address(address)
        self.words = np.frombuffer(raw, dtype=np.uint64).reshape(blocks, page // 8)
        self.address, self.page = address, page
        self.base = np.arange(page // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def fill(self, block: int, key: bytes) -> None:
        np.bitwise_xor(
            self.base, np.uint64(int.from_bytes(key[:8], "little")), out=self.words[block]
        )

    def holds(self, block: int, key: bytes) -> bool:
        return bool(
            (self.words[block] == (self.base ^ np.uint64(int.from_bytes(key[:8], "little")))).all()
        )


class Subject(Protocol):
    name: str
    memory: Memory

    def exists(self, keys: list[bytes]) -> int:
        """How many of the first keys are there."""

    def get(self, keys: list[bytes]) -> int:
        """Into blocks 0, 1, ...; how many of the first ones came."""

    def put(self, keys: list[bytes], first: int) -> None:
        """From blocks first, first + 1, ..."""

    def pids(self) -> list[int]: ...


class Ours:
    name = "kvspray"

    def __init__(self, run: pathlib.Path, a: argparse.Namespace) -> None:
        import kvspray
        from kvspray.store import Namespace, Piece, Space

        socket, config = run / "s.sock", run / "kvspray.json"
        config.write_text(json.dumps({
            "engine": {"socket": str(socket)}, "http": {"listen": f"127.0.0.1:{free_port()}"},
            "peer": {"listen": f"127.0.0.1:{free_port()}", "gossip": {"listen": "off"}},
            "store": {"memory": f"{a.room_mib}MiB"}, "log": {"level": "warn"},
        }))  # fmt: skip
        self.server = start([str(a.kvspray), "serve", "--config", str(config)])
        region = kvspray.Region.alloc(a.page * a.blocks)
        self.memory = Memory(region.addr, a.page, a.blocks)
        ranks, engine = kvspray.Ranks(), kvspray.EngineInfo("bench", "1", "store")
        self.client = kvspray.WorkerClient(str(socket), engine=engine, ranks=ranks, layers=1)
        self.client.register([region])
        if not self.client.wait_connected(START_S):
            raise SystemExit(f"kvspray: {self.client.status().error}")
        namespace = Namespace("bench", "uint8", "bench", 16, a.page, "vllm-sha256", "0")
        self.space = Space(self.client, namespace, [Piece(region, 0, a.page, a.page)], a.blocks)
        if not self.space.ready(START_S):
            raise SystemExit(f"kvspray: {self.space.error}")

    def exists(self, keys: list[bytes]) -> int:
        found = self.space.exists(keys).result(START_S)
        return 0 if found is None else found.leading

    def _wait(self, lease: int) -> Any:
        if not lease:
            raise SystemExit(f"kvspray: no lease: {self.client.status().error}")
        while True:
            for c in self.client.poll():
                return c
            self.client.wait(START_S)

    def get(self, keys: list[bytes]) -> int:
        from kvspray.store import PageResult

        done = self._wait(self.space.get(keys, range(len(keys))))
        hits = [PageResult.of(b).hit for b in done.pages]
        return hits.index(False) if False in hits else len(hits)

    def put(self, keys: list[bytes], first: int) -> None:
        self._wait(self.space.put(keys, range(first, first + len(keys))))

    def pids(self) -> list[int]:
        return [os.getpid(), self.server.pid]

    def close(self) -> None:
        self.client.close()


class Mooncake:
    """Its store over tcp. A segment of --room-mib holds the pages: in another process, or (own) in
    this one."""

    def __init__(self, run: pathlib.Path, a: argparse.Namespace, own: bool) -> None:
        import mmap

        from mooncake.store import MooncakeDistributedStore

        self.name = "mooncake-own" if own else "mooncake"
        here = pathlib.Path(sys.executable).parent
        port, meta = free_port(), free_port()
        log = (run / "mooncake.log").open("ab")
        self.servers = [start(
            [str(here / "mooncake_master"), f"--rpc_port={port}",
            "--enable_http_metadata_server=true", f"--http_metadata_server_port={meta}",
            "--http_metadata_server_host=127.0.0.1", f"--metrics_port={free_port()}"], stdout=log,
            stderr=log,
        )]  # fmt: skip
        time.sleep(2)
        address, metadata = f"127.0.0.1:{port}", f"http://127.0.0.1:{meta}/metadata"
        room = a.room_mib << 20
        if not own:
            code = (
                "import sys,time\nfrom mooncake.store import MooncakeDistributedStore as S\ns=S()\n"
                f"rc=s.setup('127.0.0.1:{free_port()}','{metadata}',{room},16<<20,'tcp','','{address}')\n"
                "print('ready',rc,flush=True)\nsys.stdin.read()\n"
            )
            holder = start(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            self.servers.append(holder)
            assert holder.stdout is not None
            while not (line := holder.stdout.readline()).startswith(b"ready 0"):
                if not line or line.startswith(b"ready"):
                    raise SystemExit(f"mooncake: the process with the pages: {line!r}")
        self.store = MooncakeDistributedStore()
        rc = self.store.setup(
            f"127.0.0.1:{free_port()}", metadata, room if own else 0, 16 << 20, "tcp", "", address
        )
        if rc:
            raise SystemExit(f"mooncake: setup: {rc}")
        self.map = mmap.mmap(-1, a.page * a.blocks)
        raw = np.frombuffer(self.map, dtype=np.uint8)
        self.memory = Memory(int(raw.ctypes.data), a.page, a.blocks)
        if rc := self.store.register_buffer(self.memory.address, a.page * a.blocks):
            raise SystemExit(f"mooncake: register_buffer: {rc}")

    def _at(self, first: int, n: int) -> tuple[list[int], list[int]]:
        m = self.memory
        return [m.address + (first + i) * m.page for i in range(n)], [m.page] * n

    def exists(self, keys: list[bytes]) -> int:
        there = self.store.batch_is_exist([k.hex() for k in keys])
        return next((i for i, x in enumerate(there) if x != 1), len(there))

    def get(self, keys: list[bytes]) -> int:
        got = self.store.batch_get_into([k.hex() for k in keys], *self._at(0, len(keys)))
        return next((i for i, n in enumerate(got) if n != self.memory.page), len(got))

    def put(self, keys: list[bytes], first: int) -> None:
        self.store.batch_put_from([k.hex() for k in keys], *self._at(first, len(keys)))

    def pids(self) -> list[int]:
        return [os.getpid(), *(p.pid for p in self.servers)]

    def close(self) -> None:
        self.store.close()


class LMCache:
    """Its local backend on a CPU, without an engine: a dictionary in this process, into which and
    from which the caller copies."""

    name = "lmcache-own"

    def __init__(self, run: pathlib.Path, a: argparse.Namespace) -> None:
        import mmap

        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        # In its favour: threads wait for each other at each copy where other work runs.
        torch.set_num_threads(1)
        self.torch, self.key_class, self.format = torch, CacheEngineKey, MemoryFormat.HS_TD
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=a.room_mib / 1024
        )
        self.backend = LocalCPUBackend(
            config, memory_allocator=MixedMemoryAllocator(a.room_mib << 20)
        )
        self.map = mmap.mmap(-1, a.page * a.blocks)
        raw = np.frombuffer(self.map, dtype=np.uint8)
        self.memory = Memory(int(raw.ctypes.data), a.page, a.blocks)
        self.blocks = torch.from_numpy(raw).view(a.blocks, a.page)

    def _key(self, key: bytes) -> Any:
        return self.key_class("bench", 1, 0, int.from_bytes(key[:8], "little"), self.torch.uint8)

    def exists(self, keys: list[bytes]) -> int:
        return next(
            (i for i, k in enumerate(keys) if not self.backend.contains(self._key(k))), len(keys)
        )

    def get(self, keys: list[bytes]) -> int:
        for i, key in enumerate(keys):
            found = self.backend.get_blocking(self._key(key))
            if found is None:
                return i
            self.blocks[i].copy_(found.tensor.view(self.torch.uint8).flatten())
            found.ref_count_down()
        return len(keys)

    def put(self, keys: list[bytes], first: int) -> None:
        shape = self.torch.Size([self.memory.page])
        for i, key in enumerate(keys):
            room = self.backend.allocate(shape, self.torch.uint8, self.format)
            if room is not None:
                room.tensor.view(self.torch.uint8).flatten().copy_(self.blocks[first + i])
                self.backend.submit_put_task(self._key(key), room)
                room.ref_count_down()

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        pass


def trace(a: argparse.Namespace) -> Iterator[list[bytes]]:
    """The keys of each turn's whole prompt, in order."""
    r = random.Random(a.seed)

    def key(*parts: object) -> bytes:
        return hashlib.sha256(repr(parts).encode()).digest()

    talks = [[key("system", i) for i in range(SYSTEM)] for _ in range(a.talks)]
    for turn in range(a.turns):
        for t in r.sample(range(a.talks), a.talks):
            grown = [key(a.seed, t, turn, i) for i in range(r.randint(2, 2 * a.grow - 2))]
            talks[t] += grown
            yield list(talks[t])


def play(s: Subject, a: argparse.Namespace) -> dict[str, Any]:
    gets: list[tuple[int, float]] = []
    puts: list[tuple[int, float]] = []
    asks: list[float] = []
    wrong = hits = asked = 0
    cpu, pids = 0.0, s.pids()
    for keys in trace(a):
        keys = keys[: a.blocks]
        asked += len(keys)
        c0, t0 = cpu_of(pids), time.perf_counter()
        have = s.exists(keys)
        t1 = time.perf_counter()
        got = s.get(keys[:have]) if have else 0
        t2 = time.perf_counter()
        cpu += cpu_of(pids) - c0
        asks.append(t1 - t0)
        if have:
            gets.append((got, t2 - t1))
        hits += got
        wrong += sum(not s.memory.holds(i, keys[i]) for i in range(got))
        for i in range(got, len(keys)):
            s.memory.fill(i, keys[i])
        if rest := keys[got:]:
            c0, t0 = cpu_of(pids), time.perf_counter()
            s.put(rest, got)
            puts.append((len(rest), time.perf_counter() - t0))
            cpu += cpu_of(pids) - c0
    moved = (hits + sum(n for n, _ in puts)) * a.page / 1e9

    def rates(all_: list[tuple[int, float]]) -> dict[str, float]:
        ms = sorted(1e3 * t for _, t in all_)
        total = sum(n for n, _ in all_) * a.page / 1e9
        return {
            "gb_s": total / sum(t for _, t in all_), "p50_ms": statistics.median(ms),
            "p99_ms": ms[int(0.99 * (len(ms) - 1))],
        }  # fmt: skip

    return {
        "get": rates(gets), "put": rates(puts), "exists_ms": 1e3 * statistics.median(asks),
        "hit_rate": hits / asked, "cpu_s_per_gb": cpu / moved, "wrong": wrong, "pages": asked,
    }  # fmt: skip


def subject(name: str, run: pathlib.Path, a: argparse.Namespace) -> Any:
    if name == "lmcache-own":
        return LMCache(run, a)
    return Ours(run, a) if name == "kvspray" else Mooncake(run, a, name == "mooncake-own")


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--kvspray", type=pathlib.Path, default=ROOT / "bin/kvspray")
    p.add_argument("--subjects", default="kvspray,mooncake,mooncake-own,lmcache-own")
    p.add_argument(
        "--pages", default="262144,4194304", help="bytes of a page, each in a run of its own"
    )
    p.add_argument("--room-mib", type=int, default=2048, help="for pages")
    p.add_argument("--talks", type=int, default=16)
    p.add_argument("--turns", type=int, default=8)
    p.add_argument(
        "--grow",
        type=int,
        default=0,
        help="pages by which a turn grows, on average; default: 2 MiB, at least 3",
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json", type=pathlib.Path)
    p.add_argument("--one", help=argparse.SUPPRESS)  # a subject in a process of its own
    a = p.parse_args()
    if a.one:
        a.page = int(a.pages)
        a.grow = a.grow or max(3, (2 << 20) // a.page)
        a.blocks = SYSTEM + a.turns * 2 * a.grow
        with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
            try:
                s = subject(a.one, pathlib.Path(dir), a)
                print("RESULT " + json.dumps(play(s, a)), flush=True)
                s.close()
            finally:
                for server in started:
                    server.terminate()
                    server.wait()
        sys.stdout.flush()
        os._exit(0)  # Mooncake's threads may outlive its close
    names, rows, wrong = a.subjects.split(","), [], 0
    for page in map(int, a.pages.split(",")):
        found: dict[str, list[dict[str, Any]]] = {n: [] for n in names}
        for turn in range(a.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                command = [
                    sys.executable, __file__, "--one", name, "--pages", str(page), "--kvspray",
                    str(a.kvspray), "--room-mib", str(a.room_mib), "--talks", str(a.talks),
                    "--turns", str(a.turns), "--grow", str(a.grow), "--seed", str(a.seed + turn),
                ]  # fmt: skip
                out = subprocess.run(command, capture_output=True, text=True, timeout=600)
                line = [x for x in out.stdout.splitlines() if x.startswith("RESULT ")]
                if not line:
                    print(
                        f"{name}, pages of {page} bytes: no result; the end of what it "
                        f"printed:\n{(out.stdout + out.stderr)[-1500:]}",
                        file=sys.stderr,
                    )
                    return 1
                found[name].append(json.loads(line[0][7:]))
        for name in names:
            row = {"subject": name, "page": page, **middle(found[name]), "runs": found[name]}
            rows.append(row)
            wrong += row["wrong"]
            print(
                f"{page >> 10:6} KiB  {name:13} get {row['get']['gb_s']:5.2f} GB/s p50 "
                f"{row['get']['p50_ms']:6.1f} p99 {row['get']['p99_ms']:6.1f} ms  put "
                f"{row['put']['gb_s']:5.2f} GB/s p50 {row['put']['p50_ms']:6.1f} p99 "
                f"{row['put']['p99_ms']:6.1f} ms  exists {row['exists_ms']:.2f} ms  hits "
                f"{row['hit_rate']:.2f}  CPU {row['cpu_s_per_gb']:.2f} s/GB  wrong {row['wrong']}",
                flush=True,
            )
    if a.json:
        here = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "mooncake": MOONCAKE,
            "load": os.getloadavg(),
        }
        a.json.write_text(
            json.dumps(
                {**here, "room_mib": a.room_mib, "talks": a.talks, "turns": a.turns, "rows": rows},
                indent=1,
            )
            + "\n"
        )
    return 1 if wrong else 0


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs; wrong pages are added up."""
    out: dict[str, Any] = {}
    for k, v in runs[0].items():
        if isinstance(v, dict):
            out[k] = middle([r[k] for r in runs])
        else:
            out[k] = (
                sum(r[k] for r in runs) if k == "wrong" else statistics.median(r[k] for r in runs)
            )
    return out


if __name__ == "__main__":
    sys.exit(main())
