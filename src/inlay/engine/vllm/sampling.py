"""From a `Sampling` to vLLM's `SamplingParams`."""

import json
from typing import Any

from blake3 import blake3
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from inlay.base.errors import InvalidRequestError
from inlay.messages.fields import FOR_VLLM
from inlay.messages.request import Grammar, GrammarKind, Request

KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")
"""The kinds of grammar vLLM holds an output to."""


def params_of(
    request: Request, eos_token_ids: tuple[int, ...], *, extra: dict[str, Any] | None = None
) -> Any:
    """VLLM's parameters for choosing the tokens of `request`.

    Its own idea of the model's end tokens is left out: those of the card are given as stop tokens.
    Text is of no interest. `extra` are arguments for vLLM's connector.
    """
    sampling, done = request.sampling, len(request.prior_output)
    ends = () if sampling.ignore_eos else eos_token_ids
    params = SamplingParams(
        # vLLM puts out a token at least; `VllmRequestTracker` leaves it out where none was asked
        # for.
        max_tokens=max(1, sampling.max_tokens - done),
        min_tokens=max(0, sampling.min_tokens - done),
        **{theirs: getattr(sampling, name) for theirs, name in FOR_VLLM},
        seed=_seed(sampling.seed, done),
        logit_bias=dict(sampling.logit_bias) or None,
        stop_token_ids=[*sampling.stop_token_ids, *ends],
        ignore_eos=True,
        logprobs=None if sampling.logprob_token_ids else sampling.logprobs,
        logprob_token_ids=list(sampling.logprob_token_ids) or None,
        thinking_token_budget=None if sampling.thinking is None else sampling.thinking.tokens,
        prompt_logprobs=None if request.prior_output else sampling.prompt_logprobs,
        flat_logprobs=True,
        structured_outputs=None if sampling.grammar is None else _structured(sampling.grammar),
        allowed_token_ids=None
        if sampling.allowed_token_ids is None
        else list(sampling.allowed_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        extra_args=extra,
    )
    if sampling.bad_words:
        # Its own field takes words as text, to be made ids of by rules other than the frontend's.
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return params


def _seed(seed: int, done: int) -> int:
    """The seed of what follows `done` tokens.

    VLLM's randomness starts anew with a request and must not repeat itself.
    """
    if not done:
        return seed
    return int.from_bytes(blake3(f"{seed}:{done}".encode()).digest(7), "little")


def _structured(grammar: Grammar) -> Any:
    match grammar.kind:
        case "json_schema":
            return StructuredOutputsParams(json=grammar.source)
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "choice":
            return StructuredOutputsParams(choice=json.loads(grammar.source))
        case "regex":
            return StructuredOutputsParams(regex=grammar.source)
        case "grammar":
            return StructuredOutputsParams(grammar=grammar.source)
    raise InvalidRequestError(
        f"a grammar of kind {grammar.kind!r} is not supported by this engine", param="grammar"
    )
