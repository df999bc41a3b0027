# SPDX-License-Identifier: Apache-2.0
"""The command ``kvspray try``."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import errno
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
from collections.abc import Callable, Sequence
from typing import Any

from kvspray import limits
from kvspray.__main__ import BINARY
from kvspray.trial import engines
from kvspray.trial.engines import Host, Server, ask, sessions
from kvspray.trial.processes import (
    BEAT_S,
    ENDING,
    START_S,
    Failed,
    Process,
    end_on_signals,
    free_port,
    ignore_signals,
    total,
    wait_for,
    wait_up,
)

SAME, DIFFERENT, REFUSED = 0, 1, 2  # exit codes
METRICS_S = 30.0  # until a sidecar on busy cores has answered
SHOWN_S = 15.0  # until a transfer that has ended shows in a sidecar's metrics
STOP_S = 10.0
MAX_PROMPTS = 100
MAX_TOKENS = 2048  # of a prompt with its answer
ANSWER = 16
WORDS = (30, 100, 240)  # of prompts, in turns
MIB = 1 << 20
ENGINE_BYTES = 900 * MIB  # of a vLLM without weights and cache, on a CPU; on a GPU it is a context
CACHE_BYTES = {"": 64 * MIB, "model": 1024 * MIB}  # of the tiny model, of a model of the user's
ROOM = 256 * MIB  # in the directory for temporary files
SHM = 64 * MIB
# Paths of unix sockets have at most 107 bytes: vLLM's are a UUID in a directory of this command's,
# whose name adds 21.
MAX_PARENT = 107 - 37 - 21
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
INSTALL = f"{shlex.quote(sys.executable)} -m pip install"
# What the end of a log may have, and what then helps.
REMEDIES = (
    (r"No space left on device|Bus error", limits.REMEDIES[errno.ENOSPC]),
    (
        r"out of memory|OutOfMemory|Free memory on device",
        "free memory of the GPU (nvidia-smi shows its processes), or name another GPU with "
        "CUDA_VISIBLE_DEVICES",
    ),
    (r"Cannot allocate memory|MemoryError|bad_alloc", limits.REMEDIES[errno.ENOMEM]),
    (r"address already in use", "try again: another program took the port meanwhile"),
    (
        r"huggingface\.co|huggingface_hub\.errors|hf_hub|Repository Not Found|gated repo",
        "download the model first, and pass its directory: --model DIR",
    ),
    (
        r"derived max_model_len|KV cache is needed",
        f"choose a model whose context has {MAX_TOKENS} tokens",
    ),
)
TALK = "a an the one two cold warm old new red blue tall small house river stone road bird sees \
finds leaves near under over after before and or while every morning evening winter summer".split()


class Refused(Exception):
    """This host lacks something that the trial needs; the text has the remedy."""


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvspray try",
        description="Starts two vLLM engines, for prefill and decode, with two sidecars and the "
        "router between them, and a plain vLLM engine. Sends prompts to both and compares the "
        "tokens. Uses a GPU if vLLM finds one. Exit status: 0 if all tokens are equal, 1 if not, "
        "2 if this host lacks a requirement.",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="DIR|ID",
        help="a model's directory, or its name at Hugging Face (default: a tiny random model)",
    )
    parser.add_argument(
        "--prompts", type=int, default=3, metavar="N", help=f"1 to {MAX_PROMPTS} (default 3)"
    )
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    parser.add_argument(
        "--logs", type=pathlib.Path, metavar="DIR", help="keep the logs there (default: no logs)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=START_S,
        metavar="S",
        help=f"seconds until all engines must be up (default {START_S:g})",
    )
    args = parser.parse_args(argv)
    if not 1 <= args.prompts <= MAX_PROMPTS:
        parser.error(f"--prompts {args.prompts}: want 1 to {MAX_PROMPTS}")
    if args.timeout <= 0:
        parser.error(f"--timeout {args.timeout:g}: want more than 0 seconds")
    # Without this test vLLM asks Hugging Face for a model of that name.
    args.model = os.path.expanduser(args.model)
    if args.model.startswith((".", "/")) and not os.path.isdir(args.model):
        parser.error(f"--model {args.model}: no such directory")
    return args


def main(argv: Sequence[str]) -> int:
    args = options(argv)
    try:
        run = directory()
    except OSError as err:
        print(
            f"kvspray try: no directory for temporary files: {err}: set TMPDIR to one that you can "
            f"write, with at most {MAX_PARENT} bytes in its name",
            file=sys.stderr,
        )
        return REFUSED
    try:
        return apart(lambda: Trial(args, run).run())
    finally:
        shutil.rmtree(run, ignore_errors=True)


def directory() -> pathlib.Path:
    parent = tempfile.gettempdir()
    short = parent if len(os.fsencode(parent)) <= MAX_PARENT else "/tmp"
    return pathlib.Path(tempfile.mkdtemp(prefix="kvspray-try-", dir=short))


def apart(work: Callable[[], int]) -> int:
    """Runs work in a child with a session of its own, and returns its status. Whatever ends this
    process, even SIGKILL, the child gets SIGTERM. Whatever ends the child, this process kills all
    that the child had started."""
    parent, libc = os.getpid(), ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    endings = (*ENDING, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # until both processes have their handlers
    child = os.fork()
    if child == 0:
        status: Any = DIFFERENT
        try:
            os.setsid()
            end_on_signals()
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, endings)
            if os.getppid() == parent:
                status = work()
        except SystemExit as err:
            status = err.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for sig in endings:
        signal.signal(sig, lambda s, _: os.kill(child, signal.SIGTERM if s == signal.SIGHUP else s))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, endings)
    # The child keeps its number until no handler uses it.
    while (one := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and one.si_pid != child:
        os.waitpid(one.si_pid, 0)  # one whose own parent has ended
    for sig in endings:
        signal.signal(sig, signal.SIG_IGN)
    _, ended = os.waitpid(child, 0)
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children")
    while children.exists() and (left := children.read_text().split()):
        for orphan in left:
            os.kill(int(orphan), signal.SIGKILL)
        os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(ended)
    return code if code >= 0 else DIFFERENT


class Sidecar(Process):
    health = "/readyz"


class Trial:
    """run: a directory for everything that is there while it runs."""

    def __init__(self, args: argparse.Namespace, run: pathlib.Path) -> None:
        self.args, self.dir = args, run
        self.start = time.monotonic()
        self.logs: pathlib.Path = (args.logs or run / "logs").absolute()
        # Engines have another working directory.
        self.model = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
        self.processes: list[Process] = []

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f} s] {text}", flush=True)

    def run(self) -> int:
        try:
            try:
                same = self.steps()
                if self.args.keep:
                    self.hold()
                else:
                    self.next_lines()
                return SAME if same else DIFFERENT
            finally:
                # In a block of its own: a signal that comes just before it still meets the other.
                ignore_signals()
        except Refused as err:
            print(f"kvspray try: {err}", file=sys.stderr)
            return REFUSED
        except (Failed, OSError) as err:
            text = self.blame(err)
            print(f"kvspray try: {text}\n{self.remedy(text)}", file=sys.stderr)
            return DIFFERENT
        finally:
            self.stop()
            shutil.rmtree(self.dir, ignore_errors=True)

    def blame(self, err: Failed | OSError) -> str:
        """A process that has ended, with the end of its log; else the error itself."""
        started = [p for p in self.processes if p.proc is not None]
        try:
            for p in started:
                p.up()
        except Failed as found:
            return str(found)
        if not isinstance(err, urllib.error.HTTPError):
            return str(err)
        logs = "".join(f"\nthe end of {p.log}:\n{p.tail(8)}" for p in started)
        return f"{err.url}: {err} {err.read(600).decode(errors='replace')}{logs}"

    def remedy(self, text: str) -> str:
        found = [remedy for pattern, remedy in REMEDIES if re.search(pattern, text)]
        if "status -9" in text:
            found.append(limits.REMEDIES[errno.ENOMEM])
        logs = f"the logs are in {self.logs}" if self.args.logs else "--logs DIR keeps whole logs"
        more = f"{logs}; docs/troubleshooting.md explains errors"
        return "\n".join(f"remedy: {x}" for x in [*found[:1], more])

    def stop(self) -> None:
        if self.processes:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self.say("stopping everything")
        for p in self.processes:
            if p.proc is not None and p.proc.poll() is None:
                p.proc.terminate()
        for p in self.processes:
            p.stop(STOP_S)

    # ---- requirements

    def check(self) -> None:
        """What can be found without importing an engine."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.logs):
                pass
        except OSError as err:
            raise Refused(
                f"--logs {self.logs}: {err}: name a directory that you can write"
            ) from err
        if importlib.util.find_spec("vllm") is None:
            raise Refused(
                f"vLLM is not installed in this Python environment ({sys.prefix}): {INSTALL} vllm; "
                "without a GPU, 'make demo' in a checkout of kvspray makes a vLLM for CPUs"
            )
        if not importlib.metadata.entry_points(group="vllm.general_plugins", name="kvspray"):
            raise Refused(
                f"the plug-in for vLLM is not installed in this Python environment ({sys.prefix}): "
                f'{INSTALL} "kvspray[vllm]"'
            )
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "kvspray" not in plugins.split(","):
            raise Refused(f"VLLM_PLUGINS={plugins} leaves kvspray out: add kvspray to it")
        self.binary = os.environ.get("KVSPRAY_BINARY", str(BINARY))
        try:
            subprocess.run([self.binary, "version"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as err:
            raise Refused(
                f"the sidecar does not run: {err}{getattr(err, 'stderr', '')}: install a wheel of "
                "kvspray for this platform (docs/install.md), or set KVSPRAY_BINARY"
            ) from err
        for path, need in (("/dev/shm", SHM), (str(self.dir), ROOM)):
            try:
                free = shutil.disk_usage(path).free
            except OSError as err:
                raise Refused(f"{path}: {err}: {limits.REMEDIES[errno.ENOSPC]}") from err
            if free < need:
                raise Refused(
                    f"{path} has {free // MIB} MiB free, and {need // MIB} are needed: "
                    f"{limits.REMEDIES[errno.ENOSPC]}"
                )

    def prepare(self) -> dict[str, Any]:
        """What a process that imports vLLM finds; it also writes the tiny model."""
        out, model = self.dir / "facts.json", self.dir / "tiny"
        p = Process("import", self.logs)
        self.processes.append(p)
        code = "from kvspray.trial.command import probe; probe()"
        p.spawn([sys.executable, "-c", code, str(out), "" if self.model else str(model)],
            engines.QUIET)  # fmt: skip
        assert p.proc is not None
        self.say("importing vLLM and its plug-in")
        since = time.monotonic()
        while (status := p.proc.poll()) is None:
            if time.monotonic() - since > BEAT_S:
                since = time.monotonic()
                self.say(f"  not imported after {since - p.started:.0f} s")
            if time.monotonic() - p.started > self.args.timeout:
                raise Failed(f"vLLM was not imported within {self.args.timeout:g} s\n{p.tail()}")
            time.sleep(0.05)
        if status:
            end = p.tail()
            raise Refused(
                f"vLLM or the plug-in for it cannot be imported:\n{end}\n{self.remedy(end)}"
            )
        self.processes.remove(p)
        self.model = self.model or str(model)
        facts: dict[str, Any] = json.loads(out.read_text())
        return facts

    def judge(self, facts: dict[str, Any]) -> Host:
        """The engines' host, if they can run on it."""
        version, known = facts["vllm"], facts["known"]
        if facts["older"]:
            raise Refused(
                f"vLLM {version} is older than those that this kvspray supports "
                f"({', '.join(known)}): {INSTALL} 'vllm=={known[-1]}.*'"
            )
        if facts["newer"]:
            self.say(facts["newer"])
        if facts["device"] not in ("cpu", "cuda"):
            raise Refused(
                f"vLLM's device is {facts['device'] or 'none'}, which kvspray does not support: "
                "use a host with an NVIDIA GPU and its driver, or a build of vLLM for CPUs"
            )
        make = engines.cuda if facts["device"] == "cuda" else engines.cpu
        host = make(sys.executable, pathlib.Path())
        if not os.path.isdir(self.model):  # vLLM may have to download it
            online = {k: v for k, v in host.env.items() if not k.endswith("_OFFLINE")}
            host = dataclasses.replace(host, env=online)
        weights = sum(f.stat().st_size for f in pathlib.Path(self.model).glob("*.safetensors"))
        if facts["device"] == "cpu":
            weights *= 2  # of bfloat16 in float32
        need = 3 * (ENGINE_BYTES + self.cache() + weights)
        if text := limits.refusal(need if facts["device"] == "cpu" else 3 * ENGINE_BYTES):
            raise Refused(
                f"not enough memory for three engines: {text}: {limits.REMEDIES[errno.ENOMEM]}"
            )
        if facts["free"] is not None and facts["free"] < need:
            raise Refused(
                f"the GPU has {facts['free'] // MIB} MiB free, and three engines need "
                f"{need // MIB}: {REMEDIES[1][1]}"
            )
        return host

    def cache(self) -> int:
        return CACHE_BYTES["model" if self.args.model else ""]

    # ---- processes

    def steps(self) -> bool:
        """Whether all answers are equal."""
        if self.args.logs:
            self.say(f"logs: {self.logs}")
        self.check()
        facts = self.prepare()
        self.host = self.judge(facts)
        self.say(f"vLLM {facts['vllm']}, {facts['name']}")
        self.sidecars = [Sidecar(f"{side}-sidecar", self.logs) for side in ("prefill", "decode")]
        self.peers = [free_port() for _ in self.sidecars]
        self.servers = [Server(name, self.logs) for name in ("prefill", "decode", "plain")]
        self.router = Process("router", self.logs)
        self.processes = [self.router, *self.servers, *self.sidecars]
        for side, sidecar in enumerate(self.sidecars):
            sidecar.spawn([self.binary, *self.serve(side, str(self.dir / f"{side}.sock"))])
        for side, server in enumerate(self.servers):
            self.start_engine(side, server)
        self.say("two sidecars and three engines start: prefill, decode and a plain one")
        wait_up([*self.sidecars, *self.servers], self.say, self.args.timeout)
        self.router.spawn([self.binary, *self.route()])
        wait_up([self.router], self.say, self.args.timeout)
        for sidecar in self.sidecars:
            wait_for(f"sessions of an engine at {sidecar.name}",
                functools.partial(sessions, sidecar.metrics), self.args.timeout, 0.1)  # fmt: skip
        same = [self.compare(i) for i in range(self.args.prompts)]
        moved = payload(self.sidecars[1]) / 1024
        self.say(f"{sum(same)} of {len(same)} answers equal, {moved:.0f} KiB of KV cache moved")
        self.explain()
        return all(same)

    def start_engine(self, side: int, server: Server) -> None:
        args = ["--max-model-len", str(MAX_TOKENS), "--kv-cache-memory-bytes", str(self.cache()),
            "--no-enable-log-requests"]  # fmt: skip
        # A forked engine core has vLLM imported already.
        env = {"TMPDIR": str(self.dir), "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}
        if self.host.device == "cuda":
            # Of no effect on the cache, whose size is given; vLLM refuses to start with less free.
            args += ["--enforce-eager", "--gpu-memory-utilization", "0.02"]
            env = {"TMPDIR": str(self.dir), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        kv = connector(str(self.dir / f"{side}.sock")) if side < len(self.sidecars) else None
        server.start(self.host, self.model, kv, *args, env=env)

    def serve(self, side: int, socket: str) -> list[str]:
        address = f"127.0.0.1:{self.peers[side]}"
        return ["serve", "--socket", socket, "--listen", address,
            "--http", f"127.0.0.1:{self.sidecars[side].port}",
            "--set", "peer.gossip.listen=off"]  # fmt: skip

    def route(self) -> list[str]:
        out = ["proxy", "--listen", f"127.0.0.1:{self.router.port}"]
        for role, server, sidecar in zip(
            ("prefill", "decode"), self.servers, self.sidecars, strict=False
        ):
            peer = f",peer=127.0.0.1:{self.peers[0]}" if role == "prefill" else ""
            out += ["--engine", f"url={server.url},role={role},sidecar={sidecar.url}{peer}"]
        return out

    # ---- requests

    def compare(self, i: int) -> bool:
        """Sends a prompt to the router and to the plain engine."""
        pick = random.Random(i)
        text = f"Prompt {i}:" + "".join(" " + pick.choice(TALK) for _ in range(WORDS[i % 3]))
        decode = self.sidecars[1]
        before = payload(decode)
        pair, plain = (
            ask(url, text, max_tokens=ANSWER, rid=f"try-{i + 1}")[1]
            for url in (self.router.url, self.servers[2].url)
        )
        got, want = (x["choices"][0]["token_ids"] for x in (pair, plain))
        try:
            wait_for("bytes moved", lambda: payload(decode) > before, SHOWN_S, 0.05)
        except Failed:
            self.say(f"  prompt {i + 1}: no KV cache was moved")
            return False
        equal = sum(a == b for a, b in zip(got, want, strict=False))
        self.say(
            f"  prompt {i + 1}: {plain['usage']['prompt_tokens']} tokens, "
            f"{(payload(decode) - before) / 1024:.0f} KiB moved, {equal} of {len(want)} tokens of "
            f"the answer equal"
        )
        if got != want:
            self.say(f"    tokens of the pair  {got}\n{'':10}    of the plain engine {want}")
        return bool(got == want)

    def why(self) -> list[str]:
        return ["why", "try-1", "--router", self.router.url]

    def explain(self) -> None:
        print(f"\n$ kvspray {shlex.join(self.why())}", flush=True)
        done = subprocess.run([self.binary, *self.why()], capture_output=True, text=True)
        print(done.stdout + done.stderr, flush=True)

    # ---- what the user does next

    def hold(self) -> None:
        print("Everything runs until Ctrl-C:\n")
        for p in (self.router, *self.servers, *self.sidecars):
            print(f"  {p.name:16} {p.url}")
        body = json.dumps({"model": engines.MODEL_NAME, "prompt": "Hello", "max_tokens": 16})
        try:
            print(f"\n  curl -s {self.router.url}/v1/completions -d '{body}'\n", flush=True)
            while all(p.up() for p in self.processes if p.proc):
                time.sleep(BEAT_S)
        except SystemExit:
            pass

    def next_lines(self) -> None:
        """The same by hand, with ports that were free a moment ago."""
        model = shlex.quote(self.args.model or "MODEL")
        print("The same by hand, each line in a terminal of its own"
            + (":" if self.args.model else "; MODEL is a name or a directory:"))  # fmt: skip
        sockets = [f"/tmp/kvspray-{os.getuid()}-{side}/kvspray.sock" for side in "pd"]
        for side, socket in enumerate(sockets):
            print(f"\n  kvspray {shlex.join(self.serve(side, socket))}")
        env = ""
        if self.host.device == "cpu":
            env = ("VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 ")  # fmt: skip
        share = "0.1" if self.host.device == "cpu" else "0.4"
        for server, socket in zip(self.servers, sockets, strict=False):
            kv = shlex.quote(json.dumps(connector(socket)))
            print(f"\n  {env}vllm serve {model} --host 127.0.0.1 --port {server.port} "
                f"--gpu-memory-utilization {share} --kv-transfer-config {kv}")  # fmt: skip
        print(f"\n  kvspray {shlex.join(self.route())}\n", flush=True)


def connector(socket: str) -> dict[str, Any]:
    """vLLM's --kv-transfer-config."""
    return {
        "kv_connector": "KVSprayConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket},
    }


def payload(sidecar: Process) -> float:
    """Bytes of cache that a sidecar has received."""
    m = sidecar.metrics(METRICS_S)
    return total(m, "kvspray_transfer_payload_bytes_total", side="destination")


def probe() -> None:
    """In a process of its own. Arguments: a file for the facts, a directory for the tiny model or
    an empty word."""
    import vllm
    from vllm.platforms import current_platform

    versions = importlib.import_module("kvspray_vllm.versions")
    importlib.import_module("kvspray_vllm.connector")
    out, model = sys.argv[1:3]
    facts = {
        "vllm": vllm.__version__,
        "known": versions.KNOWN,
        "older": versions.older_than_known(vllm.__version__),
        "newer": versions.newer_than_known(),
        "device": current_platform.device_type,
        "name": "on the processor of this host",
        "free": None,
    }
    if facts["device"] == "cuda":
        import torch

        facts |= {"name": torch.cuda.get_device_name(0), "free": torch.cuda.mem_get_info(0)[0]}
    if model:
        from kvspray.trial import tiny_model

        tiny_model.main(pathlib.Path(model))
    pathlib.Path(out).write_text(json.dumps(facts))
