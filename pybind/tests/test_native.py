"""The C tests, each under the sanitizers that see something in it, and the whole client suite's
core under AddressSanitizer."""

from __future__ import annotations

import graphlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import skip

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLAGS = "-std=c11 -g -O1 -D_GNU_SOURCE -Wall -Wextra -Werror -pthread -fno-omit-frame-pointer"
RECORDS = os.environ.get("KVSPRAY_LITMUS_RECORDS", "200000")


def compile_c(out: pathlib.Path, *sources: str, flags: str) -> pathlib.Path:
    cc = shlex.split(os.environ.get("CC", "gcc"))
    if shutil.which(cc[0]) is None:
        skip("cc", f"needs a C compiler: {cc[0]} not found; install gcc, or set CC")
    subprocess.run(
        [
            *cc,
            *shlex.split(FLAGS),
            *shlex.split(flags),
            f"-I{ROOT}/include",
            f"-I{ROOT}/src",
            "-o",
            str(out),
            *(str(ROOT / s) for s in sources),
        ],
        check=True,
    )
    return out


def run(*command: object, env: dict[str, str] | None = None, timeout: float = 600) -> str:
    """What the command prints. Where it fails, or does not end in time, the test fails with all
    that it has printed."""
    with subprocess.Popen(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
        start_new_session=True,
    ) as p:
        verdict = ""
        try:
            out, _ = p.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # And whatever it has started, which may have its output open.
            os.killpg(p.pid, signal.SIGKILL)
            out, _ = p.communicate()
            verdict = f"did not end within {timeout:g} s"
    if p.returncode != 0:
        pytest.fail(
            f"{shlex.join(map(str, command))} {verdict or f'ended with status {p.returncode}'}; it "
            f"printed:\n{out}",
            pytrace=False,
        )
    return out


def test_calls_between_files_go_one_way(tmp_path: pathlib.Path) -> None:
    """Files can be ordered so that each calls only functions of those before it."""
    owner: dict[str, str] = {}
    uses: dict[str, set[str]] = {}
    for source in sorted((ROOT / "src").glob("*.c")):
        compile_c(tmp_path / f"{source.stem}.o", f"src/{source.name}", flags="-c")
        rows = [line.split() for line in run("nm", tmp_path / f"{source.stem}.o").splitlines()]
        owner.update({row[-1]: source.stem for row in rows if row[-2] == "T"})
        uses[source.stem] = {row[-1] for row in rows if row[-2] == "U"}
    calls = {file: {owner[name] for name in names & owner.keys()} for file, names in uses.items()}
    assert len(calls) > 10 and calls["client"] >= {"loop", "util"} and not calls["system"]
    try:
        list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as err:
        pytest.fail(f"files of libkvspray call each other in a circle: {' -> '.join(err.args[1])}")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_ring_between_threads(tmp_path: pathlib.Path, sanitizer: str) -> None:
    binary = compile_c(
        tmp_path / "litmus", "tests/ring_litmus.c", "src/ring.c", flags=f"-fsanitize={sanitizer}"
    )
    run(binary, "threads", int(RECORDS) // 4, 65536)
    run(binary, "mutate", 20000)


def test_ring_between_processes(tmp_path: pathlib.Path) -> None:
    binary = compile_c(tmp_path / "litmus", "tests/ring_litmus.c", "src/ring.c", flags="-O2")
    run(binary, "processes", RECORDS, 65536)
    run(binary, "processes", RECORDS, 1 << 20)


def test_msgpack(tmp_path: pathlib.Path) -> None:
    binary = compile_c(
        tmp_path / "msgpack",
        "tests/msgpack_test.c",
        "src/msgpack.c",
        flags="-fsanitize=address,undefined",
    )
    assert run(binary).strip() == "ok"


def test_sums_of_the_digest(tmp_path: pathlib.Path) -> None:
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all"
    binary = compile_c(tmp_path / "digest", "tests/digest_test.c", flags=flags)
    assert run(binary).strip() in ("ok", "no avx2")


def test_a_hostile_sidecar(tmp_path: pathlib.Path) -> None:
    sources = [f"src/{p.name}" for p in sorted((ROOT / "src").glob("*.c"))]
    binary = compile_c(
        tmp_path / "hostile",
        "tests/hostile_test.c",
        *sources,
        flags="-fsanitize=address,undefined -fno-sanitize-recover=all -ldl",
    )
    assert run(binary, os.environ.get("KVSPRAY_HOSTILE_ROUNDS", "20000")).strip() == "ok"


@pytest.mark.parametrize("kernel", ["old", "full", "single"])
def test_regions_where_the_kernel_refuses(tmp_path: pathlib.Path, kernel: str) -> None:
    binary = compile_c(
        tmp_path / "region", "tests/region_test.c", "src/region.c", "src/system.c", flags="-O2"
    )
    assert run(binary, kernel).strip() == "ok"


# Of which on a wait looks before it sleeps.
@pytest.mark.parametrize("cpus", [1, 1 << 20], ids=["looks", "sleeps"])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_client_in_threads(tmp_path: pathlib.Path, sanitizer: str, cpus: int) -> None:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "src").glob("*.c"))
    binary = compile_c(
        tmp_path / "client",
        "tests/client_test.c",
        *sources,
        flags=f"-fsanitize={sanitizer} -DLOOK_CPUS={cpus}",
    )
    out = run(binary, tmp_path / "s.sock", int(RECORDS) // 10)
    assert "leases" in out


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_closing_in_any_order(tmp_path: pathlib.Path, sanitizer: str) -> None:
    flags = f"-fsanitize={sanitizer}"
    driver = compile_c(
        tmp_path / "libfake_cuda.so", "tests/fake_cuda.c", flags=f"{flags} -fPIC -shared"
    )
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "src").glob("*.c"))
    binary = compile_c(
        tmp_path / "close", "tests/close_test.c", *sources, flags=f"{flags} -DLOOK_CPUS=1"
    )
    assert run(binary, 20, env={"KVSPRAY_LIBCUDA": str(driver)}).strip() == "ok"


@pytest.mark.skipif("KVSPRAY_LIBRARY" in os.environ, reason="runs inside itself")
def test_client_under_address_sanitizer(tmp_path: pathlib.Path) -> None:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "src").glob("*.c"))
    library = compile_c(
        tmp_path / "libkvspray.so", *sources, flags="-fPIC -shared -fsanitize=address,undefined"
    )
    asan = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(asan):
        skip("asan", "needs libasan.so of gcc to preload it; install libasan")
    # Python's own allocations look like leaks, and its fork test is about another library.
    env = {
        "LD_PRELOAD": asan,
        "KVSPRAY_LIBRARY": str(library),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    chosen = (
        "session or source_lease or killed_sidecar or malformed or broken or scheduler or "
        "full_ring or regions or drain"
    )
    tests = sorted((ROOT / "tests").glob("test_client*.py"))
    run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *tests,
        "-k",
        chosen,
        env=env,
    )
