"""Items become messages, or what is wrong with them is said: nothing else, whatever they are."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inlay.api.generation.messages import read_messages
from inlay.api.openai.responses.input import (
    PARTS,
    check_responses,
    choice_of_tool,
    conversation,
    format_of,
    functions,
    in_input,
)
from inlay.api.openai.schema.responses import ResponsesRequest, TextOptions
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import check_source

KEYS = (
    "type", "role", "content", "output", "text", "summary", "name", "call_id", "arguments", "status", "refusal", "data",
    "ref", "part", "parameters", "mode", "tools", "schema", "format", "encrypted_content",
)  # fmt: skip
WORDS = (
    "message", "function_call", "function_call_output", "reasoning", "user", "assistant", "system", "developer",
    "input_text", "output_text", "refusal", "prompt_embeds", "reasoning_text", "function", "allowed_tools", "auto",
    "required", "json_schema", "json_object", "incomplete", "item_reference", "",
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(WORDS)
PARTS_OF_IT = st.dictionaries(st.sampled_from(KEYS), SCALARS, max_size=4)
VALUES = SCALARS | PARTS_OF_IT | st.lists(SCALARS | PARTS_OF_IT, max_size=3)
OBJECTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)
TEXT = st.sampled_from(WORDS)
ITEMS = (
    OBJECTS
    | st.fixed_dictionaries(
        {"role": st.sampled_from(WORDS[4:8]), "content": TEXT | st.lists(VALUES, max_size=3)}
    )
    | st.fixed_dictionaries(
        {"type": st.just("reasoning"), "summary": st.just([]), "content": VALUES}
    )
    | st.fixed_dictionaries(
        {"type": st.just("function_call"), "name": TEXT, "call_id": TEXT, "arguments": TEXT}
    )
    | st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": TEXT, "output": VALUES}
    )
)


@given(st.lists(ITEMS, max_size=5), st.lists(OBJECTS, max_size=2), TEXT | OBJECTS, OBJECTS)
def test_a_request_is_a_chat_or_a_precise_error(
    items: list[dict[str, Any]], tools: list[dict[str, Any]], choice: Any, wanted: dict[str, Any]
) -> None:
    request = ResponsesRequest(
        input=items, tools=tools, tool_choice=choice, text=TextOptions(wanted)
    )
    read: Any = check_source
    found = in_input(request)
    refused: InvalidRequestError | None = None
    messages: list[dict[str, Any]] = []
    rows: list[Any] = []
    try:
        check_responses(request)
        said = conversation(request)
        chat = read_messages(said.messages, read, read, named=said.named, served=PARTS)
        messages, rows = chat.messages, chat.rows
        functions(request), choice_of_tool(request), format_of(request)
    except InvalidRequestError as error:
        refused = error
    if refused is None:
        assert len(rows) == len(found)
        assert 0 < len(messages) <= len(items)
        assert all(isinstance(message["role"], str) for message in messages)
    else:
        field = (refused.param or "").split("[")[0].split(".")[0]
        assert field in {"input", "tools", "tool_choice", "text", "prompt_embeds"}
        assert len(refused.message) < 500


@given(st.lists(TEXT, min_size=1, max_size=4), st.none() | TEXT)
def test_what_opens_a_conversation_is_one_message(
    texts: list[str], instructions: str | None
) -> None:
    items = [
        {"role": role, "content": text}
        for role, text in zip(("system", "developer") * 2, texts, strict=False)
    ]
    request = ResponsesRequest(
        input=[*items, {"role": "user", "content": "x"}], instructions=instructions
    )
    said = conversation(request)
    assert [message["role"] for message in said.messages] == ["system", "user"]
    assert said.messages[0]["content"] == "\n\n".join(
        [instructions, *texts] if instructions else texts
    )
    assert len(said.named) == 2
