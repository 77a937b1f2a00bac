"""Stop strings in a text that comes in pieces."""

import re
from collections import deque
from collections.abc import Sequence

from inlay.errors import InvalidRequestError


class StopStrings:
    """Finds the first stop string to be complete, wherever the pieces of the text are cut.

    Of several that end at the same character the longest wins, so what is shown holds no part of any. Only text that may
    still become a stop string is held back. The strings are matched all at once, each character looked at once: Aho and
    Corasick, "Efficient string matching" (1975).

    Attributes:
        matched: the stop string that was found, or None.
        shown: characters of the text shown so far.
    """

    __slots__ = ("_held", "_include", "_node", "_starts", "_trie", "matched", "shown")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Nothing is matched yet.

        Args:
            stops: none of them empty; without any, all text is shown at once.
            include: show the stop string too.

        Raises:
            InvalidRequestError: a stop string is empty.
        """
        if not all(stops):
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        self._include = include
        self._trie = _Trie(stops)
        self._starts = (
            re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]") if stops else None
        )
        self._node = 0
        self._held = ""
        self.matched: str | None = None
        self.shown = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more of the text; after a match it is dropped.

        Returns:
            What may be shown now, and the stop string that ended the text, or None.
        """
        if self._starts is None:
            self.shown += len(text)
            return text, None
        if self.matched is not None:
            return "", self.matched
        trie, node = self._trie, self._node
        position, end = 0, len(text)
        while position < end:
            if node == 0:
                start = self._starts.search(text, position)
                if start is None:
                    break
                position = start.start()
            node = trie.step(node, text[position])
            position += 1
            stop = trie.ends[node]
            if stop is not None:
                self.matched = stop
                whole = self._held + text[:position]
                return self._show(whole if self._include else whole[: len(whole) - len(stop)]), stop
        self._node = node
        whole = self._held + text
        keep = len(whole) - trie.depths[node]
        self._held = whole[keep:]
        return self._show(whole[:keep]), None

    def flush(self) -> str:
        """What was held back, when no more text will come; nothing after a match."""
        held = "" if self.matched is not None else self._held
        self._held, self._node = "", 0
        return self._show(held)

    def _show(self, text: str) -> str:
        self.shown += len(text)
        return text


class _Trie:
    """All prefixes of the stop strings as nodes; 0 is the empty one.

    Attributes:
        depths: length of each node's prefix.
        ends: the longest stop string each node's prefix ends with, or None.
    """

    __slots__ = ("_children", "_shorter", "depths", "ends")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            node = 0
            for character in stop:
                following = self._children[node].get(character)
                if following is None:
                    following = self._children[node][character] = len(self.depths)
                    self._children.append({})
                    self.depths.append(self.depths[node] + 1)
                    self.ends.append(None)
                node = following
            self.ends[node] = stop
        # Where to go on when a node has no child for a character: the longest other prefix that its own ends with.
        self._shorter = [0] * len(self.depths)
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            if self.ends[node] is None:
                self.ends[node] = self.ends[self._shorter[node]]
            for character, child in self._children[node].items():
                self._shorter[child] = self.step(self._shorter[node], character)
                queue.append(child)

    def step(self, node: int, character: str) -> int:
        """The longest prefix that `node`'s and then `character` end with."""
        while True:
            following = self._children[node].get(character)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._shorter[node]


__all__ = ["StopStrings"]
