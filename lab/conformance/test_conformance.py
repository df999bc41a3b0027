# SPDX-License-Identifier: Apache-2.0
"""What the suite counts, with engines that are not there; and that each description can be read."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from arm import Arm, Described, Tally, engines  # noqa: E402
from run import wants  # noqa: E402
from situations import SITUATIONS, changed, other_id  # noqa: E402

PROMPT = [1, 2, 3, 4]
FILES = sorted(HERE.glob("connectors/*.json"))


class Asked:
    """A request whose answer is known."""

    rid = "r"

    def __init__(self, answer: engines.Out | Exception) -> None:
        self.answer = answer

    def result(self, timeout: float) -> engines.Out:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def abort(self) -> None:
        pass


class Engine:
    """R answers 7, 8, 9; 4 is as likely as 8. D has computed one token of each prompt."""

    def run(self, prompt: list[int], n: int, logprobs: int = 0) -> engines.Out:
        likely = {8: -1.0, 4: -1.0001, 5: -3.0}
        return engines.Out([[7, 8, 9][:n]], ["length"], None, None, 0, likely)

    def computed(self, rid: str) -> int:
        return 1


def answer(tokens: list[int], finish: str = "length") -> engines.Out:
    return engines.Out([tokens], [finish], None, None, 0)


@pytest.fixture
def arm(tmp_path: pathlib.Path) -> Arm:
    made = Arm(Described('{"engines": {}}', tmp_path, {}), tmp_path, "")
    made.engines = {"D": Engine(), "R": Engine()}
    return made


@pytest.mark.parametrize(
    ("got", "counted"),
    [
        (answer([7, 8, 9]), "right"),
        (answer([7, 4, 1]), "right"),  # a tie at the second token, after which all may differ
        (answer([7, 5, 9]), "wrong"),
        (answer([7, 6, 9]), "wrong"),  # not among R's likeliest
        (answer([7, 8]), "wrong"),
        (answer([7, 8, 9], "error"), "failed"),
        (TimeoutError(), "none"),
        (engines.EngineDied(), "none"),
    ],
)
def test_each_answer_is_counted_once(arm: Arm, got: engines.Out | Exception, counted: str) -> None:
    t = Tally()
    arm.judge(t, PROMPT, Asked(got), 3)
    counts = {c: getattr(t, c) for c in ("right", "wrong", "failed", "none", "aborted")}
    assert counts == {c: int(c == counted) for c in counts}
    assert t.bad() == (counted in ("wrong", "none"))
    if counted in ("right", "wrong"):
        assert (t.prompt, t.computed) == (len(PROMPT), 1)


def test_a_request_whose_client_left_counts_as_aborted_alone(arm: Arm) -> None:
    t, asked = Tally(), Asked(answer([1, 1, 1]))
    arm.leave(t, asked)
    arm.judge(t, PROMPT, asked, 3)
    assert (t.aborted, t.right, t.wrong, t.failed, t.none) == (1, 0, 0, 0, 0)


def test_changes_of_a_reference() -> None:
    kv = {"a": {"b": "00ff1234"}, "blocks": [[1, 2]]}
    assert changed(kv, "a.b", other_id)["a"]["b"] == "11000000"
    assert changed(kv, "blocks", lambda v: v[0])["blocks"] == [1, 2]
    assert kv == {"a": {"b": "00ff1234"}, "blocks": [[1, 2]]}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_descriptions_have_both_engines_and_no_unknown_name(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    described = Described(file.read_text(), tmp_path, {"kvspray": "kvspray"})
    assert {"P", "D"} == set(described.fields["engines"])
    a: Any = Arm(described, tmp_path, "")
    p, d = a.params()
    assert json.dumps([p, d]).count("${") == 0
    assert any(wants(a, field) for _, field in SITUATIONS.values())
