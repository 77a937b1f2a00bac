"""How likely a prompt's own tokens are: from what engines tell of it to what clients are shown."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from inlay.api.openai.generation import GenerationRequest, PromptLogprob
from inlay.card import ModelCard
from inlay.errors import BodyTooLargeError, EngineError, InvalidRequestError
from inlay.frontend.bodies.admission import Reservation
from inlay.prompt import Prompt
from inlay.render import Renderer
from inlay.request import PromptLogprobs, Sampling, TokenLogprobs

LEAST = -9999.0
"""What is shown for a logprob below it, as JSON has no infinity; vLLM's and OpenAI's number."""

BYTES = 512
"""Bytes that one logprob takes at most on its way into a response.

As an object (about 250) and in JSON, twice.
"""


class PromptScores:
    """The logprobs of one prompt, which all its choices show.

    Told once, by the request of the first of them.

    Attributes:
        complete: set when all positions but the first, of which nothing can be said, have been
            told.
    """

    __slots__ = ("_length", "_pieces", "_told", "complete")

    def __init__(self, prompt: Prompt) -> None:
        self._length = len(prompt) - 1
        self._told = 0
        self._pieces: list[PromptLogprobs] = []
        self.complete = asyncio.Event()
        if not self._length:
            self.complete.set()

    def take(self, told: PromptLogprobs) -> None:
        """Take what an engine tells. Raises `EngineError` when it is not what comes next."""
        if told.start == 1:  # another attempt starts over
            self._pieces, self._told = [], 0
        if told.start != 1 + self._told or told.start + len(told) > 1 + self._length:
            raise EngineError(
                f"the engine told logprobs of {len(told)} prompt positions from {told.start} on, after {self._told} of "
                f"{self._length}"
            )
        self._pieces.append(told)
        self._told += len(told)
        if self._told == self._length:
            self.complete.set()

    def check(self) -> None:
        """Raise `EngineError` unless all has been told."""
        if not self.complete.is_set():
            raise EngineError(
                f"the engine told logprobs of {self._told} of {self._length} prompt positions"
            )

    def entries(self, top: int) -> Iterator[TokenLogprobs]:
        """One for each position but the first.

        Of its token, and the `top` most likely (id, logprob), best first.
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
        """What vLLM shows as `prompt_logprobs`.

        By token id, one entry for each position, nothing for the first.
        """
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
    """Ids and logprobs, [N, 1 + K]."""
    shape = (len(piece), -1 if len(piece) else 0)
    return np.frombuffer(piece.ids, np.int32).reshape(shape), np.frombuffer(
        piece.logprobs, np.float32
    ).reshape(shape)


def with_prompt_logprobs(
    sampling: Sampling,
    request: GenerationRequest,
    card: ModelCard,
    prompts: Sequence[Prompt],
    *,
    echoed: int | None,
) -> Sampling:
    """`sampling`, and the prompt's logprobs that `request` asks for.

    Args:
        sampling: the request's.
        request: says `prompt_logprobs`.
        card: of the model.
        prompts: of the request.
        echoed: alternatives a position of the prompt shown before the output, or None.

    Raises:
        InvalidRequestError: more than the model allows, in a stream, or of embeddings.
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
    wanted = [count for count in (asked, echoed) if count is not None]
    return msgspec.structs.replace(sampling, prompt_logprobs=max(wanted)) if wanted else sampling


def check_has_ids(prompts: Sequence[Prompt], name: str) -> None:
    """Raise `InvalidRequestError` when the field `name` was used with a prompt that is not all tokens."""
    if any(prompt.has_rows for prompt in prompts):
        raise InvalidRequestError(
            f"{name} is not compatible with prompt embeds: rows have no token ids", param=name
        )


def size_of_logprobs(entries: Iterable[TokenLogprobs]) -> int:
    """Bytes that the logprobs of an output take in a whole response, at most."""
    return BYTES * sum(1 + len(entry.top) for entry in entries)


def reserve(
    reservation: Reservation, sampling: Sampling, prompts: Sequence[Prompt], choices: int
) -> int:
    """Hold what the prompts' logprobs take at most, where `choices` of each prompt show them.

    The bytes.

    Raises:
        InvalidRequestError: no request may ever hold as many.
        InlayError: as `Reservation.grow`.
    """
    if sampling.prompt_logprobs is None:
        return 0
    count = sum(map(len, prompts)) * (1 + sampling.prompt_logprobs) * choices
    try:
        reservation.grow(count * BYTES)
    except BodyTooLargeError as error:
        raise InvalidRequestError(
            f"the prompts' logprobs are {count} in all, which is more than can be held at {BYTES} bytes each: "
            f"{error.message}",
            param="prompt_logprobs",
        ) from error
    return count * BYTES
