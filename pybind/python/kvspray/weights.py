"""Names the weights of a checkpoint by their content: KV of one checkpoint must never be used as KV
of another.

A digest covers the configuration, and of every tensor its name, shape, type and samples of its
bytes. It is of the files and not of loaded parameters: so it is the same for every tensor and
pipeline parallelism, for any engine, and for any division of the tensors into files. Samples are
bounded in number and size. A change of a few elements may therefore go unnoticed; training changes
elements all over a tensor, and each tensor has a sample.

Files come from outside: what is wrong in them is a CheckpointError, which names the file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DOMAIN = b"kvspray-checkpoint-v1"

MAX_ENTRIES = 1 << 16  # of a directory
MAX_TENSORS = 1 << 20
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, which has this limit itself
MAX_JSON_BYTES = 64 << 20  # of a configuration or an index
SAMPLES = 8192  # over all tensors, and at least one of each
SAMPLES_PER_TENSOR = 8
SAMPLE_BYTES = 4096  # of one, and no more than this over all of them:
SAMPLED_BYTES = 32 << 20
THREADS = 8
MAX_NAME_BYTES = 128

CONFIGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "adapter_config.json",
)
# What differs between copies of one checkpoint, and changes nothing of what is computed from it.
# Engines report their dtype themselves.
VOLATILE = frozenset(
    (
        "_name_or_path",
        "base_model_name_or_path",
        "revision",
        "_commit_hash",
        "transformers_version",
        "torch_dtype",
        "dtype",
    )
)
# Files beside the weights that have the ending of some.
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "trainer_state")


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or there is none; the text names the file and what is wrong with
    it."""


@dataclass(frozen=True)
class Tensor:
    file: pathlib.Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def digest(path: str | os.PathLike[str], load_format: str = "auto") -> str:
    """The name of the weights at ``path``, a directory or one file. ``load_format``: as the
    engine's, if a directory has several kinds of files.

    Raises CheckpointError where there are no weights, or they cannot be read.
    """
    root = pathlib.Path(path)
    try:
        files = [root] if root.is_file() else weight_files(root, load_format)
        tensors = [t for f in files for t in _tensors(f)]
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"{root}: {len(tensors)} tensors, at most {MAX_TENSORS}")
        configs = [config_bytes(root / name) for name in CONFIGS] if root.is_dir() else []
        name = name_of_hashes(configs, _sampled(tensors))
    except OSError as err:
        raise CheckpointError(f"{root}: {err.strerror or err}") from err
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as err:
        # Names that are no text, JSON that is nested without end.
        raise CheckpointError(
            f"{root}: not a checkpoint that can be read: {type(err).__name__}: {err}"
        ) from err
    return name


def name_of_hashes(configs: Sequence[bytes], hashes: Iterable[bytes]) -> str:
    """configs: of CONFIGS, by config_bytes. hashes: of the tensors, by hash_of, in any order."""
    h = hashlib.sha256(DOMAIN)
    for config in configs:
        h.update(_sized(config))
    for one in sorted(hashes):
        h.update(one)
    return "checkpoint:" + h.hexdigest()[:40]


def name_of(
    model: str,
    revision: str | None,
    cache: str | None,
    load_format: str,
    log: logging.Logger,
    remedy: str,
) -> str:
    """The digest of a model's files, or its name, with a warning, if they are not on this host.
    ``remedy``: how the user names the weights."""
    try:
        return digest(directory_of(model, revision, cache), load_format)
    except CheckpointError as err:
        name = f"named:{model}@{revision or 'main'}"
        if len(name.encode()) > (MAX_NAME_BYTES - 1) // 2:  # two of them and a separator
            name = "named:sha256:" + hashlib.sha256(name.encode()).hexdigest()[:40]
        log.warning(
            "kvspray: the weights are identified by the model's name only (%s): %s. KV of other "
            "weights under that name would be accepted as KV of these: %s", name, err, remedy,
        )  # fmt: skip
        return name


def directory_of(model: str, revision: str | None, cache: str | None) -> str:
    """Where the files of a model are on this host. Nothing is fetched."""
    if os.path.exists(model):
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except Exception as err:  # not in the cache, no name of a model, another hub
        raise CheckpointError(
            f"{model}: its files are not on this host ({type(err).__name__})"
        ) from err


def weight_files(directory: pathlib.Path, load_format: str = "auto") -> list[pathlib.Path]:
    """Of several kinds of files in a directory those that an engine loads, sorted."""
    names = []
    with os.scandir(directory) as entries:
        for n, entry in enumerate(entries):
            if n >= MAX_ENTRIES:
                raise CheckpointError(f"{directory}: more than {MAX_ENTRIES} files")
            names.append(entry.name)
    names.sort()
    if load_format == "mistral":
        wanted, index = (
            [n for n in names if n.startswith("consolidated") and n.endswith(".safetensors")],
            "consolidated.safetensors.index.json",
        )
    else:
        endings = {"pt": (".pt",), "npcache": (".bin",), "gguf": (".gguf",)}.get(
            load_format, (".safetensors", ".bin", ".pt", ".gguf")
        )
        kinds = (
            [n for n in names if n.endswith(e) and not n.startswith(NO_WEIGHTS)] for e in endings
        )
        wanted, index = next((k for k in kinds if k), []), "model.safetensors.index.json"
    if (
        index in names
        and wanted
        and wanted[0].endswith(".safetensors")
        and load_format != "sharded_state"
    ):
        wanted = _indexed(directory / index)
    if not wanted:
        raise CheckpointError(
            f"{directory}: no files of weights (*.safetensors, *.bin, *.pt, *.gguf)"
        )
    return [directory / n for n in wanted]


def _indexed(index: pathlib.Path) -> list[str]:
    """The files that an index names: beside shards there may be a copy in one file."""
    try:
        shards = set(json.loads(_read(index, MAX_JSON_BYTES))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{index}: no map weight_map of names: {err!r}") from err
    if (
        not shards
        or len(shards) > MAX_ENTRIES
        or not all(isinstance(s, str) and s and "/" not in s and "\0" not in s for s in shards)
    ):
        raise CheckpointError(
            f"{index}: weight_map names {len(shards)} files; want 1 to {MAX_ENTRIES} names of "
            "files beside it"
        )
    return sorted(shards)


def _read(path: pathlib.Path, limit: int) -> bytes:
    with open(path, "rb") as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: more than {limit} bytes")
    return data


def config_bytes(path: pathlib.Path) -> bytes:
    """A configuration as digests have it; empty if there is none."""
    try:
        raw = _read(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        return b""
    try:
        config = json.loads(raw)
    except ValueError:
        return raw
    if isinstance(config, dict):
        config = {k: v for k, v in config.items() if k not in VOLATILE}
    return path.name.encode() + b"\0" + json.dumps(config, sort_keys=True).encode()


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


# ---- what a file holds


def _tensors(file: pathlib.Path) -> list[Tensor]:
    if file.suffix == ".safetensors":
        return list(_safetensors(file))
    if file.suffix in (".bin", ".pt") and zipfile.is_zipfile(file):
        return list(_zipped(file))
    return [
        Tensor(file, f"file{i}", "bytes", (), start, n)
        for i, start, n in _pieces(file.stat().st_size)
    ]


def _pieces(size: int) -> Iterator[tuple[int, int, int]]:
    """A file of unknown format, cut into pieces that stand for tensors."""
    n = min(max(size >> 20, 1), SAMPLES // SAMPLES_PER_TENSOR)
    for i in range(n):
        start, end = i * size // n, (i + 1) * size // n
        yield i, start, end - start


def _safetensors(file: pathlib.Path) -> Iterator[Tensor]:
    size = file.stat().st_size
    with open(file, "rb") as f:
        first = f.read(8)
        n = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= n <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{file}: a header of {n} bytes in a file of {size}; it is cut, or no safetensors "
                "file"
            )
        raw = f.read(n)
    try:
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise ValueError(f"the header is a {type(header).__name__}")
        for name, t in header.items():
            if name != "__metadata__":
                yield _safetensor(file, name, t, 8 + n, size)
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        if isinstance(err, CheckpointError):
            raise
        raise CheckpointError(f"{file}: {err!r} in the header") from err


def _safetensor(file: pathlib.Path, name: str, t: Any, data: int, size: int) -> Tensor:
    kind, shape, (start, end) = t["dtype"], tuple(t["shape"]), t["data_offsets"]
    whole = all(
        isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in (*shape, start, end)
    )
    if not whole or not isinstance(kind, str) or not start <= end <= size - data:
        raise CheckpointError(
            f"{file}: tensor {name[:80]!r} at {start} to {end} of {size - data} bytes; the file is "
            "cut, or damaged"
        )
    return Tensor(file, name, kind, shape, data + start, end - start)


def _zipped(file: pathlib.Path) -> Iterator[Tensor]:
    """What torch.save writes: one entry for each storage, stored as it is, with its checksum, and a
    pickle with names and shapes, which is not run."""
    size = file.stat().st_size
    try:
        with zipfile.ZipFile(file) as z, open(file, "rb") as f:
            for e in z.infolist():
                f.seek(e.header_offset)
                local = f.read(30)
                if len(local) < 30 or local[:4] != b"PK\3\4":
                    raise CheckpointError(
                        f"{file}: entry {e.filename[:80]!r} is not where the directory has it"
                    )
                start = e.header_offset + 30 + sum(struct.unpack_from("<HH", local, 26))
                if start + e.compress_size > size:
                    raise CheckpointError(f"{file}: entry {e.filename[:80]!r} ends behind the file")
                # The directory in the archive has the file's name.
                yield Tensor(
                    file,
                    e.filename.partition("/")[2],
                    "entry",
                    (e.file_size, e.CRC),
                    start,
                    e.compress_size,
                )
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as err:
        raise CheckpointError(f"{file}: {err}") from err


# ---- samples


def _sampled(tensors: list[Tensor]) -> list[bytes]:
    """A hash of each tensor, with its samples."""
    count, size = sampling(len(tensors))
    by_file: dict[pathlib.Path, list[Tensor]] = {}
    for t in tensors:
        by_file.setdefault(t.file, []).append(t)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(THREADS))
        jobs = []
        for file, held in by_file.items():
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            part = -(-len(held) // THREADS)
            jobs += [
                pool.submit(_hashes, fd, held[i : i + part], count, size)
                for i in range(0, len(held), part)
            ]
        return [h for job in jobs for h in job.result()]


def _hashes(fd: int, tensors: list[Tensor], count: int, size: int) -> list[bytes]:
    return [_hash(fd, t, count, size) for t in tensors]


def sampling(tensors: int) -> tuple[int, int]:
    """The number of samples of each tensor, and the bytes of one sample."""
    count = max(1, min(SAMPLES // max(tensors, 1), SAMPLES_PER_TENSOR))
    return count, max(256, min(SAMPLED_BYTES // max(count * tensors, 1), SAMPLE_BYTES))


def places(nbytes: int, count: int, size: int) -> list[tuple[int, int]]:
    """Where the samples of a tensor are, and how long."""
    if nbytes <= count * size:
        return [(0, nbytes)]
    # The first at its beginning, the last at its end.
    return [((nbytes - size) * i // max(count - 1, 1), size) for i in range(count)]


def hash_of(name: str, kind: str, shape: tuple[int, ...], nbytes: int, samples: bytes) -> bytes:
    parts = [
        name.encode("utf-8", "surrogatepass"),
        kind.encode(),
        repr(shape).encode(),
        str(nbytes).encode(),
    ]
    return hashlib.sha256(b"".join(_sized(x) for x in parts) + samples).digest()


def _hash(fd: int, t: Tensor, count: int, size: int) -> bytes:
    return hash_of(
        t.name,
        t.kind,
        t.shape,
        t.bytes,
        b"".join(_at(fd, t, at, n) for at, n in places(t.bytes, count, size)),
    )


def _at(fd: int, t: Tensor, offset: int, n: int) -> bytes:
    data = os.pread(fd, n, t.start + offset)
    if len(data) != n:
        raise CheckpointError(
            f"{t.file}: tensor {t.name[:80]!r} ends behind the file, which changes, or is cut"
        )
    return data
