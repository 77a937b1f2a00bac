"""Loading of the talker, or of the vocoder, of a model of Qwen2.5-Omni's family."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniToken2WavModel,
)

from inlay.base.errors import InvalidRequestError
from inlay.engine.extension_options import section_of
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.weights.checkpoint import device_of, dtype_of
from inlay.engine.weights import directory_of, weights_id
from inlay.tensors.checkpoint import config_of, stored_tensors
from inlay.tensors.tidy_directory import tidied
from inlay_stages.engines.speech.job import Model
from inlay_stages.engines.speech.talker import Talker, TextRows
from inlay_stages.engines.speech.vocoder import Vocoder, Voice
from inlay_stages.options import StageOptions

SPEAKERS = "speakers.safetensors"
"""File of the voices: `NAME.bos_token`, an id; `NAME.cond` and `NAME.ref_mel`, float32."""

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech."
)
"""System message that Qwen2.5-Omni's authors ask for where the model is to speak."""

_TABLE = "thinker.model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSpeech:
    """A talker or a vocoder, and what its card says.

    Attributes:
        model: it.
        path: directory of the whole model.
        weights_id: 32 hex digits.
        dtype: in which it computes.
        device: it runs on.
        width: elements of what the talker hears.
        max_length: positions that it takes.
        samples_per_code: of the sound of one code.
    """

    model: Model
    path: Path
    weights_id: str
    dtype: torch.dtype
    device: torch.device
    width: int
    max_length: int
    samples_per_code: int


def load(settings: EngineSettings) -> LoadedSpeech:
    """Load the part that `settings` names, and set the number of CPU threads.

    Raises:
        InvalidRequestError: another model, or one whose files lack something.
    """
    directory = directory_of(settings.model.model, settings.model.revision)
    part = section_of(settings, StageOptions).part
    if part not in ("talker", "token2wav"):
        raise InvalidRequestError(
            "the speech engine runs the stages talk and vocode of a graph, not a whole model"
        )
    device = device_of(settings.model.device)
    if device.type == "cpu":
        torch.set_num_threads(threads.count(settings.devices.num_threads))
    try:
        with tidied(directory) as tidy:
            config = AutoConfig.from_pretrained(
                tidy, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{directory} cannot be loaded: {error}") from error
    if not isinstance(config, Qwen2_5OmniConfig) or not config.enable_audio_output:
        raise InvalidRequestError(
            f"{directory} is a {config.model_type} and does not speak; served: qwen2_5_omni"
        )
    speakers = _speakers(directory)
    if part == "talker":
        dtype = dtype_of(settings.model.dtype, config_of(directory), device)
        model: Model = _talker(directory, config, speakers, dtype, device)
    else:
        # As in transformers: the vocoder computes in float32.
        dtype = torch.float32
        model = _vocoder(directory, config, speakers, device)
    return LoadedSpeech(
        model=model,
        path=directory,
        weights_id=weights_id(directory),
        dtype=dtype,
        device=device,
        width=config.talker_config.embedding_size,
        max_length=config.talker_config.max_position_embeddings,
        samples_per_code=config.token2wav_config.dit_config.repeats
        * prod(config.token2wav_config.bigvgan_config.upsample_rates),
    )


def _talker(
    directory: Path,
    config: Any,
    speakers: Mapping[str, Mapping[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> Talker:
    own = config.talker_config
    model = Qwen2_5OmniTalkerForConditionalGeneration._from_config(
        own, dtype=dtype, attn_implementation="sdpa"
    )
    _fill(model, directory, "talker.")
    starts = {name: int(parts["bos_token"]) for name, parts in speakers.items()}
    ids = [*starts.values(), own.tts_text_end_token_id, own.tts_text_pad_token_id]
    rows = _rows(directory, ids).to(device, dtype)
    table = TextRows(dict(zip(starts, rows, strict=False)), rows[-2], rows[-1])
    return Talker(model.to(device).requires_grad_(False).eval(), table)


def _vocoder(
    directory: Path,
    config: Any,
    speakers: Mapping[str, Mapping[str, Tensor]],
    device: torch.device,
) -> Vocoder:
    model = Qwen2_5OmniToken2WavModel._from_config(
        config.token2wav_config, dtype=torch.float32, attn_implementation="sdpa"
    )
    _fill(model, directory, "token2wav.")
    voices = {
        name: Voice(parts["cond"].to(device).float(), parts["ref_mel"].to(device).float())
        for name, parts in speakers.items()
    }
    return Vocoder(model.to(device).requires_grad_(False).eval(), voices)


def _fill(model: nn.Module, directory: Path, prefix: str) -> None:
    """Give a model the weights whose names begin with `prefix`.

    Raises `InvalidRequestError` if there are others, or not all.
    """
    found: dict[str, Tensor] = {}
    for tensor in stored_tensors(directory, lambda name: name.startswith(prefix)):
        if tensor.name.startswith(prefix):
            with safe_open(tensor.file, "pt") as file:
                found[tensor.name.removeprefix(prefix)] = file.get_tensor(tensor.name)
    try:
        model.load_state_dict(found, strict=True)
    except RuntimeError as error:
        raise InvalidRequestError(f"{directory} cannot be loaded: {error}") from error


def _rows(directory: Path, ids: list[int]) -> Tensor:
    """Return rows of the thinker's embedding table."""
    for tensor in stored_tensors(directory, lambda name: name == _TABLE):
        if tensor.name == _TABLE:
            if max(ids) >= tensor.shape[0]:
                raise InvalidRequestError(
                    f"{directory}: the id {max(ids)} of a voice or of the configuration is beyond "
                    f"the {tensor.shape[0]} rows of {_TABLE}"
                )
            with safe_open(tensor.file, "pt") as file:
                table = file.get_slice(_TABLE)
                return torch.cat([table[id_ : id_ + 1] for id_ in ids])
    raise InvalidRequestError(f"{directory} lacks {_TABLE}")


def _speakers(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Return the parts of each voice."""
    path = directory / SPEAKERS
    voices: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                voice, _, part = name.rpartition(".")
                voices.setdefault(voice, {})[part] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read: {error}; docs/pipelines.md says how to write it from "
            "spk_dict.pt, which is pickled and is not read"
        ) from error
    for voice, parts in voices.items():
        lacking = {"bos_token", "cond", "ref_mel"} - {*parts}
        if lacking:
            raise InvalidRequestError(f"{path}: the voice {voice!r} lacks {min(lacking)}")
    if not voices:
        raise InvalidRequestError(f"{path} has no voices")
    return voices
