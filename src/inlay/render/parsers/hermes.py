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

from inlay.render.json_schema import SchemaTypes, type_of
from inlay.render.output import OutputDelta
from inlay.render.parsers.calls import CallsParser
from inlay.render.parsers.source import Malformed, Steps, trailing_newline, trailing_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""JSON's words in the spellings that models have for them, Python's among them."""

_UNDECLARED = frozenset({"string"})


class HermesParser(CallsParser):
    """Parser of JSON between tags: a call, several one after the other, or a list of them."""

    def _read(self) -> Steps[None]:
        source = self.source
        closed = True
        while True:
            tag = yield from self.content(*((OPEN,) if closed else (OPEN, CLOSE)))
            if tag is None:
                return
            closed = tag == CLOSE
            if closed:
                source.settle()
                continue
            before = self._count
            try:
                closed = yield from self._calls()
            except Malformed:
                yield from self.unsettled()
                # Calls stand; what is wrong behind them is content, up to the tag.
                closed = self._count == before

    def _calls(self) -> Steps[bool]:
        """Read what is between the tags; return True if the end tag came."""
        source = self.source
        yield from source.space()
        if (yield from source.peek()) == "[":
            yield from self.call_objects()
            yield from source.expect("]")
        else:
            yield from self.call_object()
        while True:
            yield from source.space()
            if (yield from source.accept(CLOSE)):
                source.settle()
                return True
            parted = yield from source.accept(",")
            yield from source.space()
            if (yield from source.peek()) != "{":
                if parted:
                    raise Malformed
                source.settle()
                return False
            yield from self.call_object()


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
            yield from self._parameters(SchemaTypes(self.tools.schemas.get(name, {})))
            yield from source.space()
            yield from source.accept(CLOSE)
            source.settle()

    def _parameters(self, types: SchemaTypes) -> Steps[None]:
        """Show parameters as one object; those that the schema does not declare are strings."""
        begin = "{"
        tag = yield from self._next_tag()
        while tag == _PARAMETER:
            key, end = yield from self.source.collect(">")
            self.source.settle()
            yield self.piece(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
            begin = ", "
            if end is None:
                return
            tag = yield from self._value(types.of_property(key) or _UNDECLARED)
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
        if types == _UNDECLARED:
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


def _json_of(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: the parsed text if its type is allowed, else a string if that is."""
    said = text.strip()
    said = _WORDS.get(said.lower(), said)
    try:
        value = json.loads(said, parse_constant=_no_json)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, str) or ("string" in types and type_of(value) not in types):
        return json.dumps(text, ensure_ascii=False)
    return said


def _no_json(word: str) -> None:
    raise ValueError(word)
