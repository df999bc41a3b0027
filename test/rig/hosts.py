"""Where the rig's engines are: CPU engines of `make env`, or CUDA engines that
test/gpu/engines/unpack.py unpacked."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

from kvspray.trial import engines
from kvspray.trial.engines import Host


def cpu(build: pathlib.Path, nixl: bool = False) -> Host:
    python = build / ("venv-nixl" if nixl else "venv") / "bin" / "python"
    host = engines.cpu(str(python), build / "models")
    # with_modules puts others ahead of this command's own.
    return dataclasses.replace(
        host, env={**host.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    )


def cuda(root: pathlib.Path) -> Host:
    """The host's own Python and torch, with the packages below root ahead of its own."""
    folders = [root / name for name in ("nixl", "vllm", "deps", "own", "peers")]
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
    }
    host = engines.cuda(sys.executable, root / "models")
    return dataclasses.replace(host, env={**host.env, **env})
