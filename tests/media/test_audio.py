"""Lengths from headers against libsndfile's, rows against transformers', and hostile files."""

import contextlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from inlay.base.errors import InvalidRequestError
from inlay.media.audio import AudioHeader, read_audio_header
from inlay.media.families import spec_of
from inlay.media.sounds import decode_sound
from inlay.media.spec import MediaSpec, audio_layout
from tests.examples import examples
from tests.media.processors import tokenizer


def described(directory: Path, extractor: WhisperFeatureExtractor, **config: Any) -> MediaSpec:
    """The spec of a model whose files say this."""
    extractor.save_pretrained(directory)
    tokenizer(["<|AUDIO|>", "<|IMAGE|>", "[AUDIO]", "[BEGIN_AUDIO]"]).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = spec_of(directory)
    assert spec is not None
    return spec


def silence(seconds: float, rate: int = 16000) -> AudioHeader:
    return AudioHeader("WAV", rate, 1, round(seconds * rate))


SIZES = [160, 161, 319, 320, 321, 640, 641, 1600, 16000, 47999, 479_840, 479_841, 480_000]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2_audio", Qwen2AudioProcessor), ("qwen2_5_omni", Qwen2_5OmniProcessor)],
)
def test_rows_of_sounds_are_those_of_the_processor(family: str, kind: type, tmp_path: Path) -> None:
    extractor = WhisperFeatureExtractor(feature_size=8)
    spec = described(tmp_path, extractor, model_type=family)
    processor: Any = object.__new__(kind)
    processor.feature_extractor, processor.audio_token = extractor, "<|AUDIO|>"
    settings = {"sampling_rate": 16000, "return_tensors": "np", "return_attention_mask": True}
    for samples in SIZES:
        sound = [np.zeros(samples, np.float32)]
        _, (text,) = processor._process_audio(sound, **settings)
        wanted = text.count("<|AUDIO|>")
        if not wanted:
            with pytest.raises(InvalidRequestError, match="too short to be heard"):
                audio_layout(spec, AudioHeader("WAV", 16000, 1, samples))
        else:
            assert audio_layout(spec, AudioHeader("WAV", 16000, 1, samples)).parts == (wanted,)
    with pytest.raises(InvalidRequestError, match=r"30\.5 s long; this model hears at most 30 s"):
        audio_layout(spec, silence(30.5))


def test_rows_of_voxtral_are_those_of_its_encoder(tmp_path: Path) -> None:
    encoder = {
        "num_mel_bins": 8,
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_source_positions": 1500,
        "vocab_size": 8,
    }
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    model = VoxtralForConditionalGeneration(
        VoxtralConfig(audio_config=encoder, text_config=text)
    ).eval()
    extractor = WhisperFeatureExtractor(feature_size=8)
    spec = described(tmp_path, extractor, model_type="voxtral", audio_config=encoder)
    processor: Any = object.__new__(VoxtralProcessor)
    processor.feature_extractor = extractor
    for samples in (1, 16000, 480_000, 480_001, 1_000_000):
        features = processor._retrieve_input_features(
            [np.zeros(samples, np.float32)],
            3000,
            sampling_rate=16000,
            padding=True,
            truncation=False,
            pad_to_multiple_of=480_000,
            return_tensors="pt",
        )
        with torch.inference_mode():
            rows = model.get_audio_features(features).pooler_output
        laid = audio_layout(spec, AudioHeader("WAV", 16000, 1, samples))
        assert laid.rows == rows.shape[0]
        assert laid.positions == laid.rows + 1
    assert audio_layout(spec, silence(30.01, 44100)).rows == 750


def recorded(samples: int, rate: int, channels: int, format_: str, subtype: str) -> bytes:
    out = io.BytesIO()
    sound = np.random.default_rng(samples).standard_normal((samples, channels)) * 0.1
    soundfile.write(out, sound, rate, format=format_, subtype=subtype)
    return out.getvalue()


EXACT = [
    ("WAV", "PCM_U8"),
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "PCM_32"),
    ("WAV", "FLOAT"),
    ("WAV", "DOUBLE"),
    ("WAV", "ULAW"),
    ("WAV", "ALAW"),
    ("WAVEX", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("FLAC", "PCM_24"),
]
RATES = st.sampled_from([8000, 16000, 22050, 44100, 48000])


@pytest.mark.parametrize(("format_", "subtype"), EXACT)
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 30_000), RATES, st.integers(1, 3))
def test_a_header_is_what_libsndfile_decodes(
    format_: str, subtype: str, samples: int, rate: int, channels: int
) -> None:
    found = read_audio_header(recorded(samples, rate, channels, format_, subtype))
    assert tuple(found) == (format_.removesuffix("EX"), rate, channels, samples)


@settings(deadline=None, max_examples=examples(25))
@given(st.integers(3000, 100_000), RATES, st.integers(1, 2))
def test_the_frames_of_an_mp3_are_what_libsndfile_decodes(
    samples: int, rate: int, channels: int
) -> None:
    data = recorded(samples, rate, channels, "MP3", "MPEG_LAYER_III")
    found = read_audio_header(data)
    decoded, _ = soundfile.read(io.BytesIO(data), always_2d=True)
    assert tuple(found)[:3] == ("MP3", rate, channels)
    assert abs(found.samples - len(decoded)) <= 1152
    tagged = b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128) + data
    assert read_audio_header(tagged) == found


SAMPLES = [
    recorded(900, 16000, 1, "WAV", "PCM_16"),
    recorded(900, 16000, 2, "WAVEX", "PCM_24"),
    recorded(900, 16000, 2, "FLAC", "PCM_16"),
    recorded(4000, 16000, 1, "MP3", "MPEG_LAYER_III"),
]


def wav(kind: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16, **made: Any) -> bytes:
    width: int = made.get("width", channels * bits // 8)
    form = struct.pack("<HHIIHH", kind, channels, rate, 0, width, bits)
    data: bytes = made.get("data", bytes(320))
    said = made.get("said", len(data))
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", said)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks) + len(data)) + b"WAVE" + chunks + data


def flac(samples: int, body: bytes = b"") -> bytes:
    packed = 16000 << 44 | 15 << 36 | samples
    facts = struct.pack(">HH6xQ16x", 4096, 4096, packed)
    return b"fLaC\x80\x00\x00\x22" + facts + body


ID3 = b"ID3\x04\x00\x00\x00\x00\x00\x14" + b"TIT2\x00\x00\x00\x04\x00\x00\x03abc" + bytes(6)
APE = (
    b"APETAGEX"
    + struct.pack("<IIII8x", 2000, 32 + 12, 1, 0xA0000000)
    + bytes(12)
    + b"APETAGEX"
    + bytes(24)
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"OggS\x00\x02", "looks like Ogg"),
        (b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb", "looks like Wave64"),
        (b"\xff\xf1\x50\x80", "looks like AAC"),
        (b"\x00\x00\x00\x18ftypM4A ", "looks like MP4"),
        (b"RIFF\x00\x00\x00\x00WEBP", "no known format"),
        (ID3 + b"OggS\x00\x02", "looks like Ogg"),
        (ID3 + b"\xff\xf1\x50\x80", "looks like AAC"),
        (ID3 + b"nothing of sound", "no known format begins with 6e6f7468696e6720"),
        (ID3 * 9, "more than 8 tags"),
        (b"APETAGEX\xd0\x07", "a malformed APE: it is truncated"),
        (wav(kind=2), "a WAV of kind 2"),
        (wav(bits=12), "with 12 bits"),
        (wav(width=3), "take 3 bytes"),
        (wav(channels=0), "0 channels"),
        (wav(channels=40), "40 channels"),
        (wav(rate=0), "at 0 Hz"),
        (wav(rate=2**32 - 1), "at 4294967295 Hz"),
        (wav(data=b""), "no samples"),
        (wav(data=bytes(16000 * 2 * 601)), "601.0 s long; allowed: 600 s"),
        (wav()[:30], "truncated"),
        (flac(0, bytes(99)), "does not say how many"),
        (flac(2**36 - 1, bytes(99)), "cannot hold 68719476735"),
        (flac(9999)[:20], "truncated"),
        (
            b"ID3\x04\x00\x00\xff\xff\xff\xff",
            "a tag before audio is a malformed ID3: its size is wrong",
        ),
        (b"ID3\x04\x00\x00\x00\x00\x00\x00", "nothing behind its tag"),
        (b"ID3", "truncated"),
        (b"\xff\xfb\x90\x64" * 2, "no samples"),
        (b"\xff\xfb\x90\x64" + bytes(413) + b"\xff\xfb\x94\x64" + bytes(9999), "rate changes"),
    ],
)
def test_other_formats_and_files_that_lie_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_audio_header(data)


SAID = {
    "SoX": 0x7FFFF000,
    "a stream": 0x7FFFFFFF,
    "arecord": 0x80000000,
    "FFmpeg": 0xFFFFFFFF,
    "nothing": 0,
    "cut off": 10**6,
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("kind", ["RIFF", "RF64"])
def test_a_wav_whose_length_was_never_filled_in_ends_with_the_file(said: int, kind: str) -> None:
    samples = np.random.default_rng(0).integers(-9999, 9999, 999).astype("<i2").tobytes()
    data = wav(data=samples, said=said).replace(b"RIFF", kind.encode())
    found = read_audio_header(data)
    assert (found.format, found.samples) == ("WAV", 999)
    heard = decode_sound(memoryview(data), found, 16000)
    whole = wav(data=samples)
    assert (heard == decode_sound(memoryview(whole), read_audio_header(whole), 16000)).all()


def test_the_length_of_an_rf64_is_in_a_chunk_of_its_own() -> None:
    sizes = b"ds64" + struct.pack("<IQQQI", 28, 9999, 320, 160, 0)
    data = wav(said=0xFFFFFFFF).replace(b"RIFF", b"RF64").replace(b"fmt ", sizes + b"fmt ")
    assert read_audio_header(data + b"LIST\x04\x00\x00\x00more").samples == 160


def test_a_wav_whose_format_has_an_odd_length_is_decoded() -> None:
    plain = wav(data=bytes(range(200)))
    odd = plain[:16] + struct.pack("<I", 17) + plain[20:36] + bytes(2) + plain[36:]
    header = read_audio_header(odd)
    assert header == read_audio_header(plain)
    heard = decode_sound(memoryview(odd), header, 16000)
    assert (heard == decode_sound(memoryview(plain), header, 16000)).all()


def test_a_wav_of_no_samples_and_a_chunk_behind_them_has_none() -> None:
    with pytest.raises(InvalidRequestError, match="no samples"):
        read_audio_header(wav(data=b"LIST\x04\x00\x00\x00more", said=0))


@pytest.mark.parametrize("tags", [ID3, ID3 + ID3, ID3 + bytes(100), APE, ID3 + APE], ids=len)
@pytest.mark.parametrize(
    ("format_", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")]
)
def test_tags_before_a_file_of_any_format_are_passed_over(
    format_: str, subtype: str, tags: bytes
) -> None:
    plain = recorded(4000, 16000, 1, format_, subtype)
    tagged = tags + plain
    header = read_audio_header(tagged)
    assert header == read_audio_header(plain)
    heard = decode_sound(memoryview(tagged), header, 16000)
    assert (heard == decode_sound(memoryview(plain), header, 16000)).all()


def test_an_mp3_is_counted_no_further_than_allowed() -> None:
    frame = b"\xff\xfb\x90\x64" + bytes(413)
    assert read_audio_header(frame * 10).samples == 11520
    with pytest.raises(InvalidRequestError, match=r"allowed: 0\.1 s"):
        read_audio_header(frame * 10_000, max_seconds=0.1)


@settings(deadline=None, max_examples=examples(400))
@given(st.data())
def test_no_bytes_raise_anything_but_a_refusal_or_give_more_than_they_hold(
    data: st.DataObject,
) -> None:
    mutated = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, min(len(mutated) - 1, 90)))
        mutated[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del mutated[data.draw(st.integers(0, len(mutated))) :]
    with contextlib.suppress(InvalidRequestError):
        found = read_audio_header(mutated)
        # The densest of all is FLAC's silence: 65535 samples in a frame of ten bytes.
        assert found.samples <= len(mutated) * 65535 // 10
        assert found.samples_at(found.rate) == found.samples
        assert found.seconds <= 600


@settings(deadline=None, max_examples=examples(300))
@given(
    st.binary(max_size=100),
    st.sampled_from([b"", b"RIFF\0\0\0\0WAVE", b"fLaC", b"ID3", b"\xff\xfb"]),
)
def test_random_bytes_are_refused_or_read(tail: bytes, head: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        read_audio_header(head + tail)
