"""Tool calls of Mistral's models, behind `[TOOL_CALLS]`.

A list of objects, or since tokenizer version 11 name and arguments.

[TOOL_CALLS][{"name": "look", "arguments": {"place": "harbour"}}]
[TOOL_CALLS]look{"place": "harbour"}[TOOL_CALLS]ring{}
[TOOL_CALLS]look[CALL_ID]0aB1cD2eF[ARGS]{"place": "harbour"}
"""

from inlay.render.parsers.calls import CallsParser
from inlay.render.parsers.source import Malformed, Steps

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(CallsParser):
    """Parser of all three forms."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (yield from self.content(CALLS)) is not None:
            try:
                yield from source.space()
                if (yield from source.peek()) == "[":
                    yield from self._list()
                else:
                    yield from self._named()
            except Malformed:
                yield from self.unsettled()

    def _list(self) -> Steps[None]:
        source = self.source
        yield from self.call_objects()
        yield from source.accept("]")
        source.settle()

    def _named(self) -> Steps[None]:
        source = self.source
        name = yield from source.word()
        if (yield from source.accept(CALL_ID)):
            yield from source.word()
        yield from source.accept(ARGS)
        yield from source.space()
        yield from self.object_arguments(name)
