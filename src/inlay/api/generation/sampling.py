"""Sampling settings of a request, with the model's defaults, and of each choice."""

import secrets
from collections.abc import Iterator, Sequence

import msgspec

from inlay.api.fields import check_ids
from inlay.api.generation.logprobs import named_ids, prompt_logprobs_of
from inlay.api.schema.generation import GenerationRequest
from inlay.card import ModelCard
from inlay.errors import ContextLengthError, InvalidRequestError
from inlay.prompt import Prompt
from inlay.render import Begins, ReasoningIds, Renderer
from inlay.request import Grammar, Sampling, ThinkingBudget
from inlay.router import ServedModel

MAX_LOGIT_BIAS = MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_IDS = 1 << 20
"""Maximum allowed token ids of a request, counted once for each choice.

Each choice sends them in its own message to a worker.
"""
MAX_BAD_WORD_IDS = 1024


def _bad_words(request: GenerationRequest, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each bad word, at the start of a text and after a space.

    vLLM leaves out the second if its number of ids differs from the first's; the word could then
    still be generated.

    Raises:
        InvalidRequestError: together they have too many tokens.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in request.bad_words or []:
        bare = renderer.encode(word.lstrip(), add_special_tokens=False)
        behind = renderer.encode(" " + word.lstrip(), add_special_tokens=False)
        runs |= dict.fromkeys((bare, behind))
    count = sum(map(len, runs))
    if count > MAX_BAD_WORD_IDS:
        raise InvalidRequestError(
            f"bad_words have {count} tokens together; at most {MAX_BAD_WORD_IDS}", param="bad_words"
        )
    return tuple(run for run in runs if run)


def sampling_of(
    request: GenerationRequest,
    model: ServedModel,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_param: str = "logprobs",
    echoed: int | None = None,
    grammar: Grammar | None = None,
    thinking: ThinkingBudget | None = None,
) -> Sampling:
    """Return the settings that all choices share; `each_choice` adds those of one choice.

    Args:
        request: checked by `check_request`.
        model: its generation config has the defaults of absent fields.
        renderer: of the model.
        prompts: of the request.
        max_tokens: the request's value, or None.
        logprobs: alternatives for each token, or None for no logprobs.
        logprobs_param: name of that field.
        echoed: alternatives for each position of an echoed prompt, or None.
        grammar: of the outputs.
        thinking: budget of the reasoning.

    Raises:
        InvalidRequestError: out of the model's range.
        ContextLengthError: prompt and output do not fit.
    """
    card = model.card
    longest = max(map(len, prompts)) + model.positions_before
    limit = card.limits.max_model_len
    check_length(longest, max_tokens, limit)
    if logprobs is not None and not 0 <= logprobs <= card.limits.max_logprobs:
        raise InvalidRequestError(
            f"{logprobs_param} must be from 0 to {card.limits.max_logprobs}, got {logprobs}",
            param=logprobs_param,
        )
    wanted = output_limit(request, max_tokens, limit - longest)
    min_tokens = request.min_tokens or 0
    if min_tokens > wanted:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens ({wanted}), got {min_tokens}",
            param="min_tokens",
        )
    if len(request.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(request.stop_token_ids or ())} ids; at most "
            f"{MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_ids(stop_token_ids, card.vocab_size, "stop_token_ids")
    allowed = request.allowed_token_ids
    if allowed is not None and not allowed:
        raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
    if len(allowed or ()) > card.vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed or ())} ids; the model has {card.vocab_size}",
            param="allowed_token_ids",
        )
    check_ids(allowed or [], card.vocab_size, "allowed_token_ids")
    named = named_ids(request, logprobs=logprobs, max_tokens=max_tokens)
    check_ids(named, card.vocab_size, "logprob_token_ids")
    best_of = request.candidates > (request.n or 1)
    sampling = Sampling(
        max_tokens=wanted,
        min_tokens=min_tokens,
        temperature=_chosen(request, card, "temperature", 1.0),
        top_p=_chosen(request, card, "top_p", 1.0),
        # A larger value means all tokens, and could overflow the integer of a message.
        top_k=min(max(0, int(_chosen(request, card, "top_k", 0))), card.vocab_size),
        min_p=_chosen(request, card, "min_p", 0.0),
        repetition_penalty=_chosen(request, card, "repetition_penalty", 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias, card.vocab_size),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        # The best outputs are chosen by their logprobs.
        logprobs=0 if best_of and logprobs is None else logprobs,
        logprob_token_ids=named,
        grammar=grammar,
        bad_words=_bad_words(request, renderer),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        prompt_logprobs=prompt_logprobs_of(request, card, prompts, echoed=echoed),
        thinking=thinking,
    )
    check_together(sampling, len(prompts) * request.candidates)
    return sampling


def check_together(sampling: Sampling, choices: int) -> None:
    """Raise `InvalidRequestError` if the allowed ids of all choices are too many."""
    count = choices * len(sampling.allowed_token_ids or ())
    if count > MAX_ALLOWED_IDS:
        raise InvalidRequestError(
            f"allowed_token_ids has {count} ids in all, with each of {choices} choices; at most "
            f"{MAX_ALLOWED_IDS}",
            param="allowed_token_ids",
        )


def output_limit(request: GenerationRequest, max_tokens: int | None, room: int) -> int:
    """Return the maximum output tokens: the request's, or the API's default within `room`."""
    if max_tokens is not None:
        return max_tokens
    return room if request.DEFAULT_MAX_TOKENS is None else min(request.DEFAULT_MAX_TOKENS, room)


def _chosen(request: GenerationRequest, card: ModelCard, name: str, default: float) -> float:
    """Return the request's value, or the generation config's, or OpenAI's default."""
    value: float | None = getattr(request, name)
    return card.default_sampling.get(name, default) if value is None else value


def check_length(length: int, max_tokens: int | None, limit: int) -> None:
    """Raise `ContextLengthError` unless a prompt of `length` leaves room for its output."""
    least = 1 if max_tokens is None else min(1, max_tokens)
    if length + least > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens; the prompt has {length}, and "
            "needs room for at least one more.",
            param="prompt",
        )
    if max_tokens is not None and length + max_tokens > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens; the prompt has {length} and "
            f"max_tokens asks for {max_tokens} more.",
            param="max_tokens",
        )


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise InvalidRequestError(
                f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias"
            )
        if not -100 <= value <= 100:
            raise InvalidRequestError(
                f"logit_bias must be from -100 to 100, got {value:g} for token {key}",
                param="logit_bias",
            )
        result[int(key)] = value
    check_ids(list(result), vocab_size, "logit_bias")
    return result


def each_choice(
    sampling: Sampling,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    *,
    max_len: int,
    max_tokens: int | None,
    reasoning: ReasoningIds | None,
) -> Iterator[tuple[Prompt, Sampling]]:
    """Yield prompt and settings of each choice, those of the first prompt first.

    Args:
        sampling: settings that all share.
        request: choice `i` samples with `seed + i`, or with a random seed if it has none.
        prompts: of the request.
        max_len: maximum positions of prompt and output.
        max_tokens: the request's value, or None for what fits after the choice's prompt.
        reasoning: how the outputs' reasoning begins and ends, if it is known.
    """
    index = 0
    for prompt in prompts:
        thinking = sampling.thinking
        if thinking is not None:
            spent = thinking.spent_in(prompt)
            if spent is None and reasoning is not None and reasoning.begins is Begins.INSIDE:
                spent = 0
            thinking = msgspec.structs.replace(thinking, spent=spent)
        most = output_limit(request, max_tokens, max_len - len(prompt))
        for number in range(request.candidates):
            seed = request.seed
            yield (
                prompt,
                msgspec.structs.replace(
                    sampling,
                    seed=secrets.randbits(63) if seed is None else (seed + index) % 2**63,
                    unseeded=seed is None,
                    max_tokens=most,
                    thinking=thinking,
                    # The logprobs of a prompt are sent once, however many choices show them.
                    prompt_logprobs=None if number else sampling.prompt_logprobs,
                ),
            )
            index += 1
