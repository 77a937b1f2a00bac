"""The comparison of a model with its own code, for `inlay doctor`."""

import asyncio
from typing import TYPE_CHECKING, Literal

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import DtypeName, EngineSettings
from inlay.engine.task import with_engine, with_task
from inlay.messages.card import SelfCheck

if TYPE_CHECKING:
    from inlay.engine.torch.media.loading import WithMedia


def self_check_of(name: str, dtype: DtypeName, device: Literal["auto", "cpu", "cuda"]) -> SelfCheck:
    """Load a model that generates, makes vectors or draws, and compare it in full.

    Args:
        name: directory, or name on the hub.
        dtype: as `EngineSettings.dtype`.
        device: as `EngineSettings.device`.

    Raises:
        InvalidRequestError: it cannot be loaded, or does neither.
        EngineError: its numbers are wrong.
        ImportError: the torch engine is not installed.
    """
    given = EngineSettings(model=name, dtype=dtype, device=device, self_check="full")
    settings = with_task(with_engine(given))
    if settings.task == "generate":
        from inlay.engine.torch.model import CausalModel

        found = _with_tower(settings, CausalModel.load(settings))
    elif settings.task in ("embed", "score"):
        from inlay.engine.embed.encoder import Encoder

        found = _with_tower(settings, Encoder.load(settings))
    elif settings.engine == "diffusers":
        from inlay.engine.torch.self_check.parts import checked_parts
        from inlay_stages.engines.diffusers.loading import load
        from inlay_stages.engines.diffusers.part_check import pipeline_parts

        loaded = load(settings)
        found = checked_parts(settings.self_check, loaded.dtype, pipeline_parts(loaded))
    else:
        found = None
    if found is None:
        raise InvalidRequestError(
            f"{name} is a model for the task {settings.task!r}; those that generate text, embed, "
            "score or draw are compared"
        )
    return found


def _with_tower(settings: EngineSettings, model: "WithMedia") -> SelfCheck | None:
    from inlay.engine.torch.media.loading import encoder_of

    encoder = encoder_of(settings, model)
    if encoder is None:
        return model.self_check
    asyncio.run(encoder.close())
    return encoder.self_check
