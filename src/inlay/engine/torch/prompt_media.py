"""The images of one prompt: their rows, and the rotary positions that follow from their grids."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from inlay.base.errors import EngineError
from inlay.media.positions import Positions, rope_positions
from inlay.messages.prompt import Media, Prompt, Rows


class PromptMedia:
    """The items of media in a prompt, and the rows of those that have been encoded.

    An item may be several runs with tokens between them, and may occur more than once.
    """

    __slots__ = ("_first", "_last", "_rows")

    def __init__(self, runs: Iterable[tuple[int, Media]]) -> None:
        self._first: dict[bytes, Media] = {}
        self._last: dict[bytes, int] = {}
        self._rows: dict[bytes, Rows] = {}
        for position, run in runs:
            known = self._first.get(run.digest)
            if known is None or (known.data is None and run.data is not None):
                self._first[run.digest] = run
            self._last[run.digest] = position + len(run)

    @classmethod
    def of(cls, prompt: Prompt) -> "PromptMedia | None":
        """Return the media of `prompt`, or None if it has none."""
        runs = [
            (position, segment)
            for position, segment in prompt.spans(0, len(prompt))
            if isinstance(segment, Media)
        ]
        return cls(runs) if runs else None

    def missing(self, start: int) -> list[Media]:
        """Return a run of each item that has positions from `start` on and no rows yet."""
        return [
            run
            for digest, run in self._first.items()
            if self._last[digest] > start and digest not in self._rows
        ]

    def put(self, digest: bytes, rows: Rows) -> None:
        """Set the rows of a whole item; those of an unknown one are dropped.

        Raises `EngineError` unless there are as many as the prompt has room for.
        """
        run = self._first.get(digest)
        if run is None:
            return
        if len(rows) != run.total:
            raise EngineError(
                f"the encoder made {len(rows)} rows of an {run.kind} laid out as {run.total}"
            )
        self._rows[digest] = rows

    def rows(self, run: Media) -> Rows:
        """Return the rows of a run, or of a part of one. Raises `EngineError` if it has none."""
        found = self._rows.get(run.digest)
        if found is None:
            raise EngineError(f"an {run.kind} of the prompt is not encoded")
        return found.slice(run.start, run.start + len(run))


class RopePositions:
    """Rotary positions of a sequence by three axes: time, height, width (M-RoPE)."""

    __slots__ = ("_delta", "_of_prompt")

    def __init__(self, prompt: Prompt) -> None:
        """Number the positions of `prompt`.

        Raises `InvalidRequestError` for rows that do not fill their grid.
        """
        self._of_prompt: Positions | None = None
        self._delta = 0
        if prompt.has_rows:
            self._of_prompt, self._delta = rope_positions(prompt)

    def between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return those of positions `start` to `stop`, [3, stop - start]."""
        length = 0 if self._of_prompt is None else self._of_prompt.shape[1]
        after = np.arange(max(start, length), stop, dtype=np.int64) + self._delta
        after = np.broadcast_to(after, (3, len(after)))
        if self._of_prompt is None or start >= length:
            return after
        return np.concatenate([self._of_prompt[:, start:stop], after], axis=1, dtype=np.int64)
