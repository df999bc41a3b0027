"""The storage backend with fakes of SGLang's classes and real sidecars."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is missing")
ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "test" / "rig"), str(pathlib.Path(__file__).parent)]

import cluster as rig  # noqa: E402
import sglang_fakes as fake  # noqa: E402
import torch  # noqa: E402

fake.install()

import kvspray  # noqa: E402
from kvspray_sglang import copies, hicache, link, memory, names, plugin  # noqa: E402
from kvspray_sglang.hicache import KvsprayHiCache, page_hash  # noqa: E402
from kvspray_sglang.settings import Settings  # noqa: E402

EXTRA = {
    "backend_name": "k",
    "module_path": "m",
    "class_name": "c",
    "interface_v1": 1,
    "weights": "w",
}
KEYS = [f"{i:064x}" for i in range(1, 9)]
MAPPED = memory.allocator_class(fake.HostTensorAllocator)
OTHER = fake.HostTensorAllocator


@pytest.fixture(scope="module")
def sidecar() -> Iterator[rig.Sidecar]:
    with node() as s:
        yield s.start()


@contextlib.contextmanager
def node() -> Iterator[rig.Sidecar]:
    """A sidecar with a store; the caller starts it."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        s = rig.Sidecar("a", pathlib.Path(dir), {"store": {"memory": "32MiB"}})
        try:
            yield s
        finally:
            s.kill()
        assert s.panics() is None


Make = Callable[..., KvsprayHiCache]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[KvsprayHiCache] = []

    def backend(
        socket: str,
        pool: Any,
        connect: bool = True,
        pools: Any = (),
        extra: Any = None,
        **ranks: Any,
    ) -> KvsprayHiCache:
        b = KvsprayHiCache(fake.Config({**EXTRA, "socket": socket, **(extra or {})}, **ranks), {})
        made.append(b)
        b.register_mem_pool_host(pool)
        for name, p in dict(pools).items():
            b.register_mem_host_pool_v2(p, name)
        b.on_host_pools_registered()
        if connect:
            rig.wait_for("a session", lambda: b._link.connected, 30)
        return b

    yield backend
    for b in made:
        b.close()


@pytest.mark.parametrize("allocator", [MAPPED, OTHER], ids=["mapped", "process"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back(sidecar: rig.Sidecar, make: Make, layout: str, allocator: Any) -> None:
    pool = fake.Pool(allocator(), layout=layout)
    b = make(sidecar.socket, pool, extra={"weights": f"{layout}{allocator.__name__}"})
    kinds = {p.region.kind for p in b._pools["kv"][1]}
    assert kinds == {
        kvspray.RegionKind.MEMFD if allocator is MAPPED else kvspray.RegionKind.PROCESS
    }
    pages = [pool.fill(i) for i in (3, 9, 4)]
    assert b.batch_exists(KEYS) == 0
    assert b.batch_set_v1(KEYS[:3], pool.indices(3, 9, 4)) == [True] * 3
    assert b.batch_set_v1(KEYS[3:4], pool.indices(0), fake.ExtraInfo(KEYS[:3])) == [True]
    assert b.batch_exists(KEYS) == 4 and b.exists(KEYS[1]) and not b.exists(KEYS[5])
    pool.kv_buffer.zero_()
    assert b.batch_get_v1([KEYS[2], KEYS[0], KEYS[7]], pool.indices(11, 2, 5)) == [
        True,
        True,
        False,
    ]
    assert torch.equal(pool.page(11), pages[2]) and torch.equal(pool.page(2), pages[0])
    assert b.copied_bytes == 0
    stats = b.get_stats()
    assert (
        stats.backup_pgs == [3, 1] and stats.prefetch_pgs == [2] and stats.prefetch_bandwidth[0] > 0
    )
    assert b.get_stats().backup_pgs == []
    assert b.clear() and b.batch_exists(KEYS) == 0


def test_pages_of_others_are_not_found(
    sidecar: rig.Sidecar, make: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(
        extra: Any = None,
        dtype: Any = torch.bfloat16,
        layout: str = "page_first",
        layers: int = 3,
        **ranks: Any,
    ) -> int:
        pool = fake.Pool(MAPPED(), layout=layout, dtype=dtype, layers=layers)
        b = make(sidecar.socket, pool, extra={"weights": "others", **(extra or {})}, **ranks)
        return int(b.batch_exists(KEYS[:1]))

    pool = fake.Pool(MAPPED())
    b = make(sidecar.socket, pool, extra={"weights": "others"})
    assert b.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]
    assert found() == 1 and found(layout="layer_first") == 0
    assert found({"weights": "fine-tuned"}) == found(dtype=torch.float16) == found(layers=6) == 0
    for rank in ("tp", "pp", "attn_cp"):
        assert found(**{f"{rank}_rank": 1, f"{rank}_size": 2}) == 0
    secret = tmp_path / "secret"
    secret.write_text("x" * 32 + "\n")
    assert found({"secret_file": str(secret)}) == 0
    for what, value in (("kv_cache_dtype", "fp8_e4m3"), ("quantization", "fp8")):
        with monkeypatch.context() as m:
            m.setattr(fake.server_args, what, value, raising=False)
            assert found() == 0, what
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.22")
    assert found() == 1, "a release whose caches have the same values"
    for what, name, value in (
        (sys.modules["sglang"], "__version__", "0.6.0"),
        (names, "NUMERICS", "other"),
    ):
        with monkeypatch.context() as m:
            m.setattr(what, name, value)
            assert found() == 0, name


def test_ranks_with_equal_content_share_pages(sidecar: rig.Sidecar, make: Make) -> None:
    ranks: list[Any] = [{"tp_rank": r, "tp_size": 2, "is_mla_model": True} for r in range(2)]
    pools = [{k: fake.Pool(MAPPED()) for k in ("kv", "indexer", "mamba")} for _ in ranks]
    a, b = (
        make(sidecar.socket, p["kv"], pools=p, extra={"weights": "mla"}, **r)
        for p, r in zip(pools, ranks, strict=True)
    )
    for name in pools[0]:
        assert a.batch_set_v2(
            [fake.PoolTransfer(fake.PoolName(name), pools[0][name].indices(1), KEYS[:1])]
        ) == {name: [True]}
        got = b.batch_get_v2(
            [fake.PoolTransfer(fake.PoolName(name), pools[1][name].indices(2), KEYS[:1])]
        )
        assert got == {name: [name != "mamba"]}, name  # SGLang divides those states among ranks


def test_hybrid_pools(sidecar: rig.Sidecar, make: Make) -> None:
    pools = {
        "kv": fake.Pool(MAPPED()),
        "indexer": fake.Pool(MAPPED(), layers=1),
        "mamba": fake.Pool(MAPPED(), tokens=1),
    }
    first = {k: pools[k] for k in ("kv", "indexer")}
    b = make(sidecar.socket, pools["kv"], pools=first, extra={"weights": "hybrid"})
    b.register_mem_host_pool_v2(pools["mamba"], fake.PoolName.MAMBA)  # SGLang adds some later

    def transfer(name: str, keys: list[str], *pages: int, trailing: bool = False) -> Any:
        policy = fake.PoolHitPolicy.TRAILING_PAGES if trailing else fake.PoolHitPolicy.ALL_PAGES
        return fake.PoolTransfer(
            fake.PoolName(name), pools[name].indices(*pages) if pages else None, keys, policy
        )

    pages = [pools["indexer"].fill(i) for i in range(4)]
    state = pools["mamba"].fill(7)
    assert b.batch_set_v1(KEYS[:5], pools["kv"].indices(*range(5))) == [True] * 5
    put = b.batch_set_v2(
        [transfer("indexer", KEYS[:4], 0, 1, 2, 3), transfer("mamba", KEYS[2:3], 7)]
    )
    assert put == {"indexer": [True] * 4, "mamba": [True]}
    found = b.batch_exists_v2(
        KEYS, [transfer("indexer", KEYS), transfer("mamba", KEYS[:1], trailing=True)]
    )
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (
        3,
        {"kv": 5, "indexer": 4, "mamba": 3},
    )
    assert found.restorable_prefix_pages == [3]
    got = b.batch_get_v2(
        [
            transfer("mamba", KEYS[2:3], 1),
            transfer("indexer", KEYS[1:3], 9, 8),
            transfer("kv", KEYS[:1]),
        ]
    )
    assert got == {"mamba": [True], "indexer": [True, True], "kv": [False]}
    assert torch.equal(pools["mamba"].page(1), state) and torch.equal(
        pools["indexer"].page(8), pages[2]
    )


def test_a_pool_of_indices_only(sidecar: rig.Sidecar, make: Make) -> None:
    indices = fake.Pool(MAPPED())
    side = fake.Pool(MAPPED())
    indices.kv_buffer = None
    b = make(sidecar.socket, indices, pools={"indexer": side}, extra={"weights": "logical"})
    assert (
        b.batch_set_v1(KEYS[:2], side.indices(0, 1)) == [True, True]
        and b.batch_exists(KEYS[:2]) == 0
    )
    transfer = fake.PoolTransfer(fake.PoolName.INDEXER, side.indices(0, 1), KEYS[:2])
    assert b.batch_set_v2([transfer]) == {"indexer": [True, True]}
    assert b.batch_exists_v2(KEYS, [transfer]).kv_hit_pages == 2
    assert b.batch_exists_v2(KEYS, []).kv_hit_pages == 0  # nothing of them is in the store


@pytest.mark.parametrize("broken", ["kv", "indexer"])
@pytest.mark.parametrize("error", [RuntimeError, TypeError, OSError])
def test_a_pool_that_cannot_be_registered_turns_the_store_off(
    sidecar: rig.Sidecar, make: Make, broken: str, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not taken for a pool of indices only, whose pages would be reported as stored."""

    class Broken(fake.Pool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise error("no meta")

    pools = {n: (Broken if n == broken else fake.Pool)(MAPPED()) for n in ("kv", "indexer")}
    b = make(sidecar.socket, pools["kv"], pools={"indexer": pools["indexer"]})
    indices = pools["kv"].indices(0, 1)
    keys = KEYS[:2]
    transfers = [fake.PoolTransfer(fake.PoolName(n), indices, keys) for n in pools]
    for _ in range(2):
        assert b.batch_set_v1(keys, indices) == b.batch_get_v1(keys, indices) == [False] * 2
        for move in (b.batch_set_v2, b.batch_get_v2):
            assert move(transfers) == {n: [False] * 2 for n in pools}
        assert b.batch_exists(keys) == 0 and not b.exists(keys[0]) and not b.clear()
        for asked in ([], transfers[1:]):
            assert b.batch_exists_v2(keys, asked).kv_hit_pages == 0
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1 and f"host pool '{broken}' (Broken) cannot be used" in caplog.text


class Opaque(fake.Pool):
    def get_page_buffer_meta(self, indices: Any) -> Any:
        raise NotImplementedError("side states")


class Uneven(fake.Pool):
    def get_page_buffer_meta(self, indices: Any) -> Any:
        ptrs, sizes = super().get_page_buffer_meta(indices)
        return [p + (16 if indices[0] > 20 else 0) for p in ptrs], sizes


@pytest.mark.parametrize("kind", [Opaque, Uneven])
def test_pools_whose_pages_cannot_be_placed_are_copied(
    sidecar: rig.Sidecar, make: Make, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = kind(MAPPED())
    b = make(sidecar.socket, pool, extra={"weights": kind.__name__})
    assert "Python copies each of its pages" in caplog.text
    page = pool.fill(3)
    assert (
        b.batch_set_v1(KEYS[:2], pool.indices(3, 0)) == [True, True] and b.batch_exists(KEYS) == 2
    )
    assert b.batch_get_v1(KEYS[:3], pool.indices(5, 6, 7)) == [True, True, False] and torch.equal(
        pool.page(5), page
    )
    assert b.copied_bytes == 4 * page.numel() * page.element_size()


def test_without_a_sidecar_and_with_one_that_comes(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    pool = fake.Pool(MAPPED())
    with node() as s, caplog.at_level(logging.INFO):
        b = make(s.socket, pool, connect=False)
        for _ in range(20):
            assert b.batch_exists(KEYS) == 0 and b.batch_set_v1(KEYS[:1], pool.indices(0)) == [
                False
            ]
            assert b.batch_get_v1(KEYS[:1], pool.indices(0)) == [False]
            assert b.batch_exists_v2(KEYS, []).kv_hit_pages == 0 and not b.clear()
        rig.wait_for("a line in the log", lambda: "no sidecar at" in caplog.text, 30)
        assert caplog.text.count("no sidecar at") == 1
        for again in range(2):
            s.start()
            rig.wait_for("a session", lambda: b._link.connected, 60)
            page = pool.fill(again)
            assert b.batch_exists(KEYS) == 0
            assert b.batch_set_v1(KEYS[:1], pool.indices(again)) == [True]
            assert b.batch_get_v1(KEYS[:1], pool.indices(9)) == [True]
            assert torch.equal(pool.page(9), page)
            s.kill()
            assert b.batch_get_v1(KEYS[:1], pool.indices(9)) == [False]


def test_a_sidecar_that_hangs_is_fenced_before_pages_are_given_back(make: Make) -> None:
    """It is stopped while it has a get. The call ends when its exit is proved, before SGLang's ten
    seconds."""
    with node() as s:
        s.start()
        pool = fake.Pool(MAPPED(), layers=64, width=1024)
        b = make(s.socket, pool)
        every = pool.indices(*range(len(KEYS)))
        assert all(b.batch_set_v1(KEYS, every))
        assert s.proc is not None
        os.kill(s.proc.pid, signal.SIGSTOP)
        stat = pathlib.Path(f"/proc/{s.proc.pid}/stat")
        rig.wait_for("a stopped sidecar", lambda: stat.read_text().rpartition(") ")[2][0] == "T", 9)
        began = time.monotonic()
        assert not any(b.batch_get_v1(KEYS, every))
        took = time.monotonic() - began
        assert link.CALL_S < took and link.CALL_S + link.FENCE_S < 10, took
        assert s.proc.wait(60) == -signal.SIGKILL
        before = pool.kv_buffer.clone()
        assert b.batch_exists(KEYS) == 0 and torch.equal(before, pool.kv_buffer)


def test_a_call_of_many_copies_has_one_deadline(
    sidecar: rig.Sidecar, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 2 * copies.MAX_BLOCKS
    pool = Opaque(MAPPED(), pages=n)
    b = make(sidecar.socket, pool)
    keys = [f"slow-{i}" for i in range(n)]
    quick, ends = b._link.put, []

    def noted(wanted: Any, end: float) -> Any:
        ends.append(end)
        return quick(wanted, end)

    monkeypatch.setattr(b._link, "put", noted)
    assert all(b.batch_set_v1(keys, pool.indices(*range(n)))) and len(ends) > 1
    assert len(set(ends)) == 1
    monkeypatch.setattr(hicache, "CALL_S", -1.0)
    assert b.batch_set_v1(["late"], pool.indices(0)) == [False] and not b.exists("late")


def test_many_threads(sidecar: rig.Sidecar, make: Make) -> None:
    pool = fake.Pool(MAPPED(), pages=64)
    b = make(sidecar.socket, pool, extra={"weights": "threads"})
    failed: list[str] = []

    def work(n: int) -> None:
        for i in range(25):
            key, page = page_key(n, i), pool.fill(2 * n)
            if not (
                b.batch_set_v1([key], pool.indices(2 * n))
                == b.batch_get_v1([key], pool.indices(2 * n + 1))
                == [True]
            ):
                failed.append(f"{n}/{i}")
            elif b.batch_exists([key]) != 1 or not torch.equal(pool.page(2 * n + 1), page):
                failed.append(f"{n}/{i}: other bytes")

    def page_key(n: int, i: int) -> str:
        return f"{n:032x}{i:032x}"

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failed and not any(t.is_alive() for t in threads)


def test_nothing_raises(sidecar: rig.Sidecar, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    pool = fake.Pool(MAPPED())
    b = make(sidecar.socket, pool)
    for indices in (None, pool.indices(0)[:-1], pool.indices(0) + 1, pool.indices(0) + pool.size):
        assert b.batch_get_v1(KEYS[:1], indices) == b.batch_set_v1(KEYS[:1], indices) == [False]
    assert b.batch_get_v2([fake.PoolTransfer("nothing", None, KEYS[:1])]) == {"nothing": [False]}
    assert b.batch_exists([]) == 0 and b.batch_get_v1([], pool.indices(0)[:0]) == []
    assert b.batch_exists([object()]) == 0  # type: ignore[list-item]
    pool.kv_buffer = fake.HostTensorAllocator().allocate(pool.kv_buffer.shape, pool.dtype, "cpu")
    assert b.batch_get_v1(KEYS[:1], pool.indices(0)) == [False] and "has moved" in caplog.text


def test_replaced_weights(
    sidecar: rig.Sidecar, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_replaced", [0])
    pool = fake.Pool(MAPPED())
    b = make(sidecar.socket, pool, extra={"weights": "before"})
    assert b.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]
    assert fake.WeightUpdater().update_weights_from_disk("there") == "there"
    assert b.batch_exists(KEYS[:1]) == 0 and b.batch_set_v1(KEYS[1:2], pool.indices(0)) == [False]
    b.close()
    with pytest.raises(ValueError, match="set weights"):
        make(sidecar.socket, pool, extra={"weights": ""})
    after = make(sidecar.socket, pool, extra={"weights": "after"})
    assert after.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]


UPDATES = (
    "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc",
    "begin_weight_update", "receive_weights_from_distributed", "load_weights_from_distributed",
    "end_weight_update",
)  # fmt: skip


@pytest.mark.parametrize("method", UPDATES)
def test_each_way_to_replace_weights_is_noticed(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(names, "_replaced", [0])
    weights = names.Weights(Settings.parse(EXTRA), fake.server_args, logging.getLogger())
    assert weights.current
    args = () if method == "begin_weight_update" else ("given",)
    assert getattr(fake.WeightUpdater(), method)(*args) == (args[0] if args else "begun")
    assert not weights.current


def test_weights_that_are_overwritten_by_the_checker_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_replaced", [0])
    weights = names.Weights(Settings.parse(EXTRA), fake.server_args, logging.getLogger())
    fake.WeightChecker().handle("checksum")
    assert weights.current
    fake.WeightChecker().handle("reset_tensors")
    assert not weights.current


def test_an_unknown_way_to_replace_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        with pytest.raises(
            ValueError, match=r"replaces weights in an unknown way.*nothing is stored"
        ):
            KvsprayHiCache(fake.Config(EXTRA), {})

    module = sys.modules[names._UPDATER]
    with monkeypatch.context() as m:
        m.setattr(module, "WeightUpdater", type("WeightUpdater", (), {"swap": None}))
        refused()
    with monkeypatch.context() as m:
        m.delattr(module, "WeightUpdater")
        refused()
    with monkeypatch.context() as m:
        m.setattr(sys.modules[names._CHECKER], "WeightChecker", type("WeightChecker", (), {}))
        refused()
    monkeypatch.setitem(sys.modules, names._UPDATER, None)  # an import of it fails
    refused()


def test_what_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra, want in (
        ({"sockets": "x"}, r"'sockets'.*did you mean 'socket'"),
        ({"zzz": 1}, r"'zzz'.*keys are socket, weights, secret_file"),
        ({"interface_v1": 0}, 'add "interface_v1": 1'),
        ({"socket": ""}, "want a path"),
        ({"weights": "x" * 129}, "at most 128 bytes"),
        ({"secret_file": str(tmp_path / "none")}, "No such file"),
        ({"secret_file": "/dev/null"}, "has 0 bytes"),
        ({"weights": ""}, "set weights"),
    ):
        with pytest.raises(ValueError, match=want):
            KvsprayHiCache(fake.Config({**EXTRA, **extra}), {})
    with pytest.raises(ValueError, match="tp_lcm_size"):
        KvsprayHiCache(fake.Config(EXTRA, should_split_heads=True), {})
    for name, value in (("enable_lora", True), ("lora_paths", ["math=/adapters/math"])):
        with monkeypatch.context() as m:
            m.setattr(fake.server_args, name, value)
            with pytest.raises(ValueError, match=f"{name} is set.*start without LoRA"):
                KvsprayHiCache(fake.Config(EXTRA), {})


def test_memory_is_mapped_only_for_this_backend(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> Any:
        return plugin._choose(lambda kind: kind, "shm")

    assert chosen() == "shm"
    text = json.dumps({"module_path": "kvspray_sglang.hicache"})
    file = tmp_path / "c.json"
    file.write_text(text)
    monkeypatch.setattr(fake.memory_config, "hicache_storage_backend", "dynamic")
    for extra, ours in (
        (text, True),
        (f"@{file}", True),
        ("{}", False),
        ("@nowhere", False),
        (None, False),
    ):
        monkeypatch.setattr(fake.memory_config, "hicache_storage_backend_extra_config", extra)
        assert (chosen() != "shm") == ours, extra
    tensor = plugin._allocator()().allocate((3, 5), torch.bfloat16, "cpu")
    region = memory.region_of(tensor.data_ptr(), tensor.data_ptr() + 30)
    assert tensor.shape == (3, 5) and region is not None and region.kind == kvspray.RegionKind.MEMFD
    addr = tensor.data_ptr()
    del tensor
    assert memory.region_of(addr, addr + 30) is None and region.fd == -1
    with monkeypatch.context() as m:
        m.setattr(
            kvspray.Region,
            "alloc",
            classmethod(lambda *_: (_ for _ in ()).throw(kvspray.KvsprayError("full"))),
        )
        assert plugin._allocator()().allocate((3, 5), torch.bfloat16, "cpu").shape == (3, 5)


def test_keys() -> None:
    assert (
        page_hash(KEYS[0]) == bytes(31) + b"\1"
        and len({page_hash(k) for k in (KEYS[9 - 2], "x", "X", "A" * 64, "a" * 64)}) == 5
    )
    assert Settings.parse(EXTRA).secret() == b""


def test_transfers_are_refused_in_a_release_without_their_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(backend: object, kind: object) -> str:
        return "SGLang's own"

    monkeypatch.setitem(sys.modules, "kvspray_sglang.pd", None)  # imports of it fail
    kind = SimpleNamespace(value="manager")
    with pytest.raises(RuntimeError, match=r"kvspray_sglang\.pd.*use SGLang 0\.5\.22 or 0\.5\.23"):
        plugin._class_of(own, SimpleNamespace(value="kvspray"), kind)
    assert plugin._class_of(own, SimpleNamespace(value="nixl"), kind) == "SGLang's own"


def test_two_releases_of_the_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvspray, "__version__", "7.8.9")
    kind = SimpleNamespace(value="manager")
    text = r"kvspray-sglang has release .*, the package kvspray 7\.8\.9; install one release"
    with pytest.raises(RuntimeError, match=text):
        plugin._class_of(lambda *_: None, SimpleNamespace(value="kvspray"), kind)
    with pytest.raises(RuntimeError, match=text):
        KvsprayHiCache(SimpleNamespace(extra_config=EXTRA))


def test_hooks_leave_another_release_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that does not use kvspray, and has its settings elsewhere."""
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)  # imports of it fail
    assert plugin._choose(lambda kind: kind, "shm") == "shm"
    queue, request = SimpleNamespace(), SimpleNamespace()
    plugin._hold(lambda q: None, queue)
    assert plugin._received(lambda q, r: "receiver", queue, request) == "receiver"
    assert plugin._sent(lambda q, r: True, queue, request) is True
    assert plugin._added(lambda q, r: "added", queue, request) == "added"
    assert not vars(queue) and not vars(request)
