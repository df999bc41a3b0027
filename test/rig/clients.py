"""Clients of a router that send random prompts, and of which some go away before their answer."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from servers import Answer, Server, complete, give_up

GONE_S = 0.5  # after which a client that goes away has gone
MIN_EXPONENT = 0  # of prompts' lengths, whose logarithms are spread evenly
ANSWER = 64  # tokens of an answer, less than that
SHARED = 4  # prompts whose beginnings others have, where any have
REPEATS_S = 1.0  # between two tries of a request
MAX_PROBLEMS = 1000  # that are kept; all are counted

Judge = Callable[[list[int], Answer, Answer], tuple[bool, Any]]
# Why an error is none of the router's, of a request that was under way between these times.
Excuse = Callable[[float, float], str]


def prompt(n: int, seed: object) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(300, 1000) for _ in range(n)]


class Clients:
    """judge: whether an answer is right, and what differs, given the prompt and the plain engine's.
    Of the answers the share `checked` is judged. A request whose error is excused is sent again
    until it is answered. pause: longest time between two requests of a client."""

    def __init__(
        self,
        ports: Sequence[int],
        plain: Server,
        judge: Judge,
        longest: int,
        checked: float = 1.0,
        aborted: float = 0.25,
        shared: float = 0.0,
        timeout: float = 120.0,
        excuse: Excuse = lambda begun, ended: "",
        pause: float = 0.0,
    ) -> None:
        self.ports, self.plain, self.judge, self.longest = ports, plain, judge, longest
        self.checked, self.aborted, self.shared = checked, aborted, shared
        self.timeout, self.excuse, self.pause = timeout, excuse, pause
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.latest: collections.deque[tuple[float, float]] = collections.deque(maxlen=4096)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self, n: int, end: float, tag: str) -> None:
        """That many clients, until a time of time.monotonic."""
        self._threads = [
            threading.Thread(target=self._client, args=(f"{tag}c{i}", end)) for i in range(n)
        ]
        for t in self._threads:
            t.start()

    def end(self) -> None:
        """Before that time, once their requests have ended."""
        self._over.set()
        for t in self._threads:
            t.join()

    def alive(self) -> bool:
        return any(t.is_alive() for t in self._threads)

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def problem(self, text: str) -> None:
        with self._lock:
            self.counts["problems"] += 1
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(f"{time.strftime('%H:%M:%S')} {text}"[:500])

    def _client(self, tag: str, end: float) -> None:
        rng, turn = random.Random(tag), 0
        while time.monotonic() < end and not self._over.is_set():
            turn += 1
            self._turn(rng, f"{tag}-{turn}")
            self._over.wait(rng.uniform(0, self.pause))

    def _turn(self, rng: random.Random, rid: str) -> None:
        n = min(self.longest, int(2 ** rng.uniform(MIN_EXPONENT, self.longest.bit_length())))
        ids = prompt(n, rid)
        if rng.random() < self.shared:
            head = prompt(self.longest, ("shared", rng.randrange(SHARED)))
            cut = rng.randrange(n + 1)
            ids = head[:cut] + ids[cut:]
        port, want = rng.choice(self.ports), rng.randrange(1, ANSWER)
        if rng.random() < self.aborted:
            try:
                give_up(port, ids, rng.uniform(0, GONE_S))
            except OSError as err:
                self.problem(f"{rid}: the router took no request: {err}")
            self.count("aborted")
            return
        got = self._answer(port, ids, want, rid)
        if got is None:
            return
        self.count("answered")
        self.count("prompt tokens", n)
        self.count("answer tokens", want)
        self.latest.append((time.monotonic(), got.ttft_s))
        if rng.random() < self.checked:
            plain = complete(self.plain.port, ids, max_tokens=want, timeout=self.timeout)
            good, what = self.judge(ids, plain, got)
            self.count("compared")
            if not good:
                self.count("wrong")
                self.problem(f"{rid}, {n} tokens: {what}")
            elif what:
                self.count("ties")

    def _answer(self, port: int, ids: list[int], want: int, rid: str) -> Answer | None:
        """The answer, or None where there was an error that nothing excuses."""
        tries = 0
        while True:
            begun = time.monotonic()
            got = complete(port, ids, max_tokens=want, rid=rid, timeout=self.timeout)
            error = got.error
            if not error and len(got.tokens[0]) != want:
                error = f"{len(got.tokens[0]) if got.tokens else 0} tokens of {want}"
            if not error:
                return got
            why = self.excuse(begun, time.monotonic())
            if not why:
                self.count("failed")
                self.problem(f"{rid}, {len(ids)} tokens: {error}")
                return None
            if not tries:
                self.count(f"sent again: {why}")
            tries += 1
            time.sleep(REPEATS_S)
