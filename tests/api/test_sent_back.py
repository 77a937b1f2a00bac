"""Answers sent back, in every API: the model sees each of their words once, and in order."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.api.anthropic import input as anthropic_input
from inlay.api.anthropic.schema import MessagesInput
from inlay.api.generation.messages import read_messages
from inlay.api.openai.responses import input as responses_input
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.render import Renderer
from inlay.render.arguments import read_arguments
from tests.render.directories import qwen_like
from tests.render.families import FAMILIES


class Call(NamedTuple):
    """A call: its arguments as text, and its result."""

    id: str
    name: str
    arguments: str
    result: str


class Turn(NamedTuple):
    """What a user asks, and what is answered; "" for what is not there.

    `answer` follows the results of calls, unless they are the end of the conversation.
    """

    asked: str
    reasoning: str
    text: str
    calls: tuple[Call, ...]
    answer: str
    refused: bool
    spoken: bool
    drawn: bool
    variant: int


WORD = re.compile(r"w\d{4}")

ARGUMENTS: tuple[Callable[[str], str], ...] = (
    lambda words: json.dumps({"key": words}),
    lambda words: json.dumps({"key": {"deep": [words, 1, None]}, "other": 1.5}),
    lambda words: json.dumps({"key": words})[:-2],
    lambda words: json.dumps([words]),
    lambda words: json.dumps(json.dumps({"key": words})),
    lambda words: '{"path": "C:\\' + words + '"}',
    lambda words: '{"key": NaN, "other": "' + words + '"}',
    lambda words: '{"key": "\\ud800", "other": "' + words + '"}',
    lambda words: "{" * 70 + words,
    lambda words: words,
    lambda _: "null",
    lambda _: "",
)


@st.composite
def talks(draw: st.DrawFn) -> list[Turn]:
    """One to three turns, whose words are all different."""
    numbers = iter(range(10_000))

    def words(least: int = 0) -> str:
        return " ".join(f"w{next(numbers):04}" for _ in range(draw(st.integers(least, 2))))

    turns = []
    for _ in range(draw(st.integers(1, 3))):
        asked, reasoning, text = words(1), words(), words()
        calls = tuple(
            Call(
                f"{next(numbers):09}",
                f"f{next(numbers)}",
                draw(st.sampled_from(ARGUMENTS))(words(1)),
                words(),
            )
            for _ in range(draw(st.integers(0, 3)))
        )
        kind = draw(st.sampled_from(("text", "refused", "spoken", "drawn")))
        variant = draw(st.integers(0, 11))
        answer = words(1) if calls else ""
        refused, spoken, drawn = (kind == each for each in ("refused", "spoken", "drawn"))
        turns.append(Turn(asked, reasoning, text, calls, answer, refused, spoken, drawn, variant))
    ends_with_results = draw(st.booleans())
    if turns[-1].calls and ends_with_results:
        turns[-1] = turns[-1]._replace(answer="")
    return turns


def last_of(turns: list[Turn]) -> str:
    """What the user says at last; "" where a result is the last message."""
    return "" if turns[-1].calls and not turns[-1].answer else "w9999"


NULLS: dict[str, Any] = dict.fromkeys(
    ("annotations", "audio", "function_call", "refusal", "tool_calls", "parsed")
)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def as_chat(turns: list[Turn], last: str) -> Any:
    """The turns as the `openai` client sends back its message objects, in several manners."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.asked})
        names = (("reasoning", "reasoning_content"), ("reasoning",), ("reasoning_content",), ("thinking",))  # fmt: skip
        said: dict[str, Any] = NULLS if turn.variant % 2 else {}
        said = {
            "role": "assistant",
            **said,
            "content": turn.text or (None, "", [])[turn.variant % 3],
        }
        if turn.calls:
            said["tool_calls"] = [
                {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in turn.calls
            ]  # fmt: skip
        elif turn.variant % 5 == 1:
            said["tool_calls"] = []
        if turn.reasoning and turn.variant == 11 and isinstance(said["content"], str):
            thought = {"type": "thinking", "thinking": turn.reasoning, "signature": ""}
            said["content"] = [thought, {"type": "text", "text": turn.text}]
        elif turn.reasoning:
            said |= dict.fromkeys(names[turn.variant % 4], turn.reasoning)
        elif turn.variant == 7:
            said |= {"reasoning": None, "reasoning_content": ""}
        if isinstance(said["content"], str) and turn.text:
            if turn.refused:
                said |= {"content": None, "refusal": turn.text}
            elif turn.spoken:
                sound = {"id": "audio-1", "data": "AAAA", "expires_at": 1, "transcript": turn.text}
                said |= {"content": (None, turn.text)[turn.variant % 2], "audio": sound}
            elif turn.drawn:
                said["content"] = [{"type": "text", "text": turn.text}, PICTURE]
        if turn.variant == 5 and said["content"] is None:
            del said["content"]
        messages.append(said)
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": each.result or None}
            for each in turn.calls
        ]
        if turn.answer:
            messages.append({"role": "assistant", "content": turn.answer})
    if last:
        messages.append({"role": "user", "content": last})
    return read_messages(messages, refuse, unseen)


def as_responses(turns: list[Turn], last: str) -> Any:
    """The turns as output items that are input again."""
    items: list[dict[str, Any]] = []
    for turn in turns:
        items.append({"role": "user", "content": turn.asked})
        if turn.reasoning:
            whole = [{"type": "reasoning_text", "text": turn.reasoning}]
            parts = {"content": whole, "summary": []}
            if turn.variant % 2:
                summary = [{"type": "summary_text", "text": turn.reasoning}]
                parts = {"content": whole if turn.variant % 3 else None, "summary": summary}  # type: ignore[dict-item]
            more = {"encrypted_content": None, "status": ("completed", None)[turn.variant % 2]}
            items.append({"type": "reasoning", "id": "rs_1", **parts, **more})
        if turn.text or not turn.calls:
            part: dict[str, Any] = {
                "type": "output_text", "text": turn.text, "annotations": [], "logprobs": None
            }  # fmt: skip
            if turn.refused:
                part = {"type": "refusal", "refusal": turn.text}
            content = [part] if turn.text or turn.variant % 2 else (None, [], "")[turn.variant % 3]
            if turn.text or not turn.reasoning or turn.variant % 2:
                items.append(
                    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
                )  # fmt: skip
        items += [
            {"type": "function_call", "id": "fc_1", "status": "incomplete", "call_id": each.id, "name": each.name,
             "arguments": each.arguments}
            for each in turn.calls
        ]  # fmt: skip
        items += [
            {"type": "function_call_output", "call_id": each.id, "output": each.result or ("", None)[turn.variant % 2]}
            for each in turn.calls
        ]  # fmt: skip
        if turn.answer:
            items.append({"role": "assistant", "content": turn.answer})
    if last:
        items.append({"role": "user", "content": [{"type": "input_text", "text": last}]})
    said = responses_input.conversation(ResponsesRequest(input=items))
    return read_messages(said.messages, refuse, unseen, named=said.named)


def as_anthropic(turns: list[Turn], last: str) -> Any:
    """The turns as blocks of the `anthropic` client."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.asked}]})
        blocks: list[dict[str, Any]] = []
        if turn.reasoning:
            blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
        if turn.variant % 3 == 0:
            blocks.append({"type": "redacted_thinking", "data": "AAAA"})
        if turn.text or turn.variant % 2:
            blocks.append({"type": "text", "text": turn.text, "citations": None})
        blocks += [
            {"type": "tool_use", "id": each.id, "name": each.name, "input": read_arguments(each.arguments), "caller": None}
            for each in turn.calls
        ]  # fmt: skip
        messages.append({"role": "assistant", "content": blocks or ([], None)[turn.variant % 2]})
        results = [
            {
                "type": "tool_result", "tool_use_id": each.id, "is_error": None,
                "content": each.result if turn.variant % 2 else [{"type": "text", "text": each.result}],
            }
            for each in turn.calls
        ]  # fmt: skip
        if results:
            messages.append({"role": "user", "content": results})
        if turn.answer:
            messages.append({"role": "assistant", "content": turn.answer})
    if last:
        messages.append({"role": "user", "content": last})
    said = anthropic_input.conversation(MessagesInput(messages=messages))
    return read_messages(said.messages, refuse, unseen)


def refuse(_: Any) -> Any:
    raise AssertionError("there are no rows")


def unseen(source: Any) -> None:
    """Read media as a pipeline does that has made them itself."""
    assert source.of_answer


APIS = {"chat": as_chat, "responses": as_responses, "anthropic": as_anthropic}


@cache
def renderer(family: str) -> Renderer:
    return Renderer.load(qwen_like(), chat_template=FAMILIES[family].template)


def shown(family: str, chat: Any) -> str:
    of = renderer(family)
    return of.decode(of.chat(chat.messages).token_ids())


def check(family: str, turns: list[Turn], last: str, text: str) -> None:
    """Check that a prompt has all words of the turns once, in order; of calls with results."""
    found = WORD.findall(text)
    assert len(found) == len(set(found)), found
    habit = FAMILIES[family].thoughts
    place = {word: number for number, word in enumerate(found)}
    reached = -1
    for turn in turns:
        thoughts = WORD.findall(turn.reasoning)
        left_out = {
            "none": True,
            "last": bool(last) or turn is not turns[-1],
            "calls": not turn.calls,
            "all": False,
        }
        if left_out[habit]:
            assert not set(thoughts) & place.keys()
            thoughts = []
        calls = [WORD.findall(call.arguments) for call in turn.calls]
        results = [WORD.findall(call.result) for call in turn.calls]
        text_of, answer = WORD.findall(turn.text), WORD.findall(turn.answer)
        if FAMILIES[family].text_after_calls and calls and answer:
            text_of, answer = [], text_of + answer
        said = [*WORD.findall(turn.asked), *thoughts, *text_of, *chain(*calls)]
        said_at, results_at = (
            [place[word] for word in words] for words in (said, [*chain(*results)])
        )
        assert said_at == sorted(said_at)
        assert results_at == sorted(results_at)
        for call, result in zip(calls, results, strict=True):
            assert not call or not result or place[call[-1]] < place[result[0]]
        assert min(said_at) > reached
        answer_at = [place[word] for word in answer]
        assert answer_at == sorted(answer_at)
        assert min(answer_at, default=len(found)) > max(said_at + results_at)
        reached = max(said_at + results_at + answer_at)
        assert all(call.name in text for call in turn.calls)
    assert reached == len(found) - 1 - bool(last)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(talks())
def test_a_model_sees_every_word_of_what_is_sent_back(
    family: str, api: str, turns: list[Turn]
) -> None:
    last = last_of(turns)
    chat = APIS[api](turns, last)
    refuses = FAMILIES[family].refuses
    if any(refuses(turn.text, len(turn.calls), bool(turn.answer)) for turn in turns):
        with pytest.raises(InvalidRequestError, match="the chat template: "):
            shown(family, chat)
        return
    check(family, turns, last, shown(family, chat))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(talks())
def test_a_conversation_has_one_prompt_in_every_api(family: str, turns: list[Turn]) -> None:
    prompts = set()
    for api in APIS.values():
        try:
            prompts.add(shown(family, api(turns, last_of(turns))))
        except InvalidRequestError as error:
            prompts.add(re.sub(r"messages\[\d+\]", "", error.message))
    assert len(prompts) == 1


def test_texts_of_several_steps_stand_before_the_last_calls_where_turns_must_be_taken() -> None:
    def step(number: int) -> list[dict[str, Any]]:
        function = {"name": f"look{number}", "arguments": "{}"}
        call = {"id": f"calling0{number}", "type": "function", "function": function}
        return [
            {"role": "assistant", "content": f"said{number}", "tool_calls": [call]},
            {"role": "tool", "content": f"found{number}", "tool_call_id": call["id"]},
        ]

    of = renderer("mistral")
    prompt = of.chat([{"role": "user", "content": "asked"}, *step(1), *step(2)])
    words = ["asked", "look1", "found1", "said1", "said2", "look2", "found2"]
    assert re.findall("|".join(words), of.decode(prompt.token_ids())) == words
