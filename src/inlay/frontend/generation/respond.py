"""Engine requests of an HTTP request, and its response, streamed or whole."""

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from blake3 import blake3

from inlay import __version__, refusals
from inlay.api.openai.generation import GenerationRequest
from inlay.card import ModelCard
from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.access import session_of
from inlay.frontend.errors import ClientGone, internal_error
from inlay.frontend.generation.choices import ChoiceState, DisplayOptions
from inlay.frontend.generation.generation import Generation, Pieces
from inlay.frontend.generation.grammars import field_of
from inlay.frontend.generation.prompt_logprobs import PromptScores, reserve, size_of_logprobs
from inlay.frontend.generation.sampling import (
    bad_words_of,
    check_together,
    for_choice,
    output_limit,
    stops_of,
)
from inlay.frontend.generation.thinking import for_prompt
from inlay.frontend.request_scope import RequestScope
from inlay.frontend.server import Call
from inlay.frontend.sse import UNNAMED, EventStream, Framing
from inlay.prompt import Prompt
from inlay.render import PLAIN, OutputFormat, Renderer, StopStrings
from inlay.request import Request, Sampling
from inlay.router import ServedModel

_log = logging.getLogger(__name__)


class ResponseShape(Protocol):
    """Response of a generation in one API's form."""

    def events(self, pieces: Pieces) -> list[msgspec.Struct]:
        """Return the events for some pieces."""
        ...

    def closing_events(self) -> Sequence[msgspec.Struct]:
        """Return the events after the last choice's end."""
        ...

    def failure_events(self, error: InlayError) -> Sequence[msgspec.Struct]:
        """Return the events that end a stream because of `error`."""
        ...

    def collect(self, pieces: Pieces) -> None:
        """Store some pieces for `response`."""
        ...

    def response(self) -> msgspec.Struct:
        """Return the whole response."""
        ...


def generation_of(
    call: Call,
    request: GenerationRequest,
    response_id: str,
    model: ServedModel,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    max_tokens: int | None,
    *,
    output: OutputFormat = PLAIN,
) -> Generation:
    """Return the generation of a request, with `candidates` engine requests for each prompt.

    The engine requests of a prompt share its memory. `output` is the format of the answers. Raises
    `InvalidRequestError` for features that the engine refuses, and as `prompt_logprobs.reserve`.
    """
    stops = stops_of(request)
    call.reservation.grow(StopStrings.size(stops))
    # Two clients may send the same request_id; ids of engine requests must be unique.
    unique_id = response_id if request.request_id is None else uuid.uuid4().hex
    display = DisplayOptions(
        stops=StopStrings(stops) if stops else None,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        format=output,
    )
    if request.priority and call.server.settings.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority {request.priority} was asked for; this server serves first come, first "
            "served unless it is started with --scheduling-policy priority",
            param="priority",
        )
    if request.seed is not None and sampling.temperature > 0 and not model.card.seeds:
        raise InvalidRequestError(
            f"seed is not supported by the engine of this model ({model.card.engine} "
            f"{model.card.engine_version}): what it draws does not depend on one",
            param="seed",
        )
    sampling = msgspec.structs.replace(sampling, bad_words=bad_words_of(request, renderer))
    check_together(sampling, len(prompts) * request.candidates)
    bulk = reserve(call.reservation, sampling, prompts, request.candidates)
    remaining = call.remaining
    choices: list[ChoiceState] = []
    for prompt in prompts:
        wanted = output_limit(request, max_tokens, model.max_len - len(prompt))
        own = for_prompt(sampling, prompt, output)
        unscored = msgspec.structs.replace(own, prompt_logprobs=None)
        for number in range(request.candidates):
            index = len(choices)
            # The logprobs of a prompt are sent once, however many choices show them.
            shared = unscored if number else own
            engine_request = Request(
                id=f"{unique_id}-{index}",
                prompt=prompt,
                sampling=for_choice(shared, seed=request.seed, index=index, max_tokens=wanted),
                adapter=None if model.adapter is None else model.adapter.name,
                salt=call.tenant.salted(request.cache_salt),
                deadline=remaining,
                priority=request.priority or 0,
                trace=None if call.span is None else call.span.traceparent,
                client=call.client,
            )
            _check_served(model, engine_request, request)
            choices.append(ChoiceState(index, engine_request, renderer, display))
    total = sum(len(prompt) + model.positions_before for prompt in prompts)
    times = call.times = call.server.metrics.request(model.card.name, total, call.began)
    scores = (
        [] if sampling.prompt_logprobs is None else [PromptScores(prompt) for prompt in prompts]
    )
    return Generation(
        choices,
        len(prompts),
        times,
        fingerprint=fingerprint_of(model.card),
        positions_before=model.positions_before,
        scores=scores,
        bulk=bulk,
    )


def fingerprint_of(card: ModelCard) -> str:
    """Return the `system_fingerprint`: equal if release, engine, weights and dtype are equal."""
    parts = (card.engine, card.engine_version, card.weights_id, card.dtype)
    return f"inlay-{__version__}-{blake3(repr(parts).encode()).hexdigest(4)}"


def _check_served(model: ServedModel, engine_request: Request, request: GenerationRequest) -> None:
    card = model.card
    if model.positions_before:
        # A trained prompt is embeddings to the engine, not an adapter.
        engine_request = msgspec.structs.replace(engine_request, adapter=None)
    try:
        refusals.check(card.refusals, engine_request, f"{card.engine} {card.engine_version}")
    except InvalidRequestError as error:
        _map_error_fields(error, request)
        raise


def _map_error_fields(error: InlayError, request: GenerationRequest) -> None:
    """Replace the param `grammar`, which engines use, by the request's own field."""
    if error.param == "grammar":
        error.param = field_of(request)


async def respond(
    call: Call,
    request: GenerationRequest,
    model: ServedModel,
    generation: Generation,
    shape: ResponseShape,
    framing: Framing = UNNAMED,
) -> None:
    """Run `generation` and answer the call in `shape`.

    A stream starts with the first tokens, so that an engine's refusal is an HTTP status and not an
    event.

    Raises:
        InlayError: before the first event; later errors are events.
        ClientGone: the client left; the engine requests are cancelled.
    """
    stream = EventStream(call.send, framing)
    session = session_of(
        call.scope["headers"], request.session_id, request.prompt_cache_key, call.tenant.id
    )
    try:
        async with RequestScope(call.server.inflight, call.receive, call.take_clock()):
            await call.server.awake(model.card.name)
            call.sent = time.perf_counter()
            await generation.start(call.server.router, model.card.name, session=session)
            async with aclosing(generation.pieces()) as arriving:
                async for pieces in arriving:
                    if request.stream:
                        await stream.write(
                            await call.server.prepare(generation.bulk, shape.events, pieces)
                        )
                    else:
                        size = sum(size_of_logprobs(piece.logprobs) for _, piece in pieces)
                        call.reservation.grow(size)
                        generation.bulk += size
                        shape.collect(pieces)
    except (InlayError, ClientGone) as error:
        if isinstance(error, InlayError):
            _map_error_fields(error, request)
        if not stream.started or isinstance(error, ClientGone):
            raise
        call.failed = error
        call.server.metrics.failed(error)
        await stream.finish(shape.failure_events(error))
        return
    except Exception as error:
        if not stream.started:
            raise
        call.failed = error
        _log.exception("request %s failed in its stream", call.request_id)
        await stream.finish(shape.failure_events(internal_error(call.request_id)))
        return
    finally:
        generation.close()
    if not request.stream:
        await call.prepared_json(generation.bulk, shape.response)
        return
    await stream.finish(shape.closing_events())
