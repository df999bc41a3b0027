"""No call of the library holds the interpreter's lock where it could wait or take its time. Each is
tried with a library that stops before every lock, sleep and larger system call until another Python
thread lets it go on: one that holds the lock stays there, on any machine. What a GPU's driver does
is in test_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from conftest import ENGINE, LAYERS, TIMEOUT_S, Sidecar, layout
from test_native import ROOT, compile_c

XFER, HASH = b"x" * 16, b"h" * 32
PRIVATE_BYTES = 1 << 20
END = 1 << 32
# Neither locks nor calls the system: a constant, an address, some stores. None of them may come to
# a gate.
AT_ONCE = {
    "kvs_flags", "kvs_signal_layer", "kvs_signal_step", "kvs_deadlines", "kvs_load_value",
    "kvs_strerror",
}  # fmt: skip


class Gate:
    """The other Python thread. It counts the threads that come to a gate, and lets them go on."""

    def __init__(self, library: pathlib.Path) -> None:
        self._dll = ctypes.CDLL(str(library))
        self._entered, self._go = os.eventfd(0), os.eventfd(0)
        self._dll.gate_set(self._entered, self._go)
        self._turns = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while os.eventfd_read(self._entered) < END:
            self._turns += 1
            os.eventfd_write(self._go, 1)

    def turns(self, call: Callable[[], Any]) -> int | None:
        """How often the call came to a gate and another thread ran meanwhile; None where none
        could."""
        before = self._turns
        self._dll.gate_arm(1)
        try:
            call()
        finally:
            stuck = self._dll.gate_arm(0)
        return None if stuck else self._turns - before

    def close(self) -> None:
        os.eventfd_write(self._entered, END)
        self._thread.join()
        os.close(self._entered)
        os.close(self._go)


@pytest.fixture
def gated(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModuleType, Gate]]:
    """The package, imported once more, on a library with gates."""
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "src").glob("*.c"))
    gates = (ROOT / "tests" / "gate.c").read_text()
    calls = re.findall(r"__real_(\w+)\(", gates) + re.findall(r"(?m)^GATED\([^,]+, (\w+),", gates)
    wrap = ",".join(f"--wrap={c}" for c in sorted(set(calls)))
    library = compile_c(
        tmp_path / "libgated.so",
        "tests/gate.c",
        *sources,
        flags=f"-O0 -fPIC -shared -fvisibility=hidden -Wl,{wrap} -ldl",
    )
    monkeypatch.setenv("KVSPRAY_LIBRARY", str(library))
    theirs = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] == "kvspray"
    }
    try:
        package = importlib.import_module("kvspray")
        importlib.import_module("kvspray._lib")
    finally:
        for name in list(sys.modules):
            if name.partition(".")[0] == "kvspray":
                del sys.modules[name]
        sys.modules.update(theirs)
    gate = Gate(library)
    yield package, gate
    gate.close()


def test_no_call_holds_the_interpreters_lock(
    gated: tuple[ModuleType, Gate], tmp_path: pathlib.Path
) -> None:
    kvspray, gate = gated
    _lib = kvspray._lib
    reached: set[str] = set()

    def watched(name: str, fn: Any) -> Any:
        def call(*args: Any) -> Any:
            reached.add(name)
            return fn(*args)

        return call

    for dll in (_lib.lib, _lib.fast):
        for name in _lib._PROTOTYPES:
            if name in vars(dll):
                setattr(dll, name, watched(name, getattr(dll, name)))

    with contextlib.ExitStack() as stack:
        sidecar = Sidecar(tmp_path / "s.sock")
        stack.callback(sidecar.close)

        def client(path: str = "s.sock", log: Any = None) -> Any:
            return stack.enter_context(
                kvspray.WorkerClient(tmp_path / path, engine=ENGINE, layers=LAYERS, log=log)
            )

        def region(nbytes: int = LAYERS * 32768) -> Any:
            r = kvspray.Region.alloc(nbytes)
            stack.callback(r.close)
            return r

        cache, fresh = region(), client()
        # So that its thread is in kvs_wait_log all the while.
        w = client(log=lambda level, text: None)
        w.register([cache], layout())
        assert w.wait_connected(TIMEOUT_S), w.status()
        lonely, spare, spoken = (
            client("nobody.sock"),
            client(),
            client(log=lambda level, text: None),
        )
        lonely.register([cache], layout())
        spare.register([cache], layout())
        asks = stack.enter_context(kvspray.SchedulerClient(tmp_path / "s.sock", engine=ENGINE))
        private = mmap.mmap(-1, PRIVATE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(private))
        src = [w.intent(XFER, HASH, 40, [[1]]) for _ in range(4)]
        assert all(src)

        def no_gpu() -> None:
            with contextlib.suppress(kvspray.KvsprayError):
                w.gpu_region(address, 4096)

        whole, added, empty = region(), region(), kvspray.Region.reserve(4096)
        stack.callback(empty.close)
        batch = _lib.CBatch(count=1)
        numbers = (ctypes.c_uint32 * 1)(0)
        options = _lib.CBatchOptions(
            size=ctypes.sizeof(_lib.CBatchOptions), segment=b"s", regions=numbers, region_count=1
        )

        def batch_open() -> None:
            assert _lib.lib.kvs_batch_open(lonely._h, 1, ctypes.byref(batch)) == 0
            batch.count = 1

        def digest() -> None:
            handle, out = ctypes.c_void_p(), ctypes.c_uint64()
            assert _lib.lib.kvs_digest_open(bytes(16), ctypes.byref(handle)) == 0
            assert _lib.lib.kvs_digest_weights(handle, 1, 0, 1, ctypes.byref(out)) == 0
            assert _lib.lib.kvs_digest_plane(handle, 0, b"layer") > 0
            assert _lib.lib.kvs_digest_sum(handle, address, 1, None, None, 0, None) < 0
            _lib.lib.kvs_digest_close(handle)

        rows = [kvspray.LoadPart(cache, 0, 8, cache, 4096, 8, 8)]
        waits = {
            "WorkerClient()": client,
            "SchedulerClient()": lambda: stack.enter_context(
                kvspray.SchedulerClient(tmp_path / "s.sock", engine=ENGINE)
            ),
            "alloc_region": region,
            "Region.reserve": lambda: stack.callback(kvspray.Region.reserve(4096).close),
            "Region.populate": lambda: empty.populate(0, 4096),
            "Region.close": region().close,
            "process_region": lambda: w.process_region(address, 4096),
            "gpu_region": no_gpu,
            "add_regions": lambda: lonely.add_regions([added]),
            "drop_regions": lambda: lonely.drop_regions([added], 0.01),
            "register": lambda: fresh.register([cache], layout()),
            "connected": lambda: w.connected,
            "wait_connected": lambda: lonely.wait_connected(0.01),
            "wait_connected, for ever": lambda: w.wait_connected(),
            "status": w.status,
            "intent": lambda: w.intent(XFER, HASH, 40, [[1]]),
            "step": lambda: w.step(1, [(src[0], 16, None)]),
            "preempt": lambda: w.preempt(src[0]),
            "hold": lambda: w.hold(src[1]),
            "yield_hold": lambda: w.yield_hold(src[1]),
            "expect": lambda: w.expect(XFER, HASH, "127.0.0.1:7001", 40, 16, [[4, 5, 6]]),
            "copy": lambda: w.copy(cache, cache, [(0, 4096, 8)]),
            "load": lambda: w.load(rows, [(0, 0)], 0, 0),
            "load, waited for": lambda: w.load(rows, [(0, 0)], 0, 0, arrived=address),
            "cancel": lambda: w.cancel(src[2]),
            "poll": w.poll,
            "wait": lambda: w.wait(0.01),
            "endpoint": lambda: asks.endpoint,
            "await_admission": lambda: asks.await_admission(XFER, HASH, "127.0.0.1:9", 40, 30),
            "expected": lambda: asks.expected(XFER, HASH),
            "decline": lambda: asks.decline(XFER, HASH, "127.0.0.1:9", "not wanted"),
            "admission": lambda: asks.admission(XFER, HASH),
            "store request": lambda: _lib.lib.kvs_request(w._h, 13, b"\x80", 1),
            "store answer": lambda: _lib.lib.kvs_answer(
                w._h, 1, 10, ctypes.byref(ctypes.c_uint32()), None, 0
            ),
            "store request forgotten": lambda: _lib.lib.kvs_request_forget(w._h, 1),
            "unpin": lambda: _lib.lib.kvs_unpin(w._h, 1),
            "space closed": lambda: _lib.lib.kvs_close_space(w._h, 1),
            "segment": lambda: _lib.lib.kvs_segment(w._h, b"s", 0, 0, 1, None, 0),
            "segment of a file": lambda: _lib.lib.kvs_segment_file(
                w._h, b"f", b"path", 0, 0, None, 0
            ),
            "segment revoked": lambda: _lib.lib.kvs_segment_revoke(w._h, b"s", None),
            "locate": lambda: _lib.lib.kvs_locate(w._h, None, b"s", 10),
            "notes": lambda: _lib.lib.kvs_notes(w._h, 0),
            "batch": batch_open,
            "batch submitted": lambda: _lib.lib.kvs_batch_submit(
                w._h, ctypes.byref(batch), ctypes.byref(options)
            ),
            "batch closed": lambda: _lib.lib.kvs_batch_close(lonely._h, ctypes.byref(batch)),
            "describe": lambda: w.describe(
                {**layout(), "identity": {"model": "tiny", "weights": "2"}}
            ),
            "replace": lambda: w.replace([]),
            "close": spare.close,
            "close, with a log": spoken.close,
            "SchedulerClient.close": asks.close,
        }
        got = {name: gate.turns(call) for name, call in waits.items()}
        assert not [name for name, turns in got.items() if turns is None], "nobody else could run"
        assert not [name for name, turns in got.items() if turns == 0], (
            "came to no gate: nothing was shown"
        )

        w = client()
        at_once = {
            "signal_layer": lambda: w.signal_layer(0, 1),
            "signal_step": lambda: w.signal_step(1),
            "load_value": lambda: w.load_value(0),
            "kvs_flags": lambda: _lib.lib.kvs_flags(w._h, ctypes.byref(ctypes.c_uint64())),
            "kvs_deadlines": lambda: _lib.fast.kvs_deadlines(w._h),
            "kvs_strerror": lambda: _lib.strerror(-1),
            "kvs_read_located": lambda: _lib.lib.kvs_read_located(
                b"\x80", 1, ctypes.byref(_lib.CLocated())
            ),
            "kvs_read_notes": lambda: _lib.lib.kvs_read_notes(b"\x80", 1, None, 0),
            "digest": digest,
            "Region.part": lambda: stack.callback(whole.part(0, 4096).close),
        }
        assert {name: gate.turns(call) for name, call in at_once.items()} == dict.fromkeys(
            at_once, 0
        )

    held = {name for name in _lib._PROTOTYPES if name in vars(_lib.fast)}
    assert held <= AT_ONCE
    untried = set(_lib._PROTOTYPES) - reached
    assert all(name.startswith("kvs_gpu_") for name in untried), untried
