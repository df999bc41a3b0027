"""The worker's side of the node's store: its namespace, which changes with the weights, and the
leases of PUTs.

Loads from the store are loads of worker.py. Everything runs on the worker's one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvspray_vllm import shim
from kvspray_vllm.meta import Expect, Landed, Put, Rank, StepMeta
from kvspray_vllm.shim import Namespace, ShimError, WorkerPages
from kvspray_vllm.stats import KVSprayStats

GET_S = 10.0  # a load from the store that takes longer is computed
PUT_S = 30.0  # a PUT that takes longer is given up: its blocks are held so long

GOOD = ("stored", "existed")  # outcomes of a page that the store has now

OpenFn = Callable[[Namespace], WorkerPages]


class Saving:
    def __init__(self, rank: int, open: OpenFn, log: logging.Logger) -> None:
        """rank: this worker's number among those that the scheduler asks for."""
        self._rank = rank
        self._open = open
        self._log = log
        self._pages: WorkerPages | None = None
        self._namespace: Namespace | None = None
        self._why = "no KV cache is registered"
        self._epoch = 0
        self._changed = False  # since the last step
        self._logged = ""
        self._leases: dict[int, Put] = {}

    def set(self, namespace: Namespace | None, why: str = "") -> None:
        """What the engine computes from the next step on belongs to this namespace. None: to none,
        for a reason. PUTs under way read blocks that were computed before, for the namespace that
        was theirs."""
        self._namespace, self._why = namespace, why
        if self._pages is not None:
            self._pages.close()
        self._pages = self._open(namespace) if namespace is not None else None
        self._epoch += 1
        self._changed = True

    def begin(
        self, meta: StepMeta, after: int | None, landed: Landed, stats: KVSprayStats, refused: str
    ) -> None:
        """Before the forward pass. after: the mark that all steps before this one have passed;
        None: there is none. refused: why nothing may be saved."""
        if self._changed:
            self._changed = False
            landed.ranks[self._rank] = Rank(self._epoch, self._namespace, self._why)
        if (
            self._pages is not None
            and not self._pages.ready()
            and self._pages.error not in ("", self._logged)
        ):
            self._logged = self._pages.error
            self._log.error(
                "kvspray: the sidecar refuses this engine's pages: %s", self._pages.error
            )
        for put in meta.puts:
            try:
                if refused or after is None:
                    raise ShimError(refused or "the order of the engine's steps cannot be kept")
                if self._pages is None or meta.epochs.get(self._rank) != self._epoch:
                    raise ShimError("the weights have changed")
                self._leases[
                    self._pages.put(put.hashes, put.blocks, put.parent, put.req, PUT_S, after)
                ] = put
            except ShimError as err:
                self._log.debug(
                    "kvspray: request %s: %d blocks are not saved: %s",
                    put.req,
                    len(put.blocks),
                    err,
                )
                stats.pages("put", "unsubmitted", len(put.blocks))
                landed.saved[put.id] = {self._rank: False}

    def get(self, expect: Expect, after: int) -> int:
        """The lease of a load. Its hashes are looked for in the present namespace, whatever it was
        when the scheduler asked."""
        if self._pages is None:
            raise ShimError(self._why)
        first = len(expect.blocks[0]) - len(expect.pages)
        return self._pages.get(expect.pages, expect.blocks[0][first:], expect.req, GET_S, after)

    def ended(self, end: shim.Ended, landed: Landed, stats: KVSprayStats) -> bool:
        """Whether it was the end of a PUT."""
        put = self._leases.pop(end.lease, None)
        if put is None:
            return False
        outcomes = count(stats, "put", end, len(put.blocks))
        landed.saved[put.id] = {
            self._rank: len(outcomes) == len(put.blocks) and all(o in GOOD for o in outcomes)
        }
        return True


def count(stats: KVSprayStats, op: str, end: shim.Ended, n: int) -> list[str]:
    """Counts the outcomes of n pages, and returns them; none if the request was refused or ended
    early."""
    if end.status != shim.OK or len(end.pages) != n:
        stats.pages(op, shim.status_name(end.status), n)
        return []
    outcomes = [shim.page_outcome(p) for p in end.pages]
    for outcome in dict.fromkeys(outcomes):
        stats.pages(op, outcome, outcomes.count(outcome))
    return outcomes
