"""Two sidecars with two rails each, and engines without a model that exchange blocks through
them."""

from __future__ import annotations

import hashlib
import itertools
import pathlib
import threading
from typing import Any

from cluster import Sidecar, cluster_key, wait_for

import kvspray

LAYERS, BLOCKS, PAGE = 24, 64, 64 << 10
TOKENS = 16  # of a block
WAIT_S = 30.0


def layout() -> dict[str, Any]:
    size = BLOCKS * PAGE
    layers = [
        {
            "name": f"l{i}",
            "index": i,
            "region": 0,
            "base": i * size,
            "block_stride": PAGE,
            "page_bytes": PAGE,
        }
        for i in range(LAYERS)
    ]
    group = {
        "tokens_per_block": TOKENS,
        "strategy": "packed_hnd",
        "params": {"heads": 8},
        "num_blocks": BLOCKS,
        "layers": layers,
    }
    identity = kvspray.identity(
        model_config="page",
        weights="none",
        layers=LAYERS,
        head_size=128,
        groups="full",
        rope="",
        backoff=0,
        speculative="",
    )
    return {"model": "page", "dtype": "bfloat16", "groups": [group], "identity": identity}


class Engine:
    def __init__(self, name: str, sidecar: Sidecar) -> None:
        self.client = kvspray.WorkerClient(
            sidecar.socket, engine=kvspray.EngineInfo("page", "1", name), layers=LAYERS
        )
        self.region = self.client.alloc_region(LAYERS * BLOCKS * PAGE)
        self.client.register([self.region], layout())
        assert self.client.wait_connected(WAIT_S), self.client.status()

    def end(self, lease: int) -> kvspray.Completion | None:
        """The end of a lease, if it has come."""
        self.client.wait(0.05)
        return next((c for c in self.client.poll() if c.lease == lease), None)

    def close(self) -> None:
        self.client.close()
        self.region.close()


class Pair:
    """A prefill and a decode node in one network namespace, with rails on these addresses."""

    def __init__(self, dir: pathlib.Path, rails: list[str], store: bool = True) -> None:
        config: dict[str, Any] = {
            "peer": {"cluster_key_file": cluster_key(dir)},
            "transports": {
                "order": ["tcp"],
                "tcp": {
                    "rails": [{"name": f"rail{i}", "listen": f"{a}:0"} for i, a in enumerate(rails)]
                },
            },
        }
        if store:
            config["store"] = {"memory": "64MiB", "disk": [{"path": str(dir), "size": "256MiB"}]}
        self.sidecars = [
            Sidecar(name, dir, config if name == "decode" else {**config, "store": {}})
            for name in ("prefill", "decode")
        ]
        self.engines: list[Engine] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = 0
        self._numbers = itertools.count()

    def start(self) -> Pair:
        for s in self.sidecars:
            s.start()
        return self

    def connect(self) -> None:
        self.engines = [Engine(s.name, s) for s in self.sidecars]

    def move(self, layer_s: float = 0.0) -> kvspray.Completion:
        """One prompt; prefill computes a layer in that many seconds."""
        n = next(self._numbers)
        p, d = (e.client for e in self.engines)
        xfer = hashlib.sha256(f"page {n}".encode()).digest()[:16]
        digest, tokens, blocks = hashlib.sha256(xfer).digest(), BLOCKS * TOKENS, list(range(BLOCKS))
        source = p.intent(xfer, digest, tokens, [[]], req=f"chat-{n}")
        lease = d.expect(
            xfer,
            digest,
            self.sidecars[0].endpoint,
            tokens,
            0,
            [blocks],
            req=f"chat-{n}",
            match_timeout_s=WAIT_S,
        )
        p.step(n + 1, [(source, tokens, [blocks])])
        for layer in range(LAYERS):
            self._stop.wait(layer_s)
            p.signal_layer(layer, n + 1)
        end = wait_for("the end of a transfer", lambda: self.engines[1].end(lease), WAIT_S)
        wait_for("the end of its source", lambda: self.engines[0].end(source), WAIT_S)
        return end

    def fail(self) -> kvspray.Completion:
        """A prompt that prefill does not have."""
        n = next(self._numbers)
        xfer = hashlib.sha256(f"page {n}".encode()).digest()[:16]
        lease = self.engines[1].client.expect(
            xfer,
            bytes(32),
            self.sidecars[0].endpoint,
            TOKENS,
            0,
            [[0]],
            req=f"lost-{n}",
            match_timeout_s=0.5,
        )
        return wait_for("the end of a transfer", lambda: self.engines[1].end(lease), WAIT_S)

    def keep_moving(self, layer_s: float) -> None:
        self._layer_s = layer_s
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.move(self._layer_s)
            self.done += 1

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join(WAIT_S)
        for e in self.engines:
            e.close()
        for s in self.sidecars:
            s.stop()
