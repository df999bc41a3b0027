"""``kv_connector_extra_config`` of KVSprayConnector, strictly checked: an unknown key is an error
that names the known ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvspray import secret
from kvspray.weights import MAX_NAME_BYTES


@dataclass(frozen=True)
class Settings:
    socket: str | None = None
    """Path of the sidecar's socket. Default: the sidecar's own default path."""
    admission_s: float | None = None
    """Concurrent dispatch: for how long a decode request waits for its prefill to be admitted
    before it prefills locally. Default: the sidecar's match timeout."""
    memory: str = "auto"
    """Where the KV cache lives. "memfd": the shim's sealed shared memory, or the engine does not
    start. "process": vLLM's own allocation. "auto": memfd, and vLLM's own where that cannot be
    had."""
    weights: str = ""
    """A name for the weights that the engine starts with. Prefill and decode must agree on it.
    Default: a digest of the checkpoint's files."""
    identity: str = ""
    """Set to "portable", it names the cache without its engine, so that engines of another kind
    exchange KV with this one."""
    store: bool = False
    """Whether the store of this node's sidecar keeps the engine's pages, and returns those of
    earlier prompts."""
    api: str = ""
    """URL of the engine's API server, for routers that find engines by gossip. Default: the
    variable KVSPRAY_API, else what the sidecar's engine.api has."""
    secret_file: str = ""
    """A file with a tenant's secret. Pages of the store are found only by engines that have the
    same one."""
    secret_env: str = ""
    """The name of an environment variable with the secret, instead of a file."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}; known are "
                f"{', '.join(sorted(known))}"
            )
        out = cls(**extra)
        if out.socket is not None and (not isinstance(out.socket, str) or not out.socket):
            raise ValueError(f"kv_connector_extra_config['socket'] is {out.socket!r}, want a path")
        wait = 1 if out.admission_s is None else out.admission_s
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 < wait <= 600:
            raise ValueError(
                f"kv_connector_extra_config['admission_s'] is {out.admission_s!r}, want seconds, "
                "above 0 and up to 600"
            )
        if out.memory not in ("auto", "memfd", "process"):
            raise ValueError(
                f"kv_connector_extra_config['memory'] is {out.memory!r}, want auto, memfd or "
                "process"
            )
        if not isinstance(out.weights, str) or len(out.weights.encode()) > MAX_NAME_BYTES:
            raise ValueError(
                f"kv_connector_extra_config['weights'] is {out.weights!r}, want a string of at "
                f"most {MAX_NAME_BYTES} bytes"
            )
        if out.identity not in ("", "portable"):
            raise ValueError(
                f"kv_connector_extra_config['identity'] is {out.identity!r}, want portable, or none"
            )
        if out.identity and out.store is True:
            raise ValueError(
                "kv_connector_extra_config['store'] is true and identity portable, and pages of "
                "the store are one engine's; set one of them"
            )
        if not isinstance(out.store, bool):
            raise ValueError(
                f"kv_connector_extra_config['store'] is {out.store!r}, want true or false"
            )
        if not isinstance(out.api, str) or len(out.api.encode()) > MAX_NAME_BYTES:
            raise ValueError(
                f"kv_connector_extra_config['api'] is {out.api!r}, want a URL of at most "
                f"{MAX_NAME_BYTES} bytes"
            )
        for key in ("secret_file", "secret_env"):
            value = getattr(out, key)
            if not isinstance(value, str):
                # The value is not shown: it may be the secret itself.
                raise ValueError(
                    f"kv_connector_extra_config[{key!r}] is no string, want the name of a "
                    f"{'file' if key == 'secret_file' else 'variable'}"
                )
            if value and not out.store:
                raise ValueError(
                    f"kv_connector_extra_config[{key!r}] is set, and store is not true: the secret "
                    "is for pages of the store; set both or none"
                )
        return out

    def secret(self) -> bytes:
        """The tenant's secret; empty: there is none."""
        try:
            return secret.read(self.secret_file, self.secret_env)
        except ValueError as err:
            raise ValueError(
                f"kv_connector_extra_config: the secret of secret_file or secret_env {err}"
            ) from err
