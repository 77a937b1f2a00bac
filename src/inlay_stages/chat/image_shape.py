"""JSON of chats with an image: the text as in any chat, then the image, then the end."""

import msgspec

from inlay.api.generation.choices import ChoicePiece, ChoiceState
from inlay.api.generation.generation import Generation, Pieces
from inlay.api.openai.chat.shape import ChatShape
from inlay.api.openai.schema.chat import (
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ImagePart,
    ImageUrl,
    TextOutputPart,
)
from inlay.base.errors import InlayError
from inlay.http.server import Call
from inlay.http.sse import Event, EventStream, data_event
from inlay.messages.prompt import Buffer
from inlay.render import ParsedOutput
from inlay_stages.chat.image import ChatImage


class ImageChatShape:
    """A `ChatShape` whose end waits for the image."""

    def __init__(
        self, call: Call, text: ChatShape, generation: Generation, image: ChatImage
    ) -> None:
        self._call = call
        self._text = text
        self._generation = generation
        self._image = image
        self._written = ""
        self._end: tuple[ChoiceState, ChoicePiece] | None = None
        self._file: Buffer | None = None

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
        """Draw the image; write its event where there is a stream.

        An answer that calls a tool has none: the one that follows the tool's result has.
        """
        (choice,) = self._text.choices
        if choice.calls_tools:
            return
        if stream is None:
            for piece in choice.pieces:
                self._written += ParsedOutput.of(piece.output).content
        file = await self._image.draw(self._written)
        self._generation.add_usage(self._image.text_stage, self._image.usages)
        if stream is None:
            self._file = file
            # A large one is encoded in a thread.
            self._generation.bulk += len(file)
        else:
            await stream.write([await self._call.server.run_prepared(len(file), self._event, file)])

    def _event(self, file: Buffer) -> bytes:
        (choice,) = self._text.choices
        shown = ChatChunkChoice(choice.index, ChatDelta(content=[self._part(file)]))
        return data_event(self._text.chunk(shown, modality="image", stage=self._image.stage))

    def _part(self, file: Buffer) -> ImagePart:
        return ImagePart(ImageUrl(self._image.url(file)))

    def texts(self, choice: ChoiceState) -> None:
        """Return None: the text is kept too."""

    def closing_events(self) -> list[Event]:
        """As `ResponseShape`: the end of the text, then its usage."""
        ended = [] if self._end is None else self._text.events([self._end])
        return [*ended, *self._text.closing_events()]

    def failure_events(self, error: InlayError) -> list[Event]:
        return self._text.failure_events(error)

    def response(self) -> msgspec.Struct:
        """As `ResponseShape`: the message has the text and the image as parts."""
        found: ChatCompletion = self._text.response()
        if self._file is None:
            return found
        (choice,) = found.choices
        parts = [TextOutputPart(self._written), self._part(self._file)]
        message = msgspec.structs.replace(choice.message, content=parts)
        choices = [msgspec.structs.replace(choice, message=message)]
        return msgspec.structs.replace(found, choices=choices)
