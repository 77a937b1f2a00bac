"""Shares of the stages of a pipeline, where an API counts input and output tokens."""

from collections.abc import Mapping

import msgspec

from inlay.request import Usage


class StageUsage(msgspec.Struct, frozen=True):
    """Positions that one stage of a pipeline read, and what it made: tokens, codes or samples."""

    input_tokens: int
    output_tokens: int


def shares_of(
    usages: Mapping[str, Usage] | Mapping[str | None, Usage],
) -> dict[str, StageUsage] | msgspec.UnsetType:
    """Return the share of each stage by its name; nothing of a model that is no pipeline."""
    found = {
        name: StageUsage(usage.prompt_tokens, usage.completion_tokens)
        for name, usage in usages.items()
        if name is not None
    }
    return found or msgspec.UNSET
