"""The content digest in C and in torch, against its definition in whole numbers, and against the
vectors that the Go tests share."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import json
import pathlib
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import skip

from kvspray.digest import PRIME, Digest, Units, add
from kvspray.region import KvsprayError

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "layout/digest/testdata/digests.json"
U64 = (1 << 64) - 1
CASES = 100


def siphash(seed: bytes, text: bytes) -> int:
    a, b = struct.unpack("<2Q", seed)
    v = [a ^ 0x736F6D6570736575, b ^ 0x646F72616E646F6D, a ^ 0x6C7967656E657261]
    v.append(b ^ 0x7465646279746573)

    def turn(x: int, n: int) -> int:
        return (x << n | x >> (64 - n)) & U64

    def rounds(n: int) -> None:
        for _ in range(n):
            v[0], v[2] = (v[0] + v[1]) & U64, (v[2] + v[3]) & U64
            v[1], v[3] = turn(v[1], 13) ^ v[0], turn(v[3], 16) ^ v[2]
            v[0] = (turn(v[0], 32) + v[3]) & U64
            v[2] = (v[2] + v[1]) & U64
            v[1], v[3] = turn(v[1], 17) ^ v[2], turn(v[3], 21) ^ v[0]
            v[2] = turn(v[2], 32)

    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) % 256])
    for (m,) in struct.iter_unpack("<Q", padded):
        v[3] ^= m
        rounds(2)
        v[0] ^= m
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


@functools.cache
def weight(seed: bytes, axis: int, position: int, layer: str = "") -> int:
    return max(siphash(seed, struct.pack("<2Q", axis, position) + layer.encode()) >> 4, 1)


def defined(seed: bytes, memory: bytes, u: Units, table: list[int]) -> int:
    """docs/content-digest.md, byte by byte."""
    total = 0
    for row in range(u.first_row, u.first_row + u.rows):
        tile = row // u.tile_rows
        at = u.off + table[tile // u.tiles] * u.block + tile % u.tiles * u.tile
        at += row % u.tile_rows * u.row
        for head in range(u.heads):
            of_head = weight(seed, 3, u.first_head + head) * weight(seed, 2, row)
            for i in range(u.cols * u.cell):
                byte = memory[at + head * u.head + i // u.cell * u.col + i % u.cell]
                total += byte * 256 ** (i % 4) * weight(seed, 1, i // 4) * of_head
    return total * weight(seed, 4, u.role, u.layer) % PRIME


def drawn(rng: random.Random) -> tuple[Units, list[int], int]:
    """Units whose axes are in any order, with gaps; and the bytes of their region."""
    unit = rng.choice([1, 2, 4])
    n = {
        "tile_rows": rng.randint(1, 9),
        "tiles": rng.choice([1, 1, 2, 3]),
        "cols": rng.choice([1, 1, 5, 16]),
        "heads": rng.randint(1, 4),
    }
    cell = unit * rng.choice([1, 1, 3, 33]) + rng.choice([0, 0, 0, 1])
    at, stride = cell, {}
    axes = [("col", "cols"), ("head", "heads"), ("row", "tile_rows")]
    rng.shuffle(axes)
    for axis, count in [*axes, ("tile", "tiles")]:
        stride[axis] = at + unit * rng.choice([0, 0, 1])
        at = stride[axis] * n[count]
    blocks = rng.randint(1, 6)
    in_block = n["tile_rows"] * n["tiles"]
    first = rng.randrange(blocks * in_block)
    units = Units(
        layer=f"model.layers.{rng.randrange(99)}"[: rng.randint(0, 20)],
        role=rng.randint(1, 14),
        off=unit * rng.randrange(3),
        block=at,
        cell=cell,
        first_head=rng.randrange(9),
        first_row=first,
        rows=rng.randint(1, blocks * in_block - first),
        **n,
        **stride,
    )
    table = rng.sample(range(blocks), blocks)
    return units, table, units.off + blocks * units.block


def cases() -> Iterator[tuple[bytes, bytes, Units, list[int]]]:
    rng = random.Random(7)
    for i in range(CASES):
        units, table, size = drawn(rng)
        memory = b"\xff" * size if i % 10 == 0 else rng.randbytes(size)
        yield rng.randbytes(16), memory, units, table


def in_c(seed: bytes, memory: bytes, units: Units, table: list[int]) -> int:
    buffer = ctypes.create_string_buffer(memory, len(memory))
    return Digest(seed).of_memory(ctypes.addressof(buffer), len(memory), units, table)


def in_torch(seed: bytes, memory: bytes, units: Units, table: list[int]) -> int:
    import torch

    region = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
    return Digest(seed).of_tensor(region, units, table)


def needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        skip("torch", "needs torch; install it")


def test_c_is_as_defined() -> None:
    for case in cases():
        assert in_c(*case) == defined(*case), case[2]


def test_torch_is_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_torch()
    for case in cases():
        assert in_torch(*case) == defined(*case), case[2]
        monkeypatch.setattr("kvspray.digest._STEP_ELEMENTS", 1)  # a step for each block
        assert in_torch(*case) == defined(*case), case[2]
        monkeypatch.undo()


def vectors() -> list[tuple[dict[str, Any], bytes]]:
    found = [
        (v, bytes(i * i * 31 + i >> 3 & 0xFF for i in range(v["bytes"])))
        for v in json.loads(VECTORS.read_text())
    ]
    assert len(found) >= 20
    return found


def test_go_has_the_same_digests() -> None:
    for v, memory in vectors():
        seed, units = bytes.fromhex(v["seed"]), Units(**v["units"])
        assert in_c(seed, memory, units, v["table"]) == v["digest"], v
        assert defined(seed, memory, units, v["table"]) == v["digest"], v


def test_parts_add_up() -> None:
    for seed, memory, u, table in cases():
        row, head = u.rows // 2, u.heads // 2
        whole = in_c(seed, memory, u, table)
        rows = [
            dataclasses.replace(u, rows=row),
            dataclasses.replace(u, first_row=u.first_row + row, rows=u.rows - row),
        ]
        heads = [
            dataclasses.replace(u, heads=head),
            dataclasses.replace(
                u, first_head=u.first_head + head, heads=u.heads - head, off=u.off + head * u.head
            ),
        ]
        for a, b in (rows, heads):
            assert add(in_c(seed, memory, a, table), in_c(seed, memory, b, table)) == whole, u


UNITS = Units("l", 1, 0, 8, 0, 2, 0, 0, 4, 1, 2, 1, 0, 1, 0, 8)


@pytest.mark.parametrize(
    "bad",
    [
        {"tile_rows": 0},
        {"tiles": 0},
        {"tiles": 1 << 40},
        {"cell": 0},
        {"cols": 0},
        {"cell": 1 << 40, "cols": 1 << 40},
        {"heads": 1 << 40},
        {"first_head": U64},
        {"first_row": U64 - 3},
        {"rows": 9},
        {"off": 1},
        {"off": U64},
        {"block": 9},
        {"row": 3},
        {"cell": 1, "cols": 2, "col": 1, "row": 1, "off": 12},
    ],
)
def test_units_outside_of_the_memory_are_refused(bad: dict[str, int]) -> None:
    assert in_c(bytes(16), bytes(range(16)), UNITS, [0, 1]) != 0
    with pytest.raises(KvsprayError, match="digest of Units"):
        in_c(bytes(16), bytes(range(16)), dataclasses.replace(UNITS, **bad), [0, 1])


def test_torch_refuses_them_too() -> None:
    needs_torch()
    import torch

    for bad, table, field in (
        ({"rows": 9}, [0, 1], "table"),
        ({}, [0, 2], "region"),
        ({"off": 1}, [0, 1], "region"),
        ({"tile_rows": 0}, [0, 1], "units"),
        ({"cell": 0}, [0, 1], "units"),
    ):
        with pytest.raises(ValueError, match=field):
            in_torch(bytes(16), bytes(16), dataclasses.replace(UNITS, **bad), table)
    for region in (torch.zeros(16), torch.zeros(4, 4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="region"):
            Digest(bytes(16)).of_tensor(region, UNITS, [0, 1])


def test_a_seed_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="seed"):
        Digest(b"short")
