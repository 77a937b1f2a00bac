"""Answers of `/v1/audio/speech`: a whole file, its pieces as they are made, or events."""

from typing import Literal, Protocol

import msgspec
import pybase64

from inlay.api.generation.respond import stages_of
from inlay.base.errors import InlayError
from inlay.http.errors import shown
from inlay.http.server import Call
from inlay.http.sse import EventFraming, EventStream, data_event
from inlay.messages.request import EngineUsage, Payload
from inlay_stages.api.schema.failure import StreamFailure
from inlay_stages.api.schema.speech import SpeechDelta, SpeechDone, SpeechUsage
from inlay_stages.api.sound_files import SoundFile
from inlay_stages.walk import StageOutput

_FRAMING = EventFraming(data_event, b"")
"""OpenAI's of these events: without names, and nothing after the last."""


class SpeechAnswer(Protocol):
    """An answer in the making."""

    @property
    def started(self) -> bool:
        """True once its status has been sent."""

    def __init__(self, call: Call, file: SoundFile) -> None: ...

    async def take(self, payload: Payload) -> None:
        """Take what the last stage gives."""

    def end(self, output: StageOutput) -> None:
        """Note the last output."""

    async def fail(self, error: InlayError) -> None:
        """End an answer that has started with an error."""

    async def finish(self) -> None:
        """Send what is left, and the end."""


def _media_type(file: SoundFile) -> tuple[bytes, bytes]:
    return (b"content-type", file.media_type)


class File:
    """One file, sent when all of it is made, with its length in its header."""

    started = False

    def __init__(self, call: Call, file: SoundFile) -> None:
        self._call, self._file = call, file

    async def take(self, payload: Payload) -> None:
        await self._file.take(payload)

    def end(self, output: StageOutput) -> None: ...

    async def fail(self, error: InlayError) -> None:
        """As `SpeechAnswer`; it has not started before its end."""
        raise error

    async def finish(self) -> None:
        await self._call.bytes(await self._file.end(), _media_type(self._file))


class Pieces:
    """A file whose pieces are sent as they are made; its header does not know its length."""

    def __init__(self, call: Call, file: SoundFile) -> None:
        self._call, self._file = call, file
        self.started = False

    async def take(self, payload: Payload) -> None:
        if piece := await self._file.take(payload):
            await self._write(piece, more=True)

    def end(self, output: StageOutput) -> None: ...

    async def fail(self, error: InlayError) -> None:
        """As `SpeechAnswer`: the connection is cut, so that nobody takes the file for whole."""
        raise error

    async def finish(self) -> None:
        await self._write(await self._file.end(), more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        send = self._call.send
        if not self.started:
            self.started = True
            headers = [_media_type(self._file)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})


class Events:
    """Events in OpenAI's form, with pieces of the file and then usage."""

    def __init__(self, call: Call, file: SoundFile) -> None:
        self._call, self._file = call, file
        self._stream = EventStream(call.send, _FRAMING)
        self._end: StageOutput | None = None

    @property
    def started(self) -> bool:
        return self._stream.started

    async def take(self, payload: Payload) -> None:
        if piece := await self._file.take(payload):
            await self._stream.write([await self._event(piece)])

    def end(self, output: StageOutput) -> None:
        self._end = output

    async def fail(self, error: InlayError) -> None:
        self._call.failed = error
        self._call.server.metrics.failed(error)
        await self._stream.finish([StreamFailure.of(shown(error))])

    async def finish(self) -> None:
        events: list[msgspec.Struct | bytes] = []
        if piece := await self._file.end():
            events.append(await self._event(piece))
        if self._end is not None:
            reason: Literal["stop", "length"] = "length" if self._end.limited else "stop"
            events.append(SpeechDone(usage=_usage(self._end), finish_reason=reason))
        await self._stream.finish(events)

    async def _event(self, piece: bytes) -> bytes:
        return await self._call.server.run_prepared(len(piece), _delta, piece)


def _delta(piece: bytes) -> bytes:
    """Return the event of a piece, encoded."""
    return data_event(SpeechDelta(audio=pybase64.b64encode_as_string(piece)))


def _usage(end: StageOutput) -> SpeechUsage:
    """Return the positions that the language model read, and the codes that the talker made."""
    usages = [*end.usages.values()]
    read = usages[0] if usages else EngineUsage(0, 0)
    codes = usages[1].completion_tokens if len(usages) > 1 else 0
    return SpeechUsage(read.prompt_tokens, codes, read.prompt_tokens + codes, stages_of(end.usages))
