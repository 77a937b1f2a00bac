"""What makes the vectors of an `EmbedEngine`: a model in this process, or another engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inlay.card import ModelCard
from inlay.errors import EngineError
from inlay.prompt import Prompt


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One prompt that is to become a vector; it was held against the card.

    Attributes:
        prompt: of at least one position.
        second_from: where its second text begins; its length where it is no pair.
        salt: separates caches: the tenant.
    """

    prompt: Prompt
    second_from: int
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedEmbeddingModel:
    """A model that is ready.

    Attributes:
        card: what is announced.
        budget: positions of a batch.
        batches: how many are given to it at a time.
    """

    card: ModelCard
    budget: int
    batches: int = 1


class EmbeddingModel(Protocol):
    """Makes vectors, a batch at a time.

    Every method is called on the event loop and does not block it.
    """

    async def start(self) -> LoadedEmbeddingModel:
        """Load it. Raises `InvalidRequestError` (a model or settings it refuses) or `EngineError`."""
        ...

    async def vectors(self, batch: Sequence[EmbedInput]) -> npt.NDArray[np.float32]:
        """What comes of each prompt: [len(batch), size], not normalised.

        Of a scoring model, logits. What it raises ends the batch.
        """
        ...

    async def failed(self) -> EngineError:
        """Return why, once it has failed for good; never, where it cannot."""
        ...

    async def close(self) -> None:
        """Let go of the model. No batch is under way."""
        ...


__all__ = ["EmbedInput", "EmbeddingModel", "LoadedEmbeddingModel"]
