# SPDX-License-Identifier: Apache-2.0
"""Processes on loopback: ports, logs, signals, health, and what they report."""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

START_S = 600.0
BEAT_S = 5.0
GROUP_S = 5.0  # for the rest of its group to end by itself
ENDING = (signal.SIGTERM, signal.SIGINT)


class Failed(Exception):
    """Something did not come about in time; the text has what was seen instead."""


# Below what Linux gives to outgoing connections, one of which could take a port between look and
# use.
_PORTS = range(18000, 30000)
_ports = iter(random.sample(_PORTS, len(_PORTS)))
_held: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that we start, and start again: held until this process ends. A process
    that looks as we do finds it taken; a server, which sets SO_REUSEADDR, may listen on it, because
    we do not."""
    for port in _ports:
        s = socket.socket()
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            s.close()
            continue
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held.append(s)
        return port
    raise Failed(f"no port is free between {_PORTS.start} and {_PORTS.stop}")


def wait_for(what: str, check: Callable[[], Any], timeout: float, tick: float = 0.02) -> Any:
    """The first true value of check. Raises Failed, with the last value or error, when the time has
    passed."""
    end = time.monotonic() + timeout
    last: Any = None
    while True:
        try:
            last = check()
            if last:
                return last
        except (OSError, ValueError) as err:
            last = err
        if time.monotonic() >= end:
            raise Failed(f"{what}: not within {timeout:g} s; last seen: {last!r}")
        time.sleep(tick)


# A proxy that the user's environment names is not for servers on loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout: float = 5.0) -> str:
    with DIRECT.open(url, timeout=timeout) as f:
        return bytes(f.read()).decode()


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name{labels}: value}, labels in their order."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                out[name] = float(value)
    return out


def total(metrics: dict[str, float], name: str, **labels: str) -> float:
    """Sum of a metric over all series that carry these labels."""
    out = 0.0
    for key, value in metrics.items():
        base, _, rest = key.partition("{")
        if base == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
            out += value
    return out


def tail(log: pathlib.Path, n: int = 25) -> str:
    """The last lines of a log, which may not be there yet."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-n:]) if log.exists() else ""


def ignore_signals() -> None:
    """Signals that end a program are ignored from here on: what it started is being stopped, and
    half of it would live on."""
    for sig in ENDING:
        signal.signal(sig, signal.SIG_IGN)


def end_on_signals() -> None:
    """The first signal ends the program by way of its finally blocks. `timeout make` sends two
    within milliseconds, its own and make's."""

    def end(sig: int, _: object) -> None:
        ignore_signals()
        sys.exit(128 + sig)

    for sig in ENDING:
        signal.signal(sig, end)


class Process:
    """A process with its own group, port and log."""

    health = "/health"

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
            get(self.url + self.health, 2.0)
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
                # Python's resource tracker outlives it, to remove what is left in /dev/shm.
                end = time.monotonic() + GROUP_S
                while time.monotonic() < end:
                    os.killpg(self.proc.pid, 0)
                    time.sleep(0.02)
            except (subprocess.TimeoutExpired, ProcessLookupError):
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
        return tail(self.log, n)

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
            say(f"  not up after {beat - start:.0f} s: {', '.join(p.name for p in waiting)}")
        if waiting and time.monotonic() - start > timeout:
            raise Failed(
                f"not up within {timeout:g} s: {waiting[0].name}; the end of {waiting[0].log}:\n"
                + waiting[0].tail()
            )
        time.sleep(0.25)
