"""What the scheduler's side sends to the worker's side in one engine step. Plain data: it is
pickled to every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvspray_vllm.shim import Namespace

K = TypeVar("K")
V = TypeVar("V")

Blocks = tuple[tuple[int, ...], ...]  # per cache group
# The engine's id of a LoRA adapter, and the digest of its files that the prompt's hash has.
Adapter = tuple[int, str]


@dataclass(frozen=True)
class Intent:
    """This request's blocks hold, or will hold, a prompt's KV for another engine."""

    req: str
    xfer: bytes
    hash: bytes
    tokens: int
    fanout: int
    blocks: Blocks
    adapter: Adapter | None = None
    traceparent: str = ""
    cached: int = 0  # tokens that vLLM had in its prefix cache


@dataclass(frozen=True)
class Gain:
    """When this step's flags arrive, tokens [0, end) of the request are complete in these
    blocks."""

    req: str
    end: int
    blocks: Blocks


@dataclass(frozen=True)
class Expect:
    """A prompt's KV is requested for this request's blocks."""

    req: str
    xfer: bytes
    hash: bytes
    peer: str
    tokens: int
    skip: int
    blocks: Blocks
    adapter: Adapter | None = None
    refused: str = ""  # why nothing can be loaded: it ends at once, as a load that failed
    stall_s: float = 0.0  # longest wait without a byte, or a sign of life of the other side
    priority: int = 0  # class of the slice scheduler
    # It comes from the node's store: hashes of the blocks from `skip` on.
    pages: tuple[bytes, ...] = ()
    traceparent: str = ""


@dataclass(frozen=True)
class Put:
    """These full blocks are for the node's store. The scheduler's side keeps them from being used
    for anything else until every rank has reported the end."""

    id: int
    req: str
    hashes: tuple[bytes, ...]  # in the order of the prompt
    blocks: tuple[int, ...]
    parent: bytes  # hash of the block before the first one; empty: none


@dataclass(frozen=True)
class Rank:
    """One rank's pages in the store."""

    epoch: int  # another one with other weights
    namespace: Namespace | None
    why: str = ""  # it has no namespace


@dataclass
class Landed(KVConnectorWorkerMetadata):
    """What the worker's side reports to the scheduler's: whether there can be any transfer, and
    what the store has."""

    disabled: str = ""  # why this worker can neither send nor receive any more
    # By number, of those whose namespace is another one now.
    ranks: dict[int, Rank] = field(default_factory=dict)
    # By Put and rank that has ended it: whether all of its pages are there.
    saved: dict[int, dict[int, bool]] = field(default_factory=dict)
    # Loads from the store that did not find all of their pages.
    lacked: set[str] = field(default_factory=set)
    changed: int = 0  # number of the first step with other weights; 0: they have not changed
    # LoRA adapters that vLLM has read: digests, by the engine's id.
    adapters: dict[int, str] = field(default_factory=dict)
    # By request and rank: why that rank asks no sidecar for the request's load.
    unasked: dict[str, dict[int, str]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Landed:
        assert isinstance(other, Landed)
        # A union: vLLM may pass on one rank's report twice.
        return Landed(
            self.disabled or other.disabled,
            self.ranks | other.ranks,
            _by_rank(self.saved, other.saved),
            self.lacked | other.lacked,
            max(self.changed, other.changed),
            self.adapters | other.adapters,
            _by_rank(self.unasked, other.unasked),
        )


def _by_rank(a: dict[K, dict[int, V]], b: dict[K, dict[int, V]]) -> dict[K, dict[int, V]]:
    return {key: a.get(key, {}) | b.get(key, {}) for key in a | b}


@dataclass
class StepMeta(KVConnectorMetadata):
    """Applied by the worker in the order of the fields: blocks that were taken away come first."""

    preempts: list[str] = field(default_factory=list)
    # With an adapter, ended or preempted: their blocks may be others' by now.
    gone: list[str] = field(default_factory=list)
    # (request, reason): its blocks went, and do not come back.
    lost: list[tuple[str, str]] = field(default_factory=list)
    # (request, reason): of its load, not of what it offers.
    load_cancels: list[tuple[str, str]] = field(default_factory=list)
    # (request, reason): of what it offers, not of its load.
    source_cancels: list[tuple[str, str]] = field(default_factory=list)
    # As source_cancels, and the worker does not report the end.
    dropped: list[tuple[str, str]] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    yields: list[str] = field(default_factory=list)  # of those held: their blocks are needed
    # Requests whose end the worker has to report, once nothing is read any more.
    released: list[str] = field(default_factory=list)
    intents: list[Intent] = field(default_factory=list)
    step: int = 0  # 0: this step computes nothing for another engine and has no record
    gains: list[Gain] = field(default_factory=list)
    expects: list[Expect] = field(default_factory=list)
    idle: bool = False  # the engine computes nothing in this step
    number: int = 0  # of this step
    # Number of the first step with the weights that this one was planned for; 0: those of the
    # start.
    weights: int = 0
    puts: list[Put] = field(default_factory=list)
    # Of each rank's weights, that `puts` were decided for.
    epochs: dict[int, int] = field(default_factory=dict)

    def empty(self) -> bool:
        lists = (
            self.preempts, self.gone, self.lost, self.load_cancels, self.source_cancels,
            self.dropped, self.holds, self.yields, self.released, self.intents,
        )  # fmt: skip
        return not (self.step or self.expects or self.puts or any(lists))
