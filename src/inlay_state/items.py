"""Items of input as they are kept: each with a type, an id and, of a message, parts."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inlay.api.fields import check_depth
from inlay.api.generation.messages import read_messages
from inlay.api.openai.responses.input import PARTS, conversation, kind_of, unknown_kind
from inlay.api.openai.responses.items import item_id
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.http.bodies.embeds import TensorSource, check_source
from inlay.messages.prompt import Buffer

Item = dict[str, Any]

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_CHUNK_BYTES = 3 * 64 * 1024


def items_of(
    given: str | Sequence[Mapping[str, Any]] | None, owner_id: str, field: str = "input"
) -> list[Item]:
    """Return the items of an input.

    Args:
        given: as a request has them.
        owner_id: of what they belong to; ids of items without one are made of it.
        field: of the request, for errors.

    Raises:
        InvalidRequestError: an item has no known type.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, owner_id, index, field) for index, item in enumerate(given)]


def _item(item: Mapping[str, Any], owner_id: str, index: int, field: str) -> Item:
    kind = kind_of(item)
    prefix = PREFIXES.get(kind)
    if prefix is None:
        raise unknown_kind(item, f"{field}[{index}]")
    made = {"id": input_id(prefix, owner_id, index), "status": "completed"}
    found = {**made, **{name: value for name, value in item.items() if value is not None}}
    found["type"] = kind
    content = found.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        more: Item = {"annotations": []} if part == "output_text" else {}
        found["content"] = [{"type": part, "text": content, **more}]
    return found


def check_items(items: Sequence[Item]) -> None:
    """Raise `InvalidRequestError` for items, or parts of them, that no model can be told."""
    check_depth([*items], "input")
    said = conversation(ResponsesRequest(input=[*items]))
    read_messages(said.messages, _check_rows, lambda _: None, named=said.named, served=PARTS)


def _check_rows(source: TensorSource) -> None:
    """Check a source of rows, which are read when a model is told them."""
    check_source(source)
    if source.part is not None:
        raise InvalidRequestError(
            f"{source.param}.part: embeddings of items that are kept are data or ref",
            param=f"{source.param}.part",
        )


def input_id(prefix: str, owner_id: str, index: int) -> str:
    """Return the id of an item of an input without one, as `item_id` those of an output."""
    return item_id(prefix, f"{owner_id}/in", index)


def encoded(value: object, lifted: Mapping[str, Buffer]) -> bytearray:
    """Return JSON, with the data that was taken out of it as base64 again.

    One pass, in pieces: it takes little more memory than its result.
    """
    body = memoryview(msgspec.json.encode(value))
    if not lifted:
        return bytearray(body)
    # The longest first: a name may begin another.
    names = sorted(lifted, key=len, reverse=True)
    made, end = bytearray(), 0
    for found in re.finditer("|".join(map(re.escape, names)).encode(), body):
        made += body[end : found.start()]
        data = lifted[found[0].decode()].view
        for start in range(0, len(data), _CHUNK_BYTES):
            yield_gil()
            made += b64encode(data[start : start + _CHUNK_BYTES])
        end = found.end()
    made += body[end:]
    return made


decoder = msgspec.json.Decoder(list[Item])
