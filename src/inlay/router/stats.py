"""What a router has decided, counted by model."""

from collections import Counter


class RouterStats:
    """Counters of one router, by the model's name.

    Attributes:
        decisions: requests sent, by (model, whether it was a further attempt).
        looked_up: blocks of prompts that were looked for in what workers have cached.
        hits: those of them that the chosen worker has, as far as was known.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, bool]] = Counter()
        self.looked_up: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    def add_decision(self, model: str, requests: int, *, further: bool) -> None:
        """So many requests of one prompt were sent."""
        self.decisions[model, further] += requests

    def add_lookup(self, model: str, blocks: int, hits: int) -> None:
        """A prompt's blocks were looked for."""
        self.looked_up[model] += blocks
        self.hits[model] += hits
