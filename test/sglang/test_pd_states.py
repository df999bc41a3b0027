"""Requests with more than pages: sliding windows, DSA's indexer, recurrent states. The pools are
SGLang's own, both sides of the backend exchange messages, and real sidecars move the bytes. Every
byte of decode's pools is compared afterwards.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import random
import secrets
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "rig"))

import cluster as rig
import pytest

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

import torch  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode, setup_state_kv_args  # noqa: E402
from test_pools import (  # noqa: E402
    KEY,
    NOPE,
    ROPE_DSA,
    SLOTS,
    State,
    alone,
    state_pool,
    two_sidecars,
)  # fmt: skip

from kvspray_sglang import pd, pd_cache, pd_checks, pd_wire  # noqa: E402

PAGE, HEADS, WINDOW_HEADS, DIM, TOKENS = 16, 4, 2, 8, 768


@pytest.fixture(scope="module")
def sidecars() -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    alone()
    with two_sidecars() as both:
        yield both


def windows(tp: int) -> Any:
    """Layers 0 and 2 have a sliding window, fewer heads, and V wider than K; layers 1 and 3 have
    full attention. If ranks outnumber heads, they have copies."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=TOKENS, size_swa=TOKENS // 2, page_size=PAGE, dtype=torch.bfloat16,
        head_num=max(1, HEADS // tp), head_dim=DIM, swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3], device="cpu", enable_alt_stream=False,
        swa_head_num=max(1, WINDOW_HEADS // tp), swa_head_dim=DIM, swa_v_head_dim=2 * DIM,
    )  # fmt: skip


def recurrent(tp: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        size=TOKENS, dtype=torch.bfloat16, page_size=PAGE, head_num=HEADS // tp, head_dim=DIM,
        full_attention_layer_ids=[1], device="cpu", mamba_pool=state_pool(State(False, tp)),
    )  # fmt: skip


def kimi(tp: int) -> Any:
    """MLA in an odd number of layers, and linear attention with decay for each channel."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        size=TOKENS, dtype=torch.bfloat16, page_size=PAGE, head_num=1, head_dim=DIM,
        full_attention_layer_ids=[1, 3, 5], device="cpu", mamba_pool=state_pool(State(True, tp)),
        use_mla=True, kv_lora_rank=32, qk_rope_head_dim=8,
    )  # fmt: skip


def sparse(tp: int) -> Any:
    """Layer 1 uses the tokens that layer 0 has chosen, and has no keys."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    return DSATokenToKVPool(
        size=TOKENS, page_size=64, kv_lora_rank=NOPE, dtype=torch.bfloat16,
        qk_rope_head_dim=ROPE_DSA, layer_num=3, device="cpu", index_head_dim=KEY,
        enable_memory_saver=False, kv_cache_dim=NOPE + ROPE_DSA,
        skip_topk_layers=[False, True, False],
    )  # fmt: skip


def model_config(_: Any) -> Any:
    return SimpleNamespace(
        get_total_num_kv_heads=lambda: HEADS, is_hybrid_swa_compress=True,
        hf_text_config=SimpleNamespace(swa_num_key_value_heads=WINDOW_HEADS),
        hf_config=SimpleNamespace(architectures=["AModel"]),
    )  # fmt: skip


class Side:
    """One rank, with SGLang's description of its pool and the backend's own sessions."""

    def __init__(
        self, pool: Any, sidecar: rig.Sidecar, prefill: bool, rank: int, tp: int, engine: str
    ) -> None:
        self.args = a = SimpleNamespace(num_draft_entries=0, kv_layout=None, gpu_id=0)
        a.kv_data_ptrs, a.kv_data_lens, a.kv_item_lens = pool.get_contiguous_buf_infos()
        a.page_size, a.kv_cache_dtype_str = pool.page_size, "bfloat16"
        self.row = ctypes.create_string_buffer(64)
        a.aux_data_ptrs, a.aux_item_lens = [ctypes.addressof(self.row)], [8]
        setup_state_kv_args(a, pool)
        self.m = m = object.__new__(pd.KVSprayManager)
        m.kv_args, m.attn_tp_rank, m.attn_tp_size = a, rank, tp
        m.disaggregation_mode = DisaggregationMode.PREFILL if prefill else DisaggregationMode.DECODE
        m._no_rooms()
        m._engine, m._weights = engine, SimpleNamespace(current=True, name="w")
        m.local_ip, m.rank_port, m.waiting_timeout = "127.0.0.1", 1, 20.0
        m.bootstrap_timeout = 300
        m.request_status, m.transfer_infos, m.req_to_decode_prefix_len = {}, {}, {}
        m.failure_records, m.failure_lock, m.prefill_info_table = {}, threading.Lock(), {}
        m._deferred_ack_targets, m._deferred_ack_poisoned_rooms = {}, set()
        m._staging_outstanding, m.deferred_bootstrap, m.is_mla_backend = {}, None, False
        m.send_kv_status_message = lambda **what: None
        self.sent: list[Any] = []
        m._send = lambda to, frames: self.sent.append(pd_wire.decode(frames))
        self.mla = mla = a.is_hybrid_mla_backend or "dsa" in [t.value for t in a.state_types]
        pd_cache.check(a, mla, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(pd.SOCKET_ENV, str(sidecar.socket))
            patch.setattr(pd_checks, "model_config", model_config)
            m._parts = m._open(SimpleNamespace(device="cpu"), mla)
        for p in m._parts:
            rig.wait_for("a session", lambda p=p: p.session.connected, 20, 0.05)

    def tensors(self) -> list[tuple[str, int, int, int]]:
        """Every tensor: its part, address, bytes, and bytes of a block."""
        a, out = self.args, []
        for name, ptrs, lens, items in (
            ("", a.kv_data_ptrs, a.kv_data_lens, a.kv_item_lens),
            *(
                (t.value, a.state_data_ptrs[i], a.state_data_lens[i], a.state_item_lens[i])
                for i, t in enumerate(a.state_types)
            ),
        ):  # fmt: skip
            out += [(name, *x) for x in zip(ptrs, lens, items, strict=True) if x[2]]
        return out

    def memory(self) -> list[bytes]:
        return [ctypes.string_at(ptr, n) for _, ptr, n, _ in self.tensors()]

    def scribble(self, seed: int) -> None:
        r = random.Random(seed)
        for _, ptr, n, _ in self.tensors():
            ctypes.memmove(ptr, r.randbytes(n), n)

    def close(self) -> None:
        for p in self.m._parts:
            p.session.close()


def engines(sidecars: Any, prefill: list[Any], decode: list[Any]) -> tuple[list[Side], list[Side]]:
    p, d = (
        [Side(x, sidecars[i], i == 0, rank, len(own), name) for rank, x in enumerate(own)]
        for i, own in enumerate((prefill, decode))
        for name in [secrets.token_hex(8)]
    )
    return p, d


Blocks = dict[str, list[int]]


def ask(p: list[Side], d: list[Side], src: Blocks, dst: Blocks, room: int) -> None:
    """A request from its beginning to its last chunk."""
    kinds = [t.value for t in p[0].args.state_types]
    for x in d:
        x.m.request_status[room] = KVPoll.WaitingForInput
        lists = [dst.get(k) for k in kinds]
        assert x.m.open_arrival("p:1", room, dst[""], 0, 0, states=lists) == ""
    for i, y in enumerate(p):
        y.m.update_status(room, KVPoll.Bootstrapping)
        for j, x in enumerate(d):
            if len(p) != len(d) or i == j:
                frames = x.m.asking(room, max(1, len(d) // len(p)))
                asked = pd_wire.decode(frames)
                assert isinstance(asked, pd_wire.Room)
                y.m._asked(pd_wire.Room(**{**vars(asked), "port": j + 1}))
        y.m.open_source(room, len(src[""]))
        assert isinstance(y.sent[-1], pd_wire.Peer), y.m.failure_records
    for j, x in enumerate(d):
        peer = p[j if len(p) == len(d) else 0].sent[-1]
        x.m._peer(peer)
    half = len(src[""]) // 2
    for y in p:
        lists = [src.get(k) for k in kinds]
        y.m.add_transfer_request(room, src[""][:half], slice(0), False)
        y.m.add_transfer_request(room, src[""][half:], slice(0), True, 0, lists)
        for _ in range(2):
            y.m._chunk(y.m._chunks.get())
    for j, x in enumerate(d):
        x.m._rows(p[j if len(p) == len(d) else 0].sent[-1])


def ended(sides: list[Side], room: int) -> None:
    final = (KVPoll.Success, KVPoll.Failed)
    rig.wait_for("the end", lambda: all(x.m.request_status[room] in final for x in sides), 30, 0.02)
    for x in sides:
        assert x.m.request_status[room] == KVPoll.Success, x.m.failure_records


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("make", [windows, recurrent, kimi, sparse])
def test_equal_ranks(sidecars: tuple[rig.Sidecar, rig.Sidecar], make: Any, tp: int) -> None:
    pools = [[make(tp) for _ in range(tp)] for _ in range(2)]
    p, d = engines(sidecars, *pools)
    try:
        r = random.Random(tp)
        for room, pages in enumerate((1, 5, 11), 1):
            for i, side in enumerate((*p, *d)):
                side.scribble(100 * room + i)
            for side in p[1:]:
                copy_shared(p[0], side)
            tables = [r.sample(range(1, 12), pages) for _ in range(2)]
            src, dst = ({"": t} for t in tables)
            window = [r.sample(range(1, 12), min(pages, 3)) for _ in range(2)]
            for b, t, w in ((src, tables[0], window[0]), (dst, tables[1], window[1])):
                kinds = [x.value for x in p[0].args.state_types]
                for k in kinds:
                    b[k] = {"swa": w, "dsa": t, "mamba": [r.randint(1, SLOTS)]}[k]
            want = [expected(x, y, src, dst) for x, y in zip(p, d, strict=True)]
            ask(p, d, src, dst, room)
            ended([*p, *d], room)
            for x, bytes_ in zip(d, want, strict=True):
                assert x.memory() == bytes_
                x.m.close_arrival(room)
            for y in p:
                y.m.close_source(room, None, "ended")
    finally:
        for side in (*p, *d):
            side.close()
    del pools


def copy_shared(a: Side, b: Side) -> None:
    """All ranks have the same MLA latent and indexer keys."""
    shared = ("", "dsa") if a.mla else ("dsa",)
    for (name, at, n, _), (_, to, _, _) in zip(a.tensors(), b.tensors(), strict=True):
        if name in shared:
            ctypes.memmove(to, at, n)


def expected(p: Side, d: Side, src: Blocks, dst: Blocks) -> list[bytes]:
    """Decode's memory after prefill's blocks have replaced those of ``dst``."""
    out = []
    for was, (name, _, _, item), (_, at, _, _) in zip(
        d.memory(), d.tensors(), p.tensors(), strict=True
    ):
        new = bytearray(was)
        for i, j in zip(src[name], dst[name], strict=True):
            new[j * item : (j + 1) * item] = ctypes.string_at(at + i * item, item)
        out.append(bytes(new))
    return out


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2), (4, 1), (4, 2)])
def test_windows_of_unequal_ranks(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], p_tp: int, d_tp: int
) -> None:
    """Each head of a window arrives at the rank that has it."""
    pools = [[windows(tp) for _ in range(tp)] for tp in (p_tp, d_tp)]
    p, d = engines(sidecars, *pools)
    try:
        for i, side in enumerate((*p, *d)):
            side.scribble(i)
        for rank in range(1, p_tp, 2) if p_tp > WINDOW_HEADS else ():
            both = zip(p[rank - 1].tensors(), p[rank].tensors(), strict=True)
            for (name, at, n, _), (_, to, _, _) in both:
                if name == "swa":  # each head is on two ranks
                    ctypes.memmove(to, at, n)
        src, dst = {"": [3, 7, 5], "swa": [9, 2]}, {"": [1, 8, 4], "swa": [2, 6]}
        ask(p, d, src, dst, 1)
        ended([*p, *d], 1)

        def tokens(pools: list[Any], part: str, layer: int, pages: list[int]) -> torch.Tensor:
            """K and V of all heads."""
            copies = max(1, len(pools) // (WINDOW_HEADS if part == "swa" else HEADS))
            own = [getattr(x, f"{part}_kv_pool") for x in pools[::copies]]
            loc = torch.tensor([t for n in pages for t in range(n * PAGE, (n + 1) * PAGE)])
            kv = [torch.cat([x.k_buffer[layer][loc], x.v_buffer[layer][loc]], dim=2) for x in own]
            return torch.cat(kv, dim=1).view(torch.int16)

        for part, name in (("full", ""), ("swa", "swa")):
            for layer in range(2):
                a = tokens(pools[0], part, layer, src[name])
                assert torch.equal(a, tokens(pools[1], part, layer, dst[name])), (part, layer)
    finally:
        for side in (*p, *d):
            side.close()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2)])
def test_an_indexer_of_unequal_ranks(
    sidecars: tuple[rig.Sidecar, rig.Sidecar], p_tp: int, d_tp: int
) -> None:
    """All ranks have the same keys."""
    pools = [[sparse(tp) for _ in range(tp)] for tp in (p_tp, d_tp)]
    p, d = engines(sidecars, *pools)
    try:
        for i, side in enumerate((*p, *d)):
            side.scribble(i)
        for side in p[1:]:
            copy_shared(p[0], side)
        src, dst = {"": [3, 7, 5], "dsa": [3, 7, 5]}, {"": [1, 8, 4], "dsa": [1, 8, 4]}
        want = [expected(p[0], x, src, dst) for x in d]
        ask(p, d, src, dst, 1)
        ended([*p, *d], 1)
        assert [x.memory() for x in d] == want
    finally:
        for side in (*p, *d):
            side.close()


def test_unequal_ranks_do_not_exchange_states(
    sidecars: tuple[rig.Sidecar, rig.Sidecar],
) -> None:
    """If decode does not check it, the sidecars' error names the rank, and nothing is written."""
    pools = [recurrent(2), recurrent(1)]
    p, d = (Side(x, sidecars[i], i == 0, 0, 2 - i, "one") for i, x in enumerate(pools))
    try:
        d.scribble(1)
        states = [t for t in d.tensors() if t[0]]
        before = [ctypes.string_at(ptr, n) for _, ptr, n, _ in states]
        part = d.m._parts[1]
        ask([p], [d], {"": [3], "mamba": [2]}, {"": [4], "mamba": [5]}, 1)
        rig.wait_for("an end", lambda: d.m.request_status[1] == KVPoll.Failed, 30, 0.05)
        assert "rank" in d.m.failure_records[1], (d.m.failure_records, part)
        assert before == [ctypes.string_at(ptr, n) for _, ptr, n, _ in states]
    finally:
        p.close()
        d.close()
