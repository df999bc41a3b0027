"""The tensors of a checkpoint in safetensors files, and the order in which their bytes are read.

Headers come from outside. What safetensors' own library refuses is refused here, too: tensors that
overlap, holes, a size that does not follow from type and shape, names that occur twice. A
CheckpointError names file, tensor, value and remedy.

A checkpoint is read in pieces: ranges of one file, each with whole tensors, or with a part of one
that is larger than a piece.
"""

from __future__ import annotations

import base64
import concurrent.futures
import hashlib
import json
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import weights
from .weights import MAX_HEADER_BYTES, MAX_JSON_BYTES, MAX_TENSORS, CheckpointError

MAX_DIMS = 16
MAX_FILES = 1 << 16
INDEX = "model.safetensors.index.json"

# Bits of an element.
DTYPES = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor: its bytes are [start, start + nbytes) of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class File:
    name: str
    size: int


@dataclass(frozen=True)
class Part:
    """Bytes of a tensor in a piece."""

    entry: int
    at: int  # in the piece
    offset: int  # in the tensor
    nbytes: int


@dataclass(frozen=True)
class Piece:
    file: int
    start: int
    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, in the order of its files. It can be sent to another host."""

    files: tuple[File, ...]
    entries: tuple[Entry, ...]
    configs: tuple[bytes, ...]  # as digests have them
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries)

    def config(self) -> dict[str, Any]:
        """config.json, without what differs between copies; empty if there is none."""
        for raw in self.configs:
            name, _, text = raw.partition(b"\0")
            if name == b"config.json":
                value = json.loads(text)
                return value if isinstance(value, dict) else {}
        return {}

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Each at most ``limit`` bytes, and at least one: tensors without elements are in none.
        Equal manifests have equal pieces, on all hosts."""
        if limit < 1:
            raise ValueError(f"kvspray: pieces of {limit} bytes, want at least 1")
        parts: list[Part] = []
        file = start = end = 0
        for i, e in enumerate(self.entries):
            if e.nbytes == 0:
                continue
            if parts and (e.file != file or e.start != end or end - start + e.nbytes > limit):
                yield Piece(file, start, end - start, tuple(parts))
                parts = []
            if e.nbytes > limit:
                for offset in range(0, e.nbytes, limit):
                    n = min(limit, e.nbytes - offset)
                    yield Piece(e.file, e.start + offset, n, (Part(i, 0, offset, n),))
                continue
            if not parts:
                file, start = e.file, e.start
            parts.append(Part(i, e.start - start, 0, e.nbytes))
            end = e.start + e.nbytes
        if parts:
            yield Piece(file, start, end - start, tuple(parts))

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [[f.name, f.size] for f in self.files],
            "tensors": [[e.name, e.dtype, list(e.shape), e.file, e.start] for e in self.entries],
            "configs": [base64.b64encode(c).decode() for c in self.configs],
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, value: object, where: str) -> Manifest:
        """Raises CheckpointError for everything that no checkpoint has."""
        try:
            if not isinstance(value, dict):
                raise ValueError(f"it is a {type(value).__name__}")
            files = tuple(
                File(_text(name, 255), _number(size))
                for name, size in _list(value["files"], MAX_FILES)
            )
            configs = tuple(
                base64.b64decode(_text(c, 2 * MAX_JSON_BYTES), validate=True)
                for c in _list(value["configs"], len(weights.CONFIGS))
            )
            found = []
            for name, dtype, shape, file, start in _list(value["tensors"], MAX_TENSORS):
                if _number(file) >= len(files):
                    raise ValueError(f"tensor {str(name)[:80]!r} is in file {file} of {len(files)}")
                found.append(_entry(_text(name, 1 << 16), dtype, shape, file, _number(start), None))
            out = cls(files, tuple(found), configs, _text(value["digest"], weights.MAX_NAME_BYTES))
            by_file: list[list[Entry]] = [[] for _ in files]
            for e in found:
                by_file[e.file].append(e)
            for f, some in zip(files, by_file, strict=True):
                _check_places(some, f.size, None)
        except (ValueError, KeyError, TypeError) as err:
            raise CheckpointError(f"{where}: no manifest of a checkpoint: {err}") from err
        _unique(where, out.entries, out.files)
        return out


class Directory:
    """A directory of safetensors files that are open: what is read is of these files, whatever
    happens to their names."""

    def __init__(self, root: str | os.PathLike[str], digest: str | None = None) -> None:
        """digest: the expected one, which the caller compares with Samples of the bytes that it has
        read. Without it, samples of all tensors are read now."""
        self.root = pathlib.Path(root)
        self._digest = digest
        self.fds: list[int] = []
        try:
            self._open()
        except OSError as err:
            self.close()
            raise CheckpointError(f"{err.filename or self.root}: {err.strerror or err}") from err
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if not self.root.is_dir():
            raise CheckpointError(
                f"{self.root}: not a directory on this host; name one with *.safetensors files"
            )
        self.paths = weights.weight_files(self.root, "auto")
        other = [p.name for p in self.paths if p.suffix != ".safetensors"]
        if other:
            raise CheckpointError(
                f"{self.root}: the weights are in {other[0][:80]!r}, and only *.safetensors can be "
                "loaded; convert them"
            )
        self.stamps: list[tuple[int, ...]] = []
        files, entries = [], []
        for i, path in enumerate(self.paths):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.fds.append(fd)
            self.stamps.append(_stamp(fd))
            size = os.fstat(fd).st_size
            files.append(File(path.name, size))
            entries += parse(lambda at, n, fd=fd: os.pread(fd, n, at), size, i, str(path))
            if len(entries) > MAX_TENSORS:
                raise CheckpointError(f"{self.root}: more than {MAX_TENSORS} tensors")
        _unique(str(self.root), entries, files)
        self._check_index(files, entries)
        configs = tuple(weights.config_bytes(self.root / name) for name in weights.CONFIGS)
        self.manifest = Manifest(
            tuple(files),
            tuple(entries),
            configs,
            self._digest or self._sampled(entries).digest(configs),
        )

    def _sampled(self, entries: Sequence[Entry]) -> Samples:
        samples = Samples(entries)

        def read(some: range) -> None:
            for i in some:
                e = entries[i]
                for at, n in samples.places(i):
                    samples.take(
                        i, at, _exactly(self.fds[e.file], e.start + at, n, e, self.paths[e.file])
                    )

        # A disk is asked for many at a time.
        with concurrent.futures.ThreadPoolExecutor(weights.THREADS) as pool:
            part = -(-len(entries) // (4 * weights.THREADS))
            list(
                pool.map(
                    read,
                    (
                        range(at, min(at + part, len(entries)))
                        for at in range(0, len(entries), part)
                    ),
                )
            )
        return samples

    def _check_index(self, files: Sequence[File], entries: Sequence[Entry]) -> None:
        index = self.root / INDEX
        try:
            raw = index.read_bytes() if index.stat().st_size <= MAX_JSON_BYTES else b""
        except FileNotFoundError:
            return
        try:
            named = json.loads(raw)["weight_map"]
            if not isinstance(named, dict):
                raise TypeError(f"it is a {type(named).__name__}")
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise CheckpointError(f"{index}: no map weight_map of names: {err!r}") from err
        have = {e.name: files[e.file].name for e in entries}
        for name in sorted(named.keys() | have.keys()):
            if named.get(name) != have.get(name):
                raise CheckpointError(
                    f"{index}: tensor {name[:80]!r} is in {named.get(name)!r} by the index, and in "
                    f"{have.get(name)!r} by the files; fetch the checkpoint again"
                )

    def check(self) -> None:
        """Raises CheckpointError if a file has been written to since it was opened."""
        for fd, stamp, path in zip(self.fds, self.stamps, self.paths, strict=True):
            if _stamp(fd) != stamp:
                raise CheckpointError(
                    f"{path}: the file was changed while it was read; load again once nothing "
                    "writes to it"
                )

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def _stamp(fd: int) -> tuple[int, ...]:
    s = os.fstat(fd)
    # A program can set the time of modification, but not the last one, the time of change.
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _exactly(fd: int, at: int, n: int, e: Entry, path: pathlib.Path) -> bytes:
    data = os.pread(fd, n, at)
    if len(data) != n:
        raise CheckpointError(
            f"{path}: tensor {e.name[:80]!r} ends behind the file, which changes, or is cut"
        )
    return data


# ---- headers


def parse(read: Any, size: int, file: int, where: str) -> list[Entry]:
    """The tensors of one file, by their places. read: (offset, length) to bytes."""
    first = read(0, 8)
    n = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 2 <= n <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{where}: a header of {n} bytes in a file of {size}; it is cut, or no safetensors "
            "file: fetch it again"
        )
    raw = read(8, n)
    if len(raw) != n:
        raise CheckpointError(
            f"{where}: {len(raw)} of {n} bytes of the header; the file is cut: fetch it again"
        )
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_no_twins)
        if not isinstance(header, dict):
            raise ValueError(f"the header is a {type(header).__name__}")
        if len(header) > MAX_TENSORS:
            raise ValueError(f"{len(header)} tensors, at most {MAX_TENSORS}")
        out = []
        for name, t in header.items():
            if name == "__metadata__":
                continue
            if not isinstance(t, dict):
                raise ValueError(f"tensor {name[:80]!r} is a {type(t).__name__}")
            start, end = _list(t["data_offsets"], 2)
            out.append(
                _entry(
                    name, t["dtype"], t["shape"], file, 8 + n + _number(start), _number(end) - start
                )
            )
        out.sort(key=lambda e: (e.start, e.nbytes))
        _check_places(out, size, 8 + n)
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise CheckpointError(
            f"{where}: {err if isinstance(err, ValueError) else repr(err)}; fetch the file again"
        ) from err
    return out


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return out


def _entry(
    name: str, dtype: object, shape: object, file: int, start: int, nbytes: int | None
) -> Entry:
    bits = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ValueError(
            f"tensor {name[:80]!r} has the type {str(dtype)[:40]!r}, want one of "
            f"{', '.join(DTYPES)}"
        )
    dims = tuple(_number(d) for d in _list(shape, MAX_DIMS))
    for d in dims:
        bits *= d
        if bits >> 63:
            raise ValueError(
                f"tensor {name[:80]!r} has the shape {dims}, which is larger than any file"
            )
    if bits % 8 or nbytes is not None and bits // 8 != nbytes:
        raise ValueError(
            f"tensor {name[:80]!r} of {dtype} {list(dims)} has {nbytes} bytes, want {bits / 8:g}"
        )
    return Entry(name, str(dtype), dims, file, start, bits // 8)


def _check_places(entries: Sequence[Entry], size: int, data: int | None) -> None:
    """data: where the first tensor begins; None: not known."""
    end = data
    for e in entries:
        if end is not None and e.start != end:
            what = "overlaps the one before it" if e.start < end else "leaves a hole before it"
            raise ValueError(f"tensor {e.name[:80]!r} at {e.start} {what}, which ends at {end}")
        end = e.start + e.nbytes
        if end > size:
            raise ValueError(
                f"tensor {e.name[:80]!r} ends at {end} of {size} bytes: the file is cut"
            )
    if end is not None and end != size:
        raise ValueError(f"the tensors end at {end} of {size} bytes")


def _unique(where: str, entries: Sequence[Entry], files: Sequence[File]) -> None:
    seen: dict[str, int] = {}
    for e in entries:
        if e.name in seen:
            raise CheckpointError(
                f"{where}: tensor {e.name[:80]!r} is in {files[seen[e.name]].name!r} and in "
                f"{files[e.file].name!r}"
            )
        seen[e.name] = e.file
    if not entries:
        raise CheckpointError(f"{where}: no tensors")


def _list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"{str(value)[:80]}: want a list of at most {limit}")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:80]!r}: want a whole number from 0")
    return value


def _text(value: object, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"{str(value)[:80]!r}: want at most {limit} characters")
    return value


# ---- the name of what has been read


class Samples:
    """Makes the digest that `kvspray.weights.digest` has, of bytes as they come by: so it is of
    what was loaded, not of files as they were."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._count, self._size = weights.sampling(len(entries))
        self._got: list[dict[int, bytes]] = [{} for _ in entries]

    def places(self, entry: int) -> list[tuple[int, int]]:
        return weights.places(self._entries[entry].nbytes, self._count, self._size)

    def take(self, entry: int, offset: int, data: memoryview | bytes) -> None:
        """data: bytes of a tensor from offset on. The same bytes may come again."""
        got = self._got[entry]
        for at, n in self.places(entry):
            lo, hi = max(at, offset), min(at + n, offset + len(data))
            if lo < hi:
                got[lo] = bytes(data[lo - offset : hi - offset])

    def digest(self, configs: Sequence[bytes]) -> str:
        """Raises CheckpointError if a sample has not come."""
        hashes = []
        for i, (e, got) in enumerate(zip(self._entries, self._got, strict=True)):
            data = b"".join(got[k] for k in sorted(got))
            if len(data) != sum(n for _, n in self.places(i)):
                raise CheckpointError(f"tensor {e.name[:80]!r} has not come whole")
            hashes.append(weights.hash_of(e.name, e.dtype, e.shape, e.nbytes, data))
        return weights.name_of_hashes(configs, hashes)


# ---- one shape


# What a fine-tune may change without any effect on an engine that runs.
HARMLESS = frozenset(
    ("use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp")
)


def differences(have: Manifest, new: Manifest, limit: int = 5) -> list[str]:
    """Why weights of one checkpoint cannot take the place of another's: names, types, shapes and
    configuration must be equal. Empty: they can."""
    out = []
    a, b = have.config(), new.config()
    for key in sorted((a.keys() | b.keys()) - HARMLESS):
        if a.get(key) != b.get(key):
            out.append(
                f"config.json: {key[:80]} is {_short(b, key)}, and {_short(a, key)} in the "
                "engine's checkpoint"
            )
    mine, theirs = {e.name: e for e in have.entries}, {e.name: e for e in new.entries}
    for name in sorted(mine.keys() | theirs.keys()):
        x, y = mine.get(name), theirs.get(name)
        if y is None:
            out.append(f"tensor {name[:80]!r} is missing")
        elif x is None:
            out.append(f"tensor {name[:80]!r} is not in the engine's checkpoint")
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            out.append(
                f"tensor {name[:80]!r} is {y.dtype} {list(y.shape)}, and {x.dtype} {list(x.shape)} "
                "in the engine's checkpoint"
            )
    return out[:limit] + ([f"and {len(out) - limit} more"] if len(out) > limit else [])


def _short(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key])[:80] if key in config else "not set"


def offer_name(digest: str, piece: Piece, xfer: bytes) -> bytes:
    """The 32 bytes that stand for a piece between two sidecars."""
    h = hashlib.sha256(b"kvspray-weights-piece-v1")
    h.update(struct.pack("<QQQ", piece.file, piece.start, piece.nbytes) + xfer + digest.encode())
    return h.digest()
