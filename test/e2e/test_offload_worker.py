"""The offloading worker beside a real sidecar, without an engine: more jobs than the sidecar takes
at a time, and a sidecar that hangs."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import cluster as rig
import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvspray_vllm import offload

LAYERS, BLOCKS, PAGE = 8, 512, 4096
JOB = 2  # blocks
NOBODY, PR_SET_DUMPABLE = 65534, 4


@pytest.fixture
def sidecar(workdir: pathlib.Path) -> Iterator[rig.Sidecar]:
    out = rig.Sidecar(
        "offload", workdir, {"engine": {"allowed_uids": [0, NOBODY]}, "transfer": {"grace": "1s"}}
    ).start()
    try:
        yield out
    finally:
        out.stop()


class Blocks:
    """A cache whose blocks differ, a pool, and the worker between them."""

    def __init__(self, socket: str) -> None:
        whole = torch.randint(-128, 127, (LAYERS, BLOCKS, PAGE), dtype=torch.int8)
        self.tensors = [CanonicalKVCacheTensor(whole[i], PAGE) for i in range(LAYERS)]
        kv = CanonicalKVCaches(
            self.tensors, [[CanonicalKVCacheRef(t, PAGE) for t in range(LAYERS)]]
        )
        self.pool = offload.Pool([PAGE] * LAYERS, 1, BLOCKS)
        config = SimpleNamespace(engine_id="e", parallel=SimpleNamespace(rank=0, world_size=1))
        self.session = offload.Session(socket, config, kv, self.pool, False)  # type: ignore[arg-type]
        self.worker = offload.Worker(
            self.session,
            offload.HostCopies(kv, self.pool, 1),
            offload.Pieces(kv, self.session, self.pool, 1),
        )
        assert self.session.client.wait_connected(60), self.session.client.status()

    def store(self, job: int, blocks: list[int], chunks: list[int]) -> None:
        self.worker.submit_store(
            job, GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(chunks)
        )


def test_more_jobs_than_the_sidecar_takes(sidecar: rig.Sidecar) -> None:
    """The sidecar makes the copies of all of them, and each has its bytes."""
    b = Blocks(sidecar.socket)
    try:
        ids = np.random.default_rng(1).permutation(BLOCKS).tolist()
        jobs = range(BLOCKS // JOB)
        for job in jobs:
            at = job * JOB
            b.store(job, ids[at : at + JOB], list(range(at, at + JOB)))
        done: set[int] = set()

        def all_done() -> bool:
            done.update(x.job_id for x in b.worker.get_finished())
            return len(done) == len(jobs)

        rig.wait_for("all jobs", all_done, 60)
        assert b.worker.native_copies == 0
        view = np.frombuffer(b.pool.region.buffer, dtype=np.int8).reshape(LAYERS, BLOCKS, PAGE)
        assert all((view[i] == t.tensor[ids].numpy()).all() for i, t in enumerate(b.tensors))
        del view
    finally:
        b.worker.shutdown()


@pytest.mark.skipif(
    os.geteuid() != 0, reason="root: a sidecar of another user, which the engine may not signal"
)
def test_a_sidecar_of_another_user_hangs(sidecar: rig.Sidecar) -> None:
    """This process may not kill it, so it gets no copy, and vLLM's thread waits for none."""
    for p in (pathlib.Path(sidecar.socket), *pathlib.Path(sidecar.socket).parents[:2]):
        p.chmod(0o777)
    engine = subprocess.Popen(
        [sys.executable, __file__, sidecar.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert engine.stdin is not None and engine.stdout is not None
    try:
        assert "connected\n" in iter(engine.stdout.readline, "")
        sidecar.signal(signal.SIGSTOP)
        print("stopped", file=engine.stdin, flush=True)
        assert engine.stdout.read() == "ended\n"
    finally:
        sidecar.signal(signal.SIGCONT)
        engine.kill()
        engine.wait()


def _engine(socket: str) -> None:
    os.setuid(NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self/mem is root's
    b = Blocks(socket)
    print("connected", flush=True)
    assert sys.stdin.readline() == "stopped\n"
    b.store(1, [0, 1], [0, 1])
    b.worker.wait({1})
    assert [x.job_id for x in b.worker.get_finished()] == [1] and b.worker.native_copies == 1
    print("ended", flush=True)
    os._exit(0)


if __name__ == "__main__":
    _engine(sys.argv[1])
