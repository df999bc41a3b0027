"""Layers with recurrent states: what their pages are registered as, what is refused, and how the
scheduler's side keeps prefill and decode at the same token. No engine, no sidecar."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import BLOCK, DECODE, LOG, XFER, Engine, Request, concurrent, fake_hash, prefill_first
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    get_conv_state_layout,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvspray_vllm import caches, layout, pages, states
from kvspray_vllm.scheduler import SchedulerSide
from kvspray_vllm.settings import Settings
from kvspray_vllm.strategies import Unsupported

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = MambaStateShapeCalculator
BLOCKS = 6
ALONE = layout.Ranks()


def spec(
    shapes: Any, dtypes: tuple[torch.dtype, ...], kind: Backend, mode: str = "none", **more: Any
) -> MambaSpec:
    return MambaSpec(
        block_size=4096, shapes=shapes, dtypes=dtypes, mamba_type=kind, mamba_cache_mode=mode,
        **more,
    )  # fmt: skip


def gdn(tp: int = 1, mode: str = "none", dtypes: Any = (BF16, FP32)) -> MambaSpec:
    return spec(
        SHAPES.gated_delta_net_state_shape(tp, 4, 8, 16, 32, 4), dtypes, Backend.GDN_ATTN, mode
    )


def mamba2(tp: int = 1, groups: int = 2) -> MambaSpec:
    return spec(
        SHAPES.mamba2_state_shape(tp, 8 * 32, groups, 8, 32, 48, 4), (BF16, BF16), Backend.MAMBA2
    )


@pytest.fixture(params=["SD", "DS"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield request.param
    get_conv_state_layout.cache_clear()


def kind(
    of: MambaSpec, ranks: layout.Ranks = ALONE, groups: int = 0, device: str = "cuda"
) -> tuple[str, dict[str, int]]:
    got = states.state_kind(of, of.mamba_type.get_class().get_name(), ranks, groups, device)
    assert not got.ordered and not got.paged
    return got.strategy, got.params


def test_kinds_of_states(order: str) -> None:
    conv = {"conv_len": 3, "conv_bytes": 2, "conv_order": int(order == "DS")}
    alone = conv | {"tp_rank": 0, "tp_size": 1}
    whole = {"k_heads": 4, "k_dim": 16, "v_heads": 8, "v_dim": 32, "state_bytes": 4}
    assert kind(gdn()) == ("gdn_state", alone | whole)
    assert kind(gdn(), device="cpu") == ("gdn_state", alone | whole | {"state_order": 1})
    of_rank = conv | {"tp_rank": 1, "tp_size": 4}
    assert kind(gdn(4), layout.Ranks(tp=1, tp_size=4)) == ("gdn_state", of_rank | whole)
    kda = spec(SHAPES.kda_state_shape(2, 4, 32), (BF16, FP32), Backend.GDN_ATTN)
    assert kind(kda, layout.Ranks(tp=1, tp_size=2)) == (
        "gdn_state",
        conv | {"tp_rank": 1, "tp_size": 2, "k_heads": 4, "k_dim": 32, "v_heads": 4, "v_dim": 32,
                "state_bytes": 4},
    )  # fmt: skip
    jamba = spec(SHAPES.mamba1_state_shape(2, 512, 16, 4), (BF16, FP32), Backend.MAMBA1)
    assert kind(jamba, layout.Ranks(tp=1, tp_size=2)) == (
        "mamba1_state",
        conv | {"tp_rank": 1, "tp_size": 2, "v_heads": 512, "v_dim": 1, "k_dim": 16,
                "state_bytes": 4},
    )  # fmt: skip
    lfm2 = spec(SHAPES.short_conv_state_shape(2, 256, 4), (BF16,), Backend.SHORT_CONV)
    assert kind(lfm2, layout.Ranks(tp=1, tp_size=2)) == (
        "short_conv_state",
        conv | {"tp_rank": 1, "tp_size": 2, "v_heads": 256, "v_dim": 1},
    )
    minimax = spec(SHAPES.linear_attention_state_shape(8, 2, 32), (FP32,), Backend.LINEAR)
    assert kind(minimax, layout.Ranks(tp=1, tp_size=2)) == (
        "gdn_state",
        {"tp_rank": 1, "tp_size": 2, "k_heads": 8, "k_dim": 32, "v_heads": 8, "v_dim": 32,
         "state_bytes": 4, "part": 2, "conv_len": 1},
    )  # fmt: skip


def test_groups_of_mamba2(order: str) -> None:
    """B and C of a model with one group lie on every rank; with as many as ranks, one on each."""
    four = layout.Ranks(tp=3, tp_size=4)
    for groups, of, said in ((2, layout.Ranks(), 0), (8, four, 0), (1, four, 1), (4, four, 4)):
        name, params = kind(mamba2(of.tp_size, groups), of, said)
        assert (name, params["k_heads"], params["k_dim"]) == ("mamba2_state", groups, 48)
        assert (params["v_heads"], params["v_dim"], params["state_bytes"]) == (8, 32, 2)
    with pytest.raises(Unsupported, match="one group of a Mamba 2 layer"):
        kind(mamba2(4, 1), four, 0)


def test_states_that_are_not_known_are_refused() -> None:
    five = spec(
        SHAPES.append_replayssm_ring(
            SHAPES.mamba2_state_shape(1, 256, 2, 8, 32, 48, 4), 2, 1, 8, SimpleNamespace()
        ),  # type: ignore[arg-type]
        (BF16, BF16, BF16, FP32, BF16),
        Backend.MAMBA2,
    )
    with pytest.raises(Unsupported, match="5 states .* without --use-replayssm"):
        kind(five)
    with pytest.raises(Unsupported, match="backend of a recurrent state is NEW_ATTN"):
        states.state_kind(gdn(), "NEW_ATTN", layout.Ranks(), 0, "cuda")
    with pytest.raises(Unsupported, match="has 1 channels where its recurrent state has 0"):
        odd = spec(((3, 257), (8, 32, 16)), (BF16, FP32), Backend.GDN_ATTN)
        kind(odd)
    with pytest.raises(Unsupported, match="whole state on each of 2 ranks"):
        copied = spec(gdn(2).shapes, (BF16, FP32), Backend.GDN_ATTN, tp_replicated=True)
        kind(copied, layout.Ranks(tp=0, tp_size=2))


def hybrid(of: MambaSpec) -> KVCacheConfig:
    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=BF16)
    groups = [KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["s"], of)]
    return KVCacheConfig(BLOCKS, [], groups)


def test_where_a_state_lies() -> None:
    """A page is as wide as one of attention, and a state takes its front."""
    wide = spec(gdn().shapes, (BF16, FP32), Backend.GDN_ATTN, page_size_padded=32768)
    raw = torch.zeros(BLOCKS * 32768, dtype=torch.int8)
    (view,) = create_kv_cache_views(
        raw, wide, BLOCKS, KVCacheLayout.LBNHC, KVCacheTensor(len(raw), ["s"], len(raw), 32768)
    )
    kv = hybrid(wide)
    kv = KVCacheConfig(BLOCKS, [], kv.kv_cache_groups[1:])
    got = caches.describe(
        kv, {"s": view}, {"s": "GDN_ATTN"}, kv_heads=[2], ranks=layout.Ranks(), packing=""
    )
    (group,) = got.groups
    (layer,) = group["layers"]
    assert (group["strategy"], group["tokens_per_block"]) == ("gdn_state", 4096)
    assert (layer["base"], layer["block_stride"]) == (0, 32768)
    assert layer["page_bytes"] == 3 * (2 * 4 * 16 + 8 * 32) * 2 + 8 * 32 * 16 * 4
    # A pipeline stage without such layers still has the group's tables.
    empty = caches.describe(
        hybrid(wide), {}, {}, kv_heads=[2], ranks=layout.Ranks(), packing="", flags={}
    )
    assert [g["strategy"] for g in empty.groups] == ["packed_nhd", "gdn_state"]


def test_the_identity_has_what_sizes_do_not_show() -> None:
    of = states.identity_of_states
    assert of(hybrid(gdn())) == of(hybrid(gdn(tp=2))) == "GDN_ATTN bfloat16 float32 none"
    assert of(KVCacheConfig(BLOCKS, [], hybrid(gdn()).kv_cache_groups[:1])) == ""
    names = {
        of(hybrid(s))
        for s in (
            gdn(), gdn(mode="align"), gdn(dtypes=(torch.float16, FP32)), gdn(dtypes=(BF16, BF16)),
            spec(gdn().shapes, (BF16, FP32), Backend.MAMBA2),
        )
    }  # fmt: skip
    assert len(names) == 5


def test_what_is_not_served_of_models_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = SimpleNamespace(speculative_config=None)
    ngram: Any = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    mtp: Any = SimpleNamespace(speculative_config=SimpleNamespace(method="mtp"))
    for config in (plain, ngram):
        states.check_states(config, hybrid(gdn()))
    states.check_states(mtp, KVCacheConfig(BLOCKS, [], hybrid(gdn()).kv_cache_groups[:1]))
    with pytest.raises(Unsupported, match="method is ngram.*turn enable_prefix_caching off"):
        states.check_states(ngram, hybrid(gdn(mode="align")))
    with pytest.raises(Unsupported, match="method is mtp.*use ngram.*without speculation"):
        states.check_states(mtp, hybrid(gdn()))
    monkeypatch.setattr(states, "CAPABILITIES", SimpleNamespace(states=False))
    with pytest.raises(Unsupported, match="from vLLM 0.33 on"):
        states.check_states(plain, hybrid(gdn()))


def test_refusals_name_the_model() -> None:
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method="mtp"),
        model_config=SimpleNamespace(model="Qwen/Qwen3-Next"),
    )
    with pytest.raises(Unsupported, match="speculation .model Qwen/Qwen3-Next"):
        with layout.naming(config):
            states.check_states(config, hybrid(gdn()))


def test_which_states_the_store_serves() -> None:
    """A hit without the state of its last token would be a wrong answer."""
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(
            prefix_match_unit=None, prefix_caching_hash_algo="sha256_cbor"
        ),
    )  # fmt: skip
    kept = hybrid(dataclasses.replace(gdn(mode="align"), block_size=32))
    pages.check_store(config, kept)
    for kv, want in (
        (hybrid(gdn()), "mamba_cache_mode is none.*set enable_prefix_caching"),
        (hybrid(gdn(mode="align")), r"have \[32, 4096\] tokens.*set store to false"),
        (KVCacheConfig(BLOCKS, [], kept.kv_cache_groups[1:]), r"has 1 cache group\(s\)"),
        (KVCacheConfig(BLOCKS, [], [*kept.kv_cache_groups, *kept.kv_cache_groups[:1]]), "has 3"),
    ):
        with pytest.raises(Unsupported, match=want):
            pages.check_store(config, kv)
    config.cache_config.prefix_match_unit = 16
    with pytest.raises(Unsupported, match="with prefix_match_unit 16"):
        pages.check_store(config, kept)


def test_a_page_of_the_store_has_the_memory_of_all_groups() -> None:
    def group(**layer: int) -> dict[str, Any]:
        return {"params": {}, "layers": [{"region": 0, "block_stride": 100, **layer}]}

    groups = [group(base=0, page_bytes=90), group(base=0, page_bytes=96)]
    groups += [group(base=4096, page_bytes=80)]
    assert pages.pieces_of(groups) == [(0, 0, 100, 96), (0, 4096, 100, 80)]


# ---- the scheduler's side


class Prompt(Request):
    """What vLLM's requests have of a prompt."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._all_token_ids = list(self.prompt_token_ids)
        self.max_tokens, self.block_hashes = 16, []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        n = len(self._all_token_ids) // BLOCK
        self.block_hashes += [tuple(self._all_token_ids[: i * BLOCK]) for i in range(1, n + 1)]


class Hybrid(Engine):
    """An engine of one cache group of states and one of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = SchedulerSide(
            Settings(), self.scheduler_shim, [BLOCK, 4096], "engine", fake_hash, LOG, states=(1,),
            now=lambda: self.clock,
        )  # fmt: skip

    def prompt(self, req: str, n: int, kv: dict[str, Any], **more: Any) -> Any:
        r = Prompt(
            request_id=req, prompt_token_ids=list(range(n)), num_prompt_tokens=n,
            num_computed_tokens=0, kv_transfer_params=kv, status=SimpleNamespace(name="RUNNING"),
            num_output_tokens=0, **more,
        )  # fmt: skip
        self.requests[req] = r
        self.scheduler.on_new_request(r)
        return r

    def build(self, scheduled: dict[str, int], blocks: Any = ([1, 2, 3], [9])) -> Any:
        out: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=set(), scheduled_new_reqs=[],
        )  # fmt: skip
        return self.scheduler.build(out, lambda _: blocks)


@pytest.mark.parametrize("n", (3, BLOCK, BLOCK + 1, 40))
def test_prefill_computes_what_decode_loads(n: int) -> None:
    p, d = Hybrid(), Hybrid()
    before = list(range(n))
    source = p.prompt("p", n, dict(DECODE))
    # The list that came with the request may be the front end's own.
    assert p.requests["p"].prompt_token_ids is not before
    assert source.prompt_token_ids == source._all_token_ids == before[:-1]
    assert (source.num_prompt_tokens, source.max_tokens) == (n - 1, 1)
    assert len(source.block_hashes) == (n - 1) // BLOCK
    meta = p.build({"p": n - 1})
    (intent,), (gain,) = meta.intents, meta.gains
    assert (intent.tokens, gain.end) == (n - 1, n - 1)
    for mode in (prefill_first(), concurrent()):
        dest = d.prompt(f"d{mode.keys()}", n, mode)
        assert dest.prompt_token_ids == before and dest.max_tokens == 16
        got = d.scheduler._destinations[dest.request_id]
        assert (got.hash, got.tokens) == (intent.hash, n - 1)
    assert intent.hash == fake_hash(before[:-1], "", "", [])


def test_a_shared_list_of_tokens_stays_whole() -> None:
    p = Hybrid()
    tokens = list(range(20))
    for req in ("a", "b"):
        r = Prompt(
            request_id=req, prompt_token_ids=tokens, num_prompt_tokens=20, num_computed_tokens=0,
            kv_transfer_params=dict(DECODE), status=SimpleNamespace(name="RUNNING"),
        )  # fmt: skip
        p.scheduler.on_new_request(r)
        assert r.prompt_token_ids == list(range(19))
    assert tokens == list(range(20))


def test_a_prompt_of_one_token_is_computed_on_both_sides() -> None:
    p, d = Hybrid(), Hybrid()
    assert p.prompt("p", 1, dict(DECODE)).num_prompt_tokens == 1
    r = d.prompt("d", 1, prefill_first())
    assert d.scheduler.matched(r, 0) == (0, False)
    assert p.build({"p": 1}).intents == []


def test_chunks_and_hits_reach_the_token_before_the_last() -> None:
    d = Hybrid()
    r = d.prompt("d", 40, prefill_first())
    assert d.scheduler.matched(r, 0) == (39, True)
    assert d.scheduler.matched(r, 32) == (7, True)
    p = Hybrid()
    source = p.prompt("p", 40, dict(DECODE))
    ends = []
    for count in (BLOCK, BLOCK, 7):
        (gain,) = p.build({"p": count}).gains
        ends.append(gain.end)
        source.num_computed_tokens += count
    assert ends == [16, 32, 39]


def test_what_needs_its_whole_prompt_is_not_offered() -> None:
    p = Hybrid()
    for name in ("skip_reading_prefix_cache", "resumable"):
        r = p.prompt(name, 20, dict(DECODE), **{name: True})
        assert r.num_prompt_tokens == 20
        assert p.build({name: 20}).intents == []


def test_a_prompt_that_becomes_shorter_is_looked_up_again() -> None:
    """Its adapter was read while it waited, and vLLM had looked the longer prompt up."""
    p = Hybrid()
    answers = [None, None, "content"]
    p.scheduler._adapters = SimpleNamespace(
        known=lambda _: True, ask=lambda _: "reading", replaced=lambda _: False,
        content=lambda *_: answers.pop(0),
    )  # type: ignore[assignment]  # fmt: skip
    lora = SimpleNamespace(lora_name="tuned", lora_int_id=1)
    r = p.prompt("p", 20, dict(DECODE), lora_request=lora)
    assert p.scheduler.matched(r, 0) == (None, False) and r.num_prompt_tokens == 20
    assert p.scheduler.matched(r, 16) == (None, False) and r.num_prompt_tokens == 19
    assert p.scheduler.matched(r, 16) == (0, False)
    assert p.build({"p": 19}).intents[0].tokens == 19


def test_without_a_sidecar_the_whole_prompt_is_computed() -> None:
    p = Hybrid()
    p.scheduler_shim.connected = False
    r = p.prompt("p", 20, dict(DECODE))
    assert (r.num_prompt_tokens, r.max_tokens) == (20, 16)


def test_a_state_that_moves_on_is_not_sent() -> None:
    p = Hybrid()
    r = p.prompt("p", 20, dict(DECODE))
    assert not p.build({"p": 19}).lost
    r.num_computed_tokens = 19
    assert not p.build({}).lost
    # Before this step computes, or its record would come too late.
    assert p.build({"p": 1}).lost == [("p", "its recurrent states have moved on")]
    assert not p.build({"p": 1}).lost


def test_xfer_is_the_routers() -> None:
    """Both dispatch modes name the transfer."""
    d = Hybrid()
    d.prompt("d", 20, concurrent())
    assert d.scheduler_shim.asked == [(bytes.fromhex(XFER), "p:1")]
