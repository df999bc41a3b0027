"""``python -m kvspray.offer DIRECTORY``: offers a checkpoint's bytes to engines on other nodes.

Requests come by HTTP: what the checkpoint holds, and which piece is wanted next. The bytes go from
this host's sidecar to that of the engine, over all rails and with their integrity, and only within
the sidecars' cluster. A directory of which a file is written to is no longer offered.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import http.server
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

from .checkpoint import Manifest, Part, Piece, offer_name
from .client import EngineInfo
from .region import KvsprayError
from .weights import CheckpointError
from .weightstream import (
    CONNECT_S,
    DEADLINE_S,
    PAGE_BYTES,
    PIECE_BYTES,
    WAIT_S,
    Arena,
    Block,
    Files,
    LoadError,
    offer_layout,
)
from .worker import WorkerClient

ARENA_BYTES = 1 << 30
MAX_BODY_BYTES = 4096
MAX_WAITING = 1024  # pieces
# For a piece that is read: its receiver waits for it already, so this is the time of a transfer.
# Then its memory goes to the next.
GIVE_S = 20.0
MAX_CONNECTIONS = 256
MAX_PER_ADDRESS = 64  # connections: each engine's rank has a few
THREADS = 8

_log = logging.getLogger("kvspray.offer")


class Offer:
    """One directory. Pieces wait in the order of their requests until the arena has room."""

    def __init__(self, root: str, socket_path: str | None, arena_bytes: int = ARENA_BYTES) -> None:
        self._files = Files(root)
        self.manifest: Manifest = self._files.manifest
        self._arena = Arena(arena_bytes, PAGE_BYTES)
        self._arena.fill(arena_bytes)  # before a receiver waits for a piece
        self._files.prepare(self._arena)
        self._lock = threading.Condition()
        self._waiting = 0
        self._closed = False
        self._blocks: dict[int, Block] = {}  # by lease
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "kvspray-offer")
        self.bytes = 0
        self._client = WorkerClient(
            socket_path,
            engine=EngineInfo("kvspray-offer", id=f"offer-{os.getpid()}-{secrets.token_hex(4)}"),
            layers=1,
            deadline_s=DEADLINE_S,
            log=_log,
        )
        self._ends = threading.Thread(target=self._watch, name="kvspray-offer-ends")
        self._client.register(
            [self._arena.region], offer_layout(self.manifest, self._arena.nbytes // PAGE_BYTES)
        )
        if not self._client.wait_connected(CONNECT_S):
            error = self._client.status().error or "none answers"
            self.close()
            raise LoadError(
                f"no sidecar takes the offer: {error}; start kvspray serve on this host, or name "
                "its socket with --socket"
            )
        self._ends.start()

    def describe(self) -> dict[str, Any]:
        self._files.check()
        return {"endpoint": self._client.status().endpoint, "manifest": self.manifest.to_json()}

    def request(self, body: object) -> None:
        """Reads a piece for the engine that has requested it, and returns once the sidecar has it.
        Raises LoadError or CheckpointError."""
        xfer, piece = self._piece(body)
        self._files.check()
        with self._lock:
            if self._closed:
                raise LoadError("the offer ends")
            if self._waiting >= MAX_WAITING:
                raise LoadError(f"{MAX_WAITING} pieces wait already: load fewer engines at a time")
            self._waiting += 1
            serving = self._pool.submit(self._serve, xfer, piece)
        serving.result()

    def _piece(self, body: object) -> tuple[bytes, Piece]:
        if not isinstance(body, dict):
            raise LoadError(f"the request is a {type(body).__name__}, want a map")
        if body.get("digest") != self.manifest.digest:
            raise CheckpointError(
                f"digest is {str(body.get('digest'))[:80]!r}, and {self.manifest.digest} is "
                "offered; load again"
            )
        try:
            xfer = bytes.fromhex(str(body["xfer"]))
            file, start, nbytes = (body[k] for k in ("file", "start", "nbytes"))
            good = all(type(x) is int and x >= 0 for x in (file, start, nbytes)) and len(xfer) == 16
            good = (
                good
                and file < len(self.manifest.files)
                and 1 <= nbytes <= PIECE_BYTES * 4
                and start + nbytes <= self.manifest.files[file].size
            )
        except (KeyError, ValueError):
            good = False
        if not good:
            raise LoadError(f"no such piece: {str(body)[:200]}")
        return xfer, Piece(file, start, nbytes, (Part(0, 0, 0, nbytes),))

    def _serve(self, xfer: bytes, piece: Piece) -> None:
        at = None
        end = time.monotonic() + DEADLINE_S
        with self._lock:
            while (
                not self._closed
                and (at := self._arena.take(piece.nbytes)) is None
                and time.monotonic() < end
            ):
                self._lock.wait(WAIT_S)
            self._waiting -= 1
        if at is None:
            raise LoadError(
                "the offer ends"
                if self._closed
                else f"no memory for a piece within {DEADLINE_S:g} s: load fewer engines at a time"
            )
        block = Block(self._arena, piece, at, 0)
        try:
            self._files.start(block)
            self._files.finish(block)
            self._files.check()
            self._give(xfer, block)
        except BaseException:
            self._back(block)
            raise

    def _give(self, xfer: bytes, block: Block) -> None:
        first, count = block.at // PAGE_BYTES, -(-block.piece.nbytes // PAGE_BYTES)
        with self._lock:  # the end must find the lease
            lease = self._client.intent(
                xfer, offer_name(self.manifest.digest, block.piece, xfer), count,
                [range(first, first + count)], ready=count, req="weights", held=True,
                deadline_s=GIVE_S,
            )  # fmt: skip
            if not lease:
                raise LoadError(
                    f"the offer's sidecar takes no piece: {self._client.refusal}; load again once "
                    "kvspray serve runs there"
                )
            self._blocks[lease] = block

    def _watch(self) -> None:
        while not self._closed:
            self._client.wait(WAIT_S)
            for c in self._client.poll():
                with self._lock:
                    block = self._blocks.pop(c.lease, None)
                if block is not None:
                    self.bytes += c.bytes
                    self._back(block)

    def _back(self, block: Block) -> None:
        with self._lock:
            block.give_back()
            self._lock.notify_all()

    def stop(self) -> None:
        """Takes no further request."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def close(self) -> None:
        """Once no thread is in a call of this object. Ends the threads before what they use."""
        self.stop()
        self._pool.shutdown(wait=True)
        self._client.close()  # the watch's wait returns
        if self._ends.ident is not None:
            self._ends.join()
        self._files.stop()
        self._files.directory.close()


def server(offer: Offer, host: str, port: int) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 30.0

        def do_GET(self) -> None:
            if self.path == "/v1/manifest":
                self._answer(offer.describe)
            else:
                self._send(404, {"error": f"{self.path[:80]}: not there"})

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self.path != "/v1/pieces" or not length.isdigit() or int(length) > MAX_BODY_BYTES:
                self._send(
                    400,
                    {
                        "error": (
                            f"{self.path[:80]}: want /v1/pieces with at most {MAX_BODY_BYTES} bytes"
                        )
                    },
                )
                return
            raw = self.rfile.read(int(length))
            self._answer(lambda: offer.request(json.loads(raw)))

        def _answer(self, what: Any) -> None:
            try:
                answer = what()
            except (LoadError, CheckpointError, KvsprayError, ValueError, RecursionError) as err:
                self._send(409, {"error": str(err)})
            else:
                self._send(200, answer if answer is not None else {})

        def _send(self, status: int, answer: object) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            _log.debug(format, *args)

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = False  # server_close joins them
        request_queue_size = 128

        def __init__(self, *args: Any) -> None:
            self._open: collections.Counter[str] = collections.Counter()
            self._sockets: set[Any] = set()
            self._lock = threading.Lock()
            super().__init__(*args)

        def server_close(self) -> None:
            with self._lock:
                for s in self._sockets:
                    with contextlib.suppress(OSError):  # the other end has closed it
                        # No further request; the answer to the last one leaves.
                        s.shutdown(socket.SHUT_RD)
            super().server_close()

        def verify_request(self, request: Any, client_address: Any) -> bool:
            with self._lock:
                if (
                    self._open.total() >= MAX_CONNECTIONS
                    or self._open[client_address[0]] >= MAX_PER_ADDRESS
                ):
                    return False  # it is closed: the client reports that the offer does not answer
                self._open[client_address[0]] += 1
                self._sockets.add(request)
                return True

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                with self._lock:
                    self._sockets.discard(request)
                    self._open[client_address[0]] -= 1
                    if not self._open[client_address[0]]:
                        del self._open[client_address[0]]

    return Server((host, port), Handler)


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m kvspray.offer",
        description="Offers the weights in a directory to engines on other nodes.",
    )
    p.add_argument("directory", help="of safetensors files")
    p.add_argument(
        "--listen",
        default="127.0.0.1:7655",
        metavar="HOST:PORT",
        help="for requests; port 0 takes a free one (default: %(default)s)",
    )
    p.add_argument("--socket", help="unix socket of this host's sidecar (default: its default)")
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        p.error(f"--listen {args.listen!r}: want HOST:PORT")
    try:
        offer = Offer(os.path.abspath(args.directory), args.socket)
        web = server(offer, host.strip("[]"), int(port))
    except (LoadError, CheckpointError, KvsprayError) as err:
        sys.exit(f"kvspray: {err}")
    except OSError as err:
        sys.exit(f"kvspray: --listen {args.listen}: {err.strerror}")
    ends = threading.Thread(target=web.shutdown, name="kvspray-offer-stops")

    def stop(*_: object) -> None:
        if ends.ident is None:
            ends.start()

    signal.signal(signal.SIGTERM, stop)
    print(
        f"kvspray: {offer.manifest.digest} is offered at http://{host}:{web.server_address[1]}",
        flush=True,
    )
    try:
        web.serve_forever()
    except KeyboardInterrupt:
        pass
    offer.stop()  # what waits for memory of the arena is refused
    web.server_close()
    offer.close()


if __name__ == "__main__":
    main()
