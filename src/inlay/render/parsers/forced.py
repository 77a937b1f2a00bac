"""Parsers of forced tool calls, whose form a grammar guarantees."""

from inlay.render.parsers.calls import CallsParser, Tools
from inlay.render.parsers.source import Malformed, Steps


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
