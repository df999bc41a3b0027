"""An agent of NIXL with the back end KVSPRAY and one range of memory."""

from __future__ import annotations

import importlib.util
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# Only a test that fails takes so long; busy cores do not.
TIMEOUT_S = 60.0


def have_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None


def until(condition: Callable[[], Any], what: str, timeout: float = TIMEOUT_S) -> Any:
    """Waits for a condition with a deadline; the pause only limits the polling."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        pause.wait(0.001)
    return value


class Agent:
    def __init__(
        self, name: str, socket: str, nbytes: int = 1 << 20, backend: str = "KVSPRAY"
    ) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.name = name
        self.map = mmap.mmap(-1, nbytes)
        self.memory: np.ndarray = np.frombuffer(self.map, dtype=np.uint8)
        self.memory[:] = 1  # resident
        self.address, self.nbytes = int(self.memory.ctypes.data), nbytes
        self.nixl = nixl_agent(name, nixl_agent_config(backends=[]))
        self.nixl.create_backend(backend, {"socket": socket} if backend == "KVSPRAY" else {})
        self.registered: Any = None
        self.register()

    def register(self) -> None:
        self.registered = self.nixl.register_memory([(self.address, self.nbytes, 0, "")], "DRAM")

    def deregister(self) -> None:
        registered, self.registered = self.registered, None
        self.nixl.deregister_memory(registered)

    def meet(self, other: Agent) -> str:
        name = self.nixl.add_remote_agent(other.nixl.get_agent_metadata())
        return name.decode() if isinstance(name, bytes) else name

    def rows(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        out = np.zeros((len(offsets), 3), dtype=np.uint64)
        out[:, 0], out[:, 1] = self.address + offsets.astype(np.uint64), nbytes
        return out

    def transfer(
        self, op: str, here: np.ndarray, other: Agent, there: np.ndarray, nbytes: int,
        note: bytes = b"",
    ) -> Any:  # fmt: skip
        """A handle of ranges of ``nbytes`` bytes at these offsets; not posted."""
        local = self.nixl.get_xfer_descs(self.rows(here, nbytes), "DRAM")
        remote = self.nixl.get_xfer_descs(other.rows(there, nbytes), "DRAM")
        return self.nixl.initialize_xfer(op, local, remote, other.name, note)

    def end(self, handle: Any) -> str:
        """Waits for a transfer: DONE or ERR."""
        until(lambda: self.state(handle) != "PROC", "the end of a transfer")
        return self.state(handle)

    def state(self, handle: Any) -> str:
        from nixl._bindings import (
            nixlBackendError,
            nixlCancelledError,
            nixlRemoteDisconnectError,
        )

        try:
            return self.nixl.check_xfer_state(handle)
        except (nixlBackendError, nixlCancelledError, nixlRemoteDisconnectError):
            return "ERR"

    def move(
        self, op: str, here: np.ndarray, other: Agent, there: np.ndarray, nbytes: int,
        note: bytes = b"",
    ) -> str:  # fmt: skip
        """Posts a transfer, waits for it, releases it."""
        handle = self.transfer(op, here, other, there, nbytes, note)
        state = self.post(handle)
        state = self.end(handle) if state == "PROC" else state
        self.nixl.release_xfer_handle(handle)
        return state

    def post(self, handle: Any) -> str:
        from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError

        try:
            return self.nixl.transfer(handle)
        except (nixlBackendError, nixlRemoteDisconnectError):
            return "ERR"

    def whole(self, op: str, other: Agent, note: bytes = b"") -> str:
        return self.move(op, np.zeros(1), other, np.zeros(1), self.nbytes, note)

    def notes(self) -> list[tuple[str, bytes]]:
        found = self.nixl.get_new_notifs()
        return [(name, note) for name, notes in found.items() for note in notes]

    def gather(self, count: int) -> list[tuple[str, bytes]]:
        """Waits for ``count`` notifications."""
        out: list[tuple[str, bytes]] = []

        def enough() -> bool:
            out.extend(self.notes())
            return len(out) >= count

        until(enough, f"{count} notifications")
        return out

    def close(self) -> None:
        if self.registered is not None:
            self.deregister()
        del self.nixl
