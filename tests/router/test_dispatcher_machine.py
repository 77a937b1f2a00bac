"""Whatever happens to requests and workers, what is booked is what is under way."""

import asyncio
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from inlay.base.errors import OverloadedError, RateLimitedError
from inlay.messages.card import Address, ModelCard
from inlay.messages.request import Output, Request
from inlay.router import Router, resume
from inlay.router.decide import Wait, decide
from inlay.router.resume import ResumingStream
from inlay.router.settings import RouterSettings
from tests.examples import examples
from tests.router.scripted_plane import SMALL, Answering, ScriptedPlane, quiet, request

MOST_WORKERS = 4


class Asked:
    """A client's request: it waits, then its answer is read to the end."""

    def __init__(
        self, router: Router, id_: str, client: str, *, priority: int, choices: int
    ) -> None:
        made = [request(f"{id_}.{n}", client=client, priority=priority) for n in range(choices)]
        self.choices = choices
        self.streams: list[ResumingStream] = []
        self.reading: list[asyncio.Task[list[Output]]] = []
        self.task = asyncio.create_task(self._run(router, made))

    async def _run(self, router: Router, made: list[Request]) -> None:
        self.streams = await router.send("m", made)
        self.reading = [asyncio.create_task(self._read(stream)) for stream in self.streams]
        await asyncio.gather(*self.reading, return_exceptions=True)

    @staticmethod
    async def _read(stream: ResumingStream) -> list[Output]:
        return [output async for outputs in stream for output in outputs]

    @property
    def waits(self) -> bool:
        return not self.task.done() and not self.streams


class Machine(RuleBasedStateMachine):
    """Requests come, end, fail and are cancelled; workers come, die and sleep."""

    rooms = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(resume, "WAIT_SECONDS", -1.0)
        self.patch.setattr(resume, "_LOOK_SECONDS", 0.0)
        self.patch.setattr(resume, "_PAUSE_SECONDS", 0.0)
        self.plane = ScriptedPlane()
        self.numbers = 0
        self.asked: list[Asked] = []
        self.runner.run(self._start())

    async def _start(self) -> None:
        given = RouterSettings(router_worker_backlog=0, router_queue_size=6)
        self.router = Router(self.plane, given, random=Random(1))
        await self.router.start()
        self._join(0)
        self._join(1)
        await quiet()

    def teardown(self) -> None:
        self.runner.run(self._stop())
        self.runner.close()
        self.patch.undo()

    async def _stop(self) -> None:
        for one in self.asked:
            one.task.cancel()
            for stream in one.streams:
                stream.cancel()
        await asyncio.gather(*(one.task for one in self.asked), return_exceptions=True)
        await quiet()
        assert {load.requests for load in self.router.loads().values()} <= {0}
        assert not any(pool._requests_of for pool in self.router._fleet._pools.values())
        await self.router.close()

    def _card(self, number: int) -> ModelCard:
        if not self.rooms:
            return SMALL
        phase = "decode" if number % 2 else "prefill"
        return replace(
            SMALL,
            phase=phase,
            kv_rooms="f",
            bootstrap=("h", number + 1) if phase == "prefill" else None,
            address=Address("h", number + 1, b"f"),
        )

    def _join(self, number: int) -> None:
        self.numbers += 1
        self.plane.there.append(Answering(f"w{self.numbers}", self._card(number)))
        self.plane.tell()

    def worker(self, pick: int) -> Answering:
        return self.plane.there[pick % len(self.plane.there)]

    @property
    def live(self) -> list[Asked]:
        return [one for one in self.asked if not one.task.done()]

    @rule(client=st.sampled_from("ab"), priority=st.integers(-1, 0), choices=st.integers(1, 2))
    def submit(self, client: str, priority: int, choices: int) -> None:
        self.numbers += 1

        async def ask() -> None:
            self.asked.append(
                Asked(self.router, f"r{self.numbers}", client, priority=priority, choices=choices)
            )
            await quiet()

        self.runner.run(ask())

    async def _told(self, answers: list[Answering], pick: int, what: str) -> None:
        live = [answer for worker in answers for answer in worker.live]
        if live:
            answer = live[pick % len(live)]
            match what:
                case "end":
                    answer.end()
                case "lose":
                    answer.lose()
                case _:
                    answer.tell(7)
        await quiet()

    @rule(pick=st.integers(0, 9), what=st.sampled_from(["end", "end", "lose", "tell"]))
    def hear(self, pick: int, what: str) -> None:
        self.runner.run(self._told(self.plane.there, pick, what))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        """Whether it waits or runs."""
        one = self.live[pick % len(self.live)]

        async def leave() -> None:
            for stream in one.streams:
                stream.cancel()
            if not one.streams:
                one.task.cancel()
            await quiet()

        self.runner.run(leave())

    @precondition(lambda self: self.plane.there)
    @rule(pick=st.integers(0, 9))
    def die_before_anybody_knows(self, pick: int) -> None:
        """The next that is sent there fails."""
        self.worker(pick).gone = True

    @precondition(lambda self: self.plane.there)
    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        worker = self.worker(pick)

        async def gone() -> None:
            worker.gone = True
            self.plane.there.remove(worker)
            for answer in worker.live:
                answer.lose()
            self.plane.tell()
            await quiet()

        self.runner.run(gone())

    @precondition(lambda self: len(self.plane.there) < MOST_WORKERS)
    @rule(number=st.integers(0, 1))
    def join(self, number: int) -> None:
        async def come() -> None:
            self._join(number)
            await quiet()

        self.runner.run(come())

    @precondition(lambda self: self.plane.there)
    @rule(pick=st.integers(0, 9))
    def sleep_or_wake(self, pick: int) -> None:
        worker = self.worker(pick)

        async def change() -> None:
            worker.card = replace(worker.card, asleep=0 if worker.card.asleep else 1)
            self.plane.tell()
            await quiet()

        self.runner.run(change())

    @invariant()
    def what_is_booked_is_what_is_under_way(self) -> None:
        loads = self.router.loads()
        for worker in self.plane.there:
            assert loads[worker.id].requests == len(worker.live), worker.id

    @invariant()
    def nothing_fails_but_for_want_of_a_worker_or_a_place_to_wait(self) -> None:
        for one in self.asked:
            for task in (one.task, *one.reading):
                if task.done() and not task.cancelled() and (error := task.exception()):
                    assert isinstance(error, OverloadedError | RateLimitedError), error

    @invariant()
    def who_waits_has_no_room(self) -> None:
        dispatcher = self.router._dispatcher
        assert dispatcher.waiting.num_requests == sum(
            one.choices for one in self.asked if one.waits
        )
        for line in dispatcher.waiting._lines.values():
            ticket = line.first()
            pool = self.router._fleet.of(ticket.payload.pool)
            ask = dispatcher._ask(pool, ticket.payload)
            assert isinstance(decide(pool.view(), ask), Wait)


class RoomMachine(Machine):
    """Workers that do one phase alone, two for each request."""

    rooms = True


TestWorkers = Machine.TestCase
TestWorkers.settings = settings(deadline=None, max_examples=examples(60), stateful_step_count=25)
TestRooms = RoomMachine.TestCase
TestRooms.settings = settings(deadline=None, max_examples=examples(60), stateful_step_count=25)
