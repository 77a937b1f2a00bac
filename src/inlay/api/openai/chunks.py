"""Events of a stream of completions or chat completions: what its chunks have in common."""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from inlay import __version__
from inlay.api.generation.choices import ChoicePiece, ChoiceState
from inlay.api.generation.generation import AnswerUsage, Generation
from inlay.api.openai.schema.generation import (
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestMetrics,
    StageTokens,
    UsageInfo,
    WeightVersion,
)
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InlayError
from inlay.http.errors import ErrorResponse, shown
from inlay.http.sse import Event, TextEvents

_UNSET = msgspec.UNSET

C = TypeVar("C", bound=msgspec.Struct)


class UsageShown(NamedTuple):
    """Events of a stream that have usage: each one, or the last one.

    As in vLLM, `continuous` needs `at_end`.
    """

    continuous: bool
    at_end: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> "UsageShown":
        """Return the options of the request's `stream_options`."""
        options = request.stream_options
        at_end = bool(options and options.include_usage)
        return cls(at_end and bool(options and options.continuous_usage_stats), at_end)


def whole_usage(generation: Generation) -> UsageInfo:
    """Return the usage of a whole response."""
    used = generation.usage()
    return _usage(used, PromptTokensDetails(used.cached_tokens), _stages(generation))


def _stages(generation: Generation) -> dict[str, StageTokens] | msgspec.UnsetType:
    """Return the share of each stage, where several have worked."""
    found = {
        name: StageTokens(used.prompt_tokens, used.completion_tokens)
        for name, used in generation.usage_by_model().items()
    }
    return found or _UNSET


def _usage(
    usage: AnswerUsage,
    details: PromptTokensDetails | msgspec.UnsetType,
    stages: dict[str, StageTokens] | msgspec.UnsetType = _UNSET,
    *,
    null: bool = True,
) -> UsageInfo:
    reasoning = usage.reasoning_tokens
    return UsageInfo(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=details,
        completion_tokens_details=(None if null else _UNSET)
        if reasoning is None
        else CompletionTokensDetails(reasoning),
        stages=stages,
    )


def fingerprint_of(generation: Generation) -> str:
    """Return the `system_fingerprint`: equal if release, engine, weights and dtype are equal."""
    card = generation.card
    return _fingerprint(card.engine, card.engine_version, card.weights_id, card.dtype)


@lru_cache
def _fingerprint(*parts: str | None) -> str:
    return f"inlay-{__version__}-{blake3(repr(parts).encode()).hexdigest(4)}"


def metrics_of(generation: Generation) -> RequestMetrics | None:
    """Return the times of an answer; None where they are not shown, or of several choices."""
    if not generation.shows_times or len(generation.choices) != 1:
        return None
    (choice,) = generation.choices
    spent, tokens = generation.times.spent(), choice.completion_tokens
    if spent is None:
        return RequestMetrics(None, None, None, None, None)
    inferring = spent.prefilling + spent.decoding
    return RequestMetrics(
        spent.prefilling * 1e3,
        spent.decoding * 1e3,
        spent.queued * 1e3 if spent.queued else None,
        spent.decoding * 1e3 / (tokens - 1) if tokens > 1 else None,
        tokens / inferring if inferring else None,
    )


def weight_versions_of(
    request: GenerationRequest, generation: Generation, tokens: int
) -> list[WeightVersion] | msgspec.UnsetType:
    """Return what a choice of so many tokens says of its weights, if the request wants it."""
    if not request.return_weight_versions:
        return _UNSET
    return [WeightVersion(generation.card.weights_id, 0, tokens)]


class Chunks(Generic[C]):
    """Maker of the chunks of one response.

    Args:
        kind: type of a chunk.
        response_id: of the response.
        model: name the response shows.
        request: its `stream_options` say which events have usage.
        generation: what is answered.
        marks: fields of every chunk with a choice that does not have them otherwise.

    Attributes:
        created: Unix time of the response.
        usage: the events that have usage.
    """

    def __init__(
        self,
        kind: Callable[..., C],
        response_id: str,
        model: str,
        request: GenerationRequest,
        generation: Generation,
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._kind = kind
        self._marks = marks
        self._id = response_id
        self._model = model
        self._generation = generation
        self._texts: dict[int, TextEvents] = {}
        self.created = int(time.time())
        self.usage = UsageShown.of(request)

    def chunk(self, choices: list[Any], *, last: bool = False, **more: Any) -> C:
        """Return a chunk; that with the response's last piece has the fingerprint."""
        if last and not self.usage.at_end:
            more["system_fingerprint"] = fingerprint_of(self._generation)
        if choices:
            more = {**self._marks, **more}
        return self._kind(
            id=self._id, created=self.created, model=self._model, choices=choices, **more
        )

    def texts(self, index: int, part: Callable[[int, str], msgspec.Struct]) -> TextEvents:
        """Return the events of chunks that have nothing but the text of one choice.

        Args:
            index: of the choice.
            part: makes the chunk's choice of an index and a text.
        """
        events = self._texts.get(index)
        if events is None:
            events = self._texts[index] = TextEvents(lambda mark: self.chunk([part(index, mark)]))
        return events

    def usage_of(
        self, choice: ChoiceState, piece: ChoicePiece | None
    ) -> UsageInfo | msgspec.UnsetType:
        """Return the usage in a chunk of `piece`, if each has one."""
        if not self.usage.continuous:
            return _UNSET
        return _usage(self._generation.usage_of(choice, piece), _UNSET)

    def closing_events(self) -> list[Event]:
        """Return a chunk with usage and no choices, if the request wants it."""
        if not self.usage.at_end:
            return []
        used = self._generation.usage()
        # As in vLLM, a stream leaves null details out.
        details = PromptTokensDetails(used.cached_tokens, _UNSET, _UNSET)
        usage = _usage(used, details, _stages(self._generation), null=False)
        return [
            self.chunk(
                [],
                usage=usage,
                system_fingerprint=fingerprint_of(self._generation),
                metrics=metrics_of(self._generation) or _UNSET,
            )
        ]

    def failure_events(self, error: InlayError) -> list[Event]:
        return [ErrorResponse(shown(error))]
