"""Snapshots of source leases."""

from __future__ import annotations

from . import _messages, protocol

# Fewer than 16, also those that are left out where they are empty.
_KEYS = len(_messages.ORDER["INTENT"])


class Source:
    """The snapshot with which a source lease is presented to another session: always a complete
    INTENT body.

    The body is kept in three packed parts, because a step changes only the middle one.
    """

    __slots__ = (
        "key", "tokens", "fanout", "groups", "priority", "deadline_ms", "held", "req", "attempt",
        "traceparent", "ready", "pending", "_first", "_head", "_tail",
    )  # fmt: skip

    def __init__(
        self, xfer: bytes, hash: bytes, tokens: int, fanout: int, table: list[bytes], ready: int,
        priority: int, deadline_ms: int, held: bool, req: str, attempt: int, traceparent: str = "",
    ) -> None:  # fmt: skip
        self.key = {"xfer": xfer, "hash": hash, "tokens": tokens, "fanout": fanout}
        self.tokens = tokens
        self.priority = priority
        self.deadline_ms = deadline_ms
        self.held = held
        self.req = req
        self.attempt = attempt
        self.traceparent = traceparent
        self._first = bytes([0x80 | (_KEYS if traceparent else _KEYS - 1)])  # of the map
        self.ready = ready
        self.pending: list[tuple[int, int]] = []  # (step, end), oldest first
        self.set_table(table)
        self.set_tail()

    def set_table(self, table: list[bytes]) -> None:
        self.groups = len(table)
        self._head = protocol.pack({**self.key, "blocks": table})[1:]

    def set_tail(self) -> None:
        tail = {
            "priority": self.priority,
            "deadline_ms": self.deadline_ms,
            "held": self.held,
            "req": self.req,
            "attempt": self.attempt,
        }
        if self.traceparent:
            tail["traceparent"] = self.traceparent
        self._tail = protocol.pack(tail)[1:]

    def settle(self, done: int) -> None:
        """Steps whose end was signalled become ``ready``. The oldest of too many pending steps are
        dropped: their tokens are then reported later, never earlier."""
        pending = self.pending
        while pending and pending[0][0] <= done:
            self.ready = max(self.ready, pending.pop(0)[1])
        del pending[: -_messages.MAX_PENDING_STEPS]

    def lose(self) -> None:
        """The engine has taken the blocks back."""
        self.pending.clear()
        self.ready = 0
        self.attempt += 1
        self.set_table([b""] * self.groups)
        self.set_tail()

    def hold(self) -> None:
        self.held = True
        self.set_tail()

    def body(self) -> bytes:
        # Each part was packed as a map of its own and has lost its first byte.
        return (
            self._first
            + self._head
            + protocol.pack({"ready": self.ready, "steps": self.pending})[1:]
            + self._tail
        )
