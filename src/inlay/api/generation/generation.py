"""The engine of one HTTP request, sent and read together."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from inlay.api.fields import in_own_names
from inlay.api.generation.choices import ChoicePiece, ChoiceState, DisplayOptions
from inlay.api.generation.grammars import own_fields
from inlay.api.generation.hidden_states import StatesPlan
from inlay.api.generation.logprobs import PromptScores, reserve, size_of_logprobs
from inlay.api.generation.sampling import stops_of
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.connection import TextWriter
from inlay.http.metrics.requests import ChoiceTimes, RequestTimes
from inlay.http.server import Call
from inlay.messages import refusals
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt
from inlay.messages.request import EngineUsage as WorkerUsage
from inlay.messages.request import Output, Request, Sampling
from inlay.render import PLAIN, OutputFormat, Renderer, StopStrings
from inlay.router import Router, ServedModel
from inlay.router.resume import ResumingStream

Pieces: TypeAlias = list[tuple[ChoiceState, ChoicePiece]]


class Sink(Protocol):
    """Taker of the pieces of a generation."""

    def ready(self) -> bool:
        """Return True if `take` would return None now."""

    def take(self, pieces: Pieces) -> Awaitable[None] | None:
        """Take pieces, at once where it returns None."""

    def texts(self, choice: ChoiceState) -> TextWriter | None:
        """Return what takes further pieces of a choice that are nothing but text.

        None where pieces have more, and before the first.
        """


class WholeSink:
    """`Sink` of a whole response: pieces are kept with their choices.

    Args:
        grow: reserves bytes for their logprobs, or raises.
    """

    def __init__(self, grow: Callable[[int], None] = lambda _: None) -> None:
        self._grow = grow

    def ready(self) -> bool:
        return True

    def take(self, pieces: Pieces) -> None:
        """As `Sink.take`. Raises as `grow`."""
        self._grow(sum(size_of_logprobs(piece.logprobs) for _, piece in pieces))
        for choice, piece in pieces:
            choice.pieces.append(piece)

    def texts(self, choice: ChoiceState) -> None:
        """Return None: pieces are kept whole."""


class PayloadSink(Protocol):
    """Taker of the payloads of a language model's outputs, whose worker may keep them."""

    def made_by(self, stream: ResumingStream) -> None:
        """Note the stream whose outputs are told."""

    def on_output(self, output: Output) -> Output:
        """Take an output; return it without its payloads. Raises where nothing can follow."""


Begin: TypeAlias = Callable[[Sequence[Request]], Sequence[ChoiceState]]
"""Returns the choices of engine requests."""

_QUEUED = 64
"""Batches of outputs that may wait between the streams of a request and its response."""


class AnswerUsage(NamedTuple):
    """Positions of prompts and outputs; each prompt counts once.

    Attributes:
        reasoning_tokens: None if they cannot be counted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None


class Generation:
    """Sends the engine requests of an HTTP request and merges their outputs.

    `close` must always be called.

    Attributes:
        requests: in the order of the response; they may be replaced until `start`.
        choices: of the requests, once these have been sent.
        sink: takes the payloads of the only choice, or None: then they are pieces of the answer.
        bulk: bytes of logprobs in the response: of the prompts, and of the outputs so far.
        card: of the model.
        times: measurements of the request.
        shows_times: the answer has them.
        states: hidden states that the answer has, or None.
        bypass_queue: a place was taken for it by `Router.admit`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        prompts: int,
        times: RequestTimes,
        begin: Begin,
        *,
        card: ModelCard,
        positions_before: int = 0,
        scores: Sequence[PromptScores] = (),
        bulk: int = 0,
    ) -> None:
        """Nothing is sent yet.

        Args:
            requests: those of the first prompt, then those of the next, equally many of each.
            prompts: number of prompts.
            times: measurements of the request.
            begin: returns the choices of requests that have been sent.
            card: of the model.
            positions_before: positions that the model puts before each prompt.
            scores: logprobs of each prompt, if requested.
            bulk: bytes that showing them takes.
        """
        self.requests = [*requests]
        self.choices: Sequence[ChoiceState] = ()
        self.sink: PayloadSink | None = None
        self.states: StatesPlan | None = None
        self.card = card
        self.shows_times = False
        self.bypass_queue = False
        self._own_name: str | None = None
        self._more_usage: dict[str, WorkerUsage] = {}
        self._positions_before = positions_before
        self._per_prompt = len(requests) // prompts
        self.times = times
        self._begin = begin
        self._scores = scores
        self.bulk = bulk
        self._sending: Sequence[asyncio.Future[list[ResumingStream]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def scores_of(self, choice: ChoiceState) -> PromptScores | None:
        """Return the logprobs of a choice's prompt, if requested."""
        return self._scores[choice.index // self._per_prompt] if self._scores else None

    def by_prompt(self) -> Sequence[Sequence[ChoiceState]]:
        """Return the choices of each prompt."""
        each = self._per_prompt
        return [self.choices[start : start + each] for start in range(0, len(self.choices), each)]

    async def start(self, router: Router, model: str | ModelCard, *, session: str | None) -> None:
        """Send the requests; return once those of the first prompt are at a worker.

        The requests of one prompt go to one worker. What its answer takes is made while it works.
        Arguments and errors as `Router.send`.
        """
        each, whole = self._per_prompt, self.requests
        prompts = [whole[start : start + each] for start in range(0, len(whole), each)]
        if len(prompts) == 1:
            # The usual case; a task would cost one more iteration of the event loop.
            sent: asyncio.Future[list[ResumingStream]] = asyncio.get_running_loop().create_future()
            sent.set_result(
                await router.send(model, prompts[0], session=session, admitted=self.bypass_queue)
            )
            self._sending = [sent]
        else:
            self._sending = [
                asyncio.create_task(router.send(model, requests, session=session))
                for requests in prompts
            ]
            await self._sending[0]
        self.choices = self._begin(whole)

    async def each(self, sink: Sink) -> None:
        """Give `sink` the pieces that have arrived, until every choice has ended.

        The next pieces are read once it has taken them: a slow client is a slow reader.

        Raises:
            InlayError: a request was refused or failed.
        """
        if len(self.choices) == 1:
            # In a task of its own each wake passes through a few frames, not all those of the call.
            # It is not kept: with an error its frames would hold the request until a collection.
            await asyncio.create_task(self._follow(self.choices[0], sink.take, sink))
            return
        queue: asyncio.Queue[Pieces | BaseException] = asyncio.Queue(_QUEUED)
        self._tasks = [asyncio.create_task(self._pump(choice, queue)) for choice in self.choices]
        open_ = len(self.choices)
        while open_:
            batch: Pieces = []
            item = await queue.get()
            while True:
                if isinstance(item, BaseException):
                    raise item
                batch += item
                open_ -= item[0][1].finish_reason is not None
                if queue.empty():
                    break
                item = queue.get_nowait()
            waits = sink.take(batch)
            if waits is not None:
                await waits

    async def _pump(
        self, choice: ChoiceState, queue: "asyncio.Queue[Pieces | BaseException]"
    ) -> None:
        try:
            await self._follow(choice, queue.put)
        except Exception as error:  # raised again where the pieces are read
            await queue.put(error)

    async def _follow(
        self,
        choice: ChoiceState,
        take: Callable[[Pieces], Awaitable[None] | None],
        sink: Sink | None = None,
    ) -> None:
        """Read a choice's stream; what `sink` can take at once does not wake this task."""
        prompt, number = divmod(choice.index, self._per_prompt)
        stream = (await self._sending[prompt])[number]
        scores, times = self.scores_of(choice), self.times.choice()
        payloads = self.sink
        if payloads is not None:
            payloads.made_by(stream)
        taker = None
        if sink is not None and payloads is None and scores is None:
            taker = _InlineReader(choice, sink, times)
            stream.set_inline_reader(taker.take)
        try:
            async for outputs in stream:
                choice.worker = stream.worker
                if payloads is not None:
                    outputs = [payloads.on_output(output) for output in outputs]
                piece = (taker and taker.made()) or choice.take(outputs)
                ended = piece.finish_reason is not None
                if ended and payloads is None:
                    stream.cancel()
                if scores is not None and choice.request.sampling.prompt_logprobs is not None:
                    scores.take_all(outputs, complete=bool(piece.token_ids) or ended)
                if not _count(choice, piece, times):
                    continue
                if scores is not None:
                    # The first piece shows the prompt's logprobs, which may come with the request
                    # of another choice.
                    await scores.complete.wait()
                waits = take([(choice, piece)])
                if waits is not None:
                    await waits
                if ended:
                    return
        finally:
            stream.set_inline_reader(None)

    def close(self) -> None:
        """Cancel the requests that are still running."""
        for task in self._tasks:
            task.cancel()
        ended = {choice.index for choice in self.choices if choice.finish_reason is not None}
        for prompt, sending in enumerate(self._sending):
            if not sending.done():
                sending.cancel()
            elif not sending.cancelled() and sending.exception() is None:
                for index, stream in enumerate(sending.result(), prompt * self._per_prompt):
                    if index not in ended or self.sink is not None:
                        stream.cancel()
        self.times.finished(self._cached_tokens())

    def _cached_tokens(self) -> int:
        firsts = self.choices[:: self._per_prompt]
        return sum(map(attrgetter("cached_tokens"), firsts))

    def _prompt_tokens(self, request: Request) -> int:
        return len(request.prompt) + self._positions_before

    @property
    def prompt_tokens(self) -> int:
        """Positions of all prompts."""
        return sum(map(self._prompt_tokens, self.requests[:: self._per_prompt]))

    def usage(self) -> AnswerUsage:
        """Return the usage of all choices so far."""
        choices = self.choices
        return AnswerUsage(
            self.prompt_tokens,
            sum(choice.completion_tokens for choice in choices),
            self._cached_tokens(),
            sum(choice.reasoning_tokens for choice in choices)
            if choices[0].counts_reasoning
            else None,
        )

    def add_usage(self, name: str, others: Mapping[str, WorkerUsage]) -> None:
        """Count models that worked for the answer beside this one, `name`, by their names."""
        self._own_name = name
        self._more_usage |= others

    def usage_by_model(self) -> dict[str, WorkerUsage]:
        """Return the usage of each model by its name, where several have worked."""
        if self._own_name is None or not self._more_usage:
            return {}
        return {self._own_name: WorkerUsage(*self.usage()[:2]), **self._more_usage}

    def usage_of(self, choice: ChoiceState, piece: ChoicePiece | None) -> AnswerUsage:
        """Return the usage of one choice up to `piece`, or before its first."""
        reasoning = 0 if piece is None else piece.reasoning_tokens
        return AnswerUsage(
            self._prompt_tokens(choice.request),
            0 if piece is None else piece.completion_tokens,
            choice.cached_tokens,
            reasoning if choice.counts_reasoning else None,
        )


def _count(choice: ChoiceState, piece: ChoicePiece, times: ChoiceTimes) -> bool:
    """Measure a piece; False if it has neither tokens nor an end."""
    if piece.token_ids:
        times.tokens(len(piece.token_ids))
    if piece.finish_reason is not None:
        times.ended(piece.finish_reason, choice.completion_tokens, choice.queued_seconds)
        return True
    return bool(piece.token_ids)


class _InlineReader:
    """Taker of further outputs of a choice, without its task.

    A piece that ends the choice is left to the task, and so is an error. It is one object, not
    closures: after each pause of the server what an event touches is cold.
    """

    __slots__ = ("_choice", "_early", "_plain", "_sink", "_texts", "_times")

    def __init__(self, choice: ChoiceState, sink: Sink, times: ChoiceTimes) -> None:
        self._choice = choice
        self._early: ChoicePiece | Exception | None = None
        self._plain = choice.is_plain
        self._sink = sink
        self._texts: TextWriter | None = None
        self._times = times

    def take(self, output: Output) -> bool:
        choice = self._choice
        try:
            if self._plain and not output.logprobs:
                texts = self._texts
                if texts is None:
                    texts = self._texts = self._sink.texts(choice)
                if texts is not None:
                    if not texts.ready():
                        return False
                    text = choice.further(output)
                    if not isinstance(text, str):
                        self._early = text
                        return False
                    self._times.tokens(len(output.token_ids))
                    if text:
                        texts.write(text)
                    return True
            if not self._sink.ready():
                return False
            piece = choice.take((output,))
            if piece.finish_reason is not None:
                self._early = piece
                return False
            if _count(choice, piece, self._times):
                self._sink.take([(choice, piece)])
        except Exception as error:  # raised again where the stream is read
            self._early = error
            return False
        return True

    def made(self) -> ChoicePiece | None:
        """Return the piece that is left to the task, if one is. Raises the error that is."""
        early, self._early = self._early, None
        if isinstance(early, Exception):
            raise early
        return early


def generation_of(
    call: Call,
    request: GenerationRequest,
    response_id: str,
    model: ServedModel,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    sampling: Sequence[Sampling],
    *,
    output: OutputFormat = PLAIN,
) -> Generation:
    """Return the generation of a request, with an engine request for each of its choices.

    The engine requests of a prompt share its memory. `sampling` is of `sampling_of`, `output` the
    format of the answers. Raises `InvalidRequestError` for features that the engine refuses, and as
    `logprobs.reserve`.
    """
    stops = () if request.stop is None else stops_of(request)
    if stops:
        call.reservation.grow(StopStrings.size(stops))
    # Two clients may send the same request_id; ids of engine requests must be unique.
    unique_id = response_id if request.request_id is None else uuid.uuid4().hex
    if request.seed is not None and sampling[0].temperature > 0 and not model.card.seeds:
        raise InvalidRequestError(
            f"seed is not supported by the engine of this model ({model.card.engine} "
            f"{model.card.engine_version}): what it draws does not depend on one",
            param="seed",
        )
    states: StatesPlan | None = None
    if request.hidden_states or request.return_hidden_states:
        states = StatesPlan.of(call, request, model.card)
        sampling = states.applied(call, prompts, sampling)
    per_prompt = len(sampling) // len(prompts)
    scored = sampling[0].prompt_logprobs is not None
    told = scored or sampling[0].logprobs is not None
    bulk = reserve(call.reservation, sampling[0], prompts, per_prompt) if told else 0
    requests: list[Request] = []
    for index, own in enumerate(sampling):
        engine_request = call.engine_request(
            f"{unique_id}-{index}",
            own,
            (prompts[index // per_prompt],),
            adapter=model.adapter_name,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        if model.card.refusals:
            _check_served(model, engine_request, request)
        requests.append(engine_request)

    def begin(sent: Sequence[Request]) -> list[ChoiceState]:
        display = DisplayOptions(
            stops=StopStrings(stops) if stops else None,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
            format=output,
        )
        return [ChoiceState(index, own, renderer, display) for index, own in enumerate(sent)]

    total = sum(map(len, prompts)) + model.positions_before * len(prompts)
    longest = max(own.max_tokens for own in sampling)
    times = call.times = call.server.metrics.request(
        model.card.name, total, call.began, per_prompt, longest
    )
    scores = [PromptScores(prompt) for prompt in prompts] if scored else []
    generation = Generation(
        requests,
        len(prompts),
        times,
        begin,
        card=model.card,
        positions_before=model.positions_before,
        scores=scores,
        bulk=bulk,
    )
    generation.states = states
    generation.shows_times = call.server.settings.enable_per_request_metrics
    return generation


def _check_served(model: ServedModel, engine_request: Request, request: GenerationRequest) -> None:
    card = model.card
    if model.positions_before:
        # A trained prompt is embeddings to the engine, not an adapter.
        engine_request = msgspec.structs.replace(engine_request, adapter=None)
    try:
        refusals.check(card.refusals, engine_request, f"{card.engine} {card.engine_version}")
    except InvalidRequestError as error:
        raise in_own_names(error, own_fields(request)) from None
