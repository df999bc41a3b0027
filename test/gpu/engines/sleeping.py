"""Sleep and wake-up of engines: vLLM's own copies beside the sidecar's, in turns. The digest of the
weights and the answer to a prompt are compared after each, also where the sidecar is killed or
stopped meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import urllib.request
from concurrent import futures
from typing import Any

import nvml
from clients import prompt
from cluster import Failed, Sidecar, merge, total, wait_for
from pairs import Rig, say, summary, wait_up
from servers import Server, ask, cpu_seconds

NEEDS: set[str] = set()
GIB = 1 << 30
BACK_S = 30.0  # for the session with a sidecar that was killed
COPIED = re.compile(r"kvspray: (sleep|wake-up): ([\d.]+) GiB in ([\d.]+) s, (\d+) of (\d+) alloc")


def options(parser: Any) -> None:
    parser.add_argument("--sleeps", type=int, default=100, help="of each engine")
    parser.add_argument(
        "--sleep-native", type=int, default=0, help="of the engine without us; default: --sleeps"
    )
    parser.add_argument("--sleep-faults", type=int, default=20, help="sidecars killed or stopped")
    parser.add_argument(
        "--sleep-links",
        default="",
        help="numbers of PCIe links that the sidecar uses, such as 1,2,4, one after the other",
    )
    parser.add_argument(
        "--sleep-two",
        action="store_true",
        help="then two engines with one sidecar at the same time, on the GPUs of P and D",
    )


class Engine:
    """With vLLM's own copies."""

    name, place = "vllm", "P"

    def __init__(self, rig: Rig, place: str = "") -> None:
        self.place = place or self.place
        self.rig, self.server = rig, Server(f"sleep-{self.name}-{self.place}", rig.logs)
        self.ids = prompt(min(512, rig.max_len // 2), "sleep")
        self.want: tuple[str, list[int]] = ("", [])

    def start(self) -> None:
        env = {
            **self.rig.engine_env(self.place),
            "VLLM_SERVER_DEV_MODE": "1",
            **self.more(),
        }
        args = ["--enable-sleep-mode", "--worker-extension-cls", "kvspray_weights.Weights"]
        engine = self.rig.engine_args(self.place)
        self.server.start(self.rig.host, self.rig.model, None, *engine, *args, env=env)

    def more(self) -> dict[str, str]:
        return {}

    def post(self, path: str, body: object = None) -> tuple[float, Any]:
        data = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.url + path, data, headers, method="POST")
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=180) as answer:
            text = answer.read()
        return time.perf_counter() - start, json.loads(text) if text else None

    def state(self) -> tuple[str, list[int]]:
        """Digests of the weights of all ranks, and an answer."""
        _, digests = self.post("/collective_rpc", {"method": "weights_digest"})
        _, answer = ask(self.server.url, self.ids, max_tokens=8)
        return " ".join(digests["results"]), answer["choices"][0]["token_ids"]

    def once(self) -> dict[str, float]:
        cpu = self.cpu_seconds()
        asleep, _ = self.post("/sleep?level=1")
        free = free_mib()
        awake, _ = self.post("/wake_up")
        cpu = self.cpu_seconds() - cpu
        return {"sleep": asleep, "wake": awake, "cpu": cpu, "free_mib": free}

    def check(self) -> str:
        now = self.state()
        return "" if now == self.want else f"{self.name}: {now} after a sleep, {self.want} before"

    def cpu_seconds(self) -> float:
        return self.server.cpu_seconds()

    def stop(self) -> None:
        self.server.stop()


class Ours(Engine):
    """With the sidecar's."""

    name, place = "kvspray", "D"

    def __init__(self, rig: Rig, place: str = "", sidecar: Sidecar | None = None) -> None:
        super().__init__(rig, place)
        self.owner = sidecar is None
        self.sidecar = sidecar or Sidecar("sleep-sidecar", rig.run, rig.sidecar_config())
        if self.owner:
            self.sidecar.log = rig.logs / "sleep-sidecar.log"

    def start(self) -> None:
        if self.owner:
            self.sidecar.start()
        super().start()

    def more(self) -> dict[str, str]:
        return {"KVSPRAY_SLEEP": self.sidecar.socket}

    def copied(self) -> list[dict[str, Any]]:
        """What the engine's log has of each sleep and wake-up, in order."""
        found = COPIED.findall(self.server.log.read_text(errors="replace"))
        return [
            {"what": w, "gib": float(g), "s": float(s), "by_sidecar": int(n), "of": int(m)}
            for w, g, s, n, m in found
        ]

    def with_links(self, n: int) -> None:
        """Restarts the sidecar: it relays over the first other GPUs."""
        own = self.rig.gpus(self.place)[:1] or ["0"]
        others = [uuid for index, uuid in gpus() if index not in own]
        if len(others) < n - 1:
            raise Failed(f"sleep: {n} links, but the host has {len(others) + 1} GPUs")
        before = self.sessions()
        self.sidecar.stop()
        relays = {"transports": {"gpu": {"relays": others[: n - 1]}}}
        self.sidecar.config = merge(self.sidecar.config, relays)
        self.sidecar.start()
        wait_for("the engines' sessions", lambda: self.sessions() >= before, BACK_S, tick=0.1)

    def sessions(self) -> float:
        return total(self.sidecar.metrics(), "kvspray_engine_sessions")

    def fault(self, kill: bool, after: float) -> None:
        time.sleep(after)
        if kill:
            self.sidecar.kill()
            self.sidecar.start()
        else:
            self.sidecar.signal(signal.SIGSTOP)
            time.sleep(1.5)
            self.sidecar.signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() + cpu_seconds(self.sidecar.pids())

    def stop(self) -> None:
        super().stop()
        if self.owner:
            self.sidecar.stop()


def free_mib() -> float:
    """Of the GPU, while one engine sleeps."""
    gpu = nvml.open_first()
    return 0.0 if gpu is None else gpu.free() / (1 << 20)


def table(got: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {
        name: {key: summary([r[key] for r in rows]) for key in rows[0]}
        for name, rows in got.items()
        if rows
    }


def gpus() -> list[tuple[str, str]]:
    """Indexes and UUIDs of those that this command may use."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    found = [tuple(line.replace(" ", "").split(",")) for line in text.splitlines()]
    visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    return [(i, uuid) for i, uuid in found if not visible or i in visible]


def rounds(sides: list[Engine], n: int, native: int, out: dict[str, Any]) -> list[str]:
    """The engine without us sleeps in as many rounds as native."""
    got: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    problems = []
    for turn in range(-1, n):  # the first pins memory, and is reported apart
        mine = [s for s in sides if isinstance(s, Ours) or turn < native]
        for side in mine if turn % 2 else reversed(mine):
            r = side.once()
            wrong = side.check()
            problems += [wrong] if wrong else []
            if turn >= 0:
                got[side.name].append(r)
            else:
                out.setdefault("first", {})[side.name] = r
        out["rounds"] = table(got)
        if len(problems) > 5:
            break
    return problems


def speeds(copied: list[dict[str, Any]]) -> dict[str, Any]:
    out = {}
    for what in ("sleep", "wake-up"):
        mine = [c["gib"] * GIB / 1e9 / c["s"] for c in copied if c["what"] == what]
        out[what] = summary(mine) if mine else {}
    return out


def steps(sides: list[Engine], a: Any, out: dict[str, Any]) -> list[str]:
    """The rounds, by links of the sidecar."""
    ours = next(s for s in sides if isinstance(s, Ours))
    problems = []
    for at, word in enumerate(a.sleep_links.split(",")):
        if word:
            ours.with_links(int(word))
        had, row = len(ours.copied()), out.setdefault(f"links {word}" if word else "links", {})
        now = sides if at == 0 else [ours]
        problems += rounds(now, a.sleeps, a.sleep_native or a.sleeps, row)
        copied = ours.copied()[had:]
        short = [c for c in copied if c["by_sidecar"] < c["of"]]
        if not copied or short:
            problems.append(f"{word} links: the sidecar did not copy all: {short[:4]}")
        row["gb_s"] = speeds(copied[2:])
        for name, r in row["rounds"].items():
            ms = {k: 1e3 * r[k]["median"] for k in ("sleep", "wake", "cpu")}
            say(f"{word} links, {name}: " + ", ".join(f"{k} {v:.0f} ms" for k, v in ms.items()))
        say(f"  GB/s: {row['gb_s']}; first {row['first']}")
    return problems


def together(pair: list[Ours], n: int, out: dict[str, Any]) -> list[str]:
    """Two engines sleep at the same time, and wake up at the same time."""
    problems, took = [], {"/sleep?level=1": [], "/wake_up": []}  # type: ignore[var-annotated]
    had = [len(side.copied()) for side in pair]
    for turn in range(-1, n):
        for path, times in took.items():
            start = time.perf_counter()
            with futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda side, path=path: side.post(path), pair))
            if turn >= 0:
                times.append(time.perf_counter() - start)
        problems += [wrong for side in pair if (wrong := side.check())]
    for side, before in zip(pair, had, strict=True):
        out[side.place] = speeds(side.copied()[before + 2 :])
    out["seconds"] = {path: summary(times) for path, times in took.items() if times}
    say(f"two at once: {out}")
    return problems


def faults(ours: Ours, n: int, longest: float) -> tuple[dict[str, Any], list[str]]:
    r, problems = random.Random(1), []
    took = []
    for turn in range(n):
        thread = threading.Thread(target=ours.fault, args=(turn % 2 == 0, r.random() * longest))
        thread.start()
        took.append(sum(ours.once()[k] for k in ("sleep", "wake")))
        thread.join()
        wrong = ours.check()
        problems += [f"fault {turn}: {wrong}"] if wrong else []
        wait_for("the session", lambda: ours.sessions() > 0, BACK_S, tick=0.1)
    met = [c for c in ours.copied()[-2 * n :] if c["by_sidecar"] < c["of"]] if n else []
    return {"n": n, "met_a_copy": len(met), "seconds": summary(took) if took else {}}, problems


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, a = stage.rig, stage.args
    if rig.host.device != "cuda":
        raise Failed("sleep: vLLM's sleep mode needs a GPU")
    ours = Ours(rig)
    sides: list[Engine] = [Engine(rig), ours]
    second = [Ours(rig, "P", ours.sidecar)] if a.sleep_two else []
    out: dict[str, Any] = {}
    rig.so_far = out
    try:
        for side in [*sides, *second]:
            side.start()
        wait_up([side.server for side in [*sides, *second]])
        for side in [*sides, *second]:
            side.want = side.state()
        problems = steps(sides, a, out)
        if second:
            problems += together([ours, *second], min(a.sleeps, 10), out.setdefault("two", {}))
        last = next(reversed([row for key, row in out.items() if key.startswith("links")]))
        longest = sum(last["rounds"]["kvspray"][k]["median"] for k in ("sleep", "wake"))
        out["faults"], wrong = faults(ours, a.sleep_faults, longest)
        problems += wrong
        say(f"faults: {out['faults']}")
    finally:
        for side in [*second, *reversed(sides)]:
            side.stop()
    return out, problems
