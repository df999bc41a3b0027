# SPDX-License-Identifier: Apache-2.0
"""A small engine: one worker with a cache and pages for the store. It reads commands from its
standard input, one JSON object a line, and writes the result of each. The kvspray package is the
one that its interpreter finds.

usage: engine.py SOCKET
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from kvspray import EngineInfo, SchedulerClient, WorkerClient, __version__, identity, prefix_hash
from kvspray.store import Namespace, PageResult, Piece, Space

LAYERS, BLOCKS, PAGE, TOKENS = 3, 32, 4096, 16
STORED = 65536  # bytes of a page of the store
WAIT_S = 60.0
SPACES = {
    name: Namespace(
        weights=name,
        dtype="bfloat16",
        layout="skew",
        page_tokens=TOKENS,
        page_bytes=STORED,
        algorithm="sglang-sha256",
        secret=b"secret" * 8 if name == "secret" else b"",
    )
    for name in ("kept", "secret", "removed")
}


def content(n: int, *seed: object) -> bytes:
    return random.Random(str(seed)).randbytes(n)


def layout() -> dict[str, Any]:
    layers = [
        {
            "name": f"l{i}", "index": i, "region": 0, "base": i * BLOCKS * PAGE,
            "block_stride": PAGE, "page_bytes": PAGE,
        }
        for i in range(LAYERS)
    ]  # fmt: skip
    group = {
        "tokens_per_block": TOKENS, "strategy": "packed_hnd", "params": {"heads": 1},
        "num_blocks": BLOCKS, "layers": layers,
    }  # fmt: skip
    same = identity(
        model_config="skew", weights="none", layers=LAYERS, head_size=64, groups="full", rope="",
        backoff=0, speculative="",
    )  # fmt: skip
    return {"model": "skew", "dtype": "bfloat16", "groups": [group], "identity": same}


def _parts(pages: list[int]) -> list[list[int]]:
    return [pages[at : at + BLOCKS] for at in range(0, len(pages), BLOCKS)]


class Engine:
    def __init__(self, socket: str) -> None:
        info = EngineInfo("skew", "1", "e0")
        self.worker = WorkerClient(socket, engine=info, layers=LAYERS)
        self.cache = self.worker.alloc_region(LAYERS * BLOCKS * PAGE)
        self.pages = self.worker.alloc_region(BLOCKS * STORED)
        self.worker.register([self.cache, self.pages], layout())
        scheduler = SchedulerClient(socket, engine=info)
        if not self.worker.wait_connected(WAIT_S) or not scheduler.wait_connected(WAIT_S):
            raise SystemExit(f"no session at {socket}: {self.worker.status()}")
        piece = Piece(self.pages, 0, STORED, STORED)
        self.spaces = {n: Space(self.worker, ns, [piece], BLOCKS) for n, ns in SPACES.items()}
        self.endpoint = scheduler.endpoint

    def _end(self, lease: int) -> Any:
        if not lease:
            raise SystemExit(f"no lease: {self.worker.refusal}")
        while self.worker.wait(WAIT_S):
            for done in self.worker.poll():
                if done.lease == lease:
                    return done
        raise SystemExit(f"lease {lease} has not ended: {self.worker.status()}")

    def _slices(self, blocks: list[int]) -> list[slice]:
        starts = [(i * BLOCKS + b) * PAGE for i in range(LAYERS) for b in blocks]
        return [slice(at, at + PAGE) for at in starts]

    def send(self, xfer: str, blocks: list[int]) -> str:
        tokens = len(blocks) * TOKENS
        for i, where in enumerate(self._slices(blocks)):
            self.cache.buffer[where] = content(PAGE, xfer, i)
        done = self._end(
            self.worker.intent(
                bytes.fromhex(xfer), prefix_hash(list(range(tokens))), tokens, [blocks],
                ready=tokens, held=True,
            )
        )  # fmt: skip
        return str(done.status.name) + done.reason

    def receive(self, xfer: str, blocks: list[int], peer: str) -> str:
        tokens = len(blocks) * TOKENS
        done = self._end(
            self.worker.expect(
                bytes.fromhex(xfer), prefix_hash(list(range(tokens))), peer, tokens, 0, [blocks]
            )
        )
        equal = all(
            self.cache.buffer[where] == content(PAGE, xfer, i)
            for i, where in enumerate(self._slices(blocks))
        )
        return str(done.status.name) + done.reason + ("" if equal else ", other bytes")

    def _hashes(self, pages: list[int]) -> list[bytes]:
        return [p.to_bytes(32, "big") for p in pages]

    def _open(self, name: str) -> Space:
        space = self.spaces[name]
        if not space.ready(WAIT_S):
            raise SystemExit(f"the namespace {name} is not open: {space.error}")
        return space

    def put(self, name: str, pages: list[int]) -> list[int]:
        """The outcome of each page. Pages do not follow each other in a prompt."""
        space, out = self._open(name), []
        for part in _parts(pages):
            for i, p in enumerate(part):
                self.pages.buffer[i * STORED : (i + 1) * STORED] = content(STORED, name, p)
            done = self._end(space.put(self._hashes(part), range(len(part))))
            out += [PageResult.of(b).outcome for b in done.pages]
        return out

    def get(self, name: str, pages: list[int]) -> list[int]:
        """The tier of each page, 0 where it is missing, and -1 where its bytes differ."""
        space, out = self._open(name), []
        for part in _parts(pages):
            self.pages.buffer[:] = bytes(BLOCKS * STORED)
            done = self._end(space.get(self._hashes(part), range(len(part))))
            for i, (p, byte) in enumerate(zip(part, done.pages, strict=True)):
                page = self.pages.buffer[i * STORED : (i + 1) * STORED]
                result = PageResult.of(byte)
                equal = page == content(STORED, name, p)
                out.append(0 if not result.hit else result.tier if equal else -1)
        return out

    def remove(self, name: str) -> list[int]:
        """Nodes, and those of them that have confirmed."""
        done = self._open(name).remove(WAIT_S)
        return [done.members, done.confirmed] if done else []


def main(socket: str) -> None:
    engine = Engine(socket)
    print(json.dumps({"endpoint": engine.endpoint, "version": __version__}), flush=True)
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(getattr(engine, name)(*args)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
