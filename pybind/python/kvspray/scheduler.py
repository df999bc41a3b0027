"""SchedulerClient: the session of an engine's scheduler."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from ctypes import c_uint32

from . import _lib, _messages
from ._lib import byref, lib
from .client import (
    ONE_RANK,
    Admission,
    AdmissionState,
    EngineInfo,
    LogFunc,
    Ranks,
    _bin,
    _Client,
    _config,
    _ms,
    _req,
    _text,
)
from .region import KvsprayError


def _cut(text: str) -> bytes:
    """As much of the text as a C string of 255 bytes holds."""
    return (
        text.replace("\0", "").encode("utf-8", "replace")[:255].decode("utf-8", "ignore").encode()
    )


class SchedulerClient(_Client):
    """The session of an engine's scheduler: admission queries. Connects at once."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        engine: EngineInfo,
        ranks: Ranks = ONE_RANK,
        log: LogFunc | logging.Logger | None = None,
    ) -> None:
        super().__init__(_config(2, socket_path, engine, ranks), log)
        rc = lib.kvs_start(self._h, None, 0, None, 0)
        if rc != 0:
            raise KvsprayError(f"kvspray: start: {_lib.strerror(rc)}")

    @property
    def endpoint(self) -> str | None:
        """Where peers dial this node's sidecar; None while not connected."""
        info = self._info()
        return _text(info.endpoint) or None if info.connected else None

    def await_admission(
        self, xfer: bytes, hash: bytes, peer: str, tokens: int, ttl_s: float
    ) -> bool:
        """Asks whether the prefill at ``peer`` has admitted this request; once per key, repeated
        calls add an asker.

        False: the query cannot be sent (too many are open, or the client is closed).
        """
        h = self._handle()
        if h is None:
            return False
        args = (
            _bin("xfer", xfer, 16),
            _bin("hash", hash, 32),
            peer.encode(),
            tokens,
            _ms(ttl_s, 0),
        )
        rc = _lib.E_ARG if "\0" in peer else lib.kvs_await(h, *args)
        if rc == _lib.E_ARG:
            raise ValueError(
                f"kvspray: await_admission: peer = {peer!r}, tokens = {tokens}; want host:port of "
                "at most 255 bytes"
            )
        return bool(rc == 0)

    def admission(self, xfer: bytes, hash: bytes) -> Admission | None:
        """The answer so far; None if there is no query. Never blocks."""
        h = self._handle()
        if h is None:
            return None
        out = _lib.CAdmission()
        lib.kvs_admission(h, _bin("xfer", xfer, 16), _bin("hash", hash, 32), byref(out))
        if not 1 <= out.state <= 4:
            return None
        return Admission(AdmissionState(out.state), out.tokens, _text(out.message))

    def expected(self, xfer: bytes, hash: bytes) -> None:
        """The ranks of this engine expect that prompt's KV from now on: one asker needs no further
        answer. A query without askers is not sent to another sidecar."""
        h = self._handle()
        if h is not None:
            lib.kvs_expected(h, _bin("xfer", xfer, 16), _bin("hash", hash, 32))

    def decline(
        self,
        xfer: bytes,
        hash: bytes,
        peer: str,
        reason: str = "",
        *,
        req: str = "",
        ranks: Sequence[int] = (),
        asked: bool = True,
    ) -> bool:
        """Ranks of this engine will not expect that prompt's KV: the prefill's engine at ``peer``
        need not keep it for them.

        ``req``: the request, as its ranks name it in ``WorkerClient.expect``. Each of them then
        declines once, and the others may expect the KV. Empty: no rank of the request expects it.
        ``ranks``: numbers (stage * tensor-parallel size + rank) of those that decline, with a
        ``req``; empty: all.
        Also withdraws one asker of the prompt's query. asked=False: the request never asked, or was
        reported as expected, so the query belongs to other requests.
        A rank with a lease cancels it instead. Never blocks. False: it cannot be sent (too many
        wait, or the client is closed), and the prefill keeps the blocks until the match timeout.
        """
        h = self._handle()
        if h is None:
            return False
        if ranks and not req or not all(0 <= r < _messages.MAX_RANKS for r in ranks):
            raise ValueError(
                f"kvspray: decline: ranks = {ranks!r} of req = {req!r}; want numbers of ranks of a "
                "named request"
            )
        args = (_bin("xfer", xfer, 16), _bin("hash", hash, 32), peer.encode(), _cut(reason),
                _req(req).encode(), (c_uint32 * len(ranks))(*ranks), len(ranks),
                asked)  # fmt: skip
        rc = _lib.E_ARG if "\0" in peer else lib.kvs_decline(h, *args)
        if rc == _lib.E_ARG:
            raise ValueError(
                f"kvspray: decline: peer = {peer!r}; want host:port of at most 255 bytes"
            )
        return bool(rc == 0)
