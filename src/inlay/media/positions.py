"""Three-dimensional rope positions of prompts with media (M-RoPE), by arithmetic from their grids.

A token takes one step in time, height and width at once. The rows of an image or of a run of video
frames count along their grid from where they begin; what follows begins after the longer side of
the grid. Each run of an item is a grid of its own, so frames with their times between as text are
numbered as Qwen3-VL and GLM-4V do, and a video in one run as Qwen2-VL and Qwen2.5-VL do. In
Qwen2.5-Omni what follows a video begins after its last time too. Rows of sound are as tokens.

Source: `get_rope_index` of those models in transformers 5.23; the tests compare with it.
"""

import math
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer, Media, Prompt, RowField, Rows

Positions: TypeAlias = npt.NDArray[np.int32]
"""(3, positions): time, height, width."""

GRID_FIELD = "grid"
"""Name of the bundle field that gives rows made by a client their place in an item's grid.

int32, (rows, 3): index in time, height and width, in steps of rows. As part of the bundle it is
part of the rows' digests. One `Rows` segment is one item.
"""


def rope_positions(prompt: Prompt) -> tuple[Positions, int]:
    """The rope positions of a whole prompt, and what to add to later positions.

    Args:
        prompt: from its first position; items must not be cut.

    Returns:
        int32 of shape (3, T) for T positions, and the delta: the k-th token after the prompt is at
        T + k + delta in all three.

    Raises:
        InvalidRequestError: rows of media that do not fill their grid.
    """
    found = np.empty((3, len(prompt)), np.int32)
    at = begin = 0
    for segment in prompt.segments:
        count = len(segment)
        grid = _grid(segment) if not isinstance(segment, Rows) else _given(segment)
        if grid is None:
            found[:, at : at + count] = np.arange(begin, begin + count, dtype=np.int32)
            begin += count
        else:
            found[:, at : at + count] = grid + begin
            timed = isinstance(segment, Media) and segment.rate > 0
            begin += int(grid[0 if timed else 1 :].max()) + 1
        at += count
    return found, int(found.max()) + 1 - len(prompt) if len(prompt) else 0


def media_runs(prompt: Prompt, offset: int = 0) -> tuple[tuple[int, Media], ...]:
    """(first position, run) of each run of media in a prompt.

    A run has what numbers its positions, and no data. Rows that a client's own encoder made are
    runs too, if the model numbers positions by three axes.

    Args:
        prompt: whole.
        offset: positions before it.
    """
    found: list[tuple[int, Media]] = []
    for position, segment in prompt.spans(0, len(prompt)):
        run = _bare(segment)
        if run is not None:
            found.append((offset + position, run))
    return tuple(found)


def _bare(segment: object) -> Media | None:
    if isinstance(segment, Media):
        return msgspec.structs.replace(segment, digest=b"", data=None, ref=None, param=None)
    index = _given(segment) if isinstance(segment, Rows) else None
    if index is None:
        return None
    times, lines, columns = (int(axis.max()) + 1 for axis in index)
    if times > 1:  # an image has one time: this is sound
        return Media("audio", b"", index.shape[1])
    return Media("image", b"", index.shape[1], grid=(1, lines, columns))


def grid_positions(
    lines: int, columns: int, times: int = 1, interval: float = 1.0, rate: float = 0.0
) -> Positions:
    """Positions along a grid of `times` x `lines` x `columns` rows, from 0.

    Args:
        lines: rows of embeddings along the height.
        columns: along the width.
        times: along the time.
        interval: from one time to the next, as `Media.interval`.
        rate: as `Media.rate`. Times are multiplied in float32, then rounded down.
    """
    time = np.arange(times, dtype=np.float32) * np.float32(interval)
    time = (time * np.float32(rate or 1)).astype(np.int32)
    size = lines * columns
    return np.stack(
        (
            np.repeat(time, size),
            np.tile(np.repeat(np.arange(lines, dtype=np.int32), columns), times),
            np.tile(np.arange(columns, dtype=np.int32), times * lines),
        )
    )


def grid_field(lines: int, columns: int, times: int = 1) -> RowField:
    """The bundle field of the rows of a whole item that a client made."""
    return _field(grid_positions(lines, columns, times))


def line_field(rows: int) -> RowField:
    """The bundle field of the rows of a sound that a client made: they count as tokens do."""
    return _field(np.tile(np.arange(rows, dtype=np.int32), (3, 1)))


def placed(rows: Rows, run: Media) -> Rows:
    """The rows of `run` as rows that keep its positions: with their grid, if it has one."""
    grid = _grid(run)
    if grid is None:
        return rows
    return msgspec.structs.replace(rows, bundle=(*rows.bundle, _field(grid)))


def merged(grid: tuple[int, int, int], rows: int) -> tuple[int, int, int]:
    """The grid in rows, of a grid in patches.

    Raises:
        InvalidRequestError: no number of patches along a side makes it `rows`.
    """
    times, lines, columns = grid
    merge = math.isqrt(times * lines * columns // rows) if rows > 0 else 0
    if not merge or times * (lines // merge) * (columns // merge) != rows:
        raise InvalidRequestError(
            f"a grid of {times} x {lines} x {columns} patches has {rows} rows"
        )
    return times, lines // merge, columns // merge


def _field(positions: Positions) -> RowField:
    index = np.ascontiguousarray(positions.T.astype("<i4"))
    return RowField(GRID_FIELD, Buffer(index.tobytes()), "int32", (len(index), 3))


def _grid(segment: object) -> Positions | None:
    if not isinstance(segment, Media) or segment.grid is None:
        return None
    _, lines, columns = merged(segment.grid, segment.total)
    times, rest = divmod(len(segment), lines * columns)
    if rest or segment.start % (lines * columns):
        raise InvalidRequestError(
            f"a run of {len(segment)} rows from row {segment.start} is no whole number of frames "
            f"of {lines} x {columns} rows"
        )
    return grid_positions(lines, columns, times, segment.interval, segment.rate)


def _given(rows: Rows) -> Positions | None:
    for field in rows.bundle:
        if field.name == GRID_FIELD:
            if field.dtype != "int32" or field.shape != (len(rows), 3):
                raise InvalidRequestError(
                    f"the grid of {len(rows)} rows is {field.dtype} {field.shape}; it must be "
                    f"int32 ({len(rows)}, 3)"
                )
            index = np.frombuffer(field.data.view, "<i4").reshape(-1, 3)
            return np.ascontiguousarray(index.T, np.int32)
    return None
