"""A KV cache that vLLM frees for a sleep. The connector first takes it back from the sidecar, uses
nothing that was on its way, and lends other memory at the same addresses after the wake-up."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import DECODE, Engine, e, load
from vllm.device_allocator import AllocationData, cumem

from kvspray_vllm import KVSprayConnector, layout, shim, sleep
from kvspray_vllm import connector as connector_module
from kvspray_vllm.caches import Storage
from kvspray_vllm.meta import Landed, Put, StepMeta
from kvspray_vllm.saving import Saving

STORAGES = (
    Storage(0x1000, 4096, torch.device("cuda")),
    Storage(0x9000, 4096, torch.device("cuda")),
)


class Client:
    """A worker's client whose memory comes and goes."""

    def __init__(self) -> None:
        self.presented: list[tuple[int, str]] = []  # regions, and the weights of their layout
        self.open: set[int] = set()
        self.made = 0
        self.refusals = 0  # of memory, before one is accepted
        self.full = False  # regions are refused
        self.connected = self.answers = True

    def gpu_memory(self, addr: int, nbytes: int) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise shim.ShimError("the allocation cannot be exported")
        self.made += 1
        self.open.add(self.made)
        return SimpleNamespace(number=self.made, close=lambda n=self.made: self.open.remove(n))

    def replace(self, memory: Any, layout: Any = None) -> None:
        assert self.open >= {m.number for m in memory}
        if self.full and memory:
            raise shim.ShimError("regions in too many files")
        self.presented.append((len(memory), layout["identity"]["weights"] if layout else ""))

    def describe(self, layout: Any) -> None:
        assert self.open, "a layout of memory that is not there"
        self.presented.append((len(self.open), layout["identity"]["weights"]))

    def holds(self) -> bool:
        return False

    def wait_connected(self, seconds: float) -> bool:
        return self.answers

    wait_replaced = wait_connected


@pytest.fixture(autouse=True)
def other_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_module, "get_kv_transfer_group", lambda: None)


def connector(e: Engine, client: Client) -> KVSprayConnector:
    c = object.__new__(KVSprayConnector)
    c.region = None
    c._worker, c._worker_client = e.worker, client  # type: ignore[assignment]
    c._vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))  # type: ignore[assignment]
    c._gpu, c._saving, c._storages = True, None, STORAGES
    c._layout = {"identity": {"weights": "first"}}
    c._generation = "second"  # type: ignore[assignment]
    c._regions = c._memory_of(STORAGES)
    return c


def test_what_was_under_way_is_not_used(e: Engine) -> None:
    client = Client()
    c = connector(e, client)
    e.add("source", 40, dict(DECODE))
    for req in ("complete", "open"):
        load(e, req)
    e.step({"source": 40})
    assert e.finish("source")[0], "its blocks are held"
    e.worker_shim.end(2, received=True)  # complete, and not seen before the sleep
    c.unregister_kv_caches()
    c.unregister_kv_caches()
    assert client.presented == [(0, "")] and not client.open
    assert {call[1] for call in e.worker_shim.take() if call[0] == "cancel"} >= {1, 3}
    c.restore_kv_caches()
    c.restore_kv_caches()
    assert client.presented == [(0, ""), (2, "first")] and client.open == {3, 4}
    for lease, received in ((1, False), (3, True)):
        e.worker_shim.end(lease, received, status=shim.CANCELLED)
    done = e.step()
    assert done.sent == {"source"} and done.received == done.failed == {
        "complete",
        "open",
    }
    load(e, "after")
    e.step()
    assert e.worker_shim.leases == 4, "transfers go on after the wake-up"


def test_nothing_is_offered_while_the_cache_sleeps(e: Engine) -> None:
    c = connector(e, Client())
    c.unregister_kv_caches()
    load(e, "asleep")
    done = e.step()
    assert done.failed == {"asleep"} and e.worker_shim.leases == 0


def test_other_weights_during_the_sleep(e: Engine) -> None:
    client = Client()
    c = connector(e, client)
    c.unregister_kv_caches()
    c._weights_changed()
    load(e, "asleep")
    assert e.step().failed == {"asleep"}, "the weights are there before the cache"
    c.restore_kv_caches()
    assert client.presented == [(0, ""), (2, "second")]


def test_a_wake_up_that_cannot_lend_its_memory(e: Engine, caplog: Any) -> None:
    client = Client()
    c = connector(e, client)
    c.unregister_kv_caches()
    client.refusals = 1
    c.restore_kv_caches()
    assert "cannot be exported" in caplog.text and not client.open
    load(e, "one")
    assert e.step().failed == {"one"}, "the engine goes on without transfers"
    c._weights_changed()
    c.unregister_kv_caches()
    c.restore_kv_caches()
    load(e, "two")
    assert not e.step().received and e.worker_shim.leases == 0 and not client.open


def test_memory_of_a_wake_up_that_is_refused_is_not_kept(e: Engine, caplog: Any) -> None:
    """Exported memory would stay in use when vLLM frees it for the next sleep."""
    client = Client()
    c = connector(e, client)
    c.unregister_kv_caches()
    client.full = True
    c.restore_kv_caches()
    assert "regions in too many files" in caplog.text and not client.open


class Pages:
    """The store's pages of one namespace, read from and written to regions."""

    error = ""

    def __init__(self, regions: Any) -> None:
        self.regions, self.closed = [r.number for r in regions], False

    def ready(self) -> bool:
        return not self.closed

    def put(self, *_: Any) -> int:
        assert not self.closed, "a page of a cache that sleeps"
        return 77

    def close(self) -> None:
        self.closed = True


def put_in(e: Engine, c: KVSprayConnector, saving: Saving, id: int, number: int) -> bool | None:
    """Whether a PUT of the present epoch succeeded; None while it is under way."""
    landed, stats = Landed(), SimpleNamespace(pages=lambda *_: None)
    put = Put(id, "r", (b"h",), (1,), b"")
    meta: Any = StepMeta(number=number, puts=[put], epochs={0: saving._epoch})
    saving.begin(meta, 1, landed, stats, c._worker._disabled)  # type: ignore[arg-type, union-attr]
    return landed.saved.get(id, {}).get(0)


def test_no_page_of_a_sleeping_cache_is_put(e: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    client, opened = Client(), []
    c = connector(e, client)
    monkeypatch.setattr(connector_module.pages, "namespace_of", lambda *_: "namespace")
    c._layout["groups"], c._ranks = [], None  # type: ignore[assignment]

    def open_pages(_: Any) -> Pages:
        opened.append(Pages(c._regions))
        return opened[-1]

    c._saving = saving = Saving(0, open_pages, logging.getLogger("test"))  # type: ignore[arg-type]
    e.worker.set_saving(saving)
    c._open_store()
    assert put_in(e, c, saving, 1, 1) is None, "it is under way"
    c.unregister_kv_caches()
    assert opened[0].closed and opened[0].regions == [1, 2]
    assert put_in(e, c, saving, 2, 2) is False
    cut = shim.Ended(77, True, shim.FAILED, 0, 0, "", "the memory was replaced")
    landed = Landed()
    assert saving.ended(cut, landed, SimpleNamespace(pages=lambda *_: None))  # type: ignore[arg-type]
    assert landed.saved == {1: {0: False}}, "its blocks are free, and the page is not there"
    c.restore_kv_caches()
    assert len(opened) == 2 and opened[1].regions == [3, 4], "pages of the memory that is new"
    assert put_in(e, c, saving, 3, 3) is None


def test_a_sidecar_that_does_not_answer(e: Engine, caplog: Any) -> None:
    client = Client()
    client.answers = False
    with caplog.at_level(logging.WARNING):
        connector(e, client).unregister_kv_caches()
        assert "may still map the KV cache" in caplog.text
        caplog.clear()
        client.connected = False  # before the sleep, and no lease is open
        connector(e, client).unregister_kv_caches()
    assert not caplog.text


def test_the_wait_for_a_sidecar_that_exits_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not come back: its exit has freed the memory."""
    clock, exits, exit_at = [0.0], [3], [1.0]

    def wait_connected(seconds: float) -> bool:
        clock[0] += max(seconds, 0.01)
        exits[0] = 4 if clock[0] >= exit_at[0] else 3
        return False

    worker = object.__new__(shim.Worker)
    worker._c = SimpleNamespace(  # type: ignore[assignment]
        wait_connected=wait_connected,
        replace=lambda *_: None,
        status=lambda: SimpleNamespace(counters={"sidecar_exits": exits[0]}),
    )
    monkeypatch.setattr(shim.time, "monotonic", lambda: clock[0])
    worker.replace([])
    assert worker.wait_replaced(10.0) and clock[0] < 1.5
    clock[0], exits[0], exit_at[0] = 0.0, 3, 99.0
    worker.replace([])
    assert not worker.wait_replaced(10.0) and 10 <= clock[0] < 11


@pytest.mark.parametrize("alone", [True, False])
def test_memory_that_only_this_process_can_map(
    e: Engine, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """The connector replaces it at the same addresses while it is still empty, unless another
    connector of the engine may already use it."""
    calls: list[Any] = []
    monkeypatch.setattr(sleep.Gpu, "synchronize", lambda _: calls.append("synchronize"))
    monkeypatch.setattr(sleep.Gpu, "unmap", lambda _, handle: calls.append(("unmap", handle[2])))
    monkeypatch.setattr(sleep.Gpu, "map", lambda _, handle: calls.append(("map", handle[2])))
    zero = SimpleNamespace(cudaMemset=lambda *args: calls.append(("zero", *args)))
    monkeypatch.setattr(cumem, "libcudart", zero)
    whole = AllocationData((0, 0x2000, 0x9000, 0), "kv_cache")
    allocator = SimpleNamespace(pointer_to_data={0x9000: whole})
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    client = Client()
    c = connector(e, client)
    monkeypatch.setattr(connector_module, "get_kv_transfer_group", lambda: c if alone else None)
    c.unregister_kv_caches()
    client.gpu_memory = refuse_first(client, 0x9000)  # type: ignore[method-assign]
    c.restore_kv_caches()
    if not alone:
        assert not client.open and not calls
        return
    assert len(client.open) == 2 and not whole.is_asleep
    assert calls == [
        "synchronize", ("unmap", 0x9000), ("map", 0x9000), ("zero", 0x9000, 0, 0x2000),
        "synchronize",
    ]  # fmt: skip


def refuse_first(client: Client, address: int) -> Any:
    real = client.gpu_memory
    refused: list[int] = []

    def memory(addr: int, nbytes: int) -> Any:
        if addr == address and not refused:
            refused.append(addr)
            raise shim.ShimError("the allocation cannot be exported")
        return real(addr, nbytes)

    return memory


def test_a_vllm_that_does_not_announce_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = SimpleNamespace(sleeps=False)
    monkeypatch.setattr(layout, "CAPABILITIES", capabilities)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=SimpleNamespace(
            enable_sleep_mode=True, is_encoder_decoder=False, multimodal_config=None
        ),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
    )
    with pytest.raises(layout.Unsupported, match="enable_sleep_mode is on"):
        layout.check_config(config)  # type: ignore[arg-type]
    capabilities.sleeps = True
    layout.check_config(config)  # type: ignore[arg-type]
