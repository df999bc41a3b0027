# SPDX-License-Identifier: Apache-2.0
"""SGLang's own server on a CPU, as a process of its own."""

from __future__ import annotations

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
from servers import Process  # noqa: E402

START_S = 1200.0  # several servers start at once, and the first request compiles a hash function
PAGE = 16
MODEL = rig.ROOT / ".build" / "models" / "tiny-llama"


class Server(Process):
    def __init__(
        self,
        name: str,
        logs: pathlib.Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, logs)
        self.args, self.env = args, dict(env or {})

    def start(self) -> Server:
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODEL), "--device",
            "cpu", "--host", "127.0.0.1", "--port", str(self.port), "--mem-fraction-static", "0.7",
            "--max-total-tokens", "2048", "--max-running-requests", "8", "--page-size", str(PAGE),
            "--disable-overlap-schedule", "--skip-server-warmup", "--enable-cache-report",
            "--enable-metrics", *self.args,
        ]  # fmt: skip
        path = os.pathsep.join(
            p for p in (str(HERE / "stand_ins"), os.environ.get("PYTHONPATH", "")) if p
        )
        # Its modules are compiled with torch's inductor at will otherwise, which needs minutes.
        env = {
            "PYTHONPATH": path,
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
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
        self, ids: list[int], tokens: int, more: Mapping[str, Any] | None = None
    ) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt's came from a cache."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, **(more or {})}
        out = self.post("/generate", body)
        return out["output_ids"], out["meta_info"]["cached_tokens"]

    def forget(self) -> None:
        """Empties SGLang's own caches, once everything is stored."""
        rig.wait_for(
            "an idle server", lambda: b"flushed" in self.post("/flush_cache").lower(), 60, 0.2
        )


def error_of(err: urllib.error.HTTPError) -> str:
    return err.read().decode(errors="replace")
