"""Structured output: grammars from OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from inlay.api.fields import check_depth
from inlay.api.generation.schemas import held
from inlay.api.schema.chat import ChatRequest
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InvalidRequestError, parser_words
from inlay.http.quoting import shown_at, shown_value
from inlay.messages.card import ModelCard
from inlay.messages.request import MAX_GRAMMAR, Grammar, GrammarKind

_FORMAT, _OUTPUTS = "response_format", "structured_outputs"


def field_of(request: GenerationRequest) -> str:
    """Return the field that a request's grammar comes from; `tools` for a forced call."""
    if isinstance(request, ChatRequest) and request.tool_choice not in (None, "auto", "none"):
        return "tools"
    if request.structured_outputs is not None:
        return _OUTPUTS
    return _FORMAT


def own_fields(request: GenerationRequest) -> dict[str, str]:
    """Return an engine's fields that come from others of the request, and those."""
    names = {"grammar": field_of(request)}
    if isinstance(request, ChatRequest):
        names["prompt"] = "messages"
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    return names


def grammar_of(request: GenerationRequest, card: ModelCard) -> Grammar | None:
    """Return the grammar of a request; None for free text.

    Raises:
        InvalidRequestError: it is malformed, both fields give one, or the engine of the model
            cannot hold an output to it.
    """
    by_format = _of_format(request.response_format)
    by_outputs = _of_outputs(request.structured_outputs)
    if by_format is not None and by_outputs is not None:
        raise InvalidRequestError(
            f"{_OUTPUTS} and {_FORMAT} both say what the output must match; give one of them",
            param=_OUTPUTS,
        )
    grammar, field = by_format or by_outputs, _OUTPUTS if by_format is None else _FORMAT
    if grammar is not None and len(grammar.source) > MAX_GRAMMAR:
        raise InvalidRequestError(
            f"{field} has {len(grammar.source)} characters; at most {MAX_GRAMMAR} are allowed",
            param=field,
        )
    check_served(grammar, card, field)
    return grammar


def check_served(grammar: Grammar | None, card: ModelCard, param: str) -> None:
    """Raise `InvalidRequestError` unless the model's engine can hold an output to `grammar`."""
    if grammar is None or grammar.kind in card.grammars:
        return
    can = (
        f"it can do {', '.join(card.grammars)}" if card.grammars else "it has no structured output"
    )
    raise InvalidRequestError(
        f"{param} asks for {grammar.kind!r}, which is not supported by the engine of this model: "
        f"{can}",
        param=param,
    )


def _of_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind != "json_schema":
        got = f"type {shown_value(kind)}" if isinstance(kind, str) else shown_value(value)
        raise InvalidRequestError(
            f"{_FORMAT} must be an object of type 'text', 'json_object' or 'json_schema', got "
            f"{got}",
            param=_FORMAT,
        )
    named = value.get("json_schema")
    if not isinstance(named, dict) or "schema" not in named:
        raise InvalidRequestError(
            f"{_FORMAT} of type 'json_schema' needs json_schema: an object with name and schema, "
            f"got {shown_at(value, 'json_schema')}",
            param=_FORMAT,
        )
    _expect(named.get("name"), str, f"{_FORMAT}.json_schema.name must be a string", _FORMAT)
    _expect(
        named.get("strict", False),
        bool | None,
        f"{_FORMAT}.json_schema.strict must be a boolean",
        _FORMAT,
    )
    name, loose = f"{_FORMAT}.json_schema.schema", named.get("strict") is False
    return Grammar("json_schema", _schema(named["schema"], name, _FORMAT, loose=loose))


def _of_outputs(value: Any) -> Grammar | None:
    if value is None:
        return None
    asked = (
        {key: item for key, item in value.items() if item is not None}
        if isinstance(value, dict)
        else {}
    )
    for name in _NOT_SERVED:
        if asked.pop(name, None) not in (None, False):
            raise InvalidRequestError(f"{_OUTPUTS}.{name} is not supported", param=_OUTPUTS)
    if len(asked) != 1 or not asked.keys() <= _READERS.keys():
        raise InvalidRequestError(
            f"{_OUTPUTS} must be an object with exactly one of {', '.join(_READERS)}, got "
            f"{shown_value(value)}",
            param=_OUTPUTS,
        )
    (name,) = asked
    kind, read = _READERS[name]
    return Grammar(kind, read(asked[name]))


def _schema(value: Any, name: str, param: str, *, loose: bool = False) -> str:
    """Return a schema as it is held; a loose one, or one that says lenient, as far as it can be."""
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(
            f"{name} must be a JSON schema, got {shown_value(value)}", param=param
        )
    check_depth(value, param)
    source = msgspec.json.encode(value).decode()
    if isinstance(value, bool) or len(source) > MAX_GRAMMAR:
        return source
    options = value.get("x-guidance")
    lenient = isinstance(options, dict) and options.get("lenient") is True
    return msgspec.json.encode(
        held(
            value,
            loose=loose or lenient,
            refuse=lambda why: InvalidRequestError(f"{name} cannot be held: {why}", param=param),
        )
    ).decode()


def _json(value: Any) -> str:
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR:
            return value
        text = value.encode()
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(
                f"{_OUTPUTS}.json is not JSON: {parser_words(error, text)}", param=_OUTPUTS
            ) from error
    return _schema(value, f"{_OUTPUTS}.json", _OUTPUTS)


def _regex(value: Any) -> str:
    _expect(value, str, f"{_OUTPUTS}.regex must be a string", _OUTPUTS)
    if "\0" in value:
        raise InvalidRequestError(f"{_OUTPUTS}.regex must not hold a NUL character", param=_OUTPUTS)
    return str(value)


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise InvalidRequestError(
            f"{_OUTPUTS}.choice must be a list of at least one string, got {shown_value(value)}",
            param=_OUTPUTS,
        )
    return msgspec.json.encode(value).decode()


def _grammar(value: Any) -> str:
    _expect(value, str, f"{_OUTPUTS}.grammar must be a string", _OUTPUTS)
    if not value.strip():
        raise InvalidRequestError(f"{_OUTPUTS}.grammar must not be empty", param=_OUTPUTS)
    return str(value)


def _json_object(value: Any) -> str:
    if value is not True:
        raise InvalidRequestError(
            f"{_OUTPUTS}.json_object must be true where it is given, got {shown_value(value)}",
            param=_OUTPUTS,
        )
    return ""


_READERS: Mapping[str, tuple[GrammarKind, Callable[[Any], str]]] = {
    "json": ("json_schema", _json),
    "regex": ("regex", _regex),
    "choice": ("choice", _choice),
    "grammar": ("grammar", _grammar),
    "json_object": ("json_object", _json_object),
}
_NOT_SERVED = (
    "disable_any_whitespace", "disable_additional_properties", "structural_tag",
    "whitespace_pattern",
)  # fmt: skip


def _expect(value: Any, kind: Any, message: str, param: str) -> None:
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{message}, got {shown_value(value)}", param=param)
