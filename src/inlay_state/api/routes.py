"""Routes of kept responses and conversations."""

from typing import Any

from inlay.api.openai.schema.responses import Response
from inlay.http.app import Routes
from inlay.http.openapi import Operation, Parameter
from inlay.http.paging import list_parameters
from inlay_state.api import conversations, responses
from inlay_state.api.pages import MOST, USUAL
from inlay_state.api.schema import (
    Conversation,
    ConversationDeleted,
    ConversationRequest,
    ConversationUpdate,
    ItemList,
    ItemsRequest,
    ResponseDeleted,
)

_RESPONSE = Parameter("id", "id of a response.", "resp_5d0f", place="path")
_CONVERSATION = Parameter("id", "id of a conversation.", "conv_5d0f", place="path")
_ITEM = Parameter("item", "id of an item.", "msg_5d0f", place="path")
_PAGE = list_parameters("msg_5d0f", "asc or desc, the newest first.", USUAL, MOST)
_STREAM = (
    Parameter(
        "stream", "true for the events of a background response.", "true", {"enum": ["true"]}
    ),
    Parameter(
        "starting_after", "number of the last event that is not wanted.", 5, {"type": "integer"}
    ),
)

_R, _C = "/v1/responses/{id}", "/v1/conversations/{id}"

ROUTES: Routes = (
    (Operation("POST", f"{_R}/cancel", "Cancel a background response.", None, Response,
        parameters=(_RESPONSE,)), responses.cancel),
    (Operation("GET", f"{_R}/input_items", "Items that a kept response was made of.", None,
        ItemList, parameters=(_RESPONSE, *_PAGE)), responses.input_items),
    (Operation("GET", _R, "A kept response.", None, Response,
        parameters=(_RESPONSE, *_STREAM)), responses.show),
    (Operation("DELETE", _R, "Delete a kept response.", None, ResponseDeleted,
        parameters=(_RESPONSE,)), responses.delete),
    (Operation("POST", "/v1/conversations", "Begin a conversation.",
        ConversationRequest, Conversation), conversations.create),
    (Operation("GET", f"{_C}/items/{{item}}", "One item of a conversation.", None, dict[str, Any],
        parameters=(_CONVERSATION, _ITEM)), conversations.show_item),
    (Operation("DELETE", f"{_C}/items/{{item}}", "Remove an item of a conversation.", None,
        Conversation, parameters=(_CONVERSATION, _ITEM)), conversations.delete_item),
    (Operation("POST", f"{_C}/items", "Add items to a conversation.", ItemsRequest, ItemList,
        parameters=(_CONVERSATION,)), conversations.add_items),
    (Operation("GET", f"{_C}/items", "Items of a conversation.", None, ItemList,
        parameters=(_CONVERSATION, *_PAGE)), conversations.list_items),
    (Operation("GET", _C, "A conversation.", None, Conversation,
        parameters=(_CONVERSATION,)), conversations.show),
    (Operation("POST", _C, "Change the metadata of a conversation.", ConversationUpdate,
        Conversation, parameters=(_CONVERSATION,)), conversations.update),
    (Operation("DELETE", _C, "Delete a conversation.", None, ConversationDeleted,
        parameters=(_CONVERSATION,)), conversations.delete),
)  # fmt: skip
