"""Layers of linear attention as vLLM has them, without a model: their states' shapes and the views
of them, which channels and heads a rank has, the kernels that write a state and read it, and where
vLLM looks for the one of a request.

Shapes, views, weight loaders, kernels and copy helpers are vLLM's own. The code here stands in for
the layer object that they ask for its sizes and weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

WIDTH = 4  # of the convolution
STATE_DTYPE = torch.float32


@dataclasses.dataclass(frozen=True)
class Linear:
    """A kind of linear attention. k: of GDN and KDA the heads of q and k, of Mamba-2 the groups of
    B and C; v: the others, of Mamba-1 its channels, and k_dim the numbers of each one's state."""

    kind: str  # gdn, kda, mamba2, mamba1
    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int

    @property
    def kernels(self) -> bool:
        """Whether vLLM has kernels of it for CPUs."""
        return self.kind in ("gdn", "mamba2")

    @property
    def sections(self) -> tuple[int, ...]:
        """The channels of the convolution, in the order in which they are remembered: q, k, v, or
        x, B, C."""
        k, v = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        if self.kind == "mamba1":
            return (v,)
        return (v, k, k) if self.kind == "mamba2" else (k, k, v)

    def shapes(self, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shape

        if self.kind == "mamba2":
            return Shape.mamba2_state_shape(
                tp,
                self.v_heads * self.v_dim,
                self.k_heads,
                self.v_heads,
                self.v_dim,
                self.k_dim,
                WIDTH,
            )
        if self.kind == "mamba1":
            return Shape.mamba1_state_shape(tp, self.v_heads, self.k_dim, WIDTH)
        if self.kind == "gdn":
            return Shape.gated_delta_net_state_shape(
                tp, self.k_heads, self.v_heads, self.k_dim, self.v_dim, WIDTH
            )
        return Shape.kda_state_shape(tp, self.v_heads, self.v_dim, self.k_heads, self.k_dim, WIDTH)

    @property
    def copy_specs(self) -> tuple[Any, ...]:
        from vllm.model_executor.layers.mamba.mamba_utils import (
            MambaStateCopyFuncCalculator as Copy,
        )

        return {
            "mamba1": Copy.mamba1_state_copy_func,
            "mamba2": Copy.mamba2_state_copy_func,
            "gdn": Copy.gated_delta_net_state_copy_func,
            "kda": Copy.kda_state_copy_func,
        }[self.kind]()

    def channels(self, rank: int, tp: int) -> torch.Tensor:
        """Which channels of the model's convolution a rank has, as the loader of its weights
        divides them."""
        from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
            _make_fused_conv1d_weight_loader,
        )
        from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
        from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shape

        every = torch.arange(sum(self.sections), dtype=torch.float32)
        if self.kind == "mamba1":
            return every[self.heads(rank, tp)].long()
        own = torch.full((sum(self.local(tp)),), -1.0)
        if self.kind == "kda":
            load = _make_fused_conv1d_weight_loader(list(self.sections), tp, rank)
            for i, part in enumerate(every.split(self.sections)):
                load(own[:, None, None], part[:, None], i)
        else:
            # A Mamba-2 model with one group has a copy of it on each rank; MambaMixer2 refuses what
            # else does not divide.
            extra = (
                Shape.extra_groups_for_head_shards(self.k_heads, tp) * self.k_dim
                if self.kind == "mamba2"
                else 0
            )
            assert extra == 0 or self.k_heads == 1
            k = (self.k_heads * self.k_dim + extra, extra, self.k_heads == 1)
            v = (self.v_heads * self.v_dim, 0, False)
            mamba_v2_sharded_weight_loader(
                [v, k, k] if self.kind == "mamba2" else [k, k, v], tp, rank
            )(own, every)
        assert own.min() >= 0, "a channel that the loader did not fill"
        return own.long()

    def local(self, tp: int) -> tuple[int, int, int]:
        """The sections of a rank."""
        k, v = max(self.k_heads // tp, 1) * self.k_dim, self.v_heads // tp * self.v_dim
        return (v, k, k) if self.kind == "mamba2" else (k, k, v)

    def heads(self, rank: int, tp: int) -> slice:
        """Which heads of the recurrent state: those whose decay sharded_weight_loader gives it."""
        from vllm.model_executor.model_loader import weight_utils

        own = torch.empty(self.v_heads // tp)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(weight_utils, "get_tensor_model_parallel_rank", lambda: rank)
            weight_utils.sharded_weight_loader(0)(own, torch.arange(float(self.v_heads)))
        return slice(int(own[0]), int(own[-1]) + 1)


@contextlib.contextmanager
def conv_order(order: str) -> Iterator[None]:
    """As if vLLM had been started with this order of convolutions, SD or DS."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    with pytest.MonkeyPatch.context() as m:
        m.setenv("VLLM_SSM_CONV_STATE_LAYOUT", order)
        get_conv_state_layout.cache_clear()
        try:
            assert get_conv_state_layout() == order
            yield
        finally:
            get_conv_state_layout.cache_clear()


def bind(
    page_view: torch.Tensor, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The conv and the recurrent state of every block, as a layer sees them in its pages."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    layer: Any = types.SimpleNamespace(
        get_state_shape=lambda: shapes, get_state_dtype=lambda: dtypes
    )
    MambaBase.bind_kv_cache(layer, page_view)
    conv, state = layer.kv_cache
    return conv, state


@dataclasses.dataclass
class Inputs:
    """What the projections of a layer make of some tokens, of all heads: of each token its
    channels, and a decay and a gate (or a step width) of each head."""

    mixed: torch.Tensor  # [token, channel]
    a: torch.Tensor  # [token, head]
    b: torch.Tensor

    @classmethod
    def random(cls, of: Linear, tokens: int) -> Inputs:
        return cls(
            *(
                torch.randn(tokens, n).to(torch.bfloat16)
                for n in (sum(of.sections), of.v_heads, of.v_heads)
            )
        )


@dataclasses.dataclass
class Weights:
    conv: torch.Tensor  # [channel, WIDTH]
    decay: torch.Tensor  # [head]
    bias: torch.Tensor

    @classmethod
    def random(cls, of: Linear) -> Weights:
        return cls(
            torch.randn(sum(of.sections), WIDTH).to(torch.bfloat16),
            torch.rand(of.v_heads),
            torch.rand(of.v_heads),
        )


def step(
    of: Linear,
    order: str,
    rank: int,
    tp: int,
    w: Weights,
    x: Inputs,
    conv: torch.Tensor,
    state: torch.Tensor,
    slot: int,
    first: bool,
) -> torch.Tensor:
    """A rank's layer computes tokens with vLLM's kernels: a prompt (first) that leaves its state in
    a slot, or one token more, from the state that is there. Returns the output of each head,
    [token, head, dim]."""
    channels, heads = of.channels(rank, tp), of.heads(rank, tp)
    args = (of, tp, w.conv[channels].contiguous(), w.decay[heads].contiguous(),
        w.bias[heads].contiguous(), x.mixed[:, channels].contiguous(), x.a[:, heads].contiguous(),
        x.b[:, heads].contiguous(), conv, state, torch.tensor([slot], dtype=torch.int32),
        first)  # fmt: skip
    with conv_order(order):
        return {"gdn": _gdn, "mamba2": _mamba2}[of.kind](*args)


def _gdn(
    of: Linear, tp: int, weight: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor,
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, conv: torch.Tensor, state: torch.Tensor,
    slot: torch.Tensor, first: bool,
) -> torch.Tensor:  # fmt: skip
    """The core of vLLM's QwenGatedDeltaNetAttention on CPUs."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    weight = weight.unsqueeze(1)
    if torch.cpu._is_avx512_bf16_supported() or gdn_attention.is_arm_bf16():
        # As dispatch_cpu_unquantized_gemm does when it loads.
        weight = ops.causal_conv1d_weight_pack(weight.squeeze(1))
    layer: Any = types.SimpleNamespace(
        kv_cache=(conv, state), conv1d=types.SimpleNamespace(weight=weight, bias=None),
        activation="silu", A_log=decay, dt_bias=bias.to(torch.bfloat16),
        key_dim=of.k_heads * of.k_dim, value_dim=of.v_heads * of.v_dim, head_k_dim=of.k_dim,
        head_v_dim=of.v_dim, tp_size=tp,
    )  # fmt: skip
    layer.rearrange_mixed_qkv = functools.partial(
        QwenGatedDeltaNetAttention.rearrange_mixed_qkv, layer
    )
    n = mixed.shape[0]
    meta: Any = types.SimpleNamespace(
        spec_sequence_masks=None, num_accepted_tokens=None, non_spec_state_indices_tensor=slot,
        non_spec_query_start_loc=torch.tensor([0, n], dtype=torch.int32),
        num_decodes=int(not first), num_decode_tokens=0 if first else n, num_prefills=int(first),
        num_prefill_tokens=n if first else 0, has_initial_state=torch.tensor([False]),
    )  # fmt: skip
    out = torch.empty(n, of.v_heads // tp, of.v_dim, dtype=torch.bfloat16)
    gdn_attention._cpu_gdn_attention_nonspec(layer, meta, mixed, b, a, out)
    return out


def _mamba2(
    of: Linear, tp: int, weight: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor,
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, conv: torch.Tensor, state: torch.Tensor,
    slot: torch.Tensor, first: bool,
) -> torch.Tensor:  # fmt: skip
    """What MambaMixer2 does between its projections."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
        causal_conv1d_fn,
        causal_conv1d_update,
    )
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    if not is_conv_state_dim_first():
        conv = conv.transpose(-1, -2)
    n, groups, heads = mixed.shape[0], max(of.k_heads // tp, 1), of.v_heads // tp
    start = torch.tensor([0, n], dtype=torch.int32)
    if first:
        mixed = causal_conv1d_fn(mixed.transpose(0, 1), weight, None, activation="silu",
            conv_states=conv, has_initial_state=torch.tensor([False]), cache_indices=slot,
            query_start_loc=start).transpose(0, 1)  # fmt: skip
    else:
        mixed = causal_conv1d_update(mixed, conv, weight, None, "silu", conv_state_indices=slot)
    xs, bs, cs = (t.contiguous() for t in mixed.split(of.local(tp), dim=-1))
    xs, bs, cs = (
        xs.view(n, heads, of.v_dim),
        bs.view(n, groups, of.k_dim),
        cs.view(n, groups, of.k_dim),
    )
    out = torch.empty(n, heads, of.v_dim, dtype=torch.bfloat16)
    if first:
        state[slot] = mamba_chunk_scan_combined_varlen(
            xs, a, -decay, bs, cs, chunk_size=32, D=bias, z=None, dt_bias=bias,
            seq_idx=torch.zeros(n, dtype=torch.int32), cu_seqlens=start, cu_chunk_seqlens=None,
            last_chunk_indices=None, initial_states=None, return_intermediate_states=False,
            dt_softplus=True, dt_limit=(0.0, float("inf")), out=out, state_dtype=state.dtype,
        )  # fmt: skip
    else:
        wide = (-1, -1, of.v_dim)
        selective_state_update(
            state, xs, a[:, :, None].expand(wide), -decay[:, None, None].expand(-1, of.v_dim,
            of.k_dim), bs, cs, bias[:, None].expand(-1, of.v_dim), z=None,
            dt_bias=bias[:, None].expand(-1, of.v_dim), dt_softplus=True, state_batch_indices=slot,
            out=out,
        )  # fmt: skip
    return out
