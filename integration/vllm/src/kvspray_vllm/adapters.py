"""Which LoRA adapter a prompt's KV is computed with: by the content of its files, not by its name.

Engines name adapters as they like, and may load other files under the same name. The digest of an
adapter's files goes into the hash of the prompt, so two engines exchange KV only if both have the
same content. The worker's side reads the files when vLLM does, and offers no KV of a request whose
hash has another digest. A decode engine loads KV only for an adapter that its worker has already
read: one that is read after the load could turn out to be another.

The scheduler's thread makes no call to the file system, which may hang: a Reader does it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvspray.weights import CheckpointError, digest, directory_of
from kvspray_vllm.params import ParamsError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

MAX_ADAPTERS = 4096  # remembered
MAX_FILES = 1024  # of one adapter
MAX_READING = 64  # adapters that are being read or wait to be
READERS = 4  # threads: fewer adapters than that on a slow file system delay no other
ATTEMPTS = 3  # to read files that change meanwhile
# How long the scheduler's thread waits for an answer. Files that have not changed need a tenth of
# it on a local disk; without a wait each request would lose one step of the engine.
CHECK_WAIT_S = 0.002

# Of each file: name, device, inode, bytes, time of modification, time of change. Programs can set
# the time of modification, but not that of change.
Signature = tuple[tuple[str, int, int, int, int, int], ...]
Digest = tuple[Signature, str]


class Digests:
    """Digests of adapters, by path. The calling thread reads the files; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[str, Digest] = collections.OrderedDict()

    def __contains__(self, path: str) -> bool:
        with self._lock:
            return path in self._known

    def of(self, path: str) -> str:
        """Of the files as they are now. Raises OSError or CheckpointError."""
        directory = directory_of(os.path.expanduser(path), None, None)
        signature = _signature(directory)
        with self._lock:
            known = self._known.get(path)
        if known is None or known[0] != signature:
            known = _read(directory)
        with self._lock:
            remember(self._known, path, known)
        return known[1]


class Reading:
    """A question for the digest of an adapter's files, as they are after the question."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._over = threading.Event()
        self._digest = ""
        self._error: Exception | None = None

    def end(self, got: str | Exception) -> None:
        if isinstance(got, Exception):
            self._error = got
        else:
            self._digest = got
        self._over.set()

    def result(self, wait_s: float = 0.0) -> str | None:
        """None: not yet known. Raises what reading the files raised."""
        if not self._over.wait(wait_s):
            return None
        if self._error is not None:
            raise self._error
        return self._digest


class Reader:
    """Reads adapters in a few threads, which live as long as there is something to read.

    One thread at a time reads an adapter, so a file system that hangs holds one thread for each
    adapter on it. Nothing is kept of a failure: the next question reads the files again."""

    def __init__(self) -> None:
        self._digests = Digests()
        self._lock = threading.Lock()  # protects all below
        self._waiting: collections.OrderedDict[str, Reading] = collections.OrderedDict()  # by path
        self._running: set[str] = set()
        self._threads = 0

    def ask(self, path: str) -> Reading:
        """Raises CheckpointError if too many adapters are being read."""
        with self._lock:
            # A reading that has begun may have seen the files before they were replaced.
            reading = self._waiting.get(path)
            if reading is not None:
                return reading
            if len(self._waiting) + len(self._running) >= MAX_READING:
                raise CheckpointError(f"{path}: {MAX_READING} adapters are being read; use fewer")
            reading = self._waiting[path] = Reading(path)
            if self._threads < READERS:
                # A daemon: the file system may hang, and the engine must be able to exit.
                thread = threading.Thread(target=self._run, name="kvspray-adapters", daemon=True)
                try:
                    thread.start()
                except RuntimeError as err:  # the process has too many
                    del self._waiting[path]
                    raise CheckpointError(f"{path}: {err}") from err
                self._threads += 1
            return reading

    def has_read(self, path: str) -> bool:
        return path in self._digests

    def _next(self) -> Reading | None:
        with self._lock:
            for path, reading in self._waiting.items():
                if path not in self._running:
                    del self._waiting[path]
                    self._running.add(path)
                    return reading
            self._threads -= 1
            return None

    def _run(self) -> None:
        while (reading := self._next()) is not None:
            got: str | Exception
            try:
                got = self._digests.of(reading.path)
            except Exception as err:
                got = err
            with self._lock:
                self._running.discard(reading.path)
            reading.end(got)


class Adapters:
    """The scheduler's view of adapters, for one thread. It makes no call to the file system."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._loaded: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._replaced: set[int] = set()  # bounded: only ids that _loaded has had

    def known(self, lora: LoRARequest) -> bool:
        """Whether its files were read once: a reading only checks that they are the same."""
        return self._reader.has_read(str(lora.lora_path))

    def prefetch(self, lora: LoRARequest) -> None:
        """Begins to read an adapter that is in use, before a transfer needs its digest."""
        if not self.known(lora):
            with contextlib.suppress(ParamsError):  # a request with a transfer reports it
                self.ask(lora)

    def ask(self, lora: LoRARequest) -> Reading:
        """Each request asks for itself: the files may have changed since the last one. Raises
        ParamsError."""
        try:
            return self._reader.ask(str(lora.lora_path))
        except CheckpointError as err:
            raise _unknown(lora, err) from err

    def content(self, lora: LoRARequest, reading: Reading, wait_s: float = 0.0) -> str | None:
        """The content of an adapter that a request names; None: not yet known. Raises ParamsError
        if it cannot be known."""
        try:
            now = reading.result(wait_s)
        except (OSError, CheckpointError) as err:
            raise _unknown(lora, err) from err
        if now is None:
            return None
        # vLLM reads an adapter when an id is used first, and again only if the request asks for it.
        # In between its files may change, which does not change what the engine computes with.
        known = self._loaded.get(lora.lora_int_id)
        if known is not None and known != now:
            if not lora.load_inplace:
                raise ParamsError(
                    "lora_changed",
                    f"the files of adapter {lora.lora_name!r} at {lora.lora_path!r} are not those "
                    f"that were loaded (then {known}, now {now}): load it again, with load_inplace "
                    "or from another path under another id",
                )
            self._replaced.add(lora.lora_int_id)
        remember(self._loaded, lora.lora_int_id, now)
        return now

    def replaced(self, id: int) -> bool:
        """Whether other content was loaded under an id. vLLM's prefix cache has the id's name and
        path alone, so blocks of the content before may be hit."""
        return id in self._replaced


class LoadWatch:
    """Reports what vLLM loads as an adapter: loaded(id, digest), the digest empty if unknown."""

    def __init__(self, loaded: Callable[[int, str], None]) -> None:
        self._loaded = loaded
        self._digests = Digests()
        self._close: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Wraps the method of vLLM's worker that reads adapters, if this engine has one."""
        module = sys.modules.get("vllm.lora.worker_manager")
        cls = getattr(module, "WorkerLoRAManager", None)
        if cls is None:
            return
        inner = cls._load_adapter

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
            return self._digests.of(str(request.lora_path))
        except (OSError, CheckpointError):
            return ""

    def close(self) -> None:
        self._close()
        self._close = lambda: None


def _unknown(lora: LoRARequest, err: Exception) -> ParamsError:
    return ParamsError(
        "lora_unknown",
        f"adapter {lora.lora_name!r} at {lora.lora_path!r} cannot be read, so its KV cannot be "
        f"told from that of others: {err}",
    )


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
    out: list[tuple[str, int, int, int, int, int]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if len(out) >= MAX_FILES:
                raise CheckpointError(
                    f"{path}: more than {MAX_FILES} files; want the directory of one adapter"
                )
            if entry.is_file():
                s = entry.stat()
                out.append(
                    (entry.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
                )
    return tuple(sorted(out))
