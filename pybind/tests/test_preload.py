"""The preload beside a real sidecar, in programs on a driver whose streams are threads
(preload_cuda.c)."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from conftest import BINARY, Serve, Sidecar, skip
from test_native import ROOT, compile_c

from kvspray import CompletionStatus

SEEDS = int(os.environ.get("KVSPRAY_PRELOAD_SEEDS", "10"))
OPS = 1000  # of a program
KILLS = int(os.environ.get("KVSPRAY_PRELOAD_KILLS", "5"))
CAUGHT = "copied by the sidecar"
AGAIN = "made again"
GRACE = "transfer.grace=500ms"

Report = dict[tuple[str, str], int]


class Build:
    """The driver, the library and the program, under one sanitizer or none."""

    def __init__(self, at: pathlib.Path, flags: str = "", mutant: int = 0) -> None:
        self.at = at
        shared = f"{flags} -fPIC -shared"
        compile_c(
            at / "libcuda.so.1",
            "tests/preload_cuda.c",
            flags=f"{shared} -Wl,-soname,libcuda.so.1 -Wl,-Bsymbolic",
        )
        sources = [
            str(p.relative_to(ROOT))
            for d in ("preload", "src")
            for p in sorted((ROOT / d).glob("*.c"))
        ]
        self.library = compile_c(
            at / "libkvspray_preload.so",
            *sources,
            "tests/preload_share.c",
            flags=f"{shared} -fvisibility=hidden -I{ROOT}/preload -Ddlsym=kvs_real_dlsym "
            f"-DKVS_MUTANT={mutant} -DKVS_RELEASE='\"9.1-preload\"' "
            f"-Wl,--version-script={ROOT}/preload/preload.map "
            "-Wl,--wrap=kvs_region_gpu",
        )
        self.program = compile_c(
            at / "preload_test",
            "tests/preload_test.c",
            str(at / "libcuda.so.1"),
            flags=f"{flags} -Wl,-rpath,{at}",
        )

    def start(
        self,
        *args: object,
        socket: pathlib.Path | None = None,
        preload: str = "report",
        first: str = "",
        last: str = "",
        user: int | None = None,
        **env: str,
    ) -> subprocess.Popen[str]:
        settings = {
            "KVSPRAY_PRELOAD_MIN_BYTES": "65536",
            "KVSPRAY_PRELOAD": preload,
            "KVSPRAY_PRELOAD_SOCKET": str(socket or self.at / "none"),
            **env,
        }
        if preload != "none":
            settings["LD_PRELOAD"] = f"{first} {self.library} {last}".strip()
        command = [str(self.program), *map(str, args)]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
            user=user,
        )

    def run(
        self, *args: object, timeout: float = 300, **how: str | pathlib.Path
    ) -> tuple[int, str, Report, str]:
        return ended(self.start(*args, **how), timeout)  # type: ignore[arg-type]


def ended(p: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str, Report, str]:
    """Its status, what it printed, and the report."""
    try:
        out, err = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        p.kill()
        out, err = p.communicate()
        pytest.fail(f"{p.args} did not end within {timeout} s; it printed:\n{out}{err}")
    report: Report = collections.defaultdict(int)
    for entry, copies, why in re.findall(r"\]: (cu\w+): (\d+) copies, \d+ bytes: (.*)", err):
        report[entry, why] = int(copies)
    if again := re.search(r"of these (\d+) copies", err):
        report["", AGAIN] = int(again[1])
    return p.returncode, out, report, err


def caught(report: Report) -> int:
    return sum(n for (_, why), n in report.items() if why == CAUGHT)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return Build(tmp_path_factory.mktemp("preload"))


@pytest.mark.parametrize("other", [False, True], ids=["", "other addresses"])
def test_every_way_to_an_entry_point(build: Build, other: bool) -> None:
    code, out, _, err = build.run("lookups", **({"FAKE_OTHER_ADDRESSES": "1"} if other else {}))
    assert (code, out) == (0, "ok\n"), err


def test_what_passes_by_is_named(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    code, _, report, err = build.run("reasons", socket=socket)
    assert code == 0, err
    load, either = "cuMemcpyHtoDAsync_v2", "cuMemcpyAsync"
    assert (
        report.pop((load, CAUGHT))
        + report.pop((load, "memory that the sidecar has not mapped yet"), 0)
        == 400
    )
    assert report == {
        (load, "below the threshold"): 1,
        (load, "pageable memory"): 1,
        (load, "pinned memory that was not allocated here"): 2,
        (load, "managed memory"): 1,
        (load, "GPU memory that cannot be shared"): 2,
        (load, "memory of another GPU"): 1,
        (load, "a stream of another context"): 1,
        (load, "in a capture"): 1,
        (either, "device to device"): 1,
        (either, "host to host"): 1,
        (either, "pageable memory"): 1,
        ("cuMemcpyBatchAsync", "a batch of several directions or sizes"): 1,
    }


def test_a_batch_keeps_its_order(build: Build, serve: Serve) -> None:
    """A source that is read during the call is not read later, and no error is hidden."""
    _, socket = serve("a")
    assert build.run("batches", preload="none")[:2] == (0, "ok\n")
    code, out, report, err = build.run("batches", socket=socket)
    assert (code, out) == (0, "ok\n"), err
    batch = "cuMemcpyBatchAsync"
    assert (
        report[batch, "a batch that has not the order of its stream"],
        report[batch, CAUGHT],
    ) == (8, 1), err


def test_a_free_beside_a_copy_while_the_sidecar_hangs(build: Build, serve: Serve) -> None:
    """A copy that began meanwhile would wait for the driver, which would wait for it."""
    process, socket = serve("a", GRACE)
    code, out, report, err = build.run(
        "free", process.pid, socket=socket, timeout=60, KVSPRAY_PRELOAD_DEADLINE_MS="500"
    )
    assert (code, out) == (0, "ok\n"), err
    assert report["cuMemcpyHtoDAsync_v2", "while memory is freed"] == 1, err


def test_a_driver_that_hangs(tmp_path: pathlib.Path, serve: Serve) -> None:
    """The thread that waits for the driver cannot be the one that ends the process."""
    build = Build(tmp_path, "-DKVS_AGAIN_MS=1000")
    process, socket = serve("a", GRACE)
    code, _, _, err = build.run("stuck", process.pid, socket=socket, timeout=60)
    assert (
        code == -signal.SIGABRT
        and "the driver has not made a copy of 262144 bytes within 1 s" in err
    ), err


@pytest.mark.parametrize("where", ["first", "last"])
def test_another_library_with_the_same_names(build: Build, serve: Serve, where: str) -> None:
    """Each passes a copy on to the next."""
    other = compile_c(
        build.at / f"other_{where}.so", "tests/preload_other.c", flags="-fPIC -shared"
    )
    _, socket = serve("a")
    native = build.run("random", 1, OPS, preload="none")
    code, out, report, err = build.run("random", 1, OPS, socket=socket, **{where: str(other)})
    assert (code, out) == native[:2], err
    assert report["cuMemcpyHtoDAsync_v2", CAUGHT] > 10, err


def test_the_sidecar_gets_the_release(build: Build, serve: Serve, tmp_path: pathlib.Path) -> None:
    _, socket = serve("a")
    build.run("random", 1, OPS, socket=socket)
    assert "release=9.1-preload" in (tmp_path / "a.log").read_text()


def test_an_allocation_that_went_unseen(build: Build, serve: Serve) -> None:
    """Its entry goes with that of the next allocation at the address."""
    _, socket = serve("a")
    code, out, report, err = build.run("unseen", socket=socket)
    assert (code, out) == (0, "0 descriptors are left\n") and caught(report) > 200, err


def test_an_error_that_passes(build: Build, serve: Serve) -> None:
    """It ends no copy, neither one that waits for its stream nor one that failed."""
    process, socket = serve("a", GRACE)
    code, out, report, err = build.run("refuse", process.pid, socket=socket, timeout=60)
    assert (code, out) == (0, "ok\n") and report["", AGAIN] == 1, err


def test_an_allocation_is_shared_beside_a_capture(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    code, out, report, err = build.run("capturing", socket=socket)
    assert (code, out) == (0, "ok\n") and caught(report) > 300, err


def test_memory_that_was_not_registered(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    assert build.run("unregister", preload="none")[:2] == (0, "ok\n")
    code, out, report, err = build.run("unregister", socket=socket)
    assert (code, out) == (0, "ok\n") and caught(report) > 100, err


def test_a_child_has_the_memory(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    assert build.run("child", preload="none")[:2] == (0, "ok\n")
    code, out, report, err = build.run("child", socket=socket)
    assert (code, out) == (0, "ok\n") and caught(report) > 100, err


def test_off_and_without_a_sidecar(build: Build, serve: Serve) -> None:
    native = build.run("random", 1, OPS, preload="none")
    assert native[0] == 0, native
    _, socket = serve("a")
    assert build.run("random", 1, OPS, preload="0", socket=socket) == native
    code, out, report, err = build.run("random", 1, OPS)
    assert (code, out) == native[:2] and not caught(report), err
    assert sum(n for (_, why), n in report.items() if why == "no sidecar") > 100
    code, out, report, err = build.run("random", 1, OPS, socket=socket, FAKE_NO_MEMOPS="1")
    assert (code, out) == native[:2] and not caught(report), err


def test_doctor_has_the_counters(build: Build, serve: Serve, tmp_path: pathlib.Path) -> None:
    """Of a program that runs: what a sidecar would have copied, by entry point."""
    _, _ = serve("a")  # for the binary
    program = build.start("random", 1, 1000 * OPS)
    try:
        end = time.monotonic() + 60
        found: list[dict[str, str]] = []
        while not any("no sidecar" in r["detail"] for r in found) and time.monotonic() < end:
            command = [BINARY, "doctor", "--json", "--http", "off", "--socket", tmp_path / "s"]
            results = json.loads(
                subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
            )
            found = [r for r in results if r["name"] == f"preload {program.pid} preload_test"]
    finally:
        program.kill()
        program.communicate()
    assert [r["state"] for r in found] == ["warn"] and re.search(
        r"cuMemcpyHtoDAsync_v2: .*\d+ no sidecar", found[0]["detail"]
    ), found


def test_random_programs(build: Build, serve: Serve) -> None:
    """Bit by bit, and call by call, as without the preload."""
    _, socket = serve("a")
    entries: dict[str, int] = collections.defaultdict(int)
    for seed in range(1, SEEDS + 1):
        native = build.run("random", seed, OPS, preload="none")
        code, out, report, err = build.run("random", seed, OPS, socket=socket)
        assert (code, out) == (0, native[1]), f"seed {seed}: {out} instead of {native[1]}: {err}"
        assert report["", AGAIN] == 0, err
        for (entry, why), n in report.items():
            entries[entry] += n * (why == CAUGHT)
    taken = {e for e, n in entries.items() if n > SEEDS}
    assert len(taken) == 14, taken  # all but two kinds of batch


@pytest.mark.parametrize(
    "mutant", [1, 2], ids=["the stream does not wait", "the copy does not wait"]
)
def test_a_mutant_without_the_gate(tmp_path: pathlib.Path, serve: Serve, mutant: int) -> None:
    build = Build(tmp_path, mutant=mutant)
    _, socket = serve("a")
    assert [seed for seed in range(1, 6) if build.run("random", seed, OPS, socket=socket)[0] != 0]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_threads(tmp_path: pathlib.Path, serve: Serve, sanitizer: str) -> None:
    build = Build(tmp_path, f"-fsanitize={sanitizer}")
    runtime = subprocess.run(
        ["gcc", f"-print-file-name=lib{sanitizer[0]}san.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    env = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    _, socket = serve("a")
    for what, ops in (("threads", 150), ("random", 400)):
        native = build.run(what, 3, ops, preload="none", **env)
        assert native[0] == 0, native
        code, out, report, err = build.run(what, 3, ops, socket=socket, first=runtime, **env)
        assert (code, sorted(out.splitlines())) == (0, sorted(native[1].splitlines())), err
        assert caught(report) > 50, err
    assert build.run("lost", socket=socket, first=runtime, **env)[:2] == (0, "ok\n")


def test_an_error_that_ends_the_context(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    code, out, report, err = build.run("lost", socket=socket, timeout=60)
    assert (code, out) == (0, "ok\n") and caught(report) > 100, err


@pytest.mark.parametrize("how", ["reset", "destroy", "released", "release", "other"])
def test_a_context_is_destroyed(build: Build, serve: Serve, how: str) -> None:
    """The last two destroy nothing of this program."""
    _, socket = serve("a")
    code, out, report, err = build.run("ends", how, socket=socket, timeout=60)
    assert (code, out) == (0, "ok\n") and caught(report) > 100, err
    assert report["cuMemcpyHtoDAsync_v2", "after a context has ended"] == (
        0 if how in ("release", "other") else 200
    ), err


@pytest.mark.parametrize("how", ["reset", "release", "released"])
def test_a_context_ends_before_a_stream_has_come_to_its_copy(
    build: Build, serve: Serve, how: str
) -> None:
    _, socket = serve("a")
    code, out, report, err = build.run("held", how, socket=socket, timeout=60)
    assert (code, out) == (0, "ok\n") and caught(report) > 100, err


def test_more_copies_than_slots(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    code, out, report, err = build.run("many", 300, socket=socket)
    assert (code, out) == (0, "ok\n"), err
    load = "cuMemcpyHtoDAsync_v2"
    assert (report[load, CAUGHT], report[load, "too many open copies"]) == (128, 172), err


def test_a_worker_that_was_forked(build: Build, serve: Serve) -> None:
    _, socket = serve("a")
    code, out, report, err = build.run("forked", 20, socket=socket)
    assert (code, out) == (0, "ok\n") and caught(report) == 20, err


def test_a_sidecar_that_may_not_be_killed(
    build: Build, sidecar: Callable[..., Sidecar], socket_path: pathlib.Path
) -> None:
    """The stream would wait without an end, if it hung."""
    if os.geteuid() != 0:
        skip("root", "needs root: a sidecar of another user, which this process may not signal")
    sidecar()
    for p in (build.at, *build.at.parents[:2], socket_path.parent):
        p.chmod(0o777)
    socket_path.chmod(0o777)
    code, out, report, err = ended(build.start("few", 2, socket=socket_path, user=65534))
    assert (code, out) == (0, "ok\n"), err
    assert (report["cuMemcpyHtoDAsync_v2", CAUGHT], report["", AGAIN]) == (2, 2), err
    assert err.count("the driver makes all copies: this process may not kill the sidecar") == 1


def answer(s: Sidecar, status: CompletionStatus, reason: str) -> None:
    copy = s.record("COPY")
    assert copy["body"]["req"] == "preload" and len(copy["body"]["blocks"]) == 24
    s.complete(
        copy["lease"],
        "RECEIVED",
        status,
        bytes=0,
        took_us=1,
        transport="",
        reason=reason,
        recompute=[],
    )


@pytest.mark.parametrize("side", ["src", "dst"])
def test_refusals(
    build: Build, sidecar: Callable[..., Sidecar], socket_path: pathlib.Path, side: str
) -> None:
    """The driver makes each copy. After three refusals of one memory the sidecar is not asked."""
    s = sidecar()
    p = build.start("two", 5, socket=socket_path)
    for _ in range(3):
        answer(s, CompletionStatus.REFUSED, f"COPY.{side}: was not mapped; no")
    if side == "dst":
        for _ in range(5):
            answer(s, CompletionStatus.OK, "")
    code, out, report, err = ended(p)
    assert (code, out) == (0, "ok\n"), err
    load, refused = "cuMemcpyHtoDAsync_v2", "memory that the sidecar refuses"
    taken = 8 if side == "dst" else 3
    assert (report[load, CAUGHT], report["", AGAIN], report[load, refused]) == (
        taken,
        3,
        10 - taken,
    ), err


@pytest.mark.parametrize(
    "status", [CompletionStatus.FAILED, CompletionStatus.EXPIRED, CompletionStatus.REFUSED]
)
def test_a_sidecar_that_fails(
    build: Build,
    sidecar: Callable[..., Sidecar],
    socket_path: pathlib.Path,
    status: CompletionStatus,
) -> None:
    """It is not asked for a while, and no memory is blamed."""
    s = sidecar()
    p = build.start("few", 5, socket=socket_path)
    for _ in range(3):
        answer(s, status, "no room")
    code, out, report, err = ended(p)
    assert (code, out) == (0, "ok\n"), err
    load = "cuMemcpyHtoDAsync_v2"
    assert (
        report[load, CAUGHT],
        report["", AGAIN],
        report[load, "after failures of the sidecar"],
    ) == (3, 3, 2), err
    assert err.count("has failed 3 copies in a row") == 1 and "no room" in err


def test_another_sidecar_is_asked_at_once(
    tmp_path: pathlib.Path, sidecar: Callable[..., Sidecar], socket_path: pathlib.Path
) -> None:
    build = Build(tmp_path, "-DKVS_PASS_MS=600000")
    s = sidecar()
    p = build.start("few", 250000, socket=socket_path)
    for _ in range(3):
        answer(s, CompletionStatus.FAILED, "no room")
    s.process.kill()
    s.process.wait()
    assert sidecar().record("COPY")
    p.kill()
    p.communicate()


class Restarts:
    """A sidecar that is killed or stopped again and again, at random times, and started anew."""

    def __init__(
        self, serve: Serve, tmp_path: pathlib.Path, hurt: Callable[[subprocess.Popen[bytes]], None]
    ) -> None:
        self._serve, self._ready, self._hurt = serve, tmp_path / "s.ready", hurt
        self.process, self.socket = serve("s", GRACE)
        self.count = 0
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Restarts:
        self._thread.start()
        return self

    def _run(self) -> None:
        chance = random.Random(5)
        try:
            while not self._over.wait(0.3 + 0.3 * chance.random()):
                self._hurt(self.process)
                if self.process.poll() is not None:
                    self._ready.unlink()
                    self.process, _ = self._serve("s", GRACE)
                self.count += 1
        except BaseException as err:  # to the test's thread
            self._failure = err

    def check(self) -> None:
        if self._failure:
            raise self._failure

    def __exit__(self, *args: object) -> None:
        self._over.set()
        self._thread.join()
        self.check()


def kill(p: subprocess.Popen[bytes]) -> None:
    p.kill()
    p.wait()


def stop(p: subprocess.Popen[bytes]) -> None:
    """The client kills it once the deadline of a copy and the grace have passed, if a copy was
    open."""
    p.send_signal(signal.SIGSTOP)
    try:
        p.wait(5)
    except subprocess.TimeoutExpired:
        p.send_signal(signal.SIGCONT)


def pause(p: subprocess.Popen[bytes]) -> None:
    """It goes on, before that."""
    p.send_signal(signal.SIGSTOP)
    threading.Event().wait(0.1)
    p.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("hurt", [kill, stop, pause])
def test_the_sidecar_in_mid_copy(
    build: Build,
    serve: Serve,
    tmp_path: pathlib.Path,
    hurt: Callable[[subprocess.Popen[bytes]], None],
) -> None:
    """Right bytes, no late write, and an end."""
    again = taken = 0
    with Restarts(serve, tmp_path, hurt) as sidecar:
        end = time.monotonic() + 600
        while sidecar.count < KILLS or not again and hurt is not pause:
            sidecar.check()
            assert time.monotonic() < end, (sidecar.count, again, taken)
            for how in (("large", 300), ("random", 1 + sidecar.count, OPS)):
                p = build.start(*how, socket=sidecar.socket, KVSPRAY_PRELOAD_DEADLINE_MS="300")
                code, _, report, err = ended(p)
                assert code == 0, err
                again += report["", AGAIN]
                taken += caught(report)
    assert taken > 100


@pytest.mark.parametrize("name", ["", "_MIN_BYTES", "_DEADLINE_MS"])
@pytest.mark.parametrize("value", ["32M", "-1", " 5", "0x10", "99999999999999999999", "0"])
def test_a_setting_that_is_wrong(build: Build, name: str, value: str) -> None:
    if not name and value == "0":
        return
    code, out, _, err = build.run("few", 1, **{f"KVSPRAY_PRELOAD{name}": value})
    assert (code, out) == (78, "") and f"KVSPRAY_PRELOAD{name} is {value}: set it to " in err
    # Not in a program without a GPU, and not if it is off.
    env = {**os.environ, "LD_PRELOAD": str(build.library), f"KVSPRAY_PRELOAD{name}": value}
    p = subprocess.run(["true"], env=env, capture_output=True, text=True)
    assert (p.returncode, p.stderr) == (0, "")
    assert not name or build.run("few", 1, preload="0", **{f"KVSPRAY_PRELOAD{name}": value})[
        :2
    ] == (0, "ok\n")


@pytest.mark.parametrize("name", ["a b", "a:b", "none"])
def test_the_command_refuses_a_path(tmp_path: pathlib.Path, name: str) -> None:
    """The loader splits LD_PRELOAD there, and only warns."""
    at = tmp_path / name
    at.mkdir()
    module = pathlib.Path(shutil.copy(ROOT / "python" / "kvspray" / "preload.py", at))
    if name != "none":
        (at / "libkvspray_preload.so").touch()
    p = subprocess.run([sys.executable, str(module), "true"], capture_output=True, text=True)
    assert p.returncode == 1 and p.stderr.startswith(
        f"kvspray.preload: {at}/libkvspray_preload.so: "
    ), p.stderr


def test_the_command(build: Build, tmp_path: pathlib.Path) -> None:
    """Others that are preloaded stay."""
    module = pathlib.Path(shutil.copy(ROOT / "python" / "kvspray" / "preload.py", tmp_path))
    shutil.copy(build.library, tmp_path)

    def output_of(*command: str, **env: str) -> tuple[int, str]:
        p = subprocess.run(
            [sys.executable, str(module), *command],
            capture_output=True,
            text=True,
            env={**os.environ, **env},
        )
        return p.returncode, p.stdout + p.stderr

    library = str(module.with_name("libkvspray_preload.so"))
    assert output_of() == (0, library + "\n")
    code, out = output_of("sh", "-c", "echo $LD_PRELOAD 2>/dev/null", LD_PRELOAD="libdl.so.2")
    assert code == 0 and f"{library} libdl.so.2\n" in out
    assert output_of("/nothing") == (1, "kvspray.preload: /nothing: No such file or directory\n")
