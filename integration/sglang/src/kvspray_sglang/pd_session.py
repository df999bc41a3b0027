"""A session of one rank with its sidecar for transfers: leases, and a thread that takes their ends.

A lease is open from the call that made it until its callback has been called. Only then does no
process read or write its blocks any more, whatever becomes of the sidecar.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import kvspray
from kvspray._messages import MAX_RECORD_BYTES
from kvspray_sglang.pd_cache import Cache

MAX_PAGES = (MAX_RECORD_BYTES - 4096) // 4  # of a prompt: one record names all of them
_WAIT_S = 0.5
_CLOSE_S = 5.0

End = Callable[[kvspray.Completion], None]


class Session:
    def __init__(
        self, socket: str | None, engine: kvspray.EngineInfo, ranks: kvspray.Ranks, cache: Cache,
        layout: dict[str, object], deadline_s: float, log: logging.Logger,
    ) -> None:  # fmt: skip
        """``deadline_s``: of every lease, from the engine's last call about it."""
        self._log = log
        self._deadline = deadline_s
        self._client = kvspray.WorkerClient(
            socket, engine=engine, ranks=ranks, layers=cache.tensors, deadline_s=deadline_s, log=log
        )
        self._cache = cache  # its regions outlive the client
        self._client.register(cache.regions, layout)
        # Guards what follows: a lease and its callback appear at once.
        self._lock = threading.Lock()
        self._ends: dict[int, End] = {}
        self._step = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvspray-pd", daemon=True)
        self._thread.start()

    # -- what the sidecar is

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def endpoint(self) -> str:
        """Where other sidecars reach this one; empty: nowhere now."""
        status = self._client.status()
        return status.endpoint if status.connected else ""

    @property
    def problem(self) -> str:
        status = self._client.status()
        return status.error or ("" if status.connected else "no sidecar is connected")

    # -- leases

    def source(self, xfer: bytes, tokens: int, req: str, end: End, name: bytes = b"") -> int:
        """Offers a prompt's pages, which are named by progress(). 0: no sidecar takes it.

        ``name``: the prompt's hash, if the other side is no SGLang."""
        with self._lock:
            lease = self._client.intent(xfer, name or digest(xfer, tokens), tokens, [[]], req=req)
            if lease:
                self._ends[lease] = end
            return lease

    def progress(self, lease: int, tokens: int, pages: Sequence[int]) -> bool:
        """The first tokens are in these pages, and computed. False: the other side will not learn
        of it, so the lease is cancelled."""
        with self._lock:
            self._step += 1
            taken = self._client.step(self._step, [(lease, tokens, [pages])])
            self._client.signal_step(self._step)
        if not taken:
            self._client.cancel(lease, "its pages cannot be reported")
        return taken

    def expect(
        self, xfer: bytes, peer: str, tokens: int, pages: Sequence[int], req: str, end: End,
        name: bytes = b"",
    ) -> int:  # fmt: skip
        """Requests a prompt's pages. 0: no sidecar takes it, and nothing writes to the pages."""
        with self._lock:
            lease = self._client.expect(
                xfer, name or digest(xfer, tokens), peer, tokens, 0, [pages], req=req,
                match_timeout_s=self._deadline,
            )  # fmt: skip
            if lease:
                self._ends[lease] = end
            return lease

    def cancel(self, lease: int, reason: str) -> None:
        """From now on no read of a source's pages counts. The lease ends later, by its callback."""
        self._client.cancel(lease, reason)

    # -- ends

    def _run(self) -> None:
        while not self._closed:
            try:
                ended = self._client.poll() if self._client.wait(_WAIT_S) else []
            except Exception:  # without this thread no lease would ever end
                self._log.exception("kvspray: the ends of transfers")
                time.sleep(_WAIT_S)
                continue
            for c in ended:
                with self._lock:
                    end = self._ends.pop(c.lease, None)
                if end is None:
                    continue
                try:
                    end(c)
                except Exception:  # the other leases have ends, too
                    self._log.exception("kvspray: the end of a transfer")

    def close(self) -> None:
        self._closed = True
        self._thread.join(_CLOSE_S)
        self._client.close()


def digest(xfer: bytes, tokens: int) -> bytes:
    """Both sides mean as many tokens."""
    return hashlib.sha256(b"kvspray-sglang-pd-1" + xfer + tokens.to_bytes(8, "little")).digest()
