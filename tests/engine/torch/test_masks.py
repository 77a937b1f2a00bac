"""Order in which masks are computed, and their limits."""

import queue
import threading
from collections.abc import Hashable, Iterator

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.grammar import state as grammar_state
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.grammar.masks import Masks
from inlay.engine.torch.grammar.state import GrammarState, Mask
from inlay.messages.request import Grammar
from tests.models import EOS_ID, VOCAB_SIZE, tiny

HELD = 60.0
SHARE = 2
"""Of the four threads, for one client."""


class Sequence:
    """One that may be given tokens."""

    def __init__(self, name: str, client: Hashable, grammar: GrammarState) -> None:
        self.name = name
        self.client = client
        self.grammar: GrammarState = grammar
        self.output: list[int] = []


class Held:
    """Real masks, each of which is computed when it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, made: Grammars) -> None:
        self.begun: queue.Queue[str] = queue.Queue()
        self.masks = Masks()
        self._names: dict[GrammarState, str] = {}
        self._let_go: dict[str, threading.Event] = {}
        self._made = made
        mask = GrammarState.mask

        def held(state: GrammarState) -> Mask | None:
            name = self._names[state]
            self.begun.put(name)
            assert self._let_go[name].wait(HELD)
            return mask(state)

        patch.setattr(GrammarState, "mask", held)

    def sequence(self, name: str, *, go: bool = False) -> Sequence:
        """One whose client is the first letter of its name."""
        state = self._made.start(Grammar("regex", "[a-z]{50}"), (), ()).state.result(HELD)
        self._names[state] = name
        self._let_go[name] = threading.Event()
        if go:
            self.let_go(name)
        return Sequence(name, name[0], state)

    def let_go(self, name: str) -> None:
        self._let_go[name].set()

    def next(self) -> str:
        return self.begun.get(timeout=HELD)

    def close(self) -> None:
        self.masks.close()
        for event in self._let_go.values():
            event.set()


@pytest.fixture(scope="module")
def made() -> Iterator[Grammars]:
    made = Grammars(tiny("llama"), VOCAB_SIZE, (EOS_ID,))
    yield made
    made.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, made: Grammars) -> Iterator[Held]:
    held = Held(monkeypatch, made)
    yield held
    held.close()


def letter(sequence: Sequence) -> int:
    """An id that its mask allows."""
    mask = sequence.grammar.prepared()
    assert mask is not None
    return next(id_ for id_ in range(VOCAB_SIZE) if mask[id_ >> 5] >> (id_ & 31) & 1)


def test_masks_that_never_end_take_no_turn_of_another_client(held: Held) -> None:
    hostile = [held.sequence(f"a{n}") for n in range(16)]
    good = held.sequence("b", go=True)
    held.masks.begin_masks(hostile)
    assert {held.next() for _ in range(SHARE)} == {"a0", "a1"}
    for _ in range(5):
        held.masks.begin_masks([*hostile, good])
        assert good.grammar.ready(HELD)
        # Nothing of the other client has begun since.
        assert held.next() == "b"
        assert held.masks.late([*hostile, good]) == dict.fromkeys(hostile)
        good.output.append(letter(good))
    assert held.begun.empty()
    assert not good.grammar.slow


def test_clients_who_take_all_threads_go_once_each_before_another(held: Held) -> None:
    hostile = [held.sequence(f"{client}{n}") for client in "ac" for n in range(8)]
    held.masks.begin_masks(hostile)
    running = {held.next() for _ in range(2 * SHARE)}
    assert running == {"a0", "a1", "c0", "c1"}
    held.masks.begin_masks([held.sequence("b", go=True)])
    begun = []
    for name in ("a0", "c0", "a1"):
        held.let_go(name)
        begun.append(held.next())
    # In the order of coming all sixteen would have been first.
    assert "b" in begun
    assert {*begun} <= {"a2", "c2", "b", "a3"}


def test_the_mask_of_a_sequence_that_has_ended_is_not_computed(held: Held) -> None:
    first, second, ended, after = (held.sequence(f"a{n}") for n in range(4))
    held.masks.begin_masks([first, second, ended, after])
    assert {held.next(), held.next()} == {"a0", "a1"}
    # A computation that has begun cannot be stopped; dropping its result is harmless.
    held.masks.drop(first)
    held.masks.drop(ended)
    held.let_go("a0")
    assert held.next() == "a3"
    for name in ("a1", "a3"):
        held.let_go(name)
    assert second.grammar.ready(HELD)
    assert after.grammar.ready(HELD)
    assert held.begun.empty()


def test_masks_that_cost_too_much_together_end_their_sequence(
    made: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_state, "A_TOKEN", 0.0)
    masks = Masks()
    try:
        state = made.start(Grammar("regex", "[a-z]{50}"), (), ()).state.result(HELD)
        sequence = Sequence("a", "a", state)
        masks.begin_masks([sequence])
        assert state.ready(HELD)
        sequence.output.append(letter(sequence))
        monkeypatch.setattr(grammar_state, "ALLOWANCE", 0.0)
        masks.begin_masks([sequence])
        assert state.ready(HELD)
        error = masks.late([sequence])[sequence]
        assert isinstance(error, InvalidRequestError)
        assert error.param == "grammar"
        assert error.message == (
            "the grammar took more than 0 s for 2 tokens, beside 0 s for each of them; make it simpler"
        )
    finally:
        masks.close()
