# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapter a prompt's KV is computed with: by the content of its files, not by its name.

Engines call adapters as they like, and may load other files under a name. The digest of an
adapter's files goes into the hash of the prompt, so that two engines exchange KV only where both
have the same content. The scheduler's side reads the files when a request comes; the worker's side
reads them when vLLM does, and serves nothing of a request for which they were others.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvspray.weights import CheckpointError, digest
from kvspray_vllm.params import ParamsError
from kvspray_vllm.weights import folder_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

MAX_ADAPTERS = 4096  # that are remembered
MAX_FILES = 1024  # of one
ATTEMPTS = 3  # to read files that change meanwhile

Signature = tuple[tuple[str, int, int, int, int], ...]  # of each file: name, device, inode, bytes, time


class Adapters:
    """Digests of adapters. One thread."""

    def __init__(self) -> None:
        self._digests: collections.OrderedDict[str, tuple[Signature, str]] = collections.OrderedDict()
        self._loaded: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._replaced: set[int] = set()  # of ids that are remembered once, so no more than an operator gives out

    def content(self, lora: LoRARequest) -> str:
        """The content of an adapter that a request names. Raises ParamsError where it is not known."""
        try:
            now = self.digest(str(lora.lora_path))
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

    def digest(self, path: str) -> str:
        """Of files as they are now. Raises OSError or CheckpointError."""
        path = folder_of(os.path.expanduser(path), None, None)
        for _ in range(ATTEMPTS):
            before = _signature(path)
            cached = self._digests.get(path)
            if cached is not None and cached[0] == before:
                self._digests.move_to_end(path)
                return cached[1]
            name = digest(path)
            if _signature(path) == before:
                remember(self._digests, path, (before, name))
                return name
        raise CheckpointError(f"{path}: its files change while they are read")


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
            return self._adapters.digest(str(request.lora_path))
        except (OSError, CheckpointError):
            return ""

    def close(self) -> None:
        self._close()
        self._close = lambda: None


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
