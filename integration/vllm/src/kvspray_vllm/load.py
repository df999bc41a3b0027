"""``kvspray load``: other weights of the same shape for an engine that sleeps, from a directory or
from another node's offer.

The plug-in gives each worker of vLLM the methods kvspray_load_*, which the command calls on all
ranks by ``/collective_rpc``. A thread passes the tensors to vLLM's own reload_weights, so fused,
sharded and quantized parameters become what vLLM's loader makes of them. Their bytes are read ahead
into shared memory, and for a GPU the sidecar copies them from there.

A load has a token. It is armed before the engine sleeps: from the sleep on, until all ranks have
everything and are released, the worker refuses to compute, to wake up, and weights of others. What
fails leaves it so, and a later load can succeed. All methods but the check repeat the token.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import vllm

import kvspray
from kvspray.checkpoint import Directory, Manifest, Piece, Samples, differences
from kvspray.weights import CheckpointError, directory_of
from kvspray.weightstream import (
    ALIGN,
    MAX_HELD,
    PIECE_BYTES,
    PIECES,
    Block,
    LoadError,
    Source,
    Stream,
    open_source,
)
from kvspray_vllm.weights import RUNNER_WRITERS, WORKER_WRITERS, holder

VARIABLE = "KVSPRAY_LOAD"
METHODS = tuple(
    f"kvspray_load_{m}" for m in ("check", "arm", "begin", "poll", "finish", "release", "cancel")
)
COMPUTES = ("execute_model", "sample_tokens", "execute_dummy_batch")
RUNNER = ("execute_model", "sample_tokens", "_dummy_run")
QUIET_S = 15.0  # after which another load may take the place of one that is not confirmed
NO_PROGRESS_S = 120.0  # of a load: then it fails
MAX_TOKEN = 200  # characters
MAX_POLL_S = 1.0  # vLLM's engine waits meanwhile
STOP_S = 120.0  # for the thread to end
SLOTS = 3  # pieces in the memory of the GPU
COPY_S = 60.0  # for one
CONNECT_S = 5.0
ADD_S = 10.0
DROP_S = 10.0  # for the sidecar to unmap what it has copied to
WAIT_S = 0.05

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64",
}  # fmt: skip

_log = logging.getLogger("vllm.kvspray.load")


def install() -> None:
    """Gives the methods to all workers of this process. Several calls are one."""
    value = os.environ.get(VARIABLE, "")
    if value != "1" and not value.startswith("/"):
        raise ValueError(
            f"{VARIABLE} is {value!r}: set it to 1, to the path of the sidecar's socket, or to 0 "
            "for an engine without kvspray load"
        )
    from vllm.v1.worker.worker_base import WorkerBase

    for name in METHODS:
        setattr(WorkerBase, name, globals()[name])
    inner = WorkerBase.__init__
    if hasattr(inner, "_kvspray"):
        return

    @functools.wraps(inner)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        self.load_model = functools.partial(_load_model, self, self.load_model)

    init._kvspray = True  # type: ignore[attr-defined]
    WorkerBase.__init__ = init


def _load_model(worker: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notes the shape of what the engine loads at its start: whatever its directory has later, it
    has that shape."""
    before = _read_present(worker)
    try:
        return inner(*args, **kwargs)
    finally:
        after = _read_present(worker)
        if after is not None and (before is None or before == after):
            _manifests[worker] = after[0]
        else:
            _log.warning(
                "kvspray: the shape of this engine's checkpoint is not known, so kvspray load "
                "needs --force"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command asks for, as JSON."""

    source: str  # a directory's absolute path, or http://HOST:PORT
    copies: str = "auto"  # by the sidecar to a GPU; "sidecar": also in host memory, "none": nowhere
    socket: str = ""  # of the sidecar; empty: KVSPRAY_LOAD's, or the default path
    piece_bytes: int = PIECE_BYTES
    force: bool = False  # also where the shape of the engine's checkpoint is not known

    @classmethod
    def parse(cls, text: str) -> Request:
        try:
            fields = json.loads(text)
            out = cls(**fields)
        except (ValueError, TypeError, RecursionError) as err:
            raise LoadError(f"the request is {text[:200]!r}: {err}") from err
        if not isinstance(out.force, bool):
            raise LoadError(f"force is {out.force!r}: want true or false")
        if not isinstance(out.source, str) or not isinstance(out.socket, str):
            raise LoadError(f"source and socket are {out.source!r} and {out.socket!r}, want texts")
        if out.copies not in ("auto", "sidecar", "none"):
            raise LoadError(f"copies is {out.copies!r}: want auto, sidecar or none")
        if not isinstance(out.piece_bytes, int) or not 1 << 12 <= out.piece_bytes <= 1 << 32:
            raise LoadError(f"piece_bytes is {out.piece_bytes!r}: want 4 KiB to 4 GiB")
        return out

    def open(self, digest: str | None = None) -> Source:
        align = 1 << 20 if self.source.startswith("http://") else ALIGN
        return open_source(
            self.source,
            self.sidecar(),
            PIECES * (-(-self.piece_bytes // align) + 1) * align,
            digest,
        )

    def sidecar(self) -> str | None:
        value = os.environ.get(VARIABLE, "")
        return self.socket or (value if value.startswith("/") else None)


# ---- the methods; what a user can set right comes back as {"error": text}


Answer = dict[str, Any]


def _answered(method: Callable[..., Answer]) -> Callable[..., Answer]:
    def wrapper(worker: Any, *args: Any) -> Answer:
        try:
            return method(worker, *args)
        except (LoadError, CheckpointError, kvspray.KvsprayError) as err:
            return {"error": str(err)}
        except Exception as err:
            # vLLM reads no more answers after the first failure, and takes the others for those of
            # the next call.
            _log.exception("kvspray: %s failed", method.__name__)
            return {"error": f"{type(err).__name__}: {err}"}

    wrapper.__doc__ = method.__doc__
    return wrapper


@_answered
def kvspray_load_check(worker: Any, request: str) -> Answer:
    """Changes nothing. Whether these weights can take the place of the engine's."""
    asked = Request.parse(request)
    _can_sleep(worker)
    source = asked.open()
    try:
        return _fits(worker, source.manifest, asked)
    finally:
        source.stop()
        source.close()


@_answered
def kvspray_load_arm(worker: Any, token: str) -> Answer:
    """Before the engine is put to sleep. Until then it computes as before; from then on it does
    not, until the load of this token is released."""
    if not isinstance(token, str) or not 1 <= len(token) <= MAX_TOKEN or not token.isprintable():
        raise LoadError(
            f"the token is {str(token)[:80]!r}: want 1 to {MAX_TOKEN} printable characters"
        )
    _can_sleep(worker)
    before = _guards.get(worker)
    sleeps = False
    if before is not None:
        if before.token == token:
            if before.state != "armed":
                raise LoadError(f"the load {token} is {before.state}: arm with another token")
            return before.status(0)
        if before.busy():
            raise LoadError(
                f"the load {before.token} is under way, and {before.state}; wait for it. If its "
                f"command is gone, try again in {QUIET_S:g} s: then it ends"
            )
        sleeps = before.sleeps or before.state == "armed"
        before.stop(f"the load {token} takes its place")
        if before.load is not None and before.load.broken:
            raise LoadError(
                f"vLLM could not end the load {before.token}: {before.load.broken}; restart the "
                "engine"
            )
    guard = Guard(worker, token, before)
    guard.sleeps = before is not None and before.whole and sleeps
    guard.install()
    _guards[worker] = guard
    return guard.status(0)


@_answered
def kvspray_load_begin(worker: Any, token: str, request: str, digest: str) -> Answer:
    """digest: as the check returned it. After the weights' memory, and nothing else, woke up."""
    guard = _owned(worker, token)
    if guard.state != "armed":
        raise LoadError(f"the load {token} is {guard.state}: {guard.why()}")
    if not guard.slept:
        raise LoadError(
            "the engine was not put to sleep since the load was armed: /sleep and "
            "/wake_up?tags=weights come before"
        )
    try:
        asked = Request.parse(request)
        source = asked.open(digest)
        try:
            fits = _fits(worker, source.manifest, asked)
            if source.manifest.digest != digest:
                raise CheckpointError(
                    f"{asked.source}: it is {source.manifest.digest} now, and was {digest} when it "
                    "was checked; load again"
                )
            guard.load = Load(worker, guard, asked, source, fits["checked"])
        except BaseException:
            source.stop()
            source.close()
            raise
        guard.load.start()
    except BaseException as err:
        guard.fail(str(err) or type(err).__name__)
        raise
    return {**fits, "token": token}


@_answered
def kvspray_load_poll(worker: Any, token: str, wait_s: str) -> Answer:
    return _owned(worker, token).status(max(0.0, min(float(wait_s), MAX_POLL_S)))


@_answered
def kvspray_load_finish(worker: Any, token: str) -> Answer:
    """After all ranks have returned "loaded": the weights have their name. Nothing wakes up yet."""
    guard = _owned(worker, token)
    if guard.load is None:
        raise LoadError(f"the load {token} is {guard.state}, and not loaded: {guard.why()}")
    return guard.load.finish()


@_answered
def kvspray_load_release(worker: Any, token: str) -> Answer:
    """After all ranks have named the same weights: the engine may wake up."""
    guard = _owned(worker, token)
    if guard.load is None:
        raise LoadError(f"the load {token} is {guard.state}, and not named: {guard.why()}")
    return guard.load.release()


@_answered
def kvspray_load_cancel(worker: Any, token: str, reason: str, sleeps: str = "") -> Answer:
    """Before the engine was put to sleep this changes nothing else. Afterwards the load has failed.
    sleeps: not empty if /sleep was sent, and it is not certain whether it still comes: then the
    guard remains."""
    guard = _owned(worker, token)
    guard.sleeps = guard.sleeps or bool(sleeps)
    guard.stop(reason[:1000])
    return guard.status(0)


_guards: weakref.WeakKeyDictionary[Any, Guard] = weakref.WeakKeyDictionary()
# Of what each worker loaded at its start.
_manifests: weakref.WeakKeyDictionary[Any, Manifest] = weakref.WeakKeyDictionary()


def _owned(worker: Any, token: str) -> Guard:
    guard = _guards.get(worker)
    if guard is None:
        raise LoadError(
            f"the load {str(token)[:MAX_TOKEN]} is not armed on this rank; begin with kvspray load"
        )
    if guard.token != token:
        raise LoadError(
            f"this rank belongs to the load {guard.token}, which is {guard.state}, and not to "
            f"{str(token)[:MAX_TOKEN]}"
        )
    guard.called = time.monotonic()
    return guard


def _can_sleep(worker: Any) -> None:
    if (
        worker.device is not None
        and worker.device.type == "cuda"
        and not worker.vllm_config.model_config.enable_sleep_mode
    ):
        raise LoadError("this engine cannot sleep: start vllm serve with --enable-sleep-mode")
    draft = worker.get_draft_model()
    if draft is not None:
        raise LoadError(
            f"this engine has a draft model, {type(draft).__name__}, whose weights a sleep "
            "discards and nothing loads again; restart the engine for others"
        )


def _fits(worker: Any, new: Manifest, asked: Request) -> Answer:
    for e in new.entries:
        if getattr(torch, DTYPES.get(e.dtype, ""), None) is None:
            raise CheckpointError(
                f"tensor {e.name[:80]!r} has the type {e.dtype}, which this PyTorch has not; "
                "restart the engine with this model"
            )
    have = _manifests.get(worker)
    if have is None and not asked.force:
        raise CheckpointError(
            "the shape of the checkpoint that this engine started with is not known, so new "
            "weights cannot be compared with it. With --force vLLM's loader alone compares shapes, "
            "after the present weights are gone"
        )
    if have is not None and (differs := differences(have, new)):
        raise CheckpointError(
            "the weights have another shape than the engine's, which takes no byte of them: "
            f"{'; '.join(differs)}. Start an engine with them"
        )
    return {
        "digest": new.digest, "bytes": new.nbytes, "tensors": len(new.entries),
        "files": len(new.files), "checked": have is not None,
    }  # fmt: skip


def _read_present(worker: Any) -> tuple[Manifest, list[tuple[int, ...]]] | None:
    """Of the checkpoint's files as they are now. None: they are not here, or of another kind. An
    engine's start never fails for that."""
    try:
        m = worker.vllm_config.model_config
        root = directory_of(
            str(m.model_weights or m.model), m.revision, worker.vllm_config.load_config.download_dir
        )
        # A digest would cost reads of all tensors, and nothing here compares it: "start" stands in
        # for it.
        directory = Directory(root, "start")
    except Exception as err:
        _log.debug("kvspray: the engine's checkpoint: %s", err)
        return None
    directory.close()
    return directory.manifest, directory.stamps


# ---- what a worker refuses meanwhile


class Guard:
    """Of one rank and one load, by methods of the objects themselves: what calls them meets these
    first."""

    def __init__(self, worker: Any, token: str, before: Guard | None) -> None:
        self.worker, self.token = worker, token
        self.load: Load | None = None
        self.slept = False
        self.sleeps = False  # a sleep may come yet, of a command that is gone
        # The present weights are those of their name.
        self.whole: bool = before is None or before.whole
        self.called = time.monotonic()
        self.reloads = 0  # by others, since the load began
        self._error = "" if before is None or before.whole else before.why()
        self._ended = ""  # "failed", or "disarmed"
        self._name: str = (
            before._name if before is not None and before.whole and before.state == "failed" else ""
        )
        self._own: list[tuple[Any, str, Any]] = []
        self._hook: Any = None
        self._before = before

    @property
    def state(self) -> str:
        """armed, loading, loaded, named, done, failed or disarmed."""
        return self._ended or ("armed" if self.load is None else self.load.state)

    def busy(self) -> bool:
        return (
            self.state in ("armed", "loading", "loaded", "named")
            and time.monotonic() - self.called < QUIET_S
        )

    def why(self) -> str:
        known = {
            "armed": self._error or "a load is armed, and has not begun",
            "loading": "they are being loaded",
            "loaded": "kvspray load has not confirmed them on all ranks",
            "named": "kvspray load has not released them on all ranks",
        }  # fmt: skip
        return (
            known.get(self.state)
            or self._error
            or (self.load.error if self.load is not None else "")
        )

    def status(self, wait_s: float) -> Answer:
        if self.load is not None and not self._ended:
            return {"token": self.token, **self.load.status(wait_s)}
        out = {
            "token": self.token,
            "state": self.state,
            "bytes": 0,
            "total": 0,
            "by_sidecar": 0,
            "seconds": 0.0,
        }
        return {**out, "error": self._error} if self.state == "failed" else out

    def fail(self, error: str) -> None:
        self.whole, self._ended, self._error = False, "failed", error

    def stop(self, reason: str) -> None:
        """The load ends. One that has changed nothing yet leaves nothing behind."""
        if self.load is not None:
            self.load.stop(reason)
        elif self.state == "armed":
            if not self.whole or self.sleeps:
                self._ended, self._error = "failed", f"the load was stopped: {reason}"
                return
            connector = holder()
            if connector is not None and self._name:
                connector.set_weights(self._name)
            self.remove()
            self._ended = "disarmed"

    def install(self) -> None:
        modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet(
            self.worker.get_model().modules()
        )
        if self._before is not None:
            self._before.remove()
            self._before = None
        runner = getattr(self.worker, "model_runner", None)
        for name in COMPUTES:
            self._wrap(self.worker, name, self._computes, last=name == "execute_dummy_batch")
        for name in WORKER_WRITERS:
            self._wrap(self.worker, name, self._replaces, last=True)
        for name in RUNNER:
            self._wrap(runner, name, self._computes, last=False)
        for name in RUNNER_WRITERS:
            self._wrap(runner, name, self._replaces, last=False)
        self._wrap(self.worker, "wake_up", self._wake_up, last=True)
        self._wrap(self.worker, "sleep", self._sleep, last=True)

        def registered(module: torch.nn.Module, _: str, param: torch.nn.Parameter | None) -> None:
            if param is not None and not self.mine() and module in modules:
                self.reloads += 1

        self._hook = torch.nn.modules.module.register_module_parameter_registration_hook(registered)
        try:
            name = self._renamed()
        except BaseException:
            if self.whole:
                self.remove()
            else:
                self._ended, _guards[self.worker] = "failed", self
            raise
        self._name = self._name or name

    def remove(self) -> None:
        for obj, name, own in reversed(self._own):
            if own is None:
                obj.__dict__.pop(name, None)
            else:
                obj.__dict__[name] = own
        self._own = []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _wrap(self, obj: Any, name: str, how: Callable[..., Any], last: bool) -> None:
        inner = getattr(obj, name, None)
        if inner is None:
            return
        self._own.append((obj, name, obj.__dict__.get(name)))
        obj.__dict__[name] = functools.partial(how, inner, name, last)

    def _renamed(self) -> str:
        """Nothing that the cache has or gets is offered under the name before, which is
        returned."""
        connector = holder()
        return connector.weights_replaced() if connector is not None else ""

    def mine(self) -> bool:
        return self.load is not None and self.load.thread is threading.current_thread()

    def _refuse(self, name: str, last: bool) -> None:
        # Of what all ranks are called for, the last one alone fails: vLLM reads no more answers
        # after the first failure, and takes the others for those of the next call.
        if not last or self.worker.rank == self.worker.parallel_config.world_size - 1:
            raise RuntimeError(
                f"kvspray: {name} is refused, since the weights of this engine are incomplete: "
                f"{self.why()}. Run kvspray load"
            )

    def _computes(
        self, inner: Callable[..., Any], name: str, last: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if self.whole or self.mine():
            return inner(*args, **kwargs)
        self._refuse(name, last)
        return None

    def _replaces(
        self, inner: Callable[..., Any], name: str, last: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if self.mine():
            return inner(*args, **kwargs)
        self._refuse(name, last)
        return None

    def _wake_up(
        self, inner: Callable[..., Any], name: str, last: bool, tags: list[str] | None = None
    ) -> None:
        """The memory of the weights alone, for the load; vLLM schedules nothing while the other
        memory sleeps."""
        if tags != ["weights"]:
            self._refuse(name, last)
            return
        self.whole, self.slept = False, True
        self._renamed()
        inner(tags)
        self.called = time.monotonic()

    def _sleep(self, inner: Callable[..., Any], name: str, last: bool, level: int = 1) -> None:
        if self.load is not None:
            # Nothing may write to the memory that goes.
            self.load.stop("the engine was put to sleep")
        self.whole, self.slept = False, True
        try:
            inner(level)
        finally:
            # Only now: a connector whose cache sleeps gives and takes nothing, and has to present
            # the name once, at the wake-up.
            self._renamed()
        self.called = time.monotonic()


# ---- one load


class Load:
    """Of one rank. It is "loading", then "loaded" or "failed"; finish() makes it "done"."""

    def __init__(
        self, worker: Any, guard: Guard, request: Request, source: Source, checked: bool
    ) -> None:
        self._worker, self._guard, self._request, self._source, self._checked = (
            worker,
            guard,
            request,
            source,
            checked,
        )
        self.broken = ""  # why no other load can follow
        self._total = source.manifest.nbytes
        self._bytes = 0
        self._last = ""  # tensor that vLLM's loader was given
        self.state, self.error = "loading", ""
        self._name = ""
        self._began, self._took = time.monotonic(), 0.0
        self._progress = self._began
        self._changed = threading.Condition()
        self._stop = ""
        self._by_sidecar = 0
        self._stream = Stream(source, request.piece_bytes)
        self.thread = threading.Thread(target=self._run, name="kvspray-load", daemon=True)

    def start(self) -> None:
        self._guard.reloads = 0
        connector = holder()
        if connector is not None:
            connector.weights_replaced()
        self.thread.start()

    def status(self, wait_s: float) -> Answer:
        """Waits a while for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.state != "loading", wait_s)
            if self.state == "loading" and time.monotonic() - self._progress > NO_PROGRESS_S:
                # Its thread may hang in a read for ever. Whatever it does later, the load has
                # failed.
                self._stop = f"nothing has come for {NO_PROGRESS_S:g} s"
                self._end(
                    "failed",
                    f"{self._stop}, after {self._bytes} of {self._total} bytes; look at the disk "
                    "or the offer, and load again",
                )
            out = {
                "state": self.state,
                "bytes": self._bytes,
                "total": self._total,
                "by_sidecar": self._by_sidecar,
                "seconds": round(self.seconds(), 3),
            }
            out["digest"] = self._source.manifest.digest
            return {**out, "error": self.error} if self.state == "failed" else out

    def seconds(self) -> float:
        return self._took or time.monotonic() - self._began

    def stop(self, reason: str) -> None:
        """One that is done remains so."""
        with self._changed:
            self._stop = self._stop or reason
            if self.state in ("loaded", "named"):
                if self.state == "named" and (connector := holder()) is not None:
                    connector.weights_replaced()
                self._end("failed", f"the load was stopped: {reason}")
        if self.thread.ident is not None:
            self.thread.join(STOP_S)
        if self.thread.is_alive():
            raise LoadError(
                f"the load {self._guard.token} has not ended within {STOP_S:g} s; try again, or "
                "restart the engine"
            )

    def finish(self) -> Answer:
        with self._changed:
            if self.state in ("named", "done"):
                return self._status()
            if self.state != "loaded":
                raise LoadError(f"the load is {self.state}, and not loaded: {self._guard.why()}")
            if self._guard.reloads or self._mark != _mark(self._worker.get_model()):
                self._end(
                    "failed",
                    "something else has replaced weights since they were loaded; load again, and "
                    "nothing else meanwhile",
                )
                raise LoadError(self.error)
        name = _named(self._worker, self._source.manifest.digest)
        connector = holder()
        if connector is not None:
            connector.set_weights(name)
        self._name = name
        with self._changed:
            self._end("named", "")
        return self._status()

    def release(self) -> Answer:
        with self._changed:
            if self.state not in ("named", "done"):
                raise LoadError(f"the load is {self.state}, and not named: {self._guard.why()}")
            if self.state == "named":
                if self._guard.reloads or self._mark != _mark(self._worker.get_model()):
                    if (connector := holder()) is not None:
                        connector.weights_replaced()
                    self._end(
                        "failed",
                        "something else has replaced weights since they were named; load again, "
                        "and nothing else meanwhile",
                    )
                    raise LoadError(self.error)
                self._end("done", "")
                self._guard.whole = True
                self._guard.remove()
        return self._status()

    def _status(self) -> Answer:
        return {
            "token": self._guard.token, "state": self.state, "weights": self._name,
            "bytes": self._total, "by_sidecar": self._by_sidecar, "seconds": round(self._took, 3),
        }  # fmt: skip

    def _end(self, state: str, error: str) -> None:
        self.state, self.error = state, error
        self._changed.notify_all()

    # -- in the thread

    def _run(self) -> None:
        error = ""
        try:
            if self._worker.device is not None and self._worker.device.type == "cuda":
                torch.cuda.set_device(self._worker.device)
            self._load()
        except BaseException as err:
            error = str(err) or type(err).__name__
            if not isinstance(err, (LoadError, CheckpointError)):
                _log.exception("kvspray: the load failed")
                error = (
                    f"vLLM's loader, after it was given the tensor {self._last[:80]!r}: "
                    f"{type(err).__name__}: {err}"
                ).rstrip(": ")
            _forget(err)
        if error:
            try:
                _abandon(self._worker.get_model())
            except Exception as err:
                self.broken = f"{type(err).__name__}: {err}"
                _log.exception("kvspray: the load cannot be ended")
            gc.collect()  # tensors of the arena in cycles
        try:
            self._stream.close()
        except Exception as err:  # not a reason to fail what has succeeded
            _log.warning("kvspray: %s", err)
        with self._changed:
            self._took = time.monotonic() - self._began
            if self.state == "failed":
                pass  # for want of progress
            elif error or self._stop:
                self._end("failed", error or f"the load was stopped: {self._stop}")
            else:
                self._mark = _mark(self._worker.get_model())
                self._end("loaded", "")
        _log.log(
            logging.WARNING if error else logging.INFO,
            "kvspray: load of %s: %.2f of %.2f GiB in %.2f s, %d pieces by the sidecar%s",
            self._request.source, self._bytes / (1 << 30), self._total / (1 << 30), self._took,
            self._by_sidecar, f": {error}" if error else "",
        )  # fmt: skip

    def _load(self) -> None:
        samples = Samples(self._source.manifest.entries)
        model = self._worker.get_model()
        _abandon(model)  # a reload by others that failed
        inner = model.load_weights
        loaded: set[str] = set()

        def noted(weights: Any) -> Any:
            if not self._guard.mine():
                raise RuntimeError("kvspray: load_weights is refused while kvspray load loads")
            out = inner(weights)
            loaded.update(out or ())
            if not self._checked and (partial := _partial(model)):
                raise CheckpointError(f"{self._request.source}: {partial}")
            return out

        model.load_weights = noted  # reload_weights does not return what it loaded
        try:
            with contextlib.closing(self._tensors(samples)) as tensors:
                self._worker.reload_weights(weights_iterator=tensors)
                if next(tensors, None) is not None:
                    raise LoadError("vLLM's loader did not take all tensors")
        finally:
            del model.load_weights
        if self._worker.device is not None and self._worker.device.type == "cuda":
            torch.cuda.synchronize()
        # Where names were compared before, those that no checkpoint has are no news. A quantized
        # layer has other parameters than its checkpoint.
        if (
            not self._checked
            and loaded
            and self._worker.vllm_config.model_config.quantization is None
        ):
            missing = sorted(
                {name for name, _ in model.named_parameters()}
                - {n.replace(".base_layer.", ".") for n in loaded}
                - loaded
            )
            if missing:
                raise CheckpointError(
                    f"{self._request.source}: nothing for {missing[0]!r} and {len(missing) - 1} "
                    "other parameters"
                )
        self._source.check()
        digest = samples.digest(self._source.manifest.configs)
        if digest != self._source.manifest.digest:
            raise CheckpointError(
                f"{self._request.source}: what came is {digest}, and not "
                f"{self._source.manifest.digest}; it changed meanwhile: load again"
            )

    def _tensors(self, samples: Samples) -> Generator[tuple[str, torch.Tensor], None, None]:
        manifest = self._source.manifest
        for e in manifest.entries:
            if e.nbytes == 0:
                yield e.name, torch.empty(e.shape, dtype=getattr(torch, DTYPES[e.dtype]))
        whole: dict[int, torch.Tensor] = {}  # those that come in several pieces
        with contextlib.closing(self._placed(samples)) as placed:
            for piece, base in placed:
                yield from self._cut(piece, base, whole)
                del base
                with self._changed:
                    self._bytes += piece.nbytes
                    self._progress = time.monotonic()
                    if self._stop:
                        raise LoadError(f"the load was stopped: {self._stop}")

    def _cut(
        self, piece: Piece, base: torch.Tensor, whole: dict[int, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        manifest = self._source.manifest
        for part in piece.parts:
            e = manifest.entries[part.entry]
            data = base[part.at : part.at + part.nbytes]
            if part.nbytes < e.nbytes:
                if part.offset == 0:
                    whole[part.entry] = torch.empty(e.nbytes, dtype=torch.uint8, device=base.device)
                whole[part.entry][part.offset : part.offset + part.nbytes].copy_(data)
                if part.offset + part.nbytes < e.nbytes:
                    continue
                data = whole.pop(part.entry)
            kind = getattr(torch, DTYPES[e.dtype])
            if (data.storage_offset() | data.data_ptr()) % kind.itemsize:
                data = data.clone()
            self._last = e.name
            yield e.name, data.view(kind).reshape(e.shape)
            del data

    def _placed(self, samples: Samples) -> Generator[tuple[Piece, torch.Tensor], None, None]:
        """Pieces in memory of the engine's device."""
        device = self._worker.device
        on_gpu = device is not None and device.type == "cuda"
        if self._request.copies == "sidecar" or on_gpu:
            with contextlib.closing(Copied(self, samples, device if on_gpu else None)) as copied:
                yield from copied
            return
        held: set[int] = set()
        for block in self._stream:
            try:
                _sample(samples, block)
            except BaseException:
                block.give_back()
                raise
            view = (ctypes.c_uint8 * block.piece.nbytes).from_address(block.address)
            weakref.finalize(view, _give_back, held, block)
            base = torch.frombuffer(view, dtype=torch.uint8)
            del view
            held.add(id(block))
            if len(held) > MAX_HELD:  # the loader keeps tensors until it has all of a layer
                base = base.clone()
            piece = block.piece
            del block
            yield piece, base
            del base

    def copied(self) -> None:
        self._by_sidecar += 1


def _give_back(held: set[int], block: Block) -> None:
    held.discard(id(block))
    block.give_back()


def _sample(samples: Samples, block: Block) -> None:
    view = block.view
    for part in block.piece.parts:
        samples.take(part.entry, part.offset, view[part.at : part.at + part.nbytes])


class Copied:
    """Pieces in the device's memory, by copies of the sidecar that run ahead. A copy that it does
    not take or finish is made by PyTorch, after its lease has ended: until then the sidecar may
    still write."""

    def __init__(self, load: Load, samples: Samples, device: torch.device | None) -> None:
        self._load, self._samples, self._device = load, samples, device
        self._arena, self._shared = load._source.arena, load._source.client
        self._size = -(-load._request.piece_bytes // ALIGN) * ALIGN
        self._client: kvspray.WorkerClient | None = None
        self._region: kvspray.Region | None = None
        self._added = False
        self._refused = False  # a copy: logged once
        self._ends: dict[int, kvspray.Completion] = {}
        nbytes = SLOTS * self._size
        if device is None:
            self._region = kvspray.Region.alloc(nbytes)
            self._memory = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            # The sidecar pins all of it at the first copy: what has no memory then would come in
            # small pages.
            self._arena.fill(self._arena.nbytes)
        if load._request.copies != "none":
            self._connect()
        # Copies under way, of the thread until it ends.
        self._open: list[tuple[Block, int, int]] = []
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(SLOTS):
            self._free.put(slot)
        self._out: queue.Queue[tuple[Piece, int] | BaseException | None] = queue.Queue()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvspray-load-copies", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        try:
            if self._region is None:
                self._region = kvspray.Region.gpu(self._memory.data_ptr(), self._memory.numel())
            if self._shared is not None:  # which has registered the arena
                self._client = self._shared
                self._client.add_regions([self._region], ADD_S)
                self._added = True
                return
            self._client = kvspray.WorkerClient(
                self._load._request.sidecar(),
                engine=kvspray.EngineInfo("vllm", vllm.__version__, f"load-{os.getpid()}"),
                layers=1,
                deadline_s=COPY_S,
                log=_log,
            )
            self._client.register([])
            self._client.wait_connected(CONNECT_S)
            self._client.add_regions([self._arena.region, self._region], ADD_S)
            self._added = True
        except kvspray.KvsprayError as err:
            _log.warning("kvspray: PyTorch copies the weights: %s", err)

    def __iter__(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        while True:
            got = self._out.get()
            if got is None:
                return
            if isinstance(got, BaseException):
                raise got
            piece, slot = got
            # Within the GPU this costs next to nothing, and the slot is free before vLLM's loader
            # has let go of the tensors.
            base = self._slot(slot, piece.nbytes).clone()
            if self._device is not None:
                torch.cuda.current_stream().synchronize()
            self._free.put(slot)
            yield piece, base
            del base

    def _slot(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._memory[slot * self._size : slot * self._size + nbytes]

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for block in self._load._stream:
                try:
                    _sample(self._samples, block)
                    slot = self._take_slot()
                    copy = (block, slot, self._copy(block, slot))
                except BaseException:
                    block.give_back()
                    raise
                self._open.append(copy)
                if len(self._open) == SLOTS - 1:
                    self._end_first()
            while self._open:
                self._end_first()
            self._out.put(None)
        except BaseException as err:
            self._out.put(err)

    def _take_slot(self) -> int:
        while not self._stop:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=WAIT_S)
            if self._open:
                self._end_first()
        raise LoadError("the load was stopped")

    def _copy(self, block: Block, slot: int) -> int:
        """Not above 0: PyTorch copies it."""
        if self._client is None or self._region is None or not self._client.connected:
            return 0
        pieces = [(block.at + block.lead, slot * self._size, block.piece.nbytes)]
        lease = self._client.copy(
            self._arena.region, self._region, pieces, req="weights", deadline_s=COPY_S
        )
        if lease <= 0 and not self._refused:
            self._refused = True
            _log.warning("kvspray: PyTorch copies pieces of the weights: %s", self._client.refusal)
        return lease

    def _end_first(self) -> None:
        self._end(*self._open[0])
        block, slot, lease = self._open.pop(0)
        self._ends.pop(lease, None)
        block.give_back()
        self._out.put((block.piece, slot))

    def _end(self, block: Block, slot: int, lease: int) -> None:
        ok = False
        if lease > 0:
            end = self._await(lease)
            ok = end.ok
            if not ok:
                _log.warning(
                    "kvspray: PyTorch copies a piece of the weights: %s (%s)",
                    end.status.name,
                    end.reason,
                )
        if ok:
            self._load.copied()
        else:
            view = (ctypes.c_uint8 * block.piece.nbytes).from_address(block.address)
            self._slot(slot, block.piece.nbytes).copy_(torch.frombuffer(view, dtype=torch.uint8))
            if self._device is not None:
                torch.cuda.current_stream().synchronize()

    def _await(self, lease: int) -> kvspray.Completion:
        """The sidecar writes nothing of it any more."""
        assert self._client is not None
        while lease not in self._ends:
            if self._shared is None:
                self._client.wait(WAIT_S)
            for c in self._client.poll() if self._shared is None else self._load._source.poll():
                self._ends[c.lease] = c
        return self._ends[lease]

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        for block, _, lease in self._open:  # the memory goes to others
            try:
                if lease > 0 and self._client is not None:
                    self._client.cancel(lease, "the load ends")
                    self._await(lease)
            finally:
                block.give_back()
        self._open.clear()
        if self._client is not None:
            with contextlib.suppress(kvspray.KvsprayError):
                self._drop()
            if self._shared is None:
                self._client.close()
        if self._region is not None:
            del self._memory
            self._region.close()

    def _drop(self) -> None:
        """GPU memory that the sidecar has mapped stays in use after PyTorch has freed it, and the
        engine's cache needs it."""
        assert self._client is not None
        if not self._added or self._region is None or not self._client.connected:
            return
        if not self._client.drop_regions([self._region], DROP_S):
            _log.warning(
                "kvspray: the sidecar has not unmapped %d MiB yet, which are free once it has",
                self._region.nbytes >> 20,
            )


# ---- vLLM


def _mark(model: torch.nn.Module) -> tuple[Any, ...]:
    """Differs after most writes to the parameters."""
    return tuple(
        (name, id(p), p.data_ptr(), -1 if p.is_inference() else p._version)
        for name, p in model.named_parameters()
    )


def _forget(err: BaseException | None) -> None:
    """Frames of an error hold tensors."""
    seen: set[int] = set()
    while err is not None and id(err) not in seen:
        seen.add(id(err))
        if err.__traceback__ is not None:
            traceback.clear_frames(err.__traceback__)
        err.__traceback__ = None
        err = err.__cause__ or err.__context__


def _partial(model: torch.nn.Module) -> str:
    """What of a layer has not come, before vLLM's reload fills it up; empty: nothing. A fused
    parameter is whole only if all of its parts came."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise

    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        total = info.load_numel_total
        if (
            total is None
            or info.load_numel >= total
            or is_deferred_attention_layer(layer)
            or not dict(layer.named_parameters(recurse=False))
        ):
            continue
        if isinstance(layer, VocabParallelEmbedding):
            if info.load_numel == 0 and name.endswith("lm_head"):
                continue  # tied: the names of all parameters are compared, too
            total -= (
                layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
            ) * layer.embedding_dim
            if info.load_numel >= total:
                continue
        return (
            f"{info.load_numel} of {total} elements of the layer {name!r} came: a tensor of it is "
            "missing"
        )
    return ""


def _abandon(model: torch.nn.Module) -> None:
    """Ends a reload that did not end by itself. Without this the next one would go on with tensors
    of this one."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def _named(worker: Any, digest: str) -> str:
    from kvspray_vllm.weights import with_draft

    return with_draft(worker.vllm_config, digest, _log)
