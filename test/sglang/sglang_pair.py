"""SGLang's prefill and decode servers, a sidecar beside each, and SGLang's own router."""

from __future__ import annotations

import concurrent.futures as cf
import itertools
import pathlib
import sys
import urllib.error
from collections.abc import Sequence
from typing import Any

from sglang_server import CPU, START_S, Host, Process, Server, counted, moved, rig

ANSWER, CHUNK = CPU.answer, CPU.chunk


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


class Both:
    """Sends a request to both servers itself, for a host without the router."""

    def __init__(self) -> None:
        self.rooms = itertools.count(1)

    def start(self, prefill: Server, bootstrap: int, decode: Server) -> Both:
        self.servers, self.bootstrap = (prefill, decode), bootstrap
        return self

    def up(self) -> bool:
        return True

    def stop(self) -> None:
        pass

    def generate(
        self, ids: list[int], tokens: int, timeout: float = START_S
    ) -> tuple[list[int], int]:
        """Waits for both servers: neither may hold a request that the other one has given up."""
        room = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap,
            "bootstrap_room": next(self.rooms),
        }
        with cf.ThreadPoolExecutor(2) as pool:
            both = [pool.submit(s.generate, ids, tokens, room, timeout) for s in self.servers]
            cf.wait(both)
        for f in both:
            if isinstance(f.exception(), TimeoutError):
                raise rig.Failed(f"room {room['bootstrap_room']}: no end within {timeout:g} s")
        both[0].result()
        return both[1].result()


class Pair:
    def __init__(
        self, run: pathlib.Path, logs: pathlib.Path, host: Host = CPU, own_router: bool = True,
        config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``run``: a short path, in which sidecars have their sockets."""
        self.logs, self.host = logs, host
        self.sidecars = [rig.Sidecar(name, run, config) for name in ("p", "d")]
        for s in self.sidecars:
            s.log = logs / f"sidecar-{s.name}.log"
        self.port = rig.free_port()
        both = [
            "--disaggregation-transfer-backend", "kvspray", "--disaggregation-bootstrap-port",
            str(self.port),
        ]  # fmt: skip
        envs = [{"KVSPRAY_SGLANG_SOCKET": s.socket} for s in self.sidecars]
        self.chunked = ["--chunked-prefill-size", str(host.chunk)]
        prefill = ["--disaggregation-mode", "prefill", *self.chunked]
        decode = ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"]
        self.prefill = Server("prefill", logs, [*both, *prefill], envs[0], host)
        self.decode = Server("decode", logs, [*both, *decode], envs[1], host)
        self.router: Router | Both = Router("router", logs) if own_router else Both()
        self.plain: dict[tuple[int, ...], list[int]] = {}

    def ask_plain(self, prompts: Sequence[list[int]]) -> None:
        """One server's answers. Its scheduler never rests, so it does not run beside the others."""
        plain = Server("plain", self.logs, self.chunked, host=self.host)
        try:
            plain.start().ready()
            with cf.ThreadPoolExecutor(4) as pool:
                answers = pool.map(lambda ids: plain.generate(ids, self.host.answer)[0], prompts)
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
        return self.router.generate(ids, self.host.answer)[0] == self.plain[tuple(ids)]

    def answered(self, ids: list[int]) -> bool:
        """Whether there is a right answer by now; False while requests still fail."""
        try:
            return self.right(ids)
        except urllib.error.HTTPError:
            return False

    def moved(self) -> float:
        return moved(self.sidecars[1])

    def leases(self) -> float:
        return sum(counted(s, "kvspray_lease_open") for s in self.sidecars)
