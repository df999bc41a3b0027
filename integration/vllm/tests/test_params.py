from __future__ import annotations

import pytest

from kvspray_vllm import params

XFER = "00112233445566778899aabbccddeeff"


def test_absent_key_is_none() -> None:
    assert params.parse({"do_remote_prefill": True}) is None


def test_round_trip() -> None:
    got = params.parse(
        {"kvspray": {"v": 1, "xfer": XFER, "peer": "10.0.0.1:7650", "fanout": 3, "later": {"x": 1}}}
    )
    assert got is not None
    assert got == params.Spray(bytes.fromhex(XFER), "10.0.0.1:7650", 3)
    assert params.parse({"kvspray": got.encode()}) == got
    adapted = params.Spray(got.xfer, got.peer, got.fanout, "checkpoint:0123")
    assert params.parse({"kvspray": adapted.encode()}) == adapted


@pytest.mark.parametrize(
    ("raw", "label"),
    [
        ({"v": 2, "xfer": XFER}, "version"),
        ({"xfer": XFER}, "version"),
        ({"v": True, "xfer": XFER}, "version"),
        ("v1", "malformed"),
        ({"v": 1, "xfer": XFER[:-2]}, "malformed"),
        ({"v": 1, "xfer": "zz" * 16}, "malformed"),
        ({"v": 1, "xfer": 7}, "malformed"),
        ({"v": 1, "peer": "nohost"}, "malformed"),
        ({"v": 1, "peer": "h:0"}, "malformed"),
        ({"v": 1, "peer": "h:70000"}, "malformed"),
        ({"v": 1, "peer": "h" * 300 + ":1"}, "malformed"),
        ({"v": 1, "peer": "h:" + "0" * 200 + "1"}, "malformed"),
        ({"v": 1, "peer": "\u00e9" * 200 + ":1"}, "malformed"),  # more bytes than characters
        ({"v": 1, "peer": "h\0x:1"}, "malformed"),
        ({"v": 1, "peer": "\ud800:1"}, "malformed"),
        ({"v": 1, "peer": "a b:1"}, "malformed"),
        ({"v": 1, "peer": "h:\u0661"}, "malformed"),
        ({"v": 1, "adapter": 7}, "malformed"),
        ({"v": 1, "adapter": "a" * 129}, "malformed"),
        ({"v": 1, "adapter": "two\nlines"}, "malformed"),
        ({"v": 1, "fanout": 0}, "malformed"),
        ({"v": 1, "fanout": 17}, "malformed"),
        ({"v": 1, "fanout": True}, "malformed"),
    ],
)
def test_what_cannot_be_used_says_why(raw: object, label: str) -> None:
    with pytest.raises(params.ParamsError) as err:
        params.parse({"kvspray": raw})
    assert err.value.label == label
    assert "kvspray" in str(err.value)


@pytest.mark.parametrize(
    "group",
    [
        [
            "cmpl-abc-0-0123abcd",
            "cmpl-abc-1-89abcdef",
            "1_cmpl-abc-1-89abcdef",
            "cmpl-abc-11-00000000",
        ],
        ["chatcmpl-abc-01234567", "0_chatcmpl-abc-01234567", "1_chatcmpl-abc-01234567"],
        ["cmpl-a-b-7-0-0123abcd", "cmpl-a-b-7-1-0123abce"],
        ["12-0123abcd", "3_12-0123abcd"],
    ],
)
def test_the_prompts_of_one_call_share_their_xfer(group: list[str]) -> None:
    assert len({params.derive_xfer(b"s" * 16, rid) for rid in group}) == 1


def test_other_calls_and_other_engines_have_others() -> None:
    ids = [
        "cmpl-a-0-01234567",
        "cmpl-b-0-01234567",
        "chatcmpl-a-01234567",
        "12-01234567",
        "13-01234567",
    ]
    assert len(
        {params.derive_xfer(s, rid) for rid in ids for s in (b"1" * 16, b"2" * 16)}
    ) == 2 * len(ids)
