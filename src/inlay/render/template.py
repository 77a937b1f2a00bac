"""Chat templates: Jinja as in transformers (5.23), sandboxed and bounded in time and size."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from inlay.base.errors import InvalidRequestError, why_unusable
from inlay.base.pace import Unwanted, check_wanted
from inlay.render.turns import (
    AS_IT_IS,
    CALL_ID,
    PROBE_TOOLS,
    Content,
    Holds,
    TurnForm,
    Written,
    forms,
    probe,
)
from inlay.tensors.page_prompts import PagePrompts

MAX_CHARACTERS = 2**25
"""Maximum length of a rendered chat."""

MAX_SECONDS = 10.0
"""Maximum time of a template, checked whenever it has written something."""

_TEXTS = ("first\npart", 'second "part"')
"""Texts for probing templates; a template that prints a list would escape them."""

_RESULT = "probe_result"

_MEDIA_PARTS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "image": ({"type": "image"}, {"type": "image_url"}),
    "audio": (
        {"type": "audio"}, {"type": "audio_url"}, {"type": "input_audio"},
        {"type": "audio", "audio": ""}, {"type": "audio", "audio_url": ""},
    ),
    "video": ({"type": "video"}, {"type": "video_url"}, {"type": "video", "video": ""}),
}  # fmt: skip
"""Parts that templates write a placeholder for, by kind; some ask for a type, some for a key."""


class Reads(NamedTuple):
    """Forms of content that a template supports: a string, one text part, several text parts."""

    text: bool
    part: bool
    parts: bool

    def shape(self, texts: Sequence[str]) -> Content:
        """Return texts in the richest form of content that the template supports."""
        if texts and self.parts:
            return [{"type": "text", "text": text} for text in texts]
        joined = "\n".join(texts)
        return [{"type": "text", "text": joined}] if self.part and not self.text else joined

    def say(self, text: str) -> Content:
        return text if self.text else self.shape([text])


class ChatTemplates:
    """Chat templates of a model: one, or several by name; "tool_use" is for requests with tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = {
            name: ChatTemplate(source, special_tokens) for name, source in sources.items()
        }

    @classmethod
    def load(
        cls, directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> "ChatTemplates":
        """Load the templates of a model directory; files precede `tokenizer_config.json`.

        A model of pages has one of its own (`inlay.tensors.page_prompts`), whatever its files hold.

        Raises:
            InvalidRequestError: a template file cannot be read.
        """
        if (pages := PagePrompts.of(directory)) is not None:
            return cls({"default": pages.template()}, special_tokens)
        files = {"default": directory / "chat_template.jinja"}
        files |= {
            path.stem: path
            for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
        }
        sources = {name: _read(path) for name, path in files.items() if path.is_file()}
        given = config.get("chat_template")
        if not sources and isinstance(given, str):
            sources = {"default": given}
        elif not sources and isinstance(given, list):
            sources = {entry["name"]: entry["template"] for entry in given}
        return cls(sources, special_tokens)

    @property
    def sources(self) -> tuple[str, ...]:
        """Texts of all templates, the one for tools first."""
        names = sorted(self._templates, key=lambda name: name != "tool_use")
        return tuple(self._templates[name].source for name in names)

    def choose(self, *, tools: bool) -> "ChatTemplate":
        """Return the template for a request with or without tools.

        Raises:
            InvalidRequestError: the model has none.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            named = f", only {', '.join(sorted(self._templates))}" if self._templates else ""
            raise InvalidRequestError(
                f"the model has no default chat template{named}: serve it with --chat-template, or "
                "use completions",
                param="messages",
            )
        return template


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}", param="model") from error


class ChatTemplate:
    """One template. Compiled at first use; thread-safe.

    Attributes:
        source: text of the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None
        self._reads: dict[str, Reads] = {}
        self._forms: dict[tuple[Holds, bool], TurnForm | None] = {}
        self._media_parts: dict[tuple[str, str, str], Mapping[str, str] | None] = {}
        self._variables: frozenset[str] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a chat. `variables` take precedence over special tokens of the same name.

        Raises:
            InvalidRequestError: the template refused the messages, failed on them, wrote too much,
                or took too long.
        """
        values = {
            "tools": tools,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        written = 0
        try:
            for piece in self.compiled().generate(values):
                check_wanted()
                pieces.append(piece)
                written += len(piece)
                if written > MAX_CHARACTERS:
                    raise InvalidRequestError(
                        f"the chat template wrote more than {MAX_CHARACTERS} characters",
                        param="messages",
                    )
                if time.monotonic() > deadline:
                    raise InvalidRequestError(
                        f"the chat template took more than {MAX_SECONDS:g} seconds",
                        param="messages",
                    )
        except (InvalidRequestError, Unwanted):
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template: {error}", param="messages") from error
        except Exception as error:  # a template's expressions may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"the chat template failed on these messages: {reason}", param="messages"
            ) from error
        return "".join(pieces)

    def compiled(self) -> jinja2.Template:
        """Return the compiled template.

        Raises:
            InvalidRequestError: it is not a valid template.
        """
        if self._compiled is None:
            try:
                self._compiled = _environment().from_string(self.source)
            except jinja2.TemplateSyntaxError as error:
                raise InvalidRequestError(
                    f"the chat template is not valid, line {error.lineno}: {error.message}",
                    param="chat_template",
                ) from error
        return self._compiled

    def variables(self) -> frozenset[str]:
        """Return the variables that the template reads.

        Other variables in `chat_template_kwargs` have no effect.

        Raises:
            InvalidRequestError: it is not a valid template.
        """
        if self._variables is None:
            self.compiled()
            tree = _environment().parse(self.source)
            self._variables = frozenset(meta.find_undeclared_variables(tree))
        return self._variables

    def names(self, text: str) -> bool:
        """Return True if `text` is a string literal of the template, as a supported role is."""
        return text in self._literals

    @cached_property
    def _literals(self) -> frozenset[str]:
        tree = _environment().parse(self.source)
        return frozenset(node.value for node in tree.find_all(Const) if isinstance(node.value, str))

    def reads(self, role: str) -> "Reads":
        """Return the forms of content that the template supports in a message of `role`.

        Found by rendering a probe: templates read content in too many ways (loops, macros, filters,
        only the first part) to find it in the source. Other roles are treated as the user's.
        """
        role = _probed(role)
        known = self._reads.get(role)
        if known is None:
            known = self._reads[role] = self._try_forms(role)
        return known

    def media_part(self, role: str, kind: str, placeholder: str) -> Mapping[str, str] | None:
        """Return the part of a kind for which the template writes `placeholder` once, or None.

        In a message of `role`, among text parts. Found by rendering a probe, as `reads`.
        """
        key = _probed(role), kind, placeholder
        if key not in self._media_parts:
            self._media_parts[key] = next(
                (part for part in _MEDIA_PARTS[kind] if self._writes_it(key[0], part, placeholder)),
                None,
            )
        return self._media_parts[key]

    def _writes_it(self, role: str, part: Mapping[str, str], placeholder: str) -> bool:
        first, second = ({"type": "text", "text": text} for text in _TEXTS)
        text = self._rendered(role, [first, part, second])
        without = self._rendered(role, [first, second])
        if text is None or without is None or not _has_in_order(text, _TEXTS):
            return False
        return text.count(placeholder) == 1 and placeholder not in without

    def form_of(self, holds: Holds, *, tools: bool = False) -> TurnForm | None:
        """Return the form of a turn of the assistant that the template writes whole.

        Found by rendering a probe, as `reads`, with tools or without: some templates write calls
        only where there are tools. Reasoning may be left out where no form shows it: models are
        trained without that of past turns. None if other words are lost in every form.
        """
        if holds == Holds(reasoning=False, text=True, calls=0):
            return AS_IT_IS
        key = holds, tools
        if key not in self._forms:
            self._forms[key] = self._find_form(holds, PROBE_TOOLS if tools else None)
        return self._forms[key]

    def _find_form(
        self, holds: Holds, tools: Sequence[Mapping[str, Any]] | None
    ) -> TurnForm | None:
        say = self.reads("assistant").say
        turn = probe(holds, say)
        best: tuple[Written, TurnForm] | None = None
        lost = False
        for form in forms(holds):
            text = self._tried([_OTHER, *form.say(turn, say)], tools)
            written = None if text is None else Written.of(text, holds, form)
            lost = lost or (text is not None and written is None)
            if written is not None and (best is None or written < best[0]):
                best = written, form
                if not any(written):
                    break
        if best is not None:
            return best[1]
        # What a template refuses is said in its own words.
        return None if lost and holds.calls else AS_IT_IS

    @cached_property
    def loses_results(self) -> bool:
        """True if the template passes over messages of the role `tool` without a word."""
        text = self._rendered("tool", _RESULT)
        return text is not None and _RESULT not in text

    def _try_forms(self, role: str) -> "Reads":
        first, second = ({"type": "text", "text": text} for text in _TEXTS)
        return Reads(
            text=self._writes(role, _TEXTS[0], _TEXTS[:1]),
            part=self._writes(role, [first], _TEXTS[:1]),
            parts=self._writes(role, [first, second], _TEXTS),
        )

    def _writes(self, role: str, content: object, expected: Sequence[str]) -> bool:
        """Return True if a chat with `content` renders with all of `expected`, in order."""
        text = self._rendered(role, content)
        return text is not None and _has_in_order(text, expected)

    def _rendered(self, role: str, content: object) -> str | None:
        """Return a chat with `content` in a message of `role`, or None if the template fails."""
        tried: dict[str, object] = {"role": role, "content": content}
        if role == "tool":
            tried["tool_call_id"] = CALL_ID
        after = [_OTHER] if role in ("system", "developer") else []
        return self._tried([*self._before(role), tried, *after])

    def _before(self, role: str) -> list[Mapping[str, object]]:
        """Return the messages before a probe of `role`."""
        if role == "tool":
            calls = Holds(False, False, 1)
            form, say = self.form_of(calls) or AS_IT_IS, self.reads("assistant").say
            return [_OTHER, *form.say(probe(calls, say), say)]
        return [_OTHER] if role == "assistant" else []

    def _tried(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | None:
        try:
            return self.render(messages, tools=tools, add_generation_prompt=False, variables={})
        except InvalidRequestError:
            return None


_OTHER: Mapping[str, object] = {"role": "user", "content": "x"}


def _probed(role: str) -> str:
    return role if role in ("system", "developer", "assistant", "tool") else "user"


def _has_in_order(text: str, expected: Sequence[str]) -> bool:
    place = 0
    for piece in expected:
        place = text.find(piece, place)
        if place < 0:
            return False
    return True


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox that bounds the two operators by which a short expression makes a huge value."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, unless the result would be too large."""
        if operator == "**":
            if abs(left) > 2**16 or abs(right) > 64:
                raise jinja2.TemplateError(f"{left} ** {right} is too large")
        else:
            value, times = (right, left) if isinstance(left, int) else (left, right)
            if (
                isinstance(value, str | bytes | list | tuple)
                and len(value) * times > MAX_CHARACTERS
            ):
                raise jinja2.TemplateError(
                    f"a value of length {len(value)} times {times} is too long"
                )
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """Tag `{% generation %}`, which marks assistant text for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 (an instance variable to the base class)

    def parse(self, parser: Parser) -> list[Node]:
        """Return the nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> SandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def read_template(given: str) -> str:
    """Return the text of a chat template.

    Args:
        given: path of its file, or the template itself. As in vLLM, it is the template if there
            is no such file and it has a brace or a line break.

    Raises:
        InvalidRequestError: no such file and no template, or a template with an error in its
            syntax.
    """
    try:
        text = Path(given).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if not any(character in given for character in "{}\n"):
            raise InvalidRequestError(
                f"cannot read the chat template {given!r}: {why_unusable(error)}",
                param="chat_template",
            ) from error
        text = given
    ChatTemplate(text, {}).compiled()
    return text
