"""`POST /v1/completions`."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from inlay.api.openai.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from inlay.api.openai.generation import ErrorResponse, UsageInfo
from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.answer_id import answer_id
from inlay.frontend.bodies.request_memory import size_of
from inlay.frontend.bodies.sources import in_completion
from inlay.frontend.errors import shown
from inlay.frontend.generation.alternatives import token_names
from inlay.frontend.generation.choices import ChoicePiece, ChoiceState
from inlay.frontend.generation.generation import Generation, Pieces, UsageShown
from inlay.frontend.generation.output_format import ModelFormats
from inlay.frontend.generation.prompt_logprobs import LEAST, check_has_ids, with_prompt_logprobs
from inlay.frontend.generation.prompts import PromptReader, kept_positions
from inlay.frontend.generation.respond import generation_of, respond
from inlay.frontend.generation.sampling import check_request, sampling_of
from inlay.frontend.generation.thinking import with_budget
from inlay.frontend.parsed_request import read_request
from inlay.frontend.references import embeddings_of
from inlay.frontend.server import Call
from inlay.prompt import Prompt
from inlay.render import Detokenizer, Renderer
from inlay.request import Sampling, Task, TokenLogprobs
from inlay.router import ServedModel

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(call: Call) -> None:
    """Answer one completions request."""
    server = call.server
    incoming = await read_request(call, _decoder, server.embeds.in_completion)
    request = incoming.parsed.request
    check_request(request)
    model = server.model(request.model, Task.GENERATE)
    card = model.card
    keep = kept_positions(request, model.max_len, request.max_tokens)
    renderer = await server.renderers.of(card)
    # Scanning a million ids takes 30 ms.
    items = len(request.prompt) if isinstance(request.prompt, list) else 0
    sources = await server.prepare(items, in_completion, request)
    embeddings = await embeddings_of(call, incoming, sources, card)
    prompts, size = await server.prepare(
        incoming.size,
        _prompts,
        PromptReader(request, card, renderer, embeddings, keep=keep),
        request,
        server.settings.max_choices,
    )
    del incoming, embeddings
    request.prompt = request.prompt_embeds = None
    call.memory.settle(prompts, size)
    sampling = _sampling(request, model, prompts)
    sampling = with_budget(sampling, request, ModelFormats.of(server.settings, renderer), renderer)
    response_id = answer_id("cmpl-", request.request_id)
    generation = generation_of(
        call, request, response_id, model, renderer, prompts, sampling, request.max_tokens
    )
    shape = CompletionShape(response_id, request, model.name, renderer, generation)
    await respond(call, request, model, generation, shape)


def _prompts(
    reader: PromptReader, request: CompletionRequest, most: int
) -> tuple[list[Prompt], int]:
    """Return the prompts of a request, and the bytes of its other fields."""
    prompts = reader.prompts(most=most)
    asked = len(prompts) * request.candidates
    if asked > most:
        param = "n" if request.best_of is None else "best_of"
        raise InvalidRequestError(
            f"the request asks for {asked} choices; at most {most} are allowed", param=param
        )
    if not all(map(len, prompts)):
        raise InvalidRequestError("prompt must have at least one position", param="prompt")
    return prompts, size_of(request, "prompt", "prompt_embeds")


def _sampling(request: CompletionRequest, model: ServedModel, prompts: list[Prompt]) -> Sampling:
    """Return the settings that the choices share.

    Raises `InlayError` for fields that these prompts or this model do not support.
    """
    if request.suffix:
        check_has_ids(prompts, "suffix")
        raise InvalidRequestError("suffix is not supported", param="suffix")
    if request.echo:
        check_has_ids(prompts, "echo")
    sampling = sampling_of(
        request,
        model.card,
        longest=max(map(len, prompts)) + model.positions_before,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
    )
    sampling = with_prompt_logprobs(
        sampling, request, model.card, prompts, echoed=request.logprobs if request.echo else None
    )
    if request.candidates > (request.n or 1) and sampling.logprobs is None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    return sampling


class CompletionShape:
    """Completions in vLLM 0.32's form; fields without a value are null."""

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
        self._name = token_names(request, renderer)
        self._created = int(time.time())
        self._usage = UsageShown.of(request)
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}
        self._echoed: dict[int, str] = {}
        self._collected: dict[int, list[ChoicePiece]] = {}

    def _chunk(self, choices: list[CompletionChunkChoice], **more: Any) -> CompletionChunk:
        return CompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, **more
        )

    def events(self, pieces: Pieces) -> list[msgspec.Struct]:
        """Return an event for each piece."""
        events: list[msgspec.Struct] = []
        for choice, piece in pieces:
            ends = piece.finish_reason is not None
            if not (piece.text or ends or piece.logprobs or self._request.return_token_ids):
                continue
            shown = self._choice(choice, piece)
            part = CompletionChunkChoice(
                index=shown.index,
                text=shown.text,
                logprobs=shown.logprobs,
                finish_reason=shown.finish_reason,
                stop_reason=shown.stop_reason,
                prompt_token_ids=shown.prompt_token_ids,
                token_ids=shown.token_ids,
            )
            usage: UsageInfo | msgspec.UnsetType = msgspec.UNSET
            if self._usage.continuous:
                # As in vLLM, without the details.
                usage = msgspec.structs.replace(
                    self._generation.usage_of(choice, piece),
                    completion_tokens_details=msgspec.UNSET,
                )
            last = ends and not self._usage.at_end
            events.append(
                self._chunk(
                    [part],
                    usage=usage,
                    system_fingerprint=self._generation.fingerprint if last else msgspec.UNSET,
                )
            )
        return events

    def closing_events(self) -> list[msgspec.Struct]:
        """Return an event with usage and no choices, if the request wants it."""
        if not self._usage.at_end:
            return []
        generation = self._generation
        return [
            self._chunk(
                [], usage=generation.usage_at_end(), system_fingerprint=generation.fingerprint
            )
        ]

    def failure_events(self, error: InlayError) -> list[msgspec.Struct]:
        """Return the error as an event."""
        return [ErrorResponse(shown(error))]

    def collect(self, pieces: Pieces) -> None:
        """Store the pieces by choice, for `response`."""
        for choice, piece in pieces:
            self._collected.setdefault(choice.index, []).append(piece)

    def response(self) -> msgspec.Struct:
        """Return the whole response."""
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=self._best() if self._request.best_of is not None else self._all(),
            usage=self._generation.usage(),
            system_fingerprint=self._generation.fingerprint,
        )

    def _all(self) -> list[CompletionChoice]:
        return [
            self._choice(choice, joined(self._collected[choice.index]))
            for choice in self._generation.choices
        ]

    def _best(self) -> list[CompletionChoice]:
        """Return each prompt's `n` choices with the highest mean logprob, best first."""
        best: list[CompletionChoice] = []
        for choices in self._generation.by_prompt():
            found = [(choice, joined(self._collected[choice.index])) for choice in choices]
            found.sort(key=lambda pair: -_mean_logprob(pair[1]))
            for choice, piece in found[: self._request.n or 1]:
                best.append(msgspec.structs.replace(self._choice(choice, piece), index=len(best)))
        return best

    def _choice(self, choice: ChoiceState, piece: ChoicePiece) -> CompletionChoice:
        request = self._request
        begins = choice.index not in self._begun
        self._begun.add(choice.index)
        text = piece.text
        prompt = choice.request.prompt
        ids: tuple[int, ...] = piece.token_ids
        logprobs: list[TokenLogprobs | None] = list(piece.logprobs)
        scores = self._generation.scores_of(choice)
        echoed = None
        if begins and request.echo:
            text = self._prompt_text(prompt) + text
            echoed = len(prompt)
            ids = (*prompt.token_ids(), *ids)
            if scores is not None:
                logprobs = [None, *scores.entries(request.logprobs or 0), *logprobs]
        shows_prompt = begins and scores is not None and request.prompt_logprobs is not None
        with_ids = bool(request.return_token_ids)
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=None
            if request.logprobs is None
            else self._logprobs(choice, ids, logprobs, echoed=echoed),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=list(piece.token_ids) if with_ids else None,
            prompt_token_ids=prompt_ids(prompt) if with_ids and begins else None,
            prompt_logprobs=scores.shown(self._renderer, int(request.prompt_logprobs or 0))
            if scores is not None and shows_prompt
            else None,
        )

    def _prompt_text(self, prompt: Prompt) -> str:
        """Return the prompt as text, decoded once for all its choices."""
        text = self._echoed.get(id(prompt))
        if text is None:
            text = self._renderer.decode(prompt.token_ids(), skip_special_tokens=self._skips)
            self._echoed[id(prompt)] = text
        return text

    @property
    def _skips(self) -> bool:
        return self._request.skip_special_tokens is not False

    def _logprobs(
        self,
        choice: ChoiceState,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        *,
        echoed: int | None,
    ) -> CompletionLogprobs:
        """Return the logprobs of `ids`, the first `echoed` of which are the prompt's.

        An entry is None where there is no logprob: at a prompt's first token.
        """
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._offsets[choice.index] = _Offsets(self._renderer, self._skips)
        result = CompletionLogprobs([], [], [], [])
        for place, (id_, entry) in enumerate(zip(ids, logprobs, strict=True)):
            if place == echoed:
                offsets.restart()
            result.text_offset.append(offsets.next(id_))
            result.tokens.append(self._name(id_))
            if entry is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            result.token_logprobs.append(max(entry.logprob, LEAST))
            top: dict[str, float] = {}
            # Tokens that are parts of characters have the same text; the likeliest one is shown.
            for other, logprob in ((id_, entry.logprob), *entry.top):
                name = self._name(other)
                top[name] = max(logprob, top.get(name, LEAST))
            result.top_logprobs.append(top)
        return result


class _Offsets:
    """Text offsets of a choice's tokens. A token that is not shown has no length."""

    __slots__ = ("_detokenizer", "_length", "_renderer", "_skips")

    def __init__(self, renderer: Renderer, skips_special_tokens: bool) -> None:
        self._renderer = renderer
        self._skips = skips_special_tokens
        self._length = 0
        self._detokenizer = self._new()

    def _new(self) -> Detokenizer:
        return self._renderer.detokenizer(skip_special_tokens=self._skips)

    def next(self, id_: int) -> int:
        """Return the offset of the next token, in characters."""
        offset = self._length
        self._length += len(self._detokenizer.push((id_,)))
        return offset

    def restart(self) -> None:
        """Begin another text after the one so far: the output after its prompt."""
        self._length += len(self._detokenizer.flush())
        self._detokenizer = self._new()


def _mean_logprob(piece: ChoicePiece) -> float:
    return sum(entry.logprob for entry in piece.logprobs) / max(1, len(piece.logprobs))


def joined(pieces: list[ChoicePiece]) -> ChoicePiece:
    """Return a choice's pieces as one piece."""
    return ChoicePiece(
        "".join(piece.text for piece in pieces),
        tuple(delta for piece in pieces for delta in piece.output),
        tuple(id_ for piece in pieces for id_ in piece.token_ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
        pieces[-1].completion_tokens,
        pieces[-1].reasoning_tokens,
    )


def prompt_ids(prompt: Prompt) -> list[int] | None:
    """Return the ids of a prompt, or None if it has embeddings."""
    return None if prompt.has_rows else list(prompt.token_ids())
