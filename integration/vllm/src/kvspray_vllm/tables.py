# SPDX-License-Identifier: Apache-2.0
"""Block tables of requests, put together from what each step's schedule adds to them.

vLLM 0.32 lends its connector the cache manager, which has the tables. An older one (0.26) does
not. Its connectors serve a single cache group without a window, whose tables only grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StepTables:
    """Of requests for which `wanted` is true when they are scheduled first. One thread."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._tables: dict[str, list[list[int]]] = {}

    def schedule(self, out: SchedulerOutput) -> None:
        """A step's schedule, each once and in order."""
        for req in out.finished_req_ids:
            self._tables.pop(req, None)
        for new in out.scheduled_new_reqs:
            if self._wanted(new.req_id):
                self._tables[new.req_id] = [list(group) for group in new.block_ids]
        cached = out.scheduled_cached_reqs
        for req, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            table = self._tables.get(req)
            if table is None or more is None:
                continue
            if req in cached.resumed_req_ids:  # preempted before: its blocks are others
                table[:] = [list(group) for group in more]
            else:
                for group, ids in zip(table, more, strict=True):
                    group.extend(ids)

    def of(self, req: str) -> Sequence[Sequence[int]]:
        return self._tables[req]
