"""A traceparent that an engine passes on leads to spans of both sidecars; without one there are
none."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest
from conftest import ENGINE, LAYERS, TIMEOUT_S, Serve, real_layout, until

import kvspray
from kvspray import protocol
from kvspray.source import Source

TRACE = "0af7651916cd43dd8448eb211c80319c"
GIVEN = f"00-{TRACE}-b7ad6b7169203331-01"


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Keeps the bodies that come. Tests in Go check their content, with the protocol's types."""
    came: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_body_of_an_intent_has_it_only_where_there_is_one() -> None:
    def body(traceparent: str) -> object:
        return protocol.decode(
            Source(b"x" * 16, b"h" * 32, 16, 1, [b""], 0, 1, 1, False, "r", 0, traceparent).body()
        )

    plain, traced = body(""), body(GIVEN)
    assert isinstance(plain, dict) and isinstance(traced, dict)
    assert "traceparent" not in plain and traced == {**plain, "traceparent": GIVEN}


@pytest.mark.parametrize("given", [GIVEN, "", "malformed", "x" * 300, "\u00e9" * 40])
def test_spans_of_real_sidecars(serve: Serve, given: str) -> None:
    with contextlib.ExitStack() as stack:
        url, came = stack.enter_context(collector())
        clients, sockets, processes = [], [], []
        for name in ("p", "d"):
            process, socket = serve(name, f"trace.otlp={url}", f"node={name}")
            processes.append(process)
            sockets.append(socket)
            client = stack.enter_context(
                kvspray.WorkerClient(
                    socket, engine=kvspray.EngineInfo("test", "1", name), layers=LAYERS
                )
            )
            region = client.alloc_region(LAYERS * 32768)
            stack.callback(region.close)
            client.register([region], real_layout())
            assert client.wait_connected(TIMEOUT_S), client.status()
            clients.append(client)
        asks = stack.enter_context(kvspray.SchedulerClient(sockets[0], engine=ENGINE))
        assert asks.wait_connected(TIMEOUT_S) and asks.endpoint is not None
        p, d = clients
        key = kvspray.prefix_hash(range(48))
        p.intent(
            b"x" * 16, key, 48, [(1, 2, 3)], ready=48, held=True, req="req-p", traceparent=given
        )
        d.expect(b"x" * 16, key, asks.endpoint, 48, 0, [(6, 4, 5)], req="req-d", traceparent=given)
        for client in (p, d):
            assert client.wait(TIMEOUT_S)
            assert [c.ok for c in client.poll()] == [True]
        for process in processes:  # what waits is sent before the end
            process.terminate()
        until(
            lambda: all(process.poll() is not None for process in processes), "the sidecars end", 60
        )
        if given != GIVEN:
            assert came == []
            return
        all_of_it = b"".join(came)
        assert bytes.fromhex(TRACE) in all_of_it
        for name in (
            "offer",
            "send",
            "queue",
            "wire",
            "receive",
            "grant",
            "arrive",
            "fence",
            "commit",
        ):
            assert b"kvspray." + name.encode() in all_of_it, name
        assert b"req-p" in all_of_it and b"req-d" in all_of_it
