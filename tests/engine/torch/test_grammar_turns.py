"""Order of grammar compilations among clients, and errors of those that fail."""

import asyncio
import queue
import threading
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.grammar import source as grammar_source
from inlay.engine.grammar import trial
from inlay.engine.grammar.matchers import refusal
from inlay.engine.torch.grammar import grammars
from inlay.messages.request import Grammar
from tests.models import EOS_ID, VOCAB_SIZE, tiny


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny("llama")


async def test_what_nobody_waits_for_is_not_compiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(grammar: Grammar) -> str:
        compiled.append(grammar.source)
        begun.set()
        assert go_on.wait(60)
        return grammar_source.source_of(grammar)

    monkeypatch.setattr(trial, "source_of", slow)
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        first, left, shared, other = (
            made.start(Grammar("regex", regex), (), (), client="a") for regex in "abcc"
        )
        assert begun.wait(60)
        left.state.cancel()
        shared.state.cancel()
        assert len(made) == 2
        go_on.set()
        await asyncio.gather(asyncio.wrap_future(first.state), asyncio.wrap_future(other.state))
        assert compiled == ["a", "c"]
        again = made.start(Grammar("regex", "b"), (), (), client="a")
        await asyncio.wrap_future(again.state)
        assert compiled == ["a", "c", "b"]
    finally:
        go_on.set()
        made.close()


async def test_clients_take_turns_at_compiling(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, threading.Event] = {regex: threading.Event() for regex in "abcdx"}
    begun: queue.Queue[str] = queue.Queue()

    def slow(grammar: Grammar) -> str:
        begun.put(grammar.source)
        assert held[grammar.source].wait(60)
        return grammar_source.source_of(grammar)

    monkeypatch.setattr(trial, "source_of", slow)
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        mine = [made.start(Grammar("regex", regex), (), (), client="hostile") for regex in "abcd"]
        assert begun.get(timeout=180) == "a"
        good = made.start(Grammar("regex", "x"), (), (), client="good")
        # One of a client at a time, whatever threads are free.
        assert begun.get(timeout=180) == "x"
        assert begun.empty()
        # Whoever else waits for the same has it done in its own turn.
        joined = made.start(Grammar("regex", "d"), (), (), client="third")
        assert begun.get(timeout=180) == "d"
        for one in held.values():
            one.set()
        await asyncio.gather(*(asyncio.wrap_future(one.state) for one in (*mine, good, joined)))
        assert sorted(begun.get(timeout=180) for _ in range(2)) == ["b", "c"]
    finally:
        for one in held.values():
            one.set()
        made.close()


async def test_a_compiled_grammar_is_not_shared_with_another_salt(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counted(grammar: Grammar) -> str:
        compiled.append(grammar.source)
        return grammar_source.source_of(grammar)

    monkeypatch.setattr(trial, "source_of", counted)
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        for salt in (None, "one", "two", "one"):
            await asyncio.wrap_future(made.start(Grammar("regex", "a"), (), (), salt=salt).state)
        assert compiled == ["a"] * 3
    finally:
        made.close()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_grammar_that_comes_too_late_is_told_apart_from_one_that_had_no_turn(
    directory: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    go_on = threading.Event()

    def slow(grammar: Grammar) -> str:
        assert go_on.wait(60)
        return grammar_source.source_of(grammar)

    monkeypatch.setattr(trial, "source_of", slow)
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        one, two = (made.start(Grammar("regex", regex), (), (), client="a") for regex in "ab")
        error = grammars.too_late(one if begun else two)
        assert isinstance(error, InvalidRequestError if begun else OverloadedError)
    finally:
        go_on.set()
        made.close()


async def test_what_the_library_says_of_itself_is_not_shown() -> None:
    error = refusal(
        "panic: assertion failed: grammar.symbols.len() < u16::MAX\n<backtrace>\n 0: <unknown>"
    )
    assert isinstance(error, InvalidRequestError)
    assert (
        error.message
        == "the grammar cannot be used: it is too large or too complex to be compiled; make it smaller"
    )
