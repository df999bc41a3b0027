#!/usr/bin/env python3
"""Compiles kernels.cu with a pinned NVRTC to the images beside it, and the shim's flag.cu to a C
header. Needs no GPU and no CUDA installation.

usage: generate.py [--check]      --check compiles and compares, and writes nothing

The toolchain is the wheel nvidia-cuda-nvrtc-cu12 of the version below, fetched once into
.build/nvrtc. CUDA 12.4 is old enough for the drivers that are in service and new enough for sm_90;
later GPUs take the PTX.
"""

import ctypes
import glob
import os
import subprocess
import sys
import zipfile

WHEEL = "nvidia-cuda-nvrtc-cu12==12.4.127"
HERE = os.path.dirname(os.path.abspath(__file__))
SHIM = os.path.join(HERE, "..", "..", "..", "..", "pybind", "src")
CACHE = os.path.join(HERE, "..", "..", "..", "..", ".build", "nvrtc")
IMAGES = [  # file, --gpu-architecture, what NVRTC calls it
    ("kernels.ptx", "compute_80", "PTX"),
    ("kernels.sm_80.cubin", "sm_80", "CUBIN"),
    ("kernels.sm_90.cubin", "sm_90", "CUBIN"),
]


def toolchain() -> ctypes.CDLL:
    pattern = os.path.join(CACHE, "**", "libnvrtc.so.12")
    if not glob.glob(pattern, recursive=True):
        os.makedirs(CACHE, exist_ok=True)
        print(f"fetching {WHEEL}", file=sys.stderr)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary=:all:",
                "--platform",
                "manylinux2014_x86_64",
                "-d",
                CACHE,
                WHEEL,
            ],
            check=True,
        )
        for wheel in glob.glob(os.path.join(CACHE, "*.whl")):
            with zipfile.ZipFile(wheel) as z:
                z.extractall(CACHE)
            os.remove(wheel)
    return ctypes.CDLL(glob.glob(pattern, recursive=True)[0])


def header(ptx: bytes, name: str, source: str) -> bytes:
    lines = ptx.decode("ascii").rstrip("\n").split("\n")
    body = "\n".join(
        '\t"' + line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '\\n"'
        for line in lines
    )
    text = "/* Made from " + source + " by internal/sys/cuda/kernels/generate.py. DO NOT EDIT. */\n"
    return (text + f"static const char {name}[] =\n{body};\n").encode()


def compile_image(nvrtc: ctypes.CDLL, source: bytes, arch: str, kind: str) -> bytes:
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()

    def checked(result: int, what: str) -> None:
        if result:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise SystemExit(f"{what}: nvrtc error {result}\n{log.value.decode()}")

    checked(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None),
        "create",
    )
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options), "compile")
    checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), "size")
    image = ctypes.create_string_buffer(size.value)
    checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, image), "image")
    return image.raw.rstrip(b"\0") + b"\n" if kind == "PTX" else image.raw


def main() -> int:
    nvrtc = toolchain()
    with open(os.path.join(HERE, "kernels.cu"), "rb") as f:
        source = f.read()
    with open(os.path.join(SHIM, "flag.cu"), "rb") as f:
        flag = f.read()
    stale = []
    images = [
        (os.path.join(HERE, name), compile_image(nvrtc, source, arch, kind))
        for name, arch, kind in IMAGES
    ]
    images.append(
        (
            os.path.join(SHIM, "flag_ptx.h"),
            header(compile_image(nvrtc, flag, "compute_75", "PTX"), "flag_ptx", "flag.cu"),
        )
    )
    for path, image in images:
        if "--check" in sys.argv:
            if not os.path.exists(path) or open(path, "rb").read() != image:
                stale.append(os.path.basename(path))
        else:
            with open(path, "wb") as f:
                f.write(image)
    if stale:
        print(
            f"stale: {', '.join(stale)}; run internal/sys/cuda/kernels/generate.py", file=sys.stderr
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
