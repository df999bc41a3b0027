"""What an engine needs of the host that it runs on: CPU engines of `make env`, or CUDA engines that
test/gpu/engines/unpack.py unpacked."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Host:
    device: str
    python: str
    models: pathlib.Path
    env: dict[str, str]
    args: tuple[str, ...]  # of vLLM's server
    block: int  # tokens
    dtype: str
    memory: str  # of kv_connector_extra_config

    def with_modules(self, folder: pathlib.Path) -> Host:
        """The same, whose engines also find the modules of a directory."""
        path = ":".join(p for p in (str(folder), self.env.get("PYTHONPATH", "")) if p)
        return dataclasses.replace(self, env={**self.env, "PYTHONPATH": path})


def cpu(build: pathlib.Path, nixl: bool = False) -> Host:
    # In bfloat16 sums depend on how a prompt is cut, the more so where the CPU has AMX: of one
    # prompt in ten a near tie between two tokens turns there.
    dtype, block = "float32", 32
    env = {
        # The worker lives in the engine core's process. In one of its own, both ends of the queue
        # between them poll for a second after every step, and six polling processes on two cores
        # keep each other, and every figure, waiting.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",
        **QUIET,
    }
    python = build / ("venv-nixl" if nixl else "venv") / "bin" / "python"
    args = ("--enforce-eager", "--dtype", dtype, "--block-size", str(block))
    return Host("cpu", str(python), build / "models", env, args, block, dtype, "memfd")


def cuda(root: pathlib.Path) -> Host:
    """The host's own Python and torch, with the packages below root ahead of its own."""
    dtype, block = "bfloat16", 16
    folders = [root / "nixl", root / "vllm", root / "deps", root / "own"]
    libraries = ":".join(p for p in (str(root / "lib"), os.environ.get("LD_LIBRARY_PATH", "")) if p)
    env = {
        "PYTHONPATH": ":".join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": libraries,
        # FlashInfer is not carried. vLLM samples with it by default, and dies where it cannot be
        # imported.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(root / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        **QUIET,
    }
    return Host(
        "cuda",
        sys.executable,
        root / "models",
        env,
        ("--dtype", dtype, "--block-size", str(block)),
        block,
        dtype,
        "auto",
    )
