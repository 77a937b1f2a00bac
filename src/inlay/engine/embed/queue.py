"""Queue of prompts to embed, and the choice of the next batch. Pure Python.

A batch holds whole prompts, up to a budget of positions. When several requests wait, half of it
goes to the first of them, by priority and then by age, and half to those with the fewest positions
left: a small request does not wait for thousands of earlier texts, and a large one always
progresses. The first request, and the smallest of the others, add at least one prompt each, however
long. Background requests are in a batch only where no others wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from inlay.messages.priority import BACKGROUND


@dataclass(frozen=True, slots=True)
class EmbedItem:
    """One prompt of a request."""

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
    """Requests with prompts that wait for a batch."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._requests: dict[str, _Waiting] = {}
        self._came = 0
        self.positions = 0

    def __len__(self) -> int:
        """Number of waiting prompts."""
        return sum(len(waiting.items) for waiting in self._requests.values())

    def add(self, request_id: str, lengths: Sequence[int], *, priority: int = 0) -> None:
        """Queue the prompts of a request, at least one; lower `priority` runs sooner."""
        self._came += 1
        waiting = self._requests[request_id] = _Waiting(request_id, lengths, (priority, self._came))
        self.positions += waiting.positions

    def remove(self, request_id: str) -> None:
        """Drop the waiting prompts of a request. Unknown ids are ignored."""
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            self.positions -= waiting.positions

    def next_batch(self) -> list[EmbedItem]:
        """Take the next batch, the longest prompts first; empty if nothing waits."""
        if not self._requests:
            return []
        first = min(self._requests.values(), key=lambda waiting: waiting.order)
        asked = [
            waiting
            for waiting in self._requests.values()
            if waiting.order[0] < BACKGROUND or first.order[0] >= BACKGROUND
        ]
        batch: list[EmbedItem] = []
        if len(asked) == 1:
            self._take(first, batch, self._budget, must=True)
        else:
            room = self._budget // 2
            room += self._take(first, batch, self._budget - room, must=True)
            others = sorted(asked, key=lambda waiting: (waiting.positions, waiting.order))
            least = next(waiting for waiting in others if waiting is not first)
            room = self._take(least, batch, room, must=True)
            for waiting in others:
                room = self._take(waiting, batch, room)
        for request_id in {item.request_id for item in batch}:
            if not self._requests[request_id].items:
                del self._requests[request_id]
        batch.sort(key=lambda item: -item.length)
        return batch

    def _take(
        self, waiting: _Waiting, batch: list[EmbedItem], room: int, *, must: bool = False
    ) -> int:
        """Move prompts of a request, longest first, into `batch` while they fit.

        `room` is the number of positions left. With `must`, at least one is moved. Returns the room
        left.
        """
        while waiting.items and (must or waiting.items[-1][0] <= room):
            length, index = waiting.items.pop()
            batch.append(EmbedItem(waiting.id, index, length))
            waiting.positions -= length
            self.positions -= length
            room -= length
            must = False
        return room
