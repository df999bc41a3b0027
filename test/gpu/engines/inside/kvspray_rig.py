"""Connectors that look at the engine's pages from inside, for tests only: KVSprayConnector and a
connector that moves nothing.

An engine loads them by kv_connector_module_path. They write to the directory $KVSPRAY_RIG_PAGES,
per request REQ (the engine's id without its random end) whose id contains "look":

    layout.json        what the engine registered with its sidecar
    captured.json      the layers that are signalled in the replays of graphs
    REQ.computed.RANK.npz   where the engine computed the prompt: digests of a rank's pages behind
                            the step that computed its last token
    REQ.loaded.RANK.npz     where the prompt came from elsewhere: digests ahead of the first step
                            that reads it

A digest is two 64-bit sums over a block's rows of one head of one layer, and covers the tokens that
move. So engines of different tensor parallelism can be compared. It is computed on the device, in
the stream of the engine's steps, so that it has its place in their order, and the engine does not
wait for it.

A request whose id contains canaryfill empties the prefix cache and has every block that no request
has filled with CANARY; one whose id contains canarycheck has those compared that no request had
since, and writes REQ.canary.json.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

import kvspray
from kvspray_vllm import KVSprayConnector
from kvspray_vllm.connector import register
from kvspray_vllm.layout import backoff_of, spec_of, windows_of
from kvspray_vllm.states import identity_of_states, is_state

CANARY = 0x5A
WORD = 8
PIECE_BYTES = 64 << 20  # of a cache that is digested at a time
# Odd constants with no pattern: multiples of the golden ratio and of pi.
MIX = (-7046029254386353131, -4417276706812531889, 2685821657736338717, -3335678366873096957)
RANDOM_END = re.compile(r"-[0-9a-f]{8}$")


@dataclass
class Look:
    """What the worker does with a request's pages in one step."""

    name: str
    tables: list[list[int]]
    tokens: int


@dataclass
class Looks:
    loaded: list[Look] = field(default_factory=list)  # before the step
    computed: list[Look] = field(default_factory=list)  # behind it
    fill: list[int] | None = None  # blocks that a request had
    check: tuple[str, list[int]] | None = None


def file_name(request_id: str) -> str:
    return RANDOM_END.sub("", request_id).replace("/", "_")[-120:]


class FirstToken(AdapterLogitsProcessor):
    """The answer of a request with the extra argument first begins with that token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        first = (params.extra_args or {}).get("first")

        def apply(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not generated:
                logits[:] = -torch.inf
                logits[first] = 0
            return logits

        return apply if first is not None else None


class Cache:
    """A layer's pages, as rows of tokens."""

    def __init__(
        self, name: str, group: int, tensor: torch.Tensor, num_blocks: int, block: int
    ) -> None:
        pieces = tensor.shape[0] // num_blocks
        self.name, self.group, self.block = name, group, block
        self.bytes = tensor.view(torch.uint8).unflatten(0, (num_blocks, pieces))
        # [block, piece, head, token, content], and MLA's without heads.
        self.heads = self.bytes.dim() == 5
        self.page = self.bytes[0].numel()

    def rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """[blocks, heads, tokens, words]; without heads, one."""
        got = self.bytes[blocks]
        if self.heads:
            # vLLM's tokens may lie in several pieces of a block: [blocks, heads, tokens, content].
            got = got.permute(0, 2, 1, 3, 4).flatten(2, 3)
        else:
            got = got.reshape(len(blocks), 1, self.block, -1)
        if short := -got.shape[-1] % WORD:
            got = torch.nn.functional.pad(got, (0, short))
        return got.contiguous().view(torch.int64)

    def digest(self, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
        """Two sums for each block and head; of the last block the tokens that count."""
        out, step = [], max(1, PIECE_BYTES // self.page)
        for first in range(0, len(blocks), step):
            words = self.rows(blocks[first : first + step])
            n, heads, block, width = words.shape
            place = torch.arange(block * width, device=words.device).view(block, width)
            x = words * MIX[0] + place * MIX[1]
            x ^= x >> 29
            x *= MIX[2]
            x ^= x >> 32
            at = torch.arange(n * block, device=words.device).view(n, 1, block, 1)
            at = at + first * self.block
            x = torch.where(at < tokens, x, 0)
            y = x * MIX[3]
            y ^= y >> 31
            out.append(torch.stack((x.sum((2, 3)), y.sum((2, 3))), 2))
        heads = self.bytes.shape[2] if self.heads else 1
        return (
            torch.cat(out)
            if out
            else torch.zeros((0, heads, 2), dtype=torch.int64, device=self.bytes.device)
        )


class Pages:
    """The worker's side."""

    def __init__(self, folder: pathlib.Path, kv: Any, caches: dict[str, torch.Tensor]) -> None:
        self.folder, self.rank = folder, get_tensor_model_parallel_rank()
        folder.mkdir(parents=True, exist_ok=True)
        self.windows = windows_of(kv)
        self.states = [is_state(spec_of(group)) for group in kv.kv_cache_groups]
        self.caches = [
            Cache(name, g, caches[name], kv.num_blocks, group.kv_cache_spec.block_size)
            for g, group in enumerate(kv.kv_cache_groups)
            for name in group.layer_names
        ]
        self.captured: set[str] = set()
        self.num_blocks = kv.num_blocks
        self.device = self.caches[0].bytes.device
        self.todo: queue.SimpleQueue[tuple[str, str, Any, list[Any], dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._write, name="kvspray-rig", daemon=True).start()

    def look(self, what: str, look: Look) -> None:
        gpu = self.device.type == "cuda"
        found: list[tuple[int, list[str], torch.Tensor]] = []
        seen: dict[str, Any] = {}
        for g, table in enumerate(look.tables):
            caches = [c for c in self.caches if c.group == g]
            block, window = caches[0].block, self.windows[g]
            count = -(-look.tokens // block)
            # Of a window only what the next token sees counts: the engine has given up the rest.
            first = max(look.tokens - window + 1, 0) // block if window else 0
            if self.states[g]:
                first = count - 1  # of a state the last token's
            seen[f"group{g}"] = np.array([first, count, look.tokens, int(self.states[g])])
            index = torch.tensor(table[:count], dtype=torch.int64)
            # Pinned on both ways: the engine's thread waits for nothing.
            index = index.pin_memory().to(self.device, non_blocking=True) if gpu else index
            sums = torch.stack([c.digest(index, look.tokens) for c in caches])
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=gpu)
            found.append((g, [c.name for c in caches], host.copy_(sums, non_blocking=True)))
        event = torch.cuda.Event() if gpu else None
        if event is not None:
            event.record()
        self.todo.put((what, look.name, event, found, seen))

    def _write(self) -> None:
        while True:
            what, name, event, found, seen = self.todo.get()
            if event is not None:
                event.synchronize()
            (self.folder / "captured.json").write_text(json.dumps(sorted(self.captured)))
            path = self.folder / f"{name}.{what}.{self.rank}.npz"
            part = path.with_name(f".{path.name}")
            sums = {
                f"{g}/{n}": s
                for g, names, all_ in found
                for n, s in zip(names, all_.numpy(), strict=True)
            }
            np.savez(part, **seen, **sums)
            part.rename(path)

    def _others(self, used: list[int]) -> torch.Tensor:
        mask = torch.ones(self.num_blocks, dtype=torch.bool)
        mask[torch.tensor([0, *used])] = False
        return mask.nonzero().flatten().to(self.device)

    def fill(self, used: list[int]) -> None:
        others = self._others(used)
        for cache in self.caches:
            cache.bytes[others] = CANARY

    def check(self, name: str, used: list[int]) -> None:
        others, bad = self._others(used), 0
        for cache in self.caches:
            step = max(1, PIECE_BYTES // cache.page)
            for first in range(0, len(others), step):
                got = cache.bytes[others[first : first + step]]
                bad += int((got != CANARY).flatten(1).any(1).sum())
        (self.folder / f"{name}.canary.json").write_text(
            json.dumps({"pages": len(others) * len(self.caches), "changed": bad})
        )


class Inside:
    """What both connectors add to the one that they are."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rig_requests: dict[str, Any] = {}
        self._rig_loads: set[str] = set()
        self._rig_used: set[int] = set()
        self._rig_backoff = backoff_of(
            windows_of(kv_cache_config), bool(identity_of_states(kv_cache_config))
        )
        self._rig_moved: dict[str, int] = {}  # tokens of a prompt that move
        self._rig_pages: Pages | None = None
        self._rig_bound: Looks | None = None

    # ---- scheduler

    def on_new_request(self, request: Any) -> None:
        self._rig_requests[request.request_id] = request
        # A prefill with states has a shorter prompt from then on.
        self._rig_moved[request.request_id] = request.num_prompt_tokens - self._rig_backoff
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._rig_loads.add(request.request_id)
        self._rig_used.update(b for group in blocks.get_block_ids() for b in group)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        looks, tables = Looks(), self._kv_cache_manager.get_block_ids
        first = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for req, count in scheduler_output.num_scheduled_tokens.items():
            self._rig_used.update(b for group in tables(req) for b in group)
            request = self._rig_requests.get(req)
            if request is None:
                continue
            prompt, done = request.num_prompt_tokens, request.num_computed_tokens
            if req in first and "canaryfill" in req:
                self._rig_used = self._rig_forget()
                looks.fill = sorted(self._rig_used)
            if req in first and "canarycheck" in req:
                looks.check = (file_name(req), sorted(self._rig_used))
            if "look" not in req:
                continue
            moved = self._rig_moved[req]
            look = Look(file_name(req), [list(t) for t in tables(req)], moved)
            if req in first and req in self._rig_loads and done >= moved - 1:
                looks.loaded.append(look)
            elif done < prompt <= done + count:
                looks.computed.append(look)
        meta = super().build_connector_meta(scheduler_output)
        meta.rig_looks = looks
        return meta

    def _rig_forget(self) -> set[int]:
        """Empties the prefix cache, whose blocks may be filled then. Returns those in use."""
        pool = self._kv_cache_manager.block_pool
        live = {b.block_id for b in pool.blocks if b.ref_cnt > 0 or b.is_null}
        pool.evict_blocks({b.block_id for b in pool.blocks} - live)
        return live

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._rig_requests.pop(request.request_id, None)
        self._rig_moved.pop(request.request_id, None)
        self._rig_loads.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        folder = pathlib.Path(os.environ["KVSPRAY_RIG_PAGES"])
        self._rig_pages = Pages(folder, self._kv_cache_config, kv_caches)
        register = kvspray.WorkerClient.register

        def recorded(client: Any, regions: Any, layout: Any) -> Any:
            (folder / "layout.json").write_text(json.dumps(layout))
            return register(client, regions, layout)

        kvspray.WorkerClient.register = recorded  # type: ignore[method-assign]
        try:
            super().register_kv_caches(kv_caches)
        finally:
            kvspray.WorkerClient.register = register  # type: ignore[method-assign]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        looks, self._rig_bound = connector_metadata.rig_looks, connector_metadata.rig_looks
        assert self._rig_pages is not None
        if looks.fill is not None:
            self._rig_pages.fill(looks.fill)
        for look in looks.loaded:
            self._rig_pages.look("loaded", look)
        if looks.check is not None:
            self._rig_pages.check(*looks.check)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        looks, self._rig_bound = self._rig_bound, None
        assert self._rig_pages is not None
        for look in looks.computed if looks else ():
            self._rig_pages.look("computed", look)


class PlainMeta(KVConnectorMetadata):
    rig_looks: Looks


class _Nothing(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return PlainMeta()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False


class PlainConnector(Inside, _Nothing):
    """A plain engine whose pages can be compared."""


class PagesConnector(Inside, KVSprayConnector):
    """KVSprayConnector, unchanged, whose engine's pages can be compared."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, *args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            assert self._rig_pages is not None
            self._rig_pages.captured.add(layer_name)


class OffloadingPages(Inside, OffloadingConnector):
    """vLLM's OffloadingConnector, unchanged, whose engine's pages can be compared."""


register("PagesConnector", "kvspray_rig")
