"""Output format of a chat: its parsers, and the position from which a grammar binds."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from inlay.api.generation.grammars import check_served
from inlay.api.generation.tools import ToolChoice, ToolUse
from inlay.base.errors import InvalidRequestError
from inlay.http.settings import FrontendSettings
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, ThinkingBudget
from inlay.render import Begins, OutputFormat, OutputParser, ReasoningIds, Renderer
from inlay.render.formats import (
    CHANNELS,
    REASONING_FORMS,
    TOOL_FORMS,
    ChannelForm,
    ReasoningForm,
    ToolForm,
    reasoning_form_of,
    tool_form_of,
)
from inlay.render.output import ContentParser
from inlay.render.parsers.calls import Tools
from inlay.render.parsers.harmony import HarmonyParser

_FIELD = "thinking_token_budget"

_TAIL = 16
"""Tokens at the end of a prompt that are checked for an open reasoning tag."""


class ModelFormats(NamedTuple):
    """Formats of a model's tool calls and reasoning; None where the format is not known."""

    tools: ToolForm | ChannelForm | None
    reasoning: ReasoningForm | ChannelForm | None

    @classmethod
    def of(cls, settings: FrontendSettings, renderer: Renderer) -> "ModelFormats":
        """Return the formats that the settings name, or those that the chat templates show."""
        templates = renderer.chat_templates
        tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
        tools_name = tool_form_of(templates) if tools == "auto" else tools
        reasoning_name = reasoning_form_of(templates) if reasoning == "auto" else reasoning
        return cls(TOOL_FORMS.get(tools_name or ""), REASONING_FORMS.get(reasoning_name or ""))

    @property
    def channels(self) -> bool:
        """True if one parser reads answer, reasoning and calls."""
        return CHANNELS in self


def check_tool_use(
    settings: FrontendSettings, card: ModelCard, forms: ModelFormats, use: ToolUse
) -> None:
    """Raise `InvalidRequestError` if tool calls cannot be parsed, or cannot be enforced."""
    check_served(use.grammar, card, "tool_choice")
    if use.choice is not ToolChoice.AUTO:
        return
    if not settings.enable_auto_tool_choice:
        raise InvalidRequestError(
            "tool_choice 'auto' is switched off on this server (--no-enable-auto-tool-choice); "
            "'none', 'required' and a named function are served",
            param="tool_choice",
        )
    if forms.tools is None:
        raise InvalidRequestError(
            "tool_choice 'auto' needs a model whose chat template shows a known form of tool "
            "calls, and this one's does not: name the form with --tool-call-parser, or choose "
            "'none', 'required' or a function",
            param="tool_choice",
        )


def has_thinking_budget(settings: FrontendSettings, renderer: Renderer) -> bool:
    """Return True for a model that writes its reasoning between two tags, as a budget needs."""
    return isinstance(ModelFormats.of(settings, renderer).reasoning, ReasoningForm)


def thinking_budget(tokens: int, settings: FrontendSettings, renderer: Renderer) -> ThinkingBudget:
    """Return the budget that `thinking_token_budget` sets, before its prompts are known.

    Raises:
        InvalidRequestError: the model's reasoning format is not known, or has no end tag.
    """
    form = ModelFormats.of(settings, renderer).reasoning
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
    return ThinkingBudget(tokens, start, end)


def _ids(renderer: Renderer, tag: str) -> tuple[int, ...]:
    id_ = renderer.token_id(tag)
    return renderer.encode(tag, add_special_tokens=False) if id_ is None else (id_,)


def output_format_for(
    forms: ModelFormats,
    renderer: Renderer,
    prompt: Prompt,
    use: ToolUse,
    grammar: Grammar | None,
    *,
    continued: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[OutputFormat, Grammar | None]:
    """Return the output format of a chat, and the grammar of its outputs.

    A grammar binds the answer, not the reasoning before it. If the prompt leaves the reasoning
    open, the grammar binds after the reasoning's end tag. Otherwise it binds from the first token.

    Args:
        forms: formats of the model.
        renderer: of the model.
        prompt: of the chat.
        use: tools of the request; their grammar takes precedence.
        grammar: of the request.
        continued: the messages, if the last of them is to be continued.
    """
    grammar = use.grammar or grammar
    tools = Tools(
        use.schemas if use.choice is not ToolChoice.NONE else {},
        use.parallel,
        **({"make_id": forms.tools.make_id} if isinstance(forms.tools, ToolForm) else {}),
    )
    if forms.channels and use.grammar is None:
        bound = grammar and msgspec.structs.replace(
            grammar, after=renderer.encode(CHANNELS.answer, add_special_tokens=False)
        )
        own = tools if forms.tools is not None else Tools()
        return OutputFormat(lambda: HarmonyParser(own), frozenset(CHANNELS.tokens)), bound
    calls = (
        forms.tools if use.choice is ToolChoice.AUTO and isinstance(forms.tools, ToolForm) else None
    )
    tokens = frozenset(calls.tokens if calls is not None else ())

    def forced() -> OutputParser:
        return use.forced_parser(tools)

    answer: Callable[[], OutputParser] = ContentParser
    if use.grammar is not None:
        answer = forced
    elif calls is not None:
        answer = partial(calls.parser, tools)
    form = forms.reasoning
    if not isinstance(form, ReasoningForm):
        return OutputFormat(answer, tokens), grammar
    begins = _begins(form, renderer, prompt, continued)
    start, end = renderer.token_id(form.start), renderer.token_id(form.end)
    if grammar is not None:
        if begins is Begins.INSIDE and end is not None:
            grammar = msgspec.structs.replace(grammar, after=(end,))
        else:
            begins = Begins.BEHIND
    ids = None if start is None or end is None else ReasoningIds(start, end, begins)
    read = OutputFormat(lambda: form.parser(begins, answer()), tokens | {form.start, form.end}, ids)
    return read, grammar


def _begins(
    form: ReasoningForm,
    renderer: Renderer,
    prompt: Prompt,
    continued: Sequence[Mapping[str, Any]] | None,
) -> Begins:
    if continued is not None:
        return form.begins_within(_text(continued[-1].get("content")))
    last = prompt.segments[-1]
    return form.begins_after(renderer.decode(last.ids[-_TAIL:]) if isinstance(last, Tokens) else "")


def _text(content: object) -> str:
    """Return the text in a message's content."""
    if isinstance(content, list):
        return "".join(map(_text, content))
    if isinstance(content, Mapping):
        content = content.get("text")
    return content if isinstance(content, str) else ""
