"""Weights that are replaced while engines live: KV of the old ones is never taken for KV of the new
ones."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import MODEL, Cluster, Loras
from engines import Engine, Out
from prompts import fresh
from test_tokens import Moved


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    out = Cluster(workdir, {"transports": {"order": ["shm"]}, "transfer": {"match_timeout": "2s"}})
    try:
        for name in "PDR":
            out.spawn(name)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


SHUFFLE = """
import pathlib, sys, torch
from safetensors.torch import load_file, save_file
gen = torch.Generator().manual_seed(7)
for f in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    tensors = load_file(f)
    for k, t in tensors.items():
        tensors[k] = t[torch.randperm(len(t), generator=gen)] if t.dim() > 1 else t
    save_file(tensors, f, metadata={"format": "pt"})
"""


@pytest.fixture(scope="module")
def others(workdir: pathlib.Path) -> pathlib.Path:
    """The same model with other weights, made in a process of its own: see
    pytest_collection_modifyitems."""
    dir = workdir / "others"
    shutil.copytree(MODEL, dir)
    subprocess.run([sys.executable, "-c", SHUFFLE, str(dir)], check=True)
    return dir


CHANGE = """
import json, pathlib, sys, torch
from safetensors.torch import load_file, save_file
(file,) = pathlib.Path(sys.argv[1]).glob("*.safetensors")
tensors = load_file(file)
names = sorted(tensors)
if sys.argv[2] == "one tensor":
    name = names[len(names) // 2]
    tensors[name] = tensors[name] * 1.01
elif sys.argv[2] == "fp8":
    # Each linear layer's weight in fp8, with a scale for each row. vLLM's wheel for CPUs lacks the
    # kernel that it wants as it loads fp8 with one scale for a tensor.
    largest = torch.finfo(torch.float8_e4m3fn).max
    for name in [n for n in names if n.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / largest
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name + "_scale"] = scale
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": fp8 | {"strategy": "channel", "dynamic": False},
        "input_activations": fp8 | {"strategy": "token", "dynamic": True},
    }
    path = pathlib.Path(sys.argv[1]) / "config.json"
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(config))
else:
    tensors = {k: t.float() for k, t in tensors.items()}
save_file(tensors, file, metadata={"format": "pt"})
"""


def changed(workdir: pathlib.Path, how: str) -> pathlib.Path:
    dir = workdir / how.replace(" ", "-")
    shutil.copytree(MODEL, dir)
    subprocess.run([sys.executable, "-c", CHANGE, str(dir), how], check=True)
    return dir


def exchanged(c: Cluster, prompt: list[int]) -> Out:
    with Moved(c) as moved:
        got = c.both(prompt)
    moved.all_loaded(1)
    c.settle()
    return got


def kept_apart(c: Cluster, prompt: list[int]) -> Out:
    """D got nothing, whether P was asked first or at the same time."""
    outs = []
    for run in (c.prefill_first, c.both):
        with Moved(c) as moved:
            outs.append(run(prompt))
        assert (moved.ok, moved.bytes) == (0, 0), vars(moved)
        c.d.clear_prefix_cache()
        c.settle(timeout=20)
    assert outs[0].tokens == outs[1].tokens
    return outs[1]


def test_kv_of_other_weights_is_not_taken(c: Cluster, others: pathlib.Path) -> None:
    prompt = fresh(300, "weights")
    old = c.r.run(prompt, 12).tokens
    assert exchanged(c, prompt).tokens == old

    # Held for D, and then P has other weights: what it holds is not P's any more, and new prompts
    # are computed with the new ones.
    held = fresh(200, "held")
    kv = c.p.run(held, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    c.p.reload_weights(others)
    with Moved(c) as moved:
        assert c.d.run(held, 12, kv=kv).tokens == c.r.run(held, 12).tokens
    assert (moved.ok, moved.bytes) == (0, 0), vars(moved)
    c.settle(timeout=20)
    assert (
        kept_apart(c, fresh(310, "P is ahead")).tokens
        == c.r.run(fresh(310, "P is ahead"), 12).tokens
    )

    # D follows, and they agree again.
    c.d.reload_weights(others)
    c.r.reload_weights(others)
    c.connected()
    prompt = fresh(320, "both")
    new = c.r.run(prompt, 12).tokens
    assert exchanged(c, prompt).tokens == new
    assert c.r.run(fresh(300, "weights"), 12).tokens != old, (
        "the other weights say the same: nothing was shown"
    )
    for e in (c.p, c.d, c.r):
        e.reload_weights(MODEL)
    c.connected()


def names(c: Cluster) -> list[str]:
    """What P's and D's weights are called, as the sidecars report that they differ."""
    status, verdict = checked(c.sp.url, c.sd.url)
    (line,) = [d for d in verdict["differs"] if d.startswith("identity.weights: ")]
    assert status == 1
    return [part.split('"')[1] for part in line.split(", ")]


def refused_with_both(c: Cluster, what: str) -> None:
    here, there = names(c)
    assert here != there and here.startswith("checkpoint:") and there.startswith("checkpoint:")
    before = len(c.sd.tail(10_000))
    kept_apart(c, fresh(200, what))
    said = c.sd.tail(10_000)[before:]
    assert here in said and there in said, said[-2000:]


def test_a_fine_tune_is_not_taken_for_its_base(c: Cluster, workdir: pathlib.Path) -> None:
    c.d.stop()
    c.spawn("D", model=changed(workdir, "one tensor")).wait_up()
    c.connected()
    refused_with_both(c, "fine-tune")
    c.d.stop()
    c.spawn("D").wait_up()
    c.connected()
    prompt = fresh(210, "base again")
    assert exchanged(c, prompt).tokens == c.r.run(prompt, 12).tokens


def test_one_model_stored_in_two_types(c: Cluster, workdir: pathlib.Path) -> None:
    c.d.reload_weights(changed(workdir, "wide"))
    c.connected()
    refused_with_both(c, "wide")
    c.d.reload_weights(MODEL)
    c.connected()
    prompt = fresh(220, "narrow again")
    assert exchanged(c, prompt).tokens == c.r.run(prompt, 12).tokens


def test_fp8_and_bf16_of_one_model(c: Cluster, workdir: pathlib.Path) -> None:
    models = {"P": MODEL, "D": changed(workdir, "fp8")}
    for name, model in models.items():
        c.engines[name].stop()
        # With fp8 weights vLLM computes in nothing wider.
        c.spawn(name, model=model, dtype="bfloat16")
    for name in models:
        c.engines[name].wait_up()
    c.connected()
    refused_with_both(c, "fp8")
    for name in models:
        c.engines[name].stop()
        c.spawn(name)
    for name in models:
        c.engines[name].wait_up()
    c.connected()
    prompt = fresh(230, "bf16 again")
    assert exchanged(c, prompt).tokens == c.r.run(prompt, 12).tokens


def test_weights_have_names(c: Cluster) -> None:
    was = c.p.set_weights("step-1200")
    assert c.p.set_weights("step-1200") == ["step-1200"] and was != ["step-1200"]
    prompt = fresh(200, "named")
    assert kept_apart(c, prompt).tokens == c.r.run(prompt, 12).tokens
    c.d.set_weights("step-1200")
    c.connected()
    assert c.r.set_weights("step-1200") == [""], (
        "an engine without the connector has nothing to name"
    )
    prompt = fresh(210, "named alike")
    assert exchanged(c, prompt).tokens == c.r.run(prompt, 12).tokens


# Registers the same cache as meaning something else, until its input ends; in a process of its own,
# since engines are forked from this one.
OTHER = """
import base64, json, sys
import kvspray
changed = json.loads(sys.argv[2])
layout = kvspray.protocol.decode(base64.b64decode(changed["layout"]))
layout["identity"].update(changed["identity"])
layers = [layer for group in layout["groups"] for layer in group["layers"]]
blocks = max(group["num_blocks"] for group in layout["groups"])
size = max(x["base"] + x["block_stride"] * (blocks - 1) + x["page_bytes"] for x in layers)
engine = kvspray.EngineInfo("test", id="other")
with kvspray.WorkerClient(sys.argv[1], engine=engine, layers=len(layers)) as w:
    region = w.alloc_region(size)
    w.register([region], layout)
    assert w.wait_connected(60), w.status()
    print("registered", flush=True)
    sys.stdin.read()
"""


def checked(prefill: str, decode: str) -> tuple[int, dict[str, Any]]:
    """`kvspray layout check`: its status and what it reported, which is the same as text."""
    command = [rig.BINARY, "layout", "check", prefill, decode]
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert run.stdout, run.stderr
    verdict = json.loads(run.stdout)
    text = subprocess.run(command, capture_output=True, text=True, check=False)
    assert text.returncode == run.returncode
    assert [
        line.strip().removeprefix("differs: ")
        for line in text.stdout.splitlines()
        if "differs: " in line
    ] == (verdict["differs"] or [])
    assert ("ok: pages move as they are" in text.stdout) == (run.returncode == 0), text.stdout
    return run.returncode, verdict


def test_layout_check_of_running_engines_names_what_differs(c: Cluster) -> None:
    for e in (c.p, c.d):
        e.set_weights("a")
    c.connected()
    status, verdict = checked(c.sp.url, c.sd.url)
    assert (status, verdict["differs"], verdict["geometry"]) == (0, None, None), verdict
    c.d.set_weights("b")
    c.connected()
    status, verdict = checked(c.sp.url, c.sd.url)
    assert (status, verdict["differs"]) == (1, ['identity.weights: "a" here, "b" there']), verdict

    # Several fields, of an engine that has come beside D.
    (worker,) = json.loads(rig.get(c.sp.url + "/v1/layouts"))["workers"]
    changed = {"weights": "c", "rope": "none", "kv_heads": "3", "speculative": "eagle"}
    told = json.dumps({"layout": worker["layout"], "identity": changed})
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, c.sd.socket, told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "registered\n"
        status, verdict = checked(c.sp.url, c.sd.url + "#test/other")
        assert status == 1 and [d.partition(":")[0] for d in verdict["differs"]] == [
            f"identity.{name}" for name in sorted(changed)
        ], verdict
        assert all(
            f'"{changed[d.split(":")[0].removeprefix("identity.")]}" there' in d
            for d in verdict["differs"]
        ), verdict
        assert verdict["geometry"] is None, verdict
        both = subprocess.run(
            [rig.BINARY, "layout", "check", c.sp.url, c.sd.url],
            capture_output=True,
            text=True,
            check=False,
        )
        assert both.returncode == 1 and "2 engines are registered there" in both.stderr, both
    finally:
        other.communicate()
    c.d.set_weights("a")
    c.connected()


ADAPTER = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
base, out = map(pathlib.Path, sys.argv[1:3])
out.mkdir()
config = json.loads((base / "config.json").read_text())
gen = torch.Generator().manual_seed(int(sys.argv[3]))
hidden, rank, tensors = config["hidden_size"], 4, {}
width = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
for layer in range(config["num_hidden_layers"]):
    for module, heads in width.items():
        name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
        tensors[name + ".lora_A.weight"] = torch.randn(rank, hidden, generator=gen) * 0.2
        out_dim = heads * config["head_dim"]
        tensors[name + ".lora_B.weight"] = torch.randn(out_dim, rank, generator=gen)
save_file(tensors, out / "adapter_model.safetensors")
(out / "adapter_config.json").write_text(json.dumps(
    {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(width),
     "bias": "none"}))
"""


def adapter(workdir: pathlib.Path, seed: int) -> pathlib.Path:
    out = workdir / f"adapter{seed}"
    subprocess.run([sys.executable, "-c", ADAPTER, str(MODEL), str(out), str(seed)], check=True)
    return out


def log_of(e: Engine) -> str:
    return e.log.read_text(errors="replace")


def test_one_adapter_name_with_two_contents(c: Cluster, workdir: pathlib.Path) -> None:
    from kvspray.weights import digest

    for name in "PDR":
        c.engines[name].stop()
        c.spawn(name, enable_lora=True, max_lora_rank=8, max_loras=2)
    c.up()
    one, two = (adapter(workdir, seed) for seed in (1, 2))
    here, there = digest(one), digest(two)
    same: Loras = ("tuned", 1, str(one)), ("tuned", 1, str(one))
    other: Loras = ("tuned", 1, str(one)), ("tuned", 1, str(two))

    prompt = fresh(200, "adapter")
    want = c.r.run(prompt, 12, lora=same[0]).tokens
    assert want != c.r.run(prompt, 12).tokens, "the adapter changes nothing: nothing would be shown"
    # D loads only for an adapter that its worker has read.
    c.d.run(fresh(20, "load"), 1, lora=same[1])
    for run in (c.prefill_first, c.both):
        with Moved(c) as moved:
            assert run(prompt, loras=same).tokens == want
        moved.all_loaded(1)
        c.d.clear_prefix_cache()
        c.p.clear_prefix_cache()
    c.settle()

    # D has other files under that name and id.
    c.d.stop()
    c.spawn("D", enable_lora=True, max_lora_rank=8, max_loras=2).wait_up()
    c.connected()
    c.r.stop()
    c.spawn("R", enable_lora=True, max_lora_rank=8, max_loras=2).wait_up()
    want = c.r.run(prompt, 12, lora=other[1]).tokens
    c.d.run(fresh(20, "load other"), 1, lora=other[1])  # D declines at once what it has not read
    for run, logs in ((c.prefill_first, (c.d, c.d)), (c.both, (c.p, c.d))):
        before = [len(log_of(e)) for e in logs]
        with Moved(c) as moved:
            assert run(prompt, loras=other).tokens == want
        assert (moved.ok, moved.bytes) == (0, 0), vars(moved)
        c.settle(timeout=20)
        for e, name, n in zip(logs, (here, there), before, strict=True):
            assert name in log_of(e)[n:], (run, e.name, log_of(e)[n:][-2000:])
        c.d.clear_prefix_cache()
