"""`POST /v1/completions`: from its body to its prompts, and to their generation."""

from collections.abc import Sequence
from functools import partial

import msgspec

from inlay.api.fields import answer_id, check_ids
from inlay.api.generation.generation import generation_of
from inlay.api.generation.grammars import grammar_of
from inlay.api.generation.hidden_states import StatesPlan
from inlay.api.generation.logprobs import check_has_ids
from inlay.api.generation.parts import media_source
from inlay.api.generation.respond import respond
from inlay.api.generation.sampling import check_request, sampling_of
from inlay.api.generation.truncation import kept_positions, truncated
from inlay.api.openai.completions.shape import CompletionShape
from inlay.api.openai.schema.completions import (
    CompletionRequest,
    MediaPart,
    PromptEmbedsPart,
    PromptPart,
    TextPart,
    TokenIdsPart,
)
from inlay.api.openai.sources import in_prompt_embeds
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.accounting import size_of
from inlay.http.bodies.embeds import Embeddings, Source, TensorSource
from inlay.http.bodies.media import MediaSource
from inlay.http.parsed_request import read_request
from inlay.http.references import embeddings_of
from inlay.http.server import Call
from inlay.messages.prompt import Prompt, Segment, Tokens
from inlay.messages.request import Task
from inlay.render import End, Renderer, Side
from inlay.router import ServedModel

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(call: Call) -> None:
    """Answer one completions request."""
    server = call.server
    incoming = await read_request(call, _decoder, in_completion)
    request = incoming.parsed.request
    check_request(call, request)
    model = server.model(request.model, Task.GENERATE)
    card = model.card
    if card.stage is not None and card.stage.is_chain:
        raise InvalidRequestError(
            f"the pipeline `{card.name}` is several language models in a row; they take chats, as "
            "by /v1/chat/completions",
            param="model",
        )
    if request.hidden_states or request.return_hidden_states:
        # Checked before anything is made for it.
        StatesPlan.of(call, request, card)
    grammar = None
    if request.response_format is not None or request.structured_outputs is not None:
        grammar = await server.run_prepared(call.memory.json, grammar_of, request, card)
    renderer = await server.renderers.of(card)
    reader = PromptReader(request, incoming.sources, model, renderer)
    embeddings = None
    if incoming.sources or incoming.parts:
        embeddings = await embeddings_of(call, incoming, card)
    prompts, size = await server.run_prepared(
        incoming.size,
        _prompts,
        reader,
        embeddings,
        request,
        server.settings.max_choices,
    )
    del incoming, embeddings, reader
    request.prompt = request.prompt_embeds = None
    call.memory.settle(prompts, size)
    _check_has_ids(request, prompts)
    sampling = sampling_of(
        request,
        model,
        renderer,
        prompts,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        echoed=request.logprobs if request.echo else None,
        grammar=grammar,
        settings=server.settings,
    )
    response_id = answer_id("cmpl-", request.request_id)
    generation = generation_of(call, request, response_id, model, renderer, prompts, sampling)
    shape = partial(CompletionShape, response_id, request, model.name, renderer, generation)
    await respond(call, request, model, generation, shape)


def _prompts(
    reader: "PromptReader", embeddings: Embeddings | None, request: CompletionRequest, most: int
) -> tuple[list[Prompt], int]:
    """Return the prompts of a request, and the bytes of its other fields."""
    prompts = reader.prompts(embeddings, most=most)
    if not all(map(len, prompts)):
        raise InvalidRequestError("prompt must have at least one position", param="prompt")
    return prompts, size_of(request, "prompt", "prompt_embeds")


def _check_has_ids(request: CompletionRequest, prompts: list[Prompt]) -> None:
    """Raise `InvalidRequestError` for fields that these prompts do not support."""
    if request.suffix:
        check_has_ids(prompts, "suffix")
        raise InvalidRequestError("suffix is not supported", param="suffix")
    if request.echo:
        check_has_ids(prompts, "echo")


def in_completion(request: CompletionRequest) -> list[Source]:
    """Return the sources of a completions request, in order."""
    if request.prompt_embeds not in (None, []):
        return [*in_prompt_embeds(request.prompt_embeds)]
    found: list[Source] = []
    if isinstance(request.prompt, list):
        for index, item in enumerate(request.prompt):
            # A prompt may have a million ids, and this blocks the server: comparing types is twice
            # as fast as `isinstance`.
            if type(item) is int or type(item) is str:
                continue
            if isinstance(item, list):
                for inner, part in enumerate(item):
                    if type(part) is not int:
                        found += _in_part(part, f"prompt[{index}][{inner}]", index)
            else:
                found += _in_part(item, f"prompt[{index}]", 0)
    return found


def _in_part(part: object, param: str, prompt: int) -> list[Source]:
    if isinstance(part, PromptEmbedsPart):
        return [_part_source(part, param)]
    if isinstance(part, MediaPart):
        return [_media_part_source(part, param, prompt)]
    return []


def _part_source(part: PromptEmbedsPart, param: str) -> TensorSource:
    """Return the source of a part of a completion's prompt."""
    return TensorSource(part.data, part.ref, part.part, param)


def _media_part_source(part: MediaPart, param: str, prompt: int = 0) -> MediaSource:
    """Return the source of media in a completion's prompt. Raises as `media_source`."""
    return media_source(msgspec.structs.asdict(part), param, prompt)


class PromptReader:
    """Makes the prompts of a request. CPU work, safe to call from any thread."""

    def __init__(
        self,
        request: CompletionRequest,
        sources: Sequence[Source],
        model: ServedModel,
        renderer: Renderer,
    ) -> None:
        """Prepare for `request` with `sources`. Raises as `kept_positions`."""
        self._request = request
        self._sources = sources
        keep = request.truncate_prompt_tokens
        self._keep = (
            None if keep is None else kept_positions(keep, model.max_len, request.max_tokens)
        )
        self._side: Side = request.truncation_side or "left"
        self._vocab_size = model.card.vocab_size
        self._renderer = renderer
        self._special = request.add_special_tokens is not False

    def prompts(self, embeddings: Embeddings | None, *, most: int) -> list[Prompt]:
        """Return the prompts of the request in order, truncated.

        Args:
            embeddings: of the request; None if it has no sources.
            most: maximum number of prompts.

        Raises:
            InvalidRequestError: none, more than `most`, or one that the model cannot take.
            NotFoundError: a stored prompt or part does not exist.
        """
        request, self._embeddings = self._request, embeddings
        if embeddings is not None and request.prompt_embeds not in (None, []):
            sources = [source for source in self._sources if isinstance(source, TensorSource)]
            _check_count(len(sources), most)
            found = []
            for source in sources:
                found += [self._kept(Prompt.of(rows)) for rows in embeddings.prompts(source)]
            _check_count(len(found), most)
            return found
        prompt = request.prompt
        if not prompt:
            raise InvalidRequestError(
                "At least one of 'prompt' or 'prompt_embeds' must be provided and not be empty.",
                param="prompt",
            )
        if isinstance(prompt, str):
            return [self._text(prompt)]
        return self._list(prompt, most)

    def _list(
        self, prompt: list[int | str | PromptPart | list[int | PromptPart]], most: int
    ) -> list[Prompt]:
        if all(isinstance(item, str) for item in prompt):
            _check_count(len(prompt), most)
            return [self._text(item) for item in prompt if isinstance(item, str)]
        if all(isinstance(item, list) for item in prompt):
            _check_count(len(prompt), most)
            return [
                self._one(item, f"prompt[{i}]")
                for i, item in enumerate(prompt)
                if isinstance(item, list)
            ]
        flat = [item for item in prompt if not isinstance(item, str | list)]
        if len(flat) != len(prompt):
            raise InvalidRequestError(
                "prompt is a string, a list of strings, of token ids or of parts, or a list of "
                "lists, each of token ids or of parts; got a list that begins with "
                f"{_kind(prompt[0])} and has {_kind(_other(prompt))} too. Beside lists, write a "
                'text as [{"type": "text", "text": ...}]',
                param="prompt",
            )
        return [self._one(flat, "prompt")]

    def _one(self, items: Sequence[int | PromptPart], param: str) -> Prompt:
        ids = [item for item in items if isinstance(item, int)]
        parts = [item for item in items if not isinstance(item, int)]
        if ids and parts:
            raise InvalidRequestError(
                f"{param} holds token ids and parts; give ids as a part", param=param
            )
        if not items:
            raise InvalidRequestError(f"{param} is empty", param=param)
        if ids:
            return self._kept(Prompt.of(self._ids(ids, param)))
        room, right = self._keep, self._side == "right"
        segments: list[Segment] = []
        # From the end that is kept, so that texts beyond it are not tokenized.
        order = range(len(parts)) if right else reversed(range(len(parts)))
        whole = True
        for index in order:
            several, all_of_it = self._part(parts[index], index, f"{param}[{index}]", room)
            if not whole:
                # Parts beyond a cut are checked and dropped, even if there is room: keeping them
                # would leave a gap.
                continue
            segments += several if right else reversed(several)
            whole = all_of_it
            room = None if room is None else max(0, room - sum(map(len, several))) if whole else 0
        return self._kept(Prompt.of(*(segments if right else reversed(segments))))

    def _part(
        self, part: PromptPart, index: int, param: str, room: int | None
    ) -> tuple[Sequence[Segment], bool]:
        """Return at least the kept end of a part, and whether it is the whole part."""
        if isinstance(part, TextPart):
            # The tokenizer's beginning-of-text token belongs at the start of the prompt only.
            end = self._end(part.text, self._special and index == 0, room)
            return [Tokens(end.ids)], end.whole
        if isinstance(part, TokenIdsPart):
            return [self._ids(part.token_ids, f"{param}.token_ids")], True
        if isinstance(part, PromptEmbedsPart):
            return [self._sourced().one(_part_source(part, param))], True
        return self._sourced().media(_media_part_source(part, param)), True

    def _sourced(self) -> Embeddings:
        assert self._embeddings is not None, "parts with sources are among those of the request"
        return self._embeddings

    def _text(self, text: str) -> Prompt:
        return self._kept(Prompt.of(Tokens(self._end(text, self._special, self._keep).ids)))

    def _end(self, text: str, special: bool, room: int | None) -> End:
        if room is None:
            return End(self._renderer.encode(text, add_special_tokens=special), True)
        if room == 0:
            return End((), False)
        return self._renderer.end(text, room, add_special_tokens=special, side=self._side)

    def _kept(self, prompt: Prompt) -> Prompt:
        return prompt if self._keep is None else truncated(prompt, self._keep, self._side)

    def _ids(self, ids: list[int], param: str) -> Tokens:
        check_ids(ids, self._vocab_size, param)
        return Tokens(ids)


def _kind(item: object) -> str:
    if isinstance(item, str):
        return "a string"
    if isinstance(item, int):
        return "a token id"
    return "a list" if isinstance(item, list) else "a part"


def _other(items: Sequence[object]) -> object:
    """Return the first item whose kind differs from the first one's."""
    return next(item for item in items if _kind(item) != _kind(items[0]))


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(
            f"the request asks for {count} prompts; at most {most} choices are allowed "
            "(--max-choices)",
            param="prompt",
        )
