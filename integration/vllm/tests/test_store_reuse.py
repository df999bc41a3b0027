"""Attacks on what the store must never have: a page with other content than its hash names.
Requests share prefixes, are preempted, aborted and aborted while they load, pages go missing,
weights change; PUTs read their blocks at any time before they end."""

from __future__ import annotations

import os
import random

import pytest
from store_fakes import Vllm

RUNS = int(os.environ.get("KVSPRAY_STORE_RUNS", "6"))


def attack(seed: int, lag: int, ranks: int, states: int) -> tuple[int, int]:
    r = random.Random(seed)
    blocks, budget = r.choice((14, 24, 60)), r.choice((5, 10, 40))
    v = Vllm(blocks=blocks * (1 + states), lag=lag, ranks=ranks, budget=budget, states=states)
    for s in v.shims:
        s.chance = r
    changes = r.choice((0, 0.02))
    prefixes = [[r.randrange(100) for _ in range(r.randrange(1, 30))] for _ in range(3)]
    for i in range(300):
        if len(v.requests) < 4 and r.random() < 0.4:
            tokens = r.choice(prefixes) + [r.randrange(100) for _ in range(r.randrange(1, 12))]
            v.add(f"r{i}", tokens, answer=r.randrange(1, 9))
        if v.requests and r.random() < 0.06:
            one = v.requests[r.choice(list(v.aside or v.requests))]
            if not one.status.name.startswith("FINISHED"):
                v.finish(one, "FINISHED_ABORTED")
        if v.running and r.random() < 0.06:
            v.preempt(v.running[-1])
        if r.random() < changes:
            v.change_weights(f"w{i}", clear=r.random() < 0.7)
        if r.random() < 0.05 and (rank := r.choice(v.store.pages)):
            del rank[r.choice(list(rank))]
        if r.random() < 0.1:
            v.store.session += 1
        if r.random() < 0.1 and v.pool.clear():
            v.scheduler.reset()
        v.step(r)
        v.check()
    v.drain()
    assert all(b.ref_cnt == 0 for b in v.pool.blocks[1:]), "a block is held for ever"
    return v.check(), len(v.received)


@pytest.mark.parametrize("states", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lag", [1, 2])
def test_a_page_is_what_its_hash_names(lag: int, ranks: int, states: int) -> None:
    pages = loads = 0
    for seed in range(RUNS):
        n, m = attack(seed, lag, ranks, states)
        pages, loads = pages + n, loads + m
    assert pages > 10 * RUNS and loads > RUNS, (
        "the attack saves and loads too little to mean anything"
    )
