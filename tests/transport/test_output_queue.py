"""What is taken at once from a queue of outputs, and what its reader gets."""

import asyncio

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.messages.request import Output
from inlay.transport.output_queue import MERGED, DispatchQueue, OutputQueue, TakeOutput


def token(offset: int, id_: int | None = None) -> Output:
    return Output("w", 0, offset, (offset if id_ is None else id_,))


async def reading(queue: OutputQueue) -> "tuple[list[Output], asyncio.Task[None]]":
    """Outputs that a reader gets, and the reader, which waits."""
    got: list[Output] = []

    async def read() -> None:
        async for outputs in queue:
            got.extend(outputs)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    return got, reader


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def takes_into(taken: list[Output]) -> TakeOutput:
    """What takes every output."""

    def take(output: Output) -> bool:
        taken.append(output)
        return True

    return take


async def test_the_end_of_a_cancelled_request_does_not_hide_why_it_was_cancelled() -> None:
    queue = OutputQueue()
    queue.put(Output("w", 0, 0, (5,)))
    queue.fail(InvalidRequestError("too slow"))
    assert not queue.put(Output("w", 0, 1, (), (), "abort"))
    assert [output.token_ids for output in await anext(queue)] == [(5,)]
    with pytest.raises(InvalidRequestError, match="too slow"):
        await anext(queue)


async def test_what_comes_while_a_reader_waits_is_taken_once_a_turn() -> None:
    deliveries = DispatchQueue()
    queues = [OutputQueue(deliveries), OutputQueue(deliveries)]
    taken: list[Output] = []
    readers = [await reading(queue) for queue in queues]

    for queue in queues:
        queue.set_inline_reader(takes_into(taken))
    queues[0].put(Output("a", 0, 0, (5,)))
    queues[1].put(Output("b", 0, 0, (7,)))
    queues[0].put(Output("a", 0, 1, (6,)))
    assert not taken
    await turns()
    assert taken == [Output("a", 0, 0, (5, 6)), Output("b", 0, 0, (7,))]
    for _, reader in readers:
        reader.cancel()
    await turns()
    queues[0].put(Output("a", 0, 2, (8,)))
    await turns()
    assert len(taken) == 2, "its reader is gone"
    assert [got for got, _ in readers] == [[], []]


async def test_a_reader_gets_what_is_not_taken_and_all_behind_it() -> None:
    queue = OutputQueue()
    taken: list[Output] = []
    got, reader = await reading(queue)

    def take(output: Output) -> bool:
        if output.token_ids[0] == 6:
            # It comes before the reader has run.
            queue.put(Output("w", 0, 2, (7,)))
            return False
        taken.append(output)
        return True

    queue.set_inline_reader(take)
    for offset, id_ in ((0, 5), (1, 6), (3, 8)):
        queue.put(Output("w", 0, offset, (id_,)))
        await turns()
    queue.set_inline_reader(None)
    queue.put(Output("w", 0, 4, (9,), (), "length"))
    await asyncio.wait_for(reader, 10)
    assert [output.token_ids for output in taken] == [(5,), (8,)]
    assert [id_ for output in got for id_ in output.token_ids] == [6, 7, 9]


async def test_what_taking_raises_ends_one_queue_and_no_other() -> None:
    deliveries = DispatchQueue()
    queues = [OutputQueue(deliveries) for _ in range(3)]
    readers = [(await reading(queue))[1] for queue in queues]
    taken: list[Output] = []

    def broken(output: Output) -> bool:
        raise ZeroDivisionError(f"at {output.offset}")

    for queue, its in zip(queues, (takes_into(taken), broken, takes_into(taken)), strict=True):
        queue.set_inline_reader(its)
    for offset in range(2):
        for queue in queues:
            assert queue.put(token(offset)) or (queue is queues[1] and offset == 1)
        await turns()
    assert taken == [token(0), token(0), token(1), token(1)]
    with pytest.raises(ZeroDivisionError, match="at 0"):
        await asyncio.wait_for(readers[1], 10)
    assert [reader.done() for reader in readers] == [False, True, False]
    for reader in readers:
        reader.cancel()


async def test_of_what_was_taken_half_the_reader_gets_nothing_again() -> None:
    queue = OutputQueue()
    got, reader = await reading(queue)

    def broken(output: Output) -> bool:
        queue.put(token(1))
        raise ZeroDivisionError

    queue.set_inline_reader(broken)
    queue.put(token(0))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(reader, 10)
    assert not got


async def test_nothing_is_taken_for_a_reader_that_was_cancelled_in_the_same_turn() -> None:
    queue = OutputQueue()
    taken: list[Output] = []
    _, reader = await reading(queue)
    queue.set_inline_reader(takes_into(taken))
    queue.put(token(0))
    reader.cancel()
    await turns()
    assert not taken


async def test_taking_for_one_queue_may_end_another_that_is_due() -> None:
    deliveries = DispatchQueue()
    first, second, third = queues = [OutputQueue(deliveries) for _ in range(3)]
    (_, one), (got, two), (rest, three) = [await reading(queue) for queue in queues]
    taken: list[Output] = []

    def closes(output: Output) -> bool:
        second.fail(InvalidRequestError("closed"))
        third.set_inline_reader(None)
        return True

    first.set_inline_reader(closes)
    for queue in (second, third):
        queue.set_inline_reader(takes_into(taken))
    for queue in queues:
        queue.put(token(0))
    with pytest.raises(InvalidRequestError, match="closed"):
        await asyncio.wait_for(two, 10)
    assert got == rest == [token(0)]
    assert not taken
    one.cancel()
    three.cancel()


async def test_tokens_and_the_last_output_of_one_turn_are_the_readers() -> None:
    queue = OutputQueue()
    got, reader = await reading(queue)
    queue.set_inline_reader(lambda output: output.finish_reason is None)
    queue.put(token(0))
    await turns()
    queue.put(token(1))
    queue.put(Output("w", 0, 2, (2,), finish_reason="stop"))
    await asyncio.wait_for(reader, 10)
    assert [id_ for output in got for id_ in output.token_ids] == [1, 2]
    assert got[-1].finish_reason == "stop"


async def test_outputs_that_were_refused_together_are_merged_with_all_that_come_later() -> None:
    queue = OutputQueue()
    got, reader = await reading(queue)

    def refuse(output: Output) -> bool:
        if output.offset == 0:
            for offset in range(5, 5 + 2 * MERGED):
                queue.put(token(offset))
        return False

    queue.set_inline_reader(refuse)
    for offset in range(5):
        queue.put(token(offset))
    await turns()
    queue.put(Output("w", 0, 5 + 2 * MERGED, finish_reason="length"))
    await asyncio.wait_for(reader, 10)
    assert [id_ for output in got for id_ in output.token_ids] == [*range(5 + 2 * MERGED)]
