# SPDX-License-Identifier: Apache-2.0
"""What happens to pairs of engines in production. Each situation sends prompts through P and D, and
counts what the clients of D get."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Callable
from typing import Any

from arm import ANSWER_S, Arm, Tally, engines, fresh, rig

N = 6  # prompts of a situation
LENGTHS = (130, 300, 500, 700, 900, 1100)  # tokens
BLOCKS_AWAY = 1 << 20  # a block number that no engine has


def ordinary(a: Arm, t: Tally, seed: object, n: int = 2 * N) -> None:
    """Nothing goes wrong."""
    prompts = [fresh(LENGTHS[i % len(LENGTHS)], (seed, i)) for i in range(n)]
    begun = [a.prefill(p) for p in prompts]
    if a.fields.get("together"):
        asked = [a.decode(p, b[1]) for p, b in zip(prompts, begun, strict=True)]
        for b in begun:
            b[0].result(ANSWER_S)
    else:
        asked = [a.decode(p, a.given(b)) for p, b in zip(prompts, begun, strict=True)]
    for p, d in zip(prompts, asked, strict=True):
        a.judge(t, p, d)


def unknown(a: Arm, t: Tally, seed: object) -> None:
    """The reference names a request that P never had."""
    key = a.fields["request_key"]
    for i in range(N):
        prompt = fresh(LENGTHS[i], (seed, i))
        kv = a.reference(prompt)
        a.judge(t, prompt, a.decode(prompt, changed(kv, key, lambda v: other_id(str(v)))))


def out_of_range(a: Arm, t: Tally, seed: object) -> None:
    """The reference names blocks that P does not have."""
    key = a.fields["blocks_key"]

    def away(value: Any) -> Any:
        return [away(v) for v in value] if isinstance(value, list) else int(value) + BLOCKS_AWAY

    for i in range(N):
        prompt = fresh(LENGTHS[i], (seed, i))
        kv = a.reference(prompt)
        a.judge(t, prompt, a.decode(prompt, changed(kv, key, away)))


def consumed(a: Arm, t: Tally, seed: object) -> None:
    """A router sends a request again, at once, with the reference that was used."""
    for i in range(N):
        prompt = fresh(LENGTHS[i], (seed, i))
        kv = a.reference(prompt)
        a.judge(t, prompt, a.decode(prompt, kv))
        a.engines["D"].clear_prefix_cache()
        a.judge(t, prompt, a.decode(prompt, kv))


def stale(a: Arm, t: Tally, seed: object) -> None:
    """As before, but P's blocks hold other prompts by then."""
    prompts = [fresh(LENGTHS[i], (seed, i)) for i in range(N)]
    given = [a.reference(p) for p in prompts]
    for p, kv in zip(prompts, given, strict=True):
        a.judge(t, p, a.decode(p, kv))
    quiet(a)
    a.fill_pool("P", seed)
    a.engines["D"].clear_prefix_cache()
    for p, kv in zip(prompts, given, strict=True):
        a.judge(t, p, a.decode(p, kv))


def crossed(a: Arm, t: Tally, seed: object) -> None:
    """The reference is that of another prompt, as long: a router's fault, or an attack."""
    for i in range(N):
        one, other = (fresh(LENGTHS[i], (seed, i, k)) for k in "ab")
        kv = a.reference(one)
        a.judge(t, other, a.decode(other, kv))


def expired(a: Arm, t: Tally, seed: object) -> None:
    """D asks after P has given the blocks up, and P has filled them with other prompts."""
    prompts = [fresh(LENGTHS[i], (seed, i)) for i in range(N)]
    given = [a.reference(p) for p in prompts]
    p = a.engines["P"]
    try:
        rig.wait_for("P's blocks", lambda: p.free_blocks() >= a.free["P"], a.lease_s + 30)
    except rig.Failed:
        t.notes.append(f"P still held blocks {a.lease_s + 30:g} s after its answers")
    a.fill_pool("P", seed)
    for prompt, kv in zip(prompts, given, strict=True):
        a.judge(t, prompt, a.decode(prompt, kv))


def abort_storm(a: Arm, t: Tally, seed: object) -> None:
    """Clients leave before P's answer, while D waits, and in the middle of the answer."""
    r = random.Random(str(seed))
    for wave in range(4):
        prompts = [fresh(r.choice(LENGTHS), (seed, wave, i)) for i in range(3 * N)]
        begun = [a.prefill(p) for p in prompts]
        left = r.sample(range(len(prompts)), N)
        for i in left:
            begun[i][0].abort()
            t.aborted += 1
        asked: list[tuple[list[int], engines.Pending]] = []
        for i, (p, b) in enumerate(zip(prompts, begun, strict=True)):
            if i in left:
                continue
            asked.append((p, a.decode(p, a.given(b), 16)))
            if r.random() < 0.5:
                a.leave(t, asked[r.randrange(len(asked))][1])
        for p, d in asked:
            a.judge(t, p, d, 16)


def late_writes(a: Arm, t: Tally, seed: object) -> None:
    """P stops for a moment in the middle of loads, their clients leave, D gives the blocks to other
    requests; then P goes on."""
    d = a.engines["D"]
    for wave in range(2):
        prompts = [fresh(1100, (seed, wave, i)) for i in range(N)]
        given = [a.reference(p) for p in prompts]
        a.signal("P", signal.SIGSTOP)
        try:
            asked = [a.decode(p, kv) for p, kv in zip(prompts, given, strict=True)]
            a.loads_begun()
            for one in asked:
                a.leave(t, one)
            others = [fresh(900, (seed, wave, "other", i)) for i in range(2 * N)]
            plain = [d.add(p, 64) for p in others]
        finally:
            a.signal("P", signal.SIGCONT)
        for p, one in zip(others, plain, strict=True):
            a.judge(t, p, one, 64)


def preempted(a: Arm, t: Tally, seed: object) -> None:
    """Each engine takes the blocks of all of its requests back once."""
    prompts = [fresh(1100, (seed, i)) for i in range(2 * N)]
    begun = [a.prefill(p) for p in prompts]
    a.engines["P"].preempt_all()
    asked = []
    for i, (p, b) in enumerate(zip(prompts, begun, strict=True)):
        asked.append(a.decode(p, a.given(b), 96))
        if i == N:
            a.engines["D"].preempt_all()
    for p, d in zip(prompts, asked, strict=True):
        a.judge(t, p, d, 96)


def prefill_killed(a: Arm, t: Tally, seed: object) -> None:
    """P dies in the middle of loads, and comes back."""
    prompts = [fresh(LENGTHS[i], (seed, i)) for i in range(N)]
    given = [a.reference(p) for p in prompts]
    a.signal("P", signal.SIGSTOP)
    asked = [a.decode(p, kv) for p, kv in zip(prompts, given, strict=True)]
    a.loads_begun()
    a.kill("P")
    for p, d in zip(prompts, asked, strict=True):
        a.judge(t, p, d)
    a.restart("P")
    ordinary(a, t, (seed, "after"), N)


def prefill_restarted(a: Arm, t: Tally, seed: object) -> None:
    """D has the references of a P that has started again since, at the same address, and whose
    blocks hold other prompts."""
    prompts = [fresh(LENGTHS[i], (seed, i)) for i in range(N)]
    ordinary(a, t, (seed, "before"), N)
    given = [a.reference(p) for p in prompts]
    a.restart("P")
    a.fill_pool("P", seed)
    for p, kv in zip(prompts, given, strict=True):
        a.judge(t, p, a.decode(p, kv))


def processes_killed(a: Arm, t: Tally, seed: object) -> None:
    """What runs beside the engines dies in the middle of loads, and comes back."""
    prompts = [fresh(LENGTHS[i], (seed, i)) for i in range(N)]
    given = [a.reference(p) for p in prompts]
    for process in a.processes.values():
        process.send_signal(signal.SIGSTOP)
    asked = [a.decode(p, kv) for p, kv in zip(prompts, given, strict=True)]
    a.loads_begun()
    for name in list(a.processes):
        a.kill_process(name)
        a.start_process(name)
    for p, d in zip(prompts, asked, strict=True):
        a.judge(t, p, d)
    ordinary(a, t, (seed, "after"), N)


def decode_killed(a: Arm, t: Tally, seed: object) -> None:
    """D dies in the middle of loads, and comes back."""
    prompts = [fresh(LENGTHS[i], (seed, i)) for i in range(N)]
    given = [a.reference(p) for p in prompts]
    for p, kv in zip(prompts, given, strict=True):
        a.decode(p, kv)
    a.restart("D")
    quiet(a)
    ordinary(a, t, (seed, "after"), N)


def quiet(a: Arm) -> None:
    """Waits until P holds nothing, or its lease must have ended."""
    with contextlib.suppress(rig.Failed):
        rig.wait_for("P", lambda: a.engines["P"].free_blocks() >= a.free["P"], a.lease_s + 10)


def changed(kv: dict[str, Any], key: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy with another value of a key, a.b: that of b in a."""
    out = json.loads(json.dumps(kv))
    *path, last = key.split(".")
    at = out
    for name in path:
        at = at[name]
    at[last] = change(at[last])
    return out


def other_id(value: str) -> str:
    """As long and of the same letters."""
    return value[:-8] + ("".join("1" if c == "0" else "0" for c in value[-8:]))


Situation = Callable[[Arm, Tally, object], None]
# With what a description must have for it.
SITUATIONS: dict[str, tuple[Situation, str]] = {
    "ordinary": (ordinary, ""),
    "unknown": (unknown, "request_key"),
    "out-of-range": (out_of_range, "blocks_key"),
    "consumed": (consumed, "prefill_params"),
    "stale": (stale, "prefill_params"),
    "crossed": (crossed, "prefill_params"),
    "expired": (expired, "lease_s"),
    "abort-storm": (abort_storm, ""),
    "late-writes": (late_writes, ""),
    "preempted": (preempted, ""),
    "prefill-killed": (prefill_killed, ""),
    "prefill-restarted": (prefill_restarted, ""),
    "processes-killed": (processes_killed, "processes"),
    "decode-killed": (decode_killed, ""),
}
