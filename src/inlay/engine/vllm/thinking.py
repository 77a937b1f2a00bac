"""Thinking budgets, which vLLM holds to where it knows the tags of the model's reasoning."""

from pathlib import Path
from typing import Any

from vllm.config.reasoning import ReasoningConfig

from inlay.base.errors import InvalidRequestError
from inlay.messages.request import Request
from inlay.render import Renderer
from inlay.render.formats import REASONING_FORMS, ReasoningForm, reasoning_form_of

PARAM = "thinking_token_budget"


def turn_on(arguments: Any, directory: Path) -> None:
    """Name the tags of the chat template at `directory` in vLLM's `arguments`, unless named."""
    if arguments.reasoning_config is not None:
        return
    form = REASONING_FORMS.get(reasoning_form_of(Renderer.load(directory).chat_templates) or "")
    if isinstance(form, ReasoningForm):
        arguments.reasoning_config = ReasoningConfig(
            reasoning_start_str=form.start, reasoning_end_str=form.end
        )


def counts(config: Any) -> bool:
    """Return True if vLLM, by its `VllmConfig`, knows where thinking begins and ends."""
    return config.reasoning_config is not None and bool(config.reasoning_config.enabled)


def check(request: Request, config: Any) -> None:
    """Return if vLLM counts the thinking of `request` as its budget says.

    Raises:
        InvalidRequestError: it would look for other tags, or miss that the output begins by
            thinking.
    """
    budget = request.sampling.thinking
    if budget is None:
        return
    known = config.reasoning_config
    tags = (tuple(known.reasoning_start_token_ids), tuple(known.reasoning_end_token_ids))
    if tags != (budget.start, budget.end):
        raise InvalidRequestError(
            f"{PARAM}: vLLM was started for reasoning between {known.reasoning_start_str!r} and "
            f"{known.reasoning_end_str!r}, and the frontend reads another form",
            param=PARAM,
        )
    if budget.spent != budget.spent_in(request.prompt):
        raise InvalidRequestError(
            f"{PARAM}: the model begins by thinking although its prompt does not end within "
            f"{known.reasoning_start_str!r}, and vLLM would not count it",
            param=PARAM,
        )
