"""Interface of a model that computes vectors for `EmbedEngine`: local, or another engine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from inlay.base.errors import EngineError
from inlay.embedding.cache import Bundle
from inlay.messages.card import ModelCard, Stats
from inlay.messages.prompt import Media, Prompt, Rows


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One prompt to embed, already checked.

    Attributes:
        prompt: at least one position; media are rows.
        second_from: start of its second text; the prompt's length if it is not a pair.
        salt: separates the caches of tenants.
        outputs: names of what is wanted; empty for the model's first.
        visible: the first positions that others see; None where they see all.
        max_active: weights that are kept of a sparse vector; 0 for all.
        spans: as in `Pooling.spans`.
    """

    prompt: Prompt
    second_from: int
    salt: str | None = None
    outputs: tuple[str, ...] = ()
    visible: int | None = None
    max_active: int = 0
    spans: tuple[int, ...] = ()


class MediaRows(Protocol):
    """Encodes media, for the requests of one event loop."""

    async def rows(self, run: Media, *, salt: str | None, client: Hashable, priority: int) -> Rows:
        """Return the rows of the whole item that `run` is of.

        Raises `InlayError`: the file is not valid, or it cannot be encoded.
        """

    def counted(self, stats: Stats) -> Stats:
        """Return `stats` with the counters of media."""


@dataclass(frozen=True, slots=True)
class LoadedEmbeddingModel:
    """A loaded model.

    Attributes:
        card: metadata to announce.
        budget: positions of a batch.
        batches: maximum number of batches at a time.
        media: encodes the media of prompts; None if the model takes none.
    """

    card: ModelCard
    budget: int
    batches: int = 1
    media: MediaRows | None = None


class EmbeddingModel(Protocol):
    """Computes vectors, one batch at a time.

    All methods are called on the event loop and must not block it.
    """

    async def start(self) -> LoadedEmbeddingModel:
        """Load the model. Raises `InvalidRequestError` (unsupported) or `EngineError`."""

    async def outputs(self, batch: Sequence[EmbedInput]) -> Sequence[Bundle]:
        """Compute what each prompt wants, not normalised, and logits as they are.

        An error fails the batch.
        """

    async def failed(self) -> EngineError:
        """Wait for a permanent failure and return it; never returns if there is none."""

    async def close(self) -> None:
        """Release the model. No batch is running."""
