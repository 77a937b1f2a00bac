"""Readers of media: a file in a prompt to the inputs of a tower, one reader for each kind.

Sound becomes the spectrum that transformers' feature extractor makes. A video's frames become the
patches of its image processor, two frames to a patch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoFeatureExtractor, PreTrainedConfig

from inlay.base.errors import InvalidRequestError
from inlay.engine.decoding import sized_image, sized_sound, sized_video
from inlay.engine.pictures import decode, decode_frames
from inlay.engine.torch.media.patch_processing import PatchProcessor
from inlay.engine.torch.media.processing import ImageProcessor
from inlay.engine.torch.media.tile_processing import TileProcessor
from inlay.media.audio import AudioChunks, AudioGeometry
from inlay.media.geometry import PatchGrid
from inlay.media.model_files import ModelFiles
from inlay.media.sounds import decode_sound
from inlay.media.spec import MediaSpec
from inlay.media.tiles import ChunkTiles
from inlay.messages.prompt import Media
from inlay.tensors.tidy_directory import tidied

Inputs: TypeAlias = dict[str, Tensor]
"""Inputs of a tower for one item, by transformers' names."""

Process: TypeAlias = Callable[[Image.Image, dict[str, Any]], Inputs]
"""Makes inputs of a picture, with settings beside the processor's own."""

_PIXELS_OF_FRAME = 100
"""Pixels that take a tower about as long as a frame of a spectrum."""


class Plan(NamedTuple):
    """An item whose header was read.

    Attributes:
        bytes: memory that reading takes.
        pixels: size of what the tower sees; of sound, the pixels that take as long.
        read: decodes the file and makes the inputs.
        long: of a video or a sound, which may take longer than any picture.
    """

    bytes: int
    pixels: int
    read: Callable[[], Inputs]
    long: bool = False


class MediaReader(Protocol):
    """Reads items of one kind."""

    def plan(self, run: Media) -> Plan:
        """Read the header of the item that `run` is of.

        Raises:
            InvalidRequestError: the file is not what the prompt was laid out for, or is none that
                is read.
        """


Readers: TypeAlias = Mapping[str, MediaReader]
"""A reader for each kind of media that a model takes."""


class PictureReader:
    """Reads images."""

    def __init__(self, processor: Process, spec: MediaSpec) -> None:
        self._processor = processor
        self._spec = spec

    def plan(self, run: Media) -> Plan:
        data, sized = sized_image(run, self._spec)
        height, width = sized.layout.size

        def read() -> Inputs:
            return self._processor(decode(data, sized.header), sized.settings)

        return Plan(sized.bytes, height * width, read)


class VideoReader:
    """Reads videos, for towers that see them as patches of two frames or more."""

    def __init__(self, spec: MediaSpec, directory: Path) -> None:
        if spec.video is None or not isinstance(spec.image, PatchGrid):
            raise InvalidRequestError("this model takes no video")
        self._spec = spec
        values = ModelFiles(directory).video.values
        norm = {key: values[key] for key in ("image_mean", "image_std") if values.get(key)}
        self._processor = PatchProcessor(directory, spec.image, norm)

    def plan(self, run: Media) -> Plan:
        data, sized = sized_video(run, self._spec)
        grid = sized.layout.grid
        assert grid is not None, "videos are laid out by a grid"

        def read() -> Inputs:
            return {
                "pixel_values_videos": self._processor.patches(
                    decode_frames(data, sized.header), grid
                ),
                "video_grid_thw": torch.tensor([grid]),
            }

        return Plan(sized.bytes, sized.pixels, read, long=True)


class SoundReader:
    """Reads audio for Whisper-like encoders."""

    def __init__(self, directory: Path, spec: MediaSpec) -> None:
        if spec.audio is None:
            raise InvalidRequestError("this model takes no audio")
        try:
            with tidied(directory) as tidy:
                self._extract: Any = AutoFeatureExtractor.from_pretrained(
                    tidy, local_files_only=True, trust_remote_code=False
                )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InvalidRequestError(
                f"{directory} has no feature extractor that can be loaded: {error}"
            ) from error
        self._audio: AudioGeometry = spec.audio
        self._spec = spec

    def plan(self, run: Media) -> Plan:
        data, sized = sized_sound(run, self._spec)
        rate = sized.rate
        frames = sized.header.samples_at(rate) // 160 + 1

        def read() -> Inputs:
            return self._spectrum(decode_sound(data, sized.header, rate))

        return Plan(sized.bytes, frames * _PIXELS_OF_FRAME, read, long=True)

    def _spectrum(self, sound: Any) -> Inputs:
        audio = self._audio
        given = {"sampling_rate": audio.rate, "return_tensors": "pt"}
        if isinstance(audio, AudioChunks):
            found = self._extract(
                sound, padding=True, truncation=False, pad_to_multiple_of=audio.chunk, **given
            )
            frames = audio.chunk // self._extract.hop_length
            (whole,) = found["input_features"]
            return {"input_features": torch.stack(whole.split(frames, dim=1))}
        frames, length = -(-len(sound) // audio.hop), audio.max_samples
        if not audio.filled:
            # As far as the last frame's window hears, and its reflection at the end.
            length = min(length, (frames + 1 + self._extract.n_fft // audio.hop) * audio.hop)
        found = self._extract(
            sound, padding="max_length", max_length=length, return_attention_mask=True, **given
        )
        stop = None if audio.filled else frames
        return {
            "input_features": found["input_features"][..., :stop],
            "feature_attention_mask": found["attention_mask"][..., :stop],
        }


def processor_of(directory: Path, config: PreTrainedConfig, spec: MediaSpec) -> Process:
    """Return what makes inputs of a model's images. Arguments and errors as of `readers_of`."""
    if isinstance(spec.image, ChunkTiles):
        return TileProcessor(directory, spec.image)
    if isinstance(spec.image, PatchGrid):
        return PatchProcessor(directory, spec.image)
    return ImageProcessor(directory, config)


def readers_of(directory: Path, config: PreTrainedConfig, spec: MediaSpec) -> Readers:
    """Return a reader for each kind of media of a model.

    Raises:
        InvalidRequestError: a processor that cannot be loaded.
    """
    found: dict[str, MediaReader] = {}
    if spec.image is not None:
        found["image"] = PictureReader(processor_of(directory, config, spec), spec)
        if spec.video is not None:
            found["video"] = VideoReader(spec, directory)
    if spec.audio is not None:
        found["audio"] = SoundReader(directory, spec)
    return found
