# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill and decode servers on a CPU, a sidecar beside each, and SGLang's own router."""

from __future__ import annotations

import concurrent.futures as cf
import pathlib
import sys
from collections.abc import Sequence

from sglang_server import START_S, Process, Server, rig

ANSWER = 6  # tokens
CHUNK = 128  # tokens of a prompt that prefill computes at a time


class Router(Process):
    """SGLang's own router for prefill and decode."""

    def start(self, prefill: Server, bootstrap: int, decode: Server) -> Router:
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
            "--prefill", prefill.url, str(bootstrap), "--decode", decode.url, "--host",
            "127.0.0.1", "--port", str(self.port), "--policy", "round_robin", "--disable-retries",
            "--prometheus-port", str(rig.free_port()),
        ]  # fmt: skip
        self.spawn(command)
        return self

    post, generate = Server.post, Server.generate


class Pair:
    def __init__(self, run: pathlib.Path, logs: pathlib.Path) -> None:
        """``run``: a short path, in which sidecars have their sockets."""
        self.logs = logs
        self.sidecars = [rig.Sidecar(name, run) for name in ("p", "d")]
        for s in self.sidecars:
            s.log = logs / f"sidecar-{s.name}.log"
        self.port = rig.free_port()
        both = [
            "--disaggregation-transfer-backend", "kvspray", "--disaggregation-bootstrap-port",
            str(self.port),
        ]  # fmt: skip
        envs = [{"KVSPRAY_SGLANG_SOCKET": s.socket} for s in self.sidecars]
        self.prefill = Server(
            "prefill", logs,
            [*both, "--disaggregation-mode", "prefill", "--chunked-prefill-size", str(CHUNK)],
            envs[0],
        )  # fmt: skip
        decode = ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"]
        self.decode = Server("decode", logs, [*both, *decode], envs[1])
        self.router = Router("router", logs)
        self.plain: dict[tuple[int, ...], list[int]] = {}

    def ask_plain(self, prompts: Sequence[list[int]]) -> None:
        """One server's answers. Its scheduler never rests, so it does not run beside the others."""
        plain = Server("plain", self.logs, ["--chunked-prefill-size", str(CHUNK)])
        try:
            plain.start().ready()
            with cf.ThreadPoolExecutor(4) as pool:
                answers = pool.map(lambda ids: plain.generate(ids, ANSWER)[0], prompts)
                for ids, answer in zip(prompts, answers, strict=True):
                    self.plain[tuple(ids)] = answer
        finally:
            plain.stop()

    def start(self) -> None:
        servers = [self.prefill, self.decode]
        for s in servers:
            s.start()
        for s in servers:
            s.ready()
        self.router.start(self.prefill, self.port, self.decode)
        rig.wait_for("the router", self.router.up, START_S, 0.2)

    def stop(self) -> None:
        for process in (self.router, self.prefill, self.decode, *self.sidecars):
            process.stop()

    def right(self, ids: list[int]) -> bool:
        return self.router.generate(ids, ANSWER)[0] == self.plain[tuple(ids)]

    def moved(self) -> float:
        m = rig.parse_metrics(rig.get(self.sidecars[1].url + "/metrics"))
        return rig.total(m, "kvspray_transfer_payload_bytes_total", side="destination")

    def leases(self) -> float:
        return sum(
            rig.total(rig.parse_metrics(rig.get(s.url + "/metrics")), "kvspray_lease_open")
            for s in self.sidecars
        )
