"""What the installed vLLM must have for the connector to be right: names, signatures and shapes."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import logging
import pathlib
import pickle
import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.worker_base import WorkerBase

import kvspray_vllm
from kvspray_vllm import KVSprayConnector, layout, register, speculation
from kvspray_vllm.meta import Expect, Gain, Intent, StepMeta
from kvspray_vllm.settings import Settings
from kvspray_vllm.stats import KVSprayPromMetrics, KVSprayStats
from kvspray_vllm.worker import Results


def test_engines_that_clear_blocks_say_so() -> None:
    assert isinstance(KVCacheConfig.needs_kv_cache_zeroing, property)


def test_vllm_finds_the_connector_by_its_name_alone() -> None:
    (plugin,) = entry_points(group=DEFAULT_PLUGINS_GROUP, name="kvspray")
    assert plugin.load() is register
    register()
    register()  # vLLM may load a plug-in several times
    named = KVTransferConfig(kv_connector="KVSprayConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(named) is KVSprayConnector
    named.kv_connector_module_path = "kvspray_vllm"
    assert KVConnectorFactory.get_connector_class(named) is KVSprayConnector


def test_every_override_has_the_signature_of_its_base() -> None:
    for name in vars(KVSprayConnector):
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if name.startswith("__") or theirs is None or not callable(theirs):
            continue
        own_params = list(inspect.signature(getattr(KVSprayConnector, name)).parameters)
        assert own_params == list(inspect.signature(theirs).parameters), name
    assert supports_hma(KVSprayConnector)
    assert not inspect.isabstract(KVSprayConnector)


def test_blocks_that_lack_are_reported_with_the_request_that_ends() -> None:
    c = object.__new__(KVSprayConnector)
    c._bad_blocks = set()
    done = Results(sent={"s"}, received={"r", "f"}, failed={"f"}, bad_blocks={4})
    c._worker = SimpleNamespace(collect=lambda: done)  # type: ignore[assignment]
    got = c.get_transfer_results({"x"})
    assert (got.finished_sending, got.finished_recving, got.failed_recving) == (
        {"s"},
        {"r", "f"},
        {"f"},
    )
    assert c.get_block_ids_with_load_errors() == {4}
    assert c.get_block_ids_with_load_errors() == set()  # each is reported once


@pytest.mark.parametrize("clears", [False, True])
def test_a_load_begins_before_the_input_is_prepared_but_not_before_new_blocks_are_cleared(
    clears: bool,
) -> None:
    calls: list[str] = []
    c = object.__new__(KVSprayConnector)
    c._worker = SimpleNamespace(
        begin=lambda m: calls.append("begin"), preempts=lambda m: calls.append("preempts")
    )  # type: ignore[assignment]
    c._generation, c._clears_blocks = None, clears
    meta = StepMeta()
    c.handle_preemptions(meta)
    assert calls == ["preempts" if clears else "begin"]
    c.bind_connector_metadata(meta)
    assert calls[1:] == ["begin"]  # where it has begun, the worker's side has it


def test_metadata_survives_pickling() -> None:
    meta = StepMeta(
        preempts=["a"], step=3, gains=[Gain("a", 5, ((1,),))],
        intents=[Intent("a", b"x" * 16, b"h" * 32, 5, 1, ((1,),))],
        expects=[Expect("b", b"x" * 16, b"h" * 32, "p:1", 5, 0, ((2,),))],
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(meta)) == meta


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"sokcet": "x"}, "sokcet"),
        ({"weights": "x" * 129}, "weights"),
        ({"admission_s": 0}, "admission_s"),
        ({"memory": "gpu"}, "memory"),
        ({"socket": ""}, "socket"),
    ],
)
def test_settings_are_strict(extra: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Settings.parse(extra)


def prom_metrics(of: Any) -> tuple[Any, CollectorRegistry]:
    """The metrics of a connector, for one engine, and their registry."""
    registry = CollectorRegistry()
    kinds = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    of_config = SimpleNamespace(kv_transfer_config=None)
    return of(of_config, kinds, ["model_name", "engine"], {0: ["m", "0"]}), registry


def test_metrics_have_the_suffixes_and_types_of_vllms() -> None:
    """A dashboard for vLLM's NIXL connector fits with another prefix."""
    ours, theirs = (
        {f.name.split("kvspray_")[-1].split("nixl_")[-1]: f.type for f in registry.collect()}
        for _, registry in map(prom_metrics, (KVSprayPromMetrics, NixlPromMetrics))
    )
    same = ours.items() & theirs.items()
    assert {name for name, _ in same} == ours.keys() & theirs.keys() == {
        "xfer_time_seconds", "bytes_transferred", "num_failed_transfers", "num_kv_expired_reqs",
    }  # fmt: skip


def test_stats_add_up_and_reach_prometheus() -> None:
    stats = KVSprayStats()
    assert stats.is_empty()
    stats.ended(True, "ok", 1 << 20, 1500, "tcp", 0)
    other = KVSprayStats()
    other.ended(True, "expired", 0, 10, "", 40)
    other.ended(True, "cancelled", 0, 10, "", 0)
    other.ended(False, "ok", 1 << 20, 0, "tcp", 0)
    other.ended(False, "expired", 0, 10, "", 0)
    other.ended(False, "failed", 0, 10, "", 0)
    other.local("no_sidecar")
    stats = KVSprayStats(pickle.loads(pickle.dumps(stats.aggregate(other).to_dict())))
    assert stats.reduce()["kvspray received/ok"] == 1

    prom, registry = prom_metrics(KVSprayPromMetrics)
    zero = 'vllm:kvspray_num_failed_transfers_total{engine="0",model_name="m"} 0.0'
    assert zero in generate_latest(registry).decode()
    prom.observe(stats.to_dict(), 0)
    text = generate_latest(registry).decode()
    for line in (
        'vllm:kvspray_transfers_total{engine="0",model_name="m",outcome="ok",side="received"} 1.0',
        'vllm:kvspray_transfers_total{engine="0",model_name="m",outcome="expired",side="received"} '
        "1.0",
        'vllm:kvspray_bytes_total{engine="0",model_name="m",side="sent",transport="tcp"} '
        "1.048576e+06",
        'vllm:kvspray_xfer_time_seconds_count{engine="0",model_name="m"} 1.0',
        'vllm:kvspray_bytes_transferred_sum{engine="0",model_name="m"} 1.048576e+06',
        'vllm:kvspray_num_failed_transfers_total{engine="0",model_name="m"} 1.0',
        'vllm:kvspray_num_kv_expired_reqs_total{engine="0",model_name="m"} 1.0',
        'vllm:kvspray_recompute_tokens_total{engine="0",model_name="m"} 40.0',
        'vllm:kvspray_local_prefills_total{engine="0",model_name="m",reason="no_sidecar"} 1.0',
    ):
        assert line in text, text


def config(**over: object) -> SimpleNamespace:
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_dbo=False,
        ubatch_size=0,
        use_ubatching=False,
    )
    out = SimpleNamespace(
        parallel_config=parallel, speculative_config=None, device_config=SimpleNamespace(
        device_type="cpu"), model_config=SimpleNamespace(
        is_encoder_decoder=False, enable_sleep_mode=False, multimodal_config=None),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
    )  # fmt: skip
    for path, value in over.items():
        target, _, name = path.rpartition("__")
        setattr(getattr(out, target) if target else out, name, value)
    return out


def test_a_plain_cpu_engine_is_accepted() -> None:
    layout.check_config(config())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("parallel_config__prefill_context_parallel_size", 2),
        ("parallel_config__decode_context_parallel_size", 2),
        ("parallel_config__use_ubatching", True),
        ("device_config__device_type", "xpu"),
        ("model_config__is_encoder_decoder", True),
        ("aux_output_config", SimpleNamespace(enable_return_routed_experts=True)),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(path: str, value: object) -> None:
    with pytest.raises(layout.Unsupported) as err:
        layout.check_config(config(**{path: value}))  # type: ignore[arg-type]
    name = (
        next(iter(vars(value)))
        if isinstance(value, SimpleNamespace)
        else path.rpartition("__")[2].removesuffix("_type").split("_")[0]
    )
    assert name in str(err.value)


@pytest.mark.parametrize(
    ("method", "tokens", "modules", "stages", "word"),
    [
        ("ngram", 3, None, 1, ""),
        ("ngram", 3, None, 2, "pipeline_parallel_size to 1"),
        ("suffix", 3, None, 1, ""),
        ("eagle", 3, None, 1, ""),
        ("eagle3", 5, None, 1, ""),
        ("draft_model", 3, None, 1, ""),
        ("mtp", 3, 1, 1, ""),
        ("mtp", 1, 3, 1, ""),
        ("mtp", 2, 3, 1, "set num_speculative_tokens to 1"),
        ("dflash", 3, None, 1, "method is dflash"),
        ("extract_hidden_states", 1, None, 1, "method is extract_hidden_states"),
    ],
)
def test_speculation(method: str, tokens: int, modules: int | None, stages: int, word: str) -> None:
    hf = {"num_nextn_predict_layers": modules} if modules else {}
    draft = SimpleNamespace(hf_config=SimpleNamespace(**hf))
    spec = SimpleNamespace(method=method, num_speculative_tokens=tokens, draft_model_config=draft)
    engine = config(speculative_config=spec)
    engine.parallel_config.pipeline_parallel_size = stages
    if not word:
        layout.check_config(engine)  # type: ignore[arg-type]
        return
    with pytest.raises(layout.Unsupported, match=f"speculative_config.*{word}"):
        layout.check_config(engine)  # type: ignore[arg-type]


def test_heads_of_a_draft() -> None:
    def heads(method: str, draft: int | None) -> tuple[int, ...]:
        of = SimpleNamespace(get_total_num_kv_heads=lambda: draft) if draft else None
        spec = SimpleNamespace(method=method, draft_model_config=of)
        model = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
        engine = SimpleNamespace(model_config=model, speculative_config=spec)
        return speculation.kv_heads_of(engine)  # type: ignore[arg-type]

    assert heads("eagle", 2) == (8, 2)
    assert heads("eagle", 8) == heads("ngram", None) == heads("medusa", 2) == (8,)


def test_long_rope_tells_models_apart() -> None:
    a, b = "x" * 600 + "a", "x" * 600 + "b"
    assert (
        layout._short(a) != layout._short(b)
        and len(layout._short(a)) < 512
        and layout._short("short") == "short"
    )


def test_windows_of_cache_groups() -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    full, kept = FullAttentionSpec(**sizes), FullAttentionSpec(**sizes, sliding_window=64)
    window = SlidingWindowSpec(**sizes, sliding_window=64)
    many = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": window, "b": window})

    def windows(*specs: object) -> tuple[int, ...]:
        return layout.windows_of(
            KVCacheConfig(1, [], [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)])
        )  # type: ignore[arg-type]

    assert windows(full) == (0,) and layout.backoff_of((0,)) == 0
    assert windows(kept, window, many) == (0, 64, 64) and layout.backoff_of((0, 64, 64)) == 1


def test_an_engine_without_kvspray_gets_nothing_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrapped classes, no reads of the checkpoint."""
    monkeypatch.delenv("KVSPRAY_LOAD", raising=False)
    monkeypatch.delenv("KVSPRAY_SLEEP", raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    before = dict(vars(WorkerBase))
    register()
    assert dict(vars(WorkerBase)) == before and not any(
        name.startswith("kvspray") for name in before
    )


@pytest.mark.parametrize("variable", ["KVSPRAY_LOAD", "KVSPRAY_SLEEP"])
def test_what_cannot_be_served_ends_no_engine(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError("libkvspray.so: cannot open shared object file")

    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(importlib, "import_module", broken)
    with _lines("vllm.kvspray") as lines:
        register()
    assert (
        f"{variable} is not available in this process" in lines.getvalue()
        and "cannot open" in lines.getvalue()
    )


def test_another_vllm_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    with _lines("vllm.kvspray") as lines:
        register()
    assert "the connector is not available" in lines.getvalue()


@contextlib.contextmanager
def _lines(name: str) -> Iterator[io.StringIO]:
    """The log of vLLM does not propagate."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    logging.getLogger(name).addHandler(handler)
    try:
        yield out
    finally:
        logging.getLogger(name).removeHandler(handler)


def test_names_that_the_plug_in_imports_exist() -> None:
    """Whatever a module imports from vLLM, also within functions: the installed vLLM has it."""
    missing = []
    for file in sorted(pathlib.Path(kvspray_vllm.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.partition(".")[0] == "vllm"
            ):
                missing += [
                    (file.name, node.module, a.name)
                    for a in node.names
                    if not _there(node.module, a.name)
                ]
    assert not missing


def _there(module: str, name: str) -> bool:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    if any(
        (pathlib.Path(place) / f"{name}{ending}").exists()
        for place in spec.submodule_search_locations or ()
        for ending in (".py", "")
    ):
        return True
    return re.search(rf"\b{re.escape(name)}\b", pathlib.Path(spec.origin).read_text()) is not None
