"""The tenant's secret of the store: where it comes from, and that only the sidecar gets it."""

from __future__ import annotations

import logging
import pathlib
import pickle
from typing import Any

import pytest
from store_fakes import namespace

import kvspray
import kvspray.store
from kvspray_vllm import shim
from kvspray_vllm.settings import Settings

SECRET = b"0123456789abcdef"


def test_the_settings(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.parse({}).secret() == b""
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert Settings.parse({"store": True, "secret_file": str(file)}).secret() == SECRET
    monkeypatch.setenv("TENANT", SECRET.decode())
    assert Settings.parse({"store": True, "secret_env": "TENANT"}).secret() == SECRET
    for extra, problem in (
        ({"secret_file": str(file)}, "store is not true"),
        ({"store": True, "secret_env": SECRET}, "want the name of a variable"),
        ({"store": True, "secret_file": 7}, "want the name of a file"),
    ):
        with pytest.raises(ValueError, match=problem) as err:
            Settings.parse(extra)
        assert SECRET.decode() not in str(err.value)
    with pytest.raises(ValueError, match="secret_file or secret_env is in a file .* name one"):
        Settings.parse({"store": True, "secret_file": str(file), "secret_env": "TENANT"}).secret()
    file.write_bytes(b"tooshort")
    with pytest.raises(ValueError, match="has 8 bytes") as err:
        Settings.parse({"store": True, "secret_file": str(file)}).secret()
    assert "tooshort" not in str(err.value)


def test_the_sidecar_gets_it_and_other_processes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[kvspray.store.Namespace] = []

    class Space:
        def __init__(
            self, client: Any, namespace: kvspray.store.Namespace, pieces: Any = (), blocks: int = 0
        ) -> None:
            opened.append(namespace)

    class Client:
        signal_layer = signal_step = None

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

    monkeypatch.setattr(kvspray.store, "Space", Space)
    monkeypatch.setattr(kvspray, "WorkerClient", Client)
    monkeypatch.setattr(kvspray, "SchedulerClient", Client)
    log = logging.getLogger("test")
    ns = namespace()  # what a worker reports to the scheduler
    shim.Worker(None, "e", 1, log, kvspray.Ranks(), SECRET).pages(ns, [], 1)
    shim.Scheduler(None, "e", log, secret=SECRET).pages([ns, ns])
    shim.Worker(None, "e", 1, log, kvspray.Ranks()).pages(ns, [], 1)
    assert [n.secret for n in opened] == [SECRET, SECRET, SECRET, b""]
    assert SECRET not in pickle.dumps(ns) and SECRET.decode() not in repr(opened)
