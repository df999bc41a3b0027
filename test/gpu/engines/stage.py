"""The engines that the measurements of one command share: starting them takes longer than most
measurements."""

from __future__ import annotations

import time
from typing import Any

from cluster import wait_for
from pairs import Pair, Rig, say, start_plain, wait_up
from servers import Server

SETTLE_S = 60.0
PAIR, PAGES, PLAIN, NIXL = "pair", "pages", "plain", "nixl"


class Stage:
    """needs: PAIR, or PAGES where pages are looked at; PLAIN and NIXL beside it."""

    def __init__(self, rig: Rig, needs: set[str]) -> None:
        self.rig, self.needs, self.args = rig, needs, rig.args
        self.pair = Pair(rig, "pages" if PAGES in needs else "kvspray")
        self.nixl = Pair(rig, "nixl")
        self._plain: Server | None = None

    @property
    def plain(self) -> Server:
        assert self._plain is not None
        return self._plain

    def start(self) -> dict[str, Any]:
        start = time.monotonic()
        self.pair.start()
        servers = self.pair.engines()
        if NIXL in self.needs:
            self.nixl.start()
            servers += self.nixl.engines()
        if PLAIN in self.needs:
            self._plain = start_plain(self.rig)
            servers.append(self._plain)
        wait_up(servers)
        self.pair.route()
        self.pair.wait_sessions()
        took = time.monotonic() - start
        say(f"engines, sidecars and routers are up after {took:.0f} s")
        return {"up_s": took, "engines": [s.name for s in servers]}

    def settle(self) -> None:
        """Nothing runs, and no lease is open."""
        wait_for("both engines idle", self.pair.idle, SETTLE_S, tick=0.2)
        wait_for("no lease open", lambda: self.pair.leases() == 0, SETTLE_S, tick=0.2)

    def stop(self) -> None:
        if self._plain is not None:
            self._plain.stop()
        self.nixl.stop()
        self.pair.stop()
