"""The worker's side: turns a step's metadata into records, in an order that is safe, and
completions into results.

Everything runs on the worker's one thread. The leases themselves are owned by the shim, which
outlives sidecars.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvspray_vllm import shim
from kvspray_vllm.adapters import MAX_ADAPTERS, remember
from kvspray_vllm.meta import Adapter, Blocks, Expect, Intent, Landed, StepMeta
from kvspray_vllm.saving import Saving, count
from kvspray_vllm.signals import CpuSignals, Signals
from kvspray_vllm.stats import KVSprayStats

# How long a step in which the engine computes nothing waits for a load. vLLM sleeps a millisecond
# after each such step; the end of a load that came during the sleep would wait for it and for the
# next empty step. A new request waits this long at most. Not where the engine is one of several
# data parallel ranks in step: the others compute, and wait for this one's dummy batch.
LOAD_WAIT_S = 0.002
MAX_ENDED = 4096  # loads for an adapter whose requests still run, that are remembered

NO_SIGNALS = "the GPU's signals have failed: the engine's log has the first error"


@dataclass
class Results:
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    # Of those received: nothing that came can be used.
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)  # of others that were received in part


@dataclass
class _Source:
    lease: int | None  # None: over, or never given to a sidecar
    adapter: Adapter | None = None


@dataclass
class _Load:
    expect: Expect
    cancelled: bool = False
    outdated: str = ""  # why the engine cannot use what arrives

    def usable(self, lacks: int, block: int) -> int:
        """How many tokens the engine can go on from, in whole blocks, given that one of them
        lacks."""
        e = self.expect
        if self.outdated or not block or len(e.blocks) != 1 or not e.skip <= lacks < e.tokens:
            return 0
        return lacks // block * block

    def why(self, end: shim.Ended) -> str:
        """Why what came is not used."""
        return self.outdated or f"{shim.status_name(end.status)} ({end.reason})"


class WorkerSide:
    def __init__(
        self,
        client: shim.WorkerShim,
        log: logging.Logger,
        load_wait_s: float = LOAD_WAIT_S,
        resume_block: int = 0,
        rewinds: bool = True,
        rank: int = 0,
    ) -> None:
        """resume_block: how many tokens a block has, of an engine that can go on behind the last
        good block of a load that failed. 0: it cannot, because of what its layers look back to only
        the end of the prompt moves. rewinds: the engine can compute again what a running request
        was loaded with. rank: this worker's number among the engine's."""
        self._client = client
        self._log = log
        self._resume_block = resume_block
        self._rewinds = rewinds and resume_block > 0
        self._load_wait_s = load_wait_s
        self._rank = rank
        self._flags: dict[str, int] = {}
        self._signals: Signals = CpuSignals(client)
        self._sources: dict[str, _Source] = {}
        self._by_lease: dict[int, str] = {}
        self._loads: dict[str, _Load] = {}
        self._load_leases: dict[str, int] = {}
        self._released: set[str] = set()
        self._results = Results()
        self._stats = KVSprayStats()
        self._step = 0  # announced, and its end not signalled yet
        self._announced: list[int] = []  # the leases that gain tokens in it
        self._idle = False
        self._preempted: StepMeta | None = None
        self._begun: StepMeta | None = None
        self._landed = Landed()
        self._loaded_adapters: OrderedDict[int, str] = OrderedDict()  # content, by id
        # Loads for an adapter that have ended, until their requests do.
        self._ended: OrderedDict[str, Expect] = OrderedDict()
        self._disabled = ""  # why this engine takes part in no transfer
        self._outdated = False  # the weights have changed since the last step
        # Number of the first step with the present weights; 0: they are those of the start.
        self._weights = 0
        self._saving: Saving | None = None

    def set_saving(self, saving: Saving) -> None:
        """The engine uses the node's store."""
        self._saving = saving

    def set_flags(self, flags: dict[str, int], signals: Signals | None = None) -> None:
        """The flag of each layer, by the layer's name, and how flags are set: where nothing is
        given, as of a CPU engine."""
        self._flags = flags
        if signals is not None:
            self._signals = signals

    # ---- one engine step

    def preempts(self, meta: StepMeta) -> None:
        """Before the worker touches any block in this step: vLLM has already reused these
        blocks."""
        if self._preempted is meta:
            return
        self._preempted = meta
        self.forget(meta.gone)
        for req in meta.preempts:
            source = self._sources.get(req)
            if source is not None and source.lease is not None:
                self._client.preempt(source.lease)
        for req, reason in meta.lost:
            self._cancel_source(self._sources.get(req), reason)

    def begin(self, meta: StepMeta) -> None:
        """Before the forward pass, once or more often. A destination may be written as soon as its
        record is there and the engine's stream has passed the record's mark: until then steps in
        flight may still write blocks that this step's schedule has given to a load."""
        if self._begun is meta:
            return
        self._begun = meta
        if self._step:
            self.step_failed()  # its end would have come before this
        self.preempts(meta)
        self._idle = meta.idle
        if self._outdated:
            self._outdated, self._weights, self._landed.changed = False, meta.number, meta.number
        for req, reason in meta.load_cancels:
            self._cancel_load(req, reason)
        for req, reason in meta.source_cancels:
            self._cancel_source(self._sources.get(req), reason)
        for req, reason in meta.dropped:
            self._cancel_source(self._sources.pop(req, None), reason)
        for req in meta.holds:
            source = self._sources.get(req)
            if source is not None and source.lease is not None:
                self._client.hold(source.lease)
        for req in meta.yields:
            source = self._sources.get(req)
            if source is not None and source.lease is not None:
                self._client.yield_hold(source.lease)
        self._released.update(meta.released)
        for intent in meta.intents:
            lease: int | None = None
            try:
                if (
                    other := self._disabled
                    or self._other_adapter(intent.adapter)
                    or self._other_weights(intent, meta)
                ):
                    raise shim.ShimError(other)
                lease = self._client.intent(
                    intent.xfer,
                    intent.hash,
                    intent.tokens,
                    intent.blocks,
                    intent.fanout,
                    intent.req,
                    intent.traceparent,
                )
                self._by_lease[lease] = intent.req
            except shim.ShimError as err:
                self._log.warning(
                    "kvspray: request %s cannot be offered to another engine: %s", intent.req, err
                )
                self._stats.ended(False, "unsubmitted", 0, 0, "", 0)
            self._sources[intent.req] = _Source(lease, intent.adapter)
        if meta.gains:
            gains = []
            for gain in meta.gains:
                source = self._sources.get(gain.req)
                if source is not None and source.lease is not None:
                    gains.append((source.lease, gain.end, gain.blocks))
            if gains:
                self._signals.begin(meta.step)
            if gains and not self._signals.ok:
                self._give_up(gains, NO_SIGNALS)
                self.stop_transfers(NO_SIGNALS)
            elif gains:
                try:
                    self._client.step(meta.step, gains)
                    self._step = meta.step
                    self._announced = [lease for lease, _, _ in gains]
                except shim.ShimError as err:
                    # Without this record the other side would wait for layers that are never
                    # announced.
                    self._log.warning("kvspray: step %d cannot be announced: %s", meta.step, err)
                    self._give_up(gains, "step not announced")
        after: int | None = 0
        if meta.expects or meta.puts:
            # Steps in flight may still write to blocks that the engine has given to these loads,
            # and compute those that are put.
            after = self._signals.mark()
            if after is None:
                self.stop_transfers(NO_SIGNALS)
        if self._saving is not None:
            self._saving.begin(meta, after, self._landed, self._stats, self._disabled)
        for expect in meta.expects:
            self._expect(expect, after)

    def _give_up(self, gains: Sequence[tuple[int, int, Blocks]], reason: str) -> None:
        for lease, _, _ in gains:
            self._client.cancel(lease, reason)

    def _expect(self, expect: Expect, after: int | None) -> None:
        load = self._loads[expect.req] = _Load(expect)
        if refused := expect.refused or self._disabled:
            self._unasked(expect, refused)
            self._loaded(expect.req, shim.Ended(0, True, shim.REFUSED, 0, 0, "", refused))
            return
        try:
            if after is None:
                raise shim.ShimError(NO_SIGNALS)
            if expect.pages and self._saving is not None:
                lease = self._saving.get(expect, after)
            else:
                lease = self._client.expect(
                    expect.xfer,
                    expect.hash,
                    expect.peer,
                    expect.tokens,
                    expect.skip,
                    expect.blocks,
                    expect.req,
                    after,
                    expect.traceparent,
                    expect.stall_s,
                    expect.priority,
                )
        except shim.ShimError as err:
            # Nothing was handed out, so there is nothing to fence.
            self._log.warning("kvspray: request %s is recomputed: %s", expect.req, err)
            self._unasked(expect, str(err))
            self._loaded(expect.req, shim.Ended(0, True, shim.LOST, 0, 0, "", "no sidecar"))
            return
        self._by_lease[lease] = expect.req
        self._load_leases[expect.req] = lease
        if unread := self._unread(expect.adapter):
            # Cancelled once it is there, so that the other engine is informed at once.
            load.outdated = unread
            self._client.cancel(lease, unread)

    def _unasked(self, expect: Expect, why: str) -> None:
        """No sidecar gets this load, so none informs the other engine: the scheduler does. For a
        load that it refused itself it already has."""
        if not expect.pages and not expect.refused:
            self._landed.unasked[expect.req] = {self._rank: why}

    def _unread(self, adapter: Adapter | None) -> str:
        """Why nothing is loaded for a prompt with this adapter; empty: vLLM has read it. vLLM reads
        an adapter in the first step that computes with it, which is after the load, and would
        compute on the load whatever the files are by then."""
        if adapter is None or adapter[0] in self._loaded_adapters:
            return self._other_adapter(adapter)
        return (
            f"adapter {adapter[0]} is not loaded in this engine yet: its first prompt is computed "
            "here; load adapters before requests name them (--lora-modules, /v1/load_lora_adapter)"
        )

    def _other_adapter(self, adapter: Adapter | None) -> str:
        """Why KV of a prompt with this adapter does not match its hash; empty: it does."""
        if adapter is None or self._loaded_adapters.get(adapter[0], adapter[1]) == adapter[1]:
            return ""
        loaded = self._loaded_adapters[adapter[0]] or "unknown content"
        return (
            f"adapter {adapter[0]} was loaded from other files: {loaded}, the request was hashed "
            f"with {adapter[1]}"
        )

    def _other_weights(self, intent: Intent, meta: StepMeta) -> str:
        """Why the request's blocks may be of other weights; empty: they are not. The scheduler
        excludes them once it has the report of the change."""
        if not intent.cached or meta.weights >= self._weights:
            return ""
        return "the weights have changed, and cached blocks may be of those before"

    def adapter_loaded(self, id: int, content: str) -> None:
        """vLLM has read an adapter, before the first layer that is computed with it."""
        remember(self._loaded_adapters, id, content)
        # Of one step; the scheduler treats the others as unread.
        if len(self._landed.adapters) < MAX_ADAPTERS:
            self._landed.adapters[id] = content
        for source in self._sources.values():
            if source.lease is not None and (other := self._other_adapter(source.adapter)):
                self._client.cancel(source.lease, other)
        for load in self._loads.values():
            load.outdated = load.outdated or self._other_adapter(load.expect.adapter)
        for req, expect in list(self._ended.items()):
            if other := self._other_adapter(expect.adapter):
                # The engine reads an adapter again that it had given up: the step that begins
                # computes on what was loaded.
                del self._ended[req]
                self._take_back(expect, other)

    def _keep(self, expect: Expect) -> None:
        self._ended[expect.req] = expect
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _take_back(self, expect: Expect, why: str) -> None:
        if self._rewinds:
            first = expect.skip // self._resume_block
            self._results.bad_blocks.update(expect.blocks[0][first:])
        self._log.error(
            "kvspray: request %s: what was loaded for it is of another adapter: %s; %s",
            expect.req,
            why,
            "it is computed again"
            if self._rewinds
            else (
                "this engine cannot compute it again: send the request once more, and raise "
                "--max-cpu-loras, so that vLLM keeps adapters that are in use"
            ),
        )

    def forget(self, gone: Iterable[str]) -> None:
        """Requests whose blocks the engine has taken back, and may have given to others."""
        for req in gone if self._ended else ():
            self._ended.pop(req, None)

    def _cancel_load(self, req: str, reason: str) -> None:
        load = self._loads.get(req)
        if load is not None:
            load.cancelled = True
            self._client.cancel(self._load_leases[req], reason)

    def _cancel_source(self, source: _Source | None, reason: str) -> None:
        if source is not None and source.lease is not None:
            self._client.cancel(source.lease, reason)

    @property
    def signals(self) -> bool:
        """Whether the layers of this step are signalled."""
        return self._step != 0

    def layer_done(self, name: str) -> None:
        if self._step:
            flag = self._flags.get(name)
            if flag is not None:
                self._signals.layer(flag, self._step)

    def capturing(self) -> bool:
        """Whether the engine records a graph now. Its layers are then signalled in each replay."""
        return self._signals.capturing()

    def layer_captured(self, name: str) -> None:
        flag = self._flags.get(name)
        if flag is not None:
            self._signals.layer(flag, 0)

    def step_done(self) -> None:
        if self._step:
            self._signals.end(self._step)
            if not self._signals.ok:
                self.step_failed(NO_SIGNALS)
            self._step = 0

    def step_failed(self, reason: str = "the forward pass failed") -> None:
        """The forward pass raised: what this step announced was not computed. Its flags do not
        come, but those of a later step would be taken for them, should the engine go on: the leases
        end."""
        if self._step:
            for lease in self._announced:
                self._client.cancel(lease, reason)
            self._step = 0

    # ---- what ended

    def collect(self) -> Results:
        if (
            self._idle
            and self._load_leases
            and self._load_wait_s > 0
            and not self._results.received
        ):
            self._client.wait(self._load_wait_s)
        self._drain()
        # vLLM frees the blocks of what is reported here, and accepts only requests that it has
        # reported as finished.
        for req in list(self._released):
            source = self._sources.get(req)
            if source is None or source.lease is None:
                self._released.discard(req)
                self._sources.pop(req, None)
                self._results.sent.add(req)
        out, self._results = self._results, Results()
        return out

    def _drain(self) -> None:
        for end in self._client.poll():
            if self._saving is not None and self._saving.ended(end, self._landed, self._stats):
                continue
            req = self._by_lease.pop(end.lease, None)
            if req is None:
                continue
            if end.received:
                self._load_leases.pop(req, None)
                self._loaded(req, end)
            else:
                self._stats.ended(
                    False, shim.status_name(end.status), end.bytes, end.us, end.transport, 0
                )
                source = self._sources.get(req)
                # Else the engine has used the request's name again.
                if source is not None and source.lease == end.lease:
                    source.lease = None
                if end.status != shim.OK:
                    adapter = source.adapter if source is not None else None
                    self._log.info(
                        "kvspray: request %s was not delivered: %s (%s)%s", req,
                        shim.status_name(end.status), end.reason,
                        f"; its LoRA adapter is {adapter[1]} here" if adapter else "",
                    )  # fmt: skip

    def stop_transfers(self, reason: str) -> None:
        """This worker takes part in no transfer any more."""
        self._landed.disabled = reason

    def take_landed(self) -> Landed | None:
        out, self._landed = self._landed, Landed()
        return None if out == Landed() else out

    def _loaded(self, req: str, end: shim.Ended) -> None:
        load = self._loads.pop(req)
        self._results.received.add(req)
        if load.expect.pages:
            self._loaded_pages(req, load, end)
            return
        if (
            end.status == shim.OK
            and not (load.outdated or load.cancelled)
            and load.expect.adapter is not None
        ):
            self._keep(load.expect)
        recomputed = 0
        # One that was complete before the weights changed, and is seen only now, is no better than
        # one that ends now.
        if (end.status != shim.OK or load.outdated) and not load.cancelled:
            recomputed = self._failed(req, load, end)
        self._stats.ended(
            True, shim.status_name(end.status), end.bytes, end.us, end.transport, recomputed
        )

    def _loaded_pages(self, req: str, load: _Load, end: shim.Ended) -> None:
        """A load from the store. Pages behind the first one that is not there are of no use."""
        pages = load.expect.pages
        outcomes = count(self._stats, "get", end, len(pages))
        hits = shim.leading_hits(end.pages) if outcomes else 0
        if hits < len(pages):
            self._landed.lacked.add(req)
            reason = end.reason or (
                f"page {hits} of {len(pages)}: {outcomes[hits]}" if outcomes else ""
            )
            end = replace(
                end,
                status=end.status or shim.FAILED,
                reason=reason,
                lacks=load.expect.skip + hits * self._resume_block,
            )
        if (hits < len(pages) or load.outdated) and not load.cancelled:
            self._stats.recomputed(self._failed(req, load, end))

    def _failed(self, req: str, load: _Load, end: shim.Ended) -> int:
        """Returns how many tokens the engine has to compute."""
        expect = load.expect
        usable = load.usable(end.lacks, self._resume_block)
        first = max(usable, expect.skip)
        blocks = expect.blocks[0][first // self._resume_block :] if self._resume_block else ()
        if usable:
            self._results.bad_blocks.update(blocks)
        else:
            self._results.failed.add(req)
        self._log.warning(
            "kvspray: request %s is recomputed from token %d of %d: %s",
            req,
            first,
            expect.tokens,
            load.why(end),
        )
        return expect.tokens - first

    def outdate(self, why: str = "the weights have changed") -> None:
        """What the cache holds must not be used any more, nor what has arrived of open loads."""
        for load in self._loads.values():
            load.outdated = load.outdated or why
        self._outdated = True

    def leave(self, why: str) -> None:
        """Takes part in no transfer from now on. Open leases are released, and end like cancelled
        ones: once no process can read or write their blocks."""
        self._disabled = why
        for source in self._sources.values():
            if source.lease is not None:
                self._client.cancel(source.lease, why)
        for lease in self._load_leases.values():
            self._client.cancel(lease, why)

    def rejoin(self) -> None:
        self._disabled = ""

    def take_stats(self) -> KVSprayStats | None:
        if self._stats.is_empty():
            return None
        out, self._stats = self._stats, KVSprayStats()
        return out

    def close(self) -> None:
        self._signals.close()
        self._client.close()
