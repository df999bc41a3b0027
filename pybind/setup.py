"""Compiles libkvspray.so and libkvspray_preload.so with the C compiler and puts them beside the
Python files.

The libraries are plain C, the first is loaded with ctypes and the other by LD_PRELOAD, so the wheel
is bound to the platform but to no Python version.

A wheel for others also contains the sidecar. Two variables, which `make wheels` sets, make one:
KVSPRAY_WHEEL_BINARY is the binary, KVSPRAY_WHEEL_PLATFORM the tag of the platform that CC compiles
for.
"""

import os
import pathlib
import shlex
import shutil
import subprocess

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = pathlib.Path(__file__).parent.resolve()
CFLAGS = "-std=c11 -O2 -g -fPIC -Wall -Wextra -Werror -fvisibility=hidden -D_GNU_SOURCE -pthread"


# The preload contains the client, and exports the driver's names alone.
PRELOAD_FLAGS = (
    "-Ddlsym=kvs_real_dlsym",
    f"-I{ROOT / 'src'}",
    f"-Wl,--version-script={ROOT / 'preload' / 'preload.map'}",
)


def compile_library(target: pathlib.Path, *directories: str, more: tuple[str, ...] = ()) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    cc = shlex.split(os.environ.get("CC", "gcc"))
    flags = shlex.split(CFLAGS + " " + os.environ.get("CFLAGS", ""))
    sources = [str(p) for directory in directories for p in sorted((ROOT / directory).glob("*.c"))]
    command = [
        *cc,
        *flags,
        *more,
        f"-I{ROOT / 'include'}",
        "-shared",
        "-Wl,-z,defs",
        "-o",
        str(target),
        *sources,
        "-ldl",
    ]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError as e:
        raise SystemExit(f"kvspray: C compiler {cc[0]!r} not found: install gcc, or set CC") from e


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        # An editable install uses the library in the source directory.
        base = ROOT / "python" if self.editable_mode else pathlib.Path(self.build_lib)
        compile_library(base / "kvspray" / "libkvspray.so", "src")
        release = f'-DKVS_RELEASE="{self.distribution.get_version()}"'
        compile_library(
            base / "kvspray" / "libkvspray_preload.so",
            "preload",
            "src",
            more=(*PRELOAD_FLAGS, release),
        )
        if binary := os.environ.get("KVSPRAY_WHEEL_BINARY"):
            target = base / "kvspray" / "_bin" / "kvspray"
            target.parent.mkdir(exist_ok=True)
            shutil.copy(binary, target)
            target.chmod(0o755)


class PlatformWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", os.environ.get("KVSPRAY_WHEEL_PLATFORM") or platform


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
