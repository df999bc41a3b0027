"""KVSprayConnector with a clock on each of vLLM's calls, for tests only. At the engine's end, and
every EVERY_S, the process writes hooks-PID.json to $KVSPRAY_RIG_PAGES: calls, seconds and the
slowest call of each method."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kvspray_vllm import KVSprayConnector

EVERY_S = 2.0
TIMED = (
    "handle_preemptions",
    "bind_connector_metadata",
    "has_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "clear_connector_metadata",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)

_rows: dict[str, list[float]] = {}  # calls, seconds, the slowest one's seconds


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    row = _rows.setdefault(name, [0, 0.0, 0.0])

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            took = time.perf_counter() - start
            row[0] += 1
            row[1] += took
            row[2] = max(row[2], took)

    return timed


def _write(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        time.sleep(EVERY_S)
        path.with_suffix(".new").write_text(json.dumps(_rows))
        path.with_suffix(".new").rename(path)


class TimedConnector(KVSprayConnector):
    """KVSprayConnector, unchanged, with its calls timed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = pathlib.Path(os.environ["KVSPRAY_RIG_PAGES"]) / f"hooks-{os.getpid()}.json"
        if not any(t.name == "kvspray-timed" for t in threading.enumerate()):
            threading.Thread(target=_write, args=(path,), name="kvspray-timed", daemon=True).start()


for _name in TIMED:
    setattr(TimedConnector, _name, _timed(_name, getattr(KVSprayConnector, _name)))
