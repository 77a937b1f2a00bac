"""Prompt logprobs and echo through the real client, against what `transformers` says."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from torch import Tensor

from inlay.api.generation.logprobs import LEAST, PromptScores
from inlay.base.errors import EngineError
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import PromptLogprobs
from tests.equality.reference import model_of, tokenizer_of
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.payloads import TEXT, embeds_of, error, post, saved

SCORE: dict[str, Any] = {"model": "tiny", "temperature": 0}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(llama: Fleet) -> list[int]:
    found: list[int] = tokenizer_of(llama.path)(TEXT)["input_ids"]
    return found


def truth(fleet: Fleet, tokens: list[int]) -> Tensor:
    """float32 [positions, V]: row i is of what may stand at position i + 1."""
    with torch.no_grad():
        logits: Tensor = model_of(fleet.path)(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(dim=-1)


def own(expected: Tensor, tokens: list[int]) -> list[float]:
    """The logprob of every token but the first."""
    found: list[float] = (
        expected[: len(tokens) - 1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    )
    return found


def near(found: Any, expected: list[float]) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() < TOLERANCE)


def test_a_harness_scores_a_text_by_echo_without_output(
    client: openai.OpenAI, llama: Fleet, tokens: list[int]
) -> None:
    answer = client.completions.create(**SCORE, prompt=TEXT, echo=True, logprobs=2, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == TEXT
    logprobs, top = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
    assert logprobs[0] is None
    assert top[0] is None
    expected = truth(llama, tokens)
    assert near(logprobs[1:], own(expected, tokens))
    best = expected[:-1].topk(2, dim=-1).values.tolist()
    assert all(
        near(sorted(row.values())[-2:], sorted(pair))
        for row, pair in zip(top[1:], best, strict=True)
    )
    assert choice.logprobs.text_offset == [
        sum(map(len, choice.logprobs.tokens[:place])) for place in range(len(tokens))
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 0)


def test_lists_of_ids_are_scored_as_lm_eval_asks_for_it(
    client: openai.OpenAI, llama: Fleet, tokens: list[int]
) -> None:
    prompts = [tokens, tokens[:3], tokens[2:]]
    answer = client.completions.create(
        **SCORE, prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        logprobs = choice.logprobs.token_logprobs or []
        assert len(logprobs) == len(prompt) + 1
        assert near(logprobs[1:-1], own(truth(llama, prompt), prompt))
        top = choice.logprobs.top_logprobs or []
        # What such a harness calls greedy: the token's own logprob is the highest told.
        for place in range(1, len(prompt)):
            likeliest = truth(llama, prompt)[place - 1].argmax().item() == prompt[place]
            assert (logprobs[place] == max(top[place].values())) == likeliest


def test_echo_and_logprobs_of_the_output_follow_those_of_the_prompt(
    url: str, tokens: list[int]
) -> None:
    body = {**SCORE, "prompt": TEXT, "max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    plain = post(url, "/v1/completions", body).json()["choices"][0]
    echoed = post(url, "/v1/completions", {**body, "echo": True}).json()["choices"][0]
    assert echoed["text"] == TEXT + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][len(tokens) :] == plain["logprobs"][name], name
    shift = sum(map(len, echoed["logprobs"]["tokens"][: len(tokens)]))
    assert echoed["logprobs"]["text_offset"][len(tokens) :] == [
        shift + offset for offset in plain["logprobs"]["text_offset"]
    ]
    assert echoed["prompt_logprobs"] is None


def test_a_stream_echoes_what_the_whole_echoes(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**SCORE, "prompt": TEXT, "echo": True, "logprobs": 1, "n": 2, "seed": 3}
    body |= {"temperature": 1.0, "max_tokens": 5}
    whole = client.completions.create(**body)
    text = {0: "", 1: ""}
    logprobs: dict[int, list[float | None]] = {0: [], 1: []}
    for event in client.completions.create(**body, stream=True):
        for choice in event.choices:
            text[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs or []
    for choice in whole.choices:
        assert text[choice.index] == choice.text
        assert choice.logprobs is not None
        assert logprobs[choice.index] == choice.logprobs.token_logprobs


def test_prompt_logprobs_have_the_shape_that_vllm_gives_them(
    client: openai.OpenAI, llama: Fleet, tokens: list[int]
) -> None:
    answer = client.completions.create(
        **SCORE, prompt=tokens, max_tokens=1, n=2, extra_body={"prompt_logprobs": 2}
    )
    expected = truth(llama, tokens)
    for choice in answer.choices:
        shown = choice.model_dump()["prompt_logprobs"]
        assert choice.logprobs is None
        assert len(shown) == len(tokens)
        assert shown[0] is None
        for place, entry in enumerate(shown[1:], 1):
            assert next(iter(entry)) == str(tokens[place])
            best = expected[place - 1].topk(2).indices.tolist()
            assert set(entry) == {str(tokens[place]), *map(str, best)}
            for id_, item in entry.items():
                assert abs(item["logprob"] - expected[place - 1, int(id_)].item()) < TOLERANCE
                assert (
                    item["rank"]
                    == int((expected[place - 1] > expected[place - 1, int(id_)]).sum()) + 1
                )
                assert item["decoded_token"] == tokenizer_of(llama.path).decode([int(id_)])


def test_a_prompt_as_long_as_the_model_takes_is_scored_without_output(
    url: str, llama: Fleet
) -> None:
    body = {**SCORE, "prompt": [5, 6] * 256, "echo": True, "logprobs": 0}
    answer = post(url, "/v1/completions", {**body, "max_tokens": 0}).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 512
    assert near(
        answer["choices"][0]["logprobs"]["token_logprobs"][1:],
        own(truth(llama, [5, 6] * 256), [5, 6] * 256),
    )
    assert (
        "maximum context length"
        in error(post(url, "/v1/completions", {**body, "max_tokens": 1}))["message"]
    )


def test_echo_without_logprobs_and_without_output_is_the_prompt(url: str) -> None:
    answer = post(
        url, "/v1/completions", {**SCORE, "prompt": [TEXT, "the"], "echo": True, "max_tokens": 0}
    )
    assert [choice["text"] for choice in answer.json()["choices"]] == [TEXT, "the"]
    assert answer.json()["usage"]["completion_tokens"] == 0
    lines = post(
        url,
        "/v1/completions",
        {**SCORE, "prompt": TEXT, "echo": True, "max_tokens": 0, "stream": True},
    )
    assert TEXT in lines.text


def test_logprobs_of_prompts_that_could_not_be_held_are_refused(llama: Fleet) -> None:
    small = llama.serve(max_inflight_bytes=1 << 20, max_body_bytes=1 << 16)
    body = {**SCORE, "prompt": [5] * 200, "prompt_logprobs": 20, "max_tokens": 1}
    found = error(post(small, "/v1/completions", body))
    assert found["param"] == "prompt_logprobs"
    assert "4200 in all" in found["message"]
    assert post(small, "/v1/completions", {**body, "prompt_logprobs": 1}).status_code == 200


def test_rows_have_neither_echo_nor_prompt_logprobs(url: str, llama: Fleet) -> None:
    mixed = [
        {"type": "token_ids", "token_ids": [5]},
        {"type": "prompt_embeds", "data": saved(embeds_of(llama))},
    ]
    for fields in (
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 0},
        {"suffix": "x"},
    ):
        for prompt in (mixed, [mixed, [{"type": "text", "text": TEXT}]]):
            response = post(url, "/v1/completions", {"prompt": prompt, **fields})
            assert response.status_code == 400
            assert "rows have no token ids" in error(response)["message"]


def test_engines_that_have_no_model_tell_logprobs_too() -> None:
    with fleet(tiny("llama"), engine="echo") as running:
        url = running.serve()
        body = {"prompt": TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
        for max_tokens in (0, 2):
            choice = post(url, "/v1/completions", {**body, "max_tokens": max_tokens}).json()[
                "choices"
            ][0]
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert set(choice["logprobs"]["token_logprobs"][1:]) == {0.0}
            assert choice["prompt_logprobs"][1]


def test_a_chat_tells_of_its_prompt_once_for_all_choices(
    client: openai.OpenAI, llama: Fleet
) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=1,
        n=2,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True, "truncate_prompt_tokens": 9},
    ).model_dump()
    ids, shown = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert len(ids) == len(shown) == 9
    assert shown[0] is None
    found = [entry[str(id_)]["logprob"] for id_, entry in zip(ids[1:], shown[1:], strict=True)]
    assert near(found, own(truth(llama, ids), ids))


def piece(start: int, ids: list[list[int]], logprobs: list[list[float]]) -> PromptLogprobs:
    return PromptLogprobs(
        start,
        np.asarray(ids, np.int32).tobytes(),
        np.asarray(logprobs, np.float32).tobytes(),
        np.ones(len(ids), np.int32).tobytes(),
    )


def test_another_attempt_tells_a_prompt_from_its_start() -> None:
    scores = PromptScores(Prompt.of(Tokens([1, 2, 3])))
    scores.take(piece(1, [[2, 9]], [[-1.0, -0.5]]))
    scores.take(piece(1, [[2, 8]], [[-1.0, -0.25]]))
    with pytest.raises(EngineError, match="1 of 2"):
        scores.take_all((), complete=True)
    scores.take(piece(2, [[3, 8]], [[-np.inf, 0.0]]))
    scores.take_all((), complete=True)
    assert [(entry.logprob, entry.top) for entry in scores.entries(1)] == [
        (-1.0, ((8, -0.25),)),
        (LEAST, ((8, 0.0),)),
    ]


@pytest.mark.parametrize("start", [0, 3])
def test_positions_that_are_not_next_are_an_engines_fault(start: int) -> None:
    scores = PromptScores(Prompt.of(Tokens([1, 2, 3])))
    with pytest.raises(EngineError, match="sent logprobs"):
        scores.take(piece(start, [[2]], [[-1.0]]))


def test_a_prompt_of_one_token_has_nothing_to_tell(url: str) -> None:
    body = {
        **SCORE,
        "prompt": [5],
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "max_tokens": 0,
    }
    response: httpx.Response = post(url, "/v1/completions", body)
    (choice,) = response.json()["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None]
