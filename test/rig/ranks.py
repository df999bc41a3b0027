"""Workers without engines: memory that sidecars can reach, what is registered of it, and prompts
that move between two sets of them.

For tests that fill an engine's own tensors and look what became of them elsewhere.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cluster as rig
import torch

import kvspray

Tables = list[list[int]]  # per cache group


@dataclasses.dataclass
class Rank:
    """One worker: its session and its memory."""

    rank: int
    size: int
    client: kvspray.WorkerClient
    regions: list[kvspray.Region]
    memory: list[torch.Tensor]  # of each region, as bytes
    tables: Tables = dataclasses.field(default_factory=list)

    @property
    def table(self) -> list[int]:
        """Of an engine with one cache group."""
        return self.tables[0]

    def heads(self, of: int) -> range:
        """Those of the model's heads that the rank has: divided, or one shared by neighbours."""
        first = self.rank * of // self.size
        return range(first, first + max(1, of // self.size))

    def close(self) -> None:
        self.client.close()


def worker(
    sidecar: rig.Sidecar, engine: str, rank: int, size: int, layers: int, nbytes: int
) -> Rank:
    """A worker with that much memory, full of noise that is a finite number in any format: kernels
    multiply what lies behind a prompt by zero."""
    client = kvspray.WorkerClient(
        sidecar.socket,
        engine=kvspray.EngineInfo("truth", "1", engine),
        layers=layers,
        ranks=kvspray.Ranks(tp=(rank, size)),
    )
    region = client.alloc_region(nbytes)
    memory = torch.frombuffer(region.buffer, dtype=torch.int8)[:nbytes]
    memory.random_(0, 64)
    return Rank(rank, size, client, [region], [memory])


def owner(
    sidecar: rig.Sidecar,
    engine: str,
    rank: int,
    size: int,
    layers: int,
    tensors: Sequence[torch.Tensor],
) -> Rank:
    """A worker whose memory is what an engine has allocated for itself; a region each."""
    client = kvspray.WorkerClient(
        sidecar.socket,
        engine=kvspray.EngineInfo("truth", "1", engine),
        layers=layers,
        ranks=kvspray.Ranks(tp=(rank, size)),
    )
    memory = [t.view(-1).view(torch.int8) for t in tensors]
    for m in memory:
        m.random_(0, 64)
    return Rank(
        rank, size, client, [client.process_region(m.data_ptr(), m.numel()) for m in memory], memory
    )


def compare(r: Rank, before: Sequence[torch.Tensor], fill: Callable[[], None], what: str) -> None:
    """The rank's memory is what filling it as its engine does makes of what was there before, to
    the last byte."""
    got = [m.clone() for m in r.memory]
    for m, was in zip(r.memory, before, strict=True):
        m.copy_(was)
    fill()
    for i, (g, m) in enumerate(zip(got, r.memory, strict=True)):
        assert torch.equal(g, m), (
            f"{what}, rank {r.rank}, region {i}: {int((g != m).sum())} bytes of {m.numel()} differ"
        )


def group(
    tokens_per_block: int,
    strategy: str,
    params: Mapping[str, int],
    num_blocks: int,
    layers: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "tokens_per_block": tokens_per_block,
        "strategy": strategy,
        "params": dict(params),
        "num_blocks": num_blocks,
        "layers": layers,
    }


def register(r: Rank, dtype: str, groups: list[dict[str, Any]]) -> None:
    # One model, whose pages are what is looked at.
    said = kvspray.identity(
        model_config="truth",
        weights="1",
        layers=1,
        head_size=1,
        groups="any",
        rope="",
        backoff=0,
        speculative="",
        packing="this host's",
    )
    r.client.register(
        r.regions, {"model": "truth", "dtype": dtype, "identity": said, "groups": groups}
    )


def connected(*ranks: Rank) -> None:
    for r in ranks:
        rig.wait_for(f"rank {r.rank} connected", lambda r=r: r.client.connected, 10)


def draw(ranks: Sequence[Rank], groups: Sequence[tuple[int, int]], tokens: int) -> None:
    """The same random block tables for every rank of an engine; groups are (tokens of a block,
    blocks)."""
    tables = [random.sample(range(blocks), -(-tokens // n)) for n, blocks in groups]
    for r in ranks:
        r.tables = tables


def move(peer: str, ps: Sequence[Rank], ds: Sequence[Rank], tokens: int) -> None:
    """Moves a prompt that every p holds whole to every d."""
    xfer, digest, req = secrets.token_bytes(16), secrets.token_bytes(32), secrets.token_hex(8)
    leases = [
        (r, r.client.intent(xfer, digest, tokens, r.tables, ready=tokens, req=req)) for r in ps
    ]
    leases += [
        (r, r.client.expect(xfer, digest, peer, tokens, 0, r.tables, req=req, deadline_s=20))
        for r in ds
    ]
    for r, lease in leases:
        assert lease > 0
        ended: list[Any] = []

        def done(r: Rank = r, ended: list[Any] = ended) -> bool:
            ended.extend(r.client.poll())
            return bool(ended)

        rig.wait_for("the transfer's end", done, 20, 0.005)
        assert [(c.lease, int(c.status)) for c in ended] == [(lease, 0)], ended
