#!/usr/bin/env python3
"""Installs each thing that `make dist` made into an empty root, and uses it there: the version,
doctor, and two sidecars that move blocks between two engines' regions, compared byte by byte
(`python -m kvspray.latency`).

    unshare --mount test_dist.py --version V dist/V        (root: it enters each root file system by
                                                           chroot)

The engine's side of each test is the wheel in a virtual environment without a compiler on its path.
What is for another architecture is read, and not run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

from dist import ARCHES, Failed, host, package_version, python_version

MOUNTS = ("/dev", "/proc", "/sys", "/tmp")
BLOCKS = 20  # moved in each of three orders


class Tests:
    def __init__(self, version: str, made: pathlib.Path, work: pathlib.Path) -> None:
        self.version, self.made, self.work = version, made, work
        self.venv = work / "venv"
        self.report: list[str] = []

    def run(self, *command: object) -> str:
        """Without the path of this machine: no Go and no compiler."""
        env = {
            k: v
            for k, v in os.environ.items()
            if k in ("HOME", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        }
        env["PATH"] = f"{self.venv / 'bin'}:/nonexistent"
        done = subprocess.run(
            [str(c) for c in command],
            cwd=self.work,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise Failed(
                f"{shlex.join(map(str, command))} failed with status "
                f"{done.returncode}:\n{done.stdout[-3000:]}"
            )
        return done.stdout

    def passed(self, what: str, detail: str) -> None:
        self.report.append(f"{what:28} {detail}")
        print(f"[{time.strftime('%H:%M:%S')}] {self.report[-1]}", flush=True)

    def smoke(self, what: str, start: float, *kvspray: object) -> None:
        """kvspray is the command that runs the installed binary."""
        printed = self.run(*kvspray, "--version")
        if f"kvspray {self.version} " not in printed:
            raise Failed(f"{what}: --version prints {printed!r}, want {self.version}")
        checks = json.loads(self.run(*kvspray, "doctor", "--json"))
        command = self.work / "kvspray-under-test"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, kvspray))} "$@"\n')
        command.chmod(0o755)
        moved = json.loads(self.run(self.venv / "bin/python", "-m", "kvspray.latency", "--kvspray",
            command, "--count", BLOCKS, "--runs", 1, "--json"))  # fmt: skip
        self.passed(
            what,
            f"{self.version}; doctor: {len(checks)} checks, none failed; {3 * BLOCKS} blocks "
            f"moved, p50 {moved['best']['both']['p50_us']:.0f} us; {time.monotonic() - start:.1f} "
            "s",
        )

    def smoke_in(self, what: str, root: pathlib.Path, binary: str, start: float) -> None:
        with contextlib.ExitStack() as mounted:
            for m in MOUNTS:
                at = root / m[1:]
                at.mkdir(exist_ok=True)
                subprocess.run(["mount", "--bind", m, at], check=True)
                mounted.callback(subprocess.run, ["umount", at], check=True)
            self.smoke(what, start, shutil.which("chroot"), root, binary)

    def wheel(self) -> None:
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)
        self.run(self.venv / "bin/python", "-m", "pip", "install", "-q",
            "--disable-pip-version-check", "--find-links", self.made,
            f"kvspray[vllm,sglang]=={python_version(self.version)}")  # fmt: skip
        for module in ("kvspray", "kvspray_vllm", "kvspray_sglang"):
            there = self.run(
                self.venv / "bin/python", "-c", f"import {module}; print({module}.__version__)"
            ).strip()
            if there != python_version(self.version):
                raise Failed(
                    f"{module}.__version__ is {there}, want {python_version(self.version)}"
                )
        for command in ((self.venv / "bin/kvspray",), (self.venv / "bin/python", "-m", "kvspray")):
            self.smoke(
                "wheel, " + ("kvspray" if len(command) == 1 else "python -m kvspray"),
                start,
                *command,
            )

    def archive(self) -> None:
        start = time.monotonic()
        root = self.work / "archive"
        name = f"kvspray-{self.version}-linux-{host().go}"
        with tarfile.open(self.made / f"{name}.tar.gz") as tar:
            tar.extractall(root, filter="tar")
        self.smoke_in("archive, nothing else", root, f"/{name}/kvspray", start)

    def packages(self) -> None:
        libc = self.made.parent.parent / ".build/dist/debs"
        for what, pattern, extract in (
            ("deb", f"*_{host().go}.deb", "dpkg-deb -x {package} {root}"),
            (
                "rpm",
                f"*.{host().machine}.rpm",
                "rpm2cpio {package} | (cd {root} && cpio --quiet --no-absolute-filenames -id)",
            ),
        ):
            start = time.monotonic()
            tool = extract.split()[0]
            if not shutil.which(tool):
                self.passed(what, f"skipped: no {tool} here")
                continue
            (package,) = self.made.glob(pattern)
            root = self.work / what
            root.mkdir()
            for deb in libc.glob("libc6_*.deb"):
                subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
            subprocess.run(
                ["bash", "-o", "pipefail", "-c", extract.format(package=package, root=root)],
                check=True,
            )
            self.smoke_in(f"{what} with libc6", root, "/usr/bin/kvspray", start)
            config = root / "etc/kvspray/kvspray.yaml"
            self.run(shutil.which("chroot"), root, "/usr/bin/kvspray", "config", "check",
                "--config", "/" + str(config.relative_to(root)), "--set",
                "engine.socket=/tmp/kvspray.sock")  # fmt: skip
            unit = root / "usr/lib/systemd/system/kvspray.service"
            self.unit(what, unit)
        version = package_version(self.version)
        fields = subprocess.run(
            ["dpkg-deb", "-f", next(self.made.glob(f"*_{host().go}.deb")), "Version"],
            check=True,
            capture_output=True,
            text=True,
        )
        if fields.stdout.strip() != version:
            raise Failed(f"the deb's Version is {fields.stdout.strip()}, want {version}")

    def unit(self, what: str, unit: pathlib.Path) -> None:
        analyze = shutil.which("systemd-analyze")
        if analyze is None:
            self.passed(f"{what}: its unit", "skipped: no systemd-analyze here")
            return
        # Its exposure from 0 to 10, times ten. --offline reads the file and asks no service
        # manager.
        said = subprocess.run(
            [analyze, "security", "--offline=true", "--threshold=30", "--no-pager", unit],
            capture_output=True,
            text=True,
        )
        if said.returncode != 0:
            raise Failed(
                f"{unit}: more exposed than 3.0 of 10:\n{said.stdout[-3000:]}{said.stderr}"
            )
        self.passed(f"{what}: its unit", said.stdout.strip().splitlines()[-1].lstrip("→ "))

    def image(self) -> None:
        start = time.monotonic()
        layout = self.made / f"kvspray-{self.version}-image-{host().go}"

        def blob(digest: str) -> pathlib.Path:
            path = layout / "blobs" / digest.replace(":", "/")
            if hashlib.sha256(path.read_bytes()).hexdigest() != digest.partition(":")[2]:
                raise Failed(f"{path}: the content has another digest")
            return path

        (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
        parts = json.loads(blob(manifest["digest"]).read_text())
        config = json.loads(blob(parts["config"]["digest"]).read_text())
        if config["config"]["Labels"]["org.opencontainers.image.version"] != self.version:
            raise Failed(f"{layout}: its label has another version: {config['config']['Labels']}")
        root = self.work / "image"
        for part in parts["layers"]:
            with tarfile.open(blob(part["digest"])) as tar:
                tar.extractall(root, filter="tar")
        self.smoke_in(
            f"image, {sum(p['size'] for p in parts['layers']) / 1e6:.0f} MB",
            root,
            config["config"]["Entrypoint"][0],
            start,
        )

    def others(self) -> None:
        """Checksums, SBOMs, and the machine type of what is for the other architecture."""
        for line in (self.made / "SHA256SUMS").read_text().splitlines():
            want, name = line.split("  ")
            if hashlib.sha256((self.made / name).read_bytes()).hexdigest() != want:
                raise Failed(f"{name}: another checksum than in SHA256SUMS")
        for sbom in self.made.glob("*.cdx.json"):
            content = json.loads(sbom.read_text())
            if content["bomFormat"] != "CycloneDX" or not any(
                "google.golang.org/grpc" in c["name"] for c in content["components"]
            ):
                raise Failed(f"{sbom}: not a list of the modules of kvspray")
        for arch in ARCHES:
            if arch.machine == platform.machine():
                continue
            machine = {"x86_64": 62, "aarch64": 183}[arch.machine]
            with tarfile.open(self.made / f"kvspray-{self.version}-linux-{arch.go}.tar.gz") as tar:
                binary = tar.extractfile(f"kvspray-{self.version}-linux-{arch.go}/kvspray")
                assert binary is not None
                if int.from_bytes(binary.read(20)[18:], "little") != machine:
                    raise Failed(f"the binary for {arch.machine} is for another machine")
            self.passed(
                f"{arch.machine}", "wheel, archive, deb, rpm: built; not run on this machine"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True)
    parser.add_argument("made", type=pathlib.Path)
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("test_dist: enters root file systems by chroot: run it as root", file=sys.stderr)
        return 2
    work = pathlib.Path(tempfile.mkdtemp(prefix="kvspray-test-dist-", dir="/var/tmp"))
    tests = Tests(args.version, args.made.resolve(), work)
    try:
        for test in (tests.wheel, tests.archive, tests.packages, tests.image, tests.others):
            test()
    except Failed as err:
        print(f"test_dist: {err}", file=sys.stderr)
        return 1
    finally:
        # Never remove what is mounted there.
        if str(work) in pathlib.Path("/proc/self/mounts").read_text():
            raise SystemExit(
                f"test_dist: something is still mounted below {work}: umount it, and remove the "
                "directory"
            )
        shutil.rmtree(work)
    print(f"{len(tests.report)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
