# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake-up of engines: vLLM's own copies beside the sidecar's, in turns. The digest of the
weights and the answer to a prompt are compared after each, also where the sidecar is killed or
stopped meanwhile."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
import urllib.request
from typing import Any

import nvml
from clients import prompt
from cluster import Failed, Sidecar, wait_for
from pairs import Rig, say, summary, wait_up
from servers import Server, ask, cpu_seconds

NEEDS: set[str] = set()
GIB = 1 << 30
BACK_S = 30.0  # for the session with a sidecar that was killed
COPIED = re.compile(r"kvspray: (sleep|wake-up): ([\d.]+) GiB in ([\d.]+) s, (\d+) of (\d+) alloc")


def options(parser: Any) -> None:
    parser.add_argument("--sleeps", type=int, default=100, help="of each engine")
    parser.add_argument("--sleep-faults", type=int, default=20, help="sidecars killed or stopped")


class Engine:
    """With vLLM's own copies."""

    name, place = "vllm", "P"

    def __init__(self, rig: Rig) -> None:
        self.rig, self.server = rig, Server(f"sleep-{self.name}", rig.logs)
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

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.sidecar = Sidecar("sleep-sidecar", rig.run, rig.sidecar_config())
        self.sidecar.log = rig.logs / "sleep-sidecar.log"

    def start(self) -> None:
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


def rounds(sides: list[Engine], n: int, out: dict[str, Any]) -> list[str]:
    got: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    problems = []
    for turn in range(-1, n):  # the first pins memory, and is reported apart
        for side in sides if turn % 2 else reversed(sides):
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
        wait_for("the sidecar", lambda: ours.sidecar.metrics(), BACK_S, tick=0.1)
    met = [c for c in ours.copied()[-2 * n :] if c["by_sidecar"] < c["of"]] if n else []
    return {"n": n, "met_a_copy": len(met), "seconds": summary(took) if took else {}}, problems


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, a = stage.rig, stage.args
    if rig.host.device != "cuda":
        raise Failed("sleep: vLLM's sleep mode needs a GPU")
    ours = Ours(rig)
    sides: list[Engine] = [Engine(rig), ours]
    out: dict[str, Any] = {}
    rig.so_far = out
    try:
        for side in sides:
            side.start()
        wait_up([side.server for side in sides])
        for side in sides:
            side.want = side.state()
        problems = rounds(sides, a.sleeps, out)
        copied = ours.copied()
        if not copied or any(c["by_sidecar"] < c["of"] for c in copied):
            problems.append(f"the sidecar did not copy all: {copied[:4]}")
        for what in ("sleep", "wake-up"):
            speeds = [c["gib"] * GIB / 1e9 / c["s"] for c in copied[2:] if c["what"] == what]
            out[f"{what}_gb_s"] = summary(speeds) if speeds else {}
        for name, row in out["rounds"].items():
            ms = {k: 1e3 * row[k]["median"] for k in ("sleep", "wake", "cpu")}
            say(f"{name}: " + ", ".join(f"{k} {v:.0f} ms" for k, v in ms.items()))
        longest = sum(out["rounds"]["kvspray"][k]["median"] for k in ("sleep", "wake"))
        out["faults"], wrong = faults(ours, a.sleep_faults, longest)
        problems += wrong
        say(f"faults: {out['faults']}")
        print(f"sleep: first {out['first']}")
        print(f"  GB/s: sleep {out['sleep_gb_s']}, wake-up {out['wake-up_gb_s']}")
    finally:
        for side in sides:
            side.stop()
    return out, problems
