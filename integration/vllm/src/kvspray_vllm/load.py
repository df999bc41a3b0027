# SPDX-License-Identifier: Apache-2.0
"""``kvspray load``: other weights of the same shape for an engine that sleeps, from a directory or from another node's offer.

The plug-in gives each worker of vLLM the methods kvspray_load_*, which the command calls on all ranks by ``/collective_rpc``. A thread passes the
tensors to vLLM's own reload_weights, so fused, sharded and quantized parameters become what vLLM's loader makes of them. Their bytes are read ahead
into shared memory, and for a GPU the sidecar copies them from there.

From the first byte until all ranks have everything, the worker refuses to wake up and to compute. What fails leaves it so, and a later load can succeed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import vllm

import kvspray
from kvspray.checkpoint import Folder, Manifest, Piece, Samples, differences
from kvspray.weights import CheckpointError, directory_of
from kvspray.weightstream import ALIGN, MAX_HELD, PIECE_BYTES, PIECES, Block, LoadError, Source, Stream, open_source

SOCKET = "KVSPRAY_LOAD_SOCKET"
METHODS = ("kvspray_load_check", "kvspray_load_begin", "kvspray_load_poll", "kvspray_load_finish", "kvspray_load_cancel")
GUARDED = ("wake_up", "execute_model", "sleep")
MAX_POLL_S = 1.0  # vLLM's engine waits meanwhile
STOP_S = 120.0  # for the thread to end
SLOTS = 3  # pieces in the memory of the GPU
COPY_S = 60.0  # for one
CONNECT_S = 5.0
ADD_S = 10.0
WAIT_S = 0.05

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64", "I64": "int64",
    "U64": "uint64", "C64": "complex64",
}  # fmt: skip

_log = logging.getLogger("vllm.kvspray.load")


def install() -> None:
    """Gives the methods to all workers of this process. Several calls are one."""
    from vllm.v1.worker.worker_base import WorkerBase

    for name in METHODS:
        setattr(WorkerBase, name, globals()[name])


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command asks for, as JSON."""

    source: str  # a directory's absolute path, or http://HOST:PORT
    copies: str = "auto"  # by the sidecar to a GPU; "sidecar": also in host memory, "none": nowhere
    socket: str = ""  # of the sidecar; empty: KVSPRAY_LOAD_SOCKET, or the default path
    piece_bytes: int = PIECE_BYTES

    @classmethod
    def parse(cls, text: str) -> Request:
        try:
            fields = json.loads(text)
            out = cls(**fields)
        except (ValueError, TypeError, RecursionError) as err:
            raise LoadError(f"the request is {text[:200]!r}: {err}") from err
        if not isinstance(out.source, str) or not isinstance(out.socket, str):
            raise LoadError(f"source and socket are {out.source!r} and {out.socket!r}, want texts")
        if out.copies not in ("auto", "sidecar", "none"):
            raise LoadError(f"copies is {out.copies!r}: want auto, sidecar or none")
        if not isinstance(out.piece_bytes, int) or not 1 << 12 <= out.piece_bytes <= 1 << 32:
            raise LoadError(f"piece_bytes is {out.piece_bytes!r}: want 4 KiB to 4 GiB")
        return out

    def open(self, digest: str | None = None) -> Source:
        align = 1 << 20 if self.source.startswith("http://") else ALIGN
        return open_source(self.source, self.sidecar(), PIECES * (-(-self.piece_bytes // align) + 1) * align, digest)

    def sidecar(self) -> str | None:
        return self.socket or os.environ.get(SOCKET) or None


# ---- the methods; what a user can set right comes back as {"error": text}


Answer = dict[str, Any]


def _told(method: Callable[..., Answer]) -> Callable[..., Answer]:
    def wrapper(worker: Any, *args: Any) -> Answer:
        try:
            return method(worker, *args)
        except (LoadError, CheckpointError, kvspray.KvsprayError) as err:
            return {"error": str(err)}
        except Exception as err:  # vLLM reads no more answers after the first failure, and takes the others for those of the next call
            _log.exception("kvspray: %s failed", method.__name__)
            return {"error": f"{type(err).__name__}: {err}"}

    wrapper.__doc__ = method.__doc__
    return wrapper


@_told
def kvspray_load_check(worker: Any, request: str) -> Answer:
    """Changes nothing. Whether these weights can take the place of the engine's."""
    asked = Request.parse(request)
    source = asked.open()
    try:
        return _fits(worker, source.manifest)
    finally:
        source.stop()
        source.close()


@_told
def kvspray_load_begin(worker: Any, request: str, digest: str) -> Answer:
    """digest: as the check returned it. The weights are incomplete from now on."""
    asked = Request.parse(request)
    running = _loads.get(worker)
    if running is not None:
        running.stop("another load begins")
        if running.broken:
            raise LoadError(f"vLLM could not end the load before this one: {running.broken}; restart the engine")
    source = asked.open(digest)
    try:
        fits = _fits(worker, source.manifest)
        if source.manifest.digest != digest:
            raise CheckpointError(f"{asked.source}: it is {source.manifest.digest} now, and was {digest} when it was checked; load again")
        load = Load(worker, asked, source, fits["checked"])
    except BaseException:
        source.stop()
        source.close()
        raise
    _loads[worker] = load
    load.start()
    return fits


@_told
def kvspray_load_poll(worker: Any, wait_s: str) -> Answer:
    return _running(worker).status(min(float(wait_s), MAX_POLL_S))


@_told
def kvspray_load_finish(worker: Any) -> Answer:
    """After all ranks have said "loaded": the engine may wake up."""
    return _running(worker).finish()


@_told
def kvspray_load_cancel(worker: Any, reason: str) -> Answer:
    load = _running(worker)
    load.stop(reason[:1000])
    return load.status(0)


_loads: weakref.WeakKeyDictionary[Any, Load] = weakref.WeakKeyDictionary()
_manifests: weakref.WeakKeyDictionary[Any, Manifest] = weakref.WeakKeyDictionary()  # of what was loaded last


def _running(worker: Any) -> Load:
    load = _loads.get(worker)
    if load is None:
        raise LoadError("no load is under way on this rank; begin with kvspray load")
    return load


def _fits(worker: Any, new: Manifest) -> Answer:
    for e in new.entries:
        if getattr(torch, DTYPES.get(e.dtype, ""), None) is None:
            raise CheckpointError(f"tensor {e.name[:80]!r} has the type {e.dtype}, which this PyTorch has not; restart the engine with this model")
    have = _present(worker)
    if have is not None and (differs := differences(have, new)):
        raise CheckpointError(f"the weights have another shape than the engine's, which takes no byte of them: {'; '.join(differs)}. Start an engine with them")
    return {
        "digest": new.digest, "bytes": new.nbytes, "tensors": len(new.entries), "files": len(new.files), "checked": have is not None,
    }  # fmt: skip


def _present(worker: Any) -> Manifest | None:
    """Of the checkpoint that the engine has. None: its files are not here, or of another kind."""
    if worker in _manifests:
        return _manifests[worker]
    m = worker.vllm_config.model_config
    try:
        folder = Folder(directory_of(str(m.model_weights or m.model), m.revision, worker.vllm_config.load_config.download_dir))
    except CheckpointError as err:
        _log.warning("kvspray: the shape of new weights is not compared before they are loaded: %s", err)
        return None
    folder.close()
    _manifests[worker] = folder.manifest
    return folder.manifest


# ---- one load


class Load:
    """Of one rank. It is "loading", then "loaded" or "failed"; finish() makes it "done"."""

    def __init__(self, worker: Any, request: Request, source: Source, checked: bool) -> None:
        self._worker, self._request, self._source, self._checked = worker, request, source, checked
        self.broken = ""  # why no other load can follow
        self._total = source.manifest.nbytes
        self._bytes = 0
        self._state, self._error = "loading", ""
        self._began, self._took = time.monotonic(), 0.0
        self._changed = threading.Condition()
        self._stop = ""
        self._by_sidecar = 0
        self._stream = Stream(source, request.piece_bytes)
        self._thread = threading.Thread(target=self._run, name="kvspray-load", daemon=True)

    def start(self) -> None:
        _guard(self._worker, self)
        _manifests.pop(self._worker, None)
        connector = _connector()
        if connector is not None:
            connector.weights_replaced()
        self._thread.start()

    def why(self) -> str:
        return {"loading": "they are being loaded", "loaded": "kvspray load has not confirmed them on all ranks"}.get(self._state, self._error)

    def status(self, wait_s: float) -> Answer:
        """Waits a while for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "loading", max(0.0, wait_s))
            out = {"state": self._state, "bytes": self._bytes, "total": self._total, "by_sidecar": self._by_sidecar, "seconds": round(self.seconds(), 3)}
            return {**out, "error": self._error} if self._state == "failed" else out

    def seconds(self) -> float:
        return self._took or time.monotonic() - self._began

    def stop(self, reason: str) -> None:
        with self._changed:
            self._stop = self._stop or reason
            if self._state == "loaded":
                self._end("failed", f"the load was stopped: {reason}")
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise LoadError(f"the load before this one has not ended within {STOP_S:g} s; try again, or restart the engine")

    def finish(self) -> Answer:
        with self._changed:
            if self._state == "done":
                return self._told()
            if self._state != "loaded":
                raise LoadError(f"the load is {self._state}, so the engine stays asleep: {self.why()}")
        name = _named(self._worker, self._source.manifest.digest)
        connector = _connector()
        if connector is not None:
            connector.set_weights(name)
        _manifests[self._worker] = self._source.manifest
        self._name = name
        with self._changed:
            self._end("done", "")
        _unguard(self._worker)
        return self._told()

    def _told(self) -> Answer:
        return {"weights": self._name, "bytes": self._total, "by_sidecar": self._by_sidecar, "seconds": round(self._took, 3)}

    def _end(self, state: str, error: str) -> None:
        self._state, self._error = state, error
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
                error = f"vLLM's loader: {type(err).__name__}: {error}"
            err.__traceback__ = None  # its frames hold tensors
        if error:
            try:
                _abandon(self._worker.get_model())
            except Exception as err:
                self.broken = f"{type(err).__name__}: {err}"
                _log.exception("kvspray: the load cannot be ended")
        try:
            self._stream.close()
        except Exception as err:  # not a reason to fail what has succeeded
            _log.warning("kvspray: %s", err)
        with self._changed:
            self._took = time.monotonic() - self._began
            if error or self._stop:
                self._end("failed", error or f"the load was stopped: {self._stop}")
            else:
                self._end("loaded", "")
        _log.log(
            logging.WARNING if error else logging.INFO, "kvspray: load of %s: %.2f of %.2f GiB in %.2f s, %d pieces by the sidecar%s",
            self._request.source, self._bytes / (1 << 30), self._total / (1 << 30), self._took, self._by_sidecar, f": {error}" if error else "",
        )  # fmt: skip

    def _load(self) -> None:
        samples = Samples(self._source.manifest.entries)
        model = self._worker.get_model()
        _abandon(model)  # a reload by others that failed
        inner = model.load_weights
        loaded: set[str] = set()

        def noted(weights: Any) -> Any:
            out = inner(weights)
            loaded.update(out or ())
            return out

        model.load_weights = noted  # what it loaded, reload_weights does not tell
        try:
            with contextlib.closing(self._tensors(samples)) as tensors:
                self._worker.reload_weights(weights_iterator=tensors)
                if next(tensors, None) is not None:
                    raise LoadError("vLLM's loader did not take all tensors")
        finally:
            del model.load_weights
        if self._worker.device is not None and self._worker.device.type == "cuda":
            torch.cuda.synchronize()
        # Where names were compared before, those that no checkpoint has are no news. A quantized layer has other parameters than its checkpoint.
        if not self._checked and loaded and self._worker.vllm_config.model_config.quantization is None:
            missing = sorted({name for name, _ in model.named_parameters()} - {n.replace(".base_layer.", ".") for n in loaded} - loaded)
            if missing:
                raise CheckpointError(f"{self._request.source}: nothing for {missing[0]!r} and {len(missing) - 1} other parameters")
        self._source.check()
        digest = samples.digest(self._source.manifest.configs)
        if digest != self._source.manifest.digest:
            raise CheckpointError(f"{self._request.source}: what came is {digest}, and not {self._source.manifest.digest}; it changed meanwhile: load again")

    def _tensors(self, samples: Samples) -> Generator[tuple[str, torch.Tensor], None, None]:
        manifest = self._source.manifest
        for e in manifest.entries:
            if e.nbytes == 0:
                yield e.name, torch.empty(e.shape, dtype=getattr(torch, DTYPES[e.dtype]))
        whole: dict[int, torch.Tensor] = {}  # those that come in several pieces
        for piece, base in self._placed(samples):
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
                yield e.name, data.view(kind).reshape(e.shape)
                del data
            del base
            with self._changed:
                self._bytes += piece.nbytes
                if self._stop:
                    raise LoadError(f"the load was stopped: {self._stop}")

    def _placed(self, samples: Samples) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Pieces in memory of the engine's device."""
        device = self._worker.device
        on_gpu = device is not None and device.type == "cuda"
        if self._request.copies == "sidecar" or on_gpu:
            with contextlib.closing(Copied(self, samples, device if on_gpu else None)) as copied:
                yield from copied
            return
        held: set[int] = set()
        for block in self._stream:
            _sample(samples, block)
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
    """Pieces in the device's memory, by copies of the sidecar that run ahead. A copy that it does not take or finish is made by PyTorch, after its lease
    has ended: until then the sidecar may still write."""

    def __init__(self, load: Load, samples: Samples, device: torch.device | None) -> None:
        self._load, self._samples, self._device = load, samples, device
        self._arena = load._source.arena
        self._size = -(-load._request.piece_bytes // ALIGN) * ALIGN
        self._client: kvspray.WorkerClient | None = None
        self._region: kvspray.Region | None = None
        self._ends: dict[int, kvspray.Completion] = {}
        nbytes = SLOTS * self._size
        if device is None:
            self._region = kvspray.Region.alloc(nbytes)
            self._memory = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if load._request.copies != "none":
            self._connect()
        self._open: list[tuple[Block, int, int]] = []  # copies under way, of the thread until it ends
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
            self._client = kvspray.WorkerClient(
                self._load._request.sidecar(), engine=kvspray.EngineInfo("vllm", vllm.__version__, f"load-{os.getpid()}"), layers=1, deadline_s=COPY_S, log=_log
            )
            self._client.register([])
            self._client.wait_connected(CONNECT_S)
            self._client.add_regions([self._arena.region, self._region], ADD_S)
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
            # Within the GPU this costs next to nothing, and the slot is free before vLLM's loader has let go of the tensors.
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
                _sample(self._samples, block)
                slot = self._take_slot()
                self._open.append((block, slot, self._copy(block, slot)))
                if len(self._open) == SLOTS - 1:
                    self._end(*self._open.pop(0))
            while self._open:
                self._end(*self._open.pop(0))
            self._out.put(None)
        except BaseException as err:
            self._out.put(err)

    def _take_slot(self) -> int:
        while not self._stop:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=WAIT_S)
            if self._open:
                self._end(*self._open.pop(0))
        raise LoadError("the load was stopped")

    def _copy(self, block: Block, slot: int) -> int:
        """0: the sidecar takes it not."""
        if self._client is None or self._region is None or not self._client.connected:
            return 0
        pieces = [(block.at + block.lead, slot * self._size, block.piece.nbytes)]
        return self._client.copy(self._arena.region, self._region, pieces, req="weights", deadline_s=COPY_S)

    def _end(self, block: Block, slot: int, lease: int) -> None:
        ok = False
        if lease:
            end = self._await(lease)
            ok = end.ok
            if not ok:
                _log.warning("kvspray: PyTorch copies a piece of the weights: %s (%s)", end.status.name, end.reason)
        if ok:
            self._load.copied()
        else:
            view = (ctypes.c_uint8 * block.piece.nbytes).from_address(block.address)
            self._slot(slot, block.piece.nbytes).copy_(torch.frombuffer(view, dtype=torch.uint8))
            if self._device is not None:
                torch.cuda.current_stream().synchronize()
        block.give_back()
        self._out.put((block.piece, slot))

    def _await(self, lease: int) -> kvspray.Completion:
        """The sidecar writes nothing of it any more."""
        assert self._client is not None
        while lease not in self._ends:
            self._client.wait(WAIT_S)
            for c in self._client.poll():
                self._ends[c.lease] = c
        return self._ends.pop(lease)

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        for block, _, lease in self._open:  # the memory goes to others
            if lease and self._client is not None:
                self._client.cancel(lease, "the load ends")
                self._await(lease)
            block.give_back()
        if self._client is not None:
            self._client.close()
        if self._device is None and self._region is not None:
            del self._memory
            self._region.close()


# ---- vLLM


def _guard(worker: Any, load: Load) -> None:
    """Of the worker itself: what calls it meets this first. The memory of the weights alone may wake up, for the next load; vLLM schedules
    nothing while the other memory sleeps."""

    def refuse(name: str) -> None:
        raise RuntimeError(f"kvspray: {name} is refused, since the weights of this engine are incomplete: {_loads[worker].why()}. Run kvspray load")

    def wake_up(tags: list[str] | None = None) -> None:
        if tags == ["weights"]:
            type(worker).wake_up(worker, tags)
        elif worker.rank == worker.parallel_config.world_size - 1:
            # No other rank fails: vLLM reads no more answers after the first failure, and takes the others for those of the next call.
            refuse("wake_up")

    def execute_model(*_: Any, **__: Any) -> None:
        refuse("execute_model")

    def sleep(level: int = 1) -> None:
        load.stop("the engine was put to sleep")  # nothing may write to the memory that goes
        type(worker).sleep(worker, level)

    worker.wake_up, worker.execute_model, worker.sleep = wake_up, execute_model, sleep


def _unguard(worker: Any) -> None:
    for name in GUARDED:
        worker.__dict__.pop(name, None)


def _abandon(model: torch.nn.Module) -> None:
    """Ends a reload that did not end by itself. Without this the next one would go on with tensors of this one."""
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


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from kvspray_vllm.connector import KVSprayConnector

    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector if isinstance(connector, KVSprayConnector) else None


def _named(worker: Any, digest: str) -> str:
    from kvspray_vllm.weights import with_draft

    return with_draft(worker.vllm_config, digest, _log)
