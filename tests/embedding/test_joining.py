"""Background requests for vectors go to an engine some tens at a time, and fail alone."""

import asyncio
from collections.abc import Sequence

import pytest

from inlay.base.errors import EngineError
from inlay.embedding.joining import AT_ONCE, MOST_POSITIONS, MOST_PROMPTS, Joining


class Engine:
    """Gives each number its text; fails a request that has 666."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.running = self.most = 0

    async def send(self, numbers: Sequence[int]) -> list[str]:
        self.sent.append(len(numbers))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if 666 in numbers:
            raise EngineError("the worker died of it")
        return [str(number) for number in numbers]


async def test_what_is_asked_at_the_same_time_is_sent_together_and_split_again() -> None:
    engine, joining = Engine(), Joining()
    asked = [[n, n + 1000] if n % 7 == 0 else [n] for n in range(100)]
    rows = await asyncio.gather(
        *(joining.results("a", each, len(each), engine.send) for each in asked)
    )
    for n, found in enumerate(rows):
        assert found == ([str(n), str(n + 1000)] if n % 7 == 0 else [str(n)])
    assert engine.most == AT_ONCE
    assert engine.sent[:2] == [2, 1]
    assert max(engine.sent) <= MOST_PROMPTS
    assert len(engine.sent) <= 8
    assert joining._lines == {}


async def test_other_keys_and_long_prompts_are_not_joined() -> None:
    engine, joining = Engine(), Joining()
    await asyncio.gather(*(joining.results(n, [n], 1, engine.send) for n in range(4)))
    assert engine.sent == [1] * 4
    await asyncio.gather(
        *(joining.results("a", [1], MOST_POSITIONS // 2 + 1, engine.send) for _ in range(6))
    )
    assert engine.sent == [1] * 10


async def test_one_that_fails_or_leaves_harms_no_other() -> None:
    engine, joining = Engine(), Joining()
    tasks = [
        asyncio.create_task(joining.results("a", [n], 1, engine.send)) for n in (1, 2, 3, 666, 4, 5)
    ]
    await asyncio.sleep(0)
    tasks[4].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in found if isinstance(each, list)] == [["1"], ["2"], ["3"], ["5"]]
    assert isinstance(found[3], EngineError)
    assert isinstance(found[4], asyncio.CancelledError)
    with pytest.raises(EngineError):
        await joining.results("a", [666], 1, engine.send)
