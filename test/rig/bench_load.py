"""How fast `kvspray load` reads weights, beside plain reads of the same files and vLLM's own
reload: python test/rig/bench_load.py --engine --peer

The ways take turns, so that a busy machine is equally busy for all. "cold": the files are not in
the page cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import mmap
import os
import pathlib
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "e2e"))

import cluster as rig

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
THREADS, READ = 8, 8 << 20

MAKE = """
import json, pathlib, sys, torch
import secrets
from safetensors.torch import save_file
dir, shape, layers = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
h, i, v = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
q, k = (shape[f"num_{x}_heads"] * shape["head_dim"] for x in ("attention", "key_value"))
gen = torch.Generator().manual_seed(1)
def make(*dims):
    t = torch.randint(-2048, 2048, dims, generator=gen, dtype=torch.int16)
    return t.to(torch.bfloat16) / 65536
tensors = {"model.embed_tokens.weight": make(v, h), "lm_head.weight": make(v, h)}
tensors["model.norm.weight"] = make(h)
for n in range(layers):
    of = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (k, h), "self_attn.v_proj": (k, h),
          "self_attn.o_proj": (h, q), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h),
          "mlp.down_proj": (h, i), "input_layernorm": (h,), "post_attention_layernorm": (h,)}
    tensors |= {f"model.layers.{n}.{name}.weight": make(*dims) for name, dims in of.items()}
names = sorted(tensors)
for part in range(2):
    of_file = {n: tensors[n] for n in names[part::2]}
    save_file(of_file, dir / f"model-{part}.safetensors", metadata={"format": "pt"})
"""


def checkpoint(dir: pathlib.Path, layers: int) -> pathlib.Path:
    shutil.copytree(
        rig.ROOT / ".build" / "models" / "tiny-llama",
        dir,
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    config = json.loads((dir / "config.json").read_text())
    (dir / "config.json").write_text(json.dumps(config | SHAPE | {"num_hidden_layers": layers}))
    subprocess.run(
        [sys.executable, "-c", MAKE, str(dir), json.dumps(SHAPE), str(layers)], check=True
    )
    return dir


def files(dir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(dir.glob("*.safetensors"))


def evict(dir: pathlib.Path) -> None:
    for path in files(dir):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Plain:
    """Threads that read the files into memory that is used again and again."""

    def __init__(self, dir: pathlib.Path) -> None:
        self.fds = [(os.open(p, os.O_RDONLY), p.stat().st_size) for p in files(dir)]
        self.memory = mmap.mmap(-1, 1 << 30)
        self.view = memoryview(self.memory)
        self.view[:] = bytes(len(self.view))

    def __call__(self) -> int:
        jobs = [(fd, at) for fd, size in self.fds for at in range(0, size, READ)]
        slots = len(self.view) // READ

        def read(job: tuple[int, tuple[int, int]]) -> int:
            n, (fd, at) = job
            slot = n % slots * READ
            return os.preadv(fd, [self.view[slot : slot + READ]], at)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(read, enumerate(jobs)))


began = 0.0  # of the reads of what ran last, after it took its memory


def streamed(source: Any) -> int:
    from kvspray.checkpoint import Samples
    from kvspray.weightstream import Stream

    samples = Samples(source.manifest.entries)
    stream, got = Stream(source), 0
    global began
    began = time.monotonic()
    for block in stream:
        for part in block.piece.parts:
            samples.take(part.entry, part.offset, block.view[part.at : part.at + part.nbytes])
        got += block.piece.nbytes
        block.give_back()
    assert samples.digest(source.manifest.configs) == source.manifest.digest
    return got


def opened(where: str, socket: str | None = None) -> Callable[[], int]:
    """As the load does it after its check, which has read the samples of the digest."""
    from kvspray.weightstream import open_source

    first = open_source(where, socket)
    digest = first.manifest.digest
    first.close()

    def run() -> int:
        source = open_source(where, socket, digest=digest)
        try:
            return streamed(source)
        finally:
            source.stop()
            source.close()

    return run


def rounds(
    ways: dict[str, Callable[[], int]], count: int, before: Callable[[], None]
) -> dict[str, list[float]]:
    """GB/s. Of ways that take memory first, also without that time."""
    global began
    out: dict[str, list[float]] = {}
    for n in range(count + 1):
        for name in list(ways)[n % len(ways) :] + list(ways)[: n % len(ways)]:
            before()
            began = start = time.monotonic()
            got = ways[name]()
            end = time.monotonic()
            if n:  # the first round warms up
                out.setdefault(name, []).append(got / (end - start) / 1e9)
                if began != start:
                    out.setdefault(name + ", reads alone", []).append(got / (end - began) / 1e9)
    return out


def show(what: str, rates: dict[str, list[float]], results: dict[str, Any]) -> None:
    for name, r in rates.items():
        print(
            f"{what:10} {name:42} {statistics.median(r):6.2f} GB/s ({min(r):.2f} to {max(r):.2f})",
            flush=True,
        )
    results[what] = rates


def engine_ways(model: pathlib.Path) -> dict[str, Callable[[], int]]:
    import engines

    os.environ.update(engines.ENV)
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
    )
    core = llm.llm_engine.engine_core.engine_core
    size = sum(p.stat().st_size for p in files(model))

    def rpc(method: str, *args: Any, **kwargs: Any) -> Any:
        return core.model_executor.collective_rpc(method, args=args, kwargs=kwargs)[0]

    def native() -> int:
        rpc("reload_weights", weights_path=str(model))
        return size

    def ours() -> int:
        asked = json.dumps({"source": str(model)})
        digest = rpc("kvspray_load_check", asked)["digest"]
        token = secrets.token_hex(8)
        rpc("kvspray_load_arm", token)
        rpc("wake_up", tags=["weights"])  # as after a sleep, which this does not measure
        said = rpc("kvspray_load_begin", token, asked, digest)
        assert "error" not in said, said
        while (said := rpc("kvspray_load_poll", token, "1"))["state"] == "loading":
            pass
        assert said["state"] == "loaded", said
        rpc("kvspray_load_finish", token)
        rpc("kvspray_load_release", token)
        return size

    return {"vLLM's reload_weights": native, "kvspray load, checks included": ours}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--layers", type=int, default=20)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--dir", type=pathlib.Path, help="for the checkpoint (default: a temporary one)")
    p.add_argument(
        "--model", type=pathlib.Path, help="a checkpoint that is there, instead of a made one"
    )
    p.add_argument("--engine", action="store_true", help="also load into vLLM on this CPU")
    p.add_argument("--peer", action="store_true", help="also between two sidecars on loopback")
    p.add_argument("--no-files", action="store_true", help="not from the page cache and the disk")
    p.add_argument("--json", type=pathlib.Path, default=rig.ROOT / ".build" / "bench" / "load.json")
    args = p.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="kvs-", dir=args.dir))
    results: dict[str, Any] = {}
    try:
        model = args.model or checkpoint(work / "model", args.layers)
        print(
            f"{sum(f.stat().st_size for f in files(model)) / 1e9:.2f} GB, {os.cpu_count()} cores",
            flush=True,
        )
        if not args.no_files:
            ways: dict[str, Callable[[], int]] = {
                "8 threads of preadv": Plain(model),
                "kvspray: pieces, digest": opened(str(model)),
            }
            show("page cache", rounds(ways, args.rounds, lambda: None), results)
            show("disk", rounds(ways, args.rounds, lambda: evict(model)), results)
        if args.peer:
            peer(model, work, args.rounds, results)
        if args.engine:
            show("engine", rounds(engine_ways(model), args.rounds, lambda: None), results)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(work)


def peer(model: pathlib.Path, work: pathlib.Path, count: int, results: dict[str, Any]) -> None:
    for transport in ("shm", "tcp"):
        # Hashes of all blocks are for tests.
        config = {
            "transports": {"order": [transport]},
            "trace": {"block_hashes": "", "transfers": ""},
            "log": {"level": "warn"},
        }
        both = [rig.Sidecar(f"{name}-{transport}", work, config) for name in ("from", "to")]
        for s in both:
            s.start()
        command = [
            sys.executable,
            "-m",
            "kvspray.offer",
            str(model),
            "--listen",
            "127.0.0.1:0",
            "--socket",
            both[0].socket,
        ]
        offer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert offer.stdout is not None
            url = offer.stdout.readline().split()[-1]

            rates = rounds(
                {"kvspray: from the other node": opened(url, both[1].socket)}, count, lambda: None
            )
            raw = [bench(transport) for _ in range(count)]
            rates["kvspray-bench copy, one lane"] = [r["gb_per_s"] for r in raw]
            rates["its baseline"] = [r["baseline_gb_per_s"] for r in raw]
            show(transport, rates, results)
        finally:
            offer.terminate()
            offer.wait(30)
            for s in both:
                s.stop()


def bench(transport: str) -> dict[str, float]:
    """The same transport between two processes, without sidecars, and what the machine can do."""
    command = [
        rig.BINARY.with_name("kvspray-bench"),
        "copy",
        "--transport",
        transport,
        "--blocks",
        "1MiB",
        "--rounds",
        "1",
        "--total",
        "512MiB",
        "--json",
    ]
    if transport == "tcp":
        command += ["--integrity", "crc32c"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(run.stdout)["results"][0])


if __name__ == "__main__":
    main()
