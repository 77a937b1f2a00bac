"""Types of kept responses and conversations."""

from typing import Annotated, Any, Literal

import msgspec

from inlay.messages.fields import example, field

_HELLO = {"type": "message", "role": "user", "content": "Hello."}


class ResponseDeleted(msgspec.Struct, frozen=True):
    """A response that was deleted."""

    id: Annotated[str, field("id of the response.", "resp_5d0f")]
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(msgspec.Struct, frozen=True):
    """Items of a response's input, or of a conversation."""

    data: Annotated[list[dict[str, Any]], field("the items.", [_HELLO])]
    first_id: Annotated[str | None, field("id of the first of them.", "msg_5d0f")]
    last_id: Annotated[str | None, field("id of the last of them.", "msg_5d0f")]
    has_more: Annotated[bool, field("there are more behind them.")]
    object: Literal["list"] = "list"


class ConversationRequest(msgspec.Struct, kw_only=True):
    """A new conversation.

    Attributes:
        items: at most 20, as in the `input` of responses.
        metadata: returned as it came: at most 16 entries, keys of 64 characters and values of 512.
    """

    items: Annotated[list[dict[str, Any]] | None, example([_HELLO])] = None
    metadata: Annotated[dict[str, str] | None, example({"topic": "harbour"})] = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """A change of a conversation.

    Attributes:
        metadata: in the place of what it has.
    """

    metadata: Annotated[dict[str, str] | None, example({"topic": "harbour"})]


class ItemsRequest(msgspec.Struct, kw_only=True):
    """Items for a conversation.

    Attributes:
        items: 1 to 20, as in the `input` of responses.
    """

    items: Annotated[list[dict[str, Any]], example([_HELLO])]


class Conversation(msgspec.Struct, frozen=True):
    """A conversation."""

    id: Annotated[str, field("id of the conversation.", "conv_5d0f")]
    created_at: Annotated[int, field("Unix time of its creation.", 1764000000)]
    metadata: Annotated[dict[str, str], field("the client's own.", {"topic": "harbour"})]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(msgspec.Struct, frozen=True):
    """A conversation that was deleted."""

    id: Annotated[str, field("id of the conversation.", "conv_5d0f")]
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
