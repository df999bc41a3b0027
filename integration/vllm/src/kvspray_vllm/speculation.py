"""Speculative decoding: which drafts are supported, and what their layers have in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspray_vllm.strategies import Unsupported

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

# Methods of speculative decoding. The first ones keep nothing of a draft in the cache. The others
# have layers of a draft model in cache groups, which move like any.
CACHELESS_DRAFTS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
CACHED_DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")


def check_speculation(config: VllmConfig) -> None:
    """Refuses methods whose draft layers would hold something else after a load than after a
    prefill.

    A draft layer of EAGLE or MTP computes position i from token i+1, too. So position N-1 of a
    prompt of N tokens depends on the first token of the answer, and the decode engine, which
    samples its own, computes it again: it computes the last token of any prompt. All before
    follows from the prompt alone. vLLM ends a step for its connector behind the draft, also
    where the hooks of its layers do not run. A wrong draft could cost accepted tokens and
    nothing else: the model verifies each.
    """
    spec = config.speculative_config
    method = str(spec.method)
    if method not in CACHELESS_DRAFTS + CACHED_DRAFTS:
        raise Unsupported(
            f"kvspray: speculative_config.method is {method}; what its draft layers hold after a "
            "load is not known, use one of "
            f"{', '.join(CACHED_DRAFTS + CACHELESS_DRAFTS)}, or serve without it"
        )
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise Unsupported(
            f"kvspray: speculative_config is set with pipeline_parallel_size {stages}; vLLM's "
            "first model runner ends no step for the connector on any stage but the last, set "
            "pipeline_parallel_size to 1 or serve without speculation"
        )
    # Module k reads k tokens further ahead, and vLLM computes the last ones of a prompt again from
    # drafts.
    if method == "mtp" and min(mtp_modules(spec), spec.num_speculative_tokens) > 1:
        raise Unsupported(
            f"kvspray: speculative_config.num_speculative_tokens is {spec.num_speculative_tokens} "
            f"with a draft of {mtp_modules(spec)} MTP modules; the "
            "last tokens of a prompt would be those of unverified drafts, set "
            "num_speculative_tokens to 1"
        )


def draft_in_cache(spec: SpeculativeConfig | None) -> str:
    """The draft whose layers are in the cache; empty: there are none. How many tokens it drafts at
    once changes nothing of a prompt's cache, so the engines of a pair may differ in that."""
    if spec is None or spec.method in CACHELESS_DRAFTS:
        return ""
    return f"{spec.method}:{spec.model}"


def mtp_modules(spec: SpeculativeConfig) -> int:
    """How many modules the draft has, each with a cache of its own."""
    draft = getattr(spec, "draft_model_config", None)
    return int(getattr(getattr(draft, "hf_config", None), "num_nextn_predict_layers", 1) or 1)


def kv_heads_of(config: VllmConfig) -> tuple[int, ...]:
    """The KV heads of the model, all ranks together, and those of its draft model where it has
    other ones."""
    heads = [config.model_config.get_total_num_kv_heads()]
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None and str(config.speculative_config.method) in CACHED_DRAFTS:
        heads.append(draft.get_total_num_kv_heads())
    return tuple(dict.fromkeys(heads))
