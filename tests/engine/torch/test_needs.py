"""What a request waits for: each need is met once, and nothing is computed before the last is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from inlay.base.errors import EngineError, InlayError
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.needs import (
    GRAMMAR,
    PAGES,
    PAGES_AGAIN,
    Need,
    Needs,
    Result,
)
from inlay.engine.torch.step import Core, SequenceFactory
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Output, Request
from tests.engine.torch.simulation import Simulation, bounds
from tests.engine.torch.test_step import Outcome, core, ids, make_request, prompts, run, truth

REQUEST = make_request("a", Prompt.of(Tokens([5, 6, 7])))


class ByHand:
    """A provider of what the test says."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Need, Callable[[Result], object]]] = []
        self.stopped: list[int] = []
        self.refuses: InlayError | None = None

    def start(
        self, request: Request, need: Need, done: Callable[[Result], object]
    ) -> Callable[[], object]:
        if self.refuses is not None:
            raise self.refuses
        number = len(self.begun)
        self.begun.append((request.id, need, done))
        return lambda: self.stopped.append(number)


@pytest.fixture
def provider() -> ByHand:
    return ByHand()


@pytest.fixture
def met() -> list[tuple[str, Need, Result]]:
    return []


@pytest.fixture
def needs(provider: ByHand, met: list[tuple[str, Need, Result]]) -> Needs:
    made = Needs(lambda *of: met.append(of))
    made.providers["pages"] = made.providers["rows"] = provider
    return made


def test_a_need_is_met_once(
    needs: Needs, provider: ByHand, met: list[tuple[str, Need, Result]]
) -> None:
    needs.ask(REQUEST, PAGES)
    ((request_id, need, done),) = provider.begun
    assert (request_id, need) == ("a", PAGES)
    assert "a" in needs
    done(None)
    done(None)
    assert met == [("a", PAGES, None)]
    assert "a" not in needs
    needs.stop("a")
    assert provider.stopped == []


def test_what_was_stopped_is_never_met(
    needs: Needs, provider: ByHand, met: list[tuple[str, Need, Result]]
) -> None:
    items = [Need("rows", bytes([number])) for number in range(2)]
    for item in items:
        needs.ask(REQUEST, item)
    provider.begun[0][2](None)
    needs.stop("a")
    provider.begun[1][2](None)
    assert met == [("a", items[0], None)]
    assert provider.stopped == [1]


def test_a_need_may_come_again_before_all_of_the_last_is_over(
    needs: Needs, provider: ByHand, met: list[tuple[str, Need, Result]]
) -> None:
    needs.ask(REQUEST, PAGES_AGAIN)
    first = provider.begun[0][2]
    first(None)
    needs.ask(REQUEST, PAGES_AGAIN)
    first(None)
    assert len(met) == 1
    needs.stop_all()
    assert provider.stopped == [1]
    provider.begun[1][2](None)
    assert len(met) == 1


def test_what_cannot_be_begun_is_met_by_its_error(
    needs: Needs, provider: ByHand, met: list[tuple[str, Need, Result]]
) -> None:
    provider.refuses = EngineError("closing")
    needs.ask(REQUEST, PAGES)
    assert met == [("a", PAGES, provider.refuses)]
    assert "a" not in needs


def finish(engine: Core, outputs: list[Output]) -> Outcome:
    while len(engine):
        outputs += engine.step()
    return Outcome(outputs)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nothing_is_computed_before_the_last_need_is_met(order: tuple[int, int]) -> None:
    engine, some = core(), (PAGES, Need("rows", b"0"))
    assert engine.admit(make_request("a", truth_prompt(), 5), needs=some) == []
    for place in order:
        assert engine.step() == []
        assert engine.stats().progress == engine.stats().waiting == 0
        assert engine.rest(0.0) is None
        assert engine.fulfil("a", some[place], None) == []
    assert finish(engine, []).output == truth("llama")["b-text"][:5]


def truth_prompt() -> Prompt:
    return prompts("llama")["b-text"]


def test_an_error_ends_the_request_unless_it_can_compute_what_did_not_come() -> None:
    error = EngineError("it is gone")
    engine = core()
    engine.admit(make_request("a", truth_prompt(), 5), needs=[PAGES])
    assert engine.fulfil("a", PAGES, error) == []
    assert finish(engine, []).output == truth("llama")["b-text"][:5]
    engine.admit(make_request("b", truth_prompt(), 5), needs=[GRAMMAR])
    (ended,) = engine.fulfil("b", GRAMMAR, error)
    assert ended.error is not None
    assert ended.error.message == "it is gone"
    assert len(engine) == 0
    assert engine.fulfil("b", GRAMMAR, error) == []


def test_what_a_request_does_not_need_is_dropped() -> None:
    engine = core()
    engine.admit(make_request("a", truth_prompt(), 5), needs=[PAGES])
    assert engine.fulfil("a", PAGES_AGAIN, EngineError("late")) == []
    assert engine.fulfil("a", GRAMMAR, EngineError("late")) == []
    assert engine.step() == []
    (ended,) = engine.abort("a")
    assert ended.finish_reason == "abort"
    assert engine.stats().waiting == 0


def test_a_grammar_that_comes_later_binds_as_one_that_was_there() -> None:
    engine = core()
    asked = Grammar("regex", "(ab|cd){3}")
    request = make_request("a", truth_prompt(), 12, grammar=asked, ignore_eos=False)
    model = engine.model
    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    try:
        states = [grammars.start(asked, (), ()).state.result(60) for _ in range(2)]
        expected = finish(engine, engine.admit(request, grammar=states[0])).output
        engine.admit(request, needs=[GRAMMAR])
        assert finish(engine, engine.fulfil("a", GRAMMAR, states[1])).output == expected
    finally:
        grammars.close()
    plain = make_request("b", truth_prompt(), 12)
    assert run(core(), plain)["b"].output != expected


@pytest.mark.parametrize(
    ("need", "said"), [(GRAMMAR, "before the grammar was compiled"), (PAGES, "before the output")]
)
def test_the_deadline_passes_while_a_request_waits(need: Need, said: str) -> None:
    engine = core()
    engine.admit(make_request("a", truth_prompt(), 5), 10.0, needs=[need])
    assert engine.step() == []
    assert engine.rest(7.0) == 3.0
    assert engine.expire(9.0) == []
    (ended,) = engine.expire(10.0)
    assert ended.error is not None
    assert said in ended.error.message


def test_the_sequence_of_a_request_that_waits_for_pages_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    make = SequenceFactory.make

    def counted(self: SequenceFactory, request: Request, *args: object) -> object:
        made.append(request.id)
        return make(self, request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SequenceFactory, "make", counted)
    engine = core()
    request = make_request("a", Prompt.of(Tokens(ids(1, 50))), 5)
    engine.admit(request, needs=[PAGES])
    assert engine.find_missing_pages(request).positions == 48
    engine.fulfil("a", PAGES, None)
    finish(engine, [])
    assert made == ["a"]


def two_of_one_prompt() -> Simulation:
    """One computes its prompt, and another waits for its pages."""
    simulation = Simulation(bounds(max_num_batched_tokens=8))
    for _ in range(2):
        simulation.admit(Tokens([1] * 64), max_tokens=3)
    simulation.step()
    first, second = simulation.live
    assert [need.kind for need in second.needs] == ["prefix"]
    assert not first.needs
    assert simulation.scheduler.waiting == [second]
    return simulation


def test_a_page_that_is_computed_releases_who_waits_for_it() -> None:
    simulation = two_of_one_prompt()
    simulation.drain()
    first, second = simulation.ended
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)


def test_nobody_waits_for_a_page_of_a_sequence_that_is_paused() -> None:
    simulation = two_of_one_prompt()
    first, second = simulation.live
    simulation.scheduler.pause(first, True)
    assert not second.needs
    simulation.step()
    assert simulation.scheduler.running == [first, second]
    simulation.scheduler.pause(first, False)
    simulation.drain()


def test_nobody_waits_for_a_page_of_a_sequence_that_ended() -> None:
    simulation = two_of_one_prompt()
    first, second = simulation.live
    simulation.abort(first)
    assert not second.needs
    simulation.drain()
    assert simulation.ended == [second]


def test_a_sequence_that_ends_while_it_waits_is_waited_for_by_nobody() -> None:
    simulation = two_of_one_prompt()
    _, second = simulation.live
    simulation.abort(second)
    simulation.drain()
    assert not any(simulation.scheduler._in_progress._waiters.values())
