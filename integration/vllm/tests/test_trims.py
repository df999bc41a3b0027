"""vLLM may take fewer tokens from a connector than it was offered: none, without the end of the
prompt, down to a block's boundary. Whatever it takes, what it believes loaded holds the prompt's KV
afterwards, or is reported as lacking, and no other request's block was written.

Memory is a list of tokens per block here; a token's KV is its position in the prompt.
"""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

from fakes import BLOCK, FakeScheduler, FakeWorker, Request, fake_hash, prefill_first

from kvspray_vllm import shim
from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.worker import WorkerSide

LOG = logging.getLogger("test")
BLOCKS = 100
RUNS = 1000


class Landing(FakeWorker):
    """A sidecar that writes what it was asked for, and no more: the tokens from `skip` to the
    prompt's end, in the blocks of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[list[int | None]] = [[None] * BLOCK for _ in range(BLOCKS)]
        self.sent: int | None = None  # tokens, of the one load

    def expect(
        self,
        xfer: bytes,
        hash: bytes,
        peer: str,
        tokens: int,
        skip: int,
        blocks: Any,
        req: str,
        after: int = 0,
        *more: Any,
    ) -> int:
        lease = super().expect(xfer, hash, peer, tokens, skip, blocks, req, after, *more)
        self.sent = tokens
        assert len(blocks[0]) * BLOCK >= tokens, (
            "a sidecar refuses a table that does not cover what is sent"
        )
        for i in range(skip, tokens):
            self.memory[blocks[0][i // BLOCK]][i % BLOCK] = i
        self.end(lease, received=True)
        return lease

    def wait(self, seconds: float) -> None: ...


def trimmed(rng: random.Random, computed: int, external: int) -> int:
    """What vLLM takes of what it was offered."""
    how = rng.randrange(5)
    if how == 0:
        return external
    if how == 1:
        return 0  # it does not read the prefix cache, for example
    if how == 2:
        return external - external % BLOCK  # so that it computes again from a boundary
    if how == 3:
        return max((computed + external) // BLOCK * BLOCK - computed, 0)
    return rng.randint(0, external)


def one(seed: int) -> str:
    rng = random.Random(seed)
    prompt = rng.randint(2, 12 * BLOCK)
    computed = rng.randint(0, (prompt - 1) // BLOCK) * BLOCK
    worker_shim = Landing()
    scheduler = SchedulerSide(Settings(), FakeScheduler(), [BLOCK], "engine", fake_hash, LOG)
    worker = WorkerSide(worker_shim, LOG, resume_block=BLOCK, load_wait_s=0)
    request = Request(
        request_id="d", prompt_token_ids=list(range(prompt)), num_prompt_tokens=prompt,
        num_computed_tokens=0, kv_transfer_params=prefill_first(),
        status=SimpleNamespace(name="RUNNING"),
    )  # fmt: skip
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    # vLLM asks again after it found no room, and may have had another prefix then.
    if rng.random() < 0.3:
        scheduler.matched(request, rng.randint(0, (prompt - 1) // BLOCK) * BLOCK)  # type: ignore[arg-type]
    offered, later = scheduler.matched(request, computed)  # type: ignore[arg-type]
    assert offered is not None and computed + offered <= prompt
    external = trimmed(rng, computed, offered)
    if external <= 0:
        external, later = 0, False
    believed = computed + external
    if later:
        covered = believed  # vLLM allocates what it takes
    else:
        # And what this step computes behind it.
        covered = rng.randint(believed + (believed < prompt), prompt)
    table = tuple(rng.sample(range(1, 100), -(-covered // BLOCK)))
    for block in table[: computed // BLOCK]:
        at = table.index(block) * BLOCK
        worker_shim.memory[block] = list(range(at, at + BLOCK))
    before = [list(b) for b in worker_shim.memory]
    scheduler.allocated(request, SimpleNamespace(get_block_ids=lambda: (table,)), external)  # type: ignore[arg-type]
    out = SimpleNamespace(
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        preempted_req_ids=set(),
        scheduled_new_reqs=[],
    )
    meta = scheduler.build(out, lambda req: (table,))  # type: ignore[arg-type]
    worker.begin(meta)
    done = worker.collect()
    scheduler.worker_reported(done.sent, done.received, worker.take_landed())
    touched = {b for b in range(BLOCKS) if worker_shim.memory[b] != before[b]}
    assert touched <= set(table[computed // BLOCK :]), "a block of another request was written"
    if not external:
        assert worker_shim.sent is None and not done.received and not done.failed, (
            "a load of which the engine expects nothing"
        )
        return "none"
    if done.failed or done.bad_blocks:
        assert "d" in done.received
        assert worker_shim.sent is None and (
            done.failed == {"d"} or set(table[computed // BLOCK :]) <= done.bad_blocks
        )
        return "refused"
    holds = [worker_shim.memory[table[i // BLOCK]][i % BLOCK] for i in range(believed)]
    assert holds == list(range(believed)), (
        f"{prompt} tokens, {computed} here, {external} of {offered} taken: {holds}"
    )
    return "loaded"


def test_what_the_engine_believes_loaded_was_loaded() -> None:
    seen: dict[str, int] = {}
    for seed in range(RUNS):
        try:
            end = one(seed)
        except AssertionError as err:
            raise AssertionError(f"seed {seed}: {err}") from err
        seen[end] = seen.get(end, 0) + 1
    assert min(seen.get(k, 0) for k in ("none", "loaded", "refused")) > RUNS // 20, seen


def test_a_trim_that_leaves_the_end_without_a_block_is_named() -> None:
    s = SchedulerSide(Settings(), FakeScheduler(), [BLOCK], "engine", fake_hash, LOG)
    request = Request(
        request_id="d", prompt_token_ids=list(range(100)), num_prompt_tokens=100,
        kv_transfer_params=prefill_first(),
    )  # fmt: skip
    s.on_new_request(request)  # type: ignore[arg-type]
    assert s.matched(request, 0) == (100, True)  # type: ignore[arg-type]
    s.allocated(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6],)), 96)  # type: ignore[arg-type]
    out = SimpleNamespace(
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        preempted_req_ids=set(),
        scheduled_new_reqs=[],
    )
    (expect,) = s.build(out, lambda req: ((),)).expects  # type: ignore[arg-type]
    assert "takes 96 tokens" in expect.refused and "6 blocks of 16 for the 100" in expect.refused
    client = FakeWorker()
    worker = WorkerSide(client, LOG, resume_block=BLOCK)
    worker.begin(s.build(out, lambda req: ((),)))  # type: ignore[arg-type]
    worker._expect(expect, 0)
    done = worker.collect()
    assert client.take() == [] and done.received == done.failed == {"d"} and not done.bad_blocks
    stats = worker.take_stats()
    assert stats is not None and stats.data["transfers"] == {
        f"received/{shim.status_name(shim.REFUSED)}": 1
    }
