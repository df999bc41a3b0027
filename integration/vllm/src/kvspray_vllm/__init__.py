"""kvspray's connector for vLLM.

Load it with ``kv_connector="KVSprayConnector"``: vLLM finds it by this package's entry point. With
``VLLM_PLUGINS`` set to other plug-ins, add ``kv_connector_module_path="kvspray_vllm"``. The class
is imported on first use, so that the parts without vLLM (params, keys, layout rules) can be used
and tested alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspray_vllm.connector import KVSprayConnector
    from kvspray_vllm.weights import set_weights

__all__ = ["KVSprayConnector", "register", "set_weights"]
__version__ = "0.0.0.dev0"  # of a checkout; `make wheels` writes that of the tag


def register() -> None:
    """Registers the connector with vLLM, and serves what a variable asks for: KVSPRAY_LOAD,
    KVSPRAY_SLEEP. vLLM's plug-in loader may call this several times in a process, in engines
    without kvspray too: whatever fails here ends none of them."""
    _attempt("the connector", _register)
    _attempt("the connector's name in Dynamo", _register_with_dynamo)
    for variable, feature in (("KVSPRAY_LOAD", "load"), ("KVSPRAY_SLEEP", "sleep")):
        if os.environ.get(variable, "0") not in ("", "0"):
            _attempt(variable, functools.partial(_install, f"kvspray_vllm.{feature}"))


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # ValueError: the name is registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(
            "KVSprayConnector", "kvspray_vllm", "KVSprayConnector"
        )


def _register_with_dynamo() -> None:
    """Dynamo's vLLM worker refuses each request if its own table lacks the connector. It imports
    its modules before vLLM loads plug-ins. KVSprayConnector accepts and returns the same
    kv_transfer_params as NixlConnector."""
    protocols = sys.modules.get("dynamo.vllm.kv_connector_protocols")
    if protocols is not None:
        protocols.KV_CONNECTOR_PROTOCOLS.setdefault(
            "KVSprayConnector", protocols.NixlConnectorProtocol
        )


def _install(module: str) -> None:
    importlib.import_module(module).install()


def _attempt(what: str, install: Callable[[], None]) -> None:
    try:
        install()
    except Exception:
        logging.getLogger("vllm.kvspray").exception(
            "kvspray: %s is not available in this process; the engine runs without it", what
        )


def __getattr__(name: str) -> Any:
    if name == "KVSprayConnector":
        import vllm

        import kvspray

        if kvspray.__version__ != __version__:
            raise ImportError(
                f"kvspray: the package kvspray-vllm has release {__version__}, the package kvspray "
                f"{kvspray.__version__}; install one release of both: python -m pip install "
                f"'kvspray[vllm]==RELEASE'"
            )
        try:
            from kvspray_vllm.connector import KVSprayConnector
        except ImportError as e:  # this vLLM lacks a module that the connector imports
            raise ImportError(
                f"kvspray: this plug-in does not fit vllm.__version__ {vllm.__version__}: {e}; "
                "install a vLLM that docs/vllm.md lists, or a kvspray whose docs/vllm.md lists it"
            ) from e
        return KVSprayConnector
    if name == "set_weights":
        from kvspray_vllm.weights import set_weights

        return set_weights
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
