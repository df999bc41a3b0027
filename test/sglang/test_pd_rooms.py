"""The rooms of the transfer backend: what each side does with messages that are late, damaged or
of another request, and when pages are given back. SGLang's own classes, with a session of the test.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import re
import socket
import sys
import threading
import unittest.mock
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import zmq

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

from sglang.srt.disaggregation.base.conn import KVPoll, StateType  # noqa: E402

import kvspray  # noqa: E402
from kvspray_sglang import pd, pd_cache, pd_checks, pd_session, pd_wire, plugin  # noqa: E402

ROWS = [16, 8]  # bytes of a metadata row in each buffer
ROW = 3


class Session:
    """Leases that end when the test ends them."""

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}
        self.cancelled: list[int] = []
        self.steps: list[tuple[int, int, list[int]]] = []
        self.xfers: list[bytes] = []
        self.named: list[tuple[int, bytes]] = []
        self.takes, self.endpoint, self.problem = True, "10.0.0.1:7650", ""

    def _lease(self, end: Any) -> int:
        if not self.takes:
            return 0
        lease = len(self.open) + 1
        self.open[lease] = end
        return lease

    def source(self, xfer: bytes, tokens: int, req: str, end: Any, name: bytes) -> int:
        self.xfers.append(xfer)
        self.named.append((tokens, name))
        return self._lease(end)

    def expect(
        self, xfer: bytes, peer: str, tokens: int, pages: list[int], req: str, end: Any, name: bytes
    ) -> int:  # fmt: skip
        self.xfers.append(xfer)
        self.named.append((tokens, name))
        return self._lease(end)

    def progress(self, lease: int, tokens: int, pages: list[int]) -> bool:
        self.steps.append((lease, tokens, list(pages)))
        return self.takes

    def cancel(self, lease: int, reason: str) -> None:
        self.cancelled.append(lease)

    def end(self, lease: int, ok: bool = True) -> None:
        status = kvspray.CompletionStatus.OK if ok else kvspray.CompletionStatus.FAILED
        self.open[lease](SimpleNamespace(ok=ok, status=status, reason="a reason"))


def manager(rank: int | None = None) -> Any:
    """With a rank: of a model whose requests have pages, a sliding window and a recurrent state."""
    m = object.__new__(pd.KVSprayManager)
    m.buffers = [ctypes.create_string_buffer(n * 8) for n in ROWS]
    m.kv_args = SimpleNamespace(
        page_size=16, aux_data_ptrs=[ctypes.addressof(b) for b in m.buffers], aux_item_lens=ROWS
    )
    m._no_rooms()
    m._session, m.swa, m.mamba = Session(), Session(), Session()
    m._parts = [pd._Part("", m._session, 16)]
    if rank is not None:
        own = pd._Part("mamba", m.mamba, 1, f"rank{rank}")
        m._parts += [pd._Part("swa", m.swa, 16), own]
    m.attn_tp_size, m.prefill_info_table = 1, {"q:1": SimpleNamespace(attn_tp_size=2)}
    m._engine, m.bootstrap_timeout, m._weights = "e1", 300, SimpleNamespace(current=True)
    m.local_ip, m.rank_port = "127.0.0.1", 1
    m.request_status, m.transfer_infos, m.req_to_decode_prefix_len = {}, {}, {}
    m.failure_records, m.failure_lock = {}, threading.Lock()
    m._deferred_ack_targets, m._deferred_ack_poisoned_rooms = {}, set()
    m._staging_outstanding, m.deferred_bootstrap, m.is_mla_backend = {}, None, False
    m.sent = []
    m._send = lambda to, frames: m.sent.append((to, pd_wire.decode(frames)))
    m.send_kv_status_message = lambda **what: m.sent.append(what)
    return m


# ---- decode


def arrival(m: Any, room: int = 7, pages: int = 2) -> Any:
    m.request_status[room] = KVPoll.WaitingForInput
    assert m.open_arrival("p:1", room, list(range(5, 5 + pages)), ROW, 32) == ""
    frames = m.asking(room, 1)
    asked = pd_wire.decode(frames)
    assert isinstance(asked, pd_wire.Room) and (asked.pages, asked.prefix) == (pages, 32)
    return asked


def with_states(m: Any, room: int = 7, pages: int = 2) -> Any:
    m.request_status[room] = KVPoll.WaitingForInput
    states = [numpy.array([3, 4], dtype=numpy.int32), [numpy.array(6)]]
    assert m.open_arrival("p:1", room, list(range(5, 5 + pages)), ROW, 0, states=states) == ""
    frames = m.asking(room, 1)
    return pd_wire.decode(frames)


def rows(asked: Any, fill: bytes = b"x") -> Any:
    return pd_wire.Rows(asked.room, asked.xfer, tuple(fill * n for n in ROWS))


def row_of(m: Any) -> bytes:
    return m.buffers[0].raw[ROW * ROWS[0] : (ROW + 1) * ROWS[0]]


@pytest.mark.parametrize("first", ["pages", "rows"])
def test_a_request_is_there_with_pages_and_rows(first: str) -> None:
    m = manager()
    asked = arrival(m)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    steps = [lambda: m._session.end(1), lambda m=m, a=asked: m._rows(rows(a))]
    for step in steps if first == "pages" else reversed(steps):
        assert m.request_status[7] != KVPoll.Success
        step()
    assert m.request_status[7] == KVPoll.Success and row_of(m) == b"x" * ROWS[0]
    m._rows(rows(asked, b"y"))  # of another prefill rank: the same, and late
    assert row_of(m) == b"x" * ROWS[0]
    m.close_arrival(7)
    assert not m._session.cancelled


def test_the_gpu_settles_before_pages_are_requested() -> None:
    m = manager()
    asked = arrival(m)
    open_then: list[int] = []
    m._settle = lambda: open_then.append(len(m._session.open))
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    assert open_then == [0] and len(m._session.open) == 1


def test_without_pages_to_move() -> None:
    m = manager()
    asked = arrival(m, pages=0)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    assert not m._session.open
    m._rows(rows(asked))
    assert m.request_status[7] == KVPoll.Success


def test_pages_are_held_until_the_fence() -> None:
    m = manager()
    asked = arrival(m)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    m.give_up(7, "gone")
    m.give_up(7, "gone")
    assert m._session.cancelled[:1] == [1] and not m.is_abort_release_safe(7, 0)
    m._rows(rows(asked))
    assert row_of(m) == bytes(ROWS[0]), "a row of a request that was given up"
    m._session.end(1)  # complete or not: it is too late
    assert m.is_abort_release_safe(7, 1) and m.request_status[7] != KVPoll.Success
    m.close_arrival(7)
    m._rows(rows(asked))
    assert row_of(m) == bytes(ROWS[0])


def test_a_forgotten_request_is_held_until_the_fence() -> None:
    """SGLang clears a request that failed before it asks whether its pages may be used again."""
    m = manager()
    asked = arrival(m)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    m.close_arrival(7)
    m.give_up(7, "gone")
    assert m._session.cancelled == [1] and not m.is_abort_release_safe(7, 1)
    m._session.end(1, ok=False)
    assert m.is_abort_release_safe(7, 1) and not m._writers


def test_a_failed_request_opens_no_other_lease() -> None:
    m = manager()
    asked = arrival(m)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    m._session.end(1, ok=False)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    assert len(m._session.open) == 1


def test_given_up_before_the_peer_is_named() -> None:
    m = manager()
    asked = arrival(m)
    m.give_up(7, "gone")
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    assert not m._session.open and m.is_abort_release_safe(7, 1)


def test_every_part_arrives_before_the_request_is_there() -> None:
    r = random.Random(3)
    for _ in range(20):
        m = manager(0)
        asked = with_states(m)
        assert asked.states == {"swa": 2, "mamba": 1}
        m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
        m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.2:7650"))  # another prefill rank
        sessions = [m._session, m.swa, m.mamba]
        assert len({s.xfers[0] for s in sessions}) == 3 and all(len(s.xfers) == 1 for s in sessions)
        steps = [*(lambda s=s: s.end(1) for s in sessions), lambda m=m, a=asked: m._rows(rows(a))]
        r.shuffle(steps)
        for step in steps:
            assert m.request_status[7] != KVPoll.Success
            step()
        assert m.request_status[7] == KVPoll.Success and not m._writers


def test_states_alone() -> None:
    """Decode has all pages in its own cache."""
    m = manager(0)
    asked = with_states(m, pages=0)
    m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
    m._rows(rows(asked))
    m.swa.end(1)
    assert m.request_status[7] != KVPoll.Success and not m._session.xfers
    m.mamba.end(1)
    assert m.request_status[7] == KVPoll.Success


def test_blocks_of_all_parts_are_held_until_their_fences() -> None:
    for given_up in (True, False):
        m = manager(0)
        asked = with_states(m)
        m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
        m._session.end(1)
        if given_up:
            m.give_up(7, "gone")
        else:
            m.swa.end(1, ok=False)
            assert "FAILED: a reason" in m.failure_records[7]
        m._rows(rows(asked))
        m.close_arrival(7)
        assert 1 in m.mamba.cancelled and not m._session.cancelled
        assert not m.is_abort_release_safe(7, 1)
        m.mamba.end(1)
        assert m.is_abort_release_safe(7, 1) != given_up
        if given_up:
            m.swa.end(1)
        assert m.is_abort_release_safe(7, 1) and m.request_status[7] != KVPoll.Success


def test_a_part_that_no_sidecar_takes() -> None:
    m = manager(0)
    asked = with_states(m)
    m.mamba.takes, m.mamba.problem = False, "no sidecar is connected"
    m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
    assert "no sidecar" in m.failure_records[7]
    assert m._session.cancelled == m.swa.cancelled == [1] and not m.is_abort_release_safe(7, 1)


def test_ranks_exchange_their_own_states() -> None:
    """A state that is not divided by heads goes to the same rank only, other parts to all."""
    xfers = []
    for rank in (0, 1):
        m = manager(rank)
        asked = with_states(m)
        m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
        xfers.append([s.xfers[0] for s in (m._session, m.swa, m.mamba)])
    assert [a == b for a, b in zip(*xfers, strict=True)] == [True, True, False]
    problem = manager(0).open_arrival("q:1", 7, [5], ROW, 0, states=[[1], [2]])
    assert "mamba is divided among 2 ranks at prefill and 1 at decode" in problem


def test_a_room_that_is_used_again() -> None:
    m = manager()
    old = arrival(m)
    m.give_up(7, "gone")
    m.close_arrival(7)
    new = arrival(m)
    restarted = manager()
    restarted._engine = "e2"
    assert len({old.xfer, new.xfer, arrival(restarted).xfer}) == 3
    m._peer(pd_wire.Peer(7, old.xfer, "10.0.0.1:7650"))
    m._rows(rows(old))
    assert not m._session.open and row_of(m) == bytes(ROWS[0])


def test_failures_are_named() -> None:
    m = manager()
    asked = arrival(m)
    m._session.takes, m._session.problem = False, "no sidecar is connected"
    m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
    assert m.request_status[7] == KVPoll.Failed
    assert "no sidecar" in m.failure_records[7] and m.is_abort_release_safe(7, 1)
    m = manager()
    asked = arrival(m)
    m._peer(pd_wire.Peer(7, asked.xfer, "10.0.0.1:7650"))
    m._session.end(1, ok=False)
    assert "FAILED: a reason" in m.failure_records[7]
    m = manager()
    asked = arrival(m, pages=0)
    m._rows(pd_wire.Rows(7, asked.xfer, (b"x",)))
    assert "same options" in m.failure_records[7] and row_of(m) == bytes(ROWS[0])
    m = manager()
    m._weights.current = False
    assert "weights" in m.open_arrival("p:1", 9, [1], 0, 0)


# ---- prefill


def asked(
    m: Any, room: int = 7, pages: int = 3, ranks: int = 1, port: int = 9, **states: int
) -> pd_wire.Room:
    xfer = b"x" * pd_wire.XFER_BYTES
    r = pd_wire.Room(room, "127.0.0.1", port, xfer, pages, 16, ranks, states=states)
    m._asked(r)
    return r


def chunk(m: Any, pages: list[int], last: bool, room: int = 7, states: Any = ()) -> None:
    m.add_transfer_request(room, pages, slice(0), last, ROW if last else None, states)
    m._chunk(m._chunks.get())


def test_chunks_then_rows() -> None:
    m = manager()
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m)
    assert m.request_status[7] == KVPoll.WaitingForInput and m.req_to_decode_prefix_len[7] == 16
    m.open_source(7, 3)
    assert isinstance(m.sent[0][1], pd_wire.Peer)
    chunk(m, [4, 9], False)
    chunk(m, [2], True)
    assert m._session.steps == [(1, 32, [4, 9]), (1, 48, [4, 9, 2])]
    assert isinstance(m.sent[1][1], pd_wire.Rows) and m.request_status[7] != KVPoll.Success
    m._session.end(1)
    assert m.request_status[7] == KVPoll.Success
    m.close_source(7, None, "ended")
    assert not m._session.cancelled


def test_pages_that_the_sidecar_does_not_take() -> None:
    m = manager()
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m)
    m.open_source(7, 3)
    m._session.takes, m._session.problem = False, "record exceeds 1 MiB"
    chunk(m, [4, 9], False)
    assert m.request_status[7] == KVPoll.Failed and "record exceeds" in m.failure_records[7]


def test_a_prompt_of_more_pages_than_a_record_names() -> None:
    m = manager()
    pages = pd_session.MAX_PAGES + 1
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m, pages=pages)
    m.open_source(7, pages)
    assert not m._session.open and "raise the page size" in m.failure_records[7]


def test_states_follow_the_last_chunk() -> None:
    m = manager(0)
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m, swa=2, mamba=1)
    m.open_source(7, 3)
    chunk(m, [4, 9], False)
    assert not m.swa.steps
    chunk(m, [2], True, states=[[8, 6], [numpy.array(5)]])
    assert m.swa.steps == [(1, 32, [8, 6])] and m.mamba.steps == [(1, 1, [5])]
    for session in (m.mamba, m._session, m.swa):
        assert m.request_status[7] != KVPoll.Success
        session.end(1)
    assert m.request_status[7] == KVPoll.Success
    m.close_source(7, None, "ended")
    assert not (m._session.cancelled or m.swa.cancelled or m.mamba.cancelled)


@pytest.mark.parametrize("states", [[[8], [5]], [[8, 6], None], [[8, 6]], ()], ids=str)
def test_states_that_decode_does_not_wait_for(states: Any) -> None:
    m = manager(0)
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m, swa=2, mamba=1)
    m.open_source(7, 3)
    chunk(m, [4, 9, 2], True, states=states)
    assert m.request_status[7] == KVPoll.Failed
    assert re.search("decode waits for|SGLang lists|0 slots", m.failure_records[7])
    assert m._session.cancelled and m.swa.cancelled and m.mamba.cancelled
    assert not any(isinstance(x[1], pd_wire.Rows) for x in m.sent if isinstance(x, tuple))


def test_two_decode_ranks() -> None:
    m = manager()
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m, ranks=2, port=9)
    assert m.request_status[7] == KVPoll.Bootstrapping
    asked(m, ranks=2, port=10)
    m.open_source(7, 3)
    assert [to for to, _ in m.sent] == [("127.0.0.1", 9), ("127.0.0.1", 10)]
    assert len(m._session.open) == 1


@pytest.mark.parametrize("ended", [False, True])
def test_pages_that_prefill_takes_back(ended: bool) -> None:
    """From the call on no read of them counts."""
    m = manager()
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m)
    m.open_source(7, 3)
    if ended:
        m._session.end(1)
    m.add_transfer_request(7, [1], slice(0), False)
    m.close_source(7, None, "given up")
    assert m._session.cancelled == ([] if ended else [1])
    m.request_status.pop(7)
    chunk(m, [1, 2, 3], True)
    m._chunk(m._chunks.get())
    assert not m._session.steps and len(m.sent) == 1


def test_a_chunk_of_an_earlier_request_with_this_number() -> None:
    m = manager()
    for _ in range(2):
        m.request_status.pop(7, None)
        m.update_status(7, KVPoll.Bootstrapping)
        asked(m)
        m.open_source(7, 3)
        m.add_transfer_request(7, [1, 2, 3], slice(0), True, ROW)
        if len(m._session.open) == 1:
            m.close_source(7, None, "given up")
    m._chunk(m._chunks.get())
    assert not m._session.steps
    m._chunk(m._chunks.get())
    assert m._session.steps == [(2, 48, [1, 2, 3])]


def sender(m: Any, room: int = 7) -> Any:
    m.enable_trace = m.is_dummy_cp_rank = False
    m.sender_trace_module = m._staging_ctx = None
    with unittest.mock.patch.object(
        sys.modules["sglang.srt.disaggregation.common.conn"], "get_parallel",
        lambda: SimpleNamespace(num_dp_ranks=1),
    ):  # fmt: skip
        return pd.KVSpraySender(m, "p:1", room)


def receiver(m: Any, room: int = 7) -> Any:
    """With two prefill ranks, of which the first cannot be reached."""
    r = object.__new__(pd.KVSprayReceiver)
    r.kv_mgr, r.bootstrap_room, r.bootstrap_addr, r._owns_bootstrap_room = m, room, "p:1", True
    r.conclude_state, r.bootstrap_infos, r.told = None, [{"rank_port": 1}, {"rank_port": 2}], []
    m.defer_decode_allocation = False
    m.required_prefill_response_num_table, m.prefill_response_tracker = {}, {}
    m.addr_to_rooms_tracker = {"p:1": set()}

    def connect(info: Any) -> Any:
        if info["rank_port"] == 1:
            raise OSError("no route")
        socket = SimpleNamespace(send_multipart=lambda f: r.told.append(pd_wire.decode(f)))
        return socket, threading.Lock()

    r._connect_to_bootstrap_server = connect
    return r


@pytest.mark.parametrize("ended", ["success", "failure", "other rank"])
def test_prefill_is_told_of_a_success(ended: str) -> None:
    m = manager()
    r, asked = receiver(m), arrival(m)
    m._peer(pd_wire.Peer(asked.room, asked.xfer, "10.0.0.1:7650"))
    m._rows(rows(asked))
    m._session.end(1, ok=ended != "failure")
    assert r.poll() == (KVPoll.Failed if ended == "failure" else KVPoll.Success)
    assert not r.told  # other ranks of decode may still read
    if ended != "success":
        with pytest.raises(Exception, match="7"):
            r.failure_exception()
    r.clear()
    r.clear()
    assert r.told == ([pd_wire.Done(7, asked.xfer)] if ended == "success" else [])


def test_decode_is_told_of_an_abort() -> None:
    """An abort may overtake the request on its way to decode, and end it at prefill alone."""
    m = manager()
    s = sender(m)
    asked(m)
    m.open_source(7, 3)
    s.abort()
    told = m.sent[-1]
    assert told["targets"] == [("127.0.0.1", 9)] and told["status"] == KVPoll.Failed
    assert m._session.cancelled == [1]
    asked(m, port=10)  # before SGLang forgets the request
    assert m.sent[-1]["targets"] == [("127.0.0.1", 10)]
    s.clear()


def test_decode_asks_for_a_request_that_was_given_up() -> None:
    m = manager()
    s = sender(m)
    s.abort()
    s.clear()
    asked(m)
    assert m.sent[-1]["targets"] == [("127.0.0.1", 9)] and m.sent[-1]["status"] == KVPoll.Failed
    assert not m.request_status and not m.transfer_infos
    sender(m)  # another request with this number
    asked(m)
    assert m.request_status[7] == KVPoll.WaitingForInput

    for room in range(100, 101 + pd.MAX_GIVEN_UP):
        m._give_up(room)
    assert len(m._given_up) == pd.MAX_GIVEN_UP
    m.bootstrap_timeout = 0
    asked(m, 200)
    assert m.request_status[200] == KVPoll.WaitingForInput


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_that_sglang_refuses(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_is_transfer_backend", lambda: True)
    m = manager()
    queue_, req = SimpleNamespace(kv_manager=m), SimpleNamespace(bootstrap_room=7)
    steps = [lambda: plugin._added(lambda *_: None, queue_, req, 1), lambda: asked(m)]
    for step in steps if first == "prefill" else reversed(steps):
        assert not m.sent
        step()
    assert m.sent[-1]["targets"] == [("127.0.0.1", 9)] and m.sent[-1]["status"] == KVPoll.Failed
    assert not (m.request_status or m.transfer_infos or m.req_to_decode_prefix_len)


def sent_all(m: Any, s: Any) -> pd_wire.Room:
    room = asked(m)
    m.open_source(7, 3)
    chunk(m, [1, 2, 3], True)
    assert s.poll() == KVPoll.Transferring
    return room


def test_decode_has_what_a_new_sidecar_offers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's sidecar has died before it reported the end. Decode does not ask the next one."""
    m = manager()
    s = sender(m)
    room = sent_all(m, s)
    monkeypatch.setattr(pd, "REPORT_S", 0.0)
    for other in (pd_wire.Done(7, b"y" * 16), pd_wire.Done(8, room.xfer)):
        m._done(other)
    assert s.poll() == KVPoll.Transferring and not m._session.cancelled
    monkeypatch.setattr(pd, "REPORT_S", 60.0)
    m._done(pd_wire.Done(7, room.xfer))
    assert s.poll() == KVPoll.Transferring and not m._session.cancelled  # it may report it yet
    monkeypatch.setattr(pd, "REPORT_S", 0.0)
    for _ in range(2):
        assert s.poll() == KVPoll.Transferring and m._session.cancelled == [1]
    m._session.end(1, ok=False)
    assert s.poll() == KVPoll.Success


def test_a_lease_fails_whose_pages_decode_has(monkeypatch: pytest.MonkeyPatch) -> None:
    m = manager()
    s = sender(m)
    room = sent_all(m, s)
    m._session.end(1, ok=False)
    assert s.poll() == KVPoll.Transferring and len(m.sent) == 2  # decode is not notified
    m._done(pd_wire.Done(7, room.xfer))
    assert s.poll() == KVPoll.Success
    m = manager()
    s = sender(m)
    sent_all(m, s)
    monkeypatch.setattr(pd, "DONE_S", 0.0)
    m._session.end(1, ok=False)
    assert s.poll() == KVPoll.Failed and m.sent[-1]["status"] == KVPoll.Failed
    told = len(m.sent)
    m.settle_source(7)
    assert len(m.sent) == told


def test_a_late_end_of_an_earlier_request_with_this_number() -> None:
    m = manager()
    s = sender(m)
    room = sent_all(m, s)
    m._done(pd_wire.Done(7, room.xfer))
    s.abort()
    s.clear()
    sender(m)
    m._session.end(1, ok=False)
    assert m.request_status[7] == KVPoll.Bootstrapping


@pytest.mark.parametrize("ends", ["success", "abort"])
@pytest.mark.parametrize("order", ["sender", "decode"])
def test_a_number_that_is_used_again_too_soon(ends: str, order: str) -> None:
    """SGLang uses it again if decode takes a request's pages back and computes it again."""
    m = manager()
    first = sender(m)
    sent_all(m, first)
    again = pd_wire.Room(7, "127.0.0.1", 9, b"z" * 16, 3, 16, 1)
    steps: list[Any] = [lambda: sender(m), lambda: m._asked(again)]
    made = [step() for step in (steps if order == "sender" else reversed(steps))]
    second = next(x for x in made if x is not None)
    assert second.poll() == KVPoll.Bootstrapping and first.poll() == KVPoll.Transferring
    if ends == "abort":
        first.abort()
    m._session.end(1, ok=ends != "abort")
    assert first.poll() == (KVPoll.Failed if ends == "abort" else KVPoll.Success)
    first.clear()
    first.clear()
    assert second.poll() == KVPoll.WaitingForInput
    assert m.transfer_infos[7]["127.0.0.1", 9].asked is again and not m._early
    m.open_source(7, 3)
    first.clear()
    assert m._rooms[7].xfer == again.xfer and second.poll() == KVPoll.WaitingForInput
    second.abort()
    assert not (m._senders or m._rooms or m.request_status or m.failure_records)


def test_a_sender_that_waits_is_aborted() -> None:
    m = manager()
    first = sender(m)
    sent_all(m, first)
    second = sender(m)
    second.abort()
    assert second.poll() == KVPoll.Failed and first.poll() == KVPoll.Transferring
    second.clear()
    assert first.poll() == KVPoll.Transferring and m._senders == {7: first}


def test_a_later_request_with_this_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    m = manager()
    first = sender(m)
    sent_all(m, first)
    m._asked(pd_wire.Room(7, "127.0.0.1", 11, b"z" * 16, 3, 16, 1))
    m.refuse(7)
    assert m.sent[-1]["targets"] == [("127.0.0.1", 11)] and m.sent[-1]["status"] == KVPoll.Failed
    m._session.end(1)
    assert first.poll() == KVPoll.Success


def test_no_status_is_lost() -> None:
    """The scheduler's thread and that of messages change it at the same time."""
    m = manager()
    for room in range(3000):
        m.update_status(room, KVPoll.WaitingForInput)
    go = threading.Barrier(2)

    def fail() -> None:
        go.wait()
        for room in range(3000):
            m.update_status(room, KVPoll.Failed)

    t = threading.Thread(target=fail)
    t.start()
    go.wait()
    for room in range(3000):
        m.update_status(room, KVPoll.Transferring)
    t.join()
    assert set(m.request_status.values()) == {KVPoll.Failed}


def test_prefill_refuses_by_name() -> None:
    for pages, change, want in (
        (4, None, "decode waits for 3 pages, and prefill sends 4"),
        (3, "takes", "kvspray: why"),
        (3, "weights", "restart both servers"),
    ):
        m = manager()
        m.update_status(7, KVPoll.Bootstrapping)
        asked(m)
        if change == "takes":
            m._session.takes, m._session.problem = False, "why"
        elif change:
            m._weights.current = False
        m.open_source(7, pages)
        assert m.request_status[7] == KVPoll.Failed and want in m.failure_records[7]
        assert m.sent[-1]["status"] == KVPoll.Failed
    m = manager()
    m.update_status(7, KVPoll.Bootstrapping)
    asked(m, dsa=3)
    m.open_source(7, 3)
    assert "decode waits for dsa, which prefill does not have" in m.failure_records[7]


def test_rooms_that_nobody_claims_are_bounded() -> None:
    m = manager()
    for room in range(pd.MAX_UNCLAIMED + 50):
        asked(m, room)
    assert len(m.transfer_infos) == len(m.request_status) == pd.MAX_UNCLAIMED
    assert m.claim(pd.MAX_UNCLAIMED, object())
    asked(m, 1 << 40)
    assert pd.MAX_UNCLAIMED in m.transfer_infos


# ---- messages and pools


def test_messages() -> None:
    xfer = bytes(range(16))
    for message in (
        pd_wire.Room(1 << 63, "10.1.2.3", 65535, xfer, 12, 160, 4),
        pd_wire.Room(1, "10.1.2.3", 1, xfer, 12, 160, 4, states={"swa": 3, "mamba": 1}),
        pd_wire.Peer(5, xfer, "10.0.0.1:7650"),
        pd_wire.Rows(5, xfer, (b"", b"abc")),
        pd_wire.Done(5, xfer),
    ):
        frames = message.encode()
        assert pd_wire.decode(frames) == message
        r = random.Random(1)
        for _ in range(2000):
            bad = [bytearray(f) for f in frames]
            for _ in range(r.randrange(1, 4)):
                f = r.choice(bad)
                if f and r.random() < 0.7:
                    f[r.randrange(len(f))] = r.randrange(256)
                elif r.random() < 0.5:
                    bad.remove(f) if len(bad) > 1 else None
                else:
                    f += r.randbytes(r.randrange(20))
            try:
                pd_wire.decode([bytes(f) for f in bad])
            except ValueError:
                pass
    assert pd_wire.decode([b"other", b"a", b"b", b"c"]) is None


def kv_args(**more: Any) -> Any:
    memory = ctypes.create_string_buffer(1 << 16)
    at = ctypes.addressof(memory)
    values = {
        "kv_data_ptrs": [at + i * 8192 for i in range(4)], "kv_data_lens": [8192] * 4,
        "kv_item_lens": [1024] * 4, "page_size": 16, "state_types": [], "num_draft_entries": 0,
        "kv_layout": None, "kv_cache_dtype_str": "auto", "memory": memory,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **more})


def test_pools() -> None:
    cache = pd_cache.describe(kv_args(), pd_cache.Heads(8, 1, 2), False)
    assert cache.pages == 8 and [g["strategy"] for g in cache.groups] == ["sglang_k", "sglang_v"]
    assert cache.groups[1]["same_table"] and cache.groups[0]["params"]["heads"] == 4
    assert [x["name"] for x in cache.groups[1]["layers"]] == ["layers.0#v", "layers.1#v"]
    (mla,) = pd_cache.describe(kv_args(), None, False).groups
    assert len(mla["layers"]) == 4 and [x["base"] for x in mla["layers"]] == [0, 8192, 16384, 24576]
    with pytest.raises(pd_cache.CacheError, match="3 heads"):
        pd_cache.describe(kv_args(), pd_cache.Heads(3, 0, 1), False)


@pytest.mark.parametrize(
    ("change", "pp", "want"),
    [
        ({"state_types": [StateType.SWA, StateType.SWA_RING]}, 1, "swa_ring"),
        ({"state_types": [StateType.SWA, StateType.SWA]}, 1, "twice"),
        ({"state_types": [StateType.SWA]}, 1, "order in a window's pages is None"),
        ({"state_types": [StateType.MAMBA], "state_data_ptrs": [[]]}, 1, "mamba has 0 tensors"),
        ({"num_draft_entries": 2}, 1, "draft"),
        ({"kv_layout": "unified"}, 1, "unified"),
        ({"kv_cache_dtype_str": "fp4_e2m1"}, 1, "fp4"),
        ({"kv_data_ptrs": [1, 2, 3]}, 1, "pairs"),
        ({}, 2, "pp_size is 2"),
    ],
)
def test_what_is_not_transferred_is_refused(change: Any, pp: int, want: str) -> None:
    pd_cache.check(kv_args(), False, 1)
    with pytest.raises(pd_cache.CacheError, match=want):
        pd_cache.check(kv_args(**change), False, pp)


def test_what_a_pool_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pd_checks.packing(SimpleNamespace())
    for name in ("SGLANG_DISABLE_DSA_INDEXER_FUSION", "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_USE_AITER"):
        with monkeypatch.context() as m:
            m.setenv(name, "1")
            assert f"{name}=1" in pd_checks.packing(SimpleNamespace())
    assert pd_checks.packing(SimpleNamespace(mamba_ssm_dtype="float16")) != before
    assert pd_checks.packing(SimpleNamespace()) == before
    parallel = SimpleNamespace()
    pd_checks.serving(SimpleNamespace(), parallel, False)
    with pytest.raises(pd_cache.CacheError, match="enable_unified_memory is on"):
        pd_checks.serving(SimpleNamespace(enable_unified_memory=True), parallel, False)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(pd_cache.CacheError, match="SGLANG_USE_HND_KVCACHE is True"):
        pd_checks.serving(SimpleNamespace(), parallel, False)
    pd_checks.serving(SimpleNamespace(), parallel, True)


@pytest.mark.parametrize("arch", ["Dots3NoteForCausalLM", "LlamaForCausalLM"])
def test_an_indexer_that_is_not_described(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23 describes the windows of such a model, and not the keys of its indexer."""
    config = SimpleNamespace(architectures=[arch], index_topk=2048)
    monkeypatch.setattr(pd_checks, "model_config", lambda _: SimpleNamespace(hf_config=config))
    found = pd_checks.has_indexer(None)
    args = kv_args(state_types=[StateType.SWA], state_data_ptrs=[[1]], swa_kv_cache_layout="nhd")
    assert found == (arch != "LlamaForCausalLM")
    pd_cache.check(args, True, 1, False)
    if found:
        with pytest.raises(pd_cache.CacheError, match="indexer, whose keys"):
            pd_cache.check(args, True, 1, found)


def test_pages_of_failed_requests_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own queue gives them back once nothing writes to them, however long that takes."""
    from sglang.srt.disaggregation import decode
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.plugins.hook_registry import HookRegistry

    queue_class = decode.DecodeTransferQueue
    monkeypatch.setattr(queue_class, "kvspray_holds", False, raising=False)
    with pytest.raises(pd_cache.CacheError, match=r"hook of DecodeTransferQueue"):
        pd.KVSprayManager(None, DisaggregationMode.DECODE, None)

    plugin.install()
    HookRegistry.apply_hooks()
    monkeypatch.setattr(plugin, "_is_transfer_backend", lambda: True)
    monkeypatch.setattr(decode, "get_parallel", lambda: SimpleNamespace(
        attn_tp_group=SimpleNamespace(cpu_group=None), tp_rank=0))  # fmt: skip
    monkeypatch.setattr(decode, "get_disagg", lambda: SimpleNamespace(
        disaggregation_decode_host_receive_threshold=1))  # fmt: skip
    monkeypatch.setattr(decode, "all_reduce_flags", lambda flags, group, op: flags)
    scheduler = SimpleNamespace(
        spec_algorithm=None, metrics_reporter=SimpleNamespace(enable_metrics=False)
    )
    queue = queue_class(None, None, scheduler, None)
    assert queue_class.kvspray_holds and queue.enable_deferred_kv_release
    m, released = manager(), []
    receiver = SimpleNamespace(kv_mgr=m, abort_notified=True, bootstrap_infos=[1])
    request = SimpleNamespace(
        req=SimpleNamespace(bootstrap_room=7), kv_receiver=receiver, metadata_buffer_index=1,
        host_staged=False,
    )  # fmt: skip
    monkeypatch.setattr(queue, "_do_release", lambda request, index: released.append(index))
    m._writers[7] = 2
    queue._defer_release(request)
    now = decode.time.monotonic()
    monkeypatch.setattr(decode, "time", SimpleNamespace(monotonic=lambda: now + 1e9))
    queue.resolve_deferred_releases()
    assert not released
    del m._writers[7]
    queue.resolve_deferred_releases()
    assert released == [1]


def test_the_plug_in_adds_a_backend() -> None:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    plugin._add_transfer_backend()
    plugin._add_transfer_backend()
    ours = TransferBackend(plugin.TRANSFER_BACKEND)
    assert TransferBackend["KVSPRAY"] is ours and ours in list(TransferBackend)
    assert plugin._class_of(get_kv_class, ours, KVClassType.SENDER) is pd.KVSpraySender
    mooncake = plugin._class_of(get_kv_class, TransferBackend.FAKE, KVClassType.SENDER)
    assert mooncake is not None and mooncake is not pd.KVSpraySender


def test_a_send_to_a_decode_rank_that_is_gone_does_not_wait() -> None:
    """SGLang's sockets do not connect again, and a send without room waits for 30 s in the thread
    that serves all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    m = manager()
    del m._send
    m._socket_cache, m._monitor_cache, m._socket_lock = {}, {}, threading.Lock()
    m._socket_send_locks = defaultdict(threading.Lock)
    m._zmq_ctx, m.defer_decode_allocation = zmq.Context(), False
    sent = threading.Semaphore(0)

    def send() -> None:
        for _ in range(3):
            m._send(("127.0.0.1", port), [b"PEER", b"x" * 100])
            sent.release()

    try:
        threading.Thread(target=send, daemon=True).start()
        assert all(sent.acquire(timeout=25) for _ in range(3))
    finally:
        m._zmq_ctx.destroy(0)
