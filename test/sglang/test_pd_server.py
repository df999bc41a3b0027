# SPDX-License-Identifier: Apache-2.0
"""SGLang's own prefill and decode servers on a CPU behind its own router, with kvspray as the
transfer backend: tokens equal those of one plain server, while prompts are given up and pages are
used again, and while sidecars die.
"""

from __future__ import annotations

import concurrent.futures as cf
import importlib.util
import os
import pathlib
import random
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator

import pytest
from sglang_server import Process, Server, error_of, rig

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

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
    def __init__(self, logs: pathlib.Path) -> None:
        self.sidecars = [rig.Sidecar(name, logs) for name in ("p", "d")]
        port, envs = rig.free_port(), [
            {"KVSPRAY_SGLANG_SOCKET": s.socket, "KVSPRAY_SGLANG_WEIGHTS": ""} for s in self.sidecars
        ]
        both = [
            "--disaggregation-transfer-backend", "kvspray", "--disaggregation-bootstrap-port",
            str(port),
        ]  # fmt: skip
        self.plain = Server("plain", logs, ["--chunked-prefill-size", str(CHUNK)])
        self.prefill = Server(
            "prefill", logs,
            [*both, "--disaggregation-mode", "prefill", "--chunked-prefill-size", str(CHUNK)],
            envs[0],
        )  # fmt: skip
        self.decode = Server(
            "decode", logs,
            [*both, "--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"],
            envs[1],
        )  # fmt: skip
        self.router = Router("router", logs)
        self.port = port

    def start(self) -> None:
        # The servers start without sidecars, and say once what they lack.
        servers = [self.plain, self.prefill, self.decode]
        for s in servers:
            s.start()
        for s in servers:
            s.ready()
        self.router.start(self.prefill, self.port, self.decode)
        rig.wait_for("the router", self.router.up, 60, 0.2)

    def stop(self) -> None:
        for process in (self.router, self.plain, self.prefill, self.decode, *self.sidecars):
            process.stop()

    def moved(self) -> float:
        m = rig.parse_metrics(rig.get(self.sidecars[1].url + "/metrics"))
        return rig.total(m, "kvspray_transfer_bytes_total")

    def leases(self) -> float:
        return sum(
            rig.total(rig.parse_metrics(rig.get(s.url + "/metrics")), "kvspray_lease_open")
            for s in self.sidecars
        )


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        p = Pair(pathlib.Path(dir))
        try:
            p.start()
            yield p
            assert p.prefill.up() and p.decode.up(), "the servers outlive everything"
            assert all(s.panics() is None for s in p.sidecars)
        finally:
            p.stop()


def prompt(seed: object, tokens: int) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(2, 900) for _ in range(tokens)]


def test_without_sidecars(pair: Pair) -> None:
    """A server without a sidecar refuses requests by name, and serves once there is one."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": 1}
    ids = prompt("none", 40)
    with cf.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(s.generate, ids, ANSWER, room) for s in (pair.prefill, pair.decode)]
        for f in both:
            with pytest.raises(urllib.error.HTTPError) as err:
                f.result()
            assert "kvspray: " in error_of(err.value)
    for s in pair.sidecars:
        s.start()

    def served() -> bool:
        try:
            return len(pair.router.generate(prompt("first", 20), 1)[0]) == 1
        except urllib.error.HTTPError:
            return False

    rig.wait_for("a request with sidecars", served, 120, 0.5)


def test_tokens(pair: Pair) -> None:
    before = pair.moved()
    for n in (1, 5, 15, 16, 17, 127, 128, 129, 300, 900):
        ids = prompt("tokens", n)
        assert pair.router.generate(ids, ANSWER)[0] == pair.plain.generate(ids, ANSWER)[0], n
    assert pair.moved() > before
    # What decode has in its own cache is not sent again.
    ids = prompt("tokens", 900)
    before = pair.moved()
    assert pair.router.generate(ids, ANSWER)[0] == pair.plain.generate(ids, ANSWER)[0]
    again = pair.moved() - before
    before = pair.moved()
    pair.router.generate(prompt("new", 900), ANSWER)
    assert again < 0.2 * (pair.moved() - before)


def test_together(pair: Pair) -> None:
    jobs = [prompt(("together", i), random.Random(i).randrange(1, 400)) for i in range(24)]
    with cf.ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda ids: pair.router.generate(ids, ANSWER)[0], jobs))
    want = [pair.plain.generate(ids, ANSWER)[0] for ids in jobs]
    assert got == want


def give_up(pair: Pair, ids: list[int], room: int, after: float) -> None:
    """Clients of both servers that go away after a while."""
    body = {
        "input_ids": ids, "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0},
        "bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": room,
        "rid": f"gone-{room}",
    }  # fmt: skip

    def one(server: Server) -> None:
        try:
            server.post("/generate", body, timeout=30)
        except (urllib.error.HTTPError, OSError):
            pass

    with cf.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(one, s) for s in (pair.prefill, pair.decode)]
        time.sleep(after)
        for s in (pair.decode, pair.prefill):
            s.post("/abort_request", {"rid": f"gone-{room}"}, timeout=30)
        for f in both:
            f.result()


def test_given_up(pair: Pair) -> None:
    """Requests are given up at random times, while others use their pages again: no late write."""
    r = random.Random(7)
    rooms = [(1 << 40) + i for i in range(30)]
    stop, wrong, served = [False], [], [0]

    def others(seed: int) -> None:
        while not stop[0]:
            ids = prompt(("others", seed, served[0]), r.randrange(20, 500))
            try:
                got = pair.router.generate(ids, ANSWER)[0]
            except urllib.error.HTTPError as err:
                wrong.append(error_of(err))
                return
            served[0] += 1
            if got != pair.plain.generate(ids, ANSWER)[0]:
                wrong.append((len(ids), got))

    with cf.ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(others, i) for i in range(2)]
        for room in rooms:
            give_up(pair, prompt(("gone", room), r.randrange(100, 900)), room, r.uniform(0, 0.25))
        stop[0] = True
        for f in busy:
            f.result()
    assert not wrong and served[0] > 5, (wrong, served)
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 30, 0.2)


@pytest.mark.parametrize("side", [0, 1])
def test_a_sidecar_dies(pair: Pair, side: int) -> None:
    """Requests under way fail; the servers live, and serve with the next sidecar."""
    sidecar = pair.sidecars[side]
    jobs = [prompt(("dies", side, i), 800) for i in range(6)]
    answers, errors = [], 0
    with cf.ThreadPoolExecutor(6) as pool:
        under_way = [pool.submit(pair.router.generate, ids, ANSWER) for ids in jobs]
        time.sleep(0.3)
        sidecar.kill()
        for ids, f in zip(jobs, under_way, strict=True):
            try:
                answers.append((ids, f.result()[0]))
            except urllib.error.HTTPError:
                errors += 1
    assert all(got == pair.plain.generate(ids, ANSWER)[0] for ids, got in answers)
    sidecar.start()

    def served() -> bool:
        ids = prompt(("after", side), 100)
        try:
            return pair.router.generate(ids, ANSWER)[0] == pair.plain.generate(ids, ANSWER)[0]
        except urllib.error.HTTPError:
            return False

    rig.wait_for("a request with the next sidecar", served, 60, 0.5)
    print(f"{len(answers)} answers, {errors} errors")


