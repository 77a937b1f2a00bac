"""An assistant's turn in a form in which a chat template writes all of it.

Templates differ in the names under which they read reasoning, in what they read as no content, and
in what they leave out: text beside calls, all calls but the first, or all calls. Each form says a
turn in another way; the first of which a template writes everything is used.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

REASONING = ("reasoning", "reasoning_content", "thinking")
"""Names of a message's reasoning, in chats of clients and in templates."""

Content: TypeAlias = str | list[dict[str, Any]]


class Holds(NamedTuple):
    """Kinds of what a turn of the assistant holds; of calls, 2 stands for any more than one."""

    reasoning: bool
    text: bool
    calls: int

    @classmethod
    def of(cls, turn: Mapping[str, Any]) -> "Holds":
        """Return what a turn holds."""
        calls = min(2, len(turn.get("tool_calls") or ()))
        return cls(bool(turn.get("reasoning")), bool(turn.get("content")), calls)


class TurnForm(NamedTuple):
    """A way to say a turn to a template.

    Attributes:
        think: places the reasoning in a message.
        call: places the calls, in one message or several.
        absent: content of a message with calls and without text.
        blank: text of a message that has neither.
    """

    think: Callable[[dict[str, Any]], dict[str, Any]]
    call: Callable[[dict[str, Any]], list[dict[str, Any]]]
    absent: Mapping[str, Any] = {}
    blank: str = ""

    def say(self, turn: Mapping[str, Any], text: Callable[[str], Content]) -> list[dict[str, Any]]:
        """Return the messages of a turn.

        Args:
            turn: a message with `reasoning`, `content` and `tool_calls`, as far as it has them.
            text: returns a text as the content that the template reads.
        """
        blank = text(self.blank)
        bare = {name: value for name, value in turn.items() if value or name not in _PARTS}
        return [
            message
            if "content" in message
            else {**message, **(self.absent if "tool_calls" in message else {"content": blank})}
            for message in self.call(self.think(bare))
        ]


_PARTS = ("content", "reasoning", "tool_calls")


def name_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under every name."""
    reasoning = turn.get("reasoning")
    return {**turn, **dict.fromkeys(REASONING, reasoning)} if reasoning else turn


def _think_in_content(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning as a part of its content, as Magistral's."""
    rest = {name: value for name, value in turn.items() if name != "reasoning"}
    part = {"type": "thinking", "thinking": turn["reasoning"]}
    return {**rest, "content": [part, *_parts(turn.get("content", []))]}


def _think_aloud(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its text behind its reasoning, as GPT-OSS reads it beside calls."""
    text = turn.get("content")
    if not isinstance(text, str):
        return name_reasoning(turn)
    rest = {name: value for name, value in turn.items() if name != "content"}
    return name_reasoning({**rest, "reasoning": f"{turn['reasoning']}\n\n{text}"})


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _call_together(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn]


def _call_each(turn: dict[str, Any]) -> list[dict[str, Any]]:
    first, *others = turn["tool_calls"]
    return [{**turn, "tool_calls": [first]}, *(_calling(turn, [call]) for call in others)]


def _call_behind(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [_without_calls(turn), _calling(turn, turn["tool_calls"])]


def _call_each_behind(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [_without_calls(turn), *(_calling(turn, [call]) for call in turn["tool_calls"])]


def _call_aloud(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the message with its calls as text, for templates that write none."""
    functions = [call["function"] for call in turn["tool_calls"]]
    said = json.dumps(
        [{"name": each.get("name"), "arguments": each.get("arguments")} for each in functions],
        ensure_ascii=False,
    )
    content = turn.get("content", "")
    if isinstance(content, str):
        content = f"{content}\n{said}" if content else said
    else:
        content = [*content, {"type": "text", "text": said}]
    return [{**_without_calls(turn), "content": content}]


def _calling(turn: Mapping[str, Any], calls: Sequence[Any]) -> dict[str, Any]:
    return {"role": turn["role"], "tool_calls": list(calls)}


def _without_calls(turn: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name != "tool_calls"}


def say_after_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with an assistant's text before calls in its next text behind them.

    For templates by which user and assistant take turns and calls are no turn: a text before calls
    and the answer after them would be two in a row.
    """
    said: list[Mapping[str, Any]] = []
    before: int | None = None
    called = False
    for message in messages:
        if message["role"] == "user":
            before = None
        elif message.get("tool_calls"):
            called = True
        elif message["role"] == "assistant":
            if before is not None and called:
                message = _joined(said.pop(before), message)
            before, called = len(said), False
        said.append(message)
    return said


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**first, **second}
    for name in ("content", *REASONING):
        parts = [each[name] for each in (first, second) if each.get(name)]
        if len(parts) == 2:
            one, other = parts
            together = isinstance(one, str) and isinstance(other, str)
            joined[name] = f"{one}\n\n{other}" if together else [*_parts(one), *_parts(other)]
        elif parts:
            joined[name] = parts[0]
    return joined


AS_IT_IS = TurnForm(name_reasoning, _call_together)
"""The form of a turn that no template has to be asked about."""


def forms(holds: Holds) -> Iterator[TurnForm]:
    """Yield the forms of a turn, the most faithful first."""
    beside = holds.reasoning or holds.text
    think = [name_reasoning]
    if holds.reasoning:
        think.append(_think_in_content)
        think += [_think_aloud] if holds.calls and holds.text else []
    if not holds.calls:
        yield from (TurnForm(each, _call_together) for each in think)
        if not holds.text:
            # Mistral's newer templates refuse an empty text of the assistant.
            yield TurnForm(name_reasoning, _call_together, blank=" ")
        return
    call = [_call_together]
    call += [_call_each] if holds.calls > 1 else []
    call += [_call_behind] if beside else []
    call += [_call_each_behind] if beside and holds.calls > 1 else []
    # Templates may ask whether content is None before they write calls; others print the None.
    absent: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]
    yield from (TurnForm(*each) for each in product(think, call, absent))
    yield from (TurnForm(each, _call_aloud) for each in think[:2])


_THOUGHT, _TEXT = 'idea\n"one"', 'words\n"two"'
"""Texts for probing templates; a template that prints a list would escape them."""

_CALLS = (("probe_one", "value_one"), ("probe_two", "value_two"))
"""Names and arguments of the calls; templates write one of them, or both."""


PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "probed",
            "description": "probed",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)
"""Tools beside a probe: none that it calls, whose name would be written with them."""

CALL_ID = "calling00"
"""Id of the first call of a probe, of nine characters: some templates accept no others."""


def probe(holds: Holds, text: Callable[[str], Content]) -> dict[str, Any]:
    """Return a turn that holds the same, for trying forms; `text` makes its content."""
    turn: dict[str, Any] = {"role": "assistant"}
    if holds.reasoning:
        turn["reasoning"] = _THOUGHT
    if holds.text:
        turn["content"] = text(_TEXT)
    if holds.calls:
        turn["tool_calls"] = [
            {
                "id": CALL_ID[:-1] + str(number),
                "type": "function",
                "function": {"name": name, "arguments": {"key": value}},
            }
            for number, (name, value) in enumerate(_CALLS)
        ][: holds.calls]
    return turn


class Written(NamedTuple):
    """Result of a probe, better first.

    Attributes:
        none: True if it wrote "None", as templates do that print an absent content.
        thoughtless: True if it left the reasoning out, as templates do by design.
    """

    none: bool
    thoughtless: bool

    @classmethod
    def of(cls, text: str, holds: Holds, form: TurnForm) -> "Written | None":
        """Return what is said of the probe in `text`; None if a word is lost, or out of place."""
        thoughts = text.count(_THOUGHT)
        if not thoughts and form.think is not AS_IT_IS.think:
            return None  # moved for nothing
        # Some templates write content as JSON.
        shown = _TEXT if _TEXT in text else json.dumps(_TEXT)[1:-1]
        if thoughts > 1 or text.count(shown) != holds.text:
            return None
        places = [text.find(_THOUGHT)] if thoughts else []
        places += [text.find(shown)] if holds.text else []
        for names in _CALLS[: holds.calls]:
            found = [place for place in map(text.find, names) if place >= 0]
            if not found:
                return None
            places.append(min(found))
        if places != sorted(places):
            return None
        return cls("None" in text, holds.reasoning and not thoughts)
