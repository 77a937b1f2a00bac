"""JSON of chats with an image: the text as in any chat, then the image, then the end."""

import msgspec

from inlay.api.generation.choices import ChoicePiece, ChoiceState
from inlay.api.generation.generation import Pieces
from inlay.api.openai.chat.image import ChatImage
from inlay.api.openai.chat.shape import ChatShape
from inlay.api.openai.schema.chat import (
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ImagePart,
    ImageUrl,
    TextOutputPart,
)
from inlay.errors import InlayError
from inlay.http.sse import Event, EventStream
from inlay.render import ParsedOutput


class ImageChatShape:
    """A `ChatShape` whose end waits for the image.

    Args:
        text: shape of the text.
        image: what is drawn of it.
    """

    def __init__(self, text: ChatShape, image: ChatImage) -> None:
        self._text = text
        self._image = image
        self._written = ""
        self._end: tuple[ChoiceState, ChoicePiece] | None = None
        self._part: ImagePart | None = None

    def events(self, pieces: Pieces) -> list[Event]:
        """As `ResponseShape`; the end of the text is kept back."""
        kept: Pieces = []
        for choice, piece in pieces:
            self._written += ParsedOutput.of(piece.output).content
            if piece.finish_reason is not None:
                self._end = choice, piece._replace(text="", output=(), token_ids=(), logprobs=())
            kept.append((choice, piece._replace(finish_reason=None, stop_reason=None)))
        return self._text.events(kept)

    async def draw(self, stream: EventStream | None) -> None:
        """Draw the image; write its event where there is a stream."""
        (choice,) = self._text.choices
        if stream is None:
            for piece in choice.pieces:
                self._written += ParsedOutput.of(piece.output).content
        url = await self._image.draw(choice, self._written)
        self._part = ImagePart(ImageUrl(url))
        if stream is not None:
            shown = ChatChunkChoice(choice.index, ChatDelta(content=[self._part]))
            event = self._text.chunk(shown, modality="image", stage=self._image.stage)
            await stream.write([event])

    def closing_events(self) -> list[Event]:
        """As `ResponseShape`: the end of the text, then its usage."""
        ended = [] if self._end is None else self._text.events([self._end])
        return [*ended, *self._text.closing_events()]

    def failure_events(self, error: InlayError) -> list[Event]:
        """As `ResponseShape`."""
        return self._text.failure_events(error)

    def response(self) -> msgspec.Struct:
        """As `ResponseShape`: the message has the text and the image as parts."""
        found: ChatCompletion = self._text.response()
        if self._part is None:
            return found
        (choice,) = found.choices
        parts = [TextOutputPart(self._written), self._part]
        message = msgspec.structs.replace(choice.message, content=parts)
        choices = [msgspec.structs.replace(choice, message=message)]
        return msgspec.structs.replace(found, choices=choices)


__all__ = ["ImageChatShape"]
