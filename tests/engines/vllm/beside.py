"""The answers of two servers to the same request, compared field by field.

A difference is written `PATH: KIND`. A path is the keys from the top of the answer, `[]` for any
element of a list and `*` for any key of an object whose keys are tokens. Kinds: `only vLLM` and
`only inlay` (a key), `type`, `length`, `value`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

VOLATILE = frozenset({"id", "created", "system_fingerprint", "cached_tokens"})
"""Keys whose values differ by their nature (caches have blocks of several sizes).

Their types are compared.
"""

BY_TOKEN = frozenset({"top_logprobs", "prompt_logprobs"})
"""Keys of objects, or of lists of objects, whose own keys are tokens."""

CLOSE = 2e-3
"""Between logprobs of two engines in float32."""


@dataclass(frozen=True)
class Answer:
    """A server's answer: a whole one, or the events of a stream."""

    status: int
    body: Any
    events: tuple[Any, ...] | None = None


def ask(url: str, path: str, body: Mapping[str, Any]) -> Answer:
    """POST `body`; a stream that ends with an error has its body and the status 400."""
    response = httpx.post(url + path, json=body, timeout=300)
    if not response.headers["content-type"].startswith("text/event-stream"):
        return Answer(response.status_code, response.json())
    lines = [
        line.removeprefix("data: ")
        for line in response.text.splitlines()
        if line.startswith("data: ")
    ]
    assert lines[-1] == "[DONE]"
    events = tuple(json.loads(line) for line in lines[:-1])
    failed = next((event for event in events if "error" in event), None)
    return Answer(response.status_code, None, events) if failed is None else Answer(400, failed)


def differences(theirs: Answer, ours: Answer) -> set[str]:
    """Differences of two answers."""
    if theirs.status != ours.status:
        return {f"status: {theirs.status} and {ours.status}"}
    if theirs.status != 200:
        return set(_in_error(theirs.body, ours.body))
    if theirs.events is None or ours.events is None:
        return set(_compared(theirs.body, ours.body, ""))
    found = set(_compared(_joined(theirs.events), _joined(ours.events), "joined"))
    shapes = _by_place(theirs.events), _by_place(ours.events)
    for place in sorted(shapes[0].keys() | shapes[1].keys()):
        one, other = shapes[0].get(place), shapes[1].get(place)
        if one is not None and other is not None:
            found |= set(_compared(one, other, place, values=False))
        elif place == "usage event":
            found.add(f"{place}: only {'inlay' if one is None else 'vLLM'}")
    return found


def _in_error(theirs: Any, ours: Any) -> Iterator[str]:
    """Of errors the message is nobody's promise."""
    for one in _compared(theirs, ours, ""):
        if one != "error.message: value":
            yield one


def _compared(theirs: Any, ours: Any, path: str, *, values: bool = True) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        by_token = (
            path.removesuffix("[]").rpartition(".")[2] in BY_TOKEN and "logprob" not in theirs
        )
        # Which event of a stream brings the text is no matter of form.
        passed = set() if values or not path.endswith("delta") else {"content"}
        for key in (theirs.keys() | ours.keys()) - passed:
            inner = f"{path}.{'*' if by_token else key}".lstrip(".")
            if key not in ours or key not in theirs:
                if values or not by_token:
                    yield f"{inner}: only {'vLLM' if key in theirs else 'inlay'}"
            else:
                equal = values and key not in VOLATILE
                yield from _compared(theirs[key], ours[key], inner, values=equal)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if values and len(theirs) != len(ours):
            yield f"{path}: length"
        # How much of a text one event brings is no matter of form.
        if values or path.endswith("choices"):
            for one, other in zip(theirs, ours, strict=False):
                yield from _compared(one, other, f"{path}[]", values=values)
    elif _kind(theirs) != _kind(ours):
        yield f"{path}: type"
    elif values and not _equal(theirs, ours):
        yield f"{path}: value"


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, int | float) else type(value).__name__


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) or isinstance(ours, float):
        return math.isclose(theirs, ours, abs_tol=CLOSE)
    return bool(theirs == ours)


def _by_place(events: tuple[Any, ...]) -> dict[str, Any]:
    """One event of a stream for each place in its choice.

    How many there are between is the engine's affair. On a busy machine a whole choice may come in
    one event, which has what belongs to the first and to the last: a place of its own.
    """
    found: dict[str, Any] = {}
    begun: set[int] = set()
    for event in events:
        choice = event["choices"][0] if event["choices"] else None
        if choice is None:
            place = "usage event"
        elif choice["index"] not in begun:
            place = "first event" if choice.get("finish_reason") is None else "only event"
            begun.add(choice["index"])
        else:
            place = "event" if choice.get("finish_reason") is None else "last event"
        found.setdefault(place, event)
    return found


def _joined(events: tuple[Any, ...]) -> dict[str, Any]:
    """The sum of a stream: by choice the text, ids, logprobs and end; the last usage."""
    choices: dict[str, Any] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            one = choices.setdefault(
                str(choice["index"]),
                {"text": "", "token_ids": [], "tokens": [], "finish_reason": None},
            )
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            one["token_ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            one["tokens"] += logprobs.get("tokens") or [
                entry["token"] for entry in logprobs.get("content") or []
            ]
            one["finish_reason"] = choice.get("finish_reason") or one["finish_reason"]
            one["stop_reason"] = choice.get("stop_reason")
    return {"choices": choices, "usage": usage}


__all__ = ["Answer", "ask", "differences"]
