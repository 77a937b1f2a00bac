"""Checks of a request to `/v1/responses`, and its translation into a chat: items, tools, format."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inlay.api.fields import check_depth, check_depths, check_unserved, string_at
from inlay.api.generation.parts import in_content
from inlay.api.openai.schema.responses import ELSEWHERE, ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source
from inlay.http.quoting import shown_at, shown_value

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_FREE_FORM = (
    "input",
    "prompt_cache_options",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "structured_outputs",
)

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512

PARTS = (
    "input_text, output_text, refusal, prompt_embeds, input_image, image_embeds, input_audio, "
    "audio_url, audio_embeds, video_url"
)
"""Types of the parts of a content."""

_ITEMS = "message, function_call, function_call_output, reasoning"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles, with their role in chat templates; `developer` is rendered as `system`."""

_CONTENT = {"message": "content", "function_call_output": "output"}
"""Types of items with parts, and the field that holds the parts."""

_PARTIAL = ("in_progress", "incomplete")


class ResponsesChat(NamedTuple):
    """Items of a request as the messages of a chat.

    Attributes:
        messages: as in a chat; contents are still as the client sent them.
        named: path in the request of each message's content.
        continues: True if the last message is an incomplete answer to be continued.
    """

    messages: list[dict[str, Any]]
    named: list[str]
    continues: bool


def in_input(request: ResponsesRequest) -> list[Source]:
    """Return the sources of embeddings and images in a request, in order."""
    found: list[Source] = []
    if isinstance(request.input, list):
        for number, item in enumerate(request.input):
            field = _CONTENT.get(kind_of(item))
            if field is not None:
                found += in_content(
                    item.get(field),
                    f"input[{number}].{field}",
                    of_answer=item.get("role") == "assistant",
                )
    return found


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item; "" if it has none. Messages may leave it out."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    return kind if isinstance(kind, str) else ""


def unknown_kind(item: Mapping[str, Any], where: str) -> InvalidRequestError:
    """Return the error for an item, at the path `where`, of a type that is not served."""
    kind = kind_of(item)
    if kind == "item_reference":
        return InvalidRequestError(
            f"{where}: item_reference is not supported: send the item itself, or go on with "
            "previous_response_id or conversation (--response-store)",
            param=where,
        )
    what = (
        f"items of type {kind[:40]!r} are not supported"
        if kind
        else f"an item must have a type, a string, got {shown_at(item, 'type')}"
    )
    return InvalidRequestError(f"{where}: {what}; supported: {_ITEMS}", param=f"{where}.type")


def conversation(request: ResponsesRequest) -> ResponsesChat:
    """Return the messages of a request.

    Consecutive items of the assistant (reasoning, text, calls) become one message. So do texts of
    the system and the developer at the beginning, with the instructions first, because many
    templates support only one such message.

    Raises:
        InvalidRequestError: no items, or items that are not supported.
    """
    items = request.input
    if items is None or items == []:
        raise InvalidRequestError(
            "input must be a string or a list of items, and not empty, got "
            f"{'nothing' if items is None else '[]'}",
            param="input",
        )
    turns = _Turns()
    if request.instructions:
        turns.say("system", request.instructions, "instructions")
    if isinstance(items, str):
        turns.say("user", items, "input")
        return ResponsesChat(turns.messages, turns.named, continues=False)
    for number, item in enumerate(items):
        turns.add(item, f"input[{number}]")
    if not turns.messages:
        raise InvalidRequestError("input holds nothing that a model reads", param="input")
    last = items[-1]
    continues = (
        kind_of(last) == "message"
        and last.get("role") == "assistant"
        and last.get("status") in _PARTIAL
    )
    return ResponsesChat(*_opening_joined(turns.messages, turns.named), continues)


def _opening_joined(
    messages: list[dict[str, Any]], named: list[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Join the system messages at the beginning, as far as they hold only text."""
    texts: list[str] = []
    for message in messages:
        text = _text(message["content"]) if message["role"] == "system" else None
        if text is None:
            break
        texts.append(text)
    if len(texts) < 2:
        return messages, named
    opening = {"role": "system", "content": "\n\n".join(texts)}
    return [opening, *messages[len(texts) :]], [named[0], *named[len(texts) :]]


def _text(content: object) -> str | None:
    """Return a content that is one text, else None."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        content = part.get("text") if part.get("type") in ("input_text", "text") else None
    return content if isinstance(content, str) else None


class _Turns:
    """Builder of messages from items.

    Attributes:
        messages: messages so far.
        named: path in the request of each message's content.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.named: list[str] = []
        self._turn: dict[str, Any] | None = None

    def say(self, role: str, content: object, where: str, **more: Any) -> None:
        """Add a message that is not the assistant's."""
        self._turn = None
        self.messages.append({"role": role, **more, "content": content})
        self.named.append(where)

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add the item at the path `where`."""
        if item.get("id") is not None:
            string_at(item, "id", where)
        match kind_of(item):
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._output(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case _:
                raise unknown_kind(item, where)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {shown_at(item, 'role')}",
                param=f"{where}.role",
            )
        content = _given(item, "content", where)
        if role != "assistant":
            self.say(_ROLES[role], content, f"{where}.content")
            return
        turn = self._of_assistant(where, "content")
        turn["content"] = content
        self.named[-1] = f"{where}.content"

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        call_id, name, arguments = (
            string_at(item, field, where) for field in ("call_id", "name", "arguments")
        )
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._of_assistant(where).setdefault("tool_calls", []).append(call)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        output = _given(item, "output", where)
        more = {} if item.get("name") is None else {"name": string_at(item, "name", where)}
        call_id = string_at(item, "call_id", where)
        self.say("tool", output, f"{where}.output", tool_call_id=call_id, **more)

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = _reasoning_text(item, "content", where) or _reasoning_text(item, "summary", where)
        # Reasoning that another server has encrypted cannot be read here and is left out.
        if text:
            turn = self._of_assistant(where, "reasoning", "content", "tool_calls")
            turn["reasoning"] = text

    def _of_assistant(self, where: str, *taken: str) -> dict[str, Any]:
        """Return the assistant's current message; a new one if it has a field in `taken`."""
        if self._turn is None or any(name in self._turn for name in taken):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
            self.named.append(where)
        return self._turn


def _given(item: Mapping[str, Any], field: str, where: str) -> object:
    """Return a content; null is no text. Raises `InvalidRequestError` if it is missing."""
    if field not in item:
        raise InvalidRequestError(
            f"{where}.{field} must be a string or a list of parts, got {shown_at(item, field)}",
            param=f"{where}.{field}",
        )
    return "" if item[field] is None else item[field]


def _reasoning_text(item: Mapping[str, Any], field: str, where: str) -> str:
    parts = item.get(field)
    if parts is None:
        return ""
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InvalidRequestError(
            f"{where}.{field} must be a list of parts", param=f"{where}.{field}"
        )
    return "\n".join(
        string_at(part, "text", f"{where}.{field}[{index}]") for index, part in enumerate(parts)
    )


def functions(request: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return the tools of a request in a chat's form.

    If `tool_choice` allows only some of them, the others are left out.

    Raises:
        InvalidRequestError: not a function.
    """
    if not request.tools:
        return None
    found = [_function(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return found
    given = {tool["function"]["name"] for tool in found}
    allowed = set(_allowed(choice))
    if not allowed <= given:
        raise InvalidRequestError(
            f"tool_choice.tools names {min(allowed - given)[:80]!r}, which is not one of the tools",
            param="tool_choice.tools",
        )
    return [tool for tool in found if tool["function"]["name"] in allowed]


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequestError(
            f"{where}: tools must be of type 'function', which your own code runs; got "
            f"{shown_at(tool, 'type')}: inlay runs no tools itself",
            param=f"{where}.type",
        )
    if not string_at(tool, "name", where):
        raise InvalidRequestError(f"{where}.name must not be empty", param=f"{where}.name")
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(
            f"{where}.parameters must be a JSON schema, an object, got {type(parameters).__name__}",
            param=f"{where}.parameters",
        )
    fields = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in fields if tool.get(name) is not None},
    }


def choice_of_tool(request: ResponsesRequest) -> str | dict[str, Any] | None:
    """Return `tool_choice` in a chat's form. Raises `InvalidRequestError` if it is malformed."""
    choice = request.tool_choice
    if isinstance(choice, dict):
        kind, name = choice.get("type"), choice.get("name")
        if kind == "function" and isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
        if kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
            return str(choice["mode"])
    elif choice in (None, "none", "auto"):
        return choice if request.tools else None
    elif choice == "required":
        return choice
    raise InvalidRequestError(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [...]}, got "
        f"{shown_value(choice)}",
        param="tool_choice",
    )


def _allowed(choice: Mapping[str, Any]) -> Sequence[str]:
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(
            "tool_choice.tools must be a list of functions, and not empty",
            param="tool_choice.tools",
        )
    names: list[str] = []
    for index, tool in enumerate(tools):
        where = f"tool_choice.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequestError(
                f"{where} must be {{'type': 'function', 'name': ...}}", param=where
            )
        names.append(string_at(tool, "name", where))
    return names


def format_of(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` as a chat's `response_format`; None for text.

    Raises `InvalidRequestError` if it is malformed.
    """
    wanted = None if request.text is None else request.text.format
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise InvalidRequestError(
            "text.format.type must be 'text', 'json_object' or 'json_schema', got "
            f"{shown_value(kind)}",
            param="text.format.type",
        )
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"text.format.schema must be a JSON schema, an object, got {shown_value(schema)}",
            param="text.format.schema",
        )
    name = string_at(wanted, "name", "text.format")
    more = {
        field: wanted[field] for field in ("strict", "description") if wanted.get(field) is not None
    }
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}


_STATELESS = "inlay keeps no state between requests unless it is started with --response-store; "
_OF_STATE = {
    "background": "ask with stream, or wait for the answer",
    "conversation": "send the items of the conversation as input",
    "previous_response_id": "send the items of the conversation as input",
}


def check_stateless(request: ResponsesRequest) -> None:
    """Raise `InvalidRequestError` for a field that only a server that keeps responses serves."""
    for name, instead in _OF_STATE.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise InvalidRequestError(
                f"{name} is not supported: {_STATELESS}{instead}; got {shown_value(value)}",
                param=name,
            )


def check_responses(request: ResponsesRequest) -> None:
    """Raise `InvalidRequestError` for a field that is not served, with the alternative."""
    _check_elsewhere(request)
    check_unserved(request)
    check_depths(request, *_FREE_FORM)
    if request.text is not None:
        check_depth(request.text.format, "text.format")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise InvalidRequestError(
            f"max_output_tokens must be at least 1, got {request.max_output_tokens}",
            param="max_output_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    _check_include(request)
    check_metadata(request.metadata or {})


def _check_elsewhere(request: ResponsesRequest) -> None:
    for name, here in ELSEWHERE.items():
        if getattr(request, name) is not None:
            raise InvalidRequestError(
                f"{name} is a field of chat completions; in responses it is {here}", param=name
            )
    if request.n not in (None, 1):
        raise InvalidRequestError(
            f"n must be 1, got {request.n}: a response has one answer", param="n"
        )


def _check_include(request: ResponsesRequest) -> None:
    for name in request.include or ():
        if name not in _INCLUDABLE:
            raise InvalidRequestError(
                f"include may hold {', '.join(_INCLUDABLE)}; got {name[:80]!r}", param="include"
            )
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise InvalidRequestError(
            f"top_logprobs is only allowed when include has {LOGPROBS!r}", param="top_logprobs"
        )


def check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(metadata)} entries; at most {MAX_METADATA}", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise InvalidRequestError(
                f"metadata: a key may have {MAX_KEY} characters and a value {MAX_VALUE}, got "
                f"{len(key)} and {len(value)}",
                param="metadata",
            )
