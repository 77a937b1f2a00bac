"""Answers that real clients send back as they came, and what is said of those that hold no words."""

import base64
import json
import re
from typing import Any

import httpx
import pytest

from inlay.client import PromptEmbedder
from tests.api.saying import Says
from tests.live import Fleet
from tests.payloads import error, post
from tests.render.families import FAMILIES, REASONING

FORMS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
PLAIN = {"tool_call_parser": "none", "reasoning_parser": "none"}
ASKED = {"role": "user", "content": "w0000"}
AGAIN = {"role": "user", "content": "w9999"}

CALL = '<tool_call>{"name": "look", "arguments": %s}</tool_call>'
ANSWERS = {
    "text": "w0001 w0002",
    "reasoning alone": "<think>w0001",
    "reasoning and text": "<think>w0001</think>w0002",
    "a call": CALL % '{"at": "w0001"}',
    "text and calls": f"w0001 {CALL % json.dumps({'at': 'w0002'})}{CALL % json.dumps({'at': 'w0003'})}",
    "a call that was cut off": '<think>w0001</think>w0002<tool_call>{"name": "look", "arguments": {"at": "w0003',
    "arguments that are a list": CALL % '["w0001"]',
    "nothing": "",
}
FUNCTION: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def writer(says: Says) -> Any:
    return says.openai(**FORMS)


@pytest.fixture(scope="module")
def speaker(says: Says) -> Any:
    return says.anthropic(**FORMS)


class Readers:
    """Clients of servers whose answer is their whole prompt."""

    def __init__(self, says: Says) -> None:
        self._says = says
        self._made: dict[tuple[str, str], Any] = {}

    def of(self, kind: str, family: str) -> Any:
        if (kind, family) not in self._made:
            # The engine ends at its own token.
            template = FAMILIES[family].template.replace("<|im_end|>", "<end>") + "<|im_end|>"
            self._made[kind, family] = getattr(self._says, kind)(template, **PLAIN)
        return self._made[kind, family]


@pytest.fixture(scope="module")
def readers(says: Says) -> Readers:
    return Readers(says)


def check(answer: str, family: str, prompt: str) -> None:
    """Check that a prompt has the words of an answer, in order, but for reasoning by design."""
    words = re.findall(r"w\d{4}", answer)
    kept = FAMILIES[family].thoughts in ("all", *(["calls"] if "<tool_call>" in answer else []))
    if "<think>" in answer and not kept:
        words = words[1:]
    assert re.findall(r"w\d{4}", prompt) == ["w0000", *words, "w9999"]


SOME = ("chatml", "qwen2.5", "llama3", "deepseek-r1", "harmony", "reasoning")


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_chats_message_is_sent_back_as_it_came(
    writer: Any, readers: Readers, answer: str, family: str
) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    said = {"role": "user", "content": ANSWERS[answer]}
    got = writer.chat.completions.create(model="tiny", messages=[said], tools=tools)
    message = got.choices[0].message
    with writer.chat.completions.stream(model="tiny", messages=[said], tools=tools) as stream:
        streamed = stream.get_final_completion().choices[0].message
    ids = [call.id for call in message.tool_calls or ()]
    for back in (message, message.model_dump(), message.model_dump(exclude_none=True), streamed):
        results = [{"role": "tool", "tool_call_id": id_, "content": "seen"} for id_ in ids]
        prompt = readers.of("openai", family).chat.completions.create(
            model="tiny", messages=[ASKED, back, *results, AGAIN]
        )
        check(ANSWERS[answer], family, prompt.choices[0].message.content)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("answer", ANSWERS)
def test_output_items_are_sent_back_as_they_came(
    writer: Any, readers: Readers, answer: str, family: str
) -> None:
    tools = [{"type": "function", **FUNCTION}]
    response = writer.responses.create(model="tiny", input=ANSWERS[answer], tools=tools)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "seen"}
        for item in response.output
        if item.type == "function_call"
    ]
    for items in (response.output, [item.model_dump() for item in response.output]):
        prompt = readers.of("openai", family).responses.create(
            model="tiny", input=[ASKED, *items, *outputs, AGAIN]
        )
        check(ANSWERS[answer], family, prompt.output_text)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("answer", ANSWERS)
def test_blocks_are_sent_back_as_they_came(
    speaker: Any, readers: Readers, answer: str, family: str
) -> None:
    tools = [{"name": "look", "input_schema": FUNCTION["parameters"]}]
    said = {"role": "user", "content": ANSWERS[answer] or "<|im_end|>"}
    got = speaker.messages.create(model="tiny", max_tokens=500, messages=[said], tools=tools)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "seen"}]}
        for block in got.content
        if block.type == "tool_use"
    ]  # fmt: skip
    for blocks in (got.content, [block.model_dump() for block in got.content]):
        again = [*results, {"type": "text", "text": "w9999"}]
        prompt = readers.of("anthropic", family).messages.create(
            model="tiny",
            max_tokens=2000,
            messages=[ASKED, {"role": "assistant", "content": blocks}, {"role": "user", "content": again}],
        )  # fmt: skip
        check(ANSWERS[answer], family, prompt.content[0].text)


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", **fields}, AGAIN]


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **fields}}


CALLS = "messages[1].tool_calls"
BAD: list[tuple[list[dict[str, Any]], str, str]] = [
    *(
        (assistant(**{name: value}), f"messages[1].{name}{index}", f"must be a string, a part of type text or prompt_embeds, or a list of them, got {shown}")
        for name in ("reasoning", "reasoning_content", "thinking")
        for value, index, shown in (
            (5, "", "5"), (True, "", "true"), (["a"], "[0]", "'a'"), ({"a": "b"}, "", "nothing beside 'a'"),
            ({"type": "image_url"}, "", "'image_url'"), ([{"type": "text", "text": "a"}, 5], "[1]", "5"),
        )
    ),
    (assistant(reasoning={"type": "text", "text": 5}), "messages[1].reasoning.text", "must be a string, got 5"),
    (assistant(reasoning="a", reasoning_content="b"), "messages[1].reasoning_content", "differ: send the reasoning once"),
    (assistant(content=[{"type": "thinking", "thinking": 5}]), "messages[1].content", "thinking must be a string"),
    (assistant(tool_calls=5), CALLS, "must be a list of calls, got 5"),
    (assistant(tool_calls={"a": 1}), CALLS, "must be a list of calls, got an object with 'a'"),
    (assistant(tool_calls=["f"]), f"{CALLS}[0]", "object with id, type and function, got 'f'"),
    (assistant(tool_calls=[{"id": "1", "type": "custom", "custom": {}}]), f"{CALLS}[0].type", "must be 'function', got 'custom'"),
    (assistant(tool_calls=[{"id": "1"}]), f"{CALLS}[0].function", "object with name and arguments, got nothing beside 'id'"),
    (assistant(tool_calls=[{**call(), "id": 5}]), f"{CALLS}[0].id", "must be a string, got 5"),
    (assistant(tool_calls=[call(name=5)]), f"{CALLS}[0].function.name", "must be a string, got 5"),
    (assistant(tool_calls=[call(arguments=5)]), f"{CALLS}[0].function.arguments", "string with a JSON object, got 5"),
    (assistant(tool_calls=[call(arguments=["a"])]), f"{CALLS}[0].function.arguments", "string with a JSON object, got a list of 1"),
    (assistant(function_call=5), "messages[1].function_call", "object with name and arguments, got 5"),
    (assistant(function_call={"arguments": "{}"}), "messages[1].function_call.name", "must be a string, got nothing beside"),
    (assistant(refusal=5), "messages[1].refusal", "must be a string, got 5"),
    (assistant(content="a", name=5), "messages[1].name", "must be a string, got 5"),
    (assistant(content=5), "messages[1].content", "list of parts, got 5"),
    (assistant(audio=5), "messages[1].audio", "object with transcript, got 5"),
    (assistant(audio={"id": "audio-1"}), "messages[1].audio.transcript", "got nothing beside 'id': no sound is kept by its id"),
    ([{**ASKED, "name": ["a"]}], "messages[0].name", "must be a string, got a list of 1"),
    ([{**ASKED, "tool_calls": [call()]}], "messages[0].tool_calls", "field of the assistant's messages; the role is 'user'"),
    ([ASKED, {"role": "tool", "tool_call_id": 5, "content": "a"}], "messages[1].tool_call_id", "must be a string, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param", "phrase"), BAD)
def test_a_turn_that_cannot_be_said_is_refused_by_name(
    url: str, messages: list[dict[str, Any]], param: str, phrase: str
) -> None:
    for route in ("/v1/chat/completions", "/tokenize"):
        response = post(url, route, {"model": "tiny", "messages": messages, "max_tokens": 1})
        found = error(response)
        assert (response.status_code, found["param"]) == (400, param), found
        assert phrase in found["message"]


def test_an_old_function_call_and_its_result_are_a_tool_call(readers: Readers) -> None:
    """As older clients have them; ids are made, of nine characters."""
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": "w0001'}},
        {"role": "function", "name": "look", "content": "w0002"},
    ]  # fmt: skip
    for family in ("mistral", "qwen2.5", "chatml"):
        answer = readers.of("openai", family).chat.completions.create(
            model="tiny", messages=messages
        )
        prompt = answer.choices[0].message.content
        assert re.findall(r"w\d{4}", prompt) == ["w0000", "w0001", "w0002"]
        assert "look" in prompt


@pytest.mark.parametrize("null", ["system", "user", "tool"])
def test_no_content_is_an_empty_text_in_every_role(readers: Readers, null: str) -> None:
    messages = [{"role": null, "content": None}, AGAIN]
    chats = readers.of("openai", "chatml")
    prompt = chats.chat.completions.create(model="tiny", messages=messages)
    assert f"{null}\n<end>\n" in prompt.choices[0].message.content
    if null != "tool":
        assert chats.responses.create(model="tiny", input=messages).status == "completed"
        blocks = readers.of("anthropic", "chatml").messages
        assert blocks.create(model="tiny", max_tokens=9, messages=messages).content


ASKS = {"model": "tiny", "max_tokens": 8, "temperature": 0, "return_token_ids": True}


def seen(response: httpx.Response) -> tuple[list[int], int]:
    """The ids of an answer, and the positions of its prompt."""
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens"]


def test_rows_in_the_reasoning_of_a_past_turn_are_its_text(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True, chat_template=REASONING)
    embedder = PromptEmbedder.from_pretrained(llama.path)
    thought = "the harbour counts lanterns"
    rows = embedder.chat_part(thought)
    stored = post(url, "/v1/prompt_embeds", {"data": rows["data"]}).json()["id"]

    def ids(reasoning: object, name: str = "reasoning") -> Any:
        messages = assistant(content="yes", **{name: reasoning})
        return seen(post(url, "/v1/chat/completions", {**ASKS, "messages": messages}))

    as_rows = ids(rows)
    for other in ([rows], {"type": "prompt_embeds", "ref": stored}):
        assert ids(other) == as_rows
    assert ids(rows, "reasoning_content") == ids(rows, "thinking") == as_rows
    beside = [{"type": "text", "text": "first"}, rows]
    assert ids(beside)[1] > as_rows[1] > ids(None)[1]
    named = assistant(content="yes", reasoning={"type": "prompt_embeds", "part": "rows"})
    files: dict[str, Any] = {
        "request": (None, json.dumps({**ASKS, "messages": named}), "application/json"),
        "rows": ("rows", base64.b64decode(rows["data"]), "application/octet-stream"),
    }
    assert seen(httpx.post(url + "/v1/chat/completions", files=files, timeout=180)) == as_rows
    # A template that writes no reasoning would lose them.
    refused = llama.serve(enable_prompt_embeds=True, chat_template=FAMILIES["chatml"].template)
    messages = assistant(content="yes", reasoning=rows)
    found = error(post(refused, "/v1/chat/completions", {"messages": messages}))
    assert "dropped 1 of 1 prompt_embeds parts" in found["message"]


def test_a_server_without_embeddings_says_so_of_rows_in_reasoning(plain_url: str) -> None:
    messages = assistant(reasoning={"type": "prompt_embeds", "data": "AAAA"})
    found = error(post(plain_url, "/v1/chat/completions", {"messages": messages}))
    assert "You must set --enable-prompt-embeds" in found["message"]
