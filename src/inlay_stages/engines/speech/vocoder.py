"""The vocoder: sound of codes, by a diffusion transformer and BigVGAN, in chunks.

A chunk of codes is diffused with whole blocks of codes around it, of which the transformer's layers
see a few, and its spectrum becomes sound with as many frames around it as the convolutions reach.
So sound begins before the last code is there. Noise belongs to a block, so that a block has the
same in each chunk that it is context of. Without chunks it is what transformers'
`Qwen2_5OmniToken2WavModel` makes of all codes and the same noise.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from inlay.base.errors import EngineError
from inlay.engine.torch.self_check.parts import CheckedPart
from inlay.media.sound_files import FORMATS, sound_writer
from inlay.messages.prompt import Buffer
from inlay.messages.request import Input, Payload
from inlay_stages.engines.speech.job import TurnPayloads, tensor_of
from inlay_stages.params import Speech

SAMPLE_RATE = 24_000
"""Samples a second, of the family."""

_STEPS, _GUIDANCE, _SWAY = 10, 0.5, -1.0
"""transformers' defaults."""
_CONTEXT_BLOCKS = 4
"""Blocks before and behind a chunk; each layer of the transformer sees one on a side at most."""


class Voice(NamedTuple):
    """A voice as the vocoder has it.

    Attributes:
        condition: float32 [1, C].
        reference: spectrum of what it said, float32 [1, frames, bands].
    """

    condition: Tensor
    reference: Tensor


class Vocoder:
    """A vocoder that has its weights.

    Args:
        model: transformers' `Qwen2_5OmniToken2WavModel`, in float32.
        voices: by name.

    Attributes:
        block: codes of a block.
        repeats: frames of a code.
        hop: samples of a frame.
        reach: frames on each side that a sample depends on.
    """

    def __init__(self, model: Any, voices: Mapping[str, Voice]) -> None:
        self._dit, self._bigvgan = model.code2wav_dit_model, model.code2wav_bigvgan_model
        self._voices = voices
        self.device: torch.device = model.device
        config = self._dit.config
        self.repeats: int = config.repeats
        self.block: int = config.block_size // config.repeats
        self._bands: int = config.mel_dim
        self.num_codes: int = config.num_embeds
        self.max_codes: int = config.max_position_embeddings // config.repeats
        rates = self._bigvgan.config.upsample_rates
        self.hop = 1
        for rate in rates:
            self.hop *= rate
        self.reach = reach_of(self._bigvgan.config)

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices."""
        return tuple(self._voices)

    def begin(self, params: Speech) -> "VocoderState":
        """Return the state of a request, which has no codes yet.

        Raises:
            InvalidRequestError: a file of a format that is not made here.
        """
        return VocoderState(self, params, self._voices[params.voice])

    @torch.inference_mode()
    def spectrum(self, codes: Sequence[int], voice: Voice, noise: Tensor) -> Tensor:
        """Diffuse the spectrum [1, bands, frames] of codes from noise [1, frames, bands].

        As `Qwen2_5OmniToken2WavDiTModel.sample` of transformers, with the noise given.

        Raises:
            EngineError: codes that are none, or too many.
        """
        if len(codes) > self.max_codes:
            raise EngineError(f"{len(codes)} codes at once; the vocoder takes {self.max_codes}")
        if not all(0 <= code < self.num_codes for code in codes):
            raise EngineError(f"a code of {max(codes)}; the vocoder has {self.num_codes}")
        quantized = torch.tensor([codes], device=self.device)
        speaker = voice.condition.unsqueeze(1).repeat(1, noise.shape[1], 1)

        def velocity(time: Tensor, states: Tensor) -> Tensor:
            guided, free = self._dit(
                hidden_states=states,
                quantized_code=quantized,
                speaker_embedding=speaker,
                condition_vector=voice.reference,
                time_step=time,
                apply_cfg=True,
            ).chunk(2, dim=0)
            found: Tensor = guided + (guided - free) * _GUIDANCE
            return found

        times = torch.linspace(0, 1, _STEPS, device=self.device)
        times += _SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        path: Tensor = RungeKutta4ODESolver(velocity, noise.to(self.device)).integrate(times)
        return path[-1].permute(0, 2, 1)

    @torch.inference_mode()
    def sound(self, spectrum: Tensor) -> Tensor:
        """Return the samples [frames * hop] of a spectrum [1, bands, frames]."""
        found: Tensor = self._bigvgan(spectrum)
        return found.reshape(-1)

    def noise(self, seed: int, first: int, stop: int) -> Tensor:
        """Return the noise [1, frames, bands] of the codes from `first`, which begins a block."""
        blocks = [
            torch.randn(
                1,
                self.block * self.repeats,
                self._bands,
                generator=torch.Generator().manual_seed((seed << 24) + block & (1 << 63) - 1),
            )
            for block in range(first // self.block, ceil(stop / self.block))
        ]
        return torch.cat(blocks, dim=1)[:, : (stop - first) * self.repeats]

    def probe(self) -> None:
        """Make the sound of a code."""
        self._sound_of([0])

    def _sound_of(self, codes: Sequence[int]) -> Tensor:
        voice = next(iter(self._voices.values()))
        return self.sound(self.spectrum(codes, voice, self.noise(0, 0, len(codes))))

    def parts(self) -> dict[str, CheckedPart]:
        """Return what must be finite at a start: the sound of a block of codes."""
        codes = [code % self.num_codes for code in range(self.block)]
        return {
            "vocoder": CheckedPart(
                [self._dit, self._bigvgan], lambda: [self._sound_of(codes)[None]]
            )
        }


class VocoderState:
    """One request of a vocoder."""

    def __init__(self, vocoder: Vocoder, params: Speech, voice: Voice) -> None:
        self._vocoder = vocoder
        self._seed = params.seed
        self._voice = voice
        self._port, self._format = params.port, params.format
        self._file = (
            sound_writer(params.format, SAMPLE_RATE, "format", whole=True)
            if params.port == "file"
            else None
        )
        # A whole sound is that of the whole model: nothing is gained by chunks.
        blocks = 0 if params.port == "sound" else ceil(params.chunk / vocoder.block)
        self._chunk = blocks * vocoder.block
        self._codes: list[int] = []
        self._over = False
        self._diffused = 0
        self._spectra: list[Tensor] = []
        self._sounded = 0

    @property
    def ready(self) -> bool:
        """There are codes for a chunk, and for what is behind it."""
        if self._over:
            return True
        ahead = _CONTEXT_BLOCKS * self._vocoder.block
        return bool(self._chunk) and len(self._codes) >= self._diffused + self._chunk + ahead

    def advance(self, inputs: Sequence[Input], *, ended: bool) -> TurnPayloads:
        """Take codes, and make the sound of the next chunk if that can be.

        Raises `EngineError` for sound that is not finite.
        """
        for given in inputs:
            self._codes += tensor_of(given.value).flatten().tolist()
        self._over = self._over or ended
        if not self.ready:
            return TurnPayloads((), done=False)
        total = len(self._codes)
        if self._diffused < total:
            stop = min(total, self._diffused + self._chunk) if self._chunk else total
            self._diffuse(stop)
        done = self._over and self._diffused == total
        sound = self._sound(last=done)
        if not torch.isfinite(sound).all():
            raise EngineError("the vocoder's sound is not finite")
        return TurnPayloads(self._payloads(sound, last=done), done=done, made=len(sound))

    def _payloads(self, sound: Tensor, *, last: bool) -> tuple[Payload, ...]:
        """Return samples on their port; of a file, all of it behind the last."""
        data = Buffer(sound.to(torch.float32).cpu().contiguous().numpy().tobytes())
        if self._file is None:
            return (
                (Payload(self._port, "float32", (len(sound),), data, last),) if len(sound) else ()
            )
        self._file.add(data)
        if not last:
            return ()
        parts = {
            f"{self._port}.type": FORMATS[self._format].media_type,
            self._port: self._file.end(),
        }
        return tuple(
            Payload(port, "uint8", (len(part),), Buffer(part)) for port, part in parts.items()
        )

    def _diffuse(self, stop: int) -> None:
        """Diffuse the codes up to `stop`, with those around them."""
        vocoder, around = self._vocoder, _CONTEXT_BLOCKS * self._vocoder.block
        first, end = max(0, self._diffused - around), min(len(self._codes), stop + around)
        if not self._chunk:
            first, end = 0, len(self._codes)
        noise = vocoder.noise(self._seed, first, end)
        spectrum = vocoder.spectrum(self._codes[first:end], self._voice, noise)
        start, count = self._diffused - first, stop - self._diffused
        frames = slice(start * vocoder.repeats, (start + count) * vocoder.repeats)
        self._spectra.append(spectrum[:, :, frames])
        self._diffused = stop

    def _sound(self, *, last: bool) -> Tensor:
        """Return the samples of the frames that have all around them, or of all that are left."""
        vocoder = self._vocoder
        frames = self._diffused * vocoder.repeats
        stop = frames if last else frames - vocoder.reach
        if stop <= self._sounded or not self._spectra:
            return torch.zeros(0)
        spectrum = torch.cat(self._spectra, dim=2)
        held = frames - spectrum.shape[2]
        first = max(0, self._sounded - vocoder.reach)
        sound = vocoder.sound(spectrum[:, :, first - held :])
        found = sound[(self._sounded - first) * vocoder.hop : (stop - first) * vocoder.hop]
        self._sounded = stop
        # What is before the next samples' reach is not needed any more.
        self._spectra = [spectrum[:, :, max(0, stop - vocoder.reach - held) :]]
        return found


def reach_of(config: Any) -> int:
    """Return the frames on each side that a sample of BigVGAN depends on, rounded up.

    Args:
        config: transformers' `Qwen2_5OmniBigVGANConfig`.
    """
    rate, reach = 1, 3.0
    for stride, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        reach += kernel / stride / rate
        rate *= stride
        widest = 0
        for size, dilations in zip(
            config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
        ):
            own = sum(
                (size - 1) // 2 * dilation + (size - 1) // 2 + 2 * _FILTER for dilation in dilations
            )
            widest = max(widest, own)
        reach += widest / rate
    return ceil(reach + (3 + _FILTER) / rate) + 1


_FILTER = 12
"""Samples that the filters around an activation reach, at most."""
