"""Whatever dies, stops or is cut: no wrong token, no request past its deadline and grace, the
surviving engine serves on, its blocks come back, and once the part is back transfers work again
without a restart of the engine."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import secrets
import signal
import time
from collections.abc import Iterator
from typing import Any

import cluster as rig
import pytest
from conftest import Cluster
from engines import EngineDied, Pending
from prompts import fresh

DEADLINE, PARTNER, GRACE = 4.0, 1.5, 1.0
# On top of deadline and grace, for timers and engine steps on busy cores. What an engine then
# computes by itself takes what it takes.
SLACK = 4.0
# And on top of them by a sidecar's own clock, for its timers.
LATE = 0.5
LONG, STEPS, STEP = 4400, 35, 128
CHUNK, LAYERS = 128, 4  # tokens of a layer that a chunk holds
TRIES = 4  # each with twice the times of the one before
# Small steps, so that a fault lands in the middle.
ARGS = {name: {"max_num_batched_tokens": STEP} for name in "PDR"}


@dataclasses.dataclass
class Sent:
    """A prompt at both engines."""

    prompt: list[int]
    xfer: str
    want: list[list[int]]
    p: Pending
    d: Pending
    began: float
    before: dict[str, float]  # D's metrics
    landed: int = 0  # tokens, at least, that D's sidecar had when dispatch returned


class Faulty(Cluster):
    def __init__(self, dir: pathlib.Path, transport: str) -> None:
        self.seeds = itertools.count()
        self.slower = 1  # than a machine that does enough of a prefill within DEADLINE
        super().__init__(
            dir, {"transfer": self.times(), "transports": {"order": [transport]}}, start=False
        )
        # Sidecars reach each other's control side through relays that can be cut (both ends dial);
        # data lanes do not go there.
        self.relays: list[rig.Relay] = []
        for s in (self.sp, self.sd):
            relay = rig.Relay(s.endpoint)
            s.config["peer"]["advertise"] = s.endpoint = relay.address
            self.relays.append(relay)
        self.sp.start()
        self.sd.start()

    def times(self) -> dict[str, str]:
        return {
            "deadline": f"{self.slower * DEADLINE:g}s",
            "match_timeout": f"{self.slower * PARTNER:g}s",
            "grace": f"{GRACE:g}s",
        }

    @property
    def limit(self) -> float:
        """The longest that a request may wait for a transfer."""
        return GRACE + self.slower * (DEADLINE + SLACK)

    def slow_down(self) -> None:
        """Twice the time for everything, on a machine so busy that a transfer cannot be met in
        flight."""
        self.slower *= 2
        for s in (self.sp, self.sd):
            assert s.stop() == 0
            s.config["transfer"] = self.times()
            s.start()
        self.connected()

    def send(self, prompt: list[int]) -> Sent:
        want, before, xfer, began = (
            self.r.run(prompt, 12).tokens,
            self.d.metrics(),
            secrets.token_hex(16),
            time.monotonic(),
        )
        p, d = self.start_both(prompt, xfer=xfer)
        return Sent(prompt, xfer, want, p, d, began, before)

    def dispatch(self, what: object, steps: int) -> Sent:
        """Sends a prompt to both, and returns when P has done that many of its steps and what they
        gave has landed. P goes on, and stops before its last step until go_on: however busy the
        machine is, what comes now meets a transfer in flight. Where it is so busy that the deadline
        has passed before, another prompt is sent, with more time: no part has been attacked yet."""
        chunks = steps * STEP // CHUNK
        for _ in range(TRIES):
            before, start = self.landed(), self.p.steps()
            self.p.pause_at(start + steps)
            sent = self.send(fresh(LONG, (what, steps, next(self.seeds))))
            rig.wait_for(
                "P under way", lambda start=start: self.p.steps() >= start + steps, 120, tick=0.001
            )
            try:
                rig.wait_for(
                    "landing",
                    lambda before=before: self.all_of(before + chunks * LAYERS * 65536),
                    self.slower * DEADLINE,
                    tick=0.001,
                )
            except rig.Failed:
                self.go_on()
                self.answered(what, sent)
                self.settle(timeout=2 * self.limit)
                self.slow_down()
                continue
            self.p.pause_at(start + STEPS - 1)
            sent.landed = chunks * CHUNK
            return sent
        pytest.fail(f"no transfer was in flight after {steps} steps, {TRIES} times")

    def go_on(self) -> None:
        if self.p.alive():
            self.p.pause_at(None)

    def state(self, sidecar: rig.Sidecar) -> dict[str, Any]:
        return json.loads(rig.get(sidecar.url + "/debug/state"))

    def destinations(self) -> list[str]:
        return [d["state"] for d in self.state(self.sd)["leases"]["destinations"] or ()]

    def all_of(self, bytes: float) -> bool:
        """That much has landed, with nothing on its way, and the transfer is not over."""
        return (
            self.landed() >= bytes
            and not self.state(self.sp)["leases"]["slices_in_flight"]
            and self.destinations() == ["landing"]
        )

    def landed(self) -> float:
        return rig.total(self.sd.metrics(), "kvspray_rail_bytes_total", direction="in")

    def data_lanes(self) -> dict[str, set[int]]:
        """The lanes between the two sidecars, as each of them numbers them."""
        boots = {s.name: self.state(s)["boot"] for s in (self.sp, self.sd)}
        other = {"sp": boots["sd"], "sd": boots["sp"]}
        return {
            s.name: {n["lane"] for n in self.state(s)["lanes"] if n["peer"] == other[s.name]}
            for s in (self.sp, self.sd)
        }

    def in_time(self, since: int) -> None:
        """No transfer that the decode's sidecar ended took longer than its deadline and grace, by
        that sidecar's own clock. Its traces from one on."""
        took = [
            t["took_us"] / 1e6
            for t in self.sd.lines(self.sd.transfers)[since:]
            if t["side"] == "destination"
        ]
        assert max(took, default=0) <= self.slower * DEADLINE + GRACE + LATE, took

    def let_go(self, d: Pending, began: float) -> None:
        """D's request waits for no transfer any more, at its deadline and grace at the latest: what
        it lacks is being computed."""
        left = max(began + self.limit - time.monotonic(), 0.01)
        rig.wait_for(
            f"{d.rid} let go",
            lambda: not any(r.startswith(d.rid) for r in self.d.status()["loads"]),
            left,
        )

    def serves_on(self, what: object, sent: Sent | None = None) -> None:
        """A fresh request while a part is down, beside the one that the fault met: an engine that
        lives answers, with the right tokens, and no engine waits for a transfer beyond its time."""
        prompt = fresh(200, ("meanwhile", what, next(self.seeds)))
        spray = {"v": 1, "xfer": secrets.token_hex(16), "fanout": 1}
        began = time.monotonic()
        d = p = None
        if self.d.alive():
            d = self.d.add(
                prompt,
                12,
                kv={"do_remote_prefill": True, "kvspray": {**spray, "peer": self.sp.endpoint}},
            )
        if self.p.alive():
            p = self.p.add(
                prompt,
                1,
                kv={"do_remote_decode": True, "do_remote_prefill": False, "kvspray": spray},
            )
        assert d or p
        if d:
            if sent:
                self.let_go(sent.d, sent.began)
            self.let_go(d, began)
        want = self.r.run(prompt, 12).tokens
        if d:
            assert d.result().tokens == want, what
        if p:
            assert p.result().tokens == [want[0][:1]], what
        if sent:
            self.answered(what, sent)

    def answered(self, what: object, sent: Sent) -> None:
        """Who lives has answered, with the right tokens."""
        if self.d.alive():
            self.let_go(sent.d, sent.began)
            assert sent.d.result().tokens == sent.want, what
        if self.p.alive():
            assert sent.p.result().tokens == [sent.want[0][:1]], what

    def hit(self, sent: Sent, known: bool) -> None:
        """The fault met the transfer in flight: D did not get it, and computed what had not come:
        where its sidecar could still report what that was, no more than this."""
        after = self.d.metrics()
        computed, total = self.d.computed(sent.d.rid), len(sent.prompt)
        assert computed >= total - (STEPS - 1) * STEP, (
            f"the fault came too late: {computed} tokens were computed"
        )
        if known:
            assert computed <= total - sent.landed, (
                f"{computed} tokens were computed, though {sent.landed} of {total} had come"
            )
        else:
            assert computed == total, (
                f"{computed} tokens were computed: there was no report that the others had come"
            )

        def grew(name: str, **labels: str) -> float:
            return rig.total(after, name, **labels) - rig.total(sent.before, name, **labels)

        assert grew("vllm:kvspray_recompute_tokens_total") >= computed
        lost = sum(
            grew("vllm:kvspray_transfers_total", side="received", outcome=o)
            for o in ("failed", "expired", "lost", "cancelled")
        )
        assert lost >= 1, "the fault came too late: no transfer was lost"

    def works_again(self) -> None:
        """A transfer, with nothing restarted but what the test restarted."""
        self.connected()
        end = time.monotonic() + 30
        while True:  # a prober may need a moment to trust a part that is back
            before = rig.total(
                self.d.metrics(), "vllm:kvspray_transfers_total", side="received", outcome="ok"
            )
            seed = next(self.seeds)
            prompt = fresh(500, ("again", seed))
            want = self.r.run(prompt, 12).tokens
            got = self.both(prompt).tokens
            if got != want:
                again = self.r.run(prompt, 12).tokens, self.both(prompt).tokens
                for e in self.engines.values():
                    e.clear_prefix_cache()
                alone = {name: e.run(prompt, 12).tokens for name, e in self.engines.items()}
                raise AssertionError(
                    f"prompt {seed}: {got}, want {want}; again {again}; each alone {alone}"
                )
            if (
                rig.total(
                    self.d.metrics(), "vllm:kvspray_transfers_total", side="received", outcome="ok"
                )
                == before + 1
            ):
                return
            assert time.monotonic() < end, (
                "transfers do not work again\n" + self.sd.tail(15) + "\n" + self.sp.tail(15)
            )

    def heal(self) -> None:
        for relay in self.relays:
            relay.heal()

    def restore(self) -> None:
        """What a test that failed has left behind is no reason for the next one to fail."""
        self.heal()
        self.go_on()
        for s in (self.sp, self.sd):
            if s.proc is None:
                s.start()
        for name, e in list(self.engines.items()):
            if not e.alive():
                self.revive(name)
        self.connected()

    def revive(self, name: str) -> None:
        self.engines[name].kill()
        self.spawn(name, **ARGS[name])
        self.engines[name].wait_up()


@pytest.fixture(scope="module", params=["tcp", "shm"])
def c(request: pytest.FixtureRequest, zygote: None, workdir: pathlib.Path) -> Iterator[Faulty]:
    folder = workdir / request.param
    folder.mkdir()
    out = Faulty(folder, request.param)
    try:
        for name, args in ARGS.items():
            out.spawn(name, **args)
        out.up()
        yield out
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()
        for relay in out.relays:
            relay.close()


@pytest.fixture(autouse=True)
def blocks_come_back(c: Faulty) -> Iterator[None]:
    c.restore()
    c.settle(timeout=2 * c.limit)
    before = {name: (e.pid, e.free_blocks()) for name, e in c.engines.items() if name in "PD"}
    traces = len(c.sd.lines(c.sd.transfers))
    yield
    c.go_on()
    c.settle(timeout=2 * c.limit)
    for name, (pid, free) in before.items():
        if c.engines[name].pid == pid:
            assert c.engines[name].free_blocks() == free, name
    c.in_time(traces)


WHEN = [2, 12, 30]  # the second is the first that fills a chunk of each layer


def lost(p: Pending) -> None:
    """The answer of an engine that was killed: mostly none."""
    try:
        p.result(timeout=5)
    except EngineDied:
        pass


@pytest.mark.parametrize("steps", WHEN)
@pytest.mark.parametrize("side", ["sp", "sd"])
def test_kill_9_of_a_sidecar(c: Faulty, side: str, steps: int) -> None:
    sent = c.dispatch(("kill", side), steps)
    sidecar: rig.Sidecar = getattr(c, side)
    sidecar.kill()
    c.go_on()
    c.serves_on((side, steps), sent)
    c.hit(sent, known=side != "sd")
    c.settle(timeout=c.limit)
    sidecar.start()
    c.works_again()


@pytest.mark.parametrize("side", ["sp", "sd"])
def test_kill_9_of_a_sidecar_between_prefill_and_decode(c: Faulty, side: str) -> None:
    prompt = fresh(800, ("kill later", side))
    kv = c.p.run(prompt, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    sidecar: rig.Sidecar = getattr(c, side)
    sidecar.kill()
    began = time.monotonic()
    d = c.d.add(prompt, 12, kv=kv)
    c.let_go(d, began)
    assert d.result().tokens == c.r.run(prompt, 12).tokens
    c.settle(timeout=c.limit)
    sidecar.start()
    c.works_again()


@pytest.mark.parametrize("name", ["P", "D"])
def test_kill_9_of_an_engine_between_prefill_and_decode(c: Faulty, name: str) -> None:
    prompt = fresh(800, ("engine dies later", name))
    kv = c.p.run(prompt, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    c.engines[name].kill()
    began = time.monotonic()
    if name == "P":
        d = c.d.add(prompt, 12, kv=kv)
        c.let_go(d, began)
        assert d.result().tokens == c.r.run(prompt, 12).tokens
    c.serves_on((name, "between"))
    c.settle(timeout=c.limit)  # where D is dead, no request comes for the blocks
    c.revive(name)
    c.works_again()


@pytest.mark.parametrize("steps", WHEN[:2])
@pytest.mark.parametrize("side", ["sp", "sd"])
def test_a_stopped_sidecar(c: Faulty, side: str, steps: int) -> None:
    """Where D's own prefills take longer than the deadline, as on a busy machine, the deadline ends
    the load: then all is done again, with more time."""
    for _ in range(TRIES):
        why = stopped_sidecar(c, side, steps)
        if side == "sd" or why and all("does not answer" in reason for reason in why):
            return
        assert why and all("does not answer" in reason or "deadline" in reason for reason in why), (
            why
        )
        c.slow_down()
    pytest.fail(f"D gave no load up for its silence, {TRIES} times")


def stopped_sidecar(c: Faulty, side: str, steps: int) -> list[str]:
    """Why D's loads ended."""
    sent = c.dispatch(("stop", side), steps)
    sidecar: rig.Sidecar = getattr(c, side)
    assert sidecar.proc is not None
    ended = len(c.sd.lines(c.sd.transfers))
    sidecar.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    c.go_on()
    try:
        c.serves_on((side, "stopped", steps), sent)
        c.hit(sent, known=side != "sd")
        # A sidecar that is stopped writes none.
        why = (
            [
                t.get("reason", "")
                for t in c.sd.lines(c.sd.transfers)[ended:]
                if t["side"] == "destination"
            ]
            if side == "sp"
            else []
        )
        # Its own engine may not take a block back before it is dead: the shim kills it after
        # deadline and grace.
        assert sidecar.proc.wait(2 * c.limit) == -signal.SIGKILL
        assert time.monotonic() - stopped >= GRACE, "killed before its grace was over"
        c.settle(timeout=c.limit)
    finally:
        sidecar.kill()
    sidecar.start()
    c.works_again()
    return why


@pytest.mark.parametrize("steps", WHEN[:2])
def test_a_sidecar_that_wakes_up_in_time(c: Faulty, steps: int) -> None:
    sent = c.dispatch("nap", steps)
    c.sp.signal(signal.SIGSTOP)
    time.sleep(0.5)
    c.sp.signal(signal.SIGCONT)
    c.go_on()
    c.answered("nap", sent)
    c.works_again()


@pytest.mark.parametrize("steps", WHEN[::2])
def test_kill_9_of_the_prefill_engine(c: Faulty, steps: int) -> None:
    sent = c.dispatch("P dies", steps)
    c.p.kill()
    c.serves_on(("P", steps), sent)
    c.hit(sent, known=True)
    lost(sent.p)
    c.revive("P")
    c.works_again()


@pytest.mark.parametrize("steps", WHEN[::2])
def test_kill_9_of_the_decode_engine(c: Faulty, steps: int) -> None:
    sent = c.dispatch("D dies", steps)
    c.d.kill()
    c.go_on()
    c.serves_on(("D", steps), sent)
    lost(sent.d)
    c.settle(timeout=c.limit)

    def source_ends() -> list[str]:
        return [
            t["outcome"]
            for t in c.sp.lines(c.sp.transfers)
            if t["side"] == "source" and t["xfer"] == sent.xfer
        ]

    ends = rig.wait_for("a line of the transfer", source_ends, 10)
    assert "ok" not in ends, f"the fault came too late: {ends}"
    c.revive("D")
    c.works_again()


@pytest.mark.parametrize("steps", WHEN[:2])
@pytest.mark.parametrize("back", [False, True])
def test_the_control_lane_is_cut(c: Faulty, back: bool, steps: int) -> None:
    sent = c.dispatch(("cut", back), steps)
    lanes = c.data_lanes()
    assert lanes["sp"] and lanes["sd"]
    assert sum([relay.cut() for relay in c.relays]) >= 1
    try:
        assert c.data_lanes() == lanes, "the cut of the control lane took data lanes with it"
        if back:
            time.sleep(0.3)
            c.heal()
        c.go_on()
        if back:
            c.answered("cut", sent)
        else:
            c.serves_on(("cut", steps), sent)
        assert c.data_lanes() == lanes, "data lanes did not outlive the cut"
        c.settle(timeout=c.limit)
    finally:
        c.heal()
    c.works_again()


def test_orderly_restart_of_both_sidecars(c: Faulty) -> None:
    for sidecar in (c.sp, c.sd):
        assert sidecar.stop() == 0
        sidecar.start()
    c.works_again()
