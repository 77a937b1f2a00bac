"""Fields of a request that generates, and its sampling settings."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from inlay.api.fields import check_common, check_ids
from inlay.api.generation.logprobs import named_ids, prompt_logprobs_of
from inlay.api.generation.output_format import thinking_budget
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.server import Call
from inlay.http.settings import FrontendSettings
from inlay.messages.card import ModelCard
from inlay.messages.fields import SAMPLING, check_bounds, check_length
from inlay.messages.prompt import Prompt
from inlay.messages.request import Grammar, Sampling
from inlay.render import Begins, ReasoningIds, Renderer
from inlay.router import ServedModel

MAX_LOGIT_BIAS = MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_IDS = 1 << 20
"""Maximum allowed token ids of a request, counted once for each choice.

Each choice sends them in its own message to a worker.
"""
MAX_BAD_WORD_IDS = 1024
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOPS_LENGTH = 64, 4096, 16_384
MAX_BAD_WORDS, MAX_BAD_WORDS_LENGTH = 128, 4096


def seed_of(seed: int | None) -> int | None:
    """Return a request's seed; -1 is treated as absent, as in vLLM and llama.cpp."""
    return None if seed == -1 else seed


def check_request(call: Call, request: GenerationRequest) -> None:
    """Check the fields that can be checked without a model; drop a seed that is none.

    Raises `InvalidRequestError` that names the field, its value and the allowed values.
    """
    only_reads = request.max_tokens == 0 and request.only_reads
    check_bounds(request, "max_tokens" if only_reads else "")
    check_common(call, request)
    request.seed = seed_of(request.seed)
    if request.bad_words:
        _check_words(request.bad_words)
    if request.best_of is not None:
        _check_best_of(request, request.best_of)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    if request.stop is not None:
        _check_stops(stops_of(request))


def _check_best_of(request: GenerationRequest, best_of: int) -> None:
    if best_of < (request.n or 1) or (best_of > (request.n or 1) and not request.PICKS_BEST):
        raise InvalidRequestError(
            f"best_of must be at least n ({request.n or 1}), and is n in a chat; got {best_of}",
            param="best_of",
        )
    if request.stream and best_of > (request.n or 1):
        raise InvalidRequestError(
            f"best_of ({best_of}) above n is not possible when stream is true: the best is known "
            "in the end",
            param="best_of",
        )


def stops_of(request: GenerationRequest) -> tuple[str, ...]:
    """Return the stop strings."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop"
        )
    for stop in stops:
        if not stop:
            raise InvalidRequestError("stop must not hold an empty string", param="stop")
        if len(stop) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"a stop string has {len(stop)} characters; at most {MAX_STOP_LENGTH}", param="stop"
            )
    length = sum(map(len, stops))
    if length > MAX_STOPS_LENGTH:
        raise InvalidRequestError(
            f"stop has {length} characters in all its strings; at most {MAX_STOPS_LENGTH}",
            param="stop",
        )


def _check_words(words: list[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS}", param="bad_words"
        )
    for word in words:
        if not word.strip():
            raise InvalidRequestError("bad_words must not hold an empty word", param="bad_words")
    length = sum(map(len, words))
    if length > MAX_BAD_WORDS_LENGTH:
        raise InvalidRequestError(
            f"bad_words have {length} characters together; at most {MAX_BAD_WORDS_LENGTH}",
            param="bad_words",
        )


def _bad_words(words: Sequence[str], renderer: Renderer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each bad word, at the start of a text and after a space.

    vLLM leaves out the second if its number of ids differs from the first's; the word could then
    still be generated.

    Raises:
        InvalidRequestError: together they have too many tokens.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
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
    reasoning: ReasoningIds | None = None,
    settings: FrontendSettings,
) -> list[Sampling]:
    """Return the settings of each choice: all of the first prompt, then those of the next.

    Args:
        request: checked by `check_request`. Choice `i` samples with `seed + i`, or with a random
            seed if it has none.
        model: its generation config has the defaults of absent fields.
        renderer: of the model.
        prompts: of the request.
        max_tokens: the request's value, or None for what fits after the choice's prompt.
        logprobs: alternatives for each token, or None for no logprobs.
        logprobs_param: name of that field.
        echoed: alternatives for each position of an echoed prompt, or None.
        grammar: of the outputs.
        reasoning: how the outputs' reasoning begins and ends, if it is known.
        settings: name the form of the model's reasoning, which a budget needs.

    Raises:
        InvalidRequestError: out of the model's range.
        ContextLengthError: prompt and output do not fit.
    """
    candidates = max(request.n or 1, request.best_of or 1)
    if len(prompts) * candidates > settings.max_choices:
        raise InvalidRequestError(
            f"the request asks for {len(prompts) * candidates} choices; at most "
            f"{settings.max_choices} are allowed (--max-choices)",
            param="n" if request.best_of is None else "best_of",
        )
    card = model.card
    longest = max(map(len, prompts)) + model.positions_before
    limit = card.limits.max_model_len
    check_length(longest, limit, max_tokens)
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
    allowed = request.allowed_token_ids
    if allowed is not None and not allowed:
        raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
    if len(allowed or ()) > card.vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed or ())} ids; the model has {card.vocab_size}",
            param="allowed_token_ids",
        )
    named: tuple[int, ...] = ()
    if request.logprob_token_ids:
        named = named_ids(request.logprob_token_ids, logprobs=logprobs, max_tokens=max_tokens)
    for name, ids in (
        ("stop_token_ids", stop_token_ids),
        ("allowed_token_ids", allowed),
        ("logprob_token_ids", named),
    ):
        if ids:
            check_ids(ids, card.vocab_size, name)
    best_of = candidates > (request.n or 1)
    plain = _plain(request, card)
    # A larger value means all tokens, and could overflow the integer of a message.
    plain["top_k"] = min(max(0, int(plain["top_k"])), card.vocab_size)
    shared = Sampling(
        **plain,
        max_tokens=wanted,
        logit_bias=_logit_bias(request.logit_bias, card.vocab_size) if request.logit_bias else {},
        stop_token_ids=stop_token_ids,
        # The best outputs are chosen by their logprobs.
        logprobs=0 if best_of and logprobs is None else logprobs,
        logprob_token_ids=named,
        grammar=grammar,
        bad_words=_bad_words(request.bad_words, renderer) if request.bad_words else (),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        prompt_logprobs=None
        if request.prompt_logprobs is None and echoed is None
        else prompt_logprobs_of(request, card, prompts, echoed=echoed),
        thinking=None
        if request.thinking_token_budget in (None, -1)
        else thinking_budget(request.thinking_token_budget, settings, renderer),
    )
    check_together(shared, len(prompts) * candidates)
    return _of_choices(
        shared,
        request,
        prompts,
        candidates,
        model.max_len,
        max_tokens=max_tokens,
        reasoning=reasoning,
    )


def _of_choices(
    shared: Sampling,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    candidates: int,
    max_len: int,
    *,
    max_tokens: int | None,
    reasoning: ReasoningIds | None,
) -> list[Sampling]:
    """Return the settings of each choice from those that all share."""
    found: list[Sampling] = []
    for prompt in prompts:
        thinking = shared.thinking
        if thinking is not None:
            spent = thinking.spent_in(prompt)
            if spent is None and reasoning is not None and reasoning.begins is Begins.INSIDE:
                spent = 0
            thinking = msgspec.structs.replace(thinking, spent=spent)
        most = output_limit(request, max_tokens, max_len - len(prompt))
        for number in range(candidates):
            seed = request.seed
            own = msgspec.structs.replace(
                shared,
                seed=secrets.randbits(63) if seed is None else (seed + len(found)) % 2**63,
                unseeded=seed is None,
                max_tokens=most,
                thinking=thinking,
                # The logprobs of a prompt are sent once, however many choices show them.
                prompt_logprobs=None if number else shared.prompt_logprobs,
            )
            found.append(own)
    return found


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


def _plain(request: GenerationRequest, card: ModelCard) -> dict[str, Any]:
    """Return the plain fields: the request's values, or the generation config's, or neutral."""
    found: dict[str, Any] = {}
    for name, declared in SAMPLING.items():
        value = getattr(request, name)
        if value is None and declared.model_default:
            value = card.default_sampling.get(name)
        found[name] = declared.neutral if value is None else value
    return found


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
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
