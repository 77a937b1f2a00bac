"""What an engine cannot do safely, or at all, as its card declares it and clients are shown it."""

from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

EMBEDS_OFF = "You must set --enable-prompt-embeds on its workers"
"""Value of `ModelCard.prompt_embeds` of a worker started without `--enable-prompt-embeds`."""

Feature: TypeAlias = Literal[
    "adapter",
    "grammar",
    "grammar_after",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prior_output_with_grammar",
    "prior_output_with_penalties",
    "temperature_above_2",
    "logprob_token_ids",
    "thinking_token_budget",
]
"""What a request may ask for beyond a plain continuation of its prompt."""

Prompts: TypeAlias = Literal["any", "rows", "mixed"]
"""With which prompts: any, those with rows, or those with rows and tokens."""


class Refusal(msgspec.Struct, frozen=True):
    """One thing an engine refuses.

    Attributes:
        feature: what may not be asked for.
        prompts: together with which prompts.
        reason: what would happen; a sentence without its full stop.
    """

    feature: Feature
    prompts: Prompts
    reason: str


class Exactness(StrEnum):
    """Equality of a resumed stream, with a feature in use, to one that was not cut.

    What was shown before is never changed. ROUNDED is what 16 bits give: numbers depend on what is computed
    together, so that where two tokens are nearly equally likely the other may come, and what follows is
    another continuation.
    """

    EXACT = "exact"
    ROUNDED = "rounded"
    SAMPLED = "sampled"
    IMPOSSIBLE = "impossible"

    @classmethod
    def of_dtype(cls, dtype: str) -> "Exactness":
        """EXACT or ROUNDED, by a model's activation dtype."""
        return cls.EXACT if dtype == "float32" else cls.ROUNDED
