"""vLLM's own API server, and kvspray's proxy, as processes of their own; and a client that
streams."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from typing import Any

from cluster import BINARY, ROOT, routed

from kvspray.trial.engines import MODEL_NAME
from kvspray.trial.engines import Server as Server
from kvspray.trial.engines import ask as ask
from kvspray.trial.engines import request as request
from kvspray.trial.engines import send as send
from kvspray.trial.engines import sessions as sessions
from kvspray.trial.processes import ENDING as ENDING
from kvspray.trial.processes import START_S as START_S
from kvspray.trial.processes import Process
from kvspray.trial.processes import cpu_seconds as cpu_seconds
from kvspray.trial.processes import end_on_signals as end_on_signals
from kvspray.trial.processes import get as get
from kvspray.trial.processes import ignore_signals as ignore_signals
from kvspray.trial.processes import wait_up as wait_up


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
