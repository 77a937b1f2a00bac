"""`thinking_token_budget` over HTTP, on a model whose reasoning stands between tags."""

from collections.abc import Iterator
from typing import Any

import pytest

from inlay.api.generation.output_format import thinking_budget
from inlay.http import FrontendSettings
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import ThinkingBudget
from inlay.render import Renderer
from tests.live import Fleet, fleet
from tests.models import THINK, add_thinking, make
from tests.payloads import error, post
from tests.render.directories import qwen_like
from tests.scratch import scratch

ASK = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Fleet]:
    with fleet(add_thinking(make("llama", scratch("thinker")))) as running:
        yield running


@pytest.fixture(scope="module")
def thinking_url(thinker: Fleet) -> str:
    return thinker.serve(enable_prompt_embeds=True)


def tags(thinker: Fleet) -> tuple[int, int]:
    renderer = Renderer.load(thinker.path)
    start, end = (renderer.token_id(tag) for tag in THINK)
    assert start is not None
    assert end is not None
    return start, end


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_chat_that_begins_by_thinking_thinks_for_as_many_tokens(
    thinker: Fleet, thinking_url: str, budget: int
) -> None:
    _, end = tags(thinker)
    asked = {
        **ASK,
        "chat_template_kwargs": {"thinks": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    free = post(thinking_url, "/v1/chat/completions", asked).json()
    assert end not in free["choices"][0]["token_ids"], "a random model does not end by itself"
    for unbounded in (None, -1, 1000):
        again = post(
            thinking_url, "/v1/chat/completions", {**asked, "thinking_token_budget": unbounded}
        )
        assert again.json()["choices"] == free["choices"]
    answer = post(
        thinking_url, "/v1/chat/completions", {**asked, "thinking_token_budget": budget}
    ).json()
    found = answer["choices"][0]["token_ids"]
    # The line break that the template puts behind the tag is spent already, as vLLM counts it.
    assert found.index(end) == budget - 1
    assert found[: budget - 1] == free["choices"][0]["token_ids"][: budget - 1]
    assert len(found) == 24
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    assert answer["choices"][0]["message"]["content"]


def test_each_prompt_of_a_completion_has_spent_what_it_has(
    thinker: Fleet, thinking_url: str
) -> None:
    start, end = tags(thinker)
    prompts = [[40, 41], [40, start], [40, start, 41, 42], [40, start, 41, end, 42]]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    more = {"return_token_ids": True, "thinking_token_budget": 3, "n": 2}
    choices = post(thinking_url, "/v1/completions", {**body, **more}).json()["choices"]
    places = [
        choice["token_ids"].index(end) if end in choice["token_ids"] else None for choice in choices
    ]
    assert places == [None, None, 3, 3, 1, 1, None, None]


def test_a_model_without_tags_and_a_number_that_is_none_are_refused(
    url: str, thinking_url: str
) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/chat/completions", ASK),
    ):
        found = error(post(url, path, {**body, "thinking_token_budget": 5}))
        assert (found["param"], "--reasoning-parser" in found["message"]) == (
            "thinking_token_budget",
            True,
        )
        assert post(url, path, {**body, "thinking_token_budget": -1}).status_code == 200
        for bad in (-2, 1.5, True, "5"):
            found = error(post(thinking_url, path, {**body, "thinking_token_budget": bad}))
            assert found["param"] == "thinking_token_budget"


def test_channels_have_no_budget() -> None:
    from inlay.base.errors import InvalidRequestError

    renderer = Renderer.load(qwen_like())
    settings = FrontendSettings(reasoning_parser="openai_gptoss")
    with pytest.raises(InvalidRequestError, match="in a channel"):
        thinking_budget(4, settings, renderer)


def rows(count: int) -> Rows:
    return Rows(Buffer(bytes(4 * count)), "float32", (count, 1))


@pytest.mark.parametrize(
    ("segments", "spent"),
    [
        ([Tokens((1, 7, 2, 3))], 2),
        ([Tokens((1, 2, 3))], None),
        ([Tokens((7, 2, 8, 3))], None),
        ([Tokens((7, 8, 7))], 0),
        ([Tokens((7, 7, 1))], 1),
        ([Tokens((1, 7)), rows(5), Tokens((4,))], 6),
        ([Tokens((1, 7)), rows(5), Tokens((8, 4))], None),
        ([rows(5)], None),
    ],
)
def test_what_a_prompt_has_spent_counts_rows_too(segments: list[Any], spent: int | None) -> None:
    assert ThinkingBudget(9, (7,), (8,)).spent_in(Prompt.of(*segments)) == spent


def test_tags_of_several_ids_are_found_whole() -> None:
    budget = ThinkingBudget(9, (5, 6), (6, 5))
    assert budget.spent_in(Prompt.of(Tokens((5, 6, 1, 6)))) == 2
    assert budget.spent_in(Prompt.of(Tokens((5, 1, 6)))) is None
