"""Choice of the LoRA adapters of a step, if more are wanted than a step can hold. Pure Python.

A step computes with at most `max_loras` adapters. Sequences of the other adapters rest: they keep
their pages and are not scheduled. A chosen adapter stays for `TURN` steps while it has something to
compute, so that adapters are not copied in at every step; then it yields to the one that has rested
longest. So the length of a rest depends on the number of wanted adapters, and not on the length of
the others' outputs.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Run

from inlay.engine.torch.sequence import Sequence

TURN = 16
"""Steps an adapter stays while others rest."""

STARVED = 4 * TURN
"""Steps of rest after which an adapter precedes those of better priority."""


class AdapterTurns:
    """Chooses the adapters of each step.

    Args:
        max_loras: maximum number of adapters in one step, at least 1.
    """

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._steps: dict[str, int] = {}
        """Adapters of the last step, with the number of consecutive steps each was chosen."""
        self._rests: dict[str, int] = {}
        """Other wanted adapters, with the number of consecutive steps each has rested."""

    def choose(self, sequences: Iterable[Sequence]) -> frozenset[str]:
        """Choose the adapters of the next step.

        Returns:
            The adapters whose sequences rest in this step.
        """
        orders: dict[str, tuple[int, int]] = {}
        for sequence in sequences:
            name = sequence.request.adapter
            if name is not None:
                orders[name] = min(orders.get(name, sequence.order), sequence.order)
        self._steps = {name: steps + 1 for name, steps in self._steps.items() if name in orders}
        self._rests = {name: rests + 1 for name, rests in self._rests.items() if name in orders}
        return self._divide(sorted(orders, key=lambda name: self._rank(name, orders[name])))

    def give(self, name: str) -> frozenset[str]:
        """Add `name` to the step just chosen, in the place of another adapter.

        Returns the adapters that now rest.
        """
        others = (other for other in (*self._steps, *self._rests) if other != name)
        return self._divide([name, *others])

    def _divide(self, names: Run[str]) -> frozenset[str]:
        chosen, resting = names[: self._max_loras], names[self._max_loras :]
        self._steps = {name: self._steps.get(name, 0) for name in chosen}
        self._rests = {name: self._rests.get(name, 0) for name in resting}
        return frozenset(resting)

    def _rank(self, name: str, order: tuple[int, int]) -> tuple[int, int, int, int, int]:
        """Sort key: starved, priority, in its turn, length of rest, arrival."""
        priority, arrival = order
        rests, steps = self._rests.get(name, 0), self._steps.get(name)
        if steps is None:
            return rests < STARVED, priority, 1, -rests, arrival
        return True, priority, 0 if steps < TURN else 2, steps, arrival
