#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rolling update from the last release to this tree, and the downgrade back, under load.

One prefill engine, two decode engines (vLLM on CPUs), a sidecar with a store on a disk for each,
and two routers, all of the last release. Clients send requests all the time. Each process in turn
is replaced by that of the tree: sidecars, then engines, then routers (docs/upgrade.md). The
downgrade begins with the routers, and also replaces sidecars before engines, so that wheels of
each version meet sidecars of each version.

The status is 0 only if every request was answered with the tokens of a plain engine, and after
each step blocks moved to both decode engines. Written: .build/test-skew with logs and result.json.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rig")]

import releases  # noqa: E402
from clients import Clients  # noqa: E402
from cluster import (  # noqa: E402
    ROOT,
    Failed,
    Sidecar,
    cluster_key,
    free_port,
    get,
    routed,
    total,
    wait_for,
)
from hosts import cpu  # noqa: E402
from releases import Version  # noqa: E402
from servers import (  # noqa: E402
    Answer,
    Process,
    Server,
    end_on_signals,
    kvspray_config,
    sessions,
    wait_up,
)

OUT = ROOT / ".build" / "test-skew"
HOST = cpu(ROOT / ".build")
ENGINE = ("--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(32 << 20))
STORE = {"memory": "16MiB", "size": "64MiB"}  # and of its disk
# Tokens of the longest prompt. The pause leaves the processors to engines that start.
CLIENTS, LONGEST, PAUSE_S = 4, 600, 4.0
DAY_S = 86400.0
# Bounds on a busy machine.
READY_S, MOVED_S, DRAIN_S, REQUEST_S = 120.0, 180.0, 120.0, 180.0
SHOWN = 20  # problems that are printed; result.json has all
NOTICE_S = 3.0  # in which routers read that an engine leaves
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def judge(ids: list[int], plain: Answer, got: Answer) -> tuple[bool, Any]:
    if plain.error:
        return False, f"the plain engine: {plain.error}"
    if plain.tokens == got.tokens:
        return True, None
    return False, f"{got.tokens}, plain {plain.tokens}"


class Place:
    """An engine and its sidecar, each of some version."""

    def __init__(self, name: str, run: pathlib.Path, members: list[str]) -> None:
        self.name = name
        self.engine = Process(f"engine-{name}", OUT)
        disk = run / f"disk-{name}"
        disk.mkdir()
        store = {
            "memory": STORE["memory"],
            "disk": [{"path": str(disk), "size": STORE["size"]}],
            "segment": "1MiB",
        }
        address = f"127.0.0.1:{free_port()}"
        gossip = {"listen": address, "join": list(members)}
        members.append(address)
        peer = {"cluster_key_file": str(run / "cluster.key"), "gossip": gossip}
        self.sidecar = Sidecar(name, run, {"store": store, "peer": peer})
        self.sidecar.log = OUT / f"sidecar-{name}.log"
        self.versions: dict[str, str] = {}

    def start_sidecar(self, version: Version) -> None:
        self.sidecar.binary = version.binary
        self.sidecar.start(READY_S)
        self.versions["sidecar"] = version.name

    def start_engine(self, version: Version) -> None:
        server = Server(self.engine.name, OUT, self.engine.port)
        kv = kvspray_config(self.sidecar.socket, "kv_both")
        kv["kv_connector_extra_config"]["store"] = True
        server.start(HOST, "tiny-llama", kv, *ENGINE, env=version.env())
        self.engine.proc, self.engine.started = server.proc, server.started
        self.versions["engine"] = version.name

    def connected(self) -> bool:
        return sessions(self.sidecar.metrics)

    def release(self) -> str:
        """Of the package of the newest session."""
        lines = self.sidecar.lines(self.sidecar.log)
        return str([x for x in lines if x.get("msg") == "session"][-1]["release"])

    def drain(self) -> None:
        """As the preStop hook of a pod."""
        command = [
            self.sidecar.binary, "drain", "--engine", self.engine.url, "--notice", f"{NOTICE_S:g}s",
            "--socket", self.sidecar.socket, "--timeout", f"{DRAIN_S:g}s",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Test:
    def __init__(self, run: pathlib.Path) -> None:
        self.old, self.new = releases.release(), releases.tree()
        say(f"from release {self.old.name} to the tree")
        cluster_key(run)
        members: list[str] = []
        names = ("prefill", "decode0", "decode1")
        self.places = {name: Place(name, run, members) for name in names}
        self.routers = {name: Process(name, OUT) for name in ("router0", "router1")}
        self.plain = Server("plain", OUT)
        self.steps: list[dict[str, Any]] = []
        self.clients = Clients(
            [], self.plain, judge, longest=LONGEST, aborted=0.1, shared=0.3, timeout=REQUEST_S,
            pause=PAUSE_S,
        )  # fmt: skip

    # ---- processes

    def start_router(self, name: str, version: Version) -> None:
        router, command = self.routers[name], [str(version.binary), "proxy"]
        command += ["--listen", f"127.0.0.1:{router.port}", "--drain-timeout", f"{DRAIN_S:g}s"]
        for p in self.places.values():
            role = p.name.rstrip("01")
            command.append(routed(p.engine.url, role, sidecar=p.sidecar.url))
        router.spawn(command, cwd=ROOT)
        wait_for(name, lambda: self.fit(router), READY_S)

    def fit(self, router: Process) -> bool:
        """Whether the router has found all engines, and their sidecars' endpoints."""
        return router.up() and all(
            b["condition"] == "fit" and (b["role"] == "decode" or b.get("peer"))
            for b in json.loads(get(router.url + "/health"))["backends"]
        )

    def start(self) -> None:
        for p in self.places.values():
            p.start_sidecar(self.old)
            p.start_engine(self.old)
        self.plain.start(HOST, "tiny-llama", None, *ENGINE)
        wait_up([p.engine for p in self.places.values()] + [self.plain], say)
        for p in self.places.values():
            wait_for(f"sessions of {p.name}", p.connected, READY_S)
        for name in self.routers:
            self.start_router(name, self.old)

    def stop(self) -> None:
        for p in (*self.routers.values(), self.plain):
            p.stop()
        for place in self.places.values():
            place.engine.stop()
            place.sidecar.stop()

    # ---- steps

    def sidecar(self, p: Place, version: Version) -> None:
        """Transfers end, and engines compute prompts by themselves until the next one is up."""
        if p.sidecar.stop(DRAIN_S) != 0:
            raise Failed(f"the sidecar of {p.name} did not end in order:\n{p.sidecar.tail()}")
        p.start_sidecar(version)
        wait_for(f"sessions of {p.name}", p.connected, READY_S)

    def engine(self, p: Place, version: Version) -> None:
        p.drain()
        p.engine.stop(DRAIN_S)
        p.start_engine(version)
        wait_up([p.engine], say)
        wait_for(f"sessions of {p.name}", p.connected, READY_S)

    def router(self, name: str, version: Version) -> None:
        """A service gives clients the other one meanwhile."""
        self.clients.ports = [r.port for n, r in self.routers.items() if n != name]
        time.sleep(NOTICE_S)
        self.routers[name].stop(DRAIN_S)
        self.start_router(name, version)
        self.clients.ports = [r.port for r in self.routers.values()]

    def received(self, name: str) -> float:
        return total(
            self.places[name].sidecar.metrics(), "kvspray_transfer_payload_bytes_total",
            side="destination", outcome="ok",
        )  # fmt: skip

    def step(self, name: str, act: Callable[[], None]) -> None:
        """Replaces a process, and waits until blocks have moved to both decode engines since."""
        say(name)
        counts, begun = dict(self.clients.counts), time.monotonic()
        act()
        took = time.monotonic() - begun
        before = {d: self.received(d) for d in ("decode0", "decode1")}
        answered = self.clients.counts["answered"]
        wait_for(
            f"transfers to both decode engines after: {name}",
            lambda: (
                all(self.received(d) > b for d, b in before.items())
                and self.clients.counts["answered"] >= answered + 2 * CLIENTS
            ),
            MOVED_S,
            0.2,
        )
        now = self.clients.counts
        self.steps.append(
            {
                "step": name,
                "seconds": round(took, 1),
                "answered": now["answered"] - counts.get("answered", 0),
                "problems": now["problems"] - counts.get("problems", 0),
                "moved": {d: round(self.received(d) - b) for d, b in before.items()},
                "versions": {p.name: dict(p.versions) for p in self.places.values()},
            }
        )
        say(f"  {self.steps[-1]}")

    def roll(self, version: Version, routers_first: bool) -> None:
        routers = [(f"{name} to {version.name}", name) for name in self.routers]

        def roll_routers() -> None:
            for text, name in routers:
                self.step(text, lambda name=name: self.router(name, version))

        if routers_first:
            roll_routers()
        for p in self.places.values():
            self.step(
                f"sidecar of {p.name} to {version.name}", lambda p=p: self.sidecar(p, version)
            )
        for p in self.places.values():
            self.step(f"engine {p.name} to {version.name}", lambda p=p: self.engine(p, version))
        if not routers_first:
            roll_routers()
        for p in self.places.values():
            found = json.loads(get(p.sidecar.url + "/v1/node"))["version"], p.release()
            say(f"  {p.name}: sidecar {found[0]}, package of the engine {found[1]}")
            if any((name == self.old.name) != (version is self.old) for name in found):
                raise Failed(f"{p.name} has versions {found} instead of {version.name}")

    def run(self) -> list[str]:
        self.start()
        self.clients.ports = [r.port for r in self.routers.values()]
        self.clients.start(CLIENTS, time.monotonic() + DAY_S, "c")
        try:
            self.step("nothing is replaced", lambda: None)
            self.roll(self.new, routers_first=False)
            self.roll(self.old, routers_first=True)
        finally:
            self.clients.end()
        problems = list(self.clients.problems)
        for p in self.places.values():
            m = p.sidecar.metrics()
            if total(m, "kvspray_store_pages_damaged_total"):
                problems.append(f"the store of {p.name} has damaged pages")
            if not total(m, "kvspray_store_tier_pages", tier="disk"):
                problems.append(f"the store of {p.name} has no pages on its disk")
            if text := p.sidecar.panics():
                problems.append(text)
        return problems


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvs-") as run:  # unix sockets have short names
        test = None
        try:
            test = Test(pathlib.Path(run))
            problems = test.run()
        except releases.Missing as err:
            if "release" in os.environ.get("KVSPRAY_MUST_RUN", "").split(","):
                print(f"FAILED test/skew/rolling.py - KVSPRAY_MUST_RUN names release, but: {err}")
                return 1
            print(f"SKIPPED test/skew/rolling.py - Skipped: release: {err}")
            return 0
        except (Failed, subprocess.CalledProcessError) as err:
            problems = [str(err), *test.clients.problems] if test else [str(err)]
        finally:
            if test:
                test.stop()
    counts = dict(test.clients.counts) if test else {}
    result = {"steps": test.steps if test else [], "counts": counts, "problems": problems}
    (OUT / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    for text in problems[:SHOWN]:
        print(f"PROBLEM: {text}")
    say(f"{len(result['steps'])} steps, {counts}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
