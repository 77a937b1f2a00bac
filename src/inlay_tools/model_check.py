"""The comparison of a model with its own code, for `inlay doctor`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inlay.base.errors import InvalidRequestError
from inlay.engine.sections import DtypeName
from inlay.engine.settings import EngineSettings
from inlay.engine.task import with_engine, with_task
from inlay.messages.card import SelfCheck
from inlay.render.tokenizer import load_tokenizer
from inlay.tensors.hub import local_directory

WINDOW = 256
"""Tokens of a text that are computed together, after what the tokenizer begins a text with."""

if TYPE_CHECKING:
    from inlay.engine.torch.media.loading import WithMedia


def self_check_of(
    name: str,
    dtype: DtypeName,
    device: Literal["auto", "cpu", "cuda"],
    quantization: Literal["int8", "q4_k"] | None = None,
) -> SelfCheck:
    """Load a model that generates, makes vectors or draws, and compare it in full.

    Args:
        name: directory, or name on the hub.
        dtype: as `EngineSettings.dtype`.
        device: as `EngineSettings.device`.
        quantization: as `EngineSettings.quantization`.

    Raises:
        InvalidRequestError: it cannot be loaded, or does neither.
        EngineError: its numbers are wrong.
        ImportError: the torch engine is not installed.
    """
    given = EngineSettings.of(
        model=name, dtype=dtype, device=device, quantization=quantization, self_check="full"
    )
    settings = with_task(with_engine(given))
    if settings.model.task == "generate":
        from inlay.engine.torch.model import CausalModel

        found = _with_tower(settings, CausalModel.load(settings))
    elif settings.model.task in ("embed", "score"):
        from inlay.engine.embed.encoder import Encoder

        found = _with_tower(settings, Encoder.load(settings))
    elif settings.model.engine == "diffusers":
        from inlay.engine.torch.self_check.parts import checked_parts
        from inlay_stages.engines.diffusers.loading import load
        from inlay_stages.engines.diffusers.part_check import pipeline_parts

        loaded = load(settings)
        found = checked_parts(settings.health.self_check, loaded.dtype, pipeline_parts(loaded))
    else:
        found = None
    if found is None:
        raise InvalidRequestError(
            f"{name} is a model for the task {settings.model.task!r}; those that generate text, "
            "embed, score or draw are compared"
        )
    return found


def windows_of(name: str, text: str) -> list[list[int]]:
    """The ids of a text for a model, in windows of `WINDOW`; a shorter end is left out.

    Args:
        name: directory or file of the model, or its name on the hub.
        text: of any length.

    Raises:
        InvalidRequestError: its tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(local_directory(name) or Path(name)).tokenizer
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    lead: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    last = len(ids) - WINDOW + 1
    return [[*lead, *ids[start : start + WINDOW]] for start in range(0, last, WINDOW)]


def _with_tower(settings: EngineSettings, model: "WithMedia") -> SelfCheck | None:
    from inlay.engine.torch.media.loading import encoder_of

    encoder = encoder_of(settings, model)
    if encoder is None:
        return model.self_check
    asyncio.run(encoder.close())
    return encoder.self_check
