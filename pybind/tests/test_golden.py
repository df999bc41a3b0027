"""The vectors that the Go and the Python side share: both decode each one, and encode its value to
the same bytes."""

from __future__ import annotations

import inspect
import json
import pathlib
import re
from typing import Any

import pytest

import kvspray
from kvspray import _messages, protocol

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "testdata" / "golden"


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["$bin"])
            if set(value) == {"$bin"}
            else {k: plain(v) for k, v in value.items()}
        )
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


def vectors() -> list[Any]:
    found = []
    for path in sorted(GOLDEN.glob("*.json")):
        found += [
            pytest.param(v, id=f"{path.stem}-{v['name']}") for v in json.loads(path.read_text())
        ]
    assert found, f"no golden vectors in {GOLDEN}"
    return found


def test_every_kind_has_a_vector() -> None:
    kinds = {p.values[0]["type"] for p in vectors()}
    assert set(_messages.MESSAGES.values()) | set(_messages.RECORDS.values()) <= kinds


def test_identity_is_what_a_sidecar_asks_for() -> None:
    """Each argument that has no default is a pair without which a registration is refused, and the
    other way round."""
    source = (GOLDEN.parents[1] / "parseblock" / "describe.go").read_text()
    key = dict(re.findall(r'(Identity\w+)\s*= "(\w+)"', source))
    table = source.split("var needed = ")[1].split("\n}\n")[0]
    needed = {key[name] for name in re.findall(r"\{(Identity\w+),", table)}
    asked = {
        n: p
        for n, p in inspect.signature(kvspray.identity).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    assert {n for n, p in asked.items() if p.default is p.empty} == needed and set(
        asked
    ) == needed | {"packing"}
    given: dict[str, Any] = {
        n: 1 if n in ("layers", "head_size", "backoff") else "x" for n in needed
    }
    want = {n: str(v) for n, v in given.items()}
    assert kvspray.identity(**given) == want
    assert kvspray.identity(**given, packing="vec", engine="mine") == {
        **want,
        "packing": "vec",
        "engine": "mine",
    }


@pytest.mark.parametrize("vector", vectors())
def test_golden(vector: dict[str, Any]) -> None:
    raw, kind, value = bytes.fromhex(vector["hex"]), vector["type"], plain(vector["value"])
    if vector["kind"] == "socket":
        assert _messages.MESSAGES[int.from_bytes(raw[:4], "little")] == kind
        raw = raw[4:]
    assert protocol.decode(raw) == value
    if not vector["name"].endswith("-newer"):
        shuffled = dict(reversed(list(value.items())))
        assert protocol.encode(kind, shuffled).hex() == raw.hex()
    assert protocol.decode(protocol.encode(kind, value)) == value
