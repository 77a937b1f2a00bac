"""Parser of reasoning between tags, followed by an answer for another parser."""

from inlay.render.output import Begins, OutputDelta, OutputParser, ReasoningPiece
from inlay.render.parsers.source import Steps, StepsParser, trailing_newlines


class ThinkingParser(StepsParser):
    """Parser of reasoning, if any, and then of the answer.

    Without an end tag all text is reasoning. Line breaks next to the tags are not shown.
    """

    def __init__(self, start: str, end: str, begins: Begins, answer: OutputParser) -> None:
        super().__init__()
        self._start = start
        self._end = end
        self._begins = begins
        self._answer = answer

    def _read(self) -> Steps[None]:
        source = self.source
        if self._begins is not Begins.BEHIND:
            yield from source.space()
            opened = yield from source.accept(self._start)
            if opened:
                source.settle()
            if opened or self._begins is Begins.INSIDE:
                yield from source.newlines()
                begun = source.settle().lstrip("\r\n")
                if begun:
                    yield ReasoningPiece(begun)
                yield from source.until((self._end,), ReasoningPiece, hold=trailing_newlines)
                yield from source.newlines()
                source.settle()
        yield from self._each(self._answer.push(source.settle()))
        while not source.ended or source.rest:
            if source.rest:
                text = source.take(len(source.rest))
                source.settle()
                yield from self._each(self._answer.push(text))
            else:
                yield None
        yield from self._each(self._answer.flush())

    @staticmethod
    def _each(deltas: list[OutputDelta]) -> Steps[None]:
        yield from deltas
