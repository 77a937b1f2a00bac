"""Layouts of images: the rows and marker tokens that one image of a given size becomes.

One type for each kind of layout; those cut into tiles are in `inlay.media.tiles`. `layout(height,
width)` is integer arithmetic, costs microseconds for any size and allocates by the model's own
limits, never by the client's numbers. `low()` is the same with the least rows the family offers,
for the `detail` "low"; `settings()` are the arguments that make transformers' image processor do
the same as the type says.

The formulas are those of the processors of transformers 5.23; the tests compare with them.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Tokens

MAX_PIXELS = 40_000_000
"""Default bound of an image's pixels, as it comes and while it is resized."""

LOW_SIDE = 512
"""Side in pixels of the square whose area an image of low detail is brought to."""

Part: TypeAlias = Tokens | int
"""Marker tokens, or a number of rows."""

Grid: TypeAlias = tuple[int, int, int]
"""(time, height, width) in patches."""


class Layout(NamedTuple):
    """The positions of one item of media.

    Attributes:
        parts: tokens and numbers of rows, in order; the rows are the encoder's, in order.
        size: (height, width) in pixels of the picture that the encoder sees, without padding;
            where it is cut into tiles, of the canvas they are cut from.
        grid: patches, for models that number positions by it.
        resizing: pixels of the largest picture between the file's and the encoder's.
        shape: (lines, columns) of rows or of tiles, where tokens stand between them.
    """

    parts: tuple[Part, ...]
    size: tuple[int, int]
    grid: Grid | None = None
    resizing: int = 0
    shape: tuple[int, int] | None = None

    @property
    def given_grid(self) -> Grid | None:
        """The grid that a client gives beside an image's rows."""
        return self.grid if self.shape is None else (1, *self.shape)

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part for part in self.parts if isinstance(part, int))

    @property
    def positions(self) -> int:
        """Positions of all parts, tokens included."""
        return sum(part if isinstance(part, int) else len(part) for part in self.parts)


def layout_of(parts: list[Part], size: tuple[int, int], grid: Grid | None = None) -> Layout:
    """A layout of `parts` in normal form: no empty ones, no neighbours of one kind."""
    normal: list[Part] = []
    for part in parts:
        last = normal[-1] if normal else None
        if isinstance(part, int):
            if isinstance(last, int):
                normal[-1] = last + part
            elif part:
                normal.append(part)
        elif isinstance(last, Tokens):
            normal[-1] = Tokens((*last.ids, *part.ids))
        elif part.ids:
            normal.append(part)
    return Layout(tuple(normal), size, grid)


class FixedSize(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """Every image becomes the same number of rows.

    Families: LLaVA-1.5, Gemma 3 without crops.

    Attributes:
        height: that every image is resized to, in pixels.
        width: likewise.
        rows: of an image.
        shorter_side: an image keeps its shape and its shorter side becomes so many pixels; then
            what is beyond `height` and `width` is cut off. None where it is stretched.
        start: tokens before the rows.
        end: tokens after them.
    """

    height: int
    width: int
    rows: int
    shorter_side: int | None = None
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of any size."""
        parts: list[Part] = [Tokens(self.start), self.rows, Tokens(self.end)]
        laid = layout_of(parts, (self.height, self.width))
        if self.shorter_side is None:
            return laid
        lines, columns = (
            self.shorter_side * side // min(height, width) for side in (height, width)
        )
        return laid._replace(resizing=max(height, lines) * columns)

    def low(self) -> "FixedSize":
        """The same."""
        return self

    def settings(self) -> dict[str, Any]:
        return {}


class AnyResolution(msgspec.Struct, frozen=True, kw_only=True, tag="any_resolution"):
    """A base view, then tiles without their padding, with a learnt row at the end of each line.

    Families: LLaVA-NeXT, LLaVA-OneVision. Every image of a prompt is laid out alike, however many
    there are. Low detail changes nothing: the model looks its canvases up in its configuration.

    Attributes:
        tile: side of a tile, in pixels.
        side: patches along a side of a tile.
        base_rows: rows of the base view.
        canvases: (height, width) in pixels of the canvases that may be cut into tiles.
        max_tiles: larger canvases are interpolated down to the area of so many tiles; or None.
        dropped: rows fewer than the sum (a class token that is left out once).
    """

    tile: int
    side: int
    base_rows: int
    canvases: tuple[tuple[int, int], ...]
    max_tiles: int | None = None
    dropped: int = 0

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels."""
        canvas = _best_canvas(height, width, self.canvases)
        lines, columns = (self.side * (edge // self.tile) for edge in canvas)
        # The picture keeps its shape on the canvas; whole lines or columns of padding are dropped.
        if width / height > columns / lines:
            filled = int(round(height * (columns / width), 7))
            lines -= (lines - filled) // 2 * 2
        else:
            filled = int(round(width * (lines / height), 7))
            columns -= (columns - filled) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(lines * columns / (self.max_tiles * self.side**2))
            if ratio > 1.1:
                lines, columns = int(lines // ratio), int(columns // ratio)
        return layout_of([self.base_rows + lines * (columns + 1) - self.dropped], canvas)

    def low(self) -> "AnyResolution":
        """The same."""
        return self

    def settings(self) -> dict[str, Any]:
        return {}


class PatchGrid(msgspec.Struct, frozen=True, kw_only=True, tag="patch_grid"):
    """An image keeps its shape, within bounds of its area, and becomes a grid of patches.

    Families: Qwen2-VL and later, GLM-4V. `merge` x `merge` patches become one row.

    Attributes:
        patch: side of a patch, in pixels.
        merge: patches along a side of what becomes one row.
        min_pixels: smallest area, in pixels of all counted frames.
        max_pixels: largest.
        frames: an image counts as so many equal frames in its area.
        enlarge: images smaller than one row are enlarged before their shape is judged.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    frames: int = 1
    enlarge: bool = False

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels.

        Raises:
            InvalidRequestError: one side is more than 200 times the other.
        """
        size = self.resized(height, width)
        grid = (1, size[0] // self.patch, size[1] // self.patch)
        return layout_of([grid[1] * grid[2] // self.merge**2], size, grid)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels of what is cut into patches.

        Raises:
            InvalidRequestError: one side is more than 200 times the other.
        """
        return fit(
            height,
            width,
            self.patch * self.merge,
            (self.min_pixels, self.max_pixels),
            frames=self.frames,
            counted=self.frames,
            enlarge=self.enlarge,
        )

    def low(self) -> "PatchGrid":
        """The same within the area of a square of `LOW_SIDE` pixels."""
        limit = max(self.min_pixels, self.frames * LOW_SIDE**2)
        return msgspec.structs.replace(self, max_pixels=min(self.max_pixels, limit))

    def settings(self) -> dict[str, Any]:
        """Bounds of the area."""
        return {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}


def fit(
    height: int,
    width: int,
    factor: int,
    area: tuple[int, int],
    *,
    frames: int = 1,
    counted: int = 1,
    enlarge: bool = False,
) -> tuple[int, int]:
    """(height, width) near a picture's shape, multiples of `factor`, within an area.

    Args:
        height: of the picture.
        width: likewise.
        factor: in pixels.
        area: smallest and largest, in pixels of all frames.
        frames: that the picture's own area is counted with.
        counted: that the result's area is counted with.
        enlarge: a picture smaller than `factor` is enlarged before its shape is judged.

    Raises:
        InvalidRequestError: one side is more than 200 times the other.
    """
    given = f"{width} x {height}"
    if enlarge and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise InvalidRequestError(
            f"a picture is {given} pixels; the longer side may be at most 200 times the shorter"
        )
    lines, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * lines * columns > area[1]:
        beta = math.sqrt((frames * height * width) / area[1])
        lines = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif counted * lines * columns < area[0]:
        beta = math.sqrt(area[0] / (frames * height * width))
        lines = math.ceil(height * beta / factor) * factor
        columns = math.ceil(width * beta / factor) * factor
    return lines, columns


def _best_canvas(height: int, width: int, canvases: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The canvas that keeps most of an image's pixels and, among those, wastes least."""
    best, most, least = canvases[0], 0, math.inf
    for lines, columns in canvases:
        scale = min(columns / width, lines / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = lines * columns - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (lines, columns), kept, wasted
    return best
