from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvspray

HERE = pathlib.Path(__file__).parent
# Only a test that fails takes so long; busy cores do not. DEADLINE_MS is longer, so that nothing
# passes because a lease's deadline has.
TIMEOUT_S = 30.0
DEADLINE_MS = 60_000

BINARY = pathlib.Path(
    os.environ.get(
        "KVSPRAY_BINARY", pathlib.Path(__file__).resolve().parents[2] / "bin" / "kvspray"
    )
)
ENGINE = kvspray.EngineInfo("test", "1", "e0")
LAYERS = 3


def skip(feature: str, reason: str) -> None:
    """Skips with a reason; a failure where KVSPRAY_MUST_RUN names the feature, or "all"."""
    must = os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
    if feature in must or "all" in must:
        pytest.fail(f"KVSPRAY_MUST_RUN names {feature}, but: {reason}")
    pytest.skip(f"{feature}: {reason}")


def layout() -> dict[str, Any]:
    return {
        "model": "tiny",
        "dtype": "bfloat16",
        "groups": [
            {
                "tokens_per_block": 16,
                "strategy": "packed-hnd",
                "params": {"heads": 1, "dim": 32},
                "num_blocks": 8,
                "layers": [
                    {
                        "name": f"l{i}",
                        "index": i,
                        "region": 0,
                        "base": i * 32768,
                        "block_stride": 4096,
                        "page_bytes": 4096,
                    }
                    for i in range(LAYERS)
                ],
            }
        ],
        "identity": {"model": "tiny"},
    }


def until(condition: Callable[[], Any], what: str, timeout: float = TIMEOUT_S) -> Any:
    """Waits for a condition with a deadline; the pause only limits the polling."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        pause.wait(0.002)
    return value


class Sidecar:
    """A fake sidecar in a process of its own, driven over pipes."""

    def __init__(self, socket: pathlib.Path, **options: Any) -> None:
        options = {
            "socket": str(socket),
            "deadline_ms": DEADLINE_MS,
            "match_timeout_ms": 500,
            "grace_ms": 400,
            **options,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_sidecar.py"), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.seen: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.expect("listening")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))

    def command(self, cmd: str, **args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"cmd": cmd, **args}) + "\n")
        self.process.stdin.flush()

    def expect(self, ev: str, timeout: float = TIMEOUT_S, **match: Any) -> dict[str, Any]:
        """The next event of this kind that matches; others are kept in ``seen``."""
        end = time.monotonic() + timeout
        while True:
            try:
                event = self.events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no event {ev} {match} within {timeout} s; seen "
                    f"{[str(e)[:160] for e in self.seen[-6:]]}"
                ) from None
            self.seen.append(event)
            if event["ev"] == ev and all(event.get(k) == v for k, v in match.items()):
                return event

    def record(self, name: str, **match: Any) -> dict[str, Any]:
        """The next record of this name, its body decoded."""
        event = self.expect("record", name=name, **match)
        event["body"] = kvspray.protocol.decode(bytes.fromhex(event["hex"]))
        return event

    def complete(self, lease: int, name: str, status: int = 0, **body: Any) -> None:
        self.command(
            "complete",
            lease=lease,
            name=name,
            status=status,
            hex=kvspray.protocol.encode(name, body).hex(),
        )

    def signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass


@pytest.fixture
def socket_path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "s.sock"


@pytest.fixture
def sidecar(socket_path: pathlib.Path) -> Iterator[Callable[..., Sidecar]]:
    made: list[Sidecar] = []

    def make(**options: Any) -> Sidecar:
        made.append(Sidecar(socket_path, **options))
        return made[-1]

    yield make
    for s in made:
        s.close()


@pytest.fixture
def worker(socket_path: pathlib.Path) -> Iterator[Callable[..., kvspray.WorkerClient]]:
    made: list[tuple[kvspray.WorkerClient, kvspray.Region]] = []

    def make(*, connect: bool = True, start: bool = True, **options: Any) -> kvspray.WorkerClient:
        options.setdefault("engine", ENGINE)
        client = kvspray.WorkerClient(socket_path, layers=LAYERS, **options)
        region = client.alloc_region(LAYERS * 32768)
        made.append((client, region))
        if start:
            client.register([region], layout())
            if connect:
                assert client.wait_connected(TIMEOUT_S), client.status()
        return client

    yield make
    for client, region in made:
        client.close()
        region.close()


Serve = Callable[..., "tuple[subprocess.Popen[bytes], pathlib.Path]"]


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Serve]:
    """Real sidecars, each with a socket of its own."""
    if not BINARY.exists():
        skip("sidecar", f"{BINARY} is not there: make build")
    made: list[subprocess.Popen[bytes]] = []

    def start(name: str, *sets: str) -> tuple[subprocess.Popen[bytes], pathlib.Path]:
        socket, ready, log = (tmp_path / f"{name}.{what}" for what in ("sock", "ready", "log"))
        command = [
            BINARY,
            "serve",
            "--socket",
            socket,
            "--listen",
            "127.0.0.1:0",
            "--http",
            "off",
            "--ready-file",
            ready,
        ]
        for s in ("peer.gossip.listen=off", *sets):
            command += ["--set", s]
        with open(log, "wb") as out:
            p = subprocess.Popen(command, stdout=out, stderr=out)
        made.append(p)
        until(lambda: ready.exists() or p.poll() is not None, "a sidecar", 60)
        assert p.poll() is None, log.read_text()
        return p, socket

    yield start
    for p in made:
        p.kill()
        p.wait()


def real_layout() -> dict[str, Any]:
    out = layout()
    out["groups"][0].update(strategy="packed_hnd", params={"heads": 1})
    out["identity"] = kvspray.identity(
        model_config="tiny",
        weights="none",
        layers=LAYERS,
        head_size=64,
        groups="full",
        rope="",
        backoff=0,
        speculative="",
    )
    return out
