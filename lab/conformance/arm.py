# SPDX-License-Identifier: Apache-2.0
"""The engines of one connector: P computes prompts, D answers them, R is a plain engine. A JSON
file describes the connector; docs/bench/conformance.md has its fields."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import uuid
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
for place in ("test/rig", "test/e2e"):
    sys.path.insert(0, str(ROOT / place))

import cluster as rig  # noqa: E402
import engines  # noqa: E402

START_S = 120.0
# Of one answer, after which it counts as none.
ANSWER_S = 60.0
# Logits (natural logarithms of probabilities) nearer than that can be turned by the order of sums.
# With float32 on a CPU the engines' own differences are below 0.0001.
TIE = 0.001
LIKELIEST = 20  # tokens whose logits are asked for
NO_PARAMS = ({}, {})


@dataclasses.dataclass
class Tally:
    """What clients got in one situation."""

    right: int = 0
    wrong: int = 0  # status 200 and other tokens than the plain engine's
    failed: int = 0  # an error, which the client can repeat
    none: int = 0  # no answer
    aborted: int = 0  # by the client
    prompt: int = 0  # tokens of answered prompts
    computed: int = 0  # of these, by D
    died: int = 0  # engines that ended by themselves
    held: int = 0  # blocks that no request has and that stay taken
    notes: list[str] = dataclasses.field(default_factory=list)

    def bad(self) -> bool:
        tried = self.right or self.failed
        return bool(self.wrong or self.none or self.died or self.held or not tried)


class Described:
    """The fields of a description, with each ${name} replaced: dir, that of the run; port_NAME, a
    free port of that name; others: given by --set, or variables of the environment."""

    def __init__(self, text: str, dir: pathlib.Path, given: dict[str, str]) -> None:
        self.names = {"dir": str(dir), "python": sys.executable, "root": str(ROOT), **given}
        whole = json.loads(text)
        self.per_request = {k: whole.pop(k, None) for k in ("prefill_params", "decode_params")}
        self.fields: dict[str, Any] = self.fill(whole)

    def fill(self, value: Any, **more: str) -> Any:
        if isinstance(value, dict):
            return {k: self.fill(v, **more) for k, v in value.items()}
        if isinstance(value, list):
            return [self.fill(v, **more) for v in value]
        if not isinstance(value, str):
            return value
        return re.sub(r"\$\{(\w+)\}", lambda m: self.value(m[1], more), value)

    def value(self, name: str, more: dict[str, str]) -> str:
        if name in more:
            return more[name]
        if name.startswith("port_") and name not in self.names:
            self.names[name] = str(rig.free_port())
        found = self.names.get(name, os.environ.get(name))
        if found is None:
            raise rig.Failed(f"the description has ${{{name}}}: give --set {name}=VALUE")
        return found


class Arm:
    def __init__(self, described: Described, dir: pathlib.Path, model: str) -> None:
        self.described, self.fields, self.dir, self.model = described, described.fields, dir, model
        self.hand_over = described.per_request["prefill_params"] is not None
        self.lease_s = float(self.fields.get("lease_s", 0))
        self.engines: dict[str, engines.Engine] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.free: dict[str, int] = {}
        self.left: set[str] = set()  # requests that their clients aborted
        for name, content in self.fields.get("files", {}).items():
            (dir / name).write_text(json.dumps(content, indent=1))

    # ---- starting and ending

    def start(self) -> None:
        for name in self.fields.get("processes", {}):
            self.start_process(name)
        for name in "PDR":
            self.spawn(name)
        for name in "PDR":
            self.up(name)

    def start_process(self, name: str) -> None:
        p = self.fields["processes"][name]
        with (self.dir / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                p["command"], env={**os.environ, **p.get("env", {})}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, cwd=self.dir,
            )  # fmt: skip
        if "ready" in p:
            rig.wait_for(f"process {name}", lambda: self.ready(name, p["ready"]), START_S)

    def ready(self, name: str, url: str) -> bool:
        if self.processes[name].poll() is not None:
            raise rig.Failed(f"process {name} ended:\n{rig.tail(self.dir / f'{name}.log', 20)}")
        try:
            rig.get(url, 1.0)
        except urllib.error.HTTPError:
            return False
        return True

    def spawn(self, name: str) -> None:
        side = self.fields["engines"].get(name, {})
        args = {"max_num_seqs": 16, **self.fields.get("args", {}), **side.get("args", {})}
        self.engines[name] = engines.Engine(
            name,
            self.model,
            self.dir / f"{name}.log",
            side.get("kv_transfer_config"),
            side.get("env"),
            **args,
        )

    def up(self, name: str) -> None:
        """Waits for an engine, and runs a prompt, after which its free blocks are all."""
        e = self.engines[name].wait_up()
        e.run([5, 6, 7], 2)
        rig.wait_for(f"engine {name} idle", e.idle, 30)
        self.free[name] = e.free_blocks()

    def of(self, name: str) -> list[str]:
        """The processes that belong to an engine."""
        return [n for n, p in self.fields.get("processes", {}).items() if p.get("of") == name]

    def signal(self, name: str, sig: int) -> None:
        """To an engine with its processes."""
        os.kill(self.engines[name].pid, sig)
        for p in self.of(name):
            self.processes[p].send_signal(sig)

    def kill(self, name: str) -> None:
        self.engines[name].kill()
        for p in self.of(name):
            self.kill_process(p)

    def kill_process(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def restart(self, name: str) -> None:
        """At the same addresses."""
        self.kill(name)
        for p in self.of(name):
            self.start_process(p)
        self.spawn(name)
        self.up(name)

    def close(self) -> None:
        for e in self.engines.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(e.pid, signal.SIGCONT)
            e.kill()
        for p in self.processes.values():
            p.send_signal(signal.SIGCONT)
            p.terminate()
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()

    # ---- requests, as a router sends them

    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of one request, for P and for D. D's are P's answer unless the description has some."""
        if not self.hand_over:
            return NO_PARAMS
        transfer = uuid.uuid4().hex
        both = self.described.per_request
        p, d = both["prefill_params"], both["decode_params"] or {}
        return (
            self.described.fill(p, transfer=transfer),
            self.described.fill(d, transfer=transfer),
        )

    def prefill(self, prompt: list[int]) -> tuple[engines.Pending, dict[str, Any]]:
        p, d = self.params()
        return self.engines["P"].add(prompt, 1, kv=p or None), d

    def given(self, begun: tuple[engines.Pending, dict[str, Any]]) -> dict[str, Any]:
        """The reference that D gets, when P has answered."""
        out = begun[0].result(ANSWER_S)
        return begun[1] or out.kv or {}

    def reference(self, prompt: list[int]) -> dict[str, Any]:
        return self.given(self.prefill(prompt))

    def decode(self, prompt: list[int], kv: dict[str, Any], n: int = 8) -> engines.Pending:
        return self.engines["D"].add(prompt, n, kv=json.loads(json.dumps(kv)) or None)

    def leave(self, tally: Tally, asked: engines.Pending) -> None:
        """The client goes away."""
        asked.abort()
        self.left.add(asked.rid)
        tally.aborted += 1

    def loads_begun(self) -> None:
        """Waits until D has taken blocks for what it waits for, if it ever does."""
        d = self.engines["D"]
        with contextlib.suppress(rig.Failed):
            rig.wait_for("blocks of D", lambda: d.free_blocks() < self.free["D"], 3)

    # ---- what became of them

    def judge(self, tally: Tally, prompt: list[int], asked: engines.Pending, n: int = 8) -> None:
        """Counts the answer of D."""
        d = self.engines["D"]
        try:
            out = asked.result(ANSWER_S)
        except TimeoutError:
            tally.none += 1
            with contextlib.suppress(engines.EngineDied, TimeoutError):
                asked.abort()
            return
        except engines.EngineDied:
            tally.none += 1
            return
        if asked.rid in self.left:
            return
        if out.finish[0] not in ("length", "stop"):  # a server answers 500 to "error"
            tally.failed += 1
            return
        tally.prompt += len(prompt)
        tally.computed += min(d.computed(asked.rid), len(prompt))
        why = self.differs(prompt, out.tokens[0], n)
        tally.right += not why
        tally.wrong += bool(why)
        if why:
            tally.notes.append(why)

    def differs(self, prompt: list[int], got: list[int], n: int) -> str:
        r = self.engines["R"]
        want = r.run(prompt, n).tokens[0]
        if got == want:
            return ""
        if len(got) != len(want):
            return f"{len(got)} tokens, of {len(want)}"
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        near = r.run(prompt + want[:at], 1, logprobs=LIKELIEST).logprobs
        if got[at] not in near:
            return f"token {at} of {n}: {got[at]} is not among the {LIKELIEST} likeliest"
        gap = near[want[at]] - near[got[at]]
        if gap < TIE:
            return ""
        return f"token {at} of {n}: {got[at]} for {want[at]}, {gap:.3f} less likely"

    def settle(self, tally: Tally) -> None:
        """Waits until both engines hold nothing. What stays held is counted, and its engine starts
        again, so that the next situation begins as this one did."""
        for name in "PD":
            e = self.engines[name]
            try:
                rig.wait_for(
                    f"engine {name}",
                    lambda e=e, name=name: e.idle() and e.free_blocks() >= self.free[name],
                    self.lease_s + 30,
                )
                e.clear_prefix_cache()
                continue
            except engines.EngineDied:
                tally.died += 1
                tally.notes.append(f"engine {name} died: {last_error(self.dir / f'{name}.log')}")
            except rig.Failed:
                held = self.free[name] - e.free_blocks()
                tally.held += held
                tally.notes.append(f"engine {name} holds {held} blocks without a request")
            except TimeoutError:
                tally.died += 1
                tally.notes.append(f"engine {name} does not answer")
            self.restart(name)

    def fill_pool(self, name: str, seed: object) -> None:
        """Other prompts, until each block of the engine has been written again."""
        e = self.engines[name]
        left = self.free[name] + 4
        n, block = 0, self.block()
        while left > 0:
            e.run(fresh(8 * block, (seed, "fill", n)), 1)
            left -= 8
            n += 1

    def block(self) -> int:
        return int(self.fields.get("args", {}).get("block_size", engines.ENGINE_ARGS["block_size"]))


def last_error(log: pathlib.Path) -> str:
    found = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if re.search(r"\w+(Error|Exception)\b|FATAL|Aborted|Segmentation", line)
    ]
    return found[-1][:200] if found else "no error in its log"


def fresh(n: int, seed: object) -> list[int]:
    import prompts

    return prompts.fresh(n, seed)
