"""Usage of the stages of a pipeline, as answers have it."""

from collections.abc import Mapping

import msgspec

from inlay.api.schema.stages import StageUsage
from inlay.messages.request import EngineUsage


def shares_of(
    usages: Mapping[str, EngineUsage] | Mapping[str | None, EngineUsage],
) -> dict[str, StageUsage] | msgspec.UnsetType:
    """Return the share of each stage by its name; nothing of a model that is no pipeline."""
    found = {
        name: StageUsage(usage.prompt_tokens, usage.completion_tokens)
        for name, usage in usages.items()
        if name is not None
    }
    return found or msgspec.UNSET
