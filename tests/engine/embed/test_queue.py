"""Choice of the next batch."""

from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.embed.queue import BatchQueue
from inlay.messages.priority import BACKGROUND

requests = st.lists(
    st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(-1, 1)),
    min_size=1,
    max_size=8,
)


@given(requests, st.integers(16, 512), st.sets(st.integers(0, 7)))
def test_every_prompt_comes_exactly_once_unless_its_request_was_removed(
    waiting: list[tuple[list[int], int]], budget: int, removed: set[int]
) -> None:
    queue = BatchQueue(budget)
    for number, (lengths, priority) in enumerate(waiting):
        queue.add(str(number), lengths, priority=priority)
    assert queue.positions == sum(sum(lengths) for lengths, _ in waiting)
    for number in removed:
        queue.remove(str(number))
    seen = []
    while batch := queue.next_batch():
        assert [item.length for item in batch] == sorted(
            (item.length for item in batch), reverse=True
        )
        longest = batch[0].length
        assert sum(item.length for item in batch) <= max(budget // 2 + 1, longest) * 2
        seen += [(item.request_id, item.index, item.length) for item in batch]
    assert queue.positions == len(queue) == 0
    assert sorted(seen) == sorted(
        (str(number), index, length)
        for number, (lengths, _) in enumerate(waiting)
        if number not in removed
        for index, length in enumerate(lengths)
    )


def test_a_few_texts_are_in_the_next_batch_however_many_came_before_them() -> None:
    queue = BatchQueue(1024)
    queue.add("large", [100] * 1000)
    queue.next_batch()
    queue.add("small", [20, 400])
    batch = queue.next_batch()
    assert {item.index for item in batch if item.request_id == "small"} == {0, 1}
    assert sum(item.length for item in batch if item.request_id == "large") >= 500


def test_many_small_requests_do_not_stop_a_large_one() -> None:
    queue = BatchQueue(1024)
    queue.add("large", [100] * 50)
    batches = 0
    while any(request == "large" for request in queue._requests):
        for number in range(60):
            queue.add(f"small {batches} {number}", [30])
        assert sum(item.length for item in queue.next_batch() if item.request_id == "large") >= 500
        batches += 1
    assert batches == 10


def test_a_long_text_behind_many_short_ones_is_not_passed_over() -> None:
    queue = BatchQueue(512)
    queue.add("many", [50] * 1000)
    queue.add("long", [2000])
    assert "long" in {item.request_id for item in queue.next_batch()}


def test_a_lower_priority_number_goes_first() -> None:
    queue = BatchQueue(64)
    queue.add("later", [60] * 3)
    queue.add("middle", [60] * 2)
    queue.add("sooner", [60] * 4, priority=-1)
    assert "sooner" in {item.request_id for item in queue.next_batch()}


def test_a_batch_has_background_prompts_only_where_no_others_wait() -> None:
    queue = BatchQueue(100)
    queue.add("work", [5] * 40, priority=BACKGROUND)
    queue.add("short", [1], priority=BACKGROUND)
    queue.add("asked", [30] * 4)
    queue.add("also", [40])
    seen = [{item.request_id for item in queue.next_batch()} for _ in range(3)]
    assert "work" not in seen[0] | seen[1]
    assert "short" not in seen[0] | seen[1]
    assert seen[2] == {"work", "short"}
