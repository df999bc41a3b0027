"""``--hicache-storage-backend-extra-config``: the keys of kvspray, strictly checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvspray.weights import MAX_NAME_BYTES

# SGLang's own keys. It takes most of them out before a backend sees the configuration.
_ENGINE_KEYS = (
    "backend_name", "module_path", "class_name", "interface_v1", "allocator", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "prefetch_timeout_max",
    "hicache_storage_pass_prefix_keys", "tp_lcm_size",
)  # fmt: skip
LOADS = ("sglang", "sidecar")
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 256


@dataclass(frozen=True)
class Settings:
    socket: str | None = None
    """Path of the sidecar's socket. Default: the sidecar's own default path."""
    weights: str = ""
    """A name for the weights. Default: a digest of the checkpoint's files."""
    secret_file: str = ""
    """A file with a tenant's secret. Pages are found only by engines that have the same one."""

    loads: str = "sglang"
    """Which of the two copies pages from a host pool to the GPU: "sglang" or "sidecar"."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        own = [f.name for f in fields(cls)]
        for key in sorted(extra):
            if key not in own and key not in _ENGINE_KEYS:
                near = difflib.get_close_matches(key, [*own, *_ENGINE_KEYS], 1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise _error(key, f"is unknown{hint}; kvspray's keys are {', '.join(own)}")
        if not extra.get("interface_v1"):
            raise _error(
                "interface_v1", 'is missing, so SGLang would copy each page; add "interface_v1": 1'
            )
        out = cls(**{k: v for k, v in extra.items() if k in own})
        if out.socket is not None and (not isinstance(out.socket, str) or not out.socket):
            raise _error("socket", f"is {out.socket!r}, want a path")
        if not isinstance(out.weights, str) or len(out.weights.encode()) > MAX_NAME_BYTES:
            raise _error("weights", f"is {out.weights!r}, want at most {MAX_NAME_BYTES} bytes")
        if not isinstance(out.secret_file, str):
            raise _error("secret_file", f"is {out.secret_file!r}, want a path")
        if out.loads not in LOADS:
            raise _error("loads", f"is {out.loads!r}, want {' or '.join(map(repr, LOADS))}")
        return out

    def secret(self) -> bytes:
        """The content of ``secret_file`` without the space around it; empty if there is none."""
        if not self.secret_file:
            return b""
        try:
            with open(self.secret_file, "rb") as f:
                secret = f.read(MAX_SECRET_BYTES + 2).strip()
        except OSError as err:
            raise _error("secret_file", f"{self.secret_file}: {err.strerror}") from err
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise _error(
                "secret_file",
                f"{self.secret_file} has {len(secret)} bytes, want {MIN_SECRET_BYTES} to "
                f"{MAX_SECRET_BYTES} random ones: head -c 32 /dev/urandom | base64",
            )
        return secret


def _error(key: str, problem: str) -> ValueError:
    return ValueError(f"kvspray: hicache_storage_backend_extra_config[{key!r}] {problem}")
