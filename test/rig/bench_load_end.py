#!/usr/bin/env python3
"""How long after the end of a load vLLM schedules the request, by vLLM's own asynchronous loop over
a fake scheduler and worker: with ends of loads that come early (kvspray_vllm/early.py), and
without, in turns. Once the engine computes nothing else, once it decodes other requests.

usage: bench_load_end.py [--rounds 60] [--step-ms 5] [--empty-us 150]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import statistics
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc

from kvspray_vllm import early
from kvspray_vllm.worker import LOAD_WAIT_S

ENGINE, REQUEST = "engine", "request"
POLL_S = 20e-6


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Step(Future):
    """The result of a step, once the GPU has ended it."""

    def __init__(self, received: set[str], ends: float) -> None:
        super().__init__()
        self.received, self.ends = received, ends

    def done(self) -> bool:
        return time.perf_counter() >= self.ends

    def result(self, timeout: float | None = None) -> set[str]:
        while not self.done():
            time.sleep(POLL_S)
        return self.received


class Engine:
    """Is vLLM's scheduler and its executor. empty: seconds of CPU time that scheduling takes, and
    as many that executing takes. step: seconds of the GPU for a step of other requests."""

    def __init__(self, empty: float, step: float, comes_early: bool, end: float) -> None:
        self.empty, self.step, self.end = empty, step, end
        self.early = early.Early(ENGINE) if comes_early else None
        self.open, self.known, self.scheduled = True, False, 0.0
        self.free_at = 0.0  # the GPU
        self.last: set[str] = set()

    def has_requests(self) -> bool:
        return not self.scheduled

    def schedule(self, throttle: bool = False) -> Any:
        spin(self.empty)
        if self.known:
            self.scheduled = time.perf_counter()
        computes = self.known or self.step > 0
        return SimpleNamespace(
            total_num_scheduled_tokens=int(computes), pending_structured_output_tokens=False
        )

    def get_grammar_bitmask(self, out: Any) -> None:
        return None

    def execute_model(self, out: Any, non_block: bool = False) -> Step:
        spin(self.empty)
        until = time.perf_counter() + LOAD_WAIT_S
        while self.open and not self.step and time.perf_counter() < min(until, self.end):
            time.sleep(POLL_S)
        self.last = set()
        if self.open and time.perf_counter() >= self.end:
            self.open, self.last = False, {REQUEST}
            early.report(ENGINE, self.last)
        return Step(self.last, 0)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Step:
        self.free_at = max(time.perf_counter(), self.free_at) + self.step
        return Step(self.last, self.free_at)

    def update_from_output(self, out: Any, received: set[str]) -> dict[int, Any]:
        if self.early is not None:
            received = self.early.take(received)
        self.known = self.known or bool(received)
        return {}


def once(empty: float, step: float, comes_early: bool) -> float:
    """Milliseconds from the end of the load to its request's schedule."""
    end = time.perf_counter() + random.uniform(0.02, 0.04)
    e = Engine(empty, step, comes_early, end)
    core = SimpleNamespace(
        batch_queue=collections.deque(), batch_queue_size=2, scheduler=e, model_executor=e,
        is_mm_encoder_only=False, is_pooling_model=False,
        _should_throttle_prefills=lambda: False,
        log_error_detail=lambda out: contextlib.nullcontext(),
        capture_iteration_details=lambda out: contextlib.nullcontext(),
        _process_aborts_queue=lambda: None, _attach_iteration_details=lambda *a: None,
        _attach_weight_version=lambda *a: None, post_step=lambda executed: None,
        output_queue=SimpleNamespace(put_nowait=lambda out: None),
    )  # fmt: skip
    core.step_fn = lambda: EngineCore.step_with_batch_queue(core)
    while not e.scheduled:
        EngineCoreProc._process_engine_step(core)
    if e.early is not None:
        e.early.close()
    return 1e3 * (e.scheduled - end)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--step-ms", type=float, default=5.0, help="a step of other requests")
    parser.add_argument("--empty-us", type=float, default=150.0, help="half of an empty step")
    args = parser.parse_args()
    print(f"{'ms':34} {'median':>7} {'p10':>6} {'p90':>6}")
    for name, step in (("nothing else is computed", 0.0), ("others decode", args.step_ms / 1e3)):
        rows: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds):
            for comes_early in random.sample([False, True], 2):
                rows[comes_early].append(once(args.empty_us / 1e6, step, comes_early))
        for comes_early, row in rows.items():
            tenths = statistics.quantiles(row, n=10)
            print(
                f"{name + (', early' if comes_early else ''):34} {statistics.median(row):7.2f} "
                f"{tenths[0]:6.2f} {tenths[-1]:6.2f}"
            )
        less = statistics.median(a - b for a, b in zip(rows[False], rows[True], strict=True))
        print(f"{'  less, in pairs':34} {less:7.2f}")


if __name__ == "__main__":
    main()
