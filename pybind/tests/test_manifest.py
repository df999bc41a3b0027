"""Headers of safetensors files that are wrong are refused by name, and pieces cover each byte of
each tensor once."""

from __future__ import annotations

import json
import os
import pathlib
import random
import struct
from typing import Any

import pytest

from kvspray.checkpoint import DTYPES, Directory, Manifest, Samples, differences, parse
from kvspray.region import KvsprayError, Region
from kvspray.weights import CheckpointError, digest
from kvspray.weightstream import AHEAD, PIECES, Arena, Block, Files, LoadError, Stream

Header = dict[str, Any]


def raw(header: object, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def parsed(content: bytes) -> list[Any]:
    return parse(lambda at, n: content[at : at + n], len(content), 0, "file.safetensors")


def good(rng: random.Random, tensors: int) -> tuple[Header, bytes]:
    header, data = {}, b""
    for i in range(tensors):
        dtype = rng.choice([d for d, bits in DTYPES.items() if bits >= 8])
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        n = DTYPES[dtype] // 8
        for d in shape:
            n *= d
        header[f"t{i}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + n],
        }
        data += rng.randbytes(n)
    return header, data


def checkpoint(
    dir: pathlib.Path, rng: random.Random, files: int = 2, tensors: int = 12
) -> pathlib.Path:
    dir.mkdir()
    (dir / "config.json").write_text('{"hidden_size": 4}')
    for i in range(files):
        header, data = good(rng, tensors)
        named = {f"f{i}.{name}": t for name, t in header.items()}
        (dir / f"model-{i}.safetensors").write_bytes(raw(named, data))
    return dir


def one(**over: Any) -> Header:
    return {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **over},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
    }


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (one(data_offsets=[0, 7]), 11, "has 7 bytes, want 8"),
        (one(data_offsets=[8, 16]), 16, "leaves a hole"),
        (one(data_offsets=[8, 0]), 11, "has -8 bytes"),
        (one(data_offsets=[0, 8, 9]), 11, "at most 2"),
        (one(data_offsets=[-1, 7]), 11, "whole number"),
        (one(data_offsets=[False, 8]), 11, "whole number"),
        (one(dtype="F33"), 11, "type 'F33'"),
        (one(dtype=["F32"]), 11, "type"),
        (one(shape=[3]), 11, "want 12"),
        (one(shape=[1 << 62, 4]), 11, "larger than any file"),
        (one(shape=[1] * 17), 11, "at most 16"),
        (one(shape=2), 11, "want a list"),
        (one(data_offsets=[3, 11]), 14, "overlaps|hole"),
        (one(), 12, "end at .* of"),
        (one(), 10, "the file is cut"),
        ({"a": 1}, 0, "is a int"),
        ({"a": {"dtype": "U8"}}, 0, "data_offsets"),
        ([], 0, "is a list"),
        (b'{"a":1,"a":2}', 0, "twice"),
        (b"{" * 100_000, 0, "Recursion|Expecting"),
        (b"\xff\xfe{}", 0, "decode|utf"),
    ],
)
def test_wrong_headers(header: object, data: int, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as err:
        parsed(raw(header, bytes(data)))
    assert "file.safetensors" in str(err.value)


def test_headers_of_wrong_length() -> None:
    for content in (
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 0) + b"{}",
    ):
        with pytest.raises(CheckpointError, match="header of"):
            parsed(content)


def test_random_damage_is_refused_or_harmless() -> None:
    """Whatever is changed: a CheckpointError, or tensors that lie one after another within the
    file."""
    rng = random.Random(5)
    refused = 0
    for _ in range(3000):
        header, data = good(rng, 4)
        content = bytearray(raw(header, data))
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(min(len(content), 300))] = rng.randrange(256)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        try:
            entries = parsed(bytes(content))
        except CheckpointError:
            refused += 1
            continue
        at = entries[0].start if entries else 0
        for e in entries:
            assert e.start == at
            at += e.nbytes
        assert at <= len(content)
    assert 500 < refused < 3000


def test_pieces_have_each_byte_once(tmp_path: pathlib.Path) -> None:
    rng = random.Random(6)
    m = Directory(checkpoint(tmp_path / "m", rng, tensors=40)).manifest
    for size in (1, 3, 7, 64, 1000, 1 << 20):
        seen: dict[int, int] = {i: 0 for i in range(len(m.entries))}
        for p in m.pieces(size):
            assert 1 <= p.nbytes <= size and p.start + p.nbytes <= m.files[p.file].size
            for part in p.parts:
                e = m.entries[part.entry]
                assert (
                    e.file == p.file
                    and e.start + part.offset == p.start + part.at
                    and part.at + part.nbytes <= p.nbytes
                )
                assert part.offset == seen[part.entry]
                seen[part.entry] += part.nbytes
        assert {i: e.nbytes for i, e in enumerate(m.entries)} == seen


def test_what_was_read_has_the_digest_of_the_folder(tmp_path: pathlib.Path) -> None:
    rng = random.Random(7)
    dir = checkpoint(tmp_path / "m", rng)
    data = rng.randbytes(300_000)
    (dir / "model-9.safetensors").write_bytes(
        raw({"big": {"dtype": "U8", "shape": [300_000], "data_offsets": [0, 300_000]}}, data)
    )
    for piece in (1000, 4096, 1 << 20):
        source = Files(str(dir), 9 * (piece + 4096))
        samples = Samples(source.manifest.entries)
        stream = Stream(source, piece)
        content = {p.name: p.read_bytes() for p in dir.glob("*.safetensors")}
        for block in stream:
            p = block.piece
            assert (
                bytes(block.view)
                == content[source.manifest.files[p.file].name][p.start : p.start + p.nbytes]
            )
            for part in p.parts:
                samples.take(part.entry, part.offset, block.view[part.at : part.at + part.nbytes])
            block.give_back()
        assert samples.digest(source.manifest.configs) == source.manifest.digest == digest(dir)
        assert source.arena.used == 0
        stream.close()


def test_manifests_travel(tmp_path: pathlib.Path) -> None:
    m = Directory(checkpoint(tmp_path / "m", random.Random(8))).manifest
    sent = json.loads(json.dumps(m.to_json()))
    assert Manifest.from_json(sent, "x") == m
    rng = random.Random(9)
    for _ in range(300):
        bad = json.loads(json.dumps(sent))
        t = rng.choice(bad["tensors"])
        t[rng.randrange(5)] = rng.choice([None, -1, 1 << 70, "x", [], [1 << 40], 10**9])
        try:
            other = Manifest.from_json(bad, "x")
        except CheckpointError as err:
            assert str(err).startswith("x: ")
            continue
        assert all(e.start + e.nbytes <= other.files[e.file].size for e in other.entries)
    for bad in (
        None,
        1,
        {},
        {**sent, "files": 3},
        {**sent, "configs": ["?"]},
        {**sent, "digest": 1},
        {**sent, "tensors": [[1]]},
    ):
        with pytest.raises(CheckpointError, match="no manifest"):
            Manifest.from_json(bad, "x")


def test_an_index_that_differs_from_the_files(tmp_path: pathlib.Path) -> None:
    dir = checkpoint(tmp_path / "m", random.Random(10))
    names = {
        e.name: Directory(dir).manifest.files[e.file].name for e in Directory(dir).manifest.entries
    }
    index = dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    Directory(dir).close()
    for change in ({"f0.t1": "model-1.safetensors"}, {"more": "model-1.safetensors"}):
        index.write_text(json.dumps({"weight_map": names | change}))
        with pytest.raises(CheckpointError, match=next(iter(change))):
            Directory(dir)


def test_names_that_occur_in_two_files(tmp_path: pathlib.Path) -> None:
    dir = checkpoint(tmp_path / "m", random.Random(11))
    (dir / "model-1.safetensors").write_bytes((dir / "model-0.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError, match="'f0.t0' is in 'model-0.safetensors' and in 'model-1.safetensors'"
    ):
        Directory(dir)


def test_a_file_that_is_written_to_or_cut(tmp_path: pathlib.Path) -> None:
    dir = checkpoint(tmp_path / "m", random.Random(12))
    file = dir / "model-0.safetensors"
    source = Files(str(dir), 1 << 20)
    source.check()
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="model-0.safetensors: the file was changed"):
        source.check()
    os.truncate(file, 20)
    with pytest.raises(CheckpointError, match="no byte [0-9]+: the file is shorter"):
        for block in Stream(source, 4096):
            block.give_back()
    source.stop()


def test_differences_are_named(tmp_path: pathlib.Path) -> None:
    rng = random.Random(13)
    dir = checkpoint(tmp_path / "m", rng)
    have = Directory(dir).manifest
    assert differences(have, have) == []
    (dir / "config.json").write_text('{"hidden_size": 5, "_name_or_path": "x", "use_cache": true}')
    header, data = good(rng, 3)
    (dir / "model-1.safetensors").write_bytes(raw(header, data))
    found = differences(have, Directory(dir).manifest)
    assert found[0] == "config.json: hidden_size is 5, and 4 in the engine's checkpoint"
    assert "is missing" in found[1] and found[-1].endswith("more")


def test_the_arena_gives_what_is_free() -> None:
    rng = random.Random(14)
    arena = Arena(1 << 20)
    taken: dict[int, int] = {}
    for _ in range(4000):
        if taken and rng.random() < 0.5:
            at = rng.choice(list(taken))
            arena.give(at, taken.pop(at))
        else:
            n = rng.randrange(1, 200_000)
            at_ = arena.take(n)
            if at_ is not None:
                assert (
                    all(at_ + n <= a or a + b <= at_ for a, b in taken.items())
                    and at_ + n <= arena.nbytes
                )
                taken[at_] = n
    for at, n in taken.items():
        arena.give(at, n)
    assert arena.used == 0 and arena.take(1 << 20) == 0
    arena.give(0, 1 << 20)
    arena.close()


def test_memory_comes_with_the_pieces() -> None:
    """What has never been taken has none, and what has some keeps it."""

    def has() -> int:
        return os.fstat(arena.region.fd).st_blocks * 512

    arena = Arena(64 << 20)
    assert has() == 0
    assert arena.take(3 << 20) == 0 and has() == 4 << 20
    assert arena.take(4096) == 3 << 20 and has() == 4 << 20
    assert arena.take(1 << 20) == (3 << 20) + 4096 and has() == 6 << 20
    arena.view(0, 3 << 20)[:] = b"a" * (3 << 20)
    arena.give(0, 3 << 20)
    assert arena.take(3 << 20) == 0 and has() == 6 << 20 and bytes(arena.view(0, 3)) == b"aaa"
    arena.fill(arena.nbytes)
    assert has() == arena.nbytes
    for at, n in ((0, 3 << 20), (3 << 20, 4096), ((3 << 20) + 4096, 1 << 20)):
        arena.give(at, n)
    arena.close()


def test_a_host_without_memory_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(64 << 20)

    def none(self: Region, offset: int, nbytes: int) -> None:
        raise KvsprayError(f"{nbytes} at {offset}: none")

    with monkeypatch.context() as m:
        m.setattr(Region, "populate", none)
        with pytest.raises(LoadError, match="no memory for pieces of weights: 4194304 at 0"):
            arena.take(3 << 20)
    assert arena.used == 0 and arena.take(3 << 20) == 0
    arena.give(0, 3 << 20)
    arena.close()


def test_the_first_piece_does_not_wait_for_memory_of_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dir, size = tmp_path / "m", 4 << 20
    dir.mkdir()
    header = {
        f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(12)
    }
    (dir / "model.safetensors").write_bytes(raw(header, bytes(12 * size)))
    had: list[int] = []
    start = Files.start

    def noted(self: Files, block: Block) -> None:
        had.append(os.fstat(self.arena.region.fd).st_blocks * 512 // size)
        start(self, block)

    monkeypatch.setattr(Files, "start", noted)
    stream = Stream(Files(str(dir), PIECES * (size + (1 << 20))), size)
    for block in stream:
        block.give_back()
    stream.close()
    assert len(had) == 12 and had[0] == 1 and max(had) == AHEAD  # the others are used again


def test_a_directory_that_holds_too_much_is_named(tmp_path: pathlib.Path) -> None:
    dir = checkpoint(tmp_path / "m", random.Random(15), tensors=60)
    source = Files(str(dir), 8 * 8192)
    with pytest.raises(LoadError, match="want at least 8"):
        Stream(source, 1 << 20)
    source = Files(str(dir), 8 * 8192)
    stream = Stream(source, 64)
    held: list[Any] = []
    with pytest.raises(LoadError, match="not given back"):
        held.extend(stream)
    for block in held:
        block.give_back()
    stream.close()
