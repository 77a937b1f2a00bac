"""Fields that are declared once reach the sampling, the engines and the messages of errors."""

from typing import Any

import msgspec
import pytest

from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.schema.chat import ChatRequest
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InvalidRequestError
from inlay.engine.sglang.capabilities import REFUSALS
from inlay.messages.fields import (
    FOR_SGLANG,
    FOR_VLLM,
    LACKED_BY_SGLANG,
    LACKED_BY_VLLM,
    MODEL_DEFAULTS,
    SAMPLING,
    Bounds,
    check_bounds,
    fields_of,
)
from inlay.messages.request import Sampling


def test_a_neutral_value_is_the_default_of_the_sampling() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(Sampling)}
    assert {name: each.neutral for name, each in SAMPLING.items()} == {
        name: defaults[name] for name in SAMPLING
    }


def test_every_engine_is_given_each_plain_field_or_refuses_it() -> None:
    refused = {refusal.feature for refusal in REFUSALS}
    assert set(LACKED_BY_SGLANG) <= refused
    # The rest each engine's own `params_of` says in its own way.
    given = {name for _, name in FOR_VLLM} | set(LACKED_BY_VLLM)
    assert set(SAMPLING) - given == {"min_tokens", "ignore_eos"}
    assert set(SAMPLING) - {name for _, name in FOR_SGLANG} - refused == {"top_k", "ignore_eos"}


def test_every_declared_field_has_a_sentence_and_numbers_have_bounds() -> None:
    numbers = {"temperature", "top_k", "n", "seed", "best_of", "max_tokens"}
    for name, each in fields_of(GenerationRequest).items():
        assert each.text.endswith("."), name
        assert each.bounds is not None or name not in numbers, name
    assert {name: kind for name, kind in MODEL_DEFAULTS.items() if kind is int} == {"top_k": int}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_p": 1.5}, "min_p must be from 0 to 1, got 1.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_what_is_allowed(
    fields: dict[str, Any], words: str
) -> None:
    (name,) = fields
    for request in (CompletionRequest(**fields), ChatRequest(messages=[], **fields)):
        with pytest.raises(InvalidRequestError) as raised:
            check_bounds(request)
        assert (raised.value.message, raised.value.param) == (words, name)
        check_bounds(request, without=name)


def test_bounds_are_inclusive_but_where_they_say_above() -> None:
    assert [Bounds(0, 1).allow(value) for value in (-0.1, 0, 1, 1.1)] == [False, True, True, False]
    assert [Bounds(0, 1, above=True).allow(value) for value in (0, 0.1, 1)] == [False, True, True]
    assert not Bounds(0).allow(float("nan"))
