"""A frontend's work without a model, and storage that dies between two steps."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

from inlay.base.errors import InvalidRequestError
from inlay.store.shared import Storage
from inlay_batches.files import Files
from inlay_batches.lines import LineRequest, Outcome, answered, usage_of
from inlay_batches.records import BatchRecord

T = TypeVar("T")


class Killed(BaseException):
    """The process ended here."""


class Mortal:
    """Storage whose process dies before or after its n-th change, which then is made or not."""

    def __init__(self, inner: Storage, steps: int | None, *, after: bool = False) -> None:
        self._inner = inner
        self.steps = steps
        self._after = after

    async def _step(self, act: Callable[[], Any]) -> Any:
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0 or (self.steps == 0 and not self._after):
                self.steps = 0 if self.steps < 0 else self.steps
                raise Killed
        found = await act()
        if self.steps == 0:
            raise Killed
        return found

    async def swap(self, key: str, record: bytes, revision: int) -> bool:
        return bool(await self._step(lambda: self._inner.swap(key, record, revision)))

    async def drop(self, key: str, revision: int) -> bool:
        return bool(await self._step(lambda: self._inner.drop(key, revision)))

    async def write(self, name: str, file: BinaryIO) -> int:
        return int(await self._step(lambda: self._inner.write(name, file)))

    async def erase(self, name: str) -> None:
        await self._step(lambda: self._inner.erase(name))

    async def find(self, key: str) -> tuple[int, bytes | None]:
        return await self._inner.find(key)

    async def list(self, under: str = "*") -> "list[tuple[str, int, bytes]]":
        return await self._inner.list(under)

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        return await self._inner.read(name, size, file)

    async def contents(self) -> set[str]:
        return await self._inner.contents()

    async def size(self) -> tuple[int, int]:
        return await self._inner.size()


class Echo:
    """`Work` whose answer to a line is its custom id; one that says so fails with its status."""

    max_line_bytes = 4096
    max_lines = 10_000

    def __init__(self, files: Files, owner: str, batch: str, *, turns: int = 1) -> None:
        self._files, self._owner, self._batch = files, owner, batch
        self._turns = turns
        self.allowed = True
        self.room = True
        self.ran: list[str] = []
        self.held: list[str] = []
        self.asked_room = 0
        self.prepared = 0
        self.gate: asyncio.Event | None = None
        self._began = asyncio.Condition()

    async def reached(self, count: int) -> None:
        """Wait until so many lines have begun."""
        async with self._began:
            await self._began.wait_for(lambda: len(self.ran) >= count)

    def is_allowed(self) -> bool:
        return self.allowed

    def check(self, body: bytes) -> str | None:
        found = json.loads(body)
        if "bad" in found:
            raise InvalidRequestError("bad is not a field", param="bad")
        model: str | None = found.get("model")
        return model

    async def check_model(self, name: str | None) -> None:
        if name == "absent":
            raise InvalidRequestError("no such model")

    async def answer(self, number: int, request: LineRequest) -> Outcome:
        async with self._began:
            self.ran.append(request.custom_id)
            self._began.notify_all()
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        status = json.loads(request.body).get("status", 200)
        body = {"echo": request.custom_id, "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
        if status != 200:
            body = {"error": {"message": "no", "type": "invalid_request_error"}}
        text = json.dumps(body).encode()
        usage = usage_of(text)
        return answered(self._batch, number, request.custom_id, status, "req_1", text, usage)

    async def hold(self, refs: Sequence[str]) -> None:
        self.held = list(refs)

    async def has_room(self, num_bytes: int) -> bool:
        self.asked_room = num_bytes
        return self.room

    async def prepare(self, size: int, work: Callable[[], T], /) -> T:
        self.prepared += size
        return work()

    async def publish(self, record: BatchRecord) -> None:
        await self._files.publish(self._owner, record)


class Slow:
    """Storage whose answers take their time, which is not that of other frontends.

    Half of it passes before a call is done, half after.
    """

    def __init__(self, inner: Storage, seconds: Sequence[float]) -> None:
        self._inner = inner
        self._seconds = itertools.cycle(seconds or [0.0])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._inner, name)

        async def slow(*arguments: Any) -> Any:
            seconds = next(self._seconds) / 2
            await asyncio.sleep(seconds)
            found = await act(*arguments)
            await asyncio.sleep(seconds)
            return found

        return slow
