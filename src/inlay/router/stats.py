"""Counters of a router."""

from collections import Counter


class RouterStats:
    """Counters of one router, by the name of the model.

    Attributes:
        decisions: requests sent, by (model, True for a further attempt).
        looked_up: blocks of prompts that were looked up in the index of workers' caches.
        hits: blocks of these that the chosen worker had, as far as was known.
        handovers: prompts that a prefill worker computed for another.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, bool]] = Counter()
        self.looked_up: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.handovers: Counter[str] = Counter()

    def add_decision(self, model: str, requests: int, *, further: bool) -> None:
        """Count requests of one prompt that were sent."""
        self.decisions[model, further] += requests

    def add_lookup(self, model: str, blocks: int, hits: int) -> None:
        """Count the blocks of one lookup."""
        self.looked_up[model] += blocks
        self.hits[model] += hits
