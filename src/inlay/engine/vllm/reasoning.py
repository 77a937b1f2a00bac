"""The beginning of a grammar in an output, given to vLLM request by request.

vLLM binds an output from where its reasoning parser says that reasoning has ended. One parser
serves all requests of an engine, and is made anew for each with what the request says: this one
looks for the run of ids that `Grammar.after` names. vLLM imports it in its core's process
(`--reasoning-parser-plugin`); of its other duties, which are vLLM's own frontend's, it has none.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager

from inlay.messages.request import Request

NAME = "inlay"
_NO_TEXTS = "inlay's frontend reads what outputs say; this parser only finds where grammars begin"


def turn_on(config: Any) -> bool:
    """Have vLLM ask this parser.

    `config` is its `VllmConfig`, before it starts; False where it was given a parser of its own.
    """
    own = config.structured_outputs_config
    if own.reasoning_parser or own.enable_in_reasoning:
        return False
    own.reasoning_parser, own.reasoning_parser_plugin = NAME, __name__
    return True


def bind(request: Request) -> dict[str, Any]:
    """Arguments of `AsyncLLM.add_request` for a request's grammar."""
    grammar = request.sampling.grammar
    if grammar is None:
        return {}
    if not grammar.after:
        return {"reasoning_ended": True}
    start = len(request.prompt) + len(request.prior_output)
    return {
        "reasoning_ended": False,
        "reasoning_parser_kwargs": {"after": list(grammar.after), "start": start},
    }


@ReasoningParserManager.register_module(NAME)
class GrammarStart(ReasoningParser):  # type: ignore[misc]
    """Finds the first end of a run of ids in one output."""

    def __init__(self, tokenizer: Any, *, after: Sequence[int], start: int) -> None:
        """Of a request.

        Args:
            tokenizer: vLLM's.
            after: the run.
            start: where the output begins among the request's ids.
        """
        super().__init__(tokenizer)
        self._after = list(after)
        self._start = start

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return True if the run is in the output so far."""
        return self._ends(input_ids, self._start)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Return True if it ends among the last ids, which are `delta_ids`."""
        return self._ends(input_ids, len(input_ids) - len(list(delta_ids)))

    def _ends(self, input_ids: Sequence[int], since: int) -> bool:
        size = len(self._after)
        first = max(since + 1, self._start + size)
        return any(
            list(input_ids[end - size : end]) == self._after
            for end in range(first, len(input_ids) + 1)
        )

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Not asked by an engine."""
        raise NotImplementedError(_NO_TEXTS)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Not asked by an engine."""
        raise NotImplementedError(_NO_TEXTS)

    def extract_reasoning_streaming(self, *texts: Any) -> Any:
        """Not asked by an engine."""
        raise NotImplementedError(_NO_TEXTS)
