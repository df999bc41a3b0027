"""Every method of SGLang that writes parameters ends the name of the weights. Its sources have no
other."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

import pytest  # noqa: E402
import writers  # noqa: E402

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

# Models and layers load a checkpoint, or compute.
LOOKED_AT = (
    "managers", "model_executor", "mem_cache", "weight_sync", "speculative", "entrypoints",
    "model_loader", "utils", "eplb", "elastic_ep",
)  # fmt: skip

# Functions that write parameters, and what calls them, or why no name ends.
KNOWN = {
    "WeightChecker._reset_tensors": "watched",
    "WeightChecker._snapshot": "copies them",
    "QuantizedRLModelLoader.rebinding_and_load_weights": "update_weights...",
    "ShardedStateLoader.load_model": "the start",
    "RemoteModelLoader._load_model_from_remote_kv": "the start",
    "_restore_tensor": "moves them between devices",
    "stage_module_for_post_load": "moves them between devices",
    "default_weight_loader": "load_weights of a model",
    "composed_weight_loader": "load_weights of a model",
    "composed_loader": "load_weights of a model",
    "initialize_capture_safe_weights": "the start, of random weights",
    "initialize_dummy_weights": "the start, of random weights",
    "OffloaderV1.maybe_offload_to_cpu": "moves them between devices",
    "_ShmCpuParamOffloader.__init__": "moves them between devices",
    "update_param": "moves them between devices",
    "_move_param_to_cpu": "moves them between devices",
    "gather_draft_embedding": "a draft's, at the start",
    "EagleDraftWorker.init_lm_head": "a draft's, at the start",
    "CacheOperation.__init__": "no parameter",
}


def test_no_other_function_writes_parameters() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    found = writers.find(pathlib.Path(spec.origin).parent / "srt", LOOKED_AT)
    assert "WeightChecker._reset_tensors" in found, "the search finds nothing"
    unknown = {f"{name} in {path}" for name, path in found.items() if name not in KNOWN}
    assert not unknown, "what calls them belongs into WRITERS of names.py, and they into KNOWN"
