"""Priority queue, round-robin among clients."""

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items in order of priority, lower first.

    Of equal priority the clients take turns, and each client's come in their order.

    Adding, removing and taking cost the same however many wait, but for the number of different
    priorities.
    """

    __slots__ = ("_queues", "_size")

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Hashable, deque[T]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """All, by priority and client."""
        for priority in sorted(self._queues):
            for line in self._queues[priority].values():
                yield from line

    def push(self, item: T, client: Hashable, priority: int) -> None:
        """Add an item, which is equal to no other."""
        self._queues.setdefault(priority, OrderedDict()).setdefault(client, deque()).append(item)
        self._size += 1

    def put_back(self, item: T, client: Hashable, priority: int) -> None:
        """Add an item before all others of its client; it is equal to no other."""
        self._queues.setdefault(priority, OrderedDict()).setdefault(client, deque()).appendleft(
            item
        )
        self._size += 1

    def first(self) -> T:
        """The next item. Raises `IndexError` when none waits."""
        priority, client = self._turn(())
        return self._queues[priority][client][0]

    def first_of(self, client: Hashable) -> T | None:
        """The first item of a client, or None where it has none."""
        for priority in sorted(self._queues):
            if client in self._queues[priority]:
                return self._queues[priority][client][0]
        return None

    def take(self, without: Collection[Hashable] = ()) -> T:
        """Remove and return the next item; its client's next turn is after the others'.

        Args:
            without: clients that are skipped, and keep their turn.

        Raises:
            IndexError: nothing waits, or only items of these clients.
        """
        priority, client = self._turn(without)
        lines = self._queues[priority]
        item = lines[client].popleft()
        lines.move_to_end(client)
        self._taken(client, priority)
        return item

    def take_from_most(self) -> T:
        """Remove and return the newest item of a client that has most of a priority.

        Looks at every client. Raises `ValueError` when nothing waits.
        """
        priority, client, line = max(
            (
                (key, client, line)
                for key, lines in self._queues.items()
                for client, line in lines.items()
            ),
            key=lambda each: len(each[2]),
        )
        item = line.pop()
        self._taken(client, priority)
        return item

    def _turn(self, without: Collection[Hashable]) -> tuple[int, Hashable]:
        if not without and self._queues:
            priority = min(self._queues)
            return priority, next(iter(self._queues[priority]))
        for priority in sorted(self._queues):
            for client in self._queues[priority]:
                if client not in without:
                    return priority, client
        raise IndexError("nothing waits")

    def remove(self, item: T, client: Hashable, priority: int) -> None:
        """Take an item out that was pushed so.

        Raises `KeyError` or `ValueError` when it does not wait.
        """
        self._queues[priority][client].remove(item)
        self._taken(client, priority)

    def _taken(self, client: Hashable, priority: int) -> None:
        lines = self._queues[priority]
        if not lines[client]:
            del lines[client]
        if not lines:
            del self._queues[priority]
        self._size -= 1
