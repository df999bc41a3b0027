# SPDX-License-Identifier: Apache-2.0
"""Weights that come from another node's sidecar: every byte, or a clear error."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
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

from kvspray.weights import CheckpointError
from kvspray.weightstream import LoadError, Peer, Stream

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
        (dir / f"model-{i}.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + rng.randbytes(at))
    return dir


class Offer:
    """The command."""

    def __init__(self, folder: pathlib.Path, sidecar: rig.Sidecar) -> None:
        command = [sys.executable, "-m", "kvspray.offer", str(folder), "--listen", "127.0.0.1:0", "--socket", sidecar.socket]
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
    config = {"transports": {"order": ["tcp"]}, "transfer": {"partner": "5s"}}
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
        assert bytes(block.view) == content[peer.manifest.files[p.file].name][p.start : p.start + p.nbytes]
        got += p.nbytes
        block.give_back()
    peer.check()
    return got


def test_every_byte_comes(folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> None:
    for _ in range(2):
        peer = Peer(offer.url, sidecars[1].socket, ARENA)
        assert fetched(peer, folder) == peer.manifest.nbytes
        assert peer.arena.used == 0
        peer.close()


def test_several_at_once(folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> None:
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


def test_a_folder_that_is_written_to_is_offered_no_more(folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> None:
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
def test_a_process_dies_in_the_middle(who: str, folder: pathlib.Path, offer: Offer, sidecars: tuple[rig.Sidecar, rig.Sidecar]) -> None:
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
        [], {}, {**good, "digest": "x"}, {**good, "xfer": "0"}, {**good, "file": 9}, {**good, "start": 1 << 60}, {**good, "nbytes": 0},
        {**good, "nbytes": True}, {**good, "start": -1}, {**good, "file": "0"},
    ]  # fmt: skip
    for body in bad:
        ask = urllib.request.Request(offer.url + "/v1/pieces", json.dumps(body).encode(), method="POST")
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
