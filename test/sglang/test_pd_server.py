"""SGLang's own prefill and decode servers on a CPU behind its own router, with kvspray as the
transfer backend: tokens equal those of one plain server, while prompts are given up and pages are
used again, and while sidecars and servers die, stop and fail.
"""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import importlib.util
import os
import pathlib
import random
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator

import pytest
from sglang_pair import ANSWER, Pair
from sglang_server import Server, error_of, rig

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        p = Pair(pathlib.Path(dir), pathlib.Path(dir))
        try:
            p.ask_plain(PROMPTS)
            p.start()  # servers start without sidecars, and report once that they lack them
            yield p
            assert p.prefill.up() and p.decode.up(), "the servers outlive everything"
            assert all(s.panics() is None for s in p.sidecars)
        finally:
            p.stop()


def prompt(seed: object, tokens: int) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(2, 900) for _ in range(tokens)]


SIZES = (1, 5, 15, 16, 17, 127, 128, 129, 300, 900)
ALONE = [prompt("alone", n) for n in SIZES]
TOGETHER = [prompt(("together", i), random.Random(i).randrange(1, 400)) for i in range(18)]
OTHERS = [prompt(("others", i), random.Random(i).randrange(20, 500)) for i in range(24)]
UNDER_WAY = [prompt(("under way", i), 800) for i in range(10)]
STOPPED = [prompt(("stopped", i), 700) for i in range(10)]
DEAD = [prompt(("dead", i), 700) for i in range(10)]
NEW = prompt("new", 900)
PROMPTS = [*ALONE, *TOGETHER, *OTHERS, *UNDER_WAY, *STOPPED, *DEAD, NEW]


def test_without_sidecars(pair: Pair) -> None:
    """A server without a sidecar refuses requests by name, and serves once there is one."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": 1}
    with cf.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(s.generate, NEW, ANSWER, room) for s in (pair.prefill, pair.decode)]
        for f in both:
            with pytest.raises(urllib.error.HTTPError) as err:
                f.result()
            assert "kvspray: " in error_of(err.value)
    for s in pair.sidecars:
        s.start()
    rig.wait_for("a request with sidecars", lambda: pair.answered(ALONE[0]), 120, 0.5)


def test_tokens(pair: Pair) -> None:
    before = pair.moved()
    for ids in ALONE:
        assert pair.right(ids), len(ids)
    assert pair.moved() > before
    # What decode has in its own cache is not sent again.
    before = pair.moved()
    assert pair.right(ALONE[-1])
    again = pair.moved() - before
    before = pair.moved()
    assert pair.right(NEW)
    assert again < 0.2 * (pair.moved() - before)


def test_together(pair: Pair) -> None:
    with cf.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(pair.right, TOGETHER))


def give_up(pair: Pair, ids: list[int], room: int, after: float) -> None:
    """Clients of both servers that go away after a while."""
    body = {
        "input_ids": ids, "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0},
        "bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": room,
        "rid": f"gone-{room}",
    }  # fmt: skip

    def one(server: Server) -> None:
        with contextlib.suppress(urllib.error.HTTPError, OSError):
            server.post("/generate", body, timeout=60)

    with cf.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(one, s) for s in (pair.prefill, pair.decode)]
        time.sleep(after)
        for s in (pair.decode, pair.prefill):
            s.post("/abort_request", {"rid": f"gone-{room}"}, timeout=60)
        for f in both:
            f.result()


def test_given_up(pair: Pair) -> None:
    """Requests are given up at random times, while others use their pages again: no late write."""
    r = random.Random(7)
    with cf.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(pair.right, ids) for ids in OTHERS]
        for i in range(16):
            gone = prompt(("gone", i), r.randrange(100, 900))
            give_up(pair, gone, (1 << 40) + i, r.uniform(0, 0.5))
        assert all(f.result() for f in others)
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 60, 0.2)


def beside(pair: Pair, jobs: list[list[int]], fault: Callable[[], None]) -> None:
    """A fault with requests under way. Each of them fails or is right."""
    with cf.ThreadPoolExecutor(len(jobs)) as pool:
        under_way = [pool.submit(pair.right, ids) for ids in jobs]
        time.sleep(0.5)
        fault()
        answers = [f.exception() is None and f.result() for f in under_way]
        errors = [f.exception() for f in under_way if f.exception() is not None]
    assert all(isinstance(err, urllib.error.HTTPError) for err in errors), errors
    assert sum(answers) + len(errors) == len(jobs), "a wrong answer"
    print(f"{sum(answers)} answers, {len(errors)} errors")


@pytest.mark.parametrize("side", [0, 1])
def test_a_sidecar_dies(pair: Pair, side: int) -> None:
    """The servers live, and serve with the next sidecar."""
    sidecar, jobs = pair.sidecars[side], UNDER_WAY[5 * side :][:5]
    beside(pair, jobs, sidecar.kill)
    sidecar.start()
    rig.wait_for("a request with the next sidecar", lambda: pair.answered(jobs[0]), 120, 0.5)
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 60, 0.2)


@pytest.mark.parametrize("side", [0, 1])
def test_a_sidecar_stops_for_a_while(pair: Pair, side: int) -> None:
    jobs = STOPPED[5 * side :][:5]
    beside(pair, jobs, lambda: pair.sidecars[side].stop_for(4))
    rig.wait_for("a request after it", lambda: pair.answered(jobs[0]), 120, 0.5)


@pytest.mark.parametrize("side", [0, 1])
def test_a_server_dies(pair: Pair, side: int) -> None:
    """The other side lives, and serves with the next server. That one has SGLang's own injected
    failures: a poll of a transfer fails at random while its bytes move."""
    server, jobs = (pair.prefill, pair.decode)[side], DEAD[5 * side :][:5]
    beside(pair, jobs, server.kill)
    server.env["SGLANG_TEST_DISAGG_FAILURE_PROB"] = "0.001"
    server.start().ready()
    rig.wait_for("a request with the next server", lambda: pair.answered(jobs[0]), 120, 0.5)
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 60, 0.2)


def test_injected_failures(pair: Pair) -> None:
    with cf.ThreadPoolExecutor(4) as pool:
        all_ = [pool.submit(pair.right, ids) for ids in (*OTHERS, *TOGETHER, *UNDER_WAY)]
        cf.wait(all_)
    errors = sum(f.exception() is not None for f in all_)
    assert all(f.result() for f in all_ if f.exception() is None), "a wrong answer"
    assert 0 < errors < len(all_)
    print(f"{len(all_) - errors} answers, {errors} errors")
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 60, 0.2)
