"""The request field `thinking_token_budget`, as vLLM's."""

import msgspec

from inlay.api.openai.generation import GenerationRequest
from inlay.errors import InvalidRequestError
from inlay.frontend.generation.output_format import ModelFormats
from inlay.prompt import Prompt
from inlay.render import OutputFormat, Renderer
from inlay.render.formats import ReasoningForm
from inlay.render.output import Begins
from inlay.request import Sampling, ThinkingBudget

_FIELD = "thinking_token_budget"


def with_budget(
    sampling: Sampling, request: GenerationRequest, forms: ModelFormats, renderer: Renderer
) -> Sampling:
    """Return `sampling` with the request's budget, before its prompts are known.

    Raises:
        InvalidRequestError: the model's reasoning format is not known, or has no end tag.
    """
    tokens = request.thinking_token_budget
    if tokens is None or tokens == -1:
        return sampling
    form = forms.reasoning
    if form is None:
        raise InvalidRequestError(
            f"{_FIELD} needs a model whose form of reasoning is known, and this one's chat "
            "template shows none: name the form with --reasoning-parser",
            param=_FIELD,
        )
    if not isinstance(form, ReasoningForm):
        raise InvalidRequestError(
            f"{_FIELD} needs a model that writes its reasoning between two tags; this one writes "
            "it in a channel",
            param=_FIELD,
        )
    start, end = (_ids(renderer, tag) for tag in (form.start, form.end))
    return msgspec.structs.replace(sampling, thinking=ThinkingBudget(tokens, start, end))


def for_prompt(sampling: Sampling, prompt: Prompt, output: OutputFormat) -> Sampling:
    """Return `sampling` with the tokens that `prompt` has already spent of the budget.

    `output` tells whether the output begins inside the reasoning.
    """
    budget = sampling.thinking
    if budget is None:
        return sampling
    spent = budget.spent_in(prompt)
    if spent is None and output.reasoning is not None and output.reasoning.begins is Begins.INSIDE:
        spent = 0
    return msgspec.structs.replace(sampling, thinking=msgspec.structs.replace(budget, spent=spent))


def _ids(renderer: Renderer, tag: str) -> tuple[int, ...]:
    id_ = renderer.token_id(tag)
    return renderer.encode(tag, add_special_tokens=False) if id_ is None else (id_,)


__all__ = ["for_prompt", "with_budget"]
