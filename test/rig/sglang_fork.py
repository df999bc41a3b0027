"""Starts SGLang servers as forks of one process that has imported SGLang once: an import takes each
of a server's three processes 20 processor seconds otherwise. Reads {"args", "env", "log"} as a line
of JSON, and writes the server's pid. A server is in a group of its own.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys

MODULES = (
    "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.tokenizer_manager", "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.llama", "sglang.srt.disaggregation.prefill",
    "sglang.srt.disaggregation.decode", "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.unified_radix_cache", "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.model_loader.loader", "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama", "kvspray_sglang.hicache", "kvspray_sglang.pd",
)  # fmt: skip


RESERVE = 1 << 30  # that a host pool leaves free; SGLang wants 10 GiB


def nixl_of_memory() -> None:
    """SGLang calls its pools VRAM wherever they are, and NIXL refuses to register the CPU's memory
    as such."""
    from nixl._api import nixl_agent

    def renamed(method):
        def call(*args, **kwargs):
            kwargs = {k: "DRAM" if v == "VRAM" else v for k, v in kwargs.items()}
            return method(
                *("DRAM" if isinstance(a, str) and a == "VRAM" else a for a in args), **kwargs
            )

        return call

    for name in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, renamed(getattr(nixl_agent, name)))


def senders_without_cuda() -> None:
    """SGLang copies page numbers through pinned memory for these two, with CUDA's events; it has a
    way without, which others use."""
    from sglang.srt.disaggregation.mooncake import conn as mooncake
    from sglang.srt.disaggregation.nixl import conn as nixl

    for sender in (mooncake.MooncakeKVSender, nixl.NixlKVSender):
        sender.supports_host_tensor_indices = False


def pages_without_cuda() -> None:
    """The file backend reads each page into pinned memory of its own, which needs CUDA."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost as Pool

    original = Pool.get_dummy_flat_data_page

    def plain(pool):
        pool.pin_memory = False
        return original(pool)

    Pool.get_dummy_flat_data_page = plain


def serve(order: dict) -> None:
    os.setsid()
    fd = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for to, fr in ((0, null), (1, fd), (2, fd)):
        os.dup2(fr, to)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["env"])
    path = [p for p in order["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path += [p for p in path if p not in sys.path]
    sys.argv = ["sglang.launch_server", *order["args"]]
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if order["env"].get("KVSPRAY_BENCH_NIXL"):
        nixl_of_memory()
    senders_without_cuda()
    pages_without_cuda()
    args = prepare_server_args(sys.argv[1:])
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main() -> None:
    multiprocessing.set_start_method("fork")
    # SGLang asks for new processes, which import everything again.
    multiprocessing.set_start_method = lambda *_, **__: None
    for name in MODULES:
        try:
            __import__(name)
        except ImportError as err:
            print(f"{name}: {err}", file=sys.stderr, flush=True)
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE
    gc.freeze()  # a collection would write to all objects, and so copy their pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries what ends
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                serve(json.loads(line))
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
