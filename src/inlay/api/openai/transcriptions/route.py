"""The routes: a file of sound is decoded, cut where it is quiet, and each piece is a chat."""

import asyncio
import tempfile
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from inlay.api.fields import renamed
from inlay.api.generation.chat import chat_model
from inlay.api.openai.chat.route import chat_completions
from inlay.api.openai.schema.transcriptions import (
    Task,
    TextDelta,
    TextDone,
    Transcription,
    TranscriptionUsage,
)
from inlay.api.openai.transcriptions.form import TranscriptionForm, wanted
from inlay.base.errors import InlayError, InvalidRequestError
from inlay.http.asgi import Message
from inlay.http.errors import error_json, internal_error
from inlay.http.inner_call import inner_call
from inlay.http.parsed_request import read_form
from inlay.http.references import unpacked_sound
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call, preparing_for
from inlay.http.sse import UNNAMED, EventStream
from inlay.media.audio import AudioChunks, AudioFrames, AudioGeometry, read_audio_header
from inlay.media.sound_files import sound_writer
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Buffer

_IN_MEMORY = 1024 * 1024
AT_ONCE = 4
"""Pieces of one file that are transcribed at the same time."""

FAMILIES = ("qwen2_audio", "qwen2_5_omni", "voxtral")
"""`model_type` of the models that write down what they hear when they are told to."""

_TOLD = {
    "transcribe": "Write down what is said, word for word. Answer with the text alone.",
    "translate": "Translate what is said into English. Answer with the translation alone.",
}


class _Piece(NamedTuple):
    """A piece of the sound: seconds, and a file."""

    start: float
    end: float
    data: bytes


class _Heard(NamedTuple):
    text: str
    input_tokens: int
    output_tokens: int


async def transcriptions(call: Call) -> None:
    """Answer with the text of a sound."""
    await _answer(call, "transcribe")


async def translations(call: Call) -> None:
    """Answer with the text of a sound in English."""
    await _answer(call, "translate")


async def _answer(call: Call, task: Task) -> None:
    server = call.server
    limit = server.settings.max_media_bytes
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
        file: BinaryIO = spool  # type: ignore[assignment]
        form = await read_form(call, "file", file, max_file_bytes=limit, flag="--max-media-bytes")
        request = wanted(form, task)
        model = chat_model(server, request.model)
        geometry = _geometry(model.card)
        size = form.file_bytes or 0
        call.reservation.grow(size)
        file.seek(0)
        data = Buffer(file.read())
    data = await unpacked_sound(call, data)
    header = read_audio_header(data.view)
    # Samples as float32, and once more as a file.
    call.reservation.grow(header.samples * 4 + header.samples_at(geometry.rate) * 8)
    pieces = await server.run_prepared(max(size, header.samples), _cut, data, geometry)
    del data
    async with RequestScope(server.inflight, call.receive, call.detach_deadline()):
        if request.stream:
            await _stream(call, request, model.name, pieces)
            return
        heard = await _all(call, request, model.name, pieces)
    await _shown(call, request, pieces, heard)


def _geometry(card: ModelCard) -> AudioGeometry:
    """Return how a model lays sound out. Raises `InvalidRequestError` if it hears none."""
    media = card.media
    if media is None or media.audio is None or media.family not in FAMILIES:
        raise InvalidRequestError(
            f"{card.name} writes down no sound; models that do are of the families "
            f"{', '.join(FAMILIES)}",
            param="model",
        )
    return media.audio


def _cut(data: Buffer, geometry: AudioGeometry) -> list[_Piece]:
    from inlay.media.sounds import decode_sound, quiet_cuts

    rate = geometry.rate
    sound = decode_sound(data.view, read_audio_header(data.view), rate)
    pieces = []
    for start, stop in quiet_cuts(sound, rate, _most(geometry)):
        writer = sound_writer("wav", rate, "file", whole=True)
        body = writer.add(Buffer(sound[start:stop].tobytes())) + writer.end()
        pieces.append(_Piece(start / rate, stop / rate, body))
    return pieces


def _most(geometry: AudioFrames | AudioChunks) -> int:
    return geometry.chunk if isinstance(geometry, AudioChunks) else geometry.max_samples


def _body(request: TranscriptionForm, model: str, piece: _Piece, *, stream: bool) -> bytes:
    told = [_TOLD[request.task]]
    if request.language is not None:
        told.append(f"The language is {request.language}.")
    if request.prompt is not None:
        told.append(f"Keep in mind: {request.prompt}")
    sound = {"data": b64encode(piece.data).decode(), "format": "wav"}
    content = [
        {"type": "input_audio", "input_audio": sound},
        {"type": "text", "text": " ".join(told)},
    ]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": request.temperature,
        "reasoning_effort": "none",
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.max_tokens is not None:
        body["max_completion_tokens"] = request.max_tokens
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body)


async def _all(
    call: Call, request: TranscriptionForm, model: str, pieces: list[_Piece]
) -> list[_Heard]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(piece: _Piece) -> _Heard:
        async with places:
            async for made in _hear(call, request, model, piece):
                if isinstance(made, _Heard):
                    return made
        raise AssertionError

    tasks = [asyncio.create_task(one(piece)) for piece in pieces]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _hear(
    call: Call, request: TranscriptionForm, model: str, piece: _Piece
) -> AsyncIterator[str | _Heard]:
    """Yield the text of a piece as it is written, then all of it. Raises `InlayError`."""
    client = call.reservation.client
    assert client is not None, "the call is of a client"
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    inner = inner_call(
        call.server,
        "/v1/chat/completions",
        _body(request, model, piece, stream=True),
        queue.put,
        request_id=call.request_id,
        caller=call.caller,
        client=client,
        budget=call.server.budget,
    )

    async def answer() -> None:
        preparing_for.set(inner.reservation)
        try:
            with inner.reservation, inner.ending:
                await chat_completions(inner)
        finally:
            await queue.put(None)

    task = asyncio.create_task(answer())
    text, rest, usage = "", b"", {"prompt_tokens": 0, "completion_tokens": 0}
    try:
        while (message := await queue.get()) is not None:
            *blocks, rest = (rest + message.get("body", b"")).split(b"\n\n")
            for block in blocks:
                if not block.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(block.removeprefix(b"data: "))
                if "error" in event:
                    if isinstance(inner.failed, InlayError):
                        raise inner.failed
                    raise internal_error(call.request_id)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if delta := choice["delta"].get("content"):
                        text += delta
                        yield delta
        await task
    except InlayError as error:
        # A form has no fields within fields.
        raise error.mapped(lambda path: renamed(_FIELDS, path[:1])) from None
    finally:
        task.cancel()
    yield _Heard(text.strip(), usage["prompt_tokens"], usage["completion_tokens"])


_FIELDS = {"messages": "file"}
"""Fields of the chat that a piece is, and those of the form that they are made of."""


async def _stream(call: Call, request: TranscriptionForm, model: str, pieces: list[_Piece]) -> None:
    stream = EventStream(call.send, UNNAMED, call.exchange)
    heard: list[_Heard] = []
    said = ""
    try:
        said = await _write(call, request, model, pieces, stream, heard)
    except InlayError as error:
        if not stream.started:
            raise
        call.failed = error
        await stream.finish([b"data: %b\n\n" % error_json(error, call.errors, call.request_id)])
        return
    await stream.finish([TextDone(said, _usage(heard))])


async def _write(
    call: Call,
    request: TranscriptionForm,
    model: str,
    pieces: list[_Piece],
    stream: EventStream,
    heard: list[_Heard],
) -> str:
    """Write the text of all pieces as events; return it."""
    said = ""
    for piece in pieces:
        gap, begun = " " if heard else "", False
        async for made in _hear(call, request, model, piece):
            if isinstance(made, _Heard):
                heard.append(made)
                continue
            delta = made if begun else made.lstrip()
            if delta:
                delta = delta if begun else gap + delta
                begun = True
                said += delta
                await stream.write([TextDelta(delta)])
    return said


def _usage(heard: list[_Heard]) -> TranscriptionUsage:
    given = sum(one.input_tokens for one in heard)
    made = sum(one.output_tokens for one in heard)
    return TranscriptionUsage(given, made, given + made)


async def _shown(
    call: Call, request: TranscriptionForm, pieces: list[_Piece], heard: list[_Heard]
) -> None:
    text = " ".join(one.text for one in heard if one.text)
    match request.form:
        case "json":
            await call.json(Transcription(text, _usage(heard)))
        case "verbose_json":
            language = "english" if request.task == "translate" else request.language or ""
            duration = round(pieces[-1].end, 3)
            await call.json(
                Transcription(text, _usage(heard), request.task, language, duration, None, None)
            )
        case "text":
            await _plain(call, text + "\n")
        case form:
            await _plain(call, _subtitles(form, pieces, heard))


async def _plain(call: Call, text: str) -> None:
    await call.bytes(text.encode(), (b"content-type", b"text/plain; charset=utf-8"))


def _subtitles(form: str, pieces: list[_Piece], heard: list[_Heard]) -> str:
    comma = "," if form == "srt" else "."
    blocks = [] if form == "srt" else ["WEBVTT\n"]
    for number, (piece, one) in enumerate(zip(pieces, heard, strict=True), 1):
        times = f"{_time(piece.start, comma)} --> {_time(piece.end, comma)}"
        head = f"{number}\n" if form == "srt" else ""
        blocks.append(f"{head}{times}\n{one.text}\n")
    return "\n".join(blocks)


def _time(seconds: float, comma: str) -> str:
    minutes, millis = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{millis // 1000:02}{comma}{millis % 1000:03}"
