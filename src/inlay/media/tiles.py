"""Layouts of images that are cut into tiles or lines, with marker tokens between.

As `inlay.media.geometry`, of which `ImageGeometry` is the union with these.
"""

import math
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.media.geometry import LOW_SIDE, Layout, Part, layout_of
from inlay.messages.prompt import Tokens

_single = struct.Struct("<f")

SPLIT_MAX_SIDE = 4096
"""Largest side of a picture before Idefics3 and SmolVLM cut it, in pixels."""


class Canvas(msgspec.Struct, frozen=True, kw_only=True, tag="canvas"):
    """An image is stretched over the canvas of tiles nearest to its shape; then a small view of it.

    Family: InternVL.

    Attributes:
        tile: (height, width) of a tile, in pixels.
        rows: of a tile.
        min_tiles: of a canvas.
        max_tiles: of a canvas; 1 where images are not cut.
        start: token before all rows.
        end: token after them.
    """

    tile: tuple[int, int]
    rows: int
    min_tiles: int
    max_tiles: int
    start: int
    end: int

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels."""
        columns, lines = self._shape(height, width) if self.max_tiles > 1 else (1, 1)
        tiles = columns * lines
        views = tiles + 1 if tiles > 1 else 1
        return layout_of(
            [Tokens((self.start,)), views * self.rows, Tokens((self.end,))],
            (lines * self.tile[0], columns * self.tile[1]),
        )

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        sides = range(1, self.max_tiles + 1)
        shapes = [
            (columns, lines)
            for columns in sides
            for lines in sides
            if self.min_tiles <= columns * lines <= self.max_tiles
        ]
        best, least = (1, 1), math.inf
        for shape in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            difference = abs(width / height - shape[0] / shape[1])
            area = self.tile[0] * self.tile[1] * shape[0] * shape[1]
            if difference < least or (difference == least and width * height > 0.5 * area):
                best, least = shape, difference
        return best

    def low(self) -> "Canvas":
        """One view, not cut."""
        return msgspec.structs.replace(self, min_tiles=1, max_tiles=1)

    def settings(self) -> dict[str, Any]:
        """Numbers of tiles."""
        return {
            "crop_to_patches": self.max_tiles > 1,
            "min_patches": self.min_tiles,
            "max_patches": self.max_tiles,
        }


class Lines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """An image keeps its shape within a bound of its sides; a token ends each line of rows.

    Families: Pixtral, Mistral 3.

    Attributes:
        patch: side in pixels of what becomes one row.
        max_height: in pixels.
        max_width: in pixels.
        line_end: token after a line.
        end: token after the last line, in its place.
    """

    patch: int
    max_height: int
    max_width: int
    line_end: int
    end: int

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels."""
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return self.arranged(-(-height // self.patch), -(-width // self.patch))

    def arranged(self, lines: int, columns: int) -> Layout:
        """The layout of `lines` x `columns` rows."""
        parts: list[Part] = [columns, Tokens((self.line_end,))] * (lines if columns else 0)
        if parts:
            parts[-1] = Tokens((self.end,))
        laid = layout_of(parts, (lines * self.patch, columns * self.patch))
        return laid._replace(shape=(lines, columns))

    def low(self) -> "Lines":
        """The same within `LOW_SIDE` pixels."""
        return msgspec.structs.replace(
            self, max_height=min(self.max_height, LOW_SIDE), max_width=min(self.max_width, LOW_SIDE)
        )

    def settings(self) -> dict[str, Any]:
        """Bounds of the sides."""
        if self.max_height == self.max_width:
            return {"size": {"longest_edge": self.max_height}}
        return {"size": {"height": self.max_height, "width": self.max_width}}


class Split(msgspec.Struct, frozen=True, kw_only=True, tag="split"):
    """An image is enlarged to a longest side and cut into named tiles; then a small view of it.

    Families: Idefics3, SmolVLM.

    Attributes:
        longest: side in pixels that the longer one is brought to.
        tile: side of a tile, in pixels.
        rows: of a tile.
        cut: False where images are not cut.
        around: token before each tile and after all.
        names: tokens that name a tile, by line and column.
        whole: tokens that name the small view.
        line_end: tokens after a line of tiles.
        last_line_end: tokens after the last line.
    """

    longest: int
    tile: int
    rows: int
    cut: bool
    around: int
    names: tuple[tuple[tuple[int, ...], ...], ...]
    whole: tuple[int, ...]
    line_end: tuple[int, ...]
    last_line_end: tuple[int, ...]

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels.

        Raises:
            InvalidRequestError: more tiles than the vocabulary has names for.
        """
        return self.arranged(*(self._shape(height, width) if self.cut else (1, 1)))

    def arranged(self, lines: int, columns: int) -> Layout:
        """The layout of `lines` x `columns` tiles.

        Raises:
            InvalidRequestError: more than the vocabulary has names for.
        """
        parts: list[Part] = []
        if lines * columns > 1:
            if lines > len(self.names) or columns > len(self.names[0]):
                raise InvalidRequestError(
                    f"an image is cut into {lines} x {columns} tiles; at most {len(self.names)} "
                    "lines have names"
                )
            for line in range(lines):
                for name in self.names[line][:columns]:
                    parts += [Tokens((self.around, *name)), self.rows]
                parts.append(Tokens(self.line_end if line < lines - 1 else self.last_line_end))
        parts += [Tokens((self.around, *self.whole)), self.rows, Tokens((self.around,))]
        laid = layout_of(parts, (lines * self.tile, columns * self.tile))
        return laid._replace(shape=(lines, columns))

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        """Lines and columns of tiles."""
        shape = width / height
        if width >= height:
            width = self.longest
            height = _even(int(width / shape))
        else:
            height = self.longest
            width = _even(int(height * shape))
        height, width = max(height, 1), max(width, 1)
        shape = width / height
        if width >= height and width > SPLIT_MAX_SIDE:
            width, height = SPLIT_MAX_SIDE, int(SPLIT_MAX_SIDE / shape)
        elif height > width and height > SPLIT_MAX_SIDE:
            height, width = SPLIT_MAX_SIDE, int(SPLIT_MAX_SIDE * shape)
        height, width = max(height, 1), max(width, 1)
        shape = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = int(width / shape)
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = int(height * shape)
        return max(1, math.ceil(height / self.tile)), max(1, math.ceil(width / self.tile))

    @property
    def most_tiles(self) -> int:
        """Tiles of the largest arrangement that has names, without the small view."""
        return len(self.names) ** 2 if self.cut else 1

    def low(self) -> "Split":
        """The small view alone."""
        return msgspec.structs.replace(self, cut=False)

    def settings(self) -> dict[str, Any]:
        """Cut or not."""
        return {"do_image_splitting": self.cut}


class ChunkTiles(msgspec.Struct, frozen=True, kw_only=True, tag="chunks"):
    """An image is put on the canvas of square tiles that shrinks it least; then a small view of it.

    Family: Llama 4.

    Attributes:
        tile: side of a tile, in pixels.
        rows: of a tile.
        max_tiles: of a canvas.
        largest: the canvas that enlarges most is taken, not the one that enlarges least.
        start: token before all.
        column_end: token after each tile of a line but the last.
        line_end: token after each line of tiles.
        whole: token before the small view.
        end: token after all.
    """

    tile: int
    rows: int
    max_tiles: int
    largest: bool
    start: int
    column_end: int
    line_end: int
    whole: int
    end: int

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels."""
        return self.arranged(*self._shape(height, width))

    def arranged(self, lines: int, columns: int) -> Layout:
        """The layout of `lines` x `columns` tiles."""
        parts: list[Part] = [Tokens((self.start,))]
        if lines * columns > 1:
            for _ in range(lines):
                line: list[Part] = [self.rows, Tokens((self.column_end,))] * columns
                parts += [*line[:-1], Tokens((self.line_end,))]
        parts += [Tokens((self.whole,)), self.rows, Tokens((self.end,))]
        laid = layout_of(parts, (lines * self.tile, columns * self.tile))
        return laid._replace(shape=(lines, columns))

    def _shape(self, height: int, width: int) -> tuple[int, int]:
        """Lines and columns of tiles. Ratios are float32, as those of the processor are."""
        scales = {
            (lines, columns): min(
                _divide(lines * self.tile, height), _divide(columns * self.tile, width)
            )
            for lines, columns in self._canvases()
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        choose = min if larger and not self.largest else max
        chosen = choose(larger or scales.values())
        fitting = [shape for shape, scale in scales.items() if scale == chosen]
        return min(fitting, key=lambda shape: shape[0] * shape[1])

    def _canvases(self) -> Iterable[tuple[int, int]]:
        """(lines, columns), in the processor's order: by the shape that comes first."""
        by_shape: dict[float, list[tuple[int, int]]] = {}
        for tiles in range(self.max_tiles, 0, -1):
            for lines in range(1, tiles + 1):
                if tiles % lines == 0:
                    columns = tiles // lines
                    by_shape.setdefault(lines / columns, []).append((lines, columns))
        return (canvas for canvases in by_shape.values() for canvas in canvases)

    def low(self) -> "ChunkTiles":
        """One tile."""
        return msgspec.structs.replace(self, max_tiles=1)

    def settings(self) -> dict[str, Any]:
        """Number of tiles."""
        return {"max_patches": self.max_tiles}


class Pooled(msgspec.Struct, frozen=True, kw_only=True, tag="pooled"):
    """An image keeps its shape and is brought to the largest grid within a number of rows.

    Family: Gemma 4.

    Attributes:
        patch: side of a patch, in pixels.
        pool: patches along a side of what becomes one row.
        max_rows: of an image.
        low_rows: the same with low detail.
        start: token before the rows.
        end: token after them.
    """

    patch: int
    pool: int
    max_rows: int
    low_rows: int
    start: int
    end: int

    def layout(self, height: int, width: int) -> Layout:
        """The layout of an image of `height` x `width` pixels."""
        side = self.patch * self.pool
        factor = math.sqrt(self.max_rows * side**2 / (height * width))
        lines = math.floor(factor * height / side)
        columns = math.floor(factor * width / side)
        if not lines and columns:
            lines, columns = 1, min(math.floor(width / height), self.max_rows)
        elif lines and not columns:
            lines, columns = min(math.floor(height / width), self.max_rows), 1
        return layout_of(
            [Tokens((self.start,)), lines * columns, Tokens((self.end,))],
            (lines * side, columns * side),
        )

    def low(self) -> "Pooled":
        """The same within fewer rows."""
        return msgspec.structs.replace(self, max_rows=self.low_rows)

    def settings(self) -> dict[str, Any]:
        """Number of rows."""
        return {"max_soft_tokens": self.max_rows}


def _even(side: int) -> int:
    return side + side % 2


def _divide(first: int, second: int) -> float:
    """`first / second` of two float32, rounded to float32."""
    dividend, divisor = (_rounded(float(number)) for number in (first, second))
    # A float64 has more than twice the bits of a float32, so rounding twice rounds right.
    return _rounded(dividend / divisor)


def _rounded(number: float) -> float:
    return float(_single.unpack(_single.pack(number))[0])
