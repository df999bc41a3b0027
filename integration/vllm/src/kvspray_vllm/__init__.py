# SPDX-License-Identifier: Apache-2.0
"""kvspray's connector for vLLM.

Load it with ``kv_connector="KVSprayConnector"``: vLLM finds it by this package's entry point. With ``VLLM_PLUGINS`` set to other
plug-ins, add ``kv_connector_module_path="kvspray_vllm"``. The class is imported on first use, so that the parts without vLLM
(params, keys, layout rules) can be used and tested alone.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspray_vllm.connector import KVSprayConnector
    from kvspray_vllm.weights import set_weights

__all__ = ["KVSprayConnector", "register", "set_weights"]
__version__ = "0.1.0.dev0"  # of a checkout; `make wheels` writes that of the tag


def register() -> None:
    """Registers the connector with vLLM, and serves sleep mode where KVSPRAY_SLEEP is set. vLLM's plug-in loader may call this several
    times in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # ValueError: the name is registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("KVSprayConnector", "kvspray_vllm.connector", "KVSprayConnector")
    with contextlib.suppress(ImportError):  # a vLLM that cannot reload weights
        from kvspray_vllm import load

        load.install()
    if os.environ.get("KVSPRAY_SLEEP", "0") not in ("", "0"):
        from kvspray_vllm import sleep

        sleep.install()


def __getattr__(name: str) -> Any:
    if name == "KVSprayConnector":
        from kvspray_vllm.connector import KVSprayConnector

        return KVSprayConnector
    if name == "set_weights":
        from kvspray_vllm.weights import set_weights

        return set_weights
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
