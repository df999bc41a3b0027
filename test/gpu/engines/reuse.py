"""What the node's store saves: time to the first token of a prompt whose pages it has, beside
computing the prompt and beside other stores (--stores), in turns.

Each prompt is new and is sent three times: it is computed; the engine forgets it, and it is
loaded; and it is sent once more, while the engine has it. The store's pages are compared with
those that were computed, and all answers with each other.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import busy
from clients import prompt
from cluster import Failed, Sidecar, total, wait_for
from multi import ENV, STORED, empty_prefix_cache
from pairs import MIB, Rig, pages_of, say, summary, wait_up
from servers import Server, ask, cpu_seconds, kvspray_config

NEEDS: set[str] = set()
LENGTHS = "512,2048,8192,16000,32000"
WARM_TOKENS = 1024
STORED_S = 30.0  # until a prompt's pages are stored
# Of one prompt, in ms. cpu: of the engine and the store, over the whole turn; cpu_load: while the
# prompt is loaded.
TIMES = ("computed", "loaded", "had", "cpu", "cpu_load")
QUIET_S = 0.3  # without a new byte, until vLLM's connectors have stored them
ARMS = (
    "kvspray", "kvspray-tier", "kvspray-offloading", "plain", "offloading", "offloading-fs",
    "simple", "lmcache", "pegaflow", "mooncake-store",
)  # fmt: skip
ON_CPU = ("kvspray", "kvspray-tier", "kvspray-offloading", "plain", "lmcache", "mooncake-store")
GOAL = 1.0  # times as soon as the better of vLLM's connectors


def options(parser: Any) -> None:
    parser.add_argument("--store-lengths", default=LENGTHS, help="tokens")
    parser.add_argument("--store-rounds", type=int, default=6, help="of each length")
    parser.add_argument("--store-mb", type=int, default=8192, help="the store's memory")
    parser.add_argument(
        "--stores",
        default=Ours.name,
        help=f"engines, in turns: {', '.join(ARMS)}; those of vLLM's connectors and of other "
        "projects need CUDA; default: %(default)s",
    )
    parser.add_argument(
        "--store-start", type=int, default=240, help="seconds that engines may take"
    )
    busy.options(parser)


class OnStore:
    """An engine on the store of its sidecar, whose pages can be compared."""

    rig: Rig
    sidecar: Sidecar
    place: str
    pages = differ = 0

    def stored(self) -> float:
        m = self.sidecar.metrics()
        return sum(total(m, "kvspray_store_pages_total", result=r) for r in ("stored", "existed"))

    def loaded(self) -> float:
        return total(self.sidecar.metrics(), "kvspray_store_hits_total")

    def block(self) -> int:
        """Tokens."""
        raise NotImplementedError

    def look(self, rid: str, tokens: int) -> str:
        """Compares the pages that a prompt's second request had with those of its first."""
        import numpy as np

        whole = tokens // self.block()

        def of(request: str) -> list[Any]:
            found = [
                sorted((self.rig.pages / self.place).glob(f"cmpl-{request}-0.{what}.*.npz"))
                for what in ("computed", "loaded")
            ]
            return next((paths for paths in found if paths), [])

        wait_for("pages", lambda: of(f"{rid}-first") and of(f"{rid}-again"), 10, tick=0.02)
        one, two = pages_of(of(f"{rid}-first")), pages_of(of(f"{rid}-again"))
        for key in (k for k in one if "/" in k):
            first, _, _, state = (int(x) for x in one[f"group{key.partition('/')[0]}"])
            if state:  # that of the last token, which was computed
                continue
            wrong = (one[key][first:whole] != two[key][first:whole]).any((1, 2))
            self.pages += len(wrong)
            self.differ += int(np.sum(wrong))
            if wrong.any():
                return f"{rid}: {key}: block {first + int(wrong.argmax())} of {whole} differs"
        return ""


class Ours(OnStore):
    """With KVSprayConnector."""

    name, place, loads = "kvspray", "P", True

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        memory = f"store.memory={rig.args.store_mb}MiB"
        self.sidecar = Sidecar("store-sidecar", rig.run, rig.sidecar_config([memory]))
        self.sidecar.log = rig.logs / "store-sidecar.log"
        self.server = Server("store-engine", rig.logs)

    def start(self) -> None:
        self.sidecar.start()
        kv = kvspray_config(
            self.sidecar.socket, "kv_both", self.rig.host.memory, ("kvspray_rig", "PagesConnector")
        )
        kv["kv_connector_extra_config"]["store"] = True
        env = {**self.rig.engine_env("P"), **ENV}
        self.server.start(self.rig.host, self.rig.model, kv, *self.rig.engine_args("P"), env=env)

    def sessions(self) -> bool:
        return total(self.sidecar.metrics(), "kvspray_engine_sessions") >= 2

    def block(self) -> int:
        layout = json.loads((self.rig.pages / "P/layout.json").read_text())
        return int(layout["groups"][0]["tokens_per_block"])

    def wait_stored(self, before: float, tokens: int) -> None:
        want = before + tokens // self.block()
        wait_for("pages stored", lambda: self.stored() >= want, STORED_S, tick=0.02)

    def min_hits(self, tokens: int) -> float:
        return 1

    def forget(self) -> bool:
        return empty_prefix_cache(self.server)

    def cpu_seconds(self) -> float:
        return self.server.cpu_seconds() + cpu_seconds(self.sidecar.pids())

    def stop(self) -> None:
        self.server.stop()
        self.sidecar.stop()


class Offload:
    """An engine with vLLM's own connector for host memory."""

    name, connector, place, loads = "offloading", "OffloadingConnector", "D", True

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.server = Server(f"{self.name}-engine", rig.logs)
        self._last, self._since = -1.0, 0.0

    def start(self) -> None:
        env = {**self.rig.engine_env(self.place), **ENV, **self.env()}
        args = self.rig.engine_args(self.place)
        self.server.start(self.rig.host, self.rig.model, self.kv(), *args, env=env)

    def kv(self) -> dict[str, Any] | None:
        return {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": self.rig.args.store_mb * MIB,
                **self.more(),
            },
        }

    def env(self) -> dict[str, str]:
        return {}

    def more(self) -> dict[str, Any]:
        return {}

    def stored(self) -> float:
        return total(self.server.metrics(), STORED)

    def loaded(self) -> float:
        return total(self.server.metrics(), "vllm:kv_offload_load_bytes_total")

    def wait_stored(self, before: float, tokens: int) -> None:
        def quiet() -> bool:
            now, stored = time.monotonic(), self.stored()
            if stored != self._last:
                self._last, self._since = stored, now
            return stored > before and now - self._since > QUIET_S

        self._since = time.monotonic()
        wait_for("prompt stored", quiet, STORED_S, tick=0.05)

    def min_hits(self, tokens: int) -> float:
        return 1

    def look(self, rid: str, tokens: int) -> str:
        return ""

    def forget(self) -> bool:
        return empty_prefix_cache(self.server)

    def cpu_seconds(self) -> float:
        return self.server.cpu_seconds()

    def stop(self) -> None:
        self.server.stop()


class WithSidecar(Offload):
    """The same connector beside a sidecar."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.sidecar = Sidecar(f"{self.name}-sidecar", rig.run, rig.sidecar_config(self.set()))
        self.sidecar.log = rig.logs / f"{self.name}-sidecar.log"

    def set(self) -> list[str]:
        """Settings of the sidecar."""
        return []

    def start(self) -> None:
        self.sidecar.start()
        super().start()

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() + cpu_seconds(self.sidecar.pids())

    def stop(self) -> None:
        super().stop()
        self.sidecar.stop()


class OurOffload(WithSidecar):
    """With copies of the sidecar."""

    name = "kvspray-offloading"

    def more(self) -> dict[str, Any]:
        return {
            "spec_name": "KVSprayOffloadingSpec",
            "spec_module_path": "kvspray_vllm.offload",
            "socket": self.sidecar.socket,
        }

    def copies(self) -> dict[str, Any]:
        m = self.sidecar.metrics()
        ended = {
            outcome: total(m, "kvspray_copies_total", outcome=outcome)
            for outcome in ("ok", "failed", "expired", "lost")
        }
        moved = {
            unit: total(m, f"kvspray_copy_{name}")
            for unit, name in (("bytes", "bytes_total"), ("seconds", "duration_seconds_sum"))
        }
        links = {k: v for k, v in m.items() if k.startswith("kvspray_gpu_link_bytes")}
        return {**ended, **moved, "links": links}


class Tier(OnStore, WithSidecar):
    """With the store below vLLM's host memory, which is emptied with the prefix cache, so that each
    prompt comes from the store."""

    name, connector = "kvspray-tier", "OffloadingPages"

    def set(self) -> list[str]:
        return [f"store.memory={self.rig.args.store_mb}MiB"]

    def kv(self) -> dict[str, Any]:
        return {**(super().kv() or {}), "kv_connector_module_path": "kvspray_rig"}

    def more(self) -> dict[str, Any]:
        module = "kvspray_vllm.tier"
        tier = {"type": "KVSprayTier", "module_path": module, "socket": self.sidecar.socket}
        return {
            "spec_name": "KVSprayTieringSpec",
            "spec_module_path": module,
            "secondary_tiers": [tier],
        }

    def block(self) -> int:
        (config,) = (k for k in self.server.metrics() if k.startswith("vllm:cache_config_info"))
        size = re.search(r'[{,]block_size="(\d+)"', config)
        assert size is not None, config
        return int(size[1])

    def forget(self) -> bool:
        return empty_prefix_cache(self.server, host=True)


class Simple(Offload):
    """vLLM's other connector, which by default stores at once, as OffloadingConnector does. It
    counts no block that is stored."""

    name, connector = "simple", "SimpleCPUOffloadConnector"

    def stored(self) -> float:
        return 0.0

    def loaded(self) -> float:
        return total(self.server.metrics(), "vllm:simple_kv_offload_load_blocks_total")

    def wait_stored(self, before: float, tokens: int) -> None:
        def quiet() -> bool:
            now = time.monotonic()
            if total(self.server.metrics(), "vllm:simple_kv_offload_pending_store_blocks"):
                self._since = now
            return now - self._since > QUIET_S

        self._since = time.monotonic()
        wait_for("prompt stored", quiet, STORED_S, tick=0.05)


def one_prompt(side: Ours | Offload, n: int, seed: object) -> dict[str, Any]:
    """Milliseconds of its three requests."""
    rid, ids = f"look-{side.name}-{n}-{seed}", prompt(n, ("store", side.name, n, seed))
    before, cpu = side.stored(), side.cpu_seconds()
    computed, first = ask(side.server.url, ids, rid=f"{rid}-first")
    side.wait_stored(before, n - 1)
    wait_for("prefix cache empty", side.forget, 30, tick=0.02)
    hits, cpu_load = side.loaded(), side.cpu_seconds()
    loaded, again = ask(side.server.url, ids, rid=f"{rid}-again")
    now = side.cpu_seconds()
    hits, cpu, cpu_load = side.loaded() - hits, now - cpu, now - cpu_load
    had, third = ask(side.server.url, ids)
    tokens = [a["choices"][0]["token_ids"] for a in (first, again, third)]
    return {
        "computed": 1e3 * computed,
        "loaded": 1e3 * loaded,
        "had": 1e3 * had,
        "hits": hits,
        "cpu": 1e3 * cpu,
        "cpu_load": 1e3 * cpu_load,
        "differ": tokens[1] != tokens[2],  # the same pages, and so the same token
        "unlike_first": tokens[0] != tokens[1],
        "wrong": side.look(rid, n - 1),
    }


def measure(
    sides: list[Ours | Offload],
    lengths: list[int],
    rounds: int,
    note: Callable[[dict[str, Any]], None],
) -> list[str]:
    rows: dict[str, Any] = {}
    problems: list[str] = []
    for side in sides:
        # The sidecar pins memory for the first PUT, and a long prompt would end before its blocks
        # are saved: PUTs hold no more than a share of the cache.
        one_prompt(side, min(WARM_TOKENS, *lengths), "warm")
    for n in lengths:
        got: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for turn in range(-1, rounds):  # the first of each is not counted
            for side in sides if turn % 2 else reversed(sides):
                r = one_prompt(side, n, turn)
                problems += [f"{side.name}, {n} tokens: {r['wrong']}"] if r["wrong"] else []
                if side.loads and r["hits"] < side.min_hits(n):
                    problems.append(f"{side.name}, {n} tokens: loaded {r['hits']:.0f} only")
                if r["differ"]:
                    problems.append(f"{side.name}, {n} tokens: the answer changed after the load")
                if turn >= 0:
                    got[side.name].append(r)
        rows[str(n)] = {
            name: {
                "unlike_first": sum(r["unlike_first"] for r in all_),
                **{k: summary([r[k] for r in all_]) for k in TIMES},
            }
            for name, all_ in got.items()
        }
        note(rows)
        say(f"{n} tokens: {', '.join(line(name, r) for name, r in rows[str(n)].items())}")
    return problems


def line(name: str, r: dict[str, Any]) -> str:
    ms = [f"{k} {r[k]['median']:.1f}" for k in TIMES]
    return f"{name}: {', '.join(ms)} ms"


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """By length: how many times as soon as with vLLM's better one ours has loaded."""
    out = {}
    for n, row in rows.items():
        theirs = [row[c.name]["loaded"]["median"] for c in (Offload, Simple) if c.name in row]
        if theirs and OurOffload.name in row:
            out[n] = min(theirs) / row[OurOffload.name]["loaded"]["median"]
    return out


def arms(rig: Rig) -> list[Ours | Offload]:
    import stores  # which has subclasses of these here

    known: list[Any] = [
        Ours, Tier, OurOffload, stores.Plain, Offload, stores.Files, Simple, stores.LMCache,
        stores.PegaFlow, stores.MooncakeStore,
    ]  # fmt: skip
    by_name = {c.name: c for c in known}
    names = rig.args.stores.split(",")
    if unknown := [name for name in names if name not in by_name]:
        raise Failed(f"--stores: {unknown[0]}: unknown; known are {', '.join(by_name)}")
    if rig.host.device != "cuda" and (cuda := [name for name in names if name not in ON_CPU]):
        raise Failed(f"--stores: {', '.join(cuda)}: needs CUDA")
    return [by_name[name](rig) for name in names]


def start(sides: list[Ours | Offload], problems: list[str]) -> list[Ours | Offload]:
    """Those whose engines have started within --store-start seconds."""
    begun, up, end = [], [], time.monotonic() + sides[0].rig.args.store_start
    for side in sides:
        try:
            side.start()
            begun.append(side)
        except (Failed, RuntimeError) as err:
            problems.append(f"{side.name} did not start: {err}")
    for side in begun:
        try:
            wait_up([side.server], max(end - time.monotonic(), 1))
            up.append(side)
        except Failed as err:
            problems.append(f"{side.name} did not start: {err}")
            side.stop()
    return up


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    rig, a = stage.rig, stage.args
    lengths = [int(n) for n in a.store_lengths.split(",") if n]
    lengths = [n for n in lengths if n < rig.max_len - 1]
    if not lengths and not a.busy:
        raise Failed("--store-lengths: none fits --max-len")
    if a.busy:
        busy.check(rig)
    sides = arms(rig)
    every = list(sides)
    ours = next((side for side in sides if isinstance(side, Ours)), None)
    mine = next((side for side in sides if isinstance(side, OurOffload)), None)
    out: dict[str, Any] = {"token_bytes": rig.token_bytes()}
    problems: list[str] = []
    out |= {"lengths": {}, "ratio": {}}
    rig.so_far = out
    try:
        sides = start(sides, problems)
        if not sides:
            return out, problems
        if ours in sides:
            wait_for("the engine's sessions", ours.sessions, 60, tick=0.1)
        problems += measure(
            sides,
            lengths,
            a.store_rounds,
            lambda rows: out.update(lengths=rows, ratio=ratios(rows)),
        )
        for side in (s for s in sides if isinstance(s, OnStore)):
            out[side.name] = {"pages": side.pages, "pages_differ": side.differ}
            print(f"{side.name}: {side.pages} pages of layers compared, {side.differ} differ")
        for n, row in out["lengths"].items():
            print(f"  {n:>6} tokens  {'; '.join(line(name, r) for name, r in row.items())}")
        for n, ratio in out["ratio"].items():
            print(f"  {n:>6} tokens  {ratio:.2f} times as soon as vLLM's better one (goal {GOAL})")
        if a.busy:
            problems += busy.measure(sides, rig, out.setdefault("busy", {}))
            busy.show(out["busy"])
        if mine:
            out["copies"] = mine.copies()
            if not out["copies"]["ok"]:
                problems.append(f"the sidecar made no copy: {out['copies']}")
    finally:
        for side in every:
            side.stop()
    return out, problems
