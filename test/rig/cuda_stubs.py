"""Makes empty CUDA libraries beside torch's own, so that a CUDA build of torch loads where only a
CPU is used.

Each has the name that torch asks for, and every symbol that torch's libraries leave undefined for
it, under the symbol version that they ask for. A call of one would return 1 (an error in all of
these interfaces); a CPU engine makes none.
usage: cuda_stubs.py SITE_PACKAGES        (needs gcc and nm)
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

# soname: the symbol version its symbols carry; None: they carry none.
LIBRARIES: dict[str, str | None] = {
    "libcublas.so.13": "libcublas.so.13",
    "libcublasLt.so.13": "libcublasLt.so.13",
    "libcudnn.so.9": "libcudnn.so.9",
    "libcufft.so.12": "libcufft.so.12",
    "libcufile.so.0": "libcufile.so.0",
    "libcupti.so.13": "libcupti.so.13",
    "libcurand.so.10": "libcurand.so.10",
    "libcusolver.so.12": "libcusolver.so.12",
    "libcusparse.so.12": "libcusparse.so.12",
    "libcusparseLt.so.0": "libcusparseLt.so.0",
    "libnccl.so.2": None,
    "libnvrtc.so.13": "libnvrtc.so.13",
    "libnvshmem_host.so.3": "NVSHMEM",
}
PREFIX = re.compile(r"^(cu|nccl|nvshmem|nvrtc|nvJit)[A-Za-z_]")


def symbols(path: pathlib.Path, kind: str) -> set[str]:
    out = subprocess.run(
        ["nm", "-D", kind, str(path)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1] for line in out.splitlines() if line.strip()}


def main(site: pathlib.Path) -> int:
    lib = site / "torch" / "lib"
    for name in LIBRARIES:
        (lib / name).unlink(missing_ok=True)
    wanted: set[str] = set()
    for path in sorted(lib.glob("*.so")):
        wanted |= {s for s in symbols(path, "--undefined-only") if PREFIX.match(s)}
    # The runtime is a real package: it is small, and torch calls it even on a CPU.
    runtime = {
        s.split("@")[0] for s in symbols(site / "nvidia/cu13/lib/libcudart.so.13", "--defined-only")
    }
    wanted = {s for s in wanted if not s.partition("@")[2].startswith("libcudart")}
    with tempfile.TemporaryDirectory() as tmp:
        for soname, version in LIBRARIES.items():
            if version is None:
                names = sorted(s for s in wanted if "@" not in s and s not in runtime)
            else:
                names = sorted({s.split("@")[0] for s in wanted if s.endswith("@" + version)})
            source = pathlib.Path(tmp, "stub.c")
            source.write_text("".join(f"int {n}(void){{return 1;}}\n" for n in names))
            cmd = [
                "gcc",
                "-shared",
                "-fPIC",
                "-fno-builtin",
                "-w",
                "-o",
                str(lib / soname),
                str(source),
                f"-Wl,-soname,{soname}",
            ]
            if version is not None and names:
                script = pathlib.Path(tmp, "versions")
                script.write_text(f"{version} {{ global: {' '.join(n + ';' for n in names)} }};\n")
                cmd.append(f"-Wl,--version-script={script}")
            subprocess.run(cmd, check=True)
    print(f"made {len(LIBRARIES)} empty CUDA libraries in {lib}")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
