#!/usr/bin/env python3
"""Makes what people install, from this checkout: wheels, archives, packages, an image.

    dist.py --version V wheels     wheels for this machine, into dist/
    dist.py --version V image      an OCI layout, into dist/
    dist.py --version V all        everything for x86-64 and arm64, with SBOMs and checksums, into
                                   dist/V/

`make wheels`, `make image` and `make dist` call it; they make its tools first. Binaries in wheels,
packages and the image have cgo, for GPUs and RDMA; those in archives are static, without both.
`all` also needs the C compiler of the other architecture (gcc-aarch64-linux-gnu, or
gcc-x86-64-linux-gnu), and apt-get and dpkg-deb for the image's root file system.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
WORK = BUILD / "dist"
TOOLS = BUILD / "bin"
# The oldest C library that binaries and the shim run with: Debian 12, RHEL 9, Ubuntu 22.04.
GLIBC = (2, 34)


@dataclasses.dataclass(frozen=True)
class Arch:
    go: str
    machine: str

    @property
    def cc(self) -> str:
        if self.machine == platform.machine():
            return os.environ.get("CC", "gcc")
        cross = f"{self.machine}-linux-gnu-gcc"
        if not shutil.which(cross):
            raise Failed(f"no {cross}: install gcc-{self.machine.replace('_', '-')}-linux-gnu")
        return cross

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{self.machine}"


ARCHES = (Arch("amd64", "x86_64"), Arch("arm64", "aarch64"))


class Failed(Exception):
    pass


def run(*command: object, cwd: pathlib.Path = ROOT, **env: str) -> str:
    words = [str(c) for c in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise Failed(
            f"{shlex.join(words)} failed with status {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return done.stdout


def step(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


def python_version(version: str) -> str:
    """`git describe` as a version of Python packages: commits after a tag are development versions
    of the next release."""
    described = re.fullmatch(
        r"(?:v(?P<a>\d+)\.(?P<b>\d+)\.(?P<c>\d+)(?:-(?P<pre>a|alpha|b|beta|rc)\.?(?P<n>\d+))?(?:-(?P<commits>\d+)-g(?P<hash>[0-9a-f]+))?"
        r"|(?P<only>[0-9a-f]{6,40}))(?P<dirty>-dirty)?",
        version,
    )
    if described is None:
        raise Failed(f"--version {version!r}: neither a tag vN.N.N nor what git describe prints")
    d = described.groupdict()
    if d["only"]:
        return f"0.1.0.dev0+g{d['only']}" + (".dirty" if d["dirty"] else "")
    release = f"{d['a']}.{d['b']}.{d['c']}"
    pre = {"alpha": "a", "beta": "b"}.get(d["pre"] or "", d["pre"] or "") + (d["n"] or "")
    if not d["commits"]:
        return release + pre + ("+dirty" if d["dirty"] else "")
    if pre:
        release += pre[: -len(d["n"])] + str(int(d["n"]) + 1)
    else:
        release = f"{d['a']}.{d['b']}.{int(d['c']) + 1}"
    return f"{release}.dev{d['commits']}+g{d['hash']}" + (".dirty" if d["dirty"] else "")


def package_version(version: str) -> str:
    """The same for Debian and RPM, where "~" sorts before the release."""
    return re.sub(r"\.?(a|b|rc|dev)(?=\d)", r"~\1", python_version(version), count=1)


class Dist:
    def __init__(self, version: str, out: pathlib.Path) -> None:
        self.version, self.out = version, out
        out.mkdir(parents=True, exist_ok=True)
        self.epoch = run("git", "log", "-1", "--format=%ct").strip()

    def build(self, arch: Arch, cgo: bool, command: str) -> pathlib.Path:
        target = WORK / arch.go / ("cgo" if cgo else "static") / command
        step(f"{command} for {arch.go}, {'with cgo' if cgo else 'static'}")
        env = {"GOARCH": arch.go, "GOOS": "linux", "CGO_ENABLED": "0"}
        if cgo:
            env |= {"CGO_ENABLED": "1", "CC": arch.cc}
        ldflags = f"-X github.com/kvspray/kvspray/internal/version.version={self.version} -s -w"
        run(
            "go",
            "build",
            "-trimpath",
            "-ldflags",
            ldflags,
            "-o",
            target,
            f"./cmd/{command}",
            cwd=ROOT if command == "kvspray" else ROOT / "lab",
            **env,
        )
        return target

    def source(self, part: str) -> pathlib.Path:
        """A copy of a Python package's sources, with the version in it."""
        copy = WORK / "src" / pathlib.Path(part).name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(
            ROOT / part,
            copy,
            ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so", "tests"),
        )
        shutil.copy(ROOT / "LICENSE", copy)
        version = python_version(self.version)
        for init in copy.rglob("__init__.py"):
            text = init.read_text()
            init.write_text(
                re.sub(r"^__version__ = .*$", f'__version__ = "{version}"', text, flags=re.M)
            )
        # The parts of one release belong together.
        project = copy / "pyproject.toml"
        project.write_text(
            re.sub(
                r'^((?:dependencies|vllm|sglang) = \["kvspray[-a-z]*)"',
                rf'\1=={version}"',
                project.read_text(),
                flags=re.M,
            )
        )
        return copy

    def wheel(self, source: pathlib.Path, **env: str) -> None:
        run(BUILD / "dist-venv" / "bin" / "python", "-m", "pip", "wheel", "-q", "--no-deps",
            "--no-build-isolation", "--disable-pip-version-check", "-w", self.out, source,
            SOURCE_DATE_EPOCH=self.epoch, **env)  # fmt: skip

    def wheels(self, arches: tuple[Arch, ...]) -> None:
        for old in self.out.glob("*.whl"):
            old.unlink()
        for arch in arches:
            binary = self.build(arch, True, "kvspray")
            step(f"the wheel of kvspray for {arch.machine}")
            self.wheel(self.source("pybind"), CC=arch.cc, CFLAGS="-g0",
                KVSPRAY_WHEEL_BINARY=str(binary),
                KVSPRAY_WHEEL_PLATFORM=arch.platform)  # fmt: skip
            (made,) = self.out.glob(f"kvspray-*{arch.machine}.whl")
            seen = run(BUILD / "dist-venv" / "bin" / "auditwheel", "show", made)
            if f'"{arch.platform}"' not in seen.replace("\n", " "):
                raise Failed(
                    f"auditwheel does not find {made} consistent with {arch.platform}:\n{seen}"
                )
        for plugin in sorted((ROOT / "integration").glob("*/pyproject.toml")):
            step(f"the wheel of kvspray-{plugin.parent.name}")
            self.wheel(self.source(f"integration/{plugin.parent.name}"))

    def image(self, arch: Arch) -> None:
        binary = self.build(arch, True, "kvspray")
        step("the image")
        root = WORK / "image"
        shutil.rmtree(root, ignore_errors=True)
        debs = WORK / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        packages = (ROOT / "deploy" / "package" / "image-packages.txt").read_text().split("\n")
        for package in (p for p in packages if p and not p.startswith("#")):
            if not list(debs.glob(f"{package}_*_*.deb")):
                run("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package, cwd=debs)
            for deb in debs.glob(f"{package}_*_*.deb"):
                run("dpkg-deb", "-x", deb, root)
        # What the maintainer scripts of ca-certificates would make.
        bundle = root / "etc/ssl/certs/ca-certificates.crt"
        bundle.parent.mkdir(parents=True, exist_ok=True)
        bundle.write_bytes(
            b"".join(
                p.read_bytes() for p in sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
            )
        )
        for unneeded in (
            "usr/share/doc-base",
            "usr/share/lintian",
            "usr/share/man",
            "usr/share/locale",
        ):
            shutil.rmtree(root / unneeded, ignore_errors=True)
        layout = self.out / f"kvspray-{self.version}-image-{arch.go}"
        shutil.rmtree(layout, ignore_errors=True)
        revision = run("git", "rev-parse", "HEAD").strip()
        run(TOOLS / "ociimage", "--root", root, "--binary", binary, "--arch", arch.go, "--version",
            self.version, "--revision", revision, "--epoch", self.epoch, "--out",
            layout)  # fmt: skip

    def archive(self, arch: Arch) -> None:
        name = f"kvspray-{self.version}-linux-{arch.go}"
        files = {c: self.build(arch, False, c) for c in ("kvspray", "kvspray-bench")}
        files |= {f: ROOT / f for f in ("LICENSE", "README.md", "CHANGELOG.md")}

        def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = int(self.epoch)
            return info

        with tarfile.open(self.out / f"{name}.tar.gz", "w:gz") as tar:
            for inner, path in files.items():
                tar.add(path, f"{name}/{inner}", filter=plain)
        for command in ("kvspray", "kvspray-bench"):
            step(f"the SBOM of {command} for {arch.go}")
            run(TOOLS / "cyclonedx-gomod", "bin", "-json", "-version", self.version, "-output",
                self.out / f"{command}-{self.version}-linux-{arch.go}.cdx.json",
                files[command])  # fmt: skip

    def packages(self, arch: Arch) -> None:
        binaries = {c: self.build(arch, True, c) for c in ("kvspray", "kvspray-bench")}
        completions = WORK / "completions"
        completions.mkdir(parents=True, exist_ok=True)
        native = WORK / host().go / "static" / "kvspray"
        for shell in ("bash", "zsh", "fish"):
            (completions / shell).write_text(run(native, "completion", shell))
        for packager in ("deb", "rpm"):
            step(f"the {packager} package for {arch.go}")
            run(TOOLS / "nfpm", "package", "--config", ROOT / "deploy/package/nfpm.yaml",
                "--packager", packager, "--target", self.out, KVSPRAY_VERSION=package_version(
                self.version), KVSPRAY_ARCH=arch.go, KVSPRAY_BIN=str(binaries["kvspray"]),
                KVSPRAY_BENCH=str(binaries["kvspray-bench"]), KVSPRAY_COMPLETIONS=str(completions),
                SOURCE_DATE_EPOCH=self.epoch)  # fmt: skip

    def checksums(self) -> None:
        lines = []
        for p in sorted(self.out.iterdir()):
            if p.is_file() and p.name != "SHA256SUMS":
                lines.append(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n")
        (self.out / "SHA256SUMS").write_text("".join(lines))

    def all(self) -> None:
        self.wheels(ARCHES)
        for arch in ARCHES:
            self.archive(arch)
        for arch in ARCHES:
            self.packages(arch)
        self.image(host())
        self.checksums()


def host() -> Arch:
    for arch in ARCHES:
        if arch.machine == platform.machine():
            return arch
    raise Failed(
        f"this machine is {platform.machine()}: want {' or '.join(a.machine for a in ARCHES)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True, help="what git describe prints")
    parser.add_argument("what", choices=("wheels", "image", "all"))
    args = parser.parse_args()
    try:
        if args.what == "wheels":
            Dist(args.version, ROOT / "dist").wheels((host(),))
        elif args.what == "image":
            Dist(args.version, ROOT / "dist").image(host())
        else:
            Dist(args.version, ROOT / "dist" / args.version).all()
    except Failed as err:
        print(f"dist: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
