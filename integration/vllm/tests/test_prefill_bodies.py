"""The router's body for a prefill engine, for each field of vLLM's request classes: what vLLM
accepts from a client it must accept from the router, or each such request is computed twice."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

# Made by `go test ./proxy -run TestPrefillBodies -update`, which adds the bodies of the prefill.
FILE = pathlib.Path(__file__).parents[3] / "proxy" / "testdata" / "prefill.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
CLASSES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


def accept(path: str, body: dict[str, Any]) -> None:
    request = CLASSES[path].model_validate(body)
    if not request.use_beam_search:
        request.to_sampling_params(1 if request.max_tokens is None else request.max_tokens, {})


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(c["body"]))
def test_vllm_accepts_the_body_of_the_prefill(case: dict[str, Any]) -> None:
    accept(case["path"], case["body"])
    if case["prefill"] is not None:
        accept(case["path"], case["prefill"])


@pytest.mark.parametrize("path", CLASSES)
def test_each_field_of_vllm_has_a_case(path: str) -> None:
    tried = {key for case in CASES if case["path"] == path for key in case["body"]}
    missing = sorted(set(CLASSES[path].model_fields) - tried)
    assert not missing, f"add bodies with {missing} to {FILE}, then run go test -update"


def test_a_body_with_the_clients_fields_alone_is_refused() -> None:
    """The cases can fail: vLLM refuses logprob_token_ids without logprobs."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprob_token_ids": [5]}
    with pytest.raises(VLLMValidationError, match="logprob"):
        accept("/v1/chat/completions", body)
