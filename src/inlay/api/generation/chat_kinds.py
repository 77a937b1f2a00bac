"""Chats that are more than the text of one model: extensions answer them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from inlay.api.generation.generation import Generation
from inlay.api.generation.messages import MessageReader
from inlay.api.generation.respond import ResponseShape
from inlay.api.schema.chat import ChatRequest
from inlay.http.parsed_request import ParsedRequest
from inlay.http.server import Call, Server
from inlay.http.sse import EventStream
from inlay.messages.card import ModelCard
from inlay.messages.request import EngineUsage
from inlay.router import ServedModel


class UpstreamInput(NamedTuple):
    """Input of the model that answers, where others have written before it.

    Attributes:
        incoming: the request.
        messages: reads its messages.
        name: of that model in `usages`.
        usages: of the models before it, by name.
    """

    incoming: ParsedRequest[Any]
    messages: MessageReader
    name: str
    usages: Mapping[str, EngineUsage]


class HasGeneration(Protocol):
    """A chat that is ready for generation."""

    @property
    def generation(self) -> Generation:
        """The engine requests, not sent yet."""


Prepare: TypeAlias = Callable[
    [Call, ParsedRequest[Any], ChatRequest, ServedModel, str, MessageReader, msgspec.Struct],
    Awaitable[HasGeneration],
]
"""Prepares a chat for one model, as `inlay.api.generation.chat.prepare_chat`."""


class Responder(Protocol):
    """The part of one answer that is not the text of the model that answers."""

    def begin(self, generation: Generation) -> None:
        """Change what is asked of that model, before it is asked."""

    def shape(self, text: Any) -> ResponseShape:
        """Return the shape of the answer around that of its text, of the API that is asked."""

    async def rest(self, stream: EventStream | None) -> None:
        """Do what follows the text; write its events where there is a stream."""


class ChatKind(Protocol):
    """The chats that an extension answers: `Extension.chat`."""

    def applies(self, request: ChatRequest, card: ModelCard) -> bool:
        """Return True for those that it answers."""

    def model(self, server: Server, found: ServedModel) -> ServedModel:
        """Return the model that answers where a client names `found`."""

    async def responder(
        self, call: Call, request: ChatRequest, card: ModelCard, response_id: str
    ) -> Responder | None:
        """Return what makes the rest of an answer, before its text is asked for; None if nothing.

        Raises:
            InlayError: the request is not valid, or cannot be answered now.
        """

    async def upstream(
        self,
        call: Call,
        incoming: ParsedRequest[Any],
        request: ChatRequest,
        card: ModelCard,
        response_id: str,
        messages: MessageReader,
        prepare: Prepare,
    ) -> UpstreamInput | None:
        """Have models before the one that answers write; None where there are none.

        Raises:
            ClientGone: the client left.
            InlayError: one of them cannot be asked, or failed.
        """
