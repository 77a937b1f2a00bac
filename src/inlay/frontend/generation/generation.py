"""The engine requests of one HTTP request, sent and read together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from inlay.api.openai.generation import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptTokensDetails,
    UsageInfo,
)
from inlay.frontend.generation.choices import ChoicePiece, ChoiceState
from inlay.frontend.generation.prompt_logprobs import PromptScores
from inlay.frontend.metrics.frontend import RequestTimes
from inlay.request import Output
from inlay.router import Router
from inlay.transport.api import Stream

Pieces: TypeAlias = list[tuple[ChoiceState, ChoicePiece]]

_QUEUED = 64
"""Batches of outputs that may wait between the streams of a request and its response."""


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


class Generation:
    """Sends the engine requests of an HTTP request and merges their outputs.

    `close` must always be called.

    Attributes:
        choices: in the order of the response.
        bulk: bytes of logprobs in the response: of the prompts, and of the outputs so far.
        fingerprint: OpenAI's `system_fingerprint`.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceState],
        prompts: int,
        times: RequestTimes,
        *,
        fingerprint: str,
        positions_before: int = 0,
        scores: Sequence[PromptScores] = (),
        bulk: int = 0,
    ) -> None:
        """Nothing is sent yet.

        Args:
            choices: those of the first prompt, then those of the next, equally many of each.
            prompts: number of prompts.
            times: measurements of the request.
            fingerprint: OpenAI's `system_fingerprint`.
            positions_before: positions that the model puts before each prompt.
            scores: logprobs of each prompt, if requested.
            bulk: bytes that showing them takes.
        """
        self.choices = choices
        self.fingerprint = fingerprint
        self._positions_before = positions_before
        self._per_prompt = len(choices) // prompts
        self._times = times
        self._scores = scores
        self.bulk = bulk
        self._sending: Sequence[asyncio.Future[list[Stream]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def scores_of(self, choice: ChoiceState) -> PromptScores | None:
        """Return the logprobs of a choice's prompt, if requested."""
        return self._scores[choice.index // self._per_prompt] if self._scores else None

    def by_prompt(self) -> Sequence[Sequence[ChoiceState]]:
        """Return the choices of each prompt."""
        each = self._per_prompt
        return [self.choices[start : start + each] for start in range(0, len(self.choices), each)]

    async def start(self, router: Router, name: str, *, session: str | None) -> None:
        """Send the requests; return once those of the first prompt are at a worker.

        The requests of one prompt go to one worker. Arguments and errors as `Router.send`.
        """
        prompts = [[choice.request for choice in choices] for choices in self.by_prompt()]
        if len(prompts) == 1:
            # The usual case; a task would cost one more iteration of the event loop.
            sent: asyncio.Future[list[Stream]] = asyncio.get_running_loop().create_future()
            sent.set_result(await router.send(name, prompts[0], session=session))
            self._sending = [sent]
            return
        self._sending = [
            asyncio.create_task(router.send(name, requests, session=session))
            for requests in prompts
        ]
        await self._sending[0]

    async def pieces(self) -> AsyncGenerator[Pieces, None]:
        """Yield the pieces that have arrived, until every choice has ended.

        Raises:
            InlayError: a request was refused or failed.
        """
        if len(self.choices) == 1:
            async for piece in self._follow(self.choices[0]):
                yield [(self.choices[0], piece)]
            return
        queue: asyncio.Queue[tuple[ChoiceState, ChoicePiece] | BaseException] = asyncio.Queue(
            _QUEUED
        )
        self._tasks = [asyncio.create_task(self._pump(choice, queue)) for choice in self.choices]
        open_ = len(self.choices)
        while open_:
            batch: Pieces = []
            item = await queue.get()
            while True:
                if isinstance(item, BaseException):
                    raise item
                batch.append(item)
                open_ -= item[1].finish_reason is not None
                if queue.empty():
                    break
                item = queue.get_nowait()
            yield batch

    async def _pump(
        self,
        choice: ChoiceState,
        queue: "asyncio.Queue[tuple[ChoiceState, ChoicePiece] | BaseException]",
    ) -> None:
        try:
            async for piece in self._follow(choice):
                await queue.put((choice, piece))
        except Exception as error:  # raised again where the pieces are read
            await queue.put(error)

    async def _follow(self, choice: ChoiceState) -> AsyncGenerator[ChoicePiece, None]:
        prompt, number = divmod(choice.index, self._per_prompt)
        stream = (await self._sending[prompt])[number]
        async for outputs in stream:
            piece = self._taken(choice, outputs)
            if choice.finish_reason is not None:
                stream.cancel()
            if not piece.token_ids and piece.finish_reason is None:
                continue
            scores = self.scores_of(choice)
            if scores is not None:
                # The first piece shows the prompt's logprobs, which may come with the request of
                # another choice.
                await scores.complete.wait()
            yield piece
            if choice.finish_reason is not None:
                return

    def _taken(self, choice: ChoiceState, outputs: Sequence[Output]) -> ChoicePiece:
        piece = choice.take(outputs)
        scores = self.scores_of(choice)
        if scores is not None and choice.request.sampling.prompt_logprobs is not None:
            for output in outputs:
                if output.prompt_logprobs is not None:
                    scores.take(output.prompt_logprobs)
            if piece.token_ids or piece.finish_reason is not None:
                scores.check()
        self._times.tokens(choice.index, len(piece.token_ids))
        if piece.finish_reason is not None:
            self._times.ended(
                choice.index, piece.finish_reason, choice.completion_tokens, choice.queued_seconds
            )
        return piece

    def close(self) -> None:
        """Cancel the requests that are still running."""
        for task in self._tasks:
            task.cancel()
        for choices, sending in zip(self.by_prompt(), self._sending, strict=False):
            if not sending.done():
                sending.cancel()
            elif not sending.cancelled() and sending.exception() is None:
                for choice, stream in zip(choices, sending.result(), strict=True):
                    if choice.finish_reason is None:
                        stream.cancel()
        self._times.finished(self._cached_tokens())

    def _cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices[:: self._per_prompt])

    def _prompt_tokens(self, choice: ChoiceState) -> int:
        return len(choice.request.prompt) + self._positions_before

    def _details(self, reasoning_tokens: int) -> CompletionTokensDetails | None:
        return (
            CompletionTokensDetails(reasoning_tokens) if self.choices[0].counts_reasoning else None
        )

    def usage(self) -> UsageInfo:
        """Return the usage of a whole response; each prompt counts once."""
        prompts = sum(self._prompt_tokens(choice) for choice in self.choices[:: self._per_prompt])
        completed = sum(choice.completion_tokens for choice in self.choices)
        return UsageInfo(
            prompt_tokens=prompts,
            completion_tokens=completed,
            total_tokens=prompts + completed,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens()),
            completion_tokens_details=self._details(
                sum(choice.reasoning_tokens for choice in self.choices)
            ),
        )

    def usage_at_end(self) -> UsageInfo:
        """Return the usage of a stream's last event, which leaves null details out."""
        usage = self.usage()
        return msgspec.structs.replace(
            usage,
            prompt_tokens_details=PromptTokensDetails(
                self._cached_tokens(), msgspec.UNSET, msgspec.UNSET
            ),
            completion_tokens_details=usage.completion_tokens_details or msgspec.UNSET,
        )

    def usage_of(self, choice: ChoiceState, piece: ChoicePiece | None) -> UsageInfo:
        """Return the usage of one choice up to `piece`, or before its first, for an event."""
        prompt, completed = (
            self._prompt_tokens(choice),
            0 if piece is None else piece.completion_tokens,
        )
        return UsageInfo(
            prompt_tokens=prompt,
            completion_tokens=completed,
            total_tokens=prompt + completed,
            prompt_tokens_details=msgspec.UNSET,
            completion_tokens_details=self._details(0 if piece is None else piece.reasoning_tokens),
        )
