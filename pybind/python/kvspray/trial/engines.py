# SPDX-License-Identifier: Apache-2.0
"""vLLM's own API server on a CPU or on a GPU, and requests to it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from kvspray.trial.processes import DIRECT, Process, total

MODEL_NAME = "tiny"
ANSWER_S = 120.0
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Host:
    device: str
    python: str
    models: pathlib.Path
    env: dict[str, str]
    args: tuple[str, ...]  # of vLLM's server
    block: int  # tokens
    dtype: str
    memory: str  # of kv_connector_extra_config

    def with_modules(self, folder: pathlib.Path) -> Host:
        """The same, whose engines also find the modules of a directory."""
        path = ":".join(p for p in (str(folder), self.env.get("PYTHONPATH", "")) if p)
        return dataclasses.replace(self, env={**self.env, "PYTHONPATH": path})


def cpu(python: str, models: pathlib.Path) -> Host:
    # In bfloat16 sums depend on how a prompt is cut, the more so where the CPU has AMX: of one
    # prompt in ten a near tie between two tokens turns there.
    dtype, block = "float32", 32
    env = {
        # The worker lives in the engine core's process. In one of its own, both ends of the queue
        # between them poll for a second after every step, and six polling processes on two cores
        # keep each other, and every figure, waiting.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",
        **QUIET,
    }
    args = ("--enforce-eager", "--dtype", dtype, "--block-size", str(block))
    return Host("cpu", python, models, env, args, block, dtype, "memfd")


def cuda(python: str, models: pathlib.Path) -> Host:
    dtype, block = "bfloat16", 16
    args = ("--dtype", dtype, "--block-size", str(block))
    return Host("cuda", python, models, QUIET, args, block, dtype, "auto")


class Server(Process):
    """One vLLM API server."""

    def start(
        self,
        host: Host,
        model: str,
        kv: dict[str, Any] | None,
        *args: str,
        env: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
    ) -> Server:
        """wrap: a program that runs the server under itself, with its arguments."""
        cmd = [
            *wrap, host.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(host.models / model), "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(self.port), "--seed", "1",
            "--max-model-len", "4608", "--max-num-seqs", "16", *host.args,
            *args,
        ]  # fmt: skip
        if kv is not None:
            cmd += ["--kv-transfer-config", json.dumps(kv)]
        self.spawn(cmd, {**host.env, **(env or {})}, cwd=self.log.parent)
        return self


def request(
    url: str,
    prompt: str | list[int],
    kv: dict[str, Any] | None = None,
    max_tokens: int = 1,
    rid: str = "",
) -> urllib.request.Request:
    """A completion that is not streamed, as routers ask a prefill engine for one."""
    body: dict[str, Any] = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if kv is not None:
        body["kv_transfer_params"] = kv
    headers = {"Content-Type": "application/json", **({"X-Request-Id": rid} if rid else {})}
    return urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)


def send(req: urllib.request.Request) -> tuple[float, dict[str, Any]]:
    """Seconds until the whole answer is there, and the answer."""
    start = time.perf_counter()
    try:
        with DIRECT.open(req, timeout=ANSWER_S) as f:
            data = f.read()
    except TimeoutError as err:
        raise TimeoutError(f"{req.full_url}: no answer within {ANSWER_S:g} s") from err
    return time.perf_counter() - start, json.loads(data)


def ask(
    url: str,
    prompt: str | list[int],
    kv: dict[str, Any] | None = None,
    max_tokens: int = 1,
    rid: str = "",
) -> tuple[float, dict[str, Any]]:
    return send(request(url, prompt, kv, max_tokens, rid))


def sessions(metrics: Callable[[], dict[str, float]]) -> bool:
    """Whether worker and scheduler of an engine have found the sidecar with these metrics."""
    m = metrics()
    roles = ("worker", "scheduler")
    return all(total(m, "kvspray_engine_sessions", role=role) >= 1 for role in roles)
