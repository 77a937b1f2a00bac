"""Logprobs of outputs and prompts: wanted alternatives, names of tokens, encoding for clients."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from inlay.api.schema.generation import GenerationRequest, PromptLogprob
from inlay.base.errors import BodyTooLargeError, EngineError, InvalidRequestError
from inlay.http.bodies.accounting import Reservation
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt
from inlay.messages.request import Output, PromptLogprobs, Sampling, TokenLogprobs
from inlay.render import Renderer

LEAST = -9999.0
"""Lowest logprob in JSON, which has no infinity; the same number in vLLM and OpenAI's API."""

BYTES = 512
"""Maximum bytes of one logprob while a response is made.

About 250 as an object, and twice in JSON.
"""


class PromptScores:
    """Logprobs of one prompt, shared by all its choices.

    They come once, with the outputs of the first choice's request.

    Attributes:
        complete: set when all positions but the first, which has no logprob, have arrived.
    """

    __slots__ = ("_length", "_num_received", "_pieces", "complete")

    def __init__(self, prompt: Prompt) -> None:
        self._length = len(prompt) - 1
        self._num_received = 0
        self._pieces: list[PromptLogprobs] = []
        self.complete = asyncio.Event()
        if not self._length:
            self.complete.set()

    def take(self, chunk: PromptLogprobs) -> None:
        """Take a chunk. Raises `EngineError` if it does not follow the one before."""
        if chunk.start == 1:  # another attempt starts over
            self._pieces, self._num_received = [], 0
        if chunk.start != 1 + self._num_received or chunk.start + len(chunk) > 1 + self._length:
            raise EngineError(
                f"the engine sent logprobs of {len(chunk)} prompt positions from {chunk.start} on, "
                f"after {self._num_received} of {self._length}"
            )
        self._pieces.append(chunk)
        self._num_received += len(chunk)
        if self._num_received == self._length:
            self.complete.set()

    def take_all(self, outputs: Iterable[Output], *, complete: bool) -> None:
        """Take the chunks in `outputs`; with `complete`, none may be missing then.

        Raises `EngineError` if one is, and as `take`.
        """
        for output in outputs:
            if output.prompt_logprobs is not None:
                self.take(output.prompt_logprobs)
        if complete and not self.complete.is_set():
            raise EngineError(
                f"the engine sent logprobs of {self._num_received} of {self._length} prompt "
                "positions"
            )

    def entries(self, top: int) -> Iterator[TokenLogprobs]:
        """Yield the logprobs of each position but the first.

        Each has the position's token, and the `top` most likely (id, logprob), best first.
        """
        for piece in self._pieces:
            ids, logprobs = _columns(piece)
            for near, values in zip(
                ids.tolist(), np.maximum(logprobs, LEAST).tolist(), strict=True
            ):
                yield TokenLogprobs(
                    values[0], tuple(zip(near[1 : 1 + top], values[1 : 1 + top], strict=True))
                )

    def shown(self, renderer: Renderer, top: int) -> list[dict[str, PromptLogprob] | None]:
        """Return vLLM's `prompt_logprobs`: an object by token id for each position, None first."""
        result: list[dict[str, PromptLogprob] | None] = [None]
        name = renderer.token_text
        for piece in self._pieces:
            ids, logprobs = _columns(piece)
            rows = zip(
                ids.tolist(),
                np.maximum(logprobs, LEAST).tolist(),
                np.frombuffer(piece.ranks, np.int32).tolist(),
                strict=True,
            )
            for near, values, rank in rows:
                entry = {str(near[0]): PromptLogprob(values[0], rank, name(near[0]))}
                for place in range(1, min(top, len(near) - 1) + 1):
                    if near[place] != near[0]:
                        entry[str(near[place])] = PromptLogprob(
                            values[place], place, name(near[place])
                        )
                result.append(entry)
        return result


def _columns(piece: PromptLogprobs) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logprobs, each [N, 1 + K]."""
    shape = (len(piece), -1 if len(piece) else 0)
    return np.frombuffer(piece.ids, np.int32).reshape(shape), np.frombuffer(
        piece.logprobs, np.float32
    ).reshape(shape)


def prompt_logprobs_of(
    request: GenerationRequest, card: ModelCard, prompts: Sequence[Prompt], *, echoed: int | None
) -> int | None:
    """Return the alternatives for each position of the prompts, or None for no logprobs.

    Args:
        request: has `prompt_logprobs`.
        card: of the model.
        prompts: of the request.
        echoed: alternatives for each position of an echoed prompt, or None.

    Raises:
        InvalidRequestError: more than the model allows, in a stream, or for embeddings.
    """
    asked = None if request.prompt_logprobs is None else int(request.prompt_logprobs)
    if asked is not None:
        if not 0 <= asked <= card.limits.max_logprobs:
            raise InvalidRequestError(
                f"prompt_logprobs must be from 0 to {card.limits.max_logprobs}, got {asked}",
                param="prompt_logprobs",
            )
        if request.stream:
            raise InvalidRequestError(
                "prompt_logprobs are not available when stream is true", param="prompt_logprobs"
            )
        check_has_ids(prompts, "prompt_logprobs")
    return max((count for count in (asked, echoed) if count is not None), default=None)


def check_has_ids(prompts: Sequence[Prompt], name: str) -> None:
    """Raise `InvalidRequestError` if a prompt of a request with the field `name` has embeddings."""
    if any(prompt.has_rows for prompt in prompts):
        raise InvalidRequestError(
            f"{name} is not compatible with prompt embeds: rows have no token ids", param=name
        )


def size_of_logprobs(entries: Iterable[TokenLogprobs]) -> int:
    """Return the maximum bytes of an output's logprobs in a whole response."""
    return BYTES * sum(1 + len(entry.top) for entry in entries)


def reserve(
    reservation: Reservation, sampling: Sampling, prompts: Sequence[Prompt], choices: int
) -> int:
    """Reserve memory for logprobs: of a token of each choice, and of the prompts.

    Args:
        reservation: of the request.
        sampling: of one of its choices.
        prompts: of the request.
        choices: of each prompt.

    Returns:
        Bytes of the prompts' logprobs.

    Raises:
        InvalidRequestError: more than any request may hold.
        InlayError: as `Reservation.grow`.
    """
    if sampling.logprobs is not None:
        alternatives = max(sampling.logprobs, len(sampling.logprob_token_ids))
        _hold(reservation, len(prompts) * (1 + alternatives) * choices, "of a token", "logprobs")
    if sampling.prompt_logprobs is None:
        return 0
    count = sum(map(len, prompts)) * (1 + sampling.prompt_logprobs) * choices
    _hold(reservation, count, "of the prompts", "prompt_logprobs")
    return count * BYTES


def _hold(reservation: Reservation, count: int, what: str, param: str) -> None:
    try:
        reservation.grow(count * BYTES)
    except BodyTooLargeError as error:
        raise InvalidRequestError(
            f"the logprobs {what} are {count} in all, which is more than can be held at {BYTES} "
            f"bytes each: {error.message}",
            param=param,
        ) from error


MAX_IDS = 128
"""Maximum ids in `logprob_token_ids`, as in vLLM."""

_FIELD = "logprob_token_ids"


def named_ids(
    ids: Sequence[int], *, logprobs: int | None, max_tokens: int | None
) -> tuple[int, ...]:
    """Return the ids of `logprob_token_ids` without duplicates.

    Args:
        ids: value of that field, not empty.
        logprobs: alternatives for each token, or None for no logprobs.
        max_tokens: the request's value.

    Raises:
        InvalidRequestError: without logprobs, too many, or nothing is generated.
    """
    if logprobs is None:
        raise InvalidRequestError(
            f"{_FIELD} is only allowed when logprobs are asked for", param=_FIELD
        )
    if max_tokens == 0:
        raise InvalidRequestError(f"{_FIELD} needs an output, and max_tokens is 0", param=_FIELD)
    if len(ids) > MAX_IDS:
        raise InvalidRequestError(f"{_FIELD} has {len(ids)} ids; at most {MAX_IDS}", param=_FIELD)
    return tuple(dict.fromkeys(ids))


def token_names(request: GenerationRequest, renderer: Renderer) -> Callable[[int], str]:
    """Return the function that names tokens in logprobs: by text, or as `token_id:ID`."""
    return _by_id if request.return_tokens_as_token_ids else renderer.token_text


def _by_id(id_: int) -> str:
    return f"token_id:{id_}"
