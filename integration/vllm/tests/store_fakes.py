"""A block pool, a store and as much of vLLM's scheduler as the store can see, with blocks that have
content: what was computed, from which tokens and with which weights."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fakes import LOG, FakeScheduler, FakeWorker, Request, fake_hash
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id as of_group

from kvspray_vllm import shim
from kvspray_vllm.meta import Landed
from kvspray_vllm.saving import Saving
from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.store import state_key
from kvspray_vllm.worker import Results, WorkerSide

PAGE = 4
HIT, MISS, STORED, EXISTED = 0x11, 2, 3, 4  # a hit in memory


def hash_of(tokens: Any) -> bytes:
    return hashlib.sha256(repr(tuple(tokens)).encode()).digest()


def namespace(weights: str = "w0") -> shim.Namespace:
    return shim.Namespace(weights, "bfloat16", "l", PAGE, 64, "vllm-sha256_cbor", "0")


class Pool:
    """Counts references as vLLM's does. A block without references keeps its content, and can be
    hit, until it is taken for another."""

    def __init__(self, n: int) -> None:
        self.num_gpu_blocks = n
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0, block_hash=None) for i in range(n)]
        self.blocks[0].ref_cnt = 1
        self.free = deque(self.blocks[1:])
        self.cached: dict[bytes, Any] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, n: int) -> list[Any]:
        out = [self.free.popleft() for _ in range(n)]
        for b in out:
            assert b.ref_cnt == 0
            b.ref_cnt = 1
            if b.block_hash is not None and self.cached.get(b.block_hash) is b:
                del self.cached[b.block_hash]
            b.block_hash = None
        return out

    def touch(self, blocks: Any) -> None:
        for b in blocks:
            if b.ref_cnt == 0:
                self.free.remove(b)
            b.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for b in blocks:
            b.ref_cnt -= 1
            assert b.ref_cnt >= 0
            if b.ref_cnt == 0:
                self.free.append(b)

    def evict_blocks(self, ids: set[int]) -> None:
        for i in ids:
            self.cached.pop(self.blocks[i].block_hash, None)

    def cache(self, block: Any, hash: bytes) -> None:
        if block.block_hash is None and hash not in self.cached:
            block.block_hash = hash
            self.cached[hash] = block

    def clear(self) -> bool:
        if len(self.free) < self.num_gpu_blocks - 1:
            return False
        for b in self.blocks:
            b.block_hash = None
        self.cached.clear()
        return True


@dataclass
class FakePin:
    hashes: list[bytes]
    pin_s: float
    there: int
    refused: str = ""
    ended: bool = False

    def pages(self) -> int:
        return self.there

    def end(self) -> None:
        self.ended = True


class FakeStore:
    """Of one node. Each rank's pages are apart. PUTs read, and GETs write, at any time before they
    end."""

    def __init__(self, ranks: int = 1) -> None:
        self.pages: list[dict[tuple[str, bytes], Any]] = [{} for _ in range(ranks)]
        self.session = 1
        self.error = ""
        self.up = True
        self.opening = False
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.silent = False
        self.opened: list[Any] = []  # and not closed
        self.pins: list[FakePin] = []  # all that were asked for
        self.refusal = ""  # of pins

    # of the scheduler's client

    def pages_of(self, namespaces: Any) -> Any:
        store = self

        class Pages:
            error = property(lambda _: store.error)
            session = property(lambda _: store.session)
            opening = property(lambda _: store.opening)

            def ready(self) -> bool:
                return store.up

            def ask(self, hashes: Any, pin_s: float) -> Any:
                store.asked.append(len(hashes))
                number = len(store.asked)

                def answer() -> Any:
                    if store.silent:
                        return None
                    return [
                        all(
                            (n.weights, h) in p
                            for n, p in zip(namespaces, store.pages, strict=True)
                        )
                        for h in hashes
                    ]

                return SimpleNamespace(answer=answer, end=lambda: store.ended.append(number))

            def pin(self, hashes: Any, pin_s: float) -> Any:
                found = self.ask(hashes, pin_s).answer()
                store.asked.pop()
                pages = found.index(False) if False in found else len(found)
                store.pins.append(FakePin(list(hashes), pin_s, pages, store.refusal))
                return store.pins[-1]

            def close(self) -> None:
                store.opened.remove(self)

        self.opened.append(Pages())
        return self.opened[-1]


class RankPages:
    """A rank's namespace, over the fake worker that hands out its leases."""

    error = ""

    def __init__(self, worker: RankWorker, weights: str) -> None:
        self.worker, self.weights = worker, weights
        worker.opened.append(self)

    def ready(self) -> bool:
        return True

    def get(self, hashes: Any, blocks: Any, req: str, deadline_s: float, after: int) -> int:
        return self.worker.open("get", self.weights, hashes, blocks)

    def put(
        self, hashes: Any, blocks: Any, parent: bytes, req: str, deadline_s: float, after: int
    ) -> int:
        return self.worker.open("put", self.weights, hashes, blocks)

    def close(self) -> None:
        self.worker.opened.remove(self)


class RankWorker(FakeWorker):
    def __init__(self, store: FakeStore, rank: int, content: dict[int, Any]) -> None:
        super().__init__()
        self.of = store.pages[rank]
        self.content = content
        self.leases_open: dict[int, tuple[Any, ...]] = {}
        self.opened: list[RankPages] = []  # and not closed
        self.chance: random.Random | None = None

    def open(self, op: str, weights: str, hashes: Any, blocks: Any) -> int:
        assert len(hashes) == len(blocks) == len(set(blocks))
        lease = self._lease(op, len(blocks))
        self.leases_open[lease] = (op, weights, list(hashes), list(blocks))
        if self.chance is not None and self.chance.random() < 0.3:
            self.finish(lease)  # before the step that submits it has computed anything
        return lease

    def work(self, r: random.Random) -> None:
        """Some of what is open is copied now, and ends."""
        for lease in list(self.leases_open):
            if r.random() < 0.4:
                self.finish(lease, lose=r.random() < 0.1)

    def finish(self, lease: int, lose: bool = False, status: int = shim.OK) -> None:
        op, weights, hashes, blocks = self.leases_open.pop(lease)
        out = bytearray()
        for h, b in zip(hashes, blocks, strict=True):
            key = (weights, h)
            if op == "put":
                out.append(EXISTED if key in self.of else STORED)
                self.of.setdefault(key, self.content.get(b))
            elif key in self.of and not lose:
                self.content[b] = self.of[key]
                out.append(HIT)
            else:
                out.append(MISS)
                self.content[b] = "garbage"
        self.ends.append(
            shim.Ended(
                lease, True, status, 0, 1, "", "", 0, bytes(out) if status == shim.OK else b""
            )
        )

    def cancel(self, lease: int, reason: str) -> None:
        super().cancel(lease, reason)
        if lease in self.leases_open:
            self.finish(lease, lose=True, status=shim.CANCELLED)


class Vllm:
    """Chunked prefill, prefix hits, preemption, loads that are set aside, and `lag` steps under
    way. states: groups of recurrent states, each with one at the end of some blocks: a step ends
    there if it reaches one, or stays in its block (mamba_cache_mode align)."""

    def __init__(
        self, blocks: int = 24, lag: int = 1, ranks: int = 1, budget: int = 10, events: Any = None,
        states: int = 0,
    ) -> None:  # fmt: skip
        self.pool = Pool(blocks)
        self.lag, self.budget, self.states = lag, budget, states
        self.store = FakeStore(ranks)
        self.clock = 100.0
        client = FakeScheduler()
        client.pages = self.store.pages_of  # type: ignore[attr-defined]
        self.client = client
        self.scheduler = SchedulerSide(
            Settings(store=True),
            client,
            [PAGE] * (1 + states),
            "engine",
            fake_hash,
            LOG,
            tp_size=ranks,
            states=range(1, 1 + states),
            now=lambda: self.clock,
            store_lag=lag,
            events=events,
        )
        self.scheduler.set_pool(self.pool)  # type: ignore[arg-type]
        self.side = self.scheduler._store
        assert self.side is not None
        self.content: list[dict[int, Any]] = [{} for _ in range(ranks)]
        self.weights = "w0"
        self.shims = [RankWorker(self.store, i, self.content[i]) for i in range(ranks)]
        self.workers, self.savings = [], []
        for i, s in enumerate(self.shims):
            w = WorkerSide(s, LOG, resume_block=0 if states else PAGE)
            saving = Saving(i, lambda n, s=s: RankPages(s, n.weights), LOG)
            saving.set(namespace())
            w.set_saving(saving)
            self.workers.append(w)
            self.savings.append(saving)
        self.requests: dict[str, Any] = {}
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.aside: dict[str, Any] = {}
        self.back: set[str] = set()
        self.preempted: set[str] = set()
        self.queue: deque[Any] = deque()
        self.received: list[str] = []
        self.reports: Counter[str] = Counter()  # of ranks, that a load has ended
        self.failed: set[str] = set()
        self.bad: set[int] = set()

    # ---- requests

    def add(self, name: str, tokens: list[int], answer: int = 3, params: Any = None,
            **more: Any) -> Any:  # fmt: skip
        every = list(tokens)
        r = Request(
            request_id=name, prompt_token_ids=tokens, all_tokens=every, all_token_ids=every,
            num_prompt_tokens=len(tokens), num_computed_tokens=0, num_tokens=len(tokens),
            block_hashes=[], kv_transfer_params=params, status=SimpleNamespace(name="WAITING"),
            table=[], states=self.no_states(), answer=answer, in_flight=0, samples=0, stale=0,
            processed=0, **more,
        )  # fmt: skip
        self.hash(r)
        self.requests[name] = r
        self.waiting.append(r)
        self.scheduler.on_new_request(r)
        return r

    @staticmethod
    def hash(r: Any) -> None:
        r.num_tokens = len(r.all_tokens)
        while (len(r.block_hashes) + 1) * PAGE <= r.num_tokens:
            r.block_hashes.append(hash_of(r.all_tokens[: (len(r.block_hashes) + 1) * PAGE]))

    def finish(self, r: Any, status: str) -> None:
        r.status = SimpleNamespace(name=status)
        for queue in (self.waiting, self.running):
            if r in queue:
                queue.remove(r)
        delay, _ = self.scheduler.finished(r, self.tables(r))
        if not delay and r.request_id not in self.aside:
            self.free(r)
            del self.requests[r.request_id]

    def no_states(self) -> list[list[Any]]:
        return [[] for _ in range(self.states)]

    def tables(self, r: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(0 if b is None else b.block_id for b in table) for table in (r.table, *r.states)
        )

    def free(self, r: Any) -> None:
        self.pool.free_blocks(reversed(r.table))
        for table in r.states:
            self.pool.free_blocks(b for b in table if b is not None)
        r.table, r.states, r.processed = [], self.no_states(), 0

    def preempt(self, r: Any) -> None:
        self.free(r)
        r.num_computed_tokens = 0
        r.stale = r.in_flight
        self.preempted.add(r.request_id)
        self.running.remove(r)
        self.waiting.insert(0, r)

    # ---- one step

    def allocate(self, r: Any, tokens: int) -> bool:
        need = -(-tokens // PAGE) - len(r.table)
        states = [-(-tokens // PAGE) - len(table) for table in r.states]
        if max(need, 0) + sum(n > 0 for n in states) > self.pool.get_num_free_blocks():
            return False
        if need > 0:
            r.table += self.pool.get_new_blocks(need)
        for table, more in zip(r.states, states, strict=True):
            # A step goes on from the state of the step before it, and leaves its own.
            for i in range(min((r.processed - 1) // PAGE, len(table))):
                if table[i] is not None:
                    self.pool.free_blocks([table[i]])
                    table[i] = None
            if more > 0:
                table += [None] * (more - 1) + self.pool.get_new_blocks(1)
        return True

    def aligned(self, r: Any, n: int) -> int:
        """How many of n tokens a step computes, so that a block's state is that of its end: see
        _mamba_block_aligned_split."""
        start, end = r.num_computed_tokens, r.num_computed_tokens + n
        prefill = max(r.num_prompt_tokens, len(r.all_tokens) - 1)
        if not self.states or start >= prefill:
            return n
        if start % PAGE:
            return min(end, (start // PAGE + 1) * PAGE) - start
        last = min(end, prefill) // PAGE * PAGE
        return last - start if last > start else n

    def schedule(self) -> Any:
        counts: dict[str, int] = {}
        left = self.budget
        for r in list(self.running):
            if r not in self.running or left == 0:
                continue
            # Tokens that steps under way sample are computed in later ones.
            n = min(left, len(r.all_tokens) + r.samples - r.num_computed_tokens)
            if n <= 0:
                continue
            n = self.aligned(r, n)
            while not self.allocate(r, r.num_computed_tokens + n):
                last = self.running[-1]
                self.preempt(last)
                counts.pop(last.request_id, None)
                if last is r:
                    break
            if r in self.running:
                counts[r.request_id] = n
                left -= n
                self.caches(r, r.num_computed_tokens + n)
        for r in list(self.waiting):
            if left == 0:
                break
            if r.request_id in self.aside or r.in_flight:
                continue
            if r.num_computed_tokens == 0 and not self.start(r):
                continue
            n = self.aligned(r, min(left, len(r.all_tokens) - r.num_computed_tokens))
            if not self.allocate(r, r.num_computed_tokens + n):
                if r.num_computed_tokens and r.table:
                    self.free(r)
                    r.num_computed_tokens = 0
                break
            self.waiting.remove(r)
            self.running.append(r)
            counts[r.request_id] = n
            left -= n
            self.caches(r, r.num_computed_tokens + n)
        out = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            preempted_req_ids=self.preempted,
            scheduled_new_reqs=[],
        )
        self.preempted = set()
        tables = {name: self.tables(r) for name, r in self.requests.items()}
        meta = self.scheduler.build(out, lambda req: tables[req])  # type: ignore[arg-type]
        work = []
        for name, n in counts.items():
            r = self.requests[name]
            r.num_computed_tokens += n
            samples = r.num_computed_tokens >= len(r.all_tokens) + r.samples
            work.append((name, r.num_computed_tokens - n, n, tables[name], samples, r.all_tokens))
            r.in_flight += 1
            r.samples += samples
        return meta, work

    def start(self, r: Any) -> bool:
        """Whether a request can be scheduled now: not one that is asked for, or set aside."""
        hits = []
        for h in r.block_hashes[: (len(r.all_tokens) - 1) // PAGE]:
            if h not in self.pool.cached:
                break
            hits.append(self.pool.cached[h])
        states: list[Any] = []
        while self.states and hits:
            of = r.block_hashes[len(hits) - 1]
            states = [self.pool.cached.get(of_group(of, 1 + g)) for g in range(self.states)]
            if None not in states:
                break
            hits.pop()
        more, aside = self.scheduler.matched(r, len(hits) * PAGE)
        if more is None:
            return False
        total = len(hits) * PAGE + more
        taken = -(-(more if aside else min(self.budget, len(r.all_tokens) - total)) // PAGE)
        used = hits + (states if hits else [])
        if taken + self.states > self.pool.get_num_free_blocks() - sum(
            b.ref_cnt == 0 for b in used
        ):
            return False
        self.pool.touch(used)
        r.table = list(hits)
        r.states = [[None] * (len(hits) - 1) + [s] for s in states] if hits else self.no_states()
        r.processed = len(hits) * PAGE
        assert self.allocate(r, total)
        self.scheduler.allocated(r, SimpleNamespace(get_block_ids=lambda: self.tables(r)), more)
        r.num_computed_tokens = r.processed = total
        if aside:
            self.aside[r.request_id] = r
            return False
        return total < len(r.all_tokens)

    def caches(self, r: Any, tokens: int) -> None:
        for i in range(min(tokens // PAGE, len(r.block_hashes))):
            self.pool.cache(r.table[i], r.block_hashes[i])
            for g, table in enumerate(r.states):
                if table[i] is not None:
                    self.pool.cache(table[i], of_group(r.block_hashes[i], 1 + g))

    def execute(self) -> None:
        meta, work = self.queue.popleft()
        done = Results()
        landed: Landed | None = None
        for rank, w in enumerate(self.workers):
            w.preempts(meta)
            w.begin(meta)
            for _, start, n, table, _, tokens in work:
                self.compute(rank, tokens, start, n, table)
            w.step_done()
            got = w.collect()
            for name in got.received:
                self.reports[name] += 1
                if self.reports[name] == len(self.workers):
                    del self.reports[name]
                    done.received.add(name)
            self.failed |= got.failed
            self.bad |= got.bad_blocks
            mine = w.take_landed()
            landed = (
                mine if landed is None else landed.aggregate(mine) if mine is not None else landed
            )
        self.update(work, done, landed)

    def compute(self, rank: int, tokens: list[int], start: int, n: int, tables: Any) -> None:
        """A block's content follows from the one before it and from the weights, a state from the
        one before it."""
        table, *states = tables
        for g, of in enumerate(states):
            before = self.content[rank].get(of[(start - 1) // PAGE]) if start else None
            good = not start or before == (self.weights, tuple(tokens[:start]), 1 + g)
            self.content[rank][of[(start + n - 1) // PAGE]] = (
                (self.weights, tuple(tokens[: start + n]), 1 + g) if good else "garbage"
            )
        for at in range(start, start + n):
            block, i = table[at // PAGE], at // PAGE
            if at % PAGE == PAGE - 1 and at < len(tokens):
                before = self.content[rank].get(table[i - 1]) if i else (self.weights, ())
                good = isinstance(before, tuple) and before == (
                    self.weights,
                    tuple(tokens[: i * PAGE]),
                )
                self.content[rank][block] = (
                    (self.weights, tuple(tokens[: at + 1])) if good else "garbage"
                )
            else:
                self.content[rank][block] = "part"

    def update(self, work: Any, done: Results, landed: Landed | None) -> None:
        for name, start, n, _, samples, _ in work:
            r = self.requests.get(name)
            if r is None:
                continue
            r.in_flight -= 1
            if not r.stale:
                r.processed = start + n
            r.samples -= samples
            if r.stale:
                r.stale -= 1
                continue
            if r.status.name.startswith("FINISHED"):
                continue
            if samples and r in self.running:
                r.all_tokens.append(len(r.all_tokens))
                self.hash(r)
                if len(r.all_tokens) >= r.num_prompt_tokens + r.answer:
                    self.finish(r, "FINISHED_LENGTH_CAPPED")
        for name, r in self.aside.items():
            if name in self.failed:
                r.num_computed_tokens = 0
            elif bad := [i for i, b in enumerate(r.table) if b.block_id in self.bad]:
                r.num_computed_tokens = min(bad[0] * PAGE, r.num_computed_tokens)
        self.failed.clear()
        self.bad.clear()
        self.scheduler.worker_reported(done.sent, done.received, landed)
        for name in done.received:
            r = self.aside.pop(name)
            self.received.append(name)
            if r.status.name.startswith("FINISHED"):
                self.free(r)
                del self.requests[name]
                continue
            if r.num_computed_tokens == 0:
                self.free(r)
            else:
                keep = -(-r.num_computed_tokens // PAGE)
                self.pool.free_blocks(reversed(r.table[keep:]))
                r.table = r.table[:keep]
                self.caches(r, r.num_computed_tokens)

    def step(self, r: random.Random | None = None) -> None:
        self.queue.append(self.schedule())
        for s in self.shims:
            if r is not None:
                s.work(r)
            else:
                for lease in list(s.leases_open):
                    s.finish(lease)
        while len(self.queue) >= self.lag or self.queue and not self.queue[-1][1]:
            self.execute()
        self.clock += 0.01

    def drain(self, steps: int = 400) -> None:
        for _ in range(steps):
            if not (self.requests or self.queue or self.scheduler.pending_push_work()):
                return
            self.step()
        raise AssertionError(
            f"not done: {list(self.requests)}, {self.scheduler.pending_push_work()}"
        )

    def run(self, name: str, tokens: list[int], **more: Any) -> None:
        self.add(name, tokens, **more)
        self.drain()

    def change_weights(self, weights: str, clear: bool = True) -> None:
        """Between two steps, as a rollout does it."""
        self.weights = weights
        for w, saving in zip(self.workers, self.savings, strict=True):
            w.outdate()
            saving.set(namespace(weights))
        if clear and self.pool.clear():
            self.scheduler.reset()

    def check(self) -> int:
        """Every page in the store is what its hash names. Returns how many there are."""
        n = 0
        for rank in self.store.pages:
            for (weights, h), content in rank.items():
                assert isinstance(content, tuple) and content[0] == weights, (weights, content)
                name = hash_of(content[1])
                assert h == (state_key(name, content[2]) if content[2:] else name), content
                n += 1
        return n


def puts(v: Vllm) -> int:
    """How many pages the first rank has put."""
    return sum(c[2] for c in v.shims[0].calls if c[0] == "put")
