"""Weights that come from another node's sidecar: every byte, or a clear error."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest

from kvspray import offer as offering
from kvspray import weightstream
from kvspray.checkpoint import Directory, Manifest
from kvspray.weights import CheckpointError
from kvspray.weightstream import Files, LoadError, Peer, Stream

PIECE = 3 << 20
ARENA = 9 * (4 << 20)


def checkpoint(dir: pathlib.Path, seed: int = 1, nbytes: int = 40 << 20) -> pathlib.Path:
    rng = random.Random(seed)
    dir.mkdir()
    (dir / "config.json").write_text('{"hidden_size": 8}')
    for i in range(2):
        header: dict[str, Any] = {}
        at = 0
        for j, n in enumerate((nbytes // 4, 1000, 2, nbytes // 8, 0, nbytes // 16)):
            header[f"f{i}.t{j}"] = {"dtype": "U8", "shape": [n], "data_offsets": [at, at + n]}
            at += n
        said = json.dumps(header).encode()
        (dir / f"model-{i}.safetensors").write_bytes(
            struct.pack("<Q", len(said)) + said + rng.randbytes(at)
        )
    return dir


class Offer:
    """The command."""

    def __init__(self, folder: pathlib.Path, sidecar: rig.Sidecar) -> None:
        command = [
            sys.executable,
            "-m",
            "kvspray.offer",
            str(folder),
            "--listen",
            "127.0.0.1:0",
            "--socket",
            sidecar.socket,
        ]
        self.proc = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.proc.stdout is not None
        said = self.proc.stdout.readline()
        assert " is offered at http://" in said, said
        self.url = said.split()[-1]

    def stop(self) -> None:
        self.proc.send_signal(signal.SIGTERM)
        self.proc.wait(30)


@pytest.fixture(scope="module")
def sidecars(workdir: pathlib.Path) -> Iterator[tuple[rig.Sidecar, rig.Sidecar]]:
    config = {"transports": {"order": ["tcp"]}, "transfer": {"match_timeout": "5s"}}
    both = rig.Sidecar("from", workdir, config), rig.Sidecar("to", workdir, config)
    for s in both:
        s.start()
    yield both
    for s in both:
        assert s.panics() is None
        s.stop()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return checkpoint(tmp_path / "m")


@pytest.fixture
def offer(folder: pathlib.Path, sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> Iterator[Offer]:
    out = Offer(folder, sidecars[0])
    yield out
    if out.proc.poll() is None:
        out.stop()


def fetched(peer: Peer, folder: pathlib.Path) -> int:
    """Bytes, each compared with the file's."""
    content = {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}
    got = 0
    for block in Stream(peer, PIECE):
        p = block.piece
        assert (
            bytes(block.view)
            == content[peer.manifest.files[p.file].name][p.start : p.start + p.nbytes]
        )
        got += p.nbytes
        block.give_back()
    peer.check()
    return got


def test_every_byte_comes(
    folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]
) -> None:
    for _ in range(2):
        peer = Peer(offer.url, sidecars[1].socket, ARENA)
        assert fetched(peer, folder) == peer.manifest.nbytes
        assert peer.arena.used == 0
        peer.close()


def test_several_at_once(
    folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]
) -> None:
    got: list[object] = []

    def one() -> None:
        try:
            peer = Peer(offer.url, sidecars[1].socket, ARENA)
            got.append(fetched(peer, folder) == peer.manifest.nbytes)
            peer.close()
        except BaseException as err:
            got.append(err)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [True] * 3


def test_a_folder_that_is_written_to_is_offered_no_more(
    folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]
) -> None:
    peer = Peer(offer.url, sidecars[1].socket, ARENA)
    blocks = iter(Stream(peer, PIECE))
    next(blocks).give_back()
    os.utime(folder / "model-0.safetensors", ns=(1, 1))
    with pytest.raises((CheckpointError, LoadError), match="the file was changed"):
        for block in blocks:
            block.give_back()
        peer.check()
    peer.close()


@pytest.mark.parametrize("who", ["from", "to", "offer"])
def test_a_process_dies_in_the_middle(
    who: str, folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]
) -> None:
    peer = Peer(offer.url, sidecars[1].socket, ARENA)
    blocks = iter(Stream(peer, 1 << 20))
    next(blocks).give_back()
    began = time.monotonic()
    if who == "offer":
        offer.proc.kill()
        offer.proc.wait()
    else:
        sidecars[who == "to"].kill()
    with pytest.raises(LoadError, match="did not come|offer|takes no piece"):
        for block in blocks:
            time.sleep(0.01)
            block.give_back()
    assert time.monotonic() - began < 100
    peer.close()
    for s in sidecars:
        if s.proc is None or s.proc.poll() is not None:
            s.start()


def test_wrong_requests(offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> None:
    peer = Peer(offer.url, sidecars[1].socket, ARENA)
    good = {"xfer": "00" * 16, "file": 0, "start": 0, "nbytes": 10, "digest": peer.manifest.digest}
    peer.close()
    bad: list[Any] = [
        [], {}, {**good, "digest": "x"}, {**good, "xfer": "0"}, {**good, "file": 9},
        {**good, "start": 1 << 60}, {**good, "nbytes": 0}, {**good, "nbytes": True},
        {**good, "start": -1}, {**good, "file": "0"},
    ]  # fmt: skip
    for body in bad:
        ask = urllib.request.Request(
            offer.url + "/v1/pieces", json.dumps(body).encode(), method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as err:
            urllib.request.urlopen(ask, timeout=10)
        assert err.value.code == 409 and json.loads(err.value.read())["error"]


def test_addresses_that_offer_nothing(sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> None:
    for url in ("http://127.0.0.1", "http://127.0.0.1:0/x", "http://:1", "http://127.0.0.1:99999"):
        with pytest.raises(LoadError, match="HOST:PORT"):
            Peer(url, sidecars[1].socket, ARENA)
    with pytest.raises(LoadError, match="no offer of weights answers"):
        Peer(f"http://127.0.0.1:{rig.free_port()}", sidecars[1].socket, ARENA)
    with pytest.raises(LoadError, match="404|no offer"):
        Peer(sidecars[0].url, sidecars[1].socket, ARENA)


def test_a_failed_read_leaves_nothing_that_still_writes(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range of its piece goes to another one."""
    monkeypatch.setattr(weightstream, "READ_BYTES", 1 << 20)
    files = Files(str(folder), ARENA)
    stream = Stream(files, PIECE)
    piece = next(p for p in files.manifest.pieces(PIECE) if p.nbytes == PIECE)
    at = files.arena.take(PIECE)
    assert at is not None
    block = weightstream.Block(files.arena, piece, at, 0)
    preadv, late = os.preadv, []

    def failing(fd: int, into: Any, offset: int) -> int:
        if offset == piece.start:
            raise OSError(5, "Input/output error")
        time.sleep(0.5)
        late.append(offset)
        return preadv(fd, into, offset)

    monkeypatch.setattr(os, "preadv", failing)
    files.start(block)
    with pytest.raises(CheckpointError, match="Input/output error"):
        files.finish(block)
    assert len(late) == 2, "all reads of the piece have ended"
    block.give_back()
    stream.close()


def test_a_file_whose_time_is_set_back(folder: pathlib.Path) -> None:
    opened = Directory(folder)
    file = folder / "model-0.safetensors"
    s = file.stat()
    with open(file, "r+b") as f:
        f.seek(s.st_size // 2)
        f.write(b"xx")
    os.utime(file, ns=(s.st_atime_ns, s.st_mtime_ns))
    with pytest.raises(CheckpointError, match="the file was changed"):
        opened.check()
    opened.close()


def test_an_index_without_a_map(folder: pathlib.Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["f0.t0"]}')
    with pytest.raises(CheckpointError, match="no map weight_map"):
        Directory(folder)


def test_an_answer_in_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightstream, "HTTP_S", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        conn, _ = listener.accept()
        conn.recv(1000)
        try:
            conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            for _ in range(100):
                conn.sendall(b" ")
                time.sleep(0.1)
        except OSError:
            pass
        conn.close()

    threading.Thread(target=serve, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(LoadError, match="not within 1 s"):
        Peer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert time.monotonic() - began < 4
    listener.close()


def test_a_manifest_of_many_files_takes_one_pass() -> None:
    n = 20_000
    said = {
        "files": [[f"f{i}", 1] for i in range(n)],
        "tensors": [[f"t{i}", "U8", [1], i, 0] for i in range(n)],
        "configs": [],
        "digest": "d",
    }
    began = time.monotonic()
    assert len(Manifest.from_json(said, "x").entries) == n
    assert time.monotonic() - began < 10, "minutes, if each file looks at all tensors"


def test_no_address_takes_all_connections(offer: Offer) -> None:
    at = ("127.0.0.1", int(offer.url.rpartition(":")[2]))
    held = [socket.create_connection(at) for _ in range(offering.MAX_PER_ADDRESS)]
    time.sleep(0.5)
    with socket.create_connection(at, timeout=5) as more:
        assert more.recv(1) == b"", "it is closed"
    for s in held:
        s.close()
    rig.wait_for("room", lambda: "manifest" in (rig.get(offer.url + "/v1/manifest") or ""), 10)


def test_memory_comes_back_from_whoever_takes_nothing(
    folder: pathlib.Path, sidecars: tuple[rig.Sidecar, rig.Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offering, "GIVE_S", 1.0)
    one = offering.Offer(str(folder), sidecars[0].socket, 4 << 20)
    try:
        began = time.monotonic()
        for i in range(2):
            one.request(
                {
                    "xfer": f"{i:032x}",
                    "file": 0,
                    "start": 0,
                    "nbytes": 4 << 20,
                    "digest": one.manifest.digest,
                }
            )
        assert time.monotonic() - began < 20
    finally:
        one.close()
