"""Clients share the places of an engine that starts requests in their order of arrival."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.fairness import PROTECTED_TOKENS
from inlay.engine.request_tracker import RequestTracker
from inlay.engine.slots import EngineSlots
from inlay.messages.priority import FIRST
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import FinishReason, Output, Request, Sampling


@dataclass(eq=False)
class Job:
    """One request, as an engine's task follows it.

    Attributes:
        tracker: of the request; each of its tokens is its own index.
        resumable: it may be preempted.
        attempts: times it was started.
        aborted: the engine is to drop it at the next step.
        out: done once the engine has dropped it, or ended it.
    """

    tracker: RequestTracker
    resumable: bool
    outputs: list[Output]
    attempts: int = 0
    aborted: bool = False
    out: asyncio.Future[None] = field(default_factory=asyncio.Future)

    @property
    def client(self) -> str | None:
        return self.tracker.request.client


class ScriptedEngine:
    """Makes a token of each request it has in a step, and has no more than it has places."""

    def __init__(self, total: int) -> None:
        self.places = EngineSlots(total)
        self.has: list[Job] = []
        self.jobs: list[Job] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.steps = 0

    @property
    def running(self) -> Counter[str | None]:
        return Counter(job.client for job in self.has)

    def ask(
        self, client: str | None, length: int, *, resumable: bool = True, priority: int = 0
    ) -> Job:
        """Admit a request for `length` tokens."""
        outputs: list[Output] = []
        asked = Request(
            id=str(len(self.jobs)),
            prompts=(Prompt.of(Tokens((1,))),),
            params=Sampling(max_tokens=length),
            client=client,
            priority=priority,
        )
        job = Job(RequestTracker(asked, outputs.append, asked.id), resumable, outputs)
        self.jobs.append(job)
        task = asyncio.create_task(self._follow(job))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return job

    def stop(self, job: Job) -> None:
        """Abort a request for its client."""
        self.places.stop_waiting(job.tracker.place)
        job.aborted = True
        job.tracker.end("abort")

    async def _follow(self, job: Job) -> None:
        def preempt() -> None:
            job.aborted = True

        tracker = job.tracker
        place = tracker.place = self.places.enter(tracker, resumable=job.resumable, preempt=preempt)
        while await place.granted and not tracker.ended:
            job.attempts, job.out = job.attempts + 1, asyncio.Future()
            assert list(tracker.continuation().prior_output) == tracker.output
            self.has.append(job)
            assert sum(one.tracker.request.priority > FIRST for one in self.has) <= (
                self.places.total
            )
            await job.out
            if not tracker.ended:
                self.places.put_back(place)
        self.places.leave(place)

    async def step(self) -> None:
        """Let all tasks run, then make one token of each request."""
        for _ in range(12):
            await asyncio.sleep(0)
        self.steps += 1
        for job in tuple(self.has):
            tracker = job.tracker
            if not job.aborted:
                reason: FinishReason | None = "length" if tracker.room == 1 else None
                tracker.put((tracker.num_tokens,), (), None, reason)
                assert tracker.place is not None
                self.places.note_progress(tracker.place)
            if job.aborted or tracker.ended:
                self.has.remove(job)
                job.aborted = False
                job.out.set_result(None)

    async def steps_until(self, job: Job, limit: int = 5000) -> int:
        """Steps until a request has ended."""
        began = self.steps
        while not job.tracker.ended:
            assert self.steps - began < limit
            await self.step()
        return self.steps - began

    async def drain(self) -> None:
        """Run until all have ended."""
        for job in self.jobs:
            await self.steps_until(job)
        await asyncio.gather(*self.tasks)
        assert (self.places.num_running, self.places.num_waiting) == (0, 0)


def run(script: Coroutine[Any, Any, None]) -> None:
    asyncio.run(script)


def complete(job: Job) -> None:
    """Every token came once, in order, and the end after the last."""
    ids = [id_ for output in job.outputs for id_ in output.token_ids]
    assert ids == list(range(job.tracker.request.sampling.max_tokens))
    assert [output.offset for output in job.outputs] == ids
    assert [output.finish_reason for output in job.outputs][-1] == "length"


def test_a_client_alone_has_all_places_and_nothing_is_preempted() -> None:
    async def script() -> None:
        engine = ScriptedEngine(8)
        for _ in range(24):
            engine.ask("alone", 10)
        await engine.step()
        assert engine.running == {"alone": 8}
        assert engine.places.num_waiting == 16
        await engine.drain()
        assert engine.steps <= 3 * 10 + 3
        assert engine.places.num_preemptions == 0

    run(script())


def test_a_newcomer_has_a_place_two_steps_later_whatever_another_holds() -> None:
    async def script() -> None:
        engine = ScriptedEngine(8)
        for _ in range(128):
            engine.ask("greedy", 300)
        for _ in range(20):
            await engine.step()
        assert engine.running == {"greedy": 8}
        newcomer = engine.ask("new", 4)
        assert await engine.steps_until(newcomer) <= 4 + 2
        assert engine.places.num_preemptions == 1
        (preempted,) = [job for job in engine.jobs if job.tracker.place.num_preemptions]  # type: ignore[union-attr]
        await engine.step()
        assert engine.running == {"greedy": 8}
        # The first of its client to go on, before those that have not begun.
        assert preempted in engine.has
        await engine.drain()
        for job in engine.jobs:
            complete(job)

    run(script())


def test_clients_that_ask_for_everything_come_to_equal_shares() -> None:
    async def script() -> None:
        engine = ScriptedEngine(12)
        for client, expected in (
            ("a", {"a": 12}),
            ("b", {"a": 6, "b": 6}),
            ("c", {"a": 4, "b": 4, "c": 4}),
        ):
            for _ in range(40):
                engine.ask(client, 400)
            for _ in range(30):
                await engine.step()
            assert engine.running == expected
        preemptions = engine.places.num_preemptions
        assert preemptions == 6 + 4
        for _ in range(200):
            await engine.step()
        assert engine.places.num_preemptions == preemptions

    run(script())


def test_a_client_keeps_one_place_however_many_clients_there_are() -> None:
    async def script() -> None:
        engine = ScriptedEngine(4)
        for client in range(9):
            for _ in range(3):
                engine.ask(str(client), 500)
            await engine.step()
        for _ in range(30):
            await engine.step()
        assert engine.running == {"0": 1, "1": 1, "2": 1, "3": 1}

    run(script())


def test_a_sequence_that_was_preempted_makes_a_turn_of_tokens_before_it_is_again() -> None:
    async def script() -> None:
        engine = ScriptedEngine(2)
        long = [engine.ask("long", 1000) for _ in range(2)]
        # A client that comes anew for each token, as fast as it can.
        while not all(job.tracker.ended for job in long):
            await engine.steps_until(engine.ask("quick", 1))
            assert engine.steps < 5000
        for job in long:
            complete(job)
            assert job.attempts - 1 <= 1 + 1000 // PROTECTED_TOKENS

    run(script())


def test_what_cannot_be_resumed_is_never_preempted_and_leaves_one_place() -> None:
    async def script() -> None:
        engine = ScriptedEngine(4)
        fixed = [engine.ask("greedy", 200, resumable=False) for _ in range(16)]
        for _ in range(5):
            await engine.step()
        assert engine.running == {"greedy": 3}
        newcomer = engine.ask("new", 4, resumable=False)
        assert await engine.steps_until(newcomer) <= 4 + 2
        await engine.drain()
        assert all(job.attempts == 1 for job in fixed)

    run(script())


def test_a_probe_waits_for_nobody_and_takes_no_place_of_a_client() -> None:
    async def script() -> None:
        engine = ScriptedEngine(2)
        for _ in range(6):
            engine.ask("a", 50, resumable=False)
            engine.ask("b", 50, resumable=False)
        await engine.step()
        assert await engine.steps_until(engine.ask(None, 1, priority=FIRST)) == 1
        assert engine.places.num_running == 2
        await engine.drain()

    run(script())


def test_a_better_priority_comes_before_shares_and_is_not_preempted_for_them() -> None:
    async def script() -> None:
        engine = ScriptedEngine(4)
        for _ in range(6):
            engine.ask("plain", 60)
        await engine.step()
        urgent = [engine.ask("urgent", 60, priority=-1) for _ in range(4)]
        for _ in range(8):
            await engine.step()
        assert engine.running == {"urgent": 4}
        engine.ask("new", 5)
        await engine.step()
        assert engine.running == {"urgent": 4}
        await engine.drain()
        assert all(job.attempts == 1 for job in urgent)

    run(script())


def test_who_leaves_while_it_waits_or_yields_takes_no_place() -> None:
    async def script() -> None:
        engine = ScriptedEngine(2)
        first, second = engine.ask("a", 100), engine.ask("a", 100)
        await engine.step()
        newcomer = engine.ask("b", 10)
        waiting = engine.ask("a", 10)
        await asyncio.sleep(0)
        assert second.aborted  # preempted for the newcomer
        engine.stop(newcomer)
        engine.stop(second)
        engine.stop(waiting)
        await engine.step()
        assert engine.has == [first]
        await engine.drain()
        assert [job.outputs[-1].finish_reason for job in engine.jobs] == [
            "length",
            "abort",
            "abort",
            "abort",
        ]

    run(script())


Ask = tuple[int, str, int, bool, bool]
"""A step, a client, the length of the output, resumable, stopped before its end."""


@settings(max_examples=80, deadline=None)
@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 60),
            st.sampled_from("aaaabbc"),
            st.integers(1, 150),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
    total=st.integers(1, 6),
)
def test_whatever_clients_ask_all_ends_and_nothing_is_lost_or_repeated(
    asks: list[Ask], total: int
) -> None:
    async def script() -> None:
        engine = ScriptedEngine(total)
        stopped: dict[Job, int] = {}
        newcomer: Job | None = None
        for step in range(90):
            for at, client, length, resumable, stops in asks:
                if at == step:
                    job = engine.ask(client, length, resumable=resumable)
                    if stops:
                        stopped[job] = step + length // 2
            if step == 65:
                newcomer = engine.ask("new", 3)
            for job, at in stopped.items():
                if at == step and not job.tracker.ended:
                    engine.stop(job)
            await engine.step()
            assert len(engine.has) <= total
            # No place is free while somebody waits, but for the one that always comes back.
            assert not engine.places.num_waiting or engine.places.num_running >= total - 1
        assert newcomer is not None
        await engine.drain()
        for job in engine.jobs:
            if job.outputs[-1].finish_reason == "length":
                complete(job)
            assert job.resumable or job.attempts <= 1
            assert job.attempts <= 2 + job.tracker.request.sampling.max_tokens // PROTECTED_TOKENS

    run(script())
