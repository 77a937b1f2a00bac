"""Order of the queue: priority, then clients in turn, then arrival."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.fair_queue import FairQueue

Item = tuple[int, int, int]

pushes = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=40)


def filled(pushed: list[tuple[int, int]]) -> tuple[FairQueue[Item], list[Item]]:
    queue: FairQueue[Item] = FairQueue()
    items = [(priority, client, number) for number, (priority, client) in enumerate(pushed)]
    for item in items:
        queue.push(item, item[1], item[0])
    return queue, items


@given(pushes)
def test_everything_that_was_pushed_is_taken_once_and_lower_priorities_first(
    pushed: list[tuple[int, int]],
) -> None:
    queue, items = filled(pushed)
    assert len(queue) == len(items)
    taken = []
    while queue:
        first = queue.first()
        taken.append(queue.take())
        assert taken[-1] == first
    assert sorted(taken) == sorted(items)
    assert [priority for priority, _, _ in taken] == sorted(priority for priority, _ in pushed)


@given(pushes)
def test_a_clients_items_of_one_priority_keep_their_order(pushed: list[tuple[int, int]]) -> None:
    queue, items = filled(pushed)
    taken = [queue.take() for _ in items]
    for priority, client in set(pushed):
        numbers = [number for p, c, number in taken if (p, c) == (priority, client)]
        assert numbers == sorted(numbers)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_between_two_turns_of_a_client_no_other_has_more_than_one(clients: list[int]) -> None:
    queue, items = filled([(0, client) for client in clients])
    taken = [queue.take()[1] for _ in items]
    for client in set(clients):
        turns = [at for at, name in enumerate(taken) if name == client]
        for one, two in pairwise(turns):
            between = taken[one + 1 : two]
            assert len(between) == len(set(between))


@given(pushes, st.data())
def test_what_leaves_is_not_taken_and_the_rest_is(
    pushed: list[tuple[int, int]], data: st.DataObject
) -> None:
    queue, items = filled(pushed)
    leaving = data.draw(st.lists(st.sampled_from(items), unique=True)) if items else []
    for item in leaving:
        queue.remove(item, item[1], item[0])
    assert sorted(queue) == sorted(set(items) - set(leaving))
    assert sorted(queue.take() for _ in range(len(queue))) == sorted(set(items) - set(leaving))


@given(pushes, st.sets(st.integers(0, 3)))
def test_whose_turn_is_passed_over_keeps_it(
    pushed: list[tuple[int, int]], without: set[int]
) -> None:
    queue, _ = filled(pushed)
    others, _ = filled([(priority, client) for priority, client in pushed if client not in without])
    rest, _ = filled([(priority, client) for priority, client in pushed if client in without])
    assert [queue.take(without)[:2] for _ in range(len(others))] == [
        others.take()[:2] for _ in range(len(others))
    ]
    with pytest.raises(IndexError):
        queue.take(without)
    assert [queue.take()[:2] for _ in range(len(queue))] == [
        rest.take()[:2] for _ in range(len(rest))
    ]


def test_a_client_that_asks_much_waits_behind_its_own() -> None:
    queue, _ = filled([(0, 1)] * 5 + [(0, 2)] * 2)
    assert [queue.take()[1] for _ in range(7)] == [1, 2, 1, 2, 1, 1, 1]


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), min_size=1, max_size=40))
def test_who_has_most_loses_the_newest(pushed: list[tuple[int, int]]) -> None:
    queue, items = filled(pushed)
    most = max(pushed.count(line) for line in pushed)
    priority, client, number = queue.take_from_most()
    assert pushed.count((priority, client)) == most
    assert number == max(at for at, line in enumerate(pushed) if line == (priority, client))
    assert sorted(queue) == sorted(set(items) - {(priority, client, number)})
    assert len(queue) == len(items) - 1
