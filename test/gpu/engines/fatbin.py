"""Removes from an ELF file the GPU code that one architecture does not load, as nvprune does.

A section .nv_fatbin is a row of containers: a header (magic, version, header size, size of what
follows) and entries, each with a header (kind, version, header size, size of the code, ...,
architecture at 28) and its code. The entries of the wanted architecture move to the front of
their container; the rest becomes zeros, which compress to nothing. No section moves, so that
host code stays byte for byte what the wheel has.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
SECTIONS = (".nv_fatbin", "__nv_relfatbin")


class Entry(NamedTuple):
    kind: int
    arch: int
    at: int
    header: int
    code: int


def sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for row in rows:
        start = rows[names][4] + row[0]
        yield elf[start : elf.index(b"\0", start)].decode(), row[4], row[5]


def entries(elf: bytes, start: int, end: int) -> list[Entry]:
    found = []
    while start < end:
        kind, _, header, code = struct.unpack_from("<HHIQ", elf, start)
        (arch,) = struct.unpack_from("<I", elf, start + 28)
        found.append(Entry(kind, arch, start, header, code))
        start += header + code
    if start != end:
        raise ValueError(f"a container of GPU code ends at {end:#x}, its last entry at {start:#x}")
    return found


def chosen(all_: list[Entry], arch: int) -> tuple[list[Entry], bool]:
    """The entries to keep, and whether they keep their code. A container with nothing for this GPU
    keeps one header and no code."""
    if own := [e for e in all_ if e.kind == CUBIN and e.arch == arch]:
        return own, True
    if ptx := [e for e in all_ if e.kind == PTX and e.arch <= arch]:
        return [max(ptx, key=lambda e: e.arch)], True
    return sorted(all_, key=lambda e: e.code)[:1], False


def prune(source: pathlib.Path, target: pathlib.Path, arch: int) -> int:
    """Writes source without the code of other GPUs to target. Returns the bytes of GPU code "
    "kept."""
    elf, kept = source.read_bytes(), 0
    out = bytearray(elf)
    for name, offset, size in sections(elf):
        at, end = offset, offset + size
        while name in SECTIONS and at + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", elf, at)
            if magic != MAGIC:
                at += 8
                continue
            first, last = at + header, at + header + length
            keep, whole = chosen(entries(elf, first, last), arch)
            body = b"".join(
                elf[e.at : e.at + e.header]
                + (elf[e.at + e.header : e.at + e.header + e.code] if whole else bytes(e.code))
                for e in keep
            )
            out[first:last] = body + bytes(length - len(body))
            struct.pack_into("<Q", out, at + 8, len(body))
            kept += len(body) if whole else 0
            at = last
    target.write_bytes(out)
    return kept
