"""Two sidecars, and agents of NIXL with the back end KVSPRAY."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PLUGINS = pathlib.Path(os.environ.get("KVSPRAY_NIXL", ROOT / ".build" / "nixl"))
os.environ["NIXL_PLUGIN_DIR"] = str(PLUGINS)
sys.path.insert(0, str(ROOT / "test" / "rig"))

import cluster  # noqa: E402
from agents import Agent, have_nixl  # noqa: E402


def skip(feature: str, reason: str) -> None:
    """Skips with a reason; a failure where KVSPRAY_MUST_RUN names the feature, or "all"."""
    must = os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
    if feature in must or "all" in must:
        pytest.fail(f"KVSPRAY_MUST_RUN names {feature}, but: {reason}")
    pytest.skip(f"{feature}: {reason}")


@pytest.fixture(scope="session")
def plugin() -> pathlib.Path:
    path = PLUGINS / "libplugin_KVSPRAY.so"
    if not path.exists():
        skip("nixl", f"{path} is not there; run make nixl, which needs g++")
    if not have_nixl():
        skip("nixl", "the package nixl is not there; run test/rig/env.py --nixl")
    return path


@pytest.fixture
def sidecars(plugin: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[list[cluster.Sidecar]]:
    # shm cannot map an agent's memory. Its refusals count as attempts, which on a busy host may be
    # too many.
    config = {"transports": {"order": ["tcp"]}}
    made = [cluster.Sidecar(name, tmp_path, config) for name in ("a", "b")]
    for s in made:
        s.start()
    yield made
    for s in made:
        assert s.panics() is None
        s.kill()


MakeAgent = Callable[..., Agent]


@pytest.fixture
def agent(sidecars: list[cluster.Sidecar]) -> Iterator[MakeAgent]:
    made: list[Agent] = []

    def make(name: str, at: int, nbytes: int = 1 << 20) -> Agent:
        made.append(Agent(name, sidecars[at].socket, nbytes))
        return made[-1]

    yield make
    for a in made:
        a.close()
