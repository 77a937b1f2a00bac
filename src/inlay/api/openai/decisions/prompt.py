"""The chat of a decision: the state as its messages, then one question, as vLLM writes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.api.fields import check_depth, string_at
from inlay.api.openai.responses.input import ResponsesChat, conversation, in_input
from inlay.api.openai.schema.decisions import (
    ChoiceQuestion,
    DecisionRequest,
    PredicateQuestion,
    Question,
)
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source
from inlay.http.quoting import shown_at
from inlay.render.labels import Label

_CALLS = {
    name + end: name for name in ("function_call", "custom_tool_call") for end in ("", "_output")
}
"""Types of items with a `call_id`, and the type of the call it is of."""

_CONTENTS = ("content", "output")

Parts = list[dict[str, Any]]


def sources_in(request: DecisionRequest) -> list[Source]:
    """Return the sources of embeddings and images in the state, in order."""
    if isinstance(request.input, str):
        return []
    return in_input(ResponsesRequest(input=request.input))


def state_of(request: DecisionRequest) -> ResponsesChat:
    """Return the messages of a state, without a question.

    Raises:
        InvalidRequestError: an item that is not supported, or an output without its call.
    """
    if isinstance(request.input, str) or not request.input:
        return ResponsesChat([{"role": "user", "content": request.input or ""}], ["input"], False)
    check_depth(request.input, "input")
    calls: set[tuple[str, str]] = set()
    items = []
    for number, item in enumerate(request.input):
        where, kind = f"input[{number}]", item.get("type")
        if isinstance(kind, str) and kind in _CALLS:
            call_id = string_at(item, "call_id", where)
            call = _CALLS[kind]
            if kind == call:
                calls.add((call, call_id))
            elif (call, call_id) not in calls:
                raise InvalidRequestError(
                    f"{where}.call_id {call_id[:80]!r} is of no {call} before it",
                    param=f"{where}.call_id",
                )
        items.append(_as_in_responses(item, where))
    return conversation(ResponsesRequest(input=items))


def _as_in_responses(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    more: dict[str, Any] = {}
    kind = item.get("type")
    if kind == "custom_tool_call":
        text = string_at(item, "input", where)
        more = {"type": "function_call", "arguments": json.dumps({"input": text})}
    elif kind == "custom_tool_call_output":
        more = {"type": "function_call_output"}
    for field in _CONTENTS:
        parts = item.get(field)
        if isinstance(parts, list):
            more[field] = [_part(part, f"{where}.{field}") for part in parts]
    return {**item, **more}


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, dict) or part.get("type") != "input_json":
        return part
    data = part.get("data")
    if not isinstance(data, dict | list):
        raise InvalidRequestError(
            f"{where}: data of input_json must be an object or a list of objects, got "
            f"{shown_at(part, 'data')}",
            param=where,
        )
    return {"type": "input_text", "text": json.dumps(data, ensure_ascii=False)}


def joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that have been read with those of the user that follow each other as one.

    Parts are joined by a line's end, messages by an empty line, as vLLM does.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "user":
            found.append(dict(message))
            continue
        parts = _spaced(message["content"])
        if found and found[-1]["role"] == "user":
            found[-1]["content"] += [_text("\n\n"), *parts]
        else:
            found.append({**message, "content": parts})
    return found


def with_question(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages of `joined` with a question at the end of the user's last turn."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    *before, last = messages
    return [*before, {**last, "content": _simple([*last["content"], _text(f"\n\n{text}")])}]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _spaced(content: str | Parts) -> Parts:
    if isinstance(content, str):
        return [_text(content)]
    found: Parts = []
    for part in content:
        if found and part["type"] == found[-1]["type"] == "text":
            found.append(_text("\n"))
        found.append(part)
    return found


def _simple(parts: Parts) -> str | Parts:
    """Return parts with texts that stand together as one; one text alone is a string."""
    found: Parts = []
    for part in parts:
        if found and part["type"] == found[-1]["type"] == "text":
            found[-1] = _text(found[-1]["text"] + part["text"])
        else:
            found.append(part)
    return found[0]["text"] if len(found) == 1 and found[0]["type"] == "text" else found


def instructions_of(question: Question, where: str) -> str:
    """Return the instructions of a question as text. Raises `InvalidRequestError`."""
    if isinstance(question.instructions, str):
        return question.instructions
    texts = []
    check_depth(question.instructions, f"{where}.instructions")
    for index, part in enumerate(question.instructions):
        place = f"{where}.instructions[{index}]"
        read = _part(part, place)
        if read.get("type") not in ("input_text", "text"):
            raise InvalidRequestError(
                f"{place}.type must be input_text or input_json, got {shown_at(part, 'type')}",
                param=f"{place}.type",
            )
        texts.append(string_at(read, "text", place))
    return "\n".join(texts)


def options_of(question: Question) -> list[tuple[str, str]]:
    """Return the options of a question as (what the model reads, description)."""
    if isinstance(question, PredicateQuestion):
        return [("false", ""), ("true", "")]
    if isinstance(question, ChoiceQuestion):
        return [
            (json.dumps(one.value, ensure_ascii=False), one.description) for one in question.choices
        ]
    return [(level.label, level.description) for level in question.levels]


def question_text(
    instructions: str, options: Sequence[tuple[str, str]], labels: Sequence[Label]
) -> str:
    """Return a question as the model reads it."""
    lines = [f"Question: {instructions}"] if instructions else []
    for label, (name, description) in zip(labels, options, strict=True):
        lines.append(f"{label.text}: {name}" + (f" - {description}" if description else ""))
    return "\n".join([*lines, "Answer with the letter of one option only."])


def check_choices(questions: Sequence[Question]) -> None:
    """Raise `InvalidRequestError` for a question with one choice twice."""
    for index, question in enumerate(questions):
        if isinstance(question, ChoiceQuestion):
            values = {(type(one.value), one.value) for one in question.choices}
            if len(values) < len(question.choices):
                raise InvalidRequestError(
                    f"questions[{index}].choices must have different values",
                    param=f"questions[{index}].choices",
                )
