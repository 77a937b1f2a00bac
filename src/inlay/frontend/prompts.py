"""The prompts of a completions request."""

from collections.abc import Sequence

from inlay.errors import InvalidRequestError
from inlay.frontend.embeds import Embeddings
from inlay.frontend.sampling import check_ids
from inlay.frontend.sources import in_completion, part_source
from inlay.prompt import Prompt, Segment, Tokens, split_point
from inlay.protocol.openai.completions import CompletionRequest, PromptPart, TextPart, TokenIdsPart
from inlay.protocol.openai.embeddings import TextsRequest
from inlay.protocol.openai.generation import GenerationRequest
from inlay.protocol.work import ModelCard
from inlay.render import Renderer


class PromptReader:
    """Makes prompts for one model. CPU work, safe to call from any thread."""

    def __init__(
        self, request: CompletionRequest, card: ModelCard, renderer: Renderer, embeddings: Embeddings
    ) -> None:
        self._request = request
        self._card = card
        self._renderer = renderer
        self._embeddings = embeddings
        self._special = request.add_special_tokens is not False

    def prompts(self, *, most: int) -> list[Prompt]:
        """Every prompt of the request, in order.

        Raises:
            InvalidRequestError: none, more than `most`, or one that is not a prompt for this model.
            NotFoundError: a reference to what is not there.
        """
        request = self._request
        if request.prompt_embeds is not None and request.prompt_embeds != []:
            sources = in_completion(request)
            _check_count(len(sources), most)
            found = []
            for source in sources:
                found += [Prompt.of(rows) for rows in self._embeddings.prompts(source)]
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

    def _list(self, prompt: list[int | str | PromptPart | list[int | PromptPart]], most: int) -> list[Prompt]:
        if all(isinstance(item, str) for item in prompt):
            _check_count(len(prompt), most)
            return [self._text(item) for item in prompt if isinstance(item, str)]
        if all(isinstance(item, list) for item in prompt):
            _check_count(len(prompt), most)
            return [
                self._one(item, f"prompt[{i}]") for i, item in enumerate(prompt) if isinstance(item, list)
            ]
        flat = [item for item in prompt if not isinstance(item, str | list)]
        if len(flat) != len(prompt):
            raise InvalidRequestError(
                "prompt is a list of strings, of token ids, of parts, or of lists of token ids or of parts; got a "
                "list of several of these",
                param="prompt",
            )
        return [self._one(flat, "prompt")]

    def _one(self, items: Sequence[int | PromptPart], param: str) -> Prompt:
        ids = [item for item in items if isinstance(item, int)]
        parts = [item for item in items if not isinstance(item, int)]
        if ids and parts:
            raise InvalidRequestError(f"{param} holds token ids and parts; give ids as a part", param=param)
        if not items:
            raise InvalidRequestError(f"{param} is empty", param=param)
        if ids:
            return Prompt.of(self._ids(ids, param))
        segments: list[Segment] = []
        for index, part in enumerate(parts):
            segments += self._part(part, index, f"{param}[{index}]")
        return Prompt.of(*segments)

    def _part(self, part: PromptPart, index: int, param: str) -> list[Segment]:
        if isinstance(part, TextPart):
            # Only the beginning of a prompt is where a tokenizer's own first token belongs.
            special = self._special and index == 0
            return [Tokens(self._renderer.encode(part.text, add_special_tokens=special))]
        if isinstance(part, TokenIdsPart):
            return [self._ids(part.token_ids, f"{param}.token_ids")]
        return [self._embeddings.one(part_source(part, param))]

    def _text(self, text: str) -> Prompt:
        return Prompt.of(Tokens(self._renderer.encode(text, add_special_tokens=self._special)))

    def _ids(self, ids: list[int], param: str) -> Tokens:
        check_ids(ids, self._card.vocab_size, param)
        return Tokens(ids)


def truncated(
    prompt: Prompt, request: GenerationRequest | TextsRequest, limit: int, max_tokens: int | None
) -> Prompt:
    """What `request` keeps of a prompt, which shares its memory. Atomic segments are kept whole or not at all.

    Args:
        prompt: whole.
        request: says how much is kept, and which side.
        limit: positions the model takes.
        max_tokens: of the output, for which room is left when as much as fits is kept; None asks for one at least.

    Raises:
        InvalidRequestError: more than the model takes is to be kept, or nothing is left.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == 0 or keep > limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {limit}, got {keep}",
            param="truncate_prompt_tokens",
        )
    if keep < 0:
        keep = max(1, limit - (1 if max_tokens is None else max_tokens))
    length = len(prompt)
    if length <= keep:
        return prompt
    bounds = prompt.atomic_bounds()
    if request.truncation_side == "right":
        kept = prompt.slice(0, split_point(bounds, keep))
    else:
        start = length - keep
        if split_point(bounds, start) != start:
            start = next(stop for first, stop in bounds if first < start < stop)
        kept = prompt.slice(start, length)
    if not len(kept):
        raise InvalidRequestError(
            f"truncate_prompt_tokens leaves nothing of the prompt: {keep} positions do not hold its embeddings that "
            "may not be split",
            param="truncate_prompt_tokens",
        )
    return kept


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(
            f"the request asks for {count} prompts; at most {most} choices are allowed", param="prompt"
        )
