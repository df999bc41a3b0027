# SPDX-License-Identifier: Apache-2.0
"""A connector that loses a layer of each load without a report: the control of this suite."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class FaultyConnector(ExampleConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        layers = [
            layer
            for layer in forward_context.no_compile_layers.values()
            if getattr(layer, "kv_cache", None) is not None
        ]
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                layers[-1].kv_cache[request.slot_mapping // self._block_size] = 0
