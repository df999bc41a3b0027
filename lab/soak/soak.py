#!/usr/bin/env python3
"""Real engines under load and faults for hours, and what is left of memory, descriptors, goroutines
and leases.

A prefill and a decode vLLM on CPUs, a sidecar for each, the router in both modes, and a plain vLLM
to compare with. Clients send random prompts through the router, and a quarter of them goes away
before the answer. Every 20 s one thing fails: a sidecar is killed, ended or stopped, a rail is
down, silent or slow, or an engine is restarted.

Where network namespaces are permitted each sidecar has one of its own, with two data rails and one
link for control between them. Elsewhere rails are addresses of the loopback, nothing happens to
them, and the report names that.

Errors to clients. No error is allowed, with one exception: there is one decode engine, so a request
that was under way at any time between the signal to it and the router's taking it back fails. Its
client sends it again until it is answered, and the report counts it apart. A restart of the prefill
engine excuses nothing.

The status is 0 only if every answer was there and equal to the plain engine's, no process ended
that was not made to, something moved in every five minutes, and at the end all that the processes
hold is back to where it was before the first fault. Written: DIR/report.html with curves,
DIR/summary.json, DIR/samples.jsonl, DIR/logs.
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import contextlib
import ctypes
import fcntl
import http.client
import json
import os
import pathlib
import platform
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "test/rig"), str(ROOT / "test/gpu/engines")]
TOOL = pathlib.Path(os.environ.get("KVSPRAY_SOAK_TOOL", ROOT / ".build/bin/soak"))
BINARY = pathlib.Path(os.environ.get("KVSPRAY_BINARY", ROOT / "bin/kvspray"))
INSIDE = "KVSPRAY_SOAK_INSIDE"  # set where this program has a user namespace of its own
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for", dest="seconds", type=duration, default="10m", metavar="6h")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=20, help="seconds between two faults")
    parser.add_argument("--seed", default="soak", help="of faults and prompts")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / ".build/soak", metavar="DIR")
    return parser.parse_args()


def duration(text: str) -> float:
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    seconds = (
        sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True))
        if parts
        else 0
    )
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r}: want a time such as 6h, 90m, 1h30m or 300s")
    return float(seconds)


def copied(out: pathlib.Path) -> None:
    """The sidecar as it is now: it is started for hours, while the tree may be built again."""
    out.mkdir(parents=True, exist_ok=True)
    own = out / "kvspray"
    shutil.copy2(BINARY, own)
    os.environ["KVSPRAY_BINARY"] = str(own)


def enter_user_namespace() -> None:
    """A plain user may make network namespaces within a user namespace of their own, from a network
    namespace that belongs to it."""
    own = ["unshare", "--user", "--map-root-user", "--net"]
    if INSIDE in os.environ:
        loopback_up()
        return
    if os.geteuid() == 0 or not shutil.which(own[0]):
        return
    if subprocess.run([*own, "true"], capture_output=True).returncode == 0:
        os.environ[INSIDE] = "1"
        os.execvp(own[0], [*own, sys.executable, *sys.argv])


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


if __name__ == "__main__":
    ARGS = options()
    enter_user_namespace()
    copied(ARGS.out)

import pairs  # noqa: E402
from clients import Clients, prompt  # noqa: E402
from cluster import Failed, Sidecar, get, merge, total, use_of, wait_for  # noqa: E402
from pairs import MIB, MODES, Pair, Rig, difference, say  # noqa: E402
from servers import (  # noqa: E402
    Answer,
    Process,
    Server,
    complete,
    end_on_signals,
    ignore_signals,
    wait_up,
)

RATES = "1gbit,500mbit,1gbit"  # of two data rails, and of the control lane's link
DATA_RAILS = 2
CONTROL_PORT = 7650
CACHE_MB = 10  # of each engine's cache: one prompt of the greatest length, and a little more
LONGEST = 3000  # tokens of a prompt
SHARED = 0.3  # of the prompts begin as others do
CLIENT_TIMEOUT_S = 300.0
WARM_UP_S = 60.0
SETTLE_S = 180.0
IDLE = "15s"  # after which lanes without requests close
SAMPLE_S = 5.0
MAX_SAMPLES = 5000
MOVES_S = 300.0  # in which something has to have moved
LOG_BYTES = 24 << 20  # of one log at most; the older half goes
STOPPED_S = (0.5, 8.0)
RAIL_S = (3.0, 15.0)
DRAIN_S = 60.0  # that a sidecar may take to end; its own limit is 35 s
TIE = 1e-3  # of two logarithms of probabilities in float32
AGAIN = 10  # prompts that must move at the end
KINDS = ("kill -9", "SIGTERM", "SIGSTOP", "rail down", "rail silent", "rail slow")
RAIL_FAULT = {"rail down": "down", "rail silent": "drop", "rail slow": "rate=1/20"}
ENGINE = "engine restart"
DECK = (*KINDS, *KINDS, ENGINE)  # each turn of the deck is shuffled anew
# How much more than before the first fault each kind of process may hold at the end. The memory of
# the engines is held against what that of the plain engine has grown by, which has no connector.
SLACK = {
    "engine": {"fds": 8, "threads": 8, "rss": 192 * MIB},
    "sidecar": {"fds": 8, "goroutines": 12, "rss": 64 * MIB},
    "router": {"fds": 8, "goroutines": 12, "rss": 32 * MIB},
}
BAD_LINES = re.compile(
    # Python's traceback comes behind what vLLM writes before each line.
    r"^(panic:|fatal error:|WARNING: DATA RACE|.*Traceback \(most recent|.*Segmentation fault).*",
    re.M,
)
# An API server of vLLM that was asked to stop writes a traceback for each request that it ends.
SHUTDOWN = re.compile(
    r"^\(APIServer pid=(\d+)\) .*\[shutdown\] API server: shutdown triggered", re.M
)
API_SERVER = re.compile(r"\(APIServer pid=(\d+)\)")
CLONE_NEWNET = 0x40000000


def bad_line(text: str, stopped: set[str]) -> str | None:
    """The first trouble in new lines of a log; stopped has the API servers that were asked to
    stop."""
    stopped.update(SHUTDOWN.findall(text))
    for bad in BAD_LINES.finditer(text):
        server = API_SERVER.match(bad.group())
        if server is None or server.group(1) not in stopped:
            return text[bad.start() : bad.start() + 600]
    return None


class Namespace:
    """Asks HTTP servers on the loopback of a network namespace."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._pool = cf.ThreadPoolExecutor(4, initializer=self._enter)

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(self.path) as ns:
            if libc.setns(ns.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {self.path}")

    def get(self, url: str, timeout: float = 5.0) -> str:
        return self._pool.submit(get, url, timeout).result()


class Rails:
    """The rails between both sidecars."""

    def __init__(self, dir: pathlib.Path) -> None:
        self.left_out: list[str] = []
        self.spaces: list[Namespace] = []
        self._lock = threading.Lock()
        self.proc = subprocess.Popen(
            [str(TOOL), "rails", RATES],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.proc.stdout is not None and self.proc.stderr is not None
        line = self.proc.stdout.readline()
        if line:
            made = json.loads(line)
            self.addresses: list[list[str]] = made["addresses"]
            self.spaces = [Namespace(path) for path in made["namespaces"]]
            subprocess.run(
                [str(BINARY), "keygen", "cluster", "--out", str(dir / "key")], check=True
            )
            self.key = str(dir / "key")
            return
        reason = self.proc.stderr.read().strip()
        self.left_out.append(f"faults of rails: {reason}")
        self.addresses = [[f"127.0.{rail}.{1 + side}" for rail in range(3)] for side in (0, 1)]

    def config(self, side: int) -> dict[str, Any]:
        own = self.addresses[side]
        rails = [{"name": f"rail{i}", "listen": f"{own[i]}:0"} for i in range(DATA_RAILS)]
        peer = {"listen": f"{own[DATA_RAILS]}:{CONTROL_PORT}"}
        return {
            "peer": {**peer, "cluster_key_file": self.key} if self.spaces else {},
            "transports": {"idle": IDLE, "tcp": {"rails": rails}},
        }

    def apply(self, rail: int, fault: str) -> None:
        with self._lock:
            assert self.proc.stdin is not None and self.proc.stdout is not None
            self.proc.stdin.write(f"rail{rail}:{fault}\n")
            self.proc.stdin.flush()
            answer = self.proc.stdout.readline().strip()
        if answer != "ok":
            raise Failed(f"rail{rail}:{fault}: {answer or 'the rails are gone'}")

    def close(self) -> None:
        self.proc.kill()
        self.proc.wait()


class SoakPair(Pair):
    def __init__(self, rig: Rig, rails: Rails) -> None:
        super().__init__(rig)
        self.rails = rails

    def make_sidecar(self, side: int) -> Sidecar:
        name = f"{('prefill', 'decode')[side]}-sidecar"
        spaces = self.rails.spaces
        s = Sidecar(
            name,
            self.rig.run,
            merge(self.rig.sidecar_config(), self.rails.config(side)),
            wrap=["nsenter", f"--net={spaces[side].path}", "--"] if spaces else (),
            get=spaces[side].get if spaces else get,
        )
        if spaces:
            s.endpoint = s.config["peer"]["listen"]
        return s


class Soak:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.logs = self.out / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        parser = argparse.ArgumentParser()
        pairs.add_options(parser)
        given = ["--device", "cpu", "--transport", "tcp", "--seqs", "16"]
        # Prompts are let in that the cache does not hold together: some are preempted.
        given += ["--cache-mb", str(CACHE_MB), "--engine-args=--no-scheduler-reserve-full-isl"]
        self.rig = Rig(parser.parse_args([*given, "--out", str(self.out)]))
        self.rig.logs = self.logs
        self.rails = Rails(self.rig.run)
        self.pair = SoakPair(self.rig, self.rails)
        self.plain = Server("plain", self.logs)
        self.problems: list[str] = []
        self.faults: list[dict[str, Any]] = []
        self.counted: dict[str, int] = {}
        self.away: list[list[float]] = []  # from and to: when the decode engine was not there
        self.busy: set[str] = set()  # what is made to end now
        self.restarts: list[threading.Thread] = []
        self.ended = threading.Event()
        self.begun = time.monotonic()
        self.samples: list[dict[str, Any]] = []
        self.sums: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.stopped: set[str] = set()  # process ids of API servers
        self.read_to: dict[pathlib.Path, int] = {}
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self.clients: Clients | None = None

    # ---- processes

    def start(self) -> None:
        self.pair.start()
        self.plain.start(self.rig.host, self.rig.model, None, *self.rig.engine_args("plain"))
        say("three engines start")
        wait_up([*self.pair.engines(), self.plain], say)
        self.pair.route()
        self.pair.wait_sessions()

    def stop(self) -> None:
        self.ended.set()
        for t in self.restarts:
            t.join(30)
        self.pair.stop()
        self.plain.stop()
        self.rails.close()
        self.rig.close(keep_logs=False)

    def things(self) -> list[tuple[str, Process | Sidecar]]:
        """All processes, with their kind."""
        engines = [("engine", e) for e in (*self.pair.engines(), self.plain)]
        sidecars = [("sidecar", s) for s in self.pair.sidecars]
        return [*engines, *sidecars, *(("router", p) for p in self.pair.proxies.values())]

    def problem(self, text: str) -> None:
        say(f"PROBLEM {text[:500]}")
        self.problems.append(f"{self.now():.0f} s: {text}"[:1000])

    def now(self) -> float:
        return time.monotonic() - self.begun

    # ---- what clients see

    def judge(self, ids: list[int], want: Answer, got: Answer) -> tuple[bool, Any]:
        if want.error:
            return False, f"the plain engine: {want.error}"
        if want.tokens == got.tokens:
            return True, None
        d = difference(self.plain, ids, want.tokens[0], got.tokens[0])
        a, b = d.get("logprob_plain"), d.get("logprob_pair")
        return a is not None and b is not None and abs(a - b) <= TIE, d

    def excuse(self, begun: float, ended: float) -> str:
        for since, until in list(self.away):
            if ended >= since and begun <= until:
                return "the decode engine was restarted"
        return ""

    def make_clients(self, aborted: float = 0.25) -> Clients:
        return Clients(
            [self.pair.proxies[mode].port for mode in MODES],
            self.plain,
            self.judge,
            longest=LONGEST,
            aborted=aborted,
            shared=SHARED,
            timeout=CLIENT_TIMEOUT_S,
            excuse=self.excuse,
        )

    # ---- faults

    def chaos(self, until: float) -> None:
        rng = random.Random(self.args.seed)
        deck: list[str] = []
        following = time.monotonic() + self.args.every / 2
        while not self.ended.wait(1.0) and time.monotonic() < until:
            self.look_after()
            if time.monotonic() < following:
                continue
            following = time.monotonic() + self.args.every
            if not deck:
                deck = list(DECK)
                rng.shuffle(deck)
            kind = deck.pop()
            if kind in RAIL_FAULT and not self.rails.spaces:
                kind = rng.choice(KINDS[:3])
            try:
                self.fault(kind, rng)
            except (Failed, OSError) as err:
                self.problem(f"{kind}: {err}")

    def look_after(self) -> None:
        """A process that no fault ended has to live; it is started again, so that the run goes
        on."""
        for _, thing in self.things():
            proc = thing.proc
            if thing.name in self.busy or (proc is not None and proc.poll() is None):
                continue
            status = "never started" if proc is None else f"status {proc.returncode}"
            self.problem(f"{thing.name} ended by itself, {status}: {thing.tail(8)}")
            if isinstance(thing, Sidecar):
                thing.kill()
                thing.start()
            elif thing in self.pair.engines():
                self.restart_engine(self.pair.engines().index(thing), signal.SIGKILL)
            else:
                raise Failed(f"{thing.name} is not started again")

    def fault(self, kind: str, rng: random.Random) -> None:
        record: dict[str, Any] = {"at": round(self.now(), 1), "kind": kind}
        self.counted[kind] = self.counted.get(kind, 0) + 1
        self.faults.append(record)
        if kind in RAIL_FAULT:
            rail, how_long = rng.randrange(DATA_RAILS), rng.uniform(*RAIL_S)
            record |= {"victim": f"rail{rail}", "seconds": round(how_long, 1)}
            self.rails.apply(rail, RAIL_FAULT[kind])
            self.ended.wait(how_long)
            self.rails.apply(rail, "heal")
        elif kind == ENGINE:
            side, sig = rng.randrange(2), rng.choice((signal.SIGKILL, signal.SIGTERM))
            record |= {"victim": self.pair.engines()[side].name, "signal": sig.name}
            self.restart_engine(side, sig)
        else:
            victim = rng.choice(self.pair.sidecars)
            record["victim"] = victim.name
            self.strike(victim, kind, rng)
        record["took"] = round(self.now() - record["at"], 1)
        say(f"{record['at']:.0f} s: {kind} of {record['victim']}")

    def strike(self, s: Sidecar, kind: str, rng: random.Random) -> None:
        self.busy.add(s.name)
        try:
            if kind == "SIGSTOP":
                s.stop_for(rng.uniform(*STOPPED_S))
                return
            if kind == "kill -9":
                s.kill()
            elif (status := s.stop(DRAIN_S)) != 0:
                self.problem(f"{s.name}: status {status} after SIGTERM: {s.tail(4)}")
            self.ended.wait(rng.uniform(0, 0.5))
            s.start()
        finally:
            self.busy.discard(s.name)

    def restart_engine(self, side: int, sig: int) -> None:
        engine = self.pair.engines()[side]
        if engine.name in self.busy:
            return
        self.busy.add(engine.name)
        window = [time.monotonic(), float("inf")]
        if side == 1:
            self.away.append(window)

        def again() -> None:
            try:
                engine.kill() if sig == signal.SIGKILL else engine.stop()
                if self.ended.is_set():
                    return
                self.pair.start_engine(side)
                wait_up([engine], say)
                wait_for("the router to see it", self.all_up, 60, tick=0.2)
                window[1] = time.monotonic()
            except (Failed, OSError) as err:
                self.problem(f"restart of {engine.name}: {err}")
            finally:
                self.busy.discard(engine.name)

        self.restarts = [t for t in self.restarts if t.is_alive()]
        self.restarts.append(threading.Thread(target=again))
        self.restarts[-1].start()

    def all_up(self) -> bool:
        routers = [p.metrics() for p in self.pair.proxies.values()]
        return all(total(m, "kvspray_proxy_engine_up", role="decode") >= 1 for m in routers)

    # ---- what is seen

    def sample(self) -> dict[str, Any]:
        out: dict[str, Any] = {"t": round(self.now(), 1), "load": os.getloadavg()[0]}
        for kind, thing in self.things():
            pids = thing.pids()
            if not pids:
                continue
            seen: dict[str, Any] = dict(use_of(pids))
            with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
                m = thing.metrics(2.0)
                if kind == "engine":
                    self.read_engine(thing.name, m, seen)
                else:
                    seen["goroutines"] = int(m["go_goroutines"])
                    seen["heap"] = int(m["go_memstats_heap_inuse_bytes"])
                if kind == "sidecar":
                    seen["leases"] = int(total(m, "kvspray_lease_open"))
                    seen["quarantined"] = int(total(m, "kvspray_lease_quarantined"))
            out[thing.name] = seen
        if self.clients is not None:
            out["clients"] = dict(self.clients.counts)
            latest, self.clients.latest = (
                self.clients.latest,
                type(self.clients.latest)(maxlen=4096),
            )
            firsts = sorted(ttft for _, ttft in latest)
            if firsts:
                out["ttft"] = {"median": firsts[len(firsts) // 2], "most": firsts[-1]}
        out["sums"] = dict(self.sums)
        return out

    def read_engine(self, name: str, m: dict[str, float], seen: dict[str, Any]) -> None:
        for short, metric in (("running", "running"), ("waiting", "waiting")):
            seen[short] = int(total(m, f"vllm:num_requests_{metric}"))
        seen["cache"] = total(m, "vllm:kv_cache_usage_perc")
        received = {"side": "received"}
        for what, value in (
            ("moved", total(m, "vllm:kvspray_transfers_total", outcome="ok", **received)),
            ("transfers", total(m, "vllm:kvspray_transfers_total", **received)),
            ("bytes", total(m, "vllm:kvspray_bytes_total", **received)),
            ("recomputed", total(m, "vllm:kvspray_recompute_tokens_total")),
            ("alone", total(m, "vllm:kvspray_local_prefills_total")),
            ("preemptions", total(m, "vllm:num_preemptions_total")),
        ):
            # A counter starts at 0 with its process; the sums go on.
            key = f"{name} {what}"
            was = self.last.get(key, 0.0)
            grew = value - was if value >= was else value
            self.last[key] = value
            self.sums[key] = self.sums.get(key, 0.0) + grew

    def watch(self, every: float) -> None:
        with (self.out / "samples.jsonl").open("w") as f:
            while not self.ended.wait(every):
                s = self.sample()
                self.samples.append(s)
                f.write(json.dumps(s) + "\n")
                f.flush()
                self.read_logs()
                self.write_summary("running")

    def read_logs(self) -> None:
        """Looks for what a program writes as it breaks, and keeps each log below its bound."""
        for path in [*self.logs.glob("*.log"), *(s.transfers for s in self.pair.sidecars)]:
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                at = min(self.read_to.get(path, 0), size)
                with path.open("rb+") as f:
                    f.seek(at)
                    raw = f.read()
                    raw = raw[: raw.rfind(b"\n") + 1]  # whole lines
                    new = raw.decode(errors="replace")
                    self.read_to[path] = at + len(raw)
                    if bad := bad_line(new, self.stopped):
                        self.problem(f"{path.name}: {bad}")
                    if size > LOG_BYTES:
                        f.seek(size - LOG_BYTES // 2)
                        kept = f.read()
                        f.seek(0)
                        f.truncate()  # those who append go on behind what is written here
                        f.write(kept)
                        self.read_to[path] = f.tell()

    def settled(self) -> dict[str, Any]:
        """What is held once nothing runs, no lease is open and no lane is: all of it."""
        wait_for("the engines to be idle", self.pair.idle, SETTLE_S, tick=0.5)
        wait_for("no open lease", lambda: self.pair.leases() == 0, SETTLE_S, tick=0.5)
        wait_for("no lane, as nobody needs one", lambda: not self.lanes(), SETTLE_S, tick=0.5)
        time.sleep(10)  # what ends with the lanes; vLLM shows its statistics once a second
        return self.sample()

    def lanes(self) -> int:
        return sum(
            len(json.loads(s.get(s.url + "/debug/state", 5.0))["lanes"] or ())
            for s in self.pair.sidecars
        )

    # ---- the run

    def run(self) -> None:
        self.start()
        say("warming up")
        warm = self.make_clients()
        warm.start(self.args.clients, time.monotonic() + WARM_UP_S, f"{self.args.seed}-warm")
        wait_for("the warm-up", lambda: not warm.alive(), WARM_UP_S + CLIENT_TIMEOUT_S, tick=0.2)
        self.problems += warm.problems
        self.before = self.settled()
        say(f"{dict(warm.counts)} before the first fault; now for {self.args.seconds:g} s")
        self.begun = time.monotonic()
        self.sums, end = {}, self.begun + self.args.seconds
        self.clients = self.make_clients()
        watcher = threading.Thread(
            target=self.watch, args=(max(SAMPLE_S, self.args.seconds / MAX_SAMPLES),)
        )
        watcher.start()
        try:
            self.clients.start(self.args.clients, end, self.args.seed)
            self.chaos(end)
            self.took = self.now()
            say("no more faults")
            for rail in range(DATA_RAILS) if self.rails.spaces else ():
                self.rails.apply(rail, "heal")
            for t in self.restarts:
                t.join()
            wait_for(
                "the last answers", lambda: not self.clients.alive(), 2 * CLIENT_TIMEOUT_S, tick=0.2
            )
            self.again()
            self.after = self.settled()
        finally:
            self.ended.set()
            watcher.join()
        self.compare()
        self.moved_all_the_time()
        self.read_logs()

    def again(self) -> None:
        """With everything back, each prompt moves."""
        self.pair.wait_sessions()
        deadline = time.monotonic() + 60
        while True:
            before = self.received()
            for i in range(AGAIN):
                ids = prompt(600 + 40 * i, ("again", self.args.seed, i, time.monotonic()))
                got = complete(self.pair.proxies[MODES[i % 2]].port, ids, rid=f"again{i}")
                good, what = self.judge(ids, complete(self.plain.port, ids), got)
                if got.error or not good:
                    self.problem(f"after the last fault: {got.error or what}")
            time.sleep(2)  # vLLM shows its statistics once a second
            moved = self.received() - before
            if moved >= AGAIN:
                say(f"{AGAIN} prompts, and each has moved")
                return
            if time.monotonic() > deadline:
                self.problem(f"after the last fault {moved:g} of {AGAIN} prompts moved")
                return

    def received(self) -> float:
        m = self.pair.d.metrics()
        return total(m, "vllm:kvspray_transfers_total", side="received", outcome="ok")

    def compare(self) -> None:
        plain = [x.get(self.plain.name, {}).get("rss", 0) for x in (self.before, self.after)]
        own_growth = max(0, plain[1] - plain[0])
        for kind, thing in self.things():
            was, now = self.before.get(thing.name, {}), self.after.get(thing.name, {})
            for what, slack in SLACK[kind].items():
                if kind == "engine" and what == "rss":
                    slack += own_growth
                if what not in was or what not in now:
                    self.problem(f"{thing.name}: {what} could not be read")
                elif now[what] - was[what] > slack:
                    self.problem(f"{thing.name}: {what} {was[what]} before and {now[what]} after")
            for what in ("leases", "quarantined") if kind == "sidecar" else ():
                if now.get(what) != 0:
                    self.problem(f"{thing.name}: {now.get(what)} {what} at the end")

    def moved_all_the_time(self) -> None:
        if not self.samples or self.now() - self.samples[-1]["t"] > MOVES_S:
            self.problem("nothing was sampled at the end")
        key = f"{self.pair.d.name} moved"
        at, count = 0.0, 0.0
        for s in self.samples:
            if s["t"] - at < MOVES_S:
                continue
            if s["sums"].get(key, 0.0) <= count:
                self.problem(f"nothing moved between {at:.0f} s and {s['t']:.0f} s")
            at, count = s["t"], s["sums"].get(key, 0.0)
        if not self.sums.get(key):
            self.problem("nothing moved at all")

    # ---- what is written

    def summary(self, state: str) -> dict[str, Any]:
        counts = dict(self.clients.counts) if self.clients is not None else {}
        problems = [*self.problems, *(self.clients.problems if self.clients is not None else [])]
        return {
            "state": state,
            "green": state == "finished" and not problems,
            "asked_seconds": self.args.seconds,
            "seconds": round(getattr(self, "took", self.now()), 1),
            "host": f"{os.cpu_count()} cores, {platform.release()}, load {os.getloadavg()[0]:.1f}",
            "seed": self.args.seed,
            "faults": self.counted,
            "faults_total": len(self.faults),
            "clients": counts,
            "sums": {k: round(v) for k, v in self.sums.items() if not k.startswith("plain")},
            "decode_engine_away_s": round(
                sum(min(b, time.monotonic()) - a for a, b in self.away), 1
            ),
            "left_out": self.rails.left_out,
            "problems": problems,
            "before": self.before,
            "after": self.after,
        }

    def write_summary(self, state: str) -> dict[str, Any]:
        out = self.summary(state)
        path = self.out / "summary.json"
        path.with_suffix(".new").write_text(json.dumps(out, indent=1) + "\n")
        path.with_suffix(".new").rename(path)
        return out

    def write_report(self, state: str) -> bool:
        s = self.write_summary(state)
        (self.out / "faults.json").write_text(json.dumps(self.faults, indent=0) + "\n")
        colour = "GREEN" if s["green"] else "RED" if state == "finished" else state.upper()
        title = f"kvspray soak, {s['seconds'] / 60:.0f} minutes: {colour}"
        data = self.out / "graphs.json"
        data.write_text(json.dumps({"title": title, "graphs": list(self.graphs(s))}))
        subprocess.run([str(TOOL), "report", str(data), str(self.out / "report.html")], check=True)
        data.unlink()
        for p in s["problems"][:20]:
            print(f"  PROBLEM {p}")
        print(self.text(s))
        print(f"{colour}  {title}; {self.out / 'report.html'}", flush=True)
        return bool(s["green"])

    def text(self, s: dict[str, Any]) -> str:
        lines = [f"{s['seconds']:.0f} s of {s['asked_seconds']:.0f} s asked for, on {s['host']}"]
        lines += [
            f"faults: {s['faults_total']}: "
            + ", ".join(f"{v} {k}" for k, v in sorted(s["faults"].items()))
        ]
        lines += ["clients: " + ", ".join(f"{v} {k}" for k, v in sorted(s["clients"].items()))]
        lines += [f"the decode engine was away for {s['decode_engine_away_s']:.0f} s"]
        lines += [
            "decode engine: "
            + ", ".join(
                f"{v} {k.split()[-1]}"
                for k, v in sorted(s["sums"].items())
                if k.startswith(self.pair.d.name)
            )
        ]
        lines += [f"left out: {x}" for x in s["left_out"]]
        lines += [f"problems: {len(s['problems'])}", *s["problems"][:20], ""]
        lines += [
            f"{'held before and after':26} {'descriptors':>13} {'threads':>11} "
            f"{'goroutines':>11} {'MiB':>13} {'leases':>7}"
        ]
        for _, thing in self.things():
            was, now = self.before.get(thing.name, {}), self.after.get(thing.name, {})

            def pair(what: str, unit: int = 1, was: Any = was, now: Any = now) -> str:
                return " / ".join(str(x[what] // unit) if what in x else "-" for x in (was, now))

            lines += [
                f"{thing.name:26} {pair('fds'):>13} {pair('threads'):>11} {pair('goroutines'):>11} "
                f"{pair('rss', MIB):>13} {pair('leases'):>7}"
            ]
        return "\n".join(lines)

    def graphs(self, s: dict[str, Any]) -> Iterator[dict[str, Any]]:
        marks = [f["at"] for f in self.faults]

        def graph(
            title: str, unit: str, curves: dict[str, Callable[[dict[str, Any]], Any]]
        ) -> dict[str, Any]:
            out = []
            for name, read in curves.items():
                x, y = [], []
                for sample in self.samples:
                    x.append(sample["t"])
                    try:
                        y.append(read(sample))
                    except (KeyError, TypeError):
                        y.append(None)
                out.append({"name": name, "x": x, "y": y})
            return {
                "title": title,
                "unit": unit,
                "curves": out if self.samples else [],
                "marks": marks,
            }

        def of(
            kinds: tuple[str, ...], what: str, unit: float = 1
        ) -> dict[str, Callable[[dict[str, Any]], Any]]:
            names = [t.name for kind, t in self.things() if kind in kinds]
            return {n: lambda x, n=n: x[n][what] / unit for n in names}

        engine = self.pair.d.name
        yield {
            "title": "What it came to",
            "unit": "",
            "curves": [],
            "marks": [],
            "text": self.text(s),
        }
        yield graph("Answers", "since the start", {
            "answered": lambda x: x["clients"]["answered"],
            "compared": lambda x: x["clients"]["compared"],
            "clients that went away": lambda x: x["clients"]["aborted"],
            "wrong": lambda x: x["clients"].get("wrong", 0),
            "failed": lambda x: x["clients"].get("failed", 0),
        })  # fmt: skip
        yield graph("Transfers to the decode engine", "since the start", {
            "all": lambda x: x["sums"][f"{engine} transfers"],
            "ok": lambda x: x["sums"][f"{engine} moved"],
            "requests served alone": lambda x: x["sums"][f"{engine} alone"],
        })  # fmt: skip
        yield graph("Time to first token, at the clients", "seconds", {
            "greatest": lambda x: x["ttft"]["most"], "median": lambda x: x["ttft"]["median"],
        })  # fmt: skip
        yield graph("Descriptors", "", of(("engine", "sidecar", "router"), "fds"))
        yield graph("Memory of engines", "MiB", of(("engine",), "rss", MIB))
        yield graph("Memory of sidecars and routers", "MiB", of(("sidecar", "router"), "rss", MIB))
        yield graph("Goroutines", "", of(("sidecar", "router"), "goroutines"))
        yield graph("Threads of engines", "", of(("engine",), "threads"))
        leases = of(("sidecar",), "leases")
        quarantined = {f"{k}, quarantined": v for k, v in of(("sidecar",), "quarantined").items()}
        yield graph("Open leases", "", {**leases, **quarantined})
        yield graph("Requests that run", "", of(("engine",), "running"))
        yield graph("Cache in use", "share", of(("engine",), "cache"))
        yield graph("Load of the host", "processes", {"load": lambda x: x["load"]})


def main(args: argparse.Namespace) -> int:
    soak = Soak(args)
    state, green = "interrupted", False
    try:
        try:
            soak.run()
            state = "finished"
        except Failed as err:
            soak.problem(str(err))
        finally:
            ignore_signals()
    finally:
        green = soak.write_report(state)
        say("stopping everything")
        soak.stop()
    return 0 if green else 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(ARGS))
