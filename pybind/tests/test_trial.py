# SPDX-License-Identifier: Apache-2.0
"""kvspray try, with programs that only play the engines, the sidecars and the router."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import HERE, until

import kvspray
from kvspray import limits
from kvspray.trial import command, engines, processes
from kvspray.trial.processes import Failed, Process

FAKE = HERE / "fake_engine.py"
ENDS_S = 300.0  # twenty processes on busy cores
PACKAGES = {
    # Real engines may have this host's memory.
    "sitecustomize.py": "import kvspray.limits\n"
    "kvspray.limits.free_memory = lambda _: (64 << 30, '')",
    "vllm/__init__.py": "__version__ = '0.33.0'",
    "vllm/platforms.py": "class current_platform: device_type = 'cpu'",
    "vllm/entrypoints/openai/api_server.py": "import runpy, sys\n"
    f"sys.argv[:1] = [{str(FAKE)!r}, 'engine']\n"
    f"runpy.run_path({str(FAKE)!r}, run_name='__main__')",
    "kvspray_vllm/__init__.py": "",
    "kvspray_vllm/connector.py": "",
    "kvspray_vllm/versions.py": "KNOWN = ('0.32', '0.33')\n"
    "older_than_known = lambda version: False\nnewer_than_known = lambda: ''",
    "fake-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fake\nVersion: 0",
    "fake-0.dist-info/entry_points.txt": "[vllm.general_plugins]\nkvspray = kvspray_vllm:register",
}


class Run:
    """The command in an environment of fakes."""

    def __init__(self, dir: pathlib.Path) -> None:
        self.dir, self.model = dir, dir / "model"
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="kvs-"))  # sockets have short names
        for path, text in PACKAGES.items():
            file = dir / "packages" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        self.model.mkdir()
        binary = dir / "kvspray"
        binary.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        binary.chmod(0o755)
        own = pathlib.Path(kvspray.__file__).parents[1]
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{dir / 'packages'}:{own}",
            "TMPDIR": str(self.tmp),
            "KVSPRAY_BINARY": str(binary),
            "http_proxy": "http://127.0.0.1:1",  # as at a site with a proxy
        }
        self.env.pop("no_proxy", None)
        self.env.pop("NO_PROXY", None)
        self.env.pop("VLLM_PLUGINS", None)

    def start(self, *args: str, fault: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvspray", "try", "--model", str(self.model), *args],
            env={**self.env, "FAKE": fault}, text=True, cwd=self.dir,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end(self, *args: str, fault: str = "") -> tuple[int, str]:
        process = self.start(*args, fault=fault)
        out, _ = process.communicate(timeout=ENDS_S)
        assert not self.left(), out
        return process.returncode, out

    def left(self) -> list[str]:
        """What is still there of it: processes, and temporary files."""
        mark = str(self.dir).encode()
        out = [str(p) for p in self.tmp.iterdir()]
        for p in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = p.read_bytes() + (p.parent / "environ").read_bytes()
            except OSError:
                continue  # it has ended meanwhile
            if mark in words and p.parent.name != str(os.getpid()):
                out.append(words.decode(errors="replace").replace("\0", " ")[:200])
        return out


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    shutil.rmtree(made.tmp)


def test_equal_tokens_and_what_the_user_types_next(run: Run) -> None:
    code, out = run.end("--prompts", "2", "--model", "model")
    assert code == 0 and "2 of 2 answers equal" in out, out
    assert "\nwhy try-1 --router http://127.0.0.1:" in out
    typed = [line.split()[:2] for line in out.splitlines() if line.startswith("  ")]
    assert [words for words in typed if words[0] == "kvspray"] == [
        ["kvspray", word] for word in ("serve", "serve", "proxy")
    ]
    assert out.count("vllm serve model --host 127.0.0.1 --port ") == 2


def test_other_tokens_are_shown(run: Run) -> None:
    code, out = run.end("--prompts", "1", fault="differ")
    assert code == 1 and "0 of 1 answers equal" in out and "15 of 16 tokens" in out, out


def test_an_engine_that_ends_is_shown_with_its_log_and_a_remedy(run: Run) -> None:
    code, out = run.end("--logs", str(run.dir / "logs"), fault="die")
    assert code == 1 and "plain ended with status 1" in out, out
    assert "No space left on device" in out and limits.REMEDIES[28] in out
    assert (run.dir / "logs" / "plain.log").exists()


def test_an_answer_that_is_an_error(run: Run) -> None:
    code, out = run.end(fault="refuse")
    assert code == 1 and "/v1/completions: HTTP Error 502: no engine" in out, out
    assert "the end of " in out and "router.log" in out


def test_an_engine_that_cannot_be_imported(run: Run) -> None:
    (run.dir / "packages" / "vllm" / "__init__.py").write_text("import libcudart_missing\n")
    code, out = run.end()
    assert code == 2 and "No module named 'libcudart_missing'" in out and "remedy: " in out, out


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_everything_ends_with_the_command(run: Run, sig: signal.Signals) -> None:
    process = run.start("--keep", "--prompts", "1")
    assert process.stdout is not None
    seen = ""
    try:
        for line in process.stdout:
            seen += line
            if "curl" in line:
                break
        assert len(run.left()) >= 9, seen  # two of the command, six servers, a directory
        process.stdout.close()
        process.send_signal(sig)
        assert process.wait(ENDS_S) == (0 if sig != signal.SIGKILL else -sig)
    finally:
        process.kill()
    until(lambda: not run.left(), "the end of all that was started", ENDS_S)


def test_what_the_child_had_started_ends_with_the_child(tmp_path: pathlib.Path) -> None:
    code = f"""
import os, pathlib, signal
from kvspray.trial.command import apart
from kvspray.trial.processes import Process

def work():
    p = Process("sleeper", pathlib.Path({str(tmp_path)!r}))
    p.spawn(["sleep", "1000"])
    print(p.proc.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

print(apart(work))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, status = done.stdout.split()
    assert status == "1" and not os.path.exists(f"/proc/{pid}"), done.stderr


@pytest.mark.parametrize(
    ("call", "sig", "want"),
    [("fork", "SIGINT", "130"), ("fork", "SIGHUP", "143"), ("waitid", "SIGTERM", "3"),
     ("waitpid", "SIGTERM", "3"), ("waitpid", "SIGHUP", "3")],
)  # fmt: skip
def test_a_signal_at_any_time(tmp_path: pathlib.Path, call: str, sig: str, want: str) -> None:
    """It comes right after a call of the system by the command."""
    code = f"""
import os, pathlib, signal
from kvspray.trial.command import apart
from kvspray.trial.processes import Process

command, call = os.getpid(), os.{call}

def signaled(*args):
    found = call(*args)
    if os.getpid() == command:
        os.kill(command, signal.{sig})
    return found

def work():
    if {call == "fork"}:
        signal.pause()
    p = Process("sleeper", pathlib.Path({str(tmp_path)!r}))
    p.spawn(["sleep", "1000"])
    print(p.proc.pid, flush=True)
    return 3

os.{call} = signaled
print(apart(work))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *pids, status = done.stdout.split()
    assert status == want and not any(os.path.exists(f"/proc/{p}") for p in pids), done.stderr


def trial(tmp_path: pathlib.Path, *args: str) -> command.Trial:
    return command.Trial(command.options(args), tmp_path)


def absent(*_: Any, **__: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        (lambda m: m.setattr(importlib.util, "find_spec", absent), "vLLM is not", "install vllm"),
        (
            lambda m: m.setattr(importlib.metadata, "entry_points", absent),
            "the plug-in for vLLM is not",
            'install "kvspray[vllm]"',
        ),
        (lambda m: m.setenv("VLLM_PLUGINS", "other"), "VLLM_PLUGINS=other", "add kvspray"),
        (
            lambda m: m.setenv("KVSPRAY_BINARY", "/nowhere"),
            "the sidecar does not run: [Errno 2]",
            "install a wheel",
        ),
        (
            lambda m: m.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1)),
            "/dev/shm has 0 MiB free, and 64 are needed",
            "--shm-size",
        ),
    ],
)
def test_requirements_name_their_remedies(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    problem: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ["kvspray"])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("KVSPRAY_BINARY", "/bin/true")
    trial(tmp_path).check()
    change(monkeypatch)
    with pytest.raises(command.Refused) as refused:
        trial(tmp_path).check()
    assert problem in str(refused.value) and remedy in str(refused.value)


def test_engines_that_cannot_run_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"vllm": "0.33.0", "known": ["0.32", "0.33"], "older": False, "newer": "",
        "device": "cpu", "free": None}  # fmt: skip
    monkeypatch.setattr(limits, "free_memory", lambda _: (64 << 30, ""))
    assert trial(tmp_path).judge(facts).device == "cpu"
    assert trial(tmp_path).judge({**facts, "device": "cuda", "free": 64 << 30}).device == "cuda"
    for change, text in (
        ({"vllm": "0.30.1", "older": True}, "'vllm==0.33.*'"),
        ({"device": ""}, "vLLM's device is none"),
        ({"device": "rocm"}, "vLLM's device is rocm"),
        ({"device": "cuda", "free": 1 << 30}, "the GPU has 1024 MiB free"),
    ):
        with pytest.raises(command.Refused, match=text):
            trial(tmp_path).judge({**facts, **change})
    monkeypatch.setattr(limits, "free_memory", lambda _: (1 << 30, ""))
    with pytest.raises(command.Refused, match="not enough memory for three engines.*MemoryMax"):
        trial(tmp_path).judge(facts)


@pytest.mark.parametrize("args", [("--prompts", "0"), ("--timeout", "0"), ("--model", "./none")])
def test_options_out_of_range(args: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.options(args)
    assert ended.value.code == 2 and f"{args[0]} {args[1]}" in capsys.readouterr().err


def test_logs_need_a_directory_that_takes_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(command.Refused, match="--logs /proc: .* a directory that you can write"):
        trial(tmp_path, "--logs", "/proc").check()


def test_no_directory_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc")
    assert command.main([]) == command.REFUSED and "set TMPDIR" in capsys.readouterr().err


def test_engines_have_room_for_the_names_of_their_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (command.MAX_PARENT, command.MAX_PARENT + 1):
        with tempfile.TemporaryDirectory(dir="/tmp") as root:
            parent = pathlib.Path(root, "d" * (length - len(root) - 1))
            parent.mkdir()
            monkeypatch.setattr(tempfile, "gettempdir", lambda parent=parent: str(parent))
            run = command.directory()
            if run.parent != parent:
                run.rmdir()
        assert len(f"{run}/{uuid.uuid4()}") <= 107
        assert (run.parent == parent) == (length == command.MAX_PARENT)


def test_a_log_of_vllm_s_arguments_is_no_error(tmp_path: pathlib.Path) -> None:
    for text, remedy in (
        ("non-default args: {'max_model_len': 2048}", None),
        ("site-packages/huggingface_hub/x.py: ImportError: cannot import name 'y'", None),
        ("max_model_len (2048) is greater than the derived max_model_len", "choose a model"),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404", "download the model"),
    ):
        found = re.findall("^remedy: (.*)", trial(tmp_path).remedy(text), re.M)
        assert len(found) == (2 if remedy else 1) and found[0].startswith(remedy or "--logs"), found


def test_an_engine_that_gives_no_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"{url}/v1/completions: no answer within 0.05 s"):
            engines.ask(url, "x")


def test_a_helper_that_tidies_up_is_not_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GROUP_S", 60.0)  # of a busy machine
    p = Process("p", tmp_path)
    done = tmp_path / "done"
    code = f"""
import os, signal, time
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.read(read, 1)
    time.sleep(0.3)  # its work
    open({str(done)!r}, "w")
else:
    print("up", flush=True)
    signal.pause()
"""
    p.spawn([sys.executable, "-c", code])
    until(lambda: p.tail() == "up", "its start")
    p.stop()
    assert done.exists()


def test_a_log_s_last_lines(tmp_path: pathlib.Path) -> None:
    p = Process("p", tmp_path)
    assert p.tail() == ""
    p.log.write_bytes(b"\xff\n" + b"".join(b"%d\n" % i for i in range(100)))
    assert p.tail(2) == "98\n99"
    with pytest.raises(Failed, match="p ended"):
        p.up()
