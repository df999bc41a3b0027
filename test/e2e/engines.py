"""Real vLLM engines as forked children of one process that has imported vLLM once.

Each child runs one engine in its own process, without vLLM's extra processes, and steps it as long
as it has work: requests can be added, and aborted, while others run. Importing takes a quarter of a
minute, an engine after that a few seconds.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import logging
import multiprocessing as mp
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

import cluster as rig
import numpy as np

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 4608,
    "block_size": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 48 << 20,
    # In bfloat16 sums depend on how prompts are cut and batched, on some processors more than on
    # others, and now and then a near tie between two tokens turns, which must not look like a wrong
    # byte.
    "dtype": "float32",
    "disable_log_stats": False,
    "seed": 1,
}


Adapter = tuple[str, int, str]  # a LoRA adapter's name, its id in the engine, and its directory


def preload(env: dict[str, str] | None = None) -> None:
    """Imports what engines need. Before this, no thread may have been started that a fork would
    lose. env: of CUDA engines, which have nothing of a CPU's."""
    os.environ.update(ENV if env is None else env)
    import torch
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.multiproc_executor
    from vllm import LLM  # noqa: F401

    import kvspray_vllm.connector  # noqa: F401

    if env is not None:
        return
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # As on a CPU without AMX, so that one that has it is asked for the same kernels and blocks.
    torch.cpu._is_amx_tile_supported = lambda: False
    # Where the processor has AMX, torch sends fp8 products to oneDNN, which ENV keeps from using
    # it.
    scaled_mm = torch._scaled_mm

    def without_onednn(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return scaled_mm(*args, **kwargs)

    torch._scaled_mm = without_onednn


@dataclasses.dataclass
class Out:
    """What became of one request."""

    tokens: list[list[int]]  # per sample
    finish: list[str | None]
    kv: dict[str, Any] | None
    first_s: float | None  # from add to the first token
    total_s: float
    # Of the first token, where they were asked for.
    logprobs: dict[int, float] = dataclasses.field(default_factory=dict)


class Pending:
    def __init__(self, engine: Engine, key: int, rid: str) -> None:
        self.engine, self.key, self.rid = engine, key, rid

    def result(self, timeout: float = 120.0) -> Out:
        return self.engine._await(self.key, timeout)

    def abort(self) -> None:
        self.engine._call("abort", self.rid)


class EngineDied(Exception):
    pass


class Engine:
    """The handle of a child."""

    _keys = itertools.count(1)

    def __init__(
        self,
        name: str,
        model: str,
        log: pathlib.Path,
        kv: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **args: Any,
    ) -> None:
        self.name = name
        self.log = log
        ctx = mp.get_context("fork")
        self._conn, theirs = ctx.Pipe()
        ranks = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
        # A daemon may have no children of its own; workers end with the engine that they watch.
        self._proc = ctx.Process(
            target=_child,
            args=(name, model, {**ENGINE_ARGS, **args}, kv, env or {}, theirs, self._conn, log),
            daemon=ranks == 1,
        )
        self._proc.start()
        theirs.close()
        self._done: dict[int, Any] = {}

    @property
    def pid(self) -> int:
        assert self._proc.pid is not None
        return self._proc.pid

    def wait_up(self, timeout: float = 300.0) -> Engine:
        self._await(0, timeout)
        return self

    def add(
        self, prompt: list[int], n_tokens: int = 8, kv: dict[str, Any] | None = None, n: int = 1,
        rid: str | None = None, logprobs: int | None = None, lora: Adapter | None = None,
        first: int | None = None,
        image: np.ndarray | None = None,
    ) -> Pending:  # fmt: skip
        """first: the token that the answer must begin with (FirstToken of test/gpu/engines)."""
        key = next(Engine._keys)
        rid = rid or f"cmpl-t{key}-0"
        self._send(("add", key, rid, prompt, n_tokens, kv, n, logprobs, lora, first, image))
        return Pending(self, key, rid)

    def run(self, prompt: list[int], n_tokens: int = 8, **kw: Any) -> Out:
        return self.add(prompt, n_tokens, **kw).result()

    def reject(self, kv: dict[str, Any]) -> None:
        """As vLLM's server does with a request that it refuses itself: the engine core gets its
        kv_transfer_params alone."""
        self._call("reject", kv)

    def metrics(self) -> dict[str, float]:
        return self._call("metrics")

    def preempt_all(self) -> bool:
        """Takes every running request's blocks away, as a full pool would."""
        return self._call("preempt")

    def clear_prefix_cache(self) -> bool:
        return self._call("clear")

    def idle(self) -> bool:
        """No request, no block held."""
        return self._call("idle")

    def free_blocks(self) -> int:
        return self._call("free_blocks")

    def steps(self) -> int:
        """Steps so far that computed anything."""
        return self._call("steps")

    def computed(self, rid: str) -> int:
        """How many tokens of a request's prompt this engine has computed itself, as its scheduler
        had it."""
        return self._call("computed", rid)

    def pause_at(self, steps: int | None) -> None:
        """Begins no step once that many have computed something; None: goes on. So a test does what
        it has to between two of them, however long that takes on a busy machine."""
        self._call("pause_at", steps)

    def reload_weights(self, path: pathlib.Path) -> None:
        """As a rollout of other weights does it: vLLM's own call, and then its caches are reset."""
        self._call("reload_weights", str(path))

    def rpc(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a method of the workers, or a function with each of them, as /collective_rpc of a
        server does it."""
        return self._call("rpc", method, *args)

    def sleep(self, level: int) -> None:
        self._call("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return self._call("wake_up", tags)

    def set_weights(self, name: str) -> list[str]:
        """Names the weights on every rank. Returns what they reported before."""
        return self._call("set_weights", name)

    def status(self) -> dict[str, Any]:
        return self._call("status")

    def slow_layers(self, seconds: float, sidecar: str) -> None:
        """Each layer takes that much longer from now on, as those of a larger model do. After the
        last one of each step this engine asks a sidecar, by its HTTP address, how much has landed
        there. 0: as before."""
        self._call("slow_layers", seconds, sidecar)

    def landed_by_step(self) -> list[int]:
        """What that sidecar reported, step by step since slow_layers."""
        return self._call("landed_by_step")

    def watch_transfers(self) -> None:
        """Notes from now on when each transfer ends for this engine, as transfer_ends returns."""
        self._call("watch_transfers")

    def transfer_ends(self) -> dict[str, dict[str, float]]:
        """By transfer id, times of this host's clock: "over", the connector learned that its
        request ends or takes nothing; "released", the worker reported that its blocks have no
        reader."""
        return self._call("transfer_ends")

    def kill(self) -> None:
        if self._proc.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._proc.join(10)

    def stop(self) -> None:
        if self._proc.is_alive():
            try:
                self._send(("exit",))
            except (OSError, EngineDied):
                pass
            self._proc.join(10)
        self.kill()

    def alive(self) -> bool:
        return self._proc.is_alive()

    # ---- the pipe

    def _send(self, what: tuple[Any, ...]) -> None:
        try:
            self._conn.send(what)
        except OSError as err:
            raise EngineDied(f"engine {self.name} is gone: {err}\n{self.tail()}") from err

    def _call(self, what: str, *args: Any, timeout: float = 120.0) -> Any:
        key = next(Engine._keys)
        self._send((what, key, *args))
        return self._await(key, timeout)

    def _await(self, key: int, timeout: float) -> Any:
        end = time.monotonic() + timeout
        while key not in self._done:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"engine {self.name}: no answer within {timeout:g} s\n{self.tail()}"
                )
            try:
                if self._conn.poll(min(left, 1.0)):
                    got, value = self._conn.recv()
                    self._done[got] = value
            except (EOFError, OSError) as err:
                raise EngineDied(f"engine {self.name} died\n{self.tail()}") from err
        value = self._done.pop(key)
        if isinstance(value, BaseException):
            raise value
        return value

    def tail(self, n: int = 30) -> str:
        return rig.tail(self.log, n)


# ---- in the child


def _child(
    name: str,
    model: str,
    args: dict[str, Any],
    kv: dict[str, Any] | None,
    env: dict[str, str],
    conn: multiprocessing.connection.Connection,
    parents: multiprocessing.connection.Connection,
    log: pathlib.Path,
) -> None:
    parents.close()
    os.environ.update(env)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = sys.stderr = os.fdopen(fd, "w", buffering=1)
    for handler in logging.getLogger("vllm").handlers:  # they hold the parent's stream
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stdout)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if kv is not None:
            args = {**args, "kv_transfer_config": KVTransferConfig(**kv)}
        if "distributed_executor_backend" in args:
            _fork_workers()
        llm = LLM(model, **args)
        if args.get("pipeline_parallel_size", 1) > 1:
            # What a stage receives vLLM puts into buffers that a first run makes, which a CPU
            # engine without compilation leaves out.
            llm.collective_rpc("execute_dummy_batch")
        conn.send((0, True))
        _Loop(llm, conn).run()
    except EOFError:
        pass
    except BaseException as err:
        traceback.print_exc()
        sys.stderr.flush()
        try:
            conn.send((0, RuntimeError(f"engine {name}: {type(err).__name__}: {err}")))
        except OSError:
            pass
        os._exit(1)
    os._exit(0)


def _worker_connected(_worker: Any) -> bool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return bool(get_kv_transfer_group()._worker_client.connected)


class _SlowLayers:
    """Hooks around a model's layers, in the middle of the forward pass."""

    def __init__(self, seconds: float, sidecar: str) -> None:
        self.seconds, self.sidecar = seconds, sidecar
        self.landed: list[int] = []
        self._hooks: list[Any] = []

    def hook(self, worker: Any) -> None:
        layers = [
            m for m in worker.get_model().modules() if type(m).__name__.endswith("DecoderLayer")
        ]
        self._hooks = [
            layer.register_forward_pre_hook(lambda *_: time.sleep(self.seconds)) for layer in layers
        ]
        self._hooks.append(
            layers[-1].register_forward_hook(lambda *_: self.landed.append(landed(self.sidecar)))
        )

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()


def landed(sidecar: str) -> int:
    """Bytes of transfers that a sidecar has received so far."""
    return int(
        rig.total(
            rig.parse_metrics(rig.get(sidecar + "/metrics")),
            "kvspray_rail_bytes_total",
            direction="in",
        )
    )


def _fork_workers() -> None:
    """vLLM starts the workers of a CPU engine by a fresh interpreter each, which takes a quarter of
    a minute to import it; this process has imported it and has no threads yet."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: mp.get_context("fork")


class _Loop:
    def __init__(self, llm: Any, conn: multiprocessing.connection.Connection) -> None:
        self.llm, self.conn = llm, conn
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.live: dict[str, tuple[int, float, list[float]]] = {}
        self.steps = 0
        self.last_step: int | None = None
        self.slow: _SlowLayers | None = None
        inner = self.core.step_fn

        def counted() -> Any:
            out = inner()
            self.steps += bool(out[1])
            return out

        self.core.step_fn = counted
        self.computed: collections.Counter[str] = collections.Counter()
        schedule = self.core.scheduler.schedule

        def watched(*args: Any, **kw: Any) -> Any:
            out = schedule(*args, **kw)
            for rid, n in out.num_scheduled_tokens.items():
                request = self.core.scheduler.requests[rid]
                end = request.num_computed_tokens  # with what this step adds
                self.computed[rid] += max(min(end, request.num_prompt_tokens) - (end - n), 0)
            return out

        self.core.scheduler.schedule = watched

    def run(self) -> None:
        while True:
            busy = (
                self.core.scheduler.has_requests()
                and not self.paused()
                and not self.core.is_sleeping()
            )
            while self.conn.poll(0 if busy else 0.2):
                self.handle(self.conn.recv())
                busy = not self.paused() and not self.core.is_sleeping()
            if not busy:
                continue
            for out in self.engine.step():
                self.output(out)
            if not self.core.scheduler.running:
                time.sleep(0.001)  # as vLLM's own idle loop does while only transfers are under way

    def paused(self) -> bool:
        return self.last_step is not None and self.steps >= self.last_step

    def output(self, out: Any) -> None:
        entry = self.live.get(out.request_id)
        if entry is None:
            return
        key, start, first = entry
        if not first and any(c.token_ids for c in out.outputs):
            first.append(time.monotonic() - start)
        if out.finished:
            del self.live[out.request_id]
            tokens = [list(c.token_ids) for c in out.outputs]
            finish = [c.finish_reason for c in out.outputs]
            near = (
                {t: lp.logprob for t, lp in out.outputs[0].logprobs[0].items()}
                if out.outputs[0].logprobs
                else {}
            )
            self.conn.send(
                (
                    key,
                    Out(
                        tokens,
                        finish,
                        out.kv_transfer_params,
                        first[0] if first else None,
                        time.monotonic() - start,
                        near,
                    ),
                )
            )

    def handle(self, what: tuple[Any, ...]) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        kind, *rest = what
        if kind == "exit":
            self.core.shutdown()
            os._exit(0)
        if kind == "add":
            key, rid, prompt, n_tokens, kv, n, logprobs, lora, first, image = rest
            # vLLM refuses several greedy samples; the likeliest token alone is the same.
            sp = SamplingParams(
                temperature=0 if n == 1 else 1, top_k=0 if n == 1 else 1, max_tokens=n_tokens,
                ignore_eos=True, n=n, output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": kv, "first": first}, logprobs=logprobs,
            )  # fmt: skip
            if n_tokens > 1 and n == 1:
                sp.output_kind = RequestOutputKind.CUMULATIVE  # for the time of the first token
            self.live[rid] = (key, time.monotonic(), [])
            self.engine.add_request(
                rid,
                {"prompt_token_ids": prompt}
                | ({} if image is None else {"multi_modal_data": {"image": image}}),
                sp,
                lora_request=LoRARequest(*lora) if lora else None,
            )
            return
        key, *args = rest
        try:
            out = getattr(self, "do_" + kind)(*args)
        except RuntimeError as err:  # as a server answers, and lives
            out = RuntimeError(str(err))
        self.conn.send((key, out))

    def do_abort(self, rid: str) -> bool:
        entry = self.live.pop(rid, None)
        self.engine.abort_request([rid])
        if entry is not None:
            self.conn.send((entry[0], Out([], ["abort"], None, None, time.monotonic() - entry[1])))
        return entry is not None

    def do_reject(self, kv: dict[str, Any]) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        async def add(request: Any) -> None:
            self.engine.engine_core.add_request(request)

        front = types.SimpleNamespace(engine_core=types.SimpleNamespace(add_request_async=add))
        asyncio.run(
            AsyncLLM.notify_kv_transfer_request_rejected(
                front, f"rejected-{next(Engine._keys)}", kv
            )
        )

    def do_metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY, generate_latest

        out: dict[str, float] = {}
        for line in generate_latest(REGISTRY).decode().splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                out[name] = float(value)
        return out

    def do_preempt(self) -> bool:
        return bool(self.engine.reset_prefix_cache(reset_running_requests=True))

    def do_clear(self) -> bool:
        return bool(self.engine.reset_prefix_cache())

    def do_watch_transfers(self) -> None:
        side = self.core.scheduler.connector._scheduler
        ends: dict[str, dict[str, float]] = {}
        self.ends = ends

        def note(what: str, request: Any) -> None:
            xfer = ((request.kv_transfer_params or {}).get("kvspray") or {}).get("xfer")
            if xfer is not None:
                ends.setdefault(xfer, {}).setdefault(what, time.time())

        finished, allocated, worker_reported = side.finished, side.allocated, side.worker_reported

        def on_finished(request: Any, table: Any) -> Any:
            note("over", request)
            return finished(request, table)

        def on_allocated(request: Any, blocks: Any, external: int) -> None:
            if not external:
                note("over", request)
            allocated(request, blocks, external)

        def on_worker_reported(sent: Any, *rest: Any) -> None:
            for req in sent:
                if req in side._sources:
                    xfer = side._sources[req].xfer.hex()
                    ends.setdefault(xfer, {}).setdefault("released", time.time())
            worker_reported(sent, *rest)

        side.finished, side.allocated, side.worker_reported = (
            on_finished,
            on_allocated,
            on_worker_reported,
        )

    def do_transfer_ends(self) -> dict[str, dict[str, float]]:
        return self.ends

    def do_idle(self) -> bool:
        return not self.core.scheduler.requests

    def do_free_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def do_steps(self) -> int:
        return self.steps

    def do_computed(self, rid: str) -> int:
        # vLLM appends to every id.
        return sum(n for name, n in self.computed.items() if name.startswith(rid + "-"))

    def do_pause_at(self, steps: int | None) -> None:
        self.last_step = steps

    def do_reload_weights(self, path: str) -> None:
        self.core.model_executor.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self.engine.reset_prefix_cache(reset_connector=True)

    def do_rpc(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        return list(self.core.model_executor.collective_rpc(method, args=args))

    def do_sleep(self, level: int) -> None:
        self.core.sleep(level)

    def do_wake_up(self, tags: list[str] | None) -> bool:
        return bool(self.core.wake_up(tags))

    def do_set_weights(self, name: str) -> list[str]:
        import kvspray_vllm

        before = list(
            self.core.model_executor.collective_rpc(kvspray_vllm.set_weights, args=(name,))
        )
        self.engine.reset_prefix_cache(reset_connector=True)
        return before

    def do_slow_layers(self, seconds: float, sidecar: str) -> None:
        if self.slow is not None:
            self.slow.unhook()
            self.slow = None
        if seconds > 0:
            self.slow = _SlowLayers(seconds, sidecar)
            self.core.model_executor.collective_rpc(self.slow.hook)

    def do_landed_by_step(self) -> list[int]:
        return self.slow.landed if self.slow is not None else []

    def do_status(self) -> dict[str, Any]:
        s = self.core.scheduler
        c = s.connector
        out: dict[str, Any] = {"requests": len(s.requests), "running": len(s.running)}
        if c is not None and c._scheduler is not None:
            # The scheduler and every worker have a session of their own.
            workers = self.core.model_executor.collective_rpc(_worker_connected)
            out["connected"] = c._scheduler._client.connected and all(workers)
            out["sources"] = len(c._scheduler._sources)
            out["loading"] = len(c._scheduler._loading)
            out["loads"] = list(c._scheduler._loading)
            out["putting"] = (
                len(c._scheduler._store._puts) if c._scheduler._store is not None else 0
            )
        return out
