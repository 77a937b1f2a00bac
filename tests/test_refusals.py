from typing import Any

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.messages.card import Refusal
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.refusals import check
from inlay.messages.request import Grammar, Request, Sampling

TEXT = Prompt.of(Tokens([1, 2]))
ROWS = Prompt.of(Rows(Buffer(bytes(8)), "float32", (2, 1)))
MIXED = TEXT + ROWS


def make_request(prompt: Prompt, **options: Any) -> Request:
    fields = {
        name: options.pop(name) for name in tuple(options) if name in Request.__struct_fields__
    }
    return Request(id="w", prompts=(prompt,), params=Sampling(max_tokens=1, **options), **fields)


@pytest.mark.parametrize(
    ("prompts", "refused"),
    [("any", [TEXT, ROWS, MIXED]), ("rows", [ROWS, MIXED]), ("mixed", [MIXED])],
)
def test_a_feature_is_refused_with_the_prompts_it_is_refused_with(
    prompts: Any, refused: list[Prompt]
) -> None:
    refusals = (Refusal("repetition_penalty", prompts, "it would see ids that are not there"),)
    for prompt in (TEXT, ROWS, MIXED):
        check(refusals, make_request(prompt), "vllm 1.2")
        asked = make_request(prompt, repetition_penalty=1.5)
        if prompt in refused:
            with pytest.raises(
                InvalidRequestError, match="it would see ids that are not there"
            ) as raised:
                check(refusals, asked, "vllm 1.2")
            assert "vllm 1.2" in raised.value.message
            assert raised.value.param == "repetition_penalty"
        else:
            check(refusals, asked, "vllm 1.2")


@pytest.mark.parametrize(
    ("feature", "asked", "allowed"),
    [
        ("adapter", {"adapter": "a"}, {}),
        ("grammar", {"grammar": Grammar("json_object")}, {}),
        ("grammar_after", {"grammar": Grammar("json_object", after=(5,))}, {"grammar": Grammar("json_object")}),
        ("prompt_logprobs", {"prompt_logprobs": 0}, {"logprobs": 1}),
        ("presence_penalty", {"presence_penalty": -1.0}, {"frequency_penalty": 1.0}),
        ("frequency_penalty", {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}),
        ("prior_output_with_grammar", {"prior_output": (4,), "grammar": Grammar("json_object")}, {"prior_output": (4,)}),
        ("prior_output_with_penalties", {"prior_output": (4,), "presence_penalty": 1.0}, {"presence_penalty": 1.0}),
        ("temperature_above_2", {"temperature": 2.1}, {"temperature": 2.0}),
        ("bad_words", {"bad_words": ((5,),)}, {"logit_bias": {5: -1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (5,)}, {"bad_words": ((5,),)}),
        ("min_tokens", {"min_tokens": 1}, {"min_p": 0.5}),
        ("min_p", {"min_p": 0.5}, {"min_tokens": 1}),
    ],
)  # fmt: skip
def test_every_feature_is_told_from_its_neighbour(
    feature: Any, asked: dict[str, Any], allowed: dict[str, Any]
) -> None:
    refusals = (Refusal(feature, "any", "no"),)
    check(refusals, make_request(TEXT, **allowed), "e 1")
    with pytest.raises(InvalidRequestError, match="is not supported by the engine of this model"):
        check(refusals, make_request(TEXT, **asked), "e 1")
