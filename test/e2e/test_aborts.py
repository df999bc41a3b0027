"""Requests that a decode engine gives up before it has loaded them: the prefill engine learns of it
at once, and does not keep its blocks until it has waited for the match timeout."""

from __future__ import annotations

import datetime
import json
import pathlib
import random
import secrets
import time
from collections.abc import Iterator

import cluster as rig
import pytest
from conftest import Cluster
from prompts import fresh

ABORTS = 200
PARTNER = 60.0  # the cost of an end without a report
SOON = 0.1
LATE = 1.0  # on cores that do something else, for one in twenty
ARGS = {"max_num_seqs": 4, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def c(zygote: None, workdir: pathlib.Path) -> Iterator[Cluster]:
    out = Cluster(
        workdir,
        {
            "transports": {"order": ["tcp"]},
            "transfer": {"deadline": "90s", "match_timeout": f"{PARTNER:g}s"},
        },
    )
    out.transport = "tcp"
    try:
        for name in "PD":
            out.spawn(name, **ARGS)
        out.spawn("R")
        yield out.up()
        for s in (out.sp, out.sd):
            assert s.panics() is None
    finally:
        out.close()


def leases(sidecar: rig.Sidecar) -> list[object]:
    held = json.loads(rig.get(sidecar.url + "/debug/state"))["leases"]
    return [*(held["destinations"] or ()), *(held["sources"] or ())]


def source_leases(sidecar: rig.Sidecar) -> dict[str, tuple[float, float]]:
    """When each source lease began and ended, by its sidecar's log."""
    out = {}
    for line in sidecar.lines(sidecar.log):
        if line["msg"] == "transfer" and line["side"] == "source":
            end = datetime.datetime.fromisoformat(
                line["time"].rstrip("Z")[:26] + "+00:00"
            ).timestamp()
            out[line["xfer"]] = end - line["took_us"] / 1e6, end
    return out


def test_aborts_at_random_times_leave_no_lease(c: Cluster) -> None:
    rng = random.Random(c.transport)
    free = {name: c.engines[name].free_blocks() for name in "PD"}
    for name in "PD":
        c.engines[name].watch_transfers()
    aborted: dict[str, str] = {}
    for turn in range(ABORTS // 4):
        # As many as D runs at a time keep it busy, so that others wait in its queue.
        busy = (
            [c.d.add(fresh(40, (c.transport, "busy", turn, i)), 400) for i in range(4)]
            if turn % 2
            else []
        )
        several = []
        for i in range(4):
            prompt = fresh(rng.randint(40, 400), (c.transport, "abort", turn, i))
            xfer = secrets.token_hex(16)
            spray = {"v": 1, "xfer": xfer, "fanout": 1}
            how = rng.choice(["prefilled", "concurrent", "decode first"])
            p = d = None
            if how == "decode first":
                d = c.d.add(
                    prompt,
                    30,
                    kv={"do_remote_prefill": True, "kvspray": {**spray, "peer": c.sp.endpoint}},
                )
                time.sleep(rng.uniform(0, 0.02))
            p = c.p.add(
                prompt,
                1,
                kv={"do_remote_decode": True, "do_remote_prefill": False, "kvspray": spray},
            )
            if how == "prefilled":
                d = c.d.add(prompt, 30, kv=p.result().kv)
            elif d is None:
                d = c.d.add(
                    prompt,
                    30,
                    kv={"do_remote_prefill": True, "kvspray": {**spray, "peer": c.sp.endpoint}},
                )
            several.append((p, d, how))
            aborted[xfer] = how
        rng.shuffle(several)
        for p, d, how in several:
            time.sleep(rng.uniform(0, 0.05))
            d.abort()
            if how != "prefilled":
                p.result()
        for b in busy:
            b.abort()
    c.settle()
    rig.wait_for("no lease", lambda: not leases(c.sp) and not leases(c.sd), 10)
    # A line follows the end that an engine has seen.
    rig.wait_for("lines of all leases", lambda: set(aborted) <= source_leases(c.sp).keys(), 10)
    here, there, leases_of = c.d.transfer_ends(), c.p.transfer_ends(), source_leases(c.sp)
    # The lease at P's sidecar; P's engine has the blocks back with its next step. A prefill that is
    # still computed when D gives up ends its lease at once, or if it was not begun, as it begins.
    late = sorted(leases_of[x][1] - max(here[x]["over"], leases_of[x][0]) for x in aborted)
    blocks = sorted(there[x]["released"] - max(here[x]["over"], there[x]["over"]) for x in aborted)
    for what, all_of in (("lease", late), ("blocks", blocks)):
        ms = [round(all_of[int(len(all_of) * part)] * 1e3, 1) for part in (0.5, 0.95, 0.999)]
        print(f"{c.transport}: {len(all_of)} aborts, {what} released after {ms} ms (50, 95, 100%)")
    assert len(late) == ABORTS
    assert late[int(ABORTS * 0.95)] < SOON and late[-1] < LATE, late[-20:]
    for name in "PD":
        assert c.engines[name].free_blocks() == free[name], name
    for i in range(5):
        prompt = fresh(300, (c.transport, "after", i))
        assert c.prefill_first(prompt).tokens == c.both(prompt).tokens == c.r.run(prompt, 12).tokens


def test_a_prompt_that_is_there_already_releases_the_prefill(c: Cluster) -> None:
    prompt = fresh(320, (c.transport, "twice"))
    want = c.d.run(prompt, 8).tokens
    assert c.r.run(prompt, 8).tokens == want
    kv = c.p.run(prompt, 1, kv={"do_remote_decode": True, "do_remote_prefill": False}).kv
    assert c.d.run(prompt, 8, kv=kv).tokens == want
    rig.wait_for("released", lambda: not leases(c.sp), LATE)
