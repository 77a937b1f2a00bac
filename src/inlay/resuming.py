"""Requests that an engine may continue from a `prior_output`, by its card."""

from inlay.card import Exactness, ModelCard
from inlay.request import Request, Task


def features(request: Request) -> list[str]:
    """Names of `ModelCard.resuming` that the output of `request` depends on."""
    if request.task is Task.STAGE:
        return []  # its payloads are made again, each whole; `inlay.router.stages` passes some over
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
    return used


def inexact(request: Request, card: ModelCard) -> list[str]:
    """Features of `request` that an engine does not continue exactly, or but for rounding.

    Another draw from the same distribution is as good where the client gave no seed.
    """
    return [name for name in features(request) if not _continues(name, request, card)]


def _continues(feature: str, request: Request, card: ModelCard) -> bool:
    match card.resuming.get(feature):
        case Exactness.EXACT | Exactness.ROUNDED:
            return True
        case Exactness.SAMPLED:
            return feature == "sampling" and request.sampling.unseeded
        case _:
            return False


__all__ = ["features", "inexact"]
