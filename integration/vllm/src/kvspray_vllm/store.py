"""The scheduler's side of the node's store: which blocks of a prompt are loaded from it, and which
blocks are saved to it.

A block is saved once a later step of its request is scheduled. The steps that computed it have then
ended, or come before the PUT on the engine's stream, and a load that failed has been taken back.
From then on this side holds a reference to the block in vLLM's pool, until every rank has reported
the end of its PUT: whatever becomes of the request, vLLM gives the block to no other while it is
read. So the bytes that a sidecar reads are those that the block's hash names.

A request asks when it arrives, and nothing waits for the answer: vLLM schedules the request when
the answer is there, or after ASK_S without it. Everything runs on the engine core's thread.

If a model has recurrent states, vLLM keeps them at the ends of some blocks, in blocks of other
groups. Such a block is a page of its own, whose name follows from the hash and the group. A prompt
is loaded up to a block whose states are all there: without them its tokens are of no use.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id as of_group

from kvspray_vllm.meta import Expect, Landed, Put, Rank, StepMeta
from kvspray_vllm.params import NO_HINTS, Hints
from kvspray_vllm.pins import Pins
from kvspray_vllm.prefix_cache import PrefixCache
from kvspray_vllm.shim import Pin, Question, SchedulerPages, SchedulerShim, ShimError

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvspray_vllm.events import StoreEvents

# Blocks of one prompt that are asked for, and loaded: 128 KiB of hashes, in one packet.
MAX_ASKED = 4096
ASK_S = 0.2  # how long a request waits for an answer
PIN_S = 30.0  # how long an answer counts; the sidecar keeps what it has found as long
MAX_PUT = 1024  # blocks of one PUT
MAX_PUTS = 64  # that have not ended
HELD_SHARE = 4  # all PUTs together hold at most this fraction of the pool's blocks
NO_BLOCK = 0  # vLLM's entry of a table for a block that is not there
MAX_KNOWN = 1 << 17  # hashes of blocks that need not be saved again

ENDED_WELL = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


@dataclass
class _Request:
    request: Request
    reads: bool  # vLLM may use what was computed before
    hints: Hints
    # Of each of its last steps since it got its blocks: how many tokens are computed with it.
    ends: deque[int]
    next: int = 0  # the block that is considered next for saving
    next_state: int = 0  # the block whose states are considered next
    asks: bool = True  # it may be loaded, and was not
    question: Question | None = None
    asked: float = 0.0
    until: float = 0.0  # how long it waits for the answer; 0: it does not wait yet
    keys: tuple[bytes, ...] = ()  # that were asked for: of blocks, then of their states
    found: Sequence[bool] | None = None  # of keys
    offer: tuple[int, int] = (0, 0)  # tokens that vLLM has, tokens behind them that the store has
    loads: tuple[bytes, ...] = ()
    load: KVCacheEvent | None = None  # to publish, once they are loaded


@dataclass
class _Held:
    """Blocks that a PUT reads."""

    blocks: list[KVCacheBlock]
    hashes: tuple[bytes, ...]
    event: KVCacheEvent | None = None  # to publish, once they are stored
    # That have ended it: whether all of its pages are there.
    ranks: dict[int, bool] = field(default_factory=dict)


def state_key(hash: bytes, group: int) -> bytes:
    """The name of a group's states after the tokens of a block with this hash."""
    return hashlib.sha256(b"kvspray-state-v1" + group.to_bytes(4, "big") + hash).digest()


class StoreSide:
    def __init__(
        self,
        client: SchedulerShim,
        page_tokens: int,
        ranks: int,
        lag: int,
        count: Callable[[str], None],
        log: logging.Logger,
        now: Callable[[], float] = time.monotonic,
        events: StoreEvents | None = None,
        cache: PrefixCache | None = None,
        count_pin: Callable[[str], None] = lambda _: None,
        states: Sequence[int] = (),
    ) -> None:
        """lag: steps that vLLM may have scheduled when it sees the result of the first of them.
        count: counts the outcome of a question. events: None if the engine publishes none. cache:
        vLLM's. count_pin: counts the outcome of a pin. states: cache groups of recurrent states;
        one other group has the tokens."""
        self._pins = Pins(self._pin, count_pin, log, now)
        self._cache = cache or PrefixCache()
        self._client = client
        self._size = page_tokens
        self._states = tuple(states)
        self._attention = next(g for g in range(len(self._states) + 1) if g not in self._states)
        self._of = ranks
        self._lag = lag
        self._count = count
        self._log = log
        self._now = now
        self._events = events
        self._pool: BlockPool | None = None
        self._requests: dict[str, _Request] = {}
        self._ranks: dict[int, Rank] = {}
        self._pages: SchedulerPages | None = None
        self._session = -1  # that `_known` belongs to
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._puts: dict[int, _Held] = {}
        self._new: list[Put] = []  # for the next step
        self._last_put = 0
        self._held = 0  # blocks
        self._lacks = ""  # what the block pool of this vLLM has not
        self._off = ""  # why the store is not used with the present weights
        self._logged = ""

    # ---- what the store is

    def set_pool(self, pool: BlockPool) -> None:
        lacks = [
            name
            for name in ("touch", "free_blocks", "get_num_free_blocks", "blocks", "num_gpu_blocks")
            if not hasattr(pool, name)
        ]
        if lacks:
            self._lacks = f"vLLM's block pool has no {', '.join(lacks)}"
            self._decide()
        else:
            self._pool = pool

    def _decide(self) -> None:
        """Whether the store is used with the present weights."""
        before = self._off
        lent = "" if self._pool is not None else "vLLM has not lent its block pool to the connector"
        self._off = self._lacks or lent or next((r.why for r in self._ranks.values() if r.why), "")
        if self._off and self._off != before:
            self._log.error("kvspray: this engine does not use the store: %s", self._off)
        elif before and not self._off:
            self._log.info("kvspray: this engine uses the store again")

    def _learn(self, ranks: dict[int, Rank]) -> None:
        """Ranks have other weights. What vLLM's blocks hold may be of those before, unless all were
        free when the weights changed."""
        first = not self._ranks
        self._ranks |= ranks
        self._decide()
        for r in self._requests.values():
            self._forget_question(r)
        for put in self._new:
            self._release(self._puts.pop(put.id))
        self._new.clear()
        self._forget_all()
        if not first and self._cache.mixed:
            self._log.warning(
                "kvspray: the weights have changed, and vLLM's prefix cache was not emptied: "
                "nothing is saved or loaded until reset_prefix_cache(reset_connector=True)"
            )
        if self._pages is not None:
            self._pages.close()
        namespaces = [
            r.namespace for _, r in sorted(self._ranks.items()) if r.namespace is not None
        ]
        self._pages = self._client.pages(namespaces) if len(namespaces) == self._of else None

    @property
    def _usable(self) -> bool:
        return self._pool is not None and not self._off and not self._cache.mixed

    def _ready(self) -> bool:
        """Whether questions have answers now."""
        pages = self._pages
        if pages is None or not pages.ready():
            if pages is not None and pages.error not in ("", self._logged):
                self._logged = pages.error
                self._log.error("kvspray: the sidecar refuses this engine's pages: %s", pages.error)
            return False
        if pages.session != self._session:
            # Another sidecar, perhaps: what the last one had in memory is gone.
            self._session = pages.session
            self._forget_all()
        return True

    # ---- loading

    def arrived(self, request: Request, asks: bool, hints: Hints = NO_HINTS) -> None:
        """asks: its prompt is expected from nowhere else."""
        # An adapter's content is no part of a hash, and the tokens of a resumable request may be
        # replaced.
        if request.lora_request or request.resumable:
            return
        reads = not request.skip_reading_prefix_cache
        r = self._requests[request.request_id] = _Request(
            request, reads, hints, deque(maxlen=self._lag), asks=reads and hints.load != 0
        )
        if asks and r.asks and self._usable and self._ready():
            self._ask(r)

    def _pin(self, hashes: Sequence[bytes], pin_s: float) -> Pin:
        if self._pages is None:
            raise ShimError("the engine has not opened its pages in the store")
        return self._pages.pin(hashes, pin_s)

    def _ask(self, r: _Request) -> None:
        assert self._pages is not None
        # The last token is always computed, so that the engine has something to go on from.
        tokens = r.request.num_tokens - 1
        if r.hints.load is not None:
            tokens = min(tokens, r.hints.load)
        room = MAX_ASKED // (1 + len(self._states))
        n = min(tokens // self._size, len(r.request.block_hashes), room)
        if n == 0:
            r.asks = False
            return
        hashes = tuple(bytes(h) for h in r.request.block_hashes[:n])
        r.keys = hashes + self._state_keys(hashes)
        try:
            r.question = self._pages.ask(list(r.keys), PIN_S)
            r.asked = self._now()
        except ShimError as err:
            r.asks = False
            self._log.warning(
                "kvspray: request %s: the store cannot be asked: %s", r.request.request_id, err
            )

    def _state_keys(self, hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        return tuple(state_key(h, g) for h in hashes for g in self._states)

    def _forget_question(self, r: _Request) -> None:
        if r.question is not None:
            r.question.end()
        r.question = r.found = None
        r.offer = (0, 0)

    def _compute(self, r: _Request, outcome: str) -> int:
        self._forget_question(r)
        r.asks = False
        self._count(outcome)
        return 0

    def matched(self, request: Request, computed: int) -> int | None:
        """How many tokens behind those that vLLM has can be loaded. None: not known yet."""
        r = self._requests.get(request.request_id)
        if r is None or not r.asks or not self._usable:
            return 0
        now = self._now()
        if r.question is not None and now - r.asked > PIN_S:
            self._forget_question(r)  # it has waited for blocks so long that pages may have gone
            r.until = 0.0
        r.until = r.until or now + ASK_S
        if r.found is None and not self._answered(r):
            if not r.asks:
                return 0
            # Until every rank has reported its namespace nothing can be asked.
            if self._pages is not None and r.question is None and not self._pages.opening:
                return self._compute(r, "off")
            return None if now < r.until else self._compute(r, "late")
        assert r.found is not None
        first = computed // self._size
        end = self._found_end(r.found, first)
        tokens = max(end - first, 0) * self._size
        r.offer = (computed, tokens)
        return tokens

    def _found_end(self, found: Sequence[bool], first: int) -> int:
        """The block behind the last one that can be loaded from block first on."""
        states = len(self._states)
        n = len(found) // (1 + states)
        end = next((i for i in range(first, n) if not found[i]), n)
        while end > first and not all(found[n + (end - 1) * states : n + end * states]):
            end -= 1
        return end

    def _answered(self, r: _Request) -> bool:
        if not self._ready():
            return False
        if r.question is None:
            self._ask(r)
        if r.question is not None:
            r.found = r.question.answer()
        if r.found is None:
            return False
        gone = []
        for key, there in zip(r.keys, r.found, strict=True):
            if there:
                self._remember(key)
            else:
                # If it was there, it was given up for others, and is saved again.
                gone.append(key)
        self._forget(gone)
        return True

    def allocated(
        self, request: Request, tables: Sequence[Sequence[int]], external: int
    ) -> Expect | None:
        """vLLM has blocks for a request, and takes ``external`` tokens from elsewhere. The load to
        begin, if there is one."""
        r = self._requests.get(request.request_id)
        if r is None or not r.asks:
            return None
        computed, offered = r.offer
        if external <= 0:
            if r.found is not None:
                self._compute(r, "none")
            return None
        r.asks = False  # once: after a load that fails the prompt is computed
        self._count("found")
        # vLLM may take fewer tokens than it was offered. The rest of their last block is loaded,
        # and computed again.
        table = tables[self._attention]
        first, end = computed // self._size, -(-(computed + external) // self._size)
        states = tuple(tables[g][end - 1] for g in self._states if end <= len(tables[g]))
        refused = ""
        if external > offered or end > len(table):
            refused = (
                f"the engine takes {external} tokens behind its own {computed} into {len(table)} "
                f"blocks, and {offered} were offered"
            )
        elif self._states and (external < offered or len({NO_BLOCK, *states}) <= len(self._states)):
            refused = (
                f"the engine takes {external} of {offered} tokens behind its own {computed}, and "
                f"blocks {states} for the states of {len(self._states)} groups"
            )
        hashes = tuple(bytes(h) for h in request.block_hashes[first:end])
        r.loads, r.load = hashes + self._state_keys(hashes[-1:]), None
        if self._events is not None and not refused:
            r.load = self._events.describe(request, first, end, self._size)
        for h in r.loads:
            self._remember(h)
        return Expect(
            request.request_id,
            b"",
            b"",
            "",
            computed + external,
            computed,
            ((*table[:end], *states),),
            refused=refused,
            pages=r.loads,
        )

    def loads(self, req: str) -> bool:
        """Whether a request's last load was from the store."""
        r = self._requests.get(req)
        return r is not None and bool(r.loads)

    # ---- saving

    def build(
        self,
        out: SchedulerOutput,
        tables: Callable[[str], Sequence[Sequence[int]]],
        meta: StepMeta,
    ) -> None:
        for req in out.preempted_req_ids or ():
            r = self._requests.get(req)
            if r is not None:
                r.ends.clear()  # its blocks went, and nothing is certain about those that it gets
                r.asks, r.until = r.reads and r.hints.load != 0, 0.0
                r.loads, r.load = (), None
        for req, scheduled in out.num_scheduled_tokens.items():
            r = self._requests.get(req)
            if r is None:
                continue
            # What a draft got wrong, or a load did not bring, vLLM has subtracted from the second
            # number.
            safe = min(r.ends[0], r.request.num_computed_tokens) if len(r.ends) == self._lag else 0
            r.ends.append(r.request.num_computed_tokens + scheduled)
            if safe >= (r.next + 1) * self._size:
                self._save(r, safe, tables(req))
        self._pins.look()
        meta.puts, self._new = self._new, []
        meta.epochs = (
            {number: rank.epoch for number, rank in self._ranks.items()} if meta.puts else {}
        )

    def _save(self, r: _Request, tokens: int, tables: Sequence[Sequence[int]]) -> None:
        """The first tokens of a request are computed, in these blocks."""
        pool, hashes = self._pool, r.request.block_hashes
        if pool is None or not self._usable or not self._ready():
            return
        table = tables[self._attention]
        end = min(tokens // self._size, len(hashes), len(table))
        while r.next < end:
            first = r.next
            if hashes[first] in self._known:
                self._known.move_to_end(hashes[first])
                r.next += 1
                continue
            room = self._room(pool)
            if room <= 0:
                return  # the request's next step tries again
            while (
                r.next < min(end, first + min(room, MAX_PUT)) and hashes[r.next] not in self._known
            ):
                r.next += 1
            event = (
                self._events.describe(r.request, first, r.next, self._size)
                if self._events is not None
                else None
            )
            saved = tuple(bytes(h) for h in hashes[first : r.next])
            parent = bytes(hashes[first - 1]) if first else b""
            self._put(pool, r, saved, table[first : r.next], parent, event)
        if self._states:
            self._save_states(pool, r, end, tables)

    def _save_states(
        self, pool: BlockPool, r: _Request, end: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """Those after each block that vLLM keeps, and still has for this request: another request's
        block with the same hash may not be computed yet."""
        while r.next_state < end:
            hash = bytes(r.request.block_hashes[r.next_state])
            kept = [
                (state_key(hash, g), tables[g][r.next_state])
                for g in self._states
                if r.next_state < len(tables[g])
                and pool.blocks[tables[g][r.next_state]].block_hash == of_group(hash, g)
            ]
            if len(kept) == len(self._states) and any(key not in self._known for key, _ in kept):
                if self._room(pool) < len(kept):
                    return
                keys, blocks = zip(*kept, strict=True)
                self._put(pool, r, keys, blocks, hash)
            r.next_state += 1

    def _room(self, pool: BlockPool) -> int:
        """How many blocks a PUT may hold."""
        limit: int = pool.num_gpu_blocks // HELD_SHARE
        return limit - self._held if len(self._puts) < MAX_PUTS else 0

    def _put(
        self,
        pool: BlockPool,
        r: _Request,
        hashes: tuple[bytes, ...],
        ids: Sequence[int],
        parent: bytes,
        event: KVCacheEvent | None = None,
    ) -> None:
        blocks = [pool.blocks[i] for i in ids]
        pool.touch(blocks)
        self._held += len(blocks)
        self._last_put += 1
        self._puts[self._last_put] = _Held(blocks, hashes, event)
        self._new.append(Put(self._last_put, r.request.request_id, hashes, tuple(ids), parent))
        for h in hashes:
            self._remember(h)

    def _remember(self, hash: bytes) -> None:
        self._known[hash] = None
        self._known.move_to_end(hash)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _release(self, held: _Held) -> None:
        assert self._pool is not None
        self._held -= len(held.blocks)
        # A suffix is of no use without what is before it, and goes first.
        self._pool.free_blocks(reversed(held.blocks))
        if not all(held.ranks.values()):
            self._forget(held.hashes)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        for h in hashes:
            self._known.pop(h, None)
        if self._events is not None:
            self._events.gone(hashes)

    def _forget_all(self) -> None:
        """There is another store, or there are other weights. PUTs and loads under way belong to
        those before."""
        self._known.clear()
        self._pins.clear()
        for held in self._puts.values():
            held.event = None
        for r in self._requests.values():
            r.load = None
        if self._events is not None:
            self._events.all_gone()

    # ---- requests and PUTs end

    def finished(self, request: Request, tables: Sequence[Sequence[int]], whole: bool) -> None:
        """vLLM takes its blocks back after this call. whole: what the request has computed is
        there."""
        r = self._requests.pop(request.request_id, None)
        if r is None:
            return
        self._forget_question(r)
        # The step of the last token may still be under way; and before a step that has ended
        # nothing is certain about its blocks.
        if whole and tables and request.status.name in ENDED_WELL and r.ends:
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._save(r, computed, tables)
            self._keep(r, computed)

    def _keep(self, r: _Request, tokens: int) -> None:
        """Pins the pages of a request that has ended, if it asks for that."""
        room = MAX_ASKED // (1 + len(self._states))
        n = min(tokens // self._size, len(r.request.block_hashes), room)
        if not r.hints.pin_s or n == 0 or not self._usable or not self._ready():
            return
        hashes = tuple(bytes(h) for h in r.request.block_hashes[:n])
        hashes += tuple(key for key in self._state_keys(hashes) if key in self._known)
        of = set(hashes)
        puts = {id for id, held in self._puts.items() if not of.isdisjoint(held.hashes)}
        self._pins.add(r.request.request_id, hashes, r.hints.pin_s, puts)

    def reported(self, received: Iterable[str], landed: Landed | None) -> None:
        """What the workers report after a step."""
        if landed is not None:
            for req in landed.lacked:
                r = self._requests.get(req)
                if r is not None:
                    self._forget(r.loads)
                    r.load = None
            if landed.ranks:
                self._learn(landed.ranks)
        for req in received:
            r = self._requests.get(req)
            if r is not None:
                self._forget_question(r)  # pages need not stay for it
                if r.load is not None and self._events is not None:
                    self._events.stored(r.loads[: len(r.loads) - len(self._states)], r.load)
                    r.load = None
        if landed is None:
            return
        for id, ranks in landed.saved.items():
            held = self._puts.get(id)
            if held is None:  # reported twice
                continue
            held.ranks |= ranks
            if len(held.ranks) == self._of:
                del self._puts[id]
                if all(held.ranks.values()) and self._events is not None and held.event is not None:
                    self._events.stored(held.hashes, held.event)
                self._release(held)
                self._pins.ended(id)

    @property
    def busy(self) -> bool:
        """The engine's steps have to go on, or blocks stay held."""
        return bool(self._puts)
