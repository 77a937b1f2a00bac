"""Tool calls of DeepSeek V3, R1 and V3.1.

V3 and R1 name a type and fence the arguments; V3.1 does neither:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look
    ```json
    {"place": "harbour"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"place":
    "harbour"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from inlay.render.parsers.calls import CallsParser
from inlay.render.parsers.source import Malformed, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class DeepSeekParser(CallsParser):
    """Parser of both forms, which differ in the text after the separator."""

    def _read(self) -> Steps[None]:
        source = self.source
        while (tag := (yield from self.content(CALLS, CALL))) is not None:
            try:
                if tag == CALLS:
                    yield from source.space()
                    yield from source.expect(CALL)
                yield from self._call()
            except Malformed:
                yield from self.unsettled()

    def _call(self) -> Steps[None]:
        source = self.source
        name = yield from source.word()
        yield from source.expect(SEPARATOR)
        yield from source.space()
        if (yield from source.peek()) == "{":
            yield from self.object_arguments(name)
        else:
            name = yield from source.word()
            yield from source.space()
            if (yield from source.accept(_FENCE)):
                yield from source.accept("json")
            yield from source.space()
            yield from self.object_arguments(name)
        for tag in (_FENCE, CALL_END, CALLS_END):
            yield from source.space()
            if (yield from source.accept(tag)):
                source.settle()
