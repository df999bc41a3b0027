"""What follows from vLLM's configuration for its KV cache: which engines are supported, and the
identity that prefill and decode compare. What pages hold is in strategies.py, and where they lie in
caches.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvspray import portable
from kvspray_vllm.speculation import check_speculation, draft_in_cache
from kvspray_vllm.states import identity_of_states, is_state
from kvspray_vllm.strategies import TRANSPOSED
from kvspray_vllm.strategies import Ranks as Ranks
from kvspray_vllm.strategies import Unsupported as Unsupported
from kvspray_vllm.versions import CAPABILITIES, numerics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


@contextlib.contextmanager
def naming(config: VllmConfig) -> Iterator[None]:
    """Refusals in it name the model, too."""
    try:
        yield
    except Unsupported as err:
        raise Unsupported(f"{err} (model {config.model_config.model})") from err


def check_config(config: VllmConfig) -> None:
    """Refuses at start what would fail in a request."""
    p = config.parallel_config
    for name, value in (
        ("decode_context_parallel_size", p.decode_context_parallel_size),
        ("prefill_context_parallel_size", p.prefill_context_parallel_size),
    ):
        if value != 1:
            raise Unsupported(
                f"kvspray: {name} is {value}; which tokens a rank has is not known to kvspray, set "
                "it to 1"
            )
    # Two micro-batches take turns in the layers, and a layer's flag would come with only half of
    # the step computed. ubatch_size turns them on, too, and vLLM's own property has both.
    if p.use_ubatching:
        raise Unsupported(
            f"kvspray: use_ubatching is on (enable_dbo {p.enable_dbo}, "
            f"ubatch_size {p.ubatch_size}); a layer's flag would cover half a step, "
            "turn dual batch overlap and microbatches off"
        )
    if config.speculative_config is not None:
        check_speculation(config)
    device = config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise Unsupported(f"kvspray: device is {device}; engines on cpu and cuda are served")
    # After a sleep the addresses map other pages, while the sidecar still holds the first ones.
    if device == "cuda" and config.model_config.enable_sleep_mode and not CAPABILITIES.sleeps:
        raise Unsupported(
            "kvspray: enable_sleep_mode is on, and this vLLM does not call a connector before it "
            "frees the KV cache; start without --enable-sleep-mode, or use vLLM 0.33 or later"
        )
    # vLLM 0.33 then drops nearly all tokens that a connector offers, and reports nothing.
    if config.aux_output_config.enable_return_routed_experts:
        raise Unsupported(
            "kvspray: enable_return_routed_experts is on, and vLLM loads nothing for which it has "
            "no routed experts; start without --enable-return-routed-experts, or without this "
            "connector"
        )
    if config.model_config.is_encoder_decoder:
        raise Unsupported("kvspray: the model is_encoder_decoder; such models are not supported")
    check_images(config)


def check_images(config: VllmConfig) -> None:
    """vLLM names an image by a digest of its content. Without both of its caches it names images by
    a count instead, so two images, in one engine or in two, may have one name."""
    media = config.model_config.multimodal_config
    if media is None or (media.language_model_only and not media.enable_mm_embeds):
        return
    if media.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching:
        raise Unsupported(
            "kvspray: mm_processor_cache_gb is 0 and enable_prefix_caching is off; vLLM then "
            "numbers the images of prompts instead of hashing them, and prompts with different "
            "images could be taken for each other; change one of the two, or set "
            "language_model_only"
        )


def check_clearing(config: VllmConfig, kv: KVCacheConfig) -> None:
    """The second model runner clears a step's new blocks before it calls its connector, so before
    the source epoch moves: blocks that are being sent could be sent as zeros. The first one calls
    the connector before it clears."""
    clears = kv.needs_kv_cache_zeroing and config.use_v2_model_runner
    if clears and config.kv_transfer_config.is_kv_producer:
        raise Unsupported(
            f"kvspray: kv_role is {config.kv_transfer_config.kv_role}, and this cache is cleared "
            "by the second model runner before a connector is called; set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or kv_role to kv_consumer"
        )


def ranks_of(config: VllmConfig) -> Ranks:
    """The rank of this worker; its process groups are there before a connector is made."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    p = config.parallel_config
    return Ranks(
        get_pp_group().rank_in_group,
        p.pipeline_parallel_size,
        get_tp_group().rank_in_group,
        p.tensor_parallel_size,
    )


def flag_indices(kv: KVCacheConfig) -> dict[str, int]:
    """The flag of each layer: groups in order, layers in order, as the sidecar flattens them."""
    out: dict[str, int] = {}
    for group in kv.kv_cache_groups:
        for name in group.layer_names:
            out.setdefault(name, len(out))
    return out


def spec_of(group: KVCacheGroupSpec, layer: str | None = None) -> KVCacheSpec:
    """The specification of a layer of a cache group, or of any. A pipeline stage that has no layer
    of a group has its specification all the same, as groups are made of the whole model's
    layers."""
    specs: dict[str, KVCacheSpec] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is None:
        return group.kv_cache_spec
    return specs[layer] if layer is not None else next(iter(specs.values()))


def windows_of(kv: KVCacheConfig) -> tuple[int, ...]:
    """Window of each cache group in tokens; vLLM frees blocks before it. 0: no window."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    specs = [spec_of(g) for g in kv.kv_cache_groups]
    return tuple(
        spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs
    )


def state_groups_of(kv: KVCacheConfig) -> tuple[int, ...]:
    """The cache groups of recurrent states."""
    return tuple(i for i, g in enumerate(kv.kv_cache_groups) if is_state(spec_of(g)))


def backoff_of(windows: Sequence[int], states: bool = False) -> int:
    """How many tokens at a prompt's end do not move. vLLM computes the last token of a prompt again
    where all of it was loaded, and has then given up the block that only this token's window still
    reaches; where one token less was loaded it has not. From a recurrent state of that token it
    could not compute the token again."""
    return int(states or any(windows))


def cpu_packing(config: VllmConfig) -> str:
    """The CPU backend packs pages for the vector units of its host: another packing cannot read its
    pages. MLA's are not packed, and those of other devices are not for their hosts. Derived from
    the model, because a pipeline stage may lack the layers that show it."""

    m, cache = config.model_config, config.cache_config
    if config.device_config.device_type != "cpu" or m.use_mla:
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = str(_get_attn_isa(m.dtype, cache.block_size, m.get_head_size(), str(cache.cache_dtype)))
    return TRANSPOSED if isa in ("vec", "vec16") else isa


def _short(text: str) -> str:
    """Long values are replaced by their hash; short ones stay readable."""
    return text if len(text) <= 512 else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def images_of(config: VllmConfig) -> str:
    """A digest of the settings that change the KV of an image and that are neither in the digest of
    an image nor in that of the weights; empty: all are the defaults. The identity has the text
    model's configuration in a field of its own."""
    m = config.model_config
    media = m.multimodal_config
    if media is None:
        return ""
    settings: dict[str, Any] = {
        "mm_processor_kwargs": media.mm_processor_kwargs,
        "mm_encoder_attn_dtype": media.mm_encoder_attn_dtype,
        "video_pruning": media.video_pruning_rate
        and (media.video_pruning_rate, getattr(media, "video_pruning_method", "evs")),
    }
    if m.hf_overrides:
        settings["hf_config"] = {
            part: _portable(of) if isinstance(of, dict) else of
            for part, of in _portable(m.hf_config.to_dict()).items()
        }
    settings = {k: v for k, v in settings.items() if v}
    return _digest(settings) if settings else ""


def _portable(hf: dict[str, Any]) -> dict[str, Any]:
    """Without names and paths, which differ from host to host for the same weights."""
    host = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
    return {k: v for k, v in hf.items() if k not in host}


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identity_of(config: VllmConfig, kv: KVCacheConfig, weights: str) -> dict[str, str]:
    """What must be equal between prefill and decode: anything that changes the bytes of a token's
    KV. All of it is of the whole model: the sidecar compares stages with one another that have
    other layers."""
    windows, states = windows_of(kv), identity_of_states(kv)
    kinds = {
        type(spec_of(g)).__name__ + (f":{window}" if window else "")
        for g, window in zip(kv.kv_cache_groups, windows, strict=True)
    }
    return model_identity(config, weights) | {
        "groups": ",".join(sorted(kinds)),
        "backoff": str(backoff_of(windows, bool(states))),
        **({"states": states} if states else {}),
    }


def model_identity(config: VllmConfig, weights: str) -> dict[str, str]:
    """The part of the identity that follows from vLLM's configuration alone."""
    m = config.model_config
    hf = _portable(m.hf_text_config.to_dict())
    rope = {k: v for k, v in hf.items() if "rope" in k}
    return {
        "engine": "vllm",
        "numerics": numerics(),
        "model_config": _digest(hf),
        "weights": weights,
        # Of one checkpoint several may be made while it is loaded. What kernels compute it with is
        # no part of that.
        "quantization": str(m.quantization or "").removesuffix("_marlin"),
        "dtype": str(m.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "layers": str(m.get_total_num_hidden_layers()),
        "kv_heads": str(m.get_total_num_kv_heads()),
        "head_size": str(m.get_head_size()),
        "rope": _short(json.dumps(rope, sort_keys=True, default=str)),
        "packing": cpu_packing(config),
        "byte_order": sys.byteorder,
        "speculative": draft_in_cache(config.speculative_config),
        **({"images": images} if (images := images_of(config)) else {}),
    }


def portable_identity(config: VllmConfig, kv: KVCacheConfig, weights: str) -> dict[str, str]:
    """The identity that an engine of another kind has for the same cache; see kvspray.portable.
    Raises Unsupported."""
    m, p = config.model_config, config.parallel_config
    dtype = str(m.dtype).removeprefix("torch.")
    cache = str(config.cache_config.cache_dtype)
    groups = [type(spec_of(g)).__name__ for g in kv.kv_cache_groups]
    # A window, or a mask, that vLLM applies to layers whose blocks it keeps all.
    masks = {
        k
        for g in kv.kv_cache_groups
        for k in ("sliding_window", "attention_chunk_size", "non_causal")
        if getattr(spec_of(g), k, None)
    }
    packing = cpu_packing(config)
    load = config.load_config.load_format
    settings = {
        "quantization": m.quantization,
        "quantization_config": m.quantization_config,
        "kv_cache_dtype": "" if cache in ("auto", dtype) else cache,
        "hf_overrides": m.hf_overrides,
        # The configuration of the checkpoint is what is compared, and this one may be another.
        "hf_config_path": m.hf_config_path,
        "config_format": _unless(m.config_format, "auto", "hf"),
        "model_impl": _unless(m.model_impl, "auto", "vllm"),
        "load_format": _unless(load, *portable.LOAD_FORMATS),
        "speculative_config": config.speculative_config and config.speculative_config.method,
        "enable_lora": config.lora_config is not None,
        "pipeline_parallel_size": p.pipeline_parallel_size if p.pipeline_parallel_size > 1 else 0,
        "the cache's groups": "" if groups == ["FullAttentionSpec"] else ", ".join(groups),
        "the cache's attention": ", ".join(sorted(masks)),
        "the packing of pages for this host": "" if packing in ("", TRANSPOSED) else packing,
        "the settings for images": images_of(config),
    }
    try:
        return portable.identity(
            m.model,
            weights=weights,
            dtype=dtype,
            settings=settings,
            revision=m.revision,
            cache=config.load_config.download_dir,
        )
    except portable.NotPortable as err:
        raise Unsupported(str(err)) from err


def _unless(value: object, *same: str) -> str:
    """A setting that changes KV, unless it is one of those that do not."""
    text = str(getattr(value, "value", value))
    return "" if text in same else text


def portable_layers(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with layers under the names that all engines have for them."""
    from vllm.model_executor.models.utils import extract_layer_index

    return [
        group
        | {
            "layers": [
                x | {"name": portable.layer_name(extract_layer_index(x["name"]))}
                for x in group["layers"]
            ]
        }
        for group in groups
    ]
