"""vLLM's MultiConnector: kvspray's connector and, beside it, vLLM's OffloadingConnector."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from servers import Server

LOADED, STORED = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"
OFFLOAD_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}
# The endpoint that empties the prefix cache is one for development.
ENV = {"VLLM_SERVER_DEV_MODE": "1"}


def beside_offloading(kv: dict[str, Any], device: str) -> dict[str, Any]:
    """The --kv-transfer-config of an engine with both connectors. kvspray is asked first for a
    prompt that both could load."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": OFFLOAD_BYTES[device]}
    if device == "cpu":  # on which vLLM's own copies do not run
        socket = kv["kv_connector_extra_config"]["socket"]
        extra |= {
            "spec_name": "KVSprayOffloadingSpec",
            "spec_module_path": "kvspray_vllm.offload",
            "socket": socket,
        }
    policy = {"kv_load_failure_policy": kv["kv_load_failure_policy"]}
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **policy,
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",  # OffloadingConnector loads on either side
        "kv_connector_extra_config": {"connectors": [kv, offload]},
        **policy,
    }


def empty_prefix_cache(server: Server, host: bool = False) -> bool:
    """Whether the engine has forgotten the prompts that it has on the device. host: and those that
    its connector has in host memory."""
    url = server.url + "/reset_prefix_cache" + ("?reset_external=true" if host else "")
    request = urllib.request.Request(url, b"", method="POST")
    with urllib.request.urlopen(request, timeout=10) as f:
        return bool(json.load(f).get("success"))
