"""No sidecar when the engines start: they serve as if alone, and transfers work once it is there,
without a restart."""

from __future__ import annotations

import pathlib

import cluster as rig
from conftest import Cluster
from prompts import fresh


def test_sidecars_that_come_later(zygote: None, workdir: pathlib.Path) -> None:
    c = Cluster(workdir, {"transports": {"order": ["shm"]}}, start=False)
    try:
        for name in ("P", "D", "R"):
            c.spawn(name)
        c.up()
        # They have had no request yet.
        for e in (c.p, c.d):
            rig.wait_for(
                f"engine {e.name} misses its sidecar",
                lambda e=e: "no sidecar at" in e.log.read_text(errors="replace"),
                30,
            )
        for i in range(2):
            prompt = fresh(300, ("alone", i))
            want = c.r.run(prompt, 12).tokens
            first = c.p.run(prompt, 1, kv={"do_remote_decode": True, "do_remote_prefill": False})
            assert first.kv is None
            assert c.d.run(prompt, 12, kv=first.kv).tokens == want
            p, d = c.start_both(fresh(200, ("both alone", i)))
            assert d.result(timeout=10).tokens == c.r.run(fresh(200, ("both alone", i)), 12).tokens
            p.result()
        c.settle(timeout=5)
        assert (
            rig.total(c.d.metrics(), "vllm:kvspray_local_prefills_total", reason="no_sidecar") >= 2
        )

        c.sp.start()
        c.sd.start()
        c.connected()
        prompt = fresh(300, "together")
        before = rig.total(
            c.d.metrics(), "vllm:kvspray_transfers_total", side="received", outcome="ok"
        )
        assert c.both(prompt).tokens == c.r.run(prompt, 12).tokens
        after = c.d.metrics()
        assert (
            rig.total(after, "vllm:kvspray_transfers_total", side="received", outcome="ok")
            == before + 1
        )
        assert rig.total(after, "vllm:kvspray_bytes_total", side="received", transport="shm") > 0
        c.settle()

        assert c.sd.proc is not None
        gone = f"sidecar pid {c.sd.proc.pid} has exited"
        c.sd.kill()
        rig.wait_for(
            "the idle engine logs that its sidecar is gone",
            lambda: gone in c.d.log.read_text(errors="replace"),
            30,
        )
    finally:
        c.close()
