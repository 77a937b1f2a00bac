"""What a name of a model stands for."""

from typing import NamedTuple

from inlay.card import Adapter, ModelCard


class ServedModel(NamedTuple):
    """What clients asked for by a name: a model, or one of its adapters.

    Attributes:
        card: of the model.
        adapter: that was named, or None.
    """

    card: ModelCard
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """What answers call it."""
        return self.card.name if self.adapter is None else self.adapter.name

    @property
    def positions_before(self) -> int:
        """Positions that stand before every prompt; they count as the prompt's."""
        return 0 if self.adapter is None else self.adapter.num_positions

    @property
    def max_len(self) -> int:
        """Positions of a client's prompt and its output together."""
        return self.card.limits.max_model_len - self.positions_before


def content_of(card: ModelCard, adapter: str) -> str | None:
    """What the worker with this card knows an adapter's content by.

    None where it has none of this name.
    """
    return next((known.content_id for known in card.adapters if known.name == adapter), None)
