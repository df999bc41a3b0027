"""One end of another engine, driven by `kvspray-bench peers` over its standard input and output, a
JSON object in each line.

    driver.py ENGINE target|initiator --ip IP --block BYTES --total BYTES [--region BYTES]

The target sends {"ready": ...}; what is in it is handed to the initiator as {"target": ...}, whose
{"ready": ...} goes to the target as {"initiator": ...}. {"go": {"seconds": s, "count": n}} makes
the initiator write transfers, one after the other, each block from a random place to a random
place; each gives a line {"began": unix time, "took": seconds, "bytes": n, "error": text}.
{"digest": k} asks either end for the digest of what transfer k moved. Planning (descriptor lists,
permutations) is done before a transfer's clock starts, in the engine's favour. The places of
transfer k follow from k alone, so both ends compute them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import mmap
import os
import sys
import time

import numpy as np

# Seconds after which a transfer counts as failed.
STALLED = float(os.environ.get("KVSPRAY_PEERS_STALL", "20"))


def places(k: int, block: int, total: int, region: int) -> tuple[np.ndarray, np.ndarray]:
    """Block numbers at the source and at the destination."""
    rng = np.random.default_rng(1000 + k)
    slots, n = region // block, total // block
    return rng.permutation(slots)[:n], rng.permutation(slots)[:n]


class Memory:
    def __init__(self, size: int, filled: bool):
        self.map = mmap.mmap(-1, size)
        self.array = np.frombuffer(self.map, dtype=np.uint8)
        if filled:
            self.array[:] = np.random.default_rng().integers(0, 256, size, dtype=np.uint8)
        else:
            self.array[:] = 1  # resident
        self.address, self.size = int(self.array.ctypes.data), size

    def digest(self, blocks: np.ndarray, block: int) -> str:
        h = hashlib.blake2b(digest_size=16)
        for i in blocks.tolist():
            h.update(self.array[i * block : (i + 1) * block])
        return h.hexdigest()


class Nixl:
    """NIXL over UCX. Which rails and how many is set by UCX_* in the environment."""

    def __init__(self, role: str, _ip: str, memory: Memory):
        from nixl._api import nixl_agent, nixl_agent_config

        # The target has no thread that would poll: its progress thread does. The initiator polls.
        self.agent = nixl_agent(
            role, nixl_agent_config(enable_prog_thread=role == "target", backends=[])
        )
        self.agent.create_backend("UCX", {})
        self.memory = memory
        self.registered = self.agent.register_memory([(memory.address, memory.size, 0, "")], "DRAM")

    def hello(self) -> dict:
        return {
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "address": self.memory.address,
        }

    def meet(self, other: dict) -> None:
        name = self.agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.remote = other["address"]

    def prepare(self, block: int) -> None:
        self.agent.make_connection(self.peer)
        slots = self.memory.size // block

        def rows(base: int) -> np.ndarray:
            out = np.zeros((slots, 3), dtype=np.uint64)
            out[:, 0], out[:, 1] = base + np.arange(slots, dtype=np.uint64) * block, block
            return out

        self.here = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.memory.address), "DRAM")
        self.there = self.agent.prep_xfer_dlist(self.peer, rows(self.remote), "DRAM")

    def plan(self, src: np.ndarray, dst: np.ndarray, _block: int):
        return self.agent.make_prepped_xfer(
            "WRITE", self.here, src.astype(np.int32), self.there, dst.astype(np.int32)
        )

    def move(self, plan) -> str:
        end = time.monotonic() + STALLED
        state = self.agent.transfer(plan)
        while state == "PROC":
            if time.monotonic() > end:
                return f"no end after {STALLED:g} s"
            state = self.agent.check_xfer_state(plan)
        if state == "DONE":
            self.agent.release_xfer_handle(plan)
        return "" if state == "DONE" else f"state {state}"


class Mooncake:
    """Mooncake's transfer engine over TCP, which takes one address."""

    MAX_OPEN = 2048  # entries of a batch: it refuses larger ones

    def __init__(self, _role: str, ip: str, memory: Memory):
        from mooncake.engine import TransferEngine

        self.engine, self.memory = TransferEngine(), memory
        if rc := self.engine.initialize(ip, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"initialize: {rc}")
        if rc := self.engine.register_memory(memory.address, memory.size):
            raise RuntimeError(f"register_memory: {rc}")
        self.name = f"{ip}:{self.engine.get_rpc_port()}"

    def hello(self) -> dict:
        return {"name": self.name, "address": self.memory.address}

    def meet(self, other: dict) -> None:
        self.peer, self.remote = other["name"], other["address"]

    def prepare(self, _block: int) -> None:
        pass

    def plan(self, src: np.ndarray, dst: np.ndarray, block: int):
        a, b = (src * block + self.memory.address).tolist(), (dst * block + self.remote).tolist()
        return [
            (
                a[i : i + self.MAX_OPEN],
                b[i : i + self.MAX_OPEN],
                [block] * len(a[i : i + self.MAX_OPEN]),
            )
            for i in range(0, len(a), self.MAX_OPEN)
        ]

    def move(self, plan) -> str:
        for a, b, n in plan:
            if rc := self.engine.batch_transfer_sync_write(self.peer, a, b, n):
                return f"batch_transfer_sync_write: {rc}"
        return ""


class End:
    """One end of a conversation with the driver of drivers."""

    def __init__(self, engine: str, role: str, ip: str, block: int, total: int, region: int, out):
        self.role, self.block, self.total, self.region, self.out = role, block, total, region, out
        self.memory = Memory(region, role == "initiator")
        self.engine = (Nixl if engine == "nixl" else Mooncake)(role, ip, self.memory)
        self.mutual = engine == "nixl"  # the target needs the initiator's metadata, too
        self.next = 0
        if role == "target":
            self.say(ready=self.engine.hello())

    def say(self, **what) -> None:
        self.out.write(json.dumps(what) + "\n")
        self.out.flush()

    def take(self, m: dict) -> None:
        if "target" in m:
            self.engine.meet(m["target"])
            self.say(ready=self.engine.hello())
        elif "initiator" in m:
            if self.mutual:
                self.engine.meet(m["initiator"])
            self.say(met=True)
        elif "prepare" in m:
            self.engine.prepare(self.block)
            self.say(prepared=True)
        elif "go" in m:
            self.run(m["go"]["seconds"], m["go"]["count"])
            self.say(done=self.next)
        elif "digest" in m:
            src, dst = places(m["digest"], self.block, self.total, self.region)
            self.say(digest=self.memory.digest(dst if self.role == "target" else src, self.block))

    def run(self, seconds: float, count: int) -> None:
        """Writes transfers until the time is over or the count is reached, or one fails."""
        first, end = self.next, time.monotonic() + seconds
        while (not count or self.next - first < count) and (not seconds or time.monotonic() < end):
            plan = self.engine.plan(
                *places(self.next, self.block, self.total, self.region), self.block
            )
            began, clock = time.time(), time.monotonic()
            error = self.engine.move(plan)
            self.say(began=began, took=time.monotonic() - clock, bytes=self.total, error=error)
            if error:
                break
            self.next += 1


def main() -> None:
    # The engines and their libraries write to standard output as they please: the conversation goes
    # on under another number.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("engine", choices=("nixl", "mooncake"))
    ap.add_argument("role", choices=("target", "initiator"))
    ap.add_argument("--ip", required=True)
    ap.add_argument("--block", type=int, required=True)
    ap.add_argument("--total", type=int, required=True)
    ap.add_argument("--region", type=int, default=768 << 20)
    a = ap.parse_args()
    end = End(a.engine, a.role, a.ip, a.block, a.total, a.region, out)
    for line in sys.stdin:
        end.take(json.loads(line))


if __name__ == "__main__":
    main()
    os._exit(0)  # the engines' threads do not always end
