"""Translation of a request to `/v1/messages` into a chat: turns, blocks, tools and options."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from inlay.api.anthropic.schema import MessagesInput
from inlay.api.fields import check_depths, string_at
from inlay.api.generation.parts import content_source
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source
from inlay.http.bodies.media import MediaSource
from inlay.http.quoting import shown_at, shown_value
from inlay.media.data_url import as_data_url

_BLOCKS = {
    "user": ("text", "image", "prompt_embeds", "tool_result"),
    "assistant": ("text", "prompt_embeds", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "prompt_embeds"),
    "tool_result": ("text", "image", "prompt_embeds"),
}
"""Types of blocks by the role they may stand in, or by the block around them."""

_FREE_FORM = ("messages", "system", "tools", "tool_choice", "thinking", "chat_template_kwargs")

_ANY_TYPE = "application/octet-stream"
"""Type in the URL of an image in base64; its content decides what it is."""

_THINKING = ("enabled", "adaptive", "disabled")


class AnthropicChat(NamedTuple):
    """Turns of a request as the messages of a chat.

    Attributes:
        messages: as in a chat, with sources in place of embeddings and images.
        sources: those sources, in order.
        continues: True if the last message is the beginning of the answer.
    """

    messages: list[dict[str, Any]]
    sources: list[Source]
    continues: bool


def conversation(request: MessagesInput) -> AnthropicChat:
    """Return the messages of a request.

    Each result of a tool becomes a message. Other blocks of a turn stay together.

    Raises:
        InvalidRequestError: no messages, or blocks that are malformed or not supported.
    """
    check_depths(request, *_FREE_FORM)
    if not request.messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    turns = _Turns()
    if request.system:
        turns.say("system", request.system, "system")
    for number, message in enumerate(request.messages):
        where, role = f"messages[{number}]", message.get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(
                f"{where}.role must be 'user', 'assistant' or 'system', got "
                f"{shown_at(message, 'role')}",
                param=f"{where}.role",
            )
        content = message.get("content")
        # Null is no text, in every role; other servers answer [], and clients send it back.
        if (content == [] and role == "assistant") or (content is None and "content" in message):
            content = ""
        turns.say(role, content, f"{where}.content")
    last = turns.messages[-1]
    continues = last["role"] == "assistant"
    if continues and "tool_calls" in last:
        raise InvalidRequestError(
            f"{where}: the results of its tool_use blocks must follow, as tool_result blocks of a "
            "user's message",
            param=where,
        )
    return AnthropicChat(turns.messages, turns.sources, continues)


class _Turns:
    """Builder of messages.

    Attributes:
        messages: messages so far.
        sources: sources in them.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[Source] = []

    def say(self, role: str, content: object, where: str) -> None:
        """Add the turn of a role, whose content is at the path `where`."""
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
            return
        if not isinstance(content, list) or not content:
            raise InvalidRequestError(
                f"{where} must be a string or a list of blocks, and not empty, got "
                f"{shown_value(content)}",
                param=where,
            )
        turn: dict[str, Any] = {"role": role}
        said: list[object] = []
        thoughts: list[str] = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            match _kind(block, place, _BLOCKS[role]):
                case "tool_result":
                    self._add(turn, said)
                    turn, said = {"role": role}, []
                    self._result(block, place)
                case "thinking":
                    thoughts.append(string_at(block, "thinking", place))
                case "redacted_thinking":
                    pass  # encrypted by another server: nobody can read it here
                case "tool_use":
                    turn.setdefault("tool_calls", []).append(_call(block, place))
                case kind:
                    said.append(self._part(kind, block, place))
        if thoughts:
            turn["reasoning"] = "\n".join(thoughts)
        self._add(turn, said)

    def _add(self, turn: dict[str, Any], said: list[object]) -> None:
        """Add a turn, unless it is empty."""
        if said:
            turn["content"] = said
        if len(turn) > 1:
            self.messages.append(turn)
        elif turn["role"] == "assistant":
            self.messages.append({**turn, "content": ""})

    def _part(self, kind: str, block: Mapping[str, Any], where: str) -> object:
        """Return a block as a part of a chat's content."""
        if kind == "text":
            return {"type": "text", "text": string_at(block, "text", where)}
        source = content_source(block, where) if kind == "prompt_embeds" else _image(block, where)
        self.sources.append(source)
        return source

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        content = block.get("content")
        if isinstance(content, list):
            parts: list[object] = []
            for index, inner in enumerate(content):
                place = f"{where}.content[{index}]"
                parts.append(self._part(_kind(inner, place, _BLOCKS["tool_result"]), inner, place))
            content = parts
        elif content is not None and not isinstance(content, str):
            raise InvalidRequestError(
                f"{where}.content must be a string or a list of blocks, got {shown_value(content)}",
                param=f"{where}.content",
            )
        id_ = string_at(block, "tool_use_id", where)
        failed = block.get("is_error")
        if failed not in (None, True, False):
            raise InvalidRequestError(
                f"{where}.is_error must be true or false, got {shown_value(failed)}",
                param=f"{where}.is_error",
            )
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": id_,
                **({"is_error": True} if failed else {}),
                "content": content or "",
            }
        )


def _kind(block: object, where: str, served: tuple[str, ...]) -> str:
    """Return the type of a block. Raises `InvalidRequestError` unless it is one of `served`."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in served:
        got = shown_at(block, "type") if isinstance(block, dict) else shown_value(block)
        raise InvalidRequestError(
            f"{where}.type must be one of {', '.join(served)}, got {got}", param=f"{where}.type"
        )
    return str(kind)


def _image(block: Mapping[str, Any], where: str) -> MediaSource:
    place = f"{where}.source"
    match block.get("source"):
        case {"type": "base64", "data": str(data)}:
            return MediaSource(as_data_url(data, _ANY_TYPE), None, None, place)
        case {"type": "url", "url": str(url)}:
            return MediaSource(url, None, None, place)
        case {"type": "file", "file_id": str(id_)}:
            return MediaSource(None, None, None, place, ref=id_)
    raise InvalidRequestError(
        f"{place} must be an object of type 'base64' with data, 'url' with url, or 'file' with "
        f"file_id, got {shown_at(block, 'source')}",
        param=place,
    )


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequestError(
            f"{where}.input must be an object, got {shown_at(block, 'input')}",
            param=f"{where}.input",
        )
    function = {"name": string_at(block, "name", where), "arguments": given}
    return {"id": string_at(block, "id", where), "type": "function", "function": function}


def functions(request: MessagesInput) -> list[dict[str, Any]] | None:
    """Return the tools of a request in a chat's form.

    Raises:
        InvalidRequestError: a tool that a server would have to run, or one without a schema.
    """
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise InvalidRequestError(
                f"{where}.type must be 'custom', a tool that your own code runs, got "
                f"{shown_at(tool, 'type')}: inlay runs no tools itself",
                param=f"{where}.type",
            )
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"{where}.input_schema must be a JSON Schema, an object, got "
                f"{shown_at(tool, 'input_schema')}",
                param=f"{where}.input_schema",
            )
        more = {
            name: tool[name] for name in ("description", "strict") if tool.get(name) is not None
        }
        function = {"name": tool.get("name"), **more, "parameters": schema}
        found.append({"type": "function", "function": function})
    return found or None


def choice_of_tool(request: MessagesInput) -> str | dict[str, Any] | None:
    """Return `tool_choice` in a chat's form. Raises `InvalidRequestError` if it is malformed."""
    choice = request.tool_choice
    match None if choice is None else choice.get("type"):
        case None if choice is None:
            return None
        case "auto":
            return "auto" if request.tools else None
        case "any":
            return "required"
        case "none":
            return "none"
        case "tool" if choice is not None:
            name = string_at(choice, "name", "tool_choice")
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequestError(
        "tool_choice must be an object of type 'auto', 'any', 'none', or 'tool' with name, got "
        f"{shown_value(choice)}",
        param="tool_choice",
    )


class Thinking(NamedTuple):
    """Setting of a request for the model's reasoning.

    Attributes:
        budget: tokens after which it is ended, or None.
        shown: True if it is part of the answer.
        variables: variables of chat templates that switch it on or off.
    """

    budget: int | None
    shown: bool
    variables: Mapping[str, bool]


def thinking_of(request: MessagesInput) -> Thinking:
    """Return what `thinking` asks for. Raises `InvalidRequestError` if it is malformed."""
    wanted = request.thinking
    if wanted is None:
        return Thinking(None, True, {})
    kind, display = wanted.get("type"), wanted.get("display")
    if kind not in _THINKING:
        raise InvalidRequestError(
            f"thinking.type must be one of {', '.join(_THINKING)}, got {shown_at(wanted, 'type')}",
            param="thinking.type",
        )
    if display not in (None, "summarized", "omitted"):
        raise InvalidRequestError(
            f"thinking.display must be 'summarized' or 'omitted', got {shown_value(display)}",
            param="thinking.display",
        )
    budget = wanted.get("budget_tokens") if kind == "enabled" else None
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        raise InvalidRequestError(
            "thinking.budget_tokens must be an integer of at least 1, got "
            f"{shown_at(wanted, 'budget_tokens')}",
            param="thinking.budget_tokens",
        )
    thinks = kind != "disabled"
    # Names of the switch in templates; one that a template does not read changes nothing.
    variables = dict.fromkeys(("enable_thinking", "thinking"), thinks)
    return Thinking(budget, thinks and display != "omitted", variables)


def format_of(request: MessagesInput) -> dict[str, Any] | None:
    """Return `output_config.format` as a chat's `response_format`.

    Raises `InvalidRequestError` if it is malformed.
    """
    wanted = None if request.output_config is None else request.output_config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise InvalidRequestError(
            "output_config.format must be an object of type 'json_schema' with schema, a JSON "
            f"Schema, got {shown_value(wanted)}",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}
