#!/usr/bin/env python3
"""Installs each thing that `make dist` made into an empty root, and uses it there.

    unshare --mount test_dist.py --version V dist/V        (root: for chroot)

It checks the version, and runs doctor and two sidecars that move blocks between two engines'
regions, compared byte by byte (`python -m kvspray.latency`). The engine's side of each test is the
wheel in a virtual environment without a compiler on its path, which pip installs from an index on
loopback by the lines of README.md and docs/install.md. Binaries for the other architecture run in
qemu-user.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import functools
import hashlib
import http.server
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator

from dist import ARCHES, ROOT, Arch, Failed, chart_version, host, package_version, python_version

MOUNTS = ("/dev", "/proc", "/sys", "/tmp")
BLOCKS = 20  # moved in each of three orders


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Index(http.server.BaseHTTPRequestHandler):
    """Takes uploads as a package index does, and notes the digest of each file."""

    taken: dict[str, str] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        fields = {
            part.get_param("name", header="content-disposition"): part
            for part in email.message_from_bytes(head + body).get_payload()
        }
        content = fields["content"].get_payload(decode=True)
        digest = hashlib.sha256(content).hexdigest()
        named = fields["sha256_digest"].get_payload(decode=True).decode()
        if named == digest and fields[":action"].get_payload() == "file_upload":
            self.taken[fields["content"].get_filename()] = digest
        self.send_response(200 if named == digest else 400)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class Tests:
    def __init__(self, version: str, made: pathlib.Path, work: pathlib.Path) -> None:
        self.version, self.made, self.work = version, made, work
        self.venv = work / "venv"
        self.report: list[str] = []

    def run(self, *command: object, **more: str) -> str:
        """Without the path of this machine: no Go and no compiler."""
        env = {
            k: v
            for k, v in os.environ.items()
            if k in ("HOME", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        }
        env |= {"PATH": f"{self.venv / 'bin'}:/nonexistent", **more}
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
                f"{shlex.join(map(str, command))} failed with status {done.returncode}:\n"
                f"{done.stdout[-3000:]}"
            )
        return done.stdout

    def passed(self, what: str, detail: str) -> None:
        self.report.append(f"{what:28} {detail}")
        print(f"[{time.strftime('%H:%M:%S')}] {self.report[-1]}", flush=True)

    def smoke(self, what: str, start: float, *kvspray: object, order: str = "shm,tcp") -> None:
        """kvspray is the command that runs the installed binary."""
        printed = self.run(*kvspray, "--version")
        if f"kvspray {self.version} " not in printed:
            raise Failed(f"{what}: --version prints {printed!r}, want {self.version}")
        checks = json.loads(self.run(*kvspray, "doctor", "--json"))
        command = self.work / "kvspray-under-test"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, kvspray))} "$@"\n')
        command.chmod(0o755)
        moved = json.loads(
            self.run(
                self.venv / "bin/python",
                "-m",
                "kvspray.latency",
                "--kvspray",
                command,
                "--count",
                BLOCKS,
                "--runs",
                1,
                "--json",
                "--set",
                f"transports.order={order}",
            )
        )
        self.passed(
            what,
            f"{self.version}; doctor: {len(checks)} checks, none failed; "
            f"{3 * BLOCKS} blocks moved, "
            f"p50 {moved['best']['both']['p50_us']:.0f} us; {time.monotonic() - start:.1f} s",
        )

    def smoke_in(self, what: str, root: pathlib.Path, binary: str, start: float) -> None:
        with contextlib.ExitStack() as mounted:
            for m in MOUNTS:
                at = root / m[1:]
                at.mkdir(exist_ok=True)
                subprocess.run(["mount", "--bind", m, at], check=True)
                mounted.callback(subprocess.run, ["umount", at], check=True)
            self.smoke(what, start, shutil.which("chroot"), root, binary)

    @contextlib.contextmanager
    def index(self) -> Iterator[str]:
        """Serves the wheels, and those that they require, as a package index (PEP 503)."""
        pages = self.work / "index"
        pip = (self.venv / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q")
        self.run(*pip, "download", "--no-deps", "--dest", self.work / "required", "msgpack>=1.0.3")
        for wheel in (*self.made.glob("*.whl"), *(self.work / "required").glob("*.whl")):
            page = pages / wheel.name.split("-")[0].replace("_", "-")
            page.mkdir(parents=True, exist_ok=True)
            (page / wheel.name).symlink_to(wheel)
        handler = functools.partial(Quiet, directory=str(pages))
        with served(handler) as url:
            yield url

    def wheel(self) -> None:
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)
        page = "".join((ROOT / p).read_text() for p in ("README.md", "docs/install.md"))
        found = re.findall(r'^    (python -m pip install "kvspray\[.*)$', page, flags=re.M)
        lines = list(dict.fromkeys(found))
        extras = {e for line in lines for e in re.findall(r"\[(.*)\]", line)}
        if extras != {"vllm", "sglang"}:
            raise Failed(f"README.md, docs/install.md: from an index {extras or 'nothing'}")
        with self.index() as url:
            for line in lines:
                self.run("/bin/sh", "-c", line, PIP_INDEX_URL=url, PIP_CONFIG_FILE="/dev/null")
        self.passed("wheels, index on loopback", "; ".join(lines))
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

    def upload(self) -> None:
        """A dry run: twine uploads the wheels to an index on loopback."""
        wheels = sorted(self.made.glob("*.whl"))
        twine = ROOT / ".build" / "dist-venv" / "bin" / "twine"
        with served(Index) as url:
            self.run(
                twine,
                "upload",
                "--non-interactive",
                "--disable-progress-bar",
                "--repository-url",
                url,
                *wheels,
                TWINE_USERNAME="__token__",
                TWINE_PASSWORD="none",
            )
        want = {w.name: hashlib.sha256(w.read_bytes()).hexdigest() for w in wheels}
        if Index.taken != want:
            raise Failed(f"twine uploaded {sorted(Index.taken)}, want {sorted(want)}")
        self.passed("upload, index on loopback", f"{len(want)} wheels")

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
            ("rpm", f"*.{host().machine}.rpm", "bsdtar -xf {package} -C {root}"),
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
            self.run(
                shutil.which("chroot"),
                root,
                "/usr/bin/kvspray",
                "config",
                "check",
                "--config",
                "/" + str(config.relative_to(root)),
                "--set",
                "engine.socket=/tmp/kvspray.sock",
            )
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
        # Its exposure from 0 to 10, times ten. --offline reads the file alone.
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
            local = [c["purl"] for c in content["components"] if "/../" in c["purl"]]
            if local:
                raise Failed(f"{sbom}: names a module by its directory: {local}")
            if content["bomFormat"] != "CycloneDX" or not any(
                "google.golang.org/grpc" in c["name"] for c in content["components"]
            ):
                raise Failed(f"{sbom}: not a list of the modules of kvspray")
            self.licensed(sbom.name.partition(f"-{self.version}-")[0], content["components"])
        chart = chart_version(self.version)
        with tarfile.open(self.made / f"kvspray-{chart}.tgz") as tar:
            member = tar.extractfile("kvspray/Chart.yaml")
            assert member is not None
            about = member.read().decode()
        if f"\nversion: {chart}\n" not in about or f'\nappVersion: "{self.version}"\n' not in about:
            raise Failed(f"the chart has another version than {chart}:\n{about}")
        for arch in ARCHES:
            if arch.machine != platform.machine():
                self.emulated(arch)

    def licensed(self, command: str, modules: list[dict[str, str]]) -> None:
        """The archive has a licence of each module that the command links."""
        name = f"kvspray-{self.version}-linux-{host().go}"
        with tarfile.open(self.made / f"{name}.tar.gz") as tar:
            member = tar.extractfile(f"{name}/LICENSE-{command}-third-party.txt")
            assert member is not None
            titles = re.findall(
                r"^=+\n(.*)\n=+$", member.read().decode(errors="replace"), flags=re.M
            )
        # dist.py adds the licence of freetype.
        own = ("github.com/kvspray/kvspray", "github.com/golang/freetype")
        linked = {m["name"] for m in modules if not m["name"].startswith(own)}
        without = sorted(m for m in linked if not any(t.startswith(f"{m}/") for t in titles))
        if without:
            raise Failed(f"{name}: no licence of {', '.join(without)} for {command}")

    def emulated(self, arch: Arch) -> None:
        """The sidecars of the wheel for another architecture, beside engines of this one."""
        start, what = time.monotonic(), f"wheel for {arch.machine}, qemu-user"
        qemu, libc = shutil.which(f"qemu-{arch.machine}"), f"/usr/{arch.machine}-linux-gnu"
        if qemu is None or not os.path.exists(libc):
            self.passed(what, f"skipped: no qemu-{arch.machine} or no {libc} here")
            return
        (wheel,) = self.made.glob(f"kvspray-*{arch.machine}.whl")
        with zipfile.ZipFile(wheel) as packed:
            binary = pathlib.Path(packed.extract("kvspray/_bin/kvspray", self.work / arch.go))
        binary.chmod(0o755)
        self.smoke(what, start, qemu, "-L", libc, binary, order="shm")


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
        for test in (
            tests.wheel,
            tests.upload,
            tests.archive,
            tests.packages,
            tests.image,
            tests.others,
        ):
            test()
    except Failed as err:
        print(f"test_dist: {err}", file=sys.stderr)
        return 1
    finally:
        if (
            str(work) in pathlib.Path("/proc/self/mounts").read_text()
        ):  # never remove what is mounted there
            raise SystemExit(
                f"test_dist: something is still mounted below {work}: umount it, and remove it"
            )
        shutil.rmtree(work)
    print(f"{len(tests.report)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
