"""Tool calls of Llama 3.

`<|python_tag|>` and JSON objects, with or without `;` between them; or the objects alone.

<|python_tag|>{"name": "look", "parameters": {"place": "harbour"}}; {"name": "ring", "parameters":
{}}
"""

from inlay.render.parsers.calls import CallsParser
from inlay.render.parsers.source import Malformed, Steps

TAG = "<|python_tag|>"
_KEYS = frozenset({"name", "type", "parameters", "arguments"})


class LlamaParser(CallsParser):
    """Parser of JSON after a tag.

    Without a tag, a call is read only at the start of the output, and only for functions of the
    request.
    """

    def _read(self) -> Steps[None]:
        yield from self.source.space()
        if (yield from self.source.peek()) == "{":
            yield from self._calls(tagged=False)
        while (yield from self.content(TAG)) is not None:
            yield from self._calls(tagged=True)

    def _calls(self, *, tagged: bool) -> Steps[None]:
        source = self.source
        try:
            while True:
                yield from source.space()
                if tagged:
                    yield from self.call_object()
                else:
                    yield from self.call_object(known=self.tools.schemas, keys=_KEYS, bare=False)
                yield from source.space()
                if not (yield from source.accept(";")) and (yield from source.peek()) != "{":
                    break
                yield from source.space()
                if not (yield from source.peek()):
                    source.settle()
        except Malformed:
            yield from self.unsettled()
