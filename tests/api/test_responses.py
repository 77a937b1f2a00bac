"""`/v1/responses` through the real client: what a chat says, in the words of the Responses API."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.saying import Says
from tests.live import Fleet
from tests.payloads import TEXT, constant, embeds_of, error, post, saved

ASK = [{"role": "system", "content": "count"}, {"role": "user", "content": TEXT}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_of(url: str, messages: list[Any], **fields: Any) -> Any:
    return post(
        url, "/v1/chat/completions", {**GREEDY, "messages": messages, "max_tokens": 12, **fields}
    ).json()


def test_a_response_says_what_the_chat_of_the_same_words_says(url: str, client: Any) -> None:
    chat = chat_of(url, ASK)
    for words in (
        {"instructions": "count", "input": TEXT},
        {"input": ASK},
        {"input": [{"role": "developer", "content": "count"}, {"type": "message", **ASK[1]}]},
        {"input": [ASK[0], {"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
    ):
        response = client.responses.create(
            **GREEDY, **words, max_output_tokens=12, metadata={"k": "v"}
        )
        assert response.output_text == chat["choices"][0]["message"]["content"]
        assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
        assert response.usage.output_tokens == chat["usage"]["completion_tokens"]
        assert response.usage.total_tokens == chat["usage"]["total_tokens"]
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.metadata) == ("response", "tiny", {"k": "v"})
    assert (response.temperature, response.tool_choice, response.tools) == (0, "auto", [])
    assert json.loads(response.model_dump_json())["store"] is False


def test_positions_of_an_input_are_counted_as_its_response_counts_them(
    url: str, client: Any, llama: Fleet
) -> None:
    rows = {"type": "prompt_embeds", "data": saved(embeds_of(llama))}
    said = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}, rows]}]
    for words in ({"input": TEXT, "instructions": "count"}, {"input": said}):
        counted = client.responses.input_tokens.count(model="tiny", **words)
        response = client.responses.create(**GREEDY, **words, max_output_tokens=2)
        assert counted.input_tokens == response.usage.input_tokens
    refused = post(url, "/v1/responses/input_tokens", {"input": []})
    assert (refused.status_code, error(refused)["param"]) == (400, "input")


def test_the_input_of_many_turns_is_that_of_a_chat(says: Says) -> None:
    client = says.openai("{{ messages | tojson }}<|im_end|>")
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}]}  # fmt: skip
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{n}",
            "call_id": f"c{n}",
            "name": "look",
            "arguments": '{"at": 1}',
        }
        for n in range(2)
    ]
    outputs = [
        {"type": "function_call_output", "call_id": f"c{n}", "output": f"seen {n}"}
        for n in range(2)
    ]
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "go"},
        reasoning, said, *calls, *outputs,
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    response = client.responses.create(model="tiny", instructions="be kind", input=items)
    assert response.status == "completed"
    messages = json.loads(response.output_text)
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user",
    ]  # fmt: skip
    assert messages[0]["content"] == "be kind\n\nbe brief"
    turn = messages[2]
    assert turn["reasoning_content"] == "hm"
    assert "I look" in json.dumps(turn["content"])
    assert [call["id"] for call in turn["tool_calls"]] == ["c0", "c1"]
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"at": 1}] * 2
    assert [(message["tool_call_id"], message["content"]) for message in messages[3:5]] == [
        ("c0", "seen 0"),
        ("c1", "seen 1"),
    ]
    assert messages[5] == {"role": "assistant", "content": "done"}


TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def test_the_events_of_a_stream_come_in_order_and_say_what_the_whole_response_says(
    client: Any,
) -> None:
    asked = {**GREEDY, "input": TEXT, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kinds.count(kind) for kind in TEXT_EVENTS] == [
        1,
        1,
        1,
        1,
        kinds.count(TEXT_EVENTS[4]),
        1,
        1,
        1,
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last = events[-1].response
    assert (last.output_text, last.usage.total_tokens) == (
        whole.output_text,
        whole.usage.total_tokens,
    )
    assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last.output == [
        event.item for event in events if event.type == "response.output_item.done"
    ]
    assert last.output[0].status == whole.output[0].status == "incomplete"
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert events[0].response.status == "in_progress"


def test_events_are_named_and_nothing_follows_the_last(says: Says) -> None:
    url = str(says.openai().base_url)
    text = httpx.post(url + "responses", json={"input": "hello", "stream": True}).text
    events = [event.split("\n") for event in text.split("\n\n")]
    assert events.pop() == [""]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1][0] == "event: response.completed"


def test_the_clients_stream_helper_gets_the_final_response(says: Says) -> None:
    client = says.openai()
    with client.responses.stream(model="tiny", input="one two three") as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == "one two three"
    assert (final.status, final.output[0].status) == ("completed", "completed")
    assert final.completed_at >= final.created_at
    assert final.usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_without_a_word_is_an_empty_message(says: Says) -> None:
    client = says.openai()
    response = client.responses.create(model="tiny", input=[{"role": "user", "content": ""}])
    assert (response.output_text, response.output[0].content[0].text) == ("", "")
    events = list(
        client.responses.create(model="tiny", input=[{"role": "user", "content": ""}], stream=True)
    )
    assert [event.type for event in events] == [
        kind
        for kind in [*TEXT_EVENTS, "response.completed"]
        if kind != "response.output_text.delta"
    ]


def test_embeddings_are_parts_as_in_a_chat_by_value_by_reference_and_as_files(
    llama: Fleet, url: str, client: Any
) -> None:
    data = saved(embeds_of(llama))
    part = {"type": "prompt_embeds", "data": data}
    expected = chat_of(url, [ASK[0], {"role": "user", "content": [part]}])
    text = expected["choices"][0]["message"]["content"]
    assert text == chat_of(url, ASK)["choices"][0]["message"]["content"]
    ref = post(url, "/v1/prompt_embeds", {"data": data}).json()["id"]
    for source in ({"data": data}, {"ref": ref}):
        items: Any = [ASK[0], {"role": "user", "content": [{"type": "prompt_embeds", **source}]}]
        response = client.responses.create(**GREEDY, input=items, max_output_tokens=12)
        assert response.output_text == text
        assert response.usage.input_tokens == expected["usage"]["prompt_tokens"]
    request = {**GREEDY, "instructions": "count", "max_output_tokens": 12, "input": [
        {"role": "user", "content": [{"type": "prompt_embeds", "part": "question"}]}]}  # fmt: skip
    answer = httpx.post(
        url + "/v1/responses",
        files={"request": (None, json.dumps(request)), "question": ("q", base64.b64decode(data))},
    ).json()
    assert answer["output"][0]["content"][0]["text"] == text


def test_embeddings_may_stand_in_what_a_function_gave(llama: Fleet, url: str, client: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    texts = []
    for part in (
        {"type": "input_text", "text": TEXT},
        {"type": "prompt_embeds", "data": saved(embeds_of(llama))},
    ):
        items: Any = [
            ASK[1],
            call,
            {"type": "function_call_output", "call_id": "c", "output": [part]},
        ]
        texts.append(
            client.responses.create(**GREEDY, input=items, max_output_tokens=8).output_text
        )
    assert texts[0] == texts[1] != ""


def test_logprobs_come_where_they_are_included(url: str, client: Any) -> None:
    asked = {**GREEDY, "input": TEXT, "max_output_tokens": 6, "top_logprobs": 2,
             "include": ["message.output_text.logprobs"], "extra_body": {"ignore_eos": True}}  # fmt: skip
    whole = client.responses.create(**asked)
    entries = whole.output[0].content[0].logprobs
    assert len(entries) == whole.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    streamed = [
        entry.logprob
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.logprob for entry in entries]


def test_an_answer_that_stopped_short_is_continued(url: str, client: Any) -> None:
    begun = {"type": "message", "role": "assistant", "id": "msg_1", "status": "incomplete",
             "content": [{"type": "output_text", "text": "It is", "annotations": []}]}  # fmt: skip
    response = client.responses.create(**GREEDY, input=[*ASK, begun], max_output_tokens=12)
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert (
        response.output_text == chat_of(url, messages, **more)["choices"][0]["message"]["content"]
    )


def test_effort_goes_to_templates_that_read_it(says: Says, url: str) -> None:
    said = says.openai("{{ reasoning_effort }} {{ enable_thinking }}<|im_end|>")
    for effort, text in (("low", "low True"), ("none", "none False")):
        response = said.responses.create(
            model="tiny", input="x", reasoning={"effort": effort, "summary": "auto"}
        )
        assert (response.output_text, response.reasoning.effort) == (text, effort)
        chat = said.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], reasoning_effort=effort
        )
        assert chat.choices[0].message.content == text


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "high", "xhigh"])
def test_what_agents_say_of_effort_changes_nothing_without_a_setting_for_it(
    url: str, effort: str
) -> None:
    def answers(path: str, body: dict[str, Any], **more: Any) -> Any:
        found = post(url, path, {**body, "temperature": 0, **more})
        assert found.status_code == 200, found.text
        return found.json()

    asked = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 4}
    path = "/v1/chat/completions"
    plain = answers(path, asked)["choices"]
    assert answers(path, asked, reasoning_effort=effort, verbosity="low")["choices"] == plain
    path = "/v1/messages"
    plain = answers(path, asked)["content"]
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    found = answers(path, asked, output_config={"effort": effort}, **more)
    assert found["content"] == plain
    path, asked = "/v1/responses", {"input": "count", "max_output_tokens": 4}
    plain = answers(path, asked)["output"][0]["content"]
    for verbosity in ("low", "medium", "high"):
        more = {"reasoning": {"effort": effort}, "text": {"verbosity": verbosity}}
        found = answers(path, asked, **more)
        assert found["output"][0]["content"] == plain
        assert (found["reasoning"]["effort"], found["text"]["verbosity"]) == (effort, verbosity)


def test_a_client_that_leaves_a_stream_ends_its_request(llama: Fleet, client: Any) -> None:
    assert llama.idle_within(60)
    stream = client.responses.create(
        model="tiny",
        input="It is",
        max_output_tokens=450,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    assert llama.idle_within(60)


@pytest.mark.thorough
def test_what_fails_in_a_stream_is_a_failed_response_and_an_error_the_client_raises(
    says: Says,
) -> None:
    client = says.openai()
    stream = client.responses.create(
        model="tiny", input="again and again ", stream=True, max_output_tokens=4_000_000,
        extra_body={"ignore_eos": True}, extra_headers={"x-request-timeout": "4"},
    )  # fmt: skip
    events: list[Any] = []

    def read() -> None:
        for event in stream:
            events[2:] = [event]

    with pytest.raises(openai.APIError, match="longer than"):
        read()
    failed = events[-1]
    assert failed.type == "response.failed"
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert "longer than" in failed.response.error.message
    assert failed.response.output[0].content[0].text.startswith("again and again")
    assert says.echo.idle_within(60)


def test_what_fails_before_a_stream_is_a_status(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="other", input="x", stream=True)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="tiny", input="x", stream=True, max_output_tokens=10_000)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "got nothing"),
    ({"input": []}, "input", "not empty"),
    ({"input": 5}, "input", "got `int`"),
    ({"input": [5]}, "input[0]", "got `int`"),
    ({"input": [{}]}, "input[0].type", "must have a type"),
    ({"input": [{"type": 5}]}, "input[0].type", "must have a type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "supported: message, function_call"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "send the item itself"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "user, assistant, system, developer"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role", "got a list of 1"),
    ({"input": [{"role": "user"}]}, "input[0].content", "got nothing beside 'role'"),
    ({"input": [ASK[0], {"role": "user", "content": 5}]}, "input[1].content", "got 5"),
    ({"input": [*ASK, {"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}]},
     "input[2].content[0].type", "supported: input_text"),
    ({"input": [*ASK, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[2].content[0]", "takes no images"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "string"),
    ({"input": [{"role": "user", "content": [{"type": "prompt_embeds"}]}]}, "input[0].content[0]", "exactly one"),
    ({"input": [{"role": "user", "content": [{"type": "prompt_embeds", "data": "x!"}]}]}, "input[0].content[0]", "valid base64"),
    ({"input": [{"role": "user", "content": [{"type": "prompt_embeds", "data": constant(0.5, hidden=8)}]}]},
     "input[0].content[0]", "size of tensor must match"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "got an object with no fields"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "got null"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "got nothing"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output", "got 5"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", "list of parts"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "nothing that a model reads"),
    ({"input": [{"role": "user", "content": nested(100)}]}, "input", "more than 64 levels"),
    ({"tools": [{**TOOL, "parameters": {"a": nested(100)}}]}, "tools", "more than 64 levels"),
    ({"text": {"format": {"type": "json_schema", "schema": {"a": nested(100)}}}}, "text.format", "more than 64"),
    ({"chat_template_kwargs": {"a": nested(100)}}, "chat_template_kwargs", "more than 64 levels"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be of type 'function'"),
    ({"tools": [{"type": "function", "name": "f" * 300}]}, "tools[0].name", "tools[0].name must be a string of 1 to 256"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "got nothing"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", "an object, got list"),
    ({"tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "allowed_tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
     "tool_choice.tools", "not one of the tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema', got 'xml'"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "got null"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "allowed: low, medium, high"),
    ({"truncation": "left"}, "truncation", "allowed: auto, disabled"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 10_000}, "max_output_tokens", "maximum context length"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed when include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "from 0 to 20"),
    ({"include": ["everything"]}, "include", "got 'everything'"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "512"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "when stream is true"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no state"),
    ({"conversation": {"id": "c"}}, "conversation", "keeps no state"),
    ({"prompt": {"id": "p"}}, "prompt", "keeps no state"),
    ({"background": True}, "background", "keeps no state"),
    ({"messages": ASK}, "messages", "it is input"),
    ({"max_tokens": 5}, "max_tokens", "it is max_output_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format", "it is text.format"),
    ({"n": 2}, "n", "one answer"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "phrase"), BAD)
def test_what_is_wrong_with_a_request_is_named(
    url: str, fields: dict[str, Any], param: str, phrase: str
) -> None:
    response = post(url, "/v1/responses", {**GREEDY, "input": TEXT, **fields})
    found = error(response)
    assert (response.status_code, found["param"]) == (400, param), found
    assert phrase in found["message"]


def test_embeddings_are_refused_where_the_server_takes_none(plain_url: str) -> None:
    items = [{"role": "user", "content": [{"type": "prompt_embeds", "data": constant(0.5)}]}]
    found = error(post(plain_url, "/v1/responses", {"input": items}))
    assert "You must set --enable-prompt-embeds" in found["message"]


def test_a_request_with_more_embeddings_than_are_allowed_is_refused(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True, max_prompt_embeds_parts=2)
    part = {"type": "prompt_embeds", "data": constant(0.5)}
    found = error(post(url, "/v1/responses", {"input": [{"role": "user", "content": [part] * 3}]}))
    assert "3 prompt_embeds; at most 2" in found["message"]


@pytest.mark.parametrize("item", [ASK[0], {"role": "assistant", "content": "x"}, CALL])
def test_ten_thousand_items_are_no_burden(url: str, item: dict[str, Any]) -> None:
    """They are too long for the model; calls, for which its template has no form, are text."""
    response = post(
        url, "/v1/responses", {"input": [item] * 10_000 + [ASK[1]], "max_output_tokens": 1}
    )
    assert response.status_code == 400
    assert error(response)["code"] == "context_length_exceeded"


def test_fields_of_the_cache_are_returned_as_they_came(url: str) -> None:
    sent = {
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "prompt_cache_retention": "24h",
    }
    found = post(url, "/v1/responses", {"input": "count", "max_output_tokens": 1, **sent}).json()
    assert {name: found[name] for name in sent} == sent
    deep: Any = {}
    for _ in range(70):
        deep = {"mode": deep}
    refused = post(url, "/v1/responses", {"input": "count", "prompt_cache_options": deep})
    assert refused.status_code == 400
