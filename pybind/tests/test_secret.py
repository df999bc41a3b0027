"""Tenants' secrets: where they come from, and the keys of pages under them."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pathlib
from typing import Any

import pytest

from kvspray import secret
from kvspray.store import Namespace

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "testdata" / "page_keys.json"


def _field(b: bytes) -> bytes:
    return len(b).to_bytes(4, "little") + b


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256") if key else hashlib.sha256(text).digest()


def key_of(v: dict[str, Any]) -> tuple[str, str]:
    """What docs/protocol.md, section 5, has, written down a second time."""
    n = v["namespace"]
    key = bytes.fromhex(n["secret"])
    texts = [
        "page/v1",
        *(n[k] for k in ("weights", "dtype", "layout", "algorithm", "seed", "adapter")),
    ]
    sizes = n["page_tokens"].to_bytes(8, "little") + n["page_bytes"].to_bytes(8, "little")
    space = _mac(key, b"".join(_field(t.encode()) for t in texts) + _field(sizes))
    return space.hex(), _mac(key, space + bytes.fromhex(v["hash"])).hex()


def test_golden_keys() -> None:
    vectors = json.loads(VECTORS.read_text())
    assert len(vectors) >= 3
    for v in vectors:
        assert key_of(v) == (v["space"], v["key"])
    assert len({v["key"] for v in vectors}) == len(vectors)


def test_a_secret_from_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"  sixteen bytes...\n")
    file.chmod(0o640)
    assert secret.read(str(file)) == b"sixteen bytes..."
    file.chmod(0o644)
    with pytest.raises(ValueError, match="every user.*chmod 0600"):
        secret.read(str(file))
    file.chmod(0o600)
    for content in (b"", b"short", b"\n" * 300, b"x" * 257):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="want 16 to 256") as err:
            secret.read(str(file))
        assert "short" not in str(err.value)
    file.write_bytes(b"x" * 256 + b"\n")
    assert len(secret.read(str(file))) == 256
    with pytest.raises(ValueError, match="No such file"):
        secret.read(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="name one"):
        secret.read(str(file), "HOME")


def test_a_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret.read() == b""
    with pytest.raises(ValueError, match="KVS_TEST, which is not set"):
        secret.read(env="KVS_TEST")
    monkeypatch.setitem(os.environ, "KVS_TEST", "tooshort")
    with pytest.raises(ValueError, match=r"has 8 bytes in \$KVS_TEST") as err:
        secret.read(env="KVS_TEST")
    assert "tooshort" not in str(err.value)
    monkeypatch.setitem(os.environ, "KVS_TEST", "y" * 32)
    assert secret.read(env="KVS_TEST") == b"y" * 32


def test_a_secret_is_not_shown() -> None:
    n = Namespace("w", "bfloat16", "l", 16, 4096, "vllm-sha256", secret=b"sixteen bytes...")
    assert "sixteen" not in repr(n) and "sixteen" not in f"{n}"
    assert n != Namespace("w", "bfloat16", "l", 16, 4096, "vllm-sha256")
