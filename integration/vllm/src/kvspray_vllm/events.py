"""KV events about the node's store: what this engine has put into it, and what it found gone.

vLLM's publisher sends them along with its own (`--kv-events-config`), so that an index of prefixes,
such as llm-d's or Dynamo's, has one stream for each engine. A page is announced in the form of
vLLM's own BlockStored, with medium CPU and ownership kvspray, once every rank has put it or loaded
it: the node's store has it then. The store drops pages without a message to its engines: that a
page is gone is reported when a later prompt asks for it. Such a hint costs a miss, and never a
wrong page. Each page that was announced is taken back once, at the latest when MAX_ANNOUNCED later
ones are.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

OWNERSHIP = "kvspray"
MAX_EVENTS = 4096  # that wait for vLLM to take them; the oldest go first
MAX_ANNOUNCED = 1 << 17  # pages


def wanted(config: VllmConfig) -> bool:
    """Whether this engine publishes KV events."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def endpoints(config: VllmConfig) -> tuple[str, str]:
    """Where vLLM publishes this engine's KV events, and their replay, with "*" for its own host.
    Empty: it does not, or routers cannot connect there."""
    events = config.kv_events_config
    if events is None or not wanted(config) or events.publisher != "zmq":
        return "", ""
    rank = config.parallel_config.data_parallel_index
    offset = kv_events.ZmqEventPublisher.offset_endpoint_port
    at, replay = offset(events.endpoint, rank), offset(events.replay_endpoint, rank)
    # vLLM connects to an endpoint that names a host, and lets the system choose port 0.
    if not _is_bound(at) or "*" not in at.replace("[::]", "*"):
        return "", ""
    return at.replace("[::]", "*"), replay.replace("[::]", "*") if _is_bound(replay) else ""


def _is_bound(endpoint: str | None) -> TypeGuard[str]:
    return endpoint is not None and endpoint.startswith("tcp://") and not endpoint.endswith(":0")


class StoreEvents:
    """What vLLM is to publish. Everything runs on the engine core's thread."""

    def __init__(self) -> None:
        self._events: deque[KVCacheEvent] = deque(maxlen=MAX_EVENTS)
        self._announced: OrderedDict[bytes, None] = OrderedDict()

    def describe(self, request: Request, first: int, end: int, size: int) -> KVCacheEvent:
        """Blocks first to end of a request, each of size tokens, as an event to be passed to
        `stored`."""
        convert, keys, at = kv_cache_utils.maybe_convert_block_hash, [], 0
        for i in range(first, end):
            key, at = kv_cache_utils.generate_block_hash_extra_keys(
                request, i * size, (i + 1) * size, at
            )
            keys.append(key)
        return kv_events.BlockStored(
            block_hashes=[convert(h) for h in request.block_hashes[first:end]],
            parent_block_hash=convert(request.block_hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * size : end * size]),
            block_size=size,
            lora_id=None,
            lora_name=None,
            medium=kv_events.MEDIUM_CPU,
            extra_keys=kv_cache_utils.to_event_extra_keys(keys),
            group_idx=0,
            locality="LOCAL",
            ownership=OWNERSHIP,
            session_id=request.session_id,
        )

    def stored(self, hashes: Sequence[bytes], event: KVCacheEvent) -> None:
        """The store has the pages that `describe` has described."""
        if all(h in self._announced for h in hashes):
            for h in hashes:
                self._announced.move_to_end(h)
            return
        self._events.append(event)
        for h in hashes:
            self._announced[h] = None
            self._announced.move_to_end(h)
        if (more := len(self._announced) - MAX_ANNOUNCED) > 0:
            self.gone(list(itertools.islice(self._announced, more)))

    def gone(self, hashes: Iterable[bytes]) -> None:
        """The store does not have these pages. The index learns of those that were announced."""
        known = [h for h in hashes if h in self._announced]
        if not known:
            return
        for h in known:
            del self._announced[h]
        convert = kv_cache_utils.maybe_convert_block_hash
        self._events.append(
            kv_events.BlockRemoved(
                block_hashes=[convert(kv_cache_utils.BlockHash(h)) for h in known],
                medium=kv_events.MEDIUM_CPU,
                group_idx=0,
                locality="LOCAL",
                ownership=OWNERSHIP,
            )
        )

    def all_gone(self) -> None:
        self.gone(list(self._announced))

    def take(self) -> Iterable[KVCacheEvent]:
        """Each event once."""
        events, self._events = self._events, deque(maxlen=MAX_EVENTS)
        return events
