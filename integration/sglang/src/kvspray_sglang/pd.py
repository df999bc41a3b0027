"""``--disaggregation-transfer-backend kvspray``: prefill and decode of SGLang through sidecars.

SGLang's own classes do all that is not the transfer: bootstrap server, ranks, timeouts, status of
requests. Here are the transfers:

    decode: send_metadata    ROOM ->   prefill: source leases (INTENT)
    decode: EXPECT          <- PEER    prefill: init
                                       prefill: each chunk of the prompt is a STEP
    sidecars move the pages of a chunk while the next one computes
    decode: end of EXPECT   <- ROWS    prefill: after the last chunk
    decode: success         DONE ->    prefill: success

Pages of the prompt's tokens are one part of a request. Each component of its state (a sliding
window, the keys of an indexer, recurrent states) is another part, with a session and a lease of its
own: SGLang lists its blocks with the last chunk. Entry i of prefill's list goes to entry i of
decode's.

A request is a Success at decode when the sidecar has proved that all parts are there, and the rows
have come. At prefill it is one when its sidecar reports that, or after DONE: a sidecar that dies
before the report leaves a lease that the next one offers again, and no decode asks for it.

SGLang keeps the blocks of a request that fails until ``is_abort_release_safe`` is true: all leases
have ended, whatever prefill reports.

Threads: the scheduler's; one that takes messages; one that takes the ends of leases; at prefill one
that reports chunks. ``_lock`` guards ``_rooms``; it is held for a few assignments, and for calls to
the session, which do not wait. ``_status_lock`` makes changes of a status atomic, as several
threads make them. It is taken after ``_lock``, never before.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import sglang
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.common.utils import AuxDataCodec
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.network import NetworkAddress

import kvspray
from kvspray_sglang import names, pd_cache, pd_checks, pd_prompt, pd_wire
from kvspray_sglang.pd_session import MAX_PAGES, Session
from kvspray_sglang.settings import Settings

SOCKET_ENV = "KVSPRAY_SGLANG_SOCKET"
WEIGHTS_ENV = "KVSPRAY_SGLANG_WEIGHTS"
IDENTITY_ENV = "KVSPRAY_SGLANG_IDENTITY"
MAX_UNCLAIMED = 4096  # rooms that decode has asked for and the router has not
MAX_GIVEN_UP = 4096  # rooms that prefill has given up, and remembers
MAX_EARLY = 4096  # rooms that decode asks for while an earlier request has their number
REPORT_S = 1.0  # prefill waits so long for its sidecar's report after decode's DONE
DONE_S = 10.0  # and so long for DONE after a lease that failed
MAX_REUSED = 1 << 16  # rooms whose number of uses is remembered
STATE_DEADLINE_S = 600.0  # between sidecars a longer one is shortened to this

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """What moves under a lease of its own."""

    name: str  # "": pages of tokens; else a component of SGLang's
    session: Session
    block_tokens: int
    own: str = ""  # the rank, if only ranks of the same number exchange it

    def xfer(self, request: bytes) -> bytes:
        """The transfer's id. ``request``: that of the pages."""
        if not self.name:
            return request
        name = f"/{self.name}/{self.own}".encode()
        return hashlib.sha256(request + name).digest()[: pd_wire.XFER_BYTES]


@dataclass
class _Offer:
    """A part of a request at prefill."""

    part: _Part
    blocks: int
    tokens: int
    lease: int = 0
    table: list[int] = field(default_factory=list)
    cancelled: bool = False  # as decode has it
    ended: bool = False
    whole: bool = False  # ended well


@dataclass
class _Source:
    """A request at prefill."""

    room: int
    xfer: bytes
    targets: list[tuple[str, int]]
    offers: dict[str, _Offer]
    rows: bool = False  # sent, after the last chunk
    done_at: float = 0.0  # when decode had all of it
    problem: str = ""  # a lease has failed
    failed_at: float = 0.0


@dataclass
class _Arrival:
    """A request at decode."""

    room: int
    xfer: bytes
    blocks: dict[str, list[int]]  # of each part
    row: int
    prefix: int
    request: Any = None  # SGLang's, and its metadata buffers: for a prefill that is no SGLang
    buffers: Any = None
    peer: bool = False  # prefill has named its sidecar
    leases: dict[str, int] = field(default_factory=dict)  # open, by part
    here: set[str] = field(default_factory=set)  # parts that have arrived
    given_up: bool = False
    rows: tuple[bytes, ...] | None = None
    done: bool = False


@dataclass
class _Chunk:
    room: int
    pages: Sequence[int]
    last: bool
    row: int | None
    events: tuple[Any, ...]
    source: _Source | None
    states: Sequence[list[int]] = ()  # blocks of each component, with the last chunk


class KVSprayManager(CommonKVManager):  # type: ignore[misc]
    kv_status_msg_tag = b"KVSPRAY_STATUS"
    kv_status_msg_carries_reason = True
    # The fence of the sidecar ends a hold.
    supports_deferred_decode_kv_release = True
    enable_trace = False  # of Mooncake's sender

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        if disaggregation_mode == DisaggregationMode.DECODE:
            pd_checks.holding()
        parallel = get_parallel()
        # is_mla_backend does not show MLA beside recurrent layers.
        is_mla = bool(is_mla_backend) or bool(getattr(args, "is_hybrid_mla_backend", False))
        pd_cache.check(args, is_mla, parallel.pp_size, pd_checks.has_indexer(server_args))
        pd_checks.serving(server_args, parallel, is_mla)
        names.check_adapters(server_args)
        self._weights = names.Weights(
            Settings(weights=os.environ.get(WEIGHTS_ENV, "")), server_args, _log,
            f"set {WEIGHTS_ENV} to a name for them",
        )  # fmt: skip
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if self.defer_decode_allocation:
            raise pd_cache.CacheError(
                "kvspray: --disaggregation-decode-allocation-policy is prefill_complete, and "
                "kvspray moves pages while prefill computes; set it to early"
            )
        # Without it pages of a request that fails would be used again at once.
        self.enable_deferred_decode_kv_release = True
        self._no_rooms()
        self._engine = self._engine_id()
        # The pages first, then the components in SGLang's order.
        self._parts = self._open(server_args, is_mla)
        loops = [self._messages]
        if disaggregation_mode == DisaggregationMode.PREFILL:
            loops.append(self._report)
        else:
            self._start_heartbeat_checker_thread()
        for loop in loops:
            threading.Thread(target=loop, name=f"kvspray{loop.__name__}", daemon=True).start()

    def _no_rooms(self) -> None:
        """The state of a manager without a request."""
        self._lock, self._status_lock = threading.Lock(), threading.Lock()
        self._senders: dict[int, KVSpraySender] = {}  # that have a room
        self._rooms: dict[int, Any] = {}  # _Source or _Arrival
        self._unclaimed: OrderedDict[int, None] = OrderedDict()
        self._given_up: OrderedDict[int, float] = OrderedDict()  # when
        self._early: OrderedDict[int, dict[tuple[str, int], pd_wire.Room]] = OrderedDict()
        self._uses: OrderedDict[tuple[str, int], int] = OrderedDict()
        # Open leases at decode, by room: they outlive the room where SGLang forgets it first.
        self._writers: dict[int, int] = {}
        self._settle: Callable[[], None] = lambda: None
        self._chunks: queue.SimpleQueue[_Chunk] = queue.SimpleQueue()

    def _open(self, server_args: Any, is_mla: bool) -> list[_Part]:
        import torch

        args, rank, size = self.kv_args, self.attn_tp_rank, self.attn_tp_size
        config = pd_checks.model_config(server_args)
        heads = windows = None
        if not is_mla:
            heads = windows = pd_cache.Heads(int(config.get_total_num_kv_heads()), rank, size)
            if getattr(config, "is_hybrid_swa_compress", False):
                total = getattr(config.hf_text_config, "swa_num_key_value_heads", heads.total)
                windows = pd_cache.Heads(int(total), rank, size)
        on_gpu = torch.cuda.is_available() and getattr(server_args, "device", "") != "cpu"
        if on_gpu:
            self._settle = lambda: torch.cuda.synchronize(int(args.gpu_id))
        cache = pd_cache.describe(args, heads, on_gpu)
        states = pd_cache.states(args, windows, on_gpu)
        per_token = args.kv_item_lens[0] // args.page_size
        dtype = str(args.kv_cache_dtype_str)
        kind = os.environ.get(IDENTITY_ENV, "")
        if kind not in ("", "portable"):
            raise pd_cache.CacheError(
                f"kvspray: {IDENTITY_ENV} is {kind!r}, want portable, or none"
            )
        if kind and states:
            raise pd_cache.CacheError(
                f"kvspray: {IDENTITY_ENV} is {kind!r}, and the model has states beside its pages "
                f"({', '.join(s.name for s in states)}), which another kind of engine stores "
                f"differently; unset {IDENTITY_ENV}"
            )
        if kind:
            dtype, identity = names.portable_identity(
                server_args, self._weights.name, dtype, is_mla, config
            )
        else:
            identity = pd_cache.identity(
                self._weights.name,
                {"numerics": names.numerics(), **names.arguments(server_args)},
                len(args.kv_data_ptrs) // (2 if heads else 1),
                per_token // (heads.own if heads else 1),
            )
        timeout = getattr(self, "waiting_timeout", None) or self.bootstrap_timeout
        socket = os.environ.get(SOCKET_ENV) or None

        def part(
            name: str, cache: pd_cache.Cache, identity: dict[str, str], own: str = ""
        ) -> _Part:
            id = "-".join(x for x in (self._engine, name, own) if x)
            engine = kvspray.EngineInfo("sglang", sglang.__version__, id)
            ranks = kvspray.Ranks(tp=(0, 1) if own else (rank, size))
            layout = cache.layout(dtype, identity)
            # The engine reports nothing about a state between its offer and the last chunk.
            span = max(timeout, STATE_DEADLINE_S) if name else timeout
            session = Session(socket, engine, ranks, cache, layout, span, _log)
            return _Part(name, session, cache.page_tokens, own)

        parts = [part("", cache, identity)]
        for s in states:
            compared = pd_cache.state_identity(
                identity, args, s, rank, size, pd_checks.packing(server_args)
            )
            parts.append(part(s.name, s.cache, compared, f"rank{rank}" if s.own else ""))
        _log.info(
            "kvspray: %s of %d pages of %d tokens, tensor parallel rank %d of %d%s",
            self.disaggregation_mode.value, cache.pages, cache.page_tokens, rank, size,
            "".join(f", {s.name} in {s.cache.pages} blocks" for s in states),
        )  # fmt: skip
        return parts

    def _engine_id(self) -> str:
        """One name for all ranks that divide the heads of one engine."""
        own = secrets.token_hex(8)
        if self.attn_tp_size == 1:
            return own
        return str(get_parallel().attn_tp_group.broadcast_object(own, src=0))

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        with self._status_lock:
            super().update_status(bootstrap_room, status)

    # ---- messages of other ranks

    def _messages(self) -> None:
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        while True:
            frames = self.server_socket.recv_multipart()
            try:
                if prefill and frames[0] == ABORT_TAG:
                    self._aborted(frames)
                    continue
                if not prefill and (status := self.parse_kv_status_message(frames)):
                    room, value, rank, reason = status
                    self.apply_prefill_status(
                        bootstrap_room=room, status=value, prefill_rank=rank, failure_reason=reason
                    )
                    continue
                message = pd_wire.decode(frames)
                if prefill and isinstance(message, pd_wire.Room):
                    self._asked(message)
                elif prefill and isinstance(message, pd_wire.Done):
                    self._done(message)
                elif not prefill and isinstance(message, pd_wire.Peer):
                    self._peer(message)
                elif not prefill and isinstance(message, pd_wire.Rows):
                    self._rows(message)
                elif not prefill and isinstance(message, pd_wire.First):
                    self._first(message)
            except Exception as err:  # what comes from another host ends nothing here
                _log.warning("kvspray: a message of another rank is dropped: %s", err)

    def _send(self, to: tuple[str, int], frames: list[bytes]) -> None:
        address = NetworkAddress(*to)
        self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)

    # ---- prefill

    def _asked(self, m: pd_wire.Room) -> None:
        """A decode rank waits for a room."""
        with self._lock:
            waits = self._register(m)
        if not waits:  # decode would hold its pages until SGLang's timeout
            self._tell_failed([m])

    def _register(self, m: pd_wire.Room) -> bool:
        """False: the request has failed here. Its abort may come before decode asks for it."""
        current = self.request_status.get(m.room)
        since = self._given_up.get(m.room)
        if current == KVPoll.Failed or (
            current is None and since and time.monotonic() - since < self.bootstrap_timeout
        ):
            return False
        infos = self.transfer_infos.setdefault(m.room, {})
        if current not in (None, KVPoll.Bootstrapping):
            if all(i.asked.xfer != m.xfer for i in infos.values()):
                # The next request with this number: decode may compute one again.
                self._early.setdefault(m.room, {})[m.host, m.port] = m
                while len(self._early) > MAX_EARLY:
                    self._early.popitem(last=False)
            return True
        infos[m.host, m.port] = _Info(m)
        if current is None:
            self._unclaimed[m.room] = None
            while len(self._unclaimed) > MAX_UNCLAIMED:
                old, _ = self._unclaimed.popitem(last=False)
                self.transfer_infos.pop(old, None)
                self.req_to_decode_prefix_len.pop(old, None)
                self.request_status.pop(old, None)
                self.failure_records.pop(old, None)
        if len(infos) < m.ranks:
            return True
        self.resolve_kv_replica_factor(infos)
        self.req_to_decode_prefix_len[m.room] = m.prefix
        self.update_status(m.room, KVPoll.WaitingForInput)
        return True

    def claim(self, room: int, sender: KVSpraySender) -> bool:
        """The router has sent the request. False: an earlier request has the room."""
        with self._lock:
            if self._senders.setdefault(room, sender) is not sender:
                return False
            self._given_up.pop(room, None)
            self._unclaimed.pop(room, None)
            return True

    def forget_source(
        self, room: int, sender: KVSpraySender, success: bool, forget: Callable[[], None]
    ) -> None:
        """The sender's request has ended. ``forget`` is SGLang's own part of that."""
        with self._lock:
            if self._senders.get(room) is not sender:
                return
            del self._senders[room]
            early = self._early.pop(room, {})
            if not success and not early:
                self._give_up(room)
            with self._status_lock:
                forget()
        for m in early.values():
            self._asked(m)

    def refuse(self, room: int) -> None:
        """SGLang refuses the request before it has a sender."""
        with self._lock:
            asked = list(self._early.pop(room, {}).values())
            if room not in self._senders:  # else an earlier request has the room, and goes on
                self._give_up(room)
                asked += [i.asked for i in self.transfer_infos.pop(room, {}).values()]
                for kept in (
                    self._unclaimed, self.request_status, self.req_to_decode_prefix_len,
                    self.failure_records,
                ):  # fmt: skip
                    kept.pop(room, None)
        self._tell_failed(asked)

    def _tell_failed(self, asked: Sequence[pd_wire.Room]) -> None:
        for m in asked:
            self.send_kv_status_message(
                targets=[(m.host, m.port)], bootstrap_room=m.room, status=KVPoll.Failed,
                failure_reason="kvspray: prefill has given the request up",
            )  # fmt: skip

    def _give_up(self, room: int) -> None:
        """A decode rank may ask for the room later."""
        self._given_up[room] = time.monotonic()
        self._given_up.move_to_end(room)
        while len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    def open_source(self, room: int, pages: int, request: Any = None) -> None:
        """Prefill is about to compute the prompt. ``pages``: how many of it move."""
        infos = [i.asked for i in self.transfer_infos.get(room, {}).values()]
        problem = self._refuse(infos, pages)
        prompt: pd_prompt.Prompt | None = None
        if not problem and any(m.by_prompt for m in infos):
            prompt = pd_prompt.of(request, infos[0].prefix, pages, self.kv_args.page_size)
            problem = prompt.problem
        if not problem:
            s = _Source(room, infos[0].xfer, [(m.host, m.port) for m in infos], {})
            with self._lock:
                self._rooms[room] = s
                for part in self._parts:
                    if problem := self._offer(s, part, pages, infos[0], prompt):
                        break
            endpoint = self._parts[0].session.endpoint
            if s.offers and not problem and not endpoint:
                problem = self._no_sidecar(self._parts[0])
        if problem:
            self.conclude_failure(bootstrap_room=room, failure_reason=f"kvspray: {problem}")
            return
        for to in s.targets:
            self._send(to, pd_wire.Peer(room, s.xfer, endpoint).encode())

    def _offer(
        self, s: _Source, part: _Part, pages: int, asked: pd_wire.Room,
        prompt: pd_prompt.Prompt | None,
    ) -> str:  # fmt: skip
        blocks = asked.states.get(part.name, 0) if part.name else pages
        if not blocks:
            return ""
        if problem := _too_long(blocks):
            return problem
        o = _Offer(part, blocks, blocks * part.block_tokens)
        name = b""
        if prompt is not None:
            o.tokens, name = prompt.tokens, prompt.hash
        end = functools.partial(self._sent, s, o)
        try:
            o.lease = part.session.source(part.xfer(s.xfer), o.tokens, str(s.room), end, name)
        except ValueError as err:
            return str(err)
        if not o.lease:
            return self._no_sidecar(part)
        s.offers[part.name] = o
        return ""

    @staticmethod
    def _no_sidecar(part: _Part) -> str:
        return part.session.problem or "the sidecar takes no transfer now"

    def _refuse(self, infos: list[pd_wire.Room], pages: int) -> str:
        if not infos:
            return "no decode rank has asked for the request"
        if len({m.xfer for m in infos}) > 1:
            return "decode ranks ask for different transfers"
        if any(m.pages != pages for m in infos):
            return f"decode waits for {infos[0].pages} pages, and prefill sends {pages}"
        if len({tuple(sorted(m.states.items())) for m in infos}) > 1:
            return "decode ranks ask for different states"
        if len(self._parts) > 1 and any(m.by_prompt for m in infos):
            return "the model has states beside its pages, which only SGLang can exchange"
        known = {p.name for p in self._parts}
        if other := sorted({name for m in infos for name in m.states} - known):
            return (
                f"decode waits for {', '.join(other)}, which prefill does not have: start both "
                "servers with the same model and options"
            )
        return self._stale()

    def _stale(self) -> str:
        if self._weights.current:
            return ""
        return (
            "SGLang has replaced its weights, and the name that prefill and decode compare is that "
            "of the old ones: restart both servers"
        )

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """SGLang's senders call this with each chunk of a prompt that is computed."""
        self.update_status(bootstrap_room, KVPoll.Transferring)
        events = tuple(e for e in (wait_event, indices_event) if e is not None)
        # Copied here: some of SGLang's lists are views of memory that the next step changes.
        states = [_flat(x) for x in state_indices or ()] if is_last_chunk else []
        source = self._rooms.get(bootstrap_room)
        self._chunks.put(
            _Chunk(bootstrap_room, kv_indices, is_last_chunk, aux_index, events, source, states)
        )

    def _report(self) -> None:
        while True:
            chunk = self._chunks.get()
            try:
                for event in chunk.events:
                    event.synchronize()
                self._chunk(chunk)
            except Exception as err:
                _log.exception("kvspray: room %s", chunk.room)
                self.conclude_failure(bootstrap_room=chunk.room, failure_reason=f"kvspray: {err}")

    def _chunk(self, chunk: _Chunk) -> None:
        problem = self._stale()  # new weights may have computed the chunk
        blocks = {"": [int(p) for p in chunk.pages]}
        if chunk.last:
            try:
                blocks |= self._state_blocks(chunk.states)
            except ValueError as err:
                problem = problem or str(err)
        rows = self._own_rows(chunk.row) if chunk.last and chunk.row is not None else None
        with self._lock:
            over = self._rooms.get(chunk.room) is not chunk.source
            s = chunk.source
            if s is None or over:
                return
            if self.request_status.get(chunk.room) in (None, KVPoll.Failed):
                return
            problem = problem or self._report_blocks(s, blocks, chunk.last)
        if problem:
            self.conclude_failure(bootstrap_room=chunk.room, failure_reason=f"kvspray: {problem}")
            self.close_source(chunk.room, None, problem)
        elif rows is not None:
            for to in s.targets:
                self._send(to, pd_wire.Rows(s.room, s.xfer, rows).encode())
            s.rows = True
            self._whole(s)

    def _report_blocks(self, s: _Source, blocks: dict[str, list[int]], last: bool) -> str:
        """Reports the request's next blocks. Returns an error if decode waits for others."""
        for part in self._parts[1:] if last else ():
            n, o = len(blocks.get(part.name, [])), s.offers.get(part.name)
            if n != (o.blocks if o else 0):
                return (
                    f"decode waits for {o.blocks if o else 0} blocks of {part.name}, and prefill "
                    f"has {n}: start both servers with the same model and options"
                )
        for o in s.offers.values():
            own = blocks.get(o.part.name, [])
            o.table += own
            if own and not o.ended:
                done = min(len(o.table) * o.part.block_tokens, o.tokens)
                if not o.part.session.progress(o.lease, done, o.table):
                    return (
                        "the sidecar does not accept the prompt's pages: "
                        f"{self._no_sidecar(o.part)}"
                    )
        return ""

    def _state_blocks(self, lists: Sequence[Any]) -> dict[str, list[int]]:
        """SGLang's lists of blocks, by component. Raises ValueError if they do not fit."""
        parts = self._parts[1:]
        if len(lists) != len(parts):
            raise ValueError(f"SGLang lists blocks of {len(lists)} states, want {len(parts)}")
        out = {p.name: list(x) for p, x in zip(parts, lists, strict=True)}
        if len(out.get("mamba", [0])) != 1:
            raise ValueError(f"a recurrent state in {len(out['mamba'])} slots, want 1")
        return out

    def _own_rows(self, row: int) -> tuple[bytes, ...]:
        a = self.kv_args
        return tuple(
            AuxDataCodec.serialize_data_from_buffer(ptr + row * n, n)
            for ptr, n in zip(a.aux_data_ptrs, a.aux_item_lens, strict=True)
        )

    def _sent(self, s: _Source, o: _Offer, c: kvspray.Completion) -> None:
        failed = ""
        with self._lock:
            o.ended, o.whole = True, c.ok or s.done_at > 0
            if not o.whole:
                s.problem = f"kvspray: {c.status.name}: {c.reason}"
                s.failed_at = time.monotonic()
                if self._rooms.get(s.room) is s and not s.rows:
                    failed = s.problem
        if failed:
            self.conclude_failure(bootstrap_room=s.room, failure_reason=failed)
        self._whole(s)

    def _whole(self, s: _Source) -> None:
        with self._lock:
            if self._rooms.get(s.room) is not s or not s.rows:
                return
            if all(o.whole for o in s.offers.values()):
                self.update_status(s.room, KVPoll.Success)

    def _done(self, m: pd_wire.Done) -> None:
        with self._lock:
            s = self._rooms.get(m.room)
            if s is None or s.xfer != m.xfer or s.done_at:
                return
            s.done_at = time.monotonic()
            for o in s.offers.values():
                o.whole = o.whole or o.ended
        self._whole(s)

    def settle_source(self, room: int) -> None:
        """Ends a request if only one of decode's DONE and the sidecar's report came in time."""
        s = self._rooms.get(room)
        if s is None or not (s.done_at or s.failed_at):
            return
        now = time.monotonic()
        if s.done_at and now - s.done_at >= REPORT_S:
            for o in s.offers.values():
                if not o.ended and not o.cancelled:
                    o.cancelled = True
                    o.part.session.cancel(o.lease, "decode has all of it")
        elif not s.done_at and now - s.failed_at >= DONE_S:
            if self.request_status.get(room) != KVPoll.Failed:
                self.conclude_failure(bootstrap_room=room, failure_reason=s.problem)

    def close_source(self, room: int, sender: KVSpraySender | None, reason: str) -> None:
        """SGLang takes the request's blocks back after this call. ``sender``: only if the room is
        its own."""
        with self._lock:
            if sender is not None and self._senders.get(room) is not sender:
                return
            s = self._rooms.pop(room, None)
            left = [o for o in s.offers.values() if not o.ended] if s is not None else []
        for o in left:
            o.part.session.cancel(o.lease, reason)

    def _aborted(self, frames: list[bytes]) -> None:
        m = AbortNotification.from_zmq(frames)
        if m is None:
            return
        status = self.request_status.get(m.room)
        if status is None:
            self.transfer_infos.pop(m.room, None)
        elif status != KVPoll.Success:
            self.record_failure(m.room, "decode has given the request up")
            self.update_status(m.room, KVPoll.Failed)
            self.close_source(m.room, None, "decode has given the request up")

    # ---- decode

    def open_arrival(
        self, address: str, room: int, pages: Sequence[int], row: int | None, prefix: int | None,
        request: Any = None, buffers: Any = None, states: Sequence[Any] = (),
    ) -> str:  # fmt: skip
        """SGLang has blocks for a request. Returns why they cannot be filled."""
        if problem := self._stale() or self._unequal(address):
            return problem
        try:
            own = self._state_blocks([_flat(x) for x in states])
            blocks = {"": [int(p) for p in pages], **own}
        except ValueError as err:
            return str(err)
        uses = self._uses.pop((address, room), 0) + 1
        self._uses[address, room] = uses
        if len(self._uses) > MAX_REUSED:
            self._uses.popitem(last=False)
        # All ranks of this decode engine derive the same id. No other engine, none that was here
        # before, and no other use of the room's number has it.
        name = f"kvspray-room/{self._engine}/{address}/{room}/{uses}"
        xfer = hashlib.sha256(name.encode()).digest()
        a = _Arrival(
            room, xfer[: pd_wire.XFER_BYTES], {k: x for k, x in blocks.items() if x},
            -1 if row is None else int(row), int(prefix or 0), request, buffers,
        )  # fmt: skip
        with self._lock:
            self._rooms[room] = a
        return ""

    def _unequal(self, address: str) -> str:
        """Why prefill's ranks cannot fill this rank's blocks; empty: they can."""
        own = [p.name for p in self._parts if p.own]
        info = self.prefill_info_table.get(address)
        if not own or info is None or info.attn_tp_size == self.attn_tp_size:
            return ""
        return (
            f"{', '.join(own)} is divided among {info.attn_tp_size} ranks at prefill and "
            f"{self.attn_tp_size} at decode; start both servers with the same --tp-size"
        )

    def asking(self, room: int, ranks: int) -> list[bytes]:
        """The message that asks prefill for an open arrival. ``ranks``: how many of decode do."""
        a = self._rooms[room]
        states = {name: len(x) for name, x in a.blocks.items() if name}
        return pd_wire.Room(
            a.room, self.local_ip, self.rank_port, a.xfer, len(a.blocks.get("", ())), a.prefix,
            ranks, states=states,
        ).encode()  # fmt: skip

    def _peer(self, m: pd_wire.Peer) -> None:
        """Requests the blocks from the sidecar that prefill names."""
        # Kernels of the blocks' former owner may still be queued: SGLang gives blocks to a request
        # before the GPU has run the kernels of earlier requests.
        self._settle()
        problem = ""
        with self._lock:
            a = self._rooms.get(m.room)
            if a is None or a.xfer != m.xfer or a.peer or a.given_up or not a.blocks:
                return
            a.peer = True
            try:
                problem = self._expect_all(a, m)
            except Exception as err:  # _fail cancels what is open already
                _log.exception("kvspray: room %s", a.room)
                problem = str(err)
        if problem:
            self._fail(a, problem)

    def _expect_all(self, a: _Arrival, m: pd_wire.Peer) -> str:
        prompt = self._prompt(a) if m.by_prompt else None
        problem = prompt.problem if prompt is not None else ""
        for part in self._parts:
            if part.name in a.blocks and not problem:
                problem = self._expect(a, part, m.endpoint, prompt)
        return problem

    def _expect(
        self, a: _Arrival, part: _Part, endpoint: str, prompt: pd_prompt.Prompt | None
    ) -> str:
        blocks = a.blocks[part.name]
        if problem := _too_long(len(blocks)):
            return problem
        tokens, name = len(blocks) * part.block_tokens, b""
        if prompt is not None:
            tokens, name = prompt.tokens, prompt.hash
        end = functools.partial(self._came, a, part.name)
        lease = part.session.expect(
            part.xfer(a.xfer), endpoint, tokens, blocks, str(a.room), end, name
        )
        if not lease:
            return self._no_sidecar(part)
        a.leases[part.name] = lease
        self._writers[a.room] = self._writers.get(a.room, 0) + 1
        return ""

    def _prompt(self, a: _Arrival) -> pd_prompt.Prompt:
        return pd_prompt.of(a.request, a.prefix, len(a.blocks.get("", ())), self.kv_args.page_size)

    def _came(self, a: _Arrival, part: str, c: kvspray.Completion) -> None:
        with self._lock:
            a.leases.pop(part, None)
            if c.ok:
                a.here.add(part)
            given_up = a.given_up
            left = self._writers.pop(a.room) - 1
            if left:
                self._writers[a.room] = left
        if given_up:
            return
        if c.ok:
            self._whole_arrival(a)
        else:
            self._fail(a, f"{c.status.name}: {c.reason}")

    def _rows(self, m: pd_wire.Rows) -> None:
        with self._lock:
            a = self._rooms.get(m.room)
            if a is None or a.xfer != m.xfer or a.given_up or a.rows is not None:
                return
            a.rows = m.rows
        self._whole_arrival(a)

    def _first(self, m: pd_wire.First) -> None:
        """The metadata of a prefill that is no SGLang: it has no rows."""
        with self._lock:
            a = self._rooms.get(m.room)
            if a is None or a.xfer != m.xfer or a.given_up or a.rows is not None:
                return
            problem = self._prompt(a).problem
            if not problem:
                a.rows, problem = pd_prompt.rows(self.kv_args, a.buffers, a.room, m.token, m.cached)
        if problem:
            self._fail(a, problem)
        else:
            self._whole_arrival(a)

    def _whole_arrival(self, a: _Arrival) -> None:
        problem = ""
        with self._lock:
            if a.here != a.blocks.keys() or a.rows is None or a.given_up or a.done:
                return
            a.done = True
            problem = self._stale()
            lens = [int(n) for n in self.kv_args.aux_item_lens]
            if not problem and [len(row) for row in a.rows] != lens:
                problem = (
                    f"prefill has metadata rows of {[len(r) for r in a.rows]} bytes, decode of "
                    f"{lens}: start both servers with the same options"
                )
            elif not problem and a.row >= 0:
                # Under the lock: once SGLang has the row back it may be another request's.
                for i, row in enumerate(a.rows):
                    AuxDataCodec.deserialize_data_to_buffer(self.kv_args, i, a.row, row)
        if problem:
            self._fail(a, problem)
        else:
            self.update_status(a.room, KVPoll.Success)

    def _fail(self, a: _Arrival, reason: str) -> None:
        with self._lock:
            known = self._rooms.get(a.room) is a and not a.given_up
            a.given_up = True  # another prefill rank may name its sidecar later
        self._cancel(a, reason)
        if known:
            self.record_failure(a.room, f"kvspray: {reason}")
            self.update_status(a.room, KVPoll.Failed)

    def _cancel(self, a: _Arrival, reason: str) -> None:
        with self._lock:
            left = [(p, a.leases[p.name]) for p in self._parts if p.name in a.leases]
        for part, lease in left:
            part.session.cancel(lease, reason)

    def give_up(self, room: int, reason: str) -> None:
        """Nothing that comes from now on counts."""
        with self._lock:
            a = self._rooms.get(room)
            if a is None:
                return
            a.given_up = True
        self._cancel(a, reason)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes to the request's blocks any more. SGLang holds them until then,
        and may have forgotten the request itself before (failure_exception)."""
        with self._lock:
            return bootstrap_room not in self._writers

    def close_arrival(self, room: int) -> bytes:
        """SGLang forgets the request, whose blocks it uses or holds. Returns the transfer's id."""
        with self._lock:
            a = self._rooms.pop(room, None)
            if a is None:
                return b""
            a.given_up = True
        self._cancel(a, "the request has ended")
        return bytes(a.xfer)


# SGLang's sender that gives chunks to add_transfer_request, and the classes with failure_exception
# of a receiver. SGLang 0.5.22 has both only for Mooncake.
_SENDER: Any
_RECEIVER: tuple[Any, ...]
if hasattr(CommonKVSender, "poll_pp_consensus"):
    _SENDER, _RECEIVER = CommonKVSender, (CommonKVReceiver,)
else:
    from sglang.srt.disaggregation.mooncake.conn import (
        MooncakeFailureExceptionMixin,
        MooncakeKVSender,
    )

    _SENDER, _RECEIVER = MooncakeKVSender, (MooncakeFailureExceptionMixin, CommonKVReceiver)


@dataclass
class _Info:
    """What SGLang's own code reads of a decode rank."""

    asked: pd_wire.Room
    is_dummy: bool = False

    @property
    def endpoint(self) -> str:
        return self.asked.host

    @property
    def dst_port(self) -> int:
        return self.asked.port

    @property
    def required_dst_info_num(self) -> int:
        return self.asked.ranks


class KVSpraySender(_SENDER):  # type: ignore[misc,valid-type]
    """While an earlier request has the room this one waits: SGLang uses the number again if decode
    takes a request's pages back and has the prompt computed again."""

    request: Any = None

    def __init__(self, mgr: KVSprayManager, bootstrap_addr: str, bootstrap_room: int,
                 req_has_disagg_prefill_dp_rank: bool = False) -> None:  # fmt: skip
        self.waits = not mgr.claim(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.open_source(self.bootstrap_room, int(num_kv_indices), self.request)

    def poll(self) -> KVPoll:
        if self.waits and self.conclude_state is None:
            if not self.kv_mgr.claim(self.bootstrap_room, self):
                return KVPoll.Bootstrapping
            self.waits = False
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Bootstrapping)
        self.kv_mgr.settle_source(self.bootstrap_room)
        return super().poll()

    def abort(self) -> None:
        if self.waits:
            self.conclude_state = KVPoll.Failed
            return
        sent = self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Success
        super().abort()
        reason = "kvspray: prefill has given the request up"
        if not sent:  # SGLang's own part does not inform decode
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason=reason)
        # SGLang does not clear each sender that it aborts.
        self.clear()
        self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def clear(self) -> None:
        if self.waits:
            return
        status = self.conclude_state
        if status is None:
            status = self.kv_mgr.request_status.get(self.bootstrap_room)
        success = status == KVPoll.Success
        mgr, room = self.kv_mgr, self.bootstrap_room
        mgr.close_source(room, self, "the request has ended at prefill")
        mgr.forget_source(room, self, success, super().clear)


class KVSprayReceiver(*_RECEIVER):  # type: ignore[misc]
    request: Any = None
    buffers: Any = None

    def _register_kv_args(self) -> bool:
        return True  # the sidecars compare layouts

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **more: Any,
    ) -> None:
        """Asks each rank of prefill for the request's pages."""
        if getattr(more.get("destination"), "name", "DEVICE") != "DEVICE":
            raise NotImplementedError("kvspray: decode's pages are in its device pool")
        mgr, room = self.kv_mgr, self.bootstrap_room
        problem = "prefill's ranks are not known"
        if getattr(self, "bootstrap_infos", None) is not None:
            problem = mgr.open_arrival(
                self.bootstrap_addr, room, kv_indices, aux_index, decode_prefix_len, self.request,
                self.buffers, state_indices or (),
            )  # fmt: skip
        if not problem:
            problem = self._send_all(mgr.asking(room, int(self.required_dst_info_num)))
            if problem:
                self.invalidate_cached_bootstrap_infos()
        if problem:
            mgr.record_failure(room, f"kvspray: {problem}")
            mgr.update_status(room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
            return
        self.init_time = time.time()

    def _send_all(self, frames: list[bytes]) -> str:
        """Returns why a rank of prefill was not reached."""
        problem = ""
        for info in self.bootstrap_infos or ():
            try:
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(frames)
            except Exception as err:
                problem = f"prefill's rank {info.get('rank_ip')}:{info.get('rank_port')}: {err}"
        return problem

    def _send_abort_notification(self, **more: Any) -> None:
        self.kv_mgr.give_up(self.bootstrap_room, "decode has given the request up")
        super()._send_abort_notification(**more)

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed  # also if only another rank of decode has failed
        super().failure_exception()

    def clear(self) -> None:
        # SGLang clears a Success once all decode ranks have theirs.
        success = self.conclude_state == KVPoll.Success
        super().clear()
        xfer = self.kv_mgr.close_arrival(self.bootstrap_room)
        if success and xfer:
            done = pd_wire.Done(self.bootstrap_room, xfer).encode()
            if problem := self._send_all(done):  # prefill then waits for its sidecar
                _log.debug("kvspray: room %s: no DONE: %s", self.bootstrap_room, problem)


class KVSprayBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's own."""


def _too_long(blocks: int) -> str:
    if blocks <= MAX_PAGES:
        return ""
    return f"the prompt has {blocks} pages, at most {MAX_PAGES} fit: raise the page size"


def _flat(blocks: Any) -> list[int]:
    """SGLang's list of blocks as numbers. It is None, or has numbers or arrays."""
    if blocks is None:
        return []
    return [int(n) for x in blocks for n in numpy.asarray(x).reshape(-1)]
