"""Ready-made embeddings of images and audio: vLLM's JSON forms, and checks before any engine.

A client that runs its own encoder sends rows and, for models that number positions by a grid or
have tokens between the rows, the grid. Rows that do not fill their grid, of another width or not
finite are refused here, and every size is compared as an integer before anything is allocated by
it.

    "image_embeds": "<base64>"
    "image_embeds": {"image_embeds": "<base64>", "image_grid_thw": [1, 8, 8] or "<base64>"}
    "image_embeds": an element of the answer of `/v1/encode`
    "audio_embeds": "<base64>"

A tensor is a file as for `prompt_embeds`; a grid in base64 is one of three integers: a time and,
along the height and width, patches, or what tokens stand between: rows (Mistral 3, Pixtral) or
tiles (Idefics3, SmolVLM, Llama 4). vLLM takes no embeddings for the latter.
"""

import binascii
from typing import Any, NamedTuple

import numpy as np
import pybase64

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.media.audio import AudioChunks, AudioFrames, AudioGeometry
from inlay.media.geometry import AnyResolution, FixedSize, Grid, Layout, PatchGrid, layout_of
from inlay.media.image import read_image_header
from inlay.media.positions import grid_field, line_field
from inlay.media.spec import Detail, ImageGeometry, Kind, MediaSpec, layout
from inlay.media.tiles import Canvas, ChunkTiles, Lines, Split
from inlay.messages.prompt import DTYPE_SIZES, Buffer, Media, RowField, Rows, Segment, Tokens
from inlay.tensors import Tensor, to_rows
from inlay.tensors.integers import MAX_BYTES, read_integers

GRID = "image_grid_thw"

_BESIDE = ("object", "index", "num_tokens")
"""Further keys of an element that `/v1/encode` answers with; they say nothing new."""


class EmbedsPart(NamedTuple):
    """The value of an `image_embeds` or `audio_embeds` part.

    Attributes:
        source: the embeddings as the body held them.
        grid: (time, height, width) in patches, rows or tiles, or None where none was given.
    """

    source: Any
    grid: Grid | None


def parse_embeds(value: object, kind: Kind = "image") -> EmbedsPart:
    """The parts of a value in JSON.

    Raises:
        InvalidRequestError: neither embeddings nor an object that holds them.
    """
    name = f"{kind}_embeds"
    if value is None:
        raise InvalidRequestError(
            f"{name} is null: embeddings are not kept by their uuid; send them again",
            param=name,
        )
    if not isinstance(value, dict):
        return EmbedsPart(value, None)
    allowed = (name, GRID) if kind == "image" else (name,)
    unknown = [str(key)[:40] for key in value if key not in (*allowed, *_BESIDE)]
    if unknown or value.get(name) is None:
        got = ", ".join(repr(key) for key in unknown[:5]) if unknown else f"no {name!r}"
        raise InvalidRequestError(
            f"an object in {name} holds {' and '.join(repr(key) for key in allowed)}; got {got}",
            param=name,
        )
    grid = value.get(GRID)
    return EmbedsPart(value[name], None if grid is None else read_grid(grid))


def read_grid(value: object) -> Grid:
    """A grid: three integers in JSON, alone or as the only row, or a tensor of them in base64.

    Raises:
        InvalidRequestError: anything else, or one below 1.
    """
    try:
        if isinstance(value, str):
            if len(value) > 2 * MAX_BYTES:
                raise EmbeddingsError(f"{len(value)} characters for three integers")
            numbers = read_integers(pybase64.b64decode(value, validate=True), count=3)
        else:
            inner = value[0] if isinstance(value, list) and len(value) == 1 else value
            if not isinstance(inner, list) or not all(type(number) is int for number in inner):
                raise EmbeddingsError("a value that is neither")
            numbers = tuple(inner)
    except (EmbeddingsError, binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"{GRID} is three integers [time, height, width], or a tensor of them in base64; "
            f"got {str(error)[:200]}",
            param=GRID,
        ) from error
    if len(numbers) != 3 or not all(1 <= number < 2**31 for number in numbers):
        raise InvalidRequestError(
            f"{GRID} is three integers from 1, got {str(list(numbers))[:100]}", param=GRID
        )
    return numbers[0], numbers[1], numbers[2]


def grid_beside(spec: MediaSpec, run: Media) -> Grid | None:
    """The grid that an image's rows need beside them, or None where they need none.

    Args:
        spec: of the model.
        run: of the image, with its file.

    Raises:
        InvalidRequestError: no image that the model takes.
    """
    if run.kind != "image" or run.data is None:
        return run.grid
    header = read_image_header(run.data.view, max_pixels=spec.max_pixels)
    detail: Detail | None = "low" if run.detail == "low" else None
    return layout(spec, header.height, header.width, detail).given_grid


def embeds_segments(
    spec: MediaSpec,
    tensor: Tensor,
    *,
    grid: Grid | None,
    hidden_size: int,
    dtype: str,
    max_abs: float | None = None,
    kind: Kind = "image",
) -> list[Segment]:
    """The segments of one item whose rows a client made.

    Args:
        spec: of the model.
        tensor: (rows, width) or (1, rows, width), where the width is the hidden size, or that of
            the rows and of their inner features one after the other, as vLLM has them.
        grid: as the client gave it.
        hidden_size: the model's.
        dtype: the model's activation dtype.
        max_abs: largest magnitude.
        kind: "image" or "audio".

    Raises:
        InvalidRequestError: rows that the model could not have made itself.
    """
    name = f"{kind}_embeds"
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if len(shape) != 2:
        raise InvalidRequestError(
            f"{name} must be a tensor of shape (rows, {hidden_size}) for one {kind}, got "
            f"{tensor.shape}",
            param=name,
        )
    rows = shape[0]
    laid = _image(spec.image, rows, grid) if kind == "image" else _audio(spec.audio, rows)
    wide = hidden_size * (1 + spec.deepstack)
    if shape[1] not in (hidden_size, wide) or (spec.deepstack and shape[1] != wide):
        raise InvalidRequestError(
            f"{name} must be {wide} wide (hidden size {hidden_size}"
            + (f" and {spec.deepstack} levels of inner features" if spec.deepstack else "")
            + f"), got {shape[1]} in shape {tensor.shape}",
            param=name,
        )
    flat = Tensor(tensor.data, tensor.dtype, (rows, wide), tensor.format, tensor.table_id)
    try:
        checked = to_rows(flat, hidden_size=wide, dtype=dtype, max_abs=max_abs)
    except EmbeddingsError as error:
        raise InvalidRequestError(
            error.message.replace("prompt_embeds", name), param=name
        ) from error
    fields = _positions(spec, laid, kind)
    return _segments(laid, _split(checked, hidden_size, fields, spec.atomic))


def _positions(spec: MediaSpec, laid: Layout, kind: Kind) -> tuple[RowField, ...]:
    if spec.mrope and kind == "audio":
        return (line_field(laid.rows),)
    if laid.grid is None or not isinstance(spec.image, PatchGrid):
        return ()
    times, lines, columns = laid.grid
    return (grid_field(lines // spec.image.merge, columns // spec.image.merge, times),)


def _split(whole: Rows, hidden: int, fields: tuple[RowField, ...], atomic: bool) -> Rows:
    """Rows with their inner features, one after the other, to a bundle."""
    levels = whole.shape[1] // hidden
    if levels == 1:
        return Rows(whole.data, whole.dtype, whole.shape, fields, atomic)
    size = DTYPE_SIZES[whole.dtype]
    parts = np.frombuffer(whole.data.view, np.uint8).reshape(len(whole), levels, hidden * size)
    shape = (len(whole), hidden)
    buffers = [Buffer(np.ascontiguousarray(parts[:, level]).data) for level in range(levels)]
    inner = tuple(
        RowField(f"deepstack.{level}", buffer, whole.dtype, shape)
        for level, buffer in enumerate(buffers[1:])
    )
    return Rows(buffers[0], whole.dtype, shape, (*fields, *inner), atomic)


def _segments(laid: Layout, rows: Rows) -> list[Segment]:
    found: list[Segment] = []
    start = 0
    for part in laid.parts:
        if isinstance(part, Tokens):
            found.append(part)
        else:
            found.append(rows if part == len(rows) else rows.slice(start, start + part))
            start += part
    return found


def _image(geometry: ImageGeometry | None, rows: int, grid: Grid | None) -> Layout:
    """The layout of an image that has `rows` rows."""
    if geometry is None:
        raise InvalidRequestError("this model takes no image_embeds")
    if isinstance(geometry, PatchGrid):
        return _patch_grid(geometry, rows, grid)
    if isinstance(geometry, Lines | Split | ChunkTiles):
        return _arranged(geometry, rows, grid)
    if grid is not None:
        raise InvalidRequestError(f"image_embeds of this model take no {GRID}", param=GRID)
    if isinstance(geometry, FixedSize):
        _check(rows == geometry.rows, rows, f"{geometry.rows}")
        return layout_of([Tokens(geometry.start), rows, Tokens(geometry.end)], (0, 0))
    if isinstance(geometry, AnyResolution):
        most = geometry.base_rows + max(
            lines * (columns + 1)
            for height, width in geometry.canvases
            for lines, columns in [
                (geometry.side * (edge // geometry.tile) for edge in (height, width))
            ]
        )
        _check(rows <= most, rows, f"at most {most}")
        return layout_of([rows], (0, 0))
    if isinstance(geometry, Canvas):
        most = (geometry.max_tiles + 1) * geometry.rows
        whole = rows % geometry.rows == 0
        _check(whole and rows <= most, rows, f"a multiple of {geometry.rows}, at most {most}")
    else:
        _check(rows <= geometry.max_rows, rows, f"at most {geometry.max_rows}")
    return layout_of([Tokens((geometry.start,)), rows, Tokens((geometry.end,))], (0, 0))


def _patch_grid(geometry: PatchGrid, rows: int, grid: Grid | None) -> Layout:
    if grid is None:
        raise InvalidRequestError(
            f"image_embeds of this model need {GRID}, [time, height, width] in patches", param=GRID
        )
    times, lines, columns = grid
    merge = geometry.merge
    if times != 1 or lines % merge or columns % merge:
        raise InvalidRequestError(
            f"{GRID} of an image is [1, height, width] with multiples of {merge}, got {list(grid)}",
            param=GRID,
        )
    wanted = lines * columns // merge**2
    _check(rows == wanted, rows, f"{wanted} for {GRID} {list(grid)}")
    return layout_of([rows], (lines * geometry.patch, columns * geometry.patch), grid)


def _arranged(geometry: Lines | Split | ChunkTiles, rows: int, grid: Grid | None) -> Layout:
    """The layout of rows that tokens stand between."""
    parts = "rows" if isinstance(geometry, Lines) else "tiles"
    if grid is None:
        raise InvalidRequestError(
            f"image_embeds of this model need {GRID}, [1, height, width] in {parts}, as tokens "
            "stand between",
            param=GRID,
        )
    times, lines, columns = grid
    tiles = lines * columns
    if isinstance(geometry, Lines):
        most = -(-geometry.max_height // geometry.patch), -(-geometry.max_width // geometry.patch)
        fits = lines <= most[0] and columns <= most[1]
        wanted, bound = tiles, f"at most {most[0]} lines of {most[1]} rows"
    else:
        most_tiles = geometry.max_tiles if isinstance(geometry, ChunkTiles) else geometry.most_tiles
        fits, bound = tiles <= most_tiles, f"at most {most_tiles} tiles"
        wanted = (tiles + (tiles > 1)) * geometry.rows
    if times != 1 or not fits:
        raise InvalidRequestError(
            f"{GRID} of an image of this model is [1, height, width] with {bound}, got "
            f"{list(grid)}",
            param=GRID,
        )
    _check(rows == wanted, rows, f"{wanted} for {GRID} {list(grid)}")
    return geometry.arranged(lines, columns)


def _audio(geometry: AudioGeometry | None, rows: int) -> Layout:
    if isinstance(geometry, AudioFrames):
        most = geometry.layout(geometry.max_samples).rows
        _check(rows <= most, rows, f"at most {most}", "audio")
        return layout_of([rows], (0, 0))
    if isinstance(geometry, AudioChunks):
        _check(rows % geometry.rows == 0, rows, f"a multiple of {geometry.rows}", "audio")
        return layout_of([Tokens((geometry.start,)), rows], (0, 0))
    raise InvalidRequestError("this model takes no audio_embeds")


def _check(right: bool, rows: int, allowed: str, kind: Kind = "image") -> None:
    if not right:
        raise InvalidRequestError(
            f"{kind}_embeds have {rows} rows; this model's have {allowed}", param=f"{kind}_embeds"
        )
