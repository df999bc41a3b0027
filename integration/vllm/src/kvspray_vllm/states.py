"""Recurrent states (Mamba 1 and 2, gated delta nets, KDA, short convolutions): what a page of
vLLM's MambaSpec holds, and which engines with such layers are served.

A state is that after the last computed token. So it moves as a whole, after the prefill engine has
computed exactly the tokens that the decode engine loads; see scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvspray_vllm.speculation import CACHELESS_DRAFTS
from kvspray_vllm.strategies import Kind, Ranks, Unsupported
from kvspray_vllm.versions import CAPABILITIES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# For each backend: the strategy of its pages, and the number of states in a page (the history of
# the convolution, and the recurrent state).
BACKENDS: Mapping[str, tuple[str, int]] = {
    "GDN_ATTN": ("gdn_state", 2),  # Kimi-Linear's KDA, too
    "KIMI_K3_KDA": ("kda_state", 2),
    "MAMBA2_ATTN": ("mamba2_state", 2),
    "MAMBA1_ATTN": ("mamba1_state", 2),
    "SHORT_CONV_ATTN": ("short_conv_state", 1),
    "LINEAR_ATTN": ("gdn_state", 1),
}
# Names of the field for the groups of B and C in the configurations of models.
GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def is_state(spec: KVCacheSpec) -> bool:
    """Whether a layer keeps a state of the last token, and nothing of those before."""
    return type(spec).__name__ == "MambaSpec"


def _specs(kv: KVCacheConfig) -> Iterator[KVCacheSpec]:
    for group in kv.kv_cache_groups:
        of = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        yield from of.values() if of is not None else (group.kv_cache_spec,)


def groups_of(config: VllmConfig) -> int:
    """The groups of B and C of a Mamba 2 model, all ranks together; 0: not known."""
    hf = config.model_config.hf_text_config
    found = {int(n) for name in GROUPS if (n := getattr(hf, name, None))}
    return found.pop() if len(found) == 1 else 0


def check_states(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Refuses at start what is not served of a model with recurrent states."""
    if not any(map(is_state, _specs(kv))):
        return
    if not CAPABILITIES.states:
        raise Unsupported(
            "kvspray: the model has recurrent states (MambaSpec), which are moved from vLLM 0.33 "
            "on; use that, or serve the model without kvspray"
        )
    spec = config.speculative_config
    if spec is None:
        return
    has = f"kvspray: speculative_config.method is {spec.method}, and the model has recurrent states"
    # A draft of MTP or EAGLE would compute the last position of a load from the token that the
    # prefill generates.
    if spec.method not in CACHELESS_DRAFTS:
        raise Unsupported(
            f"{has} (MambaSpec): the prefill leaves out the last token of a prompt, and layers of "
            f"a draft may need it; use {', '.join(CACHELESS_DRAFTS)}, or serve the model without "
            "speculation"
        )
    # vLLM moves the blocks of draft tokens' states then, by kernels that need Triton.
    if any(is_state(of) and of.mamba_cache_mode != "none" for of in _specs(kv)):
        raise Unsupported(
            f"{has} at the ends of blocks (mamba_cache_mode): no engine was tested with both; turn "
            "enable_prefix_caching off, or serve the model without speculation"
        )


def identity_of_states(kv: KVCacheConfig) -> str:
    """What the sizes of states do not show; empty: the model has none."""
    return ",".join(
        sorted(
            {
                " ".join(
                    (
                        spec.mamba_type.name,
                        *(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
                        spec.mamba_cache_mode,
                    )
                )
                for spec in _specs(kv)
                if is_state(spec)
            }
        )
    )


def state_kind(spec: KVCacheSpec, backend: str, ranks: Ranks, groups: int, device: str) -> Kind:
    """The strategy of a layer with states, and its parameters. groups: of groups_of."""
    if backend not in BACKENDS:
        raise Unsupported(
            f"kvspray: the backend of a recurrent state is {backend or 'unknown'}; supported "
            f"are {', '.join(BACKENDS)}; serve the model without kvspray"
        )
    strategy, count = BACKENDS[backend]
    shapes = [tuple(int(n) for n in shape) for shape in spec.shapes]
    if len(shapes) != count:
        raise Unsupported(
            f"kvspray: a layer of {backend} has {len(shapes)} states in a page, and {count} "
            "are supported; serve the model without --use-replayssm"
        )
    if spec.tp_replicated and ranks.tp_size > 1:
        raise Unsupported(
            f"kvspray: a layer of {backend} has its whole state on each of "
            f"{ranks.tp_size} ranks; set tensor_parallel_size to 1"
        )
    params = {"tp_rank": ranks.tp, "tp_size": ranks.tp_size}
    channels = 0
    if backend != "LINEAR_ATTN":
        dim_first = _dim_first()
        channels, history = shapes[0] if dim_first else shapes[0][::-1]
        params |= {
            "conv_len": history,
            "conv_bytes": spec.dtypes[0].itemsize,
            "conv_order": int(dim_first),
        }
    if backend == "SHORT_CONV_ATTN":
        return Kind(strategy, params | {"v_heads": channels * ranks.tp_size, "v_dim": 1})
    params["state_bytes"] = spec.dtypes[-1].itemsize
    if backend == "MAMBA1_ATTN":
        own, size = shapes[1]
        _equal(backend, channels, own)
        return Kind(strategy, params | {"v_heads": own * ranks.tp_size, "v_dim": 1, "k_dim": size})
    heads, width, size = shapes[-1]
    params |= {"v_heads": heads * ranks.tp_size, "v_dim": width, "k_dim": size}
    if backend == "LINEAR_ATTN":
        return Kind(strategy, params | {"k_heads": heads * ranks.tp_size, "part": 2, "conv_len": 1})
    both = channels - heads * width  # of q and k, or of B and C
    k_heads = both // (2 * size)
    _equal(backend, both, k_heads * 2 * size)
    if backend != "MAMBA2_ATTN":
        if device == "cpu":
            params["state_order"] = 1  # vLLM's kernels for CPUs have k outside
        return Kind(strategy, params | {"k_heads": k_heads * ranks.tp_size})
    if ranks.tp_size > 1 and k_heads == 1 and groups not in (1, ranks.tp_size):
        raise Unsupported(
            f"kvspray: a rank of {ranks.tp_size} has one group of a Mamba 2 layer, and the model "
            f"{groups or 'an unknown number'}; set tensor_parallel_size to 1"
        )
    # A model with one group has a copy of it on each rank.
    return Kind(
        strategy,
        params | {"k_heads": groups if k_heads == 1 and groups == 1 else k_heads * ranks.tp_size},
    )


def _equal(backend: str, got: int, want: int) -> None:
    if got != want or not want:
        raise Unsupported(
            f"kvspray: the convolution of {backend} has {got} channels where its recurrent state "
            f"has {want}; such states are not supported, serve the model without kvspray"
        )


def _dim_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())
