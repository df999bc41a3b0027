"""SGLang's own server, as a process of its own, on a CPU or a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

import cluster as rig  # noqa: E402
import hosts  # noqa: E402
import servers  # noqa: E402

Process = servers.Process
__all__ = ["Process", "hosts", "rig", "servers"]

START_S = 1200.0  # several servers start at once, and the first request compiles a hash function
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Host:
    """What a server needs of the host that it runs on."""

    model: pathlib.Path
    args: tuple[str, ...]
    env: Mapping[str, str]
    page: int = PAGE
    answer: int = 6  # tokens
    chunk: int = 128  # tokens of a prompt that prefill computes at a time
    python: str = sys.executable


CPU = Host(
    rig.ROOT / ".build" / "models" / "tiny-llama",
    (
        "--device", "cpu", "--mem-fraction-static", "0.7", "--max-total-tokens", "2048",
        "--disable-overlap-schedule", "--dtype", "float32",
    ),  # in bfloat16 nearly equal probabilities change places with the batch: one answer in 500
    # Its modules are compiled with torch's inductor at will otherwise, which needs minutes.
    {"PYTHONPATH": str(HERE / "stand_ins"), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
)  # fmt: skip


class Server(Process):
    def __init__(
        self,
        name: str,
        logs: pathlib.Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        host: Host = CPU,
    ) -> None:
        super().__init__(name, logs)
        self.args, self.env, self.host = args, dict(env or {}), host

    def start(self) -> Server:
        command = [
            self.host.python, "-m", "sglang.launch_server", "--model-path", str(self.host.model),
            "--host", "127.0.0.1", "--port", str(self.port), "--max-running-requests", "8",
            "--page-size", str(self.host.page), "--skip-server-warmup", "--enable-cache-report",
            "--enable-metrics", *self.host.args, *self.args,
        ]  # fmt: skip
        paths = (self.host.env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))
        env = {
            "SGLANG_HOST_IP": "127.0.0.1",
            "PYTHONWARNINGS": "ignore",
            "TRITON_INTERPRET": "0",  # of this process's tests
            **self.host.env,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        }
        self.spawn(command, env | self.env)
        return self

    def ready(self) -> Server:
        rig.wait_for(self.name, self.up, START_S, 0.5)
        return self

    def post(self, path: str, body: Any = None, timeout: float = START_S) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if body is not None and text else text

    def generate(
        self, ids: list[int], tokens: int, more: Mapping[str, Any] | None = None,
        timeout: float = START_S,
    ) -> tuple[list[int], int]:  # fmt: skip
        """Greedy tokens, and how many of the prompt's came from a cache."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, **(more or {})}
        out = self.post("/generate", body, timeout)
        return out["output_ids"], out["meta_info"]["cached_tokens"]

    def forget(self) -> None:
        """Empties SGLang's own caches, once everything is stored."""
        rig.wait_for(
            "an idle server", lambda: b"flushed" in self.post("/flush_cache").lower(), 60, 0.2
        )


def error_of(err: urllib.error.HTTPError) -> str:
    return err.read().decode(errors="replace")


def with_store(sidecar: rig.Sidecar, host: Host = CPU, **more: Any) -> list[str]:
    """The arguments of a server with HiCache on a sidecar's store. ``more``: keys of kvspray."""
    extra = {
        "backend_name": "kvspray", "module_path": "kvspray_sglang.hicache",
        "class_name": "KvsprayHiCache", "interface_v1": 1, "prefetch_threshold": host.page,
        "socket": sidecar.socket, **more,
    }  # fmt: skip
    return [
        "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy",
        "write_through", "--hicache-io-backend", "direct", "--hicache-mem-layout",
        "page_first_direct", "--hicache-storage-backend", "dynamic",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", json.dumps(extra),
    ]  # fmt: skip


def counted(sidecar: rig.Sidecar, metric: str, **labels: str) -> float:
    return rig.total(rig.parse_metrics(rig.get(sidecar.url + "/metrics")), metric, **labels)


def moved(sidecar: rig.Sidecar) -> float:
    return counted(sidecar, "kvspray_transfer_payload_bytes_total", side="destination")


def stored(sidecar: rig.Sidecar) -> float:
    return counted(sidecar, "kvspray_store_pages_total", result="stored")


def found(sidecar: rig.Sidecar) -> float:
    return counted(sidecar, "kvspray_store_hits_total")
