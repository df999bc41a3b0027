"""Pages and answers over a pairwise cover of cache shapes, graph modes, model runners and
attention backends.

For each shape there is a ring of engines, one for each graph mode, as kv_both and with a sidecar
of its own: a prompt is prefilled by one and decoded by the next, by turns in both ways that a
router has. Runners and backends are given out so that each value of each of the four meets each
value of the others. What D would have answered alone is its own answer to the same prompt
without a transfer (Ring.alone); it has no prefix cache. All engines are forked from one process
that has imported vLLM once.
"""

from __future__ import annotations

import argparse
import concurrent.futures as cf
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import unpacked  # noqa: F401

# isort: split
from clients import prompt
from cluster import Failed, Sidecar, total, wait_for
from pairs import (
    CAPTURE,
    ROOT,
    TIE,
    Rig,
    as_destination,
    as_source,
    look_at,
    new_xfer,
    say,
)
from servers import kvspray_config

NEEDS: set[str] = set()
GRAPHS = ("eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
RUNNERS = ("v2", "v1")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model": "llama-small",
        "cpu": "tiny-llama",
        "backends": ("FLASH_ATTN", "TRITON_ATTN"),
    },
    "mla": {"model": "mla", "cpu": "tiny-llama", "backends": ("FLASH_ATTN_MLA", "TRITON_MLA")},
    "window": {"model": "window", "cpu": "tiny-gemma3", "backends": ("FLASH_ATTN", "TRITON_ATTN")},
    "fp8": {
        "model": "llama-small",
        "cpu": "tiny-llama",
        "backends": ("FLASH_ATTN", "TRITON_ATTN"),
        "args": {"kv_cache_dtype": "fp8"},
    },
}
# With recurrent states: part hybrid. vLLM's second model runner clears blocks too early for an
# engine that sends.
HYBRIDS: dict[str, dict[str, Any]] = {
    name: {"model": model, "cpu": cpu, "backends": SHAPES[like]["backends"], "runner": "v1"}
    for name, model, cpu, like in (
        ("gdn", "qwen3.5", "tiny-qwen3_next", "llama"),
        ("mamba2", "granite-4", "tiny-granite4", "llama"),
        ("groups", "nemotron-h", "tiny-granite4", "llama"),
        ("mamba1", "jamba", "tiny-granite4", "llama"),
        ("kda", "kimi-linear", "tiny-qwen3_next", "mla"),
        ("conv", "lfm2", "tiny-lfm2", "llama"),
    )
}
# vLLM's rotary kernel for CPUs computes wrong positions for LFM2; see docs/vllm-models.md.
HYBRIDS["conv"]["cpu_args"] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# Needs CUTLASS's Python, which the host lacks, and is for several GPUs.
HYBRIDS["kda"]["env"] = {"VLLM_KIMI_K3_GEMM_AR": "0"}
ALL = SHAPES | HYBRIDS
STEP, MAX_LEN, CACHE = 256, 4608, 192 << 20
LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    33,
    100,
    255,
    256,
    257,
    300,
    511,
    513,
    700,
    1024,
    1025,
    1500,
    2047,
    2048,
    3000,
)
ANSWER = 8  # tokens
STRIDE = 7  # through the lengths: a few prompts have all sizes, too
LONG = (*LENGTHS[:-2], 8000, 16000)  # of models with recurrent states
SHORTEST = {"window": 2, **dict.fromkeys(HYBRIDS, 3)}  # prompt that moves, in tokens


def options(parser: Any) -> None:
    parser.add_argument("--cover-shapes", default=",".join(SHAPES), help="of part cover")
    parser.add_argument("--cover-graphs", default=",".join(GRAPHS))
    parser.add_argument("--cover-prompts", type=int, default=20, help="for each pair of engines")
    parser.add_argument(
        "--cover-start", type=float, default=300, help="seconds until all engines are up"
    )


def settings(name: str, of_graph: str) -> tuple[str, int]:
    """Runner and backend of an engine, so that every two of the four meet."""
    shape, graph = list(ALL).index(name), GRAPHS.index(of_graph)
    return ALL[name].get("runner", RUNNERS[(shape + graph) % 2]), (shape // 2 + graph) % 2


class Ring:
    def __init__(self, rig: Rig, shape: str, graphs: list[str]) -> None:
        self.rig, self.shape, self.graphs = rig, shape, graphs
        long = shape in HYBRIDS and rig.host.device == "cuda"
        self.lengths = LONG if long else LENGTHS
        self.sidecars: list[Sidecar] = []
        self.engines: list[Any] = []

    def name(self, i: int) -> str:
        return f"{self.shape}-{i}-{self.graphs[i]}"

    def start(self) -> None:
        """Forks the engines; there must be no threads yet."""
        from engines import Engine

        gpu, of = self.rig.host.device == "cuda", ALL[self.shape]
        for i in range(len(self.graphs)):
            sidecar = Sidecar(self.name(i), self.rig.run, self.rig.sidecar_config())
            sidecar.log = self.rig.logs / f"{self.name(i)}.sidecar.log"
            self.sidecars.append(sidecar.start())
        for i, graph in enumerate(self.graphs):
            runner, backend = settings(self.shape, graph)
            args: dict[str, Any] = {
                # vLLM's CPU kernels of gated delta nets have no other type than bfloat16.
                "dtype": "bfloat16" if self.shape in HYBRIDS else self.rig.host.dtype,
                "block_size": self.rig.host.block,
                "max_model_len": MAX_LEN,
                "max_num_batched_tokens": STEP,
                "kv_cache_memory_bytes": CACHE,
                "enable_prefix_caching": False,
                "enforce_eager": not gpu or graph == "eager",
            }
            if self.shape in HYBRIDS:
                args["logits_processors"] = ["kvspray_rig:FirstToken"]
                args["max_model_len"] = max(self.lengths) + STEP
            env = {"KVSPRAY_RIG_PAGES": str(self.rig.pages / self.name(i))}
            if not gpu:
                args |= of.get("cpu_args", {})
            if gpu:
                args |= {
                    "gpu_memory_utilization": 0.02,
                    "attention_backend": of["backends"][backend],
                    **of.get("args", {}),
                }
                if self.shape in HYBRIDS:
                    # vLLM's default for gated delta nets needs FlashInfer.
                    args["additional_config"] = {"gdn_prefill_backend": "triton"}
                env |= {
                    "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
                    "VLLM_CACHE_ROOT": str(self.rig.run / f"cache-{self.name(i)}"),
                }
                env["TORCHINDUCTOR_CACHE_DIR"] = str(self.rig.run / f"inductor-{self.name(i)}")
                env |= of.get("env", {})
                if graph != "eager":
                    pieces = graph in ("PIECEWISE", "FULL_AND_PIECEWISE")
                    args["compilation_config"] = {
                        "cudagraph_mode": graph,
                        "cudagraph_capture_sizes": [n for n in CAPTURE if n <= STEP],
                        **({} if pieces else {"mode": 0}),
                    }
            kv = kvspray_config(
                self.sidecars[i].socket,
                "kv_both",
                self.rig.host.memory,
                ("kvspray_rig", "PagesConnector"),
            )
            model = str(self.rig.host.models / of["model" if gpu else "cpu"])
            self.engines.append(
                Engine(self.name(i), model, self.rig.logs / f"{self.name(i)}.log", kv, env, **args)
            )

    def wait_up(self, end: float) -> None:
        for i, engine in enumerate(self.engines):
            engine.wait_up(max(1.0, end - time.monotonic()))
            say(f"{self.name(i)} is up")
            wait_for(f"sessions at {self.name(i)}", lambda i=i: self.attached(i), 60, tick=0.1)

    def attached(self, i: int) -> bool:
        return total(self.sidecars[i].metrics(), "kvspray_engine_sessions") >= 2

    def edge(self, i: int, count: int) -> dict[str, Any]:
        """Prompts from one engine to the next."""
        j = (i + 1) % len(self.engines)
        p, d, peer = self.engines[i], self.engines[j], self.sidecars[i].endpoint
        runner, backend = settings(self.shape, self.graphs[i])
        out: dict[str, Any] = {
            "shape": self.shape,
            "p": self.graphs[i],
            "d": self.graphs[j],
            "p_runner": runner,
            "p_backend": ALL[self.shape]["backends"][backend],
            "prompts": 0,
            "pages": 0,
            "pages_differ": 0,
            "equal": 0,
            "tied": 0,
            "problems": [],
            "differences": [],
        }
        for k in range(count):
            n = self.lengths[k * STRIDE % len(self.lengths)]
            n = max(n, SHORTEST.get(self.shape, 1))
            ids, rid = prompt(n, (self.shape, i, k)), f"cmpl-look{self.shape}{i}-{k}-0"
            if k % 2:
                xfer = new_xfer()
                first = p.add(ids, 1, kv=as_source(xfer), rid=rid)
                second = d.add(ids, ANSWER, kv=as_destination(xfer, peer), rid=rid)
                first.result()
                got = second.result()
            else:
                kv = p.run(ids, 1, kv=as_source(), rid=rid).kv
                if not kv:
                    out["problems"].append(f"{rid}: P returned no kv_transfer_params")
                    continue
                got = d.run(ids, ANSWER, kv=kv, rid=rid)
            want = self.alone(d, ids, f"cmpl-alone{i}-{k}-0")
            out["prompts"] += 1
            moved = look_at(
                self.rig,
                rid.removeprefix("cmpl-").removesuffix("-0"),
                (self.name(i), "computed"),
                (self.name(j), "loaded"),
            )
            if isinstance(moved, str):
                out["problems"].append(f"{moved} ({n} tokens)")
                continue
            out["pages"] += moved.pages
            out["pages_differ"] += moved.differ
            if moved.differ:
                out["problems"].append(
                    f"{rid}: {moved.differ} of {moved.pages} pages are others at D, the first is "
                    f"{moved.first}"
                )
            if got.tokens[0] == want:
                out["equal"] += 1
                continue
            at = next(x for x, (a, b) in enumerate(zip(want, got.tokens[0], strict=True)) if a != b)
            # P has another backend, and its pages differ from D's own by rounding. How far the two
            # engines are apart at this token by themselves is the measure for a tie.
            both = (want[at], got.tokens[0][at])
            near, far = (engine.run(ids + want[:at], 1, logprobs=20).logprobs for engine in (d, p))
            apart = max((abs(near[t] - far[t]) for t in both if t in near and t in far), default=0)
            a, b = near.get(both[0]), near.get(both[1])
            tied = a is not None and b is not None and abs(a - b) <= max(TIE, 2 * apart)
            out["tied"] += tied
            out["differences"].append(
                {"prompt": n, "at": at, "logprob_alone": a, "logprob_pair": b, "apart": apart}
            )
            if not tied:
                out["problems"].append(f"{rid}: answers differ: {out['differences'][-1]}")
        return out

    def alone(self, d: Any, ids: list[int], rid: str) -> list[int]:
        """D's own answer. With recurrent states a step of several tokens and one of a decode round
        otherwise, and after a transfer D computes the prompt's last token in one of a decode. Here
        it does so, too: the prompt's last token is the first one that it must generate."""
        if self.shape not in HYBRIDS:
            return d.run(ids, ANSWER, rid=rid).tokens[0]
        return d.run(ids[:-1], 1 + ANSWER, rid=rid, first=ids[-1]).tokens[0][1:]

    def run(self, count: int) -> list[dict[str, Any]]:
        try:
            return [self.edge(i, count) for i in range(len(self.engines))]
        except Exception as err:  # one ring's end is not that of the others
            return [
                {
                    "shape": self.shape,
                    "problems": [f"{self.shape}: {type(err).__name__}: {err}"[:1500]],
                }
            ]

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()
        for sidecar in self.sidecars:
            sidecar.stop()


def inside(args: argparse.Namespace) -> dict[str, Any]:
    """In a process that can import vLLM."""
    import engines

    rig = Rig(args)
    shapes, graphs = args.cover_shapes.split(","), args.cover_graphs.split(",")
    say("importing vLLM once for all engines ...")
    engines.preload(None if args.device == "cpu" else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    rings = [Ring(rig, shape, graphs) for shape in shapes]
    edges: list[dict[str, Any]] = []
    problems: list[str] = []
    start = time.monotonic()
    try:
        for ring in rings:
            ring.start()
        for ring in list(rings):
            try:
                ring.wait_up(start + args.cover_start)
            except Exception as err:
                problems.append(f"{ring.shape}: {type(err).__name__}: {err}"[:2500])
        up = time.monotonic() - start
        ready = [r for r in rings if not any(p.startswith(r.shape + ":") for p in problems)]
        with cf.ThreadPoolExecutor(max(1, len(ready))) as pool:
            for got in pool.map(lambda r: r.run(args.cover_prompts), ready):
                edges += got
        return {
            "up_s": up,
            "took_s": time.monotonic() - start - up,
            "edges": edges,
            "problems": problems + [p for e in edges for p in e["problems"]],
        }
    finally:
        for ring in rings:
            ring.stop()
        rig.close(keep_logs=True)


def run(stage: Any) -> tuple[dict[str, Any], list[str]]:
    """Runs itself with vLLM's environment."""
    rig = stage.rig
    values = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(rig.args).items()}
    result = rig.run / "cover.json"
    import os

    done = subprocess.run(
        [rig.host.python, __file__, json.dumps(values), str(result)],
        env={**os.environ, **rig.host.env},
        cwd=ROOT,
    )
    if not result.exists():
        raise Failed(f"cover ended with status {done.returncode} and no result")
    got = json.loads(result.read_text())
    print(
        f"{'shape':8} {'P':19} {'runner':6} {'backend':15} {'D':19} {'prompts':>7} {'pages':>7} "
        f"{'differ':>6} {'equal':>5} {'tied':>4}"
    )
    for e in got["edges"]:
        if "p" in e:
            print(
                f"{e['shape']:8} {e['p']:19} {e['p_runner']:6} {e['p_backend']:15} {e['d']:19} "
                f"{e['prompts']:7} {e['pages']:7} {e['pages_differ']:6} "
                f"{e['equal']:5} {e['tied']:4}"
            )
    problems = got["problems"] + [
        f"{e['shape']}: {e['p']} to {e['d']}: no page was compared"
        for e in got["edges"]
        if "p" in e and not e["pages"]
    ]
    return got, problems if got["edges"] else [*problems, "no pair of engines was compared"]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["out"] = pathlib.Path(given["out"])
    given["tag"] = "-".join(filter(None, (given["tag"], "cover")))  # its logs beside others
    given["model"] = given["model"] or (
        "llama-small" if given["device"] == "cuda" else "tiny-llama"
    )
    pathlib.Path(sys.argv[2]).write_text(json.dumps(inside(argparse.Namespace(**given))))
