"""The masks of a step, computed on threads of their own while the model runs."""

import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from inlay.base.errors import InlayError
from inlay.engine.grammar.fair_executor import FairExecutor
from inlay.engine.torch.grammar.state import GrammarState, Mask

GRACE = 0.05
"""Seconds for which a step waits for masks, once a sequence.

A sequence that was late once is never waited for again.
"""

_THREADS = 4

_SHARE = 2
"""Of the threads, for one client."""


class MaskedSequence(Protocol):
    """The parts of a sequence that masks need."""

    @property
    def output(self) -> Sequence[int]:
        """Ids so far."""

    @property
    def client(self) -> Hashable:
        """The client it belongs to."""

    @property
    def grammar(self) -> GrammarState | None:
        """State of its output in its grammar."""


_S = TypeVar("_S", bound=MaskedSequence)


def forced_tokens(sequences: Iterable[_S]) -> dict[_S, tuple[int, ...]]:
    """Return the ids that must come next, where a grammar allows no other and tells in time.

    A sequence that was late once has none: its rows would be computed for masks that come late too.
    """
    until = time.monotonic() + GRACE
    found: dict[_S, tuple[int, ...]] = {}
    for sequence in sequences:
        if (state := sequence.grammar) is None or state.slow:
            continue
        forced = state.forced(len(sequence.output), max(0.0, until - time.monotonic()))
        state.slow = forced is None
        if forced:
            found[sequence] = forced
    return found


class Masks:
    """Computes them; clients take turns.

    A grammar that takes long is left behind by the steps, and its thread ends when it ends.
    """

    def __init__(self) -> None:
        self._turns: FairExecutor[Mask | None] = FairExecutor(_THREADS, "inlay-mask", share=_SHARE)

    def close(self) -> None:
        """Compute nothing more."""
        self._turns.close()

    def begin_masks(self, sequences: Iterable[MaskedSequence]) -> None:
        """Begin, for those whose next token is chosen in this step."""
        for sequence in sequences:
            if sequence.grammar is not None:
                sequence.grammar.begin_masks(sequence.output, self._turns, sequence.client)

    def drop(self, sequence: MaskedSequence) -> None:
        """A sequence has ended: its mask, where it waits for its turn, is not computed."""
        if sequence.grammar is not None:
            sequence.grammar.drop(self._turns, sequence.client)

    def late(
        self, sequences: Sequence[_S], until: float | None = None
    ) -> dict[_S, InlayError | None]:
        """Those whose next token cannot be chosen in this step.

        Why they must end, or None where they need more time. Masks after drafts are waited for
        `until` a moment, all of a step together; a sequence is not slow for it.
        """
        bound = [sequence for sequence in sequences if sequence.grammar is not None]
        if not bound:
            return {}
        drafted = until is not None
        # With no other in the step no one waits.
        alone = len(bound) == len(sequences) and all(_is_slow(sequence) for sequence in bound)
        until = time.monotonic() + GRACE if until is None else until
        late: dict[_S, InlayError | None] = {}
        for sequence in bound:
            state = sequence.grammar
            if state is None:
                continue
            hurry = state.slow and not alone
            try:
                if state.ready(0.0 if hurry else max(0.0, until - time.monotonic())):
                    state.prepared()
                else:
                    state.slow = state.slow or not drafted
                    late[sequence] = None
            except InlayError as error:
                late[sequence] = error
        return late


def _is_slow(sequence: MaskedSequence) -> bool:
    return sequence.grammar is not None and sequence.grammar.slow
