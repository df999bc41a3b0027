# SPDX-License-Identifier: Apache-2.0
"""SGLang's own end-to-end test of storage backends, fetched at a fixed commit and not changed. Its
base class runs with our backend, by the two methods that it names for that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import types
import urllib.request
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

import cluster as rig  # noqa: E402
import pytest  # noqa: E402

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)

COMMIT = "009d6edd8740d195efa0d5c26fd3bf57bb0c57c6"
FILE = "test/registered/hicache/test_hicache_storage_file_backend.py"
DIGEST = "42eb68feaee76005858de91b41c412b4b2428a0abe939c1cd4d7254de2ddde44"
URL = f"https://raw.githubusercontent.com/sgl-project/sglang/{COMMIT}/{FILE}"


def keep(text: bytes, kept: pathlib.Path) -> None:
    """Writes a download that is the file wanted, whole or not at all."""
    got = hashlib.sha256(text).hexdigest()
    assert got == DIGEST, f"{URL} has the SHA-256 {got}, want {DIGEST}; nothing is kept"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as f:
        f.write(text)
    os.replace(f.name, kept)


def upstream() -> Any:
    """The module, from .build if it was fetched before."""
    kept = rig.ROOT / ".build" / "sglang-upstream" / COMMIT / pathlib.Path(FILE).name
    if not kept.exists():
        try:
            with urllib.request.urlopen(URL, timeout=30) as answer:
                text = answer.read(1 << 20)
        except OSError as err:
            pytest.skip(f"network: {URL}: {err}; put that file at {kept}")
        keep(text, kept)
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == DIGEST, f"{kept} is not {URL}"
    spec = importlib.util.spec_from_file_location("sglang_upstream", kept)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # The helpers that it imports import this for evaluations, which are not run here.
    unused = types.ModuleType("datasets")
    unused.__dict__["load_dataset"] = None
    with pytest.MonkeyPatch.context() as m:
        m.setitem(sys.modules, "datasets", unused)
        spec.loader.exec_module(module)
    return module


def test_only_the_file_wanted_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "at" / "file.py"
    with pytest.raises(AssertionError, match="nothing is kept"):
        keep(b"an error page", kept)
    assert not kept.parent.exists()
    monkeypatch.setattr(sys.modules[__name__], "DIGEST", hashlib.sha256(b"it").hexdigest())
    keep(b"it", kept)
    assert [p.name for p in kept.parent.iterdir()] == ["file.py"] and kept.read_bytes() == b"it"


def test_basic_backup_and_prefetch() -> None:
    module = upstream()
    module.DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 1200  # a busy machine with few cores
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        sidecar = rig.Sidecar("a", pathlib.Path(dir), {"store": {"memory": "64MiB"}})
        extra = {
            "backend_name": "kvspray", "module_path": "kvspray_sglang.hicache",
            "class_name": "KvsprayHiCache", "interface_v1": 1, "socket": sidecar.socket,
            "hicache_storage_pass_prefix_keys": True,
        }  # fmt: skip
        on_a_cpu: dict[str, Any] = {
            "--device": "cpu", "--mem-fraction-static": 0.7, "--max-total-tokens": 4096,
            "--disable-overlap-schedule": True, "--skip-server-warmup": True,
            "--hicache-io-backend": "direct", "--hicache-mem-layout": "page_first_direct",
            "--attention-backend": "torch_native",
        }  # fmt: skip
        path = os.pathsep.join(
            p for p in (str(HERE / "stand_ins"), os.environ.get("PYTHONPATH", "")) if p
        )

        class Ours(module.HiCacheStorageBaseMixin, module.CustomTestCase):  # type: ignore
            @classmethod
            def _get_model_name(cls) -> str:
                return str(rig.ROOT / ".build" / "models" / "tiny-llama")

            @classmethod
            def _get_additional_server_args_and_env(cls) -> tuple[dict[str, Any], dict[str, str]]:
                backend = {
                    "--hicache-storage-backend": "dynamic",
                    "--hicache-storage-backend-extra-config": json.dumps(extra),
                }
                programs = pathlib.Path(sys.executable).parent  # it runs "sglang serve"
                env = {
                    "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                    "PYTHONPATH": path,
                    "SGLANG_USE_CPU_ENGINE": "1",
                    "SGLANG_HOST_IP": "127.0.0.1",
                }
                return on_a_cpu | backend, env

        with rig.running(sidecar):
            suite = module.unittest.TestSuite([Ours("test_basic_backup_and_prefetch")])
            result = module.unittest.TextTestRunner(verbosity=2).run(suite)
            assert result.testsRun == 1 and result.wasSuccessful(), result
            text = rig.get(sidecar.url + "/metrics")
            assert rig.total(rig.parse_metrics(text), "kvspray_store_hits_total") >= 11
