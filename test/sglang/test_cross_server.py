"""vLLM's and SGLang's own servers on a CPU as one pair, in both directions: tokens equal those of
one plain engine, both sidecars see equal pages, and what differs is refused by name. A sidecar that
dies costs an error, or a prompt that is computed again, and never a wrong answer.
"""

from __future__ import annotations

import concurrent.futures as cf
import importlib.util
import json
import os
import pathlib
import random
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from cross_pair import CHUNK, VLLM, Cross
from sglang_server import error_of, rig

MUST = "sglang" in os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
if not MUST and importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang: make test-sglang makes its environment", allow_module_level=True)
if not MUST and not pathlib.Path(VLLM.python).exists():
    pytest.skip("vllm: make test-sglang makes its environment", allow_module_level=True)

ANSWER = 8


def prompt(seed: object, tokens: int) -> list[int]:
    r = random.Random(str(seed))
    return [r.randrange(2, 900) for _ in range(tokens)]


# Around the pages of both engines (16 and 32 tokens), and around the chunks of a prefill.
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, CHUNK - 1, CHUNK, CHUNK + 1, 300, 511, 700, 1000)
ALONE = [prompt(("alone", n), n) for n in SIZES]
TOGETHER = [prompt(("together", i), random.Random(i).randrange(1, 500)) for i in range(16)]
UNDER_WAY = [prompt(("under way", i), 900) for i in range(18)]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def pair(request: pytest.FixtureRequest) -> Iterator[Cross]:
    """The prefill is of this kind, and decode of the other."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as dir:
        p = Cross(request.param, pathlib.Path(dir), pathlib.Path(dir))
        try:
            p.start()
            p.plain = {
                tuple(ids): p.alone(ids, ANSWER) for ids in [*ALONE, *TOGETHER, *UNDER_WAY]
            }  # fmt: skip
            yield p
            assert p.vllm.up() and p.sglang.up() and p.bridge.up(), "all outlive everything"
            assert all(s.panics() is None for s in p.sidecars)
        finally:
            p.stop()


def right(p: Cross, ids: list[int]) -> bool:
    return p.ask(ids, ANSWER) == p.plain[tuple(ids)]


def test_the_plain_answers_differ(pair: Cross) -> None:
    """Equal tokens mean equal caches only if each prompt has an answer of its own."""
    assert len({tuple(a) for a in pair.plain.values()}) == len(pair.plain)


def test_tokens_and_pages(pair: Cross) -> None:
    pair.forget()
    for ids in ALONE:
        before = pair.moved()
        assert right(pair, ids), len(ids)
        assert pair.moved() > before, f"the prompt of {len(ids)} tokens was computed at decode"
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 60, 0.2)
    sent, came = pair.pages()
    assert came and sent == came
    # 2 (K, V) of 4 layers, 2 heads, 32 numbers of 4 bytes: nothing of a prompt was left out.
    assert sum(int(n) for *_, n, _ in came) == sum(SIZES) * 2 * 4 * 2 * 32 * 4


def test_together(pair: Cross) -> None:
    pair.forget()
    with cf.ThreadPoolExecutor(5) as pool:
        assert all(pool.map(lambda ids: right(pair, ids), TOGETHER))
        # Again, with parts of the prompts in the engines' own caches.
        longer = [ids + ids[:5] for ids in TOGETHER]
        got = list(pool.map(lambda ids: pair.ask(ids, ANSWER), longer))
    assert got == [pair.alone(ids, ANSWER) for ids in longer]


def test_clients_that_go_away(pair: Cross) -> None:
    """At random times, while others use the pages again: no late write, and nothing stays open."""
    r = random.Random(7)
    with cf.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(right, pair, ids) for ids in TOGETHER]
        for i in range(12):
            gone = prompt(("gone", i), r.randrange(100, 900))
            pair.give_up(gone, ANSWER, r.uniform(0, 0.6))
        assert all(f.result() for f in others)
    rig.wait_for("no lease open", lambda: pair.leases() == 0, 90, 0.2)


def test_what_one_engine_does_not_have(pair: Cross) -> None:
    ids = ALONE[3]
    vllm = [{"n": 2}, {"cache_salt": "x"}, {"prompt": "text"}, {"prompt": [ids, ids]}]
    sglang = [{"return_logprob": True}, {"lora_path": "x"}, {"input_ids": [-1]},
              {"sampling_params": {"frequency_penalty": 1}}]  # fmt: skip
    for more in sglang if pair.prefill == "vllm" else vllm:
        path, key = ("/generate", "input_ids") if more in sglang else ("/v1/completions", "prompt")
        with pytest.raises(urllib.error.HTTPError) as err:
            pair.post(
                path, {key: ids, "model": "tiny"} | more if key == "prompt" else {key: ids} | more
            )
        name = next(iter(more.get("sampling_params", more)))
        assert err.value.code == 400 and name in error_of(err.value)


def rename(p: Cross, name: str) -> str:
    """Gives vLLM's weights another name, and returns the one before."""
    body = json.dumps({"method": "kvspray_set_weights", "args": [name]}).encode()
    request = urllib.request.Request(
        p.vllm.url + "/collective_rpc", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.loads(answer.read())["results"][0])


def test_other_weights_are_refused_by_name(pair: Cross) -> None:
    ids = ALONE[-1]
    before = pair.moved()
    name = rename(pair, "others")  # vLLM opens another session with its sidecar meanwhile
    try:
        if pair.prefill == "vllm":

            def refused() -> bool:
                pair.forget()
                with pytest.raises(urllib.error.HTTPError) as err:
                    right(pair, ids)
                text = error_of(err.value)
                return "weights" in text and "others" in text and name in text

            rig.wait_for("an error that names the weights of both", refused, 120, 0.2)
        else:
            for _ in range(4):
                pair.forget()
                assert right(pair, ids), "vLLM computes it"
        assert pair.moved() == before
    finally:
        rename(pair, name)
    rig.wait_for("a transfer with equal weights", lambda: answered(pair, ids), 60, 0.2)


@pytest.mark.parametrize("side", [0, 1])
def test_a_sidecar_dies(pair: Cross, side: int) -> None:
    """At several moments of a prefill and its transfer."""
    sidecar, jobs = pair.sidecars[side], UNDER_WAY[9 * side :][:9]
    answers, errors = 0, []
    for i in range(0, len(jobs), 3):
        pair.forget()
        with cf.ThreadPoolExecutor(3) as pool:
            under_way = [pool.submit(right, pair, ids) for ids in jobs[i : i + 3]]
            before, begun = pair.moved(), time.monotonic()
            while side == 0 and pair.moved() == before and time.monotonic() < begun + 10:
                time.sleep(0.01)  # until the first bytes are there
            time.sleep(0.05 * i)
            sidecar.kill()
            for f in under_way:
                if f.exception() is None:
                    assert f.result(), "a wrong answer"
                    answers += 1
                else:
                    errors.append(f.exception())
        sidecar.start()
        rig.wait_for("a request with the next sidecar", lambda: answered(pair, ALONE[4]), 120, 0.5)
    assert all(isinstance(err, urllib.error.HTTPError) for err in errors), errors
    print(f"{answers} answers, {len(errors)} errors")


def answered(pair: Cross, ids: list[int]) -> bool:
    pair.forget()
    before = pair.moved()
    try:
        return right(pair, ids) and pair.moved() > before
    except urllib.error.HTTPError:
        return False
