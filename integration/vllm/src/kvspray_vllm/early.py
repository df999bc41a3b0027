"""Ends of loads reach the scheduler a step early, where it is in the worker's process.

With asynchronous scheduling vLLM handles the results of a step only after the worker has executed
the next one: a request whose load has ended would wait for one more decode step or, where the
engine computes nothing, for an empty step and a millisecond's sleep. But vLLM handles the results
of the step before right after the worker's step. So the scheduler's side adds to those the loads
that have ended in the worker's step, and later takes them out of that step's own results.
"""

from __future__ import annotations

from collections.abc import Iterable

# By engine with a scheduler in this process: the loads that have ended well in the worker's last
# step, until the scheduler takes them. Worker and scheduler use it on one thread.
_ended: dict[str, set[str]] = {}


def report(engine: str, requests: Iterable[str]) -> None:
    """By the worker's side in each step, of loads that are in its results."""
    if (ended := _ended.get(engine)) is not None:
        ended.clear()  # those of the step before come with its own results, if nothing took them
        ended.update(requests)


def reports(engine: str) -> bool:
    """Whether the scheduler is in this process."""
    return engine in _ended


class Early:
    """The scheduler's side."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._given: set[str] = set()  # whose step's own results are still to come
        _ended[engine] = set()

    def take(self, received: Iterable[str]) -> set[str]:
        """received: by the results of a step. Returns what vLLM is to handle as received."""
        own, ended = set(received), _ended[self._engine]
        again, early = own & self._given, ended - own
        self._given = self._given - again | early
        ended.clear()
        return own - again | early

    def close(self) -> None:
        _ended.pop(self._engine, None)
