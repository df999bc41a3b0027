"""What NIXL calls: the table of virtual functions, compared with that of a back end in the
installed wheel. And the parsers of what other agents send."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from agents import have_nixl
from conftest import ROOT, skip

WORD = 8


def readelf(what: str, path: pathlib.Path) -> list[list[str]]:
    out = subprocess.run(
        ["readelf", "-W", what, str(path)], check=True, capture_output=True, text=True
    )
    return [line.split() for line in out.stdout.splitlines()]


def method(symbol: str) -> str:
    """The last name of a mangled one, with "const" where it is."""
    m = re.match(r"_ZN(K?)", symbol)
    assert m, symbol
    at, name = m.end(), ""
    while n := re.match(r"\d+", symbol[at:]):
        at += n.end()
        name = symbol[at : at + int(n[0])]
        at += int(n[0])
    if symbol[at] in "D":
        name = "destructor"
    return name + (" const" if m[1] else "")


def table(path: pathlib.Path, engine: str) -> list[set[str]]:
    """The functions of a class's table, from the symbols and relocations of its library. A place
    has several names where the compiler has made one of equal functions."""
    functions: dict[int, set[str]] = {}
    span = None
    for row in readelf("--syms", path):
        if len(row) < 8 or not row[0][:-1].isdigit():
            continue
        address, size, kind = int(row[1], 16), int(row[2], 0), row[3]
        name = row[7].split("@")[0]
        if kind == "FUNC" and name.startswith("_ZN"):
            functions.setdefault(address, set()).add(method(name))
        if name.startswith("_ZTV") and name.endswith(engine) and size:
            span = range(address, address + size)
    assert span is not None, f"{path} has no table of {engine}"
    out: dict[int, set[str]] = {}
    for row in readelf("--relocs", path):
        if len(row) < 4 or not re.fullmatch("[0-9a-f]{16}", row[0]) or int(row[0], 16) not in span:
            continue
        # A relative one has an address, another one a symbol's value and name.
        target = functions.get(int(row[3], 16), set())
        if len(row) > 4 and row[4].startswith("_ZN"):
            target = {method(row[4].split("@")[0])}
        if target:
            out[int(row[0], 16)] = target
    # The distance to the object's start, and its type, come first.
    places = list(range(span.start + 2 * WORD, span.stop, WORD))
    assert sorted(out) == places, f"{path}: places without a function"
    return [out[p] for p in places]


def wheel() -> pathlib.Path:
    """A back end that NIXL's wheel has."""
    import importlib.metadata

    files = importlib.metadata.files("nixl-cu13") or []
    return next(pathlib.Path(f.locate()) for f in files if f.name == "libplugin_POSIX.so")


def compare(ours: list[set[str]], theirs: list[set[str]]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        assert a & b, f"function {i} of the table is {a}, and NIXL calls {b}"
    assert len(ours) == len(theirs)


def test_order_of_functions(plugin: pathlib.Path) -> None:
    if shutil.which("readelf") is None:
        skip("nixl", "readelf is not there; install binutils")
    theirs = table(wheel(), "nixlPosixEngine")
    ours = table(plugin, "13KvsprayEngineE")
    assert len(theirs) == 27  # two destructors, 13 functions without a default, 12 with one
    compare(ours, theirs)
    for i in range(4, len(theirs) - 1):
        other = theirs.copy()
        other[i], other[i + 1] = other[i + 1], other[i]
        if theirs[i] != theirs[i + 1]:  # two have one name
            with pytest.raises(AssertionError, match="and NIXL calls"):
                compare(ours, other)


def test_version() -> None:
    """Another minor version may have another table: then this build is not for it."""
    import importlib.metadata

    if not have_nixl():
        skip("nixl", "the package nixl is not there; run test/rig/env.py --nixl")
    assert importlib.metadata.version("nixl").startswith("1.5.")


def test_bytes_of_others(tmp_path: pathlib.Path) -> None:
    """Random notes, messages, connection information and metadata, under the sanitizers."""
    if shutil.which("g++") is None:
        skip("g++", "install g++")
    c = sorted((ROOT / "pybind" / "src").glob("*.c"))
    flags = shlex.split("-g -O1 -pthread -D_GNU_SOURCE -fsanitize=address,undefined")
    include = [f"-I{ROOT}/pybind/include", f"-I{ROOT}/pybind/src"]
    subprocess.run(["gcc", *flags, *include, "-c", *map(str, c)], check=True, cwd=tmp_path)
    binary = tmp_path / "hostile"
    source = pathlib.Path(__file__).parent / "hostile_test.cc"
    subprocess.run(
        ["g++", "-std=c++20", *flags, "-fno-sanitize-recover=all", *include, "-o", str(binary),
         str(source), *(f"{p.stem}.o" for p in c), "-ldl"],
        check=True, cwd=tmp_path,
    )  # fmt: skip
    rounds = os.environ.get("KVSPRAY_HOSTILE_ROUNDS", "20000")
    out = subprocess.run([binary, rounds], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "ok"
