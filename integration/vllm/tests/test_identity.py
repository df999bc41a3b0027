"""What distinguishes two engines' caches: each field of the identity changes the fingerprint and is
named by `kvspray layout check`, and what a plan bridges (tensor and pipeline parallelism, block
size) does neither."""

from __future__ import annotations

import base64
import dataclasses
import http.server
import json
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvspray import protocol
from kvspray_vllm import layout, strategies, versions

BINARY = pathlib.Path(
    os.environ.get(
        "KVSPRAY_BINARY", pathlib.Path(__file__).resolve().parents[3] / "bin" / "kvspray"
    )
)
LAYERS, KV_HEADS, BLOCKS = 6, 4, 8


@dataclasses.dataclass
class Engine:
    """What identity_of and kind_of ask an engine for, of a model of six layers."""

    hf: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "vocab_size": 1000,
            "rope_theta": 10000.0,
            "_name_or_path": "/models/a",
        }
    )
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: str = "auto"
    layers: int = LAYERS
    head_size: int = 32
    windows: tuple[int, ...] = (0,)  # a cache group each
    block: int = 32
    weights: str = "step-1"
    quantization: str | None = None
    spec: Any = None
    media: Any = None  # of a model of text alone
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    tp: int = 1
    pp: int = 1

    def config(self) -> Any:
        model = SimpleNamespace(
            dtype=self.dtype, quantization=self.quantization, use_mla=False,
            get_head_size=lambda: self.head_size, get_total_num_kv_heads=lambda: KV_HEADS,
            get_total_num_hidden_layers=lambda: self.layers,
            hf_text_config=SimpleNamespace(to_dict=lambda: dict(self.hf)),
            hf_config=SimpleNamespace(to_dict=lambda: {"text_config": dict(self.hf)}),
            hf_overrides=self.overrides, multimodal_config=self.media,
        )  # fmt: skip
        return SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(cache_dtype=self.cache_dtype,
            block_size=self.block), speculative_config=self.spec,
            device_config=SimpleNamespace(device_type="cpu"),
        )  # fmt: skip

    def groups(self, stage: int) -> list[KVCacheGroupSpec]:
        sizes: dict[str, Any] = {
            "block_size": self.block,
            "num_kv_heads": KV_HEADS // self.tp,
            "head_size": self.head_size,
            "dtype": self.dtype,
        }
        of = lambda w: (  # noqa: E731
            SlidingWindowSpec(**sizes, sliding_window=w) if w else FullAttentionSpec(**sizes)
        )
        names = [
            f"layers.{i}" for i in range(stage * LAYERS // self.pp, (stage + 1) * LAYERS // self.pp)
        ]
        n = len(self.windows)
        return [
            KVCacheGroupSpec([name for name in names if int(name[7:]) % n == i], of(w))
            for i, w in enumerate(self.windows)
        ]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each rank's layout, as the connector makes it, with layers one behind the other."""
        for stage in range(self.pp):
            kv = KVCacheConfig(BLOCKS, [], self.groups(stage))
            identity = layout.identity_of(self.config(), kv, self.weights)
            for rank in range(self.tp):
                ranks, at, groups = (
                    layout.Ranks(tp=rank, tp_size=self.tp, pp=stage, pp_size=self.pp),
                    0,
                    [],
                )
                for group in kv.kv_cache_groups:
                    spec, described = group.kv_cache_spec, []
                    for name in group.layer_names:
                        page = spec.page_size_bytes
                        described.append(
                            {
                                "name": name,
                                "index": at,
                                "region": 0,
                                "base": at << 30,
                                "block_stride": page,
                                "page_bytes": page,
                            }
                        )
                        at += 1
                    kind = strategies.kind_of(
                        spec, strategies.CPU_ATTN, KV_HEADS, ranks, identity["packing"]
                    )
                    groups.append(
                        {
                            "tokens_per_block": spec.block_size,
                            "strategy": kind.strategy,
                            "params": kind.params,
                            "num_blocks": BLOCKS,
                            "layers": described,
                        }
                    )
                yield (
                    f"pp{stage}/tp{rank}",
                    {
                        "model": "m",
                        "dtype": identity["dtype"],
                        "groups": groups,
                        "identity": identity,
                    },
                )


Registered = Iterable[tuple[str, dict[str, Any]]]  # an Engine, or what one has registered
Check = Callable[[Registered, Registered], dict[str, Any]]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """`kvspray layout check` of two engines, as their sidecars would present them."""
    served: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served[self.path])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def run(a: Registered, b: Registered) -> dict[str, Any]:
        for side, e in (("p", a), ("d", b)):
            workers = [
                {
                    "name": rank,
                    "engine": side,
                    "rank": rank,
                    "layout": base64.b64encode(
                        protocol.pack(protocol._ordered("REGISTER.layout", of))
                    ).decode(),
                }
                for rank, of in e
            ]
            served[f"/{side}/v1/layouts"] = json.dumps({"workers": workers}).encode()
        url = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run(
            [str(BINARY), "layout", "check", "--json", f"{url}/p", f"{url}/d"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout, done.stderr
        verdict: dict[str, Any] = json.loads(done.stdout)
        moves = not verdict["differs"] and not verdict.get("refused")
        assert (done.returncode == 0) == moves, done
        return verdict

    try:
        yield run
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AVX-512 and without AMX, whatever this one has: what vLLM would choose on it is
    asked, and nothing is computed."""
    amx(monkeypatch, False)
    monkeypatch.setattr(cpu_attn.torch.cpu, "_is_avx512_supported", lambda: True)


def amx(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(cpu_attn.torch.cpu, "_is_amx_tile_supported", lambda: has)


def draft(method: str = "eagle", model: str = "d", tokens: int = 3) -> Any:
    return SimpleNamespace(method=method, model=model, num_speculative_tokens=tokens)


def media(**settings: Any) -> MultiModalConfig:
    return MultiModalConfig(**settings)


BASE_HF = Engine().hf


@pytest.mark.parametrize(
    ("a", "b", "fields"),
    [
        # Group structure, and prefill back-off with it.
        ({}, {"windows": (0, 64)}, {"identity.groups", "identity.backoff", "window"}),
        ({"windows": (0, 64)}, {"windows": (0, 96)}, {"identity.groups", "window"}),
        ({}, {"dtype": torch.float16}, {"dtype", "identity.dtype"}),
        ({}, {"cache_dtype": "fp8_e5m2"}, {"identity.cache_dtype"}),
        ({}, {"head_size": 64}, {"identity.head_size", "bytes of a head of a token"}),
        ({}, {"layers": LAYERS + 1}, {"identity.layers"}),
        ({}, {"hf": BASE_HF | {"rope_theta": 1e6}}, {"identity.rope", "identity.model_config"}),
        (
            {},
            {"hf": BASE_HF | {"rope_scaling": {"factor": 8.0}}},
            {"identity.rope", "identity.model_config"},
        ),
        ({}, {"hf": BASE_HF | {"vocab_size": 2000}}, {"identity.model_config"}),
        ({}, {"spec": draft()}, {"identity.speculative"}),
        ({"spec": draft()}, {"spec": draft(method="medusa")}, {"identity.speculative"}),
        ({"spec": draft()}, {"spec": draft(model="e")}, {"identity.speculative"}),
        ({"media": media()}, {"media": media(mm_processor_kwargs={"a": 1})}, {"identity.images"}),
        (
            {"media": media(mm_processor_kwargs={"a": 1})},
            {"media": media(mm_processor_kwargs={"a": 2})},
            {"identity.images"},
        ),
        ({"media": media()}, {"media": media(video_pruning_rate=0.5)}, {"identity.images"}),
        ({"media": media()}, {"media": media(), "overrides": {"b": 1}}, {"identity.images"}),
        ({}, {"weights": "step-2"}, {"identity.weights"}),
        ({}, {"quantization": "fp8"}, {"identity.quantization"}),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, (dict, set)) else None,
)
def test_what_differs_is_named(
    check: Check, a: dict[str, Any], b: dict[str, Any], fields: set[str]
) -> None:
    p, d = Engine(**a), Engine(**b)
    answer = check(p, d)
    assert named(answer) == fields, answer
    assert answer["fingerprints"][0] != answer["fingerprints"][1]
    # Its own, and not by chance.
    assert check(d, d)["fingerprints"] == [answer["fingerprints"][1]] * 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (draft(), draft(tokens=4)),
        (None, draft(method="ngram")),
        (draft(method="suffix"), draft(method="medusa")),
    ],
)
def test_speculation_that_leaves_the_cache_of_a_prompt_as_it_is(
    check: Check, a: Any, b: Any
) -> None:
    answer = check(Engine(spec=a), Engine(spec=b))
    assert named(answer) == set() and answer["fingerprints"][0] == answer["fingerprints"][1], answer


def named(answer: dict[str, Any]) -> set[str]:
    """The fields that are named, those of layers without their layer and role."""
    out = set()
    for line in answer["differs"] or []:
        field = line.partition(": ")[0]
        for name in ("window", "bytes of a head of a token"):
            if field.endswith(name):
                field = name
        out.add(field)
    return out


def test_byte_order(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(layout.sys, "byteorder", "big")
        big = list(Engine())
    answer = check(Engine(), big)
    assert (
        named(answer) == {"byte_order"} and answer["fingerprints"][0] != answer["fingerprints"][1]
    )


def test_packing_that_depends_on_the_block_size(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AMX, vLLM packs blocks that are multiples of 32 for it, and others as AVX-512 would."""
    amx(monkeypatch, True)
    answer = check(Engine(block=32), Engine(block=48))
    assert (
        "identity.packing" in named(answer)
        and answer["fingerprints"][0] != answer["fingerprints"][1]
    ), answer
    answer = check(Engine(block=32), Engine(block=64))
    assert answer["fingerprints"][0] == answer["fingerprints"][1]


def test_releases_whose_caches_have_the_same_values(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    with monkeypatch.context() as m:
        m.setattr(vllm, "__version__", versions.KNOWN[0] + ".7")
        known = list(Engine())
        m.setattr(vllm, "__version__", "0.99")
        unknown = list(Engine())
    answer = check(Engine(), known)
    assert answer["fingerprints"][0] == answer["fingerprints"][1]
    assert named(check(Engine(), unknown)) == {"identity.numerics"}
    with monkeypatch.context() as m:
        m.setattr(versions, "NUMERICS", "other")
        others = list(Engine())
    assert named(check(Engine(), others)) == {"identity.numerics"}


@pytest.mark.parametrize(
    ("a", "b", "gives"), [({}, {"tp": 2}, 1), ({"tp": 4}, {}, 4), ({"tp": 4}, {"tp": 2}, 2),
    ({"pp": 3}, {"pp": 2}, 2), ({}, {"block": 48}, 1), ({"block": 96}, {"block": 32}, 1),
    ({"tp": 2, "pp": 2, "block": 16}, {"pp": 3, "block": 128}, 4),
    ({"windows": (0, 64), "pp": 6}, {"windows": (0, 64)}, 6),
    ({}, {"hf": BASE_HF | {"_name_or_path": "/elsewhere"}}, 1),
    ({"media": media(mm_processor_cache_gb=0)}, {"media": media(language_model_only=True)}, 1),
    ({}, {"overrides": {"b": 1}}, 1),
    ({"quantization": "gptq"}, {"quantization": "gptq_marlin"}, 1)], ids=str,
)  # fmt: skip
def test_what_a_plan_bridges_is_no_difference(
    check: Check, a: dict[str, Any], b: dict[str, Any], gives: int
) -> None:
    answer = check(Engine(**a), Engine(**b))
    assert (answer["differs"] or [], answer.get("refused", ""), answer["contributors"]) == (
        [],
        "",
        gives,
    ), answer
    assert answer["fingerprints"][0] == answer["fingerprints"][1]
