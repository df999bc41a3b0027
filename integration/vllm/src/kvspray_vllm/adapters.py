# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapter a prompt's KV is computed with: by the content of its files, not by its name.

Engines call adapters as they like, and may load other files under a name. The digest of an
adapter's files goes into the hash of the prompt, so that two engines exchange KV only where both
have the same content. The scheduler's side reads the files when a request comes, in a thread of its
own; the worker's side reads them when vLLM does, and serves nothing of a request for which they
were others. A decode engine loads KV only for an adapter that its worker has read already: one that
is read after the load could turn out to be another.
"""

from __future__ import annotations

import collections
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvspray.weights import CheckpointError, digest
from kvspray_vllm.params import ParamsError
from kvspray_vllm.weights import folder_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

MAX_ADAPTERS = 4096  # that are remembered
MAX_FILES = 1024  # of one
MAX_READING = 64  # adapters whose files are being read, or wait to be
ATTEMPTS = 3  # to read files that change meanwhile

Signature = tuple[
    tuple[str, int, int, int, int], ...
]  # of each file: name, device, inode, bytes, time
Digest = tuple[Signature, str]


class Reader:
    """Reads adapters in a thread that lives as long as there is something to read."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()  # protects all below
        self._open: set[str] = set()  # paths
        self._done: collections.OrderedDict[str, Digest | Exception] = collections.OrderedDict()
        self._running = False

    def read(self, path: str) -> Digest | None:
        """The digest of a folder's files, as they were since the last call for it; None: ask
        again. Raises what reading them raised."""
        with self._lock:
            got = self._done.pop(path, None)
            if isinstance(got, Exception):
                raise got
            if got is not None or path in self._open:
                return got
            if len(self._open) >= MAX_READING:
                raise CheckpointError(f"{path}: {MAX_READING} adapters are being read; use fewer")
            self._open.add(path)
            self._todo.put(path)
            if not self._running:
                self._running = True
                # It may hang where a file system does, and an engine ends all the same.
                threading.Thread(target=self._run, name="kvspray-adapters", daemon=True).start()
            return None

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._todo.empty():
                    self._running = False
                    return
            path = self._todo.get()
            try:
                got: Digest | Exception = _read(path)
            except Exception as err:
                got = err
            with self._lock:
                self._open.discard(path)
                # Not every request that asked still lives, and fetches it.
                remember(self._done, path, got)


class Adapters:
    """Digests of adapters. One thread, and that of a reader."""

    def __init__(self, reader: Reader | None = None) -> None:
        """reader: None: files are read when they are asked for."""
        self._reader = reader
        self._digests: collections.OrderedDict[str, Digest] = collections.OrderedDict()
        self._loaded: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._replaced: set[int] = set()  # of ids that are remembered once, so no more than an operator gives out

    def content(self, lora: LoRARequest) -> str | None:
        """The content of an adapter that a request names; None: its files are being read. Raises
        ParamsError where it cannot be known."""
        try:
            now = self.digest(str(lora.lora_path))
            if now is None:
                return None
        except (OSError, CheckpointError) as err:
            raise ParamsError(
                "lora_unknown", f"adapter {lora.lora_name!r} at {lora.lora_path!r} cannot be read, so its KV cannot be told from other's: {err}"
            ) from err
        # vLLM reads an adapter when an id is used first, and again only where the request says so.
        # In between its files may change, which changes nothing of what the engine computes with.
        known = self._loaded.get(lora.lora_int_id)
        if known is not None and known != now and not getattr(lora, "load_inplace", False):
            raise ParamsError(
                "lora_changed",
                f"the files of adapter {lora.lora_name!r} at {lora.lora_path!r} are not those that were loaded (then {known}, now {now}): load it again, "
                "with load_inplace or from another path under another id",
            )
        if known is not None and known != now:
            self._replaced.add(lora.lora_int_id)
        remember(self._loaded, lora.lora_int_id, now)
        return now

    def replaced(self, id: int) -> bool:
        """Whether other content was loaded under an id. vLLM's prefix cache has the id's name and path alone, so blocks of the
        content before may be hit."""
        return id in self._replaced

    def digest(self, path: str) -> str | None:
        """Of files as they are now; None: they are being read. Raises OSError or CheckpointError."""
        path = folder_of(os.path.expanduser(path), None, None)
        cached = self._digests.get(path)
        if cached is not None and cached[0] == _signature(path):
            self._digests.move_to_end(path)
            return cached[1]
        got = _read(path) if self._reader is None else self._reader.read(path)
        if got is None:
            return None
        remember(self._digests, path, got)
        # It may have been read for an earlier request, and its files may be others by now.
        return got[1] if self._reader is None or got[0] == _signature(path) else None


class LoadWatch:
    """Tells what vLLM loads as an adapter: of(id, digest), the digest empty where it is not known."""

    def __init__(self, loaded: Callable[[int, str], None]) -> None:
        self._loaded = loaded
        self._adapters = Adapters()
        self._close: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Wraps the method of vLLM's worker that reads adapters, where this engine has any."""
        module = sys.modules.get("vllm.lora.worker_manager")
        cls = getattr(module, "WorkerLoRAManager", None)
        inner = getattr(cls, "_load_adapter", None)
        if cls is None or inner is None:
            return

        @functools.wraps(inner)
        def load(manager: Any, request: LoRARequest) -> Any:
            before = self._read(request)
            out = inner(manager, request)
            self._loaded(request.lora_int_id, before if self._read(request) == before else "")
            return out

        cls._load_adapter = load

        def close() -> None:
            cls._load_adapter = inner

        self._close = close

    def _read(self, request: LoRARequest) -> str:
        try:
            return self._adapters.digest(str(request.lora_path)) or ""
        except (OSError, CheckpointError):
            return ""

    def close(self) -> None:
        self._close()
        self._close = lambda: None


def _read(path: str) -> Digest:
    for _ in range(ATTEMPTS):
        before = _signature(path)
        name = digest(path)
        if _signature(path) == before:
            return before, name
    raise CheckpointError(f"{path}: its files change while they are read")


def remember(table: collections.OrderedDict, key: object, value: object) -> None:  # type: ignore[type-arg]
    table[key] = value
    table.move_to_end(key)
    while len(table) > MAX_ADAPTERS:
        table.popitem(last=False)


def _signature(path: str) -> Signature:
    out: list[tuple[str, int, int, int, int]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if len(out) >= MAX_FILES:
                raise CheckpointError(f"{path}: more than {MAX_FILES} files; want the folder of one adapter")
            if entry.is_file():
                s = entry.stat()
                out.append((entry.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))
    return tuple(sorted(out))
