"""One answer of a chat, as it streams in."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from inlay.base.errors import EngineError, OverloadedError
from inlay_tools.http_client import EventReader, HttpClient

Kind: TypeAlias = Literal["text", "reasoning"]


@dataclass
class ChatReply:
    """An answer so far.

    Attributes:
        text: of the answer.
        reasoning: before it, if the model reasons.
        finish_reason: None while it is not complete.
        usage: tokens, as the server counts them.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, event: bytes) -> list[tuple[Kind, str]]:
        """Take in one event; return what it says.

        Raises:
            EngineError: it is no chunk of a chat.
        """
        try:
            chunk = msgspec.json.decode(event)
            self.usage = chunk.get("usage") or self.usage
            choices = chunk.get("choices") or ()
            said: list[tuple[Kind, str]] = []
            for choice in choices:
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                text = delta.get("content") or ""
                self.reasoning += reasoning
                self.text += text
                if reasoning:
                    said.append(("reasoning", reasoning))
                if text:
                    said.append(("text", text))
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        except (msgspec.DecodeError, AttributeError, TypeError) as error:
            raise EngineError("the server streamed something else than a chat") from error
        return said


async def streamed(
    client: HttpClient, body: dict[str, Any], answer: ChatReply
) -> AsyncGenerator[tuple[Kind, str], None]:
    """Ask, and yield the answer piece by piece; `answer` has all that came, also after an error.

    Close it, as by `contextlib.aclosing`: that ends the request.

    Raises:
        InlayError: the server refuses, fails in the middle, or is lost.
    """
    events = EventReader()
    async with client.streaming("POST", "/chat/completions", msgspec.json.encode(body)) as pieces:
        async for piece in pieces:
            for event in events.feed(piece.data):
                for said in answer.add(event):
                    yield said
    if not events.done:
        raise OverloadedError(f"{client.server.url}: the answer ended before it was complete")
