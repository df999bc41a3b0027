"""Real engines that use the store of their node: tokens equal to a plain engine's, hits of what
another engine has computed, and nothing held afterwards; also with preemption, aborts, a sidecar
that restarts, a store that is too small, and beside transfers."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import cluster as rig
import engines
import msgspec
import pytest
import zmq
from conftest import Cluster
from prompts import BLOCK, fresh
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

PAGE = 65536  # bytes: 32 tokens, four layers, in float32


@contextlib.contextmanager
def listening(endpoint: str) -> Iterator[Callable[[], list[Any]]]:
    """A function that returns the events about the store since its last call."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.subscribe(b"")

        def events() -> list[Any]:
            out = []
            while socket.poll(0):
                _, _, payload = socket.recv_multipart()
                out += [
                    e
                    for e in decoder.decode(payload).events
                    if getattr(e, "ownership", None) == "kvspray"
                ]
            return out

        yield events


def collect(events: list[Any], pages: dict[Any, list[int]]) -> int:
    """Adds each page's tokens by its hash; how many pages there are."""
    for e in events:
        if isinstance(e, BlockStored):
            for i, h in enumerate(e.block_hashes):
                pages[h] = e.token_ids[i * e.block_size : (i + 1) * e.block_size]
    return len(pages)


class Node(Cluster):
    """One sidecar with a store, two engines, and a plain one. The engine P has room for 2,048
    tokens."""

    def __init__(self, dir: pathlib.Path, store: dict[str, Any]) -> None:
        super().__init__(dir, {"store": store}, start=False)
        self.sp.start()

    def spawn(self, name: str, **args: Any) -> engines.Engine:
        kv = None if name == "R" else self.kv(self.sp, "kv_both", store=True)
        args = (
            {"kv_cache_memory_bytes": 4 << 20, "max_model_len": 1536, **args}
            if name == "P"
            else args
        )
        log = self.dir / f"{name}.log"
        self.engines[name] = engines.Engine(name, str(self.model), log, kv, **args)
        return self.engines[name]

    def settle(self, timeout: float = 60.0) -> None:
        for name, e in self.engines.items():
            rig.wait_for(
                f"engine {name} idle",
                lambda e=e: e.idle() and e.status().get("putting", 0) == 0,
                timeout,
            )

    def forget(self, e: engines.Engine) -> None:
        """Its prefix cache is empty; this needs every block to be free."""
        rig.wait_for(f"engine {e.name} has all of its blocks", e.clear_prefix_cache, 60)

    def check(self, prompts: list[list[int]], *on: engines.Engine, n: int = 12) -> None:
        want = [self.r.run(p, n).tokens for p in prompts]
        for e in on:
            got = [x.result().tokens for x in [e.add(p, n) for p in prompts]]
            assert got == want, e.name


def received(e: engines.Engine) -> int:
    name = "vllm:kvspray_transfers_total"
    return int(rig.total(e.metrics(), name, side="received", outcome="ok"))


def pins(e: engines.Engine, outcome: str) -> int:
    return int(rig.total(e.metrics(), "vllm:kvspray_store_pins_total", outcome=outcome))


def pages(e: engines.Engine, op: str, *outcomes: str) -> int:
    m = e.metrics()
    return int(
        sum(rig.total(m, "vllm:kvspray_store_pages_total", op=op, outcome=o) for o in outcomes)
    )


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Node]:
    disk = workdir / "disk"
    disk.mkdir()
    out = Node(workdir, {"memory": "48MiB", "disk": [{"path": str(disk), "size": "256MiB"}]})
    try:
        for name in "PDR":
            out.spawn(name)
        for e in out.engines.values():
            e.wait_up()
        out.connected()
        yield out
        out.settle()
        assert out.sp.panics() is None
    finally:
        out.close()


def test_another_engine_loads_what_one_has_computed(c: Node) -> None:
    prompts = [fresh(n, ("first", n)) for n in (1, 31, 32, 33, 64, 65, 257, 513, 1024)]
    for p in prompts:
        c.check([p], c.p)
    c.settle()
    before = pages(c.d, "get", "memory", "disk")
    for p in prompts:
        c.check([p], c.d)
    assert pages(c.d, "get", "memory", "disk") - before == sum(
        (len(p) - 1) // BLOCK for p in prompts
    )
    assert pages(c.d, "get", "miss", "failed", "damaged") == 0


def test_a_conversation_goes_on_at_another_engine(c: Node) -> None:
    talk = fresh(300, "talk")
    for turn in range(4):
        e = (c.p, c.d)[turn % 2]
        want = c.r.run(talk, 40).tokens[0]
        before = pages(e, "get", "memory", "disk")
        assert e.run(talk, 40).tokens[0] == want, turn
        if turn:
            assert pages(e, "get", "memory", "disk") > before, "answers are saved, too"
        c.settle()
        talk += want + fresh(60, ("question", turn))


def test_preemption_by_a_full_pool(c: Node) -> None:
    prompts = [fresh(980, ("big", i)) for i in range(2)]
    c.check(prompts, c.p, n=60)
    assert rig.total(c.p.metrics(), "vllm:num_preemptions_total") > 0
    c.settle()
    c.forget(c.p)
    c.check(prompts, c.p, n=60)  # most of it is loaded now


def test_forced_preemption(c: Node) -> None:
    prompts = [fresh(300, ("forced", i)) for i in range(3)]
    want = [c.r.run(p, 40).tokens for p in prompts]
    waiting = [c.d.add(p, 40) for p in prompts]
    start = c.d.steps()
    rig.wait_for("some steps", lambda: c.d.steps() > start + 5, 60)
    try:
        c.d.preempt_all()
    except RuntimeError:
        # Blocks were being saved: vLLM does not reset its cache then; the requests are preempted
        # all the same.
        pass
    assert [w.result().tokens for w in waiting] == want


def test_abort_while_a_prompt_loads(c: Node) -> None:
    prompts = [fresh(500, ("abort", i)) for i in range(3)]
    for p in prompts:
        c.check([p], c.p)
    c.settle()
    c.forget(c.d)
    for p in prompts:
        pending = c.d.add(p, 30)
        pending.abort()
        pending.result()
    c.settle()
    c.check(prompts, c.d)


def test_transfers_and_the_store_in_one_engine(c: Node) -> None:
    """P loads a prompt's first part, computes the rest, and sends all of it to D, which saves
    nothing twice."""
    base = fresh(640, "pd")
    c.check([base], c.p)
    c.settle()
    c.forget(c.p)
    prompt = base + fresh(90, "pd tail")
    moved = received(c.d)
    loaded = pages(c.p, "get", "memory", "disk")
    c.forget(c.d)
    assert c.prefill_first(prompt, 12).tokens == c.r.run(prompt, 12).tokens
    assert received(c.d) == moved + 1
    assert pages(c.p, "get", "memory", "disk") == loaded + 20


def test_an_answer_is_back_at_prefill_for_the_next_turn(c: Node) -> None:
    """P loads what D has computed. A router may bound that."""
    for name, load, want in (("answer", None, 3), ("bounded answer", 320, 1)):
        talk = fresh(300, name)
        first = c.r.run(talk, 100).tokens[0]
        assert c.prefill_first(talk, 100).tokens[0] == first
        c.settle()
        talk += first + fresh(60, (name, "question"))
        loaded = pages(c.p, "get", "memory", "disk")
        moved = received(c.d)
        kv = {"do_remote_decode": True, "kvspray": {"v": 1, "fanout": 1, "load": load}}
        prefill = c.p.add(talk, 1, kv=kv).result()
        assert c.d.add(talk, 12, kv=prefill.kv).result().tokens == c.r.run(talk, 12).tokens
        # P has 9 blocks of the prompt; 399 tokens are 12 blocks.
        assert pages(c.p, "get", "memory", "disk") == loaded + want
        assert received(c.d) == moved + 1


def test_events_tell_an_index_what_the_store_has(
    zygote: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A listener of vLLM's publisher learns of each page that the store has, and of one that is
    gone."""
    c = Node(pathlib.Path(tmp_path_factory.mktemp("events")), {"memory": "2MiB"})
    try:
        endpoint = f"ipc://{c.dir}/events"
        c.spawn(
            "P",
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint
            ),
        )
        with listening(endpoint) as store_events:
            c.engines["P"].wait_up()
            prompt = fresh(300, "events")
            c.p.run(prompt, 40)
            c.settle()
            c.p.run(fresh(5, "a step, after which vLLM publishes"), 4)
            there: dict[Any, list[int]] = {}
            rig.wait_for(
                "events", lambda: collect(store_events(), there) == pages(c.p, "put", "stored"), 30
            )
            # 339 tokens, the last of which was never computed.
            assert len(there) == 10
            whole = range(0, len(prompt) - BLOCK + 1, BLOCK)
            assert {tuple(t) for t in there.values()} >= {
                tuple(prompt[i : i + BLOCK]) for i in whole
            }
            gone = set(there)
            for i in range(3):  # more than the store holds
                c.p.run(fresh(900, ("events", i)), 4)
            c.settle()
            c.forget(c.p)
            c.p.run(prompt, 4)  # asks for pages that are gone
            removed: set[Any] = set()

            def some_removed() -> bool:
                removed.update(
                    h for e in store_events() if isinstance(e, BlockRemoved) for h in e.block_hashes
                )
                return bool(removed & gone)

            rig.wait_for("an event that pages are gone", some_removed, 30)
    finally:
        c.close()


def test_a_sidecar_that_restarts_serves_from_its_disk(c: Node) -> None:
    prompts = [fresh(500, ("restart", i)) for i in range(2)]
    for p in prompts:
        c.check([p], c.p)
    c.settle()
    long = fresh(900, "through it")
    want = c.r.run(long, 40).tokens
    running = c.p.add(long, 40)
    start = c.p.steps()
    rig.wait_for("some steps", lambda: c.p.steps() > start + 2, 60)
    c.sp.kill()
    c.sp.start()
    assert running.result().tokens == want
    c.connected()
    c.check([fresh(5, "a step, in which the worker opens its namespace")], c.p, c.d)
    before = pages(c.d, "get", "disk")
    c.forget(c.d)
    c.check(prompts, c.d)
    assert pages(c.d, "get", "disk") > before


def test_a_store_that_is_too_small(zygote: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pages are given up for others all the time, also between question and load."""
    c = Node(pathlib.Path(tmp_path_factory.mktemp("small")), {"memory": "2MiB"})
    try:
        for name in "PR":
            c.spawn(name)
        for e in c.engines.values():
            e.wait_up()
        pinned = fresh(200, "pinned")  # with its answer 7 pages, and a tenant may pin 8
        hint = {"kvspray": {"v": 1, "fanout": 1, "pin": True, "ttl": 600}}
        answer = c.p.add(pinned, 30, kv=hint).result().tokens
        c.settle()
        prompts = [fresh(400, ("small", i)) for i in range(5)]  # 4 MB of pages
        want = [c.r.run(p, 8).tokens for p in prompts]
        for _ in range(3):
            got = [x.result().tokens for x in [c.p.add(p, 8) for p in prompts]]
            assert got == want
            c.settle()
            c.forget(c.p)
        assert pages(c.p, "put", "stored") > 64
        before = pages(c.p, "get", "memory")
        assert c.p.run(pinned + answer[0], 4).tokens == c.r.run(pinned + answer[0], 4).tokens
        assert pages(c.p, "get", "memory") == before + 7, "others were given up in their place"
        assert pins(c.p, "held") == 1
        c.p.add(fresh(400, "too much"), 4, kv=hint).result()

        def refused() -> bool:
            c.p.run(fresh(5, "a step, which takes the sidecar's answer"), 4)
            return pins(c.p, "refused") == 1

        rig.wait_for("the refusal of a pin", refused, 60)
    finally:
        c.close()


def test_several_ranks(zygote: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    c = Node(pathlib.Path(tmp_path_factory.mktemp("ranks")), {"memory": "48MiB"})
    try:
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        c.spawn("P", **ranks)
        c.spawn("R")
        for e in c.engines.values():
            e.wait_up()
        prompts = [fresh(n, ("ranks", n)) for n in (33, 400)]
        c.check(prompts, c.p)
        c.settle()
        c.forget(c.p)
        c.check(prompts, c.p)
        # Of each rank.
        assert pages(c.p, "get", "memory") == 2 * sum((len(p) - 1) // BLOCK for p in prompts)
    finally:
        c.close()
