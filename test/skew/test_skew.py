# SPDX-License-Identifier: Apache-2.0
"""The last release beside this tree: transfers between their sidecars, by engines of either, and
stores that one has written and the other opens."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rig")]

import cluster as rig  # noqa: E402
import releases  # noqa: E402

SIDES = ("release", "tree")
BOTH_WAYS = [("release", "tree"), ("tree", "release")]
BLOCKS = [5, 2, 9, 30, 17, 0, 21, 8]
MOVED = len(BLOCKS) * 3 * 4096  # bytes of a transfer
PAGE, DISK, MEMORY = 65536, 64 << 20, 2 << 20  # bytes; a disk and a memory have no less
STORED, TIERS, PEER = 3, {"disk": 2, "object": 3}, 4
SPACES = ("kept", "secret", "removed")
VERSION_AT = 12  # of the format, in the first block of a disk
S3 = {"AWS_ACCESS_KEY_ID": "skew", "AWS_SECRET_ACCESS_KEY": "skew-secret-0123456789"}
SERVER = rig.ROOT / ".build" / "bin" / "versitygw"
REDIS = releases.BUILD / "redis"
WAIT_S = 60.0


def skip(feature: str, text: str) -> NoReturn:
    if feature in os.environ.get("KVSPRAY_MUST_RUN", "").split(","):
        pytest.fail(f"KVSPRAY_MUST_RUN names {feature}, but: {text}")
    pytest.skip(f"{feature}: {text}")


@pytest.fixture(scope="module")
def versions() -> dict[str, releases.Version]:
    try:
        return {"release": releases.release(), "tree": releases.tree()}
    except releases.Missing as err:
        skip("release", str(err))


@pytest.fixture
def run() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:  # unix sockets have short names
        yield pathlib.Path(folder)


class Engine:
    """engine.py with the packages of one version, at one sidecar."""

    def __init__(self, version: releases.Version, sidecar: rig.Sidecar) -> None:
        self.log = sidecar.dir / f"engine-{version.name}.log"
        with self.log.open("ab") as out:
            self.proc = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), sidecar.socket],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True,
                env={**os.environ, **version.env()},
            )  # fmt: skip
        about = self.answer()
        self.endpoint, self.version = about["endpoint"], about["version"]

    def ask(self, *command: Any) -> None:
        assert self.proc.stdin is not None
        self.proc.stdin.write(json.dumps(command) + "\n")
        self.proc.stdin.flush()

    def answer(self) -> Any:
        assert self.proc.stdout is not None
        line = self.proc.stdout.readline()
        assert line, f"the engine has ended: {self.log.read_text()}"
        return json.loads(line)

    def call(self, *command: Any) -> Any:
        self.ask(*command)
        return self.answer()

    def close(self) -> None:
        self.proc.kill()
        self.proc.communicate()


def moved(sidecar: rig.Sidecar, transport: str) -> float:
    name = "kvspray_transfer_payload_bytes_total"
    labels = {"side": "destination", "outcome": "ok", "transport": transport}
    return rig.total(sidecar.metrics(), name, **labels)


@pytest.mark.parametrize(
    ("transport", "integrity"), [("shm", "crc32c"), ("tcp", "crc32c"), ("tcp", "aead")]
)
def test_transfers_between_two_versions(
    versions: dict[str, releases.Version], run: pathlib.Path, transport: str, integrity: str
) -> None:
    config: dict[str, Any] = {
        "transports": {"order": [transport], "tcp": {"integrity": integrity}},
        "peer": {"cluster_key_file": rig.cluster_key(run)},
    }
    sidecars = {s: rig.Sidecar(s, run, config, binary=versions[s].binary) for s in SIDES}
    with rig.running(*sidecars.values()), contextlib.ExitStack() as ends:
        engines = {}
        for at, by in itertools.product(SIDES, SIDES):
            engines[at, by] = Engine(versions[by], sidecars[at])
            ends.callback(engines[at, by].close)
        about = json.loads(rig.get(sidecars["release"].url + "/v1/node"))
        assert about["version"] == versions["release"].name == engines["tree", "release"].version

        for (source, wheel), (dest, other) in itertools.product(engines, engines):
            if source == dest:
                continue
            p, d = engines[source, wheel], engines[dest, other]
            xfer, before = secrets.token_hex(16), moved(sidecars[dest], transport)
            d.ask("receive", xfer, BLOCKS, p.endpoint)
            p.ask("send", xfer, list(reversed(BLOCKS)))
            what = f"from {source} (wheel {wheel}) to {dest} (wheel {other})"
            assert (p.answer(), d.answer()) == ("OK", "OK"), what
            assert moved(sidecars[dest], transport) - before == MOVED, what
        assert rig.total(sidecars["tree"].metrics(), "kvspray_build_info") == 1
        known = json.loads(rig.get(sidecars["tree"].url + "/debug/state"))["releases"]
        assert versions["release"].name in known.values()


@contextlib.contextmanager
def node(
    version: releases.Version, run: pathlib.Path, config: dict[str, Any], name: str = "store"
) -> Iterator[tuple[rig.Sidecar, Engine]]:
    sidecar = rig.Sidecar(name, run, config, binary=version.binary)
    with rig.running(sidecar):
        engine = Engine(version, sidecar)
        try:
            yield sidecar, engine
        finally:
            engine.close()


@contextlib.contextmanager
def server(log: pathlib.Path, port: int, *command: Any) -> Iterator[str]:
    """Runs a server until its end, and yields its address."""

    def listens() -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    with log.open("wb") as out:
        proc = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=out, stderr=out
        )
    try:
        rig.wait_for(f"{command[0]} (log: {log})", listens, WAIT_S)
        yield f"127.0.0.1:{port}"
    finally:
        proc.kill()
        proc.communicate()


@contextlib.contextmanager
def tier(kind: str, run: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The configuration of a store whose pages outlive the sidecar."""
    store: dict[str, Any] = {"memory": f"{MEMORY}B", "directory": "off"}
    if kind == "disk":
        disk = run / "disk"
        disk.mkdir()
        store |= {"disk": [{"path": str(disk), "size": f"{DISK}B"}], "segment": "1MiB"}
        yield {"store": store}
        return
    for name in ("data/pages", "iam", "meta"):
        (run / name).mkdir(parents=True)
    port = rig.free_port()
    command = [SERVER, "--port", f"127.0.0.1:{port}", "--access", S3["AWS_ACCESS_KEY_ID"],
               "--secret", S3["AWS_SECRET_ACCESS_KEY"], "--quiet", "--iam-dir", run / "iam",
               "posix", "--sidecar", run / "meta", run / "data"]  # fmt: skip
    with server(run / "server.log", port, *command) as address:
        bucket = {"endpoint": f"http://{address}", "bucket": "pages", "prefix": "a"}
        store["object"] = {**bucket, "size": "128MiB", "at_put": True}
        yield {"store": store}


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize(("first", "second"), BOTH_WAYS)
def test_a_store(
    versions: dict[str, releases.Version], run: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    first: str, second: str, kind: str,
) -> None:  # fmt: skip
    """Written by one version, used by the other, and then by the first one again."""
    if kind == "object" and not SERVER.exists():
        skip("s3server", f"{SERVER} is not there: run make s3server")
    for name, value in S3.items():
        monkeypatch.setenv(name, value)
    there = TIERS[kind]
    old, added = list(range(100)), list(range(100, 200))
    with tier(kind, run) as config:
        with node(versions[first], run, config) as (_, engine):
            for space in SPACES:
                assert set(engine.call("put", space, old)) == {STORED}
        with node(versions[second], run, config) as (_, engine):
            for space in SPACES:
                assert set(engine.call("get", space, old)) == {there}, space
            assert engine.call("remove", "removed") == [1, 1]
            assert set(engine.call("put", "kept", added)) == {STORED}
        with node(versions[first], run, config) as (sidecar, engine):
            for space, pages in (("kept", old + added), ("secret", old)):
                assert set(engine.call("get", space, pages)) == {there}, space
            assert set(engine.call("get", "removed", old)) == {0}
            if kind == "disk":
                evicts(sidecar, engine, old + added)
        if kind == "disk":
            fsck(versions, run / "disk")
            refuses_a_newer_format(versions[first], run, config)


def evicts(sidecar: rig.Sidecar, engine: Engine, pages: list[int]) -> None:
    """The disk gives up pages for others, and what it keeps is right."""
    more = list(range(1000, 1000 + DISK // PAGE))
    assert set(engine.call("put", "kept", more)) == {STORED}
    evicted = rig.total(sidecar.metrics(), "kvspray_store_pages_evicted_total", tier="disk")
    found = engine.call("get", "kept", pages + more)
    assert evicted > 0 and 0 in found and -1 not in found and found[-1]


def fsck(versions: dict[str, releases.Version], path: pathlib.Path) -> None:
    for v in versions.values():
        command = [v.binary, "store", "fsck", "--disk", path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{v.name}: {done.stdout}{done.stderr}"


def refuses_a_newer_format(
    version: releases.Version, run: pathlib.Path, config: dict[str, Any]
) -> None:
    (path,) = (f for f in (run / "disk").iterdir() if f.stat().st_size >= DISK)
    with path.open("r+b") as f:
        f.seek(VERSION_AT)
        (now,) = struct.unpack("<H", f.read(2))
        f.seek(VERSION_AT)
        f.write(struct.pack("<H", now + 1))
    before = hashlib.sha256(path.read_bytes()).digest()
    sidecar = rig.Sidecar("newer", run, config, binary=version.binary)
    with pytest.raises(rig.Failed, match=f"format {now + 1}.*start the newer release"):
        sidecar.start()
    assert hashlib.sha256(path.read_bytes()).digest() == before


@pytest.mark.parametrize("directory", ["embedded", "redis"])
def test_pages_of_a_node_of_the_other_version(
    versions: dict[str, releases.Version], run: pathlib.Path, directory: str
) -> None:
    """Each finds what the other has, and a removal reaches both."""
    with contextlib.ExitStack() as ends:
        store: dict[str, Any] = {"memory": "16MiB", "directory": directory}
        if directory == "redis":
            build = ["go", "build", "-trimpath", "-o", REDIS, "./test/skew/redis"]
            subprocess.run(build, cwd=rig.ROOT, check=True)
            port = rig.free_port()
            at = f"127.0.0.1:{port}"
            ends.enter_context(server(run / "redis.log", port, REDIS, at))
            store["redis"] = {"addresses": [at]}
        members = {s: f"127.0.0.1:{rig.free_port()}" for s in SIDES}
        engines = {}
        for s in SIDES:
            gossip = {"listen": members[s], "join": list(members.values())}
            peer = {"cluster_key_file": str(run / "cluster.key"), "gossip": gossip}
            if not engines:
                rig.cluster_key(run)
            _, engines[s] = ends.enter_context(
                node(versions[s], run, {"store": store, "peer": peer}, s)
            )
        for holder, other in BOTH_WAYS:
            pages = [SIDES.index(holder) * 100 + i for i in range(16)]
            assert set(engines[holder].call("put", "kept", pages)) == {STORED}
            rig.wait_for(
                f"the pages of {holder}",
                lambda other=other, pages=pages: (
                    set(engines[other].call("get", "kept", pages)) & {PEER}
                ),
                WAIT_S,
            )
            rig.wait_for(
                f"all pages of {holder}",
                lambda other=other, pages=pages: 0 not in engines[other].call("get", "kept", pages),
                WAIT_S,
            )
        assert engines["release"].call("remove", "kept") == [2, 2]
        assert set(engines["tree"].call("get", "kept", list(range(16)))) == {0}


def test_segments_need_both_sidecars(
    versions: dict[str, releases.Version], run: pathlib.Path
) -> None:
    """The last release has no segments: each side of a batch refuses it by name, and moves
    nothing."""
    import kvspray
    from kvspray.segments import Grant, Segments

    config: dict[str, Any] = {"peer": {"cluster_key_file": rig.cluster_key(run)}}
    sidecars = {s: rig.Sidecar(s, run, config, binary=versions[s].binary) for s in SIDES}

    def client(side: str) -> tuple[kvspray.WorkerClient, kvspray.Region]:
        w = kvspray.WorkerClient(
            sidecars[side].socket, engine=kvspray.EngineInfo("skew", "1", side), layers=1
        )
        ends.callback(w.close)
        region = w.alloc_region(4096)
        w.register([region])
        assert w.wait_connected(WAIT_S), w.status()
        return w, region

    with rig.running(*sidecars.values()), contextlib.ExitStack() as ends:
        (new, region), (old, other) = client("tree"), client("release")
        node = f'node "{old.status().node}" takes no batches'
        with pytest.raises(kvspray.KvsprayError, match=node):
            Segments(new).find("cache", peer=old.status().endpoint)
        with Segments(new).batch(1) as batch:
            batch.add(0, 0, 1)
            lease = batch.write("cache", [region], peer=old.status().endpoint)
            assert new.wait(WAIT_S)
            (done,) = new.poll()
        assert done.lease == lease and done.status == kvspray.CompletionStatus.REFUSED
        assert node in done.reason and "upgrade it" in done.reason
        with pytest.raises(kvspray.KvsprayError, match="takes no segments"):
            Segments(old).register("cache", other, grants=[Grant(read=True)])
