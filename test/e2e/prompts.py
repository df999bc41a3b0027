"""Prompts of many shapes, for a model with 1,024 token ids and blocks of 32 tokens."""

from __future__ import annotations

import random

BLOCK = 32
# Around block borders, chunk borders, and the step size of 256 tokens.
LENGTHS = (
    1,
    2,
    5,
    16,
    31,
    32,
    33,
    40,
    63,
    64,
    65,
    96,
    97,
    127,
    128,
    129,
    200,
    255,
    256,
    257,
    300,
    511,
    512,
    513,
    700,
    1024,
    1500,
    2048,
)


def fresh(n: int, seed: object = None) -> list[int]:
    r = random.Random(str(seed) if seed is not None else None)
    return [r.randrange(300, 1000) for _ in range(n)]


def counting(n: int, seed: object = None) -> list[int]:
    """A prompt in which most tokens follow the one before."""
    r = random.Random(str(seed))
    out: list[int] = []
    while len(out) < n:
        out.append(out[-1] + 1 if out and r.random() < 0.9 else r.randrange(300, 900))
    return out
