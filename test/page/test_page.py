"""The sidecar's page in a real browser, beside real transfers: what it shows, and that all users
can use it."""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import http.server
import os
import pathlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from cluster import BINARY, routed, wait_for
from conftest import CHROMIUM
from playwright.sync_api import Browser, Page, expect, sync_playwright
from pyroute2 import IPRoute
from servers import Process
from traffic import Pair

RAILS = {"rail0": "10.77.0.1", "rail1": "10.77.1.1"}
LAYER_S = 0.03
SHOTS = os.environ.get("KVSPRAY_SHOTS")  # a directory for screenshots

pytestmark = pytest.mark.usefixtures("needs")


class Links:
    """The rails' interfaces. Its library wants a thread without Playwright's event loop."""

    def __init__(self) -> None:
        self._thread = cf.ThreadPoolExecutor(1)
        self._thread.submit(self._make).result()

    def _make(self) -> None:
        self._ip = IPRoute()
        self._set("lo", "up")
        for name, address in RAILS.items():
            self._ip.link("add", ifname=name, kind="veth", peer=f"{name}-far")
            (index,) = self._ip.link_lookup(ifname=name)
            self._ip.addr("add", index=index, address=address, prefixlen=24)
            self._set(name, "up")
            self._set(f"{name}-far", "up")

    def _set(self, name: str, state: str) -> None:
        (index,) = self._ip.link_lookup(ifname=name)
        self._ip.link("set", index=index, state=state)

    def set(self, name: str, state: str) -> None:
        self._thread.submit(self._set, name, state).result()


@pytest.fixture(scope="module")
def links(needs: None) -> Links:
    return Links()


@pytest.fixture(scope="module")
def pair(links: Links) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        p = Pair(pathlib.Path(dir), list(RAILS.values())).start()
        try:
            yield p
            assert all(s.panics() is None for s in p.sidecars)
        finally:
            p.close()


@pytest.fixture(scope="module")
def browser(needs: None) -> Iterator[Browser]:
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield b
        b.close()


@contextlib.contextmanager
def opened(browser: Browser, theme: Any, url: str) -> Iterator[Page]:
    """A page. Whatever a test does with it, nothing is loaded from elsewhere and no error
    appears."""
    context = browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda err: wrong.append(str(err)))
    page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(r.url))
    page.goto(url)
    page.wait_for_selector("body[data-drawn]")
    yield page
    violations = Axe().run(page).response["violations"]
    assert not violations, [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in violations]
    context.close()
    assert not wrong


@pytest.fixture(params=["light", "dark"])
def page(request: Any, browser: Browser, pair: Pair) -> Iterator[Page]:
    """Decode's page."""
    with opened(browser, request.param, pair.sidecars[1].url) as page:
        yield page


def shot(page: Page, name: str) -> None:
    if SHOTS:
        theme = (
            "dark"
            if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
            else "light"
        )
        page.screenshot(path=pathlib.Path(SHOTS) / f"page-{name}-{theme}.png", full_page=True)


def test_empty(page: Page, pair: Pair) -> None:
    assert not pair.engines, "the first test"
    expect(page.locator("#health")).to_contain_text("No engine is connected")
    expect(page.locator("#receiving")).to_contain_text("None is open")
    expect(page.locator("#rails-table tbody tr")).to_have_count(len(RAILS))
    expect(page.locator("#peers-table")).to_contain_text("No other sidecar is known")
    shot(page, "empty")


def test_healthy(page: Page, pair: Pair) -> None:
    if not pair.engines:
        pair.connect()
        assert pair.move().ok and not pair.fail().ok
        pair.keep_moving(LAYER_S)
    expect(page.locator("#health")).to_have_text("All is well.")
    # Layers arrive one after the other: some have, and some have not.
    page.wait_for_selector("#receiving .cells:has(.q4):has(.q0)", timeout=20_000)
    expect(page.locator("#receiving tbody tr")).to_contain_text("chat-")
    expect(page.locator("#peers-table tbody")).to_contain_text("prefill")
    expect(page.locator("#successes tbody tr").first).to_contain_text("96 MiB")
    failed = page.locator("#failures tbody tr").last
    for text in ("lost-", "expired", "no source", "kvspray ping"):
        expect(failed).to_contain_text(text)
    # A string in wait_for_function would need the page's permission to evaluate it.
    expect(page.locator(".tile").nth(1).locator("b")).to_have_text(re.compile("[1-9]"))
    expect(page.locator("#store-table tbody tr")).to_have_count(2)
    shot(page, "healthy")


def test_keys(page: Page) -> None:
    page.keyboard.press("3")
    expect(page.locator("#peers")).to_be_focused()
    was = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != was
    page.keyboard.press("p")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    at = page.locator("body").get_attribute("data-drawn")
    with page.expect_response("**/v1/node"):  # another request, so that events have had time
        page.evaluate("new Promise(r => setTimeout(r, 1500)).then(() => fetch('/v1/node'))")
    assert page.locator("body").get_attribute("data-drawn") == at
    page.keyboard.press("p")
    expect(page.locator("body")).not_to_have_attribute("data-drawn", at or "")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_a_rail_dies(page: Page, pair: Pair, links: Links) -> None:
    before = pair.done
    links.set("rail1", "down")
    try:
        row = page.locator("#rails-table tbody tr").nth(1)
        expect(row).to_contain_text("no link", timeout=15_000)
        expect(page.locator("#health")).to_contain_text("Others carry its bytes")
        assert page.title().startswith("(!)")
        shot(page, "rail-down")
        wait_for("a transfer over the other rail", lambda: pair.done > before + 1, 60)
    finally:
        links.set("rail1", "up")
    expect(page.locator("#health")).to_have_text("All is well.", timeout=60_000)


def test_leaving(page: Page, pair: Pair) -> None:
    drain = [str(BINARY), "drain", "--socket", str(pair.sidecars[1].socket)]
    subprocess.run([*drain, "--notice", "0s", "--timeout", "0s"], check=True)
    try:
        expect(page.locator("#health")).to_have_text(
            re.compile(r"routers send them no new requests for \d+ s")
        )
    finally:
        subprocess.run([*drain, "--undo"], check=True)
    expect(page.locator("#health")).to_have_text("All is well.")


class Healthy(http.server.BaseHTTPRequestHandler):
    """An engine that is up."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_router(browser: Browser, links: Links, tmp_path: pathlib.Path, theme: str) -> None:
    engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{engine.server_port}"
    router = Process("router", tmp_path)
    command = [
        str(BINARY),
        "proxy",
        "--listen",
        f"127.0.0.1:{router.port}",
        "--mode",
        "prefill-first",
    ]
    router.spawn([*command, routed(url, "both"), routed("http://127.0.0.1:9", "prefill")])
    try:
        wait_for("the router", router.up, 30)
        with opened(browser, theme, router.url) as page:
            expect(page.locator("#prefill-table tbody tr")).to_have_count(2)
            expect(page.locator("#prefill-table .bad")).to_have_text("down", timeout=20_000)
            expect(page.locator("#decode-table .good")).to_have_text("up")
            expect(page.locator("#health")).to_contain_text("connection refused")
            assert page.title().startswith("(!)")
            shot(page, "router")
    finally:
        router.stop()
        engine.shutdown()
