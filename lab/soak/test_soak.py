"""What the soak takes for a problem, without engines."""

from __future__ import annotations

import argparse
import http.server
import json
import pathlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rig")]

import soak  # noqa: E402
from clients import Clients  # noqa: E402
from servers import Answer  # noqa: E402


@pytest.fixture
def s(tmp_path: pathlib.Path) -> soak.Soak:
    out = soak.Soak.__new__(soak.Soak)
    out.stopped = set()
    out.logs, out.read_to, out.problems = tmp_path, {}, []
    out.begun, out.away, out.samples, out.sums = time.monotonic(), [], [], {}
    out.plain = SimpleNamespace(name="plain")
    sidecars = [SimpleNamespace(name="sidecar", transfers=tmp_path / "transfers.jsonl")]
    engine = SimpleNamespace(name="decode")
    out.pair = SimpleNamespace(engines=lambda: [engine], sidecars=sidecars, proxies={}, d=engine)
    return out


@pytest.mark.parametrize(("text", "seconds"), [("6h", 21600), ("1h30m", 5400), ("90s", 90)])
def test_durations(text: str, seconds: float) -> None:
    assert soak.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "-1h", "1d", "0s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="want a time such as 6h"):
        soak.duration(text)


def test_excused_is_what_met_a_restart_of_the_decode_engine(s: soak.Soak) -> None:
    s.away = [[10.0, 20.0], [40.0, float("inf")]]
    for begun, ended, excused in (
        (5, 9, False), (5, 10, True), (12, 13, True), (5, 25, True), (20, 30, True),
        (21, 39, False), (21, 41, True), (50, 60, True),
    ):  # fmt: skip
        assert bool(s.excuse(begun, ended)) == excused, (begun, ended)


HELD = {"fds": 100, "threads": 20, "rss": 1 << 30, "goroutines": 30, "leases": 0, "quarantined": 0}


def held(s: soak.Soak) -> None:
    s.before, s.after = (
        {name: dict(HELD) for name in ("decode", "plain", "sidecar")} for _ in "ba"
    )


def test_what_is_as_before_is_no_problem(s: soak.Soak) -> None:
    held(s)
    s.after["decode"]["fds"] += soak.SLACK["engine"]["fds"]
    s.compare()
    assert s.problems == []


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [("decode", "engine", x) for x in soak.SLACK["engine"]]
    + [("sidecar", "sidecar", x) for x in soak.SLACK["sidecar"]],
)
def test_growth_is_a_problem(s: soak.Soak, name: str, kind: str, what: str) -> None:
    held(s)
    s.after[name][what] += soak.SLACK[kind][what] + 1
    s.compare()
    (said,) = s.problems
    assert name in said and what in said and str(HELD[what]) in said


@pytest.mark.parametrize("what", ["leases", "quarantined"])
def test_a_lease_at_the_end_is_a_problem(s: soak.Soak, what: str) -> None:
    held(s)
    s.after["sidecar"][what] = 1
    s.compare()
    assert len(s.problems) == 1 and what in s.problems[0]


def test_memory_of_engines_is_held_against_the_plain_one_s(s: soak.Soak) -> None:
    held(s)
    s.after["plain"]["rss"] += 150 << 20
    s.after["decode"]["rss"] += 300 << 20
    s.compare()
    assert s.problems == []
    s.after["decode"]["rss"] += 100 << 20
    s.compare()
    assert len(s.problems) == 1


def test_what_cannot_be_read_is_a_problem(s: soak.Soak) -> None:
    held(s)
    del s.after["sidecar"]["goroutines"]
    s.compare()
    assert len(s.problems) == 1 and "could not be read" in s.problems[0]


@pytest.mark.parametrize(
    ("moved", "problems"), [((1, 2, 3), 0), ((1, 1, 3), 1), ((0, 0, 0), 4), ((2, 1, 5), 1)]
)
def test_something_moves_all_the_time(s: soak.Soak, moved: tuple[int, ...], problems: int) -> None:
    for i, n in enumerate(moved):
        s.samples.append({"t": (i + 1) * soak.MOVES_S, "sums": {"decode moved": n}})
    s.sums = {"decode moved": moved[-1]}
    s.moved_all_the_time()
    assert len(s.problems) == problems, s.problems


def test_logs_are_read_once_and_bounded(
    s: soak.Soak, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "LOG_BYTES", 1000)
    log = tmp_path / "x.log"
    with log.open("ab", buffering=0) as f:
        f.write(b"fine\n" * 150)
        s.read_logs()
        assert s.problems == [] and log.stat().st_size == 750
        f.write(b"panic: it broke\ngoroutine 1\n" + b"fine\n" * 50)
        s.read_logs()
        s.read_logs()
        assert len(s.problems) == 1 and "panic: it broke" in s.problems[0]
        assert log.stat().st_size == 500
        f.write(b"last\n")
        assert log.stat().st_size == 505, "the writer goes on behind what was kept"
        assert log.read_bytes().endswith(b"fine\nlast\n")


# ---- clients


class Engines:
    """Answers as a router or an engine does."""

    def __init__(self, answer: Callable[[dict[str, Any]], list[int] | None]) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                tokens = outer.answer(body)
                self.send_response(200 if tokens is not None else 503)
                self.end_headers()
                if tokens is not None:
                    chunk = {"choices": [{"index": 0, "token_ids": tokens}]}
                    self.wfile.write(
                        b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
                    )

            def log_message(self, *_: object) -> None:
                pass

        self.answer = answer
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def right(body: dict[str, Any]) -> list[int]:
    return [sum(body["prompt"]) % 1000 + i for i in range(body["max_tokens"])]


@pytest.fixture
def plain() -> Iterator[Engines]:
    out = Engines(right)
    yield out
    out.close()


def equal(_: list[int], want: Answer, got: Answer) -> tuple[bool, str]:
    return want.tokens == got.tokens, "" if want.tokens == got.tokens else "other tokens"


def sent(plain: Engines, router: Engines, **more: Any) -> Clients:
    """One client's one request."""
    out = Clients([router.port], plain, equal, longest=64, aborted=0.0, **more)  # type: ignore[arg-type]
    out._turn(random.Random(1), "r")
    router.close()
    return out


def test_a_right_answer(plain: Engines) -> None:
    c = sent(plain, Engines(right))
    assert c.problems == [] and c.counts["answered"] == c.counts["compared"] == 1


def test_a_wrong_answer_is_a_problem(plain: Engines) -> None:
    c = sent(plain, Engines(lambda body: [t + 1 for t in right(body)]))
    assert c.counts["wrong"] == 1 and "other tokens" in c.problems[0]


def test_a_short_answer_is_a_problem(plain: Engines) -> None:
    c = sent(plain, Engines(lambda body: right(body)[:-1]))
    assert c.counts["failed"] == 1 and "tokens of" in c.problems[0]


def test_an_error_is_a_problem(plain: Engines) -> None:
    c = sent(plain, Engines(lambda body: None))
    assert c.counts["failed"] == 1 and "HTTP 503" in c.problems[0]


def test_an_excused_error_is_sent_again(plain: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.REPEATS_S", 0.0)
    left = [None, None]
    router = Engines(lambda body: left.pop() if left else right(body))
    c = sent(plain, router, excuse=lambda begun, ended: "restart" if ended >= begun else "")
    assert c.problems == [] and c.counts["answered"] == 1
    assert c.counts["sent again: restart"] == 1, "a request counts once, however often it is sent"


def test_a_server_that_was_asked_to_stop_may_write_tracebacks() -> None:
    stop = "(APIServer pid=7) INFO [shutdown] API server: shutdown triggered\n"
    trace = "(APIServer pid=7) ERROR [async_llm.py:906] Traceback (most recent call last):\n"
    assert soak.bad_line(trace, set()) is not None
    assert soak.bad_line(stop + trace, set()) is None
    stopped: set[str] = set()
    assert soak.bad_line(stop, stopped) is None
    assert soak.bad_line(trace, stopped) is None  # lines that come later
    assert soak.bad_line(stop + trace.replace("pid=7", "pid=8"), set()) is not None
    assert soak.bad_line(stop + "panic: nil map\n" + trace, set()) == "panic: nil map\n" + trace
