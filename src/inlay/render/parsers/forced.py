"""Outputs that a grammar made tool calls of.

Those of requests that require a call or name the function.
"""

from inlay.render.parsers.calls import CallsParser, Tools
from inlay.render.parsers.source import Malformed, Steps


class RequiredParser(CallsParser):
    """A list of objects with name and parameters."""

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
    """The arguments of one function."""

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


__all__ = ["NamedParser", "RequiredParser"]
