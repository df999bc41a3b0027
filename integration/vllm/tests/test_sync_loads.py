# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM does with a synchronous load that fails: tokens of which a connector says that they come from elsewhere within the
very step that computes on them.

Each test but the last is a reason why such a load is written to spare blocks, why what lacks is taken out of the prefix cache, and why there is
none with async scheduling or vLLM's second model runner (docs/design.md). Should one fail with a later vLLM, that reason is gone.
"""

from __future__ import annotations

import json
import pathlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvspray_vllm import KVSprayConnector, connector

BLOCK, PROMPT, TOKEN, GARBAGE = 32, 100, 7, 666
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip


class Synchronous(KVConnectorBase_V1, SupportsHMA):
    """All of the first prompt but its last token comes from elsewhere, in the step that computes that one."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        first = request.request_id == "first" and not request.num_preemptions
        return (request.num_tokens - 1 - num_computed_tokens if first else 0), False

    def update_state_after_alloc(self, *args: Any) -> None: ...
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, *args: Any) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@pytest.fixture
def make(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    module = ModuleType("kvspray_test_synchronous")
    module.Synchronous = Synchronous  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    init_none_hash(sha256)

    def scheduler(cls: type[Scheduler] = Scheduler) -> Scheduler:
        config = VllmConfig(
            model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", seed=1),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=2048, enable_chunked_prefill=True, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="Synchronous", kv_connector_module_path=module.__name__, kv_role="kv_both", kv_load_failure_policy="recompute"
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.scheduler_config.async_scheduling = cls is AsyncScheduler
        config.cache_config.num_gpu_blocks = 64
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)])
        return cls(
            vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config), block_size=BLOCK,
            hash_block_size=BLOCK, log_stats=False,
        )  # fmt: skip

    return scheduler


def add(s: Scheduler, name: str) -> Request:
    r = Request(
        request_id=name, prompt_token_ids=list(range(PROMPT)), sampling_params=SamplingParams(max_tokens=8, ignore_eos=True, temperature=0),
        pooling_params=None, block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip
    s.add_request(r)
    return r


def computed(s: Scheduler, step: SchedulerOutput, token: int, lacking: set[int] | None = None) -> None:
    names = list(step.num_scheduled_tokens)
    s.update_from_output(
        step,
        ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=[[token]] * len(names),
            kv_connector_output=KVConnectorOutput(invalid_block_ids=lacking or set()),
        ),
    )  # fmt: skip


def blocks(s: Scheduler, name: str) -> list[int]:
    return list(s.kv_cache_manager.get_block_ids(name)[0])


def test_the_next_step_computes_in_the_same_blocks_whoever_may_still_write_them(make: Any) -> None:
    """A step that ends before a load into these blocks is fenced would leave vLLM and a sidecar writing the same ones: it would have to wait for the
    fence, that is, for as long as a sidecar hangs, and nobody else would be served meanwhile."""
    s = make()
    r = add(s, "first")
    step = s.schedule()
    assert step.has_sync_kv_loads and step.num_scheduled_tokens == {"first": 1}
    had = set(blocks(s, "first"))
    computed(s, step, GARBAGE, lacking=had)
    step = s.schedule()
    assert step.num_scheduled_tokens == {"first": PROMPT} and set(blocks(s, "first")) == had and r.status == RequestStatus.RUNNING
    # Nor can the blocks be called lacking for longer: what a step computes itself is not asked about.
    computed(s, step, GARBAGE, lacking=had)
    assert list(r.output_token_ids) == [GARBAGE]


def test_an_abort_in_that_step_leaves_what_was_never_loaded_in_the_prefix_cache(make: Any) -> None:
    s = make()
    add(s, "first")
    step = s.schedule()
    had = set(blocks(s, "first"))
    s.finish_requests(["first"], RequestStatus.FINISHED_ABORTED)
    computed(s, step, GARBAGE, lacking=had)
    add(s, "second")
    hit = PROMPT // BLOCK * BLOCK
    assert s.schedule().num_scheduled_tokens == {"second": PROMPT - hit} and set(blocks(s, "second")[: hit // BLOCK]) <= had


def test_with_async_scheduling_a_token_made_of_it_is_delivered(make: Any) -> None:
    s = make(AsyncScheduler)
    r = add(s, "first")
    step = s.schedule()
    following = s.schedule()  # before anything is known of the step before
    assert following.num_scheduled_tokens == {"first": 1}
    computed(s, step, TOKEN, lacking=set(blocks(s, "first")))
    computed(s, following, GARBAGE)
    assert list(r.output_token_ids) == [GARBAGE]


def test_the_second_model_runner_goes_on_behind_what_was_not_loaded() -> None:
    """It computes positions from a count on the device, to which each step adds. That vLLM has taken tokens back is written to its mirror only."""
    runner = pytest.importorskip("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    written: list[Any] = []
    device = SimpleNamespace(stage_write_elem=lambda *a: written.append(a), stage_write=lambda *a: written.append(a), gpu=torch.tensor([PROMPT]))
    states = SimpleNamespace(
        num_computed_tokens=device, num_computed_tokens_np=np.array([PROMPT]), req_id_to_index={"first": 0},
        prefill_len=SimpleNamespace(np=np.array([PROMPT])), num_computed_prefill_tokens=np.array([PROMPT]),
    )  # fmt: skip
    step = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=["first"], num_computed_tokens=[0], new_block_ids=[None]), new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )  # fmt: skip
    runner.update_requests(SimpleNamespace(req_states=states), step)
    assert states.num_computed_tokens_np[0] == 0 and device.gpu[0] == PROMPT and not written


class Old:
    """A base class that has nothing to say that spare blocks are free."""


@pytest.mark.parametrize(
    "why", ["", "runner", "runner unknown", "async", "unknown", "ranks", "dp", "fail", "clears", "layers", "results", "old", "speculation"]
)
def test_which_engines_wait(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    c = object.__new__(KVSprayConnector)
    spec = SimpleNamespace(page_size_bytes=1000, **({"kv_cache_specs": {}} if why == "layers" else {}))
    c._kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["l0", "l1"])])  # type: ignore[assignment]
    c._clears_blocks = why == "clears"
    c._kv_transfer_config = SimpleNamespace(kv_load_failure_policy="fail" if why == "fail" else "recompute")  # type: ignore[assignment]
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=2 if why == "ranks" else 1, data_parallel_size=2 if why == "dp" else 1),
        use_v2_model_runner=why == "runner", max_concurrent_batches=2 if why == "async" else 1,
        speculative_config=object() if why == "speculation" else None,
    )  # fmt: skip
    if why == "runner unknown":
        del config.use_v2_model_runner
    if why == "unknown":
        del config.max_concurrent_batches
    if why == "results":
        monkeypatch.setattr(connector, "HAS_TRANSFER_RESULTS", False)
    if why == "old":
        monkeypatch.setattr(connector, "KVConnectorBase_V1", Old)
    assert c._sync_block(config) == (0 if why else 2000)  # type: ignore[arg-type]
