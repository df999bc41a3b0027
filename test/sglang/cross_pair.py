"""A vLLM and an SGLang on a CPU, a sidecar beside each, and the bridge that makes a pair of them:
one prefills, the other decodes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import sys
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from sglang_server import START_S, Process, Server, counted, hosts, moved, rig, servers

BUILD = pathlib.Path(os.environ.get("KVSPRAY_BUILD", rig.ROOT / ".build"))
VLLM = hosts.cpu(BUILD)
CHUNK = 128  # tokens of a prompt that a prefill computes at a time


class Bridge(Process):
    def start(self, *args: str) -> Bridge:
        command = [sys.executable, "-m", "kvspray_sglang.bridge", "--listen",
                   f"127.0.0.1:{self.port}", *args]  # fmt: skip
        self.spawn(command)
        return self


class Cross:
    """``prefill``: "vllm" or "sglang"."""

    def __init__(
        self, prefill: str, run: pathlib.Path, logs: pathlib.Path,
        config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``run``: a short path, in which sidecars have their sockets."""
        self.prefill = prefill
        self.sidecars = [rig.Sidecar(f"{prefill[0]}{name}", run, config) for name in ("p", "d")]
        for s in self.sidecars:
            s.log = logs / f"sidecar-{s.name}.log"
        self.bootstrap = rig.free_port()
        of_vllm, of_sglang = self.sidecars if prefill == "vllm" else reversed(self.sidecars)
        self.vllm_sidecar = of_vllm
        self.vllm = servers.Server(f"{prefill}-vllm", logs)
        mode = "decode" if prefill == "vllm" else "prefill"
        args = [
            "--disaggregation-transfer-backend", "kvspray", "--disaggregation-mode", mode,
            "--disaggregation-bootstrap-port", str(self.bootstrap), "--chunked-prefill-size",
            str(CHUNK), "--hicache-ratio", "1",  # else a share of the host's free memory
        ]  # fmt: skip
        env = {
            "KVSPRAY_SGLANG_SOCKET": of_sglang.socket, "KVSPRAY_SGLANG_IDENTITY": "portable",
        }  # fmt: skip
        self.sglang = Server(f"{prefill}-sglang", logs, args, env)
        self.bridge = Bridge(f"{prefill}-bridge", logs)
        self.plain: dict[tuple[int, ...], list[int]] = {}  # vLLM's own answers

    def start(self) -> None:
        kv = servers.kvspray_config(self.vllm_sidecar.socket, "kv_both")
        kv["kv_connector_extra_config"] |= {"identity": "portable"}
        extension = ["--worker-extension-cls", "kvspray_vllm.weights.WorkerExtension"]
        chunked = ["--max-num-batched-tokens", str(CHUNK), "--kv-cache-memory-bytes", "134217728"]
        env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache and /collective_rpc
        for s in self.sidecars:
            s.start()
        self.vllm.start(VLLM, "tiny-llama", kv, *chunked, *extension, env=env)
        self.sglang.start()
        rig.wait_for("vLLM", self.vllm.up, START_S, 0.5)
        self.sglang.ready()
        if self.prefill == "vllm":
            args = ["--prefill-vllm", self.vllm.url, "--prefill-peer", self.sidecars[0].endpoint,
                    "--decode-sglang", self.sglang.url]  # fmt: skip
        else:
            args = ["--prefill-sglang", self.sglang.url, "--prefill-bootstrap",
                    f"127.0.0.1:{self.bootstrap}", "--decode-vllm", self.vllm.url]  # fmt: skip
        self.bridge.start(*args)
        rig.wait_for("the bridge", self.bridge.up, 60, 0.2)

    def stop(self) -> None:
        for process in (self.bridge, self.sglang, self.vllm, *self.sidecars):
            with contextlib.suppress(OSError):
                process.stop()

    def alone(self, ids: list[int], tokens: int) -> list[int]:
        """vLLM's own answer, with nothing of the prompt in its cache, before and after."""
        self.forget()
        _, got = servers.ask(self.vllm.url, ids, None, tokens)
        self.forget()
        return list(got["choices"][0]["token_ids"])

    def forget(self) -> None:
        url = self.vllm.url + "/reset_prefix_cache"
        request = urllib.request.Request(url, b"", {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60):
            pass

    def request(self, ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body, in the interface of the engine that decodes."""
        if self.prefill == "vllm":
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return "/generate", {"input_ids": ids, "sampling_params": sampling}
        return "/v1/completions", {
            "model": servers.MODEL_NAME, "prompt": ids, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip

    def ask(self, ids: list[int], tokens: int) -> list[int]:
        """The pair's answer."""
        got = self.post(*self.request(ids, tokens))
        return list(got["output_ids"] if "output_ids" in got else got["choices"][0]["token_ids"])

    def give_up(self, ids: list[int], tokens: int, after_s: float) -> None:
        """A client that goes away while its request is under way."""
        path, body = self.request(ids, tokens)
        conn = http.client.HTTPConnection("127.0.0.1", self.bridge.port, timeout=10)
        conn.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(after_s)
        conn.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.bridge.url + path, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.loads(answer.read())

    def moved(self) -> float:
        return moved(self.sidecars[1])

    def leases(self) -> float:
        return sum(counted(s, "kvspray_lease_open") for s in self.sidecars)

    def pages(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """The hash of each page that has moved, as it was in the memory of either engine."""
        keys = ("xfer", "hash", "group", "layer", "block", "bytes", "sha256")
        both = ([tuple(str(x[k]) for k in keys) for x in s.lines(s.hashes)] for s in self.sidecars)
        sent, came = (sorted(x) for x in both)
        return sent, came
