"""`POST /v1/completions`."""

import time
import uuid

import msgspec

from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.admission import bytes_alive
from inlay.frontend.choices import Choice, Piece
from inlay.frontend.errors import shown
from inlay.frontend.generation import Generation, Pieces
from inlay.frontend.incoming import read_request
from inlay.frontend.prompts import PromptReader
from inlay.frontend.references import embeddings_of
from inlay.frontend.respond import generation_of, respond
from inlay.frontend.sampling import check_request, sampling_of
from inlay.frontend.server import Call
from inlay.frontend.sources import in_completion
from inlay.prompt import Prompt
from inlay.protocol.openai.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from inlay.protocol.openai.generation import ErrorResponse
from inlay.render import Renderer

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(call: Call) -> None:
    """Answer one completions request."""
    server = call.server
    incoming = await read_request(call, _decoder, server.embeds.in_completion)
    request = incoming.parsed.request
    check_request(request)
    card = server.card(request.model)
    renderer = await server.renderers.of(card)
    embeddings = await embeddings_of(call, incoming, in_completion(request), card)
    prompts = await server.prepare(
        incoming.size,
        _prompts,
        PromptReader(request, card, renderer, embeddings),
        request,
        server.settings.max_choices,
    )
    del incoming, embeddings
    call.reservation.shrink_to(bytes_alive(prompts))
    _check_rows(request, prompts)
    sampling = sampling_of(
        request,
        card,
        longest=max(map(len, prompts)),
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
    )
    response_id = f"cmpl-{uuid.uuid4().hex}"
    generation = generation_of(
        call, request, response_id, card, renderer, prompts, sampling, request.max_tokens
    )
    shape = CompletionShape(response_id, request, card.name, renderer, generation)
    await respond(call, request, card, generation, shape)


def _prompts(reader: PromptReader, request: CompletionRequest, most: int) -> list[Prompt]:
    prompts = reader.prompts(most=most)
    asked = len(prompts) * (request.n or 1)
    if asked > most:
        raise InvalidRequestError(
            f"the request asks for {asked} choices; at most {most} are allowed", param="n"
        )
    if not all(map(len, prompts)):
        raise InvalidRequestError("prompt must have at least one position", param="prompt")
    return prompts


def _check_rows(request: CompletionRequest, prompts: list[Prompt]) -> None:
    """Refuse what needs token ids where there are none, and what is not served."""
    rows = any(prompt.has_rows for prompt in prompts)
    reason = "is not possible with prompt_embeds: rows have no token ids" if rows else "is not supported"
    if request.suffix:
        raise InvalidRequestError(f"suffix {reason}", param="suffix")
    if request.prompt_logprobs is not None:
        raise InvalidRequestError(f"prompt_logprobs {reason}", param="prompt_logprobs")
    if request.echo and rows:
        raise InvalidRequestError(f"echo {reason}", param="echo")
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError("echo together with logprobs is not supported", param="echo")


class CompletionShape:
    """Completions as OpenAI shows them, with vLLM's `stop_reason` and `token_ids`."""

    def __init__(
        self,
        response_id: str,
        request: CompletionRequest,
        model: str,
        renderer: Renderer,
        generation: Generation,
    ) -> None:
        self._id = response_id
        self._request = request
        self._model = model
        self._renderer = renderer
        self._generation = generation
        self._created = int(time.time())
        options = request.stream_options
        self._continuous = bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._collected: dict[int, list[Piece]] = {}

    def events(self, pieces: Pieces) -> list[msgspec.Struct]:
        """One event for each piece."""
        usage = self._generation.usage() if self._continuous else msgspec.UNSET
        return [
            Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._choice(choice, piece)],
                usage=usage,
            )
            for choice, piece in pieces
            if piece.text
            or piece.finish_reason is not None
            or piece.logprobs
            or self._request.return_token_ids
        ]

    def closing_events(self) -> list[msgspec.Struct]:
        """One event without choices, only usage, where that was asked for."""
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return []
        return [
            Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[],
                usage=self._generation.usage(),
            )
        ]

    def failure_events(self, error: InlayError) -> list[msgspec.Struct]:
        """The error."""
        return [ErrorResponse(shown(error))]

    def collect(self, pieces: Pieces) -> None:
        """Keep the pieces by choice."""
        for choice, piece in pieces:
            self._collected.setdefault(choice.index, []).append(piece)

    def response(self) -> msgspec.Struct:
        """All choices, whole."""
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                self._choice(choice, joined(self._collected[choice.index]))
                for choice in self._generation.choices
            ],
            usage=self._generation.usage(),
        )

    def _choice(self, choice: Choice, piece: Piece) -> CompletionChoice:
        begins = choice.index not in self._begun
        self._begun.add(choice.index)
        text = piece.text
        prompt = choice.work.prompt
        if begins and self._request.echo:
            text = self._renderer.decode(prompt.token_ids(), skip_special_tokens=True) + text
        with_ids = bool(self._request.return_token_ids)
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._logprobs(choice, piece) if self._request.logprobs is not None else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=list(piece.token_ids) if with_ids else msgspec.UNSET,
            prompt_token_ids=prompt_ids(prompt) if with_ids and begins else msgspec.UNSET,
        )

    def _logprobs(self, choice: Choice, piece: Piece) -> CompletionLogprobs:
        offset = self._offsets.get(choice.index, 0)
        result = CompletionLogprobs([], [], [], [])
        for id_, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            token = self._renderer.token_text(id_)
            result.text_offset.append(offset)
            result.tokens.append(token)
            result.token_logprobs.append(entry.logprob)
            top: dict[str, float] = {}
            # Parts of characters read alike; the likeliest of them stands for all.
            for other, logprob in ((id_, entry.logprob), *entry.top):
                name = self._renderer.token_text(other)
                top[name] = max(logprob, top.get(name, logprob))
            result.top_logprobs.append(top if self._request.logprobs else None)
            offset += len(token)
        self._offsets[choice.index] = offset
        return result


def joined(pieces: list[Piece]) -> Piece:
    """A choice's pieces as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(delta for piece in pieces for delta in piece.output),
        tuple(id_ for piece in pieces for id_ in piece.token_ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
    )


def prompt_ids(prompt: Prompt) -> list[int] | None:
    """The ids of a prompt, or None where some of its positions have none."""
    return None if prompt.has_rows else list(prompt.token_ids())
