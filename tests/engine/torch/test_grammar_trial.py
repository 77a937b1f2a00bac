"""A grammar is compiled in a process that can be killed first.

At its limits, or when its last client has left.
"""

import asyncio
import gc
import itertools
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.grammar.counting import THREADS, GrammarCounter
from inlay.engine.grammar.trial import CHEAP_BYTES, Trial, TrialProcess
from inlay.engine.torch.grammar import grammars
from inlay.messages.request import Grammar
from tests.commands import run
from tests.live import until
from tests.models import EOS_ID, VOCAB_SIZE, tiny


def endless(name: str) -> Grammar:
    """Passes every count and takes many minutes.

    An object of 1,200 patterns for its properties, merged from twenty.
    """
    parts: list[dict[str, Any]] = [
        {"patternProperties": {f"^{name}{part}-{index}$": {} for index in range(60)}}
        for part in range(20)
    ]
    return Grammar("json_schema", json.dumps({"type": "object", "allOf": parts}))


ORDINARY = Grammar("json_schema", json.dumps({"type": "string", "pattern": "^[a-z]+$"}))


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny("llama")


@pytest.fixture
def process(directory: Path) -> Iterator[TrialProcess]:
    made = TrialProcess(directory, (EOS_ID,))
    assert Trial(made, ORDINARY).run()
    yield made
    made.close()


def forks(process: TrialProcess) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def runs(fork: psutil.Process) -> bool:
    try:
        return fork.is_running() and fork.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
def test_what_compiles_for_too_long_is_killed_and_refused(process: TrialProcess) -> None:
    pid = process.pid
    with pytest.raises(InvalidRequestError, match="more than 2 s of processor time"):
        Trial(process, endless("a")).run()
    assert Trial(process, ORDINARY).run()
    assert process.pid == pid
    assert not forks(process)


def test_a_grammar_that_is_none_is_refused_in_the_librarys_words(process: TrialProcess) -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        Trial(process, Grammar("regex", "(a")).run()


async def test_a_trial_that_is_stopped_is_killed(process: TrialProcess) -> None:
    trial = Trial(process, endless("a"))
    running = asyncio.ensure_future(asyncio.to_thread(trial.run))
    await asyncio.to_thread(until, lambda: bool(forks(process)))
    trial.stop()
    with pytest.raises(EngineError, match="stopped"):
        await running
    await asyncio.to_thread(until, lambda: bool(not forks(process)))
    with pytest.raises(EngineError, match="stopped"):
        trial.run()


async def test_the_process_is_started_again_when_it_has_died(process: TrialProcess) -> None:
    running = asyncio.ensure_future(asyncio.to_thread(Trial(process, endless("a")).run))
    await asyncio.to_thread(until, lambda: bool(forks(process)))
    pid, (fork,) = process.pid, forks(process)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # The fork has the other end as well, until its own limit ends it.
    with pytest.raises(EngineError, match="died"):
        await running
    assert await asyncio.to_thread(Trial(process, ORDINARY).run)
    assert process.pid != pid
    await asyncio.to_thread(until, lambda: not runs(fork))


@pytest.mark.thorough
async def test_a_grammar_whose_process_died_is_compiled_anew(directory: Path) -> None:
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        waiting = made.start(endless("a"), (), ())
        await asyncio.to_thread(until, lambda: bool(made._trials.pid and forks(made._trials)))
        (fork,) = forks(made._trials)
        fork.kill()
        with pytest.raises(EngineError, match="died"):
            await asyncio.wrap_future(waiting.state)
        with pytest.raises(InvalidRequestError, match="more than 2 s of processor time"):
            await asyncio.wrap_future(made.start(endless("a"), (), ()).state)
        assert len(made) == 1
    finally:
        made.close()


async def test_a_compile_ends_when_its_last_client_has_left(directory: Path) -> None:
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    process = made._trials
    try:
        one, other = (
            made.start(endless("a"), (), (), client=client) for client in ("one", "other")
        )
        await asyncio.to_thread(until, lambda: bool(process.pid and forks(process)))
        one.state.cancel()
        (fork,) = forks(process)
        other.state.cancel()
        await asyncio.to_thread(until, lambda: bool(not fork.is_running()))
        assert len(made) == 0
    finally:
        made.close()


async def test_clients_whose_grammars_take_for_ever_hold_up_nobody_else(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However little time a busy machine has, no limit ends them first.
    monkeypatch.setattr(grammars, "TrialProcess", partial(TrialProcess, max_cpu=120))
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    ended: queue.Queue[str] = queue.Queue()
    try:
        hostile = [made.start(endless(name), (), (), client=name) for name in "abc"]
        for waiting in hostile:
            waiting.state.add_done_callback(lambda _: ended.put("hostile"))
        await asyncio.to_thread(
            until, lambda: bool(made._trials.pid and len(forks(made._trials)) == 3)
        )
        good = made.start(ORDINARY, (), (), client="good")
        good.state.add_done_callback(lambda _: ended.put("good"))
        await asyncio.wrap_future(good.state)
        assert ended.get() == "good"
        for waiting in hostile:
            waiting.state.cancel()
    finally:
        made.close()


async def test_closing_ends_what_is_under_way(directory: Path) -> None:
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    waiting = made.start(endless("a"), (), ())
    await asyncio.to_thread(until, lambda: bool(made._trials.pid and forks(made._trials)))
    (fork,) = forks(made._trials)
    made.close()
    with pytest.raises(EngineError):
        await asyncio.wrap_future(waiting.state)
    await asyncio.to_thread(until, lambda: not runs(fork))


async def test_what_is_cheap_by_its_count_needs_no_process(directory: Path) -> None:
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        await asyncio.wrap_future(made.start(Grammar("json_object", ""), (), ()).state)
        await asyncio.wrap_future(made.start(Grammar("regex", "[a-c]{3}"), (), ()).state)
        assert made._trials.pid is None
    finally:
        made.close()


@pytest.fixture
async def counter() -> AsyncIterator[GrammarCounter]:
    made = GrammarCounter()
    yield made
    await asyncio.to_thread(made.close)


COSTLY = Grammar("json_schema", '{"not": {"type": "null"}}')
"""Not cheap by its count: it takes a process."""


async def test_grammars_of_other_engines_are_counted_and_not_compiled(
    counter: GrammarCounter,
) -> None:
    await counter.check(COSTLY, "a")
    assert counter.trials.pid is not None
    with pytest.raises(InvalidRequestError, match="transitions"):
        await counter.check(Grammar("regex", "a?" * 5000 + "a" * 5000), "a")


async def test_cheap_grammars_of_other_engines_are_counted_without_a_process(
    counter: GrammarCounter,
) -> None:
    await counter.check(Grammar("json_object"), "a")
    await counter.check(Grammar("regex", "[a-c]{3}"), "a")
    await counter.check(Grammar("choice", '["yes", "no"]'), "a")
    with pytest.raises(InvalidRequestError):
        await counter.check(Grammar("choice", "[]"), "a")
    assert counter.trials.pid is None


async def test_other_engines_get_the_schema_that_is_left_of_loose_definitions(
    counter: GrammarCounter,
) -> None:
    definitions = {
        "costly": {"type": "object", "properties": {"a": {"pattern": "a?" * 5000 + "a" * 5000}}},
        "plain": {"type": "object", "properties": {"b": {"type": "string"}}},
    }
    choices = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    source = json.dumps({"anyOf": choices, "$defs": definitions})
    with pytest.raises(
        InvalidRequestError, match=r"transitions.*, at #/\$defs/costly/properties/a"
    ):
        await counter.check(Grammar("json_schema", source, loose=("plain",)), "a")
    loose = Grammar("json_schema", source, (7,), loose=("costly", "plain", "gone"))
    checked = await counter.check(loose, "a")
    assert json.loads(checked.source) == {
        "anyOf": choices,
        "$defs": {**definitions, "costly": {"type": "object", "properties": {"a": {}}}},
    }
    assert checked.after == (7,)
    plain = Grammar("json_schema", source.replace("a?", ""), loose=("costly", "plain"))
    assert json.loads((await counter.check(plain, "a")).source) == json.loads(plain.source)


async def test_a_client_that_leaves_is_no_error_in_the_log(
    counter: GrammarCounter, caplog: pytest.LogCaptureFixture
) -> None:
    await counter.check(COSTLY, "other")
    process = psutil.Process(counter.trials.pid)
    process.suspend()
    try:
        waiting = asyncio.create_task(counter.check(COSTLY, "a"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    finally:
        process.resume()
    await counter.check(COSTLY, "a")
    del waiting
    gc.collect()
    assert caplog.records == []


async def test_a_client_who_has_many_grammars_counted_delays_its_own_alone(
    counter: GrammarCounter,
) -> None:
    await counter.check(COSTLY, "other")
    assert counter.trials.pid is not None
    # What is stopped neither runs nor ends: the client's turns stay taken.
    process = psutil.Process(counter.trials.pid)
    process.suspend()
    try:
        own = [asyncio.create_task(counter.check(COSTLY, "greedy")) for _ in range(3 * THREADS)]
        await asyncio.sleep(0)
        await counter.check(Grammar("regex", "[a-c]{3}"), "other")
        assert not any(task.done() for task in own)
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
    finally:
        process.resume()
    await counter.check(COSTLY, "greedy")


def test_a_trial_says_what_memory_a_compiled_grammar_takes(process: TrialProcess) -> None:
    def large(count: int) -> Grammar:
        properties = {f"p{index}": {"type": "string"} for index in range(count)}
        return Grammar("json_schema", json.dumps({"type": "object", "properties": properties}))

    small, big = (Trial(process, large(count)).run().num_bytes for count in (300, 2000))
    # About 4 KB for a property.
    assert CHEAP_BYTES <= small < big
    assert big > 1024 * 2000


async def test_compiled_grammars_are_kept_within_a_bound_of_their_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 3 * CHEAP_BYTES + 1000)
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        for number in range(8):
            one = Grammar("regex", f"[a-c]{{{number + 1}}}")
            await asyncio.wrap_future(made.start(one, (), ()).state)
            assert len(made) == min(number + 1, 3)
    finally:
        made.close()


def test_a_fork_has_no_more_memory_than_its_limit() -> None:
    script = """
from inlay.engine.grammar import trial_process
trial_process._limit(trial_process.MAX_CPU)
bytearray(trial_process.MAX_MEMORY // 2)
try:
    bytearray(2 * trial_process.MAX_MEMORY)
except MemoryError:
    print("refused")
"""
    assert run(sys.executable, "-c", script) == "refused\n"


def test_many_trials_at_once_all_come_to_their_own_ends(process: TrialProcess) -> None:
    came: dict[int, int] = {}

    def run(number: int) -> None:
        came[number] = len(Trial(process, Grammar("regex", "[a-z]" * number)).run().source)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lengths = [came[number] for number in range(1, 17)]
    assert [later - before for before, later in itertools.pairwise(lengths)] == [5] * 15
    assert not forks(process)
