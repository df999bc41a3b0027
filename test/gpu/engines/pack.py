#!/usr/bin/env python3
"""Packs a CUDA vLLM for a GPU host without a network, and kvspray with it:
.build/gpu/pk/*.tar.xz, which unpack.py unpacks there.

usage: pack.py [--fast] [PART ...]     parts: own deps vllm-py vllm-c vllm-fa3, all of them without
                                       a name; vllm-moe, nixl, peers-a, peers-b,
                                       peers-c, sgl and sgl-data, which go to
                                       .build/gpu/pk-more

The host has Python 3.12, torch 2.11 with CUDA 13, triton and transformers. vLLM 0.33.0 asks for
torch 2.14; its kernels use torch's stable ABI alone, and load into 2.11. GPU code for other GPUs
than the host's is left out, and so are the kernels that the shapes of this rig do not use.
Nothing is patched. Needed here: python3 with pip, strip, and the environment of `make env` for
the part own.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

import fatbin

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WORK = ROOT / ".build/gpu/work"
PACKS = ROOT / ".build/gpu/pk"
MORE = ROOT / ".build/gpu/pk-more"  # what only some commands need

VLLM = "vllm==0.33.0"
NIXL = ["nixl==1.5.1", "nixl-cu13==1.5.1"]
# Other projects' stores, with what they import and vLLM does not.
STORES = {
    "peers-a": [
        "lmcache==0.5.6",
        "pegaflow-llm-cu13==0.25.1",
        "sortedcontainers==2.4.0",
        "aiofile==3.12.3",
        "caio==0.12.10",
        "nvtx==0.2.17",
    ],
    "peers-b": ["mooncake-transfer-engine-cuda13==0.3.14"],
    "peers-c": ["cupy-cuda13x==14.2.0"],
}
# SGLang 0.5.23 asks for torch 2.14. These kernels are the last ones that load into torch 2.11, and
# have all that a Llama needs of them. Its norms are kernels of FlashInfer, built on the host.
SGLANG, SGL_KERNEL, FLASHINFER = (
    "sglang==0.5.23",
    "sglang-kernel==0.4.5",
    "flashinfer-python==0.6.15.post1",
)
SGL_LEFT_OUT = (
    "sglang/multimodal_gen/",
    "sglang/srt/rust_extensions/_server",
    "sglang/srt/rust_extensions/_bench",
    "flashinfer/data/",
)
SGL_OPS = "sgl_kernel/sm90/common_ops.abi3.so"
SGL_KERNELS_LEFT_OUT = ("flash_ops", "flashmla_ops", "infllm_ops", "sm100/")
ARCH = 90  # H100, H200
PYTHON = "3.12"
GLIBC = range(39, 16, -1)
KERNELS = {
    "vllm-c": "vllm/_C_stable_libtorch.abi3.so",
    "vllm-fa3": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm-moe": "vllm/_moe_C_stable_libtorch.abi3.so",
}
# Shared objects of the wheel without GPU code.
HOST_ONLY = ("cumem_allocator", "fs_io_C", "spinloop", "_rust_tool_parser")
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/fmha_sm100/", "vllm/third_party/deep_gemm/")
REQUIREMENTS = ("fatbin.py", "requirements.txt", "requirements-sglang.txt")
CHOICES = (VLLM, NIXL, SGLANG, SGL_KERNEL, FLASHINFER, ARCH, PYTHON, HOST_ONLY, LEFT_OUT)
CHOICES += (SGL_LEFT_OUT, SGL_KERNELS_LEFT_OUT)
PARTS = ("own", "deps", "vllm-py", "vllm-c", "vllm-fa3")  # these go to PACKS, others to MORE


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def pip(*args: str) -> None:
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + [
        "manylinux2014_x86_64",
        "manylinux2010_x86_64",
        "manylinux1_x86_64",
        "any",
    ]
    tags = [f"--platform={p}" for p in platforms] + [
        f"--abi={a}" for a in ("cp312", "abi3", "none")
    ]
    fixed = [
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        "--implementation=cp",
        *tags,
    ]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            args[0],
            "-q",
            "--disable-pip-version-check",
            *fixed,
            *args[1:],
        ],
        check=True,
        env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"},  # older ones lack the option
    )


def wheel(requirement: str) -> pathlib.Path:
    """The wheel of NAME==VERSION, downloaded once."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(WORK.glob(pattern)):
        say(f"downloading {requirement} ...")
        pip("download", "-d", str(WORK), requirement)
    return next(WORK.glob(pattern))


def fresh(name: str) -> pathlib.Path:
    shutil.rmtree(WORK / name, ignore_errors=True)
    (WORK / name).mkdir(parents=True)
    return WORK / name


def trim(tree: pathlib.Path) -> None:
    """Removes what no import needs, and debug sections."""
    for folder in ("bin", "mistral_common/data", "pycountry/locales"):
        shutil.rmtree(tree / folder, ignore_errors=True)
    for folder in [
        p for p in tree.rglob("*") if p.is_dir() and p.name in ("tests", "test", "__pycache__")
    ]:
        shutil.rmtree(folder, ignore_errors=True)
    for stub in list(tree.rglob("*.pyi")):
        stub.unlink()
    for shared in (p for p in tree.rglob("*.so*") if p.is_file() and not p.is_symlink()):
        subprocess.run(["strip", "--strip-debug", str(shared)], check=True)


def own() -> pathlib.Path:
    """kvspray's binary, its Python packages with the C library, and no other package."""
    tree = fresh("own")
    (tree / "bin").mkdir()
    build = [
        "go",
        "build",
        "-p",
        "1",
        "-trimpath",
        "-ldflags",
        os.environ.get("KVSPRAY_LDFLAGS", "") + " -s -w",
        "-o",
        f"{tree}/bin/",
    ]
    subprocess.run([*build, "./cmd/kvspray"], cwd=ROOT, check=True)
    script = (
        "import importlib.util as u; [print(u.find_spec(m).submodule_search_locations[0]) for m in "
        "('kvspray', 'kvspray_vllm', 'kvspray_sglang')]"
    )
    found = subprocess.run(
        [str(ROOT / ".build/venv/bin/python"), "-c", script],
        check=True,
        capture_output=True,
        text=True,
    )
    for package in map(pathlib.Path, found.stdout.split()):
        shutil.copytree(package, tree / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        # For the engines' plug-in loaders.
        for info in package.parent.glob(f"{package.name}-*.dist-info"):
            shutil.copytree(info, tree / info.name)
    return tree


def deps() -> pathlib.Path:
    tree = fresh("deps")
    say("downloading what vLLM imports ...")
    pip("install", "--no-compile", "--target", str(tree), "-r", str(HERE / "requirements.txt"))
    trim(tree)
    return tree


def vllm_python() -> pathlib.Path:
    tree = fresh("vllm-py")
    keep = {f"vllm/{name}.abi3.so" for name in HOST_ONLY}
    with zipfile.ZipFile(wheel(VLLM)) as z:
        names = [
            n
            for n in z.namelist()
            if n in keep or not (n.endswith(".so") or n.startswith(LEFT_OUT))
        ]
        z.extractall(tree, names)
    return tree


def kernels(part: str) -> pathlib.Path:
    tree, raw = fresh(part), fresh("raw")
    with zipfile.ZipFile(wheel(VLLM)) as z:
        z.extract(KERNELS[part], raw)
    target = tree / KERNELS[part]
    target.parent.mkdir(parents=True)
    kept = fatbin.prune(raw / KERNELS[part], target, ARCH)
    say(f"{part}: {kept / 1e6:.1f} of {target.stat().st_size / 1e6:.1f} MB are code for sm_{ARCH}")
    return tree


def nixl() -> pathlib.Path:
    """NIXL with UCX, the file plugin, and code for this GPU alone."""
    tree = fresh("nixl")
    for requirement in NIXL:
        with zipfile.ZipFile(wheel(requirement)) as z:
            z.extractall(tree)
    for extra in [
        *tree.glob("nixl_ep*"),
        *tree.glob("*.scripts"),
        *tree.glob("*.data"),
        *tree.glob("perftest*"),
    ]:
        shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
    for plugin in (
        p for p in tree.rglob("libplugin_*.so") if not p.stem.endswith(("_UCX", "_POSIX"))
    ):
        plugin.unlink()
    for perf in [p for p in tree.rglob("*perftest*") if p.exists()]:
        shutil.rmtree(perf) if perf.is_dir() else perf.unlink()
    prune(tree)
    return tree


def stores(part: str) -> pathlib.Path:
    """Other projects' stores with code for this GPU alone."""
    tree = fresh(part)
    pip("install", "--no-compile", "--target", str(tree), *STORES[part])
    trim(tree)
    prune(tree)
    return tree


def prune(tree: pathlib.Path) -> None:
    for shared in (p for p in tree.rglob("*.so*") if p.is_file() and not p.is_symlink()):
        if any(name in fatbin.SECTIONS for name, _, _ in fatbin.sections(shared.read_bytes())):
            fatbin.prune(shared, shared, ARCH)


def sglang() -> pathlib.Path:
    """SGLang with its own kernels for this GPU, without those of FlashAttention and FlashMLA."""
    tree = fresh("sgl")
    say("downloading what SGLang imports ...")
    listed = str(HERE / "requirements-sglang.txt")
    pip("install", "--no-compile", "--target", str(tree), "-r", listed)
    trim(tree)
    for requirement in (SGLANG, SGL_KERNEL, FLASHINFER):
        with zipfile.ZipFile(wheel(requirement)) as z:
            for n in z.namelist():
                kernels = n.startswith("sgl_kernel/") and n.endswith(".so")
                left_out = kernels and any(k in n for k in SGL_KERNELS_LEFT_OUT)
                if not left_out and not n.startswith(SGL_LEFT_OUT):
                    z.extract(n, tree)
    fatbin.prune(tree / SGL_OPS, tree / SGL_OPS, ARCH)
    return tree


def flashinfer_data() -> pathlib.Path:
    """FlashInfer's sources of kernels."""
    tree = fresh("sgl-data")
    with zipfile.ZipFile(wheel(FLASHINFER)) as z:
        z.extractall(tree, [n for n in z.namelist() if n.startswith("flashinfer/data/")])
    return tree


def target_of(part: str) -> pathlib.Path:
    return (PACKS if part in PARTS else MORE) / f"{part}.tar.xz"


def pack(part: str, tree: pathlib.Path, preset: int) -> None:
    """One archive with sorted names. The x86 filter makes host code smaller; it is no use for GPU
    code."""
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": preset}
    filters = [lzma2] if part in KERNELS else [{"id": lzma.FILTER_X86}, lzma2]
    start, target, part_file = time.monotonic(), target_of(part), WORK / f"{part}.part"

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with (
        lzma.open(part_file, "wb", filters=filters, check=lzma.CHECK_CRC64) as out,
        tarfile.open(fileobj=out, mode="w|") as tar,
    ):
        for child in sorted(tree.iterdir()):
            tar.add(child, child.name, filter=plain)
    part_file.rename(target)
    say(
        f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e6:.1f} MB in "
        f"{time.monotonic() - start:.0f} s"
    )


def stale(part: str) -> bool:
    """Whether a part must be packed. Wheels are packed again when versions or
    contents change."""
    sources = b"".join((HERE / f).read_bytes() for f in REQUIREMENTS)
    choices = repr(CHOICES) + ",".join(STORES.get(part, ()))
    recipe = hashlib.sha256(sources + choices.encode()).hexdigest()
    stamp = WORK / f"{part}.recipe"
    if (
        part != "own"
        and target_of(part).exists()
        and stamp.exists()
        and stamp.read_text() == recipe
    ):
        return False
    stamp.write_text(recipe)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--fast", action="store_true", help="compress fast and worse")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    PACKS.mkdir(parents=True, exist_ok=True)
    MORE.mkdir(parents=True, exist_ok=True)
    makers = {
        "own": own,
        "deps": deps,
        "vllm-py": vllm_python,
        "nixl": nixl,
        "sgl": sglang,
        "sgl-data": flashinfer_data,
        **{k: (lambda k=k: stores(k)) for k in STORES},
        **{k: (lambda k=k: kernels(k)) for k in KERNELS},
    }
    for part in args.parts or PARTS:
        if part not in makers:
            raise SystemExit(f"part {part!r}: unknown; known are {', '.join(makers)}")
        if stale(part):
            try:
                pack(part, makers[part](), 1 if args.fast else 9)
            except BaseException:
                (WORK / f"{part}.recipe").unlink(missing_ok=True)
                raise
    for folder in (PACKS, MORE):
        total = sum(p.stat().st_size for p in folder.glob("*.tar.xz"))
        say(f"{folder.relative_to(ROOT)}: {total / 1e6:.1f} MB in all")


if __name__ == "__main__":
    main()
