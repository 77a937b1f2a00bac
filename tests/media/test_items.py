"""Files to segments, and what a card says of a model's media."""

import io
import tracemalloc

import msgspec
import numpy as np
import pytest
import soundfile
from PIL import Image

from inlay.base.errors import InvalidRequestError
from inlay.media.audio import AudioChunks
from inlay.media.items import audio_item, image_item
from inlay.media.spec import MediaSpec, Placeholder
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Media, Prompt, Tokens
from tests.media import processors
from tests.media.test_image import BITS, png

SECRET = Secret(bytes(range(32)))
SPECS = {
    "llava": processors.llava(56).spec,
    "llava_next": processors.llava_next(16, 4, [[16, 32], [32, 16]]).spec,
    "qwen2_vl": processors.qwen2_vl("qwen2_vl", 14, 3136, 100_000).spec,
    "mistral3": processors.pixtral("mistral3", 14, 2, 1540).spec,
    "smolvlm": processors.idefics3("smolvlm", 96, 24, 5).spec,
    "internvl": processors.internvl(16, 5, 3).spec,
    "llama4": processors.llama4(56, 7).spec,
    "gemma3": processors.gemma3(9).spec,
    "gemma4": processors.gemma4(4, 70).spec,
    "voxtral": MediaSpec(
        family="voxtral",
        encoder_id="e",
        placeholders={"audio": Placeholder("[AUDIO]", 1)},
        audio=AudioChunks(rate=16000, chunk=480_000, rows=375, start=2),
        max_items={"audio": 2},
    ),
}


def picture(colour: str = "red") -> Buffer:
    out = io.BytesIO()
    Image.new("RGB", (640, 480), colour).save(out, "PNG")
    return Buffer(out.getvalue())


@pytest.mark.parametrize("family", SPECS)
def test_a_card_carries_the_facts_unchanged(family: str) -> None:
    spec = SPECS[family]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=MediaSpec) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=MediaSpec) == spec


@pytest.mark.parametrize("family", sorted(SPECS.keys() - {"voxtral"}))
def test_an_image_is_named_by_its_file_and_its_detail_alone(family: str) -> None:
    spec, data = SPECS[family], picture()
    item = image_item(spec, data, SECRET)
    assert len(Prompt.of(*item.segments)) == item.positions
    assert item.decoded_bytes == 640 * 480 * 4
    runs = [segment for segment in item.segments if isinstance(segment, Media)]
    assert {run.atomic for run in runs} == {family == "gemma3"}
    assert item == image_item(spec, Buffer(bytes(data.view)), SECRET, detail="auto")
    others = [
        image_item(spec, picture("blue"), SECRET),
        image_item(spec, data, SECRET, detail="low"),
        image_item(spec, data, Secret(bytes(32))),
        image_item(msgspec.structs.replace(spec, encoder_id="other"), data, SECRET),
    ]
    names = {
        segment.digest
        for other in [item, *others]
        for segment in other.segments
        if isinstance(segment, Media)
    }
    assert len(names) == 5


def test_audio_is_a_marker_and_its_rows() -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros((45_000, 2)), 44100, format="WAV", subtype="PCM_16")
    item = audio_item(SPECS["voxtral"], Buffer(out.getvalue()), SECRET)
    marker, run = item.segments
    assert marker == Tokens([2])
    assert isinstance(run, Media)
    assert (run.kind, len(run), item.positions) == ("audio", 375, 376)
    assert item.decoded_bytes == 45_000 * 2 * 4
    for spec in (SPECS["voxtral"], SPECS["llava"]):
        with pytest.raises(InvalidRequestError, match="this model takes no"):
            _ = (
                image_item(spec, picture(), SECRET)
                if spec.image is None
                else audio_item(spec, Buffer(out.getvalue()), SECRET)
            )


def test_a_bomb_of_ten_kilobytes_is_refused_without_memory() -> None:
    bomb = Buffer(png(9000, 9000, BITS))
    assert len(bomb) < 10_000
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="9000 x 9000 pixels"):
        image_item(SPECS["qwen2_vl"], bomb, SECRET)
    assert tracemalloc.get_traced_memory()[1] < 2**17
    tracemalloc.stop()
