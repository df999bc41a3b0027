#!/usr/bin/env python3
"""Makes what people install, from this checkout: wheels, archives, packages, an image, the chart.

    dist.py --version V wheels     wheels for this machine, into dist/
    dist.py --version V image      an OCI layout, into dist/
    dist.py --version V all        everything for x86-64 and arm64, with SBOMs, licences and
                                   checksums, into dist/V/

`make wheels`, `make image` and `make dist` call it; they make its tools first. Binaries in wheels,
packages and the image have cgo, for GPUs and RDMA; those in archives are static, without both.
`all` also needs the C compiler of the other architecture (gcc-aarch64-linux-gnu, or
gcc-x86-64-linux-gnu), and apt-get and dpkg-deb for the image's root file system.

One commit gives the same bytes on each machine that has the same compilers and Debian packages:
`make release-check` compares two builds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
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
# Licences of modules that the binaries may link. All permit any use of a binary that comes with
# their text; MPL-2.0 asks for the module's sources too, which the Go module proxy keeps.
LICENSES = ("Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC-BY-4.0", "ISC", "MIT", "MPL-2.0")


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
    """`git describe` as a version of Python packages.

    Commits after a tag are development versions of the next release.
    """
    described = re.fullmatch(
        r"(?:v(?P<a>\d+)\.(?P<b>\d+)\.(?P<c>\d+)"
        r"(?:-(?P<pre>a|alpha|b|beta|rc)\.?(?P<n>\d+))?"
        r"(?:-(?P<commits>\d+)-g(?P<hash>[0-9a-f]+))?"
        r"|(?P<only>[0-9a-f]{6,40}))(?P<dirty>-dirty)?",
        version,
    )
    if described is None:
        raise Failed(f"--version {version!r}: neither a tag vN.N.N nor what git describe prints")
    d = described.groupdict()
    if d["only"]:
        return f"0.0.0.dev0+g{d['only']}" + (".dirty" if d["dirty"] else "")
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


def chart_version(version: str) -> str:
    """The same for the chart, as a semantic version that is also a tag of a registry."""
    return version[1:] if version.startswith("v") else f"0.0.0-g{version}"


def module(command: str) -> pathlib.Path:
    """The directory of the Go module that a command belongs to."""
    return ROOT if command == "kvspray" else ROOT / "lab"


@functools.cache
def licenses(command: str) -> pathlib.Path:
    """The licences and notices of all that a binary links. One that is not in LICENSES fails."""
    step(f"the licences of {command}")
    saved, text = WORK / "licenses" / command, WORK / f"LICENSE-{command}-third-party.txt"
    # freetype offers two licences, which go-licenses does not recognize; its texts are added below.
    own = ("--ignore=github.com/kvspray/kvspray", "--ignore=github.com/golang/freetype")
    tool, what = TOOLS / "go-licenses", f"./cmd/{command}"
    allowed = "--allowed_licenses=" + ",".join(LICENSES)
    # The tool skips the packages below GOROOT. A tool built with -trimpath has no GOROOT of its
    # own, and would then skip all packages.
    goroot = run("go", "env", "GOROOT").strip()
    run(tool, "check", what, *own, allowed, cwd=module(command), GOROOT=goroot)
    save = (tool, "save", what, *own, f"--save_path={saved}", "--force")
    run(*save, cwd=module(command), GOROOT=goroot)
    found = [p for p in saved.rglob("*") if re.match("LICEN[CS]E|COPYING|NOTICE", p.name)]
    parts = {str(p.relative_to(saved)): p for p in sorted(found)}
    parts["Go"] = pathlib.Path(goroot) / "LICENSE"
    if command == "kvspray-bench":
        query = ("go", "list", "-m", "-f", "{{.Dir}}", "github.com/golang/freetype")
        freetype = pathlib.Path(run(*query, cwd=module(command)).strip())
        parts["freetype"] = freetype / "licenses" / "ftl.txt"
    rule = "=" * 80
    titled = (f"{rule}\n{n}\n{rule}\n".encode() + p.read_bytes() for n, p in parts.items())
    text.write_bytes(b"\n".join(titled))
    return text


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
            cwd=module(command),
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
        run(
            BUILD / "dist-venv" / "bin" / "python",
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "-w",
            self.out,
            source,
            SOURCE_DATE_EPOCH=self.epoch,
            **env,
        )

    def wheels(self, arches: tuple[Arch, ...], *documents: pathlib.Path) -> None:
        for old in self.out.glob("*.whl"):
            old.unlink()
        for arch in arches:
            binary = self.build(arch, True, "kvspray")
            step(f"the wheel of kvspray for {arch.machine}")
            source = self.source("pybind")
            for document in documents:
                shutil.copy(document, source)
            self.wheel(
                source,
                CC=arch.cc,
                CFLAGS="-g0",
                KVSPRAY_WHEEL_BINARY=str(binary),
                KVSPRAY_WHEEL_PLATFORM=arch.platform,
            )
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
        shutil.copy(licenses("kvspray"), root / "usr/share/doc")
        layout = self.out / f"kvspray-{self.version}-image-{arch.go}"
        shutil.rmtree(layout, ignore_errors=True)
        revision = run("git", "rev-parse", "HEAD").strip()
        run(
            TOOLS / "ociimage",
            "--root",
            root,
            "--binary",
            binary,
            "--arch",
            arch.go,
            "--version",
            self.version,
            "--revision",
            revision,
            "--epoch",
            self.epoch,
            "--out",
            layout,
        )

    def tar(self, path: pathlib.Path, files: dict[str, pathlib.Path]) -> None:
        """A compressed archive whose bytes depend on the files' names and content only."""

        def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = int(self.epoch)
            info.mode = 0o755 if info.mode & 0o100 else 0o644
            return info

        with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, int(self.epoch)) as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for inner, file in sorted(files.items()):
                    tar.add(file, inner, filter=plain)

    def archive(self, arch: Arch) -> None:
        name = f"kvspray-{self.version}-linux-{arch.go}"
        commands = {c: self.build(arch, False, c) for c in ("kvspray", "kvspray-bench")}
        documents = [ROOT / f for f in ("LICENSE", "README.md", "CHANGELOG.md")]
        documents += [licenses(c) for c in commands]
        files = commands | {f.name: f for f in documents}
        self.tar(self.out / f"{name}.tar.gz", {f"{name}/{n}": f for n, f in files.items()})
        for command, binary in commands.items():
            step(f"the SBOM of {command} for {arch.go}")
            sbom = self.out / f"{command}-{self.version}-linux-{arch.go}.cdx.json"
            run(
                TOOLS / "cyclonedx-gomod",
                "bin",
                "-json",
                "-noserial",
                "-notimestamp",
                "-version",
                self.version,
                "-output",
                sbom,
                binary,
            )
            # The main module as lab/go.mod requires it: replace => ../
            text = sbom.read_text().replace('"../"', '"github.com/kvspray/kvspray"')
            text = text.replace("/../@(devel)", f"/github.com/kvspray/kvspray@{self.version}")
            sbom.write_text(text.replace('"(devel)"', f'"{self.version}"'))

    def chart(self) -> None:
        step("the chart")
        version = chart_version(self.version)
        source = WORK / "chart"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(ROOT / "deploy" / "chart", source)
        about = source / "Chart.yaml"
        stamped = re.sub(r"^version: .*$", f"version: {version}", about.read_text(), flags=re.M)
        # The image's tag.
        stamped = re.sub(r"^appVersion: .*$", f'appVersion: "{self.version}"', stamped, flags=re.M)
        about.write_text(stamped)
        files = {f"kvspray/{f.relative_to(source)}": f for f in source.rglob("*") if f.is_file()}
        self.tar(self.out / f"kvspray-{version}.tgz", files)

    def packages(self, arch: Arch) -> None:
        binaries = {c: self.build(arch, True, c) for c in ("kvspray", "kvspray-bench")}
        completions = WORK / "completions"
        completions.mkdir(parents=True, exist_ok=True)
        native = WORK / host().go / "static" / "kvspray"
        for shell in ("bash", "zsh", "fish"):
            (completions / shell).write_text(run(native, "completion", shell))
        for packager in ("deb", "rpm"):
            step(f"the {packager} package for {arch.go}")
            run(
                TOOLS / "nfpm",
                "package",
                "--config",
                ROOT / "deploy/package/nfpm.yaml",
                "--packager",
                packager,
                "--target",
                self.out,
                KVSPRAY_VERSION=package_version(self.version),
                KVSPRAY_ARCH=arch.go,
                KVSPRAY_BIN=str(binaries["kvspray"]),
                KVSPRAY_BENCH=str(binaries["kvspray-bench"]),
                KVSPRAY_COMPLETIONS=str(completions),
                KVSPRAY_LICENSES=str(licenses("kvspray")),
                KVSPRAY_BENCH_LICENSES=str(licenses("kvspray-bench")),
                SOURCE_DATE_EPOCH=self.epoch,
            )

    def checksums(self) -> None:
        lines = []
        for p in sorted(self.out.iterdir()):
            if p.is_file() and p.name != "SHA256SUMS":
                lines.append(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n")
        (self.out / "SHA256SUMS").write_text("".join(lines))

    def all(self) -> None:
        shutil.rmtree(self.out)
        self.out.mkdir()
        self.wheels(ARCHES, licenses("kvspray"))
        for arch in ARCHES:
            self.archive(arch)
        for arch in ARCHES:
            self.packages(arch)
        self.image(host())
        self.chart()
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
            print("made in dist/; install them: python -m pip install dist/*.whl (docs/install.md)")
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
