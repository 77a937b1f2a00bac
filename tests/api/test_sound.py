"""Sound in answers, without workers."""

import io
import re
import sys
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import soundfile
from msgspec.structs import replace

from inlay.api.generation.choices import ChoicePiece
from inlay.base.errors import InvalidRequestError
from inlay.http import FrontendSettings
from inlay.http.server import OFFLOAD_BYTES, Server
from inlay.http.tasks import wrong_task
from inlay.messages.card import Adapter, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Payload, Task
from inlay.render import ContentDelta, ToolCallDelta
from inlay_stages.api.images import painter_of
from inlay_stages.api.sound_files import FinishedFile, SampledFile
from inlay_stages.api.speech import pipeline_of
from inlay_stages.cards import AudioCard, ImageCard
from inlay_stages.chat.audio_shape import AudioChatShape
from inlay_stages.graph import Graph, Stage
from tests.router.scripted_stages import ScriptedStage, World, card_of
from tests.router.standing import CARD

pytestmark = pytest.mark.extensions("stages")


class Sound:
    """A sound of some pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._left = [*pieces]
        self.usages: dict[str, Any] = {}
        self.id, self.stage, self.text_stage = "audio-1", "omni/vocoder", "thinker"
        self.may_drop = True
        self.limited = self.dropped = False

    async def next(self) -> bytes | None:
        return self._left.pop(0) if self._left else None

    def ready(self) -> bytes:
        return self._left.pop(0) if self._left else b""

    def drop(self) -> None:
        self.dropped = True


async def test_the_bytes_of_a_whole_sound_have_it_encoded_in_a_thread() -> None:
    text, generation = (
        SimpleNamespace(choices=[SimpleNamespace(pieces=[])]),
        SimpleNamespace(bulk=0, add_usage=lambda *_: None),
    )
    sound: Any = Sound(b"x" * OFFLOAD_BYTES, b"y")
    text.choices[0].calls_tools = False
    shape = AudioChatShape(text, generation, sound)  # type: ignore[arg-type]
    await shape.speak(None)
    assert generation.bulk == OFFLOAD_BYTES + 1


async def test_the_text_before_a_call_of_a_tool_is_heard_and_the_call_is_not() -> None:
    choice: Any = SimpleNamespace(index=0, calls_tools=False, pieces=[])
    shown: list[Any] = []
    text: Any = SimpleNamespace(
        choices=[choice],
        created=1,
        chunk=lambda one, **_: one.delta.audio.transcript or one.delta.audio.data,
        events=lambda pieces: [(piece.output, piece.finish_reason) for _, piece in pieces],
        closing_events=list,
    )
    sound: Any = Sound(b"one", b"two", b"three")
    generation: Any = SimpleNamespace(add_usage=lambda *_: None)
    shape = AudioChatShape(text, generation, sound)
    call = ToolCallDelta(0, "id", "count", "{}")
    for output, end in (((), None), ((ContentDelta("I look"),), None), ((call,), "stop")):
        choice.calls_tools = call in output
        shown += shape.events([(choice, ChoicePiece("", output, (), (), end, None, 1, 0))])
    await shape.speak(None)
    shown += shape.closing_events()
    assert shown == [((), None), ((), None), "I look", "b25l", ((call,), None), ((), "stop")]
    assert sound.dropped


@pytest.mark.extensions("stages")
def test_a_model_that_speaks_says_where_to_ask() -> None:
    audio = AudioCard(voices=("Ethan",), sample_rate=24000, samples_per_code=480)
    card = replace(CARD, tasks=(Task.STAGE,), audio=audio)
    error = wrong_task(card, Task.GENERATE)
    assert re.search(r"speaks, and .* use POST /v1/audio/speech", error.message)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with World.around(ScriptedStage("decoder")) as world:
        made = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        yield made
        made.close()


RATE = 24000
TIME = np.arange(5 * RATE) / RATE
SOUND = (0.4 * np.sin(2 * np.pi * (200 + 150 * TIME) * TIME)).astype(np.float32)
SAMPLES = np.rint(32767 * SOUND.astype(np.float64)).astype("<i2")


def sound(data: bytes) -> Payload:
    return Payload("audio", "float32", (len(data) // 4,), Buffer(data))


async def pieces_of(file: SampledFile) -> list[bytes]:
    """What a file goes on with for each fifth of `SOUND`, and its end."""
    fifths = np.split(SOUND, 5)
    return [*[await file.take(sound(fifth.tobytes())) for fifth in fifths], await file.end()]


def read(file: bytes) -> npt.NDArray[np.int16]:
    if file.startswith(b"fLaC") and not any(file[22:26]):
        # Python's reader wants the number of samples, which a stream does not tell.
        file = file[:22] + len(SAMPLES).to_bytes(4, "big") + file[26:]
    found, rate = soundfile.read(io.BytesIO(file), dtype="int16")
    assert rate == RATE
    return np.asarray(found)


def loudness_of_error(found: npt.NDArray[np.int16], delay: int) -> float:
    """Of the middle of a sound that comes `delay` samples late, in dB over that of its error."""
    middle = slice(RATE, 4 * RATE)
    wanted = SAMPLES[middle].astype(float)
    error = found[delay:][middle] - wanted
    return float(10 * np.log10((wanted**2).mean() / (error**2).mean()))


@pytest.mark.parametrize("name", ["wav", "flac", "pcm"])
@pytest.mark.parametrize("whole", [True, False])
async def test_lossless_files_hold_every_sample(server: Server, name: str, whole: bool) -> None:
    pieces = await pieces_of(SampledFile(server, name, RATE, "f", whole=whole))
    assert any(pieces[:-1]) is not whole
    file = b"".join(pieces)
    found = np.frombuffer(file, "<i2") if name == "pcm" else read(file)
    assert np.array_equal(found, SAMPLES)


async def test_samples_beyond_the_range_are_its_ends(server: Server) -> None:
    file = SampledFile(server, "pcm", RATE, "f", whole=False)
    loud = np.array([-3, -1, 1, 3], np.float32)
    assert np.frombuffer(await file.take(sound(loud.tobytes())), "<i2").tolist() == [
        -32767, -32767, 32767, 32767,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("pieces", [0, 1])
async def test_a_sound_of_nothing_is_a_file_that_players_take(
    server: Server, name: str, whole: bool, pieces: int
) -> None:
    file = SampledFile(server, name, RATE, "f", whole=whole)
    data = b"".join([await file.take(sound(b"")) for _ in range(pieces)]) + await file.end()
    if name == "flac" and not whole:
        data = data[:22] + (1).to_bytes(4, "big") + data[26:]
    found, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    # MP3 has frames of 576 samples, of which a stream cannot say that they are filled up.
    assert len(found) <= (1 if whole else 3 * 576)
    assert not found.any()


LATE = 1681
"""Samples by which a decoder is late that is not told of LAME's and its own delay."""


@pytest.mark.parametrize(
    ("name", "whole", "delay"),
    [("mp3", True, 0), ("mp3", False, LATE), ("opus", True, 0), ("opus", False, 0)],
)
async def test_compressed_files_are_the_sound(
    server: Server, name: str, whole: bool, delay: int
) -> None:
    pieces = await pieces_of(SampledFile(server, name, RATE, "f", whole=whole))
    assert all(pieces) is not whole
    file = b"".join(pieces)
    found = read(file)
    assert loudness_of_error(found, delay) > 20
    assert len(file) * 8 / 5 < 70_000
    assert len(found) >= len(SAMPLES)
    if whole:
        assert len(found) == len(SAMPLES)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_file_that_a_stage_has_made_is_passed_on_with_its_type(whole: bool) -> None:
    file = FinishedFile(whole=whole)
    parts = {"file.type": b"audio/flac", "file": b"fLaC..."}
    pieces = [
        await file.take(Payload(port, "uint8", (len(data),), Buffer(data)))
        for port, data in parts.items()
    ]
    assert file.media_type == b"audio/flac"
    assert [*pieces, await file.end()] == [
        b"",
        b"" if whole else b"fLaC...",
        b"fLaC..." if whole else b"",
    ]


async def test_sound_is_compressed_in_a_thread_however_little_it_is(server: Server) -> None:
    threads = []
    file = SampledFile(server, "opus", RATE, "f", whole=False)
    add = file._writer.add

    def watched(sound: Buffer) -> bytes:
        threads.append(threading.current_thread())
        return add(sound)

    file._writer.add = watched  # type: ignore[method-assign]
    await file.take(sound(SOUND[:100].tobytes()))
    assert threads
    assert threading.main_thread() not in threads


async def test_a_format_that_cannot_be_made_is_named_with_those_that_can(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chats and the route for speech have names of their own for bare samples.
    always = "WAV and bare samples are always made"
    with pytest.raises(InvalidRequestError, match=f"22050 samples .* {always}") as no:
        SampledFile(server, "opus", 22050, "audio.format", whole=True)
    assert no.value.param == "audio.format"
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InvalidRequestError, match=f"lacks libsndfile.* {always}"):
        SampledFile(server, "mp3", RATE, "response_format", whole=True)


IMAGE = ImageCard(width=8, height=8, multiple=8, max_pixels=64, steps=2, max_steps=9)


class Visible(ScriptedStage):
    """The only stage that clients see of a pipeline that paints, or that speaks."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__("decoder")
        outputs = {"image": "a.image"} if kind == "image" else {"audio": "a.audio"}
        inputs = {"prompt": "a.prompt"}
        stages = {"a": Stage(kind=kind, model="m")}
        self.graph = Graph(name=name, stages=stages, edges=[], inputs=inputs, outputs=outputs)
        self.stage = "a"

    @property
    def card(self) -> ModelCard:
        audio = AudioCard(voices=("Ethan",), sample_rate=RATE, samples_per_code=480)
        paints = self.graph.stages["a"].kind == "image"
        return replace(
            card_of(self.graph.name),
            image=IMAGE if paints else None,
            audio=None if paints else audio,
        )


@pytest.mark.parametrize("first", ["image", "vocode"])
async def test_without_a_name_the_first_model_is_asked_that_does_it(first: str) -> None:
    kinds = ["image", "vocode"] if first == "image" else ["vocode", "image"]
    names = {"image": "painter", "vocode": "voice"}
    async with World.around(*[Visible(names[kind], kind) for kind in kinds]) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        assert painter_of(server, None).card.name == "painter"
        assert pipeline_of(server, None).name == "voice"
        with pytest.raises(InvalidRequestError, match="`voice` speaks, and makes no images"):
            painter_of(server, "voice")
        server.close()


async def test_where_no_model_does_it_those_are_named_that_are_there() -> None:
    async with World.around(Visible("voice", "vocode")) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        with pytest.raises(InvalidRequestError, match="makes images of a prompt: `voice`") as no:
            painter_of(server, None)
        assert no.value.param == "model"
        server.close()
    async with World.around(Visible("painter", "image")) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        with pytest.raises(InvalidRequestError, match="none that is served here speaks: `painter`"):
            pipeline_of(server, None)
        server.close()


class Adapted(ScriptedStage):
    """A language model that has an adapter."""

    @property
    def card(self) -> ModelCard:
        adapter = Adapter(name="tuned", content_id="0" * 32, path="tuned")
        return replace(super().card, adapters=(adapter,))


async def test_a_text_is_read_by_the_model_itself_and_never_by_an_adapter_in_its_place() -> None:
    engines = Adapted("thinker"), ScriptedStage("talker"), ScriptedStage("vocoder")
    async with World.around(*engines) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        assert pipeline_of(server, "speaker").name == pipeline_of(server, None).name == "speaker"
        for name, said in (
            ("tuned", "is an adapter of `speaker`"),
            ("speaker/talker", "not speak"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                pipeline_of(server, name)
        server.close()
