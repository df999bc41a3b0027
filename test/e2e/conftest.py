"""Fixtures of the end-to-end tests: one import of vLLM, then forked engines and real sidecars."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))
sys.path.insert(0, str(HERE))

import cluster as rig  # noqa: E402
import engines  # noqa: E402

MODELS = rig.ROOT / ".build" / "models"
MODEL = pathlib.Path(os.environ.get("KVSPRAY_MODEL", MODELS / "tiny-llama"))
HYBRID = MODELS / "tiny-gemma3"


# vLLM's wheel has one library for each kind of processor, and its kernels for DeepSeek's caches in
# that for AMX alone.
AMX = " amx_tile " in pathlib.Path("/proc/cpuinfo").read_text()
# amx: on a host that is there to show these.
MUST_RUN = os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
needs_amx = pytest.mark.skipif(
    not AMX and "amx" not in MUST_RUN,
    reason="amx: this processor has no AMX, without which vLLM has no kernels for CPUs that write "
    "or read such a cache",
)


def need(what: str, have: bool, remedy: str) -> None:
    if have:
        return
    if "vllm" in MUST_RUN:
        pytest.fail(f"{what} is missing, and KVSPRAY_MUST_RUN names vllm; {remedy}")
    pytest.skip(f"vllm: {what} is missing; {remedy}")


# What `make test` runs, beside one test of each fault; `make test-all` runs the rest.
SMOKE = {
    "test_lengths",
    "test_many_at_once",
    "test_preemption_by_a_full_pool",
    "test_abort_on_either_side",
    "test_every_transferred_page_has_one_hash",
}
# Of a model with recurrent states, the first case.
SMOKE_STATES = {"test_tokens_are_those_of_one_engine", "test_a_state_leaves_after_the_last_step"}


# What computes tensors in this process.
LAST = {
    "test_offload_worker.py", "test_tier_store.py", "test_truth.py", "test_truth_layouts.py",
    "test_truth_quant.py",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=["smoke", "rest"],
        help="only the smoke tests, or only the others; both without it",
    )


# One method of speculation, and a prompt of several chunks of prefill.
SMOKE_DRAFTS = {"c": "eagle", "n": 300}


def in_smoke(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests of SMOKE, of each test of a fault the first, and SMOKE_DRAFTS."""
    smoke: set[pytest.Item] = set()
    faults: set[str] = set()
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if item.path.name == "test_tokens.py" and item.originalname in SMOKE:
            smoke.add(item)
        if item.path.name == "test_speculation.py" and hasattr(item, "callspec"):
            if item.callspec.params.items() >= SMOKE_DRAFTS.items():
                smoke.add(item)
        if item.path.name == "test_recurrent.py" and item.originalname in SMOKE_STATES:
            if item.callspec.indices["c"] == 0:
                smoke.add(item)
        if item.path.name == "test_faults.py" and item.originalname not in faults:
            faults.add(item.originalname)
            smoke.add(item)
    return smoke


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Engines are forked from this process. Once tensors were computed here, torch has threads,
    which a child does not have and for which it waits without end: LAST comes last, in whatever
    order files are named.

    A fault meets every side over every transport, at every second of the moments that it could come
    at, by turns. `make test-attack` tries all."""
    items.sort(key=lambda item: item.path.name in LAST)
    if os.environ.get("KVSPRAY_ATTACK_RUNS"):
        return
    faults = [
        item
        for item in items
        if item.path.name == "test_faults.py" and isinstance(item, pytest.Function)
    ]
    left_out: set[pytest.Item] = {item for item in faults if odd(item, faults)}
    part = config.getoption("--part")
    if part is not None:
        smoke = in_smoke([item for item in items if item not in left_out])
        left_out |= {item for item in items if (item in smoke) != (part == "smoke")}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def odd(item: pytest.Function, among: list[pytest.Function]) -> bool:
    """Whether the places of its parameters, each among the values that the test is given for it,
    add up to an odd number; never without a moment to choose."""
    all_of = [i.callspec.params for i in among if i.originalname == item.originalname]
    params = item.callspec.params
    places = [
        list(dict.fromkeys(p[name] for p in all_of)).index(value) for name, value in params.items()
    ]
    return "steps" in params and sum(places) % 2 == 1


@pytest.fixture(scope="session")
def zygote() -> Iterator[None]:
    try:
        import vllm  # noqa: F401

        have = True
    except ImportError:
        have = False
    need("vLLM", have, "run these tests with .build/venv (test/rig/env.py makes it)")
    for model in (MODEL, HYBRID):
        need(str(model), model.is_dir(), "run test/rig/env.py")
    need(str(rig.BINARY), rig.BINARY.exists(), "run make build")
    engines.preload()
    yield


Loras = tuple[engines.Adapter | None, engines.Adapter | None]


class Cluster:
    """Two sidecars, P, D, and a plain engine R without kvspray."""

    transport = "shm"  # what a sidecar's default comes to on one host
    model = MODEL

    def __init__(
        self, dir: pathlib.Path, config: dict[str, Any] | None = None, start: bool = True
    ) -> None:
        self.dir = dir
        self.sp = rig.Sidecar("sp", dir, config)
        self.sd = rig.Sidecar("sd", dir, config)
        if start:
            self.sp.start()
            self.sd.start()
        self.engines: dict[str, engines.Engine] = {}

    def kv(self, sidecar: rig.Sidecar, role: str, **extra: Any) -> dict[str, Any]:
        return {
            "kv_connector": "KVSprayConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": sidecar.socket, "memory": "memfd", **extra},
        }

    def spawn(self, name: str, **args: Any) -> engines.Engine:
        kv = {"P": (self.sp, "kv_producer"), "D": (self.sd, "kv_consumer")}.get(name)
        extra = args.pop("extra", {})
        model = str(args.pop("model", self.model))
        e = engines.Engine(
            name, model, self.dir / f"{name}.log", self.kv(*kv, **extra) if kv else None, **args
        )
        self.engines[name] = e
        return e

    @property
    def p(self) -> engines.Engine:
        return self.engines["P"]

    @property
    def d(self) -> engines.Engine:
        return self.engines["D"]

    @property
    def r(self) -> engines.Engine:
        return self.engines["R"]

    def up(self) -> Cluster:
        for e in self.engines.values():
            e.wait_up()
        if self.sp.proc and self.sd.proc:
            self.connected()
        return self

    def connected(self, timeout: float = 60.0) -> None:
        for e in (self.p, self.d):
            rig.wait_for(
                f"engine {e.name} connected", lambda e=e: e.status().get("connected"), timeout
            )

    # ---- requests, as a router would send them

    def prefill_first(
        self, prompt: list[int], n_tokens: int = 12, n: int = 1, loras: Loras = (None, None)
    ) -> engines.Out:
        """loras: the adapters that P and D are asked for, here and below."""
        p = self.p.add(
            prompt,
            1,
            kv={"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
            n=n,
            lora=loras[0],
        )
        return self.d.add(prompt, n_tokens, kv=p.result().kv, n=n, lora=loras[1]).result()

    def start_both(
        self,
        prompt: list[int],
        n_tokens: int = 12,
        n: int = 1,
        xfer: str | None = None,
        loras: Loras = (None, None),
    ) -> tuple[engines.Pending, engines.Pending]:
        xfer = xfer or secrets.token_hex(16)
        spray = {"v": 1, "xfer": xfer, "fanout": n}
        d = self.d.add(
            prompt,
            n_tokens,
            kv={"do_remote_prefill": True, "kvspray": {**spray, "peer": self.sp.endpoint}},
            n=n,
            lora=loras[1],
        )
        p = self.p.add(
            prompt,
            1,
            kv={"do_remote_decode": True, "do_remote_prefill": False, "kvspray": spray},
            n=n,
            lora=loras[0],
        )
        return p, d

    def both(
        self, prompt: list[int], n_tokens: int = 12, n: int = 1, loras: Loras = (None, None)
    ) -> engines.Out:
        p, d = self.start_both(prompt, n_tokens, n, loras=loras)
        p.result()
        return d.result()

    def settle(self, timeout: float = 30.0) -> None:
        """Every lease is over, and no engine holds anything."""
        for e in (self.p, self.d):
            if e.alive():
                rig.wait_for(f"engine {e.name} idle ({e.status()})", e.idle, timeout)

    def close(self) -> None:
        for e in self.engines.values():
            e.stop()
        self.sp.stop()
        self.sd.stop()


@pytest.fixture(scope="module")
def workdir(request: pytest.FixtureRequest) -> Iterator[pathlib.Path]:
    """Short, for unix sockets; kept where a test of the module failed."""
    before = request.session.testsfailed
    d = pathlib.Path(tempfile.mkdtemp(prefix="kvs-"))
    yield d
    if request.session.testsfailed == before:
        shutil.rmtree(d, ignore_errors=True)
    else:
        print(f"\nlogs kept in {d}")
