"""What waits to be embedded, and what of it goes into the next batch. Pure Python.

A batch holds whole prompts, up to a budget of positions. Where several requests wait, half of it
belongs to the first of them, by priority and then by age, and half to those with the fewest
positions left: a few texts are not behind the thousands that came before them, and the thousands
never stand still. The first and the least of the others put in one prompt at least, however long.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a request.

    Attributes:
        request_id: whose.
        index: its place among the request's prompts.
        length: positions.
    """

    request_id: str
    index: int
    length: int


class _Waiting:
    """The prompts of one request that are in no batch yet, the longest last."""

    __slots__ = ("id", "items", "order", "positions")

    def __init__(self, id_: str, lengths: Sequence[int], order: tuple[int, int]) -> None:
        self.id = id_
        self.order = order
        self.items = sorted((length, index) for index, length in enumerate(lengths))
        self.positions = sum(lengths)


class BatchQueue:
    """Requests whose prompts wait.

    Args:
        budget: positions of a batch.

    Attributes:
        positions: those of all that wait.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._requests: dict[str, _Waiting] = {}
        self._came = 0
        self.positions = 0

    def __len__(self) -> int:
        """Prompts that wait."""
        return sum(len(waiting.items) for waiting in self._requests.values())

    def add(self, request_id: str, lengths: Sequence[int], *, priority: int = 0) -> None:
        """Let the prompts of a request wait, one at least; lower `priority` is sooner."""
        self._came += 1
        waiting = self._requests[request_id] = _Waiting(request_id, lengths, (priority, self._came))
        self.positions += waiting.positions

    def remove(self, request_id: str) -> None:
        """Forget what is left of a request. Unknown ids are ignored."""
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            self.positions -= waiting.positions

    def next_batch(self) -> list[Item]:
        """Take the next batch, the longest prompts first; empty when nothing waits."""
        if not self._requests:
            return []
        first = min(self._requests.values(), key=lambda waiting: waiting.order)
        batch: list[Item] = []
        if len(self._requests) == 1:
            self._take(first, batch, self._budget, must=True)
        else:
            room = self._budget // 2
            room += self._take(first, batch, self._budget - room, must=True)
            others = sorted(
                self._requests.values(), key=lambda waiting: (waiting.positions, waiting.order)
            )
            least = next(waiting for waiting in others if waiting is not first)
            room = self._take(least, batch, room, must=True)
            for waiting in others:
                room = self._take(waiting, batch, room)
        for request_id in {item.request_id for item in batch}:
            if not self._requests[request_id].items:
                del self._requests[request_id]
        batch.sort(key=lambda item: -item.length)
        return batch

    def _take(self, waiting: _Waiting, batch: list[Item], room: int, *, must: bool = False) -> int:
        """Move the longest prompts of a request that fit into `room` positions to `batch`, with `must` one at least; the room left."""
        while waiting.items and (must or waiting.items[-1][0] <= room):
            length, index = waiting.items.pop()
            batch.append(Item(waiting.id, index, length))
            waiting.positions -= length
            self.positions -= length
            room -= length
            must = False
        return room
