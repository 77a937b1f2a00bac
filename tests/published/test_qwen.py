"""Qwen2.5-Coder-1.5B-Instruct as people use it: chats, tools, JSON, streams, guesses."""

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from inlay.client import PromptEmbedder
from tests.published.conftest import checkpoint
from tests.published.numbers import TOP, Steps, ask, is_exact, read
from tests.published.prompts import QWEN

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASKS_WEATHER = [{"role": "user", "content": "How warm is it in Oslo now, in celsius?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "integer"},
        "fields": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "born", "fields"],
    "additionalProperties": False,
}
SOURCE = '''class FairQueue:
    """Requests of several clients, taken in turn."""

    def __init__(self) -> None:
        self._lines: dict[str, list[int]] = {}

    def put(self, client: str, request: int) -> None:
        self._lines.setdefault(client, []).append(request)

    def take(self) -> int:
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        request = line.pop(0)
        if line:
            self._lines[client] = line
        return request
'''


@pytest.fixture(scope="module")
def name() -> str:
    return QWEN


def chat(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    return asked_for(client, messages, **fields).choices[0]


def asked_for(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    given = {"max_tokens": 64, "temperature": 0, **fields}
    return client.chat.completions.create(model="m", messages=messages, **given)


def test_a_chat_is_the_completion_of_its_template_as_text_and_as_rows(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    told = chat(client, QUESTION, logprobs=True, top_logprobs=5)
    assert told.message.content.strip(" .") == "Paris"
    assert told.finish_reason == "stop"
    embedder = PromptEmbedder.from_pretrained(checkpoint(QWEN))
    rows = embedder.embed_messages(QUESTION)
    done = client.completions.create(
        model="m", max_tokens=64, temperature=0, logprobs=5, **rows.completion_args()
    )
    assert done.choices[0].text == told.message.content
    part = embedder.chat_part(QUESTION[0]["content"])
    mixed = chat(client, [{"role": "user", "content": [part]}], logprobs=True, top_logprobs=5)
    assert mixed.message.content == told.message.content
    if is_exact(http):
        assert mixed.logprobs == told.logprobs
        assert done.choices[0].logprobs.token_logprobs == [
            each.logprob for each in told.logprobs.content
        ]
    for each in told.logprobs.content:
        assert each.logprob == max(other.logprob for other in each.top_logprobs)


def test_a_required_tool_is_called_with_what_its_schema_allows(client: openai.OpenAI) -> None:
    asked = chat(client, ASKS_WEATHER, tools=[WEATHER], tool_choice="required")
    (call,) = asked.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments == {"city": arguments["city"], "unit": "celsius"}
    assert "Oslo" in arguments["city"]


def test_left_to_choose_it_writes_calls_as_fenced_json_which_are_content(
    client: openai.OpenAI,
) -> None:
    told = chat(client, ASKS_WEATHER, tools=[WEATHER])
    assert told.message.tool_calls is None
    assert told.finish_reason == "stop"
    (fenced,) = re.findall(r"```(?:json|xml)\n(.*?)\n```", told.message.content, re.DOTALL)
    assert "get_weather" in fenced


def test_json_is_an_object_and_that_of_a_schema_matches_it(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Describe Marie Curie as JSON: name, born, fields."}]
    free = chat(client, question, response_format={"type": "json_object"}, max_tokens=200)
    assert free.finish_reason == "stop"
    assert isinstance(json.loads(free.message.content), dict)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    held = json.loads(chat(client, question, response_format=form, max_tokens=200).message.content)
    assert list(held) == ["name", "born", "fields"]
    assert held["born"] == 1867


def test_a_stream_is_the_whole_answer_in_pieces(http: httpx.Client, client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Write one line of Python that sums a list."}]
    whole = chat(client, question, logprobs=True, top_logprobs=2)
    text = ""
    logprobs: list[Any] = []
    reasons: list[str] = []
    for event in asked_for(client, question, logprobs=True, top_logprobs=2, stream=True):
        for choice in event.choices:
            text += choice.delta.content or ""
            logprobs += choice.logprobs.content or [] if choice.logprobs else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (text, reasons) == (whole.message.content, [whole.finish_reason])
    assert [each.token for each in logprobs] == [each.token for each in whole.logprobs.content]
    if is_exact(http):
        assert logprobs == whole.logprobs.content


def test_a_seed_draws_the_same_tokens_and_another_others(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Invent a name for a cat and say why."}]
    drawn = [
        chat(client, question, temperature=1.2, seed=seed, max_tokens=24).message.content
        for seed in (7, 7, 8)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_guesses_on_an_edit_of_code_are_taken_and_change_nothing(http: httpx.Client) -> None:
    asked = f"Rename the class FairQueue to TurnQueue. Write the whole file.\n\n{SOURCE}"
    prompt = (
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n```python\nclass TurnQueue"
    )
    before = _guesses(http)
    # Where a step with guesses was slow, as beside other work, they are tried again after a while.
    for _ in range(6):
        choice = ask(http, prompt, max_tokens=100, prompt_logprobs=1)
        drafted, accepted = (now - then for now, then in zip(_guesses(http), before, strict=True))
        print(f"{accepted:.0f} of {drafted:.0f} guesses taken for 100 tokens")
        if accepted:
            break
    assert accepted > 0
    assert SOURCE[len("class FairQueue") :][:200] in choice["text"]
    # Read as a prompt, nothing is guessed.
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    again = read(ask(http, ids, max_tokens=1, prompt_logprobs=TOP))
    said = again[len(choice["prompt_token_ids"]) - 1 :]
    steps = Steps.of_choice(choice)
    if is_exact(http):
        assert steps.said == said
    unguessed = Steps(_likeliest(said), said)
    steps.expect(unguessed, exact=is_exact(http), what="an edit")


def _guesses(http: httpx.Client) -> tuple[float, float]:
    """Tokens that were guessed, and those of them that were taken, so far."""
    text = http.get("/metrics").text
    names = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    drafted, accepted = (
        sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))
        for name in names
    )
    return drafted, accepted


def _likeliest(said: Sequence[dict[int, float]]) -> list[int]:
    return [max(each, key=lambda id_: each[id_]) for each in said]
