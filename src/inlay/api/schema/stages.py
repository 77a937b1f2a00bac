"""Shares of the stages of a pipeline, where an API counts input and output tokens."""

import msgspec


class StageUsage(msgspec.Struct, frozen=True):
    """Positions that one stage of a pipeline read, and what it made: tokens, codes or samples."""

    input_tokens: int
    output_tokens: int
