"""Pipeline stages of a hybrid that have other kinds of layers: what each registers, of the groups
that vLLM gives it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvspray_vllm import KVSprayConnector, layout
from kvspray_vllm.settings import Settings

BLOCKS, WINDOW = 6, 80
GET_MODEL_CLS = "vllm.model_executor.model_loader.utils.get_model_cls"
SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
MODEL: dict[str, FullAttentionSpec | SlidingWindowSpec] = {
    f"layers.{i}": FullAttentionSpec(**SIZES)
    if i % 3 == 2
    else SlidingWindowSpec(**SIZES, sliding_window=WINDOW)
    for i in range(6)
}


class AttentionLayer(AttentionLayerBase):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise AssertionError("the engine's configuration has it")


class Stage:
    """A worker's connector with those layers of the model, as far as registering needs it, and what
    it has registered."""

    def __init__(self, names: Sequence[str], rank: layout.Ranks, backend: str = "CPU_ATTN") -> None:
        groups = planning._project_kv_cache_groups_to_worker(
            planning._get_kv_cache_groups_uniform_page_size(MODEL),
            {name: MODEL[name] for name in names},
        )
        order = KVCacheLayout["LBHNC"]
        width = max(len(g.layer_names) for g in groups)
        memory = torch.zeros(
            width * BLOCKS * groups[0].kv_cache_spec.page_size_bytes, dtype=torch.int8
        )
        self.caches: dict[str, torch.Tensor] = {}
        for g in groups:
            if g.layer_names:
                layer, block, *_ = compute_layout_strides(
                    g.kv_cache_spec, BLOCKS, len(g.layer_names), order
                )
                tensor = KVCacheTensor(memory.numel(), g.layer_names, layer, block)
                self.caches |= zip(
                    g.layer_names,
                    create_kv_cache_views(memory, g.kv_cache_spec, BLOCKS, order, tensor),
                    strict=True,
                )
        model = SimpleNamespace(
            served_model_name="m", model="m", quantization=None, dtype=torch.bfloat16,
            use_mla=False, get_head_size=lambda: 32, get_total_num_kv_heads=lambda: 2,
            get_total_num_hidden_layers=lambda: len(MODEL), hf_text_config=SimpleNamespace(
            to_dict=dict), multimodal_config=None,
        )  # fmt: skip
        self.c = c = object.__new__(KVSprayConnector)
        c._settings, c._ranks, c.region = Settings.parse({"weights": "w"}), rank, None
        c._generation = c._adapters = None
        c._kv_cache_config = KVCacheConfig(BLOCKS, [], groups)
        c._flag_of = layout.flag_indices(c._kv_cache_config)
        c._vllm_config = SimpleNamespace(  # type: ignore[assignment]
            cache_config=SimpleNamespace(kv_cache_layout=order, cache_dtype="auto", block_size=32),
            model_config=model, speculative_config=None,
            device_config=SimpleNamespace(device_type="cpu"),
            compilation_config=SimpleNamespace(
                static_forward_context={name: AttentionLayer(backend) for name in names}
            ),
        )  # fmt: skip
        self.flags: dict[str, int] = {}
        self.registered: list[tuple[Any, dict[str, Any]]] = []
        c._worker = SimpleNamespace(  # type: ignore[assignment]
            set_flags=lambda flags, _: self.flags.update(flags), adapter_loaded=None,
        )  # fmt: skip
        c._worker_client = SimpleNamespace(  # type: ignore[assignment]
            process_memory=lambda addr, nbytes: SimpleNamespace(
                kind="process", addr=addr, nbytes=nbytes
            ),
            register=lambda regions, described: self.registered.append((regions, described)),
        )
        try:
            # No class of a model comes with a configuration that is made up.
            with mock.patch(GET_MODEL_CLS, lambda config: torch.nn.Module):
                c.register_kv_caches(self.caches)
        finally:
            if c._generation is not None:
                c._generation.close()
            if c._adapters is not None:
                c._adapters.close()

    @property
    def layout(self) -> dict[str, Any]:
        ((_, described),) = self.registered
        return described


NAMES = tuple(MODEL)


def test_a_stage_registers_groups_of_which_it_has_no_layer() -> None:
    whole, first, last = (
        Stage(NAMES, layout.Ranks()),
        Stage(NAMES[:5], layout.Ranks(0, 2)),
        Stage(NAMES[5:], layout.Ranks(1, 2)),
    )
    of = lambda s: [[layer["name"] for layer in g["layers"]] for g in s.layout["groups"]]  # noqa: E731
    assert of(whole) == [
        ["layers.0", "layers.3"],
        ["layers.1", "layers.4"],
        ["layers.2", "layers.5"],
    ]
    assert of(first) == [["layers.0", "layers.3"], ["layers.1", "layers.4"], ["layers.2"]]
    assert of(last) == [[], [], ["layers.5"]]
    for g, want in zip(last.layout["groups"], whole.layout["groups"], strict=True):
        # Strategy, parameters, window, and the size of its block table.
        assert g | {"layers": []} == want | {"layers": []}
    assert [g["params"].get("window") for g in last.layout["groups"]] == [WINDOW, WINDOW, None]
    # The fingerprint is of the model, and no stage's.
    assert whole.layout["identity"] == first.layout["identity"] == last.layout["identity"]
    assert (
        last.layout["identity"]["groups"] == f"FullAttentionSpec,SlidingWindowSpec:{WINDOW}"
        and last.layout["identity"]["backoff"] == "1"
    )
    # Flags are those of the stage's own layers, from 0 on.
    assert last.flags == {"layers.5": 0}
    assert first.flags == {name: i for i, name in enumerate(n for g in of(first) for n in g)}
    for s in (whole, first, last):
        assert {
            layer["name"]: layer["index"] for g in s.layout["groups"] for layer in g["layers"]
        } == s.flags


def test_what_cannot_be_served_is_refused_by_stages_without_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("layers.0", "layers.1", "layers.3", "layers.4"):
        monkeypatch.setitem(
            MODEL, name, SlidingWindowSpec(**SIZES, sliding_window=WINDOW, extra_retained_tokens=1)
        )
    with pytest.raises(layout.Unsupported, match="extra_retained_tokens"):
        Stage(NAMES[5:], layout.Ranks(1, 2))


def test_the_specification_of_a_group_is_that_of_any_of_its_layers() -> None:
    a, b = (
        SlidingWindowSpec(**SIZES, sliding_window=64),
        SlidingWindowSpec(**SIZES | {"head_size": 64}, sliding_window=64),
    )
    many = KVCacheGroupSpec(
        [], UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": a, "b": b})
    )
    assert layout.spec_of(many, "b") is b and layout.spec_of(many) in (a, b)
    assert layout.spec_of(KVCacheGroupSpec([], a)) is a


def test_packing_is_asked_of_the_model() -> None:
    def packing(device: str, mla: bool) -> str:
        model = SimpleNamespace(use_mla=mla, dtype=torch.bfloat16, get_head_size=lambda: 32)
        cache = SimpleNamespace(block_size=32, cache_dtype="auto")
        return layout.cpu_packing(
            SimpleNamespace(
                model_config=model,
                cache_config=cache,
                device_config=SimpleNamespace(device_type=device),
            )
        )  # type: ignore[arg-type]

    assert packing("cpu", False) != ""
    assert packing("cpu", True) == packing("cuda", False) == ""
