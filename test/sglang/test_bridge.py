"""The bridge between engines of the test: what it sends to each, and what it does when one
fails."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

import zmq  # noqa: E402
import zmq.asyncio  # noqa: E402
from aiohttp import ClientSession, web  # noqa: E402
from sglang_server import rig  # noqa: E402

from kvspray_sglang import bridge, pd_wire  # noqa: E402

HOST, XFER, PEER = "127.0.0.1", bytes(range(16)), "10.0.0.1:7650"
IDS = list(range(40))


class World:
    """Two engines and a rank of the test, with a bridge between them."""

    def __init__(self) -> None:
        self.port = rig.free_port()
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self.answers: dict[str, Callable[[dict[str, Any]], Awaitable[web.Response]]] = {}
        self.zmq = zmq.asyncio.Context()
        self.rank = self.zmq.socket(zmq.PULL)
        self.rank_port = self.rank.bind_to_random_port(f"tcp://{HOST}")
        self.runners: list[web.AppRunner] = []

    async def engine(self, path: str) -> str:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            self.asked.setdefault(path, []).append(body)
            return await self.answers[path](body)

        return await self.serve([web.post(path, handle)], rig.free_port())

    async def serve(self, routes: list[web.RouteDef], port: int, b: Any = None) -> str:
        app = web.Application()
        app.add_routes(routes)
        if b is not None:
            app.on_startup.append(b.start)
            app.on_cleanup.append(b.stop)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        self.runners.append(runner)
        return f"http://{HOST}:{port}"

    async def frames(self) -> list[bytes]:
        return await asyncio.wait_for(self.rank.recv_multipart(), 20)

    async def send(self, port: int, frames: list[bytes]) -> None:
        with self.zmq.socket(zmq.PUSH) as sock:
            sock.connect(f"tcp://{HOST}:{port}")
            await sock.send_multipart(frames)
            await asyncio.sleep(0)

    async def close(self) -> None:
        for runner in reversed(self.runners):
            await runner.cleanup()
        self.zmq.destroy(linger=0)


def play(scene: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        try:
            await asyncio.wait_for(scene(world), 60)
        finally:
            await world.close()

    asyncio.run(run())


async def vllm_to_sglang(w: World) -> str:
    prefill, decode = await w.engine("/v1/completions"), await w.engine("/generate")
    b = bridge.VllmToSglang((HOST, w.port), prefill, PEER, decode, "m")
    return await w.serve(b.routes(), w.port, b)


def decode_waits(w: World, answer: dict[str, Any]) -> None:
    """SGLang's decode: asks the bridge for the pages, and answers after what comes of it."""

    async def generate(body: dict[str, Any]) -> web.Response:
        base = f"http://{HOST}:{body['bootstrap_port']}/route"
        async with ClientSession() as http:
            async with http.get(base + "?prefill_dp_rank=-1&target_tp_rank=-1") as got:
                assert (await got.json())["attn_tp_size"] == 1
            async with http.get(base + "?prefill_dp_rank=0&target_tp_rank=0") as got:
                rank = await got.json()
        room = pd_wire.Room(body["bootstrap_room"], HOST, w.rank_port, XFER, 3, 0, 1)
        await w.send(rank["rank_port"], room.encode())
        answer["frames"] = [await w.frames() for _ in range(3 if answer["offered"] else 2)]
        return web.json_response({"output_ids": [1]})

    w.answers["/generate"] = generate


@pytest.mark.parametrize("offered", [True, False])
def test_vllm_prefills(offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "PAGES_S", 0.05)

    async def scene(w: World) -> None:
        async def complete(body: dict[str, Any]) -> web.Response:
            spray = {"kvspray": {"xfer": XFER.hex()}} if offered else None
            choice = {"token_ids": [321]}
            return web.json_response({"choices": [choice], "kv_transfer_params": spray})

        w.answers["/v1/completions"] = complete
        seen: dict[str, Any] = {"offered": offered}
        decode_waits(w, seen)
        url = await vllm_to_sglang(w)
        body = {"input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        async with ClientSession() as http, http.post(url + "/generate", json=body) as got:
            assert await got.json() == {"output_ids": [1]}
        (asked,) = w.asked["/v1/completions"]
        assert (asked["prompt"], asked["max_tokens"], asked["temperature"]) == (IDS, 1, 0)
        # Whatever the checkpoint's generation_config.json has: the first token is vLLM's.
        for given in (asked, w.asked["/generate"][0]["sampling_params"]):
            assert {k: given[k] for k in bridge._NEUTRAL} == bridge._NEUTRAL
        assert asked["kv_transfer_params"]["kvspray"]["xfer"] == XFER.hex()
        room = w.asked["/generate"][0]["bootstrap_room"]
        peer, rest, *late = seen["frames"]
        assert pd_wire.decode(peer) == pd_wire.Peer(room, XFER, PEER, True)
        if offered:
            assert pd_wire.decode(rest) == pd_wire.First(room, XFER, 321, 0)
            assert late[0][:3] == [b"KVSPRAY_STATUS", str(room).encode(), b"0"]
            assert b"have not come" in late[0][4], "decode has not answered until then"
        else:
            assert rest[:3] == [b"KVSPRAY_STATUS", str(room).encode(), b"0"]
            assert b"offers no pages" in rest[4]

    play(scene)


def test_decode_dies_in_its_answer() -> None:
    """The client sees a connection that ends before the last chunk, and never a whole answer."""

    async def scene(w: World) -> None:
        async def generate(request: web.Request) -> web.StreamResponse:
            out = web.StreamResponse()
            await out.prepare(request)
            await out.write(b"data: one\n\n")
            await asyncio.sleep(0.1)
            assert request.transport is not None
            request.transport.abort()
            return out

        decode = await w.serve([web.post("/generate", generate)], rig.free_port())
        b = bridge.VllmToSglang((HOST, w.port), "http://127.0.0.1:1", PEER, decode, "m")
        await w.serve(b.routes(), w.port, b)
        reader, writer = await asyncio.open_connection(HOST, w.port)
        body = json.dumps({"input_ids": IDS}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: b\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        got = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert got.count(b"HTTP/") == 1 and b"data: one" in got and not got.endswith(b"0\r\n\r\n")

    play(scene)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": IDS, "sampling_params": [1]}),
        ("/generate", {"input_ids": IDS, "sampling_params": {"repetition_penalty": 2}}),
        ("/v1/completions", {"prompt": IDS, "n": "two"}),
        ("/v1/completions", {"prompt": IDS, "vllm_xargs": {"kv_transfer_params": {"a": 1}}}),
    ],
)
def test_refused(path: str, body: dict[str, Any]) -> None:
    async def scene(w: World) -> None:
        nobody = "http://127.0.0.1:1"
        if path == "/generate":
            b: Any = bridge.VllmToSglang((HOST, w.port), nobody, PEER, nobody, "m")
        else:
            b = bridge.SglangToVllm((HOST, w.port), nobody, (HOST, 1), nobody)
        url = await w.serve(b.routes(), w.port, b)
        async with ClientSession() as http, http.post(url + path, json=body) as got:
            assert got.status == 400, await got.text()

    play(scene)


def test_decode_gives_up() -> None:
    """Then vLLM's request is closed, which ends it there."""
    closed = asyncio.Event()

    async def scene(w: World) -> None:
        async def complete(body: dict[str, Any]) -> web.Response:
            try:
                await asyncio.sleep(60)
            finally:
                closed.set()
            raise AssertionError

        async def generate(body: dict[str, Any]) -> web.Response:
            room = pd_wire.Room(body["bootstrap_room"], HOST, w.rank_port, XFER, 3, 0, 1)
            async with ClientSession() as http:
                url = f"http://{HOST}:{w.port}/route?prefill_dp_rank=0&target_tp_rank=0"
                async with http.get(url) as got:
                    port = (await got.json())["rank_port"]
            await w.send(port, room.encode())
            await w.frames()
            while "/v1/completions" not in w.asked:
                await asyncio.sleep(0.01)
            await w.send(port, [b"ABORT", str(room.room).encode()])
            await asyncio.wait_for(closed.wait(), 20)
            return web.json_response({"output_ids": []})

        w.answers |= {"/v1/completions": complete, "/generate": generate}
        url = await vllm_to_sglang(w)
        async with ClientSession() as http:
            async with http.post(url + "/generate", json={"input_ids": IDS}) as got:
                assert got.status == 200

    play(scene)


@pytest.mark.parametrize("what", ["offered", "failed", "two ranks"])
def test_sglang_prefills(what: str) -> None:
    async def scene(w: World) -> None:
        sent: list[Any] = []

        async def generate(body: dict[str, Any]) -> web.Response:
            m = pd_wire.decode(await w.frames())
            assert isinstance(m, pd_wire.Room) and m.by_prompt and m.pages == 3
            assert m.room == body["bootstrap_room"] and body["input_ids"] == IDS
            sent.append(m)
            if what == "offered":
                await w.send(m.port, pd_wire.Peer(m.room, b"y" * 16, "10.9.9.9:1").encode())
                await w.send(m.port, pd_wire.Peer(m.room, m.xfer, PEER).encode())
                return web.json_response({})
            return web.json_response({"error": "out of memory"}, status=500)

        async def complete(body: dict[str, Any]) -> web.Response:
            return web.json_response({"choices": []})

        async def route(request: web.Request) -> web.Response:
            sizes = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
            if what == "two ranks":
                sizes["attn_tp_size"] = 2
            rank = {"rank_ip": HOST, "rank_port": w.rank_port}
            return web.json_response(sizes | {"page_size": 16} | rank)

        w.answers |= {"/v1/completions": complete, "/generate": generate}
        prefill, decode = await w.engine("/generate"), await w.engine("/v1/completions")
        port = rig.free_port()
        await w.serve([web.get("/route", route)], port)
        b = bridge.SglangToVllm((HOST, w.port), prefill, (HOST, port), decode)
        url = await w.serve(b.routes(), w.port, b)
        body = {"model": "m", "prompt": IDS, "max_tokens": 4}
        async with ClientSession() as http, http.post(url + "/v1/completions", json=body) as got:
            assert got.status == 200
        (asked,) = w.asked["/v1/completions"]
        assert {k: asked[k] for k in body} == body
        params = asked.get("kv_transfer_params")
        if what == "offered":
            want = {"v": 1, "xfer": sent[0].xfer.hex(), "peer": PEER, "fanout": 1}
            assert params["kvspray"] == want and params["do_remote_prefill"]
        else:
            assert params is None, "vLLM computes the prompt"

    play(scene)


def test_a_bridge_that_restarts_has_its_port_for_ranks() -> None:
    """SGLang's decode asks for it once, and keeps it as long as /health answers."""
    ranks = rig.free_port()

    async def scene(w: World) -> None:
        b = bridge.VllmToSglang((HOST, w.port), "http://a", PEER, "http://b", "m", ranks)
        url = await w.serve(b.routes(), w.port, b)
        query = "/route?prefill_dp_rank=0&target_tp_rank=0"
        async with ClientSession() as http, http.get(url + query) as got:
            assert (await got.json())["rank_port"] == ranks

    for _ in range(2):
        play(scene)


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for args, want in (
        (["--listen", "x"], "host:port"),
        (["--listen", "h:1", "--prefill-vllm", "http://a", "--decode-vllm", "http://b"], "want"),
        (["--listen", "h:1", "--prefill-vllm", "ftp://a", "--decode-sglang", "http://b"], "http"),
        (["--listen", "h:1", "--ranks-port", "65536"], "port"),
    ):
        with pytest.raises(SystemExit):
            bridge.main(args)
        assert want in capsys.readouterr().err
    assert json.dumps(bridge._address("[::1]:80")) == '["::1", 80]'
