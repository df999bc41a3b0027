"""A pair of a prefill and a decode engine of two kinds: vLLM and SGLang, or SGLang and vLLM.

    python -m kvspray_sglang.bridge --listen 10.0.0.1:8000 --prefill-vllm http://10.0.0.1:8001
        --prefill-peer 10.0.0.1:7650 --decode-sglang http://10.0.0.2:30000
    python -m kvspray_sglang.bridge --listen 10.0.0.1:8000 --prefill-sglang http://10.0.0.1:30000
        --prefill-bootstrap 10.0.0.1:8998 --decode-vllm http://10.0.0.2:8001

The bridge serves the decode engine's own interface (``/generate`` or ``/v1/completions``) for
prompts of token ids, and sends each prompt to both engines. To an SGLang it is what another SGLang
would be: a bootstrap server and a prefill rank, or a decode rank (pd_wire.py). To a vLLM it is a
router (``kv_transfer_params``). The pages move between the sidecars, which compare the prompt that
each engine has, and the identity and layout of both caches.

One thread runs everything. A request lives in ``_rooms`` from its arrival until its answer is out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import secrets
import sys
import urllib.parse
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from kvspray_sglang import pd_wire

MAX_ROOMS = 4096
MAX_SOCKETS = 1024  # to ranks; one that was started again has another address
MAX_BODY_BYTES = 64 << 20
MAX_PROMPT_TOKENS = 1 << 24
ENGINE_S = 600.0  # of one request to an engine
PEER_S = 60.0  # until SGLang's prefill names its sidecar
PAGES_S = 30.0  # until the pages of a prompt that is computed, or answered, have moved
INFO_S = 5.0
_STATUS = b"KVSPRAY_STATUS"
_ABORT = b"ABORT"
_FAILED = b"0"  # KVPoll.Failed

# What SGLang's /generate may have. The first token is vLLM's, so both engines must sample alike.
_BODY = ("input_ids", "sampling_params", "stream", "rid")
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
# One engine may have other defaults, of the checkpoint's generation_config.json or of an argument.
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_DECODE_ONLY = (
    "max_new_tokens", "ignore_eos", "stop", "stop_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim",
)  # fmt: skip

_log = logging.getLogger("kvspray.bridge")


class Refused(ValueError):
    """A request that this pair cannot serve; the text names the field and the remedy."""


@dataclass
class _Room:
    ids: list[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    xfer: bytes = b""
    peer: asyncio.Future[str] | None = None  # SGLang's prefill has named its sidecar
    prefill: asyncio.Task[None] | None = None


class _Bridge:
    """What both directions share: sockets to SGLang's ranks, and answers that are passed on."""

    def __init__(self, host: str, decode: str, ranks: int) -> None:
        """``ranks``: the port for SGLang's ranks; 0: any."""
        self._host, self._decode = host, decode
        self._rooms: dict[int, _Room] = {}
        self._zmq = zmq.asyncio.Context()
        self._pull = self._zmq.socket(zmq.PULL)
        if ranks:
            self._pull.bind(f"tcp://{_in_url(host)}:{ranks}")
        self._port = ranks or int(self._pull.bind_to_random_port(f"tcp://{_in_url(host)}"))
        self._push: dict[tuple[str, int], zmq.asyncio.Socket] = {}
        self._http: ClientSession
        self._loop: asyncio.Task[None]

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def start(self, _: web.Application) -> None:
        self._http = ClientSession(timeout=ClientTimeout(total=ENGINE_S))
        self._loop = asyncio.create_task(self._messages())

    async def stop(self, _: web.Application) -> None:
        self._loop.cancel()
        await self._http.close()
        self._zmq.destroy(linger=0)

    async def _messages(self) -> None:
        while True:
            frames = await self._pull.recv_multipart()
            try:
                await self._message(frames)
            except Exception as err:  # what comes from another host ends nothing here
                _log.warning("a message of an engine is dropped: %s", err)

    async def _message(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    async def _send(self, to: tuple[str, int], frames: list[bytes]) -> None:
        sock = self._push.get(to)
        if sock is None:
            if len(self._push) >= MAX_SOCKETS:
                self._push.pop(next(iter(self._push))).close()
            sock = self._push[to] = self._zmq.socket(zmq.PUSH)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDTIMEO, int(INFO_S * 1000))
            sock.connect(f"tcp://{_in_url(to[0])}:{to[1]}")
        await sock.send_multipart(frames)

    def _new_room(self, room: _Room) -> int:
        if len(self._rooms) >= MAX_ROOMS:
            raise web.HTTPServiceUnavailable(text=f"kvspray: {MAX_ROOMS} requests are under way\n")
        while (number := secrets.randbits(62)) in self._rooms or not number:
            pass
        self._rooms[number] = room
        return number

    def _close_room(self, number: int) -> None:
        room = self._rooms.pop(number)
        if room.prefill is not None:
            room.prefill.cancel()

    async def _pass_on(
        self, request: web.Request, url: str, body: Mapping[str, Any]
    ) -> web.StreamResponse:  # fmt: skip
        """The decode engine's answer, as it comes."""
        async with self._http.post(url, json=body) as answer:
            out = web.StreamResponse(status=answer.status)
            out.content_type = answer.content_type
            await out.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await out.write(chunk)
            except (ClientError, TimeoutError) as err:
                # The status is sent: only a broken connection shows that the answer is not whole.
                _log.warning("decode has ended its answer early: %s", err or type(err).__name__)
                if request.transport is not None:
                    request.transport.abort()
                return out
            await out.write_eof()
            return out

    async def health(self, _: web.Request) -> web.Response:
        """SGLang's decode asks every few seconds, and after two failures gives up all requests. An
        engine that dies ends its own."""
        return web.Response(text="OK\n")


class VllmToSglang(_Bridge):
    """Prefill by vLLM. To SGLang's decode server this process is a prefill server of one rank."""

    def __init__(
        self, listen: tuple[str, int], prefill: str, peer: str, decode: str, model: str,
        ranks: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(listen[0], decode, ranks)
        self._listen, self._prefill, self._peer, self._model = listen, prefill, peer, model

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", _refusing(self.generate)),
            web.get("/route", self.route),
            web.get("/health", self.health),
        ]

    async def route(self, request: web.Request) -> web.Response:
        """SGLang's bootstrap protocol: the engine, then one of its ranks."""
        asked = [request.query.get(k, "") for k in ("prefill_dp_rank", "target_tp_rank")]
        if asked != ["-1", "-1"]:
            return web.json_response({"rank_ip": self._host, "rank_port": self._port})
        info = {
            "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1,
            # The sidecars compare the caches, and bridge pages of other sizes.
            "page_size": None, "kv_cache_dtype": None, "follow_bootstrap_room": True,
        }  # fmt: skip
        return web.json_response(info)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        for key in body:
            if key not in _BODY:
                raise Refused(f"{key!r} is not passed between engines; leave it out")
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise Refused("sampling_params is no object; send a request for each prompt")
        for key in sampling:
            if key not in _SAMPLING and key not in _DECODE_ONLY:
                raise Refused(
                    f"sampling_params[{key!r}] is not known to both engines; leave it out"
                )
        sampling = _SAMPLING | _NEUTRAL | sampling
        ids = _ids(body.get("input_ids"), "input_ids")
        number = self._new_room(_Room(ids, {k: sampling[k] for k in _SAMPLING}))
        try:
            more = {
                "sampling_params": sampling, "bootstrap_host": self._listen[0],
                "bootstrap_port": self._listen[1], "bootstrap_room": number,
            }  # fmt: skip
            return await self._pass_on(request, self._decode + "/generate", {**body, **more})
        finally:
            self._close_room(number)

    async def _message(self, frames: list[bytes]) -> None:
        if frames and frames[0] == _ABORT:
            room = self._rooms.get(int(frames[1]))
            if room is not None and room.prefill is not None:
                room.prefill.cancel()  # vLLM gives the request up, and its sidecar the pages
            return
        m = pd_wire.decode(frames)
        room = self._rooms.get(m.room) if isinstance(m, pd_wire.Room) else None
        if room is None or room.prefill is not None or not isinstance(m, pd_wire.Room):
            return
        room.prefill = asyncio.create_task(self._compute(room, m))

    async def _compute(self, room: _Room, m: pd_wire.Room) -> None:
        to = (m.host, m.port)
        try:
            if m.ranks != 1:
                raise Refused(f"{m.ranks} decode ranks share a prefill rank; want one")
            # Before the prompt is computed: pages move while the next ones are.
            await self._send(to, pd_wire.Peer(m.room, m.xfer, self._peer, True).encode())
            token, cached = await self._first_token(room, m.xfer)
            await self._send(to, pd_wire.First(m.room, m.xfer, token, cached).encode())
        except (ClientError, TimeoutError, OSError, ValueError, KeyError, zmq.ZMQError) as err:
            reason = f"prefill by vLLM: {err or type(err).__name__}"
            _log.warning("room %d: %s", m.room, reason)
        else:
            # vLLM answers before its worker has learned whether a sidecar takes the offer. Decode
            # drops what follows if it has the pages.
            await asyncio.sleep(PAGES_S)
            reason = f"the pages have not come {PAGES_S:g} s after vLLM's first token"
        text = f"kvspray: {reason}"[:2000].encode()
        with contextlib.suppress(zmq.ZMQError):
            await self._send(to, [_STATUS, str(m.room).encode(), _FAILED, b"0", text])

    async def _first_token(self, room: _Room, xfer: bytes) -> tuple[int, int]:
        if not self._model:
            async with self._http.get(self._prefill + "/v1/models") as answer:
                self._model = str((await answer.json())["data"][0]["id"])
        body = {
            "model": self._model, "prompt": room.ids, "max_tokens": 1, "ignore_eos": True,
            "return_token_ids": True, **room.sampling, **_NEUTRAL,
            "kv_transfer_params": {
                "do_remote_decode": True, "do_remote_prefill": False,
                "kvspray": {"v": 1, "xfer": xfer.hex(), "fanout": 1},
            },
        }  # fmt: skip
        async with self._http.post(self._prefill + "/v1/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise Refused(f"HTTP {answer.status}: {text[:500]}")
            got = json.loads(text)
        given = (got.get("kv_transfer_params") or {}).get("kvspray") or {}
        if given.get("xfer") != xfer.hex():
            # Its log has the reason. Decode must not wait for pages that do not come.
            raise Refused("it has computed the prompt and offers no pages; see its log")
        (token,) = got["choices"][0]["token_ids"]
        details = (got.get("usage") or {}).get("prompt_tokens_details") or {}
        return int(token), int(details.get("cached_tokens") or 0)


class SglangToVllm(_Bridge):
    """Prefill by SGLang. To SGLang's prefill server this process is a decode rank."""

    def __init__(
        self, listen: tuple[str, int], prefill: str, bootstrap: tuple[str, int], decode: str,
        ranks: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(listen[0], decode, ranks)
        self._prefill, self._bootstrap = prefill, bootstrap
        self._background: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", _refusing(self.complete)),
            web.get("/health", self.health),
        ]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        ids = _ids(body.get("prompt"), "prompt")
        if body.get("n") not in (None, 1):
            raise Refused(f"n is {str(body['n'])[:64]}; send a request for each answer")
        # vLLM takes transfers from its extra arguments, too. Only the bridge names one.
        more = body.get("vllm_xargs")
        for given in (body, more if isinstance(more, dict) else {}):
            for key in ("kv_transfer_params", "cache_salt", "prompt_embeds"):
                if given.get(key):
                    raise Refused(
                        f"{key} is set, which SGLang's prefill does not have; leave it out"
                    )
        number = self._new_room(_Room(ids, xfer=secrets.token_bytes(pd_wire.XFER_BYTES)))
        try:
            peer = await self._offered(number)
            if peer:
                xfer = self._rooms[number].xfer.hex()
                body["kv_transfer_params"] = {
                    "do_remote_prefill": True, "do_remote_decode": False,
                    "kvspray": {"v": 1, "xfer": xfer, "peer": peer, "fanout": 1},
                }  # fmt: skip
            answer = await self._pass_on(request, self._decode + "/v1/completions", body)
        except BaseException:
            self._close_room(number)
            raise
        # Its pages may still be read: SGLang gives them back once its sidecar has ended the lease.
        self._later(self._linger(number))
        return answer

    def _later(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _linger(self, number: int) -> None:
        prefill = self._rooms[number].prefill
        try:
            if prefill is not None:
                await asyncio.wait({prefill}, timeout=PAGES_S)
        finally:
            self._close_room(number)

    async def _offered(self, number: int) -> str:
        """The sidecar that has the prompt, or will have it. Empty: vLLM computes the prompt."""
        room = self._rooms[number]
        room.peer = asyncio.get_running_loop().create_future()
        try:
            to, page = await self._rank()
            pages = -(-len(room.ids) // page)
            asked = pd_wire.Room(
                number, self._host, self._port, room.xfer, pages, 0, 1, by_prompt=True
            )
            await self._send(to, asked.encode())
            room.prefill = asyncio.create_task(self._compute(number, room, to))
            return await asyncio.wait_for(asyncio.shield(room.peer), PEER_S)
        except (ClientError, TimeoutError, OSError, ValueError, KeyError, zmq.ZMQError) as err:
            _log.warning("room %d: no prefill by SGLang: %s", number, err or type(err).__name__)
            return ""

    async def _rank(self) -> tuple[tuple[str, int], int]:
        """Where SGLang's prefill rank listens, and the tokens of its pages. Asked for each request:
        a server that was started again has another port."""
        base = f"http://{_in_url(self._bootstrap[0])}:{self._bootstrap[1]}/route"
        keys = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        got: list[dict[str, Any]] = []
        for rank in (-1, 0):
            query = urllib.parse.urlencode(dict.fromkeys(keys, rank))
            async with self._http.get(f"{base}?{query}", timeout=ClientTimeout(INFO_S)) as answer:
                if answer.status != 200:
                    text = (await answer.text())[:200]
                    raise Refused(f"its bootstrap server: HTTP {answer.status}: {text}")
                got.append(await answer.json(content_type=None))
        for key in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"):
            if int(got[0][key]) != 1:
                raise Refused(f"its {key} is {got[0][key]}, and the bridge serves 1")
        return (str(got[1]["rank_ip"]), int(got[1]["rank_port"])), int(got[0]["page_size"])

    async def _compute(self, number: int, room: _Room, to: tuple[str, int]) -> None:
        """Ends when the pages are sent. Cancelled: SGLang gives the request up."""
        body = {
            "input_ids": room.ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "bootstrap_host": self._bootstrap[0], "bootstrap_port": self._bootstrap[1],
            "bootstrap_room": number,
        }  # fmt: skip
        reason = ""
        try:
            async with self._http.post(self._prefill + "/generate", json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    reason = f"HTTP {answer.status}: {text[:500]}"
        except (ClientError, TimeoutError, OSError) as err:
            reason = str(err) or type(err).__name__
        except asyncio.CancelledError:
            self._later(self._give_up(number, to))  # not awaited: this task is cancelled
            raise
        if reason:
            self._failed(room, reason)

    async def _give_up(self, number: int, to: tuple[str, int]) -> None:
        with contextlib.suppress(zmq.ZMQError):
            await self._send(to, [_ABORT, str(number).encode()])

    def _failed(self, room: _Room, reason: str) -> None:
        if room.peer is not None and not room.peer.done():
            room.peer.set_exception(Refused(reason))
        else:
            _log.warning("prefill by SGLang: %s", reason)

    async def _message(self, frames: list[bytes]) -> None:
        if frames and frames[0] == _STATUS:
            room = self._rooms.get(int(frames[1]))
            if room is not None and frames[2] == _FAILED:
                self._failed(room, frames[4].decode(errors="replace") if frames[4:] else "failed")
            return
        m = pd_wire.decode(frames)
        if not isinstance(m, pd_wire.Peer):
            return  # its first token: vLLM computes the last position itself
        room = self._rooms.get(m.room)
        if room is not None and room.xfer == m.xfer and room.peer and not room.peer.done():
            room.peer.set_result(m.endpoint)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as err:
        raise Refused(f"the body is no JSON: {err}") from err
    if not isinstance(body, dict):
        raise Refused("the body is no object")
    return body


def _ids(value: Any, name: str) -> list[int]:
    ok = isinstance(value, list) and 0 < len(value) <= MAX_PROMPT_TOKENS
    if not ok or any(type(t) is not int or not 0 <= t < 1 << 31 for t in value):
        raise Refused(f"{name} is no list of token ids; both engines must have the same tokens")
    return list(value)


def _refusing(handler: Any) -> Any:
    async def call(request: web.Request) -> web.StreamResponse:
        try:
            out: web.StreamResponse = await handler(request)
            return out
        except Refused as err:
            return web.json_response({"error": {"message": f"kvspray: {err}"}}, status=400)
        except (ClientError, TimeoutError) as err:
            text = f"kvspray: an engine does not answer: {err or type(err).__name__}"
            return web.json_response({"error": {"message": text}}, status=502)

    return call


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no host:port")
    return host, int(port)


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _url(text: str) -> str:
    if not text.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http://")
    return text.rstrip("/")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="kvspray_sglang.bridge", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--listen", type=_address, required=True,
                   help="host:port; the engines reach the bridge at this host")  # fmt: skip
    prefill = p.add_mutually_exclusive_group(required=True)
    prefill.add_argument("--prefill-vllm", type=_url)
    prefill.add_argument("--prefill-sglang", type=_url)
    p.add_argument("--prefill-peer", help="host:port of the sidecar of vLLM's prefill")
    p.add_argument("--prefill-bootstrap", type=_address,
                   help="host:port of SGLang's bootstrap server")  # fmt: skip
    p.add_argument("--ranks-port", type=_port, default=0,
        help="port for SGLang's ranks. SGLang's decode keeps it: with any other one it "
        "would not find a bridge that has restarted, for minutes. Default: a free one")  # fmt: skip
    p.add_argument("--model", default="", help="vLLM's name for the model; default: its first")
    decode = p.add_mutually_exclusive_group(required=True)
    decode.add_argument("--decode-vllm", type=_url)
    decode.add_argument("--decode-sglang", type=_url)
    args = p.parse_args(argv)
    if args.prefill_vllm and args.decode_sglang and args.prefill_peer:
        bridge: _Bridge = VllmToSglang(
            args.listen, args.prefill_vllm, args.prefill_peer, args.decode_sglang, args.model,
            args.ranks_port,
        )  # fmt: skip
    elif args.prefill_sglang and args.decode_vllm and args.prefill_bootstrap:
        bridge = SglangToVllm(
            args.listen, args.prefill_sglang, args.prefill_bootstrap, args.decode_vllm,
            args.ranks_port,
        )  # fmt: skip
    else:
        p.error("want --prefill-vllm, --prefill-peer and --decode-sglang, or --prefill-sglang, "
                "--prefill-bootstrap and --decode-vllm")  # fmt: skip
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes(bridge.routes())
    app.on_startup.append(bridge.start)
    app.on_cleanup.append(bridge.stop)
    # A client that goes away ends its requests to both engines.
    web.run_app(
        app, host=args.listen[0], port=args.listen[1], access_log=None, handler_cancellation=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
