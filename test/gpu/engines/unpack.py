#!/usr/bin/env python3
"""Unpacks what pack.py has packed, on the GPU host, into a directory that later commands find
again. A pack that is there already is left alone; one that changed replaces what it made before.

usage: unpack.py [--to /opt/rig] [DIR ...]         default: .build/gpu/pk
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import lzma
import os
import pathlib
import shutil
import site
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEFAULT = pathlib.Path("/opt/rig")
# Found by their SONAME alone, by kernels that the host's own torch does not load.
LIBRARIES = ("libnvrtc.so", "libcudart.so")


def place(pack: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """vllm-py, vllm-c and others make one tree."""
    return to / pack.name.removesuffix(".tar.xz").split("-")[0]


def unpack(pack: pathlib.Path, target: pathlib.Path) -> None:
    if shutil.which("xz"):
        subprocess.run(["tar", "xJf", str(pack), "-C", str(target)], check=True)
        return
    with lzma.open(pack) as raw, tarfile.open(fileobj=raw, mode="r|") as tar:
        tar.extractall(target, filter="tar")


def link_libraries(lib: pathlib.Path) -> None:
    lib.mkdir(exist_ok=True)
    for folder in site.getsitepackages():
        for path in pathlib.Path(folder).glob("nvidia/**/lib*.so.*"):
            if path.name.startswith(LIBRARIES) and not os.path.lexists(lib / path.name):
                (lib / path.name).symlink_to(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--to", type=pathlib.Path, default=DEFAULT)
    args = parser.parse_args()
    start = time.monotonic()
    stamps = args.to / "stamps"
    stamps.mkdir(parents=True, exist_ok=True)
    packs = sorted(
        p for folder in args.folders or [ROOT / ".build/gpu/pk"] for p in folder.glob("*.tar.xz")
    )
    if not packs:
        raise SystemExit("unpack: no *.tar.xz in these folders; make gpu-bin makes them")
    sums = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in packs}
    todo = [
        p
        for p in packs
        if not (stamps / p.name).exists() or (stamps / p.name).read_text() != sums[p]
    ]
    for pack in todo:
        if (
            pack.name == "own.tar.xz"
        ):  # the only one that changes: modules that are gone must not stay
            shutil.rmtree(place(pack, args.to), ignore_errors=True)
        place(pack, args.to).mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(len(packs)) as pool:
        list(pool.map(lambda p: unpack(p, place(p, args.to)), todo))
    for pack in todo:
        (stamps / pack.name).write_text(sums[pack])
    link_libraries(args.to / "lib")
    print(
        f"unpack: {len(todo)} of {len(packs)} packs into {args.to} in "
        f"{time.monotonic() - start:.1f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
