# SPDX-License-Identifier: Apache-2.0
"""vLLM's own API server, and kvspray's proxy, as processes of their own; and a client that streams."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
from typing import Any

from cluster import BINARY, ROOT, Failed, free_port, get, parse_metrics

ENV = {
    # The worker lives in the engine core's process. In one of its own, both ends of the queue between them poll for a second
    # after every step, and six polling processes on two cores keep each other, and every figure, waiting.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
MODEL_NAME = "tiny"
# In bfloat16 sums depend on how a prompt is cut, the more so where the CPU has AMX: of one prompt in ten a near tie between two tokens turns there.
DTYPE = "float32"
BLOCK, PAGE_BYTES = 32, 16384  # tokens, and bytes of one layer


def venv_python(build: pathlib.Path, nixl: bool = False) -> pathlib.Path:
    return build / ("venv-nixl" if nixl else "venv") / "bin" / "python"


ENDING = (signal.SIGTERM, signal.SIGINT)


def deaf() -> None:
    """Signals that end a program are ignored from here on: what it started is being stopped, and half of it would live on."""
    for sig in ENDING:
        signal.signal(sig, signal.SIG_IGN)


def end_on_signals() -> None:
    """The first signal ends the program by way of its finally blocks. `timeout make` sends two within milliseconds, its own and make's."""

    def end(sig: int, _: object) -> None:
        deaf()
        sys.exit(128 + sig)

    for sig in ENDING:
        signal.signal(sig, end)


class Process:
    """A process with its own group, port and log."""

    def __init__(self, name: str, logs: pathlib.Path, port: int = 0) -> None:
        self.name = name
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = logs / f"{name}.log"
        self.proc: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def spawn(self, cmd: list[str], env: dict[str, str] | None = None, cwd: pathlib.Path | None = None) -> None:
        self.started = time.monotonic()
        with self.log.open("ab") as out:
            self.proc = subprocess.Popen(
                cmd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, start_new_session=True, env={**os.environ, **(env or {})}
            )

    def up(self) -> bool:
        if self.proc is None or (rc := self.proc.poll()) is not None:
            raise Failed(f"{self.name} ended{'' if self.proc is None else f' with status {rc}'}; the end of {self.log}:\n{self.tail()}")
        try:
            get(self.url + "/health", 2.0)
            return True
        except (OSError, urllib.error.URLError, http.client.HTTPException):
            return False

    def metrics(self) -> dict[str, float]:
        return parse_metrics(get(self.url + "/metrics"))

    def stop(self, timeout: float = 15.0) -> None:
        if self.proc is None:
            return
        if self.proc.poll() is None:
            self.proc.terminate()
            try:
                self.proc.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.proc.pid, signal.SIGKILL)  # what it started is in its group
        except ProcessLookupError:
            pass
        self.proc.wait()
        self.proc = None

    def tail(self, n: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-n:]) if self.log.exists() else ""

    def pids(self) -> list[int]:
        """The process and its descendants."""
        assert self.proc is not None
        out, todo = [], [self.proc.pid]
        while todo:
            pid = todo.pop()
            out.append(pid)
            for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    todo += [int(c) for c in task.read_text().split()]
                except OSError:
                    continue
        return out

    def cpu_seconds(self) -> float:
        tick = os.sysconf("SC_CLK_TCK")
        total = 0.0
        for pid in self.pids():
            try:
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += (int(fields[11]) + int(fields[12])) / tick
        return total


class Server(Process):
    """One vLLM API server."""

    def start(self, build: pathlib.Path, kv: dict[str, Any] | None, *args: str, nixl: bool = False, env: dict[str, str] | None = None) -> Server:
        cmd = [
            str(venv_python(build, nixl)), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(build / "models" / "tiny-llama"), "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--seed", "1", "--dtype", DTYPE,
            "--max-model-len", "4608", "--block-size", str(BLOCK), "--max-num-seqs", "16",
            *args,
        ]  # fmt: skip
        if kv is not None:
            cmd += ["--kv-transfer-config", json.dumps(kv)]
        self.spawn(cmd, {**ENV, **(env or {})}, cwd=self.log.parent)
        return self


def kvspray_config(socket: str, role: str) -> dict[str, Any]:
    return {
        "kv_connector": "KVSprayConnector",
        "kv_connector_module_path": "kvspray_vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, "memory": "memfd"},
    }


class Proxy(Process):
    def start(self, mode: str, prefill: str, peer: str, decode: str) -> Proxy:
        self.spawn(
            [str(BINARY), "proxy", "--mode", mode, "--prefill", prefill, "--prefill-peer", peer, "--decode", decode,
             "--listen", f"127.0.0.1:{self.port}"],
            cwd=ROOT,
        )  # fmt: skip
        return self


@dataclasses.dataclass
class Answer:
    tokens: list[list[int]]  # per choice
    ttft_s: float
    total_s: float
    error: str | None = None


def complete(port: int, prompt: Any, max_tokens: int = 12, n: int = 1, rid: str = "", timeout: float = 120.0, **more: Any) -> Answer:
    """One streamed completion, greedy. prompt: token ids, or a list of such. rid: names the request in every log and trace."""
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "n": n, **more,
    }  # fmt: skip
    if n > 1:  # vLLM refuses several greedy samples; the likeliest token alone is the same
        body.update(temperature=1, top_k=1)
    start = time.monotonic()
    ttft = 0.0
    tokens: dict[int, list[int]] = {}
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        conn.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **({"X-Request-Id": rid} if rid else {})})
        resp = conn.getresponse()
        if resp.status != 200:
            return Answer([], 0, time.monotonic() - start, f"HTTP {resp.status}: {resp.read(600).decode(errors='replace')}")
        for raw in resp:
            line = raw.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                return Answer([], 0, time.monotonic() - start, str(chunk["error"])[:600])
            for choice in chunk.get("choices", ()):
                ids = choice.get("token_ids") or []
                if ids and not ttft:
                    ttft = time.monotonic() - start
                tokens.setdefault(choice["index"], []).extend(ids)
    except (OSError, http.client.HTTPException, ValueError) as err:
        return Answer([], 0, time.monotonic() - start, f"{type(err).__name__}: {err}")
    finally:
        conn.close()
    return Answer([tokens[i] for i in sorted(tokens)], ttft, time.monotonic() - start)


def give_up(port: int, prompt: list[int], after_s: float) -> None:
    """A client that goes away while its request is under way."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    conn.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(after_s)
    conn.close()
