"""Prints the rate of the content digest in C, beside a copy of the same memory by memmove. The
rounds alternate, and count the thread's own CPU time."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable

from kvspray.digest import Digest, Units

BYTES, ROUNDS = 32 << 20, 15


def dense(cell: int, heads: int) -> Units:
    """Tokens outside, heads inside, blocks of 16 tokens."""
    row = cell * heads
    rows = BYTES // row // 16 * 16
    return Units("l", 1, 0, 16 * row, 0, row, cell, 0, 16, 1, cell, 1, 0, heads, 0, rows)


def transposed(heads: int, numbers: int, tokens: int) -> Units:
    """K as vLLM has it on CPUs."""
    head = numbers * tokens * 2
    rows = BYTES // (heads * head) * tokens
    column = tokens * 2
    return Units(
        "l", 1, 0, heads * head, 0, 2, head, column, tokens, 1, 2, numbers, 0, heads, 0, rows
    )


def cpu(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def main() -> None:
    source = ctypes.create_string_buffer(os.urandom(1 << 20) * (BYTES >> 20), BYTES)
    target = ctypes.create_string_buffer(BYTES)
    digest = Digest(bytes(range(16)))

    def of(units: Units) -> Callable[[], object]:
        table = list(range(units.rows // units.tile_rows))
        return lambda: digest.of_memory(ctypes.addressof(source), BYTES, units, table)

    calls: dict[str, Callable[[], object]] = {
        "memmove": lambda: ctypes.memmove(target, source, BYTES),
        "8 heads of 256 bytes": of(dense(256, 8)),
        "1 head of 256 bytes": of(dense(256, 1)),
        "a latent of 1,152 bytes": of(dense(1152, 1)),
        "transposed K, 128 tokens": of(transposed(8, 128, 128)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(cpu(call))
    for name, taken in times.items():
        ratio = statistics.median(b / a for a, b in zip(times["memmove"], taken, strict=True))
        rate = BYTES / statistics.median(taken) / 1e9
        print(f"{name:26} {rate:6.1f} GB/s of CPU time, {ratio:.2f} times a memmove")


if __name__ == "__main__":
    main()
