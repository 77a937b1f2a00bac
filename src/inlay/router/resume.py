"""A request followed to its end over as many workers as it takes.

What has been shown is never shown again and never changed: the next attempt carries it as
`prior_output`, and is made only where the worker's card says that the features in use continue
exactly, or but for rounding. Before anything has been shown, a request may start anew anywhere.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from inlay.base import liveness
from inlay.base.errors import (
    LOST,
    OUT_OF_MEMORY,
    DeadlineExceededError,
    EngineError,
    InlayError,
    NotFoundError,
    OverloadedError,
)
from inlay.messages.card import ModelCard
from inlay.messages.edges import NONE_WANTED, Fetch, PayloadLease
from inlay.messages.outputs import coalesce, drop_known, trim_to_offset
from inlay.messages.request import EngineUsage, Output, PromptLogprobs, Request, Sampling, Task
from inlay.messages.resuming import non_resumable_features, remaining_request
from inlay.router.handover import with_partners
from inlay.router.sending import Attempt, GivenUpError, Handover
from inlay.transport.api import Worker
from inlay.transport.output_queue import OutputQueue, TakeOutput

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
"""Attempts at one request in all.

A request that is the death of its workers must not be that of the fleet.
"""
MAX_EMPTY_ATTEMPTS = 3
"""Attempts in a row that showed nothing new."""
WAIT_SECONDS = 10.0
"""Seconds to wait for a worker when the last one is gone."""
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 0.5
"""Before a request goes to a worker again that has lost it once."""


class _PromptComputed(Exception):  # no error
    """The prefill worker's part is over."""


class SendsAgain(Protocol):
    """Sends further attempts at a request; `Dispatcher` does."""

    def equivalent_workers(self, card: ModelCard, request: Request) -> Sequence[Worker]:
        """The ready workers that would answer a request as the one with this card."""

    def send_again(
        self, workers: Sequence[Worker], request: Request, holder: ModelCard | None
    ) -> Attempt: ...


class ResumingStream:
    """`inlay.transport.api.Stream` over every attempt at a request.

    Args:
        request: the first attempt, which has been sent.
        sent: it.
        sender: sends further attempts.
        handover: where the request goes on after its first token; `sent` is the prompt alone.
        failed_on: ids of workers that have failed at it, to which others are added.

    Attributes:
        worker: id of the worker of the last attempt.
    """

    __slots__ = (
        "_began", "_cached", "_cancelled", "_card", "_empty_attempts", "_ended", "_failed_on",
        "_failure", "_first", "_given", "_handover", "_outputs", "_prefetching", "_request",
        "_sender", "_sent", "_shown", "_take", "_told", "worker",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        sent: Attempt,
        sender: SendsAgain,
        handover: Handover | None,
        failed_on: set[str],
    ) -> None:
        self._first = self._request = request
        self._sent = sent
        self._outputs = aiter(sent.stream)
        self._take: TakeOutput | None = None
        self._ended = False
        self._failure: Exception | None = None
        self._card = sent.card
        self.worker = sent.worker.id
        self._sender = sender
        self._handover = handover
        self._prefetching = handover
        self._began = asyncio.get_running_loop().time()
        self._cancelled = False
        self._failed_on = failed_on
        self._empty_attempts = 0
        self._shown = list(request.prior_output)
        self._given: Counter[str] = Counter()
        self._told = 1
        self._cached: int | None = None

    def cancel(self) -> None:
        """Stop the request; needs no answer."""
        self._cancelled = True
        self._sent.cancel()
        if self._prefetching is not None:
            self._stop_prefetch()
            self._end_handover()

    def set_inline_reader(self, take: TakeOutput | None) -> None:
        """Offer outputs with nothing but the next ids to `take`, while the reader waits for some.

        The reader gets the rest, and each attempt's first. None ends it: who holds whom is a cycle.
        """
        self._take = take
        if take is None:
            self._set_inline_reader(None)

    def _set_inline_reader(self, take: TakeOutput | None) -> None:
        if isinstance(self._outputs, OutputQueue):
            self._outputs.set_inline_reader(take)

    def _stop_prefetch(self) -> None:
        """Stop what brings the prompt's pages to where it was to go on: that one has begun, too."""
        handover, self._prefetching = self._prefetching, None
        if handover is not None:
            handover.cancel()

    def restart(self) -> None:
        """Have a request whose payloads are kept made again, by another worker if there is one."""
        self._sent.cancel()

    def stop_holding(self, lease: PayloadLease | None) -> None:
        """Have the request keep no payloads for other stages from here on: nobody reads them.

        Args:
            lease: under which the attempt that is under way keeps some, or None.
        """
        params = self._first.params
        if isinstance(params, Sampling):
            params = msgspec.structs.replace(params, hidden_states=None)
        self._first = msgspec.structs.replace(self._first, hold=None, params=params)
        if lease is not None:
            # Where that worker is lost, another attempt is made.
            drop = Request(
                id=f"{self._request.id}-{lease.key.hex()}-unread",
                task=Task.FETCH,
                prompts=(),
                params=Fetch(key=lease.key, start=NONE_WANTED),
                client=self._first.client,
            )
            with suppress(OverloadedError):
                self._sent.worker.send(drop).cancel()

    def _end_handover(self) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.end()

    def __aiter__(self) -> "ResumingStream":
        return self

    async def __anext__(self) -> Sequence[Output]:
        """Return what is new, once something is; as `inlay.transport.api.Stream`.

        The load is the worker's until the end has been read, or `cancel`.
        """
        try:
            while not self._ended:
                sent = self._sent
                try:
                    if self._failure is not None:
                        raise self._failure
                    outputs = await self._outputs.__anext__()
                    if self._prefetching is not None and self._handover is None:
                        self._stop_prefetch()
                    sent.load.take(outputs)
                    if self._take is not None and isinstance(self._outputs, OutputQueue):
                        self._outputs.set_inline_reader(self._take_next)
                    if len(outputs) == 1 and self._is_next(outputs[0]):
                        self._shown += outputs[0].token_ids
                        self._empty_attempts = 0
                        return outputs
                    batch, self._failure = self._kept_of(outputs)
                    if batch:
                        self._ended = batch[-1].finish_reason is not None
                        return batch
                except _PromptComputed:
                    sent.end()
                    await self._hand_over()
                    self._end_handover()
                except (EngineError, OverloadedError) as error:
                    if isinstance(error, EngineError) and error.reason != OUT_OF_MEMORY:
                        raise
                    sent.end()
                    if self._cancelled:
                        self._ended = True
                        return [self._aborted()]
                    await self._resume(error)
                    self._end_handover()
            raise StopAsyncIteration
        except BaseException as error:
            if isinstance(error, OverloadedError):
                error.reason = error.reason or LOST
            self._sent.end()
            if self._prefetching is not None:
                self._end_handover()
                self._stop_prefetch()
            raise

    def _is_next(self, output: Output) -> bool:
        """True if an output has nothing but the next ids, the usual case."""
        if self._handover is not None or output.attempt != self._request.attempt:
            return False
        return output.offset == len(self._shown) and output.only_tokens and bool(output.token_ids)

    def _take_next(self, output: Output) -> bool:
        """Have an output taken where it has come, without waking the reader."""
        take = self._take
        if take is None or not self._is_next(output) or not take(output):
            return False
        ids = output.token_ids
        self._sent.load.add(len(ids))
        self._shown += ids
        self._empty_attempts = 0
        return True

    def _kept_of(self, outputs: Sequence[Output]) -> tuple[list[Output], Exception | None]:
        """(what is to be shown, what ends the attempt after it)."""
        batch: list[Output] = []
        for output in outputs if len(outputs) == 1 else coalesce(outputs):
            try:
                kept = self._kept(output)
            except InlayError as error:
                return batch, error
            if kept is None:
                continue
            if self._handover is not None and kept.finish_reason == "length":
                if kept.token_ids:
                    batch.append(msgspec.structs.replace(kept, finish_reason=None, usage=None))
                return batch, _PromptComputed()
            batch.append(kept)
        return batch, None

    def _aborted(self) -> Output:
        return Output(
            self._request.id, self._request.attempt, len(self._shown), finish_reason="abort"
        )

    def _kept(self, output: Output) -> Output | None:
        """Part of an output that has not been shown.

        Raises:
            OverloadedError: the worker gave the request up by itself.
            EngineError: ids are missing before it.
        """
        if output.attempt != self._request.attempt:
            return None
        if output.finish_reason == "abort" and not self._cancelled:
            if self._sent.failure is not None:
                raise self._sent.failure
            raise GivenUpError("the worker gave the request up", retry_after=1)
        if self._handover is not None:
            output = self._handover.take(output)
        if output.offset > len(self._shown):
            raise EngineError(f"the worker left out {output.offset - len(self._shown)} tokens")
        if output.offset < len(self._shown):
            output = trim_to_offset(output, len(self._shown))
        self._shown += output.token_ids
        scores, usage = output.prompt_logprobs, output.usage
        if scores is not None or usage is not None:
            scores = None if scores is None else self._unseen_prompt_logprobs(scores)
            if usage is not None and usage.cached_tokens != self._cached:
                usage = self._as_first(usage)
            output = msgspec.structs.replace(output, prompt_logprobs=scores, usage=usage)
        if output.token_ids or output.payloads or scores is not None:
            self._empty_attempts = 0
            for payload in output.payloads:
                self._given[payload.port] += payload.shape[0]
        return output

    def _unseen_prompt_logprobs(self, scores: PromptLogprobs) -> PromptLogprobs | None:
        rest = drop_known(scores, self._told)
        self._told = max(self._told, scores.start + len(scores))
        return rest

    def _as_first(self, usage: EngineUsage) -> EngineUsage:
        """Set the cached tokens to those of the first attempt: later ones also count its output."""
        if self._cached is None:
            self._cached = usage.cached_tokens
        if usage.cached_tokens == self._cached:
            return usage
        return msgspec.structs.replace(usage, cached_tokens=self._cached)

    async def _resume(self, error: EngineError | OverloadedError) -> None:
        """Send what is left to another worker, or to the same once it is back.

        Raises `error` when that cannot be.
        """
        self._empty_attempts += 1
        attempt = self._request.attempt + 1
        most = self._first.attempt + MAX_ATTEMPTS
        if self._empty_attempts >= MAX_EMPTY_ATTEMPTS or attempt >= most:
            raise error
        lacking = non_resumable_features(self._first, self._sent.card) if self._has_shown else []
        if lacking:
            raise OverloadedError(
                "the worker is gone in the middle of the answer, and its engine "
                f"({self._sent.card.engine}) does not "
                f"continue {', '.join(lacking)} exactly",
                retry_after=error.retry_after,
            ) from error
        self._failed_on.add(self._sent.to_blame(error))
        workers = await self._wait_for_workers(error)
        last = self._sent.worker.id
        holder = self._sent.card if isinstance(error, GivenUpError) else None
        try:
            self._send_next(workers, attempt, holder)
        except (NotFoundError, OverloadedError):
            raise error from None
        here = self._sent.worker.id
        log.warning(
            "request %s continues at %s%s after %d tokens: %s",
            self._first.id,
            here,
            " again" if here == last else "",
            len(self._shown),
            error.message,
        )
        if self._cancelled:
            self._sent.cancel()

    def _send_next(
        self,
        workers: Sequence[Worker],
        attempt: int,
        holder: ModelCard | None,
        ticket: bytes = b"",
    ) -> None:
        """Send what is left to one of some workers. Raises `OverloadedError` if they are gone."""
        self._request = msgspec.structs.replace(
            remaining_request(self._first, self._given),
            attempt=attempt,
            prior_output=tuple(self._shown),
            deadline=self._remaining(),
            ticket=ticket,
        )
        self._sent = self._sender.send_again(workers, self._request, holder)
        self.worker = self._sent.worker.id
        self._set_inline_reader(None)
        self._outputs, self._failure = aiter(self._sent.stream), None

    async def _hand_over(self) -> None:
        """Go on at the worker where there is a place, or at any. Raises as `_resume`."""
        handover, prefiller = self._handover, self._sent
        ticket = b"" if handover is None else handover.ticket
        fitting = self._workers_that_fit()
        wanted = [one for one in fitting if handover is not None and one.id == handover.worker.id]
        try:
            if not fitting:
                raise OverloadedError("no worker can go on with the request", retry_after=1)
            attempt = self._request.attempt + 1
            self._send_next(wanted or fitting, attempt, prefiller.card, ticket)
        except InlayError as error:
            self._return_ticket(prefiller.worker, ticket)
            if not isinstance(error, NotFoundError | OverloadedError):
                raise
            await self._resume(OverloadedError(error.message, retry_after=1))
        if self._cancelled:
            self._sent.cancel()

    def _return_ticket(self, prefiller: Worker, ticket: bytes) -> None:
        """Tell a prefill worker that nobody comes for what it keeps."""
        if not ticket:
            return
        returned = msgspec.structs.replace(self._first, attempt=self._request.attempt + 1)
        with suppress(OverloadedError):
            prefiller.send(msgspec.structs.replace(returned, ticket=ticket)).cancel()

    @property
    def _has_shown(self) -> bool:
        return bool(self._shown) or bool(self._given)

    def _remaining(self) -> float | None:
        """Seconds the request may still take.

        Raises `DeadlineExceededError` when there are none.
        """
        if self._first.deadline is None:
            return None
        remaining = self._first.deadline - (asyncio.get_running_loop().time() - self._began)
        if remaining <= 0:
            raise DeadlineExceededError("the request's deadline passed")
        return remaining

    async def _wait_for_workers(self, error: InlayError) -> Sequence[Worker]:
        """Those that may go on with it, once there are some. Raises `error` when none comes."""
        until = liveness.now() + WAIT_SECONDS
        while True:
            fitting = with_partners(self._workers_that_fit())
            others = [worker for worker in fitting if worker.id not in self._failed_on]
            if others := with_partners(others):
                return others
            if (fitting and not self._has_shown) or error.reason == OUT_OF_MEMORY:
                # It is there and refused: waiting would only hide that from the client.
                raise error
            if fitting:
                await asyncio.sleep(_PAUSE_SECONDS)
                return fitting
            self._remaining()
            if self._cancelled or liveness.now() > until:
                raise error
            await asyncio.sleep(_LOOK_SECONDS)

    def _workers_that_fit(self) -> list[Worker]:
        workers = self._sender.equivalent_workers(self._card, self._first)
        return [worker for worker in workers if self._fits(worker.card)]

    def _fits(self, card: ModelCard) -> bool:
        """True if an engine may continue what another has begun."""
        if not self._has_shown:
            return True
        mine = self._sent.card
        same = card.engine == mine.engine and card.engine_version == mine.engine_version
        return same and not non_resumable_features(self._first, card)
