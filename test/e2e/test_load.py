"""`kvspray load`: other weights for an engine that sleeps. Its tokens are then those of an engine
that was started with them, and what fails serves nothing."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import MODEL, Cluster
from engines import ENV, Engine
from prompts import fresh
from test_offer import Offer
from test_tokens import Moved

SERVES = {"KVSPRAY_LOAD": "1"}

PIECE = 64 << 10  # the model's largest tensors take several
PROMPT = fresh(200, "load")

MAKE = """
import pathlib, sys, torch
from safetensors.torch import load_file, save_file
gen = torch.Generator().manual_seed(11)
(file,) = pathlib.Path(sys.argv[1]).glob("*.safetensors")
def permuted(t):
    return t[torch.randperm(len(t), generator=gen)] if t.dim() > 1 else t
tensors = {k: permuted(t) for k, t in load_file(file).items()}
how, names = sys.argv[2], sorted(tensors)
name = names[len(names) // 2]
if how == "shape":
    tensors[name] = tensors[name][:-1].contiguous()
elif how == "dtype":
    tensors[name] = tensors[name].float()
elif how == "missing":
    del tensors[name]
elif how == "more":
    tensors["other.weight"] = tensors[name].clone()
save_file(tensors, file, metadata={"format": "pt"})
print(name)
"""


def made(workdir: pathlib.Path, name: str, how: str) -> tuple[pathlib.Path, str]:
    dir = workdir / name
    shutil.copytree(MODEL, dir)
    run = subprocess.run(
        [sys.executable, "-c", MAKE, str(dir), how], check=True, capture_output=True, text=True
    )
    return dir, run.stdout.strip()


def request(source: str | pathlib.Path, **more: Any) -> str:
    return json.dumps({"source": str(source), "piece_bytes": PIECE, **more})


class Rank:
    """What the command sends to an engine, with one token."""

    def __init__(self, e: Engine, token: str = "") -> None:
        self.e, self.token = e, token or f"t-{next(COUNT)}"

    def call(self, method: str, *args: str) -> list[dict[str, Any]]:
        return self.e.rpc(f"kvspray_load_{method}", self.token, *args)

    def begin(self, asked: str) -> Rank:
        said = self.e.rpc("kvspray_load_check", asked)
        armed = self.call("arm")
        self.e.sleep(1)
        self.e.wake_up(["weights"])
        begun = self.call("begin", asked, said[0]["digest"])
        assert not any("error" in rank for rank in said + armed + begun), (said, armed, begun)
        return self

    def ended(self) -> dict[str, Any]:
        """What the load has come to."""
        while True:
            said = self.call("poll", "0.2")
            if all(rank["state"] != "loading" for rank in said):
                return next((rank for rank in said if rank["state"] != "loaded"), said[0])

    def finish(self) -> dict[str, Any]:
        named, done = self.call("finish"), self.call("release")
        assert not any("error" in rank for rank in named + done), (named, done)
        return done[0]


COUNT = itertools.count()


def loaded(e: Engine, asked: str) -> dict[str, Any]:
    r = Rank(e).begin(asked)
    said = r.ended()
    assert said["state"] == "loaded", said
    with pytest.raises(RuntimeError, match="has not confirmed them"):
        e.wake_up()
    done = r.finish()
    assert e.wake_up()
    return done


def never_serves(e: Engine, why: str) -> None:
    pending = e.add(PROMPT, 4)
    with pytest.raises(RuntimeError, match=why):
        e.wake_up()
    with pytest.raises(RuntimeError, match=why):
        e.rpc("execute_model", None)
    pending.abort()


@pytest.fixture(scope="module")
def b(workdir: pathlib.Path) -> pathlib.Path:
    return made(workdir, "same", "same")[0]


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path, b: pathlib.Path) -> Iterator[Cluster]:
    """P and D have A, and R has B from its start."""
    out = Cluster(workdir, {"transports": {"order": ["shm"]}, "transfer": {"match_timeout": "2s"}})
    try:
        out.spawn("P", env=SERVES)
        out.spawn("D", env=SERVES)
        out.spawn("R", model=b)
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


@pytest.mark.parametrize("copies", ["none", "sidecar"])
def test_tokens_are_those_of_an_engine_that_was_started_with_them(
    c: Cluster, b: pathlib.Path, copies: str
) -> None:
    old = c.p.run(PROMPT, 12).tokens
    new = c.r.run(PROMPT, 12).tokens
    assert old != new, "the other weights say the same: nothing would be shown"
    for e in (c.p, c.d):
        done = loaded(e, request(b, copies=copies, socket=c.sp.socket))
        assert (done["by_sidecar"] > 20) == (copies == "sidecar"), done
    assert done["weights"] == digest_of(b)
    c.connected()
    for e in (c.p, c.d):
        assert e.run(PROMPT, 12).tokens == new
    prompt = fresh(300, copies)
    with Moved(c) as moved:
        assert c.both(prompt).tokens == c.r.run(prompt, 12).tokens
    moved.all_loaded(1)
    c.settle()
    for e in (c.p, c.d):
        loaded(e, request(MODEL))
    c.connected()
    assert c.p.run(PROMPT, 12).tokens == old


@pytest.mark.parametrize("how", ["shape", "dtype", "missing", "more"])
def test_another_shape_is_refused_before_a_byte_changes(
    c: Cluster, workdir: pathlib.Path, how: str
) -> None:
    old = c.d.run(PROMPT, 12).tokens
    dir, name = made(workdir, how, how)
    (said,) = c.d.rpc("kvspray_load_check", request(dir))
    assert "error" in said and (name if how != "more" else "other.weight") in said["error"], said
    assert c.d.run(PROMPT, 12).tokens == old
    c.d.clear_prefix_cache()


def test_damaged_folders_are_refused(c: Cluster, workdir: pathlib.Path) -> None:
    dir = workdir / "cut"
    shutil.copytree(MODEL, dir)
    file = dir / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    for source, why in (
        (dir, "cut"),
        (workdir / "nowhere", "not a directory"),
        ("relative", "absolute path"),
        ("ftp://x", "absolute path"),
    ):
        (said,) = c.d.rpc("kvspray_load_check", request(source))
        assert why in said["error"], said


def slowly(_worker: Any, seconds: float) -> None:
    """Each piece takes that much longer, as those of a larger model do. 0: as before."""
    from kvspray_vllm import load as module

    inner = getattr(module, "_sample_inner", module._sample)

    def sample(*args: Any) -> None:
        time.sleep(seconds)
        inner(*args)

    module._sample_inner, module._sample = inner, sample if seconds else inner


def constant(_worker: Any, name: str, value: float) -> None:
    from kvspray_vllm import load as module

    setattr(module, name, value)


@pytest.fixture
def slow(c: Cluster) -> Iterator[None]:
    c.d.rpc(slowly, 0.003)
    yield
    c.d.rpc(slowly, 0.0)


def test_a_file_that_changes_meanwhile(
    c: Cluster, slow: None, b: pathlib.Path, workdir: pathlib.Path
) -> None:
    for what in ("written", "cut"):
        dir = workdir / f"to-be-{what}"
        shutil.copytree(b, dir)
        asked = request(dir, piece_bytes=8192)
        file = dir / "model.safetensors"
        r = Rank(c.d).begin(asked)
        if what == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            with open(file, "r+b") as f:
                f.seek(-2, os.SEEK_END)
                f.write(b"xx")
        said = r.ended()
        assert said["state"] == "failed", said
        never_serves(c.d, "changed|shorter|ends behind")
    # A load that succeeds makes it whole.
    loaded(c.d, request(b))
    assert c.d.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
    loaded(c.d, request(MODEL))


def test_a_load_that_is_stopped(c: Cluster, slow: None, b: pathlib.Path) -> None:
    asked = request(b, piece_bytes=4096)
    r = Rank(c.d).begin(asked)
    (said,) = r.call("cancel", "no more")
    assert said["state"] == "failed" and "no more" in said["error"]
    never_serves(c.d, "no more")
    # Or another takes its place in the middle, once its command is silent.
    r = Rank(c.d).begin(asked)
    other = Rank(c.d, "other")
    for said in (
        other.call("arm")
        + other.call("cancel", "x")
        + other.call("begin", asked, "x")
        + other.call("finish")
        + other.call("release")
    ):
        assert r.token in said["error"], said
    c.d.rpc(constant, "QUIET_S", 0.0)
    loaded(c.d, request(MODEL))
    c.d.rpc(constant, "QUIET_S", 15.0)
    (said,) = r.call("finish")
    assert "belongs to the load" in said["error"]
    assert c.d.run(PROMPT, 12).tokens == c.p.run(PROMPT, 12).tokens


def test_before_the_sleep_nothing_has_changed(c: Cluster) -> None:
    old = c.d.run(PROMPT, 12).tokens
    r = Rank(c.d)
    (said,) = r.call("arm")
    assert said == r.call("arm")[0] and (said["token"], said["state"]) == (r.token, "armed")
    assert c.d.run(PROMPT, 12).tokens == old, "it computes until it sleeps"
    with pytest.raises(RuntimeError, match="reload_weights is refused"):
        c.d.rpc("reload_weights")
    (said,) = r.call("begin", request(MODEL), "checkpoint:x")
    assert "not put to sleep" in said["error"]
    (said,) = r.call("cancel", "x")
    assert said["state"] == "disarmed"
    c.connected()
    prompt = fresh(300, "disarmed")
    with Moved(c) as moved:  # the cache has its name again
        assert c.both(prompt).tokens == c.p.run(prompt, 12).tokens
    moved.all_loaded(1)
    c.settle()


def cannot_rename(worker: Any, broken: bool) -> None:
    from kvspray_vllm import load as module

    def renamed(_guard: Any) -> str:
        raise OSError("no name")

    if broken:
        module.Guard._renamed_inner, module.Guard._renamed = module.Guard._renamed, renamed
    else:
        module.Guard._renamed = module.Guard._renamed_inner


def test_arming_that_fails(c: Cluster) -> None:
    old = c.d.run(PROMPT, 12).tokens
    c.d.rpc(cannot_rename, True)
    assert "no name" in Rank(c.d).call("arm")[0]["error"]
    c.d.sleep(1)
    assert c.d.wake_up(), "nothing is guarded"
    c.d.rpc(cannot_rename, False)
    assert c.d.run(PROMPT, 12).tokens == old
    # What was incomplete before remains guarded.
    r = Rank(c.d)
    r.call("arm")
    c.d.sleep(2)
    r.call("cancel", "no more")
    c.d.rpc(cannot_rename, True)
    assert "no name" in Rank(c.d).call("arm")[0]["error"]
    c.d.rpc(cannot_rename, False)
    never_serves(c.d, "no more")
    loaded(c.d, request(MODEL))


def test_a_sleep_that_comes_after_the_end(c: Cluster) -> None:
    """Its command is gone, and did not learn of it."""
    old = c.d.run(PROMPT, 12).tokens
    r = Rank(c.d)
    r.call("arm")
    (said,) = r.call("cancel", "no answer", "yes")
    assert said["state"] == "failed"
    assert c.d.run(PROMPT, 12).tokens == old, "it has its weights until then"
    c.d.sleep(2)
    never_serves(c.d, "no answer")
    loaded(c.d, request(MODEL))
    assert c.d.run(PROMPT, 12).tokens == old


@pytest.mark.parametrize("at", ["sleep", "begin"])
def test_a_load_that_ends_before_its_first_byte(c: Cluster, at: str, workdir: pathlib.Path) -> None:
    """The sleep has discarded the weights."""
    old = c.d.run(PROMPT, 12).tokens
    r = Rank(c.d)
    r.call("arm")
    c.d.sleep(2)
    c.d.wake_up(["weights"])
    if at == "begin":
        (said,) = r.call("begin", request(workdir / "gone"), "checkpoint:x")
        assert "not a directory" in said["error"]
        (said,) = r.call("poll", "0")
        assert said["state"] == "failed" and "not a directory" in said["error"]
    else:
        never_serves(c.d, "armed")
        (said,) = r.call("cancel", "no more")
        assert said["state"] == "failed"
    assert "error" in r.call("finish")[0] and "error" in r.call("release")[0]
    never_serves(c.d, "not a directory" if at == "begin" else "no more")
    # Nor does it after another that was armed and ended.
    other = Rank(c.d)
    other.call("arm")
    (said,) = other.call("cancel", "x")
    assert said["state"] == "failed"
    never_serves(c.d, "stopped: x")
    loaded(c.d, request(MODEL))
    assert c.d.run(PROMPT, 12).tokens == old


def replaced(worker: Any, path: str) -> None:
    """By a call that meets no guard."""
    type(worker.model_runner).reload_weights(worker.model_runner, weights_path=path)


def written(worker: Any) -> None:
    import torch

    with torch.no_grad():
        next(iter(worker.get_model().parameters())).zero_()


@pytest.mark.parametrize("how", ["reload", "write"])
def test_weights_of_others_in_between(c: Cluster, b: pathlib.Path, how: str) -> None:
    r = Rank(c.d).begin(request(b))
    assert r.ended()["state"] == "loaded"
    for method in (
        "reload_weights",
        "update_weights",
        "start_weight_update",
        "execute_dummy_batch",
    ):
        with pytest.raises(RuntimeError, match=f"{method} is refused"):
            c.d.rpc(method)
    if how == "reload":
        c.d.rpc(replaced, str(MODEL))
    else:
        c.d.rpc(written)
    (said,) = r.call("finish")
    assert "something else has replaced weights" in said["error"], said
    never_serves(c.d, "something else")
    loaded(c.d, request(MODEL))


def test_named_and_not_released(c: Cluster, b: pathlib.Path) -> None:
    r = Rank(c.d).begin(request(b))
    assert r.ended()["state"] == "loaded"
    (said,) = r.call("finish")
    assert (said["state"], said["weights"], said["token"]) == ("named", digest_of(b), r.token)
    never_serves(c.d, "has not released")
    (said,) = r.call("cancel", "another rank failed")
    assert said["state"] == "failed"
    assert "error" in r.call("release")[0]
    never_serves(c.d, "another rank failed")
    loaded(c.d, request(MODEL))


def test_no_progress(c: Cluster, b: pathlib.Path, slow: None) -> None:
    r = Rank(c.d).begin(request(b, piece_bytes=4096))
    c.d.rpc(constant, "NO_PROGRESS_S", 0.0)
    said = r.ended()
    c.d.rpc(constant, "NO_PROGRESS_S", 120.0)
    assert said["state"] == "failed" and "nothing has come" in said["error"], said
    never_serves(c.d, "nothing has come")
    loaded(c.d, request(MODEL))


def test_no_memory_is_left(c: Cluster, b: pathlib.Path, slow: None) -> None:
    def arenas() -> int:
        maps = pathlib.Path(f"/proc/{c.d.pid}/maps").read_text()
        return sum("memfd:" in line for line in maps.splitlines())

    before = arenas()
    for copies in ("none", "sidecar"):
        for _ in range(2):
            r = Rank(c.d).begin(request(b, copies=copies, socket=c.sd.socket, piece_bytes=4096))
            time.sleep(0.1)
            r.call("cancel", "x")
            assert r.ended()["state"] == "failed"
        for _ in range(4):
            c.d.rpc(failing)
            assert (
                "No such sample"
                in Rank(c.d).begin(request(b, copies=copies, socket=c.sd.socket)).ended()["error"]
            )
            c.d.rpc(slowly, 0.003)
    # Sessions have some while they are replaced.
    assert arenas() < before + 4, "each of 12 loads has left one, or more"
    loaded(c.d, request(MODEL))


def failing(_worker: Any) -> None:
    from kvspray_vllm import load as module

    left = itertools.count()

    def sample(*args: Any) -> None:
        if next(left) == 5:
            raise OSError("No such sample")
        module._sample_inner(*args)

    module._sample = sample


def test_the_directory_is_another_one_now(c: Cluster, workdir: pathlib.Path) -> None:
    """What counts is what the engine started with."""
    model, name = workdir / "model-of-s", "model.layers.0.self_attn.k_proj.weight"
    shutil.copytree(MODEL, model)
    e = c.spawn("S", model=model, env=SERVES)
    try:
        e.wait_up()
        old = e.run(PROMPT, 12).tokens
        subprocess.run([sys.executable, "-c", WITHOUT, str(model), name], check=True)
        (said,) = e.rpc("kvspray_load_check", request(model))
        assert name in said["error"] and "is missing" in said["error"], said
        loaded(e, request(MODEL))
        # Nothing is known of the start: only by force, and then each part of a fused parameter must
        # come.
        e.rpc(forget)
        (said,) = e.rpc("kvspray_load_check", request(MODEL))
        assert "--force" in said["error"], said
        said = Rank(e).begin(request(model, force=True)).ended()
        assert said["state"] == "failed" and "qkv_proj" in said["error"], said
        never_serves(e, "qkv_proj")
        loaded(e, request(MODEL, force=True))
        assert e.run(PROMPT, 12).tokens == old
        # The loader's own complaint has the tensor's name.
        said = Rank(e).begin(request(made(workdir, "forced", "shape")[0], force=True)).ended()
        assert (
            said["state"] == "failed" and "after it was given the tensor 'model." in said["error"]
        ), said
        # A draft model.
        e.rpc(with_draft)
        for said in e.rpc("kvspray_load_check", request(MODEL)) + Rank(e).call("arm"):
            assert "draft model" in said["error"] and "Linear" in said["error"], said
    finally:
        e.stop()
        del c.engines["S"]


WITHOUT = """
import pathlib, sys
from safetensors.torch import load_file, save_file
(file,) = pathlib.Path(sys.argv[1]).glob("*.safetensors")
tensors = load_file(file)
del tensors[sys.argv[2]]
save_file(tensors, file, metadata={"format": "pt"})
"""


def forget(_worker: Any) -> None:
    from kvspray_vllm import load as module

    module._manifests.clear()


def with_draft(worker: Any) -> None:
    import torch

    getattr(worker, "worker", worker).get_draft_model = lambda: torch.nn.Linear(1, 1)


def test_the_sidecar_dies_in_the_middle(c: Cluster, slow: None, b: pathlib.Path) -> None:
    """Copies that it did not make are made without it."""
    new = c.r.run(PROMPT, 12).tokens
    cut = 0
    for i in range(6):
        asked = request(b, copies="sidecar", socket=c.sd.socket, piece_bytes=8192)
        r = Rank(c.d).begin(asked)
        rig.wait_for(
            "copies", lambda i=i, r=r: r.call("poll", "0")[0]["by_sidecar"] > 5 * i, 20, tick=0.001
        )
        c.sd.kill()
        said = r.ended()
        assert said["state"] == "loaded", said
        cut += 0 < said["by_sidecar"] < 200
        r.finish()
        c.d.wake_up()
        assert c.d.run(PROMPT, 12).tokens == new
        c.d.clear_prefix_cache()
        c.sd.start()
        c.connected()
    assert cut > 2, "the sidecar never died in the middle: nothing was shown"
    loaded(c.d, request(MODEL))


def test_the_prefix_cache_is_emptied(c: Cluster, b: pathlib.Path) -> None:
    c.p.run(PROMPT, 4)
    loaded(c.p, request(b))
    assert c.p.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
    loaded(c.p, request(MODEL))


def test_two_ranks(c: Cluster, b: pathlib.Path) -> None:
    e = c.spawn("T", env=SERVES, tensor_parallel_size=2)
    e.wait_up()
    old = e.run(PROMPT, 12).tokens
    assert old == c.p.run(PROMPT, 12).tokens
    loaded(e, request(b))
    assert e.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
    e.stop()
    del c.engines["T"]


def test_from_another_node(c: Cluster, b: pathlib.Path) -> None:
    offer = Offer(b, c.sp)
    try:
        done = loaded(c.d, request(offer.url, socket=c.sd.socket, piece_bytes=1 << 20))
        assert done["weights"] == digest_of(b)
        assert c.d.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
        # As for a GPU: the sidecar has the memory of the pieces once, and copies from it, too.
        loaded(c.d, request(MODEL))
        done = loaded(
            c.d, request(offer.url, socket=c.sd.socket, piece_bytes=1 << 20, copies="sidecar")
        )
        assert done["by_sidecar"] >= 2
        assert c.d.run(PROMPT, 12).tokens == c.r.run(PROMPT, 12).tokens
        # The offer ends in the middle of another load.
        asked = request(offer.url, socket=c.sd.socket, piece_bytes=4096)
        c.d.rpc(slowly, 0.003)
        r = Rank(c.d).begin(asked)
        offer.proc.kill()
        said = r.ended()
        assert said["state"] == "failed", said
        never_serves(c.d, "offer")
        c.d.rpc(slowly, 0.0)
        loaded(c.d, request(MODEL))
    finally:
        offer.proc.kill()
        offer.proc.wait()


def digest_of(dir: pathlib.Path) -> str:
    from kvspray.weights import digest

    return digest(dir)


@pytest.fixture
def server(zygote: None, workdir: pathlib.Path) -> Iterator[str]:
    """vllm serve with A, in processes of its own."""
    port = rig.free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--host",
        "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(16 << 20), "--dtype", "float32",
        "--served-model-name", "m",
    ]  # fmt: skip
    env = {
        **os.environ,
        **ENV,
        **SERVES,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    log = workdir / "server.log"
    with open(log, "wb") as f:
        proc = subprocess.Popen(command, env=env, stdout=f, stderr=f)
    url = f"http://127.0.0.1:{port}"
    try:
        rig.wait_for(
            "the server",
            lambda: proc.poll() is not None or rig.get(url + "/health") == "",
            300,
            tick=0.5,
        )
        assert proc.poll() is None, log.read_text()[-3000:]
        yield url
    finally:
        proc.terminate()
        proc.wait(60)


def said_by(url: str) -> str:
    body = json.dumps(
        {"model": "m", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    ).encode()
    ask = urllib.request.Request(
        url + "/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(ask, timeout=60) as f:
        return str(json.loads(f.read())["choices"][0]["text"])


def command(url: str, source: str | pathlib.Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [rig.BINARY, "load", str(source), "--engine", url, *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def asleep(url: str) -> bool:
    return bool(json.loads(rig.get(url + "/is_sleeping"))["is_sleeping"])


def test_the_command(server: str, b: pathlib.Path, workdir: pathlib.Path) -> None:
    old = said_by(server)
    run = command(server, b, "--json")
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (told["weights"], told["ranks"], told["awake"]) == (digest_of(b), 1, True)
    new = said_by(server)
    assert new != old and said_by(server) == new

    run = command(server, made(workdir, "server-shape", "shape")[0])
    assert (
        run.returncode == 1
        and "another shape" in run.stderr
        and "The engine is as it was" in run.stderr
    ), run.stderr
    assert said_by(server) == new

    run = command(server, MODEL, "--stay-asleep", "--level", "1")
    assert run.returncode == 0 and "asleep, with the new weights" in run.stdout, run
    assert asleep(server)
    with urllib.request.urlopen(
        urllib.request.Request(server + "/wake_up", method="POST"), timeout=60
    ) as f:
        assert json.loads(f.read())["status"] == "awake"
    assert said_by(server) == old

    # A load without a confirmation.
    wide = workdir / "served"
    shutil.copytree(b, wide)
    run = subprocess.run(
        [sys.executable, "-c", UNCONFIRMED, server, request(wide)], capture_output=True, text=True,
        check=True
    )  # fmt: skip
    with pytest.raises(urllib.error.HTTPError) as err:
        urllib.request.urlopen(
            urllib.request.Request(server + "/wake_up", method="POST"), timeout=60
        )
    assert err.value.code == 500 and asleep(server)
    run = command(server, b)
    assert (
        run.returncode == 1
        and "the load unconfirmed is under way" in run.stderr
        and "sleeps" not in run.stderr
    ), run.stderr
    time.sleep(16)
    run = command(server, b)
    assert run.returncode == 0, run.stderr
    assert said_by(server) == new


UNCONFIRMED = """
import json, sys, urllib.request
def post(path, body=None):
    data = json.dumps(body).encode() if body else b""
    ask = urllib.request.Request(sys.argv[1] + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(ask, timeout=60) as f:
        return json.loads(f.read() or "null")
def rpc(method, *args):
    body = {"method": "kvspray_load_" + method, "args": list(args)}
    (answer,) = post("/collective_rpc", body)["results"]
    assert "error" not in answer, answer
    return answer
digest = rpc("check", sys.argv[2])["digest"]
rpc("arm", "unconfirmed")
post("/sleep?level=2")
post("/wake_up?tags=weights")
rpc("begin", "unconfirmed", sys.argv[2], digest)
while rpc("poll", "unconfirmed", "0.5")["state"] == "loading":
    pass
"""
