"""Checks of a generation request's fields that need no model."""

import math
from typing import NamedTuple

from inlay.api.fields import check_unserved
from inlay.api.schema.generation import GenerationRequest
from inlay.errors import InvalidRequestError

_INF = math.inf
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOPS_LENGTH = 64, 4096, 16_384
MAX_BAD_WORDS, MAX_BAD_WORDS_LENGTH = 128, 4096


class _Range(NamedTuple):
    """Allowed range of a number: `low` to `high`; `low` is excluded if `above`."""

    low: float
    high: float = _INF
    above: bool = False

    def __str__(self) -> str:
        if self.high == _INF:
            return f"{'above' if self.above else 'at least'} {self.low}"
        low = f"{'above' if self.above else 'from'} {self.low}"
        return f"{low} {'and at most' if self.above else 'to'} {self.high}"


_RANGES: dict[str, _Range] = {
    "n": _Range(1),
    "best_of": _Range(1),
    "max_tokens": _Range(1),
    "max_completion_tokens": _Range(1),
    "min_tokens": _Range(0),
    "temperature": _Range(0),
    "top_p": _Range(0, 1, above=True),
    "top_k": _Range(-1),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, above=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "seed": _Range(-(2**63), 2**63 - 1),
    "thinking_token_budget": _Range(-1),
    "truncate_prompt_tokens": _Range(-1),
    "priority": _Range(-(2**31), 2**31 - 1),
}


def check_request(request: GenerationRequest) -> None:
    """Check the fields that can be checked without a model.

    Raises `InvalidRequestError` that names the field, its value and the allowed values.
    """
    for name, allowed in _RANGES.items():
        value = getattr(request, name, None)
        if value is None:
            continue
        if name == "max_tokens" and request.only_echoes:
            continue
        if value < allowed.low or value > allowed.high or (allowed.above and value == allowed.low):
            raise InvalidRequestError(f"{name} must be {allowed}, got {value}", param=name)
    check_unserved(request)
    _check_words(request.bad_words or [])
    if request.best_of is not None and request.best_of != request.candidates:
        raise InvalidRequestError(
            f"best_of must be at least n ({request.n or 1}), and is n in a chat; got "
            f"{request.best_of}",
            param="best_of",
        )
    if request.stream and request.candidates > (request.n or 1):
        raise InvalidRequestError(
            f"best_of ({request.best_of}) above n is not possible when stream is true: the best is "
            "known in the end",
            param="best_of",
        )
    if request.cache_salt == "":
        raise InvalidRequestError(
            "cache_salt must be a non-empty string if provided", param="cache_salt"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    _check_stops(stops_of(request))


def stops_of(request: GenerationRequest) -> tuple[str, ...]:
    """Return the stop strings."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop"
        )
    for stop in stops:
        if not stop:
            raise InvalidRequestError("stop must not hold an empty string", param="stop")
        if len(stop) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"a stop string has {len(stop)} characters; at most {MAX_STOP_LENGTH}", param="stop"
            )
    length = sum(map(len, stops))
    if length > MAX_STOPS_LENGTH:
        raise InvalidRequestError(
            f"stop has {length} characters in all its strings; at most {MAX_STOPS_LENGTH}",
            param="stop",
        )


def _check_words(words: list[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS}", param="bad_words"
        )
    for word in words:
        if not word.strip():
            raise InvalidRequestError("bad_words must not hold an empty word", param="bad_words")
    length = sum(map(len, words))
    if length > MAX_BAD_WORDS_LENGTH:
        raise InvalidRequestError(
            f"bad_words have {length} characters together; at most {MAX_BAD_WORDS_LENGTH}",
            param="bad_words",
        )
