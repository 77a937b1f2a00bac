"""The sound of a chat of a pipeline: what its language model writes, spoken meanwhile."""

import asyncio
import io
import secrets
import wave
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial

import numpy as np
from msgspec.structs import replace

from inlay.api.generation.generation import Generation
from inlay.api.schema.chat import ChatRequest
from inlay.card import AudioCard, ModelCard
from inlay.errors import EngineError, InvalidRequestError
from inlay.hidden_states import HiddenStates
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay.prompt import Buffer
from inlay.request import Input, Request, Task, Usage
from inlay.router.making import Making
from inlay.router.stages import admitted, plan, walk
from inlay.speech import Speech

_WAITING = 16
"""Pieces of sound that wait for the response before the last stage's stream is read on."""
_SPEECH_POSITIONS = 3
"""Of a talker, behind the prompt: the beginning of its speech and one code."""
_BYTES_PER_SAMPLE = 8
"""Of sound while it is answered: as it comes from the worker, as 16 bits, and in base64."""
_NOT_WITH_AUDIO = ("logprobs", "tools", "response_format", "structured_outputs", "stop")
"""Fields of what is shown with text. Behind a stop string the talker would go on to hear."""


class ChatAudio:
    """The sound of one answer.

    Attributes:
        id: of the sound.
        format: "wav" or "pcm16".
        model: card of the language model.
        usages: of the stages that have ended, by name.
    """

    def __init__(
        self, call: Call, request: ChatRequest, model: ModelCard, generation: Generation, id_: str
    ) -> None:
        """Plan it, before anything is computed. Use `audio_of`.

        Raises:
            InvalidRequestError: the model does not speak, or not so.
            OverloadedError: a stage has no worker that is ready.
            RateLimitedError: a stage is full.
        """
        stage = model.stage
        if stage is None or "audio" not in stage.graph.outputs:
            raise InvalidRequestError(
                f'modalities has "audio"; the model `{model.name}` does not speak',
                param="modalities",
            )
        if (request.n or 1) > 1:
            raise InvalidRequestError(f"n is {request.n}; an answer with sound is one", param="n")
        (choice,) = generation.choices
        refused = [name for name in _NOT_WITH_AUDIO if getattr(request, name, None)]
        if choice.request.sampling.prompt_logprobs is not None:
            refused.append("prompt_logprobs")
        for name in refused:
            raise InvalidRequestError(f"{name} does not go with audio", param=name)
        router = call.server.router
        steps = plan(router, model, "audio", text=True)
        _check_length(len(choice.request.prompt), router.card(steps[0].model))
        card = router.card(steps[-1].model).audio
        if card is None or model.hidden_layers is None:
            raise EngineError(f"the workers of the pipeline `{model.name}` do not speak")
        self.format, voice = _options(request, card)
        graph = stage.graph
        params = {
            step.model: graph.stages[str(step.stage)].speech.params(
                voice,
                prompt_tokens=len(choice.request.prompt),
                seed=choice.request.sampling.seed,
                max_tokens=graph.stages[str(step.stage)].max_tokens,
            )
            for step in steps
        }
        most = max(one.max_tokens for one in params.values())
        call.reservation.grow(most * card.samples_per_code * _BYTES_PER_SAMPLE)
        call.ending.enter_context(admitted(router, steps, call.client))
        states = HiddenStates(layers=(0, model.hidden_layers), prompt=-1, output=True)
        sampling = replace(choice.request.sampling, hidden_states=states)
        choice.request = replace(choice.request, params=sampling, hold=steps[0].edges[0].window)
        choice.kept = Making()
        self.id = f"audio-{secrets.token_hex(12)}"
        self.model = model
        self.usages: Mapping[str | None, Usage] = {}
        self._card = card
        self._call = call
        self._steps = steps
        self._making = choice.kept
        self._make = partial(_request, call, id_, params, request.priority or 0)
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._ended = False
        self._speaking = asyncio.create_task(self._speak())
        # The text raises it, where that has not ended yet.
        self._speaking.add_done_callback(lambda task: task.cancelled() or task.exception())
        call.ending.callback(self._speaking.cancel)

    async def _speak(self) -> None:
        router = self._call.server.router
        given: dict[str | None, Making] = {self.model.name: self._making}
        try:
            for step in self._steps:
                await self._call.server.awake(step.model, Task.STAGE)
            async with aclosing(walk(router, self._steps, given, self._make)) as outputs:
                async for found in outputs:
                    self.usages = found.usages
                    for payload in found.payloads:
                        if payload.port == "audio":
                            await self._pieces.put(_pcm16(payload.data))
        except Exception as error:
            self._making.give_up(error)
            raise
        finally:
            self._ended = True
            if not self._pieces.full():
                self._pieces.put_nowait(None)

    def ready(self) -> bytes:
        """Return the sound that has come since it was last asked for, as 16 bit samples."""
        found = []
        while not self._pieces.empty():
            found.append(self._pieces.get_nowait() or b"")
        return b"".join(found)

    async def next(self) -> bytes | None:
        """Return further sound once there is some; None at its end.

        Raises:
            InlayError: as `inlay.router.stages.walk`.
        """
        if not (self._ended and self._pieces.empty()):
            piece = await self._pieces.get()
            if piece is not None:
                return piece + self.ready()
        await self._speaking
        return None

    def file(self, samples: bytes) -> bytes:
        """Return samples in the format that was asked for."""
        return samples if self.format == "pcm16" else wav(samples, self._card.sample_rate)


def wav(samples: bytes, rate: int) -> bytes:
    """Return a WAV file of 16 bit samples of one channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples)
    return file.getvalue()


def audio_of(
    call: Call, request: ChatRequest, model: ModelCard, generation: Generation, id_: str
) -> ChatAudio | None:
    """Return the sound that a chat asks for, or None.

    Raises:
        InvalidRequestError: `audio` without its modality.
        InlayError: as `ChatAudio`.
    """
    if "audio" in (request.modalities or ()):
        return ChatAudio(call, request, model, generation, id_)
    if request.audio is not None:
        raise InvalidRequestError(
            'audio says how an answer is spoken; ask for it with modalities ["text", "audio"]',
            param="audio",
        )
    return None


def _check_length(positions: int, talker: ModelCard) -> None:
    """Raise `InvalidRequestError` for a prompt behind which the talker has no room to speak."""
    most = talker.limits.max_model_len - _SPEECH_POSITIONS
    if positions > most:
        raise InvalidRequestError(
            f"the prompt has {positions} positions; `{talker.name}` speaks behind at most {most}",
            param="messages",
        )


def _options(request: ChatRequest, card: AudioCard) -> tuple[str, str]:
    """Return the format and the voice. Raises `InvalidRequestError`."""
    asked = request.audio
    if asked is None:
        raise InvalidRequestError(
            'audio is missing; modalities ["text", "audio"] needs {"voice", "format"}',
            param="audio",
        )
    allowed = ("pcm16",) if request.stream else ("wav", "pcm16")
    if asked.format not in allowed:
        raise InvalidRequestError(
            f"audio.format is {shown_value(asked.format)}; allowed"
            f"{' in a stream' if request.stream else ''}: {', '.join(allowed)}",
            param="audio.format",
        )
    if asked.voice not in card.voices:
        raise InvalidRequestError(
            f"audio.voice is {shown_value(asked.voice)}; allowed: {', '.join(card.voices)}",
            param="audio.voice",
        )
    return asked.format, asked.voice


def _request(
    call: Call,
    id_: str,
    params: Mapping[str, Speech],
    priority: int,
    stage: str,
    inputs: tuple[Input, ...],
) -> Request:
    return Request(
        id=f"{call.request_id}-{id_}-{stage}",
        task=Task.STAGE,
        prompts=(),
        params=params[stage],
        deadline=call.remaining,
        priority=priority,
        trace=None if call.span is None else call.span.traceparent,
        client=call.client,
        inputs=inputs,
    )


def _pcm16(data: Buffer) -> bytes:
    """Return float32 samples in [-1, 1] as 16 bits, little endian."""
    samples = np.frombuffer(data.view, np.float32)
    return np.rint(32767 * samples.astype(np.float64)).astype("<i2").tobytes()


__all__ = ["ChatAudio", "audio_of", "wav"]
