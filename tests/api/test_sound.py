"""Sound in answers, without workers."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from inlay.api.openai.chat.audio_shape import AudioChatShape
from inlay.api.openai.speech import pipeline_of
from inlay.card import Adapter, AudioCard, ModelCard
from inlay.digest import Secret
from inlay.errors import InvalidRequestError
from inlay.http import FrontendSettings
from inlay.http.server import OFFLOAD_BYTES, Server, check_task
from inlay.request import Task
from tests.router.scripted_stages import ScriptedStage, World
from tests.router.standing import CARD


class Sound:
    """A sound of some pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._left = [*pieces]

    async def next(self) -> bytes | None:
        return self._left.pop(0) if self._left else None


async def test_the_bytes_of_a_whole_sound_have_it_encoded_in_a_thread() -> None:
    text, generation = (
        SimpleNamespace(choices=[SimpleNamespace(pieces=[])]),
        SimpleNamespace(bulk=0),
    )
    sound: Any = Sound(b"x" * OFFLOAD_BYTES, b"y")
    shape = AudioChatShape(text, generation, sound)  # type: ignore[arg-type]
    await shape.speak(None)
    assert generation.bulk == OFFLOAD_BYTES + 1


def test_a_model_that_speaks_says_where_to_ask() -> None:
    audio = AudioCard(voices=("Ethan",), sample_rate=24000, samples_per_code=480)
    card = replace(CARD, tasks=(Task.STAGE,), audio=audio)
    with pytest.raises(InvalidRequestError, match=r"speaks, and .* use POST /v1/audio/speech"):
        check_task(card, Task.GENERATE)


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
