"""KVSprayTier under vLLM's own manager of tiers, over a session of which the test ends the
leases."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiers import NOTICE, ROW, Engine, config, content, key
from vllm.distributed import kv_transfer
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvspray
import kvspray_vllm
from kvspray import CompletionStatus
from kvspray._messages import PAGE_DAMAGED, PAGE_HIT, PAGE_MISS, PAGE_STORED
from kvspray_vllm import layout, offload, tier, weights
from kvspray_vllm.tier_memory import NOTICE_BYTES, TierMemory

HIT, MISS, PENDING, RETRY = (
    LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY,
)  # fmt: skip


class Store:
    """A session, and the store behind it."""

    def __init__(self) -> None:
        self.connected = self.killable = self.takes = self.ready = True
        self.error = ""
        self.answers: list[bool] | None = None  # of every question; None: none comes
        self.asked: list[list[bytes]] = []
        self.forgotten = 0
        self.open: dict[int, SimpleNamespace] = {}  # by lease
        self.ended: list[kvspray.Completion] = []
        self.cancelled: list[int] = []
        self.leases = itertools.count(1)
        self.namespace: Any = None
        self.closed = False
        self.on_wait: Callable[[], None] = lambda: None

    # -- as kvspray.WorkerClient

    def register(self, regions: list[kvspray.Region]) -> None:
        (region,) = regions
        assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK

    def status(self) -> Any:
        return SimpleNamespace(killable=self.killable)

    def poll(self) -> list[kvspray.Completion]:
        out, self.ended = self.ended, []
        return out

    def wait(self, _: float) -> bool:
        self.on_wait()
        return bool(self.ended)

    def cancel(self, lease: int, _: str) -> None:
        self.cancelled.append(lease)
        if lease in self.open:
            self.end(lease, CompletionStatus.CANCELLED)

    def close(self) -> None:
        self.closed = True

    # -- as kvspray.store.Space

    def space(self, _: Any, namespace: Any, pieces: Any, blocks: int) -> Any:
        self.namespace = namespace
        (piece,) = pieces
        assert (piece.base, piece.stride, piece.length) == (0, ROW, ROW) and blocks > 0
        return SimpleNamespace(
            ready=lambda: self.ready, exists=self.exists, get=self.get, put=self.put, store=self,
            error=self.error,
        )  # fmt: skip

    def exists(self, hashes: list[bytes]) -> Any:
        self.asked.append(hashes)

        def result() -> Any:
            return None if self.answers is None else (self.answers * len(hashes))[: len(hashes)]

        def forget() -> None:
            self.forgotten += 1

        return SimpleNamespace(result=result, forget=forget)

    def get(self, keys: list[bytes], chunks: list[int], **_: Any) -> int:
        return self.lease("get", keys, chunks, b"")

    def put(self, keys: list[bytes], chunks: list[int], parent: bytes, **_: Any) -> int:
        return self.lease("put", keys, chunks, parent)

    def lease(self, kind: str, keys: list[bytes], chunks: list[int], parent: bytes) -> int:
        if not self.takes:
            return 0
        lease = next(self.leases)
        self.open[lease] = SimpleNamespace(kind=kind, keys=keys, chunks=chunks, parent=parent)
        return lease

    # -- as the sidecar

    def end(
        self, lease: int, status: CompletionStatus = CompletionStatus.OK, pages: Any = None
    ) -> None:
        at = self.open.pop(lease)
        default = PAGE_HIT if at.kind == "get" else PAGE_STORED
        outcomes = bytes([default] * len(at.keys) if pages is None else pages)
        moved = ROW * len(at.keys)
        self.ended.append(kvspray.Completion(lease, True, status, moved, 1, pages=outcomes))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    out = Store()
    monkeypatch.setattr(tier.kvspray, "WorkerClient", lambda *_, **__: out)
    monkeypatch.setattr(tier, "Space", out.space)
    return out


@pytest.fixture
def start(store: Store) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**kw: Any) -> Engine:
        made.append(Engine(**kw))
        return made[-1]

    yield make
    for e in made:
        e.close()


def asked(e: Engine, store: Store, keys: list[Any], there: list[bool]) -> Any:
    """A request that has looked up these keys and has its answer."""
    context = e.request()
    assert e.look(keys, context) == [RETRY] * len(keys)
    e.step()
    store.answers = there
    return context


def test_blocks_are_stored_and_loaded(start: Any, store: Store) -> None:
    e = start()
    keys = [key(i) for i in range(3)]
    e.store(keys)
    (put,) = store.open.values()
    assert (put.kind, put.keys) == ("put", keys), "one request for many blocks"
    assert all((e.rows[c] == content(k)).all() for k, c in zip(keys, put.chunks, strict=True))
    assert e.manager.has_pending_work()
    store.end(1)
    assert not e.busy()

    others = [key(i) for i in range(10, 13)]
    context = asked(e, store, others, [True, False, True])
    assert store.asked == [others], "one question"
    assert e.look(others, context) == [PENDING, MISS, PENDING]
    e.step()
    (get,) = store.open.values()
    assert (get.kind, get.keys) == ("get", [others[0], others[2]])
    for k, c in zip(get.keys, get.chunks, strict=True):
        e.rows[c] = content(k)
    assert e.check(others, context) == 0, "not before the lease has ended"
    store.end(2)
    assert e.look(others, context) == [HIT, MISS, HIT]
    assert e.check(others, context) == 2
    e.finish(context)
    assert not e.tier._verdicts and store.asked == [others]


def test_a_question_names_each_page_once(start: Any, store: Store) -> None:
    """Also one that several prompts begin with."""
    e = start()
    a, b = e.request(), e.request()
    shared, own = key(1), key(2)
    e.look([shared], a)
    e.look([shared, own], b)
    e.step()
    assert store.asked == [[shared, own]]
    store.answers = [True, False]
    assert e.look([own, shared], b) == [MISS, PENDING]
    assert e.look([shared], a) == [PENDING]
    e.step()
    assert [x.keys for x in store.open.values()] == [[shared]], "and is loaded once"


def test_pages_that_did_not_come_are_computed(start: Any, store: Store) -> None:
    """Each is a miss for the request that waited for it, and is not loaded again and again."""
    e = start()
    keys = [key(i) for i in range(4)]
    context = asked(e, store, keys, [True])
    e.look(keys, context)
    e.step()
    (get,) = store.open.values()
    e.rows[get.chunks[1]] = content(get.keys[1])
    store.end(1, pages=[PAGE_MISS, PAGE_HIT, PAGE_DAMAGED, PAGE_MISS])
    assert e.look(keys, context) == [MISS, HIT, MISS, MISS]
    assert e.check(keys, context) == 1
    e.step()
    assert not store.open and len(store.asked) == 1
    again = e.request()
    assert e.look(keys, again) == [RETRY, HIT, RETRY, RETRY], "another request asks anew"


@pytest.mark.parametrize(
    "status", [s for s in CompletionStatus if s is not CompletionStatus.OK], ids=lambda s: s.name
)
def test_a_lease_that_fails(start: Any, store: Store, status: CompletionStatus) -> None:
    e = start()
    keys = [key(i) for i in range(3)]
    context = asked(e, store, keys, [True])
    e.look(keys, context)
    e.step()
    store.end(1, status)  # whatever its pages are
    assert e.look(keys, context) == [MISS] * 3
    e.store([key(7)])
    store.end(2, status)
    assert not e.busy()
    assert e.check([key(7)], context) == 1, "vLLM's own tier has it all the same"


def test_a_chunk_stays_the_sidecars_until_its_lease_ends(start: Any, store: Store) -> None:
    """However long that takes: vLLM finds no room for others, and gives none of them away."""
    e = start(chunks=4)
    keys = [key(i) for i in range(4)]
    e.store(keys)
    (put,) = store.open.values()
    other = e.request()
    for _ in range(3):
        e.step()
        assert e.manager.prepare_store([key(9)], other) is None
    assert all((e.rows[c] == content(k)).all() for k, c in zip(keys, put.chunks, strict=True))
    store.end(1)
    assert e.manager.prepare_store([key(9)], other) is not None
    e.manager.complete_store([key(9)], other, success=False)


def test_without_a_sidecar_there_are_only_misses(start: Any, store: Store) -> None:
    for name in ("connected", "killable", "ready"):
        e = start()
        setattr(store, name, False)
        context = e.request()
        assert e.look([key(1)], context) == [MISS]
        e.store([key(2)])
        assert not e.busy() and not store.open and not store.asked
        setattr(store, name, True)
        e.step()
        assert e.look([key(1)], context) == [RETRY], "and it comes back"
        store.asked.clear()


def test_a_sidecar_that_takes_no_more(start: Any, store: Store) -> None:
    e = start()
    store.takes = False
    context = asked(e, store, [key(1)], [True])
    e.look([key(1)], context)
    e.step()
    assert e.look([key(1)], context) == [MISS]
    e.store([key(2)])
    assert not e.busy()


def test_an_answer_that_does_not_come(start: Any, store: Store) -> None:
    e = start()
    now = [0.0]
    e.tier._now = lambda: now[0]
    context = e.request()
    for _ in range(2):
        assert e.look([key(1)], context) == [RETRY]
        e.step()
    now[0] += tier.ASK_S
    assert e.look([key(1)], context) == [MISS]
    assert store.forgotten == 1 and len(store.asked) == 1


def test_bounds(start: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "MAX_KEYS", 3)
    monkeypatch.setattr(tier, "MAX_QUESTIONS", 2)
    monkeypatch.setattr(tier, "MAX_VERDICTS", 8)
    monkeypatch.setattr(tier, "MAX_LEASES", 2)
    e = start()
    context = e.request()
    keys = [key(i) for i in range(9)]
    assert e.look(keys, context) == [RETRY] * 8 + [MISS]
    e.step()
    assert [len(a) for a in store.asked] == [3, 3]
    assert e.look(keys, context) == [RETRY] * 6 + [MISS] * 3
    e.store([key(i) for i in range(20, 28)])
    assert [len(x.keys) for x in store.open.values()] == [3, 3], "the other pages are not stored"
    first, second = store.open.values()
    assert second.parent == first.keys[-1]
    for lease in (1, 2):
        store.end(lease)
    assert not e.busy()


def test_pages_of_a_group_follow_each_other(start: Any, store: Store) -> None:
    """Whatever the order in which vLLM names them."""
    e = start(groups=2)
    context = e.request()
    a, b = ([key(i, g) for i in range(4)] for g in range(2))
    for group in (a, b):
        for i, k in enumerate(group):
            context.set_offload_key_position(k, 16 * (i + 1))
    e.store([b[1], a[1], a[0], b[0]], context)
    e.store([a[3], a[2], b[2]], context)
    got = {tuple(x.keys): x.parent for x in store.open.values()}
    assert got == {
        (a[0], a[1]): b"", (b[0], b[1]): b"", (a[2], a[3]): a[1], (b[2],): b[1],
    }  # fmt: skip


def test_other_weights(start: Any, store: Store) -> None:
    """Nothing is stored or found from then on, and what was under way does not come."""
    e = start(ranks=2)
    keys = [key(1), key(2)]
    context = asked(e, store, keys, [True])
    e.look(keys, context)
    e.step()
    e.worker.memory.replace(1)
    store.end(1)
    assert e.look(keys, context) == [MISS, MISS]
    e.store([key(3)])
    e.step()
    assert e.look([key(4)], e.request()) == [MISS]
    e.step()
    assert not store.open and len(store.asked) == 1


def test_a_reset_waits_for_leases(start: Any, store: Store) -> None:
    e = start()
    e.store([key(1)])
    context = asked(e, store, [key(2)], [True])
    e.look([key(2)], context)
    e.step()
    waits = iter([[], [2], [1]])
    store.on_wait = lambda: [store.end(lease) for lease in next(waits)] and None
    e.manager.reset_cache()
    assert not store.open and not e.manager.has_pending_work()
    assert e.check([key(1), key(2)], context) == 0


def test_the_end_cancels_leases(start: Any, store: Store) -> None:
    e = Engine()
    e.store([key(1)])
    e.close()
    assert store.cancelled == [1] and store.closed


# ---- whose pages they are


def space_of(start: Any, store: Store, **kw: Any) -> Any:
    start(**kw)
    return store.namespace


def test_pages_of_other_caches_are_not_found(start: Any, store: Store, tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of a tenant, 32 bytes at least..")
    secret.chmod(0o600)
    spaces = [
        space_of(start, store, **kw)
        for kw in (
            {},
            {"notice": {"weights": "other"}},
            {"notice": {"dtype": "bfloat16"}},
            {"notice": {"cache": "other"}},
            {"notice": {"algorithm": "sha256_cbor"}},
            {"ranks": 2},
            {"secret_file": str(secret)},
        )
    ]
    assert all(a != b for a, b in itertools.combinations(spaces, 2))
    assert space_of(start, store) == spaces[0], "and an equal engine finds them"


def test_ranks_of_different_models(store: Store) -> None:
    spec = tier.KVSprayTieringSpec(config(4, ranks=2))
    spec.memory.write(0, NOTICE)
    spec.memory.write(1, {**NOTICE, "weights": "other"})
    try:
        with pytest.raises(ValueError, match="ranks have different weights: .*'other', 'w'"):
            spec.get_manager()
    finally:
        spec.memory.hide()


def test_a_rank_on_another_host(store: Store) -> None:
    spec = tier.KVSprayTieringSpec(config(4, ranks=2))
    spec.memory.write(0, NOTICE)
    try:
        with pytest.raises(ValueError, match="rank 1 of 2 shares no memory"):
            spec.get_manager()
    finally:
        spec.memory.hide()


# ---- what is refused at start


@pytest.mark.parametrize(
    ("own", "error"),
    [
        ({"sockets": "x"}, "no key 'sockets'; known are socket, weights"),
        ({"socket": ""}, "'socket'"),
        ({"weights": 7}, "'weights'"),
        ({"locality": "LOCAL"}, "no key 'locality'"),
    ],
)
def test_settings(own: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        tier.KVSprayTieringSpec(config(4, **own))


def test_tiers() -> None:
    mine = {"type": "KVSprayTier", "module_path": "kvspray_vllm.tier"}
    fs = {"type": "fs", "root_dir": "/x"}
    assert tier.settings_of([fs, {**mine, "socket": "/s"}]).socket == "/s"
    for tiers in ([fs], [mine, mine]):
        with pytest.raises(ValueError, match="tiers of type KVSprayTier"):
            tier.settings_of(tiers)


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use.*no room for one chunk"):
        tier.KVSprayTieringSpec(config(0, room=1))
    monkeypatch.setattr(tier, "MAX_PAGE_BYTES", ROW - 1)
    with pytest.raises(ValueError, match=f"{ROW} bytes.*lower blocks_per_chunk"):
        tier.KVSprayTieringSpec(config(4))


def test_vllms_own_spec() -> None:
    spec = TieringOffloadingSpec(config(2))
    with pytest.raises(ValueError, match="KVSprayTier with spec_name TieringOffloadingSpec"):
        spec.get_manager()


def test_vllm_that_maps_other_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tier.KVSprayTieringSpec(config(2))
    spec.memory.write(0, NOTICE)
    region = SharedOffloadRegion.__init__

    def elsewhere(self: Any, engine_id: str, *args: Any, **kw: Any) -> None:
        region(self, engine_id + "-other", *args, **kw)

    monkeypatch.setattr(SharedOffloadRegion, "__init__", elsewhere)
    try:
        with pytest.raises(ValueError, match="vLLM's primary tier is not in"):
            spec.get_manager()
    finally:
        spec.memory.hide()


def plain(**kw: Any) -> Any:
    """vLLM's configuration of an engine that is served."""
    model = SimpleNamespace(is_encoder_decoder=False, multimodal_config=None)
    config = {
        "lora_config": None,
        "speculative_config": None,
        "model_config": model,
        "attention_config": SimpleNamespace(hisparse_config=None),
    }
    return SimpleNamespace(**{**config, **kw})


def test_engines_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tier.check(plain())
    tier.check(plain(speculative_config=SimpleNamespace(method="ngram")))
    for kw, error in (
        ({"lora_config": object()}, "enable_lora"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative_config.method"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "is_encoder_decoder"),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, "hisparse_config"),
    ):
        with pytest.raises(layout.Unsupported, match=f"KVSprayTier: .*{error}"):
            tier.check(plain(**kw))
    monkeypatch.setenv("KVSPRAY_LOAD", "1")
    with pytest.raises(layout.Unsupported, match="KVSPRAY_LOAD"):
        tier.check(plain())


def test_names_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """set_weights reaches the tier of a worker, also before it has a cache."""
    spec = tier.KVSprayTieringSpec(config(2))
    connector = SimpleNamespace(connector_worker=SimpleNamespace(spec=spec))
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: connector)
    assert kvspray_vllm.set_weights(None, "x") == ""
    try:
        changed = functools.partial(spec.memory.replace, 0)
        spec._generation = weights.Generation("before", changed)
        assert not spec.memory.replaced
        assert kvspray_vllm.set_weights(None, "x") == "before"
        assert spec.memory.replaced
    finally:
        spec.memory.hide()
        tier._release(spec._generation, spec.memory)


# ---- the memory


def memory(**kw: Any) -> TierMemory:
    kw = {"engine_id": f"test-{os.getpid()}-memory", "chunk_bytes": 8192, "ranks": 3, **kw}
    return TierMemory(**kw)


def test_memory_that_all_processes_have() -> None:
    first = memory()
    second = memory()
    try:
        assert os.path.sameopenfile(first.fd, second.fd)
        first.check(second.fd)
        with pytest.raises(OSError):
            os.ftruncate(first.fd, 0)
        for rank in range(3):
            (first, second)[rank % 2].write(rank, {"rank": rank})
        assert second.notices() == [{"rank": i} for i in range(3)]
        with pytest.raises(ValueError, match="rank 1 .*has started before.*another one"):
            second.write(1, {})
        assert not first.replaced
        second.replace(2)
        assert first.replaced
        second.hide()
        assert not os.path.lexists(first.path)
        second.hide()
    finally:
        for m in (first, second):
            m.hide()
            m.close()


def test_memory_of_an_engine_that_was_killed() -> None:
    """Its link names no file any more; its memory is gone."""
    m = memory()
    os.symlink("/proc/0/fd/1", m.path + ".new")
    os.replace(m.path + ".new", m.path)
    again = memory()
    try:
        assert not os.path.sameopenfile(m.fd, again.fd)
    finally:
        again.hide()
        for x in (m, again):
            x.close()


@pytest.mark.parametrize("other", ["size", "file"])
def test_memory_of_another_engine(other: str) -> None:
    m = memory()
    try:
        if other == "file":
            m.hide()
            with open(m.path, "wb") as f:
                f.truncate(os.fstat(m.fd).st_size)
        with pytest.raises(
            ValueError, match=f"{m.path} is not this user's sealed memory.*another engine"
        ):
            memory(ranks=3 if other == "file" else 300)
    finally:
        m.hide()
        m.close()


def test_notices_of_any_bytes() -> None:
    """A notice is whole, or it is none."""
    m = memory()
    r = random.Random(1)
    try:
        m.write(0, {"a": "b" * 100})
        at = m._at(0)
        whole = bytes(m._tail[at : at + NOTICE_BYTES])
        for _ in range(2000):
            bad = bytearray(whole)
            for _ in range(r.randint(1, 4)):
                bad[r.randrange(160)] ^= r.randint(1, 255)
            m._tail[at : at + NOTICE_BYTES] = bytes(bad)
            if bytes(bad[: 36 + 109]) == whole[: 36 + 109]:
                continue
            with pytest.raises(ValueError, match="shares no memory"):
                m._read(0)
        with pytest.raises(ValueError, match="has 5009 bytes"):
            m.write(1, {"a": "b" * 5000})
        with pytest.raises(ValueError, match="rank 3"):
            m.write(3, {})
    finally:
        m.hide()
        m.close()


# ---- copies of engines on a CPU


def test_rows_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come back, and no byte of another rank changes."""
    from test_offload import BLOCKS, caches
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    per_chunk, pages = 2, [64, 48]
    own = per_chunk * sum(pages)
    m = memory(chunk_bytes=4 * 4096)
    try:
        regions = [
            SharedOffloadRegion(f"test-{os.getpid()}-memory", 4, rank, 4096, own)
            for rank in range(3)
        ]
        kv = [caches(pages, [[(0, 64), (1, 48)]]) for _ in regions]
        copies = [
            offload.HostCopies(k, tier.Rows(r, pages, per_chunk), per_chunk)
            for k, r in zip(kv, regions, strict=True)
        ]
        blocks, chunks = [3, 9, 4], CPULoadStoreSpec([2, 0])
        for c in copies:
            c.submit_store(1, GPULoadStoreSpec(blocks, [3], [1]), chunks)
        before = [[t.tensor.clone() for t in k.tensors] for k in kv]
        to = [20, 21, 22]
        for c in copies:
            c.submit_load(2, chunks, GPULoadStoreSpec(to, [3], [1]))
        for k, old in zip(kv, before, strict=True):
            for t, was in zip(k.tensors, old, strict=True):
                assert np.array_equal(t.tensor[to].numpy(), was[blocks].numpy())
                rest = [i for i in range(BLOCKS) if i not in to]
                assert np.array_equal(t.tensor[rest].numpy(), was[rest].numpy())
        for c in copies:
            c.shutdown()
    finally:
        m.hide()
        m.close()
