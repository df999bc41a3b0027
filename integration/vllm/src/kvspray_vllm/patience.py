"""How long this engine's own prefills take, measured from its last ones. A load without progress
for that time is cancelled, and the engine computes the rest itself."""

from __future__ import annotations

from typing import Any

# Shortest wait of a load for a byte, in seconds: a busy machine may delay a process for so long.
STALL_MIN_S = 0.5
# The same before any prefill was measured.
STALL_UNKNOWN_S = 1.0
# Shorter prefills measure what a step costs, and not what a token costs.
MEASURED_TOKENS = 64
# Share of the newest prefill in the mean.
NEWEST = 0.25
# Prefills that are measured at the same time.
MAX_MEASURED = 64


class Patience:
    def __init__(self) -> None:
        self._token_s: float | None = None  # mean time of a token
        # By request: when its prefill began, how many tokens it has, the request.
        self._open: dict[str, tuple[float, int, Any]] = {}

    def begins(self, req: str, request: Any, tokens: int, now: float) -> None:
        """A prefill of this number of tokens is scheduled."""
        if tokens >= MEASURED_TOKENS and len(self._open) < MAX_MEASURED:
            self._open[req] = now, tokens, request

    def look(self, now: float) -> None:
        """In each step: prefills that have their first token are over."""
        for req, (began, tokens, request) in list(self._open.items()):
            if request.num_output_tokens > 0:
                del self._open[req]
                self._measured((now - began) / tokens)

    def ended(self, req: str, now: float) -> None:
        """A request is over: with its first token, or before it."""
        began, tokens, request = self._open.pop(req, (now, 0, None))
        if request is not None and request.num_output_tokens > 0:
            self._measured((now - began) / tokens)

    def forget(self, req: str) -> None:
        """A request was preempted: what it computes again is no measure."""
        self._open.pop(req, None)

    def _measured(self, token_s: float) -> None:
        mean = self._token_s
        self._token_s = token_s if mean is None else mean + NEWEST * (token_s - mean)

    def stall_s(self, tokens: int) -> float:
        """How long a load of this number of tokens waits for a byte."""
        if self._token_s is None:
            return STALL_UNKNOWN_S
        return max(STALL_MIN_S, tokens * self._token_s)
