"""A prefill and a decode engine on one host, with sidecars and router, or with another
connector; a plain engine beside them."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import secrets
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from unpacked import HERE, UNPACKED

# isort: split
import hosts
import multi
import servers
from cluster import Failed, Sidecar, free_port, merge, total, wait_for
from servers import (
    Answer,
    Process,
    Proxy,
    Server,
    complete,
    cpu_seconds,
    kvspray_config,
)

ROOT = HERE.parents[2]
GRAPHS = ("default", "eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
MODES = ("concurrent", "prefill-first")
TRANSPORTS = ("shm", "tcp")
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
STARTED = pathlib.Path(tempfile.gettempdir()) / f"kvspray-rig-{os.getuid()}.{os.getpid()}.pids"
TIE = 0.15  # of two logarithms of probabilities: nearer ones may change places in bfloat16
NIXL = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
CONTROLS = 8  # times that the plain engine is asked again, at once, for its own spread
MIB = 1 << 20
BIG_TOKEN = 100_000  # bytes of the cache that a token of an 8B model takes: two prompts, not four


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model",
        default="",
        help="a folder of the host's models; default: llama-1b, on a CPU tiny-llama",
    )
    parser.add_argument(
        "--graph", choices=GRAPHS, default="default", help="CUDA graphs of all engines"
    )
    parser.add_argument(
        "--capture",
        type=lambda text: [int(size) for size in text.split(",")],
        default=CAPTURE,
        help="sizes of the CUDA graphs, unless the engines have their default ones",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="without torch.compile, which FULL and eager modes can do without",
    )
    parser.add_argument(
        "--runner", choices=("default", "v1", "v2"), default="default", help="vLLM's model runner"
    )
    parser.add_argument(
        "--attention",
        default="",
        help="attention backend: FLASH_ATTN, TRITON_ATTN, TRITON_MLA, FLASH_ATTN_MLA ...",
    )
    parser.add_argument("--kv-dtype", default="", help="--kv-cache-dtype, fp8 for instance")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    parser.add_argument(
        "--max-len", type=int, default=0, help="tokens; default 33,000, on a CPU 4,608"
    )
    parser.add_argument(
        "--step-tokens", type=int, default=0, help="of a prefill step; default 2,048, on a CPU 256"
    )
    parser.add_argument(
        "--cache-mb",
        type=int,
        default=0,
        help="of each engine; default: four prompts of the greatest length, two of an 8B model",
    )
    parser.add_argument("--seqs", type=int, default=32, help="--max-num-seqs")
    parser.add_argument(
        "--gpus",
        default="",
        help="GPUs of the prefill engine and of the decode engine, such as 0,1; each has as many "
        "tensor-parallel ranks as it has GPUs (0+1,0); more decode engines follow (0+1,2,3), which "
        "take turns in part pages; default: both on the first one",
    )
    parser.add_argument("--engine-args", default="", help="more arguments of all engines")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of both sidecars' configuration",
    )
    parser.add_argument(
        "--time-hooks",
        action="store_true",
        help="of part ttft: with seconds per call of the connector in the report",
    )
    parser.add_argument(
        "--multi",
        action="store_true",
        help="P and D with vLLM's MultiConnector: kvspray and, beside it, OffloadingConnector",
    )
    parser.add_argument("--tag", default="", help="goes into the names of what is written")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(os.environ.get("OUT", ROOT / ".build/gpu/out")),
    )


class Rig:
    """What the options come to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        gpu = args.device == "cuda"
        self.host = (hosts.cuda(UNPACKED) if gpu else hosts.cpu(ROOT / ".build")).with_modules(
            HERE / "inside"
        )
        self.model = args.model or ("llama-1b" if gpu else "tiny-llama")
        self.max_len = args.max_len or (33000 if gpu else 4608)
        self.step_tokens = args.step_tokens or (2048 if gpu else 256)
        args.out.mkdir(parents=True, exist_ok=True)
        # Unix sockets have short names; a checkout may have a long one.
        self.run = pathlib.Path(tempfile.mkdtemp(prefix="kvs-rig-"))
        self.logs = self.run / "logs"
        self.logs.mkdir()
        self.pages = self.run / "pages"
        self.so_far: dict[str, Any] = {}  # report of a part that a signal ends before it is done

    def token_bytes(self) -> int:
        """Of the cache, over all layers; of an unknown shape more than it takes."""
        config = json.loads((self.host.models / self.model / "config.json").read_text())
        if config.get("kv_lora_rank"):
            width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            width = 2 * config["num_key_value_heads"] * config.get("head_dim", 128)
        return int(config["num_hidden_layers"] * width * (4 if self.host.dtype == "float32" else 2))

    def cache_bytes(self) -> int:
        prompts = 4 if self.token_bytes() < BIG_TOKEN else 2
        return (self.args.cache_mb or prompts * self.max_len * self.token_bytes() // MIB + 16) * MIB

    def graph_args(self) -> list[str]:
        a = self.args
        if self.host.device == "cpu":
            return []  # the host's arguments have it
        if a.graph == "eager":
            return ["--enforce-eager"]
        config: dict[str, Any] = {}
        if a.graph != "default":
            config |= {"cudagraph_mode": a.graph, "cudagraph_capture_sizes": a.capture}
        if a.no_compile:
            config["mode"] = 0
        return ["--compilation-config", json.dumps(config)] if config else []

    def engine_args(self, name: str) -> list[str]:
        a = self.args
        ranks = len(self.gpus(name))
        out = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
        out += [
            "--max-model-len",
            str(self.max_len),
            "--max-num-batched-tokens",
            str(self.step_tokens),
            "--max-num-seqs",
            str(a.seqs),
        ]
        out += ["--kv-cache-memory-bytes", str(self.cache_bytes()), *self.graph_args()]
        if self.host.device == "cuda":
            out += [
                "--gpu-memory-utilization",
                "0.05",
            ]  # of no effect but a check at the start: the cache's size is given
        if a.attention:
            out += ["--attention-backend", a.attention]
        if a.kv_dtype:
            out += ["--kv-cache-dtype", a.kv_dtype]
        if not list((self.host.models / self.model).glob("*.safetensors")):
            out += ["--load-format", "dummy"]
        return out + shlex.split(a.engine_args)

    def names(self) -> list[str]:
        """Of the engines of a pair: P, D, and D2, D3 ... where --gpus has more decode engines."""
        return ["P", "D", *(f"D{i}" for i in range(2, len(self.args.gpus.split(","))))]

    def gpus(self, name: str) -> list[str]:
        """The GPUs of an engine of names(), or of the plain one, which is on the last one's, as the
        driver counts them; empty: as the host has it."""
        sides, names = self.args.gpus.split(","), self.names()
        at = names.index(name) if name in names and len(sides) > 1 else -1
        # This command may have been given some of the host's GPUs (together.py).
        visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
        return [visible[int(g)] if visible else g for g in sides[at].split("+") if g]

    def engine_env(self, name: str) -> dict[str, str]:
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(g)} if (g := self.gpus(name)) else {}
        runner = {
            "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        }.get(self.args.runner, {})
        return {"KVSPRAY_RIG_PAGES": str(self.pages / name), **visible, **runner}

    def sidecar_config(self, sets: Sequence[str] = ()) -> dict[str, Any]:
        """sets: KEY=VALUE, more of them than the command's."""
        tcp: dict[str, Any] = (
            {"connections": 8, "integrity": "off"} if self.host.device == "cuda" else {}
        )
        config: dict[str, Any] = {
            "transports": {"order": [self.args.transport], "tcp": tcp},
            "log": {"level": "info"},
            "trace": {"block_hashes": ""},  # at 1 GB/s they would be what is measured
        }
        for item in [*self.args.set, *sets]:
            key, _, value = item.partition("=")
            at = config
            *path, last = key.split(".")
            for part in path:
                at = at.setdefault(part, {})
            try:
                at[last] = json.loads(value)
            except ValueError:  # a word, a duration
                at[last] = value
        return config

    def report(self) -> dict[str, Any]:
        a = self.args
        return {
            "device": a.device,
            "model": self.model,
            "graph": a.graph,
            "compile": not a.no_compile,
            "runner": a.runner,
            "attention": a.attention or "default",
            "kv_dtype": a.kv_dtype or "auto",
            "transport": a.transport,
            "gpus": a.gpus or "one",
            "step_tokens": self.step_tokens,
            "cache_mb": a.cache_mb,
            "multi": a.multi,
            "gpu": gpu_name(),
            "sets": a.set,
        }

    def finish(self, part: str, report: dict[str, Any]) -> None:
        path = self.args.out / f"{part}{'-' + self.args.tag if self.args.tag else ''}.json"
        path.write_text(json.dumps({"what": part, **self.report(), **report}, indent=1) + "\n")
        say(f"written to {path}")

    def close(self, keep_logs: bool) -> None:
        if keep_logs:
            target = self.args.out / f"logs{'-' + self.args.tag if self.args.tag else ''}.tar.gz"
            shutil.make_archive(str(target).removesuffix(".tar.gz"), "gztar", self.logs)
            say(f"logs: {target}")
        shutil.rmtree(self.run, ignore_errors=True)


class Pair:
    """P and D, and more decode engines where the command names GPUs for them. kind: "kvspray", the
    connector as users have it; "pages", the same with a look at its pages; or one of NIXL."""

    def __init__(self, rig: Rig, kind: str = "kvspray") -> None:
        self.rig, self.kind = rig, kind
        self.names = rig.names()[: 2 if kind in NIXL else None]
        self.servers = [Server(f"{kind}-{self.side(i)}", rig.logs) for i in range(len(self.names))]
        self.p, self.d = self.servers[:2]
        self.sidecars: list[Sidecar] = []
        self.proxies: dict[str, Proxy] = {}

    def side(self, i: int) -> str:
        return ("prefill", "decode")[i] if i < 2 else f"decode{i}"

    def engines(self) -> list[Server]:
        return list(self.servers)

    def decoder(self, turn: int) -> int:
        """The engine whose turn it is, of those that decode."""
        return 1 + turn % (len(self.servers) - 1)

    def proxy(self, mode: str, decoder: int) -> Proxy:
        return self.proxies[mode if decoder == 1 else f"{mode}-{decoder}"]

    def start(self, sidecars_only: bool = False) -> None:
        if self.kind not in NIXL:
            self.sidecars = [self.make_sidecar(side) for side in range(len(self.servers))]
            for s in self.sidecars:
                s.log = self.rig.logs / f"{s.name}.log"
                s.config["trace"] = {"transfers": str(s.transfers)}
                s.start()
        for side in () if sidecars_only else range(len(self.servers)):
            self.start_engine(side)

    def make_sidecar(self, side: int) -> Sidecar:
        name = f"{self.kind}-{self.side(side)}-sidecar"
        return Sidecar(name, self.rig.run, self.rig.sidecar_config())

    def start_engine(
        self,
        side: int,
        wrap: Sequence[str] = (),
        env: dict[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        server = self.engines()[side]
        env = {**self.rig.engine_env(self.names[side]), **(env or {})}
        role = "kv_consumer" if side else "kv_producer"
        if self.kind in NIXL:
            kv = {
                "kv_connector": NIXL[self.kind],
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
            }
            env |= {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            }
        else:
            connector = ("kvspray_vllm", "KVSprayConnector")
            if self.kind == "pages":
                connector = ("kvspray_rig", "PagesConnector")
            elif self.rig.args.time_hooks:
                connector = ("kvspray_timed", "TimedConnector")
            kv = kvspray_config(self.sidecars[side].socket, role, self.rig.host.memory, connector)
            if self.rig.args.multi:
                kv, env = multi.beside_offloading(kv, self.rig.host.device), env | multi.ENV
        server.start(
            self.rig.host,
            self.rig.model,
            kv,
            *self.rig.engine_args(self.names[side]),
            *more,
            env=env,
            wrap=wrap,
        )

    def route(self) -> None:
        """Starts the router, once per mode and decode engine."""
        for mode in MODES:
            for i, server in enumerate(self.servers[1:], 1):
                name = mode if i == 1 else f"{mode}-{i}"
                self.proxies[name] = Proxy(f"proxy-{name}", self.rig.logs).start(
                    mode, self.p.url, self.sidecars[0].endpoint, server.url
                )
        for proxy in self.proxies.values():
            wait_for(f"{proxy.name} up", proxy.up, 15)

    def wait_sessions(self) -> None:
        for s in self.sidecars:
            wait_for(
                f"engine sessions at {s.name}",
                lambda s=s: servers.sessions(s.metrics),
                60,
                tick=0.1,
            )

    def configure(self, sets: Sequence[str]) -> None:
        """Sidecars with another configuration, for the engines that there are."""
        for s in self.sidecars:
            s.stop()
            s.config = merge(s.config, self.rig.sidecar_config(sets))
            s.start()
        self.wait_sessions()

    def idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(total(s.metrics(), name) for s in self.engines() for name in names)

    def traces(self) -> list[dict[str, Any]]:
        """Of the transfers that P's sidecar sent."""
        return [
            t
            for t in self.sidecars[0].lines(self.sidecars[0].transfers)
            if t.get("side") == "source"
        ]

    def hooks(self, side: str) -> dict[str, dict[str, float]]:
        """With --time-hooks: calls and seconds of each of the connector's methods, of P or D."""
        out: dict[str, dict[str, float]] = {}
        for path in (self.rig.pages / side).glob("hooks-*.json"):
            for name, (calls, seconds, slowest) in json.loads(path.read_text()).items():
                if calls:
                    row = {
                        "calls": calls,
                        "us_each": 1e6 * seconds / calls,
                        "slowest_us": 1e6 * slowest,
                    }
                    out[f"{path.stem.removeprefix('hooks-')} {name}"] = row
        return out

    def cpu_seconds(self) -> dict[str, float]:
        """Of the processors, that each process has used so far."""
        pids = {s.name: s.pids() for s in [*self.engines(), *self.sidecars]}
        return {name: cpu_seconds(p) for name, p in pids.items()}

    def leases(self) -> int:
        return int(sum(total(s.metrics(), "kvspray_lease_open") for s in self.sidecars))

    def stop(self) -> None:
        for proxy in self.proxies.values():
            proxy.stop()
        for server in self.engines():
            server.stop()
        for s in self.sidecars:
            s.stop()


def start_plain(rig: Rig, more: Sequence[str] = ()) -> Server:
    """An engine without transfers, whose pages can be looked at."""
    kv = {
        "kv_connector_module_path": "kvspray_rig",
        "kv_connector": "PlainConnector",
        "kv_role": "kv_both",
    }
    plain = Server("plain", rig.logs)
    plain.start(
        rig.host, rig.model, kv, *rig.engine_args("plain"), *more, env=rig.engine_env("plain")
    )
    return plain


def wait_up(processes: Sequence[Process], timeout: float = servers.START_S) -> None:
    """Until all of them serve. Should this command be killed, the next one ends them (reap)."""
    with STARTED.open("a") as f:
        f.writelines(f"{p.proc.pid}\n" for p in processes if p.proc is not None)
    servers.wait_up(processes, say, timeout)


def reap() -> None:
    """Ends engines that an earlier measurement left behind, because it was killed itself: they have
    the GPU's memory. A measurement that still runs keeps its own."""
    for left in STARTED.parent.glob(f"kvspray-rig-{os.getuid()}.*.pids"):
        if b"measure.py" not in command(int(left.name.split(".")[1])):
            for pid in pids_in(left):
                if b"vllm" in command(pid):
                    say(f"ending process group {pid}, which an earlier measurement left behind")
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            left.unlink(missing_ok=True)


def pids_in(file: pathlib.Path) -> list[int]:
    """None of a file that another command has removed meanwhile."""
    try:
        return [int(pid) for pid in file.read_text().split()]
    except FileNotFoundError:
        return []


def end_started() -> None:
    """Ends every engine of this measurement at once."""
    for pid in pids_in(STARTED):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def command(pid: int) -> bytes:
    """A process's command line; nothing of one that has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def as_source(xfer: str = "") -> dict[str, Any]:
    """kv_transfer_params of a request to P."""
    out: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    return out | ({"kvspray": {"v": 1, "xfer": xfer}} if xfer else {})


def as_destination(xfer: str, peer: str) -> dict[str, Any]:
    """kv_transfer_params of a request to D, while P computes."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "kvspray": {"v": 1, "xfer": xfer, "peer": peer},
    }


def new_xfer() -> str:
    return secrets.token_hex(16)


def difference(plain: Server, ids: list[int], want: list[int], got: list[int]) -> dict[str, Any]:
    """Where two answers part, and how near the two tokens were to each other: near ones change
    places where sums are rounded otherwise. The control is the plain engine beside itself: it is
    asked for that token again, several times at once, so that it batches otherwise. It is a tie
    where the two are as near as the plain engine's own answers lie apart, or where it chooses the
    other token by itself."""
    at = next(
        (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
        min(len(want), len(got)),
    )
    out: dict[str, Any] = {
        "prompt": len(ids),
        "at": at,
        "plain": want[at : at + 1],
        "pair": got[at : at + 1],
        "tie": False,
    }
    if at >= min(len(want), len(got)):
        return out

    def ask(_: int = 0) -> tuple[list[int], dict[str, float]]:
        answer = complete(
            plain.port, ids + want[:at], max_tokens=1, logprobs=20, return_tokens_as_token_ids=True
        )
        return answer.tokens[0], answer.logprobs[0] if answer.logprobs else {}

    _, near = ask()
    with concurrent.futures.ThreadPoolExecutor(CONTROLS) as pool:
        controls = list(pool.map(ask, range(CONTROLS)))
    names = [f"token_id:{want[at]}", f"token_id:{got[at]}"]
    a, b = (near.get(n) for n in names)
    apart = spread([near, *(c for _, c in controls)], names)
    chosen = sum(tokens == got[at : at + 1] for tokens, _ in controls)
    out |= {
        "logprob_plain": a,
        "logprob_pair": b,
        "plain_spread": apart,
        "plain_chose_it": chosen,
        "tie": chosen > 0 or a is not None and b is not None and abs(a - b) <= max(TIE, apart),
    }
    return out


def spread(answers: Sequence[dict[str, float]], names: Sequence[str]) -> float:
    """How far the difference of two tokens' logarithms varies between answers to one question."""
    gaps = [x[names[0]] - x[names[1]] for x in answers if all(n in x for n in names)]
    return max(gaps) - min(gaps) if gaps else 0.0


def compare_answers(
    plain: Server, ids: list[int], want: Answer, got: Answer, p: Server | None = None
) -> tuple[bool, dict[str, Any] | None]:
    """(equal or explained, what differs). Two engines that compute a prompt round it otherwise. So
    an answer that differs at no tie is explained where P, which decodes from the pages that D was
    sent, answers the same by itself."""
    if want.error or got.error:
        return False, {"prompt": len(ids), "error": got.error or f"plain: {want.error}"}
    if want.tokens == got.tokens:
        return True, None
    d = difference(plain, ids, want.tokens[0], got.tokens[0])
    if not d["tie"] and p is not None:
        own = complete(p.port, ids, max_tokens=len(got.tokens[0]))
        d["as_p"] = own.tokens == got.tokens
    return bool(d["tie"] or d.get("as_p")), d


Pages = dict[str, Any]  # a group's range of blocks, or a layer's digests [block, head, sum]


def pages_of(paths: Sequence[pathlib.Path]) -> Pages:
    """What the ranks of an engine wrote, their heads side by side."""
    import numpy as np

    ranks = []
    for path in paths:
        with np.load(path) as one:
            ranks.append({key: one[key] for key in one.files})
    return {
        key: np.concatenate([r[key] for r in ranks], axis=1) if "/" in key else first
        for key, first in ranks[0].items()
    }


class Compared:
    """The pages of one request on two engines."""

    def __init__(self, one: Pages, two: Pages, cpu: bool) -> None:
        import numpy as np

        self.pages = self.differ = 0
        self.first: str = ""
        for key in (k for k in one if "/" in k):
            group = f"group{key.partition('/')[0]}"
            first, count, tokens, state = one[group]
            x, y = one[key], two[key]
            # Ranks without a head of their own have a copy of their neighbour's.
            heads = max(x.shape[1], y.shape[1])
            x, y = (np.repeat(sums, heads // sums.shape[1], axis=1) for sums in (x, y))
            # A CPU packs a page in tiles, so that part of one has no bytes of its own.
            if cpu and not state:
                count = max(first, count - 1)
            wrong = (x[first:count] != y[first:count]).any((1, 2))
            self.pages += int(count - first)
            self.differ += int(wrong.sum())
            if wrong.any() and not self.first:
                self.first = (
                    f"{key}, block {int(first + wrong.argmax())} of {count}, {tokens} tokens"
                )


def look_at(
    rig: Rig, rid: str, a: tuple[str, str], b: tuple[str, str], timeout: float = 10.0
) -> Compared | str:
    """Compares what two engines wrote of a request: (engine, "computed" or "loaded"). A text where
    one of them has not."""
    paths = [
        [
            rig.pages / engine / f"cmpl-{rid}-0.{what}.{rank}.npz"
            for rank in range(len(rig.gpus(engine)) or 1)
        ]
        for engine, what in (a, b)
    ]
    every = [p for ranks in paths for p in ranks]
    try:
        wait_for("pages", lambda: all(p.exists() for p in every), timeout)
    except Failed:
        missing = (f"{p.parent.name}/{p.name}" for p in every if not p.exists())
        return f"{rid}: no {', '.join(missing)}"
    return Compared(*(pages_of(ranks) for ranks in paths), cpu=rig.host.device == "cpu")


def summary(values: Sequence[float]) -> dict[str, float]:
    s = sorted(values)

    def at(q: float) -> float:
        return s[min(len(s) - 1, int(q * len(s)))]

    return (
        {
            "n": len(s),
            "median": statistics.median(s),
            "p10": at(0.1),
            "p90": at(0.9),
            "p99": at(0.99),
        }
        if s
        else {"n": 0}
    )


def gpu_name() -> str:
    return query("name,driver_version,memory.total")


def gpu_used_mib() -> int:
    text = query("memory.used", "csv,noheader,nounits")
    return int(text.split()[0]) if text[:1].isdigit() else 0


def query(what: str, how: str = "csv,noheader") -> str:
    """Of the GPUs that this process may use; nvidia-smi shows all of the host's."""
    only = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        out = subprocess.run(
            [
                "nvidia-smi",
                f"--query-gpu={what}",
                f"--format={how}",
                *(["-i", only] if only else []),
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except OSError:
        return "none"
    return out.stdout.strip()
