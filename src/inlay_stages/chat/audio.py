"""The sound of a chat of a pipeline: what its language model writes, spoken meanwhile."""

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from inlay.api.generation.generation import Generation
from inlay.api.schema.chat import ChatRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay.media.positions import media_runs
from inlay.media.sound_files import FORMATS
from inlay.messages.card import ModelCard
from inlay.messages.request import EngineUsage, Input, Request
from inlay_stages.api.sound_files import SoundFile
from inlay_stages.api.speaking import SpeechPlan, speaks
from inlay_stages.api.stage_request import all_awake, stage_request, take_places
from inlay_stages.stage_result import StageResult
from inlay_stages.walk import walk

_WAITING = 16
"""Pieces of sound that wait for the response before the last stage's stream is read on."""
_PCM = "pcm16"
_FORMATS = (*(name for name in FORMATS if name != "pcm"), _PCM)
"""Formats by the names that chats have for them."""
_NOT_WITH_AUDIO = ("logprobs", "response_format", "structured_outputs", "stop")
"""Fields of what is shown with text. Behind a stop string the talker would go on to hear."""


class ChatAudio:
    """The sound of one answer.

    Attributes:
        id: of the sound.
        stage: that makes it.
        text_stage: that writes the text.
        usages: of the stages that have ended, by name.
        limited: the sound ends where the talker may make no more of it.
        may_drop: the answer may be a call of a tool, which is not spoken.
    """

    def __init__(
        self, call: Call, request: ChatRequest, plan: "SoundPlan", generation: Generation, id_: str
    ) -> None:
        """Begin to listen to the text. Raises `InvalidRequestError` for too long a prompt."""
        (asked,) = generation.requests
        speaker = plan.speaker
        # With rows of an adapter, which stand before every prompt.
        positions = generation.prompt_tokens
        codes = speaker.codes(positions, "messages")
        params = speaker.params(
            plan.voice,
            prompt_tokens=positions,
            media=media_runs(asked.prompt, positions - len(asked.prompt)),
            seed=asked.sampling.seed,
            max_tokens=codes,
            format_=plan.format,
        )
        call.reservation.grow(speaker.num_bytes(codes))
        sampling = replace(asked.sampling, hidden_states=speaker.states)
        window = speaker.steps[0].edges[0].window
        generation.requests = [replace(asked, params=sampling, hold=window)]
        generation.sink = self._making = StageResult(continues=True, hold=call.reservation.grow)

        def make(stage: str, inputs: tuple[Input, ...]) -> Request:
            return stage_request(call, id_, params[stage], request.priority or 0, stage, inputs)

        self.id = f"audio-{secrets.token_hex(12)}"
        self.stage = speaker.steps[-1].model
        self.usages: Mapping[str, EngineUsage] = {}
        self.text_stage = plan.text_stage
        self.limited = False
        self.may_drop = bool(request.tools)
        self._call = call
        self._file = plan.file
        self._writer = plan.writer
        self._steps = speaker.steps
        self._make = make
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._ended = False
        self._speaking = asyncio.create_task(self._speak())
        # The text raises it, where that has not ended yet.
        self._speaking.add_done_callback(lambda task: task.cancelled() or task.exception())
        call.ending.callback(self._speaking.cancel)

    async def _speak(self) -> None:
        router, hold = self._call.server.router, self._call.reservation.grow
        given: dict[str | None, StageResult] = {self._writer: self._making}
        try:
            await all_awake(self._call.server, self._steps)
            async with aclosing(walk(router, self._steps, given, self._make, hold)) as outputs:
                async for found in outputs:
                    self.usages = {str(name): used for name, used in found.usages.items()}
                    self.limited = bool(found.limited)
                    for payload in found.payloads:
                        await self._put(await self._file.take(payload))
            self._making.detach()
            await self._put(await self._file.end())
        except Exception as error:
            self._making.give_up(error)
            raise
        finally:
            self._ended = True
            if not self._pieces.full():
                self._pieces.put_nowait(None)

    async def _put(self, piece: bytes) -> None:
        if piece:
            await self._pieces.put(piece)

    def drop(self) -> None:
        """Have the text go on unheard: it calls a tool."""
        self._speaking.cancel()
        self._making.detach()

    def ready(self) -> bytes:
        """Return what has come of the file since it was last asked for."""
        found = []
        while not self._pieces.empty():
            found.append(self._pieces.get_nowait() or b"")
        return b"".join(found)

    async def next(self) -> bytes | None:
        """Return what the file goes on with once there is some; None at its end.

        Raises:
            InlayError: as `inlay_stages.walk.walk`.
        """
        if not (self._ended and self._pieces.empty()):
            piece = await self._pieces.get()
            if piece is not None:
                return piece + self.ready()
        await self._speaking
        return None


class SoundPlan(NamedTuple):
    """The sound that a chat asks for, with a place at each stage that makes it.

    Attributes:
        speaker: the stages.
        writer: name of the language model that is spoken.
        text_stage: that it is.
        voice: one of the card's.
        format: of the file.
        file: takes the sound.
    """

    speaker: SpeechPlan
    writer: str
    text_stage: str
    voice: str
    format: str
    file: SoundFile


def sound_plan(call: Call, request: ChatRequest, model: ModelCard) -> SoundPlan | None:
    """Return the sound that a chat asks for, before anything is computed; None without one.

    Raises:
        InvalidRequestError: `audio` without its modality; the model does not speak, or not so.
        OverloadedError: a stage has no worker that is ready.
        RateLimitedError: a stage is full.
    """
    if "audio" not in (request.modalities or ()):
        if request.audio is not None:
            raise InvalidRequestError(
                'audio says how an answer is spoken; ask for it with modalities ["text", "audio"]',
                param="audio",
            )
        return None
    if not speaks(model):
        raise InvalidRequestError(
            f'modalities has "audio"; the model `{model.name}` does not speak', param="modalities"
        )
    if (request.n or 1) > 1:
        raise InvalidRequestError(f"n is {request.n}; an answer with sound is one", param="n")
    refused = [name for name in _NOT_WITH_AUDIO if getattr(request, name)]
    if request.prompt_logprobs is not None and request.prompt_logprobs is not False:
        refused.append("prompt_logprobs")
    for name in refused:
        raise InvalidRequestError(f"{name} does not go with audio", param=name)
    speaker = SpeechPlan.of(call.server.router, model, reads=False)
    kind, voice = _options(request, speaker)
    file = speaker.file(call.server, kind, "audio.format", whole=not request.stream)
    take_places(call, speaker.steps)
    return SoundPlan(speaker, model.name, speaker.graph.front, voice, kind, file)


def _options(request: ChatRequest, speaker: SpeechPlan) -> tuple[str, str]:
    """Return the format, as of `FORMATS`, and the voice. Raises `InvalidRequestError`."""
    asked = request.audio
    if asked is None:
        raise InvalidRequestError(
            'audio is missing; modalities ["text", "audio"] needs {"voice", "format"}',
            param="audio",
        )
    allowed = _FORMATS[-1:] if request.stream else _FORMATS
    if asked.format not in allowed:
        raise InvalidRequestError(
            f"audio.format is {shown_value(asked.format)}; allowed"
            f"{' in a stream' if request.stream else ''}: {', '.join(allowed)}",
            param="audio.format",
        )
    speaker.check_voice(asked.voice, "audio.voice")
    return "pcm" if asked.format == _PCM else asked.format, asked.voice
