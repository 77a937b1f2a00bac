"""Turns that are left out of a chat that is too long: whole ones, the oldest first."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.generation.messages import ReadMessages
from inlay.api.generation.turns import shortened, turns_of
from inlay.messages.prompt import Prompt, Tokens
from tests.live import Fleet
from tests.payloads import embeds_of, error, post, saved

CONTEXT = 512
SYSTEM = {"role": "system", "content": "count"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "7 " * 60}


def positions_of(answer: Any) -> int:
    return int(answer.json()["usage"]["input_tokens"])


def said(role: str, number: int, words: int = 60) -> dict[str, Any]:
    return {"role": role, "content": f"{number} " * words}


LONG = [SYSTEM, *(said(("user", "assistant")[n % 2], n) for n in range(14)), said("user", 14)]


def asked(url: str, items: Any, **more: Any) -> Any:
    body = {"model": "tiny", "input": items, "temperature": 0, "max_output_tokens": 8, **more}
    return post(url, "/v1/responses", body)


def refused(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400
    return error(answer)


def text_of(answer: Any) -> str:
    (message,) = answer.json()["output"]
    return str(message["content"][0]["text"])


def test_an_input_that_is_too_long_is_that_without_its_oldest_turns(url: str) -> None:
    body = refused(asked(url, LONG))
    assert (body["code"], body["param"]) == ("context_length_exceeded", "input")
    answer = asked(url, LONG, truncation="auto")
    assert answer.json()["truncation"] == "auto"
    dropped = int(answer.headers["x-dropped-messages"])
    assert dropped
    assert dropped % 2 == 0
    same = asked(url, [SYSTEM, *LONG[1 + dropped :]])
    assert same.json()["truncation"] == "disabled"
    assert "x-dropped-messages" not in same.headers
    assert answer.json()["dropped_messages"] == dropped
    assert "dropped_messages" not in same.json()
    assert positions_of(same) == positions_of(answer)
    assert text_of(same) == text_of(answer)
    # No more than it takes.
    more = asked(url, [SYSTEM, *LONG[1 + dropped - 2 :]])
    assert refused(more)["code"] == "context_length_exceeded"
    counted = {"model": "tiny", "input": LONG, "max_output_tokens": 8, "truncation": "auto"}
    positions = post(url, "/v1/responses/input_tokens", counted).json()["input_tokens"]
    assert positions == positions_of(answer)


def test_a_stream_says_how_many_messages_are_left_out(url: str) -> None:
    answer = asked(url, LONG, truncation="auto", stream=True)
    dropped = int(answer.headers["x-dropped-messages"])
    assert '"truncation":"auto"' in answer.text
    assert (
        answer.text.count(f'"dropped_messages":{dropped}') == 3
    )  # created, in_progress, completed


@pytest.mark.parametrize(
    "items", [[said("user", 1, 600)], [SYSTEM, said("user", 1), said("user", 2, 600)]]
)
def test_a_last_turn_that_is_too_long_is_refused(url: str, items: Any) -> None:
    assert refused(asked(url, items, truncation="auto"))["code"] == "context_length_exceeded"


def test_an_output_that_never_fits_is_refused_as_without(url: str) -> None:
    body = refused(asked(url, LONG, truncation="auto", max_output_tokens=5000))
    assert body["code"] == "context_length_exceeded"


def test_rows_go_with_the_turn_that_holds_them(url: str, llama: Fleet) -> None:
    def rows(seed: int) -> dict[str, Any]:
        part = {"type": "prompt_embeds", "data": saved(embeds_of(llama) * (1 + seed / 100))}
        return {"role": "user", "content": [part]}

    def turn(seed: int) -> list[dict[str, Any]]:
        return [rows(seed), said("assistant", seed, 110)]

    items = [*turn(1), *turn(2), *turn(3), rows(4)]
    answer = asked(url, items, truncation="auto")
    dropped = int(answer.headers["x-dropped-messages"])
    assert 0 < dropped < 6
    same = asked(url, items[dropped:])
    assert (text_of(same), positions_of(same)) == (text_of(answer), positions_of(answer))


def chat_of(roles: list[str]) -> list[dict[str, Any]]:
    """Return messages: `t` is the result of the last `c`, a call of the assistant's."""
    messages: list[dict[str, Any]] = []
    calls: list[str] = []
    for number, role in enumerate(roles):
        match role:
            case "s" | "u" | "a":
                named = {"s": "system", "u": "user", "a": "assistant"}[role]
                messages.append({"role": named, "content": str(number)})
            case "c":
                calls.append(f"call_{number}")
                made = {"id": calls[-1], "type": "function", "function": {"name": "f"}}
                messages.append({"role": "assistant", "tool_calls": [made]})
            case "t":
                id_ = calls[-1] if calls else "call_of_none"
                messages.append({"role": "tool", "tool_call_id": id_, "content": str(number)})
    return messages


@given(st.lists(st.sampled_from("suact"), min_size=1, max_size=12), st.integers(0, 12))
def test_turns_are_whole_and_what_must_stay_stays(roles: list[str], room: int) -> None:
    messages = chat_of(roles)
    turns = turns_of(messages)
    numbers = [number for turn in turns for number in turn]
    assert len(numbers) == len(set(numbers))
    users = [n for n, message in enumerate(messages) if message["role"] == "user"]
    stays = {n for n, message in enumerate(messages) if message["role"] == "system"}
    stays |= {len(messages) - 1, *users[-1:]}
    assert not stays & set(numbers)
    chat = ReadMessages(messages, [], [], [])
    left = shortened(chat, lambda some: len(some.messages) <= room)
    made = {call["id"] for each in left.messages for call in each.get("tool_calls", ())}
    all_made = {call["id"] for each in messages for call in each.get("tool_calls", ())}
    results = {each["tool_call_id"] for each in left.messages if each["role"] == "tool"}
    assert results & all_made <= made, "a result without its call"
    answered = {each["tool_call_id"] for each in messages if each["role"] == "tool"}
    assert made & answered <= results, "a call without its result"
    fewest = len(messages) - len(numbers)
    assert len(left.messages) <= max(room, fewest)
    if len(messages) <= room:
        assert left is chat


def test_a_long_task_of_one_question_loses_its_oldest_calls(url: str) -> None:
    def round_(number: int) -> list[dict[str, Any]]:
        return [{**CALL, "call_id": f"c{number}"}, {**RESULT, "call_id": f"c{number}"}]

    question = {"role": "user", "content": "go"}
    items = [question, *(item for n in range(12) for item in round_(n))]
    answer = asked(url, items, truncation="auto")
    dropped = int(answer.headers["x-dropped-messages"])
    assert dropped
    assert dropped % 2 == 0
    same = asked(url, [question, *items[1 + dropped :]])
    assert positions_of(same) == positions_of(answer)


def test_what_is_left_keeps_its_embeddings_in_order() -> None:
    def content(number: int) -> list[dict[str, Any]]:
        places = [{"type": "prompt_embeds", "index": 2 * number + n} for n in range(2)]
        return [{"type": "text", "text": "a"}, *places]

    messages = [{"role": "user", "content": content(n)} for n in range(6)]
    chat = ReadMessages(messages, [Tokens([n]) for n in range(12)], [], [])
    left = chat.without({0, 1, 3})
    assert [tuple(each.token_ids()) for each in map(Prompt.of, left.rows)] == [
        (n,) for n in (4, 5, 8, 9, 10, 11)
    ]
    placed = [part["index"] for each in left.messages for part in each["content"][1:]]
    assert placed == list(range(6))


def test_the_result_of_a_call_without_an_id_is_in_its_turn_and_no_other_message_is() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "", "type": "function"}]}
    result = {"role": "tool", "tool_call_id": "", "content": "7"}
    user = {"role": "user", "content": "?"}
    said: dict[str, Any] = {"role": "assistant", "content": "1"}
    messages: list[dict[str, Any]] = [user, call, result, user, said, user]
    assert turns_of(messages) == [[0, 1, 2], [3, 4]]
