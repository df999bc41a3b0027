"""vLLM's own API server, and kvspray's proxy, as processes of their own; and a client that
streams."""

from __future__ import annotations

import contextlib
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
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from cluster import BINARY, ROOT, Failed, free_port, get, parse_metrics, routed
from hosts import Host

MODEL_NAME = "tiny"
START_S = 600.0
BEAT_S = 15.0
ENDING = (signal.SIGTERM, signal.SIGINT)


def deaf() -> None:
    """Signals that end a program are ignored from here on: what it started is being stopped, and
    half of it would live on."""
    for sig in ENDING:
        signal.signal(sig, signal.SIG_IGN)


def end_on_signals() -> None:
    """The first signal ends the program by way of its finally blocks. `timeout make` sends two
    within milliseconds, its own and make's."""

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

    def spawn(
        self, cmd: list[str], env: dict[str, str] | None = None, cwd: pathlib.Path | None = None
    ) -> None:
        self.started = time.monotonic()
        with self.log.open("ab") as out:
            self.proc = subprocess.Popen(
                cmd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=cwd,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )

    def up(self) -> bool:
        if self.proc is None or (rc := self.proc.poll()) is not None:
            raise Failed(
                f"{self.name} ended{'' if self.proc is None else f' with status {rc}'}; the end of "
                f"{self.log}:\n{self.tail()}"
            )
        try:
            get(self.url + "/health", 2.0)
            return True
        except (OSError, urllib.error.URLError, http.client.HTTPException):
            return False

    def metrics(self, timeout: float = 5.0) -> dict[str, float]:
        return parse_metrics(get(self.url + "/metrics", timeout))

    def stop(self, timeout: float = 15.0) -> None:
        if self.proc is None:
            return
        if self.proc.poll() is None:
            self.proc.terminate()
            try:
                self.proc.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """kill -9 of it and of what it started, which is in its group."""
        if self.proc is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, signal.SIGKILL)
        self.proc.wait()
        self.proc = None

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP of it and of what it started, and SIGCONT after so long."""
        assert self.proc is not None
        os.killpg(self.proc.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self.proc.pid, signal.SIGCONT)

    def tail(self, n: int = 25) -> str:
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-n:])
            if self.log.exists()
            else ""
        )

    def pids(self) -> list[int]:
        """The process and its descendants; none where it does not run."""
        proc = self.proc  # another thread may stop it
        out, todo = [], [proc.pid] if proc is not None else []
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
        return cpu_seconds(self.pids())


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of the processors, that these processes have used so far."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in pids:
        try:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def wait_up(
    processes: Sequence[Process], say: Callable[[str], None], timeout: float = START_S
) -> None:
    """Until all of them serve, with a line every now and then."""
    waiting, start, beat = list(processes), time.monotonic(), time.monotonic()
    while waiting:
        for p in list(waiting):
            if p.up():
                waiting.remove(p)
                say(f"  {p.name} is up after {time.monotonic() - p.started:.0f} s")
        if waiting and time.monotonic() - beat > BEAT_S:
            beat = time.monotonic()
            say(
                "  still starting: " + "; ".join(f"{p.name}: ...{p.tail(1)[-60:]}" for p in waiting)
            )
        if waiting and time.monotonic() - start > timeout:
            raise Failed(
                f"not up within {timeout:g} s: {waiting[0].name}; the end of {waiting[0].log}:\n"
                + waiting[0].tail()
            )
        time.sleep(0.25)


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


def kvspray_config(
    socket: str,
    role: str,
    memory: str = "memfd",
    connector: tuple[str, str] = ("kvspray_vllm", "KVSprayConnector"),
) -> dict[str, Any]:
    return {
        "kv_connector_module_path": connector[0],
        "kv_connector": connector[1],
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket, "memory": memory},
    }


class Proxy(Process):
    def start(self, mode: str, prefill: str, peer: str, decode: str) -> Proxy:
        engines = [routed(prefill, "prefill", peer=peer), routed(decode, "decode")]
        self.spawn(
            [str(BINARY), "proxy", "--mode", mode, "--listen", f"127.0.0.1:{self.port}", *engines],
            cwd=ROOT,
        )
        return self


@dataclasses.dataclass
class Answer:
    tokens: list[list[int]]  # per choice
    ttft_s: float
    total_s: float
    error: str | None = None
    # Of the likeliest tokens, where they were asked for.
    logprobs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # Of each piece of the answer, seconds since the request.
    times: list[float] = dataclasses.field(default_factory=list)


def complete(
    port: int,
    prompt: Any,
    max_tokens: int = 12,
    n: int = 1,
    rid: str = "",
    timeout: float = 120.0,
    **more: Any,
) -> Answer:
    """One streamed completion, greedy. prompt: token ids, or a list of such. rid: names the request
    in every log and trace."""
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True, "n": n, **more,
    }  # fmt: skip
    if n > 1:  # vLLM refuses several greedy samples; the likeliest token alone is the same
        body.update(temperature=1, top_k=1)
    start = time.monotonic()
    ttft = 0.0
    tokens: dict[int, list[int]] = {}
    logprobs: list[dict[str, float]] = []
    times: list[float] = []
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        conn.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json", **({"X-Request-Id": rid} if rid else {})},
        )
        resp = conn.getresponse()
        if resp.status != 200:
            return Answer(
                [],
                0,
                time.monotonic() - start,
                f"HTTP {resp.status}: {resp.read(600).decode(errors='replace')}",
            )
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
                if ids:
                    times.append(time.monotonic() - start)
                    ttft = ttft or times[0]
                tokens.setdefault(choice["index"], []).extend(ids)
                logprobs += (choice.get("logprobs") or {}).get("top_logprobs") or []
    except (OSError, http.client.HTTPException, ValueError) as err:
        return Answer([], 0, time.monotonic() - start, f"{type(err).__name__}: {err}")
    finally:
        conn.close()
    return Answer(
        [tokens[i] for i in sorted(tokens)], ttft, time.monotonic() - start, None, logprobs, times
    )


def request(
    url: str,
    prompt: list[int],
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
    with urllib.request.urlopen(req, timeout=120) as f:
        data = f.read()
    return time.perf_counter() - start, json.loads(data)


def ask(
    url: str,
    prompt: list[int],
    kv: dict[str, Any] | None = None,
    max_tokens: int = 1,
    rid: str = "",
) -> tuple[float, dict[str, Any]]:
    return send(request(url, prompt, kv, max_tokens, rid))


def give_up(port: int, prompt: list[int], after_s: float) -> None:
    """A client that goes away while its request is under way."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    conn.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(after_s)
    conn.close()
