"""What the scripts of this directory share: real sidecars, and engines in processes of their
own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import pathlib
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

import kvspray

TIMEOUT_S = 60.0
TOKENS = 16  # of a block
LOOK_S = 0.01


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not done():
        if time.monotonic() > end:
            raise SystemExit(f"after {TIMEOUT_S} s still not: {what}")
        time.sleep(LOOK_S)


def layout(model: str, layers: int, blocks: int, page: int, regions: int = 1) -> dict[str, Any]:
    """Of that many regions in turns, layer after layer, a page of one head for each block."""
    all_ = [
        {
            "name": f"l{i}",
            "index": i,
            "region": i % regions,
            "base": i // regions * blocks * page,
            "block_stride": page,
            "page_bytes": page,
        }
        for i in range(layers)
    ]
    group = {
        "tokens_per_block": TOKENS,
        "strategy": "packed_hnd",
        "params": {"heads": 1},
        "num_blocks": blocks,
        "layers": all_,
    }
    said = kvspray.identity(
        model_config=model,
        weights="none",
        layers=layers,
        head_size=page // TOKENS // 4,
        groups="full",
        rope="",
        backoff=0,
        speculative="",
    )
    return {"model": model, "dtype": "bfloat16", "groups": [group], "identity": said}


class Sidecar:
    def __init__(self, binary: str, base: pathlib.Path, name: str, sets: list[str]) -> None:
        self.base = base / name
        self.base.mkdir(mode=0o700)
        self.socket, ready = str(self.base / "s"), self.base / "ready.json"
        command = [
            binary,
            "serve",
            "--socket",
            self.socket,
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--ready-file",
            str(ready),
        ]
        for s in ["peer.gossip.listen=off", f"transports.shm.dir={base}", *sets]:
            command += ["--set", s]
        log = open(self.base / "log", "wb")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the {name} sidecar does not serve:\n{self.tail()}")
            time.sleep(LOOK_S)
        self.http = json.loads(ready.read_text())["http"]

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.http}/debug/state", timeout=TIMEOUT_S) as reply:
            return dict(json.load(reply))

    def log(self) -> str:
        return (self.base / "log").read_text()

    def tail(self) -> str:
        return self.log()[-3000:]

    def notable(self, n: int) -> list[str]:
        """The last lines that are about GPUs, or worse."""
        return [
            line
            for line in self.tail().splitlines()
            if "gpu" in line or "WARN" in line or "ERROR" in line
        ][-n:]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        engine = make(*args)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            name, given, named = call
            pipe.send((True, getattr(engine, name)(*given, **named)))
        engine.close()
    except BaseException as x:
        pipe.send((False, "".join(traceback.format_exception(x))[-2000:]))


class Remote:
    """An engine in a process of its own. The first answer shows that it is there."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.pipe.send((name, args, kwargs))

    def get(self) -> Any:
        if not self.pipe.poll(2 * TIMEOUT_S):
            raise SystemExit("an engine says nothing")
        good, value = self.pipe.recv()
        if not good:
            raise SystemExit(f"an engine failed: {value}")
        return value

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.start(name, *args, **kwargs)
        return self.get()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(20)
        self.process.kill()
