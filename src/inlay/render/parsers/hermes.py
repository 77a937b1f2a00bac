"""Tool calls between `<tool_call>` tags.

JSON as Hermes and Qwen2.5 to Qwen3 write it, XML as Qwen3-Coder does.

<tool_call>
{"name": "look", "arguments": {"place": "harbour"}}
</tool_call>

<tool_call>
<function=look>
<parameter=place>
harbour
</parameter>
</function>
</tool_call>
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from inlay.render.output import OutputDelta
from inlay.render.parsers.calls import CallsParser
from inlay.render.parsers.source import Malformed, Steps, trailing_newline, trailing_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python literals that models sometimes write in place of JSON's."""


class HermesParser(CallsParser):
    """Parser of JSON between tags."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (yield from self.content(OPEN)) is not None:
            before = self._count
            try:
                yield from source.space()
                yield from self.call_object()
                yield from source.space()
                yield from source.accept(CLOSE)
                source.settle()
            except Malformed:
                yield from self.unsettled()
                if (
                    self._count > before
                ):  # the call stands; what is wrong behind its arguments is content
                    yield from source.until((CLOSE,), self._show_content, hold=trailing_space)
                    source.settle()


class QwenCoderParser(CallsParser):
    """Parser of XML between tags. Values are text; the tool's schema tells which are JSON."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (tag := (yield from self.content(OPEN, _FUNCTION))) is not None:
            try:
                if tag == OPEN:
                    yield from source.space()
                    yield from source.expect(_FUNCTION)
                name = yield from source.word()
                yield from source.expect(">")
            except Malformed:
                yield from self.unsettled()
                continue
            yield self.open(name)
            yield from self._parameters(self.tools.schemas.get(name, {}))
            yield from source.space()
            yield from source.accept(CLOSE)
            source.settle()

    def _parameters(self, schema: Mapping[str, Any]) -> Steps[None]:
        """Show parameters as one object."""
        properties = schema.get("properties")
        begin = "{"
        tag = yield from self._next_tag()
        while tag == _PARAMETER:
            key, end = yield from self.source.collect(">")
            self.source.settle()
            yield self.piece(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
            begin = ", "
            if end is None:
                return
            own = properties.get(key) if isinstance(properties, Mapping) else None
            tag = yield from self._value(frozenset(_types(own)))
            if tag == _PARAMETER_END:
                tag = yield from self._next_tag()
        if tag is not None:
            yield self.piece("}" if begin == ", " else "{}")

    def _next_tag(self) -> Steps[str | None]:
        """Return the tag after a parameter; text before it is content."""
        tag = yield from self.source.until(
            (_PARAMETER, _FUNCTION_END, CLOSE), self._show_content, hold=trailing_space
        )
        self.source.settle()
        return tag

    def _value(self, types: frozenset[str]) -> Steps[str | None]:
        """Show a parameter's value and return the tag that ended it."""
        source = self.source
        tags = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        yield from source.accept("\n")
        source.settle()
        if types <= {"string"}:
            yield self.piece('"')
            tag = yield from source.until(tags, self._text_piece, hold=trailing_newline)
            if tag is not None:
                yield self.piece('"')
        else:
            text, tag = yield from source.collect(*tags)
            text = text.removesuffix("\n")
            yield self.piece(text if tag is None else _json_of(text, types))
        source.settle()
        return tag

    def _text_piece(self, text: str) -> OutputDelta:
        return self.piece(json.dumps(text, ensure_ascii=False)[1:-1])


def _types(schema: object) -> Iterator[str]:
    """Yield the JSON types that a schema allows; none if it does not name types."""
    if not isinstance(schema, Mapping):
        return
    said = schema.get("type")
    yield from (
        kind for kind in (said if isinstance(said, list) else [said]) if isinstance(kind, str)
    )
    for name in ("anyOf", "oneOf"):
        others = schema.get(name)
        for other in others if isinstance(others, list) else ():
            yield from _types(other)


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: the parsed text if its type is allowed, else a string."""
    said = _WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(said, parse_constant=_no_json)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, str) or ("string" in types and value is not None):
        return json.dumps(text, ensure_ascii=False)
    return said


def _no_json(word: str) -> None:
    raise ValueError(word)
