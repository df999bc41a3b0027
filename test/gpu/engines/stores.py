# SPDX-License-Identifier: Apache-2.0
"""Engines on other projects' stores, for part store: the same requests as with ours. pack.py's
parts peers-* have these projects for a GPU host."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from cluster import total, wait_for
from pairs import MIB, Rig
from reuse import QUIET_S, STORED_S, Offload
from servers import Process

# Of one core, while a store writes nothing.
IDLE_CPU = 0.1
HITS = "vllm:external_prefix_cache_hits_total"


class Plain(Offload):
    """An engine without a store, which computes each prompt again."""

    name, loads = "plain", False

    def kv(self) -> None:
        return None

    def stored(self) -> float:
        return 0.0

    def loaded(self) -> float:
        return 0.0

    def wait_stored(self, before: float, tokens: int) -> None:
        pass


class Files(Offload):
    """vLLM's host memory and files behind it."""

    name = "offloading-fs"

    def more(self) -> dict[str, Any]:
        tier = {"type": "fs", "root_dir": str(self.rig.run / "fs")}
        return {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}


class Peer(Offload):
    """With a server of the store beside the engine."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.store = Process(f"{self.name}-store", rig.logs)
        self.web = Process(f"{self.name}-web", rig.logs)  # for its port

    def start(self) -> None:
        self.store.spawn(self.command(), self.rig.host.env, cwd=self.rig.run)
        wait_for(f"server of {self.name}", self.up, 60, tick=0.2)
        super().start()

    def up(self) -> bool:
        if self.store.proc is None or self.store.proc.poll() is not None:
            raise RuntimeError(f"{self.store.name} ended:\n{self.store.tail()}")
        return answers(self.store.port)

    def command(self) -> list[str]:
        raise NotImplementedError

    def kv(self) -> dict[str, Any]:
        return {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.more(),
        }

    def stored(self) -> float:
        return 0.0

    def loaded(self) -> float:
        return total(self.server.metrics(), HITS)

    def min_hits(self, tokens: int) -> float:
        return 0.9 * tokens

    def wait_stored(self, before: float, tokens: int) -> None:
        """No figure counts what is stored in the same way in all of them: until engine and store
        compute nothing more, at most STORED_S. The hits show whether that was enough."""
        end = time.monotonic() + STORED_S
        used = 1.0
        while used > IDLE_CPU and time.monotonic() < end:
            cpu, start = self.cpu_seconds(), time.monotonic()
            time.sleep(QUIET_S)
            used = (self.cpu_seconds() - cpu) / (time.monotonic() - start)

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() + self.store.cpu_seconds()

    def stop(self) -> None:
        super().stop()
        self.store.stop()


class LMCache(Peer):
    name, connector = "lmcache", "LMCacheMPConnector"

    def command(self) -> list[str]:
        start = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        size = str(self.rig.args.store_mb / 1024)
        ports = ["--port", str(self.store.port), "--http-port", str(self.web.port)]
        # On a CPU the engine copies, on a GPU the server.
        mode = ["--supported-transfer-mode", "auto", "--disable-observability"]
        more = [*mode, "--l1-size-gb", size, "--eviction-policy", "LRU"]
        return [self.rig.host.python, "-c", start, "server", *ports, *more]

    def more(self) -> dict[str, Any]:
        return {"lmcache.mp.port": str(self.store.port)}


class PegaFlow(Peer):
    name, connector = "pegaflow", "PegaKVConnector"

    def command(self) -> list[str]:
        start = "import sys; from pegaflow._server import main; sys.exit(main())"
        addresses = [f"127.0.0.1:{p.port}" for p in (self.store, self.web)]
        size = ["--pool-size", f"{self.rig.args.store_mb}mb", "--devices", "0"]
        listen = ["--addr", addresses[0], "--http-addr", addresses[1]]
        return [self.rig.host.python, "-c", start, *listen, *size]

    def kv(self) -> dict[str, Any]:
        return {**super().kv(), "kv_connector_module_path": "pegaflow.connector"}

    def more(self) -> dict[str, Any]:
        return {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": self.store.port}


class MooncakeStore(Peer):
    """The engine's process has the memory, the server the directory."""

    name, connector = "mooncake-store", "MooncakeStoreConnector"

    def command(self) -> list[str]:
        start = (
            "import os, pathlib, mooncake, sys; "
            "p = pathlib.Path(mooncake.__file__).parent / 'mooncake_master'; "
            "p.chmod(0o755); os.execv(p, [str(p), *sys.argv[1:]])"
        )
        ports = [f"--rpc_port={self.store.port}", f"--metrics_port={self.web.port}"]
        return [self.rig.host.python, "-c", start, *ports]

    def more(self) -> dict[str, Any]:
        return {}

    def env(self) -> dict[str, str]:
        config = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{self.store.port}",
            "protocol": "tcp",
            "global_segment_size": self.rig.args.store_mb * MIB,
        }
        path = self.rig.run / "mooncake.json"
        path.write_text(json.dumps(config))
        return {"MOONCAKE_CONFIG_PATH": str(path)}


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
