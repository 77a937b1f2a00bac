"""Checks of a request against the refusals of an engine.

Done before it is sent, and again by the engine.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.messages.card import Feature, Prompts, Refusal
from inlay.messages.fields import SAMPLING
from inlay.messages.request import Request


class _Meaning(msgspec.Struct, frozen=True):
    asked: Callable[[Request], bool]
    param: str
    words: str


def _penalised(request: Request) -> bool:
    """True if penalties consider earlier output."""
    sampling = request.sampling
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def _plain(name: str, neutral: object) -> _Meaning:
    """Return the meaning of a plain sampling field."""
    return _Meaning(lambda request: getattr(request.sampling, name) != neutral, name, name)


_MEANINGS: Mapping[Feature, _Meaning] = {
    "adapter": _Meaning(lambda request: request.adapter is not None, "model", "an adapter"),
    "grammar": _Meaning(
        lambda request: request.sampling.grammar is not None, "grammar", "structured output"
    ),
    "grammar_after": _Meaning(
        lambda request: (
            request.sampling.grammar is not None and bool(request.sampling.grammar.after)
        ),
        "grammar",
        "structured output that begins after the model's reasoning",
    ),
    "prompt_logprobs": _Meaning(
        lambda request: request.sampling.prompt_logprobs is not None,
        "prompt_logprobs",
        "prompt_logprobs",
    ),
    "bad_words": _Meaning(
        lambda request: bool(request.sampling.bad_words), "bad_words", "bad_words"
    ),
    "allowed_token_ids": _Meaning(
        lambda request: request.sampling.allowed_token_ids is not None,
        "allowed_token_ids",
        "allowed_token_ids",
    ),
    "prior_output_with_grammar": _Meaning(
        lambda request: bool(request.prior_output) and request.sampling.grammar is not None,
        "grammar",
        "to go on with structured output that another worker began",
    ),
    "prior_output_with_penalties": _Meaning(
        lambda request: bool(request.prior_output) and _penalised(request),
        "presence_penalty",
        "to go on with an output that another worker began under presence_penalty or "
        "frequency_penalty",
    ),
    "temperature_above_2": _Meaning(
        lambda request: request.sampling.temperature > 2.0, "temperature", "a temperature above 2"
    ),
    "logprob_token_ids": _Meaning(
        lambda request: bool(request.sampling.logprob_token_ids),
        "logprob_token_ids",
        "logprob_token_ids",
    ),
    "thinking_token_budget": _Meaning(
        lambda request: request.sampling.thinking is not None,
        "thinking_token_budget",
        "thinking_token_budget",
    ),
    **{name: _plain(name, each.neutral) for name, each in SAMPLING.items()},
}

_WITH: Mapping[Prompts, str] = {
    "any": "",
    "rows": " with prompt embeddings",
    "mixed": " with a prompt of text and embeddings",
}


def check(refusals: Iterable[Refusal], request: Request, engine: str) -> None:
    """Return if `request` asks for nothing that is refused.

    Raises:
        InvalidRequestError: it does; the message names the engine and the reason.
    """
    for refusal in refusals:
        # One of a later release is refused by its worker.
        meaning = _MEANINGS.get(refusal.feature)
        if meaning is None:
            continue
        if _applies(refusal.prompts, request) and meaning.asked(request):
            raise InvalidRequestError(
                f"{meaning.words}{_WITH[refusal.prompts]} is not supported by the engine of this "
                f"model ({engine}): "
                f"{refusal.reason}",
                param=meaning.param,
            )


def _applies(prompts: Prompts, request: Request) -> bool:
    if prompts == "any":
        return True
    has_rows = request.prompt.has_rows
    return has_rows if prompts == "rows" else has_rows and bool(request.prompt.token_ids())
