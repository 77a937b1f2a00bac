"""JSON of completions, whole or as events."""

from collections.abc import Sequence

import msgspec

from inlay.api.generation.choices import ChoicePiece, ChoiceState, joined
from inlay.api.generation.generation import Generation, Pieces
from inlay.api.generation.logprobs import LEAST, token_names
from inlay.api.openai.chunks import (
    Chunks,
    fingerprint_of,
    metrics_of,
    weight_versions_of,
    whole_usage,
)
from inlay.api.openai.schema.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from inlay.api.openai.schema.generation import WeightVersion
from inlay.http.sse import Event, TextEvents
from inlay.messages.prompt import Prompt
from inlay.messages.request import TokenLogprobs
from inlay.render import Detokenizer, Renderer


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
        self._chunks = Chunks(CompletionChunk, response_id, model, request, generation)
        self.failure_events = self._chunks.failure_events
        self._with_ids = bool(request.return_token_ids)
        self._texts_alone = not (
            self._chunks.usage.continuous or request.logprobs is not None or self._with_ids
        )
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}
        self._echoed: dict[int, str] = {}

    def events(self, pieces: Pieces) -> list[Event]:
        """Return an event for each piece."""
        events: list[Event] = []
        chunks = self._chunks
        for choice, piece in pieces:
            ends = piece.finish_reason is not None
            if not (ends or piece.logprobs or self._with_ids):
                if not piece.text:
                    continue
                texts = self.texts(choice)
                if texts is not None:
                    events.append(texts.event(piece.text))
                    continue
            text, logprobs, prompt, ids = self._parts(choice, piece)
            part = CompletionChunkChoice(
                index=choice.index,
                text=text,
                logprobs=logprobs,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                prompt_token_ids=prompt,
                token_ids=ids,
                weight_versions=self._weight_versions(choice) if ends else msgspec.UNSET,
            )
            usage = chunks.usage_of(choice, piece)
            if usage is not msgspec.UNSET:
                # As in vLLM, without the details.
                usage = msgspec.structs.replace(usage, completion_tokens_details=msgspec.UNSET)
            events.append(chunks.chunk([part], last=ends, usage=usage))
        return events

    def texts(self, choice: ChoiceState) -> TextEvents | None:
        """Return the events of a choice's pieces that have nothing but text, if they are such."""
        if not self._texts_alone or choice.index not in self._begun:
            return None
        return self._chunks.texts(choice.index, CompletionChunkChoice)

    def closing_events(self) -> list[Event]:
        """Return those of hidden states, and of usage."""
        states = [
            CompletionChunkChoice(choice.index, "", hidden_states=choice.hidden_states)
            for choice in self._generation.choices
            if choice.hidden_states is not msgspec.UNSET
        ]
        return [*(self._chunks.chunk([each]) for each in states), *self._chunks.closing_events()]

    def response(self) -> msgspec.Struct:
        """Return the whole response."""
        return Completion(
            id=self._id,
            created=self._chunks.created,
            model=self._model,
            choices=self._best() if self._request.best_of is not None else self._all(),
            usage=whole_usage(self._generation),
            system_fingerprint=fingerprint_of(self._generation),
            metrics=metrics_of(self._generation),
        )

    def _all(self) -> list[CompletionChoice]:
        return [self._choice(choice, joined(choice.pieces)) for choice in self._generation.choices]

    def _best(self) -> list[CompletionChoice]:
        """Return each prompt's `n` choices with the highest mean logprob, best first."""
        best: list[CompletionChoice] = []
        for choices in self._generation.by_prompt():
            found = [(choice, joined(choice.pieces)) for choice in choices]
            found.sort(key=lambda pair: -_mean_logprob(pair[1]))
            for choice, piece in found[: self._request.n or 1]:
                best.append(msgspec.structs.replace(self._choice(choice, piece), index=len(best)))
        return best

    def _choice(self, choice: ChoiceState, piece: ChoicePiece) -> CompletionChoice:
        text, logprobs, prompt, ids = self._parts(choice, piece)
        asked, scores = self._request.prompt_logprobs, self._generation.scores_of(choice)
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids,
            prompt_token_ids=prompt,
            prompt_logprobs=None
            if scores is None or asked is None
            else scores.shown(self._renderer, int(asked)),
            hidden_states=choice.hidden_states,
            weight_versions=self._weight_versions(choice),
        )

    def _weight_versions(self, choice: ChoiceState) -> list[WeightVersion] | msgspec.UnsetType:
        return weight_versions_of(self._request, self._generation, choice.completion_tokens)

    def _parts(
        self, choice: ChoiceState, piece: ChoicePiece
    ) -> tuple[str, CompletionLogprobs | None, list[int] | None, list[int] | None]:
        """Return text, logprobs, the prompt's ids and the output's ids of a piece.

        The first piece of a choice has the prompt's, as far as the request wants them.
        """
        request = self._request
        begins = choice.index not in self._begun
        if begins:
            self._begun.add(choice.index)
        text = piece.text
        ids: tuple[int, ...] = piece.token_ids
        logprobs: Sequence[TokenLogprobs | None] = piece.logprobs
        echoed = None
        if begins and request.echo:
            prompt = choice.request.prompt
            text = self._prompt_text(prompt) + text
            echoed = len(prompt)
            ids = (*prompt.token_ids(), *ids)
            scores = self._generation.scores_of(choice)
            if scores is not None:
                logprobs = [None, *scores.entries(request.logprobs or 0), *logprobs]
        return (
            text,
            None
            if request.logprobs is None
            else self._logprobs(choice, ids, logprobs, echoed=echoed),
            prompt_ids(choice.request.prompt) if self._with_ids and begins else None,
            list(piece.token_ids) if self._with_ids else None,
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
        named = token_names(self._request, self._renderer)
        for place, (id_, entry) in enumerate(zip(ids, logprobs, strict=True)):
            if place == echoed:
                offsets.restart()
            result.text_offset.append(offsets.next(id_))
            result.tokens.append(named(id_))
            if entry is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            result.token_logprobs.append(max(entry.logprob, LEAST))
            top: dict[str, float] = {}
            # Tokens that are parts of characters have the same text; the likeliest one is shown.
            for other, logprob in ((id_, entry.logprob), *entry.top):
                name = named(other)
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


def prompt_ids(prompt: Prompt) -> list[int] | None:
    """Return the ids of a prompt, or None if it has embeddings."""
    return None if prompt.has_rows else list(prompt.token_ids())
