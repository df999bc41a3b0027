"""LoRA adapters differ by what their files hold, as the engine has loaded them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import DECODE, Engine, Request, e, fake_hash, prefill_first
from safetensors.torch import save_file

from kvspray.weights import CheckpointError, digest
from kvspray_vllm import adapters, shim
from kvspray_vllm.adapters import Adapters, LoadWatch
from kvspray_vllm.params import ParamsError


def saved(directory: pathlib.Path, value: float, base: str = "m") -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    config = directory / "adapter_config.json"
    config.write_text(json.dumps({"r": 8, "base_model_name_or_path": base}))
    save_file({"a": torch.full((8, 8), value)}, directory / "adapter_model.safetensors")
    return directory


def lora(path: pathlib.Path, name: str = "tuned", id: int = 1, inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_int_id=id, lora_path=str(path), load_inplace=inplace
    )


def content(a: Adapters, adapter: Any) -> str:
    """The answer to a question of this moment."""
    got = a.content(adapter, a.ask(adapter), 60)
    assert got is not None
    return got


@pytest.fixture
def one(tmp_path: pathlib.Path) -> pathlib.Path:
    return saved(tmp_path / "one", 1.0)


def test_content_and_not_name(one: pathlib.Path, tmp_path: pathlib.Path) -> None:
    a = Adapters()
    want = content(a, lora(one))
    copy = shutil.copytree(one, tmp_path / "copy")
    saved(copy, 1.0, base="/elsewhere/m")
    assert content(a, lora(copy, "another", 2)) == want
    assert content(a, lora(saved(tmp_path / "two", 2.0), "tuned", 3)) != want


def test_what_has_not_changed_is_read_once(
    one: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(adapters, "digest", lambda path: (read.append(path), digest(path))[1])
    a = Adapters()
    assert content(a, lora(one)) == content(a, lora(one)) and len(read) == 1
    os.utime(one / "adapter_model.safetensors", ns=(1, 1))
    content(a, lora(one))
    assert len(read) == 2


def test_files_that_change_are_refused_until_they_are_loaded(one: pathlib.Path) -> None:
    a = Adapters()
    before = content(a, lora(one))
    saved(one, 2.0)
    with pytest.raises(ParamsError, match="not those that were loaded") as err:
        content(a, lora(one))
    assert err.value.label == "lora_changed"
    after = content(a, lora(one, inplace=True))
    assert after == content(a, lora(one, inplace=True)) != before
    assert content(a, lora(one, id=7)) == after
    saved(one, 1.0)
    with pytest.raises(ParamsError):
        content(a, lora(one, id=7))
    assert content(a, lora(one, inplace=True)) == before


def test_files_that_cannot_be_read(
    one: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "none", tmp_path, one / "adapter_config.json"):
        with pytest.raises(ParamsError, match="cannot be read") as err:
            content(Adapters(), lora(path))
        assert err.value.label == "lora_unknown"
    times = iter(range(100))
    monkeypatch.setattr(adapters, "_signature", lambda path: (("f", 0, 0, 0, next(times)),))
    with pytest.raises(ParamsError, match="change while they are read"):
        content(Adapters(), lora(one))


def test_what_is_remembered_is_bounded(one: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 4)
    a = Adapters()
    for i in range(10):
        content(a, lora(one, id=i + 1))
    assert len(a._loaded) == 4 and len(a._reader._digests._known) == 1
    monkeypatch.setattr(adapters, "MAX_FILES", 1)
    with pytest.raises(ParamsError, match="more than 1 files"):
        content(Adapters(), lora(one))


# ---- both sides


def add(e: Engine, req: str, n: int, kv: dict[str, Any], adapter: Any) -> Any:
    hashed: list[str] = []
    e.scheduler._hash = lambda tokens, lora, salt, items: (
        hashed.append(lora),
        fake_hash(tokens, lora, salt, items),
    )[1]
    r = Request(
        request_id=req, prompt_token_ids=list(range(n)), num_prompt_tokens=n, num_computed_tokens=0,
        kv_transfer_params=kv, lora_request=adapter,
        status=SimpleNamespace(name="RUNNING"),
    )  # fmt: skip
    if adapter is not None:  # as an earlier request that named it would have it read
        with contextlib.suppress(OSError, CheckpointError):
            e.scheduler._adapters.ask(adapter).result(60)
    new(e, r)
    read(e, r)
    return r, hashed


def new(e: Engine, r: Any) -> None:
    e.requests[r.request_id] = r
    e.tables[r.request_id] = list(range(1, 1 + -(-r.num_prompt_tokens // 16)))
    e.scheduler.on_new_request(r)


def request(kv: dict[str, Any], adapter: Any, req: str = "r") -> Any:
    return Request(
        request_id=req, prompt_token_ids=list(range(40)), num_prompt_tokens=40,
        num_computed_tokens=0, kv_transfer_params=kv, lora_request=adapter,
        status=SimpleNamespace(name="RUNNING"),
    )  # fmt: skip


def read(e: Engine, r: Any) -> None:
    """Until the files of its adapter are read."""
    end = time.monotonic() + 60
    while r.request_id in e.scheduler._reading and time.monotonic() < end:
        assert (
            e.scheduler.matched(r, 0) == (None, False) or r.request_id not in e.scheduler._reading
        )


def worker_read(e: Engine, id: int, content: str) -> None:
    """As vLLM's worker does for an adapter that is loaded before a request names it."""
    e.worker.adapter_loaded(id, content)


def test_a_prompt_s_hash_has_the_content(e: Engine, one: pathlib.Path) -> None:
    _, hashed = add(e, "r", 40, dict(DECODE), lora(one))
    assert hashed == [digest(one)]
    assert e.meta({"r": 40}).intents[0].adapter == (1, digest(one))
    e.finish("r")
    assert e.scheduler._adapter == {}


def test_the_prompt_of_an_unreadable_adapter_is_prefilled_locally(
    e: Engine, tmp_path: pathlib.Path
) -> None:
    add(e, "r", 40, dict(DECODE), lora(tmp_path / "none"))
    assert not e.meta({"r": 40}).intents
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"lora_unknown": 1}


def test_the_prefill_s_answer_names_the_content(e: Engine, one: pathlib.Path) -> None:
    r, _ = add(e, "r", 40, dict(DECODE), lora(one))
    e.meta({"r": 40})
    r.status.name = "FINISHED_LENGTH_CAPPED"
    _, kv = e.scheduler.finished(r, (e.tables["r"],))
    assert kv is not None and kv["kvspray"]["adapter"] == digest(one)


@pytest.mark.parametrize("theirs", ["same", "other", "none"])
@pytest.mark.parametrize("own", [True, False])
def test_one_name_with_two_contents_is_refused_with_both(
    e: Engine,
    one: pathlib.Path,
    own: bool,
    theirs: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = prefill_first()
    there = {"same": digest(one), "other": "checkpoint:other", "none": None}[theirs]
    if there is not None:
        kv["kvspray"] = {**kv["kvspray"], "adapter": there}
    with caplog.at_level("INFO"):
        add(e, "r", 40, kv, lora(one) if own else None)
    stats = e.scheduler.take_stats()
    refused = theirs == "other" or (theirs == "same" and not own)
    assert (stats is not None and stats.data["local"] == {"lora_differs": 1}) == refused
    assert bool(e.scheduler._destinations) != refused
    if refused:
        ((_, hash, _, why),) = e.scheduler_shim.declined
        assert hash == bytes(32), "the prefill has these blocks under a hash of its own"
        mine = digest(one) if own else "no adapter"
        for text in (why, caplog.text):
            assert str(there) in text and mine in text


@pytest.mark.parametrize("content", ["other", "", "same"])
def test_a_source_whose_adapter_was_loaded_from_other_files(
    e: Engine, one: pathlib.Path, content: str
) -> None:
    """Before its request came, or in the very step that computes it."""
    loaded = digest(one) if content == "same" else content
    e.worker.adapter_loaded(1, loaded)
    add(e, "early", 40, dict(DECODE), lora(one))
    e.worker.begin(e.meta({"early": 40}))
    assert [c[0] for c in e.worker_shim.take()] == (["intent", "step"] if content == "same" else [])
    e.worker.adapter_loaded(2, digest(one))
    add(e, "late", 40, dict(DECODE), lora(one, id=2))
    e.worker.begin(e.meta({"late": 40}))
    assert [c[0] for c in e.worker_shim.take() if c[0] != "cancel"] == ["intent", "step"]
    e.worker.adapter_loaded(2, loaded)
    assert [c[0] for c in e.worker_shim.take()] == ([] if content == "same" else ["cancel"])


def test_a_load_whose_adapter_was_loaded_from_other_files(e: Engine, one: pathlib.Path) -> None:
    for req, before in (("early", True), ("late", False)):
        id = int(before) + 1
        worker_read(e, id, digest(one))
        r, _ = add(e, req, 40, prefill_first(), lora(one, id=id))
        assert e.scheduler.matched(r, 0) == (40, True)
        blocks = SimpleNamespace(get_block_ids=lambda req=req: (e.tables[req],))
        e.scheduler.allocated(r, blocks, 40)  # type: ignore[arg-type]
        if before:
            e.worker.adapter_loaded(2, "other")
        e.step()
        if not before:
            e.worker.adapter_loaded(1, "other")
        assert (("cancel", e.worker_shim.leases) in e.worker_shim.take()) == before
        e.worker_shim.end(e.worker_shim.leases, received=True, status=shim.OK)
        done = e.worker.collect()
        assert done.received == done.failed == {req}


def expect(e: Engine, req: str, one: pathlib.Path) -> None:
    """A load begins."""
    r, _ = add(e, req, 40, prefill_first(), lora(one))
    assert e.scheduler.matched(r, 0) == (40, True)
    e.scheduler.allocated(r, SimpleNamespace(get_block_ids=lambda: (e.tables[req],)), 40)  # type: ignore[arg-type]
    e.step()


def loaded(e: Engine, one: pathlib.Path, under_way: bool = False) -> None:
    """A request whose load has ended well, or is under way, and which has computed nothing yet."""
    worker_read(e, 1, digest(one))
    expect(e, "r", one)
    if not under_way:
        e.worker_shim.end(1, received=True, status=shim.OK)
        assert e.step().received == {"r"}


def test_an_adapter_that_is_read_again_after_the_load_ended(e: Engine, one: pathlib.Path) -> None:
    """vLLM gives adapters up, and reads them again in the step that computes with them."""
    loaded(e, one)
    e.worker.adapter_loaded(1, digest(one))
    assert e.step().bad_blocks == set()
    e.worker.adapter_loaded(1, "other")
    assert e.step({"r": 1}).bad_blocks == {1, 2, 3}
    assert e.step().bad_blocks == set(), "each is reported once"


@pytest.mark.parametrize(
    "how", ["another adapter", "ended", "preempted", "cancelled", "cannot rewind"]
)
def test_what_an_adapter_that_is_read_again_does_not_touch(
    e: Engine,
    one: pathlib.Path,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded(e, one, how == "cancelled")
    e.worker._rewinds = how != "cannot rewind"
    # The schedule of this step may have given the blocks to another request.
    if how in ("ended", "cancelled"):
        e.finish("r")
    meta = e.meta(preempted={"r"} if how == "preempted" else None)
    if how == "cancelled":
        e.worker_shim.end(1, received=True, status=shim.OK)  # it was complete when the cancel came
    e.worker.preempts(meta)
    e.worker.adapter_loaded(2 if how == "another adapter" else 1, "other")
    assert e.run(meta).bad_blocks == set()
    e.worker.adapter_loaded(1, "another")
    assert e.step().bad_blocks == ({1, 2, 3} if how == "another adapter" else set())
    assert ("--max-cpu-loras" in caplog.text) == (how == "cannot rewind")


def test_loads_that_are_remembered_are_bounded(
    e: Engine, one: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvspray_vllm.worker.MAX_ENDED", 2)
    loaded(e, one)
    (expect,) = e.worker._ended.values()
    for i in range(5):
        e.worker._keep(expect.__class__(**{**vars(expect), "req": f"r{i}"}))
    assert list(e.worker._ended) == ["r3", "r4"]


@pytest.mark.parametrize("has", ["", "other"])
def test_nothing_is_loaded_for_an_adapter_that_the_worker_has_not_read(
    e: Engine, one: pathlib.Path, has: str
) -> None:
    """It would be read after the load, and could be another by then. The other engine is informed
    at once."""
    if has:
        worker_read(e, 1, has)
    expect(e, "r", one)
    assert [c[0] for c in e.worker_shim.take()] == ["expect", "cancel"]
    e.worker_shim.end(1, received=True, status=shim.CANCELLED)
    done = e.step()
    assert done.received == done.failed == {"r"}
    worker_read(e, 1, digest(one))
    expect(e, "later", one)
    assert [c[0] for c in e.worker_shim.take()] == ["expect"]


@pytest.mark.parametrize("has", ["", "other"])
def test_where_a_failed_load_is_an_error_only_an_adapter_that_the_worker_has_is_loaded_for(
    e: Engine,
    one: pathlib.Path,
    has: str,
) -> None:
    e.scheduler._fails = True
    if has:
        worker_read(e, 1, has)
        e.step()
    r, _ = add(e, "r", 40, prefill_first(), lora(one))
    assert e.scheduler.matched(r, 0) == (0, False)
    ((_, hash, _, why),) = e.scheduler_shim.declined
    assert hash == e.scheduler._prompt_hash(r, digest(one)) and "computed here first" in why
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"lora_unloaded": 1}
    worker_read(e, 1, digest(one))  # in the step that computes it
    e.step({"r": 40})
    expect(e, "later", one)
    assert [c[0] for c in e.worker_shim.take()] == ["expect"]


def test_what_came_before_the_cancel_is_not_used(e: Engine, one: pathlib.Path) -> None:
    expect(e, "r", one)
    e.worker_shim.end(1, received=True, status=shim.OK)
    done = e.step()
    assert done.received == done.failed == {"r"}


# ---- files are read beside the engine


class Gate:
    """Digests of directories in `closed` take as long as a test wants; so does every call to the
    file system where `closed` has "*"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.closed, self.threads = threading.Event(), {"*"}, []
        self.late = False  # it was not opened for a minute
        for name in ("digest", "_signature", "directory_of"):
            monkeypatch.setattr(adapters, name, self._gated(getattr(adapters, name)))

    def _gated(self, inner: Any) -> Any:
        def gated(path: str, *more: Any) -> Any:
            self.threads.append(threading.current_thread())
            if self.closed & {"*", path}:
                self.late = not self.open.wait(60) or self.late
            return inner(path, *more)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    g = Gate(monkeypatch)
    yield g
    g.open.set()
    assert threading.main_thread() not in g.threads and not g.late


def test_the_engine_s_thread_makes_no_call_to_the_file_system(
    e: Engine, one: pathlib.Path, gate: Gate
) -> None:
    r = request(dict(DECODE), lora(one))
    new(e, r)
    for _ in range(3):
        assert e.scheduler.matched(r, 0) == (None, False)
    gate.open.set()
    read(e, r)
    assert gate.threads
    assert e.scheduler.matched(r, 0) == (0, False), "a source loads nothing"
    assert e.meta({"r": 40}).intents[0].adapter == (1, digest(one))


def test_files_that_were_read_are_only_checked_by_the_reader(
    e: Engine, one: pathlib.Path, gate: Gate
) -> None:
    """A request for a known adapter waits for the check, and is not declined meanwhile."""
    gate.closed.clear()
    worker_read(e, 1, digest(one))
    add(e, "first", 40, dict(DECODE), lora(one))
    gate.closed.add("*")
    r = request(prefill_first(), lora(one))
    new(e, r)
    assert e.scheduler.matched(r, 0) == (None, False) and not e.scheduler_shim.declined
    gate.open.set()
    read(e, r)
    assert e.scheduler.matched(r, 0) == (40, True)


def test_a_prompt_whose_adapter_is_unread_is_declined_at_once(
    e: Engine, one: pathlib.Path, gate: Gate
) -> None:
    r = request(prefill_first(), lora(one))
    new(e, r)
    assert e.scheduler.matched(r, 0) == (0, False)
    ((_, hash, _, why),) = e.scheduler_shim.declined
    assert hash == bytes(32) and "are being read" in why
    stats = e.scheduler.take_stats()
    assert stats is not None and stats.data["local"] == {"lora_reading": 1}
    assert not e.scheduler._reading and not e.scheduler._destinations


def test_only_this_prompt_is_declined_if_the_prefill_names_the_adapter(
    e: Engine, one: pathlib.Path, gate: Gate
) -> None:
    """The other prompts of a list may find the adapter read."""
    there = digest(one)
    r = request(prefill_first(adapter=there), lora(one))
    new(e, r)
    ((_, hash, _, why),) = e.scheduler_shim.declined
    assert (
        hash == e.scheduler._prompt_hash(r, there) and hash != bytes(32) and "are being read" in why
    )


def test_a_prompt_whose_adapter_cannot_be_read_is_declined(
    e: Engine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvspray_vllm.scheduler.CHECK_WAIT_S", 60.0)  # of a busy machine, too
    add(e, "r", 40, prefill_first(), lora(tmp_path / "none"))
    ((_, hash, _, why),) = e.scheduler_shim.declined
    assert hash == bytes(32) and "cannot be read" in why


def test_an_adapter_is_read_for_requests_without_a_transfer(e: Engine, one: pathlib.Path) -> None:
    new(e, request({}, lora(one)))
    end = time.monotonic() + 60
    while not e.scheduler._adapters.known(lora(one)) and time.monotonic() < end:
        pass
    assert e.scheduler._adapters.known(lora(one))


@pytest.mark.parametrize("how", ["too long", "it ends"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_an_adapter_that_is_not_read_in_time(
    e: Engine, one: pathlib.Path, gate: Gate, how: str, side: str
) -> None:
    if side == "destination":
        gate.closed.clear()
        add(e, "first", 40, dict(DECODE), lora(one))
        gate.closed.add("*")
    r = request(dict(DECODE) if side == "source" else prefill_first(), lora(one))
    new(e, r)
    assert e.scheduler.matched(r, 0) == (None, False)
    if how == "it ends":
        assert e.finish("r", "FINISHED_ABORTED") == (False, None)
        assert len(e.scheduler_shim.declined) == (side == "destination"), (
            "the prefill engine need not keep its blocks"
        )
    else:
        e.clock += 2.1
        assert e.scheduler.matched(r, 0) == (0, False)
        stats = e.scheduler.take_stats()
        assert stats is not None and stats.data["local"] == {"lora_reading": 1}
        assert len(e.scheduler_shim.declined) == (side == "destination")
    assert not e.scheduler._reading and not e.scheduler._destinations


def test_a_prompt_without_a_hash_that_ends_first_ends_no_engine(
    e: Engine, one: pathlib.Path, gate: Gate
) -> None:
    gate.closed.clear()
    add(e, "first", 40, dict(DECODE), lora(one))
    gate.closed.add("*")
    new(e, request(prefill_first(adapter=digest(one)), lora(one)))
    assert "r" in e.scheduler._reading

    def unhashable(*what: Any) -> bytes:
        raise ValueError("a prompt without a hash")

    e.scheduler._hash = unhashable
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)
    assert not e.scheduler_shim.declined and not e.scheduler._reading


def test_bad_params_wait_for_no_adapter(e: Engine, one: pathlib.Path, gate: Gate) -> None:
    new(e, request(prefill_first(v="what"), lora(one)))
    assert not e.scheduler._reading
    assert e.finish("r", "FINISHED_ABORTED") == (False, None)


def test_a_slow_adapter_delays_no_other(tmp_path: pathlib.Path, gate: Gate) -> None:
    a = Adapters()
    paths = [saved(tmp_path / f"a{i}", float(i)) for i in range(adapters.READERS)]
    gate.closed = {str(p) for p in paths[1:]}
    slow = [a.ask(lora(p, id=i)) for i, p in enumerate(paths[1:], 1)]
    more = [a.ask(lora(p, id=i)) for i, p in enumerate(paths[1:], 1)]  # takes no second thread
    assert content(a, lora(paths[0], id=0)) == digest(paths[0])
    assert [r.result() for r in slow + more] == [None] * len(slow + more)
    gate.open.set()
    assert [r.result(60) for r in slow + more] == [digest(p) for p in paths[1:]] * 2
    assert a._reader._threads <= adapters.READERS


def test_a_failure_is_not_kept(tmp_path: pathlib.Path) -> None:
    a = Adapters()
    with pytest.raises(ParamsError, match="cannot be read"):
        content(a, lora(tmp_path / "late"))
    assert content(a, lora(saved(tmp_path / "late", 1.0))) == digest(tmp_path / "late")


def test_files_of_the_same_length_and_time_are_distinguished(one: pathlib.Path) -> None:
    a = Adapters()
    before = content(a, lora(one))
    file = one / "adapter_model.safetensors"
    was = file.stat()
    old = file.read_bytes()
    end = time.monotonic() + 60
    # The kernel's clock ticks.
    while file.stat().st_ctime_ns == was.st_ctime_ns and time.monotonic() < end:
        with file.open("r+b") as f:
            f.write(old[:-8] + b"other!!!")
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = file.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (was.st_ino, was.st_size, was.st_mtime_ns)
    assert content(a, lora(one, inplace=True)) not in (before, None)


def test_an_answer_is_for_the_files_of_its_question(one: pathlib.Path, gate: Gate) -> None:
    """A question during a reading gets the content after it, not that of the reading."""
    a = Adapters()
    gate.closed = {str(one)}
    first = a.ask(lora(one))
    end = time.monotonic() + 60
    while not gate.threads and time.monotonic() < end:
        pass
    second = a.ask(lora(one))
    assert second is not first and a.ask(lora(one)) is second
    saved(one, 2.0)
    gate.open.set()
    first.result(60)
    assert second.result(60) == digest(one)


def test_a_thread_that_cannot_be_started_is_an_error_of_the_request(
    one: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    a = Adapters()
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", start)
        with pytest.raises(ParamsError, match="can't start new thread"):
            a.ask(lora(one))
        a.prefetch(lora(one))
    assert content(a, lora(one)) == digest(one)


def test_readings_are_bounded(
    tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MAX_READING", 2)
    a = Adapters()
    paths = [saved(tmp_path / f"a{i}", float(i)) for i in range(3)]
    first, second = (a.ask(lora(f, id=i)) for i, f in enumerate(paths[:2]))
    with pytest.raises(ParamsError, match="2 adapters are being read"):
        a.ask(lora(paths[2], id=2))
    shutil.rmtree(paths[1])
    gate.open.set()
    assert a.content(lora(paths[0], id=0), first, 60) == digest(paths[0])
    with pytest.raises(ParamsError, match="cannot be read"):
        a.content(lora(paths[1], id=1), second, 60)


class Manager:
    def _load_adapter(self, request: Any) -> str:
        if request.lora_name == "changes":
            saved(pathlib.Path(request.lora_path), 9.0)
        return "model"


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    module = ModuleType("vllm.lora.worker_manager")
    module.WorkerLoRAManager = Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    inner = Manager._load_adapter
    yield Manager()
    assert Manager._load_adapter is inner


def test_what_the_engine_loads_is_reported(
    manager: Manager, one: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    loads: list[tuple[int, str]] = []
    w = LoadWatch(lambda id, content: loads.append((id, content)))
    w.watch()
    assert manager._load_adapter(lora(one, id=3)) == "model"
    manager._load_adapter(lora(one, "changes", id=4))
    manager._load_adapter(lora(tmp_path / "none", id=5))
    w.close()
    manager._load_adapter(lora(one, id=6))
    first = digest(saved(tmp_path / "as-it-was", 1.0))
    assert loads == [(3, first), (4, ""), (5, "")]
