"""Items of input as they are kept: each with a type, an id and, of a message, parts."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inlay.api.openai.responses.items import item_id
from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer

Item = dict[str, Any]

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_KINDS = ", ".join(_PREFIXES)


def items_of(given: str | Sequence[Mapping[str, Any]] | None, owner_id: str) -> list[Item]:
    """Return the items of an input.

    Args:
        given: as a request has them.
        owner_id: of what they belong to; ids of items without one are made of it.

    Raises:
        InvalidRequestError: an item has no known type.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, owner_id, index) for index, item in enumerate(given)]


def _item(item: Mapping[str, Any], owner_id: str, index: int) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    prefix = _PREFIXES.get(kind) if isinstance(kind, str) else None
    if prefix is None:
        raise InvalidRequestError(
            f"items of type {str(kind)[:40]!r} are not supported; supported: {_KINDS}",
            param=f"[{index}].type",
        )
    made = {"id": item_id(prefix, f"{owner_id}/in", index), "status": "completed"}
    found = {**made, **{name: value for name, value in item.items() if value is not None}}
    found["type"] = kind
    content = found.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        more: Item = {"annotations": []} if part == "output_text" else {}
        found["content"] = [{"type": part, "text": content, **more}]
    return found


def encoded(items: Sequence[Mapping[str, Any]], lifted: Mapping[str, Buffer]) -> bytes:
    """Return items as JSON, with the data that was taken out of them as base64 again."""
    return restored(msgspec.json.encode(items), lifted)


def restored(body: bytes, lifted: Mapping[str, Buffer]) -> bytes:
    """Return JSON with the data that was taken out of it as base64 again."""
    for nonce, data in lifted.items():
        body = body.replace(nonce.encode(), b64encode(data.view))
    return body


decoder = msgspec.json.Decoder(list[Item])
