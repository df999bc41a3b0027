"""Signals by the GPU on a driver that only keeps the record: what is enqueued, on which stream,
inside and outside captures."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent

# In a process of its own: the library opens the driver once, and other tests need it not to be
# there.
PROLOGUE = """
import ctypes, os, sys, logging
import kvspray
from kvspray.gpu import GpuSignals

class Op(ctypes.Structure):
    _fields_ = [
        ("what", ctypes.c_char * 12), ("stream", ctypes.c_int), ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64), ("captured", ctypes.c_int),
    ]

fake = ctypes.CDLL(os.environ["KVSPRAY_LIBCUDA"])
fake.fake_ops.restype = ctypes.POINTER(Op)
LAYERS = 4
engine = kvspray.EngineInfo("test", id="gpu")
client = kvspray.WorkerClient("/nonexistent/kvspray.sock", engine=engine, layers=LAYERS)
base, _ = client.flags
FLAG, LOAD = 128, 128 + 64 * (LAYERS + 1)
REPLAY = ctypes.c_uint64.from_address(base + 72).value
assert REPLAY == LOAD + 64 * LAYERS + 64

def flag(i): return base + FLAG + 64 * i
def load(i): return base + LOAD + 64 * i
def replay(i): return base + REPLAY + 64 * i

def ops():
    n = ctypes.c_int()
    p = fake.fake_ops(ctypes.byref(n))
    out = [(o.what.decode(), o.stream, o.address, o.value, o.captured) for o in p[: n.value]]
    fake.fake_clear()
    return out

MAIN, SIDE = 1, 4

def captured_step(g):
    fake.fake_capture_begin(MAIN)
    for layer in range(LAYERS):
        assert g.signal_layer(layer, MAIN)
    assert g.signal_step(MAIN)
    got = ops()
    assert fake.fake_capture_end(MAIN) == 0, "a branch is not joined"
    return got
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("cuda") / "libfake_cuda.so"
    subprocess.run(
        [
            "gcc",
            "-std=c11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            "-shared",
            "-o",
            out,
            HERE / "fake_cuda.c",
        ],
        check=True,
    )
    return out


def run(driver: pathlib.Path | str, body: str) -> str:
    env = {**os.environ, "KVSPRAY_LIBCUDA": str(driver)}
    p = subprocess.run(
        [sys.executable, "-c", PROLOGUE + body],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert p.returncode == 0, p.stdout[-1000:] + p.stderr[-3000:]
    return p.stdout + p.stderr


def test_eager_flags_are_stream_writes_of_the_step(driver: pathlib.Path) -> None:
    run(
        driver,
        """
g = GpuSignals(client)
assert fake.fake_registered and g.step(7, MAIN)
assert g.signal_layer(0, MAIN) and g.signal_layer(3, MAIN) and g.signal_step(MAIN)
word = ops()
assert [o[:2] + o[3:] for o in word] == [("write", MAIN, 7, 0)] * 4, word
assert [o[2] for o in word][1:] == [flag(0), flag(3), flag(LAYERS)]
assert g.step(7, MAIN) and g.step(8, MAIN)  # a step may be reported again, and never falls
assert not g.step(7, MAIN) and not g.ok and not g.signal_layer(0, MAIN)
""",
    )


def test_captured_flags_are_leaves_and_the_end_of_a_step_is_joined(driver: pathlib.Path) -> None:
    run(
        driver,
        """
g = GpuSignals(client)
assert g.step(1, MAIN)
word = ops()[0][2]
for graph in range(3):  # one per batch size, all with the same board
    got = captured_step(g)
    # Behind its layer, and what is baked in is no step.
    assert got[:LAYERS] == [("leaf", MAIN, replay(i), 1, 1) for i in range(LAYERS)]
    end = [("record", MAIN), ("follow", SIDE), ("kernel", SIDE), ("record", SIDE), ("follow", MAIN)]
    assert [o[:2] for o in got[LAYERS:]] == end
    # The step comes from memory.
    assert got[LAYERS + 2] == ("kernel", SIDE, flag(LAYERS), word, 1)
    # The flags are cleared before each replay.
    assert g.step(10 + graph, MAIN) and ops() == [("step", MAIN, replay(0), 10 + graph, 0)]
assert g.signal_layer(1, MAIN) and g.signal_step(MAIN)  # a step that is eager again
assert ops() == [("write", MAIN, flag(1), 12, 0), ("write", MAIN, flag(LAYERS), 12, 0)]
try:
    GpuSignals(client)
except kvspray.KvsprayError as e:  # replays of the one would set flags in steps of the other
    assert "cuMemHostRegister" in str(e), e
else:
    raise AssertionError("two of one client")
g.close()
other = GpuSignals(client)
# An engine that captures nothing pays nothing.
assert other.step(13, MAIN) and [o[0] for o in ops()] == ["write"]
""",
    )


def test_a_capture_may_end_behind_any_layer(driver: pathlib.Path) -> None:
    """No call announces the last layer of a graph: nothing may have to be joined."""
    run(
        driver,
        """
g = GpuSignals(client)
for layers in (1, 2):
    fake.fake_capture_begin(MAIN)
    for layer in range(layers):
        assert g.signal_layer(layer, MAIN)
    assert fake.fake_capture_end(MAIN) == 0
    assert [o[0] for o in ops()] == ["leaf"] * layers
assert g.step(3, MAIN) and ops() == [("step", MAIN, replay(0), 3, 0)]
assert g.signal_layer(2, MAIN) and g.signal_step(MAIN)  # the rest of it eager
assert [o[0] for o in ops()] == ["write", "write"]
""",
    )


def test_marks_grow_on_the_stream(driver: pathlib.Path) -> None:
    run(
        driver,
        """
MARK = ctypes.c_uint64.from_address(base + 80).value
g = GpuSignals(client)
assert [g.mark(MAIN), g.mark(MAIN)] == [1, 2]
assert ops() == [("write", MAIN, base + MARK, n, 0) for n in (1, 2)]
g.close()
g = GpuSignals(client)
assert g.mark(MAIN) == 3, "what was given out before stays behind"
ops()
fake.fake_fail(b"cuStreamWriteValue64")
assert g.mark(MAIN) == 0 and not g.ok
fake.fake_fail(b"")
assert g.mark(MAIN) == 0, "an order that is not kept must not be promised"
""",
    )


def test_waits_compare_cyclically(driver: pathlib.Path) -> None:
    run(
        driver,
        """
g = GpuSignals(client)
assert g.wait_layer(2, 5, MAIN) and g.wait_layer(3, 1, MAIN)
assert [o[:4] for o in ops()] == [("wait", MAIN, load(2), 5), ("wait", MAIN, load(3), 1)]
limit = 2**63 - 1
for value in (1, 5, 2**62, limit - 1):
    # CUstreamWaitValue GEQ: (int64)(flag - value) >= 0
    assert ctypes.c_int64(limit - value).value >= 0
assert not g.wait_layer(0, limit, MAIN)
""",
    )


@pytest.mark.parametrize(
    ("fail", "reason"), [("cuMemHostRegister", "cuMemHostRegister: CUDA_ERROR_UNKNOWN (999)"),
    ("cuModuleLoadData", "cuModuleLoadData"), ("cuMemAlloc", "cuMemAlloc"),
    ("memops", "64-bit stream memory operations")],
)  # fmt: skip
def test_what_cannot_be_had_is_reported_and_nothing_is_left(
    driver: pathlib.Path, fail: str, reason: str
) -> None:
    out = run(
        driver,
        f"""
fake.fake_fail(b"{fail}")
try:
    GpuSignals(client)
except kvspray.KvsprayError as err:
    print(err)
assert fake.fake_live() == 0, fake.fake_live()
fake.fake_fail(b"")
GpuSignals(client).close()
assert fake.fake_live() == 0, fake.fake_live()
""",
    )
    assert reason in out


def test_without_context_or_driver(driver: pathlib.Path) -> None:
    body = """
try:
    fake_there and fake.fake_context(0)
    GpuSignals(client)
except kvspray.KvsprayError as err:
    print(err)
"""
    assert "no CUDA context is current" in run(driver, "fake_there = True" + body)
    env = {**os.environ, "KVSPRAY_LIBCUDA": "libnothing.so.1"}
    code = PROLOGUE.replace(
        'fake = ctypes.CDLL(os.environ["KVSPRAY_LIBCUDA"])\n'
        "fake.fake_ops.restype = ctypes.POINTER(Op)\n",
        "fake_there = False\n",
    )
    p = subprocess.run(
        [sys.executable, "-c", code + body], capture_output=True, text=True, env=env, timeout=300
    )
    assert p.returncode == 0 and "libnothing.so.1 cannot be opened" in p.stdout, p.stderr
    assert "NVIDIA's driver" in p.stdout and "ROCm" in p.stdout


def test_a_call_that_the_driver_keeps_waiting_does_not_hold_the_interpreter(
    driver: pathlib.Path,
) -> None:
    """A stream's queue can be full of what waits for a load, for example; other threads of the
    engine must run meanwhile: one of them lets the call go on, once it is there."""
    run(
        driver,
        """
import threading

def let_go():
    while not fake.fake_waiting():
        pass
    fake.fake_block(0)

def blocked(call, *args):
    fake.fake_block(1)
    other = threading.Thread(target=let_go)
    other.start()
    out = call(*args)
    fake.fake_block(0)
    assert not fake.fake_gave_up(), f"{call}: no other thread could run"
    other.join()
    return out

g = blocked(GpuSignals, client)
blocked(g.step, 1, MAIN)
blocked(g.signal_layer, 0, MAIN)
blocked(g.signal_step, MAIN)
blocked(g.wait_layer, 0, 1, MAIN)
fake.fake_capture_begin(MAIN)
blocked(g.signal_layer, 0, MAIN)
blocked(g.signal_step, MAIN)
fake.fake_capture_end(MAIN)
blocked(g.close)
r = blocked(kvspray.Region.gpu, 32 << 20, 4096)
""",
    )


def test_a_failure_is_logged_once_and_never_raised(driver: pathlib.Path) -> None:
    out = run(
        driver,
        """
logging.basicConfig()
g = GpuSignals(client)
fake.fake_fail(b"cuStreamWriteValue64")
assert not g.step(1, MAIN) and not g.ok
fake.fake_fail(b"")
assert not g.step(2, MAIN) and not g.signal_layer(0, MAIN)
assert not g.signal_step(MAIN) and not g.wait_layer(0, 1, MAIN)
g.close()
g.close()
assert not g.signal_layer(0, MAIN)
g = GpuSignals(client)
fake.fake_fail(b"cuStreamIsCapturing")
assert not g.signal_step(MAIN)
""",
    )
    assert (
        out.count("signals by the GPU end here") == 2
        and "cuStreamIsCapturing" in out
        and "cuStreamWriteValue64: CUDA_ERROR_UNKNOWN" in out
    )
    out = run(
        driver,
        """
logging.basicConfig()
g = GpuSignals(client)
fake.fake_fail(b"invalidated")
assert not g.signal_layer(0, MAIN)
""",
    )
    assert "capture is invalid" in out
    out = run(
        driver,
        """
logging.basicConfig()
g = GpuSignals(client)
assert g.step(1, MAIN)
fake.fake_capture_begin(MAIN)
assert g.signal_layer(0, MAIN)
fake.fake_fail(b"cuGraphAddBatchMemOpNode")
assert not g.signal_layer(1, MAIN) and not g.ok
g.close()
g = GpuSignals(client)
fake.fake_fail(b"")
assert g.signal_layer(0, MAIN)
fake.fake_capture_end(MAIN)
fake.fake_fail(b"cuLaunchKernel")
assert not g.step(2, MAIN) and not g.ok
""",
    )
    ends = [line for line in out.splitlines() if "signals by the GPU end here" in line]
    assert (
        len(ends) == 2
        and "kvs_gpu_signal_layer: cuGraphAddBatchMemOpNode: CUDA_ERROR_UNKNOWN (999)" in ends[0]
    ), out
    assert "kvs_gpu_step: cuLaunchKernel: CUDA_ERROR_UNKNOWN (999)" in ends[1], out


def test_memory_of_a_gpu_is_named_by_handle_or_descriptor(driver: pathlib.Path) -> None:
    run(
        driver,
        """
import struct
r = kvspray.Region.gpu((16 << 20) + 4096, 8192)  # a slice, as torch's allocator hands out
kind, uuid, off, size, ipc = struct.unpack("<Q16sQQ64s", bytes(r._c.handle))
assert (kind, uuid) == (1, bytes([0x73]) * 16), (kind, uuid)
assert (off, size, ipc) == (4096, 1 << 20, bytes([0x5a]) * 64), (off, size)
assert r.fd == -1 and r.kind.name == "DEVICE" and r.id != bytes(16)
v = kvspray.Region.gpu(32 << 20, 1 << 20)
kind, _, off, size, ipc = struct.unpack("<Q16sQQ64s", bytes(v._c.handle))
assert (kind, off, size, ipc) == (2, 0, 1 << 20, bytes(64))
assert os.readlink(f"/proc/self/fd/{v.fd}").startswith("/memfd:allocation")
fake.fake_fail(b"cuMemExportToShareableHandle")
for ptr, nbytes, want in (
    (0x1000, 16, "no memory of a GPU"),
    ((16 << 20) + 4096, 1 << 20, "beyond its allocation"),
    (32 << 20, 16, "expandable_segments"),
):
    try:
        kvspray.Region.gpu(ptr, nbytes)
        raise SystemExit(f"{ptr:#x} was taken")
    except kvspray.KvsprayError as e:
        assert want in str(e), e
try:
    r.buffer
    raise SystemExit("a buffer")
except kvspray.KvsprayError:
    pass
fd = v.fd
v.close(); r.close()
try:
    os.fstat(fd)
    raise SystemExit("the descriptor is left open")
except OSError:
    pass
assert fake.fake_live() == 0
""",
    )


def test_memory_is_mapped_or_nothing_is(driver: pathlib.Path) -> None:
    run(
        driver,
        """
from kvspray.gpu import map_memory
fake.fake_mapped.restype = ctypes.c_uint64
assert map_memory(3, 64 << 20, 2 << 20) == 77
assert fake.fake_mapped() == 64 << 20 and fake.fake_live() == 1
assert fake.cuMemUnmap(ctypes.c_uint64(64 << 20), ctypes.c_size_t(2 << 20)) == 0
assert fake.cuMemRelease(ctypes.c_uint64(77)) == 0
for call, want in (
    (b"cuMemCreate", "free memory of this GPU"),
    (b"cuMemMap", "reserved range"),
    (b"cuMemSetAccess", "reserved range"),
):
    fake.fake_fail(call)
    try:
        map_memory(3, 64 << 20, 2 << 20)
        raise SystemExit(f"{call} failed, and nothing was raised")
    except kvspray.KvsprayError as e:
        assert want in str(e), e
    assert fake.fake_mapped() == 0 and fake.fake_live() == 0, call
""",
    )
