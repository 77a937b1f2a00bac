"""Requests that an engine may continue from a `prior_output`, by its card."""

from collections.abc import Mapping

from msgspec.structs import replace

from inlay.messages.card import Exactness, ModelCard
from inlay.messages.hidden_states import hidden_port
from inlay.messages.request import Request, Sampling, Task


def features(request: Request) -> list[str]:
    """Names of `ModelCard.resuming` that the output of `request` depends on."""
    if request.task is Task.STAGE:
        return []  # its payloads are made again, each whole; `inlay_stages.walk` passes some over
    if request.task is not Task.GENERATE:
        return ["payloads"]
    sampling = request.sampling
    used = ["greedy" if sampling.temperature == 0 else "sampling"]
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if penalties != (1.0, 0.0, 0.0) or sampling.bad_words or sampling.min_tokens:
        used.append("penalties")
    if sampling.logprobs is not None:
        used.append("logprobs")
    if sampling.grammar is not None:
        used.append("grammar")
    if sampling.hidden_states is not None:
        used.append("hidden_states")
    return used


def non_resumable_features(request: Request, card: ModelCard) -> list[str]:
    """Features of `request` that an engine does not continue exactly, or but for rounding.

    Another draw from the same distribution is as good where the client gave no seed.
    """
    return [name for name in features(request) if not _continues(name, request, card)]


def remaining_request(request: Request, given: Mapping[str, int]) -> Request:
    """Return a request that asks for no hidden states that were given."""
    params = request.params
    if not isinstance(params, Sampling) or params.hidden_states is None:
        return request
    asked = params.hidden_states
    rows = asked.given + given.get(hidden_port(asked.layers[0]), 0)
    return replace(request, params=replace(params, hidden_states=replace(asked, given=rows)))


def _continues(feature: str, request: Request, card: ModelCard) -> bool:
    match card.resuming.get(feature):
        case Exactness.EXACT | Exactness.ROUNDED:
            return True
        case Exactness.SAMPLED:
            return feature == "sampling" and request.sampling.unseeded
        case _:
            return False
