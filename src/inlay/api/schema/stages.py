"""Usage of the stages of a pipeline, as answers have it."""

from typing import Annotated, TypeAlias

import msgspec

from inlay.messages.fields import field


class StageUsage(msgspec.Struct, frozen=True):
    """Positions that one stage of a pipeline read, and what it made: tokens, codes or samples."""

    input_tokens: Annotated[int, field("positions that the stage read.", 17)]
    output_tokens: Annotated[int, field("positions that it made.", 1024)]


Stages: TypeAlias = Annotated[
    dict[str, StageUsage] | msgspec.UnsetType,
    field("share of each stage of a pipeline, by its name."),
]
