"""vLLM's own NixlConnector with the back end KVSPRAY: a prefill and a decode server on CPUs, two
sidecars with two rails. Tokens are those of one engine. The end of a rail is no error. The end of a
sidecar is an error of NIXL, and the engines go on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import subprocess
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agents import until
from cluster import Sidecar, cluster_key, free_port, total
from conftest import PLUGINS, ROOT, skip
from hosts import cpu

from kvspray.trial.engines import Server, ask
from kvspray.trial.processes import START_S, wait_up

TOKENS = 12
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def rails(node: int) -> list[str]:
    return [f"10.80.{rail}.{node + 1}" for rail in range(2)]


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A network namespace with an address for each rail, of which the test can remove one."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        os.unshare(os.CLONE_NEWNET)
    except OSError as err:
        skip("netns", f"a network namespace: {err}; run as root")
    try:
        ip("link", "set", "lo", "up")
        for node in range(2):
            for address in rails(node):
                ip("address", "add", f"{address}/32", "dev", "lo")
        yield
    finally:
        os.setns(before, os.CLONE_NEWNET)
        os.close(before)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


class Pair:
    def __init__(self) -> None:
        self.sidecars: list[Sidecar] = []
        self.servers: list[Server] = []

    def start(self, dir: pathlib.Path) -> None:
        peer = {"cluster_key_file": cluster_key(dir)}
        for i, name in enumerate(("prefill", "decode")):
            listen = [{"name": f"rail{k}", "listen": f"{a}:0"} for k, a in enumerate(rails(i))]
            tcp = {"integrity": "aead", "rails": listen}
            transports = {"order": ["tcp"], "tcp": tcp}
            s = Sidecar(name, dir, {"peer": peer, "transports": transports})
            s.config["engine"]["socket"] = s.socket = str(s.dir / "kvspray.sock")
            self.sidecars.append(s.start())
        host = cpu(pathlib.Path(os.environ.get("KVSPRAY_BUILD", ROOT / ".build")), nixl=True)
        for s, role in zip(self.sidecars, ("kv_producer", "kv_consumer"), strict=True):
            kv = {
                "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"backends": ["KVSPRAY"], "kv_lease_duration": 12},
            }  # fmt: skip
            env = {
                "NIXL_PLUGIN_DIR": str(PLUGINS), "XDG_RUNTIME_DIR": str(s.dir),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }  # fmt: skip
            server = Server(s.name, s.dir)
            self.servers.append(server)
            server.start(
                host, "tiny-llama", kv, "--kv-cache-memory-bytes", str(48 << 20),
                "--max-num-batched-tokens", "4096", env=env,
            )  # fmt: skip
        wait_up(self.servers, print, START_S)

    def plain(self, prompt: list[int]) -> list[int]:
        """What one engine answers: the prefill engine by itself."""
        return tokens(ask(self.servers[0].url, prompt, None, TOKENS)[1])

    def transferred(self, prompt: list[int]) -> list[int]:
        _, answer = ask(self.servers[0].url, prompt, dict(PREFILL))
        return tokens(ask(self.servers[1].url, prompt, answer["kv_transfer_params"], TOKENS)[1])

    def carried(self, rail: str) -> float:
        return total(self.sidecars[1].metrics(), "kvspray_rail_bytes_total", rail=rail)

    def close(self) -> None:
        for s in [*self.servers, *self.sidecars]:
            s.stop()


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(300, 1000) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def pair(plugin: pathlib.Path, network: None, tmp_path_factory: Any) -> Iterator[Pair]:
    with contextlib.closing(Pair()) as p:
        p.start(tmp_path_factory.mktemp("pair"))
        yield p


def test_tokens(pair: Pair) -> None:
    before = pair.carried("rail0") + pair.carried("rail1")
    lengths = (33, 65, 200, 513, 1024, 4000)
    for prompt in prompts(1, *lengths):
        assert pair.transferred(prompt) == pair.plain(prompt), len(prompt)
    moved = pair.carried("rail0") + pair.carried("rail1") - before
    assert moved >= sum(n // 32 * 32 for n in lengths) * 2048  # bytes of a token, in four layers
    with ThreadPoolExecutor(8) as pool:
        many = prompts(2, *range(100, 900, 50))
        assert list(pool.map(pair.transferred, many)) == [pair.plain(p) for p in many]


def test_rail_ends(pair: Pair) -> None:
    """Requests on both sides of the moment at which a rail's address goes."""
    want = prompts(3, *[1500] * 12)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(pair.transferred, p) for p in want]
        until(lambda: sum(a.done() for a in answers) >= 3, "three answers")
        ip("address", "delete", f"{rails(1)[1]}/32", "dev", "lo")
        got = [a.result() for a in answers]
    assert got == [pair.plain(p) for p in want]
    before = pair.carried("rail1")
    (prompt,) = prompts(4, 1500)
    assert pair.transferred(prompt) == pair.plain(prompt)
    assert pair.carried("rail1") == before
    ip("address", "add", f"{rails(1)[1]}/32", "dev", "lo")


@pytest.mark.parametrize("side", [0, 1])
def test_sidecar_ends(pair: Pair, side: int) -> None:
    (lost, local, again) = prompts(5 + side, 500, 500, 500)
    _, answer = ask(pair.servers[0].url, lost, dict(PREFILL))
    pair.sidecars[side].kill()
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(pair.servers[1].url, lost, answer["kv_transfer_params"], TOKENS)
    assert refused.value.code == 500
    assert tokens(ask(pair.servers[1].url, local, None, TOKENS)[1]) == pair.plain(local)
    pair.sidecars[side].start()

    def serves() -> bool:
        try:
            return pair.transferred(again) == pair.plain(again)
        except urllib.error.HTTPError:
            again[0] += 1  # another prompt: D has no part of it
            return False

    until(serves, "a transfer after the restart")
