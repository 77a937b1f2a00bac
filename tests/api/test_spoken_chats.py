"""Chats with sound, without workers."""

from types import SimpleNamespace
from typing import Any

from inlay.api.openai.chat.audio_shape import AudioChatShape
from inlay.http.server import OFFLOAD_BYTES


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
