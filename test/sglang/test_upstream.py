"""SGLang's own tests, fetched at fixed commits and not changed. Its end-to-end test of storage
backends runs with our backend, by the two methods that its base class names for that. Its unit
tests of host pools, of HiCache and of prefill/decode run with our plug-in loaded. The fixtures of
its storage tests run with our backend, and with its own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import urllib.request
import xml.etree.ElementTree
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

import cluster as rig  # noqa: E402
import pytest  # noqa: E402

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)


@dataclasses.dataclass(frozen=True)
class File:
    """A file of SGLang's repository, and what its tests do."""

    path: str  # below test/registered
    commit: str
    digest: str
    passes: int = 0
    fails: tuple[str, ...] = ()  # SGLang's own failures: without our plug-in they fail, too
    differs: tuple[str, ...] = ()  # our plug-in changes this on purpose: without it they pass

    @property
    def name(self) -> str:
        return pathlib.PurePath(self.path).stem

    @property
    def url(self) -> str:
        at = f"https://raw.githubusercontent.com/sgl-project/sglang/{self.commit}"
        return f"{at}/test/registered/{self.path}"

    @property
    def kept(self) -> pathlib.Path:
        return rig.ROOT / ".build" / "sglang-upstream" / self.commit / f"{self.name}.py"


SERVER = File(
    "hicache/test_hicache_storage_file_backend.py",
    "009d6edd8740d195efa0d5c26fd3bf57bb0c57c6",
    "42eb68feaee76005858de91b41c412b4b2428a0abe939c1cd4d7254de2ddde44",
)

# SGLang's branch "main" between 0.5.18 and the installed 0.5.23. Some of these tests are for the
# code of that time: "fails" names them.
MAIN = "3c69a4c744525be0146629fc5933e3ddab609fb2"

# fmt: off
FILES = [
    # Host pools and allocators.
    File(
        "unit/mem_cache/test_hisparse_allocator.py", MAIN,
        "4450fc0a0ef7d8e5d761e252460ee69527bb5184d0f3e5113c885a2adf742c53", 4,
        # Its stubs lack what 0.5.23 reads.
        fails=(
            "test_hisparse_prealloc_uses_swa_tail_for_direct_host_path",
            "test_mooncake_uses_separate_host_and_device_page_indices",
        ),
    ),
    File(
        "unit/mem_cache/test_hybrid_pool_assembler.py", MAIN,
        "7cf8feeb203c90fb83722d30bd9c4a7fbd1dcfa4e4d63694f77cee51d2a1dadc", 2,
        # In 0.5.23 build_full_draft_pools has other arguments.
        fails=(
            "test_full_builder_sizes_sidecar_for_anchor_logical_space",
            "test_full_builder_unwraps_empty_hybrid_linear_pool",
        ),
    ),
    File(
        "unit/mem_cache/test_mmap_allocator.py", MAIN,
        "a4047f8a196d4f91ce6e93c9c5da3f101570f381dd98a4b792f70f34a43671ce", 6,
    ),
    File(
        "unit/mem_cache/test_umbp_host_allocator.py", MAIN,
        "ac49687fba8cfc2198cd0e6272d2a3e90fa8db6f36f0c3904454fdeb4821d36f", 1,
        # Our plug-in gives the pools another allocator, whichever they ask for.
        differs=(
            "test_get_allocator_from_storage_umbp_falls_back",
            "test_umbp_allocator_dispatch_and_tensor_wrap",
        ),
    ),
    File(
        "unit/mem_cache/test_unified_radix_hicache_dispatch.py", MAIN,
        "1f922aab353d86d340f058d92705cfc6e088dc5258c376ffcbeaae8264772ba5", 9,
        # In 0.5.23 StackBuildResult has other fields.
        fails=(
            "test_minimax_sparse_build_registers_indexer_sidecar",
            "test_skips_req_to_token_counter_when_flag_false", "test_unknown_combo_raises",
            "test_wires_components_sidecars_and_counters",
        ),
    ),
    # HiCache's controllers, its names of pages.
    File(
        "unit/mem_cache/test_embedding_cache_controller.py", MAIN,
        "9e03a6871876d8a59ee398160f9ef07674c8834b3b7324393a8659ff12e54759", 22,
    ),
    File(
        "unit/mem_cache/test_mem_cache_utils.py", MAIN,
        "fcc03be5c97b2ed9994caf9a83f9a9eeef4b5dc17f74518851d30f368db6a712", 33,
        # A stub of a key lacks what 0.5.23 reads.
        fails=(
            "test_cache_salt_event_hash_walk_is_iterative",
            "test_cache_salt_event_hashes_are_memoized",
            "test_cache_salt_seeds_root_hash_chain",
        ),
    ),
    # Prefill and decode.
    File(
        "unit/disaggregation/test_disaggregation_wire.py",
        "52f2fe456a97a894f95bd20de71de502dbee5c93",
        "54b8f20f4a21f075d2eb3bb9dcf0ebc839cd74226ca34bcd30fc6ed241c51bac", 11,
    ),
    File(
        "unit/disaggregation/test_kv_transfer_replica_metric.py", MAIN,
        "d07dbec758909e31577ff2a3fb4d737b300000ddbb625619520657a7ea91563b", 3,
    ),
    File(
        "unit/disaggregation/test_nixl_deferred_kv_release.py", MAIN,
        "d5a2edddbaa7214e5efc15149b8cbb2d7dab6d42b68876294f22a85e4eca2141", 5,
        # In 0.5.23 an abort has a generation, too.
        fails=(
            "test_abort_ack_is_aggregated_per_rank", "test_ack_fires_at_most_once",
            "test_ack_held_until_outstanding_drains", "test_concluded_room_acks_immediately",
            "test_in_flight_room_registers_target_and_does_not_ack_yet",
            "test_quiescent_active_room_acks_without_waiting_for_a_worker_visit",
            "test_unregistered_room_is_noop", "test_worker_skip_before_registration_still_acks",
        ),
    ),
    File(
        "unit/managers/test_priority_scheduling_disaggregation.py", MAIN,
        "b7f967012cf3dd2c9cbb20d6874318cf026a2c100f6a26682c4774b47a2ac8e8", 9,
        # 0.5.23 reads configuration that they do not publish, and calls other functions.
        fails=(
            "test_failed_request_indices_stay_valid_after_priority_sort",
            "test_overlap_waits_for_forward_before_processing_prebuilt",
            "test_prealloc_queue_can_schedule_lower_priority_values_first",
            "test_prealloc_queue_schedules_higher_priority_values_first_by_default",
            "test_priority_disabled_abort_validation_applies_to_decode_mode",
            "test_waiting_queue_is_sorted_before_prebuilt_selection",
        ),
    ),
    File(
        "unit/mem_cache/test_minimax_sparse_pool_pd_unit.py", MAIN,
        "d22e6a4ac4175f38c8c8a1e40ae4c7af27225fdd26d239f396a58672d562296f", 2,
    ),
    File(
        "unit/mem_cache/test_mxfp8_scale_transfer_buffers.py", MAIN,
        "b9ffaeb8ba36d5fce6bc6a45bac174840ccee5c32f44602e1772a11263366436", 2,
    ),
]
# fmt: on


def keep(file: File, text: bytes) -> None:
    """Writes a download that is the file wanted, whole or not at all."""
    got = hashlib.sha256(text).hexdigest()
    want = file.digest
    assert got == want, f"{file.url} has the SHA-256 {got}, want {want}; nothing is kept"
    file.kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.kept.parent, delete=False) as f:
        f.write(text)
    os.replace(f.name, file.kept)


def fetch(file: File) -> pathlib.Path:
    """The file, from .build if it was fetched before."""
    if not file.kept.exists():
        try:
            with urllib.request.urlopen(file.url, timeout=30) as answer:
                text = answer.read(1 << 20)
        except OSError as err:
            pytest.skip(f"network: {file.url}: {err}; put that file at {file.kept}")
        keep(file, text)
    got = hashlib.sha256(file.kept.read_bytes()).hexdigest()
    assert got == file.digest, f"{file.kept} is not {file.url}"
    return file.kept


def upstream() -> Any:
    """The module with the end-to-end test."""
    spec = importlib.util.spec_from_file_location("sglang_upstream", fetch(SERVER))
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
    monkeypatch.setattr(rig, "ROOT", tmp_path)
    file = File("it.py", "0", hashlib.sha256(b"it").hexdigest())
    with pytest.raises(AssertionError, match="nothing is kept"):
        keep(file, b"an error page")
    assert not file.kept.parent.exists()
    keep(file, b"it")
    assert [p.name for p in file.kept.parent.iterdir()] == ["it.py"]
    assert file.kept.read_bytes() == b"it"


class Report:
    """What one run of pytest reports: the results of tests, and how many pools they mapped."""

    def __init__(self, path: pathlib.Path) -> None:
        self.results: dict[str, dict[str, str]] = collections.defaultdict(dict)
        self.mapped: dict[str, int] = collections.Counter()
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            where = f"{case.get('classname')}.{case.get('name')}".split(".")
            file = next(p for p in where if p.startswith(("test_", "upstream_")))
            bad = next((e for e in case if e.tag in ("failure", "error")), None)
            result = "passed" if case.find("skipped") is None else "skipped"
            if bad is not None:
                result = bad.get("message") or "failed"
            name = case.get("name", "")
            if self.results[file].get(name, "passed") == "passed":  # of several subtests, the worst
                self.results[file][name] = result
            for p in case.iter("property"):
                if p.get("name") == "mapped":
                    self.mapped[file] += int(p.get("value", "0"))

    def passed(self, file: str) -> set[str]:
        return {t for t, result in self.results[file].items() if result == "passed"}

    def failed(self, file: str) -> dict[str, str]:
        return {t: r for t, r in self.results[file].items() if r not in ("passed", "skipped")}


def run(files: list[pathlib.Path], plain: bool, **env: str) -> Report:
    """The tests of these files in a process with our plug-in, or plain, with SGLang alone."""
    with tempfile.TemporaryDirectory() as dir:
        out = pathlib.Path(dir) / "report.xml"
        path = [HERE, HERE / "stand_ins", os.environ.get("PYTHONPATH", "")]
        env |= {
            "PYTHONPATH": os.pathsep.join(str(p) for p in path if str(p)),
            "KVSPRAY_UPSTREAM": "plain" if plain else "ours",
            "SGLANG_USE_CPU_ENGINE": "1",
        }
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "upstream_hooks",
                "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", f"--rootdir={rig.ROOT}",
                "--import-mode=importlib", "--continue-on-collection-errors", f"--junitxml={out}",
                *map(str, files),
            ],
            env=os.environ | env, cwd=dir, capture_output=True, text=True, timeout=3600,
        )  # fmt: skip
        print(done.stdout[-20000:], done.stderr[-4000:])
        assert out.exists(), done.stderr[-4000:]
        return Report(out)


@functools.cache
def report(plain: bool) -> Report:
    """All files that are there share a process: to import SGLang takes longer than to run them."""
    for file in FILES:
        with contextlib.suppress(pytest.skip.Exception):
            fetch(file)
    wanted = [f.kept for f in FILES if f.kept.exists() and (not plain or f.fails or f.differs)]
    return run(wanted, plain)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_units(file: File) -> None:
    fetch(file)
    ours = report(plain=False)
    failed = ours.failed(file.name)
    assert set(failed) == {*file.fails, *file.differs}, failed
    assert len(ours.passed(file.name)) == file.passes, ours.results[file.name]
    if failed:
        alone = report(plain=True)
        assert set(alone.failed(file.name)) == set(file.fails), alone.failed(file.name)
        assert set(file.differs) <= alone.passed(file.name)


def test_storage_fixtures() -> None:
    """SGLang's fixtures of its storage tests assert the same with our backend and with its own."""
    files = [HERE / "upstream_storage.py"]
    theirs = run(files, plain=True)
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        sidecar = rig.Sidecar("a", pathlib.Path(dir), {"store": {"memory": "64MiB"}})
        with rig.running(sidecar):
            ours = run(files, plain=False, KVSPRAY_UPSTREAM_SOCKET=str(sidecar.socket))
            text = rig.get(sidecar.url + "/metrics")
            assert rig.total(rig.parse_metrics(text), "kvspray_store_hits_total") > 0
    assert not theirs.failed("upstream_storage"), theirs.results
    assert ours.results == theirs.results and ours.mapped["upstream_storage"] > 0


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
