"""`/v1/chat/completions` through the real client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.equality.reference import greedy, rows_of, tokenizer_of
from tests.live import Fleet
from tests.payloads import TEXT, embeds_of, error, post, saved

ASK: list[dict[str, Any]] = [
    {"role": "system", "content": "count"},
    {"role": "user", "content": TEXT},
]
GREEDY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(llama: Fleet) -> list[int]:
    tokenizer = tokenizer_of(llama.path)
    ids = tokenizer.apply_chat_template(
        ASK, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return greedy(llama.path, rows_of(llama.path, ids), 12)


def ids_of(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_a_chat_says_what_transformers_says(url: str, expected: list[int]) -> None:
    answer = post(url, "/v1/chat/completions", {**GREEDY, "messages": ASK}).json()
    assert ids_of(answer) == expected
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_rows_in_the_place_of_text_say_the_same(
    llama: Fleet, url: str, expected: list[int]
) -> None:
    part = {"type": "prompt_embeds", "data": saved(embeds_of(llama))}
    for content in ([part], [part, {"type": "text", "text": ""}]):
        messages = [ASK[0], {"role": "user", "content": content}]
        answer = post(url, "/v1/chat/completions", {**GREEDY, "messages": messages}).json()
        assert ids_of(answer) == expected
        assert answer["prompt_token_ids"] is None
    parts = [{"type": "text", "text": TEXT}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "count"}]},
        {"role": "user", "content": parts},
    ]
    assert (
        ids_of(post(url, "/v1/chat/completions", {**GREEDY, "messages": messages}).json())
        == expected
    )


def test_the_openai_client_streams_what_it_gets_whole(client: Any) -> None:
    whole = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=9,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=2,
    )
    texts, roles, tokens = ["", ""], ["", ""], [0, 0]
    usage = None
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=9, n=2, seed=3, logprobs=True, top_logprobs=2,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles[choice.index] += choice.delta.role or ""
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                tokens[choice.index] += len(choice.logprobs.content or [])
    assert roles == ["assistant", "assistant"]
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert sum(tokens) == usage.completion_tokens == whole.usage.completion_tokens
    first = whole.choices[0].logprobs
    assert first is not None
    assert first.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in first.content)
    data = b"".join(bytes(entry.bytes or []) for entry in first.content)
    assert (whole.choices[0].message.content or "") in data.decode("utf-8", "replace")


def test_a_final_message_is_continued(url: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    body = {
        **GREEDY,
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    answer = post(url, "/v1/chat/completions", body).json()
    assert answer["choices"][0]["token_ids"]
    tokens = post(url, "/tokenize", {"messages": messages, "continue_final_message": True}).json()[
        "tokens"
    ]
    assert answer["prompt_token_ids"] == tokens
    assert (
        "exclude each other"
        in error(post(url, "/v1/chat/completions", {**body, "add_generation_prompt": True}))[
            "message"
        ]
    )


def test_max_completion_tokens_wins(url: str) -> None:
    body = {**GREEDY, "messages": ASK, "max_completion_tokens": 3, "ignore_eos": True}
    assert post(url, "/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 3


def test_tools_a_model_may_not_call_change_nothing_where_its_template_ignores_them(
    url: str, expected: list[int]
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {**GREEDY, "messages": ASK, "tools": [tool], "tool_choice": "none"}
    assert ids_of(post(url, "/v1/chat/completions", body).json()) == expected


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": None}, "messages", "got `null`"),
    ({"messages": [5]}, "messages[0]", "got `int`"),
    ({"messages": [{}]}, "messages[0].role", "must be a string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "list of parts, got 5"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role", "user, assistant, tool, or a role that"),
    ({"messages": [{"rol": "user", "content": "x"}]}, "messages[0].role", "got nothing beside 'rol', 'content'"),
    ({"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].content", "got nothing beside 'role', 'contnt'"),
    ({"messages": [{"role": "user", "content": [{"typ": "text", "text": "x"}]}]},
     "messages[0].content[0].type", "one of text, prompt_embeds, image_url, image_embeds, input_audio, audio_url, audio_embeds, video_url, got nothing beside 'typ', 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
     "messages[0].content[0].text", "must be a string, got nothing beside 'type', 'txt'"),
    ({"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "dat": "x"}]}]},
     "messages[0].content[0]", "exactly one of data, ref and part, got nothing beside 'type', 'dat'"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", "an object, got nothing beside 'type', 'name'"),
    ({"tools": [{"type": "function", "function": {"nam": "f"}}]}, "tools[0].function.name", "got nothing beside 'nam'"),
    ({"response_format": {"typ": "json_object"}}, "response_format", "got an object with 'typ'"),
    ({"response_format": {"type": "json"}}, "response_format", "'json_schema', got type 'json'"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "got nothing beside 'type', 'schema'"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "`bool | null`, got `str`"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "the model's own is used"),
    ({"documents": []}, "documents", "chat_template_kwargs.documents"),
    ({"functions": []}, "functions", "replaced by tools"),
    ({"function_call": "auto"}, "function_call", "replaced by tool_choice"),
    ({"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, "modalities", "does not speak"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "ask for it with modalities"),
    ({"web_search_options": {}}, "web_search_options", "nobody searches the web"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "object with a type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "takes no video"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "takes no images"),
    ({"messages": [{"role": "user", "content": "x", "more": nested(100)}]}, "messages", "more than 64 levels"),
    ({"chat_template_kwargs": {"a": nested(100)}}, "chat_template_kwargs", "more than 64 levels"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "field of the request"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed when logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20, got 21"),
    ({"logprobs": 2}, "logprobs", "got `int`"),
    ({"n": 1000}, "n", "at most 128"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20, got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available when stream"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or from 1 to 512, got 0"),
    ({"echo": True}, "echo", "not supported"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "name and schema"),
]  # fmt: skip


@pytest.mark.extensions("stages")
@pytest.mark.parametrize(("fields", "param", "phrase"), BAD)
def test_what_is_wrong_with_a_chat_is_named(
    url: str, fields: dict[str, Any], param: str, phrase: str
) -> None:
    response = post(url, "/v1/chat/completions", {**GREEDY, "messages": ASK, **fields})
    found = error(response)
    assert (response.status_code, found["param"]) == (400, param), found
    assert phrase in found["message"]


def test_a_chat_that_its_template_leaves_out_whole_is_refused_before_an_engine_sees_it(
    llama: Fleet, tmp_path: Path
) -> None:
    # Found by the fuzzer: a role the template does not know was a prompt without positions.
    template = tmp_path / "users.jinja"
    template.write_text(
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    )
    url = llama.serve(chat_template=str(template))
    for role, param, phrase in (
        ("assistant", "messages", "at least one position"),
        ("tool", "messages[0]", "writes no messages of the role 'tool'"),
    ):
        asked = {**GREEDY, "messages": [{"role": role, "content": "x"}]}
        response = post(url, "/v1/chat/completions", asked)
        found = error(response)
        assert (response.status_code, found["param"]) == (400, param), found
        assert phrase in found["message"]


def test_messages_are_required(url: str) -> None:
    found = error(post(url, "/v1/chat/completions", {"model": "tiny"}))
    assert (found["param"], "required field `messages`" in found["message"]) == ("messages", True)


def test_text_that_looks_like_what_stands_for_rows_stays_text(llama: Fleet, url: str) -> None:
    odd = "<prompt_embeds> <##PROMPT_EMBEDS##>"
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": odd})},
    }
    messages = [
        {"role": "user", "content": [{"type": "prompt_embeds", "data": saved(embeds_of(llama))}]},
        {"role": "assistant", "content": odd, "tool_calls": [call]},
        {"role": "user", "content": odd},
    ]
    answer = post(url, "/v1/chat/completions", {**GREEDY, "messages": messages})
    assert answer.status_code == 200
