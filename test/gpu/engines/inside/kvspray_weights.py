"""A worker extension that reports whether an engine's weights are what they were, for tests
only."""

from __future__ import annotations

from typing import Any

import torch

WORD = 8
PIECE_BYTES = 64 << 20
MIX = -7046029254386353131  # odd, and without a pattern


class Weights:
    def weights_digest(self) -> str:
        """Of the bytes of all parameters and buffers, each word of which counts with its place."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        total = 0
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            total = total * 31 + sum(name.encode()) + _sum(tensor.detach())
        return f"{total % (1 << 64):016x}"


def _sum(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    out = 0
    for at in range(0, data.numel(), PIECE_BYTES):
        piece = data[at : at + PIECE_BYTES]
        if piece.numel() % WORD:
            piece = torch.nn.functional.pad(piece, (0, WORD - piece.numel() % WORD))
        words = piece.view(torch.int64)
        places = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * MIX + (
            2 * at + 1
        )
        out += int((words * places).sum().item())
    return out
