"""A plug-in of pytest, for the process in which test_upstream.py runs SGLang's own tests. They
start no engine, so nothing there loads SGLang's plug-ins: this loads ours, and gives the host pools
the memory that they have with our storage backend. With KVSPRAY_UPSTREAM=plain it does neither.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

OURS = os.environ["KVSPRAY_UPSTREAM"] != "plain"
mapped = 0


def pytest_configure() -> None:
    # SGLang's helpers of tests import this for evaluations, which are not run here.
    unused = types.ModuleType("datasets")
    unused.__dict__["load_dataset"] = None
    sys.modules["datasets"] = unused
    if not OURS:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvspray_sglang import memory, plugin

    allocate = memory.allocate

    def counted(*args: Any) -> Any:
        global mapped
        tensor = allocate(*args)
        mapped += tensor is not None
        return tensor

    memory.allocate = counted
    plugin.is_backend = lambda: True
    plugin.install()
    HookRegistry.apply_hooks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes in the report how many pools of the test got our memory."""
    before = mapped
    try:
        return (yield)
    finally:
        item.user_properties.append(("mapped", str(mapped - before)))
