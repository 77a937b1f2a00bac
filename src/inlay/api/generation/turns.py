"""Turns of a chat, the oldest of which may be left out where the prompt is too long."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from inlay.api.generation.messages import ReadMessages


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the turns that may be left out, oldest first, as the numbers of their messages.

    A turn begins with a message of the user; behind the user's last message, with one of the
    assistant. The result of a tool is in the turn of its call. In none are messages of the system,
    the user's last message, and the turn of the chat's last message.
    """
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    turns: list[list[int]] = []
    calls: dict[str, list[int]] = {}
    closed = True
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" or number == last:
            closed = closed or number == last
            continue
        # An id may be "": it is that of a call only where a message has one.
        turn = calls.get(message["tool_call_id"]) if "tool_call_id" in message else None
        if turn is None:
            if closed or role == ("user" if number < last else "assistant"):
                turns.append([])
            closed = False
            turn = turns[-1]
        turn.append(number)
        calls |= {call["id"]: turn for call in message.get("tool_calls", ())}
    return [turn for turn in turns if turn[-1] != len(messages) - 1]


def shortened(chat: ReadMessages, fits: Callable[[ReadMessages], bool]) -> ReadMessages:
    """Return a chat without as many of its oldest turns as need to be left out.

    `fits` is asked about the logarithm of their number. A chat that never fits keeps the least.
    """
    if fits(chat):
        return chat
    turns = turns_of(chat.messages)

    def without(count: int) -> ReadMessages:
        return chat.without(set(chain.from_iterable(turns[:count])))

    most = len(turns)
    fewest = bisect_left(range(most), True, min(1, most), key=lambda count: fits(without(count)))
    return without(fewest)
