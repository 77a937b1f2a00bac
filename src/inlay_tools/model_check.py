"""The comparison of a model with its own code, for `inlay doctor`."""

from typing import Literal

from inlay.card import SelfCheck
from inlay.engine.settings import DtypeName, EngineSettings
from inlay.engine.task import with_task
from inlay.errors import InvalidRequestError


def self_check_of(name: str, dtype: DtypeName, device: Literal["auto", "cpu", "cuda"]) -> SelfCheck:
    """Load a model that generates or makes vectors, and compare it in full.

    Args:
        name: directory, or name on the hub.
        dtype: as `EngineSettings.dtype`.
        device: as `EngineSettings.device`.

    Raises:
        InvalidRequestError: it cannot be loaded, or does neither.
        EngineError: its numbers are wrong.
        ImportError: the torch engine is not installed.
    """
    settings = with_task(EngineSettings(model=name, dtype=dtype, device=device, self_check="full"))
    if settings.task == "generate":
        from inlay.engine.torch.model import CausalModel

        found = CausalModel.load(settings).self_check
    elif settings.task in ("embed", "score"):
        from inlay.engine.embed.encoder import Encoder

        found = Encoder.load(settings).self_check
    else:
        found = None
    if found is None:
        raise InvalidRequestError(
            f"{name} is a model for the task {settings.task!r}; those that generate text, embed or "
            "score are compared with their own code"
        )
    return found
