"""The end of a client, and of programs that have one, while other threads use it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ENGINE, TIMEOUT_S, Sidecar

import kvspray

Make = Callable[..., Any]
OFFERS = int(os.environ.get("KVSPRAY_TEST_OFFERS", "6"))
XFER, HASH = b"x" * 16, b"h" * 32


def checkpoint(at: pathlib.Path) -> pathlib.Path:
    at.mkdir()
    header = json.dumps({"a": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (at / "config.json").write_text("{}")
    (at / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4096))
    return at


def test_sigterm_ends_an_offer(
    sidecar: Make, socket_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    s: Sidecar = sidecar()
    model = checkpoint(tmp_path / "m")
    for n in range(OFFERS):
        p = subprocess.Popen(
            [sys.executable, "-m", "kvspray.offer", str(model), "--listen", "127.0.0.1:0",
            "--socket", str(socket_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            assert p.stdout is not None and p.stdout.readline(), p.communicate()
            p.send_signal(signal.SIGTERM)
            _, err = p.communicate(timeout=TIMEOUT_S)
        finally:
            p.kill()
        assert p.returncode == 0, (n, p.returncode, err)
    assert s.process.poll() is None


def test_threads_in_calls_survive_the_end(sidecar: Make, worker: Make) -> None:
    """Each call returns, and the ones after it: the handle lives as long as a thread may use it."""
    sidecar()
    for n in range(20):
        w: kvspray.WorkerClient = worker()
        stop, busy = threading.Event(), threading.Barrier(6)

        def calls(
            of: Callable[[], Any], stop: threading.Event = stop, busy: threading.Barrier = busy
        ) -> None:
            of()
            busy.wait(TIMEOUT_S)
            while not stop.is_set():
                of()

        kinds: list[Callable[[], Any]] = [
            lambda w=w: w.poll(), lambda w=w: w.wait(0.001), lambda w=w: w.signal_layer(0, 1),
            lambda w=w: w.status(), lambda w=w: w.step(1, [(w.intent(XFER, HASH, 32, [[0, 1]]), 16,
            None)]),
        ]  # fmt: skip
        threads = [threading.Thread(target=calls, args=(k,)) for k in kinds]
        for t in threads:
            t.start()
        busy.wait(TIMEOUT_S)
        w.close()
        stop.set()
        for t in threads:
            t.join(TIMEOUT_S)
            assert not t.is_alive(), n
        assert w.poll() == [] and not w.connected


def test_waits_without_a_bound_return_at_the_end(sidecar: Make, worker: Make) -> None:
    sidecar()
    w: kvspray.WorkerClient = worker()
    threads = [threading.Thread(target=w.wait) for _ in range(2)]
    for t in threads:
        t.start()
    w.close()
    for t in threads:
        t.join(TIMEOUT_S)
        assert not t.is_alive()


def test_a_daemon_thread_in_a_wait_does_not_crash_the_interpreters_end(
    socket_path: pathlib.Path,
) -> None:
    """At its end the interpreter runs finalizers while such threads run."""
    code = """
import sys, threading, kvspray
e = kvspray.EngineInfo("e")
w = kvspray.WorkerClient(sys.argv[1], engine=e, layers=1, log=lambda level, text: None)
r = w.alloc_region(4096)
w.register([r])
def run():
    while True:
        w.wait(0.001)
        w.poll()
for _ in range(4):
    threading.Thread(target=run, daemon=True).start()
"""
    for _ in range(5):
        p = subprocess.run(
            [sys.executable, "-c", code, str(socket_path)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert p.returncode == 0, (p.returncode, p.stderr)


def test_a_query_lives_until_its_last_asker_withdraws(socket_path: pathlib.Path) -> None:
    with kvspray.SchedulerClient(socket_path, engine=ENGINE) as c:
        for _ in range(2):
            assert c.await_admission(XFER, HASH, "p:1", 100, 30)
        assert c.decline(XFER, HASH, "p:1", "its request was aborted")
        got = c.admission(XFER, HASH)
        assert got is not None and got.state == kvspray.AdmissionState.PENDING, (
            "a sample of the same prompt still asks"
        )
        assert c.decline(XFER, HASH, "p:1", "its request was aborted")
        assert c.admission(XFER, HASH) is None


def test_an_offer_that_ends_refuses_pieces(
    sidecar: Make, socket_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from kvspray.offer import Offer
    from kvspray.weightstream import LoadError

    sidecar()
    offer = Offer(str(checkpoint(tmp_path / "m")), str(socket_path), 1 << 22)
    piece = {"digest": offer.manifest.digest, "xfer": "ab" * 16, "file": 0, "start": 0, "nbytes": 8}
    offer.stop()
    with pytest.raises(LoadError, match="the offer ends"):
        offer.request(piece)
    before = time.monotonic()
    offer.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvspray-offer")], (
        time.monotonic() - before
    )
