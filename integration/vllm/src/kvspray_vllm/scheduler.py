"""The scheduler's side: which requests offer KV, which wait for KV, and what the worker reports in
each step.

It owns no blocks. A *source* is a request whose prompt KV another engine requests; it exists from
the first step that schedules the request until vLLM has freed its blocks. A *destination* is a
request whose prompt KV comes from elsewhere. Everything runs on the engine core's thread.
"""

from __future__ import annotations

import collections
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvspray_vllm import params as spray
from kvspray_vllm.adapters import CHECK_WAIT_S, Adapters, Reading, remember
from kvspray_vllm.layout import backoff_of
from kvspray_vllm.meta import Adapter, Blocks, Expect, Gain, Intent, Landed, StepMeta
from kvspray_vllm.patience import Patience
from kvspray_vllm.prefix_cache import PrefixCache
from kvspray_vllm.settings import Settings
from kvspray_vllm.shim import SchedulerShim, ShimError
from kvspray_vllm.stats import KVSprayStats
from kvspray_vllm.store import StoreSide
from kvspray_vllm.transfers import Destination, Source

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvspray_vllm.events import StoreEvents

HashFn = Callable[[Sequence[int], str, str, Sequence[tuple[str, int, int]]], bytes]

# How long a request waits for its adapter's files to be read: less than the other side waits.
READ_WAIT_S = 2.0

# How long the other side may take to note that a request waits here for a prefill that is done.
REGISTER_S = 10.0
# Below this free share of the pool, holds end that are older than the match timeout, the longest
# one first: a decode engine that lives may have a long queue, and new prompts need the blocks.
LOW_POOL = 0.1

# Least number of tokens that the prefill computes if a model has recurrent states. vLLM's first
# model runner treats the first step of a prompt of one token as one of a decode, and its graph then
# leaves the state in the block of an earlier request.
STATE_TOKENS = 2

EVERY_PROMPT = bytes(32)  # in place of a prompt's hash

DELIVERED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


def _traceparent(asked: spray.Spray | None, request: Request) -> str:
    """Of the router's span, or of vLLM's own where vLLM traces and no router does."""
    if asked is not None and asked.traceparent:
        return asked.traceparent
    return spray.traceparent_of(request.trace_headers)


def _named(request: Request) -> list[int]:
    """The tokens of a prompt that its hash identifies. If embeddings take the place of tokens, vLLM
    has the same token ids for all embeddings."""
    tokens: list[int] | None = request.prompt_token_ids
    if not tokens or request.prompt_embeds is not None:
        raise spray.ParamsError(
            "no_token_ids",
            "the prompt is of embeddings, or has some: its token ids do not identify it",
        )
    return tokens


class SchedulerSide:
    def __init__(
        self,
        settings: Settings,
        client: SchedulerShim,
        block_sizes: Sequence[int],
        engine_id: str,
        hash_fn: HashFn,
        log: logging.Logger,
        tp_size: int = 1,
        windows: Sequence[int] = (),
        states: Sequence[int] = (),
        now: Callable[[], float] = time.monotonic,
        role: str = "kv_both",
        store_lag: int = 0,
        events: StoreEvents | None = None,
        fails: bool = False,
    ) -> None:
        """states: cache groups of recurrent states.
        store_lag: of StoreSide; 0: the engine does not use the node's store.
        events: those of the store, if the engine publishes any.
        fails: vLLM answers a request whose load fails with an error."""
        if role not in ("kv_producer", "kv_consumer", "kv_both"):
            raise ValueError(
                f"kvspray: kv_role is {role!r}, want kv_producer, kv_consumer or kv_both"
            )
        self._role = role
        self._settings = settings
        self._client = client
        self._block_sizes = tuple(block_sizes)
        self._engine_id = engine_id
        self._hash = hash_fn
        self._log = log
        self._tp_size = tp_size
        self._windows = [(g, w) for g, w in enumerate(windows) if w]
        self._states = bool(states)
        self._backoff = backoff_of(windows, self._states)
        self._now = now
        self._secret = secrets.token_bytes(16)
        self._adapters = Adapters()
        self._fails = fails
        # Adapters, as the worker has reported them.
        self._worker_read: collections.OrderedDict[int, str] = collections.OrderedDict()
        # By request: what reads its adapter, its params, the end of its wait.
        self._reading: dict[str, tuple[Reading, dict[str, Any], float]] = {}
        self._adapter: dict[str, Adapter] = {}  # of requests that take part in a transfer
        self._step = 0
        self._meta = StepMeta()
        self._sources: dict[str, Source] = {}
        self._pending: dict[str, Source] = {}  # not scheduled yet
        self._destinations: dict[str, Destination] = {}  # not allocated yet
        # Requests that are loaded; None: from the store.
        self._loading: dict[str, Destination | None] = {}
        # Of these, by request: the ranks that ask no sidecar for the load, and are declined.
        self._unasked: dict[str, set[int]] = {}
        self._ending: set[str] = set()  # of these, whose request is over
        self._stats = KVSprayStats()
        self._live: dict[str, Request] = {}
        self._patience = Patience()
        self._held: dict[str, Source] = {}  # finished, for receivers; the longest one first
        self._pool: BlockPool | None = None
        self._disabled = ""  # why the worker takes part in no transfer

        self._cache = PrefixCache()
        self._store: StoreSide | None = None
        if store_lag:
            self._store = StoreSide(
                client, self._block_sizes[0], tp_size, store_lag,
                lambda outcome: self._stats.lookup(outcome), log, now, events, self._cache,
                lambda outcome: self._stats.pin(outcome), states,
            )  # fmt: skip

    def set_pool(self, pool: BlockPool | None) -> None:
        """It is no part of vLLM's interface for connectors: one that is made otherwise is not
        used."""
        if callable(getattr(pool, "get_num_free_blocks", None)) and isinstance(
            getattr(pool, "num_gpu_blocks", None), int
        ):
            self._pool = pool
        if hasattr(pool, "num_gpu_blocks"):
            self._cache.set_pool(pool)
        if self._store is not None and pool is not None:
            self._store.set_pool(pool)

    # ---- requests arrive

    def on_new_request(self, request: Request) -> None:
        self._cache.look()
        hints = spray.hints_of(request.kv_transfer_params)
        self._on_new_request(request)
        if self._store is not None and not request.abort_immediately:
            req = request.request_id
            self._store.arrived(
                request,
                asks=req not in self._destinations and req not in self._reading,
                hints=hints,
            )

    def _on_new_request(self, request: Request) -> None:
        self._live[request.request_id] = request
        given = request.kv_transfer_params
        if not given:
            if request.lora_request:
                self._adapters.prefetch(request.lora_request)
            return
        if not isinstance(given, dict):
            # A client may put anything there (vllm_xargs), and an exception here would end the
            # engine core.
            request.kv_transfer_params = None
            self._stats.local("bad_params")
            self._log.warning(
                "kvspray: kv_transfer_params is a %s, not a map; the prompt is prefilled locally",
                type(given).__name__,
            )
            return
        # The samples of one request (n > 1), and the prompts of a list, share one dict.
        given = request.kv_transfer_params = dict(given)
        try:
            # vLLM adds such a request only to abort it, so that a connector releases what it holds.
            # This one holds nothing, but the prefill's engine may.
            if request.abort_immediately:
                self._refused(request, given)
                return
            asked = spray.parse(given)
            if asked is not None and asked.release:
                # The router's message to the prefill engine that a decode engine has failed: its
                # one token moves nowhere.
                self._decline_all(given, "the router has ended the request")
                given["do_remote_prefill"] = False
                return
            self._prepare(request, given)
        except spray.ParamsError as err:
            self._compute_here(request, err.label, str(err))
        except Exception as err:
            # For example a prompt that cannot be hashed: no request may end the engine core.
            self._log.exception(
                "kvspray: request %s: its transfer cannot be prepared", request.request_id
            )
            self._compute_here(request, "error", repr(err))

    def _prepare(self, request: Request, given: dict[str, Any]) -> None:
        source = bool(given.get("do_remote_decode"))
        if not source and not given.get("do_remote_prefill"):
            return
        content = ""
        if request.lora_request:
            known = self._adapters.known(request.lora_request)
            try:
                reading = self._adapters.ask(request.lora_request)
                now = self._adapters.content(request.lora_request, reading, CHECK_WAIT_S)
                if now is None and (known or source):
                    until = self._now() + READ_WAIT_S
                    self._reading[request.request_id] = reading, given, until
                    return
                if now is None:
                    raise spray.ParamsError("lora_reading", "its adapter's files are being read")
            except spray.ParamsError as err:
                self._decline_unasked(request, given, str(err))
                raise
            content = now
        self._transfer(request, given, content)

    def _transfer(self, request: Request, given: dict[str, Any], content: str) -> None:
        """content: of its LoRA adapter; empty: it has none."""
        if given.get("do_remote_decode"):
            self._new_source(request, given, content)
        else:
            self._new_destination(request, given, content)

    def _still_reading(self, request: Request) -> bool:
        """Whether the files of a request's adapter are not read yet. Once they are, the request is
        treated as a new one."""
        waiting = self._reading.get(request.request_id)
        if waiting is None:
            return False
        reading, given, until = waiting
        assert request.lora_request is not None
        try:
            try:
                content = self._adapters.content(request.lora_request, reading)
                if content is None and self._now() > until:
                    raise spray.ParamsError(
                        "lora_reading",
                        f"its adapter's files were not read within {READ_WAIT_S:g} s",
                    )
            except spray.ParamsError as err:
                self._decline_unasked(request, given, str(err))
                raise
            if content is None:
                return True
            del self._reading[request.request_id]
            self._transfer(request, given, content)
            # What vLLM has found in its prefix cache may be all of a prompt that is shorter now.
            return self._states and request.request_id in self._pending
        except spray.ParamsError as err:
            self._compute_here(request, err.label, str(err))
        except Exception as err:
            self._log.exception(
                "kvspray: request %s: its transfer cannot be prepared", request.request_id
            )
            self._compute_here(request, "error", repr(err))
        return False

    def _decline_unasked(self, request: Request, given: dict[str, Any], reason: str) -> None:
        """The prefill engine need not keep the blocks of a prompt that it was not asked for. If the
        prompt's adapter has not been read here, the prefill's answer names the adapter's content,
        and with it the prompt. Without that answer, every prompt of the transfer is declined."""
        if given.get("do_remote_decode"):
            return
        asked = spray.parse(given)
        if asked and asked.xfer and asked.peer:
            key = EVERY_PROMPT
            named = request.prompt_token_ids and request.prompt_embeds is None
            if named and (asked.adapter or not request.lora_request):
                key = self._prompt_hash(request, asked.adapter or "")
            self._client.decline(asked.xfer, key, asked.peer, reason, asked=False)

    def _check_role(self, lacks: str, does: str) -> None:
        """vLLM defers the freeing of blocks that a step in flight may still write for consumers
        only, and for producers holds back what it has promised: an engine does what its role is,
        and nothing else."""
        if self._role == lacks:
            raise spray.ParamsError(
                "role",
                f"kv_role is {lacks}, which does not {does} KV; set kv_both, or send the request "
                "to an engine with the other role",
            )

    def _new_source(self, request: Request, given: dict[str, Any], content: str) -> None:
        self._check_role("kv_consumer", "send")
        self._check_worker()
        tokens = _named(request)
        if not self._client.connected or not self._client.endpoint:
            raise spray.ParamsError("no_sidecar", "no sidecar is connected")
        if self._states and (request.skip_reading_prefix_cache or request.resumable):
            raise spray.ParamsError(
                "whole_prompt",
                "the engine needs all of its prompt (prompt_logprobs, streaming input), and a "
                "recurrent state moves without the last token",
            )
        asked = spray.parse(given)
        xfer = (
            asked.xfer
            if asked and asked.xfer
            else spray.derive_xfer(self._secret, request.request_id)
        )
        fanout = asked.fanout if asked else 1
        key = self._key_hash(request, content)
        fresh = bool(request.lora_request) and self._adapters.replaced(
            request.lora_request.lora_int_id
        )
        adapter = self._adapter.get(request.request_id)
        self._pending[request.request_id] = Source(
            request,
            xfer,
            key,
            self._moved(tokens),
            fanout,
            fresh,
            adapter[1] if adapter else None,
            traceparent=_traceparent(asked, request),
        )
        if self._states:
            self._shorten(request, len(tokens) - self._backoff)

    def _shorten(self, request: Request, tokens: int) -> None:
        """Shortens the prompt to the tokens that the decode engine loads, so that the recurrent
        states are those after the last of them. The router ignores the one token that the engine
        then generates. prompt_token_ids is not changed in place, because vLLM's front end may use
        the same list."""
        assert request.prompt_token_ids is not None
        request.prompt_token_ids = request.prompt_token_ids[:tokens]
        del request._all_token_ids[tokens:]
        request.num_prompt_tokens = tokens
        request.max_tokens = 1
        request.block_hashes.clear()
        request.update_block_hashes()

    def _check_worker(self) -> None:
        if self._disabled:
            raise spray.ParamsError(
                "disabled", f"this engine takes part in no transfer: {self._disabled}"
            )

    def _new_destination(self, request: Request, given: dict[str, Any], content: str) -> None:
        asked = spray.parse(given)
        if asked is None or asked.xfer is None or asked.peer is None:
            raise spray.ParamsError(
                "no_params", "kv_transfer_params names no kvspray transfer and peer"
            )
        tokens = _named(request)
        try:
            if not self._client.connected:  # the decline is sent once a sidecar is connected
                raise spray.ParamsError("no_sidecar", "no sidecar is connected")
            self._check_role("kv_producer", "receive")
            self._check_worker()
        except spray.ParamsError as err:
            key = self._key_hash(request, content)
            self._client.decline(asked.xfer, key, asked.peer, str(err), asked=False)
            raise
        key = self._key_hash(request, content)
        self._check_adapter(request, asked)
        if (
            self._fails
            and request.lora_request
            and self._worker_read.get(request.lora_request.lora_int_id) != content
        ):
            # The worker refuses such a load, which would be an error for the client.
            text = (
                f"the worker has not reported adapter {request.lora_request.lora_name!r} with "
                f"{content} as loaded: a prompt is computed here first"
            )
            self._client.decline(asked.xfer, key, asked.peer, text, asked=False)
            raise spray.ParamsError("lora_unloaded", text)
        # An id of the prefill's request comes only from a prefill that is done; it holds the blocks
        # for us.
        ready = bool(given.get("remote_request_id"))
        wait = 0.0 if ready else self._settings.admission_s or self._client.match_timeout_s
        dest = Destination(
            asked.xfer,
            key,
            asked.peer,
            self._moved(tokens),
            ready,
            self._now(),
            wait,
            traceparent=_traceparent(asked, request),
        )
        # Of a prefill that is done no answer is needed, but its engine holds the blocks on while
        # this session lives.
        try:
            self._client.await_admission(
                dest.xfer, dest.hash, dest.peer, dest.tokens, wait or REGISTER_S
            )
        except ShimError as err:
            if not ready:
                self._decline(dest, "the prefill cannot be asked")
                raise spray.ParamsError("not_asked", f"the prefill cannot be asked: {err}") from err
        self._destinations[request.request_id] = dest

    def _moved(self, tokens: Sequence[int]) -> int:
        moved = len(tokens) - self._backoff
        if moved < (STATE_TOKENS if self._states else 1):
            raise spray.ParamsError(
                "short_prompt", f"nothing moves of a prompt as short as {len(tokens)} tokens"
            )
        return moved

    def _key_hash(self, request: Request, content: str) -> bytes:
        if request.lora_request:
            self._adapter[request.request_id] = request.lora_request.lora_int_id, content
        return self._prompt_hash(request, content)

    def _prompt_hash(self, request: Request, content: str) -> bytes:
        items = [
            (f.identifier, f.mm_position.offset, f.mm_position.length)
            for f in (request.mm_features or ())
        ]
        tokens = request.prompt_token_ids
        if self._states and tokens:
            # The prefill computes no more of it: see _shorten.
            tokens = tokens[: max(len(tokens) - self._backoff, 1)]
        return self._hash(tokens, content, request.cache_salt or "", items)

    def _check_adapter(self, request: Request, asked: spray.Spray) -> None:
        """The prefill's answer has the content of its adapter. Other content here would be found by
        the prompt's hash, too, but only by the prefill's sidecar, which has neither name."""
        own = self._adapter.get(request.request_id)
        here = own[1] if own else None
        if asked.adapter is None or asked.adapter == here:
            return
        name = request.lora_request.lora_name if request.lora_request else "none"
        text = (
            f"the prefill has computed with the LoRA adapter {asked.adapter}, and here the adapter "
            f"{name!r} is {here or 'no adapter'}: load the same files on both engines"
        )
        assert asked.xfer is not None and asked.peer is not None
        # The prefill holds its blocks under a hash that this engine does not have.
        self._client.decline(asked.xfer, EVERY_PROMPT, asked.peer, text)
        raise spray.ParamsError("lora_differs", text)

    def _adapter_here(self, request: Request) -> str:
        """Names the adapter of a refused request in the log: no process has the names of both
        engines."""
        own = self._adapter.get(request.request_id)
        if own is None or not request.lora_request:
            return ""
        return f"; its LoRA adapter {request.lora_request.lora_name!r} is {own[1]} here"

    def _decline(self, dest: Destination, reason: str) -> None:
        """No rank of this engine will fetch that prompt, so the prefill engine need not keep its
        blocks. Only for requests without an EXPECT, which a worker cancels itself. The scheduler's
        session sends it: one message for all ranks, also if vLLM steps no worker."""
        self._client.decline(dest.xfer, dest.hash, dest.peer, reason)

    def _decline_ranks(self, req: str, ranks: dict[int, str]) -> None:
        """The prefill engine keeps its blocks for the other ranks of the request, and for no longer
        than these need them. vLLM may pass on one rank's report twice."""
        dest, declined = self._loading.get(req), self._unasked.setdefault(req, set())
        new = sorted(ranks.keys() - declined)
        if dest is None:
            del self._unasked[req]
        elif new:
            declined.update(new)
            self._client.decline(
                dest.xfer,
                dest.hash,
                dest.peer,
                f"not loaded: {ranks[new[0]]}",
                asked=False,
                req=req,
                ranks=new,
            )

    def _refused(self, request: Request, given: dict[str, Any]) -> None:
        """A request that vLLM does not compute. The front end makes one request without a prompt in
        place of all prompts and samples that it refuses. A paused engine refuses each sample by
        itself, and may still compute earlier samples."""
        if request.prompt_token_ids in (None, [], [0]):
            self._decline_all(given, "refused by the engine's front end")
        elif given.get("do_remote_prefill"):
            self._decline_unasked(request, given, "the engine is paused")

    def _decline_all(self, given: dict[str, Any], reason: str) -> None:
        """The same for a request whose prompt is not known here: every prompt of its transfer, and
        every sample."""
        asked = spray.parse(given)
        if (
            given.get("do_remote_prefill")
            and not given.get("do_remote_decode")
            and asked
            and asked.xfer
            and asked.peer
        ):
            for _ in range(asked.fanout):
                self._client.decline(asked.xfer, EVERY_PROMPT, asked.peer, reason)

    def _compute_here(self, request: Request, label: str, text: str) -> None:
        """This request is prefilled locally."""
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False
        dest = self._destinations.pop(request.request_id, None)
        if dest is not None:
            self._decline(dest, text)
        self._pending.pop(request.request_id, None)
        self._reading.pop(request.request_id, None)
        self._stats.local(label)
        self._log.info(
            "kvspray: request %s is prefilled without a transfer: %s", request.request_id, text
        )

    # ---- decode: how much can come from elsewhere

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        tokens, aside = self._from_peer(request, computed)
        if (
            tokens != 0
            or self._store is None
            or self._disabled
            or request.request_id in self._destinations
        ):
            return tokens, aside
        tokens = self._store.matched(request, computed)
        return tokens, bool(tokens)

    def from_store(self, req: str) -> bool:
        return self._store is not None and self._store.loads(req)

    def _from_peer(self, request: Request, computed: int) -> tuple[int | None, bool]:
        if self._still_reading(request):
            return None, False
        dest = self._destinations.get(request.request_id)
        if dest is None:
            return 0, False
        dest.computed = computed
        missing = dest.tokens - computed
        if missing <= 0:
            return 0, False
        if not self._client.connected:
            self._compute_here(request, "no_sidecar", "the sidecar went away")
            return 0, False
        if dest.ready:
            return missing, True
        answer = self._client.admission(dest.xfer, dest.hash)
        if answer is not None and answer.state == "admitted":
            dest.ready = True
            return missing, True
        if answer is not None:
            why = f"{answer.state}: {answer.why or 'no reason given'}{self._adapter_here(request)}"
            self._compute_here(
                request, "prefill_" + answer.state, f"{dest.peer} was asked for the prefill, {why}"
            )
            return 0, False
        if self._now() - dest.asked > dest.wait:
            why = f"not admitted by the prefill within {dest.wait:g} s{self._adapter_here(request)}"
            self._compute_here(request, "admission_timeout", why)
            return 0, False
        # Blocks only once the prefill has admitted the request, or two full engines could wait for
        # each other for ever.
        return None, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        dest = self._destinations.pop(request.request_id, None)
        if dest is None:
            expect = (
                self._store.allocated(request, blocks.get_block_ids(), external)
                if self._store is not None
                else None
            )
            if expect is not None:
                self._meta.expects.append(expect)
                self._loading[request.request_id] = None
            return
        # A load is planned once: vLLM asks again after a failed load, after preemption, and after a
        # prompt of one token.
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False
        if external <= 0:
            if dest.computed < dest.tokens:
                self._stats.local("not_taken")
                self._log.info(
                    "kvspray: request %s is prefilled without a transfer: the engine takes none of "
                    "the %d tokens that were offered behind its own %d",
                    request.request_id,
                    dest.tokens - dest.computed,
                    dest.computed,
                )
            self._decline(dest, "the engine takes none of it")
            return
        # vLLM may take fewer tokens than it was offered, and leave out the last ones, such as those
        # behind a block's boundary. They begin behind what it had when it asked. More may be loaded
        # than it takes, into blocks of this request: it computes that part again.
        table = self._cut(blocks.get_block_ids(), dest.tokens)
        short = next(
            (g for g, size in enumerate(self._block_sizes) if len(table[g]) * size < dest.tokens),
            None,
        )
        refused = ""
        if short is not None:
            # The other side sends the whole prompt, and this part of it has no block here.
            refused = (
                f"the engine takes {external} tokens behind its own {dest.computed}, and group "
                f"{short} has {len(table[short])} blocks of {self._block_sizes[short]} for the "
                f"{dest.tokens} that are sent"
            )
            self._decline(dest, refused)
        else:
            # The load ends with the sidecar that has it. A query that outlived it would hold the
            # prefill's blocks for a request that is computed here.
            self._client.expected(dest.xfer, dest.hash)
        adapter = self._adapter.get(request.request_id)
        self._meta.expects.append(
            Expect(request.request_id, dest.xfer, dest.hash, dest.peer, dest.tokens, dest.computed,
            table, adapter, refused, traceparent=dest.traceparent,
            stall_s=self._patience.stall_s(dest.tokens - dest.computed),
            priority=spray.class_of(request.priority))
        )  # fmt: skip
        self._loading[request.request_id] = dest

    # ---- each step

    def build(
        self, out: SchedulerOutput, tables: Callable[[str], Sequence[Sequence[int]]]
    ) -> StepMeta:
        meta = self._meta
        self._cache.step += 1
        meta.number, meta.weights = self._cache.step, self._cache.changed
        self._measure(out)
        self._yield_holds(meta)
        for req in out.preempted_req_ids or ():
            self._patience.forget(req)
            if req in self._adapter:
                meta.gone.append(req)
            source = self._sources.get(req)
            if source is not None:
                # vLLM has given the blocks away already; the worker moves the source epoch before
                # this step computes.
                meta.preempts.append(req)
                source.end = 0
        for req, scheduled in out.num_scheduled_tokens.items():
            source = self._sources.get(req)
            if source is None:
                source = self._pending.pop(req, None)
                if source is None or self._other_cache(req, source):
                    continue
                self._sources[req] = source
                meta.intents.append(
                    Intent(req, source.xfer, source.hash, source.tokens, source.fanout,
                    self._cut(tables(req), source.tokens), self._adapter.get(req),
                    source.traceparent, source.request.num_computed_tokens)
                )  # fmt: skip
            elif not source.end and not source.lost and (why := self._other_cache(req, source)):
                # It was preempted.
                self._lose(req, source, why)
            if source.end >= source.tokens:
                # It decodes here, and its states and windows move on: vLLM may have reused blocks
                # that are being sent.
                if self._states and not source.lost:
                    self._lose(req, source, "its recurrent states have moved on")
                elif (
                    self._windows
                    and not source.lost
                    and self._oldest(source, tables(req)) != source.oldest
                ):
                    self._lose(
                        req, source, "a sliding window has moved on while the request decodes here"
                    )
                continue
            # vLLM counts this step's tokens as computed only after this call. An earlier request of
            # the same step may still compute blocks that this one hit in the prefix cache: they,
            # too, are ready only with this step's flags.
            end = min(source.request.num_computed_tokens + scheduled, source.tokens)
            if end > source.end and not source.lost:
                source.end = end
                table = tables(req)
                source.oldest = self._oldest(source, table) if end == source.tokens else ()
                meta.gains.append(Gain(req, end, self._cut(table, source.tokens)))
        if meta.gains:
            self._step += 1
            meta.step = self._step
        if self._store is not None:
            self._store.build(out, tables, meta)
        meta.idle = not out.total_num_scheduled_tokens
        self._meta = StepMeta()
        return meta

    def _other_cache(self, req: str, source: Source) -> str:
        """Why what vLLM has found in its prefix cache may not be of this prompt; empty: it is. Then
        the request is not offered."""
        if not source.request.num_computed_tokens or not (source.fresh or self._cache.mixed):
            return ""
        label, why = (
            "weights_replaced",
            "the weights have changed, and cached blocks may be of those before",
        )
        if source.fresh:
            label, why = (
                "lora_replaced",
                "its adapter was replaced in place, and cached blocks may be of the one before",
            )
        self._log.info("kvspray: request %s is not offered: %s", req, why)
        self._stats.local(label)
        return why

    def _measure(self, out: SchedulerOutput) -> None:
        now = self._now()
        self._patience.look(now)
        for new in out.scheduled_new_reqs:
            request = self._live.get(new.req_id)
            if request is not None:
                self._patience.begins(
                    new.req_id, request, request.num_prompt_tokens - new.num_computed_tokens, now
                )

    def _yield_holds(self, meta: StepMeta) -> None:
        if self._pool is None or not self._held:
            return
        low = LOW_POOL * self._pool.num_gpu_blocks
        free = self._pool.get_num_free_blocks()
        if free >= low:
            return
        old = self._now() - self._client.match_timeout_s
        for req, source in self._held.items():
            if source.held > old or free >= low:
                return
            free += source.blocks
            if not source.yielded:
                source.yielded = True
                meta.yields.append(req)

    def _oldest(self, source: Source, table: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return tuple(
            table[g][max(source.tokens - w + 1, 0) // self._block_sizes[g]]
            for g, w in self._windows
        )

    def _lose(self, req: str, source: Source, reason: str) -> None:
        source.lost = True
        self._meta.lost.append((req, reason))

    def reset(self) -> bool:
        """vLLM discards its caches because they are invalid (for example after other weights). So
        are the prompts that wait to be fetched. False: what the engine has saved is still there."""
        self._cache.reset()
        for req, source in self._sources.items():
            if not source.lost:
                self._lose(req, source, "the engine's caches were reset")
        return self._store is None

    def _cut(self, table: Iterable[Sequence[int]], tokens: int) -> Blocks:
        return tuple(
            tuple(group[: -(-tokens // size)])
            for group, size in zip(table, self._block_sizes, strict=True)
        )

    def worker_reported(
        self, sent: Iterable[str], received: Iterable[str], landed: Landed | None = None
    ) -> None:
        for req in sent:
            self._sources.pop(req, None)
            self._held.pop(req, None)
        if landed is not None:
            for req, ranks in landed.unasked.items():
                self._decline_ranks(req, ranks)
        for req in received:
            self._ending.discard(req)
            self._loading.pop(req, None)
            self._unasked.pop(req, None)
        if landed is not None and landed.changed:
            self._cache.weights_changed(landed.changed)
        if self._store is not None:
            self._store.reported(received, landed)
        if landed is None:
            return
        self._disabled = self._disabled or landed.disabled
        for id, content in landed.adapters.items():
            remember(self._worker_read, id, content)

    # ---- requests end

    def finished(
        self, request: Request, table: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends what the request has: a destination, a load, a source."""
        req, why = request.request_id, "request finished: " + request.status.name
        dest = self._destinations.pop(req, None)
        if dest is not None:
            self._decline(dest, why)
        self._pending.pop(req, None)
        self._live.pop(req, None)
        self._patience.ended(req, self._now())
        reading = self._reading.pop(req, None)
        if reading is not None:
            try:
                self._decline_unasked(request, reading[1], why)
            except Exception as err:
                # For example a prompt that cannot be hashed: no request may end the engine core.
                self._log.info("kvspray: request %s is not declined: %s", req, err)
        if self._adapter.pop(req, None):
            self._meta.gone.append(req)
        if self._store is not None:
            self._store.finished(request, table, req not in self._loading)
        source = self._sources.get(req)
        if req in self._loading:
            # vLLM keeps the blocks until the worker reports the end of the load; ask for that end
            # now.
            self._meta.load_cancels.append((req, why))
            self._ending.add(req)
            if source is not None:
                # It was preempted, so no other engine reads its blocks: the end of the load frees
                # them.
                del self._sources[req]
                self._meta.dropped.append((req, why))
            return False, None
        if source is None:
            return False, None
        source.finished = True
        self._meta.released.append(req)
        if source.lost:
            return True, None
        if request.status.name not in DELIVERED or source.end < source.tokens:
            self._meta.source_cancels.append((req, why))
            return True, None
        self._meta.holds.append(req)
        source.held, source.blocks = self._now(), sum(len(group) for group in table)
        self._held[req] = source
        peer = self._client.endpoint
        if not spray.is_endpoint(peer):
            return True, None
        assert peer is not None
        host, _, port = peer.rpartition(":")
        return True, {
            # The keys of NIXL's connector, so that its routers pass them on as they are.
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in self._cut(table, source.tokens)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": req,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": self._tp_size,
            "remote_num_tokens": source.tokens,
            "kvspray": spray.Spray(source.xfer, peer, source.fanout, source.adapter).encode(),
        }

    def pending_push_work(self) -> bool:
        return (
            bool(self._ending)
            or self._store is not None
            and self._store.busy
            or any(source.finished for source in self._sources.values())
        )

    def take_stats(self) -> KVSprayStats | None:
        if self._stats.is_empty():
            return None
        out, self._stats = self._stats, KVSprayStats()
        return out

    def close(self) -> None:
        self._client.close()
