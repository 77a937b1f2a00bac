"""JSON of chats with sound: the transcript and the sound as they come, then the end."""

import pybase64
from msgspec import Struct
from msgspec.structs import replace

from inlay.api.generation.choices import ChoicePiece, ChoiceState
from inlay.api.generation.generation import Generation, Pieces
from inlay.api.openai.chat.shape import ChatShape
from inlay.api.openai.schema.chat import (
    AudioDelta,
    ChatAudioData,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
)
from inlay.base.errors import InlayError
from inlay.http.sse import Event, EventStream
from inlay.render import ParsedOutput, ToolCallDelta
from inlay_stages.chat.audio import ChatAudio


class AudioChatShape:
    """A `ChatShape` whose text is the transcript of a sound, and whose end waits for that.

    An answer whose sound is cut off ends by "length", as one whose text is. One that calls a tool
    is the call and the text before it: it has no sound, but in a stream that of the text so far.

    Args:
        text: shape of the text.
        generation: of the text.
        audio: how it is spoken.
        created: Unix time of the response; no sound is kept, so it is when that expires.
    """

    def __init__(self, text: ChatShape, generation: Generation, audio: ChatAudio) -> None:
        self._text = text
        self._generation = generation
        self._audio = audio
        self._written = ""
        self._file: list[bytes] = []
        self._end: tuple[ChoiceState, ChoicePiece] | None = None
        self._dropped = False

    def events(self, pieces: Pieces) -> list[Event]:
        """As `ResponseShape`; the end of the text is kept back."""
        events: list[Event] = []
        for choice, piece in pieces:
            said = ParsedOutput.of(piece.output)
            self._written += said.content
            calls = tuple(one for one in piece.output if isinstance(one, ToolCallDelta))
            bare = piece._replace(text="", output=calls, token_ids=(), logprobs=())
            if piece.finish_reason is not None:
                self._end = choice, bare._replace(output=())
            events += self._text.events(
                [(choice, bare._replace(finish_reason=None, stop_reason=None))]
            )
            if said.content:
                transcript = AudioDelta(self._audio.id, said.content)
                events.append(self._text.chunk(_of(choice, transcript)))
            if self._calls_tools(choice):
                continue
            # Until there is text it may be a call, and what has come is its sound.
            if self._written or not self._audio.may_drop:
                events += self._sounded(choice, self._audio.ready())
        return events

    def _calls_tools(self, choice: ChoiceState) -> bool:
        """Return True if there is no sound, or no more of it."""
        if choice.calls_tools and not self._dropped:
            self._dropped = True
            self._audio.drop()
        return self._dropped

    def _sounded(self, choice: ChoiceState, piece: bytes) -> list[Event]:
        if not piece:
            return []
        data = pybase64.b64encode_as_string(piece)
        return [self._chunk(choice, AudioDelta(self._audio.id, data=data))]

    def _chunk(self, choice: ChoiceState, delta: AudioDelta) -> ChatChunk:
        return self._text.chunk(_of(choice, delta), modality="audio", stage=self._audio.stage)

    async def speak(self, stream: EventStream | None) -> None:
        """Wait for the sound, if there is one; write its events where there is a stream."""
        (choice,) = self._text.choices
        if self._calls_tools(choice):
            return
        if stream is None:
            for piece in choice.pieces:
                self._written += ParsedOutput.of(piece.output).content
        while (more := await self._audio.next()) is not None:
            if stream is None:
                self._file.append(more)
                # Much of it is encoded in a thread.
                self._generation.bulk += len(more)
            else:
                await stream.write(self._sounded(choice, more))
        self._generation.add_usage(self._audio.text_stage, self._audio.usages)

    def texts(self, choice: ChoiceState) -> None:
        """Return None: a text is more than one event."""

    def closing_events(self) -> list[Event]:
        """As `ResponseShape`: the end of the sound and of the text, then usage."""
        (choice,) = self._text.choices
        events: list[Event] = []
        if not self._dropped:
            expires = AudioDelta(self._audio.id, expires_at=self._text.created)
            events.append(self._chunk(choice, expires))
        if self._end is not None:
            choice, piece = self._end
            if self._audio.limited and not self._dropped:
                piece = piece._replace(finish_reason="length", stop_reason=None)
            events += self._text.events([(choice, piece)])
        return [*events, *self._text.closing_events()]

    def failure_events(self, error: InlayError) -> list[Event]:
        return self._text.failure_events(error)

    def response(self) -> Struct:
        """As `ResponseShape`: as OpenAI's, the text is the transcript of the sound."""
        found: ChatCompletion = self._text.response()
        if self._dropped:
            return found
        (choice,) = found.choices
        file = b"".join(self._file)
        sound = ChatAudioData(
            self._audio.id, pybase64.b64encode_as_string(file), self._written, found.created
        )
        message = replace(choice.message, content=None, audio=sound)
        said = replace(choice, message=message)
        if self._audio.limited:
            said = replace(said, finish_reason="length", stop_reason=None)
        return replace(found, choices=[said])


def _of(choice: ChoiceState, delta: AudioDelta) -> ChatChunkChoice:
    return ChatChunkChoice(choice.index, ChatDelta(audio=delta))
