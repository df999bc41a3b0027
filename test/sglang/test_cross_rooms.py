"""Requests between SGLang and another kind of engine: the transfer is named by SGLang's own prompt,
decode's metadata rows are made of one token, and what another engine does not have is refused.
SGLang's own classes, with a session of the test.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_pd_rooms as rooms
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import MetadataBuffers

import kvspray
from kvspray_sglang import names, pd_prompt, pd_wire

IDS = list(range(100, 120))  # two pages of 16
ENDPOINT = "10.0.0.9:7650"


def request(**more: Any) -> Any:
    return SimpleNamespace(**{"origin_input_ids": IDS, "return_logprob": False, **more})


def decode(req: Any, prefix: int = 0, buffers: Any = None) -> tuple[Any, Any, Any]:
    """A manager of decode, a request that it has asked a prefill for, and metadata buffers."""
    import torch

    m = rooms.manager()
    buffers = buffers or MetadataBuffers(8, 64, torch.float32, 16)
    ptrs, _, lens = buffers.get_buf_infos()
    m.kv_args.aux_data_ptrs, m.kv_args.aux_item_lens = ptrs, lens
    m.request_status[7] = KVPoll.WaitingForInput
    assert m.open_arrival("p:1", 7, [5, 6], rooms.ROW, prefix, req, buffers) == ""
    frames = m.asking(7, 1)
    return m, pd_wire.decode(frames), buffers


def test_decode_takes_a_prompt_and_its_first_token() -> None:
    m, asked, buffers = decode(request())
    buffers.output_token_logprobs_val[rooms.ROW] = 9  # of the row's last owner
    m._peer(pd_wire.Peer(7, asked.xfer, ENDPOINT, True))
    assert m._session.named == [(20, kvspray.prefix_hash(IDS))], "exact tokens, and the prompt"
    m._first(pd_wire.First(7, b"x" * 16, 1, 0))  # another transfer
    m._first(pd_wire.First(7, asked.xfer, 321, 4))
    assert m.request_status[7] != KVPoll.Success
    m._session.end(1)
    assert m.request_status[7] == KVPoll.Success
    got = buffers.get_buf(rooms.ROW)
    assert got[0][0] == 321 and got[1][:3].tolist() == [4, 4, 0]
    assert got[2][0] == 0 and int(got[-1][0]) == 7
    assert int(buffers.get_buf(rooms.ROW - 1)[-1][0]) == 0


@pytest.mark.parametrize(
    ("more", "prefix", "want"),
    [
        ({"return_logprob": True}, 0, "return_logprob"),
        ({"extra_key": "salt"}, 0, "extra_key"),
        ({"lora_id": "a"}, 0, "lora_id"),
        ({"cache_salt": "a"}, 0, "cache_salt"),
        ({"positional_embed_overrides": object()}, 0, "positional_embed_overrides"),
        ({"token_type_ids": [0]}, 0, "token_type_ids"),
        ({"multimodal_inputs": object()}, 0, "multimodal_inputs"),
        ({}, 16, "radix"),
        (None, 0, "does not show"),
    ],
)
def test_refused(more: Any, prefix: int, want: str) -> None:
    req = None if more is None else request(**more)
    m, asked, _ = decode(req, prefix)
    m._peer(pd_wire.Peer(7, asked.xfer, ENDPOINT, True))
    assert not m._session.open and want in m.failure_records[7]
    assert m.request_status[7] == KVPoll.Failed
    m, asked, _ = decode(req, prefix)
    m._first(pd_wire.First(7, asked.xfer, 1, 0))
    assert want in m.failure_records[7]


def test_a_checksum_is_not_made_up() -> None:
    import torch

    buffers = MetadataBuffers(8, 64, torch.float32, 16, kv_checksum_enabled=True)
    m, asked, _ = decode(request(), buffers=buffers)
    m._first(pd_wire.First(7, asked.xfer, 1, 0))
    assert "checksum" in m.failure_records[7]


def test_prefill_offers_its_own_prompt() -> None:
    m = rooms.manager()
    m.request_status[7] = KVPoll.Bootstrapping
    m._asked(pd_wire.Room(7, "10.0.0.2", 5, b"x" * 16, 2, 0, 1, by_prompt=True))
    m.open_source(7, 2, request())
    assert m._session.named == [(20, kvspray.prefix_hash(IDS))]
    rooms.chunk(m, [3], False)
    rooms.chunk(m, [4], True)
    assert [s[1:] for s in m._session.steps] == [(16, [3]), (20, [3, 4])]


def test_weights_are_replaced_in_a_prefill() -> None:
    """What is computed from then on is of other weights than those in the layout's name."""
    m = rooms.manager()
    m.request_status[7] = KVPoll.Bootstrapping
    m._asked(pd_wire.Room(7, "10.0.0.2", 5, b"x" * 16, 2, 0, 1, by_prompt=True))
    m.open_source(7, 2, request())
    rooms.chunk(m, [3], False)
    m._weights.current = False
    rooms.chunk(m, [4], True)
    assert len(m._session.steps) == 1 and m._session.cancelled == [1]
    assert "replaced" in m.failure_records[7] and m.request_status[7] == KVPoll.Failed
    assert not any(isinstance(x[1], pd_wire.Rows) for x in m.sent if isinstance(x, tuple))


def test_weights_are_replaced_before_pages_come() -> None:
    m, asked, _ = decode(request())
    m._peer(pd_wire.Peer(7, asked.xfer, ENDPOINT, True))
    m._first(pd_wire.First(7, asked.xfer, 321, 4))
    m._weights.current = False
    m._session.end(1)
    assert m.request_status[7] == KVPoll.Failed and "replaced" in m.failure_records[7]


def test_a_request_of_more_than_its_prompt() -> None:
    """Pages of tokens that follow the prompt, as SGLang fetches them again for a request that it
    has put back: the prompt's hash does not name them."""
    m, asked, _ = decode(request(origin_input_ids=IDS[:16]))  # and two pages
    m._peer(pd_wire.Peer(7, asked.xfer, ENDPOINT, True))
    assert not m._session.open and "pages" in m.failure_records[7]
    m = rooms.manager()
    m.request_status[7] = KVPoll.Bootstrapping
    m._asked(pd_wire.Room(7, "10.0.0.2", 5, b"x" * 16, 2, 0, 1, by_prompt=True))
    m.open_source(7, 2, request(origin_input_ids=IDS[:16]))
    assert not m._session.open and "pages" in m.failure_records[7]


def test_prefill_refuses_what_a_hash_does_not_have() -> None:
    m = rooms.manager()
    m.request_status[7] = KVPoll.Bootstrapping
    m._asked(pd_wire.Room(7, "10.0.0.2", 5, b"x" * 16, 2, 0, 1, by_prompt=True))
    m.open_source(7, 2, request(lora_id="a"))
    assert not m._session.open and "lora_id" in m.failure_records[7]


def test_messages() -> None:
    xfer = bytes(range(16))
    for message in (
        pd_wire.Room(1 << 63, "10.1.2.3", 65535, xfer, 12, 0, 1, by_prompt=True),
        pd_wire.Peer(5, xfer, ENDPOINT, by_prompt=True),
        pd_wire.First(5, xfer, 1023, 16),
    ):
        frames = message.encode()
        assert pd_wire.decode(frames) == message
        with pytest.raises(ValueError, match="frames|damaged"):
            pd_wire.decode([*frames[:-1], b"other"])


def test_rows_of_unknown_buffers() -> None:
    args = SimpleNamespace(aux_item_lens=[16], aux_data_ptrs=[1])
    assert "not known" in pd_prompt.rows(args, SimpleNamespace(), 7, 1, 0)[1]
    other = SimpleNamespace(data_ptr=lambda: 2)
    buffers = SimpleNamespace(output_ids=other, cached_tokens=other, bootstrap_room=other)
    assert "not known" in pd_prompt.rows(args, buffers, 7, 1, 0)[1]


def test_identity() -> None:
    """SGLang's settings that change KV have no counterpart in another engine."""
    import torch
    from sglang_server import CPU

    base = {
        "model_path": str(CPU.model), "revision": None, "download_dir": None, "quantization": None,
        "json_model_override_args": "{}", "torchao_config": "",
    }  # fmt: skip
    config = SimpleNamespace(dtype=torch.float32)

    def of(dtype: str = "auto", **more: Any) -> Any:
        args = SimpleNamespace(**(base | more))
        return names.portable_identity(args, "w1", dtype, False, config)

    dtype, identity = of()
    assert dtype == "float32" and identity["weights"] == "w1" and of("float32") == of()
    assert identity["head_size"] == "32"
    assert not any("sglang" in v for v in identity.values())
    for more in (
        {"quantization": "fp8"}, {"json_model_override_args": '{"a": 1}'},
        {"decrypted_config_file": "/other.json"}, {"model_impl": "transformers"},
        {"model_config_parser": "mistral"}, {"load_format": "remote_instance"},
        {"modelopt_quant": "fp8"}, {"quantize_and_serve": True}, {"rl_quant_profile": "/p"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(more))):
            of(**more)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        of("fp8_e4m3")
    config.quantization = "modelopt_fp8"  # which SGLang has found in the checkpoint
    with pytest.raises(ValueError, match="modelopt_fp8"):
        of()
