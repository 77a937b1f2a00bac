"""Base parser of tool calls: indices, ids, and calls written as JSON objects."""

import json
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.render.output import ContentDelta, OutputDelta, ToolCallDelta
from inlay.render.parsers.source import Malformed, Steps, StepsParser, trailing_space

_ALPHANUMERIC = string.ascii_letters + string.digits
_ARGUMENTS = ("arguments", "parameters")


def call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return an id of nine letters and digits, as the chat templates of Mistral's models need."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that a request lets the model call.

    Attributes:
        schemas: JSON Schema of each function's arguments, by name.
        parallel: True if several calls are allowed; otherwise all but the first are left out.
        make_id: makes the ids of calls.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    make_id: Callable[[], str] = call_id


class CallsParser(StepsParser):
    """A `StepsParser` for tool calls.

    Whitespace between content and a call, and between calls, is not shown.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self.tools = tools
        self._count = 0
        self._at_call = False

    def _run(self) -> list[OutputDelta]:
        found = super()._run()
        if self.tools.parallel:
            return found
        return [
            delta for delta in found if not isinstance(delta, ToolCallDelta) or delta.index == 0
        ]

    def open(self, name: str) -> ToolCallDelta:
        """Return the first delta of the next call."""
        self.source.settle()
        self._count += 1
        self._at_call = True
        return ToolCallDelta(self._count - 1, self.tools.make_id(), name, "")

    def piece(self, text: str) -> ToolCallDelta:
        """Return a piece of the arguments of the last opened call."""
        return ToolCallDelta(self._count - 1, None, None, text)

    def content(self, *tags: str) -> Steps[str | None]:
        """Show content up to one of `tags`, and return the tag; None at the end.

        The tag and the whitespace before it are not settled.
        """
        tag = yield from self.source.until(tags, self._show_content, hold=trailing_space)
        if tag is None:
            yield from self.source.space()
            if self._at_call:
                self.source.settle()
            yield from self.unsettled()
        return tag

    def unsettled(self) -> Steps[None]:
        """Show the unsettled text as content."""
        text = self.source.settle()
        if text:
            yield self._show_content(text)

    def _show_content(self, text: str) -> OutputDelta:
        self._at_call = False
        return ContentDelta(text)

    def call_objects(self) -> Steps[None]:
        """Read a list of call objects, up to its closing bracket."""
        source = self.source
        yield from source.expect("[")
        while True:
            yield from source.space()
            yield from self.call_object()
            yield from source.space()
            if not (yield from source.accept(",")):
                return

    def call_object(
        self,
        *,
        known: Collection[str] | None = None,
        keys: Collection[str] | None = None,
        bare: bool = True,
    ) -> Steps[None]:
        """Read a call as a JSON object with a name and arguments (or parameters).

        The call is opened where its arguments begin; from there on the model's text is shown, valid
        or not, and only its brackets are counted.

        Args:
            known: allowed names, or None for any.
            keys: allowed keys before the arguments, or None for any.
            bare: True if a call may have no arguments.

        Raises:
            Malformed: it is no call. The text that was not shown is unsettled.
        """
        source = self.source
        name: str | None = None
        waiting: str | None = None
        opened = False
        yield from source.expect("{")
        while True:
            yield from source.space()
            key = yield from source.string()
            if not opened and keys is not None and key not in keys:
                raise Malformed
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            if opened:
                yield from source.value()
            elif key == "name":
                name = yield from source.string()
                if not name or (known is not None and name not in known):
                    raise Malformed
            elif key in _ARGUMENTS and name is not None:
                yield from self._arguments(name)
                opened = True
            elif key in _ARGUMENTS:
                waiting = _arguments_of((yield from source.value()))
            else:
                yield from source.value()
            if name is not None and waiting is not None and not opened:
                yield self.open(name)
                yield self.piece(waiting)
                opened = True
            yield from source.space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}")
        if not opened:
            if name is None or not bare:
                raise Malformed
            yield self.open(name)
            yield self.piece("{}")
        source.settle()

    def _arguments(self, name: str) -> Steps[None]:
        """Open a call and show its arguments; an object is shown as it arrives."""
        if (yield from self.source.peek()) == "{":
            yield from self.object_arguments(name)
            return
        arguments = _arguments_of((yield from self.source.value()))
        yield self.open(name)
        yield self.piece(arguments)

    def object_arguments(self, name: str) -> Steps[None]:
        """Open a call and show the object that follows as its arguments.

        Raises:
            Malformed: the text is no object, or its first character is not allowed.
        """
        source = self.source
        yield from source.expect("{")
        begun = "{" + (yield from source.space())
        if (yield from source.peek()) not in ('"', "}"):
            raise Malformed
        yield self.open(name)
        yield self.piece(begun)
        yield from source.nested(self.piece, begun=begun)


def _arguments_of(value: str) -> str:
    """Return arguments as JSON text, from an object, a string with an object, or null.

    Raises `Malformed` for any other value.
    """
    try:
        said = json.loads(value, strict=False)
        if isinstance(said, str):
            value, said = said, json.loads(said, strict=False)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    if said is None:
        return "{}"
    if not isinstance(said, dict):
        raise Malformed
    return value


class RequiredParser(CallsParser):
    """Parser of a list of objects with name and parameters (`tool_choice: "required"`)."""

    def _read(self) -> Steps[None]:
        source = self.source
        try:
            yield from source.space()
            yield from self.call_objects()
            yield from source.expect("]")
            source.settle()
        except Malformed:
            yield from self.unsettled()
        yield from self.content()


class NamedParser(CallsParser):
    """Parser of the arguments of one named function."""

    def __init__(self, tools: Tools, name: str) -> None:
        super().__init__(tools)
        self._name = name

    def _read(self) -> Steps[None]:
        try:
            yield from self.source.space()
            yield from self.object_arguments(self._name)
        except Malformed:
            yield from self.unsettled()
        yield from self.content()
