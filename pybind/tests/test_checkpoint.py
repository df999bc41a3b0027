"""Digests of checkpoints: what differs has another, what is the same has the same, and damaged
files are named."""

from __future__ import annotations

import io
import json
import pathlib
import random
import struct
import zipfile
from collections.abc import Callable

import pytest

from kvspray import weights
from kvspray.weights import CheckpointError, digest

Tensors = dict[str, tuple[str, list[int], bytes]]
BIG = 64 << 10


def tensors(seed: int = 1, layers: int = 6) -> Tensors:
    rng = random.Random(seed)
    out: Tensors = {"embed": ("BF16", [256, 128], rng.randbytes(BIG))}
    for i in range(layers):
        out[f"layers.{i}.w"] = ("BF16", [128, 256], rng.randbytes(BIG))
        out[f"layers.{i}.norm"] = ("BF16", [128], rng.randbytes(256))
    return out


def write(file: pathlib.Path, held: Tensors) -> None:
    header, data = {}, b""
    for name, (kind, shape, raw) in held.items():
        header[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    content = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(content)) + content + data)


@pytest.fixture
def save(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    made = iter(range(1000))

    def save(held: Tensors, shards: int = 1, config: object = None) -> pathlib.Path:
        directory = tmp_path / f"m{next(made)}"
        directory.mkdir()
        (directory / "config.json").write_text(
            json.dumps(config or {"hidden_size": 128, "_name_or_path": str(directory)})
        )
        names = list(held)
        for i in range(shards):
            write(directory / f"model-{i}.safetensors", {n: held[n] for n in names[i::shards]})
        if shards > 1:
            index = {
                "weight_map": {n: f"model-{i % shards}.safetensors" for i, n in enumerate(names)}
            }
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory

    return save


def test_the_same_tensors_have_the_same_name(save: Callable[..., pathlib.Path]) -> None:
    t = tensors()
    want = digest(save(t))
    assert (
        want
        == digest(save(t))
        == digest(save(t, shards=3))
        == digest(save(dict(reversed(t.items())), shards=2))
    )
    assert want.startswith("checkpoint:") and len(want) == len("checkpoint:") + 40


@pytest.mark.parametrize("name", list(tensors()))
def test_each_tensor_counts(save: Callable[..., pathlib.Path], name: str) -> None:
    base, t = tensors(), tensors()
    kind, shape, raw = t[name]
    # As training changes it: one number in a hundred, by a little.
    rng = random.Random(name)
    changed = bytearray(raw)
    for i in rng.sample(range(0, len(raw), 2), max(len(raw) // 200, 2)):
        changed[i] ^= 1
    of = digest(save(base))
    others = [
        {**t, name: (kind, shape, bytes(changed))}, {**t, name: ("F16", shape, raw)},
        {**t, name: (kind, [1, *shape], raw)}, {k: v for k, v in t.items() if k != name},
        {**t, name + "2": t[name]},
    ]  # fmt: skip
    assert len({of, *(digest(save(o)) for o in others)}) == 6


def test_the_configuration_counts_but_for_what_differs_between_copies(
    save: Callable[..., pathlib.Path],
) -> None:
    t = tensors(layers=1)
    base = digest(save(t, config={"a": 1, "b": [2]}))
    assert base == digest(
        save(
            t,
            config={
                "b": [2],
                "a": 1,
                "transformers_version": "5",
                "torch_dtype": "float16",
                "_name_or_path": "x",
            },
        )
    )
    assert (
        base
        != digest(save(t, config={"a": 1, "b": [3]}))
        != digest(
            save(t, config={"a": 1, "b": [2], "quantization_config": {"quant_method": "fp8"}})
        )
    )
    quantized = save(t, config={"a": 1, "b": [2]})
    (quantized / "hf_quant_config.json").write_text(
        '{"quantization": {"kv_cache_quant_algo": "FP8"}}'
    )
    assert digest(quantized) != base


def test_which_files_are_the_weights(save: Callable[..., pathlib.Path]) -> None:
    t = tensors()
    directory = save(t, shards=2)
    want = digest(directory)
    # Beside the shards, and not in their index.
    write(directory / "consolidated.safetensors", tensors(2))
    (directory / "pytorch_model.bin").write_bytes(b"x" * 100)
    (directory / "optimizer.bin").write_bytes(b"x" * 100)
    assert digest(directory) == want != digest(directory, "mistral")
    assert [f.name for f in weights.weight_files(directory, "npcache")] == ["pytorch_model.bin"]
    assert [f.name for f in weights.weight_files(directory, "mistral")] == [
        "consolidated.safetensors"
    ]
    one = save(t) / "model-0.safetensors"
    assert digest(one) == digest(one)
    with pytest.raises(CheckpointError, match="no files of weights"):
        weights.weight_files(directory, "gguf")


def archive(stem: str, storages: list[bytes], pickle: bytes = b"names and shapes") -> bytes:
    """As torch.save writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        for name, data in [
            ("data.pkl", pickle),
            *((f"data/{i}", s) for i, s in enumerate(storages)),
        ]:
            z.writestr(zipfile.ZipInfo(f"{stem}/{name}"), data)
    return out.getvalue()


def test_archives_of_torch(tmp_path: pathlib.Path) -> None:
    rng = random.Random(3)
    storages = [rng.randbytes(BIG) for _ in range(4)]

    def of(*args: object, file: str = "pytorch_model.bin", stem: str = "pytorch_model") -> str:
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / file).write_bytes(archive(stem, *args))  # type: ignore[arg-type]
        return digest(directory)

    want = of(storages)
    assert want == of(storages, stem="archive", file="a.pt")
    middle = bytearray(storages[2])
    middle[BIG // 2 + 7] ^= 1
    assert (
        len(
            {
                want,
                of([*storages[:2], bytes(middle), storages[3]]),
                of(storages[:3]),
                of(storages, b"other names"),
            }
        )
        == 4
    )


def test_files_of_which_nothing_is_known(tmp_path: pathlib.Path) -> None:
    data = random.Random(4).randbytes(5 << 20)
    for name, raw in (
        ("a", data),
        ("b", data),
        ("c", data[:-1]),
        ("d", data[: 1 << 20] + bytes(2 << 20) + data[3 << 20 :]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(raw)
    a, b, c, d = (digest(tmp_path / n) for n in "abcd")
    assert a == b and len({a, c, d}) == 3


def header(content: object) -> bytes:
    raw = json.dumps(content).encode() if not isinstance(content, bytes) else content
    return struct.pack("<Q", len(raw)) + raw


BAD = {
    "empty": b"", "short": b"\1\2\3", "no header": struct.pack("<Q", 1 << 40) + b"{}",
    "huge header": struct.pack("<Q", 2**63), "no json": header(b"{]"), "a list": header([]),
    "deep": header(b'{"a":' + b"[" * 50_000), "no offsets": header(
    {"a": {"dtype": "F16", "shape": [1]}}), "behind the end": header(
    {"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}),
    "backwards": header({"a": {"dtype": "F16", "shape": [1], "data_offsets": [2, 0]}}) + b"1234",
    "negative": header({"a": {"dtype": "F16", "shape": [1], "data_offsets": [-4, 0]}}) + b"1234",
    "strings": header({"a": {"dtype": "F16", "shape": ["1"],
    "data_offsets": ["0", "2"]}}) + b"1234", "true": header(
    {"a": {"dtype": "F16", "shape": [1], "data_offsets": [False, True]}}) + b"1234",
    "three": header({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 1, 2]}}) + b"1234",
    "no text": header({"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 1]}}) + b"1234",
    "no map": header({"a": 5}),
}  # fmt: skip


@pytest.mark.parametrize("what", list(BAD))
def test_damaged_files_are_named(tmp_path: pathlib.Path, what: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BAD[what])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        digest(tmp_path)


def test_damage_anywhere_is_an_error_or_another_name(
    tmp_path: pathlib.Path, save: Callable[..., pathlib.Path]
) -> None:
    rng = random.Random(5)
    whole = (save(tensors(layers=1)) / "model-0.safetensors").read_bytes()
    zipped = archive("m", [rng.randbytes(3000)])
    for i in range(400):
        for name, raw in (("model.safetensors", whole), ("model.bin", zipped)):
            bad = bytearray(raw[: rng.randint(0, len(raw))] if i % 2 else raw)
            for _ in range(rng.randint(1, 4)):
                if bad:
                    bad[rng.randrange(min(len(bad), 1200))] = rng.randrange(256)
            (tmp_path / name).write_bytes(bad)
            try:
                digest(tmp_path / name)
            except CheckpointError as err:
                assert name in str(err)


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 5}}',
        b'{"weight_map": {"a": "../../etc/passwd"}}',
        b"\xff",
    ],
)
def test_an_index_that_cannot_be_used_is_named(
    save: Callable[..., pathlib.Path], index: bytes
) -> None:
    directory = save(tensors(layers=1))
    (directory / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        digest(directory)


def test_a_shard_that_is_missing_is_named(
    save: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    directory = save(tensors(), shards=3)
    (directory / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        digest(directory)
    with pytest.raises(CheckpointError, match="nowhere"):
        digest(tmp_path / "nowhere")


def test_samples_are_bounded(
    monkeypatch: pytest.MonkeyPatch, save: Callable[..., pathlib.Path]
) -> None:
    read: list[int] = []
    pread = weights.os.pread
    monkeypatch.setattr(
        weights.os, "pread", lambda fd, n, at: (read.append(n), pread(fd, n, at))[1]
    )
    monkeypatch.setattr(weights, "SAMPLES", 8)
    monkeypatch.setattr(weights, "SAMPLED_BYTES", 8 << 10)
    held = tensors()
    digest(save(held))
    assert len(read) == len(held) and sum(read) <= max(8 << 10, 630 * len(held))


def test_files_that_are_no_checkpoint_are_named(save: Callable[..., pathlib.Path]) -> None:
    deep = "[" * 200_000
    nested, index = save(tensors(), config={"a": 1}), save(tensors(), shards=2)
    (nested / "config.json").write_text(deep)
    (index / "model.safetensors.index.json").write_text(deep)
    odd = save(tensors())
    header = json.dumps({"x": {"dtype": "\ud800", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (odd / "model-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    for directory in (nested, index, odd):
        with pytest.raises(CheckpointError, match=str(directory)):
            digest(directory)
