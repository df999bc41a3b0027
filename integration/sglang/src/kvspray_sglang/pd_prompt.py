"""What a transfer between SGLang and another kind of engine needs of SGLang's request.

Its name is the hash of the prompt (docs/protocol.md, section 4), which each engine takes from its
own request: a bridge that mixes two prompts up joins no transfer. A request with anything that the
hash, or the first token alone, does not carry is refused by name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import kvspray

# Of SGLang's Req: what KV depends on, and what decode would need of prefill beside the token.
_UNKNOWN = (
    "input_embeds", "multimodal_inputs", "positional_embed_overrides", "token_type_ids",
    "lora_id", "extra_key", "cache_salt", "return_logprob",
    "return_hidden_states", "return_sampling_mask", "return_routed_experts", "grammar",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    hash: bytes = b""
    tokens: int = 0
    problem: str = ""  # why it takes part in no such transfer


def of(request: Any, prefix: int, pages: int, page: int) -> Prompt:
    """``prefix``: tokens that decode has in its own cache. ``pages``: those to move. ``page``: the
    tokens of one."""
    if request is None:
        return Prompt(problem="this SGLang does not show a request's prompt; use 0.5.23")
    for name in _UNKNOWN:
        if getattr(request, name, None):
            return Prompt(
                problem=f"{name} is set, and another kind of engine does not have it; send the "
                "request without it, or to a pair of SGLang servers"
            )
    if prefix:
        return Prompt(
            problem="decode has a part of the prompt in its own cache; start it without "
            "--disaggregation-decode-enable-radix-cache"
        )
    ids = [int(t) for t in request.origin_input_ids]
    if -(-len(ids) // page) != pages:
        return Prompt(
            problem=f"{pages} pages of {page} tokens are to move, and the prompt has {len(ids)} "
            "tokens: what follows a prompt has no name that another kind of engine could use"
        )
    return Prompt(kvspray.prefix_hash(ids), len(ids))


def rows(
    args: Any, buffers: Any, room: int, token: int, cached: int
) -> tuple[tuple[bytes, ...] | None, str]:
    """A request's rows as SGLang's prefill would send them, or why they cannot be made."""
    known = ("output_ids", "cached_tokens", "bootstrap_room")
    tensors: list[Any] = [getattr(buffers, name, None) for name in known]
    ptrs = [int(p) for p in args.aux_data_ptrs]
    if any(t is None or t.data_ptr() not in ptrs for t in tensors):
        return None, "this SGLang's metadata buffers are not known; use 0.5.23"
    if getattr(buffers, "kv_checksum", None) is not None:
        return None, (
            "--disaggregation-enable-kv-checksum is on, and another kind of engine makes none; "
            "start decode without it"
        )
    out = [bytes(int(n)) for n in args.aux_item_lens]
    values = (
        struct.pack("<i", token), struct.pack("<2i", cached, cached), struct.pack("<Q", room)
    )  # fmt: skip
    for tensor, value in zip(tensors, values, strict=True):
        at = ptrs.index(tensor.data_ptr())
        out[at] = value + out[at][len(value) :]
    return tuple(out), ""
