"""Processes of a small cluster on loopback: sidecars with their configuration, ports, signals and
what they report."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvspray.trial.processes import Failed, free_port, get, parse_metrics, tail, wait_for
from kvspray.trial.processes import total as total

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BINARY = pathlib.Path(os.environ.get("KVSPRAY_BINARY", ROOT / "bin" / "kvspray"))


def routed(url: str, role: str, **keys: str) -> str:
    """A flag of kvspray proxy for one engine."""
    return "--engine=" + ",".join(f"{k}={v}" for k, v in {"url": url, "role": role, **keys}.items())


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for k, v in over.items():
        out[k] = merge(out[k], v) if isinstance(v, dict) and isinstance(out.get(k), dict) else v
    return out


def use_of(pids: Iterable[int]) -> dict[str, int]:
    """What processes hold together: descriptors, threads, bytes of memory."""
    out = {"fds": 0, "threads": 0, "rss": 0}
    for pid in pids:
        try:
            fds = len(os.listdir(f"/proc/{pid}/fd"))
            threads = len(os.listdir(f"/proc/{pid}/task"))
            pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue  # it has ended meanwhile
        out["fds"] += fds
        out["threads"] += threads
        out["rss"] += pages * os.sysconf("SC_PAGE_SIZE")
    return out


def cluster_key(dir: pathlib.Path) -> str:
    """The path of a new key for all sidecars of a cluster."""
    path = dir / "cluster.key"
    subprocess.run(
        [BINARY, "keygen", "cluster", "--out", path], check=True, stdout=subprocess.DEVNULL
    )
    return str(path)


class Sidecar:
    """One `kvspray serve`. Addresses stay the same over restarts, as they would for a pod with a
    fixed name."""

    def __init__(
        self,
        name: str,
        dir: pathlib.Path,
        config: dict[str, Any] | None = None,
        wrap: Sequence[str] = (),
        get: Callable[[str, float], str] = get,
        binary: pathlib.Path = BINARY,
    ) -> None:
        """wrap: a program that executes the sidecar, with its arguments. get: how the sidecar's
        HTTP server is asked, where that is not as any other."""
        self.name, self.wrap, self.get, self.binary = name, list(wrap), get, binary
        self.dir = dir / name
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket = str(self.dir / "s.sock")
        self.peer_port, self.http_port = free_port(), free_port()
        self.endpoint = f"127.0.0.1:{self.peer_port}"
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.log = self.dir / "log"
        self.transfers, self.hashes = self.dir / "transfers.jsonl", self.dir / "blocks.jsonl"
        self.config = merge(
            {
                "node": name,
                "engine": {"socket": self.socket},
                "peer": {"listen": self.endpoint, "gossip": {"listen": "off"}},
                "http": {"listen": f"127.0.0.1:{self.http_port}"},
                "log": {"level": "debug", "format": "json"},
                "trace": {"transfers": str(self.transfers), "block_hashes": str(self.hashes)},
            },
            config or {},
        )
        self.proc: subprocess.Popen[bytes] | None = None

    def start(self, wait: float = 60.0) -> Sidecar:
        assert self.proc is None
        path = self.dir / "config.yaml"
        path.write_text(json.dumps(self.config, indent=1))  # JSON is YAML
        with self.log.open("ab") as out:
            self.proc = subprocess.Popen(
                [*self.wrap, str(self.binary), "serve", "--config", str(path)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, close_fds=True,
            )  # fmt: skip
        if wait:
            wait_for(f"sidecar {self.name} ready (log: {self.log})", self.is_ready, wait)
        return self

    def is_ready(self) -> bool:
        if self.proc is not None and (rc := self.proc.poll()) is not None:
            raise Failed(
                f"sidecar {self.name} ended with status {rc}; the end of its log:\n" + self.tail()
            )
        try:
            return self.get(self.url + "/readyz", 1.0) != ""
        except urllib.error.HTTPError:
            return False

    def signal(self, sig: int) -> None:
        assert self.proc is not None
        self.proc.send_signal(sig)

    def kill(self) -> None:
        """kill -9, and its body collected."""
        if self.proc is not None:
            self.proc.kill()
            self.proc.wait()
            self.proc = None

    def stop(self, timeout: float = 10.0) -> int | None:
        """The orderly end."""
        if self.proc is None:
            return None
        self.proc.send_signal(signal.SIGCONT)
        self.proc.terminate()
        try:
            rc = self.proc.wait(timeout)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            rc = self.proc.wait()
        self.proc = None
        return rc

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(signal.SIGCONT)

    def pids(self) -> list[int]:
        return [self.proc.pid] if self.proc is not None else []

    def metrics(self, timeout: float = 5.0) -> dict[str, float]:
        return parse_metrics(self.get(self.url + "/metrics", timeout))

    def lines(self, path: pathlib.Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    def tail(self, n: int = 25) -> str:
        return tail(self.log, n)

    def panics(self) -> str | None:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        m = re.search(r"(?m)^(panic:|fatal error:|WARNING: DATA RACE).*", text)
        return text[m.start() : m.start() + 2000] if m else None


class _Relay:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.lock = threading.Lock()
        self.live: set[socket.socket] = set()
        self.whole = True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            with self.lock:
                if not self.whole:
                    conn.close()
                    continue
            try:
                out = socket.create_connection(self.target, 2)
            except OSError:
                conn.close()
                continue
            out.settimeout(None)
            with self.lock:
                self.live |= {conn, out}
            for a, b in ((conn, out), (out, conn)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    def _copy(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                b.sendall(data)
        except OSError:
            pass
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        with self.lock:
            self.live -= {a, b}

    def cut(self) -> int:
        """Returns how many connections died."""
        with self.lock:
            self.whole = False
            live = list(self.live)
        for s in live:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        return len(live) // 2

    def heal(self) -> None:
        with self.lock:
            self.whole = True


class Relay:
    """A TCP relay that can be cut: every connection through it dies, and new ones are refused,
    until it is healed. It has a process of its own, so that its user has no threads and may
    fork."""

    def __init__(self, target: str) -> None:
        self.proc = subprocess.Popen(
            [sys.executable, __file__, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=True,
        )
        self.address = self._answer()

    def _answer(self) -> str:
        assert self.proc.stdout is not None
        return self.proc.stdout.readline().strip()

    def _say(self, word: str) -> str:
        assert self.proc.stdin is not None
        self.proc.stdin.write(word + "\n")
        self.proc.stdin.flush()
        return self._answer()

    def cut(self) -> int:
        """Returns how many connections died."""
        return int(self._say("cut"))

    def heal(self) -> None:
        self._say("heal")

    def close(self) -> None:
        self.proc.kill()
        self.proc.wait()


def _relay_main(target: str) -> None:
    relay = _Relay(target)
    print(relay.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "cut":
            print(relay.cut(), flush=True)
        else:
            relay.heal()
            print("whole", flush=True)


@contextlib.contextmanager
def running(*sidecars: Sidecar) -> Iterator[None]:
    try:
        for s in sidecars:
            s.start()
        yield
    finally:
        for s in sidecars:
            s.stop()


if __name__ == "__main__":
    _relay_main(sys.argv[1])
