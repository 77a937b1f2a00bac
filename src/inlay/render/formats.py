"""Formats of tool calls and reasoning, by vLLM's names or from the model's chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from inlay.render.output import Begins, OutputParser
from inlay.render.parsers import deepseek, harmony, llama, mistral
from inlay.render.parsers.calls import CallsParser, Tools, call_id, short_call_id
from inlay.render.parsers.hermes import CLOSE, OPEN, HermesParser, QwenCoderParser
from inlay.render.parsers.thinking import ThinkingParser


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A format of tool calls.

    Attributes:
        parser: makes the parser.
        tokens: its tags; some models have them as special tokens, which must not be skipped.
        make_id: makes ids of calls that the model's chat template accepts.
    """

    parser: Callable[[Tools], CallsParser]
    tokens: tuple[str, ...]
    make_id: Callable[[], str] = call_id


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """A format of reasoning: between tags, before the answer.

    Attributes:
        start: start tag.
        end: end tag.
        begins: position where an output begins if the prompt does not show it.
    """

    start: str
    end: str
    begins: Begins

    def begins_after(self, prompt: str) -> Begins:
        """Return the position where an output begins after `prompt`; its last tokens suffice.

        Chat templates may open or close the reasoning.
        """
        shown = prompt.rstrip()
        if shown.endswith(self.start):
            return Begins.INSIDE
        return Begins.BEHIND if shown.endswith(self.end) else self.begins

    def begins_within(self, content: str) -> Begins:
        """Return the position where an output begins that continues `content`."""
        if content.rfind(self.start) > content.rfind(self.end):
            return Begins.INSIDE
        return Begins.BEHIND if content.strip() else Begins.OPEN

    def parser(self, begins: Begins, answer: OutputParser) -> OutputParser:
        """Return a parser of one output; `answer` parses the text after the reasoning."""
        return ThinkingParser(self.start, self.end, begins, answer)


@dataclass(frozen=True, slots=True)
class ChannelForm:
    """A format with channels for reasoning, answer and tool calls, read by one parser."""

    tokens: tuple[str, ...] = (
        harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, harmony.END,
        harmony.RETURN, harmony.CALL,
    )  # fmt: skip
    answer: str = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
    """Start of an answer."""


CHANNELS = ChannelForm()

_DEEPSEEK = ToolForm(
    deepseek.DeepSeekParser,
    (deepseek.CALLS, deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END, deepseek.CALLS_END),
)

TOOL_FORMS: dict[str, ToolForm | ChannelForm] = {
    "hermes": ToolForm(HermesParser, (OPEN, CLOSE)),
    "qwen3_coder": ToolForm(QwenCoderParser, (OPEN, CLOSE)),
    "llama3_json": ToolForm(llama.LlamaParser, (llama.TAG,)),
    "mistral": ToolForm(
        mistral.MistralParser, (mistral.CALLS, mistral.CALL_ID, mistral.ARGS), short_call_id
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "openai": CHANNELS,
}
"""Formats of tool calls by the names of vLLM's parsers."""

REASONING_FORMS: dict[str, ReasoningForm | ChannelForm] = {
    "deepseek_r1": ReasoningForm("<think>", "</think>", Begins.INSIDE),
    "deepseek_v3": ReasoningForm("<think>", "</think>", Begins.OPEN),
    "qwen3": ReasoningForm("<think>", "</think>", Begins.OPEN),
    "mistral": ReasoningForm("[THINK]", "[/THINK]", Begins.OPEN),
    "openai_gptoss": CHANNELS,
}
"""Formats of reasoning by the names of vLLM's parsers."""


@lru_cache(maxsize=64)
def tool_form_of(templates: Sequence[str]) -> str | None:
    """Return the name of the tool-call format in some chat templates, or None."""
    return next((name for template in templates if (name := _tool_form(template))), None)


def _tool_form(template: str) -> str | None:
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "openai"
    if deepseek.SEPARATOR in template:
        return "deepseek_v3"
    if mistral.CALLS in template:
        return "mistral"
    if OPEN in template:
        if "<function=" in template:
            return "qwen3_coder"
        # Other models have tags of their own inside these.
        return "hermes" if "<arg_key>" not in template else None
    if llama.TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    return None


@lru_cache(maxsize=64)
def reasoning_form_of(templates: Sequence[str]) -> str | None:
    """Return the name of the reasoning format in some chat templates, or None."""
    for template in templates:
        if harmony.CHANNEL in template and harmony.MESSAGE in template:
            return "openai_gptoss"
        if "</think>" in template:
            return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
        if "[THINK]" in template:
            return "mistral"
    return None
