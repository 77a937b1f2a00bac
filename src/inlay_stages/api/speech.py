"""`POST /v1/audio/speech`: a text that a pipeline speaks, as a file, piece by piece, or as events.

The language model reads a chat whose answer is the text: the talker hears it as it hears an answer
that the model has chosen itself.
"""

import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from inlay.api.fields import answer_id, check_unserved
from inlay.api.generation.parts import in_content
from inlay.api.generation.sampling import seed_of
from inlay.api.listed import first_that
from inlay.base.errors import InlayError, InvalidRequestError
from inlay.http.bodies.embeds import Source, TensorSource
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.quoting import shown_value
from inlay.http.references import embeddings_of
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call, Server
from inlay.media.positions import media_runs
from inlay.media.sound_files import FORMATS, SoundFormat
from inlay.messages.card import ModelCard
from inlay.messages.request import Input, Request, Sampling
from inlay_stages.api.schema.speech import SpeechRequest, VoiceId
from inlay_stages.api.speaking import SpeechPlan, speaks
from inlay_stages.api.speech_prompt import SpeechPrompt, spoken_prompt
from inlay_stages.api.speech_shape import Events, File, Pieces, SpeechAnswer
from inlay_stages.api.stage_request import all_awake, engine_id, stage_request, take_places
from inlay_stages.walk import walk

_decoder = msgspec.json.Decoder(SpeechRequest)
_DEFAULT = "mp3"
"""Format where none is named, as OpenAI's."""


async def speech(call: Call) -> None:
    """Answer with sound."""
    incoming = await read_request(call, _decoder, _sources_in)
    request = incoming.parsed.request
    check_unserved(request)
    format_ = _format(request)
    kind = _kind(request, FORMATS[format_])
    _check_priority(call, request)
    server = call.server
    speaker = SpeechPlan.of(server.router, pipeline_of(server, request.model), reads=True)
    voice = _voice(request.voice, speaker)
    file = speaker.file(server, format_, "response_format", whole=kind is File)
    answer: SpeechAnswer = kind(call, file)
    prompt = await _read(call, incoming, request, speaker)
    del incoming
    codes = speaker.codes(prompt.before, "instructions", request.max_new_tokens)
    _check_length(prompt, speaker, codes)
    call.reservation.grow(speaker.num_bytes(codes))
    take_places(call, speaker.steps)
    make = _Requests(call, request, speaker, prompt, voice, codes, format_).make
    try:
        async with RequestScope(server.inflight, call.receive, call.detach_deadline()):
            await all_awake(server, speaker.steps)
            async with aclosing(
                walk(server.router, speaker.steps, {}, make, call.reservation.grow)
            ) as outputs:
                async for found in outputs:
                    for payload in found.payloads:
                        await answer.take(payload)
                    if found.output.finish_reason is not None:
                        answer.end(found)
    except InlayError as error:
        if not answer.started:
            raise
        await answer.fail(error)
        return
    await answer.finish()


def _sources_in(request: SpeechRequest) -> list[Source]:
    spoken = in_content(request.input, "input")
    return [
        *in_content(request.instructions, "instructions"),
        # Others cannot be spoken, and are not fetched.
        *(source for source in spoken if isinstance(source, TensorSource)),
    ]


def _kind(request: SpeechRequest, format_: SoundFormat) -> type[SpeechAnswer]:
    """Return the form of the answer. Raises `InvalidRequestError`."""
    if request.stream is False and request.stream_format is not None:
        raise InvalidRequestError(
            f"stream is false and stream_format is {request.stream_format!r}: say one of them",
            param="stream",
        )
    named = request.stream_format or ("sse" if request.stream else None)
    if named is None:
        return Pieces if request.stream is None and format_.streamed else File
    return Events if named == "sse" else Pieces


def _format(request: SpeechRequest) -> str:
    found = _DEFAULT if request.response_format is None else request.response_format
    if found not in FORMATS:
        raise InvalidRequestError(
            f"response_format is {shown_value(found)}; allowed: {', '.join(FORMATS)}",
            param="response_format",
        )
    return found


def _check_priority(call: Call, request: SpeechRequest) -> None:
    if request.priority and call.server.settings.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority {request.priority} was asked for; this server serves first come, first "
            "served unless it is started with --scheduling-policy priority",
            param="priority",
        )


def pipeline_of(server: Server, name: str | None) -> ModelCard:
    """Return the card of the pipeline that speaks, as clients see it; of the first without a name.

    Raises:
        InvalidRequestError: the model, or any, does not speak, or is an adapter.
        InlayError: as `Server.model`.
    """
    if name is None:
        return first_that(server, speaks, "speaks")
    model = server.model(name)
    card, adapter = model.card, model.adapter
    if adapter is not None:
        raise InvalidRequestError(
            f"The model `{name}` is an adapter of `{card.name}`: texts are read by the model "
            "itself. Ask for that.",
            param="model",
        )
    if card.is_inner or not speaks(card):
        raise InvalidRequestError(
            f"The model `{card.name}` does not speak. This route needs a pipeline with audio "
            "among its outputs.",
            param="model",
        )
    return card


def _voice(asked: str | VoiceId | None, speaker: SpeechPlan) -> str:
    voice = asked.id if isinstance(asked, VoiceId) else asked
    if voice is None:
        return speaker.card.voices[0]
    speaker.check_voice(voice, "voice.id" if isinstance(asked, VoiceId) else "voice")
    return voice


async def _read(
    call: Call, incoming: ParsedRequest[SpeechRequest], request: SpeechRequest, speaker: SpeechPlan
) -> SpeechPrompt:
    """Return the prompt; the request is without its text from here on."""
    server, thinker = call.server, speaker.thinker
    renderer = await server.renderers.of(thinker)
    embeddings = await embeddings_of(call, incoming, thinker)
    prompt = await server.run_prepared(
        incoming.size + embeddings.num_fetched_bytes,
        spoken_prompt,
        request,
        embeddings,
        thinker,
        renderer,
        speaker.card.system,
    )
    request.input = request.instructions = ""
    call.memory.settle([prompt.whole], 0)
    return prompt


def _check_length(prompt: SpeechPrompt, speaker: SpeechPlan, codes: int) -> None:
    """Raise `InvalidRequestError` for a text that cannot be read, or not be spoken to its end."""
    limit, positions = speaker.thinker.limits.max_model_len, len(prompt.whole)
    if positions > limit:
        raise InvalidRequestError(
            f"input and instructions have {positions} positions; `{speaker.thinker.name}` reads "
            f"at most {limit}",
            param="input",
        )
    spoken = positions - prompt.before
    if spoken > codes:
        raise InvalidRequestError(
            f"input has {spoken} positions; the sound of each has at least one code, and the "
            f"talker makes at most {codes} here",
            param="input",
        )


@dataclass
class _Requests:
    """Makes the requests of the stages."""

    call: Call
    request: SpeechRequest
    speaker: SpeechPlan
    prompt: SpeechPrompt
    voice: str
    codes: int
    format: str

    def __post_init__(self) -> None:
        self._id = answer_id("speech-", self.request.request_id)
        seed = seed_of(self.request.seed)
        seed = secrets.randbits(63) if seed is None else seed
        self._params = self.speaker.params(
            self.voice,
            prompt_tokens=self.prompt.before,
            media=media_runs(self.prompt.whole),
            seed=seed,
            max_tokens=self.codes,
            format_=self.format,
        )

    def make(self, stage: str, inputs: Sequence[Input]) -> Request:
        call, priority = self.call, self.request.priority or 0
        if stage != self.speaker.steps[0].model:
            return stage_request(call, self._id, self._params[stage], priority, stage, inputs)
        states = msgspec.structs.replace(self.speaker.states, output=False)
        # It writes nothing: all that is spoken is in the prompt.
        params = Sampling(max_tokens=0, temperature=0, hidden_states=states)
        id_ = engine_id(call, self._id, stage)
        return call.engine_request(id_, params, (self.prompt.whole,), priority=priority)
