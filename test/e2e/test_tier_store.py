"""KVSprayTier under vLLM's own manager and beside a real sidecar, without an engine: sidecars that
die or hang in each phase, pages that a disk has changed, and a random load. Each chunk that vLLM
may use has the bytes of its key."""

from __future__ import annotations

import contextlib
import pathlib
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import cluster as rig
import pytest

sys.path.append(str(rig.ROOT / "integration" / "vllm" / "tests"))

import tiers  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult  # noqa: E402

from kvspray_vllm import tier  # noqa: E402

WAIT_S = 120.0
ROUNDS = 300


@pytest.fixture
def sidecar(workdir: pathlib.Path) -> Iterator[rig.Sidecar]:
    disk = workdir / f"disk-{len(list(workdir.iterdir()))}"
    disk.mkdir()
    store = {"memory": "8MiB", "disk": [{"path": str(disk), "size": "64MiB"}]}
    config = {"store": store, "transfer": {"grace": "1s"}}
    out = rig.Sidecar(f"t{disk.name}", workdir, config).start()
    try:
        yield out
        assert out.panics() is None
    finally:
        out.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no misses. The engine kills a sidecar that hangs after these times."""
    for name in ("ASK_S", "GET_S", "PUT_S"):
        monkeypatch.setattr(tier, name, 15.0)


@contextlib.contextmanager
def engine(sidecar: rig.Sidecar, chunks: int = 16) -> Iterator[tiers.Engine]:
    out = tiers.Engine(chunks=chunks, socket=sidecar.socket)
    try:
        connected(out)
        yield out
    finally:
        out.close()


def connected(e: tiers.Engine) -> None:
    rig.wait_for("the engine's namespace", e.tier._usable, WAIT_S)
    e.step()


def settled(e: tiers.Engine) -> None:
    rig.wait_for("the end of all jobs", lambda: not e.busy(), WAIT_S)


def answered(e: tiers.Engine, keys: Sequence[Any]) -> tuple[Any, list[LookupResult]]:
    """A request whose lookups have answers, and these."""
    context, out = e.request(), [LookupResult.RETRY]

    def there() -> bool:
        out[:] = e.look(keys, context)
        e.step()
        return LookupResult.RETRY not in out

    rig.wait_for("answers", there, WAIT_S)
    return context, out


def load(e: tiers.Engine, keys: Sequence[Any]) -> int:
    """How many of the chunks came."""
    context, _ = answered(e, keys)
    settled(e)
    n = e.check(keys, context)
    e.finish(context)
    return n


def test_chunks_come_to_another_engine(sidecar: rig.Sidecar) -> None:
    keys = [tiers.key(i) for i in range(12)]
    with engine(sidecar) as a, engine(sidecar) as b:
        a.store(keys)
        settled(a)
        assert load(b, keys) == 12
        assert load(b, [tiers.key(99)]) == 0


@pytest.mark.parametrize("how", ["kill", "hang"])
@pytest.mark.parametrize("phase", ["question", "put", "get"])
def test_the_sidecar_goes_away(sidecar: rig.Sidecar, phase: str, how: str) -> None:
    """It stands still with an open request. Then it is killed, or the engine kills it."""
    old, new = [tiers.key(i) for i in range(6)], [tiers.key(i) for i in range(50, 56)]
    with engine(sidecar) as other, engine(sidecar, chunks=8) as e:
        other.store(old)
        settled(other)
        assert load(e, old[:1]) == 1
        context = e.request()
        if phase == "get":
            context, _ = looked_up(e, old)
        sidecar.signal(signal.SIGSTOP)
        if phase == "put":
            e.store(new, context)
        elif phase == "question":
            assert LookupResult.RETRY in e.look(new, context)
        e.step()
        if phase != "question":
            assert e.busy() and e.tier._leases
        if how == "kill":
            sidecar.kill()
        settled(e)

        def missed() -> bool:
            e.step()
            return LookupResult.RETRY not in e.look(old + new, context)

        rig.wait_for("misses", missed, WAIT_S)
        # Their chunks are given to others, which a late write would change.
        for i in range(3):
            e.store([tiers.key(100 + 8 * i + k) for k in range(8)])
            settled(e)
            e.check([tiers.key(100 + 8 * i + k) for k in range(8)], context)
        sidecar.kill()
        sidecar.start()
        for x in (e, other):
            connected(x)
        assert load(e, old) == 6, "from the next sidecar's disk"


def looked_up(e: tiers.Engine, keys: Sequence[Any]) -> tuple[Any, list[LookupResult]]:
    """As answered(), but what was found is not loaded yet."""
    context, out = e.request(), [LookupResult.RETRY]

    def there() -> bool:
        out[:] = e.look(keys, context)
        if LookupResult.RETRY in out:
            e.step()
        return LookupResult.RETRY not in out

    rig.wait_for("answers", there, WAIT_S)
    return context, out


def test_pages_that_a_disk_has_changed(sidecar: rig.Sidecar) -> None:
    keys = [tiers.key(i) for i in range(12)]
    with engine(sidecar) as a:
        a.store(keys)
        settled(a)
    sidecar.stop()
    changed = 0
    for path in pathlib.Path(sidecar.config["store"]["disk"][0]["path"]).rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        for k in keys:
            at = data.find(tiers.content(k).tobytes())
            if at >= 0:
                data[at + tiers.ROW // 2] ^= 0x40
                path.write_bytes(data)
                changed += 1
    assert changed == 12
    sidecar.start()
    with engine(sidecar) as b:
        assert load(b, keys) == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_load(sidecar: rig.Sidecar, seed: int) -> None:
    """Two engines, whose chunks and whose store have no room for all keys, while the sidecar is
    killed and stopped."""
    r = random.Random(seed)
    done = threading.Event()

    def harm() -> None:
        rand = random.Random(seed)
        while not done.wait(rand.uniform(0.05, 0.6)):
            if rand.random() < 0.5:
                sidecar.kill()
                sidecar.start()
            else:
                sidecar.stop_for(rand.uniform(0.05, 0.5))

    with engine(sidecar) as a, engine(sidecar) as b:
        thread = threading.Thread(target=harm)
        thread.start()
        try:
            came = sum(one(r, r.choice((a, b))) for _ in range(ROUNDS))
        finally:
            done.set()
            thread.join()
        for e in (a, b):
            settled(e)
        assert came > 0


def one(r: random.Random, e: tiers.Engine) -> int:
    """A request of some chunks: those that are there are loaded, the others computed and stored."""
    first = r.randrange(300)
    keys = [tiers.key(i) for i in range(first, first + r.randint(1, 8))]
    context, _ = answered(e, keys)
    if r.random() < 0.3:  # it goes on before all came
        e.step()
    else:
        settled(e)
    n = e.check(keys, context)
    e.store(keys, context)
    e.check(keys, context)
    e.finish(context)
    e.step()
    if r.random() < 0.05:
        e.manager.reset_cache()
        e.manager.on_reset_flushed()
    return n
