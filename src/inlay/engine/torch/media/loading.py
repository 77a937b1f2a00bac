"""Loading of towers, and of the encoder around one."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import PIL
import torch
import transformers
from msgspec.structs import replace

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.part_check import tower_parts
from inlay.engine.torch.media.processing import BACKEND
from inlay.engine.torch.media.readers import Readers, readers_of
from inlay.engine.torch.media.tower import Tower
from inlay.engine.torch.self_check.parts import checked_parts
from inlay.engine.torch.weights.checkpoint import device_of, dtype_of, load, parsed_config
from inlay.engine.torch.weights.division import split_tower
from inlay.engine.torch.weights.families import context_length, family_of
from inlay.engine.torch.weights.media_families import MEDIA_FAMILIES, ImageFamily
from inlay.engine.weights import directory_of, weights_id
from inlay.media.decoder import can_decode
from inlay.media.families import spec_of
from inlay.media.spec import MediaSpec
from inlay.messages.card import SelfCheck
from inlay.tensors.checkpoint import config_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTower:
    """The tower and the projector of a checkpoint, without its language model.

    Attributes:
        body: transformers module that computes image features.
        directory: of the model's files.
        vocab_size: of the language model; its token ids stand in prompts beside images.
        hidden_size: elements of a row.
        max_model_len: maximum number of positions of a sequence.
        weights_id: identity of configuration and weights, 32 hex digits.
        dtype: of its weights and rows.
    """

    body: Any
    directory: Path
    vocab_size: int
    hidden_size: int
    max_model_len: int
    weights_id: str
    dtype: torch.dtype


def load_tower(settings: EngineSettings) -> LoadedTower:
    """Load the tower that `settings` names, and set the number of CPU threads.

    The layers of the language model are not read. Its embedding table and its head are, into memory
    of the CPU, and dropped.

    Raises:
        InvalidRequestError: an unsupported model, dtype or context length.
    """
    directory = directory_of(settings.model.model, settings.model.revision)
    config = config_of(directory)
    family = _family(config)
    device = device_of(settings.model.device)
    if settings.adapters.enable_lora:
        raise InvalidRequestError(
            "--enable-lora is for the language model, which --task encode does not load",
            param="enable_lora",
        )
    if device.type == "cpu":
        torch.set_num_threads(threads.count(settings.devices.num_threads))
    parsed = parsed_config(directory)
    text = parsed.get_text_config()
    max_model_len = context_length(settings.batch.max_model_len, text.to_dict())
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    if getattr(text, "hidden_size_per_layer_input", 0):
        text.hidden_size_per_layer_input = text.num_kv_shared_layers = 0
    model = load(
        getattr(transformers, family.architecture),
        directory,
        dtype=dtype_of(settings.model.dtype, config, device),
        attn_implementation={"text_config": "eager"},
        config=parsed,
    )
    _, body = split_tower(model, family)
    return LoadedTower(
        body.to(device),
        directory,
        text.vocab_size,
        text.hidden_size,
        max_model_len,
        weights_id(directory),
        next(body.parameters()).dtype,
    )


def _family(config: dict[str, Any]) -> ImageFamily:
    family = family_of(config)
    if family.language is None:
        raise InvalidRequestError(
            f"models of type {family.model_type!r} have no encoder of images: --task encode serves "
            f"{', '.join(sorted(MEDIA_FAMILIES))}"
        )
    return family


class WithMedia(Protocol):
    """A loaded model that may take media.

    Attributes:
        takes_media: its prompts may hold media.
        tower: as `LoadedTower.body`; None if other workers alone encode.
        path: directory of the model's files.
        hidden_size: elements of a row.
        weights_id: identity of configuration and weights.
        dtype: of the rows.
        self_check: result of its own check.
    """

    takes_media: bool
    tower: Any
    path: str
    hidden_size: int
    weights_id: str
    dtype: torch.dtype
    self_check: SelfCheck | None


def encoder_of(settings: EngineSettings, model: WithMedia) -> TowerEncoder | None:
    """Return the encoder of a model's media; None, with a log line, if it takes none.

    Raises `EngineError` as `media_encoder`.
    """
    if not model.takes_media:
        return None
    try:
        return media_encoder(
            settings,
            model.tower,
            Path(model.path),
            model.hidden_size,
            model.weights_id,
            model.dtype,
            model.self_check,
        )
    except InvalidRequestError as error:
        _logger.warning("the model serves text alone, without images: %s", error.message)
        return None


def media_encoder(
    settings: EngineSettings,
    body: Any,
    directory: Path,
    hidden_size: int,
    weights_id: str,
    dtype: torch.dtype,
    found: SelfCheck | None = None,
) -> TowerEncoder:
    """Return the encoder of a model's media.

    Args:
        settings: of the engine.
        body: as in `LoadedTower`; None if other workers alone encode.
        directory: of the model's files.
        hidden_size: elements of a row.
        weights_id: identity of configuration and weights.
        dtype: of the rows.
        found: result of the check of the language model.

    Raises:
        InvalidRequestError: media of the model cannot be laid out or processed.
        EngineError: what the tower makes in its dtype is not finite.
    """
    tower = None if body is None else Tower(body, hidden_size)
    torch_version = torch.__version__.partition("+")[0]  # CPUs' and GPUs' resize alike
    backend = (BACKEND, torch_version, PIL.__version__, transformers.__version__, str(dtype))
    spec = _spec_of(
        directory,
        weights_id=weights_id,
        backend=" ".join(backend),
        max_items=settings.media.max_media_items,
        processor_kwargs=settings.media.processor_kwargs,
    )
    if spec is None:
        raise InvalidRequestError("its layout of media is not known")
    video = spec.video
    if video is not None:  # whoever encodes elsewhere says itself what it cannot decode
        video = replace(video, containers=body is None or can_decode())
    spec = replace(spec, embeds=settings.media.enable_mm_embeds, video=video)
    readers: Readers = {}
    if tower is not None:
        readers = readers_of(directory, tower.body.config, spec)
        parts = tower_parts(tower, readers, spec)
        found = checked_parts(settings.health.self_check, dtype, parts, found)
    return TowerEncoder(
        tower,
        readers,
        spec,
        self_check=found,
        cache_bytes=settings.media.encoder_cache_bytes,
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=hidden_size,
    )


def _spec_of(directory: Path, **options: Any) -> MediaSpec | None:
    """As `spec_of`, with videos if the model's files say how they are laid out."""
    try:
        return spec_of(directory, video=True, **options)
    except InvalidRequestError as error:
        found = spec_of(directory, **options)
        _logger.warning("the model takes no videos: %s", error.message)
        return found
