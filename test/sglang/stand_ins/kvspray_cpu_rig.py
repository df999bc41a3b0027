# SPDX-License-Identifier: Apache-2.0
"""A plug-in of SGLang for servers without a GPU: page copies in torch, and no pinned memory."""

from __future__ import annotations


def install() -> None:
    import sgl_kernel.kvcacheio as copies
    from sglang.srt.mem_cache.pool_host import common, mha, mla

    for module in (mha, mla):  # they import these with CUDA only
        for name in (
            "transfer_kv_direct",
            "transfer_kv_per_layer_direct_pf_lf",
            "transfer_kv_all_layer_direct_lf_pf",
        ):
            setattr(module, name, getattr(copies, name))
    common._cuda_host_register = lambda *_, **__: None
    common._cuda_host_unregister = lambda *_, **__: None
