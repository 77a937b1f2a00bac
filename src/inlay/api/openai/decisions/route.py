"""`POST /v1/decisions`: questions about one state, each a read of the labels' logprobs.

The first read computes the state; those that follow find it in the prefix cache.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, NoReturn

import msgspec

from inlay.api.fields import check_common, own_names
from inlay.api.generation.chat import chat_model
from inlay.api.generation.generation import WholeSink, generation_of
from inlay.api.generation.messages import ReadMessages, read_messages
from inlay.api.generation.output_format import ModelFormats, output_format_for
from inlay.api.generation.respond import session_of
from inlay.api.generation.sampling import sampling_of
from inlay.api.generation.tools import NO_TOOLS
from inlay.api.openai.decisions.prompt import (
    check_choices,
    instructions_of,
    joined,
    options_of,
    question_text,
    sources_in,
    state_of,
    with_question,
)
from inlay.api.openai.decisions.reads import Found, Read, answer_of
from inlay.api.openai.responses.input import PARTS
from inlay.api.openai.schema.decisions import Decision, DecisionRequest, DecisionUsage
from inlay.api.openai.schema.responses import InputTokensDetails, OutputTokensDetails
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import read_request
from inlay.http.references import embeddings_of
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Begins, Renderer
from inlay.render.labels import Label, labels_behind
from inlay.router import ServedModel

_decoder = msgspec.json.Decoder(DecisionRequest)

AT_ONCE = 32
"""Reads of one request that run at the same time, behind its first."""

_BYTES = 8
"""Bytes of a token id in a prompt."""

MAX_IDS = 128
"""Labels of one read at most, as engines have it; more are another read of the same prompt."""

_NO_THINKING = {"enable_thinking": False, "thinking": False}


async def decisions(call: Call) -> None:
    """Answer one request.

    Raises:
        InvalidRequestError: the model cannot be read so, or the request is not valid.
    """
    with own_names({"prompt": "input", "messages": "input"}):
        await _answer(call)


async def _answer(call: Call) -> None:
    server = call.server
    incoming = await read_request(call, _decoder, sources_in)
    request = incoming.parsed.request
    check_common(call, request)
    await server.run_prepared(incoming.size, check_choices, request.questions)
    said = await server.run_prepared(incoming.size, state_of, request)
    model = chat_model(server, request.model)
    if model.card.stage is not None:
        raise InvalidRequestError(
            f"{model.card.name} is a pipeline, and decisions are read of one model", param="model"
        )
    renderer = await server.renderers.of(model.card)
    read = partial(read_messages, said.messages, named=said.named, served=PARTS)
    if incoming.sources or incoming.parts:
        embeddings = await embeddings_of(call, incoming, model.card)
        state = await server.run_prepared(
            incoming.size + embeddings.num_fetched_bytes,
            read,
            embeddings.one,
            embeddings.in_chat,
        )
    else:
        state = await server.run_prepared(incoming.size, read, _unnamed, _unnamed)
    size = incoming.size
    del incoming
    request.input = ""
    prompts = await server.run_prepared(size, _Prompts, call, request, model, renderer, state)
    carrier = GenerationRequest(
        model=request.model,
        max_tokens=1,
        temperature=0.0,
        cache_salt=request.cache_salt,
        priority=request.priority,
        prompt_cache_key=request.prompt_cache_key,
    )
    session = session_of(call, carrier) or f"{call.caller.tenant.id}/{call.request_id}"
    found = [Found() for _ in request.questions]
    cached = positions = count = 0
    reads = prompts.reads(await server.run_prepared(size, prompts.asked))
    async with RequestScope(server.inflight, call.receive, call.detach_deadline()):
        await server.awake(model.card.name)
        call.sent = time.perf_counter()
        at_once = 1
        while window := await server.run_prepared(size * at_once, _next, reads, at_once):
            told = await _run(call, carrier, model, renderer, window, session)
            for one, (logprobs, num_cached) in zip(window, told, strict=True):
                found[one.question].take(one, logprobs)
                cached += num_cached
                positions += len(one.prompt) + model.positions_before
            if not count:
                call.reservation.grow(AT_ONCE * _BYTES * len(window[0].prompt))
            count += len(window)
            at_once = AT_ONCE
    usage = DecisionUsage(
        positions, InputTokensDetails(cached), count, OutputTokensDetails(0), positions + count
    )
    answers = [
        answer_of(question, *one.shares())
        for question, one in zip(request.questions, found, strict=True)
    ]
    await call.json(Decision(model.name, answers, usage))


def _unnamed(source: object) -> NoReturn:
    raise AssertionError(f"a source that the request was not found to have: {source}")


def _next(reads: Iterator[Read], count: int) -> list[Read]:
    return list(islice(reads, count))


async def _run(
    call: Call,
    carrier: GenerationRequest,
    model: ServedModel,
    renderer: Renderer,
    reads: Sequence[Read],
    session: str,
) -> list[tuple[list[float], int]]:
    """Return the logprobs of each read, and its positions that were cached."""
    prompts = [read.prompt for read in reads]
    longest = max(prompts, key=len)
    (sampling,) = sampling_of(
        carrier, model, renderer, [longest], max_tokens=1, logprobs=0,
        settings=call.server.settings,
    )  # fmt: skip
    own = [msgspec.structs.replace(sampling, logprob_token_ids=read.ids) for read in reads]
    id_ = f"decision-{uuid.uuid4().hex}"
    generation = generation_of(call, carrier, id_, model, renderer, prompts, own)
    try:
        await generation.start(call.server.router, model.card, session=session)
        await generation.each(WholeSink(call.reservation.grow))
    finally:
        generation.close()
    found = []
    for read, choice in zip(reads, generation.choices, strict=True):
        (entry, *_) = (one for piece in choice.pieces for one in piece.logprobs)
        by_id = dict(entry.top)
        found.append(([by_id[id_] for id_ in read.ids], choice.cached_tokens))
    return found


class _ReadQuestion(NamedTuple):
    """A question as it is read: options as what the model reads and its description."""

    instructions: str
    options: list[tuple[str, str]]
    labels: Sequence[Label]


class _Prompts:
    """The prompts of a request. CPU work, safe to call from any thread."""

    def __init__(
        self,
        call: Call,
        request: DecisionRequest,
        model: ServedModel,
        renderer: Renderer,
        state: ReadMessages,
    ) -> None:
        self._questions, self._orders = request.questions, request.orders
        self._renderer = renderer
        self._settings = call.server.settings
        self._messages = joined(state.messages)
        self._rows, self._media = state.rows, state.media_for(model.card)
        variables = renderer.template_variables(tools=False)
        self._variables = {name: off for name, off in _NO_THINKING.items() if name in variables}

    def asked(self) -> list[_ReadQuestion]:
        """Read all questions, before any is answered.

        Raises:
            InvalidRequestError: a question is not valid, or has too many options for the labels
                that can be read; or none can.
        """
        end = self._end(self._chat(""))
        found = []
        for number, question in enumerate(self._questions):
            instructions = instructions_of(question, f"questions[{number}]")
            options = options_of(question)
            labels = labels_behind(self._renderer, end, len(options))
            found.append(_ReadQuestion(instructions, options, labels))
        return found

    def reads(self, asked: Sequence[_ReadQuestion]) -> Iterator[Read]:
        """Yield the reads of all questions, in order.

        Raises:
            InvalidRequestError: a prompt cannot be made.
        """
        for number, (instructions, options, labels) in enumerate(asked):
            for order in range(self._orders):
                indices = range(len(options))[:: -1 if order else 1]
                text = question_text(instructions, [options[index] for index in indices], labels)
                prompt = self._chat(text)
                for start in range(0, len(options), MAX_IDS):
                    stop = start + MAX_IDS
                    ids = tuple(label.id for label in labels[start:stop])
                    yield Read(number, prompt, ids, tuple(indices[start:stop]), not start)

    def _chat(self, question: str) -> Prompt:
        return self._renderer.chat(
            with_question(self._messages, question),
            rows=self._rows,
            media=self._media,
            template_kwargs=self._variables,
        )

    def _end(self, prompt: Prompt) -> Sequence[int]:
        """Return the last ids of a prompt, behind which the answer begins."""
        forms = ModelFormats.of(self._settings, self._renderer)
        output, _ = output_format_for(forms, self._renderer, prompt, NO_TOOLS, None)
        thinks = output.reasoning is not None and output.reasoning.begins is Begins.INSIDE
        if thinks or forms.channels:
            raise InvalidRequestError(
                "this model reasons before it answers, and its chat template cannot switch that "
                "off: the probabilities of its first token say nothing",
                param="model",
            )
        last = prompt.segments[-1]
        if not isinstance(last, Tokens):
            raise InvalidRequestError(
                "this model's chat template ends with what the client sent", param="model"
            )
        return last.ids
