"""KVSPRAY_PACE: tokens per second. Each layer of an engine then takes that much longer, as those of
a larger model on a device of its own do: engines that share a few cores do not wait for each other.
Nothing else is changed."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvspray_vllm import KVSprayConnector


class PacedConnector(KVSprayConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        each = 1 / (float(os.environ["KVSPRAY_PACE"]) * len(kv_caches))
        forward = CPUAttentionBackendImpl.forward

        def paced(
            impl: Any,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if attn_metadata is not None:
                time.sleep(attn_metadata.num_actual_tokens * each)
            return forward(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

        CPUAttentionBackendImpl.forward = paced
        super().register_kv_caches(kv_caches)
